"""Manages a worker's task groups, which open on assignment, commit at intervals, and close on revocation."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dedup.errors import CommitUnknown, StateIncompatible, TaskCorrupted, TaskMigrated
from dedup.kafka.outage_lines import BACK, Gathered
from dedup.kafka.record_batch import FeedBatch
from dedup.kafka.wire import Position, TopicPartition
from dedup.metrics import Place, TaskNumbers
from dedup.worker.task import Task, TaskState
from dedup.worker.task_group import Members, TaskGroup

log: Final = logging.getLogger(__name__)
CANCEL_AGAIN_S: Final = 0.5
_GROUP_INTERVAL_S: Final = 0.0075
"""The commit interval, in seconds, is at least this value times the number of busy groups, up to 1 s. A commit takes
0.7 to 1.5 ms of CPU time, so all commits together use at most a fifth of a core.
"""
_LONGEST_INTERVAL_S: Final = 1.0
"""The longest commit interval for busy groups, because open transactions delay readers and may time out."""
_LEAST_REST: Final = 0.5
"""The share of the commit interval that is reserved for judging, no matter how long the last commit took."""
_LONG_BATCH_S: Final = 0.25
_REST: Final = 0.1
"""If judging a batch blocks the event loop for more than `_LONG_BATCH_S` seconds, for example in a slow flow, the agent
pauses for this share of that time. Commits and heartbeats continue during the pause.
"""
_MOST_RESTORES: Final = 2
FIRST_PAUSE_S: Final = 0.2
"""The first pause, in seconds, before a task group whose commit got no response is rebuilt. The pause doubles with each
attempt, up to `LONGEST_PAUSE_S`, until a commit succeeds.
"""
LONGEST_PAUSE_S: Final = 3.0
_REJOINS: Final = "The task is discarded, and the worker rejoins the group."
_MOST_NAMED: Final = 8
"""The maximum number of task groups that one log line names."""


async def ended(loops: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the given asyncio tasks, and wait until all of them have ended.

    Each task is canceled repeatedly, because an aiokafka client that is closing may swallow a cancellation.
    """
    left = {loop for loop in loops if not loop.done()}
    while left:
        for loop in left:
            loop.cancel()
        left = (await asyncio.wait(left, timeout=CANCEL_AGAIN_S))[1]


class Membership(Protocol):
    """The consumer group member that reads partitions on behalf of the tasks."""

    rebalancing: bool
    """True during a rebalance. A partition's new owner may then fence the old task before this worker closes that task.
    """

    def begin(self, feeding: TopicPartition, position: Position) -> int:
        """Start reading a partition at a position, and return a number that identifies the batches read from there."""

    def halt(self, feeding: TopicPartition) -> None:
        """Stop reading a partition until `begin` is called for the partition."""

    def rejoin(self) -> None:
        """Ask the consumer group for a new assignment."""

    async def is_member(self) -> bool | None:
        """Return whether this worker is still a member of the group, or None if the coordinator does not respond."""


@dataclass(slots=True)
class Outage:
    """Counts how often a task group was rebuilt since its last commit."""

    tries: int = 0
    since_s: float = 0.0
    """The monotonic time, in seconds, of the first failure since the last commit."""
    answered: bool = False
    """True if brokers have answered since the last failure, even if nothing was committed yet."""

    def next_pause_s(self, now_s: float) -> float:
        """Count an attempt to rebuild the task group, and return the pause before this attempt, in seconds."""
        if not self.tries:
            self.since_s = now_s
        self.tries += 1
        self.answered = False
        return min(FIRST_PAUSE_S * (1 << min(self.tries - 1, 10)), LONGEST_PAUSE_S)


class Factory(Protocol):
    """Builds the task groups of a topology; see `TaskFactory`."""

    def grouped(self, feeding: Iterable[TopicPartition]) -> list[Members]:
        """Return the feeding partitions, one tuple per task group. Raises InvariantBroken if a group is incomplete."""

    def build(self, members: Members) -> TaskGroup:
        """Return a new task group with one task for each feeding partition in ``members``."""

    def wipe(self, feeding: TopicPartition) -> None:
        """Delete the local state of a feeding partition's task."""


