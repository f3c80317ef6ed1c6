"""Creates the content of the dashboard as plain data: current issues, tasks, totals, and recent records."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import nsmallest
from typing import Any, Final, Literal, NamedTuple

from dedup.metrics import END_TO_END_BUCKETS_S, TaskNumbers, TaskSeen, WorkerSeen
from dedup.worker_view import STUCK_S, Kind, Noted, Peer, TaskPulse

# Issues and current figures are based on the last five minutes of a worker's metrics, sampled every second. Rates are
# differences of counters, as in Prometheus's `rate()`. A new task counts from zero. Latency is a quantile of the
# histogram's growth, interpolated within its bucket as in `histogram_quantile()`.

EVERY_S: Final = 1.0
KEPT: Final = 300
"""The number of samples that are kept. Together, they cover five minutes."""
PLOTTED: Final = ("unique", "duplicate", "late", "dead_letter", "exempt")


_COLUMNS: Final = ("time_ms", *PLOTTED, "lag_records", "median_s", "p99_s")

Sample = Mapping[str, float | None]
"""Maps the names in `_COLUMNS` to the metrics at one moment. Rates are per second since the previous sample. The lag is
None while no task knows the end of its partition. Latencies cover the records that were committed since the previous
sample, and are None if no records were committed.
"""


class Growth(NamedTuple):
    """The counts and latencies of the records that a worker judged between two moments, and the worker's lag at the
    later moment.
    """

    covered_ms: int
    counts: Counter[str]
    """The number of records by verdict, and the number of conflicts."""
    latencies: list[int]
    """The number of records in each bucket of the histogram of end-to-end latency."""
    lag_records: int | None


@dataclass(slots=True)
class MetricHistory:
    """The latest samples of a worker's metrics, oldest first."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT))
    _tasks: dict[int, TaskNumbers] = field(default_factory=dict)
    """Maps id(counters) to the counters of each task at the last sample. The reference to the counters keeps the id()
    unique.
    """
    _total: tuple[Counter[str], list[int]] = field(default_factory=lambda: _added_up(()))
    """The sums of the tasks' counters at the last sample."""
    _last_ms: int | None = None
    """The monotonic time of the last sample."""

    def sample(self, pulses: Iterable[TaskPulse], now_ms: int, monotonic_ms: int) -> Growth | None:
        """Add a sample of the metrics, and return the growth of the counts since the previous call.

        Rates are computed from ``monotonic_ms``, because somebody may set the clock that provides ``now_ms``. The first
        call adds no sample and returns None, because there are no earlier counts for a comparison.
        """
        pulses = list(pulses)
        tasks = {id(pulse.numbers): pulse.numbers for pulse in pulses}
        lags = [pulse.lag_records for pulse in pulses if pulse.lag_records is not None]
        # A worker may have a thousand tasks, so only sums are compared. Comparing each task would be slower.
        counts, latencies = _added_up(tasks.values())
        ended, ended_latencies = _added_up(self._tasks[key] for key in self._tasks.keys() - tasks.keys())
        (then, before), self._total = self._total, (counts.copy(), latencies)
        counts.update(ended)
        counts.subtract(then)
        latencies = [now + last - old for now, last, old in zip(latencies, ended_latencies, before, strict=True)]
        covered_ms = None if self._last_ms is None else max(1, monotonic_ms - self._last_ms)
        self._tasks, self._last_ms = tasks, monotonic_ms
        if covered_ms is None:
            return None
        rates = (round(1000 * counts[name] / covered_ms, 2) for name in PLOTTED)
        lag = sum(lags) if lags else None
        row = (now_ms, *rates, lag, quantile(latencies, 0.5), quantile(latencies, 0.99))
        self.samples.append(dict(zip(_COLUMNS, row, strict=True)))
        return Growth(covered_ms, counts, latencies, lag)


