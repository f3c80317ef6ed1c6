"""Content IDs and compared payloads in a topology file, and the schema files that it names with their imports."""

from __future__ import annotations

import pytest

from dedup.core.formats import text_of
from dedup.core.framing import MOST_SCHEMA_CHARS, SchemaRefused
from dedup.core.proto_schema import parse_proto, read_schema
from dedup.core.tracking_id import ContentRule, FirstOfRule, KeyRule, SchemaFile
from dedup.errors import TopologyError
from dedup.topology.lint import lint, schema_findings
from dedup.topology.model import Topology
from dedup.topology.parse import parse

AVSC = '{"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}, {"name": "at", "type": "long"}]}'
PROTO = 'syntax = "proto3"; import "shop/money.proto"; message Order { string id = 1; shop.Money total = 2; }'
MONEY = 'syntax = "proto3"; package shop; import public "common.proto"; message Money { Currency unit = 1; }'
COMMON = 'syntax = "proto3"; import "google/api/annotations.proto"; enum Currency { EUR = 0; }'
FILES = {
    "r.avsc": AVSC,
    "r2.avsc": AVSC.replace("{", '{"doc": "",', 1),
    "other.avsc": AVSC.replace('"R"', '"Other"'),
    "new.avsc": AVSC.replace('{"name": "at"', '{"name": "new", "type": "long"}, {"name": "at"'),
    "bad.avsc": AVSC.replace('"at", "type": "long"', '"at", "type": "long", "default": "x"'),
    "lines.proto": 'syntax = "proto3"; message Order { repeated Line lines = 1; } message Line { int32 a = 1; int32 b = 2; }',
    "narrow.proto": 'syntax = "proto3"; message Order { int32 lines = 1; }',
    "protos/sales/o.proto": PROTO,
    "protos/shop/money.proto": MONEY,
    "common.proto": COMMON,
    "circle.proto": 'import "circle.proto"; message M { int32 a = 1; }',
    "this.proto": 'import "that.proto"; message This { int32 a = 1; }',
    "that.proto": 'import "this.proto"; message That { int32 a = 1; }',
    "not.proto": "message {",
    "text.proto": "# no tokens",
    "needs.proto": 'import "not.proto"; message Needs { Gone a = 1; }',
    "edition.proto": 'edition = "2023"; message Other { int32 a = 1; }',
    "buf/validate/validate.proto": 'syntax = "proto3"; package buf.validate; import "google/protobuf/descriptor.proto"; '
    "extend google.protobuf.FieldOptions { FieldRules field = 1159; } "
    "message FieldRules { google.protobuf.FieldDescriptorProto.Type type = 1; }",
    "long.proto": f"message Long {{}} // {'x' * MOST_SCHEMA_CHARS}",
    "half.proto": f"message Half {{}} // {'x' * (MOST_SCHEMA_CHARS // 2)}",
    "other_half.proto": f"message OtherHalf {{}} // {'x' * (MOST_SCHEMA_CHARS // 2)}",
    "google/protobuf/timestamp.proto": "package google.protobuf; message Timestamp { string s = 1; }",
    **{f"chain{at}.proto": f'import "chain{at + 1}.proto"; message Link{at} {{}}' for at in range(2000)},
}


def read(name: str) -> str:
    match name:
        case "directory.proto" | "protos/directory.proto":
            raise IsADirectoryError(21, "Is a directory")
        case "latin.proto":
            return b"\xe9".decode()
        case "common.proto/inner.proto":
            raise NotADirectoryError(20, "Not a directory")
    assert ".." not in name
    assert not name.startswith("/")
    assert "\0" not in name
    if name not in FILES:
        raise FileNotFoundError(2, "No such file or directory")
    return FILES[name]


def topology(source: str, rule: str = "content: {exclude: [at]}", more: str = "") -> Topology:
    text = f"dedup: 1\nname: t\nsource: {{topics: [c], {source}}}\ntracking_id: {{{rule}}}\nguard_period: 1h\n{more}\n"
    return parse(text, name="t.yaml", read_file=read)


