"""The production worker, under every schedule of small scenarios and under seeds: nothing lost, nothing twice.

``SEED=17 pytest tests/simulation -k environment`` runs that seed alone; a failing schedule prints its choices. The long
runs are ``python -m tests.simulation.long``.
"""

import os
from collections.abc import Iterator

import pytest

from tests.simulation.choice import Script
from tests.simulation.explore import Tally, by_seeds, one
from tests.simulation.parts import Part, Pool
from tests.simulation.scenario import Bounds, Scenario
from tests.simulation.scenarios import ANSWERS, ENUMERATED, PLAIN, PROBES, TWO_HOPS, WIDE, ZOMBIE_REFUSED
from tests.simulation.variants import CORRECT

ENUMERATE = 4_000
"""Schedules of one scenario enumerated at every change."""
SAMPLE = 500
"""Where there are more: the first ones differ in their last choices only, so some are sampled."""
SLOW = {"refused records": 6, "two hops": 6, "two workers, a refused record": 6}
"""Scenarios whose schedules take longer: a share of so many."""
SEEDS_A_PART = 500
SEEDS = 3_000
LEAST = 50_000
NARROW = [Part(each.name, wide=False, sampled=False, first=0, count=ENUMERATE) for each in ENUMERATED]
WIDER = [
    Part(each.name, wide=True, sampled=False, first=0, count=ENUMERATE // SLOW.get(each.name, 1))
    for each in WIDE
    if each not in ENUMERATED
]
SAMPLED = [Part(each.name, wide=True, sampled=True, first=0, count=SAMPLE // SLOW.get(each.name, 1)) for each in WIDE]
RANDOM = [Part(None, wide=False, sampled=True, first=at, count=SEEDS_A_PART) for at in range(0, SEEDS, SEEDS_A_PART)]
PARTS = [*NARROW, *WIDER, *SAMPLED, *RANDOM]


def judged_right(tally: Tally) -> None:
    print(tally)  # noqa: T201  # shown with -s, and where it fails
    assert tally.wrong == 0, f"{tally}\n{tally.first}"


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Two processes that run the parts of all tests that were selected."""
    own = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    wanted = [
        item.callspec.params["part"] for item in own if hasattr(item, "callspec") and "part" in item.callspec.params
    ]
    in_total = any(item.function is test_there_were_as_many_schedules_as_design_page_5_asks_for for item in own)
    pool = Pool(PARTS if in_total else dict.fromkeys(wanted))
    yield pool
    pool.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_schedules(part: Part, pool: Pool) -> None:
    judged_right(pool.result(part))


@pytest.mark.timeout(600)
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
    scripted(ANSWERS, "EndTxn done late, no answer", "AddPartitions deliver")


def test_a_crash_before_the_disk_is_written_heals_from_the_changelog() -> None:
    scripted(ANSWERS, "disk crash before apply")
