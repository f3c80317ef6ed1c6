"""A second pytest for some modules of this directory: the machine has two cores, and one pytest keeps one of them busy.

It has a broker and a Spark session of its own, so it shares nothing with the first one but the machine. It writes each
of its reports as a line of JSON, and the first one passes them on, in the order of its own tests, as if they were its.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dedup.local.leashed import Leashed
from tests.integration.fleet import until

REPORTS_TO = "DEDUP_TEST_REPORTS_TO"
"""The environment variable that names the file for the reports, and says: this is the second one."""
MODULES = {
    "test_cluster.py",
    "test_parity_worker.py",
    "test_seed.py",
    "test_stream.py",
    "test_stream_kills.py",
}
"""Half of the time that the directory takes."""
LONGEST_S = 3_600
"""Of one test; each has its own time limit in the process that runs it."""


def report_elsewhere(config: pytest.Config, report: pytest.TestReport) -> None:
    """In the second process the first one reads the report; in any other, nothing happens."""
    file = os.environ.get(REPORTS_TO)
    if file is not None:
        line = json.dumps(config.hook.pytest_report_to_serializable(config=config, report=report))
        with Path(file).open("a", encoding="utf-8") as reports:
            reports.write(f"{line}\n")


def for_the_second(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return which of the directory's tests a second process shall run: none where there is nothing beside them."""
    theirs = [item for item in items if item.path.name in MODULES]
    return theirs if REPORTS_TO not in os.environ and len(theirs) < len(items) else []


class Second:
    """The second process, from the first test of the directory on."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._config = config
        self._directory = tempfile.TemporaryDirectory(prefix="dedup-second-pytest-")
        self._reports, self._log = (Path(self._directory.name) / name for name in ("reports.jsonl", "log"))
        self._read_bytes = 0
        self._came: defaultdict[str, list[Any]] = defaultdict(list)
        self._reports.touch()
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(config.rootpath), "-m", config.option.markexpr]
        tests = [f"{item.path}::{item.nodeid.partition('::')[2]}" for item in items]
        command = ["env", f"{REPORTS_TO}={self._reports}", sys.executable, "-m", "pytest", *options, *tests]
        self._process = Leashed(command, self._log)

    def reports_of(self, item: pytest.Item) -> list[Any]:
        """Return the reports of a test once it is over there; a failure where that process ended without it."""
        until(lambda: self._over(item.nodeid), lambda: f"{item.nodeid}:\n{self._said()}", within_s=LONGEST_S)
        return self._came[item.nodeid]

    def stop(self) -> None:
        """The process is gone, and what it wrote."""
        self._process.stop()
        self._directory.cleanup()

    def _over(self, nodeid: str) -> bool:
        running = self._process.running
        self._read()
        over = any(report.when == "teardown" for report in self._came[nodeid])
        assert over or running, f"the second pytest ended without {nodeid}:\n{self._said()}"
        return over

    def _read(self) -> None:
        with self._reports.open("rb") as reports:
            reports.seek(self._read_bytes)
            for line in reports:
                if not line.endswith(b"\n"):
                    return
                self._read_bytes += len(line)
                report = self._config.hook.pytest_report_from_serializable(config=self._config, data=json.loads(line))
                if isinstance(report.longrepr, list):
                    # Of a skip: JSON knows no tuples, and pytest's summary asks for one.
                    report.longrepr = tuple(report.longrepr)
                self._came[report.nodeid].append(report)

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-20_000:]


def tell(item: pytest.Item, second: Second) -> None:
    """What the second process says of a test is said of it here."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        reports = second.reports_of(item)
    except AssertionError as error:
        reports = [pytest.TestReport(item.nodeid, item.location, {}, "failed", str(error), "call")]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
