"""The output topic in a Delta table: each record once, through kills and second sinks; what is refused."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.cimpl import NewPartitions

from dedup.errors import BrokerUnavailable, SettingsError, StateIncompatible
from dedup.spark import kafka_source
from dedup.spark.audit import audit
from dedup.spark.table_log import DeltaLog
from dedup.spark.table_sink import TableSink, catch_up, follow
from dedup.spark.tables import output_records
from dedup.verify.kafka_reader import KafkaReader
from tests.brokers import producer_of
from tests.integration.fleet import Job, until
from tests.integration.workload import workload
from tests.spark.streaming import start_spark

pytestmark = pytest.mark.timeout(600)
DAY_MS = 86_400_000


@pytest.fixture
def job(kafka, admin, tmp_path, topic_names):
    made = Job(kafka, admin, tmp_path / "job", topic_names("job"))
    yield made
    made.end()


@pytest.fixture
def table(tmp_path):
    return str(tmp_path / "table")


@pytest.fixture
def make_sink(spark, job, table):
    def make(**options):
        log = DeltaLog(spark, options.pop("path", table))
        return TableSink(spark, options.pop("topology", job.topology), job.settings, log, **options)

    return make


LONG = {"transaction.timeout.ms": 900_000}


@pytest.fixture
def put(kafka, job):
    """Sends committed records to the output topic, as a fleet would; ``last`` leaves their transaction open."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": f"{job.name}-put", **LONG})
    producer.init_transactions()
    ends = [
        Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "ends", "isolation.level": level})
        for level in ("read_committed", "read_uncommitted")
    ]

    def settled():
        places = [TopicPartition(job.output, partition) for partition in range(job.partitions)]
        committed, written = ([each.get_watermark_offsets(place) for place in places] for each in ends)
        return committed == written

    def commit():
        """The broker answers before it has written the markers: only then are the records committed for a reader."""
        producer.commit_transaction()
        until(settled, "the transaction's markers are written")

    def put(*names, leave_open=False):
        producer.begin_transaction()
        for name in names:
            producer.produce(job.output, name.encode(), key=name, headers=[("name", name)])
        producer.flush()
        if leave_open:
            return commit
        commit()
        return None

    yield put
    for each in ends:
        each.close()


@pytest.fixture
def rows(spark, table):
    """What the table holds, as (partition, offset, value), in order."""

    def rows(path=table):
        found = spark.read.format("delta").load(path).collect()
        return sorted((row["partition"], row["offset"], bytes(row["value"])) for row in found)

    return rows


def of_topic(job):
    return sorted((m.partition(), m.offset(), m.value()) for m in job.read(job.output))


def now_ms():
    return int(time.time() * 1000)


def fill(sink):
    catch_up(sink)


def names(count, prefix="a"):
    return [f"{prefix}{number}" for number in range(count)]


def append_during(sink, tmp_path, act):
    """Append, and act while the rows are being written. Return what the append returns, or raise its error."""
    started, go, append = tmp_path / "started", tmp_path / "go", sink._log.append

    def wait(batches):
        started.touch()
        while not go.exists():
            time.sleep(0.05)
        yield from batches

    def slowly(rows, *arguments, **options):
        # One task, so that the other core is free for what happens in the meantime.
        return append(rows.coalesce(1).mapInArrow(wait, rows.schema), *arguments, **options)

    sink._log.append = slowly
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(sink.append, now_ms=now_ms())
        try:
            until(lambda: started.exists() or late.done(), "the rows are being written")
            act()
        finally:
            go.touch()
        return late.result(300)


def test_a_changed_property_during_an_append_is_no_reason_to_stop(spark, job, table, make_sink, put, rows, tmp_path):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    put(*names(10, "b"))
    change = f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('note' = '1')"
    with pytest.raises(BrokerUnavailable, match="another job changed the table at the same time"):
        append_during(sink, tmp_path, lambda: spark.sql(change))
    assert len(rows()) == 10
    fill(sink)  # `follow` does this by itself
    assert rows() == of_topic(job)
    assert len(rows()) == 20


def test_each_record_once_with_its_coordinates(spark, job, make_sink, put, rows, table):
    put(*names(50))
    fill(make_sink())
    put(*names(30, "b"))
    sink = make_sink(most_offsets=20)
    fill(sink)
    assert sink.append(now_ms=now_ms()) is None
    assert rows() == of_topic(job)
    assert len(rows()) == 80
    row = spark.read.format("delta").load(table).where("CAST(value AS STRING) = 'b7'").first()
    assert bytes(row["key"]) == b"b7"
    assert [(header["key"], bytes(header["value"])) for header in row["headers"]] == [("name", b"b7")]
    assert row["topic"] == job.output
    # About 20 offsets a commit: the second sink did not take the 30 at once.
    assert len(list(Path(table, "_delta_log").glob("*.json"))) >= 3


