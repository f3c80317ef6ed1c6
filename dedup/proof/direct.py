"""A topology that reads its one source topic directly: each partition is replayed in the log's own order.

One reading of a partition sorts its records, and what the worker wrote of them, into buckets by tracking ID (`spill`),
with the stream time at which each was judged (`scout`). Then bucket after bucket is judged and compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from dedup.core.window import Source
from dedup.proof.compare import Expected, Place, digest, matched
from dedup.proof.cut import WHY_OPEN, Cut, Seen, Written
from dedup.proof.differences import explain, report_displaced
from dedup.proof.evidence import SOURCE_HEADER, SideTopic, extracted_of
from dedup.proof.kafka_reader import Bounds, Columns
from dedup.proof.orderfree import OrderFree
from dedup.proof.replay import WHY_FRONT, TaskReplay
from dedup.proof.report import Books, Report
from dedup.proof.scout import Log, Plan, Row, Scout
from dedup.proof.spill import Spill, buckets_for, condensed, place_of

WHY_NO_OFFSET: Final = "the group has no committed offset for their partition, so what was judged is not known"
WHY_SHORTER: Final = "the source ends before the committed offset: it was deleted and made again, or truncated"
WHY_SOURCE_GONE: Final = "the source has lost its beginning, from which came records of"
WHY_COMPACTED: Final = "compaction took records from among them; checked without order: no ID twice, none missing"
WHY_BEFORE: Final = "source offsets before the first record that has left a trace; where `latest` was is not known"
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


@dataclass(slots=True)
class _Partition:
    """One source partition and all that was written of it."""

    cut: Cut
    plan: Plan
    books: Books
    log: Spill
    output: Written | None
    duplicates: Written | None
    conflicts: Written | None
    known: bool
    """Nothing before the first record read was judged."""
    excused_rows: int = 0
    """Rows at the output's beginning that came from source records which are gone."""
    gone_position: int = -1
    """What was forwarded from positions below this may have been in the output, which has lost its beginning."""
    uncertain: bool = False
    pending_found: int = 0
    copies_wanted: dict[str, int] = field(default_factory=dict)

    @property
    def copies(self) -> list[Written]:
        return [each for each in (self.duplicates, self.conflicts) if each is not None]

    def close(self) -> None:
        self.log.close()
        for each in (self.output, *self.copies):
            if each is not None:
                each.close()


def _verify_partition(cut: Cut, source: str, partition: int) -> None:
    books = Books(source, partition)
    cut.report.books.append(books)
    bounds = cut.bounds[source][partition]
    committed = cut.committed[source].get(partition)
    buckets = buckets_for(bounds.high - bounds.low)
    output = output_of(cut, partition, buckets)
    books.pending = bounds.high - min(bounds.high, committed or bounds.low)
    if committed is None:
        cut.report.unprovable(WHY_NO_OFFSET, len(output) if output is not None else books.pending)
        return
    if committed > bounds.high:
        cut.report.unprovable(WHY_SHORTER, committed - bounds.high)
        committed = bounds.high
    plan = _plan_for(cut.plan, output)
    start, known = start_of(cut, bounds, partition, output)
    books.skipped = start - bounds.low
    log, beside = _read_log(cut, plan, (partition, buckets), (start, committed), known=known)
    copies = _copies(cut, partition, buckets)
    held = _Partition(cut, plan, books, log, output, copies.get("duplicates"), copies.get("conflicts"), known)
    try:
        _judge(held)
        _balance(held, beside)
    finally:
        held.close()


def _read_log(
    cut: Cut, plan: Plan, number: tuple[int, int], span: tuple[int, int], *, known: bool
) -> tuple[Spill, int]:
    """Return the log in buckets, and how many of its records the late and dead-letter topics hold."""
    (partition, buckets), (start, committed) = number, span
    source = cut.topology.source.topics[0]
    scout = Scout(plan, ((0, partition),), from_start=known)
    log = cut.spill(buckets)
    beside = 0
    # The worker may have gone on since the cut began: then what it wrote is there, and its offset too.
    spans = ((start, committed, False), (committed, cut.still_committed(source, partition), True))
    for begin, end, pending in spans:
        for columns in cut.read(source, partition, begin, end):
            for row in scout.rows(_log(columns, partition), pending=pending):
                if keep(cut, log, row) and not pending:
                    beside += (row.late is not None) + (row.letter is not None)
    if cut.sample == 1:
        sides = [side for side in (plan.late, plan.dead_letters) if side is not None]
        beside += sum(side.count_below((0, partition), committed) for side in sides)
    return log, beside


