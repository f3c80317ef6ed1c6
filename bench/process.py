"""A measured program as a process: started, watched, stopped, with what it used.

It runs on the embedded Kafka's leash: it can not outlive this process, however this process ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from dedup.embedded import watchdog as leash

_STOPS_WITHIN_S: Final = 30.0
_LAST_LINES: Final = 20
_KIB: Final = 1024
_TERMINATE: Final = b"t"
_KILL: Final = b"k"


class CandidateFailed(RuntimeError):
    """A measured program ended wrongly or did not finish; the text holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Used:
    """What a process and the children it waited for used, start-up included."""

    cpu_s: float
    peak_memory_bytes: int
    """The greatest that was seen while it was looked at; 0 where the system has no /proc."""
    exit_code: int


def cpu_s_of(*processes: psutil.Process) -> float:
    """Return the CPU time that these processes have used since they started, in user and system mode."""
    return float(sum(used.user + used.system for used in (each.cpu_times() for each in processes)))


def listener_on(address: str) -> psutil.Process:
    """Return the process of this machine that listens on ``host:port``. Raises LookupError if there is none."""
    port = int(address.rpartition(":")[2])
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
            return psutil.Process(found.pid)
    raise LookupError(f"no process of this machine listens on {address}")


class MeasuredProcess:
    """Runs for the length of a `with` block; killed at its end if it still runs. Raises OSError if it can not start."""

    def __init__(self, arguments: tuple[str, ...], environ: Mapping[str, str], log: Path) -> None:
        self._log: Final = log
        with log.open("wb") as file:
            self._process: Final = subprocess.Popen(
                (sys.executable, "-I", "-S", leash.__file__, *arguments),
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._peak_bytes = 0

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The process is gone."""
        if self._process.returncode is None:
            self._order(_KILL)
            self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def cpu_s(self) -> float:
        """Return the CPU time that the running program and its children have used."""
        return cpu_s_of(*psutil.Process(self._process.pid).children(recursive=True))

    @property
    def ended(self) -> bool:
        """Return whether it has ended. It is not reaped yet: `wait` still tells what it used."""
        if self._process.returncode is not None:
            return True
        self._peak_bytes = max(self._peak_bytes, _peak_below(self._process.pid))
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def stop(self) -> Used:
        """The process ended after a SIGTERM, a SIGKILL when that took too long; returns what it used."""
        if not self.ended:
            self._order(_TERMINATE)
        return self.wait(_STOPS_WITHIN_S)

    def wait(self, within_s: float) -> Used:
        """The process ended by itself, or was killed after `within_s`; returns what it used."""
        killer = threading.Timer(within_s, self._order, (_KILL,))
        killer.start()
        try:
            _pid, status, usage = os.wait4(self._process.pid, 0)
        finally:
            killer.cancel()
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        return Used(usage.ru_utime + usage.ru_stime, self._peak_bytes, code)

    def _order(self, order: bytes) -> None:
        assert self._process.stdin is not None
        # It may have ended in the same moment.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(order)
            self._process.stdin.flush()

    def failed(self, what: str) -> CandidateFailed:
        """Return the error to raise, with the end of the log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        return CandidateFailed("\n".join([what, *(f"  | {line}" for line in lines)]))


def _peak_below(pid: int) -> int:
    """Return the sum of the greatest memory that each descendant ever had.

    Not ru_maxrss: a new process begins with that of the one it was forked from, and the bench keeps whole topics.
    """
    total = 0
    for child in _children(pid):
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{child}/status").read_text(encoding="ascii")
            total += int(status.split("VmHWM:")[1].split()[0]) * _KIB
        total += _peak_below(child)
    return total


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []
