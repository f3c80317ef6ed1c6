"""Restore: the store brought up to the changelog's true end, in batches, from the store's own position.

The end is the high watermark read after InitProducerId: our transactions on the partition are ended by then, and what
another transactional id may still hold open hides nothing of ours for longer than its time-out. Committed records are
read until the *position* reaches the end; the last offsets may be transaction markers, or compacted away.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from dedup import crashpoints
from dedup.core.window import Window
from dedup.errors import StateIncompatible
from dedup.session.wire import LogBounds, NoAnswer, TopicPartition, Wire
from dedup.store.base import Store, TaskRecord, Writes
from dedup.store.changelog import Collected, all_within, collect
from dedup.store.regrid import rebucket
from dedup.store.seed_mark import SeedMark
from dedup.worker.starting import bounds_of

FETCH_BYTES: Final = 8 << 20
WAIT_MS: Final = 500
PAUSE_MS: Final = 50
LOOK_BACK: Final = 256
"""Offsets from the changelog's end in which a task record is looked for first; then in ever more."""
LOOK_BYTES: Final = 1 << 20

Progress = Callable[[int, int], None]
"""(offsets restored, offsets to restore in all)."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore read."""

    records: int
    start: int
    """Where the changelog began."""
    end: int


async def restore(
    wire: Wire,
    changelog: TopicPartition,
    store: Store,
    window: Window,
    progress: Progress,
    *,
    accept: Callable[[TaskRecord], None] = lambda _: None,
) -> Restored:
    """Apply all committed changelog records from the store's position to the true end.

    ``accept`` is shown the store's task record and those of the changelog, before anything they came with is applied;
    it may raise. Raises StateIncompatible, with the store untouched, where the changelog is not the one this store was
    written with; and where it holds a seed that was not finished.
    """
    bounds = await fitted(wire, changelog, store, window, accept)
    # Without a task record nothing was ever committed but perhaps half a seed, whose mark must be read again.
    position = bounds.start if store.task_record is None else max(store.position, bounds.start)
    begin, records = position, 0
    mark: SeedMark | None = None
    while position < bounds.end:
        try:
            fetched = await wire.fetch(changelog, position, max_bytes=FETCH_BYTES, wait_ms=WAIT_MS)
        except NoAnswer:
            await wire.pause(PAUSE_MS)
            continue
        except StateIncompatible as refused:
            position = await truncated_to(wire, changelog, position, store.task_record, refused)
            continue
        if fetched.next_offset > position:
            found = collect(fetched.keys, fetched.values)
            if found.task_record is not None:
                accept(found.task_record)
            apply_changelog(store, window, found, max(fetched.next_offset, store.position))
            mark = found.seed_mark or mark
            crashpoints.reached("in_restore")
            records += len(fetched.keys)
            position = fetched.next_offset
        progress(position - begin, bounds.end - begin)
    if store.task_record is None and mark is not None:
        refuse_half_seed(changelog, mark)
    return Restored(records, bounds.start, bounds.end)


async def last_task_record(wire: Wire, changelog: TopicPartition) -> TaskRecord | None:
    """Return the newest committed task record of a changelog partition; None where there is none."""
    bounds = await bounds_of(wire, changelog)
    begin, step = bounds.end, LOOK_BACK
    while begin > bounds.start:
        end, begin, step = begin, max(bounds.start, begin - step), 8 * step
        record = await _last_between(wire, changelog, begin, end)
        if record is not None:
            return record
    return None


async def _last_between(wire: Wire, changelog: TopicPartition, begin: int, end: int) -> TaskRecord | None:
    found: TaskRecord | None = None
    while begin < end:
        try:
            fetched = await wire.fetch(changelog, begin, max_bytes=LOOK_BYTES, wait_ms=WAIT_MS)
        except NoAnswer:
            await wire.pause(PAUSE_MS)
            continue
        below = bisect_left(fetched.offsets, end)
        found = collect(fetched.keys[:below], fetched.values[:below]).task_record or found
        begin = fetched.next_offset
    return found


async def fitted(
    wire: Wire, changelog: TopicPartition, store: Store, window: Window, accept: Callable[[TaskRecord], None]
) -> LogBounds:
    """The store can be brought up to its changelog, whose bounds are returned; ``accept`` as of `restore`.

    State in segments of another width, of another guard period, is forgotten: it is read anew from the changelog.
    Raises StateIncompatible, with nothing touched, where changelog and store do not belong together, or the changelog
    does not hold all that is to be read from it.
    """
    record = store.task_record
    if record is not None:
        accept(record)
    bounds = await bounds_of(wire, changelog)
    refuse_other_changelog(store, changelog, bounds)
    other_grid = record is not None and record.segment_ms != window.segment_ms
    if other_grid or store.position < bounds.start:
        await refuse_truncated(wire, changelog, bounds, record)
    if other_grid:
        store.clear()
    return bounds


