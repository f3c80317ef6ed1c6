"""How a query that writes by `kafka_sink` begins: topics there, its generation of writers known, older ones fenced."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dedup.errors import StateIncompatible
from dedup.session.admin import Admin, WantedTopic
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.session.record_batch import Line, fill
from dedup.session.transaction import Session
from dedup.session.wire import TopicPartition
from dedup.spark.marker import PARTITION, Generation, Markers, marker_configs, query_key, read_markers
from dedup.worker.workshop import DEADLINE_MS

if TYPE_CHECKING:
    from dedup.settings import Settings


@dataclass(frozen=True, slots=True)
class SinkStart:
    """What writers need to know."""

    marker_topic: str
    generation: Generation
    topics: Mapping[str, int]
    """Partition counts."""


async def started(
    settings: Settings, name: str, topics: tuple[str, ...], partitions: int, checkpoint: str
) -> SinkStart:
    """Return the start of a query; a generation of other partitions or of another checkpoint is ended for good.

    Raises StateIncompatible where a topic is missing or the last epoch is half written.
    """
    marker_topic = f"{name}.markers"
    wire = KafkaWire(Connection.of(settings, client_id=f"{name}-driver"))
    await wire.start()
    try:
        async with Admin(wire.connection) as admin:
            have = await admin.topics((*topics, marker_topic))
            missing = [topic for topic in topics if topic not in have]
            if missing:
                raise StateIncompatible(f"{name}: topic {', '.join(map(repr, missing))} does not exist; make it first.")
            if marker_topic not in have:
                wanted = WantedTopic(marker_topic, 1, settings.topics.replication_factor, marker_configs(settings))
                await admin.create([wanted])
                await admin.settled([marker_topic])
        driver = _session(wire, settings, name, "driver")
        await driver.open()
        try:
            found = await read_markers(wire, marker_topic)
            generation = found.generation
            if generation is None or (generation.checkpoint, generation.partitions) != (checkpoint, partitions):
                generation = await _next(wire, settings, name, found, Generation(0, checkpoint, partitions, 0))
                line: Line = (-1, int(time.time() * 1000), query_key(), generation.encode(), [])
                driver.add(fill(TopicPartition(marker_topic, PARTITION), [line], compression="none"))
                await driver.commit({})
        finally:
            await driver.drop()
        return SinkStart(marker_topic, generation, {topic: have[topic].partitions for topic in topics})
    finally:
        await wire.stop()


def _session(wire: KafkaWire, settings: Settings, name: str, suffix: str) -> Session:
    own_id = f"{name}-{suffix}"
    return Session(wire, own_id, name, timeout_ms=settings.transaction_timeout_ms, deadline_ms=DEADLINE_MS)


async def _next(wire: KafkaWire, settings: Settings, name: str, found: Markers, wanted: Generation) -> Generation:
    """Return the generation after the one found, whose writers can write no more."""
    old = found.generation
    if old is None:
        return wanted
    for partition in range(old.partitions):
        session = _session(wire, settings, name, f"{old.number}-{partition}")
        await session.open()
        await session.drop()
    # Only now: what a fenced writer had in doubt is settled.
    settled = await read_markers(wire, f"{name}.markers")
    if old.checkpoint != wanted.checkpoint:
        return Generation(old.number + 1, wanted.checkpoint, wanted.partitions, 0)
    first_epoch = _whole_epochs(name, old, settled, wanted.partitions)
    return Generation(old.number + 1, wanted.checkpoint, wanted.partitions, first_epoch)


def _whole_epochs(name: str, old: Generation, settled: Markers, partitions: int) -> int:
    """Return the epoch after the last that all partitions have written."""
    marks = [settled.markers.get((old.number, partition)) for partition in range(old.partitions)]
    last = [old.first_epoch - 1 if mark is None else mark.epoch for mark in marks]
    if len(set(last)) == 1:
        return last[0] + 1
    done = sum(1 for epoch in last if epoch == max(last))
    raise StateIncompatible(
        f"{name}: epoch {max(last)} was written by {done} of {old.partitions} partitions when the query stopped; with "
        f"{partitions} partitions it could not be told which of its rows are missing. Nothing was written. Start the "
        f"query once more with {old.partitions} partitions, then change the number."
    )
