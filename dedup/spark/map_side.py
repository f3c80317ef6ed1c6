"""Implements the map side of a batch job, which prepares records for the reduce tasks that judge them.

A map task extracts each record's ID and event time, and finds exempt records and dead letters. The map task also
computes stream time within its own part of the input (`OffsetRuns`), and sends packed records to the reduce tasks.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema

from dedup.core.extract_one import EXTRACTED
from dedup.core.fold import Outcome, Rows, screen
from dedup.core.window import BEFORE_ALL_TIME, Feed, StreamTime
from dedup.errors import InvariantBroken, StateIncompatible
from dedup.spark.columnar_fold import Integers
from dedup.spark.columns import (
    ARROW_RECORDS,
    COORDINATES,
    Batches,
    binary_column,
    divided,
    extract_batch,
    gathered,
    integers_of,
    together,
    topics_of,
)
from dedup.topology.model import Topology, extractor_of
from dedup.worker.record_collector import IDLE, SOURCE, TIMESTAMP

Mode = Literal["direct", "merged", "log", "event_time"]
"""In mode ``direct``, each source partition is judged as a separate log. In mode ``merged``, several source partitions
are judged together, in the order that `batch_verdicts` defines. Mode ``log`` is for the repartition topic with its
feeds, and mode ``event_time`` is for rows without coordinates.
"""

ID: Final = "dedup_id"
TIME: Final = "dedup_time_ms"
FINGERPRINT: Final = "dedup_fingerprint"
STREAM: Final = "_dedup_stream_ms"
"""Stream time or, if rows have the column `RUN`, the running maximum of event time within the offset run."""
UNJUDGED: Final = "_dedup_unjudged"
"""Verdict, reason, and detail of a row that must not be judged, separated by `SEPARATOR`; null for other rows."""
TASK: Final = "_dedup_task"
PLACE: Final = "_dedup_place"
"""`TASK` and `PLACE` are the record's partition and offset in the repartition topic, if the job reads that topic."""
RUN: Final = "_dedup_run"
"""Number of the record's offset run."""
SEPARATOR: Final = "\n"

TARGET: Final = "_dedup_target"
KNOWN: Final = "known"
"""Optional column of packed rows with the sightings of earlier jobs as an Arrow stream (`dedup.spark.sightings`)."""
_PACKED_SCHEMA: Final = pa.schema([(TARGET, pa.int32()), ("packed", pa.binary()), ("notice", pa.binary())])
PACKED_ROWS: Final = from_arrow_schema(_PACKED_SCHEMA)
MOST_REDUCERS: Final = 1 << 16
BATCH_BYTES: Final = 64 << 20
"""Maximum size of the packed rows in a batch that Spark passes to Python."""
_WRITE_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
"""Compression halves the number of bytes. Each byte is copied eight times between tasks."""
_UNCOMPRESSED: Final = pa.ipc.IpcWriteOptions(use_threads=False)
_READ_OPTIONS: Final = pa.ipc.IpcReadOptions(use_threads=False)
_ROWS_PER_REDUCER: Final = 4_096
_MOST_ROWS: Final = 131_072
_MOST_BYTES: Final = 64 << 20
"""A map task sorts rows after it has collected about `_MOST_ROWS` rows or `_MOST_BYTES` bytes."""
_LEAST_ROWS: Final = 2_048
_LEAST_BYTES: Final = 512 << 10
"""Minimum average size, in rows or in bytes, of the packed values that a map task sends before its input ends."""
_UNPACKED_REDUCERS: Final = 128
"""A map task unpacks the buffered rows of this many reduce tasks at a time (about 64 MB)."""
_MOST_PACKED_BYTES: Final = 16 << 20
"""Uncompressed size at which a packed value is full. Further rows for the same reduce task begin a new value."""
_IN_MEMORY_BYTES: Final = 256 << 20
"""Total size of buffered rows above which a task writes them to a file."""
_MOST_RUNS: Final = 10_000
"""Maximum number of offset runs in one Spark task. Input that is read in log order has one run per partition."""

# The following algorithm computes stream time in one pass. Stream time is the running maximum of event time over a
# source partition, but several Spark tasks read that partition. A task knows the running maximum within each of its
# *offset runs* (sequences of ascending offsets), but not the greatest event time before the run. Therefore, at the end
# of its input, each map task sends every reduce task a notice that describes the map task's offset runs. A reduce task
# has all notices before it judges its first record, so the log is neither read twice nor sorted as a whole.


