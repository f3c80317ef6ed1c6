"""A task: one feeding partition, one transactional id, one store, one changelog partition, for one assignment.

Theory of operation. `start` follows the order that correctness asks for: fence the previous owner (InitProducerId),
read the committed offset *after* that, restore the store to the true end of the changelog, and only then say where to
read from. From then on a batch goes one way:

    process(batch)   judge it (pure), keep its sightings in the overlay's open generation, send what follows
    commit()         freeze the generation, add the task record, settle every send, offsets, EndTxn, apply to the store

While a commit is in flight the next batches are judged, seeing the frozen generation, and wait to be sent. The store
never holds an uncommitted sighting: a crash before EndTxn leaves nothing, a crash after it heals itself when the next
owner restores from the changelog. A task that is closed, fenced or unsure is thrown away and a new one is built.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from dedup import crashpoints
from dedup.errors import InvariantBroken, RecordRefused, TaskMigrated
from dedup.metrics import TaskNumbers
from dedup.session.transaction import Session
from dedup.session.wire import RecordBatch, TopicPartition, Wire
from dedup.worker.batch import FeedBatch
from dedup.worker.starting import committed_offset


class TaskState(enum.Enum):
    """Where in its one life a task is."""

    CREATED = "created"
    RESTORING = "restoring"
    RUNNING = "running"
    CLOSED = "closed"


MOVES: Final[Mapping[TaskState, frozenset[TaskState]]] = {
    TaskState.CREATED: frozenset({TaskState.RESTORING, TaskState.CLOSED}),
    TaskState.RESTORING: frozenset({TaskState.RUNNING, TaskState.CLOSED}),
    TaskState.RUNNING: frozenset({TaskState.CLOSED}),  # a revoked task is never resumed; a new one is built
    TaskState.CLOSED: frozenset(),
}
MOST_WAITING: Final = 16_000
"""Records judged while a commit is in flight, before their task waits for it."""
MOST_REFUSALS: Final = 10_000


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """A sub-topology and a partition; for `repartition` also the source topic."""

    sub_topology: str
    feeding: TopicPartition

    def __str__(self) -> str:
        return f"{self.sub_topology} {self.feeding.topic}/{self.feeding.partition}"


@dataclass(frozen=True, slots=True)
class Frozen:
    """A transaction's state at capture, to be applied when its commit is known to have happened."""

    batches: list[RecordBatch]
    """The closing records: the task record."""
    apply: Callable[[Mapping[TopicPartition, int]], None]
    """Apply the generation; gets, per partition written, the offset after its last record."""


@dataclass(slots=True)
class Refusals:
    """Records the broker refused, and how finely batches are cut to find the next one."""

    rows: dict[int, str] = field(default_factory=dict)
    """Feeding offset -> what the broker said."""
    most_rows: dict[TopicPartition, int] = field(default_factory=dict)


class Work(Protocol):
    """What a kind of task does with records; it reads and keeps state, but commits nothing."""

    async def restore(self, committed: int | None) -> int:
        """Bring the state up to the changelog's true end; return the feeding offset to start from."""

    async def overtaken(self) -> bool:
        """Tell whether another owner has written state since our last commit; asked in a new epoch of ours."""

    def judge(self, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch]:
        """Judge a batch on top of all before, and return what is to be sent; its state is pending until applied."""

    def freeze(self, next_offset: int) -> Frozen:
        """Capture all that was judged; later batches go into a new generation but see this one."""

    def idle(self) -> list[RecordBatch]:
        """Return what says that this feed has nothing more for now; nothing where nobody needs to know."""

    def discard(self) -> None:
        """Forget everything judged and not applied."""

    def close(self) -> None:
        """Release the store."""


