"""`apply`, `status`, `reset`, `replay`, `lookup` as far as they go without a broker."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import UUID

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dedup.cli import status
from dedup.cli.inputs import shortened
from dedup.cli.main import create_app
from dedup.cli.status import (
    Look,
    NotReached,
    ask,
    ask_fleet,
    ask_id,
    follow,
    idle_workers,
    looked,
    showing,
    survey,
    table,
)
from dedup.core.extract_one import extract_one
from dedup.core.tracking_id import id_text
from dedup.errors import BrokerUnavailable, DedupError, SettingsError, StateIncompatible
from dedup.kafka.topic_admin import Group, Topic
from dedup.kafka.wire import CommittedOffset, LogBounds, Position, TopicPartition
from dedup.settings import Secret, Settings, TopicDefaults, Web
from dedup.topology.model import extractor_of
from dedup.topology.parse import parse
from dedup.worker.introspection import state_keys
from dedup.worker.offsets import RESETTING
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


@pytest.mark.parametrize(
    ("held", "size", "says"),
    [
        ({"a": 4, "b": 4}, 4, []),
        ({"a": 0, "b": 0}, 4, []),
        ({"a": 8, "b": 0, "c": 0}, 8, ["set it to 2 or less, stop all workers, and run `dedup layout --apply`"]),
        ({**dict.fromkeys("abcdefgh", 1), "i": 0}, 1, ["1 of 9 workers have no partition (i): there are 8 partitions"]),
        ({**dict.fromkeys("abcd", 2), "e": 0}, 2, ["because transactions.partitions is 2: set it to 1 or less"]),
    ],
)
def test_workers_without_partitions_are_told_what_to_set(held, size, says):
    found = idle_workers(held, size, 8)
    assert len(found) == len(says)
    assert all(text in sentence for text, sentence in zip(says, found, strict=True))


NOW_MS = 1_700_000_000_000


def survey_of(*, owner: str | None = "a", topic: str = "c", committed: int = 1_000) -> dict[str, Any]:
    names = ("task", "topic", "partition", "owner", "committed", "end", "lag", "oldest_ms", "changelog_begin",
             "changelog_end")  # fmt: skip
    rows = (
        ("dedup", topic, 0, owner, committed, 1_200, 200, NOW_MS - 90_000, 50, 400),
        ("dedup", topic, 1, None, None, 5, 5, NOW_MS - 150_000, None, None),
    )
    return {
        "topology": "t",
        "members": [{"worker": owner, "host": "10.0.0.1", "partitions": ["c/0"]}] if owner else [],
        "missing_topics": ["out.late"],
        "tasks": [dict(zip(names, row, strict=True)) for row in rows],
    }


PAGE = {
    "topology": "t",
    "worker": "a",
    "tasks": [{"task": "dedup", "topic": "c", "partition": 0, "state": "running", "verdicts": {"unique": 3, "duplicate": 1},
               "state_ids": 3, "state_bytes": 99, "restore_remaining": 0, "seconds_since_commit": 1}],
}  # fmt: skip


def seen_now(surveyed: dict[str, Any], pages: list[dict[str, Any]], before: Look | None = None) -> dict[str, Any]:
    return looked(Look(surveyed, pages, NOW_MS), before)


def printed(seen: dict[str, Any], width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    console.print(table(seen, width))
    return console.export_text()


def test_status_puts_brokers_and_workers_together():
    seen = seen_now(survey_of(), [PAGE])
    assert seen["lag"] == 205
    assert seen["tasks"][0]["state_ids"] == 3
    assert seen["tasks"][1]["state"] is None
    json.dumps(seen)
    text = printed(seen)
    assert "t: lag 205, oldest record waiting: 2 min; workers: a at 10.0.0.1" in text
    assert "25.0%" in text
    assert "missing topics: out.late; `dedup apply` creates them" in text


def test_status_says_how_many_records_the_flow_filtered():
    flowing = PAGE | {"tasks": [task | {"filtered": 1_200} for task in PAGE["tasks"]]}
    said = "filtered by the flow: 1,200 records, since the responding workers started"
    assert said in printed(seen_now(survey_of(), [flowing]))
    assert "filtered" not in printed(seen_now(survey_of(), [PAGE]))


def test_status_names_a_stream_which_is_no_member_of_the_group():
    nobody = survey_of(owner=None)
    seen = seen_now(nobody | {"tasks": nobody["tasks"][:1]}, [PAGE | {"worker": "spark-host"}])
    assert [(task["owner"], task["state"]) for task in seen["tasks"]] == [("spark-host", "running")]
    assert "workers: spark-host" in printed(seen)


def test_status_adds_up_dead_letters_of_all_workers_and_says_alerts():
    one = {"worker": "a", "tasks": [], "dead_letters": {"not_json": 5, "id_null": 1}, "other_formats": {"gzip": 2},
           "alert": "all is dead"}  # fmt: skip
    other = {"worker": "b", "tasks": [], "dead_letters": {"id_null": 9}, "other_formats": {"gzip": 1}, "alert": None}
    older = {"worker": "c", "tasks": []}
    seen = seen_now(survey_of(), [one, other, older])
    assert (seen["dead_letters"], seen["other_formats"]) == ({"id_null": 10, "not_json": 5}, {"gzip": 3})
    assert "a: all is dead" in seen["alerts"]
    text = printed(seen)
    assert "dead letters: 10 id_null, 5 not_json, since the responding workers started" in text
    assert "of them in another format: 3 gzip, since" in text
    assert "attention: a: all is dead" in text
    assert "dead letters" not in printed(seen_now(survey_of(), [older]))


def test_status_says_how_far_a_restore_and_a_bound_are():
    task = {"task": "dedup", "topic": "c", "partition": 1, "state": "restoring", "restore_remaining": 25,
            "restore_total": 100, "state_bytes": 80, "state_max_bytes": 100}  # fmt: skip
    text = printed(seen_now(survey_of(), [{"worker": "b", "tasks": [task]}]))
    assert "restoring 75%, 25 left" in text
    assert "80 (80% of its limit)" in text


def test_status_says_how_fast_the_fleet_is():
    before = Look(survey_of(committed=400), [], NOW_MS - 2_000)
    seen = seen_now(survey_of(), [PAGE], before)
    assert (seen["arriving_per_s"], seen["committed_per_s"]) == (0.0, 300.0)
    assert "0 records/s arrive, 300/s are committed" in printed(seen)
    assert seen_now(survey_of(), [PAGE])["committed_per_s"] is None


@pytest.mark.parametrize(
    ("surveyed", "pages", "says", "state"),
    [
        (survey_of(owner=None), [], "no worker is running; start one with `dedup run`", "not running"),
        (survey_of(), [PAGE], "1 of 2 partitions have no worker: the group is assigning them", "not running"),
        (survey_of(), [], "1 of 1 workers do not answer (a), so their tasks' states are unknown", "no answer"),
        (survey_of(), [PAGE | {"tasks": []}], "missing topics: out.late", "starting"),
    ],
)
def test_status_says_what_is_wrong_and_what_to_do(surveyed, pages, says, state):
    seen = seen_now(surveyed, pages)
    assert any(alert.startswith(says) for alert in seen["alerts"]), seen["alerts"]
    assert state in printed(seen)


def test_status_says_that_nothing_is_committed_only_if_records_wait_for_long_and_all_partitions_have_workers():
    whole = survey_of() | {"tasks": survey_of()["tasks"][:1]}
    late = PAGE | {"tasks": [task | {"seconds_since_commit": 40} for task in PAGE["tasks"]]}
    fresh = whole | {"tasks": [task | {"oldest_ms": NOW_MS - 2_000} for task in whole["tasks"]]}

    def stuck(surveyed, page):
        alerts = seen_now(surveyed, [page], Look(surveyed, [page], NOW_MS - 1_000))["alerts"]
        return [alert for alert in alerts if alert.startswith("nothing was committed for 40 s although records wait")]

    assert stuck(whole, late)
    assert not stuck(whole, PAGE), "a long commit interval"
    assert not stuck(fresh, late), "a record after a quiet time"
    assert not stuck(survey_of(), late), "a partition without a worker"


@pytest.mark.parametrize("width", [80, 120])
def test_status_keeps_the_partition_number_on_a_narrow_terminal(width):
    """Was: at 80 columns, the topic's name was cut, and the partition's number with it."""
    long = "payments.card-authorizations.production.eu-central-1.v2"
    text = printed(seen_now(survey_of(topic=long), [PAGE]), width)
    assert "payments.card…u-central-1.v2/0" in text
    assert "payments.card…u-central-1.v2/1" in text
    (head,) = (line for line in text.splitlines() if line.startswith("partition"))
    assert ("changelog" in head) is (width == 120)
    assert all(len(line) <= width for line in text.splitlines())
    assert shortened(long, {long, long.replace("production", "staging")}) == long


def test_status_says_what_is_missing_and_which_command_helps():
    """Was: it named `dedup apply`, which refuses in these cases, and `dedup run`, which does, too."""
    nobody = survey_of(owner=None)

    def alerts(**more):
        return seen_now(nobody | more, [])["alerts"]

    start = "no worker is running; remove the cause above, and then start one with `dedup run`"
    source, other, last = alerts(missing_topics=["c", "out.late"], missing_sources=["c"])
    assert source == "missing source topics: c; create them, or correct `source.topics`"
    assert other == "missing topics: out.late; then `dedup apply` creates them"
    assert last == start
    deleted, last = alerts(missing_topics=["t.changelog"], deleted_topics=["t.changelog"])
    assert deleted.startswith("deleted topics: t.changelog. The group has committed offsets")
    assert deleted.endswith("bring them back, or start over with `dedup reset`")
    assert last == start
    half, last = alerts(missing_topics=["t.changelog"], deleted_topics=["t.changelog"], reset_interrupted=True)
    assert half.endswith("run the same `dedup reset` again to finish it")
    assert last == start


class Brokers:
    """Answers for a topic of two partitions, of which one has no leader, and for no changelog."""

    def __init__(self, note: str = "") -> None:
        self.position = Position(7, note=note)

    async def topics(self, names: Any) -> Any:
        if isinstance(names, tuple):
            return dict.fromkeys(names, 3)  # of the wire: the layout topic does not exist
        return {"c": Topic("c", "1", 2, {}, (1,))}

    async def bounds(self, place: TopicPartition) -> LogBounds:
        assert place == ("c", 0), "nobody answers for a partition without a leader"
        return LogBounds(0, 7)

    async def committed_offset(self, _group: str, _place: TopicPartition, *, stable: bool) -> CommittedOffset:
        assert not stable
        return CommittedOffset(0, self.position)


@pytest.mark.parametrize("note", ["", RESETTING])
def test_status_shows_partitions_without_a_leader(monkeypatch, note):
    """Was: status waited for the leader forever."""

    async def nobody(_group):
        return []

    monkeypatch.setattr(Group, "members", nobody)
    brokers: Any = Brokers(note)
    direct = topology(source="topics: [c], partitioned_by: tracking_id")
    found = asyncio.run(survey(direct, brokers, brokers))
    assert found["leaderless"] == {"c": [1]}
    assert found["deleted_topics"] == ["t.changelog"]
    assert found["missing_sources"] == []
    assert found["reset_interrupted"] is (note == RESETTING)
    assert [(task["committed"], task["end"], task["lag"]) for task in found["tasks"]] == [(7, 7, 0), (7, None, None)]
    text = printed(seen_now(found, []))
    assert re.search(r"c/1 +nobody +no leader +- ", text)
    assert "partitions without a leader: c 1: start the brokers that hold these partitions" in text


def test_a_watched_status_goes_on_after_an_error(monkeypatch):
    """Was: it ended with exit code 5 when the brokers were away for 20 s."""
    monkeypatch.setattr(status, "WATCH_S", 0)
    shown: list[tuple[int, str | None]] = []
    look = Look(survey_of(), [PAGE], NOW_MS)
    found = iter([look, BrokerUnavailable("no answer."), StateIncompatible("gone."), look, KeyboardInterrupt()])

    async def next_look() -> Look:
        each = next(found)
        if isinstance(each, Look):
            return each
        raise each

    def show(seen, failure=None):
        shown.append((seen["lag"], failure))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(follow(next_look, show, watch=True))
    assert shown == [(205, None), (205, "no answer."), (205, "gone."), (205, None)]


@pytest.mark.parametrize(("watch", "looks"), [(True, 0), (False, 0), (False, 1)])
def test_a_status_that_cannot_be_determined_is_an_error(monkeypatch, watch, looks):
    monkeypatch.setattr(status, "RATE_S", 0)
    found = iter([Look(survey_of(), [PAGE], NOW_MS)] * looks)

    async def next_look() -> Look:
        for each in found:
            return each
        raise BrokerUnavailable("no answer.")

    with pytest.raises(BrokerUnavailable):
        asyncio.run(follow(next_look, lambda *_: None, watch=watch))


def test_an_error_while_watching_goes_to_stderr(capsys):
    with showing(watch=True, as_json=True) as show:
        show({"lag": 1}, "no answer.")
    assert capsys.readouterr() == ("", "no answer.\n")


def test_watched_in_a_pipe_a_status_is_a_line(capsys):
    with showing(watch=True, as_json=True) as show:
        show({"lag": 1})
        show({"lag": 0})
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"lag": 1}, {"lag": 0}]


ANSWERS: dict[str, Any] = {
    "a": {"topology": "clicks", "id": "a", "asked": [0], "partitions": 2, "belongs_to": None,
          "sightings": [{"partition": 0, "first_ms": 0, "last_ms": 0, "guarded_until_ms": 86_400_000, "source": "c/0/5"}]},
    "b": {"topology": "clicks", "id": "b", "asked": [0, 1], "partitions": 2, "belongs_to": None, "sightings": []},
    "c": {"topology": "clicks", "id": "c", "asked": [0], "partitions": 2, "belongs_to": 1, "sightings": []},
    "d": {"topology": "other", "id": "d", "asked": [0], "partitions": 2, "belongs_to": 1, "sightings": []},
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        found: Mapping[str, Any] | None = ANSWERS.get(self.path.rsplit("/", 1)[1])
        self.send_response(200 if found else 400)
        self.end_headers()
        self.wfile.write(json.dumps(found or {"error": "it is none"}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with served(Handler) as address:
        yield address


@contextmanager
def served(handler: type[Handler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_no_redirect_and_no_proxy_gets_the_token(monkeypatch):
    asked = []

    class Elsewhere(Handler):
        def do_GET(self):
            asked.append(self.headers["Authorization"])
            super().do_GET()

    class Moved(Handler):
        def do_GET(self):
            self.send_response(302)
            self.send_header("Location", elsewhere)
            self.end_headers()

    with served(Elsewhere) as elsewhere, served(Moved) as moved:
        monkeypatch.setenv("http_proxy", elsewhere)
        monkeypatch.delenv("no_proxy", raising=False)
        settings = Settings(brokers=("b:1",), web=Web(token=Secret("canary")))
        with pytest.raises(NotReached, match="302"):
            ask(moved, "/api/status", settings)
    assert asked == []


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (400, b"Client sent an HTTP request to an HTTPS server.\n"),
        (400, b"[1]"),
        (400, b'{"error": 7}'),
        (404, b"{}"),
        (200, b"[1, 2]"),
        (200, b"{}"),
        (200, b'"x"'),
        (200, b"<html>"),
        (200, b"\xff"),
        (None, b"not HTTP\r\n\r\n"),
    ],
)
def test_another_server_than_a_worker_is_told_in_a_sentence(code, body):
    """Was: a traceback."""

    class Other(Handler):
        def do_GET(self):
            if code is not None:
                self.send_response(code)
                self.end_headers()
            self.wfile.write(body)

    settings = Settings(brokers=("b:1",))
    with served(Other) as at:
        with pytest.raises(NotReached, match=at) as caught:
            ask_id(topology(), "x", [at], settings)
        assert isinstance(caught.value, DedupError)
        assert ask_fleet("t", [at], settings) == ([], [])


def test_a_refused_token_is_told():
    """Was: status said only to name the workers' pages with --url."""

    class Locked(Handler):
        def do_GET(self):
            self.send_response(401)
            self.end_headers()

    with served(Locked) as at:
        fleet = ask_fleet("t", [at], Settings(brokers=("b:1",), web=Web(token=Secret("canary"))))
    assert fleet == ([], [at])
    said = f"{at} refused the token; set web.token to the worker's"
    silent = looked(Look(survey_of(), [], NOW_MS, fleet.refused))["alerts"]
    assert f"1 of 1 workers do not answer (a), so their tasks' states are unknown: {said}" in silent
    assert said in looked(Look(survey_of(), [PAGE], NOW_MS, fleet.refused))["alerts"]


