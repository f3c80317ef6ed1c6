"""`IdempotentReader`: an application's business logic, which counts each event once in its own database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from dedup.edges.database import (
    STAGED,
    Connection,
    Owned,
    Row,
    Table,
    Taken,
    advance,
    make_offsets,
    make_staging,
    take,
    transaction,
)
from dedup.edges.opening import connect
from dedup.edges.patience import Patient
from dedup.errors import InvariantBroken, StateIncompatible
from dedup.session.admin import Admin
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection as Cluster
from dedup.session.fetch import Columns, FeedFetcher
from dedup.session.record_batch import Header
from dedup.session.wire import TopicPartition
from dedup.settings import Settings
from dedup.topology.extractor import extractor_of
from dedup.topology.model import Topology
from dedup.worker.starting import bounds_of

SEEN: Final = "dedup_seen"
WAIT_MS: Final = 200
GATHER_MS: Final = 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """A record whose tracking ID this reader has not seen before."""

    tracking_id: bytes
    event_time_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]
    topic: str
    partition: int
    offset: int


class Work:
    """The open transaction, for statements of the application: they count once, with the events."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Final = connection

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; return how many rows it touched. Parameters are ``?`` in SQLite, ``%s`` in PostgreSQL."""
        return self._connection.execute(sql, parameters)

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Return the rows of a query."""
        return self._connection.query(sql, parameters)


Handle = Callable[[Work, list[Event]], None]


