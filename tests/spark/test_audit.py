"""The audit on a real broker: a correct run passes, planted faults are found and named, as the verifier does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from dedup.cli.main import create_app, main
from dedup.errors import SettingsError, VerificationFailed
from dedup.settings import Settings
from dedup.spark.audit import audit
from dedup.spark.columns import RECORDS
from dedup.verify.cut import WHY_RESET
from dedup.verify.report import Report
from dedup.verify.verifier import verify
from tests.integration import test_verify_repartitioned
from tests.integration.planting import found
from tests.integration.test_admin import dedup
from tests.integration.test_verify_plants import (
    Bench,
    World,
    duplicate_forwarded,
    invented,
    judged_late,
    made_a_dead_letter,
    sent_twice,
    swapped,
    wrong_reason,
)
from tests.integration.workload import BASE_MS, Event, workload

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]


@pytest.fixture
def bench(kafka, admin, topic_names: Callable[[str], str], tmp_path: Path) -> Bench:
    return Bench(kafka, admin, topic_names("audited"), tmp_path)


def audited(spark: SparkSession, bench: Bench) -> Report:
    return audit(spark, bench.topology, bench.settings)


def test_a_correct_run_passes_with_the_verifiers_own_books(spark, bench):
    verified = bench.verify()
    report = audited(spark, bench)
    assert found(report) == {}, report.samples
    assert report.passed
    assert report.not_provable == {}
    # Where records are pending, what is in the output may be theirs: nothing is counted as ended.
    assert report.books == [replace(books, ended=None if books.pending else books.ended) for books in verified.books]
    timeline = report.timeline
    assert sum(map(sum, timeline.counts.values())) + sum(timeline.undated.values()) == report.read
    assert timeline.undated == verified.timeline.undated


@pytest.fixture
def command(bench, tmp_path, monkeypatch):
    """Return a function that runs `dedup spark audit` over the bench in the run's session; it returns the report."""
    reports = []

    def kept(*arguments, **options):
        reports.append(audit(*arguments, **options))
        return reports[-1]

    def run(page: Path) -> Report:
        file, name = tmp_path / "audited.yaml", bench.name
        document = {
            "dedup": 1,
            "name": name,
            "source": {"topics": [f"{name}-in"], "partitioned_by": "tracking_id"},
            "tracking_id": {"field": "id"},
            "guard_period": "10s",
            "output": {"topic": f"{name}-out"},
            "duplicates": f"{name}-duplicates",
            "late": f"{name}-late",
            "dead_letter": f"{name}-dead",
        }
        file.write_text(json.dumps(document), encoding="utf-8")
        # The run's session goes on; a driver of its own would stop it.
        monkeypatch.setattr(SparkSession, "stop", lambda _self: None)
        monkeypatch.setattr("dedup.spark.audit.audit", kept)
        config = ["--config", str(tmp_path / "config.yaml")]
        monkeypatch.setattr(
            sys, "argv", ["dedup", "spark", "audit", str(file), *config, "--report", str(page), "--quiet"]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == VerificationFailed.exit_code == 4
        (report,) = reports
        return report

    return run


def test_a_loss_a_double_a_phantom_and_a_wrong_late_are_found_and_nothing_else(spark, bench, command, tmp_path, capsys):
    """By the command, which says 4 and writes the page."""

    def plant(world: World) -> None:
        judged_late(world)
        sent_twice(world)
        invented(world)
        # The books of a partition would hide a loss behind a double: this one is of the other partition.
        lost = next(sent for sent in world.output if sent.partition == 1)
        world.output.remove(lost)

    verified = bench.verify(plant)
    report = command(tmp_path / "audit.html")
    wanted = {"lost": 1, "duplicated": 1, "phantom": 1, "wrong_late": 1, "unbalanced": 1}
    assert {kind: number for kind, number in found(report).items() if kind != "unbalanced"} == {
        kind: number for kind, number in wanted.items() if kind != "unbalanced"
    }, report.samples
    assert found(report)["unbalanced"] >= 1
    assert not verified.passed
    assert {sample.kind for sample in report.samples} == set(wanted)
    said = capsys.readouterr().err
    assert "lost 1  duplicated 1" in said, said
    page = (tmp_path / "audit.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "http" not in page
    assert f"<title>dedup spark audit {bench.name}</title>" in page
    document = json.loads((tmp_path / "audit.json").read_text(encoding="utf-8"))
    assert (document["topology"], document["violations"]) == (bench.name, dict(report.counts))


@pytest.mark.parametrize(("reason", "wrong"), [("refused_by_broker", {}), ("id_missing", {"wrong_dead_letter": 1})])
def test_a_dead_letter_of_the_repartition_step_needs_a_reason_of_this_step(
    spark, kafka, admin, topic_names, tmp_path, reason, wrong
):
    bench = test_verify_repartitioned.Bench(kafka, admin, topic_names("joined"), tmp_path)
    bench.write(partial(test_verify_repartitioned.of_the_step, reason=reason))
    settings = Settings(brokers=(kafka.bootstrap,))
    report = audit(spark, bench.topology(), settings)
    assert found(report) == wrong, report.samples
    assert found(verify(bench.topology(), settings)) == wrong
    assert sum(report.not_provable.values()) == (0 if wrong else 1)


def test_a_damaged_history_is_told_by_name(spark, monkeypatch, tmp_path):
    rows = [
        (b"k", b'{"id":"%d","pad":"%s"}' % (number, b"x" * 500), [], 5, None, None, None) for number in range(2_000)
    ]
    spark.createDataFrame(rows, RECORDS).coalesce(1).write.option("compression", "none").parquet(str(tmp_path / "in"))
    (file,) = (tmp_path / "in").glob("*.parquet")
    whole = bytearray(file.read_bytes())
    whole[100:5_000] = bytes(4_900)
    file.write_bytes(whole)
    for beside in (tmp_path / "in").glob(".*.crc"):
        beside.unlink()
    topology = tmp_path / "t.yaml"
    topology.write_text(
        "dedup: 1\nname: t\nguard_period: 10s\ntracking_id: {field: id}\nsource: {topics: [c]}\n", encoding="utf-8"
    )
    monkeypatch.setattr(SparkSession, "stop", lambda _self: None)
    # What it does with the records does not matter: they are read.
    monkeypatch.setattr("dedup.spark.audit.audit", lambda *_, history, **__: history.records.collect())
    arguments = ["spark", "audit", str(topology), "--history", str(tmp_path / "in"), "--quiet"]
    error = CliRunner().invoke(create_app(), arguments).exception
    assert isinstance(error, SettingsError), error
    assert f"{file.name}: is damaged" in str(error)


def test_many_faults_at_once_are_told_apart(spark, bench):
    def plant(world: World) -> None:
        made_a_dead_letter(world)
        swapped(world)
        duplicate_forwarded(world)
        wrong_reason(world)
        world.late.append(world.late[0])
        world.dead.append(world.dead.pop(1))
        world.duplicates.pop(0)

    bench.verify(plant)
    report = audited(spark, bench)
    wanted = {"reordered": 1, "duplicated": 2, "wrong_dead_letter": 2, "wrong_duplicate": 1, "unbalanced": 1}
    assert found(report) == wanted, report.samples


def test_what_is_deleted_proves_nothing_and_is_counted(spark, bench):
    bench.verify()
    for topic, partition, offset in (("in", 0, 4), ("out", 1, 1)):
        place = TopicPartition(f"{bench.name}-{topic}", partition, offset)
        bench.admin.client.delete_records([place])[place].result(timeout=30)
    report = audited(spark, bench)
    assert found(report) == {}, report.samples
    assert sum(report.not_provable.values()) > 1


@pytest.mark.parametrize("late", ["drop", "forward"])
def test_where_no_topic_has_the_late_records_a_source_without_its_beginning_is_not_told_lost(spark, make_job, late):
    job = make_job(partitions=1, document={"guard_period": "10s", "late": late})
    seconds = {"h": 100, "a": 0, "b": 30, "e": 80, "c": 95, "d": 101}
    job.send([Event(0, b'{"id":"%s"}' % name.encode(), BASE_MS + at * 1000) for name, at in seconds.items()])
    job.finish()
    place = TopicPartition(job.topology.source.topics[0], 0, 1)
    job.admin.client.delete_records([place])[place].result(timeout=30)
    report = audit(spark, job.topology, job.settings)
    assert found(report) == {}, report.samples
    assert sum(report.not_provable.values()) > 0


@pytest.mark.parametrize("to", [(), ("--to", "latest")], ids=["anew", "latest"])
def test_what_is_older_than_a_reset_is_left_out(spark, make_job, to):
    job = make_job()
    job.send(workload(4, 300))
    job.finish()
    dedup(job, "reset", "--yes", *to)
    job.send(workload(5, 200))
    job.finish()
    report = audit(spark, job.topology, job.settings)
    assert found(report) == {}, report.samples
    assert list(report.not_provable) == [WHY_RESET]
    assert report.read == (200 if to else 500)
    assert verify(job.topology, job.settings).read == report.read


def test_a_fleets_run_that_repartitions_passes(spark, make_job, topic_names):
    topic = topic_names("hops")
    twice = f"{topic}.duplicates"
    document = {"source": {"topics": [topic]}, "guard_period": "20s", "grace": "60s", "duplicates": twice}
    job = make_job(document=document, config={"topics": {"partitions": 4}})
    job.send(workload(3, 1_500, scattered=True))
    job.finish()
    report = audit(spark, job.topology, job.settings)
    assert found(report) == {}, report.samples
    assert report.not_provable == {}
    assert report.read == 1_500
    copy = next(message for message in job.read(twice) if message.partition() == 1)
    job.producer.produce(twice, copy.value(), copy.key(), partition=1, headers=copy.headers(), timestamp=BASE_MS)
    job.producer.flush(30)
    # Was: copies in the partitions of the earlier number were wrong duplicates, and missing in those of the new one.
    job.admin.add_partitions(twice, 4)
    for each in (audit(spark, job.topology, job.settings), verify(job.topology, job.settings)):
        assert (found(each), each.not_provable) == ({"wrong_duplicate": 1}, {}), each.samples
