"""Reads the variable-length numbers of Avro and Protobuf, from one value (exact) or from a batch (fast).

Each byte contains seven bits of a number, lowest bits first. After a byte above 7f, the number continues in the next
byte. A number has at most 64 bits. Source: protobuf.dev/programming-guides/encoding, and "Binary Encoding" in the Avro
specification.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from dedup.core.odd_rows import NotInColumns, refuse

PADDING: Final = bytes(16)
"""The bytes after the last value of a batch, so that a truncated number can be read before it is refused."""
_BITS: Final = 64
_BYTES: Final = 10
_LOW: Final = 0x7F

_Longs = npt.NDArray[np.int64]


class Damaged(Exception):
    """Raised if a value does not have the expected format. The message does not reveal the payload."""


def varint(value: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the unsigned number at a position, and the position after the number.

    Raises Damaged if the number does not end before ``end``, or if it has more than 64 bits.
    """
    raw = shift = 0
    for byte in value[at : min(end, at + _BYTES)]:
        raw |= (byte & _LOW) << shift
        shift += 7
        if byte <= _LOW:
            at += shift // 7
            if raw.bit_length() > _BITS:
                break
            return raw, at
    if shift < 7 * _BYTES:
        raise Damaged(f"it ends inside a number (byte {at})")
    raise Damaged(f"a number has more than {_BITS} bits (byte {at})")


def varints(text: npt.NDArray[np.uint8], at: _Longs, ends: _Longs) -> tuple[npt.NDArray[np.uint64], _Longs]:
    """Return the unsigned number that begins at each given position in a batch's bytes, and the position after each
    number.

    ``text`` must end with `PADDING`. Raises NotInColumns if any number extends beyond its entry in ``ends``, or has
    more than 64 bits.
    """
    byte = text[at]
    raw = (byte & _LOW).astype(np.uint64)
    at = at + 1
    going, shift = np.flatnonzero(byte > _LOW), 7
    while len(going):
        byte = text[at[going]]
        if shift == _BITS - 1 and byte.max() > 1:  # the 64th bit is the last one
            raise NotInColumns(going[byte > 1].tolist())
        raw[going] |= (byte & _LOW).astype(np.uint64) << np.uint64(shift)
        at[going] += 1
        going, shift = going[byte > _LOW], shift + 7
    refuse(at > ends)
    return raw, at
