"""Computes the canonical content of Avro values, either with their own schema or as a pinned schema reads them.

Two different events must never have equal content, because one event would be lost. Therefore, the names of types are
part of the content, although the binary encoding does not contain them. The content of a value is a `TypedValue` with
the full name of the value's record. The same applies to a record, an enum, or a fixed in a union with at least two
branches of these kinds. (A union of null and one record is not such a union.) Without a pinned schema, a field that
takes no bytes is left out, because its value never differs, and a small schema can define very many such fields.

The pinned schema is a reader's schema. Each value is read as "Schema Resolution" of the Avro specification 1.12.0
requires, and has the names and unions of the pinned schema. All fields of the pinned schema are part of the content,
except those of records that take no bytes. The following rules apply where the specification leaves a choice, has no
rule, or could make different values equal:

- A branch of the pinned schema's union that has the type of the value precedes branches to which the value would have
  to be promoted. (The specification takes the first branch that matches, so a value could lose precision even if it
  was written with the pinned schema.)
- No promotion loses precision: a long does not become a float or a double, and an int does not become a float.
- An enum's symbol that the pinned schema lacks does not become the pinned enum's default.
- Two records, enums, or fixed of one union are not read as the same type of the pinned schema. Only the best match, if
  any, is read as this type.
- A logical type of the value must have the same family in the pinned schema: a timestamp remains a timestamp. Units may
  differ, and so may the scales, precisions, and underlying types of decimals. The value is decoded with its own unit or
  scale, so the conversion is exact. A logical type that only the pinned schema has applies to values with the same
  underlying type. The logical type uuid of a string does not matter.
- An alias of a type is its full name. An alias of a field applies only if the writer's record has no field with the
  field's name, and the pinned record has no field with the alias's name.
- The default of a union is a value of the first branch that can have this value. A default of a record may omit fields
  that have defaults.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

from dedup.core.avro import NO_MEMBERS, AvroCursor, AvroReader, Instant, avro_reader, decode_decimal, decode_text
from dedup.core.avro_schema import MAX_DEPTH, UNITS, Items, Node, Record, Scalar, Union, parse_schema
from dedup.core.content_tree import Content, Tree, TypedValue, deeper, encode_content, text_key, without_names
from dedup.core.exact_json import Unreadable
from dedup.core.framing import SchemaRefused, SchemaText, in_pinned
from dedup.core.tracking_id import Path
from dedup.core.varint import Damaged

_MOST_DEFAULTS: Final = 100_000
"""The maximum number of values in all defaults of a schema."""
_MOST_CHARS: Final = 64
"""The maximum length of a name in an error text."""
_BITS: Final = {"int": 32, "long": 64}
_PROMOTIONS: Final = {"int": {"long", "double"}, "float": {"double"}, "string": {"bytes"}, "bytes": {"string"}}
"""Maps each type to the types that can hold all its values."""
_IDENTICAL, _EQUAL, _SIMILAR, _PROMOTED = range(4)
"""The degrees to which a writer's type can match a reader's type, best first."""

_Reading = Callable[[AvroCursor, int], Tree]
"""Reads a value, given its nesting depth."""
_Convert = Callable[[Any], Tree]
"""Converts the result of `AvroCursor.raw`."""
_Symbols = tuple[list[str | None], bool]
"""A writer's symbols, with None for symbols that the reader lacks, and whether the reader has any of the symbols."""

_float: Final = struct.Struct("<f").unpack
_double: Final = struct.Struct("<d").unpack


@lru_cache(maxsize=256)
def avro_content(schema: SchemaText, pinned: SchemaText | None, exclude: tuple[Path, ...]) -> Content:
    """Return the function that computes the content of values with a given schema, without the members to exclude.

    If ``pinned`` is a schema, the function reads each value as that schema requires. The function raises Unreadable for
    the same values as `AvroReader.read`, and for values that have no content or that the pinned schema cannot read.
    Raises SchemaRefused if a schema is not valid.
    """
    writer = parse_schema(schema)
    reader, resolver = _resolver(writer, pinned)
    read = _named(reader.name, resolver.reading(writer, reader, "the value"))
    without = without_names(exclude)
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


def unresolvable(schema: SchemaText, pinned: SchemaText) -> str | None:
    """Return why values with a given schema cannot be read as a pinned schema, or None if each type can be read.

    The reason concerns the first pair of types of records, fields, or items with which no value can be read. Values
    that contain no such record or item may still be readable. A union counts as readable if one of its branches can be
    read. Raises SchemaRefused if a schema is not valid.
    """
    writer = parse_schema(schema)
    reader, resolver = _resolver(writer, pinned)
    check = _Check(resolver)
    return check.fault(writer, reader, "the value") or check.fault_of_records()