def keep(cut: Cut, log: Spill, row: Row) -> bool:
    """Put a record into its bucket; False if it is not in the sample."""
    place = place_of(row.id, row.key, row.value)
    if not cut.sampled(place):
        cut.report.unsampled += 1
        return False
    size_bytes = len(row.key or b"") + sum(len(content or b"") for _, content in row.headers)
    log.add(place, row, size_bytes)
    return True


def _judge(held: _Partition) -> None:
    if held.output is not None and held.output.bounds.beheaded:
        held.gone_position = _gone_position(held, held.output)
    if held.output is not None and not held.known:
        # What precedes all that is explained is known only when all buckets are compared: so twice.
        for number in range(held.log.buckets):
            _judge_bucket(held, number, Report("", "", "", 0), Books("", 0))
        held.excused_rows = held.output.order.first_matched()
        held.pending_found, held.uncertain = 0, False
        held.copies_wanted.clear()
        held.cut.report.unprovable(f"{WHY_SOURCE_GONE} {held.output.topic}", held.excused_rows)
    for number in range(held.log.buckets):
        _judge_bucket(held, number, held.cut.report, held.books)
    if held.output is not None:
        report_displaced([held.output], held.cut.report)
    for written in held.copies:
        if written.bounds.beheaded:
            text = f"{written.topic} has lost its beginning"
            held.cut.report.unprovable(text, held.copies_wanted.get(written.topic, 0))
            continue
        for row in written.order.displaced():
            text = "not the record the model expects here"
            held.cut.report.violation("wrong_duplicate", written.place(row), text)


def _judge_bucket(held: _Partition, number: int, report: Report, books: Books) -> None:
    task = TaskReplay(held.plan, books, report, ((0, held.books.partition),))
    task.take(map(Row.of, held.log.bucket(number)))
    if held.output is not None:
        _excuse_deleted(held, task, report)
        _compare_output(held, task, held.output, held.output.bucket(number), report)
    for written, expected in ((held.duplicates, task.duplicates), (held.conflicts, task.conflicts)):
        if written is not None:
            _compare_copies(held, task, (written, written.bucket(number)), expected, report)
    held.uncertain = held.uncertain or task.uncertain


def _compare_output(held: _Partition, task: TaskReplay, output: Written, seen: list[Seen], report: Report) -> None:
    forwarded = task.forwarded
    found = matched([forwarded.expected], [[each.digest for each in seen]], from_end=not held.known)
    output.order.match([(seen[at.row].row, 0, forwarded.positions[wanted.row]) for at, wanted in found.matched])
    held.pending_found += sum(wanted.row in forwarded.pending for _, wanted in found.matched)
    found.extra = [place for place in found.extra if seen[place.row].row >= held.excused_rows]
    unseen: list[Place] | None = [] if output.truncated else None
    explain(found, [task], [output], [seen], report, absent_are=unseen)
    if unseen:
        task.books.not_provable += len(unseen)
        report.unprovable(WHY_OPEN, len(unseen))


def _balance(held: _Partition, beside: int) -> None:
    cut, books, output = held.cut, held.books, held.output
    if output is None or held.uncertain or output.bounds.beheaded or output.truncated or not held.known:
        return
    if cut.plan.late is None and not cut.plan.late_forwarded:
        beside += books.late  # dropped, as the topology says
    books.ended = len(output) - held.pending_found + books.duplicates + beside
    if not books.balanced:
        text = f"read {books.read}, but {books.ended} ended as unique, duplicate, late or dead letter"
        cut.report.violation("unbalanced", f"{books.topic}/{books.partition}", text)


