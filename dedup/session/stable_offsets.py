"""Committed offsets of which none is on its way: OffsetFetch v7 with `require_stable` (KIP-447).

aiokafka speaks OffsetFetch up to v3, which answers what was committed before a transaction whose end is not applied
yet; brokers before Kafka 4 apply it a moment after they have told the next InitProducerId that all is done. The
structures are those of Kafka's protocol guide.
"""

from __future__ import annotations

from typing import Final

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

OFFSET_FETCH: Final = 9
VERSION: Final = 7


class StableOffsetsResponse_v7(Response):  # type: ignore[misc]  # noqa: N801  # untyped base; aiokafka's naming of versions
    """Offsets by topic and partition."""

    API_KEY = OFFSET_FETCH
    API_VERSION = VERSION
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


class StableOffsetsRequest_v7(RequestStruct):  # type: ignore[misc]  # noqa: N801  # untyped base; aiokafka's naming of versions
    """A group's offsets; refused as unstable while a transaction is about to change one."""

    FLEXIBLE_VERSION = True
    API_KEY = OFFSET_FETCH
    API_VERSION = VERSION
    RESPONSE_TYPE = StableOffsetsResponse_v7
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


class StableOffset(Request[StableOffsetsRequest_v7]):  # type: ignore[misc]  # untyped base
    """Ask for a group's offset of one partition."""

    API_KEY = OFFSET_FETCH

    def __init__(self, group: str, topic: str, partition: int, *, stable: bool) -> None:
        self._group: Final = group
        self._topic: Final = topic
        self._partition: Final = partition
        self._stable: Final = stable

    def build(self, request_struct_class: type[StableOffsetsRequest_v7]) -> StableOffsetsRequest_v7:
        """Return the v7 structure; a broker older than Kafka 2.5 does not know it."""
        return request_struct_class(self._group, [(self._topic, [self._partition], {})], self._stable, {})
