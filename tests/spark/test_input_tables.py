"""Tables as input: by their names in a catalog, in Delta, Iceberg and files, pinned to a version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dedup.errors import SettingsError, StateIncompatible
from dedup.spark.backfill import backfill
from dedup.spark.files import read_files
from dedup.spark.incremental_input import NewVersions
from dedup.spark.table_log import IcebergLog
from tests.spark.streaming import FAST_JAVA, NEEDS_ICEBERG
from tests.spark.test_batch_files import LOG, NOW_MS, VERDICTS, topology, verdicts_at, write

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(spark, tmp_path):
    write(tmp_path / "log.parquet", LOG)
    return spark.read.parquet(str(tmp_path / "log.parquet"))


@pytest.fixture
def shop(spark: SparkSession):
    spark.sql("CREATE DATABASE shop")
    yield "shop"
    spark.sql("DROP DATABASE shop CASCADE")


@pytest.mark.parametrize("fmt", ["delta", "parquet"])
@pytest.mark.parametrize("catalog", ["", "spark_catalog."])
def test_a_table_of_a_catalog_is_judged_with_the_column_that_partitions_it(spark, shop, log, tmp_path, fmt, catalog):
    log.selectExpr("*", "partition AS shard").write.format(fmt).partitionBy("shard").saveAsTable("shop.orders")
    history = read_files(spark, [f"{catalog}shop.orders"], "table")
    report = backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    assert verdicts_at(spark, report.path) == VERDICTS
    assert {(row["partition"], row["shard"]) for row in spark.read.parquet(report.path).collect()} == {(0, 0), (1, 1)}
    again = backfill(read_files(spark, ["shop.orders"], "table"), topology(), str(tmp_path / "out"))
    assert not again.fresh
    spark.table("shop.orders").limit(1).write.format(fmt).mode("append").partitionBy("shard").saveAsTable("shop.orders")
    with pytest.raises(StateIncompatible, match="with another topology, input or order"):
        backfill(read_files(spark, ["shop.orders"], "table"), topology(), str(tmp_path / "out"))


@pytest.mark.parametrize("fmt", ["delta", "table"])
def test_a_delta_table_is_read_as_of_the_version_that_was_there(spark, shop, log, tmp_path, fmt):
    where = str(tmp_path / "orders")
    log.write.format("delta").save(where)
    spark.sql(f"CREATE TABLE shop.orders USING delta LOCATION '{where}'")
    history = read_files(spark, ["shop.orders" if fmt == "table" else where], fmt)
    log.write.format("delta").mode("append").save(where)
    report = backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    assert verdicts_at(spark, report.path) == VERDICTS


def test_another_delta_table_at_the_same_path_is_another_input(spark, log, tmp_path):
    identities = set()
    for name in ("first", "second"):
        log.write.format("delta").save(str(tmp_path / "orders"))
        identities.add(read_files(spark, [str(tmp_path / "orders")], "delta").identity)
        (tmp_path / "orders").rename(tmp_path / name)
    assert len(identities) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shop.nowhere", "cannot be read as table: .*TABLE_OR_VIEW_NOT_FOUND"),
        ("shop.none", "has no files: it is empty"),
        ("not a name", r"cannot be read as table: \[PARSE_SYNTAX_ERROR\]"),
        ("", "--input: is empty; give a path, or the name of a table"),
    ],
)
def test_a_name_that_is_no_table_of_records_is_refused(spark, shop, name, text):
    spark.sql("CREATE TABLE shop.none (value STRING) USING parquet")
    with pytest.raises(SettingsError, match=text):
        read_files(spark, [name], "table")


def test_a_view_with_another_filter_is_another_input(spark, shop, tmp_path):
    """It reads the same files; a Delta table writes `:` in the names of its directories as `%3A`."""
    rows = spark.createDataFrame([(1, "10:00"), (2, "11:00")], "id INT, at STRING")
    rows.write.format("delta").partitionBy("at").saveAsTable("shop.hours")
    identities = []
    for where in ("id < 5", "id < 2", "id < 2"):
        spark.sql(f"CREATE OR REPLACE VIEW shop.some AS SELECT * FROM shop.hours WHERE {where}")
        identities.append(read_files(spark, ["shop.some"], "table", rows_are_events=True).identity)
    assert identities[0] != identities[1] == identities[2]
    spark.sql("DROP VIEW shop.some")


def test_directories_that_are_all_null_make_a_column_of_text(spark, tmp_path):
    """Spark infers the type `void`, which no file can hold."""
    directory = tmp_path / "log" / "day=__HIVE_DEFAULT_PARTITION__"
    directory.parent.mkdir()
    write(directory / "log.parquet", LOG)
    history = read_files(spark, [str(tmp_path / "log")], "parquet")
    report = backfill(history, topology(), str(tmp_path / "out"), now_ms=NOW_MS)
    assert {row["day"] for row in spark.read.parquet(report.path).collect()} == {None}


@NEEDS_ICEBERG
def test_a_table_that_a_sink_cannot_use_is_told_in_a_sentence(spark, shop):
    """What a user gets who forgets to configure the catalog, names another table, or made it with other columns."""
    spark.sql("CREATE TABLE shop.of_delta (a INT) USING delta")
    for name in ("nolake.shop.orders", "shop.of_delta"):
        with pytest.raises(SettingsError, match=f"{name}: is not an Iceberg table, or its catalog is not configured"):
            IcebergLog(spark, name).latest()
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    spark.sql("CREATE TABLE lake.shop.narrow (a INT) USING iceberg")
    rows = spark.createDataFrame([("k", "v")], "key string, other string")
    with pytest.raises(StateIncompatible, match=r"narrow: Iceberg says: .*Nothing was written"):
        IcebergLog(spark, "lake.shop.narrow").append(rows, "sink", 1, "{}", after=-1, taken="taken")
    spark.sql("DROP TABLE lake.shop.narrow")


def test_a_session_sees_the_files_that_other_jobs_add_to_a_table(spark, shop, tmp_path):
    write(tmp_path / "orders" / "0.parquet", LOG[:2])
    spark.sql(f"CREATE TABLE shop.orders USING parquet LOCATION '{tmp_path}/orders'")
    spark.sql("CREATE VIEW shop.some AS SELECT * FROM shop.orders")
    names = ["shop.orders", "shop.some"]
    assert [read_files(spark, [name], "table").records.count() for name in names] == [2, 2]
    write(tmp_path / "orders" / "1.parquet", LOG[2:])
    assert [read_files(spark, [name], "table").records.count() for name in names] == [len(LOG)] * 2
    spark.sql("DROP VIEW shop.some")


@NEEDS_ICEBERG
def test_a_session_sees_what_other_jobs_commit_to_an_iceberg_table(spark):
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    spark.sql("""CREATE TABLE lake.shop.stale USING iceberg AS SELECT '{"id":1}' AS value""")
    assert read_files(spark, ["lake.shop.stale"], "table").records.count() == 1
    iceberg, conf = spark._jvm.org.apache.iceberg, spark._jsparkSession.sessionState().newHadoopConf()
    place = iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, "lake.shop.stale").location()
    other = iceberg.hadoop.HadoopTables(conf).load(place)
    other.newDelete().deleteFromRowFilter(iceberg.expressions.Expressions.alwaysTrue()).commit()
    assert read_files(spark, ["lake.shop.stale"], "table").records.count() == 0
    spark.sql("DROP TABLE lake.shop.stale")


@pytest.mark.parametrize("name", ["spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles"])
def test_a_session_that_skips_files_of_tables_is_refused(spark, shop, tmp_path, name):
    """Was: rows vanished without a word, or the run ended with the message that dedup has a bug."""
    for fmt in ("parquet", "delta"):
        write(tmp_path / fmt / "0.parquet", LOG)
    spark.sql(f"CREATE TABLE shop.orders USING parquet LOCATION '{tmp_path}/parquet'")
    spark.sql(f"CONVERT TO DELTA parquet.`{tmp_path}/delta`")
    spark.conf.set(name, "TRUE")
    try:
        for path, fmt in (("shop.orders", "table"), (str(tmp_path / "delta"), "delta")):
            with pytest.raises(SettingsError, match=f"{name}: is true, so Spark would leave out rows"):
                read_files(spark, [path], fmt)
        growing = NewVersions(spark, str(tmp_path / "delta"))
        with pytest.raises(SettingsError, match=f"{name}: is true"):
            growing.open(growing.pin({}))
        # Files are read with options of their own.
        assert read_files(spark, [str(tmp_path / "parquet")], "parquet").records.count() == len(LOG)
    finally:
        spark.conf.unset(name)


def test_tables_whose_columns_have_other_types_are_refused(spark, tmp_path):
    """Spark would make one type of both: '007' would become 7, and a long decimal would be rounded."""
    for name, kind in (("a", "INT"), ("b", "BIGINT"), ("c", "STRING")):
        rows = spark.sql(f"SELECT CAST('7' AS {kind}) AS id, 5L AS at")
        rows.write.format("delta").save(str(tmp_path / name))
    paths = [str(tmp_path / name) for name in "abc"]
    assert read_files(spark, paths[:2], "delta", rows_are_events=True).records.count() == 2
    with pytest.raises(SettingsError, match=r"/c: column `id` is string, but int in .*/a: read the tables separately"):
        read_files(spark, paths, "delta", rows_are_events=True)


@NEEDS_ICEBERG
def test_a_branch_of_an_iceberg_table_is_refused_in_a_sentence(spark):
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    spark.sql("""CREATE TABLE lake.shop.branched USING iceberg AS SELECT '{"id":1}' AS value""")
    loaded = spark._jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, "lake.shop.branched")
    loaded.manageSnapshots().createBranch("audit", loaded.currentSnapshot().snapshotId()).commit()
    with pytest.raises(SettingsError, match=r"branch_audit: cannot be read as table: "):
        read_files(spark, ["lake.shop.branched.branch_audit"], "table")
    spark.sql("DROP TABLE lake.shop.branched")


@NEEDS_ICEBERG
def test_an_iceberg_table_partitioned_by_transforms_is_read(spark, tmp_path):
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    made = "(value STRING, at TIMESTAMP, p STRING) USING iceberg PARTITIONED BY (days(at), truncate(2, value), p)"
    spark.sql(f"CREATE TABLE lake.shop.days {made}")
    spark.sql("""INSERT INTO lake.shop.days VALUES ('{"id":1}', timestamp'2024-01-01 00:00:00', 'x')""")
    history = read_files(spark, ["lake.shop.days"], "table")
    assert history.records.columns[-1] == "p"
    assert history.records.count() == 1
    spark.sql("DROP TABLE lake.shop.days")


@NEEDS_ICEBERG
def test_an_iceberg_table_whose_columns_changed_after_its_snapshot_is_refused(spark):
    """Was: a traceback, because the snapshot has the column by its old name."""
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    spark.sql("CREATE TABLE lake.shop.renamed (value STRING, day STRING) USING iceberg PARTITIONED BY (day)")
    insert = """INSERT INTO lake.shop.renamed VALUES ('{"id":1}', 'x')"""
    spark.sql(insert)
    spark.sql("ALTER TABLE lake.shop.renamed ADD COLUMN more STRING")
    assert read_files(spark, ["lake.shop.renamed"], "table").records.columns[-1] == "day"
    spark.sql("ALTER TABLE lake.shop.renamed RENAME COLUMN day TO d")
    with pytest.raises(SettingsError, match=r"renamed: lacks a column of its snapshot; write to it once, then run"):
        read_files(spark, ["lake.shop.renamed"], "table")
    spark.sql(insert.replace("'x')", "'x', NULL)"))
    assert read_files(spark, ["lake.shop.renamed"], "table").records.columns[-1] == "d"
    spark.sql("DROP TABLE lake.shop.renamed")


CREATE = """
import sys
from dedup.spark.session import session_for
spark = session_for(None, master="local[1]", packages=("iceberg",), conf=dict(each.split("=", 1) for each in sys.argv[2:]))
log = spark.read.parquet(sys.argv[1])
if spark.catalog.tableExists("lake.shop.orders"):
    log.limit(1).writeTo("lake.shop.orders").append()
