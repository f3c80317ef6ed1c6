"""Reads the log of a Delta table, and appends rows to the table in commits that are then verified in the log.

Each append to the table carries an application ID and a transaction version (`txnAppId`, `txnVersion`). If two appends
carry the same pair, Delta commits one of them, and rejects or silently drops the other. After an append,
`DeltaLog.append` therefore looks for the metadata of the append (`userMetadata`) in the log.

The log's files are read one by one, newest first (see "Delta Log Entries" in Delta's protocol), because each `DESCRIBE
HISTORY` runs a Spark job over all log files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count, takewhile
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.spark.session import HadoopDirectory

_REPLACED: Final = ("RESTORE", "TRUNCATE", "REPLACE TABLE", "CLONE")
_CONFLICT: Final = re.compile(
    r"DELTA_(METADATA|PROTOCOL)_CHANGED|DELTA_CONCURRENT_|(MetadataChanged|Concurrent\w+)Exception"
)
_LOG_FILE: Final = re.compile(r"([0-9]{20})\.json")


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
        """Yield the actions of the commit, each parsed only when it is requested, because a commit may have many
        actions.
        """
        return map(json.loads, self._lines)

    def __str__(self) -> str:
        made = datetime.fromtimestamp(self.committed_ms / 1000, UTC)
        return f"{self.operation} (version {self.version}, {made:%Y-%m-%d %H:%M:%S} UTC)"

    @property
    def named(self) -> Mapping[str, Any]:
        """The commit's metadata if it is a JSON object with the member `dedup`, and otherwise an empty object."""
        return metadata_object(self.metadata)

    @property
    def replaces(self) -> bool:
        """Whether this commit may have removed rows that earlier commits added."""
        mode = self.parameters.get("mode"), self.parameters.get("outputMode")
        return mode[0] == "Overwrite" or mode[1] == "Complete" or any(name in self.operation for name in _REPLACED)

    @property
    def restored_to(self) -> int | None:
        """The version to which this commit restored the table, or None if it is not a `RESTORE` to a version."""
        version = self.parameters.get("version") if self.operation == "RESTORE" else None
        return None if version is None else int(version)

    def is_of(self, application: str, number: int) -> bool:
        """Return whether this commit is the append with `txnAppId` ``application`` and `txnVersion` ``number``."""
        found = filter(None, (each.get("txn") for each in self.actions()))
        return any((each.get("appId"), each.get("version")) == (application, number) for each in found)


def metadata_object(metadata: str | None) -> Mapping[str, Any]:
    """Return the metadata of a commit if it is a JSON object with the member `dedup`, and otherwise an empty object."""
    try:
        found = json.loads(metadata or "null")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "dedup" in found else {}


class DeltaLog:
    """The log of the Delta table at a path; the table may not exist yet."""

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
        """Yield the commits after version ``after``, or all commits in the log by default, newest first.

        If ``after`` is given and the log lacks a later version, the commits from the missing version on are not
        yielded.
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

        ``by`` lists the columns by which a new table is partitioned. ``application`` and ``number`` are the append's
        `txnAppId` and `txnVersion`, and ``metadata`` must differ from that of any other append. Version ``after`` must
        be older than any commit with the same ``application`` and ``number``. Raises StateIncompatible if another job
        has committed this number (with the text ``taken``), if Delta dropped the append because the table has a commit
        with a greater number, or if the log no longer shows whether the append was committed. Raises BrokerUnavailable
        if another job has changed the table in the meantime, for example its properties.
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
        if failed is not None and _CONFLICT.search(str(failed)):
            raise BrokerUnavailable(
                f"{self.path}: another job changed the table while commit {number} was being written. Nothing was "
                f"written. Try again."
            ) from failed
        if failed is not None:
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
