"""Implements the state store in RocksDB, with one column family per segment, so that whole segments can be dropped.

Each `apply` writes one atomic batch with the write-ahead log enabled (docs/decisions/0001-wal.md), so the state
survives a SIGKILL. A power failure usually loses only the newest batches along with their position. The task then reads
these batches from the changelog again. If a power failure loses an older log file but not a newer one, `open` cannot
detect the loss.

RocksDB may open a store with damaged files and report no error. `open` raises TaskCorrupted if a segment is missing or
older than its entry in the default column family, or if the MANIFEST is shorter than at the last `apply`. In a test
with a truncated MANIFEST, RocksDB silently ignored the files that the missing part had listed.

rocksdict holds the GIL during every call, so callers keep their batches small.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, repeat
from pathlib import Path
from typing import Final, Self, cast

import rocksdict

from dedup.errors import DedupError, InvariantBroken, TaskCorrupted
from dedup.store.base import StoreIdentity
from dedup.store.bloom_filter import Hashed, HashKey, LogMark, SegmentFilter
from dedup.store.changelog import TaskRecord, Writes, decode_task_record, encode_task_record, refuse_unstorable
from dedup.store.column_family import (
    FILES_TO_SLOW_DOWN,
    LEAST_FLUSH_BYTES,
    TABLE_BYTES,
    Family,
    delete_all,
    keys_after,
    pairs,
    rocks_options,
)
from dedup.store.directory import (
    FILTER_LOG,
    NEW_SNAPSHOT_SUFFIX,
    NOT_THE_STORES_FAULT,
    RESTORE,
    SNAPSHOT_SUFFIX,
    delete_store,
    encode_identity,
    in_use,
    limit_log,
    prepare_directory,
    refuse_other_owner,
    remedy_of,
)

_POSITION: Final = struct.Struct(">Q")
_SEGMENT: Final = struct.Struct(">QQQQ")
_STATE: Final = struct.Struct(">QQQ")
_CHECKSUM_BYTES: Final = 4
_IDENTITY_KEY: Final = b"identity"
_STATE_KEY: Final = b"state"
_SEGMENT_PREFIX: Final = b"segment/"
_MARK_PREFIX: Final = b"filter/"
_FAMILY_PREFIX: Final = b"family/"
_SECRET_KEY: Final = b"filter-secret"
_SECRET_BYTES: Final = 32
_LAST_POSITION: Final = b""
"""The key of a segment's last position. State keys are never empty, so the empty key sorts first."""

_FILTERED_ON_OPEN_IDS: Final = 300_000
"""The maximum number of IDs that `open` reads into a segment's filter (in 0.15 s). `warm` reads larger segments."""
_LOCKED: Final = "While lock file", "lock hold by current process"
"""Texts in RocksDB's error messages that show that another process, or this one, has the store open."""
_FEW_IDS: Final = 16
"""The number of IDs below which querying RocksDB is faster than hashing the IDs."""

_MANY_STORES: Final = 16
_FLUSH_EVERY_S: Final = 0.05
_STORES_PER_BUFFERS: Final = 128
_MOST_TIMES: Final = 4
"""With more than `_STORES_PER_BUFFERS` stores, the write buffers grow in proportion to the number of stores, up to
`_MOST_TIMES` times their size. If 256 stores shared 64 MiB, their memtables would be flushed after a few hundred IDs.
"""
_TABLES_SHARE: Final = 4
"""The hash tables of all hash memtables may use at most the memory of the write buffers divided by this number."""
_MOST_OWN_FAMILIES: Final = 8
_SHARED: Final = "shared"
_START: Final = struct.Struct(">q")
"""The maximum number of column families that are not shared, the name of the family that all further segments share,
and the prefix of a segment's keys in the shared family. The more families exist, the longer the creation of a family
takes.
"""
_MOST_FREE_FAMILIES: Final = 3
_MOST_REUSED_BYTES: Final = 256 << 10
"""The maximum number of emptied column families that a store keeps for its next segments, and the maximum size of a
family's files. Creating and dropping a family takes 15 ms, because RocksDB then writes the options of all families.
Deleting all keys of a family takes less than 0.1 ms, but frees no space until RocksDB merges the family's files.
"""
_APPLIES_PER_LOOK: Final = 64
"""The number of `apply` calls between checks of the size of RocksDB's LOG file."""
_NICEST: Final = 19
_NICER_BY: Final = 10
"""The difference between the nice values of RocksDB's threads and of the worker, which gives the threads a tenth of the
worker's CPU share. With a difference of 15 to 19, closing a store on a busy machine took over 10 s.
"""


