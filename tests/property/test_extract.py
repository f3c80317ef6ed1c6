"""The column extractor equals `extract_one` on every input, however odd."""

import gc
import json
import random
from types import FrameType, TracebackType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dedup.core.event_time import RecordTime
from dedup.core.exact_json import Unreadable, canonical_json, content_of, decode, excluded
from dedup.core.extract import Extractor, FaultKind, Recipe, bytes_keys, scalar_keys, text_keys
from dedup.core.extract_one import Fault, One, extract_one
from dedup.core.tracking_id import KeyRule, TrackingId, encode_bytes, encode_integer, encode_text, state_key
from tests.property.extract_cases import (
    AVRO,
    AVRO_EVENTS,
    CBOR,
    CBOR_EVENTS,
    CSV,
    CSV_EVENTS,
    EVENTS,
    EXTRACTORS,
    FILLER,
    MSGPACK,
    MSGPACK_EVENTS,
    NAME,
    PROTOBUF,
    PROTOBUF_EVENTS,
    RECIPES,
    SCHEMA_IDS,
    UUID,
    framed,
)


def compare(name, keys, values, headers, times_ms):
    recipe = RECIPES[name]
    found = EXTRACTORS[name](keys, values, headers, times_ms)
    assert len(found.ids) == len(found.times_ms) == len(values)
    for row in range(len(values)):
        one = extract_one(recipe, keys[row], values[row], headers[row], times_ms[row])
        match one:
            case One():
                assert row not in found.faults, (values[row], found.faults.get(row))
                fingerprint = b"" if found.fingerprints is None else found.fingerprints[row]
                assert One(found.ids[row], found.times_ms[row], fingerprint) == one, values[row]
                assert len(one.id) <= 33
                assert type(found.times_ms[row]) is int
            case Fault():
                assert (found.ids[row], found.times_ms[row], found.faults.get(row)) == (None, 0, one), values[row]
    assert (found.fingerprints is not None) == recipe.fingerprint


def compare_everywhere(values):
    keys = [None if row % 7 == 3 else value for row, value in enumerate(values)]
    headers = [[("h", value), ("g", b"1")] for value in keys]
    times_ms = [row * 1000 - 3 for row in range(len(values))]
    for name in RECIPES:
        compare(name, keys, values, headers, times_ms)
    # With a seed made of the batch, an example that fails fails again.
    dice = random.Random(repr(values))
    for spoilt in (0, 0.2):
        made = [framed(value, dice, spoilt) for value in values]
        prefixed = [(value, []) if value is None else (SCHEMA_IDS[0] + value, []) for value in values]
        of_header = [(value, [(NAME, SCHEMA_IDS[2])]) for value in values]
        for pairs in (made, prefixed, of_header):
            own = [[*row, *more] for row, (_, more) in zip(headers, pairs, strict=True)]
            for name in (name for name in RECIPES if name.startswith("framed")):
                compare(name, keys, [value for value, _ in pairs], own, times_ms)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 66), 1 << 66),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=6),
    st.text(st.characters(codec=None, categories=("Cs", "Lu", "Zs", "Cc")), max_size=4),
    st.sampled_from([UUID, UUID.upper(), UUID[:-1], UUID + "0", UUID.replace("-", ""), "", " ", "id", "x" * 40]),
    st.sampled_from(["2026-01-31T08:00:00Z", "2026-02-30T08:00:00Z", "2016-12-31T23:59:60Z", "0000-01-01T00:00:00.1Z"]),
)
names = st.sampled_from(["id", "t", "a", "x", "é", "a/b", "", "ID"])
contents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(names, inner), max_size=4).map(tuple),
    max_leaves=8,
)


