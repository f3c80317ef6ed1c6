"""What is on disk and in a cluster, to tell whether it was touched."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dedup.kafka.connection import Connection
from dedup.kafka.topic_admin import Admin
from dedup.store.base import StoreIdentity
from dedup.store.directory import store_directory
from dedup.store.rocks import RocksStore
from tests.integration.fleet import Job


def tree(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory with its content, but for RocksDB's own log of what it did."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith("LOG")
    }


def state_of(job: Job, worker_id: str, changelog_id: str) -> dict[int, tuple[object, ...]]:
    """Return what a worker that does not run has in its stores: task record and sightings."""
    found: dict[int, tuple[object, ...]] = {}
    for partition in range(job.partitions):
        identity = StoreIdentity(job.name, partition, changelog_id)
        store = RocksStore.open(store_directory(job.state_dir(worker_id), identity), identity=identity)
        found[partition] = (store.task_record, sorted(store.sightings()))
        store.close()
    return found


def topic_id(job: Job, topic: str) -> str:
    """Return the id that tells a topic from another one of its name."""

    async def ask() -> str:
        async with Admin(Connection.of(job.settings)) as admin:
            return (await admin.topics([topic]))[topic].topic_id

    return asyncio.run(ask())
