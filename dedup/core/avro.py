"""Reads members of Avro values by path, from one value (`AvroReader.read`) or as columns from a batch of values.

A value is the binary encoding of one record with a known writer schema. `read` and `columns` return only the requested
members, but decode the whole value to check that it ends where its record ends. `AvroReader.columns` advances through
all values of a batch together, field by field. If any value might be damaged, `columns` raises NotInColumns. The caller
must then use `AvroReader.read` for the rows that the exception names, or for all rows if the exception names none.

Source: "Binary Encoding" and "Logical Types" of the Avro specification 1.12.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, repeat
from typing import Any, Final, assert_never, cast
from uuid import UUID

import numpy as np
import numpy.typing as npt

from dedup.core.avro_schema import MAX_DEPTH, UNITS, Items, Node, Record, Scalar, Union, nodes_at, parse_schema
from dedup.core.event_time import FieldTime, TimeUnit
from dedup.core.exact_json import ABSENT, Absent, Number, Unreadable, with_foreign_format
from dedup.core.framing import PREFIX_BYTES, SchemaText
from dedup.core.odd_rows import NotInColumns, among, refuse, texts_of
from dedup.core.tracking_id import Path
from dedup.core.varint import PADDING, Damaged, varint, varints

_MOST_DECIMAL_BYTES: Final = 1_024
_MORE: Final = 0x80
"""The bit that is set in a byte if another byte of the number follows."""
_ROWS_PER_STEP: Final = 16
"""After 64 free steps, `columns` gives up if its steps (unions or items) read fewer values than this on average."""

_TIMESTAMPS: Final[Mapping[str, tuple[TimeUnit | None, int]]] = {
    "timestamp-millis": ("ms", 1_000_000),
    "timestamp-micros": ("us", 1_000),
    "timestamp-nanos": (None, 1),
}
"""Maps each timestamp type to the name of its unit in topology files (or None) and the unit's length in nanoseconds."""
_NO_ID: Final = frozenset(
    {"null", "float", "double", "date", "time-millis", "time-micros", "duration", "big-decimal"}
    | {f"local-timestamp-{unit}" for unit in UNITS}
)


@dataclass(frozen=True, slots=True)
class Instant:
    """An instant, in nanoseconds since 1970-01-01T00:00:00Z."""

    nanoseconds: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands for a value whose type is not allowed at its path, for example a double at the path of an ID."""

    type_name: str
    raw: Any = field(default=None, compare=False)
    """The decoded value, if the reader has decoded it, for `dedup sink`, which allows more types than an ID does."""


Leaf = None | bool | int | str | bytes | Number | UUID | Instant | Refused | Absent
"""The value at a path. A decimal is represented as a `Number` with an exponent."""


def is_refused(node: Node, time: FieldTime | None) -> bool:
    """Return whether values of a type cannot be IDs or, if ``time`` is given, event times in the required unit."""
    if not isinstance(node, Scalar):
        return True
    if time is None:
        return node.name in _NO_ID
    if node.name in _TIMESTAMPS:
        return time.unit not in {"timestamp", _TIMESTAMPS[node.name][0]}
    numbers, texts = {"int", "long", "decimal"}, {"string"}
    return node.name not in {"timestamp": set(), "rfc3339": texts}.get(time.unit, numbers)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The members to read at one place in the schema."""

    slots: tuple[int, ...] = ()
    """The positions in the result for the paths that end at this place."""
    below: Mapping[str | int, _Wanted] = field(default_factory=dict)


NO_MEMBERS: Final = _Wanted()
"""Tells `AvroCursor.walk` to skip a value."""


def _wanted(paths: Iterable[tuple[int, Path]]) -> _Wanted:
    ends: list[int] = []
    below: dict[str | int, list[tuple[int, Path]]] = {}
    for slot, path in paths:
        if path:
            below.setdefault(path[0], []).append((slot, path[1:]))
        else:
            ends.append(slot)
    return _Wanted(tuple(ends), {step: _wanted(rest) for step, rest in below.items()})