def _resolver(writer: Record, pinned: SchemaText | None) -> tuple[Record, _Resolver]:
    """Return the type as which a writer's record is read, and the resolver of this type."""
    if pinned is None:
        return writer, _Resolver({}, pinned=False)
    try:
        reader = parse_schema(pinned)
        return reader, _Resolver(_Defaults(reader).found, pinned=True)
    except SchemaRefused as refused:
        raise in_pinned(refused) from None


class _Resolver:
    """Determines how to read a writer's types as a reader's types, which are the same if no schema is pinned."""

    def __init__(self, defaults: _FoundDefaults, *, pinned: bool) -> None:
        self.defaults: Final = defaults
        self.pinned: Final = pinned
        self._records: Final[dict[tuple[int, int], _RecordReading]] = {}
        self._symbols: Final[dict[tuple[int, int], _Symbols]] = {}

    def reading(self, writer: Node, reader: Node, place: str) -> _Reading:
        """Return how to read a writer's type as a reader's type. ``place`` names the value in error texts."""
        with_names = _has_names(reader)
        if isinstance(writer, Union):
            found = _found(writer.branches, reader, place) if writer is not reader else writer.branches
            pairs = zip(writer.branches, found, strict=True)
            return _union([self._as(branch, each, place, with_names=with_names) for branch, each in pairs])
        found = _found((writer,), reader, place) if writer is not reader else (writer,)
        return self._as(writer, found[0], place, with_names=with_names)

    def _as(self, writer: Node, found: Node | str, place: str, *, with_names: bool) -> _Reading:
        """Return how to read a type as the reader's type ``found``, or how to refuse it for the reason ``found``."""
        if isinstance(found, str):
            return _unresolvable(found)
        if isinstance(writer, Items):
            item = self.reading(writer.item, cast("Items", found).item, f"{place}[]")
            return _array(item) if writer.name == "array" else _map(item)
        if isinstance(writer, Record):
            read = self._record(writer, cast("Record", found))
        else:
            read = self._scalar(cast("Scalar", writer), cast("Scalar", found), place)
        name = _name_of(found)
        return _named(name, read) if with_names and name else read

    def _record(self, writer: Record, reader: Record) -> _Reading:
        pair = (id(writer), id(reader))
        if pair not in self._records:
            self._records[pair] = _RecordReading(self, writer, reader)
        return self._records[pair].read

    def _scalar(self, writer: Scalar, reader: Scalar, place: str) -> _Reading:
        if writer.kind != "enum":
            return _scalar(writer, reader)
        return _enum(writer, self._known_symbols(writer, reader)[0], _lacking_symbol(reader, place))

    def has_symbols(self, writer: Scalar, reader: Scalar) -> bool:
        """Return whether a reader's enum has a symbol of a writer's enum."""
        return self._known_symbols(writer, reader)[1]

    def _known_symbols(self, writer: Scalar, reader: Scalar) -> _Symbols:
        pair = (id(writer), id(reader))
        if pair not in self._symbols:  # a small schema can refer to a large enum very often
            known = frozenset(reader.symbols)
            symbols = [each if each in known else None for each in writer.symbols]
            self._symbols[pair] = symbols, any(each is not None for each in symbols)
        return self._symbols[pair]


