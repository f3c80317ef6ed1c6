"""Topic ids, which tell a topic deleted and made again from the one it was: Metadata v10 (KIP-516).

aiokafka speaks Metadata up to v5; the structures below are the part of v10 that is needed, from Kafka's protocol guide.
"""

from __future__ import annotations

from typing import Final

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

METADATA: Final = 3
VERSION: Final = 10


class TopicIdResponse_v10(Response):  # type: ignore[misc]  # noqa: N801  # untyped base; aiokafka's naming of versions
    """Brokers and topics with their ids."""

    API_KEY = METADATA
    API_VERSION = VERSION
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


class TopicIdRequest_v10(RequestStruct):  # type: ignore[misc]  # noqa: N801  # untyped base; aiokafka's naming of versions
    """Topics by name; none is created by asking."""

    FLEXIBLE_VERSION = True
    API_KEY = METADATA
    API_VERSION = VERSION
    RESPONSE_TYPE = TopicIdResponse_v10
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


class TopicIdRequest(Request[TopicIdRequest_v10]):  # type: ignore[misc]  # untyped base
    """Ask for the ids of topics."""

    API_KEY = METADATA

    def __init__(self, names: list[str]) -> None:
        self._names: Final = names

    def build(self, request_struct_class: type[TopicIdRequest_v10]) -> TopicIdRequest_v10:
        """Return the v10 structure; a broker older than Kafka 2.8 does not know it."""
        return request_struct_class([(0, 0, name, {}) for name in self._names], False, False, False, {})  # noqa: FBT003  # positional protocol fields
