"""Judges rows that are sorted by ID and, within each ID, in judging order.

NumPy operations on whole columns handle the simple cases: an ID that occurs once, and an ID whose rows all repeat its
first row or its only known sighting. The worker's code (`core.fold`) judges all other IDs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
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
"""Maximum number of one ID's rows that are judged at a time. The cost grows with the square of this number."""


@dataclass(frozen=True, slots=True)
class SortedRows:
    """The rows to judge, as columns with one entry per record."""

    groups: Integers
    """The number of the row's group. A group is an ID or, if tasks judge separately, an ID and a task."""
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
    """Whether the record repeats a sighting, which the next four columns describe."""
    first_ms: Integers
    first_topics: Integers
    first_partitions: Integers
    first_offsets: Integers

    @classmethod
    def of(cls, verdicts: npt.NDArray[np.int8]) -> Decided:
        """Return an instance with the given verdicts for records that do not repeat a sighting."""
        count = len(verdicts)
        return cls(verdicts, np.zeros(count, np.bool_), *(np.zeros(count, np.int64) for _ in range(4)))

    def put(self, row: int, verdict: int, seen: Sighting) -> None:
        """Set the verdict of a record that repeats the sighting ``seen``."""
        self.verdicts[row], self.has_first[row], self.first_ms[row] = verdict, True, seen.first_ms
        self.first_topics[row], self.first_partitions[row], self.first_offsets[row] = seen.source


@dataclass(frozen=True, slots=True)
class KnownSightings:
    """The sightings of earlier jobs as columns, with one entry per sighting."""

    groups: Integers
    """The number of the sighting's ID in `SortedRows.groups`."""
    first_ms: Integers
    topics: Integers
    partitions: Integers
    offsets: Integers
    at: Callable[[Integers], Iterable[Sighting]]
    """Returns the sightings at the given positions."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of `SortedRows`, with the positions of each group's rows and known sightings."""

    starts: Integers
    lengths: Integers
    order: Integers
    """The positions of the known sightings, sorted by group."""
    known_from: Integers
    known_to: Integers
    """The positions in ``order`` where the known sightings of each group begin and end."""

    @classmethod
    def of(cls, groups: Integers, known: Integers) -> _Groups:
        starts = np.append(0, np.flatnonzero(groups[1:] != groups[:-1]) + 1)
        order = np.argsort(known, kind="stable")
        ends = (np.searchsorted(known[order], groups[starts], side) for side in ("left", "right"))
        return cls(starts, np.diff(np.append(starts, len(groups))), order, *ends)

    def sightings(self, wanted: Integers, known: KnownSightings) -> dict[int, Sightings]:
        """Map each group whose index is in ``wanted`` to its known sightings."""
        borders = list(zip(self.known_from[wanted].tolist(), self.known_to[wanted].tolist(), strict=True))
        rows = [self.order[begin:end] for begin, end in borders]
        found = iter(known.at(np.concatenate(rows) if rows else self.order[:0]))
        return {
            group: tuple(islice(found, end - begin))
            for group, (begin, end) in zip(wanted.tolist(), borders, strict=True)
        }


def judge_sorted(rows: SortedRows, rules: Rules, known: KnownSightings) -> Decided:
    """Judge all rows, and return the verdicts.

    Raises RecordFailed if the policy `fail` applies to a record.
    """
    late = rows.times_ms < rows.stream_ms - rules.window.grace_ms
    decided = Decided.of(np.where(late, LATE, UNIQUE).astype(np.int8))
    if len(rows.times_ms) == 0:
        return decided
    groups = _Groups.of(rows.groups, known.groups)
    others = _decide_plain_groups(rows, rules, groups, decided, known)
    seen_before = groups.known_to > groups.known_from
    sightings = groups.sightings(np.flatnonzero(others & seen_before), known)
    left: Sightings = ()
    of_group = -1
    for chunk, numbers in _chunks(groups.starts, groups.lengths, np.flatnonzero(others).tolist()):
        earlier = {group: sightings[group] for group in np.unique(numbers[seen_before[numbers]]).tolist()}
        if int(numbers[0]) == of_group:
            earlier[of_group] = left
        left = _judge_chunk(rows, rules, chunk, numbers, earlier, decided)
        of_group = int(numbers[-1])
    return decided


def _decide_plain_groups(
    rows: SortedRows, rules: Rules, groups: _Groups, decided: Decided, known: KnownSightings
) -> Booleans:
    """Judge each ID for which every row repeats the first row or the only known sighting. Return a mask of the IDs that
    remain to be judged.
    """
    window, count = rules.window, len(rows.times_ms)
    sightings = groups.known_to - groups.known_from
    others: Booleans = (groups.lengths > 1) | (sightings > 0)
    if window.extend or rules.fingerprints:
        return others
    # For each group, ``repeated`` is the index of its first row, or the row count plus the index of its known sighting.
    repeated = groups.starts.copy()
    single = np.flatnonzero(sightings == 1)
    repeated[single] = count + groups.order[groups.known_from[single]]
    first = np.repeat(repeated, groups.lengths)
    first_ms = np.append(rows.times_ms, known.first_ms)[first]
    near = np.abs(rows.times_ms - first_ms) < window.guard_ms
    # A group's first row is always within its own guard period. Other rows repeat the first row only if it is unique.
    is_sighting = np.append(decided.verdicts == UNIQUE, np.ones(len(known.groups), np.bool_))[first]
    plain = near & (first_ms >= rows.stream_ms - window.retention_ms) & is_sighting
    easy = others & (sightings <= 1) & np.logical_and.reduceat(plain, groups.starts)
    repeats = np.flatnonzero(np.repeat(easy, groups.lengths) & (np.arange(count) != first))
    of = first[repeats]
    decided.verdicts[repeats] = DUPLICATE
    decided.has_first[repeats] = True
    decided.first_ms[repeats] = first_ms[repeats]
    decided.first_topics[repeats] = np.append(rows.topics, known.topics)[of]
    decided.first_partitions[repeats] = np.append(rows.partitions, known.partitions)[of]
    decided.first_offsets[repeats] = np.append(rows.offsets, known.offsets)[of]
    return others & ~easy


def _judge_chunk(
    rows: SortedRows,
    rules: Rules,
    chunk: Integers,
    groups: Integers,
    earlier: Mapping[int, Sightings],
    decided: Decided,
) -> Sightings:
    """Judge the rows of a few IDs with the IDs' ``earlier`` sightings, and return the sightings of the last ID."""
    names = [b"%d" % group for group in groups.tolist()]
    times_ms, stream_times = rows.times_ms[chunk].tolist(), rows.stream_ms[chunk].tolist()
    fingerprints = None if rows.fingerprints is None else rows.fingerprints.take(pa.array(chunk)).to_pylist()
    feeds = list(map(Feed, rows.topics[chunk].tolist(), rows.partitions[chunk].tolist()))
    columns = Rows(Extracted(list(names), times_ms, fingerprints, {}), rows.offsets[chunk].tolist(), feeds)
    outcome = Outcome(judged_times_ms=times_ms)
    known = {b"%d" % group: each for group, each in earlier.items()}
    if names[0] in known:
        # Drop expired sightings; otherwise, they would be examined again for each part of a long group.
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
    """Yield the rows of the marked IDs in chunks of limited size. An ID with more than `_LONG_GROUP` rows spans several
    chunks.
    """
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
