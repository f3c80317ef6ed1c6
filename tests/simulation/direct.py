"""A task straight on the simulated cluster, without schedules: every request is answered at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from dedup.core.extract import Extractor
from dedup.core.fold import Rules
from dedup.core.window import Feed, Window
from dedup.kafka.record_batch import FeedBatch
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import TopicPartition
from dedup.store.base import MemoryStore
from dedup.store.directory import Keeping
from dedup.worker.dedup_task import DedupPlan, DedupTask
from dedup.worker.offsets import offset_metadata
from dedup.worker.record_collector import Limits, RecordCollector, Route, Routes
from dedup.worker.task import Committing, Task, TaskId
from dedup.worker.task_group import TaskGroup
from tests.simulation.cluster import Cluster
from tests.simulation.scenario import CHANGELOG, EXTRACTOR, GROUP, StoppedClock

IN = TopicPartition("in", 0)


class DirectWire:
    """The simulated cluster as a `Wire` whose answers never wait."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.gate: asyncio.Event | None = None
        """Set to hold up the answers to produce requests."""

    def __getattr__(self, name: str):
        call = getattr(self.cluster, name)

        async def ask(*args, **options):
            return call(*args, **options)

        return ask

    async def init_producer_id(self, transactional_id, timeout_ms):
        return self.cluster.init_producer_id(transactional_id)

    async def refresh(self) -> None:
        pass

    async def pause(self, delay_ms: int) -> None:
        await asyncio.sleep(0)

    async def fetch(self, source, offset, *, max_bytes, wait_ms):
        return self.cluster.fetch(source, offset)

    async def limit(self, target):
        return None  # it refuses by content: only the broker knows

    async def produce(self, transactional_id, identity, batches):
        answer, gate = self.cluster.produce(transactional_id, identity, list(batches)), self.gate

        async def answered():
            if gate is not None:
                await gate.wait()
            return answer

        return asyncio.ensure_future(answered())


class KeptStore(MemoryStore):
    """A store that outlives its task."""

    def close(self) -> None:
        pass


def plan_of(
    extractor: Extractor, rules: Rules, *, skew_ms=10**9, start="earliest", compression="none", feeding=IN
) -> DedupPlan:
    """Return what a task judges a partition of `in` by."""
    return DedupPlan(
        feeding=feeding,
        changelog=CHANGELOG._replace(partition=feeding.partition),
        feeds=(Feed(0, feeding.partition),),
        source_topics=("in",),
        wrapped=False,
        extractor=extractor,
        rules=rules,
        max_clock_skew_ms=skew_ms,
        start=start,
        fingerprint=b"f" * 16,
        compression=compression,
    )


class Alone:
    """The only task of a group, with what the task manager does to both."""

    def __init__(self, group: TaskGroup) -> None:
        self.group = group
        (self.task,) = group.tasks.values()
        self.process = self.task.process
        self.commit = group.commit
        self.close = group.close

    async def start(self) -> int:
        await self.group.open()
        return await self.task.start()


def group(wire, *partitions: int, start="earliest", judge=DedupTask, kind=TaskGroup, task=Task) -> TaskGroup:
    """Return a group of tasks with a guard period of 10 ms, each on a store of its own."""
    count = max(partitions) + 1
    routes = Routes(
        source_topics=("in",),
        output=Route("out", count),
        dead_letter=Route("dead", count),
        late=Route("late", count),
        compression="none",
    )

    async def unchanged():
        pass

    made = kind(Session(wire, "t.dedup.g0", GROUP, timeout_ms=60_000), unchanged, unchanged, Counter())
    for number in partitions:
        feeding = IN._replace(partition=number)
        plan = plan_of(EXTRACTOR, Rules(Window(10, 10)), start=start, feeding=feeding)
        collector = RecordCollector(routes, number, Limits({}, StoppedClock().now_ms, wire))
        work = partial(judge, plan, wire, Keeping(KeptStore), collector, StoppedClock())
        committing = Committing(
            GROUP, unchanged, offset_metadata("in-id", "changelog-id"), pin_start=start != "earliest"
        )
        made.add(task(TaskId("dedup", feeding), committing, made, wire, work))
    return made


def task(wire: DirectWire, **options) -> Alone:
    """Return the task of partition 0, which is a group of its own."""
    return Alone(group(wire, 0, **options))


def batch(rows, first: int, partition: int = 0) -> FeedBatch:
    """Return (key, time) pairs as the records from offset ``first`` on."""
    return FeedBatch(
        IN._replace(partition=partition),
        [first + at for at in range(len(rows))],
        [time_ms for _, time_ms in rows],
        [key for key, _ in rows],
        [b"value"] * len(rows),
        [()] * len(rows),
        first,
    )
