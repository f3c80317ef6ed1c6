"""Sorts records by topic, partition, and offset, with a single shuffle. Each task sorts one offset range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dedup.spark.columnar_fold import Integers
from dedup.spark.columns import COORDINATES, Batches, divided, integers_of, topics_of
from dedup.spark.map_side import Packer, ReceivedRows

_PART_BYTES: Final = 256 << 20
"""Approximate size of the rows that a task sorts in memory at a time."""


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """The first offset, last offset, and number of rows of one Kafka partition in a job's input."""

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    rows: int


class PlaceRanges(NamedTuple):
    """The ranges into which one Kafka partition's offsets are divided. One task sorts each range."""

    topic: int
    """Position of the topic in ``source.topics``."""
    partition: int
    first: int
    """The number of the range that contains the partition's first offset."""
    cuts: tuple[int, ...]
    """The offsets where the following ranges begin."""


def ranges_of(bounds: Iterable[PartitionBounds], topics: Sequence[str], count: int) -> list[PlaceRanges]:
    """Divide the Kafka partitions of a job's input into at most ``count`` offset ranges.

    The ranges have about the same number of rows if offsets are evenly spaced. The function ignores topics that are not
    in ``topics``, because the job rejects rows from these topics.
    """
    found = sorted((topics.index(each.topic), each.partition, each) for each in bounds if each.topic in topics)
    total = sum(each.rows for *_, each in found)
    ranges, before = [], 0
    for topic, partition, each in found:
        # Of all `total` rows, row number `at` belongs to range `at * count // total`.
        first, last = before * count // total, (before + each.rows - 1) * count // total
        span = each.last_offset - each.first_offset + 1
        begins = (-(-number * total // count) - before for number in range(first + 1, last + 1))
        cuts = tuple(each.first_offset + begin * span // each.rows for begin in begins)
        ranges.append(PlaceRanges(topic, partition, first, cuts))
        before += each.rows
    return ranges


def spread(
    ranges: Sequence[PlaceRanges],
    topics: tuple[str, ...],
    targets: tuple[int, ...],
    batch_rows: int,
    batches: Iterable[pa.RecordBatch],
) -> Batches:
    """Pack the records into rows of `map_side.PACKED_ROWS`, each addressed to the task that sorts the row's offset
    range.

    Raises StateIncompatible for a record of a topic that the topology does not read.
    """
    with Packer(targets, batch_rows) as packer:
        for batch in divided(batches):
            positions, partitions = topics_of(batch, topics), integers_of(batch, "partition")
            offsets, numbers = integers_of(batch, "offset"), np.zeros(batch.num_rows, np.uint16)
            for topic, partition, first, cuts in ranges:
                rows = np.flatnonzero((positions == topic) & (partitions == partition))
                numbers[rows] = first + np.searchsorted(np.array(cuts, np.int64), offsets[rows], side="right")
            yield from packer.add(batch, numbers)
        yield from packer.rest()


def in_log_order(topics: Sequence[str], batches: Iterable[pa.RecordBatch]) -> Batches:
    """Unpack rows of `map_side.PACKED_ROWS`, and yield the records in log order."""
    with ReceivedRows(batches) as received:
        yield from _sorted(received, topics)


def _sorted(received: ReceivedRows, topics: Sequence[str]) -> Batches:
    places, size_bytes = [], 0
    for rows in received.rows():
        places.append(rows.select(COORDINATES))
        size_bytes += rows.nbytes
    if not places:
        return
    table = pa.Table.from_batches(places)
    names = pc.index_in(table.column("topic"), value_set=pa.array(topics, pa.string()))
    columns = (table.column("offset"), table.column("partition"), names)
    order = np.lexsort([column.to_numpy() for column in columns])
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    part_rows = -(-len(order) // -(-size_bytes // _PART_BYTES))
    for first in range(0, len(order), part_rows):
        yield _part(received, rank, first, first + part_rows)


def _part(received: ReceivedRows, rank: Integers, first: int, end: int) -> pa.RecordBatch:
    """Return the rows with ranks from ``first`` to ``end - 1``, sorted by rank."""
    found, ranks, begin = [], [], 0
    for rows in received.rows():
        here = rank[begin : begin + rows.num_rows]
        begin += rows.num_rows
        mine = np.flatnonzero((here >= first) & (here < end))
        if len(mine):
            found.append(rows if len(mine) == len(here) else rows.take(pa.array(mine)))
            ranks.append(here[mine])
    return pa.concat_batches(found).take(pa.array(np.argsort(np.concatenate(ranks))))