class _RecordReading:
    """Reads a writer's record as a reader's record.

    The members are compared only when the first value is read, because a schema may nest its types more deeply than
    Python can recurse, and a record type may contain itself.
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
        resolver, sources = self._resolver, _sources(self._writer, self._reader)
        more = _more(reader, sources)
        lacking = _lacking_default(reader, more, resolver.defaults)
        if lacking is not None:
            self._steps = [(None, _unresolvable(lacking))]
            return self._steps
        if not reader.is_void:
            defaults = {name: resolver.defaults[id(reader), name] for name in more}
            self._defaults = {text_key(name): each.tree for name, each in defaults.items()}
            self._height = max((each.height for each in defaults.values()), default=0)
        for name, node in writer.fields.items():
            target = sources.get(name)
            if name in writer.void and (target is None or reader.is_void or not resolver.pinned):
                continue
            if target is None:
                steps.append((None, _skip(node)))
            else:
                read = resolver.reading(node, reader.fields[target], _place(reader, target))
                steps.append((None if reader.is_void else text_key(target), read))
        self._steps = steps
        return steps


class _Check:
    """Looks for types that cannot be read as types of the pinned schema, without reading a value."""

    def __init__(self, resolver: _Resolver) -> None:
        self._resolver: Final = resolver
        self._due: Final[list[tuple[Record, Record]]] = []
        self._seen: Final[set[tuple[int, int]]] = set()

    def fault(self, writer: Node, reader: Node, place: str) -> str | None:
        """Return why no value of a type can be read, or None. `fault_of_records` checks the record types inside it."""
        branches = writer.branches if isinstance(writer, Union) else (writer,)
        faults = [self._fault_as(*each, place) for each in zip(branches, _found(branches, reader, place), strict=True)]
        return None if None in faults else faults[0]

    def _fault_as(self, writer: Node, found: Node | str, place: str) -> str | None:
        match writer, found:
            case _, str():
                return found
            case Items(item), Items(target):
                return self.fault(item, target, f"{place}[]")
            case Record(), Record() if (id(writer), id(found)) not in self._seen:
                self._seen.add((id(writer), id(found)))
                self._due.append((writer, found))
            case Scalar(kind="enum"), Scalar() if not self._resolver.has_symbols(writer, found):
                return _lacking_symbol(found, place)
            case _:
                pass
        return None

    def fault_of_records(self) -> str | None:
        """Return why a record type that `fault` did not check, or one inside it, cannot be read, or None."""
        for writer, reader in self._due:  # `fault` adds to this list during the loop
            sources = _sources(writer, reader)
            lacking = _lacking_default(reader, _more(reader, sources), self._resolver.defaults)
            if lacking is not None:
                return lacking
            for name, target in sources.items():
                if name in writer.void and reader.is_void:
                    continue
                fault = self.fault(writer.fields[name], reader.fields[target], _place(reader, target))
                if fault is not None:
                    return fault
        return None


def _sources(writer: Record, reader: Record) -> dict[str, str]:
    """Map the writer's name of each field that the reader also has to the reader's name of the field."""
    found = {name: name for name in writer.fields if name in reader.fields}
    for name in reader.fields:
        if name not in writer.fields:
            for alias in reader.field_aliases[name]:
                if alias in writer.fields and alias not in found:
                    found[alias] = name
                    break
    return found


def _more(reader: Record, sources: dict[str, str]) -> list[str]:
    """Return the names of the reader's fields that the writer lacks, in the reader's order."""
    read = set(sources.values())
    return [name for name in reader.fields if name not in read]


def _lacking_default(reader: Record, names: list[str], defaults: _FoundDefaults) -> str | None:
    for name in names:
        if (id(reader), name) not in defaults:
            return f"{_place(reader, name)} is missing, and has no default in the pinned schema"
    return None


def _has_names(node: Node) -> bool:
    """Return whether a type is a union in which the names of types are content."""
    return isinstance(node, Union) and sum(map(bool, map(_name_of, node.branches))) > 1


def _name_of(node: Node) -> str:
    """Return the full name of a record, an enum, or a fixed, or else an empty string."""
    return node.name if isinstance(node, Record) else node.full_name if isinstance(node, Scalar) else ""


def _found(writers: Sequence[Node], reader: Node, place: str) -> list[Node | str]:
    """For each of a writer's types, return the reader's type that matches best, or the reason why no type matches."""
    branches = reader.branches if isinstance(reader, Union) else (reader,)
    best = [_best(writer, branches) for writer in writers]
    ranks: dict[int, list[int]] = {}
    for writer, each in zip(writers, best, strict=True):
        if each is not None and _name_of(writer):
            ranks.setdefault(each[1], []).append(each[0])
    for some in ranks.values():
        some.sort()
    found: list[Node | str] = []
    for writer, each in zip(writers, best, strict=True):
        if each is None:
            found.append(f"{place} is of type {_described(writer)}, not {_described(reader)}")
        elif any(rank <= each[0] for rank in ranks.get(each[1], ())[1:2] if _name_of(writer)):
            match = f"and another type of its union matches {_described(branches[each[1]])}, too"
            found.append(f"{place} is of type {_described(writer)}, {match}")
        else:
            found.append(branches[each[1]])
    return found


def _best(writer: Node, branches: Sequence[Node]) -> tuple[int, int] | None:
    """Find the branch that matches a type best, and return its degree of match and its position."""
    ranked = ((rank, at) for at, branch in enumerate(branches) if (rank := _rank(writer, branch)) is not None)
    return min(ranked, default=None)


def _rank(writer: Node, reader: Node) -> int | None:
    """Return the degree to which two types match, or None if the types do not match."""
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
    family, pinned = _family(writer), _family(reader)
    if family and family != pinned:
        return None
    if writer.kind != reader.kind:
        if family:  # times in int and long, decimals in bytes and fixed
            return _SIMILAR
        return _PROMOTED if reader.kind in _PROMOTIONS.get(writer.kind, ()) and not pinned else None
    if writer.width != reader.width and not family:
        return None
    rank = _name_rank(writer.full_name, reader.full_name, reader.aliases)
    own, other = (writer.name, writer.scale, writer.width), (reader.name, reader.scale, reader.width)
    return rank if rank is None or own == other or writer.kind == "string" else _SIMILAR


def _family(node: Scalar) -> str:
    """Return a field's logical type without its unit, or an empty string if the field has none."""
    return _unit(node)[0] if node.kind != "string" else ""  # a string's only logical type, uuid, does not matter


