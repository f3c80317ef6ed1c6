"""The Faust app of a topology, with agents that pass batches to tasks, the table of sightings, and the group members.

A read of a table key is answered by the task that owns the key. Writes are refused, because a sighting is only stored
in the transaction of its record. Tasks restore themselves, so Faust's recovery service is never started.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import faust
from faust.stores import STORES
from faust.stores.base import Store as FaustStore
from faust.tables import TableManager as FaustTableManager
from faust.transport.drivers import TRANSPORTS
from faust.types import TP
from mode import CrashingSupervisor
from yarl import URL

from dedup.core.window import Sighting
from dedup.errors import InvariantBroken
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.consumer import TopicCheck
from dedup.metrics import DeadLetterAlert
from dedup.store.directory import StorePool
from dedup.store.rocks import RocksMemory
from dedup.worker.bootstrap import Bootstrap
from dedup.worker.clock import SteadyClock
from dedup.worker.dedup_task import DedupTask
from dedup.worker.standby import Standbys
from dedup.worker.task_factory import TaskFactory
from dedup.worker.task_manager import TaskManager
from dedup.worker.topics import Cluster
from dedup.worker.transport import BatchSchema
from dedup.worker_view import Peer

if TYPE_CHECKING:
    from faust.assignor.partition_assignor import PartitionAssignor

    from dedup.settings import Settings
    from dedup.topology.model import Topology
    from dedup.worker.transport import Consumer

NOWHERE: Final = "no-pages.invalid"
"""The host name of a worker without pages, which can never exist (RFC 2606)."""


def identity(worker_id: str | None, url: str | None) -> str:
    """Return a worker's unique name in the group, which consists of the address of its pages and its id."""
    return str(URL(url or f"http://{NOWHERE}").with_fragment(worker_id))


def peers_of(app: DedupApp) -> tuple[Peer, ...]:
    """Return the members of the group by name, as of the last assignment; empty before the first assignment.

    Each member announces an address when it joins, and the assignment distributes the addresses to all members, as
    `application.server` does in Kafka Streams (KIP-67). Only a request shows whether a worker has died since then.
    """
    partitions: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    assignor = cast("PartitionAssignor", app.assignor)
    for spread in (assignor.changelog_distribution, assignor.external_topic_distribution):
        for name, by_topic in spread.items():
            tasks = partitions[name]
            tasks.update((topic, number) for topic in by_topic for number in by_topic[topic])
    own = str(app.conf.canonical_url)
    feeding = app.feeding_topics
    peers = [
        _peer(name, tuple(sorted(task for task in tasks if task[0] in feeding)), here=name == own)
        for name, tasks in partitions.items()
    ]
    return tuple(sorted(peers, key=lambda peer: peer.worker))


def _peer(name: str, partitions: tuple[tuple[str, int], ...], *, here: bool) -> Peer:
    url = URL(name)
    # A worker of a release without pages for others has no fragment.
    address = None if url.host == NOWHERE or not url.fragment else str(url.with_fragment(None)).rstrip("/")
    return Peer(url.fragment or url.host or name, address, partitions, here)


def _attach_agents(app: DedupApp) -> None:
    """Declare one agent per sub-topology. If an agent fails, it crashes the app instead of skipping the batch."""
    for sub_topology, topics in app.sub_topologies.items():
        channel = app.topic(*topics, schema=BatchSchema(), acks=False, internal=False)
        app.agent(channel, name=sub_topology, supervisor_strategy=CrashingSupervisor)(app.tasks.process_all)


