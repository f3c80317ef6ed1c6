"""The hot path: tracking IDs, event times and fingerprints of a batch, as columns.

Theory of operation. A batch is decided as a whole in C, or it is halved; what is left at the end goes row by row
through `extract_one`. So the fast way only has to know when it is *sure* to agree with the slow one:

* All values, joined by line feeds, are decoded by one call (msgspec, one struct with the named members only).
  It may not pair rows wrongly: every value begins with ``{`` and ends with ``}``, and ``}`` LF ``{`` can stand neither
  in a string (a raw line feed is no JSON) nor inside a container (a comma is missing), so it is the border of two
  values. As many values out as rows in: then there are no other borders.
* msgspec skips members it is not asked for, and takes invalid UTF-8 in them: the joined bytes must be UTF-8.
* It takes the last of repeated members: each name's text in quotes must occur exactly once a row (per place where
  the struct names it). Every row has it at least once, unless spelled with an escape; so none of those.
* Depth: a short value can not be deep; of a long one the brackets are counted.
* Types are narrow: texts, 64-bit integers. All else (numbers with a fraction, true, null, absent) is an error
  of the decoder, and so the slow path's business, as is every fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, assert_never

from dedup.core.columns import PartMemo, bytes_keys, composite_keys, scalar_keys
from dedup.core.content import content_of
from dedup.core.event_time import EventTime, FieldTime
from dedup.core.exact_json import Unreadable
from dedup.core.extract_one import (
    Fault,
    FaultKind,
    Format,
    Headers,
    One,
    Recipe,
    content_digest,
    extract_one,
    smooth_bytes,
    value_digest,
)
from dedup.core.json_columns import JsonColumns, compile_columns
from dedup.core.paths import Path
from dedup.core.tracking_id import (
    CONTENT,
    ContentRule,
    FieldRule,
    FieldsRule,
    HeaderRule,
    KeyRule,
    RawContentRule,
    TrackingId,
    normalizer,
    state_key,
)

__all__ = ["Extracted", "Extractor", "Fault", "FaultKind", "Recipe", "compile_extractor"]

_FEW: Final = 4
"""So few rows are not worth another try in columns."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """Columns of one batch, a place per record."""

    ids: list[bytes | None]
    """State keys, at most 33 bytes; None where `faults` has the row."""
    times_ms: list[int]
    """Event times; 0 where `faults` has the row."""
    fingerprints: list[bytes] | None
    """Eight bytes each, empty where `faults` has the row; None unless asked for."""
    faults: dict[int, Fault]


def compile_extractor(
    tracking_id: TrackingId,
    event_time: EventTime,
    *,
    fmt: Format,
    fingerprint: bool,
    fingerprint_exclude: tuple[Path, ...] = (),
) -> Extractor:
    """Return the extractor of a topology. Raises ValueError with a sentence for what can never find an ID or a time."""
    return Extractor(Recipe(tracking_id, event_time, fmt, fingerprint, fingerprint_exclude))


class Extractor:
    """Takes IDs, times and fingerprints out of batches; equals `extract_one` on every row."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe: Final = recipe
        self._columns: Final = _compile(recipe)

    def __call__(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers],
        timestamps_ms: Sequence[int],
    ) -> Extracted:
        """Return the columns of a batch; the four arguments are columns of the same length."""
        if self._columns is not None and len(values) > _FEW:
            found = self._columns.extract(keys, values, headers, timestamps_ms)
            if found is not None:
                return found
            if None in values:
                return self._nulls_apart(keys, values, headers, timestamps_ms)
            return self._halved(keys, values, headers, timestamps_ms)
        return self._one_by_one(keys, values, headers, timestamps_ms)

    def _one_by_one(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers],
        timestamps_ms: Sequence[int],
    ) -> Extracted:
        ids: list[bytes | None] = []
        times_ms: list[int] = []
        fingerprints: list[bytes] = []
        faults: dict[int, Fault] = {}
        for row, record in enumerate(zip(keys, values, headers, timestamps_ms, strict=True)):
            match extract_one(self.recipe, *record):
                case One(key, time_ms, fingerprint):
                    ids.append(key)
                    times_ms.append(time_ms)
                    fingerprints.append(fingerprint)
                case Fault() as fault:
                    ids.append(None)
                    times_ms.append(0)
                    fingerprints.append(b"")
                    faults[row] = fault
                case never:
                    assert_never(never)
        return Extracted(ids, times_ms, fingerprints if self.recipe.fingerprint else None, faults)

    def _halved(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers],
        timestamps_ms: Sequence[int],
    ) -> Extracted:
        """Both halves, so that one odd record costs few rows their speed."""
        half = len(values) // 2
        first = self(keys[:half], values[:half], headers[:half], timestamps_ms[:half])
        second = self(keys[half:], values[half:], headers[half:], timestamps_ms[half:])
        fingerprints = None
        if first.fingerprints is not None and second.fingerprints is not None:
            fingerprints = first.fingerprints + second.fingerprints
        faults = first.faults | {half + row: fault for row, fault in second.faults.items()}
        return Extracted(first.ids + second.ids, first.times_ms + second.times_ms, fingerprints, faults)

    def _nulls_apart(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers],
        timestamps_ms: Sequence[int],
    ) -> Extracted:
        """Null values one by one, the others as columns."""
        count = len(values)
        ids: list[bytes | None] = [None] * count
        times_ms = [0] * count
        fingerprints = [b""] * count
        faults: dict[int, Fault] = {}
        null = [row for row in range(count) if values[row] is None]
        there = [row for row in range(count) if values[row] is not None]
        for rows, take in ((null, self._one_by_one), (there, self)):
            part = take(
                [keys[row] for row in rows],
                [values[row] for row in rows],
                [headers[row] for row in rows],
                [timestamps_ms[row] for row in rows],
            )
            for at, row in enumerate(rows):
                ids[row] = part.ids[at]
                times_ms[row] = part.times_ms[at]
                if part.fingerprints is not None:
                    fingerprints[row] = part.fingerprints[at]
            faults |= {rows[at]: fault for at, fault in part.faults.items()}
        return Extracted(ids, times_ms, fingerprints if self.recipe.fingerprint else None, faults)


