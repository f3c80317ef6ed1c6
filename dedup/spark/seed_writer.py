"""One changelog partition of a seed, written on an executor under the fleet's own transactional id.

Opening the session fences whoever holds the partition. An attempt always writes all of it, from the first row: a
changelog record written twice says the same, so attempts may be repeated, killed or doubled. Only the last transaction
makes the partition startable: task record, `seeded`, and the group's offset. A task that failed upstream looks to
Python like a normal end of its input, so it is made only after count and digest are those that were announced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from dedup.errors import CommitUnknown, DedupError
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.session.record_batch import Line, fill
from dedup.session.transaction import Session
from dedup.session.wire import TopicPartition
from dedup.spark.shipped import ShippedSettings
from dedup.store.base import TaskRecord
from dedup.store.changelog import encode_task_record, task_record_key
from dedup.store.seed_mark import SEED_MARK_KEY, SeedMark, encode_seed_mark
from dedup.worker.starting import bounds_of, committed_offset

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

DEADLINE_MS: Final = 20_000
COMMIT_ROWS: Final = 50_000
MOST_ATTEMPTS: Final = 50
LOOK_S: Final = 0.1
DIGEST_MASK: Final = (1 << 64) - 1

WRITTEN: Final = pa.schema([("partition", pa.int32()), ("records", pa.int64()), ("was_there", pa.bool_())])
WRITTEN_DDL: Final = "partition int, records long, was_there boolean"

Row = tuple[int, bytes, bytes, int]
"""Changelog partition, key, value, hash of both."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What every attempt needs to know; sent to the executors with the task."""

    topology: Topology
    settings: ShippedSettings
    marks: Mapping[int, SeedMark]
    """By changelog partition, as announced."""
    records: Mapping[int, TaskRecord]
    commit_rows: int = COMMIT_ROWS


class PartitionTruncated(DedupError):
    """The rows of a partition came short, because a Spark task before failed: Spark tries again."""


def session_of(topology: Topology, settings: Settings, wire: KafkaWire, partition: int) -> Session:
    """Return the session of the fleet's task of a partition."""
    transactional_id = topology.transactional_id("dedup", partition)
    timeout_ms = settings.transaction_timeout_ms
    return Session(wire, transactional_id, topology.name, timeout_ms=timeout_ms, deadline_ms=DEADLINE_MS)


