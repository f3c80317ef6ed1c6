"""The vectors that must hold (semantics page), on the exact model and on the window rule."""

from __future__ import annotations

from typing import assert_never

import pytest

from dedup.core.reference_model import ModelFault, ModelRecord, ModelRules, ReferenceModel, model
from dedup.core.window import BEFORE_ALL_TIME, Duplicate, Late, Sighting, Source, Unique, Window

DAY_MS = 86_400_000

Stream = list[tuple[str, int]]
"""(ID, event time), in log order."""


def by_model(stream: Stream, window: Window) -> str:
    """Verdicts of the exact model, one letter each."""
    rules = ModelRules(window.guard_ms, window.grace_ms, window.extend, window.extend_at_most_ms)
    records = [ModelRecord(id_.encode(), time_ms, Source(0, 0, row)) for row, (id_, time_ms) in enumerate(stream)]
    letters = {"unique": "U", "duplicate": "D", "late": "L", "dead_letter": "X"}
    return "".join(letters[verdict.kind] for verdict in model(records, rules))


def by_window(stream: Stream, window: Window) -> str:
    """Verdicts of the window rule, one letter each; segments are dropped as soon as they may be."""
    segments: dict[int, dict[str, list[Sighting]]] = {}
    stream_time_ms = BEFORE_ALL_TIME
    letters = ""
    for row, (id_, time_ms) in enumerate(stream):
        stream_time_ms = max(stream_time_ms, time_ms)
        for segment in [
            start for start in segments if start + window.segment_ms <= window.oldest_live_ms(stream_time_ms)
        ]:
            del segments[segment]
        known = [seen for segment in segments.values() for seen in segment.get(id_, [])]
        added: Sighting | None = None
        match window.decide(time_ms, tuple(known), stream_time_ms):
            case Unique():
                letters += "U"
                added = Sighting(time_ms, time_ms, Source(0, 0, row))
            case Duplicate(of):
                letters += "D"
                if window.extend:
                    segments[window.segment_of(of.last_ms)][id_].remove(of)
                    added = window.extended(of, time_ms)
            case Late():
                letters += "L"
            case never:
                assert_never(never)
        if added is not None:
            segments.setdefault(window.segment_of(added.last_ms), {}).setdefault(id_, []).append(added)
    return letters


def same_id(*times_ms: int) -> Stream:
    """One ID at these times."""
    return [("a", time_ms) for time_ms in times_ms]


PLAIN = Window(guard_ms=10, grace_ms=10)
EXTENDED = Window(guard_ms=10, grace_ms=10, extend=True, extend_at_most_ms=70)
STRICT = Window(guard_ms=10, grace_ms=0)
DAY = Window(guard_ms=DAY_MS, grace_ms=DAY_MS)

VECTORS = [
    pytest.param(PLAIN, same_id(10, 1, 12), "UDD", id="both directions"),
    pytest.param(PLAIN, same_id(100, 109), "UD", id="guard - 1"),
    pytest.param(PLAIN, same_id(100, 110), "UU", id="guard"),
    pytest.param(PLAIN, same_id(100, 111), "UU", id="guard + 1"),
    pytest.param(PLAIN, same_id(100, 91), "UD", id="backwards guard - 1"),
    pytest.param(PLAIN, same_id(100, 90), "UU", id="backwards guard"),
    pytest.param(PLAIN, same_id(100, 89), "UL", id="backwards guard + 1, beyond grace"),
    pytest.param(EXTENDED, same_id(100, 109, 99), "UDD", id="extended keeps both ends"),
    pytest.param(EXTENDED, same_id(100, 109, 118, 128), "UDDU", id="extended reaches guard after the last"),
    pytest.param(EXTENDED, same_id(*range(100, 190, 9)), "UDDDDDDDDU", id="extension is capped"),
    pytest.param(EXTENDED, same_id(*range(100, 180, 9), 179), "UDDDDDDDDD", id="guard - 1 after the cap"),
    pytest.param(EXTENDED, same_id(*range(100, 180, 9), 180), "UDDDDDDDDU", id="guard after the cap"),
    pytest.param(PLAIN, same_id(5, 5, 5), "UDD", id="one time"),
    pytest.param(PLAIN, [("a", 9), ("b", 21), ("a", 11), ("a", 19)], "UUDU", id="out of order over a segment border"),
    pytest.param(PLAIN, [("a", 10), ("b", 30), ("a", 11)], "UUD", id="late but known is a duplicate"),
    pytest.param(PLAIN, [("a", 10), ("b", 31), ("a", 11)], "UUL", id="no longer known is late"),
    pytest.param(PLAIN, [("b", 30), ("a", 20)], "UU", id="at the edge of grace"),
    pytest.param(PLAIN, [("b", 30), ("a", 19)], "UL", id="beyond grace"),
    pytest.param(STRICT, [("b", 30), ("a", 29), ("b", 29)], "ULD", id="grace 0"),
    pytest.param(DAY, [("a", DAY_MS), ("a", DAY_MS + DAY_MS - 1), ("a", DAY_MS + DAY_MS)], "UDU", id="a day"),
    pytest.param(DAY, [("a", 3 * DAY_MS), ("b", 2 * DAY_MS), ("a", 2 * DAY_MS + 1)], "UUD", id="clock set back a day"),
    pytest.param(DAY, [("a", 3 * DAY_MS), ("b", 4 * DAY_MS), ("a", 3 * DAY_MS)], "UUD", id="clock set forward a day"),
]


