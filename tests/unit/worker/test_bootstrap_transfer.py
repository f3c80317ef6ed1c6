"""A blocking transfer beside an event loop: what it returns or raises, and when it is given up."""

import threading

import pytest

from dedup.errors import CheckpointUnusable, TaskCorrupted
from dedup.worker.bootstrap import transfer


async def test_a_transfer_where_nothing_moves_is_given_up():
    go_on = threading.Event()
    with pytest.raises(CheckpointUnusable, match="here: nothing was moved"):
        await transfer(lambda _: go_on.wait(30), "here", stalled_s=0.05)
    go_on.set()


async def test_a_transfer_that_moves_may_take_its_time():
    """Longer than it may stand still."""
    never = threading.Event()

    def work(moved):
        for _ in range(120):
            moved(1)
            never.wait(0.01)
        return "done"

    assert await transfer(work, "here", stalled_s=0.5) == "done"


async def test_a_transfer_raises_what_its_work_raises():
    def work(_moved):
        raise TaskCorrupted("this")

    with pytest.raises(TaskCorrupted, match="this"):
        await transfer(work, "here")
