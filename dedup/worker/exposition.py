"""The metrics of a worker in Prometheus' text format: every metric of `METRICS`, read from what is seen of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dedup.metrics import METRICS, Durations, Metric, TaskNumbers, TaskSeen, WorkerSeen

STATES: Final = ("created", "restoring", "running", "closed")

Sample = tuple[tuple[str, ...], "float | Durations"]
"""Label values in the order of the metric's labels, and the value."""


def _each(read: Callable[[TaskSeen], float | Durations | None]) -> Callable[[WorkerSeen], Iterator[Sample]]:
    """Return what reads one value of every task, leaving out what is not known."""

    def samples(seen: WorkerSeen) -> Iterator[Sample]:
        for task in seen.tasks:
            value = read(task)
            if value is not None:
                yield _place(task), value

    return samples


def _counted(read: Callable[[TaskNumbers], float | Durations]) -> Callable[[WorkerSeen], Iterator[Sample]]:
    """Return what reads one counter of every task that is or was here."""

    def samples(seen: WorkerSeen) -> Iterator[Sample]:
        for (sub_topology, topic, partition), numbers in sorted(seen.counters().items()):
            yield (sub_topology, topic, str(partition)), read(numbers)

    return samples


def _split(read: Callable[[TaskNumbers], Mapping[str, float]]) -> Callable[[WorkerSeen], Iterator[Sample]]:
    """Return what reads several counters of every task that is or was here, by one more label."""

    def samples(seen: WorkerSeen) -> Iterator[Sample]:
        for (sub_topology, topic, partition), numbers in sorted(seen.counters().items()):
            for name, value in sorted(read(numbers).items()):
                yield (sub_topology, topic, str(partition), name), value

    return samples


def _states(seen: WorkerSeen) -> Iterator[Sample]:
    for task in seen.tasks:
        for state in STATES:
            yield (*_place(task), state), float(state == task.state)


def _whole(read: Callable[[WorkerSeen], float]) -> Callable[[WorkerSeen], Iterator[Sample]]:
    return lambda seen: iter([((), read(seen))])


def _place(task: TaskSeen) -> tuple[str, str, str]:
    return task.sub_topology, task.topic, str(task.partition)


READERS: Final[Mapping[str, Callable[[WorkerSeen], Iterable[Sample]]]] = {
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
    "dedup_standby_lag_records": lambda seen: [((str(number),), lag) for number, lag in seen.standby_lag.items()],
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
        seen = self._look()
        for metric in METRICS:
            yield _family(metric, READERS[metric.name](seen))


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
