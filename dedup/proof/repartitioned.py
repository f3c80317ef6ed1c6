"""A topology that repartitions: the repartition topic is the log that was judged, where it still holds the records.

Two steps are checked apart. From the source to the repartition topic: every record once and unchanged. From there to
the output: the model's verdicts. A record purged from the repartition topic is checked without order (`orderfree`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from dedup.core.model import Feed
from dedup.core.window import Source
from dedup.proof.compare import Headers, compare, digest
from dedup.proof.cut import Cut, Written
from dedup.proof.differences import explain
from dedup.proof.direct import report_leftovers
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
from dedup.proof.replay import Log, TaskReplay
from dedup.proof.report import Books

RESERVED: Final = frozenset({SOURCE_HEADER, TIMESTAMP_HEADER, IDLE_HEADER})
WHY_PURGED: Final = "purged from the repartition topic; checked without order: nothing lost, no ID twice"
WHY_COPIES: Final = "duplicates and conflicts topics behind a repartition topic are not compared"


@dataclass(slots=True)
class Carried:
    """What the repartition topic holds of one source partition: offsets, and 8 bytes of each record's digest."""

    offsets: array[int] = field(default_factory=lambda: array("q"))
    digests: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, offset: int, content: bytes) -> None:
        """Note a record."""
        self.offsets.append(offset)
        self.digests.append(int.from_bytes(content[:8], "little"))


def verify_repartitioned(cut: Cut) -> None:
    """Replay what the repartition topic holds, compare the output, and account for every source record."""
    log = cut.topology.repartition_topic
    carried: dict[Feed, Carried] = {
        (position, partition): Carried()
        for position, topic in enumerate(cut.topology.source.topics)
        for partition in range(cut.partitions[topic])
    }
    written = _outputs(cut)
    stamped = cut.plan.rules.future != "clamp" and not any(each.broker_time for each in written)
    cut.plan = replace(cut.plan, output_stamped=stamped, duplicates=False, conflicts=False)
    purged = any(bounds.beheaded for bounds in cut.bounds[log].values())
    free = OrderFree(cut, written) if purged else None
    tasks = [
        _replay(cut, log, partition, carried)
        for partition in range(cut.partitions[log])
        # Of several feeds one may be far ahead of stream time: how far the purged ones were, nothing bounds.
        if not cut.bounds[log][partition].beheaded
    ]
    beside = _account_for_sources(cut, carried, free)
    if cut.topology.output is not None:
        everyone = [*tasks, beside]
        found = compare([task.forwarded.expected for task in everyone], [each.digests for each in written])
        if free is not None:
            # What was purged was forwarded too: an unknown record in the output proves nothing.
            found.extra.clear()
        explain(found, everyone, written, cut.report, cut.ids_of)
    if cut.topology.duplicates is not None or cut.topology.conflicts is not None:
        cut.report.unprovable(WHY_COPIES, sum(task.books.duplicates for task in tasks))
    cut.report.method = "replay of the repartition topic" + (", order-free checks of what is purged" if purged else "")
    if free is None:
        for side in (cut.plan.late, cut.plan.dead_letters):
            if side is not None:
                report_leftovers(cut, side)


def _outputs(cut: Cut) -> list[Written]:
    output = cut.topology.output
    if output is None:
        return []
    stamped = cut.plan.rules.future != "clamp"
    return [cut.written(output.topic, partition, stamped=stamped) for partition in range(cut.partitions[output.topic])]


def _replay(cut: Cut, log: str, partition: int, carried: dict[Feed, Carried]) -> TaskReplay:
    books = Books(log, partition)
    cut.report.books.append(books)
    bounds = cut.bounds[log][partition]
    committed = cut.committed[log].get(partition, bounds.low)
    task = TaskReplay(cut.plan, books, cut.report, list(carried), from_start=True)
    for columns in cut.read(log, partition, bounds.low, committed):
        task.take(_unwrap(cut, columns, partition, carried))
    for columns in cut.read(log, partition, committed, cut.reader.bounds(log, [partition])[partition].high):
        task.take(_unwrap(cut, columns, partition, carried), pending=True)
    return task


def _unwrap(cut: Cut, columns: Columns, partition: int, carried: dict[Feed, Carried]) -> Log:
    """Return the records as they were in the source, and note that they were carried over."""
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
            continue
        content = digest(columns.keys[row], columns.values[row], own, columns.timestamps_ms[row])
        feed = (source.topic, source.partition)
        if feed in carried:
            carried[feed].add(source.offset, content)
    return Log(columns, sources, frozenset(idle_rows))


