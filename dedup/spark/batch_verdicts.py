"""Judges a complete table of records. Each row gets the verdict that a worker would give the record.

A verdict depends on the earlier sightings of the record's ID and on stream time. The map side of the job computes the
stream time of each record (`map_side`). One shuffle then brings the rows of each ID together, and the reduce side sorts
and judges them (`reduce_side`, `columnar_fold`). The order in which records are judged depends on the input:

* In a direct topology, the records in each source partition are judged in offset order, as in a worker.
* If the input is the repartition topic, the records in each of its partitions are judged in offset order, as in a
  worker.
* If a topology repartitions records but the input consists of the source topics, no log shows the order in which a
  fleet judged the records. Such records are judged in the order of the running maximum of event time in their source
  partition, and then by topic, partition, and offset.
* Rows without offsets are judged in event-time order; rows with equal event times are ordered by a digest of key,
  value, headers, and timestamp. A row without an offset is never late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import BinaryType, StructType

from dedup.core.window import Feed
from dedup.errors import InvariantBroken, Problem, SettingsError, TopologyError
from dedup.spark.columnar_fold import Integers
from dedup.spark.columns import COORDINATES, RECORDS, BatchFunction, headers_of
from dedup.spark.files import History, partly_placed, read_splits, rows_of
from dedup.spark.log_order import in_log_order, ranges_of, spread
from dedup.spark.log_tasks import assigned, frame_of, judge_logs
from dedup.spark.map_side import KNOWN, MOST_REDUCERS, PACKED_ROWS, TARGET, LogEnds, MapPlan, Mode, map_rows
from dedup.spark.reduce_side import JUDGED, ReducePlan, reduce_rows
from dedup.spark.row_events import lacking, unfit_columns
from dedup.spark.session import RECORD_BYTES, shuffle_partitions
from dedup.spark.sightings import routed
from dedup.topology.model import Topology

_EXPLAINED: Final = frozenset({"dead_letter", "exempt", "late"})
_MOST_CAUSES: Final = 10
_LEAST_BYTES_EACH: Final = 256 << 10
"""A map task should read this many bytes per reduce task, because a packed value costs as much as a hundred rows."""

Order = Literal["offsets", "event_time"]
"""With ``offsets``, rows are judged in log order. ``event_time`` is for rows without offsets, which are never late."""


@dataclass(frozen=True, slots=True)
class Judging:
    """The last stage of a judging job, which yields the records with their verdicts."""

    rows: DataFrame
    """The input of the last stage's tasks."""
    judge: BatchFunction
    """Turns the rows that a task reads into records with verdicts."""
    schema: StructType

    def frame(self) -> DataFrame:
        """Return the records with their verdicts."""
        return self.rows.mapInArrow(self.judge, self.schema)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A judging job's records after the shuffle, before the reduce side judges them."""

    packed: DataFrame
    """Rows of `map_side.PACKED_ROWS`, each in the Spark partition of its reduce task."""
    plan: ReducePlan
    schema: StructType
    reducers: int
    """The number of reduce tasks before adaptive execution merges any of them."""

    @property
    def judging(self) -> Judging:
        """Return the stage in which the reduce tasks judge the records."""
        return Judging(self.packed, partial(reduce_rows, self.plan), self.schema)


def judged(
    df: DataFrame,
    topology: Topology,
    *,
    now_ms: int,
    order: Order,
    contiguous: bool = False,
    feeds: Sequence[Feed] = (),
) -> DataFrame:
    """Return the records with the columns `reduce_side.JUDGED` appended, in no particular order.

    ``df`` must have the columns of `columns.RECORDS` and can have other columns. If the topology has `event_time:
    arrival`, ``df`` must come from `columns.as_records` with ``by_arrival``. `verdict` is unique, duplicate, conflict,
    late, dead_letter, or exempt. The topology forwards exempt records without judging them; their reason is missing_id
    or tombstone. A conflict that is forwarded because of `on_conflict: forward` has the verdict unique and the reason
    conflict.

    ``now_ms`` is the clock time in ms that the job uses to detect future event times. If ``df`` is already in log
    order, as it is when read from Spark's Kafka source, set ``contiguous`` to true to save a sort. Log order means that
    each Kafka partition's offsets ascend within a Spark partition, and that no two Spark partitions have overlapping
    offset ranges. The job checks the log order while it runs. If ``df`` is read from the repartition topic, ``feeds``
    must list all source partitions. Raises TopologyError if ``df`` lacks a required column, and SettingsError for
    unusable Spark settings. When the result is computed, the job raises the errors that `backfill.backfill` lists.
    """
    placed = order == "offsets"
    history = History(df, placed, contiguous, identity="", place="", feeds=tuple(feeds), by_arrival=True)
    return judging(history, topology, now_ms=now_ms).frame()


