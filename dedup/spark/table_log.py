"""Reads the history of a Delta or Iceberg table, appends rows to the table, and verifies each append in the history.

In Delta, each append to the table carries an application ID and a transaction version (`txnAppId`, `txnVersion`). If
two appends carry the same pair, Delta commits one append, and rejects or silently drops the other. After an append,
`DeltaLog.append` therefore searches the log for the append's metadata (`userMetadata`). `DeltaLog` reads the log's
files one by one, newest first (see "Delta Log Entries" in Delta's protocol), because each `DESCRIBE HISTORY` runs a
Spark job over all log files.

Iceberg has no such transaction IDs, so it would accept the appends of two competing jobs one after the other.
Therefore, `IcebergLog.append` writes rows to a branch that begins at the latest snapshot examined by the method. The
method then checks that `main` is still at this snapshot, and fast-forwards `main` to the branch (see "Branching and
Tagging" in Iceberg's documentation). Iceberg rejects the fast-forward if the table has changed since the check. If
another job commits first, the appended rows stay invisible. In this case, `append` fails if the other job belongs to
the same application; otherwise, `append` starts over.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, takewhile
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from dedup.errors import BrokerUnavailable, Problem, SettingsError, StateIncompatible
from dedup.spark.session import HadoopDirectory

_REPLACED: Final = ("RESTORE", "TRUNCATE", "REPLACE TABLE", "CLONE")
_CONFLICT: Final = re.compile(
    r"DELTA_(METADATA|PROTOCOL)_CHANGED|DELTA_CONCURRENT_|((Metadata|Protocol)Changed|Concurrent\w+)Exception"
)
_VIOLATED: Final = re.compile(r"\[DELTA_\w*CONSTRAINT\w*\] [^\n]*")
_LOG_FILE: Final = re.compile(r"([0-9]{20})\.json")
_BRANCH: Final = re.compile("dedup_[0-9a-f]{32}")
_NUMBERED: Final = 2
"""The first format version in which snapshots have sequence numbers."""
_APPLICATION: Final = "dedup-application"
_NUMBER: Final = "dedup-number"
_METADATA: Final = "dedup"
_SHOWN: Final = 200
_ATTEMPTS: Final = 5
"""Maximum number of attempts to append while other jobs, such as a compaction, commit to the table."""


class TableCommit:
    """A commit of a Delta table. ``text`` is the content of the commit's log file, with one action per line."""

    def __init__(self, version: int, text: str) -> None:
        self.version: Final = version
        # `splitlines` would also split lines at other separators, such as U+2028, which JSON need not escape.
        self._lines: Final = [line for line in text.split("\n") if line]
        info: Mapping[str, Any] = next(filter(None, (each.get("commitInfo") for each in self.actions())), {})
        self.operation: Final = str(info.get("operation"))
        self.parameters: Final[Mapping[str, Any]] = info.get("operationParameters") or {}
        self.metadata: Final[str | None] = info.get("userMetadata")
        self.committed_ms: Final = int(info.get("timestamp") or 0)
        self.rows: Final = int((info.get("operationMetrics") or {}).get("numOutputRows") or 0)

    def actions(self) -> Iterator[Mapping[str, Any]]:
        """Yield the commit's actions. Each action is parsed only on demand, because a commit can have many actions."""
        return map(json.loads, self._lines)

    def __str__(self) -> str:
        made = datetime.fromtimestamp(self.committed_ms / 1000, UTC)
        return f"{self.operation} (version {self.version}, {made:%Y-%m-%d %H:%M:%S} UTC)"

    @property
    def replaces(self) -> bool:
        """Return whether this commit might have removed rows that earlier commits added."""
        mode = self.parameters.get("mode"), self.parameters.get("outputMode")
        return mode[0] == "Overwrite" or mode[1] == "Complete" or any(name in self.operation for name in _REPLACED)

    @property
    def restored_to(self) -> int | None:
        """Return the version to which this commit restored the table, or None if this commit is not a `RESTORE` to a
        version.
        """
        version = self.parameters.get("version") if self.operation == "RESTORE" else None
        return None if version is None else int(version)

    def is_of(self, application: str, number: int) -> bool:
        """Return whether this commit is the append with `txnAppId` ``application`` and `txnVersion` ``number``."""
        found = filter(None, (each.get("txn") for each in self.actions()))
        return any((each.get("appId"), each.get("version")) == (application, number) for each in found)


