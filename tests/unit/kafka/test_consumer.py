"""The feeds' fetcher between two assignments."""

import asyncio
from types import SimpleNamespace

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.kafka.consumer import MOST_DOUBTS, FeedFetcher, TopicCheck
from dedup.kafka.requests import FetchedPartition
from dedup.kafka.wire import NoAnswer, TopicNow, TopicPartition, patience

OLD, NEW = TopicPartition("in", 0), TopicPartition("in", 1)
AFTER = ("after_truncation", "after_deletion")
IDS = {"in": TopicNow("0123456789abcdef" * 2, 2)}


class Wire:
    """A cluster of one node, whose metadata takes a while; it never answers a fetch."""

    one_broker = False

    def __init__(self):
        self.asked = []
        self.metadata = asyncio.Event()
        self.looking = asyncio.Event()
        self.sent = asyncio.Event()

    async def leader(self, _source):
        self.looking.set()
        await self.metadata.wait()
        return 1

    async def fetch_partitions(self, _node, wanted, **_options):
        self.asked += [(each.topic_id, each.partition, each.position) for each in wanted]
        self.sent.set()
        await asyncio.Event().wait()


async def test_an_assignment_that_ends_while_leaders_are_looked_up_is_not_fetched_for():
    wire = Wire()
    fetcher = FeedFetcher(wire, TopicCheck(wire, IDS), wait_ms=1)
    fetcher.begin(OLD, 5)
    fetcher.begin(NEW, 6)
    poll = asyncio.create_task(fetcher.poll([OLD, NEW]))
    await wire.looking.wait()
    fetcher.forget()
    fetcher.begin(NEW, 7)
    wire.metadata.set()
    assert await poll == []
    # The next poll is the new assignment's, and asks for nothing else.
    poll = asyncio.create_task(fetcher.poll([NEW]))
    await wire.sent.wait()
    assert wire.asked == [(IDS["in"].topic_id, 1, 7)]
    fetcher.forget()
    poll.cancel()


async def test_a_poll_with_nothing_to_fetch_ends_when_a_partition_begins():
    """Each assignment used to begin with a pause of up to 200 ms: the rest of a poll that had nothing to fetch."""
    fetcher = FeedFetcher(Wire(), TopicCheck(Wire(), IDS), wait_ms=3_600_000)
    poll = asyncio.create_task(fetcher.poll(()))
    await asyncio.sleep(0)
    fetcher.begin(OLD, 5)
    assert await poll == []


class TwoNodes(Wire):
    """A cluster of two nodes that give no answer; its metadata is looked up again for a while."""

    def __init__(self):
        super().__init__()
        self.refreshing = asyncio.Event()

    async def leader(self, source):
        return source.partition

    async def fetch_partitions(self, node, wanted, **_options):
        raise NoAnswer("the broker is gone")

    async def pause(self, delay_ms):
        await asyncio.sleep(0)

    async def refresh(self):
        self.refreshing.set()
        await self.metadata.wait()


async def test_an_assignment_that_ends_while_leaders_are_looked_up_again_ends_in_peace():
    wire = TwoNodes()
    fetcher = FeedFetcher(wire, TopicCheck(wire, IDS), wait_ms=1)
    fetcher.begin(OLD, 5)
    fetcher.begin(NEW, 6)
    poll = asyncio.create_task(fetcher.poll([OLD, NEW]))
    await wire.refreshing.wait()
    fetcher.forget()
    wire.metadata.set()
    assert await poll == []


