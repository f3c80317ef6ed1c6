"""The content of Avro values: the canonical form of every type, every rule of schema resolution, each fault."""

from __future__ import annotations

import json
import math
import struct
from uuid import UUID

import pytest

from dedup.core.avro import Instant
from dedup.core.avro_content import avro_content, unresolvable
from dedup.core.avro_schema import MAX_DEPTH
from dedup.core.content_tree import TypedValue, encode_content, text_key
from dedup.core.exact_json import Number, Unreadable
from dedup.core.framing import LinkedSchema, SchemaRefused

ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}
FIXED = {"type": "fixed", "name": "F", "size": 2}
UUID_FIXED = {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}
INTS = {"type": "array", "items": "int"}
FULL_MAP = {"type": "map", "values": "null"}
NODE = {
    "type": "record",
    "name": "Node",
    "fields": [{"name": "v", "type": "int"}, {"name": "next", "type": ["null", "Node"]}],
}


def record(*kinds, name="R"):
    return of({f"f{at}": kind for at, kind in enumerate(kinds)}, name)


def of(fields, name="R"):
    """Return the schema of a record, given the type of each field, or a whole field without its name."""
    made = []
    for each, kind in fields.items():
        whole = kind if isinstance(kind, dict) and "field" in kind else {"type": kind}
        made.append({"name": each, **{key: value for key, value in whole.items() if key != "field"}})
    return json.dumps({"type": "record", "name": name, "fields": made})


def field(kind, **options):
    return {"type": kind, "field": True, **options}


def logical(kind, name, **options):
    return {"type": kind, "logicalType": name, **options}


def decimal(kind="bytes", *, precision=9, scale=2):
    inner = {"type": "bytes"} if kind == "bytes" else {"type": "fixed", "name": "D", "size": 2}
    return inner | {"logicalType": "decimal", "precision": precision if kind == "bytes" else 4, "scale": scale}


def tree(of_type="R", **members):
    return encode_content(TypedValue(of_type, keyed(**members)), {})


def keyed(**members):
    return {text_key(name): member for name, member in members.items()}


def fault_of(content, value):
    with pytest.raises(Unreadable) as raised:
        content(value)
    return raised.value.code, raised.value.detail


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("boolean", b"\0", False),
        ("boolean", b"\1", True),
        ("int", b"\x0e", 7),
        ("long", b"\xff" * 9 + b"\1", -(1 << 63)),
        ("float", struct.pack("<f", 1.5), 1.5),
        ("float", struct.pack("<f", 0.1), struct.unpack("<f", struct.pack("<f", 0.1))[0]),
        ("double", struct.pack("<d", 0.1), 0.1),
        ("double", b"\1" * 6 + b"\xff\xff", math.nan),
        ("double", struct.pack("<d", -0.0), 0.0),
        ("bytes", b"\4ab", b"ab"),
        ("string", b"\6\xc3\xa9x", "éx"),
        (ENUM, b"\2", "B"),
        (FIXED, b"ab", b"ab"),
        (UUID_FIXED, bytes(16), UUID(int=0)),
        (logical("string", "uuid"), b"\2A", "A"),
        (decimal(), b"\2\x0f", Number("15e-2")),
        (decimal(scale=0), b"\2\xff", Number("-1e-0")),
        (decimal("fixed"), b"\0\x0f", Number("15e-2")),
        (logical("bytes", "big-decimal"), b"\4ab", TypedValue("big-decimal", b"ab")),
        ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, b"a" * 12, TypedValue("duration", b"a" * 12)),
        (logical("int", "date"), b"\2", TypedValue("date", 1)),
        (logical("int", "time-millis"), b"\2", TypedValue("time", 1_000_000)),
        (logical("long", "time-micros"), b"\2", TypedValue("time", 1_000)),
        (logical("long", "timestamp-millis"), b"\2", Instant(1_000_000)),
        (logical("long", "timestamp-micros"), b"\1", Instant(-1_000)),
        (logical("long", "timestamp-nanos"), b"\2", Instant(1)),
        (logical("long", "local-timestamp-millis"), b"\2", TypedValue("local-timestamp", 1_000_000)),
        (logical("long", "local-timestamp-micros"), b"\2", TypedValue("local-timestamp", 1_000)),
        (logical("long", "local-timestamp-nanos"), b"\2", TypedValue("local-timestamp", 1)),
        (logical("long", "of-ours"), b"\2", 1),
        (["null", "long"], b"\0", None),
        (["null", "long"], b"\2\x0e", 7),
        (INTS, b"\0", []),
        (INTS, b"\4\2\4\0", [1, 2]),
        (INTS, b"\3\4\2\4\2\6\0", [1, 2, 3]),
        ({"type": "map", "values": "int"}, b"\2\2b\2\1\6\2a\4\0", {text_key("a"): 2, text_key("b"): 1}),
        (FULL_MAP, b"\2\2a\0", {text_key("a"): None}),
        ({"type": "record", "name": "I", "fields": [{"name": "x", "type": "int"}]}, b"\2", {text_key("x"): 1}),
    ],
)  # fmt: skip
def test_the_form_of_each_type(kind, value, expected):
    assert avro_content(of({"f": kind}), None, ())(value) == tree(f=expected)
    # As a schema reads its own values, even where a branch could be promoted to the one before it.
    assert avro_content(of({"f": kind}), of({"f": kind}), ())(value) == tree(f=expected)
    assert avro_content(of({"f": kind}), of({"f": ["null", kind]} if kind != ["null", "long"] else {"f": kind}), ())(
        value
    ) == tree(f=expected)


