"""A program that ends when this process does, however this process ends (see leash.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Final

from dedup.errors import InvariantBroken
from dedup.local import leash

_STOPS_WITHIN_S: Final = 20.0


class Leashed:
    """One run of one program. Ctrl-C on the terminal does not reach it; all methods block."""

    def __init__(self, command: list[str], log_file: Path) -> None:
        with log_file.open("ab") as log:
            self._leash: Final = subprocess.Popen(
                [sys.executable, "-I", "-S", leash.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.pid: Final = self._read_pid()
        """The program's process id; 0 when it could not be started (the log file says why)."""

    @property
    def leash_pid(self) -> int:
        """Return the id of the process between us and the program."""
        return self._leash.pid

    @property
    def running(self) -> bool:
        """Return whether the program runs, also while paused."""
        return self._leash.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Return the program's exit code, 128 + the signal's number if one killed it; None while it runs."""
        return self._leash.poll()

    def pause(self) -> None:
        """The program is frozen (SIGSTOP). Raises InvariantBroken when it does not run."""
        self._order(b"s")

    def resume(self) -> None:
        """The program goes on (SIGCONT). Raises InvariantBroken when it does not run."""
        self._order(b"c")

    def kill(self) -> int:
        """The program is gone, by SIGKILL if it ran; returns its exit code."""
        return self._end(b"k")

    def stop(self, within_s: float = _STOPS_WITHIN_S) -> int:
        """The program is gone, by SIGTERM if it ran, or by SIGKILL after `within_s`; returns its exit code."""
        return self._end(b"ct", within_s)

    def _read_pid(self) -> int:
        if self._leash.stdout is None:
            raise InvariantBroken("a pipe was asked for and none was made")
        with self._leash.stdout as reports:
            return int(reports.readline() or 0)

    def _order(self, order: bytes) -> None:
        if not self.running or self._leash.stdin is None:
            raise InvariantBroken("this program does not run")
        self._leash.stdin.write(order)
        self._leash.stdin.flush()

    def _end(self, order: bytes, within_s: float = _STOPS_WITHIN_S) -> int:
        # It may end by itself at any moment: then there is nobody to take the order.
        with contextlib.suppress(InvariantBroken, BrokenPipeError):
            self._order(order)
        try:
            code = self._leash.wait(within_s)
        except subprocess.TimeoutExpired:
            self._order(b"k")
            code = self._leash.wait()
        if self._leash.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._leash.stdin.close()
        return code
