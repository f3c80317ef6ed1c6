"""What is said of a checkpoint: whose state it is, up to where, and which bytes it consists of.

A checkpoint is one task's store, closed and packed into one archive, with a description (`manifest.json`) beside it
that is written last: who finds a description finds a whole archive.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Final, Self

import msgspec

from dedup.errors import CheckpointUnusable
from dedup.store.base import StoreIdentity

FORMAT: Final = 1
MOST_BYTES: Final = 64 << 10
"""Of a description: nobody makes us read more."""
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{2,128}\Z")]


class _Written(msgspec.Struct, frozen=True):
    """The description as JSON; a member that is not known is left alone."""

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
    """One partition's state, up to one position of its changelog."""

    identity: StoreIdentity
    fingerprint: bytes
    """Of the last task record in it."""
    segment_ms: int
    """Width of the segments it was written under."""
    position: int
    """The changelog offset to restore from."""
    ids: int
    archive: str
    """The archive's name, beside the description."""
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
        return json.dumps({"format": FORMAT, **msgspec.to_builtins(written)}, indent=2).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, place: str) -> Self:
        """Return the description found at a place; raises CheckpointUnusable for one of no known format."""
        try:
            version = msgspec.json.decode(data, type=_Head).format
            if version != FORMAT:
                raise CheckpointUnusable(
                    f"{place}: is a checkpoint of format {version}, and this dedup reads format {FORMAT}."
                )
            found = msgspec.json.decode(data, type=_Written)
            identity = StoreIdentity(found.topology, found.partition, found.changelog_topic_id)
            fingerprint = bytes.fromhex(found.fingerprint)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise CheckpointUnusable(f"{place}: is damaged: {error}.") from error
        return cls(
            identity,
            fingerprint,
            found.segment_ms,
            found.position,
            found.ids,
            found.archive,
            found.bytes,
            found.sha256,
        )
