"""The canonical content of Protobuf values: every type, every rule of merging and presence, every fault, and the cost."""

import math
import sys

import numpy as np
import pytest

from dedup.core import protobuf
from dedup.core.content_tree import MAX_DEPTH, TypedValue, encode_content, scalar_key, text_key
from dedup.core.exact_json import Unreadable
from dedup.core.framing import LinkedSchema, SchemaRefused
from dedup.core.proto_schema import MAX_DEPTH as MAX_GROUPS
from dedup.core.proto_schema import SCALARS, parse_proto
from dedup.core.protobuf_content import _VALUES, has_member, protobuf_content
from dedup.core.tracking_id import parse_path
from tests.protoc import compiled

BEGIN = 'syntax = "proto3"; import "google/protobuf/timestamp.proto"; import "google/protobuf/wrappers.proto";'
OTHERS = (
    "message M { M m = 1; string s = 2; repeated M all = 3; map<string, M> by = 4; int32 n = 5; } enum E { Z = 0; }"
)


def schema_of(*fields, syntax="proto3"):
    return f"{BEGIN.replace('proto3', syntax, 1)} message R {{ {' '.join(fields)} }} {OTHERS if syntax == 'proto3' else ''}"


def content_of(schema, value, *, exclude=(), pinned=None, indexes=(0,)):
    return protobuf_content(schema, indexes, pinned, tuple(map(parse_path, exclude)))(bytes.fromhex(value))


def object_of(members):
    """Return the tree of a message, given its members by the numbers of their fields."""
    return {scalar_key(number): object_of(each) if isinstance(each, dict) else each for number, each in members.items()}


def canonical(members, name="R"):
    return of_type(object_of(members), name)


def of_type(tree, name="R"):
    """Return the content of a message, given its tree and the name of its type."""
    return encode_content(TypedValue(name, tree), {})


def leb(number):
    """Return a number in LEB128."""
    return bytes([number]) if number < 0x80 else bytes([number & 0x7F | 0x80]) + leb(number >> 7)


def sized(tag, content):
    """Return a field of bytes, given its tag of one byte."""
    return bytes([tag]) + leb(len(content)) + content


ALL_ONES = "ff" * 9 + "01"
TYPES = [
    ("int32", "08" + ALL_ONES, -1),
    ("int32", "08ffffffff0f", -1),  # libraries drop the high bits
    ("int64", "08" + ALL_ONES, -1),
    ("uint32", "08" + ALL_ONES, (1 << 32) - 1),
    ("uint64", "08" + ALL_ONES, (1 << 64) - 1),
    ("sint32", "08ffffffff0f", -(1 << 31)),
    ("sint32", "0883808080f001", -2),
    ("sint64", "08" + ALL_ONES, -(1 << 63)),
    ("fixed32", "0dffffffff", (1 << 32) - 1),
    ("sfixed32", "0dffffffff", -1),
    ("fixed64", "09" + "ff" * 8, (1 << 64) - 1),
    ("sfixed64", "09" + "ff" * 8, -1),
    ("bool", "0801", True),
    ("bool", "08808001", True),
    ("enum", "08" + ALL_ONES, -1),
    ("enum", "0807", 7),  # a number that the enum does not define
    ("float", "0d0000c03f", 1.5),
    ("double", "09000000000000f83f", 1.5),
    ("float", "0d0000c07f", math.nan),
    ("float", "0d010080ff", math.nan),
    ("string", "0a02c3a9", "é"),
    ("bytes", "0a02ffc3", b"\xff\xc3"),
]


@pytest.mark.parametrize(("kind", "value", "expected"), TYPES)
def test_each_type(kind, value, expected):
    schema = schema_of(f"{'E' if kind == 'enum' else kind} f = 1;")
    compiled(schema, "R")  # it is .proto text
    assert content_of(schema, value) == canonical({1: expected})


@pytest.mark.parametrize("kind", sorted(protobuf._NUMBERS))
def test_numbers_are_those_of_ids(kind):
    wide = [0, 1, 2, 127, 128, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0xF00000003]
    raws = wide if SCALARS[kind] != 5 else [raw & 0xFFFFFFFF for raw in wide]
    expected = protobuf._NUMBERS[kind](np.array(raws, np.uint64)).tolist()
    assert [_VALUES[kind](raw) for raw in raws] == expected


def test_types_differ():
    """A number, its text, and a truth are other contents, and so are an integer and a floating-point number."""
    contents = [
        content_of(schema_of(f"{kind} f = 1;"), value)
        for kind, value in (("int32", "0801"), ("bool", "0801"), ("double", "09000000000000f03f"), ("string", "0a0131"), ("bytes", "0a0131"))
    ]  # fmt: skip
    assert len(set(contents)) == len(contents)


