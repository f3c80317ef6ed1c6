"""Creates synthetic records for any topology, and sends them to the source topics of a fleet under test."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, assert_never

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType  # type: ignore[attr-defined]  # exported, undeclared
from confluent_kafka.cimpl import NewTopic

from dedup.core.event_time import FieldTime
from dedup.core.fold import OnConflict
from dedup.core.framing import framed
from dedup.core.partitioner import partitions as partitions_of
from dedup.core.tracking_id import (
    CodeRule,
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyFieldRule,
    KeyRule,
    PartsRule,
    RawContentRule,
    Rule,
)
from dedup.errors import BrokerUnavailable, InvariantBroken
from dedup.quantities import instant
from dedup.verify.kafka_reader import KafkaReader, client_config

if TYPE_CHECKING:
    from dedup.core.tracking_id import Path
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_REPEATS: Final = 0.3
"""The share of records that repeat an earlier record."""
_BAD: Final = 0.003
"""The share of records that are not JSON."""
_REMEMBERED: Final = 20_000
_PADDING: Final = "x" * 60
_ANSWER_WITHIN_S: Final = 60.0
_TICK_S: Final = 0.02
_AT_ONCE: Final = 1_000_000_000
_STOPS_WITHIN_S: Final = 120.0
_STANDS_STILL_S: Final = 15.0
"""If no record is confirmed for this time, a new producer replaces the old producer. This time is longer than any
downtime of a broker in a run. In one run, a producer of librdkafka 2.16.1 sent nothing after its only broker had
restarted, until its records timed out.
"""
_AGES: Final = 20
_RECORDS_PER_AGE: Final = 50
"""The average number of records of each age per partition. With this average, every partition gets some records."""
_SEGMENT_MS: Final = 3_600_000
_DAY_MS: Final = 86_400_000
AT_LEAST_ONCE: Final[Mapping[str, Any]] = {
    "enable.idempotence": False,
    "acks": "all",
    "message.send.max.retries": 1_000_000,
    "topic.metadata.propagation.max.ms": 5_000,
    "max.in.flight.requests.per.connection": 5,
    "compression.type": "snappy",
    # With the Java client's partitioner, each ID is in the partition that the other clients expect.
    "partitioner": "murmur2_random",
    "retry.backoff.ms": 10,
    "retry.backoff.max.ms": 100,
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 100,
}
"""The options of a producer that retries soon after a lost response, and thus duplicates a stored record."""
ANY_PARTITION: Final = -1
"""The partition number that lets the producer's partitioner choose the partition."""


@dataclass(frozen=True, slots=True)
class Made:
    """A record to send."""

    topic: str
    partition: int
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    time_ms: int


