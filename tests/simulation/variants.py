"""The production classes, and wrong ones: every mutant breaks one rule of design page 1 and must be caught."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dedup.core.fold import Outcome, Rows
from dedup.core.window import BEFORE_ALL_TIME, Feed, FeedProgress, StreamTime
from dedup.errors import CommitUnknown, RecordRefused, TaskCorrupted, TaskMigrated
from dedup.kafka.record_batch import FeedBatch
from dedup.kafka.transactional_producer import Session, Unanswered
from dedup.kafka.wire import (
    LogBounds,
    NoAnswer,
    Position,
    Produced,
    ProducerIdentity,
    RecordBatch,
    TopicPartition,
    Wire,
)
from dedup.store.base import Store
from dedup.store.changelog import TaskRecord, Writes, decode_sightings
from dedup.store.write_buffer import WriteBuffer
from dedup.worker.dedup_task import DedupTask
from dedup.worker.offsets import committed_offset
from dedup.worker.record_collector import Refusals
from dedup.worker.task import Captured, Task, TaskState
from dedup.worker.task_group import TaskGroup
from tests.simulation.cluster import OK, TOO_LARGE
from tests.simulation.process import Disk, DiskStore, MemoryDisk, Process, SimWire


@dataclass(frozen=True, slots=True)
class Variant:
    """What a simulated worker is built from."""

    name: str
    session: type[Session] = Session
    task: type[Task] = Task
    group: type[TaskGroup] = TaskGroup
    judge: type[DedupTask] = DedupTask
    disk: Callable[[], Disk] = MemoryDisk
    wire: Callable[[SimWire], Wire] = lambda wire: wire
    id_per_process: bool = False
    fences_old_ids: bool = True
    """Whether a change of the layout fences the ids of the old one."""


class StoreBeforeCommit(DedupTask):
    """What Faust's table does: the store is written when a record is judged."""

    def _remember(self, rows: Rows, outcome: Outcome, now_ms: int) -> list[RecordBatch]:
        batches = super()._remember(rows, outcome, now_ms)
        assert self.store is not None
        self.store.apply(self._writes(rows, outcome), None, self.store.position)
        return batches


class PositionFirstStore(DiskStore):
    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        super().apply({}, record, position)
        super().apply(writes, None, position)


class PositionFirstDisk(MemoryDisk):
    """The changelog position is written before the keys it speaks of."""

    def open(self, process: Process) -> Store:
        return PositionFirstStore(self.kept, process)


class FlushedApartStore(DiskStore):
    disk: OnePositionDisk

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        self.disk.unflushed = {segment: dict(values) for segment, values in writes.items()}
        self.disk.older = {each: self.get_each([each], list(values)).get(each, {}) for each, values in writes.items()}
        super().apply(writes, record, position)


class OnePositionDisk(MemoryDisk):
    """No log; one position for all segments, flushed while the segment written last was not (a kill forgets it)."""

    def __init__(self) -> None:
        super().__init__()
        self.unflushed: dict[int, dict[bytes, bytes]] = {}
        self.older: dict[int, dict[bytes, bytes]] = {}

    def open(self, process: Process) -> Store:
        store = FlushedApartStore(self.kept, process)
        store.disk = self
        return store

    def killed(self) -> None:
        for segment, values in self.unflushed.items():
            held = self.kept._segments.get(segment)
            if held is not None:
                for state_key in values:
                    held.values.pop(state_key, None)
                held.values.update(self.older[segment])
        self.unflushed = {}


class RestoreBeforeInit(TaskGroup):
    """The changelogs are read while the previous owner may still commit."""

    async def open(self) -> None:
        for task in self.tasks.values():
            early = await committed_offset(task._wire, task._committing.group, task.feeding, stable=False)
            task.next_offset = await task.work.restore(early, own=False)
        await super().open()


class RestoredBefore(Task):
    """A task whose group has restored it already."""

    async def start(self) -> int:
        self._move(TaskState.RESTORING)
        committed = self._committed = await committed_offset(self._wire, self._committing.group, self.feeding)
        self.next_offset = self._expected = max(self.next_offset, committed or 0)
        self._move(TaskState.RUNNING)
        return self.next_offset


