"""Nanoseconds per record of the extractor, per rule: batches of 4,000 records of about 200 bytes.

Then, how many times as long a batch takes if some of its records are odd: they must be read one by one.

python bench/extract.py
"""

from __future__ import annotations

import base64
import io
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import process_time

import cbor2
import fastavro
import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from dedup.core.csv_row import CsvLayout
from dedup.core.event_time import EventTime, FieldTime, RecordTime
from dedup.core.extract import compile_extractor
from dedup.core.extract_one import Recipe, extract_one
from dedup.core.formats import Schema
from dedup.core.tracking_id import (
    ContentRule,
    FieldRule,
    FieldsRule,
    HeaderRule,
    KeyRule,
    RawContentRule,
    Rule,
    SchemaFile,
    TrackingId,
)

COUNT = 4_000
ROUNDS = 15
FLIGHT = ("year", "month", "day", "carrier", "flight", "origin", "sched_dep_time")


def event(number: int) -> dict[str, object]:
    return {
        "event_id": str(uuid.uuid4()),
        "user": f"user-{number % 997}",
        "ts": 1_700_000_000_000 + number,
        "number": 7_000_000_000 + number,
        "order": f"order-{number:08}",
        "page": "/catalogue/shoes/42",
    }


def flight(number: int) -> dict[str, object]:
    parts = (2013, number % 12 + 1, number % 28 + 1, ("UA", "AA", "B6")[number % 3], number % 3000, "EWR", 515)
    return dict(zip(FLIGHT, parts, strict=True)) | {"dest": "IAH", "air_time": 227, "distance": 1400, "hour": 5}


def timed(event_time: str) -> list[bytes]:
    return [json.dumps(event(number) | {"at": event_time % (number % 1000)}).encode() for number in range(COUNT)]


def measure(
    name: str, rule: Rule, values: list[bytes], time: EventTime, *, fmt: str = "json", schema: Schema = ""
) -> None:
    extractor = compile_extractor(TrackingId(rule), time, fmt=fmt, fingerprint=False, schema=schema)  # type: ignore[arg-type]
    keys = [str(uuid.uuid4()).encode() for _ in values]
    headers = [[("trace", b"x"), ("id", key)] for key in keys]
    times_ms = list(range(len(values)))
    best = float("inf")
    for _ in range(ROUNDS):
        started = process_time()
        found = extractor(keys, values, headers, times_ms)
        best = min(best, process_time() - started)
    assert not found.faults, found.faults[next(iter(found.faults))]
    started = process_time()
    for row in range(200):
        recipe = Recipe(TrackingId(rule), time, fmt, schema=schema)  # type: ignore[arg-type]
        extract_one(recipe, keys[row], values[row], headers[row], row)
    slow = (process_time() - started) / 200
    print(f"{name:44s}{best / len(values) * 1e9:9.0f}{slow * 1e9:9.0f}")


def yardstick(values: list[bytes]) -> None:
    """What this machine takes, now, for the least there is to do: 183 ns where the design's figures are from."""

    class OneField(msgspec.Struct):
        event_id: str

    decode = msgspec.json.Decoder(OneField).decode
    best = float("inf")
    for _ in range(ROUNDS):
        started = process_time()
        for value in values:
            decode(value)
        best = min(best, process_time() - started)
    print(f"{'yardstick: msgspec, one field, no checks':44s}{best / len(values) * 1e9:9.0f}")


def avro(names: dict[str, object]) -> str:
    """Return the schema of a record with these fields. The field ts is a timestamp; every second text may be null."""
    fields: list[dict[str, object]] = []
    for at, (name, kind) in enumerate(names.items()):
        of: object = "string" if isinstance(kind, str) else "long"
        if isinstance(kind, str) and at % 2:
            of = ["null", "string"]
        fields.append(
            {"name": name, "type": {"type": "long", "logicalType": "timestamp-millis"} if name == "ts" else of}
        )
    return json.dumps({"type": "record", "name": "Event", "fields": fields})


def in_avro(schema: str, values: list[dict[str, object]]) -> list[bytes]:
    """Return the values in Avro, and print how long fastavro takes to read them."""
    parsed = fastavro.parse_schema(json.loads(schema))
    made = []
    for value in values:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, value)
        made.append(stream.getvalue())
    best = float("inf")
    for _ in range(ROUNDS):
        started = process_time()
        for each in made:
            fastavro.schemaless_reader(io.BytesIO(each), parsed)
        best = min(best, process_time() - started)
    print(f"{'fastavro, the whole record':44s}{'':9s}{best / len(values) * 1e9:9.0f}")
    return made


