"""Verifies a topology that reads its source topic directly, by replaying each source partition in log order.

A compacted source cannot be replayed, so the module runs only the checks that do not depend on order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Final

import numpy as np

from dedup.core.formats import SCHEMA_UNKNOWN
from dedup.core.window import Source
from dedup.verify.compare import SeenColumns, contents_of, matched_at_once
from dedup.verify.cut import WHY_OPEN, Cut, WrittenPartition
from dedup.verify.evidence import extracted_of
from dedup.verify.findings import (
    WHY_OUTPUT_GONE,
    WHY_SOURCE_GONE,
    Copies,
    OrderFree,
    copy_topics,
    explain,
    report_displaced,
)
from dedup.verify.flow_outputs import WHY_UNORDERED
from dedup.verify.kafka_reader import Bounds, OpenTransaction, RecordColumns, read_left
from dedup.verify.log_scan import Log, LogScan, Original, Plan, forwarded_digest, schema_named
from dedup.verify.replay import TaskReplay
from dedup.verify.report import Books, Report
from dedup.verify.spill import Spill, buckets_for, places_of

WHY_NO_OFFSET: Final = "the group has no committed offset for their partition, so what was judged is not known"
WHY_COMPACTED: Final = "compaction removed records between them; checked without order: no ID twice, none missing"
WHY_BEFORE: Final = "source offsets before the first record that left a trace; where `start: latest` began is not known"


def verify_direct(cut: Cut) -> None:
    """Verify every partition of the source topic, and report unexpected records in the late and dead-letter topics."""
    source = cut.topology.source.topics[0]
    # Each record that a flow sends names its source record, so a compacted output does not prevent the replay.
    named = {source, *(cut.topology.forwards_to if cut.plan.flowed is None else ())} & cut.compacted
    if named:
        cut.report.method = f"order-free checks: {' and '.join(sorted(named))} is compacted"
        _verify_compacted(cut, source)
        return
    for partition in range(cut.partitions[source]):
        _verify_partition(cut, source, partition)
        cut.free()
    report_leftovers(cut)


@dataclass(slots=True)
class _Partition:
    """One source partition, and the records that workers wrote for it."""

    cut: Cut
    plan: Plan
    books: Books
    log: Spill
    output: WrittenPartition | None
    copies: Copies
    known: bool
    """True if certainly no record before the first record that is read was judged."""
    excused_below: int | None = None
    """The output offset below which records come from deleted source records, or None until it is known."""
    gone_position: int = -1
    """The log position below which records may have been forwarded to the deleted beginning of the output."""
    uncertain: bool = False
    pending_found: int = 0


def _verify_partition(cut: Cut, source: str, partition: int) -> None:
    books = Books(source, partition)
    cut.report.books.append(books)
    bounds = cut.bounds[source][partition]
    committed = cut.committed[source].get(partition)
    buckets = buckets_for(bounds.high - bounds.low)
    output = output_of(cut, partition, buckets)
    books.pending = cut.pending(source, partition)
    if committed is None:
        cut.report.unprovable(WHY_NO_OFFSET, output.spill.rows if output is not None else books.pending)
        return
    read = partial(_read_log, cut, books, output, committed, buckets)
    plan, log, known, filed = cut.again(read, partial(cut.plan.give_back, (0, partition)))
    held = _Partition(cut, plan, books, log, output, _copies(cut, partition, buckets, known=known), known)
    _judge(held)
    _balance(held, filed)


def _read_log(
    cut: Cut, books: Books, output: WrittenPartition | None, committed: int, buckets: int
) -> tuple[Plan, Spill, bool, int]:
    """Read a source partition, and return its records and the number of its entries in side topics.

    The result also contains the plan for judging the records, and whether no earlier record was judged.
    """
    source, partition = books.topic, books.partition
    plan = _plan_for(cut.plan, output)
    untraced = output is None and plan.flowed is None and cut.configured_start(source, partition) is None
    start, known = start_of(cut, partition, output)
    bounds = cut.bounds[source][partition]
    books.skipped = start - bounds.low
    if untraced:
        cut.report.unprovable(WHY_BEFORE, max(0, min(start, committed) - bounds.low))
    log = cut.log_spill(buckets)
    filed = 0  # The number of this partition's records in the late and dead-letter topics.
    # Workers may have continued after the cut, so there may be later output records and a later committed offset.
    spans = ((start, committed, False), (committed, cut.still_committed(source, partition), True))
    for read in source_log(cut, plan, partition, spans, known=known):
        odd = [each for each in keep(cut, log, read).odd if each is not None and not each.pending]
        filed += sum((each.late is not None) + (each.letter is not None) for each in odd)
    if cut.sample == 1:
        filed += sum(side.count_below((0, partition), committed) for side in plan.sides)
    return plan, log, known, filed


def source_log(
    cut: Cut,
    plan: Plan,
    partition: int,
    spans: Iterable[tuple[int, int, bool]],
    *,
    known: bool,
    only: Collection[bytes] | None = None,
) -> Iterator[Log]:
    """Yield a source partition's records in the given ranges of offsets. Each range is (first, end, pending).

    If ``only`` is given, the function yields only records whose IDs are in ``only``.
    """
    scan, source = LogScan(plan, ((0, partition),), from_start=known), cut.topology.source.topics[0]
    low = cut.bounds[source][partition].low
    for begin, end, pending in spans:
        # A task may have stopped at a pending record without an append time, so only judged records must have one.
        read = cut.read if pending else cut.read_judged
        for columns in read(source, partition, max(begin, low), end):
            sources = list(zip(repeat(0), repeat(partition), columns.offsets))
            yield scan.scan(columns, sources, pending=pending, only=only)


def keep(cut: Cut, spill: Spill, log: Log) -> Log:
    """Add the sampled records to their buckets and return them, and count all other records."""
    note_schemas_gone(cut, log)
    kept = cut.sampled(log.ids, log.contents)
    if len(kept) < len(log.ids):
        cut.report.unsampled += len(log.ids) - len(kept)
        log = log.at(kept)
    size_bytes = 0
    if any(log.headers):
        size_bytes = sum(len(content or b"") for headers in log.headers for _, content in headers)
    if cut.plan.flowed is not None:
        size_bytes += sum(len(each.key or b"") + len(each.value or b"") for each in log.flowed if each is not None)
    spill.add(places_of(log.ids, log.contents), log, size_bytes)
    return log


def note_schemas_gone(cut: Cut, log: Log) -> None:
    """Add to the report the judged records that cannot be judged again because their schema was deleted."""
    for row in log.at(np.flatnonzero([each is not None for each in log.odd])).rows() if cut.names_schemas else ():
        if row.odd.schema and not row.odd.pending:
            cut.report.schema_gone(row.odd.schema, cut.plan.place(row.source))


def _judge(held: _Partition) -> None:
    if held.output is not None and held.output.bounds.start_deleted:
        held.gone_position = _gone_position(held, held.output)
    if held.output is not None and not held.known:
        # Two passes are needed, because only the first pass finds the first output record that the log explains.
        for number in range(held.log.buckets):
            _judge_bucket(held, number, Report("", "", "", 0), Books("", 0))
        held.excused_below = held.output.order.first_matched()
        held.output.order.forget()
        held.pending_found, held.uncertain = 0, False
    for number in range(held.log.buckets):
        _judge_bucket(held, number, held.cut.report, held.books)
    if held.output is not None:
        report_displaced([held.output], held.cut.report)
    held.copies.conclude()


def _judge_bucket(held: _Partition, number: int, report: Report, books: Books) -> None:
    task = TaskReplay(held.plan, books, report, ((0, held.books.partition),))
    task.take(Log(*held.log.bucket(number)))
    if held.output is not None:
        _excuse_deleted(held, task, report)
        _compare_output(held, task, held.output, held.output.bucket(number), report)
    held.copies.judge(number, [task], report)
    held.uncertain = held.uncertain or task.uncertain


def _compare_output(
    held: _Partition, task: TaskReplay, output: WrittenPartition, seen: SeenColumns, report: Report
) -> None:
    found = matched_at_once([task.forwarded], [seen], from_end=not held.known)
    # An optional record may match the output of an equal, deleted source record, so its order is not checked.
    all_sure = held.excused_below is None and not (held.known and task.schema_gone)
    output.order.match(*found.places(0, optional=all_sure))
    held.pending_found += sum(wanted.pending for *_, wanted in found.matched)
    extra = [each for each in found.extra if each[1].offset >= (held.excused_below or 0)]
    report.unprovable(f"{WHY_SOURCE_GONE} {output.topic}", len(found.extra) - len(extra))
    found.extra = extra
    unseen = len(explain(found, [task], [output], report, partial=output.truncated))
    task.books.not_provable += unseen
    report.unprovable(WHY_OPEN, unseen)


def _balance(held: _Partition, filed: int) -> None:
    cut, books, output = held.cut, held.books, held.output
    if output is None or held.uncertain or output.bounds.start_deleted or output.truncated or not held.known:
        return
    if cut.plan.late is None and not cut.plan.late_forwarded:
        filed += books.late  # The topology drops late records.
    books.ended = output.spill.rows - held.pending_found + books.duplicates + filed
    if not books.balanced:
        text = f"read {books.read}, but {books.ended} ended as unique, duplicate, late, or dead letter"
        cut.report.violation("unbalanced", f"{books.topic}/{books.partition}", text)


def _gone_position(held: _Partition, output: WrittenPartition) -> int:
    """Return the log position of the first record that is still in the output."""
    if output.first_kept is None:
        return 1 << 62
    place, first = output.first_kept
    task = TaskReplay(held.plan, Books("", 0), Report("", "", "", 0), ((0, held.books.partition),))
    task.take(Log(*held.log.bucket(place % held.log.buckets)))
    positions = [wanted.position for wanted in task.forwarded.one_by_one() if wanted.digest == first]
    # If several expected records are equal, the output still contains the last of these records.
    there = output.bucket(place % held.log.buckets).digests.count(first)
    return positions[-there:][0] if positions else -1


def _excuse_deleted(held: _Partition, task: TaskReplay, report: Report) -> None:
    """Mark expected records before the output's first record as optional, because the output may have lost them."""
    if held.gone_position < 0:
        return
    excused, forwarded = 0, task.forwarded.one_by_one()
    for row, wanted in enumerate(forwarded):
        if wanted.position < held.gone_position and not wanted.optional:
            forwarded[row] = wanted._replace(optional=True)
            excused += 1
    task.books.not_provable += excused
    report.unprovable(WHY_OUTPUT_GONE, excused)


