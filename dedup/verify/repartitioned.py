"""Verifies a topology with a repartition topic.

Every source record must be in the repartition topic, unchanged and only once. The verdicts on the records of the
repartition topic must match the model's. For source records whose copies were deleted from the repartition topic, the
module runs only the checks that do not depend on order (`findings.OrderFree`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress, count, repeat
from operator import itemgetter, methodcaller, ne
from typing import Final, NamedTuple

import numpy as np

from dedup.core.extract_one import EXTRACTED, passed_on
from dedup.core.flow import FLOW_FAILED
from dedup.core.formats import SCHEMA_UNKNOWN
from dedup.core.reference_model import Feed
from dedup.core.window import Source
from dedup.verify.compare import Column, Headers, contents_of, digests, matched_at_once, selected
from dedup.verify.cut import WHY_OPEN, Cut, WrittenPartition
from dedup.verify.direct import WHY_BEFORE, WHY_COMPACTED, WHY_NO_OFFSET, keep, note_schemas_gone, report_leftovers
from dedup.verify.evidence import (
    IDLE_HEADER,
    MOST_DIGITS,
    SOURCE_HEADER,
    TIMESTAMP_HEADER,
    Filed,
    SourceTuple,
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
from dedup.verify.flow_outputs import WHY_UNORDERED
from dedup.verify.kafka_reader import Bounds, RecordColumns, read_left
from dedup.verify.log_scan import Log, LogScan, Row
from dedup.verify.replay import FUTURE, WHY_SCHEMA_GONE, TaskReplay, by_evidence
from dedup.verify.report import Books
from dedup.verify.spill import BUCKET_ROWS, Spill, buckets_for, places_of

_APPENDED: Final = 2
"""The number of headers that a repartition task appends: one for the source position or the idle feed, and one for the
timestamp.
"""
WHY_COMPACTED_OUTPUT: Final = "compaction may have removed them from the output"
WHY_PURGED: Final = "purged from the repartition topic; checked without order: nothing lost, no ID twice"
WHY_OTHER_ID: Final = (
    "the ID function no longer returns what it returned when the record was repartitioned: it was changed without a "
    "new version, or its result does not depend only on the record"
)
_AFTER_ALL: Final = 1 << 62
_REPORTED: Final = -1
_PRIME: Final = 1_000_003
_POSITIVE: Final = (1 << 62) - 1


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
    passed: Spill | None
    """The source position of each record in the repartition topic, and the values that the repartition task extracted;
    None if the task does not pass on these values.
    """
    returned: Spill | None
    """The source position of each source record, and the values that are extracted now; None if `passed` is None."""
    purged: frozenset[int]
    """The partitions of the repartition topic that have lost their beginning."""
    firsts: dict[Feed, int] = field(default_factory=dict)
    """Maps each source partition to its lowest source offset in the repartition topic; empty with `earliest`."""
    spans: dict[Feed, tuple[int, int]] = field(default_factory=dict)
    """Maps each source partition to the range [first, end) of offsets that were read."""


class _Judged(NamedTuple):
    """Source records below the committed offset, as columns."""

    topics: Column
    partitions: Column
    offsets: Column
    times_ms: Column
    digests: list[bytes]
    ids: list[bytes | None]
    """The IDs if the repartition topic may have lost records; otherwise, every entry is None."""
    faulty: list[Row | None]
    """The row of each record with a fault, and None for all other records."""


def verify_repartitioned(cut: Cut) -> None:
    """Replay the repartition topic, compare the output with the verdicts, and account for every source record."""
    log = cut.topology.repartition_topic
    topics = (log, *cut.topology.source.topics)
    buckets = buckets_for(sum(bounds.high - bounds.low for topic in topics for bounds in cut.bounds[topic].values()))
    written = _output_of(cut, buckets)
    cut.look_again(log)  # Workers continuously delete old records of this topic.
    step = cut.again(partial(_read_logs, cut, buckets), partial(_undo, cut))
    copied = {topic: range(cut.partitions[topic]) for topic in copy_topics(cut).values()}
    copies = Copies(cut, buckets, copied, known=True, purged=step.purged)
    _read_sources(cut, step)
    for number in range(buckets):
        _account(cut, step, number)
        if step.passed is not None and step.returned is not None:
            _compare_ids(cut, step.passed, step.returned, number)
    for number in range(buckets):
        _judge(cut, step, written, copies, number)
    report_displaced(written, cut.report)
    _report_unseen(cut, step, written)
    if step.without_id[0].read:
        cut.report.books.append(step.without_id[0])
    _count_pending(cut, log)
    copies.conclude()
    cut.report.method = "replay of the repartition topic"
    if step.purged:
        cut.report.method += ", order-free checks of purged records"
    else:
        report_leftovers(cut)


def _read_logs(cut: Cut, buckets: int) -> _Step:
    """Read the partitions of the repartition topic whose beginning was not deleted."""
    log = cut.topology.repartition_topic
    purged = frozenset(partition for partition, bounds in cut.bounds[log].items() if bounds.start_deleted)
    without_id = (Books("past the repartition topic", 0), cut.log_spill(buckets))
    carried, judged, absent = cut.spill(buckets, 3, 1), cut.spill(buckets, 4, 3), cut.spill(buckets, 4, 1)
    passed, returned = (cut.spill(buckets, 3, 1) if cut.topology.passes_ids_on else None for _ in range(2))
    step = _Step(cut.feeds, [], without_id, carried, judged, absent, cut.spill(1, 5), passed, returned, purged)
    for partition in range(cut.partitions[log]):
        # Any feed may be far ahead of stream time, so the event times of deleted records are unknown.
        if partition not in purged:
            _read_log(cut, step, log, partition, buckets)
    return step


def _undo(cut: Cut) -> None:
    """Return the evidence that `_read_logs` took, and find the partitions that have lost their beginning since."""
    cut.plan.give_back()
    cut.look_again(cut.topology.repartition_topic)


def _output_of(cut: Cut, buckets: int) -> list[WrittenPartition]:
    """Return the partitions of the output, or an empty list if there is no output or a flow writes to it."""
    output, written, stamped = cut.topology.output, list[WrittenPartition](), not cut.plan.clamps_timestamps
    if output is not None and cut.plan.flowed is None:
        # A topic that does not exist lacks every record, like an empty topic.
        cut.bounds[output.topic].setdefault(0, Bounds(0, 0, start_deleted=False))
        numbers = sorted(cut.bounds[output.topic])
        written = [cut.written(output.topic, partition, buckets, stamped=stamped) for partition in numbers]
    if any(each.broker_time for each in written):
        stamped = False
        for each in written:
            each.forget_times()
    cut.plan = replace(cut.plan, output_stamped=stamped)
    return written


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
    spill = cut.log_spill(buckets)
    step.logs.append((books, spill))
    if partition not in cut.committed[log]:
        bounds = cut.bounds[log][partition]
        cut.report.unprovable(WHY_NO_OFFSET, bounds.high - bounds.low)
    for read in log_rows(cut, partition, passed=step.passed):
        kept = keep(cut, spill, read)
        if cut.topology.source.start != "earliest":
            for *feed, offset in read.sources():
                step.firsts[feed[0], feed[1]] = min(offset, step.firsts.get((feed[0], feed[1]), offset))
        whole = digests(kept.contents, kept.headers, kept.timestamps_ms)
        step.carried.add(_places(kept.topics, kept.partitions, kept.offsets), [*kept[1:4], whole])
    spill.flush()  # Many partitions are read one after another, so no partition keeps rows in memory.


def _places(topics: Column, partitions: Column, offsets: Column) -> Column:
    """Return hashes that are equal for nearby offsets, so that the records of a batch go to only a few buckets."""
    return (offsets // BUCKET_ROWS + (topics * _PRIME + partitions) * _PRIME) & _POSITIVE


def log_rows(
    cut: Cut, partition: int, only: Collection[bytes] | None = None, *, passed: Spill | None = None
) -> Iterator[Log]:
    """Yield all records of a partition of the repartition topic, as they were in the source topic.

    If ``only`` is given, the function yields only records whose IDs are in ``only``. If the repartition tasks pass on
    the values that they extract, the function adds these values to ``passed``.
    """
    log = cut.topology.repartition_topic
    bounds = cut.bounds[log][partition]
    committed = max(bounds.low, cut.committed[log].get(partition, bounds.low))
    scan = LogScan(cut.plan, cut.begun_feeds, from_start=not bounds.start_deleted)
    high = cut.reader.bounds(log, [partition])[partition].high
    for begin, end, pending in ((bounds.low, committed, False), (committed, high, True)):
        for columns in cut.read(log, partition, begin, end):
            sources, idle_rows = _unwrap(cut, columns, partition)
            if passed is not None and columns.extracted is not None and sources:
                places = np.array(sources, np.int64).T
                passed.add(_places(*places), (*places, columns.extracted))
            yield scan.scan(columns, sources, idle_rows=idle_rows, pending=pending, only=only)


def _unwrap(cut: Cut, columns: RecordColumns, partition: int) -> tuple[list[SourceTuple], set[int]]:
    """Reconstruct the source records, and return their source positions and the rows of idle markers."""
    idle_rows: set[int] = set()
    tails = list(map(itemgetter(slice(-_APPENDED, None)), columns.headers))
    # Most records are not idle markers, and their headers are read as whole columns.
    records = [row for row, tail in enumerate(tails) if tail and tail[0][0] == SOURCE_HEADER]
    found = _positions_at_once([tails[row] for row in records], tuple(cut.topology.source.topics))
    of_row: dict[int, SourceTuple] = {}
    if found is not None:
        of_row = dict(zip(records, found[0], strict=True))
        for row, timestamp_ms in zip(records, found[1], strict=True):
            columns.timestamps_ms[row] = timestamp_ms
    for row in (row for row in range(len(tails)) if row not in of_row):
        appended = tails[row]
        # Only the last two headers count, because an upstream topology may have added headers with the same names.
        marker = header(appended, IDLE_HEADER)
        position = header(appended, SOURCE_HEADER) if marker is None else marker + b"/0"
        source = parse_source(position, cut.topology.source.topics)
        if source is None:
            where = f"{cut.topology.repartition_topic}/{partition} offset {columns.offsets[row]}"
            cut.report.violation("phantom", where, "names no source record, so no repartition task wrote it")
        if source is None or marker is not None:
            idle_rows.add(row)
            # No source record has offset -1, so no record of a side topic can match the marker.
            source = (source or Source(0, 0, -1))._replace(offset=-1)
        columns.timestamps_ms[row] = parse_time_ms(header(appended, TIMESTAMP_HEADER)) or 0
        of_row[row] = source
    columns.headers = list(map(itemgetter(slice(None, -_APPENDED)), columns.headers))
    if cut.topology.passes_ids_on:
        columns.extracted = [own[-1][1] if own and own[-1][0] == EXTRACTED else None for own in columns.headers]
        columns.headers = [own[:-1] for own in columns.headers]
        for row, passed in enumerate(columns.extracted):
            if passed is None and row not in idle_rows:
                where = f"{cut.topology.repartition_topic}/{partition} offset {columns.offsets[row]}"
                cut.report.violation("phantom", where, f"lacks {EXTRACTED}, so no repartition task wrote it")
    return list(map(of_row.__getitem__, range(len(tails)))), idle_rows


def _positions_at_once(tails: Sequence[Headers], topics: tuple[str, ...]) -> tuple[list[SourceTuple], list[int]] | None:
    """Return source positions and timestamps, or None if there is an idle marker or a header in an unusual form."""
    if set(map(len, tails)) != {_APPENDED}:
        return None
    names, contents = zip(*chain.from_iterable(tails), strict=True)
    if set(names[::2]) != {SOURCE_HEADER} or set(names[1::2]) != {TIMESTAMP_HEADER} or None in contents:
        return None
    feeds, _, offsets = zip(*map(methodcaller("rpartition", b"/"), contents[::2]), strict=True)
    feed_of = {each: parse_source(each + b"/0", topics) for each in set(feeds)}
    numbers = (*offsets, *contents[1::2])
    digits = max(map(len, offsets)) + max(len(each.partition(b"/")[2]) for each in feed_of) <= MOST_DIGITS
    if None in feed_of.values() or b"" in numbers or not digits or not b"".join(numbers).isdigit():
        return None
    if max(map(len, contents[1::2])) > MOST_DIGITS:
        return None
    parsed = [(feed.topic, feed.partition) for feed in map(feed_of.__getitem__, feeds) if feed is not None]
    sources = [(*feed, offset) for feed, offset in zip(parsed, map(int, offsets), strict=True)]
    return sources, list(map(int, contents[1::2]))


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
        start, configured = _start_of(cut, step, feed)
        if step.purged and not configured:
            cut.report.unprovable(WHY_BEFORE, max(0, min(start, committed) - cut.bounds[topic][partition].low))
        for columns in read_left(cut.read_judged, cut.begin_later, topic, partition, start, committed):
            _read_source(cut, step, feed, columns, scan)
        # Order is not compared here, so records that were read before a deletion also count.
        step.spans[feed] = (max(start, cut.bounds[topic][partition].low), committed)


def _start_of(cut: Cut, step: _Step, feed: Feed) -> tuple[int, bool]:
    """Return the first offset that was read of a source partition, and whether the topology determines this offset."""
    topic, partition = cut.topology.source.topics[feed[0]], feed[1]
    start = cut.configured_start(topic, partition)
    if start is not None and (partition in cut.begins[topic] or cut.topology.source.start == "earliest"):
        return start, True
    # Neither `latest` nor a start time stores an offset. The first record at or after a start time may have come later
    # than a record that was read, or may have been deleted since. Each record that was read is in the repartition topic
    # or was made a dead letter by the repartition step.
    bounds, letter = cut.bounds[topic][partition], cut.plan.dead_letters.first_offset(feed)
    first = min(step.firsts.get(feed, bounds.high), bounds.high if letter is None else letter)
    return max(bounds.low, first if start is None else min(start, first)), start is not None


def _read_source(cut: Cut, step: _Step, feed: Feed, columns: RecordColumns, scan: LogScan) -> None:
    extracted = extracted_of(cut.plan.extract, columns)
    faults, contents = sorted(extracted.faults), contents_of(columns.keys, columns.values)
    faulty: list[Row | None] = [None] * len(contents)
    if faults:
        some = columns.rows(faults)
        log = scan.scan(some, [(*feed, offset) for offset in some.offsets])
        for at, row in zip(faults, log.rows(), strict=True):
            faulty[at] = row
    offsets, timestamps_ms = np.array(columns.offsets, np.int64), np.array(columns.timestamps_ms, np.int64)
    topics, partitions = np.full_like(offsets, feed[0]), np.full_like(offsets, feed[1])
    if step.returned is not None:
        now = [passed_on(own or extracted.faults[row]) for row, own in enumerate(extracted.ids)]
        step.returned.add(_places(topics, partitions, offsets), (topics, partitions, offsets, now))
    # Only records that the repartition topic may have lost are looked up by ID.
    ids: list[bytes | None] = extracted.ids if step.purged else [None] * len(contents)
    whole = digests(contents, columns.headers, timestamps_ms)
    judged = _Judged(topics, partitions, offsets, np.array(extracted.times_ms, np.int64), whole, ids, faulty)
    if cut.sample > 1:
        sampled = cut.sampled(extracted.ids, contents)
        others = np.delete(offsets, sampled).tolist()
        cut.plan.dead_letters.take([(*feed, offset) for offset in others])  # They are not compared or reported.
        judged = selected(judged, sampled)
    step.judged.add(_places(judged.topics, judged.partitions, judged.offsets), judged)


def _account(cut: Cut, step: _Step, number: int) -> None:
    """Check that each source record with a usable ID is in the repartition topic, unchanged and only once."""
    *carried, contents = step.carried.bucket(number)
    places = list(zip(*(each.tolist() for each in carried), strict=True))
    held = dict(zip(places, contents, strict=True))
    if len(held) < len(places):
        for source, times in Counter(places).items():
            for _ in range(times - 1):
                cut.report.violation(
                    "duplicated", cut.plan.place(Source(*source)), "it is in the repartition topic twice"
                )
    judged = _Judged(*step.judged.bucket(number))
    sources = list(zip(judged.topics.tolist(), judged.partitions.tolist(), judged.offsets.tolist(), strict=True))
    there = list(map(held.pop, sources, repeat(None)))
    for at in compress(count(), map(ne, there, judged.digests)):
        if there[at] is None:
            _account_absent(cut, step, Source(*sources[at]), selected(judged, np.array([at])))
        else:
            place = cut.plan.place(Source(*sources[at]))
            cut.report.violation("changed", place, "its content in the repartition topic is different")
    for source in held:
        _report_unsent(cut, step, Source(*source))


def _compare_ids(cut: Cut, before: Spill, after: Spill, number: int) -> None:
    """Count the records for which the user's function now returns a different ID than in the repartition task."""
    *columns, found = before.bucket(number)
    passed = dict(zip(zip(*(each.tolist() for each in columns), strict=True), found, strict=True))
    *columns, found = after.bucket(number)
    places = zip(*(each.tolist() for each in columns), strict=True)
    # Faults are not compared with each other, because their texts may contain addresses.
    pairs = ((passed.get(place) or now, now) for place, now in zip(places, found, strict=True))
    other = sum(was != now and not was[:1] == now[:1] == b"[" and not _schema_gone(now) for was, now in pairs)
    if other:
        cut.report.unprovable(WHY_OTHER_ID, other)


