"""Schedules fence and abort by the thousand: what the worker logs about it is not what is tested."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.parts import LONG_PARTS, PARTS, Pool


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Two processes that run the parts of all tests that were selected, whichever test asks first.

    Not for every test: pytest-xdist selects all tests in each of its processes, and each would run all parts.
    """
    here = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    own = [item for item in here if isinstance(item, pytest.Function) and "pool" in item.function.__annotations__]
    wanted = [part for item in own for part in ([item.callspec.params["part"]] if hasattr(item, "callspec") else PARTS)]
    pool = Pool(dict.fromkeys(part for part in (*LONG_PARTS, *PARTS) if part in wanted))
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("dedup")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
