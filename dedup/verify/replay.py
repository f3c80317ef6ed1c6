"""Replays a task's log with the exact model, and derives which records the task had to write to other topics.

`LogScan` reads the log once, in order, to compute stream time at each record. `TaskReplay` can then judge the records
in buckets, because a verdict depends only on stream time and on the records with the same ID.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dedup.core.extract import Extracted, Extractor
from dedup.core.reference_model import Feed, ModelFault, ModelRecord, ModelRules, ModelVerdict, ReferenceModel
from dedup.core.window import BEFORE_ALL_TIME, Sighting, Source
from dedup.topology.model import LateForward, Topology
from dedup.verify.compare import Headers, Wanted, digest
from dedup.verify.evidence import (
    FIRST_SOURCE_HEADER,
    FIRST_TIME_HEADER,
    REPLAYED_HEADER,
    SOURCE_HEADER,
    VERDICT_HEADER,
    Filed,
    SideTopic,
    extracted_of,
    header,
    parse_source,
)
from dedup.verify.kafka_reader import RecordColumns
from dedup.verify.report import Books, Report, ViolationKind
from dedup.verify.spill import condensed, stand_in_of

CopyKind = Literal["duplicates", "conflicts"]
REFUSED_BY_THE_BROKER: Final = "refused_by_broker"
"""The reason in a dead letter that the broker refused. A replay accepts the reason without proof."""
FUTURE: Final = "future_time"
"""The reason in the dead letter of a record whose event time is too far in the future."""
_FORGET_EVERY: Final = 200_000
_MANY_SIGHTINGS: Final = 64

WHY_FRONT: Final = "the log has lost its beginning, and too little event time precedes them in the rest of the log"
WHY_REFUSED: Final = "the broker refused them, according to the dead-letter topic"
WHY_CLOCK: Final = "dead letters for a future event time, which only the worker's wall clock can confirm"
WHY_CLAMPED: Final = "a time may have been clamped to the worker's wall clock, and stream time with it"
WHY_SIDE_GONE: Final = "the late or dead-letter topic has lost its beginning, or a transaction there stays open"
_ANY: Final = b"any"
_AFTER_ALL_TIME: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a topology, and the late and dead-letter topics, that a replay needs."""

    topology: Topology
    rules: ModelRules
    extract: Extractor
    late: SideTopic | None
    dead_letters: SideTopic
    late_digests: set[bytes] | None = None
    """Digests of all records that were forwarded as late, or None if these records are not known."""
    output_stamped: bool = True
    """True if the output keeps the records' timestamps (CreateTime), so that they can be compared."""

    @property
    def late_forwarded(self) -> bool:
        """True if the topology forwards late records with a mark."""
        return isinstance(self.topology.late, LateForward)

    @property
    def sides(self) -> list[SideTopic]:
        """The late topic, if there is one, and the dead-letter topic."""
        return [side for side in (self.late, self.dead_letters) if side is not None]

    def place(self, source: Source) -> str:
        """Return the topic, partition, and offset of a source record as text for reports."""
        return f"{self.topology.source.topics[source.topic]}/{source.partition} offset {source.offset}"


class Original(NamedTuple):
    """A record as it was in the source topic, but with its value shortened by `spill.condensed`."""

    source: Source
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int

    @classmethod
    def of(cls, columns: RecordColumns, at: int, source: Source) -> Self:
        """Return the record at index ``at`` of ``columns``."""
        value, headers = condensed(columns.values[at]), columns.headers[at]
        return cls(source, columns.keys[at], value, headers, columns.timestamps_ms[at])


