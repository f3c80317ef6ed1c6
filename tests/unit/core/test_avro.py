"""Avro values: the golden vectors of every type as ID and as time, one verdict for each way to be damaged, schemas."""

import io
import json
import random
from pathlib import Path

import fastavro
import pytest

from dedup.core import tracking_id as encoding
from dedup.core.avro import _Batch, avro_reader
from dedup.core.avro_schema import MAX_DEPTH, _SchemaParser, parse_schema
from dedup.core.event_time import FieldTime
from dedup.core.exact_json import Unreadable
from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import Fault, One, extract_one
from dedup.core.framing import LinkedSchema, SchemaBook, SchemaRefused
from dedup.core.tracking_id import (
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyRule,
    RawContentRule,
    TrackingId,
    parse_path,
)
from dedup.errors import InvariantBroken
from tests.extraction import everywhere, same_in_columns

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "avro.json").read_text())
LINE = {
    "type": "record",
    "name": "Line",
    "fields": [{"name": "sku", "type": "string"}, {"name": "next", "type": ["null", "Line"]}],
}


def record(*kinds, name="R"):
    return json.dumps(
        {"type": "record", "name": name, "fields": [{"name": f"f{at}", "type": kind} for at, kind in enumerate(kinds)]}
    )


def recipe(schema, path="f0", **options):
    return Recipe(TrackingId(FieldRule(parse_path(path))), fmt="avro", schema=schema, **options)


def code_of(found):
    return found.code if isinstance(found, Fault) else found


def test_the_vectors_are_of_this_encoding():
    assert VECTORS["encoding_version"] == encoding.ENCODING_VERSION


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_a_vector_as_id_and_as_time(case):
    schema = json.dumps(
        {
            "type": "record",
            "name": "R",
            "fields": [{"name": "f", "type": case["type"]}, {"name": "end", "type": "boolean"}],
        }
    )
    value = bytes.fromhex(case["value"]) + b"\1"
    found = everywhere(recipe(schema, "f"), value)
    assert (found.id.hex() if isinstance(found, One) else found.code) == case["id"]
    found = everywhere(recipe(schema, "end", event_time=FieldTime(("f",), case["unit"])), value)
    assert (found.time_ms if isinstance(found, One) else found.code) == case["time"]
    if isinstance(found, Fault):
        assert len(found.detail) < 200


