"""Protobuf values: the golden vectors of every type as ID and as time, one verdict for each way to be damaged, framings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dedup.core import tracking_id as encoding
from dedup.core.event_time import FieldTime
from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import Fault, One, extract_one
from dedup.core.framing import SchemaBook
from dedup.core.proto_schema import MAX_DEPTH
from dedup.core.protobuf import _Batch
from dedup.core.tracking_id import (
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyRule,
    Part,
    PartsRule,
    RawContentRule,
    TrackingId,
    parse_path,
)
from tests.extraction import everywhere
from tests.protoc import compiled

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "protobuf.json").read_text())
BEGIN = 'syntax = "proto3"; import "google/protobuf/timestamp.proto"; import "google/protobuf/wrappers.proto";'


def schema_of(*fields):
    return f"{BEGIN} message R {{ {' '.join(fields)} }} message M {{ M m = 1; string s = 2; }} enum E {{ Z = 0; }}"


def recipe(schema, path="f", **options):
    return Recipe(TrackingId(FieldRule(parse_path(path))), fmt="protobuf", schema=schema, **options)


def test_the_vectors_are_of_this_encoding():
    assert VECTORS["encoding_version"] == encoding.ENCODING_VERSION


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("around", ["before", "behind"])
def test_a_vector_as_id_and_as_time(case, around):
    schema = schema_of(case["field"], "bool end = 15;")
    compiled(schema, "R")  # it is .proto text
    value = bytes.fromhex(case["value"])
    value = value + b"\x78\x01" if around == "behind" else b"\x78\x01" + value
    found = everywhere(recipe(schema), value)
    assert (found.id.hex() if isinstance(found, One) else found.code) == case["id"]
    found = everywhere(recipe(schema, "end", event_time=FieldTime(("f",), case["unit"])), value)
    assert (found.time_ms if isinstance(found, One) else found.code) == case["time"]
    if isinstance(found, Fault):
        assert len(found.detail) < 200


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"\x08", "it ends inside a number (byte 1)"),
        (b"\x08\x80", "it ends inside a number (byte 1)"),
        (b"\x80", "it ends inside a number (byte 0)"),
        (b"\x12\x03ab", "it ends inside a field of 3 bytes (byte 2)"),
        (b"\x12\xff\xff\xff\xff\x07", "it ends inside a field of 2147483647 bytes (byte 6)"),
        (b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "it ends inside a field of 18446744073709551615 bytes"),
        (b"\x15abc", "it ends inside a field of 4 bytes (byte 1)"),
        (b"\x11abc", "it ends inside a field of 8 bytes (byte 1)"),
        (b"\x00\x01", "a field has the number 0 (before byte 1)"),
        (b"\x80\x80\x80\x80\x80\x01\x01", "a field has the number 4294967296"),
        (b"\x16", "a field has the wire type 6 (before byte 1)"),
        (b"\x17", "a field has the wire type 7 (before byte 1)"),
        (b"\x14", "a group ends that did not begin (before byte 1)"),
        (b"\x13\x08\x01", "it ends inside a number (byte 3)"),
        (b"\x13\x1c", "a group ends that did not begin (before byte 2)"),
        (b"\x0a\x00", "field 1 has another wire type than in the schema (before byte 1)"),
        (b"\x22\x03\x12\x03a", "it ends inside a field of 3 bytes (byte 4)"),
        (b"\x22\x02\x12\x01", "it ends inside a field of 1 bytes (byte 4)"),
        (b"\x22\x02\x12\x01a", "it ends inside a field of 8 bytes (byte 5)"),  # damaged twice; the ID's own comes last
    ],
)
def test_a_damaged_value_is_a_dead_letter_with_its_reason(value, said):
    schema = schema_of("int64 f = 1;", "M m = 4;")
    one = Recipe(TrackingId(FieldsRule((("f",), ("m", "s")))), fmt="protobuf", schema=schema)
    fault = everywhere(one, value)
    assert (fault.kind.name, fault.code) == ("UNREADABLE", "not_protobuf")
    assert fault.detail.startswith(f"the value is not a message of the schema: {said}")


def test_embedded_messages_merge_and_what_is_unknown_is_passed_over():
    schema = schema_of("M f = 1;", "oneof o { M g = 2; M h = 3; }")
    two = b"\x0a\x03\x12\x01a" + b"\x0a\x02\x0a\x00" + b"\x23\x08\x01\x24" + b"\x2a\x01\xff" + b"\x35abcd"
    assert everywhere(recipe(schema, "f.s"), two).id == b"\x01a"
    assert everywhere(recipe(schema, "f.m.s"), two).code == "id_missing"
    assert everywhere(recipe(schema, "g.s"), b"\x12\x03\x12\x01a\x12\x00").id == b"\x01a"
    assert everywhere(recipe(schema, "g.s"), b"\x12\x03\x12\x01a\x1a\x00\x12\x00").code == "id_missing"
    assert everywhere(recipe(schema, "g.s"), b"\x12\x03\x12\x01a\x18\x00").id == b"\x01a"  # no member of the oneof


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("f", "", b"\x04\x00"),
        ("f", "0800", b"\x04\x00"),
        ("b", "", b"\x08"),
        ("e", "", b"\x04\x00"),
        ("s", "", "id_empty"),
        ("i.n", "", "id_missing"),  # the message around the member is not there
        ("i.n", "2200", b"\x04\x00"),
        ("i.n", "220208002200", b"\x04\x00"),
        ("i.n", "220208052200", b"\x04\x05"),  # two messages merge
        ("j.n", "2a002a00", b"\x04\x00"),
        ("j.n", "2a003000", "id_missing"),  # another member of the oneof came last
        ("j.n", "2a02080730002a00", b"\x04\x00"),
        ("k", "", "id_missing"),  # has presence
        ("w", "", "id_missing"),
        ("w", "4200", b"\x04\x00"),
        ("d", "", "id_ill_typed"),
        ("r", "", "id_missing"),
    ],
)
def test_zero_is_a_value_where_the_topology_says_so(path, value, expected):
    schema = schema_of(
        "int64 f = 1;", "bool b = 2;", "string s = 3;", "I i = 4;", "oneof o { I j = 5; int32 k = 6; }", "E e = 7;",
        "google.protobuf.Int64Value w = 8;", "double d = 9;", "repeated int32 r = 10;",
    )  # fmt: skip
    schema += " message I { sint64 pad = 3; int64 n = 1; }"
    compiled(schema, "R")
    one = Recipe(TrackingId(FieldRule(parse_path(path)), zeros=True), fmt="protobuf", schema=schema)
    found = everywhere(one, bytes.fromhex(value))
    assert (found.id if isinstance(found, One) else found.code) == expected


def test_an_event_time_of_zero_stays_missing():
    one = Recipe(TrackingId(FieldRule(("f",)), zeros=True), FieldTime(("t",), "ms"), "protobuf")
    found = everywhere(replace(one, schema=schema_of("int64 f = 1;", "int64 t = 2;")), b"")
    assert found.code == "time_missing"


def test_groups_are_bounded():
    schema = schema_of("int32 f = 1;")
    for levels, code in ((MAX_DEPTH, ""), (MAX_DEPTH + 1, "too_deep")):
        found = everywhere(recipe(schema), b"\x08\x07" + b"\x13" * levels + b"\x14" * levels)
        assert found.code == code if code else found.id == b"\x04\x07"
    assert everywhere(recipe(schema), b"\x08\x07" + b"\x13" * 100_000).code == "too_deep"


def test_a_path_through_many_values_is_refused_and_one_to_nowhere_is_missing():
    schema = schema_of("repeated M f = 1;", "string s = 2;")
    assert everywhere(recipe(schema, "f.s"), b"\x0a\x00").code == "id_ill_typed"
    assert everywhere(recipe(schema, "f[0].s"), b"\x0a\x00").code == "id_ill_typed"
    assert everywhere(recipe(schema, "f.s"), b"").code == "id_missing"
    for path in ("s.t", "x", "s[0]", "[0]"):
        assert everywhere(recipe(schema, path), b"\x12\x01a").code == "id_missing"


def test_values_of_other_orders_are_read_one_by_one_after_few_steps(monkeypatch):
    fields = [f"int32 f{number} = {number};" for number in range(1, 200)]
    steps = []
    step = _Batch._field
    monkeypatch.setattr(_Batch, "_field", lambda *given: (steps.append(given), step(*given))[1])
    one = recipe(schema_of(*fields), "f1")
    values = [b"".join(b"%c\x07" % (8 * (1 + (at + row) % 15)) for at in range(15)) * 40 for row in range(15)]
    found = Extractor(one)([None] * 15, values, [[]] * 15, [0] * 15)
    assert found.ids == [b"\x04\x07"] * 15
    assert len(steps) < 1_000


def test_values_that_lack_fields_are_read_in_columns(monkeypatch):
    monkeypatch.setattr("dedup.core.extract.extract_one", None)
    monkeypatch.setattr("dedup.core.protobuf._SlotCursor", None)
    one = recipe(schema_of("string f = 1;", "string g = 2;", "int64 h = 3;", "M m = 4;"), "m.s")
    tail = b"\x22\x03\x12\x01a"
    values = [b"\x0a\x01x" + tail, b"\x12\x01x" + tail, b"\x18\x05" + tail, tail] * 50
    assert Extractor(one)([None] * 200, values, [[]] * 200, [0] * 200).ids == [b"\x01a"] * 200


def test_ids_are_those_of_json():
    """So a topic may change its format: the state that holds its IDs stays good."""
    schema = schema_of("string f0 = 1;", "sint64 f1 = 2;", "bool f2 = 3;", "uint64 f3 = 4;")
    rule = TrackingId(FieldsRule((("f0",), ("f1",), ("f2",), ("f3",))), ("trim", "lower"))
    value = b'{"f0":" A ","f1":-7,"f2":true,"f3":18446744073709551615}'
    written = b"\x0a\x03 A \x10\x0d\x18\x01\x20" + b"\xff" * 9 + b"\x01"
    one = Recipe(rule, fmt="protobuf", schema=schema)
    assert everywhere(one, written).id == extract_one(Recipe(rule), None, value, [], 0).id


def test_parts_and_alternatives():
    schema = schema_of("string f = 1;", "int64 g = 2;")
    parts = PartsRule((Part(KeyRule(), True), Part(FieldRule(("f",))), Part(FieldRule(("g",)), True)))
    one = Recipe(TrackingId(parts), fmt="protobuf", schema=schema)
    assert everywhere(one, b"\x0a\x01a", key=None).id == b"\x09\x01\x0b\x02\x01a\x01\x0c"
    one = Recipe(TrackingId(FirstOfRule((FieldRule(("g",)), FieldRule(("f",))))), fmt="protobuf", schema=schema)
    assert everywhere(one, b"\x0a\x01a").id == b"\x0d\x01\x01a"
    assert everywhere(one, b"\x0a\x01a\x10\x07").id == b"\x0d\x00\x04\x07"


def test_the_key_the_raw_value_and_the_fingerprint():
    for rule, expected in ((KeyRule(), b"\x02k"), (RawContentRule(), b"\x02\x08\x0e")):
        one = Recipe(TrackingId(rule), fmt="protobuf", schema=schema_of("int64 f = 1;"), fingerprint=True)
        other = Recipe(TrackingId(rule), fmt="bytes", fingerprint=True)
        record_of = (b"k", b"\x08\x0e", [], 5)
        assert extract_one(one, *record_of).id == expected
        assert extract_one(one, *record_of) == extract_one(other, *record_of)
        found = Extractor(one)([b"k"] * 9, [b"\x08\x0e"] * 9, [[]] * 9, [5] * 9)
        assert found.fingerprints == [extract_one(one, *record_of).fingerprint] * 9
        assert found.ids == [expected] * 9


BOOK = SchemaBook()
BOOK.update(
    {
        b"\0\0\0\0\1": schema_of("int64 f = 1;"),
        b"\0\0\0\0\2": "message A { message B { map<int32, int32> f = 1; } message C { required string f = 1; } }",
        b"\1" + b"g" * 16: schema_of("string f = 1;"),
        b"\0\0\0\0\3": None,
        b"\0\0\0\0\4": '"string"',
    }
)
FRAMED = [
    (b"\0\0\0\0\1\0\x08\x07", [], b"\x04\x07"),
    (b"\0\0\0\0\1\2\0\x08\x07", [], b"\x04\x07"),
    (b"\0\0\0\0\1\2\2\x08\x07", [], "id_missing"),  # the message M
    (b"\0\0\0\0\1\2\4\x08\x07", [], "schema_refused"),
    (b"\0\0\0\0\2\4\0\2\x0a\1a", [("h", b"x")], b"\x01a"),
    (b"\0\0\0\0\2\4\0\0\x0a\0", [], "id_container"),
    (b"\x08\x07", [("__value_schema_id", b"\0\0\0\0\1\0")], b"\x04\x07"),
    (b"\x08\x07", [("__value_schema_id", b"\0\0\0\0\1\2\0")], b"\x04\x07"),
    (b"\x0a\1a", [("__value_schema_id", b"\1" + b"g" * 16 + b"\0")], b"\x01a"),
    (b"\x0a\1a", [("__value_schema_id", b"\1" + b"g" * 16)], "truncated_framing"),
    (b"\x0a\1a", [("__value_schema_id", b"\0\0\0\0\1\0\0")], "bad_schema_id"),
    (b"\0\0\0\0\3\0\x08\x07", [], "schema_unknown"),
    (b"\0\0\0\0\4\0\x08\x07", [], "schema_refused"),
    (b"\0\0\0\0\1\0\x08", [], "not_protobuf"),
    (b"\0\0\0\0\1", [], "truncated_framing"),
    (b"\0\0\0\0\1\2", [], "truncated_framing"),
    (b"\0\0\0\0\1\x80", [], "truncated_framing"),
    (b"\0\0\0\0\1\1\0\x08\x07", [], "bad_message_indexes"),
    (b"\0\0\0\0\1\2\1\x08\x07", [], "bad_message_indexes"),
    (b"\0\0\0\0\1\xff\xff\xff\xff\x0f\x08", [], "bad_message_indexes"),
    (b"\0\0\0\0\1\xfe\x03" + b"\0" * 300, [], "bad_message_indexes"),
    (b"\0\0\0", [], "truncated_framing"),
    (b"{}", [], "wrong_magic_byte"),
    (b"\x08\x07", [("__value_schema_id", b"\2")], "bad_schema_id"),
    (None, [], "tombstone"),
]


@pytest.mark.parametrize("each", range(len(FRAMED)))
@pytest.mark.parametrize("rule", [FieldRule(("f",)), HeaderRule("h")])
def test_the_framing_names_schema_and_message(each, rule):
    value, headers, expected = FRAMED[each]
    one = Recipe(TrackingId(rule), fmt="protobuf", schema=BOOK, fingerprint=True)
    slow = extract_one(one, None, value, headers, 5)
    if rule == FieldRule(("f",)):
        assert (slow.id if isinstance(slow, One) else slow.code) == expected
    for rows in ([FRAMED[each]] * 9, FRAMED, [*FRAMED[:3], FRAMED[each], *FRAMED[3:]]):
        extracted = Extractor(one)(
            [None] * len(rows), [row[0] for row in rows], [row[1] for row in rows], [5] * len(rows)
        )
        row = rows.index(FRAMED[each])
        fast = extracted.faults.get(row) or One(extracted.ids[row], 5, extracted.fingerprints[row])
        assert fast == slow


def test_a_nested_message_that_serializers_count_in_different_ways_is_refused():
    """Confluent's Python serializer counts the types of maps' entries as messages, and its Java serializer does not."""
    nested = "message A {{ {} message B {{ string f = 1; }} message C {{ string f = 1; }} map<int32, int32> n = 2; }}"
    one = recipe(SchemaBook(lambda ref: nested.format("map<int32, int32> m = 1;" if ref[-1] == 1 else "")))
    codes = {}
    for schema in (1, 2):
        for index in range(4):
            found = extract_one(one, None, b"\0\0\0\0%c\4\0%c\x0a\1a" % (schema, 2 * index), [], 5)
            codes[schema, index] = getattr(found, "code", "read")
    assert codes == {
        (1, 0): "read",  # B in Java
        (1, 1): "schema_refused",  # B in Python, C in Java
        (1, 2): "read",  # C in Python
        (1, 3): "schema_refused",
        (2, 0): "read",
        (2, 1): "read",
        (2, 2): "schema_refused",
        (2, 3): "schema_refused",
    }


@pytest.mark.parametrize(
    ("framing", "value", "expected"),
    [("0202", "0a036f2d31", b"\x01o-1"), ("040200", "0a036c2d31", b"\x01l-1"), ("06020000", "0807", b"\x04\x07"), ("040204", "0a0178", b"\x01x")],
    ids=["Order", "Order.Line", "Order.Line.Deep", "Order.Late"],
)  # fmt: skip
def test_the_message_indexes_of_confluent_s_serializer(framing, value, expected):
    """As `ProtobufSerializer` of confluent-kafka-python 2.16.1 wrote them with this schema in Apicurio's registry."""
    schema = """syntax = "proto3"; message Note { string text = 1; }
        message Order { message Line { string id = 1; message Deep { int64 id = 1; } } map<string, int32> m = 5;
          message Late { string id = 1; } string id = 1; }"""
    one = recipe(SchemaBook(lambda _: schema), "id")
    written = b"\0\0\0\0\7" + bytes.fromhex(framing)
    assert extract_one(one, None, written + bytes.fromhex(value), [], 5).id == expected
    assert extract_one(one, None, bytes.fromhex(value), [("__value_schema_id", written)], 5).id == expected


@pytest.mark.parametrize(
    ("value", "format_name", "said"),
    [
        (b"\0\0\0\0\x2a\0\x08\x07", "schema_registry", "it begins with byte 0: Schema Registry framing, schema id 42"),
        (b'{"id": 7}', "json", "it looks like JSON"),
        (b"Obj\1...", "avro_file", "an Avro object container"),
    ],
)
def test_a_value_of_another_format_is_named(value, format_name, said):
    fault = extract_one(recipe(schema_of("int64 f = 1;")), None, value, [], 0)
    assert (fault.code, fault.format_name) == ("not_protobuf", format_name)
    assert said in fault.detail
