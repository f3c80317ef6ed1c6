"""Reads the history of an Iceberg table, and appends rows so that only one of two competing jobs can commit.

Iceberg has no transaction IDs, so it would accept the appends of two jobs one after the other. Therefore,
`IcebergLog.append` writes rows to a branch that begins at the latest snapshot that it has examined, checks that `main`
is still at this snapshot, and fast-forwards `main` to the branch (see "Branching and Tagging" in Iceberg's
documentation). Iceberg rejects the fast-forward if the table has changed since the check. If another job commits
first, the appended rows stay invisible, and `append` starts over or, if the other job belongs to the same application,
fails.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.spark.delta_log import metadata_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

_BRANCH: Final = re.compile("dedup_[0-9a-f]{32}")
_NUMBERED: Final = 2
"""The first format version in which snapshots have sequence numbers."""
_APPLICATION: Final = "dedup-application"
_NUMBER: Final = "dedup-number"
_METADATA: Final = "dedup"
_ATTEMPTS: Final = 5
"""Maximum number of attempts to append while other jobs, such as a compaction, commit in the meantime."""


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
        """The metadata that `append` stored in the snapshot, or None if `append` did not create the snapshot."""
        return self.summary.get(_METADATA)

    @property
    def named(self) -> Mapping[str, Any]:
        """The snapshot's metadata if it is a JSON object with the member `dedup`, and otherwise an empty object."""
        return metadata_object(self.metadata)

    @property
    def rows(self) -> int:
        """The number of rows that the snapshot added to the table."""
        return int(self.summary.get("added-records", 0))

    @property
    def replaces(self) -> bool:
        """Whether the snapshot replaced partitions or removed all rows that the table had."""
        if self.operation == "replace":
            return False  # a compaction, which replaces files but changes no rows
        if self.summary.get("replace-partitions") == "true":
            return True
        return int(self.summary.get("deleted-records", 0)) > 0 and int(self.summary["total-records"]) == self.rows

    def is_of(self, application: str, number: int) -> bool:
        """Return whether this snapshot is the append of ``application`` with the number ``number``."""
        return (self.summary.get(_APPLICATION), self.summary.get(_NUMBER)) == (application, str(number))


class IcebergLog:
    """The history of the branch `main` of an Iceberg table; the table may not exist yet."""

    def __init__(self, spark: SparkSession, name: str) -> None:
        self._spark: Final = spark
        self.path: Final = name
        self.table: Final = name
        """The table's name in SQL."""

    def latest(self) -> int:
        """Return the version of the table, or -1 if the table does not exist or has no snapshot."""
        return next((each.version for each in self.commits()), -1)

    def commits(self, after: int = -1) -> Iterator[SnapshotCommit]:
        """Yield the commits after version ``after``, newest first, except for those whose snapshots have expired."""
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
        """Return the table, or None if it does not exist. Raises StateIncompatible for Iceberg's format version 1."""
        if not self._spark.catalog.tableExists(self.table):
            return None
        jvm: Any = self._spark._jvm  # noqa: SLF001
        found = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(self._spark._jsparkSession, self.table)  # noqa: SLF001
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

        ``metadata`` must differ from that of any other append. Raises StateIncompatible if the application has
        committed after version ``after`` (with the text ``taken``) or if the table no longer contains version
        ``after``. Raises BrokerUnavailable if every attempt failed because another job had committed.
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
            # Changed properties and expired snapshots are conflicts, too, although they do not move `main`.
            conflict = "CommitFailedException" in str(failed)
            if failed is not None and not conflict and self.latest() == examined[0].version:
                raise failed
        raise BrokerUnavailable(
            f"{self.path}: other jobs have committed to the table during each of {_ATTEMPTS} attempts to append. "
            f"Nothing was written. Try again when they are done."
        ) from failed

    def _begin(self, rows: DataFrame) -> None:
        """Create the table if necessary, and its first snapshot, because a branch must begin at a snapshot."""
        nothing = rows.limit(0)
        if self._loaded() is None:
            made = nothing.writeTo(self.table).using("iceberg")
            for change in ("delete", "update", "merge"):
                # Otherwise, deleting one row can rewrite a table's only file, which looks like replacing the table.
                made = made.tableProperty(f"write.{change}.mode", "merge-on-read")
            try:
                made.create()
            except AnalysisException:
                if self._loaded() is None:
                    raise
        if self.latest() < 0:
            nothing.writeTo(self.table).append()

    def _commit(self, rows: DataFrame, properties: Mapping[str, str], head: SnapshotCommit) -> Exception | None:
        """Append the rows after ``head``, and return the error, if any; despite an error, the append may have
        succeeded.
        """
        table = self._loaded()
        branch = f"dedup_{uuid.uuid4().hex}"
        try:
            refs = table.manageSnapshots()
            for name, ref in dict(table.refs()).items():
                # The branch belongs to an append that was killed, or to one that is still running and must begin again.
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
