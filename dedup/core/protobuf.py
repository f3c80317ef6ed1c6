"""Reads members of Protobuf values by path, from one value (`ProtobufReader.read`) or as columns from a batch.

`ProtobufCursor` reads the fields of one value, and protobuf_content.py uses it to read whole values.

A value is the encoding of one message of a known type. `read` and `columns` skip the fields that are not requested.
`ProtobufReader.columns` advances through all values of a batch together, tag by tag. If any value might be damaged,
`columns` raises NotInColumns. The caller must then use `ProtobufReader.read` for the rows that the exception names, or
for all rows if the exception names none. Source: "Encoding" and "Field Presence" of protobuf.dev.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from dedup.core.avro import Leaf, Refused
from dedup.core.event_time import FieldTime
from dedup.core.exact_json import ABSENT, Absent, Number, Unreadable, with_foreign_format
from dedup.core.framing import SchemaText
from dedup.core.odd_rows import NotInColumns, among, refuse, texts_of
from dedup.core.proto_schema import MAX_DEPTH, SCALARS, TIMESTAMP, Field, Message, message_at, parse_proto
from dedup.core.tracking_id import Path
from dedup.core.varint import PADDING, Damaged, varint, varints

_VARINT_BITS: Final = 64
VARINT, _FIXED64, SIZED, GROUP, END, FIXED32 = range(6)
"""The wire types."""
_WIDTHS: Final = {_FIXED64: 8, FIXED32: 4}
_MORE: Final = 0x80
"""The bit that is set in a byte if another byte of the number follows."""
_MOST_TAG: Final = (1 << 32) - 1
_OVER: Final = _MOST_TAG + 1
"""Represents the next tag of a message that has ended."""
_ROWS_PER_STEP: Final = 16
"""After 64 free steps, `columns` gives up if its steps advance fewer values than this on average."""
_LEAST_S: Final = -62_135_596_800
_MOST_S: Final = 253_402_300_799
"""The first and last seconds that `google.protobuf.Timestamp` allows, in the years 1 and 9999."""
_SECOND_NS: Final = 10**9
_MS_NS: Final = 1_000_000

_Raws = npt.NDArray[np.uint64]
_Longs = npt.NDArray[np.int64]


def _zigzag(raw: Any) -> Any:  # noqa: ANN401 - arrays of two widths
    return raw >> raw.dtype.type(1) ^ (~(raw & raw.dtype.type(1)) + raw.dtype.type(1))


_NUMBERS: Final[Mapping[str, Callable[[_Raws], npt.NDArray[Any]]]] = {
    **dict.fromkeys(("int32", "sfixed32", "enum"), lambda raws: raws.astype(np.uint32).view(np.int32)),
    **dict.fromkeys(("int64", "sfixed64"), lambda raws: raws.view(np.int64)),
    **dict.fromkeys(("uint64", "fixed64"), lambda raws: raws),
    **dict.fromkeys(("uint32", "fixed32"), lambda raws: raws.astype(np.uint32)),
    "sint32": lambda raws: _zigzag(raws.astype(np.uint32)).view(np.int32),
    "sint64": lambda raws: _zigzag(raws).view(np.int64),
    "bool": lambda raws: raws != 0,
}
"""Maps each type to a function that decodes its numbers. As in Protobuf's libraries, 32-bit types drop high bits."""
_NO_ID: Final = frozenset({"float", "double", "message", "group", "map", "repeated", TIMESTAMP})


def is_refused(type_name: str, time: FieldTime | None) -> bool:
    """Return whether values of a type cannot be IDs or, if ``time`` is given, event times in the required unit."""
    if time is None:
        return type_name in _NO_ID
    match time.unit:
        case "timestamp":
            return type_name != TIMESTAMP
        case "rfc3339":
            return type_name != "string"
        case _:
            return type_name not in _NUMBERS.keys() - {"bool", "enum"}


def fields_at(message: Message, path: Path) -> list[Field]:
    """Return the fields along a path, up to the first step that the message lacks."""
    found: list[Field] = []
    below: Message | None = message
    for step in path:
        each = None if below is None else below.fields.get(str(step)) if isinstance(step, str) else None
        if each is None:
            break
        found.append(each)
        below = each.message
    return found


def names_at(message: Message, path: Path) -> list[str]:
    """Return the field names of the message at a path, or an empty list if the path has no message."""
    found = fields_at(message, path)
    below = found[-1].message if found else message
    return list(below.fields) if below is not None and len(found) == len(path) else []


