"""Sets the options of RocksDB's column families, reads a segment's keys in order, and deletes a segment's keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final, cast

import rocksdict

_MEMTABLE_BYTES: Final = 4 << 20
_MEMTABLES: Final = 4
"""The maximum number of RocksDB write buffers per column family. When all of them are full, writes wait for a flush."""
_ARENA_BLOCK_BYTES: Final = 16 << 10
"""The size of the blocks in which memtables allocate memory. It is small because all busy stores allocate at the same
time.
"""
_BUCKETS: Final = 1 << 14
TABLE_BYTES: Final = 8 * _BUCKETS
"""The memory that an empty hash memtable uses, in bytes."""
LEAST_FLUSH_BYTES: Final = 2 * TABLE_BYTES
"""The memtable size, in bytes, below which a flush frees too little memory."""
_DELETIONS_PER_FLUSH: Final = 100
"""The number of deleted segments after which a family is flushed. Each deletion in a memtable slows down lookups. After
1,500 deletions, a lookup takes 70 µs longer.
"""
_WAL_BYTES: Final = 16 << 20
_FILES_TO_MERGE: Final = 12
"""The number of sorted runs at which RocksDB merges runs of similar size (universal compaction), so that each ID is
rewritten only a few times.
"""
FILES_TO_SLOW_DOWN: Final = 40
_FILES_TO_STOP: Final = 60
_OPEN_FILES: Final = 512
"""The maximum number of files that a store keeps open. With a limit of 64 and 100,000,000 IDs in 4 stores, reopening
files took half of the worker's time.
"""
_OPEN_FILES_SHARD_BITS: Final = 4
"""RocksDB divides the limit of open files among 2**bits groups. With the default of 6 bits, a group gets only 8 files.
"""
_BLOOM_BITS: Final = 10
LONGEST_KEY: Final = 33
"""The length of the longest state key, in bytes. With this prefix length, a hash memtable finds each key."""


@dataclass(slots=True)
class Family:
    """An open column family. rocksdict flushes a family when ``rows`` is freed, so the store keeps ``rows``."""

    name: str
    """The start of the first segment that the family contained, or the name of the shared family."""
    rows: rocksdict.Rdict
    handle: rocksdict.ColumnFamily
    hashed: bool
    """True if the family has a hash memtable, which accepts keys equally fast in any order."""
    deletions: int = 0
    """The number of segments that were deleted from the family since the last flush."""

    def release(self) -> None:
        """Free the family, which must not be used afterward.

        Otherwise, an error's traceback that refers to the family would keep the database open through ``rows`` and
        ``handle``.
        """
        del self.rows, self.handle

    def count_deletion(self) -> None:
        """Count a deleted segment, and flush the family if its memtable is large or contains 100 deletions."""
        self.deletions += 1
        active_bytes = self.rows.property_int_value("rocksdb.cur-size-active-mem-table") or 0
        if self.deletions >= _DELETIONS_PER_FLUSH or active_bytes >= LEAST_FLUSH_BYTES:
            self.deletions = 0
            self.rows.flush(wait=False)


def rocks_options(
    cache: rocksdict.Cache,
    write_buffers: rocksdict.WriteBufferManager,
    env: rocksdict.Env,
    *,
    hashed: bool,
    segment: bool,
) -> rocksdict.Options:
    """Return the options of a segment's column family or, with ``segment=False``, of the database.

    In a measurement, inserting or finding a key took 35% to 40% less time in a hash memtable than in a skip list. The
    write buffers are small, because a worker may have 256 stores.
    """
    table = rocksdict.BlockBasedOptions()
    table.set_bloom_filter(_BLOOM_BITS, block_based=False)
    table.set_block_cache(cache)
    # Every family uses raw mode, because rocksdict's other mode unpickles the data that it reads.
    options = rocksdict.Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.create_if_missing(create_if_missing=True)
    options.set_paranoid_checks(True)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    options.set_max_total_wal_size(_WAL_BYTES)
    options.set_write_buffer_manager(write_buffers)
    options.set_env(env)
    options.set_write_buffer_size(_MEMTABLE_BYTES)
    options.set_max_write_buffer_number(_MEMTABLES)
    if segment:
        # The default column family has only a few keys, so RocksDB merges its files by the default rules.
        options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
        options.set_level_zero_file_num_compaction_trigger(_FILES_TO_MERGE)
        options.set_level_zero_slowdown_writes_trigger(FILES_TO_SLOW_DOWN)
        options.set_level_zero_stop_writes_trigger(_FILES_TO_STOP)
    options.set_arena_block_size(_ARENA_BLOCK_BYTES)
    options.set_allow_concurrent_memtable_write(False)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_max_open_files(_OPEN_FILES)
    options.set_table_cache_num_shard_bits(_OPEN_FILES_SHARD_BITS)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(0)  # `limit_log` limits it
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    if hashed:
        options.set_prefix_extractor(rocksdict.SliceTransform.create_max_len_prefix(LONGEST_KEY))
        options.set_memtable_factory(rocksdict.MemtableFactory.hash_link_list(_BUCKETS))  # type: ignore[call-arg]  # the stub lacks it
    return options


def pairs(family: rocksdict.Rdict, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """Yield the (key, value) pairs whose keys begin with ``prefix``, in key order, with the prefix removed.

    Raises RocksDB's error if a damaged block ends the read early.
    """
    last_key = prefix
    # In raw mode, keys and values are bytes.
    for key, value in cast("Iterator[tuple[bytes, bytes]]", family.items(from_key=prefix, read_opt=_in_order())):
        if not key.startswith(prefix):
            return
        last_key = key
        yield key[len(prefix) :], value
    _refuse_early_end(family, last_key)


def keys_after(family: rocksdict.Rdict, prefix: bytes, key: bytes, limit: int) -> list[bytes]:
    """Return up to ``limit`` keys that follow ``key``, in order.

    Neither ``key`` nor the returned keys include the prefix. Raises RocksDB's error if a damaged block ends the read
    early.
    """
    found = cast("Iterator[bytes]", family.keys(from_key=prefix + key + b"\0", read_opt=_in_order()))
    keys = list(takewhile(lambda each: each.startswith(prefix), islice(found, limit)))
    if len(keys) < limit:
        _refuse_early_end(family, keys[-1] if keys else prefix)
    return [each[len(prefix) :] for each in keys]


def delete_all(batch: rocksdict.WriteBatch, family: rocksdict.ColumnFamily, prefix: bytes) -> None:
    """Add a deletion of all of a segment's keys to a batch."""
    batch.delete_range(prefix, prefix + b"\xff" * (LONGEST_KEY + 1), family)


def _in_order() -> rocksdict.ReadOptions:
    """Return the options for reading keys in sorted order, even from a hash memtable."""
    options = rocksdict.ReadOptions()
    options.set_total_order_seek(True)
    return options


def _refuse_early_end(family: rocksdict.Rdict, last_key: bytes) -> None:
    """Raise RocksDB's error if a damaged block silently ended an iteration after ``last_key``."""
    iterator = family.iter(_in_order())
    iterator.seek(last_key)
    if iterator.valid():
        iterator.next()
    iterator.status()
