"""Implements a task group, whose tasks share a transactional ID and are assigned, fenced, and committed together.

A transaction takes a broker several milliseconds, regardless of the number of records. Therefore, n tasks of the same
kind commit in one transaction, which contains the records, the task records, and the offsets of all these tasks:

    open()        fences the previous owner (InitProducerId), once per assignment; each task then starts by itself
    commit()      captures all tasks at once, awaits all sends, adds all offsets, sends EndTxn, and applies all results

A transaction always covers the whole group. If a record is refused, every task of the group judges its uncommitted
records again in a new epoch. If a task fails, the whole group is closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from dedup.errors import ClockBehind, InvariantBroken, RecordRefused
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import RecordBatch, TopicPartition
from dedup.worker.task import Captured, Task, TaskState

log: Final = logging.getLogger(__name__)
Members = tuple[TopicPartition, ...]
"""The feeding partitions of a task group, which identify the group."""


class TaskGroup:
    """The tasks that share one transactional ID, from assignment to revocation."""

    def __init__(
        self,
        session: Session,
        confirm: Callable[[], Awaitable[None]],
        refuse_layout: Callable[[], Awaitable[object]],
        transactions: Counter[str],
    ) -> None:
        """``confirm`` raises StateIncompatible if a topic has changed since the process started; see `TopicCheck`.

        ``refuse_layout`` raises StateIncompatible if the cluster's layout groups the partitions differently.
        ``transactions`` counts the transactions of all groups of the worker, by result.
        """
        self._session: Final = session
        self._confirm = confirm
        self._refuse_layout: Final = refuse_layout
        self._transactions: Final = transactions
        self.tasks: Final[dict[TopicPartition, Task]] = {}
        """Maps each feeding partition to its task."""
        self.closed = False
        self.opened = 0
        """The number of epochs that `open` has begun. With transactions of version 2, each commit also begins an epoch.
        """
        self.dirty = asyncio.Event()
        self.sendable = asyncio.Event()
        self.open_for_batches = asyncio.Event()
        self.sendable.set()
        self.open_for_batches.set()
        self._commit_lock: Final = asyncio.Lock()

    def __str__(self) -> str:
        return self._session.transactional_id

    def add(self, task: Task) -> None:
        """Add a task, which must not have started yet."""
        self.tasks[task.feeding] = task

    @property
    def epoch(self) -> int:
        """The current producer epoch."""
        return self._session.epoch

    async def open(self) -> None:
        """Begin a new epoch, which fences any other owner of the group and ends that owner's open transaction.

        Raises CommitUnknown, BrokerUnavailable, or StateIncompatible; see `dedup.errors`.
        """
        await self._session.open()
        self.opened += 1
        # Either a layout change fences this ID later, or the next line finds that the change has already begun.
        await self._refuse_layout()

    def send(self, batches: Sequence[RecordBatch], feeding: TopicPartition) -> None:
        """Add record batches to the transaction; ``feeding`` is the partition whose records they were made from."""
        self._session.add(batches, feeding)

    async def commit(self) -> None:
        """Commit all results since the last commit, if any, and apply them to the stores.

        If `commit` raises TaskMigrated, CommitUnknown, or TaskCorrupted, the caller must discard the group.
        """
        begun_s = time.monotonic()
        async with self._commit_lock:
            try:
                while self.dirty.is_set() and not self.closed:
                    try:
                        captured = await self._commit_once()
                    except RecordRefused as refusal:
                        await self._judge_again((refusal, *refusal.also))
                    except ClockBehind:
                        await self._judge_again(())
                    else:
                        for each in captured:
                            each.task.numbers.commits.add(time.monotonic() - begun_s)
                        break
            finally:
                self.open_for_batches.set()

    async def _commit_once(self) -> Sequence[Captured]:
        # No await may separate the following lines, because the sent records, the applied state, and the offsets must
        # match.
        self.dirty.clear()
        self.sendable.clear()
        try:
            captured = [task.capture() for task in self.tasks.values() if task.dirty]
            for each in captured:
                self.send(each.frozen.batches, each.task.feeding)
            ends = await self._commit_confirmed(captured)
            self._transactions["committed"] += 1
            if not self._may_apply():
                return ()  # the next owners of the stores read the results from the changelog
            self._apply(captured, ends)
            for task in self.tasks.values():
                task.send_waiting()
        except (RecordRefused, ClockBehind):
            raise
        except BaseException:
            self.give_up()
            raise
        else:
            return captured
        finally:
            self.sendable.set()

    async def _commit_confirmed(self, captured: Sequence[Captured]) -> Mapping[TopicPartition, int]:
        """Write the results, confirm that the topics have not changed, and commit the transaction."""
        positions = {each.task.feeding: each.position for each in captured}
        written = asyncio.ensure_future(self._session.prepare(positions))
        confirmed = asyncio.ensure_future(self._confirm())
        try:
            ends = await written
            await confirmed
            for each in captured:
                each.frozen.confirm(self._session.append_time_ms)
            if not self.closed:
                # If the group was closed in the meantime, the session may have forgotten refusals.
                await self._session.end()
        except BaseException:
            for request in (written, confirmed):
                request.cancel()
            await asyncio.gather(written, confirmed, return_exceptions=True)
            raise
        return ends

    def _may_apply(self) -> bool:
        """Return False if the group was closed during the commit, because its stores may have new owners."""
        return not self.closed

    @staticmethod
    def _apply(captured: Sequence[Captured], ends: Mapping[TopicPartition, int]) -> None:
        """Apply every task's results, even if one of them fails, because all of them have been committed.

        After applying all results, raises the first error, if any. The next owner restores a failed task's results from
        the changelog.
        """
        errors: list[Exception] = []
        for each in captured:
            try:
                each.task.applied(each, ends)
            except Exception as error:  # noqa: BLE001  # the first error is raised below
                errors.append(error)
        if errors:
            raise errors[0]

    async def _judge_again(self, refused: Sequence[RecordRefused]) -> None:
        """Judge all records since the last commit again, and send replacements for refused records."""
        if self.closed:
            return  # a new epoch would fence the next owner
        self._transactions["aborted"] += 1
        self.open_for_batches.clear()
        self.sendable.clear()
        try:
            self._learn(refused)
            await self.open()
            for task in self._running():
                await task.refuse_if_overtaken()
            await self._look_at_limits(refused)
            for task in self._running():
                task.judge_again()
        except BaseException:
            # A waiting `close` call must not commit an offset without the state that belongs to the offset.
            self.give_up()
            raise
        finally:
            self.sendable.set()

    def _running(self) -> list[Task]:
        return [task for task in self.tasks.values() if task.state is TaskState.RUNNING]

    def _learn(self, refused: Sequence[RecordRefused]) -> None:
        """Tell each task which records were refused. Raises RecordRefused if a record has no replacement left."""
        if not refused:
            return
        more = f", and {len(refused) - 1} more batches" if len(refused) > 1 else ""
        text = "%s: %s%s. Records since the last commit are judged again, with replacements for refused records."
        log.warning(text, self, refused[0], more)
        by_task: defaultdict[TopicPartition, list[RecordRefused]] = defaultdict(list)
        for each in refused:
            if each.feeding is None:
                raise InvariantBroken(f"{self}: a batch was refused that no task has sent: {each}")
            by_task[TopicPartition(*each.feeding)].append(each)
        for feeding, own in by_task.items():
            self.tasks[feeding].learn(own)

    async def _look_at_limits(self, refused: Sequence[RecordRefused]) -> None:
        """Refetch `max.message.bytes` for topics that refused a record as too large. All tasks share these limits."""
        too_large = sorted({(each.topic, each.partition) for each in refused if each.too_large})
        for task in self._running()[:1]:
            for topic, partition in too_large:
                await task.work.collector.limits.look_again(TopicPartition(topic, partition))

    def give_up(self) -> None:
        """Close every task of the group at once, so that nothing more is committed in this assignment."""
        self.closed = True
        self.dirty.clear()
        for task in self.tasks.values():
            task.close_now()

    async def close(self, *, drain: bool) -> None:
        """Release the stores and the session. If ``drain`` is True, first commit all results."""
        try:
            if drain and self._running():
                await self.commit()
        finally:
            self.give_up()
            await self._session.drop()
