"""The types that JSON Schema allows for a member."""

from __future__ import annotations

import json

import pytest

from dedup.core.event_time import FieldTime, TimeUnit
from dedup.core.framing import SchemaRefused
from dedup.core.json_schema import json_types
from dedup.core.tracking_id import parse_path

ANY = {"any": False}
NESTED = {"type": "object", "properties": {"id": {"type": "string"}}, "additionalProperties": False}


def types(
    schema: object, path: str = "a", unit: TimeUnit | None = None, *, containers: bool = False
) -> dict[str, bool]:
    time = None if unit is None else FieldTime(parse_path(path), unit)
    return json_types(json.dumps(schema), parse_path(path), time, containers=containers)


def of_a(schema: object) -> dict[str, object]:
    return {"type": "object", "properties": {"a": schema}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "string"}, {"string": False}),
        ({"type": ["string", "null"]}, {"string": False}),
        ({"type": "integer"}, {"integer": False}),
        ({"type": "number"}, {"number": False}),
        ({"type": ["number", "boolean", "integer"]}, {"number": False, "boolean": False}),
        ({"type": "object"}, {"object": True}),
        ({"type": ["string", "array"]}, {"string": False, "array": True}),
        ({"type": "null"}, {}),
        ({"type": ["null", "boolean", "string", "array", "object", "number"]}, ANY),
        ({"type": "any"}, ANY),  # of an older version
        ({}, ANY),
        (True, ANY),
        (False, {}),
        (7, ANY),
        ({"const": "x"}, {"string": False}),
        ({"enum": ["x", 1.0, True, [], {}]}, {"string": False, "number": False, "boolean": False} | dict.fromkeys(("array", "object"), True)),
        ({"type": "string", "enum": ["x", 1]}, {"string": False}),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, {"string": False, "object": True}),
        ({"oneOf": [{"type": "array"}, {"type": "object"}], "type": ["object", "string"]}, {"object": True}),
        ({"allOf": [{"type": ["string", "object"]}, {"type": ["object", "array"]}]}, {"object": True}),
        ({"anyOf": []}, ANY),
        ({"$ref": "#/$defs/id"}, {"object": True}),
        ({"$ref": "#/$defs/id", "type": "string"}, {"object": True}),
        ({"$ref": "#/$defs/a~1b~0%20c"}, {"string": False}),
        ({"$ref": "#/$defs/several/anyOf/1"}, {"object": True}),
        ({"$ref": "#/$defs/several/anyOf/2"}, ANY),
        ({"$ref": "#/$defs/gone"}, ANY),
        ({"$ref": "#/$defs/own/properties/x"}, ANY),
        ({"$ref": "other.json"}, ANY),
        ({"$ref": "#anchor"}, ANY),
        ({"$ref": "#/$defs/loop"}, ANY),
        ({"$id": "other", "type": "object"}, ANY),  # references below it would be relative to it
    ],
)  # fmt: skip
def test_the_types_of_a_member(schema, found):
    defs = {
        "id": {"type": "object"},
        "a/b~ c": {"type": "string"},
        "several": {"anyOf": [{"type": "string"}, {"type": "object"}]},
        "own": {"$id": "own", "properties": {"x": {"type": "object"}}},
        "loop": {"$ref": "#/$defs/loop"},
    }
    assert types({**of_a(schema), "$defs": defs}) == found


@pytest.mark.parametrize(
    ("schema", "path", "found"),
    [
        (of_a({}), "b", {}),
        ({"properties": {"a": {}}}, "b", ANY),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "object"}}, "b", {"object": True}),
        ({"patternProperties": {"^b": {"type": "string"}}, "additionalProperties": False}, "b", ANY),
        ({"type": "string"}, "a", {}),
        ({"type": "array"}, "a", {}),
        (of_a(NESTED), "a.id", {"string": False}),
        (of_a(NESTED), "a.x", {}),
        (of_a({"oneOf": [NESTED, {"type": "string"}]}), "a.id", {"string": False}),
        (of_a({"oneOf": [NESTED, {"type": "string"}]}), "a.x", {}),
        (of_a({"oneOf": [NESTED, {"type": "object"}]}), "a.x", ANY),
        ({"allOf": [NESTED, {"properties": {"x": {}}}]}, "x", {}),
        (of_a({"type": "array", "items": {"type": "string"}}), "a[3]", {"string": False}),
        (of_a({"items": [{"type": "object"}], "additionalItems": False}), "a[0]", {"object": True}),
        (of_a({"items": [{"type": "object"}], "additionalItems": False}), "a[1]", {}),
        (of_a({"prefixItems": [{"type": "object"}], "items": {"type": "string"}}), "a[0]", {"object": True}),
        (of_a({"prefixItems": [{"type": "object"}], "items": {"type": "string"}}), "a[1]", {"string": False}),
        (of_a({"type": "object"}), "a[0]", {}),
        ({"$ref": "#/definitions/o", "definitions": {"o": NESTED}}, "id", {"string": False}),
        ({"$id": "https://shop.example/o", **NESTED}, "x", {}),
        ({"properties": {"next": {"$ref": "#"}}, "additionalProperties": False}, "next.next.x", {}),
        ({"properties": {"next": {"$ref": "#"}}}, ".".join(["next"] * 80 + ["x"]), ANY),
    ],
)
def test_where_a_path_leads(schema, path, found):
    assert types(schema, path) == found


def test_what_each_use_of_a_member_takes():
    schema = of_a({"type": ["string", "integer", "object"]})
    assert types(schema) == {"string": False, "integer": False, "object": True}
    assert types(schema, containers=True) == {"string": False, "integer": False, "object": False}
    assert types(schema, unit="rfc3339") == {"string": False, "integer": True, "object": True}
    assert types(schema, unit="ms") == {"string": True, "integer": False, "object": True}


@pytest.mark.parametrize("text", ["", "syntax = 'proto3';", "[" * 100_000, "9" * 5_000, "[]", '"x"'])
def test_what_is_no_json_schema(text):
    with pytest.raises(SchemaRefused):
        json_types(text, ("a",), None)


def test_a_schema_with_many_ways_to_the_same_place_takes_one_look_at_each():
    both = {"anyOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/0"}]}
    defs: dict[str, object] = {str(at): json.loads(json.dumps(both).replace("/0", f"/{at + 1}")) for at in range(25)}
    assert types({**of_a(both), "$defs": {**defs, "25": {"type": "object"}}}) == {"object": True}
