"""Defines the metrics of a worker, the counters of each task, and snapshots of both for display."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Verdict = Literal["unique", "duplicate", "late", "dead_letter", "exempt", "repartitioned"]

SPAN_MS: Final = 60_000
"""The period that an alert covers, in milliseconds."""
_LEAST_RECORDS: Final = 100
_LEAST_SHARE: Final = 0.95
_NOT_JUDGED: Final = frozenset({"repartitioned"})
"""The verdict labels of records that have not been judged, such as repartitioned records, which dedup tasks judge
later.
"""
_STARTED_S: Final = time.time()
"""The approximate start time of this process, which imports this module when it starts."""
_TASK_LABELS: Final = ("sub_topology", "topic", "partition")
Place = tuple[str, str, int]
"""Identifies a task by its sub-topology, feeding topic, and partition."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The Prometheus definition of a metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = _TASK_LABELS


METRICS: Final[tuple[Metric, ...]] = (
    Metric("dedup_records_total", "counter", "Records judged, by verdict.", (*_TASK_LABELS, "verdict")),
    Metric(
        "dedup_conflicts_total", "counter", "Duplicates whose payload differs from that of every sighting in range."
    ),
    Metric("dedup_flow_filtered_total", "counter", "Forwarded records for which the topology's flow yielded nothing."),
    Metric("dedup_flow_seconds_total", "counter", "Time that committed batches spent in the topology's flow."),
    Metric("dedup_dead_letters_total", "counter", "Dead letters, by reason.", (*_TASK_LABELS, "reason")),
    Metric(
        "dedup_other_formats_total",
        "counter",
        "Dead letters whose first bytes suggest a format other than the one that the topology reads.",
        (*_TASK_LABELS, "format"),
    ),
    Metric(
        "dedup_replayed_total",
        "counter",
        "Records that were read again and skipped because they had already been judged.",
    ),
    Metric(
        "dedup_misplaced_ids_total",
        "counter",
        "Sampled records whose ID hashes to a different partition than the one that holds the record.",
    ),
    Metric(
        "dedup_transactions_total",
        "counter",
        "Transactions with results of this partition, by result. A transaction counts for each of its partitions.",
        (*_TASK_LABELS, "result"),
    ),
    Metric(
        "dedup_commit_seconds",
        "histogram",
        "Time from the start of a commit to its confirmation by the broker, for each partition in the transaction.",
    ),
    Metric(
        "dedup_end_to_end_seconds",
        "histogram",
        "Time from a record's timestamp to the commit of its verdict. If the timestamp is over a minute older than the "
        "last time when the worker had read the whole partition, the timestamp counts as an event time, and "
        "measurement starts at that time instead. Each record of a batch counts with the latency of the batch's first "
        "record.",
    ),
    Metric("dedup_stream_time_seconds", "gauge", "Stream time; absent before the first judged record."),
    Metric("dedup_state_ids", "gauge", "Estimated number of IDs in the store."),
    Metric("dedup_state_bytes", "gauge", "Estimated size of the store on disk."),
    Metric(
        "dedup_state_max_bytes", "gauge", "The limit state.max_bytes_per_partition; absent if the topology sets none."
    ),
    Metric("dedup_restore_remaining_records", "gauge", "Changelog offsets that a restore still has to read."),
    Metric("dedup_task_state", "gauge", "1 for the current state of a task.", (*_TASK_LABELS, "state")),
    Metric(
        "dedup_lag_records",
        "gauge",
        "Offsets of the feeding partition from the committed offset to the end, or 0 if these offsets hold no records.",
    ),
    Metric(
        "dedup_lag_seconds",
        "gauge",
        "Age of the last committed record while there is lag, but at most the time since the task last had no lag; 0 "
        "without lag; absent if there is lag and the task has neither committed nor been without lag yet.",
    ),
    Metric("dedup_last_stable_offset_lag", "gauge", "Offsets of the feeding partition that an open transaction hides."),
    Metric(
        "dedup_seconds_since_commit",
        "gauge",
        "Seconds since the last commit or, before the first commit, since the task began to run.",
    ),
    Metric("dedup_start_time_seconds", "gauge", "Time at which this process started, in seconds since 1970.", ()),
    Metric("dedup_standby_lag_records", "gauge", "Changelog offsets that a standby has not applied.", ("partition",)),
    Metric(
        "dedup_group_transactions_total",
        "counter",
        "Transactions by result. Each transaction counts once, regardless of the number of its partitions.",
        ("result",),
    ),
    Metric("dedup_fenced_total", "counter", "Task groups that another owner has fenced outside a rebalance.", ()),
    Metric("dedup_schemas_awaited", "gauge", "Schemas of a schema registry that records wait for.", ()),
    Metric("dedup_corrupted_total", "counter", "Local stores that were corrupted, deleted, and restored.", ()),
    Metric(
        "dedup_checkpoints_unusable_total",
        "counter",
        "Checkpoints that were unusable, so that the worker read the changelog instead.",
        (),
    ),
)
RESULTS: Final = ("committed", "aborted")
"""The possible results of a transaction. Each result has its own counter."""
COMMIT_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
END_TO_END_BUCKETS_S: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 3600.0)


