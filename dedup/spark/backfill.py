"""Implements `dedup spark backfill`, which judges a whole history and publishes all of its verdicts exactly once.

Each attempt at a run writes to its own directory, whose name begins with an underscore so that Spark ignores it. The
job then renames the directory, which publishes all verdicts of the run at once. On object stores, where a rename is not
atomic, the job publishes the run by writing a manifest that lists the attempt's files (`manifest`). If a run is killed,
the next attempt starts from the beginning, but with the first attempt's clock time.

Several jobs may attempt the same run at the same time. Before the run is published, an attempt never touches another
attempt's files. Afterward, the renames of all other attempts fail, so these attempts can never be published, and their
files are deleted.

On a local file system, the tasks that judge records also write the Parquet files, using Arrow. Each task attempt uses
its own file names, and the driver publishes only the files that successful tasks report.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from errno import EEXIST, ENOTEMPTY
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import StructType

from dedup.errors import BrokerUnavailable, InvariantBroken, Problem, SettingsError, StateIncompatible
from dedup.spark.batch_verdicts import ORDER_TEXTS, Judging, balanced, counts_of, history_of, judging, mode_of
from dedup.spark.columns import Batches
from dedup.spark.files import History
from dedup.spark.input_files import literal
from dedup.spark.manifest import RENAMING, REPORT, RunManifest, listed, report_path
from dedup.spark.session import HadoopDirectory, described, shuffles_for, translated_errors
from dedup.spark.table_log import DeltaLog, explained_by_delta
from dedup.topology.model import Topology

OutputFormat = Literal["parquet", "delta"]
_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_MARK_DIGITS: Final = 8

_CODECS: Final = {name: name for name in ("snappy", "none", "gzip", "zstd", "brotli")} | {
    "uncompressed": "none",
    "lz4_raw": "lz4",
}
"""Maps Spark's name for a compression codec to Arrow's name."""
_GROUP_ROWS: Final = 131_072
_GROUP_BYTES: Final = 64 << 20
_FEW_VALUES: Final = ("topic", "partition", "reason", "detail", "dedup_partition", "first_topic", "first_partition")
"""Columns that benefit from dictionary encoding."""
_WITHOUT_STATISTICS: Final = frozenset({"value", "headers", "detail"})
"""Columns that are written without statistics, because no reader filters by their minimum and maximum."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The result of a published backfill run."""

    run: str
    identity: str
    """Identifies the topology, the input, and the order. All runs with this name must have the same identity."""
    now_ms: int
    """The clock time that determined which event times were in the future."""
    order: str
    verdicts: Mapping[str, int]
    path: str
    causes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """See `batch_verdicts.Counts`. Reports of earlier versions lack this field, `files`, and `seconds`."""
    files: int = 0
    seconds: float = 0.0
    fresh: bool = True
    """False if nothing was written because the run had already been published."""


def backfill(
    history: History | DataFrame,
    topology: Topology,
    path: str,
    *,
    run: str = "backfill",
    now_ms: int | None = None,
    fmt: OutputFormat = "parquet",
    say: Callable[[str], None] = print,
) -> RunReport:
    """Publish the verdict on every record in the history under ``path`` exactly once, and return the report.

    ``history`` is the result of `files.read_files` or `kafka_source.read_kafka`, or a DataFrame with the schema
    `columns.RECORDS` in which either all rows or no rows have offsets. The files have the columns of
    `batch_verdicts.judged`, and are partitioned by verdict. All verdicts are published together, under ``run=<run>``; a
    run that is already published is not written again. ``now_ms`` is the clock time in ms that the job uses to detect
    future event times (default: the current time).

    Raises StateIncompatible if the run was published with a different input or topology, if another job publishes it in
    the meantime, if rows are repeated or belong to other topics, or if retention deleted records while the job was
    reading them. Raises RecordFailed if the policy `fail` applies to a record. Raises SettingsError or TopologyError
    for damaged files, an unsuitable table, or an invalid run name. Raises BrokerUnavailable if the job of another run
    changed the Delta table at the same time. `backfill` raises all of these errors before it publishes any verdict.
    """
    if not _RUN.fullmatch(run):
        raise SettingsError([Problem(f"--run {run}", "is not a valid directory name; use letters, digits, - and _")])
    began_s = time.monotonic()
    source = history if isinstance(history, History) else history_of(history, identified=True)
    if fmt == "delta" and "run" in map(str.lower, source.records.columns):
        raise SettingsError([Problem("column run", "is a column that --out-format delta adds; rename or drop it")])
    mode = mode_of(topology, source)
    # Unlike the state, verdicts also depend on the policies.
    identity = (
        f"{topology.state_identity({})} {topology.rules} skew={topology.max_clock_skew_ms} {mode} {source.identity}"
    )
    spark = source.records.sparkSession
    directory = RunDirectory(spark, path, run, fmt)
    with translated_errors(), shuffles_for(spark, source.size_bytes):
        begun = directory.begin(identity, int(time.time() * 1000) if now_ms is None else now_ms)
        if isinstance(begun, RunReport):
            say(f"{topology.name}: run {run} was already published at {begun.path}; nothing was written")
            return begun
        say(f"{topology.name}: {source.place}: {ORDER_TEXTS[mode]}")
        verdicts = judging(source, topology, now_ms=begun)

        def report(written: DataFrame) -> RunReport:
            counts = counts_of(written)
            if source.countable:
                balanced(source, counts.verdicts)
            files = len(written.inputFiles())
            seconds = round(time.monotonic() - began_s, 3)
            return RunReport(run, identity, begun, mode, counts.verdicts, directory.path, counts.causes, files, seconds)

        with described(spark, f"{topology.name}: judge {source.place}, publish run {run}"):
            return directory.publish(verdicts, report)


