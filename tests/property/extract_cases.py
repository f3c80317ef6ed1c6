"""Events, whole and odd, and the rules they are extracted by."""

from dataclasses import replace

from dedup.core.csv_row import CsvLayout
from dedup.core.event_time import FieldTime
from dedup.core.extract import Extractor, Recipe
from dedup.core.key_members import KeyFormat
from dedup.core.tracking_id import (
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyFieldRule,
    KeyRule,
    Part,
    PartsRule,
    RawContentRule,
    SchemaFile,
    TrackingId,
)

UUID = "0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0"
RECIPES = {
    "id": Recipe(TrackingId(FieldRule(("id",)))),
    "id+ms": Recipe(TrackingId(FieldRule(("id",))), FieldTime(("t",), "ms")),
    "id+s": Recipe(TrackingId(FieldRule(("id",))), FieldTime(("t",), "s")),
    "id+us": Recipe(TrackingId(FieldRule(("id",))), FieldTime(("t",), "us")),
    "id+rfc3339": Recipe(TrackingId(FieldRule(("id",))), FieldTime(("t",), "rfc3339")),
    "id is time": Recipe(TrackingId(FieldRule(("t",))), FieldTime(("t",), "s")),
    "normalized": Recipe(TrackingId(FieldRule(("id",)), ("trim", "lower", "nfc"))),
    "instant": Recipe(TrackingId(FieldRule(("id",)), ("trim", "instant"))),
    "instant of parts": Recipe(TrackingId(FieldsRule((("id",), ("n",))), ("instant",))),
    "instant in the key": Recipe(TrackingId(KeyRule(), ("instant",))),
    "nested": Recipe(TrackingId(FieldRule(("a", "id"))), FieldTime(("a", "t"), "ms")),
    "same names": Recipe(TrackingId(FieldRule(("a", "a")))),
    "index": Recipe(TrackingId(FieldRule(("a", 0, "id")))),
    "below": Recipe(TrackingId(FieldsRule((("a",), ("a", "id"))))),
    "odd name": Recipe(TrackingId(FieldRule(("a/b",)))),
    "non-ASCII name": Recipe(TrackingId(FieldRule(("é",)))),
    "empty name": Recipe(TrackingId(FieldRule(("",)))),
    "fields": Recipe(TrackingId(FieldsRule((("id",), ("a",), ("t",)))), FieldTime(("t",), "ms")),
    "fields normalized": Recipe(TrackingId(FieldsRule((("id",), ("a",))), ("trim",))),
    "parts": Recipe(TrackingId(PartsRule((Part(KeyRule()), Part(HeaderRule("h")), Part(FieldRule(("id",))))))),
    "parts or not": Recipe(
        TrackingId(
            PartsRule((Part(HeaderRule("h"), True), Part(FieldRule(("a",)), True), Part(FieldRule(("id",)), True))),
            ("trim", "instant"),
        ),
        FieldTime(("t",), "ms"),
    ),
    "parts bytes": Recipe(TrackingId(PartsRule((Part(HeaderRule("h")), Part(KeyRule(), True)))), fmt="bytes"),
    "first of": Recipe(
        TrackingId(FirstOfRule((FieldRule(("id",)), FieldsRule((("a",), ("t",))), KeyRule(), ContentRule((("t",),))))),
        FieldTime(("t",), "ms"),
        fingerprint=True,
    ),
    "first of names": Recipe(TrackingId(FirstOfRule((HeaderRule("h"), FieldRule(("a", "id")), FieldRule(("é",)))))),
    "first of normalized": Recipe(
        TrackingId(FirstOfRule((FieldRule(("a", 0, "id")), PartsRule((Part(HeaderRule("h")),)))), ("trim", "instant"))
    ),
    "first of bytes": Recipe(TrackingId(FirstOfRule((HeaderRule("x"), KeyRule(), RawContentRule()))), fmt="bytes"),
    "key": Recipe(TrackingId(KeyRule())),
    "key+ms": Recipe(TrackingId(KeyRule(), ("lower",)), FieldTime(("t",), "ms")),
    "key bytes": Recipe(TrackingId(KeyRule()), fmt="bytes", fingerprint=True),
    "key trim": Recipe(TrackingId(KeyRule(), ("trim",)), fmt="bytes"),
    "header": Recipe(TrackingId(HeaderRule("h"))),
    "header bytes": Recipe(TrackingId(HeaderRule("h")), fmt="bytes"),
    "raw": Recipe(TrackingId(RawContentRule())),
    "raw bytes": Recipe(TrackingId(RawContentRule()), fmt="bytes", fingerprint=True),
    "content": Recipe(TrackingId(ContentRule((("t",), ("a", "id"))))),
    "fingerprint": Recipe(TrackingId(FieldRule(("id",))), fingerprint=True, compared=ContentRule((("t",),))),
    "framed": Recipe(TrackingId(FieldRule(("id",))), FieldTime(("t",), "ms"), "json_schema", fingerprint=True),
    "framed prefix": Recipe(TrackingId(FieldsRule((("id",), ("a",)))), fmt="json_schema", schema_id="prefix"),
    "framed header": Recipe(TrackingId(FieldRule(("id",))), fmt="json_schema", fingerprint=True, schema_id="header"),
    "framed key": Recipe(TrackingId(KeyRule()), fmt="json_schema"),
    "framed index": Recipe(TrackingId(FieldRule(("a", 0, "id"))), fmt="json_schema"),
    "framed first of": Recipe(TrackingId(FirstOfRule((FieldRule(("id",)), RawContentRule()))), fmt="json_schema"),
    "framed raw": Recipe(TrackingId(RawContentRule()), fmt="json_schema"),
    "framed content": Recipe(TrackingId(ContentRule((("t",),))), fmt="json_schema"),
    "key member": Recipe(
        TrackingId(KeyFieldRule(("id",)), ("trim", "instant")),
        FieldTime(("t",), "ms"),
        fingerprint=True,
        keys=KeyFormat("json"),
    ),
    "key member bytes": Recipe(TrackingId(KeyFieldRule(("a", "id"))), fmt="bytes", keys=KeyFormat("json")),
    "key index": Recipe(TrackingId(KeyFieldRule(("a", 0, "id"))), fmt="bytes", keys=KeyFormat("json")),
    "key members": Recipe(
        TrackingId(PartsRule((Part(KeyFieldRule(("id",))), Part(HeaderRule("h")), Part(KeyFieldRule(("t",)))))),
        fmt="bytes",
        keys=KeyFormat("json"),
    ),
    "key parts": Recipe(
        TrackingId(
            PartsRule(
                (Part(KeyFieldRule(("id",)), True), Part(FieldRule(("a",)), True), Part(KeyFieldRule(("a",)), True))
            ),
            ("trim",),
        ),
        keys=KeyFormat("json"),
    ),
    "key first of": Recipe(
        TrackingId(FirstOfRule((HeaderRule("x"), KeyFieldRule(("id",)), FieldRule(("t",)), KeyFieldRule(("é",))))),
        keys=KeyFormat("json"),
    ),
}
_AVSC = """{"type": "record", "name": "Event", "fields": [
 {"name": "id", "type": ["null", "string", "long", {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 1},
  {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}]},
 {"name": "t", "type": {"type": "long", "logicalType": "timestamp-micros"}},
 {"name": "a", "type": {"type": "array", "items": ["null", "Event"]}}]}"""