def write_partitions(plan: WritePlan, arrow: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of a Spark partition, sorted by changelog partition; yield one row as `WRITTEN` for each."""
    for partition, rows in groupby(_rows(arrow), key=itemgetter(0)):
        with asyncio.Runner() as runner:
            written = runner.run(_write(plan, partition, rows))
        yield pa.RecordBatch.from_pylist([written], schema=WRITTEN)


def _rows(arrow: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    for batch in arrow:
        yield from zip(
            *(batch.column(name).to_pylist() for name in ("dedup_partition", "key", "value", "hash")), strict=True
        )


async def _write(plan: WritePlan, partition: int, rows: Iterable[Row]) -> dict[str, int | bool]:
    settings = plan.settings.reveal()
    wire = KafkaWire(Connection.of(settings, client_id=f"dedup-{plan.topology.name}-seed"))
    await wire.start()
    try:
        return await write_partition(plan, settings, wire, partition, rows)
    finally:
        await wire.stop()


async def write_partition(
    plan: WritePlan, settings: Settings, wire: KafkaWire, partition: int, rows: Iterable[Row]
) -> dict[str, int | bool]:
    """The partition is seeded; a partition that was so already is left alone, and its rows are read to the end.

    Raises PartitionTruncated, TaskMigrated or CommitUnknown: another attempt writes it again.
    """
    topology = plan.topology
    session = session_of(topology, settings, wire, partition)
    feeding = TopicPartition(topology.feeding_topics[0], partition)
    await session.open()
    try:
        # Read in an epoch of ours: what an older attempt had on its way is decided by now.
        if await committed_offset(wire, topology.name, feeding) is not None:
            skipped = sum(1 for _ in rows)
            return {"partition": partition, "records": skipped, "was_there": True}
        # What this seed writes is all that its state counts on: a log that begins higher one day was truncated.
        kept_from = (await bounds_of(wire, TopicPartition(topology.changelog_topic, partition))).start
        count = await _write_rows(plan, settings, session, partition, rows)
        await _finish(plan, session, wire, partition, kept_from)
    finally:
        await session.drop()
    return {"partition": partition, "records": count, "was_there": False}


async def _write_rows(
    plan: WritePlan, settings: Settings, session: Session, partition: int, rows: Iterable[Row]
) -> int:
    changelog = TopicPartition(plan.topology.changelog_topic, partition)
    lines: list[Line] = []
    count, digest, now_ms = 0, 0, int(time.time() * 1000)
    for _, key, value, hashed in rows:
        lines.append((-1, now_ms, key, value, []))
        count += 1
        digest ^= hashed & DIGEST_MASK
        if len(lines) >= plan.commit_rows:
            await _insist(session, {changelog: lines}, settings.topics.compression)
            lines = []
    mark = plan.marks[partition]
    if (count, f"{digest:016x}") != (mark.sightings, mark.digest):
        raise PartitionTruncated(
            f"{changelog.topic}/{partition}: {count} of {mark.sightings} records arrived, with digest {digest:016x} "
            f"instead of {mark.digest}: a Spark task before this one failed. Nothing is finished by that; Spark tries "
            f"again."
        )
    if lines:
        await _insist(session, {changelog: lines}, settings.topics.compression)
    return count


async def _insist(session: Session, lines: Mapping[TopicPartition, list[Line]], compression: str) -> None:
    """Commit lines, in a new epoch if need be: written twice they say the same.

    Raises TaskMigrated where another owner has taken the partition, CommitUnknown after `MOST_ATTEMPTS`.
    """
    for attempt in range(MOST_ATTEMPTS):
        try:
            if attempt:
                await session.open()
            for target, part in lines.items():
                session.add(fill(target, part, compression=compression))
            await session.commit({})
        except CommitUnknown:
            # A leader that moved, or does not know yet a topic that was made a moment ago.
            if attempt + 1 == MOST_ATTEMPTS:
                raise
            await asyncio.sleep(LOOK_S)
        else:
            return


async def _finish(plan: WritePlan, session: Session, wire: KafkaWire, partition: int, kept_from: int) -> None:
    """Commit the last transaction: from now on a task may start."""
    topology, record = plan.topology, replace(plan.records[partition], kept_from=kept_from)
    mark = replace(plan.marks[partition], phase="seeded")
    now_ms = int(time.time() * 1000)
    closing: list[Line] = [
        (-1, now_ms, task_record_key(), encode_task_record(record), []),
        (-1, now_ms, SEED_MARK_KEY, encode_seed_mark(mark), []),
    ]
    feeding = TopicPartition(topology.feeding_topics[0], partition)
    for attempt in range(MOST_ATTEMPTS):
        try:
            if attempt:
                await session.open()
                # It may have been committed after all, and a task may have gone on from there: never set it back.
                if await committed_offset(wire, topology.name, feeding) is not None:
                    return
            session.add(fill(TopicPartition(topology.changelog_topic, partition), closing, compression="none"))
            await session.commit({feeding: record.next_offset})
        except CommitUnknown:
            if attempt + 1 == MOST_ATTEMPTS:
                raise
            await asyncio.sleep(LOOK_S)
        else:
            return


async def announce(topology: Topology, settings: Settings, wire: KafkaWire, marks: Mapping[int, SeedMark]) -> None:
    """Every partition says `seeding`, all in one transaction: no task can start on any of them before it is done."""
    for partition in marks:
        # Whatever a worker that was stopped still holds open must not be committed behind the marks.
        await session_of(topology, settings, wire, partition).open()
    now_ms = int(time.time() * 1000)
    lines: dict[TopicPartition, list[Line]] = {
        TopicPartition(topology.changelog_topic, partition): [(-1, now_ms, SEED_MARK_KEY, encode_seed_mark(mark), [])]
        for partition, mark in marks.items()
    }
    session = session_of(topology, settings, wire, min(marks))
    await session.open()
    await _insist(session, lines, "none")
    await session.drop()
