"""Restores a store, in batches, from its own position to the end of the changelog, and maintains standbys.

InitProducerId ends all earlier transactions of the task. A restore reads up to the high watermark that the task learns
after InitProducerId. The restore ends when the store's *position* reaches the high watermark, not at the last record,
because the last offsets may belong to transaction markers or to records that were compacted away.

If the guard period or the grace has changed but their sum has not, a restore does not notice the change, because the
state records only the segment width, which is half of that sum. A standby is a copy of another worker's store that is
kept up to date from the changelog.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from dedup import crashpoints
from dedup.core.window import BEFORE_ALL_TIME, Feed, Window
from dedup.errors import DedupError, StateIncompatible, TaskCorrupted
from dedup.kafka.wire import LogBounds, NoAnswer, TopicPartition, Wire
from dedup.quantities import format_duration, instant
from dedup.store.base import Store
from dedup.store.changelog import (
    Collected,
    SeedMark,
    TaskRecord,
    Writes,
    all_within,
    collect,
    decode_sightings,
    rebucket,
)
from dedup.store.directory import Keeping, close_or_delete
from dedup.store.write_buffer import unexpired
from dedup.topology.model import Topology
from dedup.worker.offsets import answered, at_once, bounds_of, committed_offset, committed_position, refuse_other_topics
from dedup.worker.topics import Cluster

log: Final = logging.getLogger(__name__)
_WIDTHS: Final = 2
"""The sum of the guard period and the grace, as a number of segment widths."""
FETCH_BYTES: Final = 1 << 20
"""The maximum number of compressed bytes that a restore reads in one step. Larger steps are slower, because their
objects do not fit into the processor's cache. Other tasks wait during a step.
"""
WAIT_MS: Final = 500
_SEARCHES_AT_ONCE: Final = 4
"""The number of changelogs that are searched at the same time. A fetch behind an open transaction takes `WAIT_MS`, and
later fetches from the same broker wait for it.
"""
MOST_LOOKS: Final = 20
_LOOK_AGAIN_MS: Final = 500
"""The number of times that a restore retries a search for records that must be in the changelog, and the pause before
each retry.
"""
_LOOK_BACK: Final = 256
"""The number of offsets at the changelog's end in which the search for a task record begins. The range then grows."""
_LOOK_BYTES: Final = 1 << 20
Progress = Callable[[int, int], None]
"""A callback that receives the number of restored offsets and the total number of offsets to restore."""


def changed(record: TaskRecord | None, window: Window) -> bool:
    """Return whether a task record was written with a different sum of the guard period and the grace."""
    return record is not None and record.segment_ms != window.segment_ms


def why_restored(changelog: TopicPartition, record: TaskRecord, window: Window) -> str:
    """Return a message about why the local state is restored again. ``record`` is the store's task record."""
    return (
        f"{changelog}: local state was written with guard_period + grace = "
        f"{_before(record)}, but the topology now has {format_duration(window.retention_ms)}. Sightings then "
        "belong to different segments, so all of them are read from the changelog again. Nothing is lost."
    )


def what_it_means(changelog: TopicPartition, record: TaskRecord, window: Window) -> str:
    """Describe the effect of a changed guard period or grace. ``record`` is the changelog's newest task record."""
    before_ms = _WIDTHS * record.segment_ms
    now, guard, grace = map(format_duration, (window.retention_ms, window.guard_ms, window.grace_ms))
    judged_now = (
        " `dedup verify` judges the whole log by the new values, so it may report records that were judged before the "
        'change; see "Verify after a change" in docs/operations.md.'
    )
    text = (
        f"guard_period + grace is {now} now ({guard} + {grace}), and was {_before(record)} when "
        f"{changelog} was last written; state contains only the sum, not the two values. "
    )
    if window.retention_ms < before_ms:
        return text + (
            "The sum is shorter and takes effect at once. An ID last seen a guard_period ago or longer is a new "
            "event, and sightings beyond the sum are forgotten." + judged_now
        )
    longer_ms = window.retention_ms - before_ms
    full = accepted = ""
    if record.stream_time_ms > BEFORE_ALL_TIME:
        full = f" (to {instant(record.stream_time_ms + longer_ms)})"
        # Sightings up to ``stream time - the old sum`` may be gone. With these sightings, the records could be
        # duplicates.
        accepted = f" with an event time before {instant(record.stream_time_ms - before_ms + window.guard_ms)}"
    return (
        text + "The sum is longer. Sightings that were forgotten stay forgotten, so until stream time has advanced by "
        f"the difference, {format_duration(longer_ms)}{full}, a record{accepted} may be forwarded although its ID was "
        "forwarded less than a guard_period earlier. If guard_period is shorter and grace is longer, the guard_period "
        "takes effect at once." + judged_now
    )


