"""No ID is missed, whatever happens to the logs of Bloom filters and to the stores that write them."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.store import bloom_filter
from dedup.store.bloom_filter import BloomFilter, Hashed, SegmentFilter
from tests.unit.store.filter_logs import cut, flip, keys, load_in_pieces, missing, opened, put, zero


@pytest.fixture(autouse=True)
def lazily(monkeypatch):
    load_in_pieces(monkeypatch)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2), st.integers(1, 60)),
        st.tuples(st.just("warm"), st.integers(1, 200)),
        st.tuples(st.sampled_from(["reopen", "kill", "cut", "flip", "remove", "unlogged"])),
        st.tuples(st.sampled_from(["cut", "flip", "remove"]), st.just("bits")),
    ),
    min_size=1,
    max_size=25,
)


def play(directory, steps):
    """Whatever was written is found, after every step."""
    store, known, count = opened(directory), {0: [], 1_000: [], 2_000: []}, 0
    for number, (step, *arguments) in enumerate(steps):
        log = directory / f"filter-log-{1_000 * (number % 3)}"
        if arguments == ["bits"]:
            log = log.with_suffix(".bits")
        if step == "put":
            segment, ids = 1_000 * arguments[0], keys(count, count + arguments[1])
            count += len(ids)
            put(store, ids, segment)
            known[segment] += ids
        elif step == "warm":
            store.warm(arguments[0])
        else:
            store.close()
            if log.exists() and step in {"cut", "flip", "zero", "remove"}:
                {"cut": cut, "flip": flip, "zero": zero, "remove": os.remove}[step](log)
            if log.exists() and step == "kill":
                with log.open("ab") as file:
                    file.write(os.urandom(80))  # of a batch that the store did not get
            store = opened(directory, log_filters=step != "unlogged")
        for segment, ids in known.items():
            if len(ids) >= 16:
                assert missing(store, ids, [segment]) == [], (number, step)
    store.close()


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_no_id_is_missed_whatever_happens_to_the_logs(tmp_path_factory, steps):
    play(tmp_path_factory.mktemp("store") / "3", steps)


def no_mark(self, mark, *, first_key, ids, position):
    self._load = self._log = mark
    self._filter = BloomFilter(mark.hashes)


def no_snapshot_crc(self, snapshot, keys):
    part = self._filter.part(self._copied, min(keys, 50) * 16)
    part |= bloom_filter._read(self._snapshot_path, self._copied, len(part))
    self._copied += len(part)
    if self._copied == snapshot.words:
        self._loaded, self._loaded_crc = snapshot.hashes, snapshot.log_crc
        self._end_copy()
    return -(-len(part) // 16)


def no_crc(self, mark, keys, first_key):
    count = min(keys * 8, 50, mark.hashes - self._loaded)
    self._loaded += count
    self._filter.add(Hashed(bloom_filter._read(self._path, self._loaded - count, count)))
    if self._loaded == mark.hashes:
        self._load = None
    return -(-count // 8)


@pytest.mark.parametrize(
    ("name", "wrong", "steps"),
    [
        ("load", no_mark, [("put", 0, 40), ("unlogged",), ("put", 0, 40), ("reopen",), ("warm", 90)]),
        ("_read_log", no_crc, [("put", 0, 40), ("warm", 1), ("warm", 1), ("zero",), ("warm", 90)]),
        (
            "_read_snapshot",
            no_snapshot_crc,
            [("put", 0, 150), ("warm", 900), ("reopen",), ("zero", "bits"), ("warm", 900)],
        ),
    ],
)
def test_a_store_that_trusts_any_log_is_found_out(tmp_path, monkeypatch, name, wrong, steps):
    play(tmp_path / "right", steps)
    monkeypatch.setattr(SegmentFilter, name, wrong)
    with pytest.raises(AssertionError):
        play(tmp_path / "wrong", steps)
