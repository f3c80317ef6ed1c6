"""Finds the differences between expected records and topics, as rows with kind, place, text, and number.

A finding of a kind in `verify.report.MEANINGS` is a violation. A finding of the kind `not_provable` is a record whose
verdict the log cannot prove.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn

from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.spark.audit_cut import by_key
from dedup.spark.audit_expected import digest, forwarded_by_replay, path
from dedup.verify.findings import WHY_OUTPUT_GONE, WHY_SOURCE_GONE
from dedup.verify.replay import FUTURE, REFUSED_BY_THE_BROKER, WHY_CLOCK, WHY_FRONT, WHY_REFUSED, WHY_SIDE_GONE
from dedup.verify.spill import stand_in

if TYPE_CHECKING:
    from dedup.spark.audit_cut import AuditCut, AuditedLog
    from dedup.spark.audit_expected import Sides

NOT_PROVABLE: Final = "not_provable"
_COMPARED: Final = (
    "topic string, scope int, digest binary, sure int, may int, originals int, task int, at long, late_at long, "
    "times int, partition int, offset long"
)


def _claim(
    where: Column, kind: Column | str, place: Column, text: Column | str, number: Column | None = None
) -> Column:
    """Return a finding, as a struct, for each row for which ``where`` is true, and null for all other rows."""
    values = {"kind": kind, "place": place, "text": text, "number": fn.lit(1) if number is None else number}
    columns = {name: fn.lit(value) if isinstance(value, str) else value for name, value in values.items()}
    columns["number"] = columns["number"].cast("long")
    return fn.when(where, fn.struct(*(column.alias(name) for name, column in columns.items())))


def _found(rows: DataFrame, *claims: Column) -> DataFrame:
    """Return the findings of all ``claims`` (results of `_claim`), computed in one pass over the rows."""
    return rows.select(fn.inline(fn.array_compact(fn.array(*claims))))


def _shown(place: str) -> Column:
    """Return ``topic/partition offset n`` for a column that holds ``topic/partition/offset``."""
    return fn.regexp_replace(place, r"/(\d+)$", " offset $1")


def row_findings(cut: AuditCut, log: AuditedLog, sides: Sides, rows: DataFrame) -> Iterator[DataFrame]:
    """Yield findings on single records: errors in late and dead-letter topics, and verdicts that cannot be proven."""
    doubtful = fn.expr("doubtful AND NOT pending AND NOT history AND out IS NOT NULL")
    claims = [_claim(doubtful, NOT_PROVABLE, _shown("source"), WHY_FRONT), *_unexplained(cut)]
    for verdict in sides.topics:
        claims += _filed(cut, sides, verdict)
    # The claims are false for all other rows, which are nearly all rows.
    yield _found(rows.where("doubtful OR verdict IN ('late', 'dead_letter') OR times_dead_letter IS NOT NULL"), *claims)
    for verdict in sides.with_stand_ins if cut.topology.direct else ():
        # The Python function has a column of its own, because Spark evaluates it before the claim.
        words = fn.udf(lambda value: stand_in(value).decode(), "string")
        standing = sides.records.where(f"{verdict}.stand_in IS NOT NULL").select("source", f"{verdict}.stand_in")
        there = log.records.withColumn("source", path()).join(standing, "source")
        other = there.withColumn("other", words("value") != fn.col("stand_in"))
        text = f"its value does not have the digest that is in {sides.topics[verdict]}"
        yield _found(other, _claim(fn.col("other"), "changed", _shown("source"), text))


def _filed(cut: AuditCut, sides: Sides, verdict: str) -> Iterator[Column]:
    """Yield the columns with findings on one side topic."""
    topic, says = sides.topics[verdict], fn.col("verdict")
    times, first = fn.coalesce(f"times_{verdict}", fn.lit(0)), fn.col(verdict)
    here, there = _shown("source"), _shown(f"{verdict}.place")
    again = fn.format_string("source record %s occurs more than once", here)
    yield _claim(times > 1, "duplicated", there, again, times - 1)
    settled = fn.expr("verdict IS NOT NULL AND NOT (history OR pending OR doubtful)")
    is_it, is_there = settled & (says == verdict), settled & (times > 0)
    lost = ("lost", f"{verdict.replace('_', ' ')}, but not in {topic}")
    kind, text = lost if cut.complete(topic) else (NOT_PROVABLE, WHY_SIDE_GONE)
    yield _claim(is_it & (times == 0), kind, here, text)
    wrong = "wrong_late" if verdict == "late" else "wrong_dead_letter"
    rule = fn.format_string("it is in %s; by the rule it is %s", there, says)
    yield _claim(is_there & (says != verdict), wrong, here, rule)
    # The source's headers cannot be read if a name is not UTF-8, so there is nothing to compare them with.
    whole = first["stand_in"].isNull() & (first["reason"] != ODD_HEADER_NAME.code)
    differs = fn.format_string("%s has another key, value, header or original timestamp", there)
    yield _claim(is_it & is_there & whole & (first["digest"] != fn.col("raw")), "changed", here, differs)
    if verdict == "dead_letter":
        other = (first["reason"] != REFUSED_BY_THE_BROKER) & (first["reason"] != fn.col("reason"))
        both = fn.format_string('%s says "%s"; the record says "%s"', there, first["reason"], fn.col("reason"))
        yield _claim(is_it & is_there & other, wrong, here, both)
    yield from _unaccounted(cut, topic, times, there)


def _unaccounted(cut: AuditCut, topic: str, times: Column, there: Column) -> Iterator[Column]:
    """Yield the columns with findings on side records that name no source record, or one that is not in the log."""
    alone, known = fn.expr("verdict IS NULL") & (times > 0), fn.col("topic").isNotNull()
    yield _claim(alone & ~known, "phantom", there, "names no record of the source topics in its headers", times)
    partition, offset = fn.concat_ws("/", "topic", "partition"), fn.col("offset")
    low, committed = (
        by_key({f"{name}/{at}": value for name in cut.begins for at, value in of(name).items()}, partition)
        for of in (cut.lows, cut.committed.__getitem__)
    )
    judged = alone & known & (offset < committed)
    gone = f"the source records that {topic} names are deleted"
    yield _claim(judged & (offset < low), NOT_PROVABLE, there, gone, times)
    kind, text = "phantom", fn.format_string("names %s, which is no record of the source", _shown("source"))
    if not cut.topology.direct:
        # Some records end in the repartition step, and others have been purged from its topic.
        kind, text = NOT_PROVABLE, fn.lit("side records of the repartition step, or of records purged since")
    yield _claim(judged & (offset >= low), kind, there, text, times)


def _unexplained(cut: AuditCut) -> Iterator[Column]:
    """Yield the columns with findings on dead letters that only the broker or a worker's clock explains."""
    dead = fn.expr("verdict = 'dead_letter' AND NOT pending AND NOT history")
    reason, here, ahead_ms = fn.col("reason"), _shown("source"), fn.col("time_ms") - fn.col("before_ms")
    yield _claim(dead & (reason == REFUSED_BY_THE_BROKER), NOT_PROVABLE, here, WHY_REFUSED)
    by_clock = dead & (reason == FUTURE)
    text = "a dead letter for a future time, which stream time had reached: the rule judges it"
    yield _claim(by_clock & (ahead_ms <= 0), "wrong_dead_letter", here, text)
    near = (ahead_ms > 0) & (ahead_ms <= cut.topology.max_clock_skew_ms)
    yield _claim(by_clock & near, NOT_PROVABLE, here, WHY_CLOCK)


