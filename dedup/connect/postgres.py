"""Implements a connection to PostgreSQL with psycopg 3. Rows are first written to a temporary table with COPY."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from dedup.connect.database import STAGED, DatabaseAway, DatabaseConnection, LockHeld, Row, RowsRefused, Table, shown
from dedup.errors import StateIncompatible

AWAY: Final = (
    psycopg.InterfaceError,
    pg.DeadlockDetected,
    pg.SerializationFailure,
    pg.QueryCanceled,
    pg.AdminShutdown,
    pg.CrashShutdown,
    pg.CannotConnectNow,
    pg.TooManyConnections,
    pg.DiskFull,
    pg.OutOfMemory,
    pg.ReadOnlySqlTransaction,
    pg.IdleInTransactionSessionTimeout,
)
"""Temporary errors that the transaction itself did not cause. After one, the whole transaction is repeated."""
_CODES: Final[Mapping[type[psycopg.Error], str]] = {
    pg.UniqueViolation: "unique_violation",
    pg.ExclusionViolation: "unique_violation",
    pg.NotNullViolation: "null_refused",
}


_DEFAULTS: Final[Mapping[str, Any]] = {
    "connect_timeout": 10,
    # By default, it takes two hours to detect that a firewall has dropped the connection.
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""Default connection parameters for libpq. A URL may contain other parameters."""
_SESSION: Final = (
    "SELECT set_config(name, ours, false) FROM pg_settings JOIN (VALUES ('lock_timeout', '30s'), "
    "('tcp_keepalives_idle', '30'), ('tcp_keepalives_interval', '10'), ('tcp_keepalives_count', '3')) "
    "AS wanted (name, ours) USING (name) WHERE source = 'default'"
)
"""Sets the settings that neither the server's configuration nor the URL has set.

If this process's host loses power during a transaction, the server keeps the transaction's row locks until its
keepalives fail, by default for two hours. A successor that waits for these locks must be able to report the wait and to
stop. PgBouncer refuses these settings when a connection starts, so they are set afterward.
"""
_DENIED: Final = re.compile(
    r"authentication failed for user|no pg_hba\.conf entry|pg_hba\.conf rejects|is not permitted to log in|"
    r'(?:role|database) "[^"]*" does not exist|permission denied for database|no password supplied'
)
"""Matches a server's English message about denied access, because psycopg's errors have no code during connecting."""
_ATTEMPT: Final = "\n- host: "
"""The text that begins each attempt's error if psycopg has tried several addresses."""


