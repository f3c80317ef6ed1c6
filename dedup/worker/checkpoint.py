"""Making a checkpoint: a changelog partition restored into a store of our own, which is then packed and put away.

Built from the changelog by the code every worker restores with, and not from a worker's disk: no worker is asked,
paused or needed, and nothing that only its disk says becomes a checkpoint (docs/decisions/0014-checkpoints.md). The
store is kept, so that the next checkpoint reads only what came after, as a standby does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dedup.errors import CheckpointUnusable, TaskCorrupted
from dedup.session.wire import TopicPartition
from dedup.store.archive import Moved
from dedup.store.base import TaskRecord
from dedup.store.checkpoint import Checkpoint
from dedup.store.depot import Depot
from dedup.worker.bootstrap import refuse_anothers
from dedup.worker.restore import Progress, refuse_other_fingerprint, restore
from dedup.worker.starting import bounds_of
from dedup.worker.transfer import transfer
from dedup.worker.workshop import Workshop

log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Made:
    """What was done for one partition."""

    partition: int
    records: int
    """Changelog records read for it."""
    checkpoint: Checkpoint | None
    """The one in force now; None where the partition has no state yet."""
    written: bool
    """Whether it is a new one: where nothing came since the last, there is none to make."""


@dataclass(frozen=True, slots=True)
class _Restored:
    record: TaskRecord | None
    position: int
    ids: int
    records: int


async def make_checkpoint(
    workshop: Workshop, depot: Depot, partition: int, *, restoring: Progress, packing: Callable[[int, int], None]
) -> Made:
    """The partition's checkpoint is its state at the changelog's end, as of now.

    The workshop's settings name a state directory that is nobody else's. ``restoring`` is told of changelog offsets,
    ``packing`` of bytes (done, in all). Raises StateIncompatible where changelog, topology and an older checkpoint do
    not belong together, and CheckpointUnusable where the place does not take it; what was in force is then.
    """
    wanted = workshop.wanted(partition)
    place = depot.place(wanted.identity.topology, partition)
    before = await transfer(lambda _: _in_force(depot, workshop.topology.name, partition), place)
    if before is not None:
        refuse_anothers(before, wanted, await bounds_of(workshop.wire, wanted.changelog), place)
    try:
        found = await _restored(workshop, partition, restoring)
    except TaskCorrupted as error:
        # What we keep is only to be quicker next time.
        log.warning("%s", error)
        workshop.wipe(TopicPartition(workshop.topology.feeding_topics[0], partition))
        found = await _restored(workshop, partition, restoring)
    record = found.record
    if record is None:
        return Made(partition, found.records, None, written=False)
    if before is not None and before.position == found.position:
        kept = before
        if await transfer(lambda _: depot.holds(kept), place):
            return Made(partition, found.records, before, written=False)
    total = sum(path.stat().st_size for path in wanted.directory.iterdir())

    def write(moved: Moved) -> Checkpoint:
        done = 0

        def told(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            packing(done, max(total, done))
            moved(size_bytes)

        return depot.write(
            wanted.directory, wanted.identity, record, position=found.position, ids=found.ids, moved=told
        )

    return Made(partition, found.records, await transfer(write, place), written=True)


def _in_force(depot: Depot, topology: str, partition: int) -> Checkpoint | None:
    """Return the checkpoint that is to be replaced; one that is damaged is replaced whatever it was."""
    try:
        return depot.find(topology, partition)
    except CheckpointUnusable as error:
        log.warning("the checkpoint in force can not be read, a new one takes its place: %s", error)
        return None


async def _restored(workshop: Workshop, partition: int, progress: Progress) -> _Restored:
    """Our store is at the changelog's end, without what has expired, and closed."""
    wanted, window = workshop.wanted(partition), workshop.topology.window
    store = workshop.open_store(partition)

    def accept(record: TaskRecord) -> None:
        refuse_other_fingerprint(record.fingerprint, wanted.fingerprint, wanted.feeding)

    try:
        read = await restore(workshop.wire, wanted.changelog, store, window, progress, accept=accept)
        record = store.task_record
        if record is not None:
            store.drop_below(window.oldest_live_ms(record.stream_time_ms), window.segment_ms)
        return _Restored(record, store.position, store.count_ids(), read.records)
    finally:
        store.close()
