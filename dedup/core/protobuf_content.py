"""Reads whole Protobuf values as canonical content, for IDs over the content of values.

Two values have equal content if they encode equal messages of one type. The full name of the type is part of the
content. The members of a message are identified by field numbers, so renaming a field does not change the content. As
in Protobuf's libraries, the last value of a field counts, repeated occurrences of a message merge, and a member of a
oneof clears the other members. A field without presence is absent if it is zero or empty. A repeated field and a map
are absent if they are empty. The content of an enum is its number.

Unknown fields are part of the content, unless the schema is pinned. The content of an unknown field number is the list
of its values in the order of the encoding, each with the name of its wire type, such as `wire 0`. Source: "Encoding"
and "Field Presence" of protobuf.dev.

A pinned schema may omit fields, but must not make different values of a field equal. Therefore, its types must have
room for all values of the types in the payload's schema. The payload's schema also determines which fields are members
of a oneof. A field has presence if it has presence in either schema.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

from dedup.core.content_tree import (
    Content,
    Scalar,
    Tree,
    TypedValue,
    Without,
    deeper,
    encode_content,
    scalar_key,
    text_key,
)
from dedup.core.exact_json import Excluded, Unreadable, excluded
from dedup.core.framing import SchemaRefused, SchemaText, in_pinned
from dedup.core.proto_schema import SCALARS, Field, Message, message_at, parse_proto
from dedup.core.protobuf import END, GROUP, SIZED, ProtobufCursor, not_a_message, utf8
from dedup.core.tracking_id import Path
from dedup.core.varint import Damaged

_LOW_32: Final = (1 << 32) - 1
_LOW_64: Final = (1 << 64) - 1
_SIGN_32: Final = 1 << 31
_SIGN_64: Final = 1 << 63
_FLOAT: Final = struct.Struct("<f").unpack
_DOUBLE: Final = struct.Struct("<d").unpack


def _zigzag(raw: int) -> int:
    return raw >> 1 ^ -(raw & 1)


_VALUES: Final[Mapping[str, Callable[[Any], Tree]]] = {
    **dict.fromkeys(("int32", "sfixed32", "enum"), lambda raw: (raw & _LOW_32 ^ _SIGN_32) - _SIGN_32),
    **dict.fromkeys(("int64", "sfixed64"), lambda raw: (raw ^ _SIGN_64) - _SIGN_64),
    **dict.fromkeys(("uint64", "fixed64", "bytes"), lambda raw: raw),
    **dict.fromkeys(("uint32", "fixed32"), lambda raw: raw & _LOW_32),
    "sint32": lambda raw: _zigzag(raw & _LOW_32),
    "sint64": _zigzag,
    "bool": lambda raw: raw != 0,
    "float": lambda raw: _FLOAT(raw.to_bytes(4, "little"))[0],
    "double": lambda raw: _DOUBLE(raw.to_bytes(8, "little"))[0],
    "string": utf8,
}
"""Maps each scalar type to a function that decodes the result of `ProtobufCursor.field` (numbers as in protobuf.py)."""
_FAMILIES: Final[Mapping[str, tuple[str, int]]] = {
    "bool": ("varint", 1),
    **dict.fromkeys(("enum", "int32", "uint32"), ("varint", 32)),
    **dict.fromkeys(("int64", "uint64"), ("varint", 64)),
    "sint32": ("zigzag", 32),
    "sint64": ("zigzag", 64),
    **dict.fromkeys(("fixed32", "sfixed32"), ("fixed32", 32)),
    **dict.fromkeys(("fixed64", "sfixed64"), ("fixed64", 64)),
    **dict.fromkeys(("string", "bytes"), ("bytes", 0)),
}
"""Maps each type to its encoding and its number of bits. Types with the same encoding can replace each other."""
_WIRE_TYPES: Final = tuple(f"wire {wire}" for wire in range(6))
_ANY_WIRE: Final = tuple(wire for wire in range(6) if wire != END)
_KEY: Final = scalar_key(1)
_VALUE: Final = scalar_key(2)
"""The keys of the members of a map's entry."""


class _Members(dict[bytes, Tree]):
    """The members of one message. If the message occurs again, the members of both occurrences are merged."""

    __slots__ = ("_chosen",)

    def __init__(self) -> None:
        super().__init__()
        self._chosen: dict[str, bytes] | None = None  # most messages have no oneof, so this saves memory

    def choose(self, oneof: str, key: bytes) -> None:
        """Record the chosen member of a oneof, and remove the member that was set before."""
        if self._chosen is None:
            self._chosen = {}
        before = self._chosen.get(oneof, key)
        if before != key:
            self.pop(before, None)
        self._chosen[oneof] = key


