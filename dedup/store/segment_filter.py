"""Keeps the Bloom filter of one segment, and the log of hashes from which the next process loads the filter.

A filter that lacks one ID of its segment lets a duplicate pass, so a log must prove that it is complete. The store
writes a `LogMark` in the same atomic batch as the IDs: how many hashes the log has, their CRC-32, and the segment's
number of IDs and position at that time. A log counts only if its mark has the segment's current number and position,
and if its hashes have the mark's CRC. Otherwise, the filter is built from the segment's keys, which takes eight times
as long, and the log is written again.

The log is written before the store's batch and is not synced. After a SIGKILL it may have more hashes than its mark
says; they are ignored. After a power failure it may have fewer; its CRC then differs.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np

from dedup.errors import DedupError
from dedup.store.bloom_filter import BloomFilter, Hashed, Hashes, HashKey

log = logging.getLogger(__name__)

_MARK: Final = struct.Struct(">QQQI")
_HASH_BYTES: Final = 8
PIECE_IDS: Final = 100_000
"""The most IDs that are read in one step, to bound the memory that a step takes."""
HASHES_PER_KEY: Final = 8
"""How many hashes can be loaded from a log in the time in which one key is read from the store."""


@dataclass(frozen=True, slots=True)
class LogMark:
    """States which log belongs to a segment."""

    segment_ids: int
    """The number of IDs of the segment, counting repetitions, when the mark was written."""
    segment_position: int
    """The position of the last batch that wrote to the segment, when the mark was written."""
    hashes: int
    crc: int

    def encode(self) -> bytes:
        """Return the value that the store keeps."""
        return _MARK.pack(self.segment_ids, self.segment_position, self.hashes, self.crc)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Return the mark of a stored value."""
        return cls(*_MARK.unpack(value))


class SegmentFilter:
    """The Bloom filter of one segment; lookups may use it only while it is `complete`."""

    def __init__(self, path: Path, key: HashKey, *, logged: bool) -> None:
        """Create the filter of a new segment. A log that an earlier segment left at ``path`` is overwritten."""
        self._path: Final = path
        self._key: Final = key
        self._logged: Final = logged
        self._filter = BloomFilter()
        self._log = LogMark(0, 0, 0, 0)
        """The length and the CRC of the log."""
        self._load: LogMark | None = None
        """The mark of the log that is being loaded, or None."""
        self._loaded, self._loaded_crc = 0, 0
        self._next_key: bytes | None = None
        """The key after which the segment is read, or None if the segment is not being read."""

    def load(self, mark: LogMark | None, *, first_key: bytes, ids: int, position: int) -> None:
        """Let `warm` load the filter of a segment that has this number of IDs and this position.

        ``first_key`` is less than all keys of the segment.
        """
        fits = mark is not None and (mark.segment_ids, mark.segment_position) == (ids, position)
        if mark is not None and fits and self._logged and _size_bytes(self._path) >= mark.hashes * _HASH_BYTES:
            self._load = self._log = mark
            self._filter = BloomFilter(mark.hashes)
        else:
            self._next_key = first_key

    @property
    def complete(self) -> bool:
        """Whether the filter contains all IDs of the segment."""
        return self._load is None and self._next_key is None

    @property
    def log_complete(self) -> bool:
        """Whether the log contains all IDs of the segment, so that the store may keep the log's mark."""
        return self._logged and self._next_key is None

    @property
    def size_bytes(self) -> int:
        """The memory that the filter uses, in bytes."""
        return self._filter.size_bytes

    @property
    def log_bytes(self) -> int:
        """The length of the log on disk, in bytes."""
        return self._log.hashes * _HASH_BYTES

    def may_hold(self, hashed: Hashed) -> list[bool]:
        """Return one boolean per ID: False if the segment lacks the ID. The filter must be complete."""
        found: list[bool] = self._filter.may_hold(hashed).tolist()
        return found

    def write(self, ids: Sequence[bytes], *, segment_ids: int, position: int) -> tuple[Hashed, LogMark]:
        """Write the hashes of IDs behind the log, and return them with the mark of the longer log.

        The log ends as before until `add` is called with the returned values. Raises DedupError if the disk is full.
        """
        hashed = Hashed(self._key.hashes(ids))
        if not self._logged:
            return hashed, self._log
        crc = self._append(hashed.hashes)
        return hashed, LogMark(segment_ids, position, self._log.hashes + len(ids), crc)

    def add(self, hashed: Hashed, mark: LogMark) -> None:
        """Add IDs that `write` has written to the log and that the store contains now."""
        self._filter.add(hashed)
        self._log = mark

    def mark(self, *, segment_ids: int, position: int) -> LogMark:
        """Return the mark of the log as it is."""
        return replace(self._log, segment_ids=segment_ids, segment_position=position)

    def warm(self, keys: int, read_keys: Callable[[bytes, int], list[bytes]], first_key: bytes) -> int:
        """Load more IDs, in the time that reading ``keys`` keys takes, and return how many of ``keys`` are left.

        ``read_keys`` returns at most a number of keys of the segment that follow a key, in ascending order.
        """
        while keys > 0 and self._load is not None:
            keys -= self._read_log(self._load, keys, first_key)
        while keys > 0 and self._next_key is not None:
            asked = min(keys, PIECE_IDS)
            found = read_keys(self._next_key, asked)
            if found:
                self.add(*self.write(found, segment_ids=0, position=0))
            self._next_key = found[-1] if len(found) == asked else None
            keys -= max(1, len(found))
        return keys

    def _read_log(self, mark: LogMark, keys: int, first_key: bytes) -> int:
        count = min(keys * HASHES_PER_KEY, PIECE_IDS, mark.hashes - self._loaded)
        hashes = _read(self._path, self._loaded, count)
        self._loaded_crc = zlib.crc32(hashes.tobytes(), self._loaded_crc)
        self._loaded += count
        self._filter.add(Hashed(hashes))
        if len(hashes) < count or (self._loaded == mark.hashes and self._loaded_crc != mark.crc):
            log.warning("%s is damaged: the Bloom filter is built from the state again. Nothing is lost.", self._path)
            self._filter, self._log = BloomFilter(), LogMark(0, 0, 0, 0)
            self._load, self._next_key = None, first_key
        elif self._loaded == mark.hashes:
            self._load = None
        return -(-count // HASHES_PER_KEY)

    def _append(self, hashes: Hashes) -> int:
        data = hashes.tobytes()
        try:
            # The file is not kept open, because a worker may have 256 stores.
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                written = os.pwrite(file, data, self.log_bytes)
            finally:
                os.close(file)
        except OSError as error:
            raise DedupError(_no_room(self._path, str(error.strerror))) from error
        if written < len(data):
            raise DedupError(_no_room(self._path, "the disk is full"))
        return zlib.crc32(data, self._log.crc)


def _no_room(path: Path, reason: str) -> str:
    return f"{path}: {reason}. Nothing is lost: make room or give this user access, then restart."


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read(path: Path, first: int, count: int) -> Hashes:
    try:
        return np.fromfile(path, np.uint64, count, offset=first * _HASH_BYTES)
    except OSError:
        return np.zeros(0, np.uint64)
