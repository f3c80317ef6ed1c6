"""A topology that reads Protobuf: what is refused, with its place; what is warned of; what it means for its state."""

from __future__ import annotations

import pytest

from dedup.core.event_time import FieldTime
from dedup.core.framing import SchemaBook
from dedup.core.tracking_id import SchemaFile
from dedup.errors import SettingsError, TopologyError
from dedup.topology.describe import describe
from dedup.topology.lint import lint, schema_findings
from dedup.topology.model import Topology, extractor_of
from dedup.topology.parse import parse

ORDER = """syntax = "proto3"; import "google/protobuf/timestamp.proto"; import "google/protobuf/wrappers.proto";
message Order { string id = 1; double total = 2; repeated string lines = 3; google.protobuf.Timestamp at = 4;
  google.protobuf.Int64Value number = 5; Inner inner = 6; map<string, string> tags = 7; Kind kind = 8; }
message Inner { bytes id = 1; int64 n = 2; }
enum Kind { NONE = 0; }
"""
FILES = {"o.proto": ORDER, "bad.proto": "message M {", "import.proto": 'import "x.proto"; message M { X x = 1; }'}
IN_FILE = "schema_id: none, schema: o.proto"


def read(name: str) -> str:
    if name not in FILES:
        raise FileNotFoundError(2, "No such file or directory")
    return FILES[name]


def text_of(rule: str = "field: id", more: str = "", source: str = IN_FILE) -> str:
    source = f"{{topics: [c], format: protobuf, {source}}}"
    return f"dedup: 1\nname: t\nsource: {source}\ntracking_id: {{{rule}}}\nguard_period: 1h\n{more}\n"


def topology(*given: str, **named: str) -> Topology:
    return parse(text_of(*given, **named), name="t.yaml", read_file=read)


def problems(*given: str, **named: str) -> list[str]:
    with pytest.raises(TopologyError) as refused:
        topology(*given, **named)
    return [str(each).removeprefix("t.yaml:") for each in refused.value.problems]


def test_what_it_becomes():
    made = topology("fields: [id, number, inner.n, kind]", "event_time: {field: at, unit: timestamp}")
    assert made.source.schema == SchemaFile("o.proto", ORDER)
    assert (made.source.format, made.source.framing) == ("protobuf", None)
    assert made.event_time == FieldTime(("at",), "timestamp")
    assert "read, protobuf of the schema o.proto, from earliest" in describe(made)
    value = b"\x0a\1a\x22\2\x08\1\x2a\0\x32\2\x10\7\x40\1"
    found = extractor_of(made)([None], [value], [[]], [0])
    assert (found.ids, found.times_ms, found.faults) == ([b"\x09\2\1a\2\4\0\2\4\7\2\4\1"], [1000], {})


def test_zero_as_a_value_is_part_of_what_an_id_is():
    made, without = topology("field: kind, zero: value"), topology("field: kind, zero: missing")
    found = [extractor_of(each)([None], [b"\x0a\1a"], [[]], [0]) for each in (made, without)]
    assert [each.ids for each in found] == [[b"\4\0"], [None]]
    assert "tracking ID   field: kind, 0 and empty are values" in describe(made)
    assert without.state_fingerprint({"c": 1}) == topology("field: kind").state_fingerprint({"c": 1})
    assert made.state_fingerprint({"c": 1}) != without.state_fingerprint({"c": 1})
    assert "zero_unused" in [each.code for each in lint(topology("key: true, zero: value"))]
    assert "zero_unused" not in [each.code for each in lint(made)]
    as_json = text_of("field: id, zero: value").replace(f"format: protobuf, {IN_FILE}", "format: json")
    with pytest.raises(TopologyError, match=r"tracking_id\.zero: needs `source\.format: protobuf`"):
        parse(as_json, name="t")


@pytest.mark.parametrize("rule", ["field: id", "key: true"])
@pytest.mark.parametrize(
    ("schema_id", "said"), [("auto", "header or prefix"), ("header", "header"), ("prefix", "prefix")]
)
def test_a_framing_names_the_schema(rule, schema_id, said):
    made = topology(rule, source=f"schema_id: {schema_id}")
    assert (made.source.names_schemas, made.source.framing, made.source.schema) == (True, schema_id, None)
    assert f"read, protobuf with the schema id in the {said}, from earliest" in describe(made)
    with pytest.raises(SettingsError, match="protobuf needs schemas of a schema registry, which is not known here"):
        extractor_of(made)
    assert not extractor_of(made.knowing(SchemaBook()))([], [], [], []).faults


def test_the_schemas_of_a_registry_are_checked():
    made = topology("fields: [id, total]", "event_time: {field: at, unit: ms}", "partitioned_by: tracking_id")
    found = list(schema_findings(made, ORDER, "c-value"))
    assert [(each.level, each.code, each.text) for each in found] == [
        ("error", "member_refused", "tracking_id: total has the type double in the schema c-value."),
        ("error", "member_refused", "event_time: at has the type google.protobuf.Timestamp in the schema c-value."),
    ]
    of_any = topology("fields: [n, id]", source="schema_id: prefix")
    assert list(schema_findings(of_any, ORDER, "c-value")) == []  # values may be any message of the file
    assert {each.code for each in schema_findings(of_any, "message M {}", "c-value")} == {"member_missing"}
    for schema in (FILES["bad.proto"], FILES["import.proto"], '{"type": "record"}'):
        assert {each.code for each in schema_findings(of_any, schema, "c-value")} == {"schema_refused"}
        assert {each.code for each in schema_findings(topology("key: true", source="start: latest"), schema, "c")} == {
            "schema_refused"
        }


