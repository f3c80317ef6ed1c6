"""A real at-least-once producer: it tries again when no answer came, and so sends some records twice.

The usual source of duplicates in the field. Idempotence is off, as it is in producers that were written without it;
a fault proxy between it and the broker loses answers of requests that were carried out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from dedup.errors import BrokerUnavailable

_ENDS_WITHIN_S = 60.0
_LOOK_EVERY = 200


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Calls `disturb` each time another `every_events` were handed over, from the producing thread."""

    disturb: Callable[[], object]
    every_events: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What the producer knows of its own work; how many duplicates it made only the topic tells."""

    events: int
    disturbances: int
    seconds: float


@dataclass(slots=True)
class AtLeastOnceProducer:
    """Sends key/value events to one topic until each was acknowledged, however often that takes."""

    bootstrap: str
    topic: str
    events_per_second: int | None = None
    """None sends as fast as the broker takes them."""
    disturbance: Disturbance | None = None
    on_progress: Callable[[int], None] = lambda _sent: None
    """Called with the events handed over so far, some times a second."""
    _failed: list[str] = field(default_factory=list, init=False)

    def send_all(self, events: Iterable[tuple[bytes, bytes]]) -> Sent:
        """Every event is in the topic at least once. Raises BrokerUnavailable otherwise."""
        producer = self._producer()
        began = time.monotonic()
        count = disturbances = 0
        for key, value in events:
            self._hand_over(producer, key, value)
            count += 1
            if self.disturbance is not None and count % self.disturbance.every_events == 0:
                self.disturbance.disturb()
                disturbances += 1
            if count % _LOOK_EVERY == 0:
                self._keep_pace(producer, count, began)
        unsent = producer.flush(_ENDS_WITHIN_S)
        self.on_progress(count)
        if unsent or self._failed:
            raise BrokerUnavailable(
                f"{unsent + len(self._failed)} of {count} events could not be sent to {self.topic} "
                f"({', '.join(self._failed[:3]) or f'no answer within {_ENDS_WITHIN_S:g} s'}). "
                f"Check that the broker at {self.bootstrap} runs and try again."
            )
        return Sent(count, disturbances, time.monotonic() - began)

    def _hand_over(self, producer: Producer, key: bytes, value: bytes) -> None:
        while True:
            try:
                producer.produce(self.topic, value, key)
            except BufferError:
                # The queue is full: the broker is slower than we are, or away.
                producer.poll(0.05)
            except KafkaException as error:
                raise BrokerUnavailable(
                    f"{self.topic} does not take records: {error}. Check that the topic exists and try again."
                ) from error
            else:
                return

    def _keep_pace(self, producer: Producer, count: int, began: float) -> None:
        producer.poll(0)
        self.on_progress(count)
        if self.events_per_second is not None:
            ahead_s = count / self.events_per_second - (time.monotonic() - began)
            if ahead_s > 0:
                producer.poll(ahead_s)

    def _producer(self) -> Producer:
        return Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "enable.idempotence": False,
                "acks": "all",
                "message.send.max.retries": 1_000_000,
                "delivery.timeout.ms": 120_000,
                "topic.metadata.propagation.max.ms": 5_000,
                "max.in.flight.requests.per.connection": 5,
                "linger.ms": 5,
                "compression.type": "snappy",
                # Java's choice of partition, so that equal IDs meet in the partition every other client expects.
                "partitioner": "murmur2_random",
                "retry.backoff.ms": 10,
                "retry.backoff.max.ms": 100,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 100,
                "delivery.report.only.error": True,
                "on_delivery": self._note_failure,
                "error_cb": _ignore,  # lost connections are what this is about
                "log_level": 0,
            }
        )

    def _note_failure(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failed.append(str(error))


def _ignore(_error: KafkaError) -> None:
    """Nothing happens."""


def make_topic(bootstrap: str, name: str, partitions: int) -> None:
    """The topic exists, with one replica and no time limit for its records. Raises BrokerUnavailable otherwise."""
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config={"retention.ms": "-1"})
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    try:
        admin.create_topics([topic])[name].result(_ENDS_WITHIN_S)
    except KafkaException as error:
        raise BrokerUnavailable(f"The broker at {bootstrap} did not create {name}: {error}.") from error
