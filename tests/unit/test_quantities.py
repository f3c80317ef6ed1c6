from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.quantities import format_duration, format_size, parse_duration, parse_size


@settings(deadline=None)
@given(st.integers(0, 3_153_600_000_000))
def test_a_formatted_duration_reads_back(value_ms):
    assert parse_duration(format_duration(value_ms)) == value_ms


@settings(deadline=None)
@given(st.integers(0, 1 << 60))
def test_a_formatted_size_reads_back(value_bytes):
    assert parse_size(format_size(value_bytes)) == value_bytes


@pytest.mark.parametrize(
    ("value_ms", "text"),
    [(0, "0s"), (1, "1ms"), (1_000, "1s"), (90_000, "90s"), (86_400_000, "1d"), (3_600_001, "3600001ms")],
)
def test_the_shortest_exact_text(value_ms, text):
    assert format_duration(value_ms) == text


@pytest.mark.parametrize(
    "text", ["", "h", "1", "1 h", "1h30m", "1e3s", "٣h", "-1s", "1H", "1MS", "9" * 20 + "s", "1h\n"]
)
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match=r"write|units"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["1GB", "1gib", "1", "GiB", "2000000TiB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"write|units"):
        parse_size(text)