class AvroReader:
    """Reads the members at given paths, and the event time, from values with one writer schema."""

    def __init__(self, schema: Record, ids: Sequence[Path], time: FieldTime | None) -> None:
        self._schema: Final = schema
        self.has_time: Final = time is not None
        self.count: Final = len(ids) + self.has_time
        self._time: Final = time
        paths = [*ids, *([time.path] if time is not None else [])]
        self._time_slot: Final = len(ids) if time is not None else -1
        self._want: Final = _wanted(enumerate(paths))
        self._without_ids: Final = _wanted([] if time is None else [(len(ids), time.path)])
        # A path through an array or a map leads to different positions in the values of a batch.
        self.columnar: Final = not any(_through_items(schema, path) for path in paths)

    def read(self, value: bytes) -> list[Leaf]:
        """Return the members at the paths, followed by the event time.

        Raises Unreadable unless the value is exactly one record.
        """
        found: list[Leaf] = [ABSENT] * self.count
        fault = self._fault(value, self._want, found)
        if fault is None:
            return found
        # If a value has several faults, all alternatives of an ID must report the same fault, so damage comes first and
        # the ID's own faults come last.
        fault = self._fault(value, NO_MEMBERS, found) or self._fault(value, self._without_ids, found) or fault
        if isinstance(fault, Damaged):
            fault = self._not_avro(value, f"the value is not a record of the schema: {fault}")
        try:
            raise fault
        finally:
            del fault  # otherwise, the exception and this frame would refer to each other

    def _fault(self, value: bytes, want: _Wanted, found: list[Leaf]) -> Damaged | Unreadable | None:
        """Store the requested parts of a value in ``found``, and return an error if the value cannot be read."""
        cursor = AvroCursor(self, value, found)
        try:
            cursor.walk(self._schema, want, 0)
        except (Damaged, Unreadable) as fault:
            return fault
        if cursor.at != len(value):
            return Damaged(f"it continues after its record ends (byte {cursor.at} of {len(value)})")
        return None

    def _not_avro(self, value: bytes, text: str) -> Unreadable:
        if value[:1] == b"{" and value[-1:] == b"}":
            return Unreadable("not_avro", f"{text}; it looks like JSON", format_name="json")
        # A zero byte begins either a framing or the first field of a damaged record.
        if value[:1] == b"\0" and self._fault(value[PREFIX_BYTES:], NO_MEMBERS, []) is not None:
            return Unreadable("not_avro", text)
        return with_foreign_format(value, "not_avro", text)

    def columns(self, values: Sequence[bytes]) -> list[list[Leaf]]:
        """Return a column for each path, with the event times last.

        Raises NotInColumns if any value must be passed to `read` instead.
        """
        batch = _Batch(self, values)
        try:
            batch.walk(self._schema, self._want, slice(None), 0)
        except Unreadable:
            raise NotInColumns from None
        refuse(batch.at != batch.ends)
        return batch.found

    def time_of(self, slot: int) -> FieldTime | None:
        """Return the event time rule if the slot holds the event time, or None if the slot holds a part of the ID."""
        return self._time if slot == self._time_slot else None


def _through_items(node: Node, path: Path) -> bool:
    return any(isinstance(each, Items) for at in range(len(path)) for each in nodes_at(node, path[:at]))


@lru_cache(maxsize=256)
def avro_reader(schema: SchemaText, ids: tuple[Path, ...], time: FieldTime | None) -> AvroReader:
    """Return the reader for values that a given schema describes. Raises SchemaRefused if the schema is not valid."""
    return AvroReader(parse_schema(schema), ids, time)


