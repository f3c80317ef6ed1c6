"""Chooses partitions for a column of keys as Kafka's default partitioner does, by a murmur2 hash of the key.

The Java client, aiokafka, and librdkafka with `murmur2_random` choose the same partitions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

SEED: Final = 0x9747B28C
M: Final = np.uint32(0x5BD1E995)
_POSITIVE: Final = np.uint32(0x7FFFFFFF)
_WORD_BYTES: Final = 4

_Hashes = npt.NDArray[np.uint32]


def partitions(keys: Sequence[bytes], count: int) -> list[int]:
    """Return the partition that Kafka's default partitioner chooses for each key in a topic of ``count`` partitions."""
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for at, key in enumerate(keys):
        by_length[len(key)].append(at)
    hashes: _Hashes = np.empty(len(keys), dtype=np.uint32)
    for length, places in by_length.items():
        joined = b"".join([keys[at] for at in places])
        hashes[places] = _of_one_length(np.frombuffer(joined, np.uint8).reshape(len(places), length), length)
    chosen: list[int] = ((hashes & _POSITIVE) % np.uint32(count)).tolist()
    return chosen


def _of_one_length(rows: npt.NDArray[np.uint8], length: int) -> _Hashes:
    hashes = np.full(len(rows), np.uint32(SEED ^ length), dtype=np.uint32)
    whole = length // _WORD_BYTES
    words = np.ascontiguousarray(rows[:, : whole * _WORD_BYTES]).view("<u4")
    for column in range(whole):
        word = words[:, column] * M
        word ^= word >> np.uint32(24)
        hashes *= M
        hashes ^= word * M
    tail = length % _WORD_BYTES
    if tail:
        for at in range(tail):
            hashes ^= rows[:, whole * _WORD_BYTES + at].astype(np.uint32) << np.uint32(8 * at)
        hashes *= M
    hashes ^= hashes >> np.uint32(13)
    hashes *= M
    hashes ^= hashes >> np.uint32(15)
    return hashes
