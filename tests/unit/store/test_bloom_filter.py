"""The log of a Bloom filter: it is trusted only if it is complete, because a filter that lacks an ID lets it pass."""

import errno
import os
import shutil
from collections import Counter

import pytest

from dedup.errors import DedupError
from dedup.store import bloom_filter, rocks
from dedup.store.bloom_filter import BloomFilter, Hashed, HashKey
from tests.unit.store.filter_logs import BITS, LOG, cut, flip, keys, load_in_pieces, missing, opened, put


@pytest.fixture(autouse=True)
def lazily(monkeypatch):
    load_in_pieces(monkeypatch)


def filtered(store, segment=0):
    return store._segments[segment].filter


@pytest.fixture
def reads(monkeypatch):
    """How many keys were read from stores."""
    counted = []
    real = rocks.keys_after

    def counting(*args):
        found = real(*args)
        counted.extend(found)
        return found

    monkeypatch.setattr(rocks, "keys_after", counting)
    return counted


@pytest.fixture
def filled(tmp_path):
    """The directory of a closed store with 1,000 IDs in ten batches."""
    store = opened(tmp_path / "3")
    for first in range(0, 1_000, 100):
        put(store, keys(first, first + 100))
    store.close()
    return tmp_path / "3"


def test_a_filter_is_loaded_from_its_log_without_reading_keys(filled, reads):
    store = opened(filled)
    assert not filtered(store).complete
    assert store.warm(1_000)
    assert reads == []
    assert missing(store, keys(0, 1_000)) == []
    unknown = keys(5_000, 6_000)
    assert sum(filtered(store).may_hold(Hashed(store._key.hashes(unknown)))) < 50
    store.close()


def test_ids_that_are_written_while_the_log_is_loaded_are_in_the_filter_and_in_the_next_one(filled, reads):
    store = opened(filled)
    assert not store.warm(10)
    put(store, keys(1_000, 1_100))
    assert not store.warm(10)
    put(store, keys(1_100, 1_200))
    assert store.warm(1_000)
    assert missing(store, keys(0, 1_200)) == []
    store.close()
    again = opened(filled)
    assert again.warm(1_000)
    assert missing(again, keys(0, 1_200)) == []
    assert reads == []
    again.close()


def zero_end(path):
    """What a power failure can leave: the length, but not the content. Few words of a filter may be zero anyway."""
    data = path.read_bytes()
    kept = len(data) // 2
    path.write_bytes(data[:kept] + bytes(len(data) - kept))


def of_another_store(path):
    other = opened(path.parent.parent / "other")
    put(other, keys(0, 1_000))
    other.close()
    shutil.copy(path.parent.parent / "other" / LOG, path)


@pytest.mark.parametrize("damage", [cut, flip, zero_end, of_another_store, os.remove])
def test_a_damaged_log_is_not_trusted_and_is_written_again(filled, reads, damage):
    damage(filled / LOG)
    store = opened(filled)
    assert not store.warm(10)
    put(store, keys(1_000, 1_100))
    assert store.warm(10_000)
    assert len(reads) >= 1_000
    assert missing(store, keys(0, 1_100)) == []
    store.close()
    reads.clear()
    again = opened(filled)
    assert again.warm(10_000)
    assert reads == []
    assert missing(again, keys(0, 1_100)) == []
    again.close()


def test_a_log_that_was_being_written_again_when_the_process_ended_is_not_trusted(filled, reads):
    (filled / LOG).unlink()
    store = opened(filled)
    assert not store.warm(100)
    put(store, keys(1_000, 1_100))
    store.close()
    again = opened(filled)
    assert again.warm(10_000)
    assert missing(again, keys(0, 1_100)) == []
    assert len(reads) > 1_000
    again.close()


def test_a_log_from_before_the_last_writes_is_not_trusted(filled, reads):
    """Somebody copies a directory, and copies only the logs back."""
    kept = (filled / LOG).read_bytes()
    store = opened(filled)
    put(store, keys(1_000, 1_100))
    store.close()
    (filled / LOG).write_bytes(kept)
    again = opened(filled)
    assert again.warm(10_000)
    assert reads
    assert missing(again, keys(0, 1_100)) == []
    again.close()