@pytest.mark.parametrize(("window", "stream", "expected"), VECTORS)
def test_vector_on_the_model(window: Window, stream: Stream, expected: str) -> None:
    assert by_model(stream, window) == expected


@pytest.mark.parametrize(("window", "stream", "expected"), VECTORS)
def test_vector_on_the_window(window: Window, stream: Stream, expected: str) -> None:
    assert by_window(stream, window) == expected


RULES = ModelRules(guard_ms=10, grace_ms=10)


def kinds(
    records: list[ModelRecord], rules: ModelRules = RULES, feeds: tuple[tuple[int, int], ...] = ((0, 0),)
) -> list[str]:
    """The kinds of verdict the model gives."""
    return [verdict.kind for verdict in model(records, rules, feeds)]


def test_the_same_id_in_two_source_topics_is_one_event() -> None:
    records = [ModelRecord(b"a", 5, Source(0, 0, 0)), ModelRecord(b"a", 6, Source(1, 0, 0))]
    assert kinds(records, feeds=((0, 0), (1, 0))) == ["unique", "duplicate"]


def test_a_feed_that_has_not_reported_keeps_everything_from_being_late() -> None:
    feeds = ((0, 0), (0, 1))
    records = [ModelRecord(b"a", 1_000, Source(0, 0, 0)), ModelRecord(b"b", 1, Source(0, 0, 1))]
    assert kinds(records, feeds=feeds) == ["unique", "unique"]


def test_an_idle_feed_does_not_hold_stream_time_until_its_next_record() -> None:
    feeds = ((0, 0), (0, 1))
    state = ReferenceModel(RULES, feeds)
    state.judge(ModelRecord(b"a", 1_000, Source(0, 0, 0)))
    assert state.judge(ModelRecord(None, 0, Source(0, 1, 0), idle=True)).stream_time_ms == 1_000
    assert state.judge(ModelRecord(b"b", 1, Source(0, 0, 1))).kind == "late"
    # A record of any kind, here an unreadable one, wakes the feed up; stream time does not go back.
    assert state.judge(ModelRecord(None, 0, Source(0, 1, 1), fault="unreadable")).stream_time_ms == 1_000
    assert state.judge(ModelRecord(b"c", 2_000, Source(0, 0, 2))).stream_time_ms == 1_000
    assert state.judge(ModelRecord(b"d", 1_500, Source(0, 1, 2))).stream_time_ms == 1_500


def test_when_all_feeds_are_idle_the_greatest_time_of_all_counts() -> None:
    state = ReferenceModel(RULES, ((0, 0), (0, 1)))
    state.judge(ModelRecord(b"a", 1_000, Source(0, 0, 0)))
    state.judge(ModelRecord(b"b", 10, Source(0, 1, 0)))
    state.judge(ModelRecord(None, 0, Source(0, 0, 1), idle=True))
    assert state.stream_time_ms == 10
    assert state.judge(ModelRecord(None, 0, Source(0, 1, 1), idle=True)).stream_time_ms == 1_000


