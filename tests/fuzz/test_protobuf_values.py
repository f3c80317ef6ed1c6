"""Protobuf values of random schemas, whole and damaged: parser and reader against protoc and protobuf, columns against one by one.

The values are made of tags, so fields repeat, come in any order, are unknown, or have another wire type. The oracle is
a message of the same schema that has only the fields on the paths: what it does not know, it passes over as the reader
does. DEDUP_FUZZ=1000000 asks for more values; a failure names the seed.
"""

from __future__ import annotations

import os
import random

import pytest
from google.protobuf.message import DecodeError

from dedup.core.event_time import FieldTime, RecordTime
from dedup.core.exact_json import ABSENT, Number, Unreadable
from dedup.core.extract import Recipe
from dedup.core.proto_schema import SCALARS, TIMESTAMP, WRAPPERS, parse_proto
from dedup.core.protobuf import protobuf_reader
from dedup.core.tracking_id import FieldRule, FieldsRule, FirstOfRule, HeaderRule, TrackingId
from tests.extraction import same_in_columns
from tests.protoc import compiled

VALUES = int(os.environ.get("DEDUP_FUZZ", "100000")) // 4
SEEDS = 10
OF_A_SCHEMA = 50
LOOSE = ("another wire type", "more than 64 bits", "a timestamp is not in", "the number 0")
"""What protobuf accepts: another wire type makes a field unknown, bits beyond 64 are cut off, times have no limits, and
the number 0 in unknown groups."""
NUMBERS = (0, 1, 2, 63, 64, 127, 128, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
TEXTS = (b"", b"x", "é".encode(), b"y" * 36, b"z" * 200, b"\xff", b"00112233-4455-6677-8899-aabbccddeeff")
NAMES = [name for name in SCALARS if name != "enum"]


def varint(number: int) -> bytes:
    head = bytearray()
    while number > 0x7F:
        head.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*head, number])