@dataclass(frozen=True, slots=True)
class Manifest:
    """RocksDB's MANIFEST file, which lists the database's current files and grows until the database is reopened."""

    number: int
    size_bytes: int

    @classmethod
    def of(cls, directory: Path) -> Self | None:
        """Return the MANIFEST that the file CURRENT names, or None if no such file exists."""
        try:
            name = (directory / "CURRENT").read_text(encoding="ascii").strip()
            return cls(int(name.removeprefix("MANIFEST-")), (directory / name).stat().st_size)
        except (FileNotFoundError, ValueError):
            return None

    def now(self, directory: Path) -> Self:
        """Return this MANIFEST with its current length, or the new MANIFEST if RocksDB has started one."""
        path = f"{directory}/MANIFEST-{self.number:06}"
        try:
            return replace(self, size_bytes=os.stat(path).st_size)  # noqa: PTH116  twice as fast, in every apply
        except FileNotFoundError:
            # RocksDB starts a new MANIFEST when the old MANIFEST has become too long.
            return type(self).of(directory) or self

    def was_cut(self, found: Self) -> bool:
        """Return whether ``found`` is a truncated version of this MANIFEST."""
        return found.number == self.number and found.size_bytes < self.size_bytes

    def __str__(self) -> str:
        return f"MANIFEST-{self.number:06} of {self.size_bytes} bytes"


@contextlib.contextmanager
def errors_of(directory: Path) -> Iterator[None]:
    """Convert RocksDB's errors, which rocksdict raises as plain Exceptions, into dedup's errors."""
    try:
        yield
    except Exception as error:
        # The error may outlive the store, and an iterator in the error's traceback would keep the database open.
        traceback.clear_frames(error.__traceback__)
        text = str(error)
        if type(error) is not Exception:
            raise
        if any(reason in text for reason in _LOCKED):
            raise in_use(directory) from error
        if any(reason in text for reason in NOT_THE_STORES_FAULT):
            raise DedupError(
                f"{directory}: {text}. Nothing is lost: {remedy_of(text)}; what is missing here is restored from the "
                "changelog."
            ) from error
        raise TaskCorrupted(f"{directory}: {text}. {RESTORE}") from error


@dataclass(frozen=True, slots=True)
class _SegmentEntry:
    width_ms: int
    """The greatest width with which the segment was written, or 0 while the width is unknown."""
    birth: int
    """The store's position before the first write to the segment."""
    last_position: int
    """The position of the last batch that wrote to the segment."""
    ids: int
    """The number of keys written. A key that is written twice counts twice."""

    def encode(self) -> bytes:
        return _sealed(_SEGMENT.pack(self.width_ms, self.birth, self.last_position, self.ids))

    @classmethod
    def decode(cls, value: bytes, name: str) -> Self:
        body = _unsealed(value, f"the entry of segment {name}")
        return cls(*_SEGMENT.unpack(body))


@dataclass(frozen=True, slots=True)
class _StateEntry:
    """The changelog position and the task record, in a single value so that neither can be newer than the other."""

    position: int
    record: TaskRecord | None
    manifest: Manifest
    """RocksDB's MANIFEST before this entry was written."""

    def encode(self) -> bytes:
        head = _STATE.pack(self.position, self.manifest.number, self.manifest.size_bytes)
        return _sealed(head + (b"" if self.record is None else encode_task_record(self.record)))

    @classmethod
    def decode(cls, value: bytes) -> Self:
        body = _unsealed(value, "the task record of the store")
        position, number, size_bytes = _STATE.unpack_from(body)
        record = body[_STATE.size :]
        return cls(position, decode_task_record(record) if record else None, Manifest(number, size_bytes))


def _sealed(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES) + body


def _unsealed(sealed: bytes, what: str) -> bytes:
    body = sealed[_CHECKSUM_BYTES:]
    if len(body) < _STATE.size or zlib.crc32(body).to_bytes(_CHECKSUM_BYTES) != sealed[:_CHECKSUM_BYTES]:
        raise TaskCorrupted(f"{what} is damaged: its checksum differs. {RESTORE}")
    return body


