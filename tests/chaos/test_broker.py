"""One broker that dies, freezes or is hard to reach, and what it does with requests that come late."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from dedup.crashpoints import OF_ANNOUNCING, POINTS, Point
from dedup.errors import BrokerUnavailable
from dedup.kafka.outage_lines import FAILURES
from tests.chaos.conftest import Rough
from tests.fault_proxy import Direction
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, Worker, until
from tests.integration.transactions import assert_none_open, open_transactions
from tests.integration.watch import Watch
from tests.integration.workload import Event, endless, workload

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]

PIECE = 60
NEVER_MS = 3_600_000
ENDED_AT_ONCE = 143
SOON = "answers_within=4000"
"""A worker that gives a request up sooner: what it does then is the same, and F22 shows it with the usual deadline."""
WAITS = "retried until a commit succeeds"
AWAY = "a broker does not answer, dedup tries again"
OVER = ("the broker answers again", "commits succeed again")
IN_A_TRANSACTION = (
    "after_begin",
    "after_output",
    pytest.param("after_group", marks=pytest.mark.long),
    pytest.param("after_changelog", marks=pytest.mark.long),
    "before_end",
    "after_end",
)
REFUSED_AS_FENCED = ("answered 47", "answered 90")


@pytest.mark.parametrize("point", IN_A_TRANSACTION)
def test_f21_broker_killed_in_a_phase_of_a_transaction(make_job: MakeJob, rough: Rough, point: Point) -> None:
    """The worker stands still at the point while its broker dies and comes back, and then goes on."""
    job = make_job(config={"commit_interval": "20ms", "session_timeout": "45s"})
    events = workload(100 + POINTS.index(point), 1_200)
    with Watch(job):
        versions = ("announced=1",) if point in OF_ANNOUNCING else ()
        worker = job.start("a", *versions, f"freeze_at_point={100 * POINTS.index(point) + 4}")
        worker.until_logged("running from offset", times=job.partitions)
        send_until_frozen(job, worker, events)
        rough.kafka.kill()
        rough.kafka.restart()
        worker.signal(signal.SIGCONT)
        job.send(events)
        job.until_done()
        assert worker.stop() == 0, worker.log
    job.judge()
    assert_none_open(job)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_broker_dies_after_a_workers_checks(make_job: MakeJob, rough: Rough, *, comes_back: bool) -> None:
    """The member of the group has a connection of its own, which waits for a broker as the first one does."""
    job = make_job()
    job.send(workload(7, 400))
    worker = job.start("a", "freeze_at_consumer=1", f"patience={60_000 if comes_back else 1_000}")
    until(lambda: worker.frozen, "it froze")
    rough.kafka.kill()
    worker.signal(signal.SIGCONT)
    if comes_back:
        worker.until_logged("Unable connect")
        rough.kafka.restart()
        job.until_done()
        assert worker.stop() == 0, worker.log
        job.judge()
        return
    code = worker.wait()
    rough.kafka.restart()
    assert code == BrokerUnavailable.exit_code, worker.log
    assert "no broker answers at" in " ".join(worker.log.split())
    assert "Traceback" not in worker.log


def test_a_worker_that_waits_for_a_broker_ends_at_once(job: Job, rough: Rough) -> None:
    """Was: SIGTERM had no effect until the member of the group was connected, or the wait for a broker was over."""
    worker = job.start("a", "freeze_at_consumer=1", f"patience={NEVER_MS}")
    until(lambda: worker.frozen, "it froze")
    rough.kafka.kill()
    worker.signal(signal.SIGCONT)
    worker.until_logged("Unable connect")
    assert worker.stop() == ENDED_AT_ONCE, worker.log
    assert "Traceback" not in worker.log
    rough.kafka.restart()


def send_until_frozen(job: Job, worker: Worker, events: list[Event]) -> None:
    """Piece by piece, so that each is a transaction of its own; what was not sent yet is left in ``events``."""
    while not worker.frozen:
        job.send(events[:PIECE])
        del events[:PIECE]
        assert events, "it passed the point too seldom"
        until(partial(frozen_or_done, job, worker), "it froze or committed")


def frozen_or_done(job: Job, worker: Worker) -> bool:
    return worker.frozen or job.all_committed()


def frozen_in_a_transaction(job: Job, *accidents: str) -> Worker:
    """Return a worker that has committed a few times and stands still with records sent and not committed."""
    worker = job.start("a", *accidents, f"freeze_at_point={100 * POINTS.index('after_output') + 6}")
    until(lambda: worker.frozen, "it froze")
    return worker


def test_f22_frozen_broker(job: Job, rough: Rough) -> None:
    """It answers nothing for as long as the worker's own deadline of a request, and then goes on."""
    with Watch(job):
        with job.stream(endless(120), per_s=1_000):
            worker = frozen_in_a_transaction(job)
            rough.kafka.process.pause()
            try:
                worker.signal(signal.SIGCONT)
                worker.until_logged("got no answer")
            finally:
                rough.kafka.process.resume()
            job.until_progress(1_000)
        job.until_done()
        assert worker.stop() == 0, worker.log
    job.judge()
    assert_none_open(job)


@pytest.fixture
def proxied_job(make_job: MakeJob, rough: Rough) -> Job:
    """Return a job whose workers reach the broker through the proxy; producers and judges do not."""
    rough.proxy.heal()
    return make_job(config={"brokers": [rough.through_proxy]})


