"""What a fleet's changes cost: how long a partition gives nothing, seen by a read_committed reader.

    python -m bench.fleet kill                    SIGKILL of one of three workers, with and without warm standbys
    python -m bench.fleet rolling                 each of three workers stopped (SIGTERM) and started again in turn
    python -m bench.fleet wide --partitions 256   one worker with many partitions: start, CPU, memory, latency

Events come at a steady rate. A partition's gap is the longest time without a forwarded event of it, from the first
change to the end. The worker killed does not come back: its partitions wait for the group's session timeout, then
are taken over. Every run's output is counted: exit code 1 if one was not exact.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench import report, stage
from bench.candidates import Job, simplest_for
from bench.cluster import Cluster
from bench.pace import paced_workload
from bench.reader import OutputReader, check
from bench.workload import Workload
from dedup.embedded.child_process import ChildProcess
from dedup.embedded.kafka_node import free_ports
from dedup.kafka.topic_admin import group_members
from dedup.settings import Settings

_READY_WITHIN_S: Final = 180.0
_WARM_UP_S: Final = 10
_REST_S: Final = 6.0
"""From one worker of a rolling restart to the next, once every partition gives events again."""
_LOOK_S: Final = 0.1
_SEED: Final = 11
_SESSION_TIMEOUT_MS: Final = 10_000


class Case(StrEnum):
    """What happens to the fleet."""

    KILL = "kill"
    ROLLING = "rolling"
    WIDE = "wide"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `known` IDs lie in the state before it begins."""

    case: Case
    workers: int
    partitions: int
    standbys: int
    rate: int
    seconds: int
    known: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave. Gaps in seconds: of the partitions that the change concerned, and of the others."""

    case: str
    standbys: int
    partitions: int
    known_ids: int
    affected: int
    gap_s: float
    gap_median_s: float
    gap_others_s: float
    start_s: float
    memory_bytes: int
    cpu_share: float
    p50_ms: float
    p99_ms: float
    rate_reached: float
    exact: bool


def main(
    case: Annotated[Case, typer.Argument(help="What happens to the fleet.")],
    *,
    rate: Annotated[int, typer.Option(help="Events a second.")] = 20_000,
    seconds: Annotated[int, typer.Option(help="Length of the load.")] = 60,
    partitions: Annotated[int, typer.Option(help="Partitions of the source topic.")] = 12,
    known: Annotated[int, typer.Option(help="IDs in the state before the load.")] = 1_000_000,
    bootstrap: Annotated[str, typer.Option(help="A running broker; without it an embedded one is started.")] = "",
) -> None:
    """Measure, print, write the result file."""
    console = stage.console()
    wide = case is Case.WIDE
    standbys = (0, 1) if case is Case.KILL else (0,) if wide else (1,)
    plans = [Plan(case, 1 if wide else 3, partitions, each, rate, seconds, known) for each in standbys]
    with stage.broker(bootstrap) as address:
        found = [_measure(address, plan, console) for plan in plans]
    console.print(_table(found))
    about = {"rate": rate, "seconds": seconds, "session timeout ms": _SESSION_TIMEOUT_MS}
    path = report.write_json(datetime.now(UTC).date(), about, [asdict(one) for one in found], kind=f"fleet-{case}")
    console.print(f"written: {path.name}")
    raise typer.Exit(0 if all(one.exact for one in found) else 1)


class Fleet:
    """Workers of one job as processes, each with its own state directory, worker id and pages."""

    def __init__(self, job: Job, count: int, standbys: int) -> None:
        self._job: Final = job
        self._ports: Final = free_ports(count)
        self.running: Final[dict[int, ChildProcess]] = {}
        self._topology: Final = job.directory / "topology.yaml"
        topology = {**simplest_for(job), "state": {"standby_replicas": standbys}}
        self._topology.write_text(json.dumps(topology), encoding="utf-8")
        self._config: Final = job.directory / "config.yaml"
        self._config.write_text(json.dumps({"brokers": [job.bootstrap]}), encoding="utf-8")

    def start(self, number: int) -> None:
        """The worker's process runs."""
        sets = {
            "state_dir": self._job.directory / f"state-{number}",
            "worker_id": worker_id(number),
            "commit_interval": f"{self._job.commit_interval_ms}ms",
            "session_timeout": f"{_SESSION_TIMEOUT_MS}ms",
            "topics.replication_factor": 1,
            "topics.min_insync_replicas": 1,
            "web.port": self._ports[number],
        }
        program = str(Path(sys.executable).parent / "dedup")
        options = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
        command = [program, "run", str(self._topology), "--config", str(self._config), *options]
        self.running[number] = ChildProcess(command, self._job.directory / f"worker-{number}.log")

    def stop(self, number: int) -> None:
        """The worker has ended in good order."""
        code = self.running.pop(number).stop(60)
        if code:
            raise RuntimeError(f"worker {number} ended with {code}:\n{self._tail(number)}")

    def kill(self, number: int) -> None:
        """The worker is gone by SIGKILL."""
        self.running.pop(number).kill()

    def end(self) -> None:
        """No worker runs."""
        for worker in self.running.values():
            worker.kill()

    def refuse_ended(self) -> None:
        """Raise RuntimeError with the end of its log where a worker ended by itself."""
        for number, worker in self.running.items():
            if not worker.running:
                raise RuntimeError(f"worker {number} ended by itself:\n{self._tail(number)}")

    def standby_lag(self) -> list[int]:
        """Return the changelog records that each warm copy lacks."""
        lags: list[int] = []
        for number in self.running:
            url = f"http://127.0.0.1:{self._ports[number]}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:  # our own worker on loopback
                lines = answer.read().decode().splitlines()
            lags += [int(float(line.split()[1])) for line in lines if line.startswith("dedup_standby_lag_records{")]
        return lags

    def _tail(self, number: int) -> str:
        return (self._job.directory / f"worker-{number}.log").read_text(encoding="utf-8")[-2000:]


