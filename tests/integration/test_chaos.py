"""Workers killed, frozen, replaced and joined by others under load, while a committed reader looks on.

Small enough for every run. A long one: ``DEDUP_EVENTS=1000000 DEDUP_PER_S=6000 DEDUP_KILLS=20 DEDUP_FREEZES=5`` in the
environment, with ``-k f01 -s``.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from functools import partial

import pytest

from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.watch import Watch
from tests.integration.workload import Expected, endless, workload

pytestmark = pytest.mark.broker

EVENTS = int(os.environ.get("DEDUP_EVENTS", "60000"))
KILLS = int(os.environ.get("DEDUP_KILLS", "20"))
FREEZES = int(os.environ.get("DEDUP_FREEZES", "0"))
ZOMBIES = int(os.environ.get("DEDUP_ZOMBIES", "1"))
PER_S = int(os.environ.get("DEDUP_PER_S", "3000"))
LONG_S = 120 + 3 * EVENTS / PER_S
FENCED = "Another owner has the partition"


@pytest.mark.timeout(LONG_S)
def test_f01_random_kills(make_job: MakeJob) -> None:
    """Two workers, each killed at random moments and started again with the state it left."""
    job = make_job(partitions=4)
    dice = random.Random(1)
    blows = ["kill"] * KILLS + ["freeze"] * FREEZES
    dice.shuffle(blows)
    moments = sorted(dice.randrange(EVENTS) for _ in blows)
    with Watch(job) as watch, job.stream(workload(11, EVENTS, partitions=4), per_s=PER_S):
        workers = {name: job.start(name) for name in "ab"}
        for moment, blow in zip(moments, blows, strict=True):
            # By what was sent, not by what was committed: it may hit a worker that has not come back yet.
            job.until_sent(moment, within_s=LONG_S)
            name, other = dice.sample("ab", 2)
            if blow == "freeze":
                freeze_until_replaced(job, workers[name], workers[other])
            else:
                workers[name].kill()
                workers[name] = job.start(name)
        job.until_sent(EVENTS, within_s=LONG_S)
        job.until_done(within_s=LONG_S)
        assert [worker.stop() for worker in workers.values()] == [0, 0], job.logs()
    report = job.judge()
    assert watch.records == len(Expected.of(job.sent).ids)
    fenced = sum(worker.log.count(FENCED) for worker in job.workers)
    figures = f"{report.read} events, {KILLS} kills, {FREEZES} freezes, {fenced} tasks fenced: {report.closing_line()}"
    print(figures)  # noqa: T201  # of a long run, with -s


def frozen_or_done(job: Job, worker: Worker) -> bool:
    return worker.frozen or job.all_committed()


def freeze_until_replaced(job: Job, worker: Worker, other: Worker) -> None:
    """A worker is a zombie until the other one has all its partitions, and then comes back into the group."""
    worker.until_logged("running from offset")
    before, own = (each.log.count("running from offset") for each in (other, worker))
    worker.signal(signal.SIGSTOP)
    until(lambda: other.log.count("running from offset") >= before + job.partitions, f"replaced; {job.logs()}")
    worker.signal(signal.SIGCONT)
    until(lambda: worker.log.count("running from offset") > own, f"back in the group; {job.logs()}")


@pytest.mark.timeout(60 + ZOMBIES * 60)
def test_f05_zombies(job: Job) -> None:
    """A worker frozen in a commit, beyond its session, finds itself fenced; nothing of it becomes visible."""
    with Watch(job):
        for number in range(ZOMBIES):
            events = workload(12 + number, 40_000)
            zombie = job.start(f"zombie-{number}", "freeze_in_commit=4")
            zombie.until_logged("running from offset", times=job.partitions)
            while not zombie.frozen:
                job.send(events[:100])
                del events[:100]
                until(partial(frozen_or_done, job, zombie), "it froze or committed")
            with job.stream(events, per_s=600):
                heir = job.start(f"heir-{number}")
                heir.until_logged("running from offset", times=job.partitions)
                job.until_progress(200)
                zombie.signal(signal.SIGCONT)
                zombie.until_logged(FENCED)
                job.until_progress(200)
            job.until_done()
            assert zombie.stop() == 0, zombie.log
            assert heir.stop() == 0, heir.log
    job.judge()


def test_f06_a_short_freeze_moves_nothing(make_job: MakeJob) -> None:
    """Shorter than the session: the other worker takes nothing over."""
    # However long a busy machine stretches the freeze, it must not come near the session's length.
    job = make_job(config={"session_timeout": "60s"})
    with Watch(job):
        one = job.start("a")
        one.until_logged("running from offset", times=job.partitions)
        other = job.start("b")
        other.until_logged("running from offset")
        before = [worker.log.count("running from offset") for worker in (one, other)]
        events = workload(13, 20_000)
        with job.stream(events, per_s=2_000):
            one.signal(signal.SIGSTOP)
            job.until_sent(3_000, within_s=30)  # a good second
            one.signal(signal.SIGCONT)
            job.until_progress(500)
        job.until_done()
        assert [worker.log.count("running from offset") for worker in (one, other)] == before
        assert [one.stop(), other.stop()] == [0, 0]
    job.judge()


@pytest.mark.parametrize("damage", ["wiped", "stale", "swapped"])
def test_f03_state_directory(job: Job, damage: str) -> None:
    """After a SIGKILL the state directory is gone, is an old copy, or another partition's."""
    events = workload(14, 3_000)
    job.send(events[:1_000])
    job.finish()
    state = job.state_dir("a")
    old = job.directory / "old"
    shutil.copytree(state, old)
    with Watch(job):
        worker = job.start()
        with job.stream(events[1_000:], per_s=1_000):
            job.until_progress(200)
            worker.kill()
        match damage:
            case "wiped":
                shutil.rmtree(state)
            case "stale":
                shutil.rmtree(state)
                shutil.copytree(old, state)
            case _:
                shutil.rmtree(state / job.name / "1")
                shutil.copytree(state / job.name / "0", state / job.name / "1")
        after = job.start()
        after.until_logged("running from offset", times=job.partitions)
        job.send(workload(18, 200))
        job.until_done()
        assert after.stop() == 0, after.log
        assert ("will be deleted and restored" in after.log) == (damage == "swapped"), after.log
    job.judge()


