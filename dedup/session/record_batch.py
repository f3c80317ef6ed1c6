"""Records in the broker's own format (message format v2, KIP-98), built by aiokafka's compiled builder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from aiokafka.record.default_records import DefaultRecordBatchBuilder

BATCH_BYTES: Final = 500_000
"""Uncompressed; below the broker's default `message.max.bytes` of 1 MB whatever the compression makes of it."""
COMPRESSION: Final[Mapping[str, int]] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
MAGIC: Final = 2
NO_LIMIT: Final = 1 << 62
OWN_ROW: Final = -1
"""Stands for the feeding offset of a record of our own."""

Header = tuple[str, bytes | None]
Line = tuple[int, int, bytes | None, bytes | None, list[Header]]
"""Feeding offset or `OWN_ROW`, timestamp in ms, key, value, headers."""


class TopicPartition(NamedTuple):
    """A topic and one of its partitions."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """What `InitProducerId` handed out; a newer epoch of the same id fences this one (KIP-98)."""

    producer_id: int
    epoch: int


class Builder(Protocol):
    """What of aiokafka's builder is needed once all records are in it."""

    def set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        """The header names this producer."""

    def build(self) -> bytearray:
        """Return the bytes to send, compressed."""


@dataclass(slots=True)
class RecordBatch:
    """Records for one partition, complete but for the producer's identity."""

    target: TopicPartition
    builder: Builder
    rows: list[int] = field(default_factory=list)
    """The feeding offset each record was made from, or `OWN_ROW`."""

    @property
    def count(self) -> int:
        """How many records it holds."""
        return len(self.rows)

    def sealed(self, identity: ProducerIdentity, base_sequence: int) -> bytes:
        """Return the bytes to send, compressed; the batch must not be used again."""
        self.builder.set_producer_state(identity.producer_id, identity.epoch, base_sequence)
        return bytes(self.builder.build())


def builder_options(compression: str) -> dict[str, int]:
    """Return the options of aiokafka's builders for a batch of a transaction."""
    return {
        "magic": MAGIC,
        "compression_type": COMPRESSION[compression],
        "is_transactional": 1,
        "producer_id": -1,
        "producer_epoch": -1,
        "base_sequence": -1,
        "batch_size": BATCH_BYTES,
    }


def fill(
    target: TopicPartition, lines: Iterable[Line], *, compression: str, most_rows: int | None = None
) -> list[RecordBatch]:
    """Return the lines as batches of at most `BATCH_BYTES`, or ``most_rows`` records, in order."""
    options = builder_options(compression)
    builder = DefaultRecordBatchBuilder(**options)
    batch = RecordBatch(target, builder)
    batches = [batch]
    append, rows, most = builder.append, batch.rows, most_rows or NO_LIMIT
    for row, timestamp_ms, key, value, headers in lines:
        count = len(rows)
        if count >= most or append(count, timestamp_ms, key, value, headers) is None:
            builder = DefaultRecordBatchBuilder(**options)
            batch = RecordBatch(target, builder)
            batches.append(batch)
            append, rows = builder.append, batch.rows
            # The first record of a batch is always taken, however large: whether it fits is the broker's word.
            append(0, timestamp_ms, key, value, headers)
        rows.append(row)
    return batches if rows else []
