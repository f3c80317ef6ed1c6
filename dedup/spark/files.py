"""Reads a history from files and tables, and refuses damaged files and differing schemas before the job starts.

Spark reads a file into rows and passes them to Python one value at a time, whereas Arrow reads the file directly into
the columns that are judged. Therefore, tasks read plain Parquet files on local file systems (`file:`) with Arrow
(`InputSplits`). Spark reads all other inputs, including Delta tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import reduce
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote, urlsplit

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from dedup.core.window import Feed
from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.spark.columns import Batches, BatchFunction
from dedup.spark.delta_log import DeltaLog
from dedup.spark.log_order import PartitionBounds
from dedup.spark.manifest import files_of_runs
from dedup.spark.map_side import OffsetRun, OffsetRuns, overlap, read_notice, write_notice
from dedup.spark.rows import COORDINATES, RECORDS, records_of_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FileFormat = Literal["parquet", "json", "json-records", "delta", "table"]
"""In ``json``, each line is an event. In ``json-records``, each line is a row with the columns of `rows.RECORDS` as
text. ``table`` is a table in one of Spark's catalogs, given by its name.
"""

LOSSLESS: Final = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
_FOOTERS_AT_ONCE: Final = 8
_ORDER_SCHEMA: Final = "counts array<bigint>, notice binary, topics binary, bounds binary"

_SHOWN: Final = 200
"""Number of characters shown of a refused line."""
_MS_LENGTH: Final = len("2024-01-01T00:00:00.000")
_JSON_RECORD: Final = (
    "key string, value string, headers array<struct<key:string,value:string>>, timestamp_ms bigint, topic string, "
    "`partition` int, `offset` bigint"
)

_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ARROW_TYPES: Final[Mapping[str, tuple[pa.DataType, ...]]] = {
    "key": (pa.binary(), pa.string()),
    "value": (pa.binary(), pa.string()),
    "headers": (_HEADERS,),
    "timestamp_ms": (pa.int64(), pa.int32()),
    "topic": (pa.string(),),
    "partition": (pa.int32(), pa.int16(), pa.int8()),
    "offset": (pa.int64(), pa.int32()),
}
"""Types of the columns of `rows.RECORDS`, with the column's own type first, then those that Arrow may cast to it."""
_BATCH_ROWS: Final = 8_192
_SPLIT: Final = StructType([StructField("file", StringType()), StructField("row_group", IntegerType())])
_TASK_BYTES: Final = 128 << 20
_TASKS_PER_CORE: Final = 4


class DamagedFile(Exception):
    """Raised if a file cannot be read to its end; `session.translated_errors` turns this error into a SettingsError."""


@dataclass(frozen=True, slots=True)
class InputSplits:
    """The row groups of Parquet files, ordered by file name."""

    frame: DataFrame
    """A row (`file`, `row_group`) for each row group, in as many Spark partitions as there should be tasks."""
    columns: tuple[str, ...]
    """The columns of `rows.RECORDS` that the files have; the others are null, and headers are empty."""


@dataclass(frozen=True, slots=True)
class History:
    """Records to judge, and what is known about their order."""

    records: DataFrame
    """`rows.RECORDS`, and the columns in the paths of files, if they have any."""
    placed: bool
    """Whether rows have Kafka coordinates."""
    contiguous: bool
    """Whether Spark reads them in log order without a sort; see `batch_verdicts.judged`."""
    identity: str
    """Identifies the input; the same input has the same identity."""
    place: str
    """The origin of the records, for messages."""
    feeds: tuple[Feed, ...] = ()
    """For the repartition topic, every source partition that feeds it."""
    size_bytes: int | None = None
    """The approximate size; None if it is not known."""
    countable: bool = False
    """Whether it is cheap to count the records, and the number is always the same."""
    pieces: InputSplits | None = None
    """The same records as row groups, if tasks can read the files themselves; otherwise None."""
    bounds: tuple[PartitionBounds, ...] = ()
    """The Kafka partitions of the records, if they were determined."""


