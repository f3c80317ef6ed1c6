"""Implements `dedup sink`, a sink connector that writes a topic into a table with one row per tracking ID.

The topic's offsets are committed in the same database transaction as the rows. `run_sink` continues to fetch while a
transaction is written. A record that cannot become a row becomes a dead letter; see `dead_letter_producer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from dedup.connect.database import (
    DatabaseConnection,
    Owned,
    Table,
    Taken,
    WriteOutcome,
    advance,
    make_offsets,
    make_staging,
    take,
    transaction,
)
from dedup.connect.dead_letter_producer import DeadLetterProducer, RejectedRecord
from dedup.connect.open_database import connect
from dedup.connect.retry import RetryingDatabase
from dedup.connect.source_connector import set_by_signals
from dedup.connect.transactional_outbox import provide, wanted
from dedup.connect.upsert import BadRow, RowMaker, SinkRows, make_table, refuse_lost_table, table_of, write_rows
from dedup.errors import BrokerUnavailable, CommitUnknown, Problem, StateIncompatible, TopologyError
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection as Cluster
from dedup.kafka.consumer import FeedFetcher, TopicCheck
from dedup.kafka.record_batch import Columns
from dedup.kafka.topic_admin import Admin, Topic
from dedup.kafka.wire import TopicNow, TopicPartition
from dedup.topology.model import SinkSpec, Topology
from dedup.worker.offsets import bounds_of
from dedup.worker.record_collector import SLACK_BYTES

if TYPE_CHECKING:
    from dedup.settings import Settings

MOST_ROWS: Final = 20_000
"""Maximum number of records in a transaction."""
WAIT_MS: Final = 200
GATHER_MS: Final = 50
T = TypeVar("T")
log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Sunk:
    """The result of one run, in rows."""

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    dead_letters: int = 0
    transactions: int = 0


@dataclass(slots=True)
class _Transaction:
    """The records of several partitions that the next transaction writes."""

    batches: list[tuple[TopicPartition, Columns]] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    """For each partition, the offset after the last record."""
    records: int = 0


def spec_of(topology: Topology, name: str) -> SinkSpec:
    """Return the sink of a topology. Raises TopologyError if it has none, or no topic to read."""
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
) -> Sunk:
    """Run until SIGTERM or SIGINT or, with ``exit_when_done``, until the topic is read to its end at the start.

    References in ``spec.url`` are already resolved. Raises TaskMigrated if another process takes over a partition,
    StateIncompatible for an unsuitable table or topic, and DatabaseUnavailable or BrokerUnavailable if there is no
    response at startup.
    """
    wire = KafkaWire(Cluster.of(settings, client_id=f"dedup-sink-{topology.name}"))
    await wire.start()
    try:
        topic, dead_letters = await _prepare(wire, topology, spec, settings)
        sources = [TopicPartition(spec.topic, number) for number in sorted(partitions or range(topic.partitions))]
        if sources[-1].partition >= topic.partitions:
            raise StateIncompatible(
                f"topic {spec.topic!r} has {topic.partitions} partitions, 0 to {topic.partitions - 1}."
            )
        run = _Run(topology, spec, settings, wire, dead_letters, topic)
        try:
            return await run.until_over(sources, exit_when_done=exit_when_done)
        finally:
            await run.close()
    finally:
        await wire.stop()


async def _prepare(
    wire: KafkaWire, topology: Topology, spec: SinkSpec, settings: Settings
) -> tuple[Topic, DeadLetterProducer]:
    async with Admin(wire.connection) as admin:
        found = await admin.topics([spec.topic])
        if spec.topic not in found:
            raise StateIncompatible(f"topic {spec.topic!r} does not exist; `dedup run` or `dedup apply` creates it.")
        topic = found[spec.topic]
        configs = {
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(topic.max_record_bytes + SLACK_BYTES),
        }
        made = await provide(admin, [wanted(spec.dead_letter, topic.partitions, settings, configs)], settings)
    return topic, DeadLetterProducer(wire, topology.name, spec.dead_letter, made[spec.dead_letter].partitions, settings)


class _Run:
    def __init__(
        self,
        topology: Topology,
        spec: SinkSpec,
        settings: Settings,
        wire: KafkaWire,
        dead_letters: DeadLetterProducer,
        topic: Topic,
    ) -> None:
        self._spec: Final = spec
        self._wire: Final = wire
        self._dead_letters: Final = dead_letters
        self._owned: Final = Owned(topology.name, spec.topic, topic.topic_id)
        self._check: Final = TopicCheck(wire, {topic.name: TopicNow(topic.topic_id, topic.partitions)})
        self._rows: Final = RowMaker(topology, spec.columns)
        self._interval_s: Final = settings.commit_interval_ms / 1000
        self._stop: Final = asyncio.Event()
        self._thread: Final = ThreadPoolExecutor(1, "database")
        self._database: Final = RetryingDatabase(lambda: connect(spec.url), self._stop.is_set)
        self._fetcher: Final = FeedFetcher(wire, self._check, wait_ms=WAIT_MS, gather_ms=GATHER_MS)
        self._taken: dict[int, Taken] = {}
        self._table: Table
        self._done: Final = Sunk()

    async def until_over(self, sources: list[TopicPartition], *, exit_when_done: bool) -> Sunk:
        with set_by_signals(self._stop):
            ends = await self._start(sources)
            await self._loop(sources, ends if exit_when_done else None)
        return self._done

    async def close(self) -> None:
        self._fetcher.forget()
        await self._dead_letters.close()
        await self._in_thread(self._database.close)
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _start(self, sources: list[TopicPartition]) -> dict[TopicPartition, int]:
        """Fence earlier owners and read their positions; return the partitions' current ends."""
        numbers = [source.partition for source in sources]

        def begin(connection: DatabaseConnection) -> dict[int, Taken]:
            make_offsets(connection)
            self._table = table_of(self._spec, dict(connection.types))
            refuse_lost_table(connection, self._table, self._owned)
            make_table(connection, self._table)
            return take(connection, self._owned, numbers)

        self._taken = await self._in_thread(partial(self._database.first, begin))
        try:
            positions = {source: max(0, self._taken[source.partition].position) for source in sources}
            await self._dead_letters.open(positions)
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

    async def _loop(self, sources: list[TopicPartition], ends: Mapping[TopicPartition, int] | None) -> None:
        current = await self._gather(sources)
        while not self._stop.is_set():
            if not current.records:
                if ends is not None and all((self._fetcher.position(each) or 0) >= ends[each] for each in sources):
                    return
                current = await self._gather(sources)
                continue
            writing = asyncio.create_task(self._write(current))
            try:
                following = await self._gather(sources)
            finally:
                await writing
            current = following

    async def _gather(self, sources: list[TopicPartition]) -> _Transaction:
        """Return the records that arrive within the commit interval after the first one; empty if none arrives."""
        gathered = _Transaction()
        loop = asyncio.get_running_loop()
        until_s: float | None = None
        while gathered.records < MOST_ROWS and (until_s is None or loop.time() < until_s):
            for answer in await self._fetcher.poll(sources):
                if answer.columns.offsets:
                    gathered.batches.append((answer.source, answer.columns))
                    gathered.ends[answer.source.partition] = answer.next_offset
                    gathered.records += len(answer.columns.offsets)
            if not gathered.records:
                break
            until_s = until_s or loop.time() + self._interval_s
        return gathered

    async def _write(self, current: _Transaction) -> None:
        """Write the transaction into the table; write nothing if the sink is stopped while no broker responds.

        Raises StateIncompatible if the topic was recreated, or has new partitions that nobody reads.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._check.confirm()
                break
            except CommitUnknown as silent:
                if self._stop.is_set():
                    return
                log.warning("%s", silent)

        def send(rejected: list[RejectedRecord]) -> int:
            return asyncio.run_coroutine_threadsafe(self._dead_letters.send(rejected), loop).result()

        await self._in_thread(partial(self._write_blocking, current, send))

    def _write_blocking(self, current: _Transaction, send: Callable[[list[RejectedRecord]], int]) -> None:
        made = [(source, columns, self._rows.rows(columns)) for source, columns in current.batches]
        rows = [row for _, _, part in made for row in part.rows]

        def work(connection: DatabaseConnection) -> tuple[WriteOutcome, int]:
            with transaction(connection):
                advance(connection, self._owned, self._taken, current.ends)
                written = write_rows(connection, self._table, rows)
                rejected = _rejected(made, written)
                # Before the commit: after it, a crash between the two would lose them.
                sent = send(rejected) if rejected else 0
            return written, sent

        outcome = self._database.once(work, self._prepare_again, self._owned, self._taken, current.ends)
        for partition, end in current.ends.items():
            self._taken[partition].position = end
        ends = {TopicPartition(self._owned.topic, partition): end for partition, end in current.ends.items()}
        self._dead_letters.settled(ends)
        self._done.transactions += 1
        if outcome is not None:
            written, sent = outcome
            self._done.inserted += written.inserted
            self._done.updated += written.updated
            self._done.unchanged += written.unchanged
            self._done.dead_letters += sent

    def _prepare_again(self, connection: DatabaseConnection) -> None:
        make_staging(connection, self._table)
        log.info("the database answers again")


def _rejected(made: list[tuple[TopicPartition, Columns, SinkRows]], written: WriteOutcome) -> list[RejectedRecord]:
    """Return the records that cannot become rows, and those whose rows the database has refused."""
    rejected: list[RejectedRecord] = []
    first = 0
    for source, columns, part in made:
        bad = list(part.bad)
        for row, number in enumerate(part.numbers, first):
            refused = written.refused.get(row)
            if refused is not None:
                bad.append(BadRow(number, refused.code, refused.detail))
        rejected += [_rejected_record(source, columns, each) for each in bad]
        first += len(part.numbers)
    return rejected


def _rejected_record(source: TopicPartition, columns: Columns, bad: BadRow) -> RejectedRecord:
    at = bad.number
    return RejectedRecord(
        source,
        columns.offsets[at],
        columns.timestamps_ms[at],
        columns.keys[at],
        columns.values[at],
        columns.headers[at],
        bad.code,
        bad.detail,
    )