def _added_up(tasks: Iterable[TaskNumbers]) -> tuple[Counter[str], list[int]]:
    """Return the sums of the tasks' verdicts and conflicts, and of each bucket of their end-to-end latency."""
    tasks = list(tasks)
    counts = Counter({name: sum(task.verdicts.get(name, 0) for task in tasks) for name in PLOTTED})
    counts["conflict"] = sum(task.conflicts for task in tasks)
    no_latencies = [0] * (len(END_TO_END_BUCKETS_S) + 1)
    return counts, list(map(sum, zip(no_latencies, *(task.end_to_end.counts for task in tasks), strict=True)))


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the quantile ``share`` of a histogram of end-to-end latency in seconds, or None if the histogram is
    empty.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, below = share * total, 0
    for number, count in enumerate(counts):
        if count and below + count >= wanted:
            low = END_TO_END_BUCKETS_S[number - 1] if number else 0.0
            # The last bucket has only a lower bound.
            high = END_TO_END_BUCKETS_S[number] if number < len(END_TO_END_BUCKETS_S) else low
            return round(low + (high - low) * (wanted - below) / count, 4)
        below += count
    return END_TO_END_BUCKETS_S[-1]


FORMAT = 4
"""The version of the snapshot's format. By this number, a page that stays open during an upgrade detects a new format.
"""
BEHIND_S: Final = 60.0
NEARLY_FULL: Final = 0.8
MOST_NOTICES: Final = 8
"""Maximum number of issues that a worker reports to another worker's page."""
MOST_LISTED: Final = 100
"""The maximum number of issues that a page lists. The page shows only the first `MOST_NOTICES` until a user asks for
the others.
"""
MOST_CASES: Final = 100
"""Maximum number of records of each kind that the page receives."""
_KINDS: Final[tuple[Kind, ...]] = ("dead_letter", "conflict", "late", "duplicate")
"""The kinds of records in the order in which the page shows them, the most serious kinds first."""
_NULLABLE: Final = (
    "url",
    "restore_remaining",
    "restore_total",
    "lag_records",
    "lag_seconds",
    "state_ids",
    "state_bytes",
    "state_max_bytes",
)
"""Fields of a task that are null if this worker does not know them."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A one-sentence description of a current issue of the worker or its tasks."""

    level: Literal["error", "warning"]
    text: str
    about: str
    """The part of the page that shows the cause: `kind:KIND`, `task:TOPIC/PARTITION`, `worker:NAME`, `not-ready`, or
    `tasks`.
    """
    worker: str = ""
    """The worker whose page shows the cause, or an empty string if the page with this notice shows the cause."""
    url: str | None = None
    """The address of that worker's page."""
    issues: int = 1
    """The number of issues that this notice summarizes."""


def notices(seen: WorkerSeen, samples: Sequence[Sample], peers: Sequence[Peer]) -> list[Notice]:
    """Return the current issues of a worker and its tasks, in no particular order."""
    return [*_worker(seen, samples, peers), *_tasks(seen.tasks, STUCK_S + seen.commit_interval_s)]


def _of_fleet(own: Iterable[Notice], fleet: Sequence[Mapping[str, Any]]) -> list[Notice]:
    """Return the issues of all workers, errors first. An unresponsive worker counts as an issue.

    ``fleet`` contains the page's data about each worker, beginning with this worker. ``own`` contains this worker's
    issues.
    """
    found = [*own, *_copies(fleet)]
    for other in fleet[1:]:
        name, url = other["worker"], other["url"]
        if "why" not in other:
            told = other["attention"]
            found += [
                Notice(each["level"], each["text"], each["about"], name, url, issues=each["issues"]) for each in told
            ]
        elif url is not None:  # `_worker` yields the issue of workers that serve no pages
            # The notice leads to a part of this page, because the other worker's page may not respond either.
            found.append(Notice("warning", f"No figures from worker {name}: {other['why']}.", f"worker:{name}"))
    return _first(found, MOST_LISTED)


def _copies(fleet: Iterable[Mapping[str, Any]]) -> Iterator[Notice]:
    """Yield an issue for each ID function or flow whose copies differ between the workers."""
    copies: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for worker in fleet:
        for name, digest in worker.get("user_code", {}).items():
            copies[name][worker["worker"]] = digest
    for name, digests in copies.items():
        if len(set(digests.values())) > 1:
            listed = ", ".join(f"{worker} {digest}" for worker, digest in sorted(digests.items()))
            text = f"The workers have different copies of {name} (digest of the module: {listed})."
            remedy = "One record may get two IDs or outputs. Deploy the same file to every worker."
            # The page shows each worker's digests, and the notice leads to the first worker whose digest differs.
            first = next(iter(digests.values()))
            odd = next(worker for worker, digest in digests.items() if digest != first)
            yield Notice("warning", f"{text} {remedy}", f"worker:{odd}")


