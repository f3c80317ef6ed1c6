"""A batch judged as columns: verdicts for its records, and the sightings they leave.

`fold` is the hot path. It does per record only what the rule needs; `core/model.py` says the same the slow way, and
the property tests hold the two together.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dedup.core.at_once import judged_at_once
from dedup.core.extract import FaultKind
from dedup.core.stream_time import Feed, StreamTime
from dedup.core.window import Duplicate, Late, Sighting, Source, Unique, Window
from dedup.errors import DedupError

if TYPE_CHECKING:
    from dedup.core.extract import Extracted, Fault

Sightings = tuple[Sighting, ...]
Lookup = Callable[[Sequence[bytes], int], Mapping[bytes, Sightings]]
"""(IDs, least event time of the batch) -> the known sightings of the IDs that have any."""

NO_FAULTS: Final[Mapping[int, Fault]] = {}


class OnMissing(enum.Enum):
    """What becomes of a record without a usable ID."""

    DEAD_LETTER = "dead_letter"
    FORWARD = "forward"
    FAIL = "fail"


class OnTombstone(enum.Enum):
    """What becomes of a null value where the ID would be in the value."""

    FORWARD = "forward"
    DEAD_LETTER = "dead_letter"


class OnFuture(enum.Enum):
    """What becomes of an event time too far ahead of the clock."""

    DEAD_LETTER = "dead_letter"
    CLAMP = "clamp"


class OnConflict(enum.Enum):
    """What becomes of a duplicate with another payload."""

    DUPLICATE = "duplicate"
    FORWARD = "forward"
    FAIL = "fail"


class RecordFailed(DedupError):
    """A record met a policy `fail`: the worker stops before it, with nothing committed of it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """All of a topology that a verdict depends on."""

    window: Window
    missing: OnMissing = OnMissing.DEAD_LETTER
    tombstones: OnTombstone = OnTombstone.FORWARD
    future: OnFuture = OnFuture.DEAD_LETTER
    on_conflict: OnConflict = OnConflict.DUPLICATE
    fingerprints: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch after extraction, column by column; every column has one entry a record."""

    extracted: Extracted
    sources: Sequence[int]
    """Offsets in the source partition."""
    feeds: Sequence[Feed]
    """One entry for each record, or a single one where the whole batch has one feed."""
    idle_rows: frozenset[int] = frozenset()
    """Rows that are idle markers, no records."""

    def source(self, row: int) -> Source:
        """Return where a record came from."""
        feed = self.feeds[row] if len(self.feeds) > 1 else self.feeds[0]
        return Source(feed.topic, feed.partition, self.sources[row])


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that can not be judged, with the reason's code and a sentence."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Exempt:
    """Forwarded by a policy that names it an exception; marked so in a header."""

    why: str


@dataclass(slots=True)
class Outcome:
    """What `fold` found: rows by verdict, and what state they leave."""

    unique: list[int] = field(default_factory=list)
    exempt: dict[int, Exempt] = field(default_factory=dict)
    """Rows to forward with a mark; those of forwarded conflicts are in `unique` too."""
    duplicates: list[tuple[int, Sighting]] = field(default_factory=list)
    """Rows that repeat a sighting, with it as it was before them; those of `conflicts` are not in here."""
    repeats: list[tuple[int, int]] = field(default_factory=list)
    """More duplicates: rows that repeat a row of this batch. `all_duplicates` has both kinds."""
    conflicts: list[tuple[int, Sighting]] = field(default_factory=list)
    """Duplicates with another payload than every sighting in range."""
    late: list[tuple[int, Late]] = field(default_factory=list)
    dead: list[tuple[int, DeadLetter]] = field(default_factory=list)
    clamped: dict[int, int] = field(default_factory=dict)
    """Rows whose event time was replaced, with the time they were judged at."""
    singles: list[int] = field(default_factory=list)
    """Rows that leave the only sighting of their ID in its segment, at their own time."""
    rewritten: dict[tuple[int, bytes], Sightings] = field(default_factory=dict)
    """(segment, ID) -> all sightings there, where more than one row or an older sighting is involved."""
    stream_time: StreamTime = field(default_factory=lambda: StreamTime.before(()))
    judged_times_ms: list[int] = field(default_factory=list)
    """Event time of each row as judged."""

    def all_duplicates(self, rows: Rows) -> list[tuple[int, Sighting]]:
        """Return the duplicates that are no conflicts, in the log's order, each with what it repeats."""
        inside = [(row, sighting_of(rows, self.judged_times_ms, first)) for row, first in self.repeats]
        return sorted(self.duplicates + inside) if inside else self.duplicates


