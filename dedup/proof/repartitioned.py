"""A topology that repartitions: the repartition topic is the log that was judged, where it still holds the records.

Two steps are checked apart. From the source to the repartition topic: every record once and unchanged, in buckets by
source position. From there to the output: the model's verdicts, in buckets by tracking ID. A record purged from the
repartition topic is checked without order (`orderfree`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dedup.core.model import Feed
from dedup.core.window import Source
from dedup.proof.compare import Headers, Place, digest, matched
from dedup.proof.cut import WHY_OPEN, Cut, Written
from dedup.proof.differences import explain, report_displaced, report_lost
from dedup.proof.direct import WHY_BEFORE, WHY_COMPACTED, WHY_NO_OFFSET, WHY_OUTPUT_GONE, keep, report_leftovers
from dedup.proof.evidence import (
    IDLE_HEADER,
    SOURCE_HEADER,
    TIMESTAMP_HEADER,
    extracted_of,
    header,
    parse_source,
    parse_time_ms,
)
from dedup.proof.kafka_reader import Columns
from dedup.proof.orderfree import OrderFree
from dedup.proof.replay import TaskReplay
from dedup.proof.report import Books
from dedup.proof.scout import Log, Row, Scout
from dedup.proof.spill import Spill, buckets_for, condensed, place_of

RESERVED: Final = frozenset({SOURCE_HEADER, TIMESTAMP_HEADER, IDLE_HEADER})
WHY_PURGED: Final = "purged from the repartition topic; checked without order: nothing lost, no ID twice"
WHY_COPIES: Final = "duplicates and conflicts topics behind a repartition topic are not compared"
_AFTER_ALL: Final = 1 << 62
_TOLD: Final = -1
_SPREAD: Final = 0x9E3779B97F4A7C15
"""Spreads source positions over buckets (Knuth's multiplicative hash)."""


@dataclass(slots=True)
class _Step:
    """What was read of both steps, in buckets."""

    feeds: list[Feed]
    logs: list[tuple[Books, Spill]]
    """By partition of the repartition topic that is whole: what was judged there."""
    beside: tuple[Books, Spill]
    """Source records without an ID, forwarded past the repartition topic."""
    carried: Spill
    """What the repartition topic holds of the sources: source position, and a digest."""
    judged: Spill
    """What the sources hold: the same, and ID and event time."""
    purged: bool
    firsts: dict[Feed, int]
    """Where what was carried over of each source partition begins."""
    spans: dict[Feed, tuple[int, int]]
    """What was read of each source partition: [first, end)."""
    unseen: Spill
    """What is not in an output of which a part is missing: task, position, source position."""


def verify_repartitioned(cut: Cut) -> None:
    """Replay what the repartition topic holds, compare the output, and account for every source record."""
    log = cut.topology.repartition_topic
    sources = cut.topology.source.topics
    feeds = [(at, partition) for at, topic in enumerate(sources) for partition in range(cut.partitions[topic])]
    total = sum(bounds.high - bounds.low for topic in (log, *sources) for bounds in cut.bounds[topic].values())
    buckets = buckets_for(total)
    written = _outputs(cut, buckets)
    stamped = cut.plan.rules.future != "clamp" and not any(each.broker_time for each in written)
    cut.plan = replace(cut.plan, output_stamped=stamped, duplicates=False, conflicts=False)
    purged = any(bounds.beheaded for bounds in cut.bounds[log].values())
    beside = (Books("past the repartition topic", 0), cut.spill(buckets))
    step = _Step(feeds, [], beside, cut.spill(buckets), cut.spill(buckets), purged, {}, {}, cut.spill(1))
    for partition in range(cut.partitions[log]):
        # Of several feeds one may be far ahead of stream time: how far the purged ones were, nothing bounds.
        if not cut.bounds[log][partition].beheaded:
            _read_log(cut, step, log, partition, buckets)
    _read_sources(cut, step)
    absent = cut.spill(buckets)
    for number in range(buckets):
        _account(cut, step, number, absent)
    for number in range(buckets):
        _judge(cut, step, written, number, absent)
    report_displaced(written, cut.report)
    _report_unseen(cut, step, written)
    if step.beside[0].read:
        cut.report.books.append(step.beside[0])
    _conclude(cut, step, purged=purged)
    for spill in (absent, step.unseen, step.carried, step.judged, beside[1], *(each for _, each in step.logs)):
        spill.close()
    for each in written:
        each.close()


def _conclude(cut: Cut, step: _Step, *, purged: bool) -> None:
    if cut.topology.duplicates is not None or cut.topology.conflicts is not None:
        cut.report.unprovable(WHY_COPIES, sum(books.duplicates for books, _ in step.logs))
    cut.report.method = "replay of the repartition topic" + (", order-free checks of what is purged" if purged else "")
    if not purged:
        for side in (cut.plan.late, cut.plan.dead_letters):
            if side is not None:
                report_leftovers(cut, side)


def _outputs(cut: Cut, buckets: int) -> list[Written]:
    output = cut.topology.output
    if output is None:
        return []
    stamped = cut.plan.rules.future != "clamp"
    numbers = range(cut.partitions[output.topic])
    return [cut.written(output.topic, partition, buckets, stamped=stamped) for partition in numbers]


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
            books.pending += row.pending
            _carry(step, row)


def log_rows(cut: Cut, partition: int) -> Iterator[Row]:
    """Yield the records of a partition of the repartition topic up to its present end, as they were in the source."""
    log, topics = cut.topology.repartition_topic, cut.topology.source.topics
    feeds = [(at, number) for at, topic in enumerate(topics) for number in range(cut.partitions[topic])]
    bounds = cut.bounds[log][partition]
    committed = cut.committed[log].get(partition, bounds.low)
    scout = Scout(cut.plan, feeds, from_start=not bounds.beheaded)
    high = cut.reader.bounds(log, [partition])[partition].high
    for begin, end, pending in ((bounds.low, committed, False), (committed, high, True)):
        for columns in cut.read(log, partition, begin, end):
            yield from scout.rows(_unwrap(cut, columns, partition), pending=pending)


def _carry(step: _Step, row: Row) -> None:
    topic, partition, offset = row.source
    feed = (topic, partition)
    step.firsts[feed] = min(offset, step.firsts.get(feed, offset))
    content = digest(row.key, row.value, row.headers, row.timestamp_ms)
    step.carried.add(_position_place(row.source), (*row.source, content))


def _position_place(source: Sequence[int]) -> int:
    topic, partition, offset = source
    return ((offset * _SPREAD + partition * 31 + topic) >> 16) & ((1 << 48) - 1)


def _unwrap(cut: Cut, columns: Columns, partition: int) -> Log:
    """Return the records as they were in the source."""
    sources: list[Source] = []
    idle_rows: set[int] = set()
    for row, headers in enumerate(columns.headers):
        own = [each for each in headers if each[0] not in RESERVED]
        source, idle = _origin(cut, headers)
        if source is None:
            where = f"{cut.topology.repartition_topic}/{partition} offset {columns.offsets[row]}"
            cut.report.violation("phantom", where, "names no source record, so no repartition task wrote it")
            source, idle = Source(0, 0, -1), True
        columns.headers[row] = own
        columns.timestamps_ms[row] = parse_time_ms(header(headers, TIMESTAMP_HEADER)) or 0
        sources.append(source)
        if idle:
            idle_rows.add(row)
    return Log(columns, sources, frozenset(idle_rows))


def _origin(cut: Cut, headers: Headers) -> tuple[Source | None, bool]:
    topics = cut.topology.source.topics
    marker = header(headers, IDLE_HEADER)
    if marker is not None:
        feed = parse_source(marker + b"/0", topics)
        # No record of the source: what the side topics hold of its first one is not the marker's to take.
        return None if feed is None else feed._replace(offset=-1), True
    return parse_source(header(headers, SOURCE_HEADER), topics), False


def _read_sources(cut: Cut, step: _Step) -> None:
    """Put every source record that was judged into buckets; those without an ID never come to the repartition topic."""
    for feed in step.feeds:
        topic, partition = cut.topology.source.topics[feed[0]], feed[1]
        committed = cut.committed[topic].get(partition)
        bounds = cut.bounds[topic][partition]
        if committed is None:
            cut.report.unprovable(WHY_NO_OFFSET, bounds.high - bounds.low)
            continue
        # No order matters for them: they are forwarded, or dead letters, whatever stream time is.
        scout = Scout(cut.plan, step.feeds, from_start=True)
        start = _start(cut, topic, partition, step.firsts.get(feed))
        if step.purged and _start_unknown(cut, topic, partition):
            cut.report.unprovable(WHY_BEFORE, max(0, min(start, committed) - bounds.low))
        step.spans[feed] = (start, committed)
        for columns in cut.read(topic, partition, start, committed):
            _read_source(cut, step, feed, columns, scout)


def _read_source(cut: Cut, step: _Step, feed: Feed, columns: Columns, scout: Scout) -> None:
    for row, headers in enumerate(columns.headers):
        if any(name in RESERVED for name, _ in headers):
            columns.headers[row] = [each for each in headers if each[0] not in RESERVED]
    extracted = extracted_of(cut.plan.extract, columns)
    some = columns.rows(sorted(extracted.faults))
    rows = scout.rows(Log(some, [Source(*feed, offset) for offset in some.offsets]))
    faulty = {found.position: found for found in rows}
    for at, offset in enumerate(columns.offsets):
        own = None if at in extracted.faults else extracted.ids[at]
        value = condensed(columns.values[at])
        if not cut.sampled(place_of(own, columns.keys[at], value)):
            continue
        content = digest(columns.keys[at], value, columns.headers[at], columns.timestamps_ms[at])
        source = (*feed, offset)
        line = (*source, content, own, extracted.times_ms[at], faulty.get(offset))
        step.judged.add(_position_place(source), line)


def _account(cut: Cut, step: _Step, number: int, absent: Spill) -> None:
    """Check that every source record of a bucket was carried over once, unchanged, or has no ID."""
    held: dict[Source, bytes] = {}
    names = cut.topology.source.topics
    for topic, partition, offset, content in step.carried.bucket(number):
        source = Source(topic, partition, offset)
        if source in held:
            place = f"{names[topic]}/{partition} offset {offset}"
            cut.report.violation("duplicated", place, "it is in the repartition topic twice")
        held[source] = content
    for topic, partition, offset, content, own, time_ms, faulty in step.judged.bucket(number):
        source = Source(topic, partition, offset)
        place = f"{names[topic]}/{partition} offset {offset}"
        there = held.pop(source, None)
        if there is None:
            if faulty is not None:
                keep(cut, step.beside[1], Row.of(faulty))
            elif cut.plan.dead_letters.take([source]):
                cut.report.unprovable("dead letters of the repartition step")
            elif not step.purged:
                cut.report.violation("lost", place, f"not in {cut.topology.repartition_topic}")
            else:
                absent.add(place_of(own, None, None), (*source, own, time_ms))
        elif there != content:
            cut.report.violation("changed", place, "stands in the repartition topic with other content")
    for source in held:
        _report_unsent(cut, step, source)


def _report_unsent(cut: Cut, step: _Step, source: Source) -> None:
    """The repartition topic holds a record that was not met in the source."""
    topic = cut.topology.source.topics[source.topic]
    start, end = step.spans.get((source.topic, source.partition), (0, 0))
    if not start <= source.offset < end:
        return
    if topic in cut.compacted:
        cut.report.unprovable(WHY_COMPACTED)
        return
    text = f"it is in {cut.topology.repartition_topic}, but it is no record of the source"
    cut.report.violation("phantom", f"{topic}/{source.partition} offset {source.offset}", text)


def _judge(cut: Cut, step: _Step, written: list[Written], number: int, absent: Spill) -> None:
    """Judge the records of a bucket and compare what was forwarded of them."""
    everyone: list[TaskReplay] = []
    homes: dict[bytes, int] = {}
    for books, spill in (*step.logs, step.beside):
        task = TaskReplay(cut.plan, books, cut.report, step.feeds)
        task.take(_at_home(cut, books, map(Row.of, spill.bucket(number)), homes))
        everyone.append(task)
    seen = [each.bucket(number) for each in written]
    if step.purged:
        free = OrderFree(cut, written, seen)
        for topic, partition, offset, own, time_ms in absent.bucket(number):
            source = Source(topic, partition, offset)
            free.must_be_somewhere(everyone[0].place(source), own, time_ms, source)
            cut.report.unprovable(WHY_PURGED)
    if cut.topology.output is None:
        return
    found = matched([task.forwarded.expected for task in everyone], [[each.digest for each in own] for own in seen])
    for at, each in enumerate(written):
        pairs = [(there.row, wanted) for there, wanted in found.matched if there.sequence == at]
        each.order.match([(seen[at][row].row, *_track(step, everyone, wanted)) for row, wanted in pairs])
    if step.purged:
        # What was purged was forwarded too: an unknown record in the output proves nothing.
        found.extra.clear()
    unseen: list[Place] | None = [] if any(each.bounds.beheaded or each.truncated for each in written) else None
    explain(found, everyone, written, seen, cut.report, absent_are=unseen)
    for place in unseen or ():
        forwarded = everyone[place.sequence].forwarded
        step.unseen.add(0, (place.sequence, forwarded.positions[place.row], *forwarded.sources[place.row]))


def _track(step: _Step, everyone: list[TaskReplay], wanted: Place) -> tuple[int, int]:
    """Return what a record's order is kept with, its task or its source partition, and its position there."""
    forwarded = everyone[wanted.sequence].forwarded
    source = forwarded.sources[wanted.row]
    past = wanted.sequence == len(step.logs)
    track = wanted.sequence + (step.feeds.index((source.topic, source.partition)) if past else 0)
    return track, forwarded.positions[wanted.row]


def _report_unseen(cut: Cut, step: _Step, written: list[Written]) -> None:
    """What a task forwarded before its first record that a beheaded partition still has, may have been there."""
    truncated = any(each.truncated for each in written)
    gone: dict[int, int] = {}
    for task in range(len(step.logs)):
        firsts = [each.order.first_position(task) for each in written if each.bounds.beheaded]
        gone[task] = max((_AFTER_ALL if first is None else first for first in firsts), default=0)
    names = cut.topology.source.topics
    for task, position, topic, partition, offset in step.unseen.bucket(0):
        if truncated or position < gone.get(task, _AFTER_ALL):
            books, _ = step.logs[task] if task in gone else step.beside
            books.not_provable += 1
            cut.report.unprovable(WHY_OPEN if truncated else WHY_OUTPUT_GONE)
        else:
            report_lost(written, f"{names[topic]}/{partition} offset {offset}", cut.report)


def _at_home(cut: Cut, books: Books, rows: Iterator[Row], homes: dict[bytes, int]) -> Iterator[Row]:
    """Yield the rows; each task is judged alone, and an ID that two of them know is forwarded by both: so it is told.

    ``homes``: where each ID of the bucket was met first; `_TOLD` once it was met elsewhere.
    """
    for row in rows:
        home = _TOLD if row.id is None else homes.setdefault(row.id, books.partition)
        if row.id is not None and home not in {books.partition, _TOLD}:
            homes[row.id] = _TOLD
            text = f"its tracking ID is in partition {home} too, so two tasks judged it"
            cut.report.violation("duplicated", f"{books.topic}/{books.partition} offset {row.position}", text)
        yield row


def _start_unknown(cut: Cut, topic: str, partition: int) -> bool:
    return cut.topology.source.start == "latest" and partition not in cut.begins[topic]


def _start(cut: Cut, topic: str, partition: int, first: int | None) -> int:
    """Return the first source offset that was judged."""
    low = cut.bounds[topic][partition].low
    begin = cut.begins[topic].get(partition)
    if begin is not None:
        return max(begin, low)
    match cut.topology.source.start:
        case "earliest":
            return low
        case int() as time_ms:
            found = cut.reader.offset_for_time(topic, partition, time_ms)
            return cut.bounds[topic][partition].high if found is None else found
        case _:
            # No one wrote down where `latest` was: it is the first record that was carried over.
            return cut.bounds[topic][partition].high if first is None else first
