"""How long the proof takes: `dedup verify` and `dedup explain` over workload W1, as a user runs them.

    python -m bench.proof --events 1000000

Workers first judge the events once in each layout (`LAYOUTS`). Then each command runs as a process of its own; its
seconds include its start. Exit code 1 if a verification found a violation.
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
from typing import Annotated

import typer
from rich.table import Table

from bench import report, stage
from bench.candidates import Job, simplest_for, with_layout
from bench.cluster import Cluster
from bench.workload import Workload, load

_PARTITIONS = 4
BEHIND = "repartition topic"
EVERYTHING = "source, everything written"
LAYOUTS = ("source", BEHIND, EVERYTHING)
_DEDUP = (sys.executable, "-m", "dedup.cli.main")


@dataclass(frozen=True, slots=True)
class Took:
    """What one command took."""

    command: str
    layout: str
    events: int
    seconds: float
    events_per_s: float
    passed: bool


def main(
    *,
    events: Annotated[int, typer.Option(help="Events in the source.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="How often each command runs.")] = 3,
    bootstrap: Annotated[str, typer.Option(help="A running broker; without it an embedded one is started.")] = "",
) -> None:
    """Measure both commands, print what they took, write the result file."""
    console = stage.console()
    workload = Workload(events, _PARTITIONS, start_ms=time.time_ns() // 1_000_000)
    some_id = next(iter(workload.expected())).decode()
    found: list[Took] = []
    with stage.broker(bootstrap) as address, tempfile.TemporaryDirectory(prefix="dedup-bench-") as directory:
        run = f"proof-{time.time_ns() // 1_000_000}"
        cluster = Cluster(address)
        cluster.create(f"{run}.source", _PARTITIONS)
        with stage.bars(console) as bars:
            load(address, f"{run}.source", workload, stage.Follow(bars, "events", events))
        jobs = {layout: _judged(cluster, run, Path(directory), layout) for layout in LAYOUTS}
        for _ in range(rounds):
            for layout, job in jobs.items():
                found.append(_timed(job, "verify", (), layout, events))
                found.append(_timed(job, "explain", (some_id,), layout, events))
        cluster.delete_of(run)
    table = Table("command", "layout", "events", "seconds", "events/s", "passed")
    for each in found:
        rate, passed = f"{each.events_per_s:,.0f}", "yes" if each.passed else "NO"
        table.add_row(each.command, each.layout, f"{each.events:,}", f"{each.seconds:.1f}", rate, passed)
    console.print(table)
    path = report.write_json(datetime.now(UTC).date(), {"events": events}, [asdict(one) for one in found], kind="proof")
    console.print(f"written: {path.name}")
    raise typer.Exit(0 if all(each.passed for each in found) else 1)


def _judged(cluster: Cluster, run: str, directory: Path, layout: str) -> list[str]:
    """Let a worker judge all events, and return the arguments that name its topology and config."""
    group = f"{run}-{LAYOUTS.index(layout)}"
    state = directory / group
    state.mkdir()
    job = Job(
        cluster.bootstrap, f"{run}.source", f"{group}.output", group, _PARTITIONS, state, "lz4", 100, until_done=True
    )
    cluster.create(job.output, _PARTITIONS)
    topology, config = state / "t.yaml", state / "config.yaml"
    document = simplest_for(job, repartitioned=layout == BEHIND)
    if layout == EVERYTHING:
        document = with_layout(document, "side-topics", "extend")
    topology.write_text(json.dumps(document), encoding="utf-8")
    settings = {"brokers": [cluster.bootstrap], "state_dir": str(state / "state"), "web": {"enabled": False}}
    config.write_text(json.dumps(settings), encoding="utf-8")
    names = [str(topology), "--config", str(config)]
    with (state / "log").open("wb") as log:
        command = [*_DEDUP, "run", *names, "--exit-when-done", "--quiet"]
        subprocess.run(command, stdout=log, stderr=log, check=True)
    return names


def _timed(names: list[str], command: str, arguments: tuple[str, ...], layout: str, events: int) -> Took:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        line = [*_DEDUP, command, names[0], *arguments, *names[1:], "--json"]
        line += ["--report", f"{directory}/r.html"] if command == "verify" else []
        done = subprocess.run(line, capture_output=True, check=False)
    seconds = time.monotonic() - began
    return Took(command, layout, events, round(seconds, 2), events / seconds, done.returncode == 0)


if __name__ == "__main__":
    typer.run(main)
