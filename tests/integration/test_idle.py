"""Idle markers: a source partition that brings nothing must not hold stream time back for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from dedup.store.changelog import TASK_RECORD_KEY, decode_task_record
from dedup.verify.verifier import verify
from dedup.worker.record_collector import IDLE
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.broker
SECONDS = 1_000


def two_sources(make_job: MakeJob, name: str, **document: object) -> Job:
    source = {"topics": [f"{name}-a", f"{name}-b"]}
    return make_job(document={"source": source, "guard_period": "10s", "grace": "5s", "idle_after": "1s", **document})


def events(begin: int, end: int, *, topic: int = 0, partitions: tuple[int, ...] = (0, 1)) -> list[Event]:
    """Return an event a second on the partitions of one source topic."""
    return [
        Event(
            number % 2 if len(partitions) == 2 else partitions[0],
            b'{"id":"i-%d","n":%d}' % (number, number),
            BASE_MS + number * SECONDS,
            topic=topic,
        )
        for number in range(begin, end)
    ]


def stream_times(job: Job) -> dict[int, int]:
    """Return the stream time that each dedup task has committed, in ms."""
    found: dict[int, int] = {}
    for message in job.read(job.topology.changelog_topic):
        if message.key() == TASK_RECORD_KEY:
            found[message.partition() or 0] = decode_task_record(message.value() or b"").stream_time_ms
    return found


def markers(job: Job) -> Counter[tuple[int, str]]:
    """Return how many markers there are, by repartition partition and feed."""
    found: Counter[tuple[int, str]] = Counter()
    for message in job.read(job.topology.repartition_topic):
        for name, value in message.headers() or []:
            if name == IDLE:
                found[message.partition() or 0, value.decode()] += 1
    return found


def said(job: Job) -> dict[str, tuple[int, int]]:
    """Return by feed how often a partition has its marker, and how often the feed's task was opened.

    A task that is opened anew, after a rebalance on a busy machine, says it once more.
    """
    opened = "".join(worker.log for worker in job.workers)
    found: dict[str, tuple[int, int]] = {}
    for (_, feed), times in markers(job).items():
        found[feed] = (max(times, found.get(feed, (0, 0))[0]), opened.count(f"repartition {feed}: running from"))
    return found


def test_a_silent_source_lets_stream_time_go_on(make_job: MakeJob) -> None:
    """Topic b never has a record, and one partition of a has none either."""
    job = two_sources(make_job, "silent")
    job.send(events(0, 100, partitions=(0,)))
    worker = job.start()
    until(lambda: len(markers(job)) == 8, f"every feed is marked in both partitions; {job.logs()}")
    last_ms = BASE_MS + 99 * SECONDS

    def told() -> bool:
        # With every feed idle stream time is the greatest of all.
        times = stream_times(job)
        return len(times) == 2 and set(times.values()) <= set(range(last_ms - 20 * SECONDS, last_ms + 1))

    until(told, f"stream time is {last_ms}, not {stream_times(job)}; {job.logs()}")
    # A record that is older than the grace is late now: stream time really counts.
    job.send([Event(1, b'{"id":"old","n":1}', BASE_MS, topic=1)])
    until(lambda: len(job.read(job.topology.late.topic)) == 1, f"the old record is late; {job.logs()}")  # type: ignore[union-attr]
    # That feed is awake again, and idle again later; the others say nothing twice.
    until(lambda: markers(job)[0, "silent-b/1"] >= 2, f"a feed is marked again after its next record; {job.logs()}")
    assert {feed for feed, (marked, opened) in said(job).items() if marked > opened} <= {"silent-b/1"}
    assert worker.stop() == 0
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples


def test_without_markers_a_silent_source_holds_stream_time_back(make_job: MakeJob) -> None:
    """The other half of the test above: it is the markers that make the difference."""
    job = two_sources(make_job, "held", idle_after="1h")
    job.send(events(0, 100, partitions=(0,)))
    job.finish()
    assert markers(job) == Counter()
    assert all(time_ms < 0 for time_ms in stream_times(job).values())


def test_a_new_owner_marks_a_feed_again_and_changes_nothing_by_it(make_job: MakeJob) -> None:
    job = two_sources(make_job, "again")
    job.send(events(0, 40))
    for times in (1, 2):
        before = markers(job)
        worker = job.start()
        until(
            lambda before=before: len(found := markers(job)) == 8 and all(found[at] > before[at] for at in found),
            lambda times=times: f"{times} markers; {job.logs()}",
        )
        job.until_done()
        worker.kill() if times == 1 else worker.stop()
    assert all(marked <= opened for marked, opened in said(job).values()), said(job)
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert report.counts["lost"] == report.counts["duplicated"] == 0
