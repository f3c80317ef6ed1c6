"""Reads a task's log once, in order, as columns, and computes stream time at each record.

The verdict on an odd record, such as a pending or faulty one, may depend on further facts, which `Odd` contains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dedup.core.event_time import FieldTime, RecordTime
from dedup.core.extract import Extracted, Extractor
from dedup.core.formats import SCHEMA_UNKNOWN
from dedup.core.framing import FRAMING_FAULTS, SchemaRef, named, schema_of
from dedup.core.reference_model import Feed, ModelFault, ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import BEFORE_ALL_TIME, Source
from dedup.topology.model import LateForward, Topology
from dedup.verify.compare import Column, Headers, contents_of, digest_with, digests, selected
from dedup.verify.evidence import (
    REPLAYED_HEADER,
    SOURCE_HEADER,
    VERDICT_HEADER,
    Filed,
    SideTopic,
    SourceTuple,
    extracted_of,
    header,
    parse_source,
)
from dedup.verify.flow_outputs import FlowOutput, FlowOutputs
from dedup.verify.kafka_reader import RecordColumns
from dedup.verify.spill import Spill, stand_in

_ANY: Final = b"any"
_AFTER_ALL_TIME: Final = 1 << 62
_NEEDS_NO_SCHEMA: Final = FRAMING_FAULTS | {SCHEMA_UNKNOWN}
"""The reasons of dead letters that can be checked without the record's schema."""

DoubtBy = Literal["", "clock", "schema"]
"""The cause of a doubt: records were deleted, an event time may have been clamped, or a schema was deleted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a topology that a replay needs, and the late and dead-letter topics."""

    topology: Topology
    rules: ModelRules
    extract: Extractor
    late: SideTopic | None
    dead_letters: SideTopic
    late_digests: set[bytes] | None = None
    """The digests of all records that were forwarded as late, or None if they are unknown."""
    output_stamped: bool = True
    """True if the output keeps the records' timestamps (CreateTime), so that the timestamps can be compared."""
    flowed: FlowOutputs | None = None
    """The topology's flow and the records that it sent, or None if the topology has no flow."""

    @property
    def late_forwarded(self) -> bool:
        """True if the topology forwards late records, marked by a header."""
        return isinstance(self.topology.late, LateForward)

    @property
    def clamps_timestamps(self) -> bool:
        """True if a worker may have forwarded a record with a clamped timestamp."""
        return self.rules.future == "clamp" and isinstance(self.topology.event_time, RecordTime)

    @property
    def sides(self) -> list[SideTopic]:
        """The late topic, if any, and the dead-letter topic."""
        return [side for side in (self.late, self.dead_letters) if side is not None]

    def give_back(self, feed: Feed | None = None) -> None:
        """Undo every `take` for the records of a source partition, or for all records if ``feed`` is None."""
        for side in self.sides:
            side.give_back(feed)
        if self.flowed is not None:
            self.flowed.give_back(feed)

    def place(self, source: Source) -> str:
        """Return the topic, partition, and offset of a source record as text for reports."""
        return f"{self.topology.source.topics[source.topic]}/{source.partition} offset {source.offset}"


class Original(NamedTuple):
    """A record as it was in the source topic."""

    source: Source
    content: bytes
    """The digest of the record's key and value (`contents_of`)."""
    headers: Headers
    timestamp_ms: int


class Odd(NamedTuple):
    """Facts about an odd record, whose verdict may depend on more than the records with the same ID."""

    fault: ModelFault | None = None
    code: str = ""
    """The code of the record's fault; empty if it has none."""
    pending: bool = False
    """True if the record is at or after the committed offset, so that a task may or may not have judged it."""
    replayed: bool = False
    before_ms: int = BEFORE_ALL_TIME
    """Stream time before this record was judged."""
    doubt_ms: int | None = None
    """The event time up to which sightings may be unknown because their records were lost; None if all sightings are
    known.
    """
    doubt_by: DoubtBy = ""
    late: Filed | None = None
    letter: Filed | None = None
    """The record's entry in the dead-letter topic, or None without an entry."""
    stand_in: bytes = b""
    """The digest that a worker wrote to a side topic in place of an oversized value; otherwise empty."""
    schema: str = ""
    """The ID of the record's schema if the record cannot be judged again because the schema was deleted."""

    @classmethod
    def of(cls, values: Sequence[object]) -> Odd:
        """Convert the plain values that a spill stores to an `Odd`."""
        odd = cls._make(values)
        late, letter = (None if filed is None else Filed._make(filed) for filed in (odd.late, odd.letter))
        return odd._replace(late=late, letter=letter)


