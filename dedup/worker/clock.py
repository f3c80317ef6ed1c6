"""The wall clock as tasks see it, which is read once, continued by the boot clock, and advanced by brokers' times.

The wall clock is read only once, because it may be set back while the process runs. The boot clock continues it,
because the monotonic clock stops while the machine is suspended. If the wall clock was behind, or the whole machine was
paused, a broker's time corrects it. The response for a transaction's changelog batch says when the broker appended the
batch.
"""

from __future__ import annotations

import logging
import time
from typing import Final, Protocol

log: Final = logging.getLogger(__name__)
_TELL_MS: Final = 1_000
"""The smallest lag behind the broker's clock that is logged."""


class Clock(Protocol):
    """The source of time for tasks."""

    put_forward_ms: int
    """By how much brokers' times have advanced the clock in total."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970; never decreases within a process."""

    def heard(self, broker_ms: int) -> None:
        """Advance to a broker's time, so that from now on `now_ms` is not earlier than it."""


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SteadyClock:
    """Wall time at the start of the process plus the elapsed time, and never behind a broker's reported time."""

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
                "this machine's clock is %d ms behind the broker's: from now on, future event times are judged by "
                "the broker's clock. Check the machine's time synchronization.",
                behind_ms,
            )