class RunDirectory:
    """The files of one backfill run in an output directory, which can contain several runs."""

    def __init__(self, spark: SparkSession, root: str, run: str, fmt: OutputFormat) -> None:
        self._spark: Final = spark
        self._root: Final = HadoopDirectory(spark, root)
        self._files: Final = self._root.files
        self._run: Final = run
        self._fmt: Final = fmt
        self._renames: Final = fmt != "delta" and str(self._files.getScheme()) in RENAMING

    @property
    def path(self) -> str:
        """Return the path of the run's files after publication, in the form that ``--input`` accepts."""
        return str(self._root.path if self._fmt == "delta" else self._root.at(f"run={self._run}"))

    def begin(self, identity: str, now_ms: int) -> RunReport | int:
        """Return the report if the run has been published; otherwise, return the clock time in ms that the run must
        use.

        Raises StateIncompatible if a run with this name was published with a different input, topology, or order, or if
        its directory has no report.
        """
        # Check the directory before the report, because another job may publish the run between the two checks.
        there = self._renames and self._files.exists(self._root.at(f"run={self._run}"))
        published, mark = self._published(), self._root.at(f"_started-{self._run}.json")
        if published is not None:
            if identity != published.identity:
                raise StateIncompatible(
                    f"run {self._run} was published at {published.path} with another topology, input or order. Nothing "
                    f"was changed. Then: {published.identity}. Now: {identity}. Choose another --run, or delete the "
                    f"old one."
                )
            self._delete_attempts()
            return published
        if there:
            raise StateIncompatible(
                f"{self.path} exists, but its {REPORT} is missing, so it is unknown whether the directory is a whole "
                f"run, and of which input. Nothing was judged. Restore {REPORT}, remove the directory, or choose "
                f"another --run."
            )
        begun = json.loads(self._root.read(mark)) if self._files.exists(mark) else None
        if begun is not None and begun["identity"] == identity:
            return int(begun["now_ms"])
        if begun is not None and self._in_table():
            raise StateIncompatible(
                f"the Delta table {self.path} has rows of run {self._run}, whose job used another topology, input or "
                f"order, and was killed before it wrote its report. Nothing was changed. Then: {begun['identity']}. "
                f"Now: {identity}. Choose another --run, or delete the rows: {self._deletion}."
            )
        # An unpublished run can begin again with another topology or input. If the run's first job is still running,
        # only one of the two jobs will publish the run.
        self._root.refuse_unwritable("--out")
        self._write(mark, {"identity": identity, "now_ms": now_ms})
        return now_ms

    def publish(self, verdicts: Judging, report: Callable[[DataFrame], RunReport]) -> RunReport:
        """Write the judged records, partitioned by verdict; then publish them, and return the report."""
        made = (self._publish_delta if self._fmt == "delta" else self._publish_files)(verdicts, report)
        self._files.delete(self._root.at(f"_started-{self._run}.json"), False)  # noqa: FBT003 - not recursive
        return made

    def _publish_files(self, verdicts: Judging, report: Callable[[DataFrame], RunReport]) -> RunReport:
        attempt = self._root.at(f"_attempt-{self._run}-{uuid4().hex[:_MARK_DIGITS]}")
        try:
            self._write_attempt(attempt, verdicts)
            made = report(self._spark.read.schema(verdicts.schema).parquet(literal(str(attempt))))
            manifest = listed(self._spark, attempt, verdicts.schema)
        except Exception as error:
            self._delete(attempt)
            if self._published() is None:
                raise
            # Another job has published the run, and has deleted this job's files.
            raise self._too_late() from error
        if self._renames:
            self._rename(attempt, made, manifest, verdicts.schema)
            self._delete_attempts()
        else:
            self._publish_manifest(made, manifest)
        return made

    def _write_attempt(self, attempt: Any, verdicts: Judging) -> None:  # noqa: ANN401 - a Hadoop path
        codec = codec_of(self._spark)
        if self._files.getScheme() == "file" and codec is not None:
            _write_files(verdicts, self._local(attempt), codec)
        else:
            verdicts.frame().write.partitionBy("verdict").parquet(str(attempt))

    def _rename(self, attempt: Any, made: RunReport, manifest: RunManifest, schema: StructType) -> None:  # noqa: ANN401
        target = self._root.at(f"run={self._run}")
        manifest = replace(manifest, directory=target.getName())
        try:
            self._write(self._root.at(REPORT, attempt), {**asdict(made), "manifest": asdict(manifest)})
            moved = self._moved(attempt, target)
        except (OSError, Py4JJavaError) as error:
            if self._published() is None:
                raise
            raise self._too_late() from error
        if not moved:
            for left in (attempt, self._root.at(attempt.getName(), target)):
                self._delete(left)
            raise self._too_late()
        if listed(self._spark, target, schema) != manifest:
            self._files.rename(target, attempt)
            raise StateIncompatible(
                f"somebody deleted files of run {self._run} while it was being published, so it was renamed to "
                f"{attempt}, which you can delete. Run the command again, and let nobody else change {self._root.path}."
            )

    def _publish_manifest(self, made: RunReport, manifest: RunManifest | None) -> None:
        path = report_path(self._root, self._run, renamed=False)
        if self._files.exists(path):
            raise self._too_late()
        self._files.mkdirs(path.getParent())
        self._write(path, {**asdict(made), "manifest": None if manifest is None else asdict(manifest)})

    def _too_late(self) -> StateIncompatible:
        return StateIncompatible(
            f"{self.path} appeared while this run was under way: another job has published the same run. Its verdicts "
            f"are kept; those of this job are not."
        )

    def _moved(self, attempt: Any, target: Any) -> bool:  # noqa: ANN401 - Hadoop paths
        if self._files.exists(target):
            return False
        if self._files.getScheme() == "file":
            # If the target exists, Hadoop does not fail, but moves or copies the attempt into the target.
            try:
                self._local(attempt).rename(self._local(target))
            except OSError as error:
                if error.errno in {ENOTEMPTY, EEXIST}:
                    return False
                raise
            return True
        # If the target exists, rename does not fail, but moves the attempt into the target (HADOOP-11452).
        return self._files.rename(attempt, target) and not self._files.exists(self._root.at(attempt.getName(), target))

    def _local(self, path: Any) -> Path:  # noqa: ANN401 - a Hadoop path
        return Path(self._files.makeQualified(path).toUri().getPath())

    def _delete_attempts(self) -> None:
        """Delete the files of all other attempts at a published run.

        No files are deleted if runs have manifests, because another job may be writing a manifest that lists them.
        """
        if not self._renames:
            return
        # The pattern matches only attempts at this run, even if another run's name begins with this run's name.
        for each in self._files.globStatus(self._root.at(f"_attempt-{self._run}-{'?' * _MARK_DIGITS}")) or ():
            self._delete(each.getPath())

    def _delete(self, directory: Any) -> None:  # noqa: ANN401 - a Hadoop path
        # Deletion fails if another job still writes to the directory. The next job of the same run deletes the rest.
        with suppress(Py4JJavaError):
            self._files.delete(directory, True)  # noqa: FBT003 - recursive

    def _publish_delta(self, verdicts: Judging, report: Callable[[DataFrame], RunReport]) -> RunReport:
        if self._published() is not None:
            raise self._too_late()
        rows = verdicts.frame().withColumn("run", F.lit(self._run))
        # The commit to the table publishes the run. A second commit of the same run replaces the rows of the first.
        writer = rows.write.format("delta").mode("overwrite").partitionBy("run", "verdict")
        try:
            with explained_by_delta(self.path):
                writer.option("replaceWhere", f"run = '{self._run}'").save(self.path)
        except BrokerUnavailable as error:
            if self._published() is not None or self._in_table():
                raise self._too_late() from error
            raise
        table = self._spark.read.format("delta").load(self.path)
        try:
            made = report(table.where(F.col("run") == self._run))
        except InvariantBroken as error:
            self._spark.sql(self._deletion)
            text = f"{error} The Delta table {self.path} contained them for a moment: its last version deletes them."
            raise InvariantBroken(text) from error
        self._publish_manifest(made, None)
        return made

    @property
    def _deletion(self) -> str:
        return f"DELETE FROM {DeltaLog(self._spark, self.path).table} WHERE run = '{self._run}'"  # noqa: S608 - quoted

    def _in_table(self) -> bool:
        """Return whether the run's rows are in the Delta table, although the run has no report."""
        if self._fmt != "delta" or not DeltaLog(self._spark, self.path).versions():
            return False
        table = self._spark.read.format("delta").load(self.path)
        return not table.where(F.col("run") == self._run).isEmpty()

    def _published(self) -> RunReport | None:
        path = report_path(self._root, self._run, renamed=self._renames)
        if not self._files.exists(path):
            return None
        found = json.loads(self._root.read(path))
        found.pop("manifest", None)
        return RunReport(**{**found, "fresh": False})

    def _write(self, path: Any, content: Mapping[str, Any]) -> None:  # noqa: ANN401
        # Another job may be writing the same file.
        self._root.write(path, json.dumps(content), f"_{path.getName()}.{uuid4().hex}.part")


