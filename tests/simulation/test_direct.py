"""Sequences of events that a review found, one by one."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import pytest

from dedup.errors import InvariantBroken, StateIncompatible
from dedup.kafka.consumer import Answer, FeedFetcher, TopicCheck
from dedup.kafka.record_batch import Columns
from dedup.kafka.wire import LogBounds, NoAnswer, TopicNow, TopicPartition
from dedup.store.directory import Keeping
from dedup.worker.dedup_task import DedupTask
from dedup.worker.task import Task
from dedup.worker.task_group import TaskGroup
from tests.simulation.cluster import Cluster, Record, fetched
from tests.simulation.direct import IN, DirectWire, KeptStore, batch, group, task
from tests.simulation.scenario import CHANGELOG, GROUP
from tests.simulation.variants import AppliedAfterClose, RestoredAcrossEpochs


class FailsWhenJudgingAgain(DedupTask):
    def judge(self, batch, refusals):
        if refusals.rows:
            raise RuntimeError("a lookup failed")
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
    with pytest.raises(RuntimeError, match="a lookup failed"):
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
        reading = self._readings[sources[0]]
        begun = reading.position
        return [Answer(sources[0], Columns([begun], [0], [b"k"], [b"v"], [[]]), begun, begun + 1, reading, -1, 0)]


async def test_an_answer_of_an_older_assignment_is_not_handed_out():
    wire = TwoBrokers()
    fetcher = OneAnswer(wire, TopicCheck(wire, {"in": TopicNow("0" * 32, 2)}), wait_ms=10)
    sources = [TopicPartition("in", 0), TopicPartition("in", 1)]
    for source in sources:
        fetcher.begin(source, 200)
    poll = asyncio.create_task(fetcher.poll(sources))
    await asyncio.sleep(0.01)
    fetcher.forget()
    fetcher.begin(sources[0], 100)
    wire.found.set()
    assert await poll == []


class HeldEnd(DirectWire):
    """EndTxn is done at once, and its answer waits."""

    def __init__(self, cluster):
        super().__init__(cluster)
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def end_transaction(self, transactional_id, identity, *, commit):
        code, after = self.cluster.end_transaction(transactional_id, identity, commit=commit)
        self.asked.set()
        await self.answer.wait()
        return code, after


@pytest.mark.parametrize("kind", [TaskGroup, AppliedAfterClose])
async def test_a_commit_that_comes_through_after_the_task_was_closed_is_not_applied(kind):
    """The store may be another task's by then; the changelog has it all."""
    cluster = Cluster()
    wire = HeldEnd(cluster)
    cluster.append_plain(IN, [Record(0, 1, b"a", b"v", ())])
    closing = task(wire, kind=kind)
    await closing.start()
    store = closing.task.work.store
    await closing.process(batch([(b"a", 1)], 0))
    commit = asyncio.create_task(closing.commit())
    await wire.asked.wait()
    await closing.close(drain=False)
    wire.answer.set()
    with nullcontext() if kind is TaskGroup else pytest.raises(InvariantBroken):
        await commit
    assert store.task_record is None


async def test_a_task_that_holds_enough_records_does_not_wait_for_a_long_commit():
    """Was: the agent waited with it, and every other task of the worker stood still."""
    cluster = Cluster()
    wire = HeldEnd(cluster)
    many = [(b"%d" % number, 1) for number in range(16_000)]
    one = task(wire)
    await one.start()
    await one.process(batch([(b"first", 1)], 0))
    commit = asyncio.create_task(one.commit())
    await wire.asked.wait()
    await one.process(batch(many[:-1], 1))
    assert not one.task.full
    await one.process(batch(many[-1:], 16_000))
    assert one.task.full
    await one.process(batch([(b"last", 1)], 16_001))
    wire.answer.set()
    await commit
    assert not one.task.full
    await one.commit()
    assert [position.offset for position in cluster.offsets.values()] == [16_002]
    out = cluster.partition(TopicPartition("out", 0))
    assert [record.key for record in out.committed(0, out.end)] == [b"first", *(key for key, _ in many), b"last"]


async def test_a_task_that_holds_enough_bytes_takes_no_more_either(monkeypatch):
    """Was: only records counted, so 16,000 of 100 kB each took more than 1.6 GB in each task while a broker was frozen."""
    monkeypatch.setattr("dedup.worker.task._MOST_WAITING_BYTES", 100 * len(b"0value"))
    wire = HeldEnd(Cluster())
    one = task(wire)
    await one.start()
    await one.process(batch([(b"0", 1)] * 500, 0))
    assert one.task._waiting_bytes == 0, "what is sent at once does not wait"
    commit = asyncio.create_task(one.commit())
    await wire.asked.wait()
    await one.process(batch([(b"0", 1)] * 99, 500))
    assert not one.task.full
    await one.process(batch([(b"0", 1)], 599))
    assert one.task.full
    wire.answer.set()
    await commit
    assert not one.task.full


