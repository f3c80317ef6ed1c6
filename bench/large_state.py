"""Large state: one worker with 100,000,000 known IDs in 4 partitions, compared with the same worker without any.

    python -m bench.large_state                      100,000,000 IDs, 3 rounds of 2,000,000 events; 25 GB of disk

The IDs come from a history in Parquet, as they would where dedup is introduced beside years of data: `dedup spark seed`
writes their sightings to the changelog. Then the worker is started on an empty disk (restore from the changelog), in
turn with a worker of another name that knows nothing, on the same events; after a SIGTERM, after a SIGKILL; on an empty
disk with a checkpoint; and at last on events that are all known. Every output is counted and compared.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from confluent_kafka import Consumer, TopicPartition
from rich.table import Table

from bench import report, stage
from bench.candidates import CANDIDATES, Job, environ_of
from bench.cluster import Cluster
from bench.process import MeasuredProcess
from bench.reader import Exactness, OutputReader, check
from bench.workload import GUARD_MS, Workload, event, finish, load, producer, send

_ROWS_A_FILE: Final = 2_000_000
_SOURCE: Final = "large.source"
_PARTITIONS: Final = 4
_KNOWN: Final = 200_000
_NEW: Final = 1_000
_WITHIN_S: Final = 1800.0
_LOOK_EVERY_S: Final = 0.02
_HEX: Final = np.frombuffer(b"0123456789abcdef", np.uint8)
_DIGITS: Final = np.array([at for at in range(36) if at not in {8, 13, 18, 23}])
_PROGRAM: Final = str(Path(sys.executable).parent / "dedup")


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a worker on events that lie there; seconds are counted from the start of its process."""

    what: str
    worker: str
    events: int
    first_output_s: float
    events_per_s: float
    """From the first output to the last."""
    peak_memory_bytes: int
    cpu_s: float
    exactness: Exactness


def main(
    *,
    ids: Annotated[int, typer.Option(help="Known IDs.")] = 100_000_000,
    events: Annotated[int, typer.Option(help="Events in a round.")] = 2_000_000,
    rounds: Annotated[int, typer.Option(help="Rounds with a SIGTERM between them.")] = 3,
    bootstrap: Annotated[str, typer.Option(help="A running broker; without it an embedded one is started.")] = "",
) -> None:
    """Seed the state, run the worker on it in every way, print a table, and write the result file."""
    console = stage.console()
    with stage.broker(bootstrap) as address, tempfile.TemporaryDirectory(prefix="dedup-bench-") as name:
        bench = _Bench(Path(name), address, Cluster(address), stage.past_start_ms(), events)
        runs = list(bench.all(ids, rounds))
    table = Table("", "worker", "events", "first output s", "events/s", "peak MiB", "CPU s", "exact")
    for run in runs:
        figures = (f"{run.events:,}", f"{run.first_output_s:.1f}", f"{run.events_per_s:,.0f}")
        used = (f"{run.peak_memory_bytes >> 20:,}", f"{run.cpu_s:.0f}", "yes" if run.exactness.exact else "NO")
        table.add_row(run.what, run.worker, *figures, *used)
    console.print(table)
    for key, value in bench.noted.items():
        console.print(f"{key}: {value:,}")
    about = {"ids": ids, "partitions": _PARTITIONS, **bench.noted}
    path = report.write_json(datetime.now(UTC).date(), about, [asdict(run) for run in runs], kind="large-state")
    console.print(f"written: {path.name}")
    raise typer.Exit(0 if all(run.exactness.exact for run in runs) else 1)


