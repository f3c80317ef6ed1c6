"""What runs beside the tasks ends with the worker, also where a client has swallowed its cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

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
    app: Any = SimpleNamespace(tasks=SimpleNamespace(fail=failed.append))
    topology: Any = SimpleNamespace(direct=True)

    async def live() -> None:
        async with worker.background_loops(app, topology, None):  # type: ignore[arg-type]
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(live(), 10))
    assert (cancelled, failed) == (lost + 1, [])
