"""Numbers of a running worker: the one list of metric names, and the counters that tasks keep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Verdict = Literal["unique", "duplicate", "late", "dead_letter", "exempt"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as Prometheus sees it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ("sub_topology", "topic", "partition")


METRICS: Final[tuple[Metric, ...]] = (
    Metric("dedup_records_total", "counter", "Records judged, by verdict.", ("topic", "partition", "verdict")),
    Metric("dedup_conflicts_total", "counter", "Duplicates whose payload differs from the first."),
    Metric("dedup_dead_letters_total", "counter", "Dead letters, by reason.", ("topic", "partition", "reason")),
    Metric("dedup_replayed_total", "counter", "Records read again and skipped: they were judged already."),
    Metric("dedup_misplaced_ids_total", "counter", "Sampled records whose ID hashes to another partition."),
    Metric("dedup_transactions_total", "counter", "Committed transactions."),
    Metric("dedup_commit_seconds", "histogram", "From capture to the broker's word that the commit happened."),
    Metric("dedup_stream_time_seconds", "gauge", "Greatest event time judged."),
    Metric("dedup_state_ids", "gauge", "IDs in the store, estimated."),
    Metric("dedup_state_bytes", "gauge", "Bytes of the store on disk, estimated."),
    Metric("dedup_restore_remaining_records", "gauge", "Changelog offsets still to be read by a restore."),
    Metric("dedup_task_state", "gauge", "1 for the state a task is in.", ("topic", "partition", "state")),
    Metric("dedup_lag_records", "gauge", "Feeding offsets not yet committed."),
    Metric("dedup_seconds_since_commit", "gauge", "Age of the last commit."),
    Metric("dedup_fenced_total", "counter", "Tasks thrown away because another owner fenced them.", ()),
    Metric("dedup_corrupted_total", "counter", "Local stores deleted and restored.", ()),
)
COMMIT_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(slots=True)
class TaskNumbers:
    """Counters of one task; only whole batches add to them."""

    verdicts: Counter[str] = field(default_factory=Counter)
    dead_reasons: Counter[str] = field(default_factory=Counter)
    conflicts: int = 0
    replayed: int = 0
    misplaced: int = 0
    transactions: int = 0
    commit_buckets: list[int] = field(default_factory=lambda: [0] * (len(COMMIT_BUCKETS_S) + 1))
    commit_seconds: float = 0.0
    last_commit_s: float = field(default_factory=time.monotonic)
    stream_time_ms: int = 0
    restore_remaining: int = 0
    committed_offset: int | None = None
    end_offset: int | None = None

    def committed(self, offset: int) -> None:
        """Count a transaction that is known to have been committed."""
        self.transactions += 1
        self.committed_offset = offset
        self.last_commit_s = time.monotonic()

    def add_verdicts(self, judged: TaskNumbers) -> None:
        """Add the verdicts of a transaction that is known to have been committed."""
        self.verdicts.update(judged.verdicts)
        self.dead_reasons.update(judged.dead_reasons)
        self.conflicts += judged.conflicts

    def took(self, seconds: float) -> None:
        """Add the duration of one commit."""
        self.commit_seconds += seconds
        at = next((i for i, bound in enumerate(COMMIT_BUCKETS_S) if seconds <= bound), len(COMMIT_BUCKETS_S))
        self.commit_buckets[at] += 1


def merged(many: Iterable[TaskNumbers]) -> dict[str, int]:
    """Return the verdicts of several tasks added up."""
    total: Counter[str] = Counter()
    for numbers in many:
        total.update(numbers.verdicts)
    return dict(total)


def exposition(samples: Mapping[str, Iterator[tuple[Mapping[str, str], float]]]) -> str:
    """Return samples in Prometheus' text format; raises KeyError for a name that is not in `METRICS`."""
    known = {metric.name: metric for metric in METRICS}
    lines: list[str] = []
    for name, rows in samples.items():
        metric = known[name]
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        for labels, value in rows:
            inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
            lines.append(f"{name}{{{inside}}} {value}")
    return "\n".join(lines) + "\n"
