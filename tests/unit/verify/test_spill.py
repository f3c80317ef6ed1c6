"""What lets the verifier go without memory: buckets on disk, and order as a column of positions."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.verify.compare import out_of_order
from dedup.verify.cut import Order, disorder
from dedup.verify.kafka_reader import Bounds
from dedup.verify.spill import Spill, buckets_for, condensed, stand_in, stand_in_of


def test_rows_come_back_by_bucket_in_the_order_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dedup.verify.spill._PENDING_ROWS", 7)
    spill = Spill(str(tmp_path), 3)
    for number in range(100):
        spill.add(number, (number, b"k", None, "name"))
    assert [list(spill.bucket(at)) for at in range(3)] == [
        [[number, b"k", None, "name"] for number in range(at, 100, 3)] for at in range(3)
    ]
    spill.close()


@given(st.binary(max_size=200) | st.none(), st.binary(max_size=200) | st.none())
def test_condensed_values_are_equal_only_for_equal_values(one: bytes | None, other: bytes | None) -> None:
    assert (condensed(one) == condensed(other)) == (one == other)


@given(st.binary(max_size=200) | st.none())
def test_a_condensed_value_knows_what_stands_for_it(value: bytes | None) -> None:
    assert stand_in_of(condensed(value)) == stand_in(value)


def test_a_long_value_can_not_pass_for_a_short_one() -> None:
    long = b"x" * 1_000
    short = condensed(long)
    assert short is not None
    assert condensed(short) != short
    assert len(short) < 48
    assert blake2b(long, digest_size=32).digest() in short


@given(st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=12))
def test_disorder_in_stretches_is_disorder(positions: list[int]) -> None:
    rows = np.arange(len(positions), dtype=np.int64)
    whole = list(out_of_order(array("q", positions)))
    assert len(disorder(rows, np.array(positions, dtype=np.int64))) == len(whole)


@pytest.fixture
def order_of(tmp_path: Path) -> Iterator[Callable[[int, int], Order]]:
    spills = []

    def order(low: int, high: int) -> Order:
        spills.append(Spill(str(tmp_path), buckets_for(high - low)))
        return Order(Bounds(low, high, start_deleted=False), spills[-1])

    yield order
    for spill in spills:
        spill.close()


def test_order_is_looked_at_across_buckets_and_by_task(order_of: Callable[[int, int], Order]) -> None:
    order = order_of(0, 6)
    order.match([(0, 0, 10), (2, 0, 12), (4, 1, 5)])
    order.match([(5, 1, 4), (3, 0, 13)])
    assert order.first_matched() == 0
    assert len(order.displaced()) == 1
    assert order.displaced()[0] in {4, 5}


def test_nothing_matched_is_in_order(order_of: Callable[[int, int], Order]) -> None:
    order = order_of(0, 3)
    assert order.first_matched() == 3
    assert order.displaced() == []


def test_what_is_matched_again_counts_once_and_what_is_forgotten_not_at_all(
    order_of: Callable[[int, int], Order],
) -> None:
    order = order_of(10, 90_000)
    for _ in range(2):
        order.match([(11, 0, 5), (80_000, 0, 6), (89_999, 1, 7)])
    assert order.first_matched() == 11
    assert order.first_position(1) == 7
    assert order.displaced() == []
    order.forget()
    order.match([(80_000, 0, 6)])
    assert order.first_matched() == 80_000
    assert order.first_position(1) is None


def test_a_swap_far_apart_is_found(order_of: Callable[[int, int], Order]) -> None:
    order = order_of(0, 150_000)
    positions = list(range(150_000))
    positions[70_000], positions[140_000] = positions[140_000], positions[70_000]
    order.match([(row, 0, position) for row, position in enumerate(positions)])
    assert order.displaced() == [70_000, 140_000]