async def test_a_task_that_was_closed_during_its_commit_does_not_end_the_transaction():
    """Was: closing forgot the answers that were still to come, and the commit took the rest for complete."""
    cluster = Cluster(refuses=lambda target, record: record.key == b"big" and target == "out")
    wire = DirectWire(cluster)
    closing = task(wire)
    await closing.start()
    wire.gate = asyncio.Event()
    await closing.process(batch([(b"a", 1)], 0))
    await asyncio.sleep(0.01)
    await closing.process(batch([(b"big", 2)], 1))
    commit = asyncio.create_task(closing.commit())
    await asyncio.sleep(0.01)
    await closing.close(drain=False)
    wire.gate.set()
    await commit
    assert cluster.offsets == {}


async def test_a_record_that_no_topic_takes_is_no_dead_letter_where_it_turns_out_to_be_a_duplicate():
    """Was: the refusals of one attempt were all believed, though each verdict rests on the records before it.

    The third record repeats the second, which is forwarded only because the first, too large, leaves no sighting.
    """
    rows = [(b"a", 48), (b"a", 57), (b"a", 58)]
    cluster = Cluster(refuses=lambda target, record: target == "out" and record.timestamp in (48, 58))
    wire = DirectWire(cluster)
    cluster.append_plain(IN, [Record(0, time_ms, key, b"value", ()) for key, time_ms in rows])
    owner = task(wire)
    await owner.start()
    for offset, row in enumerate(rows):
        await owner.process(batch([row], offset))
    await owner.commit()
    found = {
        topic: [record.timestamp for record in cluster.partition(TopicPartition(topic, 0)).committed(0, 99)]
        for topic in ("out", "dead")
    }
    assert found == {"out": [57], "dead": [48]}
    assert dict(owner.task.numbers.verdicts) == {"unique": 1, "duplicate": 1, "dead_letter": 1} | {
        name: 0 for name in owner.task.numbers.verdicts if name not in {"unique", "duplicate", "dead_letter"}
    }


class HeldWire(DirectWire):
    """A wire where InitProducerId, and what is asked of partition 1, wait once their gates are closed."""

    def __init__(self, cluster):
        super().__init__(cluster)
        self.init, self.offsets = asyncio.Event(), asyncio.Event()
        self.init.set()
        self.offsets.set()
        self.waiting = asyncio.Event()

    async def init_producer_id(self, transactional_id, timeout_ms):
        if not self.init.is_set():
            self.waiting.set()
        await self.init.wait()
        return await super().init_producer_id(transactional_id, timeout_ms)

    async def bounds(self, source):
        found = self.cluster.bounds(source)
        if source.partition == 1:
            await self.offsets.wait()
        return found


@pytest.mark.parametrize("kind", [Task, RestoredAcrossEpochs])
async def test_a_task_that_restores_while_its_group_begins_a_new_epoch_restores_again(kind):
    """The epoch fences another owner, which may have committed since the task has read the changelog's end."""
    cluster = Cluster(refuses=lambda target, record: record.key == b"big" and target == "out")
    second = IN._replace(partition=1)
    cluster.append_plain(IN, [Record(0, 1, b"big", b"value", ())])
    cluster.append_plain(second, [Record(0, 1, b"a", b"value", ())])
    wire = HeldWire(cluster)
    zombie = group(wire, 0, 1, task=kind)
    await zombie.open()
    await zombie.tasks[IN].start()
    wire.offsets.clear()
    restoring = asyncio.create_task(zombie.tasks[second].start())
    await zombie.tasks[IN].process(batch([(b"big", 1)], 0))
    wire.init.clear()
    commit = asyncio.create_task(zombie.commit())
    await wire.waiting.wait()
    owner = group(DirectWire(cluster), 0, 1)
    await owner.open()
    await owner.tasks[second].start()
    await owner.tasks[second].process(batch([(b"a", 1)], 0, partition=1))
    await owner.commit()
    wire.init.set()
    await commit
    wire.offsets.set()
    begins = await restoring
    if begins == 0:
        await zombie.tasks[second].process(batch([(b"a", 1)], 0, partition=1))
        await zombie.commit()
    out = cluster.partition(TopicPartition("out", 1))
    assert len(out.committed(0, 99)) == (1 if kind is Task else 2)


@pytest.mark.parametrize("implicit", [False, True], ids=["version 1", "version 2"])
async def test_a_task_restores_once_while_the_others_of_its_group_commit(implicit):
    """With transactions of version 2, each commit begins a new epoch, which fences nobody."""
    cluster = Cluster(implicit=implicit)
    second, restores = IN._replace(partition=1), []

    class Slow(DedupTask):
        async def restore(self, committed, *, own):
            if self.plan.feeding == second and len(restores) < 5:
                restores.append(committed)
                await made.tasks[IN].process(batch([(b"%d" % len(restores), 1)], len(restores) - 1))
                await made.commit()
            return await super().restore(committed, own=own)

    made = group(DirectWire(cluster), 0, 1, judge=Slow)
    await made.open()
    await made.tasks[IN].start()
    await made.tasks[second].start()
    assert len(restores) == 1
    assert len(cluster.partition(TopicPartition("out", 0)).committed(0, 99)) == 1


