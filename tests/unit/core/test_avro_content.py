"""The content of Avro values: the canonical form of every type, every rule of schema resolution, each fault."""

from __future__ import annotations

import json
import math
import struct
from uuid import UUID

import pytest

from dedup.core.avro import Instant
from dedup.core.avro_content import avro_content
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


def tree(**members):
    return encode_content({text_key(name): member for name, member in members.items()}, {})


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
    assert content(b"\2\2\2a").hex() == "000002020301663002040103016631020161"
    assert content(b"\2\0").hex() == "000002020301663002040103016631010b"


def test_what_does_not_matter():
    one = of({"a": "int", "b": ["null", "string"], "m": {"type": "map", "values": "long"}}, "x.One")
    two = of({"m": {"type": "map", "values": "int"}, "a": "long", "b": ["string", ENUM]}, "Two")
    content = avro_content(one, None, ())(b"\2\2\2A\4\2x\2\2y\4\0")
    # The order of fields and of keys, blocks, branches, and names of types; an enum's symbol is a text.
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
    assert avro_content(record("null", empty, void, "int"), None, ())(b"\2") == tree(f0=None, f1=b"", f2={}, f3=1)
    assert avro_content(record("null"), None, ())(b"") == tree()
    tower = {"type": "record", "name": "V0", "fields": []}
    for at in range(1, 100):  # 2**99 fields
        fields = [{"name": "a", "type": tower}, {"name": "b", "type": f"V{at - 1}"}]
        tower = {"type": "record", "name": f"V{at}", "fields": fields}
    schema = record("long", tower, ["null", "V99"], {"type": "map", "values": "V99"})
    for pinned in (None, schema):
        content = avro_content(schema, pinned, ())
        assert content(b"\2\2\2\2a\0") == tree(f0=1, f1={}, f2={}, f3=keyed(a={}))
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


LONG = (1 << 60) + (1 << 36) + 1
"""Rounded to a double and then to a float, it is another number than rounded to a float at once."""


def zigzag(number):
    number, found = 2 * number, b""
    while number > 127:
        number, found = number >> 7, found + bytes([number & 127 | 128])
    return found + bytes([number])


@pytest.mark.parametrize(
    ("writer", "value", "reader", "expected"),
    [
        ("int", b"\x0e", "long", 7),
        ("int", b"\x0e", "float", 7.0),
        ("int", b"\xfe\xff\xff\xff\x0f", "float", 2147483648.0),
        ("int", b"\x0e", "double", 7.0),
        ("long", b"\x0e", "float", 7.0),
        ("long", zigzag(LONG), "float", float((1 << 60) + (1 << 37))),
        ("long", zigzag(LONG), "double", float((1 << 60) + (1 << 36))),
        ("float", struct.pack("<f", 0.1), "double", struct.unpack("<f", struct.pack("<f", 0.1))[0]),
        ("string", b"\4\xc3\xa9", "bytes", b"\xc3\xa9"),
        ("bytes", b"\4\xc3\xa9", "string", "é"),
        (logical("string", "uuid"), b"\2a", "bytes", b"a"),
        ("bytes", b"\2a", logical("string", "uuid"), "a"),
        (logical("string", "uuid"), b"\2a", "string", "a"),
        # Logical types are those of the reader.
        ("long", b"\2", logical("long", "timestamp-micros"), Instant(1_000)),
        (logical("long", "timestamp-millis"), b"\2", "long", 1),
        (logical("long", "timestamp-millis"), b"\2", "double", 1.0),
        (logical("int", "date"), b"\2", "long", 1),
        ("bytes", b"\2\x0f", decimal(scale=1), Number("15e-1")),
        (decimal(), b"\2\x0f", decimal(precision=12), Number("15e-2")),
        (decimal(), b"\2\x0f", "bytes", b"\x0f"),
        (FIXED, b"\0\x0f", FIXED | decimal("fixed") | {"name": "F"}, Number("15e-2")),
        # Types with names.
        (ENUM, b"\2", ENUM | {"symbols": ["X", "C", "B"]}, "B"),
        (ENUM, b"\2", ENUM | {"symbols": ["X", "C"], "default": "X"}, "X"),
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
        (FIXED, b"ab", [FIXED | {"name": "x.F"}, FIXED], b"ab"),
        ([FIXED, ENUM], b"\2\2", ["null", ENUM | {"name": "x.E"}], "B"),
    ],
)  # fmt: skip
def test_a_value_is_read_as_the_pinned_schema(writer, value, reader, expected):
    assert avro_content(of({"f": writer}), of({"f": reader}), ())(value) == tree(f=expected)


