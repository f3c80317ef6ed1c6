"""Defines `IdempotentWriter`, which sends an application's records exactly once, across retries and restarts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Self

from dedup.connect.transactional_outbox import TOPIC_CONFIGS, TransactionalOutbox, provide, refuse_expiry, wanted_topic
from dedup.core.partitioner import partitions
from dedup.errors import InvariantBroken, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.record_batch import Header, Line
from dedup.kafka.topic_admin import Admin
from dedup.kafka.wire import TopicPartition
from dedup.settings import Settings
from dedup.worker.record_collector import ID

_CONTENT: Final = (bytes, bytearray, memoryview, type(None))


class Transaction:
    """Records and positions that are committed together at the end of ``async with writer.transaction()``."""

    def __init__(self, partition_counts: dict[str, int]) -> None:
        self.lines: Final[defaultdict[TopicPartition, list[Line]]] = defaultdict(list)
        self.positions: Final[dict[str, bytes]] = {}
        self._partition_counts: Final = partition_counts

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        tracking_id: str | None = None,
        headers: Iterable[Header] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        """Add a record to the transaction. The record's header `dedup-id` contains ``tracking_id``.

        Kafka's default partitioner chooses the partition by the key or, without a key, by the tracking ID. All
        records that have neither a key nor a tracking ID go to the same partition. Raises InvariantBroken if ``topic``
        was not passed to the writer, and TypeError if the record cannot be sent, for example because its value is a
        string.
        """
        if topic not in self._partition_counts:
            raise InvariantBroken(f"topic {topic!r} was not passed to the writer: add it to `topics`.")
        all_headers = [*headers]
        # The outcome of a failed commit is unknown, so refuse a record that would make the commit fail.
        wrong = _unfit(value, key, tracking_id, all_headers, timestamp_ms)
        if wrong is not None:
            raise TypeError(f"a record to topic {topic!r} was not added to the transaction: {wrong}")
        if tracking_id is not None:
            all_headers.append((ID, tracking_id.encode()))
        partition_key = key if key is not None else (tracking_id or "").encode()
        target = TopicPartition(topic, partitions([partition_key], self._partition_counts[topic])[0])
        now_ms = time.time_ns() // 1_000_000
        self.lines[target].append((-1, now_ms if timestamp_ms is None else timestamp_ms, key, value, all_headers))

    def keep(self, name: str, position: str) -> None:
        """Commit the application's input position with the transaction. `IdempotentWriter.kept` reads it."""
        self.positions[name] = position.encode()


def _unfit(
    value: object, key: object, tracking_id: object, headers: Iterable[object], timestamp_ms: object
) -> str | None:
    """Return a description of a wrong type in a record, or None."""
    if not isinstance(value, _CONTENT):
        return f"its value is {type(value).__name__}, not bytes or None; encode it"
    if not isinstance(key, _CONTENT):
        return f"its key is {type(key).__name__}, not bytes or None; encode it"
    if tracking_id is not None and not isinstance(tracking_id, str):
        return f"its tracking_id is {type(tracking_id).__name__}, not str"
    if timestamp_ms is not None and not isinstance(timestamp_ms, int | float):
        return f"its timestamp_ms is {type(timestamp_ms).__name__}, not a number of milliseconds"
    for each in headers:
        match each:
            case (str(), bytes() | None) if isinstance(each, tuple):
                pass
            case _:
                return f"its header {each!r} is not a pair of a str and bytes (or None)"
    return None


class IdempotentWriter:
    """A transactional producer that keeps its name when the application restarts. Use the writer with ``async with``.

    If another process opens a writer with the same name, this writer's next transaction raises TaskMigrated. If the
    response to a commit is lost, the writer finds out whether the transaction was committed, and repeats the
    transaction if necessary. If a commit is canceled or fails, the transaction takes effect completely or not at all;
    open a new writer to find out whether it was committed. A transaction that fails with RecordRefused was not
    committed, and the writer can still be used.
    """

    def __init__(self, name: str, *, topics: Sequence[str], settings: Settings) -> None:
        """Raise TypeError if ``topics`` is a string."""
        if isinstance(topics, str):
            raise TypeError(f"`topics` is the string {topics!r}, not a list of names; write topics=[{topics!r}]")
        self._name: Final = name
        self._topics: Final = tuple(topics)
        self._settings: Final = settings
        self._wire: Final = KafkaWire(Connection.of(settings, client_id=f"dedup-writer-{name}"))
        self._opened = AsyncExitStack()
        self._outbox: TransactionalOutbox | None = None

    async def __aenter__(self) -> Self:
        """Fence other processes that use the same writer name, and abort their open transactions.

        Raises StateIncompatible for a missing topic, and BrokerUnavailable if no broker responds in time.
        """
        offsets = f"{self._name}-source-offsets"
        async with AsyncExitStack() as stack:
            await self._wire.start()
            stack.push_async_callback(self._wire.stop)
            async with Admin(self._wire.connection) as admin:
                wanted = wanted_topic(self._settings, offsets, 1, TOPIC_CONFIGS)
                remedy = "Create it, or enable `topics.create`."
                found = await provide(admin, [wanted], create=self._settings.topics.create, remedy=remedy)
                refuse_expiry(found[offsets])
                have = await admin.topics(self._topics)
            missing = [topic for topic in self._topics if topic not in have]
            if missing:
                raise StateIncompatible(f"topic {missing[0]!r} does not exist; create it first.")
            outbox = TransactionalOutbox(self._wire, f"{self._name}.writer.0", offsets, self._settings, have | found)
            await outbox.open()
            stack.push_async_callback(outbox.close)
            self._outbox = outbox
            self._opened = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Commit the records of the ``with`` block exactly once at the block's end, or none if the block raises an
        exception.

        Raises TaskMigrated if another process has opened a writer with the same name, and StateIncompatible if one of
        the topics was deleted or created again. Raises RecordRefused if a broker refuses a record; nothing was then
        committed. Raises InvariantBroken if an earlier commit of this writer was canceled or failed with another error;
        in this case, open a new writer.
        """
        outbox = self._started()
        outbox.refuse_if_over()
        made = Transaction({topic: outbox.partitions[topic] for topic in self._topics})
        yield made
        if made.lines or made.positions:
            await outbox.commit(made.lines, made.positions)

    def kept(self, name: str) -> str | None:
        """Return the last committed position that `Transaction.keep` stored under ``name``, or None if none exists.

        If the last commit's outcome is unknown, raises the same TaskMigrated or InvariantBroken as `transaction`.
        """
        outbox = self._started()
        outbox.refuse_if_over()
        found = outbox.positions.get(name)
        return None if found is None else found.decode()

    def _started(self) -> TransactionalOutbox:
        if self._outbox is None:
            raise InvariantBroken("this writer was not started; use it in an `async with` statement")
        return self._outbox
