"""F75: records of the source are deleted while a worker runs: before it has read them, or after it has judged them."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec

from dedup.verify.verifier import verify
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.watch import Watch
from tests.integration.workload import BASE_MS, Event, id_of

pytestmark = pytest.mark.broker

INCOMPATIBLE = 3
HOUR_MS = 3_600_000
HOPS = ("direct", "repartitioned")


def lagging_job(make_job: MakeJob, hops: str) -> Job:
    """Return a job whose worker can be frozen without losing its place in the group."""
    document = {} if hops == "direct" else {"source": {"topics": [f"kept-{time.monotonic_ns()}-in"]}}
    # Old and new records are never in one segment: a segment goes as a whole.
    return make_job(document=document, config={"session_timeout": "60s"}, source_config={"segment.ms": str(HOUR_MS)})


def events(prefix: str, number: int, begin_ms: int) -> list[Event]:
    """Return records of so many IDs, each twice, in both partitions."""
    value = b'{"id":"%s-%d","n":%d}'
    return [
        Event(at % 2, value % (prefix.encode(), at, 2 * at + again), begin_ms + at)
        for at in range(number)
        for again in (0, 1)
    ]


def freeze(job: Job, worker: Worker) -> None:
    """The worker stands still, and no fetch of its own waits at the broker for what will be sent next."""
    worker.signal(signal.SIGSTOP)
    until(lambda: worker.frozen, "it froze")
    job.send(events("probe", 2, BASE_MS + 1_000_000))


def begins(job: Job) -> dict[int, int]:
    """Return where the source begins now."""
    topic = job.topology.source.topics[0]
    places = {TopicPartition(topic, partition): OffsetSpec.earliest() for partition in range(job.partitions)}  # type: ignore[no-untyped-call]
    return {place.partition: found.result().offset for place, found in job.admin.client.list_offsets(places).items()}


def shorten(job: Job) -> None:
    """The source keeps its records for an hour."""
    job.admin.configure(job.topology.source.topics[0], retention_ms=str(HOUR_MS))


def forwarded(job: Job) -> Counter[str]:
    """Return how often each ID is in the output."""
    return Counter(id_of(message.value()) or "" for message in job.read(job.output))


def stops_at_the_gap(job: Job, worker: Worker, here: dict[int, int]) -> None:
    """The worker ends and says why; nothing from behind the gap is judged, and no offset is beyond it."""
    assert worker.wait() == INCOMPATIBLE, worker.log
    assert "no longer holds offset" in worker.log, worker.log
    assert "Nothing was skipped" in worker.log
    found = forwarded(job)
    assert {name.partition("-")[0] for name in found} <= {"judged", "probe"}, found
    assert set(found.values()) == {1}
    assert all(offset < here[partition] for partition, offset in job.committed(job.topology.source.topics[0]).items())


@pytest.mark.parametrize("way", ["DeleteRecords", "retention.ms"])
@pytest.mark.parametrize("hops", HOPS)
def test_f75_records_deleted_before_they_were_read(make_job: MakeJob, hops: str, way: str) -> None:
    """The worker ends at once and says so; what lies behind the gap is not judged as if there were none."""
    job = lagging_job(make_job, hops)
    job.send(events("judged", 50, BASE_MS))
    worker = job.start()
    job.until_done()
    freeze(job, worker)
    job.send(events("deleted", 500, BASE_MS + 2_000_000))
    here = job.admin.end_offsets(job.topology.source.topics[0])
    job.send(events("behind", 500, int(time.time() * 1000) - 1_000))
    if way == "DeleteRecords":
        job.admin.delete_below(job.topology.source.topics[0], here)
    else:
        shorten(job)
    until(lambda: begins(job) == here, lambda: f"the source begins at {here}: {begins(job)}")
    worker.signal(signal.SIGCONT)
    stops_at_the_gap(job, worker, here)
    # The next one may first judge a probe that the frozen one had sent on to the repartition topic.
    stops_at_the_gap(job, job.start(), here)


@pytest.mark.parametrize("hops", HOPS)
def test_f75_records_deleted_after_they_were_judged(make_job: MakeJob, hops: str) -> None:
    """The log begins where the worker goes on, with the worker's lag behind it: nothing is lost or doubled."""
    job = lagging_job(make_job, hops)
    with Watch(job) as watch:
        job.send(events("judged", 200, BASE_MS))
        worker = job.start()
        job.until_done()
        here = job.admin.end_offsets(job.topology.source.topics[0])
        worker.signal(signal.SIGSTOP)
        until(lambda: worker.frozen, "it froze")
        begin_ms = int(time.time() * 1000) - 10_000
        job.send(events("lag", 500, begin_ms))
        shorten(job)
        until(lambda: begins(job) == here, lambda: f"the source begins at {here}: {begins(job)}")
        worker.signal(signal.SIGCONT)
        job.send(events("after", 500, begin_ms + 1_000))
        # Again, with what was judged before the deletion and is within the guard period still.
        job.send(events("lag", 500, begin_ms + 2_000))
        job.until_done()
        assert worker.stop() == 0, worker.log
    assert verify(job.topology, job.settings).passed
    found = forwarded(job)
    assert set(found.values()) == {1}
    assert set(found) == {id_of(event.value) for event in job.sent}
    assert watch.records == 1_200
