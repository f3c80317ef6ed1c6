"""Spark batch: rows judged a second, beside Spark's own `dropDuplicates` on the same rows in the same session, DuckDB
and Polars.

    python -m bench.spark_batch                        5,000,000 rows on 2 cores
    python -m bench.spark_batch --rows 1000000 --cores 1

Rows are Kafka records in Parquet with their coordinates, written in the log's order: JSON of about 160 bytes with a
UUID, of which 30 per cent repeat an ID of the last minutes. `dropDuplicates` reads the ID by
`get_json_object`; it keeps any one record of an ID for all time, knows no guard period, no late record and no dead
letter, and does not say which rows it left out. DuckDB and Polars (`bench/peers/mark_first.py`, in processes of their
own with as many threads) mark the first record of each ID and write every row, without a guard period either. Every
verdict is counted against what the generator knows.

With `--shuffled`, the files hold the same rows in no order. "With a shuffle" is what the backfill does where row groups
hold several Kafka partitions.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from bench.build_peers import tables_python
from dedup.spark.backfill import backfill
from dedup.spark.batch_verdicts import judging
from dedup.spark.files import read_files
from dedup.spark.session import session_for
from dedup.topology.model import Topology
from dedup.topology.parse import parse

BASE_MS: Final = 1_700_000_000_000
PARTITIONS: Final = 4
FILE_ROWS: Final = 250_000
REPEATS: Final = 0.3
"""Share of records that repeat an ID."""
TOPOLOGY: Final = """
dedup: 1
name: bench
source: {topics: [events], partitioned_by: tracking_id}
tracking_id: {field: event_id}
guard_period: 1d
output: {topic: events.unique}
"""
SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp_ms", pa.int64()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
    ]
)


def write_rows(directory: Path, rows: int, repeats: float, file_rows: int = FILE_ROWS) -> int:
    """Write the records of each partition to files of its own; return how many IDs there are."""
    dice = np.random.default_rng(7)
    fresh = 0
    for partition in range(PARTITIONS):
        for first in range(0, rows // PARTITIONS, file_rows):
            count = min(file_rows, rows // PARTITIONS - first)
            again = dice.random(count) < repeats
            again[0] = False
            number = fresh + np.cumsum(~again) - 1
            back = dice.integers(0, 1_000, count)
            number = np.where(again, np.maximum(fresh, number - back), number)
            fresh += int((~again).sum())
            _write_file(directory / f"{partition}-{first:010}.parquet", partition, first, number)
    return fresh


def _write_file(path: Path, partition: int, first: int, numbers: np.ndarray) -> None:
    offsets = np.arange(first, first + len(numbers))
    ids = [_uuid(number) for number in numbers.tolist()]
    pad = "x" * 60
    values = [
        f'{{"event_id":"{name}","amount":{at % 1000},"user":"user-{at % 5000}","pad":"{pad}"}}'.encode()
        for name, at in zip(ids, offsets.tolist(), strict=True)
    ]
    columns = [
        [name.encode() for name in ids],
        values,
        BASE_MS + offsets,
        ["events"] * len(ids),
        np.full(len(ids), partition, np.int32),
        offsets,
    ]
    pq.write_table(pa.table(columns, schema=SCHEMA), path)


def shuffle_files(source: Path, directory: Path) -> None:
    """Write the same rows to as many files in no order."""
    rows = pq.read_table(source)
    order = np.random.default_rng(3).permutation(rows.num_rows)
    files = len(list(source.glob("*.parquet")))
    for at in range(files):
        pq.write_table(rows.take(pa.array(order[at::files])), directory / f"{at:03}.parquet")


def _uuid(number: int) -> str:
    # Multiplied by an odd number, so that neighbours are not neighbours in the sort.
    text = f"{number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128):032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _timed(what: Callable[[], None]) -> tuple[float, float]:
    """Return seconds, and CPU seconds of this process, the JVM and the Python workers below it, and what it waits for.

    A worker that ends meanwhile was idle for a minute: what it had used before does not count, nor may it be taken off.
    """
    began, before, children = time.monotonic(), cpu_seconds(), resource.getrusage(resource.RUSAGE_CHILDREN)
    what()
    seconds, ended = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    waited_s = ended.ru_utime + ended.ru_stime - children.ru_utime - children.ru_stime
    return seconds, waited_s + sum(used_s - before.get(pid, 0.0) for pid, used_s in cpu_seconds().items())


def cpu_seconds() -> dict[int, float]:
    """Return what this process and each that descends from it has used itself; empty where there is no /proc."""
    used: dict[int, tuple[int, int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        used[int(file.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    found: dict[int, float] = {}
    mine = {os.getpid()}
    while mine:
        found |= {pid: used[pid][1] / os.sysconf("SC_CLK_TCK") for pid in mine if pid in used}
        mine = {pid for pid, (parent, _) in used.items() if parent in mine}
    return found


def _builtin(spark: SparkSession, rows: Path) -> DataFrame:
    found = spark.read.parquet(str(rows))
    return found.withColumn("id", F.get_json_object(F.col("value").cast("string"), "$.event_id")).dropDuplicates(["id"])


def main(
    *,
    rows: Annotated[int, typer.Option(help="Rows, over all partitions.")] = 5_000_000,
    cores: Annotated[int, typer.Option(help="Threads of the local session.")] = 2,
    rounds: Annotated[int, typer.Option(help="Each measured so often, in turn; the first round is left out.")] = 2,
    shuffle: Annotated[int, typer.Option(help="Shuffle partitions.")] = 8,
    shuffled: Annotated[bool, typer.Option("--shuffled", help="Read the rows in no order.")] = False,
    only: Annotated[str, typer.Option(help="Candidates, separated by semicolons; all where empty.")] = "",
    directory: Annotated[str, typer.Option(help="Keeps the rows for the next run.")] = "",
) -> None:
    """Print rows/s of each candidate and round."""
    work = Path(tempfile.mkdtemp(prefix="dedup-spark-bench-"))
    kept = Path(directory) if directory else work
    source = kept / f"rows-{rows}"
    if not (source / "_ids").exists():
        source.mkdir(parents=True, exist_ok=True)
        (source / "_ids").write_text(str(write_rows(source, rows, REPEATS)))
    ids = int((source / "_ids").read_text())
    if shuffled:
        in_order, source = source, kept / f"{source.name}-shuffled"
        if not (source / "_ids").exists():
            source.mkdir(exist_ok=True)
            shuffle_files(in_order, source)
            (source / "_ids").write_text(str(ids))
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(shuffle),
        "spark.driver.memory": "4g",
        "spark.local.dir": str(work),
    }
    topology = parse(TOPOLOGY, name="bench")
    tables_python()
    spark = session_for(topology, master=f"local[{cores}]", conf=conf)
    print(json.dumps({"pyspark": spark.version, "dropDuplicates": inspect.getsource(_builtin)}), flush=True)
    spark.sparkContext.setLogLevel("ERROR")
    try:
        for number in range(rounds + 1):
            _round(spark, topology, source, work / str(number), (rows, ids, number, cores), only)
    finally:
        spark.stop()
        shutil.rmtree(work)


def _round(
    spark: SparkSession, topology: Topology, source: Path, out: Path, numbers: tuple[int, int, int, int], only: str
) -> None:
    rows, ids, number, cores = numbers
    out.mkdir()
    files = str(source / "*.parquet")
    candidates: dict[str, Callable[[], None]] = {
        "dropDuplicates, nowhere": lambda: _nowhere(_builtin(spark, source)),
        "dedup, nowhere": lambda: _nowhere(_judged(spark, topology, files)),
        "dropDuplicates, Parquet": lambda: _builtin_written(spark, source, out, ids),
        "DuckDB, Parquet": lambda: _marked("duckdb", source, out, (rows, ids, cores)),
        "Polars, Parquet": lambda: _marked("polars", source, out, (rows, ids, cores)),
        "dedup backfill, Parquet": lambda: _backfill(spark, topology, files, out / "dedup", (rows, ids)),
        "dedup backfill with a shuffle, Parquet": lambda: _backfill(
            spark, topology, files, out / "shuffled", (rows, ids), shuffled=True
        ),
    }
    for name, what in candidates.items():
        if only and name not in only.split(";"):
            continue
        seconds, cpu_s = _timed(what)
        kind = "warm-up" if number == 0 else f"round {number}"
        shown = {"what": name, "round": kind, "rows": rows, "cores": cores, "seconds": round(seconds, 2)}
        print(json.dumps({**shown, "cpu_s": round(cpu_s, 1), "rows_per_s": round(rows / seconds)}), flush=True)


def _judged(spark: SparkSession, topology: Topology, files: str) -> DataFrame:
    history = read_files(spark, [files], "parquet")
    found = judging(history, topology, now_ms=int(time.time() * 1000))
    return found.frame()


def _backfill(
    spark: SparkSession, topology: Topology, files: str, out: Path, numbers: tuple[int, int], *, shuffled: bool = False
) -> None:
    rows, ids = numbers
    history = read_files(spark, [files], "parquet")
    if shuffled and history.pieces is not None:
        history = replace(history, pieces=replace(history.pieces, logs=()))
    report = backfill(history, topology, str(out), say=lambda _: None)
    assert report.verdicts == {"duplicate": rows - ids, "unique": ids}, report.verdicts


def _builtin_written(spark: SparkSession, rows: Path, out: Path, ids: int) -> None:
    _builtin(spark, rows).write.parquet(str(out / "builtin"))
    found = spark.read.parquet(str(out / "builtin")).count()
    assert found == ids, found


def _marked(engine: str, source: Path, out: Path, numbers: tuple[int, int, int]) -> None:
    rows, ids, cores = numbers
    script, made = Path(__file__).parent / "peers" / "mark_first.py", out / f"{engine}.parquet"
    line = [tables_python(), str(script), engine, str(source / "*.parquet"), str(made), str(cores)]
    found = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    assert found["counts"] == {"duplicate": rows - ids, "unique": ids}, found
    print(json.dumps({"what": engine} | found), flush=True)


def _nowhere(df: DataFrame) -> None:
    df.write.format("noop").mode("overwrite").save()


if __name__ == "__main__":
    typer.run(main)