@pytest.mark.parametrize("fault", ["cut", "to the broker", "to the client", "slow", "answers lost", "refused"])
def test_f24_network(proxied_job: Job, rough: Rough, fault: str) -> None:
    job, proxy = proxied_job, rough.proxy
    with Watch(job):
        with job.stream(endless(121), per_s=1_000):
            half_open = fault.startswith("to the ")
            worker = frozen_in_a_transaction(job, SOON) if half_open else job.start("a", SOON)
            if not half_open:
                job.until_progress(300)
            before = proxy.counts()
            match fault:
                case "cut":
                    for _ in range(5):
                        # Progress is seen as soon as a commit is there; the worker may still be on its way back.
                        until(lambda: proxy.cut() > 0, "a connection to cut")
                        job.until_progress(100)
                case "to the broker" | "to the client":
                    # Half-open: everything stands, nothing comes through in one direction.
                    proxy.silence(Direction(fault.replace("the ", "")))
                    worker.signal(signal.SIGCONT)
                    worker.until_logged("got no answer")
                    proxy.heal()
                case "slow":
                    proxy.delay(100)
                    job.until_progress(300)
                    proxy.heal()
                case "answers lost":
                    for number in range(1, 4):
                        until(lambda: proxy.swallow_answers() > 0, "a connection whose answer can be lost")
                        until(lambda n=number: proxy.counts().bytes_swallowed > before.bytes_swallowed + n, "swallowed")
                        job.until_progress(100)
                case _:
                    proxy.refuse()
                    proxy.cut()
                    until(lambda: proxy.counts().refused >= before.refused + 5, "it tries again")
                    proxy.heal()
            job.until_progress(500)
        job.until_done()
        assert worker.stop() == 0, worker.log
    job.judge()
    assert_none_open(job)


def test_f25_an_end_that_arrives_in_the_next_transaction(job: Job) -> None:
    """It must not commit the half of it that was sent by then: a new epoch had begun before."""
    with Watch(job):
        with job.stream(endless(122), per_s=1_000):
            worker = job.start("a", "end_arrives_late=6")
            worker.until_logged("the late EndTxn was answered")
            job.until_progress(500)
        job.until_done()
        assert any(answer in worker.log for answer in REFUSED_AS_FENCED), worker.log
        assert worker.stop() == 0, worker.log
    job.judge()
    assert_none_open(job)


def test_f15_a_successor_ends_the_transaction_of_the_dead(make_job: MakeJob) -> None:
    """It may stay open for ten minutes by itself: that readers go on sooner is the successor's doing."""
    job = make_job(config={"transaction_timeout": "10m", "commit_interval": "20ms"})
    events = workload(123, 1_200)
    with Watch(job):
        dying = job.start(crash_at="before_end:4")
        while dying.running:
            job.send(events[:PIECE])
            del events[:PIECE]
            until(lambda: not dying.running or job.all_committed(), "it died or committed")
        assert dying.wait() == 137
        assert open_transactions(job) != []
        heir = job.start("heir")
        until(lambda: open_transactions(job) == [], "readers go on")
        job.send(events)
        job.until_done()
        assert heir.stop() == 0, heir.log
    job.judge()


def test_f08_a_crash_loop_at_the_start_backs_off(job: Job) -> None:
    """A supervisor waits longer each time, and however often they die, each id has at most one transaction open."""
    job.send(workload(124, 400))
    with Watch(job):
        supervisor = job.start("loop", crash_at="after_output:1", supervised=2)
        try:
            for wait in ("0.5 s", "1.0 s", "2.0 s"):
                supervisor.until_logged(f"it restarts in {wait}", times=2)
            assert supervisor.log.count("it restarts in 0.5 s") == 2
            assert supervisor.log.count("it restarts in 1.0 s") == 2
            found = open_transactions(job)
            assert len(found) == len(set(found)) <= job.partitions, found
        finally:
            supervisor.signal(signal.SIGTERM)
            supervisor.wait()
        job.finish()
    job.judge()
    assert_none_open(job)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_broker_that_is_away_is_one_line_when_it_goes_and_one_when_it_is_back(
    make_job: MakeJob, rough: Rough, how: str
) -> None:
    """Was: 31 lines in 75 s, and for a frozen broker a line for each partition."""
    job = make_job()
    with job.stream(endless(130), per_s=500):
        # Nothing waits for the broker unless records are in flight when it goes away.
        worker = frozen_in_a_transaction(job, SOON)
        before = len(worker.log.splitlines())
        rough.kafka.kill() if how == "killed" else rough.kafka.process.pause()
        try:
            worker.signal(signal.SIGCONT)
            worker.until_logged("a broker does not answer")
            until(lambda: _waits(worker), lambda: f"partitions wait:\n{worker.log}")
        finally:
            rough.kafka.restart() if how == "killed" else rough.kafka.process.resume()
        until(lambda: any(text in worker.log for text in OVER), lambda: f"it is back:\n{worker.log}")
    job.until_done()
    assert worker.stop() == 0, worker.log
    lines = worker.log.splitlines()[before:]
    assert not [line for line in lines if any(text in line for text in FAILURES) and AWAY not in line], worker.log
    assert sum(AWAY in line for line in lines) == 1, worker.log
    # The partitions go one by one if the restarted broker has no replica in sync for some of them yet.
    for what in ((WAITS,), OVER):
        told = [_partitions(line) for line in lines if any(text in line for text in what)]
        named = [partition for partitions in told for partition in partitions]
        assert len(named) == len(set(named)), f"each partition is told of once: {worker.log}"
        assert told, worker.log
        assert how == "killed" or len(told) == 1, worker.log
    job.judge()


def _partitions(line: str) -> list[str]:
    """Return what a log line names before its first colon."""
    return line.split(" ", 2)[2].partition(": ")[0].split(", ")


def _waits(worker: Worker) -> int:
    return sum(WAITS in line for line in worker.log.splitlines())
