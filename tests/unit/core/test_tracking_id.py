"""The golden vectors of the ID encoding, and what they can not say."""

import json
import random
import sys
import unicodedata
from pathlib import Path

import pytest

from dedup.core import tracking_id as encoding
from dedup.core.event_time import FieldTime, RecordTime, rfc3339_column_ms, rfc3339_ms
from dedup.core.exact_json import decode
from dedup.core.extract import Extractor, FaultKind, Recipe, compile_extractor
from dedup.core.extract_one import Fault, One, extract_one
from dedup.core.tracking_id import (
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyRule,
    Part,
    PartsRule,
    RawContentRule,
    TrackingId,
    format_path,
    normalizer,
    parse_path,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "tracking_id.json").read_text())
CASES = VECTORS["cases"]
GOOD = {"id": "good", "t": 1, "a": {"b": [0, {"c": "x"}]}}


def bytes_of(data):
    match data:
        case None:
            return None
        case {"text": text}:
            return text.encode()
        case {"hex": digits}:
            return bytes.fromhex(digits)
        case {"repeat": parts}:
            return "".join(text * times for text, times in parts).encode()


def rule_of(spec):
    match spec:
        case {"key": True}:
            return KeyRule()
        case {"header": name}:
            return HeaderRule(name)
        case {"field": path}:
            return FieldRule(parse_path(path))
        case {"fields": paths}:
            return FieldsRule(tuple(map(parse_path, paths)))
        case {"parts": parts}:
            return PartsRule(tuple(Part(rule_of(part), part.get("absent") == "as_value") for part in parts))
        case {"first_of": alternatives}:
            return FirstOfRule(tuple(map(rule_of, alternatives)))
        case {"content": True}:
            return RawContentRule()
        case {"content": {"exclude": paths}}:
            return ContentRule(tuple(map(parse_path, paths)))


def recipe_of(case):
    time = case["event_time"]
    return Recipe(
        TrackingId(rule_of(case["tracking_id"]), tuple(case["tracking_id"].get("normalize", ()))),
        RecordTime() if time == "record" else FieldTime(parse_path(time["field"]), time["unit"]),
        case["format"],
    )


def record_of(case):
    headers = [(name, bytes_of(value)) for name, value in case["headers"]]
    return bytes_of(case["key"]), bytes_of(case["value"]), headers, case["timestamp_ms"]


def check(case, found):
    expect = case["expect"]
    match found:
        case One(key, time_ms):
            assert {"state_key": key.hex(), "time_ms": time_ms} == expect
        case Fault(kind, code, detail):
            assert {"fault": kind.name, "code": code} == expect
            assert detail
            assert len(detail) < 200


def ids(case):
    return f"{case['row']} {case['name']}"