def spell(text, rng):
    """A JSON string, some characters spelled as escapes."""
    plain = json.dumps(text, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.8:
        return plain
    return (
        '"'
        + "".join(
            f"\\u{ord(char):04x}" if ord(char) < 0x10000 and rng.random() < 0.3 else json.dumps(char)[1:-1]
            for char in text
        )
        + '"'
    )


def write(content, rng):
    """JSON text of a content whose objects are tuples of pairs, so that members may be repeated."""
    space = rng.choice(["", "", "", " ", "\n"])
    match content:
        case tuple():
            return (
                "{" + ",".join(f"{space}{spell(name, rng)}{space}:{write(inner, rng)}" for name, inner in content) + "}"
            )
        case list():
            return "[" + ("," + space).join(write(inner, rng) for inner in content) + "]"
        case str():
            return spell(content, rng)
        case _:
            return json.dumps(content)


records = st.one_of(
    contents,
    st.tuples(scalars, scalars, contents).map(lambda parts: (("id", parts[0]), ("t", parts[1]), ("a", parts[2]))),
    st.tuples(st.text(min_size=1, max_size=5), st.integers(-5, 1 << 62)).map(
        lambda parts: (("id", parts[0]), ("t", parts[1]))
    ),
)


@st.composite
def batches(draw):
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    rows = draw(st.lists(records, min_size=1, max_size=8))
    values = [write(row, rng).encode("utf-8", "surrogatepass") for row in rows]
    values = [mutate(value, rng) if rng.random() < 0.15 else value for value in values]
    if rng.random() < 0.2:
        values[rng.randrange(len(values))] = None
    # A repeated batch is long enough for the columns to be tried, and each row is a neighbour of each.
    return values * draw(st.sampled_from([1, 2, 3]))


TOKENS = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\n",
    b" ",
    b"\xff",
    b"\xc3",
    b"\x00",
    b"\x1f",
    b"\x7f",
    b"0",
    b"-",
    b".",
    b"e",
    b"E9",
    b"+",
    b"/",
    b"\\u0069",
    b"\\ud800",
    b'"id"',
    b'"id":1,',
    b"}\n{",
    b'","',
    b"null",
    b"true",
    b"NaN",
    b"1.0",
    b"\xed\xa0\x80",
    b"\xe2\x80\xa8",
]


def mutate(value, rng):
    at = rng.randrange(len(value) + 1)
    match rng.randrange(5):
        case 0:
            return value[:at] + rng.choice(TOKENS) + value[at:]
        case 1:
            return value[:at] + value[at + rng.randrange(4) :]
        case 2:
            return value[:at] + bytes([rng.randrange(256)]) + value[at + 1 :]
        case 3:
            to = rng.randrange(len(value) + 1)
            return value[:at] + value[min(at, to) : max(at, to)] + value[at:]
        case _:
            return value[:at]


@settings(max_examples=150, deadline=None)
@given(batches())
@example([*EVENTS, None])
@example(EVENTS[8:16])
@example([b'{"id":"a",', b'"t":5}', b'{"id":"a","t":1}\n{"id":"b","t":2}', FILLER, FILLER, FILLER])
@example([b'{"id":"a","t":5,"s":"}', b'{"}', b'{"id":"a","t":1}{"id":"b","t":2}', FILLER, FILLER, FILLER])
@example([*[b"null"] * 5, b'{"a":null,"a":null}'])
def test_columns_equal_one_by_one(values):
    compare_everywhere(values)


@pytest.mark.parametrize("value", EVENTS, ids=range(len(EVENTS)))
def test_an_odd_value_among_good_ones(value):
    compare_everywhere([value] * 6)
    compare_everywhere([FILLER] * 5 + [value] + [FILLER] * 6)


@settings(max_examples=150, deadline=None)
@given(records, st.integers(0, 1 << 32), st.sampled_from(list(RECIPES)))
def test_a_batch_of_one_value(record, seed, name):
    """No neighbour sends the row to the slow path."""
    rng = random.Random(seed)
    value = write(record, rng).encode("utf-8", "surrogatepass")
    for odd in (value, mutate(value, rng), mutate(mutate(value, rng), rng)):
        compare(name, [odd] * 6, [odd] * 6, [[("h", odd)]] * 6, [0] * 6)


