"""Computes the records that the topics must contain, with verdicts and digests for the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.spark.audit_cut import by_key
from dedup.spark.batch_verdicts import judged
from dedup.spark.changelog_frames import OUTSIDE_KAFKA
from dedup.spark.columns import identified
from dedup.spark.rows import COORDINATES, HEADERS
from dedup.topology.model import LateForward, LateTo
from dedup.verify.evidence import (
    DEAD_TAIL,
    DIGEST_HEADER,
    FIRST_SOURCE_HEADER,
    FIRST_TIME_HEADER,
    LATE_TAIL,
    REASON_HEADER,
    REPLAYED_HEADER,
    SOURCE_HEADER,
    TIMESTAMP_HEADER,
    VERDICT_HEADER,
)
from dedup.verify.replay import FUTURE, REFUSED_BY_THE_BROKER

if TYPE_CHECKING:
    from pyspark.sql import Column

    from dedup.spark.audit_cut import AuditCut, AuditedLog

_TAILS: Final = {"late": LATE_TAIL, "dead_letter": DEAD_TAIL}
"""Maps each verdict whose records have a topic of their own to the headers that a worker appends to these records."""
_NO_CEILING_MS: Final = 1 << 48
"""The ceiling with which no future time is refused, because only the dead-letter topic shows which times a worker
refused.
"""
_MOST_BROADCAST: Final = 100_000
_PATH: Final = r"^(.*)/(\d+)/(\d+)$"
_DIGITS: Final = 32
"""Number of hexadecimal digits of SHA-256 that are used, for 128 bits as in `dedup verify`."""


def path() -> Column:
    """Return a column with ``topic/partition/offset``, in the form that a worker writes to headers."""
    return fn.concat_ws("/", *(fn.col(name).cast("string") for name in COORDINATES))


def digest(headers: Column, timestamp_ms: Column) -> Column:
    """Return a digest of key, value, headers, and timestamp, which covers the lengths of key and value (-1 for null).

    The digest is SHA-256 rather than a fast checksum, because somebody could construct a collision to hide a change.
    """
    sizes = (fn.coalesce(fn.length(name), fn.lit(-1)).cast("string") for name in ("key", "value"))
    head = fn.concat_ws(" ", timestamp_ms.cast("string"), *sizes, fn.to_json(headers)).cast("binary")
    content = (fn.coalesce(fn.col(name), fn.lit(b"")) for name in ("key", "value"))
    return fn.unhex(fn.substring(fn.sha2(fn.concat(head, *content), 256), 1, _DIGITS))


def _with_header(headers: Column, name: str, value: Column) -> Column:
    added = fn.array(fn.struct(fn.lit(name).alias("key"), value.cast("binary").alias("value"))).cast(HEADERS)
    return fn.concat(headers, added)


def _last_header(name: str) -> Column:
    """Return the value of the last header with this name as text; null if there is none."""
    named = fn.filter("headers", lambda each: each["key"] == name)
    return fn.try_element_at(named, fn.lit(-1))["value"].cast("string")


def _filed(records: DataFrame, topics: Sequence[str], side: str) -> DataFrame:
    """Return the records of a side topic with the source record they name, their reason, and a digest of the original.

    If a side record names no record of the source topics, its `topic` is null, and its `source` is its own place.
    `stand_in` is the digest that replaces the value, if the value was replaced.
    """
    replaced, named = _last_header(DIGEST_HEADER), _last_header(SOURCE_HEADER)
    own = fn.size("headers") - len(_TAILS[side]) - replaced.isNotNull().cast("int")
    original = fn.slice("headers", 1, fn.greatest(own, fn.lit(0)))
    timestamp = fn.coalesce(_last_header(TIMESTAMP_HEADER).cast("long"), fn.lit(-(1 << 62)))
    topic, *place = (fn.regexp_extract(named, _PATH, group) for group in (1, 2, 3))
    found = records.select(
        fn.lit(side).alias("side"),
        fn.when(topic.isin(*topics), topic).alias("topic"),
        place[0].try_cast("int").alias("partition"),
        place[1].try_cast("long").alias("offset"),
        fn.coalesce(_last_header(REASON_HEADER), fn.lit("")).alias("reason"),
        digest(original, timestamp).alias("digest"),
        replaced.alias("stand_in"),
        path().alias("place"),
    )
    return found.withColumn("source", fn.when(fn.col("topic").isNull(), fn.col("place")).otherwise(path()))


@dataclass(frozen=True, slots=True)
class Sides:
    """The records in the late and dead-letter topics, by the source record that each of them names."""

    topics: Mapping[str, str]
    """Maps a verdict to its topic."""
    records: DataFrame
    """One row for each `source`: how often it is in each topic (such as `times_late`), and the first record there as a
    struct (such as `late`).
    """
    with_stand_ins: tuple[str, ...]
    """Verdicts in whose topics a digest stands for a value."""
    refused: DataFrame
    """`source` and `reason` of the dead letters that only the broker or a worker's clock explains."""
    refused_number: int


