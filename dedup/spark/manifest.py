"""Reads runs that `dedup spark backfill` published, and defines the manifest that lists the files of a run.

Renaming a directory is atomic only on a local disk or HDFS. On an object store, a job therefore leaves a run's files in
a directory that Spark ignores, and publishes the run by writing the manifest last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import StructType

from dedup.errors import Problem, SettingsError
from dedup.spark.session import HadoopDirectory

REPORT: Final = "_run.json"
"""The report's file name in the directory of a run that was published by a rename."""
RENAMING: Final = frozenset({"file", "hdfs"})
"""File systems that rename a directory atomically."""
_IN_A_RUN: Final = re.compile(r"(?P<root>.+)/run=(?P<run>[^/]+)(?P<rest>(?:/[^/]+=[^/]+)*)/?")


@dataclass(frozen=True, slots=True)
class RunManifest:
    """Lists the files of a run published on an object store, where renaming a directory is not atomic."""

    directory: str
    """The directory that contains the files, relative to the directory of all runs."""
    files: tuple[str, ...]
    """Paths relative to ``directory``."""
    schema: str
    """The schema of the files, in Spark's JSON format."""


def report_path(root: HadoopDirectory, run: str, *, renamed: bool) -> Any:  # noqa: ANN401 - a Hadoop path
    """Return the path of a run's report; the report exists if and only if the run was published."""
    return root.at(f"run={run}/{REPORT}" if renamed else f"_runs/{run}.json")


def listed(spark: SparkSession, directory: Any, schema: StructType) -> RunManifest:  # noqa: ANN401
    """Return a manifest of all files that a finished job wrote to ``directory``."""
    name = directory.getName()
    files = spark.read.schema(schema).parquet(str(directory)).inputFiles()
    return RunManifest(name, tuple(sorted(file.rpartition(f"/{name}/")[2] for file in files)), schema.json())


def read_run(spark: SparkSession, path: str, run: str = "backfill") -> DataFrame:
    """Return the verdicts that a run of `dedup spark backfill` published under ``path`` in Parquet or Delta format.

    The function ignores files under ``path`` that do not belong to the run. Raises SettingsError if the run was not
    published.
    """
    root = HadoopDirectory(spark, path)
    if root.files.exists(report_path(root, run, renamed=True)):
        return spark.read.parquet(str(root.at(f"run={run}")))
    if not root.files.exists(report_path(root, run, renamed=False)):
        raise SettingsError([Problem(path, f"has no run {run}; `dedup spark backfill --run {run}` publishes it")])
    manifest = _read(root, run)
    if manifest is None:
        return spark.read.format("delta").load(path).where(F.col("run") == run).drop("run")
    schema = StructType.fromJson(json.loads(manifest.schema))
    if not manifest.files:
        return spark.createDataFrame([], schema)
    base = root.at(manifest.directory)
    files = [str(root.at(file, base)) for file in manifest.files]
    return spark.read.schema(schema).option("basePath", str(base)).parquet(*files)


def files_of_runs(spark: SparkSession, paths: Sequence[str]) -> list[str]:
    """Return ``paths``, with the path of each run that has a manifest replaced by the paths of the run's files.

    For example, ``verdicts/run=may`` is the path of a run, and ``verdicts/run=may/verdict=unique`` is the path of a
    directory in this run. Raises SettingsError if a run published no files under a path.
    """
    found: list[str] = []
    for path in paths:
        inside = _IN_A_RUN.fullmatch(path)
        manifest = None if inside is None else _read(HadoopDirectory(spark, inside["root"]), inside["run"])
        if inside is None or manifest is None:
            found.append(path)
            continue
        begin = inside["rest"].removeprefix("/")
        base = f"{inside['root']}/{manifest.directory}"
        files = [f"{base}/{file}" for file in manifest.files if file.startswith(f"{begin}/" if begin else "")]
        if not files:
            raise SettingsError([Problem(path, f"run {inside['run']} published no records there")])
        found += files
    return found


def _read(root: HadoopDirectory, run: str) -> RunManifest | None:
    path = report_path(root, run, renamed=False)
    if not root.files.exists(path):
        return None
    found = json.loads(root.read(path))["manifest"]
    return None if found is None else RunManifest(found["directory"], tuple(found["files"]), found["schema"])
