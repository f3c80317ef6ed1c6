"""Judges rows that are sorted by ID and, within each ID, in the order in which they must be judged.

IDs that occur once, and IDs whose later rows all repeat the first row, are judged as whole columns with NumPy. The
worker's code (`core.fold`) judges all other IDs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dedup.core.extract import Extracted
from dedup.core.fold import Outcome, Rows, Rules, Sightings, judge, sighting_of
from dedup.core.window import Feed, Sighting

Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

UNIQUE: Final = 0
DUPLICATE: Final = 1
CONFLICT: Final = 2
LATE: Final = 3
FORWARDED_CONFLICT: Final = 4
_CHUNK_ROWS: Final = 4096
_LONG_GROUP: Final = 256
"""Maximum number of rows of one ID that are judged at a time, because the cost grows with the square of this number."""


@dataclass(frozen=True, slots=True)
class SortedRows:
    """All rows of some tracking IDs as columns, with one entry per record."""

    groups: Integers
    """A number that is equal for rows of the same ID and, if tasks judge separately, of the same task."""
    times_ms: Integers
    stream_ms: Integers
    topics: Integers
    """Position of the topic in ``source.topics``."""
    partitions: Integers
    """Partition of the source topic, or -1 if a row has no coordinates."""
    offsets: Integers
    fingerprints: pa.Array | pa.ChunkedArray | None


@dataclass(frozen=True, slots=True)
class Decided:
    """Verdicts as columns, with one entry per record."""

    verdicts: npt.NDArray[np.int8]
    has_first: Booleans
    """Whether the record repeats a sighting; the next four columns describe the sighting."""
    first_ms: Integers
    first_topics: Integers
    first_partitions: Integers
    first_offsets: Integers

    @classmethod
    def of(cls, verdicts: npt.NDArray[np.int8]) -> Decided:
        """Return an instance with the given verdicts, in which no record repeats a sighting."""
        count = len(verdicts)
        return cls(verdicts, np.zeros(count, np.bool_), *(np.zeros(count, np.int64) for _ in range(4)))

    def put(self, row: int, verdict: int, seen: Sighting) -> None:
        """Set the verdict of a record that repeats the sighting ``seen``."""
        self.verdicts[row], self.has_first[row], self.first_ms[row] = verdict, True, seen.first_ms
        self.first_topics[row], self.first_partitions[row], self.first_offsets[row] = seen.source


def judge_sorted(rows: SortedRows, rules: Rules, known: Mapping[int, Sightings]) -> Decided:
    """Return the verdicts on all rows; ``known`` maps a number in ``rows.groups`` to sightings from earlier jobs.

    Raises RecordFailed if the policy `fail` applies to a record.
    """
    late = rows.times_ms < rows.stream_ms - rules.window.grace_ms
    decided = Decided.of(np.where(late, LATE, UNIQUE).astype(np.int8))
    count = len(rows.times_ms)
    if count == 0:
        return decided
    starts = np.append(0, np.flatnonzero(rows.groups[1:] != rows.groups[:-1]) + 1)
    lengths = np.diff(np.append(starts, count))
    numbers = rows.groups[starts]
    seen_before = np.isin(numbers, np.fromiter(known, np.int64, len(known)))
    several = _decide_plain_groups(rows, rules, starts, lengths, decided, seen_before)
    left: Sightings = ()
    of_group = -1
    for chunk, groups in _chunks(starts, lengths, np.flatnonzero(several | seen_before).tolist()):
        earlier = {group: known[int(numbers[group])] for group in np.unique(groups[seen_before[groups]]).tolist()}
        if int(groups[0]) == of_group:
            earlier[of_group] = left
        left = _judge_chunk(rows, rules, chunk, groups, earlier, decided)
        of_group = int(groups[-1])
    return decided


def _decide_plain_groups(
    rows: SortedRows, rules: Rules, starts: Integers, lengths: Integers, decided: Decided, seen_before: Booleans
) -> Booleans:
    """Judge the IDs whose later rows all repeat the first row, and return which other IDs have several rows."""
    several: Booleans = lengths > 1
    window = rules.window
    if window.extend or rules.fingerprints:
        return several
    first = np.repeat(starts, lengths)
    first_ms = rows.times_ms[first]
    near = np.abs(rows.times_ms - first_ms) < window.guard_ms
    # The first row is within the guard period of itself, and its verdict must be unique.
    plain = near & (first_ms >= rows.stream_ms - window.retention_ms) & (decided.verdicts[first] == UNIQUE)
    easy = several & ~seen_before & np.logical_and.reduceat(plain, starts)
    repeats = np.flatnonzero(np.repeat(easy, lengths) & (np.arange(len(first)) != first))
    of = first[repeats]
    decided.verdicts[repeats] = DUPLICATE
    decided.has_first[repeats] = True
    decided.first_ms[repeats] = rows.times_ms[of]
    decided.first_topics[repeats] = rows.topics[of]
    decided.first_partitions[repeats] = rows.partitions[of]
    decided.first_offsets[repeats] = rows.offsets[of]
    return several & ~easy


def _judge_chunk(
    rows: SortedRows,
    rules: Rules,
    chunk: Integers,
    groups: Integers,
    earlier: Mapping[int, Sightings],
    decided: Decided,
) -> Sightings:
    """Judge the rows of a few IDs, given their ``earlier`` sightings, and return the sightings of the last ID."""
    names = [b"%d" % group for group in groups.tolist()]
    times_ms, stream_times = rows.times_ms[chunk].tolist(), rows.stream_ms[chunk].tolist()
    fingerprints = None if rows.fingerprints is None else rows.fingerprints.take(pa.array(chunk)).to_pylist()
    feeds = list(map(Feed, rows.topics[chunk].tolist(), rows.partitions[chunk].tolist()))
    columns = Rows(Extracted(list(names), times_ms, fingerprints, {}), rows.offsets[chunk].tolist(), feeds)
    outcome = Outcome(judged_times_ms=times_ms)
    known = {b"%d" % group: each for group, each in earlier.items()}
    if names[0] in known:
        # Expired sightings are dropped here, because they would otherwise be examined again with each part of a long
        # group.
        oldest_ms = rules.window.oldest_live_ms(stream_times[0])
        live = tuple(seen for seen in known.pop(names[0]) if seen.last_ms >= oldest_ms)
        known |= {names[0]: live} if live else {}
    judge(columns, rules, outcome, known, stream_times, set())
    places = chunk.tolist()
    for row, _ in outcome.late:
        decided.verdicts[places[row]] = LATE
    for row in outcome.unique:
        decided.verdicts[places[row]] = FORWARDED_CONFLICT if row in outcome.exempt else UNIQUE
    for row, seen in outcome.all_duplicates(columns):
        decided.put(places[row], DUPLICATE, seen)
    for row, seen in outcome.conflicts:
        decided.put(places[row], CONFLICT, seen)
    fresh = next((row for row in reversed(outcome.singles) if names[row] == names[-1]), None)
    return known.get(names[-1], ()) if fresh is None else (sighting_of(columns, times_ms, fresh),)


def _chunks(starts: Integers, lengths: Integers, marked: list[int]) -> Iterator[tuple[Integers, Integers]]:
    """Yield the rows of the marked IDs in chunks of limited size; an ID with many rows spans several chunks."""
    parts: list[tuple[int, int, int]] = []
    rows = 0
    for group, start, count in zip(marked, starts[marked].tolist(), lengths[marked].tolist(), strict=True):
        for done in range(0, count, _LONG_GROUP):
            parts.append((group, start + done, min(_LONG_GROUP, count - done)))
            rows += parts[-1][2]
            # A chunk contains at most one part of each group.
            if count > _LONG_GROUP or rows >= _CHUNK_ROWS:
                yield _rows_of(parts)
                parts, rows = [], 0
    if parts:
        yield _rows_of(parts)


def _rows_of(parts: list[tuple[int, int, int]]) -> tuple[Integers, Integers]:
    groups, starts, sizes = np.array(parts, np.int64).T
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(starts, sizes) + within, np.repeat(groups, sizes)