_NOT_ODD: Final = Odd()


class Flowed(NamedTuple):
    """A record's key and value, which the flow needs, and the records that the flow made from that record."""

    key: bytes | None
    value: bytes | None
    sent: list[FlowOutput]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Flowed:
        """Convert the plain values that a spill stores to a `Flowed`."""
        key, value, sent = values
        return cls(key, value, [FlowOutput._make(each) for each in sent])


class Row(NamedTuple):
    """A record of a log, with everything that affects its verdict except the other records with the same ID."""

    position: int
    """The offset in the log."""
    source: Source
    content: bytes
    headers: Headers
    timestamp_ms: int
    id: bytes | None
    time_ms: int
    fingerprint: bytes
    after_ms: int
    """Stream time after this record."""
    odd: Odd
    flowed: Flowed | None = None
    """The flow's input, and the records that the flow sent; None without a flow."""


class Log(NamedTuple):
    """Records of a log in log order, as columns with the fields of `Row`."""

    positions: Column
    topics: Column
    partitions: Column
    offsets: Column
    timestamps_ms: Column
    times_ms: Column
    after_ms: Column
    ids: list[bytes | None]
    contents: list[bytes]
    headers: list[Headers]
    fingerprints: list[bytes]
    odd: list[Odd | None]
    flowed: list[Flowed | None]

    def at(self, rows: Column) -> Self:
        """Return the records in the given rows."""
        return selected(self, rows)

    def sources(self) -> list[tuple[int, int, int]]:
        """Return the position of each record in the source topics."""
        return list(zip(self.topics.tolist(), self.partitions.tolist(), self.offsets.tolist(), strict=True))

    def rows(self) -> Iterator[Row]:
        """Yield the records one by one."""
        odd = (_NOT_ODD if each is None else Odd.of(each) for each in self.odd)
        sources = map(Source, self.topics.tolist(), self.partitions.tolist(), self.offsets.tolist())
        times = (self.ids, self.times_ms.tolist(), self.fingerprints, self.after_ms.tolist())
        positions, timestamps_ms = self.positions.tolist(), self.timestamps_ms.tolist()
        flowed = (None if each is None else Flowed.of(each) for each in self.flowed)
        return map(Row, positions, sources, self.contents, self.headers, timestamps_ms, *times, odd, flowed)

    @classmethod
    def of(cls, *rows: Sequence[object]) -> Self:
        """Return these rows as columns. A row may consist of the plain values that a spill stores."""
        columns: list[Any] = list(map(list, zip(*rows, strict=True))) if rows else [[]] * len(Row._fields)
        position, source, content, headers, timestamp_ms, own, time_ms, fingerprint, after_ms, odd, flowed = columns
        numbers = np.array([position, *np.reshape(source, (-1, 3)).T, timestamp_ms, time_ms, after_ms], np.int64)
        return cls._make([*numbers, own, content, headers, fingerprint, odd, flowed])

    @classmethod
    def spill(cls, directory: str, buckets: int) -> Spill:
        """Return an empty spill for the columns of a log."""
        return Spill(directory, buckets, _LOG_NUMBERS, len(cls._fields) - _LOG_NUMBERS)


_LOG_NUMBERS: Final = Log._fields.index("ids")


