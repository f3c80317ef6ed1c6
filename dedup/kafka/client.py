"""Implements `Wire` (the requests of the exactly-once protocol) on top of aiokafka's client.

This module does not use aiokafka's producer, which silently repeats EndTxn, commits a transaction even if a record was
rejected, and has no deadlines (docs/decisions/0002-own-transactions.md).

The module also decides when a client tries to connect again (`back_off`), and how long it waits for a response
(`answered_within`).
"""

from __future__ import annotations

import asyncio
import functools
import types
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

from aiokafka import errors as kafka_errors
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED
from aiokafka.protocol.admin import DescribeConfigsRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
)

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.kafka.connection import Connection, connect, never_create_topics, say_no_name, say_throttled, until_refused
from dedup.kafka.record_batch import NO_EPOCH, Limit, TopicPartition, columns_of
from dedup.kafka.requests import (
    API_VERSIONS,
    CONSUMER,
    DIVERGING_EPOCH,
    EPOCH_END,
    IMPLICIT,
    NO_GENERATION,
    NO_ID,
    NO_SESSION,
    OTHER_TOPIC,
    READ_CONFIGS,
    UNKNOWN_TOPIC,
    EndTxnRequest_v5,
    FetchedPartition,
    FetchFrom,
    FetchRequest_v13,
    MetadataRequest_v10,
    OffsetFetchRequest_v7,
    OneVersion,
    ProduceRequest,
    ProduceRequest_v12,
    TxnOffsetCommitRequest_v2,
    TxnOffsetCommitRequest_v5,
    UnparsedMetadataRequest_v10,
    topics_in,
    transaction_version_in,
)
from dedup.kafka.wire import (
    COORDINATOR_MOVED,
    LEADER_MOVED,
    TRANSIENT,
    UNAUTHORIZED,
    CommittedOffset,
    Fetched,
    LogBounds,
    NoAnswer,
    Position,
    Produced,
    ProducerIdentity,
    TopicNow,
    error_name,
)

_ACKS_ALL: Final = -1
_EARLIEST: Final = -2
_LATEST: Final = -1
_TOPIC_RESOURCE: Final = 2
_LOOK_AGAIN_S: Final = 0.05
_RESTORE_LANE: Final = "restore"
"""The name of the connection that only restores use. A broker processes a connection's requests one at a time, so other
requests would have to wait for those of a restore.
"""
_METADATA_LANE: Final = "metadata"
_METADATA_WITHIN_S: Final = 2.0
"""The time limit of a metadata request. Any broker can respond, so one frozen broker must not delay every commit."""
_ABSENT_FOR_S: Final = 20.0
"""A topic counts as deleted once all responses of this many seconds lack the topic."""
_ABSENT_AGAIN_S: Final = 15.0
"""If more seconds pass between two responses, the time starts again. A request to a frozen broker takes 10 s."""
_PARTS: Final = 10
"""The number of parts in which `answered_within` waits."""
_CLOSE_WITHIN_S: Final = 1.0
_FIRST_BACKOFF_S: Final = 0.05
_MOST_BACKOFF_S: Final = 1.0


K = TypeVar("K")
T = TypeVar("T")


class _Prepared:
    """Replaces aiokafka's `Request` class, which would ignore the request's version and choose one itself."""

    def __init__(self, request: Any) -> None:  # noqa: ANN401  # untyped protocol structures
        self._request: Final = request

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> Any:  # noqa: ANN401  # untyped protocol structures
        """Return the request. Raises IncompatibleBrokerVersion if the broker does not support the request's version."""
        request = self._request
        least, most = versions.get(request.API_KEY, (0, -1))
        if not least <= request.API_VERSION <= most:
            raise kafka_errors.IncompatibleBrokerVersion(f"the broker does not know {type(request).__name__}")
        return request


