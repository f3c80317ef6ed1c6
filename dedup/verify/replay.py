"""Replays a task's log with the exact model, and derives which records the task had to write to other topics.

`LogScan` reads the log once, in order, to compute stream time at each record. `TaskReplay` can then judge the records
in buckets, because a verdict depends only on stream time and on the records with the same ID.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from operator import eq, is_
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from dedup.core.extract_one import Fault
from dedup.core.flow import FLOW_FAILED, FlowRecord, differ
from dedup.core.formats import SCHEMA_UNKNOWN
from dedup.core.framing import FRAMING_FAULTS
from dedup.core.reference_model import Feed, ModelRecord, ModelRules, ModelVerdict, ReferenceModel
from dedup.core.window import BEFORE_ALL_TIME, Source
from dedup.topology.model import Topology
from dedup.verify.compare import Column, Expected, Headers, SureColumns, Wanted, digest_with
from dedup.verify.evidence import FIRST_SOURCE_HEADER, FIRST_TIME_HEADER, Filed, SideTopic, SourceTuple
from dedup.verify.flow_outputs import FlowOutput, FlowOutputs
from dedup.verify.log_scan import DoubtBy, Flowed, Log, Plan, Row, forwarded_digest, forwarded_digests, position
from dedup.verify.report import Books, Report, ViolationKind

CopyKind = Literal["duplicates", "conflicts"]
REFUSED_BY_THE_BROKER: Final = "refused_by_broker"
"""The reason in the dead letter of a record that the broker refused. A replay accepts this reason without proof."""
FUTURE: Final = "future_time"
"""The reason in the dead letter of a record whose event time is too far in the future."""
_FORGET_EVERY: Final = 200_000
_MANY_SIGHTINGS: Final = 64

WHY_FRONT: Final = "the log has lost its beginning, and too little event time precedes them in the rest of the log"
WHY_REFUSED: Final = "the broker refused them, according to the dead-letter topic"
WHY_SCHEMA: Final = "the schema registry did not know their schema when they were judged, and knows it now"
WHY_SCHEMA_GONE: Final = "the schema registry no longer knows their schema, so they cannot be judged again"
WHY_AFTER_SCHEMA_GONE: Final = (
    "an earlier record with a deleted schema may have the same ID, or may have made them late by advancing stream time"
)
WHY_CLOCK: Final = "dead letters for a future event time, which only the worker's wall clock can confirm"
WHY_CLAMPED: Final = "a time may have been clamped to the worker's wall clock, and stream time with it"
WHY_FLOW_GONE: Final = "a topic of the flow has lost records, or a transaction there stays open"
CHANGED_FLOW: Final = "the flow was changed since, or what it yields depends on more than the record"
_WHY_DOUBT: Final[dict[DoubtBy, str]] = {"": WHY_FRONT, "clock": WHY_CLAMPED, "schema": WHY_AFTER_SCHEMA_GONE}
_MOST_NAMED: Final = 5
WHY_SIDE_GONE: Final = (
    "the late or dead-letter topic has lost its beginning, or is compacted, or a transaction there stays open"
)


def by_evidence(topology: Topology) -> dict[str, str]:
    """Map each dead-letter reason that is accepted without proof to a sentence for the report."""
    by_registry = {SCHEMA_UNKNOWN: WHY_SCHEMA} if topology.source.needs_registry else {}
    return {REFUSED_BY_THE_BROKER: WHY_REFUSED, **by_registry}


def why_doubted(row: Row) -> str:
    """Return the reason why the verdict on a record with a `doubt_ms` may be wrong."""
    return _WHY_DOUBT[row.odd.doubt_by]


def copy_digest(plan: Plan, content: bytes, headers: Headers, first_ms: int, first: SourceTuple) -> bytes:
    """Return a duplicate's digest in the duplicates or conflicts topic, including the headers that name the first
    sighting.
    """
    added = [(FIRST_TIME_HEADER, b"%d" % first_ms), (FIRST_SOURCE_HEADER, position(plan, first))]
    return digest_with(content, [*headers, *added], 0)


def sure_columns(log: Log, contents: list[bytes]) -> SureColumns:
    """Return a log's records as records that must be in a topic, with the given digests."""
    return SureColumns(log.positions, contents, log.ids, log.sources())


def _first_rows(log: Log) -> Column:
    """Return, for each record, the row of the log's first record with the same ID."""
    rows: dict[bytes | None, int] = {}
    count = len(log.ids)
    return np.fromiter(map(rows.setdefault, log.ids, range(count)), np.int64, count)