def metadata_object(metadata: str | None) -> Mapping[str, Any]:
    """Return a commit's metadata if the metadata is a JSON object with the member `dedup`; otherwise, return an empty
    object.
    """
    try:
        found = json.loads(metadata or "null")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "dedup" in found else {}


@contextlib.contextmanager
def refusing_unfit_rows(path: str, system: str) -> Iterator[None]:
    """Inside the ``with`` block, raise StateIncompatible if rows do not fit into the table at ``path``, because they
    have other columns or violate a constraint. Other errors pass through unchanged.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        violated = _VIOLATED.search(str(error))
        if violated is None and not isinstance(error, AnalysisException):
            raise
        said = " ".join((str(error).partition(";\n")[0] if violated is None else violated[0]).split())
        raise StateIncompatible(
            f"{path}: {system} says: {said} Nothing was written. Fix the cause and run the command again."
        ) from error


@contextlib.contextmanager
def explained_by_delta(path: str) -> Iterator[None]:
    """Inside the ``with`` block, turn Delta's errors about a write to the table at ``path`` into dedup's errors.

    Raises BrokerUnavailable if another job changed the table at the same time, and StateIncompatible if rows do not fit
    into the table (`refusing_unfit_rows`). Other errors pass through unchanged.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        if _CONFLICT.search(str(error)):
            raise BrokerUnavailable(
                f"{path}: another job changed the table at the same time. Nothing was written. Run the command again."
            ) from error
        with refusing_unfit_rows(path, "Delta"):
            raise


class DeltaLog:
    """The log of the Delta table at a path. The table need not exist yet."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.directory: Final = HadoopDirectory(spark, path)
        self.path: Final = self.directory.absolute
        # Delta would interpret a relative path as the name of a table.
        quoted = self.path.replace("`", "``")
        self.table: Final = f"delta.`{quoted}`"
        """The table's name in SQL."""
        self._log: Final = self.directory.at("_delta_log")

    def versions(self) -> list[int]:
        """Return the versions in the log in ascending order, or an empty list if the table does not exist."""
        files = self.directory.files
        statuses = files.listStatus(self._log) if files.exists(self._log) else ()
        names = (status.getPath().getName() for status in statuses)
        return sorted(int(found[1]) for found in map(_LOG_FILE.fullmatch, names) if found)

    def latest(self) -> int:
        """Return the latest version in the log, or -1 if the table does not exist."""
        return max(self.versions(), default=-1)

    def commits(self, after: int = -1) -> Iterator[TableCommit]:
        """Yield the commits after version ``after`` (by default, all commits in the log), newest first.

        If ``after`` is given and a later version is missing from the log, the method yields only the versions before
        the missing version.
        """
        # If ``after`` is given, the directory is not listed, because a table with a commit every few seconds has
        # hundreds of thousands of files.
        there = takewhile(lambda version: self.directory.files.exists(self._file(version)), count(after + 1))
        for version in reversed(self.versions() if after < 0 else list(there)):
            yield TableCommit(version, self.directory.read(self._file(version)))

    def _file(self, version: int) -> Any:  # noqa: ANN401 - a Hadoop path
        return self.directory.at(f"{version:020}.json", self._log)

    def append(
        self,
        rows: DataFrame,
        application: str,
        number: int,
        metadata: str,
        *,
        after: int,
        by: Sequence[str] = (),
        taken: str,
    ) -> list[TableCommit]:
        """Append the rows in one commit, and return all commits after version ``after``, including the new one.

        If the append creates the table, the table is partitioned by the columns ``by``. ``application`` and ``number``
        are the append's `txnAppId` and `txnVersion`, and ``metadata`` must differ from the metadata of any other
        append. Version ``after`` must precede every commit that has the same ``application`` and ``number``. Raises
        StateIncompatible with the text ``taken`` if another job has already committed ``number``. Also raises
        StateIncompatible if Delta dropped the append because the table has a commit with a greater number, or if the
        log no longer shows whether the append was committed. Raises BrokerUnavailable if another job changed the table
        (for example, its properties) during the append.
        """
        writer = rows.write.format("delta").mode("append").partitionBy(*by).option("userMetadata", metadata)
        failed: Exception | None = None
        try:
            writer.options(txnAppId=application, txnVersion=number).save(self.path)
        except Exception as error:  # noqa: BLE001 - the log shows what happened
            failed = error
        since = list(self.commits(after))
        made = [each.metadata for each in since if each.is_of(application, number)]
        if metadata in made:
            return since
        if made:
            raise StateIncompatible(taken) from failed
        if failed is not None:
            with explained_by_delta(self.path):
                raise failed
        if not since and self.latest() != after:
            raise StateIncompatible(
                f"commit {number} of {self.path} cannot be confirmed: version {after + 1} is missing from the table's "
                f"log. The table was removed or recreated, or Delta has deleted its log (delta.logRetentionDuration). "
                f"Run the command again: it first reads what the table contains."
            )
        raise StateIncompatible(
            f"Delta dropped commit {number} of {self.path}, because the table has seen a commit with a greater number: "
            f"the table was restored to an earlier version. Nothing was published. Write to another table."
        )


