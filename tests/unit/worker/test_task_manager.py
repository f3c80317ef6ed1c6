"""What a worker does when something it stands on gives way: its store, its membership, a connection, its standbys."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.client import ConnectionGroup
from aiokafka.conn import CloseReason
from aiokafka.errors import GroupAuthorizationFailedError, InvalidSessionTimeoutError
from aiokafka.protocol.group import HeartbeatRequest
from faust.types import TP

from dedup.errors import BrokerUnavailable, CommitUnknown, DedupError, InvariantBroken, TaskCorrupted, TaskMigrated
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.consumer import FeedEnd
from dedup.kafka.record_batch import TopicPartition
from dedup.kafka.wire import LogBounds, NoAnswer, Position, ProducerIdentity
from dedup.metrics import TaskNumbers
from dedup.settings import Security
from dedup.worker import task_manager as tasks
from dedup.worker.faust_app import Consumer, Producer, SightingsStore, TableManager, TransactionManager
from dedup.worker.introspection import Introspection
from dedup.worker.offsets import first_offset
from dedup.worker.task import Committing, Task, TaskId, TaskState
from dedup.worker.task_manager import TaskManager

FEED = TopicPartition("in", 0)
OTHER = TopicPartition("in", 1)
LIFE = 3
"""Of every reading in these tests."""


class FakeTask:
    """A task whose work fails when it is told to, and the group of which it is the only one."""

    def __init__(self, feeding: TopicPartition) -> None:
        self.task_id = TaskId("dedup", feeding)
        self.feeding = feeding
        self.tasks = {feeding: self}
        self.state = TaskState.CREATED
        self.dirty = asyncio.Event()
        self.committing = False
        self.damage: TaskCorrupted | None = None
        self.epoch = 1
        self.numbers = TaskNumbers()
        self.position = Position(7)
        self.fails_in: dict[str, BaseException] = {}
        self.drained: bool | None = None

    def _go(self, what: str) -> None:
        if what in self.fails_in:
            found = self.fails_in[what]
            self.damage = found if isinstance(found, TaskCorrupted) else None
            raise found

    @property
    def closed(self) -> bool:
        return self.state is TaskState.CLOSED

    @contextmanager
    def noting_damage(self) -> Iterator[None]:
        yield

    async def open(self) -> None:
        self._go("open")

    async def start(self) -> int:
        if "start" in self.fails_in:
            raise self.fails_in.pop("start")
        self.state = TaskState.RUNNING
        return 7

    async def process(self, _batch: object) -> float:
        self._go("process")
        return 2.0

    async def commit(self) -> None:
        self.dirty.clear()
        self._go("commit")

    async def close(self, *, drain: bool) -> None:
        self.state, self.drained = TaskState.CLOSED, drain


class Shop:
    """Tasks with what they were told to do, and what they have asked for."""

    def __init__(self, damage: Callable[[FakeTask], None] = lambda _: None) -> None:
        self.made: list[FakeTask] = []
        self.wiped: list[TopicPartition] = []
        self.ready: list[tuple[TopicPartition, int]] = []
        self.rejoined = asyncio.Event()
        self._damage = damage
        self.tasks = TaskManager(self, lambda: self, commit_interval_ms=0)  # type: ignore[arg-type]  # fake groups
        self.counted_in = True
        self.answers = True
        self.rebalancing = False
        self.halted: list[TopicPartition] = []

    def begin(self, feeding: TopicPartition, position: Position) -> int:
        self.ready.append((feeding, position.offset))
        return LIFE

    def halt(self, feeding: TopicPartition) -> None:
        self.halted.append(feeding)

    def rejoin(self) -> None:
        self.rejoined.set()

    async def is_member(self) -> bool:
        return self.counted_in

    def grouped(self, feeding: Iterable[TopicPartition]) -> list[tuple[TopicPartition, ...]]:
        return [(each,) for each in sorted(feeding)]

    def wipe(self, feeding: TopicPartition) -> None:
        self.wiped.append(feeding)

    def build(self, members: tuple[TopicPartition, ...]) -> Any:
        task = FakeTask(*members)
        if not self.answers:
            task.fails_in["open"] = CommitUnknown("no answer")
        self._damage(task)
        self.made.append(task)
        return task

    async def assigned(self, *feeding: TopicPartition) -> None:
        """A rebalance is over, and every task runs that can."""
        self.rejoined.clear()
        await self.tasks.assign(feeding)
        for _ in range(20):
            await asyncio.sleep(0)


DAMAGE = TaskCorrupted("a block has a wrong checksum")
BATCH: Any = SimpleNamespace(feeding=FEED, life=LIFE)


async def reached(condition: Callable[[], bool]) -> None:
    """The condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it does not come to that")