def in_protobuf(values: list[dict[str, object]]) -> tuple[str, list[bytes]]:
    """Return a schema and the values in Protobuf, and print how long protobuf takes to read them."""
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", syntax="proto2")  # fields have presence
    message = file.message_type.add(name="Event")
    for number, (name, kind) in enumerate(values[0].items(), 1):
        message.field.add(name=name, number=number, label=1, type=9 if isinstance(kind, str) else 3)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("Event"))
    whole = [made(**value).SerializeToString() for value in values]
    best = float("inf")
    for _ in range(ROUNDS):
        started = process_time()
        for each in whole:
            made.FromString(each)
        best = min(best, process_time() - started)
    print(f"{'protobuf, the whole message, no member read':44s}{'':9s}{best / len(values) * 1e9:9.0f}")
    return base64.b64encode(file.SerializeToString()).decode(), whole


def memberwise(plain: list[dict[str, object]], rule: Rule) -> None:
    """Measure the formats whose values say their own types, and how long their libraries take for a whole value."""
    event_id, ts = FieldRule(("event_id",)), FieldTime(("ts",), "ms")
    flights = [flight(number) for number in range(COUNT)]
    for fmt, pack, unpack in (
        ("msgpack", msgspec.msgpack.encode, msgspec.msgpack.decode),
        ("cbor", cbor2.dumps, cbor2.loads),
    ):
        values = list(map(pack, plain))
        measure(f"field uuid, field time ms, {fmt}", event_id, values, ts, fmt=fmt)
        measure(f"fields of a flight (7), {fmt}", rule, list(map(pack, flights)), RecordTime(), fmt=fmt)
        best = float("inf")
        for _ in range(ROUNDS):
            started = process_time()
            for value in values:
                unpack(value)
            best = min(best, process_time() - started)
        print(f"{f'{unpack.__module__}, the whole value':44s}{'':9s}{best / len(values) * 1e9:9.0f}")
    layout = CsvLayout(tuple(plain[0]))
    rows = [",".join(map(str, each.values())).encode() for each in plain]
    measure("field uuid, field time ms, csv", event_id, rows, ts, fmt="csv", schema=layout)
    quoted = [b'"' + value.replace(b",", b'","') + b'"' for value in rows]
    measure("field uuid, field time ms, csv in quotes", event_id, quoted, ts, fmt="csv", schema=layout)


def contents(plain: list[dict[str, object]]) -> None:
    """Measure content, for which a value is read as a whole, in each format."""
    rule = ContentRule((("ts",),))
    measure("content without ts, json", rule, [json.dumps(each).encode() for each in plain], RecordTime())
    schema = avro(plain[0])
    measure("content without ts, avro", rule, in_avro(schema, plain), RecordTime(), fmt="avro", schema=schema)
    pinned = replace(rule, schema=SchemaFile("event.avsc", schema))
    measure(
        "the same with a schema of its own", pinned, in_avro(schema, plain), RecordTime(), fmt="avro", schema=schema
    )
    schema, whole = in_protobuf(plain)
    measure("content without ts, protobuf", rule, whole, RecordTime(), fmt="protobuf", schema=schema)
    for fmt, pack in (("msgpack", msgspec.msgpack.encode), ("cbor", cbor2.dumps)):
        measure(f"content without ts, {fmt}", rule, list(map(pack, plain)), RecordTime(), fmt=fmt)
    rows = [",".join(map(str, each.values())).encode() for each in plain]
    measure("content without ts, csv", rule, rows, RecordTime(), fmt="csv", schema=CsvLayout(tuple(plain[0])))


ODD_EVERY = (1_000, 100, 20, 4)


def odd_ones(fmt: str, schema: Schema, values: list[bytes], odd: Mapping[str, Callable[[bytes], bytes | None]]) -> None:
    """Print how many times as long a batch takes if one of `ODD_EVERY` records is odd, for each way of being odd."""
    time = FieldTime(("ts",), "timestamp" if fmt == "avro" else "ms")
    extractor = compile_extractor(TrackingId(FieldRule(("event_id",))), time, fmt=fmt, fingerprint=False, schema=schema)  # type: ignore[arg-type]

    def best_s(batch: Sequence[bytes | None]) -> float:
        best = float("inf")
        for _ in range(ROUNDS):
            started = process_time()
            extractor([b"k"] * COUNT, batch, [[]] * COUNT, [0] * COUNT)
            best = min(best, process_time() - started)
        return best

    usual = best_s(values)
    for name, spoil in odd.items():
        batches = [
            [spoil(value) if row % every == 1 else value for row, value in enumerate(values)] for every in ODD_EVERY
        ]
        print(f"{f'{fmt}, {name}':44s}", *(f"{best_s(batch) / usual:8.1f}" for batch in batches))


