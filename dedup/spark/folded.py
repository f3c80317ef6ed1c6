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
from dedup.spark.screened import (
    FINGERPRINT,
    ID,
    LETTER,
    LETTER_PARTS,
    PLACE,
    STREAM,
    STRETCH,
    TARGET,
    TASK,
    TIME,
    Mode,
    read_notice,
)
from dedup.spark.stretches import before_each, resolved
from dedup.topology.model import Topology

JUDGED: Final = (
    ID,
    TIME,
    FINGERPRINT,
    StructField("verdict", StringType()),
    StructField("reason", StringType()),
    StructField("detail", StringType()),
    StructField("dedup_partition", IntegerType()),
    StructField("dedup_offset", LongType()),
    StructField("stream_time_ms", LongType()),
    StructField("first_time_ms", LongType()),
    StructField("first_topic", StringType()),
    StructField("first_partition", IntegerType()),
    StructField("first_offset", LongType()),
)
"""`dedup_time_ms` is the time as judged (the ceiling where a future time was clamped; 0 without one), `reason` the code
of a dead letter, an exemption or a forwarded conflict, `detail` a dead letter's sentence. `dedup_partition` and
`dedup_offset` are the place in the task's log, null where rows are judged in no one task's order; `stream_time_ms` is
the task's after this record. `first_*` is the sighting that a duplicate repeats."""
_NAMES: Final = pa.array(["unique", "duplicate", "conflict", "late", "unique"])
_REASONS: Final = pa.array([None, None, None, None, "conflict"], pa.string())

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class Folding:
    """What the second half must know."""

    topology: Topology
    mode: Mode
    names: list[str]
    """The columns of the input."""


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
        return resolved(self._before, _numbers(records, STRETCH.name), _numbers(records, STREAM.name))


def _with_stream_times(records: pa.RecordBatch, stream_ms: Integers) -> pa.RecordBatch:
    known = stream_ms > BEFORE_ALL_TIME
    column = pa.array(stream_ms, mask=None if known.all() else ~known)
    return records.set_column(records.schema.get_field_index(STREAM.name), STREAM.name, column)


def _numbers(records: pa.RecordBatch, name: str) -> Integers:
    column = records.column(name)
    if column.null_count:
        column = column.fill_null(BEFORE_ALL_TIME if name == STREAM.name else -1)
    result: Integers = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return result


def _judged(records: pa.RecordBatch, fold: SortedFold, plan: Folding) -> pa.RecordBatch:
    """Return the records with `JUDGED` after them."""
    letters = records.column(LETTER.name)
    if letters.null_count == records.num_rows:
        return _assembled(records, _of_judged(records, fold, plan), plan)
    open_rows = letters.is_null()
    of_letters = _of_letters(letters.filter(letters.is_valid()))
    if letters.null_count == 0:
        return _assembled(records, of_letters, plan)
    both = pa.concat_batches([_of_judged(records.filter(open_rows), fold, plan), of_letters])
    is_open = _booleans(open_rows)
    where = np.where(is_open, np.cumsum(is_open) - 1, letters.null_count + np.cumsum(~is_open) - 1)
    return _assembled(records, both.take(pa.array(where)), plan)


_FOUND: Final = JUDGED[3:6] + JUDGED[9:]


def _of_judged(rows: pa.RecordBatch, fold: SortedFold, plan: Folding) -> pa.RecordBatch:
    decided = fold.judge(_sorted_rows(rows, plan))
    codes = pa.array(decided.verdicts)
    columns = [_NAMES.take(codes), _REASONS.take(codes), pa.nulls(rows.num_rows, pa.string()), *_found(decided, plan)]
    return pa.RecordBatch.from_arrays(columns, [field.name for field in _FOUND])


def _of_letters(letters: pa.Array) -> pa.RecordBatch:
    parts = [letter.split(LETTER_PARTS, 2) for letter in letters.to_pylist()]
    columns = [
        pa.array([verdict for verdict, _, _ in parts], pa.string()),
        pa.array([reason for _, reason, _ in parts], pa.string()),
        pa.array([detail or None for _, _, detail in parts], pa.string()),
        *_nothing_found(len(parts)),
    ]
    return pa.RecordBatch.from_arrays(columns, [field.name for field in _FOUND])


def _booleans(column: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    result: np.ndarray[tuple[int], np.dtype[np.bool_]] = column.to_numpy(zero_copy_only=False)
    return result


def _sorted_rows(rows: pa.RecordBatch, plan: Folding) -> SortedRows:
    times_ms = _numbers(rows, "dedup_time_ms")
    tasks = {"direct": "partition", "log": TASK.name}.get(plan.mode)
    placed = plan.mode != "event_time"
    nowhere = np.full(rows.num_rows, -1, np.int64)
    nothing = np.zeros(rows.num_rows, np.int64)
    topics = plan.topology.source.topics
    several = placed and len(topics) > 1
    return SortedRows(
        ids=rows.column("dedup_id"),
        tasks=nothing if tasks is None else _numbers(rows, tasks),
        times_ms=times_ms,
        stream_ms=_numbers(rows, STREAM.name),
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


def _assembled(records: pa.RecordBatch, found: pa.RecordBatch, plan: Folding) -> pa.RecordBatch:
    count = records.num_rows
    match plan.mode:
        case "direct":
            task = records.column("partition"), records.column("offset")
        case "log":
            task = records.column(TASK.name), records.column(PLACE.name)
        case "merged" | "event_time":
            task = pa.nulls(count, pa.int32()), pa.nulls(count, pa.int64())
    known = {
        **{name: records.column(name) for name in records.schema.names},
        **{name: found.column(name) for name in found.schema.names},
        "dedup_partition": task[0],
        "dedup_offset": task[1],
        "stream_time_ms": records.column(STREAM.name),
    }
    known.setdefault(FINGERPRINT.name, pa.nulls(count, pa.binary()))
    names = [*plan.names, *(field.name for field in JUDGED)]
    return pa.RecordBatch.from_arrays([known[name] for name in names], names)
