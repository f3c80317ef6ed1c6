"""The bytes that the RocksDB store keeps about itself in its default column family, each with a checksum."""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass
from typing import Final, Self

from dedup.errors import TaskCorrupted
from dedup.store.base import TaskRecord
from dedup.store.changelog import decode_task_record, encode_task_record
from dedup.store.directory import RESTORE

_POSITION: Final = struct.Struct(">Q")
_SEGMENT: Final = struct.Struct(">QQQQ")
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


def encode_state(position: int, record: TaskRecord | None) -> bytes:
    """Return position and task record as one value: neither is ever newer than the other."""
    return _sealed(_POSITION.pack(position) + (b"" if record is None else encode_task_record(record)))


def decode_state(value: bytes) -> tuple[int, TaskRecord | None]:
    """Return position and task record; raises TaskCorrupted if they are damaged."""
    body = _unsealed(value, "the task record of the store")
    record = body[_POSITION.size :]
    return decode_position(body[: _POSITION.size]), decode_task_record(record) if record else None


def _sealed(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES) + body


def _unsealed(sealed: bytes, what: str) -> bytes:
    body = sealed[_CHECKSUM_BYTES:]
    if len(body) < _POSITION.size or zlib.crc32(body).to_bytes(_CHECKSUM_BYTES) != sealed[:_CHECKSUM_BYTES]:
        raise TaskCorrupted(f"{what} is damaged: its checksum differs. {RESTORE}")
    return body
