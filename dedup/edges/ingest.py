"""`dedup ingest`: a source's records and how far it was read, in one Kafka transaction after the other.

While a transaction is on its way the next piece of the source is read. Two processes on one source: the one that
started later has fenced the other, which stops with TaskMigrated.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, assert_never

from dedup.core.event_time import FieldTime
from dedup.edges.files import Files
from dedup.edges.marked import Marked
from dedup.edges.outbox import Outbox, OutboxOptions
from dedup.edges.positions import TOPIC_CONFIGS
from dedup.edges.records import HEADERS_BYTES, Lines, Recorder
from dedup.edges.source import Found, Source
from dedup.edges.table import TableRows
from dedup.edges.topics import provide, wanted
from dedup.errors import BrokerUnavailable, CommitUnknown, RecordRefused
from dedup.session.admin import Admin, Topic, WantedTopic
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.topology.ingest import FilesSource, Ingest, Marker, TableSource

if TYPE_CHECKING:
    from dedup.settings import Settings

MOST_RECORDS: Final = 40_000
"""In a transaction."""
LOOK_AGAIN_S: Final = 0.2
FOR_EVER: Final = "-1"
log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Ingested:
    """What one run did."""

    records: int = 0
    dead_letters: int = 0
    transactions: int = 0
    waiting: list[str] = field(default_factory=list)
    """What was there at the end and could not be read yet."""


@dataclass(slots=True)
class _Load:
    """One transaction to be."""

    lines: Lines = field(default_factory=dict)
    positions: dict[str, bytes | None] = field(default_factory=dict)
    last: Found | None = None
    """The only piece of the source in it, after a refusal."""
    records: int = 0
    dead_letters: int = 0


OpenSource = Callable[[Ingest, int, Callable[[], bool]], Source]
"""Makes the source, from the most bytes of one record's value, and what tells that it is time to stop."""


def open_source(ingest: Ingest, most_bytes: int, stopped: Callable[[], bool], *, url: str = "") -> Source:
    """Return the source of an ingest file; ``url`` is a table's, its references resolved. Blocking for a table."""
    source: Source
    match ingest.source:
        case FilesSource() as files:
            source = Files(ingest.name, files, most_bytes)
        case TableSource() as table:
            source = TableRows(ingest.name, table, url, stopped)
        case never:
            assert_never(never)
    return Marked(source, ingest.boundary) if isinstance(ingest.boundary, Marker) else source


async def run_ingest(
    ingest: Ingest,
    settings: Settings,
    make_source: OpenSource,
    *,
    exit_when_done: bool = False,
    tell: Callable[[Ingested], None] = lambda _: None,
) -> Ingested:
    """Run until a signal comes or, with ``exit_when_done``, all that is there was sent; return what was done.

    Raises TaskMigrated when another process takes the source over, AuthorMistake or StateIncompatible where the source
    can not be read without a loss, BrokerUnavailable where none answers at the start.
    """
    wire = KafkaWire(Connection.of(settings, client_id=f"dedup-ingest-{ingest.name}"))
    await wire.start()
    try:
        async with Admin(wire.connection) as admin:
            topics = await provide(admin, _topics(ingest, settings), settings)
        stop = asyncio.Event()
        with _stopped_by_signals(stop):
            outbox = await opened_outbox(wire, f"{ingest.name}.ingest.0", ingest.offsets_topic, settings, stop.is_set)
            log.info("%s: source taken; earlier owners are fenced", ingest.name)
            most_bytes = topics[ingest.topic].max_record_bytes
            try:
                source = await asyncio.to_thread(make_source, ingest, most_bytes - HEADERS_BYTES, stop.is_set)
                try:
                    interval_ms = settings.commit_interval_ms if ingest.boundary == "interval" else None
                    recorder = _recorder(ingest, topics, most_bytes)
                    run = _Run(outbox, source, recorder, interval_ms, stop, tell)
                    return await run.until_over(exit_when_done=exit_when_done)
                finally:
                    source.close()
            finally:
                await outbox.close()
    finally:
        await wire.stop()


@contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def opened_outbox(
    wire: KafkaWire,
    transactional_id: str,
    offsets_topic: str,
    settings: Settings,
    stopped: Callable[[], bool] = lambda: False,
) -> Outbox:
    """Return an outbox whose older owners are fenced. Raises BrokerUnavailable where no broker answers in time."""
    options = OutboxOptions(settings.transaction_timeout_ms, settings.topics.compression)
    outbox = Outbox(wire, transactional_id, offsets_topic, options, stopped)
    try:
        await outbox.open()
    except CommitUnknown as error:
        raise BrokerUnavailable(f"the cluster did not begin a transaction in time: {error}") from error
    return outbox


