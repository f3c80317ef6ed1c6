"""Stream time: the greatest event time judged, or, behind several feeds, the least of the feeds' greatest.

With one feed it is a running maximum. Behind a repartition topic, which many source partitions feed, it is the minimum
over the feeds, as a watermark is; else a replay of a backlog would make late whatever the slower partitions bring. A
feed that has not reported holds stream time before all time; one marked idle is left out until its next record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from dedup.core.window import BEFORE_ALL_TIME
from dedup.errors import InvariantBroken


class Feed(NamedTuple):
    """A partition of a source topic, as something that brings stream time forward."""

    topic: int
    """Position of the topic in ``source.topics``."""
    partition: int


@dataclass(frozen=True, slots=True)
class FeedProgress:
    """The greatest event time one feed has brought, and whether it has said that it has nothing more for now."""

    max_ms: int = BEFORE_ALL_TIME
    idle: bool = False


@dataclass(frozen=True, slots=True)
class StreamTime:
    """A task's stream time with what it was made from; a new value for every batch."""

    value_ms: int
    feeds: Mapping[Feed, FeedProgress]

    @classmethod
    def before(cls, feeds: Iterable[Feed]) -> StreamTime:
        """Return stream time before any record of these feeds, which are all that will ever report."""
        return cls(BEFORE_ALL_TIME, dict.fromkeys(feeds, FeedProgress()))

    def after_one_feed(self, times_ms: Sequence[int]) -> tuple[list[int], StreamTime]:
        """Return stream time at each of the judged records of the only feed, and after them."""
        if not times_ms:
            return [], self
        column = list(accumulate(times_ms, max, initial=self.value_ms))
        return column[1:], self.after_one_feed_at_once(column[-1])

    def after_one_feed_at_once(self, greatest_ms: int) -> StreamTime:
        """Return stream time after judged records of the only feed, of which the latest has this event time."""
        (feed,) = self.feeds
        value_ms = max(self.value_ms, greatest_ms)
        return StreamTime(value_ms, {feed: FeedProgress(value_ms)})

    def after(self, records: Iterable[tuple[Feed, int | None, bool]]) -> tuple[list[int], StreamTime]:
        """Return stream time at each record and after them all.

        A record is (feed, event time or None where it was not judged, whether it is an idle marker). Raises
        InvariantBroken for a feed that was not declared: its time would be left out of the minimum.
        """
        progress = dict(self.feeds)
        value_ms = self.value_ms
        column: list[int] = []
        for feed, time_ms, idle in records:
            now = progress.get(feed)
            if now is None:
                raise InvariantBroken(
                    f"a record of source topic {feed.topic} partition {feed.partition} came, which did not exist when "
                    f"this task started. Restart the worker; if partitions were added, `dedup reset` is needed."
                )
            max_ms = now.max_ms if time_ms is None else max(now.max_ms, time_ms)
            if max_ms != now.max_ms or idle != now.idle:
                progress[feed] = FeedProgress(max_ms, idle)
                value_ms = max(value_ms, _least(progress))
            column.append(value_ms)
        return column, StreamTime(value_ms, progress)


def _least(progress: Mapping[Feed, FeedProgress]) -> int:
    awake = [feed.max_ms for feed in progress.values() if not feed.idle]
    return min(awake) if awake else max(feed.max_ms for feed in progress.values())
