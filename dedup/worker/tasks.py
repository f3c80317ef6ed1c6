"""The tasks of this worker: opened on assignment, committed by the clock, closed on revocation."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dedup.errors import InvariantBroken, TaskCorrupted, TaskMigrated
from dedup.metrics import Place, TaskNumbers
from dedup.session.wire import TopicPartition
from dedup.worker.batch import FeedBatch
from dedup.worker.task import Task, TaskState

log: Final = logging.getLogger(__name__)
TASK_INTERVAL_S: Final = 0.0075
"""From commit to commit for each busy task: a transaction costs 0.7-1.5 ms of CPU, so commits take about a fifth."""
LONGEST_INTERVAL_S: Final = 1.0
"""A transaction is open meanwhile: readers wait for it, and the broker ends it after its time-out."""
LEAST_REST: Final = 0.5
"""Share of the interval that is judging time, however long the last commit took: commits must not be all there is."""
MOST_RESTORES: Final = 2
Build = Callable[[TopicPartition], Task]
Ready = Callable[[TopicPartition, int], None]


class Tasks:
    """Feeding partition -> task, with the loops that start and commit them."""

    def __init__(self, build: Build, wipe: Callable[[TopicPartition], None], *, commit_interval_ms: int) -> None:
        self._build: Final = build
        self._wipe: Final = wipe
        self._commit_interval_s: Final = commit_interval_ms / 1000
        self._tasks: dict[TopicPartition, Task] = {}
        self._loops: dict[TopicPartition, asyncio.Task[None]] = {}
        self._ready: Ready = _not_connected
        self._rejoin: Callable[[], None] = lambda: None
        self._damaged: Final[Counter[TopicPartition]] = Counter()
        self.fenced = 0
        self.corrupted = 0
        self.ended: Final[dict[Place, TaskNumbers]] = {}
        """What tasks closed by now have counted."""
        self.opened: Final = asyncio.Event()
        """Set while an assignment is in force, be it an empty one."""
        self.failure: Final[asyncio.Future[BaseException]] = asyncio.get_running_loop().create_future()
        """Done when the worker must stop; holds why."""

    def connect(self, ready: Ready, rejoin: Callable[[], None]) -> None:
        """Say who is told that a partition may be read, and who asks for a new assignment."""
        self._ready, self._rejoin = ready, rejoin

    @property
    def running(self) -> Mapping[TopicPartition, Task]:
        """The tasks by feeding partition, whatever their state."""
        return self._tasks

    def open(self, feeding: Iterable[TopicPartition]) -> None:
        """Build a task for each partition and start it in the background."""
        if self._tasks:
            raise InvariantBroken(f"tasks of an older assignment are still open: {sorted(self._tasks)}.")
        for partition in sorted(feeding):
            self._tasks[partition] = self._build(partition)
            self._loops[partition] = asyncio.create_task(self._live(partition), name=f"task {partition}")
        self.opened.set()

    async def process(self, batch: FeedBatch) -> None:
        """Give a batch to its task; a batch of a partition that was revoked meanwhile is dropped unjudged."""
        task = self._tasks.get(batch.feeding)
        if task is None:
            return
        try:
            await task.process(batch)
        except TaskCorrupted as error:
            await self._heal(batch.feeding, task, error)
        except Exception as error:
            self.fail(error)
            raise

    async def _live(self, partition: TopicPartition) -> None:
        """A task's life; every way out of it is an action that the error names."""
        try:
            await self._start(partition)
            await self._commit_by_the_clock(self._tasks[partition])
        except TaskMigrated as error:
            log.warning("%s: %s", partition, error)
            self.fenced += 1
            task = self._tasks.get(partition)
            if task is not None:
                await task.close(drain=False)
                self._rejoin()
        except TaskCorrupted as error:
            await self._heal(partition, self._tasks[partition], error)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  # whatever it is, the worker must not go on without this task
            self.fail(error)

    async def _start(self, partition: TopicPartition) -> None:
        for attempt in range(1, MOST_RESTORES + 1):
            task = self._tasks[partition]
            try:
                offset = await task.start()
            except TaskCorrupted as error:
                await task.close(drain=False)
                if attempt == MOST_RESTORES:
                    raise
                log.warning("%s: %s", task.task_id, error)
                self.corrupted += 1
                self._wipe(partition)
                self._keep_counters(task, partition)
                self._tasks[partition] = self._build(partition)
            else:
                text = "%s: running from offset %d, epoch %d, after %d changelog records"
                log.info(text, task.task_id, offset, task.epoch, task.numbers.restored)
                self._ready(partition, offset)
                return

    async def _heal(self, partition: TopicPartition, task: Task, error: TaskCorrupted) -> None:
        """Throw damaged local state away and rejoin, so that it is restored; a partition damaged again stops us."""
        await task.close(drain=False)
        self.corrupted += 1
        self._damaged[partition] += 1
        if self._damaged[partition] >= MOST_RESTORES:
            self.fail(error)
            return
        log.warning("%s: %s", task.task_id, error)
        self._wipe(partition)
        self._rejoin()

    async def _commit_by_the_clock(self, task: Task) -> None:
        begun = -math.inf
        while task.state is TaskState.RUNNING:
            await task.dirty.wait()
            interval_s = self._interval_s()
            await asyncio.sleep(max(begun + interval_s - time.monotonic(), LEAST_REST * interval_s))
            begun = time.monotonic()
            await task.commit()
            task.numbers.took(time.monotonic() - begun)

    def _interval_s(self) -> float:
        """The commit interval, stretched where so many tasks are busy that commits would eat the core."""
        busy = sum(1 for task in self._tasks.values() if task.dirty.is_set())
        return max(self._commit_interval_s, min(TASK_INTERVAL_S * busy, LONGEST_INTERVAL_S))

    def fail(self, error: BaseException) -> None:
        """Stop the worker for this reason; only the first counts."""
        if not self.failure.done():
            self.failure.set_result(error)

    async def close_all(self, *, drain: bool) -> None:
        """End every task; with ``drain``, what was judged is committed first. Tasks that fail to drain are dropped."""
        drain = drain and not self.failure.done()
        self.opened.clear()
        loops, self._loops = self._loops, {}
        tasks, self._tasks = self._tasks, {}
        for partition, loop in loops.items():
            # It has nothing to drain, and must not come to life after it was closed.
            if tasks[partition].state is not TaskState.RUNNING:
                loop.cancel()
        results = await asyncio.gather(*[task.close(drain=drain) for task in tasks.values()], return_exceptions=True)
        for loop in loops.values():
            loop.cancel()
        await asyncio.gather(*loops.values(), return_exceptions=True)
        for (partition, task), result in zip(tasks.items(), results, strict=True):
            self._keep_counters(task, partition)
            if isinstance(result, TaskMigrated):
                log.warning("%s: closed without its last commit: %s", task.task_id, result)
            elif isinstance(result, BaseException):
                self.fail(result)

    def _keep_counters(self, task: Task, partition: TopicPartition) -> None:
        place = (task.task_id.sub_topology, partition.topic, partition.partition)
        self.ended.setdefault(place, TaskNumbers()).add_counters(task.numbers)


def _not_connected(partition: TopicPartition, _offset: int) -> None:
    raise InvariantBroken(f"{partition} became ready before the consumer was connected to the tasks.")