@pytest.mark.parametrize(
    ("kinds", "value", "said"),
    [
        (["long"], b"", "it ends inside a number (byte 0)"),
        (["long"], b"\x80", "it ends inside a number (byte 0)"),
        (["string"], b"\x06ab", "it ends inside a field of 3 bytes (byte 1)"),
        (["bytes"], b"\x80\x80\x80\x80\x08", "it ends inside a field of 1073741824 bytes (byte 5)"),
        (["bytes"], b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", "it ends inside a field of 9223372036854775807 bytes"),
        (["bytes"], b"\x01", "a length is negative (before byte 1)"),
        (["string", "double"], b"\x00abc", "it ends inside a field of 8 bytes (byte 1)"),
        (["long"], b"\x02\x02", "it continues after its record ends (byte 1 of 2)"),
        ([["null", "long"]], b"\x06", "a union has no branch 3 (before byte 1)"),
        ([{"type": "array", "items": "long"}], b"\x02\x02", "it ends inside a number (byte 2)"),
        (
            [{"type": "array", "items": "long"}],
            b"\xfe\xff\xff\xff\x0f\x02",
            "it ends inside a block of 2147483647 items",
        ),
        (
            [{"type": "array", "items": "long"}],
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x02",
            "it ends inside a block of",
        ),
        (
            [{"type": "array", "items": "long"}],
            b"\x01\x04\x02\x00",
            "a block of items has another size than it says (byte 3)",
        ),
        ([{"type": "map", "values": "null"}], b"\xfe\xff\xff\xff\x0f\x02a", "it ends inside a block of"),
    ],
)
def test_a_damaged_value_is_a_dead_letter_with_its_reason(kinds, value, said):
    fault = everywhere(recipe(record(*kinds)), value)
    assert (fault.kind.name, fault.code) == ("UNREADABLE", "not_avro")
    assert fault.detail.startswith(f"the value is not a record of the schema: {said}")
    assert everywhere(Recipe(TrackingId(HeaderRule("h")), fmt="avro", schema=record(*kinds)), value) == fault


def test_blocks_may_say_their_size():
    schema = record({"type": "array", "items": "string"}, "long")
    for value in (b"\x04\x02a\x02b\x00\x0e", b"\x03\x08\x02a\x02b\x00\x0e", b"\x01\x04\x02a\x02\x02b\x00\x0e"):
        assert everywhere(recipe(schema, "f1"), value).id == b"\x04\x07"
        assert everywhere(recipe(schema, "f0[1]"), value).id == b"\x01b"
        assert everywhere(recipe(schema, "f0[2]"), value).code == "id_missing"


def test_a_key_of_a_map_is_a_step():
    schema = record({"type": "map", "values": ["null", "long"]})
    assert everywhere(recipe(schema, "f0.é"), b"\x04\x02a\x00\x04\xc3\xa9\x02\x0e\x00").id == b"\x04\x07"
    assert everywhere(recipe(schema, "f0.b"), b"\x02\x02a\x00\x00").code == "id_missing"
    assert everywhere(recipe(schema, "f0.a"), b"\x04\x02a\x02\x0e\x02a\x02\x0e\x00").code == "repeated_member"


def test_a_schema_that_contains_itself_is_bounded():
    schema = record("long", LINE)
    assert everywhere(recipe(schema), b"\x0e\x02a\x02\x02b\x00").id == b"\x04\x07"
    assert everywhere(recipe(schema, "f1.next.sku"), b"\x0e\x02a\x02\x02b\x00").id == b"\x01b"
    assert everywhere(recipe(schema, "f1.next.next.sku"), b"\x0e\x02a\x02\x02b\x00").code == "id_missing"
    fault = everywhere(recipe(schema), b"\x0e" + b"\x02a\x02" * 100_000 + b"\x02a\x00")
    assert (fault.code, fault.detail) == ("too_deep", f"the value is nested more than {MAX_DEPTH} levels deep")


@pytest.mark.parametrize("levels", [98, 99, 100])
def test_items_of_a_fixed_width_count_as_a_level(levels):
    tree = {
        "type": "record",
        "name": "Tree",
        "fields": [
            {"name": "below", "type": {"type": "array", "items": "Tree"}},
            {"name": "weights", "type": {"type": "array", "items": "double"}},
        ],
    }
    value = b"\x0e" + b"\2" * levels + b"\0" + b"\2" + bytes(9) + bytes(2 * levels)
    found = everywhere(recipe(record("long", tree)), value)
    assert code_of(found) == ("too_deep" if levels > 98 else found)


def test_fields_that_take_no_bytes_are_not_visited():
    void = {"type": "record", "name": "V0", "fields": []}
    for at in range(1, 100):  # 2**99 fields
        fields = [{"name": "a", "type": void}, {"name": "b", "type": f"V{at - 1}"}]
        void = {"type": "record", "name": f"V{at}", "fields": fields}
    assert everywhere(recipe(record("long", void)), b"\x0e").id == b"\x04\x07"
    assert everywhere(recipe(record("long", void), "f1.b.a"), b"\x0e").code == "id_container"
    endless = {"type": "record", "name": "E", "fields": [{"name": "e", "type": "E"}]}
    assert everywhere(recipe(record("long", endless)), b"\x0e").code == "too_deep"


@pytest.mark.parametrize(
    ("kind", "tail"),
    [
        ({"type": "array", "items": "string"}, b"\2\0" * 5_000 + b"\0"),  # blocks of one item
        ({"type": "record", "name": "T", "fields": [{"name": "l", "type": ["null", "T"]}, {"name": "r", "type": ["null", "T"]}]},
         b"\2\0" * 5_000 + b"\0" * 2),
    ],
)  # fmt: skip
def test_few_large_values_are_not_read_in_columns(kind, tail, monkeypatch):
    steps = []
    pay = _Batch._pay
    monkeypatch.setattr(_Batch, "_pay", lambda *given: (steps.append(given), pay(*given)))
    one = recipe(record("long", {"type": "array", "items": kind}))
    values = [b"\x0e\2" + tail + b"\0", *[b"\x0e\0"] * 20]
    found = Extractor(one)([None] * 21, values, [[]] * 21, [0] * 21)
    assert found.ids[1:] == [b"\x04\x07"] * 20
    assert len(steps) < 1_000


@pytest.mark.parametrize(
    ("value", "format_name", "said"),
    [
        (b"\0\0\0\0\x2a\x0e\0", "schema_registry", "it begins with byte 0: Schema Registry framing, schema id 42"),
        (b"\0\0\0\0\x2a\x0e\6", "", "the value is not a record of the schema: it continues after"),
        (b'{"id": 7}', "json", "it looks like JSON"),
        (b"Obj\1...", "avro_file", "an Avro object container"),
        (b"\xc3\x01........\x0e\0", "avro_single_object", "Avro's single-object encoding"),
    ],
)
def test_a_value_of_another_format_is_named(value, format_name, said):
    fault = extract_one(recipe(record("long", ["null", "long"])), None, value, [], 0)
    assert (fault.code, fault.format_name) == ("not_avro", format_name)
    assert said in fault.detail


def test_every_alternative_tells_a_damaged_record_from_framing_alike():
    """A framed value whose text is not UTF-8: an alternative that reads the text finds no more than one that does not."""
    values = [b"\0\0\0\0\x2a\x04\xbc1", *[b"\x0415"] * 20]
    field = FieldRule(("f0",))
    for rule in (field, FirstOfRule((HeaderRule("h"), field)), FirstOfRule((field, HeaderRule("h")))):
        one = Recipe(TrackingId(rule), fmt="avro", fingerprint=True, schema=record("string"))
        same_in_columns(one, values)
        assert extract_one(one, None, values[0], [], 0).format_name == "schema_registry"


def test_ids_are_those_of_json():
    """So a topic may change its format: the state that holds its IDs stays good."""
    schema = record(
        "string", "long", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, "boolean"
    )
    rule = TrackingId(FieldsRule((("f0",), ("f1",), ("f2",), ("f3",))), ("trim", "lower"))
    avro = Recipe(rule, fmt="avro", schema=schema)
    value = b'{"f0":" A ","f1":7,"f2":1.5,"f3":true}'
    assert everywhere(avro, b"\x06 A \x0e\x04\x00\x96\x01").id == extract_one(Recipe(rule), None, value, [], 0).id


def test_the_key_the_raw_value_and_the_fingerprint():
    schema = record("long")
    for rule, expected in ((KeyRule(), b"\x02k"), (RawContentRule(), b"\x02\x0e")):
        one = Recipe(TrackingId(rule), fmt="avro", schema=schema, fingerprint=True)
        other = Recipe(TrackingId(rule), fmt="bytes", fingerprint=True)
        record_of = (b"k", b"\x0e", [], 5)
        assert extract_one(one, *record_of).id == expected
        assert extract_one(one, *record_of) == extract_one(other, *record_of)
        found = Extractor(one)([b"k"] * 9, [b"\x0e"] * 9, [[]] * 9, [5] * 9)
        assert found.fingerprints == [extract_one(one, *record_of).fingerprint] * 9
        assert found.ids == [expected] * 9


def test_a_record_without_a_key_is_one_of_a_batch():
    one = Recipe(TrackingId(KeyRule()), fmt="avro", schema=record("long"))
    found = Extractor(one)([b"k"] * 8 + [None], [b"\x0e"] * 9, [[]] * 9, [5] * 9)
    assert found.ids == [b"\x02k"] * 8 + [None]
    assert found.faults[8].code == "id_null"


BOOK = SchemaBook()
BOOK.update(
    {
        b"\0\0\0\0\1": record("long"),
        b"\0\0\0\0\2": record(["null", "long"], "string"),
        b"\1" + b"g" * 16: record({"type": "map", "values": "long"}),
        b"\0\0\0\0\3": None,
        b"\0\0\0\0\4": '"string"',
    }
)
FRAMED = [
    (b"\0\0\0\0\1\x0e", [], b"\x04\x07"),
    (b"\0\0\0\0\2\x02\x0e\x02a", [("h", b"x")], b"\x04\x07"),
    (b"\x0e", [("__value_schema_id", b"\0\0\0\0\1")], b"\x04\x07"),
    (b"\x00", [("__value_schema_id", b"\1" + b"g" * 16)], "id_container"),
    (b"\0\0\0\0\2\x00\x00", [], "id_null"),
    (b"\0\0\0\0\3\x0e", [], "schema_unknown"),
    (b"\0\0\0\0\4\x0e", [], "schema_refused"),
    (b"\0\0\0\0\1\x0e\x00", [], "not_avro"),
    (b"\0\0\0", [], "truncated_framing"),
    (b"{}", [], "wrong_magic_byte"),
    (b"\x0e", [("__value_schema_id", b"\2")], "bad_schema_id"),
    (None, [], "tombstone"),
]


@pytest.mark.parametrize("seed", range(20))
def test_each_value_is_read_by_the_schema_that_its_framing_names(seed):
    one = recipe(BOOK, fingerprint=True)
    dice = random.Random(seed)
    # Some batches have values of one form only, so that they are taken in columns.
    chosen = dice.choices(FRAMED if seed % 2 else dice.sample(FRAMED[:5], 2), k=60)
    values, headers = [value for value, _, _ in chosen], [row for _, row, _ in chosen]
    found = Extractor(one)([None] * 60, values, headers, [5] * 60)
    for row, (value, of_row, expected) in enumerate(chosen):
        slow = extract_one(one, None, value, of_row, 5)
        if isinstance(slow, One):
            assert (slow.id, slow) == (expected, One(found.ids[row], found.times_ms[row], found.fingerprints[row]))
        else:
            assert (slow.code, slow) == (expected, found.faults[row])


def test_a_schema_is_refused_once_in_a_batch(monkeypatch):
    parsed = []
    refused = _SchemaParser.parse
    monkeypatch.setattr(_SchemaParser, "parse", lambda *given: (parsed.append(given), refused(*given))[1])
    book = SchemaBook(lambda _: '"int"')
    one = Recipe(TrackingId(KeyRule()), fmt="avro", schema=book)
    found = Extractor(one)([b"k"] * 50, [b"\0\0\0\0\1\x0e"] * 50, [[]] * 50, [5] * 50)
    assert {fault.code for fault in found.faults.values()} == {"schema_refused"}
    assert len(found.faults) == 50
    assert len(parsed) == 1


def test_the_fingerprint_and_the_raw_content_of_framed_values():
    framed, plain = recipe(BOOK, fingerprint=True), recipe(record("long"), fingerprint=True)
    value = FRAMED[0][0]
    assert everywhere(framed, value) == everywhere(plain, value[5:])
    raw = Recipe(TrackingId(RawContentRule()), fmt="avro", schema=BOOK)
    assert everywhere(raw, value).id == b"\x02" + value


def test_a_schema_that_nobody_asked_for_is_a_defect():
    with pytest.raises(InvariantBroken, match="schema 9 was not asked for"):
        extract_one(recipe(BOOK), None, b"\0\0\0\0\x09\x0e", [], 0)
    asked = SchemaBook(lambda ref: record("long") if ref == b"\0\0\0\0\x09" else None)
    assert extract_one(recipe(asked), None, b"\0\0\0\0\x09\x0e", [], 0).id == b"\x04\x07"
    assert extract_one(recipe(asked), None, b"\0\0\0\0\x08\x0e", [], 0).code == "schema_unknown"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("", "is not JSON (line 1, column 1: Expecting value)"),
        ('"string"', "does not describe a record"),
        ('["null"]', "does not describe a record"),
        ("7", "has a type that is no name, list, or object with a type"),
        ("[" * 100_000, "is nested more than 200 levels deep"),
        ('{"type":' * 300 + '"int"' + "}" * 300, "is nested more than 200 levels deep"),
        (record("text"), "uses a type that it does not define before: text"),
        (record("R2", name="x.R1"), "uses a type that it does not define before: R2"),
        (record([["null"]]), "has a union that is empty or has a union as a branch"),
        (record([]), "has a union that is empty or has a union as a branch"),
        (record({"type": "enum", "name": "E", "symbols": ["A", "A"]}), "has an enum whose symbols are not distinct names"),
        (record({"type": "enum", "name": "E"}), "has a type enum that is not complete"),
        (record({"type": "fixed", "name": "F", "size": -1}), "has a type fixed that is not complete"),
        (record({"type": "fixed", "name": "F", "size": True}), "has a type fixed that is not complete"),
        (record({"type": "fixed", "size": 1}), "has a type fixed without a valid name"),
        (record({"type": "record", "name": "R", "fields": []}), "defines R twice"),
        (record({"type": "record", "name": "a b", "fields": []}), "has a type record without a valid name"),
        (record("long", name="a\nb.R"), "has a type record without a valid name"),
        (record("long", name="a" * 1_002), "has a type record without a valid name"),
        (record({"type": "array", "items": "null"}), "has an array of items that take no bytes"),
        (record({"type": "array", "items": json.loads(record("null", name="N"))}), "has an array of items that take no bytes"),
        ('{"type":"record","name":"R","fields":[{"name":"a","type":"int"},{"name":"a","type":"int"}]}', "has a field without"),
        ('{"type":"record","name":"R","fields":[{"name":"a"}]}', "has a field without a type or a name of its own in R"),
        (record({"type": "fixed", "name": "F", "size": 1 << 31}), "has a type fixed that is not complete"),
        (record({"type": "enum", "name": "E", "symbols": ["\ud800"]}), "has an enum whose symbols are not distinct names"),
        (record("\ud800"), r"uses a type that it does not define before: \ud800"),
        (record(*["int"] * 40_000), "has 1,"),
    ],
)  # fmt: skip
def test_a_schema_that_is_refused(schema, said):
    with pytest.raises(SchemaRefused) as refused:
        parse_schema(schema)
    assert str(refused.value).startswith(said)


