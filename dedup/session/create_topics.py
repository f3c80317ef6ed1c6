"""Creating topics with the brokers' own replication factor: CreateTopics v4 (KIP-464).

aiokafka speaks CreateTopics up to v3, where a factor of -1 is refused, and its `NewTopic` refuses it as well. v4 has
the same structures; it only means something else by -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka.protocol.admin import CreateTopicsRequest_v3, CreateTopicsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response

CREATE_TOPICS: Final = 19
VERSION: Final = 4

TopicFields = tuple[str, int, int, Mapping[str, str]]
"""Name, partitions, replication factor or -1, configs."""


class CreateTopicsResponse_v4(Response):  # type: ignore[misc]  # noqa: N801  # untyped base, aiokafka's naming of versions
    """An error code for each topic."""

    API_KEY = CREATE_TOPICS
    API_VERSION = VERSION
    SCHEMA = CreateTopicsResponse_v3.SCHEMA


class CreateTopicsRequest_v4(RequestStruct):  # type: ignore[misc]  # noqa: N801  # untyped base, aiokafka's naming of versions
    """Topics to be made; -1 as replication factor leaves it to the brokers."""

    API_KEY = CREATE_TOPICS
    API_VERSION = VERSION
    RESPONSE_TYPE = CreateTopicsResponse_v4
    SCHEMA = CreateTopicsRequest_v3.SCHEMA


class CreateTopics(Request[CreateTopicsRequest_v4]):  # type: ignore[misc]  # untyped base
    """Ask for topics to be made."""

    API_KEY = CREATE_TOPICS

    def __init__(self, topics: Sequence[TopicFields], timeout_ms: int) -> None:
        self._topics: Final = topics
        self._timeout_ms: Final = timeout_ms

    def build(self, request_struct_class: type[CreateTopicsRequest_v4]) -> CreateTopicsRequest_v4:
        """Return the v4 structure; a broker older than Kafka 2.4 does not know it."""
        topics: list[Any] = [
            (name, partitions, factor, [], list(configs.items())) for name, partitions, factor, configs in self._topics
        ]
        return request_struct_class(topics, self._timeout_ms, False)  # noqa: FBT003  # positional protocol fields