def codes(made: Topology) -> set[str]:
    return {each.code for each in lint(made)}


def test_content_has_a_schema_of_its_own():
    made = topology(
        "format: avro", "first_of: [{key: true}, {content: {schema: r.avsc}}]", "conflicts: {schema: r.avsc}"
    )
    content = ContentRule((), SchemaFile("r.avsc", AVSC))
    assert made.tracking_id.rule == FirstOfRule((KeyRule(), content))
    assert made.compared == content
    assert "content_of_schemas" not in codes(made)
    assert "payload_bytes_compared" not in codes(made)


@pytest.mark.parametrize(
    ("source", "rule", "more"),
    [
        ("format: avro", "content: {exclude: [at]}", ""),
        ("format: protobuf", "field: id", "conflicts: {exclude: []}"),
        ("format: protobuf", "first_of: [{key: true}, {content: {exclude: []}}]", ""),
    ],
)
def test_content_of_several_schemas_is_a_warning(source, rule, more):
    assert "content_of_schemas" in codes(topology(source, rule, more))


@pytest.mark.parametrize(
    ("source", "rule", "more"),
    [
        ("format: avro, schema_id: none, schema: r.avsc", "content: {exclude: [at]}", ""),
        ("format: msgpack", "content: {exclude: [at]}", "conflicts: {exclude: [at, id]}"),
        ("format: json_schema", "content: {exclude: [at]}", ""),
        ("format: avro", "content: true", "conflicts: x"),
    ],
)
def test_one_schema_or_none_is_no_reason_to_warn(source, rule, more):
    assert "content_of_schemas" not in codes(topology(source, rule, more))


@pytest.mark.parametrize(
    ("source", "rule", "said"),
    [
        (
            "format: csv, columns: [id, at, a]",
            "content: {exclude: [id, at, a]}",
            "4:25: tracking_id.content.exclude: leaves",
        ),
        ("format: avro, schema_id: none, schema: r.avsc", "content: {exclude: [at, id]}", "4:25: tracking_id.content."),
        ("format: avro", "content: {exclude: [at, id], schema: r.avsc}", "4:25: tracking_id.content.exclude: leaves"),
    ],
)
def test_something_has_to_be_left_to_compare(source, rule, said):
    with pytest.raises(TopologyError) as refused:
        topology(source, rule)
    (problem,) = refused.value.problems
    assert str(problem).startswith(f"t.yaml:{said}")
    assert "leaves nothing to compare, because it names every member; keep at least one" in str(problem)


@pytest.mark.parametrize(
    ("fmt", "schema", "content", "said"),
    [
        ("avro", "r.avsc", "schema: other.avsc", "read with it: the value is of type record R, not record Other"),
        (
            "avro",
            "r.avsc",
            "schema: new.avsc",
            "read with it: R.new is missing, and has no default in the pinned schema",
        ),
        ("avro", "r.avsc", "schema: bad.avsc", "which has a default at R.at that is not of the field's type"),
        ("protobuf", "lines.proto", "schema: narrow.proto", "has the field Order.lines of type repeated"),
        ("protobuf", "lines.proto", "exclude: [lines.a]", '"lines.a" is not in lines.proto'),
    ],
)
def test_what_content_cannot_be_read_with_is_a_mistake(fmt, schema, content, said):
    with pytest.raises(TopologyError) as refused:
        topology(f"format: {fmt}, schema_id: none, schema: {schema}", f"content: {{{content}}}")
    (problem,) = refused.value.problems
    assert said in str(problem)
    if "schema:" in content:
        made = topology(f"format: {fmt}", f"content: {{{content}}}") if "bad" not in content else None
        found = (
            []
            if made is None
            else [each for each in schema_findings(made, FILES[schema], "x") if each.level == "error"]
        )
        assert made is None or [each.code for each in found] == ["schema_unresolvable"]