def test_every_scalar_type_has_a_zero_that_counts_only_with_presence():
    zeros = {0: "0800", 1: "09" + "00" * 8, 2: "0a00", 5: "0d" + "00" * 4}
    for kind, wire in SCALARS.items():
        name = "E" if kind == "enum" else kind
        assert content_of(schema_of(f"{name} f = 1;"), zeros[wire]) == canonical({})
        zero = {"string": "", "bytes": b"", "bool": False, "float": 0.0, "double": 0.0}.get(kind, 0)
        for field in (f"optional {name} f = 1;", f"oneof o {{ {name} f = 1; }}"):
            assert content_of(schema_of(field), zeros[wire]) == canonical({1: zero})


@pytest.mark.parametrize(
    ("fields", "value", "expected"),
    [
        ("int32 f = 1;", "08050807", {1: 7}),  # the last value counts
        ("int32 f = 1;", "08050800", {}),
        ("double f = 1;", "090000000000000080", {}),  # there is one zero
        ("optional double f = 1;", "090000000000000080", {1: 0.0}),
        ("M f = 1;", "", {}),
        ("M f = 1;", "0a00", {1: {}}),
        ("M f = 1;", "0a0312017a" + "0a022805" + "0a02280a", {1: {2: "z", 5: 10}}),  # messages merge
        ("M f = 1;", "0a040a022805" + "0a050a0312017a", {1: {1: {5: 5, 2: "z"}}}),
        ("M f = 1;", "0a041a022801" + "0a041a022802", {1: {3: [object_of({5: 1}), object_of({5: 2})]}}),
        ("oneof o { M f = 1; M g = 2; int32 h = 3; }", "0a022805" + "1200", {2: {}}),
        ("oneof o { M f = 1; M g = 2; int32 h = 3; }", "0a022805" + "1200" + "0a0312017a", {1: {2: "z"}}),
        ("oneof o { M f = 1; M g = 2; int32 h = 3; }", "0a022805" + "0a0312017a", {1: {5: 5, 2: "z"}}),
        ("oneof o { M f = 1; M g = 2; int32 h = 3; }", "0a022805" + "1800", {3: 0}),
        ("oneof o { int32 f = 1; } oneof p { int32 g = 2; }", "08011002", {1: 1, 2: 2}),
        ("M f = 1; oneof o { int32 g = 2; int32 h = 3; }", "1002" + "0a00" + "1800", {1: {}, 3: 0}),
        ("repeated int32 f = 1;", "0801" + "0a020002" + "08ffffffff0f", {1: [1, 0, 2, -1]}),
        ("repeated int32 f = 1;", "0a00", {}),
        ("repeated int32 f = 1 [packed = false];", "0a03010203", {1: [1, 2, 3]}),
        ("repeated fixed32 f = 1;", "0a0801000000ffffffff" + "0d02000000", {1: [1, (1 << 32) - 1, 2]}),
        ("repeated double f = 1;", "0a08000000000000f83f", {1: [1.5]}),
        ("repeated bool f = 1;", "0a03000102", {1: [False, True, True]}),
        ("repeated E f = 1;", "0a0107" + "0800", {1: [7, 0]}),
        ("repeated string f = 1;", "0a0161" + "0a00", {1: ["a", ""]}),
        ("repeated M f = 1;", "0a022805" + "0a00", {1: [object_of({5: 5}), {}]}),
        ("google.protobuf.Timestamp f = 1;", "0a0408051000", {1: {1: 5}}),
        ("google.protobuf.Int64Value f = 1;", "0a020800", {1: {}}),
    ],
)
def test_fields_merge_as_in_protobufs_libraries(fields, value, expected):
    schema = schema_of(fields)
    compiled(schema, "R").FromString(bytes.fromhex(value))
    assert content_of(schema, value) == canonical(expected)


@pytest.mark.parametrize(
    ("types", "value", "expected"),
    [
        ("string, int32", "0a050a01611005" + "0a050a01621006", {"b": 6, "a": 5}),
        ("string, int32", "0a050a01611005" + "0a050a01611006", {"a": 6}),  # the last entry counts
        ("string, int32", "0a0510050a0161", {"a": 5}),
        ("string, int32", "0a00", {"": 0}),
        ("string, int32", "", None),
        ("bool, string", "0a050801120161" + "0a0208" + "00", {True: "a", False: ""}),
        ("uint64, bytes", "0a0b08" + ALL_ONES, {(1 << 64) - 1: b""}),
        ("sint32, double", "0a020801", {-1: 0.0}),
        ("fixed64, bool", "0a0b090100000000000000" + "1001", {1: True}),
        ("string, E", "0a050a01611007", {"a": 7}),
        ("string, M", "0a030a0161", {"a": {}}),
        ("string, M", "0a0b0a0161" + "12022805" + "12022806", {"a": object_of({5: 6})}),
        ("string, M", "0a070a016112022805" + "0a080a0161120312017a", {"a": object_of({2: "z"})}),  # entries replace
    ],
)
def test_maps(types, value, expected):
    schema = schema_of(f"map<{types}> f = 1;")
    compiled(schema, "R").FromString(bytes.fromhex(value))
    entries = None if expected is None else {scalar_key(key): each for key, each in expected.items()}
    assert content_of(schema, value) == of_type({} if entries is None else {scalar_key(1): entries})


