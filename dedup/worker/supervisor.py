"""Supervises a fleet on one machine: starts several workers, restarts those that die, and stops them on a signal."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dedup.errors import DedupError
from dedup.settings import Settings

log: Final = logging.getLogger(__name__)
LOOK_S: Final = 0.1
FIRST_BACK_OFF_S: Final = 0.5
_LONGEST_BACK_OFF_S: Final = 30.0
_CALM_S: Final = 60.0
"""If a worker dies after running for at least this time, in seconds, it is restarted with the shortest back-off."""
FINAL: Final = frozenset({2, 3})
"""The exit codes after which a restart would not help (a usage error or incompatible state)."""
NO_BROKER: Final = 5
"""The exit code if no broker is reachable. This code ends the fleet unless the worker once ran for longer than
`_CALM_S`.
"""


@dataclass(slots=True)
class Child:
    """A worker process, with its start time and planned restart time."""

    number: int
    """The number at the end of the worker's ID; numbers start at 1."""
    process: subprocess.Popen[bytes]
    started_s: float
    back_off_s: float = FIRST_BACK_OFF_S
    start_at_s: float | None = None
    finished: bool = False
    was_calm: bool = False


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The topology, settings, and number of workers of a fleet."""

    topology: Path
    config: Path | None
    overrides: tuple[str, ...]
    settings: Settings
    """The settings, including a `worker_id`, which must be different on each machine."""
    workers: int
    exit_when_done: bool = False
    onto_existing_output: bool = False

    def command(self, number: int) -> list[str]:
        """Return the command line of one worker, which has its own worker ID, state directory, and web port."""
        # Without -P, a file such as rich.py in the working directory would hide a module that dedup imports.
        line = [sys.executable, "-P", "-m", "dedup.cli.main", "run", str(self.topology), "--quiet"]
        if self.config is not None:
            line += ["--config", str(self.config)]
        own_id = f"{self.settings.worker_id}-{number}"
        own = (f"worker_id={own_id}", f"state_dir={self.settings.state_dir / own_id}")
        for override in (*self.overrides, *own, *self._pages(number)):
            line += ["--set", override]
        flags = {"--exit-when-done": self.exit_when_done, "--onto-existing-output": self.onto_existing_output}
        return [*line, *(option for option, given in flags.items() if given)]

    def _pages(self, number: int) -> list[str]:
        """Return the settings of a worker's web pages. Each worker's port is one higher than the previous worker's."""
        web = self.settings.web
        if web.port == 0:
            return []
        pages = [f"web.port={web.port + number - 1}"]
        if web.advertise is not None:
            address = urlsplit(web.advertise)
            if address.port is not None:
                host = address.netloc.rpartition(":")[0]
                moved = address._replace(netloc=f"{host}:{address.port + number - 1}")
                pages.append(f"web.advertise={moved.geturl()}")
        return pages


def supervise(plan: FleetPlan) -> int:
    """Run the workers of a plan until a signal arrives or all workers are done, and return the exit code.

    Raises DedupError if the machine cannot start all workers; the workers that are already running are stopped first.
    """
    stopping = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    lines = {number: plan.command(number) for number in range(1, plan.workers + 1)}
    children: list[Child] = []
    code = 0
    try:
        for number, line in lines.items():
            if not stopping:
                children.append(_first_start(number, line, plan.workers))
        while not stopping and not code and not all(child.finished for child in children):
            for child in children:
                code = max(code, _look_after(child, lines[child.number], time.monotonic()))
            time.sleep(LOOK_S)
    finally:
        drained = _drain(children)
        for number, handler in before.items():
            signal.signal(number, handler)
    return code or drained


def _first_start(number: int, line: list[str], workers: int) -> Child:
    try:
        return Child(number, subprocess.Popen(line), time.monotonic())  # the command line is dedup's own
    except OSError as error:
        raise DedupError(
            f"worker {number} of {workers} cannot be started: {error.strerror}. The others were stopped; nothing is "
            "lost. Start fewer workers, or give this machine or container more memory and processes."
        ) from error


def _look_after(child: Child, line: list[str], now_s: float) -> int:
    """Restart a dead worker after its back-off, and return an exit code that ends the fleet, or 0 to continue."""
    if child.finished:
        return 0
    if child.start_at_s is not None:
        if now_s >= child.start_at_s:
            _start_again(child, line, now_s)
        return 0
    code = child.process.poll()
    if code is None:
        return 0
    if code == 0:
        child.finished = True
        return 0
    if now_s - child.started_s > _CALM_S:
        child.was_calm, child.back_off_s = True, FIRST_BACK_OFF_S
    if code in FINAL or (code == NO_BROKER and not child.was_calm):
        return code
    log.warning("worker %d exited with code %d; it restarts in %.1f s", child.number, code, child.back_off_s)
    _plan_start(child, now_s)
    return 0


def _start_again(child: Child, line: list[str], now_s: float) -> None:
    """Start a worker again, or plan the next attempt if the machine cannot start a process now."""
    try:
        child.process = subprocess.Popen(line)  # the command line is dedup's own
    except OSError as error:
        text = "worker %d cannot be started: %s. The next attempt is in %.1f s"
        log.warning(text, child.number, error.strerror, child.back_off_s)
        _plan_start(child, now_s)
    else:
        child.started_s, child.start_at_s = now_s, None


def _plan_start(child: Child, now_s: float) -> None:
    child.start_at_s = now_s + child.back_off_s
    child.back_off_s = min(2 * child.back_off_s, _LONGEST_BACK_OFF_S)


def _drain(children: Sequence[Child]) -> int:
    """Stop all workers that are still running, and return the highest of their exit codes, or 0.

    If a signal kills a worker that is already stopping, the worker's exit code is 128 plus the signal's number, as in a
    shell. A worker that SIGTERM kills is ignored, because it had either not begun to judge or already finished.
    """
    living = [child.process for child in children if child.process.poll() is None]
    for process in living:
        process.send_signal(signal.SIGTERM)
    codes = [process.wait() for process in living]
    shown = {128 - code if code < 0 else code for code in codes} - {128 + signal.SIGTERM}
    return max(shown, default=0)
