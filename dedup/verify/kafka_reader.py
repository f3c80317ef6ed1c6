"""Reads Kafka with librdkafka, which workers do not use, so no client bug affects both the workers and the verifier."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, islice
from operator import methodcaller
from typing import Any, Final, Self

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType  # type: ignore[attr-defined]  # exported, undeclared

from dedup.errors import BrokerUnavailable
from dedup.kafka.connection import Connection
from dedup.settings import Settings
from dedup.verify.compare import Headers

_TOKEN_FOR_S: Final = 3600.0
_ANSWER_WITHIN_S: Final = 30.0
_ALL_WITHIN_S: Final = 5.0
_NO_PROGRESS_S: Final = 60.0
"""A read without progress fails after this many seconds, which is twice the default of `transaction_timeout`."""
_BATCH: Final = 10_000
_POLL_S: Final = 0.1
_AGAIN: Final = frozenset(
    {
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError._TIMED_OUT,  # noqa: SLF001  # the client has no public name for this
        KafkaError._WAIT_COORD,  # noqa: SLF001
    }
)
_LEADER_MOVED: Final = frozenset({KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE})
"""The errors during a leader election, and before a new topic's leader has learned of its role."""
_NO_HEADERS: Final[Headers] = ()
_ask_error: Final = methodcaller("error")
_ask_offset: Final = methodcaller("offset")
_ask_key: Final = methodcaller("key")
_ask_value: Final = methodcaller("value")
_ask_headers: Final = methodcaller("headers")
_ask_timestamp: Final = methodcaller("timestamp")

_CREATE_TIME: Final = 1
_APPEND_TIME: Final = 2


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspend the garbage collector, which would repeatedly traverse millions of tuples without reference cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range [``low``, ``high``) of a partition's offsets."""

    low: int
    high: int
    """The high watermark, which includes open transactions."""
    start_deleted: bool
    """True if records before ``low`` were deleted, by retention or by hand."""
    before: int = 0
    """The number of offsets below ``low`` that still exist but are not checked, because they precede a reset."""


@dataclass(slots=True)
class RecordColumns:
    """Records of one partition in log order, stored as columns."""

    offsets: list[int] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)
    timestamps_ms: list[int] = field(default_factory=list)
    broker_time: bool = False
    """True if the broker has set a timestamp (LogAppendTime)."""
    created: int | None = None
    """Offset of the first record whose timestamp the producer wrote (CreateTime), or None without such a record."""
    odd_names: frozenset[int] = frozenset()
    """Offsets of records with a header name that is not UTF-8. The client returns no headers for these records."""
    extracted: list[bytes | None] | None = None
    """The content of the header `EXTRACTED` of each record of a repartition topic (None for an idle marker), or None if
    the topology's IDs are not passed on."""

    @classmethod
    def of(cls, messages: list[Message]) -> Self:
        """Convert messages to columns."""
        kinds, timestamps_ms = zip(*map(_ask_timestamp, messages), strict=True) if messages else ((), ())
        headers, odd_names = _headers(messages)
        created = next((at for at, kind in enumerate(kinds) if kind != _APPEND_TIME), None)
        return cls(
            list(map(_ask_offset, messages)),
            list(map(_ask_key, messages)),
            list(map(_ask_value, messages)),
            headers,
            list(timestamps_ms),
            broker_time=kinds.count(_CREATE_TIME) < len(kinds),
            created=None if created is None else messages[created].offset(),
            odd_names=odd_names,
        )

    def rows(self, wanted: list[int]) -> RecordColumns:
        """Return only the records at the indexes ``wanted``."""
        return RecordColumns(
            [self.offsets[row] for row in wanted],
            [self.keys[row] for row in wanted],
            [self.values[row] for row in wanted],
            [self.headers[row] for row in wanted],
            [self.timestamps_ms[row] for row in wanted],
            self.broker_time,
            self.created,
            self.odd_names,
            None if self.extracted is None else [self.extracted[row] for row in wanted],
        )


