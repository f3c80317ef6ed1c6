"""Repeats each transaction until it has happened once, while a database may be temporarily unavailable."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from dedup.connect.database import Connect, DatabaseAway, DatabaseConnection, Owned, Taken, happened
from dedup.errors import DatabaseUnavailable

START_WITHIN_S: Final = 30.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
log: Final = logging.getLogger(__name__)
T = TypeVar("T")


class RetryingDatabase:
    """At most one connection to a database, replaced when it is lost. Blocking."""

    def __init__(self, connect: Connect, stopped: Callable[[], bool] = lambda: False) -> None:
        self._connect: Final = connect
        self._stopped: Final = stopped
        self._connection: DatabaseConnection | None = None
        self._pause_s = FIRST_PAUSE_S

    def first(self, work: Callable[[DatabaseConnection], T]) -> T:
        """Return the result of the work, which may run several times.

        Raises DatabaseUnavailable after 30 s of retries.
        """
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            try:
                return work(self._connected())
            except DatabaseAway as away:
                self.close()
                if time.monotonic() > deadline_s or self._stopped():
                    raise DatabaseUnavailable(
                        f"the database does not answer: {away}. Start it, or correct `url`."
                    ) from away
                time.sleep(FIRST_PAUSE_S)

    def insist(self, work: Callable[[DatabaseConnection], T | None]) -> T | None:
        """Return the result of read-only work, no matter how long the database is unavailable; None after `stopped`."""
        self._pause_s = FIRST_PAUSE_S
        while not self._stopped():
            try:
                return work(self._connected())
            except DatabaseAway as away:
                self._lose(away)
                self._pause()
        return None

    def once(
        self,
        work: Callable[[DatabaseConnection], T],
        prepare: Callable[[DatabaseConnection], None],
        owned: Owned,
        taken: Mapping[int, Taken],
        ends: Mapping[int, int],
    ) -> T | None:
        """Run a transaction that moves positions to ``ends`` exactly once; return the result of the work.

        Returns None if the transaction happened but its response was lost. Waits while the database is unavailable;
        ``prepare`` is called with each new connection first. Raises DatabaseUnavailable if `stopped` becomes true in
        the meantime.
        """
        self._pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._connection is None:
                    connection = self._connected()
                    prepare(connection)
                    if happened(connection, owned, taken, ends):
                        return None
                return work(self._connected())
            except DatabaseAway as away:
                self._lose(away)
                if self._stopped():
                    raise DatabaseUnavailable(f"stopped while the database did not answer: {away}") from away
                self._pause()

    def _connected(self) -> DatabaseConnection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _lose(self, away: DatabaseAway) -> None:
        log.warning("the database does not answer, waiting; nothing is lost: %s", away)
        self.close()

    def _pause(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