def leaf_of(node: Scalar, raw: Any, time: FieldTime | None) -> Leaf:  # noqa: ANN401 - int, bytes, or None
    """Convert a decoded value to an ID or, given ``time``, an event time. Raises Unreadable for malformed content."""
    if node.kind == "null":
        return None
    if is_refused(node, time):
        return Refused(node.name, raw)
    if node.logical in _TIMESTAMPS:
        nanoseconds = raw * _TIMESTAMPS[node.logical][1]
        if time is None:
            return Instant(nanoseconds)
        return int(nanoseconds // 1_000_000) if time.unit == "timestamp" else int(raw)
    match node.kind, node.logical:
        case "boolean", _:
            return bool(raw)
        case "enum", _:
            return node.symbols[int(raw)]
        case "string", _:
            return decode_text(raw)
        case _, "uuid":
            return UUID(bytes=raw)
        case _, "decimal":
            return decode_decimal(raw, node.scale)
        case _:
            return cast("bytes | int", raw)


def decode_text(raw: bytes) -> str:
    """Decode a string. Raises Unreadable if it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Unreadable("not_utf8", f"a string of the value is not UTF-8 (byte {error.start} of the string)") from None


def decode_decimal(raw: bytes, scale: int) -> Number:
    """Decode a decimal. Raises Unreadable if it has no bytes or too many."""
    if not 0 < len(raw) <= _MOST_DECIMAL_BYTES:
        text = f"a decimal of the value has {len(raw)} bytes, not 1 to {_MOST_DECIMAL_BYTES:,}"
        raise Unreadable("number_out_of_range", text)
    return Number(f"{int.from_bytes(raw, 'big', signed=True)}e-{scale}")


class AvroCursor:
    """A read position in one Avro value. Each method advances the position past the bytes that it reads."""

    def __init__(self, reader: AvroReader, value: bytes, found: list[Leaf]) -> None:
        self._reader: Final = reader
        self._value: Final = value
        self.found: Final = found
        self.at = 0

    def walk(self, node: Node, want: _Wanted, depth: int) -> None:
        """Read one value, and store the requested parts in `found`."""
        if depth > MAX_DEPTH:
            raise Unreadable("too_deep", f"the value is nested more than {MAX_DEPTH} levels deep")
        match node:
            case Scalar():
                raw = self.raw(node)
                for slot in want.slots:
                    self.found[slot] = leaf_of(node, raw, self._reader.time_of(slot))
            case Record():
                self._refuse(want, "record")
                for name, inner in node.fields.items():
                    if name not in node.void or name in want.below:
                        self.walk(inner, want.below.get(name, NO_MEMBERS), depth + 1)
            case Union(branches):
                self.walk(branches[self.branch(len(branches))], want, depth + 1)
            case Items(name=name):
                self._refuse(want, name)
                self._items(node, want, depth)
            case never:
                assert_never(never)

    def _refuse(self, want: _Wanted, name: str) -> None:
        for slot in want.slots:
            self.found[slot] = Refused(name)

    def _items(self, node: Items, want: _Wanted, depth: int) -> None:
        keys = {step.encode(): False for step in want.below if isinstance(step, str)}
        position = 0
        for count in self.blocks():
            for at in range(position, position + count):
                step: str | int = at if node.name == "array" else self._key(keys)
                self.walk(node.item, want.below.get(step, NO_MEMBERS), depth + 1)
            position += count

    def blocks(self) -> Iterator[int]:
        """Yield the number of items in each block of an array or a map. The caller must read these items each time."""
        while count := self.varint():
            due = None
            if count < 0:
                size, count = self.varint(), -count
                due = self.at + size
            if count > len(self._value) - self.at:  # each item takes at least one byte
                raise Damaged(f"it ends inside a block of {count} items (byte {self.at})")
            yield count
            if due is not None and due != self.at:
                raise Damaged(f"a block of items has another size than it says (byte {self.at})")

    def _key(self, keys: dict[bytes, bool]) -> str | int:
        """Read the key of a map entry. Return -1 if no path contains the key. ``keys`` tracks the keys already read."""
        key = self.part()
        if key not in keys:
            return -1
        if keys[key]:
            raise Unreadable("repeated_member", "a map repeats a key that is on a path of the ID or event time")
        keys[key] = True
        return key.decode()

    def raw(self, node: Scalar) -> int | bytes:
        """Read a value that contains no other values: the position of an enum's symbol, a number, or bytes."""
        match node.kind:
            case "int" | "long":
                return self.varint()
            case "enum":
                symbol = self.varint()
                if not 0 <= symbol < len(node.symbols):
                    raise Damaged(f"an enum has no symbol {symbol} (before byte {self.at})")
                return symbol
            case "boolean":
                byte = self.take(1)[0]
                if byte > 1:
                    raise Damaged(f"a boolean is neither 0 nor 1 (before byte {self.at})")
                return byte
            case "bytes" | "string":
                return self.part()
            case _:
                return self.take(node.width)

    def branch(self, count: int) -> int:
        """Read the position of a branch in a union of ``count`` branches."""
        branch = self.varint()
        if not 0 <= branch < count:
            raise Damaged(f"a union has no branch {branch} (before byte {self.at})")
        return branch

    def varint(self) -> int:
        """Read an int or a long."""
        raw = self._value[self.at] if self.at < len(self._value) else _MORE
        if raw < _MORE:  # most numbers have one byte
            self.at += 1
        else:
            raw, self.at = varint(self._value, self.at, len(self._value))
        return raw >> 1 ^ -(raw & 1)

    def part(self) -> bytes:
        """Read a string or bytes, which begin with their length."""
        return self.take(self.varint())

    def take(self, size: int) -> bytes:
        """Read a given number of bytes."""
        if size < 0:
            raise Damaged(f"a length is negative (before byte {self.at})")
        if size > len(self._value) - self.at:
            raise Damaged(f"it ends inside a field of {size} bytes (byte {self.at})")
        taken = self._value[self.at : self.at + size]
        self.at += size
        return taken


_Longs = npt.NDArray[np.int64]
_Rows = slice | _Longs
"""All rows of a batch, or the positions of some rows."""


class _Batch:
    """Read positions in a batch of Avro values. `walk` moves the positions in the given rows past one encoded value."""

    def __init__(self, reader: AvroReader, values: Sequence[bytes]) -> None:
        self._reader: Final = reader
        self._joined: Final = b"".join([*values, PADDING])
        self._text: Final = np.frombuffer(self._joined, np.uint8)
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        self.ends: Final = np.cumsum(lengths)
        self.at: Final = self.ends - lengths
        self.found: Final[list[list[Leaf]]] = [[ABSENT] * len(values) for _ in range(reader.count)]
        self._credit = 64 * _ROWS_PER_STEP

    def walk(self, node: Node, want: _Wanted, rows: _Rows, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise NotInColumns
        match node:
            case Scalar():
                self._scalar(node, want, rows)
            case Record():
                self._put(want, rows, lambda _: repeat(Refused("record")))
                for name, inner in node.fields.items():
                    if name not in node.void or name in want.below:
                        self.walk(inner, want.below.get(name, NO_MEMBERS), rows, depth + 1)
            case Union(branches):
                self._union(branches, want, rows, depth)
            case Items(name=name):
                self._put(want, rows, lambda _: repeat(Refused(name)))
                self._items(node, rows, depth)
            case never:
                assert_never(never)

    def _put(self, want: _Wanted, rows: _Rows, leaves: Callable[[FieldTime | None], Iterable[Leaf]]) -> None:
        for slot in want.slots:
            column, values = self.found[slot], leaves(self._reader.time_of(slot))
            if isinstance(rows, slice):
                column[:] = islice(values, len(column))
            else:
                for row, value in zip(rows.tolist(), values, strict=False):
                    column[row] = value

    def _union(self, branches: Sequence[Node], want: _Wanted, rows: _Rows, depth: int) -> None:
        chosen = self._varints(rows)
        self._pay(chosen)
        least, most = int(chosen.min()), int(chosen.max())
        with among(rows):
            refuse((chosen < 0) | (chosen >= len(branches)))
        if least == most:
            self.walk(branches[least], want, rows, depth + 1)
            return
        some = np.arange(len(self.at)) if isinstance(rows, slice) else rows
        for branch in np.unique(chosen).tolist():
            self.walk(branches[branch], want, some[chosen == branch], depth + 1)

    def _items(self, node: Items, rows: _Rows, depth: int) -> None:
        going = np.arange(len(self.at)) if isinstance(rows, slice) else rows
        while len(going):
            counts = self._varints(going)
            self._pay(counts)
            going, counts = going[counts != 0], counts[counts != 0]
            sized = going[counts < 0]
            due = self._varints(sized) + self.at[sized]
            counts = np.abs(counts)
            with among(going):
                refuse((counts < 0) | (counts > self.ends[going] - self.at[going]))
            self._block(node, going, counts, depth)
            with among(sized):
                refuse(due != self.at[sized])

    def _pay(self, values: _Longs) -> None:
        self._credit += len(values) - _ROWS_PER_STEP
        if self._credit < 0:
            raise NotInColumns

    def _block(self, node: Items, rows: _Longs, counts: _Longs, depth: int) -> None:
        item = node.item
        array = node.name == "array" and depth < MAX_DEPTH
        if array and isinstance(item, Scalar) and item.width > 0 and item.kind != "boolean":
            self._advance(rows, counts * item.width)
            return
        while len(rows):
            self._pay(rows)
            if node.name == "map":
                self._advance(rows, self._varints(rows))
            self.walk(item, NO_MEMBERS, rows, depth + 1)
            counts = counts - 1
            rows, counts = rows[counts > 0], counts[counts > 0]

    def _scalar(self, node: Scalar, want: _Wanted, rows: _Rows) -> None:
        match node.kind:
            case "int" | "long" | "enum":
                numbers = self._varints(rows)
                if node.kind == "enum":
                    with among(rows):
                        refuse((numbers < 0) | (numbers >= len(node.symbols)))
                self._put(want, rows, lambda time: _number_leaves(node, numbers, time))
            case "boolean":
                flags = self._text[self.at[rows]]
                self._advance(rows, 1)
                with among(rows):
                    refuse(flags > 1)
                self._put(want, rows, lambda time: [leaf_of(node, flag, time) for flag in flags.tolist()])
            case _:
                lengths: _Longs | int = node.width if node.width >= 0 else self._varints(rows)
                starts = self.at[rows] + 0
                self._advance(rows, lengths)
                if want.slots:
                    ends = (starts + lengths).tolist()
                    parts = [self._joined[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
                    with among(rows):
                        self._put(want, rows, lambda time: _part_leaves(node, parts, time))

    def _varints(self, rows: _Rows) -> _Longs:
        with among(rows):
            raw, self.at[rows] = varints(self._text, self.at[rows], self.ends[rows])
        numbers: _Longs = (raw >> np.uint64(1)).astype(np.int64) ^ -(raw & np.uint64(1)).astype(np.int64)
        return numbers

    def _advance(self, rows: _Rows, lengths: _Longs | int) -> None:
        at = self.at[rows]
        with among(rows):
            refuse((lengths < 0) | (lengths > self.ends[rows] - at))
        self.at[rows] = at + lengths


def _number_leaves(node: Scalar, numbers: _Longs, time: FieldTime | None) -> list[Any]:
    if not is_refused(node, time):
        found: list[Any] = numbers.tolist()
        if node.kind != "enum" and not node.logical:
            return found
        if node.logical in _TIMESTAMPS and time is not None:
            per_ms = 1_000_000 // _TIMESTAMPS[node.logical][1]
            return found if time.unit != "timestamp" else list((numbers // per_ms).tolist())
    return [leaf_of(node, number, time) for number in numbers.tolist()]


def _part_leaves(node: Scalar, parts: list[bytes], time: FieldTime | None) -> list[Any]:
    if node.kind == "string" and not is_refused(node, time):
        return list(texts_of(parts))
    return [leaf_of(node, part, time) for part in parts]
