"""What the soak calls flat, and what it does not."""

from __future__ import annotations

import random

import pytest

from bench.soak import MIB, Look, trend


def looks(memory: list[float]) -> list[Look]:
    return [Look(10.0 * at, 0, 0, int(value), 50, 5, 0) for at, value in enumerate(memory)]


def test_noise_is_flat() -> None:
    dice = random.Random(1)
    found = trend("memory_bytes", looks([200 * MIB + dice.gauss(0, 4 * MIB) for _ in range(120)]))
    assert found.flat
    assert abs(found.growth) < 4 * MIB


def test_a_saw_is_flat() -> None:
    assert trend("memory_bytes", looks([200 * MIB + (at % 12) * 3 * MIB for at in range(120)])).flat


def test_one_outlier_does_not_make_a_slope() -> None:
    assert trend("memory_bytes", looks([200.0 * MIB] * 119 + [900.0 * MIB])).flat


def test_a_leak_is_not_flat() -> None:
    found = trend("memory_bytes", looks([200 * MIB + at * 0.2 * MIB for at in range(120)]))
    assert not found.flat
    assert found.r_squared == pytest.approx(1)
    # 120 looks of 10 s are 1,190 s; 0.2 MiB a look are 72 MiB an hour.
    assert found.robust_slope == pytest.approx(72 * MIB, rel=0.01)


def test_files_that_are_never_closed_are_not_flat() -> None:
    rows = [Look(10.0 * at, 0, 0, 0, 50 + at // 10, 5, 0) for at in range(120)]
    assert not trend("files", rows).flat