def _headers(messages: list[Message]) -> tuple[list[Headers], frozenset[int]]:
    """Return the headers of each message, and the offsets of messages with unreadable header names.

    For a name that is not UTF-8, the client (2.16.0) returns a list with null pointers *and* sets an error. On a second
    call, the client returns the list without an error. Therefore, this function calls `headers` only once per message,
    through `methodcaller`, which checks for the error. CPython's specialized call instructions (PEP 659) would skip
    this check.
    """
    found: list[Headers] = []
    odd: set[int] = set()
    while len(found) < len(messages):
        try:
            # If a message raises an error, the headers of the previous messages are already in `found`.
            found.extend(map(_ask_headers, islice(messages, len(found), None)))
        except (SystemError, UnicodeDecodeError) as error:
            if not isinstance(error.__cause__ or error, UnicodeDecodeError):
                raise
            odd.add(messages[len(found)].offset() or 0)
            found.append(_NO_HEADERS)
    return [headers or _NO_HEADERS for headers in found], frozenset(odd)


class OpenTransaction(Exception):  # This exception describes a partition, and is not an error.
    """Raised if an open transaction prevents a partition from being read to its end."""


class StartDeleted(BrokerUnavailable):
    """Raised if the next offset to read was deleted, by retention or by hand. ``low`` is the first remaining offset."""

    def __init__(self, topic: str, partition: int, low: int) -> None:
        super().__init__(
            f"{topic}/{partition}: the records below offset {low} were deleted before they were read. Try again, or "
            f"give the topic a longer retention."
        )
        self.topic: Final = topic
        self.partition: Final = partition
        self.low: Final = low


Read = Callable[[str, int, int, int], Iterable[RecordColumns]]
"""A function that yields the records of a topic's partition with offsets in [start, end), as `KafkaReader.read` does.
"""


def read_left(
    read: Read, deleted: Callable[[StartDeleted], object], topic: str, partition: int, start: int, end: int
) -> Iterator[RecordColumns]:
    """Do the same as ``read``, but skip records that are deleted during the read, and call ``deleted`` each time."""
    while True:
        try:
            yield from read(topic, partition, start, end)
        except StartDeleted as fact:
            deleted(fact)
            start = fact.low
        else:
            return


