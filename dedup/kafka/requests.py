# ruff: noqa: N801  # aiokafka names versions this way
# mypy: disallow-subclassing-any=False
"""Defines request versions that aiokafka lacks, according to Kafka's protocol guide.

A broker must support all these versions except those of KIP-890. Kafka 3.1 and later releases support them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from io import BytesIO
from operator import methodcaller
from struct import Struct
from typing import Any, ClassVar, Final, NamedTuple

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.admin import (
    CreateTopicsRequest_v3,
    CreateTopicsResponse_v3,
    DescribeGroupsRequest_v3,
    DescribeGroupsResponse_v3,
)
from aiokafka.protocol.api import RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.produce import ProduceRequest_v8
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

from dedup.kafka.wire import TopicNow

CONSUMER: Final = -1
"""The replica ID of a client that is not a broker."""
NO_SESSION: Final = 0
NO_GENERATION: Final = -1
"""The generation of a client that commits offsets without being a member of the group."""
UNKNOWN_TOPIC: Final = 3
OTHER_TOPIC: Final = frozenset({100, 103})
"""The error codes of a fetch response for an unknown topic ID and for an inconsistent topic ID."""
READ_CONFIGS: Final = (
    "max.message.bytes",
    "retention.ms",
    "retention.bytes",
    "cleanup.policy",
    "message.timestamp.type",
    "min.insync.replicas",
    "compression.type",
)
"""The topic configs that dedup reads."""
_TEXT: Final = CompactString("utf-8")
_PLAIN_TEXT: Final = String("utf-8")
_ID_BYTES: Final = 16
NO_ID: Final = bytes(_ID_BYTES)
"""The topic ID in a request that identifies topics by name."""


class _TopicId(AbstractType[Any]):
    encode = staticmethod(bytes)
    decode = staticmethod(methodcaller("read", _ID_BYTES))


def _fields(**types: object) -> Schema:
    """Return the fields of a message in a flexible version (KIP-482), in which tagged fields come last."""
    return Schema(*types.items(), ("tags", TaggedFields))


def _array(**types: object) -> CompactArray:
    return CompactArray(*types.items(), ("tags", TaggedFields))


_FINALIZED_FEATURES: Final = 2
"""The tag of the field in an ApiVersions response that lists the finalized features."""
_FEATURES: Final = _array(name=_TEXT, most=Int16, least=Int16)


class OneVersion:
    """The base class of requests that `client.sendable` prepares for sending in exactly one version."""

    ANSWER: ClassVar[Schema]
    """The fields of the response."""

    def __init_subclass__(cls) -> None:
        if "ANSWER" in cls.__dict__:
            named: Any = cls
            version = {"API_KEY": named.API_KEY, "API_VERSION": named.API_VERSION, "SCHEMA": cls.ANSWER}
            named.RESPONSE_TYPE = type(f"{cls.__name__}Response", (Response,), version)
        super().__init_subclass__()


class ApiVersionsRequest_v3(OneVersion, RequestStruct):
    """Requests the finalized feature versions of the cluster (KIP-584)."""

    FLEXIBLE_VERSION = True
    API_KEY, API_VERSION = 18, 3
    SCHEMA = _fields(client_name=_TEXT, client_version=_TEXT)
    ANSWER = _fields(
        error_code=Int16, api_versions=_array(api_key=Int16, least=Int16, most=Int16), throttle_time_ms=Int32
    )

    def parse_response_header(self, read_buffer: Any) -> Any:  # noqa: ANN401  # untyped protocol structures
        """Read a header without tags, which a client can parse before it knows the broker's release (KIP-511)."""
        return ResponseHeader_v0.decode(read_buffer)


API_VERSIONS: Final = ApiVersionsRequest_v3("dedup", "1", {})
IMPLICIT: Final = 2
"""The first transaction version in which requests add partitions to a transaction implicitly (KIP-890)."""
DIVERGING_EPOCH: Final = 0
"""The tag of the fetch response field that shows where the broker's log diverges from the records already read."""
EPOCH_END: Final = Struct(">iq")
"""The binary format of a diverging epoch: a leader epoch, and the offset at which the epoch ends in the broker's log.
"""


def transaction_version_in(answer: Any) -> int:  # noqa: ANN401  # untyped protocol structures
    """Return the finalized `transaction.version` from an ApiVersions response, or 0 if the cluster has none."""
    packed = answer.tags.get(_FINALIZED_FEATURES)
    found = _FEATURES.decode(BytesIO(packed)) if packed else None
    return {name: int(most) for name, most, *_ in found or ()}.get("transaction.version", 0)


class ProduceRequest(OneVersion, ProduceRequest_v8):
    """Writes batches. The produce response names the records that caused the broker to refuse a batch (KIP-467)."""


