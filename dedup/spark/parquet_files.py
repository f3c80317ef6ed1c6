"""Verdicts written to Parquet where they were judged: by Arrow, in the task itself.

A task writes files under names of its own attempt and tells which; the driver moves those that were told of to where
they are to be read. What a failed or a second attempt wrote is never among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self
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
_GROUP_BYTES: Final = 64 << 20
_REPEATING: Final = ("topic", "partition", "reason", "detail", "dedup_partition", "first_topic", "first_partition")
"""Columns of few values, worth a dictionary."""
_WITHOUT_STATISTICS: Final = frozenset({"value", "headers", "detail"})
"""Nobody looks for a record by its least value."""


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


class _VerdictFile:
    """The file of one verdict and attempt; rows are gathered into groups of a size that readers like."""

    def __init__(self, path: Path, schema: pa.Schema, codec: str) -> None:
        self._writer: Final = pq.ParquetWriter(
            path,
            schema,
            compression=codec,
            use_dictionary=[name for name in _REPEATING if name in schema.names],
            write_statistics=[name for name in schema.names if name not in _WITHOUT_STATISTICS],
        )
        self._held: Final[list[pa.RecordBatch]] = []
        self._rows = 0
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write()
        self._writer.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """The rows will be in the file."""
        self._held.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        # Each call begins a row group of its own.
        if self._held:
            self._writer.write_table(pa.Table.from_batches(self._held), row_group_size=max(self._rows, 1))
            self._held.clear()
            self._rows = self._bytes = 0


def _writing(judge: Judge, work: Path, codec: str) -> Judge:
    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        attempt = uuid4().hex
        found: dict[str, _VerdictFile] = {}
        with ExitStack() as stack:
            for judged in judge(batches):
                verdicts = judged.column("verdict")
                rows = judged.drop_columns(["verdict"])
                met = verdicts.unique().to_pylist()
                for verdict in met:
                    mine = rows if len(met) == 1 else rows.filter(pc.equal(verdicts, verdict))
                    if verdict not in found:
                        file = _VerdictFile(work / _name(verdict, attempt), mine.schema, codec)
                        found[verdict] = stack.enter_context(file)
                    found[verdict].add(mine)
        names = [_name(verdict, attempt) for verdict in found]
        yield pa.RecordBatch.from_pydict(
            {"file": pa.array(names, pa.string()), "verdict": pa.array(list(found), pa.string())}
        )

    return run


def _name(verdict: str, attempt: str) -> str:
    return f"part-{verdict}-{attempt}.parquet"
