"""Defines named points in the code at which a test can kill the process.

``DEDUP_CRASH_AT=point:n`` kills the process when it reaches that point for the n-th time. Outside tests, the variable
is not set, and reaching a point calls a built-in function that does nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
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
    """The point at which this process is killed, and how many more times it must reach that point first."""

    def __init__(self, text: str | None) -> None:
        self.point: str | None = None
        self.left = 0
        if text:
            name, _, count = text.partition(":")
            if name not in POINTS:
                raise SystemExit(f"{VARIABLE}: no point {name!r}; the points are {', '.join(POINTS)}")
            self.point, self.left = name, int(count or 1)


_plan: Final = _Plan(os.environ.get(VARIABLE))


def _die_at(point: Point) -> None:
    """Kill the process with SIGKILL if this is the n-th arrival at the point that ``DEDUP_CRASH_AT`` names."""
    if _plan.point == point:
        _plan.left -= 1
        if _plan.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


reached: Callable[[Point], object] = bool if _plan.point is None else _die_at
"""The function that the code calls when it reaches a point."""
