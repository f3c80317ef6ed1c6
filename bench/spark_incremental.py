"""Spark, run by run: what a run with a fiftieth of new rows costs, beside one run over all rows.

    python -m bench.spark_incremental                          2,000,000 rows, the last fiftieth new
    python -m bench.spark_incremental --rows 20000000 --every  all 50 runs, one after the other
    python -m bench.spark_incremental --rows 20000000 --seed 1 50 runs of random sizes; a third of them is broken off
                                                               and run again; compared with the model, too

Rows are those of `bench.spark_batch`: Kafka records in Parquet with their coordinates, in four partitions; 30 % of them
repeat an ID of the last minutes. Two topologies judge them: one whose sightings all count to the end, and one by which
a tenth of them does. Each table is compared with that of one run over everything, verdict by verdict, by a digest.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from bench.spark_batch import PARTITIONS, write_rows
from dedup.core.reference_model import ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import Source
from dedup.spark.incremental import IncrementalReport, OutputTable, incremental
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
FILES: Final = 8
"""Files of a partition for each run, if runs are cut at random."""
BROKEN: Final = 0.35
POINTS: Final = ("begin", "keep_state", "commit")
COMPARED: Final = {
    "partition": pa.int32(),
    "offset": pa.int64(),
    "verdict": pa.string(),
    "stream_time_ms": pa.int64(),
    "first_time_ms": pa.int64(),
    "first_partition": pa.int32(),
    "first_offset": pa.int64(),
}


def main(
    *,
    rows: Annotated[int, typer.Option(help="Rows, over all partitions.")] = 2_000_000,
    cores: Annotated[int, typer.Option(help="Threads of the local session.")] = 2,
    every: Annotated[bool, typer.Option("--every", help="All runs one by one, instead of the last alone.")] = False,
    seed: Annotated[int | None, typer.Option(help="Cut and break off all runs at random, by this seed.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of the driver.")] = "3g",
) -> None:
    """Print seconds of one run over everything, and of the run after it, for each topology."""
    work = Path(tempfile.mkdtemp(prefix="dedup-spark-incremental-"))
    per_file = rows // PARTITIONS // RUNS // (1 if seed is None else FILES)
    (work / "rows").mkdir()
    write_rows(work / "rows", rows // PARTITIONS // per_file * per_file * PARTITIONS, 0.3, per_file)
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
    tenth_s = max(1, rows // PARTITIONS // 20_000)
    try:
        for last in (1, 2):
            _add(work, work / "warm", last * PARTITIONS)
            _judge(spark, work / "warm", parse(TOPOLOGY % "1d", name="bench"), work / "warmed")
        for name, guard in (("a tenth of the sightings counts", f"{tenth_s}s"), ("all sightings count", "1d")):
            topology = parse(TOPOLOGY % guard, name="bench")
            if seed is None:
                _measure(spark, work, name, topology, every=every)
            else:
                _prove(spark, work, name, topology, random.Random(seed))
    finally:
        spark.stop()
        shutil.rmtree(work)


def _measure(spark: SparkSession, work: Path, name: str, topology: Topology, *, every: bool) -> None:
    whole, bronze, silver = (work / f"{topology.window.guard_ms}-{kind}" for kind in ("whole", "bronze", "silver"))
    _add(work, bronze, RUNS * PARTITIONS)
    at_once = _judge(spark, bronze, topology, whole)
    shutil.rmtree(bronze)
    seconds = []
    for last in range(1, RUNS + 1) if every else (RUNS - 1, RUNS):
        _add(work, bronze, last * PARTITIONS)
        report = _judge(spark, bronze, topology, silver)
        seconds.append(report.seconds)
        if every:
            print(f"  run {report.run}: {report.seconds:.1f} s, {report.sightings:,} sightings", flush=True)
    share = seconds[-1] / at_once.seconds
    typer.echo(
        f"{name}: one run over {at_once.new_rows:,} rows {at_once.seconds:.1f} s; "
        f"the last run, {report.new_rows:,} rows, {seconds[-1]:.1f} s = {share:.1%} ({report.sightings:,} sightings)"
    )
    one, many = (_digest(spark.read.format("delta").load(str(table))) for table in (whole, silver))
    if one != many:
        raise SystemExit(f"{name}: the tables differ")
    for each in (whole, bronze, silver):
        shutil.rmtree(each)


def _prove(spark: SparkSession, work: Path, name: str, topology: Topology, dice: random.Random) -> None:
    """Compare the table of many runs, some of them broken off and run again, with one run over all and the model."""
    whole, bronze, silver = (work / f"{topology.window.guard_ms}-{kind}" for kind in ("whole", "bronze", "silver"))
    files = len(list((work / "rows").iterdir()))
    _add(work, bronze, files)
    _judge(spark, bronze, topology, whole)
    shutil.rmtree(bronze)
    broken = 0
    cuts = sorted(dice.sample(range(1, files), RUNS - 1))
    for number, last in enumerate([*cuts, files], 1):
        _add(work, bronze, last)
        if dice.random() < BROKEN:
            broken += 1
            _break_off(spark, bronze, topology, silver, dice.choice(POINTS), after=dice.random() < 0.5)
        report = _judge(spark, bronze, topology, silver)
        if report.run != number:
            raise SystemExit(f"{name}: run {number} says that it is run {report.run}")
    _by_model(sorted((work / "rows").iterdir()), topology, work / "model")
    one, many = (_digest(spark.read.format("delta").load(str(table))) for table in (whole, silver))
    model = _digest(spark.read.parquet(str(work / "model")))
    if not one == many == model:
        raise SystemExit(f"{name}: one run {one}, {RUNS} runs {many}, the model {model}")
    print(f"{name}: {RUNS} runs ({broken} broken off and run again), one run, and the model agree on {one[0]:,} rows")
    for each in (whole, bronze, silver, work / "model"):
        shutil.rmtree(each)


class _BrokenOff(Exception):
    """What a run meets at a named point."""


def _break_off(spark: SparkSession, bronze: Path, topology: Topology, out: Path, point: str, *, after: bool) -> None:
    """Run until the point, before or after what happens there, and no further."""
    real = getattr(OutputTable, point)

    def broken(*arguments: Any) -> None:  # noqa: ANN401 - those of the point
        if after:
            real(*arguments)
        raise _BrokenOff

    setattr(OutputTable, point, broken)
    try:
        _judge(spark, bronze, topology, out)
    except _BrokenOff:
        return
    finally:
        setattr(OutputTable, point, real)
    raise SystemExit(f"no run came to {point}")


def _by_model(files: Sequence[Path], topology: Topology, directory: Path) -> None:
    """Write the model's verdicts as Parquet; each partition is a task of its own."""
    directory.mkdir()
    rules = ModelRules(topology.window.guard_ms, topology.window.grace_ms)
    tasks = [ReferenceModel(rules, [(0, partition)]) for partition in range(PARTITIONS)]
    for file in files:
        rows: dict[str, list[Any]] = {name: [] for name in COMPARED}
        read = pq.read_table(file, columns=["value", "timestamp_ms", "partition", "offset"])
        for value, time_ms, partition, offset in zip(*(column.to_pylist() for column in read.columns), strict=True):
            key = orjson.loads(value)["event_id"].encode()
            found = tasks[partition].judge(ModelRecord(key, time_ms, Source(0, partition, offset)))
            first = (None,) * 3 if found.of is None else (found.of.first_ms, *found.of.source[1:])
            row = (partition, offset, found.kind, found.stream_time_ms, *first)
            for name, cell in zip(COMPARED, row, strict=True):
                rows[name].append(cell)
        tasks[partition].forget()
        pq.write_table(pa.table(rows, schema=pa.schema(list(COMPARED.items()))), directory / file.name)


def _add(work: Path, directory: Path, files: int) -> None:
    """Link the first files into the directory, in the order of their first offsets."""
    directory.mkdir(exist_ok=True)
    for file in sorted((work / "rows").glob("*.parquet"), key=lambda path: path.name.split("-")[1])[:files]:
        link = directory / file.name
        if not link.exists():
            link.hardlink_to(file)


def _judge(spark: SparkSession, bronze: Path, topology: Topology, out: Path) -> IncrementalReport:
    source = NewFiles(spark, [str(bronze)], "parquet")
    return incremental(source, topology, str(out), now_ms=NOW_MS, say=lambda _: None)


def _digest(rows: DataFrame) -> Any:  # noqa: ANN401 - a row
    """Return the number of rows and a sum of their hashes, which does not depend on their order."""
    hashed = F.xxhash64(*(F.coalesce(F.col(name).cast("string"), F.lit("-")) for name in COMPARED))
    return rows.agg(F.count(F.lit(1)), F.sum(hashed.cast("decimal(20,0)"))).first()


if __name__ == "__main__":
    typer.run(main)