def _copies(cut: Cut, partition: int, buckets: int, *, known: bool) -> Copies:
    """Return a checker for the duplicates and conflicts of a source partition."""
    whole: dict[str, list[int]] = {}
    count = cut.partitions[cut.topology.source.topics[0]]
    for topic in copy_topics(cut).values():
        if cut.partitions[topic] >= count:
            # No task writes to partitions whose numbers the source does not have.
            whole[topic] = [partition, *(range(count, cut.partitions[topic]) if partition == 0 else ())]
        elif partition == 0:
            held = sum(each.high - each.low for each in cut.bounds[topic].values())
            cut.report.unprovable(f"{topic} has fewer partitions than the source", held)
    return Copies(cut, buckets, whole, known=known, purged=())


def _verify_compacted(cut: Cut, source: str) -> None:
    """Run only the checks that do not depend on order, because compaction has removed records that affect verdicts."""
    buckets = buckets_for(sum(each.high - each.low for each in cut.bounds[source].values()))
    numbers = range(cut.partitions[source])
    written = [each for partition in numbers if (each := output_of(cut, partition, buckets)) is not None]
    judged = cut.spill(buckets, 3, 1)
    for partition in numbers:
        bounds, committed = cut.bounds[source][partition], cut.committed[source].get(partition)
        if committed is None:
            cut.report.unprovable(WHY_NO_OFFSET, bounds.high - bounds.low)
            continue
        output = written[partition] if written else None
        untraced = cut.configured_start(source, partition) is None
        start, _ = cut.again(partial(start_of, cut, partition, output))
        if untraced:
            cut.report.unprovable(WHY_BEFORE, max(0, min(start, committed) - cut.bounds[source][partition].low))
        for columns in read_left(cut.read_judged, cut.begin_later, source, partition, start, committed):
            _add_judgeable(cut, judged, columns, partition)
            cut.report.unprovable(WHY_COMPACTED if cut.plan.flowed is None else WHY_UNORDERED, len(columns.offsets))
    for number in range(buckets):
        free = OrderFree(cut, written, (each.bucket(number) for each in written))
        *parts, ids = judged.bucket(number)
        for partition, offset, time_ms, own in zip(*(each.tolist() for each in parts), ids, strict=True):
            free.must_be_somewhere(own, time_ms, Source(0, partition, offset))


