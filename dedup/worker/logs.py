"""Logs of a worker: a line or a JSON object an event, on standard error; record values never appear."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dedup.settings import Settings

NOISY: Final = (
    "aiokafka",
    "faust",
    "mode",
    "asyncio",
    # Services of ours log their starts and stops under the module they stand in.
    "dedup.worker.app",
    "dedup.worker.table",
    "dedup.worker.transport",
)
"""Libraries whose info is our debug; aiokafka's debug level prints record values and is never turned on."""


class JsonFormatter(logging.Formatter):
    """One JSON object an event."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the event as one line."""
        event = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


def set_up_logging(settings: Settings) -> None:
    """Send logs to standard error in the configured format and level."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log.format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelName(settings.log.level.upper())
    root.setLevel(level)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