def test_an_element_of_a_repeated_field_can_be_left_out():
    source = "format: protobuf, schema_id: none, schema: lines.proto"
    assert topology(source, "content: {exclude: ['lines[0].a']}").tracking_id.rule == ContentRule((("lines", 0, "a"),))


def test_equal_content_may_have_different_bytes():
    assert "no_conflicts_possible" not in codes(topology("format: msgpack", more="conflicts: {}"))
    assert "no_conflicts_possible" in codes(topology("format: json", "content: {exclude: []}", "conflicts: {}"))


def test_what_the_state_of_content_depends_on():
    def identity(source: str, rule: str = "content: {exclude: [at]}", more: str = "") -> str:
        return topology(source, rule, more).state_identity({"c": 1})

    assert '"content":["cbor"]' in identity("format: cbor")
    assert '"content"' not in identity("format: json")
    row = identity("format: csv, columns: [id, at], delimiter: tab")
    assert '"content":["csv","tab","id","at"]' in row
    assert row != identity("format: csv, columns: [at, id], delimiter: tab")
    local = "format: avro, schema_id: none, schema: {}.avsc"
    assert identity(local.format("r")) != identity(local.format("r2"))
    pinned = "content: {schema: r.avsc}"
    assert identity(local.format("r"), pinned) == identity(local.format("r2"), pinned)
    one = identity("format: avro", "content: {exclude: [at], schema: r.avsc}")
    assert '"tracking_id":"content: {exclude: [at], schema: ' in one
    assert one != identity("format: avro", "content: {exclude: [at], schema: r2.avsc}")
    compared = identity("format: cbor", "field: id", "conflicts: {exclude: [at]}")
    assert '"payloads":"cbor content: {exclude: [at]}"' in compared
    assert '"payloads":"cbor content: {exclude: []}"' in identity(
        "format: cbor", "field: id", "conflicts: {exclude: []}"
    )
    assert '"payloads":"cbor bytes"' in identity("format: cbor", "field: id", "conflicts: {}")


def test_an_excluded_member_that_a_schema_of_the_registry_lacks_is_a_warning():
    made = topology("format: avro", "content: {exclude: [at, gone]}", "conflicts: {exclude: [id, lost]}")
    found = [f"{each.level}: {each.text}" for each in schema_findings(made, AVSC, "orders-value (version 2)")]
    assert found == [
        "warning: tracking_id.content.exclude: gone is not in the schema orders-value (version 2), so nothing is left out there.",
        "warning: conflicts.exclude: lost is not in the schema orders-value (version 2), so nothing is left out there.",
    ]


def test_a_proto_file_is_read_with_its_imports():
    made = topology(
        "format: protobuf, schema_id: none, schema: protos/sales/o.proto", "content: {exclude: [total.unit]}"
    )
    assert made.source.schema == SchemaFile(
        "protos/sales/o.proto", PROTO, (("common.proto", COMMON), ("shop/money.proto", MONEY))
    )
    assert text_of(made.source.schema).references == made.source.schema.imports


UNUSABLE = [
    ("circle.proto", "imports itself, directly or not"),
    ("not.proto", "is not .proto text: a name is missing (line 1)"),
    ("text.proto", "is not .proto text (line 1)"),
    ("edition.proto", "has an edition, and only proto2 and proto3 are supported (line 1)"),
    ("buf/validate/validate.proto", "uses a type that it does not define: google.protobuf.FieldDescriptorProto.Type"),
    ("directory.proto", "cannot be read: Is a directory"),
    ("latin.proto", "is not UTF-8 at byte 0"),
    ("long.proto", "is too large, or imported by too many files that import each other"),
    *((path, "has a path that is absolute, or that contains .. or a null character")
      for path in ("/etc/shadow", "../a.proto", "a/../../b.proto", "a\0b")),
]  # fmt: skip


def read_text(text: str) -> SchemaFile:
    return read_schema("main.proto", lambda name: text if name == "main.proto" else read(name))


