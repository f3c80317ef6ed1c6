"""Runs one program that can not outlive the process that started this one.

Started by path with `python -I -S`, imports nothing of ours, so that it costs some 20 ms. The parent holds the other
end of this process's stdin: a byte is an order (see ORDERS), the end of the stream means the parent is gone, however
it went, and the program is killed. On Linux the kernel also kills the program should this process itself be killed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Final

ORDERS: Final = {
    b"t": signal.SIGTERM,
    b"k": signal.SIGKILL,
    b"s": signal.SIGSTOP,
    b"c": signal.SIGCONT,
}
_LOOK_EVERY_S: Final = 0.25
_PR_SET_PDEATHSIG: Final = 1


def main(command: list[str]) -> int:
    """Return the program's exit code once it has ended; killed by a signal is 128 + its number."""
    parent = os.getppid()
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # One thread only here, so that running code between fork and exec is safe.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=_tie_to_parent())  # noqa: PLW1509
    try:
        # The parent learns from this line that the program runs, and its process id for those who look at it.
        os.write(1, f"{child.pid}\n".encode())
        while child.poll() is None:
            readable, _, _ = select.select([0, ended], [], [], _LOOK_EVERY_S)
            if ended in readable:
                os.read(ended, 64)  # a child that was stopped or went on also wakes us
            order = os.read(0, 1) if 0 in readable else None
            if order == b"" or os.getppid() != parent:
                # A forked copy of the parent may still hold the pipe open; then only the new parent id tells.
                break
            if order is not None:
                child.send_signal(ORDERS[order])
    finally:
        child.kill()
    code = child.wait()
    return 128 - code if code < 0 else code


def _tie_to_parent() -> Callable[[], None] | None:
    """Return what makes a new process die with this one; nothing where the kernel has no such thing."""
    if sys.platform != "linux":
        return None
    import ctypes  # noqa: PLC0415  only here, so that other systems need not have it

    prctl = ctypes.CDLL(None).prctl

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return tie


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
