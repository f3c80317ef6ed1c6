"""Apicurio's schema registry, and values as the serializers of confluent-kafka write them."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Iterable, Sequence
from urllib.parse import quote

import fastavro

from dedup.embedded.registry_node import EmbeddedRegistry
from tests.protoc import compiled, described

FIELDS = [{"name": "id", "type": "string"}, {"name": "n", "type": "int"}]
FIRST = {
    "avro": json.dumps({"type": "record", "name": "Order", "fields": FIELDS}),
    "protobuf": """syntax = "proto3"; package shop; import "google/protobuf/timestamp.proto";
        message Order { string id = 1; int32 n = 2; google.protobuf.Timestamp at = 3; }""",
}
SECOND = {
    "avro": json.dumps(
        {
            "type": "record",
            "name": "Order",
            "fields": [{"name": "note", "type": ["null", "string"], "default": None}, *FIELDS],
        }
    ),
    "protobuf": """syntax = "proto3"; package shop;
        message Note { string text = 1; }
        message Order { Note note = 4; int32 n = 2; string id = 1; }""",
}


FILES = {
    "avro": {
        "shop.Kind": json.dumps({"type": "enum", "name": "shop.Kind", "symbols": ["A", "B"]}),
        "shop.Head": json.dumps(
            {
                "type": "record",
                "name": "shop.Head",
                "fields": [{"name": "kind", "type": "shop.Kind"}, {"name": "id", "type": "string"}],
            }
        ),
    },
    "protobuf": {
        "shop/kind.proto": 'syntax = "proto3"; package shop; enum Kind { A = 0; B = 1; }',
        "shop/head.proto": 'syntax = "proto3"; package shop; import public "shop/kind.proto"; message Head { Kind kind = 1; string id = 2; }',
    },
}
"""Schemas that others refer to, by name. The second one of a format refers to the first one."""
LINKED = {
    "avro": json.dumps(
        {
            "type": "record",
            "name": "Order",
            "fields": [{"name": "kind", "type": "shop.Kind"}, {"name": "head", "type": "shop.Head"}, *FIELDS[1:]],
        }
    ),
    "protobuf": """syntax = "proto3"; package shop; import "shop/head.proto";
        message Order { Kind kind = 1; Head head = 2; int32 n = 3; }""",
}
"""Schemas of orders that refer to those in `FILES`."""


def linked(registry: EmbeddedRegistry, fmt: str, topic: str, numbers: Iterable[int]) -> list[bytes]:
    """Return orders whose schema refers to a subject for each of `FILES`, after all of them were registered."""
    references: list[dict[str, object]] = []
    for name, text in FILES[fmt].items():
        register(registry, f"{topic}-{name}", text, references)
        references.append({"name": name, "subject": f"{topic}-{name}", "version": 1})
    head = references if fmt == "avro" else references[1:]  # Avro refers to each type, and Protobuf to imported files
    prefix = b"\0" + register(registry, f"{topic}-value", LINKED[fmt], head).to_bytes(4, "big")
    orders = [{"kind": "B", "head": {"kind": "A", "id": f"o-{number}"}, "n": number} for number in numbers]
    if fmt == "protobuf":
        order = compiled(LINKED[fmt], "Order", FILES[fmt])
        return [prefix + b"\0" + order(**each).SerializeToString() for each in orders]
    types: dict[str, object] = {}
    for text in FILES[fmt].values():
        fastavro.parse_schema(json.loads(text), named_schemas=types)
    parsed = fastavro.parse_schema(json.loads(LINKED[fmt]), named_schemas=types)
    return [prefix + written(parsed, each) for each in orders]


def register(registry: EmbeddedRegistry, subject: str, schema: str, references: Sequence[object] = ()) -> int:
    """Register a schema of Avro, or else of Protobuf, and return its ID."""
    return registered(registry, subject, schema, "AVRO" if schema.startswith("{") else "PROTOBUF", references)


def registered(
    registry: EmbeddedRegistry, subject: str, schema: str, kind: str, references: Sequence[object] = ()
) -> int:
    """Register a schema as a subject's newest version, and return its ID."""
    said = {"schema": schema, "schemaType": kind, "references": references}
    headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
    url = f"{registry.url}/subjects/{quote(subject, safe='')}/versions"
    request = urllib.request.Request(url, json.dumps(said).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["id"])


def written(parsed: object, record: object) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, parsed, record)
    return stream.getvalue()


def serialized(
    registry: EmbeddedRegistry, schema: str, topic: str, numbers: Iterable[int], *, of: str = "value"
) -> list[bytes]:
    """Return orders as confluent-kafka's serializers write them, after the schema was registered as they do it.

    ``of``: value or key, which are registered under different subjects.
    """
    is_avro = schema.startswith("{")
    sent = schema
    if schema == SECOND["protobuf"]:  # Java's serializer registers text, and Python's an encoded descriptor
        sent = base64.b64encode(described(schema).file[-1].SerializeToString()).decode()
    schema_id = registered(registry, f"{topic}-{of}", sent, "AVRO" if is_avro else "PROTOBUF")
    prefix = b"\0" + schema_id.to_bytes(4, "big")
    if not is_avro:
        order = compiled(schema, "Order")
        index = list(order.DESCRIPTOR.file.message_types_by_name).index("Order")
        prefix += bytes((2, 2 * index)) if index else b"\0"
        return [prefix + order(id=f"o-{number}", n=number).SerializeToString() for number in numbers]
    parsed = fastavro.parse_schema(json.loads(schema))
    return [prefix + written(parsed, {"id": f"o-{number}", "n": number}) for number in numbers]
