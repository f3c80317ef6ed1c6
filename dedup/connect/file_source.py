"""Implements a source that reads growing files in a directory, as lines or as CSV rows converted to JSON objects.

A file is identified by its inode and a digest of its first bytes, so a renamed file is not read again. If the file
system has a version for each use of an inode number, this version also identifies the file. An open file is read to its
end even if it has been deleted. If a file with an unchanged name becomes shorter or begins with different bytes, unread
lines may be lost. `dedup ingest` then stops, unless the ingest file sets `changed: start_over`.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import fnmatch
import logging
import math
import os
import re
import stat
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from dedup.connect.source import DIGEST_BYTES, DeadRecord, SourceRecords
from dedup.errors import AuthorMistake, Problem, StateIncompatible
from dedup.topology.schema import CsvType, FilesSource

CHUNK_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 4096
_GET_VERSION: Final = 0x80087601
"""The number of Linux's request `FS_IOC_GETVERSION`, which ext4, XFS, Btrfs, and F2FS support."""
_SCAN_AGAIN_S: Final = 5.0
"""The maximum time for which busy files, which always have more lines, may delay the search for new files."""
_ROTATION: Final = re.compile(r"[.-][0-9][-0-9._T:]*")
"""Matches the suffix that a log rotation appends to a name, such as .1 or -20261201. A compressed file is usually a
copy.
"""
_INTEGER: Final = re.compile(r"-?[0-9]{1,400}")
_BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}
_Lines = tuple[list[bytes], list[int], list[DeadRecord]]
"""Lines without their line feeds, the byte offset of each line, and lines that become dead letters."""
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
    """True if the file was read to its end and then deleted, so that the next file with its inode is a new file."""
    modified_ns: int = 0
    """The file's modification time when it was read up to ``position``, or 0 if it is unknown."""
    inode_version: int = 0
    """The version of the inode, which changes when the file system reuses the inode number, or 0 if it is unknown."""

    @property
    def part(self) -> str:
        """An identifier that stays the same when the file is renamed."""
        return f"{self.inode}.{self.generation}"

    def within(self, committed: _FilePosition | None) -> bool:
        """Return whether everything in the file up to this position is committed."""
        if committed is None:
            return not self.position
        return self.position <= committed.position and self.deleted <= committed.deleted

    def changed(self, descriptor: int) -> bool:
        """Return whether the file's size or first bytes show that the file was truncated or replaced after reading."""
        if os.fstat(descriptor).st_size < self.position:
            return True
        return bool(self.head_bytes) and _head_digest(descriptor, self.head_bytes) != self.head

    def is_of_another(self, descriptor: int) -> bool:
        """Return whether the open file is certainly a different file that got the same inode."""
        return bool(self.inode_version) and _inode_version(descriptor) not in {0, self.inode_version}

    def untouched(self, status: os.stat_result) -> bool:
        """Return whether a file's size and modification time have not changed since the file was read to its end."""
        return (status.st_size, status.st_mtime_ns) == (self.position, self.modified_ns)


class _OpenFile:
    def __init__(
        self, descriptor: int, known: _FilePosition, spec: FilesSource, most_bytes: int, *, gone: bool = False
    ) -> None:
        self.descriptor: Final = descriptor
        self.known = known
        self.lines: Final = _LineReader(descriptor, known.position, most_bytes)
        self.rows: Final = spec.columns and _CsvRows(known.path, descriptor, spec.columns, most_bytes)
        self.gone = gone
        """True if the file was deleted or its name no longer matches the pattern. Such a file is closed at its end."""
        self.warned = False


