"""The store on disk: RocksDB, one column family per segment, so that a segment is dropped whole.

One apply is one write batch over all families with the write-ahead log on (docs/decisions/0001-wal.md): keys, task
record and position become durable together, also over a SIGKILL. A power cut may take the newest batches, whole ones;
the position goes with them and the changelog brings them back.

The default family holds the identity, the task record with the position, and what is known of each segment. Damaged
files may open as if nothing were wrong. If the position is lost with the keys, the restore replays: harmless. What
would be a hole is TaskCorrupted: a segment whose own position (under the empty key) is older than the default family
says of it; a segment gone; a MANIFEST shorter than it was at the last apply (measured: a cut one opens without the
files of its last entries, while the log still brings back newer keys).

rocksdict holds the GIL in every call, so a thread would not help: callers keep their batches small.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, islice
from pathlib import Path
from typing import Final, Self, cast

from rocksdict import ColumnFamily, Rdict, ReadOptions, WriteBatch, WriteOptions

from dedup.errors import DedupError, InvariantBroken, TaskCorrupted
from dedup.store.base import StoreIdentity, TaskRecord, Writes, refuse_unstorable
from dedup.store.directory import RESTORE, ErrorsOf, Manifest, delete_store, prepare_directory
from dedup.store.entries import (
    SegmentEntry,
    StateEntry,
    decode_position,
    encode_identity,
    encode_position,
    refuse_other_owner,
)
from dedup.store.prefilter import Hashed, Prefilter
from dedup.store.rocks_options import RocksMemory, rocks_options

__all__ = ["RocksMemory", "RocksStore"]

_IDENTITY: Final = b"identity"
_STATE: Final = b"state"
_SEGMENT: Final = b"segment/"
_LAST_POSITION: Final = b""
"""In a segment: no state key is empty, so this key is free, and sorts first."""

_FILTERED_ON_OPEN_IDS: Final = 300_000
"""So many IDs are read into a segment's prefilter at once on open: about 0.15 s."""
_FEW_IDS: Final = 16
"""Below this, asking RocksDB is quicker than hashing a column."""


@dataclass(slots=True)
class _Segment:
    family: Rdict
    handle: ColumnFamily
    entry: SegmentEntry
    filter: Prefilter = field(default_factory=Prefilter)
    filtered_to: bytes | None = None
    """Every key up to here is in the filter; None: every key there is."""


