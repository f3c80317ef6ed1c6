"""Judges one partition of a micro-batch in a Spark task attempt, using the same code as a worker's task.

Every transaction contains the records sent, their sightings, the task record with the next offset to judge, and the
group's offset. Each attempt begins at the next offset to judge, and therefore handles all of these cases:

* After a crash, Spark repeats a micro-batch; the attempt skips the rows judged before the crash.
* The failure of an upstream task looks like a normal end of input. The attempt can commit the rows received so far,
  because the next attempt continues after these rows.
* If the response to a commit is lost, the attempt opens a new epoch, finds out what was committed, and judges the
  remaining records again.
* If two attempts run at the same time (speculative execution, or an executor that has lost its driver), the
  InitProducerId request of the newer attempt fences the older one.
* If records exist between the next offset to judge and the first input row, the attempt stops; otherwise, these records
  would be lost.
* If the local state turns out to be damaged, the attempt deletes it, restores it from the changelog, and judges the
  uncommitted records again.
* If transaction markers and aborted records follow the judged records, the attempt commits the offset after them, as a
  worker does. Otherwise, if retention deleted these markers and records, it would look as if unjudged records had been
  deleted.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import pickle
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Final

import pyarrow as pa

from dedup.errors import CommitUnknown, DedupError, StateIncompatible, TaskCorrupted, TaskMigrated
from dedup.kafka.client import KafkaWire
from dedup.kafka.outage_lines import of_outage, text_format
from dedup.kafka.record_batch import GC_THRESHOLD, Columns, FeedBatch
from dedup.kafka.schema_registry import SchemaRegistry, SchemaResolver
from dedup.kafka.wire import TopicPartition
from dedup.metrics import TaskNumbers
from dedup.spark.columns import feed_batches
from dedup.spark.session import ERRORS_BY_NAME, PicklableSettings, connected
from dedup.store.directory import open_more_files, own_state
from dedup.store.rocks import RocksMemory
from dedup.topology.model import SubTopology, Topology
from dedup.worker.dedup_task import DedupTask
from dedup.worker.offsets import bounds_of, first_readable, first_record
from dedup.worker.task import SteadyClock, Task, TaskId
from dedup.worker.task_factory import ONLY_WORKERS_FOLLOW, TaskFactory
from dedup.worker.topics import Cluster

log: Final = logging.getLogger(__name__)

_MOST_RENEWALS: Final = 3
"""Maximum number of new epochs in which a commit is retried before the attempt fails and Spark starts a new attempt."""
_REGISTRY_WITHIN_S: Final = 600.0
"""How long an attempt waits for a schema registry that does not respond before Spark starts a new attempt."""
_BROKER_WITHIN_S: Final = 300.0
"""How long an attempt waits for a broker that does not respond before Spark starts a new attempt."""
_PAUSE_S: Final = 1.0
_NUMBERS: Final = re.compile(r"(?:/\d+)+$")
_MARGIN: Final = 4
"""The broker aborts a transaction after a timeout, so an attempt commits after a quarter of that time."""
_BROKER_TROUBLE: Final = 5
"""Exit code of BrokerUnavailable and RegistryUnavailable; another attempt might succeed, as after TaskMigrated."""

REPORT: Final = "report binary"
"""The row that an attempt sends to the driver: a pickled `PartitionReport`, or a pickled error."""


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """The parameters of a Spark task that judges a partition."""

    topology: Topology
    settings: PicklableSettings
    cluster: Cluster
    commit_rows: int
    """Number of rows in a transaction; no transaction may stay open longer than its timeout."""
    registry: SchemaRegistry | None = None
    """The schema registry, or None if values do not name their schemas."""
    healed: frozenset[TopicPartition] = frozenset()
    """The partitions whose local state was found damaged, and restored, in an earlier micro-batch of the stream."""


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The counts, next offset, and state size that a successful attempt reports for its Kafka partition."""

    feeding: TopicPartition
    numbers: TaskNumbers
    next_offset: int
    state_ids: int
    state_bytes: int
    warnings: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The attempt's log messages, by format string and subject, such as a topic."""
    truncate_below: int = 0
    """The changelog offset below which no later owner needs a record; see `DedupTask.truncate_below`."""
    healed: bool = False
    """Whether the local state was found damaged while records were judged, and restored."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The reports of all partitions of one micro-batch, and the micro-batch's duration in seconds."""

    sub_topology: SubTopology
    batch_id: int
    partitions: Sequence[PartitionReport]
    took_s: float

    @property
    def verdicts(self) -> Counter[str]:
        """Return the number of records by verdict, summed over all partitions."""
        return sum((each.numbers.verdicts for each in self.partitions), Counter())


