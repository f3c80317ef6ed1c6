"""Compares the records that the model expects in a topic with the records that the topic contains."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, count, cycle, pairwise, repeat
from typing import Any, Final, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dedup.core.window import Source

Headers = Sequence[tuple[str, bytes | None]]
Column = npt.NDArray[np.int64]
_Columns = TypeVar("_Columns", bound=tuple[Any, ...])

DIGEST_BYTES: Final = 16
_NONE: Final = np.empty(0, np.int64)
_INT64_BYTES: Final = 8


def contents_of(keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> list[bytes]:
    """Return a BLAKE2b digest of each record's key and value.

    A faster checksum could be forged to hide a change.
    """
    lengths = zip(_lengths(keys), _lengths(values), strict=True)
    parts = zip(map(b"%d %d ".__mod__, lengths), _without_none(keys), _without_none(values), strict=True)
    return [blake2b(part, digest_size=DIGEST_BYTES).digest() for part in map(b"".join, parts)]


def _lengths(column: Sequence[bytes | None]) -> list[int]:
    return [-1 if each is None else len(each) for each in column]


def _without_none(column: Sequence[bytes | None]) -> Sequence[bytes]:
    return [each or b"" for each in column]


def digest(key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int) -> bytes:
    """Return the digest of a record's key, value, headers, and timestamp."""
    return digest_with(contents_of([key], [value])[0], headers, timestamp_ms)


def digest_with(content: bytes, headers: Headers, timestamp_ms: int) -> bytes:
    """Return the digest of a whole record, given the digest of its key and value (`contents_of`)."""
    content += timestamp_ms.to_bytes(_INT64_BYTES, "little", signed=True)
    if not headers:
        return content
    parts: list[bytes] = []
    for name, each in headers:
        parts += (_with_length(name), b"-1 " if each is None else b"%d " % len(each), each or b"")
    return content + blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def without_time(whole: bytes) -> bytes:
    """Return the digest of a whole record (`digest_with`) as if the timestamp were 0."""
    return whole[:DIGEST_BYTES] + bytes(_INT64_BYTES) + whole[DIGEST_BYTES + _INT64_BYTES :]


def time_of(whole: bytes) -> int:
    """Return the timestamp in ms from the digest of a whole record (`digest_with`)."""
    return int.from_bytes(whole[DIGEST_BYTES : DIGEST_BYTES + _INT64_BYTES], "little", signed=True)


@lru_cache(maxsize=1_000)
def _with_length(name: str) -> bytes:
    encoded = name.encode()
    return b"%d %s" % (len(encoded), encoded)


def digests(contents: Sequence[bytes], headers: Sequence[Headers], timestamps_ms: Column) -> list[bytes]:
    """Return the result of `digest_with` for each record."""
    if any(headers):
        return list(map(digest_with, contents, headers, timestamps_ms.tolist()))
    # Unlike NumPy's bytes type, NumPy's void type keeps trailing zero bytes.
    stamps = timestamps_ms.astype("<i8").view(f"V{_INT64_BYTES}").tolist()
    return list(map(bytes.__add__, contents, stamps))


def selected(columns: _Columns, rows: Column) -> _Columns:
    """Return the given rows of a tuple of arrays and lists."""
    at = rows.tolist()
    taken = (each[rows] if isinstance(each, np.ndarray) else list(map(each.__getitem__, at)) for each in columns)
    return type(columns)(*taken)


class Seen(NamedTuple):
    """A record that a worker wrote."""

    offset: int
    digest: bytes
    id: bytes | None
    time_ms: int
    exempt: bool
    """True if a header marks the record as forwarded outside the guarantee."""


class SeenColumns(NamedTuple):
    """Records that a worker wrote, as columns with the fields of `Seen`."""

    offsets: Column
    times_ms: Column
    exempt: Column
    digests: list[bytes]
    ids: list[bytes | None]

    def at(self, rows: Column) -> Self:
        """Return the records in the given rows."""
        return selected(self, rows)

    def rows(self) -> Iterator[Seen]:
        """Yield the records one by one."""
        numbers = (self.times_ms.tolist(), map(bool, self.exempt.tolist()))
        return map(Seen, self.offsets.tolist(), self.digests, self.ids, *numbers)