class KafkaReader:
    """Reads a Kafka cluster, and never writes to it.

    All methods block. Use one instance per thread, as a context manager. Every method raises BrokerUnavailable if no
    response arrives in time or if the broker refuses a request.
    """

    def __init__(self, settings: Settings) -> None:
        self._config: Final = client_config(settings)
        self._brokers: Final = ", ".join(settings.brokers)
        self._admin: Final = AdminClient(dict(self._config))
        self._askers: Final[dict[str, Consumer]] = {}
        """Maps each group to a consumer that reads the group's offsets but never joins it."""
        self._consumer: Final = Consumer(
            {
                **self._config,
                "group.id": "dedup-verify-reads-without-a-group",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                # The client pauses for this time when its local queue is full. The default, 1 s, halves throughput.
                "fetch.queue.backoff.ms": 5,
                "queued.max.messages.kbytes": 32_768,
                # An empty fetch takes this long to report the end of a partition.
                "fetch.wait.max.ms": 10,
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        for asker in self._askers.values():
            asker.close()

    def partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the partition count of each topic, or 0 for a topic that does not exist."""
        wanted = list(topics)
        try:
            # Unlike an admin client's request, this request gives the consumer the metadata for its later reads.
            known = dict(self._consumer.list_topics(timeout=_ANSWER_WITHIN_S).topics)
            for topic in (name for name in wanted if name not in known):
                # A list of all topics lacks the topics that the principal may not describe.
                found = self._consumer.list_topics(topic, timeout=_ANSWER_WITHIN_S).topics[topic]
                if found.error is not None and found.error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    raise KafkaException(found.error)
        except KafkaException as error:
            raise self._unavailable("listing the topics", error) from error
        return {topic: len(known[topic].partitions) if topic in known else 0 for topic in wanted}

    def bounds(
        self, topic: str, partitions: Iterable[int] | None = None, since: Mapping[int, int] | None = None
    ) -> dict[int, Bounds]:
        """Return the bounds of the given partitions (by default, all); ``since`` contains lower limits for ``low``."""
        wanted = list(range(self.partitions([topic])[topic]) if partitions is None else partitions)
        low = self._list_offsets(topic, wanted, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        high = self._list_offsets(topic, wanted, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        found: dict[int, Bounds] = {}
        for partition, start in low.items():
            begin = (since or {}).get(partition, 0)
            found[partition] = Bounds(max(start, begin), high[partition], start > begin, max(0, begin - start))
        return found

    def stable_ends(self, topic: str, partitions: Iterable[int] | None = None) -> dict[int, int]:
        """Map each of the given partitions (by default, all partitions) to its last stable offset."""
        wanted = range(self.partitions([topic])[topic]) if partitions is None else partitions
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        return self._list_offsets(topic, wanted, latest, IsolationLevel.READ_COMMITTED)

    def topic_id(self, topic: str) -> str:
        """Return the ID that Kafka has assigned to the topic (KIP-516)."""
        asked = self._admin.describe_topics(TopicCollection([topic]), request_timeout=_ANSWER_WITHIN_S)
        try:
            return str(asked[topic].result().topic_id)
        except KafkaException as error:
            raise self._unavailable(f"describing {topic}", error) from error

    def compacted(self, topics: Iterable[str]) -> frozenset[str]:
        """Return the names of the compacted topics. Their logs may lack records at any offset."""
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
        """Return the offset of the first record at or after ``time_ms``, or None if no such record exists."""
        found = self._list_offsets(topic, [partition], OffsetSpec.for_timestamp(time_ms))[partition]
        return found if found >= 0 else None

    def committed(self, group: str, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Map each partition to the group's committed offset. Partitions without a committed offset are absent.

        The offsets may be from different times. The client (2.16.0) answers a request only when no transaction is about
        to change one of the requested offsets. With many busy partitions, such a moment may never come. Therefore, if
        the offsets of all partitions are not known soon, each partition's offset is requested separately.
        """
        left = [TopicPartition(topic, partition) for partition in partitions]
        found: dict[int, int] = {}
        deadline = time.monotonic() + _NO_PROGRESS_S
        asked, within_s = left, _ALL_WITHIN_S
        while left:
            answers, errors = self._committed(group, asked, within_s)
            known = {place.partition: place.offset for place in answers if place.error is None}
            found |= known
            left = [place for place in left if place.partition not in known]
            refusal = next((each for each in errors if not (each.retriable() or each.code() in _AGAIN)), None)
            if known:
                deadline = time.monotonic() + _NO_PROGRESS_S
            elif refusal or time.monotonic() > deadline:
                doing = f"reading the offsets of group {group}"
                raise self._unavailable(doing, KafkaException(refusal or errors[0]))
            else:
                left.append(left.pop(0))  # Other partitions may have answers by now.
                time.sleep(_POLL_S)
            asked, within_s = left[:1], _ANSWER_WITHIN_S
        return {partition: offset for partition, offset in found.items() if offset >= 0}

    def _committed(
        self, group: str, places: list[TopicPartition], within_s: float
    ) -> tuple[list[TopicPartition], list[KafkaError]]:
        """Read the committed offsets with a consumer that never joins the group, and return the answers and all errors.

        The admin client crashes the process with SIGSEGV if the coordinator responds that it is loading or has moved
        (librdkafka issue 5040; seen with 2.16.0).
        """
        if group not in self._askers:
            # With read_committed, the broker returns no offset that an open transaction is about to change.
            options = {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_committed"}
            self._askers[group] = Consumer({**self._config, **options})
        try:
            found = self._askers[group].committed(places, within_s)
        except KafkaException as error:
            return [], [error.args[0]]
        return found, [place.error for place in found if place.error is not None]

    def holds_records(self, topic: str, partition: int, start: int, end: int) -> bool:
        """Return whether the offsets [start, end) contain a record, even if its transaction is still open."""
        stable = self.stable_ends(topic, [partition])[partition]
        return stable < end or next(self.read(topic, partition, start, end), None) is not None

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[RecordColumns]:
        """Yield the committed records with offsets in [start, end).

        Raises OpenTransaction if a transaction stays open for too long, so that ``end`` is not reached, and
        StartDeleted if the next record was deleted.
        """
        if start >= end:
            return
        self._consumer.assign([TopicPartition(topic, partition, start)])
        silent_since = time.monotonic()
        reached = start
        try:
            while reached < end:
                # Wait only for the first message, because a partition may end with markers instead of further records.
                messages = self._consumer.consume(1, _POLL_S)
                if messages and end - reached > 1:
                    messages += self._consumer.consume(min(_BATCH, end - reached) - 1, 0)
                kept, now_at = self._sorted_out(messages, reached, end)
                if now_at > reached:
                    reached, silent_since = now_at, time.monotonic()
                elif time.monotonic() - silent_since > _NO_PROGRESS_S:
                    stable = self.stable_ends(topic, [partition])[partition]
                    if stable > reached:  # No open transaction hides the missing records.
                        raise BrokerUnavailable(
                            f"{topic}/{partition} can be read only up to offset {reached}, though {self._brokers} has "
                            f"committed records up to {stable}: nothing arrived for {_NO_PROGRESS_S:.0f} s. Check its "
                            f"leader, then try again."
                        )
                    raise OpenTransaction(
                        f"{topic}/{partition} can be read only up to offset {reached} of {end}: a transaction there "
                        f"was open for {_NO_PROGRESS_S:.0f} s. Find it with kafka-transactions.sh, then verify again."
                    )
                if kept:
                    yield RecordColumns.of(kept)
        finally:
            self._consumer.unassign()

    def _sorted_out(self, messages: list[Message], begin: int, end: int) -> tuple[list[Message], int]:
        """Return the records below ``end``, and the next offset to read."""
        errors = list(map(_ask_error, messages))
        events = list(compress(messages, errors)) if any(errors) else []
        kept = (
            [message for message, error in zip(messages, errors, strict=True) if error is None] if events else messages
        )
        reached = (kept[-1].offset() or 0) + 1 if kept else -1
        for message in events:
            reached = max(reached, self._event(message, begin))
        while kept and (kept[-1].offset() or 0) >= end:
            kept.pop()
        return kept, reached

    def _event(self, message: Message, begin: int) -> int:
        """Return the next offset to read if the message reports the end of the partition, or -1 otherwise.

        Raises StartDeleted if the message reports that records at and after the offset ``begin`` were deleted.
        """
        error = message.error()
        if error is None or error.retriable() or error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            # librdkafka looks for a coordinator, even though these reads use no group.
            return -1
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  # the client has no public name for this
            # The offset of this event is the next offset, after any markers and aborted records at the end.
            return message.offset() or 0
        if error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001
            topic, partition = str(message.topic()), int(message.partition() or 0)
            low = self._list_offsets(topic, [partition], OffsetSpec.earliest())[partition]  # type: ignore[no-untyped-call]
            if low > begin:
                raise StartDeleted(topic, partition, low)
            raise BrokerUnavailable(
                f"{topic}/{partition} has lost offset {begin}, but begins at {low}: somebody deleted and recreated "
                f"it, or its new leader lacks records. Try again when the topic is whole."
            )
        raise self._unavailable(f"reading {message.topic()}/{message.partition()}", KafkaException(error))

    def _list_offsets(
        self,
        topic: str,
        partitions: Iterable[int],
        which: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[int, int]:
        wanted = {TopicPartition(topic, partition): which for partition in partitions}
        if not wanted:
            return {}
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        while True:
            asked = self._admin.list_offsets(wanted, isolation_level=isolation, request_timeout=_ANSWER_WITHIN_S)
            try:
                return {place.partition: answer.result().offset for place, answer in asked.items()}
            except KafkaException as error:
                if error.args[0].code() not in _LEADER_MOVED or time.monotonic() > deadline:
                    raise self._unavailable("asking for offsets", error) from error
                time.sleep(_POLL_S)

    def _unavailable(self, doing: str, error: KafkaException) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"{doing} at {self._brokers}: {error.args[0].str()}. Check `brokers` and `security`, and that the "
            f"principal may Describe and Read these topics and the group."
        )


def client_config(settings: Settings) -> dict[str, Any]:
    """Return the librdkafka configuration for these settings.

    Raises SettingsError if a file of certificates or keys cannot be used.
    """
    Connection.of(settings).security_options()  # librdkafka's error does not name the file
    security = settings.security
    by_token = security.mechanism == "OAUTHBEARER"
    wanted = {
        "bootstrap.servers": ",".join(settings.brokers),
        "security.protocol": security.protocol,
        "sasl.mechanism": security.mechanism,
        "sasl.username": None if by_token else security.username,
        "sasl.password": None if by_token or security.password is None else security.password.get_secret_value(),
        "ssl.ca.location": security.ca_file,
        "ssl.certificate.location": security.cert_file,
        "ssl.key.location": security.key_file,
        "ssl.key.password": security.key_password and security.key_password.get_secret_value(),
    }
    # Without `log_level`, librdkafka would log to stderr. The client also reports every important problem as an error.
    config: dict[str, Any] = {"log_level": 0, "client.id": "dedup-verify"}
    config.update({name: str(value) for name, value in wanted.items() if value is not None})
    if by_token and security.password is not None:
        token = security.password
        # The actual expiry time does not matter here, because the broker refuses an expired token.
        config["oauth_cb"] = lambda _: (token.get_secret_value(), time.time() + _TOKEN_FOR_S)
    return config
