"""A process that applies batches is killed at any moment; whatever is found afterwards belongs together.

The file is also the program that is killed: ``python test_store_kill.py DIRECTORY MODE KEPT``.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dedup.errors import TaskCorrupted
from dedup.store.base import StoreIdentity
from dedup.store.changelog import TaskRecord
from dedup.store.rocks import RocksMemory, RocksStore

IDENTITY = StoreIdentity("orders", 0, "topic-id")
SEGMENT_MS = 100
BATCHES_PER_SEGMENT = 20
CRASH_AT = 30
KILLS = 8
FEW = 2
"""Segments that are kept, each with a column family of its own."""
MANY = 20
"""Segments that are kept, of which most share a column family."""


def memory():
    # Small buffers: families are flushed often, and apart from each other.
    return RocksMemory(cache_bytes=1 << 20, write_buffer_bytes=256 << 10)


def batch(number):
    """The writes of a batch: to the newest segment and, out of order, to the one before; one ID is written again."""
    newest = number // BATCHES_PER_SEGMENT * SEGMENT_MS
    ids = [b"%016d" % (number * 1_000 + row) for row in range(200)]
    writes = {newest: dict.fromkeys(ids[:150], b"%d" % number) | {b"again": b"%d" % number}}
    if newest:
        writes[newest - SEGMENT_MS] = dict.fromkeys(ids[150:], b"%d" % number)
    return writes


def record(number):
    return TaskRecord(b"f", number, (), number + 1, SEGMENT_MS)


def oldest_live_ms(number, kept):
    return (number // BATCHES_PER_SEGMENT - kept) * SEGMENT_MS


def verdict(store, kept=FEW):
    """Say whether position, task record and keys agree, or how they do not."""
    position = store.position
    if (store.task_record.next_offset if store.task_record else 0) != position:
        return "task record and position differ"
    expected = {}
    oldest = (
        position // BATCHES_PER_SEGMENT - kept - 2
    ) * BATCHES_PER_SEGMENT  # older batches are in dropped segments only
    for number in range(max(oldest, 0), position):
        for segment, values in batch(number).items():
            expected.setdefault(segment, {}).update(values)
    found = {}
    for segment, state_key, value in store.sightings():
        found.setdefault(segment, {})[state_key] = value
    for segment, values in expected.items():
        if segment not in found and segment + SEGMENT_MS <= oldest_live_ms(max(position - 1, 0), kept):
            continue
        there = found.get(segment, {})
        if any(int(there.get(state_key, b"-1")) < int(value) for state_key, value in values.items()):
            return "position without its keys"
        if there != values and segment >= oldest // BATCHES_PER_SEGMENT * SEGMENT_MS:
            return "keys beyond the position"
    return "agree"


def unfound(store):
    """Fail if a lookup through a filter misses an ID that the store holds."""
    assert store.warm(1 << 30)
    held = {}
    for segment, state_key, value in store.sightings():
        held.setdefault(segment, {})[state_key] = value
    assert store.get_each(held, [key for values in held.values() for key in values]) == held


class PositionFirst(RocksStore):
    """Mutant: the position is written in a write of its own, before the keys."""

    def apply(self, writes, record, position):
        super().apply({}, record, position)
        if position > CRASH_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        super().apply(writes, None, position)


class OnePosition(RocksStore):
    """Mutant: no log, one position for all segments, and one family flushed without the others."""

    def apply(self, writes, record, position):
        self._write_options.disable_wal = True
        super().apply(writes, record, position)
        if position > CRASH_AT:
            self._db.flush()
            os.kill(os.getpid(), signal.SIGKILL)


class FlushedApart(RocksStore):
    """Not a mutant: with the log on, one family flushed without the others does no harm (F40)."""

    def apply(self, writes, record, position):
        super().apply(writes, record, position)
        if position > CRASH_AT:
            self._segments[min(self._segments)].family.rows.flush()
            os.kill(os.getpid(), signal.SIGKILL)


class Gullible(RocksStore):
    """Opens without comparing a segment with what the default family says of it."""

    def _loaded(self, start, name, entry):
        return self._segment(self._families[name], entry, start)


MODES = {"right": RocksStore, "position first": PositionFirst, "one position": OnePosition, "apart": FlushedApart}


def child():
    store = MODES[sys.argv[2]].open(Path(sys.argv[1]), identity=IDENTITY, memory=memory())
    number = first = store.position
    while True:
        store.apply(batch(number), record(number), number + 1)
        store.drop_below(oldest_live_ms(number, int(sys.argv[3])), SEGMENT_MS)
        if number == first:
            sys.stdout.write("has begun\n")
            sys.stdout.flush()
        number += 1


def killed(directory, mode, *, kept=FEW, after_s=None):
    """Run the program until it is killed: by itself, or so long after its first batch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, __file__, str(directory), mode, str(kept)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"has begun\n"
        try:
            process.wait(60 if after_s is None else after_s)
        except subprocess.TimeoutExpired:
            process.kill()
        assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("kept", [FEW, MANY])
def test_position_task_record_and_keys_agree_after_every_kill(tmp_path, kept):
    directory, dice, positions = tmp_path / "orders" / "0", random.Random(7), [0]
    reused = False
    while len(positions) <= KILLS or not reused:
        killed(directory, "right", kept=kept, after_s=dice.uniform(0.0, 0.4))
        store = RocksStore.open(directory, identity=IDENTITY, memory=memory())
        assert verdict(store, kept) == "agree"
        unfound(store)
        positions.append(store.position)
        reused = {held.family.name for held in store._segments.values()} != set(map(str, store.segments()))
        store.close()
    assert reused
    # Each run has applied a batch at least, and nothing that an earlier one had applied is gone.
    assert positions == sorted(set(positions))


def test_f40_one_family_flushed_without_the_others_does_no_harm(tmp_path):
    directory = tmp_path / "orders" / "0"
    killed(directory, "apart")
    store = RocksStore.open(directory, identity=IDENTITY, memory=memory())
    assert verdict(store) == "agree"
    assert store.position == CRASH_AT + 1
    store.close()


def test_a_position_written_apart_from_its_keys_is_caught(tmp_path):
    directory = tmp_path / "orders" / "0"
    killed(directory, "position first")
    store = RocksStore.open(directory, identity=IDENTITY, memory=memory())
    assert verdict(store) == "position without its keys"
    store.close()


def test_one_position_for_all_segments_without_a_log_is_caught(tmp_path):
    directory = tmp_path / "orders" / "0"
    killed(directory, "one position")
    with pytest.raises(TaskCorrupted, match="lacks writes"):
        RocksStore.open(directory, identity=IDENTITY, memory=memory())
    store = Gullible.open(directory, identity=IDENTITY, memory=memory())
    assert verdict(store) == "position without its keys"
    store.close()


if __name__ == "__main__":
    child()