def type_at(message: Message, path: Path) -> str | None:
    """Return the type at a path, or None if the message lacks the path.

    A path ends at a repeated field, a map, or a group; the result is then ``repeated``, ``map``, or ``group``.
    """
    found = fields_at(message, path)
    if found and found[-1].kind in {"repeated", "map", "group"}:
        return found[-1].kind
    return found[-1].type_name if len(found) == len(path) else None


@dataclass(slots=True)
class _Step:
    """How one field of a message affects the slots of the result."""

    wire: int
    """The wire type of the field's values, or -1 for a repeated field, a map, or a group."""
    takes: list[int] = field(default_factory=list)
    """The slots that receive the field's value."""
    opens: list[int] = field(default_factory=list)
    """The slots that change from absent to zero or empty when the field, which is a message, occurs."""
    clears: list[int] = field(default_factory=list)
    """The slots of other members of the field's oneof, which become absent."""
    below: dict[int, _Step] = field(default_factory=dict)

    @property
    def is_wanted(self) -> bool:
        return bool(self.takes or self.opens or self.below)


@dataclass(frozen=True, slots=True)
class _Column:
    """The values at one path, which use one slot, or two for a timestamp."""

    slot: int
    type_name: str
    has_presence: bool
    is_refused: bool

    @property
    def is_timestamp(self) -> bool:
        return self.type_name == TIMESTAMP and not self.is_refused


class ProtobufReader:
    """Reads the members at given paths, and the event time, from values of one message type.

    If ``zeros`` is true, an unsent ID member without presence counts as 0, false, or empty, provided that its enclosing
    message was sent.
    """

    columnar: Final = True

    def __init__(self, message: Message, ids: Sequence[Path], time: FieldTime | None, *, zeros: bool = False) -> None:
        self.has_time: Final = time is not None
        self.count: Final = len(ids) + self.has_time
        self._without_ids: Final = ProtobufReader(message, (), time) if ids else None
        self._zeros: Final = zeros
        self.steps: Final[dict[int, _Step]] = {}
        self.texts: Final[list[bool]] = []
        """For each slot, whether the slot holds bytes instead of a number."""
        self.opened: Final[list[int]] = []
        """The slots that start with a default value."""
        self._columns: Final[list[_Column | None]] = [self._place(message, path, None) for path in ids]
        if time is not None:
            self._columns.append(self._place(message, time.path, time))

    def _place(self, message: Message, path: Path, time: FieldTime | None) -> _Column | None:
        """Add the steps for a path, and return the path's column, or None if the message lacks the path."""
        name, fields = type_at(message, path), fields_at(message, path)
        if name is None:
            return None
        last = fields[-1]
        zero = self._zeros and time is None and not last.has_presence and last.kind in SCALARS
        column = _Column(len(self.texts), name, last.has_presence or zero, is_refused(name, time))
        slots = [column.slot, column.slot + 1] if column.is_timestamp else [column.slot]
        self.texts.extend(SCALARS.get(name) == SIZED for _ in slots)
        steps, step, opens = self.steps, _Step(0), self.opened
        for holder, each in zip([message, *(each.message for each in fields)], fields, strict=False):
            others = holder.fields.values() if holder is not None and each.oneof else ()
            for other in others:
                if other.oneof == each.oneof and other.number != each.number:
                    _step(steps, other).clears.extend(slots)
            if zero and each is last:
                opens.extend(slots)
            step = _step(steps, each)
            steps, opens = step.below, step.opens
        inner = last.message
        if column.is_refused or inner is None:
            step.takes.append(column.slot)
        else:
            step.opens.extend(slots)
            for slot, each in zip(slots, inner.fields.values(), strict=True):  # value, or seconds and nanos
                _step(steps, each).takes.append(slot)
        return column

    def read(self, value: bytes) -> list[Leaf]:
        """Return the members at the paths, then the event time.

        Raises Unreadable unless the value consists of exactly one message.
        """
        found: list[Leaf] = []
        fault = self.fault(value, found)
        if fault is None:
            return found
        if self._without_ids is not None:
            # If a value has several faults, all alternatives of an ID must report the same fault, so the ID's own
            # faults come last.
            fault = self._without_ids.fault(value, found) or fault
        try:
            raise fault if isinstance(fault, Unreadable) else not_a_message(value, fault)
        finally:
            del fault  # otherwise, the exception and this frame would refer to each other

    def fault(self, value: bytes, found: list[Leaf]) -> Damaged | Unreadable | None:
        """Append the requested parts of a value to ``found``, and return an error if the value cannot be read."""
        cursor = _SlotCursor(self, value)
        try:
            cursor.walk(self.steps, len(value))
            found += [ABSENT if each is None else self._leaf(each, cursor.found) for each in self._columns]
        except (Damaged, Unreadable) as fault:
            return fault
        return None

    def columns(self, values: Sequence[bytes]) -> list[list[Leaf]]:
        """Return one column per path, followed by the event times.

        Raises NotInColumns if any value must be passed to `read` instead.
        """
        batch = _Batch(self, values)
        batch.walk_all(self.steps)
        return [[ABSENT] * len(values) if each is None else self._leaves(each, batch) for each in self._columns]

    def _leaf(self, column: _Column, found: Sequence[int | bytes | Absent]) -> Leaf:
        raw = found[column.slot]
        if raw is ABSENT:
            return ABSENT
        if column.is_refused:
            return Refused(column.type_name, raw)
        if isinstance(raw, bytes):
            if not raw and not column.has_presence:
                return ABSENT
            return raw if column.type_name == "bytes" else utf8(raw)
        raws = np.array([raw], np.uint64)
        if column.type_name == TIMESTAMP:
            try:
                (time_ms,) = _times_ms(raws, np.array([found[column.slot + 1]], np.uint64))
            except NotInColumns:
                text = "a timestamp is not in the years 1 to 9999, or its nanoseconds are not below a second"
                raise Damaged(text) from None
            return time_ms
        (leaf,) = _numbers(column, raws)
        return leaf

    def _leaves(self, column: _Column, batch: _Batch) -> list[Leaf]:
        there = batch.there[column.slot]
        if column.is_refused:
            raws: list[Any] = batch.raws[column.slot].tolist()
            if SCALARS.get(column.type_name, SIZED) == SIZED:
                ends = batch.ends[column.slot].tolist()
                raws = [batch.joined[start:end] for start, end in zip(raws, ends, strict=True)]
            return [
                Refused(column.type_name, raw) if each else ABSENT
                for raw, each in zip(raws, there.tolist(), strict=True)
            ]
        leaves: Sequence[Any]
        if self.texts[column.slot]:
            starts, ends = batch.raws[column.slot].tolist(), batch.ends[column.slot].tolist()
            leaves = [batch.joined[start:end] for start, end in zip(starts, ends, strict=True)]
            if column.type_name == "string":
                leaves = texts_of(leaves)
            if not column.has_presence and min(map(len, leaves)) == 0:
                leaves = [each or ABSENT for each in leaves]
        elif column.type_name == TIMESTAMP:
            leaves = _times_ms(batch.raws[column.slot], batch.raws[column.slot + 1])
        else:
            leaves = _numbers(column, batch.raws[column.slot])
        if not there.all():
            leaves = [each if known else ABSENT for each, known in zip(leaves, there.tolist(), strict=True)]
        return list(leaves)