def read_files(
    spark: SparkSession,
    paths: Sequence[str],
    fmt: FileFormat,
    *,
    rows_are_events: bool = False,
    base: str | None = None,
) -> History:
    """Return the records in files, directories, or tables.

    A directory may be that of a run of `backfill`, or a directory inside a run, even if the run was published by a
    manifest (`manifest.files_of_runs`). A Delta or Iceberg table is read at the version that is the latest at the time
    of the call, even if someone writes to the table in the meantime. With ``rows_are_events``, each row of the table is
    an event, as JSON without its null columns, and the table needs no column `value`. If the paths are files, ``base``
    is the directory whose subdirectories are columns (`day=2026-01-31/`). Raises SettingsError, which lists every file
    that is damaged or has a different schema from the first file. Raises TopologyError for columns that are missing or
    have the wrong type.
    """
    place = ", ".join(paths)
    if rows_are_events and fmt.startswith("json"):
        text = f"--rows-are-events is for tables; with --format {fmt} each line is a record already"
        raise SettingsError([Problem(place, text)])
    return _history(_read_input(spark, paths, fmt, place, base), fmt, place, rows_are_events=rows_are_events)


def read_table(table: DataFrame, fmt: FileFormat, place: str, *, rows_are_events: bool = False) -> History:
    """Return the records of a table; the files of the table identify the input.

    Raises TopologyError for columns of the table that are missing or have the wrong type.
    """
    found = _Input(table, [], *_files_identity(table.sparkSession, table))
    return _history(found, fmt, place, rows_are_events=rows_are_events)


def _history(found: _Input, fmt: FileFormat, place: str, *, rows_are_events: bool) -> History:
    table, of_path = found.table, found.of_path
    if rows_are_events:
        table, of_path = table.select(as_events(table).alias("value")), []
    records = records_of_files(table, place=place, others=of_path)
    by_arrow = fmt == "parquet" and not rows_are_events and not of_path
    splits = _input_splits(table.sparkSession, table.inputFiles(), table) if by_arrow else None
    placed, contiguous, bounds = _log_order(records, place, splits) if "offset" in table.columns else (False, False, ())
    return History(
        records,
        placed,
        contiguous,
        f"{fmt} {found.identity} rows_are_events={rows_are_events}",
        place,
        size_bytes=found.size_bytes,
        countable=not fmt.startswith("json"),
        pieces=splits,
        bounds=bounds,
    )


@dataclass(frozen=True, slots=True)
class _Input:
    """The input that the user named, as a table."""

    table: DataFrame
    of_path: list[str]
    """Columns that partition the input and are not columns of a record."""
    identity: str
    size_bytes: int


def _read_input(spark: SparkSession, paths: Sequence[str], fmt: FileFormat, place: str, base: str | None) -> _Input:
    try:
        match fmt:
            case "delta" | "table":
                pinned = [
                    _delta_version(spark, DeltaLog(spark, path).table, [])
                    if fmt == "delta"
                    else _pinned_table(spark, path)
                    for path in paths
                ]
                table = reduce(DataFrame.unionByName, (each.table for each in pinned))
                of_path = [name for name in pinned[0].of_path if all(name in each.of_path for each in pinned)]
                return _Input(table, of_path, " ".join(p.identity for p in pinned), sum(p.size_bytes for p in pinned))
            case "parquet" | "json" | "json-records":
                table, of_path = _table_of_files(spark, files_of_runs(spark, paths), fmt, place, base)
                return _Input(table, of_path, *_files_identity(spark, table))
    except AnalysisException as error:
        text = f"cannot be read as {fmt}: {str(error).splitlines()[0]}"
        raise SettingsError([Problem(place, text)]) from error


