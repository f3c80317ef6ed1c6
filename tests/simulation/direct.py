"""A task straight on the simulated cluster, without schedules: every request is answered at once."""

from __future__ import annotations

import asyncio

from dedup.core.extract import Extractor
from dedup.core.fold import Rules
from dedup.core.window import Feed, Window
from dedup.kafka.record_batch import FeedBatch
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import TopicPartition
from dedup.store.directory import Keeping
from dedup.worker.dedup_task import DedupPlan, DedupTask
from dedup.worker.record_collector import Limits, RecordCollector, Route, Routes
from dedup.worker.task import Committing, Task, TaskId
from tests.memory_store import MemoryStore
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

    async def pause(self, delay_ms: int) -> None:
        await asyncio.sleep(0)

    async def fetch(self, source, offset, *, max_bytes, wait_ms):
        return self.cluster.fetch(source, offset)

    async def limit(self, target):
        return None  # it refuses by content: only the broker knows

    async def produce(self, transactional_id, batches):
        answer, gate = self.cluster.produce(transactional_id, list(batches)), self.gate

        async def answered():
            if gate is not None:
                await gate.wait()
            return answer

        return asyncio.ensure_future(answered())


class KeptStore(MemoryStore):
    """A store that outlives its task."""

    def close(self) -> None:
        pass


def plan_of(extractor: Extractor, rules: Rules, *, skew_ms=10**9, start="earliest", compression="none") -> DedupPlan:
    """Return what a task judges the only partition of `in` by."""
    return DedupPlan(
        feeding=IN,
        changelog=CHANGELOG,
        feeds=(Feed(0, 0),),
        source_topics=("in",),
        wrapped=False,
        extractor=extractor,
        rules=rules,
        max_clock_skew_ms=skew_ms,
        start=start,
        fingerprint=b"f" * 16,
        compression=compression,
    )


def task(wire: DirectWire, *, start="earliest", judge=DedupTask, kind=Task) -> Task:
    """Return a task with a guard period of 10 ms on a store of its own."""
    plan = plan_of(EXTRACTOR, Rules(Window(10, 10)), start=start)
    routes = Routes(
        source_topics=("in",),
        output=Route("out", 1),
        dead_letter=Route("dead", 1),
        late=Route("late", 1),
        compression="none",
    )
    session = Session(wire, "t.dedup.0", GROUP, timeout_ms=60_000, deadline_ms=20_000)

    def work(numbers):
        collector = RecordCollector(routes, 0, Limits({}, StoppedClock(), wire))
        return judge(plan, wire, Keeping(KeptStore), collector, StoppedClock(), numbers)

    async def unchanged():
        pass

    committing = Committing(GROUP, unchanged, pin_start=start != "earliest")
    return kind(TaskId("dedup", IN), committing, session, wire, work)


def batch(rows, first: int) -> FeedBatch:
    """Return (key, time) pairs as the records from offset ``first`` on."""
    return FeedBatch(
        IN,
        [first + at for at in range(len(rows))],
        [time_ms for _, time_ms in rows],
        [key for key, _ in rows],
        [b"value"] * len(rows),
        [()] * len(rows),
        first,
    )
