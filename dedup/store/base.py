"""The interface of a task's state store and the values that it keeps. It is independent of Kafka.

State is divided into *segments*. A sighting that ends at ``last_ms`` is stored under its state key in the segment that
starts at ``Window.segment_of(last_ms)``. Segments are dropped as a whole. The store never contains an uncommitted
sighting, and its changelog position is never newer than its keys, because ``apply`` writes keys, task record, and
position atomically.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

Writes = Mapping[int, Mapping[bytes, bytes]]
"""Segment start in ms -> state key -> encoded value, which holds *all* sightings of that ID that end in that segment.
"""

NOT_SAID: Final = -1
"""Value for a task record that does not say from which offset on its changelog is needed."""


@dataclass(frozen=True, slots=True)
class FeedTime:
    """The greatest event time of one feed (a partition of a source topic)."""

    topic: int
    """Position of the topic in ``source.topics``."""
    partition: int
    max_ms: int
    idle: bool


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """The values with which a task continues as if it had never stopped; every transaction writes a task record."""

    fingerprint: bytes
    """`Topology.state_fingerprint`; state with another fingerprint is refused."""
    stream_time_ms: int
    feeds: tuple[FeedTime, ...]
    next_offset: int
    """Offset of the feeding partition below which everything is judged."""
    segment_ms: int
    """Width of the segments for new sightings."""
    kept_from: int = NOT_SAID
    """The changelog offset at or above which all data of live segments was written; `NOT_SAID` in new state."""
    feeding_topic_id: str = ""
    """Kafka's id of the feeding topic, 32 hex digits; empty in records of earlier releases."""

    def counts_on_more(self, begin: int) -> bool:
        """Whether live segments need records below ``begin``, where the changelog starts."""
        return NOT_SAID < self.kept_from < begin


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The owner of the state in a directory; the store of another owner is refused."""

    topology: str
    partition: int
    changelog_topic_id: str
    """Kafka's id of the changelog topic, because a recreated topic has a different id."""

    def __str__(self) -> str:
        return f"{self.topology} partition {self.partition} (changelog topic id {self.changelog_topic_id})"


class Store(Protocol):
    """The applied state of one task. Not thread-safe, because one task owns it."""

    @property
    def task_record(self) -> TaskRecord | None:
        """The last applied task record; None in a fresh store."""

    @property
    def position(self) -> int:
        """The changelog offset to restore from; 0 in a fresh store."""

    def get_each(self, segments: Iterable[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """Return segment -> state key -> encoded value for the known IDs; segments without a hit are absent."""

    def segments(self) -> dict[int, int]:
        """Return all segments, ascending: start -> a changelog offset at or below the first record in it."""

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """Write sightings, task record, and position atomically; they survive a SIGKILL.

        If ``record`` is None, the stored one is kept. Raises InvariantBroken if the position decreases.
        """

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """Drop every segment that ends at or before ``oldest_live_ms``; return their starts in ascending order.

        A segment ends at its start plus ``segment_ms`` or the greatest width with which it was written, whichever is
        greater.
        """

    def clear(self) -> None:
        """Delete sightings, task record, and position atomically; the store stays open."""

    def warm(self, ids: int) -> bool:
        """Load filters for up to ``ids`` more IDs, which makes lookups faster; True when all are loaded."""

    def approximate_bytes(self) -> int:
        """Return an estimate of the state's size in bytes."""

    def count_ids(self) -> int:
        """Return an estimate of the number of (segment, ID) pairs."""

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (segment, state key, encoded value), sorted; raises TaskCorrupted for an unreadable one."""

    def close(self) -> None:
        """Release the store; closing it twice is allowed."""

    def wipe(self) -> None:
        """Close the store and delete all its data."""
