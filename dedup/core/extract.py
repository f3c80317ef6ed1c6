"""Extracts the tracking IDs, event times, and fingerprints of a batch as columns (the fast path).

A row takes the fast path only if `extract_one` (the slow path) would certainly give the same result. For all other rows
of a batch, the format's reader raises `NotInColumns`, and these rows take the slow path. If the reader cannot identify
these rows, each half of the batch is tried separately. A batch of at most four rows takes the slow path.

If all IDs in a column are strings, bytes, or 64-bit integers, their state keys are computed together in C.
"""

from __future__ import annotations

from binascii import Error as NotHexadecimal
from binascii import hexlify, unhexlify
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any, Final, NamedTuple, assert_never, cast

import numpy as np
import numpy.typing as npt

from dedup.core import tracking_id as encoding
from dedup.core.avro import Leaf
from dedup.core.event_time import EventTime, FieldTime, rfc3339_column_ms, typed_times_ms
from dedup.core.exact_json import Unreadable, content_of
from dedup.core.extract_one import (
    FOUND_BEFORE,
    NO_ALTERNATIVE,
    Fault,
    FaultKind,
    Headers,
    One,
    Recipe,
    call_function,
    content_digest,
    encode_scalar,
    extract_one,
    fault_of,
    id_of_returned,
    leads_on,
    may_identify,
    normalize_bytes,
    of_leaves,
    reader_for,
    typed_content,
    typed_fingerprint,
    value_digest,
)
from dedup.core.formats import MEMBERWISE, Format, Schema
from dedup.core.framing import SchemaBook, SchemaRef, payloads_of, refs_of, rows_by_ref
from dedup.core.json_columns import compile_columns
from dedup.core.key_members import KeyColumns
from dedup.core.odd_rows import NotInColumns, Pieces, at_rows, in_order, in_pieces, of_other_types, ordered
from dedup.core.tracking_id import (
    CONTENT,
    KEPT_BYTES,
    CodeRule,
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyFieldRule,
    KeyRule,
    Normalizing,
    PartsRule,
    RawContentRule,
    StateKey,
    TrackingId,
    alternatives_of,
    key_paths,
    member_paths,
    normalizer,
    state_key,
)

__all__ = ["Extract", "Extracted", "Extractor", "Fault", "FaultKind", "Recipe", "compile_extractor"]

