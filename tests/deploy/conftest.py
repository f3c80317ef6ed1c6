"""Jobs and tools for the tests of what is deployed; a tool that is missing is a named skip."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.conftest import make_job

__all__ = ["make_job"]

ROOT = Path(__file__).parents[2]


def tool(name: str, package: str) -> str:
    """Return the path of a program, or skip with the package that has it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here; it comes with {package}")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    """Return the path of Prometheus' tool."""
    return tool("promtool", "Debian's package prometheus")