def judging(history: History, topology: Topology, *, now_ms: int) -> Judging:
    """Return the job that judges a history. The job avoids a shuffle if this is possible and faster (`log_tasks`)."""
    pieces, mode = history.pieces, mode_of(topology, history)
    if pieces is None or mode != "direct" or not history.contiguous:
        return shuffled(history, topology, now_ms=now_ms).judging
    refuse_other_shape(history.records)
    spark = history.records.sparkSession
    tasks = pieces.frame.rdd.getNumPartitions()
    cores = spark.sparkContext.defaultParallelism
    bins = assigned(pieces.logs, tasks=tasks, cores=cores, extend=topology.window.extend)
    if not bins:
        return shuffled(history, topology, now_ms=now_ms).judging
    plan = MapPlan(topology, mode, now_ms + topology.max_clock_skew_ms)
    reduce = ReducePlan(topology, mode, history.records.schema.names)
    return Judging(
        frame_of(spark, bins), partial(judge_logs, plan, reduce, pieces.columns), _judged_schema(history.records)
    )


def _judged_schema(records: DataFrame) -> StructType:
    return StructType([*records.schema.fields, *JUDGED])


def shuffled(
    history: History,
    topology: Topology,
    *,
    now_ms: int,
    ends: LogEnds | None = None,
    layers: Mapping[int, DataFrame] | None = None,
) -> Shuffled:
    """Return a history's records after the shuffle, before the reduce side judges them.

    If ``ends`` is given, the job continues where earlier jobs ended; only the modes ``direct`` and ``event_time``
    support ``ends``. ``layers`` contains the sightings of earlier jobs (rows of `sightings.LAYER`), keyed by the number
    of buckets into which the earlier jobs divided their sightings.
    """
    df, feeds, pieces = history.records, history.feeds, history.pieces
    refuse_other_shape(df)
    mode = mode_of(topology, history)
    spark = df.sparkSession
    reducers, batch_rows = _shuffle_settings(spark)
    targets = _targets(reducers)
    plan = MapPlan(topology, mode, now_ms + topology.max_clock_skew_ms, targets, batch_rows, feeds)
    to_sort = mode in {"direct", "merged"} and not history.contiguous
    read: BatchFunction | None = None
    ready = df.withColumn("headers", headers_of(df))
    if pieces is not None and (history.bounds or not to_sort):
        columns, ready = pieces.columns, pieces.frame
        read = lambda batches: read_splits(columns, rows_of(batches))  # noqa: E731
    # Partitions are merged only if the order of rows does not matter, because merging may change the order in which
    # Spark's own readers return rows.
    if history.size_bytes is not None and (pieces is not None or to_sort or mode == "event_time"):
        ready = ready.coalesce(_map_tasks(spark, history.size_bytes, reducers))
    if to_sort and history.bounds:
        topics = topology.source.topics
        send = partial(spread, ranges_of(history.bounds, topics, reducers), topics, targets, batch_rows)
        ready = ready.mapInArrow(_chained(read, send), PACKED_ROWS).repartition(reducers, TARGET)
        read = partial(in_log_order, topics)
    elif to_sort:
        ready = ready.repartitionByRange(reducers, *COORDINATES).sortWithinPartitions(*COORDINATES)
    elif mode == "log":
        ready = ready.repartition(reducers, "partition").sortWithinPartitions("partition", "offset")
    packed = ready.mapInArrow(_chained(read, partial(map_rows, plan)), PACKED_ROWS)
    reduced = ReducePlan(topology, mode, df.schema.names, ends or {})
    if layers:
        packed = packed.withColumn(KNOWN, F.lit(None).cast(BinaryType()))
    for buckets, layer in (layers or {}).items():
        packed = packed.unionByName(routed(layer, buckets, targets, batch_rows))
    # If the size is unknown, adaptive execution merges partitions that are too small for a task. Spark never divides a
    # partition here, because adaptive execution divides only partitions of joins and of REBALANCE. If ``ends`` is
    # given, no partitions are merged, because each known sighting is sent to one particular task.
    merged = history.size_bytes is None and ends is None
    together = packed.repartition(TARGET) if merged else packed.repartition(reducers, TARGET)
    return Shuffled(together, reduced, _judged_schema(df), reducers)


def _chained(first: BatchFunction | None, then: BatchFunction) -> BatchFunction:
    return then if first is None else lambda batches: then(first(batches))