def test_names_are_found_in_their_namespace():
    schema = {
        "type": "record",
        "name": "a.b.Outer",
        "fields": [
            {"name": "f0", "type": {"type": "enum", "name": "E", "symbols": ["X"]}},
            {"name": "f1", "type": {"type": "record", "name": "Inner", "namespace": "c", "fields": [{"name": "f", "type": "a.b.E"}]}},
            {"name": "f2", "type": ["null", "E", "c.Inner"]},
            {"name": "f3", "type": {"type": {"type": "array", "items": "E"}}},
        ],
    }  # fmt: skip
    value = b"\0\0\2\0\2\0\0"
    assert avro_reader(json.dumps(schema), (("f2",), ("f1", "f")), None).read(value) == ["X", "X"]
    with pytest.raises(Unreadable):
        avro_reader(json.dumps(schema), (), None).read(value[:-1])


def test_a_name_without_a_namespace_inside_one():
    """Avro's Java library writes a schema like this, and finds B from every namespace."""
    bare = {"type": "record", "name": "B", "namespace": "", "fields": [{"name": "f", "type": "int"}]}
    other = {"type": "record", "name": "y.C", "fields": [{"name": "d", "type": "B"}]}
    schema = json.loads(record(bare, other, name="x.R"))
    assert avro_reader(json.dumps(schema), (("f1", "d", "f"),), None).read(b"\2\4") == [2]


