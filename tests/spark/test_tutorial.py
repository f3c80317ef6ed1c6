"""Every command of docs/tutorial-history.md is run as it stands there, with fewer flights."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.spark.session import HadoopDirectory
from tests.brokers import RunningKafka

pytestmark = pytest.mark.broker
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial-history.md"
FLIGHTS, LIVE, AGAIN = 1_500, 600, 200
SMALLER = {"336776": str(FLIGHTS), "20000": str(LIVE), "5000": str(AGAIN)}
ELSEWHERE = "dedup broker"
"""Runs in another terminal; the test run's own broker stands for it."""


def command_lines() -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kafka: RunningKafka, spark: SparkSession) -> Iterator[Path]:
    """Yield a directory in which the tutorial's commands find what they name, and the run's broker."""
    monkeypatch.chdir(tmp_path)
    # The session's Java was started in another directory.
    disk = HadoopDirectory(spark, str(tmp_path)).files
    before = disk.getWorkingDirectory()
    disk.setWorkingDirectory(HadoopDirectory(spark, str(tmp_path)).path)
    (tmp_path / "config").mkdir()
    state = tmp_path / "state"
    text = f"brokers: ['{kafka.bootstrap}']\nstate_dir: {state}\nweb: {{enabled: false}}\n"
    (tmp_path / "config" / "local.yaml").write_text(text, encoding="utf-8")
    for name in ("topologies", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    yield tmp_path
    disk.setWorkingDirectory(before)


def run(line: str, kafka: RunningKafka) -> str:
    """Return what a command printed; it must end well."""
    program, *arguments = [SMALLER.get(word, word) for word in shlex.split(line)]
    if program == "dedup" and arguments[0] == "spark":
        # In this process: it has a session already.
        result = CliRunner().invoke(create_app(), [*arguments, "--quiet"])
        assert result.exit_code == 0, (line, result.output, result.exception)
        return result.output
    command = [sys.executable, "-m", "dedup.cli.main"] if program == "dedup" else [sys.executable]
    if arguments[0] == "docs/history.py" and arguments[1] != "files":
        arguments += ["--brokers", kafka.bootstrap]
        arguments += ["--history", str(FLIGHTS)] if arguments[1] == "live" else []
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.timeout(600)
def test_every_command_of_the_tutorial_runs_and_the_audit_says_0(
    spark: SparkSession, kafka: RunningKafka, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkSession, "stop", lambda _self: None)
    lines = command_lines()
    assert lines.count(ELSEWHERE) == 1
    said = {line: run(line, kafka) for line in lines if line != ELSEWHERE}
    judged = {line.split()[2]: output for line, output in said.items() if line.startswith("dedup spark")}
    assert set(judged) == {"backfill", "seed", "audit", "upsert"}
    assert judged["audit"].strip().endswith("lost 0  duplicated 0")
    verdicts = spark.read.parquet(str(here / "verdicts" / "run=backfill"))
    counts = {row["verdict"]: row["count"] for row in verdicts.groupBy("verdict").count().collect()}
    assert counts["unique"] == 2 * FLIGHTS
    assert 0.02 < counts["duplicate"] / (2 * FLIGHTS) < 0.04
    # The table has what was forwarded live: the next year's flights, and nothing that the history had.
    assert spark.read.format("delta").load(str(here / "flights-table")).count() == LIVE