def test_a_member_twice_in_one_row_and_spelled_in_another():
    """As many names as rows."""
    compare_everywhere([b'{"id":"a","t":1,"id":"b"}', b'{"i\\u0064":"c","t":1}'] * 3)
    compare_everywhere(['{"é":"a","é":"b"}'.encode(), b'{"\\u00e9":"c"}'] * 3)
    compare_everywhere([b'{"a/b":"a","a/b":"b"}', b'{"a\\/b":"c"}'] * 3)


near_uuids = st.sampled_from(
    [
        UUID,
        UUID,
        UUID,
        UUID.upper(),
        UUID[:-1],
        UUID + "0",
        UUID[:-1] + "-",
        UUID[:-1] + "\n",
        UUID[:-2] + " 0",
        UUID.replace("-", "\n"),
        UUID[:-2] + "00",
        UUID.replace("-", ""),
        UUID[:8] + "-" + UUID[8:],
        "x" * 36,
        "é" * 18,
        "é" * 36,
        "a\nb",
        "",
        "x" * 31,
        "x" * 32,
        "\x00",
        UUID[:7] + "-" + UUID[7] + UUID[9:],
        UUID[:8] + "0" + UUID[9:],
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(near_uuids | st.text(max_size=40), min_size=1, max_size=6))
@example([UUID[:-1], UUID + "0"])
@example([UUID[1:], "0" + UUID])
@example([UUID[:-1] + "-", UUID])
@example([UUID + "\n" + UUID, UUID[:-1]])
@example(["a\nb", "c"])
@example(["x", "x" * 31, "x" * 32])
def test_columns_of_texts_and_bytes(texts):
    def expected(encoded):
        return None if "" in texts else [state_key(one) for one in encoded]

    encodable = [text.encode("utf-8", "ignore").decode() for text in texts]
    texts = encodable
    assert text_keys(texts) == expected(map(encode_text, texts))
    values = [text.encode() for text in texts]
    assert bytes_keys(values) == expected(map(encode_bytes, values))


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-300, 300), min_size=1, max_size=5))
@example([127, 1])
@example([-128, 127])
@example([-(1 << 63), (1 << 63) - 1])
@example([128, -129])
def test_columns_of_integers(numbers):
    assert scalar_keys(numbers) == [encode_integer(number) for number in numbers]
    assert scalar_keys([*numbers, "x"]) == [encode_integer(number) for number in numbers] + [b"\x01x"]


@settings(max_examples=300, deadline=None)
@given(
    records,
    st.integers(0, 1 << 32),
    st.sampled_from([(), (("t",),), (("a", "id"), ("id",)), (("a", 0), ("a", 1, "id")), ((0,), (2,))]),
)
def test_quick_content_is_exact_content(record, seed, exclude):
    rng = random.Random(seed)
    value = write(record, rng).encode("utf-8", "surrogatepass")
    for odd in (value, mutate(value, rng), *EVENTS[: rng.randrange(8)]):
        assert outcome(content_of, odd, exclude) == outcome(
            lambda odd, exclude: canonical_json(decode(odd), excluded(exclude)), odd, exclude
        )


def test_quick_content_is_taken_for_plain_values(monkeypatch):
    monkeypatch.setattr("dedup.core.exact_json.decode", lambda value: pytest.fail(f"{value} went the exact way"))
    value = b'{"b": [1.50, -0, {"d": null, "c": "x"}], "a": 1e5, "at": 7}'
    assert content_of(value, (("at",),)) == b'{"a":1e5,"b":[15e-1,0,{"c":"x","d":null}]}'


def outcome(function, *args):
    try:
        return function(*args)
    except Unreadable as refused:
        return refused.code


@pytest.mark.parametrize("value", EVENTS, ids=range(len(EVENTS)))
def test_quick_content_of_odd_values(value):
    assert outcome(content_of, value, ()) == outcome(lambda odd: canonical_json(decode(odd), {}), value)