def test_the_vectors_are_of_this_encoding():
    assert VECTORS["encoding_version"] == encoding.ENCODING_VERSION
    assert {f"F{row}" for row in range(41, 50)} == {case["row"] for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_vector_one_by_one(case):
    check(case, extract_one(recipe_of(case), *record_of(case)))


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("neighbours", [0, 9])
def test_vector_in_columns(case, neighbours):
    """Alone nine times over, which a good row survives in columns; and once among nine others."""
    record = record_of(case)
    good = (b"good", json.dumps(GOOD).encode(), [("id", b"good")], 0)
    records = [record] * 9 if not neighbours else [good] * neighbours + [record]
    found = Extractor(recipe_of(case))(*map(list, zip(*records, strict=True)))
    rows = range(9) if not neighbours else [neighbours]
    for row in rows:
        fault = found.faults.get(row)
        check(case, fault if fault is not None else One(found.ids[row], found.times_ms[row], b""))


def test_short_texts_after_one_that_ends_like_an_instant():
    one = Recipe(TrackingId(FieldRule(("id",)), ("instant",)))
    values = [json.dumps({"id": text}).encode() for text in ("x.Z", "a", "b", "c", "d")]
    found = Extractor(one)([None] * 5, values, [()] * 5, [0] * 5)
    assert found.ids == [b"\x01x.Z", b"\x01a", b"\x01b", b"\x01c", b"\x01d"]


def test_different_ids_have_different_keys():
    """Two cases of one rule share a key only where they say so."""
    by_key = {}
    for case in CASES:
        if "state_key" in case["expect"] and case["tracking_id"] == {"field": "id"} and case["row"] == "F43":
            by_key.setdefault(case["expect"]["state_key"], []).append(case["name"])
    shared = sorted(sorted(names) for names in by_key.values() if len(names) > 1)
    assert shared == [["-0", "0"], ["-0.0", "0.0", "0e5"], ["1.0", "10e-1", "1e0"], ["100.0", "1E2"]]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a", ("a",)),
        ("a.b[0].c", ("a", "b", 0, "c")),
        ('a["b.c"]', ("a", "b.c")),
        ('["a b"].c', ("a b", "c")),
        ("[0]", (0,)),
        ("a[0][12]", ("a", 0, 12)),
        ('a["\\"]"]', ("a", '"]')),
        ('[""]', ("",)),
        ("$ref-id.é", ("$ref-id", "é")),
    ],
)
def test_paths(text, path):
    assert parse_path(text) == path
    assert parse_path(format_path(path)) == path


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a[",
        "a[x]",
        "a[-1]",
        "a[01]",
        'a["b]',
        "a b",
        'a["\\x"]',
        'a["\\ud800"]',
        "a[0]b",
        'a"b',
    ],
)
def test_paths_that_are_none(text):
    with pytest.raises(ValueError, match=r"path .+"):
        parse_path(text)


@pytest.mark.parametrize("length", [0, 127, 128, 16_383, 16_384, 2_000_000])
def test_the_length_before_a_part_is_leb128(length):
    prefixed = encoding.prefixed(b"x" * length)
    head, part = prefixed[: len(prefixed) - length], prefixed[len(prefixed) - length :]
    assert part == b"x" * length
    assert sum((byte & 0x7F) << (7 * at) for at, byte in enumerate(head)) == length
    assert [byte >> 7 for byte in head] == [1] * (len(head) - 1) + [0]


@pytest.mark.parametrize(
    "recipe",
    [
        lambda: compile_extractor(TrackingId(FieldRule(("id",))), RecordTime(), fmt="bytes", fingerprint=False),
        lambda: compile_extractor(TrackingId(KeyRule()), FieldTime(("t",), "ms"), fmt="bytes", fingerprint=False),
        lambda: compile_extractor(TrackingId(FieldsRule(())), RecordTime(), fmt="json", fingerprint=False),
        lambda: compile_extractor(TrackingId(ContentRule()), RecordTime(), fmt="bytes", fingerprint=False),
    ],
)
def test_what_could_never_find_anything_is_refused(recipe):
    with pytest.raises(ValueError, match="; "):
        recipe()


def fingerprint(value, exclude=(), fmt="json"):
    rule = TrackingId(KeyRule())
    recipe = Recipe(rule, fmt=fmt, fingerprint=True, compared=ContentRule(exclude))
    found = extract_one(recipe, b"k", value, [], 0)
    assert isinstance(found, One)
    assert len(found.fingerprint) == 8
    return found.fingerprint


def test_fingerprints_see_content_not_spelling():
    assert fingerprint(b'{"a":1,"b":[2.50]}') == fingerprint(b' {"b": [25e-1], "\\u0061": 1}')
    assert fingerprint(b'{"a":1}') != fingerprint(b'{"a":1.0}')
    assert fingerprint(b'{"a":1,"at":5}', (("at",),)) == fingerprint(b'{"a":1,"at":6}', (("at",),))
    assert fingerprint(b'{"a":1}', fmt="bytes") != fingerprint(b'{"a": 1}', fmt="bytes")
    assert len({fingerprint(None), fingerprint(b"null"), fingerprint(b"", fmt="bytes")}) == 3


