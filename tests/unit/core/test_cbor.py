"""CBOR values: golden vectors of every type as ID and as time, one verdict for each way to be damaged."""

import json
import sys
from pathlib import Path
from unittest import mock

import cbor2
import pytest

from dedup.core import extract
from dedup.core import tracking_id as encoding
from dedup.core.event_time import FieldTime
from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import Fault, One, extract_one, of_leaves
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

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "cbor.json").read_text())
pack = cbor2.dumps


def recipe(*paths, **options):
    rule = FieldsRule(tuple(map(parse_path, paths))) if len(paths) > 1 else FieldRule(parse_path(paths[0]))
    return Recipe(TrackingId(rule), fmt="cbor", **options)


def test_the_vectors_are_of_this_encoding():
    assert VECTORS["encoding_version"] == encoding.ENCODING_VERSION


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
@pytest.mark.parametrize("around", ["before", "behind"])
def test_a_vector_as_id_and_as_time(case, around):
    item, end = b"\x61f" + bytes.fromhex(case["value"]), b"\x63end\xf5"
    value = b"\xa2" + (item + end if around == "behind" else end + item)
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
        (b"\xa1", "it ends where an item must follow (byte 1)"),
        (b"\xa1\x62i", "it ends inside an item of 2 bytes (byte 2)"),
        (b"\xa1\x62id", "it ends where an item must follow (byte 4)"),
        (b"\xa1\x62id\x19\x01", "it ends inside an item of 2 bytes (byte 5)"),
        (b"\xa1\x62id\x7b" + b"\xff" * 8, "it ends inside an item of 18446744073709551615 bytes (byte 13)"),
        (b"\xa2\x62id\x01\x61x\x9b" + b"\xff" * 8, "it ends where an item must follow (byte 16)"),
        (b"\xa2\x62id\x01\x61x\xbb\x80" + b"\0" * 7, "it ends where an item must follow (byte 16)"),
        (b"\xbb" + b"\xff" * 8 + b"\x62id\x01", "it ends where an item must follow (byte 13)"),
        (b"\xa2\x62id\x01\x61x\x5f\x42\0", "it ends inside an item of 2 bytes (byte 9)"),
        (b"\xa2\x62id\x01\x61x\x5f\x41\0", "it ends where an item must follow (byte 10)"),
        (b"\xa2\x62id\x01\x61x\x5f\x61a\xff", "a string of indefinite length has another item in it (before byte 9)"),
        (b"\xa2\x62id\x01\x61x\xf8\x14", "a simple value has two bytes instead of one (before byte 9)"),
        (b"\xa2\x62id\x01\x61x\xfc", "byte fc begins no item (byte 7)"),
        (b"\xa2\x62id\x01\x61x\xff", "byte ff begins no item (byte 7)"),
        (b"\xa2\x62id\x01\x61x\xc1", "it ends where an item must follow (byte 8)"),
        (b"\xbf\x62id\x01", "it ends where an item must follow (byte 5)"),
        (b"\xbf\x62id\x01\x61x\xff", "byte ff begins no item (byte 7)"),
        (b"\xa2\x62id\x01\x61x\x9f\xbf\x01\xff\xff", "byte ff begins no item (byte 10)"),
        (b"\xff", "byte ff begins no item (byte 0)"),
        (b"\xa1\x62id\x01\0", "bytes follow its end (byte 5 of 6)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rule", ["id", "id.below", "other[3]", "key"])
def test_a_damaged_value_is_a_dead_letter(value, said, rule):
    one = Recipe(TrackingId(KeyRule()), fmt="cbor") if rule == "key" else recipe(rule)
    found = everywhere(one, value)
    assert (found.kind.value, found.code, found.format_name) == ("unreadable", "not_cbor", "")
    assert found.detail == f"the value is not CBOR: {said}"


@pytest.mark.parametrize("items", ["8101", "80", "9fff", "9f01ff", "9f0102", "820102"])
def test_a_decimal_of_too_few_items_has_no_type_but_is_no_damage(items):
    """Was: damaged, if the array has an indefinite length."""
    value = b"\xa1\x62id\xc4" + bytes.fromhex(items)
    expected = {"9f0102": "not_cbor", "820102": ""}.get(items, "id_ill_typed")
    assert getattr(everywhere(recipe("id"), value), "code", "") == expected