@pytest.mark.parametrize(("path", "why"), UNUSABLE)
def test_an_import_that_cannot_be_used_is_left_out(path, why):
    text = f'syntax = "proto3"; import "common.proto"; import "{path}"; message N {{ Currency a = 1; }}'
    assert read_text(text).imports == (("common.proto", COMMON),)
    with pytest.raises(SchemaRefused) as refused:
        read_text(text.replace("a = 1;", "a = 1; Other b = 2;"))
    original, _, rest = str(refused.value).partition("; ")
    assert original == (
        "uses a type that it does not define: Other (nor does a file that it both imports and refers to) (line 1)"
    )
    assert rest.startswith(f"the import {path} could not be used: it {why}")


def test_an_import_that_is_not_found_is_not_named():
    for path in ("gone.proto", "common.proto/inner.proto"):
        with pytest.raises(SchemaRefused) as refused:
            parse_proto(text_of(read_text(f'import "{path}"; message N {{ optional Other a = 1; }}')))
        assert str(refused.value).endswith("are known) (line 1)")


def test_an_unusable_import_has_its_place_in_the_topology_file(monkeypatch):
    monkeypatch.setitem(FILES, "broken.proto", 'import "needs.proto"; message N { optional Needs a = 1; }')
    with pytest.raises(TopologyError) as refused:
        topology("format: protobuf, schema_id: none, schema: broken.proto", "field: a")
    (problem,) = refused.value.problems
    assert str(problem).startswith(
        't.yaml:3:66: source.schema: "broken.proto" uses a type that it does not define: Needs'
    )
    assert "; the import not.proto could not be used: it is not .proto text: a name is missing (line 1)" in str(problem)
    assert "; the import needs.proto could not be used: it uses a type that it does not define: Gone" in str(problem)
    assert str(problem).endswith("; correct the schema")


def test_an_error_names_few_imports():
    imports = "".join(f'import "/{at}.proto"; ' for at in range(100))
    with pytest.raises(SchemaRefused) as refused:
        read_text(f"{imports} message N {{ optional Other a = 1; }}")
    assert str(refused.value).count("the import /") == 3


def test_a_file_that_is_imported_in_a_circle_is_left_out():
    """Without it, the other files have all that they need."""
    assert parse_proto(text_of(read_text(FILES["circle.proto"]))).nested[0]
    text = 'import "this.proto"; import "that.proto"; message N { optional That a = 1; }'
    assert read_text(text).imports == (("that.proto", FILES["that.proto"]),)
    with pytest.raises(SchemaRefused, match=r"the import this\.proto could not be used: it imports itself"):
        read_text(text.replace("optional That", "optional This"))


def test_imports_that_nothing_needs_are_left_out():
    imports = 'import "half.proto"; import "other_half.proto"; import "google/protobuf/timestamp.proto"; '
    made = read_text(f"{imports} message N {{ optional Half a = 1; optional google.protobuf.Timestamp t = 2; }}")
    assert [name for name, _ in made.imports] == ["half.proto"]
    assert parse_proto(text_of(made)).nested[0].fields["t"].type_name == "google.protobuf.Timestamp"
    with pytest.raises(SchemaRefused, match="characters"):
        parse_proto(text_of(read_text(f"{imports} message N {{ optional Half a = 1; optional OtherHalf b = 2; }}")))


def test_a_file_with_two_names_defines_its_types_once(monkeypatch):
    monkeypatch.setitem(FILES, "copy.proto", COMMON)
    monkeypatch.setitem(
        FILES, "user.proto", 'import "copy.proto"; import "common.proto"; message U { Currency c = 1; }'
    )
    made = read_text('import "user.proto"; message N { optional U u = 1; }')
    assert [name for name, _ in made.imports] == ["copy.proto", "common.proto", "user.proto"]
    assert parse_proto(text_of(made)).nested[0]


def test_a_long_chain_of_imports_ends():
    assert read_text('import "chain0.proto"; message N { optional Link0 u = 1; }').imports == (
        ("chain0.proto", FILES["chain0.proto"]),
    )
