"""How long a request that gets no answer is repeated."""

import pytest

from dedup.errors import BrokerUnavailable
from dedup.kafka.wire import CommittedOffset, NoAnswer, TopicPartition, patience
from dedup.worker.offsets import bounds_of, committed_offset
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
