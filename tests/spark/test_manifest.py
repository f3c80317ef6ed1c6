"""Runs on a file system that cannot rename a directory at once: a manifest publishes them, and helpers read them.

The file system is Hadoop's `viewfs`, mounted on a local directory; tests/spark/test_s3.py has a real S3 interface.
"""

from __future__ import annotations

import json

import pytest
from pyspark.sql import SparkSession

from dedup.errors import SettingsError, StateIncompatible
from dedup.spark import backfill as module
from dedup.spark import read_run
from dedup.spark.backfill import RunDirectory, backfill
from dedup.spark.files import read_files
from dedup.spark.session import HadoopDirectory
from dedup.spark.tables import table_rows
from tests.spark.test_batch_files import LOG, NOW_MS, VERDICTS, topology, write

ROOT = "viewfs://store/out"


@pytest.fixture
def store(spark: SparkSession, tmp_path):
    """A local directory that Hadoop knows as ``viewfs://store/``."""
    (tmp_path / "store").mkdir()
    name = "fs.viewfs.mounttable.store.link./out"
    spark.conf.set(name, (tmp_path / "store").as_uri())
    # Hadoop keeps a file system by its name, with the mount table that it had then.
    spark.conf.set("fs.viewfs.impl.disable.cache", "true")
    yield tmp_path / "store"
    spark.conf.unset(name)


@pytest.fixture
def history(spark, tmp_path):
    write(tmp_path / "in" / "log.parquet", LOG)
    return read_files(spark, [str(tmp_path / "in")], "parquet")


def verdicts(frame) -> dict[tuple[int, int], str]:
    rows = frame.collect()
    found = {(row["partition"], row["offset"]): row["verdict"] for row in rows}
    assert len(found) == len(rows)
    return found


class Killed(BaseException):
    """What stands for a kill."""


def killed(*_arguments, **_named):
    raise Killed


def manifest_written(write_text):
    def write_and_end(self, path, text, part_name):
        write_text(self, path, text, part_name)
        if path.getName() == "backfill.json":
            raise Killed

    return write_and_end


STEPS = {
    "the files are there": (module, "counts_of", lambda _: killed),
    "they are counted": (module, "listed", lambda _: killed),
    "they are listed": (RunDirectory, "_publish_manifest", lambda _: killed),
    "the manifest is there": (HadoopDirectory, "write", manifest_written),
}


@pytest.mark.parametrize("step", STEPS)
def test_whenever_a_run_is_killed_readers_see_all_of_it_or_nothing(spark, store, history, monkeypatch, step):
    owner, name, ended = STEPS[step]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, ended(getattr(owner, name)))
        with pytest.raises(Killed):
            backfill(history, topology(), ROOT, now_ms=NOW_MS)
    assert list(store.glob("_attempt-*/verdict=*/*.parquet")) != []
    if step == "the manifest is there":
        assert verdicts(read_run(spark, ROOT)) == VERDICTS
    else:
        with pytest.raises(SettingsError, match="has no run backfill"):
            read_run(spark, ROOT)
    again = backfill(history, topology(), ROOT)
    assert again.now_ms == NOW_MS
    assert again.fresh == (step != "the manifest is there")
    assert verdicts(read_run(spark, ROOT)) == VERDICTS


def test_a_reader_takes_the_files_of_the_manifest_and_no_others(spark, store, history):
    report = backfill(history, topology(), ROOT, run="may", now_ms=NOW_MS)
    assert report.path == f"{ROOT}/run=may"
    (one, *_) = store.glob("_attempt-may-*/verdict=unique/*.parquet")
    (one.parent / "part-of-a-second-attempt.parquet").write_bytes(one.read_bytes())
    backfill(history, topology(), ROOT, run="june", now_ms=NOW_MS)
    assert verdicts(read_run(spark, ROOT, "may")) == VERDICTS
    assert sum(read_files(spark, [report.path], "parquet").records.groupBy().count().first()) == len(LOG)
    # As `upsert --input` has it, whose command is the same for every file system.
    unique = read_files(spark, [f"{report.path}/verdict=unique"], "parquet").records
    rows = table_rows(unique, topology(), schema="id INT", order="event_time").rows
    assert {row["id"] for row in rows.collect()} == {1, 7, 8}
    with pytest.raises(SettingsError, match="run may published no records there"):
        read_files(spark, [f"{report.path}/verdict=conflict"], "parquet")


def test_a_run_without_records_is_an_empty_table(spark, store, tmp_path):
    write(tmp_path / "in" / "log.parquet", [], placed=False)
    backfill(read_files(spark, [str(tmp_path / "in")], "parquet"), topology(), ROOT, now_ms=NOW_MS)
    empty = read_run(spark, ROOT)
    assert empty.count() == 0
    assert {"value", "verdict", "reason"} <= set(empty.columns)


def test_a_run_that_another_job_publishes_meanwhile_is_refused(store, history, monkeypatch):
    def published(*arguments):
        (store / "_runs").mkdir()
        mine = {
            "run": "backfill",
            "identity": "",
            "now_ms": 0,
            "order": "",
            "verdicts": {},
            "path": ROOT,
            "fresh": True,
        }
        (store / "_runs" / "backfill.json").write_text(json.dumps({**mine, "manifest": None}))
        return counted(*arguments)

    counted = module.counts_of
    monkeypatch.setattr(module, "counts_of", published)
    with pytest.raises(StateIncompatible, match="appeared while this run was under way"):
        backfill(history, topology(), ROOT, now_ms=NOW_MS)


@pytest.mark.parametrize("fmt", ["parquet", "delta"])
def test_a_run_on_a_disk_and_one_in_a_delta_table_are_read_the_same_way(spark, history, tmp_path, fmt):
    backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS, fmt=fmt)
    backfill(history, topology(), str(tmp_path / "out"), run="again", now_ms=NOW_MS, fmt=fmt)
    found = read_run(spark, str(tmp_path / "out"))
    assert verdicts(found) == VERDICTS
    assert "run" not in found.columns