@pytest.mark.parametrize("name", ["com.my-shop.R", "com.shop.Orders$.R", "Größe"])
def test_names_that_registries_accept(name):
    schema = {"type": "record", "name": name, "fields": [{"name": "größe", "type": ["null", name, "long"]}]}
    assert avro_reader(json.dumps(schema), (("größe",),), None).read(b"\4\x0e") == [7]


def test_a_default_of_thousands_of_digits_is_not_read():
    schema = record("long").replace('"type": "long"', f'"type": "long", "default": {"1" * 5_000}')
    assert everywhere(recipe(schema), b"\x0e").id == b"\x04\x07"


def test_whole_batches_are_taken_in_columns(monkeypatch):
    monkeypatch.setattr("dedup.core.extract.extract_one", lambda *given: pytest.fail(f"{given} went the slow way"))
    one = recipe(
        record(["null", "string"], {"type": "array", "items": "double"}, LINE),
        event_time=FieldTime(("f2", "sku"), "rfc3339"),
    )
    time = b"\x28" + b"1970-01-01T00:00:01Z"
    values = [
        b"\x02\x02%c" % (97 + row)
        + b"\x04"
        + b"\1" * 16
        + b"\x00"
        + time
        + (b"\x02" + time + b"\x00" if row % 3 else b"\x00")
        for row in range(20)
    ]
    found = Extractor(one)([None] * 20, values, [[]] * 20, [0] * 20)
    assert found.ids == [b"\x01%c" % (97 + row) for row in range(20)]
    assert found.times_ms == [1000] * 20
    # A row without an ID does not send its neighbors there.
    values[7] = b"\x00\x00" + time + b"\x00"
    found = Extractor(one)([None] * 20, values, [[]] * 20, [0] * 20)
    assert {row: fault.code for row, fault in found.faults.items()} == {7: "id_null"}


