"""The alert about dead letters: when it begins, when it ends, and what it is made of."""

from collections import Counter

import pytest

from dedup.metrics import SPAN_MS, DeadLetterAlert, DeadShare, TaskNumbers


def counted(second, good, **reasons):
    verdicts = Counter(unique=good, dead_letter=sum(reasons.values()))
    return [TaskNumbers(verdicts=verdicts, dead_reasons=Counter(reasons))], second * 1_000


def alert_after(*looks):
    share = DeadShare()
    for look in looks:
        share.look(*look)
    return share.alert


NOTHING = counted(0, 0)


@pytest.mark.parametrize(
    ("end", "alert"),
    [
        (counted(1, 0, not_json=99), None),
        (counted(1, 0, not_json=100), DeadLetterAlert(100, 100, "not_json", 100)),
        (counted(1, 5, not_json=95), DeadLetterAlert(100, 95, "not_json", 95)),
        (counted(1, 6, not_json=95), None),
        (counted(1, 0, id_missing=40, not_json=60), DeadLetterAlert(100, 100, "not_json", 60)),
        (counted(1, 0, b=50, a=50), DeadLetterAlert(100, 100, "a", 50)),
        (counted(1, 1_000), None),
        (NOTHING, None),
    ],
)
def test_it_takes_nearly_all_of_enough_records(end, alert):
    assert alert_after(NOTHING, end) == alert


def test_only_what_was_judged_meanwhile_counts():
    begin, end = counted(0, 1_000, future_time=5_000), counted(60, 1_000, future_time=5_010, not_json=200)
    assert alert_after(begin, end) == DeadLetterAlert(210, 210, "not_json", 200)


def test_one_that_goes_on_needs_few_records_but_some():
    begun = (NOTHING, counted(1, 0, not_json=500))
    assert alert_after(*begun) == DeadLetterAlert(500, 500, "not_json", 500)
    assert alert_after(*begun, counted(61, 0, not_json=501)) == DeadLetterAlert(1, 1, "not_json", 1)
    assert alert_after(*begun, counted(61, 0, not_json=500)) is None


def test_it_turns_once_and_is_over_once():
    share = DeadShare()
    assert not share.look(*NOTHING)
    turns = []
    for second in range(1, 200):
        # Until second 60 all are dead letters, ten a second; then none is.
        dead = min(second, 60) * 10
        if share.look(*counted(second, 10 * second - dead, not_json=dead)):
            turns.append((second, share.alert is not None))
    assert turns == [(10, True), (64, False)]


def test_records_that_were_good_a_minute_ago_do_not_hide_it():
    share = DeadShare()
    share.look(*NOTHING)
    share.look(*counted(1, 100_000))
    assert not share.look(*counted(30, 100_000, not_json=100))
    assert share.look(*counted(62, 100_000, not_json=200))
    assert share.alert == DeadLetterAlert(200, 200, "not_json", 200)


def test_silence_ends_it():
    share = DeadShare()
    share.look(*NOTHING)
    assert share.look(*counted(1, 0, not_json=100))
    turns = [second for second in range(2, 100) if share.look(*counted(second, 0, not_json=100))]
    assert turns == [SPAN_MS // 1_000 + 1]


def test_a_clock_set_back_begins_anew():
    share = DeadShare()
    share.look(*counted(1_000, 0))
    assert not share.look(*counted(10, 0, not_json=1_000))
    assert share.look(*counted(11, 0, not_json=2_000))


def test_counters_are_added_up_without_the_first_hop():
    one = TaskNumbers(verdicts=Counter(unique=1, dead_letter=200), dead_reasons=Counter(not_json=200))
    first_hop = TaskNumbers(verdicts=Counter(repartitioned=1_000, dead_letter=1), dead_reasons=Counter(not_json=1))
    assert alert_after(NOTHING, ([one, first_hop], 7)) == DeadLetterAlert(202, 201, "not_json", 201)
