"""Restore: how long a worker takes to bring 1,000,000 IDs from the changelog onto an empty disk.

    python -m bench.restore                       1,000,000 IDs, 4 partitions, 3 rounds

Seen from outside: a worker is started on events that lie in every partition, once with its state as it left it and
once with its state directory deleted. The time from the start of its process to the last of these events' outputs is
taken; what the second takes more than the first is the restore. The first is page 7's "restart on kept disk".
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from bench import report, stage
from bench.candidates import CANDIDATES, Job, environ_of
from bench.cluster import Cluster
from bench.measure import Task, measure
from bench.process import MeasuredProcess
from bench.reader import OutputReader
from bench.workload import Workload, event, finish, producer, send

_PROBES: Final = 64
_PADDING: Final = "0" * 106
_FILL_WITHIN_S: Final = 900.0
_OUTPUT_WITHIN_S: Final = 300.0
_LOOK_EVERY_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Restart:
    """One start of the worker: `wiped` without local state; `seconds` until every partition gave an output."""

    wiped: bool
    seconds: float
    cpu_s: float


def main(
    *,
    ids: Annotated[int, typer.Option(help="IDs in the changelog.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Starts with kept and with wiped state, each.")] = 3,
    partitions: Annotated[int, typer.Option(help="Partitions.")] = 4,
    bootstrap: Annotated[str, typer.Option(help="A running broker; without it an embedded one is started.")] = "",
) -> None:
    """Fill the changelog, restart the worker with and without its state, print IDs/s, write the result file."""
    console = stage.console()
    with (
        stage.broker(bootstrap) as address,
        tempfile.TemporaryDirectory(prefix="dedup-bench-") as directory,
        stage.bars(console) as bars,
    ):
        workload = Workload(ids, partitions, start_ms=stage.past_start_ms(), duplicate_share=0.0)
        source = stage.load_source(address, workload, bars)
        job = _job(address, source.topic, partitions, Path(directory), until_done=True)
        task = Task(Cluster(address), job, ids, source.expected, _FILL_WITHIN_S)
        filled = measure(CANDIDATES[report.OURS], task, 1, stage.Follow(bars, "fill the changelog", ids))
        follow = stage.Follow(bars, "restart", 2 * rounds)
        restarts: list[Restart] = []
        for number in range(2 * rounds):
            restarts.append(_restart(_job(address, source.topic, partitions, Path(directory)), number))
            follow(number + 1)
    kept, wiped = (statistics.median(one.seconds for one in restarts if one.wiped is which) for which in (False, True))
    per_s = ids / max(wiped - kept, 0.001)
    table = Table("IDs", "restart, kept disk s", "restart, empty disk s", "restore IDs/s", "fill exact")
    exact = filled.exactness.exact
    table.add_row(f"{ids:,}", f"{kept:.2f}", f"{wiped:.2f}", f"{per_s:,.0f}", "yes" if exact else "NO")
    console.print(table)
    about = {"ids": ids, "partitions": partitions, "kept s": kept, "wiped s": wiped, "ids per s": round(per_s)}
    path = report.write_json(datetime.now(UTC).date(), about, [asdict(one) for one in restarts], kind="restore")
    console.print(f"written: {path.name}")
    raise typer.Exit(0 if exact else 1)


def _job(bootstrap: str, source: str, partitions: int, directory: Path, *, until_done: bool = False) -> Job:
    # Always the same group, output and directory: the starts are restarts of one worker.
    return Job(bootstrap, source, "restore.output", "restore", partitions, directory, "snappy", 100, until_done)


def _restart(job: Job, number: int) -> Restart:
    """The worker was started once more, gave an output for every probe, and has ended."""
    wiped = number % 2 == 1
    if wiped:
        shutil.rmtree(job.state_dir)
    _probe(job, number)
    command = CANDIDATES[report.OURS].command(job)
    cluster = Cluster(job.bootstrap)
    reader = OutputReader(job.bootstrap, job.output, cluster.ends(job.output))
    try:
        began = time.monotonic()
        with MeasuredProcess(command.arguments, environ_of(command), job.directory / "candidate.log") as process:
            while reader.count < _PROBES:
                if process.ended or time.monotonic() > began + _OUTPUT_WITHIN_S:
                    raise process.failed(f"{reader.count} of {_PROBES} events came out")
                time.sleep(_LOOK_EVERY_S)
            seconds = time.monotonic() - began
            used = process.stop()
    finally:
        reader.close()
    return Restart(wiped, seconds, used.cpu_s)


def _probe(job: Job, number: int) -> None:
    """New events lie behind the others in every partition: enough of them that none is left without."""
    sender = producer(job.bootstrap)
    for each in range(_PROBES):
        send(sender, job.source, event(f"probe-{number}-{each}", 0, time.time_ns() // 1_000_000, _PADDING))
    finish(sender)


if __name__ == "__main__":
    typer.run(main)
