"""A worker process with a planned accident: ``python child.py [name=number ...] -- ARGUMENTS OF dedup``.

Accidents reach into the production code from outside; nothing in it knows about tests.
"""

from __future__ import annotations

import gc

gc.set_threshold(100_000)  # as `dedup` does before it imports anything

import asyncio
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiokafka.consumer.group_coordinator import GroupCoordinator
from store_accidents import die_in_transfer, one_segment_flushed, store_damaged

from dedup import crashpoints
from dedup.cli.main import main as dedup
from dedup.kafka.client import KafkaWire
from dedup.kafka.connection import Connection
from dedup.kafka.wire import NoAnswer
from dedup.worker import faust_app, task
from dedup.worker.dedup_task import DedupTask
from dedup.worker.faust_app import DedupApp
from dedup.worker.reset import Reset
from dedup.worker.task import Task
from dedup.worker.task_group import TaskGroup
from dedup.worker.task_manager import TaskManager

CAPABILITY_VERSION_3 = 0x20080522
OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


class AgentFailedOnPurpose(Exception):
    """What a planned accident raises inside an agent."""


def agent_fails_before(number: int) -> None:
    """The n-th batch that reaches the agent raises before it is judged."""
    process = Task.process
    seen = 0

    async def failing(self: Task, batch: Any) -> float:
        nonlocal seen
        seen += 1
        if seen == number:
            raise AgentFailedOnPurpose(f"batch {number}")
        return await process(self, batch)

    Task.process = failing  # type: ignore[method-assign]


def agent_fails_inside(number: int) -> None:
    """The n-th batch raises in its middle: sightings are in the overlay, nothing of it was sent."""
    judge = DedupTask.judge
    seen = 0

    def failing(self: DedupTask, batch: Any, refusals: Any) -> Any:
        nonlocal seen
        seen += 1
        judged = judge(self, batch, refusals)
        if seen == number:
            raise AgentFailedOnPurpose(f"batch {number}")
        return judged

    DedupTask.judge = failing  # type: ignore[method-assign]


def agent_fails_after(number: int) -> None:
    """The n-th batch raises after its records went into the transaction."""
    process = Task.process
    seen = 0

    async def failing(self: Task, batch: Any) -> float:
        nonlocal seen
        seen += 1
        blocked_s = await process(self, batch)
        if seen == number:
            raise AgentFailedOnPurpose(f"batch {number}")
        return blocked_s

    Task.process = failing  # type: ignore[method-assign]


def agent_sends(number: int) -> None:
    """The n-th batch makes the agent use Faust's own ``topic.send()``."""
    started: list[DedupApp] = []
    on_start = DedupApp.on_start

    async def remember(self: DedupApp) -> None:
        started.append(self)
        await on_start(self)

    process = TaskManager.process
    seen = 0

    async def sending(self: TaskManager, batch: Any) -> float:
        nonlocal seen
        seen += 1
        blocked_s = await process(self, batch)
        if seen == number:
            await started[0].topic(os.environ["DEDUP_TEST_ESCAPE"]).send(key=b"k", value=b"escaped")
        return blocked_s

    DedupApp.on_start = remember  # type: ignore[method-assign, assignment]
    TaskManager.process = sending  # type: ignore[method-assign]


