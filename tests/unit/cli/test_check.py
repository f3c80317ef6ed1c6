"""`check`, `describe`, `schema`, `try`, and how errors become sentences and exit codes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dedup.cli import main as entry
from dedup.errors import (
    AuthorMistake,
    BrokerUnavailable,
    InvariantBroken,
    SettingsError,
    StateIncompatible,
    TopologyError,
    VerificationFailed,
)
from dedup.quantities import instant

ROOT = Path(__file__).parents[3]
SIMPLEST = str(ROOT / "topologies" / "simplest.yaml")
SAMPLE = str(ROOT / "tests" / "data" / "sample.jsonl")
NOW = "--now=2024-01-01T12:00:00Z"


AVSC = '{"type":"record","name":"R","fields":[{"name":"id","type":"long"}]}'


def dedup(*arguments: str, given: str | bytes | None = None) -> tuple[int, str]:
    """Exit code and standard output; errors that main() would print stand after it."""
    result = CliRunner().invoke(entry.create_app(), list(arguments), input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", 1), f"{result.stdout}{result.exception}"
    return result.exit_code, result.output


def topology(tmp_path: Path, rule: str = "field: id", more: str = "", source: str = "topics: [c]") -> str:
    path = tmp_path / "t.yaml"
    text = f"dedup: 1\nname: t\nsource: {{{source}}}\ntracking_id: {{{rule}}}\nguard_period: 10s\n{more}\n"
    path.write_text(text, encoding="utf-8")
    return str(path)


def verdicts(path: str, *lines: str, options: tuple[str, ...] = ()) -> list[str]:
    code, output = dedup("try", path, "-", "--json", NOW, *options, given="\n".join(lines))
    assert code == 0, output
    return [f"{told['verdict']}: {told['reason']}" for told in map(json.loads, output.splitlines())]


class TestTry:
    def test_the_sample_is_explained_in_words(self):
        code, output = dedup("try", SIMPLEST, SAMPLE, NOW)
        assert code == 0
        assert output.splitlines() == [
            "line 1     unique      first of its ID at 2024-01-01T10:00:00Z; guarded until 2024-01-01T11:00:00Z",
            "line 2     unique      first of its ID at 2024-01-01T10:00:02Z; guarded until 2024-01-01T11:00:02Z",
            "line 3     duplicate   seen 2024-01-01T10:00:00Z in line 1, 5 s before; guarded until 2024-01-01T11:00:00Z",
            "line 4     unique      first of its ID at 2024-01-01T12:00:00Z; guarded until 2024-01-01T13:00:00Z",
            "line 5     unique      first of its ID at 2024-01-01T11:00:00Z; guarded until 2024-01-01T12:00:00Z",
            "line 6     late        2024-01-01T10:00:01Z is 1 h 59 min behind stream time, more than the grace of 1h, and its ID is not known",
            "line 7     duplicate   seen 2024-01-01T10:00:02Z in line 2, at the same time; guarded until 2024-01-01T11:00:02Z",
            "line 8     dead letter id_missing: there is no value at event_id",
            "line 9     dead letter time_ill_typed: the event time at ts is not a number",
            "line 10    dead letter not_json: the value is not JSON (character 58 of 62)",
            "line 11    dead letter future_time: event time 4070908800000 ms is 2366794800000 ms beyond the cap",
            "11 records: 4 dead letter, 2 duplicate, 1 late, 4 unique",
        ]

    def test_as_json_it_says_where_records_go(self):
        _code, output = dedup("try", SIMPLEST, SAMPLE, NOW, "--json")
        told = [json.loads(line) for line in output.splitlines()]
        assert told[0] == {
            "line": 1,
            "verdict": "unique",
            "reason": "first of its ID at 2024-01-01T10:00:00Z; guarded until 2024-01-01T11:00:00Z",
            "topic": "events.unique",
            "time": "2024-01-01T10:00:00Z",
        }
        assert [(each["verdict"], each["topic"]) for each in (told[2], told[5], told[7])] == [
            ("duplicate", None),
            ("late", "events.unique.late"),
            ("dead letter", "events.unique.dead-letter"),
        ]

    def test_lines_are_a_second_apart(self, tmp_path):
        path = topology(tmp_path)
        found = verdicts(path, *['{"id":1}'] * 11, options=("--time", "2024-01-01T00:00:05.5Z"))
        assert found[0] == "unique: first of its ID at 2024-01-01T00:00:05.500Z; guarded until 2024-01-01T00:00:15.500Z"
        assert found[9].startswith("duplicate: seen 2024-01-01T00:00:05.500Z in line 1, 9 s before")
        assert found[10].startswith("unique")

    def test_blank_lines_are_passed_over_and_counted(self, tmp_path):
        found = dedup("try", topology(tmp_path), "-", NOW, given='\n{"id":1}\r\n\n{"id":1}\n')[1].splitlines()
        assert [line[:22] for line in found] == [
            "line 2     unique     ",
            "line 4     duplicate  ",
            "2 records: 1 duplicate",
        ]

    @pytest.mark.parametrize(
        ("source", "given", "said"),
        [
            ("csv, columns: [id, b, c], delimiter: tab", "\t\t\na\tb\tc\n", ["1: id_missing", "2: unique"]),
            ("csv, columns: [id]", " \n\n\r\n  \r\nx", ["1: unique", "4: unique", "5: unique"]),
            (
                "csv, columns: [id, b], delimiter: tab",
                "a\t \r\nb\tc\r\r\na\tb",
                ["1: unique", "2: not_csv", "3: duplicate"],
            ),
            ("csv, columns: [id, b], delimiter: tab", "a\tb\r", ["1: not_csv"]),
            ("bytes", " \n  \n \n\n", ["1: unique", "2: unique", "3: duplicate"]),
            ("json", ' \n\t\n{"id":1}\r\r\n', ["3: unique"]),
        ],
    )
    def test_white_space_is_content_where_a_worker_takes_it_as_content(self, tmp_path, source, given, said):
        rule = "content: true" if source == "bytes" else "field: id"
        path = topology(tmp_path, rule, source=f"topics: [c], format: {source}")
        told = [json.loads(line) for line in dedup("try", path, "-", "--json", NOW, given=given)[1].splitlines()]
        found = [(each["line"], each["verdict"], each["reason"].partition(":")[0]) for each in told]
        assert [f"{line}: {why if verdict == 'dead letter' else verdict}" for line, verdict, why in found] == said

    def test_no_records(self, tmp_path):
        assert dedup("try", topology(tmp_path), "-", given="") == (0, "no records\n")

    def test_an_earlier_record_after_a_later_one(self, tmp_path):
        path = topology(tmp_path, more="event_time: {field: t, unit: s}")
        found = verdicts(path, '{"id":1,"t":100}', '{"id":1,"t":95}')
        assert (
            found[1]
            == "duplicate: seen 1970-01-01T00:01:40Z in line 1, 5 s after this one; guarded until 1970-01-01T00:01:50Z"
        )

    def test_an_extended_guard_period(self, tmp_path):
        path = topology(tmp_path, more="event_time: {field: t, unit: s}\nextend: true")
        found = verdicts(path, '{"id":1,"t":100}', '{"id":1,"t":109}', '{"id":1,"t":118}')
        assert [line[-20:] for line in found] == [
            "1970-01-01T00:01:50Z",
            "1970-01-01T00:01:59Z",
            "1970-01-01T00:02:08Z",
        ]
        assert found[2].startswith("duplicate")

    def test_a_clamped_time(self, tmp_path):
        path = topology(tmp_path, more="event_time: {field: t, unit: s}\nfuture: clamp")
        (found,) = verdicts(path, '{"id":1,"t":99999999999}')
        assert found.startswith("unique: time set to 2024-01-01T13:00:00Z; first of its ID at 2024-01-01T13:00:00Z")

    def test_conflicts(self, tmp_path):
        path = topology(tmp_path, more="conflicts: {topic: x, exclude: [at]}")
        found = verdicts(path, '{"id":1,"a":1,"at":1}', '{"id":1,"a":1,"at":2}', '{"id":1,"a":2}')
        assert [line.split(":")[0] for line in found] == ["unique", "duplicate", "conflict"]
        assert found[2].startswith("conflict: another payload; seen 2024-01-01T00:00:00Z in line 1, 2 s before")

    @pytest.mark.parametrize(
        ("more", "topic"), [("", None), ("duplicates: d", "d"), ("duplicates: d\non_conflict: duplicate", "d")]
    )
    def test_conflicts_without_a_topic_go_where_duplicates_go(self, tmp_path, more, topic):
        path = topology(tmp_path, more=f"conflicts: {{exclude: [at]}}\n{more}")
        lines = '{"id":1,"a":1,"at":1}\n{"id":1,"a":1,"at":2}\n{"id":1,"a":2}\n'
        told = [json.loads(line) for line in dedup("try", path, "-", NOW, "--json", given=lines)[1].splitlines()]
        assert [(each["verdict"], each["topic"]) for each in told[1:]] == [("duplicate", topic), ("conflict", topic)]

    def test_what_is_forwarded_outside_the_guarantee(self, tmp_path):
        path = topology(tmp_path, "field: id, missing: forward", "on_conflict: forward\noutput: {topic: o}")
        found = verdicts(
            path,
            '{"value":{"id":1,"a":1}}',
            '{"value":{"id":1,"a":2}}',
            '{"value":{}}',
            '{"value":null}',
            options=("--envelope",),
        )
        outside = "; outside the guarantee, marked by dedup-verdict"
        assert found[1:] == [
            f"forwarded: its ID is known with another payload, and the topology says on_conflict: forward{outside}",
            f"forwarded: it has no ID, and the topology says missing: forward{outside}",
            f"forwarded: its value is null, and the topology says tombstones: forward{outside}",
        ]

    @staticmethod
    def with_flow(tmp_path: Path, body: str, more: str = "") -> str:
        name = f"flow_of_try_{tmp_path.name.replace('-', '_')}"
        code = f"from dedup import Flow\nflow = Flow()\n@flow.on_unique\ndef each(record):\n    {body}\n"
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        then = f"then: {{flow: '{name}:flow'{more}}}"
        return topology(tmp_path, "field: id, missing: forward", f"output: {{topic: o}}\nroutes: [r]\n{then}")

    def test_the_flow_runs_only_where_its_code_is_allowed(self, tmp_path):
        path = self.with_flow(tmp_path, "raise SystemExit('it ran')")
        code, output = dedup("try", path, "-", NOW, given='{"id":1}\n')
        assert (code, "it ran" in output) == (0, False)
        assert ":flow is not run, so the records that it yields are not shown; to run it, pass --allow-code" in output
        assert "--allow-code" not in dedup("try", path, "-", NOW, "--allow-code", given='{"id":1}\n')[1]

    def test_what_the_flow_yields_is_shown(self, tmp_path):
        path = self.with_flow(
            tmp_path,
            "yield from [record.to('r', key='k', headers={'h': b'\\xff'}), record.to(value=None)]"
            " if record.json.get('id') != 2 else []",
        )
        lines = '{"id":1}\n{"id":1}\n{"id":2}\n{}\n'
        output = dedup("try", path, "-", NOW, "--allow-code", given=lines)[1].splitlines()
        assert [line.strip() for line in output if not line.startswith("line")] == [
            'to r: key k, headers h=\\xff, value {"id":1}',
            "to o: value null",
            "filtered: the flow yields nothing",
            "to r: key k, headers h=\\xff, value {}",
            "to o: value null",
            "4 records: 1 duplicate, 1 forwarded, 2 unique",
        ]
        told = [
            json.loads(each)
            for each in dedup("try", path, "-", NOW, "--allow-code", "--json", given=lines)[1].splitlines()
        ]
        assert [len(each["yielded"]) if "yielded" in each else None for each in told] == [2, None, 0, 2]
        assert told[0]["yielded"][0] == {"topic": "r", "key": "k", "value": '{"id":1}', "headers": [["h", "\\xff"]]}

    def test_a_record_at_which_the_flow_fails_is_a_dead_letter_but_no_sighting(self, tmp_path):
        body = (
            "if record.json.get('bad'): 1 / 0\n    yield record.to('elsewhere') if record.json['id'] == 2 else record"
        )
        path = self.with_flow(tmp_path, body)
        given = ('{"id":1,"bad":1}', '{"id":1}', '{"id":2}')
        found = verdicts(path, *given, options=("--allow-code",))
        assert found[0].startswith("dead letter: flow_failed: ZeroDivisionError")
        assert found[1].startswith("unique: ")
        assert found[2].startswith("dead letter: flow_failed: the flow sends to 'elsewhere'")

    def test_a_flow_that_stops_the_worker_stops_there(self, tmp_path):
        path = self.with_flow(tmp_path, "1 / 0", ", on_error: stop")
        code, output = dedup("try", path, "-", NOW, "--allow-code", given='{"id":1}\n{"id":2}\n')
        assert (code, "line 1: the flow failed: ZeroDivisionError" in output) == (1, True)
        assert "The topology says `on_error: stop`" in output

    def test_the_flow_sees_what_a_workers_flow_sees(self, tmp_path):
        body = "yield record.to(value=f'{record.topic} {record.timestamp_ms} {record.verdict}')"
        path = self.with_flow(tmp_path, body)
        lines = ['{"value":{"id":1},"timestamp":1000}', '{"value":{},"timestamp":2000}', '{"value":null}']
        output = dedup("try", path, "-", NOW, "--allow-code", "--envelope", given="\n".join(lines))[1]
        values = [line.partition("value ")[2] for line in output.splitlines() if line.startswith("   ")]
        assert values == ["o 1000 unique", "o 2000 missing_id", "o 1704067202000 tombstone"]

    def test_an_id_function_runs_as_in_a_worker(self):
        linked = str(ROOT / "topologies" / "linked.yaml")
        lines = ('{"url":"https://shop.example/orders/17"}', '{"url":"https://a.example/17/"}', '{"url":7}', "{}")
        found = verdicts(linked, *lines)
        assert [each.split(":")[0] for each in found] == ["unique", "duplicate", "dead letter", "dead letter"]
        assert found[2].startswith("dead letter: id_function_failed: ")

    def test_a_policy_fail_stops_there(self, tmp_path):
        path = topology(tmp_path, "field: id, missing: fail")
        code, output = dedup("try", path, "-", NOW, given='{"id":1}\n{}\n{"id":2}\n')
        assert code == 1
        assert output.startswith("line 1     unique")
        assert "`missing: fail`" in output
        assert "line 3" not in output

    @pytest.mark.parametrize("fmt", ["json", "json_schema"])
    def test_members_of_keys(self, tmp_path, fmt):
        path = topology(tmp_path, "key: id", source=f"topics: [c], format: bytes, key_format: {fmt}")
        framed = base64.b64encode((b"" if fmt == "json" else b"\0\0\0\0\7") + b'{"n":1,"id":"a"}').decode()
        lines = [json.dumps({"key": '{"id":"a"}'}), json.dumps({"key_base64": framed}), '{"key":"a"}', "{}"]
        found = verdicts(path, *lines, options=("--envelope",))
        assert [line.split(":")[0] for line in found] == ["unique", "duplicate", "dead letter", "dead letter"]
        assert found[2].startswith("dead letter: not_json: the record's key is not JSON")
        code, output = dedup("try", path, "--envelope", given='{"key":"a","key_base64":"YQ=="}')
        assert (code, "it has both key and key_base64" in output) == (2, True)

    def test_a_schema_id_in_the_header_of_a_key(self, tmp_path):
        path = topology(tmp_path, "key: id", source="topics: [c], format: bytes, key_format: json_schema")
        line = json.dumps({"key": '{"id":"a"}', "headers": {"__key_schema_id": "\0\0\0\0\7"}})
        assert verdicts(path, line, options=("--envelope",))[0].startswith("unique")

    def test_a_binary_key_is_written_in_base64(self, tmp_path):
        path = topology(tmp_path, "key: id", source="topics: [c], format: bytes, key_format: msgpack")
        found = verdicts(path, *['{"key_base64":"gaJpZAc="}'] * 2, options=("--envelope",))
        assert [line.split(":")[0] for line in found] == ["unique", "duplicate"]
        code, output = dedup("try", path, "--envelope", given='{"key":"a"}')
        assert (code, "keys of format msgpack, so the key must be key_base64" in output) == (2, True)

    def test_a_bare_value_is_no_envelope_of_a_null(self, tmp_path):
        path = topology(tmp_path)
        code, output = dedup("try", path, "--envelope", NOW, given='{"value":{"id":"a"}}\n{"id":"a","at":1}\n')
        assert code == 2
        assert "standard input:2:1: is not an envelope (it has no member value, key, headers, timestamp" in output
        assert (
            verdicts(path, "{}", '{"value":null,"offset":7}', options=("--envelope",))
            == [
                (
                    "forwarded: its value is null, and the topology says tombstones: forward; outside the guarantee, marked by "
                    "dedup-verdict"
                )
            ]
            * 2
        )

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ('{"value":{"id":"a"},"timestamp_ms":1}', 'unknown member "timestamp_ms"; did you mean "timestamp"?'),
            (
                '{"topic":"in","partition":0,"offset":7,"ts":1,"key":null,"payload":"1"}',
                'unknown member "ts"; the valid',
            ),
        ],
    )
    def test_an_envelope_with_an_unknown_member_is_refused(self, tmp_path, line, says):
        """Was: judged without it, so the record of `kcat -J` had no value and the time of its line."""
        code, output = dedup("try", topology(tmp_path), "--envelope", NOW, given=line)
        assert code == 2
        assert f"standard input:1:1: is not an envelope (it has the {says}" in output

    def test_envelopes_have_keys_headers_and_times(self, tmp_path):
        by_key = topology(tmp_path, "key: true")
        lines = ['{"key":"k","value":"x","timestamp":1000}', '{"key":"k","value":null,"timestamp":2000}', '{"value":1}']
        found = verdicts(by_key, *lines, options=("--envelope",))
        assert [line.split(":")[0] for line in found] == ["unique", "duplicate", "dead letter"]
        by_header = topology(tmp_path, "header: h")
        lines = ['{"headers":{"h":"1"}}', '{"headers":{"h":"1"},"value":{"a":1}}', '{"headers":{"g":"1"}}']
        found = verdicts(by_header, *lines, options=("--envelope",))
        assert [line.split(":")[0] for line in found] == ["unique", "duplicate", "dead letter"]

    def test_values_keep_their_bytes(self, tmp_path):
        path = topology(tmp_path, "content: true")
        found = verdicts(path, '{"value":{"a": 1}}', '{"value":{"a":1}}', '{"value":{"a": 1}}', options=("--envelope",))
        assert [line.split(":")[0] for line in found] == ["unique", "unique", "duplicate"]

    @pytest.mark.parametrize("schema_id", ["auto", "header", "prefix"])
    def test_values_get_their_framing_unless_their_bytes_are_given(self, tmp_path, schema_id):
        path = topology(tmp_path, source=f"topics: [c], format: json_schema, schema_id: {schema_id}")
        assert [each.split(":")[0] for each in verdicts(path, '{"id":1}', '{"id": 1}')] == ["unique", "duplicate"]
        lines = ['{"value":{"id":1}}', '{"value_base64":"MA=="}', '{"value":null}']
        found = verdicts(path, *lines, options=("--envelope",))
        code = "schema_id_missing" if schema_id == "header" else "wrong_magic_byte"
        assert found[0].startswith("unique")
        assert found[1].startswith(f"dead letter: {code}: ")
        assert found[2].startswith("forwarded: its value is null")
        if schema_id != "prefix":
            lines = ['{"value":{"id":1},"headers":{"__value_schema_id":"\\u0000\\u0000\\u0000\\u0000"}}']
            assert verdicts(path, *lines, options=("--envelope",))[0].startswith("dead letter: bad_schema_id: ")

    def test_avro_is_given_as_base64(self, tmp_path):
        (tmp_path / "r.avsc").write_text(AVSC, encoding="utf-8")
        path = topology(tmp_path, source="topics: [c], format: avro, schema_id: none, schema: r.avsc")
        found = verdicts(path, *['{"value_base64":"Ag=="}'] * 2, '{"value_base64":"AgI="}', options=("--envelope",))
        assert [each.split(":")[0] for each in found] == ["unique", "duplicate", "dead letter"]
        assert found[2].startswith("dead letter: not_avro: the value is not a record of the schema")
        assert "the value must be value_base64" in dedup("try", path, "--envelope", given='{"value":{"id":1}}')[1]
        code, output = dedup("try", path, given='{"id":1}')
        assert (code, output.split(";")[0]) == (2, "--envelope: is needed, because the topology reads avro")

    def test_protobuf_is_given_as_base64(self, tmp_path):
        (tmp_path / "r.proto").write_text("message R { required int64 id = 1; }", encoding="utf-8")
        path = topology(tmp_path, source="topics: [c], format: protobuf, schema_id: none, schema: r.proto")
        found = verdicts(path, *['{"value_base64":"CAc="}'] * 2, '{"value_base64":"CA=="}', options=("--envelope",))
        assert [each.split(":")[0] for each in found] == ["unique", "duplicate", "dead letter"]
        assert found[2].startswith("dead letter: not_protobuf: the value is not a message of the schema")
        assert "the value must be value_base64" in dedup("try", path, "--envelope", given='{"value":{"id":1}}')[1]
        code, output = dedup("try", path, given='{"id":1}')
        assert (code, output.split(";")[0]) == (2, "--envelope: is needed, because the topology reads protobuf")

    def test_message_pack_is_given_as_base64(self, tmp_path):
        path = topology(tmp_path, source="topics: [c], format: msgpack")
        found = verdicts(path, *['{"value_base64":"gaJpZAc="}'] * 2, '{"value_base64":"gaJp"}', options=("--envelope",))
        assert [each.split(":")[0] for each in found] == ["unique", "duplicate", "dead letter"]
        assert found[2].startswith("dead letter: not_msgpack: the value is not MessagePack: it ends inside")
        assert "the value must be value_base64" in dedup("try", path, "--envelope", given='{"value":{"id":1}}')[1]
        code, output = dedup("try", path, given='{"id":1}')
        assert (code, output.split(";")[0]) == (2, "--envelope: is needed, because the topology reads msgpack")

    def test_csv_is_text(self, tmp_path):
        path = topology(tmp_path, source="topics: [c], format: csv, columns: [id, at], delimiter: semicolon")
        found = verdicts(path, "a;1", "a;2", '"b;c";3', "a", ";4")
        said = ["unique: ", "duplicate: ", "unique: ", "dead letter: not_csv: ", "dead letter: id_missing: "]
        assert all(each.startswith(begin) for each, begin in zip(found, said, strict=True)), found
        lines = ['{"value":"a;1"}', '{"value":"a;2\\n"}', '{"value_base64":"YTs3"}']
        found = verdicts(path, *lines, options=("--envelope",))
        assert [each.split(":")[0] for each in found] == ["unique", "duplicate", "duplicate"]
        assert "is not an envelope (Expected `str`" in dedup("try", path, "--envelope", given='{"value":{"id":1}}')[1]

    @pytest.mark.parametrize("line", ["{", "[]", '{"key":1}', '{"timestamp":"x"}', '{"value":1,"value_base64":"MA=="}'])
    def test_a_line_that_is_no_envelope(self, tmp_path, line):
        code, output = dedup("try", topology(tmp_path), "-", "--envelope", given=f'{{"value":{{"id":1}}}}\n{line}\n')
        assert code == 2
        assert "standard input:2:1: is not an envelope (" in output

    @pytest.mark.parametrize("option", ["--now", "--time"])
    def test_a_time_that_is_none(self, option):
        assert dedup("try", SIMPLEST, SAMPLE, option, "noon") == (
            2,
            f'{option}: "noon" is not a time; write for example 2024-01-01T00:00:00Z',
        )

    def test_files_that_are_not_there(self, tmp_path):
        gone = str(tmp_path / "gone")
        assert dedup("try", gone, SAMPLE) == (
            2,
            f"{gone}: cannot be read: No such file or directory; name a topology file",
        )
        assert dedup("try", SIMPLEST, gone) == (2, f"{gone}: cannot be read: No such file or directory; name a file")


class TestCheck:
    def test_every_file_of_ours(self):
        files = sorted(str(path) for path in (ROOT / "topologies").glob("*.yaml"))
        code, output = dedup("check", *files)
        assert code == 0
        assert [
            line for line in output.splitlines() if ": ok" in line and line.split(":")[0] in files
        ].__len__() == len(files)

    def test_mistakes_of_several_files_at_once(self, tmp_path):
        first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
        first.write_text("dedup: 2", encoding="utf-8")
        second.write_text("nmae: x", encoding="utf-8")
        code, output = dedup("check", str(first), SIMPLEST, str(second))
        assert code == 2
        assert f'{first}:1:8: dedup: "2" is not a version this program reads; write 1' in output
        assert f'{second}:1:1: unknown key "nmae"; did you mean "name"?' in output
        assert f"{SIMPLEST}: ok, 1 warning" in output

    def test_an_error_of_the_lint_is_one(self, tmp_path):
        code, output = dedup("check", topology(tmp_path, more="grace: 30d"))
        assert code == 2
        assert "[changelog_record_too_large]" in output

    def test_a_finding_about_a_member_has_its_place(self, tmp_path):
        schema = {"type": "record", "name": "R", "fields": [{"name": "id", "type": ["long", "float"]}]}
        (tmp_path / "r.avsc").write_text(json.dumps(schema), encoding="utf-8")
        path = topology(tmp_path, source="topics: [c], format: avro, schema_id: none, schema: r.avsc")
        code, output = dedup("check", path)
        assert code == 0
        assert f"{path}:4:22: warning: tracking_id: id may also have the type float" in output
        ((found,),) = (
            [one for one in each["findings"] if one["code"] == "type_sometimes_refused"]
            for each in json.loads(dedup("check", "--json", path)[1])
        )
        assert found["place"] == f"{path}:4:22"

    def test_as_json(self, tmp_path):
        bad = tmp_path / "a.yaml"
        bad.write_text("dedup: 2", encoding="utf-8")
        code, output = dedup("check", "--json", SIMPLEST, str(bad))
        assert code == 2
        good, found = json.loads(output)
        assert (good["ok"], [each["code"] for each in good["findings"]]) == (True, ["tombstones_forwarded"])
        assert good["findings"][0]["place"] == SIMPLEST
        assert (found["ok"], found["problems"][-1]["place"]) == (False, f"{bad}:1:8")

    def test_a_file_that_is_no_text(self, tmp_path):
        path = tmp_path / "a.yaml"
        path.write_bytes(b"dedup: \xff")
        assert dedup("check", str(path)) == (2, f"{path}: is not UTF-8 at byte 7; save it as UTF-8")


class TestDescribeAndSchema:
    def test_the_four_forms(self):
        assert dedup("describe", SIMPLEST)[1].startswith("topology simplest\n")
        assert dedup("describe", SIMPLEST, "--dot")[1].startswith('digraph "simplest" {')
        assert dedup("describe", SIMPLEST, "--svg")[1].startswith("<svg ")
        assert json.loads(dedup("describe", SIMPLEST, "--json")[1])["direct"] is True

    def test_two_forms_at_once_are_a_mistake(self):
        assert dedup("describe", SIMPLEST, "--dot", "--svg")[0] == 2

    @pytest.mark.parametrize(
        ("of", "key"), [((), "tracking_id"), (("topology",), "tracking_id"), (("config",), "brokers")]
    )
    def test_schemas(self, of, key):
        code, output = dedup("schema", *of)
        assert code == 0
        assert key in json.loads(output)["properties"]


class TestMain:
    @pytest.mark.parametrize(
        ("error", "code"),
        [(StateIncompatible("x y z"), 3), (VerificationFailed("x y z"), 4), (BrokerUnavailable("x y z"), 5)],
    )
    def test_errors_become_a_sentence_and_an_exit_code(self, monkeypatch, capsys, error, code):
        assert self.run(monkeypatch, raises=error) == code
        assert capsys.readouterr().err == "x y z\n"

    @pytest.mark.parametrize("mistake", [AuthorMistake, TopologyError, SettingsError])
    def test_a_mistake_lists_at_least_one_problem(self, mistake):
        with pytest.raises(InvariantBroken, match=mistake.__name__):
            mistake([])

    def test_an_interruption_is_130(self, monkeypatch):
        assert self.run(monkeypatch, raises=KeyboardInterrupt()) == 130

    def test_the_unexpected_is_not_hidden(self, monkeypatch):
        with pytest.raises(ZeroDivisionError):
            self.run(monkeypatch, raises=ZeroDivisionError())

    def test_usage_errors_are_2(self):
        assert dedup("try")[0] == 2
        assert dedup("tyr")[0] == 2

    def run(self, monkeypatch, *, raises: BaseException) -> int:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.command()
        def fail() -> None:
            raise raises

        monkeypatch.setattr(entry, "create_app", lambda: app)
        monkeypatch.setattr(sys, "argv", ["dedup"])
        with pytest.raises(SystemExit) as stopped:
            entry.main()
        return stopped.value.code

    def test_every_command_has_help_with_an_example(self):
        for command in entry.create_app().registered_commands:
            assert command.name is not None
            code, output = dedup(command.name, "--help")
            assert code == 0
            assert "Example" in output, command.name

    def test_help_loads_no_heavy_library(self):
        program = "import sys; from dedup.cli.main import create_app; create_app(); print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        loaded = {name.partition(".")[0] for name in done.stdout.split()}
        assert not loaded & {"faust", "aiokafka", "confluent_kafka", "rocksdict", "pydantic", "numpy", "jgo", "ruamel"}


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [(0, "1970-01-01T00:00:00Z"), (1_500, "1970-01-01T00:00:01.500Z"), (-1, "-1 ms"), (1 << 60, f"{1 << 60} ms")],
)
def test_instants(time_ms, text):
    assert instant(time_ms) == text


FLOW = """
from dedup import Flow
flow = Flow()