@dataclass(slots=True)
class OffsetRun:
    """A sequence of ascending offsets in one Kafka partition, with the greatest event time of the sequence's judged
    records.
    """

    number: int
    topic: int
    """Position in ``source.topics``."""
    partition: int
    first_offset: int
    last_offset: int
    greatest_ms: int


class OffsetRuns:
    """Tracks the offset runs (sequences of ascending offsets in a Kafka partition) that one Spark task reads."""

    def __init__(self) -> None:
        context = TaskContext.get()
        self._next: int = (0 if context is None else context.partitionId()) << 32
        self._open: Final[dict[int, OffsetRun]] = {}
        self.all: Final[list[OffsetRun]] = []

    def take(self, topics: Integers, partitions: Integers, offsets: Integers, times_ms: Integers) -> list[Integers]:
        """Return two arrays with, for each record, the number of its offset run and the greatest event time of the run
        so far.

        ``times_ms`` is `BEFORE_ALL_TIME` for a record that does not advance stream time. Raises StateIncompatible for
        more than `_MOST_RUNS` offset runs, which show that the rows are not in log order.
        """
        numbers = np.empty(len(offsets), np.int64)
        running = np.empty(len(offsets), np.int64)
        places = (topics << 32) | partitions
        order = np.argsort(places, kind="stable") if (places != places[:1]).any() else np.arange(len(places))
        sorted_places, sorted_offsets = places[order], offsets[order]
        breaks = (sorted_places[1:] != sorted_places[:-1]) | (sorted_offsets[1:] <= sorted_offsets[:-1])
        borders = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(places)]
        for begin, end in pairwise(borders):
            rows = order[begin:end]
            if not len(rows):
                continue
            place, first = int(sorted_places[begin]), int(sorted_offsets[begin])
            run = self._open.get(place)
            if run is None or first <= run.last_offset:
                run = self._begin(place, first)
            greatest = np.maximum(np.maximum.accumulate(times_ms[rows]), run.greatest_ms)
            numbers[rows], running[rows] = run.number, greatest
            run.last_offset, run.greatest_ms = int(sorted_offsets[end - 1]), int(greatest[-1])
        return [numbers, running]

    def _begin(self, place: int, first_offset: int) -> OffsetRun:
        if len(self.all) >= _MOST_RUNS:
            raise StateIncompatible(
                f"one Spark task found more than {_MOST_RUNS:,} breaks in the order of offsets: the rows are not in "
                f"log order. Call the job with `contiguous=False`, so that it sorts the rows first."
            )
        topic, partition = place >> 32, place & 0xFFFFFFFF
        run = OffsetRun(self._next, topic, partition, first_offset, first_offset - 1, BEFORE_ALL_TIME)
        self._next += 1
        self._open[place] = run
        self.all.append(run)
        return run


class LogEnd(NamedTuple):
    """The point up to which earlier jobs have judged a source partition or an input without coordinates."""

    next_offset: int
    greatest_ms: int
    """The greatest event time of the judged records."""


NOTHING_JUDGED: Final = LogEnd(0, BEFORE_ALL_TIME)
LogEnds = Mapping[tuple[int, int], LogEnd]
"""Each key is a topic's position in ``source.topics`` and a partition, or `UNPLACED` for rows without coordinates."""
UNPLACED: Final = (0, -1)


def ends_of(runs: Iterable[OffsetRun]) -> list[tuple[tuple[int, int], LogEnd]]:
    """Return the end of each offset run together with the run's source partition."""
    return [((run.topic, run.partition), LogEnd(run.last_offset + 1, run.greatest_ms)) for run in runs]


