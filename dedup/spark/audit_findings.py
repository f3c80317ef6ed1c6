"""What differs between what the rule expects and what the topics hold, as rows: kind, place, text, number.

A kind of `proof.report.MEANINGS` is a violation; `not_provable` is a record about which nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.proof.direct import WHY_OUTPUT_GONE, WHY_SOURCE_GONE
from dedup.proof.evidence import stand_in
from dedup.proof.replay import REFUSED_BY_THE_BROKER, WHY_CLOCK, WHY_FRONT, WHY_REFUSED, WHY_SIDE_GONE
from dedup.spark.audit_expected import PLACE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dedup.topology.model import Topology

NOT_PROVABLE: Final = "not_provable"
FOUND: Final = ("kind", "place", "text", "number")
_POSITION: Final = ("source_topic", "source_partition", "source_offset")


@dataclass(frozen=True, slots=True)
class Side:
    """A late or dead-letter topic."""

    name: str
    filed: DataFrame
    """As `audit_records.filed` returns it."""
    complete: bool
    """Its beginning is still there: then absence says something."""


_OUT: Final = ("out_topic", "out_partition", "out_offset")


def place_of(*columns: str) -> Column:
    """Return ``topic/partition offset n``, for people."""
    topic, partition, offset = (fn.col(name).cast("string") for name in columns)
    return fn.concat(topic, fn.lit("/"), partition, fn.lit(" offset "), offset)


def _filed_place() -> Column:
    return fn.concat("filed_in", fn.lit(" offset "), fn.col("filed_at").cast("string"))


@dataclass(frozen=True, slots=True)
class Claim:
    """What is wrong with those of some rows for which ``where`` is true."""

    where: Column
    kind: Column | str
    place: Column
    text: Column | str
    number: Column | int = 1

    def finding(self) -> Column:
        """Return the finding as a struct of `FOUND`; null where nothing is wrong."""
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


def found(rows: DataFrame, *claims: Claim) -> DataFrame:
    """Return the findings of all claims, `FOUND`, in one pass over the rows.

    A pass for each would go through the same join a dozen times.
    """
    return rows.select(fn.inline(fn.array_compact(fn.array(*(claim.finding() for claim in claims)))))


def side_findings(rows: DataFrame, side: Side, verdict: str, wrong: str) -> list[DataFrame]:
    """Return what a side topic holds that it should not, and lacks that it should hold.

    ``rows`` are `audit_expected.expected` with the records' values in `value` where a digest may stand for them.
    """
    by_source = side.filed.where("NOT strange").groupBy(*_POSITION)
    once = by_source.agg(
        fn.count(fn.lit(1)).alias("times"),
        *(fn.min_by(name, "filed_at").alias(name) for name in ("filed_reason", "filed_digest", "stand_in")),
        fn.min_by(_filed_place(), "filed_at").alias("filed_place"),
    )
    named = place_of(*_POSITION)
    again = fn.concat(fn.lit("source record "), named, fn.lit(" is there more than once"))
    repeated = Claim(fn.col("times") > 1, "duplicated", fn.col("filed_place"), again, fn.col("times") - 1)
    matched = [fn.col(mine) == fn.col(theirs) for mine, theirs in zip(PLACE, _POSITION, strict=True)]
    joined = rows.where("NOT history").join(once, matched, "full_outer")
    return [found(once, repeated), found(joined, *_filed_claims(side, verdict, wrong))]


def _filed_claims(side: Side, verdict: str, wrong: str) -> list[Claim]:
    settled = fn.expr("verdict IS NOT NULL AND NOT pending AND NOT doubtful")
    here, there = place_of(*PLACE), fn.col("filed_place")
    is_it = fn.col("verdict") == verdict
    absent = settled & is_it & fn.col("times").isNull()
    lost = Claim(absent, "lost", here, f"{verdict.replace('_', ' ')}, but not in {side.name}")
    if not side.complete:
        lost = Claim(absent, NOT_PROVABLE, here, WHY_SIDE_GONE)
    present = settled & fn.col("times").isNotNull()
    says = fn.concat(fn.lit("it is in "), there, fn.lit("; by the rule it is "), fn.col("verdict"))
    other_record = fn.col("stand_in").isNull() & (fn.col("filed_digest") != fn.col("raw"))
    differs = fn.concat(there, fn.lit(" has another key, value, header or original timestamp"))
    claims = [
        lost,
        Claim(present & ~is_it, wrong, here, says),
        Claim(present & is_it & other_record, "changed", here, differs),
    ]
    if verdict == "dead_letter":
        other = ~fn.col("filed_reason").isin(REFUSED_BY_THE_BROKER) & (fn.col("filed_reason") != fn.col("reason"))
        named = fn.concat(there, fn.lit(' says "'), fn.col("filed_reason"), fn.lit('"; the record says "'), "reason")
        claims.append(Claim(present & is_it & other, "wrong_dead_letter", here, fn.concat(named, fn.lit('"'))))
    return claims


def stand_in_findings(records: DataFrame, side: Side) -> DataFrame:
    """Return the records of a side topic whose digest stands for another value than the source record's."""
    standing = side.filed.where("NOT strange AND stand_in IS NOT NULL")
    matched = [fn.col(mine) == fn.col(theirs) for mine, theirs in zip(PLACE, _POSITION, strict=True)]
    words = fn.udf(lambda value: stand_in(value).decode(), "string")
    other = words(fn.col("value")) != fn.col("stand_in")
    text = f"its value is not the one whose digest stands in {side.name}"
    # Before the claim: a function in Python can not stand inside of it.
    return found(
        records.join(standing, matched).withColumn("other", other),
        Claim(fn.col("other"), "changed", place_of(*PLACE), text),
    )