@pytest.mark.parametrize("seed", range(8))
def test_mutated_bytes_among_good_ones(seed):
    """Each mutation stands in a batch of good rows, so the columns decide whether to trust it."""
    rng = random.Random(seed)
    for _ in range(60):
        good = rng.choice(EVENTS[:8])
        value = mutate(good, rng)
        while rng.random() < 0.4:
            value = mutate(value, rng)
        name = rng.choice(list(RECIPES))
        values = [good] * 5 + [value]
        compare(name, values, values, [[("h", value)] * rng.randrange(3) for value in values], list(range(6)))


@pytest.mark.parametrize("seed", range(4))
def test_two_broken_rows_that_are_one_together_next_to_two_in_one(seed):
    """As many values as rows, but not row by row."""
    rng = random.Random(1000 + seed)
    for _ in range(60):
        value = rng.choice(EVENTS[:6])
        cut = rng.randrange(len(value))
        two_in_one = rng.choice([b"", b"\n", b" ", b","]).join([rng.choice(EVENTS[:6]), value])
        values = [value[:cut], value[cut:], two_in_one, value, value, value]
        for name in ("id", "id+ms", "key", "nested"):
            compare(name, values, values, [[("h", b"1")]] * 6, [0] * 6)


def test_a_good_batch_needs_no_slow_row(monkeypatch):
    def refuse(*_):
        pytest.fail("a plain batch went through extract_one")

    monkeypatch.setattr("dedup.core.extract.extract_one", refuse)
    values = [json.dumps({"id": f"o-{row}", "t": row, "text": 'a "quoted"\nline'}).encode() for row in range(100)]
    found = EXTRACTORS["id+ms"]([None] * 100, values, [[]] * 100, [0] * 100)
    assert found.ids == [b"\x01o-%d" % row for row in range(100)]
    assert found.times_ms == list(range(100))


def test_a_null_value_leaves_the_others_fast(monkeypatch):
    calls = []
    monkeypatch.setattr("dedup.core.extract.extract_one", lambda *args: calls.append(args) or extract_one(*args))
    values = [None if row % 10 == 0 else b'{"id":"x","t":1}' for row in range(100)]
    found = EXTRACTORS["id+ms"]([None] * 100, values, [[]] * 100, [0] * 100)
    assert len(calls) == 10
    assert {fault.kind for fault in found.faults.values()} == {FaultKind.TOMBSTONE}
    assert list(found.faults) == list(range(0, 100, 10))


def test_an_empty_batch():
    found = Extractor(Recipe(TrackingId(KeyRule()), RecordTime()))([], [], [], [])
    assert (found.ids, found.times_ms, found.fingerprints, found.faults) == ([], [], None, {})


PAIRS = (
    (RECIPES, EVENTS),
    (AVRO, AVRO_EVENTS),
    (PROTOBUF, PROTOBUF_EVENTS),
    (MSGPACK, MSGPACK_EVENTS),
    (CBOR, CBOR_EVENTS),
    (CSV, CSV_EVENTS),
)
MIXED = {name: (recipe, events) for recipes, events in PAIRS for name, recipe in recipes.items()}


@pytest.mark.parametrize("name", MIXED)
def test_a_batch_is_freed_without_the_garbage_collector(name):
    """Workers collect garbage rarely and `dedup verify` never, so a reference cycle would keep batches in memory."""
    recipe, events = MIXED[name]
    extractor = Extractor(recipe)
    # Several kinds of odd rows, which several attempts to read columns name one after the other.
    values = [*events[:3] * 20, *events, None, b"", *(value[:-1] for value in events)]
    keys = [None if row % 7 == 3 else b"key" for row in range(len(values))]
    headers = [[("h", b"")] if row % 5 == 2 else [("h", b"of-%d" % row)] for row in range(len(values))]
    batch = (keys, values, headers, [0] * len(values))
    extractor(*batch)  # fills caches
    gc.collect()
    gc.disable()
    try:
        extractor(*batch)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [each for each in gc.garbage if isinstance(each, BaseException | FrameType | TracebackType)]
        assert left == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
