"""Judges a batch of records by the deduplication rule, and returns their verdicts and new sightings.

`judged_at_once` judges most batches with dict lookups in C. All other batches are judged record by record. Property
tests check that `reference_model`, a slow implementation of the same rule, gives the same verdicts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import ne
from typing import Final

from dedup.core.extract import Extracted, FaultKind
from dedup.core.window import Duplicate, Feed, Late, Sighting, Source, StreamTime, Unique, Window
from dedup.errors import RecordFailed

Sightings = tuple[Sighting, ...]
Lookup = Callable[[Sequence[bytes], int], Mapping[bytes, Sightings]]
"""Returns the known sightings of each given ID. The integer is the batch's smallest event time."""


class OnMissing(enum.Enum):
    """The policy for a record without a usable ID."""

    DEAD_LETTER = "dead_letter"
    FORWARD = "forward"
    FAIL = "fail"


class OnTombstone(enum.Enum):
    """The policy for a record with a null value if the ID or the event time comes from the value."""

    FORWARD = "forward"
    DEAD_LETTER = "dead_letter"


class OnFuture(enum.Enum):
    """The policy for a record whose event time is too far ahead of the clock."""

    DEAD_LETTER = "dead_letter"
    CLAMP = "clamp"


class OnConflict(enum.Enum):
    """The policy for a duplicate with a different payload."""

    DUPLICATE = "duplicate"
    FORWARD = "forward"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a topology that affect verdicts."""

    window: Window
    missing: OnMissing = OnMissing.DEAD_LETTER
    tombstones: OnTombstone = OnTombstone.FORWARD
    future: OnFuture = OnFuture.DEAD_LETTER
    on_conflict: OnConflict = OnConflict.DUPLICATE
    fingerprints: bool = False
    source_topics: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """The names of the source topics, for error messages."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of records with their extracted values, as columns with one entry per record."""

    extracted: Extracted
    sources: Sequence[int]
    """The records' offsets in their source partitions."""
    feeds: Sequence[Feed]
    """The feed of each record, or a single entry if all records in the batch have the same feed."""
    idle_rows: frozenset[int] = frozenset()
    """The rows that are idle markers instead of records."""

    def source(self, row: int) -> Source:
        """Return the source topic, partition, and offset of a record."""
        feed = self.feeds[row] if len(self.feeds) > 1 else self.feeds[0]
        return Source(feed.topic, feed.partition, self.sources[row])

    def positions(self, rows: Sequence[int]) -> Iterable[tuple[int, int, int]]:
        """Return the result of `source` for each given row, as a plain tuple."""
        if len(self.feeds) > 1:
            return [(*self.feeds[row], self.sources[row]) for row in rows]
        ((topic, partition),) = self.feeds
        return zip(repeat(topic), repeat(partition), map(self.sources.__getitem__, rows))


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The reason why a record is a dead letter, given as a code and a sentence."""

    code: str
    detail: str


_BEFORE_ALL: Final = StreamTime.before(())


@dataclass(slots=True)
class Outcome:
    """The result of `fold`: the rows (positions in the batch) with each verdict, and the new sightings."""

    unique: list[int] = field(default_factory=list)
    exempt: dict[int, str] = field(default_factory=dict)
    """Rows that a policy forwards, each with the reason for `dedup-verdict`. Conflicts are also in `unique`."""
    duplicates: list[tuple[int, Sighting]] = field(default_factory=list)
    """Rows that repeat a sighting but are not in `conflicts`, each with the sighting as it was before the row."""
    repeats: list[tuple[int, int]] = field(default_factory=list)
    """Rows that repeat an earlier row of this batch, each with the earlier row. They are not in `duplicates`."""
    conflicts: list[tuple[int, Sighting]] = field(default_factory=list)
    """Duplicates whose payload differs from that of every sighting in range."""
    late: list[tuple[int, Late]] = field(default_factory=list)
    dead: list[tuple[int, DeadLetter]] = field(default_factory=list)
    clamped: dict[int, int] = field(default_factory=dict)
    """Rows whose event time was too far ahead, each with the event time that replaced it."""
    singles: list[int] = field(default_factory=list)
    """Rows whose new sighting, which has the row's event time, is the only sighting of its ID in its segment."""
    rewritten: dict[tuple[int, bytes], Sightings] = field(default_factory=dict)
    """Maps a segment and an ID to all sightings of the ID in the segment, unless `singles` contains the only one."""
    later: dict[tuple[int, bytes], Sightings] = field(default_factory=dict)
    """Maps entries of `rewritten` to the known sightings of the ID in later segments, if any."""
    stream_time: StreamTime = _BEFORE_ALL
    judged_times_ms: list[int] = field(default_factory=list)
    """The event time by which each row was judged."""
    filtered: int = 0
    """The number of forwarded rows for which the flow yielded no record. The flow runs after the fold."""
    flow_seconds: float = 0.0
    """The running time of the flow, in seconds."""

    def all_duplicates(self, rows: Rows) -> list[tuple[int, Sighting]]:
        """Return all duplicates except conflicts, in log order, each with the sighting that the duplicate repeats."""
        inside = [(row, sighting_of(rows, self.judged_times_ms, first)) for row, first in self.repeats]
        return sorted(self.duplicates + inside) if inside else self.duplicates


