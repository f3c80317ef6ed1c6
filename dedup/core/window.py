"""Defines the window, which decides from the sightings of an ID whether a record is a duplicate.

A *sighting* is an interval ``[first, last]`` of event times at which an ID was accounted for. The verdict on a record
with event time ``t`` at stream time ``s``, which includes this record, follows from this rule:

    a sighting with last >= s - retention and first - guard < t < last + guard   -> Duplicate (of the nearest)
    else t < s - grace                                                           -> Late
    else                                                                         -> Unique

The bounds of the guard period are exclusive, so a record exactly one guard period away is a new event. Retention is
guard period plus grace, so every sighting that could make a record with ``t >= s - grace`` a duplicate is still kept,
and no verdict depends on missing state. The bound on ``last`` is part of the rule, so no verdict depends on when a
segment is dropped.

The interval rule is that of KIP-655 (windowed distinct), applied in both directions of time as in the window-store
recipe for Kafka Streams. The cap on extension is an addition of this project.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from dedup.errors import InvariantBroken

BEFORE_ALL_TIME: Final = -(1 << 62)
"""Stream time before the first judged record, which is far below every event time but does not overflow 64-bit sums."""


class Source(NamedTuple):
    """The origin of a record, before any repartitioning."""

    topic: int
    """Position of the topic in ``source.topics``."""
    partition: int
    offset: int

    def place(self, topics: Sequence[str]) -> str:
        """Return the position as topic/partition/offset; ``topics`` are the topology's source topics."""
        return f"{topics[self.topic]}/{self.partition}/{self.offset}"


class Sighting(NamedTuple):
    """An interval of event times at which one ID was accounted for."""

    first_ms: int
    last_ms: int
    source: Source
    fingerprint: bytes = b""
    """Eight bytes of the payload's digest; empty unless payloads are compared."""


@dataclass(frozen=True, slots=True)
class Unique:
    """The first record with its ID within the guard period, which is forwarded."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A record whose ID was already seen within the guard period."""

    of: Sighting


@dataclass(frozen=True, slots=True)
class Late:
    """A record that is so far behind stream time that an earlier sighting may already have been dropped."""

    behind_ms: int


Verdict = Unique | Duplicate | Late


@dataclass(frozen=True, slots=True)
class Window:
    """The parameters of the rule, in milliseconds of event time."""

    guard_ms: int
    grace_ms: int
    extend: bool = False
    extend_at_most_ms: int = 0

    @property
    def retention_ms(self) -> int:
        """How far behind stream time the end of a sighting may be for the sighting to count."""
        return self.guard_ms + self.grace_ms

    @property
    def segment_ms(self) -> int:
        """The width of a segment. Two segments cover the retention, so at most four segments are live."""
        return max(1, -(-self.retention_ms // 2))

    def segment_of(self, last_ms: int) -> int:
        """Return the start, in event time, of the segment for a sighting that ends at ``last_ms``."""
        return last_ms - last_ms % self.segment_ms

    def oldest_live_ms(self, stream_time_ms: int) -> int:
        """Return the smallest ``last_ms`` of a sighting that still counts."""
        return stream_time_ms - self.retention_ms

    def decide(self, time_ms: int, sightings: tuple[Sighting, ...], stream_time_ms: int) -> Verdict:
        """Return the verdict on a record; ``sightings`` are all known sightings of its ID, in any order."""
        oldest = stream_time_ms - self.guard_ms - self.grace_ms
        nearest: Sighting | None = None
        nearest_ms = 0
        for seen in sightings:
            if seen.last_ms < oldest:
                continue
            distance_ms = max(seen.first_ms - time_ms, time_ms - seen.last_ms, 0)
            if distance_ms >= self.guard_ms:
                continue
            # Of two sightings at the same distance, the smaller one is used, so that every engine names the same one.
            if nearest is None or (distance_ms, seen) < (nearest_ms, nearest):
                nearest, nearest_ms = seen, distance_ms
        if nearest is not None:
            return Duplicate(nearest)
        if time_ms < stream_time_ms - self.grace_ms:
            return Late(stream_time_ms - time_ms)
        return Unique()

    def extended(self, seen: Sighting, time_ms: int) -> Sighting:
        """Return the sighting after a duplicate at ``time_ms``, with ``last`` extended up to the cap."""
        last_ms = min(max(seen.last_ms, time_ms), max(seen.last_ms, seen.first_ms + self.extend_at_most_ms))
        return seen._replace(last_ms=last_ms)


# Stream time is the greatest judged event time; with several feeds, the minimum of the feeds' greatest event times.
# With one feed, stream time is a running maximum. A repartition topic has many source partitions as feeds, and stream
# time is the minimum over the feeds, like a watermark. Otherwise, all records of slower partitions would be late while
# a backlog is processed. A feed without a judged record keeps stream time at BEFORE_ALL_TIME. A feed that is marked
# idle is ignored until its next record.


class Feed(NamedTuple):
    """A source partition whose records advance stream time."""

    topic: int
    """Position of the topic in ``source.topics``."""
    partition: int


@dataclass(frozen=True, slots=True)
class FeedProgress:
    """The greatest event time of one feed, and whether the feed is marked idle."""

    max_ms: int = BEFORE_ALL_TIME
    idle: bool = False


@dataclass(frozen=True, slots=True)
class StreamTime:
    """A task's stream time, and the feeds from which it is computed. Each batch gets a new object."""

    value_ms: int
    feeds: Mapping[Feed, FeedProgress]

    @classmethod
    def before(cls, feeds: Iterable[Feed]) -> StreamTime:
        """Return stream time before any record of these feeds. Records of other feeds are not allowed later."""
        return cls(BEFORE_ALL_TIME, dict.fromkeys(feeds, FeedProgress()))

    def after_one_feed(self, times_ms: Sequence[int]) -> tuple[list[int], StreamTime]:
        """Return stream time at each judged record of the only feed, and after all of them."""
        if not times_ms:
            return [], self
        column = list(accumulate(times_ms, max, initial=self.value_ms))
        return column[1:], self.after_one_feed_at_once(column[-1])

    def after_one_feed_at_once(self, greatest_ms: int) -> StreamTime:
        """Return stream time after judged records of the only feed, given their greatest event time."""
        (feed,) = self.feeds
        value_ms = max(self.value_ms, greatest_ms)
        return StreamTime(value_ms, {feed: FeedProgress(value_ms)})

    def after(self, records: Iterable[tuple[Feed, int | None, bool]]) -> tuple[list[int], StreamTime]:
        """Return stream time at each record, and after all of them.

        Each record is a tuple: its feed, its event time (None if it is not judged), and whether it is an idle marker.
        Raises InvariantBroken for an undeclared feed, because its time would be missing from the minimum.
        """
        progress = dict(self.feeds)
        value_ms = self.value_ms
        column: list[int] = []
        for feed, time_ms, idle in records:
            now = progress.get(feed)
            if now is None:
                raise InvariantBroken(
                    f"a record of source topic {feed.topic} partition {feed.partition} came, which did not exist when "
                    f"this task started. Restart the worker; if partitions were added, run `dedup reset`."
                )
            max_ms = now.max_ms if time_ms is None else max(now.max_ms, time_ms)
            if max_ms != now.max_ms or idle != now.idle:
                progress[feed] = FeedProgress(max_ms, idle)
                awake = [each.max_ms for each in progress.values() if not each.idle]
                value_ms = max(value_ms, min(awake) if awake else max(each.max_ms for each in progress.values()))
            column.append(value_ms)
        return column, StreamTime(value_ms, progress)