def sendable(request: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
    """Return a `OneVersion` request in a wrapper that keeps its version, or any other request unchanged."""
    return _Prepared(request) if isinstance(request, OneVersion) else request


def grouped(pairs: Iterable[tuple[K, T]]) -> list[tuple[K, list[T]]]:
    """Group (topic, value) pairs by topic, and return each topic with the list of its values."""
    found: defaultdict[K, list[T]] = defaultdict(list)
    for topic, each in pairs:
        found[topic].append(each)
    return list(found.items())


def tagged(topics: Iterable[tuple[str, list[tuple[Any, ...]]]]) -> list[Any]:
    """Add the empty tag section that a flexible version (KIP-482) requires after each topic and each partition."""
    return [(topic, [(*part, {}) for part in parts], {}) for topic, parts in topics]


def metadata_request(
    names: Iterable[str], kind: type[MetadataRequest_v10] = MetadataRequest_v10, *, rights: bool = False
) -> Any:  # noqa: ANN401  # untyped protocol structures
    """Return a metadata request for the named topics. The request does not make the broker create missing topics.

    If ``rights`` is set, the response includes the operations that the caller is authorized to perform.
    """
    return kind([(NO_ID, name, {}) for name in names], False, False, rights, {})  # noqa: FBT003  # positional fields


Codes = Callable[[Any], Iterable[int]]
"""A function that returns the error codes in a response."""


def _own_code(answer: Any) -> Iterable[int]:  # noqa: ANN401  # untyped protocol structures
    return (answer.error_code,)


def _in_errors(answer: Any) -> Iterable[int]:  # noqa: ANN401  # untyped protocol structures
    return (code for _, parts, *_ in answer.errors for _, code, *_ in parts)


class KafkaWire:
    """A `Wire` that sends every request through a single aiokafka client, which all sessions and readers share."""

    def __init__(self, connection: Connection) -> None:
        self.connection: Final = connection
        self._client: AIOKafkaClient
        self._failed: set[object] = set()
        """The nodes to which the client could not connect since the last check by `until_refused`."""
        self._coordinators: dict[tuple[int, str], int] = {}
        self._topic_ids: dict[str, str] = {}
        """Maps the name of each pinned topic to its ID."""
        self._absent_s: Final[dict[str, tuple[float, float]]] = {}
        """Maps each pinned topic that brokers lack to the times of the first and the last response that lacked it."""
        self._seen_ids: dict[str, str] = {}
        """For each fetched topic that is not pinned, maps its name to the ID that the last lookup returned."""

    async def start(self) -> None:
        """Connect to the cluster. Raises BrokerUnavailable if no broker responds within the connection's `patience_ms`.

        After a permanent error, such as a wrong password or an untrusted certificate, `start` raises BrokerUnavailable
        immediately.
        """
        self._client = AIOKafkaClient(**self.connection.client_options())
        self._failed = back_off(self._client)
        outlast_blocks(self._client)
        never_create_topics(self._client)
        try:
            await connect(self.connection, self._client, self._client.bootstrap)
        except BaseException:
            await self._client.close()
            raise

    async def stop(self) -> None:
        """Close every connection."""
        await self._client.close()

    async def until_refused(self) -> NoReturn:
        """Raise BrokerUnavailable once all brokers permanently refuse this process; see `connection.until_refused`."""
        await until_refused(self.connection, self._client, self._failed)

    def pin(self, topic_ids: Mapping[str, str]) -> None:
        """See `Wire`."""
        self._topic_ids |= topic_ids

    async def pause(self, delay_ms: int) -> None:
        """Wait for ``delay_ms``."""
        await asyncio.sleep(delay_ms / 1000)

    async def init_producer_id(self, transactional_id: str, timeout_ms: int) -> tuple[int, ProducerIdentity]:
        """See `Wire`."""
        implicit = await self.transaction_version() >= IMPLICIT
        request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=timeout_ms)
        code, answer = await self._ask_coordinator(CoordinationType.TRANSACTION, transactional_id, request)
        return code, ProducerIdentity(answer.producer_id, answer.producer_epoch, implicit)

    async def transaction_version(self) -> int:
        """Return the cluster's finalized `transaction.version`, or 0 if it has none. May raise NoAnswer."""
        return transaction_version_in(await self._ask_any(API_VERSIONS))

    async def add_partitions(
        self, transactional_id: str, identity: ProducerIdentity, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """See `Wire`."""
        request = AddPartitionsToTxnRequest(
            transactional_id=transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            topics=grouped(partitions),
        )
        _, answer = await self._ask_coordinator(CoordinationType.TRANSACTION, transactional_id, request, _in_errors)
        return {TopicPartition(topic, partition): code for topic, parts in answer.errors for partition, code in parts}

    async def produce(
        self, transactional_id: str, identity: ProducerIdentity, batches: Sequence[tuple[TopicPartition, bytes]]
    ) -> Awaitable[dict[TopicPartition, Produced]]:
        """See `Wire`. The requests to several leaders are in flight at the same time."""
        by_leader: defaultdict[int, list[tuple[TopicPartition, bytes]]] = defaultdict(list)
        for target, payload in batches:
            by_leader[await self.leader(target)].append((target, payload))
        head = (transactional_id, _ACKS_ALL, self.connection.request_timeout_ms)
        answers: list[asyncio.Future[Any]] = []
        for node, part in by_leader.items():
            topics = grouped((topic, (partition, payload)) for (topic, partition), payload in part)
            request = (
                ProduceRequest_v12(*head, tagged(topics), {}) if identity.implicit else ProduceRequest(*head, topics)
            )
            answers.append(await self._write_produce(node, request))
        return self._produced(answers)

    async def _write_produce(self, node: int, request: Any) -> asyncio.Future[Any]:  # noqa: ANN401  # untyped protocol structures
        """Write a request to the connection's buffer before returning, so that the caller's requests stay in order."""
        if not await self._client.ready(node, group=ConnectionGroup.DEFAULT):
            raise NoAnswer(f"broker {node} is not reachable")
        # The client's `send` would wait for the response before the next request can be sent.
        connection = self._client._conns[node, ConnectionGroup.DEFAULT]  # noqa: SLF001
        try:
            answer: asyncio.Future[Any] = asyncio.ensure_future(connection.send(sendable(request)))
        except kafka_errors.KafkaError as error:
            raise NoAnswer(f"ProduceRequest to broker {node}: {error!r}") from error
        answer.add_done_callback(functools.partial(_close_if_silent, connection))
        return answer

    async def _produced(self, answers: Sequence[asyncio.Future[Any]]) -> dict[TopicPartition, Produced]:
        result: dict[TopicPartition, Produced] = {}
        for future in answers:
            try:
                answer = await future
            except (kafka_errors.KafkaError, OSError, TimeoutError) as error:
                raise NoAnswer(f"ProduceRequest: {error!r}") from error
            for topic, parts, *_ in answer.topics:
                for partition, code, base_offset, append_time_ms, _log_start, errors, why, *_tags in parts:
                    if code in LEADER_MOVED:
                        self._client.force_metadata_update()
                    refused = tuple((index, text or why or "") for index, text, *_ in errors or ())
                    result[TopicPartition(topic, partition)] = Produced(code, base_offset, refused, append_time_ms)
        return result

    async def add_offsets(self, transactional_id: str, identity: ProducerIdentity, group: str) -> int:
        """See `Wire`."""
        request = AddOffsetsToTxnRequest(
            transactional_id=transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            group_id=group,
        )
        return (await self._ask_coordinator(CoordinationType.TRANSACTION, transactional_id, request))[0]

    async def commit_offsets(
        self, transactional_id: str, identity: ProducerIdentity, group: str, offsets: Mapping[TopicPartition, Position]
    ) -> int:
        """See `Wire`. If several partitions have errors, `commit_offsets` returns the first error code."""
        topics = grouped((topic, (partition, *position)) for (topic, partition), position in offsets.items())
        head = (transactional_id, group, identity.producer_id, identity.epoch)
        request: Any = TxnOffsetCommitRequest_v2(*head, topics)
        if identity.implicit:
            request = TxnOffsetCommitRequest_v5(*head, NO_GENERATION, "", None, tagged(topics), {})
        return (await self._ask_coordinator(CoordinationType.GROUP, group, request, _in_errors))[0]

    async def end_transaction(
        self, transactional_id: str, identity: ProducerIdentity, *, commit: bool
    ) -> tuple[int, ProducerIdentity]:
        """See `Wire`."""
        fields = (transactional_id, identity.producer_id, identity.epoch, commit)
        request = EndTxnRequest_v5(*fields, {}) if identity.implicit else EndTxnRequest(*fields)
        code, answer = await self._ask_coordinator(CoordinationType.TRANSACTION, transactional_id, request)
        if code == 0 and identity.implicit:
            return code, ProducerIdentity(answer.producer_id, answer.producer_epoch, implicit=True)
        return code, identity

    async def committed_offset(self, group: str, source: TopicPartition, *, stable: bool) -> CommittedOffset:
        """See `Wire`."""
        request = OffsetFetchRequest_v7(group, [(source.topic, [source.partition], {})], stable, {})

        def codes(answer: Any) -> list[int]:  # noqa: ANN401  # untyped protocol structures
            return [answer.error_code, *(part[4] for _, parts, _ in answer.topics for part in parts)]

        code, answer = await self._ask_coordinator(CoordinationType.GROUP, group, request, codes)
        found = [Position(part[1], part[2], part[3] or "") for _, parts, _ in answer.topics for part in parts]
        return CommittedOffset(code, found[0] if found and found[0].offset >= 0 else None)

    async def limit(self, target: TopicPartition) -> Limit | None:
        """See `Wire`."""
        request = DescribeConfigsRequest([(_TOPIC_RESOURCE, target.topic, list(READ_CONFIGS))], False)  # noqa: FBT003  # as in aiokafka
        answer = await self.send(await self.leader(target), request, ConnectionGroup.DEFAULT)
        for code, _, _, _, entries in answer.resources:
            if code == 0:
                return Limit.of({entry[0]: entry[1] for entry in entries if entry[1] is not None})
        return None

    async def ask_group(self, group: str, request: Any, codes: Codes = _own_code) -> tuple[int, Any]:  # noqa: ANN401  # untyped protocol structures
        """Send a request to a group's coordinator, and return the first nonzero error code (or 0) and the response.

        ``codes`` extracts all error codes from a response. Raises NoAnswer if the broker does not respond.
        """
        return await self._ask_coordinator(CoordinationType.GROUP, group, request, codes)

    async def bounds(self, source: TopicPartition) -> LogBounds:
        """See `Wire`."""
        start = await self._list_offset(source, _EARLIEST)
        return LogBounds(start, await self._list_offset(source, _LATEST))

    async def offset_at(self, source: TopicPartition, time_ms: int) -> int | None:
        """See `Wire`."""
        offset = await self._list_offset(source, time_ms)
        return offset if offset >= 0 else None

    async def topics(self, names: tuple[str, ...]) -> Mapping[str, TopicNow | int]:
        """See `Wire`. The request goes to a random broker."""
        return topics_in((await self._ask_any(metadata_request(names, UnparsedMetadataRequest_v10))).body)

    async def _ask_any(self, request: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
        """Send a request to a random broker. Raises NoAnswer if the broker does not respond within 2 s."""
        node = self._client.get_random_node()
        if node is None:
            raise NoAnswer("no broker is known")
        asked = asyncio.ensure_future(self.send(node, request, _METADATA_LANE))
        try:
            return await answered_within(asked, _METADATA_WITHIN_S)
        except TimeoutError as error:
            # The next request must not use the same connection, because a firewall may have dropped it silently.
            silent = self._client._conns.get((node, _METADATA_LANE))  # noqa: SLF001  # aiokafka has no public API for this
            if silent is not None:
                silent.close(reason=CloseReason.CONNECTION_TIMEOUT)
            raise NoAnswer(
                f"broker {node} did not answer {type(request).__name__} within {_METADATA_WITHIN_S:g} s"
            ) from error

    async def known_everywhere(self, topic: str) -> bool:
        """Return whether every broker that responds knows a topic.

        Brokers that do not respond are ignored, because a restarting broker learns of the topic before it responds.
        """
        for broker in self._client.cluster.brokers():
            try:
                answer = await self.send(broker.nodeId, metadata_request((topic,)), _METADATA_LANE)
            except NoAnswer:
                continue
            if any(code for code, *_ in answer.topics):
                return False
        return True

    async def stable_end(self, source: TopicPartition) -> int:
        """Return a partition's last stable offset, before which all transactions have ended. May raise NoAnswer."""
        return await self._list_offset(source, _LATEST, READ_COMMITTED)

    async def _list_offset(self, source: TopicPartition, timestamp: int, isolation: int = READ_UNCOMMITTED) -> int:
        node = await self.leader(source)
        request = OffsetRequest(-1, isolation, [(source.topic, [(source.partition, timestamp)])])
        answer = await self.send(node, request, ConnectionGroup.DEFAULT)
        _, code, _, offset = answer.topics[0][1][0]
        if code:
            raise self._read_failed(source, code)
        return int(offset)

    async def fetch(self, source: TopicPartition, offset: int, *, max_bytes: int, wait_ms: int) -> Fetched:
        """See `Wire`. Raises StateIncompatible if the log no longer contains the offset or the topic was recreated."""
        part = await self.fetch_raw(source, offset, max_bytes=max_bytes, wait_ms=wait_ms, lane=_RESTORE_LANE)
        found, next_offset = columns_of(source, part.records, part.aborted, offset)
        columns = (found.offsets, found.timestamps_ms, found.keys, found.values)
        return Fetched(*columns, next_offset, part.high_watermark, part.last_stable_offset)

    async def fetch_raw(
        self, source: TopicPartition, offset: int, *, max_bytes: int, wait_ms: int, lane: str
    ) -> FetchedPartition:
        """Fetch the same records as `fetch`, but return them undecoded. Raises the same errors as `fetch`."""
        node = await self.leader(source)
        pinned = self._topic_ids.get(source.topic)
        topic_id = pinned or self._seen_ids.get(source.topic)
        if topic_id is None:
            topic_id = self._seen_ids[source.topic] = await self._topic_id_now(source)
        wanted = [FetchFrom(topic_id, source.partition, offset, NO_EPOCH, max_bytes)]
        code, parts = await self.fetch_partitions(node, wanted, wait_ms=wait_ms, most_bytes=max_bytes, lane=lane)
        if code or len(parts) != 1:
            raise NoAnswer(f"broker {node} returned an empty fetch response (code {code}; perhaps because of a quota)")
        (part,) = parts
        if part.error_code in OTHER_TOPIC:
            # The topic may have been recreated. Only a reader that pinned the old ID must stop.
            self._seen_ids.pop(source.topic, None)
            now = (await self.topics((source.topic,)))[source.topic] if pinned else None
            if isinstance(now, TopicNow) and now.topic_id != pinned:
                raise StateIncompatible(
                    f"topic {source.topic!r} was deleted and recreated while it was read: it had id {pinned} and "
                    f"has id {now.topic_id} now. No record of the new topic was read; start over with `dedup reset`."
                )
            raise NoAnswer(f"broker {node} does not know {source.topic} (code {part.error_code})")
        if part.error_code:
            raise self._read_failed(source, part.error_code, offset)
        return part

    async def _topic_id_now(self, source: TopicPartition) -> str:
        now = (await self.topics((source.topic,)))[source.topic]
        if isinstance(now, TopicNow):
            return now.topic_id
        raise self._read_failed(source, now)

    async def fetch_partitions(
        self, node: int, wanted: Sequence[FetchFrom], *, wait_ms: int, most_bytes: int, lane: str
    ) -> tuple[int, list[FetchedPartition]]:
        """Fetch committed records from one broker. The broker fills its response in the order of ``wanted``.

        Returns the response's top-level error code and partitions. Raises NoAnswer if the broker does not respond.
        """
        rows: list[tuple[bytes, list[Any]]] = grouped(
            (bytes.fromhex(topic_id), (partition, NO_EPOCH, position, leader_epoch, -1, most, {}))
            for topic_id, partition, position, leader_epoch, most in wanted
        )
        topics: list[Any] = [(*row, {}) for row in rows]
        sizes = (CONSUMER, wait_ms, 1, most_bytes)  # respond as soon as at least one byte is available
        request = FetchRequest_v13(*sizes, READ_COMMITTED, NO_SESSION, NO_EPOCH, topics, [], "", {})
        answer = await self.send(node, request, lane)
        return answer.error_code, [
            FetchedPartition(
                topic_id.hex(),
                partition,
                code,
                high_watermark,
                stable,
                [(producer_id, first) for producer_id, first, _ in aborted or ()],
                records or b"",
                EPOCH_END.unpack_from(tags[DIVERGING_EPOCH])[1] if DIVERGING_EPOCH in tags else None,
            )
            for topic_id, partitions, _ in answer.topics or ()
            for partition, code, high_watermark, stable, _, aborted, _, records, tags in partitions
        ]

    def _read_failed(self, source: TopicPartition, code: int, offset: int | None = None) -> Exception:
        if code in LEADER_MOVED:
            self._client.force_metadata_update()
            return NoAnswer(f"the leader of {source.topic}/{source.partition} moved (code {code})")
        name = error_name(code)
        if code in TRANSIENT:
            return NoAnswer(f"the leader of {source.topic}/{source.partition} answered {name}")
        at = "" if offset is None else f" at offset {offset}"
        if code == UNAUTHORIZED:
            return BrokerUnavailable(
                f"{source.topic}/{source.partition}{at} cannot be read: {name}. Grant the principal Read on the topic, "
                "as `dedup apply --acls` lists."
            )
        return StateIncompatible(
            f"{source.topic}/{source.partition}{at} cannot be read: {name}. "
            f"Nothing was changed; compare the topic with what `dedup check --broker` expects."
        )

    async def leader(self, target: TopicPartition) -> int:
        """Return the node ID of a partition's leader. Raises NoAnswer while the partition has no leader."""
        leader = self._client.cluster.leader_for_partition(target)
        if leader is None or leader == -1:
            await self._client.add_topic(target.topic)
            await self._client.force_metadata_update()
            leader = self._client.cluster.leader_for_partition(target)
        if leader is None or leader == -1:
            await self._refuse_absent(target.topic)
            raise NoAnswer(f"no leader is known for {target.topic}/{target.partition}")
        return int(leader)

    async def _refuse_absent(self, topic: str) -> None:
        """Raise StateIncompatible if a pinned topic has been missing from all responses of `_ABSENT_FOR_S` seconds.

        A single response is not enough, because a starting broker may not know the topic yet.
        """
        if topic not in self._topic_ids:
            return
        if (await self.topics((topic,)))[topic] != UNKNOWN_TOPIC:
            self._absent_s.pop(topic, None)
            return
        now_s = asyncio.get_running_loop().time()
        first_s, last_s = self._absent_s.get(topic, (now_s, now_s))
        if now_s - last_s > _ABSENT_AGAIN_S:
            first_s = now_s
        self._absent_s[topic] = first_s, now_s
        if now_s - first_s >= _ABSENT_FOR_S:
            raise StateIncompatible(
                f"topic {topic!r} was deleted while it was read: no response has had it for {now_s - first_s:.0f} s. "
                "Nothing was changed. Bring it back, or start over with `dedup reset`."
            )

    async def _ask_coordinator(self, kind: int, key: str, request: Any, codes: Codes = _own_code) -> tuple[int, Any]:  # noqa: ANN401  # untyped protocol structures
        node = await self._coordinator(kind, key)
        try:
            answer = await self.send(node, request, ConnectionGroup.COORDINATION)
        except NoAnswer:
            self._coordinators.pop((kind, key), None)
            raise
        found = [code for code in codes(answer) if code]
        if not COORDINATOR_MOVED.isdisjoint(found):
            self._coordinators.pop((kind, key), None)
        return (found[0] if found else 0), answer

    async def _coordinator(self, kind: int, key: str) -> int:
        """Return the node ID of a coordinator. Retries until the request timeout, and then raises NoAnswer.

        Raises BrokerUnavailable if the principal may not describe the group or the transactional ID.
        """
        known = self._coordinators.get((kind, key))
        if known is not None:
            return known
        deadline = asyncio.get_running_loop().time() + self.connection.request_timeout_ms / 1000
        while True:
            try:
                node = int(await self._client.coordinator_lookup(kind, key))
                if self._client.cluster.broker_metadata(node) is None:
                    await self._client.force_metadata_update()
            except (
                kafka_errors.GroupAuthorizationFailedError,
                kafka_errors.TransactionalIdAuthorizationFailed,
            ) as error:
                raise BrokerUnavailable(
                    f"the brokers do not say who coordinates {key!r}: {type(error).__name__}. Grant the worker's "
                    "principal what `dedup apply --acls` lists."
                ) from error
            except kafka_errors.KafkaError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise NoAnswer(f"no coordinator for {key}: {error!r}") from error
                await asyncio.sleep(_LOOK_AGAIN_S)
            else:
                self._coordinators[kind, key] = node
                return node

    @property
    def one_broker(self) -> bool:
        """True if the cluster has only one broker, so that no other broker can become a leader."""
        return len(self._client.cluster.brokers()) <= 1

    async def refresh(self) -> None:
        """Refresh the metadata about brokers and partition leaders."""
        await self._client.force_metadata_update()

    async def send(self, node: int, request: Any, group: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
        """Send a request to a broker over the connection for the given connection group.

        Raises NoAnswer if the broker does not respond, and BrokerUnavailable if the broker's release is too old.
        """
        try:
            return await self._client.send(node, sendable(request), group=group)
        except (kafka_errors.IncompatibleBrokerVersion, NotImplementedError) as error:
            raise BrokerUnavailable(
                f"broker {node} does not support {type(request).__name__}. Kafka 3.1 or newer is needed."
            ) from error
        except (kafka_errors.KafkaError, OSError) as error:
            raise NoAnswer(f"{type(request).__name__} to broker {node}: {error!r}") from error


def _close_if_silent(connection: Any, answer: asyncio.Future[Any]) -> None:  # noqa: ANN401  # untyped client
    """Close the connection after a timeout, so that no new epoch reuses the unresponsive connection."""
    if not answer.cancelled() and isinstance(answer.exception(), TimeoutError):
        connection.close(reason=CloseReason.CONNECTION_TIMEOUT)


async def answered_within(answer: asyncio.Future[T], within_s: float, paused: Callable[[], bool] = lambda: False) -> T:
    """Return a response. If it does not arrive within ``within_s`` seconds, stop waiting and raise TimeoutError.

    While a flow or an ID function blocks the event loop, the loop reads no responses. Afterward, a timer that is due
    would fire before the loop reads the responses that have arrived. Therefore, `answered_within` divides the wait into
    several parts, and counts each part once, no matter how late the part ends. If ``paused`` returns True at the end of
    a part, this part is not counted.
    """
    try:
        parts = _PARTS
        while parts:
            await asyncio.wait({answer}, timeout=within_s / _PARTS)
            if answer.done():
                return answer.result()
            parts -= not paused()
        raise TimeoutError
    finally:
        if not answer.cancel() and not answer.cancelled():
            answer.exception()  # otherwise, asyncio would log the error


_send: Final = AIOKafkaConnection.send
_send_only: Final = types.FunctionType(
    _send.__code__, {**_send.__globals__, "wait_for": lambda answer, _: answer}, argdefs=_send.__defaults__
)
"""aiokafka's own method, except that the returned future of the response has no time limit."""


class _WaitingConnection(AIOKafkaConnection):  # type: ignore[misc]  # untyped base
    """aiokafka's connection with three changes: it waits for responses with `answered_within`, heeds quotas, and closes
    soon even if the broker reads nothing.

    If a client exceeds its quota, the broker responds immediately, but then reads nothing from the connection for the
    time that the response names (KIP-219). Requests that wait during this time do not count as unanswered.
    """

    _muted_until_s = 0.0

    def send(self, request: Any, expect_response: bool = True) -> Awaitable[Any]:  # noqa: ANN401, FBT001, FBT002  # aiokafka's
        sent: Any = _send_only(self, request, expect_response)
        return self._answered(sent) if expect_response else sent

    def close(self, reason: CloseReason | None = None, exc: Exception | None = None) -> Any:  # noqa: ANN401  # aiokafka's
        """Close the connection. Bytes that the broker does not read soon are dropped, so they do not delay a stop."""
        writer = self._writer
        closed = super().close(reason, exc)
        if writer is not None:
            self._loop.call_later(_CLOSE_WITHIN_S, writer.transport.abort)
        return closed

    async def _answered(self, answer: asyncio.Future[Any]) -> Any:  # noqa: ANN401  # untyped protocol structures
        clock_s = asyncio.get_running_loop().time
        found = await answered_within(answer, self._request_timeout, lambda: clock_s() < self._muted_until_s)
        throttled_ms = getattr(found, "throttle_time_ms", 0)
        if throttled_ms > 0:
            self._muted_until_s = clock_s() + throttled_ms / 1000
            say_throttled(f"{self.host}:{self.port}", found.API_KEY, throttled_ms)
        return found


def back_off(client: AIOKafkaClient) -> set[object]:
    """Make a client pause between attempts to connect to an unreachable node, as Kafka's own clients do (KIP-144).

    Returns a set to which the client adds each node to which it could not connect. The caller may empty the set.

    The pause doubles from 50 ms to 1 s. During the pause, the client treats the node as unreachable at once. Without
    the pause, aiokafka would try again constantly: each failed attempt makes it look for new metadata, and to do so, it
    tries to connect again. A node whose host name Python refuses to look up (``.svc``) also counts as unreachable;
    otherwise, the UnicodeError would end aiokafka's metadata task, and callers that wait for metadata would hang.
    """
    connect = client._get_conn  # noqa: SLF001  # aiokafka has no public API for this
    waits: dict[object, tuple[float, float]] = {}
    """Maps each unreachable node to its pause and the end of the pause, in seconds."""
    failed: set[object] = set()

    async def connect_later(node_id: object, **options: Any) -> AIOKafkaConnection | None:  # noqa: ANN401  # aiokafka's
        clock_s, known = asyncio.get_running_loop().time, waits.get(node_id)
        held = client._conns.get((node_id, options.get("group", ConnectionGroup.DEFAULT)))  # noqa: SLF001
        if known is not None and (held is None or not held.connected()):
            pause_s, until_s = known
            if clock_s() < until_s:
                return None
            # Of all requests that arrive after the pause, only this one makes the next attempt.
            known = waits[node_id] = pause_s, clock_s() + pause_s
        made: AIOKafkaConnection | None = None
        try:
            made = await connect(node_id, **options)
        except UnicodeError:
            say_no_name(node_id, client.cluster.broker_metadata(node_id).host)
        if made is not None:
            waits.pop(node_id, None)
            return made
        failed.add(node_id)
        if waits.get(node_id) == known:  # otherwise, another attempt has failed in the meantime
            pause_s = _FIRST_BACKOFF_S if known is None else min(2 * known[0], _MOST_BACKOFF_S)
            waits[node_id] = pause_s, clock_s() + pause_s
        return made

    client._get_conn = connect_later  # noqa: SLF001
    return failed


def outlast_blocks(client: AIOKafkaClient) -> None:
    """Make a client read the responses that have arrived, and heed quotas, before it treats requests as unanswered."""
    connect = client._get_conn  # noqa: SLF001  # aiokafka has no public API for this

    async def connect_outlasting(node_id: object, **options: Any) -> AIOKafkaConnection | None:  # noqa: ANN401  # aiokafka's
        made: AIOKafkaConnection | None = await connect(node_id, **options)
        if made is not None:
            made.__class__ = _WaitingConnection
        return made

    client._get_conn = connect_outlasting  # noqa: SLF001