def worker_id(number: int) -> str:
    """Return the worker's static id in the group."""
    return f"worker-{number}"


def _measure(bootstrap: str, plan: Plan, console: Console) -> Outcome:
    cluster = Cluster(bootstrap)
    group = f"fleet-{plan.case}-{plan.standbys}-{time.time_ns() // 1_000_000}"
    with tempfile.TemporaryDirectory(prefix="dedup-bench-") as directory, stage.bars(console) as bars:
        known = Workload(plan.known, plan.partitions, start_ms=stage.past_start_ms(), duplicate_share=0.0)
        source = stage.load_source(bootstrap, known, bars, topic=f"{group}.source")
        job = Job(
            bootstrap,
            source.topic,
            f"{group}.output",
            group,
            plan.partitions,
            Path(directory),
            "snappy",
            100,
            until_done=False,
        )
        cluster.create(job.output, plan.partitions)
        fleet = Fleet(job, plan.workers, plan.standbys)
        try:
            return _run(plan, job, fleet, cluster, source.expected, stage.Follow(bars, group, plan.rate * plan.seconds))
        finally:
            fleet.end()
            cluster.delete_of(group)


def _run(
    plan: Plan, job: Job, fleet: Fleet, cluster: Cluster, known: Mapping[bytes, int], follow: stage.Follow
) -> Outcome:
    reader = OutputReader(job.bootstrap, job.output, dict.fromkeys(range(plan.partitions), 0))
    began = time.monotonic()
    for number in range(plan.workers):
        fleet.start(number)
    # The group is asked only once something came out: before that it may not exist yet.
    _until(lambda: reader.count and cluster.consumed(job.group, job.source, cluster.ends(job.source)), fleet)
    start_s = time.monotonic() - began
    _until(lambda: _warm(fleet, plan), fleet)
    with _paced(plan, job) as pacer:
        _wait(_WARM_UP_S, fleet, reader, follow)
        owned = owners(job)
        changed_ms = time.time_ns() // 1_000_000
        affected = _change(plan, job, fleet, reader, follow, owned)
        cpu_before, at_before = _cpu_s(fleet), time.monotonic()
        while pacer.poll() is None:
            fleet.refuse_ended()
            follow(reader.count - len(known))
            time.sleep(_LOOK_S)
        cpu = (_cpu_s(fleet) - cpu_before) / (time.monotonic() - at_before)
        memory = max(_memory(worker.pid) for worker in fleet.running.values())
        paced = json.loads(pacer.stdout.read() if pacer.stdout else b"{}")
    _until(lambda: cluster.consumed(job.group, job.source, cluster.ends(job.source)), fleet)
    for number in list(fleet.running):
        fleet.stop(number)
    reader.finish(cluster.ends(job.output), _READY_WITHIN_S)
    gaps = gaps_s(reader, changed_ms, plan.partitions)
    workload = paced_workload(plan.rate, plan.seconds, plan.partitions, _SEED)
    expected = {**dict.fromkeys(known), **dict.fromkeys(workload.expected())}
    # Latency counts from the end of the warm-up: what a change costs is in it.
    waits = [seen - sent for _, sent, seen in reader.events() if sent >= changed_ms]
    of = [gaps[partition] for partition in affected]
    return Outcome(
        plan.case,
        plan.standbys,
        plan.partitions,
        plan.known,
        len(affected),
        max(of),
        statistics.median(of),
        max((gap for partition, gap in gaps.items() if partition not in affected), default=0.0),
        start_s,
        memory,
        cpu,
        float(np.percentile(waits, 50)),
        float(np.percentile(waits, 99)),
        paced["events"] / paced["seconds"],
        check(reader.events(), expected).exact,
    )