class ProduceRequest_v12(OneVersion, RequestStruct):
    """Writes batches, and adds their partitions to the transaction (KIP-890)."""

    FLEXIBLE_VERSION = True
    API_KEY, API_VERSION = 0, 12
    SCHEMA = _fields(
        transactional_id=_TEXT,
        required_acks=Int16,
        timeout=Int32,
        topics=_array(topic=_TEXT, partitions=_array(partition=Int32, messages=CompactBytes)),
    )
    ANSWER = _fields(
        topics=_array(
            topic=_TEXT,
            partitions=_array(
                partition=Int32,
                error_code=Int16,
                offset=Int64,
                timestamp=Int64,
                log_start_offset=Int64,
                record_errors=_array(batch_index=Int32, message=_TEXT),
                error_message=_TEXT,
            ),
        ),
        throttle_time_ms=Int32,
    )


class CreateTopicsRequest_v4(OneVersion, RequestStruct):
    """Creates topics. Unlike v3, v4 accepts a replication factor of -1, which means the brokers' default (KIP-464)."""

    API_KEY, API_VERSION = 19, 4
    SCHEMA = CreateTopicsRequest_v3.SCHEMA
    ANSWER = CreateTopicsResponse_v3.SCHEMA


class DescribeGroupRightsRequest_v3(OneVersion, DescribeGroupsRequest_v3):
    """Describes groups, including the operations that the caller may perform on each group (KIP-430)."""

    RESPONSE_TYPE = DescribeGroupsResponse_v3  # aiokafka's own class names v2


class HeartbeatRequest_v3(OneVersion, RequestStruct):
    """Keeps a static member in its group. The response tells the member if another process has joined with its ID
    (KIP-345).
    """

    API_KEY, API_VERSION = 12, 3
    SCHEMA = Schema(
        ("group", _PLAIN_TEXT), ("generation_id", Int32), ("member_id", _PLAIN_TEXT), ("group_instance_id", _PLAIN_TEXT)
    )
    ANSWER = Schema(("throttle_time_ms", Int32), ("error_code", Int16))


class MetadataRequest_v10(OneVersion, RequestStruct):
    """Requests topic metadata, including the IDs (KIP-516) that distinguish a recreated topic from its predecessor."""

    FLEXIBLE_VERSION = True
    API_KEY, API_VERSION = 3, 10
    SCHEMA = _fields(
        topics=_array(topic_id=_TopicId, name=_TEXT),
        allow_auto_topic_creation=Boolean,
        include_cluster_authorized_operations=Boolean,
        include_topic_authorized_operations=Boolean,
    )
    ANSWER = _fields(
        throttle_time_ms=Int32,
        brokers=_array(node_id=Int32, host=_TEXT, port=Int32, rack=_TEXT),
        cluster_id=_TEXT,
        controller_id=Int32,
        topics=_array(
            error_code=Int16,
            name=_TEXT,
            topic_id=_TopicId,
            is_internal=Boolean,
            partitions=_array(
                error_code=Int16,
                partition=Int32,
                leader=Int32,
                leader_epoch=Int32,
                replicas=CompactArray(Int32),
                isr=CompactArray(Int32),
                offline=CompactArray(Int32),
            ),
            authorized_operations=Int32,
        ),
        authorized_operations=Int32,
    )


class _Unparsed(AbstractType[Any]):
    encode = staticmethod(bytes)
    decode = staticmethod(methodcaller("read"))


class UnparsedMetadataRequest_v10(MetadataRequest_v10):
    """`MetadataRequest_v10` with a raw response, so that equal responses are decoded only once instead of at every
    commit.
    """

    ANSWER = Schema(("throttle_time_ms", Int32), ("body", _Unparsed))


class OffsetFetchRequest_v7(OneVersion, RequestStruct):
    """Requests a group's committed offsets.

    With `require_stable` (KIP-447), the response is an error while an open transaction may change an offset. Without
    `require_stable`, the offsets may be outdated: before Kafka 4, a broker may respond to an InitProducerId request
    shortly before it applies the offsets of the transaction that the request ended.
    """

    FLEXIBLE_VERSION = True
    API_KEY, API_VERSION = 9, 7
    SCHEMA = _fields(group=_TEXT, topics=_array(topic=_TEXT, partitions=CompactArray(Int32)), require_stable=Boolean)
    ANSWER = _fields(
        throttle_time_ms=Int32,
        topics=_array(
            topic=_TEXT,
            partitions=_array(partition=Int32, offset=Int64, leader_epoch=Int32, metadata=_TEXT, error_code=Int16),
        ),
        error_code=Int16,
    )


