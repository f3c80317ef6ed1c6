"""A standby follows its partition's changelog, and is promoted with only the tail left to restore."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest

from dedup.verify.verifier import verify
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.broker
IDS = 20_000
RUNNING = re.compile(r"dedup \S+/(\d+): running from offset (\d+), epoch \d+, after (\d+) changelog records")


def distinct(begin: int, end: int) -> list[Event]:
    return [
        Event(number % 2, b'{"id":"b-%d","n":%d}' % (number, number), BASE_MS + number) for number in range(begin, end)
    ]


def status(worker: Worker) -> dict[str, Any]:
    """Return what a worker says of itself; nothing while it does not."""
    found = re.search(r"web: (http://\S+)", worker.log)
    if found is None:
        return {"tasks": [], "standbys": {}}
    with urllib.request.urlopen(f"{found[1]}/api/status", timeout=10) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def standbys(worker: Worker) -> dict[str, int]:
    return status(worker)["standbys"]  # type: ignore[no-any-return]


def tasks(worker: Worker) -> dict[int, str]:
    return {task["partition"]: task["state"] for task in status(worker)["tasks"]}


def two_workers(job: Job) -> tuple[Worker, Worker]:
    """Return two workers that have one partition each and are standby of the other's."""
    both = (job.start("a", settings=["web.port=0"]), job.start("b", settings=["web.port=0"]))
    until(
        lambda: all(list(tasks(worker).values()) == ["running"] and len(standbys(worker)) == 1 for worker in both),
        f"each has a task and a standby: {[status(worker) for worker in both]}; {job.logs()}",
    )
    return both


def test_the_standby_follows_and_is_promoted_with_the_tail_only(make_job: MakeJob) -> None:
    job = make_job(document={"state": {"standby_replicas": 1}}, config={"web": {"enabled": True}})
    a, b = two_workers(job)
    job.send(distinct(0, IDS))
    job.until_done()
    until(lambda: standbys(a) | standbys(b) == {"0": 0, "1": 0}, f"standbys have caught up; {job.logs()}")

    (lost,) = tasks(a)
    (kept,) = tasks(b)
    assert {lost, kept} == {0, 1}
    before = b.log.count("running from offset")
    a.kill()
    job.send(distinct(IDS - 1_000, IDS + 1_000))
    until(lambda: tasks(b) == {0: "running", 1: "running"}, f"the heir runs both; {job.logs()}")
    job.until_done()
    started = [tuple(map(int, found)) for found in RUNNING.findall(b.log)]
    promoted = [restored for partition, _, restored in started[before:] if partition == lost]
    assert promoted, b.log
    # Warm: of 10,000 IDs nothing is read again but what the standby had not fetched when its reading was stopped.
    assert max(promoted) < 500, b.log
    assert b.stop() == 0
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    found = [json.loads(message.value() or b"{}")["id"] for message in job.read(job.output)]
    assert len(found) == len(set(found)) == IDS + 1_000


def test_without_a_standby_all_of_it_is_restored(make_job: MakeJob) -> None:
    """The other half of the test above."""
    job = make_job(document={"state": {"standby_replicas": 0}})
    job.send(distinct(0, IDS))
    job.finish("a")
    worker = job.finish("b")
    # What is more than the IDs are task records: as many as there were commits.
    assert all(int(restored) >= IDS // 2 for _, _, restored in RUNNING.findall(worker.log)), worker.log
