"""Offsets of a group set from outside: how long the broker is told to keep them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka.protocol.commit import OffsetCommitRequest_v3

from dedup.kafka.client import KafkaWire
from dedup.kafka.topic_admin import FOR_EVER_MS, Group
from dedup.kafka.wire import TopicPartition


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
