"""Measures one RocksDB store: write-ahead log on or off, lookups with and without the prefilter, bytes an ID.

    python bench/store.py [IDS]        about 20 s at the default of 600,000

Times are CPU seconds of the calling thread, so that a busy machine does not blur them; flush and compaction run in
other threads and show in the second figure only (CPU of the whole process).
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dedup.store.base import StoreIdentity
from dedup.store.changelog import TaskRecord, decode_sightings, encode_single_column
from dedup.store.rocks import RocksStore

IDENTITY = StoreIdentity("bench", 0, "none")
HOUR_MS = 3_600_000
RECORD = TaskRecord(b"f" * 16, 0, (), 0, HOUR_MS)
NOW_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS
BATCH = 5_000


def random_ids(count: int) -> list[bytes]:
    noise = os.urandom(16 * count)
    return [b"u" + noise[at : at + 16] for at in range(0, 16 * count, 16)]


def rate(count: int, work: Callable[[], object], rounds: int = 3) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return count / best


def fill(store: RocksStore, ids: list[bytes], segments: int = 1) -> str:
    whole, began, longest = time.process_time(), time.thread_time(), 0.0
    for at in range(0, len(ids), BATCH):
        there = ids[at : at + BATCH]
        values = encode_single_column(range(NOW_MS, NOW_MS + len(there)), 0, 0, range(at, at + len(there)))
        segment = NOW_MS + at * segments // len(ids) * HOUR_MS
        batch_began = time.perf_counter()
        store.apply({segment: dict(zip(there, values, strict=True))}, RECORD, at + len(there))
        longest = max(longest, time.perf_counter() - batch_began)
    took, in_all = time.thread_time() - began, time.process_time() - whole
    of_all = f"{len(ids) / in_all / 1e3:.0f} k per CPU-s of all threads; longest {longest * 1e3:.0f} ms"
    return f"{len(ids) / took / 1e3:6.0f} k IDs/s ({of_all})"


def look_up(store: RocksStore, segments: tuple[int, ...], ids: list[bytes]) -> None:
    for at in range(0, len(ids), BATCH):
        store.get_each(segments, ids[at : at + BATCH])


def measure_log(ids: list[bytes], state: Path) -> None:
    for turn in range(5):
        for log in ("on", "off"):
            store = RocksStore.open(state / f"{log}{turn}", identity=IDENTITY)
            # rocksdict 0.3.29: a property, though its stub says method.
            store._write_options.disable_wal = log == "off"  # type: ignore[method-assign,assignment]  # noqa: SLF001
            print(f"apply, log {log:3}   {fill(store, ids)}")
            store.wipe()


def measure_gil(store: RocksStore) -> None:
    gaps: list[float] = []
    done = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ids = random_ids(200_000)
    writes = {NOW_MS: dict.fromkeys(ids, b"v" * 15)}
    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    store.apply(writes, RECORD, store.position)
    took = time.perf_counter() - began
    done.set()
    thread.join()
    print(f"one apply of 200 k IDs took {took * 1e3:.0f} ms; another thread stood still for {max(gaps) * 1e3:.0f} ms")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 600_000
    ids, strangers = random_ids(count), random_ids(100_000)
    with tempfile.TemporaryDirectory() as temporary:
        state = Path(temporary)
        measure_log(ids, state)
        store = RocksStore.open(state / "0", identity=IDENTITY)
        print(f"apply, 3 segments {fill(store, ids, segments=3)}")
        known = random.sample(ids, 50_000)
        for asked in (tuple(store.segments())[:1], tuple(store.segments())):
            unknown_rate = rate(len(strangers), partial(look_up, store, asked, strangers))
            known_rate = rate(len(known), partial(look_up, store, asked, known))
            print(f"{len(asked)} segments: unknown {unknown_rate / 1e3:.0f} k/s, known {known_rate / 1e3:.0f} k/s")
        memory = sum(held.filter.size_bytes for held in store._segments.values())  # noqa: SLF001
        print(f"per ID: {store.approximate_bytes() / count:.1f} bytes on disk, {memory / count:.1f} of prefilter")
        store.close()
        began = time.perf_counter()
        store = RocksStore.open(state / "0", identity=IDENTITY)
        print(f"reopened in {(time.perf_counter() - began) * 1e3:.0f} ms")
        print(f"filters from their logs: {rate(count, lambda: store.warm(1 << 40), 1) / 1e3:.0f} k IDs/s")
        store.close()
        for path in (state / "0").glob("filter-log-*"):
            path.unlink()
        store = RocksStore.open(state / "0", identity=IDENTITY)
        unknown_rate = rate(len(strangers), lambda: look_up(store, tuple(store.segments()), strangers))
        print(f"without filters, {len(store.segments())} segments: unknown {unknown_rate / 1e3:.0f} k/s")
        print(f"filters from the keys: {rate(count, lambda: store.warm(1 << 40), 1) / 1e3:.0f} k IDs/s")
        print(f"iterated: {rate(count, lambda: sum(1 for _ in store.sightings()), 1) / 1e3:.0f} k IDs/s")
        measure_gil(store)
        store.wipe()
    values = encode_single_column(range(NOW_MS, NOW_MS + BATCH), 0, 0, range(BATCH))
    times = list(range(NOW_MS, NOW_MS + BATCH))
    offsets = list(range(BATCH))
    encode_rate = rate(BATCH, lambda: encode_single_column(times, 0, 0, offsets), 50)
    decode_rate = rate(BATCH, lambda: [None for value in values if not decode_sightings(value)], 50)
    print(f"encode {1e9 / encode_rate:.0f} ns, decode {1e9 / decode_rate:.0f} ns a value")


if __name__ == "__main__":
    main()