async def damaged_by(shop: Shop, how: str) -> None:
    task = shop.made[-1]
    task.fails_in[how] = DAMAGE
    if how == "process":
        await shop.tasks.process(BATCH)
    elif how == "commit":
        task.dirty.set()
        await asyncio.wait_for(
            asyncio.wait(
                [asyncio.ensure_future(shop.rejoined.wait()), shop.tasks.failure], return_when=asyncio.FIRST_COMPLETED
            ),
            10,
        )


async def test_after_a_long_batch_the_agent_rests_so_that_commits_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Was: a commit got one turn of the event loop between two batches that each blocked the loop for seconds."""
    shop = Shop()
    await shop.assigned(FEED)
    rests: list[float] = []

    async def sleep(delay_s: float) -> None:
        rests.append(delay_s)

    async def batches() -> AsyncIterator[Any]:
        yield BATCH
        yield SimpleNamespace(feeding=OTHER, life=LIFE)  # is not assigned, so nothing is judged

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        await shop.tasks.process_all(batches())
    assert rests == [pytest.approx(0.2), 0]
    await shop.tasks.close_all(drain=False)


@pytest.mark.parametrize("how", ["process", "commit"])
async def test_state_damage_found_while_running_is_restored_once(how: str) -> None:
    shop = Shop()
    await shop.assigned(FEED)
    await damaged_by(shop, how)
    assert shop.made[0].drained is False, "what was judged on damaged state must not be committed"
    assert (shop.wiped, shop.tasks.corrupted) == ([FEED], 1)
    assert shop.rejoined.is_set()
    assert not shop.tasks.failure.done()
    # The new assignment builds a new task; the same partition damaged again is not this disk's to keep.
    await shop.assigned(FEED)
    assert len(shop.made) == 2
    await damaged_by(shop, how)
    assert shop.tasks.failure.result() is DAMAGE
    assert shop.wiped == [FEED]
    await shop.tasks.close_all(drain=False)


@pytest.mark.parametrize("how", ["process", "commit", "start"])
async def test_a_worker_that_cannot_delete_damaged_state_stops(how: str) -> None:
    """Was: the partition stood still without a log line, because nobody looked at the error of the deletion."""
    full = OSError("the disk cannot be written")

    def not_wiped(_feeding: TopicPartition) -> None:
        raise full

    def damaged(task: FakeTask) -> None:
        if how == "start":
            task.fails_in["start"] = DAMAGE

    shop = Shop(damaged)
    shop.wipe = not_wiped  # type: ignore[method-assign]
    await shop.assigned(FEED)
    with contextlib.suppress(OSError):
        await damaged_by(shop, how)
    assert (await asyncio.wait_for(shop.tasks.failure, 10)) is full
    await shop.tasks.close_all(drain=False)


async def test_damage_of_another_partition_counts_apart() -> None:
    shop = Shop()
    for feeding in (FEED, OTHER):
        await shop.assigned(feeding)
        shop.made[-1].fails_in["process"] = DAMAGE
        await shop.tasks.process(SimpleNamespace(feeding=feeding, life=LIFE))  # type: ignore[arg-type]
    assert shop.wiped == [FEED, OTHER]
    assert not shop.tasks.failure.done()
    await shop.tasks.close_all(drain=False)


async def test_damage_found_at_the_start_is_restored_in_place() -> None:
    damaged: list[FakeTask] = []

    def first_is_damaged(task: FakeTask) -> None:
        if not damaged:
            damaged.append(task)
            task.fails_in["start"] = DAMAGE

    shop = Shop(first_is_damaged)
    await shop.assigned(FEED)
    assert (shop.wiped, shop.ready, shop.tasks.corrupted) == ([FEED], [(FEED, 7)], 1)
    assert not shop.rejoined.is_set()
    await shop.tasks.close_all(drain=False)


async def test_a_new_assignment_keeps_its_store_when_old_damage_is_dealt_with() -> None:
    """Was: the directory was wiped after the wait for the damaged task's end, whoever had it open by then."""
    shop = Shop()
    await shop.assigned(FEED)
    damaged = shop.made[0]
    damaged.fails_in["process"] = DAMAGE
    closing, go_on = asyncio.Event(), asyncio.Event()

    async def slow_close(*, drain: bool) -> None:
        damaged.state = TaskState.CLOSED
        closing.set()
        await go_on.wait()

    damaged.close = slow_close  # type: ignore[method-assign]
    processing = asyncio.create_task(shop.tasks.process(BATCH))
    await closing.wait()

    async def away_and_back() -> None:
        await shop.assigned()
        await shop.assigned(FEED)

    rebalanced = asyncio.create_task(away_and_back())
    await reached(lambda: FEED not in shop.tasks.running)
    go_on.set()
    await asyncio.gather(processing, rebalanced)
    assert len(shop.made) == 2
    assert shop.wiped == []
    assert not shop.rejoined.is_set()
    await shop.tasks.close_all(drain=False)


