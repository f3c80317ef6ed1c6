"""What the brokers delete by a record's own time: never what dedup has forwarded into a topic that it made."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dedup.embedded.kafka_node import EmbeddedKafka
from tests.brokers import RunningKafka, admin_of
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.workload import Event

pytestmark = pytest.mark.broker

DAY_MS = 86_400_000
HOUR = {"retention.ms": "3600000"}


@pytest.fixture(scope="module")
def keen() -> Iterator[RunningKafka]:
    """Return a broker that looks for old records several times a second, and from its start on."""
    often = {"log.retention.check.interval.ms": "200", "log.initial.task.delay.ms": "200"}
    with EmbeddedKafka(properties=often) as kafka:
        yield RunningKafka(kafka.bootstrap, kafka)
        kafka.kill()


def until_the_broker_has_looked(job: Job) -> None:
    """The broker has gone through all topics since this was called: it deleted what was there to be deleted twice.

    A look may have passed the topic in question when the first record comes; it has not when the second one goes.
    """
    for number in range(2):
        control = job.admin.create_topic(f"{job.name}-control-{number}", 1, HOUR)
        job.producer.produce(control, b"old", timestamp=days_ago(30))
        assert job.producer.flush(30) == 0
        until(lambda control=control: job.read(control) == [], "the broker deleted an old record")  # type: ignore[misc]


def days_ago(days: int) -> int:
    return time.time_ns() // 1_000_000 - days * DAY_MS


def old_events(days: int, *, topic: int = 0, copies: int = 1) -> list[Event]:
    """Return a thousand events of one day, each ID so many times."""
    began_ms = days_ago(days)
    return [
        Event(number % 2, b'{"id":"%d-%d","n":1}' % (topic, number), began_ms + number, b"%d" % number, topic=topic)
        for number in range(1_000)
        for _ in range(copies)
    ]


def ids(job: Job, topic: str) -> int:
    """Count the different values that a topic holds."""
    return len({message.value() for message in job.read(topic)})


def test_the_output_of_a_compacted_source_keeps_records_of_any_age(make_job: MakeJob, keen: RunningKafka) -> None:
    job = make_job(kafka=keen, admin=admin_of(keen.bootstrap), document={"duplicates": "compacted-duplicates"})
    job.admin.configure(job.topology.source.topics[0], cleanup_policy="compact", retention_ms="604800000")
    job.admin.delete_topic(job.output)
    worker = job.start("a")
    job.send(old_events(30, copies=2))
    job.until_done()
    until_the_broker_has_looked(job)
    assert ids(job, job.output) == ids(job, "compacted-duplicates") == 1_000
    assert "the brokers delete" not in worker.log
    assert worker.stop() == 0, worker.log


def test_the_output_of_two_sources_keeps_records_as_long_as_the_longer_one(
    make_job: MakeJob, keen: RunningKafka
) -> None:
    document = {"source": {"topics": ["kept-a-day", "kept-a-month"]}}
    job = make_job(kafka=keen, admin=admin_of(keen.bootstrap), document=document)
    job.admin.configure("kept-a-day", retention_ms=str(DAY_MS))
    job.admin.configure("kept-a-month", retention_ms=str(30 * DAY_MS))
    job.admin.delete_topic(job.output)
    worker = job.start("a")
    job.send(old_events(29, topic=1))
    until(lambda: ids(job, job.output) == 1_000, lambda: f"all is forwarded; its log:\n{worker.log}")
    until_the_broker_has_looked(job)
    assert ids(job, job.output) == 1_000
    assert worker.stop() == 0, worker.log


def test_an_output_that_would_delete_what_is_sent_to_it_is_told_of_at_the_start(job: Job) -> None:
    job.admin.configure(job.output, retention_ms=str(DAY_MS))
    job.send(old_events(0))
    worker = job.finish()
    assert f"WARNING Topic '{job.output}' (output) keeps records for 1d" in worker.log.replace("  ", " "), worker.log
    assert f"--entity-name {job.output} --add-config retention.ms=-1`" in worker.log
