"""What a schedule runs on: the input, the rules, how many workers, and which faults may come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

from dedup.core.event_time import RecordTime
from dedup.core.extract import Extractor, compile_extractor
from dedup.core.fold import Rules
from dedup.core.reference_model import ModelRules
from dedup.core.tracking_id import KeyRule, TrackingId
from dedup.core.window import Feed, Source, Window
from dedup.kafka.consumer import TopicCheck
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import TopicPartition
from dedup.metrics import TaskNumbers
from dedup.store.directory import Keeping
from dedup.topology.parse import parse
from dedup.topology.schema import TransactionsSpec
from dedup.worker.dedup_task import DedupPlan
from dedup.worker.layout import Layout, encode_layout, refuse_other_layout
from dedup.worker.offsets import offset_metadata
from dedup.worker.record_collector import Limits, RecordCollector, Route, Routes
from dedup.worker.repartition_task import RepartitionPlan, RepartitionTask
from dedup.worker.task import Committing, TaskId, TaskWork
from dedup.worker.task_group import Members, TaskGroup
from dedup.worker.topics import Cluster as TopicsNow
from tests.simulation.cluster import Cluster, Record
from tests.simulation.oracle import Judged, new_model, too_large
from tests.simulation.process import Process
from tests.simulation.variants import Variant

Fault = Literal[
    "crash",
    "wipe",
    "stale",
    "torn",
    "damage",
    "lost",
    "late",
    "again",
    "markers",
    "expire",
    "rebalance",
    "clock",
    "grow",
    "change",
    "regroup",
]
GROUP = "t"
CHANGELOG = TopicPartition("t.changelog", 0)
"""Of the only task, or of the first one of a group."""
LAYOUT = TopicPartition("t.layout", 0)
REPARTITION = TopicPartition("t.repartition", 0)
FINGERPRINT = b"f" * 16
GROWN = b"g" * 16
"""The fingerprint once the source has more partitions: it is part of what the state was made with."""
SKEW_MS = 1_000
NOW_MS = 10_000_000
EXTRACTOR: Extractor = compile_extractor(TrackingId(KeyRule(), ()), RecordTime(), fmt="bytes", fingerprint=False)


class StoppedClock:
    """It is always the same time."""

    def __init__(self, time_ms: int = NOW_MS) -> None:
        self._time_ms = time_ms

    def now_ms(self) -> int:
        return self._time_ms

    put_forward_ms = 0

    def heard(self, broker_ms: int) -> None:
        """No broker of the simulation has a clock."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may go wrong in one schedule."""

    faults: int
    kinds: tuple[Fault, ...]
    switches: int = 0
    """How often another worker goes on; the first switch starts it."""
    reorders: int = 0
    """How often another request than the oldest is answered first."""
    together: int = 1 << 30
    """How often any of these may happen, counted together."""
    deliveries: int = 0
    """How many requests, whose sender waits no longer, may arrive at any time; the others do at the end."""


Input = tuple[tuple[str | None, int], ...]
"""(ID, event time); an ID in capitals makes a record that the broker refuses on the output topic, one with an
exclamation mark a record that it refuses on the repartition topic."""


