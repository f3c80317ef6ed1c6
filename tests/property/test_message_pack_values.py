"""MessagePack values, whole and damaged, as msgspec reads them; columns as one by one."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.avro import Leaf, Refused
from dedup.core.event_time import FieldTime, RecordTime
from dedup.core.exact_json import ABSENT, Number, Unreadable
from dedup.core.extract_one import Recipe
from dedup.core.member_reader import MemberReader
from dedup.core.message_pack import MessagePackReader
from dedup.core.odd_rows import NotInColumns
from dedup.core.tracking_id import FieldRule, FirstOfRule, HeaderRule, KeyRule, TrackingId
from tests.extraction import same_in_columns

NAMES = ["id", "a", "t", "é", "", 'a"', "\\", "\n"]
PATHS = [
    ("id",),
    ("a", "id"),
    ("t",),
    ("a", 0, "id"),
    ("a", 1),
    ("é",),
    ("", "a"),
    ("a",),
    ('a"',),
    ("a", "\\"),
    ("\n",),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.integers(-200, 200)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.datetimes(timezones=st.just(UTC))
    | st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary(max_size=17))
)
ITEMS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | st.integers(-300, 300), inner, max_size=4)
    ),
    max_leaves=12,
)
EVENTS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, ITEMS))
WELL_FORMED = msgspec.msgpack.Decoder(msgspec.Raw)


def reader_of(paths: list[Any], unit: str | None) -> MessagePackReader:
    time = None if unit is None else FieldTime(("t",), unit)  # type: ignore[arg-type]
    return MessagePackReader(paths, time)


def shown(reader: MemberReader, value: bytes) -> list[Leaf] | str:
    try:
        return reader.read(value)
    except Unreadable as refused:
        return refused.code


def looked_up(whole: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        if isinstance(whole, dict if isinstance(step, str) else list) and (
            step in whole if isinstance(step, str) else step < len(whole)
        ):
            whole = whole[step]
        else:
            return ABSENT
    return whole


def leaf_of(item: Any) -> Any:
    """Return the leaf that stands for an item that msgspec has decoded."""
    match item:
        case dict() | list():
            return Refused("map" if isinstance(item, dict) else "array")
        case float():
            return Refused("float")
        case datetime():
            return Refused("timestamp")
        case msgspec.msgpack.Ext():
            return Refused("extension")
        case int() if not isinstance(item, bool) and item >> 63 > 0:
            return Number(str(item))
        case _:
            return item


def time_of(item: Any, unit: str) -> Any:
    if item is None or item is ABSENT or isinstance(item, msgspec.msgpack.Ext | float | dict | list):
        return leaf_of(item)
    if unit == "timestamp" and isinstance(item, datetime):
        return math.floor(item.timestamp() * 1000) if item.microsecond % 1000 == 0 else ...
    taken = {"timestamp": (), "rfc3339": str, "ms": int}[unit]
    if isinstance(item, taken) and not isinstance(item, bool):
        return leaf_of(item)
    names = {bool: "boolean", int: "integer", str: "text", bytes: "bytes", datetime: "timestamp"}
    return Refused("number" if type(item) is int and item >> 63 > 0 else names[type(item)])


@given(EVENTS | ITEMS, st.lists(st.sampled_from(PATHS), max_size=3, unique=True), st.sampled_from(["timestamp", "ms"]))
def test_members_are_what_msgspec_reads(event, paths, unit):
    value = msgspec.msgpack.encode(event)
    whole = msgspec.msgpack.decode(value)
    *ids, time = reader_of(paths, unit).read(value)
    assert [(type(leaf), leaf) for leaf in ids] == [
        (type(leaf), leaf) for leaf in (leaf_of(looked_up(whole, path)) for path in paths)
    ]
    expected = time_of(looked_up(whole, ("t",)), unit)
    assert expected is ... or (type(time), time) == (type(expected), expected)


def spliced(value: bytes, at: int, inserted: bytes, dropped: int) -> bytes:
    at %= len(value) + 1
    return value[:at] + inserted + value[at + dropped :]


DAMAGED = st.builds(
    spliced, EVENTS.map(msgspec.msgpack.encode), st.integers(0, 200), st.binary(max_size=5), st.integers(0, 3)
)


@given(DAMAGED, st.lists(st.sampled_from(PATHS), max_size=3, unique=True), st.sampled_from([None, "timestamp", "ms"]))
def test_a_value_is_well_formed_if_msgspec_says_so(value, paths, unit):
    found = shown(reader_of(paths, unit), value)
    try:
        WELL_FORMED.decode(value)
    except msgspec.DecodeError:
        assert found in {"not_msgpack", "not_utf8"}
    else:
        assert found != "not_msgpack"


@given(
    st.lists(DAMAGED | EVENTS.map(msgspec.msgpack.encode), min_size=1, max_size=6),
    st.lists(st.sampled_from(PATHS), max_size=3, unique=True),
    st.sampled_from([None, "timestamp", "ms", "rfc3339"]),
)
def test_columns_are_what_is_read_one_by_one(values, paths, unit):
    reader = reader_of(paths, unit)
    rows = [shown(reader, value) for value in values]
    refused = {row for row, found in enumerate(rows) if isinstance(found, str)}
    if refused:
        with pytest.raises(NotInColumns) as caught:
            reader.columns(values)
        assert caught.value.rows
        assert set(caught.value.rows) <= refused
    else:
        columns = reader.columns(values)
        found = [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in values]
        assert [[(type(leaf), leaf) for leaf in row] for row in found] == [
            [(type(leaf), leaf) for leaf in row] for row in rows
        ]


@given(
    st.lists(st.tuples(st.sampled_from(["id", "a", "i"]), st.integers(0, 300)), max_size=5),
    st.sampled_from([b"", b"\xd9", b"\xda\0", b"\xdb\0\0\0"]),
)
def test_a_repeated_name_is_refused_however_it_is_written(members, head):
    """``head`` is what precedes the length of a name; nothing stands for the shortest form."""
    written = [
        (head + bytes([len(name)]) + name.encode() if head and at % 2 else msgspec.msgpack.encode(name))
        + msgspec.msgpack.encode(number)
        for at, (name, number) in enumerate(members)
    ]
    value = bytes([0x80 + len(members)]) + b"".join(written)
    reader = reader_of([("id",)], None)
    numbers = [number for name, number in members if name == "id"]
    expected = "repeated_member" if len(numbers) > 1 else numbers or [ABSENT]
    assert shown(reader, value) == expected
    if len(numbers) > 1:
        with pytest.raises(NotInColumns) as caught:
            reader.columns([value] * 3)
        assert caught.value.rows == [0, 1, 2]
    else:
        assert reader.columns([value] * 3) == [[*expected] * 3]


def doubtful(a_map: int, text: int, null: int) -> st.SearchStrategy[bytes]:
    """Return maps that may have a repeated name, a text that is not UTF-8, and no end.

    The arguments are the first bytes of a map and a text without content, and of null, in the format of the maps.
    """
    name = st.sampled_from([b"id", b"t", b"x"]).map(lambda raw: bytes([text + len(raw)]) + raw)
    leaf = st.sampled_from([b"\x01", bytes([text + 1, 0xFF]), bytes([text + 1]) + b"u", bytes([null])])
    inner = st.builds(lambda *pair: bytes([a_map + 1]) + b"".join(pair), name, leaf)
    members = st.lists(st.builds(lambda *pair: b"".join(pair), name, leaf | inner), max_size=5)
    whole = members.map(lambda pairs: bytes([a_map + len(pairs)]) + b"".join(pairs))
    return st.builds(lambda value, cut: value[: max(0, len(value) - cut)], whole, st.sampled_from([0, 0, 0, 1, 2, 3]))


FIELDS = st.sampled_from([("id",), ("x",), ("x", "id"), ("t",), ("t", "x")]).map(FieldRule)
RULES = FIELDS | st.lists(FIELDS | st.sampled_from([HeaderRule("h"), KeyRule()]), min_size=1, max_size=3).map(
    lambda rules: FirstOfRule(tuple(rules))
)
UNITS = st.sampled_from([None, "ms", "rfc3339"])


@given(RULES, UNITS, st.lists(doubtful(0x80, 0xA0, 0xC0), min_size=6, max_size=12))
def test_one_of_several_faults_is_the_same_in_columns(rule, unit, values):
    time = RecordTime() if unit is None else FieldTime(("t",), unit)
    same_in_columns(Recipe(TrackingId(rule), time, fmt="msgpack", fingerprint=True), values)
