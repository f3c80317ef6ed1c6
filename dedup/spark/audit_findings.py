"""The differences between what the rule expects and what the topics hold, as rows with kind, place, text, and number.

A kind in `verify.report.MEANINGS` is a violation; `not_provable` is a record about which the audit claims nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.spark.rows import COORDINATES
from dedup.verify.findings import WHY_OUTPUT_GONE, WHY_SOURCE_GONE
from dedup.verify.replay import REFUSED_BY_THE_BROKER, WHY_CLOCK, WHY_FRONT, WHY_REFUSED, WHY_SIDE_GONE
from dedup.verify.spill import stand_in

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dedup.topology.model import Topology

NOT_PROVABLE: Final = "not_provable"
_SOURCE: Final = ("source_topic", "source_partition", "source_offset")
_OUT: Final = ("out_topic", "out_partition", "out_offset")


@dataclass(frozen=True, slots=True)
class Side:
    """A late or dead-letter topic."""

    name: str
    filed: DataFrame
    """Records of the topic, as returned by `audit_expected.filed`."""
    complete: bool
    """Whether nothing was deleted from its beginning, so that a missing record was never there."""


def _place_of(*columns: str) -> Column:
    """Return ``topic/partition offset n``."""
    topic, partition, offset = (fn.col(name).cast("string") for name in columns)
    return fn.concat(topic, fn.lit("/"), partition, fn.lit(" offset "), offset)


def _filed_place() -> Column:
    return fn.concat("filed_in", fn.lit(" offset "), fn.col("filed_at").cast("string"))


@dataclass(frozen=True, slots=True)
class _Claim:
    """The finding for the rows for which ``where`` is true."""

    where: Column
    kind: Column | str
    place: Column
    text: Column | str
    number: Column | int = 1

    def finding(self) -> Column:
        """Return the finding as a struct of the four columns; null if nothing is wrong."""
        return fn.when(
            self.where,
            fn.struct(
                _literal(self.kind).alias("kind"),
                self.place.alias("place"),
                _literal(self.text).alias("text"),
                _literal(self.number).cast("long").alias("number"),
            ),
        )


def _literal(value: Column | str | int) -> Column:
    return fn.lit(value) if isinstance(value, (str, int)) else value


def _same_source() -> list[Column]:
    return [fn.col(mine) == fn.col(theirs) for mine, theirs in zip(COORDINATES, _SOURCE, strict=True)]


def _found(rows: DataFrame, *claims: _Claim) -> DataFrame:
    """Return the findings of all claims in one pass over the rows; a pass for each claim would repeat the joins."""
    return rows.select(fn.inline(fn.array_compact(fn.array(*(claim.finding() for claim in claims)))))


def side_findings(rows: DataFrame, side: Side, verdict: str, wrong: str) -> list[DataFrame]:
    """Return unexpected and missing records of a side topic. ``rows`` are those of `audit_expected.expected`."""
    by_source = side.filed.where("NOT unknown_source").groupBy(*_SOURCE)
    once = by_source.agg(
        fn.count(fn.lit(1)).alias("times"),
        *(fn.min_by(name, "filed_at").alias(name) for name in ("filed_reason", "filed_digest", "stand_in")),
        fn.min_by(_filed_place(), "filed_at").alias("filed_place"),
    )
    named = _place_of(*_SOURCE)
    again = fn.concat(fn.lit("source record "), named, fn.lit(" occurs more than once"))
    repeated = _Claim(fn.col("times") > 1, "duplicated", fn.col("filed_place"), again, fn.col("times") - 1)
    joined = rows.where("NOT history").join(once, _same_source(), "full_outer")
    return [_found(once, repeated), _found(joined, *_filed_claims(side, verdict, wrong))]


def _filed_claims(side: Side, verdict: str, wrong: str) -> list[_Claim]:
    settled = fn.expr("verdict IS NOT NULL AND NOT pending AND NOT doubtful")
    here, there = _place_of(*COORDINATES), fn.col("filed_place")
    is_it = fn.col("verdict") == verdict
    absent = settled & is_it & fn.col("times").isNull()
    lost = _Claim(absent, "lost", here, f"{verdict.replace('_', ' ')}, but not in {side.name}")
    if not side.complete:
        lost = _Claim(absent, NOT_PROVABLE, here, WHY_SIDE_GONE)
    present = settled & fn.col("times").isNotNull()
    says = fn.concat(fn.lit("it is in "), there, fn.lit("; by the rule it is "), fn.col("verdict"))
    other_record = fn.col("stand_in").isNull() & (fn.col("filed_digest") != fn.col("raw"))
    differs = fn.concat(there, fn.lit(" has another key, value, header or original timestamp"))
    claims = [
        lost,
        _Claim(present & ~is_it, wrong, here, says),
        _Claim(present & is_it & other_record, "changed", here, differs),
    ]
    if verdict == "dead_letter":
        other = ~fn.col("filed_reason").isin(REFUSED_BY_THE_BROKER) & (fn.col("filed_reason") != fn.col("reason"))
        named = fn.concat(there, fn.lit(' says "'), fn.col("filed_reason"), fn.lit('"; the record says "'), "reason")
        claims.append(_Claim(present & is_it & other, "wrong_dead_letter", here, fn.concat(named, fn.lit('"'))))
    return claims


def stand_in_findings(records: DataFrame, side: Side) -> DataFrame:
    """Return the source records whose value does not match the digest that replaces it in a side topic."""
    standing = side.filed.where("NOT unknown_source AND stand_in IS NOT NULL")
    words = fn.udf(lambda value: stand_in(value).decode(), "string")
    other = words(fn.col("value")) != fn.col("stand_in")
    text = f"its value does not have the digest that is in {side.name}"
    # Evaluated before the claim, in which Spark allows no Python function.
    return _found(
        records.join(standing, _same_source()).withColumn("other", other),
        _Claim(fn.col("other"), "changed", _place_of(*COORDINATES), text),
    )


def unaccounted_findings(
    rows: DataFrame, side: Side, kept: DataFrame, committed: DataFrame, *, why: str | None = None
) -> DataFrame:
    """Return records of a side topic that name no source record, or one that is not in the log.

    ``kept`` contains the offset at which each source partition begins now, and ``committed`` the group's offset.
    ``why`` is the reason not to count such records as phantoms.
    """
    left = side.filed.join(rows.select(*COORDINATES), [~fn.col("unknown_source"), *_same_source()], "left_anti")
    partition = ["source_topic", "source_partition"]
    left = left.join(kept, partition, "left").join(committed, partition, "left")
    judged = ~fn.col("unknown_source") & (fn.col("source_offset") < fn.coalesce("committed", fn.lit(0)))
    gone = fn.col("source_offset") < fn.coalesce("low", fn.lit(0))
    names = fn.concat(fn.lit("names "), _place_of(*_SOURCE), fn.lit(", which is no record of the source"))
    kind = fn.when(gone, fn.lit(NOT_PROVABLE)).otherwise("phantom" if why is None else NOT_PROVABLE)
    deleted = f"the source records that {side.name} names are deleted"
    text = fn.when(gone, fn.lit(deleted)).otherwise(names if why is None else fn.lit(why))
    nothing = "names no record of the source topics in its headers"
    return _found(
        left,
        _Claim(fn.col("unknown_source"), "phantom", _filed_place(), nothing),
        _Claim(judged, kind, _filed_place(), text),
    )


def evidence_findings(rows: DataFrame, topology: Topology, *, wanted: bool) -> list[DataFrame]:
    """Return dead letters that the record itself does not explain, because a broker or a worker's clock refused it."""
    if not wanted:
        return []
    before = Window.partitionBy("task").orderBy("at").rowsBetween(Window.unboundedPreceding, -1)
    seen = rows.withColumn("before_ms", fn.coalesce(fn.max("stream_ms").over(before), fn.lit(-(1 << 62))))
    dead = seen.where("verdict = 'dead_letter' AND NOT pending AND NOT history")
    here = _place_of(*COORDINATES)
    refused = _Claim(fn.col("reason") == REFUSED_BY_THE_BROKER, NOT_PROVABLE, here, WHY_REFUSED)
    if topology.future is not OnFuture.DEAD_LETTER:
        return [_found(dead, refused)]
    clock = fn.col("reason") == "future_time"
    reached = fn.col("time_ms") <= fn.col("before_ms")
    skew = fn.lit(topology.max_clock_skew_ms)
    near = fn.col("time_ms") <= fn.col("before_ms") + skew
    text = "a dead letter for a future time, which stream time had reached: the rule judges it"
    wrong = _Claim(clock & reached, "wrong_dead_letter", here, text)
    return [_found(dead, refused, wrong, _Claim(clock & ~reached & near, NOT_PROVABLE, here, WHY_CLOCK))]