@cache
def _clock_and_memory() -> tuple[SteadyClock, RocksMemory]:
    """Return the clock and the RocksDB memory limit shared by all attempts in a process, which opens many files."""
    open_more_files()
    return SteadyClock(), RocksMemory()


def judge_partition(plan: AttemptPlan, arrow: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Judge and commit the rows of one Spark partition, and yield one row of `REPORT`, or nothing without rows.

    If another attempt might succeed, the function raises the error, so that Spark starts another attempt. If every
    attempt would fail in the same way, the function puts the error in the report, and the driver raises the error.
    The report also contains the attempt's warnings, which the driver logs.
    """
    batches = feed_batches(arrow)
    first = next(batches, None)
    if first is not None:
        yield _reported(plan, first.feeding, first, batches)


def pass_markers(plan: AttemptPlan, arrow: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For each row (`topic`, `partition`), commit the offset after the markers and aborted records that follow the last
    judged record, and yield one row of `REPORT`. Errors are handled as in `judge_partition`.
    """
    for place in (place for batch in arrow for place in batch.to_pylist()):
        yield _reported(plan, TopicPartition(**place), None, iter(()))


def _reported(
    plan: AttemptPlan, feeding: TopicPartition, first: FeedBatch | None, batches: Iterator[FeedBatch]
) -> pa.RecordBatch:
    gc.set_threshold(GC_THRESHOLD)
    report: PartitionReport | DedupError
    try:
        with _warnings_of_attempt() as warnings, asyncio.Runner() as runner:
            report = replace(runner.run(_judge(plan, feeding, first, batches)), warnings=warnings)
    except TaskMigrated:
        raise
    except DedupError as error:
        if error.exit_code == _BROKER_TROUBLE:
            raise
        # Some error classes cannot be unpickled, so the report contains a new error with the same text.
        report = ERRORS_BY_NAME.get(type(error).__name__, DedupError)(str(error))
    return pa.RecordBatch.from_pydict({"report": pa.array([pickle.dumps(report)], pa.binary())})


class _AttemptLog(logging.Handler):
    """Collects an attempt's warnings, so that the driver can log a warning of many attempts only once.

    Messages about records that wait go to standard error at once. Messages about unresponsive brokers are dropped,
    because the driver also logs such messages.
    """

    def __init__(self, standard_error: logging.Handler) -> None:
        super().__init__(logging.WARNING)
        self.warnings: Final[dict[tuple[str, str], str]] = {}
        self._at_once: Final = standard_error

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "waiting"):
            self._at_once.emit(record)
        elif not of_outage(record):
            first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
            # Partitions, offsets, and other numbers differ between attempts that log the same warning.
            subject = "" if isinstance(first, int) else _NUMBERS.sub("", str(first))
            self.warnings.setdefault((str(record.msg), subject), self.format(record))


@contextmanager
def _warnings_of_attempt() -> Iterator[Mapping[tuple[str, str], str]]:
    """Inside the ``with`` block, collect the log messages of this process instead of logging them.

    If the block raises an error, the messages are logged, because no report can contain them.
    """
    standard_error = logging.StreamHandler()
    standard_error.setFormatter(text_format())
    root, collecting = logging.getLogger(), _AttemptLog(standard_error)
    before = root.handlers[:]
    root.handlers[:] = [collecting]
    try:
        yield collecting.warnings
    except BaseException:
        root.handlers[:] = [standard_error]
        for text in collecting.warnings.values():
            log.warning("%s", text)
        raise
    finally:
        root.handlers[:] = before


async def _judge(
    plan: AttemptPlan, feeding: TopicPartition, first: FeedBatch | None, batches: Iterator[FeedBatch]
) -> PartitionReport:
    _refuse_added(plan, feeding)
    settings = plan.settings.reveal()
    name = plan.topology.name
    async with connected(settings, f"dedup-{name}-spark", patience_ms=int(_BROKER_WITHIN_S * 1000)) as wire:
        with _own_directory(settings.state_dir, name, feeding) as state_dir:
            here = settings.model_copy(update={"state_dir": state_dir})
            topology, schemas = plan.topology, None
            if plan.registry is not None:
                schemas = SchemaResolver(plan.registry, wait_ms=settings.schema_registry.schema_wait_ms)
                topology = topology.knowing(schemas.book)
            factory = TaskFactory(topology, here, plan.cluster, wire, *_clock_and_memory())
            try:
                return await _Attempt(factory, wire, feeding, plan, schemas).run(first, batches)
            finally:
                if schemas is not None:
                    schemas.close()