class Wanted(NamedTuple):
    """A record that a task is expected to have written to a topic."""

    digest: bytes
    id: bytes | None
    source: Source
    position: int
    """The position of the record in the task's log."""
    optional: bool
    """True if the log does not prove whether the record must be present or absent."""
    pending: bool
    """True if the record is at or after the committed offset."""


class SureColumns(NamedTuple):
    """Records that a task must have written, as columns with the fields of `Wanted`."""

    positions: Column
    digests: list[bytes]
    ids: list[bytes | None]
    sources: list[tuple[int, int, int]]

    def at(self, rows: Column) -> Self:
        """Return the records in the given rows."""
        return selected(self, rows)

    def rows(self) -> Iterator[Wanted]:
        """Yield the records one by one."""
        no = cycle([False])
        return map(Wanted, self.digests, self.ids, map(Source._make, self.sources), self.positions.tolist(), no, no)


NONE_SURE: Final = SureColumns(_NONE, [], [], [])


@dataclass(slots=True)
class Expected:
    """All records that one task is expected to have written to a topic."""

    others: list[Wanted] = field(default_factory=list)
    sure: SureColumns = NONE_SURE

    def ids(self) -> Iterator[bytes | None]:
        """Yield the ID of each record."""
        return chain(self.sure.ids, (wanted.id for wanted in self.others))

    @property
    def certain(self) -> int:
        """The number of records that the task must have written."""
        return len(self.sure.digests) + sum(not wanted.optional for wanted in self.others)

    def one_by_one(self) -> list[Wanted]:
        """Move the records of ``sure`` to ``others``, and return all of them in log order."""
        self.others = sorted([*self.others, *self.sure.rows()], key=lambda wanted: wanted.position)
        self.sure = NONE_SURE
        return self.others


@dataclass(slots=True)
class Comparison:
    """The differences between the records in a topic and the expected records, regardless of order."""

    missing: list[tuple[int, Wanted]] = field(default_factory=list)
    """Expected records that are absent, each with the index of its task."""
    extra: list[tuple[int, Seen]] = field(default_factory=list)
    """Records that are not expected, or present more often than expected, each with the index of its partition."""
    matched: list[tuple[int, Seen, int, Wanted]] = field(default_factory=list)
    """Records that are present and expected, each with its partition, its task, and the expected record."""
    at_once: tuple[Column, Column, Column, Column] = (_NONE, _NONE, _NONE, _NONE)
    """The other records that are present and expected, as columns: partition, offset, task, and log position."""

    def places(self, partition: int, *, optional: bool = True) -> tuple[Column, Column, Column]:
        """Return the offset, task, and log position of each matched record of a partition as columns.

        If ``optional`` is false, the columns omit matches of optional records.
        """
        found = [
            (seen.offset, task, wanted.position)
            for number, seen, task, wanted in self.matched
            if number == partition and (optional or not wanted.optional)
        ]
        partitions, *columns = self.at_once
        here = partitions == partition
        more = np.array(found, np.int64).reshape(-1, 3).T
        offsets, tasks, positions = (np.append(each[here], more[at]) for at, each in enumerate(columns))
        return offsets, tasks, positions


