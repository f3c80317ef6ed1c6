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
from uuid import UUID

from dedup.core.exact_json import Unreadable, with_foreign_format
from dedup.errors import InvariantBroken

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
_prefix: Final[Callable[[Any], Any]] = itemgetter(slice(0, PREFIX_BYTES))
_payload: Final[Callable[[Any], Any]] = itemgetter(slice(PREFIX_BYTES, None))


SchemaRef = bytes
"""A schema's ID as the framing has it: byte 0 and four bytes, or byte 1 and the 16 bytes of a GUID."""


def named(ref: SchemaRef) -> str:
    """Return a schema's ID or GUID as a registry and its users write it."""
    return str(UUID(bytes=ref[1:])) if ref[:1] == b"\1" else str(int.from_bytes(ref[1:], "big"))


class SchemaBook(dict[SchemaRef, str | None]):
    """The schemas of a registry by their IDs, as far as they are known; None for an ID that the registry does not know.

    Looking up an ID that was not asked for yet calls ``ask``, or raises InvariantBroken if there is none.
    """

    def __init__(self, ask: Callable[[SchemaRef], str | None] | None = None) -> None:
        super().__init__()
        self._ask: Final = ask

    def __missing__(self, ref: SchemaRef) -> str | None:
        if self._ask is None:
            raise InvariantBroken(f"schema {named(ref)} was not asked for before a record was judged; report this.")
        found = self[ref] = self._ask(ref)
        return found


def payload_of(place: SchemaIdPlace, value: bytes, headers: _Headers) -> bytes:
    """Return the payload of a value. Raises Unreadable if the framing of the value is missing or damaged."""
    return split(place, value, headers)[1]


def split(place: SchemaIdPlace, value: bytes, headers: _Headers) -> tuple[SchemaRef, bytes]:
    """Return the schema ID and the payload of a value. Raises Unreadable if there is no framing, or a damaged one."""
    ids = [content for name, content in headers if name == HEADER] if place != "prefix" else []
    if len(ids) > 1:
        raise Unreadable("repeated_header", f"the header {HEADER} occurs {len(ids)} times")
    if ids:
        if not _is_id(ids[0]):
            raise Unreadable("bad_schema_id", f"the header {HEADER} holds neither a schema id nor a schema GUID")
        return ids[0] or b"", value
    if place == "header":
        raise Unreadable("schema_id_missing", f"the header {HEADER} is missing")
    if value[:1] not in {b"", b"\0"}:
        raise with_foreign_format(value, "wrong_magic_byte", "the value has no framing, which begins with byte 0")
    if len(value) < PREFIX_BYTES:
        text = f"the value has {len(value)} bytes, and its framing alone has {PREFIX_BYTES}"
        raise Unreadable("truncated_framing", text)
    return value[:PREFIX_BYTES], value[PREFIX_BYTES:]


def refs_of(
    place: SchemaIdPlace, values: Sequence[bytes | None], headers: Sequence[_Headers]
) -> list[SchemaRef | None]:
    """Return the schema ID of each value, or None for a null value and for one whose framing is damaged."""
    in_prefix = place == "prefix" or (place == "auto" and HEADER not in map(_name, chain.from_iterable(headers)))
    if values and in_prefix and payloads_of("prefix", values, headers) is not None:
        return list(map(_prefix, values))
    found: list[SchemaRef | None] = []
    for value, row in zip(values, headers, strict=True):
        try:
            found.append(None if value is None else split(place, value, row)[0])
        except Unreadable:
            found.append(None)
    return found


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