def test_the_bytes_of_the_content():
    content = avro_content(record("long", ["null", "string"]), None, ())
    assert content(b"\2\2\2a").hex() == "0000030152" + "0002020301663002040103016631020161"
    assert content(b"\2\0").hex() == "0000030152" + "0002020301663002040103016631010b"


def test_what_does_not_matter():
    one = of({"a": "int", "b": ["null", "string"], "m": {"type": "map", "values": "long"}})
    two = of({"m": {"type": "map", "values": "int"}, "a": "long", "b": ["string", ENUM]})
    content = avro_content(one, None, ())(b"\2\2\2A\4\2x\2\2y\4\0")
    # The order of fields and of keys, blocks, and branches; an enum's symbol is a text.
    assert content == avro_content(two, None, ())(b"\2\2y\4\1\6\2x\2\0\2\2\0")
    assert content != avro_content(two, None, ())(b"\2\2y\4\1\6\2x\2\0\2\2\2")
    # The unit of an instant.
    of_unit = [avro_content(record(logical("long", f"timestamp-{unit}")), None, ()) for unit in ("millis", "micros")]
    assert of_unit[0](b"\2") == of_unit[1](b"\xd0\x0f")
    assert of_unit[0](b"\2") != avro_content(record("long"), None, ())(b"\2")


def test_members_to_exclude():
    schema = of({"a": "int", "b": {"type": "map", "values": INTS}})
    content = avro_content(schema, None, (("a",), ("b", "x", 0), ("b", "y")))
    assert content(b"\2\4\2x\4\2\4\0\2y\0\0") == tree(b={text_key("x"): [2]})
    # A member to exclude is still a part of the value.
    assert fault_of(avro_content(record("string"), None, (("f0",),)), b"\2\xff")[0] == "not_utf8"


def test_fields_that_take_no_bytes():
    empty = {"type": "fixed", "name": "Z", "size": 0}
    void = {"type": "record", "name": "V", "fields": [{"name": "n", "type": "null"}]}
    schema = record("null", empty, void, "int")
    assert avro_content(schema, None, ())(b"\2") == tree(f3=1)
    assert avro_content(schema, schema, ())(b"\2") == tree(f0=None, f1=b"", f2={}, f3=1)
    assert avro_content(record("null"), None, ())(b"") == tree()
    tower = {"type": "record", "name": "V0", "fields": []}
    for at in range(1, 100):  # 2**99 fields
        fields = [{"name": "a", "type": tower}, {"name": "b", "type": f"V{at - 1}"}]
        tower = {"type": "record", "name": f"V{at}", "fields": fields}
    schema = record("long", tower, ["null", "V99"], {"type": "map", "values": "V99"})
    for pinned, more in ((None, {}), (schema, {"f1": {}})):
        content = avro_content(schema, pinned, ())
        assert content(b"\2\2\2\2a\0") == tree(f0=1, **more, f2={}, f3=keyed(a={}))
    # The writer's fields are skipped without visiting them, too.
    assert avro_content(schema, of({"f0": "long"}), ())(b"\2\2\0") == tree(f0=1)


