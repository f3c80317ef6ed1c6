"""Verdicts over rows that stand together by ID, and within an ID in the order in which they are judged.

An ID that is there once is decided by one comparison in numpy, and so is one of which every row repeats the first. The
others go through the worker's own fold, with the stream time each row brings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dedup.core.extract import Extracted
from dedup.core.fold import Outcome, Rows, Rules, Sightings, judge, sighting_of
from dedup.core.stream_time import Feed
from dedup.core.window import Sighting

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
    """All rows of some IDs, a place per record."""

    groups: Integers
    """Equal for the rows that meet each other: of one ID, and of one task where tasks are apart."""
    times_ms: Integers
    stream_ms: Integers
    topics: Integers
    """Position in ``source.topics``."""
    partitions: Integers
    """Of the source; -1 where a row has no coordinates."""
    offsets: Integers
    fingerprints: pa.Array | pa.ChunkedArray | None


@dataclass(frozen=True, slots=True)
class Decided:
    """Verdicts, a place per record."""

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


def judge_sorted(rows: SortedRows, rules: Rules) -> Decided:
    """Return the verdicts. Raises RecordFailed for a policy `fail`."""
    late = rows.times_ms < rows.stream_ms - rules.window.grace_ms
    decided = Decided.of(np.where(late, LATE, UNIQUE).astype(np.int8))
    count = len(rows.times_ms)
    if count == 0:
        return decided
    starts = np.append(0, np.flatnonzero(rows.groups[1:] != rows.groups[:-1]) + 1)
    lengths = np.diff(np.append(starts, count))
    several = _without_plain(rows, rules, starts, lengths, decided)
    known: Sightings = ()
    of_group = -1
    for piece, groups in _pieces(starts, lengths, np.flatnonzero(several).tolist()):
        if int(groups[0]) != of_group:
            known = ()
        known = _judge_piece(rows, rules, piece, groups, known, decided)
        of_group = int(groups[-1])
    return decided


def _without_plain(rows: SortedRows, rules: Rules, starts: Integers, lengths: Integers, decided: Decided) -> Booleans:
    """Decide, in columns, the groups in which every row repeats the first by the plain rule.

    Return which others have several rows.
    """
    several: Booleans = lengths > 1
    window = rules.window
    if window.extend or rules.fingerprints:
        return several
    first = np.repeat(starts, lengths)
    first_ms = rows.times_ms[first]
    near = np.abs(rows.times_ms - first_ms) < window.guard_ms
    # The first row itself is near, and must be unique.
    plain = near & (first_ms >= rows.stream_ms - window.retention_ms) & (decided.verdicts[first] == UNIQUE)
    easy = several & np.logical_and.reduceat(plain, starts)
    repeats = np.flatnonzero(np.repeat(easy, lengths) & (np.arange(len(first)) != first))
    of = first[repeats]
    decided.verdicts[repeats] = DUPLICATE
    decided.has_first[repeats] = True
    decided.first_ms[repeats] = rows.times_ms[of]
    decided.first_topics[repeats] = rows.topics[of]
    decided.first_partitions[repeats] = rows.partitions[of]
    decided.first_offsets[repeats] = rows.offsets[of]
    return several & ~easy


def _judge_piece(
    rows: SortedRows, rules: Rules, piece: Integers, groups: Integers, known_before: Sightings, decided: Decided
) -> Sightings:
    """Judge rows of a few IDs, given the sightings of the first of them; return those of the last."""
    names = [b"%d" % group for group in groups.tolist()]
    outcome = Outcome(judged_times_ms=rows.times_ms[piece].tolist())
    columns = _columns(rows, piece, names, outcome.judged_times_ms)
    stream_times = rows.stream_ms[piece].tolist()
    oldest_ms = rules.window.oldest_live_ms(stream_times[0])
    before = tuple(seen for seen in known_before if seen.last_ms >= oldest_ms)
    known = {names[0]: before} if before else {}
    judge(columns, rules, outcome, known, stream_times, set())
    _note(decided, piece.tolist(), columns, outcome)
    fresh = {names[row]: row for row in outcome.singles}
    if names[-1] in fresh:
        return (sighting_of(columns, outcome.judged_times_ms, fresh[names[-1]]),)
    return known.get(names[-1], ())


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
