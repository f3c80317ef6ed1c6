"""Reads historical records from files and tables, and rejects damaged files and files whose schemas differ.

Tasks read Parquet files on a local file system (`file:`) directly with Arrow (`InputSplits`), because Spark would pass
the values to Python one at a time. Spark reads all other inputs, including Delta tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import BinaryType, NullType, StringType, StructField, StructType

from dedup.core.window import Feed
from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.spark.columns import (
    ARROW_RECORDS,
    COORDINATES,
    RECORDS,
    SLICE_BYTES,
    Batches,
    absent_from,
    as_records,
    gathered,
    integers_of,
)
from dedup.spark.input_files import LOSSLESS, columns_of_files, reader_options, refuse_lossy, refuse_unread_codecs
from dedup.spark.log_order import PartitionBounds
from dedup.spark.manifest import delta_table_of, files_of_runs
from dedup.spark.map_side import OffsetRuns
from dedup.spark.row_events import as_events, quoted, same_ids
from dedup.spark.session import reason_of
from dedup.spark.table_log import DeltaLog

FileFormat = Literal["parquet", "json", "json-records", "delta", "table"]
"""With ``json``, each line of a file is an event. With ``json-records``, each line is a row with the columns of
`columns.RECORDS` as text. ``table`` is a table in one of Spark's catalogs, given by its name.
"""

_SHOWN: Final = 200
"""Maximum number of characters of a rejected line that an error message shows."""
_DETAILS: Final = "# Detailed Table Information"
"""A heading that `DESCRIBE TABLE EXTENDED` shows for a table or view of a catalog, but not for a temporary view."""
_MOST_FIELDS: Final = "spark.sql.debug.maxToStringFields"
_ALL_FIELDS: Final = 2**31 - 1
_EXPRESSION_ID: Final = re.compile(r"#\d+")
_JSON_RECORD: Final = (
    "key string, value string, headers array<struct<key:string,value:string>>, timestamp_ms bigint, topic string, "
    "`partition` int, `offset` bigint"
)

_CAST: Final[Mapping[str, tuple[pa.DataType, ...]]] = {
    "key": (pa.string(),),
    "value": (pa.string(),),
    "timestamp_ms": (pa.int32(),),
    "partition": (pa.int16(), pa.int8()),
    "offset": (pa.int32(),),
}
"""Maps each column to the other types that Arrow may cast to the column's type in `columns.RECORDS`."""
_COUNTED: Final = dict.fromkeys(("first", "last", "placed", "rows"), pa.int64())
_FOUND: Final = pa.schema({"topic": pa.string(), "partition": pa.int32(), **_COUNTED})
"""For each topic and partition, the bounds of the offsets, the number of rows with an offset, and the total row
count.
"""
_READ_ROWS: Final = 256
_FEW_COLUMNS_ROWS: Final = 131_072
"""Maximum number of rows that a task reads at a time, with and without the column `value`. Arrow reads no faster if the
number is greater, and a file's metadata does not tell the size of values that occur repeatedly.
"""
_READ_BYTES: Final = 64 << 10
_TASK_BYTES: Final = 128 << 20
_TASKS_PER_CORE: Final = 4


class DamagedFile(Exception):
    """Raised if a file cannot be read completely. The user sees a SettingsError (`session.translated_errors`)."""


class LogSplits(NamedTuple):
    """The row groups that contain the records of one Kafka partition, in log order."""

    topic: str
    partition: int
    groups: list[tuple[str, int]]
    """The file and the number of each row group."""
    rows: int
    first_offsets: list[int]
    """The first offset in each row group."""


@dataclass(frozen=True, slots=True)
class InputSplits:
    """The row groups of Parquet files, ordered by file name."""

    frame: DataFrame
    """A row (`file`, `row_group`) for each row group, in as many Spark partitions as there should be tasks."""
    columns: tuple[str, ...]
    """The record columns that the files contain. Missing headers are read as empty, other missing columns as null."""
    rows: int
    logs: tuple[LogSplits, ...] = ()
    """The row groups by Kafka partition; empty if a row group spans several partitions or is not in log order."""


