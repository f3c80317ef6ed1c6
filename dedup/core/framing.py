"""Separates a value's payload from the framing that a schema registry's serializers add to identify the schema.

A schema ID is either before the payload (byte 0, then four bytes) or in the header `HEADER` (byte 0 and four bytes, or
byte 1 and the 16 bytes of a GUID). If the header contains the schema ID, the whole value is the payload. The framing of
a record's key has the same form, with the header `KEY_HEADER`. With Protobuf (``indexed``), the schema ID is followed
by message indexes, which identify a message type of the schema. Source: `dual_schema_id_deserializer` and `SchemaId` in
confluent_kafka/schema_registry of confluent-kafka-python 2.16.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Final, Literal, Self, cast
from uuid import UUID

from dedup.core.exact_json import Unreadable, with_foreign_format
from dedup.errors import InvariantBroken

SchemaIdPlace = Literal["auto", "header", "prefix"]
"""The place of a schema ID. With auto, the ID is in the header if the record has one, and otherwise in the prefix."""

HEADER: Final = "__value_schema_id"
KEY_HEADER: Final = "__key_schema_id"
PREFIX_BYTES: Final = 5
_ID_BYTES: Final = {b"\0": PREFIX_BYTES, b"\1": 17}
"""Maps the first byte of a schema ID to the ID's length. A GUID (byte 1) occurs only in headers."""

_ONE: Final = b"\0\0\0\0\1"
_Headers = Sequence[tuple[str, bytes | None]]
_name: Final[Callable[[Any], Any]] = itemgetter(0)
_first: Final[Callable[[Any], Any]] = itemgetter(slice(0, 1))
_sixth: Final[Callable[[Any], Any]] = itemgetter(slice(PREFIX_BYTES, PREFIX_BYTES + 1))
FRAMING_FAULTS: Final = frozenset(
    {
        "bad_message_indexes",
        "bad_schema_id",
        "repeated_header",
        "schema_id_missing",
        "truncated_framing",
        "wrong_magic_byte",
    }
)
"""The dead-letter reasons for values whose framing is missing or damaged, and therefore names no schema."""
_MOST_INDEXES: Final = 100
_MOST_INDEX: Final = 1 << 20
_INDEX_BYTES: Final = 4
"""The maximum length of an encoded message index."""
_MORE: Final = 0x80
"""The bit of a byte that is set if another byte of the number follows."""


SchemaRef = bytes
"""A schema ID as encoded in the framing: byte 0 and four bytes, or byte 1 and the 16 bytes of a GUID.

With Protobuf, message indexes may follow the ID.
"""


def schema_of(ref: SchemaRef) -> SchemaRef:
    """Return the schema ID in a reference, without any message indexes."""
    return ref[: _ID_BYTES.get(ref[:1])]


def indexes_of(ref: SchemaRef) -> tuple[int, ...]:
    """Return the message indexes after a schema ID or, if there are none, the index of the schema's first message."""
    return _indexes(ref, len(schema_of(ref)))[0] if len(ref) > len(schema_of(ref)) else (0,)


def named(ref: SchemaRef) -> str:
    """Return a schema's ID in decimal digits, or its GUID in the usual notation."""
    number = schema_of(ref)[1:]
    return str(UUID(bytes=number)) if ref[:1] == b"\1" else str(int.from_bytes(number, "big"))


def ref_named(name: str) -> SchemaRef:
    """Convert a name returned by `named` back to the schema ID.

    Raises ValueError if ``name`` is not valid, or OverflowError if the ID does not fit into 32 bits.
    """
    if name.isdecimal() and name.isascii():
        return b"\0" + int(name).to_bytes(PREFIX_BYTES - 1, "big")
    return b"\1" + UUID(name).bytes


MOST_SCHEMA_CHARS: Final = 1 << 20
"""The maximum length of a schema, including the schemas that it refers to."""


class SchemaRefused(ValueError):
    """Raised if a schema is invalid or does not describe records.

    The message begins with a verb, so that it can follow the schema's name in an error text.
    """


