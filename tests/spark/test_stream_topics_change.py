"""Topics change under a running stream, or the ID rule between two: it stops as a worker does, and judges no more."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
from confluent_kafka.admin import NewPartitions

from dedup.core.tracking_id import FieldRule, TrackingId, parse_path
from dedup.errors import StateIncompatible
from dedup.spark.stream import StreamOptions, start_stream
from tests.integration.test_admin import dedup, distinct, output_ids
from tests.integration.test_topics_change import INCOMPATIBLE, made_again
from tests.spark.streaming import start_driver

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]


@contextmanager
def stopping(job, spark, says):
    """A stream that has committed everything sent; the change inside ``with`` ends it."""
    stream = start_stream(spark, job.topology, job.settings, StreamOptions(str(job.directory / "checkpoint")))
    try:
        job.until_done()
        yield
        with pytest.raises(StateIncompatible, match=says):
            stream.wait()
    finally:
        stream.stop()


def test_source_topic_made_again_under_a_driver(make_job):
    """The command says why in one sentence. Was: after a hundred lines of Java's."""
    job = make_job(partitions=1)
    job.send(distinct(0, 20)[::2])
    driver = start_driver(job)
    job.until_done()
    made_again(job, job.topology.source.topics[0])
    job.send(distinct(100, 300)[::2])
    assert driver.wait() == INCOMPATIBLE, driver.log
    assert "was deleted and recreated" in driver.log
    assert "Traceback" not in driver.log
    assert "\n\tat " not in driver.log
    assert output_ids(job) == Counter(f"x-{number}" for number in range(0, 20, 2))


def test_source_topic_made_again_before_a_repartition_topic(make_job, spark, topic_names):
    job = make_job(partitions=1, document={"source": {"topics": [topic_names("again")]}})
    job.send(distinct(0, 20)[::2])
    with stopping(job, spark, "was deleted and recreated"):
        made_again(job, job.topology.source.topics[0])
        job.send(distinct(100, 300)[::2])
    assert output_ids(job) == Counter(f"x-{number}" for number in range(0, 20, 2))


def test_a_stream_with_another_id_rule_repartitions_nothing(make_job, spark, topic_names):
    """Was: only the query `dedup` refused, after `repartition` had sent records to the partitions of the other IDs."""
    job = make_job(document={"source": {"topics": [topic_names("rule")]}})
    job.send(distinct(0, 500))
    job.finish()
    job.send(distinct(500, 1_000))
    before = job.written()
    other = replace(job.topology, tracking_id=TrackingId(FieldRule(parse_path("n")), ()))
    options = StreamOptions(str(job.directory / "another"), exit_when_done=True)
    with pytest.raises(StateIncompatible, match="another ID rule"):
        start_stream(spark, other, job.settings, options).wait()
    assert job.written() == before


@pytest.mark.parametrize("repartitions", [False, True])
def test_a_checkpoint_that_is_ahead_of_a_reset_state_is_refused_at_the_start(
    make_job, spark, topic_names, repartitions
):
    """Was: a stream judged nothing and exited with 0. Only a new record showed that the two do not match."""
    job = make_job(document={"source": {"topics": [topic_names("ahead")]}} if repartitions else {})
    job.send(distinct(0, 100))
    options = StreamOptions(str(job.directory / "checkpoint"), exit_when_done=True)
    start_stream(spark, job.topology, job.settings, options).wait()
    start_stream(spark, job.topology, job.settings, options).wait()
    dedup(job, "reset", "--to", "earliest", "--yes")
    with pytest.raises(StateIncompatible, match=r"the checkpoint continues at offset|is the checkpoint of another"):
        start_stream(spark, job.topology, job.settings, options)


def test_partitions_added_to_the_source(make_job, spark):
    job = make_job()
    events = distinct(0, 500)
    job.send(events)
    with stopping(job, spark, "has 3 partitions now, and had 2|but now has partition 2"):
        for future in job.admin.client.create_partitions([NewPartitions(job.topology.source.topics[0], 3)]).values():
            future.result(timeout=30)
        job.admin.until_led(job.topology.source.topics[0], 3)
        job.send(events)
    assert output_ids(job) == Counter(f"x-{number}" for number in range(500))


def test_changelog_made_again(make_job, spark):
    job = make_job()
    job.send(distinct(0, 500))
    with stopping(job, spark, "was deleted and recreated"):
        made_again(job, job.topology.changelog_topic, {"cleanup.policy": "compact,delete"})
        job.send(distinct(0, 500))
    assert output_ids(job) == Counter(f"x-{number}" for number in range(500))