AVRO = {
    "avro": Recipe(
        TrackingId(FieldRule(("id",)), ("trim",)), FieldTime(("t",), "us"), "avro", fingerprint=True, schema=_AVSC
    ),
    "avro fields": Recipe(
        TrackingId(FieldsRule((("id",), ("t",)))), FieldTime(("t",), "timestamp"), "avro", schema=_AVSC
    ),
    "avro index": Recipe(TrackingId(FieldRule(("a", 0, "id"))), fmt="avro", schema=_AVSC),
    "avro parts": Recipe(
        TrackingId(PartsRule((Part(KeyRule(), True), Part(FieldRule(("id",)), True)))), fmt="avro", schema=_AVSC
    ),
    "avro first of": Recipe(
        TrackingId(FirstOfRule((FieldRule(("id",)), FieldRule(("a", 0, "id")), KeyRule()))), fmt="avro", schema=_AVSC
    ),
    "avro key": Recipe(TrackingId(KeyRule()), fmt="avro", schema=_AVSC),
    "avro content": Recipe(
        TrackingId(ContentRule((("t",), ("a", 0)), SchemaFile("event.avsc", _AVSC))),
        fmt="avro",
        fingerprint=True,
        compared=ContentRule((("t",),)),
        schema=_AVSC,
    ),
}
AVRO_EVENTS = [
    b"\x02\x48" + UUID.encode() + b"\x80\x80\xd0\xe8\xe7\xf7\x83\x06\x00",
    b"\x04\x0e\x80\x80\xd0\xe8\xe7\xf7\x83\x06\x00",
    b"\x06\x02\x0f\x02\x02\x02\x02\x02a\x00\x00\x00",
    b"\x08" + b"u" * 16 + b"\x01\x03\x06\x02\x00\x00\x00\x00\x00",
    b"\x02\x04 a\x02\x04\x00\x02\x04\x0e\x02\x00\x00",
    b"\x00\x02\x00",
    b"\x02\x00\x02\x00",
]
"""Values of the schema of `AVRO`; the last two have no ID, and the fourth has a block with a wrong size."""
_PROTO = """syntax = "proto3"; import "google/protobuf/timestamp.proto";
message Event { oneof of { string id = 1; sint64 number = 2; bytes raw = 3; } google.protobuf.Timestamp t = 4; Event a = 5;
  repeated int64 many = 6; fixed64 at = 7; }"""