NAMED = {
    "shop.Kind": {"type": "enum", "name": "Kind", "namespace": "shop", "symbols": ["A", "B"]},
    "shop.Person": {
        "type": "record",
        "name": "shop.Person",
        "fields": [
            {"name": "kind", "type": "Kind"},
            {"name": "at", "type": {"type": "fixed", "name": "At", "size": 2}},
        ],
    },
}
REFERENCES = tuple((name, json.dumps(schema)) for name, schema in NAMED.items())
REFERRING = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "buyer", "type": ["null", "Person"]},
        {"name": "kind", "type": "shop.Kind"},
        {"name": "at", "type": "At"},
        {"name": "next", "type": ["null", "Order"]},
    ],
}


def test_the_types_of_references_are_known():
    types: dict[str, object] = {}
    for schema in NAMED.values():
        fastavro.parse_schema(schema, named_schemas=types)
    stream = io.BytesIO()
    order = {"buyer": {"kind": "B", "at": b"xy"}, "kind": "A", "at": b"zz", "next": None}
    fastavro.schemaless_writer(stream, fastavro.parse_schema(REFERRING, named_schemas=types), order)
    # A schema that defines two types is referred to twice.
    schema = LinkedSchema(json.dumps(REFERRING), (*REFERENCES, ("shop.At", REFERENCES[1][1])))
    for rule, expected in ((("buyer", "kind"), b"\x01B"), (("at",), b"\x02zz")):
        one = Recipe(TrackingId(FieldRule(rule)), fmt="avro", schema=SchemaBook(lambda _: schema))
        value = b"\0\0\0\0\1" + stream.getvalue()
        assert extract_one(one, None, value, [], 5).id == expected
        assert Extractor(one)([None] * 9, [value] * 9, [[]] * 9, [5] * 9).ids == [expected] * 9
    alone = Recipe(TrackingId(KeyRule()), fmt="avro", schema=SchemaBook(lambda _: json.dumps(REFERRING)))
    assert extract_one(alone, b"k", value, [], 5).code == "schema_refused"


