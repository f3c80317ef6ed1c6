"""Determines the end offsets of one verification, and reads the records that workers wrote below these offsets.

The module sorts records into buckets by tracking ID (`spill`), and checks the order of records separately (`Order`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dedup.core.event_time import create_time_fault
from dedup.core.formats import SCHEMA_UNKNOWN
from dedup.core.reference_model import Feed, ModelRules
from dedup.core.window import Source
from dedup.errors import StateIncompatible
from dedup.flow_loader import load_flow
from dedup.store.directory import open_more_files
from dedup.topology.model import LateTo, Topology, extractor_of
from dedup.verify.compare import Column, SeenColumns, contents_of, digest, digests, out_of_order, time_of, without_time
from dedup.verify.evidence import DEAD_TAIL, LATE_TAIL, VERDICT_HEADER, SideTopic, extracted_of, forwarded_by_replay
from dedup.verify.flow_outputs import FlowOutputs
from dedup.verify.kafka_reader import Bounds, KafkaReader, OpenTransaction, RecordColumns, StartDeleted, read_left
from dedup.verify.log_scan import Log, Plan
from dedup.verify.report import Report
from dedup.verify.spill import BUCKET_ROWS, Spill, buckets_for, place_of, places_of

WHY_REPLAYED: Final = "late records that `dedup replay` forwarded, outside the guarantee"
WHY_RESET: Final = "offsets of output and side topics that are older than the last `dedup reset`"
WHY_SHORTER: Final = "ends before the committed offset: it was deleted and recreated, or truncated"
WHY_OPEN: Final = "a transaction stays open in a topic they were written to"
WHY_MEANWHILE: Final = "offsets deleted after the verification had begun, and before it read them, in"
_MOST_LATE: Final = 100_000
_Result = TypeVar("_Result")

OnProgress = Callable[[str, int, int], None]
"""A callback that gets the partition, the number of records read so far, and the total number of records."""


class Order:
    """Checks that the records in one partition are in the order in which each task judged them."""

    def __init__(self, bounds: Bounds, matches: Spill) -> None:
        self._bounds: Final = bounds
        self._matches: Final = matches
        """The offset, task, and log position of each matched record. Each bucket holds a range of offsets."""

    def forget(self) -> None:
        """Remove all matched records."""
        self._matches.clear()

    def match(self, offsets: Column, tasks: Column, positions: Column) -> None:
        """Add matched records as columns: offset, task, and position in the task's log."""
        self._matches.add((offsets - self._bounds.low) // BUCKET_ROWS, (offsets, tasks, positions))
        self._matches.flush()  # Many partitions are matched one after another, so no partition keeps rows in memory.

    def first_matched(self) -> int:
        """Return the offset of the first matched record, or the end of the partition if no record is matched."""
        return next((int(offsets[0]) for offsets, _, _ in self._matched()), self._bounds.high)

    def first_position(self, task: int) -> int | None:
        """Return the log position of a task's first matched record, or None if the task has no matched record."""
        return next((int(own[0]) for _, tasks, found in self._matched() if len(own := found[tasks == task])), None)

    def displaced(self) -> list[int]:
        """Return the offsets of the smallest set of records whose removal leaves each task's records in log order."""
        last: dict[int, int] = {}
        unsorted: set[int] = set()
        for _, tasks, positions in self._matched():
            for task in np.unique(tasks).tolist():
                own = positions[tasks == task]
                if last.get(task, -1) > own[0] or bool(np.any(np.diff(own) < 0)):
                    unsorted.add(task)
                last[task] = max(last.get(task, -1), int(own.max()))
        return sorted(offset for task in unsorted for offset in self._displaced_of(task))

    def _displaced_of(self, task: int) -> list[int]:
        own = [(offsets[tasks == task], positions[tasks == task]) for offsets, tasks, positions in self._matched()]
        return disorder(np.concatenate([offsets for offsets, _ in own]), np.concatenate([found for _, found in own]))

    def _matched(self) -> Iterator[tuple[Column, Column, Column]]:
        """Yield the offsets, tasks, and log positions of each range of offsets, in ascending order of offset."""
        for number in range(self._matches.buckets):
            matches = np.array(self._matches.bucket(number))
            if matches.size:
                matches = matches[:, np.argsort(matches[0], kind="stable")]
                # A record that is matched again in a second pass is counted only once.
                offsets, tasks, positions = matches[:, np.diff(matches[0], append=-1) != 0]
                yield offsets, tasks, positions


def disorder(rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> list[int]:
    """Return the smallest set of ``rows`` whose removal leaves ``positions`` in ascending order."""
    greatest = np.maximum.accumulate(positions)
    least = np.minimum.accumulate(positions[::-1])[::-1]
    # All positions before a border are less than all positions after the border, so only the runs between borders are
    # searched.
    borders = np.flatnonzero(greatest[:-1] < least[1:]) + 1
    starts, ends = np.append([0], borders), np.append(borders, len(rows))
    found: list[int] = []
    for run in np.flatnonzero(ends - starts > 1).tolist():
        first = int(starts[run])
        inside = array("q", positions[first : int(ends[run])].tobytes())
        found += (int(rows[first + at]) for at in out_of_order(inside))
    return found


@dataclass(slots=True)
class WrittenPartition:
    """The sampled records of one partition of a topic that workers write to, sorted into buckets."""

    topic: str
    partition: int
    bounds: Bounds
    spill: Spill
    order: Order
    broker_time: bool = False
    """True if a broker has set the timestamp of a record (LogAppendTime)."""
    compacted: bool = False
    """True if the topic is compacted, so that any record may have been removed."""
    timeless: bool = False
    """True if the digests of `bucket` omit timestamps."""
    first_digests: frozenset[bytes] = frozenset()
    """Digests of the partition's first record, even if it is not sampled, with and without a verdict header from a
    worker.
    """
    first_kept: tuple[int, bytes] | None = None
    """The hash (`spill.places_of`) and the digest of the first sampled record."""
    truncated: bool = False
    """True if a transaction stays open, which hides the records after the transaction's beginning."""
    schemas_gone: bool = False
    """True if the IDs of some records are unknown, because the schema registry does not know their schemas."""
    late: set[bytes] = field(default_factory=set)
    """Digests of records marked as forwarded late, sampled or not, until there are more than `_MOST_LATE`."""

    def may_begin_before(self, time_ms: int) -> bool:
        """Return whether the first record's timestamp is less than a time. The record's digests must include the
        timestamp.
        """
        return any(time_of(each) < time_ms for each in self.first_digests)

    @property
    def late_digests(self) -> set[bytes] | None:
        """Digests of all records marked as forwarded late, or None if some of these digests may be unknown."""
        partial = self.bounds.start_deleted or self.truncated or len(self.late) > _MOST_LATE
        return None if partial else self.late

    def place(self, offset: int) -> str:
        """Return the topic, partition, and offset of a record as text for reports."""
        return f"{self.topic}/{self.partition} offset {offset}"

    def bucket(self, number: int) -> SeenColumns:
        """Return the records of a bucket in ascending order of offset."""
        found = SeenColumns(*self.spill.bucket(number))
        return found._replace(digests=list(map(without_time, found.digests))) if self.timeless else found

    def forget_times(self) -> None:
        """Omit timestamps from all digests, because the original timestamps of some records are unknown."""
        self.timeless = True
        self.first_digests = frozenset(map(without_time, self.first_digests))
        self.late = set(map(without_time, self.late))
        if self.first_kept is not None:
            self.first_kept = (self.first_kept[0], without_time(self.first_kept[1]))


@dataclass(slots=True)
class Cut:
    """The offsets up to which one verification reads each topic, and the data that it has read."""

    topology: Topology
    reader: KafkaReader
    report: Report
    progress: OnProgress
    partitions: dict[str, int]
    """Maps each topic to its number of partitions, which is 0 if the topic does not exist."""
    committed: dict[str, dict[int, int]]
    """Maps each feeding topic and partition to the group's committed offset at the time of the cut."""
    bounds: dict[str, dict[int, Bounds]]
    """Maps each topic and partition to its bounds, which are read after the committed offsets."""
    begins: dict[str, dict[int, int]]
    """Maps each source topic and partition to the start offset that `dedup reset --to` has set."""
    compacted: frozenset[str]
    """The names of the compacted topics. Their logs may lack records at any offset."""
    plan: Plan
    scratch: str
    """The directory for data that does not fit into memory."""
    sample: int = 1
    """The verification judges one in every ``sample`` tracking IDs."""
    begun_with: dict[str, int] = field(default_factory=dict)
    """Maps each topic that tasks read to its partition count when the state was created; empty if unknown."""
    total: int = 0
    done: int = 0
    starts: dict[int, int] = field(default_factory=dict)
    """Maps a source partition to its first known judged offset, if earlier output records may have been deleted."""
    unread: set[tuple[str, int]] = field(default_factory=set)
    """Topics and partitions that could not be read to their end."""
    held: list[Spill] = field(default_factory=list)
    """The spills (temporary files of rows) that `free` deletes."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterable[RecordColumns]:
        """Yield the committed records with offsets in [start, end), and report progress."""
        try:
            for columns in self.reader.read(topic, partition, start, end):
                self.done += len(columns.offsets)
                self.progress(f"{topic}/{partition}", self.done, max(self.total, self.done))
                yield columns
        except OpenTransaction as fact:
            self.unread.add((topic, partition))
            self.report.unprovable(f"{WHY_OPEN}: {fact}")

    def begin_later(self, fact: StartDeleted) -> None:
        """Do the same as the function `begin_later`, for this cut."""
        begin_later(self.bounds, self.report, fact)

    def again(self, unit: Callable[[], _Result], undo: Callable[[], object] = lambda: None) -> _Result:
        """Return the result of ``unit``, which reads partitions from their lower bounds.

        If the records that ``unit`` reads next have been deleted, the method undoes the changes of ``unit`` in this cut
        and its report. Then the method calls ``undo`` for all other changes, and calls ``unit`` again with later
        bounds.
        """
        while True:
            report, starts, held = self.report.copy(), dict(self.starts), len(self.held)
            try:
                return unit()
            except StartDeleted as fact:
                report.not_provable |= {
                    why: number for why, number in self.report.not_provable.items() if why.startswith(WHY_MEANWHILE)
                }
                self.report.restore(report)
                self.starts = starts
                while len(self.held) > held:
                    self.held.pop().close()
                self.begin_later(fact)
                undo()

    def look_again(self, topic: str) -> None:
        """Set the bounds of each partition whose first records have been deleted since the cut."""
        for partition, now in self.reader.bounds(topic, list(self.bounds[topic])).items():
            if now.low > self.bounds[topic][partition].low:
                self.begin_later(StartDeleted(topic, partition, now.low))

    def read_judged(self, topic: str, partition: int, start: int, end: int) -> Iterable[RecordColumns]:
        """Do the same as `read` for a source topic.

        Raises StateIncompatible if a record lacks the append time that `event_time: arrival` needs.
        """
        for columns in self.read(topic, partition, start, end):
            if self.topology.by_arrival and columns.created is not None:
                raise StateIncompatible(create_time_fault(topic, f"{topic}/{partition} offset {columns.created}"))
            yield columns

    @property
    def feeds(self) -> list[Feed]:
        """All source partitions, each with the index of its topic in `source.topics`."""
        return self._feeds(self.partitions)

    @property
    def begun_feeds(self) -> list[Feed]:
        """The source partitions that existed when the state was created.

        These partitions affect stream time from the start.

        Without a layout record, the result contains all source partitions.
        """
        return self._feeds(self.partitions | self.begun_with)

    def _feeds(self, partitions: Mapping[str, int]) -> list[Feed]:
        topics = enumerate(self.topology.source.topics)
        return [(at, partition) for at, topic in topics for partition in range(partitions[topic])]

    @property
    def names_schemas(self) -> bool:
        """True if the records' schemas are in a schema registry, which may have lost some of the schemas."""
        return self.topology.source.needs_registry

    def whole(self, topic: str) -> bool:
        """Return whether every partition of a topic still contains its first record."""
        return not any(bounds.start_deleted for bounds in self.bounds[topic].values())

    def sampled(self, ids: Sequence[bytes | None], contents: Sequence[bytes]) -> Column:
        """Return the rows of the records in the sample, given the ID and the content of each record."""
        if self.sample == 1:
            return np.arange(len(ids))
        places = map(place_of, ids, contents)
        return np.flatnonzero([(place >> 32) % self.sample == 0 for place in places])

    def spill(self, buckets: int, numbers: int, others: int = 0) -> Spill:
        """Return an empty spill; `free` closes the spill."""
        return self.hold(Spill(self.scratch, buckets, numbers, others))

    def log_spill(self, buckets: int) -> Spill:
        """Return an empty spill for a log's columns; `free` closes the spill."""
        return self.hold(Log.spill(self.scratch, buckets))

    def hold(self, spill: Spill) -> Spill:
        """Register a spill, so that `free` closes it, and return the spill."""
        self.held.append(spill)
        return spill

    def written(self, topic: str, partition: int, buckets: int, *, stamped: bool) -> WrittenPartition:
        """Read a partition that workers write to. If ``stamped`` is true, digests include the producers' timestamps."""
        return self.again(partial(self._written, topic, partition, buckets, stamped=stamped))

    def _written(self, topic: str, partition: int, buckets: int, *, stamped: bool) -> WrittenPartition:
        bounds = self.bounds[topic][partition]
        order = Order(bounds, self.spill(buckets_for(bounds.high - bounds.low), 3))
        found = WrittenPartition(topic, partition, bounds, self.spill(buckets, 3, 2), order)
        found.compacted = topic in self.compacted
        for read in self.read(topic, partition, bounds.low, bounds.high):
            columns = self._of_workers(read)
            self.report.unprovable(WHY_REPLAYED, len(read.offsets) - len(columns.offsets))
            found.broker_time |= columns.broker_time
            if columns.offsets:
                self._add(found, columns, stamped=stamped and not columns.broker_time)
        if found.broker_time and stamped:
            found.forget_times()
        found.spill.flush()  # Many partitions are read one after another, so no partition keeps rows in memory.
        found.truncated = (topic, partition) in self.unread
        return found

    def _add(self, found: WrittenPartition, columns: RecordColumns, *, stamped: bool) -> None:
        extracted = extracted_of(self.plan.extract, columns)
        ids = extracted.ids
        found.schemas_gone |= any(fault.code == SCHEMA_UNKNOWN for fault in extracted.faults.values())
        contents = contents_of(columns.keys, columns.values)
        timestamps_ms = np.array(columns.timestamps_ms, np.int64) if stamped else np.zeros(len(ids), np.int64)
        exempt = [bool(own) and any(name == VERDICT_HEADER for name, _ in own) for own in columns.headers]
        seen = SeenColumns(
            np.array(columns.offsets, np.int64),
            np.array(extracted.times_ms, np.int64),
            np.array(exempt, np.int64),
            digests(contents, columns.headers, timestamps_ms),
            ids,
        )
        if not found.first_digests:
            found.first_digests = _of_first(columns, int(timestamps_ms[0]))
        for at in np.flatnonzero(exempt).tolist():
            if (VERDICT_HEADER, b"late") in columns.headers[at] and len(found.late) <= _MOST_LATE:
                found.late.add(seen.digests[at])
        places, kept = places_of(ids, contents), self.sampled(ids, contents)
        if len(kept):
            found.first_kept = found.first_kept or (int(places[kept[0]]), seen.digests[kept[0]])
            found.spill.add(places[kept], seen if len(kept) == len(ids) else seen.at(kept))

    def _of_workers(self, columns: RecordColumns) -> RecordColumns:
        """Drop the records that `dedup replay` forwarded, because no verdict accounts for them."""
        topics = self.topology.source.topics
        kept = [row for row, own in enumerate(columns.headers) if not (own and forwarded_by_replay(own, topics))]
        return columns if len(kept) == len(columns.offsets) else columns.rows(kept)

    def free(self) -> None:
        """Delete all temporary files except those with the records of the late and dead-letter topics."""
        while self.held:
            self.held.pop().close()

    def close(self) -> None:
        """Delete all temporary files."""
        self.free()
        for side in self.plan.sides:
            side.close()
        if self.plan.flowed is not None:
            self.plan.flowed.close()

    def pending(self, topic: str, partition: int) -> int:
        """Return the lag of a feeding partition, computed as `dedup status` computes it."""
        bounds, committed = self.bounds[topic][partition], self.committed[topic].get(partition)
        begin = max(bounds.low, committed or 0)
        if committed is None:
            return bounds.high - begin
        while begin < bounds.high:
            try:
                holds = self.reader.holds_records(topic, partition, begin, bounds.high)
                return bounds.high - begin if holds else 0
            except StartDeleted as fact:
                begin = fact.low
        return 0

    def configured_start(self, topic: str, partition: int) -> int | None:
        """Return the start offset that `dedup reset` or `source.start` sets, or None for `latest`."""
        bounds, begin = self.bounds[topic][partition], self.begins[topic].get(partition)
        if begin is not None:
            return max(begin, bounds.low)
        if partition >= self.begun_with.get(topic, partition + 1):
            return bounds.low  # The partition was added after the state was created.
        match self.topology.source.start:
            case "earliest":
                return bounds.low
            case int() as time_ms:
                found = self.reader.offset_for_time(topic, partition, time_ms)
                now = self.reader.bounds(topic, [partition])[partition]
                if now.low > bounds.low:
                    # The first record at or after the time may have been deleted since the cut.
                    self.begin_later(StartDeleted(topic, partition, now.low))
                    return self.configured_start(topic, partition)
                return bounds.high if found is None else found
            case _:
                return None

    def still_committed(self, topic: str, partition: int) -> int:
        """Return the group's current committed offset, which may be greater than the one in the cut."""
        now = self.reader.committed(self.topology.name, topic, [partition]).get(partition, 0)
        if now > self.bounds[topic][partition].high:
            now = min(now, self.reader.bounds(topic, [partition])[partition].high)
        return max(now, self.committed[topic].get(partition, 0))

    def exists(self, source: Source) -> bool:
        """Return whether the partition of a source record exists. The partition may have been added during the
        verification.
        """
        topic = self.topology.source.topics[source.topic]
        known = source.partition < self.partitions[topic]
        return known or source.partition < self.reader.partitions([topic])[topic]


def _of_first(columns: RecordColumns, time_ms: int) -> frozenset[bytes]:
    key, value, headers = columns.keys[0], columns.values[0], columns.headers[0]
    added = max((at for at, (name, _) in enumerate(headers) if name == VERDICT_HEADER), default=len(headers))
    both = (headers, [*headers[:added], *headers[added + 1 :]])
    return frozenset(digest(key, value, each, time_ms) for each in both)


class TopicOffsets(NamedTuple):
    """The offsets that a verification reads before it reads any records."""

    partitions: dict[str, int]
    committed: dict[str, dict[int, int]]
    bounds: dict[str, dict[int, Bounds]]
    begins: dict[str, dict[int, int]]


def offsets_of(topology: Topology, reader: KafkaReader, report: Report) -> TopicOffsets:
    """Read the group's committed offsets, then the first and last offsets of all topics that the topology reads or
    writes.

    Raises StateIncompatible if the topology and the cluster do not match.
    """
    output = topology.output.topic if topology.output is not None else None
    late = topology.late.topic if isinstance(topology.late, LateTo) else None
    named = (output, *topology.routes, late, topology.dead_letter, topology.duplicates, topology.conflicts)
    reading = list(dict.fromkeys([*topology.source.topics, *topology.feeding_topics]))
    partitions = reader.partitions([*reading, *(topic for topic in named if topic is not None)])
    _refuse_missing(topology, partitions)
    committed = {topic: reader.committed(topology.name, topic, range(partitions[topic])) for topic in reading}
    reset = topology.reset_group
    marks = {topic: reader.committed(reset, topic, range(number)) for topic, number in partitions.items()}
    begins = {topic: marks.pop(topic) for topic in topology.source.topics}
    bounds = {topic: reader.bounds(topic, range(number), marks.get(topic)) for topic, number in partitions.items()}
    report.unprovable(WHY_RESET, sum(each.before for of_topic in bounds.values() for each in of_topic.values()))
    return TopicOffsets(partitions, committed, bounds, begins)


def begin_later(bounds: Mapping[str, dict[int, Bounds]], report: Report, fact: StartDeleted) -> None:
    """Set a partition's bounds as if its first records had been deleted before the cut, and report the number of
    deleted records.

    Raises StartDeleted if the bounds do not contain the deleted records, because reading again would not help.
    """
    known = bounds.get(fact.topic, {}).get(fact.partition)
    if known is None:
        return
    if fact.low <= known.low:
        raise fact
    report.unprovable(f"{WHY_MEANWHILE} {fact.topic}", min(fact.low, known.high) - known.low)
    later = replace(known, low=fact.low, high=max(fact.low, known.high), start_deleted=True)
    bounds[fact.topic][fact.partition] = later


def begun_with(topology: Topology, reader: KafkaReader) -> dict[str, int]:
    """Return the partition count that each topic had when the state was created, taken from the newest layout record.

    The result is empty if there is no layout record, or if partitions cannot be added.
    """
    topic = topology.layout_topic
    if topology.direct or not reader.partitions([topic])[topic]:
        return {}
    counts: dict[str, int] = {}
    for partition, each in reader.bounds(topic).items():
        with suppress(OpenTransaction):  # The last record before an open transaction still applies.
            for columns in reader.read(topic, partition, each.low, each.high):
                counts = json.loads(columns.values[-1] or b"{}").get("counts", counts)
    return counts


def take_cut(
    topology: Topology, reader: KafkaReader, report: Report, progress: OnProgress, scratch: str, sample: int
) -> Cut:
    """Read the committed offsets, then the bounds of all topics, then the records of the late and dead-letter topics.

    Raises StateIncompatible if the topology and the cluster do not match.
    """
    open_more_files()  # Each partition of the output needs two files.
    found = offsets_of(topology, reader, report)
    partitions, committed, bounds, _ = found
    for topic, of_topic in committed.items():
        for partition, offset in of_topic.items():
            end = bounds[topic][partition].high
            report.unprovable(f"{topic} {WHY_SHORTER}", max(0, offset - end))
            of_topic[partition] = min(offset, end)
    kept = (*topology.source.topics, *(topic for topic, _ in topology.outlets))
    compacted = reader.compacted(topic for topic in dict.fromkeys(kept) if partitions[topic])

    read = partial(read_left, reader.read, partial(begin_later, bounds, report))

    def side(name: str, tail: tuple[str, ...]) -> SideTopic:
        found = SideTopic(name, scratch).read(read, bounds[name], topology.source.topics, tail)
        found.complete = found.complete and name not in compacted
        return found

    late = side(topology.late.topic, LATE_TAIL) if isinstance(topology.late, LateTo) else None
    letters, flowed = side(topology.dead_letter, DEAD_TAIL), None
    if topology.then is not None:
        flowed = FlowOutputs(load_flow(topology.then), topology.forwards_to, scratch)
        flowed.read(read, bounds, topology.source.topics, compacted)
        report.unprovable(WHY_REPLAYED, flowed.replayed)
    plan = Plan(topology, _model_rules(topology), extractor_of(topology), late, letters, flowed=flowed)
    begun = begun_with(topology, reader)
    cut = Cut(topology, reader, report, progress, *found, compacted, plan, scratch, sample, begun)
    cut.total = sum(each.high - each.low for of_topic in bounds.values() for each in of_topic.values())
    cut.done = sum(each.high - each.low for side in plan.sides for each in bounds[side.name].values())
    if flowed is not None:
        cut.done += sum(each.high - each.low for topic in flowed.topics for each in bounds[topic].values())
    return cut


def _refuse_missing(topology: Topology, partitions: dict[str, int]) -> None:
    absent = [topic for topic in (*topology.source.topics, *topology.feeding_topics) if not partitions[topic]]
    if absent:
        raise StateIncompatible(
            f"topology {topology.name}: the topic {' and '.join(dict.fromkeys(absent))} does not exist in this "
            f"cluster. Nothing can be verified. Check `brokers`, or run the topology first."
        )
    output = topology.output
    source = topology.source.topics[0]
    if topology.direct and output is not None and partitions[output.topic] not in {0, partitions[source]}:
        raise StateIncompatible(
            f"topology {topology.name}: {output.topic} has {partitions[output.topic]} partitions and {source} has "
            f"{partitions[source]}, but records keep their partition number. Nothing can be verified until both have "
            f"the same number, or the topology repartitions."
        )


def _model_rules(topology: Topology) -> ModelRules:
    window = topology.window
    return ModelRules(
        window.guard_ms,
        window.grace_ms,
        window.extend,
        window.extend_at_most_ms,
        missing=topology.missing.value,
        tombstones=topology.tombstones.value,
        on_conflict=topology.on_conflict.value,
        future=topology.future.value,
    )
