"""The cluster itself: each method of `Wire` as one request of aiokafka's client.

aiokafka's own producer is not used. It repeats EndTxn silently, commits past a refused record and has no deadlines
(docs/decisions/0002-own-transactions.md); its client, protocol structures and record batches are.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from aiokafka import errors as kafka_errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.conn import CloseReason
from aiokafka.consumer.fetcher import READ_COMMITTED
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

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.session.diagnose import diagnose, most_telling
from dedup.session.fetch import columns_of, data_of
from dedup.session.stable_offsets import StableOffset
from dedup.session.wire import (
    COORDINATOR_MOVED,
    CommittedOffset,
    Fetched,
    LogBounds,
    NoAnswer,
    Produced,
    ProducerIdentity,
    TopicPartition,
)

if TYPE_CHECKING:
    from dedup.session.connection import Connection

ACKS_ALL: Final = -1
EARLIEST: Final = -2
LATEST: Final = -1
READ_UNCOMMITTED: Final = 0
LOOK_AGAIN_S: Final = 0.05
LEADER_MOVED: Final = frozenset({3, 5, 6, 9, 13, 56, 74, 75, 76})


RESTORE_LANE: Final = "restore"
"""A connection of its own: a broker answers the requests of one connection one after the other."""


class KafkaWire:
    """A cluster behind one aiokafka client; many sessions share it."""

    leader_moved: Final = LEADER_MOVED

    def __init__(self, connection: Connection) -> None:
        self.connection: Final = connection
        self._client: AIOKafkaClient
        self._coordinators: dict[tuple[int, str], int] = {}

    async def start(self) -> None:
        """Connect; raises BrokerUnavailable when no broker answers within the connection's patience.

        At once where waiting cures nothing: a wrong password, a certificate that is not trusted.
        """
        client = AIOKafkaClient(**self.connection.client_options())
        deadline = asyncio.get_running_loop().time() + self.connection.patience_ms / 1000
        while True:
            try:
                await client.bootstrap()
            except kafka_errors.KafkaConnectionError as error:
                found = most_telling(await diagnose(self.connection))
                if found is not None and not found.passing:
                    await client.close()
                    raise BrokerUnavailable(f"{found.sentence}.") from error
                if asyncio.get_running_loop().time() >= deadline:
                    await client.close()
                    text = (
                        f"no broker answers at {', '.join(self.connection.brokers)} "
                        f"({error if found is None else found.sentence}). "
                        f"Start one (`dedup broker`), or correct `brokers` in the config."
                    )
                    raise BrokerUnavailable(text) from error
                await asyncio.sleep(0.2)
            else:
                self._client = client
                return

    async def stop(self) -> None:
        """Close every connection."""
        await self._client.close()

    async def pause(self, delay_ms: int) -> None:
        """Wait ``delay_ms``."""
        await asyncio.sleep(delay_ms / 1000)

    async def init_producer_id(self, transactional_id: str, timeout_ms: int) -> tuple[int, ProducerIdentity]:
        """See `Wire`."""
        request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=timeout_ms)
        answer = await self._ask_coordinator(CoordinationType.TRANSACTION, transactional_id, request)
        code = self._noted(CoordinationType.TRANSACTION, transactional_id, answer.error_code)
        return code, ProducerIdentity(answer.producer_id, answer.producer_epoch)

    async def add_partitions(
        self, transactional_id: str, identity: ProducerIdentity, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """See `Wire`."""
        by_topic: defaultdict[str, list[int]] = defaultdict(list)
        for topic, partition in partitions:
            by_topic[topic].append(partition)
        request = AddPartitionsToTxnRequest(
            transactional_id=transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            topics=list(by_topic.items()),
        )
        answer = await self._ask_coordinator(CoordinationType.TRANSACTION, transactional_id, request)
        return {
            TopicPartition(topic, partition): self._noted(CoordinationType.TRANSACTION, transactional_id, code)
            for topic, parts in answer.errors
            for partition, code in parts
        }

    async def produce(
        self, transactional_id: str, batches: Sequence[tuple[TopicPartition, bytes]]
    ) -> Awaitable[dict[TopicPartition, Produced]]:
        """See `Wire`; batches of one leader share a request, leaders are asked side by side."""
        by_leader: defaultdict[int, list[tuple[TopicPartition, bytes]]] = defaultdict(list)
        for target, payload in batches:
            by_leader[await self.leader(target)].append((target, payload))
        answers = [
            await self._write_produce(node, self._produce_request(transactional_id, part))
            for node, part in by_leader.items()
        ]
        return self._produced(answers)

    def _produce_request(
        self, transactional_id: str, batches: Sequence[tuple[TopicPartition, bytes]]
    ) -> ProduceRequest:
        by_topic: defaultdict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for (topic, partition), payload in batches:
            by_topic[topic].append((partition, payload))
        return ProduceRequest(
            transactional_id=transactional_id,
            required_acks=ACKS_ALL,
            timeout=self.connection.request_timeout_ms,
            topics=list(by_topic.items()),
        )

    async def _write_produce(self, node: int, request: ProduceRequest) -> asyncio.Future[Any]:
        """Return when the request is in the connection's buffer; requests of one caller keep their order."""
        if not await self._client.ready(node, group=ConnectionGroup.DEFAULT):
            raise NoAnswer(f"broker {node} is not reachable")
        # The client's own `send` waits for the answer; only its connection lets the next request follow at once.
        connection = self._client._conns[node, ConnectionGroup.DEFAULT]  # noqa: SLF001
        try:
            written = connection.send(request)
        except kafka_errors.KafkaError as error:
            raise NoAnswer(f"ProduceRequest to broker {node}: {error!r}") from error
        return asyncio.ensure_future(_closing_when_silent(connection, written))

    async def _produced(self, answers: Sequence[asyncio.Future[Any]]) -> dict[TopicPartition, Produced]:
        result: dict[TopicPartition, Produced] = {}
        for future in answers:
            try:
                answer = await future
            except (kafka_errors.KafkaError, OSError, TimeoutError) as error:
                raise NoAnswer(f"ProduceRequest: {error!r}") from error
            for topic, parts in answer.topics:
                for partition, code, base_offset, *_ in parts:
                    if code in LEADER_MOVED:
                        self._client.force_metadata_update()
                    result[TopicPartition(topic, partition)] = Produced(code, base_offset)
        return result

    async def add_offsets(self, transactional_id: str, identity: ProducerIdentity, group: str) -> int:
        """See `Wire`."""
        request = AddOffsetsToTxnRequest(
            transactional_id=transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            group_id=group,
        )
        answer = await self._ask_coordinator(CoordinationType.TRANSACTION, transactional_id, request)
        return self._noted(CoordinationType.TRANSACTION, transactional_id, answer.error_code)

    async def commit_offsets(
        self, transactional_id: str, identity: ProducerIdentity, group: str, offsets: Mapping[TopicPartition, int]
    ) -> int:
        """See `Wire`; the first error of several partitions."""
        by_topic: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for (topic, partition), offset in offsets.items():
            by_topic[topic].append((partition, offset, ""))
        request = TxnOffsetCommitRequest(
            transactional_id=transactional_id,
            group_id=group,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            topics=list(by_topic.items()),
        )
        answer = await self._ask_coordinator(CoordinationType.GROUP, group, request)
        codes = [code for _, parts in answer.errors for _, code in parts if code]
        return self._noted(CoordinationType.GROUP, group, codes[0] if codes else 0)

    async def end_transaction(self, transactional_id: str, identity: ProducerIdentity, *, commit: bool) -> int:
        """See `Wire`."""
        request = EndTxnRequest(
            transactional_id=transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            transaction_result=commit,
        )
        answer = await self._ask_coordinator(CoordinationType.TRANSACTION, transactional_id, request)
        return self._noted(CoordinationType.TRANSACTION, transactional_id, answer.error_code)

    async def committed_offset(self, group: str, source: TopicPartition, *, stable: bool) -> CommittedOffset:
        """See `Wire`."""
        request = StableOffset(group, *source, stable=stable)
        answer = await self._ask_coordinator(CoordinationType.GROUP, group, request)
        code, offset = answer.error_code, -1
        for _, ((_, part_offset, _, _, part_code, _),), _ in answer.topics:
            offset, code = part_offset, code or part_code
        return CommittedOffset(self._noted(CoordinationType.GROUP, group, code), offset if offset >= 0 else None)

    async def ask_group(self, group: str, request: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
        """Send a request to a group's coordinator; raises NoAnswer."""
        return await self._ask_coordinator(CoordinationType.GROUP, group, request)

    async def bounds(self, source: TopicPartition) -> LogBounds:
        """See `Wire`."""
        start = await self._list_offset(source, EARLIEST)
        return LogBounds(start, await self._list_offset(source, LATEST))

    async def offset_at(self, source: TopicPartition, time_ms: int) -> int | None:
        """Return the first offset with a timestamp of ``time_ms`` or later; None when there is none."""
        offset = await self._list_offset(source, time_ms)
        return offset if offset >= 0 else None

    async def _list_offset(self, source: TopicPartition, timestamp: int) -> int:
        node = await self.leader(source)
        request = OffsetRequest(-1, READ_UNCOMMITTED, [(source.topic, [(source.partition, timestamp)])])
        answer = await self.send(node, request, ConnectionGroup.DEFAULT)
        _, code, _, offset = answer.topics[0][1][0]
        if code:
            raise self._read_failed(source, code)
        return int(offset)

    async def fetch(self, source: TopicPartition, offset: int, *, max_bytes: int, wait_ms: int) -> Fetched:
        """See `Wire`; raises StateIncompatible where the log no longer holds the offset."""
        node = await self.leader(source)
        request = FetchRequest(
            wait_ms, 1, max_bytes, READ_COMMITTED, [(source.topic, [(source.partition, offset, max_bytes)])]
        )
        answer = await self.send(node, request, RESTORE_LANE)
        _, code, high_watermark, stable, *rest = answer.topics[0][1][0]
        if code:
            raise self._read_failed(source, code, offset)
        aborted, raw = data_of(rest)
        found, next_offset = columns_of(source, raw, aborted, offset)
        return Fetched(
            found.offsets, found.timestamps_ms, found.keys, found.values, next_offset, high_watermark, stable
        )

    def _read_failed(self, source: TopicPartition, code: int, offset: int | None = None) -> Exception:
        if code in LEADER_MOVED:
            self._client.force_metadata_update()
            return NoAnswer(f"the leader of {source.topic}/{source.partition} moved (code {code})")
        name = kafka_errors.for_code(code).__name__
        at = "" if offset is None else f" at offset {offset}"
        return StateIncompatible(
            f"{source.topic}/{source.partition}{at} can not be read: {name}. "
            f"Nothing was changed; compare the topic with what `dedup check --broker` expects."
        )

    async def leader(self, target: TopicPartition) -> int:
        """Return the broker that leads a partition; raises NoAnswer while none does."""
        leader = self._client.cluster.leader_for_partition(target)
        if leader is None or leader == -1:
            await self._client.add_topic(target.topic)
            await self._client.force_metadata_update()
            leader = self._client.cluster.leader_for_partition(target)
        if leader is None or leader == -1:
            raise NoAnswer(f"no leader is known for {target.topic}/{target.partition}")
        return int(leader)

    def _noted(self, kind: int, key: str, code: int) -> int:
        if code in COORDINATOR_MOVED:
            self._coordinators.pop((kind, key), None)
        return code

    async def _ask_coordinator(self, kind: int, key: str, request: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
        node = await self._coordinator(kind, key)
        try:
            return await self.send(node, request, ConnectionGroup.COORDINATION)
        except NoAnswer:
            self._coordinators.pop((kind, key), None)
            raise

    async def _coordinator(self, kind: int, key: str) -> int:
        """Find a coordinator, asking again while the cluster has none: nothing was sent to it yet."""
        known = self._coordinators.get((kind, key))
        if known is not None:
            return known
        deadline = asyncio.get_running_loop().time() + self.connection.request_timeout_ms / 1000
        while True:
            try:
                node = int(await self._client.coordinator_lookup(kind, key))
                if self._client.cluster.broker_metadata(node) is None:
                    await self._client.force_metadata_update()
            except kafka_errors.KafkaError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise NoAnswer(f"no coordinator for {key}: {error!r}") from error
                await asyncio.sleep(LOOK_AGAIN_S)
            else:
                self._coordinators[kind, key] = node
                return node

    async def refresh(self) -> None:
        """Look up leaders and brokers again."""
        await self._client.force_metadata_update()

    async def send(self, node: int, request: Any, group: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
        """Send one request on the connection of a lane; raises NoAnswer."""
        try:
            return await self._client.send(node, request, group=group)
        except (kafka_errors.KafkaError, OSError) as error:
            raise NoAnswer(f"{type(request).__name__} to broker {node}: {error!r}") from error


async def _closing_when_silent(connection: Any, answer: Awaitable[Any]) -> Any:  # noqa: ANN401  # untyped client
    """Await an answer; a connection that gives none in time is closed, or every new epoch would use it again."""
    try:
        return await answer
    except TimeoutError:
        connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
        raise
