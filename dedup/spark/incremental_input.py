"""Finds the new part of an input: new files in directories, new versions of a Delta table, or all rows of a DataFrame.

Before reading its input, a run *pins* the input: the run stores a JSON description of the input, so that a later
attempt reads the same input. The *position*, also stored as JSON, describes the input that all previous runs have read,
with one entry for each kind of input.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import StringType, StructField, StructType

from dedup.core.tracking_id import ContentRule, FieldRule, FieldsRule, FirstOfRule, PartsRule, member_paths
from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.spark.batch_verdicts import history_of
from dedup.spark.columns import absent_from, as_records
from dedup.spark.files import FileFormat, History, read_files, read_table
from dedup.spark.input_files import LOSSLESS, PATTERN, PATTERN_CHARACTERS, literal, refuse_hidden, refuse_lost_columns
from dedup.spark.row_events import as_events, quoted, type_at
from dedup.spark.session import HadoopDirectory
from dedup.spark.table_log import DeltaLog
from dedup.topology.model import Topology

Pinned = Mapping[str, Any]
_SHOWN: Final = 3
_FILE: Final = "_dedup_file"
_PATH: Final = "_dedup_path"


@dataclass(frozen=True)
class NewFiles:
    """The files added to the input directories since the last run.

    A file is identified by its path, size, and modification time. After a run has read a file, users can delete that
    file.
    """

    spark: SparkSession = field(repr=False)
    paths: Sequence[str]
    fmt: FileFormat
    rows_are_events: bool = False
    by_arrival: bool = False
    """Whether reading fails at a timestamp that the broker did not set, according to the column `timestampType`."""

    @property
    def place(self) -> str:
        """Return the paths, separated by commas."""
        return ", ".join(self.paths)

    def pin(self, position: Pinned) -> Pinned | None:
        """Return a description of the files that no run has read, or None if runs have read all files.

        Raises StateIncompatible if a file has changed since a run read it, if Spark would treat a file's name as a
        pattern, or if the directories of the files contain different columns. Raises SettingsError if a path names a
        file that Spark skips, if directories that are columns are not below a single input directory, or if a path
        does not exist and no earlier run has read files there.
        """
        refuse_hidden(self.spark, self.paths)
        read = position.get("files", {})
        found = self._listed(read)
        replaced = sorted(name for name in found.keys() & read.keys() if found[name] != read[name])
        if replaced:
            raise StateIncompatible(
                f"{_some(replaced)}: replaced after an earlier run read it and published its verdicts. Nothing was "
                f"changed. Put the earlier file back, and write new records to a file with a new name."
            )
        new = {name: found[name] for name in sorted(found.keys() - read.keys())}
        patterns = [name for name in new if PATTERN.search(name)]
        if patterns:
            special = " ".join(sorted(PATTERN_CHARACTERS))
            raise StateIncompatible(
                f"{_some(patterns)}: Spark treats a name with one of {special} as a pattern, so it cannot read this "
                f"file alone. Nothing was changed. Rename it."
            )
        refuse_lost_columns(self.spark, self.paths, new, self._base())
        self._refuse_mixed(list(new))
        # The types that Spark infers depend on the directories of one run. Runs of earlier releases wrote inferred
        # types.
        text = position.get("text_paths", "files" not in position)
        return {"files": new, "text_paths": text} if new else None

    def has(self, pinned: Pinned) -> bool:
        """Return whether all pinned files still exist and are unchanged."""
        files = pinned.get("files", {})
        return "files" in pinned and files.items() <= self._listed(files).items()

    def open(self, pinned: Pinned) -> History:
        """Return the records of the pinned files."""
        return read_files(
            self.spark,
            list(pinned["files"]),
            self.fmt,
            rows_are_events=self.rows_are_events,
            by_arrival=self.by_arrival,
            base=self._base(),
            text_paths=pinned.get("text_paths", False),
        )

    def _refuse_mixed(self, files: Sequence[str]) -> None:
        base = self._base()
        if base is None:
            return
        found = {_columns_in(file.removeprefix(f"{base}/").split("/")[:-1]): file for file in reversed(files)}
        if len(found) > 1:
            raise StateIncompatible(
                f"the directories of these files contain different columns (`name=value`), or contain columns below "
                f"different directories: {_some(sorted(found.values()))}. Spark would leave out some of the files. "
                f"Nothing was changed. Move the files, so that the directories of all of them have the same structure."
            )

    def _base(self) -> str | None:
        # If the input is a single directory, its subdirectories (such as `day=2026-01-31/`) are columns.
        if len(self.paths) != 1:
            return None
        directory = HadoopDirectory(self.spark, self.paths[0])
        return directory.absolute if directory.files.isDirectory(directory.path) else None

    def refuse_changed(self, pinned: Pinned) -> None:
        """Raise StateIncompatible if a pinned file was deleted or changed."""
        try:
            found = self._statuses(list(pinned["files"]))
        except SettingsError as error:
            found, cause = {}, str(error)
        else:
            cause = _some(sorted(name for name, status in pinned["files"].items() if found.get(name) != status))
        if found != pinned["files"]:
            raise StateIncompatible(
                f"{cause}: deleted or changed while a run was reading it. Nothing of the run was published. Put the "
                f"file back as it was, then run again."
            )

    def position(self, pinned: Pinned, before: Pinned) -> Pinned:
        """Return the position ``before`` with the pinned files added to the files already read."""
        files = {**before.get("files", {}), **pinned["files"]}
        return {**before, "files": files, "text_paths": pinned.get("text_paths", False)}

    def idle_position(self, before: Pinned) -> Pinned:
        """Return the position ``before``."""
        return before

    def _listed(self, read: Collection[str]) -> dict[str, list[int]]:
        """Return `_statuses` of the input.

        A missing path counts as an empty directory if it contained one of the files ``read`` by runs, because users can
        delete these files, and an object store has no empty directories.
        """
        left = [path for path in self.paths if not self._is_emptied(path, read)]
        return self._statuses(left) if left else {}

    def _is_emptied(self, path: str, read: Collection[str]) -> bool:
        directory = HadoopDirectory(self.spark, path)
        if directory.files.globStatus(directory.path):
            return False
        globs: Any = self.spark._jvm.org.apache.hadoop.fs.GlobPattern  # type: ignore[union-attr]  # noqa: SLF001
        there = re.compile(f"{globs.compile(directory.absolute).pattern()}(?:/.*)?", re.DOTALL)
        return any(there.fullmatch(name) for name in read)

    def _statuses(self, paths: Sequence[str]) -> dict[str, list[int]]:
        """Map the path of each file that Spark would read to its size and modification time in ms."""
        try:
            # Without this option, Spark skips subdirectories that are not named `name=value`.
            reader = self.spark.read.format("binaryFile").option("recursiveFileLookup", "true")
            files = reader.load(list(paths))
            rows = files.select("path", "length", F.unix_millis("modificationTime").alias("modified_ms")).collect()
        except AnalysisException as error:
            text = f"cannot be listed: {str(error).splitlines()[0]}"
            raise SettingsError([Problem(", ".join(paths[:_SHOWN]), text)]) from error
        return {row["path"]: [row["length"], row["modified_ms"]] for row in rows}


@dataclass(frozen=True)
class NewVersions:
    """The rows appended to a Delta table since the last run."""

    spark: SparkSession = field(repr=False)
    place: str
    """The path of the table."""
    rows_are_events: bool = False
    by_arrival: bool = False
    """Whether reading fails at a timestamp that the broker did not set, according to the column `timestampType`."""

    def pin(self, position: Pinned) -> Pinned | None:
        """Return a description of the table versions that no run has read, or None if these versions appended no rows.

        Raises StateIncompatible if a new version changed or deleted rows, if the commit of a new version is missing
        from the log, if the table was dropped and created again, or if earlier runs read it by another path.
        """
        detail, log = self._detail(), self._log()
        self._refuse_mapped(detail)
        table = detail["id"]
        newest = max(log.versions(), default=-1)
        if newest < 0:
            raise SettingsError([Problem(self.place, "cannot be read as delta: it has no log of commits")])
        known = position.get("versions", {})
        elsewhere = [path for path, (each, _) in known.items() if each == table and path != log.path]
        if elsewhere and log.path not in known:
            raise StateIncompatible(
                f"{log.path} is the table that earlier runs read by the path {elsewhere[0]}, so its rows would be "
                f"judged again. Nothing was changed. Give that path, or judge it into another table (--out)."
            )
        before, version = known.get(log.path, (table, -1))
        if table != before or newest < version:
            raise StateIncompatible(
                f"{self.place} is not the table that earlier runs read up to version {version}: it was dropped and "
                f"recreated. Nothing was changed. Judge it into another table (--out)."
            )
        pinned = {"table": table, "after": version, "until": newest}
        return pinned if version < 0 or self._appended(pinned) else None

    def has(self, pinned: Pinned) -> bool:
        """Return whether the pinned versions belong to this table, and not to an earlier table at the same path.

        If a run must read the whole table, the table must also still be readable as of the last pinned version.
        """
        if pinned.get("table") != self._detail()["id"]:
            return False
        # A later run reads only appended files. If these files are gone, pinning another version would not help,
        # because the run would have to read the same files.
        return pinned["after"] >= 0 or self._is_readable(pinned)

    def _is_readable(self, pinned: Pinned) -> bool:
        try:
            # Spark opens each file, but reads no column.
            self._table(pinned).agg(F.max("_metadata.file_path")).collect()
        except (PySparkException, Py4JJavaError):
            # VACUUM deletes the files of earlier versions, and Delta deletes their log.
            return False
        return True

    def open(self, pinned: Pinned) -> History:
        """Return the rows of the pinned versions. Raises StateIncompatible if the table maps column names."""
        self._refuse_mapped(self._detail())
        place = f"{self.place}@{pinned['until']}"
        events, arrival = self.rows_are_events, self.by_arrival
        return read_table(self._table(pinned), "delta", place, rows_are_events=events, by_arrival=arrival)

    def refuse_changed(self, pinned: Pinned) -> None:
        """Do nothing, because a version of a Delta table never changes."""

    def position(self, pinned: Pinned, before: Pinned) -> Pinned:
        """Return the position ``before``, advanced to the last pinned version."""
        read = [pinned["table"], pinned["until"]]
        return {**before, "versions": {**before.get("versions", {}), self._log().path: read}}

    def idle_position(self, before: Pinned) -> Pinned:
        """Return the position ``before``, advanced to the latest version if no rows were appended after it."""
        table, version = before["versions"][self._log().path]
        pinned = {"table": table, "after": version, "until": self._log().latest()}
        return before if self._appended(pinned) else self.position(pinned, before)

    def _table(self, pinned: Pinned) -> DataFrame:
        snapshot = self.spark.read.format("delta").option("versionAsOf", pinned["until"]).load(self.place)
        if pinned["after"] < 0:
            return snapshot
        root = self._log().path
        appended = {name if "://" in name else f"{root}/{name}": of for name, of in self._appended(pinned).items()}
        by = self._detail()["partitionColumns"]
        in_files = StructType([each for each in snapshot.schema.fields if each.name not in by])
        try:
            reader = self.spark.read.options(**LOSSLESS, recursiveFileLookup="true").schema(in_files)
            return self._partitioned(reader.parquet(*map(literal, appended)), snapshot.schema, by, appended)
        except AnalysisException as error:
            raise StateIncompatible(
                f"{self.place}: files that were appended after version {pinned['after']} are gone, because they were "
                f"compacted and then deleted by VACUUM: {str(error).splitlines()[0]}. Nothing was changed. Judge "
                f"everything again into another table (--out), and run at least once within VACUUM's retention."
            ) from error

    def _partitioned(
        self, rows: DataFrame, schema: StructType, by: Sequence[str], files: Mapping[str, Mapping[str, str | None]]
    ) -> DataFrame:
        """Append the partition columns ``by``, whose values are in Delta's log (``files``), to the rows of the files.

        The values do not come from the paths, because some paths lack the values (`delta.randomizeFilePrefixes`), and
        other paths show times in the time zone of the job that wrote the file.
        """
        if not by:
            return rows
        jvm: Any = self.spark._jvm  # noqa: SLF001 - the only way to Spark's spelling of a path
        path = jvm.org.apache.hadoop.fs.Path
        # In its log, Delta may also write null as an empty string.
        values = [(path(file).toUri().toString(), *(of.get(name) or None for name in by)) for file, of in files.items()]
        texts = [f"_dedup_value_{at}" for at in range(len(by))]
        known = self.spark.createDataFrame(values, StructType([StructField(n, StringType()) for n in [_FILE, *texts]]))
        found = rows.select("*", F.col("_metadata.file_path").alias(_PATH))
        found = found.join(F.broadcast(known), F.col(_PATH) == F.col(_FILE), "left")
        lost = F.raise_error(F.concat(F.lit("dedup does not find in Delta's log: "), F.col(_PATH)))
        columns = []
        for each in schema.fields:
            column = F.col(quoted(each.name if each.name not in by else texts[by.index(each.name)]))
            if each.name in by:
                column = F.when(F.col(_FILE).isNull(), lost).otherwise(column).cast(each.dataType)
            columns.append(column.alias(each.name, metadata=each.metadata))
        return found.select(*columns)

    def _refuse_mapped(self, detail: Any) -> None:  # noqa: ANN401 - a row
        if detail["properties"].get("delta.columnMapping.mode", "none") != "none":
            raise StateIncompatible(
                f"{self.place} maps column names (delta.columnMapping.mode), so rows that are appended later could not "
                f"be read from its files. Nothing was changed. Copy it to a table without column mapping, or read its "
                f"change feed and pass the rows as a DataFrame."
            )

    def _appended(self, pinned: Pinned) -> dict[str, Mapping[str, str | None]]:
        """Return the paths of the appended files, and the values of each file's partition columns as text."""
        # The commits are kept as unparsed text, because a commit may have added hundreds of thousands of files.
        commits = list(self._log().commits(pinned["after"]))
        lost = pinned["after"] + 1 + len(commits)
        if lost <= pinned["until"]:
            raise StateIncompatible(
                f"{self.place}: Delta has deleted the history of versions after {pinned['after']} ({lost:020}.json), "
                f"so it is unknown which rows are new. Nothing was changed. Judge everything again "
                f"into another table (--out), and keep the history (delta.logRetentionDuration) for longer than the "
                f"time between two runs."
            )
        files: dict[str, Mapping[str, str | None]] = {}
        for commit in reversed(commits):
            if commit.version > pinned["until"]:
                break
            # `OPTIMIZE` also adds and removes files, but does not change the data.
            if any(_changes(each, "remove") for each in commit.actions()):
                raise StateIncompatible(
                    f"{self.place}: version {commit.version} ({commit.operation}) changed or deleted rows that earlier "
                    f"runs may have judged; only appended rows can be read. Nothing was changed. Judge everything "
                    f"again into another table (--out)."
                )
            added = (each["add"] for each in commit.actions() if _changes(each, "add"))
            files |= {unquote(each["path"]): each["partitionValues"] for each in added}
        return dict(sorted(files.items()))

    def _log(self) -> DeltaLog:
        return DeltaLog(self.spark, self.place)

    def _detail(self) -> Any:  # noqa: ANN401 - a row
        try:
            (row,) = self.spark.sql(f"DESCRIBE DETAIL {self._log().table}").collect()
        except AnalysisException as error:
            text = f"cannot be read as delta: {str(error).splitlines()[0]}"
            raise SettingsError([Problem(self.place, text)]) from error
        return row


