"""Verdicts written to Parquet where they were judged: by Arrow, in the task itself.

A task writes files under names of its own attempt and tells which; the driver moves those that were told of to where
they are to be read. What a failed or a second attempt wrote is never among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Batches = Iterator[pa.RecordBatch]
Judge = Callable[[Iterable[pa.RecordBatch]], Batches]

CODECS: Final = {
    "snappy": "snappy",
    "none": "none",
    "uncompressed": "none",
    "gzip": "gzip",
    "zstd": "zstd",
    "lz4_raw": "lz4",
    "brotli": "brotli",
}
"""Spark's names, and Arrow's."""
_WRITTEN: Final = "file string, verdict string"
_GROUP_ROWS: Final = 131_072
_REPEATING: Final = ("topic", "partition", "reason", "detail", "dedup_partition", "first_topic", "first_partition")
"""Columns of few values, worth a dictionary."""


def codec_of(spark: SparkSession) -> str | None:
    """Return Arrow's name of the codec that Spark is set to; None for one that Arrow lacks."""
    name = spark.conf.get("spark.sql.parquet.compression.codec") or "snappy"
    return CODECS.get(name.lower())


def write_files(parcels: DataFrame, judge: Judge, attempt: Path, codec: str) -> int:
    """The verdicts are files in `attempt`, in a directory each; return how many files there are."""
    work = attempt / "_work"
    work.mkdir(parents=True)
    run = _writing(judge, work, codec)
    files = parcels.mapInArrow(run, _WRITTEN).collect()
    for row in files:
        place = attempt / f"verdict={row['verdict']}"
        place.mkdir(exist_ok=True)
        (work / row["file"]).rename(place / row["file"])
    for left in work.iterdir():
        left.unlink()
    work.rmdir()
    return len(files)


def _writing(judge: Judge, work: Path, codec: str) -> Judge:
    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        attempt = uuid4().hex
        found: dict[str, pq.ParquetWriter] = {}
        with ExitStack() as stack:
            for judged in judge(batches):
                verdicts = judged.column("verdict")
                rows = judged.drop_columns(["verdict"])
                for verdict in verdicts.unique().to_pylist():
                    mine = rows.filter(pc.equal(verdicts, verdict))
                    if verdict not in found:
                        writer = pq.ParquetWriter(
                            work / _name(verdict, attempt),
                            mine.schema,
                            compression=codec,
                            use_dictionary=[name for name in _REPEATING if name in mine.schema.names],
                        )
                        found[verdict] = stack.enter_context(writer)
                    found[verdict].write_batch(mine, row_group_size=_GROUP_ROWS)
        names = [_name(verdict, attempt) for verdict in found]
        yield pa.RecordBatch.from_pydict(
            {"file": pa.array(names, pa.string()), "verdict": pa.array(list(found), pa.string())}
        )

    return run


def _name(verdict: str, attempt: str) -> str:
    return f"part-{verdict}-{attempt}.parquet"
