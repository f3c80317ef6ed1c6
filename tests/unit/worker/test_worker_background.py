"""What runs beside the tasks ends with the worker, also where a client has swallowed its cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from dedup.errors import BrokerUnavailable
from dedup.worker import task_manager, worker
from dedup.worker.worker import Maintenance


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_cancellation_is_repeated(monkeypatch, lost):
    monkeypatch.setattr(task_manager, "CANCEL_AGAIN_S", 0.001)
    cancelled = 0

    async def run(_self: Maintenance) -> None:
        nonlocal cancelled
        while True:
            # As `AIOKafkaClient.close` does, where its own task is what it waits for.
            with contextlib.suppress(*[asyncio.CancelledError] if cancelled < lost else []):
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    cancelled += 1
                    if cancelled > lost:
                        raise

    monkeypatch.setattr(Maintenance, "run", run)
    failed: list[BaseException] = []
    wire = SimpleNamespace(until_refused=asyncio.Event().wait)
    app: Any = SimpleNamespace(tasks=SimpleNamespace(fail=failed.append), wire=wire)
    topology: Any = SimpleNamespace(direct=True)

    async def live() -> None:
        async with worker.background_loops(app, topology, None):  # type: ignore[arg-type]
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(live(), 10))
    assert (cancelled, failed) == (lost + 1, [])


async def test_a_worker_that_the_brokers_refuse_ends(monkeypatch):
    """Was: it waited for ever, alive to all who asked, after its password had been changed."""
    refused = BrokerUnavailable("the broker refuses the credentials")
    told: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def until_refused() -> None:
        raise refused

    monkeypatch.setattr(Maintenance, "run", lambda _: asyncio.Event().wait())
    wire = SimpleNamespace(until_refused=until_refused)
    app: Any = SimpleNamespace(tasks=SimpleNamespace(fail=told.set_result), wire=wire)
    async with worker.background_loops(app, SimpleNamespace(direct=True), None):  # type: ignore[arg-type]
        assert await told is refused