@dataclass(slots=True)
class Durations:
    """A histogram of durations in seconds."""

    bounds_s: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    """The non-cumulative number of durations in each bucket. The last bucket counts durations above all bounds."""
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds_s) + 1)

    def add(self, seconds: float, times: int = 1) -> None:
        """Count ``times`` durations of the given length."""
        self.counts[bisect_left(self.bounds_s, seconds)] += times
        self.total_s += seconds * times

    def add_all(self, others: Durations) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, others.counts, strict=True)]
        self.total_s += others.total_s


@dataclass(slots=True)
class Judged:
    """The number of records with each verdict in a set of records."""

    verdicts: Counter[str] = field(default_factory=Counter)
    dead_reasons: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    """Number of dead letters in an unexpected format, by the format that they seem to have."""
    conflicts: int = 0
    filtered: int = 0
    """Number of forwarded records for which the flow yielded nothing."""
    flow_seconds: float = 0.0

    def add_verdicts(self, judged: Judged) -> None:
        """Add the counts of another set of records."""
        self.verdicts.update(judged.verdicts)
        self.dead_reasons.update(judged.dead_reasons)
        self.formats.update(judged.formats)
        self.conflicts += judged.conflicts
        self.filtered += judged.filtered
        self.flow_seconds += judged.flow_seconds


@dataclass(slots=True)
class TaskNumbers(Judged):
    """The counters of one task, which change only between batches. Verdict counts cover only committed transactions."""

    replayed: int = 0
    sampled: int = 0
    misplaced: int = 0
    transactions: int = 0
    aborted: int = 0
    commits: Durations = field(default_factory=lambda: Durations(COMMIT_BUCKETS_S))
    end_to_end: Durations = field(default_factory=lambda: Durations(END_TO_END_BUCKETS_S))
    last_commit_s: float = field(default_factory=time.monotonic)
    """The monotonic time of the last commit or, before the first commit, the time at which the task began to run."""
    stream_time_ms: int | None = None
    """Stream time, or None before the first judged record and for a repartition task."""
    restore_remaining: int = 0
    restore_total: int = 0
    """Total number of changelog offsets that this restore has to read."""
    restored: int = 0
    """Number of changelog records that were read before this task started to run."""
    committed_offset: int | None = None
    """The offset that this task committed last, or None before its first commit."""
    committed_time_ms: int | None = None
    """Timestamp of the last record below ``committed_offset``."""
    caught_up_s: float | None = None
    """The monotonic time at which `look` last found no lag, or None. Every waiting record has arrived since that time.
    """
    nothing_readable_s: float | None = None
    """The monotonic time at which `look` last found no records that a task could read, or None."""

    def committed(self, offset: int) -> None:
        """Count a committed transaction, and store the offset that the transaction committed."""
        self.transactions += 1
        self.committed_offset = offset
        self.last_commit_s = time.monotonic()

    def reached(self, stream_time_ms: int) -> None:
        """Set ``stream_time_ms``, which stays None until each feed has a judged record or is idle."""
        # Before the first judged record, stream time is BEFORE_ALL_TIME, which is negative. No event time is negative.
        self.stream_time_ms = None if stream_time_ms < 0 else stream_time_ms

    def settled(self, oldest_ms: int, newest_ms: int, records: int) -> None:
        """Count each record of a committed batch with the latency of the batch's first record.

        ``oldest_ms`` is the time from which that latency is measured, and ``newest_ms`` is the time of the last record.
        """
        self.committed_time_ms = newest_ms
        self.end_to_end.add(max(0.0, time.time() - oldest_ms / 1000), records)

    def continue_from(self, before: TaskNumbers) -> None:
        """Copy the state of the task that this task replaces after a failed commit."""
        self.last_commit_s = before.last_commit_s
        self.committed_offset = before.committed_offset
        self.committed_time_ms = before.committed_time_ms
        self.caught_up_s, self.nothing_readable_s = before.caught_up_s, before.nothing_readable_s

    def look(self, lag_records: int | None, unstable_records: int | None) -> None:
        """Store the time if no records wait, or if none can be read. The web server calls `look` every second."""
        if lag_records == 0:
            self.caught_up_s = time.monotonic()
        if lag_records is not None and lag_records <= (unstable_records or 0):
            self.nothing_readable_s = time.monotonic()

    def add_counters(self, other: TaskNumbers) -> None:
        """Add another task's counters and histograms, but not its gauges."""
        self.add_verdicts(other)
        self.replayed += other.replayed
        self.sampled += other.sampled
        self.misplaced += other.misplaced
        self.transactions += other.transactions
        self.aborted += other.aborted
        self.commits.add_all(other.commits)
        self.end_to_end.add_all(other.end_to_end)


