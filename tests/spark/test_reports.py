"""What the commands of `dedup spark` say, to people and as JSON."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.cli.run import VerdictProgress
from dedup.core.partitioner import partitions
from dedup.errors import SettingsError
from dedup.kafka.outage_lines import quiet_logging
from dedup.spark.rejected import refuse_overlap
from dedup.worker.logs import NOISY
from tests.integration.workload import BASE_MS, Event
from tests.spark.test_batch_files import LOG, write
from tests.terminal import WIDTHS, assert_looks_as_before, screen

TOPOLOGY = """
dedup: 1
name: shop
source: {topics: [orders], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 10s
grace: 5s
output: {topic: orders.unique}
"""


@pytest.fixture
def spark_command(spark, tmp_path, monkeypatch):
    """Runs a command of `dedup spark` on a topology in the run's session, which must not end with it."""
    monkeypatch.setattr(type(spark), "stop", lambda _self: None)
    (tmp_path / "shop.yaml").write_text(TOPOLOGY, encoding="utf-8")
    write(tmp_path / "in" / "log.parquet", LOG)

    def run(command: str, *arguments: str, fails: bool = False) -> str:
        given = ["spark", command, str(tmp_path / "shop.yaml"), *arguments, "--quiet"]
        ran = CliRunner().invoke(create_app(), given)
        if fails:
            assert isinstance(ran.exception, SettingsError), (ran.output, ran.exception)
            return str(ran.exception)
        assert ran.exit_code == 0, (ran.output, ran.exception)
        return ran.stdout

    return run


def text_of(option) -> str | None:
    return option.get() if option.isDefined() else None


def jobs_of(spark) -> set[tuple[str, str]]:
    """The groups and descriptions of jobs in Spark's UI."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    found = map(jobs.apply, range(jobs.size()))
    return {(text_of(job.jobGroup()), text_of(job.description())) for job in found}


def test_a_backfill_and_an_upsert_say_what_they_did(spark, spark_command, tmp_path):
    arguments = ("--input", str(tmp_path / "in"), "--now", "2027-01-15T08:00:00Z", "--out", str(tmp_path / "out"))
    lines = spark_command("backfill", *arguments).splitlines()
    path = tmp_path / "out" / "run=backfill"
    files = list(path.rglob("*.parquet"))
    assert lines[:3] == [
        "judged 7: dead_letter 1  duplicate 1  late 1  unique 4",
        "dead_letter: 1 not_json",
        "late: 1 orders/0",
    ]
    assert lines[4].startswith(f"{len(files)} files in ")
    text = f"shop: judge {tmp_path / 'in'}, publish run backfill"
    assert {("dedup backfill shop", "shop: backfill"), ("dedup backfill shop", text)} <= jobs_of(spark)
    found = json.loads(spark_command("backfill", *arguments, "--json"))
    assert found["verdicts"] == {"dead_letter": 1, "duplicate": 1, "late": 1, "unique": 4}
    assert found["causes"] == {"dead_letter": {"not_json": 1}, "late": {"orders/0": 1}}
    assert (found["files"], found["fresh"]) == (len(files), False)
    assert 0 < found["seconds"] < 600

    inputs = [word for name in ("unique", "dead_letter") for word in ("--input", str(path / f"verdict={name}"))]
    table = (*inputs, "--delta", str(tmp_path / "table"), "--schema", "id LONG")
    first = json.loads(spark_command("upsert", *table, "--rejected", str(tmp_path / "rejected"), "--json"))
    # Records with the IDs 1, 7, and 8; the torn one has none.
    assert (first["changed"], first["rejected"]) == (3, {"not_json": 1})
    (tmp_path / "rejected" / "notes.txt").write_text("not of dedup", encoding="utf-8")
    # Delta puts its own words around it.
    text = f"{tmp_path / 'table'}: merge the newest row of each tracking ID"
    assert any(group == "dedup upsert shop" and text in (about or "") for group, about in jobs_of(spark))
    again = spark_command("upsert", *table, "--rejected", str(tmp_path / "rejected")).splitlines()
    assert "up to date, 0 rows inserted or replaced in" in again[0]
    said, _, second = again[1].partition(", written to ")
    assert said == "rejected: 1 record (1 not_json)"
    assert {each.name for each in (tmp_path / "rejected").iterdir()} - {"notes.txt"} == {
        Path(first["rejected_path"]).name,
        Path(second).name,
    }
    (tmp_path / "rejected" / "notes.txt").unlink()
    runs = spark.read.parquet(str(tmp_path / "rejected")).groupBy("upsert", "reason").count().collect()
    assert [(row["reason"], row["count"]) for row in runs] == [("not_json", 1)] * 2


def test_an_upsert_deletes_nothing_for_its_rejected_records(spark, spark_command, tmp_path):
    """Was: `--rejected data` with `--input data/in` emptied `data`, and then said that the input was damaged."""
    there = {path: path.read_bytes() for path in (tmp_path / "in").rglob("*") if path.is_file()}
    (tmp_path / "beside").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    arguments = ("--delta", str(tmp_path / "table"), "--rejected")
    for given, rejected in [
        ("in", ""),
        ("in", "in"),
        ("in", "in/rejected"),
        ("i?", "in/rejected"),
        ("{none,i[a-z]}/*.parquet", "in"),
        ("in", "beside"),
        ("in", "table/rejected"),
        ("in", "file"),
    ]:
        said = spark_command(
            "upsert", "--input", str(tmp_path / given), *arguments, str(tmp_path / rejected), fails=True
        )
        assert said.startswith("--rejected: "), (given, rejected, said)
    spark.sql("CREATE TABLE a_table_with_files USING parquet AS SELECT 1 AS one")
    (file,) = spark.table("a_table_with_files").inputFiles()
    with pytest.raises(SettingsError, match="overlaps the files of the input"):
        refuse_overlap(spark, f"{Path(file).parent}/rejected", ["a_table_with_files"], "table")
    refuse_overlap(spark, f"{Path(file).parent}_rejected", ["a_table_with_files"], "table")
    odd = tmp_path / "re[j]*"
    spark_command("upsert", "--input", str(tmp_path / "in"), *arguments, str(odd))
    assert len(list(odd.glob("upsert=*/*.parquet"))) > 0
    assert {path: path.read_bytes() for path in there} == there


def test_an_upsert_stops_if_the_input_has_no_column_that_the_id_can_come_from(spark_command, tmp_path):
    """Was: every record was rejected, and with `--rejected` the command ended well."""
    file = tmp_path / "shop.yaml"
    file.write_text(TOPOLOGY.replace("{field: id}", "{key: true}"), encoding="utf-8")
    given = ["--input", str(tmp_path / "in"), "--delta", str(tmp_path / "table")]
    for options in ([], ["--rejected", str(tmp_path / "rejected")]):
        said = spark_command("upsert", *given, *options, fails=True)
        assert said.startswith("tracking_id: is taken from the record's key or a header, which the input does not have")
    assert not (tmp_path / "rejected").exists()


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("incremental", "--input in --out PLACE"),
        ("sink", "--exit-when-done --delta PLACE"),
        ("upsert", "--input in --rejected rejected --delta PLACE"),
        ("upsert", "--input in --delta table --rejected PLACE"),
    ],
)
def test_a_place_that_cannot_be_written_is_named_with_its_option(spark_command, tmp_path, command, options):
    """Was: a traceback of Java's."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "below"
    words = options.replace("PLACE", "file/below").split()
    given = [word if word.startswith("--") else str(tmp_path / word) for word in words]
    option = words[words.index("file/below") - 1]
    said = spark_command(command, *given, fails=True)
    assert said.startswith(f"{option}: no file can be written to {place}: "), said
    assert said.endswith("; name a directory that this user can write to, or can create")
    assert not (tmp_path / "table").exists()


@pytest.fixture
def own_logging():
    """A command sends the log to its terminal; when the test ends, it goes where it went before."""
    loggers = [logging.getLogger(name) for name in (None, "py4j", *NOISY)]
    root, levels = loggers[0], [each.level for each in loggers]
    handlers = root.handlers[:]
    yield
    root.handlers[:] = handlers
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


def events() -> Iterator[Event]:
    """Yield records where a producer of Kafka puts them, a few of them duplicates, late, or without an ID."""
    for number in range(2_000):
        key = b"order-%d" % (number - (number % 10 == 1))
        at_ms = BASE_MS + 10 * number - 9_000 * (number % 500 == 499)
        (partition,) = partitions([key], 2)
        yield Event(partition, b"{}" if number % 400 == 8 else b'{"id":"%s"}' % key, at_ms, key)


@pytest.fixture
def on_a_terminal(spark, make_job, monkeypatch, own_logging):
    """Runs commands of `dedup spark` on a job, on a terminal, in the run's session; the rate is always the same."""
    monkeypatch.setattr(type(spark), "stop", lambda _self: None)
    show = VerdictProgress.show
    monkeypatch.setattr(VerdictProgress, "show", lambda self, doing, _, *above: show(self, doing, 48_210.0, *above))
    job = make_job(document={"guard_period": "20s", "grace": "5s"})
    job.send(list(events()))

    def run(width: int, command: str, *arguments: str) -> str:
        given = ["spark", command, str(job.topology_file), "--config", str(job.config_file), *arguments]
        quiet_logging()  # as `main` does
        environ = {"COLUMNS": str(width), "FORCE_COLOR": "1", "NO_COLOR": "1"}
        ran = CliRunner().invoke(create_app(), [each.replace("DIR", str(job.directory)) for each in given], env=environ)
        assert ran.exit_code == 0, (ran.output, ran.exception)
        return ran.output.replace(str(job.directory), "DIR").replace(job.name, "shop")

    return run


@pytest.mark.parametrize("width", WIDTHS)
def test_a_stream_and_a_sink_show_what_they_did(on_a_terminal, width):
    written = on_a_terminal(width, "run", "--checkpoint", "DIR/checkpoint", "--exit-when-done")
    # Rich shows the cursor again when it removes the progress line: what was on the screen until then is shown, too.
    running, ended = screen(written.partition("\x1b[?25h")[0]), screen(written)
    log = "".join(re.findall(r"^\d\d:\d\d:\d\d .*\n", ended, flags=re.MULTILINE))
    assert running.startswith(log)
    assert ended.startswith(log)
    shown = re.sub(r"^\d\d:\d\d:\d\d", "HH:MM:SS", re.sub(r" in [\d.]+ s:", " in N s:", log), flags=re.MULTILINE)
    progress = running.removeprefix(log) + ended.removeprefix(log)
    assert_looks_as_before("spark-run", width, shown + progress)
    assert max(map(len, progress.splitlines())) <= width
    shown = on_a_terminal(width, "sink", "--delta", "DIR/table", "--exit-when-done")
    assert_looks_as_before("spark-sink", width, screen(shown))
