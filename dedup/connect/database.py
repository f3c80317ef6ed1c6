"""Defines database connections, and Kafka offsets that are stored with an epoch to fence earlier owners.

Each database transaction commits rows together with Kafka offsets. The table `dedup_offsets` stores the offsets, with
one row per partition. A process that takes over a partition increments the epoch in the partition's row. A transaction
fails with TaskMigrated if the epoch in the row is newer than the process's own epoch, so an earlier owner cannot
commit.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from dedup.errors import DatabaseUnavailable, StateIncompatible, TaskMigrated
from dedup.kafka.wire import TopicPartition

OFFSETS: Final = "dedup_offsets"
OFFSETS_STATEMENT: Final = (
    f"CREATE TABLE IF NOT EXISTS {OFFSETS} (reader VARCHAR(250) NOT NULL, topic VARCHAR(250) NOT NULL, "
    f"part INTEGER NOT NULL, topic_id VARCHAR(32) NOT NULL, epoch BIGINT NOT NULL, position BIGINT NOT NULL, "
    f"table_name VARCHAR(250) NOT NULL, PRIMARY KEY (reader, topic, part))"
)
# In the statements of `FencedOffsets`, {0} is the database's parameter placeholder.
_ROW: Final = "reader = {0} AND topic = {0} AND part = {0}"
_INSERT: Final = (
    f"INSERT INTO {OFFSETS} (reader, topic, part, topic_id, table_name, epoch, position) "  # noqa: S608  # our own names
    f"VALUES ({{0}}, {{0}}, {{0}}, {{0}}, {{0}}, 0, -1) ON CONFLICT (reader, topic, part) DO NOTHING"
)
_FENCE: Final = (
    f"UPDATE {OFFSETS} SET epoch = epoch + 1, table_name = CASE WHEN position > 0 THEN table_name ELSE {{0}} END "  # noqa: S608
    f"WHERE {_ROW} RETURNING epoch, position, topic_id, table_name"
)
_ADVANCE: Final = f"UPDATE {OFFSETS} SET position = {{0}} WHERE {_ROW} AND epoch = {{0}} AND position = {{0}}"  # noqa: S608
_READ: Final = f"SELECT epoch, position FROM {OFFSETS} WHERE {_ROW}{{1}}"  # noqa: S608
"""{1} is a clause that makes the query wait for transactions of lost connections, which may still commit."""
STAGED: Final = "dedup_staged"
_CREDENTIALS: Final = re.compile(r"(?<=://).*@|(?<=[?&])(?:user|password|sslpassword)=[^&]*&?", re.IGNORECASE)

Row = tuple[Any, ...]


class DatabaseAway(Exception):
    """The database does not respond or is busy. If a commit was under way, its outcome is unknown."""


class LockHeld(DatabaseAway):
    """The database responds, but canceled the statement because another session held a lock for too long."""


class RowsRefused(Exception):
    """The database rejects one of the given rows, and would reject it again if the statement were retried."""

    def __init__(self, code: str, detail: str) -> None:
        self.code: Final = code
        self.detail: Final = detail
        """A sentence that states the reason and contains no value of the row."""
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Table:
    """A table to which dedup writes rows."""

    name: str
    columns: tuple[tuple[str, str], ...]
    """Names and SQL types of the columns. In a sink's table, `tracking_id` and `event_time_ms` come first."""
    key: tuple[str, ...]
    append: bool

    @property
    def listed(self) -> str:
        """The quoted names of the columns, separated by commas."""
        return quoted(name for name, _ in self.columns)


def quoted(names: Iterable[str]) -> str:
    """Return the names in double quotes, separated by commas."""
    return ", ".join(f'"{name}"' for name in names)


@dataclass(slots=True)
class WriteOutcome:
    """The numbers of inserted, updated, and unchanged rows, and the refused rows."""

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    refused: dict[int, RowsRefused] = field(default_factory=dict)
    """Maps the index of each refused row to the database's reason for refusing it."""