@dataclass(frozen=True)
class NewRows:
    """The rows of a DataFrame, all of which count as new.

    The DataFrame has the columns of `columns.RECORDS` or, if each row is an event, any columns. If the rows have the
    same count and digest as in the last run, the new run judges nothing.
    """

    frame: DataFrame = field(repr=False)
    rows_are_events: bool = False
    by_arrival: bool = False
    """Whether reading fails at a timestamp that the broker did not set, according to the column `timestampType`."""
    place: ClassVar[str] = "the DataFrame"

    @property
    def spark(self) -> SparkSession:
        """Return the Spark session of the DataFrame."""
        return self.frame.sparkSession

    def pin(self, position: Pinned) -> Pinned | None:
        """Return the row count and digest, or None if the input has no rows or the last run judged the same rows."""
        found = {"rows": self._history().identity}
        return None if self.frame.isEmpty() or position.get("rows") == found["rows"] else found

    def has(self, pinned: Pinned) -> bool:
        """Return whether the pinned rows are the rows of this DataFrame."""
        return pinned.get("rows") == self._history().identity

    def open(self, pinned: Pinned) -> History:  # noqa: ARG002 - there are no others
        """Return the rows."""
        return self._history()

    def refuse_changed(self, pinned: Pinned) -> None:
        """Do nothing, because only reading the DataFrame again could reveal a change."""

    def position(self, pinned: Pinned, before: Pinned) -> Pinned:
        """Return the position ``before`` with the pinned rows recorded as the last rows read."""
        return {**before, **pinned}

    def idle_position(self, before: Pinned) -> Pinned:
        """Return the position ``before``."""
        return before

    def _history(self) -> History:
        table = self.frame.select(as_events(self.frame).alias("value")) if self.rows_are_events else self.frame
        records = as_records(table, place=self.place, by_arrival=self.by_arrival)
        history = history_of(records, identified=True)
        events = self.frame.schema if self.rows_are_events else None
        return replace(history, by_arrival=self.by_arrival, events=events, absent=absent_from(table))


