"""Manages the tasks of a worker, which are opened on assignment, committed at intervals, and closed on revocation."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dedup.errors import CommitUnknown, InvariantBroken, TaskCorrupted, TaskMigrated
from dedup.kafka.record_batch import FeedBatch
from dedup.kafka.wire import Position, TopicPartition
from dedup.metrics import Place, TaskNumbers
from dedup.worker.task import Task, TaskState

log: Final = logging.getLogger(__name__)
CANCEL_AGAIN_S: Final = 0.5
_TASK_INTERVAL_S: Final = 0.0075
"""Commit interval per busy task. A transaction costs 0.7-1.5 ms of CPU, so commits take at most a fifth of a core."""
_LONGEST_INTERVAL_S: Final = 1.0
"""The maximum commit interval. Readers wait while a transaction is open, and the broker aborts it after its timeout."""
_LEAST_REST: Final = 0.5
"""Share of the commit interval that is reserved for judging, regardless of how long the last commit took."""
_MOST_RESTORES: Final = 2
FIRST_PAUSE_S: Final = 0.2
"""The pause before a task whose commit got no response is rebuilt; it doubles until a commit succeeds."""
LONGEST_PAUSE_S: Final = 10.0
Build = Callable[[TopicPartition], Task]


async def ended(loops: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these asyncio tasks and wait until all of them have ended.

    Each task is canceled repeatedly, because an aiokafka client that is closing may swallow a cancellation.
    """
    left = {loop for loop in loops if not loop.done()}
    while left:
        for loop in left:
            loop.cancel()
        left = (await asyncio.wait(left, timeout=CANCEL_AGAIN_S))[1]


class Membership(Protocol):
    """The consumer group member that reads partitions on behalf of the tasks."""

    def begin(self, feeding: TopicPartition, position: Position) -> int:
        """Start to read a partition at a position, and return a number that identifies this reading."""

    def halt(self, feeding: TopicPartition) -> None:
        """Stop reading a partition until `begin` is called for it."""

    def rejoin(self) -> None:
        """Ask the group for a new assignment."""

    async def is_member(self) -> bool | None:
        """Return whether this worker is still a member of the group, or None if the coordinator does not respond."""


@dataclass(slots=True)
class Outage:
    """Counts how often a partition's task has been rebuilt since the last commit."""

    tries: int = 0
    since_s: float = 0.0
    """Monotonic time of the first failure since the last commit."""

    def next_pause_s(self, now_s: float) -> float:
        """Count an attempt to rebuild the task, and return how long to wait before this attempt."""
        if not self.tries:
            self.since_s = now_s
        self.tries += 1
        return min(FIRST_PAUSE_S * (1 << min(self.tries - 1, 10)), LONGEST_PAUSE_S)


