"""The content of Protobuf values of random schemas: equal if and only if protobuf says that the messages are equal.

A message of protobuf is filled at random, and then encoded in ways that no library uses but all accept: fields in any
order and several times, messages in parts, packed and unpacked elements, and numbers with more bytes than they need.
DEDUP_FUZZ=1000000 asks for more values; a failure names the seed.
"""

from __future__ import annotations

import math
import os
import random
import re
import struct

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from dedup.core.exact_json import Unreadable
from dedup.core.proto_schema import SCALARS, TIMESTAMP
from dedup.core.protobuf_content import protobuf_content
from tests.fuzz.test_protobuf_values import KINDS, LOOSE, NAMES, damaged, varint
from tests.protoc import compiled

VALUES = int(os.environ.get("DEDUP_FUZZ", "100000")) // 20
SEEDS = 10
OF_A_SCHEMA = 20
MOST_DEPTH = 4
KEYS = sorted(set(NAMES) - {"float", "double", "bytes"})
INTEGERS = (0, 1, 2, 63, 64, 127, 128, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, math.nan, 2.0**-149, 3.0)
TEXTS = ("", "x", "é", "\0", "z" * 130, "00112233-4455-6677-8899-aabbccddeeff", "00112233-4455-6677-8899-AABBCCDDEEFF")
UNKNOWN = (12, 13, 5000)
LONG = re.compile(rb"[\x80-\xff]{5}")
"""Tags and sizes with more than 5 bytes, which this library refuses, but others such as Java's accept."""


ENUM_FIELD = re.compile(r"\bE>? f\d")
"""A field with an enum, alone, repeated, or in a map. proto2 puts numbers that the enum lacks behind all other fields."""


