"""Provides the time to tasks: the wall clock at the start, advanced by the boot clock and corrected by brokers' times.

The wall clock is read only when the process starts, because it may be set back later. After that, the boot clock
measures the elapsed time; the monotonic clock is not used, because it stops while the machine is suspended. If the wall
clock was behind, or the whole machine was paused, a broker's time corrects the result. The broker's response to a
transaction's changelog batch contains the time at which the broker appended the batch.
"""

from __future__ import annotations

import logging
import time
from typing import Final

log: Final = logging.getLogger(__name__)
_TELL_MS: Final = 1_000
"""The smallest lag behind the broker's clock, in ms, that is logged."""


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SteadyClock:
    """Adds the elapsed time to the wall time at the start, and is never behind a time that a broker reported."""

    def __init__(self) -> None:
        self._offset_s = time.time() - _since_boot_s()
        self.put_forward_ms = 0
        """The total number of milliseconds by which brokers' times have advanced the clock."""

    def now_ms(self) -> int:
        """Return the time in ms since 1970, which never decreases and ignores later changes to the wall clock."""
        return int((self._offset_s + _since_boot_s()) * 1000)

    def heard(self, broker_ms: int) -> None:
        """Advance the clock to the broker's time if the clock is behind it, and log a large difference."""
        behind_ms = broker_ms - self.now_ms()
        if behind_ms <= 0:
            return
        self._offset_s += behind_ms / 1000
        self.put_forward_ms += behind_ms
        if behind_ms >= _TELL_MS:
            log.warning(
                "this machine's clock is %d ms behind the broker's: from now on, future event times are judged by "
                "the broker's clock. Check the machine's time synchronization.",
                behind_ms,
            )
