"""Stream time of a log that is read in pieces, in one pass.

Stream time is a running maximum over a source partition, in offset order. Spark reads that partition in pieces, on many
machines. A *stretch* is a run of ascending offsets that one Spark task met. Within it the running maximum is known at
once; what is missing is the greatest time of the stretches before it. So each task sends, after its rows, one notice of
its stretches to every reader of the shuffle that follows; a reader has them all before its first record, and adds what
was missing. No second pass, and no sort of the whole log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from dedup.core.window import BEFORE_ALL_TIME
from dedup.errors import StateIncompatible

Integers = npt.NDArray[np.int64]

MOST_STRETCHES: Final = 10_000
"""In one Spark task; a log read in order has one a Kafka partition."""


@dataclass(slots=True)
class Stretch:
    """A run of ascending offsets of one Kafka partition, and the greatest event time accepted in it."""

    number: int
    topic: int
    """Position in ``source.topics``."""
    partition: int
    first_offset: int
    last_offset: int
    greatest_ms: int


class Stretches:
    """The stretches that one Spark task has met so far."""

    def __init__(self, task: int) -> None:
        self._next: int = task << 32
        self._open: Final[dict[int, Stretch]] = {}
        self.all: Final[list[Stretch]] = []

    def take(self, topics: Integers, partitions: Integers, offsets: Integers, times_ms: Integers) -> list[Integers]:
        """Return, for each record, its stretch and the running maximum within it.

        ``times_ms`` is `BEFORE_ALL_TIME` where a record does not move stream time. Raises StateIncompatible where the
        records are in no order.
        """
        numbers = np.empty(len(offsets), np.int64)
        running = np.empty(len(offsets), np.int64)
        places = (topics << 32) | partitions
        order = np.argsort(places, kind="stable") if (places != places[:1]).any() else np.arange(len(places))
        sorted_places, sorted_offsets = places[order], offsets[order]
        breaks = (sorted_places[1:] != sorted_places[:-1]) | (sorted_offsets[1:] <= sorted_offsets[:-1])
        borders = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(places)]
        for begin, end in pairwise(borders):
            rows = order[begin:end]
            if len(rows):
                self._take_run(int(sorted_places[begin]), rows, offsets, times_ms, numbers, running)
        return [numbers, running]

    def _take_run(
        self,
        place: int,
        rows: Integers,
        offsets: Integers,
        times_ms: Integers,
        numbers: Integers,
        running: Integers,
    ) -> None:
        first, last = int(offsets[rows[0]]), int(offsets[rows[-1]])
        stretch = self._open.get(place)
        if stretch is None or first <= stretch.last_offset:
            stretch = self._begin(place, first)
        greatest = np.maximum(np.maximum.accumulate(times_ms[rows]), stretch.greatest_ms)
        numbers[rows] = stretch.number
        running[rows] = greatest
        stretch.last_offset = last
        stretch.greatest_ms = int(greatest[-1])

    def _begin(self, place: int, first_offset: int) -> Stretch:
        if len(self.all) >= MOST_STRETCHES:
            raise StateIncompatible(
                f"one Spark task met more than {MOST_STRETCHES:,} breaks in the order of offsets: the rows are not "
                f"in the log's order. Give the job `contiguous=False`, so that it sorts them first."
            )
        stretch = Stretch(self._next, place >> 32, place & 0xFFFFFFFF, first_offset, first_offset - 1, BEFORE_ALL_TIME)
        self._next += 1
        self._open[place] = stretch
        self.all.append(stretch)
        return stretch


def overlap(stretches: Iterable[Stretch]) -> tuple[Stretch, Stretch] | None:
    """Return two stretches of one Kafka partition that overlap; None where each begins after the one before ends."""
    ordered = sorted(stretches, key=lambda each: (each.topic, each.partition, each.first_offset))
    for before, after in pairwise(ordered):
        same = (before.topic, before.partition) == (after.topic, after.partition)
        if same and after.first_offset <= before.last_offset:
            return before, after
    return None


def before_each(stretches: Sequence[Stretch], topics: Sequence[str]) -> Mapping[int, int]:
    """Return, by the number of each stretch, the greatest time of those before it in its Kafka partition.

    Raises StateIncompatible where two overlap: a record is there twice, or the rows were not in the log's order.
    """
    both = overlap(stretches)
    if both is not None:
        before, after = both
        raise StateIncompatible(
            f"{topics[before.topic]}/{before.partition}: the offsets {after.first_offset} to {before.last_offset} were "
            f"met twice, or the rows are not in the log's order. Take the same records out of the input, or give the "
            f"job `contiguous=False`, so that it sorts the rows first."
        )
    greatest: dict[tuple[int, int], int] = {}
    result: dict[int, int] = {}
    for each in sorted(stretches, key=lambda each: (each.topic, each.partition, each.first_offset)):
        place = each.topic, each.partition
        result[each.number] = greatest.get(place, BEFORE_ALL_TIME)
        greatest[place] = max(result[each.number], each.greatest_ms)
    return result


def resolved(before: Mapping[int, int], numbers: Integers, running: Integers) -> Integers:
    """Return the running maximum over the whole log, given that within each stretch."""
    met, where = np.unique(numbers, return_inverse=True)
    known = np.array([before[number] for number in met.tolist()], np.int64)
    result: Integers = np.maximum(known[where], running)
    return result
