"""The worker's clock: never back, through suspends, and not behind a broker that was heard."""

import logging
import time

import pytest

from dedup.worker.task import SteadyClock


@pytest.fixture
def hands(monkeypatch):
    """Return the machine's clocks, in seconds, to be set by a test."""
    hands = {"wall": 1_700_000_000.0, "boot": 100.0}
    monkeypatch.setattr(time, "time", lambda: hands["wall"])
    monkeypatch.setattr(time, "clock_gettime", lambda which: hands["boot"] if which == time.CLOCK_BOOTTIME else 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    return hands


def test_a_wall_clock_that_is_set_is_not_followed_and_a_suspend_is(hands):
    """The monotonic clock stands while the machine sleeps: two hours of it made dead letters of everything after."""
    clock = SteadyClock()
    hands["wall"] -= 86_400
    assert clock.now_ms() == 1_700_000_000_000
    hands["wall"] += 2 * 86_400
    hands["boot"] += 7_200
    assert clock.now_ms() == 1_700_007_200_000


def test_a_broker_puts_it_forward_and_never_back(hands, caplog):
    clock = SteadyClock()
    with caplog.at_level(logging.WARNING):
        clock.heard(1_700_000_000_000 - 5_000)
        clock.heard(1_700_000_000_900)
        assert caplog.text == ""
        assert clock.now_ms() == 1_700_000_000_900
        clock.heard(1_700_007_200_000)
    assert clock.now_ms() == 1_700_007_200_000
    assert "7199100 ms behind the broker's" in caplog.text
    hands["boot"] += 1
    assert clock.now_ms() == 1_700_007_201_000
    assert clock.put_forward_ms == 900 + 7_199_100