def _before(record: TaskRecord) -> str:
    return format_duration(_WIDTHS * record.segment_ms)


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore."""

    records: int
    start: int
    """The changelog's first offset at the time of the restore."""
    end: int
    record: TaskRecord | None = None
    """The newest task record that was read, as it was written, or None if no task record was read."""


async def restore(
    wire: Wire,
    changelog: TopicPartition,
    store: Store,
    window: Window,
    progress: Progress,
    *,
    accept: Callable[[TaskRecord], None] = lambda _: None,
) -> Restored:
    """Apply all committed changelog records from the store's position to the end of the changelog.

    ``accept`` is called with each task record before the record's sightings are applied, and may raise an exception.
    Raises StateIncompatible if the store does not match the changelog or if the changelog contains an unfinished seed.
    """
    bounds = await fitted(wire, changelog, store, window, accept)
    position = max(store.position, bounds.start)
    begin, records = position, 0
    newest: TaskRecord | None = None
    mark: SeedMark | None = None
    while position < bounds.end:
        ask = partial(wire.fetch, changelog, position, max_bytes=FETCH_BYTES, wait_ms=WAIT_MS)
        try:
            fetched = await answered(wire, ask)
        except StateIncompatible as refused:
            position = await truncated_to(wire, changelog, position, store.task_record, refused)
            continue
        if fetched.next_offset > position:
            found = collect(fetched.keys, fetched.values)
            if found.task_record is not None:
                accept(found.task_record)
                newest = found.task_record
            apply_changelog(store, window, found, fetched.next_offset)
            mark = found.seed_mark or mark
            crashpoints.reached("in_restore")
            records += len(fetched.keys)
            position = fetched.next_offset
        progress(position - begin, bounds.end - begin)
    if store.task_record is None and mark is not None:
        raise StateIncompatible(
            f"{changelog} holds half a seed: seed {mark.seed} was to write "
            f"{mark.sightings} records of sightings, but did not finish. No record was judged. To finish the seed, run "
            f"the same `dedup spark seed` again; to discard it, run `dedup reset`."
        )
    return Restored(records, bounds.start, bounds.end, newest)


async def last_task_record(wire: Wire, changelog: TopicPartition, *, stable: bool = True) -> TaskRecord | None:
    """Return the newest committed task record of a changelog partition, or None if the partition has none.

    If ``stable`` is True, the function waits until no transaction is open on the partition. Otherwise, the function
    reads only records that are already committed, because the transaction of a killed worker stays open until it times
    out.
    """
    bounds = await bounds_of(wire, changelog)
    begin, step = bounds.end, _LOOK_BACK
    found: TaskRecord | None = None
    while begin > bounds.start and found is None:
        end, begin, step = begin, max(bounds.start, begin - step), 8 * step
        position = begin
        while position < end:
            ask = partial(wire.fetch, changelog, position, max_bytes=_LOOK_BYTES, wait_ms=WAIT_MS)
            fetched = await answered(wire, ask)
            if not stable:
                end = min(end, fetched.last_stable_offset)
            below = bisect_left(fetched.offsets, end)
            found = collect(fetched.keys[:below], fetched.values[:below]).task_record or found
            position = fetched.next_offset
    return found


async def look_again(wire: Wire) -> None:
    """Before the next search for records that must be in the changelog, look up the partition leaders again, and wait.

    A broker that is cut off from its cluster may still assume that it leads the changelog, even though it lacks the
    newest records (KIP-320).
    """
    await wire.refresh()
    await wire.pause(_LOOK_AGAIN_MS)