@pytest.mark.parametrize(
    ("kinds", "value", "code", "said"),
    [
        (["long"], b"", "not_avro", "the value is not a record of the schema: it ends inside a number (byte 0)"),
        (["long"], b"\2\2", "not_avro", "it continues after its record ends (byte 1 of 2)"),
        (["string"], b"\x06ab", "not_avro", "it ends inside a field of 3 bytes"),
        ([["null", "long"]], b"\6", "not_avro", "a union has no branch 3"),
        ([ENUM], b"\6", "not_avro", "an enum has no symbol 3"),
        (["boolean"], b"\2", "not_avro", "a boolean is neither 0 nor 1"),
        ([INTS], b"\1\4\2\0", "not_avro", "a block of items has another size"),
        ([INTS], b"\xfe\xff\xff\xff\x0f\2", "not_avro", "it ends inside a block of 2147483647 items"),
        (["string"], b"\2\xff", "not_utf8", "a string of the value is not UTF-8 (byte 0 of the string)"),
        ([FULL_MAP], b"\2\2\xff\0", "not_utf8", "a string of the value is not UTF-8"),
        ([FULL_MAP], b"\2\2a\2\2a\0", "repeated_member", "a map of the content repeats a key"),
        ([decimal()], b"\0", "number_out_of_range", "a decimal of the value has 0 bytes"),
        ([decimal()], b"\x82\x10" + b"a" * 1025, "number_out_of_range", "a decimal of the value has 1025 bytes"),
        # Damage precedes the faults of the content.
        (["string", "int"], b"\2\xff", "not_avro", "it ends inside a number"),
        ([FULL_MAP], b"\2\2a\2\2a\0\0", "not_avro", "it continues after its record ends"),
    ],
)
def test_a_fault_of_a_value(kinds, value, code, said):
    for pinned in (None, record(*kinds)):
        found = fault_of(avro_content(record(*kinds), pinned, ()), value)
        assert found[0] == code
        assert said in found[1]


@pytest.mark.parametrize("levels", [99, 100, 101, 100_000])
def test_a_deep_value(levels):
    schema = json.dumps(NODE)
    value = b"\2\2" * levels + b"\2\0"
    for pinned in (None, schema):
        content = avro_content(schema, pinned, ())
        if levels < 100:
            assert content(value).count(b"next") == levels + 1
        else:
            assert fault_of(content, value) == ("too_deep", f"the value is nested more than {MAX_DEPTH} levels deep")


def test_a_deep_schema():
    """A schema that refers to its types more deeply than Python can recurse, and one that nests its types."""
    fields = [{"name": "f0", "type": {"type": "record", "name": "T0", "fields": [{"name": "f", "type": "int"}]}}]
    for at in range(1, 5_000):
        inner = [{"name": "f", "type": ["int", f"T{at - 1}"]}]
        fields.append({"name": f"f{at}", "type": ["null", {"type": "record", "name": f"T{at}", "fields": inner}]})
    schema = json.dumps({"type": "record", "name": "R", "fields": fields})
    for pinned in (None, schema.replace('"R"', '"x.R"')):
        content = avro_content(schema, pinned, ())
        assert content(b"\2" + b"\0" * 4_998 + b"\2\2\2\0\6")
        assert fault_of(content, b"\2" + b"\0" * 4_998 + b"\2" * 4_999 + b"\2")[0] == "too_deep"
    nested = "int"
    for _ in range(190):
        nested = {"type": "array", "items": nested}
    content = avro_content(record(nested), record({"type": "array", "items": nested["items"]}), ())
    assert content(b"\2" * 191 + b"\0" * 190)
    other = record(json.loads(json.dumps(nested).replace("int", "string")))
    assert fault_of(avro_content(record(nested), other, ()), b"\0")[0] == "schema_unresolvable"


def test_a_type_of_a_reference():
    kind = LinkedSchema(record("E"), (("E", json.dumps(ENUM)),))
    assert avro_content(kind, None, ())(b"\4") == tree(f0="C")
    assert avro_content(kind, record(ENUM), ())(b"\4") == tree(f0="C")


def zigzag(number):
    number, found = 2 * number, b""
    while number > 127:
        number, found = number >> 7, found + bytes([number & 127 | 128])
    return found + bytes([number])


