"""One task's log replayed through the exact model, and what must therefore be in the other topics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from dedup.core.extract import Extractor, Fault
from dedup.core.model import Feed, Model, ModelFault, ModelRecord, ModelRules, ModelVerdict
from dedup.core.window import BEFORE_ALL_TIME, Source
from dedup.proof.compare import Expected, digest
from dedup.proof.evidence import (
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
    stand_in,
)
from dedup.proof.kafka_reader import Columns
from dedup.proof.report import Books, Report, ViolationKind

REFUSED_BY_THE_BROKER: Final = "refused_by_broker"
"""Reason of dead letters that only the broker knew; the replay takes them as they are."""

_UNIQUE, _DUPLICATES, _LATE, _DEAD_LETTERS = range(4)
_FORGET_EVERY: Final = 200_000

WHY_FRONT: Final = "the log's beginning is gone; less than a full retention of event time precedes them in what is left"
WHY_REFUSED: Final = "the broker refused them, says the dead-letter topic"
WHY_CLOCK: Final = "dead letters for a time that only the worker's wall clock can have refused"
WHY_CLAMPED: Final = "a time was perhaps clamped to the worker's wall clock, and stream time with it"
WHY_SIDE_GONE: Final = "the late or dead-letter topic has lost its beginning, or a transaction there stays open"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a replay needs to know of a topology and of the topics it writes."""

    rules: ModelRules
    extract: Extractor
    topics: tuple[str, ...]
    """The source topics, by position."""
    max_clock_skew_ms: int
    source_header: bool
    """Forwarded records carry their source position."""
    late: SideTopic | None
    late_forwarded: bool
    dead_letters: SideTopic
    output_stamped: bool = True
    """The output keeps timestamps (CreateTime), so they can be compared."""
    duplicates: bool = False
    conflicts: bool = False


@dataclass(slots=True)
class Log:
    """Some records of a task's log, in order, with where each came from before any repartitioning."""

    columns: Columns
    sources: Sequence[Source]
    idle_rows: frozenset[int] = frozenset()


@dataclass(slots=True)
class Forwarded:
    """What must be in the output, row by row."""

    expected: Expected = field(default_factory=Expected)
    ids: list[bytes | None] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    times_ms: list[int] = field(default_factory=list)


class Doubt:
    """What a replay that did not see all of the log can not know: sightings and stream time of the unseen part.

    An ID stays in doubt as long as a sighting that may or may not exist can reach it.
    """

    def __init__(self, rules: ModelRules) -> None:
        self._rules: Final = rules
        self._retention_ms: Final = rules.guard_ms + rules.grace_ms
        self._anchor_ms: int | None = None
        self._ids: Final[dict[bytes, int]] = {}
        self._longest_ms: Final = rules.extend_at_most_ms if rules.extend else 0

    def start(self, time_ms: int) -> None:
        """Anything may have been seen, up to this event time."""
        if self._anchor_ms is None or time_ms > self._anchor_ms:
            self._anchor_ms = time_ms

    def about(self, tracking_id: bytes, time_ms: int, stream_time_ms: int) -> bool:
        """Tell whether the verdict on a record could be another than the model's; remembers that it could."""
        if self._anchor_ms is None:
            # The first record read was not late, or it would have been skipped: stream time was at most this.
            self.start(time_ms + self._rules.grace_ms)
        oldest_ms = stream_time_ms - self._retention_ms
        unseen = self._anchor_ms is None or oldest_ms <= self._anchor_ms
        doubtful = unseen or self._ids.get(tracking_id, BEFORE_ALL_TIME) >= oldest_ms
        if doubtful:
            self._ids[tracking_id] = max(self._ids.get(tracking_id, BEFORE_ALL_TIME), time_ms + self._longest_ms)
        return doubtful


