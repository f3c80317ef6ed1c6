"""The content of MessagePack, CBOR, and CSV values is equal if, and only if, the values are, as other libraries say."""

from __future__ import annotations

import csv
import io
import math
import random
import struct
import sys
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import cbor2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.content_tree import without_names
from dedup.core.csv_row import CsvLayout, csv_content
from dedup.core.exact_json import Unreadable
from dedup.core.extract_one import Recipe
from dedup.core.formats import content_reader, reader_of
from dedup.core.tracking_id import ContentRule, FirstOfRule, HeaderRule, Path, TrackingId
from tests.extraction import same_in_columns
from tests.property import test_cbor_values as cbor
from tests.property import test_message_pack_values as message_pack

SEEDS = st.integers(0, 1 << 30)


def content(fmt: Any, value: bytes, *exclude: Path) -> bytes:
    return content_reader(fmt, "", b"", ContentRule(exclude))(value)


def plain(item: Any) -> Any:
    """Return an item in a form of which equality is typed, and in which maps have no order."""
    match item:
        case float():
            return "float", "nan" if math.isnan(item) else struct.pack(">d", item + 0.0)
        case Decimal():
            sign, digits, exponent = item.normalize().as_tuple() if item else (0, (0,), 0)
            return "decimal", sign, digits, exponent
        case list():
            return "list", [plain(each) for each in item]
        case dict():
            return "map", sorted((repr(key), plain(inner)) for key, inner in item.items())
        case bool() | None | int() | str() | bytes() | UUID() | datetime() | msgspec.msgpack.Ext():
            return type(item).__name__, item if not isinstance(item, msgspec.msgpack.Ext) else (item.code, item.data)
        case _:
            return "other", repr(item)


def shuffled(dice: random.Random, item: Any) -> Any:
    match item:
        case list():
            return [shuffled(dice, each) for each in item]
        case dict():
            return {key: shuffled(dice, item[key]) for key in dice.sample(list(item), len(item))}
        case _:
            return item


def longer(dice: random.Random, item: Any) -> bytes:
    """Return an item in MessagePack, with lengths and integers that may take more bytes than they need."""
    match item:
        case str() if dice.random() < 0.5:
            return b"\xdb" + len(item.encode()).to_bytes(4) + item.encode()
        case int() if not isinstance(item, bool) and 0 <= item < 1 << 32 and dice.random() < 0.5:
            return b"\xcf" + item.to_bytes(8)
        case list():
            return b"\xdd" + len(item).to_bytes(4) + b"".join(longer(dice, each) for each in item)
        case dict():
            pairs = (longer(dice, each) for pair in item.items() for each in pair)
            return b"\xdf" + len(item).to_bytes(4) + b"".join(pairs)
        case _:
            return msgspec.msgpack.encode(item)


def in_cbor(dice: random.Random, item: Any) -> bytes:
    return cbor.written(dice, item)


FORMATS = {"msgpack": (message_pack.EVENTS | message_pack.ITEMS, longer), "cbor": (cbor.EVENTS | cbor.ITEMS, in_cbor)}


@pytest.mark.parametrize("fmt", FORMATS)
def test_another_encoding_of_a_value_is_the_same_content(fmt):
    items, write = FORMATS[fmt]

    @given(items, SEEDS)
    def each(item, seed):
        dice = random.Random(seed)
        assert content(fmt, write(dice, item)) == content(fmt, write(dice, shuffled(dice, item)))

    each()


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_have_equal_content_if_they_are_equal(fmt):
    items, write = FORMATS[fmt]

    @given(st.lists(items, min_size=2, max_size=2) | items.map(lambda item: [item, [item]]), st.data(), SEEDS)
    def each(pair, data, seed):
        one, other = pair
        if isinstance(one, dict) and one and data.draw(st.booleans()):
            other = one | {data.draw(st.sampled_from(sorted(one, key=repr))): data.draw(items)}
        dice = random.Random(seed)
        equal = plain(one) == plain(other)
        assert (content(fmt, write(dice, one)) == content(fmt, write(dice, other))) == equal, (one, other)

    each()


def copied(item: Any) -> Any:
    match item:
        case list():
            return list(map(copied, item))
        case dict():
            return {key: copied(inner) for key, inner in item.items()}
        case _:
            return item


def left_out(item: Any, paths: list[Path]) -> Any:
    """Return an item without what is at the paths, which are taken away together, as each is of the whole item."""
    made = copied(item)
    ends: list[tuple[Any, Any]] = []
    for path in paths:
        holder = message_pack.looked_up(made, path[:-1])
        if isinstance(holder, dict if isinstance(path[-1], str) else list):
            ends.append((holder, path[-1]))
    for holder, step in sorted(ends, key=lambda end: -end[1] if isinstance(end[1], int) else 0):
        if isinstance(holder, dict):
            holder.pop(step, None)
        elif step < len(holder):
            del holder[step]
    return made


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_excluded_is_no_content(fmt):
    items, write = FORMATS[fmt]
    paths = st.lists(st.sampled_from(message_pack.PATHS), max_size=3, unique=True)

    @given(items, paths, SEEDS)
    def each(item, exclude, seed):
        value = write(random.Random(seed), item)
        rest = write(random.Random(seed), left_out(item, exclude))
        assert content(fmt, value, *exclude) == content(fmt, rest)

    each()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_value_has_content_if_it_is_whole(fmt):
    items, write = FORMATS[fmt]
    damaged = st.builds(
        lambda item, seed, at, more, dropped: message_pack.spliced(write(random.Random(seed), item), at, more, dropped),
        items, SEEDS, st.integers(0, 200), st.binary(max_size=5), st.integers(0, 3),
    )  # fmt: skip

    @given(damaged)
    def each(value):
        codes = []
        for read in (reader_of(fmt, "", b"", (), None, zeros=False).read, lambda each: content(fmt, each)):
            try:
                read(value)
                codes.append("")
            except Unreadable as refused:
                codes.append(refused.code)
        # The content has more members to read than a reader without paths, which looks at no text.
        assert codes[1] == codes[0] or (codes[0] == "" and codes[1] in {"not_utf8", "repeated_member", "too_deep"})

    each()