def _change(
    plan: Plan, job: Job, fleet: Fleet, reader: OutputReader, follow: stage.Follow, owned: Mapping[str, Sequence[int]]
) -> frozenset[int]:
    """Do to the fleet what the case says; return the partitions concerned."""
    match plan.case:
        case Case.KILL:
            fleet.kill(0)
            return frozenset(owned[worker_id(0)])
        case Case.ROLLING:
            for number in list(fleet.running):
                fleet.stop(number)
                fleet.start(number)
                _until(partial(_has_partitions, job, number), fleet)
                _wait(_REST_S, fleet, reader, follow)
        case Case.WIDE:
            pass  # nothing is done to it
    return frozenset(range(plan.partitions))


def _has_partitions(job: Job, number: int) -> bool:
    return bool(owners(job).get(worker_id(number)))


def owners(job: Job) -> dict[str, list[int]]:
    """Return the source's partitions by the static id of their worker, as the group has them assigned."""
    return {
        member.worker_id: [place.partition for place in member.partitions if place.topic == job.source]
        for member in group_members(Settings(brokers=(job.bootstrap,)), "bench", job.group)
    }


def gaps_s(reader: OutputReader, from_ms: int, partitions: int) -> dict[int, float]:
    """Return for each partition the longest time without a record of it that the reader saw from then on."""
    last = dict.fromkeys(range(partitions), from_ms)
    longest = dict.fromkeys(range(partitions), 0)
    for seen_ms, messages in reader.batches:
        if seen_ms < from_ms:
            continue
        for partition in {message.partition() for message in messages}:
            assert partition is not None
            longest[partition] = max(longest[partition], seen_ms - last[partition])
            last[partition] = seen_ms
    return {partition: gap / 1000 for partition, gap in longest.items()}


def _warm(fleet: Fleet, plan: Plan) -> bool:
    lags = fleet.standby_lag()
    return len(lags) == plan.partitions * plan.standbys and not any(lags)


@contextmanager
def _paced(plan: Plan, job: Job) -> Iterator[subprocess.Popen[bytes]]:
    arguments = (job.bootstrap, job.source, str(plan.rate), str(plan.seconds), str(plan.partitions), str(_SEED))
    with subprocess.Popen([sys.executable, "-m", "bench.pace", *arguments], stdout=subprocess.PIPE) as pacer:
        try:
            if pacer.stdout is not None:
                pacer.stdout.readline()  # what it sends is prepared; if it has ended instead, the exit code says so
            yield pacer
        finally:
            pacer.kill()
    if pacer.returncode:
        raise RuntimeError(f"The paced producer ended with exit code {pacer.returncode}.")


def _wait(seconds: float, fleet: Fleet, reader: OutputReader, follow: stage.Follow) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        fleet.refuse_ended()
        follow(reader.count)
        time.sleep(_LOOK_S)


def _until(condition: Callable[[], object], fleet: Fleet) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while not condition():
        fleet.refuse_ended()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_READY_WITHIN_S:.0f} s")
        time.sleep(_LOOK_S)


def _cpu_s(fleet: Fleet) -> float:
    """Return the CPU seconds of the living workers (Linux)."""
    return sum(_ticks(worker.pid) for worker in fleet.running.values()) / 100


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _memory(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def _table(found: Sequence[Outcome]) -> Table:
    head = ["case", "standbys", "partitions concerned", "gap s (median)", "gap of the others s", "start s"]
    table = Table(*head, "CPU", "memory MiB", "p50 ms", "p99 ms", "events/s", "exact")
    for one in found:
        table.add_row(
            one.case,
            str(one.standbys),
            f"{one.affected} of {one.partitions}",
            f"{one.gap_s:.2f} ({one.gap_median_s:.2f})",
            f"{one.gap_others_s:.2f}",
            f"{one.start_s:.1f}",
            f"{one.cpu_share:.0%}",
            f"{one.memory_bytes / 2**20:,.0f}",
            f"{one.p50_ms:,.0f}",
            f"{one.p99_ms:,.0f}",
            f"{one.rate_reached:,.0f}",
            "yes" if one.exact else "NO",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