def test_groups_and_proto2():
    schema = schema_of(
        "optional group One = 1 { optional int32 n = 1; optional group Two = 2 { optional string s = 1; } }",
        "repeated group Many = 3 { optional int32 n = 1; }",
        "required int32 r = 4; optional int32 d = 5 [default = 5]; repeated int32 l = 6;",
        syntax="proto2",
    )
    compiled(schema, "R")
    value = "0b0801" + "130a0161" + "14" + "0c" + "0b0802" + "0c" + "1b" + "1c" + "1b0807" + "1c" + "2800" + "30013200"
    expected = {1: {1: 2, 2: {1: "a"}}, 3: [{}, object_of({1: 7})], 5: 0, 6: [1]}
    assert content_of(schema, value) == canonical(expected)  # a missing required field is for the producer to notice


def test_a_message_that_is_a_group_elsewhere():
    schema = schema_of("optional group One = 1 { optional int32 n = 1; } optional One two = 2;", syntax="proto2")
    compiled(schema, "R")
    assert content_of(schema, "0b08010c" + "12020802") == canonical({1: {1: 1}, 2: {1: 2}})


def test_unknown_fields_are_content_unless_the_schema_is_pinned():
    schema = schema_of("int32 f = 1;", "map<string, int32> m = 2;")
    value = "5005" + "0801" + "5a02ffff" + "53080154" + "510100000000000000" + "5501000000"
    unknown = [
        TypedValue("wire 0", 5),
        TypedValue("wire 3", b"\x08\x01"),
        TypedValue("wire 1", 1),
        TypedValue("wire 5", 1),
    ]
    assert content_of(schema, value) == canonical({1: 1, 10: unknown, 11: [TypedValue("wire 2", b"\xff\xff")]})
    assert content_of(schema, value, pinned=schema) == canonical({1: 1})
    for one, other in (("5001", "5002"), ("5a00", "5b5c"), ("50015002", "50025001"), ("0801", "08015000")):
        assert content_of(schema, one) != content_of(schema, other)
    assert content_of(schema, "50015801") == content_of(schema, "58015001")  # only those of one number keep their order
    assert content_of(schema, "500158025003") == content_of(schema, "508100" + "5003" + "5802")


def test_unknown_fields_of_a_maps_entry_are_content():
    schema = schema_of("map<string, M> m = 2;")
    entry = "12090a016112022805" + "1807"
    entries = {text_key("a"): TypedValue("entry", [object_of({5: 5}), object_of({3: [TypedValue("wire 0", 7)]})])}
    assert content_of(schema, entry) == of_type({scalar_key(2): entries})
    assert content_of(schema, entry, pinned=schema) == content_of(schema, "12070a016112022805")
    assert content_of(schema, entry, exclude=["m.a"]) == canonical({})
    assert content_of(schema, entry, exclude=["m.a.n"]) == content_of(schema, entry)


WRITTEN = (
    'syntax = "proto3"; package a; message X { message Y { string s = 1; int32 n = 2; X x = 3; } Y y = 1; bool b = 2; }'
)
PINNED = 'syntax = "proto3"; package a; message Z {} message X { int32 other = 7; message Y { string text = 1; } }'


def test_a_pinned_schema_has_the_message_of_the_same_name():
    value = "0a0161" + "1005" + "1a021001"
    assert content_of(WRITTEN, value, indexes=(0, 0), pinned=PINNED) == canonical({1: "a"}, "a.X.Y")
    assert content_of(WRITTEN, value, indexes=(0, 0)) == canonical({1: "a", 2: 5, 3: {2: True}}, "a.X.Y")
    without_fields = canonical({}, "a.X")
    assert content_of(WRITTEN, "1001", pinned=PINNED) == content_of(WRITTEN, "", pinned=PINNED) == without_fields
    linked = LinkedSchema('import "x.proto"; message B {} message A { optional a.X x = 1; }', (("x.proto", WRITTEN),))
    assert content_of(linked, "0a021001", indexes=(1,)) == canonical({1: {2: True}}, "A")
    with pytest.raises(Unreadable, match="field 1 has another wire type than in the schema"):
        content_of(WRITTEN, "0801", indexes=(0, 0), pinned=PINNED)