class Files:
    """A `RecordSource` that reads the files of one directory."""

    def __init__(self, name: str, spec: FilesSource, most_bytes: int) -> None:
        self._name: Final = name
        self._spec: Final = spec
        self._most_bytes: Final = most_bytes
        self._known: dict[int, _FilePosition] = {}
        """Maps each inode to the position in the latest file with that inode."""
        self._open: dict[int, _OpenFile] = {}
        self._ended: dict[str, tuple[_OpenFile, _FilePosition]] = {}
        """Maps the part of a deleted or renamed file to the file, which stays open until the end is committed."""
        self._committed: dict[str, _FilePosition] = {}
        self._turn: list[int] = []
        self._scanned_s = -math.inf
        self._renamed: list[_FilePosition] = []
        """Uncommitted positions of files that were renamed after they had been read to their ends."""
        self._listed: Mapping[int, Sequence[Path]] = {}
        """Maps the inode of each file in the directory to the file's path and links."""
        self._passed_over: dict[int, str | None] = {}
        """Maps the inode of each file checked by `_warn_if_unread` to the file's name, or to None if it warned."""

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """Continue from the committed positions. Open files stay open, because deleted files cannot be opened again.

        Raises StateIncompatible if a position is not a position in a file.
        """
        self._known, self._turn, self._renamed = {}, [], []
        for opened, _ in self._ended.values():
            if self._open.setdefault(opened.known.inode, opened) is not opened:
                os.close(opened.descriptor)
        self._ended = {}
        self._committed = {part: self._decoded(part, value) for part, value in positions.items()}
        for known in self._committed.values():
            latest = self._known.get(known.inode)
            if latest is None or latest.generation < known.generation:
                self._known[known.inode] = known
        for inode, opened in self._open.items():
            committed = self._known.get(inode)
            now = opened.known
            if committed is None or committed.generation < now.generation:
                committed = _FilePosition(now.path, inode, generation=now.generation)
            self._keep_open(opened.descriptor, msgspec.structs.replace(committed, path=now.path), gone=opened.gone)

    def _decoded(self, part: str, position: bytes) -> _FilePosition:
        try:
            return msgspec.json.decode(position, type=_FilePosition)
        except msgspec.DecodeError:
            raise StateIncompatible(
                f"{self._name}: the source offsets hold a position of {part!r}, which is not a file. Nothing was sent. "
                f"Put the source back as it was; or give it another name, which sends all files from their beginning."
            ) from None

    def _keep_open(self, descriptor: int, known: _FilePosition, *, gone: bool = False) -> _OpenFile:
        self._known[known.inode] = known
        opened = self._open[known.inode] = _OpenFile(descriptor, known, self._spec, self._most_bytes, gone=gone)
        return opened

    def poll(self) -> SourceRecords | None:
        """Return records from one file, or None if no file has new lines. The next call begins with another file."""
        if not self._turn or time.monotonic() - self._scanned_s > _SCAN_AGAIN_S:
            self._scan()
            in_turn = set(self._turn)
            self._turn += [inode for inode in self._open if inode not in in_turn]
            self._scanned_s = time.monotonic()
        if self._renamed:
            return _without_records(self._renamed.pop())
        while self._turn:
            inode = self._turn.pop(0)
            opened = self._open[inode]
            try:
                found = self._read(opened)
            except OSError as error:  # A file server may be unavailable, for example.
                raise _unreadable(opened.known.path, error) from error
            if found is not None:
                if inode in self._open:
                    self._turn.append(inode)  # The file may contain more lines, but other files are read first.
                return found
        return None

    def committed(self, positions: Mapping[str, bytes]) -> None:
        """Close each file that was read to its end if the end is now committed."""
        for part, value in positions.items():
            self._committed[part] = msgspec.json.decode(value, type=_FilePosition)
            opened, end = self._ended.get(part, (None, None))
            if opened is not None and end is not None and end.within(self._committed[part]):
                os.close(opened.descriptor)
                del self._ended[part]

    def waiting(self) -> list[str]:
        """Return a sentence for each file whose header line or last line has no line feed yet."""
        return [
            f"{each.known.path}: {each.lines.rest_bytes} bytes after the last line feed are not a complete line yet"
            for each in self._open.values()
            if each.lines.rest_bytes
        ] + [
            f"{each.known.path}: its header line has no line feed yet"
            for each in self._open.values()
            if each.rows and not each.rows.ready() and os.fstat(each.descriptor).st_size
        ]

    def close(self) -> None:
        """Close all files."""
        for each in (*self._open.values(), *(opened for opened, _ in self._ended.values())):
            os.close(each.descriptor)
        self._open, self._ended, self._turn = {}, {}, []

    def _scan(self) -> None:
        """Open new files, and mark open files whose names no longer match the pattern."""
        listed = self._list()
        self._listed = _by_inode(listed)
        self._passed_over = {inode: name for inode, name in self._passed_over.items() if inode in self._listed}
        named: dict[int, int] = {}
        for path, status in listed.items():
            inode = status.st_ino
            opened = self._open.get(inode)
            if self._matches(path):
                _refuse_unfit(path, status, named)
                if inode in named:
                    continue  # another link to a file that was already found
                named[inode] = status.st_dev
            elif opened is not None or not stat.S_ISREG(status.st_mode):
                continue
            else:
                # While `dedup ingest` was not running, the file may have been renamed before all its lines were read.
                known = self._known.get(inode)
                if known is None or known.deleted:
                    self._warn_if_unread(path, status)
                    continue
                if status.st_size <= known.position:
                    self._rename_if_committed(known, path, status)
                    continue
            if opened is None:
                self._open_file(path, inode)
                continue
            opened.gone = False
            if opened.known.path != str(path):
                log.info("%s is now %s; reading continues", opened.known.path, path)
                opened.known = msgspec.structs.replace(opened.known, path=str(path))
        for inode in self._open.keys() - named.keys():
            self._open[inode].gone = True

    def _warn_if_unread(self, path: Path, status: os.stat_result) -> None:
        """Log a warning, once per file, if a file that does not match the pattern is named like a rotated file."""
        name = path.name
        if not status.st_size or self._passed_over.get(status.st_ino, "") in {name, None}:
            return
        self._passed_over[status.st_ino] = name
        if not any(_ROTATION.fullmatch(name, at) and self._matches(name[:at]) for at in range(1, len(name))):
            return
        self._passed_over[status.st_ino] = None
        text = (
            "%s was never read: it has the name of a rotated file, which `pattern` does not match. Let `pattern` match "
            'the names of rotated files, too, such as "%s*"; a file that was read and then renamed is not sent again.'
        )
        log.warning(text, _text(path), self._spec.pattern)

    def _rename_if_committed(self, known: _FilePosition, path: Path, status: os.stat_result) -> None:
        if known.part not in self._ended and known.within(self._committed.get(known.part)):
            self._rename(known, path, status)

    def _rename(self, known: _FilePosition, path: Path, status: os.stat_result) -> None:
        """Remember the new name of a file that was read to its end.

        A new file that later gets the old name is then recognized as new, even if the file reuses the inode number.
        """
        name = _text(path)
        if known.path != name and status.st_nlink == 1 and not path.is_symlink() and known.untouched(status):
            self._known[known.inode] = msgspec.structs.replace(known, path=name)
            self._renamed.append(self._known[known.inode])

    def _list(self) -> dict[Path, os.stat_result]:
        found: dict[Path, os.stat_result] = {}
        path = Path(os.path.expanduser(self._spec.directory))  # noqa: PTH111 - Path's raises for an unknown user
        try:
            for path in sorted(path.iterdir()):  # noqa: B020 - an error names the path that it is about
                try:
                    found[path] = path.stat()
                except OSError as error:
                    is_link = path.is_symlink()
                    if is_link and not self._matches(path):
                        continue
                    if not isinstance(error, FileNotFoundError):
                        raise
                    if is_link:
                        raise _mistake(path, "is a broken link; remove or fix it") from None
                    # Otherwise, the file was renamed after it was listed; the next scan finds it.
        except OSError as error:
            raise _unreadable(path, error) from error
        return found

    def _open_file(self, path: Path, inode: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unreadable(path, error) from error
        if os.fstat(descriptor).st_ino != inode:
            os.close(descriptor)  # Another file now has this name; the next scan finds both files.
            return
        known = self._known.get(inode)
        if known and not self._matches(path) and (known.changed(descriptor) or known.is_of_another(descriptor)):
            self._warn_if_unread(path, os.fstat(descriptor))  # The file reuses the inode of another file.
            os.close(descriptor)
            return
        try:
            self._keep_open(descriptor, self._position_of(descriptor, _text(path), inode))
        except BaseException:
            os.close(descriptor)
            raise

    def _position_of(self, descriptor: int, path: str, inode: int) -> _FilePosition:
        known = self._known.get(inode)
        if known is None:
            self._refuse_copy(descriptor, path)
            return _FilePosition(path, inode)
        if known.deleted:
            return _FilePosition(path, inode, generation=known.generation + 1)
        if known.changed(descriptor):
            if known.path != path:
                self._refuse_copy(descriptor, path)
            return self._start_over(known, path, descriptor)
        if known.is_of_another(descriptor):
            self._refuse_copy(descriptor, path)
            return _FilePosition(path, inode, generation=known.generation + 1)
        returned = self._matches(path) and not self._matches(known.path)
        if not returned or known.head_bytes == _HEAD_BYTES or known.untouched(os.fstat(descriptor)):
            return msgspec.structs.replace(known, path=path)
        # A few equal bytes, such as the same first line, do not prove that two files are the same.
        if self._spec.changed != "start_over":
            raise _mistake(
                path,
                f"has the inode of {known.path}, which was read up to byte {known.position}, and begins with the same "
                f"bytes: is it that file, renamed and written again, or a new one? No line of it was sent. Rename the "
                f"old file away again; or, if all lines are new, set `changed: start_over`",
            )
        log.warning("%s may be a new file with the inode of %s; it is read from its beginning", path, known.path)
        return _FilePosition(path, inode, generation=known.generation + 1)

    def _matches(self, path: Path | str) -> bool:
        return fnmatch.fnmatchcase(Path(path).name, self._spec.pattern)

    def _refuse_copy(self, descriptor: int, path: str) -> None:
        if self._spec.changed == "start_over":
            return
        # Different CSV files often have the same header.
        header_bytes = os.pread(descriptor, _HEAD_BYTES, 0).find(b"\n") + 1 if self._spec.columns else 0
        for old in self._known.values():
            same = old.path == path and not old.deleted and old.position > header_bytes and not old.changed(descriptor)
            if same and not self._is_here(old):
                raise _mistake(
                    path,
                    f"is not the file with this name that was read up to byte {old.position}, but begins with the "
                    f"same bytes: is it a copy? No line of it was sent. Files must only grow, and be rotated by "
                    f"renaming. If its lines are new, set `changed: start_over`",
                )

    def _is_here(self, known: _FilePosition) -> bool:
        """Return whether the directory still contains the file, perhaps under another name.

        After a restore from a backup or a move to another volume, the inode number may belong to a different file.
        """
        if known.inode not in self._listed:
            return False
        try:
            descriptor = os.open(self._listed[known.inode][0], os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            return not known.changed(descriptor) and not known.is_of_another(descriptor)
        finally:
            os.close(descriptor)

    def _start_over(self, known: _FilePosition, path: str, descriptor: int) -> _FilePosition:
        size = os.fstat(descriptor).st_size
        what = f"has {size} bytes now" if size < known.position else "begins with other bytes now"
        # A file with another name and other bytes is a new file that reuses the inode of a deleted file.
        if self._spec.changed != "start_over" and known.path == path:
            raise _mistake(
                path,
                f"was read up to byte {known.position} and {what}: it was truncated or replaced, and lines written "
                f"before that may never have been read. No line of it was sent since. Rotate files by renaming; or set "
                f"`changed: start_over` to read such files from their beginning",
            )
        log.warning("%s %s; it is read from its beginning", path, what)
        return _FilePosition(path, known.inode, generation=known.generation + 1)

    def _read(self, opened: _OpenFile) -> SourceRecords | None:
        if opened.known.changed(opened.descriptor):
            known = self._start_over(opened.known, opened.known.path, opened.descriptor)
            opened = self._keep_open(opened.descriptor, known, gone=opened.gone)
        if opened.rows and not opened.rows.ready():
            return self._close_file(opened) if opened.gone else None
        found = opened.lines.read(take_last_line=self._spec.last_line == "take")
        if found is not None:
            return self._records(opened, *found)
        return self._close_file(opened) if opened.gone else None

    def _close_file(self, opened: _OpenFile) -> SourceRecords | None:
        """Close a file that was read to its end, or keep the file open until the end is committed."""
        known = opened.known
        if opened.lines.rest_bytes:
            if not opened.warned:
                text = "%s was deleted; the %d bytes after its last line feed are not sent until a line feed follows"
                log.warning(text, known.path, opened.lines.rest_bytes)
                opened.warned = True
            return None
        status = os.fstat(opened.descriptor)
        deleted = bool(known.position) and status.st_nlink == 0
        known = msgspec.structs.replace(known, deleted=deleted)
        del self._open[known.inode]
        if known.part in self._ended:  # The file was opened again before its end was committed.
            os.close(self._ended.pop(known.part)[0].descriptor)
        if known.within(self._committed.get(known.part)):
            os.close(opened.descriptor)
        else:
            self._ended[known.part] = opened, known
        if deleted:
            self._known[known.inode] = known
            return _without_records(known)
        for path in self._listed.get(known.inode, ()):
            self._rename(known, path, status)  # now, because the file may be deleted before the next scan
        return None

    def _records(
        self, opened: _OpenFile, lines: list[bytes], offsets: list[int], bad: list[DeadRecord]
    ) -> SourceRecords:
        position = opened.lines.position
        head_bytes, head = min(position, _HEAD_BYTES), opened.known.head
        if head_bytes != opened.known.head_bytes:
            head = _head_digest(opened.descriptor, head_bytes)
        read = msgspec.structs.replace(
            opened.known,
            position=position,
            head_bytes=head_bytes,
            head=head,
            modified_ns=os.fstat(opened.descriptor).st_mtime_ns,
            inode_version=_inode_version(opened.descriptor),
        )
        opened.known = self._known[read.inode] = read
        if opened.rows:
            values, places, refused = opened.rows.read(lines, offsets)
            bad = bad + refused
        else:
            values, places = _without_blank(lines, offsets)
        bad_places = [int(each.place) for each in bad]
        dead = [replace(each, row=bisect_left(places, at)) for each, at in zip(bad, bad_places, strict=True)]

        def after(row: int) -> bytes:
            following = [at for at in (*places[row + 1 : row + 2], *bad_places) if at > places[row]]
            return msgspec.json.encode(msgspec.structs.replace(read, position=min(following, default=position)))

        prefix = f"{self._name}/{read.part}/"
        return SourceRecords(read.part, prefix, values, places, msgspec.json.encode(read), after, dead, read.path)


def _without_records(known: _FilePosition) -> SourceRecords:
    position = msgspec.json.encode(known)
    return SourceRecords(known.part, "", [], [], position, lambda _: position)


def _without_blank(values: list[bytes], places: list[int]) -> tuple[list[bytes], list[int]]:
    if any(value.endswith(b"\r") for value in values):
        values = [value.removesuffix(b"\r") for value in values]
    if all(values) and not any(value.isspace() for value in values):
        return values, places
    kept = [(value, place) for value, place in zip(values, places, strict=True) if value.strip()]
    return [value for value, _ in kept], [place for _, place in kept]


def _by_inode(listed: Mapping[Path, os.stat_result]) -> Mapping[int, Sequence[Path]]:
    found: defaultdict[int, list[Path]] = defaultdict(list)
    for path, status in listed.items():
        if stat.S_ISREG(status.st_mode):
            found[status.st_ino].append(path)
    return found


def _text(path: Path) -> str:
    """Return a path in which non-UTF-8 bytes are escape sequences, because positions are stored as UTF-8."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _mistake(path: Path | str, text: str) -> AuthorMistake:
    return AuthorMistake([Problem(str(path), text)])


def _refuse_unfit(path: Path, status: os.stat_result, devices: Mapping[int, int]) -> None:
    """Raise AuthorMistake if a file cannot be read. ``devices`` maps the inodes of other files to their devices."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise _mistake(_text(path), "has a name that is not UTF-8; rename it") from None
    if not stat.S_ISREG(status.st_mode):
        raise _mistake(path, "is not a regular file; give it a name that does not match the pattern")
    if devices.get(status.st_ino, status.st_dev) != status.st_dev:
        raise _mistake(
            path,
            f"has the inode number {status.st_ino}, which another file of this directory has on another device. Files "
            f"are told apart by their inode numbers: link to files of one device only",
        )


def _unreadable(path: Path | str, error: OSError) -> AuthorMistake:
    match error.errno:
        case errno.EMFILE:
            remedy = "allow more open files (`ulimit -n`), or move files that were read away"
        case errno.EACCES | errno.EPERM:
            remedy = "give this user permission to read it, or move it"
        case _:
            remedy = "make it readable, or move it, and start again"
    return _mistake(path, f"cannot be read: {error.strerror}. Nothing was skipped; {remedy}")


def _head_digest(descriptor: int, length_bytes: int) -> str:
    head = os.pread(descriptor, length_bytes, 0)
    return blake2b(head, digest_size=16).hexdigest() if len(head) == length_bytes else ""


def _inode_version(descriptor: int) -> int:
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, _GET_VERSION, bytes(8)), sys.byteorder)
    except OSError:  # The file system has no versions of inodes.
        return 0


