"""Named points at which a test ends the process: ``DEDUP_CRASH_AT=point:n`` dies at the n-th passing of a point.

Outside tests the variable is not set and passing a point costs one comparison with None.
"""

from __future__ import annotations

import os
import signal
from typing import Final, Literal, get_args

Point = Literal[
    "after_init",
    "after_committed_offset",
    "in_restore",
    "after_restore",
    "after_begin",
    "after_output",
    "after_changelog",
    "after_group",
    "after_offsets",
    "before_end",
    "after_end",
    "after_apply",
]
POINTS: Final[tuple[Point, ...]] = get_args(Point)
VARIABLE: Final = "DEDUP_CRASH_AT"


class _Plan:
    """Where this process is to die, and how many passings are left."""

    def __init__(self, text: str | None) -> None:
        self.point: str | None = None
        self.left = 0
        if text:
            name, _, count = text.partition(":")
            if name not in POINTS:
                raise SystemExit(f"{VARIABLE}: no point {name!r}; the points are {', '.join(POINTS)}")
            self.point, self.left = name, int(count or 1)


_plan: Final = _Plan(os.environ.get(VARIABLE))


def reached(point: Point) -> None:
    """End the process by SIGKILL if this is the passing it was told to die at."""
    if _plan.point == point:
        _plan.left -= 1
        if _plan.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
