"""Compares the two ways to extract: one by one, which says what is right, and in columns."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from dedup.core import extract
from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import Fault, One, extract_one, of_leaves, reader_for

_ROWS = 9
_MANY = 1_000
FEW = 100
"""The most of many rows that may be read or judged one by one because a single row is unusual."""


def everywhere(recipe: Recipe, value: bytes | None, key: bytes | None = b"k") -> One | Fault:
    """Return what is extracted of equal values: one by one, and in columns with other values around."""
    slow = extract_one(recipe, key, value, [], 5)
    found = Extractor(recipe)([key] * _ROWS, [value] * _ROWS, [[]] * _ROWS, [5] * _ROWS)
    last = _ROWS - 1
    fast = found.faults.get(last) or One(
        found.ids[last], found.times_ms[last], found.fingerprints[last] if found.fingerprints else b""
    )
    assert fast == slow
    return slow


def same_in_columns(recipe: Recipe, values: Sequence[bytes]) -> None:
    """Each row of a batch is what `extract_one` says of it."""
    count = len(values)
    found = Extractor(recipe)([None] * count, values, [()] * count, range(count))
    for row, value in enumerate(values):
        match extract_one(recipe, None, value, (), row):
            case One(key, time_ms, fingerprint):
                assert (found.ids[row], found.times_ms[row], found.fingerprints[row]) == (key, time_ms, fingerprint)
                assert row not in found.faults
            case Fault() as fault:
                assert found.faults[row] == fault, f"{recipe.schema}: {value.hex()}"


def slow_rows(recipe: Recipe, usual: bytes, odd: bytes) -> int:
    """Return how many rows are read or judged one by one, if one odd row stands among many usual ones."""
    values = [usual] * _MANY
    values[_MANY // 2 + 7] = odd
    same_in_columns(recipe, values)
    reader = type(reader_for(recipe, b""))
    with (
        mock.patch.object(reader, "read", autospec=True, side_effect=reader.read) as read,
        mock.patch.object(extract, "of_leaves", side_effect=of_leaves) as judged,
    ):
        Extractor(recipe)([None] * _MANY, values, [()] * _MANY, [0] * _MANY)
    return read.call_count + judged.call_count
