"""An odd record among usual ones is read one by one, and only it is; tests/property compares what is read."""

import json
import tracemalloc
from unittest import mock

import cbor2
import msgspec
import pytest

from dedup.core import extract
from dedup.core.csv_row import CsvLayout
from dedup.core.event_time import FieldTime, RecordTime
from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import Fault, extract_one
from dedup.core.framing import SchemaBook
from dedup.core.odd_rows import NotInColumns, in_order, in_pieces, texts_of
from dedup.core.tracking_id import ContentRule, FieldRule, HeaderRule, KeyRule, TrackingId

COUNT = 1_000
ID = TrackingId(FieldRule(("id",)))
AVSC = '{"type": "record", "name": "R", "fields": [{"name": "id", "type": "string"}, {"name": "kind", "type": %s}]}'
ENUM = '{"type": "enum", "name": "E", "symbols": ["A", "B"]}'
PROTO = 'syntax = "proto2"; message Order { optional string id = 1; optional int64 v = 2; }'


def event(row: int) -> dict[str, object]:
    return {"id": f"order-{row}", "v": row, "t": f"2026-01-31T08:00:00.{row % 1000:03}Z"}


def in_json(row: int) -> bytes:
    return json.dumps(event(row)).encode()


def in_avro(row: int) -> bytes:
    return b"\x12id-%06d\x02" % row


def in_protobuf(row: int) -> bytes:
    return b"\x0a\x09id-%06d\x10\x05" % row


def in_csv(row: int) -> bytes:
    return b"order-%d,%d" % (row, row)


def record(fmt, **more) -> Recipe:
    schema = {"avro": AVSC % ENUM, "protobuf": PROTO, "csv": CsvLayout(("id", "v"))}.get(fmt, "")
    return Recipe(ID, fmt=fmt, schema=schema, **more)


JSON = Recipe(ID, FieldTime(("t",), "rfc3339"))
ODD = [
    ("missing", JSON, in_json, b'{"t": "2026-01-31T08:00:00Z"}'),
    ("null", JSON, in_json, b'{"id": null, "t": "2026-01-31T08:00:00Z"}'),
    ("empty", JSON, in_json, b'{"id": "", "t": "2026-01-31T08:00:00Z"}'),
    ("another type", JSON, in_json, b'{"id": 1.5, "t": "2026-01-31T08:00:00Z"}'),
    ("no time", JSON, in_json, b'{"id": "a", "t": "soon"}'),
    ("truncated", JSON, in_json, in_json(7)[:-9]),
    ("no object", JSON, in_json, b"[" + in_json(7) + b"]"),
    ("no value", JSON, in_json, None),
    ("no bytes", JSON, in_json, b""),
    ("not UTF-8", JSON, in_json, in_json(7).replace(b'"v"', b'"\xff"')),
    ("escapes", JSON, in_json, in_json(7).replace(b'"v"', b'"\\u0069"')),
    ("repeated", JSON, in_json, in_json(7).replace(b'"v"', b'"id"')),
    ("nested deeply", JSON, in_json, in_json(7).replace(b": 7", b": " + b"[" * 600 + b"]" * 600)),
    ("no Avro", record("avro"), in_avro, b"\x7f"),
    ("truncated Avro", record("avro"), in_avro, in_avro(7)[:5]),
    ("longer Avro", record("avro"), in_avro, in_avro(7) + b"\0"),
    ("no symbol", record("avro"), in_avro, in_avro(7)[:-1] + b"\x04"),
    ("Avro text", record("avro"), in_avro, in_avro(7).replace(b"id-", b"\xff--")),
    ("Avro number", record("avro"), in_avro, in_avro(7)[:-1] + b"\xff" * 11),
    ("truncated Protobuf", record("protobuf"), in_protobuf, in_protobuf(7)[:5]),
    ("no tag", record("protobuf"), in_protobuf, b"\0" + in_protobuf(7)),
    ("wire type", record("protobuf"), in_protobuf, b"\x0d" + in_protobuf(7)[1:]),
    ("a group", record("protobuf"), in_protobuf, in_protobuf(7) + b"\x1b\x1c"),
    ("Protobuf text", record("protobuf"), in_protobuf, in_protobuf(7).replace(b"id-", b"\xff--")),
    ("Protobuf number", record("protobuf"), in_protobuf, in_protobuf(7)[:-1] + b"\xff" * 11),
    ("MessagePack", record("msgpack"), lambda row: msgspec.msgpack.encode(event(row)), b"\xc1"),
    ("CBOR", record("cbor"), lambda row: cbor2.dumps(event(row)), b"\xff"),
    ("cells", record("csv"), in_csv, b"a"),
    ("CSV text", record("csv"), in_csv, b"\xff,1"),
    ("framing", Recipe(ID, fmt="json_schema"), lambda row: b"\0\0\0\0\1" + in_json(row), in_json(7)),
    ("content", Recipe(TrackingId(ContentRule())), in_json, b'{"id": 1, "v": 2, "v": 3}'),
]


