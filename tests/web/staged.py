"""A worker's answers set by hand, served by the real pages in a thread of their own: the browser has this one."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dedup.errors import Problem, SettingsError, StateIncompatible
from dedup.metrics import DeadLetterAlert, TaskNumbers, TaskSeen, WorkerSeen
from dedup.settings import Web
from dedup.web.last_hour import Memory
from dedup.web.server import WebServer
from dedup.worker_view import LookedUp, Noted, Peer, SeenId, ShownRecord, TaskPulse

NOW_MS = 1_700_000_000_000


def running(partition: int = 0, **verdicts: int) -> TaskSeen:
    numbers = TaskNumbers(verdicts=Counter(verdicts))
    seen = TaskSeen("dedup", "orders", partition, "running", numbers, 7, 0, 1_234, 5_000_000)
    return replace(seen, state_max_bytes=20_000_000)


def restoring(partition: int = 1, *, total: int = 1_000, remaining: int = 250) -> TaskSeen:
    numbers = TaskNumbers(restore_total=total, restore_remaining=remaining)
    return TaskSeen("dedup", "orders", partition, "restoring", numbers, None, None)


@dataclass
class Staged:
    """What `WebServer` asks; a test sets the fields."""

    tasks: tuple[TaskSeen, ...] = (running(unique=90, duplicate=10), restoring())
    noted: tuple[Noted, ...] = ()
    others: tuple[Peer, ...] = ()
    standby_lag: dict[int, int] = field(default_factory=lambda: {2: 0})
    sightings: dict[str, SeenId] = field(default_factory=dict)
    why: str | None = None
    payload: bytes = b'{"id": "a"}'
    partitions: int = 3
    topology: str = "orders"
    name: str = "a"
    grows: int = 0
    """Unique records that each task judges between two looks at its numbers."""
    alert: DeadLetterAlert | None = None
    user_code: dict[str, str] = field(default_factory=dict)
    memory: Memory | None = None
    """What the worker remembers of the last hour, if it has not just started."""

    def not_ready(self) -> str | None:
        return self.why

    def seen(self) -> WorkerSeen:
        own = WorkerSeen(self.topology, self.name, self.tasks, self.standby_lag, 0, 0, self.why)
        return replace(own, alert=self.alert, user_code=self.user_code)

    def metrics(self) -> bytes:
        return b""

    def look_up(self, text: str) -> LookedUp:
        if text == "odd":
            raise SettingsError([Problem("ID", "'odd' cannot be an ID of 'orders'")])
        found = (self.sightings[text],) if text in self.sightings else ()
        asked = tuple(task.partition for task in self.tasks if task.state == "running")
        every = tuple(range(self.partitions))
        return LookedUp("orders", self.name, text, found, asked, self.partitions, None, every, ("orders",))

    def pulse(self) -> list[TaskPulse]:
        for task in self.tasks:
            task.numbers.verdicts["unique"] += self.grows
        return [
            TaskPulse(task.numbers, task.lag_records, task.topic, task.partition, task.state) for task in self.tasks
        ]

    def latest(self) -> tuple[Noted, ...]:
        return self.noted

    def peers(self) -> tuple[Peer, ...]:
        return self.others

    async def record(self, topic: str, partition: int, offset: int) -> ShownRecord | None:
        if topic != "orders":
            raise StateIncompatible(f"{topic!r} is not a source topic of 'orders'.")
        return ShownRecord.of(f"{topic}/{partition}/{offset}", NOW_MS, b"k", self.payload)


@contextmanager
def serving(worker: Staged, **settings: Any) -> Iterator[str]:
    """The pages of a worker are up; yields their URL."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()
    url: list[str] = []

    async def serve() -> None:
        pages = WebServer(Web(**({"port": 0} | settings)), worker)
        if worker.memory is not None:
            pages._memory = worker.memory
        async with pages:
            assert pages.url is not None
            url.append(pages.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="pages")
    thread.start()
    try:
        assert ready.wait(10)
        yield url[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
