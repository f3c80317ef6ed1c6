"""Canonical content, quickly where that is sure to be exact.

The decoder hands numbers with a fraction over as they are written, and the encoder sorts members at every depth, so
both are exact. What is left to check: the decoder takes the last of repeated members. Without a backslash in the
value, every text and name is two quotes; a dropped member's quotes are missing from what is written back. (Nothing is
skipped here, so the decoder sees every byte that is not UTF-8.)
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dedup.core.exact_json import MAX_DEPTH, Excluded, Number, Unreadable, canonical_json, decode, excluded
from dedup.core.paths import Path

_REFUSALS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, Unreadable)
"""What the quick way may meet; the exact way then says what it is."""
_SHORT_BYTES: Final = 2 * MAX_DEPTH


def content_of(value: bytes, exclude: tuple[Path, ...]) -> bytes:
    """Return `canonical_json` of a JSON value. Raises Unreadable as `decode` and `canonical_json` do."""
    without = excluded(exclude)
    quick = _quick(value, without)
    return canonical_json(decode(value), without) if quick is None else quick


def _quick(value: bytes, without: Excluded) -> bytes | None:
    if b"\\" in value or not _is_shallow(value):
        return None
    try:
        content = _DECODER.decode(value)
        whole = _ENCODER.encode(content)
        if whole.count(b'"') != value.count(b'"'):
            return None
        if not without:
            return whole
        _leave_out(content, without)
        return _ENCODER.encode(content)
    except _REFUSALS:
        return None


def _is_shallow(value: bytes) -> bool:
    return len(value) <= _SHORT_BYTES or value.count(b"{") + value.count(b"[") <= MAX_DEPTH


def _leave_out(content: object, without: Excluded) -> None:
    """Take the excluded members and elements out of a decoded value. Recurses only as deep as the paths go."""
    if isinstance(content, dict):
        for name in [step for step in without if step in content]:
            _leave_out_at(content, name, without[name])
    elif isinstance(content, list):
        # From the end, so that positions in front stay what they were.
        places = [step for step in without if isinstance(step, int) and step < len(content)]
        for place in sorted(places, reverse=True):
            _leave_out_at(content, place, without[place])


def _leave_out_at(content: Any, step: str | int, below: Excluded | None) -> None:  # noqa: ANN401 - a dict or a list
    if below is None:
        del content[step]
    else:
        _leave_out(content[step], below)


def _as_written(text: str) -> msgspec.Raw:
    # Raw goes out as it is. (A Number, being a dataclass, would be written as an object.)
    return msgspec.Raw(Number(text).decimal_text().encode())


_DECODER: Final = msgspec.json.Decoder(float_hook=_as_written)
_ENCODER: Final = msgspec.json.Encoder(order="sorted")
