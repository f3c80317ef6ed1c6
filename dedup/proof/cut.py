"""One cut through the topics of a topology: what is read, up to where, and what the side topics hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from dedup.core.model import ModelRules
from dedup.errors import StateIncompatible
from dedup.proof.compare import digest
from dedup.proof.evidence import (
    DEAD_TAIL,
    LATE_TAIL,
    VERDICT_HEADER,
    SideTopic,
    extracted_of,
    forwarded_by_replay,
    read_side_topic,
)
from dedup.proof.kafka_reader import Bounds, Columns, KafkaReader, OpenTransaction
from dedup.proof.order import Column, Order
from dedup.proof.report import Report
from dedup.proof.scout import Plan
from dedup.proof.spill import Spill, condensed, place_of
from dedup.topology.extractor import extractor_of
from dedup.topology.model import LateForward, LateTo, Topology

WHY_REPLAYED: Final = "late records that `dedup replay` forwarded, outside the guarantee"
WHY_RESET: Final = "offsets of output and side topics that are older than the last `dedup reset`"
WHY_OPEN: Final = "a transaction stays open in a topic they were written to"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a verification is: records read of those to read."""

    doing: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Seen:
    """One record that the worker wrote."""

    row: int
    """Which of its partition's, among those looked at."""
    digest: bytes
    id: bytes | None
    time_ms: int
    exempt: bool
    """Forwarded by a policy that is outside the promise, says its header."""


@dataclass(slots=True)
class Written:
    """What is in one partition of a topic that the worker writes, within the cut: in buckets, and in order."""

    topic: str
    partition: int
    bounds: Bounds
    spill: Spill
    offsets: Column
    order: Order
    broker_time: bool = False
    first_digests: frozenset[bytes] = frozenset()
    """Of the first record, in the sample or not: as it is, and without the verdict that a worker may have added."""
    first_kept: tuple[int, bytes] | None = None
    """Place and digest of the first record looked at."""
    truncated: bool = False
    """A transaction stays open: what is behind it is not known."""

    def __len__(self) -> int:
        return len(self.offsets)

    def place(self, row: int) -> str:
        """Return where a record is, for people."""
        return f"{self.topic}/{self.partition} offset {self.offsets[row]}"

    def bucket(self, number: int) -> list[Seen]:
        """Return the records of a bucket, in their order."""
        return [Seen(*values) for values in self.spill.bucket(number)]

    def close(self) -> None:
        """Give the disk space back."""
        self.spill.close()
        self.offsets.close()
        self.order.close()


