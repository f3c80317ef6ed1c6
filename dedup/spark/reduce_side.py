"""Implements the reduce side of a batch job, in which all records with the same ID are judged by one reduce task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.types import IntegerType, LongType, StringType, StructField

from dedup.core.window import BEFORE_ALL_TIME
from dedup.spark.columnar_fold import (
    FORWARDED_CONFLICT,
    UNIQUE,
    Decided,
    Integers,
    KnownSightings,
    SortedRows,
    judge_sorted,
)
from dedup.spark.columns import COORDINATES, IDENTIFIED, RECORDS, Batches, content_digests, integers_of, topics_of
from dedup.spark.map_side import (
    FINGERPRINT,
    ID,
    PLACE,
    RUN,
    SEPARATOR,
    STREAM,
    TASK,
    TIME,
    UNJUDGED,
    UNPLACED,
    LogEnd,
    LogEnds,
    Mode,
    ReceivedRows,
    before_each,
    buckets_of,
    ends_after,
    ends_of,
    read_notice,
)
from dedup.spark.sightings import SIGHTINGS, LayerWriter, current, live, merged, report_row, sightings_of
from dedup.topology.model import Topology

JUDGED: Final = (
    *IDENTIFIED[:3],
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
"""`dedup_time_ms` is the event time by which the record was judged: 0 if the record has no event time, and the greatest
allowed time if the event time was clamped. `reason` is the reason code of a dead letter, an exempt record, or a
forwarded conflict. `dedup_partition` and `dedup_offset` are the position in the task's log, or null if rows are not
judged in the order of a log. `stream_time_ms` is the task's stream time after the record. The `first_*` columns
describe the sighting that a duplicate repeats.
"""
_NAMES: Final = pa.array(["unique", "duplicate", "conflict", "late", "unique"])
_REASONS: Final = pa.array([None, None, None, None, "conflict"], pa.string())
_TASKS: Final[Mapping[Mode, tuple[str, str]]] = {"direct": ("partition", "offset"), "log": (TASK, PLACE)}
"""Maps each mode that judges rows in the order of a task's log to the columns with the log's partition and offset."""


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """The parameters of a reduce task."""

    topology: Topology
    mode: Mode
    names: list[str]
    """The columns of the input."""
    ends: LogEnds = field(default_factory=dict)
    """The point that earlier jobs have reached in each log, if this job continues from there."""


@dataclass(frozen=True, slots=True)
class FoldedRows:
    """The judged rows of one reduce task, sorted by ID and, within each ID, in the order in which they were judged."""

    order: Integers
    """The position of each judged row among all rows of the task."""
    rows: SortedRows
    decided: Decided
    ids: pa.Array
    """The ID of each row."""
    known: pa.Table
    """Unexpired sightings that earlier jobs left for the IDs in ``ids``, in the schema `sightings.SIGHTINGS`."""
    unjudged: dict[str, int]
    """The number of rows that were not judged, by verdict."""
    stream_ms: Integers
    """Stream time at each row of the task, in the order of arrival."""


def reduce_rows(plan: ReducePlan, batches: Iterable[pa.RecordBatch]) -> Batches:
    """Judge one reduce task's records (`map_side.PACKED_ROWS`), and yield them with the columns `JUDGED` appended."""
    with ReceivedRows(batches) as received:
        reducer = Reducer(plan, received)
        folded = reducer.folded()
        if folded is not None:
            yield from reducer.judged(folded)


def layer_rows(
    plan: ReducePlan, batches: Iterable[pa.RecordBatch], *, reducers: int, buckets: int, whole: bool
) -> Batches:
    """Judge the records of one reduce task, and yield the unexpired sightings that the next job needs, as rows of
    `sightings.LAYER`.

    The last row is a report: the number of records by verdict and, for each source partition known to the task, the end
    of the judged records (`LogEnd`). ``buckets`` is a multiple of ``reducers``, the number of reduce tasks. If
    ``whole`` is true, the rows include the unexpired sightings of earlier jobs, so that the next job needs no earlier
    layer.
    """
    context = TaskContext.get()
    reducer = 0 if context is None else context.partitionId()
    with ReceivedRows(batches) as received:
        folded = Reducer(plan, received).folded()
        ends = _ends(plan, received, folded)
        writer = LayerWriter(buckets)
        if folded is not None:
            new = sightings_after(folded, plan.topology).to_batches()
            yield from writer.add(live(batch, plan.topology, ends) for batch in new)
        for batch in received.known() if whole else ():
            mine = buckets_of(batch.column("id"), reducers) == reducer
            yield from writer.add([live(batch.filter(pa.array(mine)), plan.topology, ends)])
        yield from writer.rest()
        verdicts: Counter[str] = Counter()
        if folded is not None:
            verdicts.update(folded.unjudged)
            for code, count in enumerate(np.bincount(folded.decided.verdicts).tolist()):
                verdicts[_NAMES[code].as_py()] += count
        yield report_row({"verdicts": dict(+verdicts), "ends": [[*place, *end] for place, end in ends.items()]})


