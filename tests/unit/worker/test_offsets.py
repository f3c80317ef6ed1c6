"""How long a request that gets no answer is repeated, and how many partitions are asked about at the same time."""

import asyncio

import pytest

from dedup.errors import BrokerUnavailable
from dedup.kafka.wire import CommittedOffset, NoAnswer, TopicPartition, patience
from dedup.worker.offsets import MOST_AT_ONCE, at_once, bounds_of, committed_offset, ends_of, progress_within
from tests.simulation.cluster import Cluster
from tests.simulation.direct import DirectWire


class Leaderless(DirectWire):
    """A partition that has no leader for its first 200 requests."""

    asked = 0

    async def bounds(self, source):
        self.asked += 1
        if self.asked <= 200:
            raise NoAnswer(f"no leader is known for {source}")
        return self.cluster.bounds(source)


async def test_a_worker_waits_for_a_leader_as_long_as_it_takes():
    assert (await bounds_of(Leaderless(Cluster()), TopicPartition("in", 0))).end == 0


async def test_a_command_gives_up_and_names_the_partition():
    with patience(0.0), pytest.raises(BrokerUnavailable, match=r"no leader is known for in/0\. Check the brokers"):
        await bounds_of(Leaderless(Cluster()), TopicPartition("in", 0))


class Loading(DirectWire):
    """A coordinator that is loading for ever."""

    async def committed_offset(self, group, source, *, stable):
        return CommittedOffset(14, None)


async def test_a_command_gives_up_while_a_coordinator_is_loading():
    """Was: it asked for ever."""
    with patience(0.0), pytest.raises(BrokerUnavailable, match=r"the coordinator of the group 'g' .* \(code 14\)"):
        await committed_offset(Loading(Cluster()), "g", TopicPartition("in", 0))


class Counting(DirectWire):
    """Counts the requests that are under way at the same time."""

    asking = most = 0

    async def bounds(self, source):
        self.asking += 1
        self.most = max(self.most, self.asking)
        for _ in range(3):
            await asyncio.sleep(0)
        self.asking -= 1
        return self.cluster.bounds(source)


async def test_many_partitions_are_asked_about_at_once_within_a_bound():
    """Was: one after another, so a new topology with 2,048 partitions did not start within 30 s."""
    wire = Counting(Cluster())
    places = [TopicPartition("in", number) for number in range(1_000)]
    assert await ends_of(wire, places) == dict.fromkeys(places, 0)
    assert wire.most == MOST_AT_ONCE


async def test_an_error_leaves_no_request_under_way():
    ended = []

    async def ask(number):
        try:
            await (asyncio.sleep(0) if number == 3 else asyncio.Event().wait())
        finally:
            ended.append(number)
        raise BrokerUnavailable("refused")

    with pytest.raises(BrokerUnavailable, match="refused"):
        await at_once(ask, range(100))
    begun = set(ended)
    await asyncio.sleep(0)
    assert begun == set(ended)
    assert begun >= set(range(MOST_AT_ONCE))


@pytest.mark.parametrize(("takes_s", "starts"), [(20, True), (40, False)])
async def test_a_start_may_take_as_long_as_it_gets_on(monkeypatch, takes_s, starts):
    loop, passed_s = asyncio.get_running_loop(), 0
    clock_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock_s() + passed_s)

    async def ask(number):
        nonlocal passed_s
        passed_s += takes_s
        if takes_s > 30:
            await asyncio.Event().wait()
        return number

    async def start():
        async with progress_within(30):
            return await at_once(ask, range(100))

    if starts:
        assert await start() == {number: number for number in range(100)}
        assert passed_s == 2_000
    else:
        with pytest.raises(TimeoutError):
            await start()