@pytest.mark.parametrize(("fmt", "array"), [("msgpack", b"\x91"), ("cbor", b"\x81")])
def test_a_deep_value_is_refused_in_time(fmt: str, array: bytes) -> None:
    null = {"msgpack": b"\xc0", "cbor": b"\xf6"}[fmt]
    assert content(fmt, array * 200 + null)
    for levels in (201, 10_000, 1_000_000):
        with pytest.raises(Unreadable, match="nested more than 200 levels deep"):
            content(fmt, array * levels + null)


@pytest.mark.parametrize(
    ("fmt", "one", "items"),
    [
        ("msgpack", b"\x81", b"\xdd\x00\x00\x08\x00" + b"\x01\xa1a\x81\x01\x01\xc4\x00" * 512),
        ("cbor", b"\xa1", b"\x99\x08\x00" + b"\x01\x61a\xa1\x01\x01\x40" * 512),
    ],
)
def test_a_key_inside_of_a_key_is_read_once(fmt: str, one: bytes, items: bytes) -> None:
    """Each of 190 maps has the next one as its key, and the innermost key is an array of 2,048 items."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assert content(fmt, one * 190 + items + b"\x01" * 190)
    finally:
        sys.setprofile(None)
    assert calls < 120_000


@pytest.mark.parametrize(
    ("fmt", "value"), [("msgpack", b"\x82\xa1\xff\x01\xa1\xfe\x01"), ("cbor", b"\xa2a\xff\x01a\xfe\x01")]
)
def test_names_that_are_not_utf8_are_not_taken_for_repeated(fmt: str, value: bytes) -> None:
    with pytest.raises(Unreadable, match="not UTF-8"):
        content(fmt, value)


@pytest.mark.parametrize(
    ("fmt", "value"), [("msgpack", b"\x82\x01\x02\xcc\x01\x03"), ("cbor", b"\xa2\x01\x02\x18\x01\x03")]
)
def test_a_repeated_key_is_refused_even_if_it_is_no_text(fmt: str, value: bytes) -> None:
    with pytest.raises(Unreadable, match="a member is repeated in a map of the content"):
        content(fmt, value)


ROW = CsvLayout(("id", "t", "a"))
CELLS = st.lists(st.text(st.sampled_from('ab",\r\n é'), max_size=6), min_size=3, max_size=3)


def in_csv(cells: list[str], **options: Any) -> bytes:
    row = io.StringIO()
    csv.writer(row, **options).writerow(cells)
    return row.getvalue().encode()


@given(CELLS, CELLS)
def test_rows_have_equal_content_if_their_cells_are_equal(one, other):
    def of(cells: list[str], **options: Any) -> bytes:
        return csv_content(ROW, {}, in_csv(cells, **options))

    assert of(one) == of(one, quoting=csv.QUOTE_ALL, lineterminator="")
    assert (of(one) == of(other)) == (one == other)
    without = without_names((("a",), ("t",)))
    assert csv_content(ROW, without, in_csv(one)) == of([one[0], "", ""])


def extracts(fmt: Any, schema: Any = "") -> Callable[[list[bytes]], None]:
    rule = FirstOfRule((HeaderRule("h"), ContentRule((("t",),))))
    recipe = Recipe(TrackingId(rule), fmt=fmt, fingerprint=True, compared=ContentRule((("a",),)), schema=schema)
    return lambda values: same_in_columns(recipe, values)


@given(st.lists(message_pack.DAMAGED | message_pack.EVENTS.map(msgspec.msgpack.encode), min_size=5, max_size=8))
def test_columns_of_message_pack_have_the_same_content(values):
    extracts("msgpack")(values)


@given(
    st.lists(
        st.builds(message_pack.spliced, cbor.WRITTEN, st.integers(0, 99), st.binary(max_size=3), st.just(0)),
        min_size=5,
        max_size=8,
    )
)
def test_columns_of_cbor_have_the_same_content(values):
    extracts("cbor")(values)


@given(st.lists(CELLS.map(in_csv) | st.binary(max_size=8), min_size=5, max_size=8))
def test_columns_of_csv_have_the_same_content(values):
    extracts("csv", ROW)(values)


def test_golden_content():
    """The encoding is part of every ID that is made of content, so it never changes."""
    event = {
        "id": 7,
        "name": "é",
        "paid": True,
        "sum": 1.5,
        "raw": b"\1",
        "of": [None, -300],
        "when": cbor2.CBORTag(0, "x"),
    }
    assert content("cbor", cbor2.dumps(event)).hex(" ") == GOLDEN


GOLDEN = (
    "00 00 02 07 03 01 69 64 02 04 07 05 01 6e 61 6d 65 03 01 c3 a9 03 01 6f 66 00 01 02 01 0b 03 04 fe d4 "
    "05 01 70 61 69 64 01 07 04 01 72 61 77 02 02 01 04 01 73 75 6d 09 0f 3f f8 00 00 00 00 00 00 "
    "05 01 77 68 65 6e 00 03 05 74 61 67 20 30 02 01 78"
)
