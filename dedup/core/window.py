"""The window: what is a duplicate, given the sightings of an ID.

Theory of operation. A *sighting* is an interval ``[first, last]`` of event times at which an ID was
accounted for. For a record with event time ``t`` at stream time ``s`` (which includes this record):

    a sighting with last >= s - retention and first - guard < t < last + guard   -> Duplicate (of the nearest)
    else t < s - grace                                                           -> Late
    else                                                                         -> Unique

The bounds are half-open: at a distance of exactly the guard period it is a new event. Retention is guard period
plus grace, so whatever could make a record with ``t >= s - grace`` a duplicate is still kept: no verdict is taken
from a hole. The bound on ``last`` is part of the rule, so a verdict does not depend on when a segment is dropped.

The interval rule follows KIP-655 (windowed distinct) with both directions in time, as Kafka Streams' window-store
recipe does; the cap on extension is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

BEFORE_ALL_TIME: Final = -(1 << 62)
"""Stream time before any record was judged; far below every event time, safe to add to in 64 bits."""


class Source(NamedTuple):
    """Where a record came from, before any repartitioning."""

    topic: int
    """Position of the topic in ``source.topics``."""
    partition: int
    offset: int


class Sighting(NamedTuple):
    """An interval of event times at which one ID was accounted for."""

    first_ms: int
    last_ms: int
    source: Source
    fingerprint: bytes = b""
    """Eight bytes of the payload's digest; empty unless conflicts are looked for."""


@dataclass(frozen=True, slots=True)
class Unique:
    """First of its ID within the guard period: forward it."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Its ID was accounted for within the guard period."""

    of: Sighting


@dataclass(frozen=True, slots=True)
class Late:
    """Too far behind stream time: an earlier sighting may be gone already."""

    behind_ms: int


Verdict = Unique | Duplicate | Late


@dataclass(frozen=True, slots=True)
class Window:
    """The rule's four numbers, in milliseconds of event time."""

    guard_ms: int
    grace_ms: int
    extend: bool = False
    extend_at_most_ms: int = 0

    @property
    def retention_ms(self) -> int:
        """How far behind stream time a sighting still counts."""
        return self.guard_ms + self.grace_ms

    @property
    def segment_ms(self) -> int:
        """Width of a state segment: two cover the retention, so at most four are live."""
        return max(1, -(-self.retention_ms // 2))

    def segment_of(self, last_ms: int) -> int:
        """Start, in event time, of the segment that keeps a sighting ending at ``last_ms``."""
        return last_ms - last_ms % self.segment_ms

    def oldest_live_ms(self, stream_time_ms: int) -> int:
        """The least ``last_ms`` that still counts."""
        return stream_time_ms - self.retention_ms

    def decide(self, time_ms: int, sightings: tuple[Sighting, ...], stream_time_ms: int) -> Verdict:
        """Return the verdict for a record; ``sightings`` are all known ones of its ID, in any order."""
        oldest = stream_time_ms - self.guard_ms - self.grace_ms
        nearest: Sighting | None = None
        nearest_ms = 0
        for seen in sightings:
            if seen.last_ms < oldest:
                continue
            distance_ms = max(seen.first_ms - time_ms, time_ms - seen.last_ms, 0)
            if distance_ms >= self.guard_ms:
                continue
            # Of two at one distance the earlier is named, so that every engine names the same.
            if nearest is None or (distance_ms, seen) < (nearest_ms, nearest):
                nearest, nearest_ms = seen, distance_ms
        if nearest is not None:
            return Duplicate(nearest)
        if time_ms < stream_time_ms - self.grace_ms:
            return Late(stream_time_ms - time_ms)
        return Unique()

    def extended(self, seen: Sighting, time_ms: int) -> Sighting:
        """Return the sighting after a duplicate at ``time_ms``: ``last`` raised, up to the cap."""
        last_ms = min(max(seen.last_ms, time_ms), max(seen.last_ms, seen.first_ms + self.extend_at_most_ms))
        return seen._replace(last_ms=last_ms)
