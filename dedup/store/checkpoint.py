"""Packs and unpacks checkpoints, which consist of an archive of a task's closed store and a description of the archive.

The archive is a tar file of the store's files. The description (`manifest.json`) says to which task the state belongs.
The description is written after the archive, so if there is a description, the archive is complete.

An archive may come from anywhere, so nothing in it is trusted. An archive is unpacked only into an empty directory.
Only regular files with RocksDB's file names are accepted, and never more bytes than the description announces. An
archive does not contain rocksdict's settings and RocksDB's options, because a store is opened with dedup's own options.
An archive does not contain RocksDB's event log either, because the events contain the machine's name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Final, Protocol, Self

import msgspec

from dedup.errors import CheckpointUnusable
from dedup.store.base import StoreIdentity

_FORMAT: Final = 1
MOST_BYTES: Final = 64 << 10
"""Maximum size of a description, so that a file from somewhere else cannot exhaust the memory."""
_STORE_FILES: Final = re.compile(r"CURRENT|IDENTITY|MANIFEST-\d{1,20}|\d{1,20}\.(sst|log)", re.ASCII)
_PIECE_BYTES: Final = 1 << 20
_PLAIN: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE})
_MOST_FILES: Final = 100_000

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{2,128}\Z")]
Moved = Callable[[int], None]
"""A function that is called with the size of each transferred piece in bytes. It may raise an exception to stop the
transfer.
"""


class _ByteSource(Protocol):
    """A stream from which an archive is read."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; the result is empty at the end."""


class _Counted:
    """A stream that counts and hashes the bytes that pass through it."""

    def __init__(self, moved: Moved) -> None:
        self._hash: Final = hashlib.sha256()
        self._moved: Final = moved
        self.count = 0

    def saw(self, piece: bytes) -> None:
        """Count and hash a piece."""
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
    def __init__(self, source: _ByteSource, limit_bytes: int, moved: Moved) -> None:
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
    """Write the files of a closed store as a tar file; return its length in bytes and its SHA-256 in hex."""
    out = _Out(target, moved)
    # The archive is not compressed, because the files are compressed already. USTAR is the tar format without
    # extensions.
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.USTAR_FORMAT, bufsize=_PIECE_BYTES) as archive:  # type: ignore[call-overload]
        for path in sorted(directory.iterdir()):
            if _STORE_FILES.fullmatch(path.name) is None:
                continue
            entry = tarfile.TarInfo(path.name)
            entry.size = path.stat().st_size
            entry.mode = 0o600
            with path.open("rb") as file:
                archive.addfile(entry, file)
    return out.count, out.sha256


def unpack(source: _ByteSource, directory: Path, *, size_bytes: int, sha256: str, moved: Moved) -> None:
    """Unpack an archive into an existing, empty directory, and sync the files to disk.

    Raises CheckpointUnusable, and leaves some files behind, if the archive has another size or digest or contains
    anything but regular files of a store.
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
        pass  # the digest includes the bytes after the last file
    if (reader.count, reader.sha256) != (size_bytes, sha256):
        raise CheckpointUnusable(
            f"the archive has {reader.count:,} bytes with SHA-256 {reader.sha256}, and should have {size_bytes:,} with "
            f"{sha256}: it is damaged or truncated."
        )
    _sync(directory)


@contextmanager
def _archive(reader: _In) -> Iterator[tarfile.TarFile]:
    """Open the archive for reading one file after another; tarfile's errors become CheckpointUnusable."""
    try:
        with tarfile.open(fileobj=reader, mode="r|", bufsize=_PIECE_BYTES) as archive:  # type: ignore[call-overload]
            yield archive
    except tarfile.TarError as error:
        raise CheckpointUnusable(f"the archive is damaged or truncated: {error}.") from error


def _refuse_odd(entry: tarfile.TarInfo) -> None:
    """Raise CheckpointUnusable for anything but a regular file with the name of a store file."""
    if entry.type not in _PLAIN or entry.sparse is not None or _STORE_FILES.fullmatch(entry.name) is None:
        raise CheckpointUnusable(
            f"the archive holds {entry.name[:200]!r} (of type {entry.type!r}), which is not a file of a store. Another "
            f"program has written it."
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
        # Without this, a store that is incomplete after a power failure would look complete.
        os.fsync(file)


def _sync(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class _Written(msgspec.Struct, frozen=True):
    """The description as it is stored in JSON. Unknown members are ignored."""

    topology: str
    partition: _Count
    changelog_topic_id: str
    fingerprint: _Hex
    segment_ms: _Count
    position: _Count
    ids: _Count
    archive: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,20}-[0-9a-f]{8}\.tar\Z")]
    bytes: _Count
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class _Head(msgspec.Struct):
    format: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The description of one partition's state up to one position of its changelog."""

    identity: StoreIdentity
    fingerprint: bytes
    """Fingerprint of the last task record in the store."""
    segment_ms: int
    """Width of the segments in the store."""
    position: int
    """The changelog offset to restore from."""
    ids: int
    archive: str
    """File name of the archive, which is in the same directory as the description."""
    archive_bytes: int
    sha256: str

    def encode(self) -> bytes:
        """Return the description as JSON."""
        identity = self.identity
        written = _Written(
            topology=identity.topology,
            partition=identity.partition,
            changelog_topic_id=identity.changelog_topic_id,
            fingerprint=self.fingerprint.hex(),
            segment_ms=self.segment_ms,
            position=self.position,
            ids=self.ids,
            archive=self.archive,
            bytes=self.archive_bytes,
            sha256=self.sha256,
        )
        return json.dumps({"format": _FORMAT, **msgspec.to_builtins(written)}, indent=2).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, place: str) -> Self:
        """Return the description in ``data``, which was read from ``place``. May raise CheckpointUnusable."""
        try:
            version = msgspec.json.decode(data, type=_Head).format
            if version != _FORMAT:
                raise CheckpointUnusable(
                    f"{place}: is a checkpoint of format {version}, and this dedup reads format {_FORMAT}."
                )
            found = msgspec.json.decode(data, type=_Written)
            identity = StoreIdentity(found.topology, found.partition, found.changelog_topic_id)
            fingerprint = bytes.fromhex(found.fingerprint)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise CheckpointUnusable(f"{place}: is damaged: {error}.") from error
        return cls(
            identity, fingerprint, found.segment_ms, found.position, found.ids, found.archive, found.bytes, found.sha256
        )
