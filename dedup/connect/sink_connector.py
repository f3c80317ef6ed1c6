"""Implements `dedup sink`, a sink connector that writes a topic to a table, with one row per tracking ID.

Each database transaction commits rows together with the offsets reached in the topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from dedup.connect.database import DatabaseConnection, FencedOffsets, WriteOutcome
from dedup.connect.dead_letter_producer import DeadLetterProducer, RejectedRecord
from dedup.connect.fenced_consumer import FencedConsumer
from dedup.connect.open_database import START_WITHIN_S
from dedup.connect.source_connector import ended_by_refusal, set_by_signals
from dedup.connect.transactional_outbox import provide, wanted_topic
from dedup.connect.upsert import RowMaker, make_tables, refuse_lost_table, table_of, write_rows
from dedup.errors import BrokerUnavailable, CommitUnknown, Problem, StateIncompatible, TopologyError
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection as Cluster
from dedup.kafka.record_batch import Columns
from dedup.kafka.topic_admin import Admin, Topic, WantedTopic
from dedup.kafka.wire import TopicPartition, patience
from dedup.topology.model import SinkSpec, Topology
from dedup.worker.record_collector import SLACK_BYTES
from dedup.worker.topics import TopicPlan

if TYPE_CHECKING:
    from dedup.settings import Settings

MOST_ROWS: Final = 20_000
"""The maximum number of records in a transaction."""
MOST_BYTES: Final = 64 << 20
"""The size of values at which a transaction ends."""
GATHER_MS: Final = 50
log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Sunk:
    """The numbers of rows, dead letters, and transactions in one run of a sink."""

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    dead_letters: int = 0
    transactions: int = 0


@dataclass(slots=True)
class _Transaction:
    batches: list[tuple[TopicPartition, Columns]] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    """Maps each partition to the offset after its last record in the transaction."""
    records: int = 0
    size_bytes: int = 0


def spec_of(topology: Topology, name: str) -> SinkSpec:
    """Return a topology's sink. Raises TopologyError if the topology has no sink, or the sink has no topic to read."""
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
    """Run a sink until SIGTERM or SIGINT or, with ``exit_when_done``, until it reaches the end offsets at startup.

    References such as ``${env:NAME}`` in ``spec.url`` must already be resolved. Raises TaskMigrated if another process
    takes over a partition, StateIncompatible for an unsuitable table or topic, and DatabaseUnavailable or
    BrokerUnavailable if the database or the brokers do not respond at startup.
    """
    async with AsyncExitStack() as stack:
        wire = KafkaWire(Cluster.of(settings, client_id=f"dedup-sink-{topology.name}"))
        await wire.start()
        stack.push_async_callback(wire.stop)
        topic, dead_letter = await _topics(wire, spec, settings)
        numbers = sorted(partitions or range(topic.partitions))
        if numbers[-1] >= topic.partitions:
            last = topic.partitions - 1
            raise StateIncompatible(f"topic {spec.topic!r} has {topic.partitions} partitions, 0 to {last}.")
        stop = stack.enter_context(set_by_signals())
        await stack.enter_async_context(ended_by_refusal(wire, stop))
        dead_letters = DeadLetterProducer(wire, topology.name, topic.name, dead_letter, settings, stop.is_set)
        offsets = FencedOffsets(topology.name, topic.name, topic.topic_id, spec.table)
        prepare = partial(_prepare, spec)
        consumer = FencedConsumer(wire, offsets, topic, spec.url, prepare, stop.is_set, gather_ms=GATHER_MS)
        stack.push_async_callback(consumer.close)
        stack.push_async_callback(dead_letters.close)
        await consumer.open(numbers)
        try:
            with patience(START_WITHIN_S):
                await dead_letters.open(consumer.offsets.positions)
        except CommitUnknown as error:
            raise BrokerUnavailable(f"the cluster did not begin a transaction in time: {error}") from error
        log.info("%s: %d partitions taken; earlier owners are fenced", topology.name, len(numbers))
        rows, interval_s = RowMaker(topology, spec.columns), settings.commit_interval_ms / 1000
        run = _Run(spec, rows, consumer, dead_letters, interval_s)
        return await run.until_over(stop, exit_when_done=exit_when_done)