@dataclass(frozen=True, slots=True)
class Counts:
    """The verdict counts, and the most frequent causes of dead letters, exempt records, and late records."""

    verdicts: Mapping[str, int]
    causes: Mapping[str, Mapping[str, int]]
    """The most frequent reasons for dead letters and exempt records, and the source partitions of late records."""

    @property
    def lines(self) -> list[str]:
        """Return the counts and causes as lines of text for the user."""
        shown = "  ".join(f"{name} {count:,}" for name, count in self.verdicts.items())
        lines = [f"judged {sum(self.verdicts.values()):,}: {shown or 'no record'}"]
        for verdict, causes in self.causes.items():
            lines.append(f"{verdict}: {', '.join(f'{count:,} {cause}' for cause, count in causes.items())}")
        return lines


def counts_of(verdicts: DataFrame) -> Counts:
    """Count all records by verdict, and count dead letters, exempt records, and late records also by cause. To count
    causes, Spark reads ``verdicts`` a second time.
    """
    rows = verdicts.groupBy("verdict").count().collect()
    counts = {row["verdict"]: row["count"] for row in sorted(rows, key=lambda row: str(row["verdict"]))}
    causes: dict[str, dict[str, int]] = {}
    explained = sorted(_EXPLAINED & counts.keys())
    if explained:
        place = F.concat_ws("/", "topic", F.col("partition").cast("string"))
        found = verdicts.where(F.col("verdict").isin(explained))
        grouped = found.groupBy("verdict", F.coalesce("reason", place).alias("cause")).count()
        for row in grouped.orderBy(F.desc("count"), "cause").limit(_MOST_CAUSES).collect():
            causes.setdefault(row["verdict"], {})[row["cause"]] = row["count"]
    return Counts(counts, causes)


def balanced(history: History, counts: Mapping[str, int]) -> int:
    """Return the number of records in the history. Raises InvariantBroken if the verdict counts do not add up to the
    number of records.
    """
    rows = history.records.count() if history.pieces is None else history.pieces.rows
    if rows != sum(counts.values()):
        raise InvariantBroken(
            f"{history.place} has {rows:,} records, but they received {sum(counts.values()):,} verdicts. None of "
            f"them is published. If nobody changed the input in the meantime, this is a bug: please report it."
        )
    return rows


def mode_of(topology: Topology, history: History) -> Mode:
    """Return the mode, which determines the order in which the records of a history are judged.

    Raises SettingsError if the history cannot contain what the topology needs (`refuse_unfit`).
    """
    refuse_unfit(topology, history)
    if not history.placed:
        return "event_time"
    if topology.direct:
        return "direct"
    return "log" if history.feeds else "merged"


def refuse_absent(topology: Topology, history: History) -> None:
    """Raise SettingsError if no record of the history can have an ID or an event time, because columns are missing."""
    problems = list(lacking(topology, history.absent, _REMEDY))
    if problems:
        raise SettingsError(problems)


def refuse_unfit(topology: Topology, history: History) -> None:
    """Raise SettingsError if no record of the history can have an ID or an event time, because columns are missing or
    have other types, or if the topology needs broker-set timestamps but the history does not guarantee them.
    """
    problems = list(lacking(topology, history.absent, _REMEDY))
    if history.events is not None:
        problems += unfit_columns(history.events, topology)
    if topology.by_arrival and not history.by_arrival and not history.feeds:
        text = "is arrival, so pass what `read_files` or `read_kafka` returns: a plain DataFrame does not show which "
        problems.append(Problem("event_time", text + "timestamps are the broker's"))
    if problems:
        raise SettingsError(problems)


_REMEDY: Final = (
    "which the input does not have: add the column `key`, `headers`, or `timestamp_ms`, or name a field instead"
)
ORDER_TEXTS: Final[Mapping[Mode, str]] = {
    "direct": "judged in the order of offsets, each source partition separately, as in a worker",
    "log": "judged in the order of the repartition topic, with the stream time of all feeds, as in a worker",
    "merged": (
        "judged by the running maximum of event time within the source partition, then by topic, partition and offset, "
        "because no log shows how a fleet interleaved the source partitions"
    ),
    "event_time": (
        "judged in the order of event times, because rows have no offsets, and rows with equal times in the order of a "
        "digest of key, value, headers and timestamp; no row is late"
    ),
}
"""Maps each mode to a sentence about the order in which rows are judged."""