else:
    spark.sql("CREATE NAMESPACE lake.shop")
    log.writeTo("lake.shop.orders").using("iceberg").create()
"""


@pytest.mark.long
@NEEDS_ICEBERG
def test_an_iceberg_table_is_judged_by_its_name(spark, log, tmp_path, monkeypatch):
    """By commands as a user gives them: this session's Java has no Iceberg."""
    conf = {
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "hadoop",
        "spark.sql.catalog.lake.warehouse": str(tmp_path / "lake"),
        "spark.driver.extraJavaOptions": FAST_JAVA,
        "spark.sql.shuffle.partitions": "2",
    }
    settings = [f"{key}={value}" for key, value in conf.items()]
    shop = '{"dedup": 1, "name": "shop", "source": {"topics": ["orders"], "partitioned_by": "tracking_id"}, '
    shop += '"tracking_id": {"field": "id"}, "guard_period": "10s", "grace": "5s", "output": {"topic": "out"}}'
    (tmp_path / "shop.yaml").write_text(shop, encoding="utf-8")

    def run(*command):
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)

    def create():
        done = run(sys.executable, "-c", CREATE, "log.parquet", *settings)
        assert done.returncode == 0, done.stderr

    options = ["--input", "lake.shop.orders", "--format", "table", "--out", "out", "--now", "2026-01-01T00:00:00Z"]
    options += [part for each in settings for part in ("--conf", each)]
    backfilling = [sys.executable, "-m", "dedup.cli.main", "spark", "backfill", "shop.yaml", *options]
    create()
    first = run(*backfilling)
    assert first.returncode == 0, first.stderr
    assert verdicts_at(spark, str(tmp_path / "out" / "run=backfill")) == VERDICTS
    assert "was already published" in run(*backfilling).stderr
    create()
    assert "with another topology, input or order" in run(*backfilling).stderr