def _first(found: Iterable[Notice], most: int) -> list[Notice]:
    """Return at most ``most`` issues, errors first, and a notice with the number of further issues."""
    ordered = sorted(found, key=lambda notice: notice.level != "error")
    shown, more = ordered[:most], ordered[most:]
    if not more:
        return shown
    issues = sum(notice.issues for notice in more)
    text = f"{issues:,} more; the list of tasks, and the pages of the other workers, show their causes."
    return [*shown, Notice(more[0].level, text, "tasks", issues=issues)]


def _worker(seen: WorkerSeen, samples: Sequence[Sample], peers: Sequence[Peer]) -> Iterator[Notice]:
    if seen.alert is not None:
        yield Notice("error", seen.alert.text, "kind:dead_letter")
    if seen.not_ready is not None:
        restoring = [task for task in seen.tasks if task.state == "restoring"]
        left = sum(task.numbers.restore_remaining for task in restoring)
        more = f"; {left:,} changelog records are left to restore" if restoring else ""
        last = max(restoring, key=lambda task: task.numbers.restore_remaining, default=None)
        about = "not-ready" if last is None else f"task:{last.topic}/{last.partition}"
        yield Notice("warning", f"Not ready: {seen.not_ready}{more}.", about)
    if formats := seen.total().formats:
        # If values have another format, the producer is at fault, not a single record.
        named = ", ".join(f"{count:,} {name}" for name, count in formats.most_common())
        text = f"Dead letters in another format since this worker started, by their first bytes: {named}."
        yield Notice("warning", text, "kind:dead_letter")
    if any(sample["dead_letter"] for sample in samples):
        yield Notice("warning", "Dead letters in the last five minutes: their reasons are below.", "kind:dead_letter")
    if any(sample["late"] for sample in samples):
        text = "Late records in the last five minutes: they are later than the grace period allows."
        yield Notice("warning", text, "kind:late")
    if silent := [peer.worker for peer in peers if peer.url is None and not peer.here]:
        text = "These workers serve no pages, so they cannot be asked about an ID"
        yield Notice("warning", f"{text}: {', '.join(silent)}. Set web.enabled and web.port.", f"worker:{silent[0]}")


def _tasks(tasks: Iterable[TaskSeen], stuck_s: float) -> Iterator[Notice]:
    for task in tasks:
        place = f"{task.topic}/{task.partition}"
        about = f"task:{place}"
        # While commits fail, the task is rebuilt again and again, so it is rarely running.
        if (waited_s := task.waited_s) > stuck_s:
            text = f"{place} is stuck: {task.lag_records:,} records wait, and nothing was committed for"
            yield Notice("error", f"{text} {waited_s:,.0f} s. Look at this worker's log.", about)
        elif task.lag_seconds is not None and task.lag_seconds > BEHIND_S:
            text = f"{place} is {task.lag_seconds:,.0f} s behind ({task.lag_records:,} records)."
            yield Notice("warning", text, about)
        if task.state_max_bytes is not None and task.state_bytes > NEARLY_FULL * task.state_max_bytes:
            share = task.state_bytes / task.state_max_bytes
            text = (
                f"The state of {place} takes {share:.0%} of state.max_bytes_per_partition; above 100%, the worker stops"
            )
            remedy = "Raise the limit if the disk has room, or shorten guard_period or grace."
            yield Notice("error" if share > 1 else "warning", f"{text}, with nothing lost. {remedy}", about)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one worker, which the dashboard adds up for the whole fleet."""

    format: int
    topology: str
    worker: str
    ready: bool
    tasks: int
    records_per_s: float | None
    lag_records: float | None
    p99_s: float | None
    state_bytes: int | None
    totals: dict[str, int]
    """The numbers of records by verdict, conflicts, fenced task groups, and damaged stores since the worker's start."""
    attention: list[Notice]
    """The current issues of the worker and its tasks."""
    user_code: dict[str, str]
    """The digests of the user's code, as in `WorkerSeen`."""


