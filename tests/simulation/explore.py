"""Many schedules of a scenario, enumerated or by seeds, with what came of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.choice import Chooser, Odometer, Seeded
from tests.simulation.oracle import Violation
from tests.simulation.random_scenarios import random_scenario
from tests.simulation.run import Run
from tests.simulation.scenario import Scenario
from tests.simulation.variants import Variant


@dataclass(slots=True)
class Tally:
    """What came of a number of schedules."""

    name: str
    schedules: int = 0
    steps: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    """Kind of violation -> schedules with one."""
    first: str = ""
    """The first schedule that went wrong."""

    @property
    def wrong(self) -> int:
        """Schedules with any violation."""
        return self.kinds["any"]

    def __str__(self) -> str:
        named = [f"{kind} {count}" for kind, count in sorted(self.kinds.items()) if kind != "any"]
        rate = self.schedules / self.seconds if self.seconds else 0.0
        found = f"wrong {self.wrong} ({', '.join(named)})" if self.wrong else "wrong 0"
        return f"{self.name:62s} schedules {self.schedules:6d}, {found}, {rate:.0f}/s"

    def add(self, run: Run, violations: list[Violation], label: str) -> None:
        """Count one schedule."""
        self.schedules += 1
        self.steps += run.steps
        if violations:
            self.kinds["any"] += 1
            self.kinds.update({violation.kind for violation in violations})
            if not self.first:
                found = "\n  ".join(f"{violation.kind}: {violation.text}" for violation in violations)
                self.first = f"{label}\n  " + "\n  ".join(run.trace) + f"\n  {found}"

    def merge(self, other: Tally) -> None:
        """Add another tally."""
        self.schedules += other.schedules
        self.steps += other.steps
        self.seconds += other.seconds
        self.kinds.update(other.kinds)
        self.first = self.first or other.first


def one(tally: Tally, scenario: Scenario, variant: Variant, chooser: Chooser, label: str) -> None:
    """Run one schedule and count it."""
    run = Run(scenario, variant, chooser)
    tally.add(run, run.go(), f"{variant.name}, {label}")


def enumerate_all(
    scenario: Scenario,
    variant: Variant,
    *,
    most: int | None = None,
    until_wrong: bool = False,
    odometer: Odometer | None = None,
) -> Tally:
    """Run every schedule of a scenario; with ``most``, the first ones, or those that follow an odometer's."""
    tally = Tally(f"{variant.name} · {scenario.name}")
    begin = time.perf_counter()
    odometer = odometer or Odometer()
    while odometer.next_schedule():
        one(tally, scenario, variant, odometer, f"{scenario.name}, schedule {tally.schedules}")
        if tally.schedules == most or (until_wrong and tally.wrong):
            break
    tally.seconds = time.perf_counter() - begin
    return tally


def sample(scenario: Scenario, variant: Variant, seeds: Iterable[int], *, until_wrong: bool = False) -> Tally:
    """Run schedules of a scenario by seeds, where there are too many to run all."""
    tally = Tally(f"{variant.name} · {scenario.name}, sampled")
    begin = time.perf_counter()
    for seed in seeds:
        one(tally, scenario, variant, Seeded(seed), f"{scenario.name}, seed {seed}")
        if until_wrong and tally.wrong:
            break
    tally.seconds = time.perf_counter() - begin
    return tally


def by_seeds(seeds: Iterable[int], variant: Variant, *, until_wrong: bool = False) -> Tally:
    """Run one random scenario with one random schedule for each seed."""
    tally = Tally(f"{variant.name} · seeds")
    begin = time.perf_counter()
    for seed in seeds:
        chooser = Seeded(seed)
        one(tally, random_scenario(chooser.dice), variant, chooser, f"SEED={seed}")
        if until_wrong and tally.wrong:
            break
    tally.seconds = time.perf_counter() - begin
    return tally