def before_each(runs: Iterable[OffsetRun], topics: Sequence[str], ends: LogEnds) -> Mapping[int, int]:
    """Map each offset run's number to the greatest event time in ms before the run in its Kafka partition.

    Raises StateIncompatible if two runs overlap (because records are repeated or out of order), or if ``ends`` shows
    that earlier jobs have already judged offsets of a run.
    """
    reached = dict(ends)
    last: dict[tuple[int, int], int] = {}
    result: dict[int, int] = {}
    for run in sorted(runs, key=lambda run: (run.topic, run.partition, run.first_offset)):
        place = run.topic, run.partition
        if place in last and run.first_offset <= last[place]:
            raise StateIncompatible(
                f"{topics[run.topic]}/{run.partition}: the offsets {run.first_offset} to {last[place]} occur twice, "
                f"or the rows are not in log order. Remove the repeated records from the input, or sort "
                f"its rows by partition and offset."
            )
        end = reached.get(place, NOTHING_JUDGED)
        if place in ends and run.first_offset < end.next_offset:
            raise StateIncompatible(
                f"{topics[run.topic]}/{run.partition}: the input begins at offset {run.first_offset}, and earlier runs "
                f"judged this partition up to offset {end.next_offset - 1}. Nothing was published. Leave out the "
                f"records before offset {end.next_offset}: they were judged, or can no longer be judged exactly."
            )
        result[run.number] = end.greatest_ms
        reached[place] = end._replace(greatest_ms=max(end.greatest_ms, run.greatest_ms))
        last[place] = run.last_offset
    return result


def ends_after(ends: LogEnds, later: Iterable[tuple[tuple[int, int], LogEnd]]) -> dict[tuple[int, int], LogEnd]:
    """Merge the ends of logs, and return each source partition's greatest next offset and greatest event time."""
    result = dict(ends)
    for place, end in later:
        result[place] = LogEnd(*map(max, result.get(place, NOTHING_JUDGED), end))
    return result


def _unwrapped(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, frozenset[int]]:
    """Reconstruct the source records from a batch of the repartition topic. Return the records and the indexes of idle
    markers.

    The last two headers of each record contain the timestamp and coordinates of the source record, or mark the record
    as an idle marker. Raises InvariantBroken if a record was not written by a repartition task.
    """
    columns: dict[str, list[object]] = {name: [] for name in ("headers", "timestamp_ms", *COORDINATES)}
    idle_rows: set[int] = set()
    for row, own in enumerate(batch.column("headers").to_pylist()):
        ours = {each["key"]: each["value"] for each in (own or [])[-2:]}
        timestamp, place, idle = ours.get(TIMESTAMP), ours.get(SOURCE), ours.get(IDLE)
        if timestamp is not None and idle is not None:
            idle_rows.add(row)
            place = idle + b"/-1"
        if timestamp is None or place is None:
            raise InvariantBroken(
                f"{batch.column('topic')[row]}/{batch.column('partition')[row]} offset {batch.column('offset')[row]} "
                f"was not written by a repartition task: it lacks the headers {SOURCE} and {TIMESTAMP}. Read the "
                f"source topics instead."
            )
        topic, partition, offset = place.decode().rsplit("/", 2)
        found = own[:-2], int(timestamp), topic, int(partition), int(offset)
        for column, value in zip(columns.values(), found, strict=True):
            column.append(value)
    arrays = {name: pa.array(column, ARROW_RECORDS.field(name).type) for name, column in columns.items()}
    names = batch.schema.names
    whole = pa.RecordBatch.from_arrays([arrays.get(name, batch.column(name)) for name in names], names)
    return whole, frozenset(idle_rows)


def _without_extracted(batch: pa.RecordBatch, idle: Collection[int]) -> pa.RecordBatch:
    """Remove the header `EXTRACTED`, which is the last header of every record except idle markers.

    Raises InvariantBroken if a record lacks this header, because such a record was not written by a repartition task.
    """
    found = batch.column("headers").to_pylist()
    for row, own in enumerate(found):
        if row not in idle and (not own or own[-1]["key"] != EXTRACTED):
            place = "/".join(str(batch.column(name)[row]) for name in ("topic", "partition", "offset"))
            raise InvariantBroken(f"the repartition topic's record of {place} lacks the header {EXTRACTED}.")
    column = [own[:-1] for own in found]
    at = batch.schema.get_field_index("headers")
    return batch.set_column(at, batch.schema.field(at), pa.array(column, batch.schema.field(at).type))


# Rows are packed to save CPU time. In a shuffle, moving a row from Python through the JVM and back takes microseconds.
# Therefore, a map task packs the rows for one reduce task into one binary value (an Arrow stream), so that the cost
# depends on the number of bytes. Spark's own hash of `TARGET` determines which reduce task receives a value.
#
# Spark passes batches of `maxRecordsPerBatch` rows to Python, and by default up to 256 MiB at a time. To save memory,
# enough empty rows follow each packed value to keep a full batch within `BATCH_BYTES`.


