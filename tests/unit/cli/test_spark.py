"""What `dedup spark` refuses before a session is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.errors import SettingsError

SIMPLEST = str(Path(__file__).parents[3] / "topologies" / "simplest.yaml")


@pytest.fixture(autouse=True)
def no_session(monkeypatch):
    def refuse(*_):
        raise AssertionError("a session was opened")

    monkeypatch.setattr("dedup.cli.spark.open_session", refuse)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["--start", "earliest"], "--start"),
        (["--until", "2024-01-01T00:00:00Z"], "--until"),
        (["--repartitioned"], "--repartitioned"),
    ],
)
def test_options_of_topics_are_refused_beside_files(given, names, tmp_path):
    arguments = ["spark", "backfill", SIMPLEST, "--input", str(tmp_path), "--out", str(tmp_path / "out")]
    error = CliRunner().invoke(create_app(), [*arguments, *given]).exception
    assert isinstance(error, SettingsError)
    assert error.exit_code == 2
    assert [problem.place for problem in error.problems] == [names]


def test_an_incremental_run_reads_no_table_by_its_name(tmp_path):
    arguments = ["spark", "incremental", SIMPLEST, "--input", "shop.orders", "--format", "table"]
    error = CliRunner().invoke(create_app(), [*arguments, "--out", str(tmp_path / "out")]).exception
    assert isinstance(error, SettingsError)
    assert "--format delta" in str(error)


def test_their_defaults_are_not(tmp_path):
    pytest.importorskip("pyspark")
    arguments = ["spark", "backfill", SIMPLEST, "--input", str(tmp_path), "--out", str(tmp_path / "out")]
    given = ["--start", "whole", "--until", "now"]
    assert str(CliRunner().invoke(create_app(), [*arguments, *given]).exception) == "a session was opened"


@pytest.mark.parametrize(
    "given",
    [
        ["backfill", "TOPOLOGY", "--input", "in", "--format", "json", "--out", "out"],
        ["backfill", "TOPOLOGY", "--input", "in", "--rows-are-events", "--out", "out"],
        ["incremental", "TOPOLOGY", "--input", "in", "--format", "json", "--out", "out"],
        ["seed", "TOPOLOGY", "--until", "latest", "--history", "in", "--format", "json"],
        ["audit", "TOPOLOGY", "--history", "in", "--rows-are-events"],
        ["upsert", "TOPOLOGY", "--input", "in", "--format", "json", "--delta", "out"],
    ],
)
def test_a_history_without_framing_is_refused_where_the_topology_reads_one(given, tmp_path):
    text = Path(SIMPLEST).read_text(encoding="utf-8").replace("source:\n", "source:\n  format: json_schema\n")
    topology = tmp_path / "t.yaml"
    topology.write_text(text, encoding="utf-8")
    arguments = [str(topology) if each == "TOPOLOGY" else each for each in given]
    error = CliRunner().invoke(create_app(), ["spark", *arguments]).exception
    assert isinstance(error, SettingsError), error
    assert "without the framing of `source.format: json_schema`" in str(error)


@pytest.mark.parametrize(
    "given",
    [
        ["backfill", "TOPOLOGY", "--input", "in", "--format", "json-records", "--out", "out"],
        ["incremental", "TOPOLOGY", "--input", "in", "--rows-are-events", "--out", "out"],
        ["seed", "TOPOLOGY", "--until", "latest", "--history", "in", "--format", "json"],
    ],
)
@pytest.mark.parametrize("fmt", ["avro", "protobuf", "msgpack", "cbor", "csv"])
def test_a_history_of_text_is_refused_where_the_topology_reads_a_schema(given, fmt, tmp_path):
    source = f"source:\n  format: {fmt}\n"
    if fmt == "csv":
        source += "  columns: [event_id, ts]\n"
    if fmt in {"avro", "protobuf"}:
        source += "  schema_id: none\n  schema: r.avsc\n"
    topology = tmp_path / "t.yaml"
    topology.write_text(Path(SIMPLEST).read_text(encoding="utf-8").replace("source:\n", source), encoding="utf-8")
    schema = '{"type":"record","name":"R","fields":[{"name":"event_id","type":"string"},{"name":"ts","type":"long"}]}'
    if fmt == "protobuf":
        schema = "message R { required string event_id = 1; required int64 ts = 2; }"
    (tmp_path / "r.avsc").write_text(schema, encoding="utf-8")
    arguments = [str(topology) if each == "TOPOLOGY" else each for each in given]
    error = CliRunner().invoke(create_app(), ["spark", *arguments]).exception
    assert isinstance(error, SettingsError), error
    kind = "JSON" if fmt == "csv" else "text"
    assert f"has values that are {kind}, not `source.format: {fmt}`" in str(error)


@pytest.mark.parametrize(
    ("fmt", "given", "said"),
    [
        (
            "json",
            ["backfill", "T", "--input", "in", "--rows-are-events", "--out", "out"],
            "--rows-are-events: has no keys",
        ),
        ("json", ["backfill", "T", "--input", "in", "--format", "json", "--out", "out"], "--format json: has no keys"),
        (
            "cbor",
            ["backfill", "T", "--input", "in", "--format", "json-records", "--out", "out"],
            "--format json-records: has keys that are text, not `source.key_format: cbor`",
        ),
    ],
)
def test_a_history_without_the_keys_that_ids_are_read_from_is_refused(fmt, given, said, tmp_path):
    text = (
        f"dedup: 1\nname: t\nsource: {{topics: [c], key_format: {fmt}}}\ntracking_id: {{key: id}}\nguard_period: 1h\n"
    )
    (tmp_path / "t.yaml").write_text(text, encoding="utf-8")
    arguments = [str(tmp_path / "t.yaml") if each == "T" else each for each in given]
    error = CliRunner().invoke(create_app(), ["spark", *arguments]).exception
    assert isinstance(error, SettingsError), error
    assert said in str(error)


@pytest.mark.parametrize("fmt", ["avro", "protobuf"])
@pytest.mark.parametrize("command", ["run", "backfill", "upsert"])
def test_schemas_of_a_registry_need_its_address(command, fmt, tmp_path):
    text = Path(SIMPLEST).read_text(encoding="utf-8").replace("source:\n", f"source:\n  format: {fmt}\n")
    (tmp_path / "t.yaml").write_text(text, encoding="utf-8")
    given = {
        "run": ["--checkpoint", "c"],
        "backfill": ["--input", "i", "--out", "o"],
        "upsert": ["--input", "i", "--delta", "d"],
    }
    arguments = [str(tmp_path / "t.yaml"), *given[command], "--set", "brokers=localhost:1"]
    error = CliRunner().invoke(create_app(), ["spark", command, *arguments]).exception
    assert isinstance(error, SettingsError), error
    assert [problem.place for problem in error.problems] == ["schema_registry.url"]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["sink", SIMPLEST], "dedup spark sink"),
        (["sink", SIMPLEST, "--delta", "a", "--iceberg", "lake.b"], "--delta, --iceberg"),
        (["run", SIMPLEST, "--checkpoint", "c", "--delta", "a", "--iceberg", "lake.b"], "--delta, --iceberg"),
    ],
)
def test_a_sink_has_one_table(given, names):
    error = CliRunner().invoke(create_app(), ["spark", *given]).exception
    assert isinstance(error, SettingsError)
    assert [problem.place for problem in error.problems] == [names]