async def test_a_task_without_an_answer_is_built_anew_and_the_others_go_on(monkeypatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    shop = Shop()
    await shop.assigned(FEED, OTHER)
    silent, other = shop.made
    silent.fails_in["commit"] = CommitUnknown("no answer")
    silent.dirty.set()
    await reached(lambda: len(shop.ready) == 3)
    assert shop.halted == [FEED]
    assert silent.state is TaskState.CLOSED
    assert other.state is TaskState.RUNNING
    assert shop.tasks.running[FEED] is shop.made[2]
    assert not shop.rejoined.is_set()
    assert shop.tasks.fenced == 0
    await shop.tasks.close_all(drain=False)


async def test_tasks_that_wait_for_an_answer_go_on_as_soon_as_one_of_them_does(monkeypatch) -> None:
    """Was: a task waited for up to ten seconds after the broker was back."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(tasks, "LONGEST_PAUSE_S", 3600.0)
    shop = Shop()
    await shop.assigned(FEED, OTHER)
    for task in shop.made:
        task.fails_in["commit"] = CommitUnknown("no answer")
    patient, other = shop.made
    patient.dirty.set()
    await reached(lambda: shop.halted == [FEED])
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    other.dirty.set()
    await reached(lambda: len(shop.made) == 3)
    assert shop.tasks.running[FEED] is patient
    shop.made[2].dirty.set()
    await reached(lambda: shop.tasks.running[FEED] is not patient)
    await shop.tasks.close_all(drain=False)


async def test_it_is_told_since_when_no_broker_answers(monkeypatch) -> None:
    """Was: tasks are not running yet, without a reason."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    shop = Shop()
    await shop.assigned(FEED, OTHER)
    ready = Introspection(SimpleNamespace(tasks=shop.tasks, schemas=None), SimpleNamespace()).not_ready
    assert ready() is None
    shop.answers = False
    shop.made[0].fails_in["commit"] = CommitUnknown("no answer")
    shop.made[0].dirty.set()
    await reached(lambda: len(shop.made) > 3)
    assert re.fullmatch(r"1 of 2 tasks are not running yet: no broker has given a usable answer for \d+ s", ready())
    # A restore after the outage is no outage.
    shop.answers = True
    await reached(lambda: len(shop.ready) == 3)
    shop.made[-1].state = TaskState.RESTORING
    assert ready() == "1 of 2 tasks are not running yet"
    await shop.tasks.close_all(drain=False)


async def test_while_commits_fail_it_is_still_told_since_when_and_how_old_the_last_record_is(monkeypatch) -> None:
    """Was: the times began anew with each attempt, so neither an alert nor the dashboard said that commits fail."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)

    def commits_fail(task: FakeTask) -> None:
        task.fails_in["commit"] = CommitUnknown("NOT_ENOUGH_REPLICAS")
        task.dirty.set()

    shop = Shop(commits_fail)
    await shop.assigned(FEED)
    numbers = shop.made[0].numbers
    numbers.last_commit_s, numbers.committed_offset, numbers.committed_time_ms = -100.0, 7, 5
    await reached(lambda: len(shop.made) > 3)
    numbers = shop.tasks.running[FEED].numbers
    assert numbers is not shop.made[0].numbers
    assert (numbers.last_commit_s, numbers.committed_offset, numbers.committed_time_ms) == (-100.0, 7, 5)
    member = SimpleNamespace(fetcher=SimpleNamespace(end=lambda _: FeedEnd(12, 11, 0.0)))
    app = SimpleNamespace(tasks=shop.tasks, member=member)
    (pulse,) = Introspection(app, SimpleNamespace()).pulse()
    assert (pulse.lag_records, pulse.unstable_records) == (5, 1), "the lag is known while the task is not running"
    await shop.tasks.close_all(drain=False)


@pytest.mark.parametrize(("replaces", "counts_from"), [(False, 20.0), (True, -100.0)])
async def test_a_long_restore_is_no_time_without_a_commit(monkeypatch, replaces: bool, counts_from: float) -> None:
    async def nothing(*_: object, **__: object) -> None: ...

    async def restore(_committed: int | None, *, own: bool) -> int:
        return 7

    monkeypatch.setattr("dedup.worker.task.committed_position", nothing)
    work: Any = SimpleNamespace(restore=restore)
    group: Any = SimpleNamespace(opened=1)
    task = Task(TaskId("dedup", FEED), Committing("t", nothing), group, SimpleNamespace(), lambda _: work)  # type: ignore[arg-type]
    if replaces:
        task.numbers.continue_from(TaskNumbers(last_commit_s=-100.0, committed_offset=7))
    with monkeypatch.context() as patch:
        patch.setattr("dedup.worker.task.time", SimpleNamespace(monotonic=lambda: 20.0))
        await task.start()
    assert (task.numbers.last_commit_s, task.numbers.committed_offset) == (counts_from, 7)


async def test_a_worker_that_the_group_does_not_count_in_joins_again_instead_of_fencing_the_new_owner(
    monkeypatch,
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    shop = Shop()
    await shop.assigned(FEED)
    shop.counted_in = False
    shop.made[0].fails_in["commit"] = CommitUnknown("no answer")
    shop.made[0].dirty.set()
    await asyncio.wait_for(shop.rejoined.wait(), 10)
    assert len(shop.made) == 1
    await shop.tasks.close_all(drain=False)


async def test_a_rebalance_leaves_alone_what_stays() -> None:
    shop = Shop()
    await shop.assigned(FEED, OTHER)
    stays, leaves = shop.made
    await shop.assigned(FEED)
    assert (stays.state, stays.drained) == (TaskState.RUNNING, None)
    assert (leaves.state, leaves.drained) == (TaskState.CLOSED, False)
    assert list(shop.tasks.running) == [FEED]
    await shop.assigned(FEED, OTHER)
    assert len(shop.made) == 3
    assert shop.ready == [(FEED, 7), (OTHER, 7), (OTHER, 7)]
    await shop.tasks.close_all(drain=False)


async def test_a_fenced_task_starts_again_with_the_next_assignment_that_names_it() -> None:
    shop = Shop()
    await shop.assigned(FEED, OTHER)
    shop.made[0].fails_in["commit"] = TaskMigrated("another owner has it")
    shop.made[0].dirty.set()
    await asyncio.wait_for(shop.rejoined.wait(), 10)
    assert list(shop.tasks.running) == [OTHER]
    assert shop.made[1].state is TaskState.RUNNING
    await shop.assigned(FEED, OTHER)
    assert [task.feeding for task in shop.made] == [FEED, OTHER, FEED]
    assert shop.tasks.fenced == 1
    await shop.tasks.close_all(drain=False)


async def test_the_pause_grows_until_a_commit_comes_through() -> None:
    outage = tasks.Outage()
    pauses = [outage.next_pause_s(float(at)) for at in range(8)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0, 3.0]
    assert outage.since_s == 0.0


async def test_a_batch_of_an_older_reading_is_not_judged() -> None:
    shop = Shop()
    await shop.assigned(FEED)
    shop.made[0].fails_in["process"] = DedupError("judged")
    await shop.tasks.process(SimpleNamespace(feeding=FEED, life=LIFE - 1))  # type: ignore[arg-type]
    with pytest.raises(DedupError, match="judged"):
        await shop.tasks.process(BATCH)
    await shop.tasks.close_all(drain=False)


async def test_what_is_no_damage_stops_the_worker() -> None:
    shop = Shop()
    await shop.assigned(FEED)
    shop.made[0].fails_in["process"] = DedupError("a policy says fail")
    with pytest.raises(DedupError, match="a policy"):
        await shop.tasks.process(BATCH)
    assert shop.wiped == []
    assert shop.tasks.failure.done()
    await shop.tasks.close_all(drain=False)


async def test_what_was_counted_stays_when_a_task_is_closed_or_built_again():
    shop = Shop()
    await shop.assigned(FEED, OTHER)
    for task in shop.made:
        task.numbers.transactions = 3
    await shop.assigned()
    await shop.assigned(FEED)
    shop.made[-1].numbers.transactions = 4
    await shop.tasks.close_all(drain=True)
    counted = {place: numbers.transactions for place, numbers in shop.tasks.ended.items()}
    assert counted == {("dedup", "in", 0): 7, ("dedup", "in", 1): 3}


async def test_counters_do_not_fall_while_a_worker_that_stops_commits_what_it_has_judged() -> None:
    """Was: a scrape during the last commit saw the counters without these tasks, and `increase` took it for a restart."""
    shop = Shop()
    await shop.assigned(FEED)
    (task,) = shop.made
    task.numbers.transactions = 3
    go_on = asyncio.Event()

    async def slow_close(*, drain: bool) -> None:
        await go_on.wait()
        task.numbers.transactions += drain
        task.state = TaskState.CLOSED

    task.close = slow_close  # type: ignore[method-assign]
    closing = asyncio.create_task(shop.tasks.close_all(drain=True))
    await reached(lambda: FEED not in shop.tasks.running)
    place = ("dedup", "in", 0)
    assert shop.tasks.ended[place].transactions == 3
    go_on.set()
    await closing
    assert shop.tasks.ended[place].transactions == 4


async def test_a_standby_never_opens_the_store_of_a_task_of_this_worker() -> None:
    """Faust may name a partition standby here and active here, too: it assigns topics of each partition count apart."""
    warm: list[set[int]] = []
    kept: list[set[int]] = []

    async def nothing() -> None: ...

    app = SimpleNamespace(
        sub_topologies={"repartition": ("in",), "dedup": ("t.repartition",)},
        assignor=SimpleNamespace(
            assigned_standbys=lambda: {TP("t.changelog", 0), TP("t.changelog", 1), TP("t.changelog", 2), TP("other", 3)}
        ),
        standbys=SimpleNamespace(assign=warm.append),
        pool=SimpleNamespace(keep_only=kept.append),
        flow_control=SimpleNamespace(resume=lambda: None, is_active=lambda: False),
        consumer=SimpleNamespace(resume_flow=lambda: None),
        _fetcher=SimpleNamespace(maybe_start=nothing),
    )
    manager: Any = SimpleNamespace(
        app=app,
        changelog_topics={"t.changelog"},
        _recovery_started=asyncio.Event(),
        _update_channels=nothing,
        on_actives_ready=lambda: None,
        on_standbys_ready=lambda: None,
    )
    await TableManager.on_rebalance(manager, {TP("t.repartition", 0), TP("in", 1)}, set(), set())
    # Partition 1 of the source is a task here, too, but has no store.
    assert warm == [{1, 2}]
    assert kept == [{0, 1, 2}]


class SilentConnection:
    """A connection to a broker that has stopped answering."""

    def __init__(self) -> None:
        self.closed: list[CloseReason] = []

    def send(self, _request: object) -> Any:
        async def in_vain() -> None:
            raise TimeoutError

        return in_vain()

    def close(self, reason: CloseReason) -> None:
        self.closed.append(reason)


async def test_a_produce_connection_that_gives_no_answer_is_closed() -> None:
    """Else every new epoch would be written into the same dead connection until the kernel gives it up."""
    silent = SilentConnection()

    async def ready(_node: int, group: object) -> bool:
        return group == ConnectionGroup.DEFAULT

    wire = KafkaWire(Connection(("nowhere:9092",), Security()))
    wire._client = SimpleNamespace(  # type: ignore[assignment]
        ready=ready,
        _conns={(1, ConnectionGroup.DEFAULT): silent},
        cluster=SimpleNamespace(leader_for_partition=lambda _: 1),
    )
    answer = await wire.produce("id", ProducerIdentity(1, 0), [(FEED, b"batch")])
    with pytest.raises(NoAnswer, match="ProduceRequest"):
        await answer
    assert silent.closed == [CloseReason.CONNECTION_TIMEOUT]


def member(routine: Any, *, pending: BaseException | None = None, closed: bool = False) -> Any:
    coordinator = SimpleNamespace(_coordination_task=routine, _pending_exception=pending)
    client = SimpleNamespace(_coordinator=coordinator, _closed=closed)
    settings = SimpleNamespace(worker_id="orders-1", session_timeout="1s")
    app = SimpleNamespace(conf=SimpleNamespace(id="orders"), settings=settings)
    return SimpleNamespace(client=client, app=app, _replaced=False)


async def test_a_membership_that_has_died_is_told() -> None:
    forever = asyncio.ensure_future(asyncio.Event().wait())
    ended = asyncio.ensure_future(asyncio.sleep(0))
    await ended
    assert Consumer.lost_membership(member(forever)) is None
    assert Consumer.lost_membership(member(None)) is None, "not joined yet"
    assert Consumer.lost_membership(member(ended, closed=True)) is None, "left by itself"
    for lost in (member(ended), member(forever, pending=RuntimeError("fenced"))):
        found = Consumer.lost_membership(lost)
        assert isinstance(found, BrokerUnavailable)
        assert "no longer a member of the group 'orders'" in str(found)
    forever.cancel()


async def test_a_worker_whose_session_timeout_the_brokers_do_not_allow_says_so() -> None:
    """Was: "is no longer a member", although it never was one, and "Restart it"."""
    refused = member(None, pending=InvalidSessionTimeoutError())
    found = str(Consumer.lost_membership(refused))
    assert "they do not allow its session_timeout (1s). Set it to at least the brokers' group.min.session" in found
    assert "Restart" not in found


async def test_a_worker_whose_id_another_process_has_taken_ends() -> None:
    """Was: both joined again and again, each in the place of the other, and neither kept its tasks."""
    sent: list[Any] = []
    codes = iter([0, 25, 82])

    async def send(request: Any) -> Any:
        sent.append(request)
        return SimpleNamespace(error_code=next(codes))

    replaced = member(None)
    coordinator = replaced.client._coordinator
    coordinator.group_id, coordinator.generation, coordinator.member_id, coordinator._send_req = "orders", 3, "m", send
    Consumer._name_heartbeats(replaced)
    for _ in range(2):
        await coordinator._send_req(HeartbeatRequest("orders", 3, "m"))
        assert Consumer.lost_membership(replaced) is None
    await coordinator._send_req(HeartbeatRequest("orders", 3, "m"))
    assert "with this worker's ID (orders-1)" in str(Consumer.lost_membership(replaced))
    assert [each.prepare({12: (0, 4)}).group_instance_id for each in sent] == ["orders-1"] * 3


@pytest.mark.parametrize("during", [False, True])
async def test_a_poll_tells_the_worker_that_the_membership_has_died_and_raises_nothing(during: bool) -> None:
    """Faust would log a traceback and end the worker as if dedup had a bug."""
    told: list[BaseException] = []
    polling = member(None, pending=None if during else GroupAuthorizationFailedError("orders"))

    async def getmany(timeout_ms: int) -> None:
        raise GroupAuthorizationFailedError("orders")

    polling.client.getmany = getmany
    polling._stay_member = partial(Consumer._stay_member, polling)
    polling.app.tasks = SimpleNamespace(fail=told.append)
    polling.app.consumer_generation_id = 1
    polling.flow_active = True
    polling.lost_membership = partial(Consumer.lost_membership, polling)
    assert [each async for each in Consumer.getmany(polling, 0.0)] == []
    (found,) = told
    assert isinstance(found, BrokerUnavailable)
    assert "GroupAuthorizationFailedError" in str(found)


async def test_a_leader_that_moves_while_a_start_is_looked_up_is_asked_again() -> None:
    """Also for a point in time: the worker must not end for a question that may simply be repeated."""
    asked: list[str] = []

    async def bounds(_place: object) -> LogBounds:
        asked.append("bounds")
        if len(asked) < 2:
            raise NoAnswer("the leader moved")
        return LogBounds(3, 9)

    async def offset_at(_place: object, time_ms: int) -> int | None:
        asked.append(f"at {time_ms}")
        if len(asked) < 4:
            raise NoAnswer("the leader moved")
        return 5

    async def pause(_delay_ms: int) -> None: ...

    wire: Any = SimpleNamespace(bounds=bounds, offset_at=offset_at, pause=pause)
    assert await first_offset(wire, FEED, 1_000) == 5
    assert asked == ["bounds", "bounds", "at 1000", "at 1000"]


@pytest.mark.parametrize(
    "hook",
    [
        Consumer.seek_wait,
        Consumer._commit,
        Consumer.highwaters,
        Producer.send_soon,
        TransactionManager.commit,
        SightingsStore.__setitem__,
        SightingsStore.apply_changelog_batch,
    ],
)
def test_what_faust_would_do_beside_the_tasks_is_refused(hook: Callable[..., Any]) -> None:
    with pytest.raises(InvariantBroken, match="would not be part of the task's transaction"):
        hook(None, {})
