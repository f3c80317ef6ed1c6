"""Exact verdicts over a finished table of records: those of the worker and of the model, row by row.

Theory of operation. A verdict depends on the sightings of the record's own ID and on stream time. Stream time is a
property of the log, so it is found first (`screened`, `stretches`); then the rows of an ID are brought together by one
shuffle, sorted in the order in which they are judged, and folded (`folded`). Which order that is:

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

from collections.abc import Sequence
from typing import Final, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import StructType

from dedup.core.stream_time import Feed
from dedup.errors import InvariantBroken, Problem, TopologyError
from dedup.spark.folded import JUDGED, Folding, folding, resolving
from dedup.spark.rows import COORDINATES, RECORDS, headers_of
from dedup.spark.screened import PLACE, STREAM, STRETCH, TARGET, TASK, Mode, Screening, screened_fields, screening
from dedup.topology.model import Topology

Order = Literal["offsets", "event_time"]
"""``offsets``: rows with Kafka coordinates, in the log's order. ``event_time``: without; nothing is late."""

VERDICTS: Final = ("unique", "duplicate", "conflict", "late", "dead_letter", "exempt")
"""``exempt``: forwarded unjudged by policy, with the reason missing_id or tombstone. A forwarded conflict is
``unique`` with the reason conflict."""


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
    TopologyError for a table of another shape; a running job raises what `backfill` lists.
    """
    _refuse_other_shape(df)
    mode = mode_of(topology, order, feeds)
    readers = int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or "200")
    targets = _targets(df.sparkSession, readers) if mode in {"direct", "merged"} else {}
    ceiling_ms = now_ms + topology.max_clock_skew_ms
    plan = Screening(topology, mode, ceiling_ms, tuple(targets.values()), tuple(feeds))
    ready = df.withColumn("headers", headers_of(df))
    screened = _in_log_order(ready, mode, readers, contiguous=contiguous).mapInArrow(
        screening(plan), StructType([*df.schema.fields, *screened_fields(plan)])
    )
    if mode == "merged":
        by_chance = F.coalesce(F.col(TARGET.name), F.hash(STRETCH.name, "offset"))
        together = screened.repartition(readers, by_chance).sortWithinPartitions(F.col(TARGET.name).asc_nulls_last())
        screened = together.mapInArrow(resolving(topology), screened.schema)
    spread = F.when(F.col("dedup_id").isNull(), F.hash("offset", "timestamp_ms", "value")).otherwise(F.hash("dedup_id"))
    together = screened.repartition(readers, F.coalesce(F.col(TARGET.name), spread))
    fields = [*df.schema.fields, *JUDGED]
    return together.sortWithinPartitions(*_judging_order(mode)).mapInArrow(
        folding(Folding(topology, mode, df.schema.names)), StructType(fields)
    )


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


def _refuse_other_shape(df: DataFrame) -> None:
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


def _judging_order(mode: Mode) -> list[Column]:
    """Return what rows are sorted by: first the rows that are no records, then by ID.

    Spark compares the first eight bytes of the first column quickly, and the rest slowly: so a hash goes first.
    """
    hashed = F.when(F.col("dedup_id").isNotNull(), F.xxhash64("dedup_id"))
    first = [hashed.asc_nulls_first(), F.col(TARGET.name).asc_nulls_last(), F.col("dedup_id")]
    names: tuple[str, ...]
    match mode:
        case "direct":
            names = ("partition", "offset")
        case "log":
            names = (TASK.name, PLACE.name)
        case "merged":
            names = (STREAM.name, *COORDINATES)
        case "event_time":
            names = ("dedup_time_ms", "key", "value", "headers", "timestamp_ms")
    return first + [F.col(name) for name in names]


def _targets(spark: SparkSession, readers: int) -> dict[int, int]:
    """Return, for every reader of a shuffle of so many, a number that Spark's own hash sends there."""
    for tries in (64, 1024):
        numbers = spark.range(readers * tries).select(F.col("id").cast("int").alias("number"))
        place = F.pmod(F.hash("number"), F.lit(readers)).alias("place")
        rows = numbers.select("number", place).groupBy("place").agg(F.min("number").alias("number")).collect()
        if len(rows) == readers:
            return {row["place"]: row["number"] for row in rows}
    raise InvariantBroken(f"Spark's hash reaches only {len(rows)} of {readers} shuffle partitions.")
