"""Encodes columns of IDs and computes their state keys, with the same result as extract_one.py for every row."""

from __future__ import annotations

from binascii import Error as NotHexadecimal
from binascii import hexlify, unhexlify
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from dedup.core import tracking_id as encoding
from dedup.core.event_time import rfc3339_column_ms
from dedup.core.extract_one import encode_scalar, normalize_bytes
from dedup.core.tracking_id import KEPT_BYTES, Normalizing, normalizer, state_key

_UUID_CHARS: Final = 36
_ROW: Final = _UUID_CHARS + 1
"""The length of a UUID and the line feed after it."""
_HYPHENS: Final = (8, 13, 18, 23)
_YEAR_1_MS: Final = -62_135_596_800_000
_REMEMBERED: Final = 1 << 16
"""The maximum number of parts of composite IDs that the cache holds for one column."""


class PartMemo(dict[str | int | bytes, bytes]):
    """Caches the length-prefixed canonical bytes of each value of one part of composite IDs.

    Only strings, integers, and bytes may be looked up, because Python would find True and 1.0 under the key 1. Looking
    up an empty string or empty bytes raises _EmptyPart.
    """

    __slots__ = ("_encode", "_normalize")

    def __init__(self, normalize: tuple[Normalizing, ...]) -> None:
        super().__init__()
        self._normalize: Callable[[str], str] | None = normalizer(normalize)
        self._encode = partial(encode_scalar, instants="instant" in normalize)

    def __missing__(self, value: str | int | bytes) -> bytes:
        scalar = value
        if self._normalize is not None and isinstance(value, str):
            scalar = self._normalize(value)
        elif self._normalize is not None and isinstance(value, bytes):
            scalar = normalize_bytes(value, self._normalize)
        if not scalar and not isinstance(scalar, int):
            raise _EmptyPart
        if len(self) >= _REMEMBERED:
            self.clear()
        part = self[value] = encoding.prefixed(self._encode(scalar))
        return part


class _EmptyPart(Exception):
    """Raised if a part of a composite ID is empty."""


def composite_ids(columns: Sequence[Sequence[str | int | bytes]], memos: Sequence[PartMemo]) -> list[bytes] | None:
    """Return the canonical bytes of composite IDs, given one column per part, or None if any part is empty."""
    parts = [map(memo.__getitem__, column) for memo, column in zip(memos, columns, strict=True)]
    try:
        return list(map(b"".join, zip(repeat(encoding.COMPOSITE), *parts, strict=False)))
    except _EmptyPart:
        return None


def instant_ids(column: Sequence[str | int | bytes]) -> list[bytes] | None:
    """Return the canonical bytes of a column in which RFC 3339 times become instants, or None if any value is empty."""
    if "" in column or b"" in column:
        return None
    texts = [value for value in column if isinstance(value, str)]
    if len(texts) == len(column) and _are_instants(texts):
        return [encoding.INSTANT + text.encode() for text in texts]
    return [encode_scalar(value, instants=True) for value in column]


def _are_instants(texts: list[str]) -> bool:
    """Tell whether all texts are times of one layout, in exactly the form that an instant's canonical bytes have."""
    if not texts[0].endswith("Z") or ("." in texts[0] and any(text[-2:] == "0Z" for text in texts)):
        return False
    times_ms = rfc3339_column_ms(texts)
    return times_ms is not None and min(times_ms) >= _YEAR_1_MS


# The following functions compute the state keys of whole columns of IDs in C, with the same result as tracking_id.py.
# Each function returns None if any row needs the slow path.


def scalar_keys(column: list[str] | list[int] | list[str | int]) -> list[bytes] | None:
    """Return the state keys of a column of strings and 64-bit integers, or None if any string is empty."""
    kinds = set(map(type, column))
    if kinds == {str}:
        return text_keys(column)  # type: ignore[arg-type]
    if kinds == {int}:
        return _integer_keys(column)  # type: ignore[arg-type]
    if "" in column:
        return None
    return [state_key(encode_scalar(value, instants=False)) for value in column]


def text_keys(texts: list[str]) -> list[bytes] | None:
    """Return the state keys of a column of strings that UTF-8 can encode, or None if any string is empty."""
    joined = "\n".join(texts)
    count = len(texts)
    if len(joined) + 1 == _ROW * count and joined.isascii():
        keys = _uuid_keys(joined.encode(), count)
        if keys is not None:
            return keys
    lengths = set(map(len, texts))
    if 0 in lengths:
        return None
    if _UUID_CHARS in lengths or joined.count("\n") != count - 1:
        return kept(map(encoding.encode_text, texts))
    return kept(("\x01" + joined.replace("\n", "\n\x01")).encode().split(b"\n"))


def bytes_keys(values: Sequence[bytes]) -> list[bytes] | None:
    """Return the state keys of IDs from record keys, headers, or raw values, or None if any ID is empty."""
    count = len(values)
    lengths = set(map(len, values))
    if lengths == {_UUID_CHARS}:
        keys = _uuid_keys(b"\n".join(values), count)
        if keys is not None:
            return keys
    if 0 in lengths:
        return None
    if _UUID_CHARS in lengths:
        return kept(map(encoding.encode_bytes, values))
    return kept([encoding.BYTES + value for value in values])


def _integer_keys(column: list[int]) -> list[bytes]:
    numbers = np.array(column, np.int64)
    sizes = numbers ^ (numbers >> 63)
    width = int(sizes.max()).bit_length() // 8 + 1
    if int(sizes.min()).bit_length() // 8 + 1 != width:
        return list(map(encoding.encode_integer, column))
    keys = np.empty((len(column), width + 1), np.uint8)
    keys[:, 0] = encoding.INTEGER[0]
    keys[:, 1:] = numbers.astype(">i8").view(np.uint8).reshape(len(column), 8)[:, 8 - width :]
    return _rows(keys)


def kept_if(canonical: list[bytes] | None) -> list[bytes] | None:
    """Return the state keys of a column of canonical bytes, or None if there is no column."""
    return None if canonical is None else kept(canonical)


def kept(canonical: Iterable[bytes]) -> list[bytes]:
    """Return the state keys of a column of canonical bytes, which must not be empty."""
    keys = canonical if isinstance(canonical, list) else list(canonical)
    if max(map(len, keys)) <= KEPT_BYTES:
        return keys
    return list(map(state_key, keys))


def _uuid_keys(lines: bytes, count: int) -> list[bytes] | None:
    """Return the state keys of lines with one canonical UUID each, or None if any line has another form."""
    if lines[_UUID_CHARS::_ROW] != b"\n" * (count - 1):
        return None
    hyphens = b"-" * count
    if any(lines[at::_ROW] != hyphens for at in _HYPHENS):
        return None
    digits = lines.translate(None, b"-\n")
    if len(digits) != 32 * count:  # a line has additional hyphens or line feeds
        return None
    try:
        packed = unhexlify(digits)
    except NotHexadecimal:
        return None
    if hexlify(packed) != digits:  # a line has capital letters or white space
        return None
    keys = np.empty((count, 17), np.uint8)
    keys[:, 0] = encoding.UUID[0]
    keys[:, 1:] = np.frombuffer(packed, np.uint8).reshape(count, 16)
    return _rows(keys)


def _rows(keys: npt.NDArray[np.uint8]) -> list[bytes]:
    # Unlike numpy's bytes type, its void type keeps trailing zero bytes.
    rows: list[bytes] = keys.view(f"V{keys.shape[1]}").ravel().tolist()
    return rows
