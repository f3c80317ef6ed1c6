"""Implements a source that reads growing files in a directory, as lines or as CSV rows converted to JSON objects.

`Files` watches the directory, `_LineReader` reads the complete lines of one file, and `_CsvRows` converts them. A file
is identified by its inode and a digest of its first bytes, not by its name. A file that is renamed or deleted while it
is open is still read to its end, even if its new name does not match the pattern. A file that became shorter, or begins
with different bytes, is another file with a reused inode. Whether bytes of the old file were lost is unknown, so ingest
stops unless the ingest file sets `changed: start_over`.
"""

from __future__ import annotations

import csv
import fnmatch
import logging
import os
import stat
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from dedup.connect.source import DeadRecord, SourceRecords
from dedup.errors import AuthorMistake, Problem
from dedup.topology.schema import CsvType, FilesSource

CHUNK_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 4096
_DIGEST_BYTES: Final = 32
_INTEGER_DIGITS: Final = 400
_BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}
log: Final = logging.getLogger(__name__)


class _FilePosition(msgspec.Struct, frozen=True):
    """The read position in a file and the file's identity, stored as JSON in the positions topic."""

    path: str
    inode: int
    position: int = 0
    head_bytes: int = 0
    head: str = ""
    generation: int = 0
    """The number of earlier files with this inode."""
    deleted: bool = False
    """True if the file was read to its end and deleted, so that the next file with this inode is a different file."""

    @property
    def part(self) -> str:
        """An identifier of the file that does not change when the file is renamed."""
        return f"{self.inode}.{self.generation}"


@dataclass(slots=True)
class _Open:
    descriptor: int
    reader: _LineReader
    known: _FilePosition
    rows: _CsvRows | None
    gone: bool = False
    """True if the file was deleted or its name no longer matches. The file is then read to its end and closed."""
    warned: bool = False