def test_the_type_is_content():
    schema = 'syntax = "proto3"; package shop; message Placed { int64 id = 1; } message Cancelled { int64 id = 1; }'
    assert content_of(schema, "0807") == canonical({1: 7}, "shop.Placed")
    for pinned in (None, schema):
        contents = {content_of(schema, "0807", indexes=(at,), pinned=pinned) for at in (0, 1)}
        assert contents == {canonical({1: 7}, f"shop.{name}") for name in ("Placed", "Cancelled")}


KINDS_OF_ONE_ENCODING = (
    (("bool",), ("enum", "int32", "uint32"), ("int64", "uint64")),
    (("sint32",), ("sint64",)),
    (("fixed32", "sfixed32"),),
    (("fixed64", "sfixed64"),),
    (("float",),),
    (("double",),),
    (("string", "bytes"),),
)
PLACES = {kind: (at, rank) for at, ranks in enumerate(KINDS_OF_ONE_ENCODING) for rank, kinds in enumerate(ranks) for kind in kinds}  # fmt: skip


@pytest.mark.parametrize(
    "wrap", ["{} f = 1;", "repeated {} f = 1;", "map<string, {}> f = 1;", "oneof o {{ {} f = 1; }}"]
)
def test_a_pinned_type_has_room_for_all_values(wrap):
    assert PLACES.keys() == SCALARS.keys()
    for written in SCALARS:
        for read in SCALARS:
            old, new = (schema_of(wrap.format("E" if each == "enum" else each)) for each in (written, read))
            (encoding, rank), (other, room) = PLACES[written], PLACES[read]
            if encoding == other and rank <= room:
                assert content_of(old, "", pinned=new) == canonical({})
                continue
            with pytest.raises(SchemaRefused) as refused:
                content_of(old, "", pinned=new)
            types = [wrap.partition(" f")[0].removeprefix("oneof o {{ ").format(each) for each in (written, read)]
            assert (
                str(refused.value)
                == f"has the field R.f of type {types[0]}, which the pinned schema reads as {types[1]}"
            )


@pytest.mark.parametrize(
    ("written", "pinned", "said"),
    [
        ("int32 f = 1;", "repeated int64 f = 1;", ""),
        ("M f = 1;", "repeated M f = 1;", ""),
        ("map<int32, M> f = 1;", "map<int64, M> g = 1;", ""),
        ("repeated int32 f = 1;", "int32 f = 1;", "R.f of type repeated int32, which the pinned schema reads as int32"),
        ("int64 f = 1;", "repeated int32 f = 1;", "R.f of type int64, which the pinned schema reads as repeated int32"),
        ("map<int64, M> f = 1;", "map<int32, M> g = 1;",
         "R.f of type map<int64, message>, which the pinned schema reads as map<int32, message>"),
        ("map<int32, M> f = 1;", "repeated M f = 1;",
         "R.f of type map<int32, message>, which the pinned schema reads as repeated message"),
        ("repeated M f = 1;", "map<int32, M> f = 1;",
         "R.f of type repeated message, which the pinned schema reads as map<int32, message>"),
        ("M f = 1;", "bytes f = 1;", "R.f of type message, which the pinned schema reads as bytes"),
        ("string f = 1;", "M f = 1;", "R.f of type string, which the pinned schema reads as message"),
        ("map<int32, Gone> f = 1;", "map<int32, M> f = 1;",
         "R.f of type map<?>, which the pinned schema reads as map<int32, message>"),
        ("message N { int64 n = 1; } N f = 1;", "message O { int32 n = 1; } O f = 1;",
         "R.N.n of type int64, which the pinned schema reads as int32"),
        ("message N { N n = 1; bytes b = 2; } map<bool, N> f = 1;", "message O { O n = 1; bool b = 2; } map<bool, O> f = 1;",
         "R.N.b of type bytes, which the pinned schema reads as bool"),
        ("message N { N n = 1; bytes b = 2; } N f = 1;", "message O { repeated O n = 1; } message P { bool b = 2; } P f = 1;",
         "R.N.b of type bytes, which the pinned schema reads as bool"),
    ],
)  # fmt: skip
def test_a_pinned_schema_loses_no_difference_of_the_values_of_a_field(written, pinned, said):
    if not said:
        assert content_of(schema_of(written), "", pinned=schema_of(pinned)) == canonical({})
        return
    with pytest.raises(SchemaRefused) as refused:
        content_of(schema_of(written), "", pinned=schema_of(pinned))
    assert str(refused.value) == f"has the field {said}"


