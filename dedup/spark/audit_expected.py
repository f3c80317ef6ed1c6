"""What the topics must hold by the rule: every record of the log, its verdict, and the digests to find it by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.proof.evidence import FIRST_SOURCE_HEADER, FIRST_TIME_HEADER, SOURCE_HEADER, VERDICT_HEADER
from dedup.proof.replay import REFUSED_BY_THE_BROKER
from dedup.spark.audit_records import digest, headers_or_none, with_header
from dedup.spark.batch import judged
from dedup.spark.changelog import OUTSIDE_KAFKA
from dedup.spark.columns import identified
from dedup.topology.model import LateForward

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dedup.core.stream_time import Feed
    from dedup.topology.model import Topology

NO_CEILING_MS: Final = 1 << 48
"""Whatever was not made a dead letter for its time was accepted; only the dead-letter topic knows the clock of then."""
PLACE: Final = ("topic", "partition", "offset")


@dataclass(frozen=True, slots=True)
class Log:
    """The records to be judged, and what is known of the part before them."""

    records: DataFrame
    """`rows.RECORDS`, history before the log included."""
    feeds: tuple[Feed, ...]
    """Not empty for the repartition topic."""
    committed: Mapping[int, int]
    """Log partition -> where the group is: what follows may be judged or not."""
    begins: Mapping[int, int]
    """Log partition -> where the fleet began: what is before was judged by a backfill, and not forwarded."""
    known: Mapping[int, bool]
    """Log partition -> whether nothing is missing before its first record."""
    stamped: bool
    """The output keeps the source's timestamps."""


def expected(
    log: Log, topology: Topology, filed_dead: DataFrame, filed_late: DataFrame | None, *, witnessed: bool
) -> DataFrame:
    """Return every record of the log with its verdict, and what it must look like in each topic.

    ``witnessed``: there are dead letters of which the record itself says nothing.
    Columns: `PLACE`, `verdict`, `reason`, `time_ms`, `stream_ms`, `id`, `task`, `at` (the log's offset), `pending`,
    `history`, `doubtful`, `forwards`, and digests of the record: `raw` as it was, `out` in the output, `copy` among the
    duplicates.
    """
    judging, evident = (
        _evidence(log.records, topology, filed_dead) if witnessed and not log.feeds else (log.records, None)
    )
    rows = judged(judging, topology, now_ms=NO_CEILING_MS, order="offsets", feeds=log.feeds)
    rows = rows.select(
        *PLACE,
        "verdict",
        "reason",
        fn.col("dedup_time_ms").alias("time_ms"),
        fn.col("stream_time_ms").alias("stream_ms"),
        fn.col("dedup_id").alias("id"),
        fn.col("dedup_partition").alias("task"),
        fn.col("dedup_offset").alias("at"),
        *_digests(topology, stamped=log.stamped),
    )
    if evident is not None:
        rows = rows.unionByName(_judged_by_evidence(identified(evident, topology)))
    rows = rows.withColumns(
        {
            "pending": fn.col("at") >= by_task(log.committed, "task", 0),
            "history": fn.col("at") < by_task(log.begins, "task", 0),
        }
    )
    return _with_doubt(rows, log, topology, filed_late)


def by_task(values: Mapping[int, int], column: str, otherwise: int) -> Column:
    """Return the value of the task that a column names."""
    if not values:
        return fn.lit(otherwise)
    mapped = fn.create_map(*(fn.lit(each) for pair in sorted(values.items()) for each in pair))
    return fn.coalesce(mapped[fn.col(column)], fn.lit(otherwise))


