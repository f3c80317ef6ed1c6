"""Every kind of mistake in a topology file: what is said, and at which line and column."""

from __future__ import annotations

from typing import get_args

import pytest

from dedup.core.formats import Format
from dedup.errors import TopologyError
from dedup.topology.parse import parse

MINIMAL = """\
dedup: 1
name: clicks
source:
  topics: [clicks]
tracking_id:
  field: id
guard_period: 24h
"""

FORMATS = " | ".join(get_args(Format))


def problems(text: str) -> list[str]:
    with pytest.raises(TopologyError) as caught:
        parse(text, name="clicks.yaml")
    return str(caught.value).splitlines()


def with_line(line: str) -> list[str]:
    """The problems of the least file with an eighth line."""
    return problems(f"{MINIMAL}{line}\n")


def test_the_least_file_has_none():
    assert parse(MINIMAL, name="clicks.yaml").name == "clicks"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("grase: 24h", '8:1: unknown key "grase"; did you mean "grace"?'),
        (
            "zzz: 1",
            '8:1: unknown key "zzz"; the valid names are conflicts, dead_letter, dedup, duplicates, event_time, extend, extend_at_most, future, grace, guard_period, idle_after, late, max_clock_skew, name, on_conflict, output, routes, sink, source, state, then, tracking_id, transactions',
        ),
        ("grace: 24", '8:8: grace: "24" has no unit; write "24h" or "24m"'),
        ("grace: 500", '8:8: grace: "500" has no unit; write "500ms" or "500s"'),
        ("grace: 24 h", '8:8: grace: "24 h" contains a space; write "24h"'),
        ("grace: 24hours", '8:8: grace: "24hours" has the unknown unit "hours"; the units are ms, s, m, h, d'),
        ("grace: 24H", '8:8: grace: "24H" has the unknown unit "H"; write "24h"'),
        ("grace: 1.5h", '8:8: grace: "1.5h" is not a whole number and a unit; write for example "15s"'),
        ("grace: -1h", '8:8: grace: "-1h" is not a whole number and a unit; write for example "15s"'),
        ("grace: 99999999d", '8:8: grace: "99999999d" is longer than 100 years; write at most "36500d"'),
        ("grace: [1h]", "8:8: grace: must be text, not a list; write the text alone"),
        ("grace: true", '8:8: grace: "true" is not a whole number and a unit; write for example "15s"'),
        ("grace: 1.5", '8:8: grace: "1.5" is not a whole number and a unit; write for example "15s"'),
        ("late: [a]", "8:7: late: must be text, not a list; write the text alone"),
        ("late: {topic: a}", "8:7: late: must be text, not a mapping; write the text alone"),
        ("duplicates:\n  topic: a", "9:3: duplicates: must be text, not a mapping; write the text alone"),
        (
            "duplicates: true",
            '8:13: duplicates: "true" must be text, not true or false; if this word is a name, put it in quotes',
        ),
        ("dead_letter: 12", '8:14: dead_letter: "12" must be text; put it in quotes'),
        ("then: [a:b]", "8:7: then: must be text, not a list; write the text alone"),
        ("extend: 1", '8:9: extend: "1" must be true or false'),
        ('extend: "true"', '8:9: extend: "true" must be true or false'),
        ("extend: {extend: true}", "8:9: extend: must be true or false"),
        ("idle_after: 0s", '8:13: idle_after: "0s" must be longer than zero'),
        ("extend_at_most: 0ms", '8:17: extend_at_most: "0ms" must be longer than zero'),
        ("future: clam", '8:9: future: "clam" is not one of dead_letter | clamp; did you mean "clamp"?'),
        ("on_conflict: 7", '8:14: on_conflict: "7" is not one of duplicate | forward | fail'),
        ("event_time: created", '8:13: event_time: "created" is not one of record | arrival'),
        ("event_time: {field: created}", '8:1: the key "unit" is missing in event_time'),
        (
            "event_time: {field: created, unit: iso8601}",
            '8:36: event_time.unit: "iso8601" is not one of rfc3339 | s | ms | us | timestamp; did you mean "rfc3339"?',
        ),
        (
            "event_time: {field: created, unit: sec}",
            '8:36: event_time.unit: "sec" is not one of rfc3339 | s | ms | us | timestamp',
        ),
        (
            "event_time: {field: a..b, unit: ms}",
            '8:21: event_time.field: path a..b: a member name is missing at position 3; quote odd names: a["b.c"]',
        ),
        ("output: clicks.unique", '8:9: output: "clicks.unique" must be a mapping of keys to values'),
        ("output: {topics: a}", '8:1: the key "topic" is missing in output'),
        (
            "output: {topic: a b}",
            '8:17: output.topic: "a b" is not a valid topic name; Kafka allows 1 to 249 of a-z A-Z 0-9 "." "_" "-"',
        ),
        (
            "output: {topic: .}",
            '8:17: output.topic: "." is not a valid topic name; Kafka allows 1 to 249 of a-z A-Z 0-9 "." "_" "-"',
        ),
        ("output: {topic: o, headers: maybe}", '8:29: output.headers: "maybe" must be true or false'),
        ("output: {topic: clicks}", '8:17: output.topic: "clicks" is also a source topic; every topic has one role'),
        ("duplicates: clicks", '8:13: duplicates: "clicks" is also a source topic; every topic has one role'),
        (
            "duplicates: clicks.changelog",
            '8:13: duplicates: "clicks.changelog" is also the changelog topic; every topic has one role',
        ),
        (
            "duplicates: clicks_repartition",
            '8:13: duplicates: "clicks_repartition" is also the repartition topic; every topic has one role',
        ),
        (
            "sink: {topic: o, url: 'sqlite:///f', table: t, columns: {at: a, AT: b}}",
            '8:65: sink.columns.AT: SQLite ignores case, so this is also the column "at"; choose another name',
        ),
        (
            "sink: {topic: o, url: 'sqlite:///f', table: t, columns: {Tracking_ID: b}}",
            (
                "8:58: sink.columns.Tracking_ID: SQLite ignores case, so this is also the column "
                '"tracking_id"; choose another name'
            ),
        ),
        (
            "output: {topic: clicks.layout}",
            '8:17: output.topic: "clicks.layout" is also the layout topic; every topic has one role',
        ),
        (
            "dead_letter: clicks.late",
            '8:14: dead_letter: "clicks.late" is also the topic of late records; every topic has one role',
        ),
        (
            "conflicts: {topic: clicks}",
            '8:20: conflicts.topic: "clicks" is also a source topic; every topic has one role',
        ),
        (
            "conflicts: {exclude: [a.]}",
            '8:23: conflicts.exclude[0]: path a.: a member name is missing at position 3; quote odd names: a["b.c"]',
        ),
        (
            "late: dr op",
            '8:7: late: "dr op" is not a valid topic name; Kafka allows 1 to 249 of a-z A-Z 0-9 "." "_" "-"',
        ),
        ("late:", "8:1: late: has no value; write one, or leave the key out"),
        ("output: null", "8:1: output: has no value; write one, or leave the key out"),
        ("routes: [a, null]", "8:13: routes[1]: has no value; write one, or leave the item out"),
        ("routes: [a, ~]", "8:13: routes[1]: has no value; write one, or leave the item out"),
        ("routes:\n- a\n-\n- b", "10:2: routes[1]: has no value; write one, or leave the item out"),
        (
            "conflicts: {exclude: [a, null]}",
            "8:26: conflicts.exclude[1]: has no value; write one, or leave the item out",
        ),
        ("transactions: {partitions: 0}", '8:28: transactions.partitions: "0" must be auto, or 1 to 256'),
        ("transactions: {partitions: all}", '8:28: transactions.partitions: "all" must be auto, or 1 to 256'),
        ("transactions: {partitions: true}", '8:28: transactions.partitions: "True" must be auto, or 1 to 256'),
        ("state: {standby_replicas: 11}", '8:27: state.standby_replicas: "11" must be 0 to 10'),
        ("state: {standby_replicas: two}", '8:27: state.standby_replicas: "two" must be a whole number'),
        (
            "state: {max_bytes_per_partition: 20GB}",
            '8:34: state.max_bytes_per_partition: "20GB" has the unknown unit "GB"; the units are B, KiB, MiB, GiB, TiB',
        ),
        ("state: {max_bytes_per_partition: 0B}", '8:34: state.max_bytes_per_partition: "0B" must be more than zero'),
        (
            "state: {max_bytes_per_partition: 1024}",
            '8:34: state.max_bytes_per_partition: "1024" has no unit; write "1024GiB" or "1024MiB"',
        ),
        ("guard_period: 1h", '8:1: the key "guard_period" is repeated; it is already on line 7'),
        (
            "late: *x",
            '8:7: without quotes, "*x" is an alias, which is not allowed; put the text in quotes, or write the value out',
        ),
        (
            "late: !!python/name:os.system x",
            "8:7: the tag tag:yaml.org,2002:python/name:os.system is not allowed; write the plain value",
        ),
        ("? [a]\n: b", "8:3: a key must be a name"),
        (
            "late: [a",
            "8:7: is not YAML here: expected ',' or ']', but got '<stream end>'; close the bracket that begins here",
        ),
        (
            "late: {a: b\nextend: true",
            "8:7: is not YAML here: expected ',' or '}', but got ':'; close the brace that begins here",
        ),
        ('late: "a', "8:7: is not YAML here: found unexpected end of stream; close the quote that begins here"),
        (
            "late: 'a\nextend: true\n",
            "8:7: is not YAML here: found unexpected end of stream; close the quote that begins here",
        ),
        (
            'late: "a" b',
            "8:11: is not YAML here: expected <block end>, but found '<scalar>'; put the whole text in quotes, or close an earlier quote",
        ),
        (
            " late: a",
            '8:6: is not YAML here: mapping values are not allowed here; put text that contains ": " in quotes, or indent the key like the key above it',
        ),
        (
            "late:a",
            "8:1: is not YAML here: could not find expected ':'; write \"key: value\", with a space after the colon",
        ),
        ("late: @a", "8:7: is not YAML here: found character '@' that cannot start any token; put the text in quotes"),
        (
            "late: *",
            "8:8: is not YAML here: expected alphabetic or numeric character, but found '\\n'; put the text in quotes",
        ),
        ('late: "\\d"', "8:9: is not YAML here: found unknown escape character 'd'; use single quotes"),
        (
            "\tlate: a",
            "8:1: is not YAML here: found character '\\t' that cannot start any token; indent with spaces, not tabs",
        ),
    ],
)
def test_a_mistake_in_one_line(line, said):
    assert f"clicks.yaml:{said}" in with_line(line)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "topics: [clicks]",
            "topics: [clicks, null]",
            "4:20: source.topics[1]: has no value; write one, or leave the item out",
        ),
        (
            "topics: [clicks]",
            "topics: [clicks]\n  format: csv\n  columns: [id, null]",
            "6:17: source.columns[1]: has no value; write one, or leave the item out",
        ),
        (
            "topics: [clicks]",
            "topics: [clicks]\n  format: csv\n  columns: [{id: text}]",
            "6:13: source.columns[0]: must be text, not a mapping; write the text alone",
        ),
        (
            "field: id",
            "fields: [id, null]",
            "6:16: tracking_id.fields[1]: has no value; write one, or leave the item out",
        ),
        *(
            (
                "topics: [clicks]",
                f"topics: [clicks]\n  format: {written}{more}",
                f"5:11: source.format: is not one of {FORMATS}",
            )
            for written in ("[csv]", "[]", "{csv: true}")
            for more in ("", "\n  schema_id: none\n  schema: a.avsc", "\n  columns: [id]")
        ),
        ("field: id", "parts: [null]", "6:11: tracking_id.parts[0]: has no value; write one, or leave the item out"),
        (
            "field: id",
            "field: id\n  normalize: [null]",
            "7:15: tracking_id.normalize[0]: has no value; write one, or leave the item out",
        ),
        (
            "  topics: [clicks]",
            "  topics: [clicks]\n format: json",
            "5:2: is not YAML here: expected <block end>, but found '<block mapping start>'; indent the keys of a mapping, or the items of a list, by the same number of spaces",
        ),
        (
            "name: clicks",
            'name: "clicks',
            "2:7: is not YAML here: found unexpected end of stream; close the quote that begins here",
        ),
        ("dedup: 1", "dedup: 2", '1:8: dedup: "2" is not a version this program reads; write 1'),
        ("dedup: 1", "dedup: true", '1:8: dedup: "True" is not a version this program reads; write 1'),
        ("dedup: 1\n", "", '1:1: the key "dedup" is missing'),
        (
            "name: clicks",
            "name: Clicks",
            '2:7: name: "Clicks" is not a valid name; use a-z, 0-9 and "-", at most 100 characters, a letter or digit first',
        ),
        (
            "name: clicks",
            "name: a.b",
            '2:7: name: "a.b" is not a valid name; use a-z, 0-9 and "-", at most 100 characters, a letter or digit first',
        ),
        ("name: clicks", "name: 12", '2:7: name: "12" must be text; put it in quotes'),
        ("[clicks]", "[]", "4:11: source.topics: is an empty list; name at least one topic"),
        ("[clicks]", "clicks", '4:11: source.topics: "clicks" must be a list; write "[a, b]"'),
        ("[clicks]", "[a, a]", '4:15: source.topics[1]: "a" is also a source topic; every topic has one role'),
        ("[clicks]", "[a.b, a_b]", '4:17: source.topics[1]: "a_b" is also a source topic; every topic has one role'),
        (
            "[clicks]",
            "[clicks.changelog]",
            '2:1: name: "clicks.changelog" is also a source topic; every topic has one role',
        ),
        (
            "[clicks]",
            f"[{'a' * 250}]",
            f'4:12: source.topics[0]: "{"a" * 250}" is not a valid topic name; Kafka allows 1 to 249 of a-z A-Z 0-9 "." "_" "-"',
        ),
        (
            "[clicks]",
            "[clicks]\n  format: jsn",
            '5:11: source.format: "jsn" is not one of json | json_schema | avro | protobuf | msgpack | cbor | csv | bytes; did you mean "json"?',
        ),
        ("[clicks]", "[clicks]\n  schema_id: prefix", "5:3: source.schema_id: needs `source.format: json_schema`"),
        (
            "[clicks]",
            "[clicks]\n  format: json_schema\n  schema_id: none",
            "6:3: source.schema_id: none needs `source.format: avro` or `protobuf`; JSON without framing is `format: json`",
        ),
        (
            "[clicks]",
            "[clicks]\n  format: json_schema\n  schema_id: prefixed",
            '6:14: source.schema_id: "prefixed" is not one of auto | header | prefix | none; did you mean "prefix"?',
        ),
        ("[clicks]", "[clicks]\n  schema: a.avsc", "5:3: source.schema: needs `source.format: avro` or `protobuf`"),
        (
            "[clicks]",
            "[clicks]\n  subject: a-value",
            "5:3: source.subject: needs `source.format: json_schema`, `avro`, or `protobuf`",
        ),
        (
            "[clicks]",
            "[clicks]\n  start: yesterday",
            '5:10: source.start: "yesterday" is not a start; write earliest, latest, or a time such as 2024-01-31T00:00:00Z',
        ),
        (
            "[clicks]",
            "[clicks]\n  start: 1700000000000",
            '5:10: source.start: "1700000000000" is not a start; write earliest, latest, or a time such as 2024-01-31T00:00:00Z',
        ),
        ("[clicks]", "[clicks]\n  partitioned_by: key", '5:19: source.partitioned_by: "key" is not one of tracking_id'),
        ("[clicks]", "[clicks]\n  fromat: json", '5:3: unknown key "source.fromat"; did you mean "format"?'),
        (
            "[clicks]",
            "[clicks]\n  format: bytes",
            "7:3: tracking_id.field: needs `source.format: json`; a value of format bytes has no fields",
        ),
        (
            "field: id",
            "field: ''",
            '6:10: tracking_id.field: the path is empty; write a member name, such as "order.id"',
        ),
        (
            "field: id",
            "key: false",
            "6:8: tracking_id.key: takes true, or the path of a member of the key; leave it out to use another rule",
        ),
        ("field: id", "header: ''", "6:11: tracking_id.header: a header's name has 1 to 1000 characters"),
        ("field: id", "fields: []", "6:11: tracking_id.fields: is an empty list; name at least one path"),
        ("field: id", 'fields: [a, "a"]', '6:11: tracking_id.fields: "a" is listed twice'),
        ("field: id", "content: false", "6:12: tracking_id.content: takes true only; leave it out to use another rule"),
        (
            "field: id",
            "content: {exlude: [a]}",
            '6:13: unknown key "tracking_id.content.exlude"; did you mean "exclude"?',
        ),
        (
            "field: id",
            "field: id\n  header: h",
            "7:3: tracking_id: field and header exclude each other; keep exactly one",
        ),
        (
            "field: id",
            "missing: fail",
            "5:1: tracking_id: no rule; write exactly one of key, header, field, fields, parts, content, python, first_of",
        ),
        (
            "field: id",
            "field: id\n  normalize: [upper]",
            '7:15: tracking_id.normalize[0]: "upper" is not one of trim | lower | nfc | instant',
        ),
        ("field: id", "first_of: [{key: true}]", "6:13: tracking_id.first_of: must have 2 to 16 alternatives"),
        (
            "field: id",
            "first_of: [{key: true}, {header: h}, {key: true}]",
            "6:40: tracking_id.first_of[2]: this alternative occurs twice; remove one",
        ),
        (
            "field: id",
            "python: order_id",
            '6:11: tracking_id.python: "order_id" is not a function; write module:function, such as ids:order_id',
        ),
        (
            "field: id",
            "python: {function: ids:order_id, version: 0}",
            '6:45: tracking_id.python.version: "0" must be 1 to 1000000000',
        ),
        ("field: id", "python: {version: 2}", '6:3: the key "function" is missing in tracking_id.python'),
        (
            "field: id",
            "first_of: [{key: true, header: h}, {field: id}]",
            "6:26: tracking_id.first_of[0]: key and header exclude each other; keep exactly one",
        ),
        (
            "field: id",
            "first_of: [{key: true}, {first_of: [{header: h}, {field: id}]}]",
            "6:27: tracking_id.first_of[1]: no rule; write exactly one of key, header, field, fields, parts, content, python",
        ),
        (
            "field: id",
            "first_of: [{parts: [{key: true}, {key: true}]}, {field: id}]",
            "6:36: tracking_id.first_of[0].parts[1]: this part occurs twice; remove one",
        ),
        (
            "field: id",
            "first_of: [{header: h}, {field: a b}]",
            '6:35: tracking_id.first_of[1].field: path a b: write "." or "[" before position 2',
        ),
        (
            "field: id",
            "parts: [{absent: as_value}]",
            "6:11: tracking_id.parts[0]: no rule; write exactly one of key, header, field",
        ),
        (
            "field: id",
            "parts: [{key: true, header: h}]",
            "6:11: tracking_id.parts[0]: key and header; write exactly one of key, header, field",
        ),
        (
            "field: id",
            "parts: [{field: id}, {header: h}, {field: id, absent: as_value}]",
            "6:37: tracking_id.parts[2]: this part occurs twice; remove one",
        ),
        (
            "field: id",
            """parts: [{field: a.b}, {field: 'a["b"]'}]""",
            "6:25: tracking_id.parts[1]: this part occurs twice; remove one",
        ),
        (
            "field: id",
            "parts: [{field: id, absent: skip}]",
            '6:31: tracking_id.parts[0].absent: "skip" is not one of dead_letter | as_value',
        ),
        (
            "field: id",
            "field: id\n  normalize: [trim, instant, lower]",
            "7:21: tracking_id.normalize: instant must be the last step, as it makes the text a moment",
        ),
        ("guard_period: 24h", "guard_period: 0s", '7:15: guard_period: "0s" must be longer than zero'),
        ("guard_period: 24h", "guard_period: 24", '7:15: guard_period: "24" has no unit; write "24h" or "24m"'),
        ("guard_period: 24h\n", "", '1:1: the key "guard_period" is missing'),
    ],
)
def test_a_mistake_in_a_needed_key(old, new, said):
    assert f"clicks.yaml:{said}" in problems(MINIMAL.replace(old, new))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", 'clicks.yaml: is empty; begin with "dedup: 1", and see `dedup schema`'),
        ("# nothing\n", 'clicks.yaml: is empty; begin with "dedup: 1", and see `dedup schema`'),
        ("- a\n", "clicks.yaml:1:1: must be a mapping of keys to values; begin with `dedup: 1`"),
        ("just text", "clicks.yaml:1:1: must be a mapping of keys to values; begin with `dedup: 1`"),
        (f"{MINIMAL}---\n{MINIMAL}", 'clicks.yaml:8:1: a second document starts here; remove the "---" and what follows'),
        ("a: " + "[" * 5_000, "clicks.yaml:1:23: nested more than 20 levels deep, which is the limit"),
        ("a: " + "x" * (1 << 20), "clicks.yaml: is larger than 1 MiB, which is the limit"),
        ("a: [" + "1, " * 30_000, "clicks.yaml:1:59996: more than 20000 values, which is the limit"),
        ('a: "\\ud800"', "clicks.yaml:1:4: an unpaired surrogate, which UTF-8 cannot encode, is not allowed"),
        ('"\\udfff": 1', "clicks.yaml:1:1: an unpaired surrogate, which UTF-8 cannot encode, is not allowed"),
        (
            "a: b: c",
            'clicks.yaml:1:5: is not YAML here: mapping values are not allowed here; put text that contains ": " in quotes, or indent the key like the key above it',
        ),
    ],
)  # fmt: skip
def test_what_is_no_topology_at_all(text, said):
    assert said in problems(text)


def test_control_characters_are_refused_without_a_crash():
    assert problems("a: \x00")[0].startswith("clicks.yaml: is not YAML")


def test_everything_is_said_at_once_in_the_order_of_the_file():
    text = MINIMAL.replace("guard_period: 24h", "guard_period: 24").replace("topics:", "topcs:")
    text += "output: {topic: clicks}\noutput: {topic: x}\ngrase: 24h\n"
    assert problems(text) == [
        'clicks.yaml:3:1: the key "topics" is missing in source',
        'clicks.yaml:4:3: unknown key "source.topcs"; did you mean "topics"?',
        'clicks.yaml:7:15: guard_period: "24" has no unit; write "24h" or "24m"',
        'clicks.yaml:9:1: the key "output" is repeated; it is already on line 8',
        'clicks.yaml:10:1: unknown key "grase"; did you mean "grace"?',
    ]


def test_a_made_topic_name_must_fit_kafka_too():
    output = "o" * 245
    assert with_line(f"output: {{topic: {output}}}")[0].startswith(
        'clicks.yaml:8:17: output.topic: the derived topic "oooo'
    )