async def _topics(wire: KafkaWire, spec: SinkSpec, settings: Settings) -> tuple[Topic, Topic]:
    """Return the topic to read, and the dead-letter topic, which is created if it is missing."""
    async with Admin(wire.connection) as admin:
        topic = (await admin.topics([spec.topic])).get(spec.topic)
        if topic is None:
            raise StateIncompatible(f"topic {spec.topic!r} does not exist; `dedup run` or `dedup apply` creates it.")
        wanted = _dead_letter(spec, settings, topic.partitions, topic.max_record_bytes)
        remedy = "`dedup apply` with the topology file creates them."
        made = await provide(admin, [wanted], create=settings.topics.create, remedy=remedy)
    return topic, made[spec.dead_letter]


def _dead_letter(spec: SinkSpec, settings: Settings, partitions: int, most_bytes: int) -> WantedTopic:
    configs = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": str(most_bytes + SLACK_BYTES)}
    return wanted_topic(settings, spec.dead_letter, partitions, configs)


def plan_dead_letter(
    spec: SinkSpec, settings: Settings, have: Mapping[str, Topic], plan: TopicPlan
) -> TopicPlan | None:
    """Return the plan with a sink's dead-letter topic added.

    The result is None if the topic that the sink reads neither exists nor is in the plan, because the number of
    partitions is then unknown.
    """
    exists, made = have.get(spec.topic), next((topic for topic in plan.make if topic.name == spec.topic), None)
    if exists is not None:
        wanted = _dead_letter(spec, settings, exists.partitions, exists.max_record_bytes)
    elif made is not None:
        wanted = _dead_letter(spec, settings, made.partitions, int(made.configs["max.message.bytes"]))
    else:
        return None
    return plan.with_topics([wanted], have)


def _prepare(spec: SinkSpec, connection: DatabaseConnection, offsets: FencedOffsets) -> None:
    refuse_lost_table(connection, offsets)
    make_tables(connection, spec)


@dataclass(slots=True)
class _Run:
    spec: SinkSpec
    rows: RowMaker
    consumer: FencedConsumer
    dead_letters: DeadLetterProducer
    interval_s: float
    done: Sunk = field(default_factory=Sunk)

    async def until_over(self, stop: asyncio.Event, *, exit_when_done: bool) -> Sunk:
        current = await self._gather()
        while not stop.is_set():
            if current.batches:
                current = await self._write(current)
            elif exit_when_done and self.consumer.records.at_end:
                break
            else:
                current = await self._gather()
        return self.done

    async def _gather(self) -> _Transaction:
        """Return a transaction, possibly empty, with the records that arrive within one commit interval."""
        gathered = _Transaction()
        loop = asyncio.get_running_loop()
        until_s: float | None = None
        while (
            gathered.records < MOST_ROWS
            and gathered.size_bytes < MOST_BYTES
            and (until_s is None or loop.time() < until_s)
        ):
            for answer in await self.consumer.poll():
                gathered.batches.append((answer.source, answer.columns))
                gathered.ends[answer.source.partition] = answer.next_offset
                gathered.records += len(answer.columns.offsets)
                gathered.size_bytes += sum(len(value or b"") for value in answer.columns.values)
            if not gathered.records:
                break
            until_s = until_s or loop.time() + self.interval_s
        return gathered

    async def _write(self, current: _Transaction) -> _Transaction:
        """Write ``current`` to the table while reading the next transaction, and return the next transaction."""
        writing = asyncio.create_task(self._written(current))
        try:
            return await self._gather()
        finally:
            await writing

    async def _written(self, current: _Transaction) -> None:
        loop = asyncio.get_running_loop()
        made = await self.consumer.in_thread(partial(self.rows.rows, current.batches))

        def work(connection: DatabaseConnection) -> tuple[WriteOutcome, int]:
            written = write_rows(connection, table_of(self.spec, connection.types), made.rows)
            refused = [RejectedRecord(*made.records[row], why.code, why.detail) for row, why in written.refused.items()]
            rejected = made.bad + refused
            if not rejected:
                return written, 0
            # Send dead letters before the commit, because a crash after the commit would lose dead letters not yet
            # sent.
            return written, asyncio.run_coroutine_threadsafe(self.dead_letters.send(rejected), loop).result()

        outcome = await self.consumer.once(work, current.ends)
        if outcome is None:
            return
        self.dead_letters.settled(current.ends)
        written, sent = outcome
        self.done.transactions += 1
        self.done.inserted += written.inserted
        self.done.updated += written.updated
        self.done.unchanged += written.unchanged
        self.done.dead_letters += sent
