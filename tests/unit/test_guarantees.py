"""docs/guarantees.md: its tables are what docs/guarantees.py makes of the tests and of the runs that are kept."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guarantees", ROOT / "docs" / "guarantees.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_makes(script: ModuleType) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.filled(text, script.kept()) == text, "run python docs/guarantees.py"


def test_every_test_named_beside_a_row_exists(script: ModuleType) -> None:
    known = set(script.all_tests())
    files = {test.partition("::")[0] for test in known}
    named = {test for tests in script.tests_by_row().values() for test in tests}
    assert {test for test in named if test not in (known if "::" in test else files)} == set()


def test_every_test_that_bears_a_row_s_name_is_of_a_row(script: ModuleType) -> None:
    rows = {row for row, _, _ in script.GRID}
    numbers = {
        match[1].upper() for test in script.all_tests() if (match := script.WITH_NUMBER.match(test.partition("::")[2]))
    }
    assert numbers <= rows


def test_results_of_a_run_are_taken_over(script: ModuleType, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    cases = '<testcase classname="tests.unit.test_x" name="test_a[1]"/><testcase classname="tests.unit.test_x" name="test_a[2]"><failure/></testcase>'
    junit.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", encoding="utf-8")
    results: dict[str, dict[str, object]] = {}
    script.take(junit, results)
    (result,) = results.values()
    assert (result["passed"], result["failure"]) == (1, 1)
    assert "**1 failed**" in script.outcome(["tests/unit/test_x.py::test_a"], results)
    assert "**1 failed**" in script.outcome(["tests/unit/test_x.py"], results)


def test_runs_add_up(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        run = {"proof_run": "chaos", "kills": 50, "records": 10, "wrong": 0, "seconds": 1_800, "commit": "abc"}
        (tmp_path / f"{number}.json").write_text(json.dumps(run), encoding="utf-8")
    monkeypatch.setattr(script, "RUNS", tmp_path)
    text = script.figures()
    assert "| chaos | 2 | 100 kills, 20 records | 0 | 1.0 | `abc` |" in text
    assert "fewer than 3 in 100" in text


def test_a_row_without_tests_says_so(script: ModuleType) -> None:
    assert script.outcome([], {}) == "**not tested yet**"
    assert script.outcome(["tests/unit/test_x.py::test_a"], {}) == "no result kept"
