"""Exact verdicts over a finished table of records: those of the worker and of the model, row by row.

Theory of operation. A verdict depends on the sightings of the record's own ID and on stream time. Stream time is a
property of the log, so it is found first (`screened`, `stretches`); then the rows of an ID are brought together by one
shuffle (`parcels`), sorted in the order in which they are judged, and folded (`folded`). Which order that is:

* a direct topology: each source partition in the order of its offsets, as its task does;
* the repartition topic of one that is not: each of its partitions in the order of its offsets, stream time by the skew
  rule over the feeds, as its task does;
* source topics of one that is not: no log says how a fleet mixed them. They are judged *in step*: by the running
  maximum of event time within the source partition, then by topic, partition, offset. Stream time is that running
  maximum: no feed is ahead of another, which is what the skew rule waits for;
* rows without coordinates: by event time, equal times by the bytes of key, value, headers, then by timestamp; nothing
  is late. Rows equal in all of these are the same event twice, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import StructType

from dedup.core.stream_time import Feed
from dedup.errors import InvariantBroken, Problem, SettingsError, TopologyError
from dedup.spark.folded import JUDGED, Folding, folding
from dedup.spark.parcels import MOST_READERS, PARCELS, TARGET
from dedup.spark.pieces import Pieces, opened
from dedup.spark.rows import COORDINATES, RECORDS, headers_of
from dedup.spark.screened import Mode, Screening, screening
from dedup.topology.model import Topology

_Step = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

Order = Literal["offsets", "event_time"]
"""``offsets``: rows with Kafka coordinates, in the log's order. ``event_time``: without; nothing is late."""

VERDICTS: Final = ("unique", "duplicate", "conflict", "late", "dead_letter", "exempt")
"""``exempt``: forwarded unjudged by policy, with the reason missing_id or tombstone. A forwarded conflict is
``unique`` with the reason conflict."""


@dataclass(frozen=True, slots=True)
class Judging:
    """A table on its way to its verdicts: rows are with the task that judges them."""

    parcels: DataFrame
    """`parcels.PARCELS`."""
    plan: Folding
    schema: StructType

    def frame(self) -> DataFrame:
        """Return the records with their verdicts."""
        return self.parcels.mapInArrow(folding(self.plan), self.schema)


def judged(
    df: DataFrame,
    topology: Topology,
    *,
    now_ms: int,
    order: Order,
    contiguous: bool = False,
    feeds: Sequence[Feed] = (),
) -> DataFrame:
    """Return the records (`rows.RECORDS`, more columns are kept) with `JUDGED` after them; one row each, in no order.

    ``now_ms`` is the wall clock that future times are measured by. ``contiguous``: each Spark partition of ``df`` holds
    ascending offsets of its Kafka partitions, and no two overlap, as Spark's Kafka source does it; it is checked while
    running, and saves a sort. ``feeds``: for the repartition topic, every source partition there is. Raises
    TopologyError for a table of another shape, SettingsError for settings of Spark that can not be; a running job
    raises what `backfill` lists.
    """
    return judging(df, topology, now_ms=now_ms, order=order, contiguous=contiguous, feeds=feeds).frame()


def judging(
    df: DataFrame,
    topology: Topology,
    *,
    now_ms: int,
    order: Order,
    contiguous: bool = False,
    feeds: Sequence[Feed] = (),
    pieces: Pieces | None = None,
) -> Judging:
    """Return what `judged` does one step before; ``pieces``: the files that ``df`` is, to be read in the tasks."""
    refuse_other_shape(df)
    mode = mode_of(topology, order, feeds)
    readers, batch_rows = _readers_of(df.sparkSession)
    targets = _targets(df.sparkSession, readers)
    plan = Screening(topology, mode, now_ms + topology.max_clock_skew_ms, targets, batch_rows, tuple(feeds))
    if pieces is not None and (contiguous or mode == "event_time"):
        screened = pieces.frame.mapInArrow(_after(opened(pieces.columns), screening(plan)), PARCELS)
    else:
        ready = _in_log_order(df.withColumn("headers", headers_of(df)), mode, readers, contiguous=contiguous)
        screened = ready.mapInArrow(screening(plan), PARCELS)
    schema = StructType([*df.schema.fields, *JUDGED])
    return Judging(screened.repartition(readers, TARGET), Folding(topology, mode, df.schema.names), schema)


