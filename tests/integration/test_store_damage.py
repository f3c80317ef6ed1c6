"""Damaged files (fault F31): a store is then either refused as TaskCorrupted or older than it was, never a hole."""

import shutil

import pytest

from dedup.errors import DedupError, StateIncompatible, TaskCorrupted
from dedup.store.base import StoreIdentity
from dedup.store.changelog import TaskRecord
from dedup.store.directory import StorePool, delete_store
from dedup.store.rocks import RocksMemory, RocksStore, errors_of
from tests.integration.store_accidents import overwrite_stored

IDENTITY = StoreIdentity("orders", 0, "topic-id")
MEMORY = RocksMemory(cache_bytes=1 << 20, write_buffer_bytes=1 << 20)
BATCHES = 40


def open_store(directory):
    return RocksStore.open(directory, identity=IDENTITY, memory=RocksMemory(cache_bytes=1 << 20))


def batch(number):
    return {
        segment: {b"%d-%015d" % (segment, number * 1_000 + row): b"%06d" % number for row in range(100)}
        for segment in (0, 100)
    }


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A copy of a running store, as a SIGKILL would leave it: keys both in files and in the log."""
    directory = tmp_path_factory.mktemp("healthy") / "0"
    store = open_store(directory.with_name("running"))
    for number in range(BATCHES):
        store.apply(batch(number), TaskRecord(b"f", number, (), number + 1, 100), number + 1)
        if number in (10, 25):
            for held in store._segments.values():
                held.family.rows.flush()
            store._db.flush()
    shutil.copytree(directory.with_name("running"), directory)
    store.close()
    return directory


def outcome(directory):
    """Return what opening and reading everything comes to."""
    try:
        store = open_store(directory)
    except TaskCorrupted:
        return "refused"
    try:
        return whole(store)
    except TaskCorrupted:
        return "refused"
    finally:
        store.close()


def whole(store):
    found = {(segment, state_key): value for segment, state_key, value in store.sightings()}
    for number in range(store.position):
        for segment, values in batch(number).items():
            looked_up = store.get_each((segment,), list(values)).get(segment, {})
            for state_key, value in values.items():
                if found.get((segment, state_key)) != value or looked_up.get(state_key) != value:
                    return f"a hole at position {store.position}"
    return "as it was" if store.position == BATCHES else "older"


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 0x5A
    path.write_bytes(content)


def cut(path, at):
    content = path.read_bytes()
    path.write_bytes(content[: int(at * len(content))])


DAMAGES = [(flip, at / 6) for at in range(7)] + [(cut, at / 6) for at in range(6)]


def test_an_undamaged_store_is_as_it_was(tmp_path, healthy):
    shutil.copytree(healthy, tmp_path / "0")
    assert outcome(tmp_path / "0") == "as it was"


@pytest.mark.parametrize("pattern", ["*.sst", "*.log", "MANIFEST-*", "CURRENT"])
def test_f31_damaged_files_never_make_a_hole(tmp_path, healthy, pattern):
    outcomes = set()
    names = sorted(path.name for path in healthy.glob(pattern) if path.stat().st_size)
    assert names
    for name in names:
        for damage, at in DAMAGES:
            directory = tmp_path / "0"
            shutil.copytree(healthy, directory)
            damage(directory / name, at)
            found = outcome(directory)
            outcomes.add(found)
            if found == "refused":
                assert outcome(directory) == "refused", "opened once, the damage was forgotten"
            delete_store(directory)
        shutil.copytree(healthy, directory)
        (directory / name).unlink()
        outcomes.add(outcome(directory))
        shutil.rmtree(directory)
    assert outcomes <= {"refused", "older", "as it was"}
    assert outcomes & {"refused", "older"}, "no damage was noticed at all"


def test_f03_a_stale_copy_is_older_but_whole(tmp_path, healthy):
    directory, copy = tmp_path / "0", tmp_path / "copy"
    shutil.copytree(healthy, directory)
    shutil.copytree(healthy, copy)
    store = open_store(directory)
    store.apply({0: {b"new": b"%06d" % 99}}, None, BATCHES + 1)
    store.close()
    delete_store(directory)
    shutil.copytree(copy, directory)
    assert outcome(directory) == "as it was"


def test_a_half_deleted_store_is_refused_or_empty(tmp_path, healthy):
    directory = tmp_path / "0"
    shutil.copytree(healthy, directory)
    for path in sorted(directory.iterdir(), key=lambda path: path.name == "CURRENT"):
        path.unlink()
        if any(directory.glob("*.sst")):
            # The logs go first, so that the last batches may be missing, with their position.
            assert outcome(directory) in {"refused", "older", "as it was"}
            shutil.rmtree(directory)
            shutil.copytree(healthy, directory)


def found_by_lookup(store):
    store.get_each(store.segments(), [key for number in range(BATCHES) for key in batch(number)[0]])


def found_in_order(store):
    for _ in store.sightings():
        pass


def found_by_compaction(store):
    for held in list(store._segments.values()):
        held.family.rows.compact_range(None, None)
    store.apply(batch(BATCHES), None, BATCHES + 1)


@pytest.mark.parametrize("find", [found_by_lookup, found_in_order, found_by_compaction])
def test_a_store_found_damaged_is_deleted_and_opened_again_while_its_error_is_held(tmp_path, find):
    """Was: the error's traceback kept the database open, so the worker ended with "in use by another process"."""
    store = open_store(tmp_path / "0")
    for number in range(BATCHES):
        store.apply(batch(number), TaskRecord(b"f", number, (), number + 1, 100), number + 1)
        if number % 10 == 0:
            for held in store._segments.values():
                held.family.rows.flush()
    overwrite_stored(store)
    with pytest.raises(TaskCorrupted, match="block checksum mismatch") as damage:
        find(store)
    store.wipe()
    assert not (tmp_path / "0").exists()
    again = open_store(tmp_path / "0")
    assert (again.position, list(again.sightings())) == (0, [])
    again.close()
    assert damage.value.__traceback__ is not None


