"""One throughput run: a candidate does the whole job once; when did which output become visible, and was it exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from bench.candidates import Candidate, Job, environ_of
from bench.cluster import Cluster
from bench.forms import SOURCES
from bench.process import MeasuredProcess, Used
from bench.reader import Exactness, OutputReader, check

Progress = Callable[[int], None]
"""Called now and then with the number of outputs seen so far."""

_LOOK_EVERY_S: Final = 0.25
_READ_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run gave. `span_s` is from the first committed output seen to the last; start-up is apart."""

    candidate: str
    compression: str
    round: int
    events: int
    span_s: float
    start_up_s: float
    cpu_s: float
    peak_memory_bytes: int
    exactness: Exactness

    @property
    def events_per_s(self) -> float:
        """Return the rate of page 7: events by the time between the first and the last output seen."""
        return self.events / self.span_s

    @property
    def events_per_cpu_s(self) -> float:
        """Return the events by the processor seconds of the candidate's process, its start-up included."""
        return self.events / self.cpu_s


@dataclass(frozen=True, slots=True)
class Failed:
    """A run that gave no figures, and why."""

    candidate: str
    compression: str
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Task:
    """What a run is to do: the source is loaded, `expected` are the IDs that must come out."""

    cluster: Cluster
    job: Job
    events: int
    expected: Mapping[bytes, int]
    within_s: float


def measure(candidate: Candidate, task: Task, round_: int, progress: Progress) -> Figures:
    """Return the figures of one run; the output topic was made here and stays.

    Raises CandidateFailed, or TimeoutError when the candidate left a transaction open.
    """
    job = task.job
    task.cluster.create(job.output, job.partitions)
    command = candidate.command(job)
    starts = dict.fromkeys(range(job.partitions), 0)
    reader = OutputReader(job.bootstrap, job.output, starts, keep=False)
    try:
        began_ms = time.time_ns() // 1_000_000
        with MeasuredProcess(command.arguments, environ_of(command), job.directory / "candidate.log") as process:
            used = _run_to_end(process, task, reader, progress, ends_itself=command.ends_itself)
        ends = task.cluster.ends(job.output)
        reader.finish(ends, _READ_WITHIN_S)
    finally:
        reader.close()
    if not reader.batches:
        raise process.failed(f"{candidate.name} forwarded nothing")
    first_ms, last_ms = reader.seen_ms
    kept = OutputReader(job.bootstrap, job.output, starts)
    kept.finish(ends, _READ_WITHIN_S)
    return Figures(
        candidate.name,
        job.compression,
        round_,
        task.events,
        max(last_ms - first_ms, 1) / 1000,
        (first_ms - began_ms) / 1000,
        used.cpu_s,
        used.peak_memory_bytes,
        check(kept.events(in_json=SOURCES[candidate.form]["format"] in {"json", "json_schema"}), task.expected),
    )


def _run_to_end(
    process: MeasuredProcess, task: Task, reader: OutputReader, progress: Progress, *, ends_itself: bool
) -> Used:
    """The candidate has committed its offsets up to the source's end, and has ended."""
    job = task.job
    ends = task.cluster.ends(job.source)
    deadline = time.monotonic() + task.within_s
    # The group is asked only once something came out: before that it may not exist yet.
    while not (reader.count and task.cluster.consumed(job.group, job.source, ends)):
        if process.ended:
            break
        if time.monotonic() > deadline:
            raise process.failed(f"{reader.count} outputs were seen within {task.within_s:.0f} s, then it was stopped")
        time.sleep(_LOOK_EVERY_S)
        progress(reader.count)
    used = process.wait(task.within_s) if ends_itself else process.stop()
    if ends_itself and used.exit_code != 0:
        raise process.failed(f"It ended with exit code {used.exit_code}")
    if not task.cluster.consumed(job.group, job.source, ends):
        raise process.failed(f"It ended with exit code {used.exit_code} before the source's end")
    return used