def _yield_to_records() -> None:
    """Lower the priority of RocksDB's threads, because a flush can wait, but records cannot."""
    wanted = min(_NICEST, os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICER_BY)
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            mine = (thread / "comm").read_text(encoding="utf-8").startswith("rocksdb:")
            if mine and os.getpriority(os.PRIO_PROCESS, int(thread.name)) < wanted:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), wanted)


class RocksMemory:
    """The memory that all of a worker's stores share for the block cache and the write buffers."""

    def __init__(self, *, cache_bytes: int = 64 << 20, write_buffer_bytes: int = 64 << 20) -> None:
        self.cache: Final = rocksdict.Cache(cache_bytes)
        self.write_buffers: Final = rocksdict.WriteBufferManager(write_buffer_bytes, allow_stall=False)
        self.env: Final = rocksdict.Env()
        self.env.set_background_threads(1)
        self.env.set_high_priority_background_threads(1)
        _yield_to_records()
        self._write_buffer_bytes: Final = write_buffer_bytes
        self._stores = 0
        self._next_flush_s = 0.0
        self._tables = write_buffer_bytes // _TABLES_SHARE // TABLE_BYTES

    def add_stores(self, count: int) -> None:
        """Add ``count`` (negative for closed stores) to the number of open stores, and resize the write buffers."""
        self._stores += count
        times = min(max(1.0, self._stores / _STORES_PER_BUFFERS), _MOST_TIMES)
        self.write_buffers.set_buffer_size(int(self._write_buffer_bytes * times))

    def flush_in_turn(self, family: rocksdict.Rdict) -> None:
        """Flush the family's memtable if it is large, the write buffers are half full, and 16 or more stores are open.

        If the write buffers became full, RocksDB would flush half of the stores at once and delay records by a second.
        """
        now_s = time.monotonic()
        if self._stores < _MANY_STORES or now_s < self._next_flush_s:
            return
        used = self.write_buffers.get_usage()
        if 2 * used < self.write_buffers.get_buffer_size():
            return
        names = "rocksdb.cur-size-active-mem-table", "rocksdb.num-immutable-mem-table"
        active_bytes, waiting = (family.property_int_value(name) or 0 for name in names)
        if waiting or active_bytes < max(used // self._stores, LEAST_FLUSH_BYTES):
            return
        # With more level-0 files, even a flush with wait=False may wait for a merge.
        if int(family.property_value("rocksdb.num-files-at-level0") or 0) < FILES_TO_SLOW_DOWN // 2:
            self._next_flush_s = now_s + _FLUSH_EVERY_S
            # This flush is optional. If the store is damaged, the next write reports the damage.
            with contextlib.suppress(Exception):
                family.flush(wait=False)

    def options(self, *, hashed: bool, segment: bool = True) -> rocksdict.Options:
        """Return the options of a segment's column family or, with ``segment=False``, of the database."""
        return rocks_options(self.cache, self.write_buffers, self.env, hashed=hashed, segment=segment)

    def take_table(self) -> bool:
        """Reserve memory for a hash memtable and return True, or return False if too little memory is left."""
        if self._tables <= 0:
            return False
        self._tables -= 1
        return True

    def give_tables(self, count: int) -> None:
        """Release the memory reserved for ``count`` hash memtables."""
        self._tables += count


@dataclass(slots=True)
class _Segment:
    family: Family
    entry: _SegmentEntry
    filter: SegmentFilter
    prefix: bytes
    """The prefix of the segment's keys in a shared column family; empty if the family is not shared."""


class RocksStore:
    """The state store of one task in one directory. Use ``open`` to create an instance."""

    def __init__(
        self, directory: Path, db: rocksdict.Rdict, memory: RocksMemory, families: Mapping[str, bool], *, logged: bool
    ) -> None:
        self._directory: Final = directory
        self._logged: Final = logged
        self._key = HashKey(b"")
        self._db: Final = db
        self._memory: Final = memory
        self._families: Final = {name: self._opened(name, hashed=hashed) for name, hashed in families.items()}
        self._write_options: Final = rocksdict.WriteOptions()
        self._write_options.sync = False
        self._segments: dict[int, _Segment] = {}
        self._free: list[Family] = []
        """Empty column families for the next segments."""
        self.task_record: TaskRecord | None = None
        """The last applied task record, or None in a new store."""
        self.position = 0
        """The changelog offset from which a restore continues, or 0 in a new store."""
        self._manifest = Manifest.of(directory) or Manifest(0, 0)
        self._applies = self._log_bytes = 0
        self._closed = False
        memory.add_stores(1)

    @classmethod
    def open(
        cls, directory: Path, *, identity: StoreIdentity, memory: RocksMemory | None = None, log_filters: bool = True
    ) -> Self:
        """Open the store in a directory, or create a new store if the directory is empty.

        With ``log_filters=False``, the Bloom filters are not saved for the next `open`, which then reads all keys.
        ``log_filters=False`` suits topologies that write the same IDs repeatedly, because a filter's log grows by one
        hash per write.

        Raises TaskCorrupted if the store is damaged or belongs to another task. Raises StateIncompatible if the
        directory is in use, is a symbolic link, is not writable, or contains foreign files.
        """
        prepare_directory(directory)
        memory = memory or RocksMemory()
        options = memory.options(hashed=False, segment=False)
        with errors_of(directory):
            manifest = Manifest.of(directory)
            exists = (directory / "CURRENT").exists()
            if not exists and any(path.suffix in {".sst", ".log"} for path in directory.iterdir()):
                # Without this check, RocksDB would create a new store and replay the log of the old store into it.
                raise TaskCorrupted(f"{directory}: the file CURRENT is missing. {RESTORE}")
            names = rocksdict.Rdict.list_cf(str(directory), options) if exists else []
            hashed = {name: name != _SHARED and memory.take_table() for name in names if name != "default"}
            families = {name: memory.options(hashed=each) for name, each in hashed.items()}
            families["default"] = options
            try:
                db = rocksdict.Rdict(str(directory), options, families)
                store = cls(directory, db, memory, hashed, logged=log_filters)
            except BaseException:
                memory.give_tables(sum(hashed.values()))
                raise
        try:
            with errors_of(directory):
                store._load(identity, manifest)
        except BaseException:
            with contextlib.suppress(DedupError):  # the first error is more informative
                store.close()
            raise
        return store

    def get_each(self, segments: Iterable[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """Return the encoded sightings of the IDs, by segment and ID. Segments without any of the IDs are omitted."""
        self._refuse_if_closed()
        asked = [(start, held) for start in segments if (held := self._segments.get(start)) is not None]
        if not asked or not ids:
            return {}
        found: dict[int, dict[bytes, bytes]] = {}
        with errors_of(self._directory):
            hashed = Hashed(self._key.hashes(ids)) if len(ids) >= _FEW_IDS else None
            for start, held in asked:
                wanted = ids
                if hashed is not None and held.filter.complete:
                    wanted = list(compress(ids, held.filter.may_hold(hashed)))
                    if not wanted:
                        continue
                prefix = held.prefix
                values = cast("list[bytes | None]", held.family.rows.get([prefix + key for key in wanted]))
                there = {key: value for key, value in zip(wanted, values, strict=True) if value is not None}
                there.pop(_LAST_POSITION, None)
                if there:
                    found[start] = there
        return found

    def segments(self) -> dict[int, int]:
        """Map segment starts (ascending) to a changelog offset at or before each segment's first record."""
        self._refuse_if_closed()
        return {start: held.entry.birth for start, held in sorted(self._segments.items())}

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """Write the sightings, the task record, and the position in one atomic write."""
        self._refuse_if_closed()
        refuse_unstorable(self.position, writes, position)
        current = record or self.task_record
        batch = rocksdict.WriteBatch(raw_mode=True)
        put = batch.put
        changed: list[tuple[_Segment, _SegmentEntry, Hashed, LogMark]] = []
        with errors_of(self._directory):
            for start, values in writes.items():
                if not values:
                    continue
                held = self._segments.get(start) or self._create(start)
                family, prefix = held.family, held.prefix
                # Inserting keys into a skip list is up to ten times as fast in sorted order as in random order.
                ids = list(values) if family.hashed else sorted(values)
                sightings = values.values() if family.hashed else map(values.__getitem__, ids)
                # `any` makes the calls in C, because `put` returns None. Each call names the family, because rocksdict
                # before 0.3.28 ignores `set_default_column_family` in `put`.
                any(map(put, map(prefix.__add__, ids) if prefix else ids, sightings, repeat(family.handle)))
                entry = replace(
                    held.entry,
                    width_ms=max(held.entry.width_ms, current.segment_ms if current is not None else 0),
                    last_position=position,
                    ids=held.entry.ids + len(values),
                )
                put(prefix + _LAST_POSITION, _POSITION.pack(position), family.handle)
                put(_segment_key(start), entry.encode())
                if family.name != str(start):
                    put(_family_key(start), family.name.encode())
                hashed, mark = held.filter.write(ids, segment_ids=entry.ids, position=position)
                if held.filter.log_complete:
                    put(_mark_key(start), _sealed(mark.encode()))
                changed.append((held, entry, hashed, mark))
            self._manifest = self._manifest.now(self._directory)
            put(_STATE_KEY, _StateEntry(position, current, self._manifest).encode())
            self._db.write(batch, self._write_options)
        for held, entry, hashed, mark in changed:
            held.entry = entry
            held.filter.add(hashed, mark)
        self.task_record = current
        self.position = position
        self._applies += 1
        if self._applies % _APPLIES_PER_LOOK == 0:
            self._log_bytes = limit_log(self._directory, self._log_bytes)
        if changed:
            self._memory.flush_in_turn(max(changed, key=lambda each: len(each[2].hashes))[0].family.rows)

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """Drop all segments that end at or before ``oldest_live_ms``, and return their starts in ascending order."""
        self._refuse_if_closed()
        ended = sorted(start for start in self._segments if start + segment_ms <= oldest_live_ms)
        dropped = tuple(start for start in ended if start + self._segments[start].entry.width_ms <= oldest_live_ms)
        with errors_of(self._directory):
            for start in dropped:
                self._drop(start)
        return dropped

    def _drop(self, start: int) -> None:
        held = self._segments[start]
        family, kept = held.family, self._is_kept(held.family)
        batch = rocksdict.WriteBatch(raw_mode=True)
        _forget(batch, start)
        if kept or family.name == _SHARED:
            delete_all(batch, family.handle, held.prefix)
        self._db.write(batch, self._write_options)
        del self._segments[start]
        self._delete_filter(start)
        if not kept:
            # If the process is killed before the next line, the next `open` drops the family, because it has no entry.
            # If the entry were deleted after the family, a dropped family would look like a lost family.
            self._drop_family(family)
            return
        if family.name != _SHARED:
            self._free.append(family)
        family.count_deletion()

    def _is_kept(self, family: Family) -> bool:
        """Return whether the store keeps the column family when one of the family's segments is dropped."""
        if family.name == _SHARED:
            if sum(held.family is family for held in self._segments.values()) > 1:
                return True  # it contains other segments
        elif len(self._free) >= _MOST_FREE_FAMILIES:
            return False
        # Without further writes, RocksDB merges files only after a month.
        return (family.rows.property_int_value("rocksdb.live-sst-files-size") or 0) <= _MOST_REUSED_BYTES

    def clear(self) -> None:
        """Delete the sightings, the task record, and the position atomically."""
        self._refuse_if_closed()
        batch = rocksdict.WriteBatch(raw_mode=True)
        with errors_of(self._directory):
            batch.delete(_STATE_KEY)
            for start, held in self._segments.items():
                _forget(batch, start)
                if held.family.name == _SHARED:
                    delete_all(batch, held.family.handle, held.prefix)
            self._db.write(batch, self._write_options)
            starts, families = list(self._segments), {held.family.name: held.family for held in self._segments.values()}
            self._segments.clear()
            self.task_record, self.position = None, 0
            for family in families.values():
                # If the process is killed before the next line, the next `open` drops each family that has no entry.
                self._drop_family(family)
            for start in starts:
                self._delete_filter(start)

    def approximate_bytes(self) -> int:
        """Return the total size in bytes of the column families (files and memtables) and the Bloom filter files."""
        self._refuse_if_closed()
        names, families = ("rocksdb.live-sst-files-size", "rocksdb.cur-size-all-mem-tables"), self._families.values()
        with errors_of(self._directory):
            stored = sum(family.rows.property_int_value(name) or 0 for family in families for name in names)
        return stored + sum(held.filter.disk_bytes for held in self._segments.values())

    def count_ids(self) -> int:
        """Return the number of (segment, ID) pairs written. A pair that is written twice counts twice."""
        self._refuse_if_closed()
        return sum(held.entry.ids for held in self._segments.values())

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (segment, state key, value) tuples in sorted order. Raises TaskCorrupted if an entry is unreadable."""
        self._refuse_if_closed()
        for start, held in sorted(self._segments.items()):
            with errors_of(self._directory):
                for state_key, value in pairs(held.family.rows, held.prefix):
                    if state_key != _LAST_POSITION:
                        yield start, state_key, value

    def warm(self, ids: int) -> bool:
        """Read up to ``ids`` more stored IDs into the Bloom filters, and return whether the filters contain all IDs.

        IDs load faster from a filter's own files: 1 million IDs take about 0.25 s from the store, 0.03 to 0.06 s from
        the filter's log, and 0.003 s from its snapshot. In any remaining time, `warm` writes snapshots of complete
        filters. Until the filters contain all IDs, lookups are correct but slower.
        """
        self._refuse_if_closed()
        busy = [each for each in self._segments.items() if not each[1].filter.idle]
        # Completing a filter is more urgent than writing a snapshot.
        for start, held in sorted(busy, key=lambda each: each[1].filter.complete):
            if ids > 0:
                ids = self._warm(start, held, ids)
        return all(held.filter.complete for _, held in busy)

    def _warm(self, start: int, held: _Segment, ids: int) -> int:
        before = held.filter.log_complete, held.filter.snapshot
        with errors_of(self._directory):
            ids = held.filter.warm(ids, partial(keys_after, held.family.rows, held.prefix), _LAST_POSITION)
            if held.filter.log_complete and before != (True, held.filter.snapshot):
                mark = held.filter.mark(segment_ids=held.entry.ids, position=held.entry.last_position)
                self._db.put(_mark_key(start), _sealed(mark.encode()), self._write_options)
        return ids

    def close(self) -> None:
        """Close the store and release its directory, unless it is already closed.

        The directory is released even if `close` raises an error or the caller still holds an error of the store.
        Raises TaskCorrupted if the store turns out to be damaged.
        """
        if self._closed:
            return
        self._closed = True
        self._segments.clear()
        self._memory.give_tables(sum(family.hashed for family in self._families.values()))
        self._free.clear()
        for family in self._families.values():
            family.release()
        self._families.clear()
        self._memory.add_stores(-1)
        with errors_of(self._directory):
            self._db.close()

    def wipe(self) -> None:
        """Close the store and delete its directory."""
        with contextlib.suppress(DedupError):  # the store may be damaged or on a full disk
            self.close()
        delete_store(self._directory)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InvariantBroken("a closed store was used: its task was revoked. Build a new task instead.")

    def _create(self, start: int) -> _Segment:
        entry = _SegmentEntry(width_ms=0, birth=self.position, last_position=self.position, ids=0)
        held = self._segments[start] = self._segment(self._family_for(start), entry, start)
        return held

    def _family_for(self, start: int) -> Family:
        """Return the column family for a new segment, and create the family if needed."""
        if self._free:
            return self._free.pop()
        own = self._families.keys() - {_SHARED}
        if len(own) >= _MOST_OWN_FAMILIES:
            return self._families.get(_SHARED) or self._create_family(_SHARED, hashed=False)
        name = str(start) if str(start) not in own else str(max(map(int, own)) + 1)
        return self._create_family(name, hashed=self._memory.take_table())

    def _create_family(self, name: str, *, hashed: bool) -> Family:
        try:
            self._db.create_column_family(name, self._memory.options(hashed=hashed))
        except BaseException:
            self._memory.give_tables(int(hashed))
            raise
        family = self._families[name] = self._opened(name, hashed=hashed)
        return family

    def _opened(self, name: str, *, hashed: bool) -> Family:
        return Family(name, self._db.get_column_family(name), self._db.get_column_family_handle(name), hashed)

    def _segment(self, family: Family, entry: _SegmentEntry, start: int) -> _Segment:
        own_filter = SegmentFilter(self._log_path(start), self._key, logged=self._logged)
        return _Segment(family, entry, own_filter, _START.pack(start) if family.name == _SHARED else b"")

    def _log_path(self, start: int) -> Path:
        return self._directory / f"{FILTER_LOG}{start}"

    def _drop_family(self, family: Family) -> None:
        self._db.drop_column_family(family.name)
        del self._families[family.name]
        self._memory.give_tables(int(family.hashed))

    def _delete_filter(self, start: int) -> None:
        for suffix in ("", SNAPSHOT_SUFFIX, NEW_SNAPSHOT_SUFFIX):
            self._log_path(start).with_suffix(suffix).unlink(missing_ok=True)

    def _load(self, identity: StoreIdentity, found: Manifest | None) -> None:
        owner: bytes | None = self._db.get(_IDENTITY_KEY)
        if owner is None:
            self._db.put(_IDENTITY_KEY, encode_identity(identity), self._write_options)
        else:
            refuse_other_owner(owner, identity, self._directory)
        secret: bytes | None = self._db.get(_SECRET_KEY)
        if secret is None:
            secret = secrets.token_bytes(_SECRET_BYTES)
            self._db.put(_SECRET_KEY, secret, self._write_options)
        self._key = HashKey(secret)
        stored: bytes | None = self._db.get(_STATE_KEY)
        if stored is not None:
            state = _StateEntry.decode(stored)
            if found is not None and state.manifest.was_cut(found):
                # RocksDB has written a new MANIFEST that looks valid. Without CURRENT, every later `open` refuses the
                # store.
                (self._directory / "CURRENT").unlink()
                raise TaskCorrupted(
                    f"{self._directory}: {state.manifest} was truncated to {found.size_bytes}. {RESTORE}"
                )
            self.position, self.task_record = state.position, state.record
        self._load_segments()

    def _load_segments(self) -> None:
        entries = {start: (self._family_of(start), entry) for start, entry in self._entries()}
        used = {name for name, _ in entries.values()}
        for family in [each for each in self._families.values() if each.name not in used]:
            free = family.name != _SHARED and len(self._free) < _MOST_FREE_FAMILIES
            if free and family.rows.get(_LAST_POSITION) is None:
                self._free.append(family)
            else:
                # The family's segments were being dropped when the process ended.
                self._drop_family(family)
        for path in self._directory.glob(f"{FILTER_LOG}*"):
            if int(path.stem.removeprefix(FILTER_LOG)) not in entries:
                path.unlink()  # the process ended after dropping the segment and before deleting the log
        missing = [str(start) for start, (name, _) in entries.items() if name not in self._families]
        if missing:
            raise TaskCorrupted(f"segments {', '.join(missing)} are missing, but their keys were stored. {RESTORE}")
        for start, (name, entry) in entries.items():
            self._segments[start] = self._loaded(start, name, entry)

    def _family_of(self, start: int) -> str:
        name: bytes | None = self._db.get(_family_key(start))
        return str(start) if name is None else name.decode()

    def _entries(self) -> Iterator[tuple[int, _SegmentEntry]]:
        for key, value in pairs(self._db, _SEGMENT_PREFIX):
            yield int(key), _SegmentEntry.decode(value, key.decode())

    def _loaded(self, start: int, name: str, entry: _SegmentEntry) -> _Segment:
        held = self._segment(self._families[name], entry, start)
        stored = held.family.rows.get(held.prefix + _LAST_POSITION)
        if stored is None or _POSITION.unpack(stored)[0] < entry.last_position or self.position < entry.last_position:
            raise TaskCorrupted(
                f"{self._directory}: segment {start} lacks writes up to changelog position {entry.last_position}: "
                f"files were damaged or restored from a copy. {RESTORE}"
            )
        value: bytes | None = self._db.get(_mark_key(start))
        mark = None if value is None else LogMark.decode(_unsealed(value, f"the mark of filter {start}"))
        held.filter.load(mark, first_key=_LAST_POSITION, ids=entry.ids, position=entry.last_position)
        if entry.ids <= _FILTERED_ON_OPEN_IDS:
            self._warm(start, held, entry.ids + 1)
        return held


def _forget(batch: rocksdict.WriteBatch, start: int) -> None:
    for key in (_segment_key(start), _mark_key(start), _family_key(start)):
        batch.delete(key)


def _segment_key(start: int) -> bytes:
    return _SEGMENT_PREFIX + str(start).encode()


def _family_key(start: int) -> bytes:
    return _FAMILY_PREFIX + str(start).encode()


def _mark_key(start: int) -> bytes:
    return _MARK_PREFIX + str(start).encode()