class DatabaseConnection(ABC):
    """One connection to a database. All methods block, and only one thread may use a connection at a time.

    Every method raises DatabaseAway for a temporary failure such as a lost connection, RowsRefused for values that the
    database rejects, and StateIncompatible for errors that a retry cannot fix.
    """

    types: Mapping[str, str]
    """Maps each column type of a topology to its SQL type."""
    mark: str
    """The placeholder for a parameter in SQL statements."""
    temporary: str
    """The schema of temporary tables."""
    begin_statement: str
    """The statement that begins a write transaction."""
    for_update: str
    """The clause that makes a query wait for transactions that have changed the row, or an empty string."""

    check_at_once: str
    """The statement that makes an open transaction check deferred constraints at once, or an empty string."""

    @abstractmethod
    def _explained(self) -> AbstractContextManager[None]:
        """Translate the driver's errors in the ``with`` block into DatabaseAway, RowsRefused, or StateIncompatible."""

    @abstractmethod
    def _run(self, sql: str, parameters: Sequence[Any]) -> Any:  # noqa: ANN401  # the driver's cursor
        """Run a statement, and return its DB-API cursor."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement, and return the number of affected rows."""
        with self._explained():
            return int(self._run(sql, parameters).rowcount)

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a query, and return its rows."""
        with self._explained():
            return list(self._run(sql, parameters).fetchall())

    def columns(self, sql: str) -> list[str]:
        """Return the column names of a query without reading its rows."""
        with self._explained():
            return [column[0] for column in self._run(f"SELECT * FROM ({sql}) t LIMIT 0", ()).description]  # noqa: S608

    def origin(self, sql: str, column: str) -> tuple[int, int]:  # noqa: ARG002  # only PostgreSQL knows
        """Return the table (by OID) and the column number that a query's column comes from, or (0, 0) if unknown."""
        return 0, 0

    @abstractmethod
    def has(self, table: str) -> bool:
        """Return whether the table exists."""

    @abstractmethod
    def required(self, table: str) -> list[str]:
        """Return the columns that each new row must have, because they may not be null and have no default."""

    def is_staged_as(self, table: Table) -> bool:  # noqa: ARG002  # only PostgreSQL's columns have strict types
        """Return whether the columns of the staging table still have the types of the table's columns."""
        return True

    @abstractmethod
    def stage(self, table: Table, rows: Sequence[Row]) -> None:
        """Replace the staging table's contents with ``rows``."""

    def begin(self) -> None:
        """Begin a write transaction."""
        self.execute(self.begin_statement)

    def commit(self) -> None:
        """Commit the transaction that `begin` started."""
        self.execute("COMMIT")

    @abstractmethod
    def rollback(self) -> None:
        """Roll back the transaction that `begin` started, if the transaction is still open."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


@contextmanager
def transaction(connection: DatabaseConnection) -> Iterator[None]:
    """Run the ``with`` block in a transaction, which is committed at the end, or rolled back after an exception."""
    connection.begin()
    try:
        yield
    except DatabaseAway:
        raise
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def make_staging(connection: DatabaseConnection, table: Table) -> None:
    """Create an empty staging table with the same column names and types as ``table``."""
    connection.execute(f"DROP TABLE IF EXISTS {connection.temporary}.{STAGED}")
    connection.execute(f"CREATE TEMP TABLE {STAGED} AS SELECT {table.listed} FROM {table.name} WHERE 1 = 0")  # noqa: S608


def make(connection: DatabaseConnection, table: str, statement: str) -> None:
    """Create the table if it does not exist. The permission to create tables is needed only if the table is missing."""
    if connection.has(table):
        return
    try:
        connection.execute(statement)
    except RowsRefused:
        # PostgreSQL raises a unique violation when two processes create the same table simultaneously.
        if not connection.has(table):
            raise


class FencedOffsets:
    """One reader's offsets in a topic, stored in the table `dedup_offsets` with an epoch that fences earlier owners."""

    def __init__(self, reader: str, topic: str, topic_id: str, table: str = "") -> None:
        self.reader: Final = reader
        self.topic: Final = topic
        self.table: Final = table
        """The table to which a sink writes the records, or an empty string for a reader without such a table."""
        self.positions: Final[dict[int, int]] = {}
        """Maps each partition to the offset after its last record in the database, or to -1 before the first record."""
        self._topic_id: Final = topic_id
        self._epochs: Final[dict[int, int]] = {}

    def take(self, connection: DatabaseConnection, partitions: Collection[int]) -> None:
        """Take over partitions, and read their positions.

        Raises StateIncompatible if the topic was recreated, or if the earlier records were written to another table.
        """
        insert, fence = (sql.format(connection.mark) for sql in (_INSERT, _FENCE))
        with transaction(connection):
            for partition in sorted(partitions):
                key = (self.reader, self.topic, partition)
                connection.execute(insert, (*key, self._topic_id, self.table))
                ((epoch, position, topic_id, table),) = connection.query(fence, (self.table, *key))
                if topic_id != self._topic_id:
                    raise StateIncompatible(
                        f"the offsets in the database are those of an earlier topic {self.topic!r}, which was deleted "
                        f"and created again. Nothing was changed. To read its records from the start, delete the rows "
                        f"of reader {self.reader!r} from {OFFSETS}; existing rows of other tables stay as they are."
                    )
                self.refuse_other_table(partition, position, table)
                self._epochs[partition], self.positions[partition] = epoch, position

    def refuse_other_table(self, partition: int, position: int, table: str) -> None:
        """Raise StateIncompatible if the records before a stored position were written to another table."""
        if position > 0 and table != self.table:
            raise StateIncompatible(
                f"{OFFSETS} says that {self.reader!r} has read {self.topic}/{partition} up to offset {position} into "  # noqa: S608  # text for the user
                f"the table {table!r}, not into {self.table!r}, which would lack these rows (an IdempotentReader's "
                f"table is ''). Nothing was changed. To fill another table from the topic's start, delete the rows of "
                f"reader {self.reader!r} from {OFFSETS}. If you renamed the table, run: UPDATE {OFFSETS} SET "
                f"table_name = '{self.table}' WHERE reader = '{self.reader}'"
            )

    def advance(self, connection: DatabaseConnection, ends: Mapping[int, int]) -> None:
        """Store new positions in the open transaction.

        Raises TaskMigrated if another process owns a partition, and DatabaseUnavailable if the database has lost this
        process's last commit.
        """
        for partition, end in sorted(ends.items()):
            own = (self.reader, self.topic, partition, self._epochs[partition], self.positions[partition])
            if connection.execute(_ADVANCE.format(connection.mark), (end, *own)) != 1:
                read = _READ.format(connection.mark, "")
                raise self._not_ours(partition, connection.query(read, (self.reader, self.topic, partition)))

    def happened(self, connection: DatabaseConnection, ends: Mapping[int, int]) -> bool:
        """Return whether a commit without a response took effect. Raises the same errors as `advance`."""
        for partition, end in ends.items():
            read = _READ.format(connection.mark, connection.for_update)
            rows = connection.query(read, (self.reader, self.topic, partition))
            if rows == [(self._epochs[partition], self.positions[partition])]:
                return False
            if rows != [(self._epochs[partition], end)]:
                raise self._not_ours(partition, rows)
        return True

    def _not_ours(self, partition: int, rows: Sequence[Row]) -> TaskMigrated | DatabaseUnavailable:
        place = TopicPartition(self.topic, partition)
        if rows and rows[0][0] > self._epochs[partition]:
            return TaskMigrated(
                f"{self.reader}: another process has taken over {place}; this one stops, and its transaction was "
                f"rolled back. Run one process per partition of a sink."
            )
        found = f"has position {rows[0][1]} for {place}" if rows else f"has no row for {place}"
        return DatabaseUnavailable(
            f"{self.reader}: {OFFSETS} {found}, but this process had committed {self.positions[partition]}: the "
            f"database has lost commits, as after a failover to a replica that lagged behind, or somebody changed the "
            f"table. This transaction was rolled back. A restart continues at the position in the table."
        )


def shown(url: str) -> str:
    """Return the URL without the user name and password."""
    return _CREDENTIALS.sub("", url)
