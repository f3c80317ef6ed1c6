"""Verifies a topology with a repartition topic.

Every source record must be in the repartition topic, unchanged and only once, and the verdicts on the records of the
repartition topic must be those of the model. For records that were deleted from the repartition topic, only the checks
that do not depend on order are made (`findings.OrderFree`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from dedup.core.reference_model import Feed
from dedup.core.window import Source
from dedup.verify.compare import Wanted, digest, matched
from dedup.verify.cut import WHY_OPEN, Cut, WrittenPartition
from dedup.verify.direct import WHY_BEFORE, WHY_COMPACTED, WHY_NO_OFFSET, keep, report_leftovers
from dedup.verify.evidence import (
    IDLE_HEADER,
    SOURCE_HEADER,
    TIMESTAMP_HEADER,
    extracted_of,
    header,
    parse_source,
    parse_time_ms,
)
from dedup.verify.findings import (
    WHY_OUTPUT_GONE,
    Copies,
    OrderFree,
    copy_topics,
    explain,
    report_displaced,
    report_lost,
)
from dedup.verify.kafka_reader import RecordColumns
from dedup.verify.replay import LogScan, Row, TaskReplay
from dedup.verify.report import Books
from dedup.verify.spill import Spill, buckets_for, condensed, place_of

_APPENDED: Final = 2
"""Number of headers that a repartition task appends: source position or idle feed, and timestamp."""
WHY_PURGED: Final = "purged from the repartition topic; checked without order: nothing lost, no ID twice"
_AFTER_ALL: Final = 1 << 62
_REPORTED: Final = -1


@dataclass(slots=True)
class _Step:
    """The records of the source topics and of the repartition topic, in buckets."""

    feeds: list[Feed]
    logs: list[tuple[Books, Spill]]
    """The judged records of each partition of the repartition topic whose beginning was not deleted."""
    without_id: tuple[Books, Spill]
    """Source records without an ID that are not in the repartition topic."""
    carried: Spill
    """The source position and digest of each record in the repartition topic."""
    judged: Spill
    """The source position, digest, ID, and event time of each source record."""
    absent: Spill
    """The source position, ID, and event time of each source record that the repartition topic may have lost."""
    unseen: Spill
    """Records that are absent from an incomplete output, as (task, position, source position)."""
    purged: bool
    """True if a partition of the repartition topic has lost its beginning."""
    firsts: dict[Feed, int] = field(default_factory=dict)
    """Maps each source partition to the lowest of its offsets in the repartition topic."""
    spans: dict[Feed, tuple[int, int]] = field(default_factory=dict)
    """Maps each source partition to the range [first, end) of offsets that were read."""


def verify_repartitioned(cut: Cut) -> None:
    """Replay the repartition topic, compare the output with the verdicts, and account for every source record."""
    log, output = cut.topology.repartition_topic, cut.topology.output
    topics = (log, *cut.topology.source.topics)
    buckets = buckets_for(sum(bounds.high - bounds.low for topic in topics for bounds in cut.bounds[topic].values()))
    written: list[WrittenPartition] = []
    stamped = cut.plan.rules.future != "clamp"
    if output is not None:
        numbers = range(cut.partitions[output.topic])
        written = [cut.written(output.topic, partition, buckets, stamped=stamped) for partition in numbers]
    stamped = stamped and not any(each.broker_time for each in written)
    cut.plan = replace(cut.plan, output_stamped=stamped)
    purged = {partition for partition, bounds in cut.bounds[log].items() if bounds.start_deleted}
    copied = {topic: range(cut.partitions[topic]) for topic in copy_topics(cut).values()}
    copies = Copies(cut, buckets, copied, known=True, purged=purged)
    without_id = (Books("past the repartition topic", 0), cut.spill(buckets))
    carried, judged, absent = (cut.spill(buckets) for _ in range(3))
    step = _Step(cut.feeds, [], without_id, carried, judged, absent, cut.spill(1), bool(purged))
    for partition in range(cut.partitions[log]):
        # Any feed may be far ahead of stream time, so the event times of deleted records are unknown.
        if partition not in purged:
            _read_log(cut, step, log, partition, buckets)
    _read_sources(cut, step)
    for number in range(buckets):
        _account(cut, step, number)
    for number in range(buckets):
        _judge(cut, step, written, copies, number)
    report_displaced(written, cut.report)
    _report_unseen(cut, step, written)
    if without_id[0].read:
        cut.report.books.append(without_id[0])
    _count_pending(cut, log)
    copies.conclude()
    cut.report.method = "replay of the repartition topic"
    if purged:
        cut.report.method += ", order-free checks of purged records"
    else:
        report_leftovers(cut)


def _count_pending(cut: Cut, log: str) -> None:
    """Count the pending offsets of all source and repartition partitions, and add missing partitions to the report."""
    known = {(books.topic, books.partition): books for books in cut.report.books}
    for topic in (*cut.topology.source.topics, log):
        for partition in range(cut.partitions[topic]):
            books = known.get((topic, partition)) or Books(topic, partition)
            books.pending = cut.pending(topic, partition)
            if books.pending and (topic, partition) not in known:
                cut.report.books.append(books)


def _read_log(cut: Cut, step: _Step, log: str, partition: int, buckets: int) -> None:
    books = Books(log, partition)
    cut.report.books.append(books)
    spill = cut.spill(buckets)
    step.logs.append((books, spill))
    if partition not in cut.committed[log]:
        bounds = cut.bounds[log][partition]
        cut.report.unprovable(WHY_NO_OFFSET, bounds.high - bounds.low)
    for row in log_rows(cut, partition):
        if keep(cut, spill, row):
            topic, source_partition, offset = row.source
            feed = (topic, source_partition)
            step.firsts[feed] = min(offset, step.firsts.get(feed, offset))
            content = digest(row.key, row.value, row.headers, row.timestamp_ms)
            step.carried.add(hash(row.source), (*row.source, content))


def log_rows(cut: Cut, partition: int, only: Collection[bytes] | None = None) -> Iterator[Row]:
    """Yield the records of a partition of the repartition topic up to its end, as they were in the source topic.

    ``only`` are the IDs of the records to return, by default all records.
    """
    log = cut.topology.repartition_topic
    bounds = cut.bounds[log][partition]
    committed = cut.committed[log].get(partition, bounds.low)
    scan = LogScan(cut.plan, cut.begun_feeds, from_start=not bounds.start_deleted)
    high = cut.reader.bounds(log, [partition])[partition].high
    for begin, end, pending in ((bounds.low, committed, False), (committed, high, True)):
        for columns in cut.read(log, partition, begin, end):
            sources, idle_rows = _unwrap(cut, columns, partition)
            yield from scan.rows(columns, sources, idle_rows=idle_rows, pending=pending, only=only)


def _unwrap(cut: Cut, columns: RecordColumns, partition: int) -> tuple[list[Source], set[int]]:
    """Restore the source records, and return their source positions and the rows of idle markers."""
    sources: list[Source] = []
    idle_rows: set[int] = set()
    topics = cut.topology.source.topics
    for row, headers in enumerate(columns.headers):
        # Only the last two headers count. An upstream topology may have added headers with the same names before.
        appended = headers[-_APPENDED:]
        marker = header(appended, IDLE_HEADER)
        position = header(appended, SOURCE_HEADER) if marker is None else marker + b"/0"
        source = parse_source(position, topics)
        if source is None:
            where = f"{cut.topology.repartition_topic}/{partition} offset {columns.offsets[row]}"
            cut.report.violation("phantom", where, "names no source record, so no repartition task wrote it")
        if source is None or marker is not None:
            idle_rows.add(row)
            # No source record has offset -1, so no record of a side topic is matched with the marker.
            source = (source or Source(0, 0, -1))._replace(offset=-1)
        columns.headers[row] = headers[:-_APPENDED]
        columns.timestamps_ms[row] = parse_time_ms(header(appended, TIMESTAMP_HEADER)) or 0
        sources.append(source)
    return sources, idle_rows


def _read_sources(cut: Cut, step: _Step) -> None:
    """Add every judged source record to a bucket."""
    for feed in step.feeds:
        topic, partition = cut.topology.source.topics[feed[0]], feed[1]
        committed = cut.committed[topic].get(partition)
        bounds = cut.bounds[topic][partition]
        if committed is None:
            cut.report.unprovable(WHY_NO_OFFSET, bounds.high - bounds.low)
            continue
        # For records without an ID, order does not matter, because stream time does not influence their verdicts.
        scan = LogScan(cut.plan, step.feeds, from_start=True)
        start = cut.configured_start(topic, partition)
        if start is None:
            # `latest` stores no offset, so the first record in the repartition topic determines the start.
            start = step.firsts.get(feed, bounds.high)
            if step.purged:
                cut.report.unprovable(WHY_BEFORE, max(0, min(start, committed) - bounds.low))
        step.spans[feed] = (start, committed)
        for columns in cut.read(topic, partition, start, committed):
            _read_source(cut, step, feed, columns, scan)


def _read_source(cut: Cut, step: _Step, feed: Feed, columns: RecordColumns, scan: LogScan) -> None:
    extracted = extracted_of(cut.plan.extract, columns)
    some = columns.rows(sorted(extracted.faults))
    rows = scan.rows(some, [Source(*feed, offset) for offset in some.offsets])
    faulty = {found.position: found for found in rows}
    for at, offset in enumerate(columns.offsets):
        own = None if at in extracted.faults else extracted.ids[at]
        value = condensed(columns.values[at])
        if cut.sample > 1 and not cut.sampled(place_of(own, columns.keys[at], value)):
            continue
        content = digest(columns.keys[at], value, columns.headers[at], columns.timestamps_ms[at])
        source = (*feed, offset)
        # Only a record that the repartition topic may have lost is looked up by its ID.
        line = (*source, content, own if step.purged else None, extracted.times_ms[at], faulty.get(offset))
        step.judged.add(hash(source), line)


def _account(cut: Cut, step: _Step, number: int) -> None:
    """Check that each source record with a usable ID is in the repartition topic, unchanged and only once."""
    held: dict[Source, bytes] = {}
    for topic, partition, offset, content in step.carried.bucket(number):
        source = Source(topic, partition, offset)
        if source in held:
            cut.report.violation("duplicated", cut.plan.place(source), "it is in the repartition topic twice")
        held[source] = content
    for topic, partition, offset, content, own, time_ms, faulty in step.judged.bucket(number):
        source = Source(topic, partition, offset)
        there = held.pop(source, None)
        if there is None:
            if faulty is not None:
                keep(cut, step.without_id[1], Row.of(faulty))
            elif cut.plan.dead_letters.take([source]):
                cut.report.unprovable("dead letters of the repartition step")
            elif not step.purged:
                cut.report.violation("lost", cut.plan.place(source), f"not in {cut.topology.repartition_topic}")
            else:
                step.absent.add(place_of(own, None, None), (*source, own, time_ms))
        elif there != content:
            cut.report.violation("changed", cut.plan.place(source), "its content in the repartition topic is different")
    for source in held:
        _report_unsent(cut, step, source)


def _report_unsent(cut: Cut, step: _Step, source: Source) -> None:
    """Report a record that is in the repartition topic but not in the source."""
    start, end = step.spans.get((source.topic, source.partition), (0, 0))
    if start <= source.offset < end and cut.topology.source.topics[source.topic] in cut.compacted:
        cut.report.unprovable(WHY_COMPACTED)
    elif start <= source.offset < end:
        text = f"it is in {cut.topology.repartition_topic}, but not in the source"
        cut.report.violation("phantom", cut.plan.place(source), text)


def _judge(cut: Cut, step: _Step, written: list[WrittenPartition], copies: Copies, number: int) -> None:
    """Judge the records of a bucket, and compare the output and the copies of duplicates with the verdicts."""
    tasks: list[TaskReplay] = []
    owners: dict[bytes, int] = {}
    for books, spill in (*step.logs, step.without_id):
        task = TaskReplay(cut.plan, books, cut.report, cut.begun_feeds)
        task.take(_checked_owner(cut, books, map(Row.of, spill.bucket(number)), owners))
        tasks.append(task)
    copies.judge(number, tasks[: len(step.logs)], cut.report)
    seen = [each.bucket(number) for each in written]
    if step.purged:
        free = OrderFree(cut, written, seen)
        for topic, partition, offset, own, time_ms in step.absent.bucket(number):
            free.must_be_somewhere(own, time_ms, Source(topic, partition, offset))
            cut.report.unprovable(WHY_PURGED)
    if cut.topology.output is None:
        return
    found = matched([task.forwarded for task in tasks], seen)
    for at, each in enumerate(written):
        own = ((record.offset, *_track(step, task, wanted)) for in_, record, task, wanted in found.matched if in_ == at)
        each.order.match(own)
    if step.purged:
        # Records that have since been deleted were also forwarded, so an unknown record in the output is no violation.
        found.extra.clear()
    partial = any(each.bounds.start_deleted or each.truncated for each in written)
    for number_of_task, wanted in explain(found, tasks, written, cut.report, partial=partial):
        step.unseen.add(0, (number_of_task, wanted.position, *wanted.source))


def _track(step: _Step, task: int, wanted: Wanted) -> tuple[int, int]:
    """Return the task or source partition whose order a record must keep, and the record's position there."""
    past = task == len(step.logs)
    return task + (step.feeds.index(wanted.source[:2]) if past else 0), wanted.position