PROTOBUF = {
    "protobuf": Recipe(
        TrackingId(FieldRule(("id",)), ("trim",)),
        FieldTime(("t",), "timestamp"),
        "protobuf",
        fingerprint=True,
        schema=_PROTO,
    ),
    "protobuf fields": Recipe(
        TrackingId(FieldsRule((("a", "id"), ("at",)))), FieldTime(("at",), "us"), "protobuf", schema=_PROTO
    ),
    "protobuf parts": Recipe(
        TrackingId(PartsRule((Part(KeyRule(), True), Part(FieldRule(("number",)), True)))),
        fmt="protobuf",
        schema=_PROTO,
    ),
    "protobuf first of": Recipe(
        TrackingId(FirstOfRule((FieldRule(("id",)), FieldRule(("a", "raw")), KeyRule()))), fmt="protobuf", schema=_PROTO
    ),
    "protobuf key": Recipe(TrackingId(KeyRule()), fmt="protobuf", schema=_PROTO),
    "protobuf content": Recipe(
        TrackingId(FirstOfRule((HeaderRule("x"), ContentRule((("t",), ("a", "id")))))),
        FieldTime(("t",), "timestamp"),
        "protobuf",
        fingerprint=True,
        compared=ContentRule((("many",),), SchemaFile("event.proto", _PROTO)),
        schema=_PROTO,
    ),
}
_AT = b"\x22\x06\x08\x80\x9d\xf9\xcb\x06\x39\x00\x40\xec\x8a\xb3\x49\x06\x00"
PROTOBUF_EVENTS = [
    b"\x0a\x24" + UUID.encode() + _AT,
    b"\x0a\x02 a" + _AT + b"\x2a\x05\x0a\x03abc",
    b"\x10\x0d" + _AT + b"\x2a\x04\x1a\x02\xff\x00\x2a\x00",
    b"\x0a\x01b\x10\x0d\x32\x02\x01\x02\x30\x07" + _AT,
    b"\x0a\x01b\x0a\x01c\x53\x08\x01\x54" + _AT + b"\x22\x02\x10\x01",
    b"\x0a\x00",
    b"",
]
"""Values of the schema of `PROTOBUF`; the last two have no ID."""
MSGPACK = {
    "msgpack": Recipe(
        TrackingId(FieldRule(("id",)), ("trim",)), FieldTime(("t",), "timestamp"), "msgpack", fingerprint=True
    ),
    "msgpack ms": Recipe(TrackingId(FieldsRule((("a", "id"), ("id",)))), FieldTime(("at",), "ms"), "msgpack"),
    "msgpack index": Recipe(TrackingId(FieldRule(("a", 0, "id"))), fmt="msgpack"),
    "msgpack parts": Recipe(
        TrackingId(PartsRule((Part(KeyRule(), True), Part(FieldRule(("id",)), True)))), fmt="msgpack"
    ),
    "msgpack first of": Recipe(
        TrackingId(FirstOfRule((FieldRule(("id",)), FieldRule(("a", "id")), KeyRule()))), fmt="msgpack"
    ),
    "msgpack key": Recipe(TrackingId(KeyRule()), fmt="msgpack"),
    "msgpack content": Recipe(
        TrackingId(ContentRule((("t",), ("a", "id")))), fmt="msgpack", fingerprint=True, compared=ContentRule()
    ),
}
_PACKED_T = b"\xa1t\xd6\xff\x65\x53\xf1\x00"
_PACKED_AT = _PACKED_T + b"\xa2at\xcf\0\0\1\x8b\xcf\xe5\x68\0"
MSGPACK_EVENTS = [
    b"\x84\xa2id\xd9\x24" + UUID.encode() + b"\xa1a\x81\xa2id\x07" + _PACKED_AT,
    b"\x84\xa2id\xcd\x01\x00\xa1a\x81\xa2id\xa1x" + _PACKED_AT,
    b"\x84" + _PACKED_AT + b"\xa1a\x81\xa2id\xa3 a \xa2id\xa1b",
    b"\x84\xa2id\xc4\2\xff\x00\xa1a\x91\x81\xa2id\x07" + _PACKED_AT,
    b"\x85\xa2id\x01\xd9\2id\2\xa1x\xcb\x3f\xf0\0\0\0\0\0\0" + _PACKED_AT,
    b"\x84\xa2id\xcf" + b"\xff" * 8 + b"\xa1a\xc0\x07\xc3" + _PACKED_T,
    b"\x80",
]
"""Values of which the last has nothing, and the fifth has a repeated name."""
CBOR = {name.replace("msgpack", "cbor"): replace(recipe, fmt="cbor") for name, recipe in MSGPACK.items()}
_CBOR_T = b"\x61t\xc1\x1a\x65\x53\xf1\x00"
_CBOR_AT = _CBOR_T + b"\x62at\x1b\0\0\1\x8b\xcf\xe5\x68\0"
CBOR_EVENTS = [
    b"\xa4\x62id\x78\x24" + UUID.encode() + b"\x61a\xa1\x62id\x07" + _CBOR_AT,
    b"\xd9\xd9\xf7\xa4\x62id\x19\x01\x00\x61a\xa1\x62id\x61x" + _CBOR_AT,
    b"\xbf" + _CBOR_AT + b"\x61a\xbf\x62id\x7f\x61 \x62a \xff\xff\x62id\xc4\x82\x20\x0f\xff",
    b"\xa4\x62id\x42\xff\x00\x61a\x81\xa1\x62id\xd8\x25\x50" + b"u" * 16 + _CBOR_AT,
    b"\xa5\x62id\x01\x7f\x61i\x61d\xff\2\x61x\xfb\x3f\xf0\0\0\0\0\0\0" + _CBOR_AT,
    b"\xa4\x62id\xc2\x49" + b"\xff" * 9 + b"\x61a\xf6\x07\xf5" + _CBOR_T,
    b"\xa0",
]
"""Values of which the last has nothing, and the fifth has a repeated name."""
_ROW = CsvLayout(("id", "t", "a"))
CSV = {
    "csv": Recipe(
        TrackingId(FieldRule(("id",)), ("trim",)), FieldTime(("t",), "ms"), "csv", fingerprint=True, schema=_ROW
    ),
    "csv rfc3339": Recipe(TrackingId(FieldsRule((("a",), ("id",)))), FieldTime(("t",), "rfc3339"), "csv", schema=_ROW),
    "csv parts": Recipe(
        TrackingId(PartsRule((Part(KeyRule(), True), Part(FieldRule(("id",)), True)))), fmt="csv", schema=_ROW
    ),
    "csv first of": Recipe(
        TrackingId(FirstOfRule((FieldRule(("id",)), FieldRule(("a",)), KeyRule()))), fmt="csv", schema=_ROW
    ),
    "csv key": Recipe(TrackingId(KeyRule()), fmt="csv", schema=_ROW),
    "csv content": Recipe(
        TrackingId(FirstOfRule((HeaderRule("x"), ContentRule((("t",),))))),
        FieldTime(("t",), "ms"),
        "csv",
        fingerprint=True,
        compared=ContentRule((("a",),)),
        schema=_ROW,
    ),
}
CSV_EVENTS = [
    UUID.encode() + b",1700000000000,x\n",
    b"plain,1700000000000,7",
    b'"with ""quotes"", and\r\na break",1700000000000,y\r\n',
    b"7,2026-01-31T08:00:00Z,\xc3\xa9",
    b",2026-01-31T08:00:00Z,z",
    b",,",
    b"one,2",
]
"""Values of which the fifth and the sixth have no ID, and the last lacks a cell."""
EXTRACTORS = {name: Extractor(recipe) for name, recipe in RECIPES.items()}

