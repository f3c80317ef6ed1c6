"""Implements a task, which processes one feeding partition. A `dedup` task also has a store and a changelog partition.

A task exists for the duration of one assignment. The task judges the records of its feeding partition, and buffers
their sightings until the sightings are committed. The task's `TaskGroup` sends the results and commits them.
Correctness depends on the order of the following steps. First, the group fences the previous owner (InitProducerId).
Then, `start` reads the committed offset, restores the store to the end of the changelog, and returns the offset at
which to start reading. After that, these methods process each batch:

    process(batch)   judges a batch (pure), keeps sightings in the write buffer's open generation, and sends the results
    capture()        freezes the generation and returns the task record, for the transaction that the group now commits
    applied()        applies the generation to the store, after EndTxn

While a commit is in flight, later batches are judged, but their results are sent only after the commit. The store never
contains an uncommitted sighting. After a crash before EndTxn, the broker aborts the transaction. After a crash between
EndTxn and the write to the store, the next owner restores the sightings from the changelog.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from dedup import crashpoints
from dedup.core.event_time import create_time_fault
from dedup.errors import (
    BrokerUnavailable,
    CommitUnknown,
    InvariantBroken,
    RecordRefused,
    StateIncompatible,
    TaskCorrupted,
    TaskMigrated,
)
from dedup.kafka.record_batch import FeedBatch
from dedup.kafka.transactional_producer import DEADLINE_MS
from dedup.kafka.wire import Position, RecordBatch, TopicPartition, Wire, patience
from dedup.metrics import Judged, TaskNumbers
from dedup.store.base import Store
from dedup.worker.offsets import committed_offset, committed_position, refuse_other_topics
from dedup.worker.recent_outcomes import Recent
from dedup.worker.record_collector import RecordCollector, Refusals

log: Final = logging.getLogger(__name__)
_TELL_MS: Final = 1_000
"""The smallest difference from a broker's clock, in ms, that is logged."""
_EVENT_TIME_MS: Final = 60_000
"""A timestamp that is more than this many ms older than the time at which its record became readable counts as an event
time, and the end-to-end latency then begins at the later time. A smaller difference may be a delay of the log: a stuck
follower can hide records for `replica.lag.time.max.ms`, 30 s.
"""
_MOST_WAITING: Final = 16_000
"""The number of records that a task may judge during a commit before the task waits for the end of the commit."""
_MOST_WAITING_BYTES: Final = 64 << 20
"""The size of the records that a task may judge during a commit before the task waits for the end of the commit."""
_LONG_COMMIT_MS: Final = 1_000
"""The maximum time for which a task with enough waiting records blocks the worker's other tasks while it waits for a
commit.
"""


class TaskState(enum.Enum):
    """The states of a task, in the order in which a task passes through them."""

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
    """The identity of a task: its sub-topology and the partition that it reads."""

    sub_topology: str
    feeding: TopicPartition

    def __str__(self) -> str:
        return f"{self.sub_topology} {self.feeding}"


@dataclass(frozen=True, slots=True)
class Frozen:
    """The captured results of a transaction, which are applied after the transaction is committed."""

    batches: list[RecordBatch]
    """The last record batches of the transaction, which contain the task record."""
    apply: Callable[[Mapping[TopicPartition, int]], None]
    """Applies the generation to the store, given the offset after the last record written to each partition."""
    confirm: Callable[[int], None] = lambda _: None
    """Receives the broker's append time of the batches, in ms; raises ClockBehind if that time disproves a verdict."""


@dataclass(frozen=True, slots=True)
class Committing:
    """The settings for committing a task's offset."""

    group: str
    confirm: Callable[[], Awaitable[None]]
    """Raises StateIncompatible if a topic has changed since the process started; see `TopicCheck`."""
    metadata: str = ""
    """The metadata of the committed offset; see `offset_metadata`."""
    pin_start: bool = False
    """True if the task commits its starting position at once, because `start` may lead to another offset after a crash.
    """


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SteadyClock:
    """The tasks' clock, which never goes backward and is never behind a time that a broker has reported.

    The clock adds the elapsed time to the wall-clock time of its creation. The boot clock measures the elapsed time,
    because the monotonic clock stops while the machine is suspended. When a broker reports that it appended a batch at
    a later time than the clock shows, the clock advances to that time.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - _since_boot_s()
        self.put_forward_ms = 0
        """The total number of milliseconds by which brokers' times have advanced the clock."""

    def now_ms(self) -> int:
        """Return a time in ms since 1970 that never decreases and ignores later changes to the wall clock."""
        return int((self._offset_s + _since_boot_s()) * 1000)

    def heard(self, broker_ms: int) -> None:
        """If the clock is behind the broker's time, advance the clock, and log a difference of 1 s or more."""
        behind_ms = broker_ms - self.now_ms()
        if behind_ms <= 0:
            return
        self._offset_s += behind_ms / 1000
        self.put_forward_ms += behind_ms
        if behind_ms >= _TELL_MS:
            log.warning(
                "this machine's clock is %d ms behind the broker's: from now on, future event times are judged by "
                "the broker's clock. Check the machine's time synchronization.",
                behind_ms,
            )


