"""Packs a closed store into a checkpoint (an archive and its description), and unpacks checkpoints.

The archive is a tar file of the store's files. The description (`manifest.json`) is written after the archive, so an
archive with a description is complete. Nothing in an archive is trusted: only regular files with the names of RocksDB's
files are unpacked, and no more bytes than the description states. An archive omits RocksDB's options, because dedup
opens stores with its own options. It also omits RocksDB's event log, which contains the machine's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Final, Self

import msgspec

from dedup.errors import CheckpointUnusable
from dedup.store.base import StoreIdentity

_FORMAT: Final = 1
MOST_BYTES: Final = 64 << 10
"""The maximum size of a description in bytes; the limit prevents a foreign file from exhausting the memory."""
_STORE_FILES: Final = re.compile(r"CURRENT|IDENTITY|MANIFEST-\d{1,20}|\d{1,20}\.(sst|log)", re.ASCII)
_PIECE_BYTES: Final = 1 << 20
_PLAIN: Final = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE})
_MOST_FILES: Final = 100_000

_Count = Annotated[int, msgspec.Meta(ge=0)]
Moved = Callable[[int], None]
"""Receives the size in bytes of each transferred piece, and may raise an exception to stop the transfer."""


class _Counted:
    def __init__(self, stream: IO[bytes], moved: Moved, *, limit_bytes: float = math.inf) -> None:
        self._stream: Final = stream
        self._limit_bytes: Final = limit_bytes
        self._hash: Final = hashlib.sha256()
        self._moved: Final = moved
        self.count = 0

    def saw(self, piece: bytes) -> None:
        self._hash.update(piece)
        self.count += len(piece)
        self._moved(len(piece))

    def write(self, piece: bytes) -> int:
        self._stream.write(piece)
        self.saw(piece)
        return len(piece)

    def read(self, size: int) -> bytes:
        piece = self._stream.read(size)
        self.saw(piece)
        if self.count > self._limit_bytes:
            raise CheckpointUnusable(f"the archive has more than the {self._limit_bytes:,} bytes it should have.")
        return piece

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def pack(directory: Path, target: IO[bytes], moved: Moved) -> tuple[int, str]:
    """Write the files of a closed store as a tar file, and return its length in bytes and its SHA-256 in hex."""
    out = _Counted(target, moved)
    # The archive is not compressed, because its files are already compressed. USTAR is tar without extensions.
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


def unpack(source: IO[bytes], directory: Path, *, size_bytes: int, sha256: str, moved: Moved) -> None:
    """Unpack an archive into an existing, empty directory, and sync the files to disk.

    Raises CheckpointUnusable if the archive's size or digest is wrong or if it contains anything but the regular files
    of a store. After an error, unpacked files may remain in the directory.
    """
    reader = _Counted(source, moved, limit_bytes=size_bytes)
    try:
        with tarfile.open(fileobj=reader, mode="r|", bufsize=_PIECE_BYTES) as archive:  # type: ignore[call-overload]
            for number, entry in enumerate(archive):
                if number >= _MOST_FILES:
                    raise CheckpointUnusable(f"the archive holds more than {_MOST_FILES:,} files.")
                _extract(archive, entry, directory)
    except tarfile.TarError as error:
        raise CheckpointUnusable(f"the archive is damaged or truncated: {error}.") from error
    while reader.read(_PIECE_BYTES):
        pass  # the digest includes the bytes after the last file
    if (reader.count, reader.sha256) != (size_bytes, sha256):
        raise CheckpointUnusable(
            f"the archive has {reader.count:,} bytes with SHA-256 {reader.sha256}, but should have {size_bytes:,} with "
            f"{sha256}: it is damaged or truncated."
        )
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo, directory: Path) -> None:
    content = archive.extractfile(entry) if entry.type in _PLAIN and entry.sparse is None else None
    if content is None or _STORE_FILES.fullmatch(entry.name) is None:
        raise CheckpointUnusable(
            f"the archive holds {entry.name[:200]!r} (of type {entry.type!r}), which is not a file of a store. Another "
            f"program has written it."
        )
    path = directory / entry.name
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise CheckpointUnusable(f"the archive holds {path.name!r} twice.") from error
    with open(file, "wb") as target:  # noqa: PTH123  a descriptor
        while piece := content.read(_PIECE_BYTES):
            target.write(piece)
        target.flush()
        # Without this fsync, a store could look complete after a power failure although some of its data was lost.
        os.fsync(file)


class _Head(msgspec.Struct):
    format: int


class Checkpoint(msgspec.Struct, frozen=True):
    """Describes a partition's checkpoint; stored as a JSON object with one member per field."""

    topology: str
    partition: _Count
    changelog_topic_id: str
    fingerprint_hex: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2}){1,64}\Z")] = msgspec.field(name="fingerprint")
    segment_ms: _Count
    """Width of the segments in the store."""
    position: _Count
    """The changelog offset to restore from."""
    ids: _Count
    archive: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,20}-[0-9a-f]{8}\.tar\Z")]
    """File name of the archive, which is in the same directory as the description."""
    archive_bytes: _Count = msgspec.field(name="bytes")
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]

    @property
    def identity(self) -> StoreIdentity:
        """The identity of the task whose state is in the checkpoint."""
        return StoreIdentity(self.topology, self.partition, self.changelog_topic_id)

    @property
    def fingerprint(self) -> bytes:
        """The state fingerprint in the store's task record."""
        return bytes.fromhex(self.fingerprint_hex)

    def encode(self) -> bytes:
        """Return the description as JSON."""
        return json.dumps({"format": _FORMAT, **msgspec.to_builtins(self)}, indent=2).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, place: str) -> Self:
        """Decode a description of a checkpoint. Raises CheckpointUnusable for damaged bytes or an unknown format."""
        try:
            version = msgspec.json.decode(data, type=_Head).format
            if version != _FORMAT:
                raise CheckpointUnusable(
                    f"{place}: is a checkpoint of format {version}, but this release reads format {_FORMAT}."
                )
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise CheckpointUnusable(f"{place}: is damaged: {error}.") from error
