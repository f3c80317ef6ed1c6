"""Implements the watchdog, a process that runs a program and kills it when the watchdog's parent ends.

The parent writes one-byte commands (see ORDERS) to the watchdog's stdin, which closes when the parent ends. On Linux,
the kernel also kills the program if the watchdog is killed. The watchdog starts in about 20 ms, because it runs with
`python -I -S` and imports only the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Final

ORDERS: Final = {b"t": signal.SIGTERM, b"k": signal.SIGKILL, b"s": signal.SIGSTOP, b"c": signal.SIGCONT}
_LOOK_EVERY_S: Final = 0.25
_PR_SET_PDEATHSIG: Final = 1


def main(command: list[str]) -> int:
    """Run the program to its end, and return its exit code (128 + the signal's number if a signal killed it)."""
    parent = os.getppid()
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # This process has a single thread, so running code between fork and exec is safe.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=_tie_to_parent())  # noqa: PLW1509
    try:
        # This line tells the parent that the program is running, and contains the program's process ID.
        os.write(1, f"{child.pid}\n".encode())
        while child.poll() is None:
            readable, _, _ = select.select([0, ended], [], [], _LOOK_EVERY_S)
            if ended in readable:
                os.read(ended, 64)  # SIGCHLD also arrives when the program is stopped or continued
            order = os.read(0, 1) if 0 in readable else None
            if order == b"" or os.getppid() != parent:
                # A forked copy of the parent may keep the pipe open. Then only the parent process ID shows that the
                # parent has ended.
                break
            if order is not None:
                child.send_signal(ORDERS[order])
    finally:
        child.kill()
    code = child.wait()
    return 128 - code if code < 0 else code


def _tie_to_parent() -> Callable[[], None] | None:
    """Return a function that makes a new process end when its parent ends. Return None if the kernel cannot do this."""
    if sys.platform != "linux":
        return None
    import ctypes  # noqa: PLC0415  other systems may lack it

    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return tie


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
