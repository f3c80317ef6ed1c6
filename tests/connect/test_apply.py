"""`dedup apply` makes the topics of ingest files and sinks, which then need no right to create any."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.errors import DedupError
from tests.connect.stage import lines, sqlite_rows

pytestmark = pytest.mark.broker
COLUMNS = "  columns: {id: id, n: {field: n, type: integer}}"


def told(stage, *arguments, code=0):
    """Return what a command prints, and its errors, when it may create no topics itself."""
    given = [*map(str, arguments), "--config", str(stage.config)]
    done = CliRunner().invoke(create_app(), given, env={"DEDUP_TOPICS__CREATE": "false"})
    error = done.exception
    met, text = (error.exit_code, str(error)) if isinstance(error, DedupError) else (done.exit_code, done.output)
    assert met == code, text
    return text


def run_by_itself(stage, *arguments):
    """Return the exit code and the log of a process that may create no topics."""
    process = stage.start(*map(str, arguments), "--exit-when-done", "--set", "topics.create=false")
    return process.wait(), process.log


def test_an_ingest_file_finds_the_topics_that_apply_has_made(stage):
    """Was: `apply` took every file for a topology, and named six unknown keys."""
    file = stage.ingest_file(stage.files())
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 10))
    code, log = run_by_itself(stage, "ingest", file)
    assert code == 3, log
    assert "`dedup apply` with the ingest file creates them" in log
    dry = told(stage, "apply", file, "--dry-run")
    for name, count in ((stage.topic, 2), (f"{stage.name}-source-offsets", 1), (f"{stage.name}.dead-letter", 2)):
        assert f"would create {name}: {count} partition" in dry
    assert "3 topics created" in told(stage, "apply", file)
    again = json.loads(told(stage, "apply", file, "--json"))
    assert again["make"] == []
    assert again["differences"] == []
    assert sorted(again["as_wanted"]) == sorted(
        [stage.topic, f"{stage.name}-source-offsets", f"{stage.name}.dead-letter"]
    )
    code, log = run_by_itself(stage, "ingest", file)
    assert code == 0, log
    stage.admin.until_visible(stage.name)
    assert len(stage.values()) == 10


def test_apply_says_where_the_topics_of_an_ingest_file_differ(stage, admin):
    file = stage.ingest_file(stage.files())
    admin.create_topic(stage.topic, 3)
    assert f"differs {stage.topic}: partitions is 3; apply would create it with 2" in told(stage, "apply", file)


def test_the_brokers_say_how_many_partitions_a_topic_has_if_the_ingest_file_does_not(stage):
    text = stage.ingest_text(stage.files()).replace(", partitions: 2", "")
    file = stage.directory / "ingest.yaml"
    file.write_text(text, encoding="utf-8")
    assert f"create {stage.topic}: the brokers' default number of partitions" in told(stage, "apply", file)
    assert json.loads(told(stage, "apply", file, "--json"))["differences"] == []


def test_a_sink_finds_the_dead_letter_topic_that_apply_has_made(stage, admin):
    """Was: `topics.create: false` stopped a sink, and nothing of dedup's created its topic."""
    path, file = stage.directory / "rows.db", stage.directory / "sink.yaml"
    file.write_text(stage.topology_text(f"sqlite:///{path}", COLUMNS), encoding="utf-8")
    admin.create_topic(f"{stage.name}.source", 2)
    # The topic may be that of another topology, so the others are made.
    said = told(stage, "apply", file)
    assert f"not created: {stage.name}.sink.dead-letter, because the topic '{stage.topic}'" in said
    assert "create" in said
    admin.create_topic(stage.topic, 2, {"retention.ms": "-1"})
    code, log = run_by_itself(stage, "sink", file)
    assert code == 3, log
    assert "`dedup apply` with the topology file creates them" in log
    assert f"create {stage.name}.sink.dead-letter: 2 partitions" in told(stage, "apply", file)
    stage.send([(b"k", b'{"id":"e1","n":1}', 1_700_000_000_000), (b"k", b'{"id":"e2","n":"x"}', 1_700_000_000_000)])
    code, log = run_by_itself(stage, "sink", file)
    assert code == 0, log
    assert [row[-1] for row in sqlite_rows(path)] == [1]
    assert len(stage.read(f"{stage.name}.sink.dead-letter")) == 1


def test_a_sink_of_the_output_gets_its_topic_together_with_the_output(stage, admin):
    text = stage.topology_text("sqlite:///rows.db", COLUMNS, f"output: {{topic: {stage.name}.out}}")
    file = stage.directory / "sink.yaml"
    file.write_text(text.replace(f"  topic: {stage.topic}\n", ""), encoding="utf-8")
    admin.create_topic(f"{stage.name}.source", 3)
    made = told(stage, "apply", file)
    assert f"create {stage.name}.out: 3 partitions" in made
    assert f"create {stage.name}.sink.dead-letter: 3 partitions" in made


@pytest.mark.parametrize("command", ["run", "status", "reset", "sink"])
def test_a_command_that_needs_a_topology_says_what_an_ingest_file_is(stage, command):
    file = stage.ingest_file(stage.files())
    said = told(stage, command, file, code=2)
    assert "is an ingest file, but this command needs a topology file" in said
    assert "unknown key" not in said


@pytest.mark.parametrize("option", ["--acls", "--table"])
def test_what_only_a_topology_has_is_refused_for_an_ingest_file(stage, option):
    assert "needs a topology file" in told(stage, "apply", stage.ingest_file(stage.files()), option, code=2)
