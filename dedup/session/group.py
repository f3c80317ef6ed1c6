"""A consumer group from outside: who is in it, its offsets, its end."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import for_code
from aiokafka.protocol.admin import DeleteGroupsRequest, DescribeGroupsRequest
from aiokafka.protocol.commit import OffsetCommitRequest

from dedup.errors import BrokerUnavailable
from dedup.session.client import KafkaWire
from dedup.session.wire import NoAnswer, TopicPartition

NOT_FOUND: Final = 69
AGAIN: Final = frozenset({14, 15, 16})
"""The coordinator is loading, away or moved: nothing was done, ask again."""
PAUSE_MS: Final = 100
DEADLINE_MS: Final = 30_000
T = TypeVar("T")

_MADE_BY_THE_BROKER: Final = re.compile(r"-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")


@dataclass(frozen=True, slots=True)
class Member:
    """A worker, as the group knows it."""

    worker_id: str
    """Its static id, or its client id where it has none."""
    host: str
    partitions: tuple[TopicPartition, ...]


class Group:
    """One consumer group."""

    def __init__(self, wire: KafkaWire, name: str) -> None:
        self._wire: Final = wire
        self._name: Final = name

    async def members(self) -> list[Member]:
        """Return the members with what is assigned to them; none for a group that does not exist."""

        async def ask() -> tuple[int, list[Any]]:
            answer = await self._wire.ask_group(self._name, DescribeGroupsRequest([self._name]))
            code, _, _, _, _, members, *_ = answer.groups[0]
            return code, members

        members = await self._insist("describing", ask)
        return sorted((_member(*fields[:5]) for fields in members), key=lambda member: member.worker_id)

    async def delete(self) -> None:
        """Forget the group and its offsets; one that does not exist is fine. It must have no members."""

        async def ask() -> tuple[int, None]:
            answer = await self._wire.ask_group(self._name, DeleteGroupsRequest([self._name]))
            ((_, code),) = answer.results
            return (0 if code == NOT_FOUND else code), None

        await self._insist("deleting", ask)

    async def set_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Set offsets of a group that has no members."""
        by_topic: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for (topic, partition), offset in offsets.items():
            by_topic[topic].append((partition, offset, ""))

        async def ask() -> tuple[int, None]:
            request = OffsetCommitRequest(self._name, -1, "", -1, list(by_topic.items()))
            answer = await self._wire.ask_group(self._name, request)
            codes = [code for _, parts in answer.topics for _, code in parts if code]
            return (codes[0] if codes else 0), None

        await self._insist("setting offsets of", ask)

    async def _insist(self, what: str, ask: Callable[[], Awaitable[tuple[int, T]]]) -> T:
        """Ask until the answer is not "again"; every one of these requests may be repeated."""
        deadline_s = asyncio.get_running_loop().time() + DEADLINE_MS / 1000
        while True:
            try:
                code, found = await ask()
            except NoAnswer as error:
                why = str(error)
            else:
                if code == 0:
                    return found
                why = for_code(code).__name__
                if code not in AGAIN:
                    raise BrokerUnavailable(
                        f"{what} the group {self._name!r} was refused: {why}. Check the principal's permissions on the "
                        f"group, and that no worker has joined it meanwhile."
                    )
            if asyncio.get_running_loop().time() > deadline_s:
                raise BrokerUnavailable(f"{what} the group {self._name!r}: no answer in {DEADLINE_MS} ms ({why}).")
            await self._wire.pause(PAUSE_MS)


def _member(member_id: str, client_id: str, host: str, _metadata: bytes, assignment: bytes) -> Member:
    # A static member's id is its own name and a UUID of the broker's; another's is its client id and a UUID.
    name = _MADE_BY_THE_BROKER.sub("", member_id) or client_id
    partitions = ConsumerProtocolMemberAssignment.decode(assignment).partitions() if assignment else []
    return Member(name, host.lstrip("/"), tuple(sorted(TopicPartition(*tp) for tp in partitions)))