@pytest.mark.parametrize(
    ("tracking_id", "code", "text"),
    [
        ("a", 0, "seen 1970-01-01T00:00:00Z in c/0/5; guarded until 1970-01-02T00:00:00Z of event time"),
        ("b", 0, "not known: never seen, or its sighting has expired"),
        ("c", 0, "not known to this worker, which has [0]; the ID is in partition 1"),
        ("d", 1, "is a worker of 'other', not of"),
        ("e", 2, "it is none"),
    ],
)
def test_lookup_says_what_a_worker_knows(url, tmp_path, tracking_id, code, text):
    path = tmp_path / "clicks.yaml"
    path.write_text(
        "dedup: 1\nname: clicks\nsource: {topics: [c]}\ntracking_id: {field: id}\nguard_period: 10s\noutput: {topic: o}\n"
    )
    found, output = dedup("lookup", str(path), tracking_id, "--url", url, "--set", "brokers=localhost:1")
    assert found == code
    assert text in output


def test_explain_and_lookup_refuse_an_id_that_is_not_utf8():
    said = "ID: '\\udcff' is not UTF-8; only an ID that is UTF-8 can be looked up"
    for command in ("explain", "lookup"):
        assert dedup(command, SIMPLEST, "\udcff", "--set", "brokers=localhost:1") == (2, said)


def test_lookup_without_a_worker_says_so():
    code, output = dedup("lookup", SIMPLEST, "a", "--set", "brokers=localhost:1", "--set", "web.port=1")
    assert code == 1
    assert "no worker answers at http://127.0.0.1:1" in output
