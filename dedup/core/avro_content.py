"""Computes the canonical content of Avro values, as they are or as a pinned schema reads them.

The pinned schema is a reader's schema: each value is read as "Schema Resolution" of the Avro specification 1.12.0
requires. Where the specification leaves a choice or has no rule:

- A branch of the pinned schema's union that has the type of the value precedes branches to which the value would have
  to be promoted. (The specification takes the first branch that matches, so a value could lose precision even if it
  was written with the pinned schema.)
- A logical type of the pinned schema applies only to values with the same underlying type, and with the same logical
  type (and, for a decimal, the same scale) or none. If the pinned schema has no logical type, the value's is ignored.
- An alias of a type is its full name. An alias of a field applies only if neither the writer's record has a field with
  the name, nor the pinned record a field with the name of the alias.
- The default of a union is a value of the first branch that can have it. A default of a record may omit fields that
  have defaults.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, Final, cast
from uuid import UUID

import numpy as np

from dedup.core.avro import NO_MEMBERS, AvroCursor, AvroReader, Instant, avro_reader, decode_decimal, decode_text
from dedup.core.avro_schema import MAX_DEPTH, UNITS, Items, Node, Record, Scalar, Union, parse_schema
from dedup.core.content_tree import Content, Tree, TypedValue, deeper, encode_content, text_key, without_names
from dedup.core.exact_json import Unreadable, excluded
from dedup.core.framing import SchemaRefused, SchemaText
from dedup.core.tracking_id import Path
from dedup.core.varint import Damaged

_MOST_DEFAULTS: Final = 100_000
"""The maximum number of values in all defaults of a schema."""
_MOST_CHARS: Final = 64
"""The maximum length of a name in an error text."""
_BITS: Final = {"int": 32, "long": 64}
_PROMOTIONS: Final = {
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "string": {"bytes"},
    "bytes": {"string"},
}
_IDENTICAL, _EQUAL, _SIMILAR, _PROMOTED = range(4)
"""How well a writer's type matches a reader's."""

_Reading = Callable[[AvroCursor, int], Tree]
"""Reads a value, given its nesting depth."""
_Convert = Callable[[Any], Tree]
"""Converts what `AvroCursor.raw` returns."""

_float: Final = struct.Struct("<f").unpack
_double: Final = struct.Struct("<d").unpack


@lru_cache(maxsize=256)
def avro_content(schema: SchemaText, pinned: SchemaText | None, exclude: tuple[Path, ...]) -> Content:
    """Return the function that computes the content of values with a given schema, without the members to exclude.

    If ``pinned`` is a schema, the function reads each value as that schema requires. It raises Unreadable for the same
    values as `AvroReader.read`, and for values that have no content or that the pinned schema cannot read. Raises
    SchemaRefused if a schema is not valid.
    """
    writer = parse_schema(schema)
    reader = writer if pinned is None else parse_schema(pinned)
    resolver = _Resolver({} if pinned is None else _Defaults(reader).found)
    read = resolver.reading(writer, reader, "the value")
    without = without_names(excluded(exclude))
    checker = avro_reader(schema, (), None)

    def content(payload: bytes) -> bytes:
        try:
            return encode_content(_whole(checker, read, payload), without)
        except (Damaged, Unreadable):
            # As for an ID, damage is reported first.
            checker.read(payload)
            raise

    return content


def _whole(checker: AvroReader, read: _Reading, payload: bytes) -> Tree:
    cursor = AvroCursor(checker, payload, [])
    tree = read(cursor, 0)
    if cursor.at != len(payload):
        raise Damaged("it continues after its record ends")
    return tree


class _Resolver:
    """Finds out how to read a writer's types as a reader's, which are the same if no schema is pinned."""

    def __init__(self, defaults: dict[tuple[int, str], Tree]) -> None:
        self.defaults: Final = defaults
        self._records: Final[dict[tuple[int, int], _RecordReading]] = {}

    def reading(self, writer: Node, reader: Node, place: str) -> _Reading:
        """Return how to read a writer's type as a reader's. ``place`` names the value in error texts."""
        if isinstance(writer, Union):
            same = writer is reader  # then each branch is read as itself, without comparing it with all others
            return _union([self.reading(branch, branch if same else reader, place) for branch in writer.branches])
        branches = reader.branches if isinstance(reader, Union) else (reader,)
        ranked = [(rank, at) for at, branch in enumerate(branches) if (rank := _rank(writer, branch)) is not None]
        if not ranked:
            return _unresolvable(f"{place} is of type {_described(writer)}, not {_described(reader)}")
        found = branches[min(ranked)[1]]
        if isinstance(writer, Record):
            pair = (id(writer), id(found))
            if pair not in self._records:
                self._records[pair] = _RecordReading(self, writer, cast("Record", found))
            return self._records[pair].read
        if isinstance(writer, Items):
            item = self.reading(writer.item, cast("Items", found).item, f"{place}[]")
            return _array(item) if writer.name == "array" else _map(item)
        return _scalar(writer, cast("Scalar", found), place)


class _RecordReading:
    """Reads a writer's record as a reader's.

    The members are compared when the first value is read: a schema may refer to its types more deeply than Python can
    recurse, and a record type may contain itself.
    """

    def __init__(self, resolver: _Resolver, writer: Record, reader: Record) -> None:
        self._resolver: Final = resolver
        self._writer: Final = writer
        self._reader: Final = reader
        self._steps: list[tuple[bytes | None, _Reading]] | None = None
        """The key (or None) and the reading of each field to visit, in the order of the encoding."""
        self._defaults: dict[bytes, Tree] = {}
        self._height = 0
        """The nesting depth of the defaults."""

    def read(self, cursor: AvroCursor, depth: int) -> Tree:
        steps = self._compared() if self._steps is None else self._steps
        tree = self._defaults.copy()
        if steps or tree:
            depth = deeper(depth + self._height) - self._height
        for key, read in steps:
            part = read(cursor, depth)
            if key is not None:
                tree[key] = part
        return tree

    def _compared(self) -> list[tuple[bytes | None, _Reading]]:
        writer, reader, steps = self._writer, self._reader, list[tuple[bytes | None, _Reading]]()
        sources = _sources(writer, reader)
        read_fields = set(sources.values())
        for name in [each for each in reader.fields if each not in read_fields]:
            if (id(reader), name) not in self._resolver.defaults:
                lacking = f"{_place(reader, name)} is missing, and has no default in the pinned schema"
                self._steps = [(None, _unresolvable(lacking))]
                return self._steps
            if not reader.is_void:
                self._defaults[text_key(name)] = self._resolver.defaults[id(reader), name]
        for name, node in writer.fields.items():
            target = sources.get(name)
            if name in writer.void and (target is None or reader.is_void):
                continue
            if target is None:
                steps.append((None, _skip(node)))
            else:
                read = self._resolver.reading(node, reader.fields[target], _place(reader, target))
                steps.append((None if reader.is_void else text_key(target), read))
        self._height = max(map(_height, self._defaults.values()), default=0)
        self._steps = steps
        return steps


def _sources(writer: Record, reader: Record) -> dict[str, str]:
    """Map the name of each of the writer's fields that the reader has to the name of the reader's field."""
    found = {name: name for name in writer.fields if name in reader.fields}
    for name in reader.fields:
        if name not in writer.fields:
            for alias in reader.field_aliases[name]:
                if alias in writer.fields and alias not in found:
                    found[alias] = name
                    break
    return found


def _rank(writer: Node, reader: Node) -> int | None:
    """Return how well two types match, or None if they do not match."""
    if writer is reader:
        return _IDENTICAL
    match writer, reader:
        case (Union(), _) | (_, Union()):
            return _SIMILAR
        case Record(), Record():
            return _name_rank(writer.name, reader.name, reader.aliases)
        case Items(), Items() if writer.name == reader.name:
            return _rank(writer.item, reader.item)
        case Scalar(), Scalar():
            return _scalar_rank(writer, reader)
        case _:
            return None


def _scalar_rank(writer: Scalar, reader: Scalar) -> int | None:
    own, pinned = _logical(writer), _logical(reader)
    if writer.kind != reader.kind:
        return _PROMOTED if reader.kind in _PROMOTIONS.get(writer.kind, ()) and not pinned else None
    if writer.width != reader.width or (own and pinned and (own, writer.scale) != (pinned, reader.scale)):
        return None
    rank = _name_rank(writer.full_name, reader.full_name, reader.aliases)
    return rank if own == pinned or rank is None else _SIMILAR


def _logical(node: Scalar) -> str:
    return node.logical if node.kind != "string" else ""  # a string's only logical type, uuid, does not matter


def _name_rank(writer: str, reader: str, aliases: frozenset[str]) -> int | None:
    if writer == reader:
        return _EQUAL
    return _SIMILAR if writer in aliases or writer.rpartition(".")[2] == reader.rpartition(".")[2] else None


def _described(node: Node) -> str:
    match node:
        case Record(name=name):
            text = f"record {name}"
        case Union(branches):
            text = f"[{', '.join(map(_described, branches[:9]))}]"
        case Items(item, name):
            text = f"{name} of {_described(item)}"
        case Scalar(logical="decimal"):
            text = f"decimal with scale {node.scale}"
        case Scalar(kind="fixed"):
            text = f"{node.name} {node.full_name} of {node.width} bytes"
        case _:
            text = f"{node.name} {node.full_name}".rstrip()
    return text[:_MOST_CHARS]


def _place(record: Record, name: str) -> str:
    return f"{record.name.rpartition('.')[2][:_MOST_CHARS]}.{name[:_MOST_CHARS]}"


def _unresolvable(text: str) -> _Reading:
    def read(_cursor: AvroCursor, _depth: int) -> Tree:
        raise Unreadable("schema_unresolvable", f"the value's schema cannot be read as the pinned schema: {text}")

    return read


def _skip(node: Node) -> _Reading:
    def read(cursor: AvroCursor, depth: int) -> Tree:
        cursor.walk(node, NO_MEMBERS, depth)
        return None

    return read


def _union(branches: Sequence[_Reading]) -> _Reading:
    count = len(branches)

    def read(cursor: AvroCursor, depth: int) -> Tree:
        return branches[cursor.branch(count)](cursor, deeper(depth))

    return read


def _array(item: _Reading) -> _Reading:
    def read(cursor: AvroCursor, depth: int) -> Tree:
        found: list[Tree] = []
        for count in cursor.blocks():
            below = deeper(depth)
            for _ in repeat(None, count):
                found.append(item(cursor, below))  # noqa: PERF401 - a generator would be another call at each level
        return found

    return read


def _map(item: _Reading) -> _Reading:
    def read(cursor: AvroCursor, depth: int) -> Tree:
        found: dict[bytes, Tree] = {}
        for count in cursor.blocks():
            below = deeper(depth)
            for _ in repeat(None, count):
                key = text_key(decode_text(cursor.part()))
                if key in found:
                    raise Unreadable("repeated_member", "a map of the content repeats a key")
                found[key] = item(cursor, below)
        return found

    return read


def _scalar(writer: Scalar, reader: Scalar, place: str) -> _Reading:
    match writer.kind:
        case "enum":
            return _enum(writer, reader, place)
        case "int" | "long":
            take: Callable[[AvroCursor], Any] = AvroCursor.varint
        case "string" | "bytes":
            take = AvroCursor.part
        case _:
            take = lambda cursor: cursor.raw(writer)  # noqa: E731
    convert = _promotion(writer.kind, reader.kind) if writer.kind != reader.kind else _conversion(reader)

    def read(cursor: AvroCursor, _depth: int) -> Tree:
        return convert(take(cursor))

    def read_unchanged(cursor: AvroCursor, _depth: int) -> Tree:
        return cast("Tree", take(cursor))

    return read_unchanged if convert is _unchanged else read


def _enum(writer: Scalar, reader: Scalar, place: str) -> _Reading:
    symbols = [each if each in reader.symbols else reader.default for each in writer.symbols]
    unknown = _unresolvable(f"{place} has a symbol that {_described(reader)} lacks, without a default")

    def read(cursor: AvroCursor, depth: int) -> Tree:
        symbol = symbols[cast("int", cursor.raw(writer))]
        return unknown(cursor, depth) if symbol is None else symbol

    return read


def _unchanged(raw: Any) -> Tree:  # noqa: ANN401 - int or bytes
    return cast("Tree", raw)


def _promotion(writer: str, reader: str) -> _Convert:
    match writer, reader:
        case "float", _:
            return _CONVERSIONS["float"]
        case _, "float":
            return lambda raw: float(np.int64(raw).astype(np.float32))  # rounds once, in contrast to float()
        case _, "double":
            return float
        case _, "string":
            return decode_text
        case _:
            return _unchanged


def _conversion(node: Scalar) -> _Convert:
    """Return how to convert what `AvroCursor.raw` returns for a type to the type's canonical form."""
    if node.kind in _CONVERSIONS:
        return _CONVERSIONS[node.kind]
    name, _, unit = node.logical.rpartition("-") if node.logical.endswith(tuple(UNITS)) else (node.logical, "", "")
    factor = UNITS.get(unit, 1)
    match name:
        case "timestamp":
            return lambda raw: Instant(raw * factor)
        case "time" | "local-timestamp":
            return lambda raw: TypedValue(name, raw * factor)
        case "decimal":
            return lambda raw: decode_decimal(raw, node.scale)
        case "uuid":
            return lambda raw: UUID(bytes=raw)
        case "":
            return _unchanged
        case _:  # date, duration, and big-decimal
            return lambda raw: TypedValue(name, raw)