def test_a_group_is_no_message_of_a_pinned_schema():
    group = schema_of("optional group F = 1 { optional int32 n = 1; }", syntax="proto2")
    message = schema_of("message F { optional int32 n = 1; } optional F f = 1;", syntax="proto2")
    assert content_of(group, "0b08010c", pinned=group + " ") == canonical({1: {1: 1}})
    assert content_of(group, "0b08010c", pinned=group.replace("optional group", "repeated group")) == canonical(
        {1: [object_of({1: 1})]}
    )
    for one, other, types in ((group, message, ("group", "message")), (message, group, ("message", "group"))):
        with pytest.raises(SchemaRefused, match=f"R.f of type {types[0]}, which the pinned schema reads as {types[1]}"):
            content_of(one, "", pinned=other)


def test_values_of_fields_with_another_type_in_the_pinned_schema():
    def read(written, pinned, value):
        return content_of(schema_of(written), value, pinned=schema_of(pinned))

    assert read("bool f = 1;", "int64 f = 1;", "0802") == canonical({1: 1})
    assert read("int32 f = 1;", "int64 f = 1;", "08ffffffff0f") == canonical({1: -1})  # the high bits do not count
    assert read("uint32 f = 1;", "int64 f = 1;", "08" + ALL_ONES) == canonical({1: (1 << 32) - 1})
    assert read("int32 f = 1;", "uint64 f = 1;", "08" + ALL_ONES) == canonical({1: (1 << 64) - 1})
    assert read("repeated sint32 f = 1;", "repeated sint64 f = 1;", "0a0683808080f001") == canonical({1: [-2]})
    assert read("map<uint32, bool> f = 1;", "map<int32, E> f = 1;", "0a0908ffffffffff011005") == of_type(
        {scalar_key(1): {scalar_key(-1): 1}}
    )
    assert read("int32 f = 1;", "repeated int64 f = 1;", "0801" + "0802") == canonical({1: [1, 2]})
    nested = "message {0} {{ int32 n = 1; {0} m = 2; }} {1}{0} f = 3;"
    found = read(nested.format("N", ""), nested.format("O", "repeated "), "1a06080112020802")
    assert found == canonical({3: [object_of({1: 1, 2: {1: 2}})]})


def test_a_field_has_presence_if_it_has_presence_in_one_of_two_schemas():
    for written, pinned in (("optional int32 f = 1;", "int32 f = 1;"), ("int32 f = 1;", "optional int32 f = 1;")):
        assert content_of(schema_of(written), "0800", pinned=schema_of(pinned)) == canonical({1: 0})
    old, new = schema_of("int32 f = 1; int32 g = 2;"), schema_of("oneof o { int32 f = 1; int32 g = 2; }")
    assert content_of(new, "0800", pinned=old) == canonical({1: 0})
    assert content_of(new, "1000", pinned=old) == canonical({2: 0})
    assert content_of(new, "0801" + "1001", pinned=old) == canonical({2: 1})
    assert content_of(old, "0801" + "1001", pinned=new) == canonical({1: 1, 2: 1})


EVENTS = "oneof kind {{ int32 placed = 1; {} }} oneof other {{ int32 gone = 7; }} R r = 4; map<string, R> by = 5;"
NEW_EVENTS = schema_of(EVENTS.format("int32 paid = 2; M refunded = 3;"))
OLD_EVENTS = schema_of(EVENTS.format("int32 paid = 2;").replace("oneof other { int32 gone = 7; }", ""))


@pytest.mark.parametrize("value", ["1a022805", "0801" + "1a00", "22021a00", "2a061202" + "1a00" + "0a00"])
def test_a_kind_of_event_that_the_pinned_schema_lacks_is_unreadable(value):
    with pytest.raises(Unreadable) as unreadable:
        content_of(NEW_EVENTS, value, pinned=OLD_EVENTS)
    assert unreadable.value.code == "schema_unresolvable"
    assert str(unreadable.value) == (
        "the value's schema cannot be read as the pinned schema: R.refunded is set, a member of a oneof that the pinned "
        "schema has without this member"
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1a00" + "0805", {1: 5}),  # the last member counts
        ("22021a00" + "22020800", {4: {1: 0}}),
        ("0801" + "1a00" + "1000", {2: 0}),
        ("3805", {}),  # the pinned schema does not have this oneof at all
    ],
)
def test_a_oneof_of_which_the_pinned_schema_lacks_members(value, expected):
    assert content_of(NEW_EVENTS, value, pinned=OLD_EVENTS) == canonical(expected)


def test_an_excluded_message_may_be_of_any_kind():
    assert content_of(NEW_EVENTS, "0801" + "22021a00", pinned=OLD_EVENTS, exclude=["r"]) == canonical({1: 1})
    with pytest.raises(Unreadable, match="it ends inside a field of 2 bytes"):
        content_of(NEW_EVENTS, "1a02", pinned=OLD_EVENTS)