async def bounds_reaching(wire: Wire, changelog: TopicPartition, position: int) -> LogBounds:
    """Return a changelog's bounds. If the changelog ends before ``position``, retry for about 10 s."""
    bounds = await bounds_of(wire, changelog)
    looks = 0
    while position > bounds.end and looks < MOST_LOOKS:
        looks += 1
        await look_again(wire)
        bounds = await bounds_of(wire, changelog)
    return bounds


async def fitted(
    wire: Wire, changelog: TopicPartition, store: Store, window: Window, accept: Callable[[TaskRecord], None]
) -> LogBounds:
    """Make sure that the store can be restored from its changelog, and return the changelog's bounds.

    If the window requires segments of a different width, or if the store has no task record, which would name the width
    of its segments, the store is cleared, and all state is read from the changelog again. (A store without a task
    record may also contain part of a seed, whose mark must then be read again.) Raises StateIncompatible and changes
    nothing if the store does not match the changelog or if the changelog lacks records that must be read. Also raises
    all exceptions that ``accept`` raises.
    """
    record = store.task_record
    if record is not None:
        accept(record)
    bounds = await bounds_reaching(wire, changelog, store.position)
    if store.position > bounds.end:
        raise StateIncompatible(
            f"{changelog} ends at offset {bounds.end}, but the local state was written at "
            f"offset {store.position}: the changelog was deleted, recreated or truncated. Nothing was changed. "
            f"Bring the changelog back, or accept the loss of its sightings with `dedup reset`."
        )
    anew = changed(record, window) if record is not None else store.position > 0
    if anew or store.position < bounds.start:
        await _refuse_truncated(wire, changelog, bounds, record)
    if anew:
        if record is not None:
            log.info("%s", why_restored(changelog, record, window))
        store.clear()
    return bounds


async def _refuse_truncated(wire: Wire, changelog: TopicPartition, bounds: LogBounds, held: TaskRecord | None) -> None:
    """Raise StateIncompatible if the start of the changelog lacks records that its last task record requires.

    The function also refuses a changelog without a task record if the local state has one (``held``), because owners
    never delete the last task record.
    """
    record = await last_task_record(wire, changelog)
    if record is None and held is not None:
        raise StateIncompatible(
            f"{changelog} begins at offset {bounds.start} and holds no task record, but "
            "the local state was written with one: somebody has emptied the changelog. Records written after this "
            "disk's state are lost. Nothing was changed. Start the worker that has the newest state, or accept the "
            "loss of these sightings with `dedup reset`."
        )
    if record is not None and record.counts_on_more(bounds.start):
        raise StateIncompatible(
            f"{changelog} begins at offset {bounds.start}, but its last task record says "
            f"that live state was written from offset {record.kept_from} on: somebody has truncated the changelog. "
            f"This worker's disk lacks the deleted records, or holds them for another guard period. Nothing was "
            f"changed. Start a worker whose disk holds them, with the previous guard period, or accept the loss of "
            f"these sightings with `dedup reset`."
        )


async def truncated_to(
    wire: Wire, changelog: TopicPartition, position: int, held: TaskRecord | None, refused: StateIncompatible
) -> int:
    """Return the new first offset of a changelog whose owner has deleted the record at ``position``.

    If a broker that is cut off from its cluster has refused the fetch, `truncated_to` looks for the current leader, and
    returns ``position``. Raises ``refused``, the fetch error, if the changelog still contains ``position`` or if no
    leader's log reaches it. Raises StateIncompatible if another program deleted records that live segments need.
    """
    bounds = await bounds_of(wire, changelog)
    if position > bounds.end:
        bounds = await bounds_reaching(wire, changelog, position)
        if bounds.start <= position <= bounds.end:
            return position
    if bounds.start <= position:
        raise refused
    await _refuse_truncated(wire, changelog, bounds, held)
    return bounds.start


def refuse_other_fingerprint(found: bytes, ours: bytes, feeding: TopicPartition) -> None:
    """Raise StateIncompatible if the state was written by a topology that would judge differently."""
    if found != ours:
        raise StateIncompatible(
            f"the state of {feeding} was written by a topology "
            f"with another ID rule, other source topics or partition counts (fingerprint "
            f"{found.hex()}, now {ours.hex()}). Nothing was changed. Use the old topology, or discard the state with "
            "`dedup reset`."
        )