@dataclass(frozen=True, slots=True)
class History:
    """Records to judge, and information about their origin, size, and order."""

    records: DataFrame
    """Rows with the columns of `columns.RECORDS`, and with any columns that file paths contain."""
    placed: bool
    """Whether rows have Kafka coordinates."""
    contiguous: bool
    """Whether the tasks read the records in log order without a sort (`batch_verdicts.judged`): from `pieces` if
    available, and otherwise from `records`.
    """
    identity: str
    """Identifies the input. The same input always has the same identity."""
    place: str
    """The origin of the records, for messages."""
    feeds: tuple[Feed, ...] = ()
    """All source partitions if the records come from the repartition topic; otherwise, empty."""
    size_bytes: int | None = None
    """The approximate size, or None if the size is not known."""
    countable: bool = False
    """Whether counting the records again always gives the same number."""
    pieces: InputSplits | None = None
    """The same records as row groups, or None if tasks cannot read the files themselves."""
    bounds: tuple[PartitionBounds, ...] = ()
    """The bounds of the records in each Kafka partition, if they were determined."""
    by_arrival: bool = False
    """Whether reading fails at a record whose timestamp the broker did not set."""
    events: StructType | None = None
    """The columns of the input if each row is an event, or None."""
    absent: frozenset[str] = frozenset()
    """The columns that can contain a record's ID or event time and that the input lacks."""

    @property
    def contiguous_without_pieces(self) -> bool:
        """Whether Spark reads `records` in log order without a sort, so that no task reads `pieces`."""
        # The tasks that read `pieces` process files in the order of their names, but Spark begins with the largest
        # files.
        return self.contiguous and self.pieces is None

    def where(self, condition: Column) -> History:
        """Return only the records for which ``condition`` is true, without `pieces`, because Spark filters them."""
        records = self.records.where(condition)
        return replace(self, records=records, pieces=None, contiguous=self.contiguous_without_pieces)


def read_files(
    spark: SparkSession,
    paths: Sequence[str],
    fmt: FileFormat,
    *,
    rows_are_events: bool = False,
    by_arrival: bool = False,
    base: str | None = None,
    text_paths: bool = False,
) -> History:
    """Return the records in files, directories, or tables as a `History`.

    A path can be the directory of a `backfill` run or a directory inside this directory, even if the run was published
    with a manifest (`manifest.files_of_runs`). A run in a Delta table is read with the format ``delta``. The function
    also reads files in subdirectories (`input_files.reader_options`). The function pins a Delta or Iceberg table to the
    latest version, so that later writes do not change the result. If ``rows_are_events`` is true, each row of the table
    becomes an event (JSON without the null columns), and the table needs no column `value`. If ``base`` is given,
    ``paths`` must be files below the directory ``base``, and only subdirectories of ``base`` (such as
    `day=2026-01-31/`) become columns. If ``text_paths`` is true, these columns are text; otherwise, Spark infers their
    types. If ``by_arrival`` is true, every row must show that the broker set its timestamp (`columns.as_records`).
    Raises SettingsError with a list of all files that are damaged or whose schema differs from that of the first file.
    Also raises SettingsError for a path inside a Delta or Iceberg table that is not read as a table, and for a table if
    the session skips damaged or missing files. Raises TopologyError if a required column is missing or a column has the
    wrong type.
    """
    place = ", ".join(paths)
    if not all(paths):
        raise SettingsError([Problem("--input", "is empty; give a path, or the name of a table")])
    if rows_are_events and fmt.startswith("json"):
        text = f"--rows-are-events is for tables; with --format {fmt}, each line is already a record"
        raise SettingsError([Problem(place, text)])
    try:
        if fmt in {"delta", "table"}:
            found = _latest_of_tables(spark, paths, fmt)
        else:
            found = _table_of_files(spark, paths, fmt, place, base, text_paths=text_paths)
    except (AnalysisException, IllegalArgumentException) as error:
        text = f"cannot be read as {fmt}: {reason_of(error)}"
        raise SettingsError([Problem(place, text)]) from error
    return _history(found, fmt, place, rows_are_events=rows_are_events, by_arrival=by_arrival)


