"""A topology that reads its one source topic directly: each partition is replayed in the log's own order."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dedup.core.window import Source
from dedup.proof.compare import Comparison, Expected, compare
from dedup.proof.cut import Cut, Written
from dedup.proof.differences import explain
from dedup.proof.evidence import SideTopic, extracted_of
from dedup.proof.kafka_reader import Bounds, Columns
from dedup.proof.orderfree import OrderFree
from dedup.proof.replay import Log, Plan, TaskReplay, forwarded_digest
from dedup.proof.report import Books

WHY_NO_OFFSET: Final = "the group has no committed offset for their partition, so what was judged is not known"
WHY_SHORTER: Final = "the source ends before the committed offset: it was deleted and made again, or truncated"
WHY_SOURCE_GONE: Final = "the source has lost its beginning, from which came records of"
WHY_COMPACTED: Final = "compaction took records from among them; checked without order: no ID twice, none missing"
WHY_OUTPUT_GONE: Final = "the output has lost its beginning"


def verify_direct(cut: Cut) -> None:
    """Replay every partition of the source; afterwards say what the side topics hold beyond that."""
    source = cut.topology.source.topics[0]
    if cut.compacted:
        _verify_compacted(cut, source)
        return
    for partition in range(cut.partitions[source]):
        _verify_partition(cut, source, partition)
    for side in (cut.plan.late, cut.plan.dead_letters):
        if side is not None:
            report_leftovers(cut, side)


def _verify_partition(cut: Cut, source: str, partition: int) -> None:
    books = Books(source, partition)
    cut.report.books.append(books)
    bounds = cut.bounds[source][partition]
    committed = cut.committed[source].get(partition)
    output = _output(cut, partition)
    if committed is None:
        books.pending = bounds.high - bounds.low
        cut.report.unprovable(WHY_NO_OFFSET, len(output.digests) if output is not None else 0)
        return
    if committed > bounds.high:
        cut.report.unprovable(WHY_SHORTER, committed - bounds.high)
        committed = bounds.high
    plan = _plan_for(cut.plan, output)
    start, known = _start(cut, plan, bounds, partition, output)
    books.skipped = start - bounds.low
    task = TaskReplay(plan, books, cut.report, ((0, partition),), from_start=known)
    for columns in cut.read(source, partition, start, committed):
        task.take(_log(columns, partition))
    copies = _copies(cut, task, partition)
    held = [(expected.digests, written.digests) for written, expected in copies]
    if output is not None:
        held.append((task.forwarded.expected.digests, output.digests))
    if any(expected != there for expected, there in held):
        # The worker may have gone on since the cut began: then what it wrote is there, and its offset too.
        for columns in cut.read(source, partition, committed, cut.still_committed(source, partition)):
            task.take(_log(columns, partition), pending=True)
    else:
        books.pending = max(0, bounds.high - committed)
    if output is not None:
        _compare_output(cut, task, output, known=known)
    for written, expected in copies:
        _compare_copies(cut, task, written, expected, known=known)


def _verify_compacted(cut: Cut, source: str) -> None:
    """Check what needs no order and no neighbours: records that are gone took part in the verdicts on those left."""
    cut.report.method = f"order-free checks: {' and '.join(sorted(cut.compacted))} is compacted"
    written = [each for partition in range(cut.partitions[source]) if (each := _output(cut, partition)) is not None]
    free = OrderFree(cut, written)
    for partition in range(cut.partitions[source]):
        bounds, committed = cut.bounds[source][partition], cut.committed[source].get(partition, 0)
        begin = max(bounds.low, cut.begins[source].get(partition, 0))
        for columns in cut.read(source, partition, begin, committed):
            extracted = extracted_of(cut.plan.extract, columns)
            for row, offset in enumerate(columns.offsets):
                place, own = Source(0, partition, offset), extracted.ids[row]
                if row not in extracted.faults and own is not None and place not in cut.plan.dead_letters.filed:
                    name = f"{source}/{partition} offset {offset}"
                    free.must_be_somewhere(name, own, extracted.times_ms[row], place)
            cut.report.unprovable(WHY_COMPACTED, len(columns.offsets))


def _output(cut: Cut, partition: int) -> Written | None:
    output = cut.topology.output
    if output is None or not cut.partitions[output.topic]:
        return None
    # Where future times are clamped, the output's timestamps are the worker's clock's.
    return cut.written(output.topic, partition, stamped=cut.plan.rules.future != "clamp")


def _plan_for(plan: Plan, output: Written | None) -> Plan:
    stamped = plan.rules.future != "clamp" and not (output is not None and output.broker_time)
    return replace(plan, output_stamped=stamped)


def _log(columns: Columns, partition: int) -> Log:
    return Log(columns, [Source(0, partition, offset) for offset in columns.offsets])


def _start(cut: Cut, plan: Plan, bounds: Bounds, partition: int, output: Written | None) -> tuple[int, bool]:
    """Return the first offset that was judged, and whether nothing before it was."""
    topic = cut.topology.source.topics[0]
    begin = cut.begins[topic].get(partition)
    if begin is not None:
        return max(begin, bounds.low), begin >= bounds.low
    match cut.topology.source.start:
        case "earliest":
            return bounds.low, not bounds.beheaded
        case int() as time_ms:
            found = cut.reader.offset_for_time(topic, partition, time_ms)
            start = bounds.high if found is None else found
            return start, start > bounds.low or not bounds.beheaded
        case _:
            start = _first_judged(cut, plan, bounds, partition, output)
            return start, start > bounds.low or not bounds.beheaded


def _first_judged(cut: Cut, plan: Plan, bounds: Bounds, partition: int, output: Written | None) -> int:
    """With ``start: latest`` no one wrote down where that was: it is the first record that has left a trace."""
    letters = [source.offset for source in plan.dead_letters.filed if source.partition == partition]
    first_letter = min(letters, default=bounds.high)
    if output is None or not output.digests:
        return first_letter
    topic = cut.topology.source.topics[0]
    for columns in cut.reader.read(topic, partition, bounds.low, min(first_letter, bounds.high)):
        for row, offset in enumerate(columns.offsets):
            if forwarded_digest(plan, columns, row, Source(0, partition, offset)) == output.digests[0]:
                return offset
    return first_letter


def _compare_output(cut: Cut, task: TaskReplay, output: Written, *, known: bool) -> None:
    expected = task.forwarded.expected
    if output.bounds.beheaded:
        _excuse_deleted(cut, task, output)
    comparison = compare([expected], [output.digests])
    if not known:
        _excuse_front(cut, comparison, output)
    explain(comparison, [task], [output], cut.report, cut.ids_of)
    books = task.books
    if not task.settled or output.bounds.beheaded:
        return
    beside = cut.observed[0, books.partition]
    if cut.plan.late is None and not cut.plan.late_forwarded:
        beside += books.late  # dropped, as the topology says
    books.ended = len(output.digests) + books.duplicates + beside
    if not books.balanced:
        text = f"read {books.read}, but {books.ended} ended as unique, duplicate, late or dead letter"
        cut.report.violation("unbalanced", f"{books.topic}/{books.partition}", text)


def _excuse_front(cut: Cut, comparison: Comparison, written: Written) -> None:
    """Excuse records that precede all that is explained: the source records they came from are deleted."""
    unexplained = {place.row for place in comparison.extra}
    first = next((row for row in range(len(written.digests)) if row not in unexplained), len(written.digests))
    comparison.extra = [place for place in comparison.extra if place.row >= first]
    cut.report.unprovable(f"{WHY_SOURCE_GONE} {written.topic}", first)


def _excuse_deleted(cut: Cut, task: TaskReplay, output: Written) -> None:
    """What was forwarded before the first record that the output still has, may have been there."""
    digests = task.forwarded.expected.digests
    first = output.digests[0] if output.digests else None
    gone = digests.index(first) if first in digests else len(digests) if first is None else 0
    fresh = set(range(gone)) - task.forwarded.expected.optional
    task.forwarded.expected.optional |= fresh
    task.books.not_provable += len(fresh)
    cut.report.unprovable(WHY_OUTPUT_GONE, len(fresh))


def _copies(cut: Cut, task: TaskReplay, partition: int) -> list[tuple[Written, Expected]]:
    """Return the duplicates and conflicts topics: they are written in order, to the partition of the same number."""
    found: list[tuple[Written, Expected]] = []
    for topic, expected in ((cut.topology.duplicates, task.duplicates), (cut.topology.conflicts, task.conflicts)):
        if topic is None or not cut.partitions[topic]:
            continue
        if cut.partitions[topic] < cut.partitions[cut.topology.source.topics[0]]:
            cut.report.unprovable(f"{topic} has fewer partitions than the source", len(expected.digests))
            continue
        found.append((cut.written(topic, partition, stamped=False), expected))
    return found


def _compare_copies(cut: Cut, task: TaskReplay, copies: Written, expected: Expected, *, known: bool) -> None:
    if copies.bounds.beheaded:
        cut.report.unprovable(f"{copies.topic} has lost its beginning", len(expected.digests))
        return
    found = compare([expected], [copies.digests])
    if not known:
        _excuse_front(cut, found, copies)
    place = f"{task.books.topic}/{task.books.partition}"
    for missing in found.missing:
        text = f"duplicate {missing.row + 1} of {len(expected.digests)} is not in {copies.topic}, or is changed there"
        cut.report.violation("wrong_duplicate", place, text)
    for extra in [*found.extra, *found.displaced]:
        cut.report.violation("wrong_duplicate", copies.place(extra.row), "not the record the model expects here")


def report_leftovers(cut: Cut, side: SideTopic) -> None:
    """Report records of a side topic that no replayed record accounts for."""
    for source, filed in side.filed.items():
        _report_leftover(cut, side, source, side.place(filed))
    for source, filed in side.repeated:
        topic = cut.topology.source.topics[source.topic]
        text = f"source record {topic}/{source.partition} offset {source.offset} is there twice"
        cut.report.violation("duplicated", side.place(filed), text)
    for partition, offset in side.strangers:
        text = "names no record of the source topics in its headers"
        cut.report.violation("phantom", f"{side.name}/{partition} offset {offset}", text)


def _report_leftover(cut: Cut, side: SideTopic, source: Source, place: str) -> None:
    topic = cut.topology.source.topics[source.topic]
    committed = cut.committed[topic].get(source.partition)
    if committed is None or source.offset >= committed:
        return
    low = cut.bounds[topic][source.partition].low if source.partition in cut.bounds[topic] else 0
    if topic in cut.compacted:
        cut.report.unprovable(WHY_COMPACTED)
        return
    if source.offset < low:
        cut.report.unprovable(f"the source records that {side.name} names are deleted")
        return
    text = f"names {topic}/{source.partition} offset {source.offset}, which is no record of the source"
    cut.report.violation("phantom", place, text)
