"""`dedup bench`: which script of bench/ it runs, with which options, and what it says without a checkout."""

from __future__ import annotations

import sys
from typing import Self

import pytest
from typer.testing import CliRunner

from dedup.cli import bench
from dedup.cli.main import create_app


class Ended:
    """A process that has ended with this code."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> int:
        return self.code


@pytest.fixture
def started(monkeypatch):
    """The command lines that were started; each ends with exit code 1."""
    lines: list[list[str]] = []

    def start(line: list[str], **_: object) -> Ended:
        lines.append(line)
        return Ended(1)

    monkeypatch.setattr(bench.subprocess, "Popen", start)
    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    return lines


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), ("bench.run",)),
        (
            ("--events", "300000", "--rounds", "1", "--only", "dedup", "--only", "quix"),
            ("bench.run", "--events", "300000", "--rounds", "1", "--only", "dedup", "--only", "quix"),
        ),
        (("--latency", "--rate", "5000"), ("bench.latency", "--rate", "5000")),
        (("--latency",), ("bench.latency", "--rate", "40000", "--rate", "80000", "--rate", "120000")),
        (("--restore", "--events", "2000"), ("bench.restore", "--ids", "2000")),
        (("--restore", "--bootstrap", "b:1"), ("bench.restore", "--bootstrap", "b:1")),
    ],
)
def test_the_script_and_its_options(started, given, expected):
    result = CliRunner().invoke(create_app(), ["bench", *given])
    assert started == [[sys.executable, "-m", *expected]]
    assert result.exit_code == 1


@pytest.mark.parametrize(
    "given",
    [
        ("--latency", "--restore"),
        ("--rate", "5000"),
        ("--latency", "--events", "5000"),
        ("--restore", "--only", "dedup"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(started, given):
    result = CliRunner().invoke(create_app(), ["bench", *given])
    assert result.exit_code == 2
    assert not started


@pytest.mark.parametrize("module", ["run", "latency", "restore"])
def test_the_scripts_take_these_options(module):
    text = (bench.CHECKOUT / "bench" / f"{module}.py").read_text(encoding="utf-8")
    options = {"run": ("events", "rounds", "only"), "latency": ("rate", "only"), "restore": ("ids", "rounds")}[module]
    assert all(f"    {option}: Annotated[" in text for option in (*options, "bootstrap"))


def test_without_a_checkout_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    result = CliRunner().invoke(create_app(), ["bench"])
    assert getattr(result.exception, "exit_code", None) == 2
    assert "Clone the repository" in str(result.exception)
