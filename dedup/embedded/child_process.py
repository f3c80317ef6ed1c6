"""Runs child processes that end when this process ends for any reason (see watchdog.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self, cast

from dedup.embedded import watchdog
from dedup.errors import InvariantBroken

DEDUP: Final = (sys.executable, "-P", "-c", "from dedup.cli.main import main; main()")
"""The command line of `dedup` in this installation, which imports no module from the working directory."""
_STOPS_WITHIN_S: Final = 20.0
_TAIL_LINES: Final = 15


class ChildProcess:
    """A program that runs in its own session, so that Ctrl-C on the terminal does not stop it. All methods block."""

    def __init__(
        self,
        command: Sequence[str],
        log_file: Path,
        *,
        directory: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Start the program in ``directory``, and append its output to ``log_file``.

        If ``environ`` is None, the program inherits the environment of this process.
        """
        self.log_file: Final = log_file
        self._environ: Final = environ
        self.paused = False
        with log_file.open("ab") as log:
            self._log_begins: Final = log.tell()
            self._watchdog: Final = self._start_watchdog(command, directory, log)
        self._orders: Final = cast("IO[bytes]", self._watchdog.stdin)
        with cast("IO[bytes]", self._watchdog.stdout) as reports:
            self.pid: Final = int(reports.readline() or 0)
            """The program's process ID; 0 if the program could not be started (the log file contains the reason)."""
        self.watchdog_pid: Final = self._watchdog.pid

    @property
    def running(self) -> bool:
        """True while the program runs or is paused."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """The exit code (128 + the signal's number if a signal killed the program), or None while the program runs."""
        return self._watchdog.poll()

    @property
    def log(self) -> str:
        """The output of this run so far, without the output of earlier runs in the same file."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_begins)
            return log.read().decode(errors="replace")

    @property
    def log_tail(self) -> str:
        """The last lines of this run's output, for error messages."""
        return "\n".join(self.log.splitlines()[-_TAIL_LINES:])

    def pause(self) -> None:
        """Freeze the program with SIGSTOP. Raises InvariantBroken if the program is not running."""
        self._order(b"s")
        self.paused = True

    def resume(self) -> None:
        """Resume a frozen program with SIGCONT. Raises InvariantBroken if the program is not running."""
        self._order(b"c")
        self.paused = False

    def kill(self) -> int:
        """End the program with SIGKILL if it is still running, and return the exit code."""
        return self._end(b"k")

    def stop(self, within_s: float = _STOPS_WITHIN_S) -> int:
        """End the program with SIGTERM, or with SIGKILL after ``within_s`` seconds, and return the exit code."""
        return self._end(b"ct", within_s)

    def _start_watchdog(
        self, command: Sequence[str], directory: Path | None, log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=directory,
            env=self._environ,
            start_new_session=True,
        )

    def _order(self, order: bytes) -> None:
        if not self.running:
            raise InvariantBroken("this program is not running")
        self._orders.write(order)
        self._orders.flush()

    def _end(self, order: bytes, within_s: float = _STOPS_WITHIN_S) -> int:
        # If the program has just exited, no process reads the order, so writing the order fails.
        with contextlib.suppress(InvariantBroken, BrokenPipeError):
            self._order(order)
        try:
            code = self._watchdog.wait(within_s)
        except subprocess.TimeoutExpired:
            self._order(b"k")
            code = self._watchdog.wait()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        return code


class Processes:
    """Runs named processes, each with its own log file, and kills them when the context manager exits."""

    def __init__(
        self,
        directory: Path,
        commands: Mapping[str, Sequence[str]],
        *,
        work_directory: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the processes. ``commands`` maps each name, such as "worker 1", to the command line to run.

        If ``environ`` is None, the processes inherit the environment of this process.
        """
        self._directory: Final = directory
        self._commands: Final = commands
        self._work_directory: Final = work_directory
        self._environ: Final = environ
        self.running: Final[dict[str, ChildProcess]] = {}
        """The processes that were started and not stopped or killed yet. Some of them may have exited by themselves."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()

    def start(self, *names: str) -> None:
        """Start the named processes. Each process appends its output to the log of its earlier runs."""
        for name in names:
            command, log_file = self._commands[name], self.log_file(name)
            self.running[name] = ChildProcess(command, log_file, directory=self._work_directory, environ=self._environ)

    def kill(self, name: str) -> None:
        """Kill the named process with SIGKILL."""
        self.running.pop(name).kill()

    def check(self) -> None:
        """Raise InvariantBroken, with the last lines of the process's log, if a process has exited by itself."""
        for name, process in self.running.items():
            if not process.running:
                raise InvariantBroken(self.ended(name, f"by itself with exit code {process.exit_code}"))

    def stop(self) -> None:
        """Stop all processes with SIGTERM. Raises InvariantBroken if a process does not exit with code 0."""
        self.check()
        for name, process in list(self.running.items()):
            code = process.stop()
            if code != 0:
                raise InvariantBroken(self.ended(name, f"with exit code {code} after SIGTERM"))
            del self.running[name]

    def ended(self, name: str, how: str) -> str:
        """Return a sentence about how a process ended, followed by the last lines of its log."""
        return f"{name} ended {how}. The end of {self.log_file(name)}:\n{self.running[name].log_tail}"

    def log_file(self, name: str) -> Path:
        """Return the file that contains the output of all runs of a process."""
        return self._directory / f"{name.replace(' ', '-')}.log"
