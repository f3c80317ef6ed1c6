"""The parser of .proto text against protoc, and what it refuses."""

from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import grpc_tools
import pytest

from dedup.core import proto_schema
from dedup.core.framing import LinkedSchema, SchemaRefused
from dedup.core.proto_schema import MAX_DEPTH, Field, Message, parse_proto
from tests.protoc import described

TEXT = """
/* A file as a registry has it. */ // and more
syntax = "proto3";
package shop.v1;
import public "google/protobuf/timestamp.proto";
import 'google/protobuf/wrappers.proto';
import "google/protobuf/struct.proto";
import "google/protobuf/descriptor.proto";
option java_package = "a.b" "c";
option (mine) = { deep: { text: "}" list: [1, 2] } text: "x\\"}" };
extend google.protobuf.FileOptions { string mine = 50000; }
enum Color { option allow_alias = true; RED = 0 [deprecated = true]; ROT = 0; BLUE = -1; reserved 5 to 7; }
message Order {
  reserved 100 to max; reserved "old", 'older';
  option deprecated = false;
  string id = 1 [json_name = "ID", (tag) = {a: [{b: "]"}]}];
  .shop.v1.Order.Line line = 0x2;
  repeated Line lines = 03;
  map<string, Order> others = 4 [deprecated = true];
  optional int64 number = 5;
  oneof kind { option (one) = 1; Color color = 6; Line other = 7; bytes raw = 8 [deprecated = true]; }
  google.protobuf.Timestamp at = 9;
  protobuf.Int64Value count = 10;
  google.protobuf.Struct rest = 11;
  shop.v1.Color tint = 12;
  v1.Color hue = 13;
  message Line { Order order = 1; message Line { sint32 deep = 1; } Line line = 2; enum Color { NONE = 0; } Color color = 3; };
  sfixed64 message_id = 14; double option_value = 15; bool oneof_kind = 16; float reserved_at = 17;
  string map = 18; string group_name = 19; Line syntax = 20; fixed32 package = 21;
}
message Empty {}
service Orders { option deprecated = true; rpc Get(Order) returns (stream Order) { option idempotency_level = IDEMPOTENT; } }
;
""".replace("protobuf.Int64Value count", "google.protobuf.Int64Value count")
OLD = """
package a.b.c;
message Order {
  required group Line = 1 { optional string id = 1; repeated group Part = 2 { required int32 n = 1; } }
  optional int32 n = 2 [default = -5];
  optional string text = 3 [default = "a;}"];
  optional double d = 4 [default = inf];
  extensions 100 to 199, 300 [verification = UNVERIFIED];
  oneof one { int32 o = 5; group Other = 6 { optional int32 p = 1; } }
  extend Order { optional string extra = 100; optional group More = 101 { optional int32 m = 1; } }
  map<int32, b.c.Order> m = 7;
}
extend Order { repeated group Far = 102 { optional Order order = 1; } optional Last last = 103; }
message Last { optional c.Order.Line line = 1; optional Far far = 2; optional Order.Other other = 3; }
"""
KINDS = [
    "double",
    "float",
    "int64",
    "uint64",
    "int32",
    "fixed64",
    "fixed32",
    "bool",
    "string",
    "group",
    "message",
    "bytes",
    "uint32",
    "enum",
    "sfixed32",
    "sfixed64",
    "sint32",
    "sint64",
]


def same(message: Message, found: object) -> None:
    """Compare a message with what protoc says of it."""
    assert list(message.fields) == [each.name for each in found.field]
    entries = {each.name: each for each in found.nested_type if each.options.map_entry}
    for each in found.field:
        mine = message.fields[each.name]
        repeated = each.label == each.LABEL_REPEATED
        kind = KINDS[each.type - 1]
        if repeated:
            kind = "map" if each.type_name.rpartition(".")[2] in entries else "repeated"
        oneof = found.oneof_decl[each.oneof_index].name if each.HasField("oneof_index") else ""
        assert (mine.number, mine.kind) == (
            each.number,
            "group" if each.type == each.TYPE_GROUP and not repeated else kind,
        )
        assert mine.oneof == ("" if each.proto3_optional else oneof)
        if kind == "message":
            assert mine.message.name == each.type_name[1:]
        same_item(mine, each, entries)
    nested = [None if each.options.map_entry else each for each in found.nested_type]
    assert [each and each.name.rpartition(".")[2] for each in message.nested] == [each and each.name for each in nested]
    for mine, each in zip(message.nested, nested, strict=True):
        if mine is not None:
            same(mine, each)


