"""Spark, the Python code before and after a shuffle alone: CPU-s by the number of reduce tasks.

    python -m bench.spark_readers                        2,000,000 rows, 8 and 2,000 reduce tasks, 3 rounds

One map task packs all rows. The packed values are then judged in 8 parts, as if each part were the values that one
reduce task receives from many map tasks: each reduce task judges the same number of rows, whatever their number.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import typer

from bench.spark_batch import SCHEMA, TOPOLOGY, write_rows
from dedup.spark.columns import RECORDS
from dedup.spark.files import read_splits
from dedup.spark.map_side import TARGET, MapPlan, map_rows
from dedup.spark.reduce_side import ReducePlan, reduce_rows
from dedup.topology.parse import parse

PARTS = 8
NOW_MS = 1_800_000_000_000


def main(
    *,
    rows: Annotated[int, typer.Option(help="Rows of one map task.")] = 2_000_000,
    readers: Annotated[int, typer.Option(help="Reduce tasks, compared with 8.")] = 2_000,
    rounds: Annotated[int, typer.Option(help="Each measured so often, in turn.")] = 3,
) -> None:
    """Print the CPU-s of the map task and of all reduce tasks, and their ratio."""
    # As the workers of dedup's sessions (`dedup.spark.session`).
    pa.set_memory_pool(pa.system_memory_pool())
    with tempfile.TemporaryDirectory(prefix="dedup-spark-readers-") as directory:
        write_rows(Path(directory), rows, 0.3)
        splits = [{"file": f"file:{file}", "row_group": 0} for file in sorted(Path(directory).glob("*.parquet"))]
        batches = list(read_splits(SCHEMA.names, splits))
    for _ in range(rounds):
        few, many = _cpu_s(batches, PARTS), _cpu_s(batches, readers)
        shown = [f"{map_s:.2f} + {reduce_s:.2f}" for map_s, reduce_s in (few, many)]
        print(f"{PARTS}: {shown[0]} CPU-s, {readers:,}: {shown[1]}, {sum(many) / sum(few):.2f} times", flush=True)


def _cpu_s(batches: list[pa.RecordBatch], readers: int) -> tuple[float, float]:
    topology, began_s = parse(TOPOLOGY, name="bench"), time.process_time()
    *packed, notices = map_rows(MapPlan(topology, "direct", NOW_MS, tuple(range(readers))), iter(batches))
    mapped_s = time.process_time()
    parts: list[list[pa.RecordBatch]] = [[] for _ in range(PARTS)]
    for value in packed:
        parts[value.column(TARGET)[0].as_py() % PARTS].append(value)
    plan, judged, reduced_s = ReducePlan(topology, "direct", RECORDS.names), 0, time.process_time()
    for part in parts:
        judged += sum(rows.num_rows for rows in reduce_rows(plan, iter([*part, notices.slice(0, 1)])))
    ended_s = time.process_time()
    assert judged == sum(batch.num_rows for batch in batches), judged
    return mapped_s - began_s, ended_s - reduced_s


if __name__ == "__main__":
    typer.run(main)
