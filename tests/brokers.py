"""The broker a test run uses, and what tests ask of it."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, OffsetSpec, ResourceType  # type: ignore[attr-defined]  # exported, undeclared
from confluent_kafka.cimpl import NewPartitions, NewTopic

from dedup.embedded import kafka_jars, kafka_node
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.kafka.topic_admin import GroupMember, group_members
from dedup.settings import Settings
from tests.waiting import WITHIN_S, until

if TYPE_CHECKING:
    from testcontainers.core.network import Network

IMAGE = "apache/kafka:4.1.1"
RELEASE = tuple(map(int, os.environ.get("DEDUP_TEST_KAFKA", "4.1").split(".")[:2]))
"""The major and minor number of the embedded Kafka's release."""
SINCE_3_5 = pytest.mark.skipif(RELEASE < (3, 5), reason="before Kafka 3.5, KRaft has no SCRAM")
SINCE_3_6 = pytest.mark.skipif(RELEASE < (3, 6), reason="before Kafka 3.6, a topic has no limits for timestamps")
NO_LEADER_YET = frozenset(
    {
        # Another node than the one that named the partitions may not know the topic yet.
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError._NOENT,
    }
)


@dataclass(frozen=True, slots=True)
class RunningKafka:
    """A broker of this test run; `embedded` is None where it runs in a container."""

    bootstrap: str
    embedded: EmbeddedKafka | None = None


@dataclass(frozen=True, slots=True)
class Admin:
    """Creates and looks at topics, with a client that no worker uses."""

    bootstrap: str
    client: AdminClient = field(repr=False)

    def create_topic(self, name: str, partitions: int = 1, config: dict[str, str] | None = None) -> str:
        """The topic exists, with its replicas and a leader for every partition; returns its name."""
        placed = self.replicas(name, partitions)
        topic = NewTopic(name, num_partitions=partitions, replica_assignment=placed, config=config or {})
        self.client.create_topics([topic])[name].result(timeout=30)
        self.until_led(name, partitions)
        return name

    def add_partitions(self, topic: str, partitions: int) -> None:
        """The topic has so many partitions from now on, and all of them have a leader."""
        self.client.create_partitions([NewPartitions(topic, partitions)])[topic].result(timeout=30)
        self.until_led(topic, partitions)

    def replicas(self, name: str, partitions: int) -> list[list[int]]:
        """Return the nodes that hold each partition of a new topic; the first leads it."""
        del name
        return [[1]] * partitions

    def until_led(self, topic: str, partitions: int) -> None:
        """The broker knows a new topic, and each of its partitions has a leader."""
        until(lambda: len(self.end_offsets(topic)) >= partitions, f"{topic}: not known to the broker")

    def configure(self, topic: str, **configs: str) -> None:
        """The topic has these configs, names written with ``_`` for a dot; the others stay."""
        entries = [
            ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for name, value in configs.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        self.client.incremental_alter_configs([resource])[resource].result(timeout=30)
        # The controller answers before the brokers know it.
        until(lambda: self._has(topic, entries), f"{topic}: configured")

    def _has(self, topic: str, wanted: Sequence[ConfigEntry]) -> bool:
        asked = ConfigResource(ResourceType.TOPIC, topic)
        told = self.client.describe_configs([asked])[asked].result(timeout=30)
        return all(told[each.name].value == each.value for each in wanted)

    def delete_below(self, topic: str, offsets: Mapping[int, int]) -> None:
        """The partitions begin at these offsets."""
        places = [TopicPartition(topic, *each) for each in offsets.items()]
        for future in self.client.delete_records(places).values():
            future.result(timeout=30)

    def delete_topic(self, name: str) -> None:
        """The topic is gone, also from what the broker says of its topics."""
        self.client.delete_topics([name])[name].result(timeout=30)
        until(lambda: name not in self.client.list_topics(timeout=30).topics, f"{name}: still known to the broker")

    def until_visible(self, prefix: str) -> None:
        """A committed reader sees every record of these topics: EndTxn is answered before partitions have markers."""
        names = [name for name in self.client.list_topics(timeout=30).topics if name.startswith(prefix)]
        for name in names:
            until(lambda: self.end_offsets(name) == self.end_offsets(name, committed=True), f"{name}: markers")  # noqa: B023  # it is waited for here

    def end_offsets(self, topic: str, *, committed: bool = False) -> dict[int, int]:
        """Return the next offset of each partition, open transactions included unless ``committed``."""
        found: dict[int, int] = {}

        def told() -> bool:
            try:
                found.update(self._end_offsets(topic, committed=committed))
            except KafkaException as error:
                if not (error.args[0].retriable() or error.args[0].code() in NO_LEADER_YET):
                    raise
                return False
            return True

        until(told, f"{topic}: its ends are told")
        return found

    def _end_offsets(self, topic: str, *, committed: bool) -> dict[int, int]:
        # By this client, which is connected: a new consumer takes twenty times as long.
        numbers = self.client.list_topics(topic, timeout=30).topics[topic].partitions
        wanted = {TopicPartition(topic, number): OffsetSpec.latest() for number in sorted(numbers)}  # type: ignore[no-untyped-call]
        if not wanted:
            return {}
        # A committed reader is told the last stable offset.
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        asked = self.client.list_offsets(wanted, isolation_level=level, request_timeout=30)
        return {place.partition: answer.result().offset for place, answer in asked.items()}


def members_of(bootstrap: str, group: str) -> list[GroupMember]:
    """Return the members of the group on the broker at this address."""
    return group_members(Settings(brokers=(bootstrap,)), "tests", group)


def admin_of(bootstrap: str) -> Admin:
    """Return the helper for the broker at this address."""
    return Admin(bootstrap, AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}))