def read_table(
    table: DataFrame, fmt: FileFormat, place: str, *, rows_are_events: bool = False, by_arrival: bool = False
) -> History:
    """Return the records of a table; their identity is computed from the table's files.

    Raises TopologyError if a required column is missing or a column has the wrong type, and SettingsError if the
    session skips damaged or missing files.
    """
    refuse_lossy(table.sparkSession)
    return _history(_of_files(table, []), fmt, place, rows_are_events=rows_are_events, by_arrival=by_arrival)


def _history(found: _Input, fmt: FileFormat, place: str, *, rows_are_events: bool, by_arrival: bool) -> History:
    table, splits, events = found.table, None, None
    if rows_are_events:
        events, table = table.schema, table.select(as_events(table).alias("value"))
        records = as_records(table, place=place, by_arrival=by_arrival)
    else:
        dotted = [name for name in found.of_path if "." in name or "`" in name]
        if dotted:
            text = f"has the column `{dotted[0]}`, which Spark cannot pass to Python because of the dot; rename it"
            raise SettingsError([Problem(place, text)])
        records = as_records(table, place=place, others=found.of_path, by_arrival=by_arrival)
        # Tasks that read the files themselves would not check who set the timestamps.
        if fmt == "parquet" and not found.of_path and not by_arrival:
            splits = _input_splits(found.table)
    has_offsets = not rows_are_events and "offset" in found.table.columns
    order = _log_order(records, place, splits) if has_offsets else _LogOrder(placed=False)
    if splits is not None and not order.begins_at(splits.logs):
        splits = replace(splits, logs=())
    return History(
        records,
        order.placed,
        order.contiguous,
        f"{fmt} {found.identity} rows_are_events={rows_are_events}",
        place,
        size_bytes=found.size_bytes,
        countable=True,
        pieces=splits,
        bounds=order.bounds,
        events=events,
        absent=absent_from(table),
        by_arrival=by_arrival,
    )


@dataclass(frozen=True, slots=True)
class _Input:
    table: DataFrame
    of_path: list[str]
    """Columns that partition the input and are not columns of a record."""
    identity: str
    size_bytes: int


def _latest_of_tables(spark: SparkSession, names: Sequence[str], fmt: FileFormat) -> _Input:
    refuse_lossy(spark)
    pinned = [_pinned_path(spark, name) if fmt == "delta" else _pinned_table(spark, name) for name in names]
    _refuse_other_types(names, [each.table.schema for each in pinned])
    table = reduce(DataFrame.unionByName, (each.table for each in pinned))
    of_path = [name for name in pinned[0].of_path if all(name in each.of_path for each in pinned)]
    return _Input(table, of_path, " ".join(p.identity for p in pinned), sum(p.size_bytes for p in pinned))


def _refuse_other_types(names: Sequence[str], schemas: Sequence[StructType]) -> None:
    """Raise SettingsError if a column's type differs from that in the first table. Otherwise, Spark would cast the
    values of one table, although 1 and '1' are different IDs.
    """
    first, *others = ({each.name.lower(): each.dataType.simpleString() for each in of.fields} for of in schemas)
    problems = [
        Problem(name, f"column `{column}` is {kind}, but {first[column]} in {names[0]}: read the tables separately")
        for name, columns in zip(names[1:], others, strict=True)
        for column, kind in columns.items()
        if not same_ids(first.get(column, kind), kind)
    ]
    if problems:
        raise SettingsError(problems)


def _pinned_path(spark: SparkSession, path: str) -> _Input:
    """Return the latest version of the Delta table at a path or, if the path names a run, the run's rows in the table.

    Raises SettingsError if a run has no rows at the path.
    """
    table, condition = delta_table_of(spark, path)
    found = _delta_version(spark, DeltaLog(spark, table).table, [], condition)
    if condition and found.table.isEmpty():
        raise SettingsError([Problem(path, "the run published no records there")])
    return found