def output_findings(
    rows: DataFrame, output: DataFrame, filed: Sequence[Side], *, complete: bool, sources_whole: bool, doubt: bool
) -> list[DataFrame]:
    """Return records that are missing in the output, repeated, unexpected, or out of order.

    A digest is looked for among the ``output`` rows with the same `scope`; these have `scope`, `out`, and the columns
    `out_topic`, `out_partition`, `out_offset`.
    """
    live = rows.where("NOT history AND out IS NOT NULL")
    for side in filed:
        # A record in a side topic by mistake is reported there; it is not also expected in the output.
        held = side.filed.where("NOT unknown_source").select(*_SOURCE).distinct().withColumn("held", fn.expr("true"))
        live = live.join(held, _same_source(), "left").drop(*_SOURCE)
        live = live.withColumn("forwards", fn.col("forwards") & fn.col("held").isNull()).drop("held")
    sure = fn.col("forwards") & ~fn.col("pending") & ~fn.col("doubtful")
    may = (fn.col("pending") | fn.col("doubtful")) & (fn.col("verdict") != "dead_letter")
    original = fn.col("verdict").isin("unique", "duplicate", "conflict")
    wanted = live.groupBy("scope", "out").agg(
        fn.count_if(sure).alias("sure"),
        fn.count_if(may).alias("may"),
        fn.count_if(original).alias("originals"),
        fn.min(fn.when(sure, _place_of(*COORDINATES))).alias("place"),
        fn.min(fn.when(fn.col("verdict") == "late", _place_of(*COORDINATES))).alias("late_place"),
        *(fn.max(fn.when(sure, fn.col(name))).alias(name) for name in ("task", "at")),
    )
    there = output.groupBy("scope", "out").agg(
        fn.count(fn.lit(1)).alias("times"),
        fn.min(_place_of(*_OUT)).alias("out_place"),
        *(fn.max(name).alias(name) for name in _OUT),
    )
    both = wanted.join(there, ["scope", "out"], "full_outer")
    findings = [_found(both, *_output_claims(complete=complete, sources_whole=sources_whole)), _order_findings(both)]
    if doubt:
        unknown = _Claim(fn.expr("doubtful AND NOT pending"), NOT_PROVABLE, _place_of(*COORDINATES), WHY_FRONT)
        findings.append(_found(live, unknown))
    return findings


