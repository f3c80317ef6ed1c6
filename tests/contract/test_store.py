"""One contract for every store: the memory store and the RocksDB store behave alike."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dedup.errors import InvariantBroken, StateIncompatible, TaskCorrupted
from dedup.store.base import MemoryStore, StoreIdentity
from dedup.store.changelog import FeedTime, TaskRecord
from dedup.store.directory import delete_store, store_directory
from dedup.store.rocks import RocksMemory, RocksStore

IDENTITY = StoreIdentity("orders", 3, "q7BvLZ1nQ8i")
RECORD = TaskRecord(b"f" * 16, 5_000, (FeedTime(0, 3, 5_000, idle=False),), 42, 100)
MEMORY = RocksMemory(cache_bytes=1 << 20, write_buffer_bytes=1 << 20)


class Memory:
    def __init__(self, _directory):
        self.store = MemoryStore()

    def reopen(self):
        return self.store


class Rocks:
    def __init__(self, directory):
        self.directory = store_directory(directory, IDENTITY)
        self.store = RocksStore.open(self.directory, identity=IDENTITY, memory=MEMORY)

    def reopen(self):
        self.store.close()
        self.store = RocksStore.open(self.directory, identity=IDENTITY, memory=MEMORY)
        return self.store


@pytest.fixture(params=[Memory, Rocks])
def house(request, tmp_path):
    house = request.param(tmp_path)
    yield house
    house.store.close()


@pytest.fixture
def store(house):
    return house.store


@pytest.fixture
def directory(tmp_path):
    return store_directory(tmp_path, IDENTITY)


def before_and_after(house):
    """The store, and the store after it was closed and opened again."""
    yield house.store
    yield house.reopen()


def get_many(store, segment, ids):
    return store.get_each((segment,), ids).get(segment, {})


def contents(store):
    return list(store.sightings())


def test_a_fresh_store_is_empty(house):
    for store in before_and_after(house):
        assert (store.position, store.task_record, store.segments()) == (0, None, {})
        assert contents(store) == []
        assert store.count_ids() == 0
        assert get_many(store, 0, [b"a"]) == {}
        assert store.get_each((0, 100), [b"a"]) == {}
        assert store.drop_below(1 << 40, 100) == ()


def test_what_was_applied_is_read_and_survives_reopening(house):
    house.store.apply({0: {b"a": b"1", b"b": b"2"}, 100: {b"a": b"3"}}, RECORD, 7)
    for store in before_and_after(house):
        assert (store.position, store.task_record, tuple(store.segments())) == (7, RECORD, (0, 100))
        assert get_many(store, 0, [b"a", b"b", b"c", b"a"]) == {b"a": b"1", b"b": b"2"}
        assert get_many(store, 100, [b"b"]) == {}
        assert store.get_each((100, 0, 200), [b"b", b"c"]) == {0: {b"b": b"2"}}
        assert contents(store) == [(0, b"a", b"1"), (0, b"b", b"2"), (100, b"a", b"3")]
        assert store.count_ids() == 3
        assert store.approximate_bytes() > 0


def test_a_later_value_replaces_an_earlier_one_in_its_segment_only(house):
    house.store.apply({0: {b"a": b"1"}, 100: {b"a": b"2"}}, RECORD, 1)
    house.store.apply({100: {b"a": b"3"}}, RECORD, 2)
    for store in before_and_after(house):
        assert contents(store) == [(0, b"a", b"1"), (100, b"a", b"3")]


def test_a_batch_without_a_sighting_moves_record_and_position(house):
    house.store.apply({0: {b"a": b"1"}}, RECORD, 1)
    moved = replace(RECORD, stream_time_ms=9_000, next_offset=50)
    house.store.apply({100: {}}, moved, 3)
    for store in before_and_after(house):
        assert (store.position, store.task_record, tuple(store.segments())) == (3, moved, (0,))


def test_without_a_record_the_stored_one_stays(house):
    house.store.apply({}, RECORD, 1)
    house.store.apply({0: {b"a": b"1"}}, None, 2)
    for store in before_and_after(house):
        assert (store.position, store.task_record) == (2, RECORD)


def test_keys_may_be_applied_before_the_first_task_record(house):
    house.store.apply({0: {b"a": b"1"}}, None, 2)
    for store in before_and_after(house):
        assert (store.position, store.task_record, tuple(store.segments())) == (2, None, (0,))
        assert store.drop_below(99, 100) == ()


@pytest.mark.parametrize(("writes", "position"), [({0: {b"b": b"2"}}, 6), ({0: {b"b": b"2", b"": b"3"}}, 8)])
def test_a_refused_batch_changes_nothing(house, writes, position):
    house.store.apply({0: {b"a": b"1"}}, RECORD, 7)
    with pytest.raises(InvariantBroken):
        house.store.apply(writes, replace(RECORD, next_offset=1), position)
    for store in before_and_after(house):
        assert (store.position, store.task_record, contents(store)) == (7, RECORD, [(0, b"a", b"1")])


def test_many_ids_of_many_lengths(house):
    known = [bytes([length]) + os.urandom(length) for length in range(33) for _ in range(60)]
    strangers = [bytes([length]) + os.urandom(length) for length in range(8, 33) for _ in range(60)]
    for at in range(0, len(known), 300):
        values = {state_key: state_key[::-1] for state_key in known[at : at + 300]}
        house.store.apply({at // 900 * 100: values}, RECORD, at)
    for store in before_and_after(house):
        found = {}
        for there in store.get_each(store.segments(), known + strangers).values():
            found.update(there)
        assert found == {state_key: state_key[::-1] for state_key in known}
        assert store.get_each(store.segments(), [b"", *strangers]) == {}
        assert store.get_each((), known) == {}


@pytest.mark.parametrize(("oldest_ms", "dropped"), [(99, ()), (100, (0,)), (199, (0,)), (200, (0, 100))])
def test_segments_are_dropped_whole_once_they_end_in_time(house, oldest_ms, dropped):
    house.store.apply({0: {b"a": b"1"}, 100: {b"a": b"2"}, 200: {b"a": b"3"}}, RECORD, 1)
    assert house.store.drop_below(oldest_ms, 100) == dropped
    for store in before_and_after(house):
        assert tuple(store.segments()) == tuple(start for start in (0, 100, 200) if start not in dropped)
        assert get_many(store, 0, [b"a"]) == ({} if dropped else {b"a": b"1"})
        assert store.position == 1


def test_a_segment_written_under_a_wider_grid_lives_as_long_as_that_grid_says(house):
    house.store.apply({0: {b"a": b"1"}}, replace(RECORD, segment_ms=1_000), 1)
    house.store.apply({100: {b"a": b"2"}}, replace(RECORD, segment_ms=100), 2)
    store = house.reopen()
    assert store.drop_below(500, 100) == (100,)
    assert store.drop_below(999, 100) == ()
    assert store.drop_below(1_000, 100) == (0,)


def test_a_narrower_grid_does_not_shorten_what_a_wider_one_is_asked_for(store):
    store.apply({0: {b"a": b"1"}}, RECORD, 1)
    assert store.drop_below(999, 1_000) == ()
    assert store.drop_below(1_000, 1_000) == (0,)


def test_a_dropped_segment_can_be_written_again_and_is_then_new(house):
    house.store.apply({0: {b"a": b"1"}}, RECORD, 5)
    house.store.drop_below(100, 100)
    house.store.apply({0: {b"b": b"2"}}, RECORD, 9)
    for store in before_and_after(house):
        assert contents(store) == [(0, b"b", b"2")]
        assert store.segments() == {0: 5}


def test_first_offset_is_the_position_before_the_first_write(house):
    house.store.apply({0: {b"a": b"1"}}, RECORD, 5)
    house.store.apply({0: {b"b": b"1"}, 100: {b"a": b"2"}}, RECORD, 9)
    house.store.apply({100: {b"c": b"2"}}, RECORD, 12)
    for store in before_and_after(house):
        assert store.segments() == {0: 0, 100: 5}


def test_a_closed_store_is_refused_and_closing_twice_is_allowed(store):
    store.apply({0: {b"a": b"1"}}, RECORD, 1)
    store.close()
    store.close()
    for use in (
        lambda: get_many(store, 0, [b"a"]),
        store.segments,
        lambda: store.apply({}, None, 2),
        lambda: store.drop_below(0, 1),
        lambda: contents(store),
        store.count_ids,
        store.approximate_bytes,
    ):
        with pytest.raises(InvariantBroken, match="closed"):
            use()


def test_a_wiped_store_is_gone(house):
    house.store.apply({0: {b"a": b"1"}}, RECORD, 1)
    house.store.wipe()
    fresh = MemoryStore() if isinstance(house, Memory) else house.reopen()
    assert (fresh.position, fresh.task_record, fresh.segments()) == (0, None, {})


# Only on disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [replace(IDENTITY, topology="payments"), replace(IDENTITY, partition=4)])
def test_the_store_of_another_task_is_refused_by_name_and_can_be_deleted(directory, other):
    RocksStore.open(directory, identity=other, memory=MEMORY).close()
    with pytest.raises(TaskCorrupted) as refused:
        RocksStore.open(directory, identity=IDENTITY, memory=MEMORY)
    assert f"belongs to {other}" in str(refused.value)
    # As a worker would: while it still holds the error.
    delete_store(directory)
    RocksStore.open(directory, identity=IDENTITY, memory=MEMORY).close()


def test_a_store_of_another_changelog_topic_is_refused_and_left_alone(directory):
    other = replace(IDENTITY, changelog_topic_id="recreated")
    store = RocksStore.open(directory, identity=IDENTITY, memory=MEMORY)
    store.apply({0: {b"a": b"1"}}, RECORD, 7)
    store.close()
    with pytest.raises(StateIncompatible, match="another changelog topic"):
        RocksStore.open(directory, identity=other, memory=MEMORY)
    store = RocksStore.open(directory, identity=IDENTITY, memory=MEMORY)
    assert (store.position, contents(store)) == (7, [(0, b"a", b"1")])
    store.close()


def test_a_directory_in_use_by_another_process_is_refused_and_not_deleted(directory):
    script = (
        "import sys, pathlib; from dedup.store.rocks import RocksStore; from dedup.store.base import StoreIdentity\n"
        "store = RocksStore.open(pathlib.Path(sys.argv[1]), identity=StoreIdentity('orders', 3, 'q7BvLZ1nQ8i'))\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as owner:
        assert owner.stdout.readline() == b"open\n"
        for use in (lambda: RocksStore.open(directory, identity=IDENTITY), lambda: delete_store(directory)):
            with pytest.raises(StateIncompatible, match="in use by another process"):
                use()
        owner.stdin.close()
    RocksStore.open(directory, identity=IDENTITY).close()


def test_a_symbolic_link_is_refused_and_its_target_left_alone(tmp_path, directory):
    target = tmp_path / "precious"
    target.mkdir()
    directory.parent.mkdir()
    directory.symlink_to(target)
    for use in (lambda: RocksStore.open(directory, identity=IDENTITY), lambda: delete_store(directory)):
        with pytest.raises(StateIncompatible, match="symbolic link"):
            use()
    assert list(target.iterdir()) == []


def test_a_directory_with_foreign_files_is_refused_and_left_alone(directory):
    directory.mkdir(parents=True)
    (directory / "thesis.tex").write_text("years of work")
    for use in (lambda: RocksStore.open(directory, identity=IDENTITY), lambda: delete_store(directory)):
        with pytest.raises(StateIncompatible, match=r"thesis\.tex"):
            use()
    assert (directory / "thesis.tex").read_text() == "years of work"


def test_a_directory_that_can_not_be_written_is_refused(directory, monkeypatch):
    directory.mkdir(parents=True)
    # Tests may run as root, whom no mode stops.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StateIncompatible, match="not writable"):
        RocksStore.open(directory, identity=IDENTITY)


def test_a_directory_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "orders").write_text("a file")
    with pytest.raises(StateIncompatible, match="cannot be created"):
        RocksStore.open(store_directory(tmp_path, IDENTITY), identity=IDENTITY)


@pytest.mark.parametrize("name", ["", "..", "a/b", "Orders", "a.b", "a\n", "ä", "x" * 201])
def test_a_name_outside_the_alphabet_names_no_directory(tmp_path, name):
    with pytest.raises(StateIncompatible, match="a-z, 0-9"):
        store_directory(tmp_path, replace(IDENTITY, topology=name))


@pytest.mark.parametrize("logged", [True, False])
def test_a_reopened_store_finds_the_same_before_and_after_its_filters_are_read(directory, monkeypatch, logged):
    monkeypatch.setattr("dedup.store.rocks._FILTERED_ON_OPEN_IDS", 50)
    store = RocksStore.open(directory, identity=IDENTITY, memory=MEMORY)
    known = {b"k%05d" % number: b"v" for number in range(500)}
    store.apply({0: known}, RECORD, 1)
    store.close()
    if not logged:
        (directory / "filter-log-0").unlink()
    step = 100 if not logged else 20
    store = RocksStore.open(directory, identity=IDENTITY, memory=MEMORY)
    asked = [*known, *(b"s%05d" % number for number in range(500))]
    assert get_many(store, 0, asked) == known
    assert not store.warm(step)
    store.apply({0: {b"a": b"w", b"z": b"w"}}, RECORD, 2)
    assert not store.warm(step)
    assert store.warm(1_000)
    assert store.warm(0)
    assert get_many(store, 0, [*asked, b"a", b"z"]) == {**known, b"a": b"w", b"z": b"w"}
    store.close()


def test_a_cleared_store_is_as_fresh(house):
    house.store.apply({0: {b"a": b"1"}, 100: {b"b": b"2"}}, RECORD, 5)
    house.store.clear()
    for store in before_and_after(house):
        assert (store.position, store.task_record, store.segments(), contents(store)) == (0, None, {}, [])
    house.store.apply({0: {b"c": b"3"}}, RECORD, 2)
    for store in before_and_after(house):
        assert (store.position, contents(store), store.segments()) == (2, [(0, b"c", b"3")], {0: 0})


def test_a_store_that_was_being_cleared_when_it_ended_is_as_fresh(directory, monkeypatch):
    store = RocksStore.open(directory, identity=IDENTITY, memory=MEMORY)
    store.apply({0: {b"a": b"1"}, 100: {b"b": b"2"}}, RECORD, 5)

    def killed(_store, _name):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RocksStore, "_drop_family", killed)
        with pytest.raises(KeyboardInterrupt):
            store.clear()
    store.close()
    store = RocksStore.open(directory, identity=IDENTITY, memory=MEMORY)
    assert (store.position, store.task_record, store.segments(), contents(store)) == (0, None, {}, [])
    store.close()
