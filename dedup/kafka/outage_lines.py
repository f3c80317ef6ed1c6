"""Limits the log lines about a broker's outage to one line at the beginning, one per minute, and one at the end.

Without this limit, the log would contain aiokafka's failed attempts to reach a node, up to thousands per second, but
not the first successful attempt. Every command sets up logging with this module, which therefore imports only modules
that load quickly.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, TextIO, TypeVar

log: Final = logging.getLogger(__name__)
REPEATED_EVERY_S: Final = 60.0
"""The interval, in seconds, at which a continuing outage is logged again."""
OVER_AFTER_S: Final = 15.0
"""An outage is over after this time without a failure. The time is longer than any client's retry interval."""
AWAY: Final = {"outage": "away"}
"""The argument `extra` of the log messages that dedup repeats while a broker does not respond."""
ASIDE: Final = {"outage": "aside"}
"""The argument `extra` of dedup's log messages that are treated like aiokafka's messages about an unavailable broker.
"""
BACK: Final = {"outage": "back"}
"""The argument `extra` of dedup's log message that nothing is waiting for a broker anymore."""
WAITING: Final = {"waiting": True}
"""The argument `extra` of log messages that a Spark task logs immediately, because its records are waiting."""
FAILURES: Final = (
    "Unable ",
    "Group Coordinator Request failed",
    "Error sending ",
    "Marking the coordinator dead",
    "Heartbeat send request failed",
    "Heartbeat session expired",
    "Heartbeat failed for group %s: coordinator",
    "OffsetCommit failed before join",
    "LeaveGroup request failed",
)
"""The beginnings of the messages that aiokafka logs when a broker is unavailable."""
_OF_CLIENT: Final = "aiokafka"
_GATHERED_FOR_S: Final = 1.0
K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class OutageLines:
    """Decides which lines to log about successive outages. The caller passes the current time in seconds."""

    _began_s: float | None = None
    _said_s: float = 0.0
    _last_s: float = 0.0
    _over_s: float = float("-inf")
    _unsaid: int = 0
    _latest: dict[str, str] = field(default_factory=dict)
    """The latest failure of each logger in this outage."""

    @property
    def on(self) -> bool:
        """True during an outage."""
        return self._began_s is not None

    def failed(self, logger: str, message: str, now_s: float) -> str | None:
        """Note a failure, and return the line to log, or None. Each logger's first failure in an outage is logged."""
        if self._began_s is not None and now_s - self._last_s >= REPEATED_EVERY_S:
            self._began_s = None  # no event loop was left to log the end
        if self._began_s is None:
            if logger == _OF_CLIENT and now_s - self._over_s < OVER_AFTER_S:
                return None  # a late message about a past outage
            self._began_s = self._said_s = now_s
            self._unsaid = 0
            self._latest.clear()
        is_first = logger not in self._latest
        self._latest[logger], self._last_s = message, now_s
        if is_first:
            return f"a broker does not answer, dedup tries again: {message}" if logger == _OF_CLIENT else message
        self._unsaid += 1
        if now_s - self._said_s < REPEATED_EVERY_S:
            return None
        self._said_s, count, self._unsaid = now_s, self._unsaid, 0
        latest = "; ".join(self._latest.values())
        return f"a broker has not answered for {now_s - self._began_s:.0f} s, {count:,} more failures: {latest}"

    def look(self, now_s: float) -> str | None:
        """End the outage and return its last line, or return None if a failure is less than `OVER_AFTER_S` old."""
        if self._began_s is None or now_s - self._last_s < OVER_AFTER_S:
            return None
        away_s, self._began_s = self._last_s - self._began_s, None
        return f"the broker answers again, after {away_s:.0f} s and {self._unsaid:,} more failures"

    def over(self, now_s: float) -> None:
        """End the outage without a line, because the log already says that nothing is waiting for a broker anymore."""
        self._began_s, self._over_s = None, now_s


class OutageFilter(logging.Filter):
    """Replaces the messages that aiokafka and dedup log about an outage with the lines of `OutageLines`.

    With ``verbose``, all of dedup's own messages are logged as well.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        super().__init__()
        self._verbose: Final = verbose
        self._lines: Final = OutageLines()
        self._lock: Final = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record.

        If `OutageLines` returns a line, that line replaces the text of the log record.
        """
        if not of_outage(record):
            return True
        with self._lock:
            return self._filter(record, getattr(record, "outage", None))

    def _filter(self, record: logging.LogRecord, ours: str | None) -> bool:
        if ours == "back":
            self._lines.over(record.created)
            return True
        of_client = ours in {"aside", None}
        was_on, said = self._lines.on, record.getMessage()
        logger = _OF_CLIENT if of_client else record.name
        line = self._lines.failed(logger, said.rstrip(" .:") if of_client else said, record.created)
        if self._lines.on and not was_on:
            self._look_later()
        if line is None:
            return self._verbose and ours is not None
        if line != said:
            record.msg, record.args = line, ()
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True

    def _look(self) -> None:
        with self._lock:
            line = self._lines.look(time.time())
        if line is not None:
            log.warning("%s", line)
        elif self._lines.on:
            self._look_later()

    def _look_later(self) -> None:
        _call_later(OVER_AFTER_S / 5, self._look)


def of_outage(record: logging.LogRecord) -> bool:
    """Return whether a log record reports the beginning, the continuation, or the end of a broker's outage."""
    of_client = record.name.startswith(_OF_CLIENT) and str(record.msg).startswith(FAILURES)
    return of_client or getattr(record, "outage", None) is not None


@dataclass(slots=True)
class Gathered(Generic[K, V]):
    """Collects all pairs added within one second, and passes them to ``say``, which logs them in one line."""

    say: Callable[[Mapping[K, V]], None]
    _found: dict[K, V] = field(init=False, default_factory=dict)

    def add(self, key: K, value: V) -> None:
        """Add a value for a key while an event loop is running."""
        if not self._found:
            _call_later(_GATHERED_FOR_S, self._flush)
        self._found[key] = value

    def _flush(self) -> None:
        found, self._found = self._found, {}
        self.say(found)


def _call_later(delay_s: float, call: Callable[[], None]) -> None:
    """Call a function after ``delay_s`` seconds in this thread's event loop, or in a new thread if there is no loop."""
    import asyncio  # noqa: PLC0415  # not all commands need asyncio

    try:
        asyncio.get_running_loop().call_later(delay_s, call)
    except RuntimeError:
        timer = threading.Timer(delay_s, call)
        timer.daemon = True
        timer.start()


def quiet_logging() -> None:
    """Log the warnings of all libraries to standard error, in the format of `dedup run`."""
    send_to_stderr(text_format(), logging.WARNING)


def text_format() -> logging.Formatter:
    """Return the formatter for log lines that people read."""
    return logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``.

    While a progress line is on the terminal, Rich replaces ``sys.stderr``, so that other output appears above the line.
    """

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def send_to_stderr(formatter: logging.Formatter, level: int) -> None:
    """Replace all log handlers with one that writes to standard error and limits the lines about outages."""
    handler = _CurrentStderr()
    handler.setFormatter(formatter)
    handler.addFilter(OutageFilter(verbose=level <= logging.DEBUG))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


@contextmanager
def logging_paused() -> Iterator[None]:
    """Make other threads wait before they write a log line in the ``with`` block.

    Rich chooses the position of a text on the screen before it writes the text. If another thread writes in the
    meantime, both texts appear on the same line.
    """
    with ExitStack() as held:
        for handler in logging.getLogger().handlers:
            handler.acquire()
            held.callback(handler.release)
        yield