def _output_claims(*, complete: bool, sources_whole: bool) -> list[_Claim]:
    number = {name: fn.coalesce(name, fn.lit(0)) for name in ("sure", "may", "originals", "times")}
    missing, extra = number["sure"] - number["times"], number["times"] - number["sure"] - number["may"]
    kind, why = ("lost", "unique, but not in the output") if complete else (NOT_PROVABLE, WHY_OUTPUT_GONE)
    late = fn.concat(fn.lit("the rule calls its source record "), fn.col("late_place"), fn.lit(" late"))
    text = fn.coalesce(late, fn.lit("it is not a record of the source, or was changed"))
    unexpected = "phantom" if sources_whole else NOT_PROVABLE
    text = text if sources_whole else fn.lit(f"{WHY_SOURCE_GONE} the output")
    doubled, at = "more often in the output than the rule allows", fn.col("out_place")
    return [
        _Claim(missing > 0, kind, fn.col("place"), why, missing),
        _Claim((extra > 0) & (number["originals"] > 0), "duplicated", at, doubled, extra),
        _Claim((extra > 0) & (number["originals"] == 0), unexpected, at, text, extra),
    ]


def _order_findings(both: DataFrame) -> DataFrame:
    """Return records that overtook another record of their task; only records that occur once are compared."""
    by_place = Window.partitionBy("task", "out_partition").orderBy("out_offset")
    placed = both.where("sure = 1 AND times = 1").withColumn("before", fn.lag("at").over(by_place))
    text = "it comes after a record that is later in the log of its task"
    return _found(placed, _Claim(fn.col("before") > fn.col("at"), "reordered", _place_of(*_OUT), text))


