"""Implements a connection to SQLite. While one connection writes, other writers wait for its lock."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from dedup.connect.database import STAGED, DatabaseAway, DatabaseConnection, Row, RowsRefused, Table
from dedup.errors import StateIncompatible

PREFIX: Final = "sqlite:///"
BUSY_S: Final = 5.0
AWAY: Final = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN")
"""Prefixes of the names of SQLite's temporary errors."""
_CODES: Final[Mapping[str, str]] = {
    "SQLITE_CONSTRAINT_UNIQUE": "unique_violation",
    "SQLITE_CONSTRAINT_PRIMARYKEY": "unique_violation",
    "SQLITE_CONSTRAINT_NOTNULL": "null_refused",
    "SQLITE_CONSTRAINT_DATATYPE": "wrong_type",
}
_NUMBERED: Final = re.compile(r":\d+\Z")


class SqliteConnection(DatabaseConnection):
    """A `DatabaseConnection` to SQLite."""

    types: Mapping[str, str] = {
        "bytes": "BLOB",
        "text": "TEXT",
        "integer": "INTEGER",
        "number": "REAL",
        "boolean": "INTEGER",
        "time": "TEXT",
        "json": "TEXT",
    }
    mark = "?"
    temporary = "temp"
    begin_statement = "BEGIN IMMEDIATE"

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._path: Final = url.removeprefix(PREFIX)
        mode = "?mode=ro" if read_only else ""
        with self._explained():
            self._connection = sqlite3.connect(
                f"file:{self._path}{mode}", uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )

    def _run(self, sql: str, parameters: Sequence[Any]) -> sqlite3.Cursor:
        return self._connection.execute(sql, parameters)

    def has(self, table: str) -> bool:
        """See `DatabaseConnection`."""
        return bool(self.query("SELECT 1 FROM pragma_table_info(?) LIMIT 1", (table.rpartition(".")[2],)))

    def columns(self, sql: str) -> list[str]:
        """See `DatabaseConnection`."""
        # SQLite renames the second of two columns with the same name to "name:1".
        return [_NUMBERED.sub("", name) for name in super().columns(sql)]

    def stage(self, table: Table, rows: Sequence[Row]) -> None:
        """See `DatabaseConnection`."""
        marks = ", ".join("?" for _ in table.columns)
        with self._explained():
            self._connection.execute(f"DELETE FROM {STAGED}")  # noqa: S608  # our own name
            self._connection.executemany(f"INSERT INTO {STAGED} VALUES ({marks})", rows)  # noqa: S608  # our own name

    def rollback(self) -> None:
        """See `DatabaseConnection`."""
        if self._connection.in_transaction:
            self.execute("ROLLBACK")

    def close(self) -> None:
        """See `DatabaseConnection`."""
        self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            code = _CODES.get(getattr(error, "sqlite_errorname", ""), "constraint")
            raise RowsRefused(code, f"SQLite: {error}") from error
        except (sqlite3.DataError, OverflowError, UnicodeEncodeError) as error:
            raise RowsRefused("wrong_type", f"SQLite rejects this value: {error}") from error
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", None) or ""
            if isinstance(error, sqlite3.OperationalError) and name.startswith(AWAY):
                raise DatabaseAway(f"{self._path}: {error}") from error
            raise StateIncompatible(f"{self._path}: SQLite says: {error}. Nothing was changed.") from error