@dataclass(frozen=True, slots=True)
class TaskSeen:
    """A snapshot of a task's state and metrics."""

    sub_topology: str
    topic: str
    partition: int
    state: str
    numbers: TaskNumbers
    lag_records: int | None
    """The lag that `dedup status` shows, or None until the partition's leader has responded for the first time."""
    unstable_records: int | None
    """Number of offsets of the feeding partition that an open transaction hides from `read_committed` readers."""
    state_ids: int = 0
    state_bytes: int = 0
    state_max_bytes: int | None = None
    """The topology's limit for the state in bytes, or None if the topology sets no limit."""

    @property
    def lag_seconds(self) -> float | None:
        """The metric `dedup_lag_seconds`, or None if the time for which records have waited is unknown."""
        if not self.lag_records:
            return None if self.lag_records is None else 0.0
        known_s = [] if self.numbers.caught_up_s is None else [time.monotonic() - self.numbers.caught_up_s]
        if self.numbers.committed_time_ms is not None:
            known_s.append(max(0.0, time.time() - self.numbers.committed_time_ms / 1000))
        return min(known_s, default=None)

    @property
    def seconds_since_commit(self) -> float:
        """Seconds since the last commit or, before the first commit, since the task began to run."""
        return max(0.0, time.monotonic() - self.numbers.last_commit_s)

    @property
    def waited_s(self) -> float:
        """Seconds for which readable records have waited without a commit, or 0 if no such records exist."""
        if not self.lag_records or self.lag_records <= (self.unstable_records or 0):
            return 0.0
        # After a quiet time, the last commit may be hours old, although a record that has just arrived has not waited.
        since_s = self.numbers.nothing_readable_s
        return time.monotonic() - max(self.numbers.last_commit_s, -math.inf if since_s is None else since_s)


_OTHER_FORMAT: Final = "The producers send another format, or the topic is wrong; the header dedup-detail says more."
_REMEDIES: Final[Mapping[str, str]] = {
    "not_json": _OTHER_FORMAT,
    "not_utf8": _OTHER_FORMAT,
    "schema_unknown": "Compare `schema_registry.url` with the registry where the producers register their schemas.",
    "not_protobuf": "Compare `source.schema` with the schema and the framing that the producers write.",
    "not_msgpack": _OTHER_FORMAT,
    "not_cbor": _OTHER_FORMAT,
    "not_csv": "Compare `source.columns` and `source.delimiter` with what the producers send.",
    "not_avro": "Compare `source.schema` with the schema and the framing that the producers write.",
    "wrong_magic_byte": "The producers do not frame values or keys: compare `source` with what they send.",
    "schema_id_missing": "Compare `source.schema_id` with what the producers send.",
    "future_time": "Compare the clocks of this machine and of the producers.",
    "refused_by_broker": "Compare max.message.bytes of the topics with the size of the records.",
    "id_function_failed": "The ID function raises an exception; try `dedup check --allow-code --samples`.",
    "flow_failed": "The flow that `then` names raises an exception; run it on samples with `dedup check`.",
    "id_missing": "Compare `tracking_id` with what the producers send.",
}
"""Maps the reason for dead letters to what the user should check first."""