@pytest.mark.parametrize(
    ("value", "name"),
    [(b'{"id":"a"}', "json"), (b"\0\0\0\0\7" + pack({"id": 1}), "schema_registry"), (b"\x1f\x8b\x08", "gzip")],
)
def test_a_value_of_another_format_is_recognized(value, name):
    found = everywhere(recipe("id"), value)
    assert (found.code, found.format_name) == ("not_cbor", name)


@pytest.mark.parametrize(
    "value",
    [
        b"\xa2\x62id\x01\x62id\x01",
        b"\xa2\x62id\x01\x78\x02id\x01",
        b"\xa2\x7b\0\0\0\0\0\0\0\2id\x01\x62id\x02",
        b"\xa2\x7f\x61i\x61d\xff\x01\x62id\x02",
        b"\xbf\x62id\x80\x7f\x62id\xff\x02\xff",
    ],
)
def test_a_repeated_name_on_the_path_is_refused(value):
    assert everywhere(recipe("id"), value).code == "repeated_member"
    assert everywhere(recipe("x"), value).code == "id_missing"


def test_only_names_on_the_path_count():
    many = b"\xa3\x61x\x01\x61x\x02\x62id\x01"
    assert everywhere(recipe("id"), many).id == b"\4\1"
    outer = b"\xa2\x61a\xa1\x62id\x01\x61a\xa1\x62no\x01"
    assert everywhere(recipe("a.id"), outer).code == "repeated_member"
    # A byte string is another key than a text with the same bytes, as are numbers and tagged texts.
    assert everywhere(recipe("id"), b"\xa4\x42id\x01\x62id\x02\x01\x02\xd8\x20\x62id\x03").id == b"\4\2"
    assert everywhere(recipe("id"), b"\xa1\x42id\x01").code == "id_missing"
    assert everywhere(recipe("id"), b"\xa1\xa1\x62id\x01\x02").code == "id_missing"


_MARK = b"\xd9\xd9\xf7"


@pytest.mark.parametrize("mark", [_MARK, b"\xda\0\0\xd9\xf7", _MARK * 3])
def test_the_tag_that_marks_cbor_is_ignored_everywhere(mark):
    assert everywhere(recipe("id"), mark + b"\xa1" + mark + b"\x62id" + mark + b"\x01").id == b"\4\1"
    assert everywhere(recipe("id"), b"\xa1" + mark + b"\x7f\x61i\x61d\xff\x01").id == b"\4\1"
    # A reader that ignores the tag sees the same name twice.
    assert everywhere(recipe("id"), b"\xa2\x62id\x01" + mark + b"\x62id\x02").code == "repeated_member"
    assert everywhere(recipe("id"), b"\xa1\x62id\xc2" + mark + b"\x41\7").id == b"\4\7"
    plain = everywhere(recipe("id"), b"\xa1\x62id\xc4\x82\x20\xc2\x41\7").id
    parts = [b"\xa1\x62id\xc4", b"\x82", b"\x20", b"\xc2", b"\x41\7"]
    assert everywhere(recipe("id"), mark.join(parts)).id == plain
    raw = bytes(range(16))
    assert everywhere(recipe("id"), b"\xa1\x62id\xd8\x25" + mark + b"\x50" + raw).id == b"\3" + raw
    timed = recipe("id", event_time=FieldTime(("t",), "timestamp"))
    assert everywhere(timed, b"\xa2\x62id\1\x61t\xc1" + mark + b"\7").time_ms == 7_000
    assert everywhere(timed, b"\xa2\x62id\1\x61t\xc0" + mark + b"\x74" + b"2013-03-21T20:04:00Z").time_ms % 1_000 == 0
    # A key with another tag is not text, and the tag must have an item behind it.
    assert everywhere(recipe("id"), b"\xa1" + mark + b"\xd8\x20\x62id\x01").code == "id_missing"
    assert everywhere(recipe("id"), b"\xbf" + mark + b"\xff").code == "not_cbor"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"\xa1\x62id\x61\xff", "not_utf8"),
        (b"\xa2\x62id\x61\xff\x61x\1", "not_utf8"),
        (b"\xa2\x62id\x61\xff", "not_cbor"),
        (b"\xa1\x62id\x61\xff\1", "not_cbor"),
        (b"\xa2\x62id\x61\xff\x62id\1", "repeated_member"),
        (b"\xa3\x61t\x61\xff\x62id\1\x62id\1", "not_utf8"),
        (b"\xa3\x61t\1\x61t\1\x62id\x61\xff", "repeated_member"),
    ],
)
@pytest.mark.parametrize("rule", [FieldRule(("id",)), FirstOfRule((HeaderRule("h"), FieldRule(("id",))))])
def test_of_several_faults_damage_comes_first_and_the_event_time_precedes_the_id(value, code, rule):
    found = everywhere(Recipe(TrackingId(rule), FieldTime(("t",), "rfc3339"), fmt="cbor"), value)
    assert (found.kind.value, found.code) == ("unreadable", code)


