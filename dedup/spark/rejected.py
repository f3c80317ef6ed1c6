"""Keeps the records that `dedup spark upsert` cannot turn into rows. No existing file is overwritten or deleted."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from dedup.errors import DedupError, Problem, SettingsError
from dedup.spark.files import FileFormat
from dedup.spark.input_files import literal
from dedup.spark.manifest import delta_table_of
from dedup.spark.session import HadoopDirectory


@dataclass(frozen=True, slots=True)
class Rejected:
    """The records of a run that cannot become rows."""

    counts: Mapping[str, int]
    """The number of rejected records for each reason."""
    path: str | None
    """The directory that contains the records, or None if no directory was given."""


def keep_rejected(rejected: DataFrame, path: str | None) -> Rejected:
    """Write the rejected records (`tables.TableRows`) to a new subdirectory of ``path``.

    Raises DedupError if a record was rejected and ``path`` is None, and SettingsError if no file can be written to
    ``path``.
    """
    if path is not None:
        HadoopDirectory(rejected.sparkSession, path).refuse_unwritable("--rejected")
        # Spark reads the subdirectories of all runs as one table, in which `upsert` is a column.
        run = f"upsert={datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"
        own = f"{path.rstrip('/')}/{run}"
        rejected.write.mode("errorifexists").parquet(own)
        # Spark treats a path as a pattern when reading, but not when writing.
        kept = rejected.sparkSession.read.parquet(literal(own))
        rows = kept.groupBy("reason").count().orderBy(fn.desc("count")).collect()
        return Rejected({row["reason"]: row["count"] for row in rows}, own)
    first = rejected.first()
    if first is None:
        return Rejected({}, None)
    number = rejected.count()
    where = "" if first["offset"] is None else f" ({first['topic']}/{first['partition']} offset {first['offset']})"
    raise DedupError(
        f"{number} records cannot become rows, the first{where} because of {first['reason']}: {first['detail']}. "
        f"Nothing was written. Correct --schema or --order, or give a directory for them with --rejected."
    )


def refuse_overlap(
    spark: SparkSession, path: str, inputs: Sequence[str], fmt: FileFormat, delta: str | None = None
) -> None:
    """Raise SettingsError if ``path`` is, contains, or is inside an input or the Delta table at the path ``delta``.

    Otherwise, a later run could read rejected records as input, or the vacuum of a table could delete them. Also raises
    SettingsError if ``path`` is a file.
    """
    here = HadoopDirectory(spark, path)
    if here.files.exists(here.path) and not here.files.getFileStatus(here.path).isDirectory():
        raise SettingsError([Problem("--rejected", f"{path} is a file; name a directory")])
    places = [("the Delta table", delta, False)] if delta is not None else []
    for each in inputs:
        if fmt == "table":
            places += [("the files of the input", where, False) for where in _location(spark, each)]
        elif fmt == "delta":
            places.append(("the input", delta_table_of(spark, each)[0], False))
        else:
            places.append(("the input", each, True))
    for what, place, is_pattern in places:
        if _overlaps(spark, path, place, is_pattern=is_pattern):
            text = f"{path} overlaps {what} {place}: one is inside the other; name a directory that is apart from it"
            raise SettingsError([Problem("--rejected", text)])


def _location(spark: SparkSession, table: str) -> list[str]:
    """Return the directory of a table in a catalog as a list, which is empty for a table without a directory, such as a
    view.
    """
    facts = {row["col_name"]: row["data_type"] for row in spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()}
    return [facts["Location"]] if facts.get("Location") else []


def _overlaps(spark: SparkSession, path: str, place: str, *, is_pattern: bool) -> bool:
    """Return whether one of two paths contains the other; ``place`` can be a pattern, such as `data/day=*`."""
    globs: Any = spark._jvm.org.apache.hadoop.fs  # type: ignore[union-attr]  # noqa: SLF001  # PySpark's only way
    one = _steps(spark, path)
    for each in globs.GlobExpander.expand(place) if is_pattern else [place]:
        pairs = zip(one, _steps(spark, each), strict=False)  # the shorter path decides
        if all(step == other or (is_pattern and globs.GlobPattern(other).matches(step)) for step, other in pairs):
            return True
    return False


def _steps(spark: SparkSession, path: str) -> list[str]:
    """Return the parts of an absolute path, such as `["s3a:", "", "bucket", "orders"]`."""
    found = HadoopDirectory(spark, path).absolute
    local = found.removeprefix("file:")
    return (found if local == found else f"file:{os.path.realpath(local)}").rstrip("/").split("/")
