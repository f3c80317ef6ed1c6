"""Reading Kafka with librdkafka: another client than the worker's, so that one can not hide a defect of the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # exported, undeclared
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from dedup.errors import BrokerUnavailable
from dedup.proof.compare import Headers
from dedup.settings import Settings

_TOKEN_FOR_S: Final = 3600.0
_ANSWER_WITHIN_S: Final = 30.0
_NO_PROGRESS_S: Final = 60.0
"""Longer than any transaction may stay open by our own settings."""
_BATCH: Final = 10_000
_POLL_S: Final = 0.1
_AGAIN: Final = frozenset(
    {
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError._TIMED_OUT,  # noqa: SLF001  # the client's name for it
        KafkaError._WAIT_COORD,  # noqa: SLF001
    }
)
_NO_HEADERS: Final[Headers] = ()
_ask_headers: Final = methodcaller("headers")

CREATE_TIME: Final = 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of a partition to look at: from ``low`` up to, not including, ``high``."""

    low: int
    high: int
    """The high watermark: open transactions included."""
    beheaded: bool
    """Retention, or somebody, has deleted the beginning."""
    before: int = 0
    """Offsets that are there below ``low``: written before a reset."""


@dataclass(slots=True)
class Columns:
    """Records of one partition in the log's order, column by column."""

    offsets: list[int] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)
    timestamps_ms: list[int] = field(default_factory=list)
    broker_time: bool = False
    """The topic replaces timestamps by its own clock (LogAppendTime)."""
    odd_names: frozenset[int] = frozenset()
    """Offsets of records with a header name that is not UTF-8; the client gives none of their headers."""

    @classmethod
    def of(cls, messages: list[Message]) -> Self:
        """Return the columns of some messages."""
        stamps = [message.timestamp() for message in messages]
        headers, odd_names = _headers(messages)
        return cls(
            [message.offset() or 0 for message in messages],
            [message.key() for message in messages],
            [message.value() for message in messages],
            headers,
            [stamp for _, stamp in stamps],
            broker_time=bool(stamps) and stamps[0][0] != CREATE_TIME,
            odd_names=odd_names,
        )

    def rows(self, wanted: list[int]) -> Columns:
        """Return some of the records."""
        return Columns(
            [self.offsets[row] for row in wanted],
            [self.keys[row] for row in wanted],
            [self.values[row] for row in wanted],
            [self.headers[row] for row in wanted],
            [self.timestamps_ms[row] for row in wanted],
            self.broker_time,
            self.odd_names,
        )


def _headers(messages: list[Message]) -> tuple[list[Headers], frozenset[int]]:
    """Return headers by row, and the offsets of the records whose header names can not be read."""
    found: list[Headers] = []
    odd: set[int] = set()
    for message in messages:
        # For a name that is not UTF-8 the client (2.16.0) returns a list with null pointers *and* sets an error, and at
        # a second question the list alone. So: asked once, and by a call that looks for the error, as one that the
        # interpreter has specialised does not.
        try:
            found.append(_ask_headers(message) or _NO_HEADERS)
        except (SystemError, UnicodeDecodeError) as error:
            if not isinstance(error.__cause__ or error, UnicodeDecodeError):
                raise
            found.append(_NO_HEADERS)
            odd.add(message.offset() or 0)
    return found, frozenset(odd)


class OpenTransaction(Exception):  # a fact about a partition, reported, not an error of ours
    """A partition could not be read to its end: a transaction there stays open."""


