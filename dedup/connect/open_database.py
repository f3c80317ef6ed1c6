"""Opens the SQLite or PostgreSQL database that a URL names, and repeats work that a lost connection interrupted."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

from dedup.connect import sqlite
from dedup.connect.database import DatabaseAway, DatabaseConnection, shown
from dedup.errors import DatabaseUnavailable, PackageMissing, Problem, SettingsError

POSTGRES: tuple[str, ...] = ("postgresql://", "postgres://")
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
    elif not url.startswith(sqlite.PREFIX):
        raise SettingsError(
            [Problem("url", f"{shown(url)!r} is neither sqlite:///FILE nor postgresql://USER@HOST/DATABASE")]
        )


def connect(url: str, *, read_only: bool = False) -> DatabaseConnection:
    """Return a new connection. Raises the errors of `refuse_unusable`, and DatabaseAway if there is no response."""
    refuse_unusable(url)
    if url.startswith(sqlite.PREFIX):
        return sqlite.SqliteConnection(url, read_only=read_only)
    from dedup.connect.postgres import PostgresConnection  # noqa: PLC0415  # only where its driver is installed

    return PostgresConnection(url)


class RetryingDatabase:
    """Keeps at most one connection to a database, and replaces a connection that is lost.

    The methods block. Each new connection is passed to ``prepare`` first.
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
        """Run ``work``, repeatedly if necessary, until the database responds, and return the result.

        Raises DatabaseUnavailable after ``within_s`` without a response, or as soon as ``stopped`` returns True.
        """
        deadline_s = time.monotonic() + within_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._connection is None:
                    connection = connect(self._url, read_only=self._read_only)
                    try:
                        self._prepare(connection)
                    except BaseException:
                        connection.close()
                        raise
                    self._connection = connection
                    if pause_s > FIRST_PAUSE_S:
                        log.info("the database answers again")
                return work(self._connection)
            except DatabaseAway as away:
                self.close()
                if self._stopped() or time.monotonic() > deadline_s:
                    text = f"the database does not answer: {away}. Start it, or correct `url`."
                    raise DatabaseUnavailable(text) from away
                log.warning("the database does not answer, waiting; nothing is lost: %s", away)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
