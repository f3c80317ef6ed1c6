"""The scenarios with the most schedules, of which README's command leaves out the enumerations."""

import pytest

from tests.simulation.parts import LONG_PARTS, LONGEST, Part, Pool
from tests.simulation.test_schedules import judged_right


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("part", LONG_PARTS, ids=str)
def test_schedules(part: Part, pool: Pool) -> None:
    judged_right(pool.result(part))


def test_each_is_a_part() -> None:
    assert sorted(map(str, LONG_PARTS)) == sorted(LONGEST)