@dataclass(frozen=True, slots=True)
class LinkedSchema:
    """The text of a schema that refers to other schemas in the registry, together with the texts of these schemas."""

    text: str
    references: tuple[tuple[str, str], ...] = ()
    """The name and text of each schema referred to, directly or not. Each schema follows its own references."""
    fault: str = ""
    """The message of a `SchemaRefused` if the references cannot be used, or an empty string."""


SchemaText = str | LinkedSchema
"""A schema. Text alone refers to no other schemas."""


def linked(schema: SchemaText) -> LinkedSchema:
    """Return a schema as a `LinkedSchema`. Raises SchemaRefused if it has a fault or too many characters."""
    whole = LinkedSchema(schema) if isinstance(schema, str) else schema
    if whole.fault:
        raise SchemaRefused(whole.fault)
    size = len(whole.text) + sum(len(text) for _, text in whole.references)
    if size > MOST_SCHEMA_CHARS:
        raise SchemaRefused(f"has {size:,} characters, more than {MOST_SCHEMA_CHARS:,}")
    return whole


def in_reference(name: str, refused: SchemaRefused) -> SchemaRefused:
    """Return the error for a schema that refers, by the given name, to a schema that was refused."""
    return SchemaRefused(f"refers to {ascii(name[:64])[1:-1]}, which {refused}")


def in_pinned(refused: SchemaRefused) -> SchemaRefused:
    """Return the error for a schema whose values must be read with a pinned schema that was refused."""
    return SchemaRefused(f"is read with the pinned schema, which {refused}")


class SchemaBook(dict[SchemaRef, SchemaText | None]):
    """Caches a registry's schemas by ID, with None for each ID that the registry does not know.

    Looking up an ID that is not cached calls ``ask``, or raises InvariantBroken if ``ask`` is None. With
    ``keeps_unknown=False``, the answer None is not cached, because a registry may know the ID later.
    """

    def __init__(
        self, ask: Callable[[SchemaRef], SchemaText | None] | None = None, *, keeps_unknown: bool = True
    ) -> None:
        super().__init__()
        self._ask: Final = ask
        self._keeps_unknown: Final = keeps_unknown

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[object, ...]]:
        # The cache is not pickled, because the registry may know more schemas by the time that a process loads the
        # pickle.
        return partial(type(self), keeps_unknown=self._keeps_unknown), (self._ask,)

    def __missing__(self, ref: SchemaRef) -> SchemaText | None:
        if self._ask is None:
            raise InvariantBroken(f"schema {named(ref)} was not asked for before a record was judged; report this.")
        found = self._ask(ref)
        if found is not None or self._keeps_unknown:
            self[ref] = found
        return found


def payload_of(
    place: SchemaIdPlace, value: bytes, headers: _Headers, *, indexed: bool = False, header: str = HEADER
) -> bytes:
    """Return the payload of a value. Raises Unreadable if the framing of the value is missing or damaged."""
    return split(place, value, headers, indexed=indexed, header=header)[1]


def split(
    place: SchemaIdPlace, value: bytes, headers: _Headers, *, indexed: bool = False, header: str = HEADER
) -> tuple[SchemaRef, bytes]:
    """Return the schema ID and the payload of a value. Raises Unreadable if the framing is missing or damaged.

    If ``indexed`` is true, message indexes follow the schema ID. ``header`` is the name of the header that may contain
    the schema ID.
    """
    ids = [content for name, content in headers if name == header] if place != "prefix" else []
    if len(ids) > 1:
        raise Unreadable("repeated_header", f"the header {header} occurs {len(ids)} times")
    if ids:
        if not _is_id(ids[0], indexed=indexed):
            raise Unreadable("bad_schema_id", f"the header {header} holds neither a schema id nor a schema GUID")
        return ids[0] or b"", value
    if place == "header":
        raise Unreadable("schema_id_missing", f"the header {header} is missing")
    if value[:1] not in {b"", b"\0"}:
        raise with_foreign_format(value, "wrong_magic_byte", "the value has no framing, which begins with byte 0")
    if len(value) < PREFIX_BYTES:
        text = f"the value has {len(value)} bytes, and its framing alone has {PREFIX_BYTES}"
        raise Unreadable("truncated_framing", text)
    end = _indexes(value, PREFIX_BYTES)[1] if indexed else PREFIX_BYTES
    return value[:end], value[end:]


