"""IDs that a user's function returns: what is taken, what is refused, and what a repartition task passes on."""

from dataclasses import replace
from functools import partial
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.core import tracking_id as encoding
from dedup.core.event_time import FieldTime, RecordTime
from dedup.core.extract import Extractor, compile_extractor
from dedup.core.extract_one import EXTRACTED, Fault, FaultKind, One, Recipe, extract_one, passed_on
from dedup.core.tracking_id import CodeRule, FieldRule, FirstOfRule, TrackingId, state_key
from dedup.errors import Terminated

UUID_TEXT = "8f14e45f-ceea-467f-a0e6-5b3e0d3a1c11"
FAILS = object()


def _returning(found, *_):
    if found is FAILS:
        raise ValueError("no such order")
    return found


def _loaded(function):
    return function


def rule(function):
    return CodeRule("ids:order_id", 1, partial(_loaded, function))


def recipe(function, fmt="bytes", normalize=(), **more):
    return Recipe(TrackingId(rule(function), normalize), fmt=fmt, **more)


@pytest.mark.parametrize(
    ("found", "key"),
    [
        ("A-1", b"\x01A-1"),
        (UUID_TEXT, b"\x03" + UUID(UUID_TEXT).bytes),
        (UUID_TEXT.encode(), b"\x03" + UUID(UUID_TEXT).bytes),
        (b"A-1", b"\x02A-1"),
        (7, encoding.encode_integer(7)),
        (-(1 << 63), encoding.encode_integer(-(1 << 63))),
        (1 << 63, b"\x059223372036854775808"),
        (-(1 << 63) - 1, b"\x05-9223372036854775809"),
        ("x" * 40, state_key(b"\x01" + b"x" * 40)),
        (encoding.StateKey(b"\x01A-1"), b"\x01A-1"),
        (encoding.StateKey(state_key(b"\x01" + b"x" * 40)), state_key(b"\x01" + b"x" * 40)),
    ],
)
def test_what_a_function_may_return(found, key):
    wanted = One(key, 5, b"")
    assert extract_one(recipe(partial(_returning, found)), b"k", b"v", (), 5) == wanted
    assert extract_one(recipe(partial(_returning, found)), b"k", None, (), 5) == wanted  # a null value is its affair
    several = Extractor(recipe(partial(_returning, found)))([b"k"] * 9, [b"v"] * 9, [()] * 9, [5] * 9)
    assert (several.ids, several.faults) == ([key] * 9, {})


@pytest.mark.parametrize(
    ("found", "kind", "code", "says"),
    [
        (None, FaultKind.MISSING_ID, "id_null", "what ids:order_id returned is null"),
        ("", FaultKind.MISSING_ID, "id_empty", "what ids:order_id returned is empty"),
        (b"", FaultKind.MISSING_ID, "id_empty", "what ids:order_id returned is empty"),
        (True, FaultKind.MISSING_ID, "id_ill_typed", "has the type bool; return str, bytes, int, or None"),
        (1.0, FaultKind.MISSING_ID, "id_ill_typed", "has the type float"),
        (["a"], FaultKind.MISSING_ID, "id_ill_typed", "has the type list"),
        pytest.param(10**5000, FaultKind.MISSING_ID, "id_out_of_range", "is an integer of 16610 bits", id="huge"),
        ("\ud800", FaultKind.UNREADABLE, "lone_surrogate", "unpaired surrogate"),
        (FAILS, FaultKind.UNREADABLE, "id_function_failed", "ids:order_id raised ValueError: no such order"),
    ],
)
def test_what_makes_a_dead_letter_and_keeps_its_neighbors(found, kind, code, says):
    one = extract_one(recipe(partial(_returning, found)), b"k", b"v", (), 5)
    assert isinstance(one, Fault)
    assert (one.kind, one.code, says in one.detail) == (kind, code, True)
    values = [b"%d" % row for row in range(40)]
    among = recipe(lambda _key, value, _headers: _returning(found if value == b"17" else value))
    several = Extractor(among)([None] * 40, values, [()] * 40, [5] * 40)
    assert several.faults == {17: one}
    assert several.ids == [None if value == b"17" else b"\x02" + value for value in values]


def test_a_function_that_ends_the_process_or_has_a_broken_message_is_a_dead_letter():
    class Silent(Exception):
        def __str__(self):
            raise KeyError

    def leaves(*_):
        raise SystemExit(3)

    def breaks(*_):
        raise Silent

    def speaks(*_):
        raise ValueError("\ud800" + "x" * 900)

    texts = [extract_one(recipe(function), b"k", b"v", (), 5).detail for function in (leaves, breaks, speaks)]
    assert texts[:2] == ["ids:order_id raised SystemExit: 3", "ids:order_id raised Silent"]
    assert texts[2].startswith("ids:order_id raised ValueError: \\ud800xxx")
    assert len(texts[2]) < 600


