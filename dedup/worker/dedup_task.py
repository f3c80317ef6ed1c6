"""Implements a `dedup` task, which judges records, buffers their sightings, and creates the records to send."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Final
from uuid import UUID

from dedup.core import tracking_id as encoding
from dedup.core.extract import Extract, Fault
from dedup.core.extract_one import EXTRACTED
from dedup.core.fold import Outcome, Rows, Rules, Sightings, fold
from dedup.core.partitioner import partitions
from dedup.core.window import Feed, FeedProgress, Sighting, StreamTime
from dedup.errors import ClockBehind, InvariantBroken, StateIncompatible
from dedup.kafka.record_batch import (
    BATCH_BYTES,
    NO_HEADERS,
    OWN_ROW,
    FeedBatch,
    Line,
    RecordBatch,
    equal_records,
    fill,
    gather,
)
from dedup.kafka.wire import Header, TopicPartition, Wire
from dedup.metrics import Judged, TaskNumbers
from dedup.store.base import Store
from dedup.store.changelog import (
    NOT_SAID,
    TASK_RECORD_KEY,
    FeedTime,
    TaskRecord,
    decode_sightings,
    encode_sighting,
    encode_single_column,
    encode_task_record,
    segment_prefix,
)
from dedup.store.directory import Keeping
from dedup.store.write_buffer import WriteBuffer
from dedup.worker.offsets import Start, kept_first_offset
from dedup.worker.record_collector import (
    IDLE,
    SOURCE,
    TIMESTAMP,
    Misfits,
    RecordCollector,
    Refusals,
    faults_of,
    refusal,
)
from dedup.worker.restore import (
    MOST_LOOKS,
    changed,
    look_again,
    refuse_other_feeding,
    refuse_other_fingerprint,
    restore,
    what_it_means,
)
from dedup.worker.task import Frozen, SteadyClock, TaskWork

log: Final = logging.getLogger(__name__)
_SAMPLED_IDS: Final = 8
"""The number of IDs in a sample. Hashing the IDs of a sample takes less time than judging a few hundred records."""
_SAMPLE_EVERY: Final = 10_000
"""The smallest number of records between two samples; without this limit, a task would sample every small batch."""
FOREIGN: Final = (
    "{topic}/{partition} offset {offset} was not written by a repartition task: it lacks the headers dedup-source and "
    "dedup-timestamp. Stop any other program that writes to that topic, then run `dedup reset`."
)
_WARM_IDS: Final = 20_000
"""The number of IDs that each commit after a restart loads into the Bloom filters, which takes about 10 ms. If a filter
has a log, each commit loads eight times as many IDs from the log.
"""
_MOST_FOLDS: Final = 3
"""The maximum number of folds of a whole batch before the batch is judged in parts. Each fold after the first turns one
more refused record into a dead letter.
"""
PIECE: Final = 64
"""The number of records in each part of a batch that is judged in parts. For each record that the target topic does not
accept, the part is folded once more.
"""
_IN_COLUMNS_FROM: Final = 32
"""The smallest number of sightings for which `equal_records`, which sets up a table of bytes, is faster than `fill`."""
_MOST_LATER: Final = 1_000
"""The maximum number of sightings from later segments that a changelog record repeats, which limits the record's size.
An ID has more such sightings only if it recurs a thousand times within the retention.
"""
_CLOCK_TOLERANCE_MS: Final = 1_000
"""The smallest difference between clocks, in ms, that can cause records to be judged again."""


@dataclass(slots=True)
class Placement:
    """Samples IDs, and warns if an ID is not in the partition that Kafka's default partitioner would choose for it."""

    feeding: TopicPartition
    count: int
    """The number of partitions of the topic."""
    numbers: TaskNumbers
    logged: set[Hashable]
    """See `DedupPlan.logged`. For each topic, only the first partition with a misplaced ID is logged."""
    passed: int = _SAMPLE_EVERY
    """The number of records since the last sample."""

    def sample(self, ids: Sequence[bytes | None]) -> None:
        """Count the sampled IDs and the misplaced IDs, and warn about the topic's first misplaced ID."""
        if self.count < 2:  # noqa: PLR2004  # with one partition, no ID is misplaced
            return
        self.passed += len(ids)
        if self.passed < _SAMPLE_EVERY:
            return
        self.passed = 0
        step = max(1, len(ids) // _SAMPLED_IDS)
        sampled = [record_key_of(state_key) for state_key in ids[::step][:_SAMPLED_IDS] if state_key is not None]
        keys = [key for key in sampled if key is not None]
        if not keys:
            return
        misplaced = sum(found != self.feeding.partition for found in partitions(keys, self.count))
        self.numbers.sampled += len(keys)
        self.numbers.misplaced += misplaced
        said = ("misplaced", self.feeding.topic)
        if misplaced and said not in self.logged:
            self.logged.add(said)
            log.warning(
                "%s: according to Kafka's default partitioner, %d of %d sampled IDs belong to another partition. If "
                "the topic is not keyed by the ID, equal IDs in different partitions are not recognized: remove "
                "`partitioned_by` from the topology. If its producers place IDs by another rule, ignore this warning. "
                "The metric dedup_misplaced_ids_total counts such IDs in all partitions.",
                self.feeding,
                misplaced,
                len(keys),
            )


def record_key_of(state_key: bytes) -> bytes | None:
    """Return the record key that a producer would write for an ID, or None for a digest, a composite ID, or a rare
    type.
    """
    tag, rest = state_key[:1], state_key[1:]
    match tag:
        case encoding.TEXT | encoding.BYTES | encoding.BIG_INTEGER:
            return rest
        case encoding.UUID:
            return str(UUID(bytes=rest)).encode()
        case encoding.INTEGER:
            return str(int.from_bytes(rest, "big", signed=True)).encode()
        case _:
            return None


def note_format(rows: Rows, row: int, plan: DedupPlan, judged: Judged) -> None:
    """Count a dead letter with an unexpected format, and log the first such dead letter of each topic and format."""
    fault = rows.extracted.faults.get(row)
    if fault is None or not fault.format_name:
        return
    judged.formats[fault.format_name] += 1
    source = rows.source(row)
    seen = (plan.source_topics[source.topic], fault.format_name)
    if seen not in plan.logged:
        plan.logged.add(seen)
        log.warning(
            "%s is a dead letter: %s. If all records of the topic are like this, none of them can be judged: make the "
            "producers write what `source.format` says, read JSON behind Schema Registry framing with `format: "
            "json_schema`, or take the tracking ID from the key or a header with `format: bytes`. "
            "This is logged once; the metric dedup_other_formats_total counts all of them.",
            source.place(plan.source_topics),
            fault.detail,
        )


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """Records as they were in the source topics, with each record's feed and source offset."""

    batch: FeedBatch
    """The records, with the offsets of the repartition topic but the timestamps and headers of the source topics."""
    feeds: Sequence[Feed]
    sources: Sequence[int]
    """The offset of each record in its source partition."""
    idle_rows: frozenset[int] = frozenset()


def unwrap(batch: FeedBatch, source_topics: tuple[str, ...]) -> Unwrapped:
    """Reconstruct the source records from a batch of the repartition topic, using the records' headers.

    Raises InvariantBroken if a record has no source position.
    """
    positions = {topic: position for position, topic in enumerate(source_topics)}
    feeds: list[Feed] = []
    sources: list[int] = []
    timestamps_ms: list[int] = []
    headers: list[list[Header]] = []
    idle_rows: set[int] = set()
    for row, own in enumerate(batch.headers):
        # The repartition task added the last two headers. The record's own headers may have the same names.
        ours = dict(own[-2:])
        timestamp, idle, source = ours.get(TIMESTAMP), ours.get(IDLE), ours.get(SOURCE)
        if idle is not None:
            source = idle + b"/-1"
            idle_rows.add(row)
        if timestamp is None or source is None:
            topic, number = batch.feeding
            raise InvariantBroken(FOREIGN.format(topic=topic, partition=number, offset=batch.offsets[row]))
        topic, partition, offset = source.decode().rsplit("/", 2)
        feeds.append(Feed(positions[topic], int(partition)))
        sources.append(int(offset))
        timestamps_ms.append(int(timestamp))
        headers.append(list(own[:-2]))
    plain = replace(batch, timestamps_ms=timestamps_ms, headers=headers)
    # A list with a single feed means that all records have this feed. A batch of one record also has such a list.
    return Unwrapped(plain, feeds, sources, frozenset(idle_rows))


def _without_extracted(batch: FeedBatch, idle_rows: Collection[int]) -> FeedBatch:
    """Return the batch without the header `EXTRACTED`, which is the last header of every record except idle markers.

    Raises InvariantBroken if a record that is not an idle marker lacks the header `EXTRACTED`.
    """
    for row, own in enumerate(batch.headers):
        if row not in idle_rows and (not own or own[-1][0] != EXTRACTED):
            topic, number = batch.feeding
            raise InvariantBroken(FOREIGN.format(topic=topic, partition=number, offset=batch.offsets[row]))
    return replace(batch, headers=[own[:-1] for own in batch.headers])


def sighting_batches(
    changelog: TopicPartition,
    writes: Mapping[int, Mapping[bytes, bytes]],
    *,
    now_ms: int,
    compression: str,
    most_bytes: int = BATCH_BYTES,
) -> list[RecordBatch]:
    """Return record batches for the changelog; ``writes`` maps each segment to the IDs and their encoded sightings.

    Earlier segments come first. A reader whose segments are wider merges a sighting of a later segment into the segment
    in which the ID's earlier sightings are, but a record of that segment replaces what the reader has there.
    """
    if len(writes) == 1 and len(next(iter(writes.values()))) >= _IN_COLUMNS_FROM:
        # In the usual case of one segment and IDs of equal length, the sightings can be arranged in columns.
        ((segment, part),) = writes.items()
        batch = equal_records(
            changelog,
            segment_prefix(segment),
            part.keys(),
            part.values(),
            timestamp_ms=now_ms,
            compression=compression,
            most_bytes=most_bytes,
        )
        if batch is not None:
            return [batch]
    parts = sorted(writes.items(), key=itemgetter(0))
    keys = [key for segment, part in parts for key in map(segment_prefix(segment).__add__, part)]
    values = [value for _, part in parts for value in part.values()]
    lines: Iterator[Line] = zip(repeat(OWN_ROW), repeat(now_ms), keys, values, repeat([]), strict=False)
    return fill(changelog, lines, compression=compression, most_bytes=most_bytes)


@dataclass(frozen=True, slots=True)
class DedupPlan:
    """A topology's rules for judging one partition."""

    feeding: TopicPartition
    changelog: TopicPartition
    feeds: tuple[Feed, ...]
    """The source partitions whose records can reach this task, except partitions that were added later. A task that
    reads the source topic directly has only one source partition.
    """
    source_topics: tuple[str, ...]
    wrapped: bool
    """True if the feeding topic is the repartition topic; see `unwrap`."""
    extractor: Extract
    rules: Rules
    max_clock_skew_ms: int
    start: Start
    fingerprint: bytes
    compression: str
    feeding_topic_id: str = ""
    """Kafka's ID of the feeding topic, which distinguishes it from a recreated topic of the same name."""
    logged: set[Hashable] = field(default_factory=set)
    """The messages that have already been logged. All tasks of the worker share this set."""
    begun: dict[TopicPartition, int] = field(default_factory=dict)
    """The first offsets of partitions without a commit; see `kept_first_offset`. All tasks of the worker share them."""
    by_arrival: bool = False
    """True if the task reads the source topic directly and must stop at a record without an append time."""
    ids_passed_on: bool = False
    """True if the records of the feeding topic have the header `EXTRACTED`."""
    partitions: int = 1
    """The partition count of the source topic, to detect misplaced IDs, or 1 if the task reads a repartition topic."""


@dataclass(frozen=True, slots=True)
class Future:
    """Describes one transaction's records whose event times are in the future according to the worker's clock."""

    least_ms: int
    """The smallest event time that is in the future."""
    put_forward_ms: int
    """The total correction of the clock by brokers, in ms, when the first record in the future was judged."""


class DedupTask(TaskWork):
    """Does the work of a `dedup` task, which keeps state and determines verdicts; see `TaskWork`."""

    def __init__(
        self,
        plan: DedupPlan,
        wire: Wire,
        keeping: Keeping,
        collector: RecordCollector,
        clock: SteadyClock,
        numbers: TaskNumbers,
    ) -> None:
        super().__init__(wire, collector, clock, numbers, by_arrival=plan.by_arrival)
        self.plan: Final = plan
        self._window: Final = plan.rules.window
        self._segment_ms: Final = self._window.segment_ms
        self._keeping: Final = keeping
        self._began = 0
        """The changelog's first offset at the time of the restore."""
        self._buffer: WriteBuffer | None = None
        self._applied = StreamTime.before(plan.feeds)
        self._stream_time = self._applied
        self._future: Future | None = None
        """The records of the open transaction whose event times were in the future, or None."""
        self._placement: Final = Placement(plan.feeding, plan.partitions, numbers, plan.logged)

    @property
    def oldest_live_ms(self) -> int:
        """The `last_ms` below which sightings are no longer live at the applied stream time."""
        return self._window.oldest_live_ms(self._applied.value_ms)

    @property
    def truncate_below(self) -> int | None:
        """The lowest changelog offset that a live segment needs, or None if there is no segment.

        Sightings that are not applied yet are ignored, because their changelog records have higher offsets.
        """
        store = self.store
        record = None if store is None else store.task_record
        if store is None or record is None or record.kept_from == NOT_SAID:
            return None
        births = store.segments().values()
        # The result never exceeds the offset in the last task record; otherwise, an owner with an empty disk would
        # assume that somebody else had deleted records.
        return min([*births, record.kept_from]) if births else None

    def _opened(self) -> tuple[Store, WriteBuffer]:
        if self.store is None or self._buffer is None:
            raise InvariantBroken(f"the state of {self.plan.feeding} was used before it was restored.")
        return self.store, self._buffer

    async def restore(self, committed: int | None, *, own: bool) -> int:
        """Implement `TaskWork.restore`. Raises StateIncompatible, and changes nothing, if the state does not fit the
        topology.
        """
        plan = self.plan
        if self._keeping.prepare is not None:
            await self._keeping.prepare()
        store = self.store = self._keeping.open()
        self._buffer = WriteBuffer(store)
        self._numbers.restored = await self._restore(store)
        if own and committed is not None:
            await self._reach(store, committed)
        record = store.task_record
        if record is None:
            if committed is None:
                # Even if the store's position is above 0, no state is lost, because the first transaction was aborted.
                return await kept_first_offset(self._wire, plan.feeding, plan.start, plan.begun)
            raise StateIncompatible(
                f"{plan.changelog} holds no task record, although the group has "
                f"judged records of {plan.feeding} up to offset {committed}: the changelog was "
                f"deleted or emptied. Nothing was changed. Bring it back, or start over with `dedup reset`."
            )
        known = {Feed(feed.topic, feed.partition): FeedProgress(feed.max_ms, feed.idle) for feed in record.feeds}
        feeds = dict.fromkeys(plan.feeds, FeedProgress()) | known
        self._applied = self._stream_time = StreamTime(record.stream_time_ms, feeds)
        self._numbers.reached(record.stream_time_ms)
        # Segments expire by the applied stream time, because the open transaction may still be aborted.
        store.drop_below(self.oldest_live_ms, self._segment_ms)
        return max(committed or 0, record.next_offset)

    async def _reach(self, store: Store, committed: int) -> None:
        """Repeat the restore until it finds the task record of the transaction that committed the group's offset.

        Raises StateIncompatible if the changelog lacks this task record even after several attempts.
        """
        looks = 0
        while (record := store.task_record) is not None and record.next_offset < committed and looks < MOST_LOOKS:
            looks += 1
            await look_again(self._wire)
            self._numbers.restored += await self._restore(store)
        if record is not None and record.next_offset < committed:
            raise StateIncompatible(
                f"{self.plan.changelog} lacks its newest records: the group has judged {self.plan.feeding} up to "
                f"offset {committed}, but the newest task record says {record.next_offset}. Either its leader is cut "
                "off from the cluster, or records were lost in an unclean leader election. Nothing was judged. Check "
                "the partition's leader; `dedup reset` starts over."
            )

    async def overtaken(self) -> bool:
        """Apply the changelog records of other owners, and return whether another owner has committed."""
        store, _ = self._opened()
        before = store.task_record
        await self._restore(store)
        return store.task_record != before

    async def _restore(self, store: Store) -> int:
        window, changelog = self._window, self.plan.changelog
        held = store.task_record
        restored = await restore(self._wire, changelog, store, window, self._note_progress, accept=self._accept)
        self._began = restored.start
        newest = restored.record or held
        if newest is not None and changed(newest, window) and "window changed" not in self.plan.logged:
            self.plan.logged.add("window changed")
            log.warning("%s", what_it_means(changelog, newest, window))
        return restored.records

    def _kept_from(self, oldest_ms: int) -> int:
        """Return a changelog offset at or before the first sighting that ends at ``oldest_ms`` or later.

        A partition's owner truncates the changelog only below an offset that an applied task record contains.
        Therefore, a restore can distinguish this truncation from a loss of records. The returned offset does not rise
        if somebody else has truncated the changelog, because only this worker's disk may still hold the deleted
        records.
        """
        store, _ = self._opened()
        births = [birth for start, birth in store.segments().items() if start + self._segment_ms > oldest_ms]
        record = store.task_record
        said = NOT_SAID if record is None else record.kept_from
        # The first offset of a restored segment is at or above the offset that the previous owner recorded.
        return max(self._began if said == NOT_SAID else said, min(births, default=store.position))

    def _note_progress(self, done: int, total: int) -> None:
        self._numbers.restore_remaining = max(0, total - done)
        self._numbers.restore_total = total

    def _accept(self, record: TaskRecord) -> None:
        plan = self.plan
        refuse_other_fingerprint(record.fingerprint, plan.fingerprint, plan.feeding)
        refuse_other_feeding(record, plan.feeding_topic_id, plan.feeding)

    def judge(self, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch]:
        """Implement `TaskWork.judge`."""
        self.collector.begin()
        judged = self._judged_in(_MOST_FOLDS, batch, refusals)
        if judged is not None:
            return judged
        batches = []
        for piece in batch.pieces(PIECE):
            judged = self._judged_in(len(piece) + 1, piece, refusals)
            if judged is None:
                raise InvariantBroken(f"{batch.feeding}: more records were left out than there are.")
            batches += judged
        return batches

    def _judged_in(self, most_folds: int, batch: FeedBatch, refusals: Refusals) -> list[RecordBatch] | None:
        """Judge a batch, or return None and change nothing if a record is still refused after ``most_folds`` folds.

        Each fold turns only one refused record into a dead letter, because a dead letter can change the verdicts on
        later records.
        """
        plan = self.plan
        source = unwrap(batch, plan.source_topics) if plan.wrapped else Unwrapped(batch, plan.feeds, batch.offsets)
        plain = source.batch
        original = plan.extractor(plain.keys, plain.values, plain.headers, plain.timestamps_ms)
        if plan.ids_passed_on:
            plain = _without_extracted(plain, source.idle_rows)
        now_ms = self._clock.now_ms()
        ceiling_ms = max(now_ms, self._applied.value_ms) + plan.max_clock_skew_ms
        refused: dict[int, Fault] = {}
        for _ in range(most_folds):
            extracted = original
            if refused or batch.odd_names:
                extracted = replace(original, faults={**original.faults, **faults_of(batch, refused)})
            rows = Rows(extracted, source.sources, source.feeds, source.idle_rows)
            outcome = fold(rows, plan.rules, self._stream_time, self._lookup, ceiling_ms=ceiling_ms)
            misfits: Misfits = {}
            batches = self.collector.publish(plain, rows, outcome, refusals, misfits)
            if not misfits:
                self._note_future(rows, outcome, ceiling_ms)
                self._stream_time = outcome.stream_time
                self._count(rows, outcome)
                self.recent.note(rows, outcome, now_ms)
                self._placement.sample(rows.extracted.ids)
                return batches + self._remember(rows, outcome, now_ms)
            refusals.rows.update(misfits)  # known misfits need not be measured again
            topic, first = min(misfits, key=itemgetter(1))
            refused[first] = refusal(topic, misfits[topic, first])
        return None

    def _note_future(self, rows: Rows, outcome: Outcome, ceiling_ms: int) -> None:
        """Note which records are in the future according to this worker's clock; a broker's clock may disagree."""
        if outcome.dead or outcome.clamped:
            future = [time_ms for time_ms in rows.extracted.times_ms if time_ms > ceiling_ms]
            if future:
                known = self._future or Future(min(future), self._clock.put_forward_ms)
                self._future = Future(min(known.least_ms, *future), known.put_forward_ms)

    def _confirm(self, future: Future | None, append_time_ms: int) -> None:
        """Raise ClockBehind if a record seemed to be in the future only because the worker's clock was behind."""
        if append_time_ms < 0:
            return  # the changelog was created by hand without LogAppendTime, so only the worker's clock is known
        self._clock.heard(append_time_ms)
        if future is None or self._clock.put_forward_ms - future.put_forward_ms < _CLOCK_TOLERANCE_MS:
            return
        if future.least_ms <= append_time_ms + self.plan.max_clock_skew_ms:
            raise ClockBehind(
                f"{self.plan.feeding}: an event time of {future.least_ms} ms was too far in the future by this "
                "machine's clock, but is not by the broker's."
            )

    def _lookup(self, ids: Sequence[bytes], least_ms: int) -> Mapping[bytes, Sightings]:
        window = self._window
        # The search covers all later segments, because an extended sighting is in the segment in which it ends.
        found = self._opened()[1].get_many(ids, after_ms=least_ms - window.guard_ms - self._segment_ms)
        return {
            key: decode_sightings(values[0]) if len(values) == 1 and not window.extend else _longest(values)
            for key, values in found.items()
        }

    def _remember(self, rows: Rows, outcome: Outcome, now_ms: int) -> list[RecordBatch]:
        writes, plan = self._writes(rows, outcome), self.plan
        if not writes:
            return []
        self._opened()[1].add(writes)
        # Before guard_period or grace was shortened, segments were wider, so an older changelog record with the same
        # key may also contain sightings that are now in later segments. The new record replaces the older record, so it
        # repeats these sightings.
        for (segment, key), later in outcome.later.items():
            nearest = sorted(later, key=attrgetter("last_ms"))[:_MOST_LATER]
            writes[segment][key] = encode_sighting((*outcome.rewritten[segment, key], *nearest))
        most = self.collector.limits.most_bytes(plan.changelog.topic)
        return sighting_batches(plan.changelog, writes, now_ms=now_ms, compression=plan.compression, most_bytes=most)

    def _writes(self, rows: Rows, outcome: Outcome) -> dict[int, dict[bytes, bytes]]:
        writes: dict[int, dict[bytes, bytes]] = {}
        if outcome.singles:
            for segment, feed, part in self._grouped(rows, outcome):
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

    def _grouped(self, rows: Rows, outcome: Outcome) -> Iterator[tuple[int, Feed, list[int]]]:
        times_ms, singles = outcome.judged_times_ms, outcome.singles
        taken = list(map(times_ms.__getitem__, singles))
        least = self._window.segment_of(min(taken))
        if len(rows.feeds) == 1 and max(taken) < least + self._segment_ms:
            yield least, rows.feeds[0], singles
            return
        groups: defaultdict[tuple[int, Feed], list[int]] = defaultdict(list)
        for row in singles:
            feed = rows.feeds[row] if len(rows.feeds) > 1 else rows.feeds[0]
            groups[self._window.segment_of(times_ms[row]), feed].append(row)
        for (segment, feed), part in groups.items():
            yield segment, feed, part

    def sightings_of(self, state_key: bytes) -> Sightings:
        """Return the sightings of one ID, committed or not, in no particular order."""
        if self._buffer is None:
            return ()
        found = self._buffer.get_many([state_key])
        return _longest(found.get(state_key, []))

    def freeze(self, next_offset: int) -> Frozen:
        """Implement `TaskWork.freeze`."""
        _, buffer = self._opened()
        plan, stream_time = self.plan, self._stream_time
        judged, self._judged = self._judged, Judged()
        noted = self.recent.freeze()
        generation = buffer.freeze()
        future, self._future = self._future, None
        oldest_ms = self._window.oldest_live_ms(stream_time.value_ms)
        feeds = tuple(
            FeedTime(feed.topic, feed.partition, progress.max_ms, progress.idle)
            for feed, progress in stream_time.feeds.items()
        )
        kept_from, time_ms = self._kept_from(oldest_ms), stream_time.value_ms
        record = TaskRecord(
            plan.fingerprint, time_ms, feeds, next_offset, self._segment_ms, kept_from, plan.feeding_topic_id
        )
        line = (OWN_ROW, self._clock.now_ms(), TASK_RECORD_KEY, encode_task_record(record), NO_HEADERS)
        closing = fill(plan.changelog, [line], compression="none")

        def apply(ends: Mapping[TopicPartition, int]) -> None:
            store, _ = self._opened()
            buffer.applied(generation, record, ends[plan.changelog], oldest_live_ms=oldest_ms)
            self._applied = stream_time
            self._numbers.add_verdicts(judged)
            self._numbers.reached(time_ms)
            self.recent.commit(noted)
            store.drop_below(oldest_ms, self._segment_ms)
            store.warm(_WARM_IDS)

        return Frozen(closing, apply, lambda append_time_ms: self._confirm(future, append_time_ms))

    def discard(self) -> None:
        """Implement `TaskWork.discard`."""
        if self._buffer is not None:
            self._buffer.discard()
        self._stream_time = self._applied
        self._future = None
        super().discard()

    def close(self) -> None:
        """Implement `TaskWork.close`."""
        # The task drops its reference first, because two owners must not share a store.
        store, self.store, self._buffer = self.store, None, None
        if store is not None:
            self._keeping.release(store)

    def _count(self, rows: Rows, outcome: Outcome) -> None:
        verdicts = self._judged.verdicts
        verdicts["unique"] += len(outcome.unique)
        verdicts["duplicate"] += len(outcome.duplicates) + len(outcome.repeats) + len(outcome.conflicts)
        verdicts["late"] += len(outcome.late)
        verdicts["dead_letter"] += len(outcome.dead)
        verdicts["exempt"] += sum(1 for exempt in outcome.exempt.values() if exempt != "conflict")
        for row, dead in outcome.dead:
            self._judged.dead_reasons[dead.code] += 1
            note_format(rows, row, self.plan, self._judged)
        self._judged.conflicts += len(outcome.conflicts)
        self._judged.filtered += outcome.filtered
        self._judged.flow_seconds += outcome.flow_seconds


def _longest(values: Sequence[bytes]) -> Sightings:
    """Merge an ID's sightings from several segments, and keep only the longest version of an extended sighting."""
    longest: dict[tuple[object, ...], Sighting] = {}
    for value in values:
        for seen in decode_sightings(value):
            name = (seen.first_ms, seen.source, seen.fingerprint)
            if name not in longest or longest[name].last_ms < seen.last_ms:
                longest[name] = seen
    return tuple(longest.values())