def unaccounted_findings(
    rows: DataFrame, side: Side, kept: DataFrame, committed: DataFrame, *, why: str | None = None
) -> DataFrame:
    """Return records of a side topic that name no source record, or one that the log does not have.

    ``kept`` has the offset at which each source partition begins now, ``committed`` where the group is.
    """
    matched = [fn.col(theirs) == fn.col(mine) for mine, theirs in zip(PLACE, _POSITION, strict=True)]
    left = side.filed.join(rows.select(*PLACE), [~fn.col("strange"), *matched], "left_anti")
    partition = ["source_topic", "source_partition"]
    left = left.join(kept, partition, "left").join(committed, partition, "left")
    judged = ~fn.col("strange") & (fn.col("source_offset") < fn.coalesce("committed", fn.lit(0)))
    gone = fn.col("source_offset") < fn.coalesce("low", fn.lit(0))
    names = fn.concat(fn.lit("names "), place_of(*_POSITION), fn.lit(", which is no record of the source"))
    kind = fn.when(gone, fn.lit(NOT_PROVABLE)).otherwise("phantom" if why is None else NOT_PROVABLE)
    deleted = f"the source records that {side.name} names are deleted"
    text = fn.when(gone, fn.lit(deleted)).otherwise(names if why is None else fn.lit(why))
    nothing = "names no record of the source topics in its headers"
    return found(
        left,
        Claim(fn.col("strange"), "phantom", _filed_place(), nothing),
        Claim(judged, kind, _filed_place(), text),
    )


