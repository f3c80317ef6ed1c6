"""Scans a log once to compute stream time before and after each record, which depends on the order of the log.

After the scan, records can be judged in any grouping by ID: besides stream time, the exact model only needs the records
with the same ID.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dedup.core.extract import Extractor, Fault
from dedup.core.reference_model import Feed, ModelFault, ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import BEFORE_ALL_TIME, Source
from dedup.verify.compare import Headers, digest
from dedup.verify.evidence import (
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
from dedup.verify.spill import condensed

_ANY: Final = b"any"
_MODEL_FAULTS: Final[Mapping[str, ModelFault]] = {
    "MISSING_ID": "missing_id",
    "UNREADABLE": "unreadable",
    "TOMBSTONE": "tombstone",
    "BAD_TIME": "bad_time",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The properties of a topology and of the topics that workers write, as far as a replay needs them."""

    rules: ModelRules
    extract: Extractor
    topics: tuple[str, ...]
    """The source topics, by position."""
    max_clock_skew_ms: int
    source_header: bool
    """True if forwarded records contain their source position."""
    late: SideTopic | None
    late_forwarded: bool
    dead_letters: SideTopic
    late_digests: frozenset[bytes] | None = None
    """Digests of all records that were forwarded as late; None if these records are not known."""
    output_stamped: bool = True
    """True if the output keeps the records' timestamps (CreateTime), so that they can be compared."""
    duplicates: bool = False
    conflicts: bool = False

    def place(self, source: Source) -> str:
        """Return a source position as shown in reports."""
        return f"{self.topics[source.topic]}/{source.partition} offset {source.offset}"


@dataclass(slots=True)
class Log:
    """Consecutive records of a task's log, with their source positions."""

    columns: RecordColumns
    sources: Sequence[Source]
    idle_rows: frozenset[int] = frozenset()


class Original(NamedTuple):
    """A record as it was in the source topic, with its value condensed by `spill.condensed`."""

    source: tuple[int, int, int]
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int


class Row(NamedTuple):
    """A record of a log, with all data that determine its verdict except the other records with the same ID."""

    position: int
    """The offset in the log."""
    source: tuple[int, int, int]
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
    """True if the record is at or after the committed offset, so that it may or may not be judged."""
    replayed: bool
    before_ms: int
    """Stream time before this record was judged."""
    after_ms: int
    doubt_ms: int | None
    """Sightings up to this event time may be unknown, because the log no longer contains their records; None if all
    sightings are known.
    """
    doubt_by_clock: bool
    """True if the doubt arises from an event time that may have been clamped to the worker's clock."""
    late: Filed | None
    letter: Filed | None
    """The record's entry in the dead-letter topic; None if there is none."""

    @classmethod
    def of(cls, values: list[object]) -> Row:
        """Return a row from the plain values that a spill stores."""
        row = cls._make(values)
        return row._replace(
            source=Source(*row.source),
            late=None if row.late is None else Filed(*row.late),
            letter=None if row.letter is None else Filed(*row.letter),
        )


