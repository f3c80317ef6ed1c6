"""A child process that ends when this process ends for any reason (see watchdog.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Final

from dedup.embedded import watchdog
from dedup.errors import InvariantBroken

_STOPS_WITHIN_S: Final = 20.0


class ChildProcess:
    """One run of one program, in a separate session, so that Ctrl-C on the terminal does not reach it.

    All methods block.
    """

    def __init__(self, command: list[str], log_file: Path) -> None:
        with log_file.open("ab") as log:
            self._watchdog: Final = subprocess.Popen(
                [sys.executable, "-I", "-S", watchdog.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.pid: Final = self._read_pid()
        """The program's process id; 0 if it could not be started (the log file says why)."""
        self.watchdog_pid: Final = self._watchdog.pid

    @property
    def running(self) -> bool:
        """Return whether the program is still running; a paused program counts as running."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """Return the program's exit code, or 128 + the number of the signal that killed it; None while it runs."""
        return self._watchdog.poll()

    def pause(self) -> None:
        """Freeze the program (SIGSTOP). Raises InvariantBroken if it does not run."""
        self._order(b"s")

    def resume(self) -> None:
        """Let a frozen program continue (SIGCONT). Raises InvariantBroken if it does not run."""
        self._order(b"c")

    def kill(self) -> int:
        """End the program with SIGKILL, if it still runs; return its exit code."""
        return self._end(b"k")

    def stop(self, within_s: float = _STOPS_WITHIN_S) -> int:
        """End the program with SIGTERM, if it still runs, and with SIGKILL after `within_s`; return its exit code."""
        return self._end(b"ct", within_s)

    def _read_pid(self) -> int:
        if self._watchdog.stdout is None:
            raise InvariantBroken("a pipe was requested and none was created")
        with self._watchdog.stdout as reports:
            return int(reports.readline() or 0)

    def _order(self, order: bytes) -> None:
        if not self.running or self._watchdog.stdin is None:
            raise InvariantBroken("this program does not run")
        self._watchdog.stdin.write(order)
        self._watchdog.stdin.flush()

    def _end(self, order: bytes, within_s: float = _STOPS_WITHIN_S) -> int:
        # The program may exit at any moment; then nobody reads the order.
        with contextlib.suppress(InvariantBroken, BrokenPipeError):
            self._order(order)
        try:
            code = self._watchdog.wait(within_s)
        except subprocess.TimeoutExpired:
            self._order(b"k")
            code = self._watchdog.wait()
        if self._watchdog.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._watchdog.stdin.close()
        return code
