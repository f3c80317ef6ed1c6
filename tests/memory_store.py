"""The in-memory twin of the RocksDB store: same contract, nothing survives the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dedup.errors import InvariantBroken
from dedup.store.base import TaskRecord, Writes
from dedup.store.rocks import refuse_unstorable


@dataclass(slots=True)
class _Segment:
    """One segment: its keys, the widest grid it was written under, the changelog position before its first key."""

    birth: int
    width_ms: int = 0
    values: dict[bytes, bytes] = field(default_factory=dict)


class MemoryStore:
    """Keeps everything in dicts: the obvious version that the RocksDB store is compared with."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._task_record: TaskRecord | None = None
        self._position = 0
        self._closed = False

    @property
    def task_record(self) -> TaskRecord | None:
        """The last applied task record; None in a fresh store."""
        return self._task_record

    @property
    def position(self) -> int:
        """The changelog offset to restore from; 0 in a fresh store."""
        return self._position

    def get_many(self, segment: int, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the encoded values of the IDs that the segment holds; unknown IDs are absent."""
        self._refuse_if_closed()
        held = self._segments.get(segment)
        if held is None:
            return {}
        values = held.values
        return {state_key: values[state_key] for state_key in values.keys() & ids}

    def get_each(self, segments: Iterable[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """Return ``get_many`` per segment, segments without a hit left out."""
        return {segment: found for segment in segments if (found := self.get_many(segment, ids))}

    def segments(self) -> dict[int, int]:
        """Return all segments, ascending: start -> a changelog offset at or below the first record in it."""
        self._refuse_if_closed()
        return {start: held.birth for start, held in sorted(self._segments.items())}

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """Take over sightings, task record and position at once."""
        self._refuse_if_closed()
        refuse_unstorable(self._position, writes, position)
        current = record or self._task_record
        width_ms = current.segment_ms if current is not None else 0
        for start, values in writes.items():
            if not values:
                continue
            held = self._segments.setdefault(start, _Segment(birth=self._position))
            held.width_ms = max(held.width_ms, width_ms)
            held.values.update(values)
        self._task_record = current
        self._position = position

    def clear(self) -> None:
        """Forget sightings, task record and position."""
        self._refuse_if_closed()
        self._segments.clear()
        self._task_record, self._position = None, 0

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """Drop every segment that ends at or before ``oldest_live_ms``; return their starts, ascending."""
        self._refuse_if_closed()
        dropped = tuple(
            start
            for start, held in sorted(self._segments.items())
            if start + max(held.width_ms, segment_ms) <= oldest_live_ms
        )
        for start in dropped:
            del self._segments[start]
        return dropped

    def warm(self, ids: int) -> bool:  # `Store`'s signature
        """Return True: it is as quick as it gets."""
        return True

    def approximate_bytes(self) -> int:
        """Return the length of all keys and values."""
        return sum(len(key) + len(value) for _, key, value in self.sightings())

    def count_ids(self) -> int:
        """Return the number of (segment, ID) pairs."""
        self._refuse_if_closed()
        return sum(len(held.values) for held in self._segments.values())

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (segment, state key, encoded value), ordered."""
        self._refuse_if_closed()
        for start, held in sorted(self._segments.items()):
            for state_key, value in sorted(held.values.items()):
                yield start, state_key, value

    def close(self) -> None:
        """Refuse every later use; closing twice is allowed."""
        self._closed = True

    def wipe(self) -> None:
        """Close the store and forget all of it."""
        self.close()
        self._segments.clear()
        self._task_record = None
        self._position = 0

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InvariantBroken("a closed store was used: its task was revoked. Build a new task instead.")
