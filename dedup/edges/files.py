"""Growing files of one directory as a source.

A file is known by its inode and by a digest of its first bytes, not by its name: renamed, it is the same file and is
read on, to its end if it was renamed out of the pattern or deleted while it was open. A file that got shorter, or
other first bytes, is another file under an old inode; whether bytes were lost with the old one nobody can tell, so
that stops ingest, unless the author says `changed: start_over`.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import stat
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from dedup.edges.csv_rows import CsvRows
from dedup.edges.lines import HEAD_BYTES, LineReader, LongLine, Piece, head_digest
from dedup.edges.source import Dead, Found
from dedup.errors import AuthorMistake, Problem
from dedup.topology.ingest import FilesSource

log: Final = logging.getLogger(__name__)


class FilePosition(msgspec.Struct, frozen=True):
    """How far one file was read, and how it is known again."""

    path: str
    inode: int
    position: int
    head_bytes: int
    head: str
    generation: int
    """Of files that had this inode one after the other."""
    deleted: bool = False
    """It was read to its end and has no name any more: whatever has this inode next is another file."""

    @property
    def part(self) -> str:
        """The file's name for ever."""
        return f"{self.inode}.{self.generation}"


@dataclass(slots=True)
class _Open:
    descriptor: int
    reader: LineReader
    known: FilePosition
    rows: CsvRows | None
    gone: bool = False
    """No name of it matches any more: it is read to its end."""
    told_rest: bool = False


