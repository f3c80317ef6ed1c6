"""The interface of database connections, and the tables and offsets that make each transaction take effect once.

Rows and the offsets read from Kafka are committed in one transaction. For each partition, a row of `dedup_offsets` is
the fence. A process that takes over a partition raises the epoch in this row before it reads the position. Every
transaction first updates the row from (own epoch, expected position) to the next position. If no row matches, another
process owns the partition, and the transaction is rolled back with TaskMigrated. An open transaction locks the row, so
nobody can take over the partition in the middle of a transaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dedup.errors import StateIncompatible, TaskMigrated
from dedup.kafka.wire import TopicPartition

OFFSETS: Final = "dedup_offsets"
OFFSETS_STATEMENT: Final = (
    f"CREATE TABLE IF NOT EXISTS {OFFSETS} (reader VARCHAR(250) NOT NULL, topic VARCHAR(250) NOT NULL, "
    f"part INTEGER NOT NULL, topic_id VARCHAR(32) NOT NULL, epoch BIGINT NOT NULL, position BIGINT NOT NULL, "
    f"PRIMARY KEY (reader, topic, part))"
)
STAGED: Final = "dedup_staged"
_CREDENTIALS: Final = re.compile(r"(?<=://)([^@/]*)@")

Row = tuple[Any, ...]


class DatabaseAway(Exception):
    """The database did not respond or is busy; whether a commit happened is known when it responds again."""


class RowsRefused(Exception):
    """The database will never accept one of the given rows."""

    def __init__(self, code: str, detail: str) -> None:
        self.code: Final = code
        self.detail: Final = detail
        """A sentence that contains no values."""
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Table:
    """A target table."""

    name: str
    columns: tuple[tuple[str, str], ...]
    """Names and SQL types; in a sink's table, `tracking_id` and `event_time_ms` are first."""
    key: tuple[str, ...]
    append: bool

    @property
    def listed(self) -> str:
        """The column names in SQL."""
        return ", ".join(f'"{name}"' for name, _ in self.columns)


@dataclass(slots=True)
class Taken:
    """The row of `dedup_offsets` for a partition that this process owns."""

    epoch: int
    position: int
    """All records below this offset are in the database; -1 before the first record."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A reader and the topic that it reads."""

    reader: str
    topic: str
    topic_id: str


@dataclass(slots=True)
class WriteOutcome:
    """The numbers of inserted, updated, and unchanged rows, and the refused rows."""

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    refused: dict[int, RowsRefused] = field(default_factory=dict)
    """The refused rows, by index."""

    def add(self, other: WriteOutcome) -> None:
        """Add the outcome of other rows from the same list."""
        self.inserted += other.inserted
        self.updated += other.updated
        self.unchanged += other.unchanged
        self.refused |= other.refused


class DatabaseConnection(Protocol):
    """One connection to a database. It blocks, and one thread at a time may use it.

    Every method raises DatabaseAway for a temporary failure such as a lost connection, RowsRefused for values that the
    database rejects, and StateIncompatible for errors that a retry cannot fix.
    """

    types: Mapping[str, str]
    """The SQL type of each column type of a topology."""
    mark: str
    """The placeholder of a parameter."""
    temporary: str
    """The schema of temporary tables."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; return the number of affected rows."""

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Return the rows of a query."""

    def has(self, table: str) -> bool:
        """Return whether the table exists."""

    def columns(self, sql: str) -> list[str]:
        """Return the names of a query's columns without reading rows."""

    def stage(self, table: Table, rows: Sequence[Row]) -> None:
        """Replace the content of the staging table."""

    def begin(self) -> None:
        """Begin a transaction that writes."""

    def commit(self) -> None:
        """Commit the changes since `begin`."""

    def rollback(self) -> None:
        """Undo the changes since `begin`; do nothing if no transaction can be open."""

    def close(self) -> None:
        """Close the connection."""


Connect = Callable[[], DatabaseConnection]


@contextmanager
def transaction(connection: DatabaseConnection) -> Iterator[None]:
    """Commit the changes at the end of the block, or roll them back after an exception."""
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
    """Create an empty staging table with the types of the target's columns."""
    connection.execute(f"DROP TABLE IF EXISTS {connection.temporary}.{STAGED}")
    connection.execute(f"CREATE TEMP TABLE {STAGED} AS SELECT {table.listed} FROM {table.name} WHERE 1 = 0")  # noqa: S608


