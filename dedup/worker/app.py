"""The Faust app of a topology, every option explicit, and the tasks it hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import faust
from faust.stores import STORES
from faust.transport.drivers import TRANSPORTS

from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.store.rocks import RocksMemory
from dedup.store.shelf import Shelf
from dedup.worker.agents import attach_agents
from dedup.worker.bootstrap import Bootstrap
from dedup.worker.clock import SteadyClock
from dedup.worker.peers import identity
from dedup.worker.plan import Cluster
from dedup.worker.standby import Standbys
from dedup.worker.table import SightingsTable, TableManager
from dedup.worker.tasks import Tasks
from dedup.worker.workshop import Workshop

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology
    from dedup.worker.transport import Consumer

TRANSPORTS.aliases["dedup"] = "dedup.worker.transport:Transport"
STORES.aliases["dedup"] = "dedup.worker.table:SightingsStore"


class DedupApp(faust.App):
    """A Faust app that knows its tasks; built by `create_app` only."""

    settings: Settings
    connection: Connection
    wire: KafkaWire
    tasks: Tasks
    standbys: Standbys
    bootstrap: Bootstrap
    shelf: Shelf
    sub_topologies: dict[str, tuple[str, ...]]
    """Name -> feeding topics."""

    @property
    def member(self) -> Consumer:
        """The consumer, as what our transport makes it."""
        return cast("Consumer", self.consumer)

    @property
    def feeding_topics(self) -> frozenset[str]:
        """Every topic whose partitions are tasks."""
        return frozenset(topic for topics in self.sub_topologies.values() for topic in topics)


def create_app(topology: Topology, settings: Settings, cluster: Cluster, wire: KafkaWire) -> DedupApp:
    """Return the app of a topology, not started; call it in the loop that will run it."""
    connection = Connection.of(settings, client_id=f"dedup-{topology.name}")
    # Faust wants a directory of its own; a topology's name has no dot, so this one is nobody's state.
    # Faust puts a relative table directory below the data directory, where nothing is made.
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
    app.shelf = Shelf()
    workshop = Workshop(topology, settings, cluster, wire, SteadyClock(), RocksMemory(), shelf=app.shelf)
    app.settings, app.connection, app.wire = settings, connection, wire
    app.tasks = Tasks(workshop.build, workshop.wipe, commit_interval_ms=settings.commit_interval_ms)
    app.standbys = Standbys(
        wire,
        topology.changelog_topic,
        topology.window,
        workshop.fingerprint(),
        workshop.open_store,
        prepare=workshop.prepare,
        release_store=workshop.release_store,
    )
    app.bootstrap = workshop.bootstrap
    app.sub_topologies = {"dedup": topology.feeding_topics}
    if not topology.direct:
        app.sub_topologies = {"repartition": topology.source.topics, **app.sub_topologies}
    app.Table(
        "sightings", key_type=bytes, value_type=bytes, changelog_topic=app.topic(topology.changelog_topic, acks=False)
    )
    attach_agents(app)
    return app
