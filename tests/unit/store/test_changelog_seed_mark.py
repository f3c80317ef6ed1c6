"""The seed mark, and the refusal of a changelog that holds half a seed."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.core.window import Sighting, Source, Window
from dedup.errors import StateIncompatible, TaskCorrupted
from dedup.kafka.wire import FetchedRecord, LogBounds, TopicPartition
from dedup.store.base import MemoryStore
from dedup.store.changelog import (
    SEED_MARK_KEY,
    TASK_RECORD_KEY,
    SeedMark,
    TaskRecord,
    collect,
    decode_seed_mark,
    encode_seed_mark,
    encode_sighting,
    encode_task_record,
    parse_key,
    sighting_key,
)
from dedup.worker.restore import restore
from tests.simulation.cluster import fetched

CHANGELOG = TopicPartition("t.changelog", 0)
WINDOW = Window(10, 10)
BEGUN = SeedMark("seeding", "a1", 7, 5, 2, "00", 9, {"in": [7]}, "topics")
DONE = SeedMark("seeded", "a1", 7, 5, 2, "00", 9, {"in": [7]}, "topics")
RECORD = TaskRecord(b"f", 5, (), 7, WINDOW.segment_ms)


def seen(state_key: bytes, time_ms: int) -> tuple[bytes, bytes]:
    return sighting_key(WINDOW.segment_of(time_ms), state_key), encode_sighting(
        Sighting(time_ms, time_ms, Source(0, 0, 1))
    )


HALF = [(SEED_MARK_KEY, encode_seed_mark(BEGUN)), seen(b"a", 3), seen(b"b", 5)]
END = [(TASK_RECORD_KEY, encode_task_record(RECORD)), (SEED_MARK_KEY, encode_seed_mark(DONE))]


class Log:
    """A wire on which one partition can be read, some records at a time."""

    def __init__(self, lines, step=1):
        self.lines, self.step = lines, step

    async def bounds(self, source):
        return LogBounds(0, len(self.lines))

    async def fetch(self, source, offset, *, max_bytes, wait_ms):
        end = min(offset + self.step, len(self.lines))
        records = [FetchedRecord(at, 0, *self.lines[at]) for at in range(offset, end)]
        return fetched(records, end, len(self.lines), len(self.lines))


def restored(store, lines, step=1):
    asyncio.run(restore(Log(lines, step), CHANGELOG, store, WINDOW, lambda done, total: None))
    return store


def test_a_mark_is_read_as_written():
    assert parse_key(SEED_MARK_KEY) is None
    assert decode_seed_mark(encode_seed_mark(BEGUN)) == BEGUN
    assert collect(*zip(*[*HALF, *END], strict=True)).seed_mark == DONE


@settings(deadline=None)
@given(st.data())
def test_a_damaged_mark_is_refused(data):
    value = bytearray(encode_seed_mark(BEGUN))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TaskCorrupted if at else StateIncompatible):
        decode_seed_mark(bytes(value))


@pytest.mark.parametrize("step", [1, 2, 9])
def test_half_a_seed_is_refused_however_often_it_is_tried_and_healed_by_the_rest(step):
    store = MemoryStore()
    for _ in range(2):
        # The second time the local store is at the end already: the mark must be found all the same.
        with pytest.raises(StateIncompatible, match=r"half a seed.*dedup spark seed"):
            restored(store, HALF, step)
    restored(store, [*HALF, *HALF[1:], *END], step)
    assert store.task_record == RECORD
    assert store.count_ids() == 2
    restored(store, [*HALF, *HALF[1:], *END], step)


def test_a_whole_seed_is_a_state_like_any_other():
    assert restored(MemoryStore(), [*HALF, *END], 2).task_record == RECORD