def test_a_function_is_asked_once_for_each_record_whose_value_can_be_read():
    calls = []

    def counts(_key, value, _headers):
        calls.append(value)
        return None if value == b"3" else b"bytes" if value == b"5" else int(value) if value == b"7" else "text"

    values = [b"%d" % row if row != 9 else b"{" for row in range(40)]
    found = Extractor(recipe(counts, fmt="json"))([None] * 40, values, [()] * 40, [5] * 40)
    assert calls == [value for value in values if value != b"{"]
    assert {row: fault.code for row, fault in found.faults.items()} == {3: "id_null", 9: "not_json"}


def test_a_signal_that_arrives_in_a_function_is_no_dead_letter():
    def ended(*_):
        raise Terminated(143)

    with pytest.raises(Terminated):
        Extractor(recipe(ended))([None] * 9, [b"v"] * 9, [()] * 9, [5] * 9)
    with pytest.raises(Terminated):
        extract_one(recipe(ended), None, b"v", (), 5)


def test_a_function_can_not_change_the_headers_that_are_forwarded():
    def changes(_key, _value, headers):
        headers.append(("x", b"y"))

    headers = [[("a", b"b")] for _ in range(9)]
    found = Extractor(recipe(changes))([None] * 9, [b"v"] * 9, headers, [5] * 9)
    assert {fault.code for fault in found.faults.values()} == {"id_function_failed"}
    assert headers == [[("a", b"b")] for _ in range(9)]


def test_ids_are_normalized_and_compared_as_other_ids_are():
    given = ["  A-1 ", b" a-1", "2024-01-01T01:00:00+01:00", 7]
    steps = ("trim", "lower", "instant")
    found = [extract_one(recipe(partial(_returning, each), normalize=steps), None, b"v", (), 5).id for each in given]
    assert found == [b"\x01a-1", b"\x02a-1", b"\x0e2024-01-01T00:00:00Z", encoding.encode_integer(7)]


def test_a_value_of_another_format_and_a_bad_time_are_told_as_with_other_rules():
    json_recipe = recipe(lambda *_: "a", fmt="json", event_time=FieldTime(("at",), "ms"))
    faults = [extract_one(json_recipe, b"k", value, (), 5) for value in (b"{", b"{}", None)]
    assert [each.code for each in faults] == ["not_json", "time_missing", "tombstone"]


ANY = st.one_of(
    st.none(),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.integers(-(1 << 70), 1 << 70),
    st.just(UUID_TEXT),
    st.sampled_from([True, 1.5, FAILS, "2024-01-01T00:00:00Z", "\ud800", " x ", encoding.StateKey(b"\x01a")]),
)


@given(st.lists(ANY, max_size=30), st.sampled_from([(), ("trim",), ("lower", "instant")]), st.booleans())
def test_columns_equal_one_by_one_and_what_is_passed_on_gives_the_same_again(found, normalize, first_of):
    def function(_key, value, _headers):
        return _returning(found[int(value)])

    own = recipe(function, normalize=normalize)
    if first_of:
        rules = FirstOfRule((rule(function), FieldRule(("id",))))
        own = replace(own, tracking_id=TrackingId(rules, normalize), fmt="json")
    values = [b"%d" % row for row in range(len(found))]
    extractor = compile_extractor(own.tracking_id, RecordTime(), fmt=own.fmt, fingerprint=False)
    columns = extractor([None] * len(found), values, [()] * len(found), [5] * len(found))
    for row, value in enumerate(values):
        one = extract_one(own, None, value, (), 5)
        assert columns.faults.get(row) == (one if isinstance(one, Fault) else None)
        assert columns.ids[row] == (None if isinstance(one, Fault) else one.id)
    headers = [
        [("own", b"h"), (EXTRACTED, passed_on(own or columns.faults[row]))] for row, own in enumerate(columns.ids)
    ]
    found[:] = ["changed"] * len(found)
    again = extractor.again([None] * len(values), values, headers, [5] * len(values))
    assert (again.ids, again.faults) == (columns.ids, columns.faults)


def test_a_state_key_is_its_own_state_key():
    key = state_key(b"\x01" + b"x" * 100)
    assert state_key(key) == key
