"""Several attempts at one run of a backfill: one publishes it whole, and the others are told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dedup.errors import BrokerUnavailable, InvariantBroken, RecordFailed, StateIncompatible
from dedup.spark import backfill as module
from dedup.spark import read_run
from dedup.spark.backfill import RunDirectory, backfill
from dedup.spark.batch_verdicts import Judging
from dedup.spark.files import read_files
from tests.spark.test_batch_files import LOG, NOW_MS, VERDICTS, topology, write
from tests.waiting import until


@pytest.fixture
def history(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", LOG)
    return read_files(spark, [str(tmp_path / "in")], "parquet")


FAILING = {"tracking_id": {"field": "id", "missing": "fail"}}


@pytest.fixture
def incomplete(spark, tmp_path):
    write(tmp_path / "incomplete" / "a.parquet", [*LOG, (b"{}", 30, 1, 1)])
    return read_files(spark, [str(tmp_path / "incomplete")], "parquet")


def verdicts(spark, out) -> dict[tuple[int, int], str]:
    rows = read_run(spark, str(out)).collect()
    assert len({(row["partition"], row["offset"]) for row in rows}) == len(rows)
    return {(row["partition"], row["offset"]): row["verdict"] for row in rows}


STEPS = ("_write_attempt", "_rename", "_moved")


@pytest.mark.parametrize("writer", ["arrow", "spark"])
def test_of_two_jobs_that_overlap_one_publishes_and_the_other_is_told(spark, tmp_path, monkeypatch, history, writer):
    if writer == "spark":
        monkeypatch.setattr(module, "codec_of", lambda _spark: None)
    for step in STEPS:
        out = tmp_path / step
        (out / "_attempt-backfill-0123abcd").mkdir(parents=True)  # of a job that was killed
        (out / "_attempt-backfill-2-0123abcd").mkdir()  # of another run

        before = getattr(RunDirectory, step)

        def meanwhile(*arguments, step=step, out=out, before=before):
            monkeypatch.setattr(RunDirectory, step, before)
            if step == "_write_attempt":
                before(*arguments)
            # The second job has another rule, so that it is clear whose verdicts are published.
            backfill(history, topology(grace="4s"), str(out), now_ms=NOW_MS)
            return None if step == "_write_attempt" else before(*arguments)

        monkeypatch.setattr(RunDirectory, step, meanwhile)
        with pytest.raises(StateIncompatible, match="another job has published the same run"):
            backfill(history, topology(), str(out), now_ms=NOW_MS)
        assert verdicts(spark, out) == VERDICTS
        assert sorted(path.name for path in out.iterdir()) == ["_attempt-backfill-2-0123abcd", "run=backfill"]
        assert not backfill(history, topology(grace="4s"), str(out), now_ms=NOW_MS).fresh


def test_a_copy_of_a_task_that_creates_a_file_after_the_last_one_was_deleted_does_not_matter(
    spark, tmp_path, monkeypatch, history
):
    """Was: the run had been judged, and was thrown away with a traceback. Spark kills speculative copies of tasks."""
    rmdir, late = Path.rmdir, []

    def created(directory):
        if directory.name == "_work" and not late:
            late.append(directory / "part-unique-of-a-copy.parquet")
            late[0].touch()
        rmdir(directory)

    monkeypatch.setattr(Path, "rmdir", created)
    out = tmp_path / "out"
    backfill(history, topology(), str(out), now_ms=NOW_MS)
    assert len(late) == 1
    assert list(out.rglob("_work")) == []
    assert verdicts(spark, out) == VERDICTS


@pytest.mark.parametrize("run", ["backfill", "june"])
def test_of_two_jobs_that_write_to_one_delta_table_at_once_the_later_one_is_told(
    spark, tmp_path, monkeypatch, history, run
):
    """Was: a traceback of Delta's."""
    out, begun, ready = str(tmp_path / "out"), tmp_path / "begun", tmp_path / "ready"
    before = Judging.frame

    def waiting(batches):
        begun.touch()
        until(ready.exists, "the other job's commit", within_s=300)
        yield from batches

    def first(self):
        monkeypatch.setattr(Judging, "frame", before)
        rows = before(self).coalesce(1)
        return rows.mapInArrow(waiting, rows.schema)

    monkeypatch.setattr(Judging, "frame", first)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(backfill, history, topology(), out, run=run, fmt="delta", now_ms=NOW_MS)
        try:
            until(begun.exists, "the first job to write its rows")
            backfill(history, topology(grace="4s"), out, fmt="delta", now_ms=NOW_MS)
        finally:
            ready.touch()
        told = job.exception()
    error, text = (
        (StateIncompatible, "another job has published the same run")
        if run == "backfill"
        else (BrokerUnavailable, "another job changed the table at the same time. Nothing was written. Run the command")
    )
    assert isinstance(told, error)
    assert text in str(told)
    assert verdicts(spark, out) == VERDICTS
    assert backfill(history, topology(grace="4s"), out, run=run, fmt="delta").fresh == (run == "june")


