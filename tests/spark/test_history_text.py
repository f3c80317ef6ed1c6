"""History as lines of JSON and as rows of any table: nothing of it is cut off or left out."""

from __future__ import annotations

import pytest
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from dedup.errors import SettingsError
from dedup.spark.backfill import backfill
from dedup.spark.files import as_events, read_files
from dedup.spark.session import translated_errors
from tests.spark.test_batch_files import NOW_MS, topology


def test_times_finer_than_milliseconds_tell_events_apart(spark, tmp_path):
    fine = "timestamp'2024-01-01 00:00:00.{}'"
    local = "timestamp_ntz'2024-01-01 00:00:00.{}'"
    every = [
        f"{fine.format(text)} AS at, {local.format(text)} AS there, array(named_struct('t', {fine.format(text)})) AS deep"
        for text in ("1234", "1239", "123", "123")
    ]
    frame = spark.sql(" UNION ALL ".join(f"SELECT {columns}" for columns in every))
    frame.coalesce(1).write.parquet(str(tmp_path / "in"))
    history = read_files(spark, [str(tmp_path / "in")], "parquet", rows_are_events=True)
    zone = spark.sql("SELECT date_format(timestamp'2024-01-01 00:00:00', 'XXX')").first()[0]
    stem = "2024-01-01T00:00:00."
    for name in ("at", "there"):
        timed = topology(tracking_id={"field": name}, name=name, event_time={"field": "at", "unit": "rfc3339"})
        report = backfill(history, timed, str(tmp_path / f"out-{name}"), now_ms=NOW_MS)
        assert report.verdicts == {"duplicate": 1, "unique": 3}
    assert {bytes(row["value"]) for row in history.records.collect()} == {
        b'{"at":"%s","there":"%s","deep":[{"t":"%s"}]}'
        % ((stem + text + zone).encode(), (stem + text).encode(), (stem + text + zone).encode())
        for text in ("123", "1234", "1239")
    }


def test_times_of_milliseconds_are_written_as_spark_writes_them(spark):
    texts = ["2024-01-01 00:00:00", "2024-01-01 00:00:00.1", "2024-07-01 12:34:56.789", "1899-12-31 23:59:59.999"]
    chosen = " UNION ALL ".join(f"SELECT timestamp'{text}' AS at, timestamp_ntz'{text}' AS there" for text in texts)
    frame = spark.sql(f"{chosen} UNION ALL SELECT NULL, NULL")
    found = frame.select(as_events(frame).cast("string").alias("ours"), F.to_json(F.struct("*")).alias("sparks"))
    assert [row["ours"] for row in found.collect()] == [row["sparks"] for row in found.collect()]


@pytest.mark.parametrize(
    "line",
    ['{"id": 1}', '{"valu": "x"}', '{"value": "x", "timestamp": 5}', '{"value": "x", "offset": "five"}', "[1]", "torn"],
    ids=["event", "typo", "other-name", "other-type", "array", "torn"],
)
def test_lines_that_are_no_records_are_refused(spark, tmp_path, line):
    (tmp_path / "in.jsonl").write_text('{"value": "{\\"id\\":1}"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(SettingsError, match="Nothing was published"), translated_errors():
        read_files(spark, [str(tmp_path / "in.jsonl")], "json-records")


def test_lines_that_are_records_may_have_no_value_and_no_others(spark, tmp_path):
    lines = ['{"value": "{\\"id\\":1}", "key": "k", "timestamp_ms": 5}', '{"value": null}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    rows = read_files(spark, [str(tmp_path / "in.jsonl")], "json-records").records.collect()
    assert [(row["key"], row["value"], row["timestamp_ms"]) for row in rows] == [
        (b"k", b'{"id":1}', 5),
        (None, None, None),
    ]


@pytest.mark.parametrize("fmt", ["json", "json-records"])
def test_lines_are_no_table_whose_rows_are_events(spark, tmp_path, fmt):
    with pytest.raises(SettingsError, match="--rows-are-events is for tables"):
        read_files(spark, [str(tmp_path)], fmt, rows_are_events=True)