class Made:
    """A schema whose message types each occur in one place."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.types = 0
        self.paths: list[tuple[str, ...]] = []
        self.proto3 = dice.random() < 0.6
        self.timed: tuple[str, ...] = ()
        self.root = self.message((), 0)

    def message(self, path, depth):
        self.types += 1
        name, fields = f"M{self.types}", []
        numbers = self.dice.sample([*range(1, 12), 15, 16, 2047, 2048, (1 << 29) - 1], self.dice.randrange(1, 8))
        for at, number in enumerate(sorted(numbers)):
            here = (*path, f"f{at}")
            kind = self.kind(depth)
            oneof = "one" if self.dice.random() < 0.3 and kind not in {"map", "repeated", "group"} else ""
            label = "" if self.proto3 else "optional "
            if self.proto3 and self.dice.random() < 0.3 and kind in {*NAMES, "enum"}:
                label = "optional "
            inner = self.message(here, depth + 1) if kind in {"message", "group"} else None
            of = self.dice.choice(NAMES) if kind == "repeated" else ""
            fields.append(
                {"name": here[-1], "number": number, "kind": kind, "oneof": oneof, "label": label, "type": inner}
            )
            fields[-1]["of"] = of
            self.paths.append(here)
        return {"name": name, "fields": fields}

    def kind(self, depth):
        kinds = [*NAMES, "enum", "repeated", "map", TIMESTAMP, *self.dice.sample(sorted(WRAPPERS), 3)]
        if depth < 3:
            kinds += ["message"] * 6
        if not self.proto3:
            kinds += ["group"] * 2
        return self.dice.choice(kinds)

    def text(self, wanted=None) -> str:
        syntax = "proto3" if self.proto3 else "proto2"
        imports = "".join(f'import "google/protobuf/{name}.proto";\n' for name in ("timestamp", "wrappers"))
        begin = f'syntax = "{syntax}";\npackage fuzz.it;\n{imports}enum E {{ ZERO = 0; TWO = 2; }}\n'
        optional = "" if self.proto3 else "optional "
        if wanted is not None:
            begin += f"message T {{ {optional}int64 seconds = 1; {optional}int32 nanos = 2; }}\n"
            begin += "".join(f"message W_{name} {{ {optional}{self.pruned(name)} value = 1; }}\n" for name in NAMES)
        return begin + self.message_text(self.root, (), wanted)

    @staticmethod
    def pruned(kind):
        """Return the type that has the same values, without a check of UTF-8 and of an enum's numbers."""
        return {"string": "bytes", "enum": "int32"}.get(kind, kind)

    def message_text(self, message, path, wanted) -> str:
        lines, oneof = [], []
        for each in message["fields"]:
            here = (*path, each["name"])
            on_path = wanted is None or any(one[: len(here)] == here for one in wanted)
            beside = (
                wanted is not None
                and each["oneof"]
                and any(
                    one[: len(path)] == path and len(one) > len(path) and self.oneof_of(message, one[len(path)])
                    for one in wanted
                )
            )
            if not on_path and not beside:
                continue
            inner = wanted if on_path else []
            if each["kind"] == "message" and not self.is_opaque(here, inner):
                lines.append(self.message_text(each["type"], here, inner))
            (oneof if each["oneof"] else lines).append(self.field_text(each, here, inner))
        lines += ["oneof one {", *oneof, "}"] if oneof else []
        return f"message {message['name']} {{\n" + "\n".join(lines) + "\n}\n"

    @staticmethod
    def oneof_of(message, name):
        return next(each["oneof"] for each in message["fields"] if each["name"] == name)

    @staticmethod
    def is_opaque(path, wanted):
        """Return whether nothing inside the message at a path is asked for."""
        return wanted is not None and not any(len(one) > len(path) and one[: len(path)] == path for one in wanted)

    def field_text(self, each, path, wanted) -> str:  # noqa: C901 - one case a kind
        kind, label = each["kind"], "" if each["oneof"] else each["label"]
        end = f"{each['name']} = {each['number']}"
        if kind == "map":
            return f"map<string, E> {end};" if wanted is None else ""
        if kind == "group":
            if wanted is not None:
                return ""
            inner = self.message_text(each["type"], path, None).partition("{")[2]
            return f"{label}group {each['name'].upper()} = {each['number']} {{{inner}"
        if kind == "repeated":
            return f"repeated {each['of']} {end};" if wanted is None else ""
        if kind == "message":
            if self.is_opaque(path, wanted):
                return f"{'' if each['oneof'] else 'optional '}bytes {end};"
            return f"{label}{each['type']['name']} {end};"
        if kind == "enum":
            return f"{label}{'E' if wanted is None else 'int32'} {end};"
        if wanted is None:
            return f"{label}{kind} {end};"
        if kind == TIMESTAMP:
            return f"{'' if each['oneof'] else 'optional '}{'T' if path == self.timed else 'bytes'} {end};"
        if kind in WRAPPERS:
            name = f"W_{wrapped(kind)}"
            is_read = wanted and name not in {"W_float", "W_double"}
            return f"{label if is_read or each['oneof'] else 'optional '}{name if is_read else 'bytes'} {end};"
        return f"{label}{self.pruned(kind)} {end};"

    def value(self, message, depth=0) -> bytes:
        dice, made = self.dice, []
        for each in message["fields"]:
            made += [self.field(each, depth) for _ in range(dice.choice((0, 1, 1, 1, 2)))]
        if dice.random() < 0.3:
            made.append(varint(dice.choice((12, 13, 5000)) << 3) + varint(dice.choice(NUMBERS)))
        if dice.random() < 0.1:
            made.append(varint(14 << 3 | 3) + varint(9 << 3 | 2) + b"\x01x" + varint(14 << 3 | 4))
        if dice.random() < 0.2:
            dice.shuffle(made)
        return b"".join(made)

    def field(self, each, depth) -> bytes:
        kind, number = each["kind"], each["number"]
        if self.dice.random() < 0.01:
            kind = self.dice.choice(NAMES)
        match kind:
            case "map":
                return self.sized(number, b"\x0a\x01k\x10\x02")
            case "repeated":
                one = self.scalar(each["of"])
                if SCALARS[each["of"]] == 2 or self.dice.random() < 0.5:
                    return varint(number << 3 | SCALARS[each["of"]]) + one
                return self.sized(number, one * self.dice.randrange(4))
            case "group":
                inner = self.value(each["type"], depth + 1)
                return varint(number << 3 | 3) + inner + varint(number << 3 | 4)
            case "message":
                return self.sized(number, self.value(each["type"], depth + 1))
            case _ if kind == TIMESTAMP:
                inner = b"\x08" + varint(self.dice.choice((0, 1, 1_700_000_000, 253_402_300_799, 253_402_300_800)))
                inner += b"\x10" + varint(self.dice.choice((0, 1, 999_999_999, 10**9, (1 << 64) - 1)))
                return self.sized(number, inner if self.dice.random() < 0.3 else inner[: self.dice.choice((0, 2, 0))])
            case _ if kind in WRAPPERS:
                one = varint(1 << 3 | SCALARS[wrapped(kind)]) + self.scalar(wrapped(kind))
                return self.sized(number, one * self.dice.randrange(3))
            case _:
                return varint(number << 3 | SCALARS[kind]) + self.scalar(kind)

    @staticmethod
    def sized(number, inner):
        return varint(number << 3 | 2) + varint(len(inner)) + inner

    def scalar(self, kind) -> bytes:
        match SCALARS[kind]:
            case 0:
                return varint(self.dice.choice((0, 2) if kind == "enum" else NUMBERS))
            case 1:
                return self.dice.choice(NUMBERS).to_bytes(8, "little")
            case 2:
                text = self.dice.choice(TEXTS)
                return varint(len(text)) + text
            case _:
                return (self.dice.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "little")


