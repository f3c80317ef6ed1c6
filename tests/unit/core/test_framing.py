"""A schema registry's framing: where the payload is, and one reason for each way in which it can be damaged."""

import pytest

from dedup.core.exact_json import Unreadable
from dedup.core.extract import Extractor, Recipe
from dedup.core.extract_one import FaultKind, extract_one
from dedup.core.framing import HEADER, framed, named, payload_of, payloads_of, refs_of, rows_by_ref
from dedup.core.tracking_id import ContentRule, FieldRule, KeyRule, RawContentRule, TrackingId

JSON = b'{"id":7}'
PREFIX = b"\0\0\0\0\x2a"
GUID = b"\1" + bytes(range(16))
PLAIN = Recipe(TrackingId(FieldRule(("id",))), fingerprint=True)
FRAMED = Recipe(TrackingId(FieldRule(("id",))), fmt="json_schema", fingerprint=True)


@pytest.mark.parametrize("place", ["auto", "prefix"])
def test_a_prefix_is_taken_off(place):
    assert payload_of(place, PREFIX + JSON, [("other", b"x")]) == JSON
    assert payload_of(place, PREFIX, []) == b""


@pytest.mark.parametrize("place", ["auto", "header"])
@pytest.mark.parametrize("schema_id", [PREFIX, GUID])
def test_a_header_leaves_the_value_whole(place, schema_id):
    for value in (JSON, PREFIX + JSON, b""):
        assert payload_of(place, value, [("other", None), (HEADER, schema_id)]) == value


def test_a_header_means_nothing_where_only_the_prefix_counts():
    assert payload_of("prefix", PREFIX + JSON, [(HEADER, None)]) == JSON


@pytest.mark.parametrize(
    ("place", "value", "headers", "code"),
    [
        ("auto", JSON, [], "wrong_magic_byte"),
        ("prefix", JSON, [(HEADER, PREFIX)], "wrong_magic_byte"),
        ("auto", GUID + JSON, [], "wrong_magic_byte"),
        ("auto", b"\xff", [], "wrong_magic_byte"),
        ("auto", b"", [], "truncated_framing"),
        ("prefix", b"\0\0\0\0", [], "truncated_framing"),
        ("header", PREFIX + JSON, [], "schema_id_missing"),
        ("auto", JSON, [(HEADER, PREFIX), (HEADER, PREFIX)], "repeated_header"),
        *(
            ("auto", PREFIX + JSON, [(HEADER, bad)], "bad_schema_id")
            for bad in (
                None,
                b"",
                b"\0\0\0\0",
                PREFIX + b"\0",
                GUID[:-1],
                b"\1" + PREFIX[1:],
                b"\2" + PREFIX[1:],
                b"42",
            )
        ),
    ],
)
def test_each_damage_has_one_reason_in_every_path(place, value, headers, code):
    with pytest.raises(Unreadable) as caught:
        payload_of(place, value, headers)
    assert caught.value.code == code
    assert "id" not in caught.value.detail.replace("schema id", "").split(), "nothing of the payload"
    assert payloads_of(place, [value] * 6, [headers] * 6) == [None] * 6
    for rule in (FieldRule(("id",)), KeyRule(), RawContentRule(), ContentRule()):
        recipe = Recipe(TrackingId(rule), fmt="json_schema", schema_id=place)
        fault = extract_one(recipe, b"k", value, headers, 0)
        assert (fault.kind, fault.code) == (FaultKind.UNREADABLE, code)
        found = Extractor(recipe)([b"k"] * 6, [value] * 6, [headers] * 6, [0] * 6)
        assert found.faults == dict.fromkeys(range(6), fault)


def test_a_format_without_framing_is_named():
    fault = extract_one(FRAMED, None, b"\x1f\x8b...", [], 0)
    assert (fault.code, fault.format_name) == ("wrong_magic_byte", "gzip")


@pytest.mark.parametrize("place", ["prefix", "header"])
def test_ids_and_fingerprints_are_those_of_the_payload(place):
    """So a topic may change its format: the state that holds its IDs stays good."""
    value, headers = framed(place, JSON)
    assert extract_one(FRAMED, None, value, headers, 5) == extract_one(PLAIN, None, JSON, [], 5)
    spelled, headers = framed(place, b'{ "id" : 7 }')
    assert extract_one(FRAMED, None, spelled, headers, 5) == extract_one(PLAIN, None, JSON, [], 5)


def test_the_raw_content_is_the_value_with_its_framing():
    raw = Recipe(TrackingId(RawContentRule()), fmt="json_schema")
    ids = {extract_one(raw, None, PREFIX[:4] + each + JSON, [], 0).id for each in (b"\1", b"\2")}
    assert ids == {b"\x02" + PREFIX[:4] + each + JSON for each in (b"\1", b"\2")}
    assert extract_one(raw, None, JSON, [(HEADER, PREFIX)], 0).id == b"\x02" + JSON


@pytest.mark.parametrize("place", ["auto", "header", "prefix"])
def test_the_schema_ids_of_a_column(place):
    values = [PREFIX + JSON, JSON, None, b"\0", PREFIX]
    headers = [[], [(HEADER, GUID)], [], [], [(HEADER, None)]]
    found = {
        "auto": [PREFIX, GUID, None, None, None],
        "header": [None, GUID, None, None, None],
        "prefix": [PREFIX, None, None, None, PREFIX],
    }
    assert refs_of(place, values, headers) == found[place]
    assert refs_of(place, [], []) == []  # a fetch may contain nothing but markers of transactions
    assert refs_of(place, values[:1] * 3, headers[:1] * 3) == found[place][:1] * 3
    assert [named(PREFIX), named(GUID)] == ["42", "00010203-0405-0607-0809-0a0b0c0d0e0f"]


def test_whole_batches_are_taken_in_columns(monkeypatch):
    monkeypatch.setattr("dedup.core.extract.extract_one", lambda *record: pytest.fail(f"{record} went the slow way"))
    prefix, header = PREFIX + b'{"id":"\xc3\xa9"}', [(HEADER, GUID)]
    for values, headers in (
        ([prefix] * 9, [[]] * 9),
        ([prefix] * 9, [[("trace", b"x")]] * 9),
        ([JSON] * 9, [header] * 9),
    ):
        assert not Extractor(FRAMED)([None] * 9, values, headers, [0] * 9).faults


def test_rows_are_grouped_by_their_schema_in_order():
    assert rows_by_ref([b"a", b"b", b"a", None, b"b"]) == [[0, 2], [1, 4], [3]]
    assert rows_by_ref([]) == []
