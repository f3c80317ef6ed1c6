"""Extracts the tracking IDs, event times, and fingerprints of a batch as columns, which is the fast path.

A batch is either processed as a whole in C or divided into halves, which are processed in the same way. `extract_one`
processes the rows that remain at the end, one by one. The fast path must therefore know when it certainly agrees with
this slow path:

* One call of msgspec decodes all values, joined by line feeds, into structs with only the named members. It cannot
  confuse rows. Every value begins with ``{`` and ends with ``}``. The sequence ``}`` LF ``{`` can occur neither in a
  string (a raw line feed is not JSON) nor inside a container (a comma is missing), so it always separates two values.
  If the decoder returns as many values as there are rows, there are no other boundaries.
* msgspec skips other members and accepts invalid UTF-8 in them, so the joined bytes are checked to be UTF-8.
* If a member is repeated, msgspec uses the last one, so each quoted name must occur exactly once per row and per place
  that the struct has for it. Every row has each name at least once, unless a name is spelled with an escape, and such
  rows are left to the slow path.
* A short value cannot be nested deeply. In a long value, the brackets are counted.
* Only strings and 64-bit integers are accepted. The decoder raises an error for any other value, such as a number with
  a fraction, true, null, or a missing member, and the row is left to the slow path, like every fault.

`content_of` also uses the fast path for canonical content if the result is certain to be exact. The decoder keeps
numbers with a fraction as written, and the encoder sorts members at every level. Only repeated members need a check,
because the decoder uses the last one. In a value without backslashes, every string and name has two quotes, so a
dropped member reduces the number of quotes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, assert_never

import msgspec

from dedup.core.event_time import EventTime, FieldTime
from dedup.core.exact_json import Excluded, Number, Unreadable, canonical_json, decode, excluded
from dedup.core.extract_one import (
    Fault,
    FaultKind,
    Format,
    Headers,
    One,
    Recipe,
    content_digest,
    extract_one,
    normalize_bytes,
    value_digest,
)
from dedup.core.json_columns import JsonColumns, compile_columns, may_be_deep
from dedup.core.json_path import Path
from dedup.core.state_keys import PartMemo, bytes_keys, composite_keys, scalar_keys
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
"""The number of rows up to which another attempt in columns is not worthwhile."""
_REFUSALS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, Unreadable)
"""Exceptions of the fast path, after which the slow path processes the rows."""


def content_of(value: bytes, exclude: tuple[Path, ...]) -> bytes:
    """Return `canonical_json` of a JSON value. Raises Unreadable in the same cases as `decode` and `canonical_json`."""
    without = excluded(exclude)
    quick = _quick(value, without)
    return canonical_json(decode(value), without) if quick is None else quick


def _quick(value: bytes, without: Excluded) -> bytes | None:
    if b"\\" in value or may_be_deep(value):
        return None
    try:
        content = _DECODER.decode(value)
        whole = _ENCODER.encode(content)
        if whole.count(b'"') != value.count(b'"'):
            return None
        if not without:
            return whole
        _leave_out(content, without)
        return _ENCODER.encode(content)
    except _REFUSALS:
        return None


def _leave_out(content: object, without: Excluded) -> None:
    """Remove the excluded members and elements from a decoded value. The recursion is only as deep as the paths."""
    if isinstance(content, dict):
        for name in [step for step in without if step in content]:
            _leave_out_at(content, name, without[name])
    elif isinstance(content, list):
        # Elements are removed from the end, so that earlier positions stay valid.
        places = [step for step in without if isinstance(step, int) and step < len(content)]
        for place in sorted(places, reverse=True):
            _leave_out_at(content, place, without[place])


def _leave_out_at(content: Any, step: str | int, below: Excluded | None) -> None:  # noqa: ANN401 - a dict or a list
    if below is None:
        del content[step]
    else:
        _leave_out(content[step], below)


def _as_written(text: str) -> msgspec.Raw:
    # Raw is encoded unchanged. (A Number is a dataclass and would be encoded as an object.)
    return msgspec.Raw(Number(text).decimal_text().encode())


_DECODER: Final = msgspec.json.Decoder(float_hook=_as_written)
_ENCODER: Final = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class Extracted:
    """The extracted columns of one batch, with one entry per record."""

    ids: list[bytes | None]
    """State keys of at most 33 bytes; None for rows in `faults`."""
    times_ms: list[int]
    """Event times; 0 for rows in `faults`."""
    fingerprints: list[bytes] | None
    """Fingerprints of eight bytes each, empty for rows in `faults`; None unless requested."""
    faults: dict[int, Fault]


def compile_extractor(
    tracking_id: TrackingId,
    event_time: EventTime,
    *,
    fmt: Format,
    fingerprint: bool,
    fingerprint_exclude: tuple[Path, ...] = (),
) -> Extractor:
    """Return the extractor of a topology. Raises ValueError if the extractor could never find an ID or a time."""
    return Extractor(Recipe(tracking_id, event_time, fmt, fingerprint, fingerprint_exclude))


class _Batch(NamedTuple):
    """A batch of records as columns."""

    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Headers]
    timestamps_ms: Sequence[int]

    def only(self, rows: Sequence[int]) -> _Batch:
        """Return a batch with only these rows."""
        return _Batch(
            [self.keys[row] for row in rows],
            [self.values[row] for row in rows],
            [self.headers[row] for row in rows],
            [self.timestamps_ms[row] for row in rows],
        )


class Extractor:
    """Extracts IDs, times, and fingerprints from batches, with the same result as `extract_one` for every row."""

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
        """Return the extracted columns of a batch. The four arguments are columns of the same length."""
        return self._extract(_Batch(keys, values, headers, timestamps_ms))

    def _extract(self, batch: _Batch) -> Extracted:
        if self._columns is None or len(batch.values) <= _FEW:
            return self._one_by_one(batch)
        found = self._columns.extract(batch)
        if found is not None:
            return found
        if None in batch.values:
            return self._nulls_apart(batch)
        return self._halved(batch)

    def _one_by_one(self, batch: _Batch) -> Extracted:
        ids: list[bytes | None] = []
        times_ms: list[int] = []
        fingerprints: list[bytes] = []
        faults: dict[int, Fault] = {}
        for row, record in enumerate(zip(*batch, strict=True)):
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

    def _halved(self, batch: _Batch) -> Extracted:
        """Extract each half, so that one unusual record slows down only a few rows."""
        keys, values, headers, times = batch
        half = len(values) // 2
        first = self(keys[:half], values[:half], headers[:half], times[:half])
        second = self(keys[half:], values[half:], headers[half:], times[half:])
        fingerprints = None
        if first.fingerprints is not None and second.fingerprints is not None:
            fingerprints = first.fingerprints + second.fingerprints
        faults = first.faults | {half + row: fault for row, fault in second.faults.items()}
        return Extracted(first.ids + second.ids, first.times_ms + second.times_ms, fingerprints, faults)

    def _nulls_apart(self, batch: _Batch) -> Extracted:
        """Extract rows with null values one by one, and all other rows as columns."""
        count = len(batch.values)
        ids: list[bytes | None] = [None] * count
        times_ms = [0] * count
        fingerprints = [b""] * count
        faults: dict[int, Fault] = {}
        null = [row for row in range(count) if batch.values[row] is None]
        there = [row for row in range(count) if batch.values[row] is not None]
        for rows, take in ((null, self._one_by_one), (there, self._extract)):
            part = take(batch.only(rows))
            for at, row in enumerate(rows):
                ids[row] = part.ids[at]
                times_ms[row] = part.times_ms[at]
                if part.fingerprints is not None:
                    fingerprints[row] = part.fingerprints[at]
            faults |= {rows[at]: fault for at, fault in part.faults.items()}
        return Extracted(ids, times_ms, fingerprints if self.recipe.fingerprint else None, faults)


class _Columns:
    """The fast path of one recipe, which processes either a whole batch or nothing."""

    def __init__(self, recipe: Recipe, json_columns: JsonColumns | None) -> None:
        self._recipe = recipe
        self._json = json_columns
        rule = recipe.tracking_id.rule
        parts = len(rule.paths) if isinstance(rule, FieldsRule) else 0
        self._memos = [PartMemo(recipe.tracking_id.normalize) for _ in range(parts)]
        self._normalize = normalizer(recipe.tracking_id.normalize)

    def extract(self, batch: _Batch) -> Extracted | None:
        """Return the columns if they certainly equal the results of `extract_one` for all rows, or None otherwise."""
        if self._recipe.fmt == "bytes" and None in batch.values:
            return None
        members: list[list[str | int]] = []
        times_ms: list[int] | None = None
        if self._json is not None:
            decoded = self._json.decode(batch.values)
            if decoded is None:
                return None
            members, times_ms = decoded
        ids = self._ids(batch, members)
        if ids is None:
            return None
        fingerprints = None
        if self._recipe.fingerprint:
            fingerprints = [self._fingerprint(value) for value in batch.values if value is not None]
        return Extracted(list(ids), list(batch.timestamps_ms) if times_ms is None else times_ms, fingerprints, {})

    def _ids(self, batch: _Batch, members: list[list[str | int]]) -> list[bytes] | None:
        values = (value for value in batch.values if value is not None)
        match self._recipe.tracking_id.rule:
            case KeyRule():
                return self._bytes(batch.keys)
            case HeaderRule(name):
                return self._bytes([_only(row, name) for row in batch.headers])
            case FieldRule():
                return self._scalars(members[0])
            case FieldsRule():
                return composite_keys(members, self._memos)
            case RawContentRule():
                return bytes_keys(list(values))
            case ContentRule(exclude):
                with suppress(Unreadable):
                    return [state_key(CONTENT + content_of(value, exclude)) for value in values]
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
        if self._normalize is not None:
            present = [normalize_bytes(value, self._normalize) for value in present]
        return bytes_keys(present)

    def _scalars(self, column: list[str | int]) -> list[bytes] | None:
        normalize = self._normalize
        if normalize is not None:
            column = [normalize(value) if isinstance(value, str) else value for value in column]
        return scalar_keys(column)


def _only(headers: Headers, name: str) -> bytes | None:
    """Return the value of a header that occurs exactly once; None otherwise."""
    values = [value for header, value in headers if header == name]
    return values[0] if len(values) == 1 else None


def _compile(recipe: Recipe) -> _Columns | None:
    """Return the fast path of a recipe; None if only the slow path can process the records."""
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