class PostgresConnection(DatabaseConnection):
    """A `DatabaseConnection` to PostgreSQL."""

    types: Mapping[str, str] = {
        "bytes": "BYTEA",
        "text": "TEXT",
        "integer": "BIGINT",
        "number": "DOUBLE PRECISION",
        "boolean": "BOOLEAN",
        "time": "TIMESTAMPTZ",
        "json": "JSONB",
    }
    mark = "%s"
    temporary = "pg_temp"
    begin_statement = "BEGIN"
    for_update = " FOR UPDATE"
    check_at_once = "SET CONSTRAINTS ALL IMMEDIATE"

    def __init__(self, url: str) -> None:
        self._shown: Final = shown(url)
        with self._explained():
            given = conninfo_to_dict(url, application_name="dedup", client_encoding="utf8")
            # A prepared statement fails after the type of one of its columns is altered, for example to BIGINT.
            options: dict[str, Any] = {"autocommit": True, "prepare_threshold": None}
            self._connection = psycopg.connect(**options, **{**_DEFAULTS, **given})
        self._cursor = self._connection.cursor()
        try:
            self.execute(_SESSION)
        except BaseException:
            self._connection.close()
            raise

    def _run(self, sql: str, parameters: Sequence[Any]) -> psycopg.Cursor[Row]:
        return self._cursor.execute(sql.encode(), parameters or None)

    def origin(self, sql: str, column: str) -> tuple[int, int]:
        """Return the table (by OID) and the column number that a query's column comes from, or zeros if unknown."""
        with self._explained():
            cursor = self._run(f"SELECT * FROM ({sql}) t LIMIT 0", ())  # noqa: S608  # the author's query
            names, result = [each.name for each in cursor.description or ()], cursor.pgresult
        if column not in names or result is None:
            return 0, 0
        return result.ftable(names.index(column)), result.ftablecol(names.index(column))

    def has(self, table: str) -> bool:
        """Return whether the table exists."""
        return self.query("SELECT to_regclass(%s) IS NOT NULL", (table,)) == [(True,)]

    def required(self, table: str) -> list[str]:
        """Return the columns that each new row must have, because they may not be null and have no default.

        The result is empty for a table with triggers, because a trigger may fill any column.
        """
        return [
            name
            for (name,) in self.query(
                "SELECT attname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid WHERE attrelid = %s::regclass "
                "AND attnum > 0 AND NOT attisdropped AND attnotnull AND NOT atthasdef AND attidentity = '' "
                "AND typdefault IS NULL AND NOT EXISTS (SELECT 1 FROM pg_trigger WHERE tgrelid = attrelid "
                "AND NOT tgisinternal) ORDER BY attnum",
                (table,),
            )
        ]

    def is_staged_as(self, table: Table) -> bool:
        """Return whether the columns of the staging table still have the types of the table's columns."""
        return not self.query(
            "SELECT 1 FROM pg_attribute s JOIN pg_attribute t USING (attname) WHERE s.attnum > 0 AND s.attrelid = "
            "%s::regclass AND t.attrelid = %s::regclass AND (s.atttypid, s.atttypmod) <> (t.atttypid, t.atttypmod)",
            (f"{self.temporary}.{STAGED}", table.name),
        )

    def stage(self, table: Table, rows: Sequence[Row]) -> None:
        """Replace the staging table's contents with ``rows``."""
        with self._explained():
            self._cursor.execute(f"TRUNCATE {STAGED}".encode())
            with self._cursor.copy(f"COPY {STAGED} ({table.listed}) FROM STDIN".encode()) as copy:
                write = copy.write_row
                for row in rows:
                    write(row)

    def commit(self) -> None:
        """Commit, or raise StateIncompatible if the caller has suppressed an error that aborted the transaction."""
        if self._connection.info.transaction_status == TransactionStatus.INERROR:
            raise StateIncompatible(
                f"{self._shown}: a statement of the transaction failed and the error was caught, so PostgreSQL would "
                "roll the transaction back without an error. Nothing was changed. Let the error pass, or run such a "
                "statement after SAVEPOINT."
            )
        super().commit()

    def rollback(self) -> None:
        """Roll back the open transaction unless the connection is closed."""
        if not self._connection.closed:
            self.execute("ROLLBACK")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except pg.LockNotAvailable as error:
            raise LockHeld(f"{self._shown}: {_message(error)}") from error
        except AWAY as error:
            raise DatabaseAway(f"{self._shown}: {_message(error)}") from error
        except psycopg.Error as error:
            raise _refusal(error) or self._failure(error) from error
        except UnicodeEncodeError as error:
            raise RowsRefused("wrong_type", "PostgreSQL cannot store half a surrogate pair") from error

    def _failure(self, error: psycopg.Error) -> DatabaseAway | StateIncompatible:
        text = f"{self._shown}: PostgreSQL says: {_message(error)}. Nothing was changed."
        if not isinstance(error, psycopg.OperationalError):
            return StateIncompatible(text)
        denial = _denial(error)
        if denial is not None:
            return StateIncompatible(
                f"{self._shown}: PostgreSQL denies access: {denial}. Correct the user, the password, or the database "
                f"in `url`, or let the server admit this user; then start again."
            )
        return DatabaseAway(f"{self._shown}: {_message(error)}")


def _refusal(error: psycopg.Error) -> RowsRefused | None:
    """Return the error to raise if a row's values cause the error on every attempt, or None."""
    text = f"PostgreSQL: {_message(error)}"
    match error:
        case pg.ProgramLimitExceeded() | pg.StatementTooComplex():
            # For example, the value is too large for an index. psycopg classifies this error as a server error.
            return RowsRefused("too_large", text)
        case psycopg.IntegrityError():
            return RowsRefused(_CODES.get(type(error), "constraint"), text)
        case psycopg.DataError():
            return RowsRefused("wrong_type", f"PostgreSQL rejects this value: {type(error).__name__}")
        case pg.RaiseException() | pg.AssertFailure() | pg.NoDataFound() | pg.TooManyRows() | pg.PlpgsqlError():
            raised = True
        case _:
            raised = type(error) is psycopg.DatabaseError and error.sqlstate is not None  # a code that the author chose
    # A trigger's message may contain values of the row.
    return RowsRefused("constraint", "PostgreSQL: a trigger rejects this row") if raised else None


def _denial(error: psycopg.OperationalError) -> str | None:
    """Return the server's message if no server in the URL admits the user, in which case waiting does not help."""
    if (error.sqlstate or "")[:2] in {"28", "3D"}:
        return _message(error)
    if error.sqlstate is not None:
        return None
    text = str(error)
    hosts: dict[str, str | None] = {}
    for attempt in text.split(_ATTEMPT)[1:] or [text]:
        # A host may have several addresses, and the server may listen on only one address. If the URL names several
        # hosts, a host that does not respond may be the one that admits the user.
        host = attempt.partition(", hostaddr: ")[0]
        hosts[host] = hosts.get(host) or next((line for line in attempt.splitlines() if _DENIED.search(line)), None)
    denials = list(hosts.values())
    return denials[-1] if None not in denials else None


def _message(error: psycopg.Error) -> str:
    """Return the first line of the server's message, without the detail, which may contain values of a row."""
    text = error.diag.message_primary or str(error) or type(error).__name__
    if "percent-encoded" in text:
        return "the URL contains a percent sign that does not begin an encoded character"  # libpq shows the password
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__
