"""What a restore refuses, and that it refuses before anything is applied."""

from functools import partial

import pytest

from dedup.core.window import Window
from dedup.errors import StateIncompatible
from dedup.kafka.wire import FetchedRecord, LogBounds, TopicPartition
from dedup.store.base import MemoryStore
from dedup.store.changelog import (
    NOT_SAID,
    TASK_RECORD_KEY,
    TaskRecord,
    encode_single_column,
    encode_task_record,
    sighting_key,
)
from dedup.worker.restore import refuse_other_feeding, restore
from tests.simulation.cluster import fetched

CHANGELOG = TopicPartition("t.changelog", 0)
WINDOW = Window(100, 100)
OURS, THEIRS = b"o" * 16, b"t" * 16


class Log:
    """A changelog that gives ``step`` offsets a fetch, from ``start`` on."""

    def __init__(self, lines, *, start=0, step=2):
        self.lines = lines
        self.start = start
        self.step = step

    async def bounds(self, _partition):
        return LogBounds(self.start, len(self.lines))

    async def fetch(self, _partition, offset, *, max_bytes, wait_ms):
        end = min(offset + self.step, len(self.lines))
        records = [FetchedRecord(at, 0, *self.lines[at]) for at in range(offset, end)]
        return fetched(records, end, len(self.lines), len(self.lines))


def sighting(name):
    (value,) = encode_single_column([5], 0, 0, [1])
    return sighting_key(0, name), value


def record(fingerprint, next_offset=1, kept_from=NOT_SAID):
    made = TaskRecord(fingerprint, 5, (), next_offset, WINDOW.segment_ms, kept_from)
    return TASK_RECORD_KEY, encode_task_record(made)


def refuse_theirs(found):
    if found.fingerprint != OURS:
        raise StateIncompatible("another topology")


async def restored(log, store):
    return await restore(log, CHANGELOG, store, WINDOW, lambda _done, _total: None, accept=refuse_theirs)


async def test_everything_up_to_the_end_is_applied():
    store = MemoryStore()
    found = await restored(Log([sighting(b"a"), record(OURS), sighting(b"b"), record(OURS, 2)]), store)
    assert (found.records, store.position, store.task_record.next_offset) == (4, 4, 2)
    assert [name for _, name, _ in store.sightings()] == [b"a", b"b"]


class Deposed(Log):
    """A changelog whose leader moves during the restore; the old leader lacks the newest records, and still answers."""

    moved = found = False

    async def bounds(self, partition):
        whole = await super().bounds(partition)
        return LogBounds(whole.start, whole.end - 2) if self.moved and not self.found else whole

    async def fetch(self, partition, offset, *, max_bytes, wait_ms):
        if offset >= len(self.lines) - 1 and not self.found:
            self.moved = True
            raise StateIncompatible("out of range")
        return await super().fetch(partition, offset, max_bytes=max_bytes, wait_ms=wait_ms)

    async def refresh(self):
        self.found = True

    async def pause(self, delay_ms):
        """Do not wait."""


async def test_a_deposed_leader_that_answers_during_the_restore_is_no_reason_to_stop():
    """Was: the worker stopped with exit code 3, although the changelog held everything."""
    store = MemoryStore()
    lines = [sighting(b"a"), record(OURS), sighting(b"b"), record(OURS, 2)]
    found = await restored(Deposed(lines, step=3), store)
    assert (found.records, store.position, store.task_record.next_offset) == (4, 4, 2)


async def test_a_fetch_that_every_leader_refuses_is_an_error():
    log = Deposed([sighting(b"a"), record(OURS), sighting(b"b"), record(OURS, 2)], step=3)
    log.refresh = partial(log.pause, 0)
    with pytest.raises(StateIncompatible, match="out of range"):
        await restored(log, MemoryStore())


class Noting(MemoryStore):
    """A store that notes the segments that are written to."""

    def __init__(self):
        super().__init__()
        self.written = []

    def apply(self, writes, record, position):
        self.written += writes
        super().apply(writes, record, position)