@flow.on_unique
def route(record):
    yield record.to(headers={"country": record.json["country"]})
"""


def test_a_config_file_of_try_that_is_not_there_is_named(tmp_path):
    """Was: ignored if the topology needs no registry."""
    code, output = dedup("try", topology(tmp_path), "--config", str(tmp_path / "none.yaml"), given="")
    assert (code, "none.yaml: cannot be read" in output) == (2, True)


class TestFlow:
    def made(self, tmp_path: Path, code: str) -> tuple[str, str]:
        name = f"checked_{abs(hash((str(tmp_path), code)))}"
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        samples = tmp_path / "samples.jsonl"
        samples.write_text('{"country": "DE"}\n{}\n', encoding="utf-8")
        return topology(tmp_path, more=f"output: {{topic: out}}\nthen: {name}:flow"), str(samples)

    def test_check_runs_no_code_unless_it_is_allowed(self, tmp_path):
        path, _ = self.made(tmp_path, "raise ValueError('it was imported')")
        assert dedup("check", path)[0] == 0
        assert dedup("describe", path)[0] == 0
        code, output = dedup("check", path, "--allow-code")
        assert code == 2
        assert "cannot be imported: ValueError: it was imported" in output

    def test_an_id_function_is_imported_and_tried_only_if_that_is_allowed(self, tmp_path):
        name = f"checked_ids_{abs(hash(str(tmp_path)))}"
        code = "import json\ndef own(key, value, headers):\n    return json.loads(value)['country']\n"
        (tmp_path / f"{name}.py").write_text(f"{code}\nraise ValueError('it was imported')", encoding="utf-8")
        path = topology(tmp_path, f"python: {name}:own", "output: {topic: out}")
        assert dedup("check", path)[0] == 0
        code_of_describe, output = dedup("describe", path)
        assert (code_of_describe, f"ID function   {name}:own, source digest" in output) == (0, True)
        code_of_check, output = dedup("check", path, "--allow-code")
        assert (code_of_check, "ValueError: it was imported" in output) == (2, True)
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        samples = tmp_path / "samples.jsonl"
        samples.write_text('{"country": "DE"}\n{}\n', encoding="utf-8")
        code_of_check, output = dedup("check", path, "--allow-code", "--samples", str(samples))
        assert code_of_check == 0, output
        assert f"the function {name}:own fails at 1 of 2 samples, first with: {name}:own raised KeyError" in output
        code_of_chaos, output = dedup("chaos", path)
        assert (code_of_chaos, "cannot make records for an ID function" in output) == (2, True), output

    def test_chaos_refuses_ids_from_members_of_keys(self, tmp_path):
        path = topology(
            tmp_path, "parts: [{key: id}, {header: h}]", "output: {topic: out}", "topics: [c], key_format: json"
        )
        code, output = dedup("chaos", path)
        assert (code, "dedup chaos makes no keys with members" in output) == (2, True), output

    def test_what_the_code_writes_past_python_is_not_mixed_with_verdicts(self, tmp_path, capfd):
        """Was: a child process of the flow, or `os.write`, wrote into the JSON of `dedup try --json`."""
        path, samples = self.made(
            tmp_path, FLOW.replace("    yield", "    import os; os.write(1, b'noise')\n    yield")
        )
        Path(samples).write_text('{"id": "a", "country": "DE"}\n{"id": "b", "country": "FR"}\n', encoding="utf-8")
        code, output = dedup("try", path, samples, "--json", "--allow-code")
        assert (code, len(output.splitlines())) == (0, 2)
        assert capfd.readouterr() == ("", "noisenoise")

    def test_samples_need_code(self, tmp_path):
        path, samples = self.made(tmp_path, FLOW)
        assert dedup("check", path, "--samples", samples)[0] == 2
        assert dedup("check", path, "--allow-code")[0] == 0

    def test_samples_show_what_fails_and_what_is_not_deterministic(self, tmp_path):
        path, samples = self.made(tmp_path, FLOW)
        code, output = dedup("check", path, "--allow-code", "--samples", samples)
        assert code == 0
        assert "the flow fails at 1 of 2 samples, first with: KeyError: 'country' [flow_fails]" in output
        path, samples = self.made(tmp_path, FLOW.replace('record.json["country"]', "str(hash('a'))"))
        code, output = dedup("check", path, "--allow-code", "--samples", samples, "--json")
        assert code == 2
        assert [each["code"] for each in json.loads(output)[0]["findings"]][-1] == "flow_not_deterministic"

    @pytest.mark.parametrize("fmt", ["msgpack", "cbor", "avro", "protobuf", "json"])
    def test_samples_may_be_whole_records(self, tmp_path, fmt):
        self.made(tmp_path, FLOW)
        (name,) = (path.stem for path in tmp_path.glob("*.py"))
        (tmp_path / f"{name}.py").write_text(FLOW.replace('record.json["country"]', "str(record.key + record.value)"))
        more = f"output: {{topic: out}}\nthen: {name}:flow"
        path = topology(tmp_path, more=more, source=f"topics: [c], format: {fmt}")
        samples = tmp_path / "records.jsonl"
        samples.write_text('{"key": "k", "value_base64": "gaJpZAc="}\n{"value_base64": "gaJpZAc="}\n', encoding="utf-8")
        options = ("--allow-code", "--samples", str(samples))
        code, output = dedup("check", path, *options, "--envelope")
        assert code == 0, output
        assert "the flow fails at 1 of 2 samples, first with: TypeError" in output
        if fmt != "json":
            assert dedup("check", path, *options)[1].startswith("--envelope: is needed")
        samples.write_text("[]\n", encoding="utf-8")
        code, output = dedup("check", path, *options, "--envelope")
        assert (code, "records.jsonl:1:1: is not an envelope" in output) == (2, True)

    def test_envelopes_need_samples(self, tmp_path):
        path, _ = self.made(tmp_path, FLOW)
        code, output = dedup("check", path, "--allow-code", "--envelope")
        assert (code, "add --samples" in output) == (2, True)

    def test_spark_and_chaos_refuse_a_flow(self, tmp_path):
        path, _ = self.made(tmp_path, FLOW)
        code, output = dedup("spark", "backfill", path, "--input", "x", "--out", "y")
        assert (code, "no Spark job runs a flow" in output) == (2, True)
        code, output = dedup("chaos", path)
        assert (code, "test a copy without `then`" in output) == (2, True)