def sighting_of(rows: Rows, times_ms: Sequence[int], row: int) -> Sighting:
    """Return the sighting that a record leaves."""
    fingerprints = rows.extracted.fingerprints
    fingerprint = b"" if fingerprints is None else fingerprints[row]
    return Sighting(times_ms[row], times_ms[row], rows.source(row), fingerprint)


def fold(rows: Rows, rules: Rules, before: StreamTime, lookup: Lookup, *, ceiling_ms: int) -> Outcome:
    """Return the verdicts of a batch, in the log's order, each seeing the sightings of those before it.

    ``ceiling_ms`` is the greatest event time accepted. Raises RecordFailed where a policy says `fail`.
    """
    outcome, skipped = screen(rows, rules, ceiling_ms=ceiling_ms)
    times_ms = outcome.judged_times_ms
    ids = rows.extracted.ids
    wanted = ids if not skipped else [key for row, key in enumerate(ids) if row not in skipped]
    judged = times_ms if not skipped else [t for row, t in enumerate(times_ms) if row not in skipped]
    known = lookup(wanted, min(judged)) if wanted else {}  # type: ignore[arg-type]  # no None is left
    if wanted and not skipped and len(before.feeds) == 1 and _is_plain(rules):
        after = before.after_one_feed_at_once(max(judged))
        at_once = judged_at_once(ids, times_ms, known, rules.window, after.value_ms)  # type: ignore[arg-type]  # as above
        if at_once is not None:
            outcome.stream_time = after
            outcome.unique, outcome.singles = at_once.unique, at_once.unique
            outcome.duplicates, outcome.repeats = at_once.duplicates, at_once.repeats
            return outcome
    stream_times, outcome.stream_time = _stream_times(rows, times_ms, skipped, before)
    if wanted:
        judge(rows, rules, outcome, dict(known), stream_times, skipped)
    return outcome


def _is_plain(rules: Rules) -> bool:
    """Whether a sighting stays as it was made, and payloads do not matter."""
    return not rules.window.extend and not rules.fingerprints


def screen(rows: Rows, rules: Rules, *, ceiling_ms: int) -> tuple[Outcome, set[int]]:
    """Return an outcome in which only faults and impossible times are dealt with, and the rows not to be judged.

    Raises RecordFailed where a policy says `fail`.
    """
    outcome = Outcome()
    skipped = _faults(rows, rules, outcome)
    outcome.judged_times_ms = _accepted_times(rows, rules, skipped, outcome, ceiling_ms)
    return outcome, skipped


def judge(
    rows: Rows,
    rules: Rules,
    outcome: Outcome,
    known: dict[bytes, Sightings],
    stream_times: list[int],
    skipped: set[int],
) -> None:
    """The outcome has the verdicts of all rows not skipped, each at a stream time of its own.

    `known` is brought up to date, but for the IDs of `outcome.singles`. For engines that bring the rows of an ID
    together, and know the stream time of each without its neighbours. Raises RecordFailed where a policy says `fail`.
    """
    _Judging(rows, rules, outcome, known).run(stream_times, skipped)


def _faults(rows: Rows, rules: Rules, outcome: Outcome) -> set[int]:
    """Deal with rows that have no ID or time; return the rows not to be judged."""
    skipped = set(rows.idle_rows)
    for row, fault in sorted(rows.extracted.faults.items()):
        if row in rows.idle_rows:
            continue
        skipped.add(row)
        if fault.kind is FaultKind.MISSING_ID and rules.missing is OnMissing.FAIL:
            source = rows.source(row)
            raise RecordFailed(
                f"source topic {source.topic}, partition {source.partition}, offset {source.offset}: {fault.detail} "
                f"The topology says `missing: fail`. Mend the producer, or choose another policy."
            )
        if fault.kind is FaultKind.MISSING_ID and rules.missing is OnMissing.FORWARD:
            outcome.exempt[row] = Exempt("missing_id")
        elif fault.kind is FaultKind.TOMBSTONE and rules.tombstones is OnTombstone.FORWARD:
            outcome.exempt[row] = Exempt("tombstone")
        else:
            outcome.dead.append((row, DeadLetter(fault.code, fault.detail)))
    return skipped