@pytest.mark.parametrize(("recipe", "usual", "odd"), [case[1:] for case in ODD], ids=[case[0] for case in ODD])
@pytest.mark.parametrize("every", [COUNT, 50])
def test_odd_values_alone_are_read_one_by_one(recipe, usual, odd, every):
    values = [odd if row % every == 17 else usual(row) for row in range(COUNT)]
    records = [(b"key", value, (), row) for row, value in enumerate(values)]
    with mock.patch.object(extract, "extract_one", side_effect=extract_one) as slow:
        found = Extractor(recipe)(*map(list, zip(*records, strict=True)))
    assert slow.call_count == COUNT // every
    for row in (17, 16, 18, COUNT - 1):
        one = extract_one(recipe, *records[row])
        if isinstance(one, Fault):
            assert found.faults[row] == one
        else:
            assert (found.ids[row], found.times_ms[row]) == (one.id, one.time_ms)
            assert row not in found.faults


@pytest.mark.parametrize(
    "change",
    [
        lambda row, value: b" \t" + value + b"\r\n" if row % 3 else value,
        lambda _, value: value.replace(b'"v"', b'"a\\u002B\\u003c\\n\\"v"'),
        lambda row, value: value.replace(b".%03d" % (row % 1000), (b"", b".5", b".123456")[row % 3]),
        lambda row, value: value.replace(b'"v": ', b'"customer": {"id": "a \\"id\\"", "t": [{"id": 1}]}, "v": '),
    ],
    ids=["white space", "escapes of other characters", "times of several lengths", "names again elsewhere"],
)
def test_usual_values_of_other_producers_are_read_in_columns(change):
    values = [change(row, in_json(row)) for row in range(COUNT)]
    with mock.patch.object(extract, "extract_one", side_effect=pytest.fail):
        found = Extractor(JSON)([b"key"] * COUNT, values, [()] * COUNT, [0] * COUNT)
    for row, value in enumerate(values):
        one = extract_one(JSON, b"key", value, (), 0)
        assert (found.ids[row], found.times_ms[row]) == (one.id, one.time_ms)


@pytest.mark.parametrize("rule", [KeyRule(), HeaderRule("id")], ids=["key", "header"])
def test_records_without_a_key_or_a_header_alone_are_read_one_by_one(rule):
    lacking = [row for row in range(COUNT) if row % 50 == 3]
    keys = [None if row in lacking else b"key-%d" % row for row in range(COUNT)]
    headers = [[] if key is None else [("id", key)] for key in keys]
    with mock.patch.object(extract, "extract_one", side_effect=extract_one) as slow:
        found = Extractor(Recipe(TrackingId(rule), RecordTime()))(keys, [b"{}"] * COUNT, headers, [0] * COUNT)
    assert sorted(found.faults) == lacking
    assert slow.call_count == len(lacking)


def test_rows_that_no_attempt_names_are_left_to_the_last_resort():
    def refuse(rows):
        raise NotInColumns([0] if len(rows) > 98 else [])

    left = range(2, 100)
    pieces = in_pieces(100, [0], refuse, list, tuple)
    assert pieces == [([0], [0]), ([1], [1]), ([*left], (*left,))]


def test_the_last_few_rows_are_not_tried_again():
    def tried(rows):
        pytest.fail(f"{len(rows)} rows were tried again")

    left = [row for row in range(17) if row != 3]
    pieces = in_pieces(17, [3], tried, list, lambda _: pytest.fail("the rows are known"))
    assert pieces == [([3], [3]), (left, left)]


