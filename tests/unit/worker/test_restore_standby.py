"""A standby that was let go of touches no store, also where something has swallowed its cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka.errors import CorruptRecordException

from dedup.core.window import Window
from dedup.errors import StateIncompatible
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import FetchedRecord, LogBounds, TopicPartition
from dedup.settings import Settings
from dedup.store.base import MemoryStore
from dedup.store.changelog import (
    TASK_RECORD_KEY,
    TaskRecord,
    collect,
    encode_single_column,
    encode_task_record,
    sighting_key,
)
from dedup.store.directory import Keeping, StorePool
from dedup.store.rocks import RocksMemory
from dedup.topology.parse import parse
from dedup.worker.restore import Standbys, apply_changelog
from dedup.worker.task import SteadyClock
from dedup.worker.task_factory import TaskFactory
from dedup.worker.topics import Cluster
from tests.simulation.cluster import fetched


async def test_a_standby_let_go_of_while_it_prepares_opens_no_store():
    preparing, opened = asyncio.Event(), []

    async def prepare() -> None:
        # As `AIOKafkaClient.close` does, where its own task is what it waits for.
        with contextlib.suppress(asyncio.CancelledError):
            preparing.set()
            await asyncio.sleep(3600)

    nothing: Any = None
    keeping = Keeping(lambda: opened.append(0), prepare)  # type: ignore[arg-type, func-returns-value]
    standbys = Standbys(nothing, "t.changelog", Window(60_000, 60_000), b"", lambda _: keeping)
    standbys.assign([0])
    (loop,) = (task for task in asyncio.all_tasks() if task.get_name() == "standby 0")
    await preparing.wait()
    standbys.assign(())
    await asyncio.wait([loop])
    assert (opened, loop.exception()) == ([], None)


@pytest.mark.parametrize("error", [CorruptRecordException("a batch has a wrong checksum"), StateIncompatible("gone")])
async def test_a_standby_that_fails_says_so_and_has_no_lag(caplog, error):
    """Was: an error that is not dedup's own ended the loop without a line, and the lag stayed as it was."""

    class Failing:
        asked = 0

        async def bounds(self, _):
            return LogBounds(0, 100)

        async def pause(self, _delay_ms):
            await asyncio.sleep(0)

        async def fetch(self, _source, offset, *, max_bytes, wait_ms):
            self.asked += 1
            if self.asked == 3:
                raise error
            return fetched([], offset + 1, offset + 2, offset + 2)

    wire: Any = Failing()
    standbys = Standbys(wire, "t.changelog", Window(10, 10), b"f" * 16, lambda _: Keeping(MemoryStore))
    standbys.assign([0])
    (loop,) = (task for task in asyncio.all_tasks() if task.get_name() == "standby 0")
    with caplog.at_level(logging.WARNING):
        await asyncio.wait([loop])
    assert loop.exception() is None
    assert standbys.lag == {}
    (line,) = caplog.records
    assert "standby of t.changelog/0 stopped" in line.getMessage()
    standbys.assign([0])
    for _ in range(9):
        await asyncio.sleep(0)
    assert wire.asked > 3, "the next assignment follows the changelog again"
    standbys.assign(())


@pytest.mark.parametrize(("before", "now"), [(Window(24, 24), Window(12, 12)), (Window(12, 12), Window(24, 24))])
async def test_a_standby_that_has_read_no_task_record_begins_anew_with_another_guard_period(before, now):
    """Was: it continued among segments of the old width, so its store lost sightings when it was promoted.

    Compaction keeps only the last task record, so a standby may stop before it has read one.
    """
    (value,) = encode_single_column([20], 0, 0, [1])
    task_record = TaskRecord(b"f" * 16, 25, (), 9, before.segment_ms, 0)
    lines = [(sighting_key(before.segment_of(20), b"x"), value), (TASK_RECORD_KEY, encode_task_record(task_record))]

    class Changelog:
        def __init__(self):
            self.all_read = asyncio.Event()

        async def bounds(self, _):
            return LogBounds(0, len(lines))

        async def pause(self, _delay_ms):
            self.all_read.set()
            await asyncio.sleep(0)

        async def fetch(self, _source, offset, *, max_bytes, wait_ms):
            records = [FetchedRecord(at, 0, *lines[at]) for at in range(offset, min(offset + 1, len(lines)))]
            return fetched(records, offset + len(records), len(lines), len(lines))

    begun = MemoryStore()
    apply_changelog(begun, before, collect(*zip(*lines[:1], strict=True)), 1)
    for store in (begun, MemoryStore()):
        wire: Any = Changelog()
        keeping = Keeping(lambda store=store: store)
        standbys = Standbys(wire, "t.changelog", now, b"f" * 16, lambda _, keeping=keeping: keeping)
        standbys.assign([0])
        await wire.all_read.wait()
        assert list(store.sightings()) == [(now.segment_of(20), b"x", value)]
        standbys.assign(())


class Steady:
    """A wire to a changelog that holds nothing but markers."""

    async def bounds(self, _: object) -> LogBounds:
        return LogBounds(0, 3)

    async def pause(self, _delay_ms: int) -> None:
        await asyncio.sleep(0)

    async def fetch(self, _source: object, offset: int, *, max_bytes: int, wait_ms: int) -> Any:
        return fetched([], min(offset + 1, 3), 3, 3)


TEXT = """
dedup: 1
name: t
source: {topics: [in], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 1h
output: {topic: out}
"""


async def test_a_standby_with_a_damaged_store_restores_it_from_the_changelog(tmp_path, caplog):
    """Was: the log said that the directory would be deleted, but nothing deleted it, so no restart helped."""
    topology = parse(TEXT, name="t.yaml")
    cluster = Cluster({name: Topic(name, "id", 1) for name in ("t.changelog", "in")})
    settings = Settings(brokers=("127.0.0.1:1",), state_dir=tmp_path)
    wire: Any = Steady()
    factory = TaskFactory(topology, settings, cluster, wire, SteadyClock(), RocksMemory(), StorePool())
    standbys = Standbys(wire, "t.changelog", topology.window, factory.fingerprint(), factory.keeping)
    directory = tmp_path / "t" / "0"
    for times in (1, 2):
        directory.mkdir(parents=True)
        (directory / "000007.sst").write_bytes(b"without CURRENT")
        standbys.assign([0])
        if times == 2:
            # A disk that damages a store again may do so every time.
            await reached(lambda: "damaged again" in caplog.text)
            assert (standbys.lag, directory.exists()) == ({}, False)
            standbys.assign([0])
        await reached(lambda: standbys.lag == {0: 0})
        assert ("the file CURRENT is missing" in caplog.text, standbys.corrupted) == (True, times)
        standbys.assign(())
        factory.wipe(TopicPartition("in", 0))


async def reached(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it does not come to that")
