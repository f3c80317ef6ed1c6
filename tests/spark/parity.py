"""One seeded stream with every kind of trouble, the topologies it is judged by, and what the exact model says of it.

The header `n` numbers the records, and no rule looks at it: so a record is found again in any topic it was written to.
"""

from __future__ import annotations

import csv
import io
import json
import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

import cbor2
import fastavro
import msgspec

from dedup.core.csv_row import CsvLayout
from dedup.core.extract_one import Fault, One, Recipe, extract_one
from dedup.core.formats import text_of
from dedup.core.key_members import KeyFormat
from dedup.core.reference_model import ModelFault, ModelRecord, ModelRules, ModelVerdict, ReferenceModel
from dedup.core.window import Source
from dedup.topology.model import Topology
from tests.integration.workload import BASE_MS, Event
from tests.property import extract_cases
from tests.protoc import compiled

STEP_MS = 10
GUARD_MS = 120_000
NOW_MS = BASE_MS + 10 * 365 * 86_400_000
"""The wall clock of the batch job: any at which the stream is past and the year 2099 is not."""
YEAR_2099_MS = 4_070_908_800_000
SENT_AGAIN = 300
"""How far back a retry reaches, in events."""

SIMPLE: dict[str, Any] = {"guard_period": "2m", "grace": "30s"}
RULES: dict[str, dict[str, Any]] = {
    "key": {"tracking_id": {"key": True}},
    "header": {"tracking_id": {"header": "id"}},
    "field": {"tracking_id": {"field": "id"}},
    "normalized": {"tracking_id": {"field": "id", "normalize": ["trim", "lower", "nfc"]}},
    "parts": {
        "tracking_id": {
            "parts": [{"key": True, "absent": "as_value"}, {"header": "id", "absent": "as_value"}, {"field": "id"}]
        }
    },
    "first-of": {
        "tracking_id": {"first_of": [{"header": "id"}, {"field": "order.id"}, {"content": {"exclude": ["at", "v"]}}]}
    },
    "instant": {"tracking_id": {"fields": ["order.placed", "id"], "normalize": ["instant"]}},
    "fields": {"tracking_id": {"fields": ["tenant", "order.id"]}, "event_time": {"field": "at", "unit": "ms"}},
    "content": {"tracking_id": {"content": {"exclude": ["at", "v", "order.placed"]}}},
    "raw": {"tracking_id": {"content": True}, "source": {"format": "bytes"}},
    "python": {"tracking_id": {"python": "tests.spark.parity_ids:own_id"}},
}
"""Every tracking-ID rule; laid over `SIMPLE`."""
POLICIES: dict[str, dict[str, Any]] = {
    "extend": {"extend": True, "extend_at_most": "5m", "late": "drop"},
    "conflicts": {"conflicts": {"topic": "{name}-conflicts", "exclude": ["at", "order.placed"]}},
    "identity": {"on_conflict": "forward", "extend": True, "conflicts": {"exclude": ["at", "order.placed"]}},
    "no-grace": {"grace": "0s", "late": "forward", "event_time": {"field": "order.placed", "unit": "rfc3339"}},
    "lenient": {"tracking_id": {"field": "id", "missing": "forward", "tombstones": "dead_letter"}},
    "clamped": {"future": "clamp", "event_time": {"field": "at", "unit": "ms"}},
}
FRAMED: dict[str, dict[str, Any]] = {
    "framed": {
        "source": {"format": "json_schema"},
        "conflicts": {"topic": "{name}-conflicts", "exclude": ["at", "order.placed"]},
    },
    "framed-fields": {**RULES["fields"], "source": {"format": "json_schema", "schema_id": "prefix"}},
    "framed-content": {**RULES["content"], "source": {"format": "json_schema"}},
}
"""Topologies for the events that `framed` returns."""
AVSC = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [
            {
                "name": "id",
                "type": [
                    "null",
                    "boolean",
                    "string",
                    "long",
                    {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 1},
                    {"type": "map", "values": "string"},
                ],
            },
            {"name": "tenant", "type": ["null", "string"]},
            {
                "name": "order",
                "type": {
                    "type": "record",
                    "name": "Place",
                    "fields": [
                        {"name": "id", "type": ["null", "long"]},
                        {"name": "placed", "type": ["null", "string"]},
                    ],
                },
            },
            {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}]},
            {"name": "v", "type": {"type": "array", "items": "int"}},
        ],
    }
)
PROTO = """syntax = "proto3";
import "google/protobuf/timestamp.proto";
message Order {
  string id = 1;
  oneof owner { string tenant = 2; bytes nobody = 3; }
  Place order = 4;
  google.protobuf.Timestamp at = 5;
  uint32 v = 6;
}
message Place {
  uint64 id = 1;
  string placed = 2;
}
"""
WITHOUT_V = json.dumps({**json.loads(AVSC), "fields": json.loads(AVSC)["fields"][:-1]})
"""A schema of the same records, without one field."""
SCHEMAS = {"parity.avsc": AVSC, "parity.proto": PROTO, "without-v.avsc": WITHOUT_V}
"""The schema files that topologies name."""
_IN_AVRO = {"format": "avro", "schema_id": "none", "schema": "parity.avsc"}
AVRO: dict[str, dict[str, Any]] = {
    "avro": {
        "source": _IN_AVRO,
        "tracking_id": {"field": "id", "normalize": ["trim", "lower"]},
        "conflicts": {"topic": "{name}-conflicts"},
    },
    "avro-fields": {
        "source": _IN_AVRO,
        "tracking_id": {"fields": ["tenant", "order.id"]},
        "event_time": {"field": "at", "unit": "timestamp"},
    },
    "avro-first-of": {
        "source": _IN_AVRO,
        "tracking_id": {"first_of": [{"field": "order.id"}, {"field": "id"}, {"key": True}]},
    },
    "avro-content": {
        "source": _IN_AVRO,
        "tracking_id": {"content": {"exclude": ["at", "order.placed"], "schema": "without-v.avsc"}},
        "conflicts": {"topic": "{name}-conflicts", "exclude": ["at"]},
    },
}
"""Topologies for the events that `in_avro` returns."""


