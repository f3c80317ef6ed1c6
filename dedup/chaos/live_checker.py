"""Observes the progress of a consumer group and the records in the output topic while workers run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from dedup.errors import BrokerUnavailable
from dedup.kafka.topic_admin import group_members
from dedup.topology.model import extractor_of
from dedup.verify.evidence import VERDICT_HEADER, header
from dedup.verify.kafka_reader import RecordColumns, client_config

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

_ANSWER_WITHIN_S: Final = 10.0
_POLL_RECORDS: Final = 5_000
_POLL_S: Final = 0.2
_QUIET_S: Final = 5.0
"""After this time without a message, a new consumer replaces the old consumer. After several broker restarts,
librdkafka's consumer may stop permanently, even if its partitions are assigned again (confluentinc/librdkafka#5153;
seen with 2.16.1).
"""
_ENDS_WITHIN_S: Final = 60.0
_MOST_SAMPLES: Final = 20


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The progress of a consumer group on one topic at one moment."""

    in_topic: int
    judged: int
    """The number of records below the group's committed offsets."""


class Watch:
    """Observes a consumer group on a topic that begins at offset 0, without joining the group.

    `Watch` reads the group's offsets with a consumer, because librdkafka's admin client can end the process (see
    `group_members`). `Watch` does not use `KafkaReader`, because in one run a `KafkaReader` received no more responses
    after the broker restarted.
    """

    def __init__(self, settings: Settings, group: str, topic: str, partitions: int) -> None:
        how = client_config(settings)
        self.topic: Final = topic
        self._group: Final = group
        self._settings: Final = settings
        self._brokers: Final = ", ".join(settings.brokers)
        self._places: Final = [TopicPartition(topic, number) for number in range(partitions)]
        self._consumer: Final = Consumer(
            {
                **how,
                "group.id": group,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",  # This setting also hides the offsets in open transactions.
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(KafkaException):
            self._consumer.close()

    def look(self) -> GroupProgress:
        """Return the group's progress. Raises BrokerUnavailable if the broker does not respond; a retry may succeed."""
        # A negative offset means that nothing is committed yet. The ends are read last, so no committed offset exceeds
        # them.
        judged = sum(max(offset, 0) for offset in self._committed().values())
        with self._asking(f"where {self.topic} ends"):
            ends = [self._consumer.get_watermark_offsets(place, _ANSWER_WITHIN_S)[1] for place in self._places]
        return GroupProgress(sum(ends), judged)

    def beyond(self, offsets: Mapping[int, int]) -> bool:
        """Return whether the group's committed offsets have reached the given offsets.

        Raises BrokerUnavailable if the broker does not respond.
        """
        committed = self._committed()
        return all(committed.get(partition, -1) >= offset for partition, offset in offsets.items())

    def _committed(self) -> dict[int, int]:
        with self._asking(f"how far {self._group} is with {self.topic}"):
            known = self._consumer.committed(self._places, _ANSWER_WITHIN_S)
        return {place.partition: place.offset for place in known}

    def begins(self) -> dict[int, int]:
        """Return the first offset of each partition. Raises BrokerUnavailable if the broker does not respond."""
        with self._asking(f"where {self.topic} begins"):
            return {
                place.partition: self._consumer.get_watermark_offsets(place, _ANSWER_WITHIN_S)[0]
                for place in self._places
            }

    def members(self) -> frozenset[str]:
        """Return the IDs of the group's members. A restarted process gets a new member ID.

        Raises BrokerUnavailable if the broker does not respond.
        """
        return frozenset(each.member_id for each in group_members(self._settings, "dedup-watch", self._group))

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise BrokerUnavailable(f"The broker at {self._brokers} did not say {what}: {error}. Try again.") from error


@dataclass(frozen=True, slots=True)
class Sightings:
    """The numbers of records and duplicates that the live checker has seen so far."""

    records: int
    duplicated: int
    """The number of records whose ID had already been seen within the guard period, except records with the header
    `dedup-verdict`.
    """
    samples: tuple[str, ...]


class LiveChecker:
    """Reads the output topic's committed records in a thread, and counts IDs that recur within a guard period.

    Use the live checker as a context manager, and call `finish` inside the ``with`` block.
    """

    def __init__(self, topology: Topology, settings: Settings, ends: dict[int, int]) -> None:
        """``ends`` maps each partition to the offset where the live checker begins to read."""
        if topology.output is None:
            raise ValueError(f"{topology.name} forwards nothing: it has no output topic")
        self._topic: Final = topology.output.topic
        self._guard_ms: Final = topology.window.guard_ms
        self._extract: Final = extractor_of(topology, fingerprint=False)
        # If conflicts are forwarded, an ID may be in the output a second time, with another payload.
        self._by_payload: Final = topology.fingerprints_wanted
        self._next: Final = dict(ends)
        self._seen: Final[dict[bytes, int]] = {}
        self._records = self._duplicated = 0
        self._samples: Final[list[str]] = []
        self._targets: dict[int, int] | None = None
        self._ended: Final = threading.Event()
        self._failure: BaseException | None = None
        self._config: Final = {
            **client_config(settings),
            "group.id": f"{topology.name}-witness",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 100,
        }
        self._thread: Final = threading.Thread(target=self._read, name="live-checker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_ENDS_WITHIN_S)

    @property
    def position(self) -> dict[int, int]:
        """Return the next offset to read in each partition."""
        return dict(self._next)

    @property
    def sightings(self) -> Sightings:
        """Return the numbers of records and duplicates that the thread has read so far.

        Raises the reader thread's error if the thread failed.
        """
        if self._failure is not None:
            raise self._failure
        return Sightings(self._records, self._duplicated, tuple(self._samples))

    def finish(self, ends: dict[int, int]) -> bool:
        """Read up to the offsets in ``ends``, and return whether the live checker reached them within a minute."""
        self._targets = ends
        self._thread.join(_ENDS_WITHIN_S)
        return not self._thread.is_alive()

    def _read(self) -> None:
        try:
            while not self._over():
                consumer = Consumer(self._config)
                try:
                    consumer.assign([TopicPartition(self._topic, *each) for each in self.position.items()])
                    self._read_until_quiet(consumer)
                finally:
                    consumer.close()
        except BaseException as failure:  # noqa: BLE001  # raised by `sightings`
            self._failure = failure

    def _read_until_quiet(self, consumer: Consumer) -> None:
        heard_s = time.monotonic()
        while not self._over() and time.monotonic() - heard_s < _QUIET_S:
            messages = consumer.consume(_POLL_RECORDS, _POLL_S)
            if messages:
                heard_s = time.monotonic()
            self.take(messages)

    def take(self, messages: list[Message]) -> None:
        """Process the messages of one poll: records and end-of-partition events."""
        self._note([message for message in messages if message.error() is None])
        for message in messages:
            error, partition, offset = message.error(), message.partition(), message.offset()
            ends = error is not None and error.code() == KafkaError._PARTITION_EOF  # noqa: SLF001  # the client's name
            if ends and partition is not None and offset is not None:
                # The poll may also contain records that arrived after this event, so the offset must not decrease.
                self._next[partition] = max(self._next.get(partition, 0), offset)

    def _over(self) -> bool:
        targets = self._targets
        reached = targets is not None and all(self._next.get(at, 0) >= end for at, end in targets.items())
        return self._ended.is_set() or reached

    def _note(self, messages: list[Message]) -> None:
        columns = RecordColumns.of(messages)
        extracted = self._extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
        for row, (own, time_ms) in enumerate(zip(extracted.ids, extracted.times_ms, strict=True)):
            partition = messages[row].partition() or 0
            self._next[partition] = columns.offsets[row] + 1
            if own is None or header(columns.headers[row], VERDICT_HEADER) is not None:
                continue
            name = own + (columns.values[row] or b"") if self._by_payload else own
            before_ms = self._seen.get(name)
            if before_ms is not None and abs(time_ms - before_ms) < self._guard_ms:
                self._duplicated += 1
                if len(self._samples) < _MOST_SAMPLES:
                    self._samples.append(f"{self._topic}/{partition} offset {columns.offsets[row]}")
            self._seen[name] = time_ms
        self._records += len(messages)
