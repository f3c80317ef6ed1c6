"""Formats each event in a worker's logs as one line of text or JSON, and writes it to standard error.

A JSON line also names the task, topic, and partition in the message's arguments. Logs never contain record values.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from dedup.kafka.wire import TopicPartition
from dedup.settings import Settings
from dedup.worker.task import TaskId

log: Final = logging.getLogger(__name__)
NOISY: Final = (
    "aiokafka",
    "faust",
    "mode",
    "asyncio",
    # dedup's Faust services log a message when they start or stop, under the name of their module.
    "dedup.worker.app",
    "dedup.worker.transport",
)
"""Loggers that always have the level WARNING, because aiokafka prints record values at the debug level."""
REPEATED_EVERY_S: Final = 60.0
"""The interval, in seconds, at which a continuing failure is logged again."""
_ATTEMPTS: Final = ("Unable ", "Group Coordinator Request failed")
"""The first words of the messages that aiokafka logs at each failed attempt."""
OVER_AFTER_S: Final = 5.0
"""A client retries several times a second, so a failure that has not occurred for this long is over."""


class JsonFormatter(logging.Formatter):
    """Formats an event as a JSON object with time (UTC), level, logger, worker, message, task, topic, and partition."""

    def __init__(self, worker_id: str | None = None) -> None:
        super().__init__()
        self._of_worker: Final = {} if worker_id is None else {"worker": worker_id}

    def format(self, record: logging.LogRecord) -> str:
        """Return the event as one line of JSON."""
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._of_worker,
            **dict(_about(record)),
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


def _about(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    """Yield the first task, topic, and partition among the arguments of a log message."""
    for argument in record.args if isinstance(record.args, tuple) else ():
        match argument:
            case TaskId(sub_topology, feeding):
                yield "task", sub_topology
                yield from (("topic", feeding.topic), ("partition", feeding.partition))
                return
            case TopicPartition(topic, partition):
                yield from (("topic", topic), ("partition", partition))
                return
            case _:
                pass


@dataclass(slots=True)
class _Outage:
    """A continuing failure, with the times, in seconds, of its log records."""

    said_s: float
    last_s: float
    unsaid: int = 0
    """How often the failure has occurred since it was last logged."""


class Outages(logging.Filter):
    """Limits aiokafka's messages about the same failure to one per minute, and logs when the failure is over.

    Without this filter, aiokafka logs each failed attempt to reach a node, about 20 per second, but never a success.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outages: Final[dict[str, _Outage]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False to suppress a record if the same failure was logged within the last minute."""
        if not (record.name.startswith("aiokafka") and record.msg.startswith(_ATTEMPTS)):
            return True
        failure = _failure(record)
        outage = self._outages.get(failure)
        if outage is None:
            self._outages[failure] = _Outage(record.created, record.created)
            self._look_later(failure)
            return True
        outage.last_s = record.created
        if record.created - outage.said_s < REPEATED_EVERY_S:
            outage.unsaid += 1
            return False
        record.msg += f" ({outage.unsaid} more times in the last {record.created - outage.said_s:.0f} s)"
        outage.said_s, outage.unsaid = record.created, 0
        return True

    def look(self, failure: str, now_s: float) -> None:
        """Log that a failure is over if it has not occurred for `OVER_AFTER_S`."""
        outage = self._outages[failure]
        if now_s - outage.last_s < OVER_AFTER_S:
            self._look_later(failure)
            return
        del self._outages[failure]
        log.warning("over: %s; it occurred %d more times", failure, outage.unsaid)

    def _look_later(self, failure: str) -> None:
        asyncio.get_running_loop().call_later(OVER_AFTER_S, lambda: self.look(failure, time.time()))


def _failure(record: logging.LogRecord) -> str:
    """Return the part of a message that identifies the failure, without the error text and the list of nodes."""
    return record.getMessage().partition(": ")[0].partition(" from [")[0]


def set_up_logging(settings: Settings) -> None:
    """Send logs to standard error in the configured format and at the configured level."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log.format == "json":
        handler.setFormatter(JsonFormatter(settings.worker_id))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelName(settings.log.level.upper())
    root.setLevel(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    handler.addFilter(Outages())
