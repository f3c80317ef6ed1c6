"""Defines the requests that the exactly-once protocol needs, as an interface with one method per request.

`client.KafkaWire` implements the interface for real brokers, `memory_wire.MemoryWire` for an in-memory cluster, and
`SimWire` and `DirectWire` in `tests/simulation` for the simulated cluster. Each method sends its request once and
returns the error code of the response. If a request gets no response, the method raises `NoAnswer`; the request may or
may not have taken effect.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from aiokafka.errors import UnknownError, for_code

from dedup.errors import BrokerUnavailable
from dedup.kafka.record_batch import Header, Limit, ProducerIdentity, RecordBatch, TopicPartition

__all__ = ["Header", "Limit", "ProducerIdentity", "RecordBatch", "TopicPartition"]  # names of record_batch.py

COORDINATOR_MOVED: Final = frozenset({14, 15, 16})
"""Error codes for a coordinator that is loading, is unavailable, or has moved. The client must repeat the request."""

LEADER_MOVED: Final = frozenset({3, 5, 6, 9, 13, 56, 74, 75})
"""Error codes for a partition whose leader has moved or is unknown. The request must go to another broker."""

TRANSIENT: Final = frozenset({-1, 7})
"""Error codes for an unknown error on the broker and for a timeout. The same request may succeed later."""

UNAUTHORIZED: Final = 29
"""The error code for a topic that the principal may not access."""

UNSTABLE_OFFSET: Final = 88
"""The error code for an offset that an open transaction is about to change."""

_NEWER_ERRORS: Final[Mapping[int, str]] = {
    73: "TopicDeletionDisabled",
    74: "FencedLeaderEpoch",
    75: "UnknownLeaderEpoch",
    76: "UnsupportedCompressionType",
    77: "StaleBrokerEpoch",
    78: "OffsetNotAvailable",
    80: "PreferredLeaderNotAvailable",
    81: "GroupMaxSizeReached",
    82: "FencedInstanceId",
    86: "GroupSubscribedToTopic",
    87: "InvalidRecord",
    88: "UnstableOffsetCommit",
    89: "ThrottlingQuotaExceeded",
    90: "ProducerFenced",
    91: "ResourceNotFound",
    93: "UnacceptableCredential",
    100: "UnknownTopicId",
    103: "InconsistentTopicId",
    105: "TransactionalIdNotFound",
    109: "OffsetMovedToTieredStorage",
    110: "FencedMemberEpoch",
    113: "StaleMemberEpoch",
    120: "TransactionAbortable",
}
"""The names of error codes that aiokafka does not know, from `org.apache.kafka.common.protocol.Errors` of Kafka 4.1."""

PATIENCE_S: Final[ContextVar[float]] = ContextVar("patience_s", default=math.inf)
"""The time, in seconds, after which an unanswered request is not repeated. A worker repeats requests without a limit,
but a command sets a limit, because somebody is waiting for it.
"""


def error_name(code: int) -> str:
    """Return the name of a Kafka error code, or the code itself if the name is unknown."""
    known = for_code(code)
    if known is not UnknownError or code == UnknownError.errno:
        return str(known.__name__)
    return _NEWER_ERRORS.get(code, f"error {code}")


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """In the ``with`` block, stop repeating unanswered requests after ``seconds``; see `PATIENCE_S`."""
    token = PATIENCE_S.set(seconds)
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that never ends may be closed in another context
            PATIENCE_S.reset(token)


class NoAnswer(Exception):
    """Raised when a request may have been sent but got no response."""


def out_of_patience(error: NoAnswer) -> BrokerUnavailable:
    """Return the error that ends a command whose requests have got no usable answer for `PATIENCE_S`."""
    return BrokerUnavailable(
        f"no usable answer for {PATIENCE_S.get():.0f} s: {error}. Check the brokers, and that each partition has a "
        "leader; then run the command again."
    )


class FetchedRecord(NamedTuple):
    """A committed record with the fields that a restore needs."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch response: committed records as columns, and the next offset to fetch."""

    offsets: list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    next_offset: int
    """The offset after everything that was read, including control batches and aborted records."""
    high_watermark: int
    last_stable_offset: int

    @property
    def records(self) -> list[FetchedRecord]:
        """The committed records as objects. Each access creates new objects."""
        return list(map(FetchedRecord, self.offsets, self.timestamps_ms, self.keys, self.values))


