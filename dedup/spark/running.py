"""Streaming queries that belong together: started, waited for, stopped, and what made one fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from dedup.errors import DedupError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_S: Final = 0.2
_TOLD_LINES: Final = 12


class Beside(Protocol):
    """What runs as long as the queries do."""

    def start(self) -> None:
        """It runs."""

    def stop(self) -> None:
        """It has ended."""


class Running:
    """A running stream; `wait` returns when it is over."""

    def __init__(
        self, starters: Sequence[Callable[[], StreamingQuery]], *, in_turn: bool, beside: Sequence[Beside] = ()
    ) -> None:
        self._starters: Final = starters
        self._in_turn: Final = in_turn
        """Each begins when the one before has done all there was."""
        self._beside: Final = beside
        self._queries: list[StreamingQuery] = []
        self._stopping: Final = threading.Event()
        self.failure: DedupError | None = None
        """What an executor or a check found that no retry can cure."""

    @property
    def queries(self) -> Sequence[StreamingQuery]:
        """The queries started so far."""
        return self._queries

    def start(self) -> None:
        """The queries run; in turn, the first does."""
        for starter in self._starters[:1] if self._in_turn else self._starters:
            self._queries.append(starter())
        for each in self._beside:
            each.start()

    def wait(self) -> None:
        """Return when every query has ended by `stop` or by being done. Raises what made one fail."""
        try:
            self._watch()
            for starter in self._starters[1:] if self._in_turn else ():
                if not self._stopping.is_set():
                    self._queries.append(starter())
                    self._watch()
        finally:
            for each in self._beside:
                each.stop()
            for query in self._queries:
                query.stop()
        self._raise_failure()

    def stop(self) -> None:
        """`wait` returns soon; what was committed stays, the next run judges the rest. Signal handlers may call it."""
        self._stopping.set()

    def _watch(self) -> None:
        """Return when a query has ended, or all were asked to."""
        watched = self._queries[-1:] if self._in_turn else self._queries
        while all(query.isActive for query in watched):
            if self._stopping.wait(_LOOK_S):
                return
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
        for query in self._queries:
            error = query.exception()
            if error is not None:
                told = "\n".join(str(error).splitlines()[:_TOLD_LINES])
                raise DedupError(
                    f"the query {query.name} failed: {told}\nNothing is lost: start it again with the same checkpoint "
                    f"once the cause is mended."
                )
