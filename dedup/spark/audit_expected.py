"""Computes the records that the topics must contain by the rule, with verdicts and digests for the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.spark.batch_verdicts import judged
from dedup.spark.changelog_frames import OUTSIDE_KAFKA
from dedup.spark.columns import identified
from dedup.spark.rows import COORDINATES, HEADERS
from dedup.topology.model import LateForward
from dedup.verify.evidence import (
    DIGEST_HEADER,
    FIRST_SOURCE_HEADER,
    FIRST_TIME_HEADER,
    REASON_HEADER,
    REPLAYED_HEADER,
    SOURCE_HEADER,
    TIMESTAMP_HEADER,
    VERDICT_HEADER,
)
from dedup.verify.replay import REFUSED_BY_THE_BROKER

if TYPE_CHECKING:
    from pyspark.sql import Column

    from dedup.core.window import Feed
    from dedup.topology.model import Topology

_NO_CEILING_MS: Final = 1 << 48
"""The ceiling with which no future time is refused, because only the dead-letter topic shows which times a worker
refused.
"""
_PATH: Final = r"^(.*)/(\d+)/(\d+)$"
_DIGITS: Final = 32
"""Number of hexadecimal digits of SHA-256 that are used, for 128 bits as in `dedup verify`."""


def as_leaf(rows: DataFrame) -> DataFrame:
    """Persist the rows, and return them as a leaf of the plans that use them.

    An audit runs a dozen queries on the same rows. If each plan contained everything before the rows, planning would
    take longer than the queries. The RDD keeps its lineage, so the data of a lost executor is computed again.
    """
    session, plan = rows.sparkSession, rows._jdf  # noqa: SLF001  only the JVM makes a DataFrame of such an RDD
    made = session._jsparkSession.internalCreateDataFrame(  # noqa: SLF001
        plan.queryExecution().toRdd(),
        plan.schema(),
        False,  # noqa: FBT003 - no stream
    )
    return DataFrame(made, session).persist()


def headers_or_none(column: str = "headers") -> Column:
    """Return a record's headers; an empty array for null."""
    return fn.coalesce(fn.col(column), fn.array().cast(HEADERS))


def _with_header(headers: Column, name: str, value: Column) -> Column:
    """Return the headers with another header at the end."""
    added = fn.array(fn.struct(fn.lit(name).alias("key"), value.cast("binary").alias("value"))).cast(HEADERS)
    return fn.concat(headers, added)


def digest(headers: Column, timestamp_ms: Column) -> Column:
    """Return a digest of key, value, headers, and timestamp, which covers the lengths of key and value (-1 for null).

    It uses SHA-256 rather than a fast checksum, because a chosen collision would hide a change.
    """
    parts = [
        timestamp_ms.cast("string").cast("binary"),
        *(fn.concat(fn.lit(" "), _length(name)).cast("binary") for name in ("key", "value")),
        fn.lit(" ").cast("binary"),
        *(fn.coalesce(fn.col(name), fn.lit(b"")) for name in ("key", "value")),
        fn.to_json(headers).cast("binary"),
    ]
    return fn.unhex(fn.substring(fn.sha2(fn.concat(*parts), 256), 1, _DIGITS))


def _length(name: str) -> Column:
    return fn.coalesce(fn.length(fn.col(name)), fn.lit(-1)).cast("string")


def _last_header(name: str, headers: Column | None = None) -> Column:
    """Return the value of the last header with this name as text; null if there is none."""
    own = headers_or_none() if headers is None else headers
    named = fn.filter(own, lambda each: each["key"] == name)
    return fn.try_element_at(named, fn.lit(-1))["value"].cast("string")


def _source_columns(text: Column) -> list[Column]:
    """Return the topic, partition, and offset in a string such as ``orders/0/12``; nulls for any other string."""
    kinds = [("string", "source_topic"), ("int", "source_partition"), ("long", "source_offset")]
    return [
        fn.nullif(fn.regexp_extract(text, _PATH, group + 1), fn.lit("")).cast(kind).alias(name)
        for group, (kind, name) in enumerate(kinds)
    ]


