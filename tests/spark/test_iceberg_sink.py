"""The output topic in an Iceberg table: each record once, through kills, second sinks, and others' commits."""

from __future__ import annotations

import time

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql.functions import lit

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.spark.table_log import IcebergLog
from dedup.spark.table_sink import TableSink
from tests.spark.streaming import NEEDS_ICEBERG
from tests.spark.test_table_sink import DAY_MS, append_during, fill, job, names, now_ms, of_topic, put

__all__ = ["job", "put"]
pytestmark = [pytest.mark.timeout(600), NEEDS_ICEBERG]


LEFT = f"dedup_{'0' * 32}"
"""The branch of an append that was killed."""


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
                self._loaded().manageSnapshots().createBranch(LEFT, head.snapshot_id).commit()
            if when == "with rows in a branch":
                rows.writeTo(f"{table}.branch_{LEFT}").append()
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


def test_a_sink_whose_branch_another_sink_removed_during_its_append_is_told(job, make_sink, put, rows, tmp_path):
    """Iceberg makes the branch again, after what the other sink has written."""
    put(*names(10))
    fill(make_sink())
    put(*names(10, "b"))
    with pytest.raises(StateIncompatible, match="another sink has written"):
        append_during(make_sink(), tmp_path, lambda: fill(make_sink()))
    assert rows() == of_topic(job)
    fill(make_sink())
    assert len(rows()) == 20


def test_a_rollback_during_an_append_is_not_undone(spark, job, table, make_sink, put, rows, tmp_path):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    put(*names(10, "b"))
    fill(sink)
    put(*names(10, "c"))
    with pytest.raises(StateIncompatible, match="was rolled back or recreated"):
        append_during(make_sink(), tmp_path, lambda: roll_back(spark, table))
    assert len(rows()) == 10
    fill(make_sink())
    assert rows() == of_topic(job)


def roll_back(spark, table):
    """To the snapshot before the last one."""
    loaded = IcebergLog(spark, table)._loaded()
    loaded.manageSnapshots().rollbackTo(loaded.currentSnapshot().parentId()).commit()


def test_a_table_of_format_version_1_is_refused(spark, make_sink, put, table):
    columns = "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, "
    columns += "partition INT, offset BIGINT, timestamp TIMESTAMP"
    spark.sql(f"CREATE TABLE {table} ({columns}) USING iceberg TBLPROPERTIES ('format-version' = '1')")
    put(*names(10))
    with pytest.raises(StateIncompatible, match="format version 1"):
        fill(make_sink())


def test_deleted_rows_and_branches_of_others_are_the_owners_business(spark, job, make_sink, put, rows, table):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    spark.sql(f"DELETE FROM {table} WHERE CAST(value AS STRING) = 'a3'")
    loaded = IcebergLog(spark, table)._loaded()
    loaded.manageSnapshots().createBranch("dedup_of_mine", loaded.currentSnapshot().snapshotId()).commit()
    put(*names(10, "b"))
    fill(sink)
    fill(make_sink())
    assert [value for _, _, value in rows()] == [v for _, _, v in of_topic(job) if v != b"a3"]
    assert branches(spark, table) == ["dedup_of_mine"]


def test_a_compaction_of_the_whole_table_is_the_owners_business(spark, job, make_sink, put, rows, table):
    sink = make_sink()
    for letter in "abcdef":  # Iceberg compacts five small files or more
        put(*names(3, letter))
        fill(sink)
    compact(spark, table)
    put(*names(3, "g"))
    fill(sink)
    compact(spark, table)
    fill(make_sink())
    assert rows() == of_topic(job)


def compact(spark, table):
    done = spark.sql(
        f"CALL lake.system.rewrite_data_files(table => '{table}', options => map('rewrite-all', 'true'))"
    ).first()
    assert done["rewritten_data_files_count"] > 0
    last = next(iter(IcebergLog(spark, table).commits()))
    assert (last.operation, last.summary["deleted-records"]) == ("replace", last.summary["total-records"])


def test_a_changed_property_during_an_append_is_no_reason_to_stop(spark, job, table, make_sink, put, rows):
    """Iceberg refuses the branch, although `main` has not moved."""
    # Another catalog of the same tables, as in another process: within one catalog, Spark shares the loaded tables.
    for name in ("", ".type", ".warehouse"):
        spark.conf.set(f"spark.sql.catalog.other{name}", spark.conf.get(f"spark.sql.catalog.lake{name}"))
    elsewhere = table.replace("lake.", "other.", 1)

    class Changed:
        """A table whose properties another process changes while this one prepares a commit."""

        def __init__(self, loaded):
            self._loaded = loaded

        def __getattr__(self, name):
            return getattr(self._loaded, name)

        def manageSnapshots(self):  # noqa: N802 - Iceberg's name
            begun = self._loaded.manageSnapshots()
            if changes:
                spark.sql(f"ALTER TABLE {elsewhere} SET TBLPROPERTIES ('note' = '{changes.pop()}')")
            return begun

    class Contended(IcebergLog):
        def _loaded(self):
            found = super()._loaded()
            return None if found is None else Changed(found)

    changes = [3, 2, 1]
    put(*names(10))
    fill(make_sink())
    put(*names(10, "b"))
    sink = make_sink()
    sink._last, sink._looked = sink._found(), True
    sink._log = Contended(spark, table)
    fill(sink)
    assert changes == []
    assert rows() == of_topic(job)


def test_an_expiry_right_after_a_deletion_leaves_the_position(spark, job, table, make_sink, put, rows):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    delete(spark, table, "a3")
    fill(sink)
    time.sleep(0.002)
    now = spark.sql("SELECT current_timestamp()").first()[0]
    spark.sql(f"CALL lake.system.expire_snapshots(table => '{table}', older_than => TIMESTAMP '{now}')")
    assert len(list(IcebergLog(spark, table).commits())) == 1
    put(*names(10, "b"))
    fill(sink)
    fill(make_sink())
    assert [value for _, _, value in rows()] == [v for _, _, v in of_topic(job) if v != b"a3"]


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
    with pytest.raises(StateIncompatible, match="no longer contains commit 1 of the sink"):
        fill(sink)
    with pytest.raises(StateIncompatible, match="its log contains no commit of the sink"):
        fill(make_sink())


def test_after_a_rollback_the_next_sink_continues_at_its_position(spark, job, make_sink, put, rows, table):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    put(*names(10, "b"))
    fill(sink)
    roll_back(spark, table)
    put(*names(10, "c"))
    with pytest.raises(StateIncompatible, match="no longer contains commit 2"):
        fill(sink)
    fill(make_sink())
    assert rows() == of_topic(job)


def test_a_table_of_someone_else_is_refused(spark, make_sink, put, table):
    put(*names(10))
    spark.range(3).writeTo(table).using("iceberg").create()
    with pytest.raises(StateIncompatible, match="its log contains no commit of the sink"):
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