def _topics(ingest: Ingest, settings: Settings) -> list[WantedTopic]:
    retention = settings.topics.retention_ms
    # Times in the records may be long ago: by the default of 7 days they would be deleted as soon as they are written.
    old = isinstance(ingest.event_time, FieldTime)
    kept = {"retention.ms": str(retention)} if retention is not None else {"retention.ms": FOR_EVER} if old else {}
    return [
        wanted(ingest.topic, ingest.partitions, settings, kept),
        wanted(ingest.dead_letter, ingest.partitions, settings, {"message.timestamp.type": "LogAppendTime"}),
        wanted(ingest.offsets_topic, 1, settings, TOPIC_CONFIGS),
    ]


def _recorder(ingest: Ingest, topics: dict[str, Topic], most_bytes: int) -> Recorder:
    return Recorder(ingest, topics[ingest.topic].partitions, topics[ingest.dead_letter].partitions, most_bytes)


class _Run:
    def __init__(
        self,
        outbox: Outbox,
        source: Source,
        recorder: Recorder,
        interval_ms: int | None,
        stop: asyncio.Event,
        tell: Callable[[Ingested], None],
    ) -> None:
        """``interval_ms``: how long a transaction's records are collected; None: it is one piece of the source."""
        self._outbox: Final = outbox
        self._source: Final = source
        self._recorder: Final = recorder
        self._interval_ms: Final = interval_ms
        self._tell: Final = tell
        self._done: Final = Ingested()
        self._stop: Final = stop
        self._single = False
        """After a refusal: one piece a transaction and one record a batch, so that the broker's answer names it."""

    async def until_over(self, *, exit_when_done: bool) -> Ingested:
        await self._loop(exit_when_done=exit_when_done)
        self._done.waiting = self._source.waiting()
        return self._done

    async def _loop(self, *, exit_when_done: bool) -> None:
        self._source.restore(self._outbox.positions.values)
        load = await self._next()
        while not self._stop.is_set():
            if load is None:
                if exit_when_done:
                    return
                await self._wait()
                load = await self._next()
                continue
            load = await self._commit(load)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                await self._stop.wait()
        except TimeoutError:
            return

    async def _next(self) -> _Load | None:
        return await asyncio.to_thread(self._collect)

    def _collect(self) -> _Load | None:
        """Return the next transaction's records: one piece of the source, or what it gave within the interval."""
        load = _Load()
        until_s = time.monotonic() + (self._interval_ms or 0) / 1000
        while not load.positions or (load.records < MOST_RECORDS and time.monotonic() < until_s):
            found = self._source.poll()
            if found is None:
                break
            lines = self._recorder.lines(found)
            total = sum(map(len, lines.values()))
            dead = total - sum(len(part) for target, part in lines.items() if target.topic == self._recorder.topic)
            for target, part in lines.items():
                load.lines.setdefault(target, []).extend(part)
            load.positions.update(found.positions)
            load.records += total - dead
            load.dead_letters += dead
            load.last = found
            if self._single or self._interval_ms is None:
                break
        return load if load.positions else None

    async def _commit(self, load: _Load) -> _Load | None:
        """Commit a load; return the next one, read meanwhile."""
        most_rows = 1 if self._single else None
        sending = asyncio.create_task(self._outbox.commit(load.lines, load.positions, most_rows=most_rows))
        try:
            following = await self._next()
        except BaseException:
            # The source can not be read on; what it gave before is good, and is committed before that is told.
            await sending
            raise
        try:
            await sending
        except RecordRefused as refused:
            self._refuse(load, refused)
            self._source.restore(self._outbox.positions.values)
            return await self._next()
        self._single = False
        self._done.records += load.records
        self._done.dead_letters += load.dead_letters
        self._done.transactions += 1
        self._tell(self._done)
        return following

    def _refuse(self, load: _Load, refused: RecordRefused) -> None:
        if not self._single:
            self._single = True
            return
        rows = [row for row in refused.rows if row >= 0]
        if not rows or load.last is None:
            raise refused
        log.warning("%s: it becomes a dead letter", refused)
        self._recorder.refused[load.last.place(rows[0])] = str(refused)