def compared(cut: AuditCut, rows: DataFrame) -> DataFrame:
    """Return how often each digest is expected and found in each topic that is compared by digests.

    The result has one row for each `topic`, `scope` (the part of the topic in which the digest may be anywhere), and
    `digest`. The columns `sure` and `may` count how often the digest is expected and possibly expected, `originals`
    counts records that are forwarded unless they repeat another record, and `times` counts how often the digest is
    found. `task` and `at` belong to an expected record, `late_at` to a late record, and `partition` and `offset` to a
    found record.
    """
    topology, zero, headers = cut.topology, fn.lit(0), fn.col("headers")
    settled, live = fn.expr("NOT pending AND NOT doubtful"), rows.where("NOT history")
    parts = [cut.spark.createDataFrame([], _COMPARED)]
    if topology.output is not None and cut.partitions[topology.output.topic]:
        # A record that is in a side topic by mistake is reported for that topic, and is not also expected in the
        # output.
        elsewhere = fn.expr("coalesce(times_late, 0) + coalesce(times_dead_letter, 0) > 0")
        sure, may = fn.col("forwards") & ~elsewhere & settled, ~settled & (fn.col("verdict") != "dead_letter")
        task, partition = (fn.col(name) if topology.direct else zero for name in ("task", "partition"))
        records = cut.read(topology.output.topic).where(~forwarded_by_replay(topology.source.topics))
        stamp = fn.col("timestamp_ms") if cut.stamped else zero
        parts.append(_expected_in(topology.output.topic, live.where("out IS NOT NULL"), task, "out", sure, may))
        parts.append(_found_in(topology.output.topic, records, partition, digest(headers, stamp)))
    for topic, verdicts in cut.copies.items():
        # A task writes to the partition with its own number, which is the source partition only in a direct topology.
        scope, copied = fn.col("task") % cut.partitions[topic], live.where(fn.col("verdict").isin(*verdicts))
        parts.append(_expected_in(topic, copied, scope, "copy", settled, ~settled))
        parts.append(_found_in(topic, cut.read(topic), fn.col("partition"), digest(headers, zero)))
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
        fn.when(fn.col("verdict") == "late", fn.col("at")).alias("late_at"),
    )


def _found_in(topic: str, records: DataFrame, scope: Column, key: Column) -> DataFrame:
    names = {"topic": fn.lit(topic), "scope": scope, "digest": key, "times": fn.lit(1)}
    return records.select(*(value.alias(name) for name, value in names.items()), "partition", "offset")