@pytest.mark.parametrize(
    ("schema", "indexes", "pinned", "said"),
    [
        ("message {", (0,), None, "is not .proto text"),
        (WRITTEN, (1,), None, "has no message with the indexes [1], or more than one"),
        (WRITTEN, (0,), "message X {}", "defines the message a.X, which the pinned schema does not define"),
        (WRITTEN, (0,), "message X", "is read with the pinned schema, which is not .proto text"),
        (WRITTEN, (1,), WRITTEN, "has no message with the indexes [1]"),
        ("message M { map<string, N> m = 1; }", (0,), None, "has a map with a type that it does not define: M.m"),
        ("message M { map<double, M> m = 1; }", (0,), None, "has a map with a type that it does not define: M.m"),
        ("message M { repeated M a = 1; oneof o { L l = 2; } } message L { map<M, M> m = 1; }", (0,), None, "has a map"),
    ],
)  # fmt: skip
def test_schemas_that_are_refused(schema, indexes, pinned, said):
    with pytest.raises(SchemaRefused) as refused:
        protobuf_content(schema, indexes, pinned, ())
    assert str(refused.value).startswith(said)


def test_a_map_of_an_unknown_type_elsewhere_does_not_matter():
    assert content_of("message A { optional int32 n = 1; } message B { map<int32, N> m = 1; }", "0801") == canonical(
        {1: 1}, "A"
    )


FIELDS = ("int32 f = 1;", "M m = 2;", "repeated M all = 3;", "map<string, M> by = 4;", "map<int32, M> at = 5;")


@pytest.mark.parametrize(
    ("exclude", "value", "expected"),
    [
        (["f"], "0801" + "1200", {2: {}}),
        (["nothing", "f.n", "m.nothing", "m[0]", "all.n", "[0]", "by[0]", "at.x", "at[1]"], "0801", {1: 1}),
        (["m.s"], "120512017a2805", {2: {5: 5}}),
        (["m.s"], "120312017a", {2: {}}),
        (["m.m.m.s"], "12090a070a0512017a2805", {2: {1: {1: {5: 5}}}}),  # along a message that contains itself
        (["m"], "1200", {}),
        (["all[0]"], "1a022801" + "1a022802", {3: [object_of({5: 2})]}),
        (["all[1].n", "all[0]"], "1a022801" + "1a022802", {3: [{}]}),
        (["all[0]", "all[1]", "all[7]"], "1a022801" + "1a022802", {}),
        (["by.a"], "22030a0161" + "22030a0162", {4: {text_key("b"): {}}}),
        (["by.a", "by.b"], "22030a0161" + "22030a0162", {}),  # an empty map is no member
        (["by.a.n", "by.c"], "22070a016112022801", {4: {text_key("a"): {}}}),
        (["by.a.all[0]"], "22090a016112041a022801", {4: {text_key("a"): {}}}),
        (["by", "by.a"], "22030a0161", {}),
        (["at.1", 'at["1"]'], "2a020801", {5: {scalar_key(1): {}}}),  # a map's key of another type has no name
        (["at"], "2a020801", {}),
        (["m"], "5001", {10: [TypedValue("wire 0", 1)]}),
    ],
)  # fmt: skip
def test_excluded_members(exclude, value, expected):
    found = content_of(schema_of(*FIELDS), value, exclude=exclude)
    entries = {number: each for number, each in expected.items() if number in {4, 5}}
    members = object_of({number: each for number, each in expected.items() if number not in entries})
    assert found == of_type(members | {scalar_key(number): each for number, each in entries.items()})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("f", True), ("m", True), ("m.s", True), ("m.m.m.s", True), ("all", True), ("all[0]", True), ("all[9].n", True),
        ("by", True), ("by.a", True), ("by.a.n", True), ("by.a.all[0].by.b", True), ("at", True), ("many[0].k", True),
        ("one", True), ("one.n", True), ("odd", True),
        ("nothing", False), ("f.n", False), ("f[0]", False), ("m.nothing", False), ("m[0]", False), ("all.n", False),
        ("all[0].nothing", False), ("by[0]", False), ("by.a.nothing", False), ("at.x", False), ("at[1]", False),
        ("[0]", False), ("one.k", False), ("One", False), ("many.k", False), ("odd.x", False), ("all[0][0]", False),
    ],
)  # fmt: skip
def test_whether_a_path_leads_to_something_that_can_be_left_out(path, expected):
    schema = (
        'syntax = "proto2"; message R { optional int32 f = 1; optional M m = 2; repeated M all = 3; map<string, M> by = 4; '
        "map<int32, M> at = 5; optional group One = 6 { optional int32 n = 1; } map<string, Gone> odd = 8; "
        "repeated group Many = 7 { optional int32 k = 1; } } "
        "message M { optional M m = 1; optional string s = 2; repeated M all = 3; map<string, M> by = 4; optional int32 n = 5; }"
    )
    message, other = parse_proto(schema).nested
    assert has_member(message, parse_path(path)) is expected
    assert not has_member(other, ("f", *parse_path(path)))