class Row(NamedTuple):
    """A record of a log, with everything that its verdict depends on except the other records with the same ID."""

    position: int
    """The offset in the log."""
    source: Source
    key: bytes | None
    value: bytes | None
    """The value, condensed by `spill.condensed`."""
    headers: Headers
    timestamp_ms: int
    id: bytes | None
    time_ms: int
    fingerprint: bytes
    fault: ModelFault | None
    code: str
    """Code of the record's fault; empty if the record has no fault."""
    pending: bool
    """True if the record is at or after the committed offset, so that it may or may not have been judged."""
    replayed: bool
    before_ms: int
    """Stream time before this record was judged."""
    after_ms: int
    doubt_ms: int | None
    """Sightings up to this event time may be unknown, because the log lost their records; None if all are known."""
    doubt_by_clock: bool
    """True if the doubt arises from an event time that may have been clamped to the worker's clock."""
    late: Filed | None
    letter: Filed | None
    """The record's entry in the dead-letter topic, or None if there is none."""

    @classmethod
    def of(cls, values: list[object]) -> Row:
        """Convert the plain values that a spill stores to a `Row`."""
        values[1] = Source(*values[1])  # type: ignore[misc]  # its plain values
        for at in (-2, -1):
            entry = values[at]
            if entry is not None:
                values[at] = Filed(*entry)  # type: ignore[misc]  # as above
        return cls._make(values)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Consecutive records of a log, and what was found out about them."""

    columns: RecordColumns
    sources: Sequence[Source]
    extracted: Extracted
    late: Mapping[Source, Filed]
    letters: Mapping[Source, Filed]
    pending: bool

    def row(self, plan: Plan, at: int, stream_ms: tuple[int, int], doubt_ms: int | None, *, clamped: bool) -> Row:
        """Return the row of a record; ``stream_ms`` is stream time before and after it."""
        source, extracted, columns = self.sources[at], self.extracted, self.columns
        fault, headers, replayed = extracted.faults.get(at), columns.headers[at], False
        if headers:
            replayed = parse_source(header(headers, REPLAYED_HEADER), plan.topology.source.topics) is not None
        return Row(
            columns.offsets[at],
            source,
            columns.keys[at],
            condensed(columns.values[at]),
            headers,
            columns.timestamps_ms[at],
            None if fault is not None else extracted.ids[at],
            extracted.times_ms[at],
            b"" if extracted.fingerprints is None else extracted.fingerprints[at],
            None if fault is None else fault.kind.value,
            "" if fault is None else fault.code,
            self.pending,
            replayed,
            *stream_ms,
            doubt_ms,
            clamped,
            self.late.get(source),
            self.letters.get(source),
        )


def stream_times(
    model: ReferenceModel,
    feeds: Sequence[Feed],
    times_ms: npt.NDArray[np.int64],
    *,
    idle_rows: Sequence[int],
    unjudged: Sequence[int],
    letters: Sequence[int],
) -> list[int]:
    """Return stream time after each record, as `ReferenceModel.judge` calculates it, and advance the model to the end.

    The records at ``unjudged`` have a fault or no ID. Those at ``letters`` are dead letters by evidence, so they leave
    stream time and their feed as they are, unless their event time is negative.
    """
    count = len(feeds)
    marker, judged, skipped = np.zeros(count, bool), times_ms >= 0, np.zeros(count, bool)
    marker[list(idle_rows)] = True
    skipped[list(letters)] = True
    skipped &= judged
    judged[list(unjudged)] = False
    judged &= ~(marker | skipped)
    for feed in dict.fromkeys(feeds):
        model.greatest.setdefault(feed, BEFORE_ALL_TIME)
        model.idle.setdefault(feed, True)
    numbers = {feed: number for number, feed in enumerate(model.greatest)}
    owner = np.fromiter(map(numbers.__getitem__, feeds), np.int64, count)
    least, greatest = np.full(count, _AFTER_ALL_TIME), np.full(count, BEFORE_ALL_TIME)
    for feed, number in numbers.items():
        mine = owner == number
        own = np.maximum.accumulate(np.where(mine & judged, times_ms, BEFORE_ALL_TIME))
        np.maximum(own, model.greatest[feed], out=own)
        # The last record of the feed at or before each row says whether the feed is idle there.
        last = np.maximum.accumulate(np.where(mine & ~skipped, np.arange(count), -1))
        idle = np.where(last < 0, model.idle[feed], marker[last])
        np.minimum(least, own, out=least, where=~idle)
        np.maximum(greatest, own, out=greatest)
        if count:
            model.greatest[feed], model.idle[feed] = int(own[-1]), bool(idle[-1])
    candidate = np.where(least == _AFTER_ALL_TIME, greatest, least)
    candidate[~(judged | marker)] = BEFORE_ALL_TIME
    after = np.maximum(np.maximum.accumulate(candidate), model.stream_time_ms)
    model.stream_time_ms = int(after[-1]) if count else model.stream_time_ms
    found: list[int] = after.tolist()
    return found


class LogScan:
    """Reads one task's log in order, and tracks stream time and the event time up to which sightings may be unknown."""

    def __init__(self, plan: Plan, feeds: Sequence[Feed], *, from_start: bool) -> None:
        self._plan: Final = plan
        self._model: Final = ReferenceModel(plan.rules, feeds)
        """Judges all records under the same artificial ID, only to compute stream time."""
        self._from_start: Final = from_start
        self._anchor_ms: int | None = None
        self._clamped = False

    def rows(
        self,
        columns: RecordColumns,
        sources: Sequence[Source],
        *,
        idle_rows: Collection[int] = (),
        pending: bool = False,
        only: Collection[bytes] | None = None,
    ) -> Iterator[Row]:
        """Convert consecutive records of the log to rows; an idle marker yields no row but advances stream time.

        ``only`` are the IDs of the records to return, by default all records.
        """
        plan = self._plan
        extracted = extracted_of(plan.extract, columns)
        late = plan.late.take(sources) if plan.late is not None else {}
        batch = _Batch(columns, sources, extracted, late, plan.dead_letters.take(sources), pending)
        if self._from_start and plan.rules.future != "clamp":
            yield from self._rows_at_once(batch, idle_rows, only)
            return
        for at, source in enumerate(sources):
            if at in idle_rows:
                self._model.judge(ModelRecord(None, 0, source, idle=True))
                continue
            before_ms = self._model.stream_time_ms
            doubt_ms = self._doubt_after(batch, at)
            if only is None or extracted.ids[at] in only:
                yield batch.row(plan, at, (before_ms, self._model.stream_time_ms), doubt_ms, clamped=self._clamped)

    def _doubt_after(self, batch: _Batch, at: int) -> int | None:
        """Advance stream time by one record, and return the event time up to which sightings may be unknown."""
        source, extracted, plan = batch.sources[at], batch.extracted, self._plan
        fault, letter = extracted.faults.get(at), batch.letters.get(source)
        model_fault: ModelFault | None = None if fault is None else fault.kind.value
        record = ModelRecord(extracted.ids[at] if fault is None else None, extracted.times_ms[at], source)
        self._pass(record._replace(fault=model_fault), letter, pending=batch.pending)
        judged = record.id is not None and record.time_ms >= 0 and letter is None
        # Stream time before a judged record is unknown if the log's beginning was deleted.
        begins_in_doubt = judged and not self._from_start and self._anchor_ms is None
        if begins_in_doubt and not self._perhaps_late(Original.of(batch.columns, at, source), batch.late):
            # The record was unique, or a duplicate of a sighting that was still kept, whatever the record's age.
            rules = plan.rules
            longest_ms = rules.extend_at_most_ms if rules.extend else 0
            self._doubt_from(record.time_ms + 2 * rules.guard_ms + rules.grace_ms + longest_ms)
        if self._anchor_ms is None and not self._from_start:
            return max(record.time_ms, self._model.stream_time_ms) + plan.rules.grace_ms
        return self._anchor_ms

    def _rows_at_once(self, batch: _Batch, idle_rows: Collection[int], only: Collection[bytes] | None) -> Iterator[Row]:
        """Return the rows of a log whose beginning is there, with stream time calculated for all of them at once."""
        ids, faults = batch.extracted.ids, batch.extracted.faults
        letters = [at for at, source in enumerate(batch.sources) if source in batch.letters] if batch.letters else []
        before_ms = self._model.stream_time_ms
        after_ms = stream_times(
            self._model,
            [source[:2] for source in batch.sources],
            np.array(batch.extracted.times_ms, np.int64),
            idle_rows=sorted(idle_rows),
            unjudged=[at for at, own in enumerate(ids) if own is None or at in faults],
            letters=[at for at in letters if ids[at] is not None and at not in faults],
        )
        wanted = range(len(ids)) if only is None else [at for at, own in enumerate(ids) if own in only]
        for at in wanted:
            if at not in idle_rows:
                before = before_ms if at == 0 else after_ms[at - 1]
                yield batch.row(self._plan, at, (before, after_ms[at]), None, clamped=False)

    def _pass(self, record: ModelRecord, letter: Filed | None, *, pending: bool) -> None:
        """Judge a record only to advance stream time."""
        if record.id is None:
            self._model.judge(record)
            return
        if letter is not None and record.time_ms >= 0:
            return
        stream_time_ms, plan = self._model.stream_time_ms, self._plan
        ahead = record.time_ms > stream_time_ms + plan.topology.max_clock_skew_ms and not pending
        if ahead and plan.rules.future == "clamp" and stream_time_ms != BEFORE_ALL_TIME:
            # The record was accepted, so the worker's clock was ahead. A worker that clamps event times may have used a
            # different time.
            self._clamped = self._clamped or (self._from_start and self._anchor_ms is None)
            self._doubt_from(record.time_ms)
        self._model.judge(record._replace(id=_ANY))
        self._model.sightings.clear()

    def _perhaps_late(self, original: Original, late: Mapping[Source, Filed]) -> bool:
        """Return whether a record may have been late; workers write a dropped late record to no topic."""
        plan = self._plan
        if plan.late is not None:
            return original.source in late
        return plan.late_digests is None or forwarded_digest(plan, original, "late") in plan.late_digests

    def _doubt_from(self, time_ms: int) -> None:
        if self._anchor_ms is None or time_ms > self._anchor_ms:
            self._anchor_ms = time_ms