@dataclass(slots=True)
class Cut:
    """What one verification looks at."""

    topology: Topology
    reader: KafkaReader
    report: Report
    progress: OnProgress
    partitions: dict[str, int]
    """Topic -> partition count; 0 for a topic that does not exist."""
    committed: dict[str, dict[int, int]]
    """Feeding topic -> partition -> the group's committed offset when the cut began."""
    bounds: dict[str, dict[int, Bounds]]
    """Of the topics written, taken after the offsets; and of the topics read."""
    begins: dict[str, dict[int, int]]
    """Source topic -> partition -> where `dedup reset --to` has set its beginning."""
    compacted: frozenset[str]
    """Topics of which records may be missing between others."""
    plan: Plan
    scratch: str
    """A directory for what does not fit into memory."""
    sample: int = 1
    """One ID in so many is looked at."""
    total: int = 0
    done: int = 0
    starts: dict[int, int] = field(default_factory=dict)
    """Source partition -> the first offset with a trace, where records before it may have left one that is gone."""
    unread: set[tuple[str, int]] = field(default_factory=set)
    """Partitions that could not be read to their end."""
    held: list[Spill | Written] = field(default_factory=list)
    """Everything with a file, for a verification that ends half-way."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterable[Columns]:
        """Yield committed records of [start, end), and tell how far it is."""
        try:
            for columns in self.reader.read(topic, partition, start, end):
                self.done += len(columns.offsets)
                self.progress(Progress(f"{topic}/{partition}", self.done, max(self.total, self.done)))
                yield columns
        except OpenTransaction as fact:
            self.unread.add((topic, partition))
            self.report.unprovable(f"{WHY_OPEN}: {fact}")

    def sampled(self, place: int) -> bool:
        """Tell whether a record of this place (`spill.place_of`) is looked at."""
        return self.sample == 1 or (place >> 32) % self.sample == 0

    def spill(self, buckets: int) -> Spill:
        """Return an empty spill."""
        made = Spill(self.scratch, buckets)
        self.held.append(made)
        return made

    def written(self, topic: str, partition: int, buckets: int, *, stamped: bool) -> Written:
        """Return what is in a partition; ``stamped``: timestamps are part of the digests, if the topic keeps them."""
        bounds, scratch = self.bounds[topic][partition], self.scratch
        found = Written(topic, partition, bounds, self.spill(buckets), Column(scratch), Order(scratch))
        self.held.append(found)
        for read in self.read(topic, partition, bounds.low, bounds.high):
            columns = self._of_workers(read)
            self.report.unprovable(WHY_REPLAYED, len(read.offsets) - len(columns.offsets))
            found.broker_time = columns.broker_time
            if not found.first_digests and columns.offsets:
                found.first_digests = self._of_first(columns, stamped=stamped and not columns.broker_time)
            offsets: list[int] = []
            for place, offset, seen in self._seen(columns, len(found), stamped=stamped and not columns.broker_time):
                if not self.sampled(place):
                    continue
                if found.first_kept is None:
                    found.first_kept = (place, seen[1])
                found.spill.add(place, (len(found) + len(offsets), *seen[1:]))
                offsets.append(offset)
            found.offsets.extend(offsets)
        found.order.expect(len(found))
        found.truncated = (topic, partition) in self.unread
        return found

    @staticmethod
    def _of_first(columns: Columns, *, stamped: bool) -> frozenset[bytes]:
        headers, time_ms = columns.headers[0], columns.timestamps_ms[0] if stamped else 0
        added = max((at for at, (name, _) in enumerate(headers) if name == VERDICT_HEADER), default=len(headers))
        key, value = columns.keys[0], condensed(columns.values[0])
        both = (headers, [*headers[:added], *headers[added + 1 :]])
        return frozenset(digest(key, value, each, time_ms) for each in both)

    def _seen(
        self, columns: Columns, row: int, *, stamped: bool
    ) -> Iterator[tuple[int, int, tuple[int, bytes, bytes | None, int, bool]]]:
        """Yield the place, the offset and the values of `Seen` of each record."""
        extracted = extracted_of(self.plan.extract, columns)
        for at, offset in enumerate(columns.offsets):
            tracking_id = None if at in extracted.faults else extracted.ids[at]
            value, headers = condensed(columns.values[at]), columns.headers[at]
            time_ms = columns.timestamps_ms[at] if stamped else 0
            exempt = any(name == VERDICT_HEADER for name, _ in headers)
            content = digest(columns.keys[at], value, headers, time_ms)
            place = place_of(tracking_id, columns.keys[at], value)
            yield place, offset, (row + at, content, tracking_id, extracted.times_ms[at], exempt)

    def _of_workers(self, columns: Columns) -> Columns:
        """Return the records without those that `dedup replay` forwarded, which no verdict accounts for."""
        topics = self.topology.source.topics
        apart = {row for row, own in enumerate(columns.headers) if own and forwarded_by_replay(own, topics)}
        return columns.rows([row for row in range(len(columns.offsets)) if row not in apart]) if apart else columns

    def close(self) -> None:
        """All files are given back."""
        for each in self.held:
            each.close()
        for side in (self.plan.late, self.plan.dead_letters):
            if side is not None:
                side.close()

    def still_committed(self, topic: str, partition: int) -> int:
        """Return the group's committed offset now: what is between it and the cut's is pending."""
        now = self.reader.committed(self.topology.name, topic, [partition])
        return now.get(partition, self.committed[topic].get(partition, 0))


def take_cut(
    topology: Topology, reader: KafkaReader, report: Report, progress: OnProgress, scratch: str, sample: int
) -> Cut:
    """Return the cut: offsets first, then the ends of what is written, then the side topics' records."""
    feeding = topology.feeding_topics
    written = _written_topics(topology)
    partitions = reader.partitions([*topology.source.topics, *feeding, *written])
    _refuse_missing(topology, partitions)
    committed = {
        topic: reader.committed(topology.name, topic, range(partitions[topic]))
        for topic in dict.fromkeys([*topology.source.topics, *feeding])
    }
    marks = {
        topic: reader.committed(topology.reset_group, topic, range(number)) for topic, number in partitions.items()
    }
    begins = {topic: marks.pop(topic) for topic in topology.source.topics}
    bounds = {topic: reader.bounds(topic, range(number), marks.get(topic)) for topic, number in partitions.items()}
    report.unprovable(WHY_RESET, sum(each.before for of_topic in bounds.values() for each in of_topic.values()))
    compacted = reader.compacted(topic for topic in (*topology.source.topics, *_output(topology)) if partitions[topic])
    total = sum(each.high - each.low for of_topic in bounds.values() for each in of_topic.values())
    plan = _plan(topology, reader, bounds, scratch)
    done = sum(
        each.high - each.low
        for side in (plan.late, plan.dead_letters)
        if side is not None
        for each in bounds[side.name].values()
    )
    return Cut(
        topology,
        reader,
        report,
        progress,
        partitions,
        committed,
        bounds,
        begins,
        compacted,
        plan,
        scratch,
        sample,
        total,
        done,
    )


def _output(topology: Topology) -> list[str]:
    return [topology.output.topic] if topology.output is not None else []


def _written_topics(topology: Topology) -> list[str]:
    late = topology.late.topic if isinstance(topology.late, LateTo) else None
    output = topology.output.topic if topology.output is not None else None
    named = (output, late, topology.dead_letter, topology.duplicates, topology.conflicts)
    return [topic for topic in named if topic is not None]


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
            f"equal counts, or the topology repartitions."
        )


def _plan(topology: Topology, reader: KafkaReader, bounds: dict[str, dict[int, Bounds]], scratch: str) -> Plan:
    topics = topology.source.topics
    late: SideTopic | None = None
    side = partial(_side, reader, bounds, topics, scratch)
    if isinstance(topology.late, LateTo):
        late = side(topology.late.topic, LATE_TAIL)
    dead_letters = side(topology.dead_letter, DEAD_TAIL)
    return Plan(
        model_rules(topology),
        extractor_of(topology),
        topics,
        topology.max_clock_skew_ms,
        source_header=topology.output is not None and topology.output.headers,
        late=late,
        late_forwarded=isinstance(topology.late, LateForward),
        dead_letters=dead_letters,
        duplicates=topology.duplicates is not None,
        conflicts=topology.conflicts is not None,
    )


def _side(
    reader: KafkaReader,
    bounds: dict[str, dict[int, Bounds]],
    topics: tuple[str, ...],
    scratch: str,
    name: str,
    tail: tuple[str, ...],
) -> SideTopic:
    own = bounds[name]
    side = SideTopic(name, str(Path(scratch) / name), complete=not any(each.beheaded for each in own.values()))
    read_side_topic(reader, side, own, topics, tail)
    return side


def model_rules(topology: Topology) -> ModelRules:
    """Return the exact model's rules for a topology."""
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
