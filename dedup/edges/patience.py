"""A database that goes away and comes back: transactions are repeated until they happened, once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from dedup.edges.database import Connect, Connection, DatabaseAway, Owned, Taken, happened
from dedup.errors import DatabaseUnavailable

START_WITHIN_S: Final = 30.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
log: Final = logging.getLogger(__name__)
T = TypeVar("T")


class Patient:
    """One connection at a time to one database, made anew when it is lost. Blocking."""

    def __init__(self, connect: Connect, stopped: Callable[[], bool] = lambda: False) -> None:
        self._connect: Final = connect
        self._stopped: Final = stopped
        self._connection: Connection | None = None

    def first(self, work: Callable[[Connection], T]) -> T:
        """Return what the work returns, which may be repeated. Raises DatabaseUnavailable after 30 s without one."""
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            try:
                return work(self._connected())
            except DatabaseAway as away:
                self._lose()
                if time.monotonic() > deadline_s or self._stopped():
                    raise DatabaseUnavailable(
                        f"the database does not answer: {away}. Start it, or correct `url`."
                    ) from away
                time.sleep(FIRST_PAUSE_S)

    def insist(self, work: Callable[[Connection], T | None]) -> T | None:
        """Return what work returns that only reads, however long the database is away; None when we are to stop."""
        pause_s = FIRST_PAUSE_S
        while not self._stopped():
            try:
                return work(self._connected())
            except DatabaseAway as away:
                log.warning("the database does not answer, waiting; nothing is lost: %s", away)
                self._lose()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return None

    def once(
        self,
        work: Callable[[Connection], T],
        prepare: Callable[[Connection], None],
        owned: Owned,
        taken: Mapping[int, Taken],
        ends: Mapping[int, int],
    ) -> T | None:
        """The work's transaction, which moves positions to ``ends``, happened once; return what it returned.

        None where it happened and its answer was lost. While the database is away it is waited for; ``prepare`` gets
        each new connection first. Raises DatabaseUnavailable when we are to stop meanwhile.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._connection is None:
                    connection = self._connected()
                    prepare(connection)
                    if happened(connection, owned, taken, ends):
                        return None
                return work(self._connected())
            except DatabaseAway as away:
                log.warning("the database does not answer, waiting; nothing is lost: %s", away)
                self._lose()
                if self._stopped():
                    raise DatabaseUnavailable(f"stopped while the database did not answer: {away}") from away
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _lose(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def close(self) -> None:
        """Let go of the connection."""
        self._lose()