def refuse_other_feeding(record: TaskRecord, topic_id: str, feeding: TopicPartition) -> None:
    """Raise StateIncompatible if a task record's offsets refer to another feeding topic (KIP-516)."""
    if record.feeding_topic_id not in {"", topic_id}:
        raise StateIncompatible(
            f"{feeding.topic} was deleted and recreated: {feeding} was judged up to offset {record.next_offset} of "
            f"the topic with id {record.feeding_topic_id}, and the one of that name has id {topic_id} now. To "
            "continue at that offset would skip the records below it. Nothing was changed; start over with `dedup "
            "reset`."
        )


async def refuse_other_state(topology: Topology, cluster: Cluster, wire: Wire) -> None:
    """Check the committed offsets and task records as tasks do when they start, but without fencing any owner.

    Raises StateIncompatible if a topic was recreated, if another topology wrote the state, or if offsets were deleted.
    """
    for place in cluster.places(dict.fromkeys((*topology.source.topics, *topology.feeding_topics))):
        found = await committed_position(wire, topology.name, place, stable=False)
        if found is not None:
            refuse_other_topics(found.metadata, cluster.offset_metadata(topology, place), place)
    await refuse_other_rule(topology, cluster, wire)
    await LostOffsets(topology, cluster, wire).refuse_any()


async def refuse_other_rule(topology: Topology, cluster: Cluster, wire: Wire) -> None:
    """Raise StateIncompatible if any changelog partition's newest task record is from a topology that would judge
    differently, or refers to another feeding topic.
    """
    fingerprint = topology.state_fingerprint(cluster.source_partitions(topology))
    feeding_topic = cluster.topics[topology.feeding_topics[0]]
    changelogs = cluster.places([topology.changelog_topic])
    records = await at_once(partial(last_task_record, wire, stable=False), changelogs, most=_SEARCHES_AT_ONCE)
    for changelog, record in records.items():
        if record is not None:
            feeding = TopicPartition(feeding_topic.name, changelog.partition)
            refuse_other_fingerprint(record.fingerprint, fingerprint, feeding)
            refuse_other_feeding(record, feeding_topic.topic_id, feeding)


def apply_changelog(store: Store, window: Window, found: Collected, next_offset: int) -> None:
    """Apply the changelog records of one fetch in a single atomic write, in segments of width ``window.segment_ms``.

    Segments that the newest task record shows to be expired are omitted.
    """
    writes: Writes = found.writes
    if moved := _moved(writes, window):
        entries = [(key, part[key]) for part in writes.values() for key in part.keys() & moved]
        held = store.get_each(store.segments(), list(moved))
        entries += [entry for part in held.values() for entry in part.items()]
        here = {segment: {k: v for k, v in part.items() if k not in moved} for segment, part in writes.items()}
        for segment, part in rebucket(entries, window.segment_ms).items():
            here.setdefault(segment, {}).update(part)
        writes = here
    record = found.task_record
    if record is not None:
        # The owner that wrote the record may have used another guard period or grace, and thus another segment width.
        record = replace(record, segment_ms=window.segment_ms)
    newest = record or store.task_record
    if newest is not None:
        writes = unexpired(writes, window.segment_ms, window.oldest_live_ms(newest.stream_time_ms))
    store.apply(writes, record, next_offset)


def _moved(writes: Writes, window: Window) -> set[bytes]:
    """Return the IDs with sightings that belong to segments other than their records' segments.

    The records were written with another guard period or grace, or they repeat sightings in later segments.
    """
    width_ms, moved = window.segment_ms, set[bytes]()
    for segment, part in writes.items():
        if segment % width_ms:
            moved |= part.keys()
        elif not all_within(part.values(), segment, segment + width_ms):
            ends = range(segment, segment + width_ms)
            moved |= {k for k, v in part.items() if any(seen.last_ms not in ends for seen in decode_sightings(v))}
    return moved


# If the group's offsets were deleted, a `repartition` task, which has no task record, would begin at `start`, and every
# record would get a second verdict. The changelog's task records show which source partitions were read. Both workers
# and tasks check for lost offsets when they start, because a group's offsets can be deleted while its only worker is
# frozen.