def _schema_gone(found: bytes) -> bool:
    return found[:1] == b"[" and json.loads(found)[1] == SCHEMA_UNKNOWN


def _account_absent(cut: Cut, step: _Step, source: Source, judged: _Judged) -> None:
    """Account for a source record that is not in the repartition topic. ``judged`` contains only this record."""
    (faulty,), (own,) = judged.faulty, judged.ids
    if faulty is not None:
        log = Log.of(faulty)
        (row,) = log.rows()
        if row.odd.schema and row.odd.letter is None:
            _account_unjudged(cut, step, source, log)
        else:
            keep(cut, step.without_id[1], log)
    elif letter := cut.plan.dead_letters.take([source]).get(source):
        _account_letter(cut, step, source, judged, letter)
    elif not step.purged:
        cut.report.violation("lost", cut.plan.place(source), f"not in {cut.topology.repartition_topic}")
    else:
        ids = [own or b""]
        step.absent.add(places_of(ids, ids), (*judged[:4], ids))


def _account_unjudged(cut: Cut, step: _Step, source: Source, log: Log) -> None:
    """Account for a source record with a deleted schema that is not in the repartition topic and has no dead letter."""
    if not step.purged and cut.plan.dead_letters.complete:
        text = f"neither in {cut.topology.repartition_topic} nor in {cut.plan.dead_letters.name}"
        cut.report.violation("lost", cut.plan.place(source), text)
        return
    note_schemas_gone(cut, log)
    cut.report.unprovable(WHY_SCHEMA_GONE)


