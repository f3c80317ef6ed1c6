"""Large state: one worker with 100,000,000 known IDs in 4 partitions, compared with the same worker without any.

    python -m bench.large_state                      100,000,000 IDs, 2 rounds of 2,000,000 events; 20 GB of disk

The sightings are written to the changelog as a worker writes them: the same bytes, in transactions with the same IDs.
(`dedup spark seed` would do it too, at some 70,000 IDs/s on 2 cores.) Then the worker is started on an empty disk
(restore from the changelog), in turn with a worker of another name that knows nothing, on the same events; after a
SIGTERM, after a SIGKILL; on an empty disk with a checkpoint; and at last on events that are all known. Every output is
counted and compared.
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
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final
from uuid import UUID

import numpy as np
import typer
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as Place
from rich.table import Table

from bench import report, stage
from bench.candidates import CANDIDATES, Job, environ_of
from bench.cluster import Cluster
from bench.process import MeasuredProcess
from bench.reader import Exactness, OutputReader, check
from bench.workload import GUARD_MS, Workload, event, finish, load, producer, send
from dedup.core.tracking_id import encode_text, state_key
from dedup.kafka.client import KafkaWire
from dedup.kafka.record_batch import OWN_ROW, Line, fill
from dedup.kafka.topic_admin import on_cluster
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import TopicPartition
from dedup.settings import load_settings
from dedup.store.changelog import TASK_RECORD_KEY, encode_single_column, encode_task_record
from dedup.topology.model import Topology
from dedup.topology.parse import parse
from dedup.worker.dedup_task import sighting_batches
from dedup.worker.restore import last_task_record

_IDS_A_COMMIT: Final = 50_000
_SOURCE: Final = "large.source"
_PARTITIONS: Final = 4
_NEW: Final = 1_000
_WITHIN_S: Final = 1800.0
_LOOK_EVERY_S: Final = 0.02
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
    rounds: Annotated[int, typer.Option(help="Rounds with a restart between them.")] = 2,
    bootstrap: Annotated[str, typer.Option(help="A running broker; without it an embedded one is started.")] = "",
) -> None:
    """Fill the state, run the worker on it in every way, print a table, and write the result file."""
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
        self._fill(ids)
        expected = self._load(1)
        yield self._run("large", "empty disk, changelog", expected)
        yield self._run("empty", "new", {**self._firsts, **expected})
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
        yield self._run("large", "known events", self._load_known())

    def _state(self) -> Path:
        return self._jobs["large"].state_dir / "large"

    def _fill(self, ids: int) -> None:
        """The changelog has the sightings of these IDs, and the disk has none of them."""
        self._firsts = self._load_new(_NEW)
        self._run("large", "topics made", self._firsts)
        job = self._jobs["large"]
        topology = parse((job.directory / "large.yaml").read_text(encoding="utf-8"), name="large.yaml")
        settings = load_settings(job.directory / "config.yaml", [], {})
        began = time.monotonic()
        on_cluster(settings, "bench-fill", lambda wire, _: self._write(topology, wire, ids))
        took_s = time.monotonic() - began
        self.noted |= {"fill s": round(took_s, 1), "fill IDs per s": round(ids / took_s)}
        shutil.rmtree(self._state())

    async def _write(self, topology: Topology, wire: KafkaWire, ids: int) -> None:
        for partition in range(_PARTITIONS):
            changelog = TopicPartition(topology.changelog_topic, partition)
            name = topology.grouped_by(1).transactional_id("dedup", partition)
            session = Session(wire, name, topology.name, timeout_ms=60_000, deadline_ms=60_000)
            record = await last_task_record(wire, changelog)
            assert record is not None
            await session.open()
            now_ms, count = time.time_ns() // 1_000_000, ids // _PARTITIONS
            for first in range(0, count, _IDS_A_COMMIT):
                writes = self._sightings(topology, partition, first, min(_IDS_A_COMMIT, count - first), count)
                session.add(sighting_batches(changelog, writes, now_ms=now_ms, compression="snappy"))
                line: Line = (OWN_ROW, now_ms, TASK_RECORD_KEY, encode_task_record(record), [])
                session.add(fill(changelog, [line], compression="none"))
                await session.commit({})
            await session.drop()

    def _sightings(
        self, topology: Topology, partition: int, first: int, count: int, every: int
    ) -> dict[int, dict[bytes, bytes]]:
        keys = _keys(partition, first, count)
        span_ms = GUARD_MS // 2
        times_ms = self._start_ms - span_ms + np.arange(first, first + count, dtype=np.int64) * span_ms // every
        values = encode_single_column(times_ms, 0, partition, np.arange(first, first + count))
        segments = times_ms - times_ms % topology.window.segment_ms
        cuts = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), count]
        return {
            int(segments[low]): dict(zip(keys[low:high], values[low:high], strict=True)) for low, high in pairwise(cuts)
        }

    def _load(self, seed: int) -> Mapping[bytes, int]:
        workload = Workload(self._events, _PARTITIONS, seed=seed, start_ms=self._start_ms)
        load(self._cluster.bootstrap, _SOURCE, workload, lambda _: None)
        return workload.expected()

    def _load_known(self) -> Mapping[bytes, int]:
        """Send events of which the state knows the IDs, and a few new ones behind them."""
        sender, time_ms = producer(self._cluster.bootstrap), self._start_ms
        for partition in range(_PARTITIONS):
            for key in _keys(partition, 0, _IDS_A_COMMIT):
                # The IDs were dealt out without regard to the partitioner, so the partition is named.
                name = str(UUID(bytes=key[1:]))
                one = event(name, 0, time_ms, "")
                sender.produce(_SOURCE, one.value, one.event_id, partition, timestamp=time_ms)
            sender.flush()
        finish(sender)
        return self._load_new(2 * _NEW)

    def _load_new(self, count: int) -> Mapping[bytes, int]:
        sender, time_ms = producer(self._cluster.bootstrap), self._start_ms
        names = [f"new-{count}-{number}" for number in range(count)]
        for name in names:
            send(sender, _SOURCE, event(name, 0, time_ms, ""))
        finish(sender)
        return {name.encode(): time_ms for name in names}

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
            places = [Place(topic, partition) for partition in range(_PARTITIONS)]
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


def _keys(partition: int, first: int, count: int) -> list[bytes]:
    """Return the state keys of random UUIDs, the same for the same arguments."""
    table = np.empty((count, 17), np.uint8)
    table[:, 0] = state_key(encode_text(str(UUID(int=0))))[0]
    table[:, 1:] = np.random.default_rng((42, partition, first)).integers(0, 256, (count, 16), np.uint8)
    keys: list[bytes] = table.view("V17")[:, 0].tolist()
    return keys


if __name__ == "__main__":
    typer.run(main)
