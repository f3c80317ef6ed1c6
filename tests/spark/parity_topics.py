"""What became of every record of the parity stream, read back from the topics that a worker or a Spark stream wrote."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import Message, Producer

from dedup.topology.model import LateTo, Topology
from tests.brokers import Admin, read_all
from tests.integration.workload import Event
from tests.spark.parity import Row

ANY_TIME = {"retention.ms": "-1", "message.timestamp.after.max.ms": str(2**63 - 1)}
Place = tuple[int, int]


def sent(admin: Admin, topic: str, events: Sequence[Event], partitions: int = 2) -> list[Place]:
    """The events are in a new topic; return the partition and offset of each."""
    admin.create_topic(topic, partitions, ANY_TIME)
    producer = Producer({"bootstrap.servers": admin.bootstrap, "enable.idempotence": True, "linger.ms": 20})
    ends = [0] * partitions
    places: list[Place] = []
    for number, event in enumerate(events):
        places.append((event.partition, ends[event.partition]))
        ends[event.partition] += 1
        producer.produce(
            topic,
            event.value,
            event.key,
            partition=event.partition,
            timestamp=event.timestamp_ms,
            headers=list(event.headers),
        )
        if number % 5_000 == 0:
            producer.flush(30)
    assert producer.flush(30) == 0
    return places


def rows_in_topics(bootstrap: str, topology: Topology, places: Sequence[Place]) -> dict[Place, Row]:
    """Return the verdict of every record that is in a topic; AssertionError where one is in two, or twice."""
    assert topology.output is not None
    topics = {topology.output.topic: _forwarded, topology.dead_letter: _dead}
    if topology.duplicates is not None:
        topics[topology.duplicates] = _duplicate
    if topology.conflicts is not None:
        topics[topology.conflicts] = _conflict
    if isinstance(topology.late, LateTo):
        topics[topology.late.topic] = _late
    found: dict[Place, Row] = {}
    for topic, row_of in topics.items():
        for message in read_all(bootstrap, topic):
            headers = _headers(message)
            place = places[int(headers["n"])]
            assert place not in found, f"{place} is in {topic} and somewhere else, or twice"
            found[place] = row_of(headers)
    return found


def _headers(message: Message) -> dict[str, str]:
    return {name: (content or b"").decode(errors="replace") for name, content in message.headers() or ()}


def _forwarded(headers: dict[str, str]) -> Row:
    match headers.get("dedup-verdict"):
        case None:
            return Row("unique", None, None, None)
        case "conflict":
            return Row("unique", "conflict", None, None)
        case "late":
            return Row("late", None, None, None)
        case why:
            return Row("exempt", why, None, None)


def _dead(headers: dict[str, str]) -> Row:
    return Row("dead_letter", headers["dedup-reason"], None, None)


def _late(_headers: dict[str, str]) -> Row:
    return Row("late", None, None, None)


def _duplicate(headers: dict[str, str], verdict: str = "duplicate") -> Row:
    _topic, partition, offset = headers["dedup-first-source"].rsplit("/", 2)
    return Row(verdict, None, int(headers["dedup-first-time"]), (int(partition), int(offset)))


def _conflict(headers: dict[str, str]) -> Row:
    return _duplicate(headers, "conflict")