def batch_at(offset, *, epoch=0):
    """Return one record as a broker stores it."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 10_000)
    builder.append(0, 1_000, b"k", b"v%d" % offset, [])
    raw = bytearray(builder.build())
    raw[0:8] = offset.to_bytes(8, "big")
    raw[12:16] = epoch.to_bytes(4, "big")
    return bytes(raw)


class Answering(Wire):
    """A cluster of one node, whose answer waits until it is let go."""

    def __init__(self, *parts, topics=None):
        super().__init__()
        self.metadata.set()
        self.parts = list(parts)
        self.now = topics or IDS
        self.now_ms = 0
        self.go = asyncio.Event()

    async def fetch_partitions(self, _node, wanted, **_options):
        self.asked += [(each.position, each.leader_epoch) for each in wanted]
        self.sent.set()
        self.now_ms += 5  # the response comes later than the request
        await self.go.wait()
        return 0, [self.parts.pop(0)] if self.parts else []

    async def topics(self, names):
        return {name: self.now[name] for name in names}

    async def pause(self, _delay_ms):
        await asyncio.sleep(0)

    async def refresh(self):
        pass


def part(records=b"", *, code=0, parts_at=None, end=100, stable=None):
    return FetchedPartition(IDS["in"].topic_id, 0, code, end, end if stable is None else stable, [], records, parts_at)


def fetcher_of(wire):
    return FeedFetcher(wire, TopicCheck(wire, IDS), wait_ms=1)


async def test_what_an_older_reading_of_a_partition_asked_for_is_not_taken_for_a_newer_one():
    """Was possible once a partition can be read anew alone: records between the two positions would be lost."""
    wire = Answering(part(batch_at(5)), part(batch_at(5)))
    fetcher = fetcher_of(wire)
    fetcher.begin(OLD, 5)
    poll = asyncio.create_task(fetcher.poll([OLD]))
    await wire.sent.wait()
    fetcher.begin(OLD, 2)
    wire.go.set()
    assert await poll == []
    (answer,) = await fetcher.poll([OLD])
    assert answer.begun == 2
    assert not answer.reading.over
    fetcher.begin(OLD, 2)
    assert answer.reading.over
    fetcher.forget()


async def test_a_fetch_names_the_leader_epoch_of_the_record_before_its_position():
    wire = Answering(part(batch_at(5, epoch=3) + batch_at(6, epoch=4)))
    fetcher = fetcher_of(wire)
    fetcher.begin(OLD, 5, leader_epoch=2)
    wire.go.set()
    (answer,) = await fetcher.poll([OLD])
    assert answer.columns.offsets == [5, 6]
    assert answer.leader_epoch == -1, "of which part of the answer it is does not show"
    await fetcher.poll([OLD])
    assert wire.asked[:2] == [(5, 2), (7, 4)]
    fetcher.forget()


async def test_a_log_that_parts_from_what_was_read_is_refused():
    wire = Answering(*[part(parts_at=4)] * MOST_DOUBTS)
    fetcher = fetcher_of(wire)
    fetcher.begin(OLD, 5, leader_epoch=2)
    wire.go.set()
    for _ in range(MOST_DOUBTS - 1):
        # One broker alone may be a leader of the past.
        assert await fetcher.poll([OLD]) == []
    with pytest.raises(StateIncompatible, match="holds other records from offset 4 on"):
        await fetcher.poll([OLD])
    fetcher.forget()


@pytest.mark.parametrize("gone", [{"parts_at": 4}, {"code": 1}], ids=["truncated", "deleted"])
async def test_whoever_reads_says_how_to_go_on_without_the_records_that_are_gone(gone):
    """Was: `dedup sink`, whose offsets are in a database, named `dedup reset`, which resets the worker."""
    for says, given in [("`dedup reset --to", {}), ("delete the row", dict.fromkeys(AFTER, "delete the row"))]:
        wire = Answering(*[part(**gone)] * MOST_DOUBTS)
        fetcher = FeedFetcher(wire, TopicCheck(wire, IDS), wait_ms=1, **given)
        fetcher.begin(OLD, 5, leader_epoch=2)
        wire.go.set()
        for _ in range(MOST_DOUBTS - 1):
            assert await fetcher.poll([OLD]) == []
        with pytest.raises(StateIncompatible, match=says) as why:
            await fetcher.poll([OLD])
        assert ("dedup reset" in str(why.value)) == (not given)
        fetcher.forget()


async def test_an_epoch_that_compaction_has_removed_does_not_part_the_logs():
    """As the Java consumer has it: what counts is whether the leader's log ends before our position."""
    wire = Answering(part(parts_at=5), part(batch_at(5, epoch=7)))
    fetcher = fetcher_of(wire)
    fetcher.begin(OLD, 5, leader_epoch=2)
    wire.go.set()
    assert await fetcher.poll([OLD]) == []
    (answer,) = await fetcher.poll([OLD])
    assert answer.columns.offsets == [5]
    assert wire.asked[:2] == [(5, 2), (5, -1)]
    fetcher.forget()


