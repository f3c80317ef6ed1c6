"""Implements `dedup spark audit`: the checks of `dedup verify` on Spark, including the history of a seeded fleet.

Theory of operation. All topics are read up to one cut: the driver first reads the group's offsets, and then the ends of
the topics. The log is judged by `batch_verdicts.judged`, which the tests compare with the exact model row by row, and
each record is joined with the late records and dead letters that name it as their source (`audit_expected`). The
records of the output and side topics are compared with the expected records by digests. One shuffle brings the expected
and the found digests together. A record that is found less often than expected is lost, a record that is found more
often is duplicated, and a record that is found but not expected is a phantom (`audit_findings`). A record whose verdict
the log cannot prove is counted as not provable, never as passed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Final, cast

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as fn

from dedup.spark.audit_cut import AuditCut, AuditedLog, audited_log, by_key, take_cut
from dedup.spark.audit_expected import Sides, expected, sides_of
from dedup.spark.audit_findings import NOT_PROVABLE, compared, digest_findings, order_findings, row_findings
from dedup.spark.batch_verdicts import history_of
from dedup.spark.files import History
from dedup.spark.session import shuffles_for, translated_errors
from dedup.topology.model import LateDrop
from dedup.verify.replay import FUTURE
from dedup.verify.report import SAMPLES_PER_KIND, Books, Report, Violation, ViolationKind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dedup.kafka.wire import TopicPartition
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_STEPS: Final = 200
_BOOKED: Final[Mapping[str, str]] = {name: name for name in ("unique", "exempt", "late")} | {
    "duplicate": "duplicates",
    "conflict": "duplicates",
    "dead_letter": "dead_letters",
}
"""Maps a verdict to the name of its count in `Books`."""


def audit(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    *,
    history: History | DataFrame | None = None,
    begins: Mapping[TopicPartition, int] | None = None,
) -> Report:
    """Audit all records in the topics without writing anything, and return the report.

    ``history`` contains the files from which the fleet was seeded, if any. ``begins`` contains the offsets at which the
    fleet began, and is needed if neither the topology's `start` nor a seed determines them. Raises StateIncompatible if
    there is nothing to audit or retention deletes records in the meantime, SettingsError if it is not known where the
    fleet began, and BrokerUnavailable if no broker responds.
    """
    began_s = time.time()
    report = Report(topology.name, ", ".join(settings.brokers), "audit on Spark", int(began_s * 1000))
    with translated_errors():
        cut = take_cut(spark, topology, settings, report, begins)
        log = audited_log(cut, history_of(history, identified=False) if isinstance(history, DataFrame) else history)
        with shuffles_for(spark, cut.size_bytes):
            _compare(report, cut, log)
    report.seconds = time.time() - began_s
    return report


def _compare(report: Report, cut: AuditCut, log: AuditedLog) -> None:
    sides = sides_of(cut)
    rows = expected(cut, log, sides).persist()
    pairs = compared(cut, rows).persist()
    try:
        _keep_books(report, cut, rows.where("verdict IS NOT NULL AND NOT history"))
        _count_ended(report, cut, sides, pairs)
        found = [*row_findings(cut, log, sides, rows), digest_findings(cut, log, pairs), order_findings(cut, pairs)]
        _note(report, reduce(DataFrame.unionByName, found).persist())
    finally:
        for each in (pairs, rows, sides.records):
            each.unpersist()


def _keep_books(report: Report, cut: AuditCut, live: DataFrame) -> None:
    """Count the verdicts by task and by event time; a record without a usable event time has the time 0."""
    time_ms, is_judged = fn.col("time_ms"), fn.col("verdict").isin("unique", "duplicate", "conflict", "late")
    dated = (is_judged & (time_ms >= 0)) | ((time_ms > 0) & ~fn.col("reason").eqNullSafe(FUTURE))
    grouped = live.groupBy("task", "pending", "doubtful", "verdict", dated.alias("dated"))
    found = grouped.agg(
        fn.count("verdict").alias("number"), fn.min(time_ms).alias("first"), fn.max(time_ms).alias("last")
    )
    name = cut.topology.feeding_topics[0]
    books = {task: Books(name, task) for task in sorted(cut.bounds[name])}
    spans: list[int] = []
    for row in found.collect():
        each, verdict, number = books[row["task"]], row["verdict"], row["number"]
        if row["pending"]:
            each.pending += number
            continue
        each.read += number
        each.not_provable += number if row["doubtful"] else 0
        each.conflicts += number if verdict == "conflict" else 0
        setattr(each, _BOOKED[verdict], getattr(each, _BOOKED[verdict]) + number)
        if row["dated"]:
            spans += (row["first"], row["last"])
        else:
            report.timeline.add(_BOOKED[verdict], None, number)
    if cut.topology.direct:
        for task, each in books.items():
            each.skipped = cut.begins[name][task] - cut.bounds[name][task].low
    report.books.extend(books.values())
    if spans:
        report.timeline.step_ms = step_ms = max(1_000, (max(spans) - min(spans)) // _STEPS)
        shown = live.where(dated & ~fn.col("pending")).groupBy((time_ms - time_ms % fn.lit(step_ms)), "verdict").count()
        for start_ms, verdict, number in shown.collect():
            report.timeline.add(_BOOKED[verdict], start_ms, number)


def _count_ended(report: Report, cut: AuditCut, sides: Sides, pairs: DataFrame) -> None:
    """Count in which topics the records of each fully judged partition ended, and report counts that do not add up."""
    topology, output = cut.topology, cut.topology.output
    if topology.direct and output is not None and cut.partitions[output.topic] and cut.complete(output.topic):
        committed = by_key(cut.committed[topology.source.topics[0]], fn.col("partition"))
        filed = sides.records.where("topic IS NOT NULL").where(fn.col("offset") < committed)
        times = (fn.col("times_late") + fn.col("times_dead_letter")).alias("times")
        ended = filed.select(fn.col("partition").alias("scope"), times)
        ended = ended.union(pairs.where(fn.col("topic") == output.topic).select("scope", "times"))
        there: Counter[int] = Counter(dict(ended.groupBy("scope").sum("times").collect()))
        for each in report.books:
            dropped = each.late if isinstance(topology.late, LateDrop) else 0
            if not (each.pending or each.not_provable):
                each.ended = there[each.partition] + each.duplicates + dropped
    for each in report.books:
        if not each.balanced:
            text = f"read {each.read}, but {each.ended} ended as unique, duplicate, late or dead letter"
            report.violation("unbalanced", f"{each.topic}/{each.partition}", text)


def _note(report: Report, findings: DataFrame) -> None:
    """Add the number of findings and a sample of each kind to the report."""
    try:
        reason = fn.when(fn.col("kind") == NOT_PROVABLE, fn.col("text"))
        for kind, text, number in findings.groupBy("kind", reason).agg(fn.sum("number")).collect():
            if kind == NOT_PROVABLE:
                report.unprovable(text, number)
            else:
                report.counts[cast("ViolationKind", kind)] += number
        first = fn.row_number().over(Window.partitionBy("kind").orderBy("place")) <= SAMPLES_PER_KIND
        violations = findings.where(fn.col("kind") != NOT_PROVABLE)
        for kind, place, text, number in violations.withColumn("first", first).where("first").drop("first").collect():
            times = "" if number == 1 else f" ({number} times)"
            report.samples.append(Violation(cast("ViolationKind", kind), place or "", f"{text}{times}"))
        report.samples.sort(key=lambda sample: (sample.kind, sample.place))
    finally:
        findings.unpersist()