async def test_segments_that_have_expired_by_the_newest_task_record_are_not_written():
    store, width_ms = Noting(), WINDOW.segment_ms
    lines = []
    for number in range(50):
        (value,) = encode_single_column([number * width_ms + 5], 0, 0, [number])
        at = TaskRecord(OURS, number * width_ms + 5, (), number, width_ms)
        lines += [(sighting_key(number * width_ms, b"%d" % number), value), (TASK_RECORD_KEY, encode_task_record(at))]
    await restored(Log(lines, step=20), store)
    live = [
        number * width_ms for number in range(50) if (number + 1) * width_ms > WINDOW.oldest_live_ms(at.stream_time_ms)
    ]
    assert len(live) == 3
    assert list(store.segments())[-3:] == live
    # Each fetch has ten task records and as many segments, of which the three newest count.
    assert store.written == [(fetch * 10 + row) * width_ms for fetch in range(5) for row in (7, 8, 9)]


async def test_another_fingerprint_in_the_changelog_is_refused_before_it_is_applied():
    store = MemoryStore()
    with pytest.raises(StateIncompatible, match="another topology"):
        await restored(Log([sighting(b"a"), record(THEIRS)]), store)
    assert (store.position, store.segments(), store.task_record) == (0, {}, None)


async def test_what_another_topology_wrote_after_us_is_not_applied():
    store = MemoryStore()
    lines = [sighting(b"a"), record(OURS)]
    await restored(Log(lines), store)
    with pytest.raises(StateIncompatible, match="another topology"):
        await restored(Log([*lines, sighting(b"b"), record(THEIRS)]), store)
    assert store.position == 2
    assert [name for _, name, _ in store.sightings()] == [b"a"]


async def test_another_fingerprint_in_the_store_is_refused_without_reading_on():
    store = MemoryStore()
    store.apply({}, TaskRecord(THEIRS, 5, (), 1, WINDOW.segment_ms), 1)
    with pytest.raises(StateIncompatible, match="another topology"):
        await restored(Log([record(THEIRS), sighting(b"a"), record(OURS)]), store)
    assert (store.position, store.segments()) == (1, {})


def long_log(start, kept_from):
    """Return a changelog of 1,000 sightings, each with a task record of an earlier moment, and the last record."""
    lines = [line for number in range(1_000) for line in (sighting(b"%d" % number), record(OURS, kept_from=0))]
    return Log([*lines, record(OURS, 1_000, kept_from), *[sighting(b"x")] * 600], start=start, step=50)


async def test_a_changelog_truncated_below_what_it_needs_is_whole():
    store = MemoryStore()
    found = await restored(long_log(100, 100), store)
    assert found.start == 100
    assert store.task_record.next_offset == 1_000


@pytest.mark.parametrize("kept", [0, 50])
async def test_a_changelog_truncated_too_far_is_refused_on_a_disk_that_lacks_what_is_gone(kept):
    store = MemoryStore()
    if kept:
        store.apply({}, TaskRecord(OURS, 5, (), 1, WINDOW.segment_ms, 0), kept)
    with pytest.raises(StateIncompatible, match=r"begins at offset 100, but its last task record .* from offset 99 on"):
        await restored(long_log(100, 99), store)
    assert (store.position, store.segments()) == (kept, {})


class Truncated(Log):
    """A changelog that is truncated to ``to`` after the first fetch."""

    def __init__(self, lines, *, to):
        super().__init__(lines, step=50)
        self.to = to

    async def fetch(self, partition, offset, *, max_bytes, wait_ms):
        if offset < self.start:
            raise StateIncompatible("the offset is gone")
        try:
            return await super().fetch(partition, offset, max_bytes=max_bytes, wait_ms=wait_ms)
        finally:
            self.start = self.to


async def test_a_changelog_that_its_owner_truncates_during_the_restore_is_read_on_from_its_start():
    store = MemoryStore()
    await restored(Truncated(long_log(0, 100).lines, to=100), store)
    assert store.task_record.next_offset == 1_000


async def test_a_changelog_that_somebody_truncates_during_the_restore_is_refused():
    store = MemoryStore()
    with pytest.raises(StateIncompatible, match=r"begins at offset 100, but its last task record .* from offset 99 on"):
        await restored(Truncated(long_log(0, 99).lines, to=100), store)
    assert store.position == 50


async def test_it_does_no_harm_where_the_disk_has_it():
    store = MemoryStore()
    store.apply({}, TaskRecord(OURS, 5, (), 1, WINDOW.segment_ms, 0), 100)
    await restored(long_log(100, 0), store)
    assert store.task_record.next_offset == 1_000


