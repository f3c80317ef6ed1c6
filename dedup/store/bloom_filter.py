"""Implements a Bloom filter over the IDs of one segment, so that most lookups of unknown IDs do not read from RocksDB.

The filter is a blocked Bloom filter (Putze, Sanders, Singler 2007) with about 16 bits per ID and a false-positive rate
of 0.5%. The filter grows in layers, each at least as large as all earlier layers together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
"""One hash of 64 bits per ID."""

_WORD_BYTES: Final = 4
_KEY_WORDS: Final = 16
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
_HALF: Final = np.uint64(32)

_IDS_PER_WORD: Final = 4
_FIRST_WORDS: Final = 1 << 11
_QUICK_GROWTH_WORDS: Final = 1 << 16
"""Below this number of words, a new layer is up to three times as large as all earlier layers together."""

_PAIR_BITS: Final = 12
_PAIR_MASK: Final = np.uint64((1 << _PAIR_BITS) - 1)
_WORD_AT: Final = np.uint64(2 * _PAIR_BITS)
_WORD_BITS: Final = np.uint64(64 - 2 * _PAIR_BITS)


_PAIR: Final = np.arange(1 << _PAIR_BITS, dtype=np.uint64)
_PAIRS: Final = (np.uint64(1) << (_PAIR & np.uint64(63))) | (np.uint64(1) << (_PAIR >> np.uint64(6)))
"""Maps 12 bits of a hash, which select two bits of a 64-bit word, to a word that has only these two bits set."""


class HashKey:
    """Hashes IDs with a secret, so that nobody who does not know the secret can choose IDs that collide.

    The hash is MULTILINEAR (Lemire, Kaser 2014, "Strongly universal string hashing is fast") over words of 32 bits: the
    sum of the words, each multiplied by a random number of 64 bits. The last steps spread the result over all bits. An
    ID and the same ID with zero bytes at its end have the same hash, which a Bloom filter allows.
    """

    __slots__ = ("_key", "_secret")

    def __init__(self, secret: bytes) -> None:
        self._secret: Final = secret
        self._key = self._of_words(_KEY_WORDS)

    def hashes(self, ids: Sequence[bytes]) -> Hashes:
        """Return the hash of each ID; the same secret gives the same hashes in every process."""
        words = max(1, -(-max(map(len, ids), default=0) // _WORD_BYTES))
        if words > len(self._key):
            self._key = self._of_words(words)
        padded = np.array(ids, dtype=f"S{words * _WORD_BYTES}").view(np.uint32).reshape(len(ids), words)
        found: Hashes = padded.astype(np.uint64) @ self._key[:words]
        found *= _SPREAD
        found ^= found >> _HALF
        found *= _SPREAD
        return found

    def _of_words(self, words: int) -> Hashes:
        return np.frombuffer(hashlib.shake_256(self._secret).digest(8 * words), np.uint64)


class Hashed:
    """The hashes of a batch of IDs, in the form in which they can be used for several segments."""

    __slots__ = ("bits", "hashes", "words")

    def __init__(self, hashes: Hashes) -> None:
        self.hashes: Final = hashes
        self.words: Final = hashes >> _WORD_AT
        self.bits: Final = _PAIRS[hashes & _PAIR_MASK] | _PAIRS[hashes >> np.uint64(_PAIR_BITS) & _PAIR_MASK]

    def in_layer(self, words: int) -> npt.NDArray[np.uint64]:
        """Return the index of each ID's word in a layer that has ``words`` words."""
        return self.words * np.uint64(words) >> _WORD_BITS


class BloomFilter:
    """A set of IDs that never misses an ID that was added, but may report an ID that was not."""

    __slots__ = ("_capacity", "_layers", "_total_words", "added")

    def __init__(self, expected_ids: int = 0) -> None:
        self._layers: list[Hashes] = []
        self._total_words = 0
        self._capacity = 0
        self.added = 0
        """Number of IDs that were added, counting repetitions."""
        if expected_ids:
            self._grow(expected_ids)

    @property
    def size_bytes(self) -> int:
        """The memory that the filter uses, in bytes."""
        return self._total_words * 8

    def add(self, hashed: Hashed) -> None:
        """Add a batch of IDs."""
        count = len(hashed.words)
        if not count:
            return
        if self.added + count > self._capacity:
            self._grow(count)
        layer = self._layers[-1]
        np.bitwise_or.at(layer, hashed.in_layer(len(layer)), hashed.bits)
        self.added += count

    def may_hold(self, hashed: Hashed) -> npt.NDArray[np.bool_]:
        """Return one boolean per ID: False if the ID was never added, and True if it may have been added."""
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
        # Free space in the previous layer stays unused, because this batch did not fit into that layer.
        self._capacity = self.added + wanted * _IDS_PER_WORD