class OffsetBeforeInit(TaskGroup):
    """What aiokafka does: the committed offset is read before the previous owner is fenced; it alone counts."""

    async def open(self) -> None:
        for task in self.tasks.values():
            group = task._committing.group
            task._committed = await committed_offset(task._wire, group, task.feeding, stable=False)
        await super().open()


class StartsAtOffset(Task):
    """A task whose group has read the committed offset already."""

    async def start(self) -> int:
        self._move(TaskState.RESTORING)
        await self.work.restore(self._committed, own=False)
        self.next_offset = self._expected = self._committed or 0
        self._move(TaskState.RUNNING)
        return self.next_offset


class CommittedOffsetAlone(DedupTask):
    """The position in the task record is ignored."""

    async def restore(self, committed: int | None, *, own: bool) -> int:
        await super().restore(committed, own=own)
        return committed or 0


class PastRefused(TaskGroup):
    """A refusal drops the batches in flight; the next transaction commits offsets past them."""

    async def _judge_again(self, refused: Sequence[RecordRefused]) -> None:
        await self._session.open()
        for task in self.tasks.values():
            task.work.discard()
            task._waiting.clear()
            task._held.clear()
            task._soil()


class BlindZombie(Task):
    """After a refusal a new epoch is begun, and nobody asks whether another owner has committed before it."""

    async def refuse_if_overtaken(self) -> None:
        pass


class OwnOffsetAlone(Task):
    """After a refusal only one who has both another offset and other state is taken for overtaken."""

    async def refuse_if_overtaken(self) -> None:
        committed = await committed_offset(self._wire, self._committing.group, self.feeding)
        if committed != self._committed and await self.work.overtaken():
            raise TaskMigrated("overtaken")


class AppliedAfterClose(TaskGroup):
    """A commit that comes through after the task was closed is applied to a store that may be another task's."""

    def _may_apply(self) -> bool:
        return True


class NeverConfirmed(Task):
    """A task whose topics are looked at when the process begins."""

    async def start(self) -> int:
        self._committing = replace(self._committing, confirm=_nothing)
        return await super().start()


class ConfirmedAtStart(TaskGroup):
    """Topics are looked at when a task begins, and not before its commits."""

    def __init__(
        self,
        session: Session,
        confirm: Callable[[], Awaitable[None]],
        refuse_layout: Callable[[], Awaitable[None]],
        transactions: Counter[str],
    ) -> None:
        super().__init__(session, _nothing, refuse_layout, transactions)


class FrozenOneByOne(TaskGroup):
    """Other things happen between the captures of two tasks."""

    async def _commit_once(self) -> Sequence[Captured]:
        first = next(iter(self.tasks.values()))
        self.sendable.clear()
        early = [first.capture()] if first.dirty else []
        await asyncio.sleep(0.001)
        capture = first.capture

        def captured_before() -> Captured:
            return early.pop() if early else capture()

        if early:
            first.dirty = True
            first.capture = captured_before  # type: ignore[method-assign]
        try:
            return await super()._commit_once()
        finally:
            first.capture = capture  # type: ignore[method-assign]


class OffsetLeftOut(TaskGroup):
    """The transaction holds the offset of its first task alone."""

    async def _commit_confirmed(self, captured: Sequence[Captured]) -> Mapping[TopicPartition, int]:
        prepare = self._session.prepare

        async def first_alone(offsets: Mapping[TopicPartition, Position]) -> Mapping[TopicPartition, int]:
            return await prepare(dict(list(offsets.items())[:1]))

        self._session.prepare = first_alone  # type: ignore[method-assign]
        try:
            return await super()._commit_confirmed(captured)
        finally:
            self._session.prepare = prepare  # type: ignore[method-assign]


class ClosedAlone(Task):
    """A task that fails is closed, but not its group."""

    def _take(self, batch: FeedBatch) -> None:
        try:
            with self.noting_damage():
                self._judge(batch)
            if self._transaction.sendable.is_set():
                self.send_waiting()
        except BaseException:
            self.close_now()
            raise