def same_item(mine: Field, found: object, entries: Mapping[str, object]) -> None:
    """Compare what a repeated field, a map, or a group consists of with what protoc says of it."""
    match mine.kind:
        case "map":
            assert mine.item.kind == "message"
            ours = list(mine.item.message.fields.values())
            for each, theirs in zip(ours, entries[found.type_name.rpartition(".")[2]].field, strict=True):
                same_type(each, theirs)
        case "repeated":
            same_type(mine.item, found)
        case "group":
            same_type(mine, found)
        case _:
            assert mine.item is None


def same_type(mine: Field, found: object) -> None:
    assert (mine.number, mine.kind) == (found.number, KINDS[found.type - 1])
    message = mine.item.message if mine.kind == "group" else mine.message
    assert (message.name if message is not None else "") == (
        found.type_name[1:] if mine.kind in {"message", "group"} else ""
    )


def as_protoc_says(text: str) -> None:
    file = described(text).file[-1]
    encoded = b64encode(file.SerializeToString()).decode()  # as some registries return it
    for each in (text, encoded):
        same(parse_proto(each), SimpleNamespace(field=[], oneof_decl=[], nested_type=file.message_type))
    assert shape(parse_proto(text)) == shape(parse_proto(encoded))


def shape(message: Message | None) -> object:
    """Return all that is known of a message, without the messages of its fields."""
    if message is None:
        return None
    fields = {name: shape_of(each) for name, each in message.fields.items()}
    return message.name, fields, [shape(each) for each in message.nested]


def shape_of(each: Field) -> tuple[object, ...]:
    item = None if each.item is None else shape_of(each.item)
    if each.kind == "map":
        item = [shape_of(part) for part in each.item.message.fields.values()]
    return each.number, each.type_name, each.has_presence, each.oneof, each.message and each.message.name, item


def test_a_file_means_what_protoc_says():
    lean = TEXT
    for line in (
        'option (mine) = { deep: { text: "}" list: [1, 2] } text: "x\\"}" };',
        ', (tag) = {a: [{b: "]"}]}',
        "option (one) = 1; ",
    ):
        assert line in lean
        lean = lean.replace(line, "")
    lean = lean.replace('"a.b" "c"', '"a.b"')
    as_protoc_says(lean)
    assert shape(parse_proto(TEXT)) == shape(parse_proto(lean))  # options that protoc does not know mean nothing
    order = parse_proto(TEXT).nested[0]
    assert [name for name, each in order.fields.items() if each.has_presence] == [
        *("line", "number", "color", "other", "raw", "at", "count", "rest", "syntax")
    ]
    assert (order.fields["at"].type_name, order.fields["count"].type_name) == ("google.protobuf.Timestamp", "int64")


def test_a_file_of_proto2_means_what_protoc_says():
    as_protoc_says('syntax = "proto2";' + OLD)
    as_protoc_says(OLD)
    fields = parse_proto(OLD).nested[0].fields
    assert all(each.has_presence for each in fields.values() if each.kind not in {"map", "repeated"})


