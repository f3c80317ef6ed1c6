"""The events of workload W1 in other formats; JSON Schema, Avro, and Protobuf are framed as for a schema registry."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import cbor2
import fastavro
import msgspec

from tests.protoc import compiled

Headers = list[tuple[str, str | bytes | None]]
_COLUMNS: Final = ("event_id", "user", "ts", "padding")
_SCHEMA_ID: Final = 7
_FRAME: Final = b"\0" + _SCHEMA_ID.to_bytes(4, "big")
_FIRST_MESSAGE: Final = b"\0"
"""The message indexes of a Protobuf value whose type is the first one of its schema."""
_ODD_EVERY: Final = 100
"""In the form `odd`, one event among so many has an escaped letter in a name, and so can not be read in columns."""
_AVRO: Final = json.dumps(
    {
        "type": "record",
        "name": "Event",
        "fields": [{"name": name, "type": "long" if name == "ts" else "string"} for name in _COLUMNS],
    }
)
_PROTOBUF: Final = """syntax = "proto3";
message Event { string event_id = 1; string user = 2; int64 ts = 3; string padding = 4; }
"""
SOURCES: Final[Mapping[str, Mapping[str, Any]]] = {
    "json": {"format": "json"},
    "json_schema": {"format": "json_schema", "schema_id": "prefix"},
    "avro": {"format": "avro", "schema_id": "prefix"},
    "protobuf": {"format": "protobuf", "schema_id": "prefix"},
    "msgpack": {"format": "msgpack"},
    "cbor": {"format": "cbor"},
    "csv": {"format": "csv", "columns": list(_COLUMNS)},
    "headers": {"format": "json"},
    "odd": {"format": "json"},
    "backlog": {"format": "json"},
}
"""Maps each form of the workload to what a topology's `source` says of it."""


def schema_settings(form: str, directory: Path) -> dict[str, str]:
    """Write the schema of a form, if it needs one, to ``directory``, and return the settings that name it."""
    schema = {"avro": _AVRO, "protobuf": _PROTOBUF}.get(form)
    if schema is None:
        return {}
    schemas = directory / "schemas"
    schemas.mkdir()
    (schemas / f"{_SCHEMA_ID}.json").write_text(json.dumps({"schema": schema}), encoding="utf-8")
    return {"schema_registry.directory": str(schemas)}


def headers_of(form: str, event_id: bytes) -> Headers:
    """Return the headers of an event: in the form `headers` the two that traced services send, otherwise none."""
    if form != "headers":
        return []
    trace = event_id.replace(b"-", b"")
    return [("traceparent", b"00-%b-%b-01" % (trace, trace[:16])), ("content-type", b"application/json")]


def encoder(form: str) -> Callable[[bytes], bytes]:
    """Return a function that converts a JSON value of the workload to the given form."""
    match form:
        case "json" | "headers" | "backlog":
            return lambda value: value
        case "odd":
            return lambda value: value.replace(b'"user"', b'"us\\u0065r"') if crc32(value) % _ODD_EVERY == 0 else value
        case "json_schema":
            return lambda value: _FRAME + value
        case "avro":
            parsed = fastavro.parse_schema(json.loads(_AVRO))
            return lambda value: _FRAME + _in_avro(parsed, json.loads(value))
        case "protobuf":
            message = compiled(_PROTOBUF, "Event")
            return lambda value: _FRAME + _FIRST_MESSAGE + bytes(message(**json.loads(value)).SerializeToString())
        case "msgpack":
            return lambda value: msgspec.msgpack.encode(json.loads(value))
        case "cbor":
            return lambda value: cbor2.dumps(json.loads(value))
        case "csv":
            return lambda value: _in_csv(json.loads(value))
        case _:
            raise ValueError(f"no form {form}; there are {', '.join(SOURCES)}")


def _in_avro(schema: Any, event: Mapping[str, Any]) -> bytes:  # noqa: ANN401  as fastavro has it
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, schema, event)
    return stream.getvalue()


def _in_csv(event: Mapping[str, Any]) -> bytes:
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow([event[name] for name in _COLUMNS])
    return row.getvalue().encode()
