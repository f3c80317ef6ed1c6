"""`dedup spark audit`: the findings of `dedup verify` at cluster scale, with the history of a seeded fleet.

Theory of operation. Everything is read up to one cut: the group's offsets first, then the ends of the topics. The log
is judged by `batch_verdicts.judged`, which the tests compare with the exact model row by row, and each record is joined
with the late records and dead letters that name it as their source (`audit_expected`). What a record must look like in
any other topic is a digest. One shuffle brings expected and found digests together: one found less often than expected
is lost, more often duplicated, without any reason a phantom (`audit_findings`). What the log cannot prove is counted as
not provable, never as passed.
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
from dedup.spark.files import History
from dedup.spark.seed_history import as_history
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
_VERDICTS: Final[Mapping[str, int]] = {"unique": 0, "duplicate": 1, "conflict": 1, "late": 2, "dead_letter": 3}


def audit(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    *,
    history: History | DataFrame | None = None,
    begins: Mapping[TopicPartition, int] | None = None,
) -> Report:
    """Return the report of an audit of everything in the topics; writes nothing.

    ``history`` is what the fleet was seeded from, if that was files. ``begins``: the offsets at which the fleet began,
    if neither the topology's start nor a seed says so. Raises StateIncompatible if there is nothing to audit or
    retention deletes records meanwhile, SettingsError if the start is not known, BrokerUnavailable.
    """
    began_s = time.time()
    report = Report(topology.name, ", ".join(settings.brokers), "audit on Spark", int(began_s * 1000))
    with translated_errors():
        cut = take_cut(spark, topology, settings, begins)
        log = audited_log(cut, as_history(history) if isinstance(history, DataFrame) else history)
        with shuffles_for(spark, cut.size_bytes):
            _compare(report, cut, log)
    report.seconds = time.time() - began_s
    return report


def _compare(report: Report, cut: AuditCut, log: AuditedLog) -> None:
    sides = sides_of(cut)
    rows = expected(cut, log, sides).persist()
    pairs = compared(cut, rows).persist()
    try:
        _keep_books(report, cut, rows)
        _count_ended(report, cut, sides, pairs)
        _keep_timeline(report, rows.where("verdict IS NOT NULL AND NOT history AND NOT pending"))
        found = [*row_findings(cut, log, sides, rows), digest_findings(cut, log, pairs), order_findings(cut, pairs)]
        _note(report, reduce(DataFrame.unionByName, found).persist())
    finally:
        for each in (pairs, rows, sides.records):
            each.unpersist()


def _keep_books(report: Report, cut: AuditCut, rows: DataFrame) -> None:
    name = cut.topology.feeding_topics[0]
    books = {task: Books(name, task) for task in sorted(cut.bounds[name])}
    of_verdict = {"unique": "unique", "exempt": "exempt", "late": "late", "dead_letter": "dead_letters"}
    live = rows.where("verdict IS NOT NULL AND NOT history")
    for task, pending, doubtful, verdict, number in (
        live.groupBy("task", "pending", "doubtful", "verdict").count().collect()
    ):
        each = books[task]
        if pending:
            each.pending += number
            continue
        each.read += number
        each.not_provable += number if doubtful else 0
        each.conflicts += number if verdict == "conflict" else 0
        outcome = of_verdict.get(verdict, "duplicates")
        setattr(each, outcome, getattr(each, outcome) + number)
    if cut.topology.direct:
        for task, each in books.items():
            each.skipped = cut.begins[name][task] - cut.bounds[name][task].low
    report.books.extend(books.values())


def _count_ended(report: Report, cut: AuditCut, sides: Sides, pairs: DataFrame) -> None:
    """Count in which topics the records of each fully judged partition are found, and report what does not balance."""
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


def _keep_timeline(report: Report, judged: DataFrame) -> None:
    """Count verdicts over event time; a record without a usable one has the time 0, and is counted apart."""
    time_ms = fn.col("time_ms")
    known = (time_ms > 0) & ~fn.coalesce("reason", fn.lit("")).eqNullSafe(FUTURE)
    is_judged = fn.col("verdict").isin("unique", "duplicate", "conflict", "late") & (time_ms >= 0)
    dated = judged.where(is_judged | known)
    for verdict, number in judged.where(~(is_judged | known)).groupBy("verdict").count().collect():
        report.timeline.add_undated("dead_letters" if verdict == "dead_letter" else "exempt", number)
    ((first_ms, last_ms),) = dated.agg(fn.min(time_ms), fn.max(time_ms)).collect()
    if first_ms is None:
        return
    report.timeline.step_ms = step_ms = max(1_000, (last_ms - first_ms) // _STEPS)
    start = time_ms - time_ms % fn.lit(step_ms)
    for start_ms, verdict, number in dated.groupBy(start, "verdict").count().collect():
        report.timeline.add(start_ms, _VERDICTS[verdict], number)


def _note(report: Report, findings: DataFrame) -> None:
    """Put findings into the report: the number of all, and a sample of each kind."""
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
