"""`dedup chaos` as a user runs it, for less than a minute: kills, a freeze, a stop, a guest, a cut, a world that changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]

RETENTION = "source retention shortened"
PARTITIONS = 5
OF_AN_AGE = 50 * PARTITIONS
"""Records of one age of the past, over four partitions."""
ROOT = Path(__file__).parents[2]
VIOLATED = 4
COMMAND = (sys.executable, "-c", "from dedup.cli.main import main; main()", "chaos", "topologies/simplest.yaml")


def chaos(report: Path, *options: str, environ: dict[str, str] | None = None) -> tuple[int, str, dict[str, Any]]:
    """Return exit code, output and the JSON report of a run."""
    command = [*COMMAND, "--report", str(report), "--per-s", "400", "--workers", "2", *options]
    exported = {"DEDUP_BROKERS": "127.0.0.1:1", **(environ or {})}  # of a shell that is set up for other brokers
    done = subprocess.run(command, cwd=ROOT, env=os.environ | exported, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    beside = report.with_suffix(".json")
    assert beside.exists(), text
    return done.returncode, text, json.loads(beside.read_text(encoding="utf-8"))


def test_a_short_run_holds_every_oracle(tmp_path: Path) -> None:
    options = ("--minutes", "0.35", "--harder", "4", "--seed", "2", "--partitions", str(PARTITIONS))
    code, text, found = chaos(tmp_path / "chaos.html", *options)
    assert code == 0, text
    assert len(found["verified"]["books"]) == PARTITIONS
    assert found["passed"]
    assert [(each["name"], each["held"]) for each in found["oracles"]] == [(f"O{n}", True) for n in range(1, 10)], text
    assert found["blows"]["SIGKILL"] > 5
    assert len(found["blows"]) >= 4, found["blows"]
    # Whether there is a member to refuse for, and something judged to delete, is a matter of how quick the fleet is.
    assert {RETENTION, "group deletion attempted"} <= {blow["kind"] for blow in found["struck"]}
    assert {"broker SIGTERM", "output topic config changed"} <= set(found["blows"]), found["struck"]
    assert "\nlost 0  duplicated 0" in text
    # What was deleted can be proved no more, nor what it left at the log's beginning; all else is.
    ages = sum(blow["kind"] == RETENTION for blow in found["struck"])
    assert sum(found["verified"]["not_provable"].values()) <= OF_AN_AGE * (ages + 1)
    assert found["verified"]["read"] > 10 * OF_AN_AGE
    assert "<svg" in (tmp_path / "chaos.html").read_text(encoding="utf-8")


def test_a_run_in_which_workers_die_by_themselves_fails_and_says_so(tmp_path: Path) -> None:
    """Each worker is ended in its second commit: nothing had hit it, so O8 is broken, and the report names it."""
    environ = {"DEDUP_CRASH_AT": "before_end:2"}
    code, text, found = chaos(tmp_path / "chaos.html", "--minutes", "0.2", "--harder", "0.1", "--json", environ=environ)
    assert text.startswith((tmp_path / "chaos.json").read_text(encoding="utf-8")), "the report is all of stdout"
    assert code == VIOLATED, text
    assert not found["passed"]
    broken = {each["name"]: each["figure"] for each in found["oracles"] if not each["held"]}
    assert "O8" in broken, text
    assert "ended by itself with exit code 137" in broken["O8"]
    assert not {"O1", "O2", "O3", "O4"} & set(broken), "even so nothing is lost or doubled"
    assert "BROKEN: " in (tmp_path / "chaos.html").read_text(encoding="utf-8")
