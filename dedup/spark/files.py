"""History in files: Parquet, JSON lines, Delta tables. What is damaged or not alike is refused before the job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import BinaryType

from dedup.core.stream_time import Feed
from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.spark.json_rows import as_events, json_rows
from dedup.spark.pieces import Pieces, pieces_of, surveyed
from dedup.spark.rows import COORDINATES, records_of_files
from dedup.spark.screened import read_notice, write_notice
from dedup.spark.stretches import Stretch, Stretches, overlap

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FileFormat = Literal["parquet", "json", "json-records", "delta"]
"""``json``: each line is an event. ``json-records``: each line is a row with the columns of `rows.RECORDS`, as text."""

_AT_ONCE: Final = 8
_SURVEY: Final = "counts array<bigint>, notice binary, topics binary"
_LOSSLESS: Final = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}


@dataclass(frozen=True, slots=True)
class History:
    """Records to judge, and how they may be judged."""

    records: DataFrame
    """`rows.RECORDS`."""
    placed: bool
    """Whether rows have Kafka coordinates."""
    contiguous: bool
    """Whether Spark reads them in the log's order as they are; see `batch.judged`."""
    identity: str
    """What was read; another identity is another input."""
    place: str
    """For people."""
    feeds: tuple[Feed, ...] = ()
    """For the repartition topic: every source partition that feeds it."""
    countable: bool = False
    """Whether `count` costs little, and gives the same number again."""
    pieces: Pieces | None = None
    """The same records, where tasks can read the files themselves."""


def read_files(spark: SparkSession, paths: Sequence[str], fmt: FileFormat, *, rows_are_events: bool = False) -> History:
    """Return the records of files or directories.

    ``rows_are_events``: the table has no column `value`; each row, as JSON without its null columns, is an event.
    Raises SettingsError naming every file that is damaged or of another schema than the first, and TopologyError for
    columns that are missing or of another type.
    """
    place = ", ".join(paths)
    if rows_are_events and fmt.startswith("json"):
        text = f"--rows-are-events is for tables; with --format {fmt} each line says by itself what it is"
        raise SettingsError([Problem(place, text)])
    table = _table(spark, paths, fmt, place)
    if rows_are_events:
        table = table.select(as_events(table).alias("value"))
    records = records_of_files(table, place=place)
    pieces = pieces_of(spark, table.inputFiles(), table) if fmt == "parquet" and not rows_are_events else None
    placed, contiguous = in_log_order(records, place, pieces) if "offset" in table.columns else (False, False)
    identity = _delta_version(spark, paths) if fmt == "delta" else _files_identity(spark, table)
    named = f"{fmt} {identity} rows_are_events={rows_are_events}"
    countable = fmt in {"parquet", "delta"}
    return History(records, placed, contiguous, named, place, countable=countable, pieces=pieces)


def _table(spark: SparkSession, paths: Sequence[str], fmt: FileFormat, place: str) -> DataFrame:
    reader = spark.read.options(**_LOSSLESS)
    try:
        match fmt:
            case "json":
                # As bytes: Spark's own JSON reader would turn 1.0 into 1, and drop what it can not parse.
                lines = reader.option("lineSep", "\n").text(list(paths))
                return lines.select(F.col("value").cast(BinaryType()).alias("value"))
            case "json-records":
                return json_rows(reader.option("lineSep", "\n").text(list(paths)))
            case "delta":
                tables = [reader.format("delta").load(path) for path in paths]
                whole = tables[0]
                for other in tables[1:]:
                    whole = whole.unionByName(other)
                return whole
            case "parquet":
                found = reader.option("mergeSchema", "false").parquet(*paths)
                _refuse_drift(spark, sorted(found.inputFiles()))
                return found
    except AnalysisException as error:
        text = f"can not be read as {fmt}: {str(error).splitlines()[0]}"
        raise SettingsError([Problem(place, text)]) from error


