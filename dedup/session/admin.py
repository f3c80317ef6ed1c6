"""Topics: what the cluster has, what a topology needs, and making the difference.

Answers are read code by code: aiokafka's admin client returns normally when a creation was refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.structs import TopicPartition as AiokafkaTopicPartition

from dedup.errors import BrokerUnavailable
from dedup.session.connection import Connection
from dedup.session.create_topics import CreateTopics
from dedup.session.topic_id import TopicIdRequest
from dedup.session.wire import TopicPartition

UNKNOWN_TOPIC: Final = 3
LOOK_AGAIN_S: Final = 0.1
ALREADY_EXISTS: Final = 36
READ_CONFIGS: Final = (
    "max.message.bytes",
    "retention.ms",
    "cleanup.policy",
    "message.timestamp.type",
    "min.insync.replicas",
)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster has it."""

    name: str
    topic_id: str
    partitions: int
    configs: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_record_bytes(self) -> int:
        """The largest batch the topic takes, which bounds a record."""
        return int(self.configs.get("max.message.bytes", 1_048_588))


@dataclass(frozen=True, slots=True)
class WantedTopic:
    """A topic to be made."""

    name: str
    partitions: int
    replication_factor: int
    configs: Mapping[str, str]


class Admin:
    """Questions and orders about topics, over one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Final = connection
        self._client = AIOKafkaAdminClient(**connection.client_options())
        self._ids = AIOKafkaClient(**connection.client_options())

    async def __aenter__(self) -> Self:
        try:
            await self._client.start()
            await self._ids.bootstrap()
        except KafkaError as error:
            await self.__aexit__()
            brokers = ", ".join(self._connection.brokers)
            raise BrokerUnavailable(
                f"no broker answers at {brokers} ({error}). Start one (`dedup broker`), or correct `brokers`."
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ids.close()
        await self._client.close()

    async def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return those of the named topics that exist, with ids and the configs we care about."""
        wanted = sorted(set(names))
        answer = await self._ask(TopicIdRequest(wanted))
        found: dict[str, Topic] = {}
        for code, name, high, low, _, partitions, *_rest in answer.topics:
            if code == UNKNOWN_TOPIC:
                continue
            if code:
                raise _refused(f"describing topic {name!r}", code)
            topic_id = f"{high & (1 << 64) - 1:016x}{low & (1 << 64) - 1:016x}"
            found[name] = Topic(name, topic_id, len(partitions))
        configs = await self._configs(sorted(found))
        return {
            name: Topic(name, topic.topic_id, topic.partitions, configs.get(name, {})) for name, topic in found.items()
        }

    async def settled(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the named topics once every one of them is known: a topic just made shows up a little later.

        Raises BrokerUnavailable where one does not within the connection's patience.
        """
        wanted = set(names)
        deadline = asyncio.get_running_loop().time() + self._connection.patience_ms / 1000
        while True:
            have = await self.topics(wanted)
            missing = sorted(wanted - set(have))
            if not missing:
                return have
            if asyncio.get_running_loop().time() >= deadline:
                raise BrokerUnavailable(
                    f"topics {', '.join(map(repr, missing))} were made, but the broker does not know them after "
                    f"{self._connection.patience_ms / 1000:.0f} s. Look at the controller's log."
                )
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _ask(self, request: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
        try:
            return await self._ids.send(self._ids.get_random_node(), request)
        except KafkaError as error:
            raise BrokerUnavailable(f"the broker did not answer {type(request).__name__}: {error!r}") from error

    async def _configs(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        if not names:
            return {}
        resources = [ConfigResource(ConfigResourceType.TOPIC, name, dict.fromkeys(READ_CONFIGS, "")) for name in names]
        found: dict[str, dict[str, str]] = {}
        for answer in await self._client.describe_configs(resources):
            for code, _, _, name, entries in answer.resources:
                # Without the permission to describe, defaults are assumed; the broker refuses what does not fit.
                if code == 0:
                    found[name] = {entry[0]: entry[1] for entry in entries if entry[1] is not None}
        return found

    async def create(self, topics: Sequence[WantedTopic]) -> list[str]:
        """Make topics; return the names made, leaving out those that exist. Raises BrokerUnavailable if refused."""
        if not topics:
            return []
        wanted = [(topic.name, topic.partitions, topic.replication_factor, topic.configs) for topic in topics]
        request = CreateTopics(wanted, self._connection.request_timeout_ms)
        # The client's own `create_topics` refuses -1, which means the brokers' default.
        answer = await self._client._send_to_controller(request)  # noqa: SLF001
        made: list[str] = []
        for name, code, *rest in answer.topic_errors:
            if code == 0:
                made.append(name)
            elif code != ALREADY_EXISTS:
                raise _refused(f"creating topic {name!r}", code, str(rest[0]) if rest else "")
        return made

    async def delete(self, names: Sequence[str]) -> None:
        """Delete topics; a topic that does not exist is fine."""
        if not names:
            return
        answer = await self._client.delete_topics(list(names))
        for name, code in answer.topic_error_codes:
            if code not in {0, UNKNOWN_TOPIC}:
                raise _refused(f"deleting topic {name!r}", code)

    async def delete_records(self, before: Mapping[TopicPartition, int]) -> None:
        """Delete records below an offset of each partition (KIP-107)."""
        wanted = {AiokafkaTopicPartition(*tp): RecordsToDelete(before_offset=offset) for tp, offset in before.items()}
        if not wanted:
            return
        try:
            await self._client.delete_records(wanted)
        except KafkaError as error:
            raise BrokerUnavailable(
                f"deleting records of {', '.join(sorted({tp.topic for tp in before}))} failed: {error!r}. "
                f"Check that the principal may delete there."
            ) from error


def _refused(what: str, code: int, why: str = "") -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{what} was refused: {for_code(code).__name__} {why}".rstrip()
        + ". Check the principal's permissions and the cluster's limits, or make the topic by hand."
    )
