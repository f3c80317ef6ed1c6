"""Writes a worker's log messages to standard error, each as one line of text or JSON.

A JSON line also contains the first task, topic, and partition among the message's arguments. Logs never contain record
values.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from dedup.kafka.outage_lines import send_to_stderr, text_format
from dedup.kafka.wire import TopicPartition
from dedup.settings import Settings
from dedup.worker.task import TaskId

NOISY: Final = (
    "aiokafka",
    "faust",
    "mode",
    "asyncio",
    # When dedup's Faust services start or stop, they log a message under the name of their module.
    "dedup.worker.faust_app",
)
"""The loggers whose level is never below WARNING, because aiokafka logs record values at the DEBUG level."""


class JsonFormatter(logging.Formatter):
    """Formats a log record as a JSON object with time (UTC), level, logger, worker, message, task, topic, and
    partition.
    """

    def __init__(self, worker_id: str | None = None) -> None:
        super().__init__()
        self._of_worker: Final = {} if worker_id is None else {"worker": worker_id}

    def format(self, record: logging.LogRecord) -> str:
        """Return the log record as one line of JSON."""
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


def set_up_logging(settings: Settings) -> None:
    """Send logs to standard error in the configured format and at the configured level."""
    level = logging.getLevelName(settings.log.level.upper())
    send_to_stderr(JsonFormatter(settings.worker_id) if settings.log.format == "json" else text_format(), level)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
