"""A batch judged as a whole, where only the first record of each ID matters.

That is the usual batch: its records are close together in event time, none is near a bound of the window, and what is
known of its IDs is well within the guard period. Then a record is a duplicate if its ID is known or stands before it,
and unique otherwise: a question for a dict, asked in C. `fold` judges the other batches record by record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import ne

from dedup.core.window import Sighting, Window


@dataclass(frozen=True, slots=True)
class AtOnce:
    """The verdicts of a batch without a late record."""

    unique: list[int]
    duplicates: list[tuple[int, Sighting]]
    """Rows of known IDs, with the sighting that they repeat."""
    repeats: list[tuple[int, int]]
    """Rows of other IDs that stand before in the batch, with the row that they repeat."""


def judged_at_once(
    ids: Sequence[bytes],
    times_ms: Sequence[int],
    known: Mapping[bytes, tuple[Sighting, ...]],
    window: Window,
    stream_time_ms: int,
) -> AtOnce | None:
    """Return the verdicts that the records have one after the other; None unless that is sure.

    ``known`` are the sightings of these IDs and no others, ``stream_time_ms`` is that after the batch. The window must
    not extend.
    """
    least_ms, greatest_ms = min(times_ms), max(times_ms)
    if least_ms < stream_time_ms - window.grace_ms or greatest_ms - least_ms >= window.guard_ms:
        return None
    # The only sighting of its ID, so placed, makes a duplicate of each record here. None is too old for it: no
    # record is behind stream time by more than the grace period, no sighting behind a record by the guard period.
    before_ms, after_ms = least_ms + window.guard_ms, greatest_ms - window.guard_ms
    for sightings in known.values():
        if len(sightings) > 1 or sightings[0].first_ms >= before_ms or sightings[0].last_ms <= after_ms:
            return None
    first: dict[bytes, int] = {}
    rows = range(len(ids))
    owners = list(map(first.setdefault, ids, rows))
    duplicates = [(first.pop(key), seen) for key, (seen,) in known.items()]
    repeats: list[tuple[int, int]] = []
    for row in compress(rows, map(ne, owners, rows)):
        sightings = known.get(ids[row], ())
        if sightings:
            duplicates.append((row, sightings[0]))
        else:
            repeats.append((row, owners[row]))
    duplicates.sort()
    return AtOnce(list(first.values()), duplicates, repeats)
