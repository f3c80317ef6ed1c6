"""Defines `IdempotentReader`, which passes each event of a topic to an application once, in a database transaction."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, cast

from dedup.connect.database import OFFSETS, STAGED, DatabaseConnection, FencedOffsets, Row, Table, make, make_staging
from dedup.connect.fenced_consumer import FencedConsumer
from dedup.errors import InvariantBroken, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection as Cluster
from dedup.kafka.record_batch import Columns, Header
from dedup.kafka.schema_registry import TASK_PATIENCE_S, asking
from dedup.kafka.topic_admin import Admin
from dedup.kafka.wire import TopicPartition
from dedup.settings import Settings
from dedup.topology.model import Topology, extractor_of

SEEN: Final = "dedup_seen"
GATHER_MS: Final = 20


@dataclass(frozen=True, slots=True)
class Event:
    """A record whose tracking ID the reader has not seen before."""

    tracking_id: bytes
    event_time_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]
    topic: str
    partition: int
    offset: int


class Work:
    """The database transaction that stores the application's results with the IDs and offsets of the events."""

    def __init__(self, connection: DatabaseConnection) -> None:
        self._connection: Final = connection

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement, and return the number of affected rows.

        The placeholder for a parameter is ``?`` for SQLite and ``%s`` for PostgreSQL.
        """
        return self._connection.execute(sql, parameters)

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a query, and return its rows."""
        return self._connection.query(sql, parameters)


Handle = Callable[[Work, list[Event]], None]
_NOT_RUN: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
"""Tests for functions whose body does not run when the function is called."""


class IdempotentReader:
    """A consumer that uses the application's database to store its offsets and the tracking IDs that it has seen.

    Each topic needs its own reader name, because readers of one name share the seen tracking IDs.
    Use the reader with ``async with``. ``topology`` only defines the tracking ID; no worker needs to run. The reader
    never skips a record silently: it raises StateIncompatible for a record without a usable tracking ID.
    """

    def __init__(self, name: str, *, topic: str, topology: Topology, url: str, settings: Settings) -> None:
        self._name: Final = name
        self._topic: Final = topic
        self._url: Final = url
        self._extract: Final = extractor_of(asking(topology, settings, patience_s=TASK_PATIENCE_S, keeps_unknown=False))
        self._wire: Final = KafkaWire(Cluster.of(settings, client_id=f"dedup-reader-{name}"))
        self._opened = AsyncExitStack()
        self._consumer: FencedConsumer | None = None
        self._interrupted = False

    async def __aenter__(self) -> Self:
        """Connect, and fence other processes with the same reader name, whose next transactions raise TaskMigrated.

        Raises StateIncompatible if the topic does not exist or was recreated, or if a reader of this name has read
        another topic, and DatabaseUnavailable or BrokerUnavailable if the database or the brokers do not respond in
        time.
        """
        async with AsyncExitStack() as stack:
            await self._wire.start()
            stack.push_async_callback(self._wire.stop)
            async with Admin(self._wire.connection) as admin:
                found = (await admin.topics([self._topic])).get(self._topic)
            if found is None:
                raise StateIncompatible(f"topic {self._topic!r} does not exist; create it first.")
            offsets = FencedOffsets(self._name, found.name, found.topic_id)
            consumer = FencedConsumer(self._wire, offsets, found, self._url, _prepare, gather_ms=GATHER_MS)
            stack.push_async_callback(consumer.close)
            await consumer.open(range(found.partitions))
            self._consumer = consumer
            self._opened = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def run(self, handle: Handle, *, until_end: bool = False) -> int:
        """Pass every event to ``handle`` once, and return the number of events.

        With ``until_end``, the method returns once it has reached the end offsets that the topic had when the reader
        was opened. ``handle`` runs in a thread, inside the transaction that marks the events as seen. If ``handle``
        raises an exception, the transaction is rolled back, and `run` raises the exception. If a transaction is not
        committed, the reader passes its events to ``handle`` again, so ``handle`` must have no side effects outside the
        database.

        Raises TypeError if ``handle`` is an async function or a generator, because its body would not run; the events
        then stay unseen. Raises InvariantBroken if an exception or a cancellation interrupted an earlier call. In this
        case, open a new reader. Raises StateIncompatible if the topic was deleted or recreated, or has new partitions
        that the reader does not read. Raises TaskMigrated if another process has opened a reader with the same name,
        and DatabaseUnavailable if the database has lost commits of this reader.
        """
        consumer = self._consumer
        if consumer is None:
            raise InvariantBroken("this reader was not started; use it in an `async with` statement")
        if any(refuses(handle) for refuses in _NOT_RUN):
            raise self._not_run()
        if self._interrupted:
            raise InvariantBroken(
                f"{self._name}: this reader was interrupted in the middle of a batch, and would skip records that were "
                f"never handed over. Leave its `async with` block and open a new one: it begins at the stored offsets."
            )
        self._interrupted = True
        handled = 0
        while not (until_end and consumer.records.at_end):
            for answer in await consumer.poll():
                events = await consumer.in_thread(partial(self._events, answer.source, answer.columns))
                work = partial(self._handled, events, handle)
                fresh = await consumer.once(work, {answer.source.partition: answer.next_offset})
                if fresh is None:  # The consumer was closed.
                    return handled
                handled += fresh
        self._interrupted = False
        return handled

    def _handled(self, events: Sequence[Event], handle: Handle, connection: DatabaseConnection) -> int:
        first: dict[bytes, Event] = {}
        for event in events:
            first.setdefault(event.tracking_id, event)
        connection.stage(_seen(connection), [(tracking_id,) for tracking_id in first])
        rows = connection.query(
            f"INSERT INTO {SEEN} (reader, tracking_id) SELECT {connection.mark}, tracking_id FROM {STAGED} "  # noqa: S608
            f"WHERE true ON CONFLICT (reader, tracking_id) DO NOTHING RETURNING tracking_id",
            (self._name,),
        )
        stored = {bytes(tracking_id) for (tracking_id,) in rows}
        fresh = [event for tracking_id, event in first.items() if tracking_id in stored]
        if fresh:
            result = cast("Callable[[Work, list[Event]], object]", handle)(Work(connection), fresh)
            if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
                if inspect.iscoroutine(result):
                    result.close()  # or else Python warns that it was never awaited
                raise self._not_run()
        return len(fresh)

    def _not_run(self) -> TypeError:
        return TypeError(
            f"{self._name}: `handle` is an async function or a generator, so calling it does not run its body. No "
            f"event was marked as seen. Make it an ordinary function: `run` calls it in a thread, where it may block."
        )

    def _events(self, source: TopicPartition, columns: Columns) -> list[Event]:
        found = self._extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
        if found.faults:
            row, fault = min(found.faults.items())
            raise StateIncompatible(
                f"{self._name}: {source.topic}/{source.partition} offset {columns.offsets[row]} has no usable tracking "
                f"ID: {fault.detail} ({fault.code}). No record of its batch was handed over. Read a deduplicated "
                f"topic, which contains no dead letters, or correct `tracking_id`."
            )
        rows = zip(
            found.ids, found.times_ms, columns.keys, columns.values, columns.headers, columns.offsets, strict=True
        )
        return [
            Event(tracking_id or b"", time_ms, key, value, headers, source.topic, source.partition, offset)
            for tracking_id, time_ms, key, value, headers, offset in rows
        ]


