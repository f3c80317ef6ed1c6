"""Extracts the tracking IDs, event times, and fingerprints of a batch as columns (the fast path).

The fast path is used only if `extract_one` (the slow path) would certainly give the same result. If a check fails, the
batch is split in half, and a batch of at most four rows takes the slow path. The checks for JSON fields are:

* One msgspec call decodes all values, joined by line feeds. Every value must begin with ``{`` and end with ``}``.
  The sequence ``}`` LF ``{`` can occur only between two values, so if the decoder returns as many structs as there are
  rows, each struct belongs to exactly one row.
* msgspec accepts invalid UTF-8 in members that it skips, so the joined bytes must be valid UTF-8.
* msgspec keeps the last of several members with the same name, so each name on a path may occur only once per row.
  A value takes the slow path if its escape sequences could spell a member name.
* A value that is long enough to be nested too deeply may have at most `MAX_DEPTH` opening brackets.
* An ID must be a string or a 64-bit integer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple, assert_never

import msgspec
import numpy as np
import numpy.typing as npt

from dedup.core import tracking_id as encoding
from dedup.core.avro import Leaf
from dedup.core.event_time import MAX_MS, MIN_MS, EventTime, FieldTime, TimeUnit, times_ms_of, typed_times_ms
from dedup.core.exact_json import DECODE_REFUSALS, SHORT_BYTES, Unreadable, content_of, may_be_deep
from dedup.core.extract_one import (
    FOUND_BEFORE,
    MEMBERWISE,
    NO_ALTERNATIVE,
    Fault,
    FaultKind,
    Format,
    Headers,
    One,
    Recipe,
    Schema,
    call_function,
    content_digest,
    extract_one,
    fault_of,
    id_of_returned,
    leads_on,
    may_identify,
    normalize_bytes,
    of_leaves,
    reader_for,
    value_digest,
)
from dedup.core.framing import SchemaBook, SchemaIdPlace, SchemaRef, payloads_of, refs_of, rows_by_ref
from dedup.core.id_columns import PartMemo, bytes_keys, composite_ids, instant_ids, kept, kept_if, scalar_keys
from dedup.core.tracking_id import (
    CONTENT,
    CodeRule,
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyRule,
    PartsRule,
    Path,
    RawContentRule,
    StateKey,
    TrackingId,
    alternatives_of,
    member_paths,
    normalizer,
    state_key,
)

__all__ = ["Extracted", "Extractor", "Fault", "FaultKind", "Recipe", "compile_extractor"]

_INT64_BITS: Final = 64
_BY_KEY: Final = TrackingId(KeyRule())
_SOME_KEY: Final = [b"1"]
_WORD_BYTES: Final = 4
_MARGIN_BYTES: Final = 2
"""The minimum number of bytes that follow a member name, which are a colon and a closing brace."""

_Int64 = Annotated[int, msgspec.Meta(ge=MIN_MS, le=MAX_MS)]
_Seconds = Annotated[int, msgspec.Meta(ge=-(MAX_MS // 1000), le=MAX_MS // 1000)]
_Id = str | _Int64
_TIME_TYPES: Final[dict[TimeUnit, tuple[Any, ...]]] = {
    "ms": (_Int64,),
    "us": (_Int64,),
    "s": (_Seconds, msgspec.Raw),
    "rfc3339": (str,),
    "timestamp": (),
}
"""Maps each unit to the types that the decoder tries for a time. For seconds, it tries whole numbers first."""


class _Name(NamedTuple):
    """The name of one JSON member on the path to an ID or an event time."""

    quoted: bytes
    """The name in quotes, as it appears in a value if none of its characters is escaped."""
    depths: tuple[int, ...]
    """The nesting depths at which the paths contain the name, with one entry per occurrence."""


def _occurs_at_most(joined: bytes, quoted: bytes, times: int) -> bool:
    # Comparing the first four bytes as one word, vectorized at each of four offsets, is twice as fast as bytes.count.
    # If other names begin with the same bytes, only bytes.count is exact.
    if len(quoted) >= _WORD_BYTES:
        word = np.frombuffer(quoted, "<u4", 1)
        found = 0
        for offset in range(_WORD_BYTES):
            words = np.frombuffer(joined, "<u4", (len(joined) - offset) // _WORD_BYTES, offset)
            found += int(np.count_nonzero(words == word))
        if found <= times:
            return True
    return joined.count(quoted) <= times


def _occur_in_places(joined: bytes, names: tuple[_Name, ...], count: int) -> bool:
    """Tell whether each member name occurs at most once per value at every depth where a path contains the name.

    The values must not contain backslashes, so that every quote begins or ends a string.
    """
    text = np.frombuffer(joined, np.uint8)
    quotes = text == ord('"')
    # The parity of the number of quotes so far becomes 1 at a string's opening quote, and 0 at its closing quote.
    inside = np.cumsum(quotes, dtype=np.uint8) & 1
    outside = inside == 0
    # Setting this bit turns `[` into `{` and `]` into `}`, so that both kinds of brackets count.
    folded = text | 0x20
    steps = ((folded == ord("{")) & outside).view(np.int8) - ((folded == ord("}")) & outside).view(np.int8)
    depths = np.cumsum(steps, dtype=np.int32)
    openings = np.flatnonzero(quotes & (inside == 1))
    at_depth = depths[openings]
    return all(
        _members_at(text, openings[at_depth == depth], name.quoted) <= name.depths.count(depth) * count
        for name in names
        for depth in set(name.depths)
    )


def _members_at(text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], quoted: bytes) -> int:
    starts = starts[starts < len(text) - len(quoted) - _MARGIN_BYTES]
    for at, char in enumerate(quoted):
        starts = starts[text[starts + at] == char]
    behind = text[starts + len(quoted)]
    # A string directly before a comma or a closing bracket is a value. A string before white space counts as a name.
    is_value = (behind == ord(",")) | (behind == ord("}")) | (behind == ord("]"))
    return int(np.count_nonzero(~is_value))


@dataclass(frozen=True, slots=True)
class JsonColumns:
    """Decodes the members that contain IDs and event times from a whole batch of values at once."""

    decoders: tuple[msgspec.json.Decoder[Any], ...]
    ids: tuple[Callable[[Any], Any], ...]
    time: Callable[[Any], Any] | None
    unit: TimeUnit
    names: tuple[_Name, ...]
    escapes: tuple[bytes, ...]
    """Escape sequences that no value may contain, because a member name could be spelled with them."""

    def decode(self, values: Sequence[bytes | None]) -> tuple[list[list[str | int]], list[int] | None] | None:
        """Return a column for each ID path and the column of times, or None if any row requires `extract_one`."""
        joined = _joined(values)
        if joined is None:
            return None
        if not joined.isascii():
            try:
                joined.decode()
            except UnicodeDecodeError:
                return None
        # Searching for one byte is 50 times as fast as searching for a sequence of two bytes.
        if b"\\" in joined and any(escape in joined for escape in self.escapes):
            return None
        rows = self._rows(joined)
        count = len(values)
        if rows is None or len(rows) != count:
            return None
        # No member that contains an ID or a time may be repeated. Every row is known to have each of these members.
        once = all(_occurs_at_most(joined, name.quoted, len(name.depths) * count) for name in self.names)
        if not once and (b"\\" in joined or not _occur_in_places(joined, self.names, count)):
            return None
        columns = [list(map(member, rows)) for member in self.ids]
        if self.time is None:
            return columns, None
        times_ms = times_ms_of(list(map(self.time, rows)), self.unit)
        return None if times_ms is None else (columns, times_ms)

    def _rows(self, joined: bytes) -> list[Any] | None:
        for decoder in self.decoders:
            try:
                return decoder.decode_lines(joined)
            except DECODE_REFUSALS:
                continue
        return None


def compile_columns(ids: Sequence[Path], time: FieldTime | None) -> JsonColumns | None:
    r"""Return the decoder for the fields of the ID and the time, or None if only `extract_one` can read the fields.

    Only `extract_one` can read array elements, fields that contain one another, and member names that JSON can spell in
    several ways even without ``\u``.
    """
    paths = [*ids, time.path] if time is not None else list(ids)
    tree = _Node({}, None)
    for path in paths:
        if not tree.grow(path, is_time=time is not None and path == time.path):
            return None
    names = tree.names()
    if any(char in '"\\/' or char < " " for name in names for char in name):  # JSON has short escapes for these
        return None
    time_types: tuple[Any, ...] = (None,) if time is None else _TIME_TYPES[time.unit]
    if time is not None and time.path in ids:  # a part of an ID is a string or an integer
        time_types = time_types[:1]
    return JsonColumns(
        decoders=tuple(msgspec.json.Decoder(tree.struct(time_type)) for time_type in time_types),
        ids=tuple(attrgetter(tree.attribute(path)) for path in ids),
        time=None if time is None else attrgetter(tree.attribute(time.path)),
        unit="ms" if time is None else time.unit,
        names=tuple(_Name(f'"{name}"'.encode(), tuple(depths)) for name, depths in names.items()),
        # These are the beginnings of the escape sequences that could spell a character of these names.
        escapes=tuple(b"\\u00%d" % high for high in range(2, 8)) if "".join(names).isascii() else (b"\\u",),
    )


@dataclass(slots=True)
class _Node:
    members: dict[str, _Node]
    leaf: Literal["id", "time"] | None

    def grow(self, path: Path, *, is_time: bool) -> bool:
        here = self
        for step in path:
            if isinstance(step, int) or here.leaf is not None:
                return False
            here = here.members.setdefault(step, _Node({}, None))
        if here.members:
            return False
        here.leaf = "time" if is_time else "id"
        return True

    def names(self, depth: int = 1) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, node in self.members.items():
            found.setdefault(name, []).append(depth)
            for below, depths in node.names(depth + 1).items():
                found.setdefault(below, []).extend(depths)
        return found

    def struct(self, time_type: object) -> object:
        if self.leaf is not None:
            return time_type if self.leaf == "time" else _Id
        fields = [
            (f"m{at}", node.struct(time_type), msgspec.field(name=name))
            for at, (name, node) in enumerate(self.members.items())
        ]
        # Reference counting frees the rows before the next batch, so the garbage collector can ignore them.
        return msgspec.defstruct("Row", fields, gc=False)

    def attribute(self, path: Path) -> str:
        here, steps = self, []
        for step in path:
            steps.append(f"m{list(here.members).index(str(step))}")
            here = here.members[str(step)]
        return ".".join(steps)


def _joined(values: Sequence[bytes | None]) -> bytes | None:
    """Return the values joined by line feeds, or None if any value might not be an object or be nested too deeply."""
    try:
        joined = b"\n".join(values)  # type: ignore[arg-type]
    except TypeError:  # a null value
        return None
    lengths = np.fromiter(map(len, values), np.int64, len(values))  # type: ignore[arg-type]
    if lengths.min() == 0:
        return None
    ends = np.cumsum(lengths + 1) - 1
    text = np.frombuffer(joined, np.uint8)
    if not ((text[ends - lengths] == ord("{")).all() and (text[ends - 1] == ord("}")).all()):
        return None
    if lengths.max() > SHORT_BYTES and any(may_be_deep(value) for value in values if value is not None):
        return None
    return joined


_FEW: Final = 4
"""With at most this many rows, another attempt on the fast path is not worthwhile."""


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
        """Return the batch with IDs encoded for alternative ``index``, without the faults of the rows ``lacking``."""
        begin = encoding.encode_alternative(index, b"")
        keys = kept([begin + (key or b"") for key in self.ids]) if self.ids else []
        ids = [None if key is None else made for key, made in zip(self.ids, keys, strict=True)]
        return replace(self, ids=ids, faults={row: fault for row, fault in self.faults.items() if row not in lacking})


def compile_extractor(
    tracking_id: TrackingId,
    event_time: EventTime,
    *,
    fmt: Format,
    fingerprint: bool,
    fingerprint_exclude: tuple[Path, ...] = (),
    schema_id: SchemaIdPlace = "auto",
    schema: Schema = "",
) -> Extractor:
    """Return a topology's extractor. Raises ValueError if the topology's rules can never find an ID or a time."""
    canonical = any(isinstance(each, ContentRule) for each in alternatives_of(tracking_id.rule))
    if fmt in MEMBERWISE and (canonical or fingerprint_exclude):
        raise ValueError(f"format {fmt} has no canonical content; use fields, the key, a header or content: true as ID")
    if fmt == "bytes" and (canonical or member_paths(tracking_id.rule)):
        raise ValueError("format bytes has no fields; use format json, or the key, a header or content: true as ID")
    if fmt == "bytes" and isinstance(event_time, FieldTime):
        raise ValueError("format bytes has no fields; use format json, or event_time: record")
    if tracking_id.rule in {FieldsRule(()), PartsRule(())}:
        raise ValueError("fields or parts is empty; name at least one")
    return Extractor(Recipe(tracking_id, event_time, fmt, fingerprint, fingerprint_exclude, schema_id, schema))


class _Batch(NamedTuple):
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Headers]
    timestamps_ms: Sequence[int]

    def only(self, rows: Sequence[int]) -> _Batch:
        return _Batch(
            [self.keys[row] for row in rows],
            [self.values[row] for row in rows],
            [self.headers[row] for row in rows],
            [self.timestamps_ms[row] for row in rows],
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
        self._columnar: Final = self._json is not None if is_json else True
        steps = recipe.tracking_id.normalize
        parts = rule.parts if isinstance(rule, PartsRule) else rule.paths if isinstance(rule, FieldsRule) else ()
        self._memos: Final = [PartMemo(steps) for _ in parts]
        alternatives = recipe.alternatives() if isinstance(rule, FirstOfRule) else []
        self._alternatives: Final = list(map(Extractor, alternatives))
        self._normalize: Final = normalizer(steps) if steps else None
        self._instants: Final = "instant" in steps
        if isinstance(rule, CodeRule):
            self._function: Final = rule.load()
            # Reads everything but the ID, which is whatever stands in place of the key.
            self._without_id: Final = Extractor(replace(recipe, tracking_id=_BY_KEY))

    def __call__(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        headers: Sequence[Headers],
        timestamps_ms: Sequence[int],
    ) -> Extracted:
        """Return the extracted values of a batch, which is given as four columns of the same length."""
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
        if len(batch.values) <= _FEW or not self._columnar:
            return self._one_by_one(batch)
        found = self._in_columns(batch)
        if found is not None:
            return found
        if None in batch.values:
            return self._nulls_apart(batch)
        return self._halved(batch)

    def _by_function(self, batch: _Batch, rule: CodeRule) -> Extracted:
        """Call the user's function once for each record whose value has the expected format."""
        found = self._without_id(_SOME_KEY * len(batch.values), *batch[1:])
        faults = found.faults
        rows = [
            row for row in range(len(found.ids)) if row not in faults or faults[row].kind is not FaultKind.UNREADABLE
        ]
        asked = batch if len(rows) == len(found.ids) else batch.only(rows)
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
        """Return the state keys of what a function returned, or None if the values do not all have one usual type."""
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
        """Apply each alternative to the rows for which all earlier alternatives have found no value."""
        left: Sequence[int] = range(len(batch.values))
        pieces: list[tuple[Sequence[int], Extracted]] = []
        first_tombstones: dict[int, Fault] = {}
        for index, alternative in enumerate(self._alternatives):
            part = batch if len(left) == len(batch.values) else batch.only(left)
            # The last alternative gets all remaining rows, and so detects values that do not have the expected format.
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
        """Extract each half of the batch separately, so that one unusual record slows down only a few rows."""
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
        null: tuple[list[int], list[int]] = ([], [])
        for row, value in enumerate(batch.values):
            null[value is None].append(row)
        return self._apart(batch, null)

    def _apart(self, batch: _Batch, parts: Sequence[Sequence[int]]) -> Extracted:
        """Extract each of the given groups of rows separately."""
        # In each part, either all values are null or none is.
        takes = [self._one_by_one if rows and batch.values[rows[0]] is None else self._extract for rows in parts]
        return self._merged(
            len(batch.values), [(rows, take(batch.only(rows))) for take, rows in zip(takes, parts, strict=True)]
        )

    def _merged(self, count: int, pieces: Iterable[tuple[Sequence[int], Extracted]]) -> Extracted:
        """Return one batch of rows that were extracted in pieces. If pieces overlap, the last piece counts."""
        ids: list[bytes | None] = [None] * count
        times_ms = [0] * count
        fingerprints = [b""] * count
        faults: dict[int, Fault] = {}
        for rows, part in pieces:
            for at, row in enumerate(rows):
                ids[row] = part.ids[at]
                times_ms[row] = part.times_ms[at]
                if part.fingerprints is not None:
                    fingerprints[row] = part.fingerprints[at]
            faults |= {rows[at]: fault for at, fault in part.faults.items()}
        return Extracted(ids, times_ms, fingerprints if self.recipe.fingerprint else None, faults)

    def of_likely(self, batch: _Batch) -> tuple[Sequence[int], Extracted]:
        """Return the rows that may have an ID (all rows if the fast path succeeds), and their extracted values."""
        found = self._in_columns(batch) if self._columnar and batch.values else None
        if found is not None:
            return range(len(batch.values)), found
        sources = zip(batch.keys, batch.values, batch.headers, strict=True)
        rows = [row for row, source in enumerate(sources) if may_identify(self.recipe, *source)]
        return rows, self(*batch.only(rows))

    def _in_columns(self, batch: _Batch) -> Extracted | None:
        if self._json is None and None in batch.values:
            return None
        if self.recipe.fmt in MEMBERWISE:
            return self._typed(batch)
        members: list[list[str | int]] = []
        times_ms: list[int] | None = None
        payloads: Sequence[bytes | None] | None = batch.values
        if self.recipe.fmt == "json_schema":
            payloads = payloads_of(self.recipe.schema_id, batch.values, batch.headers)
        if payloads is None:
            return None
        if self._json is not None:
            decoded = self._json.decode(payloads)
            if decoded is None:
                return None
            members, times_ms = decoded
        ids = self._ids(batch, payloads, members)
        if ids is None:
            return None
        fingerprints = None
        if self.recipe.fingerprint:
            fingerprints = [self._fingerprint(payload) for payload in payloads if payload is not None]
        return Extracted(list(ids), list(batch.timestamps_ms) if times_ms is None else times_ms, fingerprints, {})

    def _typed(self, batch: _Batch) -> Extracted | None:
        """Extract the values of each schema separately."""
        values: Sequence[bytes | None] | None = batch.values
        refs: set[SchemaRef | None] = {b""}
        if isinstance(self.recipe.schema, SchemaBook):
            place, indexed = self.recipe.schema_id, self.recipe.indexed
            values = payloads_of(place, batch.values, batch.headers, indexed=indexed)
            column = refs_of(place, batch.values, batch.headers, indexed=indexed)
            refs = set(column)
        if values is None or None in refs:
            return None
        if len(refs) > 1:
            return self._apart(batch, rows_by_ref(column))
        try:
            reader = reader_for(self.recipe, refs.pop() or b"")
        except Unreadable as refused:  # parsing a schema again for each row would be slow
            return self._gathered([fault_of(refused)] * len(batch.values))
        if not reader.columnar:
            return self._one_by_one(batch)
        present = [value for value in values if value is not None]
        columns = reader.columns(present)
        return None if columns is None else self._of_columns(batch, present, columns)

    def _of_columns(self, batch: _Batch, values: list[bytes], columns: list[list[Leaf]]) -> Extracted:
        """Return the results for values whose members have been read, so that an odd row slows down few others."""
        count = len(values)
        found = self._of_usual(batch, values, columns) if count > _FEW else None
        if found is not None:
            return found
        odd = self._odd_rows(batch, columns)
        if count <= _FEW or len(odd) == count:
            leaves = list(zip(*columns, strict=True)) or [()] * count
            rows = zip(*batch, leaves, strict=True)
            return self._gathered([of_leaves(self.recipe, *row) for row in rows])  # type: ignore[arg-type]
        half = count // 2
        parts: list[Sequence[int]] = [range(half), range(half, count)]
        if odd:
            parts = [[row for row in range(count) if row not in odd], sorted(odd)]
        pieces: list[tuple[Sequence[int], Extracted]] = []
        for part in parts:
            own = [[column[row] for row in part] for column in columns]
            pieces.append((part, self._of_columns(batch.only(part), [values[row] for row in part], own)))
        return self._merged(count, pieces)

    def _odd_rows(self, batch: _Batch, columns: list[list[Leaf]]) -> set[int]:
        """Return the rows that certainly require `of_leaves`, because a part is missing or has an unusual type."""
        kinds: list[tuple[type, ...]] = [(str, int)] * len(columns)
        if isinstance(self.recipe.event_time, FieldTime):
            kinds[-1] = (str,) if self.recipe.event_time.unit == "rfc3339" else (int,)
        odd = {
            row
            for column, usual in zip(columns, kinds, strict=True)
            for row, leaf in enumerate(column)
            if type(leaf) not in usual or leaf == ""
        }
        rule = self.recipe.tracking_id.rule
        rules = [part.rule for part in rule.parts] if isinstance(rule, PartsRule) else [rule]
        for each in rules:
            if isinstance(each, KeyRule | HeaderRule):
                odd.update(row for row, value in enumerate(_column(each, batch, iter(()))) if not value)
        return odd

    def _of_usual(self, batch: _Batch, values: list[bytes], columns: list[list[Leaf]]) -> Extracted | None:
        """Return the results for values whose members have been read, or None if any row requires `of_leaves`."""
        time, times_ms = self.recipe.event_time, list(batch.timestamps_ms)
        members: list[Any] = columns
        if isinstance(time, FieldTime):
            typed = typed_times_ms(columns[-1], time.unit)
            if typed is None:
                return None
            members, times_ms = columns[:-1], typed
        usual = all(set(map(type, column)) <= {str, int} for column in members)
        ids = self._ids(batch, values, members) if usual else None
        if ids is None:
            return None
        fingerprints = list(map(value_digest, values)) if self.recipe.fingerprint else None
        return Extracted(list(ids), times_ms, fingerprints, {})

    def _ids(
        self, batch: _Batch, payloads: Sequence[bytes | None], members: list[list[str | int]]
    ) -> list[bytes] | None:
        match self.recipe.tracking_id.rule:
            case KeyRule():
                return self._bytes(batch.keys)
            case HeaderRule(name):
                return self._bytes([_only(row, name) for row in batch.headers])
            case FieldRule():
                (column,) = members
                return self._scalars(column)
            case FieldsRule():
                return kept_if(composite_ids(members, self._memos))
            case PartsRule(parts):
                left = iter(members)
                columns = [_column(part.rule, batch, left) for part in parts]
                ids = None if any(None in column for column in columns) else composite_ids(columns, self._memos)
                return kept_if(ids)
            case RawContentRule():
                return bytes_keys([value for value in batch.values if value is not None])
            case ContentRule(exclude):
                with suppress(Unreadable):
                    return [state_key(CONTENT + content_of(each, exclude)) for each in payloads if each is not None]
                return None
            case CodeRule() | FirstOfRule():  # `_by_function`; each alternative has its own extractor
                return None
            case never:
                assert_never(never)

    def _scalars(self, column: list[str | int]) -> list[bytes] | None:
        normalize = self._normalize
        if normalize is not None:
            column = [normalize(value) if isinstance(value, str) else value for value in column]
        return kept_if(instant_ids(column)) if self._instants else scalar_keys(column)

    def _fingerprint(self, payload: bytes) -> bytes:
        if self.recipe.fmt != "bytes":
            with suppress(Unreadable):
                return content_digest(content_of(payload, self.recipe.fingerprint_exclude))
        return value_digest(payload)

    def _bytes(self, column: Sequence[bytes | None]) -> list[bytes] | None:
        present = [value for value in column if value is not None]
        if len(present) < len(column):
            return None
        if self._normalize is not None:
            present = [normalize_bytes(value, self._normalize) for value in present]
        return kept_if(instant_ids(present)) if self._instants else bytes_keys(present)


def _column(rule: KeyRule | HeaderRule | FieldRule, batch: _Batch, members: Iterator[list[str | int]]) -> Sequence[Any]:
    match rule:
        case KeyRule():
            return batch.keys
        case HeaderRule(name):
            return [_only(row, name) for row in batch.headers]
        case FieldRule():
            return next(members)
        case never:
            assert_never(never)


def _only(headers: Headers, name: str) -> bytes | None:
    values = [value for header, value in headers if header == name]
    return values[0] if len(values) == 1 else None
