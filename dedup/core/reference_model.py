"""Implements the deduplication rule in a slow but straightforward way, as the reference for all other implementations.

Tests and ``dedup verify`` compare other implementations with this model. The model judges records one by one, never
reads a clock, and shares only the types ``Source`` and ``Sighting`` with the fast implementations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from dedup.core.window import BEFORE_ALL_TIME, Sighting, Source

Feed = tuple[int, int]
"""A source partition: the position of its topic in ``source.topics``, and the partition number."""

ModelFault = Literal["missing_id", "unreadable", "tombstone", "bad_time"]

Kind = Literal["unique", "duplicate", "late", "dead_letter", "exempt", "marker", "fail"]
"""``exempt`` means that a policy forwards the record without judging it, because it has no ID or a null value.
``marker`` is for an idle marker, which is not a record. ``fail`` means that the worker stops at the record, so ``fail``
is always the last verdict.
"""

_ONE_FEED: Final[tuple[Feed, ...]] = ((0, 0),)


@dataclass(frozen=True, slots=True)
class ModelRules:
    """The settings of a topology that affect verdicts."""

    guard_ms: int
    grace_ms: int
    extend: bool = False
    extend_at_most_ms: int = 0
    missing: Literal["dead_letter", "forward", "fail"] = "dead_letter"
    tombstones: Literal["forward", "dead_letter"] = "forward"
    on_conflict: Literal["duplicate", "forward", "fail"] = "duplicate"
    future: Literal["dead_letter", "clamp"] = "dead_letter"


class ModelRecord(NamedTuple):
    """The properties of a record that the deduplication rule needs."""

    id: bytes | None
    time_ms: int
    source: Source = Source(0, 0, 0)
    fingerprint: bytes = b""
    fault: ModelFault | None = None
    ceiling_ms: int | None = None
    """The greatest event time that was accepted when this record was judged, or None without a limit."""
    idle: bool = False
    """True for an idle marker, which is not a record but shows that the feed currently has no more records."""


class ModelVerdict(NamedTuple):
    """The expected verdict on one record."""

    kind: Kind
    time_ms: int
    """The event time by which the record was judged, which is ``ceiling_ms`` if a future time was clamped."""
    stream_time_ms: int
    """Stream time after this record."""
    of: Sighting | None = None
    """The sighting that a duplicate repeats or a forwarded conflict contradicts, as it was before this record."""
    conflict: bool = False
    reason: str = ""
    """The reason code of a dead letter, an exemption, or a failure."""


class ReferenceModel:
    """Judges the records of one task in log order, and keeps the task's sightings and stream time."""

    def __init__(self, rules: ModelRules, feeds: Iterable[Feed] = _ONE_FEED) -> None:
        """``feeds`` are the initial source partitions. A partition added later is idle until its first record."""
        self.rules: Final = rules
        self.stream_time_ms = BEFORE_ALL_TIME
        self.greatest: Final[dict[Feed, int]] = dict.fromkeys(feeds, BEFORE_ALL_TIME)
        self.idle: Final[dict[Feed, bool]] = dict.fromkeys(self.greatest, False)
        self.sightings: Final[dict[bytes, list[Sighting]]] = {}

    def judge(self, record: ModelRecord) -> ModelVerdict:
        """Return the verdict on the next record, and update the model's sightings and stream time."""
        feed = (record.source.topic, record.source.partition)
        self.greatest.setdefault(feed, BEFORE_ALL_TIME)
        self.idle.setdefault(feed, True)
        self.idle[feed] = record.idle
        if record.idle:
            self._advance()
            return ModelVerdict("marker", record.time_ms, self.stream_time_ms)
        if record.fault is not None or record.id is None:
            return self._unjudged(record, record.fault or "missing_id")
        time_ms = record.time_ms
        if time_ms < 0:
            return ModelVerdict("dead_letter", time_ms, self.stream_time_ms, reason="negative_time")
        if record.ceiling_ms is not None and time_ms > record.ceiling_ms:
            if self.rules.future == "dead_letter":
                return ModelVerdict("dead_letter", time_ms, self.stream_time_ms, reason="future_time")
            time_ms = record.ceiling_ms
        self.greatest[feed] = max(self.greatest[feed], time_ms)
        self._advance()
        return self._decide(record.id, time_ms, record)

    def forget(self) -> None:
        """Drop every sighting that is too old to affect a later verdict."""
        oldest_ms = self.stream_time_ms - self.rules.guard_ms - self.rules.grace_ms
        for tracking_id in list(self.sightings):
            kept = [seen for seen in self.sightings[tracking_id] if seen.last_ms >= oldest_ms]
            if kept:
                self.sightings[tracking_id] = kept
            else:
                del self.sightings[tracking_id]

    def _advance(self) -> None:
        awake = [greatest_ms for feed, greatest_ms in self.greatest.items() if not self.idle[feed]]
        candidate_ms = min(awake) if awake else max(self.greatest.values())
        self.stream_time_ms = max(self.stream_time_ms, candidate_ms)

    def _unjudged(self, record: ModelRecord, fault: ModelFault) -> ModelVerdict:
        policy = "dead_letter"
        if fault == "missing_id":
            policy = self.rules.missing
        if fault == "tombstone":
            policy = self.rules.tombstones
        kind: Kind = "dead_letter"
        if policy == "forward":
            kind = "exempt"
        if policy == "fail":
            kind = "fail"
        return ModelVerdict(kind, record.time_ms, self.stream_time_ms, reason=fault)

    def _decide(self, tracking_id: bytes, time_ms: int, record: ModelRecord) -> ModelVerdict:
        known = self.sightings.setdefault(tracking_id, [])
        in_range = self._in_range(known, time_ms) if known else []
        same = [seen for seen in in_range if seen.fingerprint == record.fingerprint]
        conflict = bool(in_range) and not same
        if conflict and self.rules.on_conflict == "fail":
            of = self._nearest(in_range, time_ms)
            return ModelVerdict("fail", time_ms, self.stream_time_ms, of, conflict=True, reason="conflict")
        # With `forward`, the identity is the ID and the fingerprint, so only a record with the same payload can be a
        # duplicate.
        repeats = same if self.rules.on_conflict == "forward" else in_range
        if repeats:
            of = self._nearest(repeats, time_ms)
            if self.rules.extend:
                known[known.index(of)] = of._replace(last_ms=self._extended_ms(of, time_ms))
            return ModelVerdict("duplicate", time_ms, self.stream_time_ms, of, conflict=conflict)
        if time_ms < self.stream_time_ms - self.rules.grace_ms:
            return ModelVerdict("late", time_ms, self.stream_time_ms)
        known.append(Sighting(time_ms, time_ms, record.source, record.fingerprint))
        contradicted = self._nearest(in_range, time_ms) if in_range else None
        return ModelVerdict("unique", time_ms, self.stream_time_ms, contradicted, conflict=conflict)

    def _in_range(self, known: list[Sighting], time_ms: int) -> list[Sighting]:
        guard_ms = self.rules.guard_ms
        oldest_ms = self.stream_time_ms - guard_ms - self.rules.grace_ms
        found = []
        for seen in known:
            still_counts = seen.last_ms >= oldest_ms
            if still_counts and seen.first_ms - guard_ms < time_ms < seen.last_ms + guard_ms:
                found.append(seen)
        return found

    @staticmethod
    def _nearest(sightings: list[Sighting], time_ms: int) -> Sighting:
        """Return the nearest sighting (the smallest if several are equally close), so that all engines agree."""
        best = sightings[0]
        best_distance_ms = -1
        for seen in sightings:
            distance_ms = 0
            if time_ms < seen.first_ms:
                distance_ms = seen.first_ms - time_ms
            if time_ms > seen.last_ms:
                distance_ms = time_ms - seen.last_ms
            nearer = best_distance_ms < 0 or distance_ms < best_distance_ms
            if nearer or (distance_ms == best_distance_ms and seen < best):
                best, best_distance_ms = seen, distance_ms
        return best

    def _extended_ms(self, seen: Sighting, time_ms: int) -> int:
        cap_ms = seen.first_ms + self.rules.extend_at_most_ms
        if time_ms <= seen.last_ms or seen.last_ms >= cap_ms:
            return seen.last_ms
        return min(time_ms, cap_ms)


def model(records: Iterable[ModelRecord], rules: ModelRules, feeds: Iterable[Feed] = _ONE_FEED) -> list[ModelVerdict]:
    """Return the verdicts on the records, in order, up to and including the first verdict ``fail``."""
    state = ReferenceModel(rules, feeds)
    verdicts = []
    for record in records:
        verdict = state.judge(record)
        verdicts.append(verdict)
        if verdict.kind == "fail":
            break
    return verdicts