def make(connection: DatabaseConnection, table: str, statement: str) -> None:
    """Create the table if it is missing; no permission to create tables is needed if it exists."""
    if connection.has(table):
        return
    try:
        connection.execute(statement)
    except RowsRefused:
        # PostgreSQL raises a unique violation when two processes create the same table at the same moment.
        if not connection.has(table):
            raise


def make_offsets(connection: DatabaseConnection) -> None:
    """Create the table of positions and epochs if it is missing."""
    make(connection, OFFSETS, OFFSETS_STATEMENT)


def take(connection: DatabaseConnection, owned: Owned, partitions: Sequence[int]) -> dict[int, Taken]:
    """Fence the earlier owners of the partitions, and return the positions.

    Raises StateIncompatible if the topic was deleted and recreated since it was read.
    """
    mark = connection.mark
    found: dict[int, Taken] = {}
    with transaction(connection):
        for partition in sorted(set(partitions)):
            key = (owned.reader, owned.topic, partition)
            connection.execute(
                f"INSERT INTO {OFFSETS} (reader, topic, part, topic_id, epoch, position) "  # noqa: S608  # our own names
                f"VALUES ({mark}, {mark}, {mark}, {mark}, 0, -1) ON CONFLICT (reader, topic, part) DO NOTHING",
                (*key, owned.topic_id),
            )
            ((epoch, position, topic_id),) = connection.query(
                f"UPDATE {OFFSETS} SET epoch = epoch + 1 "  # noqa: S608  # our own names
                f"WHERE reader = {mark} AND topic = {mark} AND part = {mark} RETURNING epoch, position, topic_id",
                key,
            )
            if topic_id != owned.topic_id:
                raise StateIncompatible(
                    f"the database has read another topic {owned.topic!r} than the one there is now: it was deleted "
                    f"and created again. Nothing was changed. To read its records from the start, delete the rows of "
                    f"reader {owned.reader!r} from {OFFSETS}; existing rows of other tables stay as they are."
                )
            found[partition] = Taken(epoch, position)
    return found


def advance(connection: DatabaseConnection, owned: Owned, taken: Mapping[int, Taken], ends: Mapping[int, int]) -> None:
    """Move the positions within the open transaction. Raises TaskMigrated if another process owns a partition."""
    mark = connection.mark
    for partition, end in sorted(ends.items()):
        mine = taken[partition]
        moved = connection.execute(
            f"UPDATE {OFFSETS} SET position = {mark} WHERE reader = {mark} AND topic = {mark} AND part = {mark} "  # noqa: S608
            f"AND epoch = {mark} AND position = {mark}",
            (end, owned.reader, owned.topic, partition, mine.epoch, mine.position),
        )
        if moved != 1:
            raise _overtaken(owned, partition)


def happened(connection: DatabaseConnection, owned: Owned, taken: Mapping[int, Taken], ends: Mapping[int, int]) -> bool:
    """Return whether a transaction without a response was committed.

    Raises TaskMigrated if another process has taken over a partition since then.
    """
    mark = connection.mark
    moved: set[bool] = set()
    for partition, end in ends.items():
        rows = connection.query(
            f"SELECT epoch, position FROM {OFFSETS} "  # noqa: S608  # our own names
            f"WHERE reader = {mark} AND topic = {mark} AND part = {mark}",
            (owned.reader, owned.topic, partition),
        )
        mine = taken[partition]
        if rows not in ([(mine.epoch, end)], [(mine.epoch, mine.position)]):
            raise _overtaken(owned, partition)
        if end != mine.position:
            moved.add(rows == [(mine.epoch, end)])
    return moved == {True}


def _overtaken(owned: Owned, partition: int) -> TaskMigrated:
    return TaskMigrated(
        f"{owned.reader}: another process has taken over {TopicPartition(owned.topic, partition)}; this one stops, and "
        f"its transaction was rolled back. Run one process per partition of a sink."
    )


def shown(url: str) -> str:
    """Return a URL without user and password."""
    return _CREDENTIALS.sub("", url)
