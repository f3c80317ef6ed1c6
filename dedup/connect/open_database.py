"""Opens the SQLite or PostgreSQL database that a URL names, and repeats work that a lost connection interrupted.

This module implements the connection to SQLite, which needs no extra package. The module `postgres` is imported
only for the URL of a PostgreSQL database.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from dedup.connect.database import STAGED, DatabaseAway, DatabaseConnection, LockHeld, Row, RowsRefused, Table, shown
from dedup.errors import DatabaseUnavailable, PackageMissing, Problem, SettingsError, StateIncompatible

POSTGRES: tuple[str, ...] = ("postgresql://", "postgres://")
SQLITE: Final = "sqlite:///"
_BUSY_S: Final = 5.0
_AWAY: Final = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY")
"""Prefixes of the names of SQLite's temporary errors.

SQLITE_READONLY occurs, for example, if a reader lacks the permission to roll back a killed writer's transaction.
"""
_CODES: Final[Mapping[str, str]] = {
    "SQLITE_CONSTRAINT_UNIQUE": "unique_violation",
    "SQLITE_CONSTRAINT_PRIMARYKEY": "unique_violation",
    "SQLITE_CONSTRAINT_NOTNULL": "null_refused",
    "SQLITE_CONSTRAINT_DATATYPE": "wrong_type",
}
_UNQUOTED: Final = re.compile(r"[?#]|%(?![0-9A-Fa-f]{2})")
_NUMBERED: Final = re.compile(r":\d+\Z")
START_WITHIN_S: Final = 30.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
log: Final = logging.getLogger(__name__)
T = TypeVar("T")


def refuse_unusable(url: str) -> None:
    """Raise SettingsError for an unsupported URL, and PackageMissing if the database's driver is not installed."""
    if url.startswith(POSTGRES):
        if importlib.util.find_spec("psycopg") is None:
            raise PackageMissing("PostgreSQL", "postgres")
    elif not url.startswith(SQLITE):
        raise SettingsError(
            [Problem("url", f"{shown(url)!r} is neither sqlite:///FILE nor postgresql://USER@HOST/DATABASE")]
        )
    elif odd := _UNQUOTED.search(url):
        text = f"{url!r}: write {odd[0][0]!r} as %{ord(odd[0][0]):02X}, as in every URL; SQLite takes no parameters"
        raise SettingsError([Problem("url", text)])


def connect(url: str, *, read_only: bool = False) -> DatabaseConnection:
    """Return a new connection. Raises the errors of `refuse_unusable`, and DatabaseAway if no database responds."""
    refuse_unusable(url)
    if url.startswith(SQLITE):
        return SqliteConnection(url, read_only=read_only)
    from dedup.connect.postgres import PostgresConnection  # noqa: PLC0415  # the driver may not be installed

    return PostgresConnection(url)


