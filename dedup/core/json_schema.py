"""Finds the types that a member of a value can have according to a JSON Schema.

The result is "any type" wherever this module does not evaluate the schema, so a type that is not in the result is
impossible. The module evaluates boolean schemas, `type`, `enum`, `const`, `$ref` within the document, `allOf`, `anyOf`,
`oneOf`, `properties`, `additionalProperties`, `items`, `prefixItems`, and `additionalItems`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final
from urllib.parse import unquote

from dedup.core.event_time import FieldTime
from dedup.core.framing import MOST_SCHEMA_CHARS, SchemaRefused
from dedup.core.tracking_id import Path

_FRACTION: Final = "fraction"
_NUMBER: Final = frozenset({"integer", _FRACTION})
_ANY: Final = frozenset({"null", "boolean", "string", "array", "object"}) | _NUMBER
_NONE: Final = frozenset[str]()
_TYPES: Final = {**{name: frozenset({name}) for name in _ANY - {_FRACTION}}, "number": _NUMBER}
_CONTAINERS: Final = frozenset({"array", "object"})
_POSITION: Final = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)
_DEEPEST: Final = 64
"""The number of nested schemas and references after which a member is assumed to have any type."""


def json_types(text: str, path: Path, time: FieldTime | None, *, containers: bool = False) -> dict[str, bool]:
    """Return the non-null types that the member at a path can have, each mapped to True if the type is unusable.

    The result is empty if the schema allows no such member. A type is unusable if it cannot be an ID or, if ``time`` is
    given, an event time. An ID takes objects and arrays only if ``containers`` is true. A member that may have any type
    has only the type "any", which is usable. Raises SchemaRefused if the text is not a JSON Schema.
    """
    if len(text) > MOST_SCHEMA_CHARS:
        raise SchemaRefused(f"has {len(text):,} characters, more than {MOST_SCHEMA_CHARS:,}")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise SchemaRefused("is not JSON") from None
    if not isinstance(schema, dict | bool):
        raise SchemaRefused("is neither a JSON object nor true or false")
    found = _Types(schema).at(schema, path, 0)
    if found == _ANY:
        return {"any": False}
    names = found - {"null"}
    if _FRACTION in names:
        names = (names - _NUMBER) | {"number"}
    return {name: _is_refused(name, time, containers=containers) for name in names}


def _is_refused(name: str, time: FieldTime | None, *, containers: bool) -> bool:
    if time is None:
        return name in _CONTAINERS and not containers
    return name != "string" if time.unit == "rfc3339" else name not in {"integer", "number"}


class _Types:
    def __init__(self, root: Any) -> None:  # noqa: ANN401 - any JSON value
        self._root: Final = root
        self._known: Final[dict[tuple[int, int], frozenset[str]]] = {}

    def at(self, schema: Any, path: Path, depth: int) -> frozenset[str]:  # noqa: ANN401 - any JSON value
        """Return a superset of the types that the member at a path can have."""
        if schema is False:
            return _NONE
        if not isinstance(schema, dict) or depth > _DEEPEST or self._has_own_base(schema):
            return _ANY
        key = (id(schema), len(path))
        if key not in self._known:
            self._known[key] = _ANY  # for a schema that refers to itself
            self._known[key] = self._found(schema, path, depth + 1)
        return self._known[key]

    def _has_own_base(self, schema: dict[str, Any]) -> bool:
        """Return whether references in a schema may be relative to the schema itself rather than to the document."""
        return schema is not self._root and any(isinstance(schema.get(name), str) for name in ("$id", "id"))

    def _found(self, schema: dict[str, Any], path: Path, depth: int) -> frozenset[str]:
        if "$ref" in schema:  # Older versions of JSON Schema ignore all other keywords next to a reference.
            return self.at(self._referred(schema["$ref"]), path, depth)
        found = self._member(schema, path, depth) if path else _declared(schema)
        for each in _schemas(schema.get("allOf")):
            found &= self.at(each, path, depth)
        for name in ("anyOf", "oneOf"):
            if choices := _schemas(schema.get(name)):
                found &= _NONE.union(*(self.at(each, path, depth) for each in choices))
        return found

    def _member(self, schema: dict[str, Any], path: Path, depth: int) -> frozenset[str]:
        step, rest = path[0], path[1:]
        if ("object" if isinstance(step, str) else "array") not in _declared(schema):
            return _NONE
        inner = _property(schema, step) if isinstance(step, str) else _element(schema, step)
        return self.at(inner, rest, depth)

    def _referred(self, reference: object) -> Any:  # noqa: ANN401 - any JSON value
        """Return the schema at a JSON pointer within the document, or True, which allows any value."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return True
        here = self._root
        for step in unquote(reference).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(here, list) and _POSITION.fullmatch(name) and int(name) < len(here):
                here = here[int(name)]
            elif isinstance(here, dict) and name in here and not self._has_own_base(here):
                here = here[name]
            else:
                return True
        return here


def _declared(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema's own keywords allow."""
    found = _ANY
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= _NONE.union(*(_TYPES.get(name, _ANY) if isinstance(name, str) else _ANY for name in names))
    if isinstance(schema.get("enum"), list):
        found &= _NONE.union(*map(_types_of, schema["enum"]))
    if "const" in schema:
        found &= _types_of(schema["const"])
    return found


def _types_of(value: object) -> frozenset[str]:
    match value:
        case None:
            return _TYPES["null"]
        case bool():
            return _TYPES["boolean"]
        case int() | float():  # 1 and 1.0 are equal in JSON Schema
            return _NUMBER
        case str():
            return _TYPES["string"]
        case list():
            return _TYPES["array"]
        case _:
            return _TYPES["object"]


def _schemas(written: object) -> list[Any]:
    return written if isinstance(written, list) else []


def _property(schema: dict[str, Any], name: str) -> Any:  # noqa: ANN401 - any JSON value
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    # Python's regular expressions differ from those of JSON Schema, so assume that a pattern matches any name.
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _element(schema: dict[str, Any], index: int) -> Any:  # noqa: ANN401 - any JSON value
    """Return the schema of an element. Newer versions of JSON Schema call a list of schemas `prefixItems`."""
    items, rest = schema.get("prefixItems"), schema.get("items", True)
    if isinstance(rest, list):
        items, rest = rest, schema.get("additionalItems", True)
    first = _schemas(items)
    return first[index] if index < len(first) else rest
