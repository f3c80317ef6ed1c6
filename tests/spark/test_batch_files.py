"""Backfill over files: what comes out, that it comes once, and which input is refused with its name."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from dedup.errors import RecordFailed, SettingsError, StateIncompatible, TopologyError
from dedup.spark.backfill import RunDirectory, backfill
from dedup.spark.batch_verdicts import judged
from dedup.spark.columns import RECORDS
from dedup.spark.dataframe import dedup
from dedup.spark.files import History, read_files
from dedup.spark.incremental import incremental
from dedup.spark.incremental_input import NewFiles
from dedup.spark.manifest import read_run
from dedup.spark.session import shuffle_partitions, shuffles_for, translated_errors
from dedup.spark.table_log import DeltaLog
from dedup.topology.parse import parse

NOW_MS = 1_800_000_000_000
BASE_MS = 1_700_000_000_000
BYTES = pa.binary()


def topology(**options):
    made = {
        "dedup": 1,
        "name": "shop",
        "source": {"topics": ["orders"], "partitioned_by": "tracking_id"},
        "tracking_id": {"field": "id"},
        "guard_period": "10s",
        "grace": "5s",
        "output": {"topic": "orders.unique"},
        **options,
    }
    return parse(json.dumps(made), name="shop.yaml")


def write(path: Path, rows, *, placed=True, value=BYTES) -> None:
    """Write (value, seconds after BASE_MS, partition, offset)."""
    columns = {
        "value": pa.array([row[0] for row in rows], value),
        "timestamp_ms": pa.array([BASE_MS + row[1] * 1000 for row in rows], pa.int64()),
    }
    if placed:
        columns["topic"] = pa.array(["orders"] * len(rows))
        columns["partition"] = pa.array([row[2] for row in rows], pa.int32())
        columns["offset"] = pa.array([row[3] for row in rows], pa.int64())
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), path)


LOG = [
    (b'{"id":1}', 0, 0, 0),
    (b'{"id":1}', 9, 0, 1),
    (b'{"id":1}', 10, 0, 2),
    (b"torn", 11, 0, 3),
    (b'{"id":7}', 30, 0, 4),
    (b'{"id":8}', 24, 0, 5),
    (b'{"id":8}', 24, 1, 0),
]
VERDICTS = {
    (0, 0): "unique",
    (0, 1): "duplicate",
    (0, 2): "unique",
    (0, 3): "dead_letter",
    (0, 4): "unique",
    (0, 5): "late",
    (1, 0): "unique",
}


def verdicts_at(spark, path) -> dict[tuple[int, int], str]:
    rows = spark.read.parquet(path).collect()
    found = {(row["partition"], row["offset"]): row["verdict"] for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_backfill_publishes_every_verdict_once_and_only_once(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", LOG)
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    assert history.placed
    assert history.contiguous
    said = []
    report = backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS, say=said.append)
    assert report.verdicts == {"dead_letter": 1, "duplicate": 1, "late": 1, "unique": 4}
    assert verdicts_at(spark, report.path) == VERDICTS
    assert "in the order of offsets" in said[0]
    files = sorted((tmp_path / "out").rglob("*"))
    again = backfill(history, topology(), str(tmp_path / "out"), say=said.append)
    assert again == report.__class__(**{**again_fields(report), "fresh": False})
    assert "nothing was written" in said[-1]
    assert sorted((tmp_path / "out").rglob("*")) == files


def again_fields(report):
    return {name: getattr(report, name) for name in report.__dataclass_fields__}


def test_a_killed_run_is_made_anew_by_the_same_clock(spark, tmp_path, monkeypatch):
    write(tmp_path / "in" / "a.parquet", [(b'{"id":1}', 0, 0, 0), (b'{"id":2}', 20 * 365 * 86_400, 0, 1)])
    history = read_files(spark, [str(tmp_path / "in")], "parquet")

    def killed(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "_moved", killed)
        with pytest.raises(KeyboardInterrupt):
            backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    assert [path.name for path in (tmp_path / "out").glob("run=*")] == []
    assert [path.name for path in (tmp_path / "out").glob("_attempt-*")] != []
    # By another clock the second record would not be from the future.
    report = backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS * 2)
    assert report.now_ms == NOW_MS
    assert report.verdicts == {"dead_letter": 1, "unique": 1}
    assert len(verdicts_at(spark, report.path)) == 2
    assert sorted(path.name for path in (tmp_path / "out").glob("*")) == ["run=backfill"]


def test_another_frame_with_as_many_rows_is_another_input(spark, tmp_path):
    rows = [(b"k", b'{"id":%d}' % number, [], 5, None, None, None) for number in range(4)]
    today = spark.createDataFrame(rows, RECORDS)
    backfill(today, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    said = []
    shuffled = spark.createDataFrame(rows[::-1], RECORDS).repartition(3)
    backfill(shuffled, topology(), str(tmp_path / "out"), say=said.append)
    assert "was already published" in said[0]
    moved = (b'{"id":0}', b"k", *rows[0][2:])
    without_key = (None, *rows[0][1:])
    twice = [rows[0], rows[0], rows[2], rows[2]]
    for other in ([moved, *rows[1:]], [without_key, *rows[1:]], twice, [rows[1], rows[1], *twice[2:]]):
        with pytest.raises(StateIncompatible, match="with another topology, input or order"):
            backfill(spark.createDataFrame(other, RECORDS), topology(), str(tmp_path / "out"))


def test_the_same_run_of_another_topology_or_input_is_refused(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", LOG)
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    with pytest.raises(StateIncompatible, match="Choose another --run"):
        backfill(history, topology(guard_period="11s"), str(tmp_path / "out"), now_ms=NOW_MS)
    write(tmp_path / "in" / "b.parquet", [(b'{"id":9}', 0, 1, 1)])
    with pytest.raises(StateIncompatible, match=r"was published .* with another topology, input or order"):
        backfill(read_files(spark, [str(tmp_path / "in")], "parquet"), topology(), str(tmp_path / "out"))


def test_a_delta_table_takes_a_run_at_once_and_is_read_again(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", LOG)
    table = str(tmp_path / "table")
    read_files(spark, [str(tmp_path / "in")], "parquet").records.write.format("delta").save(table)
    history = read_files(spark, [table], "delta")
    out = str(tmp_path / "out")
    report = backfill(history, topology(), out, run="one", fmt="delta", now_ms=NOW_MS)
    assert report.verdicts == {"dead_letter": 1, "duplicate": 1, "late": 1, "unique": 4}
    (tmp_path / "out" / "_runs" / "one.json").unlink()  # as if the driver had died right after the table's commit
    backfill(history, topology(), out, run="one", fmt="delta", now_ms=NOW_MS)
    backfill(history, topology(), out, run="two", fmt="delta", now_ms=NOW_MS)
    rows = spark.read.format("delta").load(out).collect()
    assert len(rows) == 2 * len(LOG)
    assert {(row["partition"], row["offset"]): row["verdict"] for row in rows if row["run"] == "one"} == VERDICTS


def test_json_lines_are_events_byte_for_byte(spark, tmp_path):
    lines = [
        b'{"id": 1.0, "at": 5}',
        b'{"id": 1, "at": 6}',
        b'{"id": 1.0, "at": 7}',
        b'{"id": "torn',
        b"",
        b'{"id":{}}',
    ]
    (tmp_path / "events.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    history = read_files(spark, [str(tmp_path / "events.jsonl.gz")], "json")
    assert not history.placed
    said = []
    timed = topology(event_time={"field": "at", "unit": "s"})
    report = backfill(history, timed, str(tmp_path / "out"), now_ms=NOW_MS, say=said.append)
    assert report.verdicts == {"dead_letter": 3, "duplicate": 1, "unique": 2}
    assert "order of event times" in said[0]
    values = {bytes(row["value"]) for row in spark.read.parquet(report.path).collect()}
    assert values == set(lines)


def test_without_coordinates_the_order_is_that_of_event_times_and_nothing_is_late(spark, tmp_path):
    rows = [(b'{"id":1,"n":%d}' % second, second, 0, 0) for second in (40, 0, 9, 31, 10)]
    write(tmp_path / "in" / "a.parquet", rows, placed=False)
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    found = judged(history.records, topology(), now_ms=NOW_MS, order="event_time").collect()
    by_second = {(row["timestamp_ms"] - BASE_MS) // 1000: row for row in found}
    assert {second: row["verdict"] for second, row in by_second.items()} == {
        0: "unique",
        9: "duplicate",
        10: "unique",
        31: "unique",
        40: "duplicate",
    }
    assert by_second[40]["first_time_ms"] == BASE_MS + 31_000
    assert by_second[40]["first_offset"] is None


def test_a_table_whose_rows_are_events(spark, tmp_path):
    frame = spark.createDataFrame([(1, "a", 5), (1, "b", 6), (None, "c", 7)], "id long, what string, at long")
    frame.write.parquet(str(tmp_path / "in"))
    history = read_files(spark, [str(tmp_path / "in")], "parquet", rows_are_events=True)
    timed = topology(event_time={"field": "at", "unit": "s"})
    report = backfill(history, timed, str(tmp_path / "out"), now_ms=NOW_MS)
    assert report.verdicts == {"dead_letter": 1, "duplicate": 1, "unique": 1}


def test_a_header_name_that_is_not_utf_8_is_a_dead_letter_as_a_worker_makes_it(spark, tmp_path):
    names = pa.array([b"whole", b"h\xff", b"h"], pa.binary()).view(pa.string())
    pairs = pa.StructArray.from_arrays([names, pa.array([b"1", b"2", b"3"])], ["key", "value"])
    columns = {
        "value": pa.array([b'{"id":1}', b'{"id":2}', b'{"id":3}'], pa.binary()),
        "headers": pa.ListArray.from_arrays(pa.array([0, 1, 3, 3], pa.int32()), pairs),
        "timestamp_ms": pa.array([BASE_MS] * 3, pa.int64()),
    }
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "in" / "a.parquet")
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    report = backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    assert report.verdicts == {"dead_letter": 1, "unique": 2}
    (dead,) = spark.read.parquet(report.path).where("verdict = 'dead_letter'").select("value", "reason").collect()
    assert (bytes(dead["value"]), dead["reason"]) == (b'{"id":2}', "header_not_utf8")


def test_files_are_read_and_written_by_arrow_or_by_spark_with_the_same_verdicts(spark, tmp_path, monkeypatch):
    write(tmp_path / "in" / "a b.parquet", [(row[0].decode(), *row[1:]) for row in LOG], value=pa.string())
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    assert history.pieces is not None
    by_arrow = backfill(history, topology(), str(tmp_path / "arrow"), now_ms=NOW_MS)
    by_spark = backfill(replace(history, pieces=None), topology(), str(tmp_path / "spark"), now_ms=NOW_MS)
    assert verdicts_at(spark, by_arrow.path) == verdicts_at(spark, by_spark.path) == VERDICTS
    # With a codec that Arrow lacks Spark writes, and what it writes is the same table.
    monkeypatch.setattr("dedup.spark.backfill.codec_of", lambda _spark: None)
    written = backfill(history, topology(), str(tmp_path / "written"), now_ms=NOW_MS)
    both = [spark.read.parquet(each.path) for each in (by_arrow, written)]
    assert both[0].dtypes == both[1].dtypes
    rows = [sorted(map(repr, each.collect())) for each in both]
    assert rows[0] == rows[1]


def test_a_damaged_file_is_refused_by_name_before_anything_runs(spark, tmp_path):
    write(tmp_path / "in" / "good.parquet", LOG)
    whole = (tmp_path / "in" / "good.parquet").read_bytes()
    (tmp_path / "in" / "torn.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SettingsError, match=r"torn.parquet: .*(damaged|cannot be read)"):
        read_files(spark, [str(tmp_path / "in")], "parquet")


def test_damage_inside_a_file_is_told_and_nothing_is_published(spark, tmp_path):
    rows = [(b'{"id":%d,"pad":"%s"}' % (number, b"x" * 500), number, 0, number) for number in range(2_000)]
    write(tmp_path / "in" / "a.parquet", rows)
    whole = bytearray((tmp_path / "in" / "a.parquet").read_bytes())
    whole[100:5_000] = bytes(4_900)
    (tmp_path / "in" / "a.parquet").write_bytes(whole)
    history = History(
        read_columns(spark, tmp_path / "in"), placed=True, contiguous=True, identity="damaged", place="damaged"
    )
    with pytest.raises(SettingsError, match=r"a\.parquet: is damaged or not in the given format"):
        backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    assert list((tmp_path / "out").glob("run=*")) == []


def read_columns(spark, path):
    from dedup.spark.columns import as_records  # noqa: PLC0415 - only here

    return as_records(spark.read.parquet(str(path)))


@pytest.mark.parametrize("drift", ["missing", "other type"])
def test_files_of_another_schema_are_refused_with_both(spark, tmp_path, drift):
    write(tmp_path / "in" / "a.parquet", LOG)
    if drift == "missing":
        write(tmp_path / "in" / "b.parquet", LOG[:1], placed=False)
    else:
        write(tmp_path / "in" / "b.parquet", [("text", 0, 0, 9)], value=pa.string())
    with pytest.raises(
        SettingsError, match=r"b.parquet: column `(offset|value)` is .*, but .* in the first file: read .* separately"
    ):
        read_files(spark, [str(tmp_path / "in")], "parquet")


def test_columns_of_another_type_are_refused_with_what_to_write(spark, tmp_path):
    pq.write_table(pa.table({"value": [1.5], "timestamp_ms": ["noon"], "offset": [1]}), tmp_path / "a.parquet")
    with pytest.raises(TopologyError) as refused:
        read_files(spark, [str(tmp_path / "a.parquet")], "parquet")
    text = str(refused.value)
    assert "column `value` is double; write it as string or binary" in text
    assert "column `timestamp_ms` is string; write it as bigint or int" in text
    assert "has offset but not topic, partition" in text


def test_rows_of_which_only_some_have_coordinates_are_refused(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", [*LOG, (b'{"id":9}', 0, None, None)])
    with pytest.raises(SettingsError, match="only 7 of 8 rows have topic, partition and offset"):
        read_files(spark, [str(tmp_path / "in")], "parquet")


def test_a_record_that_is_archived_twice_is_refused(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", LOG)
    write(tmp_path / "in" / "b.parquet", LOG[2:4])
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    assert not history.contiguous
    with pytest.raises(StateIncompatible, match=r"orders/0: the offsets 2 to \d+ occur twice"):
        backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    assert list((tmp_path / "out").glob("run=*")) == []


def test_ids_of_every_type_and_times_out_of_range(spark, tmp_path):
    rows = [
        (b'{"id":1}', 0, 0, 0),
        (b'{"id":"1"}', 0, 0, 1),
        (b'{"id":1.0}', 0, 0, 2),
        (b'{"id":true}', 0, 0, 3),
        (b'{"id":null}', 0, 0, 4),
        (b"{}", 0, 0, 5),
        (None, 0, 0, 6),
        (b'{"id":2}', -2 * BASE_MS // 1000, 0, 7),
        (b'{"id":3}', 10**10, 0, 8),
    ]
    write(tmp_path / "in" / "a.parquet", rows)
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    found = {
        row["offset"]: row for row in judged(history.records, topology(), now_ms=NOW_MS, order="offsets").collect()
    }
    assert [found[offset]["verdict"] for offset in range(4)] == ["unique"] * 4
    reasons = [(found[offset]["verdict"], found[offset]["reason"]) for offset in range(4, 9)]
    assert reasons == [
        ("dead_letter", "id_null"),
        ("dead_letter", "id_missing"),
        ("exempt", "tombstone"),
        ("dead_letter", "negative_time"),
        ("dead_letter", "future_time"),
    ]


def test_a_place_of_verdicts_may_look_like_a_pattern(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", LOG)
    out = str(tmp_path / "out [may] {1}")
    backfill(read_files(spark, [str(tmp_path / "in")], "parquet"), topology(), out, now_ms=NOW_MS)
    assert read_run(spark, out).count() == len(LOG)
    for number in range(2):
        write(tmp_path / "bronze" / f"{number}.parquet", LOG[3 * number : 3 * number + 3])
        source = NewFiles(spark, [str(tmp_path / "bronze")], "parquet")
        assert incremental(source, topology(), f"{out} silver", now_ms=NOW_MS).new_rows == 3


def test_a_file_system_that_the_session_lacks_is_named(spark):
    with pytest.raises(SettingsError, match=r"s3://: is a file .* not have; write s3a:"), translated_errors():
        read_files(spark, ["s3://bucket/in"], "parquet")
    with pytest.raises(SettingsError, match=r"gs://: is a file system that this .* add its connector"):
        RunDirectory(spark, "gs://bucket/out", "backfill", "parquet")
    # Hadoop knows these schemes, and names only the class that the session lacks.
    with pytest.raises(SettingsError, match=r"abfss://: is a file system that this .* add its connector"):
        RunDirectory(spark, "abfss://files@shop.dfs.core.windows.net/out", "backfill", "parquet")
    with pytest.raises(SettingsError, match=r"SecureAzureBlobFileSystem: is a file system that"), translated_errors():
        read_files(spark, ["abfss://files@shop.dfs.core.windows.net/in"], "parquet")


def test_rows_that_do_not_fit_into_a_delta_table_are_told_in_a_sentence(spark, tmp_path):
    out = str(tmp_path / "out")
    write(tmp_path / "in" / "a.parquet", LOG)
    backfill(read_files(spark, [str(tmp_path / "in")], "parquet"), topology(), out, now_ms=NOW_MS, fmt="delta")
    (tmp_path / "days" / "day=1").mkdir(parents=True)
    write(tmp_path / "days" / "day=1" / "a.parquet", LOG)
    history = read_files(spark, [str(tmp_path / "days")], "parquet")
    with pytest.raises(StateIncompatible, match=r"out: Delta says: .*Nothing was written"):
        backfill(history, topology(), out, run="june", now_ms=NOW_MS, fmt="delta")
    rows = spark.createDataFrame([("k", "v")], "key string, other string")
    with pytest.raises(StateIncompatible, match=r"out: Delta says: .*Nothing was written"):
        DeltaLog(spark, out).append(rows, "sink", 1, "{}", after=0, taken="taken")


def test_a_policy_that_says_fail_ends_the_job_with_the_record(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", [*LOG[:1], (b"{}", 1, 0, 1)])
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    failing = topology(tracking_id={"field": "id", "missing": "fail"})
    with pytest.raises(RecordFailed, match=r"/0/1: .*`missing: fail`"):
        backfill(history, failing, str(tmp_path / "out"), now_ms=NOW_MS)
    assert list((tmp_path / "out").glob("run=*")) == []


def test_a_run_name_that_is_no_directory_is_refused(spark, tmp_path):
    with pytest.raises(SettingsError, match="is not a valid directory name"):
        backfill(spark.createDataFrame([], RECORDS), topology(), str(tmp_path), run="../up")


@pytest.mark.parametrize("place", ["file", "file/out"])
def test_a_place_that_cannot_be_written_is_refused_with_its_name(spark, tmp_path, place):
    (tmp_path / "file").touch()
    write(tmp_path / "in" / "a.parquet", LOG)
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    with pytest.raises(
        SettingsError, match=rf"^--out: no file can be written to {tmp_path / place}: .*; name a director"
    ):
        backfill(history, topology(), str(tmp_path / place), now_ms=NOW_MS)


def test_another_payload_under_the_same_id_is_a_conflict(spark, tmp_path):
    values = [b'{"id":1,"n":1,"at":1}', b'{"id":1,"n":1,"at":2}', b'{"id":1,"n":2,"at":3}']
    write(tmp_path / "in" / "a.parquet", [(value, at, 0, at) for at, value in enumerate(values)])
    shop = topology(duplicates="orders.again", conflicts={"exclude": ["at"]})
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    verdicts = judged(history.records, shop, now_ms=NOW_MS, order="offsets")
    assert [row.verdict for row in verdicts.orderBy("offset").collect()] == ["unique", "duplicate", "conflict"]


def test_delta_tables_may_be_named_by_relative_paths(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", LOG)
    # Relative to where the session's Java was started.
    table, out = (os.path.relpath(tmp_path / name, spark._jvm.System.getProperty("user.dir")) for name in ("t", "out"))
    spark.read.parquet(str(tmp_path / "in")).write.format("delta").save(table)
    report = backfill(read_files(spark, [table], "delta"), topology(), out, now_ms=NOW_MS, fmt="delta")
    assert report.verdicts == {"dead_letter": 1, "duplicate": 1, "late": 1, "unique": 4}
    assert spark.read.format("delta").load(str(tmp_path / "out")).count() == len(LOG)
    again = backfill(read_files(spark, [table], "delta"), topology(), out, now_ms=NOW_MS, fmt="delta")
    assert not again.fresh


@pytest.fixture
def no_partitions_set(spark: SparkSession) -> Iterator[None]:
    """The session is as one whose user has not said into how many partitions to shuffle."""
    before = spark.conf.get(PARTITIONS)
    spark.conf.unset(PARTITIONS)
    yield
    spark.conf.set(PARTITIONS, before)


PARTITIONS = "spark.sql.shuffle.partitions"


@pytest.mark.usefixtures("no_partitions_set")
def test_a_small_input_is_one_task_and_one_file_of_each_verdict(spark, tmp_path):
    assert spark.conf.get(PARTITIONS) == "200"
    write(tmp_path / "in" / "a.parquet", LOG)
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    report = backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    files = list((tmp_path / "out").rglob("*.parquet"))
    assert sorted(file.parent.name for file in files) == sorted(f"verdict={name}" for name in report.verdicts)
    assert spark.conf.get(PARTITIONS) == "200"
    assert PARTITIONS not in spark.conf.getAll


@pytest.mark.usefixtures("no_partitions_set")
@pytest.mark.parametrize(
    ("size_bytes", "partitions"), [(0, 1), (100_000, 1), (30 << 20, 2), (5 << 30, 160), (3 << 40, 65_536), (None, 200)]
)
def test_shuffle_partitions_follow_the_size_of_the_input(spark, size_bytes, partitions):
    with shuffles_for(spark, size_bytes):
        assert shuffle_partitions(spark) == partitions


def test_a_number_of_shuffle_partitions_that_the_user_sets_is_kept(spark):
    with shuffles_for(spark, 5 << 30):
        assert shuffle_partitions(spark) == 2


def test_shuffle_partitions_may_be_auto_as_on_databricks(spark):
    """Spark itself refuses the word, so the configuration is a dictionary here."""

    class Conf(dict[str, str]):
        set, unset = dict.__setitem__, dict.__delitem__
        getAll = property(lambda self: self)  # noqa: N815  # Spark's name

    databricks = SimpleNamespace(conf=Conf({PARTITIONS: "auto"}), sparkContext=spark.sparkContext)
    assert shuffle_partitions(databricks) == 200
    with shuffles_for(databricks, 5 << 30):
        assert shuffle_partitions(databricks) == 160
    assert databricks.conf[PARTITIONS] == "auto"


def test_an_input_that_was_replaced_by_one_of_the_same_size_is_another_input(spark, tmp_path):
    file, out = tmp_path / "in" / "a.json", str(tmp_path / "out")
    file.parent.mkdir()
    timed = topology(event_time={"field": "id", "unit": "ms"})
    file.write_bytes(b'{"id":1}\n{"id":1}\n')
    backfill(read_files(spark, [str(file)], "json"), timed, out, now_ms=NOW_MS)
    before = file.stat()
    file.write_bytes(b'{"id":1}\n{"id":2}\n')
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10_000_000))
    assert file.stat().st_size == before.st_size
    with pytest.raises(StateIncompatible, match="with another topology, input or order"):
        backfill(read_files(spark, [str(file)], "json"), timed, out, now_ms=NOW_MS)


def test_columns_in_the_paths_of_files_are_kept(spark, tmp_path):
    for day, rows in (("2026-01-31", LOG[:4]), ("2026-02-01", LOG[4:])):
        (tmp_path / "in" / f"day={day}").mkdir(parents=True)
        write(tmp_path / "in" / f"day={day}" / "a.parquet", rows)
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    report = backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    assert verdicts_at(spark, report.path) == VERDICTS
    days = {(row["partition"], row["offset"]): str(row["day"]) for row in spark.read.parquet(report.path).collect()}
    assert days == {row[2:]: "2026-01-31" if row in LOG[:4] else "2026-02-01" for row in LOG}


@pytest.mark.parametrize("fmt", ["json", "json-records"])
def test_columns_in_the_paths_of_lines_are_kept_and_never_mistaken_for_those_of_a_record(spark, tmp_path, fmt):
    value = '{"id":1}' if fmt == "json" else '{"value":"{\\"id\\":1}"}'
    for column in ("shop", "topic"):
        directory = tmp_path / column / f"{column}=north"
        directory.mkdir(parents=True)
        (directory / "a.json").write_text(f"{value}\n", encoding="utf-8")
    (row,) = read_files(spark, [str(tmp_path / "shop")], fmt).records.collect()
    assert (bytes(row["value"]), row["shop"]) == (b'{"id":1}', "north")
    with pytest.raises(SettingsError, match="the paths have a column `topic`"):
        read_files(spark, [str(tmp_path / "topic")], fmt)


@pytest.mark.parametrize("fmt", ["parquet", "json"])
def test_a_column_in_the_paths_with_a_dot_in_its_name_is_refused(spark, tmp_path, fmt):
    place = tmp_path / "in" / "event.day=2026-01-31"
    place.mkdir(parents=True)
    if fmt == "parquet":
        write(place / "a.parquet", LOG, placed=False)
    else:
        (place / "a.json").write_bytes(LOG[0][0])
    with pytest.raises(SettingsError, match=r"in: has the column `event\.day`, which Spark cannot pass to Python"):
        read_files(spark, [str(tmp_path / "in")], fmt)
    if fmt == "parquet":
        events = read_files(spark, [str(tmp_path / "in")], fmt, rows_are_events=True).records
        assert all(b'"event.day":"2026-01-31"' in row["value"] for row in events.collect())


@pytest.mark.parametrize(("name", "out"), [("Topic", "parquet"), ("Reason", "parquet"), ("Run", "delta")])
def test_a_column_in_the_paths_that_differs_only_in_case_is_refused(spark, tmp_path, name, out):
    (tmp_path / "in" / f"{name}=x").mkdir(parents=True)
    write(tmp_path / "in" / f"{name}=x" / "a.parquet", LOG, placed=name != "Topic")
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    with pytest.raises((TopologyError, SettingsError), match=r"(?i)column \w+: is a column that .* adds"):
        backfill(history, topology(), str(tmp_path / "out"), fmt=out, now_ms=NOW_MS)


def test_columns_of_a_record_in_another_case_are_refused(spark, tmp_path):
    """Was: not read, without a word, so these rows were judged in the order of event times."""
    write(tmp_path / "in.parquet", LOG)
    rows = spark.read.parquet(str(tmp_path / "in.parquet"))
    rows = rows.withColumnsRenamed({"topic": "Topic", "partition": "Partition", "offset": "OFFSET"})
    rows.withColumn("timestamptype", F.lit(0)).write.parquet(str(tmp_path / "in"))
    with pytest.raises(TopologyError) as refused:
        read_files(spark, [str(tmp_path / "in")], "parquet")
    assert [problem.text for problem in refused.value.problems] == [
        f"has the column `{name}`, which is not read, because upper and lower case differ: rename it to "
        f"`{name.lower()}`, or drop it"
        for name in ("Topic", "Partition", "OFFSET")
    ]
    with pytest.raises(TopologyError, match="the DataFrame: has the column `Topic`"):
        dedup(rows, topology(), shape="kafka")
    # Events have members of any name.
    assert read_files(spark, [str(tmp_path / "in")], "parquet", rows_are_events=True).records.count() == len(LOG)


def test_a_column_in_the_paths_that_dedup_adds_is_refused(spark, tmp_path):
    (tmp_path / "in" / "verdict=unique").mkdir(parents=True)
    write(tmp_path / "in" / "verdict=unique" / "a.parquet", LOG)
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    with pytest.raises(TopologyError, match="column verdict: is a column that dedup adds"):
        backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)


def with_types(path: Path, types: list[int | None], values: list[bytes]) -> None:
    write(path, [(value, at * 6, 0, at) for at, value in enumerate(values)])
    table = pq.read_table(path)
    pq.write_table(table.append_column("timestampType", pa.array(types, pa.int32())), path)


def test_by_arrival_only_rows_with_the_brokers_time_are_judged(spark, tmp_path):
    arrival, values = topology(event_time="arrival"), [b'{"id":1}', b'{"id":1}', b'{"id":1}']
    with_types(tmp_path / "good" / "a.parquet", [1, 1, 1], values)
    history = read_files(spark, [str(tmp_path / "good")], "parquet", by_arrival=True)
    report = backfill(history, arrival, str(tmp_path / "out"), now_ms=NOW_MS)
    assert verdicts_at(spark, report.path) == {(0, 0): "unique", (0, 1): "duplicate", (0, 2): "unique"}
    for name, wrong in (("zero", 0), ("null", None)):
        with_types(tmp_path / name / "a.parquet", [1, wrong, 1], values)
        history = read_files(spark, [str(tmp_path / name)], "parquet", by_arrival=True)
        with pytest.raises(StateIncompatible, match="a record of the input at orders/0 offset 1 has the time that its"):
            backfill(history, arrival, str(tmp_path / f"out-{name}"), now_ms=NOW_MS)
        frame = spark.read.parquet(str(tmp_path / name))
        with pytest.raises(Exception, match="a record of the input at orders/0 offset 1"):
            dedup(frame, arrival, shape="kafka", now_ms=NOW_MS).collect()
    write(tmp_path / "none" / "a.parquet", LOG)
    with pytest.raises(TopologyError, match="has no column `timestampType`"):
        read_files(spark, [str(tmp_path / "none")], "parquet", by_arrival=True)
    unchecked = read_files(spark, [str(tmp_path / "good")], "parquet")
    for given in (unchecked, unchecked.records):
        with pytest.raises(SettingsError, match="does not show which timestamps are the broker's"):
            backfill(given, arrival, str(tmp_path / "out-unchecked"))
