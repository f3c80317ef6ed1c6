"""Sightings put into segments of another width, after the guard period of a topology was changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dedup.core.window import Sighting, Source
from dedup.store.changelog import decode_sightings, encode_sighting


def rebucket(
    entries: Iterable[tuple[bytes, bytes]],
    segment_ms: int,
    known: Mapping[int, Mapping[bytes, bytes]] | None = None,
) -> dict[int, dict[bytes, bytes]]:
    """Return writes that put (state key, encoded value) pairs of an old grid into segments of ``segment_ms``.

    ``known`` is what the new grid holds already for these IDs; the writes include it. Sightings of one ID with the
    same first time, source and fingerprint are one sighting, extended to the latest of their ends.
    """
    intervals: dict[bytes, dict[tuple[int, Source, bytes], int]] = {}
    for state_key, value in _with_known(entries, known):
        ends = intervals.setdefault(state_key, {})
        for first_ms, last_ms, source, fingerprint in decode_sightings(value):
            name = (first_ms, source, fingerprint)
            ends[name] = max(ends.get(name, last_ms), last_ms)
    regrouped: dict[int, dict[bytes, list[Sighting]]] = {}
    for state_key, ends in intervals.items():
        for (first_ms, source, fingerprint), last_ms in sorted(ends.items()):
            there = regrouped.setdefault(last_ms - last_ms % segment_ms, {})
            there.setdefault(state_key, []).append(Sighting(first_ms, last_ms, source, fingerprint))
    return {
        start: {state_key: encode_sighting(sightings) for state_key, sightings in of.items()}
        for start, of in regrouped.items()
    }


def _with_known(
    entries: Iterable[tuple[bytes, bytes]], known: Mapping[int, Mapping[bytes, bytes]] | None
) -> Iterable[tuple[bytes, bytes]]:
    wanted: set[bytes] = set()
    for state_key, value in entries:
        wanted.add(state_key)
        yield state_key, value
    for held in (known or {}).values():
        for state_key, value in held.items():
            if state_key in wanted:
                yield state_key, value