@dataclass(frozen=True, slots=True)
class _Scalar:
    """The type of a number, a text, or bytes."""

    wires: tuple[int, ...]
    """The wire types that a field of this type may have. The first wire type is that of a single value."""
    value: Callable[[Any], Tree]

    def read(self, cursor: _ContentCursor, wire: int, end: int, _depth: int, _before: object) -> Tree:
        """Return the value of a field. The method may change ``before``, the field's current value in the message.

        ``end`` and ``depth`` are those of the message. ``before`` is None if the field has no value yet.
        """
        return self.value(cursor.field(0, wire, end))


@dataclass(frozen=True, slots=True)
class _Nested:
    """The type of a message or of a group."""

    wires: tuple[int, ...]
    table: _Table
    number: int

    def read(self, cursor: _ContentCursor, wire: int, end: int, depth: int, before: object) -> Tree:
        found = before if isinstance(before, _Members) else _Members()
        if wire == GROUP:
            cursor.walk(self.table, found, end, deeper(depth), self.number)
        else:
            cursor.walk(self.table, found, cursor.sized_end(end), deeper(depth))
        return found


@dataclass(frozen=True, slots=True)
class _List:
    """The type of a repeated field, whose numbers may be packed."""

    wires: tuple[int, ...]
    element: _Scalar | _Nested

    def read(self, cursor: _ContentCursor, wire: int, end: int, depth: int, before: object) -> Tree:
        found: list[Tree] = before if isinstance(before, list) else []
        inside, single = deeper(depth), self.wires[0]
        if wire == single:
            found.append(self.element.read(cursor, wire, end, inside, None))
            return found
        behind = cursor.sized_end(end)
        while cursor.at < behind:
            found.append(self.element.read(cursor, single, behind, inside, None))
        return found


@dataclass(frozen=True, slots=True)
class _Map:
    """The type of a map, whose entries are messages."""

    wires: tuple[int, ...]
    table: _Table
    no_key: Tree
    no_value: Tree
    """The value of an entry without a value, or None if the map's values are messages."""

    def read(self, cursor: _ContentCursor, _wire: int, end: int, depth: int, before: object) -> Tree:
        found: dict[bytes, Tree] = before if isinstance(before, dict) else {}
        entry = _Members()
        entry[_KEY] = self.no_key
        entry[_VALUE] = _Members() if self.no_value is None else self.no_value
        cursor.walk(self.table, entry, cursor.sized_end(end), deeper(depth))
        key, value = cast("Scalar", entry.pop(_KEY)), entry.pop(_VALUE)
        # The remaining members are unknown fields. Records that differ only in these fields must not become duplicates.
        found[scalar_key(key)] = TypedValue("entry", [value, entry]) if entry else value
        return found


@dataclass(frozen=True, slots=True)
class _Other:
    """The type of a oneof member that the pinned schema lacks, although it has another member of the oneof."""

    wires: tuple[int, ...]
    name: str
    number: int

    def read(self, cursor: _ContentCursor, wire: int, end: int, _depth: int, _before: object) -> Tree:
        """Return a mark in place of the value, because a later member of the oneof can still clear it."""
        cursor.field(self.number, wire, end)
        cursor.has_others = True
        return cast("Tree", self)


@dataclass(frozen=True, slots=True)
class _Member:
    """A field of a message."""

    key: bytes
    type: _Scalar | _Nested | _List | _Map | _Other
    is_kept: bool
    """Whether the field is present if its value is zero or empty."""
    oneof: str


_Table = dict[int, _Member]
"""The fields of a message by number."""


class _ContentCursor(ProtobufCursor):
    def __init__(self, value: bytes, *, keeps_unknown: bool) -> None:
        super().__init__(value)
        self._keeps_unknown: Final = keeps_unknown
        self.has_others = False
        """Whether the value has a member whose type is `_Other`, even if a later member has cleared this member."""

    def walk(self, table: _Table, found: _Members, end: int, depth: int, group: int = 0) -> None:
        """Add the fields of a message to ``found``. The message ends at ``end`` or at its group's end tag."""
        while self.at < end or group:
            number, wire = self.tag(end)
            if wire == END:
                if number != group:
                    raise self.unexpected_end()
                return
            member = table.get(number)
            if member is None:
                raw = self.field(number, wire, end)
                if self._keeps_unknown:
                    cast("list[Tree]", found.setdefault(scalar_key(number), [])).append(
                        TypedValue(_WIRE_TYPES[wire], raw)
                    )
                continue
            if wire not in member.type.wires:
                raise self.other_wire_type(number)
            if member.oneof:
                found.choose(member.oneof, member.key)
            value = member.type.read(self, wire, end, depth, found.get(member.key))
            if value or member.is_kept:
                found[member.key] = value
            else:
                found.pop(member.key, None)


