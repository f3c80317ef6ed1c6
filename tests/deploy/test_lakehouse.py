"""docs/tutorial-lakehouse.md is followed in an empty directory: its files saved, its commands pasted, its output compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers import RunningKafka, read_all

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install dedup-streams[spark]")

pytestmark = [pytest.mark.broker, pytest.mark.timeout(1_200)]
PAGE = Path(__file__).parents[2] / "docs" / "tutorial-lakehouse.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
INSTALLS = "python3 -m venv"
BROKER = "another terminal"
"""Its command runs a broker; the test run's own stands for it."""


def follow(directory: Path, kafka: RunningKafka) -> list[tuple[str, str, str | None]]:
    """Do what the page says; return of each command its text, what it printed, and what the page shows."""
    unset = {name for name in os.environ if name.startswith("DEDUP_")}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    # Of the page only the broker's address is changed, as a user with another one would.
    environ |= {"DEDUP_BROKERS": kafka.bootstrap, "DEDUP_WEB__PORT": "0"}
    done: list[tuple[str, str, str | None]] = []
    for kind, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "text":
            done[-1] = (*done[-1][:2], text)
        elif kind == "sh" and not text.startswith(INSTALLS) and title != BROKER:
            for line in text.splitlines():
                ended = subprocess.run(
                    ["bash", "-c", line], cwd=directory, env=environ, capture_output=True, text=True, check=False
                )
                assert ended.returncode == 0, (line, ended.stdout, ended.stderr)
                done.append((line, ended.stdout, None))
        elif title:
            (directory / title).write_text(text.replace("localhost:9092", kafka.bootstrap), encoding="utf-8")
    return done


def without_seconds(text: str) -> str:
    return re.sub(r" in [\d.]+ s", "", text)


def test_the_page_as_written(tmp_path, kafka):
    done = follow(tmp_path, kafka)
    shown = [(line, printed, wanted) for line, printed, wanted in done if wanted is not None]
    assert len(shown) == 2
    for line, printed, wanted in shown:
        assert all(each in without_seconds(printed).splitlines() for each in wanted.splitlines()), (line, printed)
    runs = [printed for line, printed, _ in done if "spark incremental" in line]
    assert len(runs) == 5
    # April, June, and May after June: nothing is late; February once more: nothing is unique.
    assert all("late" not in printed for printed in runs[:4])
    assert "unique" not in runs[4]
    output = read_all(kafka.bootstrap, "flights.unique")
    assert len({message.key() for message in output}) == len(output) == 29_425
    assert any("version 0: 29,425 rows" in printed or "29,425" in printed for line, printed, _ in done[-1:])
