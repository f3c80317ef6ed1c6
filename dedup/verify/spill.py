"""Keeps rows on disk in buckets that fit into memory. All rows with the same tracking ID are in the same bucket."""

from __future__ import annotations

import sqlite3
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np

from dedup.errors import FULL_DISK, DedupError
from dedup.verify.compare import Column

BUCKET_ROWS: Final = 60_000
"""The average number of log rows per bucket. A replay of this many rows takes tens of MB of memory."""
_PENDING_ROWS: Final = 20_000
_PENDING_BYTES: Final = 8 << 20
_LENGTH_BYTES: Final = 8
_FULL_DATABASE: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE})
_Chunk = tuple[Column, Sequence[list[Any]]]

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


@contextmanager
def scratch_directory(prefix: str, parent: Path | None) -> Iterator[str]:
    """Yield a new directory for temporary files in ``parent`` or the default directory, and delete it at the end.

    Raises DedupError if the disk is full.
    """
    where = _default() if parent is None else parent
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=where) as directory:
            yield directory
    except OSError as error:
        if error.errno not in FULL_DISK or not Path(error.filename or "/").is_relative_to(where):
            raise
        raise DedupError(_no_room(where, error.strerror)) from error
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode not in _FULL_DATABASE:
            raise
        raise DedupError(_no_room(where, error)) from error


def _default() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # Python has tried to write a file to each usual directory.
        raise DedupError(_no_room("temporary directory", error.strerror)) from error


def _no_room(where: Path | str, reason: object) -> str:
    return (
        f"{where}: the temporary files of this command cannot be written: {reason}. Free space there, or use a "
        f"directory on a larger disk: name it with --scratch of `dedup verify`, or in the environment variable TMPDIR."
    )


def buckets_for(rows: int) -> int:
    """Return the number of buckets for this many rows, so that each bucket fits into memory."""
    return 1 + rows // BUCKET_ROWS


def place_of(tracking_id: bytes | None, content: bytes) -> int:
    """Return a hash of the ID or, without an ID, of the content. The hash decides whether the record is in a sample."""
    return int.from_bytes(blake2b(content if tracking_id is None else tracking_id, digest_size=8).digest(), "little")


def places_of(ids: Sequence[bytes | None], contents: Sequence[bytes]) -> Column:
    """Return a hash of each ID, or of the content of a record without an ID. The hashes differ between processes."""
    known = [content if own is None else own for own, content in zip(ids, contents, strict=True)]
    return np.fromiter(map(hash, known), np.int64, len(known))


def stand_in(value: bytes | None) -> bytes:
    """Return the digest that a worker writes to a late or dead-letter topic in place of an oversized value."""
    content = value or b""
    return f"blake2b-256:{blake2b(content, digest_size=32).hexdigest()} of {len(content)} bytes".encode()


class Spill:
    """Stores rows in buckets on disk, and returns the rows of a bucket in the order in which they were added.

    A row consists of ``numbers`` 64-bit integers, kept as arrays, and ``others`` other values, kept as lists.
    """

    def __init__(self, directory: str, buckets: int, numbers: int, others: int = 0) -> None:
        self.buckets: Final = buckets
        self.rows = 0
        self._directory: Final = directory
        self._numbers: Final = numbers
        self._others: Final = others
        self._file: Final[BinaryIO] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  # closed by `close`
        self._pending: Final[list[list[_Chunk]]] = [[] for _ in range(buckets)]
        self._pending_rows = 0
        self._pending_bytes = 0
        self._chunks: Final = [array("q") for _ in range(buckets)]
        """Maps each bucket to the file offsets of its chunks."""

    def add(self, places: Column, columns: Sequence[Any], size_bytes: int = 0) -> None:
        """Add each row to the bucket that the row's hash in ``places`` selects.

        ``columns`` contains arrays or lists of numbers, followed by lists of other values. ``size_bytes`` is the size
        of the rows' long values.
        """
        numbers = np.array(columns[: self._numbers], np.int64)
        others = columns[self._numbers :]
        places = places % self.buckets
        if self.buckets > 1:
            order = np.argsort(places, kind="stable")
            places, numbers, rows = places[order], numbers[:, order], order.tolist()
            others = [list(map(column.__getitem__, rows)) for column in others]
        ends = np.flatnonzero(np.diff(places, append=-1)) + 1
        for first, end in pairwise([0, *ends.tolist()]):
            chunk = (numbers[:, first:end], [column[first:end] for column in others])
            self._pending[places[first]].append(chunk)
        self.rows += len(places)
        self._pending_rows += len(places)
        self._pending_bytes += size_bytes
        if self._pending_rows >= _PENDING_ROWS or self._pending_bytes >= _PENDING_BYTES:
            self.flush()

    def bucket(self, number: int) -> list[Any]:
        """Return the columns of a bucket: an array for each number, and a list for each other value."""
        self.flush()
        numbers: list[Column] = [np.empty((self._numbers, 0), np.int64)]
        others: list[list[Any]] = [[] for _ in range(self._others)]
        for start in self._chunks[number]:
            self._file.seek(start)
            length = int.from_bytes(self._file.read(_LENGTH_BYTES), "little")
            content, *columns = _unpack(self._file.read(length))
            numbers.append(np.frombuffer(content, np.int64).reshape(self._numbers, -1))
            for other, column in zip(others, columns, strict=True):
                other.extend(column)
        return [*np.concatenate(numbers, axis=1), *others]

    def clear(self) -> None:
        """Remove all rows."""
        for pending, chunks in zip(self._pending, self._chunks, strict=True):
            pending.clear()
            del chunks[:]
        self.rows = self._pending_rows = self._pending_bytes = 0

    def close(self) -> None:
        """Delete the file on disk."""
        with suppress(OSError):  # If the disk is full, the remaining rows still cannot be written.
            self._file.close()

    def flush(self) -> None:
        """Write the rows that are still in memory to disk. If an OSError is raised, it names the directory."""
        if not self._pending_rows:
            return
        try:
            self._write()
        except OSError as error:
            error.filename = self._directory  # The file has no name.
            raise

    def _write(self) -> None:
        self._file.seek(0, 2)
        for pending, chunks in zip(self._pending, self._chunks, strict=True):
            if pending:
                chunks.append(self._file.tell())
                numbers = np.concatenate([numbers for numbers, _ in pending], axis=1)
                others = [
                    list(chain.from_iterable(parts)) for parts in zip(*(each for _, each in pending), strict=True)
                ]
                content = _pack([numbers.tobytes(), *others])
                self._file.write(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
                pending.clear()
        self._file.flush()
        self._pending_rows = self._pending_bytes = 0
