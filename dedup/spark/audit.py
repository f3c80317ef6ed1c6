"""Implements `dedup spark audit`, which runs the checks of `dedup verify` on Spark and can also judge the historical
records that seeded a fleet.

The audit judges the source records with `batch_verdicts.judged`, and determines which records the topics should
contain. The audit then compares the digests of the expected records with the digests of the actual records. A record
that occurs less often than expected counts as lost, a record that occurs more often counts as duplicated, and an
unexpected record counts as a phantom. If the topics no longer contain the records that would prove a verdict, the audit
counts the judged record as not provable, never as correct.

Each finding is a row with the columns `kind`, `place`, `text`, and `number` (the number of records). `kind` is
`not_provable` or one of `verify.report.MEANINGS`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Final, cast

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as fn

from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.core.formats import SCHEMA_UNKNOWN
from dedup.errors import StateIncompatible
from dedup.kafka.wire import TopicPartition
from dedup.settings import Settings
from dedup.spark.audit_expected import AuditCut, Sides, by_key, digest, expected, forwarded_by_replay, path, sides_of
from dedup.spark.batch_verdicts import history_of
from dedup.spark.files import History
from dedup.spark.session import shuffles_for, translated_errors
from dedup.topology.model import LateDrop, Topology
from dedup.verify.findings import WHY_OUTPUT_GONE, WHY_SOURCE_GONE
from dedup.verify.replay import (
    FUTURE,
    REFUSED_BY_THE_BROKER,
    WHY_CLOCK,
    WHY_FRONT,
    WHY_REFUSED,
    WHY_SCHEMA,
    WHY_SIDE_GONE,
    by_evidence,
)
from dedup.verify.report import SAMPLES_PER_KIND, Books, Report, Violation, ViolationKind
from dedup.verify.spill import stand_in

_STEPS: Final = 200
_BOOKED: Final[Mapping[str, str]] = {name: name for name in ("unique", "exempt", "late")} | {
    "duplicate": "duplicates",
    "conflict": "duplicates",
    "dead_letter": "dead_letters",
}
"""Maps a verdict to the name of its count in `Books`."""
_NOT_PROVABLE: Final = "not_provable"
_COMPARED: Final = (
    "topic string, scope int, digest binary, sure int, may int, originals int, task int, at long, late_at long, "
    "times int, partition int, offset long"
)


def audit(
    spark: SparkSession,
    topology: Topology,
    settings: Settings,
    *,
    history: History | DataFrame | None = None,
    begins: Mapping[TopicPartition, int] | None = None,
) -> Report:
    """Check every record in the topology's topics without writing to Kafka, and return the report.

    ``history`` contains the historical records that seeded the fleet, if they came from files. ``begins`` maps each
    source partition to the fleet's start offset. ``begins`` is required if the topology sets `start: latest` and
    neither a seed nor `dedup reset` recorded the start offsets. Raises StateIncompatible if the topics contain nothing
    to audit, or if retention deletes records during the audit. Raises SettingsError if the fleet's start offsets are
    unknown, and BrokerUnavailable if no broker responds.
    """
    began_s = time.time()
    report = Report(topology.name, ", ".join(settings.brokers), "audit on Spark", int(began_s * 1000))
    with translated_errors():
        if isinstance(history, DataFrame):
            history = history_of(history, identified=False)
        cut = AuditCut(spark, topology, settings, report, begins=begins, history=history)
        with shuffles_for(spark, cut.size_bytes):
            _compare(report, cut)
    report.seconds = time.time() - began_s
    return report


def _compare(report: Report, cut: AuditCut) -> None:
    sides = sides_of(cut)
    rows = expected(cut, sides).persist()
    pairs = _pairs(cut, rows).persist()
    found = [*_row_findings(cut, sides, rows), _found(pairs, *_digest_claims(cut)), _order_findings(cut, pairs)]
    findings = reduce(DataFrame.unionByName, found).persist()
    try:
        _refuse_deleted_schemas(cut, rows)
        _keep_books(report, cut, rows.where("verdict IS NOT NULL AND NOT history"))
        _count_ended(report, cut, sides, pairs)
        _note(report, findings)
    finally:
        for each in (findings, pairs, rows, sides.records):
            each.unpersist()


def _refuse_deleted_schemas(cut: AuditCut, rows: DataFrame) -> None:
    """Raise StateIncompatible if the registry does not know a record's schema and the record is not in the dead-letter
    topic.
    """
    if cut.topology.source.needs_registry and cut.complete(cut.topology.dead_letter):
        settled = f"verdict = 'dead_letter' AND reason = '{SCHEMA_UNKNOWN}' AND NOT (history OR pending OR doubtful)"
        for row in rows.where(f"{settled} AND coalesce(times_dead_letter, 0) = 0").select("source").take(1):
            raise StateIncompatible(
                f"{row['source']}: the schema registry does not know the schema of this record, and the record has no "
                f"dead letter. Either the schema was deleted after the record was judged, or the dead letter was "
                f"deleted. Nothing can be audited until the schema is registered again with the same ID, or is in "
                f"`schema_registry.directory`."
            )


def _keep_books(report: Report, cut: AuditCut, live: DataFrame) -> None:
    time_ms, is_judged = fn.col("time_ms"), fn.col("verdict").isin("unique", "duplicate", "conflict", "late")
    # A record without a usable event time has the time 0.
    dated = (is_judged & (time_ms >= 0)) | ((time_ms > 0) & ~fn.col("reason").eqNullSafe(FUTURE))
    grouped = live.groupBy("task", "pending", "doubtful", "verdict", dated.alias("dated"))
    counts = fn.count("verdict").alias("number"), fn.min(time_ms).alias("first"), fn.max(time_ms).alias("last")
    name = cut.log_topic
    books = {task: Books(name, task) for task in sorted(cut.bounds[name])}
    spans: list[int] = []
    for row in grouped.agg(*counts).collect():
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
    """Report each partition in which the number of records read differs from the total number of unique, duplicate,
    late, and dead-letter records.
    """
    topology, output = cut.topology, cut.topology.output
    if topology.direct and output is not None and cut.partitions[output.topic] and cut.complete(output.topic):
        committed = by_key(cut.committed[cut.log_topic], fn.col("partition"))
        filed = sides.records.where(fn.col("topic").isNotNull() & (fn.col("offset") < committed))
        ended = filed.selectExpr("partition AS scope", "times_late + times_dead_letter AS times")
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
    reason = fn.when(fn.col("kind") == _NOT_PROVABLE, fn.col("text"))
    for kind, text, number in findings.groupBy("kind", reason).agg(fn.sum("number")).collect():
        if kind == _NOT_PROVABLE:
            report.unprovable(text, number)
        else:
            report.counts[cast("ViolationKind", kind)] += number
    first = fn.row_number().over(Window.partitionBy("kind").orderBy("place")) <= SAMPLES_PER_KIND
    violations = findings.where(fn.col("kind") != _NOT_PROVABLE)
    for kind, place, text, number in violations.withColumn("first", first).where("first").drop("first").collect():
        times = "" if number == 1 else f" ({number} times)"
        report.samples.append(Violation(cast("ViolationKind", kind), place or "", f"{text}{times}"))
    report.samples.sort(key=lambda sample: (sample.kind, sample.place))


def _claim(where: Column | str, place: Column, kind: str, text: Column | str, number: str = "1") -> Column:
    """Return a column that contains a finding in each row for which ``where`` is true, and null in all other rows.

    ``where`` is a column or a SQL expression, and ``number`` is a SQL expression.
    """
    values = {"kind": fn.lit(kind), "place": place, "text": fn.lit(text), "number": fn.expr(number).cast("long")}
    claimed = fn.struct(*(column.alias(name) for name, column in values.items()))
    return fn.when(fn.expr(where) if isinstance(where, str) else where, claimed)


def _found(rows: DataFrame, *claims: Column) -> DataFrame:
    """Evaluate all ``claims`` (columns that `_claim` returned) in one pass over the rows, and return the findings."""
    return rows.select(fn.inline(fn.array_compact(fn.array(*claims))))


def _if_provable(provable: bool, kind: str, text: Column | str, why_not: str) -> tuple[str, Column | str]:  # noqa: FBT001
    """Return ``kind`` and ``text`` if ``provable`` is true; otherwise, return `not_provable` and ``why_not``."""
    return (kind, text) if provable else (_NOT_PROVABLE, why_not)


def _shown(place: str) -> Column:
    return fn.regexp_replace(place, r"/(\d+)$", " offset $1")


def _place(topic: str, partition: str, offset: str) -> Column:
    return fn.expr(f"concat('{topic}/', {partition}, ' offset ', {offset})")


def _row_findings(cut: AuditCut, sides: Sides, rows: DataFrame) -> Iterator[DataFrame]:
    """Yield findings about individual records: unprovable verdicts, and errors in the late and dead-letter topics."""
    live, here = "NOT pending AND NOT history", _shown("source")
    # Dead letters with these three reasons depend on the broker, a worker's clock, or the registry, not on the record.
    refused, by_clock, unknown = (
        f"{live} AND verdict = 'dead_letter' AND reason = '{why}'"
        for why in (REFUSED_BY_THE_BROKER, FUTURE, SCHEMA_UNKNOWN)
    )
    ahead_ms, skew_ms = "time_ms - before_ms", cut.topology.max_clock_skew_ms
    reached = "a dead letter for a future event time, but stream time had already reached that time"
    claims = [
        _claim(f"{live} AND doubtful AND out IS NOT NULL", here, _NOT_PROVABLE, WHY_FRONT),
        _claim(refused, here, _NOT_PROVABLE, WHY_REFUSED),
        _claim(f"{unknown} AND fault IS DISTINCT FROM '{SCHEMA_UNKNOWN}'", here, _NOT_PROVABLE, WHY_SCHEMA),
        _claim(f"{by_clock} AND {ahead_ms} <= 0", here, "wrong_dead_letter", reached),
        _claim(f"{by_clock} AND {ahead_ms} > 0 AND {ahead_ms} <= {skew_ms}", here, _NOT_PROVABLE, WHY_CLOCK),
    ]
    for verdict, topic in sides.topics.items():
        claims += _side_claims(cut, topic, verdict)
    # This filter drops nearly all rows. All claims are false for every dropped row.
    yield _found(rows.where("doubtful OR verdict IN ('late', 'dead_letter') OR times_dead_letter IS NOT NULL"), *claims)
    for verdict in sides.with_stand_ins if cut.topology.direct else ():
        # Spark evaluates a Python function before the claim, so the function's result needs its own column.
        words = fn.udf(lambda value: stand_in(value).decode(), "string")
        standing = sides.records.where(f"{verdict}.stand_in IS NOT NULL").select("source", f"{verdict}.stand_in")
        there = cut.log.withColumn("source", path()).join(standing, "source")
        other = there.withColumn("other", words("value") != fn.col("stand_in"))
        text = f"the digest of its value differs from the digest in {sides.topics[verdict]}"
        yield _found(other, _claim("other", here, "changed", text))


def _side_claims(cut: AuditCut, topic: str, verdict: str) -> Iterator[Column]:
    """Yield the claims that find wrong and missing records in a side topic, and records without a source record."""
    here, there, times = _shown("source"), _shown(f"{verdict}.place"), f"coalesce(times_{verdict}, 0)"
    again = fn.format_string("source record %s occurs more than once", here)
    yield _claim(f"{times} > 1", there, "duplicated", again, f"{times} - 1")
    settled = "verdict IS NOT NULL AND NOT (history OR pending OR doubtful)"
    lost = f"{verdict.replace('_', ' ')}, but not in {topic}"
    lost_as = _if_provable(cut.complete(topic), "lost", lost, WHY_SIDE_GONE)
    yield _claim(f"{settled} AND verdict = '{verdict}' AND {times} = 0", here, *lost_as)
    wrong = "wrong_late" if verdict == "late" else "wrong_dead_letter"
    rule = fn.format_string("it is in %s, but by the rule it is %s", there, "verdict")
    yield _claim(f"{settled} AND verdict != '{verdict}' AND {times} > 0", here, wrong, rule)
    rightly = f"{settled} AND verdict = '{verdict}' AND {times} > 0"
    # If a header name of a source record is not UTF-8, the headers cannot be read, so the records are not compared.
    whole = f"{verdict}.stand_in IS NULL AND {verdict}.reason != '{ODD_HEADER_NAME.code}'"
    differs = fn.format_string("%s has another key, value, header or original timestamp", there)
    yield _claim(f"{rightly} AND {whole} AND {verdict}.digest != raw", here, "changed", differs)
    if verdict == "dead_letter":
        other = f"dead_letter.reason != '{REFUSED_BY_THE_BROKER}' AND dead_letter.reason != reason"
        both = fn.format_string('%s says "%s"; the record says "%s"', there, "dead_letter.reason", "reason")
        yield _claim(f"{rightly} AND {other}", here, wrong, both)
    alone, nameless = f"verdict IS NULL AND {times} > 0", "names no record of the source topics in its headers"
    yield _claim(f"{alone} AND topic IS NULL", there, "phantom", nameless, times)
    low, committed = (_of_source(cut, of) for of in (cut.lows, cut.committed.__getitem__))
    judged = fn.expr(f"{alone} AND topic IS NOT NULL") & (fn.col("offset") < committed)
    gone = f"the source records that {topic} names were deleted"
    yield _claim(judged & (fn.col("offset") < low), there, _NOT_PROVABLE, gone, times)
    unknown = fn.format_string("names %s, which is not a record of the source", here)
    # The repartition step turned some source records into dead letters, and others have been purged from the
    # repartition topic.
    purged = "side records of the repartition step, or of records purged since"
    said = _if_provable(cut.topology.direct, "phantom", unknown, purged)
    there_still, strange = judged & (fn.col("offset") >= low), fn.lit(False)  # noqa: FBT003
    if verdict == "dead_letter" and not cut.topology.direct and cut.complete(cut.topology.repartition_topic):
        strange = ~fn.col("dead_letter.reason").isin(ODD_HEADER_NAME.code, *by_evidence(cut.topology))
        no_reason = fn.format_string('%s says "%s", no reason of the repartition step', there, "dead_letter.reason")
        yield _claim(there_still & strange, here, wrong, no_reason)
    yield _claim(there_still & ~strange, there, *said, times)


def _of_source(cut: AuditCut, of: Callable[[str], Mapping[int, int]]) -> Column:
    offsets = {f"{topic}/{at}": offset for topic in cut.topology.source.topics for at, offset in of(topic).items()}
    return by_key(offsets, fn.concat_ws("/", "topic", "partition"))


def _pairs(cut: AuditCut, rows: DataFrame) -> DataFrame:
    """Count how often each record's digest is expected in a topic, and how often it occurs there.

    The result has one row for each combination of `topic`, `scope` (the part of the topic that may contain the digest),
    and `digest`. `sure` counts records that the topic must contain, and `may` counts records that it may contain.
    `times` counts records found in the topic, and `originals` counts expected records whose verdict is unique,
    duplicate, or conflict. `task` and `at` locate an expected record, `late_at` locates a late record, and `partition`
    and `offset` locate a record found in the topic.
    """
    topology, zero, headers = cut.topology, fn.lit(0), fn.col("headers")
    settled, live = fn.expr("NOT pending AND NOT doubtful"), rows.where("NOT history")
    parts = [cut.spark.createDataFrame([], _COMPARED)]
    if topology.output is not None and cut.partitions[topology.output.topic]:
        # A record that a side topic contains by mistake is reported for that topic, not for the output.
        elsewhere = fn.expr("coalesce(times_late, 0) + coalesce(times_dead_letter, 0) > 0")
        sure, may = fn.col("forwards") & ~elsewhere & settled, ~settled & (fn.col("verdict") != "dead_letter")
        task, partition = (fn.col(name) if topology.direct else zero for name in ("task", "partition"))
        records = cut.read(topology.output.topic).where(~forwarded_by_replay(topology.source.topics))
        stamp = fn.col("timestamp_ms") if cut.stamped else zero
        parts.append(_expected_in(topology.output.topic, live.where("out IS NOT NULL"), task, "out", sure, may))
        parts.append(_found_in(topology.output.topic, records, partition, digest(headers, stamp)))
    for topic, verdicts in cut.copies.items():
        # The scope is the partition to which the task writes: the task's number modulo the number of partitions. Behind
        # a repartition topic, the number may have been smaller earlier, so there is only one scope.
        task, partition = fn.col("task") % cut.partitions[topic], fn.col("partition")
        task, partition = (task, partition) if topology.direct else (zero, zero)
        copied = live.where(fn.col("verdict").isin(*verdicts))
        parts.append(_expected_in(topic, copied, task, "copy", settled, ~settled))
        parts.append(_found_in(topic, cut.read(topic), partition, digest(headers, zero)))
    if not topology.direct:
        parts += _repartitioned(cut, rows)
    every = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)
    sums = (fn.coalesce(fn.sum(name), zero).alias(name) for name in ("sure", "may", "originals", "times"))
    places = (fn.max(name).alias(name) for name in ("task", "at", "late_at", "partition", "offset"))
    return every.groupBy("topic", "scope", "digest").agg(*sums, *places)


def _expected_in(topic: str, rows: DataFrame, scope: Column, key: str, sure: Column, may: Column) -> DataFrame:
    original = fn.col("verdict").isin("unique", "duplicate", "conflict")
    return rows.select(
        fn.lit(topic).alias("topic"),
        scope.alias("scope"),
        fn.col(key).alias("digest"),
        *(flag.cast("int").alias(name) for name, flag in (("sure", sure), ("may", may), ("originals", original))),
        *(fn.when(sure, fn.col(name)).alias(name) for name in ("task", "at")),
        fn.expr("CASE WHEN verdict = 'late' THEN at END AS late_at"),
    )


def _found_in(topic: str, records: DataFrame, scope: Column, key: Column) -> DataFrame:
    names = {"topic": fn.lit(topic), "scope": scope, "digest": key, "times": fn.lit(1)}
    return records.select(*(value.alias(name) for name, value in names.items()), "partition", "offset")


def _repartitioned(cut: AuditCut, rows: DataFrame) -> Iterator[DataFrame]:
    """Yield the digests that are expected in the repartition topic and the digests found there, each followed by the
    source record's position.
    """
    topic, zero, source = cut.topology.repartition_topic, fn.lit(0), fn.col("source").cast("binary")
    for name in cut.topology.source.topics:
        key = fn.concat(digest(fn.col("headers"), fn.col("timestamp_ms")), path().cast("binary"))
        ends = by_key(cut.ends(name), fn.col("partition"))
        sent = cut.read(name, cut.begins[name]).withColumns(
            {"key": key, "verdict": fn.lit("unique"), "task": fn.col("partition"), "at": fn.col("offset")}
        )
        yield _expected_in(topic, sent, zero, "key", fn.col("at") < ends, fn.col("at") >= ends)
    yield _found_in(topic, rows.where("verdict IS NOT NULL"), zero, fn.concat("raw", source))
    # A source record that the repartition step made a dead letter counts as found.
    stepped = rows.where("verdict IS NULL AND topic IS NOT NULL AND times_dead_letter > 0")
    yield _found_in(topic, stepped, zero, fn.concat("dead_letter.digest", source))


def _digest_claims(cut: AuditCut) -> Iterator[Column]:
    topology, here = cut.topology, _place(cut.log_topic, "task", "at")
    known, whole = all(cut.known.values()), all(cut.complete(topic) for topic in topology.source.topics)
    if topology.output is not None:
        topic = topology.output.topic
        late = fn.concat(
            fn.lit("the rule calls its source record "), _place(cut.log_topic, "task", "late_at"), fn.lit(" late")
        )
        strange = fn.coalesce(late, fn.lit("it is not a record of the source, or was changed"))
        yield from _differences(
            topic,
            here,
            _if_provable(cut.complete(topic), "lost", "unique, but not in the output", WHY_OUTPUT_GONE),
            ("duplicated", "more often in the output than the rule allows"),
            _if_provable(known and whole, "phantom", strange, f"{WHY_SOURCE_GONE} the output"),
        )
    for topic in cut.copies:
        absent, gone = f"not in {topic}, or changed there", f"{topic} has lost its beginning"
        lost = _if_provable(cut.complete(topic), "wrong_duplicate", absent, gone)
        text = "not the record that the rule expects here"
        copy = _if_provable(known, "wrong_duplicate", text, f"{WHY_SOURCE_GONE} {topic}")
        yield from _differences(topic, here, lost, *([copy, copy] if cut.complete(topic) else []))
    if not topology.direct:
        topic = topology.repartition_topic
        yield from _differences(
            topic,
            fn.expr("cast(substring(digest, 17) AS string)"),
            _if_provable(cut.complete(topic), "lost", f"not in {topic}, or changed there", f"purged from {topic}"),
            ("duplicated", f"more than once in {topic}"),
            _if_provable(whole, "phantom", f"in {topic}, but not in the source", f"{WHY_SOURCE_GONE} {topic}"),
        )


def _differences(
    topic: str, here: Column, lost: tuple[str, Column | str], *extra: tuple[str, Column | str]
) -> Iterator[Column]:
    """Yield the claims that find a topic's missing records and, if ``extra`` is given, repeated and unexpected
    records.
    """
    is_it, missing, more = f"topic = '{topic}'", "sure - times", "times - sure - may"
    there = fn.coalesce(_place(topic, "partition", "offset"), here)
    yield _claim(f"{is_it} AND {missing} > 0", here, *lost, missing)
    for said, where in zip(extra, ("originals > 0", "originals = 0"), strict=False):
        yield _claim(f"{is_it} AND {more} > 0 AND {where}", there, *said, more)


def _order_findings(cut: AuditCut, pairs: DataFrame) -> DataFrame:
    """Return a finding for each output record that is out of log order, except records that occur more than once."""
    topic = "" if cut.topology.output is None else cut.topology.output.topic
    by_place = Window.partitionBy("task", "partition").orderBy("offset")
    placed = pairs.where(f"topic = '{topic}' AND sure = 1 AND times = 1")
    text = "it comes after a record that is later in the log of its task"
    overtook = placed.withColumn("before", fn.lag("at").over(by_place))
    return _found(overtook, _claim("before > at", _place(topic, "partition", "offset"), "reordered", text))
