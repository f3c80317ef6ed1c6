"""What runs beside the tasks of a worker: its pages, the look for idle feeds, upkeep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Self

from dedup.worker.answers import WorkerAnswers
from dedup.worker.clock import Clock, SteadyClock
from dedup.worker.idle import IdleFeeds
from dedup.worker.upkeep import Upkeep

if TYPE_CHECKING:
    from dedup.topology.model import Topology
    from dedup.worker.app import DedupApp

MakePages = Callable[[WorkerAnswers], AbstractAsyncContextManager[object]]
LONGEST_LOOK_S: Final = 1.0


class Beside:
    """Runs while the block does; what goes wrong in it stops the worker."""

    def __init__(self, app: DedupApp, topology: Topology, make_pages: MakePages | None) -> None:
        self._app: Final = app
        self._topology: Final = topology
        self._make_pages: Final = make_pages
        self._clock: Final[Clock] = SteadyClock()
        self._answers: Final = WorkerAnswers(app, topology)
        self._stack: Final = AsyncExitStack()
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """The pages are up and the loops run."""
        if self._make_pages is not None:
            await self._stack.enter_async_context(self._make_pages(self._answers))
        self._start(Upkeep(self._app, self._topology, self._clock).run(), "upkeep")
        if not self._topology.direct:
            self._start(self._look_for_idle_feeds(), "idle feeds")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Everything is ended."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._stack.aclose()

    def _start(self, loop: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(loop, name=name)
        task.add_done_callback(self._ended)
        self._loops.append(task)

    def _ended(self, loop: asyncio.Task[None]) -> None:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            self._app.tasks.fail(error)

    async def _look_for_idle_feeds(self) -> None:
        idle_after_ms = self._topology.idle_after_ms
        feeds = IdleFeeds(idle_after_ms, self._answers.caught_up)
        while True:
            feeds.look(self._app.tasks.running, self._clock.now_ms())
            await asyncio.sleep(min(LONGEST_LOOK_S, idle_after_ms / 4000))
