"""How large a state will be, from how many IDs it holds and how long they are.

The constants are measured on the store itself (tests/unit/test_size.py holds them to 20 %), with IDs that have nothing
in common, such as UUIDs and hashes: these do not compress. IDs that are numbered in order share their beginnings and
take down to half of it, so what is predicted is the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dedup.core.tracking_id import KEPT_BYTES
from dedup.core.window import Window

_PER_KEY_BYTE: Final = 1.05
"""A key's bytes in a sorted file: hardly shared, with a part of the block index."""
_PER_SIGHTING_BYTES: Final = 16.0
"""Value after compression, sequence number, lengths, and ten bits of Bloom filter."""
_FINGERPRINT_BYTES: Final = 8
_FILTER_BYTES: Final = 2.7
"""Of the prefilter in memory: 16 bits an ID, and what is empty of the newest layer."""
_TAG_BYTES: Final = 1
UUID_KEY_BYTES: Final = 17
INTEGER_KEY_BYTES: Final = 6
"""Of numbers up to a trillion."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A state in its steady flow, all partitions together."""

    ids_least: int
    """Right after a segment was dropped: one retention's IDs."""
    ids_most: int
    """Right before: one and a half."""
    bytes_an_id: float
    disk_least_bytes: int
    disk_most_bytes: int
    filter_most_bytes: int
    """In memory of the workers, beside the 128 MiB that each has for buffers and cache."""


def key_bytes(id_bytes: int) -> int:
    """Return the length of the state key of a text or bytes of this length: long ones are kept as digests."""
    return min(id_bytes + _TAG_BYTES, KEPT_BYTES + 1)


def bytes_an_id(key_length: int, *, fingerprints: bool) -> float:
    """Return what one sighting takes in RocksDB's files."""
    return _PER_KEY_BYTE * key_length + _PER_SIGHTING_BYTES + (_FINGERPRINT_BYTES if fingerprints else 0)


def predict(window: Window, ids_per_s: float, key_length: int, *, fingerprints: bool) -> Predicted:
    """Return the state that new IDs at this rate lead to; a rate of event time, which may be faster in a backfill."""
    each = bytes_an_id(key_length, fingerprints=fingerprints)
    least = ids_per_s * window.retention_ms / 1000
    # Segments are dropped whole; each is half a retention.
    most = least + ids_per_s * window.segment_ms / 1000
    return Predicted(
        round(least), round(most), each, round(least * each), round(most * each), round(most * _FILTER_BYTES)
    )
