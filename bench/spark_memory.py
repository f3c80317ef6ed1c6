"""Peak memory of one reduce task of `dedup spark backfill`: a million rows of 1 KB, without ties and all tied.

    python -m bench.spark_memory
    python -m bench.spark_memory --rows 200000

A map task's function packs the rows into a file; a process of its own then judges them as a Spark worker would, from
the file in batches, and says its peak anonymous memory. Tied rows have one ID and one event time each pair.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Final
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import typer

from dedup.spark.columns import RECORDS
from dedup.spark.map_side import MapPlan, map_rows
from dedup.spark.reduce_side import ReducePlan, reduce_rows
from dedup.topology.parse import parse

TOPOLOGY: Final = """
dedup: 1
name: memory
source: {topics: [events], partitioned_by: tracking_id}
tracking_id: {field: id}
event_time: record
guard_period: 1h
output: {topic: events.unique}
"""
NOW_MS: Final = 1_800_000_000_000
_AT_ONCE: Final = 10_000
_VALUE_BYTES: Final = 1_000
_MIB: Final = 1 << 20


def _made(rows: int, *, tied: bool) -> Iterator[pa.RecordBatch]:
    random = np.random.default_rng(1)
    for begin in range(0, rows, _AT_ONCE):
        count = min(_AT_ONCE, rows - begin)
        numbers = range(begin, begin + count)
        pads = random.integers(0, 16, (count, _VALUE_BYTES), np.uint8)
        hexed = np.frombuffer(b"0123456789abcdef", np.uint8)[pads]
        values = [
            b'{"id":%d,"pad":"%s"}' % (number // 2 if tied else number, pad.tobytes())
            for number, pad in zip(numbers, hexed, strict=True)
        ]
        times = [NOW_MS - 1_000_000 + (number // 2 if tied else number) for number in numbers]
        headers = pa.ListArray.from_arrays(
            pa.array(np.zeros(count + 1, np.int32)),
            pa.array([], pa.struct([("key", pa.string()), ("value", pa.binary())])),
        )
        columns = [
            pa.nulls(count, pa.binary()),
            pa.array(values, pa.binary()),
            headers,
            pa.array(times, pa.int64()),
            pa.nulls(count, pa.string()),
            pa.nulls(count, pa.int32()),
            pa.nulls(count, pa.int64()),
        ]
        yield pa.RecordBatch.from_arrays(columns, RECORDS.names)


def _judge(file: Path) -> None:
    """Judge the packed rows of a file, and print the peak memory in bytes."""
    topology = parse(TOPOLOGY, name="memory.yaml")
    judge = partial(reduce_rows, ReducePlan(topology, "event_time", RECORDS.names))
    peak, over = [0], threading.Event()

    def watch() -> None:
        # Pages of the file of spilled rows are the system's to take back: only the process's own memory counts.
        while not over.wait(0.005):
            status = Path("/proc/self/status").read_text(encoding="ascii")
            peak[0] = max(peak[0], int(status.partition("RssAnon:")[2].split()[0]) * 1024)

    watching = threading.Thread(target=watch)
    watching.start()
    with pa.ipc.open_stream(file.open("rb")) as packed:
        rows = sum(batch.num_rows for batch in judge(packed))
    over.set()
    watching.join()
    print(rows, peak[0])


def main(
    *,
    rows: Annotated[int, typer.Option(help="Rows to judge in one task.")] = 1_000_000,
    judge: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print the peak memory without ties and with all rows tied."""
    if judge is not None:
        _judge(judge)
        return
    topology = parse(TOPOLOGY, name="memory.yaml")
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as directory, patch("dedup.spark.map_side.TaskContext") as context:
            context.get.return_value = None
            pack = partial(map_rows, MapPlan(topology, "event_time", NOW_MS, (0,), 10_000))
            file = Path(directory) / "packed"
            writer = None
            with file.open("wb") as out:
                for batch in pack(_made(rows, tied=tied)):
                    writer = writer or pa.ipc.new_stream(out, batch.schema)
                    writer.write_batch(batch)
                if writer is not None:
                    writer.close()
            command = [sys.executable, "-m", "bench.spark_memory", "--judge", str(file)]
            counted, peak = map(int, subprocess.run(command, check=True, capture_output=True).stdout.split())
        print(f"{'all tied' if tied else 'no tie'}: {counted:,} rows, peak {peak / _MIB:,.0f} MiB")


if __name__ == "__main__":
    typer.run(main)
