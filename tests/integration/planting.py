"""Writing a run to a broker by hand, without the worker, so that faults can be planted in it."""

from __future__ import annotations

from dataclasses import dataclass

from confluent_kafka import Consumer, Producer, TopicPartition

from dedup.proof.report import Report
from tests.brokers import RunningKafka

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


def send(
    kafka: RunningKafka, records: list[Sent], *, transactional_id: str | None = None, commit: bool = True
) -> Producer:
    """The records are in their topics; with ``commit`` false, in a transaction still open."""
    config: dict[str, str | bool] = {"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True}
    if transactional_id is not None:
        config["transactional.id"] = transactional_id
    producer = Producer(config)
    if transactional_id is not None:
        producer.init_transactions(30)
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