def _account_letter(cut: Cut, step: _Step, source: Source, judged: _Judged, letter: Filed) -> None:
    """Check the dead letter of a record that has no fault and is not in the repartition topic."""
    place, there = cut.plan.place(source), cut.plan.dead_letters.place(letter)
    # The repartition topic may have lost a record for which a `dedup` task wrote a dead letter.
    others = {FUTURE, FLOW_FAILED} if step.purged else set()
    if letter.reason not in by_evidence(cut.topology).keys() | others:
        text = f'{there} says "{letter.reason}"; the repartition step has no reason to make it a dead letter'
        cut.report.violation("wrong_dead_letter", place, text)
    else:
        cut.report.unprovable("dead letters of the repartition step")
    if not letter.stands_for and letter.digest != judged.digests[0]:
        cut.report.violation("changed", place, f"{there} differs in key, value, header, or original timestamp")


def _report_unsent(cut: Cut, step: _Step, source: Source) -> None:
    """Report a record that is in the repartition topic but not in the source."""
    start, end = step.spans.get((source.topic, source.partition), (0, 0))
    if start <= source.offset < end and cut.topology.source.topics[source.topic] in cut.compacted:
        cut.report.unprovable(WHY_COMPACTED)
    elif start <= source.offset < end or not cut.exists(source):
        text = f"it is in {cut.topology.repartition_topic}, but not in the source"
        cut.report.violation("phantom", cut.plan.place(source), text)


