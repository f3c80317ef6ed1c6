"""One attempt of a Spark task: a partition of a micro-batch, judged by the fleet's own task.

Theory of operation. The position of a partition travels with its state: every transaction holds the records it sends,
the sightings they leave, the task record that names the next offset, and the group's offset. So whatever Spark does
with attempts, each begins where the last committed transaction ended:

* A micro-batch run again after a crash: rows below the position are skipped, the rest is judged.
* A task that fails upstream looks to Python like a normal end of its input (measured: 10,000 of 40,000 rows were lost
  by a writer that marked epochs). Here a shorter input is a shorter prefix of the log, which is right to commit: the
  next attempt goes on behind it.
* An answer that is missing at a commit: a new epoch finds out, and what is left is judged again, as in a worker.
* A speculative copy, or an executor that lost its driver: InitProducerId fences the older attempt, which can not
  commit any more.
* Rows that begin *behind* the position: what is between must be transaction markers only; that is read from the log,
  else the attempt refuses, as records would be lost.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa

from dedup.errors import CommitUnknown, DedupError, StateIncompatible, TaskCorrupted, TaskMigrated
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.session.wire import NoAnswer, TopicPartition
from dedup.spark.feed_columns import feed_batches
from dedup.spark.shipped import ShippedSettings
from dedup.store.directory import own_state
from dedup.store.rocks import RocksMemory
from dedup.worker.clock import SteadyClock
from dedup.worker.starting import bounds_of
from dedup.worker.task import Task, TaskId
from dedup.worker.workshop import Workshop

if TYPE_CHECKING:
    from dedup.topology.model import Topology
    from dedup.worker.batch import FeedBatch
    from dedup.worker.plan import Cluster

GC_THRESHOLD: Final = 100_000
"""As in a worker: a batch makes tens of thousands of objects, none of them in a cycle."""
MOST_RENEWALS: Final = 3
"""Epochs in which one commit is tried again, before Spark is left to."""
_MARGIN: Final = 4
"""The broker ends a transaction at its time-out: it is committed when a quarter of that has passed."""
HOLE_BYTES: Final = 1 << 16
HOLE_WAIT_MS: Final = 100

REPORT: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("first_offset", pa.int64()),
        ("next_offset", pa.int64()),
        ("judged", pa.int64()),
        ("replayed", pa.int64()),
        ("unique", pa.int64()),
        ("duplicate", pa.int64()),
        ("late", pa.int64()),
        ("dead_letter", pa.int64()),
        ("exempt", pa.int64()),
        ("conflicts", pa.int64()),
        ("repartitioned", pa.int64()),
        ("restored", pa.int64()),
        ("stream_time_ms", pa.int64()),
        ("took_ms", pa.int64()),
        ("failure", pa.string()),
        ("failure_text", pa.string()),
    ]
)
"""What an attempt tells the driver, one row."""
REPORT_DDL: Final = (
    "topic string, partition int, first_offset long, next_offset long, judged long, replayed long, unique long, "
    "duplicate long, late long, dead_letter long, exempt long, conflicts long, repartitioned long, restored long, "
    "stream_time_ms long, took_ms long, failure string, failure_text string"
)


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """What every attempt needs to know; sent to the executors with the task."""

    topology: Topology
    settings: ShippedSettings
    cluster: Cluster
    commit_rows: int
    """A transaction is closed after so many rows: it may be open no longer than its time-out."""


@cache
def _clock() -> SteadyClock:
    return SteadyClock()


@cache
def _memory() -> RocksMemory:
    return RocksMemory()


def judge_partition(plan: AttemptPlan, arrow: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Judge and send the rows of one Spark partition; yield one row as `REPORT`, none where there was no row.

    An error that another attempt may cure is raised, so that Spark tries again; any other becomes part of the report,
    for the driver to raise as what it is.
    """
    gc.set_threshold(GC_THRESHOLD)
    batches = feed_batches(arrow)
    first = next(batches, None)
    if first is None:
        return
    began = time.monotonic()
    report = _empty_report(first)
    try:
        with asyncio.Runner() as runner:
            report |= runner.run(_judge(plan, first, batches))
    except TaskMigrated:
        raise
    except DedupError as error:
        if error.exit_code == _BROKER_TROUBLE:
            raise
        report |= {"failure": type(error).__name__, "failure_text": str(error)}
    report["took_ms"] = int((time.monotonic() - began) * 1000)
    yield pa.RecordBatch.from_pylist([report], schema=REPORT)