@dataclass(frozen=True, slots=True)
class LogBounds:
    """The first offset of a partition's log, and the log's high watermark (the next offset to be written)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Produced:
    """The broker's response for one batch of a produce request."""

    error_code: int
    base_offset: int
    refused: tuple[tuple[int, str], ...] = ()
    """Index and reason of each record that made the broker reject the batch, if the broker names such records
    (KIP-467).
    """
    append_time_ms: int = -1
    """The time when the broker appended the batch, or -1 if the topic keeps the producer's timestamps."""


class TopicNow(NamedTuple):
    """The current state of a topic according to one broker."""

    topic_id: str
    """The topic's ID (KIP-516), as 32 hexadecimal digits. A recreated topic of the same name has a different ID."""
    partitions: int


class Position(NamedTuple):
    """A group's committed offset, with the leader epoch and the metadata that Kafka stores with it."""

    offset: int
    leader_epoch: int = -1
    """Leader epoch of the record before the offset (KIP-320), or -1 if it is unknown."""
    metadata: str = ""
    """The metadata that Kafka stores with an offset."""


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """The coordinator's response about a committed offset. The position is None if no offset is committed."""

    error_code: int
    position: Position | None

    @property
    def offset(self) -> int | None:
        """The offset without its leader epoch and metadata, or None if no offset is committed."""
        return None if self.position is None else self.position.offset


class Wire(Protocol):
    """A Kafka cluster. Every method that sends a request can raise NoAnswer."""

    async def init_producer_id(self, transactional_id: str, timeout_ms: int) -> tuple[int, ProducerIdentity]:
        """Start a new epoch of the transactional ID, which fences older epochs and ends their open transaction."""

    async def add_partitions(
        self, transactional_id: str, identity: ProducerIdentity, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Add partitions to the open transaction, and return an error code for each partition.

        A session with an implicit identity (transactions of version 2) does not send this request.
        """

    async def produce(
        self, transactional_id: str, identity: ProducerIdentity, batches: Sequence[tuple[TopicPartition, bytes]]
    ) -> Awaitable[dict[TopicPartition, Produced]]:
        """Write one batch to each of several partitions. Every in-sync replica must acknowledge the batches.

        If the identity is implicit (transactions of version 2), the broker first adds the partitions to the
        transaction. Error 51 (the previous transaction is still ending) means that the batch was not appended and must
        be sent again. `produce` returns an awaitable as soon as the request is sent, so the caller can send later
        requests in order without waiting for the response.
        """

    async def add_offsets(self, transactional_id: str, identity: ProducerIdentity, group: str) -> int:
        """Add a group's offsets to the open transaction, and return an error code.

        A session with an implicit identity (transactions of version 2) does not send this request.
        """

    async def commit_offsets(
        self, transactional_id: str, identity: ProducerIdentity, group: str, offsets: Mapping[TopicPartition, Position]
    ) -> int:
        """Write the group's offsets as part of the transaction, and return an error code."""

    async def end_transaction(
        self, transactional_id: str, identity: ProducerIdentity, *, commit: bool
    ) -> tuple[int, ProducerIdentity]:
        """Commit or abort the transaction, and return an error code and the identity for the next transaction."""

    async def committed_offset(self, group: str, source: TopicPartition, *, stable: bool) -> CommittedOffset:
        """Read a group's committed offset from the group's coordinator.

        If ``stable`` is set, the error code is `UNSTABLE_OFFSET` while an open transaction is about to change the
        offset (KIP-447).
        """

    async def limit(self, target: TopicPartition) -> Limit | None:
        """Return the current batch limits of a topic, or None if the principal may not read the topic's configs."""

    async def bounds(self, source: TopicPartition) -> LogBounds:
        """Read the start and the high watermark of a partition from its leader."""

    async def offset_at(self, source: TopicPartition, time_ms: int) -> int | None:
        """Return the offset of the first record at or after ``time_ms``, or None if no such record exists."""

    async def topics(self, names: tuple[str, ...]) -> Mapping[str, TopicNow | int]:
        """Return each topic's state, or an error code, as reported by one broker.

        The request does not create missing topics.
        """

    async def fetch(self, source: TopicPartition, offset: int, *, max_bytes: int, wait_ms: int) -> Fetched:
        """Read committed records at or after an offset. Wait up to ``wait_ms`` for records to arrive."""

    def pin(self, topic_ids: Mapping[str, str]) -> None:
        """Make `fetch` read these topics by ID from now on, so that `fetch` never reads a recreated topic."""

    async def refresh(self) -> None:
        """Ask a broker which brokers now lead the partitions."""

    async def pause(self, delay_ms: int) -> None:
        """Wait for ``delay_ms`` milliseconds before the caller repeats a request."""