def _judge(cut: Cut, step: _Step, written: list[WrittenPartition], copies: Copies, number: int) -> None:
    """Judge the records of a bucket, and compare the output and the copies of duplicates with the verdicts."""
    tasks: list[TaskReplay] = []
    owners: dict[bytes | None, int] = {}
    for books, spill in step.logs:
        log = Log(*spill.bucket(number))
        _check_owners(cut, books, log, owners)
        tasks.append(_replayed(cut, books, log))
    # The order of records without an ID is known only within a source partition, so each partition is replayed
    # separately.
    books, spill = step.without_id
    past = Log(*spill.bucket(number))
    for topic, partition in step.feeds if past.ids else ():
        rows = np.flatnonzero((past.topics == topic) & (past.partitions == partition))
        tasks.append(_replayed(cut, books, past.at(rows), in_order=False))
    copies.judge(number, tasks[: len(step.logs)], cut.report)
    seen = [each.bucket(number) for each in written]
    if step.purged:
        free = OrderFree(cut, written, seen)
        *numbers, ids = step.absent.bucket(number)
        for topic, partition, offset, time_ms, own in zip(*(each.tolist() for each in numbers), ids, strict=True):
            free.must_be_somewhere(own, time_ms, Source(topic, partition, offset))
            cut.report.unprovable(WHY_PURGED if cut.plan.flowed is None else WHY_UNORDERED)
    if not written:
        return
    found = matched_at_once([task.forwarded for task in tasks], seen)
    optional = not any(task.schema_gone for task in tasks)
    for at, each in enumerate(written):
        each.order.match(*found.places(at, optional=optional))
    if step.purged:
        # The output also has records that have since been purged from the log, so unknown output records are not
        # violations.
        found.extra.clear()
    partial = any(each.bounds.start_deleted or each.truncated or each.compacted for each in written)
    for number_of_task, wanted in explain(found, tasks, written, cut.report, partial=partial):
        line = (number_of_task, wanted.position, *wanted.source)
        step.unseen.add(np.zeros(1, np.int64), [[each] for each in line])


