"""Parses an Avro schema from a file or a schema registry into the types that it defines.

Source: "Schema Declaration" and "Logical Types" of the Avro specification 1.12.0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import log10
from typing import Any, Final, assert_never

from dedup.core.framing import SchemaRefused, SchemaText, in_reference, linked
from dedup.core.tracking_id import Path

MAX_DEPTH: Final = 200
"""The maximum nesting depth of schemas and values. Without a limit, a recursive schema would allow any depth."""
# Avro's Java library, which registries use, accepts letters of any language in names, and any string as a namespace.
_NAME: Final = re.compile(r"[^\W\d]\w*")
_FULL_NAME: Final = re.compile(r"([^\0-\x20\x7f-\x9f\ud800-\udfff]{1,1000}\.)?[^\W\d]\w{0,1000}")
_MOST_DIGITS: Final = 300
"""The maximum number of digits of integers in a schema, above which they become floating-point numbers."""
_WIDTHS: Final = {
    "null": 0, "boolean": 1, "int": -1, "long": -1, "float": 4, "double": 8, "bytes": -1, "string": -1
}  # fmt: skip
"""Maps each primitive type to the length of its values in bytes, or to -1 if the length depends on the value."""
UNITS: Final = {"millis": 1_000_000, "micros": 1_000, "nanos": 1}
"""Maps each unit in the names of logical types to its length in nanoseconds."""
_LOGICAL: Final = {
    "int": {"date", "time-millis"},
    "long": {"time-micros", *(f"{zone}timestamp-{unit}" for zone in ("", "local-") for unit in UNITS)},
    "bytes": {"decimal", "big-decimal"},
    "fixed": {"decimal", "duration", "uuid"},
    "string": {"uuid"},
}
"""Maps each type to its logical types. As the specification requires, unknown and invalid logical types are ignored."""
_SIZE_OF: Final = {"uuid": 16, "duration": 12}


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
    full_name: str = ""
    """The name of an enum or a fixed with its namespace, or an empty string."""
    aliases: frozenset[str] = frozenset()
    """The full names of writers' types that readers with this type can also read."""

    @property
    def name(self) -> str:
        """The name of the logical type, if any, or the name of the type."""
        return self.logical or self.kind


@dataclass(frozen=True, slots=True)
class Record:
    """A record type. The parser creates the object before its fields, because a record type may contain itself."""

    name: str
    fields: dict[str, Node] = field(default_factory=dict, compare=False, repr=False)
    void: set[str] = field(default_factory=set, compare=False, repr=False)
    """The fields that take no bytes. Readers skip such fields unless they are on a path, because a small schema can
    define very many such fields.
    """
    aliases: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    field_aliases: dict[str, list[str]] = field(default_factory=dict, compare=False, repr=False)
    defaults: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The default values of fields, as JSON values that may not have the type of the field."""

    @property
    def is_void(self) -> bool:
        """Whether the record takes no bytes."""
        return len(self.void) == len(self.fields)


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
            # Only a default value can have so many digits. Python's int() would reject a number with thousands.
            whole = json.loads(text, parse_int=lambda digits: (int if len(digits) <= _MOST_DIGITS else float)(digits))
            return self.node(whole, "", 0)
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
                name, aliases = _full_name(schema, namespace), _aliases(schema, namespace)
                enum = Scalar("enum", symbols=tuple(symbols), full_name=name, aliases=aliases)
                return self._define(schema, namespace, enum)
            case {"type": "fixed", "size": int(size)} if 0 <= size < 1 << 31 and size is not True:
                logical, scale = _logical("fixed", schema, size)
                name, aliases = _full_name(schema, namespace), _aliases(schema, namespace)
                fixed = Scalar("fixed", logical, size, scale=scale, full_name=name, aliases=aliases)
                return self._define(schema, namespace, fixed)
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
        record = Record(_full_name(schema, namespace), aliases=_aliases(schema, namespace))
        self._define(schema, namespace, record)
        for each in fields:
            match each:
                case {"name": str(name), "type": kind} if _NAME.fullmatch(name) and name not in record.fields:
                    record.fields[name] = self.node(kind, record.name.rpartition(".")[0], depth + 1)
                case _:
                    raise SchemaRefused(f"has a field without a type or a name of its own in {record.name}")
            record.field_aliases[name] = _strings(each.get("aliases"))
            if "default" in each:
                record.defaults[name] = each["default"]
            if self._is_void(record.fields[name]):
                record.void.add(name)
        if record.is_void:
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


def _aliases(schema: Mapping[str, Any], namespace: str) -> frozenset[str]:
    own = _full_name(schema, namespace).rpartition(".")[0]
    names = _strings(schema.get("aliases"))
    return frozenset(name if "." in name or not own else f"{own}.{name}" for name in names)


def _strings(names: object) -> list[str]:
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _logical(kind: str, schema: Mapping[str, Any], size: int) -> tuple[str, int]:
    """Return the logical type and the scale, or "" and 0 without a valid logical type."""
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
    """Return the logical type of a type, if any, or the type's kind, such as record."""
    match node:
        case Scalar() | Items():
            return node.name
        case Record():
            return "record"
        case Union():
            return "union"
        case never:
            assert_never(never)