class _Buffers:
    """Keeps buffers in insertion order: in memory or, above ``in_memory_bytes`` in total, in a file in Spark's local
    directory.
    """

    def __init__(self, in_memory_bytes: int) -> None:
        self._in_memory_bytes: Final = in_memory_bytes
        self._held: list[pa.Buffer] = []
        self._file: IO[bytes] | None = None
        self._sizes: Final[list[int]] = []
        self._size_bytes = 0

    def add(self, buffer: pa.Buffer) -> None:
        self._size_bytes += buffer.size
        self._held.append(buffer)
        if self._size_bytes < self._in_memory_bytes:
            return
        if self._file is None:
            # On an executor, Spark sets the directory for temporary files; elsewhere, the system's directory is used.
            first = Path(os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or os.devnull)
            directory = first if first.is_dir() else None
            self._file = tempfile.TemporaryFile(prefix="dedup-", dir=directory)  # noqa: SIM115 - closed by clear
        for each in self._held:
            self._sizes.append(each.size)
            self._file.write(each)
        self._held.clear()

    def all(self) -> list[pa.Buffer]:
        """Return all buffers. The caller must not add a buffer after this call."""
        if self._file is not None and not self._held:
            self._file.flush()
            whole = pa.py_buffer(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))
            ends = np.cumsum(self._sizes).tolist()
            self._held = [whole.slice(end - size, size) for end, size in zip(ends, self._sizes, strict=True)]
        return self._held

    def clear(self) -> None:
        self._held.clear()
        self._sizes.clear()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._size_bytes = 0