_Pair = tuple[Message, Message]
"""The message type with which values are read, and the type in their own schema. Without a pinned schema, both are
equal.
"""


class _Tables:
    """Creates the tables of a message type and of the types that it contains. A type may contain itself."""

    def __init__(self) -> None:
        self._made: Final[dict[_Pair, _Table]] = {}
        self._due: Final[list[_Pair]] = []

    def of(self, root: Message, written: Message) -> _Table:
        """Return the table of a message type, given the type of the values' own schema.

        Raises SchemaRefused if a type is unknown, or has no room for all values of a field.
        """
        found = self._table(root, written)
        while self._due:
            pair = self._due.pop()
            self._made[pair].update(self._members(*pair))
        return found

    def _members(self, message: Message, written: Message) -> Iterator[tuple[int, _Member]]:
        own = {each.number: (name, each) for name, each in written.fields.items()}
        for name, each in message.fields.items():
            written_name, of_value = own.pop(each.number, (name, each))
            if each is not of_value and not _has_room(each, of_value):
                said = f"has the field {f'{written.name}.{written_name}'[:64]} of type {_type_text(of_value)}"
                raise SchemaRefused(f"{said}, which the pinned schema reads as {_type_text(each)}")
            yield each.number, self._member(f"{message.name}.{name}", each, of_value)
        kept = {each.oneof for each in written.fields.values() if each.number not in own}
        for name, each in own.values():
            if each.oneof and each.oneof in kept:
                other = _Other(_ANY_WIRE, f"{written.name}.{name}", each.number)
                yield each.number, _Member(scalar_key(each.number), other, is_kept=True, oneof=each.oneof)

    def _table(self, message: Message, written: Message) -> _Table:
        """Return a table that is filled later, so that a long chain of types causes no deep recursion."""
        pair = message, written
        if pair not in self._made:
            self._made[pair] = {}
            self._due.append(pair)
        return self._made[pair]

    def _member(self, name: str, each: Field, of_value: Field) -> _Member:
        key, item = scalar_key(each.number), each.item
        if each.kind not in {"map", "repeated"}:
            is_kept = each.has_presence or of_value.has_presence
            return _Member(key, self._single(each, of_value), is_kept, of_value.oneof)
        if item is None:
            raise SchemaRefused(f"has a map with a type that it does not define: {name[:64]}")
        own = of_value.item if of_value.kind == each.kind else of_value
        if each.kind == "repeated":
            element = self._single(item, own or item)
            packed = {SIZED} - set(element.wires) if isinstance(element, _Scalar) else ()
            return _Member(key, _List((*element.wires, *packed), element), is_kept=False, oneof=of_value.oneof)
        entry = _message_of(item)
        zeros = map(_zero, entry.fields.values())
        table = self._table(entry, _message_of(own or item))
        return _Member(key, _Map((SIZED,), table, *zeros), is_kept=False, oneof="")

    def _single(self, each: Field, of_value: Field) -> _Scalar | _Nested:
        if each.kind in SCALARS:
            return _Scalar((SCALARS[each.kind],), _value_of(each.kind, of_value.kind))
        table = self._table(_message_of(each), _message_of(of_value))
        return _Nested((GROUP if each.kind == "group" else SIZED,), table, each.number)


def _value_of(kind: str, own: str) -> Callable[[Any], Tree]:
    """Return a function that decodes a value of type ``own`` as type ``kind``, and drops bits that ``own`` lacks."""
    value, own_value = _VALUES[kind], cast("Callable[[Any], int]", _VALUES[own])
    if kind == own or _FAMILIES.get(own, ("", 0))[0] not in {"varint", "zigzag"}:
        return value
    return own_value if own == "sint32" else lambda raw: value(own_value(raw) & _LOW_64)


def _has_room(pinned: Field, written: Field) -> bool:
    """Return whether different values of a field stay different when they are read with a pinned schema's field."""
    if pinned.kind == "repeated":
        one = written.item if written.kind == "repeated" else written
        return one is not None and pinned.item is not None and _has_room(pinned.item, one)
    if pinned.kind == written.kind == "map":
        fields = [_message_of(each.item).fields.values() for each in (pinned, written) if each.item is not None]
        return len(fields) > 1 and all(map(_has_room, *fields))
    (most, most_bits), (family, bits) = (_FAMILIES.get(each.kind, (each.kind, 0)) for each in (pinned, written))
    return family == most and bits <= most_bits


def _type_text(each: Field) -> str:
    """Return a field's type for an error text."""
    if each.kind == "map":
        types = ["?"] if each.item is None else map(_type_text, _message_of(each.item).fields.values())
        return f"map<{', '.join(types)}>"
    return f"repeated {_type_text(each.item)}" if each.kind == "repeated" and each.item is not None else each.kind


