"""The production worker, under every schedule of small scenarios and under seeds: nothing lost, nothing twice.

``SEED=17 pytest tests/simulation`` runs that seed alone; a failing schedule prints its choices. The long runs are
``pytest -m long tests/simulation``; SCHEDULES=n there says how many seeds, FIRST_SEED=n where they begin.
"""

import os

import pytest

from tests.simulation.choice import Script
from tests.simulation.explore import Tally, by_seeds, enumerate_all, one, sample
from tests.simulation.scenario import Bounds, Scenario
from tests.simulation.scenarios import ANSWERS, ENUMERATED, PLAIN, PROBES, TWO_HOPS, WIDE, ZOMBIE_REFUSED
from tests.simulation.variants import CORRECT

ENUMERATE = 220
"""Schedules of one scenario enumerated at every change; where there are more, as many are sampled."""
SEEDS = 1_200


def name_of(scenario: Scenario) -> str:
    return scenario.name


def judged_right(tally: Tally) -> None:
    print(tally)  # noqa: T201  # shown with -s, and where it fails
    assert tally.wrong == 0, f"{tally}\n{tally.first}"


@pytest.mark.parametrize("scenario", ENUMERATED, ids=name_of)
def test_every_schedule(scenario: Scenario) -> None:
    tally = enumerate_all(scenario, CORRECT, most=ENUMERATE)
    if tally.schedules == ENUMERATE:
        tally.merge(sample(scenario, CORRECT, range(ENUMERATE)))
    judged_right(tally)


def test_random_schedules_of_random_scenarios() -> None:
    only = os.environ.get("SEED")
    judged_right(by_seeds(range(SEEDS) if only is None else [int(only)], CORRECT))


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("scenario", WIDE, ids=name_of)
def test_every_schedule_of_wide_bounds(scenario: Scenario) -> None:
    judged_right(enumerate_all(scenario, CORRECT, most=int(os.environ.get("ENUMERATE", "20000"))))


@pytest.mark.long
@pytest.mark.timeout(36_000)
def test_many_seeds() -> None:
    first = int(os.environ.get("FIRST_SEED", "1000000"))
    judged_right(by_seeds(range(first, first + int(os.environ.get("SCHEDULES", "50000"))), CORRECT))


def scripted(scenario: Scenario, *wanted: str) -> None:
    """Run one schedule by the names of its choices."""
    script = Script(*wanted)
    tally = Tally(scenario.name)
    one(tally, scenario, CORRECT, script, " -> ".join(wanted))
    assert not script.left, f"never came to {script.left}"
    judged_right(tally)


def test_a_worker_killed_twice_before_its_first_commit_starts_again() -> None:
    # Was: the first restore moved the store past the aborted transaction; the second took that for lost state.
    scenario = Scenario("killed twice", PLAIN, Bounds(2, ("crash",)), probes=PROBES)
    scripted(scenario, "EndTxn crash before", "EndTxn crash before")


def test_a_rebalance_during_a_start_does_not_stop_the_worker() -> None:
    # Was: the task was closed, and then its start came to an end: "a closed task can not become running".
    scripted(TWO_HOPS, "Poll rebalance, old owner drains")


def test_a_refusal_that_reaches_a_zombie_does_not_make_it_judge_on_old_state() -> None:
    # Was: starting over after the refusal fenced the new owner and forwarded again what that one had committed.
    scripted(ZOMBIE_REFUSED, "InitProducerId go", "InitProducerId switch")


def test_a_delayed_end_of_a_transaction_is_fenced() -> None:
    scripted(ANSWERS, "EndTxn done late, no answer", "AddPartitions deliver")


def test_a_crash_before_the_disk_is_written_heals_from_the_changelog() -> None:
    scripted(ANSWERS, "disk crash before apply")