class SqliteConnection(DatabaseConnection):
    """A `DatabaseConnection` to SQLite. While one connection writes, other writers wait for the write lock."""

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
    for_update = ""
    check_at_once = ""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._path: Final = url.removeprefix(SQLITE)
        mode = "?mode=ro" if read_only else ""
        with self._explained():
            self._connection = sqlite3.connect(
                f"file:{self._path}{mode}", uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
        if read_only:
            # By default, one text that is not UTF-8 makes the whole query fail with an error that does not name the
            # row.
            self._connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        # A connection that only reads would not notice that the database file was replaced.
        self._read_inode: Final = self._inode() if read_only else 0

    def _inode(self) -> int:
        try:
            return Path(unquote(self._path)).stat().st_ino
        except OSError as error:
            raise DatabaseAway(f"{self._path}: {error.strerror}") from error

    def _run(self, sql: str, parameters: Sequence[Any]) -> sqlite3.Cursor:
        if self._read_inode and self._inode() != self._read_inode:
            raise DatabaseAway(f"{self._path}: the file was replaced")
        return self._connection.execute(sql, parameters)

    def has(self, table: str) -> bool:
        """Return whether the table exists."""
        return bool(self.query("SELECT 1 FROM pragma_table_info(?) LIMIT 1", (table.rpartition(".")[2],)))

    def required(self, table: str) -> list[str]:
        """Return the columns that each new row must have, because they may not be null and have no default."""
        # SQLite itself numbers an INTEGER primary key.
        read = (
            """SELECT name FROM pragma_table_info(?) WHERE "notnull" AND dflt_value IS NULL """
            "AND NOT (pk AND upper(type) = 'INTEGER')"
        )
        return [name for (name,) in self.query(read, (table.rpartition(".")[2],))]

    def columns(self, sql: str) -> list[str]:
        """Return the column names of a query without reading its rows."""
        # SQLite renames the second of two columns with the same name to "name:1".
        return [_NUMBERED.sub("", name) for name in super().columns(sql)]

    def stage(self, table: Table, rows: Sequence[Row]) -> None:
        """Replace the staging table's contents with ``rows``."""
        marks = ", ".join("?" for _ in table.columns)
        with self._explained():
            self._connection.execute(f"DELETE FROM {STAGED}")  # noqa: S608  # our own name
            self._connection.executemany(f"INSERT INTO {STAGED} VALUES ({marks})", rows)  # noqa: S608  # our own name

    def rollback(self) -> None:
        """Roll back the open transaction, if any."""
        if self._connection.in_transaction:
            self.execute("ROLLBACK")

    def close(self) -> None:
        """Close the connection."""
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
            if isinstance(error, sqlite3.OperationalError) and name.startswith(_AWAY):
                raise DatabaseAway(f"{self._path}: {error}") from error
            raise StateIncompatible(f"{self._path}: SQLite says: {error}. Nothing was changed.") from error


class RetryingDatabase:
    """Keeps at most one connection to a database, and replaces a lost connection.

    All methods block. Each new connection is passed to ``prepare`` before its first use.
    """

    def __init__(
        self,
        url: str,
        stopped: Callable[[], bool] = lambda: False,
        *,
        read_only: bool = False,
        prepare: Callable[[DatabaseConnection], None] = lambda _: None,
    ) -> None:
        self._url: Final = url
        self._stopped: Final = stopped
        self._read_only: Final = read_only
        self._prepare: Final = prepare
        self._connection: DatabaseConnection | None = None

    def first(self, work: Callable[[DatabaseConnection], T]) -> T:
        """Run ``work`` as `insist` does. Raises DatabaseUnavailable if the database does not respond within 30 s."""
        return self.insist(work, within_s=START_WITHIN_S)

    def insist(self, work: Callable[[DatabaseConnection], T], *, within_s: float = math.inf) -> T:
        """Run ``work``, repeating it until the database responds, and return the result.

        Raises DatabaseUnavailable if the database does not respond for ``within_s`` seconds, or if ``stopped`` returns
        True. Waiting for another session's lock does not count as a missing response.
        """
        deadline_s = time.monotonic() + within_s
        pause_s, silent = FIRST_PAUSE_S, False
        while True:
            try:
                if self._connection is None:
                    self._connection = self._prepared()
                    if silent:
                        log.info("the database answers again")
                        silent = False
                return work(self._connection)
            except LockHeld as held:
                self.close()
                if self._stopped():
                    raise DatabaseUnavailable(
                        f"stopped while another session of the database held a lock: {held}. The next start continues "
                        f"after the last commit."
                    ) from held
                log.warning("another session of the database holds a lock, waiting; nothing is lost: %s", held)
                deadline_s = time.monotonic() + within_s
            except DatabaseAway as away:
                self.close()
                if self._stopped() or time.monotonic() > deadline_s:
                    text = f"the database does not answer: {away}. Start it, or correct `url`."
                    raise DatabaseUnavailable(text) from away
                log.warning("the database does not answer, waiting; nothing is lost: %s", away)
                silent = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _prepared(self) -> DatabaseConnection:
        connection = connect(self._url, read_only=self._read_only)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the connection, if any."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