def filed(records: DataFrame, topics: Sequence[str], tail: Sequence[str]) -> DataFrame:
    """Return the records of a side topic with their source record, their reason, and a digest of the original.

    ``unknown_source`` says that a record names no record of the source topics. ``stand_in`` is the digest that replaces
    the value.
    """
    headers = headers_or_none()
    replaced = _last_header(DIGEST_HEADER)
    kept = fn.when(replaced.isNotNull(), fn.slice(headers, 1, fn.size(headers) - 1)).otherwise(headers)
    original = fn.when(fn.size(kept) > len(tail), fn.slice(kept, 1, fn.size(kept) - len(tail))).otherwise(
        fn.array().cast(HEADERS)
    )
    timestamp = fn.coalesce(_last_header(TIMESTAMP_HEADER).cast("long"), fn.lit(-(1 << 62)))
    found = records.select(
        *_source_columns(_last_header(SOURCE_HEADER)),
        fn.coalesce(_last_header(REASON_HEADER), fn.lit("")).alias("filed_reason"),
        digest(original, timestamp).alias("filed_digest"),
        replaced.alias("stand_in"),
        fn.concat_ws("/", "topic", "partition").alias("filed_in"),
        fn.col("offset").alias("filed_at"),
    )
    known = fn.coalesce(fn.col("source_topic").isin(*topics), fn.expr("false"))
    return found.withColumn("unknown_source", ~known)


def forwarded_by_replay(topics: Sequence[str]) -> Column:
    """Whether `dedup replay --late --forward` wrote a record to the output, according to its last two headers."""
    headers = headers_or_none()
    last, before = fn.try_element_at(headers, fn.lit(-1)), fn.try_element_at(headers, fn.lit(-2))
    place = fn.regexp_extract(last["value"].cast("string"), _PATH, 1).isin(*topics)
    marked = (before["key"] == VERDICT_HEADER) & (before["value"].cast("string") == "late")
    return fn.coalesce(marked & (last["key"] == REPLAYED_HEADER) & place, fn.expr("false"))


@dataclass(frozen=True, slots=True)
class AuditedLog:
    """The records to judge, and what is known about the time before them."""

    records: DataFrame
    """`rows.RECORDS`, including the history before the log."""
    feeds: tuple[Feed, ...]
    """The feeds of the repartition topic; otherwise empty."""
    committed: Mapping[int, int]
    """Maps each log partition to the group's offset; records from there on may or may not be judged."""
    begins: Mapping[int, int]
    """Maps each log partition to where the fleet began; a seed judged earlier records and forwarded nothing."""
    known: Mapping[int, bool]
    """Maps each log partition to whether nothing is missing before its first record."""
    stamped: bool
    """Whether the output keeps the source's timestamps."""


def expected(
    log: AuditedLog, topology: Topology, filed_dead: DataFrame, filed_late: DataFrame | None, *, unexplained: bool
) -> DataFrame:
    """Return every record of the log with its verdict and its expected form in each topic.

    ``unexplained`` says that there are dead letters that the record itself does not explain. Columns: `COORDINATES`,
    `verdict`, `reason`, `time_ms`, `stream_ms`, `id`, `task`, `at` (the log's offset), `pending`, `history`,
    `doubtful`, `forwards`, and digests of the record: `raw` as it was, `out` in the output, `copy` among the
    duplicates.
    """
    explained, others = log.records, None
    if unexplained and not log.feeds:
        explained, others = _split_unexplained(log.records, topology, filed_dead)
    rows = judged(explained, topology, now_ms=_NO_CEILING_MS, order="offsets", feeds=log.feeds)
    rows = rows.select(
        *COORDINATES,
        "verdict",
        "reason",
        fn.col("dedup_time_ms").alias("time_ms"),
        fn.col("stream_time_ms").alias("stream_ms"),
        fn.col("dedup_id").alias("id"),
        fn.col("dedup_partition").alias("task"),
        fn.col("dedup_offset").alias("at"),
        *_digests(topology, stamped=log.stamped),
    )
    if others is not None:
        rows = rows.unionByName(_unexplained_rows(identified(others, topology)))
    rows = rows.withColumns(
        {
            "pending": fn.col("at") >= by_task(log.committed, "task", 0),
            "history": fn.col("at") < by_task(log.begins, "task", 0),
        }
    )
    return _with_doubt(rows, log, topology, filed_late)