class SightingsStore(FaustStore[Any, Any]):
    """The store for the URL ``dedup://``, which contains all sightings that this worker's tasks have applied."""

    app: DedupApp

    def __getitem__(self, state_key: bytes) -> tuple[Sighting, ...]:
        found = [seen for task in self._dedup_tasks() for seen in task.sightings_of(state_key)]
        if not found:
            raise KeyError(state_key)
        return tuple(found)

    def __iter__(self) -> Iterator[bytes]:
        for task in self._dedup_tasks():
            if task.store is not None:
                for _, key, _ in task.store.sightings():
                    yield key

    def __len__(self) -> int:
        return sum(task.store.count_ids() for task in self._dedup_tasks() if task.store is not None)

    def __setitem__(self, state_key: bytes, value: object) -> NoReturn:
        raise _read_only()

    def __delitem__(self, state_key: bytes) -> NoReturn:
        raise _read_only()

    def _dedup_tasks(self) -> Iterator[DedupTask]:
        for task in self.app.tasks.running.values():
            if isinstance(task.work, DedupTask):
                yield task.work

    def reset_state(self) -> None:
        """Do nothing, because `dedup reset` deletes state."""

    async def backup_partition(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InvariantBroken, because the changelog is the backup."""
        raise InvariantBroken("Faust must not make a backup here; the changelog topic holds all state.")

    def restore_backup(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InvariantBroken, because the changelog is the backup."""
        raise InvariantBroken("Faust must not restore a backup here; the changelog topic holds all state.")

    def apply_changelog_batch(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InvariantBroken, because tasks restore themselves."""
        raise InvariantBroken("Faust's recovery must not write the store; restore belongs to the tasks.")


class SightingsTable(faust.Table[Any, Any]):
    """A `faust.Table` that refuses all writes."""

    def on_key_set(self, key: object, value: object) -> NoReturn:
        """Raise InvariantBroken."""
        raise _read_only()

    def on_key_del(self, key: object) -> NoReturn:
        """Raise InvariantBroken."""
        raise _read_only()


class TableManager(FaustTableManager):
    """Faust's table manager without recovery, because tasks restore themselves, partition by partition."""

    app: DedupApp

    async def on_start(self) -> None:
        """Register the changelog, so that the assignor co-locates it with its feeding partition."""
        await self._update_channels()

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        """Resume Faust's flow at once, because a partition is only read when its own task is running."""
        app = self.app
        self._recovery_started.set()
        await self._update_channels()
        # Faust assigns topics of each partition count separately: its standbys may include partitions that are ours.
        ours = {feeding.partition for feeding in app.tasks.running if feeding.topic in app.sub_topologies["dedup"]}
        standbys = {tp.partition for tp in app.assignor.assigned_standbys() if tp.topic in self.changelog_topics}
        app.standbys.assign(standbys - ours)
        app.store_pool.keep_only(standbys | ours)
        app.flow_control.resume()
        app.consumer.resume_flow()
        await app._fetcher.maybe_start()  # noqa: SLF001  # as Faust's own recovery does at its end
        self.on_actives_ready()
        self.on_standbys_ready()

    def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Stop the standbys, because tasks that are about to open need their stores."""
        self.app.standbys.release()

    async def on_stop(self) -> None:
        """Stop fetching and the tables."""
        await self.app._fetcher.stop()  # noqa: SLF001  # as Faust's own manager does
        for table in self.values():
            await table.stop()

    async def wait_until_recovery_completed(self) -> bool:
        """Return at once, because there is no app-wide recovery."""
        return False


def _read_only() -> InvariantBroken:
    return InvariantBroken(
        "the table of sightings cannot be written by key: a sighting belongs to the transaction of its record."
    )


TRANSPORTS.aliases["dedup"] = "dedup.worker.transport:Transport"
STORES.aliases["dedup"] = "dedup.worker.app:SightingsStore"


class DedupApp(faust.App):
    """A Faust app that knows its tasks; only `create_app` builds it."""

    settings: Settings
    connection: Connection
    wire: KafkaWire
    tasks: TaskManager
    standbys: Standbys
    bootstrap: Bootstrap
    store_pool: StorePool
    topic_check: TopicCheck
    alert: DeadLetterAlert | None = None
    """The alert that is active while nearly all records become dead letters."""
    sub_topologies: dict[str, tuple[str, ...]]
    """Name -> feeding topics."""

    @property
    def member(self) -> Consumer:
        """The consumer, with the type of dedup's own transport."""
        return cast("Consumer", self.consumer)

    @property
    def feeding_topics(self) -> frozenset[str]:
        """Every topic whose partitions are tasks."""
        return frozenset(topic for topics in self.sub_topologies.values() for topic in topics)


def create_app(topology: Topology, settings: Settings, cluster: Cluster, wire: KafkaWire) -> DedupApp:
    """Return the app of a topology without starting it. Call this in the event loop that will run the app."""
    connection = Connection.of(settings, client_id=f"dedup-{topology.name}")
    # Faust needs a directory. A topology's name has no dot, so this one collides with no state; absolute, since Faust
    # puts a relative table directory below the data directory, where it creates none.
    directory = settings.state_dir.absolute() / ".faust"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    app = DedupApp(
        topology.name,
        broker=[f"dedup://{broker}" for broker in connection.brokers],
        store="dedup://",
        cache="memory://",
        Table=SightingsTable,
        TableManager=TableManager,
        # The flag makes Faust read committed and use our TransactionManager; its own implementation is not used.
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
    )
    app.store_pool = StorePool()
    factory = TaskFactory(topology, settings, cluster, wire, SteadyClock(), RocksMemory(), store_pool=app.store_pool)
    app.settings, app.connection, app.wire = settings, connection, wire
    app.topic_check = factory.check
    wire.pin(factory.check.topic_ids)
    app.tasks = TaskManager(factory.build, factory.wipe, commit_interval_ms=settings.commit_interval_ms)
    app.standbys = Standbys(
        wire,
        topology.changelog_topic,
        topology.window,
        factory.fingerprint(),
        factory.open_store,
        prepare=factory.prepare,
        release_store=factory.release_store,
    )
    app.bootstrap = factory.bootstrap
    app.sub_topologies = {"dedup": topology.feeding_topics}
    if not topology.direct:
        app.sub_topologies = {"repartition": topology.source.topics, **app.sub_topologies}
    app.Table(
        "sightings", key_type=bytes, value_type=bytes, changelog_topic=app.topic(topology.changelog_topic, acks=False)
    )
    _attach_agents(app)
    return app