def forwarded_digest(plan: Plan, row: Row | Original, why: str = "") -> bytes:
    """Return the digest that a record must have in the output, including the headers that a worker appends."""
    headers, output = row.headers, plan.topology.output
    if why:
        headers = [*headers, (VERDICT_HEADER, why.encode())]
    if output is not None and output.headers:
        headers = [*headers, (SOURCE_HEADER, position(plan, row.source))]
    return digest(row.key, row.value, headers, row.timestamp_ms if plan.output_stamped else 0)


def position(plan: Plan, source: Source) -> bytes:
    """Return a source position in the form ``topic/partition/offset``, as in a worker's headers."""
    return f"{plan.topology.source.topics[source.topic]}/{source.partition}/{source.offset}".encode()


class Doubt:
    """Tracks IDs whose verdicts may depend on sightings that are unknown because the log lost their records."""

    def __init__(self, rules: ModelRules) -> None:
        self._retention_ms: Final = rules.guard_ms + rules.grace_ms
        self._ids: Final[dict[bytes, int]] = {}
        self._longest_ms: Final = rules.extend_at_most_ms if rules.extend else 0

    def about(self, tracking_id: bytes, time_ms: int, stream_time_ms: int, unseen_ms: int) -> bool:
        """Return whether a worker's verdict on a record may differ from the model's verdict, and remember a doubtful
        ID.

        Sightings up to the event time ``unseen_ms`` may be unknown.
        """
        oldest_ms = stream_time_ms - self._retention_ms
        doubtful = oldest_ms <= unseen_ms or self._ids.get(tracking_id, BEFORE_ALL_TIME) >= oldest_ms
        if doubtful:
            self._ids[tracking_id] = max(self._ids.get(tracking_id, BEFORE_ALL_TIME), time_ms + self._longest_ms)
        return doubtful

    def until_ms(self, tracking_id: bytes) -> int:
        """Return the event time up to which sightings of an ID are in doubt."""
        return self._ids.get(tracking_id, BEFORE_ALL_TIME)


