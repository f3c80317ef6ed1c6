"""Whether the stores that workers left on disk are the fold of their changelog."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from dedup.proof.kafka_reader import KafkaReader
from dedup.session.admin import Admin
from dedup.session.connection import Connection
from dedup.store.base import StoreIdentity
from dedup.store.changelog import collect
from dedup.store.directory import store_directory
from dedup.store.rocks import RocksStore

if TYPE_CHECKING:
    from dedup.settings import Settings
    from dedup.topology.model import Topology

Entries = dict[int, dict[bytes, bytes]]


def compare_stores(topology: Topology, settings: Settings, state_dirs: list[Path]) -> tuple[int, list[str]]:
    """Return how many stores were compared, and a sentence for each that differs. No worker may be running.

    A store that was left behind by an earlier owner must be the fold of the changelog up to its own position.
    """
    changelog = topology.changelog_topic
    compared, wrong = 0, []
    with KafkaReader(settings) as reader:
        partitions = reader.partitions([changelog])[changelog]
        topic_id = asyncio.run(_topic_id(settings, changelog))
        bounds = reader.bounds(changelog, range(partitions))
        for partition in range(partitions):
            identity = StoreIdentity(topology.name, partition, topic_id)
            for state_dir in state_dirs:
                directory = store_directory(state_dir, identity)
                if not directory.exists():
                    continue
                compared += 1
                store = RocksStore.open(directory, identity=identity)
                try:
                    log = _fold(reader, changelog, partition, bounds[partition].low, store.position)
                    why = _difference(topology, store, log)
                finally:
                    store.close()
                if why is not None:
                    wrong.append(f"{directory}: {why}")
    return compared, wrong


async def _topic_id(settings: Settings, topic: str) -> str:
    async with Admin(Connection.of(settings, client_id="dedup-chaos")) as admin:
        return (await admin.topics([topic]))[topic].topic_id


def _fold(reader: KafkaReader, changelog: str, partition: int, start: int, end: int) -> Entries:
    found: defaultdict[int, dict[bytes, bytes]] = defaultdict(dict)
    for columns in reader.read(changelog, partition, start, end):
        for segment, values in collect(columns.keys, columns.values).writes.items():
            found[segment].update(values)
    return dict(found)


def _difference(topology: Topology, store: RocksStore, log: Entries) -> str | None:
    held: defaultdict[int, dict[bytes, bytes]] = defaultdict(dict)
    for segment, state_key, value in store.sightings():
        held[segment][state_key] = value
    for segment, values in held.items():
        if log.get(segment) != values:
            return (
                f"segment {segment} holds {len(values)} IDs, its changelog {len(log.get(segment, {}))}, or other values"
            )
    record = store.task_record
    oldest_ms = topology.window.oldest_live_ms(record.stream_time_ms) if record is not None else 0
    for segment in log.keys() - held.keys():
        if segment + topology.window.segment_ms > oldest_ms:
            return f"segment {segment} with {len(log[segment])} IDs is in the changelog, and not in the store"
    return None