class Packer:
    """Packs the rows of one map task into separate values for each reduce task.

    Processing a packed value costs about as much CPU time as processing a hundred rows. Therefore, the packer buffers
    sorted rows until the values are large enough or the map task ends. Rows that do not fit in memory are buffered in a
    file without compression, because compressing rows twice would double the cost of packing.
    """

    def __init__(self, targets: Sequence[int], batch_rows: int) -> None:
        """``batch_rows`` is the maximum number of rows in a batch that Spark passes to Python."""
        self._targets: Final = targets
        self._groups: Final = list(pairwise([*range(0, len(targets), _UNPACKED_REDUCERS), len(targets)]))
        """Ranges of reduce tasks whose rows are unpacked together. Each range consists of the first task and the task
        after the last one.
        """
        self._batch_rows: Final = batch_rows
        self._full: Final = min(_MOST_ROWS, _ROWS_PER_REDUCER * len(targets))
        self._held: Final[list[tuple[pa.RecordBatch, npt.NDArray[np.uint16]]]] = []
        self._rows = 0
        self._bytes = 0
        self._kept: Final[list[pa.RecordBatch]] = []
        """The first sorted batches."""
        self._kept_bytes = 0
        self._waiting: Final = _Buffers(in_memory_bytes=0)
        """The other sorted batches: for each batch, the packed rows of each group of reduce tasks."""
        self._borders: Final[list[list[int]]] = []
        """For each sorted batch, the position where each reduce task's rows begin, followed by the end of the batch."""
        self._sorted_rows = 0
        self._sorted_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()

    def add(self, batch: pa.RecordBatch, reducers: npt.NDArray[np.uint16]) -> Batches:
        """Add rows, and yield packed rows once enough rows are buffered. ``reducers`` contains the index of each row's
        reduce task in ``targets``.
        """
        if not batch.num_rows:
            return
        self._held.append((batch, reducers))
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= self._full or self._bytes >= _MOST_BYTES:
            rows = self._sorted()
            count = len(self._targets)
            if self._sorted_rows >= _LEAST_ROWS * count or self._sorted_bytes >= _LEAST_BYTES * count:
                yield from self._packed(rows)
            else:
                self._keep(rows)

    def rest(self) -> Batches:
        """Pack and yield the rows that `add` has not yielded yet."""
        yield from self._packed(self._sorted() if self._held else None)

    def _sorted(self) -> pa.RecordBatch:
        reducers = np.concatenate([reducers for _, reducers in self._held])
        # NumPy's stable sort of 16-bit integers is a radix sort, which is fast and keeps the rows in log order.
        order = np.argsort(reducers, kind="stable")
        rows = pa.concat_batches([batch for batch, _ in self._held]).take(pa.array(order))
        self._borders.append(np.searchsorted(reducers[order], np.arange(len(self._targets) + 1)).tolist())
        self._sorted_rows += rows.num_rows
        self._sorted_bytes += rows.nbytes
        self._held.clear()
        self._rows = self._bytes = 0
        return rows

    def _keep(self, rows: pa.RecordBatch) -> None:
        # After the first batch in the file, all later batches go to the file, so that the order is kept.
        if len(self._kept) == len(self._borders) - 1 and self._kept_bytes + rows.nbytes <= _IN_MEMORY_BYTES:
            self._kept.append(rows)
            self._kept_bytes += rows.nbytes
            return
        for first, end in self._groups:
            self._waiting.add(packed_stream(_rows_of(rows, self._borders[-1], first, end), _UNCOMPRESSED))

    def _packed(self, last: pa.RecordBatch | None) -> Batches:
        """Pack and yield the buffered rows, followed by ``last``."""
        waiting = self._waiting.all()
        for number, (first, end) in enumerate(self._groups):
            kept = zip(self._kept, self._borders, strict=False)  # the other borders are those of batches in the file
            batches = [_rows_of(rows, borders, first, end) for rows, borders in kept]
            batches += map(unpacked, waiting[number :: len(self._groups)])
            if last is not None:
                batches.append(_rows_of(last, self._borders[-1], first, end))
            # The size of a batch is computed once, because computing it takes as long as packing a few rows.
            parts = [
                (rows, rows.nbytes // rows.num_rows, borders)
                for rows, borders in zip(batches, self._borders, strict=True)
                if rows.num_rows
            ]
            for reducer in range(first, end):
                slices: list[pa.RecordBatch] = []
                size_bytes = 0
                for rows, row_bytes, borders in parts:
                    count = borders[reducer + 1] - borders[reducer]
                    if count:
                        slices.append(rows.slice(borders[reducer] - borders[first], count))
                        size_bytes += row_bytes * count
                        if size_bytes >= _MOST_PACKED_BYTES:
                            yield self._pack(self._targets[reducer], slices)
                            slices, size_bytes = [], 0
                if slices:
                    yield self._pack(self._targets[reducer], slices)
        self._borders.clear()
        self._kept.clear()
        self._kept_bytes = 0
        self._waiting.clear()
        self._sorted_rows = self._sorted_bytes = 0

    def notices(self, text: bytes) -> pa.RecordBatch:
        """Return packed rows that send the same notice to every reduce task."""
        count = len(self._targets)
        columns = [pa.array(self._targets, pa.int32()), pa.nulls(count, pa.binary()), pa.array([text] * count)]
        return pa.RecordBatch.from_arrays(columns, schema=_PACKED_SCHEMA)

    def _pack(self, target: int, slices: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        packed = packed_stream(together(slices))
        count = 1 + self._batch_rows * packed.size // BATCH_BYTES
        offsets = np.full(count + 1, packed.size, np.int32)
        offsets[0] = 0
        # All rows after the first have an empty value, so that the receiver can ignore these rows.
        column = pa.BinaryArray.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), packed])
        columns = [pa.array(np.full(count, target, np.int32)), column, pa.nulls(count, pa.binary())]
        return pa.RecordBatch.from_arrays(columns, schema=_PACKED_SCHEMA)