def _add_judgeable(cut: Cut, judged: Spill, columns: RecordColumns, partition: int) -> None:
    """Add each record that had to be judged to its bucket. A row contains the partition, offset, event time, and ID."""
    extracted, holds = extracted_of(cut.plan.extract, columns), cut.plan.dead_letters.holds
    rows = [
        (partition, offset, time_ms, own)
        for offset, time_ms, own in zip(columns.offsets, extracted.times_ms, extracted.ids, strict=True)
        if own is not None and not holds(Source(0, partition, offset))
    ]
    for at, fault in extracted.faults.items():
        source = Source(0, partition, columns.offsets[at])
        if fault.code == SCHEMA_UNKNOWN and not holds(source):
            schema = schema_named(cut.plan, columns.keys[at], columns.values[at], columns.headers[at])
            cut.report.schema_gone(schema, cut.plan.place(source))
    faulty = [at for at, fault in sorted(extracted.faults.items()) if fault.code != SCHEMA_UNKNOWN]
    _judge_faulty(cut, columns.rows(faulty), partition)
    ids = [own for *_, own in rows]
    sampled = cut.sampled(ids, ids)
    judged.add(places_of(ids, ids)[sampled], [[rows[at][column] for at in sampled.tolist()] for column in range(4)])


def _judge_faulty(cut: Cut, columns: RecordColumns, partition: int) -> None:
    """Check the dead letters of records with a fault, whose verdicts do not depend on other records."""
    scan = LogScan(cut.plan, ((0, partition),), from_start=True)
    log = scan.scan(columns, [(0, partition, offset) for offset in columns.offsets])
    task = TaskReplay(cut.plan, Books("", 0), cut.report, ((0, partition),))
    task.in_order = False
    task.take(log.at(cut.sampled(log.ids, log.contents)))