def sighting_of(rows: Rows, times_ms: Sequence[int], row: int) -> Sighting:
    """Return the sighting that a unique record creates."""
    return Sighting(times_ms[row], times_ms[row], rows.source(row), _fingerprint_of(rows, row))


def _fingerprint_of(rows: Rows, row: int) -> bytes:
    fingerprints = rows.extracted.fingerprints
    return b"" if fingerprints is None else fingerprints[row]


def _failed(source: Source, rules: Rules, cause: str, policy: str) -> RecordFailed:
    place = source.place(rules.source_topics)
    return RecordFailed(f"{place}: {cause}. The topology says `{policy}`. Fix the producer, or choose another policy.")


def judged_at_once(
    ids: Sequence[bytes],
    times_ms: Sequence[int],
    known: Mapping[bytes, tuple[Sighting, ...]],
    window: Window,
    stream_time_ms: int,
    fingerprints: Sequence[bytes] | None = None,
) -> tuple[list[int], list[tuple[int, Sighting]], list[tuple[int, int]]] | None:
    """Return `unique`, `duplicates`, and `repeats` of an `Outcome`, or None if the records must be judged one by one.

    A batch can be judged as a whole if the records and the known sightings are close enough in time that every record
    that repeats an ID is a duplicate. If payloads are compared, each duplicate must also have the same fingerprint as
    the sighting or the record that it repeats. ``known`` must contain only sightings of the given IDs, and
    ``stream_time_ms`` is the stream time after the batch. ``window`` must not extend sightings.
    """
    least_ms, greatest_ms = min(times_ms), max(times_ms)
    if least_ms < stream_time_ms - window.grace_ms or greatest_ms - least_ms >= window.guard_ms:
        return None
    # A single sighting between these bounds makes every record with the same ID a duplicate. The sighting is never too
    # old to count, because records are behind stream time by at most the grace, and the sighting is behind each record
    # by less than the guard period.
    before_ms, after_ms = least_ms + window.guard_ms, greatest_ms - window.guard_ms
    for sightings in known.values():
        if len(sightings) > 1 or sightings[0].first_ms >= before_ms or sightings[0].last_ms <= after_ms:
            return None
    first: dict[bytes, int] = {}
    rows = range(len(ids))
    owners = list(map(first.setdefault, ids, rows))
    duplicates = [(first.pop(key), seen) for key, (seen,) in known.items()]
    repeats: list[tuple[int, int]] = []
    for row in compress(rows, map(ne, owners, rows)):
        sightings = known.get(ids[row], ())
        if sightings:
            duplicates.append((row, sightings[0]))
        else:
            repeats.append((row, owners[row]))
    if fingerprints is not None and not (
        all(seen.fingerprint == fingerprints[row] for row, seen in duplicates)
        and all(fingerprints[owner] == fingerprints[row] for row, owner in repeats)
    ):
        return None
    duplicates.sort()
    return list(first.values()), duplicates, repeats


