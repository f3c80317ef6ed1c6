"""Builds tasks, with their stores, sessions, and `TaskWork`, from a topology, the settings, and the cluster.

This module is independent of Faust, because the Spark stream also uses it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from dedup.core.extract import Extract, Extracted, Extractor
from dedup.core.extract_one import Headers
from dedup.core.flow import Flow
from dedup.core.tracking_id import Rule, code_rules
from dedup.core.window import Feed
from dedup.errors import InvariantBroken, Problem, TopologyError
from dedup.flow_loader import load_code
from dedup.kafka.consumer import TopicCheck
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import TopicNow, TopicPartition, Wire
from dedup.metrics import TaskNumbers
from dedup.settings import Settings
from dedup.store.base import MemoryStore, Store, StoreIdentity
from dedup.store.checkpoint_storage import refuse_unreadable
from dedup.store.directory import Keeping, StorePool, close_or_delete, delete_store, store_directory
from dedup.store.rocks import RocksMemory, RocksStore
from dedup.topology.model import Topology, extractor_of
from dedup.worker.bootstrap import Bootstrap, WantedCheckpoint
from dedup.worker.dedup_task import DedupPlan, DedupTask
from dedup.worker.flow_collector import FLOW_SHARE, NO_HEARTBEAT, FlowCollector
from dedup.worker.layout import refuse_other_layout
from dedup.worker.offsets import Start
from dedup.worker.record_collector import Limits, RecordCollector
from dedup.worker.repartition_task import RepartitionPlan, RepartitionTask
from dedup.worker.restore import LostOffsets
from dedup.worker.task import Committing, SteadyClock, Task, TaskId, TaskWork
from dedup.worker.task_group import Members, TaskGroup
from dedup.worker.topics import Cluster, routes_of

ONLY_WORKERS_FOLLOW: Final = "Only `dedup run` reads partitions that are added while it runs; continue with it."
_PRODUCE_BYTES: Final = 64 << 10
"""A batch below this size waits for more batches or for the commit, because each request costs CPU time."""


@dataclass(slots=True)
class IdFunctions:
    """Stops the worker if a topology's ID functions take so long that the group would expel the worker."""

    rule: Rule
    most_s: float
    """The time, in seconds, that the functions may take for one batch."""
    slow: set[TopicPartition] = field(default_factory=set)
    """The feeding partitions whose last batch took longer than `most_s`."""

    def limited(self, extractor: Extractor, feeding: TopicPartition) -> Extract:
        """Return the extractor. If it calls ID functions, the returned extractor raises TopologyError if they are too
        slow.

        The process may have been frozen during a batch, so a slow batch alone does not prove that the functions are
        slow. Therefore, the error is raised only for a partition's second slow batch in a row.
        """
        functions = code_rules(self.rule)
        if not functions:
            return extractor

        def extract(
            keys: Sequence[bytes | None],
            values: Sequence[bytes | None],
            headers: Sequence[Headers],
            timestamps_ms: Sequence[int],
        ) -> Extracted:
            began_s = time.monotonic()
            found = extractor(keys, values, headers, timestamps_ms)
            took_s = time.monotonic() - began_s
            if took_s <= self.most_s:
                self.slow.discard(feeding)
            elif feeding not in self.slow:
                self.slow.add(feeding)
            else:
                names = " or ".join(each.name for each in functions)
                raise TopologyError([Problem("tracking_id", _too_slow(names, took_s, len(values)))])
            return found

        return extract


def _too_slow(names: str, took_s: float, records: int) -> str:
    return (
        f"the function {names} took {took_s:.1f} s for the {records} records of one batch, more than "
        f"{FLOW_SHARE:.0%} of `session_timeout`, and so did the partition's previous batch. While the function runs, "
        f"{NO_HEARTBEAT}"
    )


