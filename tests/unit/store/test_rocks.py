"""RocksDB's own threads give way to the worker's, but are not starved beside other processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dedup.store.rocks import RocksMemory

STEPS = 10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only on Linux has each thread a priority of its own")
def test_background_threads_are_ten_steps_nicer_than_the_worker() -> None:
    for _ in range(2):
        RocksMemory()
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert {priority - min(own, 19 - STEPS) for priority in background_priorities()} == {STEPS}


def background_priorities() -> list[int]:
    threads = Path("/proc/self/task").iterdir()
    mine = [thread for thread in threads if (thread / "comm").read_text().startswith("rocksdb:")]
    return [os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in mine]
