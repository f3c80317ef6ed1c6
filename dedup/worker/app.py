"""Builds the Faust app of a topology, with a table of sightings and agents that pass batches to tasks.

The table is read-only, because a task must store a sighting in the same transaction as the verdict on its record. Each
task restores its own state, so Faust's recovery service never starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

from faust.assignor.client_assignment import ClientAssignment, ClientMetadata
from faust.assignor.partition_assignor import PartitionAssignor
from faust.stores import STORES
from faust.stores.base import Store as FaustStore
from faust.tables import TableManager as FaustTableManager
from faust.transport.drivers import TRANSPORTS
from faust.types import TP
from mode import CrashingSupervisor
from yarl import URL

from dedup.core.window import Sighting
from dedup.kafka.client import KafkaWire
from dedup.kafka.schema_registry import SchemaRegistry, SchemaResolver
from dedup.settings import Settings
from dedup.store.directory import StorePool
from dedup.store.rocks import RocksMemory
from dedup.topology.model import Topology
from dedup.worker.dedup_task import DedupTask
from dedup.worker.restore import Standbys
from dedup.worker.task import SteadyClock
from dedup.worker.task_factory import TaskFactory
from dedup.worker.task_manager import TaskManager
from dedup.worker.topics import Cluster
from dedup.worker.transport import BatchSchema, DedupApp, refused

_METADATA_MAX_AGE_MS: Final = 10_000
"""The maximum time, in ms, until a partition that is added to a source topic is assigned to a worker."""
NOWHERE: Final = "no-pages.invalid"
"""The host name that a worker without web pages announces; a host with this name can never exist (RFC 2606)."""


def identity(worker_id: str | None, url: str | None) -> str:
    """Return a worker's unique name in the group: the URL of its web pages, with its worker ID as the fragment."""
    return str(URL(url or f"http://{NOWHERE}").with_fragment(worker_id))


class SightingsStore(FaustStore[Any, Any]):
    """A read-only Faust store (URL ``dedup://``) that provides the sightings of this worker's tasks."""

    app: DedupApp

    def __getitem__(self, state_key: bytes) -> tuple[Sighting, ...]:
        found = [seen for task in self._dedup_tasks() for seen in task.sightings_of(state_key)]
        if not found:
            raise KeyError(state_key)
        return tuple(found)

    def __iter__(self) -> Iterator[bytes]:
        stores = [task.store for task in self._dedup_tasks() if task.store is not None]
        return (key for store in stores for _, key, _ in store.sightings())

    def __len__(self) -> int:
        return sum(task.store.count_ids() for task in self._dedup_tasks() if task.store is not None)

    def _dedup_tasks(self) -> Iterator[DedupTask]:
        return (task.work for task in self.app.tasks.running.values() if isinstance(task.work, DedupTask))

    __setitem__ = __delitem__ = refused("a write to the table of sightings")
    reset_state = backup_partition = restore_backup = refused("a reset or backup by Faust")
    apply_changelog_batch = refused("Faust's own recovery")


class TableManager(FaustTableManager):
    """Faust's table manager without recovery, because each task restores its own partition."""

    app: DedupApp

    async def on_start(self) -> None:
        """Register the changelog, whose partitions Faust then assigns together with the feeding partitions."""
        await self._update_channels()

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        """Assign the standbys, and resume Faust's message flow at once instead of waiting for a recovery."""
        app = self.app
        self._recovery_started.set()
        await self._update_channels()
        # Faust may assign this worker a standby of a partition whose task also runs on this worker.
        ours = {tp.partition for tp in assigned if tp.topic in app.sub_topologies["dedup"]}
        standbys = {tp.partition for tp in app.assignor.assigned_standbys() if tp.topic in self.changelog_topics}
        app.standbys.assign(standbys - ours)
        app.pool.keep_only(standbys | ours)
        if not app.flow_control.is_active():
            app.flow_control.resume()  # `resume` empties the agents' queues, so it must not run twice
        app.consumer.resume_flow()
        await app._fetcher.maybe_start()  # noqa: SLF001  # Faust's own recovery ends with this call, too
        self.on_actives_ready()
        self.on_standbys_ready()

    def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Stop the standbys. Faust calls this method when the worker stops."""
        self.app.standbys.assign(())

    async def on_stop(self) -> None:
        """Stop Faust's fetcher and the tables."""
        await self.app._fetcher.stop()  # noqa: SLF001  # Faust's own manager does this, too
        for table in self.values():
            await table.stop()

    async def wait_until_recovery_completed(self) -> bool:
        """Return False immediately, because there is no app-wide recovery."""
        return False


