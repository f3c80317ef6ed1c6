"""Compares the records that the model expects in a topic with the records that are in the topic."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

from dedup.core.window import Source

Headers = Sequence[tuple[str, bytes | None]]

DIGEST_BYTES: Final = 16


def digest(key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int) -> bytes:
    """Return a BLAKE2b digest of a whole record; a fast checksum could be forged, which would hide a changed record."""
    key_bytes = -1 if key is None else len(key)
    value_bytes = -1 if value is None else len(value)
    head = b"%d %d %d " % (timestamp_ms, key_bytes, value_bytes)
    if not headers:
        return blake2b(b"".join((head, key or b"", value or b"")), digest_size=DIGEST_BYTES).digest()
    parts = [head, key or b"", value or b""]
    for name, content in headers:
        encoded = name.encode()
        parts += (b"%d %d " % (len(encoded), -1 if content is None else len(content)), encoded, content or b"")
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


class Seen(NamedTuple):
    """A record that a worker wrote."""

    offset: int
    digest: bytes
    id: bytes | None
    time_ms: int
    exempt: bool
    """True if a header of the record says that it was forwarded outside the guarantee."""


class Wanted(NamedTuple):
    """A record that a task must have written to a topic."""

    digest: bytes
    id: bytes | None
    source: Source
    position: int
    """The position of the record in the task's log."""
    optional: bool
    """True if the record may be present or absent, because the log does not prove either."""
    pending: bool
    """True if the record is at or after the committed offset."""


@dataclass(slots=True)
class Comparison:
    """The differences between the records in a topic and the expected records, regardless of order."""

    missing: list[tuple[int, Wanted]] = field(default_factory=list)
    """Expected records that are absent, each with the index of its task."""
    extra: list[tuple[int, Seen]] = field(default_factory=list)
    """Records that are not expected, or present more often than expected, each with the index of its partition."""
    matched: list[tuple[int, Seen, int, Wanted]] = field(default_factory=list)
    """Records that are present, each with its partition, its task, and the expected record that it matches."""


def matched(
    expected: Sequence[Sequence[Wanted]], actual: Sequence[Sequence[Seen]], *, from_end: bool = False
) -> Comparison:
    """Match the records in each partition with the records expected from each task, regardless of order.

    If a record is present more often than expected, its last copies count as extra or, if ``from_end`` is true, its
    first copies.
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
    """Map each digest to its expected records with their tasks, last record first, without absent optional records."""
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
    """Yield the fewest indexes whose removal leaves the values in ascending order, found by patience sorting."""
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
