"""The interface of a task's state store, and the values that it keeps; it knows bytes and times, not Kafka.

State is divided into *segments*: a sighting that ends at ``last_ms`` is stored under its state key in the segment that
starts at ``Window.segment_of(last_ms)``. Segments are dropped whole. The store never holds an uncommitted sighting, and
its changelog position is never newer than its keys: ``apply`` writes keys, task record and position atomically.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

Writes = Mapping[int, Mapping[bytes, bytes]]
"""Segment start in ms -> state key -> encoded value: *all* sightings of that ID that end in that segment."""

NOT_SAID: Final = -1
"""A task record that does not say from where on its changelog is needed."""


@dataclass(frozen=True, slots=True)
class FeedTime:
    """How far one feed (a partition of a source topic) has brought stream time."""

    topic: int
    """Position of the topic in ``source.topics``."""
    partition: int
    max_ms: int
    idle: bool


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What a task needs to continue as if it had never stopped; every transaction writes one."""

    fingerprint: bytes
    """`Topology.state_fingerprint`; state with another fingerprint is refused."""
    stream_time_ms: int
    feeds: tuple[FeedTime, ...]
    next_offset: int
    """Of the feeding partition: everything below it is judged."""
    segment_ms: int
    """Width of the segments for new sightings."""
    kept_from: int = NOT_SAID
    """The changelog offset at or above which everything in live segments was written; `NOT_SAID` in a new state."""
    feeding_topic_id: str = ""
    """Kafka's id of the feeding topic, 32 hex digits; empty in records of earlier releases."""

    def counts_on_more(self, begin: int) -> bool:
        """Whether live segments need records below ``begin``, where the changelog starts."""
        return NOT_SAID < self.kept_from < begin


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Whose state a directory holds; the store of another owner is refused."""

    topology: str
    partition: int
    changelog_topic_id: str
    """Kafka's id of the changelog topic: a deleted and recreated topic has another."""

    def __str__(self) -> str:
        return f"{self.topology} partition {self.partition} (changelog topic id {self.changelog_topic_id})"


class Store(Protocol):
    """The applied state of one task. Not thread-safe: one task owns it."""

    @property
    def task_record(self) -> TaskRecord | None:
        """The last applied task record; None in a fresh store."""

    @property
    def position(self) -> int:
        """The changelog offset to restore from; 0 in a fresh store."""

    def get_each(self, segments: Iterable[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """Return segment -> state key -> encoded value for the IDs that are held; segments without a hit are absent."""

    def segments(self) -> dict[int, int]:
        """Return all segments, ascending: start -> a changelog offset at or below the first record in it."""

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """Write sightings, task record and position atomically; they survive a SIGKILL.

        ``record`` None keeps the stored one. Raises InvariantBroken if the position moves back.
        """

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """Drop every segment that ends at or before ``oldest_live_ms``; return their starts, ascending.

        A segment ends at its start plus the greatest of ``segment_ms`` and the widths it was written with.
        """

    def clear(self) -> None:
        """Delete sightings, task record and position atomically; the store stays open."""

    def warm(self, ids: int) -> bool:
        """Load filters for up to ``ids`` more IDs, which makes look-ups faster; True when all are loaded."""

    def approximate_bytes(self) -> int:
        """Return an estimate of the bytes that the state takes."""

    def count_ids(self) -> int:
        """Return an estimate of the number of (segment, ID) pairs."""

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (segment, state key, encoded value), sorted; raises TaskCorrupted for an unreadable one."""

    def close(self) -> None:
        """Release the store; closing it twice is allowed."""

    def wipe(self) -> None:
        """Close the store and delete all its data."""
