"""`dedup sink`: a topic into a table, one row per tracking ID, the topic's offsets in the rows' own transaction.

Fetching goes on while a transaction is written. A record that can be no row becomes a dead letter; see `letters`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from dedup.edges.database import (
    Connection,
    Owned,
    Table,
    Taken,
    Written,
    advance,
    make_offsets,
    make_staging,
    take,
    transaction,
)
from dedup.edges.letters import Letter, Letters
from dedup.edges.opening import connect
from dedup.edges.outbox import OutboxOptions
from dedup.edges.patience import Patient
from dedup.edges.rows import BadRow, RowMaker, Rows
from dedup.edges.topics import provide, wanted
from dedup.edges.upsert import make_table, refuse_lost_table, table_of, write_rows
from dedup.errors import BrokerUnavailable, CommitUnknown, Problem, StateIncompatible, TopologyError
from dedup.session.admin import Admin, Topic
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection as Cluster
from dedup.session.fetch import Columns, FeedFetcher
from dedup.session.wire import TopicPartition
from dedup.topology.model import SinkSpec, Topology
from dedup.worker.publish import SLACK_BYTES
from dedup.worker.starting import bounds_of

if TYPE_CHECKING:
    from dedup.settings import Settings

MOST_ROWS: Final = 20_000
"""In a transaction."""
WAIT_MS: Final = 200
GATHER_MS: Final = 50
T = TypeVar("T")
log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Sunk:
    """What one run did."""

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    dead_letters: int = 0
    transactions: int = 0


@dataclass(slots=True)
class _Load:
    """One transaction to be: records of several partitions."""

    batches: list[tuple[TopicPartition, Columns]] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    records: int = 0


def spec_of(topology: Topology, name: str) -> SinkSpec:
    """Return the sink of a topology. Raises TopologyError where it has none."""
    spec = topology.sink
    if spec is None or not spec.topic:
        what = "no `sink`" if spec is None else "a sink, but no output and no `sink.topic` to read"
        raise TopologyError([Problem(name, f"has {what}; add it, as in topologies/topic-to-database.yaml")])
    return spec


async def run_sink(
    topology: Topology,
    spec: SinkSpec,
    settings: Settings,
    *,
    partitions: Collection[int] | None = None,
    exit_when_done: bool = False,
    tell: Callable[[Sunk], None] = lambda _: None,
) -> Sunk:
    """Run until a signal comes or, with ``exit_when_done``, all that was there at the start is in the table.

    ``spec.url`` is resolved already. Raises TaskMigrated when another process takes a partition over,
    StateIncompatible for a table or topic that does not fit, DatabaseUnavailable and BrokerUnavailable where nobody
    answers at the start.
    """
    wire = KafkaWire(Cluster.of(settings, client_id=f"dedup-sink-{topology.name}"))
    await wire.start()
    try:
        topic, letters = await _prepare(wire, topology, spec, settings)
        sources = [TopicPartition(spec.topic, number) for number in sorted(partitions or range(topic.partitions))]
        if sources[-1].partition >= topic.partitions:
            raise StateIncompatible(
                f"topic {spec.topic!r} has {topic.partitions} partitions, 0 to {topic.partitions - 1}."
            )
        run = _Run(topology, spec, settings, wire, letters, Owned(topology.name, spec.topic, topic.topic_id))
        try:
            return await run.until_over(sources, exit_when_done=exit_when_done, tell=tell)
        finally:
            await run.close()
    finally:
        await wire.stop()


async def _prepare(wire: KafkaWire, topology: Topology, spec: SinkSpec, settings: Settings) -> tuple[Topic, Letters]:
    async with Admin(wire.connection) as admin:
        found = await admin.topics([spec.topic])
        if spec.topic not in found:
            raise StateIncompatible(f"topic {spec.topic!r} does not exist; `dedup run` or `dedup apply` makes it.")
        topic = found[spec.topic]
        configs = {
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(topic.max_record_bytes + SLACK_BYTES),
        }
        made = await provide(admin, [wanted(spec.dead_letter, topic.partitions, settings, configs)], settings)
    options = OutboxOptions(settings.transaction_timeout_ms, settings.topics.compression)
    return topic, Letters(wire, topology.name, spec.dead_letter, made[spec.dead_letter].partitions, options)


class _Run:
    def __init__(
        self, topology: Topology, spec: SinkSpec, settings: Settings, wire: KafkaWire, letters: Letters, owned: Owned
    ) -> None:
        self._spec: Final = spec
        self._wire: Final = wire
        self._letters: Final = letters
        self._owned: Final = owned
        self._rows: Final = RowMaker(topology, spec.columns)
        self._interval_s: Final = settings.commit_interval_ms / 1000
        self._stop: Final = asyncio.Event()
        self._thread: Final = ThreadPoolExecutor(1, "database")
        self._database: Final = Patient(lambda: connect(spec.url), self._stop.is_set)
        self._fetcher: Final = FeedFetcher(wire, wait_ms=WAIT_MS, gather_ms=GATHER_MS)
        self._taken: dict[int, Taken] = {}
        self._table: Table
        self._done: Final = Sunk()

    async def until_over(
        self, sources: list[TopicPartition], *, exit_when_done: bool, tell: Callable[[Sunk], None]
    ) -> Sunk:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        try:
            ends = await self._start(sources)
            await self._loop(sources, ends if exit_when_done else None, tell)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._done

    async def close(self) -> None:
        self._fetcher.forget()
        await self._letters.close()
        await self._in_thread(self._database.close)
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _start(self, sources: list[TopicPartition]) -> dict[TopicPartition, int]:
        """Fence earlier owners, then read where they left off; return the partitions' present ends."""
        numbers = [source.partition for source in sources]

        def begin(connection: Connection) -> dict[int, Taken]:
            make_offsets(connection)
            self._table = table_of(self._spec, dict(connection.types))
            refuse_lost_table(connection, self._table, self._owned)
            make_table(connection, self._table)
            return take(connection, self._owned, numbers)

        self._taken = await self._in_thread(partial(self._database.first, begin))
        try:
            await self._letters.open({source: max(0, self._taken[source.partition].position) for source in sources})
        except CommitUnknown as error:
            raise BrokerUnavailable(f"the cluster did not begin a transaction in time: {error}") from error
        ends: dict[TopicPartition, int] = {}
        for source in sources:
            bounds = await bounds_of(self._wire, source)
            position = self._taken[source.partition].position
            self._fetcher.begin(source, bounds.start if position < 0 else position)
            ends[source] = bounds.end
        log.info("%s: %d partitions taken; earlier owners are fenced", self._owned.reader, len(sources))
        return ends

    async def _loop(
        self,
        sources: list[TopicPartition],
        ends: Mapping[TopicPartition, int] | None,
        tell: Callable[[Sunk], None],
    ) -> None:
        load = await self._gather(sources)
        while not self._stop.is_set():
            if not load.records:
                if ends is not None and all((self._fetcher.position(each) or 0) >= ends[each] for each in sources):
                    return
                load = await self._gather(sources)
                continue
            writing = asyncio.create_task(self._write(load))
            try:
                following = await self._gather(sources)
            finally:
                await writing
            tell(self._done)
            load = following

    async def _gather(self, sources: list[TopicPartition]) -> _Load:
        """Return what comes within the commit interval after the first record; nothing where none comes for a while."""
        load = _Load()
        loop = asyncio.get_running_loop()
        until_s: float | None = None
        while load.records < MOST_ROWS and (until_s is None or loop.time() < until_s):
            answers = await self._fetcher.poll(sources)
            for answer in answers:
                if answer.columns.offsets:
                    load.batches.append((answer.source, answer.columns))
                    load.ends[answer.source.partition] = answer.next_offset
                    load.records += len(answer.columns.offsets)
            if not load.records:
                break
            until_s = until_s or loop.time() + self._interval_s
        return load

    async def _write(self, load: _Load) -> None:
        loop = asyncio.get_running_loop()

        def send(letters: list[Letter]) -> int:
            return asyncio.run_coroutine_threadsafe(self._letters.send(letters), loop).result()

        await self._in_thread(partial(self._write_blocking, load, send))

    def _write_blocking(self, load: _Load, send: Callable[[list[Letter]], int]) -> None:
        made = [(source, columns, self._rows.rows(columns)) for source, columns in load.batches]
        rows = [row for _, _, part in made for row in part.rows]

        def work(connection: Connection) -> tuple[Written, int]:
            with transaction(connection):
                advance(connection, self._owned, self._taken, load.ends)
                written = write_rows(connection, self._table, rows)
                letters = _letters(made, written)
                # Before the commit: were it after, a crash between the two would lose them.
                sent = send(letters) if letters else 0
            return written, sent

        found = self._database.once(work, self._prepare_again, self._owned, self._taken, load.ends)
        for partition, end in load.ends.items():
            self._taken[partition].position = end
        self._letters.settled(
            {TopicPartition(self._owned.topic, partition): end for partition, end in load.ends.items()}
        )
        self._done.transactions += 1
        if found is not None:
            written, sent = found
            self._done.inserted += written.inserted
            self._done.updated += written.updated
            self._done.unchanged += written.unchanged
            self._done.dead_letters += sent

    def _prepare_again(self, connection: Connection) -> None:
        make_staging(connection, self._table)
        log.info("the database answers again")


def _letters(made: list[tuple[TopicPartition, Columns, Rows]], written: Written) -> list[Letter]:
    letters: list[Letter] = []
    first = 0
    for source, columns, part in made:
        bad = list(part.bad)
        for row, number in enumerate(part.numbers, first):
            refused = written.refused.get(row)
            if refused is not None:
                bad.append(BadRow(number, refused.code, refused.detail))
        letters += [_letter(source, columns, each) for each in bad]
        first += len(part.numbers)
    return letters


def _letter(source: TopicPartition, columns: Columns, bad: BadRow) -> Letter:
    at = bad.number
    return Letter(
        source,
        columns.offsets[at],
        columns.timestamps_ms[at],
        columns.keys[at],
        columns.values[at],
        columns.headers[at],
        bad.code,
        bad.detail,
    )
