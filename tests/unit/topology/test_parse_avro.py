"""A topology that reads Avro: what is refused, with its place; what is warned of; what it means for its state."""

from __future__ import annotations

import json

import pytest

from dedup.core.event_time import FieldTime
from dedup.core.framing import SchemaBook
from dedup.core.tracking_id import SchemaFile
from dedup.errors import SettingsError, TopologyError
from dedup.topology.describe import describe
from dedup.topology.lint import lint, schema_findings
from dedup.topology.model import Topology, extractor_of
from dedup.topology.parse import parse

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "total", "type": "double"},
        {"name": "lines", "type": {"type": "array", "items": "string"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "number", "type": ["null", "long", "float"]},
    ],
}
FILES = {
    "o.avsc": json.dumps(ORDER),
    "bad.avsc": '{"type": "record"}',
    "text.avsc": '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "strnig"}]}',
}


def read(name: str) -> str:
    if name == "latin.avsc":
        return b"\xe9".decode()
    if name not in FILES:
        raise FileNotFoundError(2, "No such file or directory")
    return FILES[name]


def text_of(rule: str = "field: id", more: str = "", source: str = "schema_id: none, schema: o.avsc") -> str:
    return f"dedup: 1\nname: t\nsource: {{topics: [c], format: avro, {source}}}\ntracking_id: {{{rule}}}\nguard_period: 1h\n{more}\n"


def topology(*given: str, **named: str) -> Topology:
    return parse(text_of(*given, **named), name="t.yaml", read_file=read)


def problems(*given: str, **named: str) -> list[str]:
    with pytest.raises(TopologyError) as refused:
        topology(*given, **named)
    return [str(each).removeprefix("t.yaml:") for each in refused.value.problems]


def test_what_it_becomes():
    made = topology("fields: [id, number]", "event_time: {field: at, unit: timestamp}")
    assert made.source.schema == SchemaFile("o.avsc", FILES["o.avsc"])
    assert (made.source.format, made.source.framing) == ("avro", None)
    assert made.event_time == FieldTime(("at",), "timestamp")
    assert "read, avro of the schema o.avsc, from earliest" in describe(made)
    found = extractor_of(made)([None], [b"\x02a\0\0\0\0\0\0\0\0\0\xd0\x0f\0\2\x0e"], [[]], [0])
    assert (found.ids, found.times_ms, found.faults) == ([b"\x09\x02\x01a\x02\x04\x07"], [1], {})


def test_the_subjects_with_its_schemas():
    assert topology(source="schema_id: auto").source.subjects == ("c-value",)
    assert topology(source="subject: ':.shop:orders'").source.subjects == (":.shop:orders",)
    assert topology(source="subject: other").state_fingerprint({"c": 1}) == topology(
        source="schema_id: auto"
    ).state_fingerprint({"c": 1})


@pytest.mark.parametrize("rule", ["field: id", "key: true"])
@pytest.mark.parametrize(
    ("schema_id", "said"), [("auto", "header or prefix"), ("header", "header"), ("prefix", "prefix")]
)
def test_a_framing_names_the_schema(rule, schema_id, said):
    made = topology(rule, source=f"schema_id: {schema_id}")
    assert (made.source.names_schemas, made.source.framing, made.source.schema) == (True, schema_id, None)
    assert f"read, avro with the schema id in the {said}, from earliest" in describe(made)
    with pytest.raises(SettingsError, match="avro needs schemas of a schema registry, which is not known here"):
        extractor_of(made)
    assert not extractor_of(made.knowing(SchemaBook()))([], [], [], []).faults


def test_the_schemas_of_a_registry_are_checked():
    made = topology("fields: [id, number]", "event_time: {field: at, unit: ms}", "partitioned_by: tracking_id")
    found = list(schema_findings(made, FILES["o.avsc"], "c-value"))
    assert [(each.level, each.code, each.text, each.at) for each in found] == [
        (
            "warning",
            "type_sometimes_refused",
            "tracking_id: number may also have the type float, which makes a record a dead letter.",
            ("tracking_id", "fields", 1),
        ),
        (
            "error",
            "member_refused",
            "event_time: at has the type timestamp-micros in the schema c-value.",
            ("event_time", "field"),
        ),
    ]
    without = json.dumps({"type": "record", "name": "R", "fields": []})
    assert {each.code for each in schema_findings(made, without, "c-value")} == {"member_missing"}
    assert {each.code for each in schema_findings(made, "{}", "c-value")} == {"schema_refused"}


