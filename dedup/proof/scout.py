"""What of a log depends on its order, taken from it in one reading: stream time before and after each record.

With it a record can be judged in any company: the exact model then needs only the records of the same tracking ID.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dedup.core.extract import Extractor, Fault
from dedup.core.model import Feed, Model, ModelFault, ModelRecord, ModelRules
from dedup.core.window import BEFORE_ALL_TIME, Source
from dedup.proof.compare import Headers
from dedup.proof.evidence import REPLAYED_HEADER, Filed, SideTopic, extracted_of, header, parse_source
from dedup.proof.kafka_reader import Columns
from dedup.proof.spill import condensed

REFUSED_BY_THE_BROKER: Final = "refused_by_broker"
"""Reason of dead letters that only the broker knew; the replay takes them as they are."""
_ANY: Final = b"any"


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


class Row(NamedTuple):
    """One record of a log, with all that its verdict depends on but the other records of its ID. Plain values."""

    position: int
    """In its log: the order of records."""
    source: tuple[int, int, int]
    key: bytes | None
    value: bytes | None
    """As `spill.condensed` returns it."""
    headers: Headers
    timestamp_ms: int
    id: bytes | None
    time_ms: int
    fingerprint: bytes
    fault: ModelFault | None
    code: str
    """Of the fault."""
    pending: bool
    """Beyond the committed offset, so it may be judged or not."""
    replayed: bool
    before_ms: int
    """Stream time before this record."""
    after_ms: int
    doubt_ms: int | None
    """Up to which event time sightings may be unknown that the log no longer has; None: nothing is unknown."""
    doubt_by_clock: bool
    """It is unknown because a time was perhaps clamped to the worker's clock."""
    late: Filed | None
    letter: Filed | None
    """What the late and the dead-letter topic hold of this record."""

    @classmethod
    def of(cls, values: list[object]) -> Row:
        """Return a row from the plain values that it was written as."""
        row = cls._make(values)
        return row._replace(
            source=Source(*row.source),
            late=None if row.late is None else Filed(*row.late),
            letter=None if row.letter is None else Filed(*row.letter),
        )


class Scout:
    """Reads one task's log in order; knows its stream time, and how much of it is in doubt."""

    def __init__(self, plan: Plan, feeds: Sequence[Feed], *, from_start: bool) -> None:
        self._plan: Final = plan
        self._model: Final = Model(plan.rules, feeds)
        """Judges records of one made-up ID, for the sake of stream time."""
        self._from_start: Final = from_start
        self._anchor_ms: int | None = None
        self._clamped = False
        self.filed = 0
        """Records of the late and dead-letter topics that belong to what was read and judged."""

    def rows(self, log: Log, *, pending: bool = False) -> Iterator[Row]:
        """Yield the records; idle markers are none, they only move stream time."""
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
            self._pass(record, fault, late.get(source), letters.get(source), pending=pending)
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
                None if fault is None else model_fault(fault),
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

    def _pass(
        self, record: ModelRecord, fault: Fault | None, late: Filed | None, letter: Filed | None, *, pending: bool
    ) -> None:
        if not pending:
            self.filed += (late is not None) + (letter is not None)
        if fault is not None or record.id is None:
            self._model.judge(record._replace(id=None, fault=None if fault is None else model_fault(fault)))
            return
        if letter is not None and record.time_ms >= 0:
            return
        stream_time_ms, rules = self._model.stream_time_ms, self._plan.rules
        if record.time_ms > stream_time_ms + self._plan.max_clock_skew_ms and not pending:
            # Accepted, so the worker's clock was ahead; where it clamps, it may have taken another time than this.
            clamps = rules.future == "clamp" and stream_time_ms != BEFORE_ALL_TIME
            if clamps:
                self._clamped = self._clamped or (self._from_start and self._anchor_ms is None)
                self._doubt_from(record.time_ms)
        self._model.judge(record._replace(id=_ANY))
        self._model.sightings.clear()
        if not self._from_start and self._anchor_ms is None and late is None and record.time_ms >= 0:
            # Not late: so it was unique, or a duplicate of a sighting that was still kept, however old it is itself.
            longest_ms = rules.extend_at_most_ms if rules.extend else 0
            self._doubt_from(record.time_ms + 2 * rules.guard_ms + rules.grace_ms + longest_ms)

    def _doubt_from(self, time_ms: int) -> None:
        """Anything may have been seen, up to this event time."""
        if self._anchor_ms is None or time_ms > self._anchor_ms:
            self._anchor_ms = time_ms

    def _doubt_ms(self, record: ModelRecord) -> int | None:
        if self._anchor_ms is None and not self._from_start:
            return max(record.time_ms, self._model.stream_time_ms) + self._plan.rules.grace_ms
        return self._anchor_ms


def model_fault(fault: Fault) -> ModelFault:
    """Return the model's name of a fault."""
    names: dict[str, ModelFault] = {
        "MISSING_ID": "missing_id",
        "UNREADABLE": "unreadable",
        "TOMBSTONE": "tombstone",
        "BAD_TIME": "bad_time",
    }
    return names[fault.kind.name]
