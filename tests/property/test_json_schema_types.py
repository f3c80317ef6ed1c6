"""The types that JSON Schema allows for a member are never fewer than a validator accepts."""

from __future__ import annotations

import jsonschema
from hypothesis import example, given
from hypothesis import strategies as st

from dedup.core.tracking_id import parse_path
from tests.unit.core.test_json_schema import ANY, types

NAMES = st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array"])
LEAVES = st.one_of(
    st.booleans(),
    st.builds(lambda name: {"type": name}, NAMES),
    st.builds(lambda names: {"type": names}, st.lists(NAMES, min_size=1, max_size=3, unique=True)),
    st.builds(lambda value: {"const": value}, st.sampled_from([None, "x", 1, 1.5, [1], {"a": 1}])),
    st.just({"$ref": "#/$defs/d"}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries({}, optional={"properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2), "additionalProperties": inner, "type": NAMES}),
        st.fixed_dictionaries({}, optional={"prefixItems": st.lists(inner, min_size=1, max_size=2), "items": inner}),
        *(st.builds(lambda each, name=name: {name: each}, st.lists(inner, min_size=1, max_size=2)) for name in ("allOf", "anyOf", "oneOf")),
    ),
    max_leaves=6,
)  # fmt: skip
VALUES = st.recursive(
    st.sampled_from([None, True, "x", 1, 1.5]),
    lambda inner: st.one_of(st.dictionaries(st.sampled_from("ab"), inner), st.lists(inner, max_size=2)),
    max_leaves=4,
)
KINDS = {bool: "boolean", str: "string", int: "integer", float: "number", dict: "object", list: "array"}


@given(SCHEMAS, SCHEMAS, VALUES, st.sampled_from(["a", "b", "a.b", "a[0]", "[1]"]))
@example({"properties": {"a": {"type": "object"}}}, True, {"a": {}}, "a")
def test_what_a_validator_accepts_is_never_excluded(schema, definition, value, path):
    whole = {**schema, "$defs": {"d": definition}} if isinstance(schema, dict) else schema
    try:
        jsonschema.Draft202012Validator(whole).validate(value)
    except (jsonschema.ValidationError, RecursionError):  # `$ref` may lead back to itself without an end
        return
    here = value
    for step in parse_path(path):
        fits = isinstance(here, dict) if isinstance(step, str) else isinstance(here, list)
        if not fits or (step not in here if isinstance(step, str) else step >= len(here)):
            return
        here = here[step]
    found = types(whole, path)
    assert here is None or found == ANY or {KINDS[type(here)], "number" if type(here) is int else ""} & found.keys()
