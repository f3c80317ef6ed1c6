"""A log event in JSON says which task and partition it is about, and never a record's value."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from dedup.kafka.wire import TopicPartition
from dedup.settings import LogSettings, Settings
from dedup.worker.logs import NOISY, JsonFormatter, set_up_logging
from dedup.worker.task import TaskId

HERE = TopicPartition("orders", 3)


def event(text: str, *arguments: object, worker_id: str | None = "w1", **more: object) -> dict[str, object]:
    record = logging.LogRecord(
        "dedup.worker.task_manager", logging.WARNING, "f.py", 1, text, arguments, more.get("exc_info")
    )
    record.created = 1_700_000_000.25
    line = JsonFormatter(worker_id).format(record)
    assert "\n" not in line
    return json.loads(line)


def test_an_event_about_a_task_names_task_topic_and_partition():
    found = event("%s: running from offset %d", TaskId("dedup", HERE), 17)
    assert found == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "warning",
        "logger": "dedup.worker.task_manager",
        "worker": "w1",
        "task": "dedup",
        "topic": "orders",
        "partition": 3,
        "message": "dedup orders/3: running from offset 17",
    }
    assert datetime.fromisoformat(str(found["time"])).utcoffset() == timedelta(0)


def test_an_event_about_a_partition_names_topic_and_partition():
    found = event("standby of %s stopped: %s", HERE, "no answer", worker_id=None)
    assert (found["topic"], found["partition"], found["message"]) == (
        "orders",
        3,
        "standby of orders/3 stopped: no answer",
    )
    assert not {"task", "worker"} & set(found)


@pytest.mark.parametrize("arguments", [(), ({"topic": "x"},)], ids=["none", "a mapping"])
def test_an_event_about_nothing_in_particular_names_none(arguments):
    found = event("web: up", *arguments)
    assert not {"task", "topic", "partition"} & set(found)


def test_a_failure_is_one_line_with_its_traceback():
    try:
        raise ValueError("of\nseveral lines")
    except ValueError as error:
        found = event("it failed", exc_info=(type(error), error, error.__traceback__))
    assert str(found["exception"]).startswith("Traceback")
    assert str(found["exception"]).endswith("several lines")


@pytest.fixture
def kept() -> Iterator[None]:
    """Logging is afterwards as it was before."""
    loggers = [logging.getLogger(name) for name in (None, *NOISY)]
    levels, handlers = [each.level for each in loggers], list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_the_configured_worker_id_is_in_every_event_and_values_are_not_logged(kept, capsys):
    set_up_logging(Settings(brokers=("b:1",), worker_id="orders-1", log=LogSettings(format="json", level="debug")))
    logging.getLogger("dedup.worker.x").info("%s: done", HERE)
    logging.getLogger("aiokafka.producer").debug("value %s", "canary")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["worker"] == "orders-1"
