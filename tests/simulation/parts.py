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

    def result(self, part: Part) -> Tally:
        return self._futures[part].result()

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