@lru_cache(maxsize=1)
def producer_of(bootstrap: str) -> Producer:
    """Return an idempotent producer, the same for all tests of a broker: a new one gets its id half a second later."""
    return Producer(
        {"bootstrap.servers": bootstrap, "enable.idempotence": True, "message.timeout.ms": 900_000, "log_level": 0}
    )


def read_all(bootstrap: str, topic: str, *, isolation: str = "read_committed") -> list[Message]:
    """Return every record up to the topic's present end, in offset order within a partition.

    Raises AssertionError when it does not get there in time.
    """
    settings = {"enable.auto.commit": False, "isolation.level": isolation, "enable.partition.eof": True}
    # The end of a partition is told when a fetch has waited in vain.
    settings["fetch.wait.max.ms"] = 5
    # A partition whose leader has just changed may refuse its first offset; the default would then go to its end.
    settings["auto.offset.reset"] = "earliest"
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": unique("reader"), **settings})
    try:
        partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        left = set(partitions)
        records: list[Message] = []
        deadline = time.monotonic() + WITHIN_S
        while left:
            assert time.monotonic() < deadline, f"{topic}: no end in sight of partitions {left}"
            # What has come, and a wait only where that is nothing: markers at the end are no records to wait for.
            for message in (*consumer.consume(1, 0.05), *consumer.consume(10_000, 0)):
                error = message.error()
                if error is None:
                    records.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
        return records
    finally:
        consumer.close()


def unique(prefix: str) -> str:
    """Return a name no other test has: ``prefix-<8 hex digits>``."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


@contextmanager
def embedded() -> Iterator[RunningKafka]:
    """The embedded Kafka runs."""
    # A test of compaction need not wait 15 s for the cleaner to look.
    with EmbeddedKafka(properties={"log.cleaner.backoff.ms": "500"}) as kafka:
        yield RunningKafka(kafka.bootstrap, kafka)
        # In good order it would write out the logs of all tests, only to delete them.
        kafka.kill()


def use_release(release: str) -> None:
    """Every embedded Kafka of this process is of another release from now on; its jars are those that it asks for."""
    listed = kafka_jars.cache_root(os.environ) / f"kafka-{release}-jars.txt"
    if not listed.exists():
        roots = [root.replace(kafka_jars._KAFKA_VERSION, release) for root in kafka_jars._ROOTS]
        listed.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=listed.parent) as temporary:
            found = [kafka_jars.locked(artifact) for artifact in kafka_jars.resolved(roots, Path(temporary))]
            whole = Path(temporary) / listed.name
            whole.write_text("\n".join(jar.line for jar in found))
            whole.replace(listed)
    jars = kafka_jars.read_lock(listed.read_text())
    patch = pytest.MonkeyPatch()
    patch.setattr(kafka_jars, "_KAFKA_VERSION", release)
    patch.setattr(kafka_jars, "locked_jars", lambda: jars)
    if RELEASE < (3, 3):
        # A new cluster has no feature levels yet (KIP-778), and a node does not read this file.
        patch.setattr(kafka_node, "_bootstrap_checkpoint", lambda *_: b"")


INSIDE = "kafka:9094"
"""Where containers of the broker's network find it."""


@contextmanager
def in_container(network: Network | None = None) -> Iterator[RunningKafka]:
    """Apache's image runs in the Docker engine the environment names, for the host and for containers of a network."""
    from testcontainers.core.container import DockerContainer  # noqa: PLC0415  only where it is asked for
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy  # noqa: PLC0415

    settings = {
        "NODE_ID": "1",
        "PROCESS_ROLES": "broker,controller",
        "LISTENERS": "HOST://:9092,BROKER://:9094,CONTROLLER://:9093",
        "CONTROLLER_LISTENER_NAMES": "CONTROLLER",
        "INTER_BROKER_LISTENER_NAME": "BROKER",
        "LISTENER_SECURITY_PROTOCOL_MAP": "HOST:PLAINTEXT,BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
        "OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
        "TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
        "TRANSACTION_STATE_LOG_MIN_ISR": "1",
        "AUTO_CREATE_TOPICS_ENABLE": "false",
        "GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
    }
    container = DockerContainer(IMAGE).with_exposed_ports(9092)
    if network is not None:
        container = container.with_network(network).with_network_aliases(INSIDE.partition(":")[0])
    for key, value in settings.items():
        container = container.with_env(f"KAFKA_{key}", value)
    # The address to advertise is known only once the engine has chosen the host's port: the start waits for it.
    wait = "while [ ! -f /tmp/start.sh ]; do sleep 0.1; done; exec sh /tmp/start.sh"
    with container.with_command(["sh", "-c", wait]) as started:
        address = f"{started.get_container_host_ip()}:{started.get_exposed_port(9092)}"
        inside = "localhost:9094" if network is None else INSIDE
        script = f"export KAFKA_ADVERTISED_LISTENERS=HOST://{address},BROKER://{inside}\nexec /etc/kafka/docker/run\n"
        started.get_wrapped_container().put_archive("/", _tar("/tmp/start.sh", script.encode()))
        LogMessageWaitStrategy("Kafka Server started").with_startup_timeout(60).wait_until_ready(started)
        yield RunningKafka(address)


def _tar(path: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.TarFile(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo(path)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
