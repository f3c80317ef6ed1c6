"""A batch judged as a whole has the verdicts of its records judged one after the other; at a bound it is not so judged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.core.extract import Extracted
from dedup.core.fold import Outcome, Rows, Rules, judge, judged_at_once
from dedup.core.window import Feed, Sighting, Source, StreamTime, Window

FEED = Feed(0, 0)
WINDOW = Window(10, 20)
PRINTS = st.sampled_from([b"x"] * 9 + [b"y"])


def seen(first_ms: int, last_ms: int | None = None) -> Sighting:
    return Sighting(first_ms, first_ms if last_ms is None else last_ms, Source(0, 0, 0))


@settings(max_examples=1000, deadline=None)
@given(
    records=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(95, 108), PRINTS), min_size=1, max_size=12),
    sightings=st.dictionaries(
        st.sampled_from("abcdefgh"), st.tuples(st.integers(80, 110), st.integers(0, 4), PRINTS), max_size=4
    ),
    before_ms=st.integers(80, 112),
    compared=st.booleans(),
)
def test_as_a_whole_is_as_one_by_one(records, sightings, before_ms, compared):
    ids = [name.encode() for name, *_ in records]
    times_ms = [time_ms for _, time_ms, _ in records]
    prints = [each for *_, each in records] if compared else None
    known = {
        name.encode(): (seen(first_ms, first_ms + longer_ms)._replace(fingerprint=each if compared else b""),)
        for name, (first_ms, longer_ms, each) in sightings.items()
        if name.encode() in ids
    }
    before = StreamTime(before_ms, dict(StreamTime.before([FEED]).feeds))
    stream_times, after = before.after_one_feed(times_ms)
    at_once = judged_at_once(ids, times_ms, known, WINDOW, after.value_ms, prints)
    if at_once is None:
        return
    one_by_one = Outcome(judged_times_ms=times_ms)
    rows = Rows(Extracted(list(ids), times_ms, prints, {}), range(len(ids)), (FEED,))
    judge(rows, Rules(WINDOW, fingerprints=compared), one_by_one, dict(known), stream_times, set())
    unique, duplicates, repeats = at_once
    assert (unique, unique) == (one_by_one.unique, one_by_one.singles)
    assert (duplicates, repeats) == (one_by_one.duplicates, one_by_one.repeats)
    assert (one_by_one.late, one_by_one.rewritten, one_by_one.conflicts) == ([], {}, [])
    assert before.after_one_feed_at_once(max(times_ms)) == after


def test_the_first_of_each_unknown_id_is_unique():
    found = judged_at_once([b"a", b"k", b"b", b"a", b"k", b"b"], [100] * 6, {b"k": (seen(99),)}, WINDOW, 100)
    assert found == ([0, 2], [(1, seen(99)), (4, seen(99))], [(3, 0), (5, 2)])


INSIDE = [
    ([100, 100], (), 120),  # as far behind stream time as grace allows
    ([100, 109], (), 109),  # nearly a guard period apart
    ([95, 100], (seen(91),), 100),  # nearly a guard period after what is known
    ([95, 100], (seen(104),), 100),  # nearly a guard period before it
    ([95, 100], (seen(80, 120),), 100),
]
OUTSIDE = [
    ([100, 100], (), 121),  # late
    ([100, 110], (), 110),
    ([95, 101], (seen(91),), 101),
    ([95, 100], (seen(105),), 100),
    ([100, 100], (seen(99), seen(101)), 100),  # which of the two is the nearer one?
]


@pytest.mark.parametrize(("times_ms", "known", "stream_time_ms"), INSIDE)
def test_just_inside_every_bound_a_batch_is_judged_as_a_whole(times_ms, known, stream_time_ms):
    sightings = {b"a": known} if known else {}
    assert judged_at_once([b"a", b"b"], times_ms, sightings, WINDOW, stream_time_ms) is not None


@pytest.mark.parametrize(("times_ms", "known", "stream_time_ms"), OUTSIDE)
def test_at_every_bound_its_records_are_judged_one_by_one(times_ms, known, stream_time_ms):
    sightings = {b"a": known} if known else {}
    assert judged_at_once([b"a", b"b"], times_ms, sightings, WINDOW, stream_time_ms) is None
