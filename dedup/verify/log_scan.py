"""Scans a log once to compute stream time before and after each record, which depends on the order of the log.

After the scan, records can be judged in any grouping by ID: besides stream time, the exact model only needs the records
with the same ID.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from dedup.core.extract import Extractor
from dedup.core.reference_model import Feed, ModelFault, ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import BEFORE_ALL_TIME, Source
from dedup.topology.model import LateForward, Topology
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


@dataclass(frozen=True, slots=True)
class Plan:
    """The topology and the side topics that its workers write, as far as a replay needs them."""

    topology: Topology
    rules: ModelRules
    extract: Extractor
    late: SideTopic | None
    dead_letters: SideTopic
    late_digests: set[bytes] | None = None
    """Digests of all records that were forwarded as late; None if these records are not known."""
    output_stamped: bool = True
    """True if the output keeps the records' timestamps (CreateTime), so that they can be compared."""

    @property
    def late_forwarded(self) -> bool:
        """True if late records are forwarded with a mark."""
        return isinstance(self.topology.late, LateForward)

    @property
    def sides(self) -> list[SideTopic]:
        """The late topic, if there is one, and the dead-letter topic."""
        return [side for side in (self.late, self.dead_letters) if side is not None]

    def place(self, source: Source) -> str:
        """Return a source position as shown in reports."""
        return f"{self.topology.source.topics[source.topic]}/{source.partition} offset {source.offset}"


@dataclass(slots=True)
class Log:
    """Consecutive records of a task's log, with their source positions."""

    columns: RecordColumns
    sources: Sequence[Source]
    idle_rows: frozenset[int] = frozenset()


class Original(NamedTuple):
    """A record as it was in the source topic, with its value condensed by `spill.condensed`."""

    source: Source
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int

    @classmethod
    def of(cls, columns: RecordColumns, at: int, source: Source) -> Self:
        """Return the record in one row of ``columns``."""
        value, headers = condensed(columns.values[at]), columns.headers[at]
        return cls(source, columns.keys[at], value, headers, columns.timestamps_ms[at])


class Row(NamedTuple):
    """A record of a log, with all data that determine its verdict except the other records with the same ID."""

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
        columns, plan, topics = log.columns, self._plan, self._plan.topology.source.topics
        extracted = extracted_of(plan.extract, columns)
        fingerprints = extracted.fingerprints or [b""] * len(columns.keys)
        late = plan.late.take(log.sources) if plan.late is not None else {}
        letters = plan.dead_letters.take(log.sources)
        for at, source in enumerate(log.sources):
            if at in log.idle_rows:
                self._model.judge(ModelRecord(None, 0, source, idle=True))
                continue
            fault, letter, original = extracted.faults.get(at), letters.get(source), Original.of(columns, at, source)
            model_fault: ModelFault | None = None if fault is None else fault.kind.value
            record = ModelRecord(extracted.ids[at] if fault is None else None, extracted.times_ms[at], source)
            before_ms = self._model.stream_time_ms
            self._pass(record._replace(fault=model_fault), letter, pending=pending)
            judged = record.id is not None and record.time_ms >= 0 and letter is None
            # Stream time before a judged record is unknown if the log's beginning was deleted.
            begins_in_doubt = judged and not self._from_start and self._anchor_ms is None
            if begins_in_doubt and not self._perhaps_late(original, late):
                # The record was unique, or it was a duplicate of a sighting that was still kept, regardless of the
                # record's age.
                rules = plan.rules
                longest_ms = rules.extend_at_most_ms if rules.extend else 0
                self._doubt_from(record.time_ms + 2 * rules.guard_ms + rules.grace_ms + longest_ms)
            yield Row(
                columns.offsets[at],
                *original,
                record.id,
                record.time_ms,
                fingerprints[at],
                model_fault,
                "" if fault is None else fault.code,
                pending,
                bool(original.headers) and parse_source(header(original.headers, REPLAYED_HEADER), topics) is not None,
                before_ms,
                self._model.stream_time_ms,
                self._doubt_ms(record),
                self._clamped,
                late.get(source),
                letter,
            )

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
            # The record was accepted, so the worker's clock was ahead. A worker that clamps may have used a different
            # time.
            self._clamped = self._clamped or (self._from_start and self._anchor_ms is None)
            self._doubt_from(record.time_ms)
        self._model.judge(record._replace(id=_ANY))
        self._model.sightings.clear()

    def _perhaps_late(self, original: Original, late: Mapping[Source, Filed]) -> bool:
        """Return whether a record may have been late. A record that is dropped as late is in no written topic."""
        plan = self._plan
        if plan.late is not None:
            return original.source in late
        return plan.late_digests is None or forwarded_digest(plan, original, "late") in plan.late_digests

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
    headers, output = row.headers, plan.topology.output
    if why:
        headers = [*headers, (VERDICT_HEADER, why.encode())]
    if output is not None and output.headers:
        headers = [*headers, (SOURCE_HEADER, position(plan, row.source))]
    return digest(row.key, row.value, headers, row.timestamp_ms if plan.output_stamped else 0)


def position(plan: Plan, source: Source) -> bytes:
    """Return a source position in the format of the headers."""
    return f"{plan.topology.source.topics[source.topic]}/{source.partition}/{source.offset}".encode()
