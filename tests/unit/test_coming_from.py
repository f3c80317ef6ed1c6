"""docs/coming-from.md: every case of another program's tests, run with the topology file that the page shows for it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from dedup import TopologyTestDriver
from dedup.quantities import parse_duration
from dedup.topology.parse import parse

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(yaml|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"(\d+m?s) +(.+?) +(passes|dropped|either) +(\w+)(\*?)")
NOW = "2024-06-01T00:00:00Z"
BEGINS_MS = 1_700_000_000_000
LEAST_CASES = 25


@dataclass(frozen=True)
class Line:
    """One record of a case."""

    at_ms: int
    record: str
    other: str
    verdict: str
    differs: bool


@dataclass(frozen=True)
class Case:
    """A case, and the topology file that translates the other program's settings."""

    name: str
    topology: str
    lines: tuple[Line, ...]


def cases() -> list[Case]:
    found: list[Case] = []
    for section in PAGE.split("\n## ")[1:]:
        blocks = dict(FENCE.findall(section))
        if not blocks:
            continue
        for text in blocks["text"].strip().split("\n\n"):
            name, *lines = text.splitlines()
            read = [LINE.fullmatch(line) for line in lines]
            assert all(read), (section.splitlines()[0], text)
            parts = [each.groups() for each in read if each is not None]
            made = [Line(parse_duration(at), record, *more, differs == "*") for at, record, *more, differs in parts]
            found.append(Case(f"{section.splitlines()[0]}: {name}", blocks["yaml"], tuple(made)))
    return found


def feed(driver: TopologyTestDriver, record: str, time_ms: int) -> None:
    header = re.fullmatch(r"([\w.-]+):(\S+)", record)
    if record.startswith("key="):
        driver.feed("v", key=record.removeprefix("key=") or None, timestamp=time_ms)
    elif header:
        driver.feed("v", headers={header[1]: header[2]}, timestamp=time_ms)
    else:
        driver.feed(record, timestamp=time_ms)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_case_is_judged_as_the_page_says(case: Case) -> None:
    with TopologyTestDriver(parse(case.topology, name="page.yaml"), now=NOW) as driver:
        before: Counter[str] = Counter()
        for line in case.lines:
            feed(driver, line.record, BEGINS_MS + line.at_ms)
            verdicts = Counter(driver.verdicts)
            assert list(verdicts - before) == [line.verdict], line
            before = verdicts
            passes = bool(driver.read_output())
            if line.other == "either":
                continue
            # A star that is no longer true is wrong, too.
            assert (passes != (line.other == "passes")) == line.differs, line


def test_every_program_of_the_page_has_a_case() -> None:
    assert len(cases()) >= LEAST_CASES
    with_cases = {case.name.partition(":")[0] for case in cases()}
    assert {section.splitlines()[0] for section in PAGE.split("\n## ")[1:-1]} == with_cases