def test_a_finding_has_the_place_of_the_path_in_the_file():
    made = topology(
        "first_of: [{header: h}, {parts: [{key: true}, {field: gone}]}, {field: lines}]", source="start: latest"
    )
    found = list(schema_findings(made, FILES["o.avsc"], "c-value"))
    assert [(each.code, each.at) for each in found] == [
        ("alternative_missing", ("tracking_id", "first_of", 1, "parts", 1, "field")),
        ("member_refused", ("tracking_id", "first_of", 2, "field")),
    ]


def test_a_json_schema_of_a_registry_is_checked_as_far_as_it_goes():
    rule = "parts: [{field: lines}, {field: lines.x}, {field: total}]"
    source = "topics: [c], format: json_schema, schema_id: header, subject: c"
    text = text_of(rule, "event_time: {field: at, unit: ms}").replace(
        "topics: [c], format: avro, schema_id: none, schema: o.avsc", source
    )
    made = parse(text, name="t.yaml")
    assert made.source.subjects == ("c",)
    schema = {"properties": {"lines": {"type": "array"}, "at": {"type": "string"}}}
    found = list(schema_findings(made, json.dumps(schema), "c-value"))
    assert [(each.level, each.code, each.at) for each in found] == [
        ("error", "member_missing", ("tracking_id", "parts", 1, "field")),
        ("error", "member_refused", ("event_time", "field")),
    ]
    (refused,) = schema_findings(made, "message M {}", "c-value")
    assert (refused.level, refused.code, refused.at) == ("warning", "schema_refused", ("source", "format"))


@pytest.mark.parametrize(
    ("more", "unit"), [("at", "timestamp"), ("at", "us"), ("id", "rfc3339"), ("number", "s"), ("number", "ms")]
)
def test_units_that_fit(more, unit):
    assert topology(more=f"event_time: {{field: {more}, unit: {unit}}}").event_time == FieldTime((more,), unit)