@pytest.mark.parametrize(
    ("writer", "value", "reader", "expected"),
    [
        ("int", b"\x0e", "long", 7),
        ("int", b"\xfe\xff\xff\xff\x0f", "double", 2147483647.0),
        ("float", struct.pack("<f", 0.1), "double", struct.unpack("<f", struct.pack("<f", 0.1))[0]),
        ("string", b"\4\xc3\xa9", "bytes", b"\xc3\xa9"),
        ("bytes", b"\4\xc3\xa9", "string", "é"),
        (logical("string", "uuid"), b"\2a", "bytes", b"a"),
        ("bytes", b"\2a", logical("string", "uuid"), "a"),
        (logical("string", "uuid"), b"\2a", "string", "a"),
        # Logical types: only the reader's, or of the same family.
        ("long", b"\2", logical("long", "timestamp-micros"), Instant(1_000)),
        (logical("long", "timestamp-millis"), b"\2", logical("long", "timestamp-micros"), Instant(1_000_000)),
        (logical("long", "timestamp-nanos"), b"\2", ["null", logical("long", "timestamp-millis")], Instant(1)),
        (logical("int", "time-millis"), b"\2", logical("long", "time-micros"), TypedValue("time", 1_000_000)),
        (logical("long", "time-micros"), b"\2", logical("int", "time-millis"), TypedValue("time", 1_000)),
        (logical("long", "local-timestamp-micros"), b"\2", logical("long", "local-timestamp-nanos"),
         TypedValue("local-timestamp", 1_000)),
        ("bytes", b"\2\x0f", decimal(scale=1), Number("15e-1")),
        (decimal(), b"\2\x0f", decimal(precision=12), Number("15e-2")),
        (decimal(), b"\2\x0f", decimal(scale=3), Number("15e-2")),
        (decimal(scale=3), b"\2\x0f", decimal("fixed"), Number("15e-3")),
        (decimal("fixed"), b"\0\x0f", decimal(scale=0), Number("15e-2")),
        (decimal("fixed"), b"\0\x0f", decimal("fixed") | {"size": 9}, Number("15e-2")),
        (FIXED, b"\0\x0f", FIXED | decimal("fixed") | {"name": "F"}, Number("15e-2")),
        # Types with names.
        (ENUM, b"\2", ENUM | {"symbols": ["X", "C", "B"]}, "B"),
        (ENUM | {"default": "C"}, b"\2", ENUM | {"symbols": ["B"]}, "B"),
        (ENUM | {"name": "x.E"}, b"\2", ENUM | {"name": "y.E"}, "B"),
        (ENUM | {"name": "x.Old"}, b"\2", ENUM | {"name": "x.E", "aliases": ["Old"]}, "B"),
        (FIXED | {"name": "x.Old"}, b"ab", FIXED | {"aliases": ["x.Old"]}, b"ab"),
        (FIXED | {"name": "x.F"}, b"ab", FIXED, b"ab"),
        # Containers.
        (INTS, b"\4\2\4\0", {"type": "array", "items": "double"}, [1.0, 2.0]),
        (INTS, b"\4\2\4\0", {"type": "array", "items": ["null", "long"]}, [1, 2]),
        ({"type": "map", "values": "int"}, b"\2\2a\2\0", {"type": "map", "values": "double"}, {text_key("a"): 1.0}),
        # Unions.
        (["null", "int"], b"\2\2", ["null", "double"], 1.0),
        (["null", "int"], b"\0", ["null", "double"], None),
        (["null", "int"], b"\2\2", "double", 1.0),
        (["null", "int"], b"\2\2", "int", 1),
        ("int", b"\2", ["null", "string", "double"], 1.0),
        ("int", b"\2", ["double", "int"], 1),
        (["double", "int"], b"\2\2", ["int", "double"], 1),
        ("bytes", b"\2a", ["string", "bytes"], b"a"),
        ("int", b"\2", ["long", logical("int", "date")], TypedValue("date", 1)),
        (logical("int", "date"), b"\2", ["int", logical("int", "date")], TypedValue("date", 1)),
        (INTS, b"\2\2\0", ["null", {"type": "map", "values": "int"}, {"type": "array", "items": "long"}], [1]),
        (FIXED, b"ab", [FIXED | {"name": "x.F"}, FIXED], TypedValue("F", b"ab")),
        ([FIXED, ENUM], b"\2\2", ["null", ENUM | {"name": "x.E"}], "B"),
        # The names are those of the pinned schema's union.
        ([FIXED, ENUM], b"\2\2", [FIXED, ENUM | {"name": "x.E"}, "int"], TypedValue("x.E", "B")),
        (ENUM, b"\2", [FIXED, ENUM], TypedValue("E", "B")),
        ([ENUM, ENUM | {"name": "x.E"}], b"\0\2", ENUM, "B"),
        ([ENUM, ENUM | {"name": "x.E"}], b"\2\2", [ENUM, ENUM | {"name": "x.E"}], TypedValue("x.E", "B")),
    ],
)  # fmt: skip
def test_a_value_is_read_as_the_pinned_schema(writer, value, reader, expected):
    assert avro_content(of({"f": writer}), of({"f": reader}), ())(value) == tree(f=expected)