def _pinned_table(spark: SparkSession, name: str) -> _Input:
    """Return the latest version of a table in a catalog, or the current files of a table without versions."""
    described = {row["col_name"]: row["data_type"] for row in spark.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()}
    of_path = [each.name for each in spark.catalog.listColumns(name) if each.isPartition]
    of_path = [column for column in of_path if column not in RECORDS.names]
    match str(described.get("Provider")).lower():
        case "delta":
            return _delta_version(spark, name, of_path)
        case "iceberg":
            jvm: Any = spark._jvm  # noqa: SLF001 - Iceberg has no SQL for the ID of a table
            of_iceberg = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, name)  # noqa: SLF001
            snapshot = of_iceberg.currentSnapshot()
            if snapshot is None:
                raise SettingsError(
                    [Problem(name, "is an Iceberg table without a snapshot: nothing was written to it")]
                )
            return _version(spark, name, of_iceberg.uuid(), snapshot.snapshotId(), of_path)
        case _:
            table = spark.table(name)
            if not table.inputFiles():
                text = "has no files: it is empty, or no table of Delta, Iceberg or files; write it to one of these"
                raise SettingsError([Problem(name, text)])
            return _Input(table, of_path, *_files_identity(spark, table))


def _delta_version(spark: SparkSession, name: str, of_path: list[str]) -> _Input:
    history, detail = (spark.sql(f"DESCRIBE {what} {name}").first() for what in ("HISTORY", "DETAIL"))
    if history is None or detail is None:
        raise SettingsError([Problem(name, "has no version that can be read; write to it, or restore its log")])
    return _version(spark, name, detail["id"], history["version"], of_path)


def _version(spark: SparkSession, name: str, table_id: str, version: int, of_path: list[str]) -> _Input:
    table = spark.sql(f"SELECT * FROM {name} VERSION AS OF {version}")  # noqa: S608 - what the user names
    size_bytes = table._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()  # noqa: SLF001 - no other way
    return _Input(table, of_path, f"{table_id}@{version}", int(str(size_bytes)))


def _table_of_files(
    spark: SparkSession,
    paths: Sequence[str],
    fmt: Literal["parquet", "json", "json-records"],
    place: str,
    base: str | None,
) -> tuple[DataFrame, list[str]]:
    """Return the table, and its columns that come from the paths (``day=2026-01-31/``) and are not a record's."""
    reader = spark.read.options(**LOSSLESS)
    if base is not None:
        reader = reader.option("basePath", base)
    if fmt == "parquet":
        table = reader.option("mergeSchema", "false").parquet(*paths)
        in_files = _columns_of_files(spark, sorted(table.inputFiles()))
        return table, [name for name in table.columns if name not in {*in_files, *RECORDS.names, "timestamp"}]
    lines = reader.option("lineSep", "\n").text(list(paths))
    of_path = [name for name in lines.columns if name != "value"]
    taken = [name for name in of_path if name in RECORDS.names]
    if taken:
        text = f"the paths have a column `{taken[0]}` (`{taken[0]}=...`), and so have the lines: rename the directories"
        raise SettingsError([Problem(place, text)])
    # The lines are read as bytes, because Spark's own JSON reader would turn 1.0 into 1, and drop what it cannot parse.
    row = F.struct(F.col("value").cast(BinaryType()).alias("value")) if fmt == "json" else _json_row()
    return lines.select(row.alias("row"), *of_path).select("row.*", *of_path), of_path


def _columns_of_files(spark: SparkSession, files: Sequence[str]) -> Collection[str]:
    """Return the columns of the Parquet files. Raises SettingsError unless all files have the columns of the first.

    Spark would fill in nulls for a column that a file lacks. A null value is a tombstone, and a null time is a missing
    time, so verdicts would change.
    """
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        found = list(pool.map(lambda file: _footer(spark, file), files))
    problems = [Problem(file, reason) for file, (_, reason) in zip(files, found, strict=True) if reason]
    wanted = next((columns for columns, reason in found if not reason), {})
    for file, (columns, reason) in zip(files, found, strict=True):
        for name in [] if reason else sorted({*wanted, *columns}):
            if columns.get(name) != wanted.get(name):
                here, first = columns.get(name, "missing"), wanted.get(name, "missing")
                problems.append(
                    Problem(file, f"column `{name}` is {here}, in the first file {first}: read them separately")
                )
    if problems:
        raise SettingsError(problems)
    return wanted