def _gone_position(held: _Partition, output: Written) -> int:
    """Return the position of the first record that the output still has."""
    if output.first_kept is None:
        return 1 << 62
    place, first = output.first_kept
    task = TaskReplay(held.plan, Books("", 0), Report("", "", "", 0), ((0, held.books.partition),))
    task.take(map(Row.of, held.log.bucket(place % held.log.buckets)))
    wanted, kept = task.forwarded.expected.digests, output.bucket(place % held.log.buckets)
    equal = [row for row, each in enumerate(wanted) if each == first]
    # Records may be equal; of those expected the last ones are there.
    there = sum(seen.digest == first for seen in kept)
    return task.forwarded.positions[equal[-there:][0]] if equal else -1


def _excuse_deleted(held: _Partition, task: TaskReplay, report: Report) -> None:
    """What was forwarded before the first record that the output still has, may have been there."""
    optional = task.forwarded.expected.optional
    early = (row for row, position in enumerate(task.forwarded.positions) if position < held.gone_position)
    fresh = set(early) - optional
    optional |= fresh
    task.books.not_provable += len(fresh)
    report.unprovable(WHY_OUTPUT_GONE, len(fresh))


def _copies(cut: Cut, partition: int, buckets: int) -> dict[str, Written]:
    """Return the duplicates and conflicts topics: they are written in order, to the partition of the same number."""
    found: dict[str, Written] = {}
    for name, topic in (("duplicates", cut.topology.duplicates), ("conflicts", cut.topology.conflicts)):
        if topic is None or not cut.partitions[topic]:
            continue
        if cut.partitions[topic] < cut.partitions[cut.topology.source.topics[0]]:
            bounds = cut.bounds[topic]
            text = f"{topic} has fewer partitions than the source"
            cut.report.unprovable(text, sum(each.high - each.low for each in bounds.values()) if not partition else 0)
            continue
        found[name] = cut.written(topic, partition, buckets, stamped=False)
    return found


def _compare_copies(
    held: _Partition, task: TaskReplay, there: tuple[Written, list[Seen]], expected: Expected, report: Report
) -> None:
    written, seen = there
    held.copies_wanted[written.topic] = held.copies_wanted.get(written.topic, 0) + len(expected.digests)
    if written.bounds.beheaded:
        return
    found = matched([expected], [[each.digest for each in seen]])
    written.order.match([(seen[at.row].row, 0, expected.positions[wanted.row]) for at, wanted in found.matched])
    if written.truncated:
        report.unprovable(WHY_OPEN, len(found.missing))
        found.missing.clear()
    for missing in found.missing:
        place = f"{held.books.topic}/{held.books.partition} offset {expected.positions[missing.row]}"
        report.violation("wrong_duplicate", place, f"a duplicate: it is not in {written.topic}, or is changed there")
    excused = 0 if held.known else written.order.first_matched()
    for extra in found.extra:
        copy = seen[extra.row]
        if task.doubtful(copy.id, copy.time_ms, timed=not written.broker_time):
            report.unprovable(WHY_FRONT)
        elif copy.row >= excused:
            text = "not the record the model expects here"
            report.violation("wrong_duplicate", written.place(copy.row), text)
        else:
            report.unprovable(f"{WHY_SOURCE_GONE} {written.topic}")


def _verify_compacted(cut: Cut, source: str) -> None:
    """Check what needs no order and no neighbours: records that are gone took part in the verdicts on those left."""
    cut.report.method = f"order-free checks: {' and '.join(sorted(cut.compacted))} is compacted"
    buckets = buckets_for(sum(each.high - each.low for each in cut.bounds[source].values()))
    numbers = range(cut.partitions[source])
    written = [each for partition in numbers if (each := output_of(cut, partition, buckets)) is not None]
    judged = cut.spill(buckets)
    for partition in numbers:
        bounds, committed = cut.bounds[source][partition], cut.committed[source].get(partition)
        if committed is None:
            cut.report.unprovable(WHY_NO_OFFSET, bounds.high - bounds.low)
            continue
        output = written[partition] if written else None
        start, _ = start_of(cut, bounds, partition, output)
        if cut.topology.source.start == "latest" and partition not in cut.begins[source]:
            cut.report.unprovable(WHY_BEFORE, max(0, min(start, committed) - bounds.low))
        for columns in cut.read(source, partition, start, committed):
            for place, row in _judgeable(cut, columns, partition):
                judged.add(place, row)
            cut.report.unprovable(WHY_COMPACTED, len(columns.offsets))
    for number in range(buckets):
        free = OrderFree(cut, written, (each.bucket(number) for each in written))
        for partition, offset, own, time_ms in judged.bucket(number):
            free.must_be_somewhere(f"{source}/{partition} offset {offset}", own, time_ms, Source(0, partition, offset))
    judged.close()
    for each in written:
        each.close()


