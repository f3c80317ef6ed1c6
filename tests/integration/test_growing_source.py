"""Partitions that are added to the source of a topology that repartitions, while its workers run."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from typing import Any

import pytest

from dedup.verify.verifier import verify
from tests.brokers import read_all
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.test_admin import dedup, distinct, output_ids
from tests.integration.test_topics_change import members
from tests.integration.watch import Watch
from tests.integration.workload import Event, workload

pytestmark = pytest.mark.broker


def hopping(make_job: MakeJob, name: str, partitions: int, **more: Any) -> Job:
    """Return a job that repartitions."""
    source = {"topics": [name], **more.pop("source", {})}
    return make_job(partitions=partitions, document={"source": source, **more}, config={"commit_interval": "20ms"})


def events_of(seed: int, count: int, partitions: int, after: int = 0) -> list[Event]:
    """Return ``count`` events of a workload, without the first ``after``, whose IDs may be in any partition."""
    return workload(seed, after + count, partitions=partitions, scattered=True)[after:]


@pytest.mark.parametrize("size", [1, 2])
def test_a_source_grows_under_load(make_job: MakeJob, size: int) -> None:
    """6 partitions become 13; a worker is killed and comes back, so that it begins with all of them."""
    job = hopping(make_job, f"grow-by-{size}", 6, transactions={"partitions": size})
    with Watch(job):
        one, two = job.start("a"), job.start("b")
        with job.stream(events_of(70, 6_000, 6), per_s=1_500):
            job.until_progress(500)
            job.grow(13)
        with job.stream(events_of(71, 60_000, 13, after=6_000), per_s=1_500):
            until(lambda: begun(job) == set(range(13)), lambda: f"all of them are read: {job.logs()}")
            two.signal(signal.SIGKILL)
            assert two.wait() == 137
            back = job.start("b")
            job.until_progress(1_000)
        job.until_done()
        assert [one.stop(), back.stop()] == [0, 0], job.logs()
    assert not any("Traceback" in each.log for each in job.workers), job.logs()
    job.judge()
    assert {message.partition() for message in read_all(job.kafka.bootstrap, f"grow-by-{size}")} == set(range(13))


def test_stream_time_does_not_wait_for_a_new_partition_and_then_counts_it(make_job: MakeJob) -> None:
    """What waited longer in the new partition than the grace period is late; the verifier agrees on every verdict."""
    late = "grow-late-late"
    job = hopping(make_job, "grow-late", 1, guard_period="5s", grace="2s", late=late)
    job.send(events_of(72, 2_000, 1))
    worker = job.start()
    job.until_done()
    job.grow(3)
    # Partition 1 is as far as the first one; partition 2 is ten seconds behind and then catches up.
    behind = [
        Event(1 + number % 2, each.value, each.timestamp_ms)
        for number, each in enumerate(events_of(73, 800, 1, after=1_000))
    ]
    job.send(behind)
    job.send(events_of(74, 2_000, 3, after=2_000))
    job.until_done()
    assert worker.stop() == 0, worker.log
    job.finish("elsewhere")  # restores what the later partitions have added to stream time
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert sum(books.late for books in report.books) > 100
    assert report.not_provable == {}


def test_a_new_partition_begins_at_its_first_record_even_with_start_latest(make_job: MakeJob) -> None:
    job = hopping(make_job, "grow-latest", 1, source={"start": "latest"})
    job.send(distinct(0, 10)[::2])
    worker = job.start()
    worker.until_logged("running from offset", times=2)
    worker.signal(signal.SIGSTOP)
    job.grow(2)
    job.send([Event(1, each.value, each.timestamp_ms) for each in distinct(100, 300)])
    worker.signal(signal.SIGCONT)
    job.until_done()
    assert worker.stop() == 0, worker.log
    assert output_ids(job) == Counter(f"x-{number}" for number in range(100, 300))


def test_a_worker_frozen_through_the_growth_goes_on(make_job: MakeJob) -> None:
    job = hopping(make_job, "grow-frozen", 2)
    job.send(events_of(75, 1_000, 2))
    with Watch(job):
        zombie = job.start("zombie", "freeze_in_commit=3")
        until(lambda: zombie.frozen, lambda: f"it is frozen: {zombie.log}")
        until(lambda: members(job) == 0, "the group has given it up")
        job.grow(5)
        heir = job.start("heir")
        job.send(events_of(76, 2_000, 5, after=1_000))
        job.until_done()
        zombie.signal(signal.SIGCONT)
        zombie.until_logged("Another owner has the partition")
        job.send(events_of(77, 1_000, 5, after=3_000))
        job.until_done()
        assert [zombie.stop(), heir.stop()] == [0, 0], job.logs()
    job.judge()


def test_a_reset_begins_with_all_partitions(make_job: MakeJob) -> None:
    job = hopping(make_job, "grow-reset", 2)
    job.send(distinct(0, 100))
    worker = job.start()
    job.until_done()
    job.grow(4)
    job.send([Event(3, each.value, each.timestamp_ms) for each in distinct(100, 200)])
    job.until_done()
    assert worker.stop() == 0, worker.log
    assert counts(job) == {"grow-reset": 2, f"{job.name}.repartition": 2}
    dedup(job, "reset", "--to", "earliest", "--yes")
    assert counts(job) == {"grow-reset": 4, f"{job.name}.repartition": 4}
    job.finish("b")
    assert output_ids(job) == Counter({f"x-{number}": 2 for number in range(200)})
    assert verify(job.topology, job.settings).passed


def begun(job: Job) -> set[int]:
    """Return the source partitions of which a task has started."""
    (topic,) = job.topology.source.topics
    logs = "".join(each.log for each in job.workers)
    return {int(number) for number in re.findall(rf"{topic}/(\d+): running from offset", logs)}


def counts(job: Job) -> dict[str, int]:
    """Return the partition counts in the layout."""
    found: dict[str, int] = json.loads(job.read(job.topology.layout_topic)[-1].value() or b"{}")["counts"]
    return found
