"""The metrics of a worker in Prometheus' text format: every metric of `METRICS`, read from what is seen of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dedup.metrics import METRICS, Durations, Metric, TaskNumbers, TaskSeen, WorkerSeen

STATES: Final = ("created", "restoring", "running", "closed")

Sample = tuple[tuple[str, ...], "float | Durations"]
"""Label values in the order of the metric's labels, and the value."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one scrape reads from; the counters are added up once for all metrics."""

    seen: WorkerSeen
    counted: tuple[tuple[tuple[str, str, str], TaskNumbers], ...]
    """Of every task that is or was here, ordered."""

    @classmethod
    def of(cls, seen: WorkerSeen) -> Self:
        """Return the scrape of a worker at one moment."""
        counted = sorted(seen.counters().items())
        return cls(seen, tuple(((place[0], place[1], str(place[2])), numbers) for place, numbers in counted))


def _each(read: Callable[[TaskSeen], float | Durations | None]) -> Callable[[Scrape], Iterator[Sample]]:
    """Return what reads one value of every task, leaving out what is not known."""

    def samples(scrape: Scrape) -> Iterator[Sample]:
        for task in scrape.seen.tasks:
            value = read(task)
            if value is not None:
                yield _place(task), value

    return samples


def _counted(read: Callable[[TaskNumbers], float | Durations]) -> Callable[[Scrape], Iterator[Sample]]:
    """Return what reads one counter of every task that is or was here."""

    def samples(scrape: Scrape) -> Iterator[Sample]:
        for place, numbers in scrape.counted:
            yield place, read(numbers)

    return samples


def _split(read: Callable[[TaskNumbers], Mapping[str, float]]) -> Callable[[Scrape], Iterator[Sample]]:
    """Return what reads several counters of every task that is or was here, by one more label."""

    def samples(scrape: Scrape) -> Iterator[Sample]:
        for place, numbers in scrape.counted:
            for name, value in sorted(read(numbers).items()):
                yield (*place, name), value

    return samples


def _states(scrape: Scrape) -> Iterator[Sample]:
    for task in scrape.seen.tasks:
        for state in STATES:
            yield (*_place(task), state), float(state == task.state)


def _whole(read: Callable[[WorkerSeen], float]) -> Callable[[Scrape], Iterator[Sample]]:
    return lambda scrape: iter([((), read(scrape.seen))])


def _place(task: TaskSeen) -> tuple[str, str, str]:
    return task.sub_topology, task.topic, str(task.partition)


READERS: Final[Mapping[str, Callable[[Scrape], Iterable[Sample]]]] = {
    "dedup_records_total": _split(lambda numbers: numbers.verdicts),
    "dedup_conflicts_total": _counted(lambda numbers: numbers.conflicts),
    "dedup_dead_letters_total": _split(lambda numbers: numbers.dead_reasons),
    "dedup_replayed_total": _counted(lambda numbers: numbers.replayed),
    "dedup_misplaced_ids_total": _counted(lambda numbers: numbers.misplaced),
    "dedup_transactions_total": _split(lambda numbers: {"committed": numbers.transactions, "aborted": numbers.aborted}),
    "dedup_commit_seconds": _counted(lambda numbers: numbers.commits),
    "dedup_end_to_end_seconds": _counted(lambda numbers: numbers.end_to_end),
    "dedup_stream_time_seconds": _each(lambda task: task.numbers.stream_time_ms / 1000),
    "dedup_state_ids": _each(lambda task: task.state_ids),
    "dedup_state_bytes": _each(lambda task: task.state_bytes),
    "dedup_state_max_bytes": _each(lambda task: task.state_max_bytes),
    "dedup_restore_remaining_records": _each(lambda task: task.numbers.restore_remaining),
    "dedup_task_state": _states,
    "dedup_lag_records": _each(lambda task: task.lag_records),
    "dedup_lag_seconds": _each(lambda task: task.lag_seconds),
    "dedup_last_stable_offset_lag": _each(lambda task: task.unstable_records),
    "dedup_seconds_since_commit": _each(lambda task: task.seconds_since_commit),
    "dedup_standby_lag_records": lambda scrape: [
        ((str(number),), lag) for number, lag in scrape.seen.standby_lag.items()
    ],
    "dedup_fenced_total": _whole(lambda seen: seen.fenced),
    "dedup_corrupted_total": _whole(lambda seen: seen.corrupted),
    "dedup_checkpoints_unusable_total": _whole(lambda seen: seen.checkpoints_unusable),
}


class WorkerCollector(Collector):
    """Looks at the worker once a scrape; nothing is counted twice, and nothing between scrapes."""

    def __init__(self, look: Callable[[], WorkerSeen]) -> None:
        self._look: Final = look

    def collect(self) -> Iterator[Family]:
        """Yield every metric of `METRICS`, also one without a sample yet."""
        scrape = Scrape.of(self._look())
        for metric in METRICS:
            yield _family(metric, READERS[metric.name](scrape))


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in samples:
            if isinstance(value, Durations):
                histogram.add_metric(labels, _cumulated(value), value.total_s)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        if not isinstance(value, Durations):
            family.add_metric(labels, value)
    return family


def _cumulated(durations: Durations) -> list[tuple[str, float]]:
    """Return the buckets as Prometheus wants them: each holds all below it."""
    bounds = [*map(floatToGoString, durations.bounds_s), "+Inf"]
    below = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(bounds, durations.counts, strict=True):
        below += count
        buckets.append((bound, below))
    return buckets


def exposition(look: Callable[[], WorkerSeen]) -> bytes:
    """Return the worker's metrics, and only those, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerCollector(look))
    return generate_latest(registry)