@dataclass(slots=True)
class LostOffsets:
    """Detects source partitions that were read but no longer have a committed offset."""

    topology: Topology
    cluster: Cluster
    wire: Wire
    look: asyncio.Task[set[Feed]] | None = field(init=False, default=None)
    """The latest search of the changelogs, or None. All tasks that start during the search share its result."""

    async def refuse_any(self) -> None:
        """Raise StateIncompatible if any source partition was read but no longer has a committed offset."""
        if self.topology.direct:
            return
        topics = self.topology.source.topics
        feeds = [Feed(topics.index(place.topic), place.partition) for place in self.cluster.places(topics)]
        missing = [feed for feed, none in (await at_once(self._has_none, feeds)).items() if none]
        read = await self._read_feeds() if missing else set()
        # In the meantime, another worker may have read the first record of a partition that was empty before. The
        # markers of that worker's transaction reach the changelog and the group's offsets in any order.
        lost = [feed for feed in missing if feed in read and await self._has_none(feed, stable=True)]
        if lost:
            raise self._refusal(lost)

    async def refuse(self, feed: Feed) -> None:
        """Raise StateIncompatible if records of a source partition without a committed offset have already been judged.

        The caller must have fenced all earlier owners of the partition. Concurrent calls share one search of the
        changelogs.
        """
        if self.look is None or self.look.done():
            self.look = asyncio.create_task(self._read_feeds(), name="look for lost offsets")
        # A revoked task must not cancel the search, because other tasks may wait for the search's result.
        if feed in await asyncio.shield(self.look):
            raise self._refusal([feed])

    async def _read_feeds(self) -> set[Feed]:
        """Return the source partitions that have judged records, according to the task records."""
        changelogs = self.cluster.topics[self.topology.changelog_topic].places
        search = partial(last_task_record, self.wire, stable=False)
        records = await at_once(search, changelogs, most=_SEARCHES_AT_ONCE)
        feeds = [feed for record in records.values() if record is not None for feed in record.feeds]
        return {Feed(feed.topic, feed.partition) for feed in feeds if feed.idle or feed.max_ms > BEFORE_ALL_TIME}

    async def _has_none(self, feed: Feed, *, stable: bool = False) -> bool:
        place = TopicPartition(self.topology.source.topics[feed.topic], feed.partition)
        return await committed_offset(self.wire, self.topology.name, place, stable=stable) is None

    def _refusal(self, lost: list[Feed]) -> StateIncompatible:
        topology = self.topology
        names = ", ".join(f"{topology.source.topics[feed.topic]}/{feed.partition}" for feed in lost)
        return StateIncompatible(
            f"the group {topology.name!r} has no offset of {names}, but task records in {topology.changelog_topic} say "
            f"that records from there were judged: offsets were deleted, and beginning at `start` again would judge "
            f"these records twice. Nothing was changed. Set the group's offsets to their previous values "
            f"(kafka-consumer-groups.sh --reset-offsets), or start over with `dedup reset`."
        )


IDLE_MS: Final = 100
_STEP_BYTES: Final = 256 << 10
"""The maximum size of a standby's step, in bytes of the changelog. The worker's own records wait during a step."""
SHARE: Final = 1.0
"""The pause of all standbys after a step, as a multiple of the time that the step took."""
_MOST_DAMAGES: Final = 2
"""The number of times that a standby's store may be found damaged before the standby stops until the next assignment.
"""


