"""The production worker, under every schedule of small scenarios and under seeds: nothing lost, nothing twice.

``SEED=17 pytest tests/simulation -k environment`` runs that seed alone; a failing schedule prints its choices. The long
runs are ``python -m tests.simulation.long``.
"""

import os

import pytest

from tests.simulation.choice import Script
from tests.simulation.explore import Tally, by_seeds, one
from tests.simulation.parts import PARTS, Part, Pool
from tests.simulation.scenario import Bounds, Scenario
from tests.simulation.scenarios import ANSWERS, ANSWERS_ANNOUNCED, PLAIN, PROBES, TWO_HOPS, ZOMBIE_REFUSED
from tests.simulation.variants import CORRECT

LEAST = 50_000


def judged_right(tally: Tally) -> None:
    print(tally)  # noqa: T201  # shown with -s, and where it fails
    assert tally.wrong == 0, f"{tally}\n{tally.first}"


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_schedules(part: Part, pool: Pool) -> None:
    judged_right(pool.result(part))


@pytest.mark.timeout(1_200)
def test_there_were_as_many_schedules_as_design_page_5_asks_for(pool: Pool) -> None:
    total = sum(pool.result(part).schedules for part in PARTS)
    print(f"{total} schedules")  # noqa: T201  # shown with -s
    assert total >= LEAST


def test_the_seed_of_the_environment() -> None:
    judged_right(by_seeds([int(os.environ.get("SEED", "0"))], CORRECT))


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
    scripted(ANSWERS_ANNOUNCED, "EndTxn done late, no answer", "AddPartitions deliver")


def test_a_delayed_end_of_a_transaction_with_an_epoch_of_its_own_is_fenced() -> None:
    scripted(ANSWERS, "EndTxn done late, no answer", "Produce deliver")


def test_a_crash_before_the_disk_is_written_heals_from_the_changelog() -> None:
    scripted(ANSWERS, "disk crash before apply")