def _message_of(each: Field) -> Message:
    """Return the message of a field that is a message or a group."""
    return cast("Message", each.message if each.item is None else each.item.message)


def _zero(each: Field) -> Tree:
    return None if each.kind == "message" else _VALUES[each.kind](b"" if SCALARS[each.kind] == SIZED else 0)


def _without(message: Message, exclude: Excluded) -> Without:
    """Return the members to leave out of a message. Paths that the message lacks add nothing."""
    found: dict[bytes | int, Without | None] = {}
    for step, below in exclude.items():
        each = message.fields.get(step) if isinstance(step, str) else None
        if each is not None:
            found[scalar_key(each.number)] = None if below is None else _without_in(each, below)
    return found


def _without_in(each: Field, exclude: Excluded) -> Without:
    item = each.item
    if each.kind in SCALARS or (each.kind == "map" and item is None):
        return {}
    if item is None or each.kind == "group":
        return _without(_message_of(each), exclude)
    found: dict[bytes | int, Without | None] = {}
    key, value = _message_of(item).fields.values() if each.kind == "map" else (None, item)
    for step, below in exclude.items():
        inner = None if below is None else _without_in(value, below)
        if key is None and isinstance(step, int):
            found[step] = inner
        elif key is not None and key.kind == "string" and isinstance(step, str):
            found[text_key(step)] = inner
    return found


def has_member(message: Message, path: Path) -> bool:
    """Return whether messages of a type can have a member at an excluded path."""
    below: Without | None = _without(message, excluded((path,)))
    while below:
        (below,) = below.values()
    return below is None


def _leave_out(tree: Tree, without: Without) -> None:
    """Remove members, elements, and entries. A repeated field or a map that becomes empty then counts as absent."""
    steps: list[Any] = []
    if isinstance(tree, dict):
        steps = [step for step in without if step in tree]
    elif isinstance(tree, list):  # from the end, so that earlier positions stay valid
        steps = sorted((step for step in without if isinstance(step, int) and step < len(tree)), reverse=True)
    found = cast("dict[Any, Tree]", tree)
    for step in steps:
        below, inner = without[step], found[step]
        if below is not None:
            _leave_out(inner, below)
            if inner or isinstance(inner, _Members) or not isinstance(inner, dict | list):
                continue
        del found[step]


def _refuse_others(tree: Tree | _Other) -> None:
    """Raise Unreadable if a value has a oneof member that the pinned schema lacks."""
    if isinstance(tree, _Other):
        said = f"{tree.name[:64]} is set, a member of a oneof that the pinned schema has without this member"
        raise Unreadable("schema_unresolvable", f"the value's schema cannot be read as the pinned schema: {said}")
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        _refuse_others(each)


def _pinned(written: Message, pinned: SchemaText) -> Message:
    """Return the message type of the pinned schema that has the same name as the type of the values."""
    try:
        due = [parse_proto(pinned)]
    except SchemaRefused as refused:
        raise in_pinned(refused) from None
    while due:
        message = due.pop()
        if message.name == written.name:
            return message
        due += filter(None, message.nested)
    raise SchemaRefused(f"defines the message {written.name[:64]}, which the pinned schema does not define")


@lru_cache(maxsize=256)
def protobuf_content(
    schema: SchemaText, indexes: tuple[int, ...], pinned: SchemaText | None, exclude: tuple[Path, ...]
) -> Content:
    """Return a function that returns the canonical content of a payload, without the members at the excluded paths.

    ``schema`` and ``indexes`` identify the message type of the payload. If ``pinned``, which is .proto text, is given,
    the message type with the same full name in this text replaces the payload's own type, and unknown fields are not
    part of the content. The function raises Unreadable if the payload is not one message of the type, even if only an
    excluded member is damaged. The function also raises Unreadable if a oneof of the payload has a member that the
    pinned schema lacks, although the pinned schema has another member of this oneof, because the payload is then
    another kind of event. Raises SchemaRefused if a schema is invalid or lacks the type, or if the pinned schema has a
    field whose type has no room for all values of the payload's schema.
    """
    written = message_at(parse_proto(schema), indexes)
    message = written if pinned is None else _pinned(written, pinned)
    table, without = _Tables().of(message, written), _without(message, excluded(exclude))

    def content(payload: bytes) -> bytes:
        cursor, members = _ContentCursor(payload, keeps_unknown=pinned is None), _Members()
        try:
            cursor.walk(table, members, len(payload), deeper(0))
        except Damaged as damage:
            raise not_a_message(payload, damage) from None
        _leave_out(members, without)
        if cursor.has_others:
            _refuse_others(members)
        return encode_content(TypedValue(message.name, members), {})

    return content