@pytest.mark.parametrize(
    "name", ["any", "duration", "empty", "field_mask", "timestamp", "wrappers", "struct", "descriptor"]
)
def test_the_well_known_files_mean_what_protoc_says(name):
    text = (Path(grpc_tools.__file__).parent / "_proto" / "google" / "protobuf" / f"{name}.proto").read_text()
    as_protoc_says(text.replace("package google.protobuf;", "package other;"))
    if name == "descriptor":
        return
    known = parse_proto(
        'syntax = "proto3"; message M {'
        + "".join(
            f"google.protobuf.{each.name} f{at} = {at + 1};"
            for at, each in enumerate(described(text).file[-1].message_type)
        )
        + "}"
    ).nested[0]
    for field, each in zip(known.fields.values(), described(text).file[-1].message_type, strict=True):
        same(field.message, each)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "defines no message"),
        ("enum E { A = 0; }", "defines no message"),
        ('{"type": "record"}', "is not .proto text (line 1)"),
        ("\n\nmessage M { string é = 1; }", "is not .proto text (line 3)"),
        ("message M { /* ", "is not .proto text (line 1)"),
        ('edition = "2023"; message M {}', "has an edition, and only proto2 and proto3 are supported (line 1)"),
        ('syntax = "proto4"; message M {}', "has a syntax other than proto2 and proto3 (line 1)"),
        ("message M { string a = 1; ", "is not .proto text: a word is missing (line 1)"),
        ("message M { string a 1; }", 'is not .proto text: "=" is missing'),
        ("message M { string a = x; }", "is not .proto text: a number is missing"),
        ("message M { string a = 0; }", "has a field without a name, or whose number is not 1 to 536,870,911"),
        ("message M { string a = 536870912; }", "has a field without a name, or whose number is not 1 to 536,870,911"),
        ("message M { string a = 09; }", "has a field without a name, or whose number is not 1 to 536,870,911"),
        ("message M { string a = 1.5; }", "has a field without a name, or whose number is not 1 to 536,870,911"),
        ("message M { string a = 1; string a = 2; }", "has two fields with the name or the number of M.a"),
        ("message M { string a = 1; string b = 1; }", "has two fields with the name or the number of M.b"),
        ("message M {} enum M { A = 0; }", "defines M twice"),
        ("message M { Other o = 1; }", "uses a type that it does not define: Other (of other files, only Any, Duration, Empty, FieldMask, Struct, Timestamp, and wrappers are known)"),
        ("import 'o.proto'; message M { a.Other o = 1; }", "uses a type that it does not define: a.Other"),
        ("message M { .M.N o = 1; }", "uses a type that it does not define: .M.N"),
        ("message M { repeated N o = 1; }", "uses a type that it does not define: N"),
        ("package google.protobuf; message M {}", "has the package google.protobuf, whose types are known"),
        ("message M { option a = [1}; }", "is not .proto text: brackets do not match"),
        ("message M { option a = }; }", "is not .proto text: brackets do not match"),
        ("message M " + "{ message N " * (MAX_DEPTH + 1), f"is nested more than {MAX_DEPTH} levels deep"),
        ("message M { // " + "x" * (1 << 20), "has 1,048,591 characters, more than 1,048,576"),
    ],
)  # fmt: skip
def test_what_is_refused(text, said):
    with pytest.raises(SchemaRefused) as refused:
        parse_proto(text)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    "data",
    [
        b"abc", b"\x22\x05abc", b"\x22\x02\x0a\x00\x80", b"\x22\x02\x12\x00", b"\x22\x04\x12\x02\x28\x63", b"\x23\x24",
        b"\x22\x07\x12\x05\x18\x01\x28\x05\x4a", b"\x20\x07", b"\x12\x01\xff",
        b"\x22\x0a\x0a\x01M\x12\x05\x18\x01\x28\x05\x48\x03",
    ],
)  # fmt: skip
def test_a_damaged_descriptor_is_refused(data):
    text = b64encode(data).decode()
    with pytest.raises(SchemaRefused):
        parse_proto(text)


def test_descriptors_are_bounded():
    data = b""
    for _ in range(MAX_DEPTH + 2):
        head, size = bytearray(b"\x1a"), len(data) + 3
        while size > 0x7F:
            head.append(size & 0x7F | 0x80)
            size >>= 7
        data = bytes([*head, size]) + b"\x0a\x01M" + data
    assert "nested more than" in refusal(b64encode(b"\x22" + data[1:]).decode())
    assert refusal(b64encode(b"\x22\x03\x0a\x01M\x62\x08editions").decode()).startswith("has an edition")


def refusal(text):
    with pytest.raises(SchemaRefused) as refused:
        parse_proto(text)
    return str(refused.value)


def test_a_type_may_have_the_name_of_a_kind_of_field():
    as_protoc_says('syntax = "proto3"; message A { map m = 1; } message map { string id = 1; }')


def test_a_map_may_have_a_type_of_a_file_that_is_not_known():
    """Readers by path skip maps, so such a schema is not refused."""
    fields = (
        parse_proto("message M { map<int32, N> m = 1; map<double, M> d = 2; map<string, M> good = 3; }")
        .nested[0]
        .fields
    )
    assert [each.item is None for each in fields.values()] == [True, True, False]
    assert [each.kind for each in fields.values()] == ["map"] * 3
    text = "message M { repeated group G = 1 { optional int32 n = 1; } map<int32, M> m = 2; }"
    file = described(f'syntax = "proto2"; {text}').file[-1]
    file.message_type[0].nested_type[1].field[1].type_name = ".Gone"
    fields = parse_proto(b64encode(file.SerializeToString()).decode()).nested[0].fields
    assert (fields["m"].item, fields["g"].item.item.message.name) == (None, "M.G")


def test_a_message_after_a_group_is_named_by_no_index():
    # Python counts the type of a group among the nested messages, and Java does not.
    text = 'syntax = "proto2"; message A { optional group G = 1 { } message B { } message C { } }'
    for each in (text, b64encode(described(text).file[-1].SerializeToString()).decode()):
        nested = parse_proto(each).nested[0]
        assert [nested.nested_at(index) for index in range(2)] == [None, None]
        assert nested.nested_at(2).name == "A.C"


def test_a_file_may_begin_with_a_byte_order_mark():
    assert shape(parse_proto("\ufeff" + TEXT)) == shape(parse_proto(TEXT))