class Files:
    """A `RecordSource` that reads the files of one directory."""

    def __init__(self, name: str, spec: FilesSource, most_bytes: int) -> None:
        self._name: Final = name
        self._spec: Final = spec
        self._most_bytes: Final = most_bytes
        self._known: dict[int, _FilePosition] = {}
        """The latest file for each inode."""
        self._open: dict[int, _Open] = {}
        self._turn: list[int] = []
        self._inodes: set[int] = set()
        """Inodes of all files in the directory."""

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """See `RecordSource`. Files that were deleted while open stay open, because they could not be opened again."""
        without_name = [each for each in self._open.values() if each.gone or not os.fstat(each.descriptor).st_nlink]
        for each in without_name:
            del self._open[each.known.inode]
        self.close()
        self._known = {}
        for value in positions.values():
            known = msgspec.json.decode(value, type=_FilePosition)
            latest = self._known.get(known.inode)
            if latest is None or latest.generation < known.generation:
                self._known[known.inode] = known
        for each in without_name:
            self._rewind(each)

    def _rewind(self, opened: _Open) -> None:
        """Rewind an open file to its committed position, or to its beginning if it has none."""
        inode, descriptor = opened.known.inode, opened.descriptor
        known = self._known.get(inode)
        if known is None or known.generation < opened.known.generation:
            known = _FilePosition(opened.known.path, inode, generation=opened.known.generation)
        self._keep_open(descriptor, known, self._csv_rows(known.path, descriptor), gone=opened.gone)

    def _keep_open(self, descriptor: int, known: _FilePosition, rows: _CsvRows | None, *, gone: bool = False) -> None:
        self._known[known.inode] = known
        reader = _LineReader(descriptor, known.position, self._most_bytes)
        self._open[known.inode] = _Open(descriptor, reader, known, rows, gone=gone)

    def poll(self) -> SourceRecords | None:
        """See `RecordSource`. Each call returns a chunk of one file, and the files take turns."""
        if not self._turn:
            self._scan()
            self._turn = list(self._open)
        while self._turn:
            inode = self._turn.pop(0)
            found = self._read(self._open[inode])
            if found is not None:
                if inode in self._open:
                    self._turn.append(inode)  # the file may have more, but the others come first
                return found
        return None

    def waiting(self) -> list[str]:
        """See `RecordSource`."""
        return [
            f"{each.known.path}: {each.reader.rest_bytes} bytes after the last line feed are not a complete line yet"
            for each in self._open.values()
            if each.reader.rest_bytes
        ]

    def close(self) -> None:
        """See `RecordSource`."""
        for each in self._open.values():
            os.close(each.descriptor)
        self._open, self._turn = {}, []

    def _scan(self) -> None:
        """Open new files, and mark open ones whose name no longer matches."""
        listed = self._listed()
        self._inodes = {status.st_ino for status in listed.values()}
        named: set[int] = set()
        for path, status in listed.items():
            inode = status.st_ino
            if fnmatch.fnmatchcase(path.name, self._spec.pattern):
                if not stat.S_ISREG(status.st_mode):
                    raise AuthorMistake(
                        [Problem(str(path), "is not a regular file; give it a name that does not match the pattern")]
                    )
                named.add(inode)
            elif inode in self._open or not self._has_unread(inode, status):
                continue
            if inode in self._open:
                self._renamed(self._open[inode], str(path))
            else:
                self._open_file(path, inode)
        for inode in self._open.keys() - named:
            self._open[inode].gone = True

    def _listed(self) -> dict[Path, os.stat_result]:
        directory = Path(self._spec.directory)
        found: dict[Path, os.stat_result] = {}
        try:
            paths = sorted(directory.iterdir())
        except OSError as error:
            raise _unreadable(directory, error) from error
        for path in paths:
            try:
                found[path] = path.stat()
            except FileNotFoundError:
                if path.is_symlink() and fnmatch.fnmatchcase(path.name, self._spec.pattern):
                    raise AuthorMistake([Problem(str(path), "is a broken link; remove or fix it")]) from None
                continue  # the file was renamed after it was listed; the next scan finds it
            except OSError as error:
                raise _unreadable(path, error) from error
        return found

    def _has_unread(self, inode: int, status: os.stat_result) -> bool:
        """Tell whether a file whose name does not match was renamed with unread lines while ingest was not running."""
        known = self._known.get(inode)
        return known is not None and not known.deleted and status.st_size > known.position

    def _renamed(self, opened: _Open, path: str) -> None:
        opened.gone = False
        if opened.known.path != path:
            log.info("%s is now %s; it is read on", opened.known.path, path)
            opened.known = msgspec.structs.replace(opened.known, path=path)

    def _open_file(self, path: Path, inode: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unreadable(path, error) from error
        if os.fstat(descriptor).st_ino != inode:
            os.close(descriptor)  # another file has this name now; the next scan finds both files
            return
        try:
            known = self._position_of(descriptor, str(path), inode)
            rows = self._csv_rows(str(path), descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._keep_open(descriptor, known, rows)

    def _csv_rows(self, path: str, descriptor: int) -> _CsvRows | None:
        columns = self._spec.columns
        return None if columns is None else _CsvRows(path, descriptor, columns, self._most_bytes)

    def _position_of(self, descriptor: int, path: str, inode: int) -> _FilePosition:
        known = self._known.get(inode)
        if known is None:
            self._refuse_copy(descriptor, path)
            return _FilePosition(path, inode)
        if known.deleted:
            return _FilePosition(path, inode, generation=known.generation + 1)
        if _changed(descriptor, known):
            return self._start_over(known, path, descriptor)
        return msgspec.structs.replace(known, path=path)

    def _refuse_copy(self, descriptor: int, path: str) -> None:
        """Raise AuthorMistake if a file replaced one with the same first bytes, because its lines may have been sent
        already.
        """
        if self._spec.changed == "start_over":
            return
        for old in self._known.values():
            replaced = old.path == path and old.inode not in self._inodes and not old.deleted
            # Different CSV files often have the same header.
            if replaced and old.position > self._names_bytes(descriptor) and not _changed(descriptor, old):
                text = (
                    f"is another file than the one of this name that was read up to byte {old.position}, and begins "
                    f"with the same bytes: is it a copy? Nothing of it was sent. Files must only grow, and be rotated "
                    f"by renaming. If its lines are new, set `changed: start_over`"
                )
                raise AuthorMistake([Problem(path, text)])

    def _names_bytes(self, descriptor: int) -> int:
        if self._spec.columns is None:
            return 0
        return os.pread(descriptor, _HEAD_BYTES, 0).find(b"\n") + 1

    def _start_over(self, known: _FilePosition, path: str, descriptor: int) -> _FilePosition:
        """Return the position at the beginning of a changed file. Raises AuthorMistake unless `changed: start_over` is
        set.
        """
        size = os.fstat(descriptor).st_size
        what = f"has {size} bytes now" if size < known.position else "begins with other bytes now"
        # With another name and other bytes, the file is a new one that got the inode of a deleted file.
        if self._spec.changed != "start_over" and known.path == path:
            text = (
                f"was read up to byte {known.position} and {what}: it was truncated or replaced, and lines written "
                f"before that may never have been read. Nothing of it was sent since. Rotate files by renaming; or set "
                f"`changed: start_over` to read such files from their beginning"
            )
            raise AuthorMistake([Problem(path, text)])
        log.warning("%s %s; it is read from its beginning", path, what)
        return _FilePosition(path, known.inode, generation=known.generation + 1)

    def _read(self, opened: _Open) -> SourceRecords | None:
        if _changed(opened.descriptor, opened.known):
            known = self._start_over(opened.known, opened.known.path, opened.descriptor)
            opened.reader = _LineReader(opened.descriptor, 0, self._most_bytes)
            opened.rows = self._csv_rows(known.path, opened.descriptor)
            opened.known = self._known[known.inode] = known
        if opened.rows is not None and not opened.rows.ready():
            return None
        reader = opened.reader
        while True:
            before = reader.read_to
            chunk = reader.read()
            if chunk is not None or reader.read_to == before:
                break
        if chunk is None and self._spec.last_line == "take":
            chunk = reader.last_line()
        if chunk is not None:
            return self._records(opened, chunk)
        return self._close_file(opened) if opened.gone else None

    def _close_file(self, opened: _Open) -> SourceRecords | None:
        """Close a file that was read to its end. A deleted file is recorded as deleted, as its inode may be reused."""
        if opened.reader.rest_bytes:
            if not opened.warned:
                text = "%s was deleted; the %d bytes after its last line feed are not sent until a line feed follows"
                log.warning(text, opened.known.path, opened.reader.rest_bytes)
                opened.warned = True
            return None
        known = opened.known
        deleted = os.fstat(opened.descriptor).st_nlink == 0
        os.close(opened.descriptor)
        del self._open[known.inode]
        if not deleted or not known.position:
            return None
        known = self._known[known.inode] = msgspec.structs.replace(known, deleted=True)
        positions = {known.part: msgspec.json.encode(known)}
        return SourceRecords(known.part, "", [], [], positions, lambda _: positions)

    def _records(self, opened: _Open, chunk: _Chunk) -> SourceRecords:
        """Return a chunk as records, and advance the file's position. The place of a record is its byte offset."""
        head_bytes = min(chunk.next_position, _HEAD_BYTES)
        known = opened.known
        if head_bytes != known.head_bytes:
            head = _head_digest(opened.descriptor, head_bytes)
            known = msgspec.structs.replace(known, head_bytes=head_bytes, head=head)
        opened.known = self._known[known.inode] = msgspec.structs.replace(known, position=chunk.next_position)
        prefix = f"{self._name}/{known.part}/"
        bad = chunk.long_lines
        if opened.rows is not None:
            values, places, refused = opened.rows.read(chunk.lines, chunk.offsets)
            bad = bad + refused
        else:
            values, places = _without_blank(chunk.lines, chunk.offsets)
        dead = [
            DeadRecord(f"{prefix}{at}", code, detail, line, row=bisect_left(places, at))
            for at, code, detail, line in bad
        ]
        read = opened.known

        def after(row: int) -> dict[str, bytes | None]:
            following = [at for at in (*places[row + 1 : row + 2], *(each.offset for each in bad)) if at > places[row]]
            position = min(following, default=read.position)
            return {read.part: msgspec.json.encode(msgspec.structs.replace(read, position=position))}

        positions = {read.part: msgspec.json.encode(read)}
        return SourceRecords(read.part, prefix, values, places, positions, after, dead)


def _changed(descriptor: int, known: _FilePosition) -> bool:
    """Tell from a file's size and first bytes whether it no longer contains the data that was read from it."""
    if os.fstat(descriptor).st_size < known.position:
        return True
    return bool(known.head_bytes) and _head_digest(descriptor, known.head_bytes) != known.head


def _without_blank(values: list[bytes], places: list[int]) -> tuple[list[bytes], list[int]]:
    """Return the lines and their places without blank lines and trailing carriage returns."""
    if any(value.endswith(b"\r") for value in values):
        values = [value.removesuffix(b"\r") for value in values]
    if all(values) and not any(value.isspace() for value in values):
        return values, places
    kept = [(value, place) for value, place in zip(values, places, strict=True) if value.strip()]
    return [value for value, _ in kept], [place for _, place in kept]


def _unreadable(path: Path, error: OSError) -> AuthorMistake:
    text = f"cannot be read: {error.strerror}. Nothing was skipped; give this user permission to read it, or move it"
    return AuthorMistake([Problem(str(path), text)])


def _head_digest(descriptor: int, length_bytes: int) -> str:
    """Return the digest of a file's first ``length_bytes`` bytes; an empty string if the file is shorter."""
    head = os.pread(descriptor, length_bytes, 0)
    return blake2b(head, digest_size=16).hexdigest() if len(head) == length_bytes else ""


class _BadLine(NamedTuple):
    """A line that becomes a dead letter."""

    offset: int
    code: str
    detail: str
    line: bytes | None
    """None if it is too long to be kept."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive lines without their line feeds, and the byte offset of each."""

    lines: list[bytes]
    offsets: list[int]
    next_position: int
    long_lines: list[_BadLine] = field(default_factory=list)


class _LineReader:
    """Reads complete lines from one open file, starting at any byte.

    A line ends with a line feed. A line that is too long for a record is read but not kept; a dead letter reports its
    length and digest.
    """

    def __init__(self, descriptor: int, position: int, most_bytes: int) -> None:
        self._descriptor: Final = descriptor
        self._most_bytes: Final = most_bytes
        self._position = position
        """The offset of the first line that was not returned yet."""
        self._rest = b""
        """The part of that line that was read."""
        self._digest: Any = None
        """Digest of the part read so far of a line that is too long to keep; `_rest` is empty while this is set."""
        self._digested_bytes = 0

    @property
    def read_to(self) -> int:
        return self._position + self.rest_bytes

    @property
    def rest_bytes(self) -> int:
        """The number of bytes read after the last line feed."""
        return self._digested_bytes + len(self._rest)

    def read(self) -> _Chunk | None:
        """Return the next lines; None if no line is complete yet. The caller repeats the call while `read_to` grows."""
        data = os.pread(self._descriptor, CHUNK_BYTES, self.read_to)
        if not data:
            return None
        if self._digest is not None:
            return self._through_long_line(data)
        data = self._rest + data
        end = data.rfind(b"\n")
        if end < 0:
            self._rest = data
            if len(data) > self._most_bytes:
                self._digest, self._digested_bytes = blake2b(data, digest_size=_DIGEST_BYTES), len(data)
                self._rest = b""
            return None
        self._rest = data[end + 1 :]
        return self._chunk(data[:end].split(b"\n"))

    def last_line(self) -> _Chunk | None:
        """Return the data after the last line feed as a line; None if there is none."""
        if self._digest is not None:
            return self._end_long_line(b"", feed=0)
        if not self._rest:
            return None
        line, self._rest = self._rest, b""
        return self._chunk([line], feed=0)

    def _chunk(self, lines: list[bytes], *, feed: int = 1) -> _Chunk:
        offsets = list(accumulate([len(line) + 1 for line in lines], initial=self._position))
        self._position = offsets.pop() - (1 - feed)
        if max(map(len, lines)) <= self._most_bytes:
            return _Chunk(lines, offsets, self._position)
        long = [(line, at) for line, at in zip(lines, offsets, strict=True) if len(line) > self._most_bytes]
        kept = [(line, at) for line, at in zip(lines, offsets, strict=True) if len(line) <= self._most_bytes]
        found = [_too_long(at, len(line), blake2b(line, digest_size=_DIGEST_BYTES).hexdigest()) for line, at in long]
        return _Chunk([line for line, _ in kept], [at for _, at in kept], self._position, found)

    def _through_long_line(self, data: bytes) -> _Chunk | None:
        end = data.find(b"\n")
        if end < 0:
            self._digest.update(data)
            self._digested_bytes += len(data)
            return None
        self._rest = b""
        return self._end_long_line(data[:end], feed=1)

    def _end_long_line(self, last: bytes, *, feed: int) -> _Chunk:
        self._digest.update(last)
        length = self._digested_bytes + len(last)
        line = _too_long(self._position, length, self._digest.hexdigest())
        self._position += length + feed
        self._digest, self._digested_bytes = None, 0
        return _Chunk([], [], self._position, [line])


def _too_long(offset: int, length_bytes: int, digest: str) -> _BadLine:
    text = f"a line of {length_bytes} bytes, more than a record can hold; blake2b-256:{digest}"
    return _BadLine(offset, "too_large", text, None)


class _CsvRows:
    """Converts the lines of one CSV file, whose first line names the columns, to JSON objects."""

    def __init__(self, path: str, descriptor: int, columns: Mapping[str, CsvType], most_bytes: int) -> None:
        self._path: Final = path
        self._descriptor: Final = descriptor
        self._columns: Final = dict(columns)
        self._most_bytes: Final = most_bytes
        self._names: list[str] | None = None
        self._first = 0

    def ready(self) -> bool:
        """Tell whether the header line is complete. Raises AuthorMistake if the header has different columns."""
        if self._names is not None:
            return True
        head = os.pread(self._descriptor, self._most_bytes, 0)
        end = head.find(b"\n")
        if end < 0:
            return False
        try:
            cells = _cells(head[:end].removeprefix(b"\xef\xbb\xbf"))
        except (UnicodeDecodeError, csv.Error):
            cells = None
        if cells is None or sorted(cells) != sorted(self._columns):
            shown = "not CSV" if cells is None else ", ".join(cells)
            text = (
                f"its header line is {shown[:500]}, but `columns` has {', '.join(self._columns)}. Nothing of this "
                f"file was sent; correct `columns`, or move the file away"
            )
            raise AuthorMistake([Problem(f"{self._path}:1", text)])
        self._names, self._first = cells, end + 1
        return True

    def read(self, lines: Sequence[bytes], offsets: Sequence[int]) -> tuple[list[bytes], list[int], list[_BadLine]]:
        """Return the rows as JSON, their offsets, and the lines that are not valid rows."""
        names = self._names or []
        converters = [_CONVERTERS[self._columns[name]] for name in names]
        values: list[bytes] = []
        kept: list[int] = []
        bad: list[_BadLine] = []
        for line, offset in zip(lines, offsets, strict=True):
            if offset < self._first or not line.strip():
                continue
            found = _row(line, names, converters)
            if isinstance(found, bytes):
                values.append(found)
                kept.append(offset)
            else:
                bad.append(_BadLine(offset, *found, line))
        return values, kept, bad


def _row(line: bytes, names: Sequence[str], converters: Sequence[Callable[[str], Any]]) -> bytes | tuple[str, str]:
    """Return the row as JSON, or the code and detail for its dead letter."""
    try:
        cells = _cells(line)
    except UnicodeDecodeError as error:
        return "not_utf8", f"byte {error.start} of the line is not UTF-8"
    except csv.Error as error:
        return "not_csv", f"it is not a CSV row: {error}; a row is one line, so a cell cannot contain a line feed"
    if len(cells) != len(names):
        return "wrong_columns", f"it has {len(cells)} cells, and the file has {len(names)} columns"
    row: dict[str, Any] = {}
    for name, cell, convert in zip(names, cells, converters, strict=True):
        try:
            row[name] = convert(cell) if cell else None
        except ValueError:
            return "wrong_type", f"the cell of column {name} does not have the type that `columns` declares"
    try:
        return orjson.dumps(row)
    except TypeError:
        return "wrong_type", "an integer has more than 64 bits; declare that column as text"


def _cells(line: bytes) -> list[str]:
    text = line.decode().removesuffix("\r")
    return next(csv.reader([text], strict=True), [])


def _integer(cell: str) -> int:
    if len(cell) > _INTEGER_DIGITS or not cell.removeprefix("-").isascii() or not cell.removeprefix("-").isdigit():
        raise ValueError(cell)
    return int(cell)


def _number(cell: str) -> float | int:
    found = float(cell)
    if found - found != 0 or "_" in cell:
        raise ValueError(cell)  # JSON has no infinity and no NaN
    try:
        return _integer(cell)
    except ValueError:
        return found


def _boolean(cell: str) -> bool:
    if cell.lower() not in _BOOLEANS:
        raise ValueError(cell)
    return _BOOLEANS[cell.lower()]


_CONVERTERS: Final[Mapping[CsvType, Callable[[str], Any]]] = {
    "text": str,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
}