class TaskReplay:
    """Judges the records in one bucket of a task's log, and collects the records that the task had to write."""

    def __init__(self, plan: Plan, books: Books, report: Report, feeds: Sequence[Feed]) -> None:
        self.books: Final = books
        self.forwarded: Final[list[Wanted]] = []
        """The records that the task must have written to the output."""
        self.copies: Final[dict[CopyKind, list[Wanted]]] = {"duplicates": [], "conflicts": []}
        """The records that the task must have written to the duplicates and conflicts topics."""
        self.uncertain = False
        """True if a verdict is not the only possible one, so that the counts may differ."""
        self._plan: Final = plan
        self._report: Final = report
        self._model: Final = ReferenceModel(plan.rules, feeds)
        self._doubt: Final = Doubt(plan.rules)
        self._pending = False
        self._taken = 0
        self._forget_at: Final[dict[bytes, int]] = {}
        """Maps each frequent ID to the number of sightings that causes expired sightings to be dropped."""
        rules, topology = plan.rules, plan.topology
        self._obvious: Final = (
            not rules.extend and rules.on_conflict == "duplicate" and not (topology.duplicates or topology.conflicts)
        )
        """Whether `_judged_at_a_glance` may judge records."""
        self._glanced: Final[dict[str, list[int]]] = {"unique": [], "duplicates": []}
        """The event times of the records that `_judged_at_a_glance` has judged."""

    def take(self, rows: Iterable[Row]) -> None:
        """Judge records, which must be in log order."""
        for row in rows:
            if not (self._obvious and self._judged_at_a_glance(row)):
                self._pending = row.pending
                self.books.replayed += row.replayed and not row.pending
                self._row(row)
                self._forget(row.id)
            self._taken += 1
            if self._taken % _FORGET_EVERY == 0:
                self._model.forget()
        for outcome, times_ms in self._glanced.items():
            setattr(self.books, outcome, getattr(self.books, outcome) + len(times_ms))
            self.books.read += len(times_ms)
            self._report.timeline.add_all(outcome, times_ms)
            times_ms.clear()

    def _judged_at_a_glance(self, row: Row) -> bool:
        """Judge a record if its ID has at most one sighting and nothing else is special about it; or return False.

        Most records are like this. The model has the same sightings afterwards as if it had judged the record.
        """
        time_ms, own, plan = row.time_ms, row.id, self._plan
        special = row.pending or row.replayed or row.late is not None or row.letter is not None or time_ms < 0
        if special or own is None or row.doubt_ms is not None:
            return False
        known, rules = self._model.sightings.get(own), plan.rules
        if not known:
            if time_ms < row.after_ms - rules.grace_ms:
                return False
            self._model.sightings[own] = [Sighting(time_ms, time_ms, row.source, row.fingerprint)]
            content = forwarded_digest(plan, row)
            self.forwarded.append(Wanted(content, own, row.source, row.position, False, False))  # noqa: FBT003  # a tuple
            self._glanced["unique"].append(time_ms)
            return True
        seen = known[0]
        in_range = -rules.guard_ms < time_ms - seen.first_ms < rules.guard_ms
        counts = seen.last_ms >= row.after_ms - rules.guard_ms - rules.grace_ms
        if len(known) > 1 or not in_range or not counts or seen.fingerprint != row.fingerprint:
            return False
        self._glanced["duplicates"].append(time_ms)
        return True

    def _forget(self, tracking_id: bytes | None) -> None:
        """Drop expired sightings of a frequent ID, because judging a record reads all sightings of its ID."""
        known = [] if tracking_id is None else self._model.sightings.get(tracking_id, [])
        if tracking_id is None or len(known) < self._forget_at.get(tracking_id, _MANY_SIGHTINGS):
            return
        oldest_ms = self._model.stream_time_ms - self._plan.rules.guard_ms - self._plan.rules.grace_ms
        known[:] = [seen for seen in known if seen.last_ms >= oldest_ms]
        self._forget_at[tracking_id] = max(_MANY_SIGHTINGS, 2 * len(known))

    def place(self, source: Source) -> str:
        """Return the topic, partition, and offset of a source record as text for reports."""
        return self._plan.place(source)

    def doubtful(self, tracking_id: bytes | None, time_ms: int, *, timed: bool) -> bool:
        """Return whether the verdict on a record or, if ``timed`` is false, on any record of its ID, was in doubt."""
        until_ms = BEFORE_ALL_TIME if tracking_id is None else self._doubt.until_ms(tracking_id)
        return time_ms <= until_ms if timed else until_ms > BEFORE_ALL_TIME

    def _row(self, row: Row) -> None:
        if not self._pending:
            self.books.read += 1
        if row.fault is None and row.letter is not None and row.time_ms >= 0:
            self._dead_by_evidence(row, row.letter)
            return
        source = row.source
        # Stream time depends on the whole log, not only on the records of this bucket.
        self._model.stream_time_ms = row.after_ms
        verdict = self._model.judge(ModelRecord(row.id, row.time_ms, source, row.fingerprint, row.fault))
        certain = self._certain(row, verdict)
        if row.late is not None and verdict.kind != "late":
            if self._plan.late is not None and certain:
                where = self._plan.late.place(row.late)
                self._violation("wrong_late", row, f"it is in {where}; the model says {verdict.kind}")
            certain = False
        match verdict.kind:
            case "unique" | "exempt":
                self._forward(row, verdict, certain=certain)
            case "duplicate":
                self._duplicate(row, verdict, certain=certain)
            case "late":
                self._late(row, verdict, certain=certain)
            case "dead_letter":
                self._dead(row, row.letter, row.code or verdict.reason)
            case _ if self._pending:
                pass
            case _:
                text = f"the topology says that the worker stops here ({verdict.reason})"
                self._violation("unbalanced", row, f"{text}, but the offset after it is committed")

    def _certain(self, row: Row, verdict: ModelVerdict) -> bool:
        """Return whether the verdict is the only possible one; if not, count the record as not provable."""
        if self._pending:
            return False
        if row.doubt_ms is None or row.id is None or verdict.kind == "dead_letter":
            return True
        why = WHY_CLAMPED if row.doubt_by_clock else WHY_FRONT
        beyond_ms = verdict.stream_time_ms - self._plan.rules.guard_ms - self._plan.rules.grace_ms
        if row.late is not None and verdict.kind == "unique" and beyond_ms <= row.doubt_ms:
            # The record is late because of records that were deleted.
            self._unprovable(why)
            return False
        if self._doubt.about(row.id, verdict.time_ms, verdict.stream_time_ms, row.doubt_ms):
            self._unprovable(why)
            return False
        return True

    def _dead_by_evidence(self, row: Row, letter: Filed) -> None:
        """Handle a dead letter for a record without a fault, which the clock or the broker may have refused."""
        far_ahead = row.time_ms > row.before_ms + self._plan.topology.max_clock_skew_ms
        by_clock = letter.reason == FUTURE and self._plan.rules.future == "dead_letter"
        if letter.reason == REFUSED_BY_THE_BROKER:
            self._unprovable(WHY_REFUSED)
            self._same(row, letter, self._plan.dead_letters)
        elif by_clock and row.time_ms > row.before_ms:
            # The record was judged before the dead letter was appended. If the dead letter was appended late enough,
            # the clock may have allowed the record's time.
            skew_ms = self._plan.topology.max_clock_skew_ms
            by_append = letter.at_ms is not None and row.time_ms > letter.at_ms + skew_ms
            if not (far_ahead and by_append):
                self._unprovable(WHY_CLOCK)
            self._same(row, letter, self._plan.dead_letters)
        elif not self._pending:
            where = self._plan.dead_letters.place(letter)
            self._violation("wrong_dead_letter", row, f'{where} says "{letter.reason}"; the model judges the record')
        self._count_dead(row)

    def _forward(self, row: Row, verdict: ModelVerdict, *, certain: bool) -> None:
        self._expect(row, "conflict" if verdict.conflict else verdict.reason, certain=certain)
        if verdict.kind == "exempt":
            self._count("exempt", None)  # a record without an ID or a value has no usable event time
        else:
            self._count("unique", verdict.time_ms)

    def _expect(self, row: Row, why: str | None, *, certain: bool) -> None:
        """Add a record to those expected in the output, with the verdict ``why`` in its header.

        If ``why`` is None, the model does not forward the record. Unless the verdict is ``certain``, the record may
        also have been forwarded with any other verdict, or not at all.
        """
        whys = set() if why is None else {why}
        if not certain and row.id is not None:
            whys |= {"", "late" if self._plan.late_forwarded else ""}
            whys.add("conflict" if self._plan.rules.on_conflict == "forward" else "")
        self.uncertain = self.uncertain or not (certain or self._pending)
        # The model's own verdict comes first.
        for each in sorted(whys, key=lambda each: (each != why, each)):
            self.forwarded.append(self._wanted(row, forwarded_digest(self._plan, row, each), certain=certain))

    def _wanted(self, row: Row, content: bytes, *, certain: bool) -> Wanted:
        return Wanted(content, row.id, row.source, row.position, not certain, self._pending)

    def _duplicate(self, row: Row, verdict: ModelVerdict, *, certain: bool) -> None:
        if not certain:
            # The record may have been the first one with its ID.
            self._expect(row, None, certain=False)
        topology, first = self._plan.topology, verdict.of
        kind: CopyKind = "conflicts" if verdict.conflict and topology.conflicts is not None else "duplicates"
        if first is not None and (kind == "conflicts" or topology.duplicates is not None):
            added = [
                (FIRST_TIME_HEADER, str(first.first_ms).encode()),
                (FIRST_SOURCE_HEADER, position(self._plan, first.source)),
            ]
            content = digest(row.key, row.value, [*row.headers, *added], 0)
            self.copies[kind].append(self._wanted(row, content, certain=certain))
        self._count("duplicates", verdict.time_ms)
        self.books.conflicts += verdict.conflict and not self._pending

    def _late(self, row: Row, verdict: ModelVerdict, *, certain: bool) -> None:
        self._count("late", verdict.time_ms)
        late = self._plan.late
        if self._plan.late_forwarded:
            self._expect(row, "late", certain=certain)
        elif late is not None and row.late is not None:
            self._same(row, row.late, late)
        elif not certain:
            self._expect(row, None, certain=False)
        elif late is not None and not late.complete:
            self._unprovable(WHY_SIDE_GONE)
        elif late is not None:
            behind_ms = verdict.stream_time_ms - verdict.time_ms
            self._violation("lost", row, f"late by {behind_ms} ms, but not in {late.name}")

    def _dead(self, row: Row, letter: Filed | None, code: str) -> None:
        self._count_dead(row)
        dead_letters = self._plan.dead_letters
        if letter is None:
            if not dead_letters.complete:
                self._unprovable(WHY_SIDE_GONE)
            elif not self._pending:
                self._violation("lost", row, f'dead letter for "{code}", but not in {dead_letters.name}')
            return
        self._same(row, letter, dead_letters)
        if letter.reason not in {code, REFUSED_BY_THE_BROKER}:
            text = f'{dead_letters.place(letter)} says "{letter.reason}"; the record says "{code}"'
            self._violation("wrong_dead_letter", row, text)

    def _same(self, row: Row, filed: Filed, side: SideTopic) -> None:
        """Check that a side topic contains the record unchanged, with the original timestamp in a header."""
        if filed.stands_for:
            same = filed.stands_for == stand_in_of(row.value)
        else:
            same = filed.digest == digest(row.key, row.value, row.headers, row.timestamp_ms)
        if not same:
            self._violation("changed", row, f"{side.place(filed)} differs in key, value, header, or original timestamp")

    def _count_dead(self, row: Row) -> None:
        far_ahead = row.letter is not None and row.letter.reason == FUTURE
        dated = row.fault is None and row.time_ms >= 0 and not far_ahead
        self._count("dead_letters", row.time_ms if dated else None)

    def _count(self, outcome: str, time_ms: int | None) -> None:
        """Count a judged record in the books and over event time; ``outcome`` is the name of a field in `Books`."""
        if not self._pending:
            setattr(self.books, outcome, getattr(self.books, outcome) + 1)
            self._report.timeline.add(outcome, time_ms)

    def _unprovable(self, why: str) -> None:
        if not self._pending:
            self.uncertain = True
            self.books.not_provable += 1
            self._report.unprovable(why)

    def _violation(self, kind: ViolationKind, row: Row, text: str) -> None:
        self._report.violation(kind, self.place(row.source), text)