def test_groups_are_excluded_by_their_names():
    schema = schema_of("repeated group Many = 3 { optional int32 n = 1; optional int32 k = 2; }", syntax="proto2")
    schema = schema.replace("message R {", "message R { optional group One = 1 { optional int32 n = 1; }")
    value = "0b08010c" + "1b080110021c"
    assert content_of(schema, value, exclude=["one.n", "many[0].k"]) == canonical({1: {}, 3: [object_of({1: 1})]})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("08", "it ends inside a number (byte 1)"),
        ("080180", "it ends inside a number (byte 2)"),
        ("12036162", "it ends inside a field of 3 bytes (byte 2)"),
        ("22036162", "it ends inside a field of 3 bytes (byte 2)"),
        ("2a030102", "it ends inside a field of 3 bytes (byte 2)"),
        ("2a0180", "it ends inside a number (byte 2)"),  # an element goes on behind the packed elements
        ("2a018001", "it ends inside a number (byte 2)"),
        ("32050d010000", "it ends inside a field of 5 bytes (byte 2)"),
        ("2203150100", "it ends inside a field of 4 bytes (byte 3)"),
        ("08" + "ff" * 9 + "02", "a number has more than 64 bits (byte 11)"),
        ("0001", "a field has the number 0 (before byte 1)"),
        ("2200" + "16", "a field has the wire type 6 (before byte 3)"),
        ("14", "a group ends that did not begin (before byte 1)"),
        ("220114", "a group ends that did not begin (before byte 3)"),
        ("530801", "it ends inside a number (byte 3)"),
        ("535c", "a group ends that did not begin (before byte 2)"),
        ("0a00", "field 1 has another wire type than in the schema (before byte 1)"),
        ("1001", "field 2 has another wire type than in the schema (before byte 1)"),
        ("2001", "field 4 has another wire type than in the schema (before byte 1)"),
        ("23" + "24", "field 4 has another wire type than in the schema (before byte 1)"),
        ("2d01000000", "field 5 has another wire type than in the schema (before byte 1)"),
        ("30" + "01", "field 6 has another wire type than in the schema (before byte 1)"),
        ("3801", "field 7 has another wire type than in the schema (before byte 1)"),
        ("32020a00", "field 1 has another wire type than in the schema (before byte 3)"),
        ("22020a01" + "22", "it ends inside a field of 1 bytes (byte 4)"),
        ("4b0801", "it ends inside a number (byte 3)"),
    ],
)
def test_a_damaged_value_has_a_reason(value, said):
    schema = (
        'syntax = "proto2"; message M { optional M m = 1; } message R { optional int64 f = 1; optional string s = 2; '
        "optional M m = 4; repeated int32 l = 5; map<int32, int32> by = 6; repeated string t = 7; "
        "optional group G = 9 { optional int32 n = 1; } }"
    )
    for pinned in (None, schema):
        with pytest.raises(Unreadable) as unreadable:
            content_of(schema, value, indexes=(1,), exclude=["f", "m", "l", "by", "t"], pinned=pinned)
        assert unreadable.value.code == "not_protobuf"
        assert str(unreadable.value).startswith(f"the value is not a message of the schema: {said}")


def test_a_text_that_is_not_utf8_is_refused_even_if_another_follows():
    for field, value in (
        ("string f = 1;", "0a01ff" + "0a0161"),
        ("repeated string f = 1;", "0a01ff"),
        ("map<string, bool> f = 1;", "0a030a01ff"),
        ("oneof o { string f = 1; int32 g = 2; }", "0a01ff1001"),
    ):
        with pytest.raises(Unreadable, match="a string of the value is not UTF-8") as unreadable:
            content_of(schema_of(field), value, exclude=["f"])
        assert unreadable.value.code == "not_utf8"


def test_a_value_of_another_format_is_named():
    with pytest.raises(Unreadable, match="it looks like JSON"):
        protobuf_content(schema_of("int32 f = 15;"), (0,), None, ())(b'{"a": 1}')
    with pytest.raises(Unreadable, match="it begins with"):
        protobuf_content(schema_of("int32 f = 1;"), (0,), None, ())(b"\0\0\0\0\x2a\x08\x01")


def nested(depth, tag, value=b""):
    """Return a value inside messages or groups within each other."""
    for _ in range(depth):
        value = sized(tag, value) if tag & 7 == 2 else bytes([tag]) + value + bytes([tag + 1])
    return value


