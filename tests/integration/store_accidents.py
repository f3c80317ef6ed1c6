"""Accidents of `child.py` that befall a store; it is run as a script, so they are imported from beside it."""

from __future__ import annotations

import os
import signal
from typing import Any

from dedup.store import checkpoint as archive
from dedup.store.rocks import RocksStore


def one_segment_flushed(number: int) -> None:
    """SIGKILL after the n-th apply, with the oldest of several segments in a file and the others only in the log."""
    apply = RocksStore.apply
    seen = 0

    def flushing(self: RocksStore, writes: Any, record: Any, position: int) -> None:
        nonlocal seen
        apply(self, writes, record, position)
        seen += len(self._segments) > 1
        if seen == number:
            self._segments[min(self._segments)].family.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    RocksStore.apply = flushing  # type: ignore[method-assign]


def die_in_transfer(number: int) -> None:
    """SIGKILL when so many bytes of an archive were written, or read."""
    saw = archive._Counted.saw

    def deadly(self: archive._Counted, piece: bytes) -> None:
        saw(self, piece)
        if self.count >= number:
            os.kill(os.getpid(), signal.SIGKILL)

    archive._Counted.saw = deadly  # type: ignore[method-assign]
