"""Records of the repartition topic as they were in the source topics: originals travel in reserved headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from dedup.core.stream_time import Feed
from dedup.errors import InvariantBroken
from dedup.session.wire import Header
from dedup.worker.batch import FeedBatch
from dedup.worker.publish import IDLE, SOURCE, TIMESTAMP

FOREIGN: Final = (
    "{topic}/{partition} offset {offset} was not written by a repartition task: it lacks the headers dedup-source and "
    "dedup-timestamp. Stop whatever else writes to that topic, then `dedup reset`."
)


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A batch of the repartition topic, with the columns of the source topics."""

    batch: FeedBatch
    """Offsets are those of the repartition topic; timestamps and headers are the source's."""
    feeds: list[Feed]
    sources: list[int]
    """Offsets in the source partitions."""
    idle_rows: frozenset[int]


def unwrap(batch: FeedBatch, source_topics: tuple[str, ...]) -> Unwrapped:
    """Return the originals; raises InvariantBroken for a record that no repartition task wrote."""
    positions = {topic: position for position, topic in enumerate(source_topics)}
    feeds: list[Feed] = []
    sources: list[int] = []
    timestamps_ms: list[int] = []
    headers: list[list[Header]] = []
    idle_rows: set[int] = set()
    for row, own in enumerate(batch.headers):
        # Ours are the last two; the source's own headers may carry any name, of a dedup before this one too.
        origin = _origin(dict(own[-2:]), positions, batch, row)
        if origin.idle:
            idle_rows.add(row)
        feeds.append(origin.feed)
        sources.append(origin.offset)
        timestamps_ms.append(origin.timestamp_ms)
        headers.append(list(own[:-2]))
    plain = replace(batch, timestamps_ms=timestamps_ms, headers=headers)
    # A single entry would be read as "one feed for all".
    return Unwrapped(plain, feeds, sources, frozenset(idle_rows))


@dataclass(frozen=True, slots=True)
class _Origin:
    feed: Feed
    offset: int
    timestamp_ms: int
    idle: bool


def _origin(ours: Mapping[str, bytes | None], positions: Mapping[str, int], batch: FeedBatch, row: int) -> _Origin:
    timestamp, idle, source = ours.get(TIMESTAMP), ours.get(IDLE), ours.get(SOURCE)
    if timestamp is not None and idle is not None:
        topic, partition = idle.decode().rsplit("/", 1)
        return _Origin(Feed(positions[topic], int(partition)), -1, int(timestamp), idle=True)
    if timestamp is not None and source is not None:
        topic, partition, offset = source.decode().rsplit("/", 2)
        return _Origin(Feed(positions[topic], int(partition)), int(offset), int(timestamp), idle=False)
    topic, number = batch.feeding
    raise InvariantBroken(FOREIGN.format(topic=topic, partition=number, offset=batch.offsets[row]))