def _ends(plan: ReducePlan, received: ReceivedRows, folded: FoldedRows | None) -> LogEnds:
    """Return, for each log known to the reduce task, the log's end after this job."""
    ends = ends_of(read_notice(received.notices))
    if plan.mode == "event_time" and folded is not None and len(folded.rows.times_ms):
        ends.append((UNPLACED, LogEnd(0, int(folded.rows.times_ms.max()))))
    return ends_after(plan.ends, ends)


def sightings_after(folded: FoldedRows, topology: Topology) -> pa.Table:
    """Return the new sightings, and the existing sightings that duplicates have extended."""
    rows, decided = folded.rows, folded.decided
    made = {
        "id": folded.ids,
        "first_ms": rows.times_ms,
        "last_ms": rows.times_ms,
        "topic": rows.topics,
        "partition": rows.partitions,
        "offset": rows.offsets,
        "fingerprint": pa.repeat(b"", len(rows.times_ms)) if rows.fingerprints is None else rows.fingerprints,
    }
    repeats = {
        "first_ms": decided.first_ms,
        "last_ms": np.minimum(rows.times_ms, decided.first_ms + topology.window.extend_at_most_ms),
        "topic": decided.first_topics,
        "partition": decided.first_partitions,
        "offset": decided.first_offsets,
    }
    is_new = (decided.verdicts == UNIQUE) | (decided.verdicts == FORWARDED_CONFLICT)
    new = pa.table(made, schema=SIGHTINGS).filter(pa.array(is_new))
    repeated = pa.table(made | repeats, schema=SIGHTINGS).filter(pa.array(decided.has_first))
    return merged(new, repeated, folded.known, topology)


class Received(Protocol):
    """The interface through which `Reducer` reads records; `map_side.ReceivedRows` is one implementation."""

    @property
    def notices(self) -> list[bytes]:
        """Return descriptions of the offset runs in the form that `read_notice` accepts."""

    def rows(self, without: Collection[str] = ()) -> Batches:
        """Yield the screened records without the columns in ``without``, in the same order on every call."""

    def known_of(self, ids: pa.Array) -> Batches:
        """Yield the sightings of earlier jobs or parts whose ID is one of ``ids``."""