def test_a_dead_letter_is_no_sighting_and_does_not_move_stream_time() -> None:
    records = [
        ModelRecord(b"a", 100),
        ModelRecord(b"b", -1),
        ModelRecord(b"b", 10_000, ceiling_ms=5_000),
        ModelRecord(b"b", 95),
        ModelRecord(None, 20_000, fault="unreadable"),
        ModelRecord(b"c", 91),
    ]
    verdicts = model(records, RULES)
    assert [v.kind for v in verdicts] == ["unique", "dead_letter", "dead_letter", "unique", "dead_letter", "unique"]
    assert [v.reason for v in verdicts] == ["", "negative_time", "future_time", "", "unreadable", ""]
    assert verdicts[-1].stream_time_ms == 100


def test_a_clamped_time_is_the_one_stored() -> None:
    rules = ModelRules(guard_ms=10, grace_ms=10, future="clamp")
    verdicts = model([ModelRecord(b"a", 9_999, ceiling_ms=100), ModelRecord(b"a", 105)], rules)
    assert [(v.kind, v.time_ms) for v in verdicts] == [("unique", 100), ("duplicate", 105)]


@pytest.mark.parametrize(
    ("fault", "missing", "tombstones", "expected"),
    [
        ("missing_id", "dead_letter", "forward", "dead_letter"),
        ("missing_id", "forward", "forward", "exempt"),
        ("missing_id", "fail", "forward", "fail"),
        ("tombstone", "fail", "forward", "exempt"),
        ("tombstone", "fail", "dead_letter", "dead_letter"),
        ("unreadable", "forward", "forward", "dead_letter"),
        ("bad_time", "forward", "forward", "dead_letter"),
    ],
)
def test_faults_follow_their_policies(fault: ModelFault, missing: str, tombstones: str, expected: str) -> None:
    rules = ModelRules(10, 10, missing=missing, tombstones=tombstones)  # type: ignore[arg-type]  # from the table above
    assert kinds([ModelRecord(None, 5, fault=fault)], rules) == [expected]


@pytest.mark.parametrize(
    ("on_conflict", "expected"),
    [
        ("duplicate", [("unique", False), ("duplicate", True), ("duplicate", False), ("duplicate", True)]),
        ("forward", [("unique", False), ("unique", True), ("duplicate", False), ("duplicate", False)]),
        ("fail", [("unique", False), ("fail", True)]),
    ],
)
def test_conflicts(on_conflict: str, expected: list[tuple[str, bool]]) -> None:
    rules = ModelRules(10, 10, on_conflict=on_conflict)  # type: ignore[arg-type]  # from the table above
    records = [ModelRecord(b"a", 5, fingerprint=payload) for payload in (b"x", b"y", b"x", b"y")]
    assert [(v.kind, v.conflict) for v in model(records, rules)] == expected


def test_forgetting_changes_no_verdict() -> None:
    kept, forgetful = ReferenceModel(RULES), ReferenceModel(RULES)
    for row in range(500):
        record = ModelRecord(b"%d" % (row * 7 % 13), row * 3 % 101 + row // 4, Source(0, 0, row))
        verdict = kept.judge(record)
        assert forgetful.judge(record) == verdict
        forgetful.forget()
    assert len(forgetful.sightings) <= len(kept.sightings)


def test_a_feed_that_was_added_later_counts_from_its_first_record_on() -> None:
    records = [
        ModelRecord(b"a", 100, Source(0, 0, 0)),
        ModelRecord(b"", 0, Source(0, 7, -1), idle=True),  # no record of it has come: it holds nothing up
        ModelRecord(b"b", 120, Source(0, 0, 1)),
        ModelRecord(b"c", 105, Source(0, 7, 0)),  # late, and from now on the slowest
        ModelRecord(b"d", 150, Source(0, 0, 2)),
        ModelRecord(b"e", 140, Source(0, 7, 1)),
        ModelRecord(None, 0, Source(0, 8, 0), fault="unreadable"),  # a record, though not a judged one
        ModelRecord(b"f", 160, Source(0, 0, 3)),
    ]
    verdicts = model(records, RULES)
    assert [each.stream_time_ms for each in verdicts] == [100, 100, 120, 120, 120, 140, 140, 140]
    assert [each.kind for each in verdicts][3] == "late"
