"""A member of the key has the ID that a member of the value in that format has, one by one and in columns."""

from dataclasses import replace

import pytest

from dedup.core.extract import Extractor, Recipe, extractor_for
from dedup.core.framing import SchemaBook, SchemaRefused
from dedup.core.key_members import KeyColumns, KeyFormat, read_key
from dedup.core.tracking_id import FieldRule, FirstOfRule, KeyFieldRule, Part, PartsRule, TrackingId, parse_path
from tests.property.extract_cases import SCHEMA_IDS
from tests.property.key_cases import KEY_NAME, OTHER, RULES, both, recipes


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