class _Bench:
    def __init__(self, directory: Path, bootstrap: str, cluster: Cluster, start_ms: int, events: int) -> None:
        self.noted: dict[str, float] = {}
        self._directory, self._cluster, self._start_ms, self._events = directory, cluster, start_ms, events
        self._jobs = {}
        for name in ("large", "empty"):
            (directory / name).mkdir()
            job = Job(
                bootstrap,
                _SOURCE,
                f"{name}.output",
                name,
                _PARTITIONS,
                directory / name,
                "snappy",
                100,
                until_done=True,
            )
            self._jobs[name] = job
            cluster.create(job.output, _PARTITIONS)
        cluster.create(_SOURCE, _PARTITIONS)

    def all(self, ids: int, rounds: int) -> Iterator[Run]:
        self._seed(ids)
        expected = self._load(1)
        yield self._run("large", "empty disk, changelog", expected)
        yield self._run("empty", "new", expected)
        for number in range(rounds):
            expected = self._load(2 + number)
            for name in ("empty", "large") if number % 2 else ("large", "empty"):
                yield self._run(name, "kept disk", expected)
        each = self.noted
        each["disk bytes"] = sum(path.stat().st_size for path in self._state().rglob("*") if path.is_file())
        self._kill_in_the_middle()
        yield self._run("large", "after SIGKILL", None)
        self._checkpoint()
        shutil.rmtree(self._state())
        expected = self._load(2 + rounds)
        yield self._run("large", "empty disk, checkpoint", expected, checkpoint=True)
        yield self._run("large", "known events", self._load_known(ids))

    def _state(self) -> Path:
        return self._jobs["large"].state_dir / "large"

    def _seed(self, ids: int) -> None:
        history, job = self._directory / "history", self._jobs["large"]
        history.mkdir()
        began = time.monotonic()
        for number, first in enumerate(range(0, ids, _ROWS_A_FILE)):
            count = min(_ROWS_A_FILE, ids - first)
            pq.write_table(_history(number, count, self._start_ms), history / f"{number:04}.parquet", compression="lz4")
        CANDIDATES[report.OURS].command(job)  # writes the topology file
        self.noted["history made s"] = round(time.monotonic() - began, 1)
        began = time.monotonic()
        line = [_PROGRAM, "spark", "seed", str(job.directory / "large.yaml"), "--history", str(history)]
        line += ["--until", "latest", "--config", str(job.directory / "config.yaml"), "--quiet"]
        line += ["--set", "topics.replication_factor=1", "--set", "topics.min_insync_replicas=1"]
        subprocess.run(line, check=True, cwd=self._directory)
        took_s = time.monotonic() - began
        self.noted |= {"seed s": round(took_s, 1), "seed IDs per s": round(ids / took_s)}
        shutil.rmtree(history)

    def _load(self, seed: int) -> Mapping[bytes, int]:
        workload = Workload(self._events, _PARTITIONS, seed=seed, start_ms=self._start_ms)
        load(self._cluster.bootstrap, _SOURCE, workload, lambda _: None)
        return workload.expected()

    def _load_known(self, ids: int) -> Mapping[bytes, int]:
        """Send events of the history's first file, and as few new ones behind them."""
        sender, time_ms = producer(self._cluster.bootstrap), self._start_ms + GUARD_MS // 4
        known = _uuids(0, min(ids, _ROWS_A_FILE))[:_KNOWN].reshape(-1, 36)
        for each in known:
            send(sender, _SOURCE, event(each.tobytes().decode(), 0, time_ms, ""))
        new = [f"new-{number}" for number in range(_NEW)]
        for name in new:
            send(sender, _SOURCE, event(name, 0, time_ms, ""))
        finish(sender)
        return {name.encode(): time_ms for name in new}

    def _run(self, name: str, what: str, expected: Mapping[bytes, int] | None, *, checkpoint: bool = False) -> Run:
        job = self._jobs[name]
        command, starts = CANDIDATES[report.OURS].command(job), self._cluster.ends(job.output)
        environ = environ_of(command)
        if checkpoint:
            environ["DEDUP_STATE__CHECKPOINT"] = str(self._directory / "checkpoint")
        before = self._consumed(name)
        reader = OutputReader(job.bootstrap, job.output, starts, keep=False)
        began_ms = time.time_ns() // 1_000_000
        with MeasuredProcess(command.arguments, environ, job.directory / "candidate.log") as process:
            while not process.ended:
                time.sleep(_LOOK_EVERY_S)
            used = process.wait(_WITHIN_S)
        if used.exit_code:
            raise process.failed(f"It ended with exit code {used.exit_code}")
        reader.finish(self._cluster.ends(job.output), _WITHIN_S)
        first_ms, last_ms = reader.seen_ms
        kept = OutputReader(job.bootstrap, job.output, starts)
        kept.finish(self._cluster.ends(job.output), _WITHIN_S)
        events = self._consumed(name) - before
        books = self._rest if expected is None else expected
        rate = events / max(last_ms - first_ms, 1) * 1000
        print(f"{what}, {name}: {(first_ms - began_ms) / 1000:.1f} s, {rate:,.0f} events/s", file=sys.stderr)
        return Run(
            what,
            name,
            events,
            (first_ms - began_ms) / 1000,
            rate,
            used.peak_memory_bytes,
            used.cpu_s,
            check(kept.events(), books),
        )

    def _consumed(self, name: str) -> int:
        return sum(self._cluster.committed(name, _SOURCE, range(_PARTITIONS)).values())

    def _kill_in_the_middle(self) -> None:
        """The worker was killed while it judged; what it had not forwarded is what the next run must forward."""
        job = replace(self._jobs["large"], until_done=False)
        expected, starts = dict(self._load(100)), self._cluster.ends(job.output)
        command = CANDIDATES[report.OURS].command(job)
        reader = OutputReader(job.bootstrap, job.output, starts, keep=False)
        with MeasuredProcess(command.arguments, environ_of(command), job.directory / "candidate.log") as process:
            while reader.count < self._events // 10:
                if process.ended:
                    raise process.failed("It ended before it was killed")
                time.sleep(_LOOK_EVERY_S)
        reader.close()
        # Its open transaction is aborted by the next owner; until then a reader cannot pass it.
        seen = OutputReader(job.bootstrap, job.output, starts)
        seen.finish(self._stable_ends(job.output), _WITHIN_S)
        for event_id, _, _ in seen.events():
            expected.pop(event_id)
        self._rest: Mapping[bytes, int] = expected

    def _stable_ends(self, topic: str) -> dict[int, int]:
        reader = Consumer({"bootstrap.servers": self._cluster.bootstrap, "group.id": "ends"})
        try:
            places = [TopicPartition(topic, partition) for partition in range(_PARTITIONS)]
            return {each.partition: reader.get_watermark_offsets(each)[1] for each in places}
        finally:
            reader.close()

    def _checkpoint(self) -> None:
        job = self._jobs["large"]
        line = [_PROGRAM, "checkpoint", str(job.directory / "large.yaml"), "--to", str(self._directory / "checkpoint")]
        line += ["--state-dir", str(self._directory / "checkpoint-state"), "--set", f"brokers={job.bootstrap}"]
        for name in ("first checkpoint s", "second checkpoint s"):
            began = time.monotonic()
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
            self.noted[name] = round(time.monotonic() - began, 1)