class LogScan:
    """Reads one task's log in order, and tracks stream time and the event time up to which sightings may be unknown."""

    def __init__(self, plan: Plan, feeds: Sequence[Feed], *, from_start: bool) -> None:
        self._plan: Final = plan
        self._model: Final = ReferenceModel(plan.rules, feeds)
        """Judges all records with the same artificial ID, only to compute stream time."""
        self._from_start: Final = from_start
        self._anchor_ms: int | None = None
        self._clamped = False

    def rows(self, log: Log, *, pending: bool = False) -> Iterator[Row]:
        """Yield the records as rows. Idle markers yield no row, and only advance stream time."""
        columns, plan = log.columns, self._plan
        extracted = extracted_of(plan.extract, columns)
        fingerprints = extracted.fingerprints or [b""] * len(columns.keys)
        late = plan.late.take(log.sources) if plan.late is not None else {}
        letters = plan.dead_letters.take(log.sources)
        for at, source in enumerate(log.sources):
            if at in log.idle_rows:
                self._model.judge(ModelRecord(None, 0, source, idle=True))
                continue
            fault = extracted.faults.get(at)
            own = columns.headers[at]
            replayed = bool(own) and parse_source(header(own, REPLAYED_HEADER), plan.topics) is not None
            before_ms = self._model.stream_time_ms
            record = ModelRecord(extracted.ids[at], extracted.times_ms[at], source)
            self._pass(record, fault, letters.get(source), pending=pending)
            if self._begins_in_doubt(record, fault, letters.get(source)) and not self._perhaps_late(log, at, late):
                # The record was unique, or it was a duplicate of a sighting that was still kept, regardless of the
                # record's age.
                rules = plan.rules
                longest_ms = rules.extend_at_most_ms if rules.extend else 0
                self._doubt_from(record.time_ms + 2 * rules.guard_ms + rules.grace_ms + longest_ms)
            yield Row(
                columns.offsets[at],
                source,
                columns.keys[at],
                condensed(columns.values[at]),
                own,
                columns.timestamps_ms[at],
                extracted.ids[at] if fault is None else None,
                extracted.times_ms[at],
                fingerprints[at],
                None if fault is None else _MODEL_FAULTS[fault.kind.name],
                "" if fault is None else fault.code,
                pending,
                replayed,
                before_ms,
                self._model.stream_time_ms,
                self._doubt_ms(record),
                self._clamped,
                late.get(source),
                letters.get(source),
            )

    def _pass(self, record: ModelRecord, fault: Fault | None, letter: Filed | None, *, pending: bool) -> None:
        """Judge a record only to advance stream time."""
        if fault is not None or record.id is None:
            model_fault = None if fault is None else _MODEL_FAULTS[fault.kind.name]
            self._model.judge(record._replace(id=None, fault=model_fault))
            return
        if letter is not None and record.time_ms >= 0:
            return
        stream_time_ms, rules = self._model.stream_time_ms, self._plan.rules
        if record.time_ms > stream_time_ms + self._plan.max_clock_skew_ms and not pending:
            # The record was accepted, so the worker's clock was ahead. A worker that clamps may have used a different
            # time.
            clamps = rules.future == "clamp" and stream_time_ms != BEFORE_ALL_TIME
            if clamps:
                self._clamped = self._clamped or (self._from_start and self._anchor_ms is None)
                self._doubt_from(record.time_ms)
        self._model.judge(record._replace(id=_ANY))
        self._model.sightings.clear()

    def _begins_in_doubt(self, record: ModelRecord, fault: Fault | None, letter: Filed | None) -> bool:
        """Return whether stream time before a judged record is unknown because the log's beginning was deleted."""
        judged = fault is None and record.id is not None and record.time_ms >= 0 and letter is None
        return judged and not self._from_start and self._anchor_ms is None

    def _perhaps_late(self, log: Log, at: int, late: Mapping[Source, Filed]) -> bool:
        """Return whether a record may have been late. A record that is dropped as late is in no written topic."""
        plan, columns, source = self._plan, log.columns, log.sources[at]
        if plan.late is not None:
            return source in late
        if plan.late_digests is None:
            return True
        value, headers = condensed(columns.values[at]), columns.headers[at]
        original = Original(source, columns.keys[at], value, headers, columns.timestamps_ms[at])
        return forwarded_digest(plan, original, "late") in plan.late_digests

    def _doubt_from(self, time_ms: int) -> None:
        """Remember that sightings up to this event time may be unknown."""
        if self._anchor_ms is None or time_ms > self._anchor_ms:
            self._anchor_ms = time_ms

    def _doubt_ms(self, record: ModelRecord) -> int | None:
        if self._anchor_ms is None and not self._from_start:
            return max(record.time_ms, self._model.stream_time_ms) + self._plan.rules.grace_ms
        return self._anchor_ms


def forwarded_digest(plan: Plan, row: Row | Original, why: str = "") -> bytes:
    """Return the digest that a record must have in the output, where the worker's headers follow its own headers."""
    headers = row.headers
    if why:
        headers = [*headers, (VERDICT_HEADER, why.encode())]
    if plan.source_header:
        headers = [*headers, (SOURCE_HEADER, position(plan, Source(*row.source)))]
    return digest(row.key, row.value, headers, row.timestamp_ms if plan.output_stamped else 0)


def position(plan: Plan, source: Source) -> bytes:
    """Return a source position in the format of the headers."""
    return f"{plan.topics[source.topic]}/{source.partition}/{source.offset}".encode()