class Reducer:
    """Judges the records of one reduce task, and keeps in memory only the columns that the verdicts depend on."""

    def __init__(self, plan: ReducePlan, received: Received) -> None:
        self._plan: Final = plan
        self._received: Final = received
        self._topics: Final = plan.topology.source.topics
        own = () if plan.mode == "event_time" else COORDINATES
        parts = list(received.rows(without=set(plan.names).difference(own)))
        self._rows: Final = pa.Table.from_batches(parts) if parts else None

    def judged(self, folded: FoldedRows) -> Batches:
        """Yield the records with their verdicts, in the batches and order of `Received.rows`."""
        stream_ms = folded.stream_ms
        # Rows that were not judged keep unused zeros.
        decided = Decided.of(np.zeros(len(stream_ms), np.int8))
        columns = [each.name for each in fields(Decided)]
        for name in columns:
            getattr(decided, name)[folded.order] = getattr(folded.decided, name)
        begin = 0
        for records in self._received.rows():
            end = begin + records.num_rows
            part = Decided(*(getattr(decided, name)[begin:end] for name in columns))
            yield self._assembled(records, stream_ms[begin:end], part)
            begin = end

    def folded(self) -> FoldedRows | None:
        """Return the judged rows with their verdicts, or None if the task received no rows."""
        return None if self._rows is None else self._fold(self._rows, self._stream_times(self._rows))

    def _fold(self, rows: pa.Table, stream_ms: Integers) -> FoldedRows:
        all_stream_ms = stream_ms
        unjudged = rows.column(UNJUDGED)
        counts = Counter(text.split(SEPARATOR, 1)[0] for text in unjudged.drop_null().to_pylist())
        open_rows = np.flatnonzero(unjudged.is_null().to_numpy())
        if len(open_rows) < rows.num_rows:
            rows, stream_ms = rows.take(pa.array(open_rows)), stream_ms[open_rows]
        groups, lengths, names = _groups(rows.column(ID))
        several = np.flatnonzero(lengths[groups] > 1)
        order = several[np.lexsort([*self._judging_order(rows, several, stream_ms), groups[several]])]
        if self._plan.mode == "event_time":
            order = self._ties_ordered(rows, order, groups, open_rows)
        order = np.append(order, np.flatnonzero(lengths[groups] == 1))
        sorted_rows = self._sorted_rows(rows, groups, stream_ms, order)
        known = current([*self._received.known_of(names)], self._plan.topology, self._plan.ends)
        decided = judge_sorted(sorted_rows, self._plan.topology.rules, self._known(known, names, sorted_rows))
        ids = rows.column(ID).take(pa.array(order)).combine_chunks()
        return FoldedRows(open_rows[order], sorted_rows, decided, ids, known, counts, all_stream_ms)

    def _known(self, table: pa.Table, names: pa.Array, rows: SortedRows) -> KnownSightings:
        """Return the sightings of earlier jobs with the group numbers that `_sorted_rows` assigns."""
        groups = pc.index_in(table.column("id"), value_set=names).to_numpy().astype(np.int64)
        if self._plan.mode == "direct":
            width = int(rows.partitions.max(initial=0)) + 1
            inside = table.column("partition").to_numpy() < width
            table, groups = table.filter(pa.array(inside)), groups[inside]
            groups = groups * width + table.column("partition").to_numpy()
        first_ms, *source = (table.column(name).to_numpy() for name in ("first_ms", "topic", "partition", "offset"))
        topics, partitions, offsets = source
        at = lambda wanted: sightings_of(table.take(pa.array(wanted)))  # noqa: E731
        return KnownSightings(groups, first_ms, topics, partitions, offsets, at)

    def _stream_times(self, rows: pa.Table) -> Integers:
        within = integers_of(rows, STREAM, BEFORE_ALL_TIME)
        match self._plan.mode:
            case "direct" | "merged":
                # If adaptive execution has merged several reduce tasks, the merged task has received each notice
                # several times.
                runs = {run.number: run for run in read_notice(self._received.notices)}
                before = before_each(runs.values(), self._topics, self._plan.ends)
                met, where = np.unique(integers_of(rows, RUN), return_inverse=True)
                return np.maximum(np.array([before[number] for number in met.tolist()], np.int64)[where], within)
            case "event_time" if UNPLACED in self._plan.ends:
                reached_ms = self._plan.ends[UNPLACED].greatest_ms
                return np.where(within > BEFORE_ALL_TIME, np.maximum(within, reached_ms), within)
            case "event_time" | "log":
                return within

    def _judging_order(self, rows: pa.Table, several: Integers, stream_ms: Integers) -> list[Integers]:
        """Return the columns by which to sort the rows of an ID into judging order, least significant column first."""
        match self._plan.mode:
            case "direct" | "log":
                partition, offset = _TASKS[self._plan.mode]
                columns = [integers_of(rows, offset), integers_of(rows, partition)]
            case "merged":
                by_name = sorted(self._topics, key=str.encode)
                ranks = pc.index_in(rows.column("topic"), value_set=pa.array(by_name, pa.string())).to_numpy()
                columns = [integers_of(rows, "offset"), integers_of(rows, "partition"), ranks, stream_ms]
            case "event_time":
                columns = [integers_of(rows, TIME)]
        return [column[several] for column in columns]

    def _ties_ordered(self, rows: pa.Table, order: Integers, groups: Integers, open_rows: Integers) -> Integers:
        """Return ``order``, in which rows that have the same ID and event time are sorted by content digest, and rows
        with the same content by the columns of their paths. The order therefore never depends on the order of arrival.
        """
        times_ms = integers_of(rows, TIME)[order]
        same = (groups[order][1:] == groups[order][:-1]) & (times_ms[1:] == times_ms[:-1])
        if not same.any():
            return order
        runs = np.cumsum(np.append(True, ~same))
        places = np.flatnonzero(np.append(False, same) | np.append(same, False))
        digests = self._digests(open_rows[order[places]])
        by_digest = np.lexsort([digests[:, 2], digests[:, 1], digests[:, 0], runs[places]])
        result = order.copy()
        result[places] = order[places[by_digest]]
        return result

    def _digests(self, wanted: Integers) -> npt.NDArray[np.uint64]:
        """Return three numbers for each wanted row: two for its content digest, and one for the digest of its file's
        columns.

        At most one batch of content is in memory at a time.
        """
        found = np.empty((len(wanted), 3), np.uint64)
        ascending = np.argsort(wanted)
        begin = 0
        for records in self._received.rows():
            end = begin + records.num_rows
            first, last = np.searchsorted(wanted, [begin, end], sorter=ascending)
            if first < last:
                here = ascending[first:last]
                tied = records.take(pa.array(wanted[here] - begin))
                found[here] = np.column_stack([content_digests(tied), self._path_digests(tied)])
            begin = end
        return found

    def _path_digests(self, records: pa.RecordBatch) -> npt.NDArray[np.uint64]:
        names = [name for name in self._plan.names if name not in RECORDS.names]
        columns = [records.column(name) for name in names]
        # The columns of a DataFrame are in a struct.
        texts = [map(repr, each.to_pylist()) for each in columns if not pa.types.is_nested(each.type)]
        rows = zip(*texts, strict=True) if texts else [()] * records.num_rows
        digests = b"".join(blake2b("\n".join(row).encode(), digest_size=8).digest() for row in rows)
        return np.frombuffer(digests, ">u8").astype(np.uint64)

    def _sorted_rows(self, rows: pa.Table, groups: Integers, stream_ms: Integers, order: Integers) -> SortedRows:
        placed = self._plan.mode != "event_time"
        groups = groups[order]
        if self._plan.mode in _TASKS:
            # Each task judges its own rows of an ID, so ID and task together identify a group.
            task = integers_of(rows, _TASKS[self._plan.mode][0])[order]
            groups = groups * (int(task.max(initial=0)) + 1) + task
        unplaced = np.full(len(order), -1, np.int64)
        topics = np.zeros(len(order), np.int64)
        if placed and len(self._topics) > 1:
            topics = topics_of(rows, self._topics)[order]
        wanted = self._plan.topology.fingerprints_wanted
        return SortedRows(
            groups=groups,
            times_ms=integers_of(rows, TIME)[order],
            stream_ms=stream_ms[order],
            topics=topics,
            partitions=integers_of(rows, "partition")[order] if placed else unplaced,
            offsets=integers_of(rows, "offset")[order] if placed else unplaced,
            fingerprints=rows.column(FINGERPRINT).take(pa.array(order)) if wanted else None,
        )

    def _assembled(self, records: pa.RecordBatch, stream_ms: Integers, decided: Decided) -> pa.RecordBatch:
        count = records.num_rows
        task = [records.column(name) for name in _TASKS.get(self._plan.mode, ())]
        codes, no_sighting = pa.array(decided.verdicts), ~decided.has_first
        no_place = no_sighting | (decided.first_partitions < 0)
        unknown = stream_ms <= BEFORE_ALL_TIME
        known = {
            FINGERPRINT: pa.nulls(count, pa.binary()),
            **{name: records.column(name) for name in records.schema.names},
            "verdict": _NAMES.take(codes),
            "reason": _REASONS.take(codes),
            "detail": pa.nulls(count, pa.string()),
            "first_time_ms": pa.array(decided.first_ms, mask=no_sighting),
            "first_topic": pa.array(self._topics, pa.string()).take(pa.array(decided.first_topics, mask=no_place)),
            "first_partition": pa.array(decided.first_partitions.astype(np.int32), mask=no_place),
            "first_offset": pa.array(decided.first_offsets, mask=no_place),
            "dedup_partition": task[0] if task else pa.nulls(count, pa.int32()),
            "dedup_offset": task[1] if task else pa.nulls(count, pa.int64()),
            "stream_time_ms": pa.array(stream_ms, mask=unknown if unknown.any() else None),
        }
        unjudged = records.column(UNJUDGED)
        if unjudged.null_count < count:
            parts = [("", "", "") if text is None else text.split(SEPARATOR, 2) for text in unjudged.to_pylist()]
            for at, name in enumerate(("verdict", "reason", "detail")):
                texts = pa.array([part[at] or None for part in parts], pa.string())
                known[name] = pc.if_else(unjudged.is_null(), known[name], texts)
        names = [*self._plan.names, *(field.name for field in JUDGED)]
        return pa.RecordBatch.from_arrays([known[name] for name in names], names)


def _groups(ids: pa.ChunkedArray) -> tuple[Integers, Integers, pa.Array]:
    """Number the distinct IDs; return each row's ID number, the row count of each ID, and the distinct IDs."""
    chunks = ids.dictionary_encode().chunks
    groups = [chunk.indices.to_numpy().astype(np.int64) for chunk in chunks]
    together: Integers = np.concatenate(groups) if groups else np.empty(0, np.int64)
    # All chunks share the dictionary of the whole column.
    return together, np.bincount(together), chunks[-1].dictionary if chunks else pa.array([], pa.binary())
