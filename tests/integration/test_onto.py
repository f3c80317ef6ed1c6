"""A new group on an output that holds records: refused, unless it is meant, and never a fleet that is in its right."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from typing import Any

import pytest

from dedup.topology.parse import parse
from dedup.verify.cut import WHY_RESET
from dedup.verify.verifier import verify
from dedup.worker.topics import refuse_used_output
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker
from tests.integration.watch import Watch
from tests.integration.workload import BASE_MS, Event, endless, id_of

pytestmark = pytest.mark.broker
INCOMPATIBLE = 3
SENTENCE = "has judged nothing yet, but its output"
ONTO = ("--onto-existing-output",)


def rename(job: Job, name: str) -> None:
    """The topology file says another name; all else stays."""
    document = json.loads(job.topology_file.read_text(encoding="utf-8")) | {"name": name}
    text = json.dumps(document)
    job.topology_file.write_text(text, encoding="utf-8")
    job.topology = parse(text, name=str(job.topology_file))


def topics(job: Job) -> set[str]:
    return set(job.admin.client.list_topics(timeout=30).topics)


def distinct(begin: int, end: int) -> list[Event]:
    return [
        Event(number % 2, b'{"id":"x-%d","n":%d}' % (number, number), BASE_MS + number) for number in range(begin, end)
    ]


def forwarded(job: Job) -> Counter[int]:
    """Return how many IDs are in the output how often."""
    return Counter(Counter(id_of(message.value()) for message in job.read(job.output)).values())


def refused(job: Job, worker_id: str) -> None:
    """A worker ends with exit code 3 and the sentence; nothing was written or made."""
    before = topics(job)
    worker = job.refused(worker_id, code=INCOMPATIBLE, says=SENTENCE)
    assert "Nothing was changed" in worker.log
    assert ONTO[0] in worker.log
    assert "Traceback" not in worker.log
    assert topics(job) == before


@pytest.mark.parametrize("source", [None, {"topics": ["renamed-in"]}], ids=["direct", "repartitioned"])
def test_f82_a_renamed_topology_is_refused_unless_it_is_meant(make_job: MakeJob, source: Any) -> None:
    job = make_job(document={} if source is None else {"source": source, "idle_after": "1s"})
    job.send(distinct(0, 300))
    job.finish()
    rename(job, f"{job.name}-new")
    refused(job, "b")
    refused(job, "a")
    # It is meant: the source is judged anew, and what the old name has written is told apart.
    worker = job.finish("c", options=ONTO)
    assert "the group" in worker.log
    assert forwarded(job) == {2: 300}
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert WHY_RESET in report.not_provable
    assert sum(books.unique for books in report.books) == 300
    job.finish("d")
    assert forwarded(job) == {2: 300}


def test_f82_a_second_topology_on_the_output_of_one_that_runs(make_job: MakeJob) -> None:
    job = make_job()
    with Watch(job):
        with job.stream(endless(182), per_s=500):
            first = job.start("a")
            job.until_progress(500)
            second = make_second(make_job, job)
            refused(second, "s")
            job.until_progress(500)
            assert first.running
        job.until_done()
        assert first.stop() == 0, first.log
    job.judge()


def make_second(make_job: MakeJob, job: Job) -> Job:
    """Return a job of another name, with a source of its own, that writes to the same output."""
    second = make_job(document={"output": {"topic": f"{job.name}-elsewhere"}})
    second.send(distinct(0, 100))
    document = json.loads(second.topology_file.read_text(encoding="utf-8")) | {"output": {"topic": job.output}}
    second.topology_file.write_text(json.dumps(document), encoding="utf-8")
    return second


@pytest.mark.parametrize("point", ["after_output:1", "before_end:1"])
def test_a_worker_that_died_before_its_first_commit_starts_again_on_an_empty_disk(job: Job, point: str) -> None:
    """The first finds an open transaction in the output, the second an aborted one."""
    job.send(distinct(0, 200))
    for crash_at in (point, "after_restore:1"):
        dying = job.start("a", crash_at=crash_at)
        assert dying.wait() == 137, dying.log
        shutil.rmtree(job.state_dir("a"))
    job.finish()
    job.judge()


def test_workers_that_start_at_the_same_moment_and_later_with_empty_disks(make_job: MakeJob) -> None:
    job = make_job(partitions=4)
    with Watch(job):
        with job.stream(endless(183, partitions=4), per_s=800):
            fleet: list[Worker] = []
            for moment in range(2):
                fleet += [job.start(f"{moment}-{number}") for number in range(2)]
                for worker in fleet[-2:]:
                    worker.until_logged("running from offset")
                job.until_progress(300)
        job.until_done()
        assert [worker.stop() for worker in fleet] == [0] * len(fleet), job.logs()
    job.judge()


def test_what_is_meant_is_said_once(make_job: MakeJob) -> None:
    """A worker that dies before its first commit leaves a mark: the next one need not say it again."""
    job = make_job()
    job.send(distinct(0, 100))
    job.finish()
    rename(job, f"{job.name}-new")
    dying = job.start("b", crash_at="before_end:1", options=ONTO)
    assert dying.wait() == 137, dying.log
    job.finish("c")
    assert forwarded(job) == {2: 100}


def test_others_that_write_on_after_it_was_meant_are_found(make_job: MakeJob) -> None:
    """A mark says what was there; it is no leave for whatever comes."""
    job = make_job()
    job.send(distinct(0, 100))
    job.finish()
    old = job.topology_file.read_text(encoding="utf-8")
    rename(job, f"{job.name}-new")
    dying = job.start("b", crash_at="after_init:1", options=ONTO)
    assert dying.wait() == 137, dying.log
    new = job.topology_file.read_text(encoding="utf-8")
    job.topology_file.write_text(old, encoding="utf-8")
    job.send(distinct(100, 200))
    job.finish()
    job.topology_file.write_text(new, encoding="utf-8")
    refused(job, "c")


def test_what_the_changelog_says_is_enough(job: Job) -> None:
    """As after a seed: no offsets, no mark and an empty disk, but state that knows what was forwarded."""
    job.send(distinct(0, 100))
    job.finish()
    shutil.rmtree(job.state_dir("a"))
    for future in job.admin.client.delete_consumer_groups([job.name]).values():
        future.result(timeout=30)
    job.finish("b")
    assert forwarded(job) == {1: 100}


def test_a_topology_without_an_output_is_not_asked_about_one() -> None:
    text = "dedup: 1\nname: t\nsource: {topics: [in]}\ntracking_id: {field: id}\nguard_period: 1h\n"
    nobody: Any = None
    asyncio.run(refuse_used_output(parse(text, name="t.yaml"), nobody, nobody, meant=False))
