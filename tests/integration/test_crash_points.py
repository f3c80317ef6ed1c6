"""F02: a worker dies at each named point of a transaction and of a start; the next one makes it exact."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from dedup.crashpoints import OF_ANNOUNCING, OF_LAYOUT, POINTS, Point
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.watch import Watch
from tests.integration.workload import Event, workload

pytestmark = pytest.mark.broker

EVENTS = 1_000
PIECE = 80
AT_START = {"after_init", "after_committed_offset", "in_restore", "after_restore"}


def passing(point: Point) -> int:
    """Return which passing of the point is the last: a start has few, and a later transaction is the better test."""
    return {"after_init": 2, "after_committed_offset": 2, "in_restore": 1, "after_restore": 1}.get(point, 4)


@pytest.mark.parametrize("point", [point for point in POINTS if point not in OF_LAYOUT])
def test_f02_dies_at_a_point(make_job: MakeJob, point: Point) -> None:
    job = make_job(config={"commit_interval": "20ms"})
    events = workload(POINTS.index(point), EVENTS)
    if point in AT_START:
        job.send(events[:400])
        job.finish()
        if point == "in_restore":
            shutil.rmtree(job.state_dir("a"))
        events = events[400:]
    dies_and_comes_back(job, events, f"{point}:{passing(point)}")


def versions(crash_at: str) -> tuple[str, ...]:
    """Return what a worker needs to come to a point that transactions of version 2 do not have."""
    return ("announced=1",) if crash_at.partition(":")[0] in OF_ANNOUNCING else ()


def dies_and_comes_back(job: Job, events: list[Event], crash_at: str) -> None:
    """A worker dies at the point while events come in; the next one has more to do, and all is exact."""
    pieces = [events[at : at + PIECE] for at in range(0, len(events), PIECE)]
    with Watch(job):
        dying = job.start("a", *versions(crash_at), crash_at=crash_at)
        # Piece by piece, so that each is a transaction of its own, however slow the machine is.
        while pieces and dying.running:
            job.send(pieces.pop(0))
            until(lambda: not dying.running or job.all_committed(), "it has died or judged a piece")
        assert dying.wait() == 137, dying.log
        job.send([event for piece in pieces for event in piece])
        job.finish()
    job.judge()


@pytest.mark.parametrize("point", ["after_offsets", "after_end"])
def test_f02_dies_at_a_point_of_a_repartitioned_job(make_job: MakeJob, point: Point) -> None:
    job = make_job(
        config={"commit_interval": "20ms"}, document={"source": {"topics": [f"hops-{point.replace('_', '-')}"]}}
    )
    dies_and_comes_back(job, workload(40 + POINTS.index(point), EVENTS, scattered=True), f"{point}:9")


def test_the_open_transaction_of_a_dead_worker_does_not_delay_the_next_one(make_job: MakeJob) -> None:
    """One source partition has no offset yet, so the next worker looks in the changelogs for lost offsets."""
    job = make_job(document={"source": {"topics": ["left-open"]}})
    events = [replace(event, partition=0) for event in workload(47, 400, scattered=True)]
    job.send(events[:200])
    job.finish()
    # As a worker leaves it that is killed within a commit; the transaction would time out after a minute.
    dead = Producer(
        {
            "bootstrap.servers": job.kafka.bootstrap,
            "transactional.id": job.topology.transactional_id("dedup", 0, size=1),
        }
    )
    dead.init_transactions(30)
    dead.begin_transaction()
    dead.produce(job.topology.changelog_topic, b"value", b"key", partition=0)
    assert dead.flush(30) == 0
    job.send(events[200:])
    job.finish()
    job.judge()