def wrapped(kind: str) -> str:
    return kind.rpartition(".")[2].removesuffix("Value").lower()


def damaged(dice: random.Random, value: bytes, others: list[bytes]) -> bytes:
    for _ in range(dice.choice((0, 1, 1, 2, 4))):
        at = dice.randrange(len(value) + 1)
        match dice.randrange(5):
            case 0:
                value = value[:at]
            case 1:
                value = value[:at] + dice.choice((b"\0", b"\x01", b"\xff", b"\x0b", b"\x0c", b"\xff" * 10)) + value[at:]
            case 2:
                value = value[:at] + bytes([dice.randrange(256)]) + value[at + 1 :]
            case 3:
                value = value[:at] + value[at + 1 + dice.randrange(3) :]
            case _:
                value = value[:at] + dice.choice(others)[dice.randrange(8) :]
    return value


def read(reader, value):
    try:
        return reader.read(value), None
    except Unreadable as fault:
        return [], fault


def expected_at(found, path, *, zeros):
    """Return what protobuf has at a path: the value, or ABSENT."""
    for at, step in enumerate(path):
        if step not in found.DESCRIPTOR.fields_by_name:
            return ABSENT
        field = found.DESCRIPTOR.fields_by_name[step]
        if field.has_presence and not found.HasField(step):
            return ABSENT
        value = getattr(found, step)
        if at < len(path) - 1:
            if field.message_type is None:
                return ABSENT
            found = value
    if not zeros and not field.has_presence and value == field.default_value:
        return ABSENT
    return getattr(value, "value", value)  # of a wrapper