@pytest.mark.parametrize(
    ("field", "unit"), [("at", "timestamp"), ("id", "rfc3339"), ("number", "s"), ("inner.n", "us")]
)
def test_units_that_fit(field, unit):
    made = topology(more=f"event_time: {{field: {field}, unit: {unit}}}")
    assert made.event_time == FieldTime(tuple(field.split(".")), unit)


WANTED = "an ID is a string, integer, boolean, enum, or bytes"
UNITS = "unit timestamp takes a google.protobuf.Timestamp, rfc3339 a string, and s, ms, and us a number"
KNOWN = "the valid names are at, id, inner, kind, lines, number, tags, total"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": "schema_id: none"}, "3:41: source.schema_id: none needs `source.schema`: the file with the schema of all values"),
        (
            {"source": "schema: o.proto"},
            "3:41: source.schema: needs `source.schema_id: none`; a schema registry has the schemas that the framings of values name",
        ),
        (
            {"source": "schema_id: none, schema: bad.proto"},
            '3:66: source.schema: "bad.proto" is not .proto text: a word is missing (line 1); correct the schema',
        ),
        (
            {"source": "schema_id: none, schema: import.proto"},
            '3:66: source.schema: "import.proto" uses a type that it does not define: X (of other files, only Any, Duration, Empty, FieldMask, Struct, Timestamp, and wrappers are known) (line 1); correct the schema',
        ),
        ({"rule": "field: idd"}, '4:22: tracking_id.field: "idd" is not in o.proto; did you mean "id"?'),
        ({"rule": "field: xyz"}, f'4:22: tracking_id.field: "xyz" is not in o.proto; {KNOWN}'),
        ({"rule": "field: n"}, f'4:22: tracking_id.field: "n" is not in o.proto; {KNOWN}'),
        ({"rule": "field: inner.m"}, '4:22: tracking_id.field: "inner.m" is not in o.proto; the valid names are id, n'),
        ({"rule": "field: total"}, f'4:22: tracking_id.field: "total" has the type double in o.proto; {WANTED}'),
        ({"rule": "field: inner"}, f'4:22: tracking_id.field: "inner" has the type message in o.proto; {WANTED}'),
        ({"rule": "field: tags"}, f'4:22: tracking_id.field: "tags" has the type map in o.proto; {WANTED}'),
        ({"rule": "field: 'lines[0]'"}, f'4:22: tracking_id.field: "lines[0]" has the type repeated in o.proto; {WANTED}'),
        ({"rule": "field: at"}, f'4:22: tracking_id.field: "at" has the type google.protobuf.Timestamp in o.proto; {WANTED}'),
        ({"more": "event_time: {field: kind, unit: ms}"}, f'6:21: event_time.field: "kind" has the type enum in o.proto; {UNITS}'),
        ({"more": "event_time: {field: number, unit: timestamp}"}, f'6:21: event_time.field: "number" has the type int64 in o.proto; {UNITS}'),
        ({"rule": "content: {exclude: [id, inner.m]}"}, '4:39: tracking_id.content.exclude[1]: "inner.m" is not in o.proto; the valid names are id, n'),
        ({"rule": "first_of: [{key: true}, {content: {schema: bad.proto}}]"}, '4:58: tracking_id.first_of[1].content.schema: "bad.proto" is not .proto text: a word is missing (line 1); correct the schema'),
        (
            {"more": "sink: {url: 'sqlite:///x', table: t, columns: {a: idd}}"},
            '6:51: sink.columns.a: "idd" is not in o.proto; did you mean "id"?',
        ),
    ],
)  # fmt: skip
def test_a_mistake_has_its_place(given, said):
    assert said in problems(**given)


def test_bytes_are_compared_and_that_is_a_warning():
    assert "payload_bytes_compared" in [each.code for each in lint(topology(more="output: {topic: o}\nconflicts: x"))]
    assert "bytes_compared" in [each.code for each in lint(topology("content: true"))]


def test_state_stays_good_but_for_payloads():
    as_json = text_of().replace(f"format: protobuf, {IN_FILE}", "format: json")
    assert topology().state_fingerprint({"c": 1}) == parse(as_json, name="t").state_fingerprint({"c": 1})
    compared = topology(more="output: {topic: o}\nconflicts: x")
    as_json = text_of(more="output: {topic: o}\nconflicts: x").replace(f"format: protobuf, {IN_FILE}", "format: json")
    assert '"payloads":"protobuf bytes"' in compared.state_identity({"c": 1})
    assert parse(as_json, name="t").state_identity({"c": 1}) != compared.state_identity({"c": 1})