def test_depth_is_limited():
    old = 'syntax = "proto2"; message M { optional group G = 1 { optional M m = 1; } optional M m = 2; }'
    less, entry = b"", b""
    for _ in range(MAX_DEPTH // 2):
        less, entry = entry, sized(0x22, sized(0x12, entry))
    new = (
        schema_of("M m = 1;").replace("message R", "message Q")
        + "message R { R r = 1; repeated R all = 3; map<int32, R> by = 4; }"
    )
    for schema, indexes, good, bad in (
        (new, (2,), nested(MAX_DEPTH - 1, 0x0A), nested(MAX_DEPTH, 0x0A)),
        (new, (2,), nested(MAX_DEPTH // 2 - 1, 0x1A), nested(MAX_DEPTH // 2, 0x1A)),  # lists and messages
        (new, (2,), less, entry),  # maps and messages
        (old, (0,), nested(MAX_DEPTH - 1, 0x12), nested(MAX_DEPTH, 0x12)),
        (old, (0,), nested(MAX_GROUPS, 0x53), nested(MAX_GROUPS + 1, 0x53)),  # unknown groups, as `read` allows
    ):
        content = protobuf_content(schema, indexes, None, ())
        assert content(good) != content(b"")
        with pytest.raises(Unreadable, match="levels deep") as unreadable:
            content(bad)
        assert unreadable.value.code == "too_deep"


def test_a_chain_of_many_types_is_read():
    """No type is nested, but each is the type of a field of the one before it."""
    types = 5_000
    text = "".join(f"message M{at} {{ M{at + 1} m = 1; }}" for at in range(types)) + f"message M{types} {{}}"
    assert content_of(f'syntax = "proto3"; {text}', "0a020a00") == canonical({1: {1: {}}}, "M0")


def operations(content, value):
    """Return the number of function calls that reading a value takes."""
    count = 0

    def counted(_frame, event, _argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(counted)
    try:
        content(value)
    finally:
        sys.setprofile(None)
    return count


GROUPS = 90
COSTLY = (
    'syntax = "proto2"; message R { optional R r = 1; optional int32 n = 2; repeated int32 l = 3; repeated R all = 4; '
    "oneof o { int32 a = 5; R b = 6; } map<int32, int32> by = 7; "
    + "".join(f"optional group G{at} = 8 {{ " for at in range(GROUPS))
    + "optional int32 n = 2; "
    + "} " * GROUPS
    + "oneof many { "
    + " ".join(f"int32 x{number} = {number};" for number in range(100, 1100))
    + " } }"
)


def in_all(tag):
    """Return a function that makes fields inside messages or groups within each other."""
    return lambda count: nested(GROUPS, tag, b"\x10\x05" * count)


def each_number(first, most):
    return lambda count: b"".join(leb((first + at % most) << 3) + b"\1" for at in range(count))


HOSTILE = {
    "elements": lambda count: b"\x18\x05" * count,
    "packed elements": lambda count: sized(0x1A, b"\x05" * count),
    "elements that are packed alone": lambda count: b"\x1a\x01\x05" * count,
    "elements without fields": lambda count: b"\x22\x00" * count,
    "a message in many parts": lambda count: b"\x0a\x00" * count,
    "a message that grows": lambda count: b"\x0a\x04\x22\x02\x10\x01" * count,
    "a deep message in many parts": lambda count: nested(GROUPS, 0x0A) * (count // GROUPS),
    "a deep message with many fields": in_all(0x0A),
    "a deep group with many fields": in_all(0x43),
    "unknown groups around many fields": in_all(0x53),
    "many unknown groups": lambda count: b"\x53\x54" * count,
    "members of a oneof in turn": lambda count: b"\x28\x01\x32\x00" * count,
    "many members of a oneof in turn": each_number(100, 1000),
    "entries": lambda count: b"".join(sized(0x3A, b"\x08" + leb(at)) for at in range(count)),
    "an entry again and again": lambda count: b"\x3a\x02\x08\x01" * count,
    "unknown fields": lambda count: b"\x50\x01" * count,
    "unknown fields of many numbers": each_number(2000, 1 << 28),
    "a field again and again": lambda count: b"\x10\x05\x10\x00" * count,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_cost_grows_as_the_size_does(name):
    content = protobuf_content(COSTLY, (0,), None, ())
    few, many = (HOSTILE[name](count) for count in (1_800, 18_000))
    assert 8 < len(many) / len(few) < 12
    assert operations(content, many) < 11 * operations(content, few)


def test_a_large_hostile_value_takes_few_calls_per_byte():
    content = protobuf_content(COSTLY, (0,), None, ())
    value = b"\x28\x01\x32\x00" * 10_000 + b"\x1a\x01\x05" * 20_000 + in_all(0x0A)(50_000) + b"\x22\x00" * 30_000
    assert len(value) > 250_000
    assert operations(content, value) < 20 * len(value)