def _repartitioned(cut: AuditCut, rows: DataFrame) -> Iterator[DataFrame]:
    """Yield the digests that are expected and found in the repartition topic; each includes the source record's place.

    A dead letter of the repartition step counts as found.
    """
    topic, zero, source = cut.topology.repartition_topic, fn.lit(0), fn.col("source").cast("binary")
    for name in cut.topology.source.topics:
        key = fn.concat(digest(fn.col("headers"), fn.col("timestamp_ms")), path().cast("binary"))
        ends = by_key({**cut.begins[name], **cut.committed[name]}, fn.col("partition"))
        sent = cut.read(name, cut.begins[name]).withColumns(
            {"key": key, "verdict": fn.lit("unique"), "task": fn.col("partition"), "at": fn.col("offset")}
        )
        yield _expected_in(topic, sent, zero, "key", fn.col("at") < ends, fn.col("at") >= ends)
    yield _found_in(topic, rows.where("verdict IS NOT NULL"), zero, fn.concat("raw", source))
    stepped = rows.where("verdict IS NULL AND topic IS NOT NULL AND times_dead_letter > 0")
    yield _found_in(topic, stepped, zero, fn.concat("dead_letter.digest", source))


def digest_findings(cut: AuditCut, log: AuditedLog, pairs: DataFrame) -> DataFrame:
    """Return the findings on missing, repeated, and unexpected records; ``pairs`` is the result of `compared`."""
    topology, claims = cut.topology, list[Column]()
    known, whole = all(log.known.values()), all(cut.complete(topic) for topic in topology.source.topics)
    if topology.output is not None:
        topic = topology.output.topic
        lost = ("lost", "unique, but not in the output") if cut.complete(topic) else (NOT_PROVABLE, WHY_OUTPUT_GONE)
        again = ("duplicated", "more often in the output than the rule allows")
        late = fn.concat(fn.lit("the rule calls its source record "), _logged(cut, "late_at"), fn.lit(" late"))
        strange = ("phantom", fn.coalesce(late, fn.lit("it is not a record of the source, or was changed")))
        gone = (NOT_PROVABLE, fn.lit(f"{WHY_SOURCE_GONE} the output"))
        claims += _differences(topic, _logged(cut, "at"), lost, again, strange if known and whole else gone)
    for topic in cut.copies:
        lost = ("wrong_duplicate", f"not in {topic}, or changed there")
        lost = lost if cut.complete(topic) else (NOT_PROVABLE, f"{topic} has lost its beginning")
        text = "not the record that the rule expects here"
        copy = ("wrong_duplicate", text) if known else (NOT_PROVABLE, f"{WHY_SOURCE_GONE} {topic}")
        claims += _differences(topic, _logged(cut, "at"), lost, *([copy, copy] if cut.complete(topic) else []))
    if not topology.direct:
        topic, source = topology.repartition_topic, fn.expr("cast(substring(digest, 17) AS string)")
        lost = ("lost", f"not in {topic}, or changed there")
        lost = lost if cut.complete(topic) else (NOT_PROVABLE, f"purged from {topic}")
        again, other = ("duplicated", f"more than once in {topic}"), ("phantom", f"in {topic}, but not in the source")
        other = other if whole else (NOT_PROVABLE, f"{WHY_SOURCE_GONE} {topic}")
        claims += _differences(topic, source, lost, again, other)
    return _found(pairs, *claims)


def _logged(cut: AuditCut, offset: str) -> Column:
    return _place(cut.topology.feeding_topics[0], "task", offset)


def _differences(topic: str, here: Column, lost: tuple[str, str], *extra: tuple[str, Column | str]) -> Iterator[Column]:
    """Yield the columns with findings on the records of one topic.

    ``lost`` contains the kind and the text for missing records. ``extra`` contains the kinds and the texts for repeated
    and for unexpected records, if these are to be reported.
    """
    is_it, there = fn.col("topic") == topic, fn.coalesce(_place(topic, "partition", "offset"), here)
    missing, more = fn.expr("sure - times"), fn.expr("times - sure - may")
    yield _claim(is_it & (missing > 0), lost[0], here, lost[1], missing)
    for (kind, text), where in zip(extra, (fn.col("originals") > 0, fn.col("originals") == 0), strict=False):
        yield _claim(is_it & (more > 0) & where, kind, there, text, more)


def order_findings(cut: AuditCut, pairs: DataFrame) -> DataFrame:
    """Return the findings on records that are out of their task's order; only records that occur once are compared."""
    topic = "" if cut.topology.output is None else cut.topology.output.topic
    by_place = Window.partitionBy("task", "partition").orderBy("offset")
    placed = pairs.where((fn.col("topic") == topic) & fn.expr("sure = 1 AND times = 1"))
    text = "it comes after a record that is later in the log of its task"
    overtook = placed.withColumn("before", fn.lag("at").over(by_place)).where("before > at")
    return _found(overtook, _claim(fn.expr("true"), "reordered", _place(topic, "partition", "offset"), text))


def _place(topic: str, partition: str, offset: str) -> Column:
    """Return ``topic/partition offset n``, or null if the offset is null."""
    parts = (fn.lit(f"{topic}/"), fn.col(partition), fn.lit(" offset "), fn.col(offset))
    return fn.concat(*(part.cast("string") for part in parts))
