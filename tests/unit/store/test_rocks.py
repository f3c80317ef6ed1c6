"""RocksDB's own threads give way to the worker's, stores share memory that grows with their number, segments share
column families, and RocksDB's log stays short."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import rocksdict

from dedup.errors import DedupError
from dedup.store import rocks
from dedup.store.base import MemoryStore, StoreIdentity
from dedup.store.changelog import TaskRecord
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
    monkeypatch.setattr(rocks, "LEAST_FLUSH_BYTES", 2)
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
    monkeypatch.setattr(rocks, "LEAST_FLUSH_BYTES", 0)
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


WIDTH_MS = 100


def fill_in_turn(store, segments, ids=20):
    """Write each segment, and drop all but the last three, as a worker does whose events are far apart."""
    for start in segments:
        values = {b"%d-%d" % (start, row): b"v" * 40 for row in range(ids)}
        store.apply({start: values}, TaskRecord(b"f", start, (), 1, WIDTH_MS), store.position + 1)
        store.drop_below(start - 2 * WIDTH_MS, WIDTH_MS)
        assert list(store.segments()) == list(range(max(0, start - 2 * WIDTH_MS), start + 1, WIDTH_MS))


def flush_all(store):
    for held in store._segments.values():
        held.family.rows.flush()


def families(directory):
    return set(rocksdict.Rdict.list_cf(str(directory), rocksdict.Options(raw_mode=True))) - {"default"}


def test_the_column_families_of_dropped_segments_contain_the_next_ones(tmp_path):
    directory, made = tmp_path / "0", None
    for first in range(0, 20_000, 5_000):
        store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
        fill_in_turn(store, range(first, first + 5_000, WIDTH_MS))
        if first == 5_000:
            flush_all(store)
        kept = {
            start: {key: value for at, key, value in store.sightings() if at == start} for start in store.segments()
        }
        assert [len(values) for values in kept.values()] == [20, 20, 20]
        gone = [b"%d-0" % start for start in range(0, first + 4_700, WIDTH_MS)]
        assert store.get_each(store.segments(), gone) == {}
        store.close()
        made = made or families(directory)
        assert families(directory) == made
        store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
        for start, values in kept.items():
            assert store.get_each([start], list(values)) == {start: values}
        assert store.count_ids() == 60
        # Identity, secret, and state, and for each segment its entry, its filter's mark, and its family.
        assert len(list(store._db.keys())) <= 3 + 3 * 3
        store.close()
    assert len(made) == 4


def test_a_large_segment_takes_its_column_family_along(tmp_path, monkeypatch):
    monkeypatch.setattr(rocks, "_MOST_REUSED_BYTES", 1_000)
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""))
    fill_in_turn(store, range(0, 300, WIDTH_MS), ids=500)
    flush_all(store)
    fill_in_turn(store, range(300, 600, WIDTH_MS), ids=500)
    assert {held.family.name for held in store._segments.values()} == {"300", "400", "500"}
    assert families(tmp_path / "0") == {"300", "400", "500"}
    store.close()


@pytest.mark.parametrize("reused", [True, False])
def test_a_store_that_ended_while_a_segment_was_dropped_lacks_the_segment(tmp_path, monkeypatch, reused):
    directory = tmp_path / "0"
    store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
    fill_in_turn(store, range(0, 300, WIDTH_MS))

    def killed(_store, _name):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RocksStore, "_delete_filter", killed)
        if not reused:
            patched.setattr(rocks, "_MOST_FREE_FAMILIES", 0)
        with pytest.raises(KeyboardInterrupt):
            store.drop_below(WIDTH_MS, WIDTH_MS)
    store.close()
    store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
    assert list(store.segments()) == [100, 200]
    assert store.get_each([0, 100], [b"0-0", b"100-0"]) == {100: {b"100-0": b"v" * 40}}
    assert ("0" in families(directory)) == reused
    fill_in_turn(store, range(300, 900, WIDTH_MS))
    store.close()


def test_a_segment_whose_start_names_the_family_of_another_one_has_its_own(tmp_path):
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""))
    record, position = TaskRecord(b"f", 0, (), 1, WIDTH_MS), count(1)
    store.apply({0: {b"a": b"1"}, 100: {b"b": b"2"}}, record, next(position))
    assert store.drop_below(100, WIDTH_MS) == (0,)
    store.apply({500: {b"c": b"3"}}, record, next(position))
    store.apply({0: {b"d": b"4"}}, record, next(position))
    wanted = [(0, b"d", b"4"), (100, b"b", b"2"), (500, b"c", b"3")]
    assert list(store.sightings()) == wanted
    store.close()
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""))
    assert list(store.sightings()) == wanted
    store.close()


def test_the_log_of_rocksdb_is_emptied_and_names_no_segment_of_long_ago(tmp_path, monkeypatch):
    monkeypatch.setattr(rocks, "_MOST_FREE_FAMILIES", 0)
    most_bytes = 1 << 18  # A quarter of the real limit, and of the segments.
    monkeypatch.setattr(rocks, "_APPLIES_PER_LOOK", rocks._APPLIES_PER_LOOK // 4)
    monkeypatch.setattr("dedup.store.directory._MOST_LOG_BYTES", most_bytes)
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""))
    log, largest = tmp_path / "0" / "LOG", 0
    for first in range(0, 5_000, 500):
        fill_in_turn(store, range(first, first + 500, WIDTH_MS))
        largest = max(largest, log.stat().st_blocks * 512)
    assert most_bytes < largest < 3 * most_bytes
    assert log.stat().st_size > 2 * most_bytes, "the log was not emptied"
    assert b"Options for column family [0]" not in log.read_bytes()
    assert len(list((tmp_path / "0").glob("LOG*"))) == 1
    log.unlink()
    fill_in_turn(store, range(5_000, 6_750, WIDTH_MS))
    store.close()
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""))
    assert log.stat().st_size < most_bytes
    store.close()


def test_many_live_segments_share_one_column_family(tmp_path):
    directory, alike = tmp_path / "0", MemoryStore()
    store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
    for position in range(1, 301):
        # Segments overtake each other, as those of feeds that are far apart do, and each is written to several times.
        start = position * 37 % 60 * WIDTH_MS - 300
        writes = {start: {b"%d-%d" % (start, position * row): b"%d" % position for row in range(position % 40)}}
        for each in (store, alike):
            each.apply(writes, TaskRecord(b"f", start, (), 1, WIDTH_MS), position)
        if position % 100 == 0:
            assert store.drop_below(position * 5, WIDTH_MS) == alike.drop_below(position * 5, WIDTH_MS)
        if position % 130 == 0:
            flush_all(store)
            store.close()
            store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
        assert store.segments() == alike.segments()
        assert list(store.sightings()) == list(alike.sightings())
    ids = [key for _, key, _ in alike.sightings()] + [b"none-%d" % row for row in range(50)]
    assert store.get_each(store.segments(), ids) == alike.get_each(alike.segments(), ids)
    assert 40 < len(alike.segments()) < 60
    assert len(families(directory)) == 9
    assert store.warm(1 << 30)
    store.clear()
    alike.clear()
    store.apply({start: {b"a": b"1"} for start in range(20)}, TaskRecord(b"f", 0, (), 1, WIDTH_MS), 1)
    assert list(store.sightings()) == [(start, b"a", b"1") for start in range(20)]
    assert store.drop_below(1 << 40, WIDTH_MS) == tuple(range(20))
    assert list(store.sightings()) == []
    store.close()


def fill_shared(store, ids):
    """Write 12 segments, of which the last four share a column family."""
    record = TaskRecord(b"f", 0, (), 1, WIDTH_MS)
    for start in range(0, 1_200, WIDTH_MS):
        values = {b"%d-%d" % (start, row): os.urandom(40) for row in range(ids)}
        store.apply({start: values}, record, store.position + 1)
    assert [held.family.name for held in store._segments.values()][-5:] == ["700", *["shared"] * 4]


def test_the_shared_family_ends_with_its_last_segment_if_its_files_are_large(tmp_path, monkeypatch):
    """Without further writes, RocksDB would keep the files of a drained backlog for a month."""
    monkeypatch.setattr(rocks, "_MOST_REUSED_BYTES", 1_000)
    directory = tmp_path / "0"
    store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
    fill_shared(store, ids=500)
    flush_all(store)
    store.drop_below(1_100, WIDTH_MS)
    assert families(directory) == {"shared"}
    full_bytes = store.approximate_bytes()
    store.drop_below(1_200, WIDTH_MS)
    assert families(directory) == set()
    assert store.approximate_bytes() < full_bytes / 10
    until(lambda: not list(directory.glob("*.sst")), "RocksDB deletes the files of the dropped families")
    fill_shared(store, ids=1)
    assert len(list(store.sightings())) == 12
    store.close()


@pytest.mark.parametrize("dropped", range(9))
@pytest.mark.parametrize("reopened", [True, False])
def test_a_clear_that_did_not_drop_all_families_left_no_keys(tmp_path, monkeypatch, dropped, reopened):
    """A kill or a full disk can end `clear` after any of the families."""
    directory, drop_family, drops = tmp_path / "0", RocksStore._drop_family, count()
    store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
    fill_shared(store, ids=2)

    def stopped(self, family):
        if next(drops) == dropped:
            raise KeyboardInterrupt
        drop_family(self, family)

    with monkeypatch.context() as patched:
        patched.setattr(RocksStore, "_drop_family", stopped)
        with pytest.raises(KeyboardInterrupt):
            store.clear()
    if reopened:
        store.close()
        store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
    assert (store.position, store.task_record, store.segments()) == (0, None, {})
    alike = MemoryStore()
    for each in (store, alike):
        each.apply({start: {b"a": b"1"} for start in range(0, 1_200, WIDTH_MS)}, None, 1)
    assert list(store.sightings()) == list(alike.sightings())
    old = [b"%d-%d" % (start, row) for start in range(0, 1_200, WIDTH_MS) for row in range(2)]
    assert store.get_each(store.segments(), old[:3]) == {}
    assert store.get_each(store.segments(), old) == {}
    store.close()


def test_a_segment_whose_family_could_not_be_dropped_does_not_return(tmp_path, monkeypatch):
    """A full disk ends `drop_below` with an error, and the worker uses the store again later."""
    monkeypatch.setattr(rocks, "_MOST_REUSED_BYTES", -1)
    directory = tmp_path / "0"
    store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
    fill_shared(store, ids=2)
    store.drop_below(1_100, WIDTH_MS)

    def full(_self, _family):
        raise DedupError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(RocksStore, "_drop_family", full)
        with pytest.raises(DedupError):
            store.drop_below(1_200, WIDTH_MS)
    for start in range(300, 1_200, WIDTH_MS):
        store.apply({start: {b"a": b"1"}}, None, store.position + 1)
    wanted = [(start, b"a", b"1") for start in range(300, 1_200, WIDTH_MS)]
    assert list(store.sightings()) == wanted
    assert store._segments[1_100].family.name == "shared"
    store.close()
    store = RocksStore.open(directory, identity=StoreIdentity("t", 0, ""))
    assert list(store.sightings()) == wanted
    store.close()


def test_memory_of_hashed_memtables_is_given_back_with_their_families(tmp_path, monkeypatch):
    monkeypatch.setattr(rocks, "_MOST_FREE_FAMILIES", 1)
    memory = RocksMemory()
    tables = memory._tables
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""), memory=memory)
    fill_shared(store, ids=2)
    assert memory._tables == tables - 8
    store.drop_below(1_200, WIDTH_MS)
    assert memory._tables == tables - 1
    assert families(tmp_path / "0") == {"0", "shared"}
    store.close()
    assert memory._tables == tables
    monkeypatch.setattr(rocks, "_MOST_FREE_FAMILIES", 3)
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""), memory=memory)
    assert families(tmp_path / "0") == {"0"}
    assert memory._tables == tables - 1
    store.close()


def test_dropped_segments_are_flushed_by_the_hundred(tmp_path):
    """A flush takes 3 ms, and without any flush, the deletions would slow down lookups."""
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""))

    def flushed(segments):
        fill_in_turn(store, segments, ids=1)
        until(lambda: not pending(), "RocksDB writes what the store flushed")
        return len(list((tmp_path / "0").glob("*.sst")))

    def pending():
        found = [family.rows.property_value("rocksdb.num-immutable-mem-table") for family in store._families.values()]
        return set(found) != {"0"}

    assert flushed(range(0, 30_000, WIDTH_MS)) == 0
    assert flushed(range(30_000, 45_000, WIDTH_MS)) == 4
    store.close()


def test_the_memtable_of_a_large_dropped_segment_is_flushed(tmp_path):
    """Otherwise, it would take up the write buffers that all stores of a worker share."""
    store = RocksStore.open(tmp_path / "0", identity=StoreIdentity("t", 0, ""))
    fill_in_turn(store, range(0, 300, WIDTH_MS), ids=5_000)
    before_bytes = store.approximate_bytes()
    fill_in_turn(store, range(300, 600, WIDTH_MS), ids=1)
    until(lambda: store.approximate_bytes() < before_bytes / 2, "RocksDB flushes the memtables of dropped segments")
    store.close()