def _pinned_table(spark: SparkSession, name: str) -> _Input:
    """Return the latest version of a table in a catalog, or the current files of a table without versions."""
    described = {row["col_name"]: row["data_type"] for row in spark.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()}
    provider = str(described.get("Provider")).lower()
    # `listColumns` fails if an Iceberg table is partitioned by a transform such as `days`.
    columns = () if provider == "iceberg" else spark.catalog.listColumns(name)
    of_path = [each.name for each in columns if each.isPartition and each.name not in RECORDS.names]
    match provider:
        case "delta":
            return _delta_version(spark, name, of_path)
        case "iceberg":
            jvm: Any = spark._jvm  # noqa: SLF001 - Iceberg has no SQL for the ID of a table
            of_iceberg = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, name)  # noqa: SLF001
            # If a session reads the table repeatedly, the session's catalog keeps returning the first snapshot.
            of_iceberg.refresh()
            snapshot = of_iceberg.currentSnapshot()
            if snapshot is None:
                text = "is an Iceberg table without a snapshot: nothing has been written to it"
                raise SettingsError([Problem(name, text)])
            # Spark reads a snapshot with the schema of its time. An early snapshot has none, so the present one counts.
            schemas = filter(None, (of_iceberg.schemas().get(snapshot.schemaId()), of_iceberg.schema()))
            names = [{each.name() for each in schema.columns()} for schema in schemas]
            if not names[0] <= names[-1]:
                raise SettingsError([Problem(name, "lacks a column of its snapshot; write to it once, then run again")])
            return _version(spark, name, of_iceberg.uuid(), snapshot.snapshotId(), _identity_columns(of_iceberg))
        case _:
            # A session caches the list of a table's files, and would miss files that other jobs have added.
            spark.catalog.refreshTable(name)
            table = spark.table(name)
            if not table.inputFiles():
                text = "has no files: it is empty, or it is not a Delta, Iceberg or file table; convert it to one"
                raise SettingsError([Problem(name, text)])
            found = _of_files(table, of_path)
            if _DETAILS in described and described.get("Type") != "VIEW":
                return found
            # Views with different definitions can return different rows from the same files.
            return replace(found, identity=f"{found.identity} view={_plan_digest(table)}")


def _identity_columns(of_iceberg: Any) -> list[str]:  # noqa: ANN401 - a table of Iceberg's Java library
    """Return the columns that partition an Iceberg table by their values, except nested columns and columns of a
    record.
    """
    names = {field.name(): field.fieldId() for field in of_iceberg.schema().columns()}
    by = {field.sourceId() for field in of_iceberg.spec().fields() if field.transform().isIdentity()}
    return [name for name, number in names.items() if number in by and name not in RECORDS.names]


def _plan_digest(table: DataFrame) -> str:
    """Return a digest of a view's analyzed plan, which is the same in each Spark session."""
    conf = table.sparkSession.conf
    most = conf.get(_MOST_FIELDS)
    conf.set(_MOST_FIELDS, str(_ALL_FIELDS))
    try:
        plan = str(table._jdf.queryExecution().analyzed().toString())  # noqa: SLF001 - no other way
    finally:
        conf.set(_MOST_FIELDS, str(most))
    # Spark numbers the columns of all plans in a session consecutively.
    numbers: dict[str, int] = {}
    numbered = _EXPRESSION_ID.sub(lambda found: f"#{numbers.setdefault(found[0], len(numbers))}", plan)
    return blake2b(numbered.encode(), digest_size=16).hexdigest()


def _delta_version(spark: SparkSession, name: str, of_path: list[str], condition: str = "") -> _Input:
    history, detail = (spark.sql(f"DESCRIBE {what} {name}").first() for what in ("HISTORY", "DETAIL"))
    if history is None or detail is None:
        raise SettingsError([Problem(name, "has no version that can be read; write to it, or restore its log")])
    return _version(spark, name, detail["id"], history["version"], of_path, condition)