def sides_of(cut: AuditCut) -> Sides:
    """Return the records of the side topics; `Sides.records` is persisted, and the caller must unpersist it."""
    topology = cut.topology
    topics = {"late": topology.late.topic} if isinstance(topology.late, LateTo) else {}
    topics |= {"dead_letter": topology.dead_letter}
    every = (_filed(cut.read(name), topology.source.topics, verdict) for verdict, name in topics.items())
    first, is_it = fn.struct("place", "reason", "digest", "stand_in"), {each: fn.col("side") == each for each in _TAILS}
    records = (
        reduce(DataFrame.unionByName, every)
        .groupBy("source", *COORDINATES)
        .agg(
            *(fn.count_if(where).alias(f"times_{verdict}") for verdict, where in is_it.items()),
            *(fn.min(fn.when(where, first)).alias(verdict) for verdict, where in is_it.items()),
        )
        .persist()
    )
    reasons = [REFUSED_BY_THE_BROKER, *([FUTURE] if topology.future is OnFuture.DEAD_LETTER else [])]
    refused = fn.col("topic").isNotNull() & fn.col("dead_letter.reason").isin(*reasons)
    stand_ins = (fn.count(f"{verdict}.stand_in").alias(verdict) for verdict in topics)
    (facts,) = records.agg(fn.count_if(refused).alias("refused"), *stand_ins).collect()
    number = facts["refused"] if topology.direct else 0
    standing = tuple(verdict for verdict in topics if facts[verdict])
    return Sides(topics, records, standing, records.where(refused).select("source", "dead_letter.reason"), number)


def forwarded_by_replay(topics: Sequence[str]) -> Column:
    """Return whether the last two headers say that `dedup replay --late --forward` wrote a record to the output."""
    last, before = (fn.try_element_at(fn.col("headers"), fn.lit(at)) for at in (-1, -2))
    place = fn.regexp_extract(last["value"].cast("string"), _PATH, 1).isin(*topics)
    marked = (before["key"] == VERDICT_HEADER) & (before["value"].cast("string") == "late")
    return fn.coalesce(marked & (last["key"] == REPLAYED_HEADER) & place, fn.expr("false"))


def expected(cut: AuditCut, log: AuditedLog, sides: Sides) -> DataFrame:
    """Return every record of the log with its verdict, its expected digests, and its records in side topics.

    Dead letters whose cause is not in the record itself left no sighting and did not advance stream time, so they are
    not judged with the other records. The columns are `source`, `verdict`, `reason`, `time_ms`, `stream_ms`,
    `before_ms` (the stream time before the record), `task`, `at` (the offset in the log), `pending`, `history`,
    `doubtful` (another verdict is possible), `forwards`, digests of the record (`raw` as it was, `out` in the output,
    `copy` among the duplicates), and the columns of `Sides.records`. A side record that names no record of the log has
    a row whose `verdict` is null.
    """
    topology, records, contiguous = cut.topology, log.records, log.contiguous
    if sides.refused_number:
        few = sides.refused_number <= _MOST_BROADCAST
        refused = (fn.broadcast(sides.refused) if few else sides.refused).withColumnRenamed("source", "refused_source")
        is_refused = path() == fn.col("refused_source")
        contiguous = contiguous and few
        others = records.join(refused, is_refused)
        records = records.join(refused, is_refused, "left_anti")
    names = {"time_ms": "dedup_time_ms", "stream_ms": "stream_time_ms", "id": "dedup_id"}
    names |= {"task": "dedup_partition", "at": "dedup_offset"}
    rows = judged(records, topology, now_ms=_NO_CEILING_MS, order="offsets", contiguous=contiguous, feeds=log.feeds)
    ours = (fn.col(theirs).alias(name) for name, theirs in names.items())
    rows = rows.select(path().alias("source"), "verdict", "reason", *ours, *_digests(cut))
    if sides.refused_number:
        dead = {"verdict": fn.lit("dead_letter"), "task": fn.col("partition"), "at": fn.col("offset")}
        dead |= {"time_ms": fn.col("dedup_time_ms"), "forwards": fn.expr("false"), "source": path()}
        dead |= {"raw": digest(fn.col("headers"), fn.col("timestamp_ms"))}
        refused = identified(others, topology).select("reason", *(value.alias(name) for name, value in dead.items()))
        rows = rows.unionByName(refused, allowMissingColumns=True)
    rows = rows.join(sides.records, "source", "full_outer").withColumns(
        {
            "pending": fn.col("at") >= by_key(log.committed, fn.col("task")),
            "history": fn.col("at") < by_key(log.begins, fn.col("task")),
        }
    )
    return _with_doubt(cut, log, rows, unexplained=sides.refused_number > 0).drop("id")