def matched_at_once(
    expected: Sequence[Expected], actual: Sequence[SeenColumns], *, from_end: bool = False
) -> Comparison:
    """Do the same as `matched`, but faster: digests that occur once on each side are matched as columns."""
    task_ends = np.cumsum([0, *(len(each.sure.digests) for each in expected)])
    partition_ends = np.cumsum([0, *(len(each.digests) for each in actual)])
    wanted = list(chain.from_iterable(each.sure.digests for each in expected))
    seen = list(chain.from_iterable(each.digests for each in actual))
    row_of = dict(zip(wanted, count(), strict=False))
    others = {each.digest for task in expected for each in task.others}
    for each in others | _repeated(wanted) | _repeated(seen):
        row_of.pop(each, None)
    rows = np.fromiter(map(row_of.get, seen, repeat(-1)), np.int64, len(seen))
    found = rows >= 0
    missing = np.ones(len(wanted), bool)
    missing[rows[found]] = False
    left = [
        Expected(each.others, each.sure.at(np.flatnonzero(missing[first:end]))).one_by_one()
        for each, (first, end) in zip(expected, pairwise(task_ends), strict=True)
    ]
    unmatched = [
        each.at(np.flatnonzero(~found[first:end]))
        for each, (first, end) in zip(actual, pairwise(partition_ends), strict=True)
    ]
    result = matched(left, [list(each.rows()) for each in unmatched], from_end=from_end)
    rows = rows[found]
    result.at_once = (
        np.searchsorted(partition_ends, np.flatnonzero(found), side="right") - 1,
        np.concatenate([_NONE, *(each.offsets for each in actual)])[found],
        np.searchsorted(task_ends, rows, side="right") - 1,
        np.concatenate([_NONE, *(each.sure.positions for each in expected)])[rows],
    )
    return result


def _repeated(digests: Sequence[bytes]) -> set[bytes]:
    """Return the digests that occur more than once."""
    if len(set(digests)) == len(digests):
        return set()
    return {each for each, number in Counter(digests).items() if number > 1}


def matched(
    expected: Sequence[Sequence[Wanted]], actual: Sequence[Sequence[Seen]], *, from_end: bool = False
) -> Comparison:
    """Match the records in each partition with the records expected from each task, regardless of order.

    If a record occurs more often than expected, the last copies are extra or, if ``from_end`` is true, the first
    copies.
    """
    candidates = _candidates(expected, actual)
    if from_end:
        for places in candidates.values():
            places.reverse()
    result = Comparison()
    for partition, records in enumerate(actual):
        for seen in reversed(records) if from_end else records:
            if candidates.get(seen.digest):
                result.matched.append((partition, seen, *candidates[seen.digest].pop()))
            else:
                result.extra.append((partition, seen))
    left = ((task, wanted) for places in candidates.values() for task, wanted in places if not wanted.optional)
    result.missing = sorted(left, key=lambda each: (each[0], each[1].position))
    return result


def _candidates(
    expected: Sequence[Sequence[Wanted]], actual: Sequence[Sequence[Seen]]
) -> dict[bytes, list[tuple[int, Wanted]]]:
    """Map each digest to its expected records and their tasks, in reverse order. Omit absent optional records."""
    candidates: defaultdict[bytes, list[tuple[int, Wanted]]] = defaultdict(list)
    for task, records in enumerate(expected):
        for wanted in records:
            candidates[wanted.digest].append((task, wanted))
    there = Counter(seen.digest for records in actual for seen in records)
    for each, places in candidates.items():
        surplus = len(places) - there[each]
        if surplus > 0:
            for place in [place for place in places if place[1].optional][:surplus]:
                places.remove(place)
        places.reverse()
    return candidates


def out_of_order(wanted: array[int]) -> Iterator[int]:
    """Yield the smallest set of indexes whose removal leaves the values in ascending order (patience sorting)."""
    tops, top_places, previous = array("q"), array("q"), array("q")
    for at, each in enumerate(wanted):
        pile = bisect_left(tops, each)
        previous.append(top_places[pile - 1] if pile else -1)
        if pile == len(tops):
            tops.append(each)
            top_places.append(at)
        else:
            tops[pile] = each
            top_places[pile] = at
    kept = bytearray(len(wanted))
    at = top_places[-1] if top_places else -1
    while at >= 0:
        kept[at] = 1
        at = previous[at]
    return (at for at, stays in enumerate(kept) if not stays)
