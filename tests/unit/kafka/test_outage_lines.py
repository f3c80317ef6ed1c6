"""A broker that is away is one line when it goes, one a minute, and one when it is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError

from dedup.kafka import outage_lines
from dedup.kafka.outage_lines import (
    ASIDE,
    AWAY,
    BACK,
    OVER_AFTER_S,
    REPEATED_EVERY_S,
    Gathered,
    OutageFilter,
    OutageLines,
    quiet_logging,
)

CLIENT = "aiokafka"
SINK = "dedup.connect.fenced_consumer"
REFUSED = "Unable connect to node with id 1: [Errno 111] refused"
AWAY_LINE = f"a broker does not answer, dedup tries again: {REFUSED}"


@pytest.fixture
def kept() -> Iterator[None]:
    """Logging is afterwards as it was before."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_five_minutes_away_are_six_lines():
    lines = OutageLines()
    said = [line for tick in range(20 * 300) if (line := lines.failed(CLIENT, REFUSED, tick / 20)) is not None]
    last_s = 300 - 1 / 20
    assert lines.look(last_s + OVER_AFTER_S - 0.1) is None
    back = lines.look(last_s + OVER_AFTER_S)
    assert said == [
        AWAY_LINE,
        *(
            f"a broker has not answered for {60 * minute} s, {20 * REPEATED_EVERY_S:,.0f} more failures: {REFUSED}"
            for minute in range(1, 5)
        ),
    ]
    assert back == "the broker answers again, after 300 s and 1,199 more failures"
    assert lines.look(last_s + 100) is None
    assert lines.failed(CLIENT, REFUSED, last_s + 101) == AWAY_LINE


def test_a_silent_broker_that_is_tried_every_ten_seconds_is_one_outage():
    lines = OutageLines()
    said = [lines.failed(CLIENT, REFUSED, at_s) or lines.look(at_s + 9.9) for at_s in range(0, 60, 10)]
    assert said == [AWAY_LINE, *[None] * 5]


def test_an_outage_whose_end_nobody_looked_for_is_not_taken_for_a_later_one():
    """Was: after a client whose event loop had ended, the next outage was said to last since then."""
    lines = OutageLines()
    assert lines.failed(CLIENT, REFUSED, 0.0) == AWAY_LINE
    assert lines.failed(CLIENT, REFUSED, 3_600.0) == AWAY_LINE


def test_the_first_failure_of_each_logger_is_a_line_and_each_minute_has_the_latest_of_each():
    lines = OutageLines()
    assert lines.failed(CLIENT, REFUSED, 0.0) == AWAY_LINE
    assert lines.failed(SINK, "t: no broker has described the topics", 20.0) == "t: no broker has described the topics"
    assert lines.failed(SINK, "t: still none", 40.0) is None
    assert lines.failed(CLIENT, REFUSED, 60.0) == (
        f"a broker has not answered for 60 s, 2 more failures: {REFUSED}; t: still none"
    )


def test_a_straggler_of_an_outage_that_is_over_is_no_outage():
    lines = OutageLines()
    lines.failed(CLIENT, REFUSED, 0.0)
    lines.over(5.0)
    assert lines.failed(CLIENT, REFUSED, 5.1) is None
    assert lines.look(100.0) is None
    assert lines.failed(SINK, "t: no answer", 5.2) == "t: no answer"
    lines.over(6.0)
    assert lines.failed(CLIENT, REFUSED, 6.0 + OVER_AFTER_S) == AWAY_LINE


def record(text: str, *arguments: object, name: str = CLIENT, **extra: str) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.ERROR, "f.py", 1, text, arguments, None)
    made.created = 1_000.0
    vars(made).update(extra)
    return made


@pytest.mark.parametrize("verbose", [False, True])
def test_the_filter_takes_failures_of_the_client_and_marked_messages_and_nothing_else(verbose):
    async def passed() -> list[bool]:
        outages = OutageFilter(verbose=verbose)
        records = (
            record("Unable connect to node with id %s: %s", 1, "refused"),
            record("Unable to update metadata from %s", [1]),
            record("Marking the coordinator dead (node %s)for group %s.", 1, "g"),
            record("Heartbeat failed for group %s because it is rebalancing", "g"),
            record("Topic %s is not available", "t"),
            record("in/1: no answer. Only this partition waits", name="dedup.worker.task_manager"),
            record("old records were not deleted: %s", "no answer", name="dedup.worker.worker", **ASIDE),
            record("waiting: %s", "no answer", name=SINK, **AWAY),
            record("waiting: %s", "no answer", name=SINK, **AWAY),
            record("in/1: works again", name="dedup.worker.task_manager", **BACK),
        )
        return [outages.filter(each) for each in records]

    expected = [True, False, False, True, True, True, verbose, True, verbose, True]
    assert asyncio.run(passed()) == expected


def test_what_the_real_client_logs_of_a_broker_that_is_away_is_logged_once_by_every_command(kept, capsys):
    """Was: twenty lines a second, and outside of `dedup run` without time and level."""

    async def tried() -> None:
        client = AIOKafkaClient(bootstrap_servers="127.0.0.1:1")
        for _ in range(5):
            with contextlib.suppress(KafkaConnectionError):
                await client.bootstrap()
        await client.close()

    quiet_logging()
    asyncio.run(tried())
    (line,) = capsys.readouterr().err.splitlines()
    assert ' WARNING a broker does not answer, dedup tries again: Unable connect to "127.0.0.1:1"' in line


def test_what_comes_within_a_second_is_gathered(monkeypatch):
    assert outage_lines._GATHERED_FOR_S == 1.0
    monkeypatch.setattr(outage_lines, "_GATHERED_FOR_S", 0.1)

    async def gathered() -> list[dict[str, int]]:
        said: list[dict[str, int]] = []
        over = asyncio.Event()

        def say(found):
            said.append(dict(found))
            over.set()

        lines = Gathered(say)
        for key, value in (("a", 1), ("b", 2)):
            lines.add(key, value)
        await over.wait()
        over.clear()
        lines.add("c", 3)
        await over.wait()
        return said

    assert asyncio.run(gathered()) == [{"a": 1, "b": 2}, {"c": 3}]
