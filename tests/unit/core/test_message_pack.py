"""MessagePack values: golden vectors of every type as ID and as time, one verdict for each way to be damaged."""

import json
from pathlib import Path

import msgspec
import pytest

from dedup.core import tracking_id as encoding
from dedup.core.event_time import FieldTime
from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import Fault, One, extract_one
from dedup.core.tracking_id import (
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyRule,
    Part,
    PartsRule,
    TrackingId,
    parse_path,
)
from tests.extraction import FEW, everywhere, slow_rows

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "message_pack.json").read_text())
pack = msgspec.msgpack.encode


def recipe(*paths, **options):
    rule = FieldsRule(tuple(map(parse_path, paths))) if len(paths) > 1 else FieldRule(parse_path(paths[0]))
    return Recipe(TrackingId(rule), fmt="msgpack", **options)


def test_the_vectors_are_of_this_encoding():
    assert VECTORS["encoding_version"] == encoding.ENCODING_VERSION


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("around", ["before", "behind"])
def test_a_vector_as_id_and_as_time(case, around):
    item, end = b"\xa1f" + bytes.fromhex(case["value"]), b"\xa3end\xc3"
    value = b"\x82" + (item + end if around == "behind" else end + item)
    found = everywhere(recipe("f"), value)
    assert (found.id.hex() if isinstance(found, One) else found.code) == case["id"]
    found = everywhere(recipe("end", event_time=FieldTime(("f",), case["unit"])), value)
    assert (found.time_ms if isinstance(found, One) else found.code) == case["time"]
    if isinstance(found, Fault):
        assert len(found.detail) < 200


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "it ends where an item must follow (byte 0)"),
        (b"\x81", "it ends inside a map or an array (byte 1)"),
        (b"\x81\xa2i", "it ends inside an item of 2 bytes (byte 2)"),
        (b"\x81\xa2id", "it ends where an item must follow (byte 4)"),
        (b"\x81\xa2id\xdb\xff\xff\xff\xff", "it ends inside an item of 4294967295 bytes (byte 9)"),
        (b"\x82\xa2id\x01\xa1x\xdd\xff\xff\xff\xff", "it ends inside a map or an array (byte 12)"),
        (b"\xdf\xff\xff\xff\xff\xa2id\x01", "it ends inside a map or an array (byte 9)"),
        (b"\x82\xa2id\x01\xa1x\xc6\xff\xff\xff\xff\0", "it ends inside an item of 4294967295 bytes (byte 12)"),
        (b"\x82\xa2id\x01\xa1x\xc1", "byte c1 begins no item (byte 7)"),
        (b"\xc1", "byte c1 begins no item (byte 0)"),
        (b"\x81\xa2id\x01\0", "bytes follow its end (byte 5 of 6)"),
    ],
)
@pytest.mark.parametrize("rule", ["id", "id.below", "other[3]", "key"])
def test_a_damaged_value_is_a_dead_letter(value, said, rule):
    one = Recipe(TrackingId(KeyRule()), fmt="msgpack") if rule == "key" else recipe(rule)
    found = everywhere(one, value)
    assert (found.kind.value, found.code, found.format_name) == ("unreadable", "not_msgpack", "")
    assert found.detail == f"the value is not MessagePack: {said}"


@pytest.mark.parametrize(
    ("value", "name"),
    [(b'{"id":"a"}', "json"), (b"\0\0\0\0\7" + pack({"id": 1}), "schema_registry"), (b"\x1f\x8b\x08", "gzip")],
)
def test_a_value_of_another_format_is_recognized(value, name):
    found = everywhere(recipe("id"), value)
    assert (found.code, found.format_name) == ("not_msgpack", name)


@pytest.mark.parametrize(
    "value",
    [
        b"\x82\xa2id\x01\xa2id\x01",
        b"\x82\xa2id\x01\xd9\x02id\x01",
        b"\x82\xda\0\2id\x01\xa2id\x02",
        b"\x82\xa2id\x01\xdb\0\0\0\2id\x02",
        b"\x82\xa2id\x90\xa2id\x02",
    ],
)
def test_a_repeated_name_on_the_path_is_refused(value):
    assert everywhere(recipe("id"), value).code == "repeated_member"
    assert everywhere(recipe("x"), value).code == "id_missing"


