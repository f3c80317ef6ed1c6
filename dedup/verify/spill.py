"""Keeps rows on disk in buckets that fit into memory. All rows of a tracking ID are in the same bucket."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, BinaryIO, Final

import msgspec

BUCKET_ROWS: Final = 60_000
"""Average number of log rows per bucket. A replay of this many rows takes tens of MB of memory."""
_PENDING_ROWS: Final = 20_000
_PENDING_BYTES: Final = 8 << 20
_LENGTH_BYTES: Final = 8
_WHOLE_BYTES: Final = 48
"""Values up to this length are kept unchanged; for longer values, only the length and a digest are kept."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def buckets_for(rows: int) -> int:
    """Return the number of buckets for this many rows, so that each bucket fits into memory."""
    return 1 + rows // BUCKET_ROWS


def place_of(tracking_id: bytes | None, key: bytes | None, value: bytes | None) -> int:
    """Hash a record's ID or, if absent, its key and value to the 64-bit number that determines the record's bucket."""
    content = tracking_id if tracking_id is not None else b"\0%b\0%b" % (key or b"", value or b"")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def condensed(value: bytes | None) -> bytes | None:
    """Shorten a long value to its length and 256-bit digest; a prefix distinguishes it from a short, complete value."""
    if value is None or len(value) <= _WHOLE_BYTES:
        return None if value is None else b"=" + value
    return b"#%d " % len(value) + blake2b(value, digest_size=32).digest()


def stand_in_of(value: bytes | None) -> bytes:
    """Return the digest that a worker writes in place of an oversized value, given the value from `condensed`."""
    if value is not None and value.startswith(b"#"):
        length, _, digest = value[1:].partition(b" ")
        return b"blake2b-256:%b of %b bytes" % (digest.hex().encode(), length)
    return stand_in(None if value is None else value[1:])


def stand_in(value: bytes | None) -> bytes:
    """Return the digest that a worker writes to a late or dead-letter topic in place of an oversized value."""
    content = value or b""
    return f"blake2b-256:{blake2b(content, digest_size=32).hexdigest()} of {len(content)} bytes".encode()


class Spill:
    """Stores rows in buckets on disk; the rows of a bucket are read in the order in which they were added."""

    def __init__(self, directory: str, buckets: int) -> None:
        self.buckets: Final = buckets
        self.rows = 0
        self._file: Final[BinaryIO] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed by `close`
        self._pending: Final[list[list[Sequence[Any]]]] = [[] for _ in range(buckets)]
        self._pending_rows = 0
        self._pending_bytes = 0
        self._chunks: Final = [array("q") for _ in range(buckets)]
        """Maps each bucket to the file offsets of its chunks."""

    def add(self, place: int, row: Sequence[Any], size_bytes: int = 0) -> None:
        """Add a row to the bucket for the hash ``place``; ``size_bytes`` is the approximate size of the row's long
        values.
        """
        self._pending[place % self.buckets].append(row)
        self.rows += 1
        self._pending_rows += 1
        self._pending_bytes += size_bytes
        if self._pending_rows >= _PENDING_ROWS or self._pending_bytes >= _PENDING_BYTES:
            self.flush()

    def bucket(self, number: int) -> Iterator[list[Any]]:
        """Yield the rows of a bucket as lists."""
        self.flush()
        for start in self._chunks[number]:
            self._file.seek(start)
            length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
            yield from _unpack(self._file.read(length))

    def clear(self) -> None:
        """Remove all rows."""
        for rows, chunks in zip(self._pending, self._chunks, strict=True):
            rows.clear()
            del chunks[:]
        self.rows = self._pending_rows = self._pending_bytes = 0

    def close(self) -> None:
        """Free the disk space."""
        self._file.close()

    def flush(self) -> None:
        """Write the rows that are still in memory to disk."""
        if not self._pending_rows:
            return
        self._file.seek(0, 2)
        for number, rows in enumerate(self._pending):
            if rows:
                self._chunks[number].append(self._file.tell())
                content = _pack(rows)
                self._file.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
                rows.clear()
        self._pending_rows = self._pending_bytes = 0
