"""What is said of a guard period or grace that is not what the state was written under."""

import pytest

from dedup.core.window import BEFORE_ALL_TIME, Window
from dedup.kafka.wire import TopicPartition
from dedup.store.changelog import TaskRecord
from dedup.worker.restore import changed, what_it_means, why_restored

CHANGELOG = TopicPartition("t.changelog", 3)
HOUR_MS = 3_600_000


def record(before: Window, stream_time_ms=10 * HOUR_MS):
    return TaskRecord(b"", stream_time_ms, (), 0, before.segment_ms)


def window(guard, grace):
    return Window(guard * HOUR_MS, grace * HOUR_MS)


def test_the_same_sum_is_no_change_and_no_state_is_none():
    assert not changed(record(window(1, 3)), window(2, 2))
    assert not changed(None, window(2, 2))
    assert changed(record(window(1, 3)), window(2, 3))


def test_longer_is_in_force_when_the_difference_has_passed():
    text = what_it_means(CHANGELOG, record(window(1, 1)), window(2, 3))
    assert text.startswith("guard_period + grace is 5h now (2h + 3h), and was 2h when t.changelog/3 was last written")
    assert "the difference, 3h (to 1970-01-01T13:00:00Z)." in text
    assert "Shorter" not in text


def test_a_task_that_has_judged_nothing_has_no_time_to_name():
    text = what_it_means(CHANGELOG, record(window(1, 1), BEFORE_ALL_TIME), window(2, 3))
    assert "the difference, 3h. " in text


def test_a_time_beyond_calendars_is_a_number():
    assert f"(to {(1 << 60) + HOUR_MS} ms)" in what_it_means(CHANGELOG, record(window(1, 1), 1 << 60), window(1, 2))


def test_shorter_is_in_force_at_once():
    text = what_it_means(CHANGELOG, record(window(2, 3)), window(1, 1))
    assert "is 2h now (1h + 1h), and was 5h when" in text
    assert "The sum is shorter and takes effect at once." in text
    assert "Longer" not in text


@pytest.mark.parametrize("before", [window(1, 1), window(3, 3)])
def test_why_state_is_restored(before):
    assert f"guard_period + grace = {before.retention_ms // HOUR_MS}h, but the topology now has 4h." in why_restored(
        CHANGELOG, record(before), window(2, 2)
    )
