"""Reads members of Avro values by path, from one value (`AvroReader.read`) or as columns from a batch of values.

A value is the binary encoding of one record with a known writer schema. `read` and `columns` return only the requested
members, but decode the whole value to check that it ends where its record ends. `AvroReader.columns` advances through
all values of a batch together, field by field. If any value might be damaged, `columns` raises NotInColumns. The caller
must then use `AvroReader.read` for the rows that the exception names, or for all rows if it names none.

Source: "Binary Encoding" and "Logical Types" of the Avro specification 1.12.0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, repeat
from math import log10
from typing import Any, Final, assert_never, cast
from uuid import UUID

import numpy as np
import numpy.typing as npt

from dedup.core.event_time import FieldTime, TimeUnit
from dedup.core.exact_json import ABSENT, Absent, Number, Unreadable, with_foreign_format
from dedup.core.framing import PREFIX_BYTES, SchemaRefused, SchemaText, in_reference, linked
from dedup.core.odd_rows import NotInColumns, among, refuse, texts_of
from dedup.core.tracking_id import Path
from dedup.core.varint import PADDING, Damaged, varint, varints

MAX_DEPTH: Final = 200
"""The maximum nesting depth of schemas and values. Without it, a recursive schema would allow values of any depth."""
_MOST_DECIMAL_BYTES: Final = 1_024
_ROWS_PER_STEP: Final = 16
"""After 64 free steps, `columns` gives up if its steps (unions or items) read fewer values than this on average."""

# Avro's Java library, which registries use, accepts letters of any language in names, and any string as a namespace.
_NAME: Final = re.compile(r"[^\W\d]\w*")
_FULL_NAME: Final = re.compile(r"([^\0-\x20\x7f-\x9f\ud800-\udfff]{1,1000}\.)?[^\W\d]\w{0,1000}")
_WIDTHS: Final = {
    "null": 0, "boolean": 1, "int": -1, "long": -1, "float": 4, "double": 8, "bytes": -1, "string": -1
}  # fmt: skip
"""Maps each primitive type to the length of its values in bytes, or to -1 if the length depends on the value."""
_UNITS: Final = ("millis", "micros", "nanos")
_LOGICAL: Final = {
    "int": {"date", "time-millis"},
    "long": {"time-micros", *(f"{zone}timestamp-{unit}" for zone in ("", "local-") for unit in _UNITS)},
    "bytes": {"decimal", "big-decimal"},
    "fixed": {"decimal", "duration", "uuid"},
    "string": {"uuid"},
}
"""Maps each type to its logical types. As the specification requires, unknown and invalid logical types are ignored."""
_SIZE_OF: Final = {"uuid": 16, "duration": 12}
_TIMESTAMPS: Final[Mapping[str, tuple[TimeUnit | None, int]]] = {
    "timestamp-millis": ("ms", 1_000_000),
    "timestamp-micros": ("us", 1_000),
    "timestamp-nanos": (None, 1),
}
"""Maps each timestamp type to the name of its unit in topology files (or None) and the unit's length in nanoseconds."""
_NO_ID: Final = frozenset(
    {"null", "float", "double", "date", "time-millis", "time-micros", "duration", "big-decimal"}
    | {f"local-timestamp-{unit}" for unit in _UNITS}
)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A type whose values contain no other values, such as int or string."""

    kind: str
    logical: str = ""
    """The logical type, or an empty string."""
    width: int = -1
    """The length of each value in bytes, or -1 if the length depends on the value."""
    symbols: tuple[str, ...] = ()
    scale: int = 0

    @property
    def name(self) -> str:
        """The name of the logical type if there is one, or else the name of the type."""
        return self.logical or self.kind


@dataclass(frozen=True, slots=True)
class Record:
    """A record type. The parser creates the object before its fields, because a record type may contain itself."""

    name: str
    fields: dict[str, Node] = field(default_factory=dict, compare=False, repr=False)
    void: set[str] = field(default_factory=set, compare=False, repr=False)
    """Fields that take no bytes. Readers visit only those on a path, because a small schema can define very many."""


@dataclass(frozen=True, slots=True)
class Items:
    """An array type or a map type."""

    item: Node
    name: str
    """The kind of the type, which is "array" or "map"."""


@dataclass(frozen=True, slots=True)
class Union:
    """A union of types. An encoded value begins with the index of its type in the union."""

    branches: tuple[Node, ...]


Node = Scalar | Record | Items | Union


@dataclass(frozen=True, slots=True)
class Instant:
    """An instant, in nanoseconds since 1970-01-01T00:00:00Z."""

    nanoseconds: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands for a value whose type is not allowed at its path, for example a double at the path of an ID."""

    type_name: str
    raw: Any = field(default=None, compare=False)
    """The decoded value, if the reader has it: `dedup sink` allows more types than an ID does."""


