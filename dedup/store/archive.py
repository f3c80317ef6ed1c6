"""A store's directory as one stream of bytes, and back: a tar of the files that make the store, nothing else.

What is read may come from anywhere: nothing is believed of it. Only plain files with the names of RocksDB's own files
are taken, into a directory that was empty, and never more bytes than were announced. rocksdict's settings, RocksDB's
options and its log of events stay out: a store is opened with our options, and events name the machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Protocol

from dedup.errors import CheckpointUnusable

_KEPT: Final = re.compile(r"CURRENT|IDENTITY|MANIFEST-\d{1,20}|\d{1,20}\.(sst|log)", re.ASCII)
_PIECE_BYTES: Final = 1 << 20
_PLAIN: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE})
_MOST_FILES: Final = 100_000

Moved = Callable[[int], None]
"""Told of every so many bytes that were moved; may raise, to stop."""


class Source(Protocol):
    """Where bytes come from."""

    def read(self, size: int, /) -> bytes:
        """Return up to so many bytes; none at the end."""


class _Counted:
    """A stream that counts and hashes what goes through it."""

    def __init__(self, moved: Moved) -> None:
        self._hash: Final = hashlib.sha256()
        self._moved: Final = moved
        self.count = 0

    def saw(self, piece: bytes) -> None:
        """Take account of bytes that went through."""
        self._hash.update(piece)
        self.count += len(piece)
        self._moved(len(piece))

    @property
    def sha256(self) -> str:
        """The digest of all bytes so far."""
        return self._hash.hexdigest()


class _Out(_Counted):
    def __init__(self, target: IO[bytes], moved: Moved) -> None:
        super().__init__(moved)
        self._target: Final = target

    def write(self, piece: bytes) -> int:
        self._target.write(piece)
        self.saw(piece)
        return len(piece)


class _In(_Counted):
    def __init__(self, source: Source, limit_bytes: int, moved: Moved) -> None:
        super().__init__(moved)
        self._source: Final = source
        self._limit_bytes: Final = limit_bytes

    def read(self, size: int) -> bytes:
        piece = self._source.read(size)
        self.saw(piece)
        if self.count > self._limit_bytes:
            raise CheckpointUnusable(f"the archive has more than the {self._limit_bytes:,} bytes it should have.")
        return piece


def pack(directory: Path, target: IO[bytes], moved: Moved) -> tuple[int, str]:
    """Write the files of a closed store as a tar; return its length in bytes and its SHA-256."""
    out = _Out(target, moved)
    # A tar of files that are compressed already, in the format that has no extensions.
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.USTAR_FORMAT, bufsize=_PIECE_BYTES) as archive:  # type: ignore[call-overload]
        for path in sorted(directory.iterdir()):
            if _KEPT.fullmatch(path.name) is None:
                continue
            entry = tarfile.TarInfo(path.name)
            entry.size = path.stat().st_size
            entry.mode = 0o600
            with path.open("rb") as file:
                archive.addfile(entry, file)
    return out.count, out.sha256


def unpack(source: Source, directory: Path, *, size_bytes: int, sha256: str, moved: Moved) -> None:
    """The files of the archive are in the directory, which must exist and be empty, and are on the disk.

    Raises CheckpointUnusable, with some of them there, where the archive is not the one announced or holds anything
    but the plain files of a store.
    """
    reader = _In(source, size_bytes, moved)
    with _archive(reader) as archive:
        for number, entry in enumerate(archive):
            if number >= _MOST_FILES:
                raise CheckpointUnusable(f"the archive holds more than {_MOST_FILES:,} files.")
            _refuse_odd(entry)
            content = archive.extractfile(entry)
            if content is None:
                raise CheckpointUnusable(f"the archive holds {entry.name!r} without its content.")
            _write_new(directory / entry.name, content)
    while reader.read(_PIECE_BYTES):
        pass  # what follows the last file is hashed, too
    if (reader.count, reader.sha256) != (size_bytes, sha256):
        raise CheckpointUnusable(
            f"the archive has {reader.count:,} bytes with SHA-256 {reader.sha256}, and should have {size_bytes:,} with "
            f"{sha256}: it is damaged or cut."
        )
    _sync(directory)


@contextmanager
def _archive(reader: _In) -> Iterator[tarfile.TarFile]:
    """Inside ``with``, the archive is read file by file; what tarfile can not read is CheckpointUnusable."""
    try:
        with tarfile.open(fileobj=reader, mode="r|", bufsize=_PIECE_BYTES) as archive:  # type: ignore[call-overload]
            yield archive
    except tarfile.TarError as error:
        raise CheckpointUnusable(f"the archive is damaged or cut: {error}.") from error


def _refuse_odd(entry: tarfile.TarInfo) -> None:
    """Raise CheckpointUnusable for anything but a plain file with the name of one of a store's."""
    if entry.type not in _PLAIN or entry.sparse is not None or _KEPT.fullmatch(entry.name) is None:
        raise CheckpointUnusable(
            f"the archive holds {entry.name[:200]!r} (of type {entry.type!r}), which is no file of a store. Somebody "
            f"else has written it."
        )


def _write_new(path: Path, content: IO[bytes]) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise CheckpointUnusable(f"the archive holds {path.name!r} twice.") from error
    with open(file, "wb") as target:  # noqa: PTH123  a descriptor
        while piece := content.read(_PIECE_BYTES):
            target.write(piece)
        target.flush()
        # A store that was put there half would be believed after a power cut.
        os.fsync(file)


def _sync(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
