"""A rebalance leaves alone what stays: tasks of other partitions go on while workers join, leave, and die."""

from __future__ import annotations

import re
import signal
from collections import Counter

import pytest

from tests.brokers import members_of
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.test_topics_change import members
from tests.integration.watch import Watch
from tests.integration.workload import workload

pytestmark = pytest.mark.broker

PARTITIONS = 4
_STARTED = re.compile(r"dedup \S+/(\d+): running from offset")


def starts(worker: Worker) -> Counter[int]:
    """Return how often a worker has started the task of each partition."""
    return Counter(int(partition) for partition in _STARTED.findall(worker.log))


def owned(job: Job) -> dict[str, set[int]]:
    """Return the source partitions that the group has given to each worker."""
    source = job.topology.source.topics[0]
    return {
        member.worker_id: {place.partition for place in member.partitions if place.topic == source}
        for member in members_of(job.kafka.bootstrap, job.name)
    }


def spread(job: Job, workers: int) -> bool:
    """Return whether so many workers have partitions."""
    return sum(1 for partitions in owned(job).values() if partitions) == workers


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_tasks_that_stay_are_never_started_again(make_job: MakeJob, how: signal.Signals) -> None:
    job = make_job(partitions=PARTITIONS, config={"commit_interval": "20ms"})
    events = workload(70, 60_000, partitions=PARTITIONS)
    with Watch(job), job.stream(events, per_s=2_000):
        stays = job.start("stays")
        job.until_progress(500)
        assert starts(stays) == Counter(range(PARTITIONS))
        kept: set[int] = set(range(PARTITIONS))
        # The group waits for the session of one that was killed, so that happens only once.
        for number in range(2 if how is signal.SIGTERM else 1):
            other = job.start(f"other-{number}")
            until(lambda: spread(job, 2), lambda: f"both have partitions: {owned(job)}\n{job.logs()}")
            kept &= owned(job)["stays"]
            job.until_progress(1_000)
            other.signal(how)
            other.wait()
            until(lambda: members(job) == 1 and spread(job, 1), lambda: f"one is left: {owned(job)}\n{job.logs()}")
            job.until_progress(1_000)
    with Watch(job):
        job.until_done()
        stays.signal(signal.SIGTERM)
        assert stays.wait() == 0, stays.log
    assert kept, "it has kept no partition all the time"
    found = starts(stays)
    assert {partition: found[partition] for partition in kept} == dict.fromkeys(kept, 1), stays.log
    job.judge()


def test_repartition_tasks_that_stay_are_never_started_again(make_job: MakeJob) -> None:
    job = make_job(partitions=PARTITIONS, document={"source": {"topics": ["rebalanced-hops"]}})
    events = workload(71, 60_000, partitions=PARTITIONS, scattered=True)
    with Watch(job), job.stream(events, per_s=2_000):
        stays = job.start("stays")
        job.until_progress(500)
        other = job.start("other")
        until(lambda: spread(job, 2), lambda: f"both have partitions: {owned(job)}\n{job.logs()}")
        kept = owned(job)["stays"]
        job.until_progress(1_000)
        other.signal(signal.SIGTERM)
        assert other.wait() == 0, other.log
    with Watch(job):
        job.until_done()
        stays.signal(signal.SIGTERM)
        assert stays.wait() == 0, stays.log
    repartitioned = Counter(re.findall(r"repartition \S+/(\d+): running from offset", stays.log))
    assert kept
    assert {number: repartitioned[str(number)] for number in kept} == dict.fromkeys(kept, 1), stays.log
    job.judge()


def test_a_worker_whose_id_another_process_takes_ends(make_job: MakeJob) -> None:
    """Was: both joined again and again, each in the place of the other, and neither kept its tasks."""
    job = make_job(config={"commit_interval": "20ms"})
    with Watch(job), job.stream(workload(71, 60_000), per_s=1_000):
        first = job.start("first")
        job.until_progress(500)
        second = job.start("second", settings=["worker_id=first"])
        assert first.wait() == 5, job.logs()
        assert "another process has joined the group" in first.log
        job.until_progress(1_000)
        assert second.stop() == 0, second.log
    job.finish("second")
    job.judge()