_KEPT = {"tracking_id": {"field": "id", "normalize": ["trim", "lower"]}, "conflicts": {"topic": "{name}-conflicts"}}
_BY_FIELDS = {"tracking_id": {"fields": ["tenant", "order.id"]}, "event_time": {"field": "at", "unit": "timestamp"}}
_BY_CONTENT = {
    "tracking_id": {"first_of": [{"header": "id"}, {"content": {"exclude": ["at", "v", "order.placed"]}}]},
    "conflicts": {"topic": "{name}-conflicts", "exclude": ["at"]},
}
_IN_PROTOBUF = {"format": "protobuf", "schema_id": "none", "schema": "parity.proto"}
_IN_CSV = {"format": "csv", "columns": ["tenant", "id", "number", "placed", "v"], "delimiter": "tab"}
PACKED: dict[str, dict[str, Any]] = {
    "msgpack": {"source": {"format": "msgpack"}, **_KEPT},
    "msgpack-fields": {"source": {"format": "msgpack"}, **_BY_FIELDS},
    "msgpack-python": {"source": {"format": "msgpack"}, **RULES["python"]},
    "cbor": {"source": {"format": "cbor"}, **_KEPT},
    "cbor-fields": {"source": {"format": "cbor"}, **_BY_FIELDS},
    "protobuf": {"source": _IN_PROTOBUF, **_KEPT},
    "protobuf-fields": {"source": _IN_PROTOBUF, **_BY_FIELDS},
    "protobuf-parts": {"source": _IN_PROTOBUF, **RULES["parts"]},
    "protobuf-zero": {"source": _IN_PROTOBUF, "tracking_id": {"fields": ["order.id", "v"], "zero": "value"}},
    "msgpack-content": {"source": {"format": "msgpack"}, **_BY_CONTENT},
    "cbor-content": {"source": {"format": "cbor"}, **_BY_CONTENT},
    "protobuf-content": {"source": _IN_PROTOBUF, **_BY_CONTENT},
    "csv": {"source": _IN_CSV, **_KEPT},
    "csv-content": {
        "source": _IN_CSV,
        "tracking_id": {"content": {"exclude": ["placed", "v"]}},
        "conflicts": {"topic": "{name}-conflicts", "exclude": ["v"]},
    },
    "csv-instant": {"source": _IN_CSV, "tracking_id": {"fields": ["placed", "id"], "normalize": ["instant"]}},
    "csv-fields": {
        "source": _IN_CSV,
        "tracking_id": {"fields": ["tenant", "number"]},
        "event_time": {"field": "placed", "unit": "rfc3339"},
    },
}
"""Topologies for the events that `packed` returns with their format."""
FORMATS = {**FRAMED, **AVRO, **PACKED}
ALL = {**RULES, **POLICIES, **FORMATS}
A_YEAR_LATER_MS = BASE_MS + 365 * 86_400_000


