"""Keys and values in each format, and what is extracted from them one by one and in columns."""

from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import Fault, One, extract_one
from dedup.core.framing import SchemaBook
from dedup.core.key_members import KeyFormat
from dedup.core.tracking_id import FieldRule, FirstOfRule, HeaderRule, KeyFieldRule, Part, PartsRule, TrackingId
from tests.property.extract_cases import (
    AVRO,
    AVRO_EVENTS,
    CBOR_EVENTS,
    EVENTS,
    MSGPACK_EVENTS,
    PROTOBUF,
    PROTOBUF_EVENTS,
    SCHEMA_IDS,
)

KEY_NAME = "__key_schema_id"
OTHER = SCHEMA_IDS[1]
"""The ID of a schema that no registry knows, or that nobody can read."""
FORMATS = {
    "json": EVENTS,
    "json_schema": EVENTS,
    "avro": AVRO_EVENTS,
    "protobuf": PROTOBUF_EVENTS,
    "msgpack": MSGPACK_EVENTS,
    "cbor": CBOR_EVENTS,
}
TEXTS = {"avro": AVRO["avro"].schema, "protobuf": PROTOBUF["protobuf"].schema}
PATHS = [("id",), ("a", "id"), ("a", 0, "id"), ("t",), ("number",)]
RULES = [
    lambda of, path: of(path),
    lambda of, path: PartsRule((Part(of(path), True), Part(HeaderRule("h")), Part(of(("id",)), True))),
    lambda of, path: FirstOfRule((HeaderRule("x"), of(path), of(("id",)))),
]


def known(fmt, *, other=None):
    """The schemas of a registry, of which one is unknown or cannot be read."""
    if fmt not in TEXTS:
        return None
    return SchemaBook({SCHEMA_IDS[0]: TEXTS[fmt], OTHER: other, SCHEMA_IDS[2]: TEXTS[fmt]}.get)


def index(fmt):
    return b"\0" if fmt == "protobuf" else b""


def sent(fmt, payload, form):
    """A payload and the headers of its framing, as a value; `as_key` makes a key of it."""
    if payload is None or fmt not in {"json_schema", "avro", "protobuf"}:
        return payload, []
    if form == "header":
        return payload, [("__value_schema_id", SCHEMA_IDS[2] + index(fmt))]
    return SCHEMA_IDS[0] + index(fmt) + payload, []


def as_key(headers):
    return [(KEY_NAME if name == "__value_schema_id" else name, content) for name, content in headers]


def recipes(fmt, rule, path, normalize=(), **more):
    book = known(fmt, **more)
    values = Recipe(TrackingId(rule(FieldRule, path), normalize), fmt=fmt, schema="" if book is None else book)
    keys = TrackingId(rule(KeyFieldRule, path), normalize)
    return values, Recipe(keys, fmt="bytes", keys=KeyFormat(fmt, book))


def both(recipe, keys, values, headers):
    """What is extracted, one by one and in columns, which must be the same."""
    count = len(values)
    fast = Extractor(recipe)(keys, values, headers, range(count))
    slow = [extract_one(recipe, *record) for record in zip(keys, values, headers, range(count), strict=True)]
    for row, one in enumerate(slow):
        assert (one if isinstance(one, Fault) else None) == fast.faults.get(row), (keys[row], values[row])
        assert (one.id if isinstance(one, One) else None) == fast.ids[row], (keys[row], values[row])
    return slow