def _uuids(number: int, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return `count` UUIDs as text, one a row, the same for the same number."""
    dice = np.random.default_rng((42, number)).integers(0, 256, (count, 16), np.uint8)
    text = np.full((count, 36), ord("-"), np.uint8)
    digits = np.empty((count, 32), np.uint8)
    digits[:, 0::2], digits[:, 1::2] = _HEX[dice >> 4], _HEX[dice & 15]
    text[:, _DIGITS] = digits
    return text


def _history(number: int, count: int, start_ms: int) -> pa.Table:
    """Return records as a source topic would hold them, all from the half hour before the workload begins."""
    ids = _uuids(number, count)
    times_ms = start_ms - GUARD_MS // 2 + np.arange(count, dtype=np.int64) * (GUARD_MS // 2) // count
    template = b'{"event_id":"' + b"-" * 36 + b'","ts":' + b"0" * 13 + b"}"
    values = np.tile(np.frombuffer(template, np.uint8), (count, 1))
    values[:, 13:49], values[:, 56:69] = ids, times_ms.astype("S13").view(np.uint8).reshape(count, 13)
    return pa.table(
        {
            "key": _column(ids),
            "value": _column(values),
            "timestamp": pa.array(times_ms).cast(pa.timestamp("ms", tz="UTC")),
        }
    )


def _column(rows: np.ndarray[Any, np.dtype[np.uint8]]) -> pa.Array:
    count, width = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * width
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(rows))]
    )


if __name__ == "__main__":
    typer.run(main)
