"""Columns of a sink from values that are not JSON: every type of each format, and a table on a real broker."""

from __future__ import annotations

import asyncio
import datetime as dt
import io
import struct
import uuid
from decimal import Decimal
from functools import cache
from pathlib import Path

import cbor2
import fastavro
import msgspec
import pytest

from dedup.connect.upsert import RowMaker, _plain_leaf
from dedup.core.avro import avro_reader
from dedup.errors import TopologyError
from dedup.kafka.record_batch import Columns
from dedup.kafka.wire import TopicPartition
from dedup.topology.parse import parse
from tests.connect.stage import sqlite_rows
from tests.protoc import compiled

BASE_MS = 1_700_000_000_000
AT = dt.datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=dt.UTC)
AT_TEXT = "2023-11-14T22:13:20.123456Z"

AVRO = """{"type": "record", "name": "Order", "fields": [
  {"name": "id", "type": "string"},
  {"name": "n", "type": "long"},
  {"name": "price", "type": "double"},
  {"name": "small", "type": "float"},
  {"name": "paid", "type": "boolean"},
  {"name": "cents", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
  {"name": "uid", "type": {"type": "string", "logicalType": "uuid"}},
  {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
  {"name": "day", "type": {"type": "int", "logicalType": "date"}},
  {"name": "hour", "type": {"type": "int", "logicalType": "time-millis"}},
  {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
  {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
  {"name": "raw", "type": "bytes"},
  {"name": "note", "type": ["null", "string"]},
  {"name": "lines", "type": {"type": "array", "items": "long"}},
  {"name": "to", "type": {"type": "record", "name": "To", "fields": [{"name": "city", "type": "string"}]}}
]}"""
PROTO = """syntax = "proto3";
import "google/protobuf/timestamp.proto";
message Order {
  string id = 1; int64 n = 2; double price = 3; float small = 4; bool paid = 5;
  google.protobuf.Timestamp at = 6; Kind kind = 7; optional string note = 8; To to = 9; uint64 large = 10;
  repeated int64 lines = 11; google.protobuf.Timestamp later = 12;
  enum Kind { A = 0; B = 1; }
  message To { string city = 1; }
}
"""
ORDER = {
    "id": "e1",
    "n": -7,
    "price": 2.5,
    "small": 0.25,
    "paid": True,
    "cents": Decimal("12.30"),
    "uid": "0b1e5f5e-3f0c-4f0e-8a55-0d5d3f6b7a10",
    "at": AT,
    "day": AT.date(),
    "hour": dt.time(22, 13, 20, 123000),
    "local": AT.replace(tzinfo=None),
    "kind": "B",
    "raw": b"\xff",
    "note": None,
    "lines": [5, 6],
    "to": {"city": "Ulm"},
}


def avro_value(record=ORDER):
    target = io.BytesIO()
    fastavro.schemaless_writer(target, fastavro.parse_schema(msgspec.json.decode(AVRO)), record)
    return target.getvalue()


@cache
def message():
    return compiled(PROTO, "Order")


def proto_value(**fields):
    made = message()(**fields)
    if "at" not in fields and fields:
        made.at.FromDatetime(AT.replace(tzinfo=None))
    return made.SerializeToString()


def maker(fmt, columns, source=""):
    """Return what makes rows from values of a format; ``columns`` is YAML."""
    files = {"o.avsc": AVRO, "o.proto": PROTO}
    named = {"avro": "schema_id: none, schema: o.avsc", "protobuf": "schema_id: none, schema: o.proto"}
    text = (
        f"dedup: 1\nname: t\nsource: {{topics: [s], format: {fmt}, {named.get(fmt, source)}}}\n"
        f"tracking_id: {{key: true}}\nguard_period: 1h\noutput: {{topic: o}}\n"
        f"sink: {{url: 'sqlite:///x', table: t, columns: {{{columns}}}}}\n"
    )
    topology = parse(text, name="t.yaml", read_file=files.__getitem__)
    return RowMaker(topology, topology.sink.columns)


