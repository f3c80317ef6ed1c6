"""The bytes that the RocksDB store keeps about itself in its default column family, each with a checksum."""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final, Self

from dedup.errors import StateIncompatible, TaskCorrupted
from dedup.store.base import StoreIdentity, TaskRecord
from dedup.store.changelog import decode_task_record, encode_task_record
from dedup.store.directory import RESTORE, Manifest

_FORMAT: Final = "1"
_POSITION: Final = struct.Struct(">Q")
_SEGMENT: Final = struct.Struct(">QQQQ")
_STATE: Final = struct.Struct(">QQQ")
_CHECKSUM_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """What is known of a segment."""

    width_ms: int
    """The widest grid it was written under; 0 while unknown."""
    birth: int
    """The store's position before the first write into it."""
    last_position: int
    """The position of the last batch that wrote into it."""
    ids: int
    """Keys written, repeated ones counted again."""

    def encode(self) -> bytes:
        """Return the entry's bytes."""
        return _sealed(_SEGMENT.pack(*astuple(self)))

    @classmethod
    def decode(cls, value: bytes, name: str) -> Self:
        """Return the entry of the segment ``name``; raises TaskCorrupted if it is damaged."""
        body = _unsealed(value, f"the entry of segment {name}")
        return cls(*_SEGMENT.unpack(body))


def encode_position(position: int) -> bytes:
    """Return a changelog position as a segment repeats it."""
    return _POSITION.pack(position)


def decode_position(value: bytes) -> int:
    """Return the changelog position a segment repeats."""
    position: int
    (position,) = _POSITION.unpack(value)
    return position


@dataclass(frozen=True, slots=True)
class StateEntry:
    """Position and task record in one value: neither is ever newer than the other."""

    position: int
    record: TaskRecord | None
    manifest: Manifest
    """RocksDB's list of files, as it was before the write."""

    def encode(self) -> bytes:
        """Return the entry's bytes."""
        head = _STATE.pack(self.position, self.manifest.number, self.manifest.size_bytes)
        return _sealed(head + (b"" if self.record is None else encode_task_record(self.record)))

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Return the entry; raises TaskCorrupted if it is damaged."""
        body = _unsealed(value, "the task record of the store")
        position, number, size_bytes = _STATE.unpack_from(body)
        record = body[_STATE.size :]
        return cls(position, decode_task_record(record) if record else None, Manifest(number, size_bytes))


def encode_identity(identity: StoreIdentity) -> bytes:
    """Return the owner's name as the store keeps it."""
    return "\n".join((_FORMAT, identity.topology, str(identity.partition), identity.changelog_topic_id)).encode()


def refuse_other_owner(stored: bytes, identity: StoreIdentity, directory: Path) -> None:
    """Raise TaskCorrupted for another task's store; StateIncompatible for another format or changelog topic."""
    version, *owner = stored.decode(errors="replace").split("\n")
    if version != _FORMAT:
        raise StateIncompatible(
            f"{directory}: is a store of format {version}; this dedup reads format {_FORMAT}. Run the release "
            "that wrote it, or delete the directory: it will be restored from the changelog."
        )
    if stored == encode_identity(identity):
        return
    theirs = StoreIdentity(owner[0], int(owner[1]), owner[2])
    if owner[:2] == [identity.topology, str(identity.partition)]:
        raise StateIncompatible(
            f"{directory}: was written with another changelog topic (id {theirs.changelog_topic_id}, now "
            f"{identity.changelog_topic_id}): the changelog was deleted and made again. Nothing was touched. "
            "Bring the old topic back, or start anew with `dedup reset`."
        )
    raise TaskCorrupted(f"{directory}: belongs to {theirs}, not to {identity}. {RESTORE}")


def _sealed(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES) + body


def _unsealed(sealed: bytes, what: str) -> bytes:
    body = sealed[_CHECKSUM_BYTES:]
    if len(body) < _STATE.size or zlib.crc32(body).to_bytes(_CHECKSUM_BYTES) != sealed[:_CHECKSUM_BYTES]:
        raise TaskCorrupted(f"{what} is damaged: its checksum differs. {RESTORE}")
    return body