def _refuse_added(plan: AttemptPlan, feeding: TopicPartition) -> None:
    """Raise StateIncompatible if the partition was added to its topic after the stream started."""
    topic = plan.cluster.topics[feeding.topic]
    if feeding.partition < topic.partitions:
        return
    added = (
        f"topic {feeding.topic!r} had {topic.partitions} partitions when the stream started, but now has partition "
        f"{feeding.partition}"
    )
    if not plan.topology.direct and feeding.topic in plan.topology.source.topics:
        # The repartition topic, which determines where an ID is judged, has not changed.
        raise StateIncompatible(f"{added}. No record of the new partition was judged. {ONLY_WORKERS_FOLLOW}")
    raise StateIncompatible(
        f"{added}: IDs may have moved away from the partition with their sightings. No record of the new partition was "
        f"judged. `dedup reset` and an empty checkpoint directory start from scratch."
    )


class _Attempt:
    """Runs a worker's task for one partition, and keeps the batches that the task has not committed yet."""

    def __init__(
        self,
        factory: TaskFactory,
        wire: KafkaWire,
        feeding: TopicPartition,
        plan: AttemptPlan,
        schemas: SchemaResolver | None,
    ) -> None:
        self._factory: Final = factory
        self._schemas: Final = schemas
        self._wire: Final = wire
        self._feeding: Final = feeding
        self._commit_rows: Final = plan.commit_rows
        self._longest_s: Final = plan.settings.plain.transaction_timeout_ms / 1000 / _MARGIN
        self._committed_s = asyncio.get_running_loop().time()
        self._done: Final = TaskNumbers()
        """The counts of the records that earlier tasks of this attempt are known to have committed."""
        self._uncommitted: list[FeedBatch] = []
        self._may_heal: Final = feeding not in plan.healed
        self._healed = False
        self._group = factory.build((feeding,))

    @property
    def _task(self) -> Task:
        return self._group.tasks[self._feeding]

    async def run(self, first: FeedBatch | None, batches: Iterator[FeedBatch]) -> PartitionReport:
        try:
            await self._start()
            if first is not None:
                await _refuse_gap(self._wire, self._task, first)
            follows, rest = self._task.next_offset, chain([first], batches)
            while (batch := await self._next(rest)) is not None:
                linked = replace(batch, follows=follows)
                follows = batch.next_offset
                if self._schemas is not None and follows > self._task.next_offset:
                    await self._find_schemas(linked, self._schemas)
                await self._take(linked)
                if sum(map(len, self._uncommitted)) >= self._commit_rows:
                    await self._commit()
            await self._pass_markers(follows)
            await self._commit()
            # `_report` reads the store, so it must run before `close` releases the store.
            return self._report()
        finally:
            await self._group.close(drain=False)

    async def _pass_markers(self, follows: int) -> None:
        """Move the task's position past the markers and aborted records that follow the position."""
        # Ask the broker. The end of the input does not prove that only markers follow, because the input also seems to
        # end if an upstream task has failed.
        end = await first_readable(self._wire, self._feeding, self._task.next_offset)
        passed = FeedBatch.of(self._feeding, Columns(), follows=follows, ends_at=end)
        if passed.next_offset > self._task.next_offset:
            await self._take(passed)

    async def _take(self, batch: FeedBatch) -> None:
        """Judge a batch, and keep it until it is committed."""
        self._uncommitted.append(batch)
        try:
            await self._task.process(batch)
        except TaskCorrupted as damage:
            await self._heal(damage)

    async def _find_schemas(self, batch: FeedBatch, schemas: SchemaResolver) -> None:
        """Wait until all schemas named in a batch are known. Before waiting, commit the open transaction."""
        source = self._factory.topology.source
        refs = source.schema_refs(batch.keys, batch.values, batch.headers)
        if schemas.missing(refs):
            await self._commit()
            await schemas.found(refs, within_s=_REGISTRY_WITHIN_S)

    async def _next(self, batches: Iterator[FeedBatch | None]) -> FeedBatch | None:
        """Return the next batch, or None at the end of the input. While waiting, commit a transaction that has been
        open too long.

        A separate thread reads from Spark, so that judged records can be sent while the attempt waits.
        """
        coming = asyncio.ensure_future(asyncio.to_thread(next, batches, None))
        if self._uncommitted:
            open_s = asyncio.get_running_loop().time() - self._committed_s
            await asyncio.wait({coming}, timeout=max(0.0, self._longest_s - open_s))
            if not coming.done() or open_s > self._longest_s:
                await self._commit()
        return await coming

    async def _start(self) -> None:
        """Start the task. If brokers do not respond, wait up to `_BROKER_WITHIN_S` seconds."""
        until_s = asyncio.get_running_loop().time() + _BROKER_WITHIN_S
        while True:
            try:
                await self._start_group()
            except CommitUnknown:
                if asyncio.get_running_loop().time() >= until_s:
                    raise
                await self._group.close(drain=False)
                await asyncio.sleep(_PAUSE_S)
                self._group = self._factory.build((self._feeding,))
            else:
                return

    async def _start_group(self) -> None:
        """Start the task. If its local state is damaged, delete the local state and start again."""
        await self._group.open()
        try:
            await self._task.start()
        except TaskCorrupted:
            self._factory.wipe(self._feeding)
            await self._task.start()

    async def _commit(self) -> None:
        renewals = 0
        while True:
            try:
                await self._group.commit()
            except CommitUnknown:
                renewals += 1
                if renewals > _MOST_RENEWALS:
                    raise
                await self._renew()
            except TaskCorrupted as damage:
                await self._heal(damage)
            else:
                self._uncommitted.clear()
                self._committed_s = asyncio.get_running_loop().time()
                return

    async def _heal(self, damage: TaskCorrupted) -> None:
        """Delete the damaged local state, restore it, and judge the uncommitted records again.

        If the state was found damaged before, the cause is the disk, so the method raises ``damage`` after the
        deletion.
        """
        await self._group.close(drain=False)
        self._factory.wipe(self._feeding)
        if self._healed or not self._may_heal:
            raise damage
        log.warning("%s: %s", self._task.task_id, damage)
        self._healed = True
        await self._renew()

    async def _renew(self) -> None:
        """Open a new epoch to find out whether the last commit succeeded, and judge the uncommitted records again."""
        self._done.add_counters(self._task.numbers)
        await self._group.close(drain=False)
        self._group = self._factory.build((self._feeding,))
        await self._start()
        follows = self._task.next_offset
        try:
            for batch in self._uncommitted:
                await self._task.process(replace(batch, follows=follows))
                follows = batch.next_offset
        except TaskCorrupted as damage:
            await self._heal(damage)

    def _report(self) -> PartitionReport:
        task, done = self._task, self._done
        done.add_counters(task.numbers)
        done.stream_time_ms, done.committed_time_ms = task.numbers.stream_time_ms, task.numbers.committed_time_ms
        store = task.work.store
        state = (0, 0) if store is None else (store.count_ids(), store.approximate_bytes())
        below = task.work.truncate_below if isinstance(task.work, DedupTask) else None
        return PartitionReport(
            self._feeding, done, task.next_offset, *state, truncate_below=below or 0, healed=self._healed
        )