GrowingInput = NewFiles | NewVersions | NewRows
"""An input that each run reads from the position where the last run stopped."""


def _changes(action: Mapping[str, Any], kind: Literal["add", "remove"]) -> bool:
    return bool((action.get(kind) or {}).get("dataChange"))


def _columns_in(directories: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that Spark finds in the directories of a file, and the directories above these columns."""
    last = max((at for at, name in enumerate(directories) if "=" in name), default=-1)
    first = max((at for at, name in enumerate(directories[: last + 1]) if "=" not in name), default=-1) + 1
    columns = tuple(name.partition("=")[0] for name in directories[first : last + 1])
    return columns, tuple(directories[:first]) if columns else ()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def id_types(schema: StructType | None, topology: Topology) -> dict[str, str]:
    """Return the types of the columns that contain the tracking ID, or an empty dictionary if the rows are not
    events.
    """
    if schema is None:
        return {}
    match topology.tracking_id.rule:
        case FieldRule(path):
            wanted = [path]
        case FieldsRule() | PartsRule() | FirstOfRule():
            wanted = list(member_paths(topology.tracking_id.rule))
        case ContentRule(exclude):
            wanted = [(each.name,) for each in schema.fields if (each.name,) not in exclude]
        case _:
            return {}
    found = {".".join(map(str, path)): type_at(schema, path) for path in wanted}
    return {name: kind.simpleString() for name, kind in found.items() if not isinstance(kind, str)}