@dataclass(slots=True)
class Standbys:
    """Keeps the stores of this worker's standby partitions up to date."""

    wire: Wire
    changelog_topic: str
    window: Window
    fingerprint: bytes
    keeping: Callable[[int], Keeping]
    """Returns the functions that open and release the store of a partition."""
    lag: dict[int, int] = field(init=False, default_factory=dict)
    """Maps each partition to the number of changelog offsets that are not applied yet."""
    corrupted: int = field(init=False, default=0)
    """The number of times that a store was found damaged and deleted."""
    _damaged: Counter[int] = field(init=False, default_factory=Counter)
    _turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _stores: dict[int, Store] = field(init=False, default_factory=dict)
    _loops: dict[int, asyncio.Task[None]] = field(init=False, default_factory=dict)

    def assign(self, partitions: Iterable[int]) -> None:
        """Follow the changelogs of the given partitions, and stop all other standbys."""
        wanted = set(partitions)
        failed = {partition for partition, loop in self._loops.items() if loop.done()}
        self.release((self._loops.keys() - wanted) | failed)
        for partition in sorted(wanted - self._loops.keys()):
            self._start(partition)

    def _start(self, partition: int) -> None:
        self._loops[partition] = asyncio.create_task(self._follow(partition), name=f"standby {partition}")

    def release(self, partitions: Iterable[int]) -> None:
        """Stop the standbys of the given partitions, and release their stores, because tasks may be about to open these
        stores.
        """
        for partition in list(partitions):
            loop = self._loops.pop(partition, None)
            if loop is not None:
                loop.cancel()
            store = self._stores.pop(partition, None)
            if store is not None:
                self.keeping(partition).release(store)
            self.lag.pop(partition, None)

    async def _follow(self, partition: int) -> None:
        changelog = TopicPartition(self.changelog_topic, partition)
        try:
            keeping = self.keeping(partition)
            if keeping.prepare is not None:
                await keeping.prepare()
            if not self._is_own(partition):
                return  # a client has swallowed the cancellation, so a task may already use the store
            store = self._stores[partition] = keeping.open()
            bounds = await fitted(
                self.wire,
                changelog,
                store,
                self.window,
                lambda record: refuse_other_fingerprint(record.fingerprint, self.fingerprint, changelog),
            )
            position = max(store.position, bounds.start)
            while self._is_own(partition):
                position = await self._step(changelog, store, position)
        except Exception as error:  # noqa: BLE001  # it is logged
            # Without a standby, a new owner restores more slowly but still correctly.
            self._say_stopped(changelog, error)
            if self._is_own(partition):
                try:
                    self._let_go(partition, error)
                except Exception as failure:  # noqa: BLE001  # it is logged
                    self._say_stopped(changelog, failure)

    @staticmethod
    def _say_stopped(changelog: TopicPartition, error: Exception) -> None:
        if isinstance(error, TaskCorrupted):
            log.warning("standby of %s: %s", changelog, error)
        elif isinstance(error, DedupError):
            log.warning("standby of %s stopped: %s", changelog, error)
        else:
            text = "standby of %s stopped because of an unexpected error; please report it"
            log.error(text, changelog, exc_info=error)

    def _let_go(self, partition: int, error: Exception) -> None:
        """Close the store or, if it is damaged, delete it. After the first damage, follow the changelog again."""
        self.lag.pop(partition, None)
        store = self._stores.pop(partition, None)
        if not isinstance(error, TaskCorrupted):
            if store is not None:
                close_or_delete(store)
            return
        keeping = self.keeping(partition)
        if store is not None:
            keeping.release(store)
        keeping.wipe()
        self.corrupted += 1
        self._damaged[partition] += 1
        if self._damaged[partition] < _MOST_DAMAGES:
            self._start(partition)
            return
        log.warning(
            "standby of %s/%d stopped, because its store was damaged again, which a faulty disk may cause. Check the "
            "disk. The next rebalance starts the standby again.",
            self.changelog_topic,
            partition,
        )

    def _is_own(self, partition: int) -> bool:
        """Return whether the calling loop is still the one that follows the partition."""
        return self._loops.get(partition) is asyncio.current_task()

    async def _step(self, changelog: TopicPartition, store: Store, position: int) -> int:
        try:
            fetched = await self.wire.fetch(changelog, position, max_bytes=_STEP_BYTES, wait_ms=0)
        except NoAnswer:
            await self.wire.pause(IDLE_MS)
            return position
        except StateIncompatible as refused:
            return await truncated_to(self.wire, changelog, position, store.task_record, refused)
        if fetched.next_offset > position:
            async with self._turn:
                if not self._is_own(changelog.partition):
                    return position  # a client has swallowed the cancellation, and the store may belong to a task now
                began_s = time.monotonic()
                apply_changelog(store, self.window, collect(fetched.keys, fetched.values), fetched.next_offset)
                if store.task_record is not None:
                    oldest_ms = self.window.oldest_live_ms(store.task_record.stream_time_ms)
                    store.drop_below(oldest_ms, self.window.segment_ms)
                await asyncio.sleep(SHARE * (time.monotonic() - began_s))
        else:
            await self.wire.pause(IDLE_MS)
        self.lag[changelog.partition] = fetched.high_watermark - fetched.next_offset
        return fetched.next_offset
