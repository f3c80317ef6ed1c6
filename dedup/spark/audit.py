"""`dedup spark audit`: the findings of `dedup verify` at cluster scale, history of a seeded fleet included.

Theory of operation. Everything is read up to one cut: the group's offsets first, then the ends of what was written. The
log is judged by `batch.judged`, which is held against the exact model row by row in the tests; what each record must
look like in each topic is a digest. Expected and found are brought together by digest and counted: what is there less
often is lost, more often doubled, for no reason a phantom. Late records and dead letters name their source record, so
these are compared one by one. What the log can not say is counted as not provable, never as passed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final, cast

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as fn

from dedup.core.fold import OnFuture
from dedup.proof.evidence import DEAD_TAIL, LATE_TAIL
from dedup.proof.repartitioned import WHY_COPIES
from dedup.proof.replay import REFUSED_BY_THE_BROKER
from dedup.proof.report import SAMPLES_PER_KIND, Books, Report, Violation, ViolationKind
from dedup.spark.audit_cut import Cut, accepted_by_seed, before_the_log, read_topic, take_cut
from dedup.spark.audit_expected import PLACE, Log, by_task, expected
from dedup.spark.audit_findings import (
    NOT_PROVABLE,
    Side,
    carried_findings,
    copy_findings,
    evidence_findings,
    output_findings,
    side_findings,
    stand_in_findings,
    unaccounted_findings,
)
from dedup.spark.audit_records import as_leaf, digest, filed, forwarded_by_replay, headers_or_none
from dedup.spark.failures import told
from dedup.spark.files import History
from dedup.spark.seed_history import as_history
from dedup.topology.model import LateDrop, LateTo

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from dedup.session.wire import TopicPartition
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_STEPS: Final = 200
_VERDICTS: Final[Mapping[str, int]] = {
    "unique": 0, "exempt": 0, "duplicate": 1, "conflict": 1, "late": 2, "dead_letter": 3
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Topics:
    """What the topics hold within the cut."""

    output: DataFrame | None
    late: Side | None
    dead: Side
    stamped: bool
    standing: frozenset[str]
    """Side topics in which a digest stands for a value."""
    witnessed: bool
    """Whether there are dead letters of which the record itself says nothing."""


def audit(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    *,
    history: History | DataFrame | None = None,
    begins: Mapping[TopicPartition, int] | None = None,
) -> Report:
    """Return what an audit of everything found; reads only.

    ``history`` is what the fleet was seeded from, if that was files. ``begins``: the offsets at which the fleet began,
    where neither the topology's start nor a seed says so. Raises StateIncompatible, SettingsError, BrokerUnavailable.
    """
    began_s = time.time()
    report = Report(topology.name, ", ".join(settings.brokers), "audit on Spark", int(began_s * 1000))
    with told():
        cut = take_cut(spark, topology, settings, begins)
        topics = _topics(spark, topology, settings, cut)
        known = as_history(history) if isinstance(history, DataFrame) else history
        log = _log(spark, topology, settings, cut, topics, known)
        lane = fn.col("partition") if topology.direct else fn.lit(0)
        filed_late = topics.late.filed if topics.late is not None else None
        judged = expected(log, topology, topics.dead.filed, filed_late, witnessed=topics.witnessed)
        rows = as_leaf(judged.withColumn("lane", lane))
        try:
            grouped = _grouped(rows)
            _keep_books(report, topology, cut, grouped, topics)
            _keep_timeline(report, rows, grouped)
            findings = _findings(spark, topology, settings, cut, topics, log, rows)
            _note(report, reduce(DataFrame.unionByName, findings).persist())
        finally:
            rows.unpersist()
    report.seconds = time.time() - began_s
    _note_unbalanced(report)
    report.samples.sort(key=lambda sample: (sample.kind, sample.place))
    return report


def _topics(spark: SparkSession, topology: Topology, settings: Settings, cut: Cut) -> _Topics:
    def side(name: str, tail: tuple[str, ...]) -> Side:
        records = read_topic(spark, settings, cut, name, None)
        return Side(name, as_leaf(filed(records, topology.source.topics, tail)), cut.complete(name))

    stamped = topology.future is not OnFuture.CLAMP
    output = None
    if topology.output is not None and cut.partitions[topology.output.topic]:
        name = topology.output.topic
        records = read_topic(spark, settings, cut, name, None).where(~forwarded_by_replay(topology.source.topics))
        stamped = stamped and name not in cut.broker_times
        stamp = fn.col("timestamp_ms") if stamped else fn.lit(0)
        output = as_leaf(_found_in(records, "out", digest(headers_or_none(), stamp), direct=topology.direct))
    late = side(topology.late.topic, LATE_TAIL) if isinstance(topology.late, LateTo) else None
    dead = side(topology.dead_letter, DEAD_TAIL)
    seen = _glance([dead] if late is None else [dead, late])
    standing = frozenset(row["name"] for row in seen if row["standing"])
    witnessed = any(row["witnessed"] for row in seen if row["name"] == dead.name)
    return _Topics(output, late, dead, stamped, standing, witnessed)


def _glance(sides: Sequence[Side]) -> list[Row]:
    """Return what of the side topics decides which questions are asked: one question for all, as each costs a job."""
    parts = [each.filed.select(fn.lit(each.name).alias("name"), "stand_in", "filed_reason") for each in sides]
    witnessed = fn.col("filed_reason").isin("future_time", REFUSED_BY_THE_BROKER)
    grouped = reduce(DataFrame.unionByName, parts).groupBy("name")
    return grouped.agg(fn.count("stand_in").alias("standing"), fn.count_if(witnessed).alias("witnessed")).collect()


def _found_in(records: DataFrame, name: str, value: Column, *, direct: bool) -> DataFrame:
    lane = fn.col("partition") if direct else fn.lit(0)
    places = (fn.col(each).alias(f"out_{each}") for each in PLACE)
    return records.select(lane.alias("lane"), value.alias(name), *places)


def _log(
    spark: SparkSession, topology: Topology, settings: Settings, cut: Cut, topics: _Topics, history: History | None
) -> Log:
    """Return the log that was judged, with what is known before it."""
    if not topology.direct:
        name = topology.repartition_topic
        bounds = cut.bounds[name]
        committed = {at: cut.committed[name].get(at, each.low) for at, each in bounds.items()}
        # A seed's history is not in this log.
        known = {at: each.low == 0 and not cut.marks for at, each in bounds.items()}
        lows = {at: each.low for at, each in bounds.items()}
        records = read_topic(spark, settings, cut, name, None)
        return Log(records, cut.feeds(topology), committed, lows, known, topics.stamped)
    name = topology.source.topics[0]
    bounds, begins = cut.bounds[name], cut.begins[name]
    committed = {at: cut.committed[name].get(at, begins[at]) for at in bounds}
    from_topics = bool(cut.marks) and next(iter(cut.marks.values())).history == "topics"
    records = read_topic(spark, settings, cut, name, None if from_topics else begins)
    lows = {at: each.low for at, each in bounds.items()}
    if history is not None:
        earlier = before_the_log(history, topology, cut.partitions[name], begins)
        records = accepted_by_seed(earlier, topology, cut).unionByName(records)
        known = dict.fromkeys(bounds, True)
    elif from_topics:
        seeded = fn.col("offset") < by_task(begins, "partition", 0)
        records = accepted_by_seed(records.where(seeded), topology, cut).unionByName(records.where(~seeded))
        known = {at: low == 0 for at, low in lows.items()}
    else:
        known = {at: not cut.marks and (begins[at] > low or low == 0) for at, low in lows.items()}
    return Log(records, (), committed, begins, known, topics.stamped)


def _findings(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    cut: Cut,
    topics: _Topics,
    log: Log,
    rows: DataFrame,
) -> list[DataFrame]:
    findings: list[DataFrame] = []
    sides = [(topics.dead, "dead_letter", "wrong_dead_letter")]
    if topics.late is not None:
        sides.append((topics.late, "late", "wrong_late"))
    kept = _offsets(
        spark, {topic: {at: each.low for at, each in cut.bounds[topic].items()} for topic in cut.begins}, "low"
    )
    committed = _offsets(spark, {topic: cut.committed[topic] for topic in cut.begins}, "committed")
    for side, verdict, wrong in sides:
        findings += side_findings(rows, side, verdict, wrong)
        # Behind a repartition topic some records end before they get there, or are purged by now.
        why = None if topology.direct else "side records of the repartition step, or of records purged since"
        findings.append(unaccounted_findings(rows, side, kept, committed, why=why))
        if side.name in topics.standing and topology.direct:
            findings.append(stand_in_findings(log.records, side))
    findings += evidence_findings(rows, topology, wanted=topology.direct and topics.witnessed)
    if topics.output is not None and topology.output is not None:
        whole = all(log.known.values()) and all(cut.complete(topic) for topic in topology.source.topics)
        findings += output_findings(
            rows,
            topics.output,
            [side for side, _, _ in sides],
            complete=cut.complete(topology.output.topic),
            sources_whole=whole,
            doubt=not all(log.known.values()) or topology.future is OnFuture.CLAMP,
        )
    findings += _copies(spark, topology, settings, cut, log, rows)
    if not topology.direct:
        findings.append(_carried(spark, topology, settings, cut, topics, rows))
    return findings


def _offsets(spark: SparkSession, offsets: Mapping[str, Mapping[int, int]], name: str) -> DataFrame:
    rows = [(topic, at, offset) for topic, part in offsets.items() for at, offset in part.items()]
    return spark.createDataFrame(rows, f"source_topic string, source_partition int, {name} long")


def _copies(
    spark: SparkSession, topology: Topology, settings: Settings, cut: Cut, log: Log, rows: DataFrame
) -> list[DataFrame]:
    """Return the differences of the duplicates and conflicts topics."""
    wanted: list[tuple[str, list[str]]] = []
    if topology.duplicates is not None:
        both = ["duplicate"] if topology.conflicts is not None else ["duplicate", "conflict"]
        wanted.append((topology.duplicates, both))
    if topology.conflicts is not None:
        wanted.append((topology.conflicts, ["conflict"]))
    findings = []
    for topic, verdicts in wanted:
        part = rows.where(fn.col("verdict").isin(*verdicts))
        if not topology.direct:
            text = fn.lit(WHY_COPIES)
            counted = (
                part.where("NOT pending AND NOT history").agg(fn.count(fn.lit(1)).alias("number")).where("number > 0")
            )
            findings.append(
                counted.select(
                    fn.lit(NOT_PROVABLE).alias("kind"), fn.lit(topic).alias("place"), text.alias("text"), "number"
                )
            )
            continue
        if not cut.partitions[topic]:
            continue
        part = part.withColumn("lane", fn.col("partition") % cut.partitions[topic])
        records = read_topic(spark, settings, cut, topic, None)
        copies = _found_in(records, "copy", digest(headers_or_none(), fn.lit(0)), direct=True)
        whole = all(log.known.values())
        findings.append(copy_findings(part, copies, topic, complete=cut.complete(topic), whole=whole))
    return findings


def _carried(
    spark: SparkSession, topology: Topology, settings: Settings, cut: Cut, topics: _Topics, rows: DataFrame
) -> DataFrame:
    sources = []
    for topic in topology.source.topics:
        begins = cut.begins[topic]
        ends = {at: cut.committed[topic].get(at, begins[at]) for at in begins}
        records = read_topic(spark, settings, cut, topic, begins)
        upto = fn.create_map(*(fn.lit(each) for pair in sorted(ends.items()) for each in pair))
        sources.append(records.where(fn.col("offset") < upto[fn.col("partition")]))
    source = reduce(DataFrame.unionByName, sources)
    raw = digest(headers_or_none(), fn.col("timestamp_ms")).alias("raw")
    purged = not cut.complete(topology.repartition_topic)
    return carried_findings(
        source.select(*PLACE, raw), rows.select(*PLACE, "raw"), purged=purged, dead=topics.dead.filed
    )


def _grouped(rows: DataFrame) -> list[Row]:
    """Return how many records there are of each kind, and between which event times, `first_ms` and `last_ms`."""
    marked = (fn.col("verdict").isin("exempt", "unique") & fn.col("reason").isNotNull()).alias("marked")
    time_ms = fn.when(fn.col("time_ms") >= 0, fn.col("time_ms"))
    return (
        rows.groupBy("task", "history", "pending", "doubtful", "verdict", marked)
        .agg(fn.count(fn.lit(1)).alias("number"), fn.min(time_ms).alias("first_ms"), fn.max(time_ms).alias("last_ms"))
        .collect()
    )


def _keep_books(report: Report, topology: Topology, cut: Cut, grouped: Sequence[Row], topics: _Topics) -> None:
    name = topology.feeding_topics[0]
    books = {task: Books(name, task) for task in sorted(cut.bounds[name])}
    for row in grouped:
        each, number = books[row["task"]], row["number"]
        if row["history"]:
            continue
        if row["pending"]:
            each.pending += number
            continue
        each.read += number
        each.not_provable += number if row["doubtful"] else 0
        match row["verdict"]:
            case "unique" | "exempt":
                each.unique += number
                each.exempt += number if row["marked"] else 0
            case "duplicate" | "conflict":
                each.duplicates += number
                each.conflicts += number if row["verdict"] == "conflict" else 0
            case "late":
                each.late += number
            case _:
                each.dead_letters += number
    if topology.direct:
        for task, each in books.items():
            each.skipped = cut.begins[name][task] - cut.bounds[name][task].low
        _count_ended(topology, cut, books, topics)
    report.books.extend(books.values())


def _count_ended(topology: Topology, cut: Cut, books: Mapping[int, Books], topics: _Topics) -> None:
    """Count where the records of each settled partition are found."""
    if topics.output is None or topology.output is None or not cut.complete(topology.output.topic):
        return
    judged = fn.col("source_offset") < by_task(cut.committed[topology.source.topics[0]], "source_partition", 0)
    sides = [side.filed.where("NOT strange").where(judged) for side in (topics.dead, topics.late) if side is not None]
    ended = [topics.output.select("lane"), *(side.select(fn.col("source_partition").alias("lane")) for side in sides)]
    counted = reduce(DataFrame.unionByName, ended).groupBy("lane").count().collect()
    there = Counter({row["lane"]: row["count"] for row in counted})
    for task, each in books.items():
        dropped = each.late if isinstance(topology.late, LateDrop) else 0
        if not (each.pending or each.not_provable):
            each.ended = there[task] + each.duplicates + dropped


def _keep_timeline(report: Report, rows: DataFrame, grouped: Sequence[Row]) -> None:
    judged = rows.where("NOT history AND NOT pending AND time_ms >= 0")
    shown = [row for row in grouped if not (row["history"] or row["pending"] or row["first_ms"] is None)]
    if not shown:
        return
    step = max(1_000, (max(row["last_ms"] for row in shown) - min(row["first_ms"] for row in shown)) // _STEPS)
    report.timeline.step_ms = step
    start = (fn.col("time_ms") - fn.col("time_ms") % fn.lit(step)).alias("start")
    for row in judged.groupBy(start, "verdict").count().collect():
        report.timeline.add(row["start"], _VERDICTS[row["verdict"]], row["count"])


def _note(report: Report, findings: DataFrame) -> None:
    """Put findings into the report: all of them counted, a sample of each kind shown."""
    try:
        text = fn.when(fn.col("kind") == NOT_PROVABLE, fn.col("text"))
        sums = findings.groupBy("kind", text.alias("text")).agg(fn.sum("number").alias("number")).collect()
        shown = []
        for row in sums:
            if row["kind"] == NOT_PROVABLE:
                report.unprovable(row["text"], row["number"])
                continue
            report.counts[cast("ViolationKind", row["kind"])] += row["number"]
            shown.append(findings.where(fn.col("kind") == row["kind"]).limit(SAMPLES_PER_KIND))
        for sample in reduce(DataFrame.unionByName, shown).collect() if shown else ():
            number = "" if sample["number"] == 1 else f" ({sample['number']} times)"
            kind = cast("ViolationKind", sample["kind"])
            report.samples.append(Violation(kind, sample["place"] or "", f"{sample['text']}{number}"))
    finally:
        findings.unpersist()


def _note_unbalanced(report: Report) -> None:
    for books in report.books:
        if not books.balanced:
            text = f"read {books.read}, but {books.ended} ended as unique, duplicate, late or dead letter"
            report.violation("unbalanced", f"{books.topic}/{books.partition}", text)
