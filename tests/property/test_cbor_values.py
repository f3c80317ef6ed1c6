"""CBOR values, whole and damaged, as cbor2 reads them, in every length that a number or a text may be written in."""

from __future__ import annotations

import random
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

import cbor2
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.avro import Leaf, Refused
from dedup.core.cbor import CborReader
from dedup.core.event_time import FieldTime, RecordTime
from dedup.core.exact_json import Number, Unreadable
from dedup.core.extract_one import Recipe
from dedup.core.tracking_id import TrackingId
from tests.extraction import same_in_columns
from tests.property.test_message_pack_values import PATHS, RULES, UNITS, doubtful, looked_up, spliced

NAMES = ["id", "a", "t", "é", "", 'a"', "\\", "\n"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.integers(-300, 300)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.uuids()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.just(cbor2.undefined)
)
ITEMS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.integers(-300, 300), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
EVENTS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, ITEMS))


def head(dice: random.Random, major: int, argument: int) -> bytes:
    """Return the first bytes of an item, with its argument in one of the lengths that hold it."""
    if argument < 24 and dice.random() < 0.6:
        return bytes([major << 5 | argument])
    widths = [(info, width) for info, width in ((24, 1), (25, 2), (26, 4), (27, 8)) if argument < 1 << 8 * width]
    info, width = dice.choice(widths)
    return bytes([major << 5 | info]) + argument.to_bytes(width)


def written(dice: random.Random, item: Any) -> bytes:
    """Return an item in one of its encodings: longer than needed, of indefinite length, or marked as CBOR."""
    mark = head(dice, 6, 55_799) if dice.random() < 0.1 else b""
    return mark + unmarked(dice, item)


def unmarked(dice: random.Random, item: Any) -> bytes:
    match item:
        case bool() | None | float() | UUID() | Decimal():
            return cbor2.dumps(item)
        case int() if -(1 << 64) <= item < 1 << 64:
            return head(dice, 1, -1 - item) if item < 0 else head(dice, 0, item)
        case str() | bytes():
            major, raw = (3, item.encode()) if isinstance(item, str) else (2, item)
            if dice.random() < 0.7:
                return head(dice, major, len(raw)) + raw
            pieces = [piece.encode() for piece in item] if isinstance(item, str) else [raw[:3], raw[3:]]
            whole = b"".join(head(dice, major, len(piece)) + piece for piece in pieces)
            return bytes([major << 5 | 31]) + whole + b"\xff"
        case list() | dict():
            pairs = [each for pair in item.items() for each in pair] if isinstance(item, dict) else item
            major, inside = 5 if isinstance(item, dict) else 4, b"".join(written(dice, each) for each in pairs)
            if dice.random() < 0.3:
                return bytes([major << 5 | 31]) + inside + b"\xff"
            return head(dice, major, len(item)) + inside
        case _:
            return cbor2.dumps(item)


WRITTEN = st.builds(lambda event, seed: written(random.Random(seed), event), EVENTS, st.integers(0, 1 << 30))


def leaf_of(item: Any) -> Any:
    """Return the leaf that stands for an item that cbor2 has decoded. A decimal is compared by its value."""
    match item:
        case dict() | list():
            return Refused("map" if isinstance(item, dict) else "array")
        case float():
            return Refused("float")
        case int() if not isinstance(item, bool) and not -(1 << 63) <= item < 1 << 63:
            return Number(str(item))
        case _:
            return item


def thawed(item: Any) -> Any:
    """Return an item with lists and dicts in it, instead of the immutable ones that cbor2 makes below a tag."""
    match item:
        case list() | tuple():
            return list(map(thawed, item))
        case Mapping():
            return {key: thawed(inner) for key, inner in item.items()}
        case _:
            return item


def same(leaf: Leaf, item: Any) -> bool:
    if item is cbor2.undefined:
        return leaf is looked_up({}, ("x",))
    if isinstance(item, Decimal):
        return isinstance(leaf, Number) and not leaf.is_integer and Decimal(leaf.text) == item
    expected = leaf_of(item)
    return (type(leaf), leaf) == (type(expected), expected)


def code_of(value: bytes, paths: list[Any]) -> str | None:
    try:
        CborReader(paths, FieldTime(("t",), "timestamp")).read(value)
    except Unreadable as refused:
        return refused.code
    return None


def goes_on(value: bytes) -> bool:
    """Return whether bytes follow the item that cbor2 reads, which it passes over."""
    try:
        cbor2.loads(value[:-1])
    except cbor2.CBORDecodeEOF:
        return False
    return True


@given(EVENTS | ITEMS, st.lists(st.sampled_from(PATHS), max_size=3, unique=True), st.integers(0, 1 << 30))
def test_members_are_what_cbor2_reads(event, paths, seed):
    reader = CborReader(paths, FieldTime(("t",), "ms"))
    for value in (cbor2.dumps(event), written(random.Random(seed), event)):
        whole = thawed(cbor2.loads(value))
        *leaves, _ = reader.read(value)
        items = [looked_up(whole, path) for path in paths]
        assert all(same(leaf, item) for leaf, item in zip(leaves, items, strict=True)), (leaves, items)
        assert reader.columns([value] * 3) == [[leaf] * 3 for leaf in reader.read(value)]


@given(
    st.builds(spliced, WRITTEN, st.integers(0, 200), st.binary(max_size=5), st.integers(0, 3)),
    st.lists(st.sampled_from(PATHS), max_size=3, unique=True),
)
def test_a_value_that_cbor2_reads_is_well_formed(value, paths):
    code = code_of(value, paths)
    try:
        cbor2.loads(value)
    except cbor2.CBORDecodeEOF:
        assert code in {"not_cbor", "not_utf8"}
    except (cbor2.CBORDecodeError, ValueError, TypeError, RecursionError):
        pass  # cbor2 also refuses what is well-formed: what it cannot represent, and text that nobody asked for
    else:
        assert (code == "not_cbor") == goes_on(value)


@given(WRITTEN, st.lists(st.sampled_from(PATHS), max_size=3, unique=True), st.integers(1, 400))
def test_a_value_that_is_cut_off_or_goes_on_is_refused(value, paths, cut):
    assert code_of(value[: -min(cut, len(value))], paths) == "not_cbor"
    assert code_of(value + b"\0", paths) == "not_cbor"


@given(RULES, UNITS, st.lists(doubtful(0xA0, 0x60, 0xF6), min_size=6, max_size=12))
def test_one_of_several_faults_is_the_same_in_columns(rule, unit, values):
    time = RecordTime() if unit is None else FieldTime(("t",), unit)
    same_in_columns(Recipe(TrackingId(rule), time, fmt="cbor", fingerprint=True), values)