class TxnOffsetCommitRequest_v2(OneVersion, RequestStruct):
    """Commits a group's offsets and their leader epochs (KIP-320) in a transaction."""

    API_KEY, API_VERSION = 28, 2
    SCHEMA = Schema(
        ("transactional_id", _PLAIN_TEXT),
        ("group_id", _PLAIN_TEXT),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        (
            "topics",
            Array(
                ("topic", _PLAIN_TEXT),
                (
                    "partitions",
                    Array(("partition", Int32), ("offset", Int64), ("leader_epoch", Int32), ("metadata", _PLAIN_TEXT)),
                ),
            ),
        ),
    )
    ANSWER = Schema(
        ("throttle_time_ms", Int32),
        ("errors", Array(("topic", _PLAIN_TEXT), ("partitions", Array(("partition", Int32), ("error_code", Int16))))),
    )


class TxnOffsetCommitRequest_v5(OneVersion, RequestStruct):
    """Commits a group's offsets in a transaction, and adds the group to the transaction (KIP-890)."""

    FLEXIBLE_VERSION = True
    API_KEY, API_VERSION = 28, 5
    SCHEMA = _fields(
        transactional_id=_TEXT,
        group_id=_TEXT,
        producer_id=Int64,
        producer_epoch=Int16,
        generation_id=Int32,
        member_id=_TEXT,
        group_instance_id=_TEXT,
        topics=_array(
            topic=_TEXT, partitions=_array(partition=Int32, offset=Int64, leader_epoch=Int32, metadata=_TEXT)
        ),
    )
    ANSWER = _fields(
        throttle_time_ms=Int32, errors=_array(topic=_TEXT, partitions=_array(partition=Int32, error_code=Int16))
    )


class EndTxnRequest_v5(OneVersion, RequestStruct):
    """Ends a transaction, and requests the producer ID and the epoch of the next transaction (KIP-890)."""

    FLEXIBLE_VERSION = True
    API_KEY, API_VERSION = 26, 5
    SCHEMA = _fields(transactional_id=_TEXT, producer_id=Int64, producer_epoch=Int16, committed=Boolean)
    ANSWER = _fields(throttle_time_ms=Int32, error_code=Int16, producer_id=Int64, producer_epoch=Int16)


class FetchFrom(NamedTuple):
    """The part of a fetch request that belongs to one partition."""

    topic_id: str
    """The topic's ID, as 32 hexadecimal digits."""
    partition: int
    position: int
    """The first offset to read."""
    leader_epoch: int
    """Leader epoch of the record before the position, or -1 if it is unknown."""
    most_bytes: int


class FetchedPartition(NamedTuple):
    """The part of a fetch response that belongs to one partition."""

    topic_id: str
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    aborted: Sequence[tuple[int, int]]
    """The producer ID and the first offset of each aborted transaction in ``records``."""
    records: bytes
    parts_at: int | None
    """The first offset at which the broker's log differs from the records read before, or None if the log does not
    differ.
    """


class FetchRequest_v13(OneVersion, RequestStruct):
    """Fetches records by topic ID (KIP-516), and sends the leader epoch of the record before each offset (KIP-320).

    The topic ID ensures that a fetch never continues in a recreated topic of the same name. The leader epoch ensures
    that a fetch never continues in a log that was truncated and filled again.
    """

    FLEXIBLE_VERSION = True
    API_KEY, API_VERSION = 1, 13
    SCHEMA = _fields(
        replica_id=Int32,
        max_wait_ms=Int32,
        min_bytes=Int32,
        max_bytes=Int32,
        isolation_level=Int8,
        session_id=Int32,
        session_epoch=Int32,
        topics=_array(
            topic_id=_TopicId,
            partitions=_array(
                partition=Int32,
                current_leader_epoch=Int32,
                fetch_offset=Int64,
                last_fetched_epoch=Int32,
                log_start_offset=Int64,
                max_bytes=Int32,
            ),
        ),
        forgotten=_array(topic_id=_TopicId, partitions=CompactArray(Int32)),
        rack_id=_TEXT,
    )
    ANSWER = _fields(
        throttle_time_ms=Int32,
        error_code=Int16,
        session_id=Int32,
        topics=_array(
            topic_id=_TopicId,
            partitions=_array(
                partition=Int32,
                error_code=Int16,
                high_watermark=Int64,
                last_stable_offset=Int64,
                log_start_offset=Int64,
                aborted=_array(producer_id=Int64, first_offset=Int64),
                preferred_read_replica=Int32,
                records=CompactBytes,
            ),
        ),
    )


@functools.lru_cache(maxsize=16)
def topics_in(body: bytes) -> Mapping[str, TopicNow | int]:
    """Return each topic's ID and partition count, or its error code, from a metadata response."""
    answer = MetadataRequest_v10.RESPONSE_TYPE.decode(Int32.encode(0) + body)
    return {
        name: code or TopicNow(topic_id.hex(), len(partitions))
        for code, name, topic_id, _, partitions, *_ in answer.topics
    }