def _judgeable(cut: Cut, columns: Columns, partition: int) -> Iterator[tuple[int, tuple[int, int, bytes, int]]]:
    extracted = extracted_of(cut.plan.extract, columns)
    for row, offset in enumerate(columns.offsets):
        own = extracted.ids[row]
        if row in extracted.faults or own is None or cut.plan.dead_letters.holds(Source(0, partition, offset)):
            continue
        place = place_of(own, None, None)
        if cut.sampled(place):
            yield place, (partition, offset, own, extracted.times_ms[row])


def output_of(cut: Cut, partition: int, buckets: int) -> Written | None:
    """Return what is in the output's partition of the same number; None where nothing is forwarded."""
    output = cut.topology.output
    if output is None:
        return None
    # A topic that is not there holds nothing.
    cut.bounds[output.topic].setdefault(partition, Bounds(0, 0, beheaded=False))
    # Where future times are clamped, the output's timestamps are the worker's clock's.
    return cut.written(output.topic, partition, buckets, stamped=cut.plan.rules.future != "clamp")


def _plan_for(plan: Plan, output: Written | None) -> Plan:
    stamped = plan.rules.future != "clamp" and not (output is not None and output.broker_time)
    return replace(plan, output_stamped=stamped)


def _log(columns: Columns, partition: int) -> Log:
    return Log(columns, [Source(0, partition, offset) for offset in columns.offsets])


def start_of(cut: Cut, bounds: Bounds, partition: int, output: Written | None) -> tuple[int, bool]:
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
            start = _first_judged(cut, _plan_for(cut.plan, output), bounds, partition, output)
            if output is not None and output.bounds.beheaded and start > bounds.low:
                # Earlier traces may be deleted.
                cut.starts[partition] = start
                return start, False
            return start, start > bounds.low or not bounds.beheaded


def _first_judged(cut: Cut, plan: Plan, bounds: Bounds, partition: int, output: Written | None) -> int:
    """With ``start: latest`` no one wrote down where that was: it is the first record that has left a trace."""
    first_letter = plan.dead_letters.first_offset(partition)
    if first_letter is None:
        first_letter = bounds.high
    if output is None or not output.first_digests:
        return first_letter
    topic = cut.topology.source.topics[0]
    for columns in cut.reader.read(topic, partition, bounds.low, min(first_letter, bounds.high)):
        for row, offset in enumerate(columns.offsets):
            headers = columns.headers[row]
            if plan.source_header:
                headers = [*headers, (SOURCE_HEADER, f"{topic}/{partition}/{offset}".encode())]
            time_ms = columns.timestamps_ms[row] if plan.output_stamped else 0
            if digest(columns.keys[row], condensed(columns.values[row]), headers, time_ms) in output.first_digests:
                return offset
    return first_letter


def report_leftovers(cut: Cut, side: SideTopic) -> None:
    """Report records of a side topic that no replayed record accounts for."""
    for source, filed, again in side.left():
        place = side.place(filed)
        if again:
            topic = cut.topology.source.topics[source.topic]
            text = f"source record {topic}/{source.partition} offset {source.offset} is there twice"
            cut.report.violation("duplicated", place, text)
        else:
            _report_leftover(cut, side, source, place)
    for partition, offset in side.strangers():
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
    if source.offset < cut.starts.get(source.partition, 0):
        cut.report.unprovable(WHY_BEFORE)
        return
    text = f"names {topic}/{source.partition} offset {source.offset}, which is no record of the source"
    cut.report.violation("phantom", place, text)