def _footer(spark: SparkSession, file: str) -> tuple[dict[str, str], str]:
    """Return the columns of a Parquet file with their types, or the reason why they cannot be read."""
    jvm: Any = spark._jvm  # noqa: SLF001 - the only way to Hadoop's file systems
    conf = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    reader: Any = None
    try:
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        source = jvm.org.apache.parquet.hadoop.util.HadoopInputFile.fromPath(path, conf)
        reader = jvm.org.apache.parquet.hadoop.ParquetFileReader.open(source)
        schema = reader.getFileMetaData().getSchema()
        return {kind.getName(): " ".join(str(kind).split()) for kind in schema.getFields()}, ""
    except Py4JJavaError as error:
        return {}, f"is damaged: {str(error.java_exception.getMessage()).splitlines()[0]}. Repair or remove it"
    finally:
        if reader is not None:
            reader.close()


def _files_identity(spark: SparkSession, table: DataFrame) -> tuple[str, int]:
    """Return a digest of the files' names, sizes, and modification times, and the total size of the files in bytes."""
    jvm: Any = spark._jvm  # noqa: SLF001
    conf = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    digest, size_bytes = blake2b(digest_size=16), 0
    for file in sorted(table.inputFiles()):
        # Names of Delta files are not URL-encoded; those of other tables are.
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file.replace(" ", "%20")))
        status = path.getFileSystem(conf).getFileStatus(path)
        digest.update(f"{file} {status.getLen()} {status.getModificationTime()}\n".encode())
        size_bytes += status.getLen()
    return digest.hexdigest(), size_bytes


def _log_order(
    records: DataFrame, place: str, splits: InputSplits | None
) -> tuple[bool, bool, tuple[PartitionBounds, ...]]:
    """Return whether the rows have coordinates, whether Spark reads them in log order without a sort, and their bounds.

    The rows are in log order if each Spark partition has ascending offsets and no two Spark partitions overlap. The job
    checks the order again while it runs, so it would notice a wrong result of this function. The function reads only
    the coordinates of the rows. Raises SettingsError if only some rows have coordinates.
    """
    if splits is None:
        found = records.select(*COORDINATES).mapInArrow(_offset_runs, _ORDER_SCHEMA).collect()
    else:
        read = opened(splits.columns, COORDINATES)
        frame = splits.frame.coalesce(splits.frame.sparkSession.sparkContext.defaultParallelism)
        found = frame.mapInArrow(lambda batches: _offset_runs(read(batches)), _ORDER_SCHEMA).collect()
    if not found:
        return False, False, ()
    rows, placed, anywhere = (sum(counts) for counts in zip(*(row["counts"] for row in found), strict=True))
    if anywhere and placed < rows:
        text = f"only {placed:,} of {rows:,} rows have topic, partition and offset; judge the others separately"
        raise SettingsError([Problem(place, text)])
    bounds = _united(PartitionBounds(*each) for row in found for each in orjson.loads(row["bounds"]))
    if not placed or any(row["notice"] is None for row in found):
        return placed > 0, False, bounds
    runs: list[OffsetRun] = []
    names: list[str] = []
    for row in found:
        # Each task assigns its own numbers to the topics.
        own = bytes(row["topics"]).decode().split("\n")
        for run in read_notice([bytes(row["notice"])]):
            topic = own[run.topic]
            if topic not in names:
                names.append(topic)
            run.topic = names.index(topic)
            runs.append(run)
    return True, overlap(runs) is None, bounds


