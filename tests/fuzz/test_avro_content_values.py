"""The content of Avro values of random schemas, whole and damaged, against fastavro and an encoder of its own.

DEDUP_FUZZ=1000000 asks for more values; a failure names the seed.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import os
import random
import re
import struct
from decimal import Decimal
from itertools import pairwise
from typing import NamedTuple
from uuid import UUID

import fastavro
import pytest
from fastavro.read import SchemaResolutionError

from dedup.core.avro import avro_reader
from dedup.core.avro_content import avro_content
from dedup.core.exact_json import Unreadable
from tests.fuzz.test_avro_values import Made, by_fastavro, damaged

VALUES = int(os.environ.get("DEDUP_FUZZ", "100000")) // 10
SEEDS = 10
OF_A_SCHEMA = 20
UUID_TEXT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
OWN_FAULTS = {"not_utf8", "repeated_member", "number_out_of_range"}
LOGICAL = (
    {"type": "int", "logicalType": "date"},
    {"type": "int", "logicalType": "time-millis"},
    {"type": "long", "logicalType": "time-micros"},
    {"type": "long", "logicalType": "timestamp-millis"},
    {"type": "long", "logicalType": "timestamp-micros"},
    {"type": "long", "logicalType": "local-timestamp-millis"},
    {"type": "bytes", "logicalType": "decimal", "precision": 400, "scale": 2},
    {"type": "string", "logicalType": "uuid"},
)
LOOSE = ('"time-', '"uuid"')
"""Types of which fastavro accepts damaged values: negative times of day, and UUIDs as `UUID` of Python accepts them."""
REPEATED = "repeated"
"""The share of maps that repeat a key, among the types that `encoded` knows."""
EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - local


VOID = "void"
"""Begins the name of each field that takes no bytes. No key of a map begins like this."""
OWN_TYPES = {b"date", b"time", b"local-timestamp"}
STRICTER = re.compile(r"is of type (date|time-|timestamp-|local-timestamp-|decimal )")
"""Says that a logical type is not read as one of another family, whereas fastavro only compares underlying types."""


class Branch(NamedTuple):
    """A value of a union."""

    index: int
    value: object


class Typed(Made):
    """A schema with logical types, whose records take at least one byte, and values that name their branches."""

    def record(self, path, depth):
        made = super().record(path, depth)
        if all(each["type"] == "null" for each in made["fields"]):
            made["fields"].append({"name": "z", "type": "long"})
        for each in made["fields"]:
            each["name"] = (VOID if each["type"] == "null" else "") + each["name"]
        return made

    def kind(self, path, depth, union=True):
        if self.dice.random() < 0.2:
            self.paths.append(path)
            return dict(self.dice.choice(LOGICAL))
        return super().kind(path, depth, union)

    def value(self, kind, depth=0):
        match kind:
            case list():
                index = 0 if depth > 6 else self.dice.randrange(len(kind))
                return Branch(index, self.value(kind[index], depth))
            case {"logicalType": "decimal"}:
                return self.dice.choice((0, 5, 50, -128, 10**9, 10**30))
            case {"logicalType": "uuid"}:
                return str(UUID(int=self.dice.randrange(3)))
            case {"logicalType": _}:
                return self.dice.choice((0, 1, 1_000, 40_000))
            case "double" | "float":
                return self.dice.choice((0.0, -0.0, 1.5, -1.0, float("nan")))
            case _:
                return super().value(kind, depth)

    def changed(self, kind, value):
        """Return the value with another one at a random place, which may be equal."""
        match kind:
            case {"type": "record", "fields": fields}:
                each = self.dice.choice(fields)
                return {**value, each["name"]: self.changed(each["type"], value[each["name"]])}
            case {"type": "map", "values": inner} if value and self.dice.random() < 0.7:
                key = self.dice.choice(list(value))
                return {**value, key: self.changed(inner, value[key])}
            case list() if self.dice.random() < 0.5:
                return Branch(value.index, self.changed(kind[value.index], value.value))
            case _:
                return self.value(kind, 5)


def number(dice, value):
    """Return an int or a long, sometimes with more bytes than it needs."""
    raw = value << 1 ^ value >> 63
    found = bytearray()
    while raw > 127:
        found.append(raw & 127 | 128)
        raw >>= 7
    found.append(raw)
    if dice.random() < 0.05 and len(found) < 10:
        found[-1] |= 128
        found.append(0)
    return bytes(found)


def part(dice, raw):
    return number(dice, len(raw)) + raw


def decimal_bytes(dice, value):
    return value.to_bytes((value.bit_length() // 8) + 1 + dice.randrange(2), "big", signed=True)


def blocks(dice, items):
    """Return items in blocks of random sizes, some of which say how many bytes they have."""
    found, at = b"", 0
    while at < len(items):
        some = items[at : at + dice.randrange(1, len(items) + 1)]
        inside = b"".join(some)
        head = (
            number(dice, len(some))
            if dice.random() < 0.5
            else number(dice, -len(some)) + part(dice, inside)[: -len(inside) or None]
        )
        found += head + inside
        at += len(some)
    return found + number(dice, 0)


def encoded(dice, kind, value, known):  # noqa: C901, PLR0912 - one case a type
    match kind:
        case "null":
            return b""
        case "boolean":
            return bytes([value])
        case "float" | "double":
            return struct.pack("<f" if kind == "float" else "<d", value)
        case "int" | "long":
            return number(dice, value)
        case "string":
            return part(dice, value.encode())
        case "bytes":
            return part(dice, value)
        case list():
            return number(dice, value.index) + encoded(dice, kind[value.index], value.value, known)
        case {"type": "enum", "symbols": symbols}:
            return number(dice, symbols.index(value))
        case {"type": "fixed"}:
            return value
        case {"logicalType": "decimal"}:
            return part(dice, decimal_bytes(dice, value))
        case {"type": "array", "items": items}:
            return blocks(dice, [encoded(dice, items, each, known) for each in value])
        case {"type": "map", "values": inner}:
            entries = [part(dice, key.encode()) + encoded(dice, inner, each, known) for key, each in value.items()]
            if entries and dice.random() < known.get(REPEATED, 0):
                entries.append(entries[0])
            dice.shuffle(entries)
            return blocks(dice, entries)
        case {"type": "record", "name": name, "fields": fields}:
            known = {**known, name: kind}
            return b"".join(encoded(dice, each["type"], value[each["name"]], known) for each in fields)
        case {"type": inner}:
            return encoded(dice, inner, value, known)
        case name:
            return encoded(dice, known[name], value, known)


def leb(count):
    found = bytearray()
    while count > 127:
        found.append(count & 127 | 128)
        count >>= 7
    return bytes([*found, count])


def signed(value):
    return value.to_bytes((value if value >= 0 else ~value).bit_length() // 8 + 1, "big", signed=True)


def scalar(value):
    match value:
        case None | bool():
            return {None: b"\x0b", True: b"\x07", False: b"\x08"}[value]
        case int():
            return b"\x04" + signed(value) if -1 << 63 <= value < 1 << 63 else b"\x05" + str(value).encode()
        case float():
            return b"\x0f" + struct.pack(">d", float("nan") if value != value else value + 0.0)  # noqa: PLR0124
        case UUID():
            return b"\x03" + value.bytes
        case str() if UUID_TEXT.fullmatch(value):
            return b"\x03" + UUID(value).bytes
        case str():
            return b"\x01" + value.encode()
        case bytes():
            return b"\x02" + value
        case Decimal():
            sign, digits, exponent = value.as_tuple()
            text = "".join(map(str, digits)).lstrip("0")
            short = text.rstrip("0")
            return b"\x06" + (f"{'-' * sign}{short}e{exponent + len(text) - len(short)}" if text else "0e0").encode()
        case dt.datetime():
            return b"\x0e\x04" + signed((value.replace(tzinfo=None) - EPOCH) // dt.timedelta(microseconds=1) * 1000)
        case _:
            raise TypeError(value)


def by_names(parsed, value):
    """Return whether the value is exactly one record, and the record. Types of a union with several names are named."""
    stream = io.BytesIO(value)
    found = fastavro.schemaless_reader(stream, parsed, return_named_type=True, return_named_type_override=True)
    return stream.tell() == len(value), found


def whole(schema, value):
    """Return the canonical content of what fastavro returns, without the fields that take no bytes."""
    name = schema["name"].encode()
    return b"\0\0\3" + leb(len(name)) + name + item(value)


def plain(content):
    """Return canonical content without the names of records, enums, and fixed."""
    found, at = plain_item(content, 1)
    assert at == len(content)
    return b"\0" + found


def plain_item(content, at):
    size, at = leb_at(content, at)
    if size:
        return leb(size) + content[at : at + size], at + size
    kind, at = content[at], at + 1
    count, at = leb_at(content, at)
    if kind == 3:
        found, end = plain_item(content, at + count)
        name = content[at : at + count]
        return (b"\0\3" + leb(count) + name + found if name in OWN_TYPES else found), end
    found = b"\0" + bytes([kind]) + leb(count)
    for _ in range(count):
        if kind == 2:
            size, start = leb_at(content, at)
            found, at = found + content[at : start + size], start + size
        part, at = plain_item(content, at)
        found += part
    return found, at


def leb_at(content, at):
    size = shift = 0
    while content[at] > 127:
        size, shift, at = size | (content[at] & 127) << shift, shift + 7, at + 1
    return size | content[at] << shift, at + 1


def item(value, without=VOID):
    """Return the canonical bytes of what fastavro returns."""
    match value:
        case dict():
            kept = {key: inner for key, inner in value.items() if without is None or not key.startswith(without)}
            members = sorted((scalar(key), item(inner, without)) for key, inner in kept.items())
            return b"\0\2" + leb(len(members)) + b"".join(leb(len(key)) + key + inner for key, inner in members)
        case list():
            return b"\0\1" + leb(len(value)) + b"".join(item(each, without) for each in value)
        case (str(name), inner):
            return b"\0\3" + leb(len(name)) + name.encode() + item(inner, without)
        case dt.datetime(tzinfo=None):
            return b"\0\3\x0flocal-timestamp" + item((value - EPOCH) // dt.timedelta(microseconds=1) * 1000)
        case dt.date() if not isinstance(value, dt.datetime):
            return b"\0\3\4date" + item((value - EPOCH.date()).days)
        case dt.time():
            seconds = (value.hour * 60 + value.minute) * 60 + value.second
            return b"\0\3\4time" + item((seconds * 10**6 + value.microsecond) * 1000)
        case _:
            key = scalar(value)
            return leb(len(key)) + key


def same(one, two):
    """Return whether two decoded values are equal, with types. This does not depend on any canonical bytes."""
    if type(one) is not type(two):
        return False
    match one:
        case dict():
            return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
        case list() | tuple():
            return len(one) == len(two) and all(map(same, one, two))
        case float():
            return one == two or (one != one and two != two)  # noqa: PLR0124
        case dt.datetime():
            return one.tzinfo == two.tzinfo and one == two
        case _:
            return one == two


def content_of(content, value):
    try:
        return content(value), None
    except Unreadable as fault:
        return None, fault


def schemas(seed):
    dice = random.Random(seed)
    for _ in range(max(1, VALUES // SEEDS // OF_A_SCHEMA)):
        made = Typed(dice)
        yield dice, made, json.dumps(made.schema)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_values_have_equal_content_if_and_only_if_they_are_equal(seed):
    equal = unequal = 0
    for dice, made, text in schemas(seed):
        content, parsed = avro_content(text, None, ()), fastavro.parse_schema(made.schema)
        value, found = made.value(made.schema), []
        for _ in range(OF_A_SCHEMA):
            one, two = (encoded(dice, made.schema, value, {}) for _ in range(2))
            exact, decoded = by_names(parsed, one)
            assert exact is True, f"seed {seed}: {text}: {one.hex()}: {exact}"
            assert content(one) == content(two) == whole(made.schema, decoded), f"seed {seed}: {text}: {one.hex()}"
            found.append((content(one), decoded))
            value = made.changed(made.schema, value)
        for (one, decoded), (two, other) in pairwise(found):
            assert (one == two) == same(decoded, other), f"seed {seed}: {text}: {decoded} {other}"
            equal, unequal = equal + (one == two), unequal + (one != two)
    assert equal > 0 < unequal


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_damaged_value_has_the_fault_that_the_reader_finds(seed):
    faults = dict.fromkeys(("not_avro", "not_utf8", "repeated_member"), 0)
    for dice, made, text in schemas(1000 + seed):
        content, reader, parsed = (
            avro_content(text, None, ()),
            avro_reader(text, (), None),
            fastavro.parse_schema(made.schema),
        )
        good = [encoded(dice, made.schema, made.value(made.schema), {REPEATED: 0.2}) for _ in range(OF_A_SCHEMA)]
        for value in (damaged(dice, each, good) for each in good):
            found, fault = content_of(content, value)
            _, damage = content_of(reader.read, value)
            exact = by_fastavro(parsed, value)[0]
            if damage is not None:
                assert (fault.code, fault.detail) == (damage.code, damage.detail), f"seed {seed}: {text}: {value.hex()}"
            elif fault is not None:
                assert fault.code in OWN_FAULTS, f"seed {seed}: {text}: {value.hex()}"
                assert fault.code != "not_utf8" or exact is not True, f"seed {seed}: {text}: {value.hex()}"
            elif exact is True and not any(kind in text for kind in LOOSE):
                expected = whole(made.schema, by_names(parsed, value)[1])
                assert found == expected, f"seed {seed}: {text}: {value.hex()}"
            if fault is not None:
                faults[fault.code] = faults.get(fault.code, 0) + 1
    assert all(faults.values())


class Evolved:
    """Another version of a schema, which can read most values of the first."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.names = 0
        self.defined: list[str] = []

    def name(self, prefix="new") -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    def kind(self, kind, union=True):  # noqa: C901 - one case a type
        dice = self.dice
        if union and not isinstance(kind, list) and dice.random() < 0.1:
            return ["null", self.kind(kind, union=False)] if kind != "null" else ["null"]
        match kind:
            case "int":
                return dice.choice(("int", "int", "long", "double"))
            case "float":
                return dice.choice((kind, kind, "double"))
            case "string" | "bytes":
                return dice.choice((kind, kind, kind, "string", "bytes"))
            case list():
                return self.union(kind)
            case {"type": "enum"}:
                symbols = dice.sample(kind["symbols"], dice.choice((2, 3, 3)))
                return self.named(kind) | {"symbols": symbols}
            case {"type": "fixed"}:
                return self.named(kind) | ({"size": 4} if dice.random() < 0.05 else {})
            case {"type": "array", "items": items}:
                return {"type": "array", "items": self.kind(items)}
            case {"type": "map", "values": values}:
                return {"type": "map", "values": self.kind(values)}
            case {"type": "record"}:
                return self.record(kind)
            case _:
                return kind if kind != "boolean" or dice.random() < 0.95 else "string"

    def union(self, kind):
        match self.dice.randrange(8):
            case 0:
                return self.kind(kind[-1], union=False)
            case 1:
                return [self.kind(each, union=False) for each in kind[1:]]
            case _:
                return self.dice.sample([self.kind(each, union=False) for each in kind], len(kind))

    def named(self, kind):
        match self.dice.randrange(8):
            case 0:
                return kind | {"name": self.name("New"), "aliases": [kind["name"]]}
            case 1:
                return kind | {"name": self.name("New")} if self.dice.random() < 0.2 else kind
            case _:
                return dict(kind)

    def record(self, kind):
        fields = [self.field(each) for each in kind["fields"] if each["name"] == "self" or self.dice.random() < 0.9]
        if all(each["type"] == "null" for each in fields):
            fields.append({"name": self.name(), **ADDED[0]})
        if self.dice.random() < 0.3:
            fields.append({"name": self.name(), **self.dice.choice(ADDED)})
        self.dice.shuffle(fields)
        # The name stays: a field of the record may name it.
        return kind | {"fields": fields}

    def field(self, field):
        if field["name"] == "self":
            return dict(field)
        made = {"name": field["name"], "type": self.kind(field["type"])}
        if self.dice.random() < 0.1:
            made |= {"name": self.name(), "aliases": [field["name"]]}
        return made


