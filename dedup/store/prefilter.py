"""A Bloom filter over one segment's IDs, asked for a whole batch at once.

A filter that has seen every ID of a segment answers "unknown" without RocksDB, which is the usual answer. It is a
blocked Bloom filter (Putze, Sanders, Singler 2007): one 64-bit word per ID with four bits set, so one cache miss per
ID; about 16 bits an ID, 0.5 % false positives. It grows by layers, each as large as all before it.

The hash is Python's own of the bytes: computed once for the look-ups in dicts anyhow, keyed per process, so that nobody
can choose IDs that collide. For the same reason a filter can not outlive the process.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_IDS_PER_WORD: Final = 4
_FIRST_WORDS: Final = 1 << 11
_QUICK_GROWTH_WORDS: Final = 1 << 16
"""Below this a layer is thrice as large as all before it: few layers, and the waste is small."""

_PAIR_BITS: Final = 12
_PAIR_MASK: Final = np.uint64((1 << _PAIR_BITS) - 1)
_WORD_AT: Final = np.uint64(2 * _PAIR_BITS)
_WORD_BITS: Final = np.uint64(64 - 2 * _PAIR_BITS)


def _pairs_of_bits() -> Words:
    pair = np.arange(1 << _PAIR_BITS, dtype=np.uint64)
    return (np.uint64(1) << (pair & np.uint64(63))) | (np.uint64(1) << (pair >> np.uint64(6)))


_PAIRS: Final = _pairs_of_bits()
"""12 bits of a hash -> a word with the two bits they choose."""


class Hashed:
    """The hashes of a batch of IDs: made once, asked of several segments."""

    __slots__ = ("bits", "words")

    def __init__(self, ids: Collection[bytes]) -> None:
        hashes = np.fromiter(map(hash, ids), np.int64, len(ids)).view(np.uint64)
        self.words: Final = hashes >> _WORD_AT
        self.bits: Final = _PAIRS[hashes & _PAIR_MASK] | _PAIRS[hashes >> np.uint64(_PAIR_BITS) & _PAIR_MASK]

    def in_layer(self, words: int) -> npt.NDArray[np.uint64]:
        """Return which of a layer's words each ID has: its 40 bits scaled, so that a layer may have any size."""
        return self.words * np.uint64(words) >> _WORD_BITS


class Prefilter:
    """Tells which IDs of a batch may have been added before; never denies one that was."""

    __slots__ = ("_capacity", "_layers", "_total_words", "added")

    def __init__(self) -> None:
        self._layers: list[Words] = []
        self._total_words = 0
        self._capacity = 0
        self.added = 0
        """IDs added, repeated ones counted again."""

    @property
    def size_bytes(self) -> int:
        """What the filter takes in memory."""
        return self._total_words * 8

    def add(self, hashed: Hashed) -> None:
        """Add a batch."""
        count = len(hashed.words)
        if not count:
            return
        if self.added + count > self._capacity:
            self._grow(count)
        layer = self._layers[-1]
        np.bitwise_or.at(layer, hashed.in_layer(len(layer)), hashed.bits)
        self.added += count

    def may_hold(self, hashed: Hashed) -> npt.NDArray[np.bool_]:
        """Return a column: False where the ID was certainly never added."""
        found = np.zeros(len(hashed.words), np.bool_)
        for layer in self._layers:
            found |= (layer[hashed.in_layer(len(layer))] & hashed.bits) == hashed.bits
        return found

    def _grow(self, count: int) -> None:
        wanted = max(_FIRST_WORDS, self._total_words, -(-count // _IDS_PER_WORD))
        if self._total_words and wanted < _QUICK_GROWTH_WORDS:
            wanted = min(3 * wanted, _QUICK_GROWTH_WORDS)
        self._layers.append(np.zeros(wanted, np.uint64))
        self._total_words += wanted
        # What was left in the layer before is given up: its last batch did not fit.
        self._capacity = self.added + wanted * _IDS_PER_WORD