class _LineReader:
    """Reads the lines of one open file. A line that is too long for a record becomes a dead letter with a digest."""

    def __init__(self, descriptor: int, position: int, most_bytes: int) -> None:
        self._descriptor: Final = descriptor
        self._most_bytes: Final = most_bytes
        self.position = position
        """The offset of the first line that has not been returned yet."""
        self.rest_bytes = 0
        """How many bytes of the line at ``position`` have already been read."""
        self._rest = b""
        """The bytes of this line that have been read, or no bytes if the line is too long to keep."""
        self._digest: Any = None
        """The digest of the bytes of this line that have been read, if the line is too long to keep."""

    def read(self, *, take_last_line: bool) -> _Lines | None:
        """Return the next lines, or None if the file has no new complete line.

        With ``take_last_line``, the last line of the file counts as complete even without a line feed.
        """
        if self._digest is None or os.fstat(self._descriptor).st_size < self.position + self.rest_bytes:
            # Read the line again, because a writer that was killed while writing it may have truncated and rewritten
            # it.
            self._rest, self.rest_bytes, self._digest = b"", 0, None
        while data := os.pread(self._descriptor, CHUNK_BYTES, self.position + self.rest_bytes):
            whole, feed, rest = data.rpartition(b"\n")
            if feed:
                found = self._lines(whole.split(b"\n"))
                self._keep(rest)
                return found
            self._keep(rest)
        return self._lines([b""], feed_bytes=0) if take_last_line and self.rest_bytes else None

    def _keep(self, data: bytes) -> None:
        self.rest_bytes += len(data)
        if self._digest is not None:
            self._digest.update(data)
        elif self.rest_bytes > self._most_bytes:
            self._digest = blake2b(self._rest + data, digest_size=DIGEST_BYTES)
            self._rest = b""
        else:
            self._rest += data

    def _lines(self, lines: list[bytes], *, feed_bytes: int = 1) -> _Lines:
        """Prepend the part of the first line that was read earlier, and return the complete lines."""
        lengths = list(map(len, lines))
        lengths[0] += self.rest_bytes
        lines[0] = self._rest + lines[0]
        offsets = list(accumulate((length + 1 for length in lengths), initial=self.position))
        self.position = offsets.pop() - 1 + feed_bytes
        digest, self._digest = self._digest, None
        self._rest, self.rest_bytes = b"", 0
        if max(lengths) <= self._most_bytes:
            return lines, offsets, []
        bad: list[DeadRecord] = []
        for row in (row for row, length in enumerate(lengths) if length > self._most_bytes):
            long = digest if row == 0 and digest is not None else blake2b(digest_size=DIGEST_BYTES)
            long.update(lines[row])
            text = f"a line of {lengths[row]} bytes, more than a record can hold; blake2b-256:{long.hexdigest()}"
            bad.append(DeadRecord(offsets[row], "too_large", text, None))
        kept = [row for row, length in enumerate(lengths) if length <= self._most_bytes]
        return [lines[row] for row in kept], [offsets[row] for row in kept], bad


