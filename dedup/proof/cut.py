"""One cut through the topics of a topology: what is read, up to where, and what the side topics hold."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from dedup.core.model import Feed, ModelRules
from dedup.errors import StateIncompatible
from dedup.proof.compare import digest
from dedup.proof.evidence import DEAD_TAIL, LATE_TAIL, SideTopic, forwarded_by_replay, read_side_topic
from dedup.proof.kafka_reader import Bounds, Columns, KafkaReader, OpenTransaction
from dedup.proof.replay import Plan
from dedup.proof.report import Report
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


@dataclass(slots=True)
class Written:
    """What is in one partition of a topic that the worker writes, within the cut."""

    topic: str
    partition: int
    bounds: Bounds
    digests: list[bytes] = field(default_factory=list)
    offsets: array[int] = field(default_factory=lambda: array("q"))
    broker_time: bool = False

    def place(self, row: int) -> str:
        """Return where a record is, for people."""
        return f"{self.topic}/{self.partition} offset {self.offsets[row]}"


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
    observed: Counter[Feed]
    """How many records of each source partition, judged at the cut, the late and dead-letter topics hold."""
    total: int = 0
    done: int = 0

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterable[Columns]:
        """Yield committed records of [start, end), and tell how far it is."""
        try:
            for columns in self.reader.read(topic, partition, start, end):
                self.done += len(columns.offsets)
                self.progress(Progress(f"{topic}/{partition}", self.done, max(self.total, self.done)))
                yield columns
        except OpenTransaction as fact:
            self.report.unprovable(f"{WHY_OPEN}: {fact}")

    def written(self, topic: str, partition: int, *, stamped: bool) -> Written:
        """Return what is in a partition; ``stamped``: timestamps are part of the digests, if the topic keeps them."""
        bounds = self.bounds[topic][partition]
        found = Written(topic, partition, bounds)
        for read in self.read(topic, partition, bounds.low, bounds.high):
            columns = self._of_workers(read)
            self.report.unprovable(WHY_REPLAYED, len(read.offsets) - len(columns.offsets))
            found.broker_time = columns.broker_time
            times_ms = columns.timestamps_ms
            if not stamped or columns.broker_time:
                times_ms = [0] * len(times_ms)
            found.digests += map(digest, columns.keys, columns.values, columns.headers, times_ms)
            found.offsets.extend(columns.offsets)
        return found

    def _of_workers(self, columns: Columns) -> Columns:
        """Return the records without those that `dedup replay` forwarded, which no verdict accounts for."""
        topics = self.topology.source.topics
        apart = {row for row, own in enumerate(columns.headers) if own and forwarded_by_replay(own, topics)}
        return columns.rows([row for row in range(len(columns.offsets)) if row not in apart]) if apart else columns

    def still_committed(self, topic: str, partition: int) -> int:
        """Return the group's committed offset now: what is between it and the cut's is pending."""
        now = self.reader.committed(self.topology.name, topic, [partition])
        return now.get(partition, self.committed[topic].get(partition, 0))

    def ids_of(self, written: Written, rows: set[int]) -> dict[int, bytes | None]:
        """Return the tracking IDs of some rows; reads the partition again, as IDs are not kept for all."""
        found: dict[int, bytes | None] = {}
        at = 0
        for read in self.reader.read(written.topic, written.partition, written.bounds.low, written.bounds.high):
            columns = self._of_workers(read)
            wanted = [row for row in range(len(columns.offsets)) if at + row in rows]
            if wanted:
                some = columns.rows(wanted)
                extracted = self.plan.extract(some.keys, some.values, some.headers, some.timestamps_ms)
                found.update(zip((at + row for row in wanted), extracted.ids, strict=True))
            at += len(columns.offsets)
        return found


def take_cut(topology: Topology, reader: KafkaReader, report: Report, progress: OnProgress) -> Cut:
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
    plan = _plan(topology, reader, bounds)
    done = sum(
        each.high - each.low
        for side in (plan.late, plan.dead_letters)
        if side is not None
        for each in bounds[side.name].values()
    )
    observed = _observed(topology, plan, committed)
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
        observed,
        total,
        done,
    )


def _observed(topology: Topology, plan: Plan, committed: dict[str, dict[int, int]]) -> Counter[Feed]:
    found: Counter[Feed] = Counter()
    for side in (plan.late, plan.dead_letters):
        if side is not None:
            for source in [*side.filed, *(source for source, _ in side.repeated)]:
                offset = committed[topology.source.topics[source.topic]].get(source.partition, 0)
                found[source.topic, source.partition] += source.offset < offset
    return found


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


def _plan(topology: Topology, reader: KafkaReader, bounds: dict[str, dict[int, Bounds]]) -> Plan:
    topics = topology.source.topics
    late: SideTopic | None = None
    if isinstance(topology.late, LateTo):
        name = topology.late.topic
        late = read_side_topic(reader, name, bounds[name], topics, LATE_TAIL)
    dead_letters = read_side_topic(reader, topology.dead_letter, bounds[topology.dead_letter], topics, DEAD_TAIL)
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
