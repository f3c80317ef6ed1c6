"""`IdempotentReader` passes each event of a topic to an application once, within the application's own transaction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from dedup.connect.database import (
    STAGED,
    DatabaseConnection,
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
from dedup.connect.open_database import connect
from dedup.connect.retry import RetryingDatabase
from dedup.errors import CommitUnknown, InvariantBroken, StateIncompatible
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection as Cluster
from dedup.kafka.consumer import FeedFetcher, TopicCheck
from dedup.kafka.record_batch import Columns, Header
from dedup.kafka.topic_admin import Admin
from dedup.kafka.wire import TopicNow, TopicPartition
from dedup.settings import Settings
from dedup.topology.model import Topology, extractor_of
from dedup.worker.offsets import bounds_of

SEEN: Final = "dedup_seen"
WAIT_MS: Final = 200
GATHER_MS: Final = 20
T = TypeVar("T")
log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """A record whose tracking ID this reader has not passed to the application before."""

    tracking_id: bytes
    event_time_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]
    topic: str
    partition: int
    offset: int


class Work:
    """The open database transaction, in which the application's statements are committed together with the events."""

    def __init__(self, connection: DatabaseConnection) -> None:
        self._connection: Final = connection

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; return the number of changed rows.

        Parameters are ``?`` in SQLite and ``%s`` in PostgreSQL.
        """
        return self._connection.execute(sql, parameters)

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Return the rows of a query."""
        return self._connection.query(sql, parameters)


Handle = Callable[[Work, list[Event]], None]


class IdempotentReader:
    """A consumer that stores its offsets, and the IDs that it has seen, in the application's database.

    Use it with ``async with``. ``topology`` defines the tracking ID; no worker needs to run. A record that has no ID or
    cannot be read stops the reader, because no record is skipped silently.
    """

    def __init__(self, name: str, *, topic: str, topology: Topology, url: str, settings: Settings) -> None:
        self._name: Final = name
        self._topic: Final = topic
        self._settings: Final = settings
        self._extract: Final = extractor_of(topology)
        self._wire: Final = KafkaWire(Cluster.of(settings, client_id=f"dedup-reader-{name}"))
        self._stopping = False
        self._database: Final = RetryingDatabase(lambda: connect(url), lambda: self._stopping)
        self._thread: Final = ThreadPoolExecutor(1, "database")
        self._check: TopicCheck
        self._fetcher: FeedFetcher
        self._opened = False
        self._owned = Owned(name, topic, "")
        self._taken: dict[int, Taken] = {}
        self._sources: list[TopicPartition] = []
        self._ends: dict[TopicPartition, int] = {}
        self._interrupted = False

    async def __aenter__(self) -> Self:
        """Fence older processes with this name; their next transaction raises TaskMigrated.

        Raises StateIncompatible if the topic does not exist or was recreated, and DatabaseUnavailable or
        BrokerUnavailable if there is no response in time.
        """
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
            raise StateIncompatible(f"topic {self._topic!r} does not exist; create it first.")
        self._owned = Owned(self._name, self._topic, found.topic_id)
        self._check = TopicCheck(self._wire, {self._topic: TopicNow(found.topic_id, found.partitions)})
        self._fetcher = FeedFetcher(self._wire, self._check, wait_ms=WAIT_MS, gather_ms=GATHER_MS)
        self._opened = True
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
        """Roll back everything that was not committed."""
        await self._close()

    async def _close(self) -> None:
        self._stopping = True
        if self._opened:
            self._fetcher.forget()
        await self._in_thread(self._database.close)
        self._thread.shutdown()
        await self._wire.stop()

    async def run(self, handle: Handle, *, until_end: bool = False) -> int:
        """Pass every event to ``handle`` once; with ``until_end``, stop at the topic's end as of the start.

        Returns the number of events. ``handle`` runs in a thread, inside the transaction that marks the events as seen.
        If it raises an exception, the batch is rolled back and the exception is passed on. It is called again for a
        batch whose transaction did not happen, so it must have no effect outside the database. Raises InvariantBroken
        after a run that was interrupted by an exception or a cancellation, because the records that it had fetched
        would be skipped; open a new reader instead. Raises StateIncompatible if the topic was deleted or recreated, or
        has new partitions that this reader does not read. Raises TaskMigrated if another process with this name has
        taken over.
        """
        if self._interrupted:
            raise InvariantBroken(
                f"{self._name}: this reader was interrupted in the middle of a batch, and would skip records that were "
                f"never handed over. Leave its `async with` block and open a new one: it begins where the database is."
            )
        self._interrupted = True
        handled = 0
        while not (until_end and self._at_end()):
            for answer in await self._fetcher.poll(self._sources):
                if answer.columns.offsets:
                    await self._confirmed()
                    work = partial(self._batch, answer.source, answer.columns, answer.next_offset, handle)
                    handled += await self._in_thread(work)
        self._interrupted = False
        return handled

    async def _confirmed(self) -> None:
        """Raise StateIncompatible if the topic has changed; wait while no broker responds."""
        while True:
            try:
                return await self._check.confirm()
            except CommitUnknown as silent:
                log.warning("%s: %s", self._name, silent)

    def _at_end(self) -> bool:
        return all((self._fetcher.position(source) or 0) >= end for source, end in self._ends.items())

    def _begin(self, connection: DatabaseConnection) -> dict[int, Taken]:
        make_offsets(connection)
        kind = connection.types["bytes"]
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {SEEN} "
            f"(reader VARCHAR(250) NOT NULL, tracking_id {kind} NOT NULL, PRIMARY KEY (reader, tracking_id))"
        )
        make_staging(connection, self._seen(connection))
        return take(connection, self._owned, [source.partition for source in self._sources])

    @staticmethod
    def _seen(connection: DatabaseConnection) -> Table:
        return Table(SEEN, (("tracking_id", connection.types["bytes"]),), ("tracking_id",), append=False)

    def _batch(self, source: TopicPartition, columns: Columns, end: int, handle: Handle) -> int:
        events = self._events(source, columns)
        ends = {source.partition: end}

        def work(connection: DatabaseConnection) -> int:
            with transaction(connection):
                advance(connection, self._owned, self._taken, ends)
                fresh = self._first_seen(connection, events)
                if fresh:
                    handle(Work(connection), fresh)
            return len(fresh)

        def prepare(connection: DatabaseConnection) -> None:
            make_staging(connection, self._seen(connection))

        handled = self._database.once(work, prepare, self._owned, self._taken, ends)
        self._taken[source.partition].position = end
        return handled or 0

    def _first_seen(self, connection: DatabaseConnection, events: Sequence[Event]) -> list[Event]:
        """Store the IDs; return the first event of each ID that was not stored before."""
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
