"""A standby that was let go of touches no store, also where something has swallowed its cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from dedup.core.window import Window
from dedup.store.directory import Keeping
from dedup.worker.restore import Standbys


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