def _replayed(cut: Cut, books: Books, log: Log, *, in_order: bool = True) -> TaskReplay:
    task = TaskReplay(cut.plan, books, cut.report, cut.feeds)
    task.in_order = in_order
    task.take(log)
    return task


def _report_unseen(cut: Cut, step: _Step, written: list[WrittenPartition]) -> None:
    """Report absent records as lost, except those that may have been in the missing part of the output."""
    why = WHY_OPEN if any(each.truncated for each in written) else ""
    why = why or (WHY_COMPACTED_OUTPUT if any(each.compacted for each in written) else "")
    gone: dict[int, int] = {}
    for task in range(len(step.logs)):
        firsts = [each.order.first_position(task) for each in written if each.bounds.start_deleted]
        gone[task] = max((_AFTER_ALL if first is None else first for first in firsts), default=0)
    for task, position, *source in np.array(step.unseen.bucket(0)).T.tolist():
        if why or position < gone.get(task, _AFTER_ALL):
            books, _ = step.logs[task] if task in gone else step.without_id
            books.not_provable += 1
            cut.report.unprovable(why or WHY_OUTPUT_GONE)
        else:
            report_lost(written, cut.plan.place(Source(*source)), cut.report)


def _check_owners(cut: Cut, books: Books, log: Log, owners: dict[bytes | None, int]) -> None:
    """Report an ID that also occurs in another partition, because two tasks have judged the ID's records."""
    ids = dict.fromkeys(log.ids, books.partition)
    ids.pop(None, None)
    for own in ids.keys() & owners.keys():
        ids[own] = _REPORTED
        if owners[own] != _REPORTED:
            text = f"its tracking ID is in partition {owners[own]} too, so two tasks judged it"
            position = log.positions[log.ids.index(own)]
            cut.report.violation("duplicated", f"{books.topic}/{books.partition} offset {position}", text)
    owners.update(ids)
