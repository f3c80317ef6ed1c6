"""Fixtures of every suite: one broker a run, and names no two tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from hypothesis import HealthCheck, settings
from typer.main import get_command

from tests import brokers
from tests.brokers import Admin, RunningKafka

if not os.environ.get("CI"):
    # A slow machine is no failure. In CI, Hypothesis's own profile has no such limits either, and fixed examples.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


SLOW = tuple(
    line
    for line in Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist, if it is used, begin the files in the order of the command line.

    By default, it begins the files of the fewest tests last, and here these are the longest.
    """
    config.option.loadscopereorder = False
    if release := os.environ.get("DEDUP_TEST_KAFKA"):
        brokers.use_release(release)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that slow.txt lists."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Let Typer's CliRunner build the same commands only once, which takes longer than most tests of them."""

    built: dict[tuple[object, ...], Any] = {}

    def command_of(app: typer.Typer) -> Any:
        names = tuple((each.name, each.callback) for each in app.registered_commands)
        if names not in built:
            built[names] = get_command(app)
        return built[names]

    with patch("typer.testing._get_command", command_of):
        yield


@pytest.fixture(scope="session")
def kafka() -> Iterator[RunningKafka]:
    """Return the run's broker: the embedded one, or with DEDUP_TEST_BROKER=docker Apache's image."""
    match os.environ.get("DEDUP_TEST_BROKER", "embedded"):
        case "embedded":
            start = brokers.embedded
        case "docker":
            start = brokers.in_container
        case other:
            pytest.fail(f"DEDUP_TEST_BROKER is {other!r}; write embedded or docker")
    with start() as running:
        yield running


@pytest.fixture(scope="session")
def admin(kafka: RunningKafka) -> Admin:
    """Return what creates topics on the run's broker."""
    return brokers.admin_of(kafka.bootstrap)


@pytest.fixture
def topic_names() -> Callable[[str], str]:
    """Return a function that makes a name no other test has."""
    return brokers.unique