EVENTS = [
    b'{"id":"%s","t":1700000000000,"a":{"id":"x","t":5,"a":"y"}}' % UUID.encode(),
    b'{"id":"plain","t":1700000000.123,"a":[{"id":7}]}',
    b'{"id":12345678901234567890123,"t":-1,"a":"two"}',
    b'{"t":"2026-01-31T08:00:00.5Z","id":"\xc3\xa9","a":7,"\xc3\xa9":"v","a/b":"w","":"z"}',
    b'{"id":9007199254740993,"t":"2026-01-31T08:00:00+01:00","a":""}',
    b'{"id":" Trim ","t":1e3,"a":null}',
    b'{"id":"e\\u0301\\n\\"","t":0,"a":{"a":{"id":"n"},"id":1.0}}',
    b'{"i\\u0064":"spelled","t":9223372036854775807,"id":"twice"}',
    b'{"id":"2024-02-29T12:00:00Z","t":5,"n":"2016-12-31T23:59:60.250Z"}',
    b'{"id":" 2024-02-29t13:00:00.000000000010+01:00","t":5,"n":7}',
    b'{"id":"0001-01-01T00:00:00+01:00","t":5,"n":""}',
    b'{"id":"a","t":5,"b":"}"}',
    b'{"id":"a",',
    b'"t":5}',
    b'{"id":"a","t":5,"s":"}',
    b'{"}',
    b'{"id":"a","t":5,"s":[{}',
    b"{}]}",
    b'{"id":"a","t":1}{"id":"b","t":2}',
    b'{"id":"a","t":1}\n{"id":"b","t":2}',
    b'{"id":"a","t":1,"b":"\xff"}',
    b'{"id":"a","t":1,"b":NaN}',
    b'{"id":"a","t":1,"n":' + b"9" * 5000 + b"}",
    b'{"id":' + b"9" * 5000 + b',"t":1}',
    b'{"id":1e5,"t":1,"id":2}',
    b'{"id":"a","t":1,"x":{"id":"elsewhere"}}',
    b'{"id":"a","t":1,"id":"b"}',
    b'{"id":"a","t":1,"x":{"id":"elsewhere"},"id":"b"}',
    b'{"id":"a","t":1,"x":"\\"","id":"b","y":"\\""}',
    b'{"id":"a","t":1,"x":[{"id":["{"]}],"y":"}"}',
    b'{"a":{"id":"x","t":1},"b":{"id":"y","t":2},"id":"z","t":"a"}',
    b'{"a":{"id":"x","t":1,"id":"z"},"id":"y","t":4}',
    b'{"a":{"id":"x","t":1},"id":"y","t":4,"a":{"id":"x","t":1}}',
    b'{"a":{"a":"x"},"b":{"a":"y"}}',
    b'{"a/b":"v","a\\/b":"w"}',
    '{"é":"v","\\u00e9":"w"}'.encode(),
    b'{"a":1,"a":1,"b":"\\u0022\\u0022"}',
    b'{"id":"a","t":1,"\xff":1}',
    b'{"id":" Trim ","id":" Trim ","t":1e3,"a":null}',
    b'{"a":1e3,"x":1,"x":2.5}',
    b'{"id":"a","t":1,"i":"ide","idea":1}',
    b'{"t":1, "id" : "a", "x" : {"id" : 1}}',
    b'{"id":"a","t":1,"x":"id"}',
    b"[" * 600 + b"]" * 600,
    b'{"id":"deep","t":1,"x":' + b"[" * 511 + b"]" * 511 + b"}",
    b'{"id":"deep","t":1,"x":' + b"[" * 512 + b"]" * 512 + b"}",
    b'{"id":"deep","t":1,"x":' + b"[" * 100_000,
    b'{"id":"surrogate \\ud800","t":1}',
    b'{"id":"a","t":1,"x":"\\udc00"}',
    b'{"id":"pair \\ud83d\\ude00","t":1}',
    b"\xef\xbb\xbf{}",
    b" {} ",
    b"",
    b"1",
    b"null",
    '{"id":"x","t":1}'.encode("utf-16"),
    b"{}",
]
FILLER = EVENTS[0]
SCHEMA_IDS = [b"\0\0\0\0\7", b"\0\xff\xff\n}", b"\1" + b"g" * 16]
BAD_SCHEMA_IDS = [None, b"", b"\0", b"\1\0\0\0\7", b"\2\0\0\0\7", b"\0\0\0\0\7\0"]
NAME = "__value_schema_id"


def framed(value, dice, spoilt):
    """Return a value and the headers of its framing, in any form; ``spoilt`` is how often the framing is damaged."""
    if value is None:
        return None, []
    schema_id, bad = dice.choice(SCHEMA_IDS), dice.random() < spoilt
    if dice.random() < 0.3:
        ids = dice.choice([[], [dice.choice(BAD_SCHEMA_IDS)], [schema_id, schema_id]]) if bad else [schema_id]
        return value, [(NAME, each) for each in ids]
    schema_id = dice.choice(SCHEMA_IDS[:2])
    if bad:
        damaged = [schema_id[: dice.randrange(5)], SCHEMA_IDS[2] + value, b"{" + value, schema_id[:4] + value]
        return dice.choice(damaged), []
    return schema_id + value, []
