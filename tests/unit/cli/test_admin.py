"""`apply`, `status`, `reset`, `replay`, `lookup` as far as they go without a broker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.core.extract_one import extract_one
from dedup.core.tracking_id import id_text
from dedup.errors import SettingsError, StateIncompatible
from dedup.kafka.topic_admin import Topic
from dedup.settings import Settings, TopicDefaults
from dedup.topology.model import extractor_of
from dedup.topology.parse import parse
from dedup.worker.introspection import state_keys
from dedup.worker.topics import TopicPlan, plan_topics

ROOT = Path(__file__).parents[3]
SIMPLEST = str(ROOT / "topologies" / "simplest.yaml")
SETTINGS = Settings(brokers=("localhost:1",), topics=TopicDefaults(replication_factor=3, min_insync_replicas=2))


AVRO = '{"type":"record","name":"R","fields":[{"name":"f","type":"long"}]}'
VALUES = {
    "json": ("", "", b'{"f": 7}'),
    "json_schema": ("", "", b'\0\0\0\0\1{"f": 7}'),
    "avro": (", schema_id: none, schema: s", AVRO, b"\x0e"),
    "protobuf": (", schema_id: none, schema: s", "message M { int64 f = 1; }", b"\x08\x07"),
    "msgpack": ("", "", b"\x81\xa1f\x07"),
    "cbor": ("", "", b"\xa1\x61f\x07"),
    "csv": (", columns: [f]", "", b"7"),
}
"""Of each format, the keys of the source that it needs, the schema, and the value whose member f is 7."""


def topology(rule: str = "field: id", more: str = "", source: str = "topics: [c]", schema: str = ""):
    return parse(
        f"dedup: 1\nname: t\nsource: {{{source}}}\ntracking_id: {{{rule}}}\nguard_period: 10s\noutput: {{topic: out}}\n{more}\n",
        name="t.yaml",
        read_file=lambda name: schema,
    )


def avro_topology(rule: str, schema: str, fmt: str = "avro"):
    source = f"{{topics: [c], format: {fmt}, schema_id: none, schema: s.avsc}}"
    text = f"dedup: 1\nname: t\nsource: {source}\ntracking_id: {{{rule}}}\nguard_period: 10s\noutput: {{topic: out}}\n"
    return parse(text, name="t.yaml", read_file=lambda name: schema)


def dedup(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(create_app(), list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", 1), f"{result.output}{result.exception}"
    return result.exit_code, result.output


@pytest.mark.parametrize("command", ["apply", "status", "reset", "replay", "lookup"])
def test_help_has_an_example(command):
    code, text = dedup(command, "--help")
    assert code == 0
    assert re.search(rf"Examples?: dedup {command} topologies/orders\.yaml", " ".join(text.split()))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("reset", SIMPLEST, "--to", "yesterday"), "is not a time"),
        (("reset", SIMPLEST, "--to", "99999999999999999999"), "is not a time"),
        (("reset", SIMPLEST, "--to", "253402300800000"), "is not a time"),
        (("reset", SIMPLEST, "--to", "9" * 5_000), "is not a time"),
        (("reset", SIMPLEST, "--to", "latest", "--local"), "--to: has no effect with --local"),
        (("replay", SIMPLEST, "--late"), "they would be late again: add --forward"),
        (("replay", SIMPLEST, "--forward"), "dead letters are judged again; omit this option"),
        (("apply", "nowhere.yaml"), "cannot be read"),
        (("lookup", SIMPLEST, "a", "--url", "file:///etc/passwd"), "is not the address of a worker"),
        (("lookup", SIMPLEST, "a", "--url", "http://127.0.0.1:6O66"), "is not the address of a worker"),
        (("lookup", SIMPLEST, "a", "--url", "http://127.0.0.1:66066"), "is not the address of a worker"),
        (("lookup", SIMPLEST, "a", "--url", "http://"), "is not the address of a worker"),
        (("lookup", SIMPLEST, ""), "ID: is empty; name the ID to look up"),
    ],
)
def test_an_authors_mistake_ends_with_2(arguments, text):
    code, output = dedup(*arguments, "--set", "brokers=localhost:1")
    assert code == 2
    assert text in output


def test_a_topology_without_a_late_topic_has_nothing_to_replay(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(
        "dedup: 1\nname: t\nsource: {topics: [c]}\ntracking_id: {field: id}\nguard_period: 10s\noutput: {topic: o}\nlate: drop\n"
    )
    code, output = dedup("replay", str(path), "--late", "--forward", "--set", "brokers=localhost:1")
    assert code == 2
    assert "has no topic for late records" in output


class TestPlan:
    def have(self, **changed: Topic) -> dict[str, Topic]:
        return {"c": Topic("c", "1", 4, {"max.message.bytes": "1000", "retention.ms": "5"})} | changed

    def test_a_fresh_cluster_needs_everything_but_the_source(self):
        plan = plan_topics(topology(), SETTINGS, self.have())
        assert [each.name for each in plan.make] == [
            "t.changelog",
            "t.layout",
            "out.dead-letter",
            "t.repartition",
            "out.late",
            "out",
        ]
        assert {each.partitions for each in plan.make if each.name != "t.layout"} == {4}
        configs = {each.name: each.configs for each in plan.make}
        assert configs["t.changelog"]["cleanup.policy"] == "compact,delete"
        assert configs["t.changelog"]["retention.ms"] == configs["t.repartition"]["retention.ms"] == "-1"
        assert configs["out.late"]["message.timestamp.type"] == "LogAppendTime"
        assert all(each["min.insync.replicas"] == "2" for each in configs.values())
        assert plan.differences == plan.as_wanted == ()

    def test_after_the_source_has_grown_only_the_changelog_has_to_fit(self):
        have = {each.name: Topic(each.name, "2", each.partitions, each.configs) for each in self.plan().make}
        grown = {"c": Topic("c", "1", 9, {"max.message.bytes": "1000", "retention.ms": "5"})}
        assert self.plan(have | grown).differences == ()
        other = {"t.changelog": replace(have["t.changelog"], partitions=5)}
        differences = self.plan(have | grown | other).differences
        assert [(each.topic, each.found, each.wanted) for each in differences] == [("t.changelog", "5", "4")]

    def plan(self, changed: Mapping[str, Topic] | None = None) -> TopicPlan:
        return plan_topics(topology(), SETTINGS, self.have() | dict(changed or {}))

    def test_a_missing_source_is_not_made(self):
        with pytest.raises(StateIncompatible, match="source topic 'c' does not exist"):
            plan_topics(topology(), SETTINGS, {})

    def test_differences_are_told_and_room_to_spare_is_none(self):
        wanted = {each.name: each for each in plan_topics(topology(), SETTINGS, self.have()).make}
        same = Topic("out", "2", 4, dict(wanted["out"].configs) | {"max.message.bytes": "9999999"})
        swapped = Topic(
            "t.changelog", "3", 4, dict(wanted["t.changelog"].configs) | {"cleanup.policy": "delete,compact"}
        )
        other = Topic("out.late", "4", 2, dict(wanted["out.late"].configs) | {"message.timestamp.type": "CreateTime"})
        have = {"out": same, "t.changelog": swapped, "out.late": other}
        plan = plan_topics(topology(), SETTINGS, self.have() | have)
        assert plan.as_wanted == ("t.changelog", "out")
        assert [(each.topic, each.what, each.found, each.wanted) for each in plan.differences] == [
            ("out.late", "partitions", "2", "4"),
            ("out.late", "message.timestamp.type", "CreateTime", "LogAppendTime"),
        ]


class TestStateKeys:
    def test_a_text_may_be_a_number_too(self):
        assert state_keys(topology("field: a.b"), "7") == [b"\x017", b"\x04\x07"]
        assert state_keys(topology("field: a.b"), "x") == [b"\x01x"]
        assert state_keys(topology('field: "a[1].b"'), "x") == [b"\x01x"]

    def test_a_key_is_its_bytes(self):
        assert state_keys(topology("key: true"), "7") == [b"\x027"]
        assert state_keys(topology("header: h"), "é") == [b"\x02\xc3\xa9"]

    def test_it_is_normalized_as_records_are(self):
        assert state_keys(topology("field: id, normalize: [trim, lower]"), " AB ") == [b"\x01ab"]

    @pytest.mark.parametrize("schema_id", ["auto", "header", "prefix"])
    def test_what_a_framing_contains_is_looked_up_without_it(self, schema_id):
        source = f"topics: [c], format: json_schema, schema_id: {schema_id}"
        assert state_keys(topology("field: a.b", source=source), "7") == [b"\x017", b"\x04\x07"]
        assert state_keys(topology("key: true", source=source), "7") == [b"\x027"]
        assert state_keys(topology("content: {exclude: [at]}", source=source), '{"at": 1}') == [b"\x0a{}"]

    def test_raw_content_is_looked_up_with_its_framing(self):
        source = "topics: [c], format: json_schema"
        assert state_keys(topology("content: true", source=source), "{}") == [b"\x02{}"]
        assert state_keys(topology("content: true", source=source), "\0\0\0\0\1{}") == [b"\x02\0\0\0\0\1{}"]
        with pytest.raises(SettingsError, match="no framing"):
            state_keys(topology("content: true", source=f"{source}, schema_id: prefix"), "{}")

    @pytest.mark.parametrize(
        ("kind", "text", "keys"),
        [
            ('"string"', "7", [b"\x017"]),
            ('["null","long","string"]', "7", [b"\x04\x07", b"\x017"]),
            ('"boolean"', "true", [b"\x07"]),
            ('{"type":"enum","name":"E","symbols":["A"]}', "A", [b"\x01A"]),
            ('{"type":"fixed","name":"F","size":2}', "ab", [b"\x02ab"]),
            ('{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}', "1.50", [b"\x0615e-1"]),
            ('{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}', "150", [b"\x0615e1"]),
            ('{"type":"string","logicalType":"uuid"}', "x", [b"\x01x"]),
            (
                '{"type":"fixed","name":"F","size":16,"logicalType":"uuid"}',
                f"{UUID(int=7)}",
                [b"\x03" + bytes(15) + b"\7"],
            ),
            (
                '{"type":"long","logicalType":"timestamp-micros"}',
                "1970-01-01T01:00:00.000120+01:00",
                [b"\x0e1970-01-01T00:00:00.00012Z"],
            ),
        ],
    )
    def test_an_avro_id_has_the_types_of_its_schema(self, kind, text, keys):
        schema = f'{{"type":"record","name":"R","fields":[{{"name":"f","type":{kind}}}]}}'
        made = avro_topology("field: f", schema)
        assert state_keys(made, text) == keys
        assert all(key in state_keys(made, shown) for key in keys if (shown := id_text(key)))
        if "string" not in kind and "fixed" not in kind and "enum" not in kind:
            with pytest.raises(SettingsError, match="cannot be an ID"):
                state_keys(made, "no such ID")

    def test_an_avro_composite_is_a_list_of_its_parts(self):
        schema = '{"type":"record","name":"R","fields":[{"name":"a","type":["long","string"]},{"name":"b","type":"boolean"}]}'
        made = avro_topology("fields: [a, b]", schema)
        assert state_keys(made, "[7, true]") == [b"\x09\x02\x04\x07\x01\x07", b"\x09\x02\x017\x01\x07"]
        with pytest.raises(SettingsError, match="JSON array of its 2 parts"):
            state_keys(made, "7")
        assert state_keys(avro_topology("key: true", schema), "7") == [b"\x027"]
        assert state_keys(avro_topology("content: true", schema), "7") == [b"\x027"]

    def test_an_avro_id_may_have_any_type_where_a_registry_has_the_schemas(self):
        made = topology("field: f", source="topics: [c], format: avro, partitioned_by: tracking_id")
        assert state_keys(made, "7") == [b"\x017", b"\x04\x07", b"\x067e0", b"\x027"]
        assert state_keys(made, f"{UUID(int=7)}") == [b"\x03" + bytes(15) + b"\7"]
        assert state_keys(topology("key: true", source="topics: [c], format: avro"), "7") == [b"\x027"]

    @pytest.mark.parametrize(
        ("kind", "text", "keys"),
        [
            ("string", "7", [b"\x017"]),
            ("bytes", "7", [b"\x027"]),
            ("sint32", "-7", [b"\x04\xf9"]),
            ("fixed64", "18446744073709551615", [b"\x0518446744073709551615"]),
            ("E", "2", [b"\x04\x02"]),
            ("bool", "false", [b"\x08"]),
            ("google.protobuf.UInt64Value", "7", [b"\x04\x07"]),
        ],
    )
    def test_a_protobuf_id_has_the_types_of_its_schema(self, kind, text, keys):
        schema = f"message M {{ optional {kind} f = 1; }} enum E {{ A = 0; }}"
        assert state_keys(avro_topology("field: f", schema, "protobuf"), text) == keys
        if "string" not in kind and "bytes" not in kind:
            with pytest.raises(SettingsError, match="cannot be an ID"):
                state_keys(avro_topology("field: f", schema, "protobuf"), "no such ID")

    def test_a_protobuf_id_may_have_any_type_where_a_registry_has_the_schemas(self):
        made = topology("field: f", source="topics: [c], format: protobuf, partitioned_by: tracking_id")
        assert state_keys(made, "7") == [b"\x017", b"\x027", b"\x04\x07"]
        assert state_keys(made, "true") == [b"\x01true", b"\x02true", b"\x07"]
        assert state_keys(topology("key: true", source="topics: [c], format: protobuf"), "7") == [b"\x027"]

    @pytest.mark.parametrize(
        ("fmt", "text", "keys"),
        [
            ("msgpack", "7", [b"\x017", b"\x027", b"\x04\x07"]),
            ("msgpack", "true", [b"\x01true", b"\x02true", b"\x07"]),
            ("cbor", "7", [b"\x017", b"\x027", b"\x04\x07", b"\x067e0"]),
            ("csv, columns: [a, b, f]", "7", [b"\x017"]),
            ("csv, columns: [a, b, f]", str(UUID(int=7)), [b"\x03" + UUID(int=7).bytes]),
            ("cbor", "1.50", [b"\x011.50", b"\x021.50", b"\x0615e-1"]),
            ("cbor", str(UUID(int=7)), [b"\x03" + UUID(int=7).bytes]),
            ("msgpack", "9" * 20, [b"\x01" + b"9" * 20, b"\x02" + b"9" * 20, b"\x05" + b"9" * 20]),
        ],
    )
    def test_an_id_without_a_schema_may_have_any_type(self, fmt, text, keys):
        made = topology("field: f", source=f"topics: [c], format: {fmt}, partitioned_by: tracking_id")
        assert state_keys(made, text) == keys
        composite = topology("parts: [{field: a, absent: as_value}, {field: b}]", source=f"topics: [c], format: {fmt}")
        assert b"\x09\x01\x0b\x02\x01x" in state_keys(composite, '[null, "x"]')
        assert state_keys(topology("key: true", source=f"topics: [c], format: {fmt}"), "7") == [b"\x027"]

    @pytest.mark.parametrize("text", ["1_000", "٣", "007", "-01", "+7", " 7", "7.", "00.5", "01e2", "٣.5", "-", "--7"])
    @pytest.mark.parametrize("fmt", ["msgpack", "cbor"])
    def test_a_number_is_written_as_in_json(self, fmt, text):
        found = state_keys(topology("field: f", source=f"topics: [c], format: {fmt}"), text)
        assert found == [b"\x01" + text.encode(), b"\x02" + text.encode()]

    @pytest.mark.parametrize(("text", "key"), [("0", b"\x04\0"), ("-0", b"\x04\0"), ("-7", b"\x04\xf9")])
    def test_an_integer_may_be_zero_or_negative(self, text, key):
        assert key in state_keys(topology("field: f", source="topics: [c], format: cbor"), text)

    @pytest.mark.parametrize(("text", "key"), [("0.5", b"\x065e-1"), ("-10.25E+1", b"\x06-1025e-1")])
    def test_a_decimal_may_have_a_fraction_and_an_exponent(self, text, key):
        assert key in state_keys(topology("field: f", source="topics: [c], format: cbor"), text)

    @pytest.mark.parametrize(
        ("fmt", "keys"),
        [
            ("json", [b"\x017", b"\x04\x07"]),
            ("json_schema", [b"\x017", b"\x04\x07"]),
            ("avro", [b"\x017", b"\x04\x07", b"\x067e0", b"\x027"]),
            ("protobuf", [b"\x017", b"\x027", b"\x04\x07"]),
            ("msgpack", [b"\x017", b"\x027", b"\x04\x07"]),
            ("cbor", [b"\x017", b"\x027", b"\x04\x07", b"\x067e0"]),
        ],
    )
    @pytest.mark.parametrize("values", ["json", "bytes", "msgpack", "avro"])
    def test_a_member_of_the_key_has_the_types_of_its_format(self, fmt, keys, values):
        source = f"topics: [c], format: {values}, key_format: {fmt}"
        assert state_keys(topology("key: a.f", source=source), "7") == keys
        parts = state_keys(topology("parts: [{header: h}, {key: f}]", source=source), '["x", 7]')
        assert b"\x09\x02\x02x\x02\x04\x07" in parts
        lacking = state_keys(topology("parts: [{key: f, absent: as_value}, {key: true}]", source=source), '[{}, "x"]')
        assert b"\x09\x01\x0c\x02\x02x" in lacking
        alternatives = state_keys(topology("first_of: [{header: h}, {key: f}]", source=source), "7")
        assert alternatives == [b"\x0d\x00\x027", *(b"\x0d\x01" + key for key in keys)]
        with pytest.raises(SettingsError, match="JSON array of its 2 parts"):
            state_keys(topology("parts: [{header: h}, {key: f}]", source=source), "7")

    def test_members_of_the_key_and_of_the_value_form_an_id(self):
        source = "topics: [c], format: cbor, key_format: json"
        made = topology("parts: [{field: f}, {key: f}]", source=source)
        assert b"\x09\x02\x04\x07\x08\x0a" + b'{"a":1}' in state_keys(made, '[7, {"a": 1}]')
        with pytest.raises(SettingsError, match="cannot be an ID"):
            state_keys(made, '[7, ""]')

    def test_a_composite_is_a_list_of_its_parts(self):
        assert state_keys(topology("fields: [a.b, a.c]"), '["x", 7]') == [b"\x09\x02\x01x\x02\x04\x07"]
        for text in ("x", '["x"]', '{"a": 1}'):
            with pytest.raises(SettingsError, match="JSON array of its 2 parts"):
                state_keys(topology("fields: [a.b, a.c]"), text)

    @pytest.mark.parametrize("number", ["1e400", "0.12345678901234567890", "-0", "1.50", "1" * 30])
    def test_a_number_in_a_composite_is_exact(self, number):
        record = f'{{"a": {number}, "b": {{"c": [{number}]}}}}'.encode()
        for rule, written in (
            ("fields: [a, 'b.c[0]']", f"[{number}, {number}]"),
            ("parts: [{field: a}, {field: b}]", f'[{number}, {{"c": [{number}]}}]'),
        ):
            made = topology(rule)
            found = extract_one(extractor_of(made).recipe, None, record, [], 0)
            assert state_keys(made, written) == [found.id]

    def test_an_avro_part_may_be_null_or_absent(self):
        schema = (
            '{"type":"record","name":"R","fields":[{"name":"a","type":["null","string"]},{"name":"b","type":"long"}]}'
        )
        made = avro_topology("parts: [{field: a, absent: as_value}, {field: b}]", schema)
        assert b"\x09\x01\x0b\x02\x04\x07" in state_keys(made, "[null, 7]")
        assert b"\x09\x01\x0c\x02\x04\x07" in state_keys(made, "[{}, 7]")
        assert state_keys(made, '["", 7]') == [b"\x09\x01\x01\x02\x04\x07"]

    @pytest.mark.parametrize("fmt", VALUES)
    @pytest.mark.parametrize(
        ("key", "headers", "text"),
        [
            (b"k", [("h", b"7")], '["k", "7", 7]'),
            (b"k", [("h", b"7")], '["k", 7, 7]'),
            (b"k", [("h", None)], '["k", null, 7]'),
            (b"k", [], '["k", { }, 7]'),
            (None, [("h", b"")], '[null, "", 7]'),
        ],
    )
    @pytest.mark.parametrize("alternatives", [False, True])
    def test_a_composite_has_its_key_and_headers_in_every_format(self, fmt, key, headers, text, alternatives):
        parts = "parts: [{key: true, absent: as_value}, {header: h, absent: as_value}, {field: f}]"
        source, schema, value = VALUES[fmt]
        rule = f"first_of: [{{header: other}}, {{{parts}}}]" if alternatives else parts
        made = topology(rule, source=f"topics: [c], format: {fmt}{source}", schema=schema)
        found = extract_one(extractor_of(made).recipe, key, value, headers, 0)
        assert found.id in state_keys(made, text)

    def test_what_is_nested_too_deep_to_be_json_is_a_text_or_no_id(self):
        deep = "[" * 2_500
        assert len(state_keys(topology("field: id"), deep)) == 1
        for rule in ("fields: [a, b]", "content: {exclude: [a]}"):
            with pytest.raises(SettingsError, match="ID"):
                state_keys(topology(rule), deep)

    @pytest.mark.parametrize("rule", ["key: true", "header: h", "field: f", "fields: [f, g]", "content: true"])
    @pytest.mark.parametrize("source", ["", ", format: msgpack", ", format: json_schema"])
    def test_what_is_not_utf8_is_refused(self, rule, source):
        made = topology(rule, source=f"topics: [c]{source}")
        for text in ("\udcff", '["\udcff", 7]'):
            with pytest.raises(SettingsError, match="is not UTF-8"):
                state_keys(made, text)

    @pytest.mark.parametrize("fmt", VALUES)
    def test_an_escape_that_is_not_utf8_is_refused(self, fmt):
        source, schema, _ = VALUES[fmt]
        made = topology("parts: [{key: true}, {field: f}]", source=f"topics: [c], format: {fmt}{source}", schema=schema)
        for text in ('["\\ud800", 7]', '["k", "\\ud800"]'):
            with pytest.raises(SettingsError, match="ID: "):
                state_keys(made, text)

    def test_what_can_be_no_id_is_refused_with_the_reason(self):
        with pytest.raises(SettingsError, match="cannot be an ID of 't'"):
            state_keys(topology("field: id"), "")
        made = topology("content: {exclude: []}", source="topics: [c], format: msgpack")
        with pytest.raises(
            SettingsError, match="content of a value in msgpack, and only JSON content can be looked up"
        ):
            state_keys(made, "{}")