def evidence_findings(rows: DataFrame, topology: Topology, *, wanted: bool) -> list[DataFrame]:
    """Return dead letters of which the record itself says nothing: the broker's, and those of the worker's clock."""
    if not wanted:
        return []
    before = Window.partitionBy("task").orderBy("at").rowsBetween(Window.unboundedPreceding, -1)
    seen = rows.withColumn("before_ms", fn.coalesce(fn.max("stream_ms").over(before), fn.lit(-(1 << 62))))
    dead = seen.where("verdict = 'dead_letter' AND NOT pending AND NOT history")
    here = place_of(*PLACE)
    refused = Claim(fn.col("reason") == REFUSED_BY_THE_BROKER, NOT_PROVABLE, here, WHY_REFUSED)
    if topology.future is not OnFuture.DEAD_LETTER:
        return [found(dead, refused)]
    clock = fn.col("reason") == "future_time"
    reached = fn.col("time_ms") <= fn.col("before_ms")
    skew = fn.lit(topology.max_clock_skew_ms)
    near = fn.col("time_ms") <= fn.col("before_ms") + skew
    text = "a dead letter for a future time, which stream time had reached: the rule judges it"
    wrong = Claim(clock & reached, "wrong_dead_letter", here, text)
    return [found(dead, refused, wrong, Claim(clock & ~reached & near, NOT_PROVABLE, here, WHY_CLOCK))]


def output_findings(
    rows: DataFrame, output: DataFrame, filed: Sequence[Side], *, complete: bool, sources_whole: bool, doubt: bool
) -> list[DataFrame]:
    """Return records missing in the output, there too often, there for no reason, or out of order.

    ``rows`` have `lane`, in which a digest is looked for; ``output`` has `lane`, `out`, `out_partition`, `out_offset`.
    """
    live = rows.where("NOT history AND out IS NOT NULL")
    for side in filed:
        # What a side topic holds is reported as wrong there; it can not be in the output as well.
        position = [fn.col(mine) == fn.col(theirs) for mine, theirs in zip(PLACE, _POSITION, strict=True)]
        held = side.filed.where("NOT strange").select(*_POSITION).distinct().withColumn("held", fn.expr("true"))
        live = live.join(held, position, "left").drop(*_POSITION)
        live = live.withColumn("forwards", fn.col("forwards") & fn.col("held").isNull()).drop("held")
    sure = fn.col("forwards") & ~fn.col("pending") & ~fn.col("doubtful")
    may = (fn.col("pending") | fn.col("doubtful")) & (fn.col("verdict") != "dead_letter")
    twin = fn.col("verdict").isin("unique", "duplicate", "conflict")
    wanted = live.groupBy("lane", "out").agg(
        fn.count_if(sure).alias("sure"),
        fn.count_if(may).alias("may"),
        fn.count_if(twin).alias("twins"),
        fn.min(fn.when(sure, place_of(*PLACE))).alias("place"),
        fn.min(fn.when(fn.col("verdict") == "late", place_of(*PLACE))).alias("late_place"),
        *(fn.max(fn.when(sure, fn.col(name))).alias(name) for name in ("task", "at")),
    )
    there = output.groupBy("lane", "out").agg(
        fn.count(fn.lit(1)).alias("times"),
        fn.min(place_of(*_OUT)).alias("out_place"),
        *(fn.max(name).alias(name) for name in _OUT),
    )
    both = wanted.join(there, ["lane", "out"], "full_outer")
    findings = [found(both, *_output_claims(complete=complete, sources_whole=sources_whole)), _order_findings(both)]
    if doubt:
        unknown = Claim(fn.expr("doubtful AND NOT pending"), NOT_PROVABLE, place_of(*PLACE), WHY_FRONT)
        findings.append(found(live, unknown))
    return findings


def _output_claims(*, complete: bool, sources_whole: bool) -> list[Claim]:
    number = {name: fn.coalesce(name, fn.lit(0)) for name in ("sure", "may", "twins", "times")}
    missing, extra = number["sure"] - number["times"], number["times"] - number["sure"] - number["may"]
    kind, why = ("lost", "unique, but not in the output") if complete else (NOT_PROVABLE, WHY_OUTPUT_GONE)
    late = fn.concat(fn.lit("the rule calls its source record "), fn.col("late_place"), fn.lit(" late"))
    text = fn.coalesce(late, fn.lit("it is no record of the source, or one that is changed"))
    stranger = "phantom" if sources_whole else NOT_PROVABLE
    text = text if sources_whole else fn.lit(f"{WHY_SOURCE_GONE} the output")
    doubled, at = "more often there than the rule allows", fn.col("out_place")
    return [
        Claim(missing > 0, kind, fn.col("place"), why, missing),
        Claim((extra > 0) & (number["twins"] > 0), "duplicated", at, doubled, extra),
        Claim((extra > 0) & (number["twins"] == 0), stranger, at, text, extra),
    ]