async def test_two_brokers_that_answer_for_one_partition_bring_its_records_once():
    """Was: the second answer, of the leader that came after, began where the first had begun, and the worker ended."""
    wire = Answering(part(batch_at(5) + batch_at(6)), part(batch_at(5) + batch_at(6)))
    fetcher = fetcher_of(wire)
    fetcher.begin(OLD, 5)
    first = asyncio.create_task(fetcher._fetch(1, [OLD]))
    second = asyncio.create_task(fetcher._fetch(2, [OLD]))
    await asyncio.sleep(0)
    wire.go.set()
    found = [*await first, *await second]
    assert [answer.columns.offsets for answer in found] == [[5, 6]]
    assert fetcher.position(OLD) == 7


@pytest.mark.parametrize("now", [IDS, {"in": TopicNow("f" * 32, 2)}, {"in": 3}], ids=["the same", "another", "gone"])
async def test_a_broker_that_does_not_know_the_id_is_asked_again_unless_the_topic_is_another(now):
    wire = Answering(part(code=100), topics=now)
    fetcher = fetcher_of(wire)
    fetcher.begin(OLD, 5)
    wire.go.set()
    if now is IDS:
        assert await fetcher.poll([OLD]) == []
        assert fetcher.position(OLD) == 5
    else:
        with pytest.raises(StateIncompatible, match="was deleted"):
            await fetcher.poll([OLD])
    fetcher.forget()


async def test_tasks_that_commit_at_the_same_time_share_one_question_asked_after_all_of_them():
    asked = 0
    go = asyncio.Event()

    async def topics(names):
        nonlocal asked
        asked += 1
        await go.wait()
        return {name: IDS[name] for name in names}

    check = TopicCheck(SimpleNamespace(topics=topics), IDS)
    first = [asyncio.create_task(check.confirm()) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert asked == 1
    later = [asyncio.create_task(check.confirm()) for _ in range(5)]
    await asyncio.sleep(0.01)
    go.set()
    await asyncio.gather(*first, *later)
    assert asked == 2, "an answer that was asked for before a fetch says nothing of what came after"


async def test_records_are_readable_after_the_last_request_that_found_nothing_more(monkeypatch):
    """A response that reaches the end of the log bounds the age of all records that come later, and of no others."""
    wire = Answering(
        part(batch_at(0)),
        part(batch_at(1), end=2),
        part(end=2),  # asked at 10
        part(end=5, stable=2),  # an open transaction hides what is there
        part(batch_at(2), end=5),
    )
    monkeypatch.setattr("dedup.kafka.consumer.time.time_ns", lambda: wire.now_ms * 1_000_000)
    wire.go.set()
    fetcher = fetcher_of(wire)
    fetcher.begin(OLD, 0)
    found = []
    while len(found) < 3:
        found += [(answer.columns.offsets, answer.readable_after_ms) for answer in await fetcher.poll([OLD])]
    assert found == [([0], 0), ([1], 0), ([2], 10)]
    fetcher.forget()


class Flowing(Answering):
    """A cluster of one node, whose answer about the partition that a request names first has no end."""

    async def fetch_partitions(self, _node, wanted, **_options):
        self.asked.append(wanted[0].partition)
        return 0, [part(batch_at(wanted[0].position))._replace(partition=wanted[0].partition)]


async def test_every_partition_has_its_turn_to_be_the_first_of_a_request():
    """Was: half of them had none. A batch of more than 1 MiB comes only first, or if all partitions before it are empty."""
    wire = Flowing()
    fetcher = fetcher_of(wire)
    fetcher.begin(OLD, 0)
    fetcher.begin(NEW, 0)
    for _ in range(6):
        await fetcher.poll([OLD, NEW])
    assert wire.asked[:6] == [0, 1] * 3
    fetcher.forget()


class Leaderless(Answering):
    """A cluster whose partition loses its leader once the parts are sent."""

    async def leader(self, _source):
        if not self.parts:
            raise NoAnswer("no leader is known for in/0")
        return 1


async def test_a_command_does_not_wait_for_ever_for_a_leader_and_a_worker_does():
    """Was: `dedup replay` waited without a word, and without an end."""
    wire = Leaderless(part(batch_at(5)))
    wire.go.set()
    fetcher = fetcher_of(wire)
    fetcher.begin(OLD, 5)
    with patience(0):
        assert [found.columns.offsets for found in await fetcher.poll([OLD])] == [[5]]
    for _ in range(3):
        assert await fetcher.poll([OLD]) == []
    with (
        patience(0),
        pytest.raises(BrokerUnavailable, match=r"no leader of in/0 answers\. Check the brokers, and that"),
    ):
        await asyncio.wait_for(fetcher.poll([OLD]), 10)
    fetcher.forget()