def _version(
    spark: SparkSession, name: str, table_id: str, version: int, of_path: list[str], condition: str = ""
) -> _Input:
    chosen = f" WHERE {condition}" if condition else ""
    table = spark.sql(f"SELECT * FROM {name} VERSION AS OF {version}{chosen}")  # noqa: S608 - what the user names
    size_bytes = table._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()  # noqa: SLF001 - no other way
    return _Input(table, of_path, f"{table_id}@{version}{chosen}", int(str(size_bytes)))


def _table_of_files(
    spark: SparkSession, paths: Sequence[str], fmt: FileFormat, place: str, base: str | None, *, text_paths: bool
) -> _Input:
    """Return the content of the files as a table. Raises SettingsError if JSON files are in a partition directory (such
    as ``topic=a/``) named after a record column, or if Spark would find no lines in a compressed file.
    """
    of_runs, others = files_of_runs(spark, paths)
    options = reader_options(spark, others, base) if others else {}
    if of_runs and "basePath" in options:
        text = (
            f"directories below {options['basePath']} are columns, but a run of a backfill has none: read it separately"
        )
        raise SettingsError([Problem(place, text)])
    reader, paths = spark.read.options(**LOSSLESS, **options), [*of_runs, *others]
    if fmt == "parquet":
        reader = reader.option("mergeSchema", "false")
        table = reader.parquet(*paths)
        in_files = columns_of_files(spark, sorted(table.inputFiles()))
        not_of_path = {*in_files, *RECORDS.names, "timestamp"}
        of_path = [name for name in table.columns if name not in not_of_path]
        schema = _with_path_types(table.schema, of_path, as_text=text_paths)
        return _of_files(table if schema == table.schema else reader.schema(schema).parquet(*paths), of_path)
    reader = reader.option("lineSep", "\n")
    lines = reader.text(list(paths))
    refuse_unread_codecs(spark, sorted(lines.inputFiles()))
    of_path = [name for name in lines.columns if name != "value"]
    taken = [name for name in of_path if name in RECORDS.names]
    if taken:
        text = f"the paths have a column `{taken[0]}` (`{taken[0]}=...`), and so do the lines: rename the directories"
        raise SettingsError([Problem(place, text)])
    schema = _with_path_types(lines.schema, of_path, as_text=text_paths)
    lines = lines if schema == lines.schema else reader.schema(schema).text(list(paths))
    # The lines are read as bytes, because Spark's own JSON reader would turn 1.0 into 1, and drop unparsable content.
    row = F.struct(F.col("value").cast(BinaryType()).alias("value")) if fmt == "json" else _json_row()
    names = list(map(quoted, of_path))
    return _of_files(lines.select(row.alias("row"), *names).select("row.*", *names), of_path)


def _with_path_types(schema: StructType, of_path: Sequence[str], *, as_text: bool) -> StructType:
    """Return the schema with the types that the columns ``of_path`` must have."""
    # Spark infers `void` if each directory is `name=__HIVE_DEFAULT_PARTITION__`, but no file can have this type.
    text = {name for name in of_path if as_text or isinstance(schema[name].dataType, NullType)}
    return StructType([StructField(each.name, StringType()) if each.name in text else each for each in schema.fields])


def _of_files(table: DataFrame, of_path: list[str]) -> _Input:
    """Return the table with an identity computed from the names, sizes, and modification times of its files."""
    spark = table.sparkSession
    jvm: Any = spark._jvm  # noqa: SLF001
    conf = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    digest, size_bytes = blake2b(digest_size=16), 0
    files = sorted(table.inputFiles())
    plain = _of_delta(table, files)
    for file in files:
        # The names of Delta files are not URL-encoded, but the names of other tables' files are.
        path = jvm.org.apache.hadoop.fs.Path(file if file in plain else jvm.java.net.URI(file.replace(" ", "%20")))
        try:
            status = path.getFileSystem(conf).getFileStatus(path)
        except Py4JJavaError as error:
            if "FileNotFoundException" not in str(error):
                raise
            text = "was deleted, but is listed in the input. Nothing was judged. Restore it, or repair the table"
            raise SettingsError([Problem(file, text)]) from error
        digest.update(f"{file} {status.getLen()} {status.getModificationTime()}\n".encode())
        size_bytes += status.getLen()
    return _Input(table, of_path, digest.hexdigest(), size_bytes)