def test_a_store_found_damaged_when_it_is_closed_is_deleted(tmp_path, caplog):
    """Was: the store's error ended the rebalance or the worker, and the damaged directory stayed."""
    pool = StorePool()
    for partition in range(2):
        store = open_store(tmp_path / str(partition))
        pool.put(partition, store)
        store.apply(batch(0), None, 1)
    store = pool.take(0)
    for number in range(1, 6):
        store.apply(batch(number), None, number + 1)
        for held in store._segments.values():
            held.family.rows.flush()
    overwrite_stored(store)
    with pytest.raises(TaskCorrupted):
        found_by_compaction(store)
    pool.put(0, store)
    pool.keep_only(())
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert "block checksum mismatch" in caplog.text


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("IO error: No space left on device: While appending to file: x.log", DedupError, "make room"),
        ("IO error: While open a file for random read: 7.sst: Too many open files", DedupError, "limit of open files"),
        ("IO error: While lock file: /s/0/LOCK: Resource temporarily unavailable", StateIncompatible, "in use"),
        ("IO error: lock hold by current process: /s/0/LOCK: No locks available", StateIncompatible, "in use"),
        ("IO error: while open a file for lock: /s/0/LOCK: Permission denied", DedupError, "give this user access"),
        ("Corruption: block checksum mismatch", TaskCorrupted, "restored from the changelog"),
        ("Corruption: block checksum mismatch in /LOCKERS/0/000011.sst", TaskCorrupted, "restored from the changelog"),
        ("IO error: No such file or directory: While open: 000011.sst", TaskCorrupted, "000011.sst"),
    ],
)
def test_what_rocksdb_says_becomes_the_error_named_by_what_to_do(tmp_path, text, kind, said):
    with pytest.raises(DedupError) as raised, errors_of(tmp_path):
        raise Exception(text)  # noqa: TRY002  rocksdict knows no other class
    assert type(raised.value) is kind
    assert said in str(raised.value)


def test_an_error_of_ours_passes_as_it_is(tmp_path):
    with pytest.raises(KeyError), errors_of(tmp_path):
        raise KeyError
