"""The comparison that every proof rests on, held against a brute-force one."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dedup.verify.compare import Expected, Place, digest, matched, out_of_order
from dedup.verify.cut import disorder


def rows(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


class Compared(NamedTuple):
    """Missing and extra records, and those that passed another record of their task in a partition."""

    missing: list[Place]
    extra: list[Place]
    displaced: list[Place]

    @property
    def clean(self) -> bool:
        return not any(self)


def compare(expected: Sequence[Expected], actual: Sequence[Sequence[bytes]]) -> Compared:
    found = matched(expected, actual)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for there, wanted in found.matched:
        tracks.setdefault((there.sequence, wanted.sequence), []).append((wanted.row, there.row))
    displaced = [
        Place(partition, track[at][1])
        for (partition, _), track in tracks.items()
        for at in out_of_order(array("q", [wanted for wanted, _ in track]))
    ]
    return Compared(found.missing, found.extra, displaced)


def test_equal_sequences_are_clean() -> None:
    assert compare([Expected(rows("abcab"))], [rows("abcab")]).clean


def test_a_loss_is_missing() -> None:
    found = compare([Expected(rows("abc"))], [rows("ac")])
    assert (found.missing, found.extra, found.displaced) == ([Place(0, 1)], [], [])


def test_a_repetition_is_extra() -> None:
    found = compare([Expected(rows("abc"))], [rows("abcb")])
    assert (found.missing, found.extra, found.displaced) == ([], [Place(0, 3)], [])


def test_a_swap_is_one_displaced_record() -> None:
    found = compare([Expected(rows("abcd"))], [rows("acbd")])
    assert (found.missing, found.extra) == ([], [])
    assert len(found.displaced) == 1


def test_a_changed_record_is_missing_and_extra() -> None:
    found = compare([Expected(rows("abc"))], [rows("aXc")])
    assert (found.missing, found.extra, found.displaced) == ([Place(0, 1)], [Place(0, 1)], [])


def test_optional_records_may_be_there_or_not() -> None:
    expected = Expected(rows("abc"), optional={0, 2})
    for actual in ("abc", "ab", "bc", "b"):
        assert compare([expected], [rows(actual)]).clean


def test_an_optional_record_does_not_take_the_place_of_a_certain_one() -> None:
    assert compare([Expected(rows("ab" + "a"), optional={0})], [rows("ba")]).clean


def test_tasks_may_mingle_but_keep_their_order_in_each_partition() -> None:
    tasks = [Expected(rows("abcd")), Expected(rows("xyz"))]
    assert compare(tasks, [rows("axbz"), rows("ycd")]).clean
    found = compare(tasks, [rows("axbz"), rows("dyc")])
    assert len(found.displaced) == 1


@given(st.permutations(range(6)), st.integers(0, 6))
def test_displaced_is_the_least_number_of_records_to_move(order: list[int], length: int) -> None:
    kept = order[:length]
    expected = Expected([b"%d" % number for number in range(6)], optional=set(range(6)) - set(kept))
    found = compare([expected], [[b"%d" % number for number in kept]])
    longest = max(size for size in range(length + 1) for some in combinations(kept, size) if list(some) == sorted(some))
    assert len(found.displaced) == length - longest


RECORDS = st.tuples(
    st.none() | st.binary(max_size=3),
    st.none() | st.binary(max_size=3),
    st.lists(st.tuples(st.sampled_from(["", "a", "ab", "1 1"]), st.none() | st.binary(max_size=2)), max_size=3),
    st.integers(-1, 2),
)


@given(RECORDS, RECORDS)
def test_digests_are_equal_only_for_equal_records(one: tuple, other: tuple) -> None:
    assert (digest(*one) == digest(*other)) == (one == other)


def test_parts_can_not_pass_for_one_another() -> None:
    assert digest(b"ab", b"c", [], 0) != digest(b"a", b"bc", [], 0)
    assert digest(None, b"", [], 0) != digest(b"", None, [], 0)
    assert digest(b"", b"", [("a", b"bc")], 0) != digest(b"", b"", [("ab", b"c")], 0)
    assert digest(b"", b"", [("a", None)], 0) != digest(b"", b"", [("a", b"")], 0)


def test_a_long_stretch_out_of_order_is_sorted_out_in_flat_arrays() -> None:
    rows_out = np.arange(100_000)
    tracemalloc.start()
    try:
        found = disorder(rows_out, np.roll(rows_out, -1))
        assert found == [99_999]
        assert tracemalloc.get_traced_memory()[1] < 100 * len(rows_out)
    finally:
        tracemalloc.stop()