def _of_delta(table: DataFrame, files: Sequence[str]) -> Collection[str]:
    """Return the files in ``files`` that Delta lists for the table."""
    leaves = table._jdf.queryExecution().optimizedPlan().collectLeaves()  # noqa: SLF001 - no other way
    relations = [leaves.apply(at) for at in range(leaves.size())]
    relations = [each.relation() for each in relations if each.getClass().getSimpleName() == "LogicalRelation"]
    listings = [each.location() for each in relations if each.getClass().getSimpleName().endswith("HadoopFsRelation")]
    of_delta = [each for each in listings if ".delta." in each.getClass().getName()]
    if len(of_delta) == leaves.size():
        return frozenset(files)
    return {file for each in of_delta for file in each.inputFiles()}


@dataclass(frozen=True, slots=True)
class _LogOrder:
    """The order in which a job reads its input."""

    placed: bool
    """Whether rows have offsets."""
    contiguous: bool = False
    """Whether Spark reads the rows in log order without a sort: no two runs of ascending offsets overlap."""
    bounds: tuple[PartitionBounds, ...] = ()
    begins: frozenset[tuple[str, int, int]] = frozenset()
    """Topic, partition, and first offset of each run of ascending offsets."""

    def begins_at(self, logs: Iterable[LogSplits]) -> bool:
        """Return whether every run of ascending offsets begins at the start of a row group, so that offsets ascend
        within each row group.
        """
        return self.begins <= {(log.topic, log.partition, offset) for log in logs for offset in log.first_offsets}


def _log_order(records: DataFrame, place: str, splits: InputSplits | None) -> _LogOrder:
    """Determine from the coordinates of all rows whether the rows are in log order. Raises SettingsError if only some
    rows have topic, partition, and offset.
    """
    frame, look = records.select(*COORDINATES), _offset_runs
    if splits is not None:
        columns = splits.columns
        frame = splits.frame.coalesce(splits.frame.sparkSession.sparkContext.defaultParallelism)
        look = lambda batches: _offset_runs(read_splits(columns, rows_of(batches), COORDINATES))  # noqa: E731
    reports = [orjson.loads(row["report"]) for row in frame.mapInArrow(look, "report binary").collect()]
    found = _united([pa.Table.from_pylist(each["found"], _FOUND) for each in reports]).to_pylist()
    whole = [each for each in found if None not in each.values()]
    rows, placed = sum(each["rows"] for each in found), sum(each["placed"] for each in whole)
    anywhere = any(each["placed"] or (each["topic"], each["partition"]) != (None, None) for each in found)
    if anywhere and placed < rows:
        raise partly_placed(place, placed, rows)
    bounds = tuple(PartitionBounds(*list(each.values())[:-1]) for each in whole)
    if not placed or any(each["runs"] is None for each in reports):
        return _LogOrder(placed > 0, bounds=bounds)
    runs = sorted(run for each in reports for run in each["runs"])
    contiguous = all(before[:2] != after[:2] or before[3] < after[2] for before, after in pairwise(runs))
    begins = frozenset((topic, partition, first) for topic, partition, first, _ in runs)
    return _LogOrder(placed=True, contiguous=contiguous, bounds=bounds, begins=begins)


def partly_placed(place: str, placed: int, rows: int) -> SettingsError:
    """Return the error for an input in which only some rows have offsets."""
    text = f"only {placed:,} of {rows:,} rows have topic, partition and offset; judge the others separately"
    return SettingsError([Problem(place, text)])


