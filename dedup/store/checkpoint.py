"""Describes a checkpoint, which consists of the files of a closed store, each named by its digest.

The contents of a checkpoint are not trusted. When dedup reads a checkpoint, it writes only regular files with the names
of RocksDB data files. For each file, dedup writes no more bytes than the description says, and then checks the digest.
A checkpoint omits RocksDB's options, because dedup opens stores with its own options. A checkpoint also omits RocksDB's
event log, which contains the machine's name, and the logs of the Bloom filters, which can be rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Final, Self

import msgspec

from dedup.errors import CheckpointUnusable
from dedup.store.base import StoreIdentity

_FORMAT: Final = 2
MOST_BYTES: Final = 4 << 20
"""The maximum size of a description in bytes, so that a foreign file cannot exhaust the memory."""
_NAMES: Final = r"(CURRENT|IDENTITY|MANIFEST-[0-9]{1,20}|[0-9]{1,20}\.(sst|log))"
_STORE_FILE: Final = re.compile(_NAMES, re.ASCII)
_PIECE_BYTES: Final = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=0)]
Moved = Callable[[int], None]
"""A function that receives each transferred piece's size in bytes, and may raise an exception to end the transfer."""


class StoreFile(msgspec.Struct, frozen=True):
    """Describes one file of a store."""

    name: Annotated[str, msgspec.Meta(pattern=rf"^{_NAMES}\Z")]
    size_bytes: _Count = msgspec.field(name="bytes")
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """The digest of the content in hex, which is also the name under which the content is stored."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the description of a file, which must not change afterward."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return cls(path.name, file.tell(), digest.hexdigest())


def files_of(directory: Path) -> list[Path]:
    """Return the files of a closed store that belong in a checkpoint, sorted by name."""
    return sorted(path for path in directory.iterdir() if _STORE_FILE.fullmatch(path.name))


def pieces(source: IO[bytes], moved: Moved) -> Iterator[bytes]:
    """Yield a stream's content in pieces. After the caller has used a piece, pass the piece's size to ``moved``."""
    while piece := source.read(_PIECE_BYTES):
        yield piece
        moved(len(piece))


def write_file(wanted: StoreFile, source: IO[bytes], directory: Path, moved: Moved) -> None:
    """Write the content of a described file to a new file in the directory, and sync the new file to disk.

    Raises CheckpointUnusable if the content differs from the description; an incomplete file may then remain.
    """
    path, digest, size_bytes = directory / wanted.name, hashlib.sha256(), 0
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise CheckpointUnusable(f"the description names {wanted.name!r} twice.") from error
    with open(file, "wb") as target:  # noqa: PTH123  a descriptor
        for piece in pieces(source, moved):
            digest.update(piece)
            size_bytes += len(piece)
            if size_bytes > wanted.size_bytes:
                break
            target.write(piece)
        target.flush()
        # Without this fsync, a store could look complete after a power failure that lost some of its data.
        os.fsync(file)
    if (size_bytes, digest.hexdigest()) != (wanted.size_bytes, wanted.sha256):
        raise CheckpointUnusable(
            f"{wanted.sha256}, the content of {wanted.name}, is damaged: it does not have {wanted.size_bytes:,} bytes "
            "with this SHA-256. Delete this file; the next `dedup checkpoint` writes it again."
        )


class _Head(msgspec.Struct):
    format: int


class Checkpoint(msgspec.Struct, frozen=True):
    """Describes a partition's checkpoint. The description is stored as a JSON object with one member per field."""

    topology: str
    partition: _Count
    changelog_topic_id: str
    fingerprint_hex: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2}){1,64}\Z")] = msgspec.field(name="fingerprint")
    segment_ms: _Count
    """The width of the segments in the store."""
    position: _Count
    """The changelog offset from which a restore continues."""
    ids: _Count
    files: tuple[StoreFile, ...]

    @property
    def identity(self) -> StoreIdentity:
        """The identity of the task whose state the checkpoint contains."""
        return StoreIdentity(self.topology, self.partition, self.changelog_topic_id)

    @property
    def fingerprint(self) -> bytes:
        """The state fingerprint in the store's task record."""
        return bytes.fromhex(self.fingerprint_hex)

    @property
    def size_bytes(self) -> int:
        """The total size of all files, in bytes."""
        return sum(file.size_bytes for file in self.files)

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