class TaskManager:
    """Keeps the open tasks by feeding partition, and runs the loops that start the task groups and commit them."""

    def __init__(self, factory: Factory, member: Callable[[], Membership], *, commit_interval_ms: int) -> None:
        """``member`` returns the group member that reads partitions on behalf of the tasks."""
        self._factory: Final = factory
        self._commit_interval_s: Final = commit_interval_ms / 1000
        self._groups: dict[Members, TaskGroup] = {}
        self._tasks: dict[TopicPartition, Task] = {}
        self._loops: dict[Members, asyncio.Task[None]] = {}
        self._lives: dict[TopicPartition, int] = {}
        """Maps each partition to the number from `Membership.begin`; batches with another number are dropped."""
        self._member: Final = member
        self._waiting: Final[dict[Members, Outage]] = {}
        """The task groups whose last commit got no response."""
        self._recovered: Final = asyncio.Event()
        """An event that is set when a group's commits succeed again, so that the other groups stop waiting."""
        self._waits: Final = Gathered(self._say_waits)
        self._goes_on: Final = Gathered(self._say_goes_on)
        self._damaged: Final[Counter[TopicPartition]] = Counter()
        self.fenced = 0
        self.corrupted = 0
        self._ended: Final[dict[Place, TaskNumbers]] = {}
        """Maps each sub-topology, topic, and partition to the total counters of its closed tasks."""
        self._closing: Final[list[TaskGroup]] = []
        """The task groups that are being closed. A last commit may still increase their counters."""
        self.opened: Final = asyncio.Event()
        """An event that is set while there is an assignment, even an empty one."""
        self.failure: Final[asyncio.Future[BaseException]] = asyncio.get_running_loop().create_future()
        """A future that is completed with the first error that must stop the worker."""

    @property
    def running(self) -> Mapping[TopicPartition, Task]:
        """Maps each feeding partition to its open task, in any state."""
        return self._tasks

    @property
    def ended(self) -> Mapping[Place, TaskNumbers]:
        """Maps each sub-topology, topic, and partition to the total counters of its closed and closing tasks."""
        counted: dict[Place, TaskNumbers] = {}
        for place, numbers in itertools.chain(self._ended.items(), *map(_placed, self._closing)):
            counted.setdefault(place, TaskNumbers()).add_counters(numbers)
        return counted

    @property
    def unanswered_since_s(self) -> float | None:
        """The monotonic time, in seconds, at which brokers stopped giving a task group usable answers, or None."""
        return min((each.since_s for each in self._waiting.values() if not each.answered), default=None)

    async def assign(self, feeding: Iterable[TopicPartition]) -> None:
        """Close the task groups of partitions outside ``feeding``, and start those of ``feeding`` that are not open.

        An open task group that stays assigned continues. A fenced group is no longer open, so it is started again. The
        groups that are closed do not commit again, because their new owners may already have fenced them.
        """
        wanted = self._factory.grouped(feeding)
        await self._close(self._groups.keys() - set(wanted), drain=False)
        for members in wanted:
            if members not in self._groups:
                self._build(members)
                self._loops[members] = asyncio.create_task(self._live(members), name=f"tasks of {members[0]}")
        self.opened.set()

    def _build(self, members: Members) -> None:
        group = self._groups[members] = self._factory.build(members)
        self._tasks.update(group.tasks)

    async def process_all(self, batches: AsyncIterable[FeedBatch]) -> None:
        """Pass each batch to its task, in order; Faust runs `process_all` as the body of each agent."""
        async for batch in batches:
            blocked_s = await self.process(batch)
            # Judging never yields to the event loop. Without this line, a commit in flight would wait for the whole
            # queue. After a long batch, one turn of the loop is not enough, because a commit takes many turns, and
            # another long batch would delay each turn.
            await asyncio.sleep(_REST * blocked_s if blocked_s > _LONG_BATCH_S else 0)

    async def process(self, batch: FeedBatch) -> float:
        """Pass a batch to its task, or drop the batch if its partition has been revoked since the fetch.

        Returns the time, in seconds, for which judging blocked the event loop.
        """
        task = self._tasks.get(batch.feeding)
        if task is None or batch.life != self._lives.get(batch.feeding):
            return 0.0
        try:
            return await self._process(task, batch)
        except StateIncompatible as error:
            self.fail(error)  # if the error were raised, Faust would log a traceback before the error's message
        except Exception as error:
            self.fail(error)
            raise
        return 0.0

    async def _process(self, task: Task, batch: FeedBatch) -> float:
        try:
            return await task.process(batch)
        except TaskCorrupted as error:
            members = next((each for each, group in self._groups.items() if task in group.tasks.values()), None)
            if members is not None:  # otherwise, the next owner of the store finds the damage
                await self._heal(members, error)
        return 0.0

    def is_full(self, feeding: TopicPartition) -> bool:
        """Return whether the partition's task should get no more records until a long commit has ended."""
        task = self._tasks.get(feeding)
        return task is not None and task.full

    async def _live(self, members: Members) -> None:
        """Run a task group. After an error, rebuild the task group, rejoin the consumer group, or stop the worker."""
        try:
            await self._run_or_give_back(members)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  # the worker must stop on any error
            self.fail(error)

    async def _run_or_give_back(self, members: Members) -> None:
        """Run a task group. If the group is fenced or its state is damaged, discard the group and rejoin the consumer
        group.
        """
        try:
            await self._run_again_and_again(members)
        except TaskMigrated as error:
            self._note_fenced(members, error)
            if self._is_current(members):
                await self._groups[members].close(drain=False)
            if self._is_current(members):
                self._give_back(members)
        except TaskCorrupted as error:
            if self._is_current(members):
                await self._heal(members, error)

    async def _run_again_and_again(self, members: Members) -> None:
        """Run a task group until it is closed. If a commit's outcome is unknown, build and run a new task group."""
        outage = Outage()
        while True:
            try:
                await self._run(members, outage)
            except CommitUnknown as error:
                await self._build_again(members, error, outage)
            else:
                return

    async def _run(self, members: Members, outage: Outage) -> None:
        """Open a task group, start its tasks, and commit until the group is closed."""
        group = self._groups[members]
        await group.open()
        outage.answered = True
        starts = [self._start(group, task, outage) for task in group.tasks.values()]
        loops = [asyncio.create_task(part) for part in (*starts, self._commit_by_the_clock(group, outage))]
        try:
            await asyncio.wait(loops, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await ended(loops)
            # The errors are retrieved even if this loop is canceled; otherwise, asyncio would log them.
            errors = [error for loop in loops if not loop.cancelled() and (error := loop.exception()) is not None]
        if errors:
            raise errors[0]

    async def _build_again(self, members: Members, error: CommitUnknown, outage: Outage) -> None:
        """Build a new task group after a pause, while other task groups continue.

        Raises ``error`` if this worker has left the consumer group, because a new task group would fence the
        partitions' new owner.
        """
        member, group = self._member(), self._groups.get(members)
        if group is None:
            raise error  # the assignment has ended, so no new group is built
        for feeding in members:
            member.halt(feeding)
        await group.close(drain=False)
        if not outage.tries:
            self._waiting[members] = outage
            self._waits.add(members, error)
        counted_in: bool | None = None
        while counted_in is None:
            await self._pause(outage.next_pause_s(time.monotonic()))
            counted_in = await member.is_member()
        if not counted_in or not self._is_current(members):
            raise error
        self._keep_counters(group)
        self._build(members)
        for feeding, task in self._groups[members].tasks.items():
            task.numbers.continue_from(group.tasks[feeding].numbers)

    async def _pause(self, most_s: float) -> None:
        """Wait until another group's commits succeed after an outage, but at most ``most_s`` seconds."""
        self._recovered.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._recovered.wait(), most_s)

    async def _start(self, group: TaskGroup, task: Task, outage: Outage) -> None:
        for attempt in range(1, _MOST_RESTORES + 1):
            try:
                with task.noting_damage():
                    offset = await task.start()
            except TaskCorrupted as error:
                if attempt == _MOST_RESTORES:
                    raise
                log.warning("%s: %s", task.task_id, error)
                self.corrupted += 1
                self._factory.wipe(task.feeding)
            else:
                break
        if task.state is TaskState.RUNNING:
            text = "%s: running from offset %d, epoch %d, after %d changelog records"
            if not outage.tries:
                log.info(text, task.task_id, offset, group.epoch, task.numbers.restored)
            self._lives[task.feeding] = self._member().begin(task.feeding, task.position)

    async def _heal(self, members: Members, error: TaskCorrupted) -> None:
        """Delete damaged local state, and rejoin the consumer group to restore the state. Repeated damage stops the
        worker.
        """
        group, loop = self._groups[members], self._loops[members]
        await group.close(drain=False)
        if loop is not asyncio.current_task():
            await ended([loop])  # another task of the group may be about to open its store
        task = next((task for task in group.tasks.values() if task.damage is error), None)
        if task is None:
            self.fail(error)
            return
        feeding = task.feeding
        self.corrupted += 1
        self._damaged[feeding] += 1
        if self._damaged[feeding] >= _MOST_RESTORES:
            self.fail(error)
            return
        log.warning("%s: %s", task.task_id, error)
        if self._tasks.get(feeding) is not task:
            return  # the next assignment's task has already opened the directory, and finds the damage itself
        self._factory.wipe(feeding)
        self._give_back(members)

    @staticmethod
    def _say_waits(found: Mapping[Members, CommitUnknown]) -> None:
        alone = sum(map(len, found)) == 1
        what = "this partition waits; it is" if alone else "these partitions wait; they are"
        log.warning(
            "%s: %s Only %s retried until a commit succeeds.", _all_named(found), next(iter(found.values())), what
        )

    def _say_goes_on(self, found: Mapping[Members, float]) -> None:
        extra = None if self._waiting else BACK
        log.info("%s: commits succeed again, after %.1f s", _all_named(found), max(found.values()), extra=extra)

    def _note_fenced(self, members: Members, error: TaskMigrated) -> None:
        expected = self._member().rebalancing
        log.log(logging.INFO if expected else logging.WARNING, "%s: %s %s", _named(members), error, _REJOINS)
        self.fenced += not expected

    def _is_current(self, members: Members) -> bool:
        """Return whether the calling loop is still the loop that runs the group of these partitions."""
        return self._loops.get(members) is asyncio.current_task()

    def _give_back(self, members: Members) -> None:
        """Forget a closed task group, and ask for a new assignment, which reopens the group."""
        group, _ = self._forget(members)
        self._keep_counters(group)
        self._member().rejoin()

    def _forget(self, members: Members) -> tuple[TaskGroup, asyncio.Task[None]]:
        for feeding in members:
            self._tasks.pop(feeding, None)
            self._lives.pop(feeding, None)
        self._waiting.pop(members, None)
        return self._groups.pop(members), self._loops.pop(members)

    async def _commit_by_the_clock(self, group: TaskGroup, outage: Outage) -> None:
        begun = -math.inf
        while not group.closed:
            await group.dirty.wait()
            interval_s = self._interval_s()
            await asyncio.sleep(max(begun + interval_s - time.monotonic(), _LEAST_REST * interval_s))
            begun = time.monotonic()
            await group.commit()
            if outage.tries:
                self._goes_on.add(tuple(group.tasks), time.monotonic() - outage.since_s)
                self._waiting.pop(tuple(group.tasks), None)
                outage.tries = 0
                self._recovered.set()

    def _interval_s(self) -> float:
        """Return the commit interval in seconds. The interval grows with the number of busy groups, to leave time for
        judging.
        """
        busy = sum(1 for group in self._groups.values() if group.dirty.is_set())
        return max(self._commit_interval_s, min(_GROUP_INTERVAL_S * busy, _LONGEST_INTERVAL_S))

    def fail(self, error: BaseException) -> None:
        """Make the worker stop with ``error``. Later errors are ignored."""
        if not self.failure.done():
            self.failure.set_result(error)

    async def close_all(self, *, drain: bool) -> None:
        """Close every task group, even if its commit fails. If ``drain`` is True, first commit the judged records."""
        self.opened.clear()
        await self._close(set(self._groups), drain=drain)

    async def _close(self, doomed: Collection[Members], *, drain: bool) -> None:
        drain = drain and not self.failure.done()
        closing = [self._forget(members) for members in sorted(doomed)]
        self._closing.extend(group for group, _ in closing)
        for group, loop in closing:
            # A group without a running task has nothing to commit, and must not start after it is closed.
            if all(task.state is not TaskState.RUNNING for task in group.tasks.values()):
                loop.cancel()
        results = await asyncio.gather(*[group.close(drain=drain) for group, _ in closing], return_exceptions=True)
        await ended(loop for _, loop in closing)
        for (group, _), result in zip(closing, results, strict=True):
            self._closing.remove(group)
            self._keep_counters(group)
            if isinstance(result, TaskMigrated):
                log.info("%s: %s", group, result)
            elif isinstance(result, BaseException):
                self.fail(result)

    def _keep_counters(self, group: TaskGroup) -> None:
        for place, numbers in _placed(group):
            self._ended.setdefault(place, TaskNumbers()).add_counters(numbers)


def _placed(group: TaskGroup) -> Iterator[tuple[Place, TaskNumbers]]:
    for feeding, task in group.tasks.items():
        yield (task.task_id.sub_topology, feeding.topic, feeding.partition), task.numbers


def _all_named(found: Collection[Members]) -> str:
    shown = ", ".join(map(_named, itertools.islice(found, _MOST_NAMED)))
    return shown + (f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else "")


def _named(members: Members) -> str:
    return str(members[0]) + (f" and {len(members) - 1} more partitions" if len(members) > 1 else "")