_INT64_BITS: Final = 64
_BY_KEY: Final = TrackingId(KeyRule())
_SOME_KEY: Final = [b"1"]
_FEW: Final = 4
"""With at most this many rows, another attempt on the fast path is not worthwhile."""
_UUID_CHARS: Final = 36
_ROW: Final = _UUID_CHARS + 1
"""The length of a UUID and the line feed after it."""
_HYPHENS: Final = (8, 13, 18, 23)
_YEAR_1_MS: Final = -62_135_596_800_000
_REMEMBERED: Final = 1 << 16
"""The maximum number of parts of composite IDs that the cache holds for one column."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """The IDs, event times, and fingerprints of a batch, as columns with one entry per record."""

    ids: list[bytes | None]
    """State keys of at most 33 bytes, with None for each row in `faults`."""
    times_ms: list[int]
    """Event times, with 0 for each row in `faults`."""
    fingerprints: list[bytes] | None
    """The fingerprint of each row, which is empty for rows in `faults`, or None if fingerprints were not requested."""
    faults: dict[int, Fault]

    def as_alternative(self, index: int, lacking: Collection[int]) -> Extracted:
        """Return a copy with IDs encoded for alternative ``index``, and without the faults of rows in ``lacking``."""
        begin = encoding.encode_alternative(index, b"")
        keys = kept([begin + (key or b"") for key in self.ids]) if self.ids else []
        ids = [None if key is None else made for key, made in zip(self.ids, keys, strict=True)]
        return replace(self, ids=ids, faults={row: fault for row, fault in self.faults.items() if row not in lacking})


Extract = Callable[[Sequence[bytes | None], Sequence[bytes | None], Sequence[Headers], Sequence[int]], Extracted]
"""A function that extracts the values of a batch, as an `Extractor` does."""


def compile_extractor(
    tracking_id: TrackingId, event_time: EventTime, *, fmt: Format, fingerprint: bool, schema: Schema = ""
) -> Extractor:
    """Return the extractor for rules that read no member of the key. Raises the same errors as `extractor_for`."""
    return extractor_for(Recipe(tracking_id, event_time, fmt, fingerprint, schema=schema))


def extractor_for(recipe: Recipe) -> Extractor:
    """Return a topology's extractor. Raises ValueError if the topology's rules can never find an ID or a time."""
    rule, fmt = recipe.tracking_id.rule, recipe.fmt
    canonical = any(isinstance(each, ContentRule) for each in alternatives_of(rule))
    if fmt == "bytes" and (canonical or member_paths(rule)):
        raise ValueError("format bytes has no fields; use format json, or the key, a header or content: true as ID")
    if fmt == "bytes" and isinstance(recipe.event_time, FieldTime):
        raise ValueError("format bytes has no fields; use format json, or event_time: record")
    if rule in {FieldsRule(()), PartsRule(())}:
        raise ValueError("fields or parts is empty; name at least one")
    if key_paths(rule) and recipe.keys is None:
        raise ValueError("a member of the key is part of the ID; name the format of keys")
    return Extractor(recipe)


class _Batch(NamedTuple):
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Headers]
    timestamps_ms: Sequence[int]

    def only(self, rows: Sequence[int]) -> _Batch:
        return _Batch(
            at_rows(rows, self.keys),
            at_rows(rows, self.values),
            at_rows(rows, self.headers),
            at_rows(rows, self.timestamps_ms),
        )


class Extractor:
    """Extracts IDs, event times, and fingerprints from batches, with the same result as `extract_one` for every row."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe: Final = recipe
        rule = recipe.tracking_id.rule
        paths = member_paths(rule)
        time = recipe.event_time if isinstance(recipe.event_time, FieldTime) else None
        is_json = recipe.fmt in {"json", "json_schema"}
        self._json: Final = compile_columns(paths, time) if is_json else None
        inside, zeros = key_paths(rule), recipe.tracking_id.zeros
        self._inside: Final = KeyColumns(recipe.keys, inside, zeros=zeros) if recipe.keys and inside else None
        in_columns = self._json is not None if is_json else True
        self._columnar: Final = in_columns and (self._inside is None or self._inside.columnar)
        steps = recipe.tracking_id.normalize
        parts = rule.parts if isinstance(rule, PartsRule) else rule.paths if isinstance(rule, FieldsRule) else ()
        self._memos: Final = [PartMemo(steps) for _ in parts]
        alternatives = recipe.alternatives() if isinstance(rule, FirstOfRule) else []
        self._alternatives: Final = list(map(Extractor, alternatives))
        self._normalize: Final = normalizer(steps) if steps else None
        self._instants: Final = "instant" in steps
        if isinstance(rule, CodeRule):
            self._function: Final = rule.load()
            # Extracts everything except the ID. A placeholder that is passed as the key serves as the ID.
            self._without_id: Final = Extractor(replace(recipe, tracking_id=_BY_KEY))

    def __call__(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers],
        timestamps_ms: Sequence[int],
    ) -> Extracted:
        """Return the extracted values of a batch. The arguments are columns with one entry per record."""
        return self._extract(_Batch(keys, values, headers, timestamps_ms))

    @cached_property
    def again(self) -> Extractor:
        """The extractor for records from a repartition topic that have the header `EXTRACTED`."""
        return Extractor(replace(self.recipe, tracking_id=FOUND_BEFORE))

    def _extract(self, batch: _Batch) -> Extracted:
        if self._alternatives:
            return self._first_of(batch)
        if isinstance(self.recipe.tracking_id.rule, CodeRule):
            return self._by_function(batch, self.recipe.tracking_id.rule)
        count = len(batch.values)
        if count <= _FEW or not self._columnar:
            return self._one_by_one(batch)
        try:
            return self._in_columns(batch)
        except NotInColumns as refused:
            odd = refused.rows
        pieces = in_pieces(
            count,
            odd,
            lambda rows: self._in_columns(batch.only(rows)),
            lambda rows: self._one_by_one(batch.only(rows)),
            lambda rows: self._halved(batch.only(rows)),
        )
        return self._merged(count, pieces)

    def _by_function(self, batch: _Batch, rule: CodeRule) -> Extracted:
        """Call the user's function once for each record whose value has the expected format."""
        found = self._without_id(_SOME_KEY * len(batch.values), *batch[1:])
        faults = found.faults
        rows = [
            row for row in range(len(found.ids)) if row not in faults or faults[row].kind is not FaultKind.UNREADABLE
        ]
        asked = batch.only(rows)
        returned = list(map(partial(call_function, self._function, rule.name), asked.keys, asked.values, asked.headers))
        ids: Sequence[bytes | Fault] | None = self._in_column(returned)
        if ids is None:
            ids = [id_of_returned(each, self.recipe.tracking_id, rule) for each in returned]
        for row, one in zip(rows, ids, strict=True):
            if isinstance(one, Fault):
                faults[row], found.ids[row], found.times_ms[row] = one, None, 0
                if found.fingerprints is not None:
                    found.fingerprints[row] = b""
            elif row not in faults:
                found.ids[row] = one
        return found

    def _in_column(self, returned: list[Any]) -> list[bytes] | None:
        """Return the state keys of IDs from a user's function, or None if the IDs must be converted one by one."""
        kind = type(returned[0]) if returned else None
        if any(type(each) is not kind for each in returned):
            return None
        if kind is StateKey:
            return list(map(bytes, returned))
        if kind is bytes:
            return self._bytes(returned)
        if kind is not str and (kind is not int or any(each.bit_length() >= _INT64_BITS for each in returned)):
            return None
        try:
            return self._scalars(returned)
        except UnicodeEncodeError:
            return None

    def _first_of(self, batch: _Batch) -> Extracted:
        """Try each alternative only on the rows for which all earlier alternatives found no value."""
        left: Sequence[int] = range(len(batch.values))
        pieces: list[tuple[Sequence[int], Extracted]] = []
        first_tombstones: dict[int, Fault] = {}
        for index, alternative in enumerate(self._alternatives):
            part = batch.only(left)
            # The last alternative gets all remaining rows, and therefore detects values without the expected format.
            last = alternative is self._alternatives[-1]
            places, found = (range(len(left)), alternative(*part)) if last else alternative.of_likely(part)
            rows = [left[at] for at in places]
            lacking = {at: fault for at, fault in found.faults.items() if leads_on(fault)}
            tombstones = {rows[at]: fault for at, fault in lacking.items() if fault.kind is FaultKind.TOMBSTONE}
            first_tombstones = tombstones | first_tombstones
            pieces.append((rows, found.as_alternative(index, lacking)))
            done = set(rows).difference(rows[at] for at in lacking)
            if len(done) == len(batch.values):
                return pieces[-1][1]
            left = [row for row in left if row not in done]
        merged = self._merged(len(batch.values), pieces)
        return replace(merged, faults=merged.faults | {row: first_tombstones.get(row, NO_ALTERNATIVE) for row in left})

    def _one_by_one(self, batch: _Batch) -> Extracted:
        return self._gathered([extract_one(self.recipe, *record) for record in zip(*batch, strict=True)])

    def _gathered(self, found: Sequence[One | Fault]) -> Extracted:
        return Extracted(
            [one.id if isinstance(one, One) else None for one in found],
            [one.time_ms if isinstance(one, One) else 0 for one in found],
            [one.fingerprint if isinstance(one, One) else b"" for one in found] if self.recipe.fingerprint else None,
            {row: fault for row, fault in enumerate(found) if isinstance(fault, Fault)},
        )

    def _halved(self, batch: _Batch) -> Extracted:
        """Extract each half by itself, halving again if needed, so that an unusual record slows down few other rows."""
        count = len(batch.values)
        halves = (range(count // 2), range(count // 2, count))
        return self._merged(count, [(rows, self._extract(batch.only(rows))) for rows in halves])

    def _merged(self, count: int, pieces: Pieces[Extracted]) -> Extracted:
        """Merge the results of several pieces into one batch. A row that no piece contains has no ID."""
        if len(pieces) == 1 and len(pieces[0][0]) == count:
            return pieces[0][1]
        places = in_order(count, pieces)
        faults: dict[int, Fault] = {}
        for rows, part in pieces:
            for at, fault in part.faults.items():
                faults[rows[at]] = fault
        fingerprints = None
        if self.recipe.fingerprint:
            fingerprints = ordered(places, (part.fingerprints or [] for _, part in pieces), b"")
        return Extracted(
            ordered(places, (part.ids for _, part in pieces), None),
            ordered(places, (part.times_ms for _, part in pieces), 0),
            fingerprints,
            faults,
        )

    def of_likely(self, batch: _Batch) -> tuple[Sequence[int], Extracted]:
        """Return the rows that might have an ID (all rows if the fast path succeeds), and their extracted values."""
        if self._columnar and batch.values:
            with suppress(NotInColumns):
                return range(len(batch.values)), self._in_columns(batch)
        sources = zip(batch.keys, batch.values, batch.headers, strict=True)
        rows = [row for row, source in enumerate(sources) if may_identify(self.recipe, *source)]
        return rows, self(*batch.only(rows))

    def _in_columns(self, batch: _Batch) -> Extracted:
        """Return the results for a batch. Raises NotInColumns if any row requires `extract_one`."""
        values = _present(batch.values)
        if self.recipe.fmt in MEMBERWISE:
            return self._typed(batch, values)
        if self.recipe.fmt == "json_schema":
            values = _present(payloads_of(self.recipe.schema_id, values, batch.headers))
        members: list[list[str | int]] = []
        times_ms: list[int] | None = None
        if self._json is not None:
            members, times_ms = self._json.decode(values)
        ids = self._ids(batch, values, members)
        if ids is None:
            raise NotInColumns(sorted(self._lacking(batch, members)))
        fingerprints = list(map(self._fingerprint, values)) if self.recipe.fingerprint else None
        return Extracted(list(ids), list(batch.timestamps_ms) if times_ms is None else times_ms, fingerprints, {})

    def _typed(self, batch: _Batch, values: Sequence[bytes]) -> Extracted:
        """Return the results for a format in `MEMBERWISE`, with a separate reader for each schema."""
        refs: set[SchemaRef | None] = {b""}
        if isinstance(self.recipe.schema, SchemaBook):
            place, indexed = self.recipe.schema_id, self.recipe.indexed
            column = refs_of(place, values, batch.headers, indexed=indexed)
            values = _present(payloads_of(place, values, batch.headers, indexed=indexed))
            refs = set(column)
        if len(refs) > 1:
            parts = rows_by_ref(column)
            return self._merged(len(values), [(rows, self._extract(batch.only(rows))) for rows in parts])
        try:
            reader = reader_for(self.recipe, refs.pop() or b"")
        except Unreadable as refused:  # parsing a schema again for each row would be slow
            return self._gathered([fault_of(refused)] * len(values))
        if not reader.columnar:
            return self._one_by_one(batch)
        return self._of_columns(batch, values, reader.columns(values))

    def _of_columns(self, batch: _Batch, values: Sequence[bytes], columns: list[list[Leaf]]) -> Extracted:
        """Return the results for values whose members have been read. Only unusual rows are converted one by one."""

        def only(rows: Sequence[int]) -> list[Sequence[Leaf]]:
            return [at_rows(rows, column) for column in columns]

        def usual(rows: Sequence[int]) -> Extracted:
            return self._of_usual(batch.only(rows), at_rows(rows, values), only(rows))

        def each(rows: Sequence[int]) -> Extracted:
            leaves = list(zip(*only(rows), strict=True)) or [()] * len(rows)
            records = zip(*batch.only(rows), leaves, strict=True)
            return self._gathered([of_leaves(self.recipe, *record) for record in records])  # type: ignore[arg-type]

        try:
            return self._of_usual(batch, values, columns)
        except NotInColumns as refused:
            odd = refused.rows
        return self._merged(len(values), in_pieces(len(values), odd, usual, each, each))

    def _lacking(self, batch: _Batch, columns: Sequence[Sequence[Any]]) -> set[int]:
        """Return the rows in which a part of the ID is missing or empty."""
        odd = {row for column in columns if "" in column for row, leaf in enumerate(column) if leaf == ""}
        rule = self.recipe.tracking_id.rule
        for column in self._key_members(batch):
            odd.update(row for row, leaf in enumerate(column) if leaf == "")
        rules = [part.rule for part in rule.parts] if isinstance(rule, PartsRule) else [rule]
        for each in rules:
            if isinstance(each, KeyRule | HeaderRule):
                odd.update(row for row, value in enumerate(_column(each, batch, iter(()), iter(()))) if not value)
        return odd

    def _key_members(self, batch: _Batch) -> list[list[str | int]]:
        """Return the columns of the key's members, if any. Raises NotInColumns for rows that need `extract_one`."""
        return [] if self._inside is None else self._inside(batch.keys, batch.headers)

    def _of_usual(self, batch: _Batch, values: Sequence[bytes], columns: list[Any]) -> Extracted:
        """Return the results for values whose members were read. Raises NotInColumns for rows that need `of_leaves`."""
        time, times_ms = self.recipe.event_time, list(batch.timestamps_ms)
        odd: set[int] = set()
        if isinstance(time, FieldTime):
            *columns, last = columns
            odd = of_other_types(last, {str} if time.unit == "rfc3339" else {int})
            times_ms = [] if odd else typed_times_ms(last, time.unit)
        odd.update(*(of_other_types(column, {str, int}) for column in columns))
        ids = None if odd else self._ids(batch, values, columns)
        if ids is None:
            raise NotInColumns(sorted(odd | self._lacking(batch, columns)))
        return Extracted(list(ids), times_ms, self._typed_fingerprints(batch, values), {})

    def _typed_fingerprints(self, batch: _Batch, payloads: Sequence[bytes]) -> list[bytes] | None:
        if not self.recipe.fingerprint:
            return None
        if self.recipe.compared is None:
            return list(map(value_digest, payloads))
        return list(map(partial(typed_fingerprint, self.recipe), _present(batch.values), batch.headers))

    def _ids(self, batch: _Batch, payloads: Sequence[bytes], members: list[Any]) -> list[bytes] | None:
        """Return the state keys, or None if any row lacks a part of the ID."""
        match self.recipe.tracking_id.rule:
            case KeyRule():
                return self._bytes(batch.keys)
            case KeyFieldRule():
                (column,) = self._key_members(batch)
                return self._scalars(column)
            case HeaderRule(name):
                return self._bytes([_only(row, name) for row in batch.headers])
            case FieldRule():
                (column,) = members
                return self._scalars(column)
            case FieldsRule():
                return kept_if(composite_ids(members, self._memos))
            case PartsRule(parts):
                left, inside = iter(members), iter(self._key_members(batch))
                columns = [_column(part.rule, batch, left, inside) for part in parts]
                ids = None if any(None in column for column in columns) else composite_ids(columns, self._memos)
                return kept_if(ids)
            case RawContentRule():
                return bytes_keys(_present(batch.values))
            case ContentRule() as rule:
                contents = self._contents(rule, batch, payloads)
                return [state_key(CONTENT + content) for content in _present(contents)]
            case CodeRule() | FirstOfRule():  # `_by_function`; each alternative has its own extractor
                return None
            case never:
                assert_never(never)

    def _contents(self, rule: ContentRule, batch: _Batch, payloads: Sequence[bytes]) -> list[bytes | None]:
        """Return the canonical content of each value, or None for a value that has no canonical content."""
        if self.recipe.fmt not in MEMBERWISE:
            return [_content(partial(content_of, each, rule.exclude)) for each in payloads]
        rows = zip(_present(batch.values), batch.headers, strict=True)
        return [_content(partial(typed_content, self.recipe, rule, *row)) for row in rows]

    def _scalars(self, column: list[str | int]) -> list[bytes] | None:
        normalize = self._normalize
        if normalize is not None:
            column = [normalize(value) if isinstance(value, str) else value for value in column]
        return kept_if(instant_ids(column)) if self._instants else scalar_keys(column)

    def _fingerprint(self, payload: bytes) -> bytes:
        if self.recipe.fmt != "bytes":
            with suppress(Unreadable):
                return content_digest(content_of(payload, self.recipe.compared_without))
        return value_digest(payload)

    def _bytes(self, column: Sequence[bytes | None]) -> list[bytes] | None:
        if not all(column):  # a value is missing or empty
            return None
        present: Sequence[bytes] = cast("Sequence[bytes]", column)
        if self._normalize is not None:
            present = [normalize_bytes(value, self._normalize) for value in present]
        return kept_if(instant_ids(present)) if self._instants else bytes_keys(present)


def _present(values: Sequence[bytes | None]) -> Sequence[bytes]:
    """Return the values if none of them is null. Raises NotInColumns with the rows that have null values."""
    if not all(values) and None in values:  # `all` is faster, but also finds empty values
        raise NotInColumns([row for row, value in enumerate(values) if value is None])
    return cast("Sequence[bytes]", values)


def _content(read: Callable[[], bytes]) -> bytes | None:
    try:
        return read()
    except Unreadable:
        return None


def _column(
    rule: KeyRule | KeyFieldRule | HeaderRule | FieldRule,
    batch: _Batch,
    members: Iterator[list[str | int]],
    inside: Iterator[list[str | int]],
) -> Sequence[Any]:
    match rule:
        case KeyRule():
            return batch.keys
        case KeyFieldRule():
            return next(inside)
        case HeaderRule(name):
            return [_only(row, name) for row in batch.headers]
        case FieldRule():
            return next(members)
        case never:
            assert_never(never)


def _only(headers: Headers, name: str) -> bytes | None:
    values = [value for header, value in headers if header == name]
    return values[0] if len(values) == 1 else None


class PartMemo(dict[str | int | bytes, bytes]):
    """Caches the length-prefixed canonical bytes of the values of one part of a composite ID.

    Only strings, integers, and bytes may be looked up, because a dict treats True and 1.0 as the key 1. Looking up an
    empty string or empty bytes raises _EmptyPart.
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
    """Return whether all texts are times in one layout that already match the canonical bytes of an instant."""
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
    """Return the state keys of a column of canonical bytes, or None without a column."""
    return None if canonical is None else kept(canonical)


def kept(canonical: Iterable[bytes]) -> list[bytes]:
    """Return the state keys of a nonempty column of canonical bytes."""
    keys = canonical if isinstance(canonical, list) else list(canonical)
    if max(map(len, keys)) <= KEPT_BYTES:
        return keys
    return list(map(state_key, keys))


def _uuid_keys(lines: bytes, count: int) -> list[bytes] | None:
    """Return the state keys of lines that each contain one canonical UUID, or None if any line has another form."""
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
