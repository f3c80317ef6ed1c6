"""Runs beside each other under one directory: each is published whole, and touches no other's."""

from __future__ import annotations

import pytest

from dedup.errors import StateIncompatible
from dedup.spark.backfill import RunDirectory, backfill
from dedup.spark.files import read_files
from tests.spark.test_batch_files import LOG, NOW_MS, topology, write


def test_a_run_leaves_the_attempt_of_another_with_a_longer_name(spark, tmp_path):
    write(tmp_path / "in" / "log.parquet", LOG)
    others, own = tmp_path / "out" / "_attempt-may-late-0123abcd", tmp_path / "out" / "_attempt-may-0123abcd"
    for directory in (others, own):
        directory.mkdir(parents=True)
    backfill(
        read_files(spark, [str(tmp_path / "in")], "parquet"),
        topology(),
        str(tmp_path / "out"),
        run="may",
        now_ms=NOW_MS,
    )
    assert others.is_dir()
    assert not own.exists()


def test_a_run_that_another_job_publishes_meanwhile_is_refused(spark, tmp_path, monkeypatch):
    """Rename onto a directory that is there would put the attempt into it."""
    write(tmp_path / "in" / "log.parquet", LOG)
    target = tmp_path / "out" / "run=backfill"
    moved = RunDirectory._moved

    def late(self, attempt, to):
        (target / "verdict=unique").mkdir(parents=True)
        return moved(self, attempt, to)

    monkeypatch.setattr(RunDirectory, "_moved", late)
    with pytest.raises(StateIncompatible, match="appeared while this run was under way"):
        backfill(read_files(spark, [str(tmp_path / "in")], "parquet"), topology(), str(tmp_path / "out"), now_ms=NOW_MS)


def test_a_run_whose_report_is_missing_is_refused_before_judging(spark, tmp_path, monkeypatch):
    """Was: after all had been judged, and as if another job had just published it."""
    write(tmp_path / "in" / "log.parquet", LOG)
    out = tmp_path / "out"
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    backfill(history, topology(), str(out), now_ms=NOW_MS)
    (out / "run=backfill" / "_run.json").unlink()
    before = sorted(out.rglob("*"))
    monkeypatch.delattr(RunDirectory, "_write_attempt")
    with pytest.raises(
        StateIncompatible, match=r"out/run=backfill exists, but its _run.json is missing.*Nothing was j"
    ):
        backfill(history, topology(), str(out), now_ms=NOW_MS)
    assert sorted(out.rglob("*")) == before