def codec_of(spark: SparkSession) -> str | None:
    """Return Arrow's name for Spark's configured Parquet codec, or None if Arrow does not support the codec."""
    name = spark.conf.get("spark.sql.parquet.compression.codec") or "snappy"
    return _CODECS.get(name.lower())


def _write_files(verdicts: Judging, attempt: Path, codec: str) -> None:
    work = attempt / "_work"
    work.mkdir(parents=True)
    judge = verdicts.judge

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        unique = uuid4().hex
        found: dict[str, _VerdictFile] = {}
        with ExitStack() as stack:
            for judged in judge(batches):
                names = judged.column("verdict")
                rows = judged.drop_columns(["verdict"])
                met = names.unique().to_pylist()
                for verdict in met:
                    if verdict not in found:
                        path = work / f"part-{verdict}-{unique}.parquet"
                        found[verdict] = _VerdictFile(path, rows.schema, codec)
                        stack.enter_context(found[verdict].writer)
                    found[verdict].add(rows if len(met) == 1 else rows.filter(pc.equal(names, verdict)))
            for file in found.values():
                file.end_group()
        files = [file.name for file in found.values()]
        columns = {"file": pa.array(files, pa.string()), "verdict": pa.array(list(found), pa.string())}
        yield pa.RecordBatch.from_pydict(columns)

    for row in verdicts.rows.mapInArrow(run, "file string, verdict string").collect():
        place = attempt / f"verdict={row['verdict']}"
        place.mkdir(exist_ok=True)
        (work / row["file"]).rename(place / row["file"])
    _remove(work)


def _remove(work: Path) -> None:
    """Delete a directory of files, even if task attempts that Spark is killing still create files there."""
    while True:
        for left in work.iterdir():
            left.unlink()
        try:
            work.rmdir()
        except OSError as error:
            if error.errno not in {ENOTEMPTY, EEXIST}:
                raise
        else:
            return


class _VerdictFile:
    """The Parquet file that a task attempt writes for one verdict."""

    def __init__(self, path: Path, schema: pa.Schema, codec: str) -> None:
        self.name: Final = path.name
        self.writer: Final = pq.ParquetWriter(
            path,
            schema,
            compression=codec,
            use_dictionary=[name for name in _FEW_VALUES if name in schema.names],
            write_statistics=[name for name in schema.names if name not in _WITHOUT_STATISTICS],
        )
        self._held: Final[list[pa.RecordBatch]] = []
        self._rows = 0
        self._bytes = 0

    def add(self, rows: pa.RecordBatch) -> None:
        self._held.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self.end_group()

    def end_group(self) -> None:
        if self._held:
            self.writer.write_table(pa.Table.from_batches(self._held), row_group_size=self._rows)
            self._held.clear()
            self._rows = self._bytes = 0
