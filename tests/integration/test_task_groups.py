"""Tasks that share a transaction, on a real broker: killed, changed from one layout to another, frozen through a change."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from functools import partial
from typing import Any

import pytest

from dedup.crashpoints import Point
from tests.brokers import RELEASE
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.test_admin import dedup, pages
from tests.integration.test_crash_points import AT_START, dies_and_comes_back, passing
from tests.integration.test_topics_change import members
from tests.integration.transactions import open_transactions
from tests.integration.watch import Watch
from tests.integration.workload import Event, workload

pytestmark = pytest.mark.broker

EVENTS = 1_000
PARTITIONS = 4
QUICK: dict[str, Any] = {"commit_interval": "20ms"}


def grouped(size: int | str, *, hops: str | None = None) -> dict[str, Any]:
    """Return what differs in a topology whose groups have this size; ``hops`` names the source of one that repartitions."""
    made: dict[str, Any] = {"transactions": {"partitions": size}}
    return made if hops is None else made | {"source": {"topics": [hops]}}


def regrouped(job: Job, size: int) -> None:
    """The job's topology file says another size from now on."""
    document = json.loads(job.topology_file.read_text(encoding="utf-8"))
    document["transactions"] = {"partitions": size}
    job.topology_file.write_text(json.dumps(document), encoding="utf-8")


def events_of(seed: int, count: int = EVENTS, *, scattered: bool = False) -> list[Event]:
    return workload(seed, count, partitions=PARTITIONS, scattered=scattered)


@pytest.mark.parametrize(
    "point", ["after_committed_offset", "after_output", "after_changelog", "before_end", "after_end", "after_apply"]
)
def test_a_worker_with_groups_dies_at_a_point(make_job: MakeJob, point: Point) -> None:
    job = make_job(partitions=PARTITIONS, document=grouped(3), config=QUICK)
    events = events_of(60)
    if point in AT_START:
        job.send(events[:400])
        job.finish()
        events = events[400:]
    dies_and_comes_back(job, events, f"{point}:{passing(point)}")


def test_a_repartitioning_worker_with_groups_dies(make_job: MakeJob) -> None:
    job = make_job(partitions=PARTITIONS, document=grouped(2, hops="grouped-hops"), config=QUICK)
    dies_and_comes_back(job, events_of(61, scattered=True), "after_offsets:9")


def test_groups_share_their_transactions(make_job: MakeJob) -> None:
    """Two groups of two partitions each: no partition has a transactional id of its own."""
    job = make_job(partitions=PARTITIONS, document=grouped(2), config=QUICK)
    job.send(events_of(62))
    worker = job.finish()
    job.judge()
    ids = set(open_transactions(job, None))
    assert ids == {f"{job.name}.dedup.g0", f"{job.name}.dedup.g1", f"{job.name}.layout"} | {
        f"{job.name}.dedup.{number}" for number in range(PARTITIONS)
    }, worker.log


