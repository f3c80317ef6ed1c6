"""Several Kafka nodes on this machine as one KRaft cluster, each broker and controller: what outlives a dead node."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

from dedup.embedded.kafka_node import HOST, EmbeddedKafka, free_ports, new_id

NODES: Final = 3
_PROPERTIES: Final[Mapping[str, str]] = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    # Three starting Javas share the cores: a node must not be fenced for being slow; but most of a test is the wait
    # until a dead node is missed.
    "broker.session.timeout.ms": "4000",
    # A replica that fell behind is left out sooner: 30 s by default.
    "replica.lag.time.max.ms": "4000",
}


class ClusterNode(EmbeddedKafka):
    """One node of a cluster of several; its ports are chosen before the first node starts, so that all know them."""

    def __init__(
        self, number: int, cluster_id: str, ports: tuple[int, int], voters: str, properties: Mapping[str, str]
    ) -> None:
        """``ports``: for clients and for the quorum. ``voters``: Kafka's `controller.quorum.voters`."""
        own = {"node.id": str(number), "controller.quorum.voters": voters}
        super().__init__(properties={**properties, **own})
        self._number: Final = number
        self._cluster_id: Final = cluster_id
        self._own_ports: Final = ports

    def _free_ports(self) -> tuple[int, ...]:
        return self._own_ports

    def _identity(self) -> tuple[str, int]:
        return self._cluster_id, self._number


class KafkaCluster:
    """Three nodes with the ids 1 to 3, three replicas of everything, of which two must be in sync.

    Blocking. Every method raises BrokerUnavailable when Java, the jars or a node are not to be had.
    """

    def __init__(self) -> None:
        ports = free_ports(2 * NODES)
        voters = ",".join(f"{number}@{HOST}:{ports[2 * number - 1]}" for number in range(1, NODES + 1))
        cluster_id = new_id()
        self.nodes: Final = {
            number: ClusterNode(number, cluster_id, (ports[2 * number - 2], ports[2 * number - 1]), voters, _PROPERTIES)
            for number in range(1, NODES + 1)
        }

    @property
    def bootstrap(self) -> str:
        """Return the addresses of all nodes, comma-separated; known once started."""
        return ",".join(node.bootstrap for node in self.nodes.values())

    def start(self) -> Self:
        """All nodes answer clients."""
        # A node is ready when it has found a quorum: they must start side by side.
        with ThreadPoolExecutor(NODES) as pool:
            starts = [pool.submit(node.start) for node in self.nodes.values()]
        try:
            for start in starts:
                start.result()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """No node runs, and their data are gone; idempotent."""
        # Killed: the second to go would wait in vain for a quorum that hears of it.
        for node in self.nodes.values():
            node.kill()
            node.stop()

    def __enter__(self) -> Self:
        """Start the nodes."""
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the nodes."""
        self.stop()
