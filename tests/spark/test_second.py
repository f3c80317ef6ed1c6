"""What fails in the second pytest fails in the first; so does what is never told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.spark.second import MODULES, Second

HERE = Path(__file__).parent
TELLS = f"""
import sys
import pytest
sys.path.insert(0, {str(HERE.parents[1])!r})
from tests.spark.second import report_elsewhere

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    report = yield
    report_elsewhere(item.config, report)
    return report
"""


@pytest.fixture
def second(pytestconfig, tmp_path):
    """Return a function that starts a second pytest of one test and returns what is waited for."""
    begun = []

    def start(body, conftest=""):
        (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
        file = tmp_path / "test_planted.py"
        file.write_text(f"def test_a():\n    {body}\n", encoding="utf-8")
        # A file outside of the root directory has no name in its tests' ids.
        item = SimpleNamespace(path=file, nodeid="::test_a")
        begun.append(Second(pytestconfig, [item]))
        return begun[-1].reports_of(item)

    yield start
    for each in begun:
        each.stop()


def test_a_failure_is_passed_on_with_its_words(second):
    reports = second("assert 1 == 2, 'planted'", TELLS)
    assert [(report.when, report.outcome) for report in reports] == [
        ("setup", "passed"),
        ("call", "failed"),
        ("teardown", "passed"),
    ]
    assert "planted" in reports[1].longreprtext


def test_a_skip_is_passed_on_as_the_summary_reads_it(second):
    _, report, _ = second("import pytest; pytest.skip('not here')", TELLS)
    assert report.skipped
    assert report.longrepr[2] == "Skipped: not here"
    assert isinstance(report.longrepr, tuple)


@pytest.mark.parametrize(("body", "conftest"), [("import os; os._exit(3)", TELLS), ("pass", "")])
def test_a_test_that_is_never_told_of_is_a_failure(second, body, conftest):
    with pytest.raises(AssertionError, match=r"ended without .*::test_a"):
        second(body, conftest)


def test_the_modules_are_there():
    assert {path.name for path in HERE.glob("test_*.py")} > MODULES