class Task:
    """One partition's processing, from assignment to revocation."""

    def __init__(
        self,
        task_id: TaskId,
        group: str,
        session: Session,
        wire: Wire,
        make_work: Callable[[TaskNumbers], Work],
        *,
        pin_start: bool = False,
    ) -> None:
        self.task_id: Final = task_id
        self.numbers: Final = TaskNumbers()
        self.state = TaskState.CREATED
        self.dirty: Final = asyncio.Event()
        """Set while there is something to commit."""
        self._group: Final = group
        self._pin_start: Final = pin_start
        """Commit where it starts at once: `latest` would mean another place after a crash."""
        self._session: Final = session
        self._wire: Final = wire
        self._work: Final = make_work(self.numbers)
        self._refusals: Final = Refusals()
        self._next_offset = 0
        self._committed: int | None = None
        """The group's offset as this task last read or wrote it."""
        self._expected = 0
        """Where the next batch from the transport must begin."""
        self._held: list[FeedBatch] = []
        """Batches judged and not known to be committed: a refused record makes them be judged again."""
        self._waiting: list[list[RecordBatch]] = []
        """What follows from each batch, where a commit is in flight."""
        self._waiting_records = 0
        self._commit_lock: Final = asyncio.Lock()
        self._sendable: Final = asyncio.Event()

    @property
    def epoch(self) -> int:
        """The producer epoch in force."""
        return self._session.epoch

    @property
    def work(self) -> Work:
        """What this kind of task does."""
        return self._work

    @property
    def next_offset(self) -> int:
        """The feeding offset after everything judged."""
        return self._next_offset

    @property
    def committing(self) -> bool:
        """A commit is in flight."""
        return self._commit_lock.locked()

    def _move(self, state: TaskState) -> None:
        if state not in MOVES[self.state]:
            raise InvariantBroken(f"{self.task_id}: a {self.state.value} task can not become {state.value}.")
        self.state = state

    async def start(self) -> int:
        """Take the partition over; return the feeding offset to read from.

        Raises TaskMigrated, CommitUnknown, StateIncompatible, TaskCorrupted or BrokerUnavailable.
        """
        self._move(TaskState.RESTORING)
        await self._session.open()
        # aiokafka read it before the rebalance callback, so before the previous owner was fenced: too early.
        committed = await committed_offset(self._wire, self._group, self.task_id.feeding)
        self._committed = committed
        crashpoints.reached("after_committed_offset")
        self._next_offset = self._expected = await self._work.restore(committed)
        crashpoints.reached("after_restore")
        self.numbers.committed_offset = self._next_offset
        self._move(TaskState.RUNNING)
        self._sendable.set()
        if committed is None and self._pin_start:
            self.dirty.set()
        return self._next_offset

    async def process(self, batch: FeedBatch) -> None:
        """Judge a batch and put what follows from it into the task's transaction."""
        if self.state is not TaskState.RUNNING:
            return  # revoked meanwhile: whoever owns the partition next reads these records again
        if batch.follows != self._expected:
            raise InvariantBroken(
                f"{self.task_id}: a batch that follows offset {batch.follows} came, but the last one ended at "
                f"{self._expected}: a batch between was lost on its way through the agent. The worker stops; nothing "
                f"was committed past offset {self._next_offset}."
            )
        self._expected = batch.next_offset
        fresh = self._not_yet_judged(batch)
        if fresh is not None:
            self._take(fresh)
            if self._waiting_records >= MOST_WAITING:
                await self._sendable.wait()

    def _take(self, batch: FeedBatch) -> None:
        """Judge a batch, and send what follows from it unless a commit is in flight."""
        try:
            self._judge(batch)
            if self._sendable.is_set():
                self._send_waiting()
        except BaseException:
            # Half of the batch may be in the overlay or on its way: the clock must not commit that before we stop.
            self._close_now()
            raise

    def _not_yet_judged(self, batch: FeedBatch) -> FeedBatch | None:
        if batch.offsets[0] >= self._next_offset:
            return batch
        # Group offsets may be stale, expired or deleted; the task record says what was judged already.
        if batch.offsets[-1] < self._next_offset:
            self.numbers.replayed += len(batch)
            return None
        fresh = batch.from_offset(self._next_offset)
        self.numbers.replayed += len(batch) - len(fresh)
        return fresh

    def _judge(self, batch: FeedBatch) -> None:
        self._held.append(batch)
        self._waiting.append(self._work.judge(batch, self._refusals))
        self._waiting_records += len(batch)
        self._next_offset = batch.next_offset
        self.dirty.set()

    def say_idle(self) -> bool:
        """Put the idle markers of this feed into a transaction; False, with nothing done, while one is open."""
        if self.state is not TaskState.RUNNING or self.dirty.is_set() or self.committing:
            return False
        self._session.add(self._work.idle())
        self.dirty.set()
        return True

    def _send_waiting(self) -> None:
        for batches in self._waiting:
            self._session.add(batches)
        self._waiting.clear()
        self._waiting_records = 0

    async def commit(self) -> None:
        """Make all that was judged so far visible, and then apply it; does nothing if there is nothing.

        Raises TaskMigrated or CommitUnknown: the task must be thrown away.
        """
        async with self._commit_lock:
            while self.dirty.is_set() and self.state is TaskState.RUNNING:
                try:
                    await self._commit_once()
                except RecordRefused as refusal:
                    await self._judge_again(refusal)
                else:
                    break

    async def _commit_once(self) -> None:
        # Captured together and before any await: what is sent, what is applied and the offset must never part.
        offset = self._next_offset
        captured = len(self._held)
        self.dirty.clear()
        self._sendable.clear()
        try:
            frozen = self._work.freeze(offset)
            self._session.add(frozen.batches)
            ends = await self._session.commit({self.task_id.feeding: offset})
            if self.state is not TaskState.RUNNING:
                return  # closed meanwhile: whoever opens the store next finds this commit in the changelog
            frozen.apply(ends)
            crashpoints.reached("after_apply")
            for batch in self._held[:captured]:
                self.numbers.settled(batch.timestamps_ms[0], batch.timestamps_ms[-1], len(batch))
            del self._held[:captured]
            self._refusals.rows.clear()
            self._refusals.most_rows.clear()
            self.numbers.committed(offset)
            self._committed = offset
            self._send_waiting()
        except RecordRefused:
            raise
        except BaseException:
            self._close_now()
            raise
        finally:
            self._sendable.set()

    def _nowhere(self, refusal: RecordRefused, offset: int) -> RecordRefused:
        """Return the error for a record that is refused as a dead letter, too."""
        return RecordRefused(
            f"{refusal}. It is offset {offset} of {self.task_id.feeding.topic}/{self.task_id.feeding.partition}, "
            f"refused before and sent as a dead letter now, so no topic takes it. Nothing was committed past it; give "
            f"{refusal.topic!r} a larger max.message.bytes, or name another dead_letter topic, and start again.",
            topic=refusal.topic,
            partition=refusal.partition,
            rows=refusal.rows,
        )

    async def _judge_again(self, refusal: RecordRefused) -> None:
        """Start over from the last commit with the refused record as a dead letter, found by halving."""
        self.numbers.aborted += 1
        rows = [row for row in refusal.rows if row >= 0]
        target = TopicPartition(refusal.topic, refusal.partition)
        if not rows or len(self._refusals.rows) >= MOST_REFUSALS:
            self._close_now()
            raise refusal
        if len(rows) == 1 and rows[0] in self._refusals.rows:
            self._close_now()
            raise self._nowhere(refusal, rows[0])
        if len(rows) == 1:
            self._refusals.rows[rows[0]] = str(refusal)
            self._refusals.most_rows.pop(target, None)
        else:
            self._refusals.most_rows[target] = len(rows) // 2
        self._sendable.clear()
        try:
            await self._session.open()
            await self._refuse_if_overtaken()
            self._judge_held_again()
        except BaseException:
            # An offset must never outlive the state it was reached with: a drain may be waiting to commit.
            self._close_now()
            raise
        finally:
            self._sendable.set()

    def _judge_held_again(self) -> None:
        self._work.discard()
        self._waiting.clear()
        self._waiting_records = 0
        held, self._held = self._held, []
        if held:
            self._next_offset = held[0].offsets[0]
        for batch in held:
            self._judge(batch)
        self._send_waiting()

    async def _refuse_if_overtaken(self) -> None:
        """Raise TaskMigrated if the epoch before the new one was not ours: a zombie's refusal may come late."""
        committed = await committed_offset(self._wire, self._group, self.task_id.feeding)
        if committed != self._committed or await self._work.overtaken():
            raise TaskMigrated(
                f"{self.task_id}: another owner has committed since our last commit; this task is discarded and the "
                f"worker rejoins the group."
            )

    def _close_now(self) -> None:
        if self.state is not TaskState.CLOSED:
            self._move(TaskState.CLOSED)
            self.dirty.clear()
            self._work.discard()
            self._work.close()

    async def close(self, *, drain: bool) -> None:
        """End the task: with ``drain``, commit what was judged; then release session and store. Never revived."""
        try:
            if drain and self.state is TaskState.RUNNING:
                await self.commit()
        finally:
            self._close_now()
            await self._session.drop()