_BROKER_TROUBLE: Final = 5
"""BrokerUnavailable: the one action of ours that another attempt can take."""


def _empty_report(first: FeedBatch) -> dict[str, Any]:
    report: dict[str, Any] = dict.fromkeys(REPORT.names, 0)
    place = {"topic": first.feeding.topic, "partition": first.feeding.partition, "first_offset": first.offsets[0]}
    return report | place | {"next_offset": None, "failure": None, "failure_text": None}


async def _judge(plan: AttemptPlan, first: FeedBatch, batches: Iterator[FeedBatch]) -> dict[str, Any]:
    _refuse_growth(plan, first.feeding)
    settings = plan.settings.reveal()
    wire = KafkaWire(Connection.of(settings, client_id=f"dedup-{plan.topology.name}-spark"))
    await wire.start()
    try:
        with _own_directory(settings.state_dir, plan.topology.name, first.feeding) as state_dir:
            here = replace(settings, state_dir=state_dir)
            workshop = Workshop(plan.topology, here, plan.cluster, wire, _clock(), _memory())
            attempt = _Attempt(workshop, wire, first.feeding, plan)
            return await attempt.run(first, batches)
    finally:
        await wire.stop()


def _refuse_growth(plan: AttemptPlan, feeding: TopicPartition) -> None:
    """Raise StateIncompatible for a partition that did not exist at the start: IDs may have moved to it."""
    had = plan.cluster.topics[feeding.topic].partitions
    if feeding.partition >= had:
        raise StateIncompatible(
            f"topic {feeding.topic!r} had {had} partitions when the stream started, and has partition "
            f"{feeding.partition} now: equal IDs may be in other partitions than those that saw them. Nothing of it "
            f"was judged. `dedup reset` and an empty checkpoint directory start anew."
        )


class _Attempt:
    """The partition's task, and what it was given since its last commit."""

    def __init__(self, workshop: Workshop, wire: KafkaWire, feeding: TopicPartition, plan: AttemptPlan) -> None:
        self._workshop: Final = workshop
        self._wire: Final = wire
        self._feeding: Final = feeding
        self._commit_rows: Final = plan.commit_rows
        self._longest_s: Final = plan.settings.plain.transaction_timeout_ms / 1000 / _MARGIN
        self._committed_s = asyncio.get_running_loop().time()
        self._done: Final[Counter[str]] = Counter()
        """Counts of tasks thrown away; only what is known to be committed is in them."""
        self._uncommitted: list[FeedBatch] = []
        self._task = workshop.build(feeding)

    async def run(self, first: FeedBatch, batches: Iterator[FeedBatch]) -> dict[str, Any]:
        """Judge and commit everything; return the report."""
        try:
            await self._start()
            await _refuse_hole(self._wire, self._task, first)
            follows, batch = self._task.next_offset, cast("FeedBatch | None", first)
            while batch is not None:
                linked = replace(batch, follows=follows)
                follows = batch.next_offset
                self._uncommitted.append(linked)
                await self._task.process(linked)
                if sum(map(len, self._uncommitted)) >= self._commit_rows:
                    await self._commit()
                batch = await self._next(batches)
            await self._commit()
        finally:
            await self._task.close(drain=False)
        return self._report()

    async def _next(self, batches: Iterator[FeedBatch]) -> FeedBatch | None:
        """Return the next batch; None at the end. A transaction that is open for long is committed while Spark reads.

        Spark is read in a thread, so that meanwhile what was judged is sent.
        """
        coming = asyncio.ensure_future(asyncio.to_thread(next, batches, None))
        if self._uncommitted:
            open_s = asyncio.get_running_loop().time() - self._committed_s
            await asyncio.wait({coming}, timeout=max(0.0, self._longest_s - open_s))
            if not coming.done() or open_s > self._longest_s:
                await self._commit()
        return await coming

    async def _start(self) -> None:
        """The task runs; damaged local state is thrown away once and restored."""
        try:
            await self._task.start()
        except TaskCorrupted:
            await self._task.close(drain=False)
            self._workshop.wipe(self._feeding)
            self._task = self._workshop.build(self._feeding)
            await self._task.start()

    async def _commit(self) -> None:
        for renewals in range(MOST_RENEWALS + 1):
            try:
                await self._task.commit()
            except CommitUnknown:
                if renewals == MOST_RENEWALS:
                    raise
                await self._begin_again()
            else:
                self._uncommitted.clear()
                self._committed_s = asyncio.get_running_loop().time()
                return

    async def _begin_again(self) -> None:
        """A new epoch has found out what the last commit did; what it left undone is judged again."""
        self._done.update(_counts(self._task))
        await self._task.close(drain=False)
        self._task = self._workshop.build(self._feeding)
        await self._start()
        follows = self._task.next_offset
        for batch in self._uncommitted:
            await self._task.process(replace(batch, follows=follows))
            follows = batch.next_offset

    def _report(self) -> dict[str, Any]:
        self._done.update(_counts(self._task))
        stream_time_ms = self._task.numbers.stream_time_ms
        return {**self._done, "next_offset": self._task.next_offset, "stream_time_ms": stream_time_ms}