@pytest.mark.parametrize("path", ["a.id", "a[1]", "list.id", "list[7]", "none", "text.x", "tagged.id"])
def test_a_path_that_leads_nowhere_is_missing(path):
    value = pack({"a": {"b": 1}, "list": [1, {"id": 2}], "text": "x", "tagged": cbor2.CBORTag(259, {"id": 1})})
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
    assert everywhere(recipe("list[1].id"), b"\xd9\xd9\xf7\xbf\x64list\x9f\x01\xbf\x62id\x02\xff\xff\xff").id == b"\4\2"


@pytest.mark.parametrize("levels", [100, 2_000, 10_000])
@pytest.mark.parametrize(
    ("opened", "closed"),
    [(b"\x81", b""), (b"\xa1\x61x", b""), (b"\x9f", b"\xff"), (b"\xbf\x61x", b"\xff"), (b"\xc1", b"")],
)
def test_no_depth_is_too_deep_for_what_is_passed_over(levels, opened, closed):
    deep = opened * levels + b"\xf6" + closed * levels
    assert everywhere(recipe("id"), b"\xa2\x61x" + deep + b"\x62id\x01").id == b"\4\1"
    assert everywhere(recipe("id"), b"\xa2\x61x" + opened * levels + b"\x62id\x01").code == "not_cbor"
    assert everywhere(recipe("x"), b"\xa2\x61x" + deep + b"\x62id\x01").kind.value == "missing_id"


def test_a_bignum_is_bounded():
    digits = everywhere(recipe("id"), b"\xa1\x62id\xc2\x59\x04\x00" + b"\xff" * 1_024)
    assert digits.id[:1] == b"\0"
    assert everywhere(recipe("id"), b"\xa1\x62id\xc2\x59\x04\x01" + b"\xff" * 1_025).code == "id_ill_typed"


def test_parts_and_alternatives():
    parts = PartsRule((Part(KeyRule()), Part(FieldRule(("a",)), True), Part(FieldRule(("b",)), True)))
    found = everywhere(Recipe(TrackingId(parts), fmt="cbor"), pack({"a": None, "c": 1}))
    assert found.id == b"\x09\2\2k\1\x0b\1\x0c"
    rule = FirstOfRule((FieldRule(("a",)), FieldRule(("b",)), KeyRule()))
    one = Recipe(TrackingId(rule, ("trim",)), fmt="cbor", fingerprint=True)
    assert everywhere(one, pack({"a": " x"})).id == b"\x0d\0\1x"
    assert everywhere(one, pack({"a": " ", "b": 1})).id == b"\x0d\1\4\1"
    assert everywhere(one, pack({})).id == b"\x0d\2\2k"
    assert everywhere(one, b"\xa2\x61a\x01\x61a\x01").code == "repeated_member"


def test_payloads_are_compared_as_bytes():
    one = recipe("id", fingerprint=True)
    first, other = pack({"id": 1, "x": 2}), pack({"x": 2, "id": 1})
    assert everywhere(one, first).id == everywhere(one, other).id
    assert everywhere(one, first).fingerprint != everywhere(one, other).fingerprint


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
        assert extract_one(recipe("id"), b"k", value[:end], [], 5).code == "not_cbor"