def _evidence(records: DataFrame, topology: Topology, filed_dead: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Return the records to judge, and those that only the broker or the worker's clock can have refused.

    The dead-letter topic is the one witness of these: they moved nothing, so they are judged apart.
    """
    reasons = [REFUSED_BY_THE_BROKER, *(["future_time"] if topology.future is OnFuture.DEAD_LETTER else [])]
    witnessed = filed_dead.where(fn.col("filed_reason").isin(*reasons)).select(
        fn.col("source_topic").alias("topic"),
        fn.col("source_partition").alias("partition"),
        fn.col("source_offset").alias("offset"),
        fn.col("filed_reason").alias("reason"),
    )
    witnessed = witnessed.dropDuplicates(["topic", "partition", "offset"])
    return records.join(witnessed, list(PLACE), "left_anti").select(*records.columns), records.join(
        witnessed, list(PLACE)
    )


def _judged_by_evidence(evident: DataFrame) -> DataFrame:
    raw = digest(headers_or_none(), fn.col("timestamp_ms"))
    none = fn.lit(None)
    return evident.select(
        *PLACE,
        fn.lit("dead_letter").alias("verdict"),
        "reason",
        fn.col("dedup_time_ms").alias("time_ms"),
        none.cast("long").alias("stream_ms"),
        none.cast("binary").alias("id"),
        fn.col("partition").alias("task"),
        fn.col("offset").alias("at"),
        fn.expr("false").alias("forwards"),
        raw.alias("raw"),
        none.cast("binary").alias("out"),
        none.cast("binary").alias("copy"),
    )


def _digests(topology: Topology, *, stamped: bool) -> list[Column]:
    own = headers_or_none()
    late = fn.when(fn.col("verdict") == "late", fn.lit("late")) if isinstance(topology.late, LateForward) else None
    exempt = fn.when(fn.col("verdict").isin("exempt", "unique"), fn.col("reason"))
    why = exempt if late is None else fn.coalesce(late, exempt)
    place = fn.concat_ws("/", "topic", fn.col("partition").cast("string"), fn.col("offset").cast("string"))
    ahead = fn.when(why.isNotNull(), with_header(own, VERDICT_HEADER, why)).otherwise(own)
    if topology.output is not None and topology.output.headers:
        ahead = with_header(ahead, SOURCE_HEADER, place)
    # A sighting that a seed took from files without offsets: here it has a place before the log, there it has none.
    outside = fn.when(fn.col("first_offset") < 0, fn.lit(OUTSIDE_KAFKA)).otherwise(fn.col("first_offset"))
    first = fn.concat_ws("/", "first_topic", fn.col("first_partition").cast("string"), outside.cast("string"))
    copied = with_header(own, FIRST_TIME_HEADER, fn.col("first_time_ms").cast("string"))
    copied = with_header(copied, FIRST_SOURCE_HEADER, first)
    stamp = fn.col("timestamp_ms") if stamped else fn.lit(0)
    forwards = ("unique", "exempt") if late is None else ("unique", "exempt", "late")
    return [
        fn.col("verdict").isin(*forwards).alias("forwards"),
        digest(own, fn.col("timestamp_ms")).alias("raw"),
        digest(ahead, stamp).alias("out"),
        fn.when(fn.col("verdict").isin("duplicate", "conflict"), digest(copied, fn.lit(0))).alias("copy"),
    ]


def _with_doubt(rows: DataFrame, log: Log, topology: Topology, filed_late: DataFrame | None) -> DataFrame:
    """Return the rows with `doubtful`: another verdict is possible, because the log's beginning is not known.

    Any sighting may stand before a log whose beginning is gone, up to its first record that was not late plus grace. An
    ID that was met there stays in doubt: the verifier follows it until the doubt expires, here it stays for good, which
    claims less.
    """
    unknown = [task for task, known in log.known.items() if not known]
    clamped = topology.future is OnFuture.CLAMP
    if not unknown and not clamped:
        return rows.withColumn("doubtful", fn.expr("false"))
    doubt = fn.expr("false")
    if clamped:
        before = Window.partitionBy("task").orderBy("at").rowsBetween(Window.unboundedPreceding, -1)
        beyond = fn.col("time_ms") > fn.max("stream_ms").over(before) + fn.lit(topology.max_clock_skew_ms)
        rows = rows.withColumn("beyond", beyond.cast("int"))
        until_now = Window.partitionBy("task").orderBy("at")
        doubt |= fn.coalesce(fn.max("beyond").over(until_now) > 0, fn.expr("false"))
    if unknown:
        by_task = Window.partitionBy("task").orderBy("at")
        whole = by_task.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
        rows, on_time = _not_filed_late(rows, filed_late)
        first = fn.first(fn.when(on_time, fn.col("stream_ms")), ignorenulls=True).over(whole)
        seen = fn.col("stream_ms") - fn.lit(topology.window.retention_ms)
        early = fn.coalesce(seen <= first + fn.lit(topology.window.grace_ms), fn.expr("true"))
        front = fn.col("task").isin(*unknown) & early
        rows = rows.withColumn("front", front.cast("int"))
        by_id = Window.partitionBy("task", "id").orderBy("at")
        doubt |= fn.col("id").isNotNull() & fn.coalesce(fn.max("front").over(by_id) > 0, fn.expr("false"))
        if log.feeds:
            # Of several feeds one may have been far ahead of stream time: nothing bounds what was purged.
            doubt |= fn.col("task").isin(*unknown)
    return rows.withColumn("doubtful", doubt).drop("beyond", "front", "was_late")


def _not_filed_late(rows: DataFrame, filed_late: DataFrame | None) -> tuple[DataFrame, Column]:
    """Return the rows, and whether one was not in the late topic: a late one does not say how far stream time was."""
    if filed_late is None:
        return rows, fn.expr("true")
    late = filed_late.where("NOT strange").select(*(fn.col(f"source_{name}").alias(name) for name in PLACE)).distinct()
    joined = rows.join(late.withColumn("was_late", fn.expr("true")), list(PLACE), "left")
    return joined, fn.col("was_late").isNull()