@dataclass(slots=True)
class TaskFactory:
    """Builds tasks, and opens and releases their stores."""

    topology: Topology
    settings: Settings
    cluster: Cluster
    wire: Wire
    clock: SteadyClock
    memory: RocksMemory | None
    """The memory that the stores share, or None if `MemoryStore`s keep the state, as in `TopologyTestDriver`."""
    pool: StorePool | None = None
    """Keeps released stores open for their next owner, or None if the next owner may be another process."""
    bootstrap: Bootstrap | None = field(init=False, default=None)
    """Fetches checkpoints, or None if the settings name no checkpoint URL."""
    lost_offsets: LostOffsets = field(init=False)
    logged: set[Hashable] = field(init=False, default_factory=set)
    begun: dict[TopicPartition, int] = field(init=False, default_factory=dict)
    """The offsets at which tasks began because the group had no committed offset."""
    check: TopicCheck = field(init=False)
    """Checks that the topics that tasks read were not deleted, recreated, or given more partitions since the start."""
    limits: Limits = field(init=False)
    """The size limits of topics. All tasks share these limits, so all tasks learn from each refusal."""

    flow: Flow | None = field(init=False, default=None)
    """The topology's flow, or None."""
    id_functions: IdFunctions = field(init=False)
    transactions: Counter[str] = field(init=False, default_factory=Counter)
    """The number of transactions of all task groups since the worker's start, by result."""

    def __post_init__(self) -> None:
        """Import the flow and the ID functions. Raises TopologyError if an import fails.

        Raises SettingsError if no installed package can read the checkpoint URL.
        """
        self.flow = load_code(self.topology) if self.topology.runs_code else None
        self.id_functions = IdFunctions(self.topology.tracking_id.rule, self._most_s)
        self.check = topic_check(self.topology, self.cluster, self.wire)
        self.lost_offsets = LostOffsets(self.topology, self.cluster, self.wire)
        self.limits = Limits(self.cluster.limits, self.clock.now_ms, self.wire)
        if self.settings.state.checkpoint is not None:
            refuse_unreadable(self.settings.state.checkpoint)
            self.bootstrap = Bootstrap(self.settings.state.checkpoint)

    @property
    def _most_s(self) -> float:
        """The time, in seconds, that the user's code may take for one batch."""
        return self.settings.session_timeout_ms / 1000 * FLOW_SHARE

    def wanted(self, partition: int) -> WantedCheckpoint:
        """Return the values that a checkpoint must match, such as the identity of the partition's store."""
        changelog = self.topology.changelog_topic
        identity = StoreIdentity(self.topology.name, partition, self.cluster.topics[changelog].topic_id)
        return WantedCheckpoint(
            identity,
            self.fingerprint(),
            self.topology.window.segment_ms,
            TopicPartition(self.topology.feeding_topics[0], partition),
            TopicPartition(changelog, partition),
            store_directory(self.settings.state_dir, identity),
        )

    def keeping(self, partition: int) -> Keeping:
        """Return the functions that a task or standby uses to open, release, and delete the partition's store."""
        bootstrap, pool = self.bootstrap, self.pool
        prepare = None if bootstrap is None else partial(bootstrap.prepare, self.wire, self.wanted(partition))
        opening = partial(self.open_store, partition)
        release: Callable[[Store], None] = close_or_delete if pool is None else partial(pool.put, partition)
        return Keeping(opening, prepare, release, partial(self._wipe, partition))

    def open_store(self, partition: int) -> Store:
        """Return a partition's store: the store that the pool kept open, the store on disk, or a new, empty store.

        Raises TaskCorrupted or StateIncompatible if the store on disk cannot be used; see `RocksStore.open`.
        """
        waiting = None if self.pool is None else self.pool.take(partition)
        if waiting is not None:
            return waiting
        if self.memory is None:
            return MemoryStore()
        wanted = self.wanted(partition)
        opening = partial(
            RocksStore.open,
            wanted.directory,
            identity=wanted.identity,
            memory=self.memory,
            log_filters=not self.topology.window.extend,
        )
        return opening() if self.bootstrap is None else self.bootstrap.opened(wanted.directory, opening)

    def fingerprint(self) -> bytes:
        """Return the state fingerprint of the topology on this cluster."""
        return self.topology.state_fingerprint(self.cluster.source_partitions(self.topology))

    def wipe(self, feeding: TopicPartition) -> None:
        """Delete the local state of a partition, which can be restored from the changelog."""
        self._wipe(feeding.partition)

    def _wipe(self, partition: int) -> None:
        waiting = None if self.pool is None else self.pool.take(partition)
        if waiting is not None:
            waiting.wipe()
        delete_store(self.wanted(partition).directory)

    def grouped(self, feeding: Iterable[TopicPartition]) -> list[Members]:
        """Return the feeding partitions, one tuple per task group. Raises InvariantBroken if a group is incomplete.

        Partitions that were added to a topic later are also grouped. The leader of the consumer group may learn of such
        partitions before or after this worker does, so the last task group may lack them. If no partitions may be added
        to the topic, the tasks of added partitions refuse to start.
        """
        size, counts = self.topology.group_size, self.cluster.source_partitions(self.topology)
        by_group: defaultdict[tuple[str, int], list[TopicPartition]] = defaultdict(list)
        for place in sorted(feeding):
            by_group[place.topic, place.partition // size].append(place)
        for (topic, number), members in by_group.items():
            whole = range(number * size, min((number + 1) * size, counts[topic]))
            if not {place.partition for place in members}.issuperset(whole):
                raise InvariantBroken(
                    f"the consumer group has assigned a part of a task group: {', '.join(map(str, members))}, with "
                    f"{size} partitions in a group. The worker stops; nothing was judged."
                )
        return [tuple(members) for members in by_group.values()]

    def build(self, members: Members) -> TaskGroup:
        """Return a new task group with one task per feeding partition in ``members``, a tuple from `grouped`."""
        self.wire.pin(self.check.topic_ids)
        topology, first = self.topology, members[0]
        dedup = topology.direct or first.topic not in topology.source.topics
        if dedup:
            transactional_id = topology.transactional_id("dedup", first.partition)
        else:
            transactional_id = topology.transactional_id("repartition", first.partition, first.topic)
        timeout_ms = self.settings.transaction_timeout_ms
        session = Session(self.wire, transactional_id, topology.name, timeout_ms=timeout_ms, batch_bytes=_PRODUCE_BYTES)
        refuse_layout = partial(refuse_other_layout, self.wire, topology, self.cluster)
        group = TaskGroup(session, self.check.confirm, refuse_layout, self.transactions)
        for feeding in members:
            group.add(self._task(feeding, group) if dedup else self._repartition_task(feeding, group))
        return group

    def _task(self, feeding: TopicPartition, group: TaskGroup) -> Task:
        plan = self._dedup_plan(feeding)
        make = partial(
            DedupTask, plan, self.wire, self.keeping(feeding.partition), self._collector(feeding), self.clock
        )
        return self._built(TaskId("dedup", feeding), group, plan.start, make)

    def _repartition_task(self, feeding: TopicPartition, group: TaskGroup) -> Task:
        plan = self._repartition_plan(feeding)
        refuse = partial(self.lost_offsets.refuse, Feed(plan.topic, feeding.partition))
        make = partial(RepartitionTask, plan, self.wire, self._collector(feeding), self.clock, refuse_lost=refuse)
        return self._built(TaskId("repartition", feeding), group, plan.start, make)

    def _built(self, task_id: TaskId, group: TaskGroup, start: Start, make: Callable[[TaskNumbers], TaskWork]) -> Task:
        metadata = self.cluster.offset_metadata(self.topology, task_id.feeding)
        committing = Committing(self.topology.name, self.check.confirm, metadata, pin_start=start != "earliest")
        return Task(task_id, committing, group, self.wire, make)

    def _collector(self, feeding: TopicPartition) -> RecordCollector:
        routes = routes_of(self.topology, self.cluster, self.settings)
        if self.flow is None or feeding.topic not in self.topology.feeding_topics:
            return RecordCollector(routes, feeding.partition, self.limits)
        targets = [self.cluster.route(topic) for topic in self.topology.forwards_to]
        return FlowCollector(
            routes,
            feeding.partition,
            self.limits,
            self.flow,
            {route.topic: route for route in targets if route is not None},
            stop=self.topology.then is not None and self.topology.then.stop,
            most_s=self._most_s,
        )

    def _dedup_plan(self, feeding: TopicPartition) -> DedupPlan:
        topology, topic = self.topology, self.cluster.topics[feeding.topic]
        extractor = extractor_of(topology)
        extract = extractor.again if topology.passes_ids_on else self.id_functions.limited(extractor, feeding)
        return DedupPlan(
            feeding=feeding,
            changelog=TopicPartition(topology.changelog_topic, feeding.partition),
            feeds=(Feed(0, feeding.partition),) if topology.direct else self.cluster.feeds(topology),
            source_topics=topology.source.topics,
            wrapped=not topology.direct,
            extractor=extract,
            ids_passed_on=topology.passes_ids_on,
            rules=topology.rules,
            max_clock_skew_ms=topology.max_clock_skew_ms,
            start=topology.source.start if topology.direct else "earliest",
            fingerprint=self.fingerprint(),
            compression=self.settings.topics.compression,
            feeding_topic_id=topic.topic_id,
            logged=self.logged,
            begun=self.begun,
            by_arrival=topology.by_arrival and topology.direct,
            partitions=topic.partitions if topology.direct else 1,
        )

    def _repartition_plan(self, feeding: TopicPartition) -> RepartitionPlan:
        topology = self.topology
        source, target = topology.source, self.cluster.topics[topology.repartition_topic]
        return RepartitionPlan(
            feeding=feeding,
            target=target.name,
            partitions=target.partitions,
            extractor=self.id_functions.limited(extractor_of(topology, fingerprint=False), feeding),
            topic=source.topics.index(feeding.topic),
            # `latest` would skip the records that producers sent to a new partition before a worker noticed it.
            start="earliest" if self.cluster.is_new(feeding) else source.start,
            begun=self.begun,
            by_arrival=topology.by_arrival,
            passes_ids_on=topology.passes_ids_on,
        )


def topic_check(topology: Topology, cluster: Cluster, wire: Wire) -> TopicCheck:
    """Return a check that the changelog and the topics that a topology's tasks read are still as in ``cluster``."""
    names = {*topology.source.topics, *topology.feeding_topics, topology.changelog_topic}
    topics = {name: cluster.topics[name] for name in names}
    expected = {name: TopicNow(topic.topic_id, topic.partitions) for name, topic in topics.items()}
    grown = () if topology.direct else (ONLY_WORKERS_FOLLOW,)
    return TopicCheck(wire, expected, cluster.may_grow(topology), *grown)