def by_task(values: Mapping[int, int], column: str, otherwise: int) -> Column:
    """Return the value for the task or partition in a column; ``otherwise`` if it has no value."""
    if not values:
        return fn.lit(otherwise)
    mapped = fn.create_map(*(fn.lit(each) for pair in sorted(values.items()) for each in pair))
    return fn.coalesce(mapped[fn.col(column)], fn.lit(otherwise))


def _split_unexplained(records: DataFrame, topology: Topology, filed_dead: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Return the records to judge and, according to the dead-letter topic, those that a broker or a clock refused.

    The refused records left no sighting and did not advance stream time, so they are not judged with the others.
    """
    reasons = [REFUSED_BY_THE_BROKER, *(["future_time"] if topology.future is OnFuture.DEAD_LETTER else [])]
    refused = filed_dead.where(fn.col("filed_reason").isin(*reasons)).select(
        fn.col("source_topic").alias("topic"),
        fn.col("source_partition").alias("partition"),
        fn.col("source_offset").alias("offset"),
        fn.col("filed_reason").alias("reason"),
    )
    refused = refused.dropDuplicates(list(COORDINATES))
    explained = records.join(refused, list(COORDINATES), "left_anti").select(*records.columns)
    return explained, records.join(refused, list(COORDINATES))


def _unexplained_rows(records: DataFrame) -> DataFrame:
    raw = digest(headers_or_none(), fn.col("timestamp_ms"))
    none = fn.lit(None)
    return records.select(
        *COORDINATES,
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
    ahead = fn.when(why.isNotNull(), _with_header(own, VERDICT_HEADER, why)).otherwise(own)
    if topology.output is not None and topology.output.headers:
        ahead = _with_header(ahead, SOURCE_HEADER, place)
    # A seed's sighting from files without offsets: `before_the_log` gave it a negative one, the fleet writes this one.
    outside = fn.when(fn.col("first_offset") < 0, fn.lit(OUTSIDE_KAFKA)).otherwise(fn.col("first_offset"))
    first = fn.concat_ws("/", "first_topic", fn.col("first_partition").cast("string"), outside.cast("string"))
    copied = _with_header(own, FIRST_TIME_HEADER, fn.col("first_time_ms").cast("string"))
    copied = _with_header(copied, FIRST_SOURCE_HEADER, first)
    stamp = fn.col("timestamp_ms") if stamped else fn.lit(0)
    forwards = ("unique", "exempt") if late is None else ("unique", "exempt", "late")
    return [
        fn.col("verdict").isin(*forwards).alias("forwards"),
        digest(own, fn.col("timestamp_ms")).alias("raw"),
        digest(ahead, stamp).alias("out"),
        fn.when(fn.col("verdict").isin("duplicate", "conflict"), digest(copied, fn.lit(0))).alias("copy"),
    ]


def _with_doubt(rows: DataFrame, log: AuditedLog, topology: Topology, filed_late: DataFrame | None) -> DataFrame:
    """Return the rows with `doubtful`. It says that the log's missing beginning makes another verdict possible.

    If the beginning of a log was deleted, there may have been any sighting before it, up to the first record that was
    not late plus grace. An ID in that range stays doubtful to the end. `dedup verify` claims more, because it follows
    the ID until that sighting must have expired.
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
            # One of several feeds may have been far ahead of stream time: nothing bounds what was purged.
            doubt |= fn.col("task").isin(*unknown)
    return rows.withColumn("doubtful", doubt).drop("beyond", "front", "was_late")


def _not_filed_late(rows: DataFrame, filed_late: DataFrame | None) -> tuple[DataFrame, Column]:
    """Return the rows, with whether a row is known not to be late. A late one does not show how far stream time was.

    If late records are dropped or forwarded, no topic shows which records were late, so any row may have been late.
    """
    if filed_late is None:
        return rows, fn.expr("false")
    late = (
        filed_late.where("NOT unknown_source")
        .select(*(fn.col(f"source_{name}").alias(name) for name in COORDINATES))
        .distinct()
    )
    joined = rows.join(late.withColumn("was_late", fn.expr("true")), list(COORDINATES), "left")
    return joined, fn.col("was_late").isNull()