def test_only_names_on_the_path_count():
    many = b"\x83\xa1x\x01\xa1x\x02\xa2id\x01"
    assert everywhere(recipe("id"), many).id == b"\4\1"
    elsewhere = pack({"id": 1, "x": {"id": 2}, "y": "id", "z": ["\xa2id", {"id": 4}]})
    assert everywhere(recipe("id"), elsewhere).id == b"\4\1"
    outer = b"\x82\xa1a\x81\xa2id\x01\xa1a\x81\xa2no\x01"
    assert everywhere(recipe("a.id"), outer).code == "repeated_member"
    # A byte string is another key than a text with the same bytes, as are numbers.
    assert everywhere(recipe("id"), b"\x83\xc4\x02id\x01\xa2id\x02\x01\x02").id == b"\4\2"
    assert everywhere(recipe("id"), b"\x81\xc4\x02id\x01").code == "id_missing"
    assert everywhere(recipe("id"), b"\x81\xd9\x02id\x05").id == b"\4\5"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"\x81\xa2id\xa1\xff", "not_utf8"),
        (b"\x82\xa2id\xa1\xff\xa1x\1", "not_utf8"),
        (b"\x82\xa2id\xa1\xff", "not_msgpack"),
        (b"\x81\xa2id\xa1\xff\1", "not_msgpack"),
        (b"\x82\xa2id\xa1\xff\xa2id\1", "repeated_member"),
        (b"\x83\xa1t\xa1\xff\xa2id\1\xa2id\1", "not_utf8"),
        (b"\x83\xa1t\1\xa1t\1\xa2id\xa1\xff", "repeated_member"),
    ],
)
@pytest.mark.parametrize("rule", [FieldRule(("id",)), FirstOfRule((HeaderRule("h"), FieldRule(("id",))))])
def test_of_several_faults_damage_comes_first_and_the_event_time_precedes_the_id(value, code, rule):
    found = everywhere(Recipe(TrackingId(rule), FieldTime(("t",), "rfc3339"), fmt="msgpack"), value)
    assert (found.kind.value, found.code) == ("unreadable", code)


@pytest.mark.parametrize("path", ["a.id", "a[1]", "list.id", "list[7]", "none", "text.x"])
def test_a_path_that_leads_nowhere_is_missing(path):
    value = pack({"a": {"b": 1}, "list": [1, {"id": 2}], "text": "x"})
    assert everywhere(recipe(path), value).code == "id_missing"


def test_paths_lead_through_maps_and_arrays_and_one_another():
    value = pack({"a": {"id": 7, "n": "x"}, "list": [1, {"id": 2}], "é": "u", "x" * 40: 9, "": 3})
    assert everywhere(recipe("a.id", "a.n"), value).id == b"\x09\2\4\7\2\1x"
    assert everywhere(recipe("list[1].id"), value).id == b"\4\2"
    assert everywhere(recipe('["é"]'), value).id == b"\1u"
    assert everywhere(recipe("x" * 40), value).id == b"\4\x09"
    assert everywhere(recipe('[""]'), value).id == b"\4\3"
    assert everywhere(recipe("a", "a.id"), value).code == "id_container"
    assert everywhere(recipe("a.id", "a"), value).code == "id_container"
    assert everywhere(recipe("a.id"), pack([1])).code == "id_missing"
    assert everywhere(recipe("a.id", event_time=FieldTime(("a", "id"), "ms")), value).time_ms == 7


@pytest.mark.parametrize("name", ['"', "a\\b", "\n", "\0", "/", "\x7f", "\ufeff"])
def test_a_name_that_msgspec_cannot_rename_a_field_to_is_read_nonetheless(name):
    value = pack({"x": {name: 7}, name: "u"})
    assert everywhere(Recipe(TrackingId(FieldRule((name,))), fmt="msgpack"), value).id == b"\1u"
    nested = Recipe(TrackingId(KeyRule()), FieldTime(("x", name), "ms"), fmt="msgpack")
    assert everywhere(nested, value).time_ms == 7
    assert everywhere(nested, pack({"x": {}})).code == "time_missing"


@pytest.mark.parametrize("levels", [100, 2_000, 10_000])
@pytest.mark.parametrize("opened", [b"\x91", b"\x81\xa1x", b"\xdd\0\0\0\1"])
def test_no_depth_is_too_deep_for_what_is_passed_over(levels, opened):
    deep = opened * levels + b"\xc0"
    assert everywhere(recipe("id"), b"\x82\xa1x" + deep + b"\xa2id\x01").id == b"\4\1"
    assert everywhere(recipe("id"), b"\x82\xa1x" + opened * levels + b"\xa2id\x01").code == "not_msgpack"