def jackson(item):
    """Return an item as Jackson writes it: with maps and arrays of indefinite length."""
    match item:
        case list():
            return b"\x9f" + b"".join(map(jackson, item)) + b"\xff"
        case dict():
            return b"\xbf" + b"".join(pack(key) + jackson(inner) for key, inner in item.items()) + b"\xff"
        case _:
            return pack(item)


@pytest.mark.parametrize(
    "tags", [b"", b"\xc1", b"\xc1\x81\xd8\x20" * 9, b"\x81" * 9, b"\xd9\1\2\xda\0\0\0\1\xdb" + b"\1" * 8]
)
@pytest.mark.parametrize("item", [1, 300, 1.5, "abc", "x" * 40, [], {}, [1, "x", 300], {"x": 1}, {"x": [], "yy": 300}])
@pytest.mark.parametrize("times", [1, 2, 9, 50])
def test_indefinite_lengths_and_tags_are_passed_over(item, times, tags):
    """Beside the path, below it, and cut off anywhere."""
    inner = tags + jackson(item)
    members = b"".join(jackson(str(at)) + inner for at in range(times))
    members += b"".join(inner + b"\1" for at in range(times))
    value = b"\xbf\x61x\x9f" + inner * times + b"\xff\x61y\xbf" + members + b"\xff\x62id\7\xff"
    assert everywhere(recipe("id"), value).id == b"\4\7"
    assert extract_one(recipe(f"x[{times}]", "id"), b"k", value, [], 5).code == "id_missing"
    assert extract_one(recipe("y.id"), b"k", value, [], 5).code == "id_missing"
    for end in range(0, len(value), 1 + len(value) // 50):
        assert extract_one(recipe("id"), b"k", value[:end], [], 5).code == "not_cbor"


@pytest.mark.parametrize(
    "inside",
    [
        b"\x9f\xc1\xff",
        b"\xbf\x01\xff",
        b"\xbf\x61x\xff",
        b"\xbf\xc1\xff\xff",
        b"\x81\xff",
        b"\x9f\x81\xff",
        b"\x82\1\xff",
    ],
)
def test_the_end_of_an_indefinite_length_stands_where_an_item_may_be_missing(inside):
    for value in (b"\xa2\x61x" + inside + b"\x62id\1", b"\xa2\x61x\x9f" + inside + b"\xff\x62id\1"):
        found = everywhere(recipe("id"), value)
        assert (found.code, found.detail[:39]) == ("not_cbor", "the value is not CBOR: byte ff begins n")


@pytest.mark.parametrize(
    "inside",
    [b"\x9f" + b"\1" * 200_000 + b"\xff", b"\xbf" + b"\1\x61a" * 70_000 + b"\xff", b"\xc1" * 200_000 + b"\1"],
    ids=["array", "map", "tags"],
)
def test_many_small_items_are_skipped_at_once_not_one_by_one(inside):
    # The event loop stands still meanwhile, so a step for each item would be felt.
    assert lines_run(b"\xa2\x61x" + inside + b"\x62id\1") < 10_000


def lines_run(value):
    lines = 0

    def count(_frame, event, _argument):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        found = extract_one(recipe("id"), b"k", value, [], 5)
    finally:
        sys.settrace(before)
    assert found.id == b"\4\1"
    return lines


def test_one_unusual_record_is_judged_apart():
    one = recipe("id", fingerprint=True)
    assert slow_rows(one, pack({"id": "a"}), pack({"id": None})) - 1_000 <= FEW  # CBOR is always read one by one


def test_rows_without_a_header_are_judged_apart():
    rule = PartsRule((Part(FieldRule(("id",))), Part(HeaderRule("h"), True)))
    one = Recipe(TrackingId(rule), fmt="cbor", fingerprint=True)
    headers = [[("h", b"x")] if at % 3 else [] for at in range(999)]
    values = [pack({"id": str(at)}) for at in range(999)]
    with mock.patch.object(extract, "of_leaves", side_effect=of_leaves) as judged:
        found = Extractor(one)([None] * 999, values, headers, [0] * 999)
    assert judged.call_count == 333
    for at in range(999):
        assert found.ids[at] == extract_one(one, None, values[at], headers[at], 0).id