def agree(leaf, expected, kind) -> bool:
    name = wrapped(kind) if kind in WRAPPERS else kind
    if name in {"float", "double"} and leaf is not ABSENT:  # also 0.0
        return leaf.type_name == name
    if leaf is ABSENT or expected is ABSENT:
        return leaf is expected
    if name in {"message", TIMESTAMP}:
        return leaf.type_name == name
    if name == "string":
        return leaf == expected.decode()
    if isinstance(leaf, Number):
        return leaf.text == str(expected) and expected >= 1 << 63
    return type(leaf) is type(expected) and leaf == expected


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_reads_what_protobuf_reads_and_columns_what_it_reads(seed):
    dice = random.Random(seed)
    accepted = refused = 0
    for _ in range(max(1, VALUES // SEEDS // OF_A_SCHEMA)):
        made = Made(dice)
        text = made.text()
        same_schema(parse_proto(text).nested[0], compiled(text, "M1").DESCRIPTOR, seed)
        kinds = {path: kind_at(made.root, path) for path in made.paths}
        paths = tuple(dict.fromkeys(dice.choice(made.paths) for _ in range(3)))
        times = [FieldTime(path, unit_of(kinds[path])) for path in made.paths if unit_of(kinds[path])]
        time = dice.choice([None, *(each for each in times if each.unit == "timestamp")])
        wanted = paths if time is None else (*paths, time.path)
        made.timed = () if time is None else time.path
        oracle = compiled(made.text(wanted), "M1")
        good = [made.value(made.root) for _ in range(OF_A_SCHEMA)]
        values = [value if dice.random() < 0.4 else damaged(dice, value, good) for value in good]
        zeros = dice.random() < 0.4
        reader = protobuf_reader(text, (0,), paths, time, zeros=zeros)
        for value in values:
            said = f"seed {seed}: {text}: {value.hex()}"
            try:
                found = oracle.FromString(value)
            except DecodeError:
                found = None
            leaves, fault = read(reader, value)
            if fault is not None:
                refused += 1
                known = fault.code in {"not_utf8", "too_deep"} or any(each in fault.detail for each in LOOSE)
                assert known or found is None, f"{said}: {fault.detail}"
                continue
            accepted += 1
            assert found is not None, said
            if time is not None:
                expected = expected_at(found, time.path, zeros=False)
                moment = expected if expected is ABSENT else expected.seconds * 1000 + expected.nanos // 10**6
                assert leaves[-1] == moment, said
            for path, leaf in zip(paths, leaves, strict=False):
                kind = kinds[path]
                if kind in {"map", "repeated", "group"}:
                    assert leaf is ABSENT or leaf.type_name == kind, said
                else:
                    assert agree(leaf, expected_at(found, path, zeros=zeros), kind), f"{said}: {path}: {leaf}"
        for batch in (values, good):
            in_columns(text, paths, dice.choice([RecordTime(), *times]), batch, zeros=zeros)
    assert accepted > 0 < refused


def kind_at(message, path) -> str:
    """Return the kind of the field at a path, or that of a group on the way."""
    for step in path:
        field = next(each for each in message["fields"] if each["name"] == step)
        if field["kind"] == "group":
            return "group"
        message = field["type"]
    return field["kind"]


def unit_of(kind):
    if kind == TIMESTAMP:
        return "timestamp"
    name = wrapped(kind) if kind in WRAPPERS else kind
    if name == "string":
        return "rfc3339"
    return "ms" if "int" in name or "fixed" in name else ""


def same_schema(message, descriptor, seed):
    """What the parser says of a message is what protoc says."""
    assert list(message.fields) == [each.name for each in descriptor.fields], seed
    for each in descriptor.fields:
        mine = message.fields[each.name]
        entry = each.message_type is not None and each.message_type.GetOptions().map_entry
        kind = "map" if entry else "repeated" if each.is_repeated else KINDS[each.type]
        oneof = each.containing_oneof
        synthetic = oneof is not None and oneof.name.startswith("_")
        assert (mine.number, mine.kind) == (each.number, kind), seed
        assert mine.has_presence == each.has_presence or kind in {"map", "repeated"}, seed
        assert mine.oneof == ("" if oneof is None or synthetic else oneof.name), seed
        if kind == "message":
            assert mine.message.name == each.message_type.full_name
            if not mine.message.name.startswith("google"):
                same_schema(mine.message, each.message_type, seed)
    assert [None if each is None else each.name for each in message.nested] == [
        None if each.GetOptions().map_entry else each.full_name for each in descriptor.nested_types
    ], seed


KINDS = dict.fromkeys(range(1, 19), "") | dict(
    zip(
        range(1, 19),
        ("double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group", "message",
         "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
        strict=True,
    )
)  # fmt: skip


def in_columns(text, paths, time, values, *, zeros):
    """Each row of a batch is what `extract_one` says of it."""
    fields = tuple(map(FieldRule, paths))
    for rule in (fields[0], FieldsRule(paths), FirstOfRule((HeaderRule("h"), *fields))):
        same_in_columns(Recipe(TrackingId(rule, zeros=zeros), time, "protobuf", fingerprint=True, schema=text), values)
