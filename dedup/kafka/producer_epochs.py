"""Lists the producer epochs of a partition's committed batches, to verify that no fenced producer wrote them.

Only one transactional ID writes to a changelog partition, and each new owner begins a newer epoch (KIP-98). If a batch
with an older epoch follows a batch with a newer epoch, a zombie wrote it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dedup.errors import BrokerUnavailable
from dedup.kafka.record_batch import CommittedBatches
from dedup.kafka.wire import NoAnswer, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dedup.kafka.client import KafkaWire

FETCH_BYTES: Final = 8 << 20
WAIT_MS: Final = 500
_MOST_TRIES: Final = 40
PAUSE_MS: Final = 250


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """A committed batch and the producer that wrote it."""

    base_offset: int
    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Epochs:
    """The producer epochs of a partition's committed batches."""

    batches: int
    count: int
    """The number of different epochs: one per owner or, with KIP-890, one per transaction."""
    behind: tuple[int, ...]
    """Base offsets of batches that follow a batch with a newer epoch."""


def in_order(batches: Iterable[WrittenBatch]) -> Epochs:
    """Return the producer epochs of a partition's committed batches, which the caller must pass in log order."""
    newest: dict[int, int] = {}
    current = -1
    owners: set[tuple[int, int]] = set()
    left: set[int] = set()
    behind: list[int] = []
    number = 0
    for batch in batches:
        number += 1
        owners.add((batch.producer_id, batch.epoch))
        if batch.producer_id != current:
            # The old producer ID has used up its epochs or has expired. The broker never reuses the ID.
            left.add(current)
            current = batch.producer_id
        if batch.producer_id in left or batch.epoch < newest.get(batch.producer_id, -1):
            behind.append(batch.base_offset)
        newest[batch.producer_id] = max(batch.epoch, newest.get(batch.producer_id, -1))
    return Epochs(number, len(owners), tuple(behind))


async def epochs_of(wire: KafkaWire, source: TopicPartition) -> Epochs:
    """Return the producer epochs of the committed batches from a partition's start to its current end."""
    found: list[WrittenBatch] = []
    try:
        bounds = await wire.bounds(source)
    except NoAnswer as error:
        raise BrokerUnavailable(f"{source.topic}/{source.partition}: {error}. Look at the brokers' logs.") from error
    position, tries = bounds.start, 0
    while position < bounds.end:
        if tries > _MOST_TRIES:
            raise BrokerUnavailable(
                f"{source.topic}/{source.partition} can only be read up to offset {position} of {bounds.end}: a "
                f"transaction stays open there, or its leader does not answer. Look at the brokers' logs."
            )
        after = position
        with contextlib.suppress(NoAnswer):
            part = await wire.fetch_raw(source, position, max_bytes=FETCH_BYTES, wait_ms=WAIT_MS, lane="epochs")
            batches = CommittedBatches(source, part.records, part.aborted, position)
            found += [
                WrittenBatch(batch.base_offset, batch.producer_id, batch.producer_epoch)
                for batch in batches.batches()
                if batch.producer_id is not None and batch.base_offset >= position
            ]
            after = max(position, batches.next_fetch_offset)
        tries = tries + 1 if after == position else 0
        if after == position:
            await wire.pause(PAUSE_MS)
        position = after
    return in_order(found)