@pytest.mark.parametrize(
    ("main", "references", "said"),
    [
        (REFERRING, REFERENCES[::-1], "refers to shop.Person, which uses a type that it does not define before: Kind"),
        (REFERRING, REFERENCES[:1], "uses a type that it does not define before: Person"),
        (NAMED["shop.Person"], REFERENCES, "defines shop.Person twice"),
        (REFERRING, (*REFERENCES, ("x", '{"type": "fixed", "name": "shop.At", "size": 2}')), "refers to x, which defines"),
        (REFERRING, (("x", "{"),), "refers to x, which is not JSON (line 1"),
        (REFERRING, (("x", "[" * 5_000),), "refers to x, which is n"),
        ("shop.Kind", REFERENCES, "does not describe a record"),
        (REFERRING, (("x", " " * (1 << 20)),), "has 1,048,"),
    ],
)  # fmt: skip
def test_references_that_are_refused(main, references, said):
    with pytest.raises(SchemaRefused) as refused:
        parse_schema(LinkedSchema(json.dumps(main), tuple(references)))
    assert str(refused.value).startswith(said)


def test_a_schema_may_be_the_name_of_a_reference():
    assert parse_schema(LinkedSchema('"shop.Person"', REFERENCES)).name == "shop.Person"
    with pytest.raises(SchemaRefused, match="refers to itself"):
        parse_schema(LinkedSchema('"shop.Person"', REFERENCES, fault="refers to itself"))
