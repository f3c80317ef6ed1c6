"""Throughput of W1 on two checkouts, in pairs of runs that take turns on one source topic.

    python -m bench.pairs ../dedup-before                      3 sessions of 10 pairs, 1,000,000 events each
    python -m bench.pairs ../dedup-before --sessions 1 --pairs 4

Each session has its own broker. A checkout's runs are started by its own code, in a process of its own, with this
environment's packages. One session says little: the medians of sessions of ten or twenty pairs, with nearly the same
code, have ranged from 0.94 to 1.04. A run's time begins with its first committed output. Therefore, a side whose first
output comes 30 ms earlier than the other side's, and its last at the same time, appears to be 1.4% slower in a run of
2.1 s. Both sides read the same topic, so that the way its log was written favors neither.

Exit code 0 if every run was exact, 1 if not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Final, Self, cast

import typer

from bench import run, stage
from bench.candidates import CANDIDATES
from bench.measure import Failed
from bench.workload import Workload

_TOPIC: Final = "w1-pairs"
_PARTITIONS: Final = 4
_SEED: Final = 7
_COMMIT_INTERVAL_MS: Final = 100
_SIDE: Final = "side"


@dataclass(frozen=True, slots=True)
class Rate:
    """One run: events a second, and events per second of CPU time (start-up included)."""

    events_per_s: float
    events_per_cpu_s: float


class Side:
    """A checkout, whose process waits for the order to run."""

    def __init__(self, checkout: Path, session: Workload, bootstrap: str, *, load: bool) -> None:
        """Return when the process is ready; with ``load``, it has filled the source topic."""
        order = {"bootstrap": bootstrap, "events": session.events, "start_ms": session.start_ms, "load": load}
        self._process: Final = subprocess.Popen(
            # With -P, the modules of bench/ can not hide those of the standard library.
            (sys.executable, "-P", __file__, _SIDE, json.dumps(order)),
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self) -> Rate:
        """Run once. Raises SystemExit if the run failed or was not exact."""
        orders = cast("IO[str]", self._process.stdin)
        orders.write("run\n")
        orders.flush()
        return Rate(**json.loads(self._answer()))

    def _answer(self) -> str:
        answer = cast("IO[str]", self._process.stdout).readline()
        if not answer:
            sys.exit(f"the runs of {self._process.args!r} ended with exit code {self._process.wait()}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        cast("IO[str]", self._process.stdin).close()
        self._process.wait()


def main(
    before: Annotated[Path, typer.Argument(help="The other checkout.", exists=True, file_okay=False)],
    *,
    sessions: Annotated[int, typer.Option(help="Brokers, one after the other.")] = 3,
    pairs: Annotated[int, typer.Option(help="Pairs of runs on each broker.")] = 10,
    events: Annotated[int, typer.Option(help="Events of the workload.")] = 1_000_000,
) -> None:
    """Run both checkouts in turn, and print the ratio of this checkout's rate to the other's."""
    after = Path(__file__).parents[1]
    found: list[tuple[Rate, Rate]] = []
    for session in range(sessions):
        with _sides(before.resolve(), after, events) as (old, new):
            # Thrown away, as in `bench.run`: at first, the broker is busy compiling.
            old.run(), new.run()
            for pair in range(pairs):
                found.append(_pair(old, new, old_first=(session + pair) % 2 == 0))
                print(f"session {session} pair {pair}: {_ratios(found[-1:])[0]:.3f}", file=sys.stderr)
        print(f"session {session}: median of {pairs} ratios {statistics.median(_ratios(found[-pairs:])):.3f}")
    ratios = _ratios(found)
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    olds, news = ([each[at] for each in found] for at in (0, 1))
    of_medians = statistics.median(each.events_per_s for each in news) / statistics.median(
        each.events_per_s for each in olds
    )
    per_cpu = statistics.median(new.events_per_cpu_s / old.events_per_cpu_s for old, new in found)
    print(f"{len(found)} pairs: median of ratios {statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})")
    print(f"geometric mean {statistics.geometric_mean(ratios):.3f}, standard error {spread:.3f}")
    print(f"ratio of medians {of_medians:.3f}; per CPU-second, start-up included, {per_cpu:.3f}")


@contextmanager
def _sides(before: Path, after: Path, events: int) -> Iterator[tuple[Side, Side]]:
    workload = Workload(events, _PARTITIONS, _SEED, stage.past_start_ms())
    with (
        stage.broker("") as address,
        Side(before, workload, address, load=True) as old,
        Side(after, workload, address, load=False) as new,
    ):
        yield old, new


def _pair(old: Side, new: Side, *, old_first: bool) -> tuple[Rate, Rate]:
    if old_first:
        return old.run(), new.run()
    last = new.run()
    return old.run(), last


def _ratios(found: list[tuple[Rate, Rate]]) -> list[float]:
    return [new.events_per_s / old.events_per_s for old, new in found]


def _side(order: str) -> None:
    """Run when a line arrives, with the code of the checkout in PYTHONPATH, which may be older than this file."""
    wanted = json.loads(order)
    shown, dedup = stage.bars(stage.console()), CANDIDATES["dedup"]
    workload = Workload(wanted["events"], _PARTITIONS, _SEED, wanted["start_ms"])
    if wanted["load"]:
        source = stage.load_source(wanted["bootstrap"], workload, shown, _TOPIC)
    else:
        source = stage.Source(_TOPIC, workload, workload.expected())
    with tempfile.TemporaryDirectory(prefix="dedup-bench-") as directory:
        settings = run.Settings(wanted["bootstrap"], _PARTITIONS, _COMMIT_INTERVAL_MS, Path(directory))
        print("ready", flush=True)
        for number, _line in enumerate(sys.stdin):
            follow = stage.Follow(shown, f"run {number}", len(source.expected))
            got = run._run(settings, dedup, dedup.compressions[0], source, number, follow)  # noqa: SLF001  # its own bench
            if isinstance(got, Failed) or not got.exactness.exact:
                sys.exit(f"not exact: {got}")
            print(json.dumps(asdict(Rate(got.events_per_s, got.events_per_cpu_s))), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [_SIDE]:
        _side(sys.argv[2])
    else:
        typer.run(main)