@lru_cache(maxsize=256)
def protobuf_reader(
    schema: SchemaText, indexes: tuple[int, ...], ids: tuple[Path, ...], time: FieldTime | None, *, zeros: bool = False
) -> ProtobufReader:
    """Return the reader for one message type. Raises SchemaRefused if the schema is invalid or lacks the type."""
    return ProtobufReader(message_at(parse_proto(schema), indexes), ids, time, zeros=zeros)


def not_a_message(value: bytes, damage: Damaged) -> Unreadable:
    """Return the error for a damaged value."""
    text = f"the value is not a message of the schema: {damage}"
    if value[:1] == b"{" and value[-1:] == b"}":
        return Unreadable("not_protobuf", f"{text}; it looks like JSON", format_name="json")
    return with_foreign_format(value, "not_protobuf", text)


def _step(steps: dict[int, _Step], each: Field) -> _Step:
    wire = -1 if each.kind in {"repeated", "map", "group"} else SCALARS.get(each.kind, SIZED)
    return steps.setdefault(each.number, _Step(wire))


def utf8(raw: bytes) -> str:
    """Return the text of a string field. Raises Unreadable if it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Unreadable("not_utf8", f"a string of the value is not UTF-8 (byte {error.start} of the string)") from None


def _numbers(column: _Column, raws: _Raws) -> list[Leaf]:
    numbers = _NUMBERS[column.type_name](raws)
    found: list[Any] = numbers.tolist()
    if numbers.dtype == np.uint64 and int(numbers.max()) >> (_VARINT_BITS - 1):
        found = [Number(str(each)) if each >> (_VARINT_BITS - 1) else each for each in found]
    return found if column.has_presence or numbers.all() else [each or ABSENT for each in found]


def _times_ms(seconds: _Raws, nanos: _Raws) -> list[int]:
    """Convert timestamps to milliseconds. Raises NotInColumns if any timestamp is invalid."""
    whole, rest = seconds.view(np.int64), nanos.astype(np.uint32).view(np.int32).astype(np.int64)
    refuse((whole < _LEAST_S) | (whole > _MOST_S) | (rest < 0) | (rest >= _SECOND_NS))
    return cast("list[int]", (whole * 1000 + rest // _MS_NS).tolist())


class ProtobufCursor:
    """A read position in one Protobuf value. Methods advance the position, and raise Damaged instead of passing
    ``end``.
    """

    def __init__(self, value: bytes) -> None:
        self._value: Final = value
        self.at = 0

    def tag(self, end: int) -> tuple[int, int]:
        """Return the number and the wire type of the next field."""
        tag = self.varint(end)
        if tag > _MOST_TAG or not tag >> 3:
            raise Damaged(f"a field has the number {tag >> 3} (before byte {self.at})")
        if tag & 7 > FIXED32:
            raise Damaged(f"a field has the wire type {tag & 7} (before byte {self.at})")
        return tag >> 3, tag & 7

    def field(self, number: int, wire: int, end: int, depth: int = 0) -> int | bytes:
        """Advance past a field's value, and return the value as a number or as bytes.

        A group's value is everything between its two tags. If ``depth`` is not 0, the group is nested in another
        group's value, and the result is empty to avoid copying each byte once per level. Raises Unreadable if groups
        are nested too deeply.
        """
        if wire == VARINT:
            return self.varint(end)
        if wire in _WIDTHS:
            return int.from_bytes(self._bytes(_WIDTHS[wire], end), "little")
        if wire == SIZED:
            return self._bytes(self.varint(end), end)
        if depth == MAX_DEPTH:
            raise Unreadable("too_deep", f"the value is nested more than {MAX_DEPTH} levels deep")
        start = self.at
        while True:
            behind = self.at
            inner, wire = self.tag(end)
            if wire == END and inner == number:
                return b"" if depth else self._value[start:behind]
            if wire == END:
                raise self.unexpected_end()
            self.field(inner, wire, end, depth + 1)

    def sized_end(self, end: int) -> int:
        """Advance past the size of a message or of packed elements, and return the position at which they end."""
        size = self.varint(end)
        if size > end - self.at:
            raise self._ends_inside(size)
        return self.at + size

    def varint(self, end: int) -> int:
        """Return the next number."""
        if self.at < end and (byte := self._value[self.at]) < _MORE:  # most numbers have one byte
            self.at += 1
            return byte
        raw, self.at = varint(self._value, self.at, end)
        return raw

    def other_wire_type(self, number: int) -> Damaged:
        """Return the error for a field whose tag does not match the schema."""
        return Damaged(f"field {number} has another wire type than in the schema (before byte {self.at})")

    def unexpected_end(self) -> Damaged:
        """Return the error for a group's end tag that does not match its start tag."""
        return Damaged(f"a group ends that did not begin (before byte {self.at})")

    def _ends_inside(self, size: int) -> Damaged:
        return Damaged(f"it ends inside a field of {size} bytes (byte {self.at})")

    def _bytes(self, size: int, end: int) -> bytes:
        if size > end - self.at:
            raise self._ends_inside(size)
        taken = self._value[self.at : self.at + size]
        self.at += size
        return taken


