"""Writing a run to a broker by hand, without the worker, so that faults can be planted in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from confluent_kafka import Consumer, Producer, TopicPartition

from dedup.verify.report import Report
from tests.brokers import RunningKafka, producer_of

BASE_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Sent:
    """A record to produce by hand."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    timestamp_ms: int


@lru_cache(maxsize=2)
def _transactional(bootstrap: str, transactional_id: str) -> Producer:
    """Return a producer with an epoch of its own, for as many transactions as are wanted."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": transactional_id, "log_level": 0})
    producer.init_transactions(30)
    return producer


def send(
    kafka: RunningKafka, records: list[Sent], *, transactional_id: str | None = None, commit: bool = True
) -> Producer:
    """The records are in their topics; with ``commit`` false, in a transaction still open."""
    if transactional_id is None:
        producer = producer_of(kafka.bootstrap)
    else:
        producer = _transactional(kafka.bootstrap, transactional_id)
        producer.begin_transaction()
    refused: list[object] = []
    for sent in records:
        producer.produce(
            sent.topic,
            sent.value,
            sent.key,
            partition=sent.partition,
            timestamp=sent.timestamp_ms,
            headers=sent.headers,
            on_delivery=lambda error, _: refused.append(error) if error else None,
        )
    assert producer.flush(30) == 0
    assert refused == []
    if transactional_id is not None and commit:
        producer.commit_transaction(30)
    return producer


def commit(kafka: RunningKafka, group: str, topic: str, offsets: dict[int, int]) -> None:
    """The group has committed these offsets, by partition."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    places = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
    committed = consumer.commit(offsets=places, asynchronous=False)
    consumer.close()
    assert [place.error for place in committed] == [None] * len(places)


def found(report: Report) -> dict[str, int]:
    """Return the violations that there are."""
    return {kind: number for kind, number in report.counts.items() if number}
