"""Avro values of random schemas, whole and damaged: the reader against fastavro, and its columns against one by one.

DEDUP_FUZZ=1000000 asks for more values; a failure names the seed.
"""

from __future__ import annotations

import io
import json
import os
import random

import fastavro
import pytest

from dedup.core.avro import avro_reader
from dedup.core.event_time import RecordTime
from dedup.core.exact_json import ABSENT, Unreadable
from dedup.core.extract import Recipe
from dedup.core.tracking_id import FieldRule, FieldsRule, FirstOfRule, HeaderRule, TrackingId
from tests.extraction import same_in_columns

VALUES = int(os.environ.get("DEDUP_FUZZ", "100000")) // 4
SEEDS = 10
OF_A_SCHEMA = 50
LOOSE = (
    "a boolean is neither",
    "another size",
    "more than 64 bits",
    "is negative",
    "has no branch -",
    "has no symbol -",
)
"""What fastavro accepts, beside trailing bytes: any boolean, sizes of blocks, bits beyond 64, positions from the end."""
PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
LONGS = (0, 1, -1, 63, 64, -64, -65, 8191, 8192, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63))


class Made:
    """A schema without logical types, and values of it."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.names = 0
        self.paths: list[tuple[str | int, ...]] = []
        self.schema = self.record((), 0)

    def name(self) -> str:
        self.names += 1
        return f"N{self.names}"

    def record(self, path, depth):
        name, kinds = self.name(), self.dice.randrange(1, 6)
        fields = [{"name": f"f{at}", "type": self.kind((*path, f"f{at}"), depth + 1)} for at in range(kinds)]
        if self.dice.random() < 0.2:
            fields.append({"name": "self", "type": ["null", name]})
        return {"type": "record", "name": name, "fields": fields}

    def kind(self, path, depth, union=True):
        self.paths.append(path)
        match self.dice.randrange(12 if depth < 4 else 8):
            case 8 if union:
                return [
                    "null",
                    self.kind(path, depth + 1, union=False),
                    {"type": "fixed", "name": self.name(), "size": 3},
                ]
            case 9:
                return self.record(path, depth)
            case 10:
                items = self.kind((*path, self.dice.randrange(3)), depth + 1)
                return {"type": "array", "items": "long" if items == "null" else items}
            case 11:
                return {"type": "map", "values": self.kind((*path, self.dice.choice("ab")), depth + 1)}
            case 0:
                return {"type": "enum", "name": self.name(), "symbols": ["A", "B", "C"]}
            case choice:
                return PRIMITIVES[choice % 8]

    def value(self, kind, depth=0):  # noqa: C901, PLR0912 - one case a type
        dice = self.dice
        match kind:
            case "null":
                return None
            case "boolean":
                return dice.random() < 0.5
            case "int" | "long":
                most = 31 if kind == "int" else 63
                return dice.choice([each for each in LONGS if -(1 << most) <= each < 1 << most])
            case "float" | "double":
                return dice.choice((0.0, 1.5))
            case "bytes":
                return dice.randbytes(dice.choice((0, 1, 5, 70)))
            case "string":
                return dice.choice(("", "x", "é", "y" * 36, "z" * 200, "00112233-4455-6677-8899-aabbccddeeff"))
            case list():
                return self.value(dice.choice(kind), depth)
            case {"type": "enum"}:
                return dice.choice("ABC")
            case {"type": "fixed"}:
                return dice.randbytes(3)
            case {"type": "array", "items": items}:
                return [self.value(items, depth + 1) for _ in range(dice.choice((0, 1, 2, 5)))]
            case {"type": "map", "values": inner}:
                return {key: self.value(inner, depth + 1) for key in dice.sample("abcd", dice.randrange(4))}
            case {"type": "record", "name": name, "fields": fields}:
                self.known = {**getattr(self, "known", {}), name: kind}
                return {each["name"]: self.value(each["type"], depth + 1) for each in fields}
            case name:
                return None if depth > 6 else self.value(self.known[name], depth + 1)


def written(parsed, value) -> bytes | None:
    """Return the value's bytes, or None if fastavro can not tell which branch of a union it is."""
    stream = io.BytesIO()
    try:
        fastavro.schemaless_writer(stream, parsed, value)
    except ValueError:
        return None
    return stream.getvalue()