def of(fmt, value, columns, source=""):
    """Return the columns of one value, or the sentence of its dead letter: alone as in a batch."""
    found = []
    for count in (1, 9):
        batch = Columns(list(range(count)), [BASE_MS] * count, [b"k"] * count, [value] * count, [[]] * count)
        rows = maker(fmt, columns, source).rows([(TopicPartition("s", 0), batch)])
        found += [each.detail for each in rows.bad] or [list(row[2:]) for row in rows.rows]
    assert [each == found[0] for each in found] == [True] * 10, found
    return found[0]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("id", "e1"),
        ("{field: n, type: integer}", -7),
        ("{field: n, type: number}", -7.0),
        ("{field: price, type: number}", 2.5),
        ("{field: small, type: number}", 0.25),
        ("{field: paid, type: boolean}", True),
        ("cents", "12.30"),
        ("{field: cents, type: number}", 12.3),
        ("uid", "0b1e5f5e-3f0c-4f0e-8a55-0d5d3f6b7a10"),
        ("{field: at, type: time}", AT_TEXT),
        ("at", AT_TEXT),
        ("day", "2023-11-14"),
        ("hour", "22:13:20.123000"),
        ("local", "2023-11-14T22:13:20.123456"),
        ("kind", "B"),
        ("note", None),
        ("lines[1]", None),
        ("to.city", "Ulm"),
    ],
)
def test_each_type_of_avro_has_a_value_in_a_column(column, expected):
    if column == "lines[1]":
        column, expected = "{field: 'lines[1]', type: integer}", 6
    assert of("avro", avro_value(), f"c: {column}") == [expected]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("{field: id, type: integer}", "column c: it is text, not an integer of at most 64 bits"),
        ("n", "column c: it is a number, not text"),
        ("{field: price, type: integer}", "column c: it is a number, not an integer of at most 64 bits"),
        ("{field: cents, type: integer}", "column c: it is a number, not an integer of at most 64 bits"),
    ],
)
def test_a_member_of_another_type_is_said_with_its_column(column, said):
    assert of("avro", avro_value(), f"c: {column}") == said


@pytest.mark.parametrize(
    ("exponent", "kind", "found"),
    [
        (2, "integer", 100),
        (2, "text", "100"),
        (30, "integer", "column c: it is a number, not an integer of at most 64 bits"),
        (300, "number", 1e300),
        (400, "number", "column c: it is a number, not a finite number"),
        (5_000, "number", "column c: it is a number of more than 2,500 places"),
        (5_000, "integer", "column c: it is a number of more than 2,500 places"),
        (1_000_000, "text", "column c: it is a number of more than 2,500 places"),
        (-1_000_000, "text", "column c: it is a number of more than 2,500 places"),
        (1 << 62, "number", "column c: "),
    ],
)
def test_a_short_value_that_means_a_long_number_costs_nothing(exponent, kind, found):
    """Was: eleven bytes of CBOR stopped the sink, again after each start."""
    value = cbor2.dumps({"x": cbor2.CBORTag(4, [exponent, 1])})
    said = of("cbor", value, f"c: {{field: x, type: {kind}}}")
    assert said.startswith(found) if isinstance(found, str) and found.startswith("column") else said == [found]


@pytest.mark.parametrize("hours", [-1, 24, 25])
def test_a_time_that_is_not_of_a_day_is_a_dead_letter(hours):
    ms = hours * 3_600_000
    schema = '{"type": "record", "name": "R", "fields": [{"name": "h", "type": {"type": "int", "logicalType": "time-millis"}}]}'
    raw = io.BytesIO()
    plain = {"type": "record", "name": "R", "fields": [{"name": "h", "type": "int"}]}
    fastavro.schemaless_writer(raw, fastavro.parse_schema(plain), {"h": ms})
    (leaf,) = avro_reader(schema, (("h",),), None).read(raw.getvalue())
    with pytest.raises(TypeError, match="is no time of a day"):
        _plain_leaf(leaf, "text")


