"""Implements a store in memory, with the contract of the store in RocksDB. Nothing survives the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dedup.errors import InvariantBroken
from dedup.store.base import TaskRecord, Writes, refuse_unstorable


@dataclass(slots=True)
class _Segment:
    birth: int
    """The changelog position before the first key."""
    width_ms: int = 0
    """The greatest width that the segment was written with."""
    values: dict[bytes, bytes] = field(default_factory=dict)


class MemoryStore:
    """A store of dictionaries, for `TopologyTestDriver` and for tests that compare it with `RocksStore`."""

    def __init__(self) -> None:
        self.task_record: TaskRecord | None = None
        self.position = 0
        self._segments: dict[int, _Segment] = {}
        self._closed = False

    def get_each(self, segments: Iterable[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """See `Store`."""
        self._refuse_if_closed()
        found: dict[int, dict[bytes, bytes]] = {}
        for segment in segments:
            held = self._segments.get(segment)
            values = {} if held is None else {key: held.values[key] for key in held.values.keys() & ids}
            if values:
                found[segment] = values
        return found

    def segments(self) -> dict[int, int]:
        """See `Store`."""
        self._refuse_if_closed()
        return {start: held.birth for start, held in sorted(self._segments.items())}

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """See `Store`."""
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
        """See `Store`."""
        self._refuse_if_closed()
        self._segments.clear()
        self.task_record, self.position = None, 0

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """See `Store`."""
        self._refuse_if_closed()
        dropped = tuple(
            start
            for start, held in sorted(self._segments.items())
            if start + max(held.width_ms, segment_ms) <= oldest_live_ms
        )
        for start in dropped:
            del self._segments[start]
        return dropped

    def warm(self, ids: int) -> bool:  # noqa: ARG002  # the signature of `Store`
        """Return True, because there are no filters to load."""
        return True

    def approximate_bytes(self) -> int:
        """Return the length of all keys and values."""
        return sum(len(key) + len(value) for _, key, value in self.sightings())

    def count_ids(self) -> int:
        """Return the number of (segment, ID) pairs."""
        self._refuse_if_closed()
        return sum(len(held.values) for held in self._segments.values())

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield sorted tuples (segment, state key, value)."""
        self._refuse_if_closed()
        for start, held in sorted(self._segments.items()):
            for state_key, value in sorted(held.values.items()):
                yield start, state_key, value

    def close(self) -> None:
        """Refuse every later use, except for another call of `close`."""
        self._closed = True

    def wipe(self) -> None:
        """Close the store and delete all its data."""
        self.close()
        self._segments.clear()
        self.task_record, self.position = None, 0

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InvariantBroken("a closed store was used: its task was revoked. Build a new task instead.")