@dataclass(frozen=True, slots=True)
class SnapshotCommit:
    """A snapshot in the history of an Iceberg table."""

    version: int
    """The sequence number, which increases with each snapshot of the table."""
    snapshot_id: int
    operation: str
    committed_ms: int
    summary: Mapping[str, str]

    @property
    def metadata(self) -> str | None:
        """Return the metadata that `append` stored in the snapshot, or None if the snapshot was not created by
        `append`.
        """
        return self.summary.get(_METADATA)

    @property
    def rows(self) -> int:
        """Return the number of rows that the snapshot added to the table."""
        return int(self.summary.get("added-records", 0))

    @property
    def replaces(self) -> bool:
        """Return whether the snapshot replaced partitions or removed all existing rows of the table."""
        if self.operation == "replace":
            return False  # A compaction replaces files but changes no rows.
        if self.summary.get("replace-partitions") == "true":
            return True
        return int(self.summary.get("deleted-records", 0)) > 0 and int(self.summary["total-records"]) == self.rows


class IcebergLog:
    """The history of an Iceberg table's branch `main`. The table need not exist yet."""

    def __init__(self, spark: SparkSession, name: str) -> None:
        self._spark: Final = spark
        self.path: Final = name
        self.table: Final = name
        """The table's name in SQL."""

    def latest(self) -> int:
        """Return the sequence number of the latest snapshot, or -1 if the table does not exist or has no snapshot."""
        return next((each.version for each in self.commits()), -1)

    def commits(self, after: int = -1) -> Iterator[SnapshotCommit]:
        """Yield the commits after version ``after``, newest first, except for commits whose snapshots have expired."""
        table = self._loaded()
        snapshot = None if table is None else table.currentSnapshot()
        while snapshot is not None and snapshot.sequenceNumber() > after:
            yield SnapshotCommit(
                snapshot.sequenceNumber(),
                snapshot.snapshotId(),
                str(snapshot.operation()),
                snapshot.timestampMillis(),
                dict(snapshot.summary()),
            )
            parent = snapshot.parentId()
            snapshot = None if parent is None else table.snapshot(parent)

    def _loaded(self) -> Any:  # noqa: ANN401 - a table of Iceberg's Java library; Spark has no SQL for its snapshots
        """Return the table, or None if the table does not exist. Raises StateIncompatible if the table has Iceberg
        format version 1.
        """
        jvm: Any = self._spark._jvm  # noqa: SLF001
        try:
            if not self._spark.catalog.tableExists(self.table):
                return None
            found = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(self._spark._jsparkSession, self.table)  # noqa: SLF001
        except (AnalysisException, IllegalArgumentException) as error:
            said = " ".join(str(error).split())[:_SHOWN]
            text = f"is not an Iceberg table, or its catalog is not configured (spark.sql.catalog.NAME): {said}"
            raise SettingsError([Problem(self.path, text)]) from error
        found.refresh()
        if jvm.org.apache.iceberg.TableUtil.formatVersion(found) < _NUMBERED:
            raise StateIncompatible(
                f"{self.path} has Iceberg's format version 1, which does not number its snapshots. Nothing was "
                f"written. Run ALTER TABLE {self.table} SET TBLPROPERTIES ('format-version' = '2')."
            )
        return found

    def append(
        self, rows: DataFrame, application: str, number: int, metadata: str, *, after: int, taken: str
    ) -> list[SnapshotCommit]:
        """Append the rows in one commit, and return all commits after version ``after``, including the new one.

        ``metadata`` must differ from the metadata of any other append. Raises StateIncompatible with the text ``taken``
        if another job of the application has committed after version ``after``. Also raises StateIncompatible if the
        table no longer contains version ``after``. Raises BrokerUnavailable if every attempt failed because of another
        job's commit.
        """
        properties = {_APPLICATION: application, _NUMBER: str(number), _METADATA: metadata}
        failed: Exception | None = None
        for _ in range(_ATTEMPTS):
            if after < 0:
                self._begin(rows)
            examined = list(self.commits(after - 1))
            if after >= 0 and (not examined or examined[-1].version != after):
                raise StateIncompatible(
                    f"{self.path} no longer contains version {after}, which commit {number} must follow: the table was "
                    f"rolled back or recreated, or the snapshot has expired. Nothing was written. Run the command "
                    f"again: it first reads what the table contains."
                )
            if any(each.version > after and each.summary.get(_APPLICATION) == application for each in examined):
                raise StateIncompatible(taken)
            failed = self._commit(rows, properties, examined[0])
            since = list(self.commits(after))
            if any(each.metadata == metadata for each in since):
                return since
            # Changed properties and expired snapshots are also conflicts, although they do not move `main`.
            conflict = "CommitFailedException" in str(failed)
            if failed is not None and not conflict and self.latest() == examined[0].version:
                with refusing_unfit_rows(self.path, "Iceberg"):
                    raise failed
        raise BrokerUnavailable(
            f"{self.path}: other jobs have committed to the table during each of {_ATTEMPTS} attempts to append. "
            f"Nothing was written. Try again when they are done."
        ) from failed

    def _begin(self, rows: DataFrame) -> None:
        """Create the table and its first snapshot if necessary, because a branch must begin at a snapshot."""
        nothing = rows.limit(0)
        if self._loaded() is None:
            made = nothing.writeTo(self.table).using("iceberg")
            for change in ("delete", "update", "merge"):
                # Without this property, deleting one row can rewrite a table's only file, which looks like replacing
                # the table.
                made = made.tableProperty(f"write.{change}.mode", "merge-on-read")
            try:
                made.create()
            except AnalysisException:
                if self._loaded() is None:
                    raise
        if self.latest() < 0:
            with refusing_unfit_rows(self.path, "Iceberg"):
                nothing.writeTo(self.table).append()

    def _commit(self, rows: DataFrame, properties: Mapping[str, str], head: SnapshotCommit) -> Exception | None:
        """Append the rows after the snapshot ``head``, and return any error. The append might have succeeded despite
        the error.
        """
        table = self._loaded()
        branch = f"dedup_{uuid.uuid4().hex}"
        try:
            refs = table.manageSnapshots()
            for name, ref in dict(table.refs()).items():
                # This branch belongs to a killed append, or to a running append that will have to start over.
                if _BRANCH.fullmatch(name) and ref.isBranch():
                    refs = refs.removeBranch(name)
            refs.createBranch(branch, head.snapshot_id).commit()
            writer = rows.writeTo(f"{self.table}.branch_{branch}")
            for name, value in properties.items():
                writer.option(f"snapshot-property.{name}", value)
            writer.append()
            move = table.manageSnapshots()
            now, added = table.currentSnapshot(), table.snapshot(branch)
            # If the branch was removed during the append, Iceberg has recreated it from the current `main`.
            if now is not None and added is not None and now.snapshotId() == added.parentId() == head.snapshot_id:
                move.fastForwardBranch("main", branch).removeBranch(branch).commit()
        except (PySparkException, Py4JJavaError) as error:
            return error
        return None
