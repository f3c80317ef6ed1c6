"""A topology that reads values which say their own types: what is refused, with its place; what it means for state."""

from __future__ import annotations

import pytest

from dedup.core.event_time import FieldTime
from dedup.errors import TopologyError
from dedup.topology.describe import describe
from dedup.topology.lint import lint
from dedup.topology.model import Topology, extractor_of
from dedup.topology.parse import parse

VALUES = {"msgpack": b"\x82\xa2id\x07\xa2at\xd6\xff\0\0\0\1", "cbor": b"\xa2\x62id\x07\x62at\xc1\x01"}
"""For each format, the ID 7 and the first second after 1970."""


def text_of(fmt: str, rule: str = "field: id", more: str = "", source: str = "") -> str:
    source = f"{{topics: [c], format: {fmt}, {source}}}"
    return f"dedup: 1\nname: t\nsource: {source}\ntracking_id: {{{rule}}}\nguard_period: 1h\n{more}\n"


def topology(*given: str, **named: str) -> Topology:
    return parse(text_of(*given, **named), name="t.yaml")


def problems(*given: str, **named: str) -> list[str]:
    with pytest.raises(TopologyError) as refused:
        topology(*given, **named)
    return [str(each).removeprefix("t.yaml:") for each in refused.value.problems]


@pytest.mark.parametrize("fmt", VALUES)
def test_what_it_becomes(fmt):
    made = topology(fmt, "field: id", "event_time: {field: at, unit: timestamp}")
    assert (made.source.format, made.source.framing, made.source.names_schemas) == (fmt, None, False)
    assert made.event_time == FieldTime(("at",), "timestamp")
    assert f"read, {fmt}, from earliest" in describe(made)
    found = extractor_of(made)([None], [VALUES[fmt]], [[]], [0])
    assert (found.ids, found.times_ms, found.faults) == ([b"\4\7"], [1000], {})


@pytest.mark.parametrize("fmt", VALUES)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rule": "content: {exclude: [id], schema: a.avsc}"}, "4:40: tracking_id.content.schema: needs `source.format: avro` or `protobuf`"),
        ({"rule": "first_of: [{key: true}, {content: {}}]"}, "4:40: tracking_id.first_of[1].content: has no key; write exclude, schema, or both"),
        ({"more": "conflicts: {schema: a.avsc}"}, "6:13: conflicts.schema: needs `source.format: avro` or `protobuf`"),
        ({"more": "sink: {url: 'sqlite:///x', table: t, columns: {a: {field: id, type: json}}}"}, "6:69: sink.columns.a.type: json needs `source.format: json`; with {}, name the members one by one"),
        ({"source": "schema: a.avsc"}, "source.schema: needs `source.format: avro` or `protobuf`"),
        ({"source": "schema_id: none"}, "source.schema_id: none needs `source.format: avro` or `protobuf`; JSON without framing is `format: json`"),
        ({"source": "schema_id: prefix"}, "source.schema_id: needs `source.format: json_schema`"),
    ],
)  # fmt: skip
def test_a_mistake_has_its_place(fmt, given, said):
    assert any(each.endswith(said.format(fmt)) for each in problems(fmt, **given)), problems(fmt, **given)


@pytest.mark.parametrize("fmt", VALUES)
def test_bytes_are_compared_and_that_is_a_warning(fmt):
    found = {each.code: each.text for each in lint(topology(fmt, more="output: {topic: o}\nconflicts: x"))}
    assert found["payload_bytes_compared"].startswith("conflicts compare bytes: another ")
    found = {each.code: each.text for each in lint(topology(fmt, "content: true"))}
    assert found["bytes_compared"].endswith(" makes a new event.")


@pytest.mark.parametrize("fmt", VALUES)
def test_state_stays_good_but_for_payloads(fmt):
    assert topology(fmt).state_fingerprint({"c": 1}) == topology("json").state_fingerprint({"c": 1})
    more = "output: {topic: o}\nconflicts: x"
    assert f'"payloads":"{fmt} bytes"' in topology(fmt, more=more).state_identity({"c": 1})
    assert topology("json", more=more).state_identity({"c": 1}) != topology(fmt, more=more).state_identity({"c": 1})


CSV = "csv, columns: [id, placed at, a.b]"
NAMES = "the valid names are a.b, id, placed at"