@pytest.mark.parametrize(
    ("writer", "value", "reader", "said"),
    [
        ("long", b"\2", "int", "R.f is of type long, not int"),
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
        (ENUM, b"\2", ENUM | {"symbols": ["A"]}, "R.f has a symbol that enum E lacks, without a default"),
        (ENUM, b"\2", "string", "R.f is of type enum E, not string"),
        (FIXED, b"ab", FIXED | {"size": 3}, "R.f is of type fixed F of 2 bytes, not fixed F of 3 bytes"),
        (FIXED, b"ab", FIXED | {"name": "G"}, "R.f is of type fixed F of 2 bytes, not fixed G of 2 bytes"),
        (FIXED, b"ab", "bytes", "R.f is of type fixed F of 2 bytes, not bytes"),
        (decimal(), b"\2\2", decimal(scale=3), "R.f is of type decimal with scale 2, not decimal with scale 3"),
        (decimal(), b"\2\2", decimal("fixed"), "R.f is of type decimal with scale 2, not decimal with scale 2"),
        (logical("long", "timestamp-millis"), b"\2", logical("long", "timestamp-micros"),
         "R.f is of type timestamp-millis, not timestamp-micros"),
        ("int", b"\2", logical("long", "timestamp-millis"), "R.f is of type int, not timestamp-millis"),
        (logical("string", "uuid"), b"\2a", UUID_FIXED, "R.f is of type uuid, not uuid U of 16 bytes"),
        (NODE, b"\2\0", NODE | {"name": "Other", "fields": []}, "R.f is of type record Node, not record Other"),
        (NODE, b"\2\0", "int", "R.f is of type record Node, not int"),
        ([NODE, "int"], b"\0\2\0", ["null", "int"], "R.f is of type record Node, not [null, int]"),
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
    assert avro_content(writer, aliased, ())(value) == tree(a=1)


def test_the_first_field_without_a_value_is_named():
    """The same one in every process, however many there are."""
    content = avro_content(of({}), of(dict.fromkeys("hgfedcba", "int")), ())
    assert "R.h is missing" in fault_of(content, b"")[1]


def test_a_union_of_very_many_branches():
    content = avro_content(record(["null"] * 50_000), None, ())
    assert content(b"\2") == tree(f0=None)


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
    with pytest.raises(SchemaRefused, match=r"^has a default at R\.f that is not of the field's type$"):
        avro_content(of({"f": "int"}), writer, ())
    avro_content(writer, of({}), ())  # the writer's defaults do not matter


def test_defaults_are_bounded():
    loop = {"type": "record", "name": "L", "fields": [{"name": "l", "type": ["null", "L"], "default": {}}]}
    with pytest.raises(SchemaRefused, match=r"^has defaults of more than 100,000 values or 200 levels$"):
        avro_content(of({"f": "int"}), of({"l": field(loop, default={})}), ())
    tower = {"type": "record", "name": "V0", "fields": [{"name": "x", "type": "int", "default": 0}]}
    for at in range(1, 99):
        fields = [{"name": "a", "type": tower, "default": {}}, {"name": "b", "type": f"V{at - 1}", "default": {}}]
        tower = {"type": "record", "name": f"V{at}", "fields": fields}
    with pytest.raises(SchemaRefused, match=r"^has defaults of more than 100,000 values or 200 levels$"):
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
        (record(ENUM | {"default": "X"}), "has an enum E whose default is not one of its symbols"),
        (record({"type": "map", "values": ["null", ENUM | {"default": 1}]}), "has an enum E whose default"),
    ],
)
def test_a_pinned_schema_that_is_refused(pinned, said):
    with pytest.raises(SchemaRefused, match=f"^{said}"):
        avro_content(record("int"), pinned, ())
    if "E" in pinned:
        avro_content(pinned, record(), ())  # a writer's default does not matter


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
    assert content(b"\2\2\4\0\2\6\0\0\0") == tree(v=1.0, then=last, more=None)