def _counts(task: Task) -> dict[str, int]:
    verdicts = task.numbers.verdicts
    return {
        **{name: verdicts[name] for name in ("unique", "duplicate", "late", "dead_letter", "exempt", "repartitioned")},
        "judged": sum(verdicts.values()),
        "conflicts": task.numbers.conflicts,
        "replayed": task.numbers.replayed,
        "restored": task.numbers.restored,
    }


async def _refuse_hole(wire: KafkaWire, task: Task, first: FeedBatch) -> None:
    """Raise StateIncompatible where records between the state's position and the first row were never judged."""
    feeding, position, begins = first.feeding, task.next_offset, first.offsets[0]
    kept = (await bounds_of(wire, feeding)).start if position < begins else 0
    if position < kept:
        raise eaten(task.task_id, position, kept)
    while position < begins:
        try:
            fetched = await wire.fetch(feeding, position, max_bytes=HOLE_BYTES, wait_ms=HOLE_WAIT_MS)
        except NoAnswer:
            await wire.pause(HOLE_WAIT_MS)
            continue
        missed = [record.offset for record in fetched.records if record.offset < begins]
        if missed:
            raise StateIncompatible(
                f"{task.task_id}: the checkpoint goes on at offset {begins}, but the state has judged records below "
                f"{task.next_offset} only; {missed[0]} is the first that would be lost. State and checkpoint do not "
                f"belong together. Nothing was touched. Start with an empty checkpoint directory: it begins where the "
                f"state ends."
            )
        position = fetched.next_offset


def eaten(task_id: TaskId, position: int, kept: int) -> StateIncompatible:
    """Return the error for a log whose retention deleted records before they were judged."""
    feeding = task_id.feeding
    return StateIncompatible(
        f"{feeding.topic}/{feeding.partition} no longer holds offset {position}, which is to be judged next: it begins "
        f"at {kept} now, retention deleted {kept - position} offsets unjudged. Nothing was skipped. Lengthen "
        f"`retention.ms` of the topic; `dedup reset --to earliest` with an empty checkpoint directory accepts the loss."
    )


@contextmanager
def _own_directory(state_dir: Path, topology: str, feeding: TopicPartition) -> Iterator[Path]:
    """Inside ``with``, nobody else keeps the partition's state there.

    It is the same directory for the next micro-batch on this machine. While an attempt that was fenced is still
    ending there, a temporary one is used and the state is restored from the changelog.
    """
    shared = state_dir / ".spark"
    shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = own_state(shared, f"{topology}-{feeding.topic.replace('.', '-')}-{feeding.partition}")
    try:
        owner.__enter__()
    except StateIncompatible as in_use:
        if "in use" not in str(in_use):
            raise
        with tempfile.TemporaryDirectory(prefix="dedup-spark-") as private:
            yield Path(private)
        return
    try:
        yield shared
    finally:
        owner.__exit__(None, None, None)