def test_what_csv_becomes():
    more = "event_time: {field: '[\"placed at\"]', unit: ms}"
    made = topology(CSV, "fields: [id, '[\"a.b\"]']", more, source="delimiter: semicolon")
    assert (made.source.columns, made.source.delimiter) == (("id", "placed at", "a.b"), "semicolon")
    assert made.event_time == FieldTime(("placed at",), "ms")
    assert "read, csv with the delimiter semicolon and the columns id, placed at, a.b, from earliest" in describe(made)
    found = extractor_of(made)([None], [b"x;7;y"], [[]], [0])
    assert (found.ids, found.times_ms, found.faults) == ([b"\x09\2\1x\2\1y"], [7], {})
    assert topology(CSV).source.delimiter == "comma"
    assert topology(CSV).state_fingerprint({"c": 1}) == topology("json").state_fingerprint({"c": 1})
    assert '"payloads":"csv bytes"' in topology(CSV, more="output: {topic: o}\nconflicts: x").state_identity({"c": 1})


@pytest.mark.parametrize(
    ("fmt", "given", "said"),
    [
        ("csv", {}, "3:23: source.format: csv needs `source.columns`: the names of the columns, in their order"),
        ("csv, columns: []", {}, "3:45: source.columns: is an empty list; name at least one column"),
        ("csv, columns: [id, id]", {}, '3:45: source.columns: "id" is listed twice'),
        ("csv, columns: [id, '']", {}, "3:50: source.columns[1]: a column has a name"),
        ("csv, columns: [id], delimiter: ';'", {}, '3:62: source.delimiter: ";" is not one of comma | semicolon | tab | pipe'),
        ("json, columns: [id]", {}, "3:37: source.columns: needs `source.format: csv`"),
        ("msgpack, delimiter: tab", {}, "3:40: source.delimiter: needs `source.format: csv`"),
        (CSV, {"rule": "field: idd"}, '4:22: tracking_id.field: "idd" is not a column; did you mean "id"?'),
        (CSV, {"rule": "field: a.c"}, f'4:22: tracking_id.field: "a.c" is not a column; {NAMES}'),
        (CSV, {"rule": "field: a.b"}, """4:22: tracking_id.field: for the column "a.b", write '["a.b"]'"""),
        (CSV, {"rule": "field: placed at"}, """4:22: tracking_id.field: for the column "placed at", write '["placed at"]'"""),
        ('csv, columns: ["it\'s on"]', {"rule": "fields: [it's on]"}, """4:24: tracking_id.fields[0]: for the column "it's on", write '["it\'\'s on"]'"""),
        (CSV, {"more": "event_time: {field: placed at, unit: ms}"}, """6:21: event_time.field: for the column "placed at", write '["placed at"]'"""),
        (CSV, {"rule": "field: 'id[0]'"}, '4:22: tracking_id.field: "id[0]" is not a column; did you mean "id"?'),
        (CSV, {"rule": "fields: [id, xyz]"}, f'4:28: tracking_id.fields[1]: "xyz" is not a column; {NAMES}'),
        (CSV, {"rule": "parts: [{key: true}, {field: xyz}]"}, f'4:44: tracking_id.parts[1].field: "xyz" is not a column; {NAMES}'),
        (CSV, {"rule": "first_of: [{key: true}, {field: xyz}]"}, f'4:47: tracking_id.first_of[1].field: "xyz" is not a column; {NAMES}'),
        (CSV, {"more": "event_time: {field: xyz, unit: ms}"}, f'6:21: event_time.field: "xyz" is not a column; {NAMES}'),
        (CSV, {"more": "event_time: {field: id, unit: timestamp}"}, "6:25: event_time.unit: timestamp needs `source.format: avro`, `protobuf`, `msgpack`, or `cbor`; write rfc3339, s, ms, or us"),
        (CSV, {"more": "conflicts: {exclude: [id, xyz]}"}, f'6:27: conflicts.exclude[1]: "xyz" is not a column; {NAMES}'),
        (CSV, {"rule": "content: {exclude: [xyz]}"}, f'4:35: tracking_id.content.exclude[0]: "xyz" is not a column; {NAMES}'),
    ],
)  # fmt: skip
def test_a_mistake_in_csv_has_its_place(fmt, given, said):
    assert said in problems(fmt, **given)
