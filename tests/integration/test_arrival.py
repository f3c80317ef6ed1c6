"""`event_time: arrival`: the time of a record is when the source's broker appended it, and no other time is taken."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME

from dedup.verify.verifier import verify
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.test_admin import dedup, distinct, output_ids
from tests.integration.test_topics_change import INCOMPATIBLE, refusing
from tests.integration.workload import Event

pytestmark = pytest.mark.broker
APPENDED = {"message.timestamp.type": "LogAppendTime"}


@pytest.fixture(params=["direct", "repartitioned"])
def job(request: pytest.FixtureRequest, make_job: MakeJob, topic_names: Callable[[str], str]) -> Job:
    document: dict[str, Any] = {"event_time": "arrival", "guard_period": "1h"}
    if request.param == "repartitioned":
        document["source"] = {"topics": [topic_names("arrival")]}
    return make_job(partitions=1, document=document, source_config=APPENDED)


def events(begin: int, end: int, *, later_ms: int = 0) -> list[Event]:
    return [replace(event, partition=0, timestamp_ms=event.timestamp_ms + later_ms) for event in distinct(begin, end)]


def test_the_time_is_the_brokers_and_not_the_producers(job: Job) -> None:
    """The events' own times are in 2023, and days apart."""
    began_ms = time.time_ns() // 1_000_000
    job.send(events(0, 50))
    job.send(events(0, 50, later_ms=10**9))
    job.finish("a")
    assert output_ids(job) == Counter(f"x-{number}" for number in range(50))
    assert all(message.timestamp()[1] >= began_ms - 60_000 for message in job.read(job.output))
    assert job.read(job.topology.dead_letter) == []
    report = verify(job.topology, job.settings)
    assert report.passed, (report.closing_line(), report.samples)
    assert (report.read, sum(report.not_provable.values())) == (100, 0)


def test_a_topic_that_gets_the_producers_times_stops_the_task(job: Job) -> None:
    topic = job.topology.source.topics[0]
    job.send(events(0, 50))
    worker = job.start("a")
    job.until_done()
    job.admin.configure(topic, message_timestamp_type="CreateTime")
    first = 50 + job.send_until_stamped(TIMESTAMP_CREATE_TIME, events(50, 90))
    refusing(worker, f"{topic}/0 offset {first} has the time that its producer wrote (CreateTime)")
    assert output_ids(job) == Counter(f"x-{number}" for number in range(first))
    assert job.committed(topic) == {0: first}
    # No worker starts while new records would have no append time, and none judges those that have none.
    refusing(job.start("a"), f"Every new record of source topic {topic!r}")
    assert "source_create_time" in dedup(job, "check", "--broker", "--json", code=2)
    assert "CreateTime" in dedup(job, "doctor", code=INCOMPATIBLE)
    job.admin.configure(topic, message_timestamp_type="LogAppendTime")
    refusing(job.start("a"), f"{topic}/0 offset {first} has the time")
    assert job.committed(topic) == {0: first}
    # The remedy of the message.
    begin = first + 1 + job.send_until_stamped(TIMESTAMP_LOG_APPEND_TIME, events(first + 1, 95))
    changed_ms = job.read(topic)[-1].timestamp()[1]
    job.send(events(begin + 1, 100))
    dedup(job, "reset", "--to", str(changed_ms), "--yes")
    worker = job.start("b")
    until(lambda: job.committed(topic) == {0: 100}, lambda: f"judged; {job.logs()}")
    job.until_done()
    assert worker.stop() == 0, worker.log
    assert output_ids(job) == Counter(f"x-{number}" for number in (*range(first), *range(begin, 100)))
    report = verify(job.topology, job.settings)
    assert report.passed, (report.closing_line(), report.samples)
    (found,) = json.loads(dedup(job, "explain", "x-97", "--json"))["records"]
    assert found["verdict"] == "unique"


def test_what_was_appended_before_the_change_is_judged_and_committed_first(job: Job) -> None:
    """One fetch has records of both kinds."""
    topic = job.topology.source.topics[0]
    job.send(events(0, 50))
    job.admin.configure(topic, message_timestamp_type="CreateTime")
    first = 50 + job.send_until_stamped(TIMESTAMP_CREATE_TIME, events(50, 90))
    job.admin.configure(topic, message_timestamp_type="LogAppendTime")
    job.send_until_stamped(TIMESTAMP_LOG_APPEND_TIME, events(first + 1, 100))
    refusing(job.start("a"), f"{topic}/0 offset {first} has the time that its producer wrote (CreateTime)")
    assert job.committed(topic) == {0: first}
    if job.topology.direct:
        assert output_ids(job) == Counter(f"x-{number}" for number in range(first))
    assert job.read(job.topology.dead_letter) == []
