"""RocksDB's own threads give way to the worker's, and stores share memory that grows with their number."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dedup.store import rocks
from dedup.store.base import StoreIdentity
from dedup.store.rocks import RocksMemory, RocksStore
from tests.waiting import until

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


def test_the_write_buffers_grow_with_the_number_of_open_stores(tmp_path, monkeypatch):
    monkeypatch.setattr(rocks, "_STORES_PER_BUFFERS", 2)
    memory, sizes, stores = RocksMemory(write_buffer_bytes=1 << 20), [], []
    for number in range(10):
        identity = StoreIdentity("t", number, "")
        stores.append(RocksStore.open(tmp_path / str(number), identity=identity, memory=memory))
        sizes.append(memory.write_buffers.get_buffer_size() / (1 << 20))
    assert sizes == [1, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4, 4]
    for store in stores:
        store.close()
        store.close()
    assert memory.write_buffers.get_buffer_size() == 1 << 20


class Family:
    """A column family that notes its flushes."""

    def __init__(self, memtable_bytes: int, waiting: int = 0, files: int = 0) -> None:
        self.sizes = {"rocksdb.cur-size-active-mem-table": memtable_bytes, "rocksdb.num-immutable-mem-table": waiting}
        self.files, self.flushed = files, 0

    def property_int_value(self, name: str) -> int:
        return self.sizes[name]

    def property_value(self, name: str) -> str:
        assert name == "rocksdb.num-files-at-level0"
        return str(self.files)

    def flush(self, *, wait: bool) -> None:
        assert not wait
        self.flushed += 1
        raise Exception("Try again: Writes have been stopped")  # noqa: TRY002  # what rocksdict raises


def test_many_stores_flush_one_after_the_other_before_the_write_buffers_are_full(monkeypatch):
    memory, used, now_s = RocksMemory(write_buffer_bytes=100), [49], [10.0]
    monkeypatch.setattr(rocks.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(
        memory, "write_buffers", SimpleNamespace(get_usage=lambda: used[0], get_buffer_size=lambda: 100), raising=True
    )
    monkeypatch.setattr(memory, "_stores", rocks._MANY_STORES)
    monkeypatch.setattr(rocks, "_LEAST_FLUSH_BYTES", 2)
    large, small = Family(3), Family(2)
    memory.flush_in_turn(large)
    assert large.flushed == 0, "the buffers are not half full"
    used[0] = 50
    memory.flush_in_turn(small)
    memory.flush_in_turn(large)
    memory.flush_in_turn(large)
    assert (small.flushed, large.flushed) == (0, 1), "one after the other, and none below the average"
    now_s[0] += 1
    memory.flush_in_turn(large)
    assert large.flushed == 2
    now_s[0] += 1
    for other in (Family(3, waiting=1), Family(3, files=20), Family(1)):
        memory.flush_in_turn(other)
        assert other.flushed == 0, "it might wait, or is nearly empty"
    monkeypatch.setattr(memory, "_stores", rocks._MANY_STORES - 1)
    memory.flush_in_turn(large)
    assert large.flushed == 2, "few stores fill their memtables"


def test_a_store_that_was_flushed_in_turn_has_all_its_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(rocks, "_FLUSH_EVERY_S", 0.0)
    monkeypatch.setattr(rocks, "_MANY_STORES", 1)
    monkeypatch.setattr(rocks, "_LEAST_FLUSH_BYTES", 0)
    memory = RocksMemory(write_buffer_bytes=1 << 10)
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""), memory=memory)
    every = []
    for position in range(1, 50):
        ids = [b"%03d-%02d" % (position, row) for row in range(20)]
        store.apply({0: dict.fromkeys(ids, b"v")}, None, position)
        every += ids
    assert store.get_each([0], every) == {0: dict.fromkeys(every, b"v")}
    # RocksDB flushes in a thread of its own.
    until(lambda: list((tmp_path / "0").glob("*.sst")), "a file of the flushed store")
    store.close()