def the_schema(name: str) -> str:
    """Return a file of `SCHEMAS`, in place of a directory with it."""
    if name not in SCHEMAS:
        raise FileNotFoundError(name)
    return SCHEMAS[name]


def document(name: str, options: Mapping[str, Any], topic: str | None = None) -> dict[str, Any]:
    """Return a topology file's content: options over `SIMPLE`, all side topics wanted."""
    base = {
        "dedup": 1,
        "name": name,
        "source": {"topics": [topic or f"{name}-in"], "partitioned_by": "tracking_id"},
        "tracking_id": {"field": "id"},
        "output": {"topic": f"{name}-out", "headers": True},
        "duplicates": f"{name}-duplicates",
        **SIMPLE,
    }
    made = json.loads(json.dumps({**base, **options}).replace("{name}", name))
    made["source"] = {**base["source"], **options.get("source", {})}
    return made


@cache
def stream(seed: int, count: int, partitions: int = 2) -> Sequence[Event]:
    """Return the stream, an event each 10 ms of event time: a third repeats near, some far beyond the guard period.

    A fiftieth comes up to ten minutes late, nearly all out of order by up to 20 s, some from the year 2099; a
    hundredth is bad in one of many ways.
    """
    dice = random.Random(seed)
    made: list[Event] = []
    fresh = 0
    for number in range(count):
        if dice.random() < 0.03 and number > SENT_AGAIN:
            made.append(_again(made[number - 1 - dice.randrange(SENT_AGAIN)], number))
            continue
        if dice.random() < 0.33 and fresh:
            chosen = max(0, fresh - 1 - dice.randrange(400)) if dice.random() < 0.9 else dice.randrange(fresh)
        else:
            chosen, fresh = fresh, fresh + 1
        time_ms = BASE_MS + number * STEP_MS - dice.randint(0, 20_000)
        if dice.random() < 0.02:
            time_ms -= dice.randint(0, 600_000)
        if dice.random() < 0.001:
            time_ms = YEAR_2099_MS + number
        made.append(_event(dice, number, chosen, time_ms, chosen % partitions))
    return tuple(made)


def of_format(fmt: str) -> dict[str, dict[str, Any]]:
    """Return the topologies for the events that `in_format` returns with a format."""
    return {name: options for name, options in ALL.items() if format_of(options) == fmt}


def in_format(fmt: str, seed: int, events: Iterable[Event]) -> list[Event]:
    """Return the events with their values in a source format."""
    match fmt:
        case "json":
            return list(events)
        case "json_schema":
            return framed(seed, events)
        case "avro":
            return in_avro(seed, events)
        case _:
            return packed(seed, fmt, events)


def format_of(options: Mapping[str, Any]) -> str:
    """Return the format of the events that suit options for `document`."""
    fmt: str = options.get("source", {}).get("format", "json")
    return "json" if fmt == "bytes" else fmt


def unclocked(row: Row) -> Row:
    """Return the row without a clamped time, which is the clock of whoever judged."""
    return row._replace(first_time_ms=0) if (row.first_time_ms or 0) > A_YEAR_LATER_MS else row


def framed(seed: int, events: Iterable[Event]) -> list[Event]:
    """Return the events with a schema registry's framing: most in the prefix, some in a header, a hundredth damaged."""
    dice = random.Random(seed)
    made = []
    for event in events:
        value, headers = extract_cases.framed(event.value, dice, 0.01)
        made.append(replace(event, value=value, headers=(*event.headers, *headers)))
    return made


def in_avro(seed: int, events: Iterable[Event]) -> list[Event]:
    """Return the events with their values in Avro, a hundredth of them damaged; what is no JSON object stays."""
    dice = random.Random(seed)
    parsed = fastavro.parse_schema(json.loads(AVSC))
    return [replace(event, value=_in_avro(dice, parsed, event.value)) for event in events]


def _in_avro(dice: random.Random, parsed: Any, value: bytes | None) -> bytes | None:
    try:
        whole = json.loads(value or b"", parse_float=Decimal)
    except (ValueError, RecursionError):
        return value
    number, order = whole.get("id"), whole.get("order", {})
    record = {
        "id": Decimal(number) if type(number) is int and number.bit_length() > 63 else number,
        "tenant": whole.get("tenant") if isinstance(whole.get("tenant"), str) else None,
        "order": {"id": order.get("id"), "placed": order.get("placed")},
        "at": whole["at"] if isinstance(whole["at"], int) and whole["at"].bit_length() < 64 else None,
        "v": [whole["v"]] * (whole["v"] + 1),
    }
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, parsed, record)
    made = stream.getvalue()
    return made if dice.random() > 0.01 else dice.choice([made[:-1], made + b"\0", b"\x0c" + made[1:]])


