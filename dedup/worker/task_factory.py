"""Builds tasks with their stores, sessions, and work from a topology, the settings, and the cluster.

This module is independent of Faust, because the Spark stream also uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from dedup.core.extract import compile_extractor
from dedup.core.window import Feed
from dedup.kafka.consumer import TopicCheck
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import TopicNow, TopicPartition, Wire
from dedup.metrics import TaskNumbers
from dedup.store.base import Store, StoreIdentity
from dedup.store.checkpoint_storage import refuse_unreadable
from dedup.store.directory import Keeping, StorePool, delete_store, store_directory
from dedup.store.rocks import RocksMemory, RocksStore
from dedup.topology.model import extractor_of
from dedup.worker.bootstrap import Bootstrap, WantedCheckpoint
from dedup.worker.clock import Clock
from dedup.worker.dedup_task import DedupPlan, DedupTask, Once
from dedup.worker.offsets import offset_note
from dedup.worker.record_collector import Limits, RecordCollector
from dedup.worker.repartition_task import RepartitionPlan, RepartitionTask
from dedup.worker.restore import SharedLook, refuse_lost_offset
from dedup.worker.task import Committing, Task, TaskId
from dedup.worker.topics import Cluster, routes_of

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

DEADLINE_MS: Final = 20_000


@dataclass(frozen=True, slots=True)
class TaskFactory:
    """Builds tasks, and opens and releases their stores."""

    topology: Topology
    settings: Settings
    cluster: Cluster
    wire: Wire
    clock: Clock
    memory: RocksMemory
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    lost_offsets: SharedLook = field(default_factory=SharedLook)
    once: Once = field(default_factory=Once)
    store_pool: StorePool | None = None
    """Keeps released stores open for their next owner. None means that stores are closed when they are released,
    because the next owner may be another process.
    """
    check: TopicCheck = field(init=False)
    """Checks that the source topics, the feeding topics, and the changelog were not deleted, recreated, or given more
    partitions since `cluster` was read.
    """

    limits: Limits = field(init=False)
    """The size limits of topics, shared by all tasks so that all of them learn from a refusal."""

    def __post_init__(self) -> None:
        """Raise SettingsError if no installed package can read the checkpoint URL, before a checkpoint is needed."""
        names = {*self.topology.source.topics, *self.topology.feeding_topics, self.topology.changelog_topic}
        topics = {name: self.cluster.topics[name] for name in names}
        expected = {name: TopicNow(topic.topic_id, topic.partitions) for name, topic in topics.items()}
        object.__setattr__(self, "check", TopicCheck(self.wire, expected))
        if self.settings.state.checkpoint is not None:
            refuse_unreadable(self.settings.state.checkpoint)
        object.__setattr__(self, "limits", Limits(self.cluster.limits, self.clock, self.wire))

    def identity(self, partition: int) -> StoreIdentity:
        """Return the identity that a partition's store must have."""
        changelog = self.cluster.topics[self.topology.changelog_topic]
        return StoreIdentity(self.topology.name, partition, changelog.topic_id)

    async def prepare(self, partition: int) -> None:
        """Fetch the partition's checkpoint if there is no local state; see `Bootstrap.prepare`."""
        url = self.settings.state.checkpoint
        if url is not None:
            await self.bootstrap.prepare(url, self.wire, self.wanted(partition))

    def wanted(self, partition: int) -> WantedCheckpoint:
        """Return the values that a checkpoint of the partition must match."""
        identity, state_dir = self.identity(partition), self.settings.state_dir
        return WantedCheckpoint(
            identity,
            self.fingerprint(),
            self.topology.window.segment_ms,
            TopicPartition(self.topology.feeding_topics[0], partition),
            TopicPartition(self.topology.changelog_topic, partition),
            state_dir,
            store_directory(state_dir, identity),
        )

    def open_store(self, partition: int) -> Store:
        """Return a partition's store, which was kept open, is on disk, or is new and empty.

        Raises TaskCorrupted or StateIncompatible.
        """
        waiting = self.store_pool.take(partition) if self.store_pool is not None else None
        if waiting is not None:
            return waiting
        directory = store_directory(self.settings.state_dir, self.identity(partition))
        identity = self.identity(partition)
        return self.bootstrap.opened(
            directory, lambda: RocksStore.open(directory, identity=identity, memory=self.memory)
        )

    def release_store(self, partition: int, store: Store) -> None:
        """Keep the store open for its next owner, or close it; the caller must no longer use it."""
        if self.store_pool is None:
            store.close()
        else:
            self.store_pool.put(partition, store)

    def fingerprint(self) -> bytes:
        """Return the state fingerprint of the topology on this cluster."""
        return self.topology.state_fingerprint(self.cluster.source_partitions(self.topology))

    def wipe(self, feeding: TopicPartition) -> None:
        """Delete a partition's local state, which can be restored from the changelog."""
        waiting = self.store_pool.take(feeding.partition) if self.store_pool is not None else None
        if waiting is not None:
            waiting.close()
        delete_store(store_directory(self.settings.state_dir, self.identity(feeding.partition)))

    def build(self, feeding: TopicPartition) -> Task:
        """Return a new task for a feeding partition."""
        self.wire.pin(self.check.topic_ids)
        if feeding.topic in self.topology.source.topics and not self.topology.direct:
            return self._repartition(feeding)
        return self._dedup(feeding)

    def _session(self, transactional_id: str) -> Session:
        return Session(
            self.wire,
            transactional_id,
            self.topology.name,
            timeout_ms=self.settings.transaction_timeout_ms,
            deadline_ms=DEADLINE_MS,
        )

    def _dedup(self, feeding: TopicPartition) -> Task:
        topology = self.topology
        changelog = TopicPartition(topology.changelog_topic, feeding.partition)
        extractor = extractor_of(topology)
        feeds = (Feed(0, feeding.partition),) if topology.direct else self.cluster.feeds(topology)
        plan = DedupPlan(
            feeding=feeding,
            changelog=changelog,
            feeds=feeds,
            source_topics=topology.source.topics,
            wrapped=not topology.direct,
            extractor=extractor,
            rules=topology.rules,
            max_clock_skew_ms=topology.max_clock_skew_ms,
            start=topology.source.start if topology.direct else "earliest",
            fingerprint=self.fingerprint(),
            compression=self.settings.topics.compression,
            feeding_topic_id=self.cluster.topics[feeding.topic].topic_id,
            once=self.once,
            partitions=self.cluster.topics[feeding.topic].partitions if topology.direct else 1,
        )
        session = self._session(topology.transactional_id("dedup", feeding.partition))
        collector = RecordCollector(routes_of(topology, self.cluster, self.settings), feeding.partition, self.limits)
        task_id = TaskId("dedup", feeding)

        partition = feeding.partition
        keeping = Keeping(
            lambda: self.open_store(partition),
            lambda: self.prepare(partition),
            lambda store: self.release_store(partition, store),
        )

        def work(numbers: TaskNumbers) -> DedupTask:
            return DedupTask(plan, self.wire, keeping, collector, self.clock, numbers)

        pin_start = topology.direct and topology.source.start != "earliest"
        topics = self.cluster.topics
        note = offset_note(topics[feeding.topic].topic_id, topics[changelog.topic].topic_id)
        return Task(task_id, self._committing(note, pin_start=pin_start), session, self.wire, work)

    def _committing(self, note: str, *, pin_start: bool) -> Committing:
        return Committing(self.topology.name, self.check.confirm, note, pin_start)

    def _repartition(self, feeding: TopicPartition) -> Task:
        topology = self.topology
        target = self.cluster.topics[topology.repartition_topic]
        extractor = compile_extractor(
            topology.tracking_id, topology.event_time, fmt=topology.source.format, fingerprint=False
        )
        plan = RepartitionPlan(
            feeding=feeding,
            target=target.name,
            partitions=target.partitions,
            extractor=extractor,
            topic=topology.source.topics.index(feeding.topic),
            start=topology.source.start,
        )
        collector = RecordCollector(routes_of(topology, self.cluster, self.settings), feeding.partition, self.limits)
        session = self._session(topology.transactional_id("repartition", feeding.partition, feeding.topic))
        feed = Feed(plan.topic, feeding.partition)
        refuse = partial(refuse_lost_offset, topology, self.cluster, self.wire, feed, self.lost_offsets)
        note = offset_note(self.cluster.topics[feeding.topic].topic_id)
        return Task(
            TaskId("repartition", feeding),
            self._committing(note, pin_start=topology.source.start != "earliest"),
            session,
            self.wire,
            lambda numbers: RepartitionTask(plan, self.wire, collector, self.clock, numbers, refuse),
        )
