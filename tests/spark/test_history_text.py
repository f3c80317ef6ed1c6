"""History as lines of JSON and as rows of any table: nothing of it is cut off or left out."""

from __future__ import annotations

import bz2

import pytest
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from dedup.errors import SettingsError
from dedup.spark.backfill import backfill
from dedup.spark.files import read_files
from dedup.spark.incremental import incremental
from dedup.spark.incremental_input import NewFiles
from dedup.spark.row_events import as_events
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
    zone = "Z"
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
    texts = [
        "0001-01-01 00:00:00",
        "1582-10-04 23:59:59",
        "2024-01-01 00:00:00",
        "2024-01-01 00:00:00.1",
        "2024-07-01 12:34:56.789",
        "1899-12-31 23:59:59.999",
    ]
    chosen = " UNION ALL ".join(
        f"SELECT timestamp'{text}' AS at, timestamp_ntz'{text}' AS there, date'{text[:10]}' AS day" for text in texts
    )
    frame = spark.sql(f"{chosen} UNION ALL SELECT NULL, NULL, NULL")
    found = frame.select(
        as_events(frame).cast("string").alias("ours"), F.to_json(F.struct("*"), {"timeZone": "UTC"}).alias("sparks")
    )
    assert [row["ours"] for row in found.collect()] == [row["sparks"] for row in found.collect()]


SETTINGS = {
    "spark.sql.session.timeZone": "Europe/Berlin",
    "spark.sql.jsonGenerator.ignoreNullFields": "false",
    "spark.sql.legacy.timeParserPolicy": "LEGACY",
    "spark.sql.ansi.enabled": "false",
}


def test_an_event_does_not_depend_on_the_settings_of_the_session(spark):
    """Otherwise, an ID that is stored by one session would be unknown to the next one."""
    moment = "timestamp_micros(1698541200000001)"  # 2023-10-29 01:00 UTC: in Berlin, 02:00 occurs twice on this day
    frame = spark.sql(
        f"SELECT {moment} AS at, map('a', array({moment}, NULL)) AS deep, date_from_unix_date(-719162) AS day,"
        f" to_variant_object(named_struct('t', {moment})) AS v, CAST(NULL AS int) AS none, 1e10d AS big"
    )
    for name, value in [("spark.sql.session.timeZone", "UTC"), *SETTINGS.items()]:
        before = spark.conf.get(name)
        spark.conf.set(name, value)
        try:
            (row,) = frame.select(as_events(frame).alias("value")).collect()
        finally:
            spark.conf.set(name, before)
        assert bytes(row["value"]) == (
            b'{"at":"2023-10-29T01:00:00.000001Z","deep":{"a":["2023-10-29T01:00:00.000001Z",null]},"day":"0001-01-01",'
            b'"v":{"t":"2023-10-29 01:00:00.000001+00:00"},"big":1.0E10}'
        ), name


def test_days_that_no_timestamp_can_hold_are_written_as_numbers(spark):
    """Was: an overflow, which ended the job."""
    days = [-719_162, 0, 106_751_991, 106_751_992, -106_751_992, 2**31 - 1]
    frame = spark.sql(" UNION ALL ".join(f"SELECT date_from_unix_date({day}) AS day" for day in days))
    found = [bytes(row["value"]) for row in frame.select(as_events(frame).alias("value")).collect()]
    assert found[:2] == [b'{"day":"0001-01-01"}', b'{"day":"1970-01-01"}']
    assert found[2].startswith(b'{"day":"+294247-01-10"')
    assert found[3:] == [b'{"day":"%d"}' % day for day in days[3:]]