class _Columns:
    """The fast way of one recipe; decides a whole batch or nothing."""

    def __init__(self, recipe: Recipe, json_columns: JsonColumns | None) -> None:
        self._recipe = recipe
        self._json = json_columns
        rule = recipe.tracking_id.rule
        parts = len(rule.paths) if isinstance(rule, FieldsRule) else 0
        self._memos = [PartMemo(recipe.tracking_id.normalize) for _ in range(parts)]
        self._smooth = normalizer(recipe.tracking_id.normalize)

    def extract(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers],
        timestamps_ms: Sequence[int],
    ) -> Extracted | None:
        """Return the columns when every row is sure to be decided as `extract_one` would."""
        if self._recipe.fmt == "bytes" and None in values:
            return None
        members: list[list[str | int]] = []
        times_ms: list[int] | None = None
        if self._json is not None:
            decoded = self._json.decode(values)
            if decoded is None:
                return None
            members, times_ms = decoded
        ids = self._ids(keys, values, headers, members)
        if ids is None:
            return None
        fingerprints = None
        if self._recipe.fingerprint:
            fingerprints = [self._fingerprint(value) for value in values if value is not None]
        return Extracted(list(ids), list(timestamps_ms) if times_ms is None else times_ms, fingerprints, {})

    def _ids(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers],
        members: list[list[str | int]],
    ) -> list[bytes] | None:
        match self._recipe.tracking_id.rule:
            case KeyRule():
                return self._bytes(keys)
            case HeaderRule(name):
                return self._bytes([_only(row, name) for row in headers])
            case FieldRule():
                return self._scalars(members[0])
            case FieldsRule():
                return composite_keys(members, self._memos)
            case RawContentRule():
                return bytes_keys([value for value in values if value is not None])
            case ContentRule(exclude):
                with suppress(Unreadable):
                    return [state_key(CONTENT + content_of(value, exclude)) for value in values if value is not None]
                return None
            case never:
                assert_never(never)

    def _fingerprint(self, value: bytes) -> bytes:
        if self._recipe.fmt == "json":
            with suppress(Unreadable):
                return content_digest(content_of(value, self._recipe.fingerprint_exclude))
        return value_digest(value)

    def _bytes(self, column: Sequence[bytes | None]) -> list[bytes] | None:
        present = [value for value in column if value is not None]
        if len(present) < len(column):
            return None
        if self._smooth is not None:
            present = [smooth_bytes(value, self._smooth) for value in present]
        return bytes_keys(present)

    def _scalars(self, column: list[str | int]) -> list[bytes] | None:
        smooth = self._smooth
        if smooth is not None:
            column = [smooth(value) if isinstance(value, str) else value for value in column]
        return scalar_keys(column)


def _only(headers: Headers, name: str) -> bytes | None:
    """The value of a header that is there once; None otherwise."""
    values = [value for header, value in headers if header == name]
    return values[0] if len(values) == 1 else None


def _compile(recipe: Recipe) -> _Columns | None:
    """Return the fast way; None where only the slow one is right."""
    rule = recipe.tracking_id.rule
    if recipe.fmt == "bytes":
        return _Columns(recipe, None)
    match rule:
        case FieldRule(path):
            paths: tuple[Path, ...] = (path,)
        case FieldsRule(paths):
            pass
        case KeyRule() | HeaderRule() | ContentRule() | RawContentRule():
            paths = ()
        case never:
            assert_never(never)
    time = recipe.event_time if isinstance(recipe.event_time, FieldTime) else None
    json_columns = compile_columns(paths, time)
    return None if json_columns is None else _Columns(recipe, json_columns)