def _after(first: _Step, then: _Step) -> _Step:
    return lambda batches: then(first(batches))


def mode_of(topology: Topology, order: Order, feeds: Sequence[Feed]) -> Mode:
    """Return how rows of this topology are judged."""
    if order == "event_time":
        return "event_time"
    if topology.direct:
        return "direct"
    return "log" if feeds else "merged"


def order_text(mode: Mode) -> str:
    """Return a sentence that says in which order rows are judged."""
    match mode:
        case "direct":
            return "judged in the order of offsets, each source partition for itself, as a worker does"
        case "log":
            return "judged in the order of the repartition topic, stream time by the skew rule, as a worker does"
        case "merged":
            return (
                "judged in step: by the running maximum of event time within the source partition, then by topic, "
                "partition, offset; how a fleet mixed the source partitions is not in any log"
            )
        case "event_time":
            return (
                "no coordinates: judged in the order of event times, equal times by the bytes of key, value and "
                "headers; nothing is late"
            )


def refuse_other_shape(df: DataFrame) -> None:
    """Raise TopologyError for a frame that has not the columns `rows.RECORDS`, or has one of ours."""
    found = {field.name: field.dataType for field in df.schema.fields}
    problems = [
        Problem(f"column {field.name}", f"is {found.get(field.name, 'missing')}; it must be {field.dataType}")
        for field in RECORDS.fields
        if found.get(field.name) != field.dataType
    ]
    ours = {field.name for field in JUDGED}
    taken = [name for name in found if name in ours or name.startswith("_dedup_")]
    problems += [Problem(f"column {name}", "is ours; rename or drop it") for name in taken]
    if problems:
        raise TopologyError(problems)


def _in_log_order(df: DataFrame, mode: Mode, readers: int, *, contiguous: bool) -> DataFrame:
    match mode:
        case "event_time":
            return df
        case "log":
            return df.repartition(readers, "partition").sortWithinPartitions("partition", "offset")
        case "direct" | "merged" if contiguous:
            return df
        case "direct" | "merged":
            return df.repartitionByRange(readers, *COORDINATES).sortWithinPartitions(*COORDINATES)


def _readers_of(spark: SparkSession) -> tuple[int, int]:
    """Return how many tasks judge, and as how many rows Spark hands over at once."""
    readers = int(spark.conf.get("spark.sql.shuffle.partitions") or "200")
    batch_rows = int(spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") or "10000")
    problems = []
    if readers > MOST_READERS:
        problems.append(Problem("spark.sql.shuffle.partitions", f"is {readers:,}; at most {MOST_READERS:,}"))
    if batch_rows <= 0:
        text = "must be positive here: a batch without a limit grows beyond what Arrow can hold. Leave it unset"
        problems.append(Problem("spark.sql.execution.arrow.maxRecordsPerBatch", text))
    if problems:
        raise SettingsError(problems)
    return readers, batch_rows


def _targets(spark: SparkSession, readers: int) -> tuple[int, ...]:
    """Return, for every reader of a shuffle of so many, a number that Spark's own hash sends there."""
    if readers not in _known_targets:
        for tries in (64, 1024):
            numbers = spark.range(readers * tries).select(F.col("id").cast("int").alias("number"))
            place = F.pmod(F.hash("number"), F.lit(readers)).alias("place")
            rows = numbers.select("number", place).groupBy("place").agg(F.min("number").alias("number")).collect()
            if len(rows) == readers:
                break
        else:
            raise InvariantBroken(f"Spark's hash reaches only {len(rows)} of {readers} shuffle partitions.")
        _known_targets[readers] = tuple(row["number"] for row in rows)
    return _known_targets[readers]


_known_targets: Final[dict[int, tuple[int, ...]]] = {}
