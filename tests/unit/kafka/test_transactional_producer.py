"""A session keeps its epoch through ordinary transactions, with transactions of both versions."""

import asyncio

import pytest

from dedup.errors import CommitUnknown, ProducerForgotten, TaskMigrated
from dedup.kafka import transactional_producer
from dedup.kafka.record_batch import fill
from dedup.kafka.transactional_producer import STILL_ENDING, Session
from dedup.kafka.wire import NoAnswer, Position, Produced, TopicPartition
from tests.simulation.cluster import Cluster
from tests.simulation.direct import DirectWire

OUT, IN = TopicPartition("out", 0), TopicPartition("in", 0)


class PuttingOff(DirectWire):
    """The first batch of each transaction meets the end of the one before it, as often as said."""

    def __init__(self, cluster: Cluster, times: int) -> None:
        super().__init__(cluster)
        self.epochs = 0
        self.sent: list[int] = []
        self._times = times
        self._left = times

    async def init_producer_id(self, transactional_id, timeout_ms):
        self.epochs += 1
        return await super().init_producer_id(transactional_id, timeout_ms)

    async def produce(self, transactional_id, identity, batches):
        self.sent.append(len(batches))
        if identity.implicit and self._left:
            self._left -= 1

            async def put_off():
                return {target: Produced(STILL_ENDING, -1) for target, _ in batches}

            return put_off()
        return await super().produce(transactional_id, identity, batches)

    async def end_transaction(self, transactional_id, identity, *, commit):
        self._left = self._times
        return self.cluster.end_transaction(transactional_id, identity, commit=commit)


def rows(*values: bytes):
    (batch,) = fill(OUT, [(-1, 1_000, b"k", value, []) for value in values], compression="none")
    return batch


@pytest.mark.parametrize("implicit", [False, True], ids=["version 1", "version 2"])
@pytest.mark.parametrize("times", [0, 3])
async def test_batches_are_in_order_and_no_epoch_is_lost_over_several_transactions(implicit, times):
    wire = PuttingOff(Cluster(implicit=implicit), times)
    session = Session(wire, "id", "group", timeout_ms=60_000)
    await session.open()
    for number in range(3):
        for part in range(4):
            session.add([rows(b"%d" % number, b"%d.%d" % (number, part))])
        await session.commit({IN: Position(number + 1)})
    assert wire.epochs == 1
    found = wire.cluster.fetch(OUT, 0)
    assert found.values == [value for n in range(3) for p in range(4) for value in (b"%d" % n, b"%d.%d" % (n, p))]
    assert wire.cluster.committed_offset("group", IN, stable=True).offset == 3


async def test_a_transaction_that_does_not_end_within_the_deadline_ends_the_epoch():
    wire = PuttingOff(Cluster(), 1_000_000)
    session = Session(wire, "id", "group", timeout_ms=60_000, deadline_ms=200)
    await session.open()
    session.add([rows(b"one")])
    with pytest.raises(Exception, match="the previous transaction did not end in 2"):
        await session.commit({IN: Position(1)})
    await session.drop()


async def test_a_session_that_is_fenced_names_another_owner_and_speaks_of_no_worker_of_its_own():
    cluster = Cluster()
    fenced, other = (Session(PuttingOff(cluster, 0), "id", "group", timeout_ms=60_000) for _ in range(2))
    await fenced.open()
    await other.open()
    with pytest.raises(
        TaskMigrated, match="Another owner has the partition: another worker, or the same command"
    ) as why:
        await fenced.commit({IN: Position(1)})
    assert "rejoins" not in str(why.value)


@pytest.mark.parametrize("implicit", [False, True], ids=["version 1", "version 2"])
async def test_a_session_that_was_idle_for_too_long_does_not_blame_another_owner(implicit):
    """Was: after 7 idle days, it said that another worker, or the same command run a second time, has the partition."""
    cluster = Cluster(implicit=implicit)
    session = Session(PuttingOff(cluster, 0), "id", "group", timeout_ms=60_000)
    await session.open()
    session.add([rows(b"one")])
    await session.commit({IN: Position(1)})
    cluster._ids.clear()  # as a coordinator after `transactional.id.expiration.ms`
    session.add([rows(b"two")])
    with pytest.raises(ProducerForgotten, match=r"transactional\.id\.expiration\.ms") as why:
        await session.commit({IN: Position(2)})
    assert isinstance(why.value, TaskMigrated)
    assert not isinstance(why.value, CommitUnknown), "a worker must rejoin, and not only build its task again"
    await session.drop()


async def test_small_batches_wait_for_the_commit_and_large_ones_do_not():
    wire = PuttingOff(Cluster(), 0)
    session = Session(wire, "id", "group", timeout_ms=60_000, batch_bytes=1_000)
    await session.open()
    others = [TopicPartition("out", partition) for partition in range(1, 4)]
    for other in others:
        session.add(fill(other, [(-1, 1_000, b"k", b"small", [])], compression="none"))
        await asyncio.sleep(0)
    assert wire.sent == []
    await session.commit({IN: Position(1)})
    assert wire.sent == [3]
    assert [wire.cluster.fetch(other, 0).values for other in others] == [[b"small"]] * 3
    session.add([rows(b"0" * 1_000)])
    while len(wire.sent) < 2:  # noqa: ASYNC110  # it is sent although nobody waits for it
        await asyncio.sleep(0)
    await session.commit({IN: Position(2)})
    assert wire.sent == [3, 1]


async def test_the_time_of_requests_without_an_answer_counts(monkeypatch):
    """Was: only the pauses counted, so a frozen coordinator was asked 206 times, for 35 minutes."""
    clock_s = [0.0]
    monkeypatch.setattr(transactional_producer.time, "monotonic", lambda: clock_s[0])

    class Frozen(DirectWire):
        asked = 0

        async def init_producer_id(self, transactional_id, timeout_ms):
            self.asked += 1
            clock_s[0] += 10.0
            raise NoAnswer("no answer in 10 s")

    wire = Frozen(Cluster())
    with pytest.raises(CommitUnknown, match="no usable answer in"):
        await Session(wire, "id", "group", timeout_ms=60_000).open()
    assert wire.asked <= 4