def _accepted_times(rows: Rows, rules: Rules, skipped: set[int], outcome: Outcome, ceiling_ms: int) -> list[int]:
    times_ms = rows.extracted.times_ms
    if not times_ms or (min(times_ms) >= 0 and max(times_ms) <= ceiling_ms):
        return times_ms
    accepted = list(times_ms)
    for row, time_ms in enumerate(times_ms):
        if row in skipped or 0 <= time_ms <= ceiling_ms:
            continue
        if time_ms > ceiling_ms and rules.future is OnFuture.CLAMP:
            accepted[row] = outcome.clamped[row] = ceiling_ms
            continue
        skipped.add(row)
        if time_ms < 0:
            dead = DeadLetter("negative_time", f"event time {time_ms} ms is before 1970")
        else:
            dead = DeadLetter("future_time", f"event time {time_ms} ms is {time_ms - ceiling_ms} ms beyond the cap")
        outcome.dead.append((row, dead))
    return accepted


def _stream_times(
    rows: Rows, times_ms: list[int], skipped: set[int], before: StreamTime
) -> tuple[list[int], StreamTime]:
    """Return stream time at every row; rows not judged repeat that of the row before."""
    if len(before.feeds) > 1 or rows.idle_rows:
        feeds = rows.feeds if len(rows.feeds) == len(times_ms) else [rows.feeds[0]] * len(times_ms)
        return before.after(
            (feed, None if row in skipped else time_ms, row in rows.idle_rows)
            for row, (feed, time_ms) in enumerate(zip(feeds, times_ms, strict=True))
        )
    if not skipped:
        return before.after_one_feed(times_ms)
    # A time below all others leaves the running maximum as it is.
    return before.after_one_feed(
        [before.value_ms if row in skipped else time_ms for row, time_ms in enumerate(times_ms)]
    )


