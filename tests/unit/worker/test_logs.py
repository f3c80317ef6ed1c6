"""A log event in JSON says which task and partition it is about, and never a record's value."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError

from dedup.kafka.wire import TopicPartition
from dedup.settings import LogSettings, Settings
from dedup.worker.logs import NOISY, OVER_AFTER_S, REPEATED_EVERY_S, JsonFormatter, Outages, set_up_logging
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


def unreachable(node: int, at_s: float) -> logging.LogRecord:
    """Return what aiokafka logs of a failed attempt."""
    text = "Unable connect to node with id %s: %s"
    record = logging.LogRecord("aiokafka", logging.ERROR, "f.py", 1, text, (node, "[Errno 111] refused"), None)
    record.created = at_s
    return record


def test_a_broker_that_is_away_is_one_line_then_one_a_minute_and_one_when_it_is_back(caplog):
    async def outage() -> list[str]:
        outages, said = Outages(), []
        for tick in range(20 * 130):
            record = unreachable(1, tick / 20)
            if outages.filter(record):
                said.append(record.getMessage())
        last_s = 130 - 1 / 20
        for now_s in (last_s + OVER_AFTER_S / 2, last_s + OVER_AFTER_S):
            outages.look("Unable connect to node with id 1", now_s)
        assert outages.filter(unreachable(1, last_s + 100))
        return said

    away = "Unable connect to node with id 1: [Errno 111] refused"
    more = f"{away} ({20 * REPEATED_EVERY_S - 1:.0f} more times in the last {REPEATED_EVERY_S:.0f} s)"
    assert asyncio.run(outage()) == [away, more, more]
    assert caplog.messages == ["over: Unable connect to node with id 1; it occurred 199 more times"]


def test_each_node_and_each_failure_is_an_outage_of_its_own():
    metadata = logging.LogRecord(
        "aiokafka", logging.ERROR, "f.py", 1, "Unable to update metadata from %s", ([1, 2],), None
    )
    other_order = logging.LogRecord(
        "aiokafka", logging.ERROR, "f.py", 1, "Unable to update metadata from %s", ([2, 1],), None
    )
    warning = logging.LogRecord("aiokafka", logging.WARNING, "f.py", 1, "Topic %s is not available", ("t",), None)

    async def said() -> list[bool]:
        outages = Outages()
        records = (unreachable(1, 0.0), unreachable(2, 0.0), metadata, other_order, warning, warning)
        return [outages.filter(record) for record in records]

    assert asyncio.run(said()) == [True, True, True, False, True, True]


def test_what_the_real_client_logs_of_a_broker_that_is_away_is_logged_once(kept, capsys):
    """Was: twenty lines a second, since the filter was on a logger that aiokafka does not use."""

    async def tried() -> None:
        client = AIOKafkaClient(bootstrap_servers="127.0.0.1:1")
        for _ in range(5):
            with contextlib.suppress(KafkaConnectionError):
                await client.bootstrap()
        await client.close()

    set_up_logging(Settings(brokers=("b:1",)))
    asyncio.run(tried())
    assert capsys.readouterr().err.count('Unable connect to "127.0.0.1:1"') == 1
