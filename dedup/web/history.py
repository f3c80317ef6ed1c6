"""The last minutes of a worker, for its plots: rates, lag and latency, sampled at an even pace from running counters.

Rates are differences of counters, as Prometheus' `rate()`: a task that is built anew counts from zero. Latency is a
quantile of the histogram's growth, interpolated within its bucket, as `histogram_quantile()`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from dedup.glance import TaskPulse
from dedup.metrics import END_TO_END_BUCKETS_S, TaskNumbers

EVERY_S: Final = 1.0
KEPT: Final = 300
"""Samples: five minutes."""
PLOTTED: Final = ("unique", "duplicate", "late", "dead_letter", "exempt")


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment; rates are per second since the sample before."""

    time_ms: int
    rates: Mapping[str, float]
    lag_records: int | None
    """None while no task knows the end of its partition."""
    median_s: float | None
    """End-to-end latency of what was committed since the sample before; None where nothing was."""
    p99_s: float | None


@dataclass(slots=True)
class _Known:
    numbers: TaskNumbers
    """Held, so that no other task's counters can take its identity."""
    verdicts: Mapping[str, int]
    latencies: Sequence[int]


@dataclass(slots=True)
class History:
    """Samples in the order they were taken, the oldest forgotten."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT))
    _known: dict[int, _Known] = field(default_factory=dict)
    _last_ms: int | None = None

    def sample(self, pulses: Iterable[TaskPulse], now_ms: int) -> None:
        """Add a sample; the first one only says from where to count."""
        grown: Counter[str] = Counter()
        latencies = [0] * (len(END_TO_END_BUCKETS_S) + 1)
        lags: list[int] = []
        known: dict[int, _Known] = {}
        for pulse in pulses:
            numbers = pulse.numbers
            before = self._known.get(id(numbers))
            now = known[id(numbers)] = _Known(numbers, dict(numbers.verdicts), tuple(numbers.end_to_end.counts))
            grown.update(now.verdicts)
            if before is not None:
                grown.subtract(before.verdicts)
            olds: Sequence[int] = before.latencies if before is not None else [0] * len(latencies)
            latencies = [sum(three) for three in zip(latencies, now.latencies, (-old for old in olds), strict=True)]
            if pulse.lag_records is not None:
                lags.append(pulse.lag_records)
        since_s = None if self._last_ms is None else max(0.001, (now_ms - self._last_ms) / 1000)
        self._known, self._last_ms = known, now_ms
        if since_s is not None:
            rates = {name: round(grown[name] / since_s, 2) for name in PLOTTED}
            lag = sum(lags) if lags else None
            self.samples.append(Sample(now_ms, rates, lag, quantile(latencies, 0.5), quantile(latencies, 0.99)))

    def as_data(self) -> dict[str, list[float | None]]:
        """Return the samples column by column."""
        samples = self.samples
        return {
            "time_ms": [each.time_ms for each in samples],
            **{name: [each.rates[name] for each in samples] for name in PLOTTED},
            "lag_records": [each.lag_records for each in samples],
            "median_s": [each.median_s for each in samples],
            "p99_s": [each.p99_s for each in samples],
        }


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return a quantile of a histogram with the end-to-end buckets, in seconds; None of nothing."""
    total = sum(counts)
    if not total:
        return None
    wanted, below = share * total, 0
    for number, count in enumerate(counts):
        if count and below + count >= wanted:
            low = END_TO_END_BUCKETS_S[number - 1] if number else 0.0
            # Of the last bucket only the lower bound is known.
            high = END_TO_END_BUCKETS_S[number] if number < len(END_TO_END_BUCKETS_S) else low
            return round(low + (high - low) * (wanted - below) / count, 4)
        below += count
    return END_TO_END_BUCKETS_S[-1]