class IdempotentReader:
    """A consumer that keeps its offsets, and the IDs it has seen, in the application's database.

    Use it with ``async with``. ``topology`` says what a tracking ID is; no worker need run. A record that has none, or
    that can not be read, stops the reader: nothing is left out in silence.
    """

    def __init__(self, name: str, *, topic: str, topology: Topology, url: str, settings: Settings) -> None:
        self._name: Final = name
        self._topic: Final = topic
        self._settings: Final = settings
        self._extract: Final = extractor_of(topology)
        self._wire: Final = KafkaWire(Cluster.of(settings, client_id=f"dedup-reader-{name}"))
        self._stopping = False
        self._database: Final = Patient(lambda: connect(url), lambda: self._stopping)
        self._thread: Final = ThreadPoolExecutor(1, "database")
        self._fetcher: Final = FeedFetcher(self._wire, wait_ms=WAIT_MS, gather_ms=GATHER_MS)
        self._owned = Owned(name, topic, "")
        self._taken: dict[int, Taken] = {}
        self._sources: list[TopicPartition] = []
        self._ends: dict[TopicPartition, int] = {}
        self._broken_off = False

    async def __aenter__(self) -> Self:
        """Older processes of this name are fenced; their next transaction raises TaskMigrated."""
        await self._wire.start()
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def _open(self) -> None:
        async with Admin(self._wire.connection) as admin:
            found = (await admin.topics([self._topic])).get(self._topic)
        if found is None:
            raise StateIncompatible(f"topic {self._topic!r} does not exist; make it first.")
        self._owned = Owned(self._name, self._topic, found.topic_id)
        self._sources = [TopicPartition(self._topic, number) for number in range(found.partitions)]
        self._taken = await self._in_thread(partial(self._database.first, self._begin))
        for source in self._sources:
            bounds = await bounds_of(self._wire, source)
            position = self._taken[source.partition].position
            self._fetcher.begin(source, bounds.start if position < 0 else position)
            self._ends[source] = bounds.end

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """What was not committed is rolled back."""
        await self._close()

    async def _close(self) -> None:
        self._stopping = True
        self._fetcher.forget()
        await self._in_thread(self._database.close)
        self._thread.shutdown()
        await self._wire.stop()

    async def run(self, handle: Handle, *, until_end: bool = False) -> int:
        """Hand every event over once; return how many, with ``until_end`` once all that was there at the start is done.

        ``handle`` runs in a thread, inside the transaction in which the events count as seen; if it raises, nothing of
        the batch counts, and the exception is passed on. It may be called again for a batch whose transaction did not
        happen, so it must have no effect outside the database. Raises InvariantBroken after a run that was broken off,
        by an exception or from outside: what it had read is in no later answer. Open a new reader then.
        """
        if self._broken_off:
            raise InvariantBroken(
                f"{self._name}: this reader was broken off amid a batch, and would go on after records that were never "
                f"handed over. Leave its `async with` block and open a new one: it begins where the database is."
            )
        self._broken_off = True
        handled = 0
        while not (until_end and self._at_end()):
            for answer in await self._fetcher.poll(self._sources):
                if answer.columns.offsets:
                    work = partial(self._batch, answer.source, answer.columns, answer.next_offset, handle)
                    handled += await self._in_thread(work)
        self._broken_off = False
        return handled

    def _at_end(self) -> bool:
        return all((self._fetcher.position(source) or 0) >= end for source, end in self._ends.items())

    def _begin(self, connection: Connection) -> dict[int, Taken]:
        make_offsets(connection)
        kind = connection.types["bytes"]
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {SEEN} "
            f"(reader VARCHAR(250) NOT NULL, tracking_id {kind} NOT NULL, PRIMARY KEY (reader, tracking_id))"
        )
        make_staging(connection, self._seen(connection))
        return take(connection, self._owned, [source.partition for source in self._sources])

    @staticmethod
    def _seen(connection: Connection) -> Table:
        return Table(SEEN, (("tracking_id", connection.types["bytes"]),), ("tracking_id",), append=False)

    def _batch(self, source: TopicPartition, columns: Columns, end: int, handle: Handle) -> int:
        events = self._events(source, columns)
        ends = {source.partition: end}
        handled = 0

        def work(connection: Connection) -> int:
            with transaction(connection):
                advance(connection, self._owned, self._taken, ends)
                fresh = self._first_seen(connection, events)
                if fresh:
                    handle(Work(connection), fresh)
            return len(fresh)

        def counted(connection: Connection) -> int:
            nonlocal handled
            handled = 0
            handled = work(connection)
            return handled

        self._database.once(
            counted, lambda again: make_staging(again, self._seen(again)), self._owned, self._taken, ends
        )
        self._taken[source.partition].position = end
        return handled

    def _first_seen(self, connection: Connection, events: Sequence[Event]) -> list[Event]:
        """Note the IDs; return the events whose ID was not noted before, the first of each."""
        first: dict[bytes, Event] = {}
        for event in events:
            first.setdefault(event.tracking_id, event)
        connection.stage(self._seen(connection), [(tracking_id,) for tracking_id in first])
        rows = connection.query(
            f"INSERT INTO {SEEN} (reader, tracking_id) SELECT {connection.mark}, tracking_id FROM {STAGED} "  # noqa: S608
            f"WHERE true ON CONFLICT (reader, tracking_id) DO NOTHING RETURNING tracking_id",
            (self._name,),
        )
        fresh = {bytes(tracking_id) for (tracking_id,) in rows}
        return [event for tracking_id, event in first.items() if tracking_id in fresh]

    def _events(self, source: TopicPartition, columns: Columns) -> list[Event]:
        found = self._extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
        if found.faults:
            row, fault = min(found.faults.items())
            raise StateIncompatible(
                f"{self._name}: {source.topic}/{source.partition} offset {columns.offsets[row]} has no usable tracking "
                f"ID: {fault.detail} ({fault.code}). Nothing of its batch was handed over. Read a deduplicated topic, "
                f"whose dead letters are apart, or correct `tracking_id`."
            )
        rows = zip(
            found.ids,
            found.times_ms,
            columns.keys,
            columns.values,
            columns.headers,
            columns.offsets,
            strict=True,
        )
        return [
            Event(tracking_id or b"", time_ms, key, value, headers, source.topic, source.partition, offset)
            for tracking_id, time_ms, key, value, headers, offset in rows
        ]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
