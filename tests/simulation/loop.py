"""An event loop without time and without I/O: it runs what is ready, in order, until nothing is.

Coroutines, tasks, events and locks are asyncio's own; only what they would wait for is decided by the simulator.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any

MOST_STEPS = 100_000


class Ready:
    """A callback to be run: asyncio's `Handle`, as far as anybody looks at one that is no timer."""

    __slots__ = ("_args", "_callback", "_context", "_gone", "_loop")

    def __init__(self, callback: Any, args: tuple[Any, ...], loop: SimLoop, context: Context) -> None:
        self._callback, self._args, self._loop, self._context = callback, args, loop, context
        self._gone = False

    def cancel(self) -> None:
        self._gone = True

    def cancelled(self) -> bool:
        return self._gone

    def _run(self) -> None:
        if self._gone:
            return
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  # told and gone on, as asyncio's does
            self._loop.call_exception_handler({"message": f"in {self._callback!r}", "exception": error})


class Running:
    """Which loop asyncio takes for the running one; each change costs a system call, so none is made in vain."""

    loop: SimLoop | None = None

    @classmethod
    def change_to(cls, loop: SimLoop | None) -> None:
        if cls.loop is not loop:
            cls.loop = loop
            asyncio._set_running_loop(loop)


class SimLoop(asyncio.AbstractEventLoop):
    """The loop of one simulated process; a killed one runs nothing any more."""

    def __init__(self, park_timer: Callable[[asyncio.TimerHandle], None]) -> None:
        self.dead = False
        self.complaints: list[str] = []
        """What asyncio would have logged: exceptions nobody looked at."""
        self._park_timer = park_timer
        self.ready: deque[Ready | asyncio.TimerHandle] = deque()
        self._tasks: list[asyncio.Task[Any]] = []

    def run_until_idle(self) -> None:
        """Run everything that is ready; AssertionError for a loop that never rests."""
        ready = self.ready
        Running.change_to(self)
        steps = 0
        while ready and not self.dead:
            ready.popleft()._run()
            steps += 1
            assert steps < MOST_STEPS, "a process does not come to rest"

    def within(self, start: Callable[[], None]) -> None:
        """Call something that needs a running loop."""
        Running.change_to(self)
        start()

    def kill(self) -> None:
        """Forget all coroutines. Whatever their clean-up does, it can reach neither log nor disk any more."""
        self.dead = True
        self.ready.clear()
        self.within(self._close_coroutines)
        self.ready.clear()

    def _close_coroutines(self) -> None:
        for task in self._tasks:
            if not task.done():
                coroutine = task.get_coro()
                assert coroutine is not None
                with suppress(RuntimeError):  # its clean-up wanted to await something; a killed process does not
                    coroutine.close()

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> Ready:
        ready = Ready(callback, args, self, copy_context() if context is None else context)
        if not self.dead:
            self.ready.append(ready)
        return ready

    def call_later(  # type: ignore[override]  # typeshed ties arguments to the callback
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(delay, callback, args, self, context)
        self._park_timer(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(when, callback, *args, context=context)

    def due(self, handle: asyncio.TimerHandle) -> None:
        """The time of a timer has come."""
        if not self.dead and not handle.cancelled():
            self.ready.append(handle)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio tells that a timer was cancelled; `cancelled` says so too."""

    def time(self) -> float:
        return 0.0

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}")
