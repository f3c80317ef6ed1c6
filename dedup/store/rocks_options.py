"""How RocksDB is set up, and the memory that all stores of one worker share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    DBRecoveryMode,
    Env,
    MemtableFactory,
    Options,
    SliceTransform,
    WriteBufferManager,
)

_MEMTABLE_BYTES: Final = 4 << 20
_MEMTABLES: Final = 4
"""Of a family, before writes wait for a flush."""
_ARENA_BLOCK_BYTES: Final = 64 << 10
_WAL_BYTES: Final = 16 << 20
_FILES_TO_MERGE: Final = 12
"""New files of a segment before they are merged with its older ones: a merge rewrites the whole segment, and with 4,
RocksDB's own, each ID several times. Look-ups pass the prefilter and Bloom filters before they meet a file."""
_FILES_TO_SLOW_DOWN: Final = 40
_FILES_TO_STOP: Final = 60
_OPEN_FILES: Final = 64
_BLOOM_BITS: Final = 10
_BUCKETS: Final = 1 << 14
_TABLE_BYTES: Final = 8 * _BUCKETS
"""What an empty hashed memtable takes."""
_TABLES_SHARE: Final = 4
"""One part in so many of the write buffers may go to the tables of hashed memtables."""
_LONGEST_KEY: Final = 33
"""Bytes of a state key at most; so a key's prefix is the key, and a hashed memtable finds it at once."""


_NICEST: Final = 19
_NICER_BY: Final = 10
"""A tenth of the worker's own weight. RocksDB's own way is 15 to 19 steps: beside other busy processes a flush then
gets no time at all, and a worker that closes a store waits for it (measured: over 10 s)."""


def _yield_to_records() -> None:
    """RocksDB's threads give way to the worker's own on Linux, where each thread has a priority of its own.

    A flush sorts a memtable for some hundred ms; it has seconds for that, and a record has not.
    """
    wanted = min(_NICEST, os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICER_BY)
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            mine = (thread / "comm").read_text(encoding="utf-8").startswith("rocksdb:")
            if mine and os.getpriority(os.PRIO_PROCESS, int(thread.name)) < wanted:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), wanted)


class RocksMemory:
    """The memory that all stores of one worker share: cached blocks, and writes not yet in files."""

    def __init__(self, *, cache_bytes: int = 64 << 20, write_buffer_bytes: int = 64 << 20) -> None:
        self.cache: Final = Cache(cache_bytes)
        self.write_buffers: Final = WriteBufferManager(write_buffer_bytes, allow_stall=False)
        self.env: Final = Env()
        self.env.set_background_threads(1)
        self.env.set_high_priority_background_threads(1)
        _yield_to_records()
        self._tables = write_buffer_bytes // _TABLES_SHARE // _TABLE_BYTES

    def take_table(self) -> bool:
        """Tell whether one more family may have a hashed memtable; if so it is counted until `give_tables`."""
        if self._tables <= 0:
            return False
        self._tables -= 1
        return True

    def give_tables(self, count: int) -> None:
        """So many families with a hashed memtable are closed or dropped."""
        self._tables += count


def rocks_options(memory: RocksMemory, *, hashed: bool, segment: bool = True) -> Options:
    """Return the options of a segment's family, or of a store itself; small, as one worker may hold 256 stores.

    A hashed memtable takes a key in half the time that a skip list does, in any order (measured: 0.6 against 1.0 us,
    and 1.5 against 2.3 us to find one). Reading it in key order needs `total_order_seek`.
    """
    table = BlockBasedOptions()
    table.set_bloom_filter(_BLOOM_BITS, block_based=False)
    table.set_block_cache(memory.cache)
    # Raw mode always: rocksdict's other mode executes pickles that it reads.
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.create_if_missing(create_if_missing=True)
    options.set_paranoid_checks(True)
    options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    options.set_max_total_wal_size(_WAL_BYTES)
    options.set_write_buffer_manager(memory.write_buffers)
    options.set_env(memory.env)
    options.set_write_buffer_size(_MEMTABLE_BYTES)
    options.set_max_write_buffer_number(_MEMTABLES)
    if segment:
        # A store's own family holds a handful of keys: there, files are merged as soon as RocksDB does by itself.
        options.set_level_zero_file_num_compaction_trigger(_FILES_TO_MERGE)
        options.set_level_zero_slowdown_writes_trigger(_FILES_TO_SLOW_DOWN)
        options.set_level_zero_stop_writes_trigger(_FILES_TO_STOP)
    options.set_arena_block_size(_ARENA_BLOCK_BYTES)
    options.set_allow_concurrent_memtable_write(False)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_max_open_files(_OPEN_FILES)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(1 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    if hashed:
        options.set_prefix_extractor(SliceTransform.create_max_len_prefix(_LONGEST_KEY))
        options.set_memtable_factory(MemtableFactory.hash_link_list(_BUCKETS))  # type: ignore[call-arg]  # the stub lacks it
    return options