class _Judging:
    """One pass over a batch; `known` grows by what the batch itself leaves."""

    def __init__(self, rows: Rows, rules: Rules, outcome: Outcome, known: dict[bytes, Sightings]) -> None:
        self._rows: Final = rows
        self._rules: Final = rules
        self._window: Final = rules.window
        self._outcome: Final = outcome
        self._known: Final = known
        self._fresh: Final[dict[bytes, int]] = {}
        """ID -> row, for IDs that this batch saw first and has seen once: no Sighting is made for most of them."""

    def run(self, stream_times: list[int], skipped: set[int]) -> None:
        """Judge every row that is not skipped.

        The usual cases are decided in the loop itself, by the rule of `Window.decide` for a single plain interval.
        """
        known, fresh = self._known, self._fresh
        window, times_ms, outcome = self._window, self._outcome.judged_times_ms, self._outcome
        guard_ms, grace_ms, retention_ms = window.guard_ms, window.grace_ms, window.retention_ms
        plain = _is_plain(self._rules)
        ids: Sequence[bytes | None] = self._rows.extracted.ids
        if skipped:
            ids = [None if row in skipped else key for row, key in enumerate(ids)]
        for row, (key, time_ms, stream_time_ms) in enumerate(zip(ids, times_ms, stream_times, strict=True)):
            if key is None:
                continue
            first = fresh.get(key)
            if first is not None:
                first_ms = times_ms[first]
                if plain and -guard_ms < time_ms - first_ms < guard_ms and first_ms >= stream_time_ms - retention_ms:
                    outcome.repeats.append((row, first))
                else:
                    self._judge_known(row, key, time_ms, stream_time_ms)
            elif key in known:
                if plain and len(known[key]) == 1:
                    (seen,) = known[key]
                    inside = seen.first_ms - guard_ms < time_ms < seen.last_ms + guard_ms
                    if inside and seen.last_ms >= stream_time_ms - retention_ms:
                        outcome.duplicates.append((row, seen))
                        continue
                self._judge_known(row, key, time_ms, stream_time_ms)
            elif time_ms < stream_time_ms - grace_ms:
                outcome.late.append((row, Late(stream_time_ms - time_ms)))
            else:
                outcome.unique.append(row)
                fresh[key] = row
        outcome.singles = list(fresh.values())

    def _judge_known(self, row: int, key: bytes, time_ms: int, stream_time_ms: int) -> None:
        first_row = self._fresh.get(key)
        known = self._known[key] if first_row is None else (self._sighting(first_row),)
        fingerprint = self._fingerprint(row)
        verdict = self._window.decide(time_ms, known, stream_time_ms)
        conflict = isinstance(verdict, Duplicate) and self._conflicts(known, time_ms, stream_time_ms, fingerprint)
        if conflict:
            verdict = self._conflicting(row, verdict, known, time_ms, stream_time_ms)
        elif isinstance(verdict, Duplicate) and self._rules.on_conflict is OnConflict.FORWARD:
            verdict = self._window.decide(time_ms, _like(known, fingerprint), stream_time_ms)
        match verdict:
            case Duplicate(of):
                (self._outcome.conflicts if conflict else self._outcome.duplicates).append((row, of))
                if self._window.extend:
                    self._extend(key, known, of, time_ms)
            case Late():
                self._outcome.late.append((row, verdict))
            case Unique():
                self._outcome.unique.append(row)
                if conflict:
                    self._outcome.exempt[row] = Exempt("conflict")
                self._remember(key, (*known, self._sighting(row)), self._window.segment_of(time_ms))

    def _conflicts(self, known: Sightings, time_ms: int, stream_time_ms: int, fingerprint: bytes) -> bool:
        """Tell whether no sighting in range has this payload; the caller knows that one is in range."""
        if not self._rules.fingerprints:
            return False
        return not isinstance(self._window.decide(time_ms, _like(known, fingerprint), stream_time_ms), Duplicate)

    def _conflicting(
        self, row: int, verdict: Unique | Duplicate | Late, known: Sightings, time_ms: int, stream_time_ms: int
    ) -> Unique | Duplicate | Late:
        match self._rules.on_conflict:
            case OnConflict.DUPLICATE:
                return verdict
            case OnConflict.FORWARD:
                # Identity is then ID and fingerprint: only the same payload can be a duplicate.
                return self._window.decide(time_ms, _like(known, self._fingerprint(row)), stream_time_ms)
            case OnConflict.FAIL:
                source = self._rows.source(row)
                raise RecordFailed(
                    f"source topic {source.topic}, partition {source.partition}, offset {source.offset}: its ID was "
                    f"seen with another payload. The topology says `on_conflict: fail`. Mend the producer, or choose "
                    f"another policy."
                )

    def _extend(self, key: bytes, known: Sightings, of: Sighting, time_ms: int) -> None:
        longer = self._window.extended(of, time_ms)
        if longer != of:
            rest = tuple(longer if seen == of else seen for seen in known)
            # The shorter interval left in an older segment says nothing that the longer one does not.
            self._remember(key, rest, self._window.segment_of(longer.last_ms))

    def _remember(self, key: bytes, sightings: Sightings, segment: int) -> None:
        self._fresh_is_known(key)
        self._known[key] = sightings
        segment_of = self._window.segment_of
        here = tuple(seen for seen in sightings if segment_of(seen.last_ms) == segment)
        self._outcome.rewritten[segment, key] = here

    def _fresh_is_known(self, key: bytes) -> None:
        row = self._fresh.pop(key, None)
        if row is not None:
            seen = self._sighting(row)
            self._outcome.rewritten[self._window.segment_of(seen.last_ms), key] = (seen,)

    def _fingerprint(self, row: int) -> bytes:
        fingerprints = self._rows.extracted.fingerprints
        return b"" if fingerprints is None else fingerprints[row]

    def _sighting(self, row: int) -> Sighting:
        return sighting_of(self._rows, self._outcome.judged_times_ms, row)


def _like(known: Sightings, fingerprint: bytes) -> Sightings:
    return tuple(seen for seen in known if seen.fingerprint == fingerprint)
