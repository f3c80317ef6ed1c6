"""The work of a `dedup` task: verdicts on top of the state, sightings into the overlay, records to send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dedup.core.extract import Extracted, Extractor, Fault, FaultKind
from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.core.fold import Outcome, Rows, Rules, Sightings, fold
from dedup.core.stream_time import Feed, FeedProgress, StreamTime
from dedup.core.window import Sighting, Window
from dedup.errors import InvariantBroken, StateIncompatible
from dedup.metrics import TaskNumbers
from dedup.session.record_batch import OWN_ROW, Header, RecordBatch, TopicPartition, fill
from dedup.session.wire import Wire
from dedup.store.base import NOT_SAID, FeedTime, Store, TaskRecord
from dedup.store.changelog import (
    decode_sightings,
    encode_sighting,
    encode_single_column,
    encode_task_record,
    task_record_key,
)
from dedup.store.overlay import Overlay
from dedup.store.shelf import Keeping
from dedup.worker.batch import FeedBatch, gather
from dedup.worker.clock import Clock
from dedup.worker.misplaced import Placement
from dedup.worker.publish import Publisher
from dedup.worker.recent import Recent
from dedup.worker.restore import refuse_other_feeding, refuse_other_fingerprint, restore
from dedup.worker.sighting_batches import sighting_batches
from dedup.worker.starting import Start, first_offset
from dedup.worker.task import Frozen, Refusals
from dedup.worker.unwrap import unwrap

WARM_IDS: Final = 20_000
"""IDs whose filter a commit reads back after a restart, until all are: about 10 ms a commit."""
NO_HEADERS: Final[list[Header]] = []


@dataclass(frozen=True, slots=True)
class JudgePlan:
    """What a topology says about judging one partition."""

    feeding: TopicPartition
    changelog: TopicPartition
    feeds: tuple[Feed, ...]
    """Every source partition that can reach this task; a single one when it reads the source itself."""
    source_topics: tuple[str, ...]
    wrapped: bool
    """The feeding topic is our repartition topic: originals travel in reserved headers."""
    extractor: Extractor
    rules: Rules
    max_clock_skew_ms: int
    start: Start
    fingerprint: bytes
    compression: str
    feeding_topic_id: str = ""
    """Kafka's id of the feeding topic: offsets of one that was deleted and made again are other records'."""
    partitions: int = 1
    """Of the source topic, where it is read directly: IDs are sampled for being in the wrong one."""


class Judge:
    """A task's state and its verdicts; see `task.Work`."""

    def __init__(
        self,
        plan: JudgePlan,
        wire: Wire,
        keeping: Keeping,
        publisher: Publisher,
        clock: Clock,
        numbers: TaskNumbers,
    ) -> None:
        self._plan: Final = plan
        self._wire: Final = wire
        self._keeping: Final = keeping
        self._publisher: Final = publisher
        self._clock: Final = clock
        self._numbers: Final = numbers
        self._judged = TaskNumbers()
        """Verdicts of the open transaction: one that is aborted is judged again, and counted once."""
        self.recent: Final = Recent()
        self._store: Store | None = None
        self._began = 0
        """Where the changelog began at the restore."""
        self._overlay: Overlay | None = None
        self._applied = StreamTime.before(plan.feeds)
        self._stream_time = self._applied
        self._placement: Final = Placement(plan.feeding, plan.partitions, numbers)

    @property
    def oldest_live_ms(self) -> int:
        """The least event time at which an applied sighting must end to count still."""
        return self._plan.rules.window.oldest_live_ms(self._applied.value_ms)

    @property
    def changelog(self) -> TopicPartition:
        """Where the state is restored from."""
        return self._plan.changelog

    @property
    def truncate_below(self) -> int | None:
        """The lowest changelog offset that still belongs to a live segment; None where no segment is held.

        Made from applied state only. A sighting not applied yet is above: segments are born at or below the store's
        position, which the open transaction's records are not.
        """
        store = self._store
        record = None if store is None else store.task_record
        if store is None or record is None or record.kept_from == NOT_SAID:
            return None
        births = [birth for birth in map(store.first_offset, store.segments()) if birth is not None]
        # Not beyond what the last task record says, or an empty disk would take our doing for somebody else's: births
        # differ from owner to owner, and the next commit says ours.
        return min([*births, record.kept_from]) if births else None

    @property
    def store(self) -> Store | None:
        """The applied state; None before `restore`."""
        return self._store

    def _opened(self) -> Overlay:
        if self._overlay is None:
            raise InvariantBroken(f"the state of {self._plan.feeding} was used before it was restored.")
        return self._overlay

    async def restore(self, committed: int | None) -> int:
        """See `task.Work`; raises StateIncompatible, with nothing touched, where state and topology do not fit."""
        plan = self._plan
        if self._keeping.prepare is not None:
            await self._keeping.prepare()
        store = self._store = self._keeping.open()
        self._overlay = Overlay(store)
        self._numbers.restored = await self._restore(store)
        record = store.task_record
        if record is None:
            self._refuse_lost_state(committed)
            return committed if committed is not None else await first_offset(self._wire, plan.feeding, plan.start)
        self._applied = self._stream_time = _stream_time(record, plan.feeds)
        self._drop_expired()
        return max(committed or 0, record.next_offset)

    async def overtaken(self) -> bool:
        """See `task.Work`; the changelog holds a task record of every commit."""
        store = self._store
        if store is None:
            raise InvariantBroken(f"the state of {self._plan.feeding} was used before it was restored.")
        before = store.task_record
        await self._restore(store)
        return store.task_record != before

    async def _restore(self, store: Store) -> int:
        window, changelog = self._plan.rules.window, self._plan.changelog
        restored = await restore(self._wire, changelog, store, window, self._note_progress, accept=self._accept)
        self._began = restored.start
        return restored.records

    def _kept_from(self, stream_time_ms: int) -> int:
        """Return the changelog offset from which on all of the state is that is live at a stream time.

        At or above what `truncate_below` says once this is applied: the owner's own truncation is no loss. It rises as
        segments expire, and never because the changelog begins higher than before: that may be somebody else's doing,
        and then this disk alone holds what is gone.
        """
        store, window = self._store, self._plan.rules.window
        if store is None:
            raise InvariantBroken(f"the state of {self._plan.feeding} was used before it was restored.")
        oldest_ms = window.oldest_live_ms(stream_time_ms)
        live = [segment for segment in store.segments() if segment + window.segment_ms > oldest_ms]
        births = [birth for birth in map(store.first_offset, live) if birth is not None]
        record = store.task_record
        said = NOT_SAID if record is None else record.kept_from
        # A segment read back from the changelog was born at or above what the owner before us said.
        return max(self._began if said == NOT_SAID else said, min(births, default=store.position))

    def _note_progress(self, done: int, total: int) -> None:
        self._numbers.restore_remaining = max(0, total - done)
        self._numbers.restore_total = total

    def _refuse_lost_state(self, committed: int | None) -> None:
        # A store past offset 0 without a task record has lost nothing: the first transaction was aborted.
        if committed is None:
            return
        changelog = self._plan.changelog
        raise StateIncompatible(
            f"{changelog.topic}/{changelog.partition} holds no task record, although the group has judged records of "
            f"{self._plan.feeding.topic}/{self._plan.feeding.partition} up to offset {committed}: the changelog was "
            f"deleted or emptied. Nothing was touched. Bring it back, or start anew with `dedup reset`."
        )

    def _accept(self, record: TaskRecord) -> None:
        plan = self._plan
        refuse_other_fingerprint(record.fingerprint, plan.fingerprint, plan.feeding)
        refuse_other_feeding(record, plan.feeding_topic_id, plan.feeding)

    def judge(self, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch]:
        """See `task.Work`."""
        plan = self._plan
        unwrapped = unwrap(batch, plan.source_topics) if plan.wrapped else None
        plain = batch if unwrapped is None else unwrapped.batch
        extracted = plan.extractor(plain.keys, plain.values, plain.headers, plain.timestamps_ms)
        if refusals.rows or batch.odd_names:
            extracted = _with_faults(extracted, batch, refusals.rows)
        if unwrapped is None:
            rows = Rows(extracted, batch.offsets, plan.feeds)
        else:
            rows = Rows(extracted, unwrapped.sources, unwrapped.feeds, unwrapped.idle_rows)
        ceiling_ms = max(self._clock.now_ms(), self._applied.value_ms) + plan.max_clock_skew_ms
        outcome = fold(rows, plan.rules, self._stream_time, self._lookup, ceiling_ms=ceiling_ms)
        self._stream_time = outcome.stream_time
        self._count(outcome)
        self.recent.note(rows, outcome, self._clock.now_ms())
        self._placement.sample(extracted.ids)
        batches = self._publisher.publish(plain, rows, outcome, refusals.most_rows)
        return batches + self._remember(rows, outcome)

    def _lookup(self, ids: Sequence[bytes], least_ms: int) -> Mapping[bytes, Sightings]:
        overlay = self._opened()
        window = self._plan.rules.window
        from_ms = least_ms - window.guard_ms
        # None is too late: a sighting that was extended, if not under today's topology, reaches back from its end.
        segments = [start for start in overlay.segments() if start + window.segment_ms > from_ms]
        if not segments:
            return {}
        found = overlay.get_many(segments, ids)
        return {
            key: decode_sightings(values[0]) if len(values) == 1 and not window.extend else _longest(values)
            for key, values in found.items()
        }

    def _remember(self, rows: Rows, outcome: Outcome) -> list[RecordBatch]:
        """Put the new sightings into the open generation; return them as changelog batches."""
        overlay = self._opened()
        writes = self._writes(rows, outcome)
        if not writes:
            return []
        overlay.add(writes)
        now_ms, plan = self._clock.now_ms(), self._plan
        return sighting_batches(plan.changelog, writes, now_ms=now_ms, compression=plan.compression)

    def _writes(self, rows: Rows, outcome: Outcome) -> dict[int, dict[bytes, bytes]]:
        window = self._plan.rules.window
        writes: dict[int, dict[bytes, bytes]] = {}
        singles = outcome.singles
        if singles:
            for segment, feed, part in _grouped(singles, rows, outcome, window):
                fingerprints = rows.extracted.fingerprints
                taken = gather(part)
                values = encode_single_column(
                    taken(outcome.judged_times_ms),
                    feed.topic,
                    feed.partition,
                    taken(rows.sources),
                    None if fingerprints is None else taken(fingerprints),
                )
                writes.setdefault(segment, {}).update(zip(taken(rows.extracted.ids), values, strict=True))
        for (segment, key), sightings in outcome.rewritten.items():
            writes.setdefault(segment, {})[key] = encode_sighting(sightings)
        return writes

    def sightings_of(self, state_key: bytes) -> Sightings:
        """Return the sightings of one ID, committed or not, in no particular order."""
        if self._overlay is None:
            return ()
        found = self._overlay.get_many(self._overlay.segments(), [state_key])
        return _longest(found.get(state_key, []))

    def freeze(self, next_offset: int) -> Frozen:
        """See `task.Work`."""
        overlay = self._opened()
        stream_time, changelog = self._stream_time, self._plan.changelog
        generation = overlay.freeze()
        judged, self._judged = self._judged, TaskNumbers()
        noted = self.recent.freeze()
        record = self._record(stream_time, next_offset)
        line = (OWN_ROW, self._clock.now_ms(), task_record_key(), encode_task_record(record), NO_HEADERS)
        closing = fill(changelog, [line], compression="none")

        def apply(ends: Mapping[TopicPartition, int]) -> None:
            overlay.applied(generation, record, ends[changelog])
            self._applied = stream_time
            self._numbers.add_verdicts(judged)
            self.recent.commit(noted)
            self._numbers.stream_time_ms = stream_time.value_ms
            self._drop_expired()
            self._opened().warm(WARM_IDS)

        return Frozen(closing, apply)

    def _record(self, stream_time: StreamTime, next_offset: int) -> TaskRecord:
        feeds = tuple(
            FeedTime(feed.topic, feed.partition, progress.max_ms, progress.idle)
            for feed, progress in stream_time.feeds.items()
        )
        plan, time_ms = self._plan, stream_time.value_ms
        segment_ms, kept_from = plan.rules.window.segment_ms, self._kept_from(time_ms)
        return TaskRecord(plan.fingerprint, time_ms, feeds, next_offset, segment_ms, kept_from, plan.feeding_topic_id)

    def _drop_expired(self) -> None:
        """Drop segments that can not count any more, by *applied* stream time: the open transaction may yet abort."""
        overlay = self._opened()
        window = self._plan.rules.window
        oldest_ms = window.oldest_live_ms(self._applied.value_ms)
        overlay.drop_below(oldest_ms, window.segment_ms)

    def idle(self) -> list[RecordBatch]:
        """See `task.Work`; nobody feeds on what a judge writes."""
        return []

    def discard(self) -> None:
        """See `task.Work`."""
        if self._overlay is not None:
            self._overlay.discard()
        self._stream_time = self._applied
        self._judged = TaskNumbers()
        self.recent.discard()

    def close(self) -> None:
        """See `task.Work`."""
        # Whoever has the store next must not share it with us.
        store, self._store, self._overlay = self._store, None, None
        if store is not None:
            self._keeping.release(store)

    def _count(self, outcome: Outcome) -> None:
        verdicts = self._judged.verdicts
        verdicts["unique"] += len(outcome.unique)
        verdicts["duplicate"] += len(outcome.duplicates) + len(outcome.repeats) + len(outcome.conflicts)
        verdicts["late"] += len(outcome.late)
        verdicts["dead_letter"] += len(outcome.dead)
        verdicts["exempt"] += sum(1 for exempt in outcome.exempt.values() if exempt.why != "conflict")
        for _, dead in outcome.dead:
            self._judged.dead_reasons[dead.code] += 1
        self._judged.conflicts += len(outcome.conflicts)


