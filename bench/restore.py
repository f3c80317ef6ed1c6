"""Restore: how long a worker takes to bring 1,000,000 IDs from the changelog onto an empty disk.

    python -m bench.restore                       1,000,000 IDs, 4 partitions, 3 rounds

Seen from outside: a worker is started on events that lie in every partition, once with its state as it left it, once
with its state directory deleted, and once more so with a checkpoint to begin with. The time from the start of its
process to the last of these events' outputs is taken; what the second takes more than the first is the restore. The
first is page 7's "restart on kept disk". The checkpoint is made once, of a changelog that nobody writes to; the second
run of the command, which reads what it kept, is timed too.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

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
_CHECKPOINT: Final = "checkpoint"
_PADDING: Final = "0" * 106
_FILL_WITHIN_S: Final = 900.0
_OUTPUT_WITHIN_S: Final = 300.0
_LOOK_EVERY_S: Final = 0.02


Disk = Literal["kept", "empty", "checkpoint"]
"""The last: empty, with a checkpoint to begin with."""
DISKS: Final[tuple[Disk, ...]] = get_args(Disk)


@dataclass(frozen=True, slots=True)
class Restart:
    """One start of the worker: what was on its `disk`; `seconds` until every partition gave an output."""

    disk: Disk
    seconds: float
    cpu_s: float


def main(
    *,
    ids: Annotated[int, typer.Option(help="IDs in the changelog.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Starts with kept, wiped and checkpointed state, each.")] = 3,
    partitions: Annotated[int, typer.Option(help="Partitions.")] = 4,
    bootstrap: Annotated[str, typer.Option(help="A running broker; without it an embedded one is started.")] = "",
) -> None:
    """Fill the changelog, restart the worker with its state, without, with a checkpoint; write the result file."""
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
        state_bytes = bytes_below(Path(directory) / "state" / "restore")
        first_s, again_s = (_checkpoint(Path(directory), address) for _ in range(2))
        checkpoint_bytes = bytes_below(Path(directory) / _CHECKPOINT)
        follow = stage.Follow(bars, "restart", len(DISKS) * rounds)
        restarts: list[Restart] = []
        for number in range(len(DISKS) * rounds):
            restarts.append(_restart(_job(address, source.topic, partitions, Path(directory)), number))
            follow(number + 1)
    kept, wiped, begun = (statistics.median(one.seconds for one in restarts if one.disk == disk) for disk in DISKS)
    per_s = ids / max(wiped - kept, 0.001)
    table = Table("IDs", "restart, kept disk s", "empty disk s", "with checkpoint s", "restore IDs/s", "fill exact")
    exact = filled.exactness.exact
    row = (f"{ids:,}", f"{kept:.2f}", f"{wiped:.2f}", f"{begun:.2f}", f"{per_s:,.0f}", "yes" if exact else "NO")
    table.add_row(*row)
    console.print(table)
    about = {
        "ids": ids,
        "partitions": partitions,
        "kept s": kept,
        "wiped s": wiped,
        "with checkpoint s": begun,
        "ids per s": round(per_s),
        "checkpoint made s": first_s,
        "checkpoint made again s": again_s,
        "state bytes": state_bytes,
        "checkpoint bytes": checkpoint_bytes,
    }
    console.print(
        f"checkpoint: {first_s:.2f} s, again {again_s:.2f} s, {checkpoint_bytes:,} bytes; state {state_bytes:,}"
    )
    path = report.write_json(datetime.now(UTC).date(), about, [asdict(one) for one in restarts], kind="restore")
    console.print(f"written: {path.name}")
    raise typer.Exit(0 if exact else 1)


def _job(bootstrap: str, source: str, partitions: int, directory: Path, *, until_done: bool = False) -> Job:
    # Always the same group, output and directory: the starts are restarts of one worker.
    return Job(bootstrap, source, "restore.output", "restore", partitions, directory, "snappy", 100, until_done)


def _restart(job: Job, number: int) -> Restart:
    """The worker was started once more, gave an output for every probe, and has ended."""
    disk = DISKS[number % len(DISKS)]
    if disk != "kept":
        shutil.rmtree(job.state_dir)
    _probe(job, number)
    command = CANDIDATES[report.OURS].command(job)
    cluster = Cluster(job.bootstrap)
    reader = OutputReader(job.bootstrap, job.output, cluster.ends(job.output))
    try:
        began = time.monotonic()
        environ = environ_of(command)
        if disk == "checkpoint":
            environ["DEDUP_STATE__CHECKPOINT"] = str(job.directory / _CHECKPOINT)
        with MeasuredProcess(command.arguments, environ, job.directory / "candidate.log") as process:
            while reader.count < _PROBES:
                if process.ended or time.monotonic() > began + _OUTPUT_WITHIN_S:
                    raise process.failed(f"{reader.count} of {_PROBES} events came out")
                time.sleep(_LOOK_EVERY_S)
            seconds = time.monotonic() - began
            used = process.stop()
    finally:
        reader.close()
    if disk == "checkpoint" and b"taken over from the checkpoint" not in (job.directory / "candidate.log").read_bytes():
        raise process.failed("it did not begin with the checkpoint")
    return Restart(disk, seconds, used.cpu_s)


def _checkpoint(directory: Path, bootstrap: str) -> float:
    """A checkpoint of the whole changelog is there; return how long the command took, in seconds."""
    line = [str(Path(sys.executable).parent / "dedup"), "checkpoint", str(directory / "restore.yaml")]
    line += ["--to", str(directory / _CHECKPOINT), "--state-dir", str(directory / "checkpoint-state")]
    began = time.monotonic()
    subprocess.run([*line, "--set", f"brokers={bootstrap}"], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def bytes_below(directory: Path) -> int:
    """Return what the files below a directory take, but for RocksDB's own log of events."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("LOG"))
    return sum(path.stat().st_size for path in files)


def _probe(job: Job, number: int) -> None:
    """New events lie behind the others in every partition: enough of them that none is left without."""
    sender = producer(job.bootstrap)
    for each in range(_PROBES):
        send(sender, job.source, event(f"probe-{number}-{each}", 0, time.time_ns() // 1_000_000, _PADDING))
    finish(sender)


if __name__ == "__main__":
    typer.run(main)