Leaf = None | bool | int | str | bytes | Number | UUID | Instant | Refused | Absent
"""The value at a path. A decimal is represented as a `Number` with an exponent."""


@lru_cache(maxsize=256)
def parse_schema(schema: SchemaText) -> Record:
    """Return the record type that a schema describes. Raises SchemaRefused if the schema does not describe a record."""
    whole, parser = linked(schema), _SchemaParser()
    # A schema that defines several types is referred to by the name of each.
    for text, name in {text: name for name, text in whole.references}.items():
        try:
            parser.parse(text)
        except SchemaRefused as refused:
            raise in_reference(name, refused) from None
    node = parser.parse(whole.text)
    if not isinstance(node, Record):
        raise SchemaRefused("does not describe a record; each value must be one record")
    return node


class _SchemaParser:
    def __init__(self) -> None:
        self._named: Final[dict[str, Node]] = {}
        self._void: Final[set[str]] = set()

    def parse(self, text: str) -> Node:
        try:
            # Only a default value, which is never used, can have more than 20 digits. Python's int() would reject
            # a number with thousands of digits.
            return self.node(json.loads(text, parse_int=lambda digits: int(digits[:20])), "", 0)
        except json.JSONDecodeError as error:
            raise SchemaRefused(f"is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
        except RecursionError:
            raise SchemaRefused(f"is nested more than {MAX_DEPTH} levels deep") from None

    def node(self, schema: Any, namespace: str, depth: int) -> Node:  # noqa: ANN401 - JSON
        if depth > MAX_DEPTH:
            raise SchemaRefused(f"is nested more than {MAX_DEPTH} levels deep")
        match schema:
            case str() if schema in _WIDTHS:
                return Scalar(schema, width=_WIDTHS[schema])
            case str():
                return self._known(schema, namespace)
            case list():
                branches = tuple(self.node(each, namespace, depth + 1) for each in schema)
                if not branches or any(isinstance(branch, Union) for branch in branches):
                    raise SchemaRefused("has a union that is empty or has a union as a branch")
                return Union(branches)
            case {"type": str(kind)} if kind in _WIDTHS:
                logical, scale = _logical(kind, schema, 0)
                return Scalar(kind, logical, _WIDTHS[kind], scale=scale)
            case {"type": "record" | "enum" | "fixed" | "array" | "map"}:
                return self._complex(schema, namespace, depth)
            case {"type": inner}:
                return self.node(inner, namespace, depth + 1)
            case _:
                raise SchemaRefused("has a type that is no name, list, or object with a type")

    def _complex(self, schema: Mapping[str, Any], namespace: str, depth: int) -> Node:
        match schema:
            case {"type": "record", "fields": list(fields)}:
                return self._record(schema, fields, namespace, depth)
            case {"type": "enum", "symbols": list(symbols)}:
                if len({each for each in symbols if isinstance(each, str) and each.isprintable()}) < len(symbols):
                    raise SchemaRefused("has an enum whose symbols are not distinct names")
                return self._define(schema, namespace, Scalar("enum", symbols=tuple(symbols)))
            case {"type": "fixed", "size": int(size)} if 0 <= size < 1 << 31 and size is not True:
                logical, scale = _logical("fixed", schema, size)
                return self._define(schema, namespace, Scalar("fixed", logical, size, scale=scale))
            case {"type": "array", "items": item}:
                inner = self.node(item, namespace, depth + 1)
                if self._is_void(inner):
                    raise SchemaRefused("has an array of items that take no bytes, so a value could have any number")
                return Items(inner, "array")
            case {"type": "map", "values": item}:
                return Items(self.node(item, namespace, depth + 1), "map")
            case _:
                raise SchemaRefused(f"has a type {schema['type']} that is not complete")

    def _known(self, name: str, namespace: str) -> Node:
        full = f"{namespace}.{name}" if namespace and "." not in name else name
        found = self._named.get(full, self._named.get(name))
        if found is None:
            raise SchemaRefused(f"uses a type that it does not define before: {ascii(name[:64])[1:-1]}")
        return found

    def _record(self, schema: Mapping[str, Any], fields: list[Any], namespace: str, depth: int) -> Node:
        record = Record(_full_name(schema, namespace))
        self._define(schema, namespace, record)
        for each in fields:
            match each:
                case {"name": str(name), "type": kind} if _NAME.fullmatch(name) and name not in record.fields:
                    record.fields[name] = self.node(kind, record.name.rpartition(".")[0], depth + 1)
                case _:
                    raise SchemaRefused(f"has a field without a type or a name of its own in {record.name}")
            if self._is_void(record.fields[name]):
                record.void.add(name)
        if len(record.void) == len(record.fields):
            self._void.add(record.name)
        return record

    def _is_void(self, node: Node) -> bool:
        return node.name in self._void if isinstance(node, Record) else isinstance(node, Scalar) and node.width == 0

    def _define(self, schema: Mapping[str, Any], namespace: str, node: Node) -> Node:
        name = _full_name(schema, namespace)
        if name in self._named or name in _WIDTHS:
            raise SchemaRefused(f"defines {name} twice")
        self._named[name] = node
        return node


def _full_name(schema: Mapping[str, Any], namespace: str) -> str:
    name, own = schema.get("name"), schema.get("namespace", namespace)
    full = name if "." in str(name) or not own else f"{own}.{name}"
    if not isinstance(full, str) or not isinstance(name, str) or not _FULL_NAME.fullmatch(full):
        raise SchemaRefused(f"has a type {schema['type']} without a valid name")
    return full


def _logical(kind: str, schema: Mapping[str, Any], size: int) -> tuple[str, int]:
    """Return the logical type and the scale, or "" and 0 if there is no valid logical type."""
    name = schema.get("logicalType")
    if not isinstance(name, str) or name not in _LOGICAL.get(kind, ()):
        return "", 0
    if kind == "fixed" and size != _SIZE_OF.get(name, size):
        return "", 0
    if name != "decimal":
        return name, 0
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if type(precision) is not int or type(scale) is not int or not 0 <= scale <= precision or precision == 0:
        return "", 0
    most = int(log10(2) * (8 * size - 1)) if kind == "fixed" else precision
    return (name, scale) if precision <= most else ("", 0)


def nodes_at(node: Node, path: Path) -> list[Node]:
    """Return the types that values at a path can have, or an empty list if the schema lacks the path."""
    if isinstance(node, Union):
        return [found for branch in node.branches for found in nodes_at(branch, path)]
    if not path:
        return [node]
    step, *rest = path
    if isinstance(node, Record) and isinstance(step, str) and step in node.fields:
        return nodes_at(node.fields[step], tuple(rest))
    if isinstance(node, Items) and isinstance(step, int) == (node.name == "array"):
        return nodes_at(node.item, tuple(rest))
    return []


def type_name(node: Node) -> str:
    """Return the logical type of a type if it has one, or else the type's kind, such as record."""
    match node:
        case Scalar() | Items():
            return node.name
        case Record():
            return "record"
        case Union():
            return "union"
        case never:
            assert_never(never)


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


_NOTHING: Final = _Wanted()


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
        # If a value has several faults, all alternatives of an ID must report the same one, so damage comes first and
        # the ID's own faults come last.
        fault = self._fault(value, _NOTHING, found) or self._fault(value, self._without_ids, found) or fault
        if isinstance(fault, Damaged):
            fault = self._not_avro(value, f"the value is not a record of the schema: {fault}")
        try:
            raise fault
        finally:
            del fault  # otherwise, the exception and this frame would refer to each other

    def _fault(self, value: bytes, want: _Wanted, found: list[Leaf]) -> Damaged | Unreadable | None:
        """Store the requested parts of a value in ``found``, and return an error if the value cannot be read."""
        cursor = _Cursor(self, value, found)
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
        if value[:1] == b"\0" and self._fault(value[PREFIX_BYTES:], _NOTHING, []) is not None:
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
        """Return the event time rule if the slot holds the event time, or None if the slot belongs to the ID."""
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
            return _text(raw)
        case _, "uuid":
            return UUID(bytes=raw)
        case _, "decimal":
            return _decimal(raw, node.scale)
        case _:
            return cast("bytes | int", raw)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Unreadable("not_utf8", f"a string of the value is not UTF-8 (byte {error.start} of the string)") from None


def _decimal(raw: bytes, scale: int) -> Number:
    if not 0 < len(raw) <= _MOST_DECIMAL_BYTES:
        text = f"a decimal of the value has {len(raw)} bytes, not 1 to {_MOST_DECIMAL_BYTES:,}"
        raise Unreadable("number_out_of_range", text)
    return Number(f"{int.from_bytes(raw, 'big', signed=True)}e-{scale}")


class _Cursor:
    """A read position in one Avro value. `walk` advances the position past one encoded value of a given type."""

    def __init__(self, reader: AvroReader, value: bytes, found: list[Leaf]) -> None:
        self._reader: Final = reader
        self._value: Final = value
        self.found: Final = found
        self.at = 0

    def walk(self, node: Node, want: _Wanted, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise Unreadable("too_deep", f"the value is nested more than {MAX_DEPTH} levels deep")
        match node:
            case Scalar():
                raw = self._raw(node)
                for slot in want.slots:
                    self.found[slot] = leaf_of(node, raw, self._reader.time_of(slot))
            case Record():
                self._refuse(want, "record")
                for name, inner in node.fields.items():
                    if name not in node.void or name in want.below:
                        self.walk(inner, want.below.get(name, _NOTHING), depth + 1)
            case Union(branches):
                branch = self._varint()
                if not 0 <= branch < len(branches):
                    raise Damaged(f"a union has no branch {branch} (before byte {self.at})")
                self.walk(branches[branch], want, depth + 1)
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
        while count := self._varint():
            due = None
            if count < 0:
                size, count = self._varint(), -count
                due = self.at + size
            if count > len(self._value) - self.at:  # each item takes at least one byte
                raise Damaged(f"it ends inside a block of {count} items (byte {self.at})")
            for at in range(position, position + count):
                step: str | int = at if node.name == "array" else self._key(keys)
                self.walk(node.item, want.below.get(step, _NOTHING), depth + 1)
            position += count
            if due is not None and due != self.at:
                raise Damaged(f"a block of items has another size than it says (byte {self.at})")

    def _key(self, keys: dict[bytes, bool]) -> str | int:
        """Read the key of a map entry. Return -1 if no path contains the key. ``keys`` tracks the keys already read."""
        key = self._take(self._varint())
        if key not in keys:
            return -1
        if keys[key]:
            raise Unreadable("repeated_member", "a map repeats a key that is on a path of the ID or event time")
        keys[key] = True
        return key.decode()

    def _raw(self, node: Scalar) -> int | bytes:
        match node.kind:
            case "int" | "long":
                return self._varint()
            case "enum":
                symbol = self._varint()
                if not 0 <= symbol < len(node.symbols):
                    raise Damaged(f"an enum has no symbol {symbol} (before byte {self.at})")
                return symbol
            case "boolean":
                byte = self._take(1)[0]
                if byte > 1:
                    raise Damaged(f"a boolean is neither 0 nor 1 (before byte {self.at})")
                return byte
            case "bytes" | "string":
                return self._take(self._varint())
            case _:
                return self._take(node.width)

    def _varint(self) -> int:
        raw, self.at = varint(self._value, self.at, len(self._value))
        return raw >> 1 ^ -(raw & 1)

    def _take(self, size: int) -> bytes:
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
                        self.walk(inner, want.below.get(name, _NOTHING), rows, depth + 1)
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
            self.walk(item, _NOTHING, rows, depth + 1)
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