def _digests(cut: AuditCut) -> list[Column]:
    topology, own = cut.topology, fn.col("headers")
    late = fn.when(fn.col("verdict") == "late", fn.lit("late")) if isinstance(topology.late, LateForward) else None
    exempt = fn.when(fn.col("verdict").isin("exempt", "unique"), fn.col("reason"))
    why = exempt if late is None else fn.coalesce(late, exempt)
    ahead = fn.when(why.isNotNull(), _with_header(own, VERDICT_HEADER, why)).otherwise(own)
    if topology.output is not None and topology.output.headers:
        ahead = _with_header(ahead, SOURCE_HEADER, path())
    # A seed's sighting may come from files without offsets: the audit gave it a negative offset, but the fleet writes
    # this one.
    outside = fn.when(fn.col("first_offset") < 0, fn.lit(OUTSIDE_KAFKA)).otherwise(fn.col("first_offset"))
    first = fn.concat_ws("/", "first_topic", fn.col("first_partition").cast("string"), outside.cast("string"))
    copied = _with_header(own, FIRST_TIME_HEADER, fn.col("first_time_ms").cast("string"))
    copied = _with_header(copied, FIRST_SOURCE_HEADER, first)
    stamp = fn.col("timestamp_ms") if cut.stamped else fn.lit(0)
    forwards = ("unique", "exempt") if late is None else ("unique", "exempt", "late")
    raw = digest(own, fn.col("timestamp_ms"))
    if topology.direct:
        # Only side topics are compared with this digest, except with a repartition topic, where every record is.
        raw = fn.when(fn.col("verdict").isin(*_TAILS), raw)
    return [
        fn.col("verdict").isin(*forwards).alias("forwards"),
        raw.alias("raw"),
        digest(ahead, stamp).alias("out"),
        fn.when(fn.col("verdict").isin("duplicate", "conflict"), digest(copied, fn.lit(0))).alias("copy"),
    ]


def _with_doubt(cut: AuditCut, log: AuditedLog, rows: DataFrame, *, unexplained: bool) -> DataFrame:
    """Return the rows with the columns `before_ms` (null if it is not needed) and `doubtful`.

    If the beginning of a log was deleted, any ID may have a sighting there, up to the stream time at the first record
    that was not late, plus grace. If an ID has a record before all sightings in the deleted part must have expired, the
    ID stays doubtful to the end of the log. `dedup verify` proves more records, because it treats an ID as doubtful
    only until all sightings in the deleted part must have expired.
    """
    topology, window = cut.topology, cut.topology.window
    clamped, unknown = topology.future is OnFuture.CLAMP, [task for task, known in log.known.items() if not known]
    by_log, doubt = Window.partitionBy("task").orderBy("at"), fn.expr("false")
    before = fn.lit(None).cast("long")
    if clamped or unexplained:
        before = fn.max("stream_ms").over(by_log.rowsBetween(Window.unboundedPreceding, -1))
    rows = rows.withColumn("before_ms", before)
    if clamped:
        beyond = fn.col("time_ms") > fn.col("before_ms") + topology.max_clock_skew_ms
        doubt |= fn.coalesce(fn.bool_or(beyond).over(by_log), fn.expr("false"))
    if unknown:
        # If late records are dropped or forwarded, no topic shows which records were late, so any row may have been
        # late.
        on_time = fn.coalesce("times_late", fn.lit(0)) == 0 if isinstance(topology.late, LateTo) else fn.expr("false")
        whole = by_log.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
        first_ms = fn.first(fn.when(on_time, fn.col("stream_ms")), ignorenulls=True).over(whole)
        early = fn.coalesce(fn.col("stream_ms") - window.retention_ms <= first_ms + window.grace_ms, fn.expr("true"))
        rows = rows.withColumn("front", fn.col("task").isin(*unknown) & early)
        of_id = fn.bool_or("front").over(Window.partitionBy("task", "id").orderBy("at"))
        doubt |= fn.col("id").isNotNull() & fn.coalesce(of_id, fn.expr("false"))
        if log.feeds:
            # One of several feeds may have been far ahead of stream time, so nothing limits the event times of purged
            # records.
            doubt |= fn.col("task").isin(*unknown)
    return rows.withColumn("doubtful", doubt).drop("front")
