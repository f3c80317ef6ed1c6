"""The exactly-once writer for any DataFrame: retries, truncated input, other checkpoints and partition counts."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from functools import partial
from itertools import islice

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkException

from dedup.errors import StateIncompatible
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.settings import Settings
from dedup.spark import kafka_sink
from dedup.spark.kafka_sink import EpochReport, KafkaSink, Tally
from dedup.spark.marker import read_markers
from tests.brokers import read_all
from tests.integration.fleet import until

pytestmark = pytest.mark.timeout(600)

# Executors can not import a test.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

DDL = "topic string, key binary, value binary, timestamp_ms long"


@pytest.fixture
def topic(admin, topic_names):
    return admin.create_topic(topic_names("sunk"), 2, {"retention.ms": "-1"})


@pytest.fixture
def open_sink(kafka, topic):
    settings = Settings(brokers=(kafka.bootstrap,))
    return partial(KafkaSink.open, settings, f"{topic}-query", topics=[topic])


def frame(spark, topic, count, *, first=0, partitions=2):
    rows = [(topic, b"k%d" % n, b"v%d" % n, 1_700_000_000_000 + n) for n in range(first, first + count)]
    return spark.createDataFrame(rows, DDL).coalesce(partitions) if partitions < 2 else spark.createDataFrame(rows, DDL)


def values(kafka, topic):
    return Counter(message.value() for message in read_all(kafka.bootstrap, topic))


def numbers(*ranges):
    return Counter(b"v%d" % n for each in ranges for n in each)


def test_rows_arrive_as_they_are(spark, kafka, topic, open_sink):
    sink = open_sink(partitions=2, checkpoint="c")
    assert sink.write(frame(spark, topic, 50), 0) == EpochReport(0, 50, 0)
    found = read_all(kafka.bootstrap, topic)
    assert values(kafka, topic) == numbers(range(50))
    assert {message.timestamp() for message in found} == {(1, 1_700_000_000_000 + n) for n in range(50)}
    by_key = {message.key(): message.partition() for message in found}
    assert set(by_key.values()) == {0, 1}


def test_an_epoch_written_already_is_compared_and_skipped(spark, kafka, topic, open_sink):
    sink = open_sink(partitions=2, checkpoint="c")
    sink.write(frame(spark, topic, 50), 0)
    again = open_sink(partitions=2, checkpoint="c")
    assert again.write(frame(spark, topic, 50), 0) == EpochReport(0, 50, 2)
    again.write(frame(spark, topic, 10, first=50), 1)
    assert values(kafka, topic) == numbers(range(60))


def test_an_epoch_written_with_other_rows_stops_the_query(spark, kafka, topic, open_sink):
    sink = open_sink(partitions=2, checkpoint="c")
    sink.write(frame(spark, topic, 50), 3)
    with pytest.raises(StateIncompatible, match="has written epoch 3 with 25 rows"):
        sink.write(frame(spark, topic, 50, first=1), 3)
    with pytest.raises(StateIncompatible, match="checkpoint is older than the output"):
        sink.write(frame(spark, topic, 50), 2)
    assert values(kafka, topic) == numbers(range(50))


def truncating(write, plan, batches):
    """What Python sees of a task that fails upstream: a normal end."""
    return write(plan, islice(batches, 1))


def failing(write, plan, batches):
    from pyspark import TaskContext  # noqa: PLC0415

    yield from write(plan, batches)
    if TaskContext.get().partitionId() == 1:
        raise RuntimeError("after the commit, before Spark knows of it")


def breaking(committed, write, plan, batches):
    from pyspark import TaskContext  # noqa: PLC0415

    if TaskContext.get().partitionId() == 1:
        # Earlier, Spark would end the other task before it has written.
        until(committed.exists, "the other partition is written")
        raise RuntimeError("before anything is written")
    yield from write(plan, batches)
    committed.touch()


@pytest.fixture
def small_batches(spark):
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, "10")
    yield
    spark.conf.set(name, before)


def test_an_input_that_only_seems_to_end_is_not_committed(spark, kafka, topic, open_sink, small_batches, monkeypatch):
    sink = open_sink(partitions=2, checkpoint="c")
    with monkeypatch.context() as patched:
        patched.setattr(kafka_sink, "write_partition", partial(truncating, kafka_sink.write_partition))
        with pytest.raises(PySparkException, match="10 rows came of 25"):
            sink.write(frame(spark, topic, 50), 0)
    assert values(kafka, topic) == Counter()
    sink.write(frame(spark, topic, 50), 0)
    assert values(kafka, topic) == numbers(range(50))


def test_a_task_that_fails_after_its_commit_is_not_written_twice(spark, kafka, topic, open_sink, monkeypatch):
    sink = open_sink(partitions=2, checkpoint="c")
    with monkeypatch.context() as patched:
        patched.setattr(kafka_sink, "write_partition", partial(failing, kafka_sink.write_partition))
        with pytest.raises(PySparkException, match="before Spark knows of it"):
            sink.write(frame(spark, topic, 50), 0)
    report = sink.write(frame(spark, topic, 50), 0)
    assert report.skipped >= 1
    assert values(kafka, topic) == numbers(range(50))


def test_a_half_written_epoch_is_finished_by_as_many_partitions(spark, kafka, topic, open_sink, monkeypatch, tmp_path):
    sink = open_sink(partitions=2, checkpoint="c")
    sink.write(frame(spark, topic, 20), 0)
    with monkeypatch.context() as patched:
        patched.setattr(
            kafka_sink, "write_partition", partial(breaking, tmp_path / "committed", kafka_sink.write_partition)
        )
        with pytest.raises(PySparkException, match="before anything is written"):
            sink.write(frame(spark, topic, 20, first=20), 1)
    with pytest.raises(StateIncompatible, match="epoch 1 was written by 1 of 2 partitions"):
        open_sink(partitions=1, checkpoint="c")
    open_sink(partitions=2, checkpoint="c").write(frame(spark, topic, 20, first=20), 1)

    fewer = open_sink(partitions=1, checkpoint="c")
    assert fewer.write(frame(spark, topic, 20, first=20, partitions=1), 1).rows == 0
    fewer.write(frame(spark, topic, 20, first=40, partitions=1), 2)
    assert values(kafka, topic) == numbers(range(60))


def test_a_task_of_a_generation_before_writes_nothing(kafka, spark, topic, open_sink):
    old = open_sink(partitions=2, checkpoint="c")
    old.write(frame(spark, topic, 20), 0)
    new = open_sink(partitions=1, checkpoint="c")
    # Its own transactional ids were fenced once, when the new one was opened; nothing stops it from opening them again.
    with pytest.raises(StateIncompatible, match="another start of the query has taken over"):
        old.write(frame(spark, topic, 20, first=20), 1)
    new.write(frame(spark, topic, 20, first=20, partitions=1), 1)
    assert values(kafka, topic) == numbers(range(40))


def test_a_new_checkpoint_has_writers_of_its_own(kafka, spark, topic, open_sink):
    open_sink(partitions=2, checkpoint="c").write(frame(spark, topic, 20), 7)
    open_sink(partitions=2, checkpoint="d").write(frame(spark, topic, 20, first=20), 0)
    assert values(kafka, topic) == numbers(range(40))
    found = asyncio.run(markers(kafka, f"{topic}-query.markers"))
    assert (found.generation.number, found.generation.checkpoint) == (1, "d")
    assert {place: marker.epoch for place, marker in found.markers.items()} == {
        (0, 0): 7,
        (0, 1): 7,
        (1, 0): 0,
        (1, 1): 0,
    }


async def markers(kafka, topic):
    wire = KafkaWire(Connection.of(Settings(brokers=(kafka.bootstrap,))))
    await wire.start()
    try:
        return await read_markers(wire, topic)
    finally:
        await wire.stop()


def test_another_number_of_partitions_than_opened_for_is_refused(spark, topic, open_sink):
    sink = open_sink(partitions=2, checkpoint="c")
    with pytest.raises(StateIncompatible, match="has 1 partitions, but the sink was opened for 2"):
        sink.write(frame(spark, topic, 20, partitions=1), 0)


def test_a_topic_that_does_not_exist_is_refused(kafka):
    with pytest.raises(StateIncompatible, match="topic 'nowhere' does not exist"):
        KafkaSink.open(Settings(brokers=(kafka.bootstrap,)), "q", topics=["nowhere"], partitions=1, checkpoint="c")


def test_text_is_written_as_its_bytes(spark, kafka, topic, open_sink):
    rows = spark.createDataFrame(
        [(topic, f"k{n}", f"v{n}") for n in range(20)], "topic string, key string, value string"
    )
    open_sink(partitions=2, checkpoint="c").write(rows, 0)
    assert values(kafka, topic) == numbers(range(20))


def test_a_row_for_a_topic_that_was_not_named_is_refused(spark, kafka, topic, open_sink):
    rows = frame(spark, f"{topic}-other", 20)
    with pytest.raises(StateIncompatible, match=r"which `KafkaSink\.open` was not told of"):
        open_sink(partitions=2, checkpoint="c").write(rows, 0)


def test_rows_with_nulls_among_integers_are_known_again_in_any_order():
    partitions = [None, *range(5), None, *range(5)]
    columns = {"topic": ["t"] * 12, "value": [b"v%d" % n for n in range(12)], "partition": partitions}
    whole = pa.record_batch(columns, pa.schema({"topic": pa.string(), "value": pa.binary(), "partition": pa.int32()}))
    digests = set()
    for order, cut in ((range(12), 12), (range(12), 6), (sorted(range(12), key=lambda n: n % 6 == 0), 5)):
        batch, tally = whole.take(pa.array(order)), Tally(12)
        tally.add(batch.slice(0, cut))
        tally.add(batch.slice(cut))
        digests.add(tally.digest)
    assert len(digests) == 1