def test_an_integral_decimal_fits_an_integer():
    assert of("avro", avro_value(ORDER | {"cents": Decimal("12.00")}), "c: {field: cents, type: integer}") == [12]


@pytest.mark.parametrize(
    ("fields", "column", "expected"),
    [
        ({"id": "e1"}, "id", "e1"),
        ({"n": -7}, "{field: n, type: integer}", -7),
        ({"price": 2.5}, "{field: price, type: number}", 2.5),
        ({"small": 0.25}, "{field: small, type: number}", 0.25),
        ({"paid": True}, "{field: paid, type: boolean}", True),
        ({"id": "x"}, "{field: at, type: time}", AT_TEXT),
        ({"kind": 1}, "{field: kind, type: integer}", 1),
        ({"to": {"city": "Ulm"}}, "to.city", "Ulm"),
        # What was not sent: 0, false, or empty without presence, and NULL with presence.
        ({}, "{field: n, type: integer}", 0),
        ({}, "{field: price, type: number}", 0.0),
        ({}, "{field: paid, type: boolean}", False),
        ({}, "id", ""),
        ({}, "note", None),
        ({}, "to.city", None),
        ({}, "{field: later, type: time}", None),
        ({"large": 1 << 63}, "{field: large, type: number}", float(1 << 63)),
        ({"large": 1 << 63}, "{field: large, type: integer}", "column c: it is a number, not an integer of at most 64 bits"),
    ],
)  # fmt: skip
def test_each_type_of_protobuf_has_a_value_in_a_column(fields, column, expected):
    found = of("protobuf", proto_value(**fields), f"c: {column}")
    assert found == (expected if isinstance(expected, str) and expected.startswith("column") else [expected])


def test_a_time_before_1970_keeps_its_fraction():
    value = message()()
    value.at.FromNanoseconds(-1_500_000_000)
    assert of("protobuf", value.SerializeToString(), "c: {field: at, type: time}") == ["1969-12-31T23:59:58.500000Z"]


def test_a_time_beyond_the_year_9999_is_a_dead_letter():
    value = message()()
    value.at.seconds = 1 << 60
    said = of("protobuf", value.SerializeToString(), "c: {field: at, type: time}")
    assert said.startswith("column c: "), said


PACK = {"msgpack": msgspec.msgpack.encode, "cbor": cbor2.dumps}
MEMBERS = {"id": "e1", "n": -7, "price": 2.5, "paid": True, "at": AT, "to": {"city": "Ulm"}, "note": None}
CELLS = "columns: [id, n, price, paid, at, city]"
ROW = f'e1,-7,2.5,true,{AT_TEXT},"Ulm, Neu"\n'.encode()


@pytest.mark.parametrize("fmt", PACK)
@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("id", "e1"),
        ("{field: n, type: integer}", -7),
        ("{field: price, type: number}", 2.5),
        ("{field: paid, type: boolean}", True),
        ("to.city", "Ulm"),
        ("note", None),
        ("missing", None),
    ],
)
def test_each_type_of_messagepack_and_cbor_has_a_value_in_a_column(fmt, column, expected):
    assert of(fmt, PACK[fmt]({**MEMBERS, "at": 0}), f"c: {column}") == [expected]


