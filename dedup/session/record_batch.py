"""Records in the broker's own format (message format v2, KIP-98), built by aiokafka's compiled builder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aiokafka.record.default_records import DefaultRecordBatchBuilder

BATCH_BYTES: Final = 500_000
"""Uncompressed; below the broker's default `message.max.bytes` of 1 MB whatever the compression makes of it."""
COMPRESSION: Final[Mapping[str, int]] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
MAGIC: Final = 2
NO_LIMIT: Final = 1 << 62

Header = tuple[str, bytes | None]
Line = tuple[int, int, bytes | None, bytes | None, list[Header]]
"""Feeding offset (-1: a record of our own), timestamp in ms, key, value, headers."""


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


@dataclass(slots=True)
class RecordBatch:
    """Records for one partition, complete but for the producer's identity."""

    target: TopicPartition
    builder: DefaultRecordBatchBuilder
    rows: list[int] = field(default_factory=list)
    """The feeding offset each record was made from; -1 for a record of our own."""

    @property
    def count(self) -> int:
        """How many records it holds."""
        return len(self.rows)

    def sealed(self, identity: ProducerIdentity, base_sequence: int) -> bytes:
        """Return the bytes to send, compressed; the batch must not be used again."""
        self.builder.set_producer_state(identity.producer_id, identity.epoch, base_sequence)
        return bytes(self.builder.build())


def _empty(target: TopicPartition, compression: str) -> RecordBatch:
    builder = DefaultRecordBatchBuilder(
        magic=MAGIC,
        compression_type=COMPRESSION[compression],
        is_transactional=1,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=BATCH_BYTES,
    )
    return RecordBatch(target, builder)


def fill(
    target: TopicPartition, lines: Iterable[Line], *, compression: str, most_rows: int | None = None
) -> list[RecordBatch]:
    """Return the lines as batches of at most `BATCH_BYTES`, or ``most_rows`` records, in order."""
    batch = _empty(target, compression)
    batches = [batch]
    append, rows, most = batch.builder.append, batch.rows, most_rows or NO_LIMIT
    for row, timestamp_ms, key, value, headers in lines:
        count = len(rows)
        if count >= most or append(count, timestamp_ms, key, value, headers) is None:
            batch = _empty(target, compression)
            batches.append(batch)
            append, rows = batch.builder.append, batch.rows
            # The first record of a batch is always taken, however large: whether it fits is the broker's word.
            append(0, timestamp_ms, key, value, headers)
        rows.append(row)
    return batches if rows else []