def _seen(connection: DatabaseConnection) -> Table:
    return Table(SEEN, (("tracking_id", connection.types["bytes"]),), ("tracking_id",), append=False)


def _prepare(connection: DatabaseConnection, offsets: FencedOffsets) -> None:
    _refuse_second_topic(connection, offsets)
    columns = f"reader VARCHAR(250) NOT NULL, tracking_id {connection.types['bytes']} NOT NULL"
    make(connection, SEEN, f"CREATE TABLE IF NOT EXISTS {SEEN} ({columns}, PRIMARY KEY (reader, tracking_id))")
    make_staging(connection, _seen(connection))


def _refuse_second_topic(connection: DatabaseConnection, offsets: FencedOffsets) -> None:
    """Raise StateIncompatible if a reader of this name reads another topic, because both would share the seen IDs."""
    mark, topic = connection.mark, offsets.topic
    read = connection.query(
        f"SELECT topic FROM {OFFSETS} WHERE reader = {mark} AND topic <> {mark} ORDER BY topic",  # noqa: S608  # our own
        (offsets.reader, topic),
    )
    if read:
        other = read[0][0]
        raise StateIncompatible(
            f"a reader named {offsets.reader!r} reads topic {other!r}. Readers of one name share the tracking IDs in "
            f"{SEEN}, so an event of {topic!r} would be skipped if {other!r} had an event with the same ID. Nothing "
            f"was changed. Give each topic its own reader name. If {topic!r} replaces {other!r} and such events must "
            f"be skipped, delete the rows of reader {offsets.reader!r} and topic {other!r} from {OFFSETS}."
        )