def test_an_open_transaction_is_left_for_later(job, make_sink, put, rows):
    put(*names(10))
    commit = put(*names(10, "open"), leave_open=True)
    sink = make_sink()
    fill(sink)
    assert len(rows()) == 10
    commit()
    fill(sink)
    assert rows() == of_topic(job)
    assert len(rows()) == 20


def test_an_open_transaction_is_left_by_an_upsert_and_refused_by_an_audit(spark, job, put, monkeypatch, caplog):
    put(*names(40))
    commit = put(*names(10, "open"), leave_open=True)
    monkeypatch.setattr(kafka_source, "_SETTLED_WITHIN_S", 0.0)
    assert output_records(spark, job.topology, job.settings).count() == 40
    assert "a transaction that began there was still open after 0 s" in caplog.text
    with pytest.raises(
        BrokerUnavailable, match=rf"{job.output}/\d.* can be read only up to offset .* abort it; then run"
    ):
        audit(spark, job.topology, job.settings)
    commit()
    assert output_records(spark, job.topology, job.settings).count() == 50


@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
def test_a_sink_that_ended_around_its_commit_continues(job, make_sink, put, rows, when):
    put(*names(20))
    killed = make_sink()
    write = killed._write

    def ends(*what):
        if when == "after the commit":
            write(*what)
        raise KeyboardInterrupt

    killed._write = ends
    with pytest.raises(KeyboardInterrupt):
        fill(killed)
    put(*names(5, "b"))
    fill(make_sink())
    assert rows() == of_topic(job)


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


def replace(spark, table):
    spark.read.format("delta").load(table).limit(1).write.format("delta").mode("overwrite").save(table)


def restore(spark, table):
    spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 0")


def made_anew(spark, table):
    spark.sql(f"CREATE OR REPLACE TABLE delta.`{table}` USING delta AS SELECT * FROM delta.`{table}` LIMIT 1")


@pytest.mark.parametrize(("change", "running"), [(replace, True), (restore, False), (made_anew, False)])
def test_a_table_that_was_replaced_is_refused(spark, make_sink, put, table, change, running):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    put(*names(10, "b"))
    fill(sink)
    change(spark, table)
    put(*names(10, "c"))
    with pytest.raises(StateIncompatible, match="has replaced what the sink had written"):
        fill(sink if running else make_sink())


def test_a_table_that_is_replaced_during_a_commit_is_refused_by_every_later_sink(spark, make_sink, put, table):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    put(*names(10, "b"))
    write = sink._write

    def replaced_before(*what):
        replace(spark, table)
        return write(*what)

    sink._write = replaced_before
    for each in (sink, make_sink()):
        with pytest.raises(StateIncompatible, match="has replaced what the sink had written"):
            fill(each)


def test_a_table_that_was_removed_is_refused(make_sink, put, table):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    shutil.rmtree(table)
    put(*names(10, "b"))
    with pytest.raises(StateIncompatible, match="was removed or recreated"):
        fill(sink)
    assert not Path(table).exists()


def test_brokers_that_are_away_are_waited_for_once_they_were_reached(make_sink, put, rows, job):
    put(*names(10))
    sink, over, answers = make_sink(), threading.Event(), [None, BrokerUnavailable("away"), None]
    append = sink.append

    def away_once(**options):
        away = answers.pop(0)
        if not answers:
            over.set()
        if away is not None:
            raise away
        return append(**options)

    sink.append = away_once
    follow(sink, every_s=0.01, over=over)
    assert rows() == of_topic(job)
    sink.append = lambda **_: (_ for _ in ()).throw(BrokerUnavailable("away"))
    with pytest.raises(BrokerUnavailable):
        follow(sink, every_s=0.01, over=threading.Event())


def test_a_broker_that_knows_fewer_partitions_is_not_believed(make_sink, put, rows, job, monkeypatch):
    put(*names(20))
    sink = make_sink()
    fill(sink)
    put(*names(20, "b"))
    with monkeypatch.context() as patch:
        patch.setattr(KafkaReader, "partitions", lambda _, topics: dict.fromkeys(topics, 1))
        with pytest.raises(BrokerUnavailable, match="has 1 partitions"):
            fill(sink)
    fill(sink)
    assert rows() == of_topic(job)


def test_compaction_and_deleted_rows_are_the_owners_business(spark, make_sink, put, rows, table):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    spark.sql(f"OPTIMIZE delta.`{table}`")
    spark.sql(f"DELETE FROM delta.`{table}` WHERE CAST(value AS STRING) = 'a3'")
    put(*names(10, "b"))
    fill(sink)
    put(*names(10, "c"))
    fill(make_sink())
    assert {value.decode() for _, _, value in rows()} == {*names(10), *names(10, "b"), *names(10, "c")} - {"a3"}