class Files:
    """See `Source`."""

    def __init__(self, name: str, spec: FilesSource, most_bytes: int) -> None:
        self._name: Final = name
        self._spec: Final = spec
        self._most_bytes: Final = most_bytes
        self._known: dict[int, FilePosition] = {}
        """By inode: the latest file that had it."""
        self._open: dict[int, _Open] = {}
        self._turn: list[int] = []
        self._here: set[int] = set()
        """The inodes of all files in the directory."""

    def restore(self, positions: Mapping[str, bytes]) -> None:
        """See `Source`; a file that was deleted while open is open still: nobody could open it again."""
        without_name = [each for each in self._open.values() if each.gone or not os.fstat(each.descriptor).st_nlink]
        for each in without_name:
            del self._open[each.known.inode]
        self.close()
        self._known = {}
        for value in positions.values():
            known = msgspec.json.decode(value, type=FilePosition)
            latest = self._known.get(known.inode)
            if latest is None or latest.generation < known.generation:
                self._known[known.inode] = known
        for each in without_name:
            self._read_again(each)

    def _read_again(self, opened: _Open) -> None:
        """Read an open file on from its committed position, or from its beginning where nothing of it was committed."""
        inode, descriptor = opened.known.inode, opened.descriptor
        known = self._known.get(inode)
        if known is None or known.generation < opened.known.generation:
            known = FilePosition(opened.known.path, inode, 0, 0, "", opened.known.generation)
        self._known[inode] = known
        reader = LineReader(descriptor, known.position, self._most_bytes)
        self._open[inode] = _Open(descriptor, reader, known, self._csv_rows(known.path, descriptor), gone=opened.gone)

    def poll(self) -> Found | None:
        """See `Source`: a chunk of one file, each file in its turn."""
        if not self._turn:
            self._scan()
            self._turn = list(self._open)
        while self._turn:
            inode = self._turn.pop(0)
            found = self._read(self._open[inode])
            if found is not None:
                if inode in self._open:
                    self._turn.append(inode)  # it may have more; the others come first
                return found
        return None

    def waiting(self) -> list[str]:
        """See `Source`."""
        return [
            f"{each.known.path}: {each.reader.rest_bytes} bytes after the last line feed are no line yet"
            for each in self._open.values()
            if each.reader.rest_bytes
        ]

    def close(self) -> None:
        """See `Source`."""
        for each in self._open.values():
            os.close(each.descriptor)
        self._open, self._turn = {}, []

    def _scan(self) -> None:
        """Open what is new, and note what has no name any more."""
        listed = self._listed()
        self._here = {looked.st_ino for looked in listed.values()}
        named: set[int] = set()
        for path, looked in listed.items():
            inode = looked.st_ino
            if fnmatch.fnmatchcase(path.name, self._spec.pattern):
                if not stat.S_ISREG(looked.st_mode):
                    raise AuthorMistake([Problem(str(path), "is no file; give it a name that the pattern leaves out")])
                named.add(inode)
            elif inode in self._open or not self._was_left(inode, looked):
                continue
            if inode in self._open:
                self._renamed(self._open[inode], str(path))
            else:
                self._open_file(path, inode)
        for inode in [inode for inode in self._open if inode not in named]:
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
                    raise AuthorMistake([Problem(str(path), "points nowhere; remove the link or mend it")]) from None
                continue  # renamed between listing and looking: the next scan finds it
            except OSError as error:
                raise _unreadable(path, error) from error
        return found

    def _was_left(self, inode: int, looked: os.stat_result) -> bool:
        """Tell whether a file that the pattern leaves out was renamed, with lines unread, while nobody looked."""
        known = self._known.get(inode)
        return known is not None and not known.deleted and looked.st_size > known.position

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
            os.close(descriptor)  # another file has got the name meanwhile; the next scan finds both
            return
        try:
            known = self._position_of(descriptor, str(path), inode)
            rows = self._csv_rows(str(path), descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        reader = LineReader(descriptor, known.position, self._most_bytes)
        self._known[inode] = known
        self._open[inode] = _Open(descriptor, reader, known, rows)

    def _csv_rows(self, path: str, descriptor: int) -> CsvRows | None:
        columns = self._spec.columns
        return None if columns is None else CsvRows(path, descriptor, columns, self._most_bytes)

    def _position_of(self, descriptor: int, path: str, inode: int) -> FilePosition:
        known = self._known.get(inode)
        if known is None:
            self._refuse_copy(descriptor, path)
            return FilePosition(path, inode, 0, 0, "", 0)
        if known.deleted:
            return FilePosition(path, inode, 0, 0, "", known.generation + 1)
        if _changed(descriptor, known):
            return self._changed(known, path, descriptor)
        return msgspec.structs.replace(known, path=path)

    def _refuse_copy(self, descriptor: int, path: str) -> None:
        """Stop where a file took the place of one it begins like: a copy, whose lines were sent already."""
        if self._spec.start_over:
            return
        for old in self._known.values():
            replaced = old.path == path and old.inode not in self._here and not old.deleted
            # Two CSV files may well share their line of names; that alone says nothing.
            if replaced and old.position > self._names_bytes(descriptor) and not _changed(descriptor, old):
                text = (
                    f"is another file than the one of this name that was read up to byte {old.position}, and begins "
                    f"with the same bytes: is it a copy? Nothing of it was sent. Files must only grow, and be rotated "
                    f"by renaming. If its lines are new ones, write `changed: start_over`"
                )
                raise AuthorMistake([Problem(path, text)])

    def _names_bytes(self, descriptor: int) -> int:
        if self._spec.columns is None:
            return 0
        return os.pread(descriptor, HEAD_BYTES, 0).find(b"\n") + 1

    def _changed(self, known: FilePosition, path: str, descriptor: int) -> FilePosition:
        size = os.fstat(descriptor).st_size
        what = f"has {size} bytes now" if size < known.position else "begins with other bytes now"
        # Another name and other bytes: a new file was given the number of a deleted one.
        if not self._spec.start_over and known.path == path:
            raise AuthorMistake(
                [
                    Problem(
                        path,
                        f"was read up to byte {known.position} and {what}: it was truncated or replaced, and lines "
                        f"written before that may never have been read. Nothing of it was sent since. Rotate files by "
                        f"renaming; or write `changed: start_over` to read such files from their beginning",
                    )
                ]
            )
        log.warning("%s %s; it is read from its beginning", path, what)
        return FilePosition(path, known.inode, 0, 0, "", known.generation + 1)

    def _read(self, opened: _Open) -> Found | None:
        if _changed(opened.descriptor, opened.known):
            known = self._changed(opened.known, opened.known.path, opened.descriptor)
            opened.reader = LineReader(opened.descriptor, 0, self._most_bytes)
            opened.rows = self._csv_rows(known.path, opened.descriptor)
            opened.known = self._known[known.inode] = known
        if opened.rows is not None and not opened.rows.ready():
            return None
        piece = self._piece(opened)
        if piece is not None:
            return self._found(opened, piece)
        return self._let_go(opened) if opened.gone else None

    def _piece(self, opened: _Open) -> Piece | None:
        reader = opened.reader
        while True:
            before = reader.read_to
            piece = reader.read()
            if piece is not None or reader.read_to == before:
                break
        if piece is None and self._spec.take_last_line:
            piece = reader.last_line()
        return piece

    def _let_go(self, opened: _Open) -> Found | None:
        """Close a file without a name that was read to its end; one that is deleted gives its number to another."""
        if opened.reader.rest_bytes:
            if not opened.told_rest:
                log.warning(
                    "%s is gone, with %d bytes after its last line feed; they are no line, and wait for one",
                    opened.known.path,
                    opened.reader.rest_bytes,
                )
                opened.told_rest = True
            return None
        known = opened.known
        deleted = os.fstat(opened.descriptor).st_nlink == 0
        os.close(opened.descriptor)
        del self._open[known.inode]
        if not deleted or not known.position:
            return None
        known = self._known[known.inode] = msgspec.structs.replace(known, deleted=True)
        positions = {known.part: msgspec.json.encode(known)}
        return Found(known.part, "", [], [], positions, lambda _: positions)

    def _found(self, opened: _Open, piece: Piece) -> Found:
        head_bytes = min(piece.next_position, HEAD_BYTES)
        known = opened.known
        if head_bytes != known.head_bytes:
            known = msgspec.structs.replace(
                known, head_bytes=head_bytes, head=head_digest(opened.descriptor, head_bytes)
            )
        opened.known = self._known[known.inode] = msgspec.structs.replace(known, position=piece.next_position)
        prefix = f"{self._name}/{known.part}/"
        places = piece.offsets
        dead = [_too_long(prefix, line) for line in piece.long_lines]
        values = piece.lines
        if opened.rows is not None:
            values, places, refused = opened.rows.read(piece.lines, piece.offsets, prefix)
            dead += refused
        else:
            values, places = _without_blank(values, places)
        # Of lines, a place is the byte where it begins.
        beside = [int(each.place.removeprefix(prefix)) for each in dead]
        dead = [replace(each, row=bisect_left(places, at)) for each, at in zip(dead, beside, strict=True)]
        read = opened.known

        def after(row: int) -> dict[str, bytes | None]:
            following = [at for at in (*places[row + 1 : row + 2], *beside) if at > places[row]]
            position = min(following, default=read.position)
            return {read.part: msgspec.json.encode(msgspec.structs.replace(read, position=position))}

        positions = {read.part: msgspec.json.encode(read)}
        return Found(read.part, prefix, values, places, positions, after, dead)


def _changed(descriptor: int, known: FilePosition) -> bool:
    """Tell whether what was read of a file is still there, by its size and its first bytes."""
    if os.fstat(descriptor).st_size < known.position:
        return True
    return bool(known.head_bytes) and head_digest(descriptor, known.head_bytes) != known.head


def _without_blank(values: list[bytes], places: list[int]) -> tuple[list[bytes], list[int]]:
    """Leave out lines of white space, and the carriage returns of files written elsewhere."""
    if any(value.endswith(b"\r") for value in values):
        values = [value.removesuffix(b"\r") for value in values]
    if all(values) and not any(value.isspace() for value in values):
        return values, places
    kept = [(value, place) for value, place in zip(values, places, strict=True) if value.strip()]
    return [value for value, _ in kept], [place for _, place in kept]


def _too_long(prefix: str, line: LongLine) -> Dead:
    return Dead(
        f"{prefix}{line.offset}",
        "too_large",
        f"a line of {line.length_bytes} bytes, more than a record holds; blake2b-256:{line.digest}",
        None,
    )


def _unreadable(path: Path, error: OSError) -> AuthorMistake:
    text = f"can not be read: {error.strerror}. Nothing was skipped; give this user the right to read it, or move it"
    return AuthorMistake([Problem(str(path), text)])