@dataclass(frozen=True)
class Scenario:
    """One setting; its schedules differ in their choices only."""

    name: str
    input: Input
    bounds: Bounds
    window: Window = field(default_factory=lambda: Window(guard_ms=10, grace_ms=10))
    probes: Input = ()
    """More input for the last incarnation: what it forgot shows in them."""
    most_records: int = 2
    lazy_feed: bool = False
    """Records are read only when nothing else is to be done, so that every batch is a transaction."""
    feeds: int = 1
    """Source partitions; more than one are repartitioned, if they are no group."""
    begun_with: int | None = None
    """How many source partitions there were when the state was created, if others were added later."""
    group: bool = False
    """The source partitions are judged directly, by tasks that share their transactions."""
    offsets: Literal["kept", "forgotten", "stale"] = "kept"
    """What becomes of the group's committed offsets whenever a process dies."""
    seeder: bool = False
    """Another transactional id has an open transaction on the changelog."""
    implicit: bool = True
    """Transactions are of version 2 (KIP-890)."""
    verifies: bool = True
    """A leader asks the coordinator about each transactional batch; before Kafka 3.6, none does."""
    batch_bytes: int = 0
    """As in `Session`: 0 sends each batch at once, and more than all batches together sends them with the commit."""
    fetch_entries: int = 3
    last_incarnation: bool = True
    """At the end every process is killed, and a new one reads the probes; else those who live do."""
    new_disk_at_end: bool = False

    @cached_property
    def rules(self) -> Rules:
        return Rules(self.window)

    @property
    def two_hops(self) -> bool:
        return self.feeds > 1 and not self.group

    @cached_property
    def sources(self) -> tuple[TopicPartition, ...]:
        return tuple(TopicPartition("in", partition) for partition in range(self.feeds))

    @cached_property
    def feeding(self) -> tuple[TopicPartition, ...]:
        return (*self.sources, REPARTITION) if self.two_hops else self.sources

    @property
    def judged_logs(self) -> tuple[TopicPartition, ...]:
        """The logs in whose order records are judged, each by a task of its own."""
        return (REPARTITION,) if self.two_hops else self.sources

    def feeds_of(self, judged_log: TopicPartition) -> tuple[tuple[int, int], ...]:
        """Return topic and partition of the feeds whose records are in this log."""
        if self.two_hops:
            return tuple((0, partition) for partition in range(self.begun_with or self.feeds))
        return ((0, judged_log.partition),)

    def records(self, rows: Input, number: int) -> dict[TopicPartition, list[Record]]:
        """Return input records per source partition; ``number`` tells equal rows apart."""
        found: dict[TopicPartition, list[Record]] = {source: [] for source in self.sources}
        for at, (name, time_ms) in enumerate(rows, number):
            key = None if name is None else name.lower().encode()
            kind = "VAST" if name and name.endswith("!") else "BIG" if name and name.isupper() else "v"
            value = f"{kind}{at}".encode()
            found[self.sources[at % self.feeds]].append(Record(0, time_ms, key, value, ()))
        return found

    def new_judged(self, judged_log: TopicPartition) -> Judged:
        rules = ModelRules(
            self.window.guard_ms, self.window.grace_ms, self.window.extend, self.window.extend_at_most_ms
        )
        return new_model(rules, self.feeds_of(judged_log), EXTRACTOR)

    @cached_property
    def expected(self) -> Mapping[TopicPartition, tuple[Judged, Judged]]:
        """What the model says of each source's input, without and with the probes; for direct feeds."""
        return {
            source: (self._judged(source, self.input, ()), self._judged(source, self.input, self.probes))
            for source in self.sources
        }

    def _judged(self, source: TopicPartition, rows: Input, more: Input) -> Judged:
        judged = self.new_judged(source)
        records = [*self.records(rows, 0)[source], *self.records(more, len(rows))[source]]
        for offset, record in enumerate(records):
            judged.feed(record, Source(0, source.partition, offset))
        return judged

    def new_cluster(self) -> Cluster:
        cluster = Cluster(
            fetch_entries=self.fetch_entries, refuses=too_large, implicit=self.implicit, verifies=self.verifies
        )
        for source, records in self.records(self.input, 0).items():
            cluster.append_plain(source, records)
        for judged in self.judged_logs:
            cluster.partition(CHANGELOG._replace(partition=judged.partition))
        if self.group:
            self.write_layout(cluster, Layout(self.feeds, self.counts))
        return cluster

    @property
    def counts(self) -> dict[str, int]:
        """Partitions of the source topic."""
        return {"in": self.feeds}

    @staticmethod
    def write_layout(cluster: Cluster, layout: Layout) -> None:
        """Write a layout record as `dedup layout` does."""
        cluster.append_plain(LAYOUT, [Record(0, NOW_MS, b"layout", encode_layout(layout), ())])


TOPOLOGY = parse(
    "{dedup: 1, name: t, source: {topics: [in], partitioned_by: tracking_id}, tracking_id: {key: true}, "
    "guard_period: 10ms, output: {topic: out}}",
    name="t",
)
"""Of this topology, only what a layout is compared with is used."""


def transactional_id(scenario: Scenario, feeding: TopicPartition, *, grouped: bool) -> str:
    """Return the id of a feeding partition's group."""
    if grouped:
        return "t.dedup.g0"
    return (
        f"t.dedup.{feeding.partition}" if feeding in scenario.judged_logs else f"t.repartition.in.{feeding.partition}"
    )