def _united(bounds: Iterable[PartitionBounds]) -> tuple[PartitionBounds, ...]:
    """Return the bounds of each Kafka partition, combined from the bounds that several tasks found."""
    whole: dict[tuple[str, int], PartitionBounds] = {}
    for each in bounds:
        known = whole.get((each.topic, each.partition), each)
        first, last = min(known.first_offset, each.first_offset), max(known.last_offset, each.last_offset)
        rows = each.rows if known is each else known.rows + each.rows
        whole[each.topic, each.partition] = PartitionBounds(each.topic, each.partition, first, last, rows)
    return tuple(whole.values())


def _bounds_in(batch: pa.RecordBatch) -> Iterable[PartitionBounds]:
    grouped = pa.Table.from_batches([batch.select(COORDINATES)]).group_by(["topic", "partition"])
    found = grouped.aggregate([("offset", "min"), ("offset", "max"), ("offset", "count")])
    names = ("topic", "partition", "offset_min", "offset_max", "offset_count")
    return (PartitionBounds(*each) for each in zip(*(found.column(name).to_pylist() for name in names), strict=True))


def _offset_runs(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Yield one row with the columns of `_ORDER_SCHEMA`.

    The column `counts` contains the number of rows, of rows with all coordinates, and of rows with any coordinate. The
    column `notice` contains the offset runs, or null if the rows are not in log order or lack coordinates.
    """
    context = TaskContext.get()
    runs = OffsetRuns(0 if context is None else context.partitionId())
    topics: list[str] = []
    bounds: tuple[PartitionBounds, ...] = ()
    counts = [0, 0, 0]
    ordered = True
    for batch in batches:
        valid = [batch.column(name).is_valid() for name in COORDINATES]
        everywhere = pc.and_(pc.and_(*valid[:2]), valid[2])
        anywhere = pc.or_(pc.or_(*valid[:2]), valid[2])
        found = (batch.num_rows, everywhere.true_count, anywhere.true_count)
        counts = [before + more for before, more in zip(counts, found, strict=True)]
        if everywhere.true_count == batch.num_rows:
            bounds = _united([*bounds, *_bounds_in(batch)])
        ordered = ordered and everywhere.true_count == batch.num_rows
        if ordered and batch.num_rows:
            try:
                _take(runs, batch, topics)
            except StateIncompatible:
                ordered = False
    columns = {
        "counts": pa.array([counts], pa.list_(pa.int64())),
        "notice": pa.array([write_notice(runs.all) if ordered else None], pa.binary()),
        "topics": pa.array(["\n".join(topics).encode()], pa.binary()),
        "bounds": pa.array([orjson.dumps([astuple(each) for each in bounds])], pa.binary()),
    }
    yield pa.RecordBatch.from_pydict(columns)


def _take(runs: OffsetRuns, batch: pa.RecordBatch, topics: list[str]) -> None:
    column = batch.column("topic").dictionary_encode()
    topics += [name for name in column.dictionary.to_pylist() if name not in topics]
    positions = np.array([topics.index(name) for name in column.dictionary.to_pylist()], np.int64)
    where = positions[column.indices.to_numpy(zero_copy_only=False)]
    partitions, offsets = (batch.column(name).to_numpy().astype(np.int64) for name in ("partition", "offset"))
    runs.take(where, partitions, offsets, np.zeros(batch.num_rows, np.int64))


def _json_row() -> Column:
    """Return the columns of a record, as text, that are parsed from a line of `json-records` in the column `value`.

    The job fails at a line without the member `value`, because the line would become a tombstone. The job also fails at
    a line with an unknown member, such as a misspelled timestamp, because the member would be ignored. The error
    message shows the line.
    """
    members = F.json_object_keys("value")
    unknown = F.array_except(members, F.array(*map(F.lit, RECORDS.fieldNames())))
    others = ", ".join(name for name in RECORDS.fieldNames() if name != "value")
    rule = f"each line of json-records is an object with `value`, which may be null, and otherwise only {others}; not: "
    text = F.concat(F.lit(rule), F.substring("value", 1, _SHOWN))
    whole = F.array_contains(members, "value") & (F.size(unknown) == 0)
    row = F.from_json("value", _JSON_RECORD, {"mode": "FAILFAST"})
    return F.when(F.coalesce(whole, F.lit(False)), row).otherwise(F.raise_error(text))  # noqa: FBT003 - a column


def as_events(table: DataFrame) -> Column:
    """Return each row as JSON without its null columns, as bytes.

    A time with a higher precision than milliseconds keeps all its digits. By default, Spark would cut off the
    additional digits, so two different events could become equal.
    """
    columns = [_exact(F.col(f"`{field.name}`"), field.dataType).alias(field.name) for field in table.schema.fields]
    return F.to_json(F.struct(*columns)).cast(BinaryType())


def _exact(column: Column, kind: DataType) -> Column:
    """Return a column with times as text in Spark's own format, with more digits where milliseconds are not exact."""
    match kind:
        case TimestampType():
            return F.concat(_time(column), F.date_format(column, "XXX"))
        case TimestampNTZType():
            return _time(column)
        case StructType():
            members = [_exact(column[field.name], field.dataType).alias(field.name) for field in kind.fields]
            return F.when(column.isNotNull(), F.struct(*members))
        case ArrayType():
            return F.transform(column, lambda each: _exact(each, kind.elementType))
        case MapType():
            return F.transform_values(column, lambda _, each: _exact(each, kind.valueType))
        case _:
            return column


def _time(column: Column) -> Column:
    text = F.translate(column.cast("string"), " ", "T")
    dotted = F.when(F.instr(text, ".") > 0, text).otherwise(F.concat(text, F.lit(".")))
    return F.when(F.length(dotted) < _MS_LENGTH, F.rpad(dotted, _MS_LENGTH, "0")).otherwise(dotted)


def _input_splits(spark: SparkSession, files: Sequence[str], table: DataFrame) -> InputSplits | None:
    """Return the row groups of the files (URIs), or None if Spark must read the files."""
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
            if not all(name in schema.names and schema.field(name).type in _ARROW_TYPES[name] for name in columns):
                return None
            rows += [(file, group) for group in range(parquet.num_row_groups)]
            total_bytes += sum(parquet.metadata.row_group(at).total_byte_size for at in range(parquet.num_row_groups))
    if not rows:
        return None
    context = spark.sparkContext
    tasks = min(len(rows), max(_TASKS_PER_CORE * context.defaultParallelism, -(-total_bytes // _TASK_BYTES)))
    return InputSplits(spark.createDataFrame(context.parallelize(rows, tasks), _SPLIT), columns)


def opened(columns: Sequence[str], wanted: Sequence[str] = tuple(RECORDS.names)) -> BatchFunction:
    """Return a function for `mapInArrow` that reads the ``wanted`` columns of the row groups in `InputSplits.frame`.

    ``columns`` names the columns that the files have. The returned function raises DamagedFile if it cannot read a
    file.
    """
    there = [name for name in wanted if name in columns]

    def run(splits: Iterable[pa.RecordBatch]) -> Batches:
        for batch in splits:
            for split in batch.to_pylist():
                for rows in _read(split["file"], split["row_group"], there):
                    yield pa.RecordBatch.from_arrays([_column(rows, name) for name in wanted], list(wanted))

    return run


def _read(file: str, row_group: int, columns: list[str]) -> Batches:
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
        if name == "headers":
            return pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), pa.array([], _HEADERS.value_type))
        return pa.nulls(count, _ARROW_TYPES[name][0])
    column = rows.column(name)
    if name == "headers" and column.null_count:
        sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.append(0, np.cumsum(sizes)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(ends), column.flatten())
    return column.cast(_ARROW_TYPES[name][0])