class CommitsTheRest(TaskGroup):
    """When one task has failed, the others commit before the group is closed."""

    async def close(self, *, drain: bool) -> None:
        await super().close(drain=drain or any(task.damage for task in self.tasks.values()))


class AnyTasksRow(TaskGroup):
    """A refused row's feeding partition is forgotten: it is looked for in the first task."""

    def send(self, batches: Sequence[RecordBatch], feeding: TopicPartition) -> None:
        super().send(batches, next(iter(self.tasks)))


class FirstOvertaken(TaskGroup):
    """Only the first task of a group is asked whether another owner has committed."""

    def _running(self) -> list[Task]:
        return super()._running()[:1]

    async def _judge_again(self, refused: Sequence[RecordRefused]) -> None:
        self.open_for_batches.clear()
        self.sendable.clear()
        self._learn(refused)
        await self.open()
        for task in self._running():
            await task.refuse_if_overtaken()
        for task in super()._running():
            task.judge_again()
        self.sendable.set()


class LayoutBeforeInit(TaskGroup):
    """The layout is read before the previous owner is fenced, so a change may come between."""

    async def open(self) -> None:
        await self._refuse_layout()
        await self._session.open()


class LayoutAtStart(TaskGroup):
    """The layout is read when a group starts, and not when it begins a new epoch after a refusal."""

    opened = False

    async def open(self) -> None:
        await self._session.open()
        if not self.opened:
            await self._refuse_layout()
        self.opened = True


class NoLayout(TaskGroup):
    """Nobody looks at the layout."""

    async def open(self) -> None:
        await self._session.open()


class RestoredAcrossEpochs(Task):
    """A task goes on with what it restored before its group began a new epoch."""

    async def start(self) -> int:
        self._move(TaskState.RESTORING)
        await self._restore()
        self._move(TaskState.RUNNING)
        return self.next_offset


class Delegating:
    """A wire that changes one request of another."""

    def __init__(self, wire: SimWire) -> None:
        self._wire = wire

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)


class FetchedByName(Delegating):
    """What aiokafka does: a changelog is whatever topic has its name."""

    def pin(self, topic_ids: Mapping[str, str]) -> None:
        pass


async def _nothing() -> None:
    pass


class RefusalForgotten(Session):
    """The other batches are waited for, as they must be, and then nobody remembers the one that was refused."""

    def _note_refused(self, refused: RecordRefused, target: TopicPartition) -> None:
        self._refused_by.add(target)
        self._ends.setdefault(target, 0)


class ForgetfulWriteBuffer(WriteBuffer):
    def _tiers(self) -> tuple[Writes, ...]:
        return {}, self._open


class RemovedAtCapture(DedupTask):
    """Sightings leave the write buffer when they are captured for the commit, and reach the store after it."""

    async def restore(self, committed: int | None, *, own: bool) -> int:
        start = await super().restore(committed, own=own)
        assert self.store is not None
        self._buffer = ForgetfulWriteBuffer(self.store)
        return start


class StreamTimeApart(DedupTask):
    """Stream time is not in the changelog: after a restart it is the greatest time of a sighting."""

    async def restore(self, committed: int | None, *, own: bool) -> int:
        start = await super().restore(committed, own=own)
        assert self.store is not None
        times = [seen.last_ms for _, _, value in self.store.sightings() for seen in decode_sightings(value)]
        self._applied = self._stream_time = StreamTime(max(times, default=BEFORE_ALL_TIME), self._applied.feeds)
        return start


class AddedForgotten(DedupTask):
    """A restart knows the feeds of the beginning alone: one that was added later is idle until its next record."""

    async def restore(self, committed: int | None, *, own: bool) -> int:
        start = await super().restore(committed, own=own)
        feeds = {feed: self._applied.feeds[feed] for feed in self.plan.feeds}
        self._applied = self._stream_time = StreamTime(self._applied.value_ms, feeds)
        return start


