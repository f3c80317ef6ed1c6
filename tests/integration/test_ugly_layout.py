"""F81: what nobody would lay out so, and what is found in the field: all of it at once, under kills."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dedup.kafka.record_batch import TopicPartition
from dedup.verify.verifier import verify
from tests import odd_names
from tests.brokers import Admin
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.watch import Watch
from tests.integration.workload import Event, id_of

pytestmark = pytest.mark.broker

DAY_MS = 86_400_000
DAYS = 30
EVENTS = 12_000
PIECE = 400
KILLS = 8
COMPACTED, PLAIN = 0, 1
PARTITIONS = {COMPACTED: 3, PLAIN: 2}
HEADERS: tuple[tuple[tuple[str, bytes | None], ...], ...] = (
    (),
    (("", b"no name"), ("", None)),
    (("dedup-source", b"not/a/place"), ("Dedup-Source", b"\xff")),
    (("ключ", None), ("x", b"1"), ("x", b"2")),
    (("h" * 300, b"h" * 300), (" ", b" ")),
)
COMPACT = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.001", "segment.ms": str(2 * DAY_MS)}


@dataclass(frozen=True, slots=True)
class UnevenAdmin(Admin):
    """Makes one source topic compacted with three partitions, and the other one plain with two."""

    def create_topic(self, name: str, partitions: int = 1, config: dict[str, str] | None = None) -> str:
        count, extra = partitions, {}
        if name.endswith("-compacted"):
            count, extra = PARTITIONS[COMPACTED], COMPACT
        elif name.endswith("-plain"):
            count = PARTITIONS[PLAIN]
        return Admin.create_topic(self, name, count, (config or {}) | extra)


def ugly(seed: int, begin_ms: int) -> list[Event]:
    """Return records of 30 days up to now: IDs come again in the other topic, too; keys that compact, and none."""
    dice = random.Random(seed)
    made: list[Event] = []
    next_id = 0
    for number in range(EVENTS):
        chosen = dice.randrange(next_id) if next_id and dice.random() < 0.3 else next_id
        next_id += chosen == next_id
        topic = number % 2
        time_ms = begin_ms + number * DAYS * DAY_MS // EVENTS
        key = b"k%d" % dice.randrange(200) if topic == COMPACTED else None
        value = b'{"id":"order-%d","n":%d}' % (chosen, number)
        partition = dice.randrange(PARTITIONS[topic])
        made.append(Event(partition, value, time_ms, key, headers=dice.choice(HEADERS), topic=topic))
    return made


def remaining(job: Job) -> set[str | None]:
    """Return the IDs of the records that the source topics still hold: they were there when they were read."""
    return {id_of(message.value()) for topic in job.topology.source.topics for message in job.read(topic)}


@pytest.mark.timeout(300)
async def test_f81_an_ugly_layout_under_kills(
    make_job: MakeJob, admin: Admin, topic_names: Callable[[str], str]
) -> None:
    name = topic_names("ugly")
    sources = [f"{name}-compacted", f"{name}-plain"]
    job = make_job(
        name=name,
        partitions=max(PARTITIONS.values()),
        admin=UnevenAdmin(admin.bootstrap, admin.client),
        document={"source": {"topics": sources}, "guard_period": f"{DAYS + 1}d"},
    )
    dice = random.Random(81)
    events = ugly(81, int(time.time() * 1000) - DAYS * DAY_MS)
    early = events[: EVENTS // 3]
    # A segment ends between batches only; the last one is not compacted.
    for at in range(0, len(early), PIECE):
        job.send(early[at : at + PIECE])
    # Nothing is judged of it: a header name that no usual client can read.
    odd = (early[-1].timestamp_ms, None, b'{"id":"odd","n":0}', [(odd_names.ODD, b"1")])
    await odd_names.send(job.kafka.bootstrap, TopicPartition(sources[PLAIN], 1), [odd])
    job.sent.append(Event(1, None, early[-1].timestamp_ms, topic=PLAIN))
    until(lambda: len(job.read(sources[COMPACTED])) < len(early) // 2, "compaction has made holes")
    with Watch(job) as watch:
        workers = {each: job.start(each) for each in "ab"}
        with job.stream(events[EVENTS // 3 :], per_s=800):
            for number in range(KILLS):
                # By what was sent, not by what was committed: it may hit a worker that has not come back yet.
                job.until_sent(len(early) + (number + 1) * (len(events) - len(early)) // (KILLS + 1))
                hit = dice.choice(sorted(workers))
                workers[hit].kill()
                workers[hit] = job.start(hit)
                if number == KILLS // 2:
                    workers["late"] = job.start("late")
            job.until_sent(EVENTS + 1)
        job.until_done()
        # 143: on a slow machine, the last killed worker may still be starting.
        assert {worker.stop() for worker in workers.values()} <= {0, 143}, job.logs()
    report = verify(job.topology, job.settings)
    assert report.passed, (report.closing_line(), report.samples[:10])
    found = Counter(id_of(message.value()) for message in job.read(job.output))
    assert {each: times for each, times in found.items() if times > 1} == {}
    assert remaining(job) - {"odd"} <= set(found) <= {id_of(event.value) for event in events}
    assert watch.records == len(found)
    dead = [message.value() for message in job.read(job.topology.dead_letter)]
    assert dead == [b'{"id":"odd","n":0}']