def _refuse_drift(spark: SparkSession, files: Sequence[str]) -> None:
    """Every Parquet file has the same columns as the first: Spark would read those of one and fill in nulls.

    A null value is a tombstone and a null time is none, so a column that is missing in one file changes verdicts.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(lambda file: _footer(spark, file), files))
    problems = [Problem(file, reason) for file, (_, reason) in zip(files, found, strict=True) if reason]
    wanted = next((columns for columns, reason in found if not reason), {})
    for file, (columns, reason) in zip(files, found, strict=True):
        for name in [] if reason else sorted({*wanted, *columns}):
            if columns.get(name) != wanted.get(name):
                here, first = columns.get(name, "missing"), wanted.get(name, "missing")
                problems.append(Problem(file, f"column `{name}` is {here}, in the first file {first}: read them apart"))
    if problems:
        raise SettingsError(problems)


def _footer(spark: SparkSession, file: str) -> tuple[dict[str, str], str]:
    """Return the columns of a Parquet file and their types, or why there are none."""
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
        return {}, f"is damaged: {str(error.java_exception.getMessage()).splitlines()[0]}. Mend or remove it"
    finally:
        if reader is not None:
            reader.close()


def _files_identity(spark: SparkSession, table: DataFrame) -> str:
    """Return a digest of the files' names and sizes."""
    jvm: Any = spark._jvm  # noqa: SLF001
    conf = spark._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    digest = blake2b(digest_size=16)
    for file in sorted(table.inputFiles()):
        path = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(file))
        digest.update(f"{file} {path.getFileSystem(conf).getFileStatus(path).getLen()}\n".encode())
    return digest.hexdigest()


def _delta_version(spark: SparkSession, paths: Sequence[str]) -> str:
    rows = [spark.sql(f"DESCRIBE HISTORY delta.`{path}` LIMIT 1").first() for path in paths]
    return " ".join(f"{path}@{'?' if row is None else row['version']}" for path, row in zip(paths, rows, strict=True))


def in_log_order(records: DataFrame, place: str, pieces: Pieces | None = None) -> tuple[bool, bool]:
    """Return whether rows have coordinates, and whether Spark reads them in the log's order as they are.

    In that order each Spark partition has ascending offsets, and no two overlap: then nothing need be sorted. A wrong
    answer would be noticed: the job checks it while it runs. Reads three columns of the input. Raises SettingsError
    where only some rows have coordinates.
    """
    if pieces is None:
        found = records.select(*COORDINATES).mapInArrow(_surveyed, _SURVEY).collect()
    else:
        found = surveyed(pieces, _surveyed, _SURVEY).collect()
    rows, placed, anywhere = (sum(counts) for counts in zip(*(row["counts"] for row in found), strict=True))
    if anywhere and placed < rows:
        text = f"only {placed:,} of {rows:,} rows have topic, partition and offset; judge the others by themselves"
        raise SettingsError([Problem(place, text)])
    if not placed or any(row["notice"] is None for row in found):
        return placed > 0, False
    stretches: list[Stretch] = []
    names: list[str] = []
    for row in found:
        # Positions of topics are each task's own.
        own = bytes(row["topics"]).decode().split("\n")
        for stretch in read_notice([bytes(row["notice"])]):
            topic = own[stretch.topic]
            if topic not in names:
                names.append(topic)
            stretch.topic = names.index(topic)
            stretches.append(stretch)
    return True, overlap(stretches) is None


def _surveyed(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Yield one row: [rows, those with all coordinates, those with any], the stretches or null, and their topics."""
    context = TaskContext.get()
    stretches = Stretches(0 if context is None else context.partitionId())
    topics: list[str] = []
    counts = [0, 0, 0]
    ordered = True
    for batch in batches:
        valid = [batch.column(name).is_valid() for name in COORDINATES]
        everywhere = pc.and_(pc.and_(*valid[:2]), valid[2])
        anywhere = pc.or_(pc.or_(*valid[:2]), valid[2])
        found = (batch.num_rows, everywhere.true_count, anywhere.true_count)
        counts = [before + more for before, more in zip(counts, found, strict=True)]
        ordered = ordered and everywhere.true_count == batch.num_rows
        if ordered and batch.num_rows:
            try:
                _take(stretches, batch, topics)
            except StateIncompatible:
                ordered = False
    columns = {
        "counts": pa.array([counts], pa.list_(pa.int64())),
        "notice": pa.array([write_notice(stretches.all) if ordered else None], pa.binary()),
        "topics": pa.array(["\n".join(topics).encode()], pa.binary()),
    }
    yield pa.RecordBatch.from_pydict(columns)


def _take(stretches: Stretches, batch: pa.RecordBatch, topics: list[str]) -> None:
    column = batch.column("topic").dictionary_encode()
    topics += [name for name in column.dictionary.to_pylist() if name not in topics]
    positions = np.array([topics.index(name) for name in column.dictionary.to_pylist()], np.int64)
    where = positions[column.indices.to_numpy(zero_copy_only=False)]
    partitions, offsets = (batch.column(name).to_numpy().astype(np.int64) for name in ("partition", "offset"))
    stretches.take(where, partitions, offsets, np.zeros(batch.num_rows, np.int64))
