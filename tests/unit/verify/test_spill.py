"""What lets the verifier go without memory: buckets on disk, and order as a column of positions."""

from __future__ import annotations

import resource
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.flow import Flow
from dedup.errors import DedupError
from dedup.verify.compare import out_of_order
from dedup.verify.cut import Order, disorder
from dedup.verify.evidence import LATE_TAIL, SideTopic
from dedup.verify.flow_outputs import FlowOutputs
from dedup.verify.kafka_reader import Bounds, RecordColumns
from dedup.verify.spill import Spill, buckets_for, places_of, scratch_directory, stand_in


def test_rows_come_back_by_bucket_in_the_order_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dedup.verify.spill._PENDING_ROWS", 7)
    spill = Spill(str(tmp_path), 3, 2, 2)
    for start in range(0, 100, 10):
        numbers = np.arange(start, start + 10)
        spill.add(numbers, [numbers, -numbers, [b"%d" % number for number in numbers], [None] * 10])
    for at in range(3):
        there = list(range(at, 100, 3))
        ours, negative, content, nothing = spill.bucket(at)
        assert ours.tolist() == there
        assert negative.tolist() == [-number for number in there]
        assert (content, nothing) == ([b"%d" % number for number in there], [None] * len(there))
    spill.close()


@pytest.mark.parametrize("buckets", [1, 3])
def test_a_bucket_without_rows_has_its_columns(tmp_path: Path, buckets: int) -> None:
    spill = Spill(str(tmp_path), buckets, 1, 1)
    spill.add(np.empty(0, np.int64), [[], []])
    spill.add(np.array([-1]), [[7], [b"k"]])
    found = [spill.bucket(at) for at in range(buckets)]
    assert [(numbers.tolist(), others) for numbers, others in found] == [([], [])] * (buckets - 1) + [([7], [b"k"])]
    assert spill.rows == 1
    spill.clear()
    assert [len(spill.bucket(at)[1]) for at in range(buckets)] == [0] * buckets
    spill.close()


def test_what_stands_for_a_value_names_its_digest_and_length() -> None:
    digest = blake2b(b"x" * 1_000, digest_size=32).hexdigest()
    assert stand_in(b"x" * 1_000) == f"blake2b-256:{digest} of 1000 bytes".encode()
    assert stand_in(None) == stand_in(b"")


@given(st.lists(st.binary(max_size=3) | st.none()), st.binary(max_size=2))
def test_an_id_has_one_place_whatever_the_content(ids: list[bytes | None], content: bytes) -> None:
    places = places_of(ids, [content] * len(ids)).tolist()
    by_id = dict(zip(ids, places, strict=True))
    assert places == [by_id[own] for own in ids]
    assert len(set(places)) == len({content if own is None else own for own in ids})


@given(st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=12))
def test_disorder_in_stretches_is_disorder(positions: list[int]) -> None:
    rows = np.arange(len(positions), dtype=np.int64)
    whole = list(out_of_order(array("q", positions)))
    assert len(disorder(rows, np.array(positions, dtype=np.int64))) == len(whole)


def match(order: Order, found: list[tuple[int, int, int]]) -> None:
    offsets, tasks, positions = np.array(found, dtype=np.int64).T
    order.match(offsets, tasks, positions)


@pytest.fixture
def order_of(tmp_path: Path) -> Iterator[Callable[[int, int], Order]]:
    spills = []

    def order(low: int, high: int) -> Order:
        spills.append(Spill(str(tmp_path), buckets_for(high - low), 3))
        return Order(Bounds(low, high, start_deleted=False), spills[-1])

    yield order
    for spill in spills:
        spill.close()


def test_order_is_looked_at_across_buckets_and_by_task(order_of: Callable[[int, int], Order]) -> None:
    order = order_of(0, 6)
    match(order, [(0, 0, 10), (2, 0, 12), (4, 1, 5)])
    match(order, [(5, 1, 4), (3, 0, 13)])
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
        match(order, [(11, 0, 5), (80_000, 0, 6), (89_999, 1, 7)])
    assert order.first_matched() == 11
    assert order.first_position(1) == 7
    assert order.displaced() == []
    order.forget()
    match(order, [(80_000, 0, 6)])
    assert order.first_matched() == 80_000
    assert order.first_position(1) is None


def test_a_swap_far_apart_is_found(order_of: Callable[[int, int], Order]) -> None:
    order = order_of(0, 150_000)
    positions = list(range(150_000))
    positions[70_000], positions[140_000] = positions[140_000], positions[70_000]
    match(order, [(row, 0, position) for row, position in enumerate(positions)])
    assert order.displaced() == [70_000, 140_000]


MANY = 30_000


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may become larger than 50 kB, which is an error of a write, like a full disk."""
    soft, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, most))


def records(_topic: str, _partition: int, start: int, end: int) -> Iterator[RecordColumns]:
    offsets = list(range(start, end))
    yield RecordColumns(offsets, [b"k"] * MANY, [b"v"] * MANY, [[]] * MANY, offsets)


def fill_spill(directory: str) -> None:
    with closing(Spill(directory, 1, 1)) as spill:
        spill.add(np.arange(MANY), [np.arange(MANY)])


def fill_side_topic(directory: str) -> None:
    with closing(SideTopic("late", directory)) as side:
        side.read(records, {0: Bounds(0, MANY, start_deleted=False)}, ["in"], LATE_TAIL)


def fill_flow_outputs(directory: str) -> None:
    with closing(FlowOutputs(Flow(), ("out",), directory)) as flowed:
        flowed.read(records, {"out": {0: Bounds(0, MANY, start_deleted=False)}}, ["in"], ())


@pytest.mark.parametrize("fill", [fill_spill, fill_side_topic, fill_flow_outputs])
def test_a_full_scratch_directory_is_told_in_a_sentence(tmp_path: Path, fill: Callable[[str], None]) -> None:
    """Was: "standard output: cannot be written", or a traceback."""
    with (
        pytest.raises(DedupError, match=f"^{tmp_path}: the temporary files .*--scratch") as told,
        full_disk(),
        scratch_directory("x-", tmp_path) as directory,
    ):
        fill(directory)
    assert str(told.value).count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_without_any_temporary_directory_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with pytest.raises(DedupError, match=r"No usable temporary directory .*TMPDIR"), scratch_directory("x-", None):
        pytest.fail("there is none")