def packed(seed: int, fmt: str, events: Iterable[Event]) -> list[Event]:
    """Return the events with their values in another format, a hundredth damaged; what is no JSON object stays."""
    dice = random.Random(seed)
    return [replace(event, value=_packed(dice, fmt, event.value)) for event in events]


def _packed(dice: random.Random, fmt: str, value: bytes | None) -> bytes | None:
    try:
        whole = json.loads(value or b"")
        at, number = whole["at"], whole.get("id")
        whole["at"] = datetime.fromtimestamp(at / 1000, UTC) if isinstance(at, int) and at.bit_length() < 44 else None
        if type(number) is int and number.bit_length() > 63:
            whole["id"] = str(number)
        made = _ENCODERS[fmt](whole)
    except (ValueError, RecursionError):
        return value
    return made if dice.random() > 0.01 else dice.choice([made[:-1], made + b"\0", b"\xc1" + made[1:]])


def _in_protobuf(whole: dict[str, Any]) -> bytes:
    made, order = _order_message()(v=whole["v"]), whole.get("order") or {}
    if isinstance(whole.get("id"), str | int | float) and not isinstance(whole["id"], bool):
        made.id = str(whole["id"])
    if isinstance(whole.get("tenant"), str):
        made.tenant = whole["tenant"]
    if order:
        made.order.id, made.order.placed = order["id"], order["placed"]
    if whole["at"] is not None:
        made.at.FromDatetime(whole["at"])
    return made.SerializeToString()


@cache
def _order_message() -> Any:
    return compiled(PROTO, "Order")


def _in_csv(whole: dict[str, Any]) -> bytes:
    row, order = io.StringIO(), whole.get("order") or {}
    number = json.dumps(whole.get("id")) if isinstance(whole.get("id"), dict | list) else whole.get("id")
    cells = [whole.get("tenant"), number, order.get("id"), order.get("placed"), whole.get("v")]
    csv.writer(row, delimiter="\t", quoting=csv.QUOTE_ALL if (whole.get("v") or 0) % 2 else csv.QUOTE_MINIMAL).writerow(
        cells
    )
    return row.getvalue().encode()


_ENCODERS: dict[str, Callable[[object], bytes]] = {
    "msgpack": msgspec.msgpack.encode,
    "cbor": cbor2.dumps,
    "csv": _in_csv,
    "protobuf": _in_protobuf,
}


def _again(event: Event, number: int) -> Event:
    """The same bytes once more, as a producer's retry sends them."""
    return replace(
        event, headers=tuple((name, b"%d" % number if name == "n" else value) for name, value in event.headers)
    )


def _event(dice: random.Random, number: int, chosen: int, time_ms: int, partition: int) -> Event:
    name = _id_of(chosen)
    value: bytes | None = json.dumps(
        {
            "id": name,
            "tenant": f"t{chosen % 7}",
            "order": {"id": chosen, "placed": _rfc3339(time_ms)},
            "at": time_ms,
            "v": dice.randrange(2),
        }
    ).encode()
    if dice.random() < 0.2:
        # Another spelling of the same content.
        value = value.replace(b": ", b":") if dice.random() < 0.5 else value.replace(b"{", b"{ ")
    key: bytes | None = b"order-%d" % chosen
    headers: list[tuple[str, bytes | None]] = [("id", b"order-%d" % chosen), ("n", b"%d" % number)]
    if dice.random() < 0.01:
        key, value, headers = _spoilt(dice, key, value, headers)
    return Event(partition, value, time_ms, key, tuple(headers))


def _id_of(chosen: int) -> object:
    """Every type an ID can have; equal for equal numbers, different for others."""
    text = f"Order {chosen}"
    kinds = [
        text,
        f" {text}\u00e9 ",
        chosen,
        str(uuid.UUID(int=chosen)),
        chosen + 0.5,
        10**25 + chosen,
        "x" * 40 + text,
    ]
    return kinds[chosen % len(kinds)]


