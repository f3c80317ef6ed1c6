"""Sequences of events that a review found, one by one."""

import asyncio

import pytest

from dedup.session.fetch import Answer, Columns, FeedFetcher
from dedup.session.wire import NoAnswer, TopicPartition
from dedup.worker.judge import Judge
from tests.simulation.cluster import Cluster, Record
from tests.simulation.direct import IN, DirectWire, batch, task


class FailsWhenJudgingAgain(Judge):
    def judge(self, batch, refusals):
        if refusals.rows:
            raise RuntimeError("a look-up failed")
        return super().judge(batch, refusals)


async def test_a_drain_does_not_commit_an_offset_whose_state_was_discarded():
    cluster = Cluster(refuses=lambda target, record: record.key == b"big" and target == "out")
    wire = DirectWire(cluster)
    owner = task(wire, judge=FailsWhenJudgingAgain)
    await owner.start()
    wire.gate = asyncio.Event()
    await owner.process(batch([(b"big", 2)], 0))
    clock = asyncio.create_task(owner.commit())
    await asyncio.sleep(0.01)
    await owner.process(batch([(b"a", 3), (b"b", 4)], 1))
    drain = asyncio.create_task(owner.close(drain=True))
    await asyncio.sleep(0.01)
    gate, wire.gate = wire.gate, None
    gate.set()
    with pytest.raises(RuntimeError, match="a look-up failed"):
        await clock
    await drain
    assert cluster.offsets == {}


async def test_latest_means_the_same_place_after_a_crash_before_the_first_record():
    cluster = Cluster()
    wire = DirectWire(cluster)
    cluster.append_plain(IN, [Record(0, 1, b"before", b"v", ())])
    first = task(wire, start="latest")
    assert await first.start() == 1
    await first.commit()
    await first.close(drain=False)
    cluster.append_plain(IN, [Record(0, 1, b"a", b"v", ()), Record(0, 2, b"b", b"v", ())])
    assert await task(wire, start="latest").start() == 1


class TwoBrokers:
    """Broker 0 leads partition 0 and answers; broker 1 is gone, and looking for its successor takes a while."""

    leader_moved = frozenset()

    def __init__(self):
        self.found = asyncio.Event()

    async def leader(self, source):
        return source.partition

    async def refresh(self):
        await self.found.wait()


class OneAnswer(FeedFetcher):
    async def _fetch(self, node, sources):
        if node == 1:
            raise NoAnswer("broker 1 died")
        begun = self._positions[sources[0]]
        return [Answer(sources[0], Columns([begun], [0], [b"k"], [b"v"], [[]]), begun, begun + 1)]


async def test_an_answer_of_an_older_assignment_is_not_handed_out():
    wire = TwoBrokers()
    fetcher = OneAnswer(wire, wait_ms=10)
    sources = [TopicPartition("in", 0), TopicPartition("in", 1)]
    for source in sources:
        fetcher.begin(source, 200)
    poll = asyncio.create_task(fetcher.poll(sources))
    await asyncio.sleep(0.01)
    fetcher.forget()
    fetcher.begin(sources[0], 100)
    wire.found.set()
    assert await poll == []