def _origin(cut: Cut, headers: Headers) -> tuple[Source | None, bool]:
    topics = cut.topology.source.topics
    marker = header(headers, IDLE_HEADER)
    if marker is not None:
        return parse_source(marker + b"/0", topics), True
    return parse_source(header(headers, SOURCE_HEADER), topics), False


def _account_for_sources(cut: Cut, carried: dict[Feed, Carried], free: OrderFree | None) -> TaskReplay:
    """Check that every source record was carried over once, unchanged; return what was forwarded past the log."""
    feeds = list(carried)
    beside = TaskReplay(cut.plan, Books("past the repartition topic", 0), cut.report, feeds, from_start=True)
    for (position, partition), held in carried.items():
        topic = cut.topology.source.topics[position]
        committed = cut.committed[topic].get(partition)
        if committed is None:
            continue
        start = _start(cut, topic, partition, held)
        offsets = np.frombuffer(held.offsets, dtype=np.int64)
        order = np.argsort(offsets, kind="stable")
        offsets, digests = offsets[order], np.frombuffer(held.digests, dtype=np.uint64)[order]
        _report_twice(cut, f"{topic}/{partition}", offsets)
        for columns in cut.read(topic, partition, start, committed):
            _match(cut, columns, (position, partition), offsets, digests, beside, free)
    if beside.books.read:
        cut.report.books.append(beside.books)
    return beside


def _start(cut: Cut, topic: str, partition: int, held: Carried) -> int:
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
            return min(held.offsets, default=cut.bounds[topic][partition].high)


def _report_twice(cut: Cut, place: str, offsets: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    for offset in offsets[1:][offsets[1:] == offsets[:-1]]:
        cut.report.violation("duplicated", f"{place} offset {offset}", "it is in the repartition topic twice")


def _match(  # one call site; a class would only rename the seven
    cut: Cut,
    columns: Columns,
    feed: Feed,
    offsets: np.ndarray[tuple[int], np.dtype[np.int64]],
    digests: np.ndarray[tuple[int], np.dtype[np.uint64]],
    beside: TaskReplay,
    free: OrderFree | None,
) -> None:
    for row, headers in enumerate(columns.headers):
        if any(name in RESERVED for name, _ in headers):
            columns.headers[row] = [each for each in headers if each[0] not in RESERVED]
    wanted = np.array(columns.offsets, dtype=np.int64)
    found = np.searchsorted(offsets, wanted)
    inside = np.minimum(found, max(len(offsets) - 1, 0))
    there = (offsets[inside] == wanted) if len(offsets) else np.zeros(len(wanted), dtype=bool)
    contents = map(digest, columns.keys, columns.values, columns.headers, columns.timestamps_ms)
    absent: list[int] = []
    for row, content in enumerate(contents):
        if not there[row]:
            absent.append(row)
        elif int.from_bytes(content[:8], "little") != int(digests[inside[row]]):
            place = beside.place(Source(*feed, columns.offsets[row]))
            cut.report.violation("changed", place, "stands in the repartition topic with other content")
    if absent:
        _account_for_absent(cut, columns.rows(absent), feed, beside, free)


def _account_for_absent(cut: Cut, columns: Columns, feed: Feed, beside: TaskReplay, free: OrderFree | None) -> None:
    """Handle records that are not in the log: forwarded or dead-lettered without an ID, purged, or lost."""
    extracted = extracted_of(cut.plan.extract, columns)
    faulty = sorted(extracted.faults)
    if faulty:
        some = columns.rows(faulty)
        beside.take(Log(some, [Source(*feed, offset) for offset in some.offsets]))
    for row, offset in enumerate(columns.offsets):
        source = Source(*feed, offset)
        tracking_id = extracted.ids[row]
        if row in extracted.faults or tracking_id is None:
            continue
        if source in cut.plan.dead_letters.filed:
            del cut.plan.dead_letters.filed[source]
            cut.report.unprovable("dead letters of the repartition step")
        elif free is None:
            cut.report.violation("lost", beside.place(source), f"not in {cut.topology.repartition_topic}")
        else:
            free.must_be_somewhere(beside.place(source), tracking_id, extracted.times_ms[row], source)
            cut.report.unprovable(WHY_PURGED)