def _order_findings(both: DataFrame) -> DataFrame:
    """Return records that passed another one of their task; only those that are there once can tell."""
    by_place = Window.partitionBy("task", "out_partition").orderBy("out_offset")
    placed = both.where("sure = 1 AND times = 1").withColumn("before", fn.lag("at").over(by_place))
    text = "it comes behind a record that is later in the log of its task"
    return found(placed, Claim(fn.col("before") > fn.col("at"), "reordered", place_of(*_OUT), text))


def copy_findings(rows: DataFrame, copies: DataFrame, topic: str, *, complete: bool, whole: bool) -> DataFrame:
    """Return differences of the duplicates or the conflicts topic: ``copies`` has `lane`, `copy` and where each is."""
    live = rows.where("NOT history")
    sure = ~fn.col("pending") & ~fn.col("doubtful")
    wanted = live.groupBy("lane", "copy").agg(
        fn.count_if(sure).alias("sure"), fn.count_if(~sure).alias("may"), fn.min(place_of(*PLACE)).alias("place")
    )
    there = copies.groupBy("lane", "copy").agg(fn.count(fn.lit(1)).alias("times"), fn.min(place_of(*_OUT)).alias("at"))
    both = wanted.join(there, ["lane", "copy"], "full_outer")
    number = {name: fn.coalesce(name, fn.lit(0)) for name in ("sure", "may", "times")}
    missing, extra = number["sure"] - number["times"], number["times"] - number["sure"] - number["may"]
    if not complete:
        return found(
            both, Claim(missing > 0, NOT_PROVABLE, fn.col("place"), f"{topic} has lost its beginning", missing)
        )
    text = "not the record that the rule expects here" if whole else f"{WHY_SOURCE_GONE} {topic}"
    kind = "wrong_duplicate" if whole else NOT_PROVABLE
    return found(
        both,
        Claim(missing > 0, "wrong_duplicate", fn.col("place"), f"not in {topic}, or changed there", missing),
        Claim(extra > 0, kind, fn.col("at"), text, extra),
    )


def carried_findings(source: DataFrame, log: DataFrame, *, purged: bool, dead: DataFrame) -> DataFrame:
    """Return source records that are not in the repartition topic exactly once and unchanged.

    Both have `PLACE` and `raw`. What is purged there, or is a dead letter of the repartition step, is not provable.
    """
    position = [fn.col(f"source_{name}").alias(name) for name in PLACE]
    letters = dead.where("NOT strange").select(*position).distinct().withColumn("letter", fn.expr("true"))
    carried = log.groupBy(*PLACE).agg(fn.count(fn.lit(1)).alias("times"), fn.min("raw").alias("carried"))
    joined = source.join(carried, list(PLACE), "left").join(letters, list(PLACE), "left")
    here = place_of(*PLACE)
    missing = fn.expr("times IS NULL AND letter IS NULL")
    lost = Claim(missing, "lost", here, "not in the repartition topic")
    if purged:
        lost = Claim(missing, NOT_PROVABLE, here, "purged from the repartition topic")
    by_step = fn.expr("times IS NULL AND letter")
    changed = fn.expr("times = 1 AND carried <> raw")
    return found(
        joined,
        Claim(by_step, NOT_PROVABLE, here, "dead letters of the repartition step"),
        lost,
        Claim(fn.col("times") > 1, "duplicated", here, "in the repartition topic more than once"),
        Claim(changed, "changed", here, "changed in the repartition topic"),
    )