class AddedHoldsUp(DedupTask):
    """A feed that was added later holds up stream time from the start, where none of its records ever came, too."""

    async def restore(self, committed: int | None, *, own: bool) -> int:
        start = await super().restore(committed, own=own)
        feeds = {Feed(0, partition): FeedProgress() for partition in range(2)} | dict(self._applied.feeds)
        self._applied = self._stream_time = StreamTime(self._applied.value_ms, feeds)
        return start


class WallClockAlone(DedupTask):
    """A time is in the future by the wall clock alone, whatever stream time has come to."""

    def judge(self, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch]:
        applied, self._applied = self._applied, StreamTime(BEFORE_ALL_TIME, self._applied.feeds)
        try:
            return super().judge(batch, refusals)
        finally:
            self._applied = applied


class AnyFingerprint(DedupTask):
    """State made with other partition counts is taken as it is."""

    def _accept(self, record: TaskRecord) -> None:
        pass


class BlindStore(DiskStore):
    def get_each(self, segments: Sequence[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        try:
            return super().get_each(segments, ids)
        except TaskCorrupted:
            return {}


class BlindDisk(MemoryDisk):
    """What an iterator of RocksDB does that is not asked for its status: a damaged block reads as the end."""

    def open(self, process: Process) -> Store:
        return BlindStore(self.kept, process)


class UnappliedExpiry(DedupTask):
    """Segments are dropped by the stream time of a transaction that may yet abort."""

    def judge(self, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch]:
        judged = super().judge(batch, refusals)
        assert self.store is not None
        window = self.plan.rules.window
        self.store.drop_below(window.oldest_live_ms(self._stream_time.value_ms), window.segment_ms)
        return judged


class HopefulCommit(Session):
    """No answer to EndTxn is taken for a success."""

    async def end(self) -> None:
        try:
            await super().end()
        except CommitUnknown:
            self._forget_transaction()


class StaleSequences(Session):
    """Sequence numbers go on in a new epoch."""

    async def open(self) -> None:
        kept = dict(self._sequences)
        await super().open()
        self._sequences = kept


class StillEndingIgnored(Session):
    """A batch that met the end of the previous transaction counts as appended."""

    async def _answers(self, flight: Unanswered) -> Mapping[TopicPartition, Produced]:
        answers = await flight.answer
        return {target: replace(one, error_code=OK, base_offset=0) for target, one in answers.items()}


class WaitingLeftOut(Session):
    """A commit has what is added last, the changelog's batches, and not what waits."""

    async def _sent(self) -> None:
        self._queue = [each for each in self._queue if each.batch.target.topic.endswith("changelog")]
        await super()._sent()


class RefusedIgnored(Delegating):
    """What aiokafka's producer does: a refused send fails its own future, and the commit succeeds."""

    async def produce(
        self, transactional_id: str, identity: ProducerIdentity, batches: Sequence[tuple[TopicPartition, bytes]]
    ) -> Awaitable[dict[TopicPartition, Produced]]:
        answer = await self._wire.produce(transactional_id, identity, batches)

        async def pretended() -> dict[TopicPartition, Produced]:
            return {
                target: Produced(OK, 0) if produced.error_code == TOO_LARGE else produced
                for target, produced in (await answer).items()
            }

        return pretended()


class EndTwice(Delegating):
    """What aiokafka's sender does: EndTxn without an answer is sent again in the same epoch."""

    async def end_transaction(
        self, transactional_id: str, identity: ProducerIdentity, *, commit: bool
    ) -> tuple[int, ProducerIdentity]:
        while True:
            try:
                return await self._wire.end_transaction(transactional_id, identity, commit=commit)
            except NoAnswer:
                await self._wire.pause(1)


class AbortedInItsEpoch(Delegating):
    """EndTxn aborts a transaction before the next epoch begins, as most clients do: the markers fence nothing."""

    def __init__(self, wire: SimWire) -> None:
        super().__init__(wire)
        self._last: dict[str, ProducerIdentity] = {}

    async def init_producer_id(self, transactional_id: str, timeout_ms: int) -> tuple[int, ProducerIdentity]:
        if transactional_id in self._last:
            await self._wire.end_transaction(transactional_id, self._last.pop(transactional_id), commit=False)
        code, identity = await self._wire.init_producer_id(transactional_id, timeout_ms)
        if code == OK:
            self._last[transactional_id] = identity
        return code, identity


class StableEnd(Delegating):
    """What `end_offsets` of a read_committed consumer says: restore ends at the last stable offset."""

    async def bounds(self, source: TopicPartition) -> LogBounds:
        bounds = await self._wire.bounds(source)
        fetched = await self._wire.fetch(source, bounds.start, max_bytes=1, wait_ms=0)
        return LogBounds(bounds.start, fetched.last_stable_offset)


def _delegating(make: Callable[[SimWire], Any]) -> Callable[[SimWire], Wire]:
    return make


CORRECT = Variant("correct")
TASK_MUTANTS = (
    Variant("store before commit", judge=StoreBeforeCommit),
    Variant("position before keys", disk=PositionFirstDisk),
    Variant("one position for all segments", disk=OnePositionDisk),
    Variant("id per process", id_per_process=True),
    Variant("restore before init", group=RestoreBeforeInit, task=RestoredBefore),
    Variant("committed offset read before init", group=OffsetBeforeInit, task=StartsAtOffset),
    Variant("start at the committed offset alone", judge=CommittedOffsetAlone),
    Variant("refused sends ignored", wire=_delegating(RefusedIgnored)),
    Variant("a refusal forgotten while others are waited for", session=RefusalForgotten),
    Variant("offsets committed past a refused record", group=PastRefused),
    Variant("a zombie's refused batch judged again on old state", task=BlindZombie),
    Variant("a refused record of a stateless zombie judged again", task=OwnOffsetAlone),
    Variant("topics never looked at again", group=ConfirmedAtStart, task=NeverConfirmed),
    Variant("topics looked at when a task starts alone", group=ConfirmedAtStart),
    Variant("the changelog read by its name", wire=_delegating(FetchedByName)),
    Variant("overlay removed at capture", judge=RemovedAtCapture),
    Variant("restore to the last stable offset", wire=_delegating(StableEnd)),
    Variant("stream time kept outside the changelog", judge=StreamTimeApart),
    Variant("feeds that were added forgotten by a restart", judge=AddedForgotten),
    Variant("feeds that were added wait for their first record", judge=AddedHoldsUp),
    Variant("expiry by an unapplied stream time", judge=UnappliedExpiry),
    Variant("EndTxn sent twice in an epoch", wire=_delegating(EndTwice)),
    Variant("no answer to EndTxn is a success", session=HopefulCommit),
    Variant("a damaged block read as the end", disk=BlindDisk),
    Variant("future by the wall clock alone", judge=WallClockAlone),
    Variant("state of other partition counts taken over", judge=AnyFingerprint),
    Variant("sequence numbers kept over an epoch", session=StaleSequences),
    Variant("a transaction aborted in its own epoch", wire=_delegating(AbortedInItsEpoch)),
    Variant("a batch put off counts as appended", session=StillEndingIgnored),
    Variant("batches that wait left out of the commit", session=WaitingLeftOut),
)
GROUP_MUTANTS = (
    Variant("tasks of a group captured one by one", group=FrozenOneByOne),
    Variant("the offset of a group's first task alone committed", group=OffsetLeftOut),
    Variant("a failed task closed while its group commits", task=ClosedAlone, group=CommitsTheRest),
    Variant("a refused row looked for in the first task", group=AnyTasksRow),
    Variant("the layout read before the fence", group=LayoutBeforeInit),
    Variant("the layout read at a start alone", group=LayoutAtStart),
    Variant("the layout never read", group=NoLayout),
    Variant("the old layout's ids not fenced by a change", fences_old_ids=False),
    Variant("only the first task asked whether it was overtaken", group=FirstOvertaken),
)
MUTANTS = (*TASK_MUTANTS, *GROUP_MUTANTS)