def test_a_job_leaves_the_attempt_of_another_one_that_is_at_work(spark, tmp_path, monkeypatch, history, incomplete):
    out = tmp_path / "out"
    before = RunDirectory._write_attempt

    def second_job_fails(*arguments):
        monkeypatch.setattr(RunDirectory, "_write_attempt", before)
        before(*arguments)
        with pytest.raises(RecordFailed):
            backfill(incomplete, topology(**FAILING), str(out), now_ms=NOW_MS)

    monkeypatch.setattr(RunDirectory, "_write_attempt", second_job_fails)
    backfill(history, topology(), str(out), now_ms=NOW_MS)
    assert verdicts(spark, out) == VERDICTS


def test_files_that_somebody_deletes_are_missed_before_a_run_is_published(spark, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_bytes(b'{"id":1}\n{"id":1}\n{"id":2}\n')
    history = read_files(spark, [str(tmp_path / "in")], "json")
    out = tmp_path / "out"
    timed = topology(event_time={"field": "id", "unit": "s"})

    def delete(*_):
        for file in out.glob("_attempt-*/verdict=unique/*.parquet"):
            file.unlink()

    for step, error, text in (
        ("_write_attempt", InvariantBroken, "has 3 records, but they received 1 verdicts. None of them is published"),
        ("_moved", StateIncompatible, "somebody deleted files of run backfill while it was being published"),
    ):
        before = getattr(RunDirectory, step)

        def disturbed(*arguments, step=step, before=before):
            if step == "_moved":
                delete()
                return before(*arguments)
            before(*arguments)
            return delete()

        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, step, disturbed)
            with pytest.raises(error, match=text):
                backfill(history, timed, str(out), now_ms=NOW_MS)
        assert list(out.glob("run=*")) == []
    assert backfill(history, timed, str(out)).verdicts == {"duplicate": 1, "unique": 2}


@pytest.mark.parametrize("fmt", ["parquet", "delta"])
def test_a_run_that_failed_can_be_repeated_with_what_its_error_advises(spark, tmp_path, incomplete, fmt):
    out = str(tmp_path / "out")
    with pytest.raises(RecordFailed, match="choose another policy"):
        backfill(incomplete, topology(**FAILING), out, fmt=fmt, now_ms=NOW_MS)
    assert list((tmp_path / "out").glob("_attempt-*")) == []
    report = backfill(incomplete, topology(), out, fmt=fmt, now_ms=NOW_MS + 1)
    assert report.now_ms == NOW_MS + 1
    assert verdicts(spark, out) == {**VERDICTS, (1, 1): "dead_letter"}
    with pytest.raises(StateIncompatible, match=r"was published at .* with another topology"):
        backfill(incomplete, topology(**FAILING), out, fmt=fmt, now_ms=NOW_MS)


def test_rows_of_a_delta_table_that_do_not_add_up_are_deleted_and_those_of_a_killed_job_are_kept(
    spark, tmp_path, monkeypatch, history
):
    out = str(tmp_path / "out")
    assert history.pieces is not None
    wrong = replace(history, pieces=replace(history.pieces, rows=len(LOG) + 1))
    with pytest.raises(InvariantBroken, match=r"None of them is published.*contained them for a moment"):
        backfill(wrong, topology(), out, fmt="delta", now_ms=NOW_MS)
    assert spark.read.format("delta").load(out).count() == 0

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "_publish_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            backfill(history, topology(), out, fmt="delta", now_ms=NOW_MS)
    with pytest.raises(StateIncompatible, match=r"has rows of run backfill.*DELETE FROM delta.`.*/out` WHERE run = 'b"):
        backfill(history, topology(grace="4s"), out, fmt="delta", now_ms=NOW_MS)
    assert backfill(history, topology(), out, fmt="delta").now_ms == NOW_MS
    assert verdicts(spark, out) == VERDICTS
