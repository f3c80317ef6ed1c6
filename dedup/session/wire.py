"""What the exactly-once protocol asks of a Kafka cluster, one method a request.

`client.KafkaWire` speaks to brokers; the simulator's log implements the same methods. A method sends its request
once and returns the answer's error code as it stands; what a code means is decided in `transaction.py`. A request
that got no answer raises `NoAnswer`, and then nothing is known about its effect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from dedup.session.record_batch import Header, ProducerIdentity, RecordBatch, TopicPartition

__all__ = [
    "COORDINATOR_MOVED",
    "UNSTABLE_OFFSET",
    "CommittedOffset",
    "Fetched",
    "FetchedRecord",
    "Header",
    "LogBounds",
    "NoAnswer",
    "Produced",
    "ProducerIdentity",
    "RecordBatch",
    "TopicPartition",
    "Wire",
]

COORDINATOR_MOVED: Final = frozenset({14, 15, 16})
"""Codes by which a coordinator says that it is loading, away or another: nothing was done, ask again."""

UNSTABLE_OFFSET: Final = 88
"""An open transaction is about to change the offset that was asked for."""


class NoAnswer(Exception):
    """A request was sent, or may have been, and no answer came."""


class FetchedRecord(NamedTuple):
    """A committed record of a changelog, as restore reads it."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """One answer to a fetch: committed records column by column, and where to go on."""

    offsets: list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    next_offset: int
    """Past everything read, control batches and aborted records too."""
    high_watermark: int
    last_stable_offset: int

    @classmethod
    def of(cls, records: Sequence[FetchedRecord], next_offset: int, high_watermark: int, stable: int) -> Fetched:
        """Return the answer that holds these records."""
        columns = [list(column) for column in zip(*records, strict=True)] or [[], [], [], []]
        return cls(*columns, next_offset, high_watermark, stable)  # type: ignore[arg-type, call-arg]

    @property
    def records(self) -> list[FetchedRecord]:
        """The records one by one, made anew each time."""
        return list(map(FetchedRecord, self.offsets, self.timestamps_ms, self.keys, self.values))


@dataclass(frozen=True, slots=True)
class LogBounds:
    """The first offset kept and the high watermark (the next offset to be written) of a partition."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Produced:
    """The broker's answer for one batch of a produce request."""

    error_code: int
    base_offset: int


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A group's committed offset; None where the group has none."""

    error_code: int
    offset: int | None


class Wire(Protocol):
    """A cluster, request by request."""

    async def init_producer_id(self, transactional_id: str, timeout_ms: int) -> tuple[int, ProducerIdentity]:
        """Start a new epoch of the id: fences older ones and ends what they left open."""

    async def add_partitions(
        self, transactional_id: str, identity: ProducerIdentity, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Announce partitions to the open transaction; an error code for each."""

    async def produce(
        self, transactional_id: str, batches: Sequence[tuple[TopicPartition, bytes]]
    ) -> Awaitable[dict[TopicPartition, Produced]]:
        """Write one batch to each of several partitions, to be acknowledged by all in-sync replicas.

        Returns when the request is on its way, with its answer to be awaited: calls one after the other keep their
        order on the wire without waiting for each other's answers.
        """

    async def add_offsets(self, transactional_id: str, identity: ProducerIdentity, group: str) -> int:
        """Announce a consumer group's offsets to the open transaction."""

    async def commit_offsets(
        self, transactional_id: str, identity: ProducerIdentity, group: str, offsets: Mapping[TopicPartition, int]
    ) -> int:
        """Write the group's offsets as part of the transaction."""

    async def end_transaction(self, transactional_id: str, identity: ProducerIdentity, *, commit: bool) -> int:
        """Commit or abort."""

    async def committed_offset(self, group: str, source: TopicPartition, *, stable: bool) -> CommittedOffset:
        """Read the group's committed offset now, from its coordinator.

        ``stable``: the answer is `UNSTABLE_OFFSET` while an open transaction is about to change it (KIP-447).
        """

    async def bounds(self, source: TopicPartition) -> LogBounds:
        """Read start and high watermark of a partition now, from its leader."""

    async def offset_at(self, source: TopicPartition, time_ms: int) -> int | None:
        """Return the first offset with a timestamp of ``time_ms`` or later; None when there is none."""

    async def fetch(self, source: TopicPartition, offset: int, *, max_bytes: int, wait_ms: int) -> Fetched:
        """Read committed records from an offset on; waits up to ``wait_ms`` for some to come."""

    async def pause(self, delay_ms: int) -> None:
        """Wait before a request that an answer told us to repeat."""