def fold(rows: Rows, rules: Rules, before: StreamTime, lookup: Lookup, *, ceiling_ms: int) -> Outcome:
    """Judge a batch in log order, so that the sightings of earlier records affect later records.

    ``ceiling_ms`` is the greatest accepted event time. Raises RecordFailed if the policy for a record is `fail`.
    """
    outcome, skipped = screen(rows, rules, ceiling_ms=ceiling_ms)
    times_ms = outcome.judged_times_ms
    ids = rows.extracted.ids
    wanted = ids if not skipped else [key for row, key in enumerate(ids) if row not in skipped]
    judged = times_ms if not skipped else [t for row, t in enumerate(times_ms) if row not in skipped]
    known = lookup(wanted, min(judged)) if wanted else {}  # type: ignore[arg-type]  # no None remains
    if wanted and not skipped and _one_feed(rows, before) and not rules.window.extend:
        after = before.after_one_feed_at_once(max(judged))
        prints = _compared(rows, rules)
        at_once = judged_at_once(ids, times_ms, known, rules.window, after.value_ms, prints)  # type: ignore[arg-type]  # as above
        if at_once is not None:
            outcome.stream_time = after
            outcome.unique, outcome.duplicates, outcome.repeats = at_once
            outcome.singles = outcome.unique
            return outcome
    stream_times, outcome.stream_time = _stream_times(rows, times_ms, skipped, before)
    if wanted:
        judge(rows, rules, outcome, dict(known), stream_times, skipped)
    return outcome


def _one_feed(rows: Rows, before: StreamTime) -> bool:
    """Return whether stream time depends on a single feed and all records come from this feed."""
    return len(before.feeds) == 1 and before.feeds.keys() >= set(rows.feeds)


def _compared(rows: Rows, rules: Rules) -> Sequence[bytes] | None:
    """Return the fingerprint of each record, or None if payloads are not compared."""
    if not rules.fingerprints:
        return None
    return rows.extracted.fingerprints or [b""] * len(rows.extracted.ids)