class KafkaReader:
    """A read-only view of a cluster. Blocking; one thread; use as a context manager.

    Every method raises BrokerUnavailable if no answer comes in time or the broker refuses.
    """

    def __init__(self, settings: Settings) -> None:
        self._config: Final = client_config(settings)
        self._brokers: Final = ", ".join(settings.brokers)
        self._admin: Final = AdminClient(dict(self._config))
        self._askers: Final[dict[str, Consumer]] = {}
        """Group -> a consumer that asks for its offsets, and never joins."""
        self._consumer: Final = Consumer(
            {
                **self._config,
                "group.id": "dedup-verify-reads-without-a-group",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                # The default of 1 s halves the throughput: it is the pause after the local queue was full once.
                "fetch.queue.backoff.ms": 5,
                "queued.max.messages.kbytes": 32_768,
                # The end of a partition is told by a fetch that has waited so long in vain; the next waits for it.
                "fetch.wait.max.ms": 10,
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._consumer.close()
        for asker in self._askers.values():
            asker.close()

    def partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the partition count of each topic; 0 for one that does not exist."""
        try:
            # Of the consumer, not the admin client: it then need not ask for each topic when that is read.
            known = self._consumer.list_topics(timeout=_ANSWER_WITHIN_S).topics
        except KafkaException as error:
            raise self._unavailable("listing the topics", error) from error
        return {topic: len(known[topic].partitions) if topic in known else 0 for topic in topics}

    def bounds(
        self, topic: str, partitions: Iterable[int], since: Mapping[int, int] | None = None
    ) -> dict[int, Bounds]:
        """Return what each partition holds at this moment; of some only from ``since`` on."""
        places = [TopicPartition(topic, partition) for partition in partitions]
        if not places:
            return {}
        low = self._list_offsets(dict.fromkeys(places, OffsetSpec.earliest()))  # type: ignore[no-untyped-call, arg-type]
        high = self._list_offsets(dict.fromkeys(places, OffsetSpec.latest()))  # type: ignore[no-untyped-call, arg-type]
        found: dict[int, Bounds] = {}
        for partition, start in low.items():
            begin = (since or {}).get(partition, 0)
            found[partition] = Bounds(max(start, begin), high[partition], start > begin, max(0, begin - start))
        return found

    def compacted(self, topics: Iterable[str]) -> frozenset[str]:
        """Return those topics of which records may be missing between others: compaction took them."""
        asked = self._admin.describe_configs(
            [ConfigResource(ResourceType.TOPIC, topic) for topic in topics], request_timeout=_ANSWER_WITHIN_S
        )
        found: set[str] = set()
        for resource, answer in asked.items():
            try:
                policy = answer.result()["cleanup.policy"].value
            except KafkaException as error:
                raise self._unavailable(f"reading the configuration of {resource.name}", error) from error
            if "compact" in policy.split(","):
                found.add(resource.name)
        return frozenset(found)

    def offset_for_time(self, topic: str, partition: int, time_ms: int) -> int | None:
        """Return the offset of the first record at or after a time; None if there is none."""
        place = TopicPartition(topic, partition)
        found = self._list_offsets({place: OffsetSpec.for_timestamp(time_ms)})[partition]
        return found if found >= 0 else None

    def committed(self, group: str, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the group's committed offsets; partitions without one are absent."""
        places = [TopicPartition(topic, partition) for partition in partitions]
        if not places:
            return {}
        found = self._patiently(f"reading the offsets of group {group}", partial(self._committed, group, places))
        return {place.partition: place.offset for place in found if place.offset >= 0}

    def _committed(self, group: str, places: list[TopicPartition]) -> list[TopicPartition]:
        """Ask by a consumer that never joins; raises KafkaException.

        Not by the admin client: that one ends the process with SIGSEGV when the coordinator answers that it is loading
        or has moved (librdkafka issue 5040; seen with 2.16.0).
        """
        if group not in self._askers:
            # Committed: no offset while a transaction that changes it is open.
            options = {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_committed"}
            self._askers[group] = Consumer({**self._config, **options})
        found = self._askers[group].committed(places, _ANSWER_WITHIN_S)
        for place in found:
            if place.error is not None:
                raise KafkaException(place.error)
        return found

    def _patiently(self, doing: str, ask: Callable[[], T]) -> T:
        """Return the answer, asking again while it is that another one may come."""
        deadline = time.monotonic() + _NO_PROGRESS_S
        while True:
            try:
                return ask()
            except KafkaException as error:
                kafka_error = error.args[0]
                again = kafka_error.retriable() or kafka_error.code() in _AGAIN
                if not again or time.monotonic() > deadline:
                    raise self._unavailable(doing, error) from error
                time.sleep(_POLL_S)

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Columns]:
        """Yield the committed records with offsets in [start, end).

        Raises OpenTransaction where the end is not reached because a transaction is open for longer than any may be.
        """
        if start >= end:
            return
        self._consumer.assign([TopicPartition(topic, partition, start)])
        silent_since = time.monotonic()
        reached = start
        try:
            while reached < end:
                messages = self._fetched(min(_BATCH, end - reached))
                kept, now_at = self._sorted_out(messages, end)
                if now_at > reached:
                    reached, silent_since = now_at, time.monotonic()
                elif time.monotonic() - silent_since > _NO_PROGRESS_S:
                    self._refuse_silence(topic, partition, reached)
                    raise OpenTransaction(
                        f"{topic}/{partition} can be read only up to offset {reached} of {end}: a transaction there "
                        f"is open for {_NO_PROGRESS_S:.0f} s. Find it with kafka-transactions.sh, then verify again."
                    )
                if kept:
                    yield Columns.of(kept)
        finally:
            self._consumer.unassign()

    def _refuse_silence(self, topic: str, partition: int, reached: int) -> None:
        """Raise BrokerUnavailable where no open transaction keeps the records back: then they are just not given."""
        place = TopicPartition(topic, partition)
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        stable = self._list_offsets({place: latest}, IsolationLevel.READ_COMMITTED)[partition]
        if stable > reached:
            raise BrokerUnavailable(
                f"{topic}/{partition} can be read only up to offset {reached}, though {self._brokers} has committed "
                f"records up to {stable}: nothing came for {_NO_PROGRESS_S:.0f} s. Look at its leader, then try again."
            )

    def _fetched(self, most: int) -> list[Message]:
        """Return what has come, and wait only where that is nothing.

        To wait for a whole batch is to wait in vain where markers stand at the end instead of records.
        """
        first = self._consumer.consume(1, _POLL_S)
        return [*first, *self._consumer.consume(most - 1, 0)] if first and most > 1 else first

    def _sorted_out(self, messages: list[Message], end: int) -> tuple[list[Message], int]:
        """Return the records below ``end``, and the offset up to which the partition was read."""
        kept = []
        reached = -1
        for message in messages:
            error = message.error()
            offset = message.offset() or 0
            if error is None:
                if offset < end:
                    kept.append(message)
                reached = max(reached, offset + 1)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # the client's name for it
                # Its offset is the next one: markers and aborted records at the end are behind it.
                reached = max(reached, offset)
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
                raise BrokerUnavailable(
                    f"{message.topic()}/{message.partition()}: retention deleted records while they were verified. "
                    f"Verify again, or give the topic a longer retention."
                )
            elif error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                # librdkafka looks for a coordinator all the same; what is read here is read without a group.
                continue
            elif not error.retriable():
                raise self._unavailable(f"reading {message.topic()}/{message.partition()}", KafkaException(error))
        return kept, reached

    def _list_offsets(
        self,
        wanted: dict[TopicPartition, OffsetSpec],
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[int, int]:
        asked = self._admin.list_offsets(
            wanted,
            isolation_level=isolation,
            request_timeout=_ANSWER_WITHIN_S,
        )
        try:
            return {place.partition: answer.result().offset for place, answer in asked.items()}
        except KafkaException as error:
            raise self._unavailable("asking for offsets", error) from error

    def _unavailable(self, doing: str, error: KafkaException) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"{doing} at {self._brokers}: {error.args[0].str()}. Check `brokers` and `security`, and that the "
            f"principal may Describe and Read these topics and the group."
        )


def client_config(settings: Settings) -> dict[str, Any]:
    """Return librdkafka's configuration for the cluster of the settings."""
    security = settings.security
    by_token = security.mechanism == "OAUTHBEARER"
    wanted = {
        "bootstrap.servers": ",".join(settings.brokers),
        "security.protocol": security.protocol,
        "sasl.mechanism": security.mechanism,
        "sasl.username": None if by_token else security.username,
        "sasl.password": None if by_token or security.password is None else security.password.reveal(),
        "ssl.ca.location": security.ca_file,
        "ssl.certificate.location": security.cert_file,
        "ssl.key.location": security.key_file,
        "ssl.key.password": security.key_password and security.key_password.reveal(),
    }
    # librdkafka logs to stderr by itself; what matters reaches us as errors.
    config: dict[str, Any] = {"log_level": 0, "client.id": "dedup-verify"}
    config.update({name: str(value) for name, value in wanted.items() if value is not None})
    if by_token and security.password is not None:
        token = security.password
        # How long it is good for is the broker's to say: it refuses what has expired.
        config["oauth_cb"] = lambda _: (token.reveal(), time.time() + _TOKEN_FOR_S)
    return config