def copy_findings(rows: DataFrame, copies: DataFrame, topic: str, *, complete: bool, whole: bool) -> DataFrame:
    """Return differences in the duplicates or conflicts topic; ``copies`` has `scope`, `copy`, and record places."""
    live = rows.where("NOT history")
    sure = ~fn.col("pending") & ~fn.col("doubtful")
    wanted = live.groupBy("scope", "copy").agg(
        fn.count_if(sure).alias("sure"), fn.count_if(~sure).alias("may"), fn.min(_place_of(*COORDINATES)).alias("place")
    )
    there = copies.groupBy("scope", "copy").agg(
        fn.count(fn.lit(1)).alias("times"), fn.min(_place_of(*_OUT)).alias("at")
    )
    both = wanted.join(there, ["scope", "copy"], "full_outer")
    number = {name: fn.coalesce(name, fn.lit(0)) for name in ("sure", "may", "times")}
    missing, extra = number["sure"] - number["times"], number["times"] - number["sure"] - number["may"]
    if not complete:
        return _found(
            both, _Claim(missing > 0, NOT_PROVABLE, fn.col("place"), f"{topic} has lost its beginning", missing)
        )
    text = "not the record that the rule expects here" if whole else f"{WHY_SOURCE_GONE} {topic}"
    kind = "wrong_duplicate" if whole else NOT_PROVABLE
    return _found(
        both,
        _Claim(missing > 0, "wrong_duplicate", fn.col("place"), f"not in {topic}, or changed there", missing),
        _Claim(extra > 0, kind, fn.col("at"), text, extra),
    )


def repartition_findings(source: DataFrame, log: DataFrame, *, purged: bool, dead: DataFrame) -> DataFrame:
    """Return source records that are not in the repartition topic exactly once and unchanged.

    Both inputs have `COORDINATES` and `raw`. Records that were purged there, or are dead letters of the repartition
    step, are not provable.
    """
    position = [fn.col(f"source_{name}").alias(name) for name in COORDINATES]
    dead_letters = (
        dead.where("NOT unknown_source").select(*position).distinct().withColumn("dead_letter", fn.expr("true"))
    )
    carried = log.groupBy(*COORDINATES).agg(fn.count(fn.lit(1)).alias("times"), fn.min("raw").alias("carried"))
    joined = source.join(carried, list(COORDINATES), "left").join(dead_letters, list(COORDINATES), "left")
    here = _place_of(*COORDINATES)
    missing = fn.expr("times IS NULL AND dead_letter IS NULL")
    lost = _Claim(missing, "lost", here, "not in the repartition topic")
    if purged:
        lost = _Claim(missing, NOT_PROVABLE, here, "purged from the repartition topic")
    by_step = fn.expr("times IS NULL AND dead_letter")
    changed = fn.expr("times = 1 AND carried <> raw")
    return _found(
        joined,
        _Claim(by_step, NOT_PROVABLE, here, "dead letters of the repartition step"),
        lost,
        _Claim(fn.col("times") > 1, "duplicated", here, "in the repartition topic more than once"),
        _Claim(changed, "changed", here, "changed in the repartition topic"),
    )
