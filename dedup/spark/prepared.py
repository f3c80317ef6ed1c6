"""What the driver finds out before a stream starts: topics in place and fitting, and where each partition begins."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dedup.errors import BrokerUnavailable
from dedup.session.admin import Admin
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.session.wire import TopicPartition
from dedup.spark.attempt import eaten
from dedup.spark.checkpoint import CheckpointIdentity, Semantics
from dedup.store.rocks import RocksMemory
from dedup.worker.clock import SteadyClock
from dedup.worker.plan import Cluster, group_is_new, prepare
from dedup.worker.starting import bounds_of, committed_offset, first_offset
from dedup.worker.task import TaskId
from dedup.worker.workshop import Workshop

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

PATIENCE_S: Final = 60


@dataclass(frozen=True, slots=True)
class Prepared:
    """A topology on its cluster, ready to be streamed."""

    topology: Topology
    settings: Settings
    cluster: Cluster
    positions: Mapping[TopicPartition, int]
    """Where each partition goes on without a checkpoint: what the group has committed, or the topology's start."""
    unpinned: tuple[TopicPartition, ...]
    """Partitions without a committed offset, whose start would be another after a crash."""

    def starting_offsets(self, topics: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return the positions as Spark's `startingOffsets` wants them."""
        return {
            topic: {str(at.partition): offset for at, offset in self.positions.items() if at.topic == topic}
            for topic in topics
        }

    def identity(self, semantics: Semantics) -> CheckpointIdentity:
        """Return whose checkpoint this run's is."""
        partitions = self.cluster.source_partitions(self.topology)
        ids = {name: self.cluster.topics[name].topic_id for name in partitions}
        return CheckpointIdentity(self.topology.name, semantics, self.topology.state_identity(partitions), ids)

    def pin_start(self) -> None:
        """The place that `latest` or a time means is committed: after a crash it would mean another."""
        if self.unpinned:
            asyncio.run(_pin(self))


def prepared(topology: Topology, settings: Settings) -> Prepared:
    """Return the topology on its cluster, with every topic in place.

    Raises StateIncompatible where topics do not fit each other or retention deleted what was not judged yet, and
    BrokerUnavailable where no broker answers.
    """
    return asyncio.run(_prepared(topology, settings))


async def _prepared(topology: Topology, settings: Settings) -> Prepared:
    wire = KafkaWire(Connection.of(settings, client_id=f"dedup-{topology.name}-spark"))
    await wire.start()
    try:
        async with asyncio.timeout(PATIENCE_S), Admin(wire.connection) as admin:
            fresh = await group_is_new(topology, wire, admin)
            cluster = await prepare(topology, settings, admin, may_create_changelog=fresh)
            return await _with_positions(topology, settings, cluster, wire)
    except TimeoutError as error:
        raise BrokerUnavailable(
            f"the cluster at {', '.join(settings.brokers)} did not say within {PATIENCE_S} s which offsets and topics "
            f"it has: a partition has no leader, or the group no coordinator. Look at the brokers' logs."
        ) from error
    finally:
        await wire.stop()


async def _with_positions(topology: Topology, settings: Settings, cluster: Cluster, wire: KafkaWire) -> Prepared:
    positions: dict[TopicPartition, int] = {}
    unpinned: list[TopicPartition] = []
    for name in dict.fromkeys((*topology.source.topics, *topology.feeding_topics)):
        sub_topology = "dedup" if name in topology.feeding_topics else "repartition"
        start = topology.source.start if name in topology.source.topics else "earliest"
        for partition in range(cluster.topics[name].partitions):
            place = TopicPartition(name, partition)
            committed = await committed_offset(wire, topology.name, place)
            kept = (await bounds_of(wire, place)).start
            if committed is not None and committed < kept:
                raise eaten(TaskId(sub_topology, place), committed, kept)
            positions[place] = committed if committed is not None else await first_offset(wire, place, start)
            if committed is None and start != "earliest":
                unpinned.append(place)
    return Prepared(topology, settings, cluster, positions, tuple(unpinned))


async def _pin(ready: Prepared) -> None:
    wire = KafkaWire(Connection.of(ready.settings, client_id=f"dedup-{ready.topology.name}-spark"))
    await wire.start()
    try:
        with tempfile.TemporaryDirectory(prefix="dedup-spark-") as empty:
            here = replace(ready.settings, state_dir=Path(empty))
            workshop = Workshop(ready.topology, here, ready.cluster, wire, SteadyClock(), RocksMemory())
            for place in ready.unpinned:
                task = workshop.build(place)
                try:
                    await task.start()
                    await task.commit()
                finally:
                    await task.close(drain=False)
    finally:
        await wire.stop()
