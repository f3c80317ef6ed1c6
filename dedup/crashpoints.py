"""Defines the crash points, which are named places in the code where a test can kill the process.

With the environment variable ``DEDUP_CRASH_AT=point:n``, a process dies when it reaches that point for the n-th time.
"""

from __future__ import annotations

import itertools
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
    "after_changing",
    "after_fence",
]
POINTS: Final[tuple[Point, ...]] = get_args(Point)
OF_LAYOUT: Final[frozenset[Point]] = frozenset({"after_changing", "after_fence"})
"""The points that a process reaches only if it writes or changes a layout, not if it finds an existing layout."""
OF_ANNOUNCING: Final[frozenset[Point]] = frozenset({"after_begin", "after_group"})
"""The points that are reached only with version 1 transactions, which need AddPartitionsToTxn and AddOffsetsToTxn."""
VARIABLE: Final = "DEDUP_CRASH_AT"


_point, _, _count = os.environ.get(VARIABLE, "").partition(":")
if _point and _point not in POINTS:
    raise SystemExit(f"{VARIABLE}: no point {_point!r}; the points are {', '.join(POINTS)}")
_nth: Final = int(_count or 1)
_arrivals: Final = itertools.count(1)


def _die_at(point: Point) -> None:
    if point == _point and next(_arrivals) == _nth:
        os.kill(os.getpid(), signal.SIGKILL)


reached: Callable[[Point], object] = _die_at if _point else bool
"""The function that the code calls at each crash point."""