def summary(seen: WorkerSeen, samples: Sequence[Sample], peers: Sequence[Peer] = ()) -> Summary:
    """Return a worker's figures, based on its current state, its latest samples, and the other workers that it knows.

    The result lists at most `MOST_NOTICES` issues, errors first, and then a notice with the number of further issues.
    Without ``peers``, the issues do not mention workers that serve no pages; otherwise, every worker would report the
    same workers.
    """
    return _figures(seen, samples, notices(seen, samples, peers))


def _figures(seen: WorkerSeen, samples: Sequence[Sample], found: Iterable[Notice]) -> Summary:
    counted, last = seen.total(), samples[-1] if samples else None
    latencies = [sample["p99_s"] for sample in samples if sample["p99_s"] is not None]
    return Summary(
        format=FORMAT,
        topology=seen.topology,
        worker=seen.worker_id,
        ready=seen.not_ready is None,
        tasks=len(seen.tasks),
        records_per_s=None if last is None else round(sum(last[name] or 0.0 for name in PLOTTED), 2),
        lag_records=None if last is None else last["lag_records"],
        p99_s=latencies[-1] if latencies else None,
        state_bytes=seen.state_bytes,
        totals={
            **{name: counted.verdicts[name] for name in PLOTTED},
            "conflict": counted.conflicts,
            "fenced": seen.fenced,
            "corrupted": seen.corrupted,
        },
        attention=_first(found, MOST_NOTICES),
        user_code=dict(seen.user_code),
    )


def board(
    seen: WorkerSeen,
    history: MetricHistory,
    latest: Iterable[Noted],
    peers: Sequence[Peer],
    others: Sequence[Mapping[str, Any]] = (),
    *,
    now_ms: int,
) -> dict[str, Any]:
    """Return the dashboard's content for one request, with all times in milliseconds.

    ``others`` contains the `summary` of each other worker or, for a worker that did not respond, its name and the
    reason (`why`).
    """
    found = notices(seen, history.samples, peers)
    own = asdict(_figures(seen, history.samples, found))
    fleet = [{**own, "url": None}, *others]
    return {
        **{name: own[name] for name in ("format", "topology", "worker", "ready", "totals")},
        "now_ms": now_ms,
        "not_ready": seen.not_ready,
        "attention": [asdict(notice) for notice in _of_fleet(found, fleet)],
        "fleet": fleet,
        "tasks": list(_rows(seen, peers)),
        "latest": [asdict(noted) for noted in _newest(latest)],
    }


def _newest(latest: Iterable[Noted]) -> Iterator[Noted]:
    """Yield at most `MOST_CASES` records of each kind, newest first."""
    by_kind: dict[Kind, list[Noted]] = {kind: [] for kind in _KINDS}
    for noted in latest:
        by_kind[noted.kind].append(noted)
    for of_kind in by_kind.values():
        yield from nsmallest(MOST_CASES, of_kind, key=lambda noted: -noted.judged_ms)


def _rows(seen: WorkerSeen, peers: Sequence[Peer]) -> Iterator[dict[str, Any]]:
    for task in seen.tasks:
        numbers, running = task.numbers, task.state == "running"
        restoring = task.state == "restoring" and numbers.restore_total
        yield _row(
            task.sub_topology,
            task.topic,
            task.partition,
            seen.worker_id,
            state=task.state,
            restore_remaining=numbers.restore_remaining if restoring else None,
            restore_total=numbers.restore_total if restoring else None,
            lag_records=task.lag_records,
            lag_seconds=None if task.lag_seconds is None else round(task.lag_seconds, 1),
            # A task's store is open only while the task runs.
            state_ids=task.state_ids if running else None,
            state_bytes=task.state_bytes if running else None,
            state_max_bytes=task.state_max_bytes,
        )
    for partition, lag in sorted(seen.standby_lag.items()):
        yield _row("dedup", "changelog", partition, seen.worker_id, state="standby", lag_records=lag)
    for peer in peers:
        for topic, partition in () if peer.here else peer.partitions:
            yield _row("", topic, partition, peer.worker, state="elsewhere", url=peer.url)


def _row(task: str, topic: str, partition: int, worker: str, *, state: str, **known: Any) -> dict[str, Any]:  # noqa: ANN401  # numbers and texts
    own = {"task": task, "topic": topic, "partition": partition, "worker": worker, "state": state}
    return {**own, **dict.fromkeys(_NULLABLE), **known}
