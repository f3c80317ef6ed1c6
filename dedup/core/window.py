"""Determines the verdict on a record from the sightings of the record's ID.

A *sighting* records that an ID was seen at event times from ``first`` to ``last``. The verdict on a record depends on
its event time ``t``, and on stream time ``s``, which the record itself may have advanced:

    a sighting with last >= s - retention and first - guard < t < last + guard   -> Duplicate (of the nearest)
    else t < s - grace                                                           -> Late
    else                                                                         -> Unique

`Window.decide` applies this rule to records whose IDs have sightings. `fold.py` applies the rule to all other records,
and also to the simplest case, an ID with one sighting (`_Judging.run`).

A record exactly one guard period after a sighting is a new event. The retention is the guard period plus the grace, so
every sighting that could make a record with ``t >= s - grace`` a duplicate is still stored. The bound on ``last`` makes
the verdict independent of the time at which old sightings are dropped.

The deduplication rule comes from KIP-655 (windowed distinct), but applies both forward and backward in time, as in the
window-store recipe for Kafka Streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

BEFORE_ALL_TIME: Final = -(1 << 62)
"""Stream time before the first judged record. It is far below every event time but does not overflow 64-bit sums."""


class Source(NamedTuple):
    """The position of a record in a source topic, before any repartitioning."""

    topic: int
    """The position of the topic in ``source.topics``."""
    partition: int
    offset: int

    def place(self, topics: Sequence[str]) -> str:
        """Return the position as topic/partition/offset, given the names of the source topics."""
        return f"{topics[self.topic]}/{self.partition}/{self.offset}"


class Sighting(NamedTuple):
    """States that an ID was seen at event times from ``first_ms`` to ``last_ms``, first in the record at ``source``."""

    first_ms: int
    last_ms: int
    source: Source
    fingerprint: bytes = b""
    """Eight bytes of the payload's digest, or no bytes if payloads are not compared."""


@dataclass(frozen=True, slots=True)
class Unique:
    """The verdict on the first record with its ID within the guard period. A unique record is forwarded."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The verdict on a record whose ID was already seen within the guard period."""

    of: Sighting


@dataclass(frozen=True, slots=True)
class Late:
    """The verdict on a record so far behind stream time that an earlier sighting of its ID may have been dropped."""

    behind_ms: int


Verdict = Unique | Duplicate | Late


