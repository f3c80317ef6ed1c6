"""What a principal may do, and what a broker can do, asked without changing anything that runs.

Brokers say which operations a caller may perform on topics and groups (KIP-430). For transactional ids they do not:
there the one honest question is an `InitProducerId`, under an id that no task has, so that nobody is fenced by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, Self

from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, TransactionalIdAuthorizationFailed
from aiokafka.protocol.admin import DescribeGroupsRequest_v3, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from dedup.errors import BrokerUnavailable
from dedup.session.connection import Connection
from dedup.session.create_topics import CreateTopics
from dedup.session.diagnose import probing
from dedup.session.stable_offsets import StableOffset
from dedup.session.topic_id import TopicIdRequest, TopicIdRequest_v10

REFUSED_TOPIC: Final = 29
REFUSED_GROUP: Final = 30
REFUSED_ID: Final = 53
TIMEOUT_TOO_LONG: Final = 50
LOOK_AGAIN_S: Final = 0.2
UNKNOWN_TOPIC: Final = 3
_OPERATIONS: Final = {3: "Read", 4: "Write", 5: "Create", 6: "Delete", 8: "Describe", 10: "DescribeConfigs"}
"""Kafka's numbers of operations, which are the bits of an answer."""
_NOT_IMPLYING_DESCRIBE: Final = frozenset({"DescribeConfigs"})
_NEEDED: Final[tuple[type[Any], ...]] = (
    ProduceRequest,
    FetchRequest,
    OffsetRequest,
    InitProducerIdRequest,
    AddPartitionsToTxnRequest,
    AddOffsetsToTxnRequest,
    TxnOffsetCommitRequest,
    EndTxnRequest,
    StableOffset,
    TopicIdRequest,
    CreateTopics,
)


class _TopicRights(TopicIdRequest):
    """Topics with what the caller may do there."""

    def build(self, request_struct_class: type[TopicIdRequest_v10]) -> TopicIdRequest_v10:
        """Return the structure that asks for operations."""
        return request_struct_class([(0, 0, name, {}) for name in self._names], False, False, True, {})  # noqa: FBT003  # positional protocol fields


class _GroupRights_v3(DescribeGroupsRequest_v3):  # type: ignore[misc]  # noqa: N801  # untyped base, aiokafka's naming of versions
    """aiokafka decodes the answer as v2, which has no operations."""

    RESPONSE_TYPE = DescribeGroupsResponse_v3


class _GroupRights(Request[_GroupRights_v3]):  # type: ignore[misc]  # untyped base
    """A group with what the caller may do there."""

    API_KEY = 15

    def __init__(self, group: str) -> None:
        self._group: Final = group

    def build(self, request_struct_class: type[_GroupRights_v3]) -> _GroupRights_v3:
        """Return the structure."""
        return request_struct_class([self._group], True)  # noqa: FBT003  # positional protocol fields


class Rights:
    """Questions over one connection; use with ``async with``."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Final = connection
        self._client: Final = AIOKafkaClient(**connection.client_options())

    async def __aenter__(self) -> Self:
        """It is connected; raises BrokerUnavailable."""
        try:
            await self._client.bootstrap()
        except KafkaError as error:
            await self._client.close()
            raise BrokerUnavailable(f"no broker answers at {', '.join(self._connection.brokers)}: {error}.") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        """It is connected no more."""
        await self._client.close()

    def advertised(self) -> tuple[str, ...]:
        """Return the addresses under which the brokers want to be reached, as host:port."""
        brokers = self._client.cluster.brokers()
        named = {f"[{each.host}]:{each.port}" if ":" in each.host else f"{each.host}:{each.port}" for each in brokers}
        return tuple(sorted(named))

    async def lacking(self) -> dict[str, list[str]]:
        """Return, per broker, the requests that we send and it does not know, or not in a version that we do.

        Raises BrokerUnavailable.
        """
        found = {}
        for broker in self._client.cluster.brokers():
            try:
                found[f"{broker.host}:{broker.port}"] = await _lacking(self._connection, broker.host, broker.port)
            except (KafkaError, OSError, TimeoutError) as error:
                raise BrokerUnavailable(f"broker {broker.host}:{broker.port} went away: {error!r}.") from error
        return found

    async def on_topics(self, names: Iterable[str]) -> dict[str, frozenset[str] | None]:
        """Return what is allowed on each topic; None if it is not there.

        Of one that may not even be seen, nothing is known but that whatever implies Describe is not allowed.
        """
        answer = await self._ask(self._client.get_random_node(), _TopicRights(sorted(set(names))))
        found: dict[str, frozenset[str] | None] = {}
        for code, name, _, _, _, _, operations, *_ in answer.topics:
            match code:
                case code if code == UNKNOWN_TOPIC:
                    found[name] = None
                case code if code == REFUSED_TOPIC:
                    found[name] = _NOT_IMPLYING_DESCRIBE
                case _:
                    found[name] = _operations(operations)
        return found

    async def on_group(self, name: str) -> frozenset[str]:
        """Return what is allowed on a group."""
        node = await self._coordinator(CoordinationType.GROUP, name)
        if node is None:
            return frozenset()
        answer = await self._ask(node, _GroupRights(name))
        code, *_, operations = answer.groups[0]
        return _operations(0 if code == REFUSED_GROUP else operations)

    async def try_transactional_id(self, name: str, timeout_ms: int) -> int:
        """Return the code that `InitProducerId` is answered; whoever else has this id is fenced by it."""
        node = await self._coordinator(CoordinationType.TRANSACTION, name)
        if node is None:
            return REFUSED_ID
        answer = await self._ask(node, InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=timeout_ms))
        return int(answer.error_code)

    async def _coordinator(self, kind: int, key: str) -> int | None:
        """Return the coordinator; None where the caller may not ask for it."""
        deadline_s = asyncio.get_running_loop().time() + self._connection.request_timeout_ms / 1000
        while True:
            try:
                return int(await self._client.coordinator_lookup(kind, key))
            except KafkaError as error:
                if isinstance(error, _REFUSALS):
                    return None
                # A cluster that is asked for the first time makes the coordinator's topic now.
                if asyncio.get_running_loop().time() >= deadline_s:
                    raise BrokerUnavailable(
                        f"no coordinator of {key!r} is named: {error!r}. Look at the brokers' logs."
                    ) from error
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _ask(self, node: int, request: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
        try:
            await self._client.ready(node)
            return await self._client.send(node, request)
        except KafkaError as error:
            raise BrokerUnavailable(f"broker {node} did not answer {type(request).__name__}: {error!r}.") from error


_REFUSALS: Final = (GroupAuthorizationFailedError, TransactionalIdAuthorizationFailed)


def _operations(bits: int) -> frozenset[str]:
    return frozenset(name for bit, name in _OPERATIONS.items() if bits >> bit & 1)


async def _lacking(connection: Connection, host: str, port: int) -> list[str]:
    async with probing(connection, host, port) as made:
        offered: dict[int, tuple[int, int]] = made._versions  # noqa: SLF001  # aiokafka has no public way to say so
    return [
        needed.__name__
        for needed in _NEEDED
        if not any(
            offered.get(needed.API_KEY, (0, -1))[0] <= known.API_VERSION <= offered.get(needed.API_KEY, (0, -1))[1]
            for known in needed._CLASSES  # noqa: SLF001
        )
    ]
