"""Spark, run by run: what a run with a fiftieth of new rows costs, beside one run over all rows.

    python -m bench.spark_incremental                          2,000,000 rows, the last fiftieth new
    python -m bench.spark_incremental --rows 20000000 --every  all 50 runs, one after the other

Rows are those of `bench.spark_batch`: Kafka records in Parquet with their coordinates, in four partitions; 30 % of them
repeat an ID of the last minutes. Two topologies judge them: one whose sightings all count to the end, and one by which
a tenth of them does. Each table is compared with that of one run over everything, verdict by verdict, by a digest.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from bench.spark_batch import PARTITIONS, write_rows
from dedup.spark.incremental import IncrementalReport, incremental
from dedup.spark.incremental_input import NewFiles
from dedup.spark.session import session_for
from dedup.topology.model import Topology
from dedup.topology.parse import parse

RUNS: Final = 50
NOW_MS: Final = 1_800_000_000_000
TOPOLOGY: Final = """
dedup: 1
name: bench
source: {topics: [events], partitioned_by: tracking_id}
tracking_id: {field: event_id}
guard_period: %s
output: {topic: events.unique}
"""
COMPARED: Final = (
    "partition",
    "offset",
    "verdict",
    "stream_time_ms",
    "first_time_ms",
    "first_partition",
    "first_offset",
)


def main(
    *,
    rows: Annotated[int, typer.Option(help="Rows, over all partitions.")] = 2_000_000,
    cores: Annotated[int, typer.Option(help="Threads of the local session.")] = 2,
    every: Annotated[bool, typer.Option("--every", help="All runs one by one, instead of the last alone.")] = False,
    memory: Annotated[str, typer.Option(help="Memory of the driver.")] = "3g",
) -> None:
    """Print seconds of one run over everything, and of the run after it, for each topology."""
    work = Path(tempfile.mkdtemp(prefix="dedup-spark-incremental-"))
    per_file = rows // PARTITIONS // RUNS
    (work / "rows").mkdir()
    write_rows(work / "rows", per_file * PARTITIONS * RUNS, 0.3, per_file)
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": memory,
        "spark.local.dir": str(work),
        "spark.databricks.delta.snapshotPartitions": "2",
    }
    spark = session_for(None, master=f"local[{cores}]", packages=("delta",), conf=conf)
    spark.sparkContext.setLogLevel("ERROR")
    # A record each ms in each partition: retention is twice the guard period.
    tenth_s = max(1, per_file * RUNS // 20_000)
    try:
        _add(work, work / "warm", 0, 1)
        _judge(spark, work / "warm", parse(TOPOLOGY % "1d", name="bench"), work / "warmed")
        for name, guard in (("a tenth of the sightings counts", f"{tenth_s}s"), ("all sightings count", "1d")):
            _measure(spark, work, name, parse(TOPOLOGY % guard, name="bench"), every=every)
    finally:
        spark.stop()
        shutil.rmtree(work)


def _measure(spark: SparkSession, work: Path, name: str, topology: Topology, *, every: bool) -> None:
    whole, bronze, silver = (work / f"{topology.window.guard_ms}-{kind}" for kind in ("whole", "bronze", "silver"))
    _add(work, bronze, 0, RUNS)
    at_once = _judge(spark, bronze, topology, whole)
    shutil.rmtree(bronze)
    seconds = []
    for last in range(1, RUNS + 1) if every else (RUNS - 1, RUNS):
        _add(work, bronze, 0, last)
        report = _judge(spark, bronze, topology, silver)
        seconds.append(report.seconds)
        if every:
            print(f"  run {report.run}: {report.seconds:.1f} s, {report.sightings:,} sightings", flush=True)
    share = seconds[-1] / at_once.seconds
    typer.echo(
        f"{name}: one run over {at_once.new_rows:,} rows {at_once.seconds:.1f} s; "
        f"the last run, {report.new_rows:,} rows, {seconds[-1]:.1f} s = {share:.1%} ({report.sightings:,} sightings)"
    )
    if _digest(spark, whole) != _digest(spark, silver):
        raise SystemExit(f"{name}: the tables differ")
    for each in (whole, bronze, silver):
        shutil.rmtree(each)


def _add(work: Path, directory: Path, first: int, last: int) -> None:
    """Link the files of these runs into the directory, unless they are there."""
    directory.mkdir(exist_ok=True)
    files = sorted((work / "rows").glob("*.parquet"), key=lambda path: path.name.split("-")[1])
    for file in files[first * PARTITIONS : last * PARTITIONS]:
        link = directory / file.name
        if not link.exists():
            link.hardlink_to(file)


def _judge(spark: SparkSession, bronze: Path, topology: Topology, out: Path) -> IncrementalReport:
    source = NewFiles(spark, [str(bronze)], "parquet")
    return incremental(source, topology, str(out), now_ms=NOW_MS, say=lambda _: None)


def _digest(spark: SparkSession, table: Path) -> Any:  # noqa: ANN401 - a row
    """Return the number of rows and a sum of their hashes, which does not depend on their order."""
    hashed = F.xxhash64(*(F.coalesce(F.col(name).cast("string"), F.lit("-")) for name in COMPARED))
    rows = spark.read.format("delta").load(str(table))
    return rows.agg(F.count(F.lit(1)), F.sum(hashed.cast("decimal(20,0)"))).first()


if __name__ == "__main__":
    typer.run(main)