_CONVERSIONS: Final[dict[str, _Convert]] = {
    "null": lambda _: None,
    "boolean": bool,
    "float": lambda raw: _float(raw)[0],
    "double": lambda raw: _double(raw)[0],
    "string": decode_text,
}


def _height(tree: Tree) -> int:
    """Return the nesting depth of a value: 0 for a scalar."""
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return max((1 + _height(each) for each in inner), default=0)


class _NoDefault(Exception):
    """Raised if a JSON value cannot be the default of a type."""


class _Defaults:
    """Converts all defaults of a reader's schema. Raises SchemaRefused if a default does not have its field's type."""

    def __init__(self, schema: Record) -> None:
        self.found: Final[dict[tuple[int, str], Tree]] = {}
        """The default of each field, by the `id` of the record type and the name of the field."""
        self._left = _MOST_DEFAULTS
        due, seen = [schema], {id(schema)}
        while due:
            record = due.pop()
            for name, node in record.fields.items():
                for each in _named_in(node):
                    if isinstance(each, Scalar):
                        _check_enum(each)
                    elif id(each) not in seen:
                        seen.add(id(each))
                        due.append(each)
                if name in record.defaults:
                    self.found[id(record), name] = self._checked(record, name)

    def _checked(self, record: Record, name: str) -> Tree:
        try:
            return self._tree(record.fields[name], record.defaults[name], 0)
        except _NoDefault:
            raise SchemaRefused(f"has a default at {_place(record, name)} that is not of the field's type") from None

    def _tree(self, node: Node, value: Any, depth: int) -> Tree:  # noqa: ANN401 - JSON
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise SchemaRefused(f"has defaults of more than {_MOST_DEFAULTS:,} values or {MAX_DEPTH} levels")
        match node, value:
            case Union(branches), _:
                return self._first(branches, value, depth)
            case Record(), dict():
                members = {
                    text_key(name): self._tree(inner, _member(node, name, value), depth + 1)
                    for name, inner in node.fields.items()
                }
                return {} if node.is_void else members
            case Items(item, "array"), list():
                return [self._tree(item, each, depth + 1) for each in value]
            case Items(item, "map"), dict():
                return {_default_key(key): self._tree(item, value[key], depth + 1) for key in value}
            case Scalar(), _:
                return _scalar_default(node, value)
            case _:
                raise _NoDefault

    def _first(self, branches: Sequence[Node], value: Any, depth: int) -> Tree:  # noqa: ANN401 - JSON
        for branch in branches:
            try:
                return self._tree(branch, value, depth)
            except _NoDefault:
                continue
        raise _NoDefault


