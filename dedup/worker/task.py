"""Implements a task, which has one feeding partition, transactional ID, store, and changelog partition.

A task exists only for the duration of one assignment. Correctness depends on the order of the steps in `start`: fence
the previous owner (InitProducerId), read the committed offset, restore the store to the end of the changelog, and only
then return the offset to read from. After that, each batch is processed in the same way:

    process(batch)   judge it (pure), keep its sightings in the write buffer's open generation, send the results
    commit()         freeze the generation, add the task record, await all sends, add offset, EndTxn, apply to the store

While a commit is in flight, later batches are judged, but their results are sent only after the commit. The store never
contains an uncommitted sighting. After a crash before EndTxn, the broker aborts the transaction. After a crash between
EndTxn and the write to the store, the next owner restores the sightings from the changelog.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dedup import crashpoints
from dedup.errors import ClockBehind, InvariantBroken, RecordRefused, TaskMigrated
from dedup.kafka.record_batch import FeedBatch
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import Position, RecordBatch, TopicPartition, Wire
from dedup.metrics import TaskNumbers
from dedup.store.base import Store
from dedup.worker.clock import SteadyClock
from dedup.worker.offsets import committed_offset, committed_position, refuse_other_topics
from dedup.worker.recent_outcomes import Recent
from dedup.worker.record_collector import RecordCollector, Refusals

log: Final = logging.getLogger(__name__)
_MOST_WAITING: Final = 16_000
"""The number of records that a task may judge during a commit before it waits for the commit to end."""


class TaskState(enum.Enum):
    """The state of a task, which only moves forward."""

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


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """The identity of a task: its sub-topology and its feeding partition."""

    sub_topology: str
    feeding: TopicPartition

    def __str__(self) -> str:
        return f"{self.sub_topology} {self.feeding}"


@dataclass(frozen=True, slots=True)
class Frozen:
    """The captured results of a transaction, which are applied once the transaction is known to be committed."""

    batches: list[RecordBatch]
    """The last record batches of the transaction, which contain the task record."""
    apply: Callable[[Mapping[TopicPartition, int]], None]
    """Applies the generation to the store, given the offset after the last record written to each partition."""
    confirm: Callable[[int], None] = lambda _: None
    """Receives the time in ms when a broker appended the records; raises ClockBehind if it disproves a verdict."""


@dataclass(frozen=True, slots=True)
class Committing:
    """Settings for committing a task's offset."""

    group: str
    confirm: Callable[[], Awaitable[None]]
    """Raises StateIncompatible if a topic has changed since the process started; see `TopicCheck`."""
    note: str = ""
    """Metadata of the committed offset; see `offset_note`."""
    pin_start: bool = False
    """True if the task commits its starting position at once, because `latest` may be another offset after a crash."""


class TaskWork(abc.ABC):
    """Processes records for one kind of task, and keeps the task's state, but commits nothing."""

    def __init__(self, wire: Wire, collector: RecordCollector, clock: SteadyClock, numbers: TaskNumbers) -> None:
        self._wire: Final = wire
        self.collector: Final = collector
        self._clock: Final = clock
        self._numbers: Final = numbers
        self._judged = TaskNumbers()
        """The counters of the open transaction, which are dropped if its records are judged again."""
        self.recent: Final = Recent()
        self.store: Store | None = None
        """The store with the applied state, or None before `restore` and for work that keeps no state."""

    @abc.abstractmethod
    async def restore(self, committed: int | None) -> int:
        """Bring the state up to the end of the changelog, and return the feeding partition's offset to start from."""

    @abc.abstractmethod
    def judge(self, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch]:
        """Judge a batch, keep its new sightings until they are applied, and return the record batches to send."""

    async def overtaken(self) -> bool:
        """In a new epoch, return whether another owner has written state since this task's last commit."""
        return False

    def freeze(self, next_offset: int) -> Frozen:  # noqa: ARG002  # for work that keeps state
        """Capture the results of all batches judged so far; later batches belong to the next transaction."""
        judged, self._judged = self._judged, TaskNumbers()
        noted = self.recent.freeze()

        def apply(_ends: Mapping[TopicPartition, int]) -> None:
            self._numbers.add_verdicts(judged)
            self.recent.commit(noted)

        return Frozen([], apply)

    def idle(self) -> list[RecordBatch]:
        """Return markers that say that this feed has no new records, or an empty list if no task needs such markers."""
        return []

    def discard(self) -> None:
        """Discard everything that was judged but not applied to the store."""
        self._judged = TaskNumbers()
        self.recent.discard()

    def close(self) -> None:  # noqa: B027  # work without state has nothing to release
        """Release the store."""