def test_floats_of_every_width_and_timestamps():
    packed = b"\x82\xa1p\xca" + struct.pack(">f", 0.25) + b"\xa2at\xd6\xff\0\0\0\x01"
    assert of("msgpack", packed, "a: {field: p, type: number}, b: {field: at, type: time}") == [
        0.25,
        "1970-01-01T00:00:01Z",
    ]
    halved = cbor2.dumps({"p": 0.25, "at": AT}, canonical=True)
    assert of("cbor", halved, "a: {field: p, type: number}") == [0.25]
    assert of("cbor", cbor2.dumps({"u": uuid.UUID(int=1), "d": Decimal("1.50")}), "a: u, b: d") == [
        "00000000-0000-0000-0000-000000000001",
        "1.50",
    ]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("id", "e1"),
        ("n", "-7"),
        ("{field: n, type: integer}", -7),
        ("{field: price, type: number}", 2.5),
        ("{field: paid, type: boolean}", True),
        ("{field: at, type: time}", AT_TEXT),
        ("city", "Ulm, Neu"),
        ("{field: id, type: integer}", "column c: it is text, not an integer of at most 64 bits"),
        ("{field: n, type: boolean}", "column c: it is text, not true or false"),
    ],
)
def test_a_csv_cell_becomes_what_its_column_says(column, expected):
    found = of("csv", ROW, f"c: {column}", CELLS)
    assert found == (expected if isinstance(expected, str) and expected.startswith("column") else [expected])


def test_an_empty_cell_is_null():
    assert of("csv", b"e1,,,,,\n", "a: id, b: {field: n, type: integer}, c: city", CELLS) == ["e1", None, None]


@pytest.mark.parametrize(("fmt", "value"), [("avro", b"\xff"), ("protobuf", b"\xff"), ("msgpack", b"\xc1"), ("cbor", b"\xff"), ("csv", b"a\n")])  # fmt: skip
def test_a_value_that_is_not_of_the_format_is_a_dead_letter(fmt, value):
    columns = "c: id"
    assert isinstance(of(fmt, value, columns, CELLS if fmt == "csv" else ""), str)


@pytest.mark.parametrize(
    ("fmt", "columns", "said"),
    [
        ("avro", "c: idd", 'sink.columns.c: "idd" is not in o.avsc; did you mean "id"?'),
        ("avro", "c: {field: lines, type: text}", 'sink.columns.c.field: "lines" has the type array in o.avsc, which a column cannot hold'),
        ("protobuf", "c: to", 'sink.columns.c: "to" has the type message in o.proto, which a column cannot hold'),
        ("csv", "c: cty", 'sink.columns.c: "cty" is not a column; did you mean "city"?'),
        ("msgpack", "c: {field: to, type: json}", "sink.columns.c.type: json needs `source.format: json`; with msgpack, name the members one by one"),
    ],
)  # fmt: skip
def test_check_finds_columns_that_no_value_can_fill(fmt, columns, said):
    with pytest.raises(TopologyError) as refused:
        maker(fmt, columns, CELLS if fmt == "csv" else "")
    assert any(said in str(problem) for problem in refused.value.problems), refused.value.problems


@pytest.mark.broker
def test_a_table_is_filled_from_a_topic_of_avro_records(stage, admin):
    """Was: refused; only JSON values had columns."""
    admin.create_topic(stage.topic, 2, {"retention.ms": "-1"})
    path = stage.directory / "rows.db"
    Path(stage.directory / "o.avsc").write_text(AVRO, encoding="utf-8")
    text = stage.topology_text(
        f"sqlite:///{path}",
        "  columns: {n: {field: n, type: integer}, price: {field: price, type: number}, at: {field: at, type: time}}",
    ).replace(
        "partitioned_by: tracking_id", "partitioned_by: tracking_id, format: avro, schema_id: none, schema: o.avsc"
    )
    topology = parse(text, name="sink.yaml", read_file=lambda name: (stage.directory / name).read_text())
    values = [avro_value(ORDER | {"id": f"e{number}", "n": number}) for number in range(500)]
    stage.send([(None, value, BASE_MS) for value in [*values, *values[:100], b"\xff"]])
    done = asyncio.run(stage.sink(topology))
    assert (done.inserted, done.dead_letters) == (500, 1)
    assert sorted(row[2:] for row in sqlite_rows(path)) == [(number, 2.5, AT_TEXT) for number in range(500)]