@dataclass(frozen=True, slots=True)
class DeadLetterAlert:
    """A warning that at least 95% of the records judged in the last minute are dead letters."""

    judged: int
    dead: int
    reason: str
    """The most frequent reason for these dead letters."""
    count: int
    """Number of dead letters with this reason."""

    @property
    def text(self) -> str:
        """The warning as a message with the problem and the remedy."""
        remedy = _REMEDIES.get(self.reason, "Look at the header dedup-detail of some of them.")
        return (
            f"{self.dead:,} of {self.judged:,} records judged in the last minute are dead letters, {self.count:,} of "
            f"them for {self.reason}. {remedy} Nothing is lost: once the cause is fixed, `dedup replay` sends them "
            f"again."
        )


class DeadShare:
    """Raises an alert while at least 95% of the records judged in the last minute are dead letters.

    An alert begins only if at least 100 records were judged in the last minute. An active alert continues even if fewer
    records are judged, so that a low-traffic topic does not start and end alerts repeatedly.
    """

    def __init__(self) -> None:
        self.alert: DeadLetterAlert | None = None
        self._looks: Final[deque[tuple[int, int, Counter[str]]]] = deque()
        """For each call to `look`, the time, the number of judged records, and the number of dead letters by reason."""

    def look(self, numbers: Iterable[TaskNumbers], now_ms: int) -> bool:
        """Record the current counters of all tasks, and return whether an alert has begun or ended."""
        judged, reasons = 0, Counter[str]()
        for each in numbers:
            judged += sum(count for verdict, count in each.verdicts.items() if verdict not in _NOT_JUDGED)
            reasons.update(each.dead_reasons)
        if self._looks and now_ms < self._looks[-1][0]:
            self._looks.clear()
        self._looks.append((now_ms, judged, reasons))
        while len(self._looks) > 1 and self._looks[1][0] <= now_ms - SPAN_MS:
            self._looks.popleft()
        _, judged_before, reasons_before = self._looks[0]
        reasons = reasons.copy()
        reasons.subtract(reasons_before)
        before, self.alert = self.alert, self._alert(judged - judged_before, reasons)
        return (before is None) != (self.alert is None)

    def _alert(self, judged: int, reasons: Counter[str]) -> DeadLetterAlert | None:
        dead = reasons.total()
        if judged < (_LEAST_RECORDS if self.alert is None else 1) or dead < _LEAST_SHARE * judged:
            return None
        reason, count = min(reasons.items(), key=lambda each: (-each[1], each[0]))
        return DeadLetterAlert(judged, dead, reason, count)


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A snapshot of a worker, from which the worker's web pages are rendered."""

    topology: str
    worker_id: str
    tasks: tuple[TaskSeen, ...]
    standby_lag: Mapping[int, int]
    fenced: int
    corrupted: int
    not_ready: str | None
    """The reason why the worker is not ready, or None if it is ready."""
    checkpoints_unusable: int = 0
    schemas_awaited: int = 0
    """The number of schemas that records wait for and that the schema registry has not returned yet."""
    transactions: Mapping[str, int] = field(default_factory=dict)
    """The number of transactions of the worker's task groups, by result (`RESULTS`)."""
    alert: DeadLetterAlert | None = None
    ended: Mapping[Place, TaskNumbers] = field(default_factory=dict)
    """The counters of closed tasks. They are kept because a counter must not decrease when a partition moves away."""
    commit_interval_s: float = 0.0
    """The config's `commit_interval`, during which it is normal that records wait."""
    started_s: float = _STARTED_S
    """The time at which the counters started, in seconds since 1970."""
    user_code: Mapping[str, str] = field(default_factory=dict)
    """Maps each ID function or flow, as module:attribute, to the digest of its module's source."""

    def counters(self) -> dict[Place, TaskNumbers]:
        """Return the counters of each task since this worker started, including closed tasks."""
        counted: dict[Place, TaskNumbers] = {}
        now = [((task.sub_topology, task.topic, task.partition), task.numbers) for task in self.tasks]
        for place, numbers in [*self.ended.items(), *now]:
            counted.setdefault(place, TaskNumbers()).add_counters(numbers)
        return counted

    def total(self) -> TaskNumbers:
        """Return the sum of the counters of all tasks since this worker started, including closed tasks."""
        found = TaskNumbers()
        for numbers in (*self.ended.values(), *(task.numbers for task in self.tasks)):
            found.add_counters(numbers)
        return found

    @property
    def state_bytes(self) -> int | None:
        """The total state size of all running tasks in bytes, or None if no task is running."""
        sizes = [task.state_bytes for task in self.tasks if task.state == "running"]
        return sum(sizes) if sizes else None
