"""A worker's logs: one line or JSON object per event, on standard error; record values never appear.

A JSON object names the task, topic and partition that its message is about, taken from the message's arguments.
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
"""Logged from WARNING on, whatever the level: aiokafka's debug level prints record values."""


class JsonFormatter(logging.Formatter):
    """One JSON object per event: time (UTC), level, logger, worker, message; task, topic and partition where known."""

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
    """Yield the task, topic and partition that a message is about: the first one among its arguments."""
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
