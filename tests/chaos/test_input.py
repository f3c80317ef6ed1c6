"""F46: records of many megabytes, thousands of headers, and a little that unpacks to much."""

from __future__ import annotations

import base64
import os
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from tests.integration.conftest import MakeJob
from tests.integration.fleet import KEPT
from tests.integration.watch import Watch
from tests.integration.workload import BASE_MS, Event

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]

MEGABYTE = 1_000_000
HEADERS = 10_000


def huge(number: int, tracking_id: str, pad: bytes = b"") -> Event:
    value = b'{"id":"%s","n":%d,"pad":"%s"}' % (tracking_id.encode(), number, pad)
    return Event(number % 2, value, BASE_MS + number)


def noise(megabytes: int) -> bytes:
    """Return text that no compression makes much smaller."""
    return base64.b64encode(os.urandom(megabytes * MEGABYTE * 3 // 4))


def test_f46_huge_records(make_job: MakeJob) -> None:
    """Each is forwarded and its copy a duplicate; what the output topic does not take is a dead letter."""
    job = make_job(
        source_config={"max.message.bytes": str(20 * MEGABYTE)},
        output_config={"max.message.bytes": str(21 * MEGABYTE // 2)},
    )
    job.admin.create_topic(job.topology.dead_letter, job.partitions, KEPT | {"max.message.bytes": str(24 * MEGABYTE)})
    plain = [
        huge(0, "small"),
        huge(1, "ten megabytes", noise(10)),
        replace(huge(2, "headers"), headers=tuple((f"h{number}", b"%d" % number) for number in range(HEADERS))),
        huge(3, "x" * MEGABYTE),
        huge(4, "small, too"),
    ]
    bomb = huge(5, "bomb", b" " * (30 * MEGABYTE))
    options = {"bootstrap.servers": job.kafka.bootstrap, "message.max.bytes": 100 * MEGABYTE, "log_level": 0}
    job.producer = Producer(options)
    with Watch(job):
        job.send([*plain, huge(7, "too large", noise(15)), huge(8, "behind it")])
        job.producer = Producer(options | {"compression.type": "gzip"})
        job.send([bomb, *(replace(huge(10 + at, ""), value=copied(each, 10 + at)) for at, each in enumerate(plain))])
        job.finish()
    report = job.judge(refused_ids=frozenset({"too large"}))
    assert sum(books.duplicates for books in report.books) == len(plain)
    (dead,) = job.read(job.topology.dead_letter)
    assert dict(dead.headers() or [])["dedup-reason"] == b"refused_by_broker"


def copied(event: Event, number: int) -> bytes:
    """Return an event's value with another number: the same ID once more."""
    assert event.value is not None
    return event.value.replace(b'"n":%d,' % (event.timestamp_ms - BASE_MS), b'"n":%d,' % number)