class ReceivedRows:
    """The packed rows, sightings, and notices that one reduce task has received."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Read all batches, which must have the schema `PACKED_ROWS` and can also have the column `KNOWN`."""
        self._packed: Final = _Buffers(_IN_MEMORY_BYTES)
        self._known: Final = _Buffers(_IN_MEMORY_BYTES)
        self.notices: Final[list[bytes]] = []
        """Notices in the form that `read_notice` accepts."""
        for batch in batches:
            self.notices.extend(batch.column("notice").drop_null().to_pylist())
            for name, buffers in (("packed", self._packed), (KNOWN, self._known)):
                if name not in batch.schema.names:
                    continue
                column = batch.column(name)
                sizes = pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
                # Some values are null, and the values of rows that pad a batch are empty.
                for row in np.flatnonzero(sizes).tolist():
                    buffers.add(column[row].as_buffer())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._packed.clear()
        self._known.clear()

    def known(self) -> Batches:
        """Yield the sightings of earlier jobs, in the same order on every call."""
        yield from map(unpacked, self._known.all())

    def known_of(self, ids: pa.Array) -> Batches:
        """Yield the sightings of earlier jobs whose ID is one of ``ids``."""
        for batch in self.known():
            yield batch.filter(pc.is_in(batch.column("id"), value_set=ids))

    def rows(self, without: Collection[str] = ()) -> Batches:
        """Unpack and yield the rows, in the same order on every call. A yielded batch can combine several packed
        values.

        The columns in ``without`` are not unpacked.
        """
        yield from gathered(self._unpacked(without))

    def _unpacked(self, without: Collection[str]) -> Batches:
        options = _READ_OPTIONS
        for packed in self._packed.all():
            if without and options is _READ_OPTIONS:
                names = pa.ipc.read_schema(packed).names
                wanted = [at for at, name in enumerate(names) if name not in without]
                options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=wanted)
            yield unpacked(packed, options)