def _report_unseen(cut: Cut, step: _Step, written: list[WrittenPartition]) -> None:
    """Report absent records as lost unless they may have been in the missing part of the output."""
    truncated = any(each.truncated for each in written)
    gone: dict[int, int] = {}
    for task in range(len(step.logs)):
        firsts = [each.order.first_position(task) for each in written if each.bounds.start_deleted]
        gone[task] = max((_AFTER_ALL if first is None else first for first in firsts), default=0)
    for task, position, *source in step.unseen.bucket(0):
        if truncated or position < gone.get(task, _AFTER_ALL):
            books, _ = step.logs[task] if task in gone else step.without_id
            books.not_provable += 1
            cut.report.unprovable(WHY_OPEN if truncated else WHY_OUTPUT_GONE)
        else:
            report_lost(written, cut.plan.place(Source(*source)), cut.report)


def _checked_owner(cut: Cut, books: Books, rows: Iterator[Row], owners: dict[bytes, int]) -> Iterator[Row]:
    """Yield the rows, and report each ID that is also in another partition, because two tasks judged the ID."""
    for row in rows:
        owner = _REPORTED if row.id is None else owners.setdefault(row.id, books.partition)
        if row.id is not None and owner not in {books.partition, _REPORTED}:
            owners[row.id] = _REPORTED
            text = f"its tracking ID is in partition {owner} too, so two tasks judged it"
            cut.report.violation("duplicated", f"{books.topic}/{books.partition} offset {row.position}", text)
        yield row
