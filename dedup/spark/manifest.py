"""Reads runs that `dedup spark backfill` published, and defines the manifest that lists the files of a run.

Renaming a directory is atomic only on a local disk or HDFS. On an object store, a job therefore leaves a run's files in
a directory that Spark ignores, and publishes the run by finally writing the manifest. A run that is published by a
rename also has a manifest, so that readers can detect missing files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import StructType

from dedup.errors import Problem, SettingsError
from dedup.spark.input_files import PATTERN, literal
from dedup.spark.session import HadoopDirectory
from dedup.spark.table_log import DeltaLog

REPORT: Final = "_run.json"
"""The report's file name in the directory of a run that was published by a rename."""
RENAMING: Final = frozenset({"file", "hdfs"})
"""File systems that rename a directory atomically."""
_IN_A_RUN: Final = re.compile(r"(?P<root>.+)/run=(?P<run>[^/]+)(?P<rest>(?:/[^/]+=[^/]+)*)/?")
_IN_A_TABLE: Final = re.compile(r"(?P<root>.+)/run=(?P<run>[\w-]+)(?:/verdict=(?P<verdict>\w+))?/?")


@dataclass(frozen=True, slots=True)
class RunManifest:
    """Lists the files of a published run."""

    directory: str
    """The directory that contains the files, relative to the directory of all runs."""
    files: tuple[str, ...]
    """Paths relative to ``directory``."""
    schema: str
    """The schema of the files, in Spark's JSON format."""


def report_path(root: HadoopDirectory, run: str, *, renamed: bool) -> Any:  # noqa: ANN401 - a Hadoop path
    """Return the path of a run's report, which exists if and only if the run was published."""
    return root.at(f"run={run}/{REPORT}" if renamed else f"_runs/{run}.json")


def listed(spark: SparkSession, directory: Any, schema: StructType) -> RunManifest:  # noqa: ANN401
    """Return a manifest of all files that a finished job wrote to ``directory``."""
    name = directory.getName()
    files = spark.read.schema(schema).parquet(literal(str(directory))).inputFiles()
    return RunManifest(name, tuple(sorted(file.rpartition(f"/{name}/")[2] for file in files)), schema.json())


def read_run(spark: SparkSession, path: str, run: str = "backfill") -> DataFrame:
    """Return the verdicts that a run of `dedup spark backfill` published under ``path`` in Parquet or Delta format.

    The function ignores files under ``path`` that do not belong to the run. Raises SettingsError if the run was not
    published, or if a file of the run is missing.
    """
    root = HadoopDirectory(spark, path)
    report = _report(root, run)
    if report is None:
        raise SettingsError([Problem(path, f"has no run {run}; `dedup spark backfill --run {run}` publishes it")])
    manifest = _manifest_in(report)
    if manifest is None and root.files.exists(report_path(root, run, renamed=True)):
        return spark.read.parquet(literal(str(root.at(f"run={run}"))))
    if manifest is None:
        return spark.read.format("delta").load(path).where(F.col("run") == run).drop("run")
    schema = StructType.fromJson(json.loads(manifest.schema))
    if not manifest.files:
        # As in a run with records, the column that comes from the paths of the files is the last one.
        return spark.createDataFrame([], schema).select(
            *(name for name in schema.names if name != "verdict"), "verdict"
        )
    base = root.at(manifest.directory)
    files = [literal(str(root.at(file, base))) for file in manifest.files]
    try:
        return spark.read.schema(schema).option("basePath", str(base)).parquet(*files)
    except AnalysisException as error:
        text = (
            f"a file of run {run} is missing: {str(error).splitlines()[0]}. Restore it, or delete the run and repeat it"
        )
        raise SettingsError([Problem(path, text)]) from error


def files_of_runs(spark: SparkSession, paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files of the runs among ``paths``, and the paths that are not in a run.

    For example, ``verdicts/run=may`` is the path of a run, and ``verdicts/run=may/verdict=unique`` is the path of a
    directory in this run. Raises SettingsError if a run published no files under a path.
    """
    found: list[str] = []
    others: list[str] = []
    for path in paths:
        inside = None if PATTERN.search(path) else _IN_A_RUN.fullmatch(path)
        manifest = (
            None if inside is None else _manifest_of(spark, HadoopDirectory(spark, inside["root"]), inside["run"])
        )
        if inside is None or manifest is None:
            others.append(path)
            continue
        begin = inside["rest"].removeprefix("/")
        base = f"{inside['root']}/{manifest.directory}"
        files = [f"{base}/{file}" for file in manifest.files if file.startswith(f"{begin}/" if begin else "")]
        if not files:
            raise SettingsError([Problem(path, f"run {inside['run']} published no records there")])
        found += files
    return found, others


def delta_table_of(spark: SparkSession, path: str) -> tuple[str, str]:
    """Return the path of the Delta table that contains the rows at ``path``, and the SQL condition that selects them.

    ``path`` names a table (the condition is then empty) or a run in a table, such as ``verdicts/run=may`` or
    ``verdicts/run=may/verdict=unique``. Raises SettingsError if the run was not published in the table.
    """
    inside = _IN_A_TABLE.fullmatch(path)
    if inside is None or DeltaLog(spark, path).versions() or not DeltaLog(spark, inside["root"]).versions():
        return path, ""
    report = _report(HadoopDirectory(spark, inside["root"]), inside["run"])
    if report is None or _manifest_in(report) is not None:
        raise SettingsError([Problem(path, f"the Delta table {inside['root']} has no published run {inside['run']}")])
    chosen = {name: inside[name] for name in ("run", "verdict") if inside[name] is not None}
    return inside["root"], " AND ".join(f"{name} = '{value}'" for name, value in chosen.items())


def _manifest_of(spark: SparkSession, root: HadoopDirectory, run: str) -> RunManifest | None:
    """Return the manifest of a run, or None if the run was not published or is in a Delta table."""
    report = _report(root, run)
    manifest = None if report is None else _manifest_in(report)
    if manifest is None and root.files.exists(report_path(root, run, renamed=True)):
        # Earlier versions wrote no manifest if they published a run by a rename.
        return listed(spark, root.at(f"run={run}"), StructType().add("verdict", "string"))
    return manifest


def _report(root: HadoopDirectory, run: str) -> Mapping[str, Any] | None:
    for renamed in (True, False):
        path = report_path(root, run, renamed=renamed)
        if root.files.exists(path):
            found: Mapping[str, Any] = json.loads(root.read(path))
            return found
    return None


def _manifest_in(report: Mapping[str, Any]) -> RunManifest | None:
    found = report.get("manifest")
    return None if found is None else RunManifest(found["directory"], tuple(found["files"]), found["schema"])
