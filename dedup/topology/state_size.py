"""Predicts the size of a topology's state from the number and length of the IDs.

The constants were measured with RocksDB and IDs that do not compress, such as UUIDs and hashes.
"""

from __future__ import annotations

from typing import Final, TypedDict

from dedup.core.tracking_id import KEPT_BYTES
from dedup.core.window import Window
from dedup.errors import Problem, SettingsError

UUID_KEY_BYTES: Final = 17
"""The length of the state key of a UUID."""
KINDS: Final = "uuid, integer or text:LENGTH"
_MOST_DIGITS: Final = 18
"""The maximum number of digits in an option. Python refuses to convert thousands of digits."""
_INTEGER_KEY_BYTES: Final = 6
"""The length of the state key of an integer ID up to a trillion."""
_TAG_BYTES: Final = 1
_PER_KEY_BYTE: Final = 1.05
"""Bytes on disk per byte of a key. Keys share few prefixes, and each key also occupies part of the block index."""
_PER_SIGHTING_BYTES: Final = 16.0
"""Bytes on disk per sighting in addition to its key: value, sequence number, lengths, and 10 bits of Bloom filter."""
_FINGERPRINT_BYTES: Final = 8
_FILTER_BYTES: Final = 2.7
"""Memory per ID in the Bloom filter: 16 bits, plus a share of the empty part of the newest layer."""
_LOGGED_BYTES: Final = 8 + _FILTER_BYTES
"""Bytes on disk per ID in the Bloom filter's log and snapshot, from which the filter is loaded after a restart."""


class StateSize(TypedDict):
    """The predicted total state size of all partitions."""

    ids_least: int
    """Number of IDs right after a segment is dropped."""
    ids_most: int
    """Number of IDs right before a segment is dropped."""
    bytes_an_id: float
    disk_least_bytes: int
    disk_most_bytes: int
    filter_most_bytes: int
    """Memory of the Bloom filters. In addition, each worker uses 128 MiB of memory for buffers and cache."""


def predict(window: Window, ids_per_s: float, key_length: int, *, fingerprints: bool) -> StateSize:
    """Return the predicted state size for ``ids_per_s`` new IDs per second, each with a key of ``key_length`` bytes."""
    each = bytes_an_id(key_length, fingerprints=fingerprints, logged=not window.extend)
    least = ids_per_s * window.retention_ms / 1000
    # Each segment covers half a retention period and is dropped as a whole.
    most = least + ids_per_s * window.segment_ms / 1000
    return {
        "ids_least": round(least),
        "ids_most": round(most),
        "bytes_an_id": each,
        "disk_least_bytes": round(least * each),
        "disk_most_bytes": round(most * each),
        "filter_most_bytes": round(most * _FILTER_BYTES),
    }


def bytes_an_id(key_length: int, *, fingerprints: bool, logged: bool = True) -> float:
    """Return the disk space per sighting in bytes, including the Bloom filter's files if ``logged`` is true."""
    each = _PER_KEY_BYTE * key_length + _PER_SIGHTING_BYTES
    return each + (_FINGERPRINT_BYTES if fingerprints else 0) + (_LOGGED_BYTES if logged else 0)


def key_bytes(kind: str) -> int:
    """Return the state key length in bytes for a kind of ID. Long IDs are stored as digests.

    Raises SettingsError for an unknown kind of ID.
    """
    name, _, length = kind.partition(":")
    match name, length:
        case "uuid", "":
            return UUID_KEY_BYTES
        case "integer", "":
            return _INTEGER_KEY_BYTES
        case "text", digits if digits.isdecimal() and len(digits) <= _MOST_DIGITS and int(digits):
            return min(int(digits) + _TAG_BYTES, KEPT_BYTES + 1)
        case _:
            raise SettingsError([Problem("--id", f'"{kind}" is unknown; write {KINDS}, for example text:20')])


def format_bytes(size_bytes: int) -> str:
    """Return a size as text, in MiB or GiB."""
    return f"{size_bytes / (1 << 30):,.2f} GiB" if size_bytes >= 1 << 28 else f"{size_bytes / (1 << 20):,.1f} MiB"