class Doubt:
    """Tracks IDs whose verdicts may depend on sightings that are unknown because the log lost their records."""

    def __init__(self, rules: ModelRules) -> None:
        self._retention_ms: Final = rules.guard_ms + rules.grace_ms
        self._ids: Final[dict[bytes, int]] = {}
        self._longest_ms: Final = rules.extend_at_most_ms if rules.extend else 0

    def about(self, tracking_id: bytes, time_ms: int, stream_time_ms: int, unseen_ms: int) -> bool:
        """Return whether a worker's verdict may differ from the model's. If so, note that the record's ID is in doubt.

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
        self.forwarded: Final = Expected()
        """The records that the task must have written to the output."""
        self.copies: Final[dict[CopyKind, Expected]] = {"duplicates": Expected(), "conflicts": Expected()}
        """The records that the task must have written to the duplicates and conflicts topics."""
        self.uncertain = False
        """True if another verdict on some record is possible, so that the counts may differ."""
        self._plan: Final = plan
        self._report: Final = report
        self._model: Final = ReferenceModel(plan.rules, feeds)
        self._doubt: Final = Doubt(plan.rules)
        self._pending = False
        self._taken = 0
        self._flow_may: tuple[list[str], bool] = ([], True)
        """The verdicts with which the flow may have received the current record, and whether they are certain."""
        self._forwarded = False
        """True if the model forwards the current record, with the first verdict of `_flow_may`."""
        self.in_order = True
        """False if the positions in this log do not determine the order of the written records."""
        self.schema_gone = False
        """True if a record cannot be judged again because its schema was deleted, or if a verdict depends on such a
        record.

        Equal records may then have swapped verdicts, so the order of optional records proves nothing.
        """
        self.unknown_copies: Final[Counter[bytes]] = Counter()
        """The contents of the records that cannot be judged again and that may be in a topic of copies."""
        self._forget_at: Final[dict[bytes, int]] = {}
        """Maps each frequent ID to the number of sightings at which the ID's expired sightings are dropped."""

    def take(self, log: Log) -> None:
        """Judge all records of this bucket of the log."""
        at_once = self._at_a_glance(log)
        self._judge_at_once(log.at(np.flatnonzero(at_once)))
        for taken, row in enumerate(log.at(np.flatnonzero(~at_once)).rows(), start=1):
            self._pending = row.odd.pending
            self.books.replayed += row.odd.replayed and not row.odd.pending
            self._flow_may, self._forwarded = ([], True), False
            self._row(row)
            if self._plan.flowed is not None and row.flowed is not None and not row.odd.schema:
                self._compare_flow(row, row.flowed, self._plan.flowed)
            self._forget(row.id)
            if taken % _FORGET_EVERY == 0:
                self._model.forget()

    def _at_a_glance(self, log: Log) -> npt.NDArray[np.bool_]:
        """Return a mask of the records whose IDs have at most one sighting and whose verdicts are obvious.

        The first record with such an ID is unique. All other records with the ID have the same payload and are within a
        guard period of the first record, so they are its duplicates. The model judges the records of all other IDs, or
        all records if the topology has a flow.
        """
        count, rules, times_ms, prints = len(log.ids), self._plan.rules, log.times_ms, log.fingerprints
        if self._plan.topology.then:
            return np.zeros(count, bool)
        first = _first_rows(log)
        same = np.fromiter(map(eq, prints, map(prints.__getitem__, first.tolist())), bool, count)
        in_range = np.abs(times_ms - times_ms[first]) < rules.guard_ms
        counts = times_ms[first] >= log.after_ms - rules.guard_ms - rules.grace_ms
        in_time = times_ms >= log.after_ms - rules.grace_ms
        plain = np.fromiter(map(is_, log.odd, repeat(None)), bool, count) & (times_ms >= 0)
        plain &= np.where(first == np.arange(count), in_time, in_range & counts & same)
        special = np.zeros(count, bool)
        special[first[~plain]] = True
        return ~special[first]

    def _judge_at_once(self, log: Log) -> None:
        """Count the records that `_at_a_glance` selects, and expect each in the output or as a copy in `duplicates`."""
        first = _first_rows(log)
        unique = first == np.arange(len(log.ids))
        forwarded, repeated = log.at(np.flatnonzero(unique)), log.at(np.flatnonzero(~unique))
        self.forwarded.sure = sure_columns(forwarded, forwarded_digests(self._plan, forwarded))
        if self._plan.topology.duplicates is not None:
            rows = first[~unique].tolist()
            seen = log.times_ms[rows].tolist(), map(log.sources().__getitem__, rows)
            contents = map(partial(copy_digest, self._plan), repeated.contents, repeated.headers, *seen)
            self.copies["duplicates"].sure = sure_columns(repeated, list(contents))
        self.books.read += len(log.ids)
        self.books.unique += len(forwarded.ids)
        self.books.duplicates += len(repeated.ids)
        self._report.timeline.add_all("unique", forwarded.times_ms)
        self._report.timeline.add_all("duplicates", repeated.times_ms)

    def _forget(self, tracking_id: bytes | None) -> None:
        """Drop the expired sightings of a frequent ID, because every sighting slows down the judging of the ID."""
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
        """Return whether the verdict on a record is in doubt.

        If ``timed`` is false, return whether the verdict on any record with the same ID is in doubt.
        """
        until_ms = BEFORE_ALL_TIME if tracking_id is None else self._doubt.until_ms(tracking_id)
        return time_ms <= until_ms if timed else until_ms > BEFORE_ALL_TIME

    def _row(self, row: Row) -> None:
        if not self._pending:
            self.books.read += 1
        if row.odd.schema:
            self._unjudged(row)
            return
        if row.odd.fault is None and row.odd.letter is not None and row.time_ms >= 0:
            self._dead_by_evidence(row, row.odd.letter)
            return
        source = row.source
        # The whole log, not only this bucket, determines stream time.
        self._model.stream_time_ms = row.after_ms
        verdict = self._model.judge(ModelRecord(row.id, row.time_ms, source, row.fingerprint, row.odd.fault))
        certain = self._certain(row, verdict)
        if row.odd.late is not None and verdict.kind != "late":
            if self._plan.late is not None and certain:
                where = self._plan.late.place(row.odd.late)
                self._violation("wrong_late", row, f"it is in {where}; the model says {verdict.kind}")
            certain = False
        self._as_judged(row, verdict, certain=certain)

    def _as_judged(self, row: Row, verdict: ModelVerdict, *, certain: bool) -> None:
        match verdict.kind:
            case "unique" | "exempt":
                self._forward(row, verdict, certain=certain)
            case "duplicate":
                self._duplicate(row, verdict, certain=certain)
            case "late":
                self._late(row, verdict, certain=certain)
            case "dead_letter":
                self._dead(row, row.odd.letter, row.odd.code or verdict.reason)
            case _ if self._pending:
                pass
            case _ if not certain:
                self._count("unjudged", None)
            case _:
                text = f"the topology says that the worker stops here ({verdict.reason})"
                self._violation("unbalanced", row, f"{text}, but the offset after it is committed")

    def _unjudged(self, row: Row) -> None:
        """Account for a record with a deleted schema. Its ID is unknown, and its event time may also be unknown."""
        self.schema_gone, letter, late = True, row.odd.letter, row.odd.late
        self._unprovable(WHY_SCHEMA_GONE)
        if letter is not None:
            self._count("dead_letters", None)
            self._same(row, letter, self._plan.dead_letters)
        elif late is not None and self._plan.late is not None:
            self._count("late", None)
            self._same(row, late, self._plan.late)
        else:
            self._count("unjudged", None)
            self.unknown_copies[row.content] += 1
            whys = [*self._verdicts(), *(["missing_id"] if self._plan.rules.missing == "forward" else [])]
            for why in whys if self._plan.flowed is None else ():
                self.forwarded.others.append(self._wanted(row, forwarded_digest(self._plan, row, why), certain=False))

    def _certain(self, row: Row, verdict: ModelVerdict) -> bool:
        """Return whether no other verdict is possible. Otherwise, count the record as not provable."""
        if self._pending:
            return False
        if row.odd.doubt_ms is None or row.id is None or verdict.kind == "dead_letter":
            return True
        why = why_doubted(row)
        self.schema_gone = self.schema_gone or row.odd.doubt_by == "schema"
        beyond_ms = verdict.stream_time_ms - self._plan.rules.guard_ms - self._plan.rules.grace_ms
        if row.odd.late is not None and verdict.kind == "unique" and beyond_ms <= row.odd.doubt_ms:
            # The record is late because of records that were deleted.
            self._unprovable(why)
            return False
        if self._doubt.about(row.id, verdict.time_ms, verdict.stream_time_ms, row.odd.doubt_ms):
            self._unprovable(why)
            return False
        return True

    def _dead_by_evidence(self, row: Row, letter: Filed) -> None:
        """Check the dead letter of a record without a fault.

        A broker, a registry, a clock, or a flow causes such a dead letter.
        """
        far_ahead = row.time_ms > row.odd.before_ms + self._plan.topology.max_clock_skew_ms
        by_clock = letter.reason == FUTURE and self._plan.rules.future == "dead_letter"
        if letter.reason == FLOW_FAILED and self._plan.flowed is not None:
            if not any(isinstance(made, Fault) for made in map(partial(self._flow_made, row), self._verdicts())):
                where = self._plan.dead_letters.place(letter)
                self._violation("wrong_dead_letter", row, f"{where} says that the flow failed; {CHANGED_FLOW}")
            self._same(row, letter, self._plan.dead_letters)
        elif why := self._by_evidence(letter, None):
            self._unprovable(why)
            self._same(row, letter, self._plan.dead_letters)
        elif by_clock and row.time_ms > row.odd.before_ms:
            # The record was judged before its dead letter was appended. If the append time is late enough, a worker's
            # clock may have accepted the record's event time.
            skew_ms = self._plan.topology.max_clock_skew_ms
            by_append = letter.at_ms is not None and row.time_ms > letter.at_ms + skew_ms
            if not (far_ahead and by_append) or row.odd.doubt_by == "schema":
                self._unprovable(WHY_CLOCK)
            self._same(row, letter, self._plan.dead_letters)
        elif not self._pending:
            where = self._plan.dead_letters.place(letter)
            self._violation("wrong_dead_letter", row, f'{where} says "{letter.reason}"; the model judges the record')
        self._count_dead(row)

    def _by_evidence(self, letter: Filed, code: str | None) -> str | None:
        """Return the reason why a dead letter of a record with this fault needs no proof, or None if it does."""
        if letter.reason == SCHEMA_UNKNOWN and code in FRAMING_FAULTS:
            return None
        return by_evidence(self._plan.topology).get(letter.reason)

    def _verdicts(self) -> list[str]:
        """Return every verdict that a forwarded record with an ID can have."""
        late = ["late"] if self._plan.late_forwarded else []
        return ["", *late, *(["conflict"] if self._plan.rules.on_conflict == "forward" else [])]

    def _flow_made(self, row: Row, why: str) -> list[FlowOutput] | Fault:
        """Return the flow's result for a record with the verdict ``why``. Report a violation if two runs differ."""
        plan, flowed, kept = self._plan, self._plan.flowed, row.flowed
        if flowed is None or kept is None:
            return []
        headers = tuple((name, content) for name, content in row.headers)
        topic = flowed.topics[0]
        record = FlowRecord(topic, kept.key, kept.value, headers, row.timestamp_ms, why or "unique")
        partition = row.source.partition if plan.topology.direct else None
        run = partial(flowed.expected, record, row.id, partition, position(plan, row.source))
        made = run()
        if differ(made, run()):
            self._violation("changed", row, "the flow is not deterministic: two runs on this record do not agree")
        return made

    def _compare_flow(self, row: Row, kept: Flowed, flowed: FlowOutputs) -> None:
        """Compare the records that the flow sent for a source record with the records that it should have sent."""
        whys, certain = self._flow_may
        options = [self._flow_made(row, why) for why in whys]
        if not self._pending:
            self.books.sent_on += bool(kept.sent)
            self.books.filtered += self._forwarded and not kept.sent and options[0] == []
        certain = certain and not self._pending
        stamped = not self._plan.clamps_timestamps
        for made in options:
            if not isinstance(made, Fault) and flowed.equal(made, kept.sent, stamped=stamped):
                if self.in_order and not self._pending:
                    flowed.match(self.books.partition, row.position, kept.sent)
                return
        if not kept.sent and (not options or not certain):
            return
        wanted = options[0] if options else []
        if isinstance(wanted, Fault):
            if self._plan.dead_letters.complete:
                self._violation("lost", row, f"the flow fails: {wanted.detail}; but it is no dead letter")
            else:
                self._unprovable(WHY_SIDE_GONE)
        elif flowed.may_lack(wanted, kept.sent):
            self._unprovable(WHY_FLOW_GONE)
        else:
            self._report_flow(row, wanted, kept.sent, flowed)

    def _report_flow(self, row: Row, wanted: list[FlowOutput], sent: list[FlowOutput], flowed: FlowOutputs) -> None:
        where = ", ".join(flowed.place(each.target, each.partition, each.offset) for each in sent[:_MOST_NAMED])
        if not self._flow_may[0]:
            kind: ViolationKind = "duplicated" if row.odd.fault is None and row.odd.letter is None else "phantom"
            self._violation(kind, row, f"the model does not forward it, but its records are in {where}")
        elif not sent:
            self._violation("lost", row, f"the flow yields {len(wanted)} records for it; the topics hold none")
        elif len({each.content for each in sent}) < len(sent):
            self._violation("duplicated", row, f"a record that the flow yields once is there twice: {where}")
        else:
            self._violation("changed", row, f"the topics hold other records, in {where}; {CHANGED_FLOW}")

    def _forward(self, row: Row, verdict: ModelVerdict, *, certain: bool) -> None:
        letter = row.odd.letter
        if verdict.kind == "exempt" and letter is not None and letter.reason == REFUSED_BY_THE_BROKER:
            self._unprovable(WHY_REFUSED)
            self._dead(row, letter, REFUSED_BY_THE_BROKER)
            return
        if verdict.kind == "exempt" and isinstance(self._flow_made(row, verdict.reason), Fault):
            self._dead(row, row.odd.letter, FLOW_FAILED)
            return
        self._expect(row, "conflict" if verdict.conflict else verdict.reason, certain=certain)
        if verdict.kind == "exempt":
            self._count("exempt", None)  # A record without an ID or a value has no usable event time.
        else:
            self._count("unique", verdict.time_ms)

    def _expect(self, row: Row, why: str | None, *, certain: bool) -> None:
        """Add a record, with the verdict ``why`` in its header, to the records that are expected in the output.

        If ``why`` is None, the model does not forward the record. If the verdict is not ``certain``, the record may
        instead have been forwarded with any other verdict, or not at all.
        """
        whys = set() if why is None else {why}
        if not certain and row.id is not None:
            whys |= {"", "late" if self._plan.late_forwarded else ""}
            whys.add("conflict" if self._plan.rules.on_conflict == "forward" else "")
        self.uncertain = self.uncertain or not (certain or self._pending)
        # The model's own verdict comes first.
        in_turn = sorted(whys, key=lambda each: (each != why, each))
        if self._plan.flowed is not None:
            self._flow_may, self._forwarded = (in_turn, certain), why is not None
            return
        for each in in_turn:
            self.forwarded.others.append(self._wanted(row, forwarded_digest(self._plan, row, each), certain=certain))

    def _wanted(self, row: Row, content: bytes, *, certain: bool) -> Wanted:
        return Wanted(content, row.id, row.source, row.position, not certain, self._pending)

    def _duplicate(self, row: Row, verdict: ModelVerdict, *, certain: bool) -> None:
        if not certain:
            # The record may have been the first record with its ID.
            self._expect(row, None, certain=False)
        topology, first = self._plan.topology, verdict.of
        kind: CopyKind = "conflicts" if verdict.conflict and topology.conflicts is not None else "duplicates"
        if first is not None and (kind == "conflicts" or topology.duplicates is not None):
            content = copy_digest(self._plan, row.content, row.headers, first.first_ms, first.source)
            self.copies[kind].others.append(self._wanted(row, content, certain=certain))
        self._count("duplicates", verdict.time_ms)
        self.books.conflicts += verdict.conflict and not self._pending

    def _late(self, row: Row, verdict: ModelVerdict, *, certain: bool) -> None:
        self._count("late", verdict.time_ms)
        late = self._plan.late
        if self._plan.late_forwarded:
            self._expect(row, "late", certain=certain)
        elif late is not None and row.odd.late is not None:
            self._same(row, row.odd.late, late)
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
        if letter.reason != code and not self._by_evidence(letter, code):
            text = f'{dead_letters.place(letter)} says "{letter.reason}"; the record says "{code}"'
            self._violation("wrong_dead_letter", row, text)

    def _same(self, row: Row, filed: Filed, side: SideTopic) -> None:
        """Check that a side topic contains the record unchanged, with its original timestamp in a header."""
        whole = digest_with(row.content, row.headers, row.timestamp_ms)
        same = filed.stands_for == row.odd.stand_in if filed.stands_for else filed.digest == whole
        if not same:
            self._violation("changed", row, f"{side.place(filed)} differs in key, value, header, or original timestamp")

    def _count_dead(self, row: Row) -> None:
        far_ahead = row.odd.letter is not None and row.odd.letter.reason == FUTURE
        dated = row.odd.fault is None and row.time_ms >= 0 and not far_ahead
        self._count("dead_letters", row.time_ms if dated else None)

    def _count(self, outcome: str, time_ms: int | None) -> None:
        """Count a judged record in the books and the timeline. ``outcome`` is the name of a field in `Books`."""
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
