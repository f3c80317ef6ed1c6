"""The workload of bench/ is what its page says, and its exactness checker finds what is planted."""

from __future__ import annotations

import json

import pytest

from bench.reader import Exactness, check
from bench.workload import GUARD_MS, NEAR_EVENTS, Event, Workload

EVENTS = 20_000
W1 = Workload(EVENTS, seed=7, start_ms=1_700_000_000_000)


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return list(W1.generate())


def test_the_same_seed_gives_the_same_events(events):
    assert list(Workload(EVENTS, seed=7, start_ms=W1.start_ms).generate()) == events


def test_another_seed_gives_others(events):
    other = list(Workload(EVENTS, seed=8, start_ms=W1.start_ms).generate())
    assert not {event.event_id for event in other} & {event.event_id for event in events}


def test_only_the_start_time_moves(events):
    later = Workload(EVENTS, seed=7, start_ms=W1.start_ms + 5_000).generate()
    assert [(event.event_id, event.time_ms - 5_000) for event in later] == [
        (event.event_id, event.time_ms) for event in events
    ]


def test_an_event_is_200_bytes_of_json_with_its_id_as_key_and_its_time_as_record_time(events):
    for event in events[:200]:
        value = json.loads(event.value)
        assert list(value) == ["event_id", "user", "ts", "padding"]
        assert value["event_id"].encode() == event.event_id
        assert value["ts"] == event.time_ms
        assert 195 <= len(event.value) <= 206


def test_three_in_ten_are_duplicates(events):
    duplicates = EVENTS - len({event.event_id for event in events})
    assert duplicates / EVENTS == pytest.approx(0.3, abs=0.015)


def test_half_of_the_duplicates_repeat_one_of_the_1000_events_before_them(events):
    last: dict[bytes, int] = {}
    near = far = 0
    for index, event in enumerate(events):
        if event.event_id in last:
            within = index - last[event.event_id] <= NEAR_EVENTS
            near, far = near + within, far + (not within)
        last[event.event_id] = index
    # Of the other half, spread over everything before, some are near too: at this size about one in five.
    assert 0.5 < near / (near + far) < 0.65


def test_no_share_of_duplicates_means_none():
    assert len(Workload(1_000, duplicate_share=0.0).expected()) == 1_000


@pytest.mark.parametrize("size", [10, 1_000_000, 5_000_000])
def test_all_events_lie_within_half_a_guard_period(size):
    workload = Workload(size)
    assert 0 <= workload.time_ms(size - 1) - workload.time_ms(0) <= GUARD_MS / 2


@pytest.mark.parametrize("size", [50_000, 200_000])
def test_a_backlog_spans_30_days_and_repeats_no_id_after_the_guard_period(size):
    workload = Workload(size, seed=7, form="backlog")
    ages = [workload.time_ms(index) - workload.time_ms(int(first)) for index, first in enumerate(workload.owners())]
    assert min(ages) >= 0
    assert max(ages) < GUARD_MS
    assert ages.count(0) / size == pytest.approx(0.7, abs=0.015)
    assert workload.time_ms(size - 1) - workload.time_ms(0) == pytest.approx(30 * 24 * GUARD_MS, rel=0.001)


def test_expected_is_each_id_with_its_first_events_time(events):
    firsts: dict[bytes, int] = {}
    for event in events:
        firsts.setdefault(event.event_id, event.time_ms)
    assert W1.expected() == firsts


EXPECTED = {b"a": 10, b"b": 20, b"c": 30}
RIGHT = [(b"a", 10, 0), (b"b", 20, 0), (b"c", 30, 0)]


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        pytest.param(RIGHT, Exactness(3, 0, 0, 0, 0), id="nothing"),
        pytest.param(RIGHT[::-1], Exactness(3, 0, 0, 0, 0), id="another order of partitions"),
        pytest.param(RIGHT[:2], Exactness(2, 1, 0, 0, 0), id="a loss"),
        pytest.param([*RIGHT, (b"b", 25, 0)], Exactness(4, 0, 1, 0, 0), id="a duplicate"),
        pytest.param([*RIGHT, *RIGHT[:1] * 3], Exactness(6, 0, 3, 0, 0), id="three duplicates of one"),
        pytest.param([*RIGHT, (b"x", 1, 0)], Exactness(4, 0, 0, 1, 0), id="an ID nobody sent"),
        pytest.param([*RIGHT, (b"", 0, 0)], Exactness(4, 0, 0, 1, 0), id="a record that is no event"),
        pytest.param([(b"a", 11, 0), *RIGHT[1:]], Exactness(3, 0, 0, 0, 1), id="not the first record of its ID"),
        pytest.param([(b"a", 11, 0), *RIGHT], Exactness(4, 0, 1, 0, 1), id="first a wrong one, then the right one"),
        pytest.param([*RIGHT[:2], (b"a", 10, 0)], Exactness(3, 1, 1, 0, 0), id="one for another: the count is right"),
        pytest.param([], Exactness(0, 3, 0, 0, 0), id="nothing came out"),
    ],
)
def test_the_checker_finds_what_is_planted(planted, found):
    books = check(iter(planted), EXPECTED)
    assert books == found
    assert books.exact is (found == Exactness(3, 0, 0, 0, 0))


def test_where_any_record_of_an_id_will_do_none_is_the_wrong_one():
    assert check(iter([(b"a", 99, 0)]), {b"a": None}).exact


def test_a_right_run_over_the_whole_workload_is_exact_and_one_record_less_is_not(events):
    seen: set[bytes] = set()
    out = []
    for event in events:
        if event.event_id not in seen:
            seen.add(event.event_id)
            out.append((event.event_id, event.time_ms, 0))
    expected = W1.expected()
    assert check(iter(out), expected).exact
    assert check(iter(out[:-1]), expected).lost == 1