class _SlotCursor(ProtobufCursor):
    """Reads one value into the slots of a reader. `walk` advances the position past a message."""

    def __init__(self, reader: ProtobufReader, value: bytes) -> None:
        super().__init__(value)
        self._empty: Final = [b"" if text else 0 for text in reader.texts]
        self.found: Final[list[int | bytes | Absent]] = [ABSENT] * len(reader.texts)
        for slot in reader.opened:
            self.found[slot] = self._empty[slot]

    def walk(self, steps: Mapping[int, _Step], end: int) -> None:
        while self.at < end:
            number, wire = self.tag(end)
            if wire == END:
                raise self.unexpected_end()
            step = steps.get(number)
            if step is not None and step.is_wanted and step.wire not in {-1, wire}:
                raise self.other_wire_type(number)
            raw = self.field(number, wire, end)
            if step is not None and step.wire in {-1, wire}:
                self._take(step, raw)

    def _take(self, step: _Step, raw: int | bytes) -> None:
        for slot in step.clears:
            self.found[slot] = ABSENT
        for slot in step.opens:
            if self.found[slot] is ABSENT:
                self.found[slot] = self._empty[slot]
        for slot in step.takes:
            self.found[slot] = raw
        if step.below and isinstance(raw, bytes):
            behind = self.at
            self.at = behind - len(raw)
            self.walk(step.below, behind)