ADDED = (
    {"type": "int", "default": 7},
    {"type": "double", "default": 1.5},
    {"type": ["null", "string"], "default": None},
    {"type": {"type": "array", "items": "string"}, "default": ["a", "b"]},
    {"type": {"type": "map", "values": "long"}, "default": {"a": 1}},
    {"type": "string", "default": "00112233-4455-6677-8899-aabbccddeeff"},
    {"type": "int"},
)


def by_resolution(parsed, pinned, value):
    """Return the value as fastavro reads it with the pinned schema, or why it does not."""
    try:
        return fastavro.schemaless_reader(io.BytesIO(value), parsed, pinned), ""
    except SchemaResolutionError:
        return None, "schema_unresolvable"
    except UnicodeDecodeError:
        return None, "not_utf8"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_pinned_schema_reads_what_fastavro_reads(seed):
    codes = {"": 0, "schema_unresolvable": 0}
    for dice, made, text in schemas(2000 + seed):
        parsed, reader = fastavro.parse_schema(made.schema), Evolved(dice).record(made.schema)
        pinned, content = fastavro.parse_schema(reader), avro_content(text, json.dumps(reader), ())
        good = [encoded(dice, made.schema, made.value(made.schema), {}) for _ in range(OF_A_SCHEMA)]
        for value in good:
            decoded, code = by_resolution(parsed, pinned, value)
            found, fault = content_of(content, value)
            said = f"seed {seed}: {text} as {json.dumps(reader)}: {value.hex()}: {fault}"
            if fault is None:
                assert (code, plain(found)) == ("", b"\0" + item(decoded, None)), said
            elif not STRICTER.search(
                fault.detail
            ):  # fastavro looks for a field without a value when it has read the others
                assert code == fault.code or (code, fault.code) == ("not_utf8", "schema_unresolvable"), said
            codes[code] = codes.get(code, 0) + 1
        for value in (damaged(dice, each, good) for each in good):
            fault, damage = content_of(content, value)[1], content_of(avro_reader(text, (), None).read, value)[1]
            if damage is not None:
                assert (fault.code, fault.detail) == (damage.code, damage.detail), f"seed {seed}: {text}: {value.hex()}"
            elif fault is not None:
                assert fault.code in {"schema_unresolvable", *OWN_FAULTS}, f"seed {seed}: {text}: {value.hex()}"
    assert all(codes.values())