@pytest.mark.parametrize(
    ("writer", "value", "reader", "said"),
    [
        ("long", b"\2", "int", "R.f is of type long, not int"),
        ("long", b"\2", "double", "R.f is of type long, not double"),
        ("long", b"\2", ["float", "double"], "R.f is of type long, not [float, double]"),
        ("int", b"\2", "float", "R.f is of type int, not float"),
        ("double", bytes(8), "float", "R.f is of type double, not float"),
        ("boolean", b"\1", "int", "R.f is of type boolean, not int"),
        ("int", b"\2", "string", "R.f is of type int, not string"),
        ("int", b"\2", ["null", "string"], "R.f is of type int, not [null, string]"),
        (["null", "int"], b"\0", "int", "R.f is of type null, not int"),
        (["null", "int"], b"\2\2", ["null", "string"], "R.f is of type int, not [null, string]"),
        (INTS, b"\0", {"type": "array", "items": "string"}, "R.f is of type array of int, not array of string"),
        (INTS, b"\0", {"type": "map", "values": "int"}, "R.f is of type array of int, not map of int"),
        ({"type": "array", "items": ["null", "int"]}, b"\4\0\2\2\0", {"type": "array", "items": ["null", "string"]},
         "R.f[] is of type int, not [null, string]"),
        (ENUM, b"\2", ENUM | {"name": "x.G"}, "R.f is of type enum E, not enum x.G"),
        (ENUM | {"name": "x.Old"}, b"\2", ENUM | {"aliases": ["Old"]}, "R.f is of type enum x.Old, not enum E"),
        (ENUM, b"\2", ENUM | {"symbols": ["A"]}, "R.f has a symbol that enum E lacks"),
        (ENUM, b"\2", ENUM | {"symbols": ["A"], "default": "A"}, "R.f has a symbol that enum E lacks"),
        (ENUM, b"\2", "string", "R.f is of type enum E, not string"),
        (FIXED, b"ab", FIXED | {"size": 3}, "R.f is of type fixed F of 2 bytes, not fixed F of 3 bytes"),
        (FIXED, b"ab", FIXED | {"name": "G"}, "R.f is of type fixed F of 2 bytes, not fixed G of 2 bytes"),
        (FIXED, b"ab", "bytes", "R.f is of type fixed F of 2 bytes, not bytes"),
        (decimal(), b"\2\2", "bytes", "R.f is of type decimal with scale 2, not bytes"),
        (decimal("fixed"), b"\0\2", decimal("fixed") | {"name": "G"},
         "R.f is of type decimal with scale 2, not decimal with scale 2"),
        (decimal("fixed"), b"\0\2", FIXED | {"name": "D"},
         "R.f is of type decimal with scale 2, not fixed D of 2 bytes"),
        (logical("long", "timestamp-millis"), b"\2", "long", "R.f is of type timestamp-millis, not long"),
        (logical("long", "timestamp-millis"), b"\2", "double", "R.f is of type timestamp-millis, not double"),
        (logical("int", "date"), b"\2", ["int", "long"], "R.f is of type date, not [int, long]"),
        (logical("long", "timestamp-millis"), b"\2", logical("long", "local-timestamp-millis"),
         "R.f is of type timestamp-millis, not local-timestamp-millis"),
        (logical("long", "time-micros"), b"\2", logical("long", "timestamp-micros"),
         "R.f is of type time-micros, not timestamp-micros"),
        (UUID_FIXED, bytes(16), FIXED | {"name": "U", "size": 16}, "R.f is of type uuid U of 16 bytes, not fixed U of 16 bytes"),
        ("int", b"\2", logical("long", "timestamp-millis"), "R.f is of type int, not timestamp-millis"),
        (logical("string", "uuid"), b"\2a", UUID_FIXED, "R.f is of type uuid, not uuid U of 16 bytes"),
        (NODE, b"\2\0", NODE | {"name": "Other", "fields": []}, "R.f is of type record Node, not record Other"),
        (NODE, b"\2\0", "int", "R.f is of type record Node, not int"),
        ([NODE, "int"], b"\0\2\0", ["null", "int"], "R.f is of type record Node, not [null, int]"),
        # Two types of a union are not read as the same.
        ([ENUM, ENUM | {"name": "x.E"}], b"\2\2", ["null", ENUM],
         "R.f is of type enum x.E, and another type of its union matches enum E, too"),
        ([ENUM, ENUM | {"name": "G"}], b"\2\2", ENUM | {"aliases": ["G"]},
         "R.f is of type enum G, and another type of its union matches enum E, too"),
        ([ENUM, ENUM | {"name": "x.E"}], b"\0\2", ENUM | {"name": "y.E"},
         "R.f is of type enum E, and another type of its union matches enum y.E, too"),
    ],
)  # fmt: skip
def test_a_value_that_the_pinned_schema_cannot_read(writer, value, reader, said):
    content = avro_content(of({"f": writer, "g": "int"}), of({"f": reader}), ())
    found = fault_of(content, value + b"\2")
    assert found == ("schema_unresolvable", f"the value's schema cannot be read as the pinned schema: {said}")
    # Damage comes first.
    assert fault_of(content, value)[0] == "not_avro"


