"""The wall clock, as the edge hands it to the core: read once at start and carried on by the monotonic clock."""

from __future__ import annotations

import time
from typing import Final, Protocol


class Clock(Protocol):
    """Where an edge gets its time from."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970; never moves back within a process."""


class SteadyClock:
    """Wall time at the start of the process plus what the monotonic clock has counted since."""

    def __init__(self) -> None:
        self._offset_s: Final = time.time() - time.monotonic()

    def now_ms(self) -> int:
        """Return milliseconds since 1970; a wall clock that is set while we run is not followed."""
        return int((self._offset_s + time.monotonic()) * 1000)
