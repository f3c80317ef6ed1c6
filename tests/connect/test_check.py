"""Ingest files, sinks of topology files, and several files as a chain: what is wrong is said, with its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.errors import TopologyError
from dedup.topology.chain import Named, lint_chain, lint_ingest
from dedup.topology.ingest_file import parse_ingest
from dedup.topology.parse import parse

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
FILES = "ingest: 1\nname: x\nsource: {files: {directory: d}}\noutput: {topic: t}\n"
TABLE = (
    "ingest: 1\nname: x\nsource: {table: {url: 'postgresql://h/d', table: t, column: n}}\noutput: {topic: t}\n"
    "tracking_id: {field: id}\n"
)
TOPOLOGY = "dedup: 1\nname: y\nsource: {topics: [t], partitioned_by: tracking_id}\ntracking_id: {field: id}\nguard_period: 1h\n"


def problems(text, reads=parse_ingest):
    with pytest.raises(TopologyError) as caught:
        reads(text, name="x.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ingest: 2", 'x.yaml:1:9: ingest: "2" is not a version this program reads; write 1'),
        (FILES + "acks: 1", "producers are always idempotent, transactional and acks=all; leave it out"),
        (FILES + "enable_idempotence: false", "producers are always idempotent, transactional and acks=all"),
        (FILES.replace("directory: d", "directory: d, patern: x"), 'unknown key "source.files.patern"; did you mean "pattern"?'),
        (FILES.replace("directory: d", "directory: d, format: csv"), "format csv needs columns"),
        (FILES.replace("directory: d", "directory: d, columns: {a: text}"), "columns need format csv"),
        (FILES.replace("directory: d", "directory: ''"), 'x.yaml:3:29: source.files.directory: "" is not a directory; write a path'),
        (FILES.replace("directory: d", "directory: d, pattern: a/*.csv"), "is not a pattern of file names"),
        (FILES.replace("{files: {directory: d}}", "{}"), "takes exactly one of files and table"),
        (FILES.replace("topic: t", "topic: x-source-offsets"), '"x-source-offsets" holds the source offsets; name another'),
        (FILES.replace("topic: t", "topic: x.dead-letter"), '"x.dead-letter" takes dead letters; name another'),
        (
            FILES + "dead_letter: x-source-offsets",
            'x.yaml:5:14: dead_letter: "x-source-offsets" holds the source offsets; name another',
        ),
        (FILES + "tracking_id: {}", "takes exactly one of field and fields"),
        (FILES + "tracking_id: {fields: [a, null]}", "x.yaml:5:27: tracking_id.fields[1]: has no value; write one, or leave the item out"),
        (FILES.replace("name: x", "name: X"), 'name: "X" is not a valid name'),
        (
            FILES.replace("files: {directory: d}", "table: {url: 'postgresql://u:pw@h/d', table: t, column: n}"),
            "a password must not be written here",
        ),
        (FILES.replace("files: {directory: d}", "table: {url: 'sqlite:///x', column: n}"), "takes exactly one of table and query"),
        (
            FILES.replace("files: {directory: d}", "table: {url: 'sqlite:///x', query: 'DELETE FROM t', column: n}"),
            '"DELETE FROM t" is not a query; write one SELECT',
        ),
        (
            FILES.replace("files: {directory: d}", "table: {url: 'sqlite:///x', table: t, column: n, settle: 5}"),
            '"5" has no unit',
        ),
        (FILES.replace("files: {directory: d}", "table: {url: 'mysql://h/d', table: t, column: n}"), "is not a database URL; write"),
        (FILES.replace("files: {directory: d}", "table: {url: 'sqlite:///x', table: 't;', column: n}"), '"t;" is not a valid table name'),
    ],
)  # fmt: skip
def test_a_mistake_in_an_ingest_file(text, said):
    found = problems(text)
    assert any(said in problem for problem in found), found
    assert all("pw" not in problem for problem in found)


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        ("url: 'sqlite:///x', table: t, columns: {tracking_id: id}", '"tracking_id" is a column of every sink'),
        ("url: 'sqlite:///x', table: t, columns: {n: {field: n, type: int}}", "is not one of text | integer"),
        ("url: 'sqlite:///x'", 'the key "table" is missing in sink'),
        ("url: 'sqlite:///x', table: t, on_reuse: replace", "is not one of update | append"),
    ],
)
def test_a_mistake_in_a_sink(sink, said):
    found = problems(f"{TOPOLOGY}sink: {{{sink}}}", parse)
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(
    ("more", "place", "topic", "role"),
    [
        ("dead_letter: t", "7:55: sink.dead_letter", "t", "a source topic"),
        ("dead_letter: o", "7:55: sink.dead_letter", "o", "the output topic"),
        ("dead_letter: y_changelog", "7:55: sink.dead_letter", "y_changelog", "the changelog topic"),
        ("dead_letter: y.repartition", "7:55: sink.dead_letter", "y.repartition", "the repartition topic"),
        ("dead_letter: o.dead-letter", "7:55: sink.dead_letter", "o.dead-letter", "the topic of dead letters"),
        ("topic: y.changelog", "7:49: sink.topic", "y.changelog", "the changelog topic"),
        ("topic: y_repartition", "7:49: sink.topic", "y_repartition", "the repartition topic"),
        ("topic: y.sink.dead-letter", "7:49: sink.topic", "y.sink.dead-letter", "the topic of the sink's dead letters"),
        ("topic: z, dead_letter: z", "7:49: sink.topic", "z", "the topic of the sink's dead letters"),
    ],
)
def test_the_topics_of_a_sink_have_one_role_too(more, place, topic, role):
    text = f"{TOPOLOGY}output: {{topic: o}}\nsink: {{url: 'sqlite:///x', table: table, {more}}}\n"
    assert problems(text, parse) == [f'x.yaml:{place}: "{topic}" is also {role}; every topic has one role']


def test_the_name_of_a_sink_s_dead_letters_is_taken_where_there_is_a_sink():
    text = f"{TOPOLOGY}duplicates: y.sink.dead-letter\n"
    parse(text, name="x.yaml")
    (said,) = problems(f"{text}sink: {{url: 'sqlite:///x', table: t, topic: z}}\n", parse)
    assert said.startswith(
        'x.yaml:6:13: duplicates: "y.sink.dead-letter" is also the topic of the sink\'s dead letters;'
    )


@pytest.mark.parametrize("topic", ["t", "o", "o.late", "o.dead-letter", "elsewhere"])
def test_a_sink_may_read_any_topic_of_records(topic):
    text = f"{TOPOLOGY}output: {{topic: o}}\nsink: {{url: 'sqlite:///x', table: t, topic: {topic}}}\n"
    made = parse(text, name="x.yaml")
    assert made.sink.topic == topic


def check(tmp_path, *texts):
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(text, encoding="utf-8")
    result = CliRunner().invoke(create_app(), ["check", *map(str, files)])
    return result.output + (str(result.exception) if result.exception else "")


def test_a_json_path_in_an_ingest_file_is_told():
    text = FILES + "tracking_id: {fields: [a, $.id]}\nevent_time: {field: /at, unit: ms}\n"
    found = lint_ingest(parse_ingest(text + "boundary: {field: $.last, equals: true}\n", name="x.yaml"))
    assert [(each.code, each.at) for each in found] == [
        ("path_notation", ("tracking_id", "fields", 1)),
        ("path_notation", ("event_time", "field")),
        ("path_notation", ("boundary", "field")),
    ]


def test_ingest_says_what_a_topology_is(tmp_path):
    """Was: a list of missing and unknown keys."""
    topology = TOPOLOGIES / "orders.yaml"
    result = CliRunner().invoke(create_app(), ["ingest", str(topology), "--set", "brokers=localhost:1"])
    said = f"{topology}: is a topology file, but this command needs an ingest file; `dedup run` runs a topology file"
    assert str(result.exception) == said


def test_the_chain_to_copy_is_exactly_once_at_every_stage():
    result = CliRunner().invoke(
        create_app(), ["check", *(str(TOPOLOGIES / f"{name}.yaml") for name in ("chain-ingest", "chain"))]
    )
    assert result.exit_code == 0
    assert result.output.splitlines()[-1].endswith(
        "→ chain → chain.unique → table flights: exactly-once at every stage"
    )


@pytest.mark.parametrize(
    ("ingest", "topology", "said"),
    [
        (FILES, TOPOLOGY, "x puts records into partitions by its place in the source"),
        (FILES + "tracking_id: {field: other}", TOPOLOGY, "x puts records into partitions by field: other"),
        (
            FILES + "tracking_id: {field: id}",
            TOPOLOGY.replace("field: id", "header: dedup-id"),
            "tracking_id.header: dedup-id is not on the records of x",
        ),
        (FILES + "tracking_id: {field: id}", TOPOLOGY.replace("name: y", "name: x"), "they would fence each other"),
        (FILES + "tracking_id: {field: id}", TOPOLOGY + "late: drop", "not exactly-once at"),
        (FILES.replace("d}", "d, changed: start_over}") + "tracking_id: {field: id}", TOPOLOGY, "not exactly-once at"),
        (FILES.replace("d}", "d, last_line: take}") + "tracking_id: {field: id}", TOPOLOGY, "not exactly-once at"),
        (TABLE.replace("}}", ", settle: 5s}}"), TOPOLOGY, "settle: 5s is not exact: a row of t that"),
        (TABLE.replace("}}", ", settle: 5s}}"), TOPOLOGY, "not exactly-once at"),
        (TABLE.replace("table: t", "query: SELECT 1 AS n"), TOPOLOGY, "not exactly-once at"),
        (TABLE, TOPOLOGY, "exactly-once at every stage"),
        (FILES, TOPOLOGY.replace("topics: [t]", "topics: [u]"), "no file given here writes u"),
        (FILES, TOPOLOGY.replace("topics: [t]", "topics: [u]"), "no file given here reads the topic t"),
    ],
)
def test_a_weak_joint_of_a_chain_is_named(tmp_path, ingest, topology, said):
    assert said in check(tmp_path, ingest, topology)


SECOND = TOPOLOGY.replace("name: y", "name: z").replace("topics: [t]", "topics: [u]")


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ("output: {topic: o}", "output: {topic: o}", "o, o.late, o.dead-letter"),
        ("output: {topic: o}\nduplicates: d", "output: {topic: p}\nduplicates: d", "d"),
        ("output: {topic: o}", "output: {topic: p}\nlate: o", "o"),
        ("output: {topic: o}", "output: {topic: p}\ndead_letter: o", "o"),
        ("output: {topic: o}\nduplicates: z.changelog", "output: {topic: p}", "z.changelog"),
    ],
    ids=["output", "duplicates", "output and late", "output and dead letters", "state"],
)
def test_two_topologies_that_write_one_topic_are_an_error(tmp_path, first, second, shared):
    said = check(tmp_path, f"{TOPOLOGY}{first}\n", f"{SECOND}{second}\n")
    assert f"{shared}: written by y, too." in said
    assert "[shared_topics]" in said
    assert "1.yaml: ok" not in said


def test_dead_letters_of_two_topologies_may_share_a_topic_with_a_warning(tmp_path):
    first = f"{TOPOLOGY}output: {{topic: o}}\ndead_letter: letters\n"
    said = check(tmp_path, first, f"{SECOND}output: {{topic: p}}\ndead_letter: letters\n")
    assert "dead_letter: letters also receives the dead letters of y. `dedup replay` skips those" in said
    assert "1.yaml: ok" in said


def test_dead_letters_of_two_topologies_with_one_source_are_said_to_be_replayed_twice(tmp_path):
    first = f"{TOPOLOGY}output: {{topic: o}}\ndead_letter: letters\n"
    said = check(tmp_path, first, first.replace("name: y", "name: z").replace("topic: o", "topic: p"))
    assert "dead_letter: letters also receives the dead letters of y. Both topologies read t: `dedup replay`" in said
    assert "skips those" not in said
    assert "1.yaml: ok" in said


def test_topologies_with_topics_of_their_own_and_those_in_a_row_are_fine(tmp_path):
    first, second = f"{TOPOLOGY}output: {{topic: u}}\n", f"{SECOND}output: {{topic: p}}\n"
    assert "written by" not in check(tmp_path, first, second)
    assert "also receives the dead letters of" not in check(tmp_path, first, second)


def test_two_sources_of_one_directory_are_named(tmp_path):
    other = FILES.replace("name: x", "name: z").replace("directory: d", "directory: ./d/, pattern: '*.log'")
    said = check(tmp_path, FILES, other, TOPOLOGY)
    assert "source.files.directory: d is read by x, too" in said
    assert "not exactly-once at" in said
    assert "is read by x, too" not in check(tmp_path, FILES, other.replace("./d/", "./e/"), TOPOLOGY)


def test_records_with_the_header_fit_a_topology_that_reads_it(tmp_path):
    topology = TOPOLOGY.replace("field: id", "header: dedup-id").replace(", partitioned_by: tracking_id", "")
    assert "exactly-once at every stage" in check(tmp_path, FILES, topology)


@pytest.mark.parametrize("fmt", ["json_schema", "msgpack", "cbor", "csv, columns: [id]"])
def test_a_topology_of_another_format_cannot_read_what_ingest_writes(fmt):
    reads = TOPOLOGY.replace("topics: [t]", f"topics: [t], format: {fmt}")
    files = [
        Named("x", parse_ingest(FILES + "tracking_id: {field: id}\n", name="x")),
        Named("y", parse(reads, name="y")),
    ]
    ((file, finding),) = lint_chain(files)
    assert (file, finding.level, finding.code) == ("y", "error", "json_is_written")


def test_records_with_the_id_as_their_key_fit_a_topology_that_reads_the_key():
    files = [
        Named("x", parse_ingest(FILES + "tracking_id: {field: id}\n", name="x")),
        Named("y", parse(TOPOLOGY.replace("field: id", "key: true"), name="y")),
    ]
    assert lint_chain(files) == []
    files[0] = Named("x", parse_ingest(FILES, name="x"))
    ((file, finding),) = lint_chain(files)
    assert (file, finding.code) == ("y", "partitioned_by_another_id")
    # Was: equal IDs would be in different partitions. But records of several topics are repartitioned.
    files[1] = Named("y", parse(TOPOLOGY.replace("field: id", "key: true").replace("[t]", "[t, u]"), name="y"))
    assert [finding.code for _, finding in lint_chain(files) if finding.level == "error"] == ["null_keys"]


def test_several_topics_are_repartitioned_whatever_their_producers_do():
    """Was: an error that said that equal IDs would be in different partitions."""
    topology = TOPOLOGY.replace("topics: [t]", "topics: [t, u]")
    files = [
        Named("x", parse_ingest(FILES + "tracking_id: {field: other}\n", name="x")),
        Named("y", parse(topology, name="y")),
    ]
    assert not [finding for _, finding in lint_chain(files) if finding.level == "error"]