class TaskManager:
    """Maps feeding partitions to tasks, and runs the loops that start the tasks and make them commit."""

    def __init__(
        self,
        build: Build,
        wipe: Callable[[TopicPartition], None],
        member: Callable[[], Membership],
        *,
        commit_interval_ms: int,
    ) -> None:
        """``member`` returns the group member that reads partitions on behalf of the tasks."""
        self._build: Final = build
        self._wipe: Final = wipe
        self._commit_interval_s: Final = commit_interval_ms / 1000
        self._tasks: dict[TopicPartition, Task] = {}
        self._loops: dict[TopicPartition, asyncio.Task[None]] = {}
        self._lives: dict[TopicPartition, int] = {}
        """Maps each partition to the number from `Membership.begin`; batches with other numbers are dropped."""
        self._member: Final = member
        self._damaged: Final[Counter[TopicPartition]] = Counter()
        self.fenced = 0
        self.corrupted = 0
        self.ended: Final[dict[Place, TaskNumbers]] = {}
        """The counters of closed tasks."""
        self.opened: Final = asyncio.Event()
        """Set while there is an assignment, even an empty one."""
        self.failure: Final[asyncio.Future[BaseException]] = asyncio.get_running_loop().create_future()
        """Completed with the error when an error must stop the worker."""

    @property
    def running(self) -> Mapping[TopicPartition, Task]:
        """Maps each feeding partition to its open task, in any state."""
        return self._tasks

    def open(self, feeding: Iterable[TopicPartition]) -> None:
        """Build a task for each partition and start it in the background."""
        if self._tasks:
            raise InvariantBroken(f"tasks of an older assignment are still open: {sorted(self._tasks)}.")
        for partition in sorted(feeding):
            self._tasks[partition] = self._build(partition)
            self._loops[partition] = asyncio.create_task(self._live(partition), name=f"task {partition}")
        self.opened.set()

    async def process_all(self, batches: AsyncIterable[FeedBatch]) -> None:
        """Pass each batch to its task, in order; Faust runs `process_all` as the body of each agent."""
        async for batch in batches:
            await self.process(batch)
            # Judging never yields to the event loop, so a commit in flight would wait for the whole queue.
            await asyncio.sleep(0)

    async def process(self, batch: FeedBatch) -> None:
        """Pass a batch to its task. Drop the batch if its partition was revoked in the meantime."""
        task = self._tasks.get(batch.feeding)
        if task is None or batch.life != self._lives.get(batch.feeding):
            return
        try:
            await task.process(batch)
        except TaskCorrupted as error:
            await self._heal(batch.feeding, task, error)
        except Exception as error:
            self.fail(error)
            raise

    async def _live(self, partition: TopicPartition) -> None:
        """Run a partition's task; on an error, rebuild it, restore its state, rejoin the group, or stop the worker."""
        outage = Outage()
        try:
            while True:
                try:
                    await self._start(partition, outage)
                    await self._commit_by_the_clock(self._tasks[partition], outage)
                except CommitUnknown as error:
                    await self._build_again(partition, error, outage)
                else:
                    return
        except TaskMigrated as error:
            log.warning("%s: %s", partition, error)
            self.fenced += 1
            task = self._tasks.get(partition)
            if task is not None:
                await task.close(drain=False)
                self._member().rejoin()
        except TaskCorrupted as error:
            await self._heal(partition, self._tasks[partition], error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  # the worker must stop on any error
            self.fail(error)

    async def _build_again(self, partition: TopicPartition, error: CommitUnknown, outage: Outage) -> None:
        """Build a new task for the partition after a pause, while other tasks continue.

        Raises ``error`` if this worker has left the group, because a new task would fence the partition's new owner.
        """
        member, task = self._member(), self._tasks.get(partition)
        if task is None:
            raise error  # the assignment has ended, so no new task is built
        member.halt(partition)
        await task.close(drain=False)
        if not outage.tries:
            log.warning("%s: %s Only this partition waits; it is retried until it commits.", partition, error)
        counted_in: bool | None = None
        while counted_in is None:
            await asyncio.sleep(outage.next_pause_s(time.monotonic()))
            counted_in = await member.is_member()
        if not counted_in or self._loops.get(partition) is not asyncio.current_task():
            raise error
        self._replace(partition, task)

    def _replace(self, partition: TopicPartition, task: Task) -> None:
        self._keep_counters(task, partition)
        self._tasks[partition] = self._build(partition)

    async def _start(self, partition: TopicPartition, outage: Outage) -> None:
        for attempt in range(1, _MOST_RESTORES + 1):
            task = self._tasks[partition]
            try:
                offset = await task.start()
            except TaskCorrupted as error:
                await task.close(drain=False)
                if attempt == _MOST_RESTORES:
                    raise
                log.warning("%s: %s", task.task_id, error)
                self.corrupted += 1
                self._wipe(partition)
                self._replace(partition, task)
            else:
                text = "%s: running from offset %d, epoch %d, after %d changelog records"
                if not outage.tries:
                    log.info(text, task.task_id, offset, task.epoch, task.numbers.restored)
                self._lives[partition] = self._member().begin(partition, task.position)
                return

    async def _heal(self, partition: TopicPartition, task: Task, error: TaskCorrupted) -> None:
        """Delete damaged local state and rejoin the group to restore the state; repeated damage stops the worker."""
        await task.close(drain=False)
        self.corrupted += 1
        self._damaged[partition] += 1
        if self._damaged[partition] >= _MOST_RESTORES:
            self.fail(error)
            return
        log.warning("%s: %s", task.task_id, error)
        if self._tasks.get(partition) is not task:
            return  # the next assignment's task has opened the directory by now, and finds the damage itself
        self._wipe(partition)
        self._member().rejoin()

    async def _commit_by_the_clock(self, task: Task, outage: Outage) -> None:
        begun = -math.inf
        while task.state is TaskState.RUNNING:
            await task.dirty.wait()
            interval_s = self._interval_s()
            await asyncio.sleep(max(begun + interval_s - time.monotonic(), _LEAST_REST * interval_s))
            begun = time.monotonic()
            await task.commit()
            task.numbers.commits.add(time.monotonic() - begun)
            if outage.tries:
                log.info("%s: commits succeed again, after %.1f s", task.task_id, time.monotonic() - outage.since_s)
                outage.tries = 0

    def _interval_s(self) -> float:
        """Return the commit interval, which is longer if many tasks are busy, so that commits do not use up the CPU."""
        busy = sum(1 for task in self._tasks.values() if task.dirty.is_set())
        return max(self._commit_interval_s, min(_TASK_INTERVAL_S * busy, _LONGEST_INTERVAL_S))

    def fail(self, error: BaseException) -> None:
        """Make the worker stop with this error; later errors are ignored."""
        if not self.failure.done():
            self.failure.set_result(error)

    async def close_all(self, *, drain: bool) -> None:
        """Close every task, even if its commit fails; ``drain`` says whether to commit the judged records first."""
        drain = drain and not self.failure.done()
        self.opened.clear()
        self._lives.clear()
        loops, self._loops = self._loops, {}
        tasks, self._tasks = self._tasks, {}
        for partition, loop in loops.items():
            # A task that is not running has nothing to drain, and must not start after it was closed.
            if tasks[partition].state is not TaskState.RUNNING:
                loop.cancel()
        results = await asyncio.gather(*[task.close(drain=drain) for task in tasks.values()], return_exceptions=True)
        await ended(loops.values())
        for (partition, task), result in zip(tasks.items(), results, strict=True):
            self._keep_counters(task, partition)
            if isinstance(result, TaskMigrated):
                log.warning("%s: closed without its last commit: %s", task.task_id, result)
            elif isinstance(result, BaseException):
                self.fail(result)

    def _keep_counters(self, task: Task, partition: TopicPartition) -> None:
        place = (task.task_id.sub_topology, partition.topic, partition.partition)
        self.ended.setdefault(place, TaskNumbers()).add_counters(task.numbers)