def _grouped(singles: list[int], rows: Rows, outcome: Outcome, window: Window) -> Iterator[tuple[int, Feed, list[int]]]:
    """Yield (segment, feed, rows); nearly always one segment and one feed, so that is tried first."""
    times_ms = outcome.judged_times_ms
    taken = gather(singles)(times_ms)
    least, greatest = window.segment_of(min(taken)), window.segment_of(max(taken))
    if len(rows.feeds) == 1 and least == greatest:
        yield least, rows.feeds[0], singles
        return
    groups: defaultdict[tuple[int, Feed], list[int]] = defaultdict(list)
    for row in singles:
        feed = rows.feeds[row] if len(rows.feeds) > 1 else rows.feeds[0]
        groups[window.segment_of(times_ms[row]), feed].append(row)
    for (segment, feed), part in groups.items():
        yield segment, feed, part


def _longest(values: Sequence[bytes]) -> Sightings:
    """Return an ID's sightings; an extended one also stands, shorter, in the segments it was in before."""
    longest: dict[tuple[object, ...], Sighting] = {}
    for value in values:
        for seen in decode_sightings(value):
            name = (seen.first_ms, seen.source, seen.fingerprint)
            if name not in longest or longest[name].last_ms < seen.last_ms:
                longest[name] = seen
    return tuple(longest.values())


def _with_faults(extracted: Extracted, batch: FeedBatch, refused: Mapping[int, str]) -> Extracted:
    faults = dict(extracted.faults)
    for row, offset in enumerate(batch.offsets):
        if offset in refused:
            faults[row] = Fault(FaultKind.UNREADABLE, "refused_by_broker", refused[offset])
        elif offset in batch.odd_names:
            faults[row] = ODD_HEADER_NAME
    return replace(extracted, faults=faults)


def _stream_time(record: TaskRecord, feeds: tuple[Feed, ...]) -> StreamTime:
    known = {Feed(feed.topic, feed.partition): FeedProgress(feed.max_ms, feed.idle) for feed in record.feeds}
    return StreamTime(record.stream_time_ms, {feed: known.get(feed, FeedProgress()) for feed in feeds})