def _rfc3339(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _spoilt(
    dice: random.Random, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]:
    assert value is not None
    whole = json.loads(value)
    match dice.randrange(10):
        case 0:
            return key, None, headers
        case 1:
            return None, dice.choice([b"", b"no json", b'{"id":', b"\xff\xfe{}", b"[" * 600]), headers
        case 2:
            return b"", json.dumps({**whole, "id": None, "tenant": None}).encode(), [("id", None), *headers[1:]]
        case 3:
            return key, json.dumps({**whole, "id": "", "tenant": ""}).encode(), [("id", b""), *headers[1:]]
        case 4:
            return key, json.dumps({**whole, "id": {}, "tenant": []}).encode(), headers[1:]
        case 5:
            return key, json.dumps({name: whole[name] for name in ("at", "v")}).encode(), [headers[0], *headers]
        case 6:
            return key, json.dumps({**whole, "id": True, "at": -5}).encode(), headers
        case 7:
            return key, value.replace(b'"tenant"', b'"id": 1, "tenant": 2, "tenant"'), headers
        case 8:
            return (
                key,
                json.dumps({**whole, "at": "soon", "order": {**whole["order"], "placed": "soon"}}).encode(),
                headers,
            )
        case _:
            return key, json.dumps({**whole, "at": 10**30, "order": {}}).encode(), headers


class Row(NamedTuple):
    """A verdict as every engine must give it."""

    verdict: str
    reason: str | None
    first_time_ms: int | None
    first_source: tuple[int, int] | None
    """Partition and offset."""


FAULTS: dict[str, ModelFault] = {
    "missing_id": "missing_id",
    "unreadable": "unreadable",
    "tombstone": "tombstone",
    "bad_time": "bad_time",
}


def rules_of(topology: Topology) -> ModelRules:
    """Return what the exact model takes of a topology."""
    rules = topology.rules
    return ModelRules(
        guard_ms=rules.window.guard_ms,
        grace_ms=rules.window.grace_ms,
        extend=rules.window.extend,
        extend_at_most_ms=rules.window.extend_at_most_ms,
        missing=rules.missing.value,
        tombstones=rules.tombstones.value,
        on_conflict=rules.on_conflict.value,
        future=rules.future.value,
    )


def recipe_of(topology: Topology) -> Recipe:
    """Return what the slow extractor takes of a topology."""
    source = topology.source
    layout = CsvLayout(source.columns, source.delimiter) if source.format == "csv" else None
    return Recipe(
        topology.tracking_id,
        topology.event_time,
        topology.source.format,
        topology.fingerprints_wanted,
        topology.compared,
        topology.source.schema_id,
        layout or ("" if source.schema is None else text_of(source.schema)),
        None if source.key_format == "bytes" else KeyFormat(source.key_format, source.schemas),
    )


def by_model(
    events: Iterable[Event], topology: Topology, now_ms: int = NOW_MS
) -> dict[tuple[int, int], tuple[Row, int]]:
    """Return, by partition and offset, the model's verdict and its stream time; each partition is a task of its own."""
    rules, recipe = rules_of(topology), recipe_of(topology)
    ceiling_ms = now_ms + topology.max_clock_skew_ms
    tasks: dict[int, ReferenceModel] = {}
    ends: dict[int, int] = {}
    found: dict[tuple[int, int], tuple[Row, int]] = {}
    for event in events:
        offset = ends[event.partition] = ends.get(event.partition, -1) + 1
        task = tasks.setdefault(event.partition, ReferenceModel(rules, [(0, event.partition)]))
        record, code = model_record(recipe, event, Source(0, event.partition, offset), ceiling_ms)
        verdict = task.judge(record)
        found[event.partition, offset] = row_of(verdict, code), verdict.stream_time_ms
        if offset % 20_000 == 0:
            task.forget()
    return found


def model_record(recipe: Recipe, event: Event, source: Source, ceiling_ms: int) -> tuple[ModelRecord, str]:
    """Return a record for the model, and the code of its fault, if any."""
    match extract_one(recipe, event.key, event.value, event.headers, event.timestamp_ms):
        case One(key, time_ms, fingerprint):
            return ModelRecord(key, time_ms, source, fingerprint, ceiling_ms=ceiling_ms), ""
        case Fault(kind, code, _):
            return ModelRecord(None, 0, source, fault=FAULTS[kind.value]), code


def row_of(verdict: ModelVerdict, code: str) -> Row:
    """Return the model's verdict in the words of the batch job."""
    of = verdict.of
    first = (None, None) if of is None else (of.first_ms, (of.source.partition, of.source.offset))
    kind: str = verdict.kind
    reason: str | None = None
    if kind == "duplicate" and verdict.conflict:
        kind = "conflict"
    elif kind == "unique" and verdict.conflict:
        reason = "conflict"
        first = (None, None)
    elif kind == "dead_letter":
        reason = code or verdict.reason
    elif kind == "exempt":
        reason = verdict.reason
    return Row(kind, reason, *first)