class RocksStore:
    """One task's state in one directory; made by ``open``."""

    def __init__(self, directory: Path, db: Rdict, memory: RocksMemory, hashed: Collection[str]) -> None:
        self._directory: Final = directory
        self._db: Final = db
        self._memory: Final = memory
        self._hashed: Final = set(hashed)
        """Families with a hashed memtable, which takes keys in any order at the same speed."""
        self._write_options: Final = WriteOptions()
        self._write_options.sync = False
        self._segments: dict[int, _Segment] = {}
        self._task_record: TaskRecord | None = None
        self._position = 0
        self._manifest = Manifest.of(directory) or Manifest(0, 0)
        self._closed = False

    @classmethod
    def open(cls, directory: Path, *, identity: StoreIdentity, memory: RocksMemory | None = None) -> Self:
        """Return the store of a directory, a fresh one if it is empty.

        Raises TaskCorrupted if the store is damaged or another task's, StateIncompatible if the directory can not be
        used at all: in use, a symbolic link, not writable, foreign files.
        """
        prepare_directory(directory)
        memory = memory or RocksMemory()
        options = rocks_options(memory, hashed=False, segment=False)
        failure: DedupError | None = None
        with ErrorsOf(directory):
            manifest = Manifest.of(directory)
            exists = (directory / "CURRENT").exists()
            if not exists and any(path.suffix in {".sst", ".log"} for path in directory.iterdir()):
                # RocksDB would begin a new store and replay the old one's log into it.
                raise TaskCorrupted(f"{directory}: the file CURRENT is gone. {RESTORE}")
            names = Rdict.list_cf(str(directory), options) if exists else ["default"]
            hashed = [name for name in names if name != "default" and memory.take_table()]
            families = {name: rocks_options(memory, hashed=name in hashed, segment=name != "default") for name in names}
            try:
                store = cls(directory, Rdict(str(directory), options, families), memory, hashed)
            except BaseException:
                memory.give_tables(len(hashed))
                raise
        try:
            with ErrorsOf(directory):
                store._load(identity, [name for name in names if name != "default"], manifest)
        except DedupError as error:
            failure = error
        if failure is not None:
            # The frames of the error hold the database open; the caller wants to delete it.
            failure.__traceback__ = failure.__cause__ = failure.__context__ = None
            store.close()
            raise failure
        return store

    @property
    def task_record(self) -> TaskRecord | None:
        """The last applied task record; None in a fresh store."""
        return self._task_record

    @property
    def position(self) -> int:
        """The changelog offset to restore from; 0 in a fresh store."""
        return self._position

    def get_many(self, segment: int, ids: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the encoded values of the IDs that the segment holds; unknown IDs are absent."""
        return self.get_each((segment,), ids).get(segment, {})

    def get_each(self, segments: Sequence[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        """Return ``get_many`` per segment, segments without a hit left out."""
        self._refuse_if_closed()
        asked = [(start, held) for start in segments if (held := self._segments.get(start)) is not None]
        if not asked or not ids:
            return {}
        hashed = Hashed(ids) if len(ids) >= _FEW_IDS else None
        found: dict[int, dict[bytes, bytes]] = {}
        with ErrorsOf(self._directory):
            for start, held in asked:
                wanted = ids
                if hashed is not None and held.filtered_to is None:
                    maybe = held.filter.may_hold(hashed)
                    if not maybe.any():
                        continue
                    # In key order, neighbours share blocks: twice as fast as any order.
                    wanted = sorted(compress(ids, maybe.tolist()))
                values = cast("list[bytes | None]", held.family.get(list(wanted)))
                there = {key: value for key, value in zip(wanted, values, strict=True) if value is not None}
                there.pop(_LAST_POSITION, None)
                if there:
                    found[start] = there
        return found

    def segments(self) -> tuple[int, ...]:
        """Return the starts of the segments held, ascending."""
        self._refuse_if_closed()
        return tuple(sorted(self._segments))

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        """Make sightings, task record and position durable in one atomic write."""
        self._refuse_if_closed()
        refuse_unstorable(self._position, writes, position)
        current = record or self._task_record
        batch = WriteBatch(raw_mode=True)
        put = batch.put
        changed: list[tuple[_Segment, SegmentEntry]] = []
        with ErrorsOf(self._directory):
            for start, values in writes.items():
                if not values:
                    continue
                held = self._segments.get(start) or self._create(start)
                handle = held.handle
                # In key order a skip list takes keys up to ten times as fast: more than sorting costs.
                for state_key in values if str(start) in self._hashed else sorted(values):
                    put(state_key, values[state_key], handle)
                entry = replace(
                    held.entry,
                    width_ms=max(held.entry.width_ms, current.segment_ms if current is not None else 0),
                    last_position=position,
                    ids=held.entry.ids + len(values),
                )
                put(_LAST_POSITION, encode_position(position), handle)
                put(_segment_key(start), entry.encode())
                changed.append((held, entry))
            self._manifest = self._manifest.now(self._directory)
            put(_STATE, StateEntry(position, current, self._manifest).encode())
            self._db.write(batch, self._write_options)
        for (held, entry), values in zip(changed, filter(None, writes.values()), strict=True):
            held.entry = entry
            held.filter.add(Hashed(values))
        self._task_record = current
        self._position = position

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        """Drop every segment that ends at or before ``oldest_live_ms``; return their starts, ascending."""
        self._refuse_if_closed()
        dropped = tuple(
            start
            for start, held in sorted(self._segments.items())
            if start + max(held.entry.width_ms, segment_ms) <= oldest_live_ms
        )
        with ErrorsOf(self._directory):
            for start in dropped:
                # First the entry, then the family: killed in between, a family without an entry is left, which open
                # drops. The other way round a dropped family could not be told from a lost one.
                self._db.delete(_segment_key(start), self._write_options)
                del self._segments[start]
                self._drop_family(str(start))
        return dropped

    def clear(self) -> None:
        """Forget sightings, task record and position, in one atomic write."""
        self._refuse_if_closed()
        batch = WriteBatch(raw_mode=True)
        with ErrorsOf(self._directory):
            batch.delete(_STATE)
            for start in self._segments:
                batch.delete(_segment_key(start))
            self._db.write(batch, self._write_options)
            starts = sorted(self._segments)
            self._segments.clear()
            self._task_record, self._position = None, 0
            for start in starts:
                # Killed before it is dropped, a family without an entry is dropped at the next open.
                self._drop_family(str(start))

    def first_offset(self, segment: int) -> int | None:
        """Return a changelog offset at or below the first that wrote into the segment; None if it is not held."""
        self._refuse_if_closed()
        held = self._segments.get(segment)
        return None if held is None else held.entry.birth

    def approximate_bytes(self) -> int:
        """Return what the segments take in files and in buffers not yet written to files."""
        self._refuse_if_closed()
        names = ("rocksdb.live-sst-files-size", "rocksdb.cur-size-all-mem-tables")
        with ErrorsOf(self._directory):
            return sum(held.family.property_int_value(name) or 0 for held in self._segments.values() for name in names)

    def count_ids(self) -> int:
        """Return the number of (segment, ID) pairs written; one written twice counts twice."""
        self._refuse_if_closed()
        return sum(held.entry.ids for held in self._segments.values())

    def sightings(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (segment, state key, encoded value), ordered; raises TaskCorrupted on an unreadable one."""
        self._refuse_if_closed()
        for start, held in sorted(self._segments.items()):
            with ErrorsOf(self._directory):
                state_key = _LAST_POSITION
                for state_key, value in _pairs(held.family):
                    if state_key != _LAST_POSITION:
                        yield start, state_key, value
                _refuse_early_end(held.family, state_key)

    def warm(self, ids: int) -> bool:
        """Read up to ``ids`` more keys into prefilters that a reopened store lacks; True when none is missing.

        For idle moments: 1 M keys take about 0.5 s. Look-ups are right before, only slower.
        """
        self._refuse_if_closed()
        for held in self._segments.values():
            while held.filtered_to is not None:
                if ids <= 0:
                    return False
                ids -= self._read_into_filter(held, min(ids, _FILTERED_ON_OPEN_IDS))
        return True

    def close(self) -> None:
        """Release the directory; closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        self._segments.clear()
        self._memory.give_tables(len(self._hashed))
        with ErrorsOf(self._directory):
            self._db.close()

    def wipe(self) -> None:
        """Close the store and delete its directory."""
        try:
            self.close()
        finally:
            delete_store(self._directory)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise InvariantBroken("a closed store was used: its task was revoked. Build a new task instead.")

    def _create(self, start: int) -> _Segment:
        """Return a new, empty segment; killed before its first write, it is dropped at the next open."""
        name, hashed = str(start), self._memory.take_table()
        if hashed:
            self._hashed.add(name)
        family = self._db.create_column_family(name, rocks_options(self._memory, hashed=hashed))
        entry = SegmentEntry(width_ms=0, birth=self._position, last_position=self._position, ids=0)
        held = _Segment(family, self._db.get_column_family_handle(name), entry)
        self._segments[start] = held
        return held

    def _drop_family(self, name: str) -> None:
        self._db.drop_column_family(name)
        if name in self._hashed:
            self._hashed.remove(name)
            self._memory.give_tables(1)

    def _load(self, identity: StoreIdentity, names: list[str], found: Manifest | None) -> None:
        owner: bytes | None = self._db.get(_IDENTITY)
        if owner is None:
            self._db.put(_IDENTITY, encode_identity(identity), self._write_options)
        else:
            refuse_other_owner(owner, identity, self._directory)
        stored: bytes | None = self._db.get(_STATE)
        if stored is not None:
            state = StateEntry.decode(stored)
            if found is not None and state.manifest.was_cut(found):
                # By opening it RocksDB has begun a new list: without CURRENT the store stays refused.
                (self._directory / "CURRENT").unlink()
                raise TaskCorrupted(f"{self._directory}: {state.manifest} was cut to {found.size_bytes}. {RESTORE}")
            self._position, self._task_record = state.position, state.record
        entries = dict(self._entries())
        for name in names:
            entry = entries.pop(name, None)
            if entry is None:
                # Made but never written to, or about to be dropped when the process ended.
                self._drop_family(name)
            else:
                self._segments[int(name)] = self._loaded(name, entry)
        if entries:
            raise TaskCorrupted(f"segments {', '.join(entries)} are gone, but their keys were stored. {RESTORE}")

    def _entries(self) -> Iterator[tuple[str, SegmentEntry]]:
        """Yield what the default family says of each segment, by the name of its family."""
        key = b""
        for key, value in _pairs(self._db):
            if key.startswith(_SEGMENT):
                name = key[len(_SEGMENT) :].decode()
                yield name, SegmentEntry.decode(value, name)
        _refuse_early_end(self._db, key)

    def _loaded(self, name: str, entry: SegmentEntry) -> _Segment:
        """Return a segment found on disk; raises TaskCorrupted if it lacks keys that were stored."""
        family = self._db.get_column_family(name)
        stored = family.get(_LAST_POSITION)
        if stored is None or decode_position(stored) < entry.last_position or self._position < entry.last_position:
            raise TaskCorrupted(
                f"{self._directory}: segment {name} lacks writes up to changelog position {entry.last_position}: "
                f"files were damaged or restored from a copy. {RESTORE}"
            )
        held = _Segment(family, self._db.get_column_family_handle(name), entry, filtered_to=_LAST_POSITION)
        if entry.ids <= _FILTERED_ON_OPEN_IDS:
            self._read_into_filter(held, entry.ids + 2)
        return held

    def _read_into_filter(self, held: _Segment, limit: int) -> int:
        """Read up to ``limit`` more keys into the segment's prefilter; return how many."""
        with ErrorsOf(self._directory):
            keys = cast(
                "list[bytes]", list(islice(held.family.keys(from_key=held.filtered_to, read_opt=_in_order()), limit))
            )
            held.filter.add(Hashed(keys))
            if len(keys) == limit:
                held.filtered_to = keys[-1]
            else:
                _refuse_early_end(held.family, keys[-1] if keys else _LAST_POSITION)
                held.filtered_to = None
        return len(keys)


def _pairs(family: Rdict) -> Iterator[tuple[bytes, bytes]]:
    # In raw mode there is nothing but bytes.
    return cast("Iterator[tuple[bytes, bytes]]", family.items(read_opt=_in_order()))


def _in_order() -> ReadOptions:
    """Return options to read a family in key order, whatever its memtable."""
    options = ReadOptions()
    options.set_total_order_seek(True)
    return options


def _refuse_early_end(family: Rdict, last_key: bytes) -> None:
    """Raise RocksDB's error if an iteration that ended at ``last_key`` did so for a damaged block: it says nothing."""
    iterator = family.iter(_in_order())
    iterator.seek(last_key)
    if iterator.valid():
        iterator.next()
    iterator.status()


def _segment_key(start: int) -> bytes:
    return _SEGMENT + str(start).encode()
