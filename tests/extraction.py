"""Compares the two ways to extract: one by one, which says what is right, and in columns."""

from __future__ import annotations

from collections.abc import Sequence

from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import Fault, One, extract_one

_ROWS = 9


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
