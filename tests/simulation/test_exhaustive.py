"""Every schedule of a small group of tasks with at most two faults or preemptions: none is left to chance.

After CHESS (Musuvathi and Qadeer, PLDI 2007): most errors show with few preemptions, so all schedules with few are run.
"""

from __future__ import annotations

import pytest

from tests.simulation.explore import enumerate_all
from tests.simulation.scenarios import SMALL
from tests.simulation.variants import CORRECT, GROUP_MUTANTS, Variant

pytestmark = [pytest.mark.long, pytest.mark.timeout(3_600)]


def test_every_schedule_with_two_faults_or_preemptions() -> None:
    tally = enumerate_all(SMALL, CORRECT, until_wrong=True)
    print(tally)  # noqa: T201  # shown with -s
    assert tally.wrong == 0, tally.first


@pytest.mark.parametrize("mutant", GROUP_MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_of_the_group_is_found(mutant: Variant) -> None:
    tally = enumerate_all(SMALL, mutant, until_wrong=True)
    print(tally)  # noqa: T201  # shown with -s
    assert tally.wrong
