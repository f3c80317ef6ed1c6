"""What tests wait for: conditions, and processes with a log.

Nothing waits for a time: a condition is looked at again and again, and only its absence has a deadline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from dedup.embedded.child_process import ChildProcess

LOOK_S = 0.03
_LAZY_LOOK_S = 0.2
WITHIN_S = float(os.environ.get("DEDUP_TEST_WITHIN_S", "90"))
"""How long a condition may take to come: longer on a machine that is busy with other things."""


def until(condition: Callable[[], object], what: str | Callable[[], str], *, within_s: float = WITHIN_S) -> None:
    """The condition holds. Raises AssertionError with ``what`` if it does not come to."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        if waited_s > within_s:
            raise AssertionError(f"not within {within_s:.0f} s: {what if isinstance(what, str) else what()}")
        # A look often asks a broker, which takes CPU time from what is waited for: the longer the wait, the fewer looks.
        time.sleep(min(_LAZY_LOOK_S, max(LOOK_S, waited_s / 20)))


class LoggedProcess(ChildProcess):
    """One run of one command, that can not outlive the test run; the next run of its name appends to the log."""

    def __init__(self, command: list[str], log_file: Path) -> None:
        self.log_file = log_file
        self._begins = log_file.stat().st_size if log_file.exists() else 0
        super().__init__(command, log_file)

    @property
    def log(self) -> str:
        """What this process wrote so far."""
        return self.log_file.read_bytes()[self._begins :].decode(errors="replace")

    def wait(self, within_s: float = WITHIN_S) -> int:
        """Return the exit code once it has ended by itself; 137 is SIGKILL."""
        name = self.log_file.stem
        until(lambda: not self.running, lambda: f"{name} ends; its log:\n{self.log}", within_s=within_s)
        code = self.exit_code
        assert code is not None
        return code

    def stop(self, within_s: float = WITHIN_S) -> int:
        """SIGTERM; return the exit code of the drained process."""
        return super().stop(within_s)

    def until_logged(self, text: str, *, times: int = 1) -> None:
        """The text is in the log that often; raises AssertionError if the process ends before."""
        name = self.log_file.stem

        def there() -> bool:
            ended = not self.running
            found = self.log.count(text) >= times
            assert found or not ended, f"{name} ended before {text!r}:\n{self.log}"
            return found

        until(there, lambda: f"{text!r} in the log of {name}:\n{self.log}")