def test_a_refused_text_is_parsed_once(monkeypatch):
    parsed = []
    real = proto_schema._parse
    monkeypatch.setattr(proto_schema, "_parse", lambda text: (parsed.append(text), real(text))[1])
    text = "message Refused { Elsewhere e = 1; }"
    said = {refusal(text) for _ in range(3)}
    assert (len(said), parsed) == (1, [text])


FILES = {
    "shop/ids.proto": """syntax = "proto3"; package shop.ids; enum Kind { NONE = 0; A = 1; }
        message Id { string text = 1; Kind kind = 2; message Part { int64 n = 1; } }""",
    "shop/people.proto": """syntax = "proto3"; package shop; import public "shop/ids.proto"; import weak "shop/old.proto";
        message Person { ids.Id id = 1; Old old = 2; oneof one { ids.Id.Part part = 3; } }""",
    "shop/old.proto": """package shop; message Old { required int32 n = 1; optional group G = 2 { optional int32 m = 1; } }""",
    "google/protobuf/timestamp.proto": "this text is not used",
}
IMPORTING = """syntax = "proto3"; package shop.orders; import "shop/people.proto"; import "google/protobuf/timestamp.proto";
    import "buf/validate.proto";
    message Order { Person buyer = 1; shop.ids.Id id = 2; shop.ids.Kind kind = 3; map<string, Person> others = 4;
      google.protobuf.Timestamp at = 5; repeated shop.Person all = 6; .shop.ids.Id.Part part = 7; }"""
OURS = ("shop/ids.proto", "shop/old.proto", "shop/people.proto", "google/protobuf/timestamp.proto")


def linked(text: str, *files: tuple[str, str]) -> LinkedSchema:
    return LinkedSchema(text, tuple(files))


@pytest.mark.parametrize("form", ["texts", "descriptors"])
def test_imported_files_are_those_that_the_schema_refers_to(form):
    """Java's serializer registers texts, and Python's serializer encoded descriptors."""
    texts = {name: FILES[name] for name in OURS[:3]}
    found = described(IMPORTING.replace('import "buf/validate.proto";', ""), texts).file
    main, files = IMPORTING, [(name, FILES[name]) for name in OURS]
    if form == "descriptors":
        encoded = {each.name: b64encode(each.SerializeToString()).decode() for each in found}
        main, files = encoded[found[-1].name], [(name, encoded[name]) for name in OURS[:3]]
    parsed = parse_proto(linked(main, *files))
    same(parsed, SimpleNamespace(field=[], oneof_decl=[], nested_type=found[-1].message_type))
    buyer = parsed.nested[0].fields["buyer"].message
    same(buyer, next(each for each in found if each.name == "shop/people.proto").message_type[0])
    assert buyer.fields["id"].message is parsed.nested[0].fields["id"].message
    assert buyer.fields["old"].message.fields["g"].kind == "group"


@pytest.mark.parametrize(
    ("main", "files", "said"),
    [
        (
            'import "a.proto"; message M { B b = 1; }',  # a.proto imports b.proto, but not publicly
            [("b.proto", "message B {}"), ("a.proto", 'import "b.proto"; message A { optional B b = 1; }')],
            "uses a type that it does not define: B (nor does a file that it both imports and refers to)",
        ),
        ("message M { optional A a = 1; }", [("a.proto", "message A {}")], "uses a type that it does not define: A"),
        ('import "a.proto"; message A {}', [("a.proto", "message A {}")], "defines A twice"),
        ('message A {} import "a.proto";', [("a.proto", "message A {}")], "has two types with the name A"),
        ("message M {}", [("a.proto", "message A {")], "refers to a.proto, which is not .proto text"),
        ("message M {}", [("é\n" * 64, "message")], "refers to \\xe9\\n"),
        ("message M {}", [("a.proto", "/" * (1 << 20))], "has 1,048,588 characters, more than 1,048,576"),
        (
            'import "google/protobuf/api.proto"; message M { optional google.protobuf.Api a = 1; }',
            [("google/protobuf/api.proto", "package google.protobuf; message Api {}")],
            "uses a type that it does not define: google.protobuf.Api",
        ),
    ],
)
def test_references_that_are_refused(main, files, said):
    with pytest.raises(SchemaRefused) as refused:
        parse_proto(linked(main, *files))
    assert str(refused.value).startswith(said)


def test_one_file_with_two_names_defines_its_types_once():
    twice = [("a.proto", "message A { optional int32 n = 1; }"), ("b.proto", "message A { optional int32 n = 1; }")]
    found = parse_proto(linked('import "a.proto"; import "b.proto"; message M { optional A a = 1; }', *twice))
    assert list(found.nested[0].fields["a"].message.fields) == ["n"]
    with pytest.raises(SchemaRefused, match="refers to itself"):
        parse_proto(LinkedSchema("message M {}", fault="refers to itself"))