def test_maps_whose_keys_have_no_text_are_refused_and_other_maps_are_not(spark):
    """Was: `{"[B@4b4def89":1}`, another text in each row, so no event was a duplicate of its copy."""
    keys = {"binary": "X'01'", "array<int>": "array(1)", "struct<a:int>": "named_struct('a', 1)"}
    for kind, key in keys.items():
        for column in (f"map({key}, 1)", f"array(named_struct('m', map('a', map({key}, 1))))"):
            frame = spark.sql(f"SELECT 1 AS id, {column} AS deep")
            says = f"column deep: has a map whose keys are {kind}, .*cast the keys"
            refused(says, lambda frame=frame: as_events(frame))
    with_text = "map(date'2024-01-01', 1) AS d, map(true, 1) AS b, map(1.5, 1) AS n, map('a', X'01') AS v"
    frame = spark.sql(f"SELECT {with_text} UNION ALL SELECT {with_text}")
    assert len({bytes(row["value"]) for row in frame.select(as_events(frame).alias("value")).collect()}) == 1


def refused(says, run):
    with pytest.raises(SettingsError, match=says):
        run()


def test_rows_and_lines_in_which_an_id_or_a_time_can_never_be_are_refused(spark, tmp_path):
    spark.sql("SELECT 1 AS ORDER_ID, timestamp_ntz'2024-01-01' AS at").write.parquet(str(tmp_path / "in"))
    (tmp_path / "in.jsonl").write_text('{"id": 1}', encoding="utf-8")
    lines = read_files(spark, [str(tmp_path / "in.jsonl")], "json")
    rows = NewFiles(spark, [str(tmp_path / "in")], "parquet", rows_are_events=True)
    named = topology(tracking_id={"field": "order_id"}, event_time={"field": "at", "unit": "rfc3339"})
    out = str(tmp_path / "out")
    for says in (r'no column `order_id`; did you mean "ORDER_ID"', "at is timestamp_ntz, a time without a time zone"):
        refused(says, lambda: incremental(rows, named, out, say=print))
    for given, says in (
        (topology(), "event_time: is the record's"),
        (topology(tracking_id={"key": True}), "tracking_id"),
    ):
        refused(
            f"{says}.*, which the input does not have: add the column", lambda given=given: backfill(lines, given, out)
        )
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(("part-", "_delta_log"))][1:]


@pytest.mark.parametrize(
    "line",
    ['{"id": 1}', '{"valu": "x"}', '{"value": "x", "timestamp": 5}', '{"value": "x", "offset": "five"}', "[1]", "torn"],
    ids=["event", "typo", "other-name", "other-type", "array", "torn"],
)
def test_lines_that_are_no_records_are_refused(spark, tmp_path, line):
    (tmp_path / "in.jsonl").write_text('{"value": "{\\"id\\":1}"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(SettingsError, match="Nothing was published"), translated_errors():
        read_files(spark, [str(tmp_path / "in.jsonl")], "json-records")


@pytest.mark.parametrize("name", ["a b.json.bz2", "a.BZ2", "a.json.snappy", "a.lz4"])
def test_a_file_in_which_hadoop_finds_no_line_is_refused(spark, tmp_path, name):
    """Was: read as a file without lines, so its events were lost without a word."""
    for number, line in enumerate((b'{"id":1}\n', b"")):
        (tmp_path / f"{number} {name}").write_bytes(line)
    (tmp_path / "real.bz2").write_bytes(bz2.compress(b'{"id":2}\n'))
    says = r"0%20a.*is named \.bz2, but is not bzip2" if "bz2" in name.lower() else r"Compress it as \.gz or \.bz2"
    for fmt in ("json", "json-records"):
        refused(says, lambda fmt=fmt: read_files(spark, [str(tmp_path)], fmt))
    (tmp_path / f"0 {name}").unlink()
    assert [bytes(row["value"]) for row in read_files(spark, [str(tmp_path)], "json").records.collect()] == [
        b'{"id":2}'
    ]


@pytest.mark.parametrize("codec", ["snappy", "lz4", "bzip2"])
def test_a_compressed_file_that_spark_has_written_is_read(spark, tmp_path, codec):
    spark.range(3).selectExpr("to_json(struct(id)) AS value").coalesce(1).write.text(
        f"{tmp_path}/in", compression=codec
    )
    rows = read_files(spark, [f"{tmp_path}/in"], "json").records.collect()
    assert {bytes(row["value"]) for row in rows} == {b'{"id":0}', b'{"id":1}', b'{"id":2}'}


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