class TaskWork(abc.ABC):
    """Processes records for one kind of task and keeps the task's state, but commits nothing."""

    def __init__(
        self,
        wire: Wire,
        collector: RecordCollector,
        clock: SteadyClock,
        numbers: TaskNumbers,
        *,
        by_arrival: bool = False,
    ) -> None:
        self.by_arrival: Final = by_arrival
        """True if the task must stop at a record whose timestamp the broker did not set."""
        self._wire: Final = wire
        self.collector: Final = collector
        self._clock: Final = clock
        self._numbers: Final = numbers
        self._judged = Judged()
        """The verdicts of the open transaction, which are dropped if its records are judged again."""
        self.recent: Final = Recent()
        self.store: Store | None = None
        """The store with the applied state, or None before `restore` and in tasks that keep no state."""

    @abc.abstractmethod
    async def restore(self, committed: int | None, *, own: bool) -> int:
        """Restore the state from the changelog, and return the offset at which to start reading the feeding partition.

        ``own`` is True if a task of this topology committed the offset, in the same transaction as the task's state.
        """

    @abc.abstractmethod
    def judge(self, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch]:
        """Judge a batch, keep its new sightings until they are applied, and return the record batches to send."""

    async def overtaken(self) -> bool:
        """Return, in a new epoch, whether another owner has written state since this task's last commit."""
        return False

    def freeze(self, next_offset: int) -> Frozen:  # noqa: ARG002  # only work that keeps state needs the offset
        """Capture the results of all batches judged so far; later batches belong to the next transaction."""
        judged, self._judged = self._judged, Judged()
        noted = self.recent.freeze()

        def apply(_ends: Mapping[TopicPartition, int]) -> None:
            self._numbers.add_verdicts(judged)
            self.recent.commit(noted)

        return Frozen([], apply)

    def idle(self) -> list[RecordBatch]:
        """Return idle markers, which say that this feed has no new records, or an empty list if none are needed."""
        return []

    def discard(self) -> None:
        """Discard all results that have not been applied to the store."""
        self._judged = Judged()
        self.recent.discard()

    def close(self) -> None:  # noqa: B027  # work without state has nothing to release
        """Release the store."""


class SharedTransaction(Protocol):
    """The part of a `TaskGroup` that its tasks use to share one transaction."""

    dirty: asyncio.Event
    """An event that is set while the transaction contains something to commit."""
    sendable: asyncio.Event
    """An event that is cleared during a commit, because records for the next transaction must not be sent yet."""
    open_for_batches: asyncio.Event
    """An event that is cleared while records are judged again; no batch is added until these records are committed."""

    opened: int
    """The number of times that the group has fenced other owners."""

    def send(self, batches: Sequence[RecordBatch], feeding: TopicPartition) -> None:
        """Add record batches to the transaction; ``feeding`` is the partition whose records they were made from."""

    def give_up(self) -> None:
        """Close every task of the group immediately, so that nothing more is committed in this assignment."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One task's contribution to a transaction that is being committed."""

    task: Task
    position: Position
    held: int
    """The number of batches whose results are in the transaction."""
    frozen: Frozen