class TaskReplay:
    """Takes a task's log batch by batch; afterwards knows what every topic must hold of it."""

    def __init__(self, plan: Plan, books: Books, report: Report, feeds: Sequence[Feed], *, from_start: bool) -> None:
        self.books: Final = books
        self.forwarded: Final = Forwarded()
        self.duplicates: Final = Expected()
        self.conflicts: Final = Expected()
        self._plan: Final = plan
        self._report: Final = report
        self._model: Final = Model(plan.rules, feeds)
        self._doubt: Doubt | None = None if from_start else Doubt(plan.rules)
        self._doubt_why = WHY_FRONT
        self._late_filed: Final = plan.late.filed if plan.late is not None else {}
        self._pending = False
        self._taken = 0

    @property
    def settled(self) -> bool:
        """Whether every verdict is certain, so that plain counts must agree too."""
        return not (self.forwarded.expected.optional or self.books.not_provable)

    def take(self, log: Log, *, pending: bool = False) -> None:
        """Replay some records. ``pending``: beyond the committed offset, so they may be judged or not."""
        columns, plan = log.columns, self._plan
        extracted = extracted_of(plan.extract, columns)
        fingerprints = extracted.fingerprints or [b""] * len(columns.keys)
        self._pending = pending
        for row, source in enumerate(log.sources):
            if row in log.idle_rows:
                self._model.judge(ModelRecord(None, 0, source, idle=True))
                continue
            fault = extracted.faults.get(row) if extracted.faults else None
            record = ModelRecord(extracted.ids[row], extracted.times_ms[row], source, fingerprints[row])
            own = columns.headers[row]
            if own and parse_source(header(own, REPLAYED_HEADER), plan.topics) is not None:
                self.books.replayed += not pending
            self._row(columns, row, record, fault)
        before = self._taken // _FORGET_EVERY
        self._taken += len(log.sources)
        if self._taken // _FORGET_EVERY > before:
            self._model.forget()

    def place(self, source: Source) -> str:
        """Return a source position, for people."""
        return f"{self._plan.topics[source.topic]}/{source.partition} offset {source.offset}"

    def _row(self, columns: Columns, row: int, record: ModelRecord, fault: Fault | None) -> None:
        if self._pending:
            self.books.pending += 1
        else:
            self.books.read += 1
        letter = self._plan.dead_letters.filed.pop(record.source, None)
        if fault is not None:
            record = record._replace(id=None, fault=_model_fault(fault))
        elif letter is not None and record.time_ms >= 0:
            self._dead_by_evidence(columns, row, record, letter)
            return
        elif record.time_ms > self._model.stream_time_ms + self._plan.max_clock_skew_ms:
            self._beyond_the_skew(record)
        verdict = self._model.judge(record)
        certain = self._certain(record, verdict)
        if self._late_filed and verdict.kind != "late":
            certain = self._not_late(record, verdict) and certain
        match verdict.kind:
            case "unique" | "exempt":
                self._forward(columns, row, record, verdict, certain=certain)
            case "duplicate":
                self._duplicate(columns, row, record, verdict, certain=certain)
            case "late":
                self._late(columns, row, record, verdict, certain=certain)
            case "dead_letter":
                self._dead(columns, row, record, letter, fault.code if fault is not None else verdict.reason)
            case _:
                self._failed(record, verdict)

    def _certain(self, record: ModelRecord, verdict: ModelVerdict) -> bool:
        """Tell whether the verdict is the only possible one; counts it where not."""
        if self._pending:
            return False
        if self._doubt is None or record.id is None or verdict.kind == "dead_letter":
            return True
        late = self._plan.late
        if late is not None and record.source in late.filed and verdict.kind == "unique":
            # It says nothing about how far stream time had come: the anchor waits for a record that was not late.
            self._unprovable(self._doubt_why)
            return False
        if self._doubt.about(record.id, verdict.time_ms, verdict.stream_time_ms):
            self._unprovable(self._doubt_why)
            return False
        return True

    def _beyond_the_skew(self, record: ModelRecord) -> None:
        """Accepted, so the worker's clock was ahead; where it clamps, it may have taken another time than this."""
        first = self._model.stream_time_ms == BEFORE_ALL_TIME
        if self._plan.rules.future == "clamp" and not (first or self._pending):
            if self._doubt is None:
                self._doubt, self._doubt_why = Doubt(self._plan.rules), WHY_CLAMPED
            self._doubt.start(record.time_ms)

    def _dead_by_evidence(self, columns: Columns, row: int, record: ModelRecord, letter: Filed) -> None:
        """Handle a dead letter that the record itself does not explain: the clock's, the broker's, or a wrong one."""
        stream_time_ms = self._model.stream_time_ms
        far_ahead = record.time_ms > stream_time_ms + self._plan.max_clock_skew_ms
        by_clock = letter.reason == "future_time" and self._plan.rules.future == "dead_letter"
        if letter.reason == REFUSED_BY_THE_BROKER:
            self._unprovable(WHY_REFUSED)
        elif by_clock and record.time_ms > stream_time_ms:
            if not far_ahead:
                self._unprovable(WHY_CLOCK)
            self._same(columns, row, record, letter, self._plan.dead_letters)
        elif not self._pending:
            where = self._plan.dead_letters.place(letter)
            self._violation("wrong_dead_letter", record.source, f'{where} says "{letter.reason}"; the model judges it')
        self._count_dead(record)

    def _not_late(self, record: ModelRecord, verdict: ModelVerdict) -> bool:
        """Tell whether the late topic rightly does not hold this record."""
        late = self._plan.late
        filed = late.filed.pop(record.source, None) if late is not None else None
        if late is None or filed is None:
            return True
        if not self._pending and self._doubt is None:
            text = f"it is in {late.place(filed)}; the model says {verdict.kind}"
            self._violation("wrong_late", record.source, text)
        return False

    def _forward(
        self, columns: Columns, row: int, record: ModelRecord, verdict: ModelVerdict, *, certain: bool
    ) -> None:
        why = "conflict" if verdict.conflict else verdict.reason
        self._expect(columns, row, record, why, certain=certain)
        if self._pending:
            return
        self.books.unique += 1
        self.books.exempt += bool(why)
        self._report.timeline.add(verdict.time_ms, _UNIQUE)

    def _expect(self, columns: Columns, row: int, record: ModelRecord, why: str = "", *, certain: bool) -> None:
        """``why``: the exemption that a header must name."""
        forwarded = self.forwarded
        if not certain:
            forwarded.expected.optional.add(len(forwarded.ids))
        forwarded.expected.digests.append(forwarded_digest(self._plan, columns, row, record.source, why))
        forwarded.ids.append(record.id)
        forwarded.sources.append(record.source)
        forwarded.times_ms.append(record.time_ms)

    def _duplicate(
        self, columns: Columns, row: int, record: ModelRecord, verdict: ModelVerdict, *, certain: bool
    ) -> None:
        if not certain:
            # In truth it may be the first of its ID.
            self._expect(columns, row, record, certain=False)
        topic = self.duplicates if self._plan.duplicates else None
        if verdict.conflict and self._plan.conflicts:
            topic = self.conflicts
        first = verdict.of
        if topic is not None and first is not None:
            if not certain:
                topic.optional.add(len(topic.digests))
            added = [
                (FIRST_TIME_HEADER, str(first.first_ms).encode()),
                (FIRST_SOURCE_HEADER, _position(self._plan, first.source)),
            ]
            headers = [*columns.headers[row], *added]
            topic.digests.append(digest(columns.keys[row], columns.values[row], headers, 0))
        if self._pending:
            return
        self.books.duplicates += 1
        self.books.conflicts += verdict.conflict
        self._report.timeline.add(verdict.time_ms, _DUPLICATES)

    def _late(self, columns: Columns, row: int, record: ModelRecord, verdict: ModelVerdict, *, certain: bool) -> None:
        if not self._pending:
            self.books.late += 1
            self._report.timeline.add(verdict.time_ms, _LATE)
        if self._plan.late_forwarded:
            self._expect(columns, row, record, "late", certain=certain)
        late = self._plan.late
        if late is None:
            return
        filed = late.filed.pop(record.source, None)
        if filed is not None:
            self._same(columns, row, record, filed, late)
        elif not certain:
            self._expect(columns, row, record, certain=False)
        elif not late.complete:
            self._unprovable(WHY_SIDE_GONE)
        else:
            behind_ms = verdict.stream_time_ms - verdict.time_ms
            self._violation("lost", record.source, f"late by {behind_ms} ms, but not in {late.name}")

    def _dead(self, columns: Columns, row: int, record: ModelRecord, letter: Filed | None, code: str) -> None:
        self._count_dead(record)
        dead_letters = self._plan.dead_letters
        if letter is None:
            if self._pending:
                return
            if dead_letters.complete:
                self._violation("lost", record.source, f'dead letter for "{code}", but not in {dead_letters.name}')
            else:
                self._unprovable(WHY_SIDE_GONE)
            return
        self._same(columns, row, record, letter, dead_letters)
        if letter.reason not in {code, REFUSED_BY_THE_BROKER}:
            text = f'{dead_letters.place(letter)} says "{letter.reason}"; the record says "{code}"'
            self._violation("wrong_dead_letter", record.source, text)

    def _same(self, columns: Columns, row: int, record: ModelRecord, filed: Filed, side: SideTopic) -> None:
        """Check that a side topic has the record unchanged, its timestamp in a header."""
        value = columns.values[row]
        if filed.stands_for:
            same = filed.stands_for == stand_in(value)
        else:
            wanted = digest(columns.keys[row], value, columns.headers[row], columns.timestamps_ms[row])
            same = filed.digest == wanted
        if not same:
            text = f"{side.place(filed)} has another key, value, header or original timestamp"
            self._violation("changed", record.source, text)

    def _failed(self, record: ModelRecord, verdict: ModelVerdict) -> None:
        if not self._pending:
            text = f"the topology says the worker stops here ({verdict.reason}), but the offset behind it is committed"
            self._violation("unbalanced", record.source, text)

    def _count_dead(self, record: ModelRecord) -> None:
        if not self._pending:
            self.books.dead_letters += 1
            self._report.timeline.add(max(record.time_ms, 0), _DEAD_LETTERS)

    def _unprovable(self, why: str) -> None:
        if not self._pending:
            self.books.not_provable += 1
            self._report.unprovable(why)

    def _violation(self, kind: ViolationKind, source: Source, text: str) -> None:
        self._report.violation(kind, self.place(source), text)


def forwarded_digest(plan: Plan, columns: Columns, row: int, source: Source, why: str = "") -> bytes:
    """Return the digest of a record as it must be in the output: our headers come after its own, in this order."""
    headers = columns.headers[row]
    if why:
        headers = [*headers, (VERDICT_HEADER, why.encode())]
    if plan.source_header:
        headers = [*headers, (SOURCE_HEADER, _position(plan, source))]
    timestamp_ms = columns.timestamps_ms[row] if plan.output_stamped else 0
    return digest(columns.keys[row], columns.values[row], headers, timestamp_ms)


def _position(plan: Plan, source: Source) -> bytes:
    return f"{plan.topics[source.topic]}/{source.partition}/{source.offset}".encode()


def _model_fault(fault: Fault) -> ModelFault:
    names: dict[str, ModelFault] = {
        "MISSING_ID": "missing_id",
        "UNREADABLE": "unreadable",
        "TOMBSTONE": "tombstone",
        "BAD_TIME": "bad_time",
    }
    return names[fault.kind.name]