def output_of(cut: Cut, partition: int, buckets: int) -> WrittenPartition | None:
    """Return the given partition of the output topic, or None if the topology has no output topic."""
    output = cut.topology.output
    if output is None or cut.plan.flowed is not None:
        return None  # `TaskReplay` compares the records that a flow has sent.
    # A topic that does not exist has empty bounds.
    cut.bounds[output.topic].setdefault(partition, Bounds(0, 0, start_deleted=False))
    # If times in the future are clamped, the timestamps in the output may come from the worker's clock.
    return cut.written(output.topic, partition, buckets, stamped=not cut.plan.clamps_timestamps)


def _plan_for(plan: Plan, output: WrittenPartition | None) -> Plan:
    stamped = not plan.clamps_timestamps and not (output is not None and output.broker_time)
    late = output.late_digests if plan.late_forwarded and output is not None else None
    return replace(plan, output_stamped=stamped, late_digests=late)


def start_of(cut: Cut, partition: int, output: WrittenPartition | None) -> tuple[int, bool]:
    """Return a source partition's first judged offset, and whether certainly no earlier record was judged."""
    topic = cut.topology.source.topics[0]
    start = cut.configured_start(topic, partition)
    begin, bounds = cut.begins[topic].get(partition), cut.bounds[topic][partition]
    if start is not None and begin is not None:
        return start, begin >= bounds.low
    plan = _plan_for(cut.plan, output)
    time_ms = cut.topology.source.start
    if start is not None and (not isinstance(time_ms, int) or not plan.output_stamped):
        return start, start > bounds.low or not bounds.start_deleted
    first, end = bounds.low, bounds.high if start is None or bounds.start_deleted else start
    if start is not None and isinstance(time_ms, int) and not (output and output.may_begin_before(time_ms)):
        first = start  # All records before ``start`` have lower timestamps, so they need not be read.
    traced = _first_judged(cut, plan, replace(bounds, high=end), partition, output, first)
    if start is None:
        # Without an output, a unique record leaves no trace.
        known = (traced > bounds.low or not bounds.start_deleted) and (output or plan.flowed) is not None
        start = max(bounds.low, traced)
    else:
        # Despite a start time, a record at an earlier offset was judged if it came after the start, or after a record
        # that retention has deleted.
        known = not bounds.start_deleted or start <= traced < end
        if known and traced >= start:
            return start, True
        start = min(start, max(bounds.low, traced))
    if output is not None and output.bounds.start_deleted and start > bounds.low:
        # The output records of earlier source records may have been deleted.
        cut.starts[partition] = start
        known = False
    return start, known


