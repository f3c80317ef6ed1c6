"""What is new in an input that grows: files of a directory, versions of a Delta table, or rows of a DataFrame.

A run *pins* its input before it reads it, as JSON, so that another attempt reads the same. How far all runs together
have read is their *position*, JSON too; each kind of input has a member of its own, so a table may be fed by several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from urllib.parse import unquote

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import ArrayType, DataType, StructType

from dedup.core.json_path import Path
from dedup.core.tracking_id import ContentRule, FieldRule, FieldsRule
from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.spark.batch_verdicts import history_of
from dedup.spark.delta_log import DeltaLog
from dedup.spark.files import LOSSLESS, FileFormat, History, as_events, read_files, read_table
from dedup.spark.rows import records_of_files
from dedup.spark.session import HadoopDirectory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dedup.topology.model import Topology

Pinned = Mapping[str, Any]
_SHOWN: Final = 3


class GrowingInput(Protocol):
    """An input of which each run reads what is new."""

    @property
    def spark(self) -> SparkSession:
        """The session that reads it."""

    @property
    def place(self) -> str:
        """Its name, for messages."""

    def pin(self, position: Pinned) -> Pinned | None:
        """Return what is new since ``position`` (empty before the first run); None if nothing is.

        Raises StateIncompatible if what was read before has changed.
        """

    def has(self, pinned: Pinned) -> bool:
        """Return whether what an earlier attempt has pinned is there, unchanged."""

    def open(self, pinned: Pinned) -> History:
        """Return the pinned records."""

    def schema(self, pinned: Pinned) -> StructType | None:
        """Return the columns of the table if its rows are events; None otherwise."""

    def refuse_changed(self, pinned: Pinned) -> None:
        """Raise StateIncompatible if the pinned input is not as it was."""

    def position(self, pinned: Pinned, before: Pinned) -> Pinned:
        """Return how far all runs have read after one that began at ``before``."""


@dataclass(frozen=True)
class NewFiles:
    """The files that were added to directories since the last run.

    A file is known by its path, size and time of modification. Files may be deleted once they were read.
    """

    spark: SparkSession = field(repr=False)
    paths: Sequence[str]
    fmt: FileFormat
    rows_are_events: bool = False

    @property
    def place(self) -> str:
        """The paths."""
        return ", ".join(self.paths)

    def pin(self, position: Pinned) -> Pinned | None:
        """Return the files that no run has read; see `GrowingInput.pin`."""
        read = position.get("files", {})
        found = self._statuses(self.paths)
        replaced = sorted(name for name in found.keys() & read.keys() if found[name] != read[name])
        if replaced:
            raise StateIncompatible(
                f"{_some(replaced)}: replaced since an earlier run read it, which has published its verdicts. Nothing "
                f"was changed. Put the earlier file back, and write new records to a file with a new name."
            )
        new = {name: found[name] for name in sorted(found.keys() - read.keys())}
        return {"files": new} if new else None

    def has(self, pinned: Pinned) -> bool:
        """Return whether the pinned files are there, unchanged."""
        found = self._statuses(self.paths)
        return "files" in pinned and pinned["files"].items() <= found.items()

    def open(self, pinned: Pinned) -> History:
        """Return the records of the pinned files."""
        return read_files(
            self.spark, list(pinned["files"]), self.fmt, rows_are_events=self.rows_are_events, base=self._base()
        )

    def schema(self, pinned: Pinned) -> StructType | None:
        """Return the columns of the files, also those of their directories, as `open` reads them."""
        if not self.rows_are_events:
            return None
        base = self._base()
        reader = self.spark.read if base is None else self.spark.read.option("basePath", base)
        return reader.parquet(*pinned["files"]).schema

    def refuse_changed(self, pinned: Pinned) -> None:
        """Raise StateIncompatible for pinned files that are gone or changed."""
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
        """Return all files read."""
        return {**before, "files": {**before.get("files", {}), **pinned["files"]}}

    def _base(self) -> str | None:
        """Return the directory below which directories are columns (`day=2026-01-31/`)."""
        directory = HadoopDirectory(self.spark, self.paths[0])
        is_one = len(self.paths) == 1 and directory.files.isDirectory(directory.path)
        return directory.absolute if is_one else None

    def _statuses(self, paths: Sequence[str]) -> dict[str, list[int]]:
        """Return size and time of modification in ms by path, for all files that Spark would read."""
        try:
            files = self.spark.read.format("binaryFile").load(list(paths))
            rows = files.select("path", "length", F.unix_millis("modificationTime").alias("modified_ms")).collect()
        except AnalysisException as error:
            text = f"cannot be listed: {str(error).splitlines()[0]}"
            raise SettingsError([Problem(", ".join(paths[:_SHOWN]), text)]) from error
        return {row["path"]: [row["length"], row["modified_ms"]] for row in rows}


@dataclass(frozen=True)
class NewVersions:
    """The rows that were appended to a Delta table since the last run."""

    spark: SparkSession = field(repr=False)
    path: str
    rows_are_events: bool = False

    @property
    def place(self) -> str:
        """The path."""
        return self.path

    def pin(self, position: Pinned) -> Pinned | None:
        """Return a range of versions; see `GrowingInput.pin`. Raises StateIncompatible if one deleted rows."""
        table, log = self._detail()["id"], self._log()
        newest = max(log.versions())
        before, version = position.get("versions", {}).get(log.path, (table, -1))
        if table != before or newest < version:
            raise StateIncompatible(
                f"{self.path} is another table than the one that earlier runs read up to version {version}: it was "
                f"dropped and created again. Nothing was changed. Judge it into another table (--out)."
            )
        pinned = {"table": table, "after": version, "until": newest}
        return pinned if version < 0 or self._appended(pinned) else None

    def has(self, pinned: Pinned) -> bool:
        """Return whether it is this table that was pinned."""
        return bool(pinned.get("table") == self._detail()["id"])

    def open(self, pinned: Pinned) -> History:
        """Return the rows of the pinned versions."""
        place = f"{self.path}@{pinned['until']}"
        return read_table(self._table(pinned), "delta", place, rows_are_events=self.rows_are_events)

    def schema(self, pinned: Pinned) -> StructType | None:
        """Return the columns of the table at the last pinned version."""
        return self._snapshot(pinned).schema if self.rows_are_events else None

    def refuse_changed(self, pinned: Pinned) -> None:
        """Do nothing, because a version never changes; a job fails if its files are gone."""

    def position(self, pinned: Pinned, before: Pinned) -> Pinned:
        """Return the last version read."""
        read = [pinned["table"], pinned["until"]]
        return {**before, "versions": {**before.get("versions", {}), self._log().path: read}}

    def _table(self, pinned: Pinned) -> DataFrame:
        """Return the rows of the pinned versions."""
        snapshot = self._snapshot(pinned)
        if pinned["after"] < 0:
            return snapshot
        detail = self._detail()
        if detail["properties"].get("delta.columnMapping.mode", "none") != "none":
            raise StateIncompatible(
                f"{self.path} maps column names (delta.columnMapping.mode), so what was appended since version "
                f"{pinned['after']} cannot be read from its files. Copy it to a table without, or read its change "
                f"feed and pass the rows as a DataFrame."
            )
        root = self._log().path
        files = [name if "://" in name else f"{root}/{name}" for name in self._appended(pinned)]
        try:
            reader = self.spark.read.options(**LOSSLESS).schema(snapshot.schema)
            return reader.option("basePath", root).parquet(*files)
        except AnalysisException as error:
            raise StateIncompatible(
                f"{self.path}: files that were appended after version {pinned['after']} are gone, because they were "
                f"compacted and then deleted by VACUUM: {str(error).splitlines()[0]}. Nothing was changed. Judge "
                f"everything anew into another table (--out), and run at least once within VACUUM's retention."
            ) from error

    def _appended(self, pinned: Pinned) -> list[str]:
        """Return the files that the pinned versions appended."""
        commits = list(self._log().commits(pinned["after"]))
        lost = pinned["after"] + 1 + len(commits)
        if lost <= pinned["until"]:
            raise StateIncompatible(
                f"{self.path}: Delta has deleted the history of versions after {pinned['after']} ({lost:020}.json), so "
                f"what was appended since the last run is not known. Nothing was changed. Judge everything anew into "
                f"another table (--out), and keep the history (delta.logRetentionDuration) for longer than the time "
                f"between two runs."
            )
        files: list[str] = []
        for commit in reversed(commits):
            # `OPTIMIZE` adds and removes files without a change of data.
            if commit.version <= pinned["until"] and any(_changes(each, "remove") for each in commit.actions):
                raise StateIncompatible(
                    f"{self.path}: version {commit.version} ({commit.operation}) changed or deleted rows that earlier "
                    f"runs may have judged; only appended rows can be read. Nothing was changed. Judge everything anew "
                    f"into another table (--out)."
                )
            if commit.version <= pinned["until"]:
                files += [unquote(each["add"]["path"]) for each in commit.actions if _changes(each, "add")]
        return sorted(files)

    def _snapshot(self, pinned: Pinned) -> DataFrame:
        return self.spark.read.format("delta").option("versionAsOf", pinned["until"]).load(self.path)

    def _log(self) -> DeltaLog:
        return DeltaLog(self.spark, self.path)

    def _detail(self) -> Any:  # noqa: ANN401 - a row
        try:
            (row,) = self.spark.sql(f"DESCRIBE DETAIL {self._log().table}").collect()
        except AnalysisException as error:
            raise SettingsError(
                [Problem(self.path, f"cannot be read as delta: {str(error).splitlines()[0]}")]
            ) from error
        return row


@dataclass(frozen=True)
class NewRows:
    """The rows of a DataFrame, all of them new: `rows.RECORDS` by name, or any columns if rows are events.

    The rows of the run before are recognized by their number and digest, so a run may be repeated.
    """

    frame: DataFrame = field(repr=False)
    rows_are_events: bool = False

    @property
    def spark(self) -> SparkSession:
        """The session of the DataFrame."""
        return self.frame.sparkSession

    @property
    def place(self) -> str:
        """Always the same."""
        return "the DataFrame"

    def pin(self, position: Pinned) -> Pinned | None:
        """Return number and digest of the rows; None if there are none, or the run before has judged them."""
        identity = self._history().identity
        is_empty = self.frame.isEmpty()
        return None if is_empty or position.get("rows") == identity else {"rows": identity}

    def has(self, pinned: Pinned) -> bool:
        """Return whether these rows were pinned."""
        return pinned.get("rows") == self._history().identity

    def open(self, pinned: Pinned) -> History:  # noqa: ARG002 - there are no others
        """Return the rows."""
        return self._history()

    def schema(self, pinned: Pinned) -> StructType | None:  # noqa: ARG002 - there is only one
        """Return the columns of the DataFrame."""
        return self.frame.schema if self.rows_are_events else None

    def refuse_changed(self, pinned: Pinned) -> None:
        """Do nothing: nobody can tell without reading it once more."""

    def position(self, pinned: Pinned, before: Pinned) -> Pinned:
        """Return the rows read last."""
        return {**before, **pinned}

    def _history(self) -> History:
        table = self.frame.select(as_events(self.frame).alias("value")) if self.rows_are_events else self.frame
        return history_of(records_of_files(table, place=self.place))


def _changes(action: Mapping[str, Any], kind: Literal["add", "remove"]) -> bool:
    return bool(action.get(kind, {}).get("dataChange"))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def id_types(schema: StructType | None, topology: Topology) -> dict[str, str]:
    """Return the types of the columns from which the tracking ID is read; empty if rows are no events."""
    if schema is None:
        return {}
    match topology.tracking_id.rule:
        case FieldRule(path):
            wanted = [path]
        case FieldsRule(paths):
            wanted = list(paths)
        case ContentRule(exclude):
            wanted = [(each.name,) for each in schema.fields if (each.name,) not in exclude]
        case _:
            return {}
    found = {".".join(map(str, path)): _type_at(schema, path) for path in wanted}
    return {name: kind.simpleString() for name, kind in found.items() if kind is not None}


def _type_at(kind: DataType | None, path: Path) -> DataType | None:
    for step in path:
        if isinstance(kind, StructType) and isinstance(step, str):
            kind = {each.name: each.dataType for each in kind.fields}.get(step)
        elif isinstance(kind, ArrayType) and isinstance(step, int):
            kind = kind.elementType
        else:
            return None
    return kind
