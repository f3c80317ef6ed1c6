"""A state key as a person writes the ID: the way back from the frozen encoding, where there is one."""

from __future__ import annotations

import json
from typing import Final
from uuid import UUID as Uuid  # noqa: N811  # the tag has the name

from dedup.core.tracking_id import (
    BIG_INTEGER,
    BYTES,
    COMPOSITE,
    CONTENT,
    DECIMAL,
    FALSE,
    INTEGER,
    TEXT,
    TRUE,
    UUID,
)

_LENGTH_BITS: Final = 7
_MORE: Final = 1 << _LENGTH_BITS


def id_text(key: bytes) -> str | None:
    """Return the ID in the words that `dedup lookup` takes; None for a digest, which leads back to no ID.

    Bytes that are no UTF-8 are shown with replacement marks, and can not be looked up by them.
    """
    tag, body = key[:1], key[1:]
    if tag == COMPOSITE:
        parts = [_json(part) for part in _parts(body)]
        return None if None in parts else f"[{', '.join(filter(None, parts))}]"
    if tag in {TEXT, BYTES, CONTENT, BIG_INTEGER, DECIMAL}:
        return body.decode(errors="replace")
    if tag == UUID:
        return str(Uuid(bytes=body))
    if tag == INTEGER:
        return str(int.from_bytes(body, "big", signed=True))
    return {TRUE: "true", FALSE: "false"}.get(tag)


def _json(key: bytes) -> str | None:
    """Return one part of a composite as JSON: a text in quotes, a number as it is."""
    text = id_text(key)
    if text is None or key[:1] not in {TEXT, BYTES, UUID}:
        return text
    return json.dumps(text, ensure_ascii=False)


def _parts(body: bytes) -> list[bytes]:
    parts = []
    at = 0
    while at < len(body):
        length = shift = 0
        while True:
            byte = body[at]
            at += 1
            length |= (byte & (_MORE - 1)) << shift
            shift += _LENGTH_BITS
            if byte < _MORE:
                break
        parts.append(body[at : at + length])
        at += length
    return parts