@dataclass(frozen=True, slots=True)
class _Batch:
    """Consecutive records of a log, with the facts that are known about them."""

    columns: RecordColumns
    sources: Sequence[SourceTuple]
    extracted: Extracted
    contents: list[bytes]
    late: Mapping[SourceTuple, Filed]
    letters: Mapping[SourceTuple, Filed]
    pending: bool
    flowed: list[Flowed | None]

    def log(self, after_ms: Column, odd: list[Odd | None]) -> Log:
        """Return all records of the batch as columns."""
        columns, extracted = self.columns, self.extracted
        topics, partitions, offsets = np.array(self.sources, np.int64).reshape(-1, 3).T
        return Log(
            np.array(columns.offsets, np.int64),
            topics,
            partitions,
            offsets,
            np.array(columns.timestamps_ms, np.int64),
            np.array(extracted.times_ms, np.int64),
            after_ms,
            extracted.ids,
            self.contents,
            columns.headers,
            [b""] * len(columns.offsets) if extracted.fingerprints is None else extracted.fingerprints,
            odd,
            self.flowed,
        )

    def original(self, at: int) -> Original:
        """Return a record as it was in the source."""
        columns, source = self.columns, Source._make(self.sources[at])
        return Original(source, self.contents[at], columns.headers[at], columns.timestamps_ms[at])

    def odd_rows(self, plan: Plan) -> Collection[int]:
        """Return the rows of the records that would be odd even if no records were missing from the log."""
        if self.pending:
            return range(len(self.sources))
        filed = self.late.keys() | self.letters.keys()
        own = [at for at, source in enumerate(self.sources) if source in filed] if filed else []
        replayed = [at for at, headers in enumerate(self.columns.headers) if headers and self._replayed(plan, headers)]
        return {*self.extracted.faults, *own, *replayed}

    def odd(self, plan: Plan, at: int, before_ms: int, doubt_ms: int | None, doubt_by: DoubtBy) -> Odd:
        """Return the facts that make a record odd."""
        fault, source = self.extracted.faults.get(at), self.sources[at]
        late, letter = self.late.get(source), self.letters.get(source)
        too_large = any(filed is not None and filed.stands_for for filed in (late, letter))
        return Odd(
            None if fault is None else fault.kind.value,
            "" if fault is None else fault.code,
            self.pending,
            self._replayed(plan, self.columns.headers[at]),
            before_ms,
            doubt_ms,
            doubt_by,
            late,
            letter,
            stand_in(self.columns.values[at]) if too_large else b"",
            self.schema_gone(plan, at),
        )

    def schema_gone(self, plan: Plan, at: int) -> str:
        """Return the schema ID of a record that was judged with a schema that is now unknown, or an empty string."""
        fault, letter = self.extracted.faults.get(at), self.letters.get(self.sources[at])
        if fault is None or fault.code != SCHEMA_UNKNOWN:
            return ""
        if letter is not None and letter.reason in _NEEDS_NO_SCHEMA:
            return ""
        return schema_named(plan, self.columns.keys[at], self.columns.values[at], self.columns.headers[at])

    @staticmethod
    def _replayed(plan: Plan, headers: Headers) -> bool:
        return parse_source(header(headers, REPLAYED_HEADER), plan.topology.source.topics) is not None


def schema_named(plan: Plan, key: bytes | None, value: bytes | None, headers: Headers) -> str:
    """Return the ID of the unknown schema that the framing of a record's value or key names."""
    source = plan.topology.source
    refs = [ref for ref in source.schema_refs([key], [value], [headers]) if ref is not None]
    known: Mapping[SchemaRef, object] = source.schemas or {}
    return named(next((ref for ref in refs if known.get(schema_of(ref)) is None), refs[0]))


def stream_times(
    model: ReferenceModel,
    feeds: Sequence[Feed],
    times_ms: npt.NDArray[np.int64],
    *,
    idle_rows: Sequence[int],
    unjudged: Sequence[int],
    letters: Sequence[int],
) -> Column:
    """Return stream time after each record, as `ReferenceModel.judge` calculates it, and advance the model accordingly.

    The records at ``unjudged`` have a fault or no ID. The records at ``letters`` are dead letters according to the
    dead-letter topic. Like all other records, these records wake their feed.
    """
    count = len(feeds)
    marker, judged = np.zeros(count, bool), times_ms >= 0
    marker[list(idle_rows)] = True
    judged[[*unjudged, *letters]] = False
    judged &= ~marker
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
        # At each row, the feed's last record up to that row determines whether the feed is idle.
        last = np.maximum.accumulate(np.where(mine, np.arange(count), -1))
        idle = np.where(last < 0, model.idle[feed], marker[last])
        np.minimum(least, own, out=least, where=~idle)
        np.maximum(greatest, own, out=greatest)
        if count:
            model.greatest[feed], model.idle[feed] = int(own[-1]), bool(idle[-1])
    candidate = np.where(least == _AFTER_ALL_TIME, greatest, least)
    candidate[~(judged | marker)] = BEFORE_ALL_TIME
    after = np.maximum(np.maximum.accumulate(candidate), model.stream_time_ms)
    model.stream_time_ms = int(after[-1]) if count else model.stream_time_ms
    return after


def _some(columns: RecordColumns, wanted: list[int]) -> list[bytes]:
    """Return the digests of the wanted records (`contents_of`), and empty bytes for all other records."""
    contents, some = [b""] * len(columns.offsets), columns.rows(wanted)
    for at, content in zip(wanted, contents_of(some.keys, some.values), strict=True):
        contents[at] = content
    return contents


