"""New sightings as batches for the changelog."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat

from dedup.session.equal_records import equal_records
from dedup.session.record_batch import OWN_ROW, Line, RecordBatch, TopicPartition, fill
from dedup.store.changelog import segment_prefix, sighting_keys_column


def sighting_batches(
    changelog: TopicPartition, writes: Mapping[int, Mapping[bytes, bytes]], *, now_ms: int, compression: str
) -> list[RecordBatch]:
    """Return the records that bring these sightings back: segment -> ID -> value."""
    if len(writes) == 1:
        # As good as always: one segment, IDs of one kind, so one length.
        ((segment, part),) = writes.items()
        batch = equal_records(
            changelog,
            segment_prefix(segment),
            part.keys(),
            part.values(),
            timestamp_ms=now_ms,
            compression=compression,
        )
        if batch is not None:
            return [batch]
    keys = [key for segment, part in writes.items() for key in sighting_keys_column(segment, part)]
    values = [value for part in writes.values() for value in part.values()]
    lines: Iterator[Line] = zip(repeat(OWN_ROW), repeat(now_ms), keys, values, repeat([]), strict=False)
    return fill(changelog, lines, compression=compression)
