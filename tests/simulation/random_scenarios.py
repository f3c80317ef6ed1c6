"""A scenario for each seed: input, rules, workers and faults, all by the same dice that later choose the schedule."""

from __future__ import annotations

import random
from typing import get_args

from dedup.core.window import Window
from tests.simulation.scenario import Bounds, Fault, Input, Scenario

KINDS: tuple[Fault, ...] = get_args(Fault)
NAMES = ("a", "b", "c", "d")


def random_scenario(dice: random.Random) -> Scenario:
    """Return a scenario; the same dice in the same state return the same."""
    guard_ms = dice.randint(3, 12)
    extend = dice.random() < 0.25
    window = Window(guard_ms, dice.randint(0, 12), extend, dice.randint(guard_ms, 4 * guard_ms) if extend else 0)
    time_ms, rows = _rows(dice, dice.randint(4, 14), 0)
    _, probes = _rows(dice, dice.randint(2, 5), time_ms)
    many = dice.random() < 0.3
    feeds = dice.choice([1, 1, 1, 1, 2, 2, 2])
    group = feeds > 1 and dice.random() < 0.6
    added = feeds > 1 and not group and dice.random() < 0.5
    kinds = dice.sample(KINDS, dice.randint(1, len(KINDS)))
    bounds = Bounds(
        faults=dice.choice([1, 2, 3, 5, 8]),
        kinds=tuple(kind for kind in kinds if group or kind != "regroup") or ("crash",),
        switches=dice.choice([2, 4, 8]) if many else 0,
        reorders=dice.choice([0, 3, 10]),
        deliveries=dice.choice([1, 3, 10]),
    )
    return Scenario(
        name="random",
        input=rows,
        bounds=bounds,
        window=window,
        probes=probes,
        most_records=dice.randint(1, 4),
        feeds=feeds,
        begun_with=1 if added else None,
        group=group,
        offsets=dice.choice(["kept", "kept", "forgotten", "stale"]),
        seeder=dice.random() < 0.15,
        fetch_entries=dice.randint(1, 5),
        implicit=(implicit := dice.random() < 0.6),
        batch_bytes=dice.choice([0, 1 << 16]),
        new_disk_at_end=dice.random() < 0.3,
        verifies=implicit or dice.random() < 0.5,
    )


def _rows(dice: random.Random, count: int, time_ms: int) -> tuple[int, Input]:
    """Return input whose time runs on, now and then leaps, and looks back."""
    rows: list[tuple[str | None, int]] = []
    for _ in range(count):
        time_ms += dice.choice([0, 1, 1, 2, 3, 5, dice.randint(5, 40)])
        name: str | None = dice.choice(NAMES)
        fate = dice.random()
        if fate < 0.04:
            name = None
        elif fate < 0.1 and name is not None:
            name = name.upper()
        rows.append((name, max(0, time_ms - dice.choice([0, 0, 0, 1, 4, 9, 20]))))
    return time_ms, tuple(rows)