def test_parts_and_alternatives():
    parts = PartsRule((Part(KeyRule()), Part(FieldRule(("a",)), True), Part(FieldRule(("b",)), True)))
    found = everywhere(Recipe(TrackingId(parts), fmt="msgpack"), pack({"a": None, "c": 1}))
    assert found.id == b"\x09\2\2k\1\x0b\1\x0c"
    rule = FirstOfRule((FieldRule(("a",)), FieldRule(("b",)), KeyRule()))
    one = Recipe(TrackingId(rule, ("trim",)), fmt="msgpack", fingerprint=True)
    assert everywhere(one, pack({"a": " x"})).id == b"\x0d\0\1x"
    assert everywhere(one, pack({"a": " ", "b": 1})).id == b"\x0d\1\4\1"
    assert everywhere(one, pack({})).id == b"\x0d\2\2k"
    assert everywhere(one, b"\x82\xa1a\x01\xa1a\x01").code == "repeated_member"


def test_payloads_are_compared_as_bytes():
    one = recipe("id", fingerprint=True)
    first, other = pack({"id": 1, "x": 2}), pack({"x": 2, "id": 1})
    assert everywhere(one, first).id == everywhere(one, other).id
    assert everywhere(one, first).fingerprint != everywhere(one, other).fingerprint


def test_one_odd_record_among_many():
    values = [pack({"id": number}) for number in range(100)]
    values[41], values[60], values[77] = b"\x82\xa2id\x01\xa2id\x01", pack({"id": 1.5}), None
    found = Extractor(recipe("id"))([None] * 100, values, [[]] * 100, [0] * 100)
    codes = {row: fault.code for row, fault in found.faults.items()}
    assert codes == {41: "repeated_member", 60: "id_ill_typed", 77: "tombstone"}
    assert found.ids[40] == b"\x04\x28"


@pytest.mark.parametrize(
    "items",
    [[1], [-1], [300], [1.5], ["abc"], ["x" * 40], [None, True], [1, 300], [1] * 30 + ["x", 300], [[1] * 20], [{}]],
)
@pytest.mark.parametrize("times", [1, 7, 8, 9, 200])
def test_runs_of_items_are_passed_over(items, times):
    """Beside the path, below it, and cut off anywhere."""
    value = pack({"x": items * times, "y": dict.fromkeys(map(str, range(times)), items[0]), "id": 7})
    assert everywhere(recipe("id"), value).id == b"\4\7"
    assert extract_one(recipe(f"x[{len(items) * times}]", "id"), b"k", value, [], 5).code == "id_missing"
    assert extract_one(recipe("x.id"), b"k", value, [], 5).code == "id_missing"
    for end in range(0, len(value), 1 + len(value) // 50):
        assert extract_one(recipe("id"), b"k", value[:end], [], 5).code == "not_msgpack"


@pytest.mark.parametrize(
    "odd",
    [
        {"id": None, "t": 1},
        {"id": 1.5, "t": 1},
        {"t": 1},
        {"id": "", "t": 1},
        {"id": 7, "t": "x"},
        {"id": 7, "t": 1, "items": [{"id": 2}]},
        {"id": 1 << 63, "t": 1},
        [],
    ],
    ids=str,
)
def test_one_unusual_record_slows_down_only_a_few(odd):
    one = recipe("id", event_time=FieldTime(("t",), "ms"), fingerprint=True)
    assert slow_rows(one, pack({"id": "a", "t": 1}), pack(odd)) <= FEW
    assert slow_rows(one, pack({"id": "a", "t": 1}), b"\x82\xa2id\1\xa2id\1") <= FEW


def test_names_that_recur_elsewhere_are_no_reason_to_read_slowly():
    nested = {"id": 1, "a": {"id": "u", "n": 1}, "items": [{"id": 2, "a": {"id": 3}}], "n": "\xa2id"}
    for paths in (["id"], ["a.id"], ["id", "a.id", "a.n"]):
        assert slow_rows(recipe(*paths, fingerprint=True), pack(nested), pack(nested)) == 0
    for repeated in (b"\x82\xa2id\1\xa2id\1", b"\x82\xd9\2id\1\xa2id\1", b"\xde\0\2\xa2id\1\xdb\0\0\0\2id\1"):
        for value in (repeated, b"\x81\xa1a" + repeated):
            one = recipe("id" if value is repeated else "a.id", fingerprint=True)
            assert everywhere(one, value).code == "repeated_member"
