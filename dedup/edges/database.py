"""A database with an effect once: rows by tracking ID, and how far a topic was read, in one transaction.

The fence is a row of `dedup_offsets` per partition read. Whoever takes the partition raises its epoch before reading
its position; every transaction first moves that row from (my epoch, expected position) to the next position. Where no
row is moved another owner has the partition, and the transaction is rolled back: TaskMigrated. While a transaction is
open the row is locked, so nobody takes the partition in its middle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dedup.errors import StateIncompatible, TaskMigrated
from dedup.session.wire import TopicPartition

OFFSETS: Final = "dedup_offsets"
STAGED: Final = "dedup_staged"
_PASSWORD: Final = re.compile(r"(?<=://)([^@/]*)@")

Row = tuple[Any, ...]


class DatabaseAway(Exception):
    """The database did not answer, or is busy: whether a commit happened must be asked when it is back."""


class RowsRefused(Exception):
    """The database will never take one of the rows it was given."""

    def __init__(self, code: str, detail: str) -> None:
        self.code: Final = code
        self.detail: Final = detail
        """A sentence without payload."""
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class Table:
    """The target of a sink."""

    name: str
    columns: tuple[tuple[str, str], ...]
    """Name and SQL type, `tracking_id` and `event_time_ms` first."""
    key: tuple[str, ...]
    append: bool

    @property
    def listed(self) -> str:
        """The columns' names in SQL."""
        return ", ".join(f'"{name}"' for name, _ in self.columns)


@dataclass(slots=True)
class Taken:
    """One partition of ours."""

    epoch: int
    position: int
    """The offset up to which everything is in the database; -1 before the first record."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Which reader reads which topic."""

    reader: str
    topic: str
    topic_id: str


@dataclass(slots=True)
class Written:
    """What became of rows."""

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    refused: dict[int, RowsRefused] = field(default_factory=dict)
    """By their number in what was given."""

    def add(self, other: Written) -> None:
        """Count another part of the same rows; what was refused is already by its own number."""
        self.inserted += other.inserted
        self.updated += other.updated
        self.unchanged += other.unchanged
        self.refused |= other.refused


class Connection(Protocol):
    """One connection to a database; blocking, used by one thread at a time.

    Every method raises DatabaseAway when the connection is lost, RowsRefused for what a row can not be, and
    StateIncompatible for what no waiting cures.
    """

    types: Mapping[str, str]
    """The SQL type of each column type of a topology."""
    mark: str
    """What stands for a parameter."""
    temporary: str
    """The schema of temporary tables."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; return how many rows it touched."""

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Return the rows of a query."""

    def has(self, table: str) -> bool:
        """Tell whether there is such a table."""

    def columns(self, sql: str) -> list[str]:
        """Return the names of a query's columns; reads no row."""

    def stage(self, table: Table, rows: Sequence[Row]) -> None:
        """Put rows into the empty staging table."""

    def begin(self) -> None:
        """A transaction that writes is open."""

    def commit(self) -> None:
        """What was done since `begin` is done."""

    def rollback(self) -> None:
        """Nothing of it is."""

    def close(self) -> None:
        """Let go of the connection."""


Connect = Callable[[], Connection]


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """What the block does is committed at its end, or nothing of it is."""
    connection.begin()
    try:
        yield
    except DatabaseAway:
        raise
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def make_staging(connection: Connection, table: Table) -> None:
    """The staging table is there, empty, with the types of the target's columns."""
    connection.execute(f"DROP TABLE IF EXISTS {connection.temporary}.{STAGED}")
    connection.execute(f"CREATE TEMP TABLE {STAGED} AS SELECT {table.listed} FROM {table.name} WHERE 1 = 0")  # noqa: S608


OFFSETS_STATEMENT: Final = (
    f"CREATE TABLE IF NOT EXISTS {OFFSETS} (reader VARCHAR(250) NOT NULL, topic VARCHAR(250) NOT NULL, "
    f"part INTEGER NOT NULL, topic_id VARCHAR(32) NOT NULL, epoch BIGINT NOT NULL, position BIGINT NOT NULL, "
    f"PRIMARY KEY (reader, topic, part))"
)


def make(connection: Connection, table: str, statement: str) -> bool:
    """The table is there; tell whether it was made now. Where it was there, no right to make tables is needed."""
    if connection.has(table):
        return False
    try:
        connection.execute(statement)
    except RowsRefused:
        # PostgreSQL's catalog says so where another process makes the same table at the same moment.
        if not connection.has(table):
            raise
        return False
    return True


def make_offsets(connection: Connection) -> bool:
    """The table of positions and epochs is there; tell whether it was made now."""
    return make(connection, OFFSETS, OFFSETS_STATEMENT)


def take(connection: Connection, owned: Owned, partitions: Sequence[int]) -> dict[int, Taken]:
    """Return the partitions' positions, their earlier owner fenced.

    Raises StateIncompatible where the topic is another one than the one that was read: it was deleted and made anew.
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
                    f"and made anew. Nothing was touched. If its records are to be read from the start, delete the "
                    f"rows of reader {owned.reader!r} from {OFFSETS}: rows that are there stay as they are."
                )
            found[partition] = Taken(epoch, position)
    return found


def advance(connection: Connection, owned: Owned, taken: Mapping[int, Taken], ends: Mapping[int, int]) -> None:
    """The open transaction also moves the positions. Raises TaskMigrated where another owner has a partition."""
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


def happened(connection: Connection, owned: Owned, taken: Mapping[int, Taken], ends: Mapping[int, int]) -> bool:
    """Tell whether a transaction without an answer was committed. Raises TaskMigrated where it is not ours to know."""
    mark = connection.mark
    told: set[bool] = set()
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
            told.add(rows == [(mine.epoch, end)])
    return told == {True}


def _overtaken(owned: Owned, partition: int) -> TaskMigrated:
    return TaskMigrated(
        f"{owned.reader}: another process has taken {TopicPartition(owned.topic, partition)} over; this one stops, and "
        f"its transaction was rolled back. Run one process per partition of a sink."
    )


def shown(url: str) -> str:
    """Return an address without user and password."""
    return _PASSWORD.sub("", url)
