"""Workers that begin with dedup imported: a process that has imported it forks them, which saves two seconds each.

The forked process is watched, killed and frozen like any other, and ends as Python ends: nothing of a run is shared but
what an import leaves. Run as a script, this module is the process that forks; see `Preloaded`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, reload
from pathlib import Path
from typing import IO, Any

from dedup import crashpoints
from dedup.embedded import watchdog

IMPORTED = (
    "child",
    "dedup.worker.worker",
    "dedup.worker.supervisor",
    "dedup.worker.logs",
    "dedup.topology.parse",
    "dedup.web.server",
    "faust.tables.objects",
    "faust.worker",
    *(f"dedup.cli.{name}" for name in ("admin", "broker", "chaos", "check", "connectors", "doctor", "run", "spark")),
    "dedup.cli.verify",
)
"""What `dedup run` imports."""
MESSAGE_BYTES = 1 << 17
KILLED = -signal.SIGKILL


def clean_environ() -> dict[str, str]:
    """Return this process's environment without dedup's variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DEDUP_")}


class WatchdogHandle:
    """What `ChildProcess` uses of a `subprocess.Popen`, for a watchdog that this process is not the parent of."""

    def __init__(self, orders: IO[bytes], reports: IO[bytes], status: IO[bytes]) -> None:
        self.stdin, self.stdout, self._status = orders, reports, status
        self.pid = int(status.readline())
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended. Raises TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("the watchdog", timeout or 0)
        return code

    def _ended(self, within_s: float | None) -> int | None:
        if self._code is None and select.select([self._status], [], [], within_s)[0]:
            # Nothing but the end of the pipe: it was killed.
            self._code = int(self._status.readline() or KILLED)
            self._status.close()
        return self._code


@dataclass(frozen=True)
class Preloaded:
    """A process that has imported dedup, and forks a watchdog and its worker for each request."""

    requests: socket.socket

    @staticmethod
    @cache
    def of_this_process() -> Preloaded:
        """Return the one of this test process; it ends with it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line = [sys.executable, __file__, str(theirs.fileno())]
        # With threads of BLAS, a fork would be a copy of one thread of two.
        environ = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(line, pass_fds=[theirs.fileno()], env=environ, start_new_session=True)
        theirs.close()
        atexit.register(lambda: (ours.close(), process.wait()))
        return Preloaded(ours)

    def start(
        self, arguments: Sequence[str], environ: Mapping[str, str], directory: Path | None, log: IO[bytes]
    ) -> WatchdogHandle:
        """A watchdog runs `child.py` with these arguments and this environment."""
        (orders_read, orders), (reports, reports_write), (status, status_write) = os.pipe(), os.pipe(), os.pipe()
        theirs = [orders_read, reports_write, log.fileno(), status_write]
        request = {"arguments": list(arguments), "environ": dict(environ), "directory": str(directory or Path.cwd())}
        try:
            socket.send_fds(self.requests, [json.dumps(request).encode()], theirs)
        finally:
            for descriptor in (orders_read, reports_write, status_write):
                os.close(descriptor)
        return WatchdogHandle(os.fdopen(orders, "wb"), os.fdopen(reports, "rb"), os.fdopen(status, "rb"))

    def run(self, arguments: Sequence[str], environ: Mapping[str, str], *, within_s: float) -> tuple[int, str]:
        """Run `child.py` to its end; return its exit code and what it printed."""
        with tempfile.TemporaryFile() as log:
            handle = self.start(arguments, environ, None, log)
            with handle.stdin, handle.stdout:
                code = handle.wait(within_s)
            log.seek(0)
            return code, log.read().decode()


class _IsTheWorker(BaseException):
    """Raised in the process that is to become the worker."""


class _Forked:
    """What the watchdog uses of `subprocess.Popen`: a fork instead of a new program."""

    def __init__(self, _command: object, *, preexec_fn: Any, **_: object) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            preexec_fn()
            raise _IsTheWorker

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _watch(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be the watchdog to its end, and then exit; return in the process that is to be the worker."""
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    status = descriptors[3]
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.write(status, b"%d\n" % os.getpid())
    watchdog.subprocess.Popen = _Forked  # type: ignore[assignment, misc]
    code = 1
    try:
        code = watchdog.main([])
    except _IsTheWorker:
        os.close(status)
        return
    except SystemExit as ended:
        code = int(str(ended.code))
    os.write(status, b"%d\n" % code)
    os._exit(code)


def _become_the_worker() -> None:
    """Leave nothing of the watchdog: its signals, its pipes, its replaced class."""
    watchdog.subprocess.Popen = POPEN  # type: ignore[misc]
    wakeup = signal.set_wakeup_fd(-1)
    os.close(wakeup)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    reload(crashpoints)  # it reads the environment where it is imported


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request until the test process ends; return in each forked worker, with its request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who asked is told by the watchdog itself
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 4)
        if not message:
            sys.exit()
        if os.fork() == 0:
            requests.close()
            request = json.loads(message)
            _watch(request, descriptors)
            _become_the_worker()
            return request  # type: ignore[no-any-return]
        for descriptor in descriptors:
            os.close(descriptor)


POPEN = subprocess.Popen

if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))["arguments"]
    import_module("child").main(arguments)