def packed_stream(rows: pa.RecordBatch, options: pa.ipc.IpcWriteOptions = _WRITE_OPTIONS) -> pa.Buffer:
    """Return rows as an Arrow stream, which is compressed unless ``options`` specify otherwise."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_batch(rows)
    return sink.getvalue()


def unpacked(stream: pa.Buffer, options: pa.ipc.IpcReadOptions = _READ_OPTIONS) -> pa.RecordBatch:
    """Return the rows of an Arrow stream that `packed_stream` returned."""
    return pa.ipc.open_stream(stream, options=options).read_next_batch()


def _rows_of(rows: pa.RecordBatch, borders: Sequence[int], first: int, end: int) -> pa.RecordBatch:
    return rows.slice(borders[first], borders[end] - borders[first])


@dataclass(frozen=True, slots=True)
class MapPlan:
    """The parameters of a map task."""

    topology: Topology
    mode: Mode
    ceiling_ms: int
    targets: tuple[int, ...] = (0,)
    """The value of `TARGET` for each reduce task."""
    batch_rows: int = 10_000
    """The number of rows in a batch that Spark passes to Python."""
    feeds: tuple[Feed, ...] = ()
    """All source partitions if the input is the repartition topic; otherwise, empty."""


def map_rows(plan: MapPlan, batches: Iterable[pa.RecordBatch]) -> Batches:
    """Run one map task, which reads records with the schema `columns.RECORDS` and yields them as rows of
    `PACKED_ROWS`.
    """
    screener = Screener(plan)
    with Packer(plan.targets, plan.batch_rows) as packer:
        for batch in divided(batches):
            screened = screener.screened(batch)
            reducers = buckets_of(screened.column(ID), len(plan.targets))
            yield from packer.add(screened, reducers.astype(np.uint16))
        yield from packer.rest()
        if screener.runs.all:
            yield packer.notices(write_notice(screener.runs.all))


def buckets_of(ids: pa.Array, count: int) -> npt.NDArray[np.uint32]:
    """Return each ID's bucket (a reduce task or a group of sightings), which is the ID's hash modulo ``count``. A null
    ID gets an arbitrary bucket.
    """
    names = binary_column(ids)
    if ids.null_count:
        names = [b"%d" % row if each is None else each for row, each in enumerate(names)]
    return np.fromiter(map(crc32, names), np.uint32, len(names)) % count  # type: ignore[arg-type]  # no None is left


def write_notice(runs: Sequence[OffsetRun]) -> bytes:
    """Encode the offset runs of one map task in the form that `read_notice` decodes."""
    return orjson.dumps([asdict(each) for each in runs])


def read_notice(values: Iterable[bytes]) -> list[OffsetRun]:
    """Decode the offset runs that several map tasks encoded with `write_notice`."""
    return [OffsetRun(**each) for value in values for each in orjson.loads(value)]


class Screener:
    """Extracts IDs and event times from a Spark task's records, and finds exempt records and dead letters."""

    def __init__(self, plan: MapPlan) -> None:
        self._plan: Final = plan
        self._rules: Final = plan.topology.rules
        self._extractor: Final = extractor_of(plan.topology)
        self.runs = OffsetRuns()
        self._partition = -1
        self._stream_time = StreamTime.before(plan.feeds)

    def screened(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Drop idle markers, and append the columns that the reduce task needs to judge the records."""
        plan = self._plan
        partitions, offsets = integers_of(batch, "partition"), integers_of(batch, "offset")
        idle: frozenset[int] = frozenset()
        extractor = self._extractor
        passed_on = plan.mode == "log" and plan.topology.passes_ids_on
        if plan.mode == "log":
            batch, idle = _unwrapped(batch)
        if passed_on:
            extractor = extractor.again
        unplaced = plan.mode == "event_time"
        topics = np.zeros(batch.num_rows, np.int64) if unplaced else topics_of(batch, plan.topology.source.topics)
        feeds = [Feed(0, -1)] if unplaced else _feeds(topics, integers_of(batch, "partition"))
        rows = Rows(extract_batch(extractor, batch), integers_of(batch, "offset").tolist(), feeds, idle)
        if passed_on:
            batch = _without_extracted(batch, idle)
        outcome, skipped = screen(rows, self._rules, ceiling_ms=plan.ceiling_ms)
        times_ms = np.array(outcome.judged_times_ms, np.int64)
        moving = times_ms.copy()
        if skipped:
            moving[list(skipped)] = BEFORE_ALL_TIME
        added: dict[str, pa.Array] = {}
        match plan.mode:
            case "event_time":
                stream_ms = moving
            case "log":
                stream_ms = self._along_log(partitions, rows, moving, skipped)
                added = {TASK: pa.array(partitions.astype(np.int32)), PLACE: pa.array(offsets)}
            case "direct" | "merged":
                runs, stream_ms = self.runs.take(topics, partitions, offsets, moving)
                added = {RUN: pa.array(runs)}
        known = stream_ms > BEFORE_ALL_TIME
        added |= {
            ID: pa.array(rows.extracted.ids, pa.binary()),
            TIME: pa.array(times_ms),
            STREAM: pa.array(stream_ms, mask=None if known.all() else ~known),
            UNJUDGED: _unjudged(outcome, batch.num_rows),
        }
        if rows.extracted.fingerprints is not None:
            added[FINGERPRINT] = pa.array(rows.extracted.fingerprints, pa.binary())
        names, columns = [*batch.schema.names, *added], [*batch.columns, *added.values()]
        result = pa.RecordBatch.from_arrays(columns, names)
        return result.filter(pa.array(~np.isin(np.arange(batch.num_rows), list(idle)))) if idle else result

    def _along_log(self, partitions: Integers, rows: Rows, times_ms: Integers, skipped: set[int]) -> Integers:
        """Return the stream time at each row of the repartition topic, whose partitions a Spark task reads one after
        another.
        """
        result = np.empty(len(partitions), np.int64)
        borders = [0, *(np.flatnonzero(partitions[1:] != partitions[:-1]) + 1).tolist(), len(partitions)]
        for begin, end in pairwise(borders):
            if begin == end:
                continue
            if int(partitions[begin]) != self._partition:
                self._partition = int(partitions[begin])
                self._stream_time = StreamTime.before(self._plan.feeds)
            column, self._stream_time = self._stream_time.after(
                (
                    rows.feeds[row] if len(rows.feeds) > 1 else rows.feeds[0],
                    None if row in skipped else int(times_ms[row]),
                    row in rows.idle_rows,
                )
                for row in range(begin, end)
            )
            result[begin:end] = column
        return result


def _unjudged(outcome: Outcome, count: int) -> pa.Array:
    if not (outcome.exempt or outcome.dead):
        return pa.nulls(count, pa.string())
    texts: list[str | None] = [None] * count
    for row, exempt in outcome.exempt.items():
        texts[row] = SEPARATOR.join(("exempt", exempt, ""))
    for row, dead in outcome.dead:
        texts[row] = SEPARATOR.join(("dead_letter", dead.code, dead.detail))
    return pa.array(texts, pa.string())


def _feeds(topics: Integers, partitions: Integers) -> list[Feed]:
    if len(topics) and (topics == topics[0]).all() and (partitions == partitions[0]).all():
        return [Feed(int(topics[0]), int(partitions[0]))]
    return list(map(Feed, topics.tolist(), partitions.tolist()))
