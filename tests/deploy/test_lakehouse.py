"""docs/tutorial-lakehouse.md is followed in an empty directory: its files saved, its commands pasted, its output compared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests import brokers
from tests.brokers import RunningKafka, read_all

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install dedup-streams[spark]")
pq = pytest.importorskip("pyarrow.parquet")

from tests.spark.streaming import FAST_JAVA  # noqa: E402  # needs PySpark

pytestmark = [pytest.mark.broker, pytest.mark.timeout(1_200)]
PAGE = Path(__file__).parents[2] / "docs" / "tutorial-lakehouse.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
JULY = 29_425
INSTALLS = "python3 -m venv"
BROKER = "another terminal"
"""Its command runs a broker; the test run's own stands for it."""


@pytest.fixture
def kafka() -> Iterator[RunningKafka]:
    """A broker of the page's own, as its reader has: another page's topic is named `flights`, too."""
    with brokers.embedded() as running:
        yield running


@dataclass(frozen=True)
class Done:
    """A command, what it printed, and what the page shows."""

    line: str
    out: str
    aside: str
    shown: str | None = None


def follow(directory: Path, kafka: RunningKafka) -> list[Done]:
    """Do what the page says."""
    unset = {name for name in os.environ if name.startswith("DEDUP_")}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
    environ["DEDUP_WEB__PORT"] = "0"
    environ["SPARK_SUBMIT_OPTS"] = FAST_JAVA  # each command is a JVM of its own, which lives for seconds
    done: list[Done] = []
    # Of the page only the broker's address is changed, as a user with another one would.
    page = PAGE.read_text(encoding="utf-8").replace("localhost:9092", kafka.bootstrap)
    for kind, title, text in BLOCK.findall(page):
        if kind == "text":
            done[-1] = replace(done[-1], shown=text)
        elif kind == "sh" and not text.startswith(INSTALLS) and title != BROKER:
            for line in text.splitlines():
                if line.startswith("export "):
                    name, _, value = line.removeprefix("export ").partition("=")
                    environ[name] = value
                    continue
                ended = subprocess.run(
                    ["bash", "-c", line], cwd=directory, env=environ, capture_output=True, text=True, check=False
                )
                assert ended.returncode == 0, (line, ended.stdout, ended.stderr)
                done.append(Done(line, ended.stdout, ended.stderr))
        elif title:
            (directory / title).write_text(text, encoding="utf-8")
    return done


def without_seconds(text: str) -> list[str]:
    return re.sub(r" in [\d.]+ s", "", text).splitlines()


def test_the_page_as_written(tmp_path, kafka):
    done = follow(tmp_path, kafka)
    shown = [each for each in done if each.shown is not None]
    assert len(shown) == 3
    for each in shown:
        printed = without_seconds(each.out + each.aside)
        assert all(line in printed for line in without_seconds(each.shown)), (each, printed)
    runs = [each.out for each in done if "spark incremental" in each.line]
    assert len(runs) == 5
    # April, June, and May after June: nothing is late; February once more: nothing is unique.
    assert all("late" not in printed for printed in runs[:4])
    assert "unique" not in runs[4]
    output = read_all(kafka.bootstrap, "flights.unique")
    assert len({message.key() for message in output}) == len(output) == JULY
    files = (tmp_path / "silver-live").glob("*.parquet")
    assert sum(pq.ParquetFile(file).metadata.num_rows for file in files) == JULY
