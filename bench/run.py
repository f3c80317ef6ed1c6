"""Throughput of workload W1 on this worker and on its peers, interleaved against one broker, which is warmed up first.

    python -m bench.run                                   all candidates, 1,000,000 events, 3 rounds
    python -m bench.run --only dedup --only quix --events 300000 --rounds 1

Exit code 0 if every run was exact, 1 if not. The result goes to bench/results/.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer
from confluent_kafka import KafkaException
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report, stage
from bench.build_peers import QUIX, PeerNotBuilt
from bench.candidates import CANDIDATES, DEFAULT, Candidate, Job
from bench.cluster import Cluster
from bench.measure import Failed, Figures, Task, measure
from bench.process import CandidateFailed
from bench.stage import Follow, Source
from bench.workload import Workload

_FLOOR_EVENTS_PER_S: Final = 500
_START_UP_WITHIN_S: Final = 120
_Kind = tuple[bool, str]
"""Whether a candidate is slow, and the form that its events have."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all runs have in common."""

    bootstrap: str
    partitions: int
    commit_interval_ms: int
    directory: Path


def main(  # noqa: PLR0913  each is an option of the command line
    *,
    events: Annotated[int, typer.Option(help="Events of the workload.")] = 1_000_000,
    small: Annotated[int, typer.Option(help="Events for candidates of some thousand events/s.")] = 50_000,
    rounds: Annotated[int, typer.Option(help="Runs of every candidate.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help=f"Candidates: {', '.join(CANDIDATES)}.")] = None,
    partitions: Annotated[int, typer.Option(help="Partitions of the source topic.")] = 4,
    commit_interval_ms: Annotated[int, typer.Option(help="Commit interval of every candidate.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 7,
    bootstrap: Annotated[str, typer.Option(help="A running broker; without it an embedded one is started.")] = "",
) -> None:
    """Measure the candidates in turn, print the ratios, write the result file."""
    console = stage.console()
    chosen = _chosen(only)
    start_ms = stage.past_start_ms()
    load = os.getloadavg()[0]
    with stage.broker(bootstrap) as address, tempfile.TemporaryDirectory(prefix="dedup-bench-") as directory:
        settings = Settings(address, partitions, commit_interval_ms, Path(directory))
        with stage.bars(console) as bars:
            sources: dict[_Kind, Source] = {}
            for slow, form in sorted({(candidate.slow, candidate.form) for candidate in chosen}):
                size = min(small, events) if slow else events
                workload = Workload(size, partitions, seed, start_ms, form=form)
                sources[slow, form] = stage.load_source(address, workload, bars)
            runs = list(_rounds(settings, chosen, sources, rounds, bars))
    good = [run for run in runs if isinstance(run, Figures)]
    rows = report.summarise(good)
    about = {
        "workload": f"W1: {events:,} events, {partitions} partitions, 30 % duplicates, seed {seed}",
        "commit interval": f"{commit_interval_ms} ms",
        "rounds": rounds,
        "load average before": round(load, 1),
        "quix": QUIX,
    }
    _show(console, rows, [run for run in runs if isinstance(run, Failed)])
    for path in report.write(datetime.now(UTC).date(), about, runs, rows):
        console.print(f"written: {path.name}")
    raise typer.Exit(0 if len(good) == len(runs) and all(row.exact for row in rows) else 1)


def _chosen(names: Sequence[str] | None) -> list[Candidate]:
    unknown = [name for name in names or () if name not in CANDIDATES]
    if unknown:
        raise typer.BadParameter(f"no candidate {', '.join(unknown)}; there are {', '.join(CANDIDATES)}")
    return [CANDIDATES[name] for name in names or DEFAULT]


def _rounds(
    settings: Settings, chosen: Sequence[Candidate], sources: Mapping[_Kind, Source], rounds: int, bars: Progress
) -> Iterator[Figures | Failed]:
    for candidate in chosen:
        if not candidate.slow:
            # Thrown away: in its first minute a broker's JVM is busy compiling, on the core a candidate would use.
            source = sources[candidate.slow, candidate.form]
            progress = Follow(bars, f"warm-up {candidate.name}", len(source.expected))
            _run(settings, candidate, candidate.compressions[0], source, 0, progress)
    pairs = [(candidate, compression) for candidate in chosen for compression in candidate.compressions]
    for round_ in range(1, rounds + 1):
        # Each round begins with another one: none always runs on the machine that the same one left behind.
        first = (round_ - 1) % len(pairs)
        for candidate, compression in pairs[first:] + pairs[:first]:
            source = sources[candidate.slow, candidate.form]
            progress = Follow(bars, f"round {round_} {candidate.name} {compression}", len(source.expected))
            yield _run(settings, candidate, compression, source, round_, progress)


def _run(
    settings: Settings, candidate: Candidate, compression: str, source: Source, round_: int, progress: Follow
) -> Figures | Failed:
    cluster = Cluster(settings.bootstrap)
    group = f"{candidate.name}-{compression}-{round_}-{time.time_ns() // 1_000_000}"
    events = source.workload.events
    with tempfile.TemporaryDirectory(dir=settings.directory) as directory:
        job = Job(
            settings.bootstrap,
            source.topic,
            f"{group}.output",
            group,
            settings.partitions,
            Path(directory),
            compression,
            settings.commit_interval_ms,
            until_done=True,
        )
        task = Task(cluster, job, events, source.expected, _START_UP_WITHIN_S + events / _FLOOR_EVENTS_PER_S)
        try:
            figures = measure(candidate, task, round_, progress)
        except (CandidateFailed, PeerNotBuilt, OSError, KafkaException) as failure:
            return Failed(candidate.name, compression, round_, str(failure))
        progress(figures.exactness.forwarded)
    cluster.delete_of(group)
    return figures


def _show(console: Console, rows: Sequence[report.Row], failed: Sequence[Failed]) -> None:
    table = Table("candidate", "compression", "events/s", "per CPU-second", "exact", "times slower than dedup")
    for row in rows:
        table.add_row(*report.short_cells(row))
    console.print(table)
    for run in failed:
        console.print(f"[red]failed[/red] {run.candidate} {run.compression}, round {run.round}: ", end="")
        console.print(run.reason, markup=False)


if __name__ == "__main__":
    typer.run(main)
