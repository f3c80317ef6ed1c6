"""Makes a checkpoint: restores a changelog partition into a separate store, and saves that store's files.

A checkpoint is built from the changelog, so no worker has to pause, and a checkpoint never contains data that exists
only on a worker's disk (docs/decisions/0014-checkpoints.md). The separate store is kept, so the next checkpoint reads
only newer changelog records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dedup.errors import CheckpointUnusable, TaskCorrupted
from dedup.kafka.wire import TopicPartition
from dedup.store.changelog import TaskRecord
from dedup.store.checkpoint import Checkpoint, Moved, files_of
from dedup.store.checkpoint_storage import CheckpointStorage
from dedup.worker.bootstrap import bounds_for, refuse_anothers, transfer
from dedup.worker.restore import Progress, refuse_other_fingerprint, restore
from dedup.worker.task_factory import TaskFactory

log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MadeCheckpoint:
    """The result of making a checkpoint for one partition."""

    partition: int
    records: int
    """The number of changelog records that were read."""
    checkpoint: Checkpoint | None
    """The current checkpoint, or None if the partition has no state yet."""
    written: bool
    """True if a new checkpoint was made, or False if there was no new state since the last checkpoint."""
    written_bytes: int = 0
    """The total size, in bytes, of the files that were not in the storage before."""


async def make_checkpoint(
    factory: TaskFactory,
    storage: CheckpointStorage,
    partition: int,
    *,
    restoring: Progress,
    packing: Callable[[int, int], None],
) -> MadeCheckpoint:
    """Make a checkpoint of the partition's state at the current end of the changelog.

    No other process may use the state directory in the factory's settings. ``restoring`` and ``packing`` are called
    with (done, total): ``restoring`` with changelog offsets during the restore, and ``packing`` with bytes during the
    copy. Raises StateIncompatible if the changelog, the topology, and the current checkpoint do not match each other.
    Raises CheckpointUnusable if the new checkpoint cannot be stored; the current checkpoint then remains valid.
    """
    wanted = factory.wanted(partition)
    place = storage.place(wanted.identity.topology, partition)
    before = await transfer(lambda _: _in_force(storage, factory.topology.name, partition), place)
    if before is not None:
        refuse_anothers(before, wanted, await bounds_for(before, wanted, factory.wire), place)
    try:
        record, position, ids, read = await _restored(factory, partition, restoring)
    except TaskCorrupted as error:
        # The store of the last run only saves time, so deleting the store is safe.
        log.warning("%s", error)
        factory.wipe(TopicPartition(factory.topology.feeding_topics[0], partition))
        record, position, ids, read = await _restored(factory, partition, restoring)
    if record is None:
        return MadeCheckpoint(partition, read, None, written=False)
    if before is not None and before.position == position and await transfer(lambda _: storage.holds(before), place):
        return MadeCheckpoint(partition, read, before, written=False)
    total = sum(path.stat().st_size for path in files_of(wanted.directory))

    def write(moved: Moved) -> tuple[Checkpoint, int]:
        done = 0

        def packed(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            packing(done, total)
            moved(size_bytes)

        return storage.write(wanted.directory, wanted.identity, record, position=position, ids=ids, moved=packed)

    made, written_bytes = await transfer(write, place)
    return MadeCheckpoint(partition, read, made, written=True, written_bytes=written_bytes)


def _in_force(storage: CheckpointStorage, topology: str, partition: int) -> Checkpoint | None:
    try:
        return storage.find(topology, partition)
    except CheckpointUnusable as error:
        log.warning("the current checkpoint cannot be read, so a new one replaces it: %s", error)
        return None


async def _restored(
    factory: TaskFactory, partition: int, progress: Progress
) -> tuple[TaskRecord | None, int, int, int]:
    """Restore the store; return its task record, position, and ID count, and the number of changelog records read."""
    wanted, window = factory.wanted(partition), factory.topology.window
    store = factory.open_store(partition)

    def accept(record: TaskRecord) -> None:
        refuse_other_fingerprint(record.fingerprint, wanted.fingerprint, wanted.feeding)

    try:
        read = await restore(factory.wire, wanted.changelog, store, window, progress, accept=accept)
        record = store.task_record
        if record is not None:
            store.drop_below(window.oldest_live_ms(record.stream_time_ms), window.segment_ms)
        return record, store.position, store.count_ids(), read.records
    finally:
        store.close()