def _flowed(plan: Plan, columns: RecordColumns, sources: Sequence[SourceTuple]) -> list[Flowed | None]:
    if plan.flowed is None:
        return [None] * len(sources)
    sent = plan.flowed.take(sources)
    return [
        Flowed(key, value, sent.get(source, []))
        for key, value, source in zip(columns.keys, columns.values, sources, strict=True)
    ]


class LogScan:
    """Reads one task's log in order, and tracks stream time and the event time up to which sightings may be unknown."""

    def __init__(self, plan: Plan, feeds: Sequence[Feed], *, from_start: bool) -> None:
        self._plan: Final = plan
        self._model: Final = ReferenceModel(plan.rules, feeds)
        """A model that judges all records under one artificial ID, only to compute stream time."""
        self._doubt_ms: int | None = None
        """The event time up to which sightings may be unknown, or None if all sightings are known."""
        self._doubt_by: DoubtBy = ""
        self._anchored = from_start
        """False while unknown records may have moved stream time to any value."""
        self._anchors = True
        """False if no later record can show how far unknown records have moved stream time."""

    def scan(
        self,
        columns: RecordColumns,
        sources: Sequence[SourceTuple],
        *,
        idle_rows: Collection[int] = (),
        pending: bool = False,
        only: Collection[bytes] | None = None,
    ) -> Log:
        """Convert consecutive records to rows of the log. An idle marker advances stream time, but produces no row.

        If ``only`` is given, the method returns only records whose IDs are in ``only``.
        """
        plan = self._plan
        extracted = extracted_of(plan.extract, columns)
        late = plan.late.take(sources) if plan.late is not None else {}
        letters = plan.dead_letters.take(sources)
        # If only some IDs are wanted, no other records are compared, so their digests are not needed.
        wanted = None if only is None else [at for at, own in enumerate(extracted.ids) if own in only]
        contents = contents_of(columns.keys, columns.values) if wanted is None else _some(columns, wanted)
        batch = _Batch(columns, sources, extracted, contents, late, letters, pending, _flowed(plan, columns, sources))
        at_once = self._anchored and self._doubt_ms is None and plan.rules.future != "clamp"
        at_once = at_once and not any(fault.code == SCHEMA_UNKNOWN for fault in extracted.faults.values())
        log = (self._at_once if at_once else self._one_by_one)(batch, idle_rows)
        if wanted is None and not idle_rows:
            return log
        rows = range(len(sources)) if wanted is None else wanted
        return log.at(np.array([at for at in rows if at not in idle_rows], np.int64))

    def _one_by_one(self, batch: _Batch, idle_rows: Collection[int]) -> Log:
        """Return the rows of a log with unknown records, including the doubt about each record's verdict."""
        after_ms, odd = np.empty(len(batch.sources), np.int64), list[Odd | None]()
        odd_rows = batch.odd_rows(self._plan)
        for at, source in enumerate(batch.sources):
            before_ms, doubt_ms = self._model.stream_time_ms, None
            if at in idle_rows:
                self._model.judge(ModelRecord(None, 0, Source._make(source), idle=True))
            else:
                doubt_ms = self._doubt_after(batch, at)
            after_ms[at] = self._model.stream_time_ms
            plain = doubt_ms is None and at not in odd_rows
            odd.append(None if plain else batch.odd(self._plan, at, before_ms, doubt_ms, self._doubt_by))
        return batch.log(after_ms, odd)

    def _doubt_after(self, batch: _Batch, at: int) -> int | None:
        """Advance stream time by one record, and return the event time up to which sightings may be unknown."""
        source, extracted, plan = Source._make(batch.sources[at]), batch.extracted, self._plan
        fault, letter = extracted.faults.get(at), batch.letters.get(source)
        model_fault: ModelFault | None = None if fault is None else fault.kind.value
        record = ModelRecord(extracted.ids[at], extracted.times_ms[at], source)
        self._pass(record._replace(fault=model_fault), letter, pending=batch.pending)
        judged = record.id is not None and record.time_ms >= 0 and letter is None
        can_anchor = judged and self._anchors and not self._anchored
        if can_anchor and not self._perhaps_late(batch.original(at), batch.late):
            # The record, regardless of its age, was unique or a duplicate of a sighting that was still kept.
            rules = plan.rules
            longest_ms = rules.extend_at_most_ms if rules.extend else 0
            self._doubt_from(record.time_ms + 2 * rules.guard_ms + rules.grace_ms + longest_ms)
            self._anchored = True
        if letter is None and batch.schema_gone(plan, at):
            self._lose(batch.columns.timestamps_ms[at])
        if not self._anchored:
            return max(record.time_ms, self._model.stream_time_ms) + plan.rules.grace_ms
        return self._doubt_ms

    def _lose(self, timestamp_ms: int) -> None:
        """Note that a record with an unknown ID was judged, which may have advanced stream time."""
        topology, self._doubt_by = self._plan.topology, "schema"
        if isinstance(topology.event_time, FieldTime) or not (topology.direct or self._plan.dead_letters.complete):
            # With several feeds, a record's event time does not limit the event times of other feeds.
            self._anchored, self._anchors = False, self._anchors and topology.direct
        else:
            self._doubt_from(timestamp_ms)

    def _at_once(self, batch: _Batch, idle_rows: Collection[int]) -> Log:
        """Return the rows of a log whose beginning was not deleted, and calculate stream time for all rows at once."""
        ids, faults = batch.extracted.ids, batch.extracted.faults
        letters = [at for at, source in enumerate(batch.sources) if source in batch.letters] if batch.letters else []
        before_ms = self._model.stream_time_ms
        after_ms = stream_times(
            self._model,
            [source[:2] for source in batch.sources],
            np.array(batch.extracted.times_ms, np.int64),
            idle_rows=sorted(idle_rows),
            unjudged=list(faults),
            letters=[at for at in letters if at not in faults],
        )
        odd: list[Odd | None] = [None] * len(ids)
        for at in batch.odd_rows(self._plan):
            before = int(after_ms[at - 1]) if at else before_ms
            odd[at] = batch.odd(self._plan, at, before, None, "")
        return batch.log(after_ms, odd)

    def _pass(self, record: ModelRecord, letter: Filed | None, *, pending: bool) -> None:
        """Judge a record only to advance stream time."""
        if record.id is None:
            self._model.judge(record)
            return
        if letter is not None and record.time_ms >= 0:
            self._model.judge(record._replace(fault="unreadable"))  # A dead letter only wakes its feed.
            return
        stream_time_ms, plan = self._model.stream_time_ms, self._plan
        ahead = record.time_ms > stream_time_ms + plan.topology.max_clock_skew_ms and not pending
        if ahead and plan.rules.future == "clamp" and stream_time_ms != BEFORE_ALL_TIME:
            # The record was accepted, so the worker's clock was ahead. A worker that clamps event times may have used a
            # different time.
            if self._anchored and self._doubt_ms is None:
                self._doubt_by = "clock"
            self._doubt_from(record.time_ms)
        self._model.judge(record._replace(id=_ANY))
        self._model.sightings.clear()

    def _perhaps_late(self, original: Original, late: Mapping[SourceTuple, Filed]) -> bool:
        """Return whether a record was late. If no topic shows this, return whether the record may have been late."""
        plan = self._plan
        if plan.late is not None:
            return original.source in late or not plan.late.complete
        return plan.late_digests is None or forwarded_digest(plan, original, "late") in plan.late_digests

    def _doubt_from(self, time_ms: int) -> None:
        self._doubt_ms = time_ms if self._doubt_ms is None else max(self._doubt_ms, time_ms)


