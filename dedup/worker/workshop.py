"""How a task is built: its store, its session and its work, from a topology, the settings and the cluster.

Knows no Faust: the Spark stream builds its tasks here, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dedup.core.extract import compile_extractor
from dedup.core.stream_time import Feed
from dedup.metrics import TaskNumbers
from dedup.session.transaction import Session
from dedup.session.wire import TopicPartition, Wire
from dedup.store.base import Store, StoreIdentity
from dedup.store.depot import refuse_unreadable
from dedup.store.directory import delete_store, store_directory
from dedup.store.rocks import RocksMemory, RocksStore
from dedup.store.shelf import Keeping, Shelf
from dedup.topology.extractor import extractor_of
from dedup.worker.bootstrap import Bootstrap, Wanted
from dedup.worker.clock import Clock
from dedup.worker.judge import Judge, JudgePlan
from dedup.worker.plan import Cluster, routes_of
from dedup.worker.publish import Publisher
from dedup.worker.repartition import Repartition, RepartitionPlan
from dedup.worker.task import Task, TaskId

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

DEADLINE_MS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Workshop:
    """What tasks are built from."""

    topology: Topology
    settings: Settings
    cluster: Cluster
    wire: Wire
    clock: Clock
    memory: RocksMemory
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    shelf: Shelf | None = None
    """Where stores wait for their next owner; None: they are closed, as another process may be next."""

    def __post_init__(self) -> None:
        """Raises SettingsError where nothing installed can read the place of checkpoints, needed now or not."""
        if self.settings.checkpoint is not None:
            refuse_unreadable(self.settings.checkpoint)

    def identity(self, partition: int) -> StoreIdentity:
        """Return whose state a partition's store must be."""
        changelog = self.cluster.topics[self.topology.changelog_topic]
        return StoreIdentity(self.topology.name, partition, changelog.topic_id)

    async def prepare(self, partition: int) -> None:
        """The partition has local state, if there is a checkpoint of it that can be taken; see `Bootstrap`."""
        url = self.settings.checkpoint
        if url is not None:
            await self.bootstrap.prepare(url, self.wire, self.wanted(partition))

    def wanted(self, partition: int) -> Wanted:
        """Return what a checkpoint of the partition must be of."""
        identity, state_dir = self.identity(partition), self.settings.state_dir
        return Wanted(
            identity,
            self.fingerprint(),
            self.topology.window.segment_ms,
            TopicPartition(self.topology.feeding_topics[0], partition),
            TopicPartition(self.topology.changelog_topic, partition),
            state_dir,
            store_directory(state_dir, identity),
        )

    def open_store(self, partition: int) -> Store:
        """Return a partition's store, open already or opened now, an empty one where there is none.

        Raises TaskCorrupted or StateIncompatible.
        """
        waiting = self.shelf.take(partition) if self.shelf is not None else None
        if waiting is not None:
            return waiting
        directory = store_directory(self.settings.state_dir, self.identity(partition))
        identity = self.identity(partition)
        return self.bootstrap.opened(
            directory, lambda: RocksStore.open(directory, identity=identity, memory=self.memory)
        )

    def release_store(self, partition: int, store: Store) -> None:
        """The store is kept open for who is next, or closed; the caller must not use it any more."""
        if self.shelf is None:
            store.close()
        else:
            self.shelf.put(partition, store)

    def fingerprint(self) -> bytes:
        """Return the state fingerprint of the topology on this cluster."""
        return self.topology.state_fingerprint(self.cluster.source_partitions(self.topology))

    def wipe(self, feeding: TopicPartition) -> None:
        """Delete a partition's local state; the changelog has all of it."""
        waiting = self.shelf.take(feeding.partition) if self.shelf is not None else None
        if waiting is not None:
            waiting.close()
        delete_store(store_directory(self.settings.state_dir, self.identity(feeding.partition)))

    def build(self, feeding: TopicPartition) -> Task:
        """Return a new task for a feeding partition."""
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
        plan = JudgePlan(
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
            partitions=self.cluster.topics[feeding.topic].partitions if topology.direct else 1,
        )
        session = self._session(topology.transactional_id("dedup", feeding.partition))
        publisher = Publisher(routes_of(topology, self.cluster, self.settings), feeding.partition)
        task_id = TaskId("dedup", feeding)

        partition = feeding.partition
        keeping = Keeping(
            lambda: self.open_store(partition),
            lambda: self.prepare(partition),
            lambda store: self.release_store(partition, store),
        )

        def work(numbers: TaskNumbers) -> Judge:
            return Judge(plan, self.wire, keeping, publisher, self.clock, numbers)

        pin_start = topology.direct and topology.source.start != "earliest"
        return Task(task_id, topology.name, session, self.wire, work, pin_start=pin_start)

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
            compression=self.settings.topics.compression,
        )
        publisher = Publisher(routes_of(topology, self.cluster, self.settings), feeding.partition)
        session = self._session(topology.transactional_id("repartition", feeding.partition, feeding.topic))
        return Task(
            TaskId("repartition", feeding),
            topology.name,
            session,
            self.wire,
            lambda numbers: Repartition(plan, self.wire, publisher, self.clock, numbers),
            pin_start=topology.source.start != "earliest",
        )