def test_a_store_that_wrote_without_logs_makes_the_older_log_worthless(filled, reads):
    store = opened(filled, log_filters=False)
    put(store, keys(1_000, 1_100))
    assert store.warm(10_000)
    store.close()
    reads.clear()
    again = opened(filled)
    assert again.warm(10_000)
    assert len(reads) == 1_100
    assert missing(again, keys(0, 1_100)) == []
    again.close()


def test_without_logs_no_file_is_written_and_nothing_is_missed(tmp_path):
    store = opened(tmp_path / "3", log_filters=False)
    put(store, keys(0, 500))
    store.close()
    assert not list((tmp_path / "3").glob("filter-log-*"))
    again = opened(tmp_path / "3", log_filters=False)
    assert again.warm(10_000)
    assert missing(again, keys(0, 500)) == []
    again.close()


def test_hashes_of_a_batch_that_the_store_never_got_are_overwritten(filled, monkeypatch):
    store = opened(filled)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_db", type("Db", (), {"write": killed, "close": store._db.close})())
    with pytest.raises(KeyboardInterrupt):
        put(store, keys(2_000, 2_100))
    store.close()
    monkeypatch.undo()
    assert (filled / LOG).stat().st_size == 8 * 1_100
    again = opened(filled)
    assert again.warm(10_000)
    assert missing(again, keys(0, 1_000)) == []
    put(again, keys(1_000, 1_050))
    assert (filled / LOG).stat().st_size == 8 * 1_100
    again.close()
    last = opened(filled)
    assert last.warm(10_000)
    assert missing(last, keys(0, 1_050)) == []
    last.close()


def test_a_full_disk_is_said_and_changes_nothing(filled, monkeypatch):
    store = opened(filled)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    position = store.position
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(DedupError, match=r"No space left on device.*Nothing is lost"):
            put(store, keys(1_000, 1_100))
        patched.setattr(os, "pwrite", lambda _, data, __: len(data) - 1)
        with pytest.raises(DedupError, match="the disk is full"):
            put(store, keys(1_000, 1_100))
    assert store.position == position
    put(store, keys(1_000, 1_100))
    assert store.warm(10_000)
    assert missing(store, keys(0, 1_100)) == []
    store.close()


def test_logs_go_with_their_segments(filled):
    store = opened(filled)
    put(store, keys(0, 10), segment=1_000)
    store.drop_below(1_000, 100)
    assert [path.name for path in filled.glob("filter-log-*")] == ["filter-log-1000"]
    store.clear()
    assert not list(filled.glob("filter-log-*"))
    put(store, keys(0, 10), segment=-500)
    store.close()
    (filled / "filter-log-77").write_bytes(b"left by a process that was killed while it dropped segment 77")
    again = opened(filled)
    assert [path.name for path in filled.glob("filter-log-*")] == ["filter-log--500"]
    again.wipe()
    assert not filled.exists()


@pytest.fixture
def read_from(monkeypatch):
    """The files of filters that were read, and how many words of each."""
    counted: Counter[str] = Counter()
    real = bloom_filter._read

    def counting(path, first, count):
        found = real(path, first, count)
        counted[path.name] += len(found)
        return found

    monkeypatch.setattr(bloom_filter, "_read", counting)
    return counted


@pytest.fixture
def copied(filled):
    """The directory of a closed store that has a snapshot of its 1,000 IDs, and 50 IDs more."""
    store = opened(filled)
    store.warm(10_000)
    assert filtered(store).idle
    put(store, keys(1_000, 1_050))
    assert filtered(store).idle, "the log has grown by less than an eighth"
    store.close()
    return filled


def test_a_filter_is_loaded_from_its_snapshot_and_what_the_log_has_after_it(copied, reads, read_from):
    store = opened(copied)
    assert not filtered(store).complete
    assert store.warm(10_000)
    assert read_from == {BITS: 2_048, LOG: 50}
    assert reads == []
    assert missing(store, keys(0, 1_050)) == []
    assert sum(filtered(store).may_hold(Hashed(store._key.hashes(keys(5_000, 6_000))))) < 50
    store.close()


