"""Encodes columns of composite IDs and instants, with the same result as extract_one.py for every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Final

from dedup.core import tracking_id as encoding
from dedup.core.event_time import rfc3339_column_ms
from dedup.core.extract_one import encode_scalar, normalize_bytes
from dedup.core.tracking_id import Normalizing, normalizer

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