def damaged(dice: random.Random, value: bytes, others: list[bytes]) -> bytes:
    for _ in range(dice.choice((0, 1, 1, 2, 4))):
        at = dice.randrange(len(value) + 1)
        match dice.randrange(5):
            case 0:
                value = value[:at]
            case 1:
                value = (
                    value[:at]
                    + dice.choice((b"\0", b"\x01", b"\xff", b"\x80\x80\x80\x80\x08", b"\xff" * 10))
                    + value[at:]
                )
            case 2:
                value = value[:at] + bytes([dice.randrange(256)]) + value[at + 1 :]
            case 3:
                value = value[:at] + value[at + 1 + dice.randrange(3) :]
            case _:
                value = value[:at] + dice.choice(others)[dice.randrange(8) :]
    return value


def by_fastavro(parsed, value: bytes):
    """Return whether the value is exactly one record, and the record."""
    stream = io.BytesIO(value)
    try:
        found = fastavro.schemaless_reader(stream, parsed)
    except UnicodeDecodeError:
        return "text", None
    except Exception as error:  # noqa: BLE001 - each of many
        return type(error).__name__, None
    return stream.tell() == len(value), found


def read(reader, value):
    try:
        return reader.read(value), None
    except Unreadable as fault:
        return [], fault


def at_path(found, path):
    for step in path:
        match found, step:
            case dict(), str() if step in found:
                found = found[step]
            case list(), int() if step < len(found):
                found = found[step]
            case _:
                return ABSENT
    return found


def agree(leaf, expected) -> bool:
    match expected:
        case float() | dict() | list():
            return hasattr(leaf, "type_name")
        case bool() | int() | str() | bytes() | None:
            return type(leaf) is type(expected) and leaf == expected
        case _:
            return leaf is expected


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_reads_what_fastavro_reads_and_columns_what_it_reads(seed):
    dice = random.Random(seed)
    accepted = refused = 0
    for _ in range(max(1, VALUES // SEEDS // OF_A_SCHEMA)):
        made = Made(dice)
        text, parsed = json.dumps(made.schema), fastavro.parse_schema(made.schema)
        good = [
            each for each in (written(parsed, made.value(made.schema)) for _ in range(OF_A_SCHEMA)) if each is not None
        ]
        if not good:
            continue
        paths = tuple(dict.fromkeys(dice.choice(made.paths) for _ in range(3)))
        reader = avro_reader(text, paths, None)
        values = [value if dice.random() < 0.4 else damaged(dice, value, good) for value in good]
        for value in values:
            exact, expected = by_fastavro(parsed, value)
            leaves, fault = read(reader, value)
            if fault is not None:
                refused += 1
                known = fault.code in {"not_utf8", "repeated_member", "too_deep"} or any(
                    each in fault.detail for each in LOOSE
                )
                assert known or exact is not True, f"seed {seed}: {text}: {value.hex()}: {fault.detail}"
            else:
                accepted += 1
                assert exact in {True, "text"}, f"seed {seed}: {text}: {value.hex()}: {exact}"
                if exact is True:
                    for path, leaf in zip(paths, leaves, strict=True):
                        assert agree(leaf, at_path(expected, path)), (
                            f"seed {seed}: {text}: {value.hex()}: {path}: {leaf}"
                        )
        for batch in (values, good):
            in_columns(text, paths, batch)
    assert accepted > refused > 0


def in_columns(text, paths, values):
    """Each row of a batch is what `extract_one` says of it."""
    fields = tuple(map(FieldRule, paths))
    for rule in (fields[0], FieldsRule(paths), FirstOfRule((HeaderRule("h"), *fields))):
        same_in_columns(Recipe(TrackingId(rule), RecordTime(), "avro", fingerprint=True, schema=text), values)
