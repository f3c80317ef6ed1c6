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


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_run_that_another_job_publishes_meanwhile_is_refused(spark, tmp_path, monkeypatch, when):
    """Rename onto a directory that is there would put the attempt into it."""
    write(tmp_path / "in" / "log.parquet", LOG)
    target = tmp_path / "out" / "run=backfill"
    moved = RunDirectory._moved

    def late(self, attempt, to):
        (target / "verdict=unique").mkdir(parents=True)
        return moved(self, attempt, to)

    if when == "between":
        monkeypatch.setattr(RunDirectory, "_moved", late)
    else:
        target.mkdir(parents=True)
    with pytest.raises(StateIncompatible, match="appeared while this run was under way"):
        backfill(read_files(spark, [str(tmp_path / "in")], "parquet"), topology(), str(tmp_path / "out"), now_ms=NOW_MS)