WANTED = "an ID is a string, integer, decimal, boolean, enum, bytes, fixed, uuid, or timestamp"
NO_FILE = "needs `source.schema_id: none`; a schema registry has the schemas that the framings of values name"
UNITS = "unit timestamp takes a timestamp with a zone, rfc3339 a string, and s, ms, and us a number"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": "schema_id: none"}, "3:37: source.schema_id: none needs `source.schema`: the file with the schema of all values"),
        ({"source": "schema: o.avsc"}, f"3:37: source.schema: {NO_FILE}"),
        ({"source": "schema_id: prefix, schema: o.avsc"}, f"3:56: source.schema: {NO_FILE}"),
        (
            {"source": "schema_id: none, schema: x.avsc"},
            '3:62: source.schema: "x.avsc" cannot be read: No such file or directory; name a file, relative to the topology file',
        ),
        ({"source": "schema_id: none, schema: latin.avsc"}, '3:62: source.schema: "latin.avsc" is not UTF-8 at byte 0; save it as UTF-8'),
        (
            {"source": "schema_id: none, schema: o.avsc, subject: s"},
            "3:70: source.subject: has no effect with `source.schema_id: none`; no schema registry has the schema of these values",
        ),
        ({"source": "subject: a b"}, '3:46: source.subject: "a b" is not a subject of a schema registry'),
        ({"source": "schema_id: none, schema: ''"}, '3:62: source.schema: "" is not the name of a file'),
        (
            {"source": "schema_id: none, schema: bad.avsc"},
            '3:62: source.schema: "bad.avsc" has a type record that is not complete; correct the schema',
        ),
        (
            {"source": "schema_id: none, schema: text.avsc"},
            '3:62: source.schema: "text.avsc" uses a type that it does not define before: strnig; correct the schema',
        ),
        ({"rule": "field: idd"}, '4:22: tracking_id.field: "idd" is not in o.avsc; did you mean "id"?'),
        ({"rule": "field: xyz"}, '4:22: tracking_id.field: "xyz" is not in o.avsc; the valid names are at, day, id, lines, number, total'),
        ({"rule": "field: id.x"}, '4:22: tracking_id.field: "id.x" is not in o.avsc; name a field of the schema'),
        ({"rule": "field: total"}, f'4:22: tracking_id.field: "total" has the type double in o.avsc; {WANTED}'),
        ({"rule": "field: lines"}, f'4:22: tracking_id.field: "lines" has the type array in o.avsc; {WANTED}'),
        ({"rule": "fields: [id, day]"}, f'4:28: tracking_id.fields[1]: "day" has the type date in o.avsc; {WANTED}'),
        (
            {"more": "event_time: {field: at, unit: ms}"},
            f'6:21: event_time.field: "at" has the type timestamp-micros in o.avsc; {UNITS}',
        ),
        ({"more": "event_time: {field: day, unit: s}"}, f'6:21: event_time.field: "day" has the type date in o.avsc; {UNITS}'),
        ({"more": "event_time: {field: no, unit: s}"}, '6:21: event_time.field: "no" is not in o.avsc; the valid names are at, day, id, lines, number, total'),
        ({"rule": "content: {exclude: [id, idd]}"}, '4:39: tracking_id.content.exclude[1]: "idd" is not in o.avsc; did you mean "id"?'),
        ({"rule": "content: {}"}, "4:15: tracking_id.content: has no key; write exclude, schema, or both"),
        ({"more": "conflicts: {exclude: [idd]}"}, '6:23: conflicts.exclude[0]: "idd" is not in o.avsc; did you mean "id"?'),
        ({"more": "conflicts: {exclude: [id], schema: text.avsc}"}, '6:36: conflicts.schema: "text.avsc" uses a type that it does not define before: strnig; correct the schema'),
        ({"rule": "content: {schema: no.avsc}"}, '4:33: tracking_id.content.schema: "no.avsc" cannot be read: No such file or directory; name a file, relative to the topology file'),
        (
            {"more": "sink: {url: 'sqlite:///x', table: t, columns: {a: idd}}"},
            '6:51: sink.columns.a: "idd" is not in o.avsc; did you mean "id"?',
        ),
    ],
)  # fmt: skip
def test_a_mistake_has_its_place(given, said):
    assert said in problems(**given)


def test_a_time_of_another_format_has_no_unit_of_a_schema():
    text = text_of(more="event_time: {field: at, unit: timestamp}").replace(
        "format: avro, schema_id: none, schema: o.avsc", "format: json"
    )
    with pytest.raises(TopologyError, match=r"event_time\.unit: timestamp needs `source\.format: avro`"):
        parse(text, name="t.yaml")


def test_without_a_way_to_read_files_the_schema_is_missing():
    with pytest.raises(TopologyError, match=r'"o.avsc" cannot be read'):
        parse(text_of(), name="t.yaml")


def test_a_type_that_only_some_records_have_is_a_warning():
    (found,) = [each for each in lint(topology("field: number")) if each.code == "type_sometimes_refused"]
    assert found.text == "tracking_id: number may also have the type float, which makes a record a dead letter."
    assert "type_sometimes_refused" not in [each.code for each in lint(topology())]


def test_bytes_are_compared_and_that_is_a_warning():
    assert "payload_bytes_compared" in [each.code for each in lint(topology(more="output: {topic: o}\nconflicts: x"))]
    (found,) = [each for each in lint(topology("content: true")) if each.code == "bytes_compared"]
    assert "another order of a map's keys, or another schema," in found.text


def test_state_stays_good_but_for_payloads():
    json_ = parse(text_of().replace("format: avro, schema_id: none, schema: o.avsc", "format: json"), name="t")
    assert topology().state_fingerprint({"c": 1}) == json_.state_fingerprint({"c": 1})
    compared, as_json = (
        text_of(more="output: {topic: o}\nconflicts: x"),
        "format: avro, schema_id: none, schema: o.avsc",
    )
    assert parse(compared, name="t", read_file=read).state_fingerprint({"c": 1}) != parse(
        compared.replace(as_json, "format: json"), name="t"
    ).state_fingerprint({"c": 1})