def test_fields_of_records():
    writer = of({"a": "int", "gone": {"type": "map", "values": NODE}, "b": "string", "old": "int"}, "x.R")
    value = b"\2" + b"\2\2\xff\2\0\2\2\xff\2\0\0" + b"\2b\4"
    reader = of({"new": field("long", aliases=["x", "old"]), "b": "bytes", "more": field("int", default=9), "a": "int"})
    assert avro_content(writer, reader, ())(value) == tree(new=2, b=b"b", more=9, a=1)
    without = avro_content(writer, reader, (("new",), ("more",)))
    assert without(value) == tree(b=b"b", a=1)
    lacking = fault_of(avro_content(writer, of({"c": "int"}, "y.R"), ()), value)
    said = "R.c is missing, and has no default in the pinned schema"
    assert lacking == ("schema_unresolvable", f"the value's schema cannot be read as the pinned schema: {said}")
    unlike = fault_of(avro_content(writer, of({"a": "int"}, "x.Q"), ()), value)
    assert unlike[1].endswith("the value is of type record x.R, not record x.Q")
    aliased = json.dumps(json.loads(of({"a": "int"}, "x.Q")) | {"aliases": ["R"]})
    assert avro_content(writer, aliased, ())(value) == tree("x.Q", a=1)


def test_the_first_field_without_a_value_is_named():
    """The same one in every process, however many there are."""
    content = avro_content(of({}), of(dict.fromkeys("hgfedcba", "int")), ())
    assert "R.h is missing" in fault_of(content, b"")[1]


ENUMS = {"type": "array", "items": ENUM | {"symbols": [f"s{at}" for at in range(20_000)]}}
FIXEDS = [FIXED | {"name": f"F{at}"} for at in range(10_000)]
NAMES = [f"F{at}" for at in range(300)]
F1 = TypedValue("F1", b"ab")
HUGE = [
    (["null"] * 60_000, [], b"\2", None),
    (FIXEDS, [], b"\2ab", F1),
    (FIXEDS[:300], [NAMES] * 299, b"\2ab" * 300, F1),
    ([ENUMS, *[{"type": "array", "items": "E"}] * 20_000], [], b"\2\2\2\0", ["s1"]),
]


@pytest.mark.parametrize(("kind", "others", "value", "expected"), HUGE, ids=["null", "fixed", "references", "symbols"])
def test_a_schema_with_very_many_parts(kind, others, value, expected):
    """The work must be linear: otherwise, these would take minutes."""
    schema = record(kind, *others)
    assert avro_content(schema, None, ())(value) == tree(**{f"f{at}": expected for at in range(len(others) + 1)})
    pinned = of({"f0": ["null", {"type": "array", "items": ENUM | {"symbols": ["s1"]}}, FIXED | {"name": "F1"}, FIXED]})
    assert avro_content(schema, pinned, ())(value) == tree(f0=expected)
    assert unresolvable(schema, pinned) is None


def test_fields_that_take_no_bytes_in_items():
    """20,000 fields of each item would take 1 GB."""
    item = json.loads(of({"i": "int"} | {f"n{at}": "null" for at in range(20_000)}, "T"))
    value = zigzag(2_000) + b"\2" * 2_000 + b"\0"
    assert avro_content(record({"type": "array", "items": item}), None, ())(value) == tree(f0=[keyed(i=1)] * 2_000)


def test_names_of_types_are_content():
    placed, cancelled = (of({"id": "long"}, name) for name in ("a.OrderPlaced", "OrderCancelled"))
    contents = [avro_content(each, None, (("x",),))(b"\x0e") for each in (placed, cancelled)]
    assert contents == [tree("a.OrderPlaced", id=7), tree("OrderCancelled", id=7)]
    # In a union with another name, too, but not in a nullable field.
    kinds = [json.loads(placed), json.loads(cancelled), ENUM, FIXED]
    some = avro_content(record(["null", *kinds]), None, (("f0", "at"),))
    for branch, value, expected in (
        (b"\0", b"", None),
        (b"\2", b"\x0e", TypedValue("a.OrderPlaced", keyed(id=7))),
        (b"\4", b"\x0e", TypedValue("OrderCancelled", keyed(id=7))),
        (b"\6", b"\2", TypedValue("E", "B")),
        (b"\x08", b"ab", TypedValue("F", b"ab")),
    ):
        assert some(branch + value) == tree(f0=expected)
    for kind in (kinds[0], ENUM, FIXED):
        one = record([kind, "null", "string", INTS])
        assert avro_content(one, None, ())(b"\2") == tree(f0=None)
        assert b"\0\3" + bytes([len(kind["name"]) + 1]) not in avro_content(one, None, ())(
            {"E": b"\0\2", "F": b"\0ab"}.get(kind["name"], b"\0\x0e")
        )
    # Paths to exclude do not name types.
    assert avro_content(record(kinds), None, (("f0", "id"),))(b"\2\x0e") == tree(f0=TypedValue("OrderCancelled", {}))


def test_an_int_that_a_double_cannot_hold():
    content = avro_content(record("int"), record("double"), ())
    assert content(zigzag(1 << 53)) == tree(f0=2.0**53)
    fault = fault_of(content, zigzag((1 << 53) + 1))
    assert fault == ("number_out_of_range", "an int of the value has more than 32 bits")


