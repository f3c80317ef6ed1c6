"""The schedules of every change, cut into parts that two processes share."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

from tests.simulation.explore import Tally, by_seeds, enumerate_all, sample
from tests.simulation.scenarios import ENUMERATED, WIDE
from tests.simulation.variants import CORRECT

PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Part:
    """So many schedules of one kind."""

    scenario: str | None
    """By name; None: random scenarios by seeds."""
    wide: bool
    """With the bounds of the long runs."""
    sampled: bool
    first: int
    count: int

    def __str__(self) -> str:
        how = "sampled" if self.sampled else "enumerated"
        bounds = "wide bounds" if self.wide else "narrow bounds"
        return (
            f"{self.scenario}, {bounds}, {how}"
            if self.scenario
            else f"seeds {self.first} to {self.first + self.count - 1}"
        )


ENUMERATE = 4_000
"""Schedules of one scenario enumerated at every change."""
SAMPLE = 500
"""Where there are more: the first ones differ in their last choices only, so some are sampled."""
SLOW = {"refused records": 6, "two hops": 6, "two workers, a refused record": 6}
"""Scenarios whose schedules take longer: a share of so many."""
SEEDS_A_PART = 500
SEEDS = 3_000
NARROW = [Part(each.name, wide=False, sampled=False, first=0, count=ENUMERATE) for each in ENUMERATED]
WIDER = [
    Part(each.name, wide=True, sampled=False, first=0, count=ENUMERATE // SLOW.get(each.name, 1))
    for each in WIDE
    if each not in ENUMERATED
]
SAMPLED = [Part(each.name, wide=True, sampled=True, first=0, count=SAMPLE // SLOW.get(each.name, 1)) for each in WIDE]
RANDOM = [Part(None, wide=False, sampled=True, first=at, count=SEEDS_A_PART) for at in range(0, SEEDS, SEEDS_A_PART)]
LONGEST = (
    "a group is split, narrow bounds, enumerated",
    "two workers, one killed, wide bounds, enumerated",
    "a group's answers out of order, narrow bounds, enumerated",
    "delayed requests, wide bounds, enumerated",
    "a group is split, a refused record, narrow bounds, enumerated",
    "a group with two workers, a refused record, narrow bounds, enumerated",
    "refused records, wide bounds, enumerated",
    "two workers, a refused record, wide bounds, enumerated",
    "two hops, wide bounds, enumerated",
    "expiry, wide bounds, enumerated",
)
"""Together they take longer than all other parts, so `test_longest.py` runs them, which README's command leaves out."""
PARTS = [each for each in (*WIDER, *RANDOM, *NARROW, *SAMPLED) if str(each) not in LONGEST]
"""The long ones first: two processes that share them end at about the same time."""
LONG_PARTS = [each for each in (*WIDER, *NARROW) if str(each) in LONGEST]


def run(part: Part) -> Tally:
    """Run a part; the same part runs the same schedules."""
    logging.getLogger("dedup").setLevel(logging.CRITICAL)
    if part.scenario is None:
        return by_seeds(range(part.first, part.first + part.count), CORRECT)
    scenario = next(each for each in (WIDE if part.wide else ENUMERATED) if each.name == part.scenario)
    if part.sampled:
        return sample(scenario, CORRECT, range(part.first, part.first + part.count))
    return enumerate_all(scenario, CORRECT, most=part.count)


class Pool:
    """Runs parts in two processes, in the order they were given."""

    def __init__(self, parts: Iterable[Part]) -> None:
        # Spawned: a fork would take the threads' locks of this process along.
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), mp_context=context)
        self._futures: dict[Part, Future[Tally]] = {part: self._executor.submit(run, part) for part in parts}
        # The processes end when all is done, whoever else goes on testing.
        self._executor.shutdown(wait=False)

    def result(self, part: Part) -> Tally:
        return self._futures[part].result()

    def close(self) -> None:
        for future in self._futures.values():
            future.cancel()
