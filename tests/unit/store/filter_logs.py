"""Small stores whose Bloom filters are loaded from their logs piece by piece, and damage to these logs."""

import os

from dedup.store import bloom_filter, rocks
from dedup.store.base import StoreIdentity
from dedup.store.changelog import TaskRecord
from dedup.store.rocks import RocksMemory, RocksStore

IDENTITY = StoreIdentity("orders", 3, "q7BvLZ1nQ8i")
RECORD = TaskRecord(b"f" * 16, 5_000, (), 42, 100)
MEMORY = RocksMemory(cache_bytes=1 << 20, write_buffer_bytes=1 << 20)
LOG = "filter-log-0"
BITS = "filter-log-0.bits"


def load_in_pieces(monkeypatch):
    """Load nothing on open, and small pieces afterward."""
    monkeypatch.setattr(rocks, "_FILTERED_ON_OPEN_IDS", -1)
    monkeypatch.setattr(bloom_filter, "PIECE_IDS", 50)
    monkeypatch.setattr(bloom_filter, "PIECE_WORDS", 700)
    monkeypatch.setattr(bloom_filter, "WORDS_PER_KEY", 16)
    monkeypatch.setattr(bloom_filter, "SNAPSHOT_FROM_IDS", 100)


def opened(directory, **options):
    return RocksStore.open(directory, identity=IDENTITY, memory=MEMORY, **options)


def keys(first, last):
    return [b"k%07d" % number for number in range(first, last)]


def put(store, ids, segment=0):
    store.apply({segment: dict.fromkeys(ids, b"v")}, RECORD, store.position + len(ids))


def missing(store, ids, segments=(0,)):
    found = store.get_each(segments, ids)
    return [each for each in ids if not any(each in part for part in found.values())]


def cut(path):
    os.truncate(path, path.stat().st_size - 8)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))
