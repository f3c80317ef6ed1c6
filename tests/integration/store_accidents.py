"""Accidents of `child.py` that befall a store; it is run as a script, so they are imported from beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import IO, Any

from dedup.store import checkpoint, checkpoint_storage
from dedup.store.rocks import RocksStore
from dedup.worker.dedup_task import DedupTask


def one_segment_flushed(number: int) -> None:
    """SIGKILL after the n-th apply, with the oldest of several segments in a file and the others only in the log."""
    apply = RocksStore.apply
    seen = 0

    def flushing(self: RocksStore, writes: Any, record: Any, position: int) -> None:
        nonlocal seen
        apply(self, writes, record, position)
        seen += len(self._segments) > 1
        if seen == number:
            self._segments[min(self._segments)].family.rows.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    RocksStore.apply = flushing  # type: ignore[method-assign]


def overwrite_stored(store: RocksStore) -> None:
    """Write everything to the store's files, and overwrite the first half of each one, as a failing disk may."""
    for family in store._families.values():
        family.rows.flush()
    for path in store._directory.glob("*.sst"):
        with path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size // 2))


def store_damaged(number: int) -> None:
    """Before the n-th batch is judged, the store's files are damaged."""
    judge = DedupTask.judge
    seen = 0

    def damaging(self: DedupTask, batch: Any, refusals: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == number:
            assert isinstance(self.store, RocksStore)
            overwrite_stored(self.store)
        return judge(self, batch, refusals)

    DedupTask.judge = damaging  # type: ignore[method-assign]


def die_in_transfer(number: int) -> None:
    """SIGKILL when so many bytes of a file were written, or read."""
    pieces = checkpoint.pieces

    def deadly(source: IO[bytes], moved: checkpoint.Moved) -> Iterator[bytes]:
        for piece in pieces(source, moved):
            yield piece
            if source.tell() >= number:
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.pieces = checkpoint_storage.pieces = deadly