async def refuse_truncated(wire: Wire, changelog: TopicPartition, bounds: LogBounds, held: TaskRecord | None) -> None:
    """Raise StateIncompatible if the changelog begins after records that its last task record counts on.

    And where it has none any more, but local state was written with one, ``held``: no owner deletes the last.
    """
    record = await last_task_record(wire, changelog)
    if record is None and held is not None:
        raise StateIncompatible(
            f"{changelog.topic}/{changelog.partition} begins at offset {bounds.start} and holds no task record, but "
            f"the local state was written with one: somebody has emptied the changelog. What was written after this "
            f"disk's state is gone. Nothing was touched. Start it where the newest disk is, or accept the loss of "
            f"these sightings with `dedup reset`."
        )
    if record is not None and record.counts_on_more(bounds.start):
        raise StateIncompatible(
            f"{changelog.topic}/{changelog.partition} begins at offset {bounds.start}, but its last task record says "
            f"that state in force was written from offset {record.kept_from} on: somebody has truncated the changelog. "
            f"This worker's disk does not hold what is gone, or holds it for another guard period. Nothing was "
            f"touched. Start it where the disk does, with the guard period before, or accept the loss of these "
            f"sightings with `dedup reset`."
        )


def refuse_half_seed(changelog: TopicPartition, mark: SeedMark) -> NoReturn:
    """Raise StateIncompatible: the seed of this partition began and did not end."""
    raise StateIncompatible(
        f"{changelog.topic}/{changelog.partition} holds half a seed: seed {mark.seed} was to write {mark.sightings} "
        f"records of sightings and never said that it was done. No record was judged. Run the same `dedup spark seed` "
        f"again, which finishes it; or give it up with `dedup reset`."
    )


async def truncated_to(
    wire: Wire, changelog: TopicPartition, position: int, held: TaskRecord | None, refused: StateIncompatible
) -> int:
    """Return the log's start, which an owner has moved past ``position``: it deletes only what no live segment needs.

    Raises ``refused``, the answer to a fetch, if the log still holds the position; StateIncompatible, too, if somebody
    else has moved it, past what is needed.
    """
    bounds = await bounds_of(wire, changelog)
    if bounds.start <= position:
        raise refused
    await refuse_truncated(wire, changelog, bounds, held)
    return bounds.start


def refuse_other_changelog(store: Store, changelog: TopicPartition, bounds: LogBounds) -> None:
    """Raise StateIncompatible if the changelog ends before the position the store was written at."""
    if store.position > bounds.end:
        raise StateIncompatible(
            f"{changelog.topic}/{changelog.partition} ends at offset {bounds.end}, but the local state was written at "
            f"offset {store.position}: the changelog was deleted, recreated or truncated. Nothing was touched. "
            f"Bring the changelog back, or accept the loss of its sightings with `dedup reset`."
        )


def refuse_other_fingerprint(found: bytes, ours: bytes, feeding: TopicPartition) -> None:
    """Raise StateIncompatible for state of a topology that would give other verdicts."""
    if found != ours:
        raise StateIncompatible(
            f"the state of {feeding.topic}/{feeding.partition} was written by a topology "
            f"with another ID rule, other source topics or partition counts (fingerprint "
            f"{found.hex()}, now {ours.hex()}). Nothing was touched. Go back to the "
            f"old topology, or give the state up with `dedup reset`."
        )


def refuse_other_feeding(record: TaskRecord, topic_id: str, feeding: TopicPartition) -> None:
    """Raise StateIncompatible where the feeding topic is not the one whose offsets a task record tells (KIP-516)."""
    if record.feeding_topic_id not in {"", topic_id}:
        raise StateIncompatible(
            f"{feeding.topic} was deleted and made again: {feeding} was judged up to offset {record.next_offset} of "
            f"the topic with id {record.feeding_topic_id}, and the one of that name has id {topic_id} now. To go on at "
            f"that offset would skip what is below it. Nothing was touched; start anew with `dedup reset`."
        )


def apply_changelog(store: Store, window: Window, found: Collected, next_offset: int) -> None:
    """Apply one fetch of changelog records as a single atomic write, all of it in segments of the window's width."""
    writes: Writes = found.writes
    if _other_grid(writes, window):
        # Written under another guard period: sightings move to the segments of today's grid.
        entries = [entry for part in writes.values() for entry in part.items()]
        ids = [key for key, _ in entries]
        writes = rebucket(entries, window.segment_ms, store.get_each(store.segments(), ids))
    record = found.task_record
    if record is not None:
        # What the record says of the grid is the owner's, who may have another guard period: here it says this store's.
        record = replace(record, segment_ms=window.segment_ms)
    store.apply(writes, record, next_offset)


def _other_grid(writes: Writes, window: Window) -> bool:
    """Tell whether a sighting stands in another segment than today's guard period would put it into."""
    width_ms = window.segment_ms
    return any(
        segment % width_ms or not all_within(part.values(), segment, segment + width_ms)
        for segment, part in writes.items()
    )
