"""Verdicts over rows that come sorted by ID, and within an ID in the order in which they are judged.

An ID that is there once in a batch, and nearly all are, is decided by one comparison in numpy. The others go through
the worker's own fold, with the stream time each row brings. State is the sightings of one ID.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dedup.core.extract import Extracted
from dedup.core.fold import Outcome, Rows, Rules, Sightings, judge, sighting_of
from dedup.core.stream_time import Feed
from dedup.core.window import Sighting, Source

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

UNIQUE: Final = 0
DUPLICATE: Final = 1
CONFLICT: Final = 2
LATE: Final = 3
FORWARDED_CONFLICT: Final = 4
_PIECE_ROWS: Final = 4096
_LONG_GROUP: Final = 256
"""Rows of one ID that are judged at a time: their number enters squared."""


@dataclass(frozen=True, slots=True)
class SortedRows:
    """A batch, a place per record."""

    ids: pa.Array
    """State keys; no null."""
    tasks: Integers
    """IDs meet only within one of these."""
    times_ms: Integers
    stream_ms: Integers
    topics: Integers
    """Position in ``source.topics``."""
    partitions: Integers
    """Of the source; -1 where a row has no coordinates."""
    offsets: Integers
    fingerprints: pa.Array | None


@dataclass(frozen=True, slots=True)
class Decided:
    """Verdicts of a batch, a place per record."""

    verdicts: npt.NDArray[np.int8]
    has_first: npt.NDArray[np.bool_]
    """Whether there is a sighting that the record repeats."""
    first_ms: Integers
    first_topics: Integers
    first_partitions: Integers
    first_offsets: Integers

    @classmethod
    def of(cls, verdicts: npt.NDArray[np.int8]) -> Decided:
        """Return these verdicts without any sighting."""
        count = len(verdicts)
        return cls(verdicts, np.zeros(count, np.bool_), *(np.zeros(count, np.int64) for _ in range(4)))

    def point(self, row: int, verdict: int, seen: Sighting) -> None:
        """The record has this verdict, because of this sighting."""
        self.verdicts[row] = verdict
        self.has_first[row] = True
        self.first_ms[row] = seen.first_ms
        self.first_topics[row], self.first_partitions[row], self.first_offsets[row] = seen.source


class SortedFold:
    """Judges batch after batch of one Spark partition."""

    def __init__(self, rules: Rules) -> None:
        self._rules: Final = rules
        self._last: tuple[bytes, int] | None = None
        """The ID, and its task, with which the batch before ended; `_known` are its sightings."""
        self._known: Sightings = ()

    def judge(self, rows: SortedRows) -> Decided:
        """Return the verdicts of the next batch, which is not empty. Raises RecordFailed for a policy `fail`."""
        count = len(rows.times_ms)
        late = rows.times_ms < rows.stream_ms - self._rules.window.grace_ms
        decided = Decided.of(np.where(late, LATE, UNIQUE).astype(np.int8))
        starts = _starts(rows)
        lengths = np.diff(np.append(starts, count))
        several = lengths > 1
        goes_on = self._last == _key(rows, 0)
        if goes_on:
            several[0] = True
        else:
            self._known = ()
        several = self._without_plain(rows, starts, lengths, several, decided, goes_on=goes_on)
        of_group = 0
        for piece, groups in _pieces(starts, lengths, np.flatnonzero(several).tolist()):
            if int(groups[0]) != of_group:
                self._known = ()
            self._judge_piece(rows, piece, groups, decided)
            of_group = int(groups[-1])
        if not several[-1]:
            first = int(starts[-1])
            self._known = () if late[first] else (_sighting(rows, first),)
        self._last = _key(rows, count - 1)
        return decided

    def _without_plain(
        self,
        rows: SortedRows,
        starts: Integers,
        lengths: Integers,
        several: Booleans,
        decided: Decided,
        *,
        goes_on: bool,
    ) -> Booleans:
        """Decide, in columns, the groups in which every row repeats the first by the plain rule; return the others."""
        window = self._rules.window
        if window.extend or self._rules.fingerprints:
            return several
        own = np.repeat(np.arange(len(starts)), lengths)
        first = starts[own]
        first_ms = rows.times_ms[first]
        near = np.abs(rows.times_ms - first_ms) < window.guard_ms
        # The first row itself is near, and must be unique.
        plain = near & (first_ms >= rows.stream_ms - window.retention_ms) & (decided.verdicts[first] == UNIQUE)
        easy = several & np.logical_and.reduceat(plain, starts)
        if goes_on:
            easy[0] = False
        repeats = np.flatnonzero(easy[own] & (np.arange(len(own)) != first))
        of = first[repeats]
        decided.verdicts[repeats] = DUPLICATE
        decided.has_first[repeats] = True
        decided.first_ms[repeats] = rows.times_ms[of]
        decided.first_topics[repeats] = rows.topics[of]
        decided.first_partitions[repeats] = rows.partitions[of]
        decided.first_offsets[repeats] = rows.offsets[of]
        return several & ~easy

    def _judge_piece(self, rows: SortedRows, piece: Integers, groups: Integers, decided: Decided) -> None:
        """Judge rows of a few IDs; `_known` has the sightings of the first of them before, of the last after."""
        names = [b"%d" % group for group in groups.tolist()]
        outcome = Outcome(judged_times_ms=rows.times_ms[piece].tolist())
        columns = _columns(rows, piece, names, outcome.judged_times_ms)
        stream_times = rows.stream_ms[piece].tolist()
        oldest_ms = self._rules.window.oldest_live_ms(stream_times[0])
        before = tuple(seen for seen in self._known if seen.last_ms >= oldest_ms)
        known = {names[0]: before} if before else {}
        judge(columns, self._rules, outcome, known, stream_times, set())
        fresh = {names[row]: row for row in outcome.singles}
        if names[-1] in fresh:
            self._known = (sighting_of(columns, outcome.judged_times_ms, fresh[names[-1]]),)
        else:
            self._known = known.get(names[-1], ())
        _note(decided, piece.tolist(), columns, outcome)


def _note(decided: Decided, piece: list[int], columns: Rows, outcome: Outcome) -> None:
    for row, _ in outcome.late:
        decided.verdicts[piece[row]] = LATE
    for row in outcome.unique:
        decided.verdicts[piece[row]] = FORWARDED_CONFLICT if row in outcome.exempt else UNIQUE
    for row, seen in outcome.duplicates:
        decided.point(piece[row], DUPLICATE, seen)
    for row, first in outcome.repeats:
        decided.point(piece[row], DUPLICATE, sighting_of(columns, outcome.judged_times_ms, first))
    for row, seen in outcome.conflicts:
        decided.point(piece[row], CONFLICT, seen)


def _starts(rows: SortedRows) -> Integers:
    """Return the rows at which another ID, or the same in another task, begins."""
    other = pc.not_equal(rows.ids.slice(1), rows.ids.slice(0, len(rows.ids) - 1)).to_numpy(zero_copy_only=False)
    other = other | (rows.tasks[1:] != rows.tasks[:-1])
    return np.append(0, np.flatnonzero(other) + 1)


def _pieces(starts: Integers, lengths: Integers, marked: list[int]) -> Iterator[tuple[Integers, Integers]]:
    """Yield (rows, the group of each row) of the groups marked: short groups together, a long one in parts."""
    taken: list[int] = []
    rows = 0
    for group, size in zip(marked, lengths[marked].tolist(), strict=True):
        if size <= _LONG_GROUP:
            taken.append(group)
            rows += size
            if rows < _PIECE_ROWS:
                continue
        if taken:
            yield _whole(starts, lengths, taken)
            taken, rows = [], 0
        if size > _LONG_GROUP:
            start = int(starts[group])
            for begin in range(start, start + size, _LONG_GROUP):
                part = np.arange(begin, min(begin + _LONG_GROUP, start + size))
                yield part, np.full(len(part), group)
    if taken:
        yield _whole(starts, lengths, taken)


def _whole(starts: Integers, lengths: Integers, taken: list[int]) -> tuple[Integers, Integers]:
    sizes = lengths[taken]
    groups = np.repeat(np.array(taken), sizes)
    within = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return starts[groups] + within, groups


def _columns(rows: SortedRows, piece: Integers, names: list[bytes], times_ms: list[int]) -> Rows:
    fingerprints = None if rows.fingerprints is None else rows.fingerprints.take(pa.array(piece)).to_pylist()
    feeds = list(map(Feed, rows.topics[piece].tolist(), rows.partitions[piece].tolist()))
    return Rows(Extracted(list(names), times_ms, fingerprints, {}), rows.offsets[piece].tolist(), feeds)


def _sighting(rows: SortedRows, row: int) -> Sighting:
    time_ms = int(rows.times_ms[row])
    source = Source(int(rows.topics[row]), int(rows.partitions[row]), int(rows.offsets[row]))
    fingerprint = b"" if rows.fingerprints is None else rows.fingerprints[row].as_py()
    return Sighting(time_ms, time_ms, source, fingerprint)


def _key(rows: SortedRows, row: int) -> tuple[bytes, int]:
    return rows.ids[row].as_py(), int(rows.tasks[row])
