"""Defines the interface of a task's state store, and an in-memory implementation.

A sighting that ends at ``last_ms`` is stored under its state key in the segment that starts at
``Window.segment_of(last_ms)``. Each segment is dropped as a whole. A store contains only committed sightings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dedup.errors import InvariantBroken
from dedup.store.changelog import TaskRecord, Writes, refuse_unstorable


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """Identifies the task that owns a store. A task refuses to open a store that another task owns."""

    topology: str
    partition: int
    changelog_topic_id: str
    """Kafka's ID of the changelog topic. A recreated topic has a different ID."""

    def __str__(self) -> str:
        return f"{self.topology} partition {self.partition} (changelog topic id {self.changelog_topic_id})"


class Store(Protocol):
    """The interface of a task's state store. Stores are not thread-safe."""

    task_record: TaskRecord | None
    """The last applied task record, or None in a new store."""
    position: int
    """The changelog offset from which a restore continues, or 0 in a new store."""

    def get_each(self, segments: Iterable[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """Return the encoded sightings of the IDs, by segment and ID. Segments without any of the IDs are omitted."""

    def segments(self) -> dict[int, int]:
        """Map segment starts (ascending) to a changelog offset at or before each segment's first record."""

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """Write the sightings, the task record, and the position in one atomic write that survives a SIGKILL.

        If ``record`` is None, the stored task record is kept. Raises InvariantBroken if the position would decrease.
        """

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """Drop all segments that end at or before ``oldest_live_ms``, and return their starts in ascending order.

        A segment is ``segment_ms`` wide, or wider if it was ever written with a greater width.
        """

    def clear(self) -> None:
        """Delete the sightings, the task record, and the position atomically. The store stays open."""

    def warm(self, ids: int) -> bool:
        """Read up to ``ids`` more stored IDs into the Bloom filters, and return whether the filters contain all IDs."""

    def approximate_bytes(self) -> int:
        """Return an estimate of the state's size in bytes."""

    def count_ids(self) -> int:
        """Return an estimate of the number of (segment, ID) pairs in the store."""

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (segment, state key, value) tuples in sorted order. Raises TaskCorrupted if an entry is unreadable."""

    def close(self) -> None:
        """Release the store if it is not released yet."""

    def wipe(self) -> None:
        """Close the store and delete all its data."""


@dataclass(slots=True)
class _Segment:
    birth: int
    """The store's position before the first write to the segment."""
    width_ms: int = 0
    """The greatest width with which the segment was written."""
    values: dict[bytes, bytes] = field(default_factory=dict)


class MemoryStore:
    """An in-memory store. `TopologyTestDriver` uses it, and tests compare it with `RocksStore`."""

    def __init__(self) -> None:
        self.task_record: TaskRecord | None = None
        self.position = 0
        self._segments: dict[int, _Segment] = {}
        self._closed = False

    def get_each(self, segments: Iterable[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """Implement `Store.get_each`."""
        self._refuse_if_closed()
        found: dict[int, dict[bytes, bytes]] = {}
        for segment in segments:
            held = self._segments.get(segment)
            values = {} if held is None else {key: held.values[key] for key in held.values.keys() & ids}
            if values:
                found[segment] = values
        return found

    def segments(self) -> dict[int, int]:
        """Implement `Store.segments`."""
        self._refuse_if_closed()
        return {start: held.birth for start, held in sorted(self._segments.items())}

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """Implement `Store.apply`."""
        self._refuse_if_closed()
        refuse_unstorable(self.position, writes, position)
        current = record or self.task_record
        width_ms = current.segment_ms if current is not None else 0
        for start, values in writes.items():
            if not values:
                continue
            held = self._segments.setdefault(start, _Segment(birth=self.position))
            held.width_ms = max(held.width_ms, width_ms)
            held.values.update(values)
        self.task_record = current
        self.position = position

    def clear(self) -> None:
        """Implement `Store.clear`."""
        self._refuse_if_closed()
        self._segments.clear()
        self.task_record, self.position = None, 0

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """Implement `Store.drop_below`."""
        self._refuse_if_closed()
        dropped = tuple(
            start
            for start, held in sorted(self._segments.items())
            if start + max(held.width_ms, segment_ms) <= oldest_live_ms
        )
        for start in dropped:
            del self._segments[start]
        return dropped

    def warm(self, ids: int) -> bool:  # noqa: ARG002  # `Store` defines this signature
        """Return True, because a `MemoryStore` has no filters to load."""
        return True

    def approximate_bytes(self) -> int:
        """Return the total length of all state keys and values, in bytes."""
        return sum(len(key) + len(value) for _, key, value in self.sightings())

    def count_ids(self) -> int:
        """Return the number of (segment, ID) pairs in the store."""
        self._refuse_if_closed()
        return sum(len(held.values) for held in self._segments.values())

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (segment, state key, value) tuples in sorted order."""
        self._refuse_if_closed()
        for start, held in sorted(self._segments.items()):
            for state_key, value in sorted(held.values.items()):
                yield start, state_key, value

    def close(self) -> None:
        """Make every later read or write raise InvariantBroken."""
        self._closed = True

    def wipe(self) -> None:
        """Close the store and delete all its data."""
        self.close()
        self._segments.clear()
        self.task_record, self.position = None, 0

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InvariantBroken("a closed store was used: its task was revoked. Build a new task instead.")
