"""A worker's logs, with one line or JSON object per event, on standard error and without record values.

A JSON object contains the task, topic, and partition of its message, which are taken from the message's arguments.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from dedup.kafka.wire import TopicPartition
from dedup.worker.task import TaskId

if TYPE_CHECKING:
    from dedup.settings import Settings

NOISY: Final = (
    "aiokafka",
    "faust",
    "mode",
    "asyncio",
    # Faust services of ours log their starts and stops under the name of their module.
    "dedup.worker.app",
    "dedup.worker.transport",
)
"""Loggers that always have the level WARNING, because aiokafka prints record values at the debug level."""


class JsonFormatter(logging.Formatter):
    """One JSON object per event, with time (UTC), level, logger, worker, message, and known task, topic, partition."""

    def __init__(self, worker_id: str | None = None) -> None:
        super().__init__()
        self._of_worker: Final = {} if worker_id is None else {"worker": worker_id}

    def format(self, record: logging.LogRecord) -> str:
        """Return the event as one line."""
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
    """Yield the task, topic, and partition of a message, which are the first ones among its arguments."""
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


def set_up_logging(settings: Settings) -> None:
    """Send logs to standard error in the configured format and level."""
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