def test_aliases_of_fields():
    writer = of({"a": "int", "b": "int"})
    # A name precedes an alias, and each field is read once.
    for fields, expected in (
        ({"a": "int", "c": field("int", aliases=["a"], default=9)}, {"a": 1, "c": 9}),
        ({"c": field("int", aliases=["a", "b"]), "d": field("int", aliases=["a", "b"])}, {"c": 1, "d": 2}),
        ({"b": field("int", aliases=["a"])}, {"b": 2}),
        ({"c": field("int", aliases="a", default=9)}, {"c": 9}),
    ):
        assert avro_content(writer, of(fields), ())(b"\2\4") == tree(**expected)


PINNED = "is read with the pinned schema, which "
DEFAULTS = [
    ("null", None, None),
    ("boolean", True, True),
    ("int", -(1 << 31), -(1 << 31)),
    ("long", (1 << 63) - 1, (1 << 63) - 1),
    ("float", 0.1, struct.unpack("<f", struct.pack("<f", 0.1))[0]),
    ("double", 1, 1.0),
    ("double", 10**30, 1e30),
    ("double", 10**350, math.inf),
    ("bytes", "\xff\0", b"\xff\0"),
    ("string", "é", "é"),
    (ENUM, "B", "B"),
    (FIXED, "\xffa", b"\xffa"),
    (decimal(), "\x0f", Number("15e-2")),
    (UUID_FIXED, "\0" * 16, UUID(int=0)),
    (logical("long", "timestamp-millis"), 1, Instant(1_000_000)),
    (logical("int", "date"), 1, TypedValue("date", 1)),
    (INTS, [1, 2], [1, 2]),
    ({"type": "map", "values": ["int", "string"]}, {"a": "b", "c": 1}, keyed(a="b", c=1)),
    (["null", "int"], None, None),
    (["null", "int"], 1, 1),
    (["int", "double"], 1.5, 1.5),
    (["null", ENUM, FIXED], "ab", TypedValue("F", b"ab")),
    (["null", NODE, FIXED], {"v": 1, "next": None}, TypedValue("Node", keyed(v=1, next=None))),
    (NODE, {"v": 1, "next": {"v": 2, "next": None}}, keyed(v=1, next=keyed(v=2, next=None))),
    ({"type": "record", "name": "I", "fields": [{"name": "x", "type": "int", "default": 3}]}, {}, keyed(x=3)),
    ({"type": "record", "name": "I", "fields": [{"name": "x", "type": "null"}]}, {"x": None}, {}),
]


@pytest.mark.parametrize(("kind", "default", "expected"), DEFAULTS)
def test_a_default_of_the_pinned_schema(kind, default, expected):
    reader = of({"f": "int", "g": field(kind, default=default)})
    assert avro_content(of({"f": "int"}), reader, ())(b"\2") == tree(f=1, g=expected)


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("null", 0),
        ("boolean", 1),
        ("int", True),
        ("int", 1.0),
        ("int", 1 << 31),
        ("long", -(1 << 63) - 1),
        ("long", 10**350),
        ("float", "1"),
        ("float", 1e300),
        ("double", True),
        ("bytes", "\u0100"),
        ("bytes", 1),
        ("string", 1),
        ("string", "\ud800"),
        (decimal(), ""),
        (ENUM, "X"),
        (FIXED, "a"),
        (FIXED, None),
        (INTS, {}),
        (INTS, ["a"]),
        ({"type": "map", "values": "int"}, []),
        ({"type": "map", "values": "int"}, {"\ud800": 1}),
        (["null", "int"], "a"),
        (NODE, {"v": 1}),
        (NODE, []),
    ],
)
def test_a_default_of_another_type(kind, default):
    writer = of({"f": field(kind, default=default)})
    with pytest.raises(SchemaRefused, match=rf"^{PINNED}has a default at R\.f that is not of the field's type$"):
        avro_content(of({"f": "int"}), writer, ())
    avro_content(writer, of({}), ())  # the writer's defaults do not matter


def test_defaults_are_bounded():
    loop = {"type": "record", "name": "L", "fields": [{"name": "l", "type": ["null", "L"], "default": {}}]}
    with pytest.raises(SchemaRefused, match=rf"^{PINNED}has defaults of more than 100,000 values or 200 levels$"):
        avro_content(of({"f": "int"}), of({"l": field(loop, default={})}), ())
    tower = {"type": "record", "name": "V0", "fields": [{"name": "x", "type": "int", "default": 0}]}
    for at in range(1, 99):
        fields = [{"name": "a", "type": tower, "default": {}}, {"name": "b", "type": f"V{at - 1}", "default": {}}]
        tower = {"type": "record", "name": f"V{at}", "fields": fields}
    with pytest.raises(SchemaRefused, match=rf"^{PINNED}has defaults of more than 100,000 values or 200 levels$"):
        avro_content(of({"f": "int"}), of({"v": tower}), ())