class GroupAssignor(PartitionAssignor):
    """A variant of Faust's sticky assignor that assigns whole task groups instead of single partitions.

    Faust treats each task group as one partition, and this class converts partitions to group numbers and back. Workers
    with different group sizes cannot join the same consumer group, because the names of their assignors differ.
    """

    app: DedupApp
    _counts: Mapping[str, int]
    """Maps each topic in the cluster to its partition count."""

    @property
    def name(self) -> str:
        """The assignor's name, which Kafka requires to be the same for all members of a consumer group."""
        return "faust" if self._size == 1 else f"faust-groups-of-{self._size}"

    @property
    def _size(self) -> int:
        return self.app.factory.topology.group_size

    def on_assignment(self, assignment: Any) -> None:  # Faust defines this signature
        """Accept an assignment that names this worker by a former address.

        A static member that restarts within the session timeout gets its old assignment back (KIP-345).
        """
        found = cast("ClientMetadata", ClientMetadata.loads(self._decompress(assignment.user_data)))
        old, own = found.url, str(self._url)
        if old != own:
            for spread in (found.changelog_distribution, found.external_topic_distribution):
                if old in spread:
                    spread[own] = spread.pop(old)
            found.url = own
            user_data = self._compress(found.dumps())
            assignment = type(assignment)(assignment.version, assignment.assignment, user_data)
        super().on_assignment(assignment)

    def _perform_assignment(self, cluster: Any, member_metadata: Any) -> Any:  # Faust defines this signature
        topics = {topic for metadata in member_metadata.values() for topic in metadata.subscription}
        self._counts = {topic: len(cluster.partitions_for_topic(topic) or ()) for topic in topics}
        return super()._perform_assignment(cluster, member_metadata)

    def _get_client_metadata(self, metadata: Any) -> ClientMetadata:  # type: ignore[override]  # Faust calls this method on the instance
        """Return a member's previous assignment, converted from partitions to task groups."""
        found = super()._get_client_metadata(metadata)
        before = found.assignment
        found.assignment = ClientAssignment(
            actives={topic: self._groups(partitions) for topic, partitions in before.actives.items()},
            standbys={topic: self._groups(partitions) for topic, partitions in before.standbys.items()},
        )
        return found

    def _get_copartitioned_groups(self, topics: Any, cluster: Any, subscriptions: Any) -> Any:  # type: ignore[override]  # Faust calls this method on the instance
        """Map each task-group count to the sets of topics with this count whose task groups are assigned together."""
        found: defaultdict[int, list[set[str]]] = defaultdict(list)
        for partitions, alike in super()._get_copartitioned_groups(topics, cluster, subscriptions).items():
            found[-(-partitions // self._size)] += alike
        return found

    def _global_table_standby_assignments(self, assignments: Any, partitions_by_topic: Any) -> Any:  # Faust's signature
        """Convert a finished assignment from task groups to partitions, instead of assigning global tables."""
        return {
            member: ClientAssignment(
                actives={topic: self._partitions(topic, groups) for topic, groups in made.actives.items()},
                standbys={topic: self._partitions(topic, groups) for topic, groups in made.standbys.items()},
            )
            for member, made in assignments.items()
        }

    def _groups(self, partitions: Iterable[int]) -> list[int]:
        return sorted({partition // self._size for partition in partitions})

    def _partitions(self, topic: str, groups: Iterable[int]) -> list[int]:
        size, count = self._size, self._counts[topic]
        return [number for group in groups for number in range(group * size, min((group + 1) * size, count))]


TRANSPORTS.aliases["dedup"] = "dedup.worker.transport:Transport"
STORES.aliases["dedup"] = "dedup.worker.app:SightingsStore"


def create_app(topology: Topology, settings: Settings, cluster: Cluster, wire: KafkaWire) -> DedupApp:
    """Build the Faust app of a topology. Call `create_app` in the event loop that will run the app."""
    # Faust needs a directory for its own data. A topology's name contains no dot, so ".faust" is never a state
    # directory. The path is absolute, because Faust would look for a relative table directory below the data directory.
    directory = settings.state_dir.absolute() / ".faust"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    app = DedupApp(
        topology.name,
        broker=[f"dedup://{broker}" for broker in wire.connection.brokers],
        store="dedup://",
        cache="memory://",
        TableManager=TableManager,
        PartitionAssignor=GroupAssignor,
        # `exactly_once` makes Faust read only committed records and use dedup's TransactionManager instead of its own.
        processing_guarantee="exactly_once",
        version=1,
        datadir=str(directory),
        tabledir=str(directory),
        canonical_url=identity(settings.worker_id, None),
        web_enabled=False,
        topic_disable_leader=True,
        topic_allow_declare=False,
        topic_partitions=cluster.topics[topology.changelog_topic].partitions,
        table_standby_replicas=topology.state.standby_replicas,
        stream_wait_empty=True,
        stream_buffer_maxsize=1,
        stream_publish_on_commit=False,
        broker_session_timeout=settings.session_timeout_ms / 1000,
        broker_commit_interval=1.0,
        consumer_metadata_max_age_ms=_METADATA_MAX_AGE_MS,
    )
    if topology.source.names_schemas:
        registry = SchemaRegistry.of(settings.schema_registry)
        app.schemas = SchemaResolver(registry, wait_ms=settings.schema_registry.schema_wait_ms)
        topology = topology.knowing(app.schemas.book)
    app.pool = StorePool()
    factory = TaskFactory(topology, settings, cluster, wire, SteadyClock(), RocksMemory(), app.pool)
    app.settings, app.wire, app.factory = settings, wire, factory
    wire.pin(factory.check.topic_ids)
    interval_ms = settings.commit_interval_ms
    app.tasks = TaskManager(factory, lambda: app.member, commit_interval_ms=interval_ms)
    app.standbys = Standbys(wire, topology.changelog_topic, topology.window, factory.fingerprint(), factory.keeping)
    app.sub_topologies = {"dedup": topology.feeding_topics}
    if not topology.direct:
        app.sub_topologies = {"repartition": topology.source.topics, **app.sub_topologies}
    app.Table(
        "sightings", key_type=bytes, value_type=bytes, changelog_topic=app.topic(topology.changelog_topic, acks=False)
    )
    for name, topics in app.sub_topologies.items():
        channel = app.topic(*topics, schema=BatchSchema(), acks=False, internal=False)
        # With `CrashingSupervisor`, an agent that fails crashes the app instead of skipping the batch.
        app.agent(channel, name=name, supervisor_strategy=CrashingSupervisor)(app.tasks.process_all)
    return app