class _Batch:
    """The Protobuf values of a batch. `walk` reads one message in each of the given rows."""

    def __init__(self, reader: ProtobufReader, values: Sequence[bytes]) -> None:
        self.joined: Final = b"".join([*values, PADDING])
        self._text: Final = np.frombuffer(self.joined, np.uint8)
        self._sizes: Final = np.fromiter(map(len, values), np.int64, len(values))
        self.raws: Final = [np.zeros(len(values), np.uint64) for _ in reader.texts]
        """For each slot, the number in each row, or the position at which the row's bytes start."""
        self.ends: Final = [np.zeros(len(values), np.int64) for _ in reader.texts]
        self.there: Final = [np.full(len(values), slot in reader.opened) for slot in range(len(reader.texts))]
        self._credit = 64 * _ROWS_PER_STEP

    def walk_all(self, steps: Mapping[int, _Step]) -> None:
        ends = np.cumsum(self._sizes)
        self.walk(steps, np.arange(len(ends)), ends - self._sizes, ends)

    def walk(self, steps: Mapping[int, _Step], rows: _Longs, at: _Longs, ends: _Longs) -> None:
        """Read one message in each row of ``rows``, between the row's positions in ``at`` and ``ends``.

        Each step advances the values whose next field has the lowest number. Serializers write fields in ascending
        order of their numbers, so a value that lacks a field waits until the other values are past the field.
        """
        going = np.flatnonzero(at < ends)
        rows, at, ends = rows[going], at[going], ends[going]
        tags = np.zeros(len(rows), np.uint64)
        due: slice | _Longs = slice(None)
        while len(rows):
            with among(rows[due]):
                found, at[due] = varints(self._text, at[due], ends[due])
                refuse(found > _MOST_TAG)
            tags[due] = found
            tag = int(tags.min())
            if tag == _OVER:
                return
            chosen = np.flatnonzero(tags == tag)
            self._credit += len(chosen) - _ROWS_PER_STEP
            if self._credit < 0:
                raise NotInColumns
            due = slice(None) if len(chosen) == len(rows) else chosen
            at[due] = self._field(steps.get(tag >> 3), tag, rows[due], at[due], ends[due])
            over = at[due] >= ends[due]
            if over.any():
                tags[chosen[over]] = _OVER
                due = chosen[~over]

    def _field(self, step: _Step | None, tag: int, rows: _Longs, at: _Longs, ends: _Longs) -> _Longs:
        """Read one field in each row, and return the position at which the field ends."""
        wire = tag & 7
        if not tag >> 3 or wire not in {VARINT, _FIXED64, SIZED, FIXED32}:
            raise NotInColumns(rows.tolist())
        if step is not None and step.is_wanted and step.wire not in {-1, wire}:
            raise NotInColumns(rows.tolist())
        with among(rows):
            raws, starts, behind = self._value(wire, at, ends)
            refuse(behind > ends)
        if step is not None and step.wire in {-1, wire}:
            if step.takes and wire in _WIDTHS:
                places = starts[:, np.newaxis] + np.arange(_WIDTHS[wire])
                raws = self._text[places].view(f"<u{_WIDTHS[wire]}").ravel().astype(np.uint64)
            self._take(step, rows, raws, behind)
            if step.below:
                self.walk(step.below, rows, starts, behind)
        return behind

    def _value(self, wire: int, at: _Longs, ends: _Longs) -> tuple[_Raws, _Longs, _Longs]:
        """Return each value's number (or the position of its bytes), and the positions of its start and its end."""
        if wire in _WIDTHS:
            return at.view(np.uint64), at, at + _WIDTHS[wire]
        raws, behind = varints(self._text, at, ends)
        if wire == VARINT:
            return raws, at, behind
        refuse(raws > len(self.joined))
        return behind.view(np.uint64), behind, behind + raws.view(np.int64)

    def _take(self, step: _Step, rows: _Longs, raws: _Raws, ends: _Longs) -> None:
        for slot in step.clears:
            self.there[slot][rows] = False
        for slot in step.opens:
            new = rows[~self.there[slot][rows]]
            self.there[slot][new] = True
            self.raws[slot][new] = self.ends[slot][new] = 0
        for slot in step.takes:
            self.there[slot][rows] = True
            self.raws[slot][rows] = raws
            self.ends[slot][rows] = ends