def odd(plain: list[dict[str, object]], events: list[bytes]) -> None:
    """Measure batches with odd records in several formats."""
    print(f"\n{'one odd record in':44s}", *(f"{every:8,}" for every in ODD_EVERY))
    in_json: dict[str, Callable[[bytes], bytes | None]] = {
        "no ID": lambda value: value.replace(b'"event_id"', b'"other_id"'),
        "truncated": lambda value: value[:-9],
        "null value": lambda _: None,
        "escapes": lambda value: value.replace(b"/catalogue", b"/c\\u0061talogue"),
        "repeated member": lambda value: value.replace(b'"page"', b'"event_id"'),
    }
    odd_ones("json", "", events, in_json)
    truncated: dict[str, Callable[[bytes], bytes | None]] = {"truncated": lambda value: value[:-3]}
    odd_ones("msgpack", "", list(map(msgspec.msgpack.encode, plain)), truncated)
    schema = avro(plain[0])
    odd_ones("avro", schema, in_avro(schema, plain), truncated)
    schema, whole = in_protobuf(plain)
    odd_ones("protobuf", schema, whole, truncated)


def main() -> None:
    events = [json.dumps(event(number)).encode() for number in range(COUNT)]
    flights = [json.dumps(flight(number)).encode() for number in range(COUNT)]
    ts = FieldTime(("ts",), "ms")
    event_id = FieldRule(("event_id",))
    yardstick(events)
    print(f"{'rule':44s}{'columns':>9s}{'one':>9s}   ns per record; {len(events[0])} bytes")
    measure("field uuid, record time", event_id, events, RecordTime())
    measure("field uuid, field time ms", event_id, events, ts)
    measure("field text, field time ms", FieldRule(("order",)), events, ts)
    measure("field integer, field time ms", FieldRule(("number",)), events, ts)
    measure("fields of a flight (7)", FieldsRule(tuple((name,) for name in FLIGHT)), flights, RecordTime())
    measure("field uuid, rfc3339", event_id, timed("2026-01-31T08:00:00.%03dZ"), FieldTime(("at",), "rfc3339"))
    fraction = [value.replace(b'"at": "', b'"at": ').replace(b'"}', b"}") for value in timed("1700000000.%03d")]
    measure("field uuid, seconds with fraction", event_id, fraction, FieldTime(("at",), "s"))
    elsewhere = [value.replace(b'"user": ', b'"user": {"event_id": 5, "name": "ts"}, "who": ') for value in events]
    measure("field uuid, its name again deeper", event_id, elsewhere, ts)
    escaped = [value.replace(b"/catalogue", b'\\n\\"\\u00e9') for value in events]
    measure("field uuid, escapes in every value", event_id, escaped, ts)
    framed = [b"\0\0\0\0\7" + value for value in events]
    measure("field uuid, field time ms, json_schema", event_id, framed, ts, fmt="json_schema")
    plain = [event(number) for number in range(COUNT)]
    schema = avro(plain[0])
    whole = in_avro(schema, plain)
    measure(
        "field uuid, field timestamp, avro", event_id, whole, FieldTime(("ts",), "timestamp"), fmt="avro", schema=schema
    )
    schema = avro(flight(0))
    parts = in_avro(schema, [flight(number) for number in range(COUNT)])
    rule = FieldsRule(tuple((name,) for name in FLIGHT))
    measure("fields of a flight (7), avro", rule, parts, RecordTime(), fmt="avro", schema=schema)
    schema, whole = in_protobuf(plain)
    measure("field uuid, field time ms, protobuf", event_id, whole, ts, fmt="protobuf", schema=schema)
    schema, parts = in_protobuf([flight(number) for number in range(COUNT)])
    measure("fields of a flight (7), protobuf", rule, parts, RecordTime(), fmt="protobuf", schema=schema)
    memberwise(plain, rule)
    measure("key, json", KeyRule(), events, RecordTime())
    measure("key, bytes", KeyRule(), events, RecordTime(), fmt="bytes")
    measure("header, bytes", HeaderRule("id"), events, RecordTime(), fmt="bytes")
    measure("content: true, bytes", RawContentRule(), events, RecordTime(), fmt="bytes")
    contents(plain)
    odd(plain, events)


if __name__ == "__main__":
    main()