async def test_a_changelog_of_before_the_first_own_record_says_nothing_of_it():
    store = MemoryStore()
    await restored(Log([record(OURS), record(OURS)], start=1), store)
    assert store.position == 2


EMPTIED = r"begins at offset 100 and holds no task record, but the local state was written with one"


@pytest.mark.parametrize("log", [Log([sighting(b"x")] * 100, start=100), Log([sighting(b"x")] * 900, start=100)])
async def test_an_emptied_changelog_is_refused_on_a_disk_that_was_not_the_last(log):
    store = MemoryStore()
    held = TaskRecord(OURS, 5, (), 1, WINDOW.segment_ms, 0)
    store.apply({}, held, 50)
    with pytest.raises(StateIncompatible, match=EMPTIED):
        await restored(log, store)
    assert (store.position, store.task_record) == (50, held)


async def test_a_changelog_emptied_during_a_restore_is_refused_too():
    store = MemoryStore()
    lines = [sighting(b"a"), record(OURS), *[sighting(b"x")] * 998]
    with pytest.raises(StateIncompatible, match=EMPTIED):
        await restored(Truncated(lines, to=100), store)
    assert store.position == 50


def of_another_grid():
    store = MemoryStore()
    held = TaskRecord(OURS, 5, (), 1, 7 * WINDOW.segment_ms, 0)
    store.apply({0: {b"key": b"value"}}, held, 2_000)
    return store


async def test_state_of_another_guard_period_is_read_anew_from_the_changelog():
    store = of_another_grid()
    found = await restored(long_log(100, 100), store)
    assert (found.start, found.records, store.task_record.next_offset) == (100, 2_501, 1_000)
    assert b"key" not in {name for _, name, _ in store.sightings()}


async def test_state_of_another_guard_period_is_kept_where_it_alone_holds_what_was_truncated():
    store = of_another_grid()
    with pytest.raises(StateIncompatible, match=r"with the previous guard period"):
        await restored(long_log(100, 99), store)
    assert (store.position, tuple(store.segments())) == (2_000, (0,))


async def test_state_of_another_id_rule_is_not_cleared_whatever_the_guard_period():
    store = MemoryStore()
    store.apply({0: {b"key": b"value"}}, TaskRecord(THEIRS, 5, (), 1, 7 * WINDOW.segment_ms, 0), 9)
    with pytest.raises(StateIncompatible, match="another topology"):
        await restored(long_log(0, 0), store)
    assert (store.position, tuple(store.segments())) == (9, (0,))


@pytest.mark.parametrize(("said", "there"), [("", "aa" * 16), ("aa" * 16, "aa" * 16)])
def test_the_feeding_topic_a_record_names_or_does_not_name_is_taken(said, there):
    refuse_other_feeding(TaskRecord(OURS, 5, (), 7, 100, feeding_topic_id=said), there, TopicPartition("in", 3))


def test_offsets_of_another_feeding_topic_of_the_same_name_are_refused():
    held = TaskRecord(OURS, 5, (), 7, 100, feeding_topic_id="aa" * 16)
    with pytest.raises(StateIncompatible, match="in was deleted and recreated: in/3 was judged up to offset 7"):
        refuse_other_feeding(held, "bb" * 16, TopicPartition("in", 3))


async def test_state_kept_under_another_guard_period_than_its_owners_is_made_anew_under_the_owners():
    """A standby that was not restarted yet keeps sightings in its own segments, whatever the owner's record says."""
    narrow = Window(40, 40)
    (value,) = encode_single_column([190], 0, 0, [1])
    kept = TaskRecord(OURS, 190, (), 2, narrow.segment_ms)
    lines = [(sighting_key(narrow.segment_of(190), b"a"), value), (TASK_RECORD_KEY, encode_task_record(kept))]
    store, fresh = MemoryStore(), MemoryStore()
    await restored(Log(lines), store)
    assert (tuple(store.segments()), store.task_record.segment_ms) == ((WINDOW.segment_of(190),), WINDOW.segment_ms)
    for each in (store, fresh):
        await restore(Log(lines), CHANGELOG, each, narrow, lambda _done, _total: None)
        assert (tuple(each.segments()), each.task_record.segment_ms) == ((narrow.segment_of(190),), narrow.segment_ms)