@dataclass(frozen=True, slots=True)
class Window:
    """The parameters of the deduplication rule, in milliseconds of event time."""

    guard_ms: int
    grace_ms: int
    extend: bool = False
    extend_at_most_ms: int = 0

    @property
    def retention_ms(self) -> int:
        """How long, in stream time, a sighting counts after its end, which is the guard period plus the grace."""
        return self.guard_ms + self.grace_ms

    @property
    def segment_ms(self) -> int:
        """The width of a segment: half the retention, rounded up."""
        return max(1, -(-self.retention_ms // 2))

    def segment_of(self, last_ms: int) -> int:
        """Return the start of the segment for sightings that end at ``last_ms``."""
        return last_ms - last_ms % self.segment_ms

    def oldest_live_ms(self, stream_time_ms: int) -> int:
        """Return the smallest ``last_ms`` of a sighting that still counts at the given stream time."""
        return stream_time_ms - self.retention_ms

    def decide(self, time_ms: int, sightings: tuple[Sighting, ...], stream_time_ms: int) -> Verdict:
        """Return the verdict on a record, given all known sightings of its ID in any order."""
        oldest = stream_time_ms - self.guard_ms - self.grace_ms
        nearest: Sighting | None = None
        nearest_ms = 0
        for seen in sightings:
            if seen.last_ms < oldest:
                continue
            distance_ms = max(seen.first_ms - time_ms, time_ms - seen.last_ms, 0)
            if distance_ms >= self.guard_ms:
                continue
            # If two sightings are equally close, the smaller one counts, so that all engines agree.
            if nearest is None or (distance_ms, seen) < (nearest_ms, nearest):
                nearest, nearest_ms = seen, distance_ms
        if nearest is not None:
            return Duplicate(nearest)
        if time_ms < stream_time_ms - self.grace_ms:
            return Late(stream_time_ms - time_ms)
        return Unique()

    def extended(self, seen: Sighting, time_ms: int) -> Sighting:
        """Return the sighting, extended to a duplicate at ``time_ms``, but at most to ``first_ms + extend_at_most_ms``.

        A sighting that already ends later stays unchanged.
        """
        first_ms, seen_ms, source, fingerprint = seen
        last_ms = min(max(seen_ms, time_ms), max(seen_ms, first_ms + self.extend_at_most_ms))
        return Sighting(first_ms, last_ms, source, fingerprint)


# With one feed, stream time is the greatest judged event time. A repartition topic has many source partitions as feeds,
# and stream time is then the smallest of the feeds' greatest event times, like a watermark. Otherwise, all records of
# slower partitions would be late during the processing of a backlog. A feed without a judged record keeps stream time
# at BEFORE_ALL_TIME. A feed that is marked idle is ignored until its next record. A partition that was added to a
# source topic is ignored until its first record, so that the partition cannot hold back a task that gets none of the
# partition's records.


class Feed(NamedTuple):
    """A source partition whose records advance stream time."""

    topic: int
    """The position of the topic in ``source.topics``."""
    partition: int


@dataclass(frozen=True, slots=True)
class FeedProgress:
    """The greatest event time of one feed, and whether the feed is marked idle."""

    max_ms: int = BEFORE_ALL_TIME
    idle: bool = False


_NOT_BEGUN: Final = FeedProgress(idle=True)


@dataclass(frozen=True, slots=True)
class StreamTime:
    """A task's stream time at one point in its log, and the progress of the feeds that determine it."""

    value_ms: int
    feeds: Mapping[Feed, FeedProgress]

    @classmethod
    def before(cls, feeds: Iterable[Feed]) -> StreamTime:
        """Return the initial stream time of a task with these feeds."""
        return cls(BEFORE_ALL_TIME, dict.fromkeys(feeds, FeedProgress()))

    def after_one_feed(self, times_ms: Sequence[int]) -> tuple[list[int], StreamTime]:
        """Return the stream time at each judged record of a single feed, and the stream time after all records."""
        if not times_ms:
            return [], self
        column = list(accumulate(times_ms, max, initial=self.value_ms))
        return column[1:], self.after_one_feed_at_once(column[-1])

    def after_one_feed_at_once(self, greatest_ms: int) -> StreamTime:
        """Return the stream time after a batch of a single feed, given the greatest judged event time in the batch."""
        (feed,) = self.feeds
        value_ms = max(self.value_ms, greatest_ms)
        return StreamTime(value_ms, {feed: FeedProgress(value_ms)})

    def after(self, records: Iterable[tuple[Feed, int | None, bool]]) -> tuple[list[int], StreamTime]:
        """Return the stream time at each record, and the stream time after all records.

        Each record is a tuple of its feed, its event time (None if the record is not judged), and whether the record is
        an idle marker. An unknown feed, whose partition was added after the start, counts as idle until its first
        record.
        """
        progress = dict(self.feeds)
        value_ms = self.value_ms
        column: list[int] = []
        for feed, time_ms, idle in records:
            now = progress.get(feed, _NOT_BEGUN)
            max_ms = now.max_ms if time_ms is None else max(now.max_ms, time_ms)
            if max_ms != now.max_ms or idle != now.idle:
                progress[feed] = FeedProgress(max_ms, idle)
                awake = [each.max_ms for each in progress.values() if not each.idle]
                value_ms = max(value_ms, min(awake) if awake else max(each.max_ms for each in progress.values()))
            column.append(value_ms)
        return column, StreamTime(value_ms, progress)
