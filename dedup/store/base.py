"""Defines the interface of a task's state store, and the values that a store keeps, independently of Kafka.

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
"""Maps segment starts in ms to state keys, and these to encoded values: *all* sightings that end in the segment."""

NOT_SAID: Final = -1
"""The value of `kept_from` in a task record that does not say from which offset the changelog is needed."""


@dataclass(frozen=True, slots=True)
class FeedTime:
    """The greatest event time of one feed (a partition of a source topic)."""

    topic: int
    """The index of the topic in ``source.topics``."""
    partition: int
    max_ms: int
    idle: bool


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """The values with which a new task continues where the last one stopped; every transaction writes a task record."""

    fingerprint: bytes
    """The value of `Topology.state_fingerprint`; a task refuses state with another fingerprint."""
    stream_time_ms: int
    feeds: tuple[FeedTime, ...]
    next_offset: int
    """The offset in the feeding partition below which all records are judged."""
    segment_ms: int
    """Width of the segments for new sightings."""
    kept_from: int = NOT_SAID
    """The changelog offset at or above which all data of live segments was written; `NOT_SAID` if not recorded."""
    feeding_topic_id: str = ""
    """Kafka's ID of the feeding topic, 32 hex digits; empty in task records of earlier releases."""

    def counts_on_more(self, begin: int) -> bool:
        """Return whether live segments need records below ``begin``, where the changelog starts."""
        return NOT_SAID < self.kept_from < begin


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Identifies the task to which the state in a directory belongs. A task refuses the state of another one."""

    topology: str
    partition: int
    changelog_topic_id: str
    """Kafka's ID of the changelog topic. A recreated topic has a different ID."""

    def __str__(self) -> str:
        return f"{self.topology} partition {self.partition} (changelog topic id {self.changelog_topic_id})"


class Store(Protocol):
    """The applied state of one task. A store is not thread-safe, because one task owns it."""

    task_record: TaskRecord | None
    """The last applied task record; None in a new store."""
    position: int
    """The changelog offset to restore from; 0 in a new store."""

    def get_each(self, segments: Iterable[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """Map each segment to the encoded values of the known IDs in it; segments without a known ID are absent."""

    def segments(self) -> dict[int, int]:
        """Map the start of each segment to a changelog offset at or before its first record, in ascending order."""

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """Write sightings, task record, and position atomically, so that they survive a SIGKILL of the process.

        If ``record`` is None, the stored task record is kept. Raises InvariantBroken if the position decreases.
        """

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """Drop every segment that ends at or before ``oldest_live_ms``; return their starts in ascending order.

        A segment ends at its start plus ``segment_ms`` or the greatest width with which it was written, whichever is
        greater.
        """

    def clear(self) -> None:
        """Delete sightings, task record, and position atomically. The store stays open."""

    def warm(self, ids: int) -> bool:
        """Add up to ``ids`` more IDs to the filters, which makes lookups faster; return True when all IDs are added."""

    def approximate_bytes(self) -> int:
        """Return an estimate of the state's size in bytes."""

    def count_ids(self) -> int:
        """Return an estimate of the number of (segment, ID) pairs."""

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (segment, state key, encoded value), sorted. Raises TaskCorrupted if an entry is unreadable."""

    def close(self) -> None:
        """Release the store. A store may be closed more than once."""

    def wipe(self) -> None:
        """Close the store and delete all its data."""
