"""Latency, workload WL: from an event's hand-over to its producer until a read_committed reader has it.

    python -m bench.latency --rate 40000 --rate 80000 --rate 120000        25 / 50 / 75 % of a rate measured before
    python -m bench.latency --only dedup --only kafka-streams-window --rate 80000 --seconds 20

Only forwarded events are seen, and the first seconds are left out. Before all there are runs that do not count: in
its first minutes a broker's JVM is busy compiling, which on two cores is most of what would be measured (p99 after one
minute 510 and 816 ms, after three 291 and 306). Exit code 0 if every run was exact, 1 if not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.progress import Progress
from rich.table import Table

from bench import report, stage
from bench.candidates import CANDIDATES, Candidate, Job, environ_of
from bench.cluster import Cluster
from bench.pace import Paced, paced_workload
from bench.process import MeasuredProcess, cpu_s_of
from bench.reader import Exactness, OutputReader, check
from bench.workload import event, finish, producer, send
from dedup.core.partitioner import partitions as murmur2_partitions

_READY_WITHIN_S: Final = 120.0
_DONE_WITHIN_S: Final = 120.0
_LOOK_EVERY_S: Final = 0.1
_BROKER_WARM_S: Final = 180
_SEED: Final = 11
_PRIME: Final = b"prime-"
_TRIES_PER_PARTITION: Final = 16
"""The number of candidate IDs per partition; with 16, a partition without any is rare."""
_PADDING: Final = "0" * 106


@dataclass(frozen=True, slots=True)
class Latency:
    """What one run gave; the percentiles are over the events after the warm-up, in milliseconds."""

    candidate: str
    compression: str
    rate: int
    rate_reached: float
    producer_late_s: float
    cores: float
    """CPU time of the candidate while events came, divided by that time."""
    broker_cores: float
    """The same of the broker; 0 if the broker runs on another machine."""
    p50_ms: float
    p99_ms: float
    p999_ms: float
    greatest_ms: float
    exactness: Exactness


@dataclass(frozen=True, slots=True)
class Plan:
    """What the runs have in common."""

    bootstrap: str
    partitions: int
    commit_interval_ms: int
    seconds: int
    warm_up_s: int
    directory: Path


def main(
    *,
    rate: Annotated[list[int], typer.Option(help="Events a second; may be given several times.")],
    seconds: Annotated[int, typer.Option(help="Length of a run.")] = 20,
    warm_up: Annotated[int, typer.Option(help="Seconds at the start that do not count.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="Candidates.")] = None,
    partitions: Annotated[int, typer.Option(help="Partitions of the source topic.")] = 4,
    commit_interval_ms: Annotated[int, typer.Option(help="Commit interval of every candidate.")] = 100,
    bootstrap: Annotated[str, typer.Option(help="A running broker; without it an embedded one is started.")] = "",
) -> None:
    """Measure the latency at the given rates, print it, write the result file."""
    console = stage.console()
    with stage.broker(bootstrap) as address, tempfile.TemporaryDirectory(prefix="dedup-bench-") as directory:
        plan = Plan(address, partitions, commit_interval_ms, seconds, warm_up, Path(directory))
        with stage.bars(console) as bars:
            for _ in range(-(-_BROKER_WARM_S // seconds)):
                _measure(plan, CANDIDATES[(only or [report.OURS])[0]], rate[0], bars)
            found = [_measure(plan, CANDIDATES[name], each, bars) for each in rate for name in only or [report.OURS]]
    table = Table(
        "candidate", "events/s", "p50 ms", "p99 ms", "p99.9 ms", "max ms", "cores", "broker", "late ms", "exact"
    )
    for one in found:
        times = [f"{each:,.0f}" for each in (one.p50_ms, one.p99_ms, one.p999_ms, one.greatest_ms)]
        used = [f"{each:.2f}" for each in (one.cores, one.broker_cores)]
        late, exact = f"{one.producer_late_s * 1000:,.0f}", "yes" if one.exactness.exact else "NO"
        table.add_row(one.candidate, f"{one.rate_reached:,.0f}", *times, *used, late, exact)
    console.print(table)
    about = {"seconds": seconds, "warm-up s": warm_up, "commit interval ms": commit_interval_ms}
    path = report.write_json(datetime.now(UTC).date(), about, [asdict(one) for one in found], kind="latency")
    console.print(f"written: {path.name}")
    raise typer.Exit(0 if all(one.exactness.exact for one in found) else 1)


def _measure(plan: Plan, candidate: Candidate, rate: int, bars: Progress) -> Latency:
    cluster = Cluster(plan.bootstrap)
    group = f"latency-{candidate.name}-{rate}-{time.time_ns() // 1_000_000}"
    with tempfile.TemporaryDirectory(dir=plan.directory) as directory:
        job = Job(
            plan.bootstrap,
            f"{group}.source",
            f"{group}.output",
            group,
            plan.partitions,
            Path(directory),
            candidate.compressions[0],
            plan.commit_interval_ms,
            until_done=False,
        )
        for topic in (job.source, job.output):
            cluster.create(topic, plan.partitions)
        reader = OutputReader(job.bootstrap, job.output, dict.fromkeys(range(job.partitions), 0))
        follow = stage.Follow(bars, f"{candidate.name} at {rate:,}/s", rate * plan.seconds)
        try:
            paced, cores = _run(plan, candidate, job, rate, reader, follow)
        finally:
            reader.close()
    cluster.delete_of(group)
    found = _latency(plan, candidate, rate, paced, cores, reader)
    bars.console.print(f"{candidate.name} at {rate:,}/s: p50 {found.p50_ms:,.0f} ms, p99 {found.p99_ms:,.0f} ms")
    return found


def _run(
    plan: Plan, candidate: Candidate, job: Job, rate: int, reader: OutputReader, follow: stage.Follow
) -> tuple[Paced, tuple[float, float]]:
    """Return what the producer did, and how many cores the candidate and the broker used meanwhile."""
    cluster = Cluster(plan.bootstrap)
    command = candidate.command(job)
    with MeasuredProcess(command.arguments, environ_of(command), job.directory / "candidate.log") as process:
        _prime(job)
        _await_consumed(cluster, job, process, _READY_WITHIN_S)
        broker = stage.broker_process(job.bootstrap)
        before, began_s = (process.cpu_s, cpu_s_of(*broker)), time.monotonic()
        arguments = (job.bootstrap, job.source, str(rate), str(plan.seconds), str(job.partitions), str(_SEED))
        with subprocess.Popen([sys.executable, "-m", "bench.pace", *arguments], stdout=subprocess.PIPE) as pacer:
            while pacer.poll() is None:
                follow(reader.count)
                time.sleep(_LOOK_EVERY_S)
            answer = pacer.stdout.read() if pacer.stdout else b""
        after, lasted_s = (process.cpu_s, cpu_s_of(*broker)), time.monotonic() - began_s
        if pacer.returncode:
            raise RuntimeError(f"The paced producer ended with exit code {pacer.returncode}.")
        _await_consumed(cluster, job, process, _DONE_WITHIN_S)
        process.stop()
    reader.finish(cluster.ends(job.output), _DONE_WITHIN_S)
    own, others = ((now - then) / lasted_s for then, now in zip(before, after, strict=True))
    return Paced(**json.loads(answer.splitlines()[-1])), (own, others)


def _prime(job: Job) -> None:
    """Send an event to every partition: once they are done, the candidate is at work on all partitions."""
    names = [b"%s%d" % (_PRIME, number) for number in range(_TRIES_PER_PARTITION * job.partitions)]
    by_partition = dict(zip(murmur2_partitions(names, job.partitions), names, strict=True))
    sender = producer(job.bootstrap, linger_ms=0)
    for name in by_partition.values():
        send(sender, job.source, event(name.decode(), 0, time.time_ns() // 1_000_000, _PADDING))
    finish(sender)


def _await_consumed(cluster: Cluster, job: Job, process: MeasuredProcess, within_s: float) -> None:
    ends = cluster.ends(job.source)
    deadline = time.monotonic() + within_s
    while not cluster.consumed(job.group, job.source, ends):
        if process.ended or time.monotonic() > deadline:
            raise process.failed(f"It did not come to the source's end within {within_s:.0f} s")
        time.sleep(_LOOK_EVERY_S)


def _latency(
    plan: Plan, candidate: Candidate, rate: int, paced: Paced, cores: tuple[float, float], reader: OutputReader
) -> Latency:
    events = [one for one in reader.events() if not one[0].startswith(_PRIME)]
    sent_ms = np.array([time_ms for _, time_ms, _ in events])
    seen_ms = np.array([each for _, _, each in events])
    counted = sent_ms >= sent_ms.min() + 1000 * plan.warm_up_s
    p50, p99, p999, greatest = np.percentile((seen_ms - sent_ms)[counted], [50, 99, 99.9, 100])
    workload = paced_workload(rate, plan.seconds, plan.partitions, _SEED)
    return Latency(
        candidate.name,
        candidate.compressions[0],
        rate,
        paced.events / paced.seconds,
        paced.late_s,
        *cores,
        float(p50),
        float(p99),
        float(p999),
        float(greatest),
        check(iter(events), dict.fromkeys(workload.expected())),
    )


if __name__ == "__main__":
    typer.run(main)
