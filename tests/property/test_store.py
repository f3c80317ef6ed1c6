"""Whatever is done to them, the RocksDB store holds what the memory store holds, also after it is closed and opened."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dedup.store import column_family, rocks
from dedup.store.base import MemoryStore, StoreIdentity
from dedup.store.changelog import TaskRecord
from dedup.store.rocks import RocksMemory, RocksStore

IDENTITY = StoreIdentity("orders", 0, "topic-id")
MEMORY = RocksMemory(cache_bytes=1 << 20, write_buffer_bytes=1 << 20)
GRIDS = (10, 15, 40)
STARTS = (0, 10, 15, 20, 30, 40, 45, 50, 60, 75, 80)

state_keys = st.binary(min_size=1, max_size=3) | st.integers(0, 200).map(lambda number: b"u%016d" % number)
writes = st.dictionaries(
    st.sampled_from(STARTS), st.dictionaries(state_keys, st.binary(min_size=1, max_size=20), max_size=40), max_size=4
)


class Stores(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        # Few segments have a column family of their own, and the others share one.
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(rocks, "_MOST_OWN_FAMILIES", 3)
        self.patched.setattr(rocks, "_MOST_FREE_FAMILIES", 2)
        self.patched.setattr(rocks, "_MOST_REUSED_BYTES", 1_500)
        self.patched.setattr(column_family, "_DELETIONS_PER_FLUSH", 2)
        self.root = Path(tempfile.mkdtemp())
        self.memory = MemoryStore()
        self.rocks = self.open()
        self.asked = {b"stranger"}

    def open(self):
        return RocksStore.open(self.root / "orders" / "0", identity=IDENTITY, memory=MEMORY)

    def teardown(self):
        if hasattr(self, "rocks"):
            self.rocks.close()
            shutil.rmtree(self.root)
            self.patched.undo()

    @rule(writes=writes, ahead=st.integers(0, 5), segment_ms=st.sampled_from(GRIDS), with_record=st.booleans())
    def apply(self, writes, ahead, segment_ms, with_record):
        position = self.memory.position + ahead
        record = TaskRecord(b"f", position, (), position, segment_ms) if with_record else None
        for store in (self.memory, self.rocks):
            store.apply(writes, record, position)
        for values in writes.values():
            self.asked.update(values)

    @rule(oldest_live_ms=st.integers(0, 130), segment_ms=st.sampled_from(GRIDS))
    def drop(self, oldest_live_ms, segment_ms):
        dropped = self.memory.drop_below(oldest_live_ms, segment_ms)
        assert self.rocks.drop_below(oldest_live_ms, segment_ms) == dropped

    @rule(segments=st.lists(st.sampled_from([*STARTS, 99]), unique=True), some=st.integers(1, 50))
    def look_up(self, segments, some):
        asked = sorted(self.asked)[:some]
        assert self.rocks.get_each(segments, asked) == self.memory.get_each(segments, asked)
        for segment in segments:
            assert self.rocks.get_each((segment,), asked) == self.memory.get_each((segment,), asked)

    @rule()
    def clear(self):
        self.rocks.clear()
        self.memory.clear()

    @rule()
    def flush(self):
        for family in self.rocks._families.values():
            family.rows.flush()

    @rule()
    def reopen(self):
        self.rocks.close()
        self.rocks = self.open()

    @precondition(lambda self: self.memory.position > 20)
    @rule()
    def wipe(self):
        self.memory.wipe()
        self.memory = MemoryStore()
        self.rocks.wipe()
        self.rocks = self.open()

    @invariant()
    def they_are_equal(self):
        if not hasattr(self, "rocks"):
            return
        assert self.rocks.position == self.memory.position
        assert self.rocks.task_record == self.memory.task_record
        assert self.rocks.segments() == self.memory.segments()
        assert list(self.rocks.sightings()) == list(self.memory.sightings())


Stores.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestStores = Stores.TestCase
