"""A blocking transfer in a thread of its own: given up when nothing moves, or when nobody waits for it any more.

Not in the loop's own pool of threads: names of brokers are looked up there, and a store that does not answer would hold
all of them. The threads are daemons: one that hangs does not keep a worker from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from dedup.errors import CheckpointUnusable
from dedup.store.archive import Moved

STALLED_S: Final = 60.0
T = TypeVar("T")


class _Movement:
    """What the thread has moved, and whether it should go on."""

    def __init__(self) -> None:
        self.count = 0
        self.given_up = False

    def moved(self, size_bytes: int) -> None:
        """Note that bytes were moved; raises CheckpointUnusable where nobody waits for more."""
        self.count += size_bytes
        if self.given_up:
            raise CheckpointUnusable("the transfer was given up.")


async def transfer(work: Callable[[Moved], T], what: str, *, stalled_s: float = STALLED_S) -> T:
    """Return what ``work`` returns, which calls what it is given now and then with the bytes it moved.

    Raises what it raises, and CheckpointUnusable where nothing moves for ``stalled_s``.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    movement = _Movement()

    def run() -> None:
        tell: Callable[[], None]
        try:
            tell = partial(done.set_result, work(movement.moved))
        except BaseException as error:  # noqa: BLE001  # raised where the transfer is awaited
            tell = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(lambda: None if done.done() else tell())

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    try:
        while not done.done():
            before = movement.count
            await asyncio.wait({done}, timeout=stalled_s)
            if not done.done() and movement.count == before:
                raise CheckpointUnusable(f"{what}: nothing was moved for {stalled_s:.0f} s.")
        return done.result()
    finally:
        movement.given_up = True
        done.cancel()