def screen(rows: Rows, rules: Rules, *, ceiling_ms: int) -> tuple[Outcome, set[int]]:
    """Return an outcome that contains only the records that cannot be judged, and the rows that `judge` must skip.

    Raises RecordFailed if the policy for a record is `fail`.
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
    """Judge each row that is not in ``skipped`` at the row's stream time, and add the verdict to ``outcome``.

    An engine that groups rows by ID calls `judge` instead of `fold`, with the stream time of each row. New sightings
    are added to ``known``, except those of the rows in ``outcome.singles``. Raises RecordFailed if the policy for a
    record is `fail`.
    """
    _Judging(rows, rules, outcome, known).run(stream_times, skipped)


def _faults(rows: Rows, rules: Rules, outcome: Outcome) -> set[int]:
    skipped = set(rows.idle_rows)
    for row, fault in sorted(rows.extracted.faults.items()):
        if row in rows.idle_rows:
            continue
        skipped.add(row)
        if fault.kind is FaultKind.MISSING_ID and rules.missing is OnMissing.FAIL:
            raise _failed(rows.source(row), rules, fault.detail, "missing: fail")
        if fault.kind is FaultKind.MISSING_ID and rules.missing is OnMissing.FORWARD:
            outcome.exempt[row] = "missing_id"
        elif fault.kind is FaultKind.TOMBSTONE and rules.tombstones is OnTombstone.FORWARD:
            outcome.exempt[row] = "tombstone"
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
    if rows.idle_rows or not _one_feed(rows, before):
        feeds = rows.feeds if len(rows.feeds) == len(times_ms) else [rows.feeds[0]] * len(times_ms)
        return before.after(
            (feed, None if row in skipped else time_ms, row in rows.idle_rows)
            for row, (feed, time_ms) in enumerate(zip(feeds, times_ms, strict=True))
        )
    # A time that is not above stream time leaves the running maximum unchanged.
    return before.after_one_feed(
        [before.value_ms if row in skipped else time_ms for row, time_ms in enumerate(times_ms)]
        if skipped
        else times_ms
    )


class _Judging:
    def __init__(self, rows: Rows, rules: Rules, outcome: Outcome, known: dict[bytes, Sightings]) -> None:
        self._rows: Final = rows
        self._rules: Final = rules
        self._window: Final = rules.window
        self._outcome: Final = outcome
        self._known: Final = known
        self._fresh: Final[dict[bytes, int]] = {}
        """Maps each ID whose only sighting is from this batch to its row. A `Sighting` is created only when needed."""

    def run(self, stream_times: list[int], skipped: set[int]) -> None:
        known, fresh = self._known, self._fresh
        window, times_ms, outcome = self._window, self._outcome.judged_times_ms, self._outcome
        guard_ms, grace_ms, retention_ms, extend = window.guard_ms, window.grace_ms, window.retention_ms, window.extend
        prints = _compared(self._rows, self._rules)
        ids = self._ids(skipped)
        for row, (key, time_ms, stream_time_ms) in enumerate(zip(ids, times_ms, stream_times, strict=True)):
            if key is None:
                continue
            # Most repeated IDs have one sighting, and their records are duplicates with the same payload, which do not
            # change the sighting. Only the other records need `_judge_known`.
            first = fresh.get(key)
            if first is not None:
                first_ms = times_ms[first]
                inside = -guard_ms < time_ms - first_ms < guard_ms and first_ms >= stream_time_ms - retention_ms
                unchanged = not extend or time_ms <= first_ms
                if inside and unchanged and (prints is None or prints[row] == prints[first]):
                    outcome.repeats.append((row, first))
                else:
                    self._judge_known(row, key, time_ms, stream_time_ms)
            elif key in known:
                if len(known[key]) == 1:
                    (seen,) = known[key]
                    inside = seen.first_ms - guard_ms < time_ms < seen.last_ms + guard_ms
                    alike = prints is None or prints[row] == seen.fingerprint
                    if inside and alike and seen.last_ms >= stream_time_ms - retention_ms:
                        outcome.duplicates.append((row, seen))
                        if extend and time_ms > seen.last_ms:
                            self._extend(key, seen, time_ms)
                        continue
                self._judge_known(row, key, time_ms, stream_time_ms)
            elif time_ms < stream_time_ms - grace_ms:
                outcome.late.append((row, Late(stream_time_ms - time_ms)))
            else:
                outcome.unique.append(row)
                fresh[key] = row
        outcome.singles = list(fresh.values())

    def _ids(self, skipped: set[int]) -> Sequence[bytes | None]:
        """Return the ID of each row, with None for skipped rows."""
        ids = self._rows.extracted.ids
        return [None if row in skipped else key for row, key in enumerate(ids)] if skipped else ids

    def _extend(self, key: bytes, seen: Sighting, time_ms: int) -> None:
        """Extend the only sighting of an ID after a duplicate at ``time_ms``."""
        longer = self._window.extended(seen, time_ms)
        if longer.last_ms != seen.last_ms:
            # The shorter interval may stay in an older segment, because the longer interval contains it.
            self._known[key] = self._outcome.rewritten[self._window.segment_of(longer.last_ms), key] = (longer,)

    def _judge_known(self, row: int, key: bytes, time_ms: int, stream_time_ms: int) -> None:
        first_row = self._fresh.get(key)
        known = self._known[key] if first_row is None else (self._sighting(first_row),)
        verdict, conflict = self._window.decide(time_ms, known, stream_time_ms), False
        if self._rules.fingerprints and isinstance(verdict, Duplicate):
            fingerprint = _fingerprint_of(self._rows, row)
            alike = tuple(seen for seen in known if seen.fingerprint == fingerprint)
            same = self._window.decide(time_ms, alike, stream_time_ms)
            conflict = not isinstance(same, Duplicate)
            if conflict and self._rules.on_conflict is OnConflict.FAIL:
                cause = "its ID was seen with another payload"
                raise _failed(self._rows.source(row), self._rules, cause, "on_conflict: fail")
            if self._rules.on_conflict is OnConflict.FORWARD:
                # With `forward`, the identity is the ID and the fingerprint, so only a record with the same payload can
                # be a duplicate.
                verdict = same
        match verdict:
            case Duplicate(of):
                (self._outcome.conflicts if conflict else self._outcome.duplicates).append((row, of))
                longer = self._window.extended(of, time_ms) if self._window.extend else of
                if longer != of:
                    rest = tuple(longer if seen == of else seen for seen in known)
                    # The shorter interval may stay in an older segment, because the longer interval contains it.
                    self._remember(key, rest, self._window.segment_of(longer.last_ms))
            case Late():
                self._outcome.late.append((row, verdict))
            case Unique():
                self._outcome.unique.append(row)
                if conflict:
                    self._outcome.exempt[row] = "conflict"
                self._remember(key, (*known, self._sighting(row)), self._window.segment_of(time_ms))

    def _remember(self, key: bytes, sightings: Sightings, segment: int) -> None:
        row = self._fresh.pop(key, None)
        if row is not None:
            seen = self._sighting(row)
            self._outcome.rewritten[self._window.segment_of(seen.last_ms), key] = (seen,)
        self._known[key] = sightings
        segment_of = self._window.segment_of
        here = tuple(seen for seen in sightings if segment_of(seen.last_ms) == segment)
        self._outcome.rewritten[segment, key] = here
        later = tuple(seen for seen in sightings if segment_of(seen.last_ms) > segment)
        if later:
            self._outcome.later[segment, key] = later

    def _sighting(self, row: int) -> Sighting:
        return sighting_of(self._rows, self._outcome.judged_times_ms, row)
