"""Provides tasks with a clock that never goes back: it adds the elapsed time to the wall-clock time of its start.

The boot clock measures the elapsed time, because the monotonic clock stops while the machine is suspended. When a
broker reports that it appended a batch at a later time, the clock advances to that time.
"""

from __future__ import annotations

import logging
import time
from typing import Final

log: Final = logging.getLogger(__name__)
_TELL_MS: Final = 1_000
"""The smallest difference from the broker's clock, in ms, that is logged."""


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SteadyClock:
    """A clock that never goes back and is never behind a time that a broker has reported."""

    def __init__(self) -> None:
        self._offset_s = time.time() - _since_boot_s()
        self.put_forward_ms = 0
        """The total number of milliseconds by which brokers' times have advanced the clock."""

    def now_ms(self) -> int:
        """Return the time in ms since 1970, which never decreases and ignores later changes to the wall clock."""
        return int((self._offset_s + _since_boot_s()) * 1000)

    def heard(self, broker_ms: int) -> None:
        """Advance the clock to the broker's time if the clock is behind that time, and log a large difference."""
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
