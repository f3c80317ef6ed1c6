"""The second half of a backfill: verdicts, once the rows of an ID stand together in the order they are judged in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import IntegerType, LongType, StringType, StructField

from dedup.core.window import BEFORE_ALL_TIME
from dedup.spark.fold_sorted import Decided, Integers, SortedFold, SortedRows
from dedup.spark.screened import STRETCH, TARGET, Mode, read_notice
from dedup.spark.stretches import before_each, resolved
from dedup.topology.model import Topology

FOUND: Final = (
    StructField("first_time_ms", LongType()),
    StructField("first_topic", StringType()),
    StructField("first_partition", IntegerType()),
    StructField("first_offset", LongType()),
)
_NAMES: Final = pa.array(["unique", "duplicate", "conflict", "late", "unique"])
_REASONS: Final = pa.array([None, None, None, None, "conflict"], pa.string())

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class Folding:
    """What the second half must know."""

    topology: Topology
    mode: Mode


def resolving(topology: Topology) -> Callable[[Iterable[pa.RecordBatch]], Batches]:
    """Return a function for `mapInArrow` that makes stream times of a log's stretches those of the whole log."""

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        stretches = _Notices(topology.source.topics)
        for batch in batches:
            records = stretches.records(batch)
            if records.num_rows:
                yield _with_stream_times(records, stretches.resolved(records))

    return run


def folding(plan: Folding) -> Callable[[Iterable[pa.RecordBatch]], Batches]:
    """Return the function for `mapInArrow`."""

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        notices = _Notices(plan.topology.source.topics)
        fold = SortedFold(plan.topology.rules)
        for batch in batches:
            records = notices.records(batch)
            if records.num_rows == 0:
                continue
            if plan.mode == "direct":
                records = _with_stream_times(records, notices.resolved(records))
            yield _judged(records, fold, plan)

    return run


class _Notices:
    """Takes the stretches out of the rows; they come before the first record."""

    def __init__(self, topics: tuple[str, ...]) -> None:
        self._topics: Final = topics
        self._texts: Final[list[bytes]] = []
        self._before: Mapping[int, int] | None = None

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that are records."""
        target = batch.column(TARGET.name)
        if target.null_count == batch.num_rows:
            return batch
        self._texts.extend(batch.filter(target.is_valid()).column("value").to_pylist())
        return batch.filter(target.is_null())

    def resolved(self, records: pa.RecordBatch) -> Integers:
        """Return stream time at each record."""
        if self._before is None:
            self._before = before_each(read_notice(self._texts), self._topics)
        return resolved(self._before, _numbers(records, STRETCH.name), _numbers(records, "stream_time_ms"))


def _with_stream_times(records: pa.RecordBatch, stream_ms: Integers) -> pa.RecordBatch:
    known = stream_ms > BEFORE_ALL_TIME
    column = pa.array(stream_ms, mask=None if known.all() else ~known)
    return records.set_column(records.schema.get_field_index("stream_time_ms"), "stream_time_ms", column)


def _numbers(records: pa.RecordBatch, name: str) -> Integers:
    column = records.column(name)
    if column.null_count:
        column = column.fill_null(BEFORE_ALL_TIME if name == "stream_time_ms" else -1)
    result: Integers = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return result


def _judged(records: pa.RecordBatch, fold: SortedFold, plan: Folding) -> pa.RecordBatch:
    """Return the records with their verdicts and `FOUND`, without what only this job needs."""
    open_rows = records.column("verdict").is_null()
    if open_rows.true_count == 0:
        found = pa.RecordBatch.from_arrays(_nothing_found(records.num_rows), [field.name for field in FOUND])
        return _assembled(records, records.column("verdict"), records.column("reason"), found)
    everything = open_rows.true_count == records.num_rows
    rows = records if everything else records.filter(open_rows)
    decided = fold.judge(_sorted_rows(rows, plan))
    verdicts = _NAMES.take(pa.array(decided.verdicts))
    reasons = _REASONS.take(pa.array(decided.verdicts))
    found = pa.RecordBatch.from_arrays(_found(decided, plan), [field.name for field in FOUND])
    if not everything:
        verdicts = pc.replace_with_mask(records.column("verdict"), open_rows, verdicts)
        reasons = pc.replace_with_mask(records.column("reason"), open_rows, reasons)
        where = pa.array(np.cumsum(open_rows.to_numpy(zero_copy_only=False)) - 1, mask=~_booleans(open_rows))
        found = found.take(where)
    return _assembled(records, verdicts, reasons, found)


def _booleans(column: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    result: np.ndarray[tuple[int], np.dtype[np.bool_]] = column.to_numpy(zero_copy_only=False)
    return result


def _sorted_rows(rows: pa.RecordBatch, plan: Folding) -> SortedRows:
    times_ms = _numbers(rows, "dedup_time_ms")
    by_task = plan.mode in {"direct", "log"}
    placed = plan.mode != "event_time"
    nowhere = np.full(rows.num_rows, -1, np.int64)
    nothing = np.zeros(rows.num_rows, np.int64)
    topics = plan.topology.source.topics
    several = placed and len(topics) > 1
    return SortedRows(
        ids=rows.column("dedup_id"),
        tasks=_numbers(rows, "dedup_partition") if by_task else nothing,
        times_ms=times_ms,
        stream_ms=_numbers(rows, "stream_time_ms"),
        topics=pc.index_in(rows.column("topic"), value_set=pa.array(topics)).to_numpy() if several else nothing,
        partitions=_numbers(rows, "partition") if placed else nowhere,
        offsets=_numbers(rows, "offset") if placed else nowhere,
        fingerprints=rows.column("dedup_fingerprint") if plan.topology.fingerprints_wanted else None,
    )


def _found(decided: Decided, plan: Folding) -> list[pa.Array]:
    no_sighting = ~decided.has_first
    no_place = no_sighting | (decided.first_partitions < 0)
    topics = pa.array(plan.topology.source.topics, pa.string())
    return [
        pa.array(decided.first_ms, mask=no_sighting),
        topics.take(pa.array(decided.first_topics, mask=no_place)),
        pa.array(decided.first_partitions.astype(np.int32), mask=no_place),
        pa.array(decided.first_offsets, mask=no_place),
    ]


def _nothing_found(count: int) -> list[pa.Array]:
    return [
        pa.nulls(count, pa.int64()),
        pa.nulls(count, pa.string()),
        pa.nulls(count, pa.int32()),
        pa.nulls(count, pa.int64()),
    ]


def _assembled(records: pa.RecordBatch, verdicts: pa.Array, reasons: pa.Array, found: pa.RecordBatch) -> pa.RecordBatch:
    replaced = {"verdict": verdicts, "reason": reasons}
    names = [name for name in records.schema.names if name not in {STRETCH.name, TARGET.name}]
    columns = [replaced.get(name, records.column(name)) for name in names]
    return pa.RecordBatch.from_arrays([*columns, *found.columns], [*names, *found.schema.names])
