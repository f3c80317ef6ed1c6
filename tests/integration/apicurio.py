"""Apicurio's schema registry, and values as the serializers of confluent-kafka write them."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterable

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


def registered(registry: EmbeddedRegistry, subject: str, schema: str, kind: str) -> int:
    """Register a schema as a subject's newest version, and return its ID."""
    body = json.dumps({"schema": schema, "schemaType": kind}).encode()
    headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
    request = urllib.request.Request(f"{registry.url}/subjects/{subject}/versions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["id"])


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
    prefix, made = b"\0" + schema_id.to_bytes(4, "big"), []
    if not is_avro:
        order = compiled(schema, "Order")
        index = list(order.DESCRIPTOR.file.message_types_by_name).index("Order")
        prefix += bytes((2, 2 * index)) if index else b"\0"
        return [prefix + order(id=f"o-{number}", n=number).SerializeToString() for number in numbers]
    parsed = fastavro.parse_schema(json.loads(schema))
    for number in numbers:
        stream = io.BytesIO()
        stream.write(prefix)
        fastavro.schemaless_writer(stream, parsed, {"id": f"o-{number}", "n": number})
        made.append(stream.getvalue())
    return made
