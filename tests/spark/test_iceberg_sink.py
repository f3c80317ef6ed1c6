"""The output topic in an Iceberg table: each record once, through kills, second sinks, and others' commits."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql.functions import lit

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.spark.iceberg_log import IcebergLog
from dedup.spark.table_sink import TableSink
from tests.spark.streaming import NEEDS_ICEBERG
from tests.spark.test_table_sink import DAY_MS, fill, job, names, now_ms, of_topic, put

__all__ = ["job", "put"]
pytestmark = [pytest.mark.timeout(600), NEEDS_ICEBERG]


@pytest.fixture
def table(spark, job):
    spark.sql("CREATE NAMESPACE IF NOT EXISTS lake.shop")
    name = f"lake.shop.`{job.name}`"
    yield name
    spark.sql(f"DROP TABLE IF EXISTS {name}")


@pytest.fixture
def make_sink(spark, job, table):
    def make(**options):
        return TableSink(spark, job.topology, job.settings, IcebergLog(spark, table), **options)

    return make


@pytest.fixture
def rows(spark, table):
    """What the table holds, as (partition, offset, value), in order."""

    def rows():
        found = spark.table(table).collect()
        return sorted((row["partition"], row["offset"], bytes(row["value"])) for row in found)

    return rows


def branches(spark, table):
    return [row["name"] for row in spark.table(f"{table}.refs").collect() if row["name"] != "main"]


def test_each_record_once_with_its_coordinates(spark, job, make_sink, put, rows, table):
    put(*names(50))
    fill(make_sink())
    put(*names(30, "b"))
    sink = make_sink(most_offsets=20)
    fill(sink)
    assert sink.append(now_ms=now_ms()) is None
    assert rows() == of_topic(job)
    assert len(rows()) == 80
    row = spark.table(table).where("CAST(value AS STRING) = 'b7'").first()
    assert bytes(row["key"]) == b"b7"
    assert [(header["key"], bytes(header["value"])) for header in row["headers"]] == [("name", b"b7")]
    assert branches(spark, table) == []


@pytest.mark.parametrize("when", ["with an empty branch", "with rows in a branch", "after the commit"])
def test_a_sink_that_ended_around_its_commit_continues(spark, job, make_sink, put, rows, table, when):
    class Killed(IcebergLog):
        def _commit(self, rows, properties, head):
            if when == "after the commit":
                super()._commit(rows, properties, head)
            else:
                self._loaded().manageSnapshots().createBranch("dedup_left", head.snapshot_id).commit()
            if when == "with rows in a branch":
                rows.writeTo(f"{table}.branch_dedup_left").append()
            raise KeyboardInterrupt

    put(*names(20))
    killed = make_sink()
    killed._log = Killed(spark, table)
    with pytest.raises(KeyboardInterrupt):
        fill(killed)
    put(*names(5, "b"))
    fill(make_sink())
    assert rows() == of_topic(job)
    assert branches(spark, table) == []


def test_of_two_sinks_one_is_told(job, make_sink, put, rows):
    put(*names(10))
    one, other = make_sink(), make_sink()
    fill(one)
    put(*names(10, "b"))
    assert other.append(now_ms=now_ms()) is not None
    put(*names(10, "c"))
    with pytest.raises(StateIncompatible, match="another sink has written"):
        one.append(now_ms=now_ms())
    fill(make_sink())
    assert rows() == of_topic(job)
    assert len(rows()) == 30


def test_of_two_sinks_that_begin_one_is_told(job, make_sink, put, rows):
    put(*names(10))
    one, other = make_sink(), make_sink()
    # Both have looked, and found no table.
    one._last, one._looked = one._found(), True
    fill(other)
    with pytest.raises(StateIncompatible, match="another sink has written"):
        fill(one)
    assert rows() == of_topic(job)


class Interrupted(IcebergLog):
    """Another commit lands at the last moment: after the rows are in the branch, before `main` moves."""

    def __init__(self, spark, name, other, times):
        super().__init__(spark, name)
        self.other, self.left = other, times

    def _commit(self, rows, properties, head):
        if self.left:
            self.left -= 1
            self.other()
        return super()._commit(rows, properties, head)


def interrupted(spark, table, make_sink, other, times=1):
    sink = make_sink()
    sink._log = Interrupted(spark, table, other, times)
    return sink


@pytest.mark.parametrize("empty", [True, False])
def test_of_two_sinks_at_the_same_moment_one_is_told(spark, job, table, make_sink, put, rows, empty):
    put(*names(10))
    fill(make_sink())
    other = make_sink()
    other.append(now_ms=now_ms())
    if not empty:
        put(*names(10, "b"))
    late = now_ms() + 2 * DAY_MS
    sink = interrupted(spark, table, make_sink, lambda: other.append(now_ms=late))
    with pytest.raises(StateIncompatible, match="another sink has written"):
        sink.append(now_ms=late)
    put(*names(10, "c"))
    fill(make_sink())
    assert rows() == of_topic(job)


def test_iceberg_moves_main_only_from_the_snapshot_that_it_has_examined(spark, make_sink, put, rows, table):
    put(*names(10))
    fill(make_sink())
    log = IcebergLog(spark, table)
    loaded = log._loaded()
    loaded.manageSnapshots().createBranch("late", loaded.currentSnapshot().snapshotId()).commit()
    spark.table(table).writeTo(f"{table}.branch_late").append()
    loaded.refresh()
    pending = loaded.manageSnapshots().fastForwardBranch("main", "late")
    delete(spark, table, "a3")
    with pytest.raises(Py4JJavaError, match="CommitFailed"):
        pending.commit()
    assert len(rows()) == 9


def test_another_jobs_commit_at_the_same_moment_is_no_conflict(spark, job, table, make_sink, put, rows):
    put(*names(10))
    fill(make_sink())
    put(*names(10, "b"))
    sink = interrupted(spark, table, make_sink, lambda: delete(spark, table, "a3"))
    fill(sink)
    assert [value for _, _, value in rows()] == [v for _, _, v in of_topic(job) if v != b"a3"]


def delete(spark, table, value):
    spark.sql(f"DELETE FROM {table} WHERE CAST(value AS STRING) = '{value}'")


def test_commits_of_others_without_end_are_told(spark, table, make_sink, put, rows):
    put(*names(10))
    fill(make_sink())
    put(*names(10, "b"))
    numbers = iter(range(10))
    sink = interrupted(spark, table, make_sink, lambda: delete(spark, table, f"a{next(numbers)}"), times=9)
    with pytest.raises(BrokerUnavailable, match="other jobs have committed"):
        fill(sink)
    assert len(rows()) == 5


def overwrite(spark, table):
    spark.table(table).limit(1).writeTo(table).overwrite(lit(True))


def empty(spark, table):
    spark.sql(f"DELETE FROM {table}")


@pytest.mark.parametrize(("change", "running"), [(overwrite, True), (overwrite, False), (empty, False)])
def test_a_table_that_was_replaced_is_refused(spark, make_sink, put, table, change, running):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    change(spark, table)
    put(*names(10, "c"))
    with pytest.raises(StateIncompatible, match="has replaced what the sink had written"):
        fill(sink if running else make_sink())


def test_a_table_that_was_made_anew_is_refused(spark, make_sink, put, rows, table):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    spark.table(table).limit(1).writeTo(table).using("iceberg").createOrReplace()
    put(*names(10, "c"))
    with pytest.raises(StateIncompatible, match="does not hold commit 1 of the sink any more"):
        fill(sink)
    with pytest.raises(StateIncompatible, match="no commit of its log is one of the sink"):
        fill(make_sink())


def test_after_a_rollback_the_next_sink_continues_at_its_position(spark, job, make_sink, put, rows, table):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    put(*names(10, "b"))
    fill(sink)
    first = spark.table(f"{table}.history").orderBy("made_current_at").collect()[1]["snapshot_id"]
    IcebergLog(spark, table)._loaded().manageSnapshots().rollbackTo(first).commit()
    put(*names(10, "c"))
    with pytest.raises(StateIncompatible, match="does not hold commit 2"):
        fill(sink)
    fill(make_sink())
    assert rows() == of_topic(job)


def test_a_table_of_someone_else_is_refused(spark, make_sink, put, table):
    put(*names(10))
    spark.range(3).writeTo(table).using("iceberg").create()
    with pytest.raises(StateIncompatible, match="no commit of its log is one of the sink"):
        fill(make_sink())
    assert spark.table(table).count() == 3


def test_an_empty_table_of_the_users_own_layout_is_filled(spark, job, make_sink, put, rows, table):
    columns = "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, "
    columns += "partition INT, offset BIGINT, timestamp TIMESTAMP"
    spark.sql(f"CREATE TABLE {table} ({columns}) USING iceberg PARTITIONED BY (days(timestamp))")
    put(*names(10))
    fill(make_sink())
    put(*names(10, "b"))
    fill(make_sink())
    assert rows() == of_topic(job)