def _named_in(node: Node) -> list[Record | Scalar]:
    """Return the record types and scalar types in a type, without the members of the records."""
    match node:
        case Union(branches):
            return [each for branch in branches for each in _named_in(branch)]
        case Items(item):
            return _named_in(item)
        case _:
            return [node]


def _default_key(name: str) -> bytes:
    try:
        return text_key(name)
    except UnicodeEncodeError:
        raise _NoDefault from None


def _check_enum(node: Scalar) -> None:
    if node.default is not None and node.default not in node.symbols:
        raise SchemaRefused(f"has an enum {node.full_name[:_MOST_CHARS]} whose default is not one of its symbols")


def _member(record: Record, name: str, value: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    if name in value:
        return value[name]
    if name in record.defaults:
        return record.defaults[name]
    raise _NoDefault


def _scalar_default(node: Scalar, value: Any) -> Tree:  # noqa: ANN401 - JSON
    try:
        return _conversion(node)(_encoded(node, value))
    except (OverflowError, UnicodeEncodeError, Unreadable):
        raise _NoDefault from None


def _encoded(node: Scalar, value: Any) -> Any:  # noqa: ANN401 - JSON, and what AvroCursor.raw returns
    """Return what `AvroCursor.raw` would return for a JSON value, but the symbol of an enum."""
    match node.kind, value:
        case ("null", None) | ("boolean", bool()):
            return value
        case _, bool():
            raise _NoDefault
        case "int" | "long", int() if (value if value >= 0 else ~value).bit_length() < _BITS[node.kind]:
            return value
        case "float" | "double", int() | float():
            return struct.pack("<f" if node.kind == "float" else "<d", value)
        case "string", str():
            return value.encode()
        case ("bytes", str()) | ("fixed", str()) if node.width in {-1, len(value)}:
            return value.encode("latin-1")
        case "enum", str() if value in node.symbols:
            return value
        case _:
            raise _NoDefault
