"""The limits of design page 0: functions fit on a screen, modules have a subject."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_FUNCTION_LINES = 60
MOST_MODULE_LINES = 700
NO_SUBJECT = {"utils", "util", "common", "helpers", "helper", "types", "constants", "misc"}


def sources(*directories: str) -> list[Path]:
    found = [path for directory in directories for path in (ROOT / directory).rglob("*.py")]
    return sorted(path for path in found if "bench/build/" not in path.as_posix())


MODULES = sources("dedup", "tests", "bench")


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_no_module_is_longer_than_700_lines(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_MODULE_LINES


@pytest.mark.parametrize("path", MODULES, ids=named)
def test_no_function_is_longer_than_60_lines(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {node.name: lines for node in functions if (lines := lines_of(node)) > MOST_FUNCTION_LINES}
    assert not long


@pytest.mark.parametrize("path", sources("dedup"), ids=named)
def test_every_module_is_named_by_its_subject(path):
    assert not NO_SUBJECT & {path.stem, *path.relative_to(ROOT).parent.parts}


def test_no_file_holds_marks_of_an_unfinished_merge():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.decode()
    files = [ROOT / name for name in listed.split("\0") if name] or [
        *MODULES,
        *ROOT.glob("*.md"),
        *ROOT.rglob("docs/*.md"),
    ]
    marks = (b"<" * 7 + b" ", b">" * 7 + b" ")
    assert not [
        path
        for path in files
        if path.is_file() and any(line.startswith(marks) for line in path.read_bytes().splitlines())
    ]


def test_the_packages_are_found():
    assert len(sources("dedup")) > 20


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    # Without decorators: a table of cases above a test is read as a table.
    return (function.end_lineno or function.lineno) - function.lineno + 1
