"""Buffers a task's sightings until they are applied to its store, and includes them in lookups.

    open  --freeze-->  committing  --applied-->  store

The open generation collects the sightings of the open transaction. ``freeze`` sets the open generation aside for the
commit, and ``applied`` writes it to the store after the commit. Sightings in the store are not cached, because in a
measurement, a cache took 7% of the judging time, more than it saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from dedup.errors import InvariantBroken
from dedup.store.base import Store
from dedup.store.changelog import TaskRecord, Writes

_Tier = dict[int, dict[bytes, bytes]]


class WriteBuffer:
    """Looks up IDs as if the store already contained the sightings in the buffer."""

    def __init__(self, store: Store) -> None:
        self._store: Final = store
        self._open: _Tier = {}
        self._committing: Writes | None = None

    def get_many(self, ids: Sequence[bytes], *, after_ms: float = -math.inf) -> dict[bytes, list[bytes]]:
        """Return the encoded sightings of each known ID in the segments that start after ``after_ms``, one value per
        segment.
        """
        tiers = self._tiers()
        segments = sorted(filter(after_ms.__lt__, set(self._store.segments()).union(*tiers)))
        if not segments:
            return {}
        hits = self._store.get_each(segments, ids)
        for segment in segments:
            # A value that is not applied yet replaces the stored value of the same ID in the same segment.
            if found := _in_tiers(tiers, segment, ids):
                hits.setdefault(segment, {}).update(found)
        if len(hits) == 1:
            (found,) = hits.values()
            return {state_key: [value] for state_key, value in found.items()}
        known: dict[bytes, list[bytes]] = {}
        for segment in segments:
            for state_key, value in hits.get(segment, {}).items():
                known.setdefault(state_key, []).append(value)
        return known

    def add(self, writes: Writes) -> None:
        """Add the sightings of a batch to the open transaction."""
        for segment, values in writes.items():
            self._open.setdefault(segment, {}).update(values)

    def freeze(self) -> Writes:
        """Return the open transaction's sightings, which are about to be committed, and open a new generation.

        Raises InvariantBroken while an earlier commit is in flight.
        """
        if self._committing is not None:
            raise InvariantBroken("a second commit of one task was started while the first is in flight.")
        frozen, self._open = self._open, {}
        self._committing = frozen
        return frozen

    def applied(self, generation: Writes, record: TaskRecord, position: int, *, oldest_live_ms: int) -> None:
        """Write a committed generation to the store atomically, and drop it from the buffer.

        Segments that end at or before ``oldest_live_ms`` are left out. If the store raises an error, the generation
        stays in the buffer. Raises InvariantBroken if ``generation`` is not the generation that is being committed.
        """
        if generation is not self._committing:
            raise InvariantBroken("a generation was applied that is not the one in flight.")
        self._store.apply(unexpired(generation, record.segment_ms, oldest_live_ms), record, position)
        self._committing = None

    def discard(self) -> None:
        """Drop all buffered sightings after the transaction was aborted or the partition was lost."""
        self._open = {}
        self._committing = None

    def _tiers(self) -> tuple[Writes, ...]:
        return self._committing or {}, self._open


def unexpired(writes: Writes, segment_ms: int, oldest_live_ms: int) -> Writes:
    """Return the writes without the segments that `Store.drop_below` would drop.

    While a task works through a backlog, one transaction can span many segments, of which only the newest are live.
    """
    return {start: values for start, values in writes.items() if start + segment_ms > oldest_live_ms}


def _in_tiers(tiers: Iterable[Writes], segment: int, ids: Sequence[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for tier in tiers:
        values = tier.get(segment)
        if values:
            # The intersection runs in C. In the usual case that all IDs are unknown, no Python code runs per ID.
            found.update((state_key, values[state_key]) for state_key in values.keys() & ids)
    return found
