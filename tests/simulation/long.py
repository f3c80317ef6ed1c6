"""Runs schedules for hours, in parts whose results add up: ``python -m tests.simulation.long RESULT --minutes 60``.

RESULT is a JSON file, written after every part; started again with it, the run goes on where it was. Scenarios of wide
bounds are enumerated in turn, and between them random scenarios by seeds. Exit code 1 at the first violation.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.simulation.choice import Odometer
from tests.simulation.explore import Tally, by_seeds, enumerate_all, sample
from tests.simulation.scenario import Scenario
from tests.simulation.scenarios import WIDE
from tests.simulation.variants import CORRECT

PART = 1_000
SEEDS_IN = 12
"""One schedule in so many is of a random scenario."""
RANDOM = "random scenarios"


def fresh(first_seed: int) -> dict[str, Any]:
    """Return the result of a run that has not begun."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "proof_run": "simulator",
        "commit": commit.stdout.strip(),
        "began": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "seconds": 0.0,
        "schedules": 0,
        "seeds": 0,
        "wrong": 0,
        "first_seed": first_seed,
        "scenarios": {},
    }


def seeds(result: dict[str, Any], part: int) -> Tally:
    """Run the next random scenarios."""
    first = result["first_seed"] + result["seeds"]
    result["seeds"] += part
    return by_seeds(range(first, first + part), CORRECT)


def enumerated(result: dict[str, Any], scenario: Scenario) -> Tally:
    """Run the next schedules of a scenario; by seeds once all were run."""
    own = result["scenarios"].setdefault(scenario.name, {"schedules": 0, "all": False, "sampled": 0, "at": [[], []]})
    if own["all"]:
        first = result["first_seed"] + own["sampled"]
        tally = sample(scenario, CORRECT, range(first, first + PART // 4))
        own["sampled"] += tally.schedules
        return tally
    odometer = Odometer(*own["at"])
    tally = enumerate_all(scenario, CORRECT, most=PART, odometer=odometer)
    own["schedules"] += tally.schedules
    own["all"] = tally.schedules < PART
    own["at"] = [[], []] if own["all"] else list(odometer.reading)
    return tally


def run(path: Path, until: float, result: dict[str, Any], turns: tuple[Scenario, ...]) -> int:
    """Run part after part until it is time, or something is wrong; return the exit code."""
    turn = 0
    while time.monotonic() < until:
        if result["seeds"] * SEEDS_IN <= result["schedules"]:
            tally = seeds(result, PART // 4)
        else:
            tally = enumerated(result, turns[turn % len(turns)])
            turn += 1
        result["schedules"] += tally.schedules
        result["wrong"] += tally.wrong
        result["seconds"] = round(result["seconds"] + tally.seconds, 1)
        print(f"{result['schedules']:8d} {tally}", flush=True)  # noqa: T201  # a script's progress
        if tally.wrong:
            result["first"] = tally.first
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(result) + "\n", encoding="utf-8")
        beside.rename(path)
        if tally.wrong:
            print(tally.first)  # noqa: T201
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first-seed", type=int, default=2_000_000)
    parser.add_argument("--share", default="1/1", help="k/n: the k-th of n processes, each with a share of scenarios")
    options = parser.parse_args()
    logging.getLogger("dedup").setLevel(logging.CRITICAL)
    path: Path = options.result
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else fresh(options.first_seed)
    number, of = map(int, options.share.split("/"))
    return run(path, time.monotonic() + 60 * options.minutes, result, WIDE[number - 1 :: of])


if __name__ == "__main__":
    sys.exit(main())