def test_f11_churn(make_job: MakeJob) -> None:
    """A second worker joins and leaves again and again; the work goes on all the while."""
    job = make_job(partitions=4)
    with Watch(job):
        stays = job.start("stays")
        with job.stream(endless(15, partitions=4), per_s=1_000):
            job.until_progress(100)
            for number in range(3):
                guest = job.start(f"guest-{number % 2}")
                guest.until_logged("running from offset")
                job.until_progress(100)
                assert guest.stop() == 0, guest.log
                job.until_progress(100)
        job.until_done()
        assert stays.stop() == 0, stays.log
    job.judge()


def drained(job: Job, worker: Worker) -> None:
    assert worker.wait() == 0, worker.log
    # No transaction is left open: a committed reader gets to the end of everything at once.
    for topic in (job.output, job.topology.changelog_topic):
        job.read(topic)


def test_f04_sigterm_twice_under_load_drains(job: Job) -> None:
    worker = job.start("a", "slow_commit=100")
    with job.stream(endless(16), per_s=1_000):
        job.until_progress(100)
        worker.signal(signal.SIGTERM)
        worker.signal(signal.SIGTERM)
        drained(job, worker)
    job.finish()
    job.judge()


def test_f04_sigterm_in_restore(job: Job) -> None:
    job.send(workload(17, 1_000))
    job.finish()
    shutil.rmtree(job.state_dir("a"))
    worker = job.start("a", "slow_restore=300000")
    worker.until_logged("restoring slowly")
    worker.signal(signal.SIGTERM)
    drained(job, worker)
    job.finish()
    job.judge()