async def _refuse_gap(wire: KafkaWire, task: Task, first: FeedBatch) -> None:
    """Raise StateIncompatible if records exist between the next offset to judge and the first input row."""
    position, begins = task.next_offset, first.offsets[0]
    kept = (await bounds_of(wire, first.feeding)).start if position < begins else 0
    if position < kept:
        raise deleted_unjudged(task.task_id, position, kept)
    await refuse_unjudged(wire, task.task_id, position, begins)


async def refuse_unjudged(wire: KafkaWire, task_id: TaskId, position: int, begins: int) -> None:
    """Raise StateIncompatible if records exist between a task's next offset and the offset where its checkpoint
    continues.
    """
    missed = await first_record(wire, task_id.feeding, position, begins)
    if missed is not None:
        raise StateIncompatible(
            f"{task_id}: the checkpoint continues at offset {begins}, but the state has judged records only "
            f"below {position}; offset {missed.offset} is the first that would be lost. State and checkpoint do not "
            f"match. Nothing was changed. Start with an empty checkpoint directory: the stream then begins where the "
            f"state ends."
        )


def deleted_unjudged(task_id: TaskId, position: int, kept: int) -> StateIncompatible:
    """Return the error for a partition from which retention deleted records before they were judged."""
    feeding = task_id.feeding
    return StateIncompatible(
        f"{feeding.topic}/{feeding.partition} no longer holds offset {position}, which is to be judged next: it begins "
        f"at {kept} now; retention deleted {kept - position} offsets before they were judged. Nothing was skipped. "
        f"Increase the topic's `retention.ms`; `dedup reset --to earliest` with an empty checkpoint directory accepts "
        f"the loss."
    )


@contextmanager
def _own_directory(state_dir: Path, topology: str, feeding: TopicPartition) -> Iterator[Path]:
    """Yield a directory for the partition's state; no other attempt can use this state while the ``with`` block runs.

    If a fenced attempt still uses the regular directory, the function yields an empty temporary directory instead.
    Raises StateIncompatible if ``state_dir`` cannot be used.
    """
    shared = state_dir / ".spark"
    # The names of a topology and a topic together may exceed the maximum length of a file name.
    name = hashlib.sha256(f"{topology}/{feeding.topic}/{feeding.partition}".encode()).hexdigest()
    with ExitStack() as owner:
        try:
            owner.enter_context(own_state(shared, name))
        except StateIncompatible as in_use:
            if "in use" not in str(in_use):
                raise
            shared = Path(owner.enter_context(tempfile.TemporaryDirectory(prefix="dedup-spark-")))
        yield shared
