"""Numbers of a running worker: the one list of metric names, the counters of tasks, and what is shown of them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Verdict = Literal["unique", "duplicate", "late", "dead_letter", "exempt", "repartitioned"]

OF_TASK: Final = ("sub_topology", "topic", "partition")
Place = tuple[str, str, int]
"""Which task, as `OF_TASK` names it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as Prometheus sees it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = OF_TASK


METRICS: Final[tuple[Metric, ...]] = (
    Metric("dedup_records_total", "counter", "Records judged, by verdict.", (*OF_TASK, "verdict")),
    Metric("dedup_conflicts_total", "counter", "Duplicates whose payload differs from the first."),
    Metric("dedup_dead_letters_total", "counter", "Dead letters, by reason.", (*OF_TASK, "reason")),
    Metric("dedup_replayed_total", "counter", "Records read again and skipped: they were judged already."),
    Metric("dedup_misplaced_ids_total", "counter", "Sampled records whose ID hashes to another partition."),
    Metric("dedup_transactions_total", "counter", "Transactions, by how they ended.", (*OF_TASK, "result")),
    Metric("dedup_commit_seconds", "histogram", "From capture to the broker's word that the commit happened."),
    Metric("dedup_end_to_end_seconds", "histogram", "From a record's timestamp to the commit of its verdict."),
    Metric("dedup_stream_time_seconds", "gauge", "Greatest event time judged."),
    Metric("dedup_state_ids", "gauge", "IDs in the store, estimated."),
    Metric("dedup_state_bytes", "gauge", "Bytes of the store on disk, estimated."),
    Metric("dedup_state_max_bytes", "gauge", "state.max_bytes_per_partition; absent where the topology has none."),
    Metric("dedup_restore_remaining_records", "gauge", "Changelog offsets still to be read by a restore."),
    Metric("dedup_task_state", "gauge", "1 for the state a task is in.", (*OF_TASK, "state")),
    Metric("dedup_lag_records", "gauge", "Feeding offsets not yet committed."),
    Metric("dedup_lag_seconds", "gauge", "Age of the last committed record while there is lag; 0 without."),
    Metric("dedup_last_stable_offset_lag", "gauge", "Feeding offsets that an open transaction hides from readers."),
    Metric("dedup_seconds_since_commit", "gauge", "Age of the last commit."),
    Metric("dedup_standby_lag_records", "gauge", "Changelog offsets a standby has not applied.", ("partition",)),
    Metric("dedup_fenced_total", "counter", "Tasks thrown away because another owner fenced them.", ()),
    Metric("dedup_corrupted_total", "counter", "Local stores deleted and restored.", ()),
    Metric("dedup_checkpoints_unusable_total", "counter", "Checkpoints not taken; the changelog was read instead.", ()),
)
COMMIT_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
END_TO_END_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 3600.0)


@dataclass(slots=True)
class Durations:
    """A histogram: how many took at most so long."""

    bounds_s: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """One more than bounds: the last is for what is above all of them."""
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds_s) + 1)

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds_s, seconds)] += times
        self.total_s += seconds * times

    def add_all(self, others: Durations) -> None:
        """Count every duration of another histogram with the same bounds."""
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, others.counts, strict=True)]
        self.total_s += others.total_s


@dataclass(slots=True)
class TaskNumbers:
    """Counters of one task; only whole batches add to them."""

    verdicts: Counter[str] = field(default_factory=Counter)
    dead_reasons: Counter[str] = field(default_factory=Counter)
    conflicts: int = 0
    replayed: int = 0
    sampled: int = 0
    misplaced: int = 0
    transactions: int = 0
    aborted: int = 0
    commits: Durations = field(default_factory=lambda: Durations(COMMIT_BUCKETS_S))
    end_to_end: Durations = field(default_factory=lambda: Durations(END_TO_END_BUCKETS_S))
    last_commit_s: float = field(default_factory=time.monotonic)
    stream_time_ms: int = 0
    restore_remaining: int = 0
    restore_total: int = 0
    """Changelog offsets that this restore has to read in all."""
    restored: int = 0
    """Changelog records read before this task ran."""
    committed_offset: int | None = None
    """Of this task's own last commit; None before it."""
    committed_time_ms: int | None = None
    """Timestamp of the last record below it."""

    def committed(self, offset: int) -> None:
        """Count a transaction that is known to have been committed."""
        self.transactions += 1
        self.committed_offset = offset
        self.last_commit_s = time.monotonic()

    def settled(self, oldest_ms: int, newest_ms: int, records: int) -> None:
        """Count a batch whose verdicts are committed; all of it as old as its oldest record."""
        self.committed_time_ms = newest_ms
        self.end_to_end.add(max(0.0, time.time() - oldest_ms / 1000), records)

    def add_verdicts(self, judged: TaskNumbers) -> None:
        """Add the verdicts of a transaction that is known to have been committed."""
        self.verdicts.update(judged.verdicts)
        self.dead_reasons.update(judged.dead_reasons)
        self.conflicts += judged.conflicts

    def add_counters(self, other: TaskNumbers) -> None:
        """Add every number that only grows."""
        self.add_verdicts(other)
        self.replayed += other.replayed
        self.sampled += other.sampled
        self.misplaced += other.misplaced
        self.transactions += other.transactions
        self.aborted += other.aborted
        self.commits.add_all(other.commits)
        self.end_to_end.add_all(other.end_to_end)

    def took(self, seconds: float) -> None:
        """Add the duration of one commit."""
        self.commits.add(seconds)


@dataclass(frozen=True, slots=True)
class TaskSeen:
    """A task at one moment."""

    sub_topology: str
    topic: str
    partition: int
    state: str
    numbers: TaskNumbers
    lag_records: int | None
    """None until the first answer of the partition's leader."""
    unstable_records: int | None
    state_ids: int = 0
    state_bytes: int = 0
    state_max_bytes: int | None = None
    """The bound of the topology; None without one."""

    @property
    def lag_seconds(self) -> float:
        """Age of the last committed record while there is lag."""
        if not self.lag_records or self.numbers.committed_time_ms is None:
            return 0.0
        return max(0.0, time.time() - self.numbers.committed_time_ms / 1000)

    @property
    def seconds_since_commit(self) -> float:
        """Age of the last commit, or of the task."""
        return time.monotonic() - self.numbers.last_commit_s


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker at one moment; what its pages are made from."""

    topology: str
    worker_id: str
    tasks: tuple[TaskSeen, ...]
    standby_lag: Mapping[int, int]
    fenced: int
    corrupted: int
    not_ready: str | None
    """Why it is not ready; None if it is."""
    checkpoints_unusable: int = 0
    ended: Mapping[Place, TaskNumbers] = field(default_factory=dict)
    """The counters of tasks that this worker closed: a counter must not fall when a partition moves away."""

    def counters(self) -> dict[Place, TaskNumbers]:
        """Return what this worker has counted of each task since it started, tasks closed by now included."""
        counted: dict[Place, TaskNumbers] = {}
        now = [((task.sub_topology, task.topic, task.partition), task.numbers) for task in self.tasks]
        for place, numbers in [*self.ended.items(), *now]:
            counted.setdefault(place, TaskNumbers()).add_counters(numbers)
        return counted