def test_fingerprints_refuse_nothing():
    """Looking for conflicts does not change which records can be judged."""
    twice, surrogate = b'{"a":1,"a":2}', b'{"a":"\\ud800"}'
    assert fingerprint(twice) == fingerprint(twice) != fingerprint(b'{"a":2}')
    assert fingerprint(surrogate) != fingerprint(b'{"a":"\\ud801"}')


def test_a_fault_names_no_payload():
    secret = b'{"id": {"password": "hunter2"}, "t": "hunter2"}'
    for rule in (FieldRule(("id",)), ContentRule(), FieldRule(("t",))):
        recipe = Recipe(TrackingId(rule), FieldTime(("t",), "ms"))
        for value in (secret, secret[:-1], secret + secret):
            found = extract_one(recipe, None, value, [], 0)
            assert isinstance(found, Fault)
            assert "hunter2" not in found.detail
            assert found.kind in FaultKind


def test_a_deep_value_of_content_does_not_recurse():
    value = b"[" * 512 + b"]" * 512
    found = extract_one(Recipe(TrackingId(ContentRule())), None, value, [], 0)
    assert isinstance(found, One)
    assert decode(value)


@pytest.mark.parametrize("layout", ["%sZ", "%s.%dZ", "%s.%03dZ", "%s.%09dZ", "%s+05:30", "%s.%03d-08:00"])
def test_rfc3339_columns_equal_single_texts(layout):
    days = ["0000-02-29", "1600-02-29", "1899-12-31", "1970-01-01", "2024-02-29", "2026-03-01", "9999-12-31"]
    clocks = ["00:00:00", "23:59:59", "12:34:56"]
    texts = [layout.replace("%s", f"{day}T{clock}") for day in days for clock in clocks]
    texts = [text % (at % 10) if "%" in text else text for at, text in enumerate(texts)]
    assert rfc3339_column_ms(texts) == [rfc3339_ms(text) for text in texts]
    assert None not in map(rfc3339_ms, texts)


@pytest.mark.parametrize(
    "bad",
    [
        "2023-02-29T00:00:00Z",
        "2026-00-01T00:00:00Z",
        "2026-01-31T00:00:60Z",
        "2026-01-31T00:00:0/Z",
        "2026-01-31T00:0000:Z",
        "2026-01-31T00:00:0.Z",
        "2026-01-31t00:00:00Z",
    ],
)
def test_rfc3339_columns_leave_odd_texts_to_the_single_way(bad):
    good = "2026-01-31T08:00:00Z"
    assert rfc3339_column_ms([good, good]) is not None
    assert rfc3339_column_ms([good, bad]) is None
    assert rfc3339_column_ms([bad, good]) is None


def test_a_long_string_is_normalized_in_linear_time():
    """The test's timeout is a fraction of what `unicodedata` would take to sort this run of marks."""
    nfc = normalizer(("nfc",))
    count = 200_000
    assert nfc("a" + "\u0301\u0323" * count) == "\u1ea1" + "\u0323" * (count - 1) + "\u0301" * count


def test_long_strings_are_normalized_as_short_ones(monkeypatch):
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    marks = [char for char in every if unicodedata.combining(char)]
    composed = [char for char in every if unicodedata.decomposition(char)[:1] not in {"", "<"}]
    dice, pool = random.Random(1), [*marks, *composed, *composed, *"aeioAEIO\u1100\u1161\u11a8\uac00" * 100]
    texts = ["".join(dice.choices(pool, k=dice.randrange(1, 9))) for _ in range(20_000)]
    nfc = normalizer(("nfc",))
    expected = [nfc(text) for text in texts]
    assert expected == [unicodedata.normalize("NFC", text) for text in texts]
    monkeypatch.setattr(encoding, "_LONG_CHARS", 0)
    assert [nfc(text) for text in texts] == expected
