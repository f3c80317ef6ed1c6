"""Records as nobody should send them: good events and the golden vectors, cut, spliced and sprinkled with bad bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tests.property.extract_cases import (
    AVRO_EVENTS,
    CBOR_EVENTS,
    CSV_EVENTS,
    EVENTS,
    MSGPACK_EVENTS,
    PROTOBUF_EVENTS,
    framed,
)

NASTY = [
    b"\x00",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\\u0000",
    b"\\",
    b'"',
    b"{",
    b"}",
    b"[" * 600,
    b"]" * 600,
    b'{"a":' * 520,
    b",",
    b":",
    b"\n",
    b"\r\n",
    b"1e999",
    b"-0",
    b"NaN",
    b"1" * 5000,
    b"18446744073709551616",
    b'"id":null',
    b'"id":"again",',
    b'"t":253402300800000,',
    b'"t":-5,',
    b"null",
    b"true",
    b'""',
    b" ",
    b"e\xcc\x81",
    b"\xc3\xa9",
]
TIMES_MS = (-1, 0, 1, 1_000, 59_999, 60_000, 253_402_300_800_000, (1 << 63) - 1)
STRETCH = 300
NOW_MS = 1_700_000_000_000
_TYPED = {
    "avro": AVRO_EVENTS,
    "protobuf": PROTOBUF_EVENTS,
    "msgpack": MSGPACK_EVENTS,
    "cbor": CBOR_EVENTS,
    "csv": CSV_EVENTS,
}
Record = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]
"""Key, value, headers, timestamp in ms."""


def corpus() -> list[bytes]:
    """Return what mutations begin with."""
    path = Path(__file__).parent.parent / "vectors" / "tracking_id.json"
    texts = [case["value"] for case in json.loads(path.read_text())["cases"] if case["value"]]
    vectors = [text["text"].encode() if "text" in text else bytes.fromhex(text.get("hex", "")) for text in texts]
    return [*EVENTS, *[value for value in vectors if len(value) < 2_000]]


def mutated(dice: random.Random, values: list[bytes]) -> bytes:
    """Return one of the values, most of the time changed in a few places."""
    value = dice.choice(values)
    for _ in range(dice.choice((0, 0, 1, 1, 2, 4))):
        at = dice.randrange(len(value) + 1)
        end = min(len(value), at + dice.randrange(12))
        match dice.randrange(6):
            case 0:
                value = value[:at] + dice.choice(NASTY) + value[at:]
            case 1:
                value = value[:at] + value[end:]
            case 2:
                value = value[:end] + value[at:]
            case 3:
                value = value[:at] + dice.choice(values)[dice.randrange(20) :]
            case 4:
                value = value[:at] + bytes([dice.randrange(256)]) + value[at + 1 :]
            case _:
                value = value[:at]
    return value


def records(dice: random.Random, count: int, *, form: str = "json") -> Iterator[Record]:
    """Yield records; stretches of good ones between, so that whole batches are taken in columns, too.

    ``form``: avro and protobuf are values of the schemas of `AVRO` and `PROTOBUF`; msgpack, cbor, and csv name the format; framed is JSON with a schema
    registry's framing before values or in headers, in some records damaged.
    """
    typed = _TYPED.get(form)
    values, good = (corpus(), EVENTS[:6]) if typed is None else (typed, typed[:3])
    for at in range(count):
        if at % STRETCH == 0:
            clean = dice.random() < 0.4
        value = dice.choice(good) if clean else mutated(dice, values)
        if not clean and dice.random() < 0.03:
            value = None
        key = None if dice.random() < 0.1 else (dice.choice((b"", b"k1", b"k2", b"\xff\x00")) or value)
        headers: list[tuple[str, bytes | None]] = []
        if dice.random() < 0.3:
            headers = [(dice.choice(("h", "h", "g", "")), dice.choice((None, b"", b"x", value))) for _ in range(2)]
        if form == "framed":
            value, added = framed(value, dice, 0 if clean else 0.3)
            headers += added
            if not clean and value is not None:
                value = mutated(dice, [value])
        time_ms = dice.choice(TIMES_MS) if dice.random() < 0.1 else NOW_MS + dice.randrange(-200_000, 200_000)
        yield key, value, headers, time_ms