def slow_commit(delay_ms: int) -> None:
    """EndTxn is sent this much later, so that batches are judged while a commit is in flight."""
    end_transaction = KafkaWire.end_transaction

    async def slow(self: KafkaWire, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(delay_ms / 1000)
        return await end_transaction(self, *args, **kwargs)

    KafkaWire.end_transaction = slow  # type: ignore[method-assign]


def announced(_number: int) -> None:
    """The cluster is taken for one whose transactions are of version 1: partitions and groups are announced."""

    async def old(_wire: KafkaWire) -> int:
        return 1

    KafkaWire.transaction_version = old  # type: ignore[method-assign]


def freeze_in_commit(number: int) -> None:
    """SIGSTOP right before the n-th EndTxn is sent: it will be sent when the process is let go on."""
    end_transaction = KafkaWire.end_transaction
    seen = 0

    async def freezing(self: KafkaWire, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        return await end_transaction(self, *args, **kwargs)

    KafkaWire.end_transaction = freezing  # type: ignore[method-assign]


def die_judging_in_commit(number: int) -> None:
    """SIGKILL right after the n-th batch that was judged while a commit was in flight."""
    process = Task.process
    seen = 0

    async def deadly(self: Task, batch: Any) -> float:
        nonlocal seen
        in_flight = self.committing
        blocked_s = await process(self, batch)
        seen += in_flight
        if in_flight and seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return blocked_s

    Task.process = deadly  # type: ignore[method-assign]


def slow_restore(delay_ms: int) -> None:
    """Every read of a changelog takes this much longer."""
    fetch = KafkaWire.fetch

    async def slow(self: KafkaWire, *args: Any, **kwargs: Any) -> Any:
        sys.stderr.write("restoring slowly\n")
        sys.stderr.flush()
        await asyncio.sleep(delay_ms / 1000)
        return await fetch(self, *args, **kwargs)

    KafkaWire.fetch = slow  # type: ignore[method-assign]


def restore_held(fetches: int) -> None:
    """A read of a changelog brings one record batch, and after so many the next ones wait for SIGUSR1."""
    fetch = KafkaWire.fetch
    go_on = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: go_on.set())
    seen = 0

    async def held(self: KafkaWire, source: Any, offset: int, *, max_bytes: int, wait_ms: int) -> Any:
        nonlocal seen
        seen += 1
        while seen > fetches and not go_on.is_set():  # noqa: ASYNC110  # a signal sets it
            await asyncio.sleep(0.01)
        return await fetch(self, source, offset, max_bytes=max_bytes if go_on.is_set() else 1, wait_ms=wait_ms)

    KafkaWire.fetch = held  # type: ignore[method-assign]


def freeze_at_consumer(_number: int) -> None:
    """The worker stands still after all its checks, before the member of the group connects."""
    on_start = faust_app.Consumer.on_start

    async def frozen(self: faust_app.Consumer) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        await on_start(self)

    faust_app.Consumer.on_start = frozen  # type: ignore[method-assign]


def small_batches(records: int) -> None:
    """A batch has at most this many records."""
    faust_app.BATCH_RECORDS = records  # type: ignore[misc]


def patience(limit_ms: int) -> None:
    """A start waits this long for a broker."""
    connect_with(patience_ms=limit_ms)


def answers_within(limit_ms: int) -> None:
    """A request without an answer is given up after this time."""
    connect_with(request_timeout_ms=limit_ms)


def connect_with(**changes: Any) -> None:
    of = Connection.of
    Connection.of = lambda *args, **kwargs: replace(of(*args, **kwargs), **changes)  # type: ignore[method-assign]


def metadata_every(interval_ms: int) -> None:
    """Clients look at the cluster's topics this often."""
    client_options = Connection.client_options

    def quick(self: Connection) -> dict[str, Any]:
        return client_options(self) | {"metadata_max_age_ms": interval_ms}

    Connection.client_options = quick  # type: ignore[method-assign]


def membership_dies(number: int) -> None:
    """The group membership ends by itself when the n-th batch was judged, as on an error that aiokafka does not know."""
    process = Task.process
    started: list[GroupCoordinator] = []
    begin = GroupCoordinator.__init__
    seen = 0

    def remember(self: GroupCoordinator, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        started.append(self)

    async def dying(self: Task, batch: Any) -> float:
        nonlocal seen
        seen += 1
        blocked_s = await process(self, batch)
        if seen == number:
            started[0]._coordination_task.cancel()
        return blocked_s

    GroupCoordinator.__init__ = remember
    Task.process = dying  # type: ignore[method-assign]


def no_group_coordinator(_number: int) -> None:
    """No coordinator of the group answers."""

    async def silent(self: KafkaWire, group: str, source: Any, *, stable: bool) -> Any:
        raise NoAnswer("no coordinator")

    KafkaWire.committed_offset = silent  # type: ignore[method-assign]


def no_group_coordinator_once_refused(within_ms: int) -> None:
    """From the first refused record on, no coordinator of the group answers; judging again waits this long for it."""
    learn = TaskGroup._learn

    def learning(self: TaskGroup, refused: Any) -> None:
        no_group_coordinator(1)
        learn(self, refused)

    TaskGroup._learn = learning  # type: ignore[method-assign]
    task.DEADLINE_MS = within_ms  # type: ignore[misc]


def freeze_at_point(number: int) -> None:
    """SIGSTOP at a crash point: ``number`` is 100 * its place among the points + which passing of it."""
    point, passing = crashpoints.POINTS[number // 100], number % 100
    left = passing

    def freezing(reached: str) -> None:
        nonlocal left
        if reached == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGSTOP)

    crashpoints.reached = freezing


def end_arrives_late(number: int) -> None:
    """The n-th EndTxn gets no answer, and reaches the broker in the middle of the id's next transaction."""
    end_transaction = KafkaWire.end_transaction
    held: dict[str, Any] = {}
    seen = 0

    async def late(self: KafkaWire, transactional_id: str, identity: Any, *, commit: bool) -> Any:
        nonlocal seen
        seen += 1
        if seen == number:
            held[transactional_id] = identity
            raise NoAnswer("EndTxn is still on its way")
        if transactional_id in held:
            code, _ = await end_transaction(self, transactional_id, held.pop(transactional_id), commit=True)
            sys.stderr.write(f"the late EndTxn was answered {code}\n")
            sys.stderr.flush()
        return await end_transaction(self, transactional_id, identity, commit=commit)

    KafkaWire.end_transaction = late  # type: ignore[method-assign]


def clock_ahead(by_s: int) -> None:
    """The wall clock is wrong by so much from the start."""
    right = time.time
    time.time = lambda: right() + by_s


def clock_jumps(by_s: int) -> None:
    """The wall clock jumps with every batch: ahead, right, behind, right."""
    right = time.time
    process = Task.process
    seen = 0

    async def jumping(self: Task, batch: Any) -> float:
        nonlocal seen
        seen += 1
        return await process(self, batch)

    time.time = lambda: right() + by_s * (0, 1, 0, -1)[seen % 4]
    Task.process = jumping  # type: ignore[method-assign]


def clock_behind_until(mark: int) -> None:
    """The wall clock is two hours behind until the n-th batch was judged, and right from then on."""
    right = time.time
    process = Task.process
    seen = 0

    async def judging(self: Task, batch: Any) -> float:
        nonlocal seen
        blocked_s = await process(self, batch)
        seen += 1
        return blocked_s

    time.time = lambda: right() - (7_200 if seen < mark else 0)
    Task.process = judging  # type: ignore[method-assign]


def reset_dies(_number: int) -> None:
    """A reset is killed when the topics are deleted, and nothing is made anew yet."""

    async def deadly(self: Reset, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Reset._leave_mark = deadly  # type: ignore[method-assign]


def no_file_beyond(limit_bytes: int) -> None:
    """No file grows beyond so many bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))


def bound_by_permissions(_number: int) -> None:
    """Root may write only what its owner may: without the capabilities that override file permissions."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, sets) == 0
        for low in (0, 1):  # effective, permitted
            sets[low] &= ~OVERRIDES
        assert libc.capset(header, sets) == 0


ACCIDENTS: dict[str, Callable[[int], None]] = {
    accident.__name__: accident
    for accident in (
        agent_fails_before,
        agent_fails_inside,
        agent_fails_after,
        agent_sends,
        slow_commit,
        announced,
        freeze_in_commit,
        die_judging_in_commit,
        slow_restore,
        restore_held,
        freeze_at_consumer,
        small_batches,
        patience,
        answers_within,
        metadata_every,
        store_damaged,
        membership_dies,
        no_group_coordinator,
        no_group_coordinator_once_refused,
        freeze_at_point,
        end_arrives_late,
        clock_ahead,
        clock_jumps,
        clock_behind_until,
        reset_dies,
        no_file_beyond,
        bound_by_permissions,
        one_segment_flushed,
        die_in_transfer,
    )
}


def main(arguments: list[str]) -> None:
    """Arrange the accidents, then be the `dedup` command."""
    at = arguments.index("--")
    for accident in arguments[:at]:
        name, _, number = accident.partition("=")
        ACCIDENTS[name](int(number))
    sys.argv = ["dedup", *arguments[at + 1 :]]
    dedup()


if __name__ == "__main__":
    main(sys.argv[1:])
