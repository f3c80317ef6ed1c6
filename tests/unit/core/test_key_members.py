"""A member of the key has the ID that a member of the value in that format has, one by one and in columns."""

import random
from dataclasses import replace

import pytest

from dedup.core.extract import Extractor, Recipe, extractor_for
from dedup.core.extract_one import Fault, One, extract_one
from dedup.core.framing import SchemaBook, SchemaRefused
from dedup.core.key_members import KeyColumns, KeyFormat, read_key
from dedup.core.tracking_id import (
    FieldRule,
    FirstOfRule,
    HeaderRule,
    KeyFieldRule,
    KeyRule,
    Part,
    PartsRule,
    TrackingId,
    parse_path,
)
from tests.fuzz.records import mutated
from tests.property.extract_cases import (
    AVRO,
    AVRO_EVENTS,
    CBOR_EVENTS,
    EVENTS,
    MSGPACK_EVENTS,
    PROTOBUF,
    PROTOBUF_EVENTS,
    SCHEMA_IDS,
    framed,
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


@pytest.mark.parametrize("form", ["prefix", "header"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rule", RULES, ids=["member", "parts", "first of"])
def test_a_member_of_the_key_has_the_id_of_a_member_of_the_value(fmt, form, rule):
    times = 2 if len(FORMATS[fmt]) > 20 else 3
    events = [event for event in FORMATS[fmt] * times for _ in range(times)]
    for path in PATHS:
        for steps in ((), ("trim", "lower", "instant")):
            of_values, of_keys = recipes(fmt, rule, path, steps)
            pairs = [sent(fmt, event, form) for event in events]
            column = [payload for payload, _ in pairs]
            headers = [[("h", b"x"), *own] for _, own in pairs]
            nothing = [None] * len(column)
            expected = both(of_values, nothing, column, headers)
            found = both(of_keys, column, nothing, list(map(as_key, headers)))
            for own, one in zip(found, expected, strict=True):
                if isinstance(one, One):
                    assert own == one
                else:
                    assert (own.kind, own.code) == (one.kind, one.code)
                    assert "key" in own.detail or own.code == "id_missing"
                    assert "the value" not in own.detail
                    assert own.format_name == ""


@pytest.mark.parametrize("fmt", FORMATS)
def test_damaged_keys_and_values_side_by_side(fmt):
    """Keys and values are damaged apart from each other; some schemas are unknown, some cannot be read."""
    dice = random.Random(fmt)
    for other in (None, "no schema"):
        book = known(fmt, other=other)
        for rule in (
            KeyFieldRule(("id",)),
            PartsRule((Part(KeyFieldRule(("id",)), True), Part(FieldRule(("id",)), True), Part(KeyRule(), True))),
            FirstOfRule((FieldRule(("id",)), KeyFieldRule(("a", "id")), HeaderRule("h"), KeyFieldRule(("t",)))),
        ):
            recipe = Recipe(TrackingId(rule), fingerprint=True, keys=KeyFormat(fmt, book))
            for _ in range(6):
                spoilt = dice.choice([0, 0.1])
                made = [one_of(fmt, dice, spoilt) for _ in range(40)]
                values = [dice.choice(EVENTS[:6]) if dice.random() > spoilt else mutated(dice, EVENTS) for _ in made]
                values = [None if dice.random() < spoilt else value for value in values]
                both(recipe, [key for key, _ in made], values, [own for _, own in made])


def one_of(fmt, dice, spoilt):
    payload = mutated(dice, FORMATS[fmt]) if dice.random() < spoilt else dice.choice(FORMATS[fmt][:4])
    if dice.random() < spoilt:
        return None, []
    if fmt not in {"json_schema", "avro", "protobuf"}:
        return payload, []
    key, headers = framed(index(fmt) + payload, dice, spoilt)
    if headers:
        key = payload
        headers = [(name, content and content + index(fmt)) for name, content in headers]
    return key, as_key(headers)


def test_two_versions_of_a_schema_are_read_in_columns(monkeypatch):
    """Keys of two schemas, one after the other, none of which is read on its own."""
    texts = [
        '{"type":"record","name":"K","fields":[{"name":"id","type":"string"}]}',
        '{"type":"record","name":"K","fields":[{"name":"n","type":"int"},{"name":"id","type":"string"}]}',
    ]
    book = SchemaBook()
    book.update({b"\0\0\0\0\1": texts[0], b"\0\0\0\0\2": texts[1]})
    monkeypatch.setattr("dedup.core.extract.extract_one", lambda *_: pytest.fail("a plain key went the slow way"))
    monkeypatch.setattr("dedup.core.key_members.read_key", lambda *_: pytest.fail("a plain key went the slow way"))
    keys = [b"\0\0\0\0\1\x06a%02d" % row for row in range(50)] + [b"\0\0\0\0\2\x0e\x06a%02d" % row for row in range(50)]
    keys = [key for pair in zip(keys[:50], keys[50:], strict=True) for key in pair]
    recipe = Recipe(TrackingId(KeyFieldRule(("id",))), fmt="bytes", keys=KeyFormat("avro", book))
    found = Extractor(recipe)(keys, [b""] * 100, [[]] * 100, [0] * 100)
    assert found.faults == {}
    assert found.ids == [b"\x01a%02d" % (row // 2) for row in range(100)]


@pytest.mark.parametrize(
    ("fmt", "key", "headers", "code", "detail"),
    [
        ("json", b"{", [], "not_json", "the record's key is not JSON (character 1 of 1)"),
        ("json", b'{"id":1,"id":2}', [], "repeated_member", "in the record's key, "),
        ("json", b"\xff", [], "not_utf8", "the record's key is not UTF-8 (byte 0)"),
        ("json", b"{}", [], "id_missing", "there is no value at id of the record's key"),
        ("json", b'{"id":null}', [], "id_null", "id of the record's key is null"),
        ("json", b'{"id":""}', [], "id_empty", "id of the record's key is empty"),
        ("json", b'{"id":[]}', [], "id_container", "id of the record's key is an object or an array"),
        ("json", None, [], "id_null", "the record's key is null"),
        ("json_schema", b"{}", [], "wrong_magic_byte", "the record's key has no framing"),
        ("avro", b"\0\0", [], "truncated_framing", "the record's key has 2 bytes, and its framing alone has 5"),
        ("avro", b"", [(KEY_NAME, b"x")], "bad_schema_id", f"the header {KEY_NAME} holds neither"),
        ("avro", b"", [(KEY_NAME, b"x")] * 2, "repeated_header", f"the header {KEY_NAME} occurs 2 times"),
        ("avro", OTHER, [], "schema_unknown", "the schema registry does not know the key's schema, 42949"),
        ("avro", SCHEMA_IDS[0], [], "not_avro", "the record's key is not a record of the schema"),
        ("protobuf", SCHEMA_IDS[0] + b"\7", [], "bad_message_indexes", "the message indexes of the key's"),
        ("msgpack", b"\xc1", [], "not_msgpack", "the record's key is not MessagePack"),
        ("cbor", b"\xff", [], "not_cbor", "the record's key is not CBOR"),
    ],
)
def test_a_fault_has_the_code_of_a_value_and_says_that_it_is_the_key(fmt, key, headers, code, detail):
    _, recipe = recipes(fmt, RULES[0], ("id",))
    (found, *_) = both(recipe, [key] * 9, [b"v"] * 9, [headers] * 9)
    assert found.code == code
    assert found.detail.startswith(detail)


def test_a_schema_that_cannot_be_read_is_parsed_once(monkeypatch):
    calls = []

    def refuse(*args):
        calls.append(args)
        raise SchemaRefused("is no schema of this test")

    monkeypatch.setattr("dedup.core.formats.avro_reader", refuse)
    _, recipe = recipes("avro", RULES[0], ("id",), other="a schema of this test alone")
    (found, *_) = both(recipe, [OTHER] * 50, [b""] * 50, [[]] * 50)
    assert (found.code, len(calls)) == ("schema_refused", 1)
    assert found.detail == "the key's schema, 4294904445, is no schema of this test"


def test_a_key_is_read_after_the_value_and_only_if_it_is_needed():
    def code(rule, key, value):
        recipe = Recipe(TrackingId(rule), keys=KeyFormat("json"))
        return both(recipe, [key] * 9, [value] * 9, [[]] * 9)[0].code

    member, field = KeyFieldRule(("id",)), FieldRule(("id",))
    assert code(member, b"{", b"[") == "not_json"
    assert "the value" in both(Recipe(TrackingId(member), keys=KeyFormat("json")), [b"{"], [b"["], [[]])[0].detail
    assert code(PartsRule((Part(member), Part(field))), b"{", None) == "tombstone"
    first = both(
        Recipe(TrackingId(FirstOfRule((field, member))), keys=KeyFormat("json")),
        [b"{"] * 9,
        [b'{"id":1}'] * 9,
        [[]] * 9,
    )
    assert {one.id for one in first} == {b"\x0d\0\x04\1"}
    assert code(FirstOfRule((member, field)), b"{", b'{"id":1}') == "not_json"


def test_zero_is_a_value_in_keys_too():
    _, recipe = recipes("protobuf", RULES[0], ("at",))
    zeros = replace(recipe, tracking_id=replace(recipe.tracking_id, zeros=True))
    key = SCHEMA_IDS[0] + b"\0"
    assert both(recipe, [key] * 9, [b""] * 9, [[]] * 9)[0].code == "id_missing"
    assert both(zeros, [key] * 9, [b""] * 9, [[]] * 9)[0].id == b"\x04\0"


def test_a_member_without_a_format_of_keys_is_refused():
    with pytest.raises(ValueError, match="name the format of keys"):
        extractor_for(Recipe(TrackingId(KeyFieldRule(parse_path("a.b")))))


def test_the_columns_are_what_is_read_one_by_one():
    keys = KeyFormat("json")
    paths = (("id",), ("t",))
    columns = KeyColumns(keys, paths, zeros=False)([b'{"id":"a","t":1}', b'{"t":2,"id":"b"}'], [[], []])
    assert columns == [["a", "b"], [1, 2]]
    assert [
        each.text if hasattr(each, "text") else each
        for each in read_key(keys, paths, b'{"id":"a","t":1}', [], zeros=False)
    ] == ["a", "1"]
