"""Checks which permissions a principal has, and whether the brokers support the request versions that dedup sends.

Brokers report which operations a caller may perform on topics and groups (KIP-430), but not on transactional IDs. The
only way to test the right to use a transactional ID is to send an `InitProducerId` request. This module sends
`InitProducerId` with an ID that no task uses, so the test fences no worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, Self

from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, TransactionalIdAuthorizationFailed
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)

from dedup.errors import BrokerUnavailable
from dedup.kafka.client import back_off, metadata_request, sendable
from dedup.kafka.connection import Connection, advertised, connect, probing
from dedup.kafka.requests import (
    API_VERSIONS,
    UNKNOWN_TOPIC,
    CreateTopicsRequest_v4,
    DescribeGroupRightsRequest_v3,
    FetchRequest_v13,
    MetadataRequest_v10,
    OffsetFetchRequest_v7,
    ProduceRequest,
    TxnOffsetCommitRequest_v2,
    transaction_version_in,
)
from dedup.kafka.wire import UNAUTHORIZED

_REFUSED_GROUP: Final = 30
REFUSED_ID: Final = 53
TIMEOUT_TOO_LONG: Final = 50
LOOK_AGAIN_S: Final = 0.2
_OPERATIONS: Final = {3: "Read", 4: "Write", 5: "Create", 6: "Delete", 8: "Describe", 10: "DescribeConfigs"}
"""Maps the number of each operation, which is also the operation's bit position in a response, to its name."""
_NOT_IMPLYING_DESCRIBE: Final = frozenset({"DescribeConfigs"})
_NEEDED: Final[tuple[type[Any], ...]] = (
    ProduceRequest,
    FetchRequest_v13,
    OffsetRequest,
    InitProducerIdRequest,
    AddPartitionsToTxnRequest,
    AddOffsetsToTxnRequest,
    TxnOffsetCommitRequest_v2,
    EndTxnRequest,
    OffsetFetchRequest_v7,
    MetadataRequest_v10,
    CreateTopicsRequest_v4,
)


class Rights:
    """Reports the caller's rights. Use `Rights` with ``async with``. Every method can raise BrokerUnavailable."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Final = connection
        self._client: Final = AIOKafkaClient(**connection.client_options())
        back_off(self._client)

    async def __aenter__(self) -> Self:
        try:
            await connect(self._connection, self._client, self._client.bootstrap)
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def advertised(self) -> tuple[str, ...]:
        """Return the addresses that the brokers advertise, as host:port."""
        return advertised(self._client.cluster)

    async def lacking(self) -> dict[str, list[str]]:
        """Map each broker's address to the requests whose API versions dedup and the broker do not share."""
        found = {}
        for broker in self._client.cluster.brokers():
            try:
                found[f"{broker.host}:{broker.port}"] = await _lacking(self._connection, broker.host, broker.port)
            except (KafkaError, OSError, TimeoutError) as error:
                raise BrokerUnavailable(f"broker {broker.host}:{broker.port} went away: {error!r}.") from error
        return found

    async def transaction_version(self) -> int:
        """Return the cluster's finalized `transaction.version`, or 0 if the cluster has none."""
        return transaction_version_in(await self._ask(self._client.get_random_node(), API_VERSIONS))

    async def on_topics(self, names: Iterable[str]) -> dict[str, frozenset[str] | None]:
        """Return the operations that the caller may perform on each topic, or None for a topic that does not exist.

        If the caller may not describe a topic, the broker reports no operations for that topic, and the result contains
        only DescribeConfigs.
        """
        request = metadata_request(sorted(set(names)), rights=True)
        answer = await self._ask(self._client.get_random_node(), request)
        found: dict[str, frozenset[str] | None] = {}
        for code, name, _, _, _, operations, *_ in answer.topics:
            if code == UNKNOWN_TOPIC:
                found[name] = None
            else:
                found[name] = _NOT_IMPLYING_DESCRIBE if code == UNAUTHORIZED else _operations(operations)
        return found

    async def on_group(self, name: str) -> frozenset[str]:
        """Return the operations that the caller may perform on a group."""
        node = await self._coordinator(CoordinationType.GROUP, name)
        if node is None:
            return frozenset()
        answer = await self._ask(node, DescribeGroupRightsRequest_v3([name], True))  # noqa: FBT003  # positional protocol fields
        code, *_, operations = answer.groups[0]
        return _operations(0 if code == _REFUSED_GROUP else operations)

    async def try_transactional_id(self, name: str, timeout_ms: int) -> int:
        """Send `InitProducerId`, which fences every producer with this transactional ID, and return the error code."""
        node = await self._coordinator(CoordinationType.TRANSACTION, name)
        if node is None:
            return REFUSED_ID
        answer = await self._ask(node, InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=timeout_ms))
        return int(answer.error_code)

    async def _coordinator(self, kind: int, key: str) -> int | None:
        """Return the node ID of a coordinator, or None if the caller is not authorized to look it up."""
        deadline_s = asyncio.get_running_loop().time() + self._connection.request_timeout_ms / 1000
        while True:
            try:
                return int(await self._client.coordinator_lookup(kind, key))
            except KafkaError as error:
                if isinstance(error, _REFUSALS):
                    return None
                # A cluster creates the coordinator's topic when it receives the first such request.
                if asyncio.get_running_loop().time() >= deadline_s:
                    raise BrokerUnavailable(
                        f"no coordinator of {key!r} was found: {error!r}. Look at the brokers' logs."
                    ) from error
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _ask(self, node: int, request: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
        try:
            await self._client.ready(node)
            return await self._client.send(node, sendable(request))
        except KafkaError as error:
            raise BrokerUnavailable(f"broker {node} did not answer {type(request).__name__}: {error!r}.") from error


_REFUSALS: Final = (GroupAuthorizationFailedError, TransactionalIdAuthorizationFailed)


def _operations(bits: int) -> frozenset[str]:
    return frozenset(name for bit, name in _OPERATIONS.items() if bits >> bit & 1)


async def _lacking(connection: Connection, host: str, port: int) -> list[str]:
    async with probing(connection, host, port) as made:
        offered: dict[int, tuple[int, int]] = made._versions  # noqa: SLF001  # aiokafka has no public API for this
    lacks = []
    for needed in _NEEDED:
        least, most = offered.get(needed.API_KEY, (0, -1))
        structures = getattr(needed, "_CLASSES", (needed,))  # each structure is one version
        if not any(least <= known.API_VERSION <= most for known in structures):
            lacks.append(needed.__name__)
    return lacks
