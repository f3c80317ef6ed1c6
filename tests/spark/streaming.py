"""Streams as real drivers on a real broker: how tests start them, and what they are held against."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.integration.fleet import Job, Worker

DRIVER = Path(__file__).with_name("driver.py")
SMALL_BATCHES = ("--conf", "spark.sql.execution.arrow.maxRecordsPerBatch=200")
QUIET = ("--conf", "spark.ui.enabled=false", "--conf", "spark.ui.showConsoleProgress=false")


def start_driver(job: Job, *accidents: str, arguments: Sequence[str] = (), name: str = "driver") -> Worker:
    """Start `dedup spark run` for a job in a process of its own; its checkpoint is the job's."""
    tokens = job.directory / "accidents"
    tokens.mkdir(exist_ok=True)
    unset = [part for variable in os.environ if variable.startswith("DEDUP_") for part in ("-u", variable)]
    command = ["env", *unset, f"DRIVER_TOKENS={tokens}", sys.executable, str(DRIVER), *accidents, "--", "run"]
    command += [str(job.topology_file), "--config", str(job.config_file), "--quiet", *QUIET]
    command += ["--checkpoint", str(job.directory / "checkpoint"), *arguments]
    driver = Worker(job, name, command, job.directory / f"{name}.log")
    job.workers.append(driver)
    return driver


def accidents_of(job: Job) -> int:
    """Return how many planned accidents have happened."""
    return len(list((job.directory / "accidents").iterdir()))
