"""Reads the history of an Iceberg table, and appends rows in such a way that only one of two competing jobs can commit.

Theory of operation. Iceberg has no transaction IDs: it would accept the appends of two jobs, one after the other.
Therefore, an append is written to a branch that begins at the snapshot that the job has examined, and `main` is then
fast-forwarded to the branch. Iceberg fast-forwards `main` only if `main` is still at the examined snapshot (see
"Branching and Tagging" in Iceberg's documentation). If a job of another application has committed in the meantime, the
rows stay invisible, and the append is attempted again. If a job of the same application has committed, the append is
refused.

The metadata of an append is part of the summary of its snapshot, so rows and metadata become visible together.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.spark.delta_log import metadata_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

_BRANCH: Final = "dedup_"
_APPLICATION: Final = "dedup-application"
_NUMBER: Final = "dedup-number"
_METADATA: Final = "dedup"
_ATTEMPTS: Final = 5
"""Maximum number of attempts to append while other jobs, such as a compaction, commit in the meantime."""


@dataclass(frozen=True, slots=True)
class SnapshotCommit:
    """A snapshot in the history of a table."""

    version: int
    """The sequence number, which increases with each snapshot of the table."""
    snapshot_id: int
    operation: str
    committed_ms: int
    summary: Mapping[str, str]

    @property
    def metadata(self) -> str | None:
        """The metadata that `append` stored, or None if `append` did not make the commit."""
        return self.summary.get(_METADATA)

    @property
    def named(self) -> Mapping[str, Any]:
        """The metadata if it is a JSON object with the member `dedup`, and otherwise an empty object."""
        return metadata_object(self.metadata)

    @property
    def rows(self) -> int:
        """The number of rows that the commit added."""
        return int(self.summary.get("added-records", 0))

    @property
    def replaces(self) -> bool:
        """Whether the commit removed all rows that the table contained before."""
        return self.operation in {"overwrite", "delete"} and int(self.summary.get("total-records", -1)) == self.rows

    def is_of(self, application: str, number: int) -> bool:
        """Return whether ``application`` made this commit as its append with this number."""
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
        """Yield the commits after a version, newest first, as far as Iceberg has kept them."""
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
        """Return the current state of the table, or None if the table does not exist."""
        if not self._spark.catalog.tableExists(self.table):
            return None
        jvm: Any = self._spark._jvm  # noqa: SLF001
        found = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(self._spark._jsparkSession, self.table)  # noqa: SLF001
        found.refresh()
        return found

    def append(
        self,
        rows: DataFrame,
        application: str,
        number: int,
        metadata: str,
        *,
        after: int,
        taken: str,
    ) -> list[SnapshotCommit]:
        """Append the rows in one commit, and return all commits after version ``after``, including this one.

        ``metadata`` must differ from that of any other append. Raises StateIncompatible with the text ``taken`` if the
        application has committed after version ``after``, StateIncompatible if the table no longer contains this
        version, and BrokerUnavailable if other jobs have committed during each of several attempts.
        """
        properties = {_APPLICATION: application, _NUMBER: str(number), _METADATA: metadata}
        for _ in range(_ATTEMPTS):
            if after < 0 and self.latest() < 0:
                self._begin(rows)
            examined = list(self.commits(after - 1))
            if after >= 0 and (not examined or examined[-1].version != after):
                raise StateIncompatible(
                    f"{self.path} does not hold version {after} any more, after which commit {number} must come: the "
                    f"table was rolled back or made again. Nothing was written. Run again: the next start reads what "
                    f"the table contains."
                )
            if any(each.version > after and each.summary.get(_APPLICATION) == application for each in examined):
                raise StateIncompatible(taken)
            failed = self._commit(rows, properties, examined[0])
            since = list(self.commits(after))
            if any(each.metadata == metadata for each in since):
                return since
            if failed is not None and self.latest() == examined[0].version:
                raise failed
        raise BrokerUnavailable(
            f"{self.path}: other jobs have committed to the table during each of {_ATTEMPTS} attempts to append. "
            f"Nothing was written. Try again when they are done."
        )

    def _begin(self, rows: DataFrame) -> None:
        """Create the table if necessary, and its first snapshot, because a branch must begin at a snapshot."""
        nothing = rows.limit(0)
        if not self._spark.catalog.tableExists(self.table):
            nothing.writeTo(self.table).using("iceberg").create()
        nothing.writeTo(self.table).append()

    def _commit(self, rows: DataFrame, properties: Mapping[str, str], head: SnapshotCommit) -> Exception | None:
        """Append the rows after ``head``, and return the error, if any; only the history shows whether the append
        succeeded.
        """
        table = self._loaded()
        branch = f"{_BRANCH}{uuid.uuid4().hex}"
        # Remove the branches of appends that were killed. If the job of such a branch is still running, its append
        # fails, and the job reads the table again.
        refs = table.manageSnapshots()
        for name in list(table.refs()):
            if name.startswith(_BRANCH):
                refs = refs.removeBranch(name)
        refs.createBranch(branch, head.snapshot_id).commit()
        try:
            writer = rows.writeTo(f"{self.table}.branch_{branch}")
            for name, value in properties.items():
                writer.option(f"snapshot-property.{name}", value)
            writer.append()
            table.refresh()
            table.manageSnapshots().fastForwardBranch("main", branch).removeBranch(branch).commit()
        except (PySparkException, Py4JJavaError) as error:
            return error
        return None