class Task:
    """Processes one partition, from assignment to revocation."""

    def __init__(
        self,
        task_id: TaskId,
        committing: Committing,
        session: Session,
        wire: Wire,
        make_work: Callable[[TaskNumbers], TaskWork],
    ) -> None:
        self.task_id: Final = task_id
        self.numbers: Final = TaskNumbers()
        self.state = TaskState.CREATED
        self.dirty: Final = asyncio.Event()
        """Set while there is something to commit."""
        self._committing = committing
        self._session: Final = session
        self._wire: Final = wire
        self.work: Final = make_work(self.numbers)
        """The part of the task that depends on its kind."""
        self._refusals = Refusals()
        self.next_offset = 0
        """The feeding offset after the last judged record."""
        self._leader_epoch = -1
        """The leader epoch of the record before the next offset, or -1 if it is unknown."""
        self._committed: int | None = None
        """The group's committed offset, as this task last read or wrote it."""
        self._expected = 0
        """The offset at which the next batch from the transport must begin."""
        self._held: list[FeedBatch] = []
        """Batches that were judged but are not known to be committed; they are judged again if a record is refused."""
        self._waiting: list[list[RecordBatch]] = []
        """For each batch that was judged while a commit is in flight, the record batches that wait to be sent."""
        self._waiting_records = 0
        self._commit_lock: Final = asyncio.Lock()
        self._sendable: Final = asyncio.Event()
        self._open_for_batches: Final = asyncio.Event()
        """Cleared while records are judged again after a refusal, so that no batch is added until the next commit."""
        self._open_for_batches.set()

    @property
    def epoch(self) -> int:
        """The current producer epoch."""
        return self._session.epoch

    @property
    def position(self) -> Position:
        """The `next_offset` of the task, together with the leader epoch of the record before that offset."""
        return Position(self.next_offset, self._leader_epoch, self._committing.note)

    @property
    def committing(self) -> bool:
        """True while a commit is in flight."""
        return self._commit_lock.locked()

    @property
    def all_committed(self) -> bool:
        """True if the task runs and everything that it has judged is committed."""
        return self.state is TaskState.RUNNING and not self.dirty.is_set() and not self.committing

    def _move(self, state: TaskState) -> None:
        if state not in MOVES[self.state]:
            raise InvariantBroken(f"{self.task_id}: a {self.state.value} task cannot become {state.value}.")
        self.state = state

    async def start(self) -> int:
        """Take over the partition, and return the offset to read from.

        Raises TaskMigrated, CommitUnknown, StateIncompatible, TaskCorrupted, or BrokerUnavailable.
        """
        self._move(TaskState.RESTORING)
        await self._session.open()
        # This process may have been frozen during a reset, so its disk may hold the state of another changelog.
        await self._committing.confirm()
        # The offset is not taken from aiokafka, which reads it before the previous owner is fenced.
        found = await committed_position(self._wire, self._committing.group, self.task_id.feeding)
        if found is not None:
            refuse_other_topics(found.note, self._committing.note, self.task_id.feeding)
        committed = self._committed = None if found is None else found.offset
        crashpoints.reached("after_committed_offset")
        self.next_offset = self._expected = await self.work.restore(committed)
        if found is not None and found.offset == self.next_offset:
            self._leader_epoch = found.leader_epoch
        crashpoints.reached("after_restore")
        self.numbers.committed_offset = self.next_offset
        self._move(TaskState.RUNNING)
        self._sendable.set()
        if committed is None and self._committing.pin_start:
            self.dirty.set()
        return self.next_offset

    async def process(self, batch: FeedBatch) -> None:
        """Judge a batch and add the resulting records to the task's transaction."""
        if self.state is not TaskState.RUNNING:
            return  # revoked in the meantime: the next owner of the partition reads these records again
        if batch.follows != self._expected:
            raise InvariantBroken(
                f"{self.task_id}: a batch arrived that follows offset {batch.follows}, but the last one ended at "
                f"{self._expected}: a batch in between was lost on its way through the agent. The worker stops; "
                f"nothing was committed past offset {self.next_offset}."
            )
        self._expected = batch.next_offset
        fresh = self._not_yet_judged(batch)
        await self._open_for_batches.wait()
        if fresh is not None and self.state is TaskState.RUNNING:
            self._take(fresh)
            if self._waiting_records >= _MOST_WAITING:
                await self._sendable.wait()

    def _take(self, batch: FeedBatch) -> None:
        try:
            self._judge(batch)
            if self._sendable.is_set():
                self._send_waiting()
        except BaseException:
            # The commit loop must not commit the part of the batch that may already be buffered or sent.
            self._close_now()
            raise

    def _not_yet_judged(self, batch: FeedBatch) -> FeedBatch | None:
        if batch.offsets[0] >= self.next_offset:
            return batch
        # The group's offset may be stale, expired or deleted; the task record says what was already judged.
        if batch.offsets[-1] < self.next_offset:
            self.numbers.replayed += len(batch)
            return None
        fresh = batch.from_offset(self.next_offset)
        self.numbers.replayed += len(batch) - len(fresh)
        return fresh

    def _judge(self, batch: FeedBatch) -> None:
        self._held.append(batch)
        self._waiting.append(self.work.judge(batch, self._refusals))
        self._waiting_records += len(batch.offsets)
        self.next_offset, self._leader_epoch = batch.next_offset, batch.leader_epoch
        self.dirty.set()

    def say_idle(self) -> bool:
        """Write this feed's idle markers in a transaction and return True, or return False if a transaction is open."""
        if not self.all_committed:
            return False
        self._session.add(self.work.idle())
        self.dirty.set()
        return True

    def _send_waiting(self) -> None:
        for batches in self._waiting:
            self._session.add(batches)
        self._waiting.clear()
        self._waiting_records = 0

    async def commit(self) -> None:
        """Commit everything judged so far, and apply it to the store; do nothing if there is nothing to commit.

        After TaskMigrated or CommitUnknown is raised, the task must be discarded.
        """
        async with self._commit_lock:
            try:
                while self.dirty.is_set() and self.state is TaskState.RUNNING:
                    try:
                        await self._commit_once()
                    except RecordRefused as refusal:
                        await self._judge_again((refusal, *refusal.also))
                    except ClockBehind:
                        await self._judge_again(())
                    else:
                        break
            finally:
                self._open_for_batches.set()

    async def _commit_once(self) -> None:
        # No await separates these lines, because the sent records, the applied state, and the offset must match.
        position = self.position
        offset = position.offset
        captured = len(self._held)
        self.dirty.clear()
        self._sendable.clear()
        try:
            frozen = self.work.freeze(offset)
            self._session.add(frozen.batches)
            ends = await self._commit_confirmed(position, frozen)
            if not self._may_apply():
                return  # the next owner of the store finds this commit in the changelog
            frozen.apply(ends)
            crashpoints.reached("after_apply")
            for batch in self._held[:captured]:
                self.numbers.settled(batch.timestamps_ms[0], batch.timestamps_ms[-1], len(batch.offsets))
            del self._held[:captured]
            self._refusals = Refusals()
            self.numbers.committed(offset)
            self._committed = offset
            self._send_waiting()
        except (RecordRefused, ClockBehind):
            raise
        except BaseException:
            self._close_now()
            raise
        finally:
            self._sendable.set()

    async def _commit_confirmed(self, position: Position, frozen: Frozen) -> Mapping[TopicPartition, int]:
        """Write the results, confirm that the topics have not changed, and commit the transaction."""
        written = asyncio.ensure_future(self._session.prepare({self.task_id.feeding: position}))
        confirmed = asyncio.ensure_future(self._committing.confirm())
        try:
            ends = await written
            await confirmed
            frozen.confirm(self._session.append_time_ms)
            if self.state is TaskState.RUNNING:
                # If the task was closed in the meantime, the session has forgotten responses that may be refusals.
                await self._session.end()
        finally:
            for each in (written, confirmed):
                each.cancel()
            await asyncio.gather(written, confirmed, return_exceptions=True)
        return ends

    def _may_apply(self) -> bool:
        """Return whether the task is running; the task may have been closed while its commit was in flight."""
        return self.state is TaskState.RUNNING

    async def _judge_again(self, refused: Sequence[RecordRefused]) -> None:
        """Judge all records since the last commit again, and send replacements for refused records."""
        self.numbers.aborted += 1
        self._open_for_batches.clear()
        self._sendable.clear()
        try:
            if refused:
                self._learn(refused)
            await self._session.open()
            await self._refuse_if_overtaken()
            for topic, partition in sorted({(each.topic, each.partition) for each in refused if each.too_large}):
                await self.work.collector.limits.look_again(TopicPartition(topic, partition))
            self._judge_held_again()
        except BaseException:
            # A waiting call to `close` must not commit an offset without the state that belongs to it.
            self._close_now()
            raise
        finally:
            self._sendable.set()

    def _learn(self, refused: Sequence[RecordRefused]) -> None:
        """Remember refused records; raise RecordRefused if nothing is left to send in place of one of them."""
        more = f", and {len(refused) - 1} more batches" if len(refused) > 1 else ""
        text = "%s: %s%s. Records from offset %s on are judged again, with replacements for refused records."
        log.warning(text, self.task_id, refused[0], more, self._committed)
        for each in refused:
            offset = self._refusals.learn(each, self.work.collector.side_topics)
            if offset is not None:
                feeding = self.task_id.feeding
                raise RecordRefused(
                    f"{each}. The record is offset {offset} of {feeding}. It was refused before, and now its dead "
                    f"letter is refused, so no topic accepts it. Nothing was committed past it; give {each.topic!r} a "
                    "larger max.message.bytes, or name another dead_letter topic, and restart.",
                    topic=each.topic,
                    partition=each.partition,
                    rows=each.rows,
                )

    def _judge_held_again(self) -> None:
        self.work.discard()
        self._waiting.clear()
        self._waiting_records = 0
        held, self._held = self._held, []
        if held:
            self.next_offset = held[0].offsets[0]
        for batch in held:
            self._judge(batch)
        self._send_waiting()

    async def _refuse_if_overtaken(self) -> None:
        """Raise TaskMigrated if another owner has committed, because this task may be a zombie."""
        committed = await committed_offset(self._wire, self._committing.group, self.task_id.feeding)
        if committed != self._committed or await self.work.overtaken():
            raise TaskMigrated(
                f"{self.task_id}: another owner has committed since our last commit; this task is discarded and the "
                f"worker rejoins the group."
            )

    def _close_now(self) -> None:
        if self.state is not TaskState.CLOSED:
            self._move(TaskState.CLOSED)
            self.dirty.clear()
            self.work.discard()
            self.work.close()

    async def close(self, *, drain: bool) -> None:
        """Release the task's store and session. If ``drain`` is True, first commit everything judged so far."""
        try:
            if drain and self.state is TaskState.RUNNING:
                await self.commit()
        finally:
            self._close_now()
            await self._session.drop()
