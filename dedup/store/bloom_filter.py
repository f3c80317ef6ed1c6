"""Implements a Bloom filter over the IDs of one segment, so that most lookups of unknown IDs do not read from RocksDB.

The filter is a blocked Bloom filter (Putze, Sanders, Singler 2007) with about 16 bits per ID and a false-positive rate
of 0.5%. The filter grows in layers, each at least as large as all earlier layers together.

`SegmentFilter` keeps the filter of one segment, and a log of hashes from which the next process loads the filter. A
filter that lacks one of its segment's IDs would let a duplicate pass, so a log must be provably complete. The store
writes a `LogMark` in the same atomic batch as the IDs. The mark contains the count and CRC-32 of the log's hashes, and
the segment's ID count and position. A log is used only if its mark has the segment's current ID count and position, and
the CRC matches. Otherwise, the filter is rebuilt from the segment's keys, which takes eight times as long, and a new
log is begun.

The log is written before the store's batch and is not synced. After a SIGKILL, the log may contain more hashes than its
mark says; the extra hashes are ignored. After a power failure, the log may contain fewer hashes than its mark says;
then the CRC does not match.

Once the log contains 1,000,000 hashes, and again whenever it has grown by an eighth, the filter itself is written to a
second file, the snapshot. A snapshot loads twenty times as fast as the log. After a snapshot is loaded, only newer
hashes are read from the log. The mark contains the CRC of the snapshot. A snapshot is written in small steps, and IDs
can be added to the filter between the steps. The snapshot contains at least the IDs that the filter had before the
first step, because the filter's bits are never cleared.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from dedup.errors import DedupError
from dedup.store.directory import NEW_SNAPSHOT_SUFFIX, SNAPSHOT_SUFFIX, remedy_of

log = logging.getLogger(__name__)

Hashes = npt.NDArray[np.uint64]
"""One 64-bit hash per ID."""

_MARK: Final = struct.Struct(">QQQI")
_SNAPSHOT: Final = struct.Struct(">QIIQ")
_LAYER: Final = struct.Struct(">Q")
_HASH_BYTES: Final = 8
PIECE_IDS: Final = 100_000
"""The maximum number of IDs that one step reads. This number limits the memory that the step needs."""
HASHES_PER_KEY: Final = 8
"""The number of hashes that can be loaded from a log in the time of reading one key from the store."""
PIECE_WORDS: Final = 1 << 15
"""The maximum number of snapshot words that one step reads or writes. This many words fit into a core's cache."""
WORDS_PER_KEY: Final = 32
"""The number of snapshot words that can be read or written in the time of reading one key from the store."""
SNAPSHOT_FROM_IDS: Final = 1_000_000
"""The smallest number of IDs for which a log gets a snapshot. A smaller log loads within 0.03 s even without a
snapshot.
"""
_SNAPSHOT_EVERY: Final = 8
"""A new snapshot is written when the log has grown by 1/`_SNAPSHOT_EVERY` since the last snapshot."""
_WORD_BYTES: Final = 4
_KEY_WORDS: Final = 16
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)

_IDS_PER_WORD: Final = 4
_FIRST_WORDS: Final = 1 << 11
_QUICK_GROWTH_WORDS: Final = 1 << 16
"""The number of words below which a new layer is up to three times as large as all earlier layers together."""

_PAIR_BITS: Final = 12
_PAIR_MASK: Final = np.uint64((1 << _PAIR_BITS) - 1)
_WORD_AT: Final = np.uint64(2 * _PAIR_BITS)
_WORD_BITS: Final = np.uint64(64 - 2 * _PAIR_BITS)


_PAIR: Final = np.arange(1 << _PAIR_BITS, dtype=np.uint64)
_PAIRS: Final = (np.uint64(1) << (_PAIR & np.uint64(63))) | (np.uint64(1) << (_PAIR >> np.uint64(6)))
"""Maps 12 bits of a hash, which select two bits of a 64-bit word, to a word that has only these two bits set."""


