"""A task of a topology that counts conflicts and has no topic for them."""

from __future__ import annotations

import pytest

from dedup.kafka.record_batch import FeedBatch
from dedup.metrics import TaskNumbers
from dedup.store.base import MemoryStore
from dedup.store.directory import Keeping
from dedup.topology.model import extractor_of
from dedup.topology.parse import parse
from dedup.worker.dedup_task import DedupTask
from dedup.worker.record_collector import Limits, RecordCollector, Refusals, Route, Routes
from tests.simulation.cluster import Cluster
from tests.simulation.direct import IN, DirectWire, plan_of
from tests.simulation.scenario import CHANGELOG, StoppedClock

TOPOLOGY = """\
dedup: 1
name: t
source: {topics: [in], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 1h
"""
VALUES = [b'{"id":1,"n":1,"at":1}', b'{"id":1,"n":1,"at":2}', b'{"id":1,"n":2,"at":3}', b'{"id":1,"n":2,"at":4}']


async def judged(more: str, routes: Routes) -> tuple[dict[str, list[int]], TaskNumbers]:
    """Return the rows by topic, and the counters, of one batch of ``VALUES``."""
    topology = parse(TOPOLOGY + more, name="t.yaml")
    plan = plan_of(extractor_of(topology), topology.rules, skew_ms=topology.max_clock_skew_ms)
    numbers = TaskNumbers()
    wire, clock = DirectWire(Cluster()), StoppedClock(0)
    collector = RecordCollector(routes, 0, Limits({}, clock.now_ms, wire))
    judge = DedupTask(plan, wire, Keeping(MemoryStore), collector, clock, numbers)
    await judge.restore(None, own=False)
    count = len(VALUES)
    batch = FeedBatch(IN, list(range(count)), [5] * count, [None] * count, VALUES, [()] * count, 0)
    sent = {made.target.topic: made.rows for made in judge.judge(batch, Refusals()) if made.target != CHANGELOG}
    judge.freeze(count).apply({CHANGELOG: 2})
    return sent, numbers


@pytest.mark.parametrize(("more", "conflicts"), [("", 0), ("conflicts: {}", 3), ("conflicts: {exclude: [at]}", 2)])
async def test_they_are_counted_and_go_with_the_duplicates(more, conflicts):
    beside = Routes(("in",), Route("out", 1), Route("dead", 1), None, duplicates=Route("twice", 1), compression="none")
    sent, numbers = await judged(more, beside)
    assert sent == {"out": [0], "twice": [1, 2, 3]}
    assert (numbers.verdicts["duplicate"], numbers.conflicts) == (3, conflicts)


async def test_without_a_topic_of_duplicates_they_go_nowhere():
    sent, numbers = await judged("conflicts: {}", Routes(("in",), Route("out", 1), Route("dead", 1), None))
    assert sent == {"out": [0]}
    assert numbers.conflicts == 3