class Task:
    """Processes one partition from assignment to revocation. A `TaskGroup` commits the task's results."""

    def __init__(
        self,
        task_id: TaskId,
        committing: Committing,
        transaction: SharedTransaction,
        wire: Wire,
        make_work: Callable[[TaskNumbers], TaskWork],
    ) -> None:
        self.task_id: Final = task_id
        self.feeding: Final = task_id.feeding
        """The partition whose records the task judges."""
        self.numbers: Final = TaskNumbers()
        self.state = TaskState.CREATED
        self.dirty = False
        """True while the task has something to commit."""
        self.damage: TaskCorrupted | None = None
        """The damage that was found in the task's store, or None."""
        self._committing = committing
        self._transaction: Final = transaction
        self._wire: Final = wire
        self.work: Final = make_work(self.numbers)
        """The part of the task that differs between `dedup` and `repartition` tasks."""
        self._refusals = Refusals()
        self.next_offset = 0
        """The feeding offset to commit, which follows the last judged record and the markers after it."""
        self.judged_to = 0
        """The feeding offset that follows the last judged record itself."""
        self._leader_epoch = -1
        """The leader epoch of the record before the next offset, or -1 if it is unknown."""
        self._committed: int | None = None
        """The group's committed offset, as this task last read or wrote it."""
        self._expected = 0
        """The offset at which the next batch from the transport must begin."""
        self._held: list[FeedBatch] = []
        """The judged batches that may still be uncommitted; they are judged again if a record is refused."""
        self._waiting: list[list[RecordBatch]] = []
        """The record batches that wait to be sent, in one list per batch that was judged during a commit."""
        self._waiting_records = 0
        self._waiting_bytes = 0
        self.full = False
        """True during a long commit if enough records wait for its end, so that no more records should be fetched."""
        self._in_flight = False
        """True while the task's results are in a transaction that is being committed."""
        self._ending: StateIncompatible | None = None
        """The error with which the task stops after it has committed all judged records, or None."""
        self._idle_said = False
        """True if idle markers were sent after the task's last capture."""
        self._idle_in_flight = False

    @property
    def position(self) -> Position:
        """The task's `next_offset`, with the leader epoch of the record before that offset."""
        return Position(self.next_offset, self._leader_epoch, self._committing.metadata)

    @property
    def committing(self) -> bool:
        """True while results of this task are being committed."""
        return self._in_flight

    @property
    def all_committed(self) -> bool:
        """True if the task is running and has committed everything that it has judged."""
        return self.state is TaskState.RUNNING and not self.dirty and not self._in_flight

    def _move(self, state: TaskState) -> None:
        if state not in MOVES[self.state]:
            raise InvariantBroken(f"{self.task_id}: a {self.state.value} task cannot become {state.value}.")
        self.state = state

    async def start(self) -> int:
        """Restore the state, and return the offset at which to start reading. The task's group must already be open.

        After raising TaskCorrupted, `start` can be called again. If the task's group is closed during the call, the
        task does not start to run. Raises StateIncompatible, TaskCorrupted, CommitUnknown, or BrokerUnavailable; see
        `dedup.errors`.
        """
        if self.state is TaskState.CREATED:
            self._move(TaskState.RESTORING)
        try:
            while self.state is TaskState.RESTORING:
                opened = self._transaction.opened
                await self._restore()
                if self._transaction.opened == opened:
                    break
                # The group was opened again and may have fenced another owner, whose commits must be restored, too.
                self.work.close()
        except BaseException:
            self.work.close()
            raise
        if self.state is not TaskState.RESTORING:
            self.work.close()
            return self.next_offset
        self._move(TaskState.RUNNING)
        if self._committed is None and self._committing.pin_start:
            self._soil()
        return self.next_offset

    async def _restore(self) -> None:
        # This process may have been frozen during a reset, so its disk may hold the state of another changelog.
        await self._committing.confirm()
        # The offset is not taken from aiokafka, which reads the offset before the previous owner is fenced.
        found = await committed_position(self._wire, self._committing.group, self.feeding)
        if found is not None:
            refuse_other_topics(found.metadata, self._committing.metadata, self.feeding)
        committed = self._committed = None if found is None else found.offset
        crashpoints.reached("after_committed_offset")
        own = found is not None and bool(found.metadata) and found.metadata == self._committing.metadata
        self.next_offset = self._expected = self.judged_to = await self.work.restore(committed, own=own)
        if found is not None and found.offset == self.next_offset:
            self._leader_epoch = found.leader_epoch
        crashpoints.reached("after_restore")
        if self.numbers.committed_offset is None:
            self.numbers.last_commit_s = time.monotonic()  # a task cannot commit during a restore
        self.numbers.committed_offset = self.next_offset

    def _soil(self) -> None:
        self.dirty = True
        self._transaction.dirty.set()

    async def process(self, batch: FeedBatch) -> float:
        """Judge a batch and add the resulting records to the group's transaction.

        Returns the time, in seconds, for which judging blocked the event loop.
        """
        blocked_s = 0.0
        if self.state is not TaskState.RUNNING or self._ending is not None:
            return blocked_s  # the task was revoked or is ending, and the partition's next owner reads these records
        if batch.follows != self._expected:
            raise InvariantBroken(
                f"{self.task_id}: a batch arrived that follows offset {batch.follows}, but the last one ended at "
                f"{self._expected}: a batch in between was lost on its way through the agent. The worker stops; "
                f"nothing was committed past offset {self.next_offset}."
            )
        self._expected = batch.next_offset
        fresh = self._not_yet_judged(batch)
        await self._transaction.open_for_batches.wait()
        if fresh is not None and self.state is TaskState.RUNNING:
            begun_s = time.monotonic()
            self._take(fresh)
            blocked_s = time.monotonic() - begun_s
            enough = self._waiting_records >= _MOST_WAITING or self._waiting_bytes >= _MOST_WAITING_BYTES
            if enough and not self.full:
                self.full = not await self._commit_ends()
        return blocked_s

    async def _commit_ends(self) -> bool:
        """Wait at most `_LONG_COMMIT_MS` for the commit in flight, and return whether the commit has ended."""
        sendable = self._transaction.sendable
        waits = {asyncio.ensure_future(sendable.wait()), asyncio.ensure_future(self._wire.pause(_LONG_COMMIT_MS))}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return sendable.is_set()

    def _take(self, batch: FeedBatch) -> None:
        try:
            known = self._with_append_times(batch) if self.work.by_arrival else batch
            if known.offsets:
                with self.noting_damage():
                    self._judge(known)
            elif known.next_offset > self.next_offset:
                # The batch has only markers and aborted records. Committing the offset after them matters: if retention
                # deleted them first, the log would begin after the committed offset, as if records had been lost.
                self.next_offset, self._leader_epoch = known.next_offset, known.leader_epoch
                self._soil()
            if self._ending is not None and self.all_committed:
                raise self._ending
            if self._transaction.sendable.is_set():
                self.send_waiting()
        except BaseException:
            # The commit loop must not commit the part of the batch that may already be buffered or sent.
            self._transaction.give_up()
            raise

    def _with_append_times(self, batch: FeedBatch) -> FeedBatch:
        """Return the records before the first record without a broker-set timestamp, and set `_ending` if such a record
        exists.
        """
        created = batch.first_created()
        if created is None:
            return batch
        self._ending = StateIncompatible(create_time_fault(self.feeding.topic, f"{self.feeding} offset {created}"))
        return batch.below_offset(created)

    @contextmanager
    def noting_damage(self) -> Iterator[None]:
        """Set `damage` if the ``with`` block finds the task's store damaged. A damaged store must be deleted."""
        try:
            yield
        except TaskCorrupted as damage:
            self.damage = damage
            raise

    def _not_yet_judged(self, batch: FeedBatch) -> FeedBatch | None:
        # The group's offset may be stale, expired, or deleted, but the task record says which records were already
        # judged.
        fresh = batch.from_offset(self.next_offset)
        if fresh is not batch:
            self.numbers.replayed += len(batch) - len(fresh)
        return fresh if fresh.next_offset > self.next_offset else None

    def _judge(self, batch: FeedBatch) -> None:
        self._held.append(batch)
        self._waiting.append(self.work.judge(batch, self._refusals))
        self._waiting_records += len(batch.offsets)
        if not self._transaction.sendable.is_set():
            self._waiting_bytes += batch.size_bytes()
        self.next_offset, self._leader_epoch = batch.next_offset, batch.leader_epoch
        self.judged_to = batch.offsets[-1] + 1
        self._soil()

    def say_idle(self) -> bool:
        """Send this feed's idle markers and return True, or return False if the task has uncommitted results."""
        if not self.all_committed:
            return False
        self._mark_idle()
        if self._transaction.sendable.is_set():
            self.send_waiting()
        return True

    def _mark_idle(self) -> None:
        self._waiting.append(self.work.idle())
        self._idle_said = True
        self._soil()

    def send_waiting(self) -> None:
        """Send the results of all batches that were judged while a commit was in flight."""
        for batches in self._waiting:
            self._transaction.send(batches, self.feeding)
        self._waiting.clear()
        self._waiting_records = self._waiting_bytes = 0
        self.full = False

    def capture(self) -> Captured:
        """Capture everything that was judged so far, for the transaction that the group is about to commit."""
        self.dirty, self._in_flight = False, True
        self._idle_said, self._idle_in_flight = False, self._idle_said
        position = self.position
        with self.noting_damage():
            return Captured(self, position, len(self._held), self.work.freeze(position.offset))

    def applied(self, captured: Captured, ends: Mapping[TopicPartition, int]) -> None:
        """Apply captured results to the store after the commit of their transaction."""
        with self.noting_damage():
            captured.frozen.apply(ends)
        crashpoints.reached("after_apply")
        for batch in self._held[: captured.held]:
            times_ms, since_ms = batch.timestamps_ms, batch.readable_after_ms
            oldest_ms, newest_ms = (
                since_ms if since_ms - time_ms > _EVENT_TIME_MS else time_ms for time_ms in (times_ms[0], times_ms[-1])
            )
            self.numbers.settled(oldest_ms, newest_ms, len(times_ms))
        del self._held[: captured.held]
        self._refusals = Refusals()
        self.numbers.committed(captured.position.offset)
        self._committed = captured.position.offset
        self._in_flight = self._idle_in_flight = False
        if self._ending is not None and self.all_committed:
            raise self._ending

    def learn(self, refusals: Sequence[RecordRefused]) -> None:
        """Note which batches brokers refused. Raises RecordRefused if a refused record has no replacement left."""
        # A flow may have made records for several partitions from one record, and brokers may refuse all of them at
        # once.
        before = frozenset(self._refusals.rows)
        for refused in refusals:
            offset = self._refusals.learn(refused, self.work.collector.side_topics, before)
            if offset is None:
                continue
            raise RecordRefused(
                f"{refused}. The record is offset {offset} of {self.feeding}. It was refused before, and now its dead "
                f"letter is refused, so no topic accepts it. Nothing was committed past it; give {refused.topic!r} a "
                "larger max.message.bytes, or name another dead_letter topic, and restart.",
                topic=refused.topic,
                partition=refused.partition,
                rows=refused.rows,
            )

    async def refuse_if_overtaken(self) -> None:
        """Raise TaskMigrated if another owner has committed since this task's last commit.

        Raises CommitUnknown if brokers do not respond in time. A worker that is told to stop waits for this method.
        """
        try:
            with patience(DEADLINE_MS / 1000), self.noting_damage():
                committed = await committed_offset(self._wire, self._committing.group, self.feeding)
                if committed == self._committed and not await self.work.overtaken():
                    return
        except BrokerUnavailable as error:
            why = error.__cause__ or error
            raise CommitUnknown(
                f"{self.task_id}: no broker says whether another owner has committed since the last commit: {why}."
            ) from error
        raise TaskMigrated(f"{self.task_id}: another owner has committed since this task's last commit.")

    def judge_again(self) -> None:
        """Judge all records since the last commit again, and send the results in the group's new epoch."""
        self.numbers.aborted += self._in_flight or self.dirty
        self.work.discard()
        self._waiting.clear()
        self._waiting_records = self._waiting_bytes = 0
        # The aborted transaction may have contained nothing but an offset or idle markers.
        unfinished, idle = self._in_flight or self.dirty, self._idle_said or self._idle_in_flight
        self._in_flight = self._idle_in_flight = False
        held, self._held = self._held, []
        end = self.next_offset, self._leader_epoch
        if held:
            self.next_offset = held[0].offsets[0]
        with self.noting_damage():
            for batch in held:
                self._judge(batch)
        self.next_offset, self._leader_epoch = end  # markers may follow the last record
        if idle:
            self._mark_idle()
        if unfinished:
            self._soil()
        self.send_waiting()

    def close_now(self) -> None:
        """Discard all uncommitted results, and release the store. If `start` is running, `start` releases the store
        instead.
        """
        if self.state is TaskState.CLOSED:
            return
        restoring = self.state is TaskState.RESTORING
        self._move(TaskState.CLOSED)
        self.dirty = False
        if not restoring:
            self.work.discard()
            self.work.close()
