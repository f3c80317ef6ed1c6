"""The result of a whole measurement: summarised, as a table, as JSON and Markdown files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from bench.measure import Failed, Figures

RESULTS: Final = Path(__file__).parent / "results"
OURS: Final = "dedup"
_LIBRARIES: Final = ("aiokafka", "confluent-kafka", "faust-streaming", "rocksdict", "cramjam", "msgspec")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some runs with the least and the greatest."""

    median: float
    least: float
    greatest: float

    def text(self, digits: int = 0) -> str:
        """Return it as ``median (least-greatest)``."""
        return f"{self.median:,.{digits}f} ({self.least:,.{digits}f}-{self.greatest:,.{digits}f})"


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate at its best compression. `ratio` is ours to its, round by round; None for ourselves."""

    candidate: str
    compression: str
    events: int
    runs: int
    events_per_s: Spread
    events_per_cpu_s: Spread
    start_up_s: Spread
    peak_memory_bytes: int
    exact: bool
    ratio: Spread | None


def spread(values: Sequence[float]) -> Spread:
    """Return median, least and greatest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def summarise(runs: Sequence[Figures]) -> list[Row]:
    """Return a row for each candidate at the compression at which its median rate is better."""
    settings: dict[tuple[str, str], list[Figures]] = {}
    for run in runs:
        settings.setdefault((run.candidate, run.compression), []).append(run)
    best: dict[str, list[Figures]] = {}
    for (candidate, _compression), group in settings.items():
        if candidate not in best or _rate(group) > _rate(best[candidate]):
            best[candidate] = group
    ours = {run.round: run.events_per_s for run in best.get(OURS, [])}
    return [_row(group, ours, exact=_exact(runs, name)) for name, group in best.items()]


def _rate(group: Sequence[Figures]) -> float:
    return statistics.median(run.events_per_s for run in group)


def _exact(runs: Sequence[Figures], candidate: str) -> bool:
    # Over all compressions: a run that is not the best must be exact too.
    return all(run.exactness.exact for run in runs if run.candidate == candidate)


def _row(group: Sequence[Figures], ours: Mapping[int, float], *, exact: bool) -> Row:
    ratios = [ours[run.round] / run.events_per_s for run in group if run.round in ours]
    first = group[0]
    return Row(
        first.candidate,
        first.compression,
        first.events,
        len(group),
        spread([run.events_per_s for run in group]),
        spread([run.events_per_cpu_s for run in group]),
        spread([run.start_up_s for run in group]),
        max(run.peak_memory_bytes for run in group),
        exact,
        spread(ratios) if ratios and first.candidate != OURS else None,
    )


def machine() -> dict[str, Any]:
    """Return what the figures depend on; nothing that names this machine."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": models[0] if models else platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
    }


def commit() -> str:
    """Return the short commit of this checkout, with ``-dirty`` where tracked files differ; or ``unknown``."""
    answer = _git("rev-parse", "--short", "HEAD")
    if not answer:
        return "unknown"
    return f"{answer}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else answer


def _git(*arguments: str) -> str:
    where = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def write(
    day: date, about: Mapping[str, Any], runs: Sequence[Figures | Failed], rows: Sequence[Row]
) -> tuple[Path, Path]:
    """The JSON and the Markdown file of a throughput measurement are in bench/results/; returns both paths."""
    more = {"summary": [asdict(row) for row in rows]}
    as_json = write_json(day, about, [_run(run) for run in runs], kind="w1", more=more)
    as_text = as_json.with_suffix(".md")
    full = {"commit": commit(), "machine": machine(), **about}
    as_text.write_text(markdown(full, rows, [run for run in runs if isinstance(run, Failed)]), encoding="utf-8")
    return as_json, as_text


def write_json(
    day: date,
    about: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    *,
    kind: str,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """The JSON file of a measurement is in bench/results/, named by day, commit and kind; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    result = {"commit": commit(), "machine": machine(), **about, **(more or {}), "runs": runs}
    path = RESULTS / f"{day.isoformat()}-{commit()}-{kind}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def _run(run: Figures | Failed) -> dict[str, Any]:
    return asdict(run) | ({"events_per_s": round(run.events_per_s)} if isinstance(run, Figures) else {})


def markdown(about: Mapping[str, Any], rows: Sequence[Row], failed: Sequence[Failed]) -> str:
    """Return the result as a page: what it was measured on, a table, the runs that failed."""
    head = ["candidate", "compression", "events", "runs", "events/s", "per CPU-second", "start-up s", "peak memory MiB"]
    head += ["exact", "times slower than dedup"]
    lines = ["# Measured throughput", ""]
    lines += [f"* {key}: {_plain(value)}" for key, value in about.items()]
    lines += ["", "Median (least-greatest) of the runs, interleaved; ratios round by round.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    lines += [f"\nFailed: {run.candidate} {run.compression}, round {run.round}: {run.reason}" for run in failed]
    return "\n".join(lines) + "\n"


def short_cells(row: Row) -> list[str]:
    """Return a row's cells, as the terminal shows them."""
    every = cells(row)
    return [*every[:2], every[4], every[5], *every[8:]]


def cells(row: Row) -> list[str]:
    """Return a row's cells, as the Markdown table shows them."""
    return [
        row.candidate,
        row.compression,
        f"{row.events:,}",
        str(row.runs),
        row.events_per_s.text(),
        row.events_per_cpu_s.text(),
        row.start_up_s.text(1),
        f"{row.peak_memory_bytes / 2**20:,.0f}",
        "yes" if row.exact else "NO",
        row.ratio.text(2) if row.ratio else "",
    ]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    return ", ".join(str(each) for each in value) if isinstance(value, (list, tuple)) else str(value)