def refuse_other_shape(df: DataFrame) -> None:
    """Raise TopologyError if ``df`` lacks a column of `columns.RECORDS`, or has a column that judging adds."""
    found = {field.name: field.dataType for field in df.schema.fields}
    problems = [
        Problem(f"column {field.name}", f"is {found.get(field.name, 'missing')}; it must be {field.dataType}")
        for field in RECORDS.fields
        if found.get(field.name) != field.dataType
    ]
    ours = {field.name for field in JUDGED} | {*RECORDS.names}
    # Spark ignores case in names, so it would treat `Topic` as `topic`.
    lowered = {name: name.lower() for name in found.keys() - {*RECORDS.names}}
    taken = sorted(name for name, lower in lowered.items() if lower in ours or lower.startswith("_dedup_"))
    problems += [Problem(f"column {name}", "is a column that dedup adds; rename or drop it") for name in taken]
    if problems:
        raise TopologyError(problems)


def history_of(df: DataFrame, *, identified: bool) -> History:
    """Return a DataFrame with the schema `columns.RECORDS` as a history that is identified by its row count.

    If ``identified`` is true, Spark reads all columns to add a digest of all rows to the history's identity. Raises
    SettingsError if only some rows have offsets.
    """
    refuse_other_shape(df)
    names = RECORDS.fieldNames()
    # xxhash64 ignores nulls, so the hash also covers whether each column is null. The hashes are added, because a sum
    # does not depend on the order of rows. They are cast to decimals, because a 64-bit sum would overflow.
    hashed = F.xxhash64(*names, *(F.col(name).isNull() for name in names)).cast("decimal(20,0)")
    digest_of = F.sum(hashed) if identified else F.lit(None)
    row = df.agg(F.count("offset").alias("placed"), F.count(F.lit(1)).alias("rows"), digest_of.alias("sum")).first()
    placed, rows, digest = (0, 0, None) if row is None else (row["placed"], row["rows"], row["sum"])
    if 0 < placed < rows:
        raise partly_placed("the DataFrame", placed, rows)
    identity = f"a DataFrame of {rows} rows, digest {digest or 0}"
    size_bytes = rows * RECORD_BYTES
    return History(df, placed > 0, contiguous=False, identity=identity, place=f"{rows:,} rows", size_bytes=size_bytes)


def _map_tasks(spark: SparkSession, size_bytes: int, reducers: int) -> int:
    """Return a number of map tasks that keeps all cores busy and, if possible, gives each map task `_LEAST_BYTES_EACH`
    bytes of input per reduce task.
    """
    cores = spark.sparkContext.defaultParallelism
    # The result is a multiple of the number of cores, so that each map task reads part of the input of a single
    # `files._log_order` task.
    return cores * max(1, size_bytes // (_LEAST_BYTES_EACH * reducers * cores))


def _shuffle_settings(spark: SparkSession) -> tuple[int, int]:
    """Return the number of reduce tasks and the maximum number of rows per batch that Spark passes to Python."""
    reducers = shuffle_partitions(spark)
    batch_rows = int(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") or "10000")
    problems = []
    if reducers > MOST_REDUCERS:
        problems.append(Problem("spark.sql.shuffle.partitions", f"is {reducers:,}; the maximum is {MOST_REDUCERS:,}"))
    if batch_rows <= 0:
        text = "must be positive here: a batch without a limit grows beyond what Arrow can hold. Leave it unset"
        problems.append(Problem("spark.sql.execution.arrow.maxRecordsPerBatch", text))
    if problems:
        raise SettingsError(problems)
    return reducers, batch_rows


def _targets(reducers: int) -> tuple[int, ...]:
    """Return, for each of ``reducers`` shuffle partitions, the smallest integer that Spark's hash assigns to the
    partition.
    """
    for tries in (64, 1024):
        places = _spark_hash(np.arange(reducers * tries, dtype=np.uint32)) % reducers
        reached, numbers = np.unique(places, return_index=True)
        if len(reached) == reducers:
            return tuple(numbers.tolist())
    raise InvariantBroken(f"Spark's hash reaches only {len(reached)} of {reducers} shuffle partitions.")


def _spark_hash(numbers: npt.NDArray[np.uint32]) -> Integers:
    """Return Spark's `hash` of each integer, which is MurmurHash3 (Appleby 2011) with the seed 42."""
    hashed = _rotated(numbers * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    hashed = _rotated(np.uint32(42) ^ hashed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hashed ^= np.uint32(numbers.itemsize)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ hashed >> np.uint32(shift)) * np.uint32(factor)
    return hashed.view(np.int32).astype(np.int64)


def _rotated(numbers: npt.NDArray[np.uint32], by: int) -> npt.NDArray[np.uint32]:
    return numbers << np.uint32(by) | numbers >> np.uint32(32 - by)