class Schema:
    """A schema of several message types that may contain each other, and themselves."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.proto3 = dice.random() < 0.6
        self.names = [f"M{at}" for at in range(1, dice.randrange(2, 5))]
        messages = "\n".join(map(self.message, self.names))
        imports = "".join(f'import "google/protobuf/{name}.proto";\n' for name in ("timestamp", "wrappers", "struct"))
        syntax = "proto3" if self.proto3 else "proto2"
        self.text = (
            f'syntax = "{syntax}";\npackage fuzz.it;\n{imports}enum E {{ ZERO = 0; TWO = 2; FAR = -7; }}\n{messages}'
        )
        self.type = compiled(self.text, "M1")
        self.content = protobuf_content(self.text, (0,), None, ())

    def message(self, name: str) -> str:
        numbers = self.dice.sample([*range(1, 12), 15, 16, 2047, 2048, (1 << 29) - 1], self.dice.randrange(1, 9))
        lines, oneof = [], []
        for at, number in enumerate(numbers):
            is_inside = self.dice.random() < 0.3
            (oneof if is_inside else lines).append(self.field(at, number, is_inside=is_inside))
        lines += ["oneof one {", *oneof, "}"] if oneof else []
        return f"message {name} {{\n" + "\n".join(lines) + "\n}"

    def field(self, at: int, number: int, *, is_inside: bool) -> str:
        dice, end = self.dice, f"f{at} = {number};"
        message = dice.choice([*self.names, TIMESTAMP, "google.protobuf.Int64Value", "google.protobuf.Value"])
        one = dice.choice([*NAMES, "E", message, message])
        if is_inside:
            return f"{one} {end}"
        label = "optional" if not self.proto3 else dice.choice(("", "", "optional"))
        kind = dice.randrange(10)
        if not self.proto3 and kind == 0:
            label = dice.choice(("optional", "repeated"))
            return f"{label} group F{at} = {number} {{ optional int64 n = 1; optional {message} m = 2; }}"
        if kind in {1, 2, 3}:
            packed = f" [packed = {dice.choice(('true', 'false'))}]" if SCALARS.get(one.lower(), 2) != 2 else ""
            return f"repeated {one} {end[:-1]}{packed};"
        return f"map<{dice.choice(KEYS)}, {one}> {end}" if kind in {4, 5} else f"{label} {one} {end}"


def kind_of(field: FieldDescriptor) -> str:
    return KINDS[field.type]


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def scalar(dice: random.Random, kind: str):
    if kind in {"float", "double"}:
        return dice.choice(FLOATS)
    if kind in {"string", "bytes"}:
        text = dice.choice(TEXTS)
        return text if kind == "string" else text.encode("latin-1") + dice.choice((b"", b"\xff"))
    if kind == "bool":
        return dice.random() < 0.5
    if kind == "enum":
        return dice.choice((0, 2, -7))
    bits = 64 if "64" in kind else 32
    number = dice.choice(INTEGERS) & (1 << bits) - 1
    return number if kind[0] in "uf" else (number ^ 1 << bits - 1) - (1 << bits - 1)


def fill(dice: random.Random, message, depth: int = 0) -> None:
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.6:
            set_field(dice, message, field, depth)


def set_field(dice: random.Random, message, field: FieldDescriptor, depth: int) -> None:
    """Set a field, or add to it."""
    value = getattr(message, field.name)
    if is_map(field):
        key_field, value_field = field.message_type.fields
        for _ in range(dice.randrange(4)):
            key = scalar(dice, kind_of(key_field))
            if value_field.message_type is None:
                value[key] = scalar(dice, kind_of(value_field))
            elif depth < MOST_DEPTH:
                fill(dice, value[key], depth + 1)
    elif field.message_type is None:
        if field.is_repeated:
            value.extend(scalar(dice, kind_of(field)) for _ in range(dice.randrange(5)))
        else:
            setattr(message, field.name, scalar(dice, kind_of(field)))
    elif depth < MOST_DEPTH:
        for _ in range(dice.randrange(4) if field.is_repeated else 1):
            inner = value.add() if field.is_repeated else value
            inner.SetInParent() if not field.is_repeated else None
            fill(dice, inner, depth + 1)


class Encoder:
    """Encodes messages in a random one of the ways that mean the same."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def number(self, number: int, most: int = 10) -> bytes:
        """Return a number in LEB128, possibly with more bytes than needed."""
        short = varint(number)
        if self.dice.random() < 0.8 or len(short) >= most:
            return short
        long = bytearray(short)
        long[-1] |= 0x80
        long += b"\x80" * self.dice.randrange(most - len(short)) + b"\0"
        return bytes(long)

    def tag(self, field: int, wire: int) -> bytes:
        return self.number(field << 3 | wire, 5)

    def sized(self, number: int, content: bytes) -> bytes:
        return self.tag(number, 2) + self.number(len(content), 5) + content

    def scalar(self, kind: str, value) -> bytes:
        """Return a value without its tag."""
        match kind:
            case "float" | "double":
                return struct.pack("<f" if kind == "float" else "<d", value)
            case "string" | "bytes":
                raw = value.encode() if kind == "string" else value
                return self.number(len(raw), 5) + raw
            case "bool":
                return self.number(self.dice.choice((1, 2, 1 << 40)) if value else 0)
            case "sint32" | "sint64":
                return self.number(value << 1 ^ value >> 63 if kind == "sint64" else (value << 1 ^ value >> 31))
            case "fixed32" | "sfixed32" | "fixed64" | "sfixed64":
                size = 4 if "32" in kind else 8
                return (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        raw = value & (1 << 64) - 1
        if kind in {"int32", "uint32", "enum"} and self.dice.random() < 0.2:  # libraries drop the high bits
            raw = raw & (1 << 32) - 1 | self.dice.getrandbits(32) << 32
        return self.number(raw)

    def message(self, message, unknown: list[list[bytes]] = []) -> bytes:  # noqa: B006 - never changed
        return b"".join(self.pieces(message, unknown))

    def pieces(self, message, unknown=()) -> list[bytes]:
        """Return the fields in a random order that keeps the order of the fields that affect each other."""
        tracks: dict[object, list[bytes]] = {("unknown", at): list(each) for at, each in enumerate(unknown)}
        for field in message.DESCRIPTOR.fields:
            oneof = field.containing_oneof
            is_set = bool(getattr(message, field.name)) if field.is_repeated else self.is_set(message, field)
            track = tracks.setdefault(field.name if oneof is None else oneof.name, [])
            made = self.field(message, field) if is_set else self.unset(message, field)
            track[:] = [*track, *made] if is_set else [*made, *track]
        left = [list(reversed(track)) for track in tracks.values() if track]
        found = []
        while left:
            track = self.dice.choice(left)
            found.append(track.pop())
            left = [each for each in left if each]
        return found

    @staticmethod
    def is_set(message, field) -> bool:
        return any(each == field for each, _ in message.ListFields()) or (
            field.has_presence and message.HasField(field.name)
        )

    def unset(self, message, field) -> list[bytes]:
        """Return encodings that leave a field unset: a zero without presence, no elements, an earlier oneof member."""
        if self.dice.random() < 0.7:
            return []
        kind = kind_of(field)
        if field.is_repeated:
            return [self.sized(field.number, b"")] if SCALARS.get(kind, 2) != 2 else []
        if field.message_type is None and not field.has_presence:
            zero = {"string": "", "bytes": b"", "bool": False}.get(kind, 0)
            return [self.tag(field.number, SCALARS[kind]) + self.scalar(kind, zero)]
        oneof = field.containing_oneof
        if oneof is None or message.WhichOneof(oneof.name) is None or field.message_type is not None:
            return []
        return [self.tag(field.number, SCALARS[kind]) + self.scalar(kind, scalar(self.dice, kind))]

    def field(self, message, field) -> list[bytes]:
        value, kind = getattr(message, field.name), kind_of(field)
        if is_map(field):
            return self.entries(field, value)
        if field.message_type is not None:
            if field.is_repeated:
                return [self.nested(field, self.pieces(each)) for each in value]
            pieces = self.pieces(value)
            cut = self.dice.randrange(len(pieces) + 1)
            parts = [pieces[:cut], pieces[cut:]] if self.dice.random() < 0.4 else [pieces]
            return [self.nested(field, part) for part in parts]
        single = (
            [self.tag(field.number, SCALARS[kind]) + self.scalar(kind, each) for each in value]
            if (field.is_repeated)
            else []
        )
        if not field.is_repeated:
            values = [scalar(self.dice, kind), value] if self.dice.random() < 0.3 else [value]
            return [self.tag(field.number, SCALARS[kind]) + self.scalar(kind, each) for each in values]
        if SCALARS[kind] == 2 or self.dice.random() < 0.3:
            return single
        cut = self.dice.randrange(len(value) + 1)
        packed = self.sized(field.number, b"".join(self.scalar(kind, each) for each in value[cut:]))
        return [*single[:cut], packed]

    def nested(self, field, pieces: list[bytes]) -> bytes:
        content = b"".join(pieces)
        if kind_of(field) == "group":
            return self.tag(field.number, 3) + content + self.tag(field.number, 4)
        return self.sized(field.number, content)

    def entries(self, field, value) -> list[bytes]:
        value_field = field.message_type.fields[1]
        found = []
        for key in self.dice.sample(list(value), len(value)):
            if self.dice.random() < 0.3 and value_field.message_type is None:  # the last entry counts
                other = scalar(self.dice, kind_of(value_field))
                found.append(self.entry(field, key, self.parts(value_field, other)))
            found.append(self.entry(field, key, self.parts(value_field, value[key])))
        return found

    def parts(self, field, value) -> list[bytes]:
        if field.message_type is not None:
            pieces = self.pieces(value)
            cut = self.dice.randrange(len(pieces) + 1)
            return [self.nested(field, pieces[:cut]), self.nested(field, pieces[cut:])] if pieces else []
        kind = kind_of(field)
        is_zero = not value and not (isinstance(value, float) and math.copysign(1, value) < 0)
        if is_zero and self.dice.random() < 0.5:
            return []
        return [self.tag(field.number, SCALARS[kind]) + self.scalar(kind, value)]

    def entry(self, field, key, value: list[bytes]) -> bytes:
        parts = [self.parts(field.message_type.fields[0], key), value]
        self.dice.shuffle(parts)
        return self.sized(field.number, b"".join(parts[0] + parts[1]))


def plain(message) -> object:
    """Return what a message means, as a value that can be compared: one zero, one NaN, and the unknown fields."""
    found: dict[object, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if is_map(field):
            value = {key: inner(field.message_type.fields[1], value[key]) for key in value}
        elif field.is_repeated:
            value = [inner(field, each) for each in value]
        elif field.has_presence and not message.HasField(field.name):
            continue
        else:
            value = inner(field, value)
        if value or field.has_presence:
            found[field.number] = value
    for each in UnknownFieldSet(message):
        found.setdefault(("unknown", each.field_number), []).append(plain_unknown(each))
    return found


def plain_unknown(each) -> object:
    data = each.data
    if isinstance(data, UnknownFieldSet):
        data = [(one.field_number, plain_unknown(one)) for one in data]
    return each.wire_type, data


def inner(field: FieldDescriptor, value: object) -> object:
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value or 0.0
    return value if field.message_type is None else plain(value)


def has_odd_floats(message) -> bool:
    """Return whether a message has a NaN, which protobuf never finds equal, or a zero with a sign."""
    return any(math.isnan(each) or (each == 0 and math.copysign(1, each) < 0) for each in floats(message))


def floats(message):
    for field, value in message.ListFields():
        values = value.values() if is_map(field) else value if field.is_repeated else [value]
        for each in values:
            if isinstance(each, float):
                yield each
            elif hasattr(each, "ListFields"):
                yield from floats(each)


def changed(dice: random.Random, message):
    """Return a copy of a message, often with a small difference."""
    found = type(message)()
    found.CopyFrom(message)
    here, depth = found, 0
    while dice.random() < 0.6:
        below = [
            value for field, value in here.ListFields() if field.message_type is not None and not field.is_repeated
        ]
        if not below:
            break
        here, depth = dice.choice(below), depth + 1
    if dice.random() < 0.8:
        field = dice.choice(list(here.DESCRIPTOR.fields) or [None])
        if field is not None and dice.random() < 0.3:
            here.ClearField(field.name)
        elif field is not None:
            set_field(dice, here, field, depth)
    return found


def unknown_fields(dice: random.Random) -> list[list[bytes]]:
    """Return unknown fields. Those of one number keep their order."""
    found = []
    for number in UNKNOWN if dice.random() < 0.3 else ():
        kinds = (
            varint(number << 3) + varint(dice.choice(INTEGERS)),
            varint(number << 3 | 1) + bytes(7) + dice.choice((b"\0", b"\1")),
            varint(number << 3 | 2) + dice.choice((b"\x01x", b"\x00", b"\x02\x08\x01")),
            varint(number << 3 | 3) + dice.choice((b"", b"\x08\x01", b"\x0b\x10\x05\x0c")) + varint(number << 3 | 4),
            varint(number << 3 | 5) + bytes(3) + dice.choice((b"\0", b"\1")),
        )
        found.append([dice.choice(kinds) for _ in range(dice.randrange(3))])
    return found


def rounds(seed):
    dice = random.Random(seed)
    for _ in range(max(1, VALUES // SEEDS // OF_A_SCHEMA)):
        schema = Schema(dice)
        yield dice, schema


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_content_is_equal_if_and_only_if_the_messages_are(seed):
    same = other = 0
    for dice, schema in rounds(seed):
        encoder = Encoder(dice)
        for _ in range(OF_A_SCHEMA):
            first = schema.type()
            fill(dice, first)
            second = changed(dice, first)
            unknown = unknown_fields(dice)
            others = dice.choice((unknown, unknown, unknown_fields(dice)))
            values = [encoder.message(first, unknown) for _ in range(2)] + [encoder.message(second, others)]
            said = f"seed {seed}: {schema.text}: {[value.hex() for value in values]}"
            one, again, two = map(schema.type.FromString, values)
            assert plain(one) == plain(again), said
            contents = [schema.content(value) for value in values]
            assert contents[0] == contents[1] == schema.content(one.SerializeToString()), said
            is_equal = plain(one) == plain(two)
            assert (contents[0] == contents[2]) == is_equal, said
            if not has_odd_floats(one) and not has_odd_floats(two) and unknown == others:
                assert (one == two) == is_equal, said
            same, other = same + is_equal, other + (not is_equal)
    assert same > 0 < other


def read(schema: Schema, value: bytes) -> tuple[bytes, Unreadable | None]:
    try:
        return schema.content(value), None
    except Unreadable as fault:
        return b"", fault


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_damaged_value_is_unreadable_or_content(seed):
    """A value that protobuf cannot parse is unreadable, and any other has the content of what protobuf read."""
    accepted = refused = 0
    for dice, schema in rounds(seed):
        encoder, messages = Encoder(dice), [schema.type() for _ in range(OF_A_SCHEMA)]
        for each in messages:
            fill(dice, each)
        good = [encoder.message(each, unknown_fields(dice)) for each in messages]
        for value in [damaged(dice, value, good) for value in good]:
            said = f"seed {seed}: {schema.text}: {value.hex()}"
            try:
                found = schema.type.FromString(value)
            except DecodeError:
                found = None
            content, fault = read(schema, value)
            if fault is not None:
                refused += 1
                known = fault.code in {"not_utf8", "too_deep"} or any(each in fault.detail for each in LOOSE)
                assert known or found is None, f"{said}: {fault.detail}"
                continue
            accepted += 1
            assert found is not None or LONG.search(value), said
            if found is not None and (schema.proto3 or not ENUM_FIELD.search(schema.text)):
                again = schema.content(found.SerializeToString())
                # If an entry of a map has unknown fields, protobuf puts all of it behind the other entries.
                assert content == again or b"\x05entry" in content + again, said
    assert accepted > 0 < refused


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_excluded_members_are_as_if_they_were_not_set(seed):
    excluded = 0
    for dice, schema in rounds(seed):
        for _ in range(OF_A_SCHEMA // 4):
            message = schema.type()
            fill(dice, message)
            value = Encoder(dice).message(message)
            paths = [path for _ in range(3) if (path := left_out(dice, message))]
            content = protobuf_content(schema.text, (0,), None, (*paths[:1], ("f99",), ("f0", 99, "f0")))
            changed_again = schema.type.FromString(value)
            if paths:
                clear(changed_again, paths[0])
                excluded += 1
            said = f"seed {seed}: {schema.text}: {value.hex()}: {paths[:1]}"
            assert content(value) == schema.content(changed_again.SerializeToString()), said
    assert excluded > 0


def left_out(dice: random.Random, message) -> tuple[str | int, ...]:
    """Return the path of something that a message has, or an empty path."""
    here, path = message, []
    while here.ListFields():
        field, value = dice.choice(here.ListFields())
        path.append(field.name)
        of_message = field.message_type is not None
        if is_map(field):
            if kind_of(field.message_type.fields[0]) != "string" or dice.random() < 0.3:
                return tuple(path)
            path.append(dice.choice(sorted(value)))
            value = value[path[-1]]
            of_message = field.message_type.fields[1].message_type is not None
        elif field.is_repeated:
            if dice.random() < 0.3:
                return tuple(path)
            path.append(dice.randrange(len(value)))
            value = value[path[-1]]
        if not of_message or dice.random() < 0.3 or not value.ListFields():
            return tuple(path)
        here = value
    return tuple(path)


def clear(message, path) -> None:
    field = message.DESCRIPTOR.fields_by_name[path[0]]
    if len(path) == 1:
        message.ClearField(path[0])
        return
    inner, rest = getattr(message, path[0]), path[1:]
    if not field.is_repeated:
        clear(inner, rest)
    elif len(rest) == 1:
        del inner[rest[0]]
    else:
        clear(inner[rest[0]], rest[1:])


def pinned_of(dice: random.Random, schema: Schema) -> tuple[str, type] | None:
    """Return a schema with fewer fields, and the type of its messages."""
    lines = schema.text.splitlines()
    kept = [line for line in lines if not line.startswith(("optional", "repeated", "map", "M", "google"))]
    pinned = "\n".join(line for line in lines if line in kept or dice.random() < 0.6)
    try:
        return pinned, compiled(pinned, "M1")
    except ValueError:  # a oneof has lost all its members
        return None


def is_other_kind(message, lean) -> bool:
    """Return whether a oneof has a member that the type of the same name in the pinned schema lacks."""
    for oneof in message.DESCRIPTOR.oneofs:
        known = [field.number in lean.fields_by_number for field in oneof.fields]
        chosen = message.WhichOneof(oneof.name)
        if chosen and any(known) and message.DESCRIPTOR.fields_by_name[chosen].number not in lean.fields_by_number:
            return True
    for field, value in message.ListFields():
        inner_type = getattr(lean.fields_by_number.get(field.number), "message_type", None)
        if inner_type is None:
            continue
        if is_map(field):
            inner_type = inner_type.fields_by_name["value"].message_type
        values = value.values() if is_map(field) else value if field.is_repeated else [value]
        if inner_type is not None and any(is_other_kind(each, inner_type) for each in values):
            return True
    return False


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_pinned_schema_decides_which_fields_are_content(seed):
    """The values of a type with more fields have the content of the values that lack them."""
    read_whole = 0
    for dice, schema in rounds(seed):
        found = pinned_of(dice, schema)
        if found is None:
            continue
        pinned, lean = found
        content = protobuf_content(schema.text, (0,), pinned, ())
        for _ in range(OF_A_SCHEMA // 4):
            message = schema.type()
            fill(dice, message)
            value = Encoder(dice).message(message, unknown_fields(dice))
            said = f"seed {seed}: {schema.text}: {pinned}: {value.hex()}"
            if is_other_kind(message, lean.DESCRIPTOR):
                with pytest.raises(Unreadable) as unreadable:
                    content(value)
                assert unreadable.value.code == "schema_unresolvable", said
                continue
            known = lean.FromString(message.SerializeToString())
            known.DiscardUnknownFields()
            assert content(value) == protobuf_content(pinned, (0,), None, ())(known.SerializeToString()), said
            read_whole += 1
    assert read_whole > 0


WIDER = {
    "bool": ("uint32", "int64"),
    "int32": ("int64", "uint32", "E"),
    "E": ("int32", "uint64"),
    "uint32": ("int32", "uint64"),
    "sint32": ("sint64",),
    "fixed32": ("sfixed32",),
    "sfixed64": ("fixed64",),
    "string": ("bytes",),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_pinned_schema_with_other_types_does_not_make_different_values_equal(seed):
    same = other = 0
    for dice, schema in rounds(seed):
        singular = re.compile(r"^(?:optional )?(\w+) (?=f\d+ = )", re.MULTILINE)
        pinned = singular.sub(
            lambda found, dice=dice: (
                f"{found[0][: found.start(1) - found.start()]}{dice.choice(WIDER.get(found[1], (found[1],)))} "
            ),
            schema.text,
        )
        content = protobuf_content(schema.text, (0,), pinned, ())
        for _ in range(OF_A_SCHEMA // 4):
            first = schema.type()
            fill(dice, first)
            second = changed(dice, first)
            said = f"seed {seed}: {schema.text}: {pinned}: {first}: {second}"
            one, again, two = (content(Encoder(dice).message(each)) for each in (first, first, second))
            is_equal = plain(first) == plain(second)
            assert one == again, said
            assert (one == two) == is_equal, said
            same, other = same + (one == two), other + (one != two)
    assert same > 0 < other