def test_a_snapshot_is_written_and_read_in_steps_while_ids_are_written(filled, reads, read_from):
    """The IDs need more layers, and one eighth more of them needs another snapshot."""
    store, count = opened(filled), 1_000
    for _ in range(3):
        for _ in range(30):
            store.warm(20)
            put(store, keys(count, count + 200))
            count += 200
        while not filtered(store).idle:
            store.warm(20)
        hashes = filtered(store).snapshot.hashes
        assert count - hashes <= hashes // 8
        store.close()
        read_from.clear()
        store = opened(filled)
        while not filtered(store).complete:
            store.warm(20)
            put(store, keys(count, count + 10))
            count += 10
        assert missing(store, keys(0, count)) == []
        assert read_from[LOG] <= hashes // 8
    assert len(filtered(store).snapshot.layers) > 1
    assert reads == []
    store.close()


def older(path):
    """Somebody copies a directory, and copies only an older snapshot back."""
    kept = path.read_bytes()
    store = opened(path.parent)
    put(store, keys(1_050, 1_300))
    store.warm(10_000)
    store.close()
    assert path.read_bytes() != kept
    path.write_bytes(kept)


@pytest.mark.parametrize("damage", [cut, flip, zero_end, os.remove, older])
def test_without_its_snapshot_a_filter_is_loaded_from_the_log(copied, reads, read_from, damage):
    damage(copied / BITS)
    store = opened(copied)
    read_from.clear()
    assert not store.warm(10)
    put(store, keys(2_000, 2_100))
    assert store.warm(10_000)
    assert read_from[LOG] >= 1_050
    assert reads == []
    assert missing(store, [*keys(0, 1_050), *keys(2_000, 2_100)]) == []
    store.close()
    read_from.clear()
    again = opened(copied)
    assert again.warm(10_000)
    assert read_from[LOG] == 0, "a new snapshot was written"
    assert missing(again, [*keys(0, 1_050), *keys(2_000, 2_100)]) == []
    again.close()


def test_with_a_damaged_snapshot_and_a_damaged_log_the_keys_are_read(copied, reads):
    flip(copied / BITS)
    flip(copied / LOG)
    store = opened(copied)
    put(store, keys(2_000, 2_100))
    assert store.warm(10_000)
    assert len(reads) >= 1_050
    assert missing(store, [*keys(0, 1_050), *keys(2_000, 2_100)]) == []
    store.close()


def test_a_disk_that_is_too_full_for_a_snapshot_stops_nothing(filled, monkeypatch, caplog):
    store = opened(filled)
    assert not store.warm(100)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda _, data, __: len(data) - 1)
        assert store.warm(10_000)
        assert store.warm(10_000)
    assert caplog.text.count(".bits-new: the disk is full") == 1, "it is said once"
    assert filtered(store).snapshot is None
    assert not list(filled.glob("*.bits*"))
    put(store, keys(1_000, 1_100))
    assert filtered(store).idle
    put(store, keys(1_100, 1_200))
    assert store.warm(10_000)
    assert filtered(store).snapshot.hashes == 1_200, "it is tried again when the log has grown by an eighth"
    assert missing(store, keys(0, 1_200)) == []
    store.close()


def test_filters_are_loaded_before_snapshots_are_written(filled):
    store = opened(filled)
    store.warm(1_000)
    put(store, keys(2_000, 2_500), segment=1_000)
    store.close()
    again = opened(filled)
    while not filtered(again, 1_000).complete or not filtered(again).complete:
        again.warm(20)
        assert filtered(again)._copy is None or not filtered(again).complete
        assert filtered(again, 1_000).snapshot is None
    again.close()


def test_the_same_secret_gives_the_same_hashes_whatever_the_batch():
    ids = [b"a", b"order-0815", b"x" * 33, b"y" * 200, b""]
    together = HashKey(b"secret").hashes(ids)
    assert [HashKey(b"secret").hashes([each])[0] for each in ids] == list(together)
    assert not set(together) & set(HashKey(b"other").hashes(ids[:-1]))
    assert len(HashKey(b"secret").hashes([])) == 0


@pytest.mark.parametrize("shape", [b"%012d", b"order-%08x", b"\x80\x00\x00\x00\x00\x00\x00%d\x80"])
def test_ids_that_resemble_each_other_do_not_collide(shape):
    ids = [shape % number for number in range(200_000)]
    key = HashKey(b"secret")
    assert len(set(key.hashes(ids).tolist())) == len(ids)
    held = BloomFilter(len(ids) // 2)
    held.add(Hashed(key.hashes(ids[::2])))
    assert held.may_hold(Hashed(key.hashes(ids[::2]))).all()
    assert held.may_hold(Hashed(key.hashes(ids[1::2]))).mean() < 0.01
