"""The overlay: what was judged is visible at every moment from the fold to the store, and a newer value hides an older."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.errors import InvariantBroken
from dedup.store.base import MemoryStore
from dedup.store.changelog import TaskRecord
from dedup.store.write_buffer import WriteBuffer

RECORD = TaskRecord(b"f", 0, (), 1, 100)
SEGMENTS = (0, 100, 200)
OLDEST_MS = 0


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def overlay(store):
    return WriteBuffer(store)


def test_a_sighting_is_visible_from_the_fold_to_the_store(overlay, store):
    overlay.add({0: {b"a": b"1"}})
    assert overlay.get_many([b"a", b"b"]) == {b"a": [b"1"]}
    assert overlay._open == {0: {b"a": b"1"}}
    generation = overlay.freeze()
    assert overlay._committing is not None
    assert overlay._open == {}
    assert overlay.get_many([b"a"]) == {b"a": [b"1"]}
    assert store.position == 0
    overlay.applied(generation, RECORD, 5, oldest_live_ms=OLDEST_MS)
    assert overlay._committing is None
    assert overlay.get_many([b"a"]) == {b"a": [b"1"]}
    assert store.get_each([0], [b"a"]) == {0: {b"a": b"1"}}
    assert (store.position, store.task_record) == (5, RECORD)


def test_a_newer_generation_hides_an_older_one_in_the_same_segment_only(overlay):
    for number in (1, 2, 3):
        overlay.add({0: {b"a": b"%d" % number}})
        if number < 3:
            overlay.applied(overlay.freeze(), RECORD, number, oldest_live_ms=OLDEST_MS)
    overlay.freeze()
    overlay.add({0: {b"a": b"4"}, 100: {b"a": b"5", b"b": b"6"}})
    assert overlay.get_many([b"a", b"b", b"c"]) == {b"a": [b"4", b"5"], b"b": [b"6"]}
    assert overlay.get_many([b"a"], after_ms=0) == {b"a": [b"5"]}
    assert overlay.get_many([b"a"], after_ms=100) == {}


def test_what_the_store_has_in_another_segment_is_found_beside_a_hit(overlay, store):
    store.apply({0: {b"a": b"old", b"b": b"old"}, 100: {b"a": b"hidden"}}, RECORD, 1)
    overlay.add({100: {b"a": b"new"}})
    assert overlay.get_many([b"a", b"b", b"c"]) == {b"a": [b"old", b"new"], b"b": [b"old"]}


def test_a_frozen_generation_is_not_changed_by_later_folds(overlay):
    overlay.add({0: {b"a": b"1"}})
    generation = overlay.freeze()
    overlay.add({0: {b"b": b"2"}})
    assert generation == {0: {b"a": b"1"}}


def test_the_writes_of_a_fold_are_copied(overlay):
    writes = {0: {b"a": b"1"}}
    overlay.add(writes)
    overlay.add({0: {b"b": b"2"}})
    assert writes == {0: {b"a": b"1"}}


def test_a_second_commit_in_flight_is_refused(overlay):
    overlay.freeze()
    with pytest.raises(InvariantBroken, match="in flight"):
        overlay.freeze()


def test_only_the_generation_in_flight_can_be_applied_and_only_once(overlay):
    first = overlay.freeze()
    overlay.applied(first, RECORD, 1, oldest_live_ms=OLDEST_MS)
    with pytest.raises(InvariantBroken):
        overlay.applied(first, RECORD, 2, oldest_live_ms=OLDEST_MS)
    overlay.freeze()
    with pytest.raises(InvariantBroken):
        overlay.applied(first, RECORD, 2, oldest_live_ms=OLDEST_MS)


def test_a_generation_the_store_refuses_stays_visible(overlay, store):
    store.apply({}, RECORD, 9)
    overlay.add({0: {b"a": b"1"}})
    generation = overlay.freeze()
    with pytest.raises(InvariantBroken, match="moved back"):
        overlay.applied(generation, RECORD, 8, oldest_live_ms=OLDEST_MS)
    assert overlay._committing is not None
    assert overlay.get_many([b"a"]) == {b"a": [b"1"]}


def test_a_discarded_overlay_shows_the_store_alone(overlay, store):
    overlay.add({0: {b"a": b"1"}})
    overlay.applied(overlay.freeze(), RECORD, 1, oldest_live_ms=OLDEST_MS)
    overlay.add({0: {b"b": b"2"}})
    overlay.freeze()
    overlay.add({0: {b"c": b"3"}})
    overlay.discard()
    assert overlay.get_many([b"a", b"b", b"c"]) == {b"a": [b"1"]}
    assert overlay._committing is None
    assert store.position == 1


def test_segments_that_have_expired_meanwhile_are_not_written(overlay, store):
    overlay.add({0: {b"a": b"1"}, 100: {b"a": b"2"}, 200: {b"b": b"3"}})
    overlay.applied(overlay.freeze(), RECORD, 1, oldest_live_ms=200)
    assert list(store.segments()) == [200]
    assert store.drop_below(200, RECORD.segment_ms) == ()
    assert overlay.get_many([b"a", b"b"]) == {b"b": [b"3"]}


def test_dropped_segments_are_gone(overlay, store):
    overlay.add({0: {b"a": b"1"}, 100: {b"a": b"2"}})
    overlay.applied(overlay.freeze(), RECORD, 1, oldest_live_ms=OLDEST_MS)
    assert store.drop_below(100, 100) == (0,)
    assert overlay.get_many([b"a"]) == {b"a": [b"2"]}


ids = st.sampled_from([b"a", b"b", b"c", b"d"])
steps = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from(SEGMENTS), st.dictionaries(ids, st.binary(max_size=2)), max_size=3),
        st.sampled_from(["freeze", "applied"]),
    ),
    max_size=12,
)


@given(steps)
def test_look_ups_equal_a_plain_dict_of_everything_judged(steps):
    overlay, judged, generation, position = WriteBuffer(MemoryStore()), {}, None, 0
    for step in steps:
        if isinstance(step, dict):
            overlay.add(step)
            for segment, values in step.items():
                judged.update({(segment, state_key): value for state_key, value in values.items()})
        elif step == "freeze" and generation is None:
            generation = overlay.freeze()
        elif step == "applied" and generation is not None:
            position += 1
            overlay.applied(generation, RECORD, position, oldest_live_ms=OLDEST_MS)
            generation = None
        asked = [b"d", b"a", b"b", b"e"]
        expected = {}
        for segment in SEGMENTS:
            for state_key in asked:
                if (segment, state_key) in judged:
                    expected.setdefault(state_key, []).append(judged[segment, state_key])
        assert overlay.get_many(asked) == expected