class HashKey:
    """Hashes IDs with a secret, so that only someone who knows the secret could choose IDs that collide.

    The hash is MULTILINEAR (Lemire, Kaser 2014, "Strongly universal string hashing is fast") over 32-bit words: the sum
    of the words, each multiplied by a random 64-bit number. The last steps of `hashes` spread the result over all bits.
    Zero bytes at the end of an ID do not change its hash, which is harmless in a Bloom filter.
    """

    __slots__ = ("_key", "_secret")

    def __init__(self, secret: bytes) -> None:
        self._secret: Final = secret
        self._key = self._of_words(_KEY_WORDS)

    def hashes(self, ids: Sequence[bytes]) -> Hashes:
        """Return the hash of each ID. The same secret results in the same hashes in every process."""
        longest = max(map(len, ids), default=0)
        words = max(1, -(-longest // _WORD_BYTES))
        if words > len(self._key):
            self._key = self._of_words(words)
        row_bytes = words * _WORD_BYTES
        gap = bytes(row_bytes - longest)
        padded = gap.join(ids) + gap
        if len(padded) != row_bytes * len(ids):  # the IDs have different lengths
            padded = np.array(ids, dtype=f"S{row_bytes}").tobytes()
        table = np.frombuffer(padded, np.uint32).reshape(len(ids), words)
        found: Hashes = table.astype(np.uint64) @ self._key[:words]
        found *= _SPREAD
        found ^= found >> _HALF
        found *= _SPREAD
        return found

    def _of_words(self, words: int) -> Hashes:
        return np.frombuffer(hashlib.shake_256(self._secret).digest(8 * words), np.uint64)


class Hashed:
    """The hashes of a batch of IDs, in a form that can be used for several segments."""

    __slots__ = ("bits", "hashes", "words")

    def __init__(self, hashes: Hashes) -> None:
        self.hashes: Final = hashes
        self.words: Final = hashes >> _WORD_AT
        self.bits: Final = _PAIRS[hashes & _PAIR_MASK] | _PAIRS[hashes >> np.uint64(_PAIR_BITS) & _PAIR_MASK]

    def in_layer(self, words: int) -> npt.NDArray[np.uint64]:
        """Return the index of each ID's word in a layer that has ``words`` words."""
        return self.words * np.uint64(words) >> _WORD_BITS


class BloomFilter:
    """A set of IDs that always reports an added ID, but may also report an ID that was never added."""

    __slots__ = ("_capacity", "_layers", "_total_words", "added")

    def __init__(self, expected_ids: int = 0) -> None:
        self._layers: list[Hashes] = []
        self._total_words = 0
        self._capacity = 0
        self.added = 0
        """The number of IDs that were added, counting repetitions."""
        if expected_ids:
            self._grow(expected_ids)

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        """Return an empty filter with a snapshot's layer sizes; the snapshot's words are loaded later. IDs can be added
        to the filter before the words are loaded.
        """
        empty = cls()
        empty._layers = [np.zeros(words, np.uint64) for words in snapshot.layers]
        empty._total_words, empty._capacity, empty.added = snapshot.words, snapshot.capacity, snapshot.hashes
        return empty

    @property
    def size_bytes(self) -> int:
        """The memory that the filter uses, in bytes."""
        return self._total_words * _HASH_BYTES

    def snapshot(self, log: LogMark) -> Snapshot:
        """Describe a snapshot of the current filter, which contains all IDs of the log. The description's CRC is 0,
        because the snapshot has not been written yet.
        """
        return Snapshot(log.hashes, log.crc, 0, self._capacity, tuple(map(len, self._layers)))

    def part(self, first: int, count: int) -> Hashes:
        """Return up to ``count`` words of one layer, starting at index ``first``. Indices run through all layers."""
        for layer in self._layers:
            if first < len(layer):
                return layer[first : first + count]
            first -= len(layer)
        raise IndexError(first)

    def add(self, hashed: Hashed) -> None:
        """Add a batch of IDs to the filter."""
        count = len(hashed.words)
        if not count:
            return
        if self.added + count > self._capacity:
            self._grow(count)
        layer = self._layers[-1]
        np.bitwise_or.at(layer, hashed.in_layer(len(layer)), hashed.bits)
        self.added += count

    def may_hold(self, hashed: Hashed) -> npt.NDArray[np.bool_]:
        """Return one boolean per ID: False if the ID was never added, True if it may have been added."""
        found = np.zeros(len(hashed.words), np.bool_)
        for layer in self._layers:
            found |= (layer[hashed.in_layer(len(layer))] & hashed.bits) == hashed.bits
        return found

    def _grow(self, count: int) -> None:
        wanted = max(_FIRST_WORDS, self._total_words, -(-count // _IDS_PER_WORD))
        if self._total_words and wanted < _QUICK_GROWTH_WORDS:
            wanted = min(3 * wanted, _QUICK_GROWTH_WORDS)
        self._layers.append(np.zeros(wanted, np.uint64))
        self._total_words += wanted
        # Free space in the previous layer stays unused, because this batch did not fit into that layer.
        self._capacity = self.added + wanted * _IDS_PER_WORD


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Describes the snapshot that belongs to a filter's log."""

    hashes: int
    """The number of hashes in the log when the writing of the snapshot began. The snapshot contains all these hashes.
    """
    log_crc: int
    """The CRC-32 of the log's hashes that the snapshot contains."""
    crc: int
    capacity: int
    """The number of IDs at which the filter gets a new layer."""
    layers: tuple[int, ...]
    """The number of words in each layer. The snapshot file contains the words of all layers, in order."""

    @property
    def words(self) -> int:
        """The number of words in the snapshot file."""
        return sum(self.layers)

    def encode(self) -> bytes:
        """Encode the snapshot's description as the end of a mark."""
        head = _SNAPSHOT.pack(self.hashes, self.log_crc, self.crc, self.capacity)
        return head + b"".join(map(_LAYER.pack, self.layers))

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Decode a snapshot's description from the end of a stored mark."""
        layers = tuple(words for (words,) in _LAYER.iter_unpack(value[_SNAPSHOT.size :]))
        hashes, log_crc, crc, capacity = _SNAPSHOT.unpack_from(value)
        return cls(hashes, log_crc, crc, capacity, layers)


@dataclass(frozen=True, slots=True)
class LogMark:
    """Identifies the log and the snapshot that belong to a segment."""

    segment_ids: int
    """The number of the segment's IDs, counting repetitions, when the mark was written."""
    segment_position: int
    """When the mark was written, the position of the last batch that had written to the segment."""
    hashes: int
    crc: int
    snapshot: Snapshot | None = None

    def encode(self) -> bytes:
        """Encode the mark as a value for the store."""
        head = _MARK.pack(self.segment_ids, self.segment_position, self.hashes, self.crc)
        return head if self.snapshot is None else head + self.snapshot.encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Decode a stored mark."""
        segment_ids, segment_position, hashes, crc = _MARK.unpack_from(value)
        snapshot = Snapshot.decode(value[_MARK.size :]) if len(value) > _MARK.size else None
        return cls(segment_ids, segment_position, hashes, crc, snapshot)


class SegmentFilter:
    """The Bloom filter of one segment. Lookups may use the filter only while it is `complete`."""

    def __init__(self, path: Path, key: HashKey, *, logged: bool) -> None:
        """Create the filter of a new segment. A log that an earlier segment left at ``path`` is overwritten."""
        self._path: Final = path
        self._snapshot_path: Final = path.with_suffix(SNAPSHOT_SUFFIX)
        self._key: Final = key
        self._logged: Final = logged
        self._filter = BloomFilter()
        self._log = LogMark(0, 0, 0, 0)
        """The mark of the log, which contains the log's length and CRC."""
        self._load: LogMark | None = None
        """The mark of the log that is being loaded, or None."""
        self._loaded, self._loaded_crc = 0, 0
        self._copy: Snapshot | None = None
        """The snapshot that is being read (until the log is loaded) or written (afterward), or None."""
        self._copied, self._copied_crc = 0, 0
        """The number of words of ``_copy`` that were read or written, and their CRC."""
        self._copied_at = 0
        """The number of hashes in the log when the writing of the last snapshot began."""
        self._next_key: bytes | None = None
        """The key after which the reading of the segment continues, or None if the segment is not being read."""

    def load(self, mark: LogMark | None, *, first_key: bytes, ids: int, position: int) -> None:
        """Prepare `warm` to load the filter of a segment that has ``ids`` IDs and was last written at ``position``.

        ``first_key`` sorts before all keys of the segment.
        """
        fits = mark is not None and (mark.segment_ids, mark.segment_position) == (ids, position)
        if mark is not None and fits and self._logged and _size_bytes(self._path) >= mark.hashes * _HASH_BYTES:
            self._load = self._log = mark
            self._filter = BloomFilter(mark.hashes)
            snapshot = mark.snapshot
            if snapshot is not None and _size_bytes(self._snapshot_path) == snapshot.words * _HASH_BYTES:
                self._copy, self._filter = snapshot, BloomFilter.of(snapshot)
        else:
            self._next_key = first_key

    @property
    def complete(self) -> bool:
        """True if the filter contains all IDs of the segment."""
        return self._load is None and self._next_key is None

    @property
    def log_complete(self) -> bool:
        """True if the log contains all IDs of the segment, so the store can keep the log's mark."""
        return self._logged and self._next_key is None

    @property
    def idle(self) -> bool:
        """True if `warm` has nothing to do for this filter."""
        return self.complete and self._copy is None and not self._snapshot_is_due

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest snapshot. A snapshot is usable once the store has written a mark that describes the snapshot."""
        return self._log.snapshot

    @property
    def _snapshot_is_due(self) -> bool:
        known = max(self._copied_at, 0 if self._log.snapshot is None else self._log.snapshot.hashes)
        least = max(SNAPSHOT_FROM_IDS, known + known // _SNAPSHOT_EVERY)
        return self._logged and self._log.hashes >= least and self._log.hashes > known

    @property
    def size_bytes(self) -> int:
        """The memory that the filter uses, in bytes."""
        return self._filter.size_bytes

    @property
    def disk_bytes(self) -> int:
        """The total size of the log and the snapshot, in bytes."""
        words = 0 if self._log.snapshot is None else self._log.snapshot.words
        return (self._log.hashes + words) * _HASH_BYTES

    def may_hold(self, hashed: Hashed) -> list[bool]:
        """Return one boolean per ID: False if the segment lacks the ID, True if the segment may contain the ID. The
        filter must be complete.
        """
        found: list[bool] = self._filter.may_hold(hashed).tolist()
        return found

    def write(self, ids: Sequence[bytes], *, segment_ids: int, position: int) -> tuple[Hashed, LogMark]:
        """Append the hashes of the IDs to the log file, and return the hashes with the log's new mark.

        The appended hashes take effect only when `add` is called with the returned values. Raises DedupError if the
        file cannot be written.
        """
        hashed = Hashed(self._key.hashes(ids))
        if not self._logged:
            return hashed, self._log
        data = hashed.hashes.tobytes()
        _write(self._path, data, self._log.hashes)
        crc, hashes = zlib.crc32(data, self._log.crc), self._log.hashes + len(ids)
        return hashed, LogMark(segment_ids, position, hashes, crc, self._log.snapshot)

    def add(self, hashed: Hashed, mark: LogMark) -> None:
        """Add IDs that `write` has written to the log and that the store now contains."""
        self._filter.add(hashed)
        self._log = mark

    def mark(self, *, segment_ids: int, position: int) -> LogMark:
        """Return a mark for the log's current content."""
        return replace(self._log, segment_ids=segment_ids, segment_position=position)

    def warm(self, keys: int, read_keys: Callable[[bytes, int], list[bytes]], first_key: bytes) -> int:
        """Load IDs for the time in which ``keys`` keys can be read, and return the number of keys for the time that is
        left.

        If all IDs are loaded and a snapshot is due, `warm` writes the snapshot in the remaining time. ``read_keys(key,
        limit)`` returns up to ``limit`` keys of the segment that follow ``key``, in ascending order.
        """
        while keys > 0 and self._load is not None:
            if self._copy is None:
                keys -= self._read_log(self._load, keys, first_key)
            else:
                keys -= self._read_snapshot(self._copy, keys)
        while keys > 0 and self._next_key is not None:
            asked = min(keys, PIECE_IDS)
            found = read_keys(self._next_key, asked)
            if found:
                self.add(*self.write(found, segment_ids=0, position=0))
            self._next_key = found[-1] if len(found) == asked else None
            keys -= max(1, len(found))
        while keys > 0 and not self.idle:
            keys -= self._write_snapshot(keys)
        return keys

    def _read_snapshot(self, snapshot: Snapshot, keys: int) -> int:
        part = self._filter.part(self._copied, min(keys * WORDS_PER_KEY, PIECE_WORDS))
        words = _read(self._snapshot_path, self._copied, len(part))
        if len(words) == len(part):
            part |= words  # the filter keeps IDs that were added in the meantime
        self._copied += len(part)
        self._copied_crc = zlib.crc32(words.tobytes(), self._copied_crc)
        if len(words) < len(part) or (self._copied == snapshot.words and self._copied_crc != snapshot.crc):
            log.info("%s does not fit its mark: the Bloom filter is loaded from its log.", self._snapshot_path)
            # The log also has the IDs that were added in the meantime.
            self._load = self._log = replace(self._log, snapshot=None)
            self._filter = BloomFilter(self._log.hashes)
            self._end_copy()
        elif self._copied == snapshot.words:
            self._loaded, self._loaded_crc = snapshot.hashes, snapshot.log_crc
            self._end_copy()
        return -(-len(part) // WORDS_PER_KEY)

    def _write_snapshot(self, keys: int) -> int:
        path = self._snapshot_path.with_suffix(NEW_SNAPSHOT_SUFFIX)
        try:
            if self._copy is None:
                self._copied_at = self._log.hashes
                path.unlink(missing_ok=True)
                self._copy = self._filter.snapshot(self._log)
            part = self._filter.part(self._copied, min(keys * WORDS_PER_KEY, PIECE_WORDS)).tobytes()
            _write(path, part, self._copied)
            self._copied += len(part) // _HASH_BYTES
            self._copied_crc = zlib.crc32(part, self._copied_crc)
            if self._copied == self._copy.words:
                path.replace(self._snapshot_path)
                self._log = replace(self._log, snapshot=replace(self._copy, crc=self._copied_crc))
                self._end_copy()
        except (OSError, DedupError) as error:
            # No IDs are lost, because the log contains them. When the log has grown, `warm` tries to write a snapshot
            # again.
            log.warning("No snapshot of a Bloom filter: %s The next start loads the filter from its log.", error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._end_copy()
            return keys
        return -(-len(part) // _HASH_BYTES // WORDS_PER_KEY)

    def _end_copy(self) -> None:
        self._copy, self._copied, self._copied_crc = None, 0, 0

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


def _write(path: Path, data: bytes, first: int) -> None:
    """Write data to a file, starting at word index ``first``."""
    try:
        # The file is not kept open, because a worker may have 256 stores.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            written = os.pwrite(file, data, first * _HASH_BYTES)
        finally:
            os.close(file)
    except OSError as error:
        raise DedupError(_no_room(path, str(error.strerror))) from error
    if written < len(data):
        raise DedupError(_no_room(path, "the disk is full"))


def _no_room(path: Path, reason: str) -> str:
    return f"{path}: {reason}. Nothing is lost: {remedy_of(reason)}."


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
