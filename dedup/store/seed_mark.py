"""The seed mark: what `dedup spark seed` writes into a changelog beside sightings and the task record.

A seed is many transactions. The first record it writes into a changelog partition says `seeding`, the last transaction
holds the task record and `seeded`. All marks have one key, so compaction keeps the newest, and a partition whose mark
says `seeding` while there is no task record holds half a history: no task may start on it. The mark carries what a
second run needs to do the same again: which seed it is, where the fleet is to begin, how many sightings there are.

The value is a version byte, a JSON object and its CRC-32, big-endian.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from typing import Final, Literal

from dedup.errors import InvariantBroken, StateIncompatible, TaskCorrupted

SEED_MARK_KEY: Final = b"H"
_VERSION: Final = 1
_CHECKSUM_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class SeedMark:
    """How far the seed of one changelog partition is, and which seed it is."""

    phase: Literal["seeding", "seeded"]
    seed: str
    """Names the history and the place where the fleet takes over; another seed has another name."""
    next_offset: int
    """Of the feeding partition: where the fleet begins."""
    stream_time_ms: int
    sightings: int
    """Changelog records of sightings in this partition."""
    digest: str
    """Of these records, in any order."""
    judged_at_ms: int
    """The wall clock that decided which times are in the future."""
    begins: dict[str, list[int]]
    """Source topic -> the offset of each partition from which on the fleet reads."""
    history: Literal["topics", "files"]
    """What was judged: the source topics before `begins`, or files."""


def encode_seed_mark(mark: SeedMark) -> bytes:
    """Return the mark's bytes."""
    body = bytes([_VERSION]) + json.dumps(asdict(mark), sort_keys=True, separators=(",", ":")).encode()
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES)


def decode_seed_mark(value: bytes) -> SeedMark:
    """Return the mark; raises StateIncompatible for another version, TaskCorrupted for damaged bytes."""
    if value and value[0] != _VERSION:
        raise StateIncompatible(
            f"a seed mark has version {value[0]}; this dedup reads version {_VERSION}. The changelog was seeded by "
            "another release: run that one, or `dedup reset` the topology and seed it again."
        )
    body, checksum = value[:-_CHECKSUM_BYTES], value[-_CHECKSUM_BYTES:]
    if not body or zlib.crc32(body) != int.from_bytes(checksum):
        raise TaskCorrupted(
            f"a seed mark of {len(value)} bytes is damaged: its checksum differs. Run `dedup reset`, then seed again."
        )
    try:
        return SeedMark(**json.loads(body[1:]))
    except (TypeError, ValueError) as error:
        # The checksum holds, so these are the bytes that were written: by us, of this version, and yet no mark.
        raise InvariantBroken(f"a seed mark has other members than version {_VERSION} has: {error}.") from error
