"""What brokers say of topics, and how long they are told to keep a group's offsets that are set from outside."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.protocol.commit import OffsetCommitRequest_v3

from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.topic_admin import FOR_EVER_MS, Admin, Group
from dedup.kafka.wire import TopicPartition
from dedup.settings import Security


class Coordinator:
    """Takes every commit, and remembers it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def ask_group(self, group: str, request: Any, codes: Any) -> Any:
        self.asked.append(request.build(OffsetCommitRequest_v3))
        return 0, SimpleNamespace(topics=[("letters", [(0, 0)])])


@pytest.mark.parametrize(("for_ever", "kept_ms"), [(False, -1), (True, FOR_EVER_MS)])
def test_offsets_are_kept_as_long_as_the_broker_keeps_them_or_for_ever(for_ever: bool, kept_ms: int) -> None:
    coordinator = Coordinator()
    group = Group(cast("KafkaWire", coordinator), "orders.replay-mark")
    asyncio.run(group.set_offsets({TopicPartition("letters", 0): 17}, for_ever=for_ever))
    (request,) = coordinator.asked
    assert request.retention_time == kept_ms
    assert request.topics == [("letters", [(0, 17, "")])]


class OneLeaderLeft:
    """Describes a topic of four partitions, of which one has a leader."""

    async def _send_request(self, _request: Any) -> Any:
        partitions = [(0 if number == 1 else 5, number, 1 if number == 1 else -1, 0) for number in (3, 1, 0, 2)]
        return SimpleNamespace(topics=[(0, "letters", bytes(16), False, partitions, 0)])

    async def describe_configs(self, _resources: Any) -> list[Any]:
        return []

    async def close(self) -> None:
        pass


def test_partitions_without_a_leader_are_known() -> None:
    async def topics() -> Any:
        admin = Admin(Connection(("localhost:1",), Security()))
        admin._client = cast("Any", OneLeaderLeft())
        return await admin.topics(["letters"])

    found = asyncio.run(topics())["letters"]
    assert (found.partitions, found.leaderless) == (4, (0, 2, 3))
