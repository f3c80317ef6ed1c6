"""What runs beside the tasks of a worker: its pages, the look for idle feeds, upkeep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from yarl import URL

from dedup.worker.answers import WorkerAnswers
from dedup.worker.clock import Clock, SteadyClock
from dedup.worker.idle import IdleFeeds
from dedup.worker.peers import identity
from dedup.worker.upkeep import Upkeep

if TYPE_CHECKING:
    from dedup.topology.model import Topology
    from dedup.worker.app import DedupApp


class Pages(Protocol):
    """What a worker must know of its pages."""

    @property
    def advertised(self) -> str | None:
        """Where others find them; None where they are not served."""


MakePages = Callable[[WorkerAnswers], AbstractAsyncContextManager[Pages]]
LONGEST_LOOK_S: Final = 1.0
CANCEL_AGAIN_S: Final = 0.5


@asynccontextmanager
async def served(app: DedupApp, answers: WorkerAnswers, make_pages: MakePages | None) -> AsyncIterator[None]:
    """The pages are up, and every member of the group will be told where; enter it before the group is joined."""
    if make_pages is None:
        yield
        return
    async with make_pages(answers) as pages:
        app.conf.canonical_url = URL(identity(app.settings.worker_id, pages.advertised))
        yield


class Beside:
    """Runs while the block does; what goes wrong in it stops the worker."""

    def __init__(self, app: DedupApp, topology: Topology, answers: WorkerAnswers) -> None:
        self._app: Final = app
        self._topology: Final = topology
        self._clock: Final[Clock] = SteadyClock()
        self._answers: Final = answers
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """The loops run."""
        self._start(Upkeep(self._app, self._topology, self._clock).run(), "upkeep")
        if not self._topology.direct:
            self._start(self._look_for_idle_feeds(), "idle feeds")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Everything is ended."""
        left = set(self._loops)
        while left:
            # Again, if need be: one that comes while a client of aiokafka closes is lost (it awaits a task that it has
            # cancelled itself, and takes ours for that task's), and the loop would go on for ever.
            for loop in left:
                loop.cancel()
            left = (await asyncio.wait(left, timeout=CANCEL_AGAIN_S))[1]

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
