"""Implements `dedup spark audit`, the findings of `dedup verify` at cluster scale, including a seeded fleet's history.

Theory of operation. Everything is read up to one cut, for which the group's offsets are read first and the ends of the
topics second. `batch_verdicts.judged` judges the log; the tests compare it with the exact model row by row. A digest
represents how each record must look in each topic. Expected and found digests are joined and counted. A digest that is
found less often than expected is lost, one that is found more often is duplicated, and one that is not expected at all
is a phantom. Late records and dead letters contain the position of their source record, so they are compared one by
one. Records that the log cannot prove are counted as not provable, never as passed.
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
from dedup.spark.audit_cut import AuditCut, accepted_by_seed, before_the_log, take_cut
from dedup.spark.audit_expected import (
    AuditedLog,
    as_leaf,
    by_task,
    digest,
    expected,
    filed,
    forwarded_by_replay,
    headers_or_none,
)
from dedup.spark.audit_findings import (
    NOT_PROVABLE,
    Side,
    copy_findings,
    evidence_findings,
    output_findings,
    repartition_findings,
    side_findings,
    stand_in_findings,
    unaccounted_findings,
)
from dedup.spark.files import History
from dedup.spark.kafka_source import feeds_of
from dedup.spark.rows import COORDINATES
from dedup.spark.seed_history import as_history
from dedup.spark.session import translated_errors
from dedup.topology.model import LateDrop, LateTo
from dedup.verify.evidence import DEAD_TAIL, LATE_TAIL
from dedup.verify.replay import FUTURE, REFUSED_BY_THE_BROKER
from dedup.verify.report import SAMPLES_PER_KIND, Books, Report, Violation, ViolationKind

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from dedup.kafka.wire import TopicPartition
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_STEPS: Final = 200
_VERDICTS: Final[Mapping[str, int]] = {"unique": 0, "duplicate": 1, "conflict": 1, "late": 2, "dead_letter": 3}


@dataclass(frozen=True, slots=True)
class _Topics:
    """The content, within the cut, of the topics that a fleet writes."""

    output: DataFrame | None
    late: Side | None
    dead: Side
    stamped: bool
    with_digests: frozenset[str]
    """Side topics in which a digest may replace a value."""
    unexplained: bool
    """Whether there are dead letters that the record itself does not explain."""


def audit(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    *,
    history: History | DataFrame | None = None,
    begins: Mapping[TopicPartition, int] | None = None,
) -> Report:
    """Audit everything in the topics without writing anything, and return the report.

    ``history`` contains the files from which the fleet was seeded, if any. ``begins`` are the offsets at which the
    fleet began, if neither the topology's start nor a seed says so. Raises StateIncompatible if there is nothing to
    audit or retention deletes records in the meantime, SettingsError if the start is not known, and BrokerUnavailable.
    """
    began_s = time.time()
    report = Report(topology.name, ", ".join(settings.brokers), "audit on Spark", int(began_s * 1000))
    with translated_errors():
        cut = take_cut(spark, topology, settings, begins)
        topics = _topics(cut)
        log = _log(cut, topics, as_history(history) if isinstance(history, DataFrame) else history)
        scope = fn.col("partition") if topology.direct else fn.lit(0)
        filed_late = topics.late.filed if topics.late is not None else None
        judged = expected(log, topology, topics.dead.filed, filed_late, unexplained=topics.unexplained)
        rows = as_leaf(judged.withColumn("scope", scope))
        try:
            grouped = _grouped(rows)
            _keep_books(report, cut, grouped, topics)
            _keep_timeline(report, rows, grouped)
            _note(report, reduce(DataFrame.unionByName, _findings(cut, topics, log, rows)).persist())
        finally:
            rows.unpersist()
    report.seconds = time.time() - began_s
    _note_unbalanced(report)
    report.samples.sort(key=lambda sample: (sample.kind, sample.place))
    return report


def _topics(cut: AuditCut) -> _Topics:
    topology = cut.topology

    def side(name: str, tail: tuple[str, ...]) -> Side:
        return Side(name, as_leaf(filed(cut.read(name), topology.source.topics, tail)), cut.complete(name))

    stamped = topology.future is not OnFuture.CLAMP
    output = None
    if topology.output is not None and cut.partitions[topology.output.topic]:
        name = topology.output.topic
        records = cut.read(name).where(~forwarded_by_replay(topology.source.topics))
        stamped = stamped and name not in cut.broker_times
        stamp = fn.col("timestamp_ms") if stamped else fn.lit(0)
        output = as_leaf(_found_in(records, "out", digest(headers_or_none(), stamp), direct=topology.direct))
    late = side(topology.late.topic, LATE_TAIL) if isinstance(topology.late, LateTo) else None
    dead = side(topology.dead_letter, DEAD_TAIL)
    seen = _side_facts([dead] if late is None else [dead, late])
    with_digests = frozenset(row["name"] for row in seen if row["with_digests"])
    unexplained = any(row["unexplained"] for row in seen if row["name"] == dead.name)
    return _Topics(output, late, dead, stamped, with_digests, unexplained)


def _side_facts(sides: Sequence[Side]) -> list[Row]:
    """Return the facts that decide which findings are looked for in the side topics, with one job for all of them."""
    parts = [each.filed.select(fn.lit(each.name).alias("name"), "stand_in", "filed_reason") for each in sides]
    unexplained = fn.col("filed_reason").isin("future_time", REFUSED_BY_THE_BROKER)
    grouped = reduce(DataFrame.unionByName, parts).groupBy("name")
    return grouped.agg(
        fn.count("stand_in").alias("with_digests"), fn.count_if(unexplained).alias("unexplained")
    ).collect()


def _found_in(records: DataFrame, name: str, value: Column, *, direct: bool) -> DataFrame:
    scope = fn.col("partition") if direct else fn.lit(0)
    places = (fn.col(each).alias(f"out_{each}") for each in COORDINATES)
    return records.select(scope.alias("scope"), value.alias(name), *places)


def _log(cut: AuditCut, topics: _Topics, history: History | None) -> AuditedLog:
    """Return the log that the fleet judged, with what is known about the time before it."""
    topology = cut.topology
    if not topology.direct:
        name = topology.repartition_topic
        bounds = cut.bounds[name]
        committed = {at: cut.committed[name].get(at, each.low) for at, each in bounds.items()}
        # The history of a seed is not in this log.
        known = {at: each.low == 0 and not cut.marks for at, each in bounds.items()}
        lows = {at: each.low for at, each in bounds.items()}
        feeds = feeds_of(topology, cut.partitions)
        return AuditedLog(cut.read(name), feeds, committed, lows, known, topics.stamped)
    name = topology.source.topics[0]
    bounds, begins = cut.bounds[name], cut.begins[name]
    committed = {at: cut.committed[name].get(at, begins[at]) for at in bounds}
    from_topics = bool(cut.marks) and next(iter(cut.marks.values())).history == "topics"
    records = cut.read(name, None if from_topics else begins)
    lows = {at: each.low for at, each in bounds.items()}
    if history is not None:
        records = accepted_by_seed(before_the_log(history, cut), cut).unionByName(records)
        known = dict.fromkeys(bounds, True)
    elif from_topics:
        seeded = fn.col("offset") < by_task(begins, "partition", 0)
        records = accepted_by_seed(records.where(seeded), cut).unionByName(records.where(~seeded))
        known = {at: low == 0 for at, low in lows.items()}
    else:
        known = {at: not cut.marks and (begins[at] > low or low == 0) for at, low in lows.items()}
    return AuditedLog(records, (), committed, begins, known, topics.stamped)


def _findings(cut: AuditCut, topics: _Topics, log: AuditedLog, rows: DataFrame) -> list[DataFrame]:
    topology = cut.topology
    findings: list[DataFrame] = []
    sides = [(topics.dead, "dead_letter", "wrong_dead_letter")]
    if topics.late is not None:
        sides.append((topics.late, "late", "wrong_late"))
    lows = {topic: {at: each.low for at, each in cut.bounds[topic].items()} for topic in cut.begins}
    kept = _offsets(cut.spark, lows, "low")
    committed = _offsets(cut.spark, {topic: cut.committed[topic] for topic in cut.begins}, "committed")
    for side, verdict, wrong in sides:
        findings += side_findings(rows, side, verdict, wrong)
        # Some records end in the repartition step, and others have been purged from its topic.
        why = None if topology.direct else "side records of the repartition step, or of records purged since"
        findings.append(unaccounted_findings(rows, side, kept, committed, why=why))
        if side.name in topics.with_digests and topology.direct:
            findings.append(stand_in_findings(log.records, side))
    findings += evidence_findings(rows, topology, wanted=topology.direct and topics.unexplained)
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
    findings += _copies(cut, log, rows)
    if not topology.direct:
        findings.append(_repartitioned(cut, topics, rows))
    return findings


def _offsets(spark: SparkSession, offsets: Mapping[str, Mapping[int, int]], name: str) -> DataFrame:
    rows = [(topic, at, offset) for topic, part in offsets.items() for at, offset in part.items()]
    return spark.createDataFrame(rows, f"source_topic string, source_partition int, {name} long")


def _copies(cut: AuditCut, log: AuditedLog, rows: DataFrame) -> list[DataFrame]:
    """Return the differences of the duplicates and conflicts topics."""
    topology = cut.topology
    wanted: list[tuple[str, list[str]]] = []
    if topology.duplicates is not None:
        both = ["duplicate"] if topology.conflicts is not None else ["duplicate", "conflict"]
        wanted.append((topology.duplicates, both))
    if topology.conflicts is not None:
        wanted.append((topology.conflicts, ["conflict"]))
    findings = []
    for topic, verdicts in wanted:
        if not cut.partitions[topic]:
            continue
        # A task writes to the partition of its own number, which is the source's only if nothing is repartitioned.
        scope = fn.col("task") % cut.partitions[topic]
        part = rows.where(fn.col("verdict").isin(*verdicts)).withColumn("scope", scope)
        copies = _found_in(cut.read(topic), "copy", digest(headers_or_none(), fn.lit(0)), direct=True)
        whole = all(log.known.values())
        findings.append(copy_findings(part, copies, topic, complete=cut.complete(topic), whole=whole))
    return findings


def _repartitioned(cut: AuditCut, topics: _Topics, rows: DataFrame) -> DataFrame:
    """Return the differences between the source topics and the repartition topic."""
    sources = []
    for topic in cut.topology.source.topics:
        begins = cut.begins[topic]
        ends = {at: cut.committed[topic].get(at, begins[at]) for at in begins}
        sources.append(cut.read(topic, begins).where(fn.col("offset") < by_task(ends, "partition", 0)))
    source = reduce(DataFrame.unionByName, sources)
    raw = digest(headers_or_none(), fn.col("timestamp_ms")).alias("raw")
    purged = not cut.complete(cut.topology.repartition_topic)
    return repartition_findings(
        source.select(*COORDINATES, raw), rows.select(*COORDINATES, "raw"), purged=purged, dead=topics.dead.filed
    )


def _grouped(rows: DataFrame) -> list[Row]:
    """Return the number of records of each kind, with the smallest and greatest event time (`first_ms`, `last_ms`)."""
    time_ms = _event_time_ms()
    return (
        rows.groupBy("task", "history", "pending", "doubtful", "verdict")
        .agg(fn.count(fn.lit(1)).alias("number"), fn.min(time_ms).alias("first_ms"), fn.max(time_ms).alias("last_ms"))
        .collect()
    )


def _keep_books(report: Report, cut: AuditCut, grouped: Sequence[Row], topics: _Topics) -> None:
    topology = cut.topology
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
            case "unique":
                each.unique += number
            case "exempt":
                each.exempt += number
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
        _count_ended(cut, books, topics)
    report.books.extend(books.values())


def _count_ended(cut: AuditCut, books: Mapping[int, Books], topics: _Topics) -> None:
    """Count, for each fully judged partition, the topics in which its records are found."""
    topology = cut.topology
    if topics.output is None or topology.output is None or not cut.complete(topology.output.topic):
        return
    judged = fn.col("source_offset") < by_task(cut.committed[topology.source.topics[0]], "source_partition", 0)
    sides = [
        side.filed.where("NOT unknown_source").where(judged) for side in (topics.dead, topics.late) if side is not None
    ]
    ended = [topics.output.select("scope"), *(side.select(fn.col("source_partition").alias("scope")) for side in sides)]
    counted = reduce(DataFrame.unionByName, ended).groupBy("scope").count().collect()
    there = Counter({row["scope"]: row["count"] for row in counted})
    for task, each in books.items():
        dropped = each.late if isinstance(topology.late, LateDrop) else 0
        if not (each.pending or each.not_provable):
            each.ended = there[task] + each.duplicates + dropped


def _event_time_ms() -> Column:
    """Return the event time; null for a record without a usable one, whose column `time_ms` is 0."""
    time_ms = fn.col("time_ms")
    judged = fn.col("verdict").isin("unique", "duplicate", "conflict", "late") & (time_ms >= 0)
    known = (time_ms > 0) & ~fn.coalesce("reason", fn.lit("")).eqNullSafe(FUTURE)
    return fn.when(judged | known, time_ms)


def _keep_timeline(report: Report, rows: DataFrame, grouped: Sequence[Row]) -> None:
    judged = rows.where("NOT history AND NOT pending").withColumn("time_ms", _event_time_ms())
    for row in judged.where("time_ms IS NULL").groupBy("verdict").count().collect():
        report.timeline.add_undated("dead_letters" if row["verdict"] == "dead_letter" else "exempt", row["count"])
    shown = [row for row in grouped if not (row["history"] or row["pending"] or row["first_ms"] is None)]
    if not shown:
        return
    step = max(1_000, (max(row["last_ms"] for row in shown) - min(row["first_ms"] for row in shown)) // _STEPS)
    report.timeline.step_ms = step
    start = (fn.col("time_ms") - fn.col("time_ms") % fn.lit(step)).alias("start")
    for row in judged.where("time_ms IS NOT NULL").groupBy(start, "verdict").count().collect():
        report.timeline.add(row["start"], _VERDICTS[row["verdict"]], row["count"])


def _note(report: Report, findings: DataFrame) -> None:
    """Add the number of findings and a sample of each kind to the report."""
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