def _first_judged(
    cut: Cut, plan: Plan, bounds: Bounds, partition: int, output: WrittenPartition | None, first: int
) -> int:
    """Return the first source offset with a result in a topic, or ``bounds.high`` if no lower offset has a result.

    The first judged offset is not stored anywhere. If the returned offset is below ``bounds.low``, its record was
    judged and later deleted by retention. The caller knows that the output contains no record from before ``first``.
    """
    traces = [side.first_offset((0, partition)) for side in (plan.sides if output is None else [plan.dead_letters])]
    if plan.flowed is not None:
        traces.append(plan.flowed.first_offset(partition))
    first_letter = min((each for each in traces if each is not None), default=bounds.high)
    first_letter = min(first_letter, bounds.high)
    if output is None or not output.first_digests:
        return first_letter
    topic = cut.topology.source.topics[0]
    with suppress(OpenTransaction):  # The open transaction is reported when the partition is read again.
        for columns in cut.reader.read(topic, partition, first, first_letter):
            contents = contents_of(columns.keys, columns.values)
            records = zip(columns.offsets, contents, columns.headers, columns.timestamps_ms, strict=True)
            for offset, content, headers, timestamp_ms in records:
                original = Original(Source(0, partition, offset), content, headers, timestamp_ms)
                if forwarded_digest(plan, original) in output.first_digests:
                    return offset
    return first_letter


def report_leftovers(cut: Cut) -> None:
    """Report the records in the late and dead-letter topics for which no source record accounts."""
    for side, (source, filed, again) in ((each, entry) for each in cut.plan.sides for entry in each.left()):
        place = side.place(filed)
        if source is None:
            cut.report.violation("phantom", place, "names no record of the source topics in its headers")
        elif again:
            cut.report.violation("duplicated", place, f"source record {cut.plan.place(source)} has two entries there")
        else:
            _report_leftover(cut, side.name, source, place)

    if cut.plan.flowed is not None:
        for source, place in cut.plan.flowed.left():
            if source is None:
                cut.report.violation("phantom", place, "names no record of the source topics in its headers")
            else:
                _report_leftover(cut, "the flow's topic", source, place)


def _report_leftover(cut: Cut, side: str, source: Source, place: str) -> None:
    topic = cut.topology.source.topics[source.topic]
    committed = cut.committed[topic].get(source.partition)
    if not cut.exists(source):
        cut.report.violation("phantom", place, f"names {cut.plan.place(source)}, whose partition does not exist")
        return
    if committed is None or source.offset >= committed:
        return
    low = cut.bounds[topic][source.partition].low if source.partition in cut.bounds[topic] else 0
    if topic in cut.compacted:
        cut.report.unprovable(WHY_COMPACTED)
    elif source.offset < low:
        cut.report.unprovable(f"the source records that {side} names were deleted")
    elif source.offset < cut.starts.get(source.partition, 0):
        cut.report.unprovable(WHY_BEFORE)
    else:
        cut.report.violation("phantom", place, f"names {cut.plan.place(source)}, which is not a record of the source")