def test_attempts_that_find_one_row_each_end():
    tried = [1_000]

    def refuse(rows):
        tried.append(len(rows))
        raise NotInColumns([len(rows) - 1])

    pieces = in_pieces(1_000, [999], refuse, list, lambda _: pytest.fail("the rows are known"))
    assert len(tried) < 20
    assert sorted(row for rows, _ in pieces for row in rows) == list(range(1_000))
    named = len(tried) - 1  # what the last attempt refused is read one by one with the rest
    assert in_order(1_000, pieces)[:3] == [named, named + 1, named + 2]


def test_a_text_that_is_not_utf_8_is_named():
    with pytest.raises(NotInColumns) as caught:
        texts_of([b"a", b"\xff", "é".encode(), b"\xc3"])
    assert caught.value.rows == [1, 3]


WIDE = """{"type": "record", "name": "R", "fields": [{"name": "id", "type": ["bytes", "string", {"type": "array", "items":
"int"}, {"type": "map", "values": "int"}, {"type": "fixed", "name": "F", "size": 1073741824}]}]}"""
GIGABYTE = {
    # 1 << 30 in zigzag takes five bytes; the first byte is the union's branch.
    "avro bytes": ("avro", b"\0\x80\x80\x80\x80\x08abc", "not_avro"),
    "avro string": ("avro", b"\2\x80\x80\x80\x80\x08abc", "not_avro"),
    "avro array": ("avro", b"\4\x80\x80\x80\x80\x08\2\2", "not_avro"),
    "avro array by size": ("avro", b"\4\xff\xff\xff\xff\7\x80\x80\x80\x80\x08\2\2", "not_avro"),
    "avro map": ("avro", b"\6\x80\x80\x80\x80\x08\2a\2", "not_avro"),
    "avro key": ("avro", b"\6\2\x80\x80\x80\x80\x08a\2", "not_avro"),
    "avro fixed": ("avro", b"\x08abc", "not_avro"),
    "protobuf string": ("protobuf", b"\x0a\x80\x80\x80\x80\4abc", "not_protobuf"),
    "protobuf unknown": ("protobuf", b"\x0a\1a\x3a\x80\x80\x80\x80\4abc", "not_protobuf"),
    "protobuf indexes": ("framed", b"\0\0\0\0\1\x80\x80\x80\x80\x08\0", "bad_message_indexes"),
    "msgpack text": ("msgpack", b"\x81\xa2id\xdb\x40\0\0\0abc", "not_msgpack"),
    "msgpack bytes": ("msgpack", b"\x81\xa2id\xc6\x40\0\0\0abc", "not_msgpack"),
    "msgpack extension": ("msgpack", b"\x81\xa2id\xc9\x40\0\0\0\1abc", "not_msgpack"),
    "msgpack array": ("msgpack", b"\x82\xa2id\1\xa1x\xdd\x40\0\0\0\1\1", "not_msgpack"),
    "msgpack map": ("msgpack", b"\xdf\x40\0\0\0\xa2id\1", "not_msgpack"),
    "cbor text": ("cbor", b"\xa1bid\x7a\x40\0\0\0abc", "not_cbor"),
    "cbor bytes": ("cbor", b"\xa1bid\x5b\0\0\0\0\x40\0\0\0abc", "not_cbor"),
    "cbor bignum": ("cbor", b"\xa1bid\xc2\x5a\x40\0\0\0abc", "not_cbor"),
    "cbor array": ("cbor", b"\xa2bid\1ax\x9a\x40\0\0\0\1\1", "not_cbor"),
    "cbor map": ("cbor", b"\xba\x40\0\0\0bid\1", "not_cbor"),
}


@pytest.mark.parametrize(("fmt", "value", "code"), GIGABYTE.values(), ids=GIGABYTE)
def test_a_gigabyte_that_is_announced_is_not_allocated(fmt, value, code):
    schema = {"avro": WIDE, "protobuf": PROTO, "framed": SchemaBook(lambda _: PROTO)}.get(fmt, "")
    one = Recipe(ID, fmt="protobuf" if fmt == "framed" else fmt, schema=schema)
    first, extract_all = extract_one(one, None, value, [], 5), Extractor(one)
    assert (first.code, len(first.detail) < 200) == (code, True)
    tracemalloc.start()
    try:
        assert extract_one(one, None, value, [], 5) == first
        found = extract_all([None] * 99, [value] * 99, [[]] * 99, [5] * 99)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1 << 20
    assert list(found.faults.values()) == [first] * 99