def _united(parts: Sequence[pa.Table]) -> pa.Table:
    grouped = pa.concat_tables([_FOUND.empty_table(), *parts]).group_by(["topic", "partition"])
    united = grouped.aggregate([("first", "min"), ("last", "max"), ("placed", "sum"), ("rows", "sum")])
    return united.rename_columns(_FOUND.names)


def _offset_runs(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Yield one JSON report that contains the rows of `_FOUND` and, if the input is in log order, the runs of ascending
    offsets.
    """
    runs = OffsetRuns()
    topics: list[str] = []
    found = _FOUND.empty_table()
    ordered = True
    for batch in batches:
        topic, partition, offset = (batch.column(name) for name in COORDINATES)
        ones = pa.array(np.ones(batch.num_rows, np.int64))
        columns = [topic, partition, offset, offset, offset.is_valid().cast(pa.int64()), ones]
        found = _united([found, pa.Table.from_arrays(columns, schema=_FOUND)])
        ordered = ordered and not (topic.null_count or partition.null_count or offset.null_count)
        if ordered and batch.num_rows:
            topics += [name for name in topic.unique().to_pylist() if name not in topics]
            numbers = np.asarray(pc.index_in(topic, value_set=pa.array(topics)), np.int64)
            places = numbers, integers_of(batch, "partition"), integers_of(batch, "offset")
            try:
                runs.take(*places, np.zeros(batch.num_rows, np.int64))
            except StateIncompatible:
                ordered = False
    named = [(topics[run.topic], run.partition, run.first_offset, run.last_offset) for run in runs.all]
    report = {"found": found.to_pylist(), "runs": named if ordered else None}
    yield pa.RecordBatch.from_pydict({"report": pa.array([orjson.dumps(report)], pa.binary())})


def _json_row() -> Column:
    """Parse the `json-records` line in the column `value`, and return a struct with the columns of a record."""
    # The job fails on a line without `value`, which would become a tombstone, and on a misspelled member, which would
    # be ignored.
    members = F.json_object_keys("value")
    unknown = F.array_except(members, F.array(*map(F.lit, RECORDS.fieldNames())))
    others = ", ".join(name for name in RECORDS.fieldNames() if name != "value")
    rule = f"each line of json-records is an object with `value`, which may be null, and otherwise only {others}; not: "
    text = F.concat(F.lit(rule), F.substring("value", 1, _SHOWN))
    whole = F.array_contains(members, "value") & (F.size(unknown) == 0)
    row = F.from_json("value", _JSON_RECORD, {"mode": "FAILFAST"})
    return F.when(F.coalesce(whole, F.lit(False)), row).otherwise(F.raise_error(text))  # noqa: FBT003 - a column


def _input_splits(table: DataFrame) -> InputSplits | None:
    """Return the row groups of the table's files, or None if Spark must read the files."""
    files = table.inputFiles()
    if not files or any(urlsplit(file).scheme != "file" for file in files):
        return None
    columns = tuple(name for name in RECORDS.names if name in table.columns)
    if "timestamp_ms" not in columns and "timestamp" in table.columns:
        return None
    groups: list[tuple[str, int]] = []
    places: list[_GroupPlace | None] = []
    rows = total_bytes = 0
    for file in sorted(files):
        with pq.ParquetFile(_path(file)) as parquet:
            schema = parquet.schema_arrow
            types = {name: (ARROW_RECORDS.field(name).type, *_CAST.get(name, ())) for name in columns}
            if not all(name in schema.names and schema.field(name).type in types[name] for name in columns):
                return None
            for at in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(at)
                if group.num_rows:
                    groups.append((file, at))
                    places.append(_place_of(group, (file, at)))
                    rows += group.num_rows
                    total_bytes += group.total_byte_size
    if not groups:
        return None
    spark = table.sparkSession
    context = spark.sparkContext
    tasks = min(len(groups), max(_TASKS_PER_CORE * context.defaultParallelism, -(-total_bytes // _TASK_BYTES)))
    frame = spark.createDataFrame(context.parallelize(groups, tasks), "file string, row_group int")
    return InputSplits(frame, columns, rows, _logs_of(places))


class _GroupPlace(NamedTuple):
    """A row group's position in the log of its Kafka partition."""

    topic: str
    partition: int
    first_offset: int
    group: tuple[str, int]
    rows: int


def _place_of(group: pq.RowGroupMetaData, name: tuple[str, int]) -> _GroupPlace | None:
    """Return a row group's position according to its statistics, or None if the statistics do not determine the
    position.
    """
    columns = [group.column(at) for at in range(group.num_columns)]
    found = {column.path_in_schema: column.statistics for column in columns if column.path_in_schema in COORDINATES}
    known = [each for each in found.values() if each is not None and each.has_min_max and each.null_count == 0]
    if len(known) < len(COORDINATES):
        return None
    try:
        (topic, partition, offset), greatest = zip(*((found[at].min, found[at].max) for at in COORDINATES), strict=True)
    except UnicodeDecodeError:
        return None
    return _GroupPlace(topic, partition, offset, name, group.num_rows) if (topic, partition) == greatest[:2] else None


def _logs_of(places: Sequence[_GroupPlace | None]) -> tuple[LogSplits, ...]:
    placed = sorted(place for place in places if place is not None)
    if len(placed) < len(places):
        return ()
    logs = []
    for (topic, partition), found in groupby(placed, key=lambda place: (place.topic, place.partition)):
        groups = list(found)
        names, firsts = [each.group for each in groups], [each.first_offset for each in groups]
        logs.append(LogSplits(topic, partition, names, sum(each.rows for each in groups), firsts))
    return tuple(logs)


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `InputSplits.frame` as dictionaries."""
    for batch in batches:
        yield from batch.to_pylist()


def read_splits(
    columns: Sequence[str], splits: Iterable[Mapping[str, Any]], wanted: Sequence[str] = tuple(RECORDS.names)
) -> Batches:
    """Yield the ``wanted`` columns of the row groups in ``splits`` (`file`, `row_group`).

    ``columns`` lists the columns that the files have. Raises DamagedFile if a file cannot be read.
    """
    there = [name for name in wanted if name in columns]
    for split in splits:
        file, groups = split["file"], [split["row_group"]]
        try:
            # With a buffer, Arrow does not read a whole column of the row group into memory.
            with pq.ParquetFile(_path(file), pre_buffer=False, buffer_size=_READ_BYTES) as parquet:
                most_rows = _rows_at_once(parquet, split["row_group"]) if "value" in wanted else _FEW_COLUMNS_ROWS
                for rows in gathered(parquet.iter_batches(most_rows, groups, columns=there, use_threads=False)):
                    yield pa.RecordBatch.from_arrays([_column(rows, name) for name in wanted], list(wanted))
        except (OSError, pa.ArrowException) as error:
            raise DamagedFile(f"Error while reading file {file} : {error}") from error


def _rows_at_once(parquet: pq.ParquetFile, row_group: int) -> int:
    """Return the number of rows of a row group that fit into `SLICE_BYTES` on average, and at most `_READ_ROWS`."""
    found = parquet.metadata.row_group(row_group)
    average_bytes = int(found.total_byte_size) // max(1, int(found.num_rows))
    return max(1, min(_READ_ROWS, SLICE_BYTES // max(1, average_bytes)))


def _path(file: str) -> str:
    return unquote(urlsplit(file).path)


def _column(rows: pa.RecordBatch, name: str) -> pa.Array:
    kind = ARROW_RECORDS.field(name).type
    column = rows.column(name).cast(kind) if name in rows.schema.names else pa.nulls(rows.num_rows, kind)
    if name == "headers" and column.null_count:
        # `coalesce` gives the same result, but takes a hundred times as long.
        ends = np.append(0, np.cumsum(column.value_lengths().fill_null(0))).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(ends), column.flatten())
    return column