def _indexes(text: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """Return the message indexes at a position, and where they end. Raises Unreadable if the indexes are damaged."""
    count, at = _zigzag(text, at, _MOST_INDEXES)
    found: list[int] = []
    for _ in range(count):
        index, at = _zigzag(text, at, _MOST_INDEX)
        found.append(index)
    return tuple(found) or (0,), at


def _zigzag(text: bytes, at: int, most: int) -> tuple[int, int]:
    raw = shift = 0
    for byte in text[at : at + _INDEX_BYTES]:
        raw |= (byte & (_MORE - 1)) << shift
        shift += 7
        if byte < _MORE:
            if raw & 1 or raw >> 1 > most:
                break
            return raw >> 1, at + shift // 7
    else:
        if shift < 7 * _INDEX_BYTES:
            raise Unreadable("truncated_framing", "the value ends inside the message indexes of its framing")
    raise Unreadable("bad_message_indexes", "the message indexes of the value's framing are damaged")


def refs_of(
    place: SchemaIdPlace,
    values: Sequence[bytes | None],
    headers: Sequence[_Headers],
    *,
    indexed: bool = False,
    header: str = HEADER,
) -> list[SchemaRef | None]:
    """Return the schema ID of each value, with None for null values and for values whose framing is damaged."""
    return _parts_of(0, place, values, headers, indexed=indexed, header=header)


def rows_by_ref(refs: Sequence[SchemaRef | None]) -> list[list[int]]:
    """Group the rows by schema ID in a single pass, because every row may have a different schema ID."""
    rows: defaultdict[SchemaRef | None, list[int]] = defaultdict(list)
    for row, ref in enumerate(refs):
        rows[ref].append(row)
    return list(rows.values())


def payloads_of(
    place: SchemaIdPlace,
    values: Sequence[bytes | None],
    headers: Sequence[_Headers],
    *,
    indexed: bool = False,
    header: str = HEADER,
) -> list[bytes | None]:
    """Return the payload of each value, with None for null values and for values whose framing is damaged."""
    return _parts_of(1, place, values, headers, indexed=indexed, header=header)


def _parts_of(
    part: Literal[0, 1],
    place: SchemaIdPlace,
    values: Sequence[bytes | None],
    headers: Sequence[_Headers],
    *,
    indexed: bool,
    header: str,
) -> list[bytes | None]:
    """Return each value's schema ID (part 0) or payload (part 1), or None for a null value or a damaged framing."""
    size = _head(place, values, headers, indexed=indexed, header=header)
    if size:
        cut = slice(size, None) if part else slice(0, size)
        return list(map(itemgetter(cut), cast("Sequence[bytes]", values)))
    found: list[bytes | None] = []
    for value, row in zip(values, headers, strict=True):
        try:
            found.append(None if value is None else split(place, value, row, indexed=indexed, header=header)[part])
        except Unreadable:
            found.append(None)
    return found


def _head(
    place: SchemaIdPlace, values: Sequence[bytes | None], headers: Sequence[_Headers], *, indexed: bool, header: str
) -> int:
    """Return the length of the framing before each payload, or 0 if lengths differ or a framing may be damaged."""
    if place == "header" or (place == "auto" and header in map(_name, chain.from_iterable(headers))):
        return 0
    if not values or None in values:
        return 0
    there = cast("Sequence[bytes]", values)
    size = PREFIX_BYTES + indexed
    if min(map(len, there)) < size or set(map(_first, there)) != {b"\0"}:
        return 0
    return 0 if indexed and set(map(_sixth, there)) != {b"\0"} else size


def framed(place: SchemaIdPlace | None, payload: bytes) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
    """Return the value and the added headers that a serializer sends for a payload whose schema has the ID 1.

    If ``place`` is None, the value has no framing.
    """
    if place is None:
        return payload, ()
    return (payload, ((HEADER, _ONE),)) if place == "header" else (_ONE + payload, ())


def _is_id(content: bytes | None, *, indexed: bool = False) -> bool:
    size = 0 if content is None else _ID_BYTES.get(content[:1], 0)
    if content is None or not 0 < size <= len(content):
        return False
    return (_indexes(content, size)[1] if indexed else size) == len(content)