class Builder:
    """Builds tasks for one process, as `workshop.Workshop` does from a topology and settings."""

    def __init__(self, scenario: Scenario, variant: Variant, process: Process) -> None:
        self._scenario = scenario
        self._variant = variant
        self._process = process
        self._wire = variant.wire(process.wire)
        names = {place.topic for place in (*scenario.feeding, CHANGELOG)}
        expected = {
            name: now for name, now in process.cluster.topics(sorted(names)).items() if not isinstance(now, int)
        }
        self._check = TopicCheck(self._wire, expected)
        self._ids = {name: now.topic_id for name, now in expected.items()}
        self._wire.pin(self._ids)

    def grouped(self, feeding: Iterable[TopicPartition]) -> list[Members]:
        parts = sorted(feeding)
        return [tuple(parts)] if self._process.grouped else [(part,) for part in parts]

    def build(self, members: Members) -> TaskGroup:
        scenario = self._scenario
        dedup = members[0] in scenario.judged_logs
        name = transactional_id(scenario, members[0], grouped=self._process.grouped)
        if self._variant.id_per_process:
            name += f".w{self._process.worker}"
        session = self._variant.session(self._wire, name, GROUP, timeout_ms=60_000, batch_bytes=scenario.batch_bytes)
        group = self._variant.group(session, self._check.confirm, self._refuse_layout, Counter())
        for feeding in members:
            metadata = offset_metadata(self._ids[feeding.topic], self._ids[CHANGELOG.topic] if dedup else None)
            committing = Committing(GROUP, self._check.confirm, metadata)
            task_id = TaskId("dedup" if dedup else "repartition", feeding)
            make = partial(self._judge if dedup else self._repartition, feeding)
            group.add(self._variant.task(task_id, committing, group, self._wire, make))
        return group

    def wipe(self, feeding: TopicPartition) -> None:
        self._process.wipe(feeding)

    async def _refuse_layout(self) -> None:
        if "regroup" not in self._scenario.bounds.kinds:
            return  # no layout ever changes, and the schedules are fewer
        size = self._scenario.feeds if self._process.grouped else 1
        topology = replace(TOPOLOGY, transactions=TransactionsSpec(partitions=size))
        topics = TopicsNow({"in": Topic("in", self._ids["in"], self._scenario.feeds, {})})
        await refuse_other_layout(self._wire, topology, topics)

    def _judge(self, feeding: TopicPartition, numbers: TaskNumbers) -> TaskWork:
        scenario, process = self._scenario, self._process
        plan = DedupPlan(
            feeding=feeding,
            changelog=CHANGELOG._replace(partition=feeding.partition),
            feeds=tuple(Feed(*feed) for feed in scenario.feeds_of(feeding)),
            source_topics=("in",),
            wrapped=scenario.two_hops,
            extractor=EXTRACTOR,
            rules=scenario.rules,
            max_clock_skew_ms=SKEW_MS,
            start="earliest",
            fingerprint=process.fingerprint,
            compression="none",
            feeding_topic_id=self._ids[feeding.topic],
        )
        disk = process.disks[feeding]
        publisher = self._publisher(feeding.partition)
        clock = StoppedClock(process.now_ms)
        keeping = Keeping(
            lambda: process.store_pool.take(feeding.partition) or disk.open(process),
            release=lambda store: process.store_pool.put(feeding.partition, store),
        )
        return self._variant.judge(plan, self._wire, keeping, publisher, clock, numbers)

    def _publisher(self, partition: int) -> RecordCollector:
        count = len(self._scenario.judged_logs)
        routes = Routes(
            source_topics=("in",),
            output=Route("out", count),
            dead_letter=Route("dead", count),
            late=Route("late", count),
            duplicates=Route("duplicates", count),
            keep_partition=True,
            compression="none",
        )
        return RecordCollector(routes, partition, Limits({}, StoppedClock().now_ms, self._wire))

    def _repartition(self, feeding: TopicPartition, numbers: TaskNumbers) -> TaskWork:
        plan = RepartitionPlan(
            feeding=feeding, target=REPARTITION.topic, partitions=1, extractor=EXTRACTOR, topic=0, start="earliest"
        )
        return RepartitionTask(plan, self._wire, self._publisher(0), StoppedClock(), numbers, _offsets_stay)


async def _offsets_stay() -> None:
    """The simulated group keeps its offsets: nothing is lost that a task would have to refuse."""