def test_a_transaction_counts_once_however_many_partitions_it_has(make_job: MakeJob) -> None:
    """Two groups of two: each partition counts its transactions, and the worker counts those of both groups."""
    job = make_job(partitions=PARTITIONS, document=grouped(2), config=QUICK | {"web": {"enabled": True, "port": 0}})
    worker = job.start()
    worker.until_logged("running from offset", times=PARTITIONS)
    job.send(events_of(68))
    job.until_done()

    def counted() -> tuple[list[int], int]:
        with urllib.request.urlopen(f"{pages(worker)}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        each = list(map(int, re.findall(r'\ndedup_transactions_total\{.*result="committed".*\} (\d+)', text)))
        (shared,) = map(int, re.findall(r'\ndedup_group_transactions_total\{result="committed"\} (\d+)', text))
        return each, shared

    # The broker has the last transactions a moment before the worker counts them.
    until(lambda: all(counted()[0]), "every partition has counted a transaction")
    each, shared = counted()
    assert len(each) == PARTITIONS
    assert max(each) < shared <= sum(each), "the groups do not share transactions with each other"
    job.judge()


def test_the_layout_changes_and_state_and_offsets_stay(make_job: MakeJob) -> None:
    job = make_job(partitions=PARTITIONS, config=QUICK)
    pieces = [events_of(63)[at : at + 250] for at in range(0, EVENTS, 250)]
    for size, piece in zip((1, 4, 2, 1), pieces, strict=True):
        if size != 1 or job.sent:
            regrouped(job, size)
            before = job.committed()
            job.refused(code=3, says=f"but transactions.partitions is {size}")
            said = dedup(job, "layout", "--apply")
            assert f"transactions.partitions is {size}" in said
            assert job.committed() == before
        job.send(piece)
        job.finish()
    job.judge()


def test_a_change_of_the_layout_with_a_wrong_source_changes_nothing(make_job: MakeJob) -> None:
    """Was: a traceback, and workers took the change for interrupted."""
    job = make_job(partitions=PARTITIONS, document=grouped(2), config=QUICK)
    job.finish()
    right = job.topology_file.read_text(encoding="utf-8")
    wrong = json.loads(right)
    wrong["source"]["topics"] = [f"{job.name}-misnamed"]
    job.topology_file.write_text(json.dumps(wrong | {"transactions": {"partitions": 4}}), encoding="utf-8")
    assert "Nothing was changed; correct `source.topics`" in dedup(job, "layout", "--apply", code=3)
    job.topology_file.write_text(right, encoding="utf-8")
    assert "interrupted" not in dedup(job, "layout")
    job.finish()


@pytest.mark.parametrize("at", ["after_changing:1", "after_fence:3"])
def test_a_change_is_killed_and_run_again(make_job: MakeJob, at: str) -> None:
    job = make_job(partitions=PARTITIONS, document=grouped(2), config=QUICK)
    events = events_of(64)
    job.send(events[:500])
    job.finish()
    regrouped(job, 4)
    dedup(job, "layout", "--apply", code=137, DEDUP_CRASH_AT=at)
    job.send(events[500:])
    job.refused(code=3, says="run it again to finish the change")
    assert "a change to 4 was interrupted" in dedup(job, "layout")
    dedup(job, "layout", "--apply")
    job.finish()
    job.judge()


def test_doctor_and_status_name_the_number_that_gives_every_worker_a_group(make_job: MakeJob) -> None:
    job = make_job(partitions=PARTITIONS, document=grouped(4), config=QUICK)
    job.send(events_of(60)[:100])
    job.start("a")
    until(lambda: members(job) == 1, job.logs)
    said = dedup(job, "doctor")
    assert "1 of 2" not in said
    version = 2 if RELEASE >= (4, 0) else 1
    assert f"version: ok (transactions of version {version})" in said
    job.start("b")
    until(lambda: "1 of 2 workers have no partition" in dedup(job, "status"), job.logs)
    said = dedup(job, "doctor")
    assert "because transactions.partitions is 4\n    -> Set it to 2 or less" in said
    assert "topics: warning" in said


def test_doctor_and_status_say_what_every_worker_refuses(make_job: MakeJob) -> None:
    """Was: doctor said only that `apply` or `run` creates the missing topics, and exited with 0."""
    job = make_job(partitions=PARTITIONS, document=grouped(1), config=QUICK)
    job.send(events_of(60)[:100])
    job.finish()
    assert "topics: ok" not in dedup(job, "doctor"), "the layout topic is missing"
    regrouped(job, 4)
    job.refused(code=3, says="but transactions.partitions is 4")
    assert "but transactions.partitions is 4\n    -> Set it to 1" in dedup(job, "doctor", code=3)

    dedup(job, "layout", "--apply", code=137, DEDUP_CRASH_AT="after_changing:1")
    job.refused(code=3, says="or a change was interrupted")
    assert "or a change was interrupted\n    -> Wait for `dedup layout --apply`" in dedup(job, "doctor", code=3)
    dedup(job, "layout", "--apply")
    dedup(job, "doctor")

    reset = ("--yes", "--to", "earliest")
    dedup(job, "reset", *reset, code=137, DEDUP_CRASH_AT="after_changing:1")
    job.refused(code=3, says="a `dedup reset` was interrupted")
    again = "un the same `dedup reset` again to finish it"
    assert f"-> R{again}" in dedup(job, "doctor", code=3)
    said = dedup(job, "status")
    assert f"r{again}" in said
    assert "no worker is running; remove the cause above, and then start one" in said
    dedup(job, "reset", *reset)
    job.finish()

    changelog, (source,) = job.topology.changelog_topic, job.topology.source.topics
    job.admin.delete_topic(changelog)
    job.refused(code=3, says="it was deleted")
    said = dedup(job, "doctor", code=3)
    assert "it was deleted\n    -> Bring it back, or start over with `dedup reset`" in said
    assert "creates it" not in said
    said = dedup(job, "status")
    assert f"deleted topics: {changelog}. The group has committed offsets" in said
    assert "creates them" not in said
    job.admin.delete_topic(source)
    assert f"missing source topics: {source}; create them, or correct `source.topics`" in dedup(job, "status")


def test_a_change_is_refused_while_workers_run(make_job: MakeJob) -> None:
    job = make_job(partitions=PARTITIONS, document=grouped(2), config=QUICK)
    job.send(events_of(65))
    job.start()
    job.until_progress(100)
    regrouped(job, 4)
    assert "stop these workers" in dedup(job, "layout", "--apply", code=1)
    job.workers[0].signal(signal.SIGTERM)
    assert job.workers[0].wait() == 0
    regrouped(job, 2)
    job.finish()
    job.judge()


@pytest.mark.parametrize("hops", [None, "thawed-hops"])
def test_a_worker_that_was_frozen_through_a_change_commits_nothing(make_job: MakeJob, hops: str | None) -> None:
    """It stops right before it would end a transaction, and goes on when the new fleet has done its work."""
    job = make_job(partitions=PARTITIONS, document=grouped(1, hops=hops), config=QUICK)
    events = events_of(66, scattered=hops is not None)
    job.send(events[:500])
    with Watch(job):
        zombie = job.start("zombie", "freeze_in_commit=3")
        until(lambda: zombie.frozen, lambda: f"it is frozen: {zombie.log}")
        until(lambda: members(job) == 0, "the group has given it up")
        job.send(events[500:])
        regrouped(job, 2)
        dedup(job, "layout", "--apply")
        job.finish("b")
        zombie.signal(signal.SIGCONT)
        assert zombie.wait() == 3, zombie.log
        assert "commit 2 partitions in a transaction, but transactions.partitions is 1" in zombie.log
    job.finish("c")
    job.judge()


def test_a_worker_without_a_group_says_what_to_set(make_job: MakeJob) -> None:
    job = make_job(partitions=PARTITIONS, document=grouped(4), config=QUICK)
    job.send(events_of(68))
    job.start("a")
    job.until_progress(100)
    job.start("b").until_logged("there is no task group for this worker, because each one has 4 partitions")
    job.until_done()
    job.judge()


def test_workers_of_two_layouts_can_not_be_in_one_group(make_job: MakeJob) -> None:
    job = make_job(partitions=PARTITIONS, document=grouped(2), config=QUICK)
    job.send(events_of(67))
    job.start("a")
    job.until_progress(100)
    regrouped(job, 4)
    other = job.start("b")
    assert other.wait() == 3, other.log
    assert "but transactions.partitions is 4" in other.log
    job.until_done()
    job.judge()


@pytest.mark.long
@pytest.mark.timeout(2_400)
def test_kills_and_zombies_while_the_layout_changes(make_job: MakeJob) -> None:
    """1,000,000 events; the layout changes 1 -> 4 -> 2 -> 4; 20 SIGKILLs, and a zombie at the end of each of five fleets."""
    sizes = (1, 4, 2, 4, 2)
    count, kills = int(os.environ.get("DEDUP_TEST_EVENTS", "1000000")), 0
    job = make_job(partitions=PARTITIONS, document=grouped(sizes[0]))
    events = workload(69, count, partitions=PARTITIONS)
    share = -(-count // len(sizes))
    zombies: list[Worker] = []
    with Watch(job):
        for number, size in enumerate(sizes):
            regrouped(job, size)
            if number:
                dedup(job, "layout", "--apply")
            with job.stream(events[number * share : (number + 1) * share], per_s=8_000) as feeder:
                fleet = [job.start(f"a-{number}"), job.start(f"b-{number}")]
                for zombie in zombies:
                    zombie.signal(signal.SIGCONT)
                    assert zombie.wait() == 3, zombie.log
                    assert "partitions in a transaction, but transactions.partitions is" in zombie.log
                zombies.clear()
                for turn in range(4):
                    job.until_progress(share // 20)
                    fleet[turn % 2].kill()
                    kills += 1
                    fleet[turn % 2] = job.start(f"{'ab'[turn % 2]}-{number}")
                feeder.join()
                job.until_done(within_s=300)
                zombies.append(job.start(f"zombie-{number}", "freeze_in_commit=2"))
                for worker in fleet:
                    assert worker.stop() == 0, worker.log
            while not zombies[0].frozen:
                job.send(workload(1_000 + number, 200, partitions=PARTITIONS))
                until(partial(_frozen_or_done, job, zombies[0]), "it froze or committed")
            until(lambda: members(job) == 0, "the group has given it up")
        for zombie in zombies:
            zombie.kill()
        job.finish("last")
    assert kills == 20
    report = job.judge()
    print(report.closing_line())  # noqa: T201  # shown with -s


def _frozen_or_done(job: Job, worker: Worker) -> bool:
    return worker.frozen or job.all_committed()


@pytest.mark.parametrize("hops", [None, "together-hops"])
@pytest.mark.parametrize("size", [3, "auto"])
def test_a_new_fleet_starts_all_at_once(make_job: MakeJob, hops: str | None, size: int | str) -> None:
    """Was: workers ended, since others wrote the layout again, or were about to write the first one."""
    workers = 4
    hops = None if hops is None else f"{hops}-{size}"
    job = make_job(partitions=24, document=grouped(size, hops=hops), config=QUICK)
    fleet = [job.start(f"w{number}") for number in range(workers)]
    job.send(workload(68, EVENTS, partitions=24, scattered=hops is not None))
    job.until_done()
    assert [worker.stop() for worker in fleet] == [0] * workers, job.logs()
    states = [json.loads(record.value() or b"{}")["changing_to"] for record in job.read(job.topology.layout_topic)]
    assert states[-1] is None
    assert states.count(None) == 1, states
    job.judge()
