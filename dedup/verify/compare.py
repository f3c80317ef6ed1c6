"""Compares the records that the model expects in a topic with the actual records, using pure functions on digests."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

Headers = Sequence[tuple[str, bytes | None]]

DIGEST_BYTES: Final = 16


def digest(key: bytes | None, value: bytes | None, headers: Headers, timestamp_ms: int) -> bytes:
    """Return a digest of a whole record. Each part is preceded by its length, so that parts cannot be confused.

    The digest is BLAKE2b, not a fast checksum, because a forged collision would hide a change.
    """
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


class Place(NamedTuple):
    """The position of a row in one of several sequences: a task or a partition, and the index of the row."""

    sequence: int
    row: int


@dataclass(slots=True)
class Expected:
    """The records that one task must have written to a topic, in order."""

    digests: list[bytes] = field(default_factory=list)
    optional: set[int] = field(default_factory=set)
    """Rows that may be present or absent, because the log does not prove either."""
    positions: list[int] = field(default_factory=list)
    """The position of each row in the task's log."""


@dataclass(slots=True)
class Comparison:
    """The differences between the records of a topic and the expected ones, regardless of order."""

    missing: list[Place] = field(default_factory=list)
    """Expected records that are absent, as (task, row)."""
    extra: list[Place] = field(default_factory=list)
    """Records that are present but not expected, or present more often than expected, as (partition, row)."""
    matched: list[tuple[Place, Place]] = field(default_factory=list)
    """Pairs of a record that is present, as (partition, row), and the expected record that it matches, as (task, row).
    """


def matched(expected: Sequence[Expected], actual: Sequence[Sequence[bytes]], *, from_end: bool = False) -> Comparison:
    """Match the records of each partition with those expected from each task, regardless of order.

    If equal records are present more often than expected, the last ones count as extra or, with ``from_end``, the
    first.
    """
    rows_of = _candidates(expected, actual)
    if from_end:
        for places in rows_of.values():
            places.reverse()
    result = Comparison()
    for partition, digests in enumerate(actual):
        for row, each in reversed(list(enumerate(digests))) if from_end else enumerate(digests):
            candidates = rows_of.get(each)
            if candidates:
                result.matched.append((Place(partition, row), candidates.pop()))
            else:
                result.extra.append(Place(partition, row))
    for candidates in rows_of.values():
        result.missing += [place for place in candidates if place.row not in expected[place.sequence].optional]
    result.missing.sort()
    return result


def _candidates(expected: Sequence[Expected], actual: Sequence[Sequence[bytes]]) -> dict[bytes, list[Place]]:
    """Map each digest to the rows that expect it, last first; optional rows without an actual record are left out."""
    rows_of: dict[bytes, list[Place]] = {}
    for task, wanted in enumerate(expected):
        for row, each in enumerate(wanted.digests):
            rows_of.setdefault(each, []).append(Place(task, row))
    there: dict[bytes, int] = {}
    for digests in actual:
        for each in digests:
            there[each] = there.get(each, 0) + 1
    for each, places in rows_of.items():
        surplus = len(places) - there.get(each, 0)
        if surplus > 0:
            optional = [place for place in places if place.row in expected[place.sequence].optional]
            for place in optional[:surplus]:
                places.remove(place)
        places.reverse()
    return rows_of


def out_of_order(wanted: array[int]) -> Iterator[int]:
    """Yield the smallest set of indexes whose removal leaves the values in ascending order (by patience sorting)."""
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
