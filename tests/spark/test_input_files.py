"""Which files an input path stands for: directories of any depth, columns in paths, runs, and tables that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dedup.errors import SettingsError
from dedup.spark import read_run
from dedup.spark.backfill import backfill
from dedup.spark.files import read_files
from dedup.spark.incremental_input import NewFiles
from dedup.spark.rejected import refuse_overlap
from dedup.spark.session import translated_errors
from tests.spark.test_batch_files import LOG, NOW_MS, VERDICTS, topology, write


def event(number: int) -> bytes:
    return json.dumps({"id": number}).encode()


def put(path: Path, *numbers: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_bytes(b"".join(event(number) + b"\n" for number in numbers))
    else:
        pq.write_table(pa.table({"value": pa.array(map(event, numbers), pa.binary())}), path)


def values(spark, paths, fmt="parquet") -> list[bytes]:
    records = read_files(spark, [str(path) for path in paths], fmt).records
    return sorted(bytes(row["value"]) for row in records.select("value").collect())


@pytest.mark.parametrize("fmt", ["json", "parquet"])
def test_files_in_directories_of_any_depth_are_read(spark, tmp_path, fmt):
    put(tmp_path / "in" / "2024" / "01" / f"a b.{fmt}", 1, 2)
    assert values(spark, [tmp_path / "in"], fmt) == [event(1), event(2)]
    put(tmp_path / "in" / f"b.{fmt}", 3)
    put(tmp_path / "in" / "_temporary" / f"c.{fmt}", 4)
    three = [event(number) for number in (1, 2, 3)]
    assert values(spark, [tmp_path / "in"], fmt) == three
    assert values(spark, [tmp_path / "in" / "2024", tmp_path / "in" / f"b.{fmt}"], fmt) == three


def test_columns_in_paths_are_kept_wherever_the_path_begins(spark, tmp_path):
    for day in (1, 2):
        put(tmp_path / "in" / f"day={day}" / "deeper" / "a.parquet", day)
    both = tmp_path / "in"
    for paths in (
        [both],
        [both / "day=*"],
        [both / "day=1", both / "day=2"],
        [both / "day=*" / "deeper" / "*.parquet"],
    ):
        records = read_files(spark, [str(path) for path in paths], "parquet").records
        rows = {(bytes(row["value"]), row["day"]) for row in records.select("value", "day").collect()}
        assert rows == {(event(1), 1), (event(2), 2)}
    put(tmp_path / "other" / "day=3" / "a.parquet", 3)
    with pytest.raises(
        SettingsError, match=r"other/day=3/a.parquet: has the columns `day` in its path below .*/other, b"
    ):
        values(spark, [both, tmp_path / "other"])
    # Spark would skip this one without a word.
    put(both / "late.parquet", 4)
    with pytest.raises(SettingsError, match=r"in/late.parquet: has no columns in its path, but .*day=1.* `day`"):
        values(spark, [both])


def test_an_incremental_run_refuses_an_input_whose_columns_it_would_leave_out(spark, tmp_path):
    """Was: no column and not a word; with a content ID, equal rows of two tenants were duplicates."""
    for tenant in "ab":
        put(tmp_path / "in" / f"tenant={tenant}" / "2024" / "a.parquet", 1)
        put(tmp_path / "out" / "run=x" / f"verdict={tenant}" / "a.parquet", 1)
    for names in (["in/tenant=*"], ["in/*/2024"], ["in/tenant=a", "in/tenant=b"], ["in/tenant=a"], ["in", "out"]):
        with pytest.raises(
            SettingsError, match=r"the column `tenant` in its path.* as the only --input: file://.*/in$"
        ):
            NewFiles(spark, [str(tmp_path / name) for name in names], "parquet").pin({})
    # A backfill makes no columns of these, either.
    for names in (["in"], ["in/tenant=a/2024/a.parquet"], ["out/run=x/verdict=*"], ["out/run=x/verdict=a"]):
        assert NewFiles(spark, [str(tmp_path / name) for name in names], "parquet").pin({}) is not None


def test_columns_of_a_record_at_the_end_of_a_path_only_select_files(spark, tmp_path):
    for topic in ("a", "b"):
        put(tmp_path / "in" / f"topic={topic}" / "a.json", 1)
    for paths in (["topic=*"], ["topic=*/*.json"], ["topic=a", "topic=b"]):
        assert values(spark, [tmp_path / "in" / path for path in paths], "json") == [event(1)] * 2


def test_files_of_a_table_are_not_read_as_if_they_were_its_rows(spark, tmp_path):
    lake = tmp_path / "lake"
    rows = spark.createDataFrame([(bytearray(event(number)), number) for number in range(4)], "value binary, day int")
    rows.write.format("delta").partitionBy("day").save(str(lake / "delta"))
    spark.sql(f"DELETE FROM delta.`{lake}/delta` WHERE day = 3")
    for path in (lake / "delta", lake / "delta" / "day=3", lake, lake / "delta" / "day=*"):
        with pytest.raises(SettingsError, match=r"lake/delta: is a Delta table.* read it with --format delta"):
            values(spark, [path])
    assert len(values(spark, [lake / "delta"], "delta")) == 3
    # Spark and Delta ignore directories with such names.
    put(lake / "delta" / "_rejected" / "a.parquet", 5)
    assert values(spark, [lake / "delta" / "_rejected"]) == [event(5)]
    put(tmp_path / "iceberg" / "data" / "a.parquet", 1)
    put(tmp_path / "iceberg" / "metadata" / "v1.metadata.json", 1)
    for path in (tmp_path / "iceberg", tmp_path / "iceberg" / "data"):
        with pytest.raises(SettingsError, match=r"/iceberg: is an Iceberg table.* read it with --format table"):
            values(spark, [path])


def test_a_run_is_an_input_even_as_a_whole(spark, tmp_path):
    write(tmp_path / "in" / "a.parquet", LOG)
    out = str(tmp_path / "out")
    run = backfill(read_files(spark, [str(tmp_path / "in")], "parquet"), topology(), out, now_ms=NOW_MS).path
    again = backfill(read_files(spark, [run], "parquet"), topology(), str(tmp_path / "again"), now_ms=NOW_MS)
    found = {
        (row["partition"], row["offset"]): row["verdict"] for row in read_run(spark, str(tmp_path / "again")).collect()
    }
    assert (found, again.order) == (VERDICTS, "direct")
    unique = [row for row in LOG if VERDICTS[row[2:]] == "unique"]
    assert values(spark, [f"{run}/verdict=unique"]) == sorted(row[0] for row in unique)
    assert len(values(spark, [f"{run}/verdict=*"])) == len(LOG)
    (tmp_path / "days" / "day=1").mkdir(parents=True)
    write(tmp_path / "days" / "day=1" / "a.parquet", LOG)
    with pytest.raises(SettingsError, match="are columns, but a run of a backfill has none"):
        values(spark, [run, tmp_path / "days"])
    # A run of an earlier version has no manifest.
    report = Path(run) / "_run.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), "manifest": None}))
    report.with_name("._run.json.crc").unlink()
    assert len(values(spark, [run])) == read_run(spark, out).count() == len(LOG)


def test_a_run_in_a_delta_table_is_an_input_by_its_path(spark, tmp_path):
    """Was: refused. Without a path of its own, a run could only be read together with all others."""
    out = str(tmp_path / "out")
    for run, rows in (("may", LOG), ("june", LOG[:2])):
        write(tmp_path / run / "a.parquet", rows)
        backfill(
            read_files(spark, [str(tmp_path / run)], "parquet"), topology(), out, run=run, fmt="delta", now_ms=NOW_MS
        )
    unique = [row for row in LOG if VERDICTS[row[2:]] == "unique"]
    assert values(spark, [f"{out}/run=may"], "delta") == sorted(row[0] for row in LOG)
    assert values(spark, [f"{out}/run=may/verdict=unique"], "delta") == sorted(row[0] for row in unique)
    assert len(values(spark, [out], "delta")) == len(LOG) + 2
    identities = [read_files(spark, [f"{out}/run={run}"], "delta").identity for run in ("may", "june")]
    assert identities[0] != identities[1]
    with pytest.raises(SettingsError, match=r"run=july: the Delta table .*/out has no published run july"):
        values(spark, [f"{out}/run=july"], "delta")
    with pytest.raises(SettingsError, match="verdict=conflict: the run published no records there"):
        values(spark, [f"{out}/run=may/verdict=conflict"], "delta")
    with pytest.raises(SettingsError, match=r"out: is a Delta table.* read it with --format delta"):
        values(spark, [f"{out}/run=may"])
    with pytest.raises(SettingsError, match="overlaps the input"):
        refuse_overlap(spark, f"{out}/rejected", [f"{out}/run=may"], "delta")


def test_an_empty_run_is_an_empty_table_and_a_run_that_lacks_a_file_is_refused(spark, tmp_path):
    write(tmp_path / "empty" / "a.parquet", [], placed=False)
    write(tmp_path / "in" / "a.parquet", LOG)
    out = str(tmp_path / "out")
    for name in ("empty", "in"):
        history = read_files(spark, [str(tmp_path / name)], "parquet")
        report = backfill(history, topology(), out, run=name, now_ms=NOW_MS)
    empty, full = read_run(spark, out, "empty"), read_run(spark, out, "in")
    assert (empty.count(), full.count()) == (0, len(LOG))
    assert empty.dtypes == full.dtypes
    (one, *_) = Path(report.path).glob("verdict=late/*.parquet")
    one.unlink()
    with pytest.raises(SettingsError, match="a file of run in is missing"):
        read_run(spark, out, "in")


def test_required_and_optional_columns_of_the_same_type_are_the_same_columns(spark, tmp_path):
    headers = pa.list_(pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())]))
    required = pa.schema([pa.field("value", pa.binary(), nullable=False), pa.field("headers", headers, nullable=False)])
    optional = pa.schema(
        [("value", pa.binary()), ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))]
    )
    (tmp_path / "in").mkdir()
    for number, schema in enumerate((required, optional)):
        pq.write_table(
            pa.table([[event(number)], [[("k", b"v")]]], schema=schema), tmp_path / "in" / f"{number}.parquet"
        )
    history = read_files(spark, [str(tmp_path / "in")], "parquet")
    report = backfill(history, topology(event_time={"field": "id", "unit": "s"}), str(tmp_path / "out"), now_ms=NOW_MS)
    assert report.verdicts == {"unique": 2}
    pq.write_table(
        pa.table({"value": ["text"], "headers": pa.array([[("k", b"v")]], headers)}), tmp_path / "in" / "2.parquet"
    )
    with pytest.raises(
        SettingsError, match=r"2.parquet: column `value` is binary value \(STRING\), but binary value in"
    ):
        read_files(spark, [str(tmp_path / "in")], "parquet")


def test_columns_with_and_without_field_ids_are_the_same_columns(spark, tmp_path):
    """Was: refused as different. Iceberg and Arrow write IDs, Spark does not."""

    def schema(*, ids: bool) -> pa.Schema:
        def field(name: str, kind: pa.DataType, number: int) -> pa.Field:
            return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)} if ids else None)

        header = pa.struct([field("key", pa.string(), 4), field("value", pa.binary(), 5)])
        return pa.schema([field("value", pa.binary(), 1), field("headers", pa.list_(field("element", header, 3)), 2)])

    (tmp_path / "in").mkdir()
    for number, ids in enumerate((True, False)):
        rows = pa.table([[event(number)], [[("k", b"v")]]], schema=schema(ids=ids))
        pq.write_table(rows, tmp_path / "in" / f"{number}.parquet")
    assert values(spark, [tmp_path / "in"]) == [event(0), event(1)]
    pq.write_table(pa.table({"value": ["text"]}), tmp_path / "in" / "2.parquet")
    with pytest.raises(
        SettingsError, match=r"2.parquet: column `value` is binary value \(STRING\), but binary value in"
    ):
        values(spark, [tmp_path / "in"])


@pytest.mark.parametrize("names", [("_events.json",), (".events.json", "b.json"), ("events.json._COPYING_",)])
def test_a_file_that_spark_skips_is_refused_if_a_path_names_it(spark, tmp_path, names):
    """Was: nothing was read of it, without a word."""
    for name in names:
        (tmp_path / name).write_bytes(event(1))
    paths = [str(tmp_path / name) for name in names]
    with pytest.raises(SettingsError, match=r"events\.json\S*: is a file that Spark skips, because its name begins"):
        read_files(spark, paths, "json")
    with pytest.raises(SettingsError, match=r"is a file that Spark skips"):
        NewFiles(spark, paths, "json").pin({})
    # In a directory, such a file is not meant.
    assert values(spark, [tmp_path], "json") == [event(1)] * (len(names) - 1)
    put(tmp_path / "_staging" / "a.json", 2)
    assert values(spark, [tmp_path / "_staging"], "json") == [event(2)]


def test_a_file_that_two_paths_contain_is_read_once(spark, tmp_path):
    """Was: twice, so each of its records was a duplicate of itself."""
    put(tmp_path / "in" / "a.json", 1, 2)
    put(tmp_path / "days" / "day=1" / "a.json", 3)
    for paths, numbers in (
        (["in", "in/a.json"], (1, 2)),
        (["in", "in"], (1, 2)),
        (["in/*.json", "in/a*"], (1, 2)),
        (["days", "days/day=1"], (3,)),
    ):
        assert values(spark, [tmp_path / path for path in paths], "json") == [event(number) for number in numbers]


def test_names_that_spark_cannot_read_are_told_in_a_sentence(spark, tmp_path):
    """Was: a traceback, or the sentence that a whole file is damaged."""
    put(tmp_path / "colon" / "at-10:15.parquet", 1)
    put(tmp_path / "day=1" / "=x" / "a.parquet", 1)
    for path, text in (
        ("colon", "Relative path in .*at-10:15"),
        ("day=1", "(E|e)mpty partition column name in (the path segment )?'=x'; cor"),
    ):
        with pytest.raises(SettingsError, match=f"has a name that Spark cannot read: {text}"), translated_errors():
            values(spark, [tmp_path / path])
    with pytest.raises(SettingsError, match=r"Spark cannot read: Illegal file pattern: .*\[x"), translated_errors():
        values(spark, [tmp_path / "[x"])
    # A name without a value is no column.
    put(tmp_path / "in" / "day=" / "a.parquet", 1)
    assert values(spark, [tmp_path / "in"]) == [event(1)]
