"""The wall clock as tasks see it: read once, continued by the boot clock, advanced by brokers' times.

The wall clock is read once, since it may be set back while the process runs. The boot clock continues it, because the
monotonic clock stops while the machine is suspended. If the wall clock was behind, or the whole machine was paused, a
broker's time corrects it: the answer for a transaction's changelog batch says when the broker appended it.
"""

from __future__ import annotations

import logging
import time
from typing import Final, Protocol

log: Final = logging.getLogger(__name__)
_TELL_MS: Final = 1_000
"""Smallest lag behind the broker that is logged."""


class Clock(Protocol):
    """Where tasks get their time from."""

    put_forward_ms: int
    """How far brokers' times have advanced it in total."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970; never moves back within a process."""

    def heard(self, broker_ms: int) -> None:
        """Advance to a broker's time: from now on `now_ms` is not before it."""


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SteadyClock:
    """Wall time at the start of the process plus the time since, never behind a broker's time that was heard."""

    def __init__(self) -> None:
        self._offset_s = time.time() - _since_boot_s()
        self.put_forward_ms = 0

    def now_ms(self) -> int:
        """Return milliseconds since 1970; later changes of the wall clock are ignored."""
        return int((self._offset_s + _since_boot_s()) * 1000)

    def heard(self, broker_ms: int) -> None:
        """Continue from the broker's time if it is ahead."""
        behind_ms = broker_ms - self.now_ms()
        if behind_ms <= 0:
            return
        self._offset_s += behind_ms / 1000
        self.put_forward_ms += behind_ms
        if behind_ms >= _TELL_MS:
            log.warning(
                "this machine's clock is %d ms behind the broker's: future event times are judged by the broker's from "
                "now on. Look at the machine's time synchronization.",
                behind_ms,
            )
