"""Parquet files on a file system that every executor sees, read where they are judged: by Arrow, in the task itself.

Spark reads a file into rows, and hands rows to Python one value at a time; Arrow reads it into the columns that are
judged. Only plain tables are read so: other types, other file systems and Delta tables are left to Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from dedup.spark.rows import COORDINATES, RECORDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_TYPES: Final[Mapping[str, pa.DataType]] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "headers": _HEADERS,
    "timestamp_ms": pa.int64(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
}
_READ_AS_THEY_ARE: Final[Mapping[str, tuple[pa.DataType, ...]]] = {
    "key": (pa.binary(), pa.string()),
    "value": (pa.binary(), pa.string()),
    "headers": (_HEADERS,),
    "timestamp_ms": (pa.int64(), pa.int32()),
    "topic": (pa.string(),),
    "partition": (pa.int32(), pa.int16(), pa.int8()),
    "offset": (pa.int64(), pa.int32()),
}
_BATCH_ROWS: Final = 8_192
_PIECES: Final = StructType([StructField("file", StringType()), StructField("row_group", IntegerType())])
_TASK_BYTES: Final = 128 << 20
_TASKS_A_CORE: Final = 4


class DamagedFile(Exception):
    """A file can not be read to its end. `failures.told` makes a sentence of it."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The row groups of Parquet files, in the order of their names."""

    frame: DataFrame
    """A row each: `file`, `row_group`; as many Spark partitions as tasks should read."""
    columns: tuple[str, ...]
    """Of `rows.RECORDS`, those that the files have; the others are null, headers empty."""


def pieces_of(spark: SparkSession, files: Sequence[str], table: DataFrame) -> Pieces | None:
    """Return the row groups of these files (URIs), as `rows.records_of_files` reads them; None to leave it to Spark."""
    if not files or any(urlsplit(file).scheme != "file" for file in files):
        return None
    columns = tuple(name for name in RECORDS.names if name in table.columns)
    if "timestamp_ms" not in columns and "timestamp" in table.columns:
        return None
    rows: list[tuple[str, int]] = []
    total_bytes = 0
    for file in sorted(files):
        with pq.ParquetFile(_path(file)) as parquet:
            schema = parquet.schema_arrow
            if not all(name in schema.names and schema.field(name).type in _READ_AS_THEY_ARE[name] for name in columns):
                return None
            rows += [(file, group) for group in range(parquet.num_row_groups)]
            total_bytes += sum(parquet.metadata.row_group(at).total_byte_size for at in range(parquet.num_row_groups))
    if not rows:
        return None
    context = spark.sparkContext
    tasks = min(len(rows), max(_TASKS_A_CORE * context.defaultParallelism, -(-total_bytes // _TASK_BYTES)))
    return Pieces(spark.createDataFrame(context.parallelize(rows, tasks), _PIECES), columns)


def opened(
    columns: Sequence[str], wanted: Sequence[str] = tuple(RECORDS.names)
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for `mapInArrow`: rows of `Pieces.frame` in, the `wanted` columns of `rows.RECORDS` out.

    Raises DamagedFile.
    """
    there = [name for name in wanted if name in columns]

    def run(pieces: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in pieces:
            for piece in batch.to_pylist():
                for rows in _read(piece["file"], piece["row_group"], there):
                    yield pa.RecordBatch.from_arrays([_column(rows, name) for name in wanted], list(wanted))

    return run


def surveyed(
    pieces: Pieces, survey: Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]], schema: str
) -> DataFrame:
    """Return what `survey` finds in the coordinates of the pieces."""
    read = opened(pieces.columns, COORDINATES)
    cores = pieces.frame.sparkSession.sparkContext.defaultParallelism
    return pieces.frame.coalesce(cores).mapInArrow(lambda batches: survey(read(batches)), schema)


def _read(file: str, row_group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(_path(file), pre_buffer=False) as parquet:
            yield from parquet.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=[row_group], columns=columns, use_threads=False
            )
    except (OSError, pa.ArrowException) as error:
        raise DamagedFile(f"Error while reading file {file} : {error}") from error


def _path(file: str) -> str:
    return unquote(urlsplit(file).path)


def _column(rows: pa.RecordBatch, name: str) -> pa.Array:
    count = rows.num_rows
    if name not in rows.schema.names:
        return _no_headers(count) if name == "headers" else pa.nulls(count, _TYPES[name])
    column = rows.column(name)
    if name == "headers" and column.null_count:
        sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.append(0, np.cumsum(sizes)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(ends), column.flatten())
    return column.cast(_TYPES[name])


def _no_headers(count: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), pa.array([], _HEADERS.value_type))