class MadeRecords:
    """Creates records with new IDs, and repeats some records later, like a producer that receives no acknowledgment.

    A record's key is its ID, so Kafka's default partitioner sends all records with the same ID to the same partition.
    """

    def __init__(self, topology: Topology, partitions: Mapping[str, int], *, run: str, seed: int) -> None:
        self._topology: Final = topology
        self._partitions: Final = partitions
        self._run: Final = run
        self._dice: Final = random.Random(seed)  # noqa: S311  # no secret; a run must be repeatable
        self._count = 0
        self._sent: Final[list[Made]] = []

    def __iter__(self) -> Iterator[Made]:
        """Yield an endless series of records. The event time of each new record is the current time."""
        while True:
            yield self.at(time.time_ns() // 1_000_000)

    def at(self, now_ms: int) -> Made:
        """Return the next record: a repeated record, or a new record with the event time ``now_ms``."""
        dice, is_json = self._dice, self._topology.source.format != "bytes"
        if self._sent and dice.random() < _REPEATS:
            made = self._sent[-1 - int(dice.random() ** 3 * len(self._sent))]
            changed = self._topology.fingerprints_wanted and dice.random() < _REPEATS
            # With `on_conflict: fail`, a conflict would stop the workers.
            if (
                changed
                and self._topology.on_conflict is not OnConflict.FAIL
                and self._topology.source.format != "bytes"
            ):
                return replace(made, value=made.value.replace(_PADDING.encode(), b"y" * len(_PADDING)))
            return made
        made = self.new(now_ms)
        if is_json and dice.random() < _BAD:
            return replace(made, value=b'{"broken":')
        if len(self._sent) < _REMEMBERED:
            self._sent.append(made)
        else:
            self._sent[self._count % _REMEMBERED] = made
        return made

    def new(self, now_ms: int) -> Made:
        """Return a valid record with a new ID and the event time ``now_ms``."""
        self._count += 1
        text = f"{self._run}-{self._count}"
        document: dict[str, Any] = {"number": self._count, "padding": _PADDING}
        document, headers = _identified(self._topology.tracking_id.rule, document, text)
        event_time = self._topology.event_time
        if isinstance(event_time, FieldTime):
            unit, per_unit_us = event_time.unit, {"us": 1, "ms": 1_000, "s": 1_000_000}
            written = instant(now_ms) if unit == "rfc3339" else now_ms * 1_000 // per_unit_us[unit]
            document = _with(document, event_time.path, written)
        topic = self._dice.choice(self._topology.source.topics)
        (partition,) = partitions_of([text.encode()], self._partitions[topic])
        value, added = framed(self._topology.source.framing, json.dumps(document).encode())
        return Made(topic, partition, text.encode(), value, (*headers, *added), now_ms)


def _identified(
    rule: Rule, document: dict[str, Any], text: str
) -> tuple[dict[str, Any], tuple[tuple[str, bytes], ...]]:
    """Return a document and headers that contain the ID ``text``. The caller also uses ``text`` as the record's key."""
    match rule:
        case KeyRule() | ContentRule() | RawContentRule():
            return {**document, "made": text}, ()
        case HeaderRule(name):
            return document, ((name, text.encode()),)
        case FieldRule(path):
            return _with(document, path, text), ()
        case FieldsRule(paths):
            for at, path in enumerate(paths):
                document = _with(document, path, text if at == 0 else f"part-{at}")
            return document, ()
        case PartsRule(parts):
            headers: tuple[tuple[str, bytes], ...] = ()
            for part in parts:
                document, more = _identified(part.rule, document, text)
                headers += more
            return document, headers
        case FirstOfRule(alternatives):
            return _identified(alternatives[0], document, text)
        case CodeRule() | KeyFieldRule():
            raise InvariantBroken("no records can be made for this ID, and `dedup chaos` has not refused it.")
        case never:
            assert_never(never)


def _with(here: Any, path: Path, value: object) -> Any:  # noqa: ANN401  # a JSON value
    """Return the JSON value ``here`` with the member at ``path`` set to ``value``.

    Creates any objects and arrays that are missing on the path.
    """
    if not path:
        return value
    step, *rest = path
    if isinstance(step, int):
        items = [*(here or ()), *[None] * (step + 1 - len(here or ()))]
        items[step] = _with(items[step], tuple(rest), value)
        return items
    members = here or {}
    return {**members, step: _with(members.get(step), tuple(rest), value)}


def make_topic(bootstrap: str, name: str, partitions: int, *, by_arrival: bool = False) -> None:
    """Create a topic with one replica and unlimited retention.

    If ``by_arrival`` is true, the broker sets the timestamps. Raises BrokerUnavailable if the broker does not create
    the topic.
    """
    config = {"retention.ms": "-1", "message.timestamp.type": "LogAppendTime" if by_arrival else "CreateTime"}
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
    try:
        admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        admin.create_topics([topic])[name].result(_ANSWER_WITHIN_S)
    except KafkaException as error:
        raise BrokerUnavailable(f"The broker at {bootstrap} did not create {name}: {error}.") from error


class Sender:
    """Sends each record at least once, at a steady rate, in a separate thread. Use a sender as a context manager."""

    def __init__(
        self, records: Iterable[Made], settings: Settings, *, per_s: int, options: Mapping[str, Any] | None = None
    ) -> None:
        """``options`` override the default options, which make librdkafka's producer idempotent."""
        self._records: Final = iter(records)
        self._per_s: Final = per_s
        self._ended: Final = threading.Event()
        self._failure: BaseException | None = None
        self.sent = 0
        self._config: Final = {
            **client_config(settings),
            "enable.idempotence": True,
            "linger.ms": 5,
            "compression.type": "lz4",
            "delivery.timeout.ms": 120_000,
            **(options or {}),
        }
        self._producer = Producer(self._config)
        self._unconfirmed: Final[dict[int, Made]] = {}
        """Maps the number of each record that is not confirmed yet to the record, in sending order."""
        self._refused: Final[list[int]] = []
        """The numbers of the records that timed out and must be sent again."""
        self._confirmed_s = time.monotonic()
        """The last time at which a record was confirmed or no record was waiting for confirmation."""
        self._thread: Final = threading.Thread(target=self._run, name="sender", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_STOPS_WITHIN_S)

    @property
    def running(self) -> bool:
        """Return whether the sender still has records to send."""
        return self._thread.is_alive()

    def stop(self) -> int:
        """Stop sending, wait until all sent records have arrived, and return their number.

        Raises BrokerUnavailable if some records do not arrive in time.
        """
        self._ended.set()
        return self.finish()

    def finish(self) -> int:
        """Wait until all records have been sent and have arrived, and return their number. Raises BrokerUnavailable if
        some records do not arrive in time.
        """
        self._thread.join(_STOPS_WITHIN_S)
        if self._failure is not None:
            raise self._failure
        deadline_s = time.monotonic() + _STOPS_WITHIN_S
        while self._unconfirmed and time.monotonic() < deadline_s:
            self._poll(_TICK_S)
        if self._unconfirmed:
            raise BrokerUnavailable(
                f"{len(self._unconfirmed)} of {self.sent} records did not arrive within {_STOPS_WITHIN_S:g} s. "
                f"Check the broker, and run this again."
            )
        return self.sent

    def _run(self) -> None:
        try:
            began_s = time.monotonic()
            while self._wait_until(began_s + self.sent / self._per_s):
                made = next(self._records, None)
                if made is None:
                    return
                self._unconfirmed[self.sent] = made
                self._send(self.sent, made)
                self.sent += 1
        except BaseException as failure:  # noqa: BLE001  # raised by `stop`
            self._failure = failure

    def _wait_until(self, due_s: float) -> bool:
        """Process confirmations of sent records until ``due_s``. Return False if the sender has been stopped."""
        while time.monotonic() < due_s and not self._ended.is_set():
            self._poll(0)
            self._ended.wait(_TICK_S)
        return not self._ended.is_set()

    def _poll(self, wait_s: float) -> None:
        """Process confirmations. If no confirmation has arrived for too long, switch to a new producer."""
        self._producer.poll(wait_s)
        now_s = time.monotonic()
        if not self._unconfirmed:
            self._confirmed_s = now_s
        elif now_s - self._confirmed_s > _STANDS_STILL_S:
            self._confirmed_s = now_s
            self._producer.purge()
            self._producer = Producer(self._config)
            self._refused[:] = self._unconfirmed
        again, self._refused[:] = list(self._refused), []
        for number in again:
            if number in self._unconfirmed:
                self._send(number, self._unconfirmed[number])

    def _send(self, number: int, made: Made) -> None:
        while True:
            # The queue is full only while the broker is down, so the loop tries again.
            with contextlib.suppress(BufferError):
                self._producer.produce(
                    made.topic,
                    made.value,
                    made.key,
                    made.partition,
                    headers=list(made.headers),
                    timestamp=made.time_ms,
                    on_delivery=partial(self._note, self._producer, number),
                )
                return
            self._producer.poll(_TICK_S)
            if self._ended.is_set() or time.monotonic() - self._confirmed_s > _STANDS_STILL_S:
                return  # The record is unconfirmed, so a new producer sends it again.

    def _note(self, producer: Producer, number: int, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self._unconfirmed.pop(number, None)
            self._confirmed_s = time.monotonic()
        elif producer is self._producer:
            self._refused.append(number)


@dataclass(frozen=True, slots=True)
class Age:
    """A group of records that `write_past` wrote with the same event time."""

    until_ms: int
    """If retention keeps only records after this time, the broker deletes the records of this group."""
    ends: Mapping[str, Mapping[int, int]]
    """Maps each source topic and partition to the offset after the records of this age."""


def write_past(
    topology: Topology, settings: Settings, partitions: Mapping[str, int], *, run: str, seed: int, now_ms: int
) -> list[Age]:
    """Write records with several past event times to the source topics, so that retention can delete them during a run.

    Records with different event times are in different log segments. The event times are so far apart that deleting
    older records does not affect the verdicts on later records. Returns an `Age` for each event time, oldest first.
    Raises BrokerUnavailable if the records cannot be written.
    """
    window = topology.window
    step_ms = window.guard_ms + window.grace_ms + (window.extend_at_most_ms if window.extend else 0) + _DAY_MS
    alter(settings, list(partitions), {"segment.ms": str(_SEGMENT_MS)})
    ages = []
    for age in range(_AGES, 0, -1):
        made = MadeRecords(topology, partitions, run=f"{run}-past-{age}", seed=seed)
        time_ms = now_ms - age * step_ms
        # No ID is used twice, because once the log's beginning is deleted, the verifier cannot distinguish a copy from
        # the forwarded record.
        records = [made.new(time_ms) for _ in range(_RECORDS_PER_AGE * sum(partitions.values()))]
        # All records of one age are written before the records of the next age, because a batch with records of two
        # ages would be in one segment.
        with Sender(records, settings, per_s=_AT_ONCE) as sender:
            sender.finish()
        with KafkaReader(settings) as reader:
            bounds = {topic: reader.bounds(topic) for topic in partitions}
        ends = {topic: {partition: each.high for partition, each in own.items()} for topic, own in bounds.items()}
        ages.append(Age(time_ms + step_ms // 2, ends))
    return ages


def alter(settings: Settings, topics: list[str], configs: Mapping[str, str]) -> None:
    """Set the given ``configs`` on all ``topics``.

    Raises BrokerUnavailable if the broker is down or refuses the change.
    """
    entries = [ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in configs.items()]
    resources = [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries) for topic in topics]
    try:
        # The client is kept until all futures are done; otherwise, the futures would be canceled.
        admin = AdminClient(client_config(settings))
        for future in admin.incremental_alter_configs(resources).values():
            future.result(_ANSWER_WITHIN_S)
    except KafkaException as error:
        names = " and ".join(topics)
        raise BrokerUnavailable(f"the configs of {names} were not changed: {error}. Check the broker.") from error