def _unit(node: Scalar) -> tuple[str, int]:
    """Return a logical type without its unit, and the length of the unit in nanoseconds."""
    name, _, unit = node.logical.rpartition("-")
    return (name, UNITS[unit]) if unit in UNITS else (node.logical, 1)


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


def _named(name: str, part: _Reading) -> _Reading:
    def read(cursor: AvroCursor, depth: int) -> Tree:
        return TypedValue(name, part(cursor, depth))

    return read


def _scalar(writer: Scalar, reader: Scalar) -> _Reading:
    match writer.kind:
        case "int" | "long":
            take: Callable[[AvroCursor], Any] = AvroCursor.varint
        case "string" | "bytes":
            take = AvroCursor.part
        case _:
            take = lambda cursor: cursor.raw(writer)  # noqa: E731
    if _family(writer):
        convert = _conversion(writer)  # with the unit or scale with which the value was written
    else:
        convert = _promotion(writer.kind, reader.kind) if writer.kind != reader.kind else _conversion(reader)

    def read(cursor: AvroCursor, _depth: int) -> Tree:
        return convert(take(cursor))

    def read_unchanged(cursor: AvroCursor, _depth: int) -> Tree:
        return cast("Tree", take(cursor))

    return read_unchanged if convert is _unchanged else read


def _lacking_symbol(reader: Scalar, place: str) -> str:
    return f"{place} has a symbol that {_described(reader)} lacks"


def _enum(writer: Scalar, symbols: Sequence[str | None], lacking: str) -> _Reading:
    unknown = _unresolvable(lacking)

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
        case _, "double":
            return _exact_double
        case _, "string":
            return decode_text
        case _:
            return _unchanged


def _exact_double(raw: int) -> float:
    """Convert an int. Raises Unreadable if the int has more significant bits than a double."""
    double = float(raw)
    if double != raw:
        raise Unreadable("number_out_of_range", "an int of the value has more than 32 bits")
    return double


def _conversion(node: Scalar) -> _Convert:
    """Return a function that converts the result of `AvroCursor.raw` for a type to the type's canonical form."""
    if node.kind in _CONVERSIONS:
        return _CONVERSIONS[node.kind]
    name, factor = _unit(node)
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


class _Default(NamedTuple):
    """The default of a field."""

    tree: Tree
    height: int
    """The nesting depth: 0 for a scalar."""


_FoundDefaults = dict[tuple[int, str], _Default]
"""Maps the `id` of a record type and the name of a field to the field's default."""


def _height(tree: Tree) -> int:
    height, level = 0, _inside(tree)
    while level:
        height, level = height + 1, [inner for each in level for inner in _inside(each)]
    return height


def _inside(tree: Tree) -> Sequence[Tree]:
    while isinstance(tree, TypedValue):
        tree = tree.content
    return list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else ()


class _NoDefault(Exception):
    """Raised if a JSON value cannot be the default of a type."""


class _Defaults:
    """Converts all defaults of a reader's schema. Raises SchemaRefused if a default does not have its field's type."""

    def __init__(self, schema: Record) -> None:
        self.found: Final[_FoundDefaults] = {}
        self._left = _MOST_DEFAULTS
        due, seen = [schema], {id(schema)}
        while due:
            record = due.pop()
            for name, node in record.fields.items():
                for each in _records_in(node):
                    if id(each) not in seen:
                        seen.add(id(each))
                        due.append(each)
                if name in record.defaults:
                    tree = self._checked(record, name)
                    self.found[id(record), name] = _Default(tree, _height(tree))

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
            case Union(), _:
                return self._first(node, value, depth)
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

    def _first(self, union: Union, value: Any, depth: int) -> Tree:  # noqa: ANN401 - JSON
        for branch in union.branches:
            try:
                tree = self._tree(branch, value, depth)
            except _NoDefault:
                continue
            name = _name_of(branch)
            return TypedValue(name, tree) if name and _has_names(union) else tree
        raise _NoDefault


def _records_in(node: Node) -> list[Record]:
    """Return the record types in a type, without the members of the records."""
    match node:
        case Union(branches):
            return [each for branch in branches for each in _records_in(branch)]
        case Items(item):
            return _records_in(item)
        case Record():
            return [node]
        case _:
            return []


def _default_key(name: str) -> bytes:
    try:
        return text_key(name)
    except UnicodeEncodeError:
        raise _NoDefault from None


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
    """Return the result of `AvroCursor.raw` for a JSON value, except that an enum's value is its symbol."""
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
