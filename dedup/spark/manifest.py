"""The files that a published run consists of, and the only way to read a run that needs no directory listing.

Theory of operation. A rename publishes a directory at once on a local disk or HDFS only; on an object store it copies
file by file. There, the files of a run stay under a name that Spark ignores, and the run's *manifest*, a small object
that names them, is written last: the store shows it whole or not at all. A run without a manifest does not exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import StructType

from dedup.errors import Problem, SettingsError
from dedup.spark.session import HadoopDirectory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REPORT: Final = "_run.json"
"""The report in the directory of a run that was published by a rename."""
_RENAMING: Final = frozenset({"file", "hdfs"})
"""File systems that rename a directory at once."""
_IN_A_RUN: Final = re.compile(r"(?P<root>.+)/run=(?P<run>[^/]+)(?P<rest>(?:/[^/]+=[^/]+)*)/?")


@dataclass(frozen=True, slots=True)
class RunManifest:
    """What a run published on a file system that cannot rename a directory at once."""

    directory: str
    """The directory that the files are in, relative to that of all runs."""
    files: tuple[str, ...]
    """Paths relative to ``directory``."""
    schema: str
    """The columns, as Spark's JSON."""


def renames_directories(root: HadoopDirectory) -> bool:
    """Return whether a rename publishes a directory at once."""
    return str(root.files.getScheme()) in _RENAMING


def report_path(root: HadoopDirectory, run: str, *, renamed: bool) -> Any:  # noqa: ANN401 - a path of Hadoop's
    """Return the path of a run's report, which is there if and only if the run was published."""
    return root.at(f"run={run}/{REPORT}" if renamed else f"_runs/{run}.json")


def listed(spark: SparkSession, directory: Any, schema: StructType) -> RunManifest:  # noqa: ANN401
    """Return the manifest of all files that a finished job wrote to ``directory``."""
    name = directory.getName()
    files = spark.read.schema(schema).parquet(str(directory)).inputFiles()
    return RunManifest(name, tuple(sorted(file.rpartition(f"/{name}/")[2] for file in files)), schema.json())


def read_run(spark: SparkSession, path: str, run: str = "backfill") -> DataFrame:
    """Return the verdicts that a run of `backfill` published under ``path``, on every file system and in every format.

    Reads exactly the files of the run, whatever else is there. Raises SettingsError if there is no such run, which is
    so until all of it is published.
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
    """Return the paths, with the files of the manifest for one of a run that has one (``verdicts/run=may``).

    A directory in the run, such as ``verdicts/run=may/verdict=unique``, stands for the run's files in it.
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
    """Return the manifest of a run; None if it was not published by one."""
    path = report_path(root, run, renamed=False)
    if not root.files.exists(path):
        return None
    found = json.loads(root.read(path))["manifest"]
    return None if found is None else RunManifest(found["directory"], tuple(found["files"]), found["schema"])
