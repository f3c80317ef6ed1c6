"""What a sink does with its dead letters while no broker takes them, without a broker."""

import asyncio
from types import SimpleNamespace

import pytest

from dedup.connect import dead_letter_producer
from dedup.connect.dead_letter_producer import DeadLetterProducer, RejectedRecord, _Partition
from dedup.errors import BrokerUnavailable, CommitUnknown, ProducerForgotten
from dedup.kafka.topic_admin import Topic
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import CommittedOffset, LogBounds, NoAnswer, Position, ProducerIdentity, TopicNow, TopicPartition
from dedup.settings import Settings


async def test_a_stop_is_heard_while_no_broker_takes_a_dead_letter():
    """Was: the sink waited until a broker answered, and kept the rows of its transaction locked meanwhile."""

    class Silent:
        async def open(self):
            raise CommitUnknown("no answer.")

        async def commit(self, _offsets):
            raise CommitUnknown("no answer.")

        def add(self, _batches):
            pass

    stop = asyncio.Event()
    sender = DeadLetterProducer(None, "x", "in", Topic("dead", "id", 1), Settings(brokers=["localhost:1"]), stop.is_set)
    place = TopicPartition("in", 0)
    sender._partitions[0] = _Partition(place, TopicPartition("dead", 0), Silent())
    columns = SimpleNamespace(offsets=[7], timestamps_ms=[0], keys=[None], values=[b"x"], headers=[[]])
    sending = asyncio.create_task(sender.send([RejectedRecord(place, columns, 0, "wrong_type", "no number")]))
    await asyncio.sleep(0.1)
    assert not sending.done()
    stop.set()
    with pytest.raises(BrokerUnavailable, match=r"stopped while no dead letter could be sent: no answer\. No row"):
        await asyncio.wait_for(sending, 5)


async def test_a_sink_that_sent_no_dead_letter_for_a_week_sends_the_next_one(monkeypatch):
    """Was: it stopped with TaskMigrated, as if another process had the partition, whose row it has locked."""
    epochs, commits = [], []

    class Idle:
        async def open(self):
            epochs.append(1)

        async def commit(self, _offsets):
            commits.append(1)
            if not epochs:
                raise ProducerForgotten("InvalidProducerIdMapping.")

        def add(self, _batches):
            pass

    async def nothing(*_):
        return set()

    sender = DeadLetterProducer(None, "x", "in", Topic("dead", "id", 1), Settings(brokers=["localhost:1"]))
    monkeypatch.setattr(sender, "_in_topic", nothing)
    place = TopicPartition("in", 0)
    sender._partitions[0] = _Partition(place, TopicPartition("dead", 0), Idle())
    columns = SimpleNamespace(offsets=[7], timestamps_ms=[0], keys=[None], values=[b"x"], headers=[[]])
    assert await sender.send([RejectedRecord(place, columns, 0, "wrong_type", "no number")]) == 1
    assert (len(epochs), len(commits)) == (1, 2)


async def test_a_stop_is_heard_while_the_dead_letter_topic_is_offline(monkeypatch):
    """Was: as long as brokers answered, the sink tried again without a pause, and did not end."""
    stop, tries = asyncio.Event(), []

    class Offline:
        async def open(self):
            """The coordinator answers."""

        async def commit(self, _offsets):
            tries.append(1)
            if len(tries) == 3:
                stop.set()
            raise CommitUnknown("no leader is known.")

        def add(self, _batches):
            pass

    async def nothing(*_):
        return set()

    sender = DeadLetterProducer(None, "x", "in", Topic("dead", "id", 1), Settings(brokers=["localhost:1"]), stop.is_set)
    monkeypatch.setattr(sender, "_in_topic", nothing)
    place = TopicPartition("in", 0)
    sender._partitions[0] = _Partition(place, TopicPartition("dead", 0), Offline())
    columns = SimpleNamespace(offsets=[7], timestamps_ms=[0], keys=[None], values=[b"x"], headers=[[]])
    with pytest.raises(
        BrokerUnavailable, match=r"stopped while no dead letter could be sent: no leader is known\. No row"
    ):
        await asyncio.wait_for(sender.send([RejectedRecord(place, columns, 0, "wrong_type", "no number")]), 30)
    assert len(tries) == 3


class Leaderless:
    """A cluster that describes the dead-letter topic, but whose partition has no leader."""

    def __init__(self, partition_is_read):
        self.partition_is_read = partition_is_read
        self.asked = asyncio.Event()

    async def init_producer_id(self, _transactional_id, _timeout_ms):
        return 0, ProducerIdentity(1, 0)

    async def committed_offset(self, *_, **__):
        return CommittedOffset(0, Position(9))

    async def topics(self, names):
        return dict.fromkeys(names, TopicNow("ab" * 16, 1))

    async def bounds(self, _source):
        if self.partition_is_read:
            return LogBounds(0, 9)
        return await self.leader(_source)

    async def leader(self, _source):
        self.asked.set()
        raise NoAnswer("no leader is known.")

    async def pause(self, delay_ms):
        await asyncio.sleep(delay_ms / 1000)


@pytest.mark.parametrize("partition_is_read", [False, True])
@pytest.mark.parametrize("starts", [False, True])
async def test_a_stop_is_heard_while_the_leader_of_the_dead_letters_that_were_sent_is_gone(
    starts, partition_is_read, monkeypatch
):
    """Was: the sink asked for the leader without an end, whatever signal arrived."""
    monkeypatch.setattr(dead_letter_producer, "_STOP_WITHIN_S", 0.1)

    class Unanswered(Session):
        async def commit(self, _offsets):
            raise CommitUnknown("no answer.")

    stop, wire, settings = asyncio.Event(), Leaderless(partition_is_read), Settings(brokers=["localhost:1"])
    sender = DeadLetterProducer(wire, "x", "in", Topic("dead", "id", 1), settings, stop.is_set)
    place = TopicPartition("in", 0)
    if starts:
        working = asyncio.create_task(sender.open({0: 7}))
    else:
        session = Unanswered(wire, "x.sink.0", None, timeout_ms=1)
        await session.open()
        sender._partitions[0] = _Partition(place, TopicPartition("dead", 0), session)
        columns = SimpleNamespace(offsets=[7], timestamps_ms=[0], keys=[None], values=[b"x"], headers=[[]])
        working = asyncio.create_task(sender.send([RejectedRecord(place, columns, 0, "wrong_type", "no number")]))
    await asyncio.wait_for(wire.asked.wait(), 30)
    stop.set()
    with pytest.raises(BrokerUnavailable, match=r"stopped while no dead letter could be sent: no broker has said yet"):
        await asyncio.wait_for(working, 30)
    await sender.close()