def test_a_default_counts_as_levels():
    deep = {"v": 1, "next": None}
    for at in range(5):
        deep = {"v": at, "next": deep}
    extra = {"name": "more", "type": NODE | {"name": "M"}, "default": deep}
    extra["type"]["fields"] = [NODE["fields"][0], {"name": "next", "type": ["null", "M"]}]
    reader = json.dumps(NODE | {"fields": [*NODE["fields"], extra]})
    content = avro_content(json.dumps(NODE), reader, ())
    assert content(b"\2\2" * 96 + b"\2\0")
    assert fault_of(content, b"\2\2" * 97 + b"\2\0")[0] == "too_deep"


@pytest.mark.parametrize(
    ("pinned", "said"),
    [
        ("", "is not JSON"),
        ('"int"', "does not describe a record"),
        (record("E"), "uses a type that it does not define before: E"),
    ],
)
def test_a_pinned_schema_that_is_refused(pinned, said):
    for refused in (avro_content, lambda schema, pinned, _: unresolvable(schema, pinned)):
        with pytest.raises(SchemaRefused, match=f"^{PINNED}{said}"):
            refused(record("int"), pinned, ())
        with pytest.raises(SchemaRefused, match=f"^{said}"):
            refused(pinned, record("int"), ())


def test_a_schema_that_is_refused():
    with pytest.raises(SchemaRefused):
        avro_content("", None, ())


def test_records_that_contain_themselves():
    writer = NODE | {"fields": [*NODE["fields"], {"name": "gone", "type": ["null", "Node"]}]}
    reader = NODE | {
        "name": "x.Node",
        "fields": [
            {"name": "then", "aliases": ["next"], "type": ["null", "Node"]},
            {"name": "v", "type": "double"},
            {"name": "more", "type": ["null", "Node"], "default": None},
        ],
    }
    content = avro_content(json.dumps(writer), json.dumps(reader), ())
    last = keyed(v=2.0, then=None, more=None)
    assert content(b"\2\2\4\0\2\6\0\0\0") == tree("x.Node", v=1.0, then=last, more=None)


@pytest.mark.parametrize(
    ("writer", "reader", "said"),
    [
        (of({"a": "int"}), of({"a": "long", "b": field("int", default=1)}), None),
        (of({"a": "int"}, "A"), of({"a": "int"}, "B"), "the value is of type record A, not record B"),
        (of({}), of({"b": "int"}), "R.b is missing, and has no default in the pinned schema"),
        (of({"a": "long", "b": "long"}), of({"b": "int", "a": "int"}), "R.a is of type long, not int"),
        (of({"gone": "int", "a": "int"}), of({"new": field("int", aliases=["a"])}), None),
        # A union, an enum, and an item are readable if a part is.
        (of({"a": ["null", "int"]}), of({"a": "int"}), None),
        (of({"a": ["null", "string"]}), of({"a": "int"}), "R.a is of type null, not int"),
        (of({"a": ENUM}), of({"a": ENUM | {"symbols": ["X", "C"]}}), None),
        (of({"a": ENUM}), of({"a": ENUM | {"symbols": ["X"]}}), "R.a has a symbol that enum E lacks"),
        (of({"a": ["null", ENUM]}), of({"a": ["null", ENUM | {"symbols": ["X"]}]}), None),
        (of({"a": [ENUM, ENUM | {"name": "x.E"}]}), of({"a": ENUM | {"name": "y.E"}}),
         "R.a is of type enum E, and another type of its union matches enum y.E, too"),
        (of({"a": {"type": "array", "items": ["null", "string"]}}), of({"a": {"type": "array", "items": ["int"]}}),
         "R.a[] is of type null, not [int]"),
        # Records that contain others, or themselves.
        (json.dumps(NODE), json.dumps(NODE | {"fields": [*NODE["fields"], {"name": "x", "type": "int"}]}),
         "Node.x is missing, and has no default in the pinned schema"),
        (json.dumps(NODE), json.dumps(NODE | {"name": "x.Node"}), None),
        (of({"a": ["null", {"type": "map", "values": NODE}]}),
         of({"a": ["null", {"type": "map", "values": NODE | {"fields": [{"name": "v", "type": "string"}]}}]}),
         "Node.v is of type int, not string"),
        # A record that takes no bytes has no members to read.
        (of({"a": "null"}), of({"a": {"type": "fixed", "name": "F", "size": 0}}), None),
    ],
)  # fmt: skip
def test_what_a_pinned_schema_cannot_read(writer, reader, said):
    assert unresolvable(writer, reader) == said
