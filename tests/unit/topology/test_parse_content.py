"""Content IDs and compared payloads in a topology file, and the schema files that it names with their imports."""

from __future__ import annotations

import pytest

from dedup.core.formats import text_of
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
    "r2.avsc": AVSC.replace('"R"', '"R2"'),
    "protos/sales/o.proto": PROTO,
    "protos/shop/money.proto": MONEY,
    "common.proto": COMMON,
    "circle.proto": 'import "circle.proto"; message M { int32 a = 1; }',
    "around.proto": 'import "circle.proto"; message N { int32 a = 1; }',
    "broken.proto": 'import "not.proto"; message N { Other a = 1; }',
    "not.proto": "message {",
}


def read(name: str) -> str:
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("circle.proto", "refers to circle.proto, which imports circle.proto, which imports itself, directly or not"),
        ("around.proto", "refers to circle.proto, which imports circle.proto, which imports itself, directly or not"),
        ("broken.proto", "refers to not.proto, which is not .proto text"),
    ],
)
def test_an_import_that_cannot_be_used_has_its_place(name, said):
    with pytest.raises(TopologyError) as refused:
        topology(f"format: protobuf, schema_id: none, schema: {name}", "field: a")
    (problem,) = refused.value.problems
    assert str(problem).startswith(f't.yaml:3:66: source.schema: "{name}" {said}')
    assert str(problem).endswith("; correct the schema")