def forwarded_digest(plan: Plan, row: Row | Original, why: str = "") -> bytes:
    """Return the digest that a record must have in the output, including the headers that a worker appends."""
    headers, output = row.headers, plan.topology.output
    if why:
        headers = [*headers, (VERDICT_HEADER, why.encode())]
    if output is not None and output.headers:
        headers = [*headers, (SOURCE_HEADER, position(plan, row.source))]
    return digest_with(row.content, headers, row.timestamp_ms if plan.output_stamped else 0)


def forwarded_digests(plan: Plan, log: Log) -> list[bytes]:
    """Return the result of `forwarded_digest` for each record of a log."""
    headers: Sequence[Headers] = log.headers
    if plan.topology.output is not None and plan.topology.output.headers:
        places = map(partial(position, plan), log.sources())
        headers = [[*own, (SOURCE_HEADER, place)] for own, place in zip(headers, places, strict=True)]
    stamps = log.timestamps_ms if plan.output_stamped else np.zeros_like(log.timestamps_ms)
    return digests(log.contents, headers, stamps)


def position(plan: Plan, source: SourceTuple) -> bytes:
    """Return a source position in the form ``topic/partition/offset``, as in a worker's headers."""
    topic, partition, offset = source
    return f"{plan.topology.source.topics[topic]}/{partition}/{offset}".encode()