class _CsvRows:
    """Converts the lines of one CSV file, whose first line names the columns, to JSON objects."""

    def __init__(self, path: str, descriptor: int, columns: Mapping[str, CsvType], most_bytes: int) -> None:
        self._path: Final = path
        self._descriptor: Final = descriptor
        self._columns: Final = columns
        self._most_bytes: Final = most_bytes
        self._names: list[str] | None = None
        self._first = 0
        csv.field_size_limit(max(csv.field_size_limit(), most_bytes))  # Python's default is 128 KiB.

    def ready(self) -> bool:
        """Return whether the header line is complete. Raises AuthorMistake if the header names unexpected columns."""
        if self._names is not None:
            return True
        head = os.pread(self._descriptor, self._most_bytes, 0)
        end = head.find(b"\n")
        if end < 0 and len(head) < self._most_bytes:
            return False
        try:
            cells = _cells(head[:end].removeprefix(b"\xef\xbb\xbf")) if end >= 0 else None
        except (UnicodeDecodeError, csv.Error):
            cells = None
        if cells is None or sorted(cells) != sorted(self._columns):
            shown = "not CSV" if cells is None else ", ".join(cells)
            raise _mistake(
                f"{self._path}:1",
                f"its header line is {shown[:500]}, but `columns` has {', '.join(self._columns)}. Nothing of this "
                f"file was sent; correct `columns`, or move the file away",
            )
        self._names, self._first = cells, end + 1
        return True

    def read(self, lines: Sequence[bytes], offsets: Sequence[int]) -> _Lines:
        names = self._names or []
        converters = [_CONVERTERS[self._columns[name]] for name in names]
        values: list[bytes] = []
        kept: list[int] = []
        bad: list[DeadRecord] = []
        for line, offset in zip(lines, offsets, strict=True):
            if offset < self._first or not line.strip():
                continue
            found = _row(line, names, converters)
            if isinstance(found, bytes):
                values.append(found)
                kept.append(offset)
            else:
                bad.append(DeadRecord(offset, *found, line))
        return values, kept, bad


def _row(line: bytes, names: Sequence[str], converters: Sequence[Callable[[str], Any]]) -> bytes | tuple[str, str]:
    """Return the row as JSON, or a dead letter's reason code and detail."""
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
        except (KeyError, ValueError):
            return "wrong_type", f"the cell of column {name} does not have the type that `columns` declares"
    try:
        return orjson.dumps(row)
    except TypeError:
        return "wrong_type", "an integer has more than 64 bits; declare that column as text"


def _cells(line: bytes) -> list[str]:
    text = line.decode().removesuffix("\r")
    return next(csv.reader([text], strict=True), [])


def _integer(cell: str) -> int:
    if _INTEGER.fullmatch(cell) is None:
        raise ValueError(cell)
    return int(cell)


def _number(cell: str) -> float | int:
    found = float(cell)
    if not math.isfinite(found) or "_" in cell:
        raise ValueError(cell)  # JSON has no infinity and no NaN.
    return int(cell) if _INTEGER.fullmatch(cell) else found


_CONVERTERS: Final[Mapping[CsvType, Callable[[str], Any]]] = {
    "text": str,
    "integer": _integer,
    "number": _number,
    "boolean": lambda cell: _BOOLEANS[cell.lower()],
}