def test_an_empty_table_with_a_history_may_become_the_sinks(spark, job, make_sink, put, rows, table):
    put(*names(5))
    fill(make_sink(path=f"{table}-other"))
    made = spark.read.format("delta").load(f"{table}-other")
    made.write.format("delta").save(table)
    made.limit(0).write.format("delta").mode("overwrite").save(table)
    fill(make_sink())
    put(*names(3, "b"))
    fill(make_sink())
    assert rows() == of_topic(job)


def test_a_table_of_someone_else_is_refused(spark, job, make_sink, put, rows, table):
    put(*names(10))
    spark.range(3).write.format("delta").save(table)
    with pytest.raises(StateIncompatible, match="its log contains no commit of the sink"):
        fill(make_sink())
    assert spark.read.format("delta").load(table).count() == 3


def test_a_table_of_another_topology_is_refused(job, make_sink, put, rows):
    put(*names(10))
    fill(make_sink())
    with pytest.raises(StateIncompatible, match="its log contains no commit of the sink"):
        fill(make_sink(topology=dataclasses.replace(job.topology, name="another")))
    assert len(rows()) == 10


def test_a_topic_that_was_made_again_is_refused(job, admin, make_sink, put, rows):
    put(*names(10))
    fill(make_sink())
    admin.delete_topic(job.output)
    admin.create_topic(job.output, job.partitions, {})
    with pytest.raises(StateIncompatible, match="was deleted and created again"):
        fill(make_sink())
    assert len(rows()) == 10


def test_records_that_retention_deleted_are_missed_loudly(job, admin, make_sink, put, rows):
    put(*names(40))
    sink = make_sink()
    fill(sink)
    put(*names(40, "b"))
    before = rows()
    admin.delete_below(job.output, admin.end_offsets(job.output))
    with pytest.raises(StateIncompatible, match="Kafka deleted offsets"):
        fill(sink)
    assert rows() == before


def test_a_topic_that_is_compacted_by_now_stops_the_sink(job, admin, make_sink, put, rows):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    before = rows()
    admin.configure(job.output, cleanup_policy="compact,delete")
    put(*names(10, "b"))
    with pytest.raises(StateIncompatible, match="is compacted, so Kafka may remove records before"):
        fill(sink)
    assert rows() == before
    admin.configure(job.output, cleanup_policy="delete")
    fill(sink)
    assert len(rows()) == 20


def test_a_new_partition_is_read_from_its_beginning(job, admin, make_sink, put, rows):
    put(*names(10))
    sink = make_sink()
    fill(sink)
    for future in admin.client.create_partitions([NewPartitions(job.output, 3)]).values():
        future.result(timeout=30)
    until(lambda: len(admin.end_offsets(job.output)) == 3, "the third partition")
    producer = producer_of(job.kafka.bootstrap)
    producer.produce(job.output, b"new", partition=2)
    assert producer.flush(30) == 0
    fill(sink)
    assert rows() == of_topic(job)
    assert {partition for partition, _, _ in rows()} == {0, 1, 2}


def test_the_position_is_renewed_before_delta_forgets_it(make_sink, put):
    put(*names(10))
    sink = make_sink()
    first = sink.append(now_ms=now_ms())
    later = make_sink()
    assert later.append(now_ms=first.committed_ms + DAY_MS - 1) is None
    again = later.append(now_ms=first.committed_ms + DAY_MS)
    assert again.rows == 0
    assert again.ends == first.ends
    assert later.append(now_ms=first.committed_ms + 2 * DAY_MS - 1) is None


def test_a_topic_or_an_output_that_is_missing(job, make_sink):
    with pytest.raises(SettingsError, match="has no output topic"):
        make_sink(topology=dataclasses.replace(job.topology, output=None))
    elsewhere = job.topology.output.model_copy(update={"topic": f"{job.name}-nowhere"})
    with pytest.raises(BrokerUnavailable, match="nowhere"):
        fill(make_sink(topology=dataclasses.replace(job.topology, output=elsewhere)))


def test_a_stream_with_its_table_in_one_job(job, rows):
    job.send(workload(5, 3_000))
    table = job.directory / "table"
    run = ("run", "--checkpoint", str(job.directory / "checkpoint"), "--exit-when-done", "--delta", str(table))
    sink = ("sink", "--exit-when-done", "--delta", str(table))
    driver = start_spark(job, run, sink, name="both")
    assert driver.wait(300) == 0, job.logs()
    assert "0 rows appended" in driver.log
    job.judge()
    assert rows(str(table)) == of_topic(job)
