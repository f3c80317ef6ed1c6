# ruff: noqa: N801  # aiokafka names versions this way
# mypy: disallow-subclassing-any=False
"""Defines versions of Kafka's requests that aiokafka does not have, according to Kafka's protocol guide.

`dedup.kafka.client` creates the requests and reads the responses. A broker that does not support one of these versions
is refused. Kafka 3.1 and later releases support all these versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from aiokafka.protocol.admin import (
    CreateTopicsRequest_v3,
    CreateTopicsResponse_v3,
    DescribeGroupsRequest_v3,
    DescribeGroupsResponse_v3,
)
from aiokafka.protocol.api import RequestStruct, Response
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

CONSUMER: Final = -1
"""The replica ID of a client that is not a broker."""
NO_SESSION: Final = 0
UNKNOWN_TOPIC: Final = 3
OTHER_TOPIC: Final = frozenset({100, 103})
"""Error codes of a fetch: unknown topic ID and inconsistent topic ID."""
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


class CreateTopicsResponse_v4(Response):
    """The response to `CreateTopicsRequest_v4`, with an error code for each topic."""

    API_KEY = 19
    API_VERSION = 4
    SCHEMA = CreateTopicsResponse_v3.SCHEMA


class CreateTopicsRequest_v4(RequestStruct):
    """Creates topics. A replication factor of -1 means the brokers' default (KIP-464), which v3 does not support."""

    API_KEY = 19
    API_VERSION = 4
    RESPONSE_TYPE = CreateTopicsResponse_v4
    SCHEMA = CreateTopicsRequest_v3.SCHEMA


class DescribeGroupRightsRequest_v3(DescribeGroupsRequest_v3):
    """Describes groups, with the caller's permitted operations (KIP-430). aiokafka decodes the v3 response as v2."""

    RESPONSE_TYPE = DescribeGroupsResponse_v3


class MetadataResponse_v10(Response):
    """The response to `MetadataRequest_v10`, with brokers, and topics with their IDs."""

    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("id_high", Int64),
                ("id_low", Int64),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("authorized_operations", Int32),
        ("tags", TaggedFields),
    )


class MetadataRequest_v10(RequestStruct):
    """Requests topics by name, with IDs that distinguish a topic from an earlier one with the same name (KIP-516)."""

    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 10
    RESPONSE_TYPE = MetadataResponse_v10
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(
                ("id_high", Int64), ("id_low", Int64), ("name", CompactString("utf-8")), ("tags", TaggedFields)
            ),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class OffsetFetchResponse_v7(Response):
    """The response to `OffsetFetchRequest_v7`, with committed offsets by topic and partition."""

    API_KEY = 9
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", CompactString("utf-8")),
                        ("error_code", Int16),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("error_code", Int16),
        ("tags", TaggedFields),
    )


class OffsetFetchRequest_v7(RequestStruct):
    """Requests a group's committed offsets, which may be about to change.

    With `require_stable` (KIP-447), the response is an error while a transaction may change an offset. Without
    `require_stable`, the response may contain outdated offsets, because brokers before Kafka 4 apply a transaction's
    offsets shortly after they have told the next InitProducerId that the transaction has ended.
    """

    FLEXIBLE_VERSION = True
    API_KEY = 9
    API_VERSION = 7
    RESPONSE_TYPE = OffsetFetchResponse_v7
    SCHEMA = Schema(
        ("group", CompactString("utf-8")),
        (
            "topics",
            CompactArray(
                ("topic", CompactString("utf-8")), ("partitions", CompactArray(Int32)), ("tags", TaggedFields)
            ),
        ),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    )


class TxnOffsetCommitResponse_v2(Response):
    """The response to `TxnOffsetCommitRequest_v2`, with an error code for each partition."""

    API_KEY = 28
    API_VERSION = 2
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "errors",
            Array(("topic", String("utf-8")), ("partition_errors", Array(("partition", Int32), ("error_code", Int16)))),
        ),
    )


class TxnOffsetCommitRequest_v2(RequestStruct):
    """Commits a group's offsets as part of a transaction, with leader epochs (KIP-320), which v0 does not contain."""

    API_KEY = 28
    API_VERSION = 2
    RESPONSE_TYPE = TxnOffsetCommitResponse_v2
    SCHEMA = Schema(
        ("transactional_id", String("utf-8")),
        ("group_id", String("utf-8")),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        (
            "topics",
            Array(
                ("topic", String("utf-8")),
                (
                    "partitions",
                    Array(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", String("utf-8")),
                    ),
                ),
            ),
        ),
    )


class FetchFrom(NamedTuple):
    """A partition to read in a fetch request."""

    topic_id: str
    """32 hex digits."""
    partition: int
    position: int
    """The first offset to read."""
    leader_epoch: int
    """Leader epoch of the record before the position; -1 if unknown."""
    most_bytes: int


class FetchedPartition(NamedTuple):
    """The part of a fetch response that belongs to one partition."""

    topic_id: str
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    aborted: Sequence[tuple[int, int]]
    """Producer ID and first offset of each aborted transaction in ``records``."""
    records: bytes
    parts_at: int | None
    """The offset from which the broker's log differs from the records that were read before; None if it does not
    differ.
    """


class FetchResponse_v13(Response):
    """The response to `FetchRequest_v13`, with records by topic ID and partition."""

    API_KEY = 1
    API_VERSION = 13
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("session_id", Int32),
        (
            "topics",
            CompactArray(
                ("id_high", Int64),
                ("id_low", Int64),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("high_watermark", Int64),
                        ("last_stable_offset", Int64),
                        ("log_start_offset", Int64),
                        (
                            "aborted",
                            CompactArray(("producer_id", Int64), ("first_offset", Int64), ("tags", TaggedFields)),
                        ),
                        ("preferred_read_replica", Int32),
                        ("records", CompactBytes),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class FetchRequest_v13(RequestStruct):
    """Requests records by topic ID (KIP-516), with the leader epoch of the record before each position (KIP-320).

    A fetch by name would continue in a recreated topic with the same name. A fetch by offset alone would continue in a
    log that was truncated and filled again. Because of the topic ID, the broker responds with UNKNOWN_TOPIC_ID if the
    topic was recreated. Because of the leader epoch, the broker responds with the offset at which its log diverges if
    the log was truncated.
    """

    FLEXIBLE_VERSION = True
    API_KEY = 1
    API_VERSION = 13
    RESPONSE_TYPE = FetchResponse_v13
    SCHEMA = Schema(
        ("replica_id", Int32),
        ("max_wait_ms", Int32),
        ("min_bytes", Int32),
        ("max_bytes", Int32),
        ("isolation_level", Int8),
        ("session_id", Int32),
        ("session_epoch", Int32),
        (
            "topics",
            CompactArray(
                ("id_high", Int64),
                ("id_low", Int64),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("current_leader_epoch", Int32),
                        ("fetch_offset", Int64),
                        ("last_fetched_epoch", Int32),
                        ("log_start_offset", Int64),
                        ("max_bytes", Int32),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        (
            "forgotten",
            CompactArray(
                ("id_high", Int64), ("id_low", Int64), ("partitions", CompactArray(Int32)), ("tags", TaggedFields)
            ),
        ),
        ("rack_id", CompactString("utf-8")),
        ("tags", TaggedFields),
    )
