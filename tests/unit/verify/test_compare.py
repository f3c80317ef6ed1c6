"""The comparison that every proof rests on, held against a brute-force one."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Collection, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.window import Source
from dedup.verify.compare import Seen, Wanted, digest, matched, out_of_order
from dedup.verify.cut import disorder
from dedup.verify.evidence import parse_source


def rows(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def task(text: str, optional: Collection[int] = ()) -> list[Wanted]:
    wanted = enumerate(rows(text))
    return [Wanted(each, None, Source(0, 0, at), at, at in optional, pending=False) for at, each in wanted]


def written(text: str) -> list[Seen]:
    return [Seen(at, each, None, 0, exempt=False) for at, each in enumerate(rows(text))]


class Compared(NamedTuple):
    """Missing and extra records, and those that passed another record of their task in a partition."""

    missing: list[tuple[int, int]]
    """(task, position)"""
    extra: list[tuple[int, int]]
    """(partition, offset)"""
    displaced: list[tuple[int, int]]

    @property
    def clean(self) -> bool:
        return not any(self)


def compare(expected: Sequence[Sequence[Wanted]], actual: Sequence[Sequence[Seen]]) -> Compared:
    found = matched(expected, actual)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for partition, seen, task, wanted in found.matched:
        tracks.setdefault((partition, task), []).append((wanted.position, seen.offset))
    displaced = [
        (partition, track[at][1])
        for (partition, _), track in tracks.items()
        for at in out_of_order(array("q", [wanted for wanted, _ in track]))
    ]
    missing = [(task, wanted.position) for task, wanted in found.missing]
    return Compared(missing, [(partition, seen.offset) for partition, seen in found.extra], displaced)


def test_equal_sequences_are_clean() -> None:
    assert compare([task("abcab")], [written("abcab")]).clean


def test_a_loss_is_missing() -> None:
    found = compare([task("abc")], [written("ac")])
    assert (found.missing, found.extra, found.displaced) == ([(0, 1)], [], [])


def test_a_repetition_is_extra() -> None:
    found = compare([task("abc")], [written("abcb")])
    assert (found.missing, found.extra, found.displaced) == ([], [(0, 3)], [])


def test_a_swap_is_one_displaced_record() -> None:
    found = compare([task("abcd")], [written("acbd")])
    assert (found.missing, found.extra) == ([], [])
    assert len(found.displaced) == 1


def test_a_changed_record_is_missing_and_extra() -> None:
    found = compare([task("abc")], [written("aXc")])
    assert (found.missing, found.extra, found.displaced) == ([(0, 1)], [(0, 1)], [])


def test_optional_records_may_be_there_or_not() -> None:
    expected = task("abc", optional={0, 2})
    for actual in ("abc", "ab", "bc", "b"):
        assert compare([expected], [written(actual)]).clean


def test_an_optional_record_does_not_take_the_place_of_a_certain_one() -> None:
    assert compare([task("ab" + "a", optional={0})], [written("ba")]).clean


def test_tasks_may_mingle_but_keep_their_order_in_each_partition() -> None:
    tasks = [task("abcd"), task("xyz")]
    assert compare(tasks, [written("axbz"), written("ycd")]).clean
    found = compare(tasks, [written("axbz"), written("dyc")])
    assert len(found.displaced) == 1


@given(st.permutations(range(6)), st.integers(0, 6))
def test_displaced_is_the_least_number_of_records_to_move(order: list[int], length: int) -> None:
    kept = order[:length]
    expected = task("012345", optional=set(range(6)) - set(kept))
    found = compare([expected], [written("".join(map(str, kept)))])
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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"in/123456789/123456789", Source(0, 123456789, 123456789)),
        (b"in/123456789/1234567890", None),
        (b"in/0/1/2", None),
        (b"other/0/1", None),
        ("in/0/\u0661".encode(), None),
        (b"in/0", None),
        (b"", None),
    ],
)
def test_a_source_position_is_parsed_strictly(content: bytes, expected: Source | None) -> None:
    assert parse_source(content, ("in",)) == expected
