"""Separates the payload of a value from the framing with which a schema registry's serializers name its schema.

A schema ID is either before the payload (byte 0, then four bytes) or in the header `HEADER` (byte 0 and four bytes, or
byte 1 and the 16 bytes of a GUID), in which case the value is the payload. Source: `dual_schema_id_deserializer` and
`SchemaId` in confluent_kafka/schema_registry of confluent-kafka-python 2.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, Literal, cast

from dedup.core.exact_json import Unreadable, with_foreign_format

SchemaIdPlace = Literal["auto", "header", "prefix"]
"""Where the schema ID of a value is. With auto, it is in the header if the record has one, otherwise in the prefix."""

HEADER: Final = "__value_schema_id"
PREFIX_BYTES: Final = 5
_ID_BYTES: Final = {b"\0": PREFIX_BYTES, b"\1": 17}
"""The lengths of schema IDs, by their first byte. A GUID (byte 1) is only in headers."""

_ONE: Final = b"\0\0\0\0\1"
_Headers = Sequence[tuple[str, bytes | None]]
_name: Final[Callable[[Any], Any]] = itemgetter(0)
_first: Final[Callable[[Any], Any]] = itemgetter(slice(0, 1))
_payload: Final[Callable[[Any], Any]] = itemgetter(slice(PREFIX_BYTES, None))


def payload_of(place: SchemaIdPlace, value: bytes, headers: _Headers) -> bytes:
    """Return the payload of a value. Raises Unreadable if the framing of the value is missing or damaged."""
    ids = [content for name, content in headers if name == HEADER] if place != "prefix" else []
    if len(ids) > 1:
        raise Unreadable("repeated_header", f"the header {HEADER} occurs {len(ids)} times")
    if ids:
        if not _is_id(ids[0]):
            raise Unreadable("bad_schema_id", f"the header {HEADER} holds neither a schema id nor a schema GUID")
        return value
    if place == "header":
        raise Unreadable("schema_id_missing", f"the header {HEADER} is missing")
    if value[:1] not in {b"", b"\0"}:
        raise with_foreign_format(value, "wrong_magic_byte", "the value has no framing, which begins with byte 0")
    if len(value) < PREFIX_BYTES:
        text = f"the value has {len(value)} bytes, and its framing alone has {PREFIX_BYTES}"
        raise Unreadable("truncated_framing", text)
    return value[PREFIX_BYTES:]


def payloads_of(
    place: SchemaIdPlace, values: Sequence[bytes | None], headers: Sequence[_Headers]
) -> Sequence[bytes | None] | None:
    """Return the payloads of a column of values, or None if any row must be passed to `payload_of`."""
    if None in values:
        return None
    there = cast("Sequence[bytes]", values)
    if place == "prefix" or (place == "auto" and HEADER not in map(_name, chain.from_iterable(headers))):
        framed = min(map(len, there)) >= PREFIX_BYTES and set(map(_first, there)) == {b"\0"}
        return list(map(_payload, there)) if framed else None
    ids = [[content for name, content in row if name == HEADER] for row in headers]
    if all(len(found) == 1 and _is_id(found[0]) for found in ids):
        return there
    return None


def framed(place: SchemaIdPlace | None, payload: bytes) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
    """Return the value and the added headers that a serializer sends for a payload whose schema has the ID 1.

    If ``place`` is None, values have no framing.
    """
    if place is None:
        return payload, ()
    return (payload, ((HEADER, _ONE),)) if place == "header" else (_ONE + payload, ())


def _is_id(content: bytes | None) -> bool:
    return content is not None and len(content) == _ID_BYTES.get(content[:1])