class DeposedLeader(DirectWire):
    """A broker that is cut off still answers for the changelog, whose newest records it lacks."""

    def __init__(self, cluster, end, refreshes):
        super().__init__(cluster)
        self.end = end
        self.left = refreshes

    async def refresh(self):
        self.left -= 1

    async def bounds(self, source):
        found = self.cluster.bounds(source)
        return LogBounds(found.start, min(found.end, self.end)) if source == CHANGELOG and self.left else found

    async def fetch(self, source, offset, *, max_bytes, wait_ms):
        found = self.cluster.fetch(source, offset)
        if source != CHANGELOG or not self.left:
            return found
        rows = [record for record in found.records if record.offset < self.end]
        return fetched(rows, min(found.next_offset, self.end), self.end, self.end)


@pytest.mark.parametrize("refreshes", [3, 1_000])
async def test_state_that_is_older_than_the_committed_offset_is_not_used(refreshes):
    """Was: the task began at the committed offset with a part of its state, and forwarded known IDs again."""
    cluster = Cluster()
    first = task(DirectWire(cluster))
    await first.start()
    await first.process(batch([(b"a", 1)], 0))
    await first.commit()
    cut_off = cluster.bounds(CHANGELOG).end
    await first.process(batch([(b"b", 2), (b"c", 3)], 1))
    await first.commit()
    await first.close(drain=False)
    wire = DeposedLeader(cluster, cut_off, refreshes)
    owner = task(wire)
    if refreshes > 100:
        with pytest.raises(StateIncompatible, match=r"lacks its newest records.*up to offset 3,.*task record says 1"):
            await owner.start()
        return
    assert await owner.start() == 3
    await owner.process(batch([(b"b", 2), (b"d", 3)], 3))
    await owner.commit()
    out = cluster.partition(TopicPartition("out", 0)).committed(0, 99)
    assert [record.key for record in out] == [b"a", b"b", b"c", b"d"]


async def test_an_offset_that_was_set_by_hand_may_be_ahead_of_the_state():
    cluster = Cluster()
    first = task(DirectWire(cluster))
    await first.start()
    await first.process(batch([(b"a", 1)], 0))
    await first.commit()
    await first.close(drain=False)
    (place,) = cluster.offsets
    cluster.offsets[place] = cluster.offsets[place]._replace(offset=7, metadata="")
    assert await task(DirectWire(cluster)).start() == 7


@pytest.mark.parametrize("refreshes", [3, 1_000])
async def test_a_store_that_is_newer_than_a_deposed_leader_is_no_reason_to_reset(refreshes):
    cluster, store = Cluster(), KeptStore()
    first = task(DirectWire(cluster))
    first.task.work._keeping = Keeping(lambda: store)
    await first.start()
    await first.process(batch([(b"a", 1)], 0))
    await first.commit()
    cut_off = cluster.bounds(CHANGELOG).end
    await first.process(batch([(b"b", 2)], 1))
    await first.commit()
    owner = task(DeposedLeader(cluster, cut_off, refreshes))
    owner.task.work._keeping = Keeping(lambda: store)
    if refreshes > 100:
        with pytest.raises(StateIncompatible, match="deleted, recreated or truncated"):
            await owner.start()
    else:
        assert await owner.start() == 2


async def test_an_offset_is_committed_behind_the_markers_and_aborted_records_that_end_a_log():
    """Was: before them. Retention deleted them from a quiet partition, and the next owner refused what it took for a gap."""
    cluster = Cluster(refuses=lambda target, record: record.key == b"big" and target == "out")
    wire = DirectWire(cluster)
    owner = task(wire)
    await owner.start()

    async def committed_after(fed) -> int:
        await owner.process(fed)
        await owner.commit()
        return (await wire.committed_offset(GROUP, IN, stable=True)).offset

    assert await committed_after(replace(batch([(b"a", 1)], 0), ends_at=2)) == 2
    assert await committed_after(replace(batch([], 2), ends_at=5)) == 5, "only aborted records and their marker"
    await owner.process(replace(batch([(b"big", 2)], 5), ends_at=7))
    assert await committed_after(replace(batch([], 7), ends_at=9)) == 9, "a refused record is judged again"
    assert (owner.task.position.offset, owner.task.judged_to) == (9, 6)
    # An offset that was set back: the record is known, and so is what follows it.
    owner.task._expected = 5
    assert await committed_after(replace(batch([(b"big", 2)], 5), ends_at=7)) == 9
    assert owner.task.numbers.replayed == 1
