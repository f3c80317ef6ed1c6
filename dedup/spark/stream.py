"""Implements `dedup spark run`, a Structured Streaming job that produces the same verdicts, state, and transactions as
a fleet.

Spark reads the topics, schedules and retries tasks, and stores the offsets of each micro-batch. A Spark task judges its
Kafka partition as a worker does (`task_attempt`). The task commits the records, their sightings, the task record, and
the group's offset in one transaction, under the transactional ID that a fleet would use for the partition. Therefore, a
fleet can take over where a stream stops, and vice versa. A fleet and a stream that run at the same time fence each
other.

A topology with a repartition topic needs two queries. The query `repartition` writes records to the repartition topic,
in which records with the same ID share a partition. The query `dedup` judges the records in the order of the
repartition topic.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import pickle
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from dedup.errors import BrokerUnavailable, CommitUnknown, DedupError, TaskMigrated
from dedup.kafka.client import KafkaWire
from dedup.kafka.outage_lines import ASIDE
from dedup.kafka.schema_registry import SchemaRegistry, asking
from dedup.kafka.topic_admin import Admin, run_in_new_loop
from dedup.kafka.wire import NoAnswer, TopicPartition
from dedup.settings import Settings
from dedup.spark.columns import feeding_columns
from dedup.spark.kafka_source import kafka_options
from dedup.spark.session import (
    HadoopDirectory,
    PicklableSettings,
    connected,
    described,
    log_query_errors,
    raised_by_dedup,
    translated_errors,
)
from dedup.spark.stream_checkpoint import claim, continues_at, has_begun, leave_behind, refuse_unusable
from dedup.spark.stream_monitor import StreamMonitor, StreamUpkeep, lag_after
from dedup.spark.task_attempt import (
    REPORT,
    AttemptPlan,
    BatchReport,
    PartitionReport,
    deleted_unjudged,
    judge_partition,
    pass_markers,
    refuse_unjudged,
)
from dedup.store.rocks import RocksMemory
from dedup.topology.model import SubTopology, Topology
from dedup.worker.layout import alone
from dedup.worker.offsets import (
    Start,
    at_once,
    bounds_of,
    committed_offset,
    first_offset,
    first_readable,
    progress_within,
)
from dedup.worker.restore import last_task_record, refuse_other_rule
from dedup.worker.task import SteadyClock, TaskId
from dedup.worker.task_factory import TaskFactory
from dedup.worker.task_group import TaskGroup
from dedup.worker.topics import Cluster, group_is_new, prepare, refuse_used_output
from dedup.worker.upkeep import refuse_too_large

log: Final = logging.getLogger(__name__)

_PREPARE_WITHIN_S: Final = 60
_IDLE_LOOK_S: Final = 0.5
_IDLE_ENDS_WITHIN_S: Final = 5.0
_QUERY_LOOK_S: Final = 0.2
_BATCHES_END_WITHIN_S: Final = 10.0
"""How long a stopped stream waits for its current micro-batches to end. Kubernetes kills a process after 30 s."""
_TASKS_LOOK_S: Final = 2.0
_PATIENCE: Final = dict.fromkeys(("kafka.default.api.timeout.ms", "kafkaConsumer.pollTimeoutMs"), "900000")
"""How long Spark's Kafka source waits for a broker, in ms, before it tries again. Spark tries three times to find the
latest offsets, and starts a task up to four times. Kafka's default of 60 s would end a stream after three minutes.
"""
_INTERRUPTED: Final = "py4j.protocol.Py4JJavaError: An error occurred while calling: java.lang.InterruptedException"
"""The text by which Spark recognizes that a query's function was interrupted (`StreamExecution.PROXY_ERROR`).

Spark's regular expression overflows the stack if a stack trace follows the text.
"""
_AFTER_DELETION: Final = (
    "Nothing was skipped. Start the stream again: it continues if the group has judged these records, and otherwise "
    "says which ones were lost."
)
_ERROR_LINES: Final = 12
_REPORT_FRAMES: Final = 4
_REPORTING: Final = {
    (f"org.apache.spark.sql.kafka010.KafkaMicroBatchStream{suffix}", "metrics") for suffix in ("", "$")
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A topology whose topics exist on the cluster, with the start offsets of a new stream."""

    topology: Topology
    settings: Settings
    cluster: Cluster
    positions: Mapping[TopicPartition, int]
    """Maps each partition to the offset where a stream without a checkpoint starts, which is the committed offset or
    the topology's start offset.
    """
    unpinned: tuple[TopicPartition, ...]
    """Partitions that have no committed offset and whose start offset depends on when the stream starts."""
    kept: Mapping[TopicPartition, int]
    """Maps each partition to the first offset that Kafka holds."""
    committed: Mapping[TopicPartition, int]
    """Maps each partition with an offset of the group to that offset."""

    def feeding(self, sub_topology: SubTopology) -> dict[TopicPartition, int]:
        """Return the start offsets of the partitions that the tasks of a sub-topology read."""
        topology = self.topology
        topics = topology.source.topics if sub_topology == "repartition" else topology.feeding_topics
        return {at: offset for at, offset in self.positions.items() if at.topic in topics}

    def identity(self) -> dict[str, object]:
        """Return the values that must not change between a checkpoint and a stream that continues from this checkpoint.

        `state` contains the topology's rules and partition counts. `topics` contains Kafka's topic IDs, because a
        recreated topic has different records at the same offsets. `semantics` is a constant, kept because existing
        checkpoints contain it.
        """
        name, partitions = self.topology.name, self.cluster.source_partitions(self.topology)
        ids = {topic: self.cluster.topics[topic].topic_id for topic in partitions}
        state = self.topology.state_identity(partitions)
        return {"version": 1, "topology": name, "state": state, "topics": ids, "semantics": "exact"}

    async def pin_start(self) -> None:
        """Commit the start offsets that depend on when the stream starts, so that a stream restarted after a crash uses
        the same offsets.
        """
        if self.unpinned:
            async with connected(self.settings, f"dedup-{self.topology.name}-spark") as wire:
                for place in self.unpinned:
                    async with _short_task(self, wire, place) as group:
                        await group.commit()


async def prepared(
    topology: Topology, settings: Settings, *, onto_existing_output: bool = False, begun: bool = False
) -> Prepared:
    """Create missing topics, and return the topology with the start offsets of its stream.

    If the stream already has a checkpoint (``begun``), the output topic is allowed to contain records. Raises
    StateIncompatible if the topics do not match the topology, if retention deleted records that were not judged, or if
    records are repartitioned and another ID rule, for example, wrote the state.
    Also raises StateIncompatible if ``onto_existing_output`` is false and the output topic of a new group already
    contains records. Raises BrokerUnavailable if no broker responds.
    """
    async with connected(settings, f"dedup-{topology.name}-spark") as wire:
        try:
            async with progress_within(_PREPARE_WITHIN_S), Admin(wire.connection) as admin:
                fresh = await group_is_new(topology, wire, admin)
                if fresh and not begun:
                    await refuse_used_output(topology, wire, admin, meant=onto_existing_output)
                cluster = await prepare(topology, settings, admin, may_create_changelog=fresh)
                topology = await alone(topology, cluster, wire, "dedup spark run")
                if not topology.direct:
                    # The query `repartition` has no state that names the rule by which it chooses partitions.
                    await refuse_other_rule(topology, cluster, wire)
                return await _with_positions(topology, settings, cluster, wire)
        except TimeoutError as error:
            raise BrokerUnavailable(
                f"the cluster at {', '.join(settings.brokers)} did not say within {_PREPARE_WITHIN_S} s which offsets "
                f"and topics it has: a partition has no leader, or the group has no coordinator. See the brokers' logs."
            ) from error


async def _with_positions(topology: Topology, settings: Settings, cluster: Cluster, wire: KafkaWire) -> Prepared:
    def start_of(place: TopicPartition) -> Start:
        return topology.source.start if place.topic in topology.source.topics else "earliest"

    async def look(place: TopicPartition) -> tuple[int | None, int, int]:
        """Return a partition's committed offset, its first offset, and the offset where the stream starts."""
        committed = await committed_offset(wire, topology.name, place)
        kept = (await bounds_of(wire, place)).start
        if committed is not None and committed < kept:
            sub_topology: SubTopology = "dedup" if place.topic in topology.feeding_topics else "repartition"
            raise deleted_unjudged(TaskId(sub_topology, place), committed, kept)
        return committed, kept, await first_offset(wire, place, start_of(place)) if committed is None else committed

    names = dict.fromkeys((*topology.source.topics, *topology.feeding_topics))
    starts = await at_once(look, cluster.places(names))
    positions = {place: offset for place, (_, _, offset) in starts.items()}
    begins = {place: kept for place, (_, kept, _) in starts.items()}
    found = {place: committed for place, (committed, _, _) in starts.items() if committed is not None}
    unpinned = tuple(place for place in starts if place not in found and start_of(place) != "earliest")
    return Prepared(topology, settings, cluster, positions, unpinned, begins, found)


async def _before_markers(ready: Prepared, places: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Return the partitions in which markers or aborted records follow the committed offset."""
    name = ready.topology.name
    async with connected(ready.settings, f"dedup-{name}-spark") as wire:

        async def precedes(place: TopicPartition) -> bool:
            committed = await committed_offset(wire, name, place, stable=False)
            return committed is not None and await first_readable(wire, place, committed) > committed

        return [place for place in places if await precedes(place)]


async def _refuse_ahead(ready: Prepared, kind: SubTopology, continues: Mapping[TopicPartition, int]) -> None:
    """Raise StateIncompatible if a checkpoint continues after records that the state has not judged.

    Without this check, a stream would only find out when the next record arrives.
    """
    ahead = {place: at for place, at in continues.items() if at > ready.committed.get(place, at)}
    if not ahead:
        return
    async with connected(ready.settings, f"dedup-{ready.topology.name}-spark") as wire:
        for place, at in ahead.items():
            position = ready.committed[place]
            if kind == "dedup":
                changelog = TopicPartition(ready.topology.changelog_topic, place.partition)
                record = await last_task_record(wire, changelog, stable=False)
                position = max(position, record.next_offset if record is not None else 0)
            await refuse_unjudged(wire, TaskId(kind, place), position, at)


@asynccontextmanager
async def _short_task(ready: Prepared, wire: KafkaWire, feeding: TopicPartition) -> AsyncIterator[TaskGroup]:
    """Yield a task group with one started task for the partition. The task begins with empty local state."""
    with tempfile.TemporaryDirectory(prefix="dedup-spark-") as empty:
        here = ready.settings.model_copy(update={"state_dir": Path(empty)})
        group = TaskFactory(ready.topology, here, ready.cluster, wire, SteadyClock(), RocksMemory()).build((feeding,))
        try:
            await group.open()
            await group.tasks[feeding].start()
            yield group
        finally:
            await group.close(drain=False)


class _IdleMarks:
    """A driver thread that writes idle markers to the repartition topic for source partitions without new records.

    Without a marker, an idle source partition holds back stream time, so no record is late and no sighting expires. The
    marker is written by the `repartition` task of the idle partition, but only while no micro-batch is running, because
    the marker's transaction would fence a running task.
    """

    def __init__(self, ready: Prepared) -> None:
        self._ready: Final = ready
        self.busy: Final = threading.Lock()
        """Lock for writing to the repartition topic."""
        self._over: Final = threading.Event()
        self._quiet: dict[TopicPartition, tuple[int, float]] = {}
        """Maps a partition without new records to its position and to the time when the partition was first seen idle
        (inf once a marker has been written).
        """
        self.failure: Exception | None = None
        """The error that must end the stream, or None. Without markers, stream time would not advance."""
        self._thread: Final = threading.Thread(target=self._run, name="idle-marks", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. The next epoch aborts an open transaction of a marker."""
        self._over.set()
        if self._loop is not None and self._watching is not None:
            with suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._watching.cancel)
        self._thread.join(_IDLE_ENDS_WITHIN_S)

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                asyncio.run(self._watch_again())
        except Exception as error:  # noqa: BLE001  # the stream ends with it, as a worker does
            self.failure = error

    async def _watch_again(self) -> None:
        self._loop, self._watching = asyncio.get_running_loop(), asyncio.current_task()
        while not self._over.is_set():
            # After these errors, another attempt may succeed.
            try:
                await self._watch()
            except (BrokerUnavailable, NoAnswer, CommitUnknown) as error:
                log.warning("idle markers: %s", error, extra=ASIDE)
            except TaskMigrated as error:
                log.warning("idle markers: %s; trying again", error)
            await asyncio.sleep(_IDLE_LOOK_S)

    async def _watch(self) -> None:
        ready = self._ready
        async with connected(ready.settings, f"dedup-{ready.topology.name}-idle") as wire:
            while not self._over.is_set():
                for topic in ready.topology.source.topics:
                    for partition in range(ready.cluster.topics[topic].partitions):
                        await self._look(wire, TopicPartition(topic, partition))
                await asyncio.sleep(_IDLE_LOOK_S)

    async def _look(self, wire: KafkaWire, feeding: TopicPartition) -> None:
        position = await self._caught_up_at(wire, feeding)
        now_s = time.monotonic()
        before, since_s = self._quiet.get(feeding, (None, now_s))
        if position is None:
            self._quiet.pop(feeding, None)
            return
        if before is None or (position != before and (await lag_after(wire, feeding, before)).records):
            since_s = now_s
        elif now_s - since_s >= self._ready.topology.idle_after_ms / 1000 and await self._mark(wire, feeding, position):
            since_s = math.inf
        self._quiet[feeding] = position, since_s

    async def _caught_up_at(self, wire: KafkaWire, feeding: TopicPartition) -> int | None:
        """Return a partition's position if only transaction markers and aborted records follow the position; otherwise,
        return None.
        """
        committed = await committed_offset(wire, self._ready.topology.name, feeding)
        lag = await lag_after(wire, feeding, self._ready.positions[feeding] if committed is None else committed)
        return None if lag.records else lag.position

    async def _mark(self, wire: KafkaWire, feeding: TopicPartition, position: int) -> bool:
        """Write an idle marker unless a micro-batch is running or has moved the position. Return whether a marker was
        written.
        """
        if not self.busy.acquire(blocking=False):
            return False
        try:
            if await self._caught_up_at(wire, feeding) != position:
                return False
            async with _short_task(self._ready, wire, feeding) as group:
                written = group.tasks[feeding].say_idle()
                await group.commit()
            log.info("%s/%d: no record for %d ms; marked idle", *feeding, self._ready.topology.idle_after_ms)
            return written
        finally:
            self.busy.release()


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a stream."""

    checkpoint: str
    """A directory for this topology only, on any file system that Hadoop supports."""
    exit_when_done: bool = False
    """Stop at the end offsets that the topics have at startup."""
    most_offsets: int = 1_000_000
    """Maximum number of offsets in a micro-batch."""
    commit_rows: int = 100_000
    """Number of rows in a transaction. No transaction may stay open longer than `transaction_timeout`."""
    onto_existing_output: bool = False
    """Let a new group write to an output topic that already contains records; see `dedup.worker.topics`."""
    on_batch: Callable[[BatchReport], None] | None = None


@dataclass(slots=True)
class _Query:
    """One streaming query, which judges and commits its micro-batches."""

    sub_topology: SubTopology
    ready: Prepared
    options: StreamOptions
    monitor: StreamMonitor
    busy: AbstractContextManager[object]
    """A context manager that is held while a micro-batch is running."""
    registry: SchemaRegistry | None
    """The schema registry, or None if values do not name their schemas."""
    failure: DedupError | None = None
    """The error that stopped the query, stored here because Spark passes on only the text of an error."""
    query: StreamingQuery | None = None
    restarted: bool = False
    idle: threading.Event = field(default_factory=threading.Event)
    """Set while no micro-batch is being judged."""
    healed: set[TopicPartition] = field(default_factory=set)
    """The partitions whose damaged local state was restored. If the state is damaged again, the stream ends, as a
    worker does.
    """
    stopping: bool = False
    """True as soon as Spark is told to stop the query, which interrupts the query."""

    @property
    def name(self) -> str:
        return f"{self.ready.topology.name}-{self.sub_topology}"

    def start(self, spark: SparkSession) -> None:
        """Start the query from its checkpoint or, if it has no checkpoint, from `Prepared.positions`."""
        options, starting = self.options, dict[str, dict[str, int]]()
        for at, offset in self.ready.feeding(self.sub_topology).items():
            starting.setdefault(at.topic, {})[str(at.partition)] = offset
        rows = (
            spark.readStream.format("kafka")
            .options(**kafka_options(self.ready.settings), **_PATIENCE)
            .option("subscribe", ",".join(starting))
            .option("startingOffsets", json.dumps(starting))
            .option("maxOffsetsPerTrigger", options.most_offsets)
            .load()
        )
        writer = rows.writeStream.queryName(self.name).foreachBatch(self._judge)
        writer = writer.option("checkpointLocation", f"{options.checkpoint}/{self.sub_topology}")
        self.idle.set()
        self.query = (writer.trigger(availableNow=True) if options.exit_when_done else writer).start()

    def _judge(self, rows: DataFrame, batch_id: int) -> None:
        self.idle.clear()
        try:
            with translated_errors(_AFTER_DELETION):
                self._judge_batch(rows, batch_id)
        except Exception as error:
            if self.stopping:
                raise InterruptedError(_INTERRUPTED) from None
            if isinstance(error, DedupError):
                self.failure = error
                log_query_errors(rows.sparkSession, on=False)
            raise
        finally:
            self.idle.set()

    def _judge_batch(self, rows: DataFrame, batch_id: int) -> None:
        """Judge and commit a micro-batch. If a task attempt reports an error, raise that error.

        Raises StateIncompatible if the state of a partition has become too large.
        """
        began_s, ready = time.monotonic(), self.ready
        settings = PicklableSettings.of(ready.settings)
        commit_rows, healed = self.options.commit_rows, frozenset(self.healed)
        plan = AttemptPlan(ready.topology, settings, ready.cluster, commit_rows, self.registry, healed)
        with self.busy, described(rows.sparkSession, f"{self.name}: judge and commit micro-batch {batch_id}"):
            found = feeding_columns(rows).mapInArrow(partial(judge_partition, plan), REPORT).collect()
            reports = list(_reports_in(found))
            if len(reports) < rows.rdd.getNumPartitions():
                reports += self._pass_markers(plan, rows.sparkSession, {report.feeding for report in reports})
        judged = BatchReport(self.sub_topology, batch_id, reports, time.monotonic() - began_s)
        self.monitor.add(judged)
        self.healed.update(report.feeding for report in reports if report.healed)
        if self.options.on_batch is not None:
            self.options.on_batch(judged)
        for report in reports:
            refuse_too_large(ready.topology, report.feeding, report.state_bytes)

    def _pass_markers(
        self, plan: AttemptPlan, spark: SparkSession, judged: Collection[TopicPartition]
    ) -> Iterator[PartitionReport]:
        """Let tasks commit the offsets after aborted records in the partitions that had no row to judge.

        Without rows, Spark does not show which Kafka partition a Spark partition belongs to.
        """
        silent = [place for place in self.ready.feeding(self.sub_topology) if place not in judged]
        try:
            passed = asyncio.run(_before_markers(self.ready, silent))
        except BrokerUnavailable as error:
            log.warning("%s: aborted records are passed after a later micro-batch: %s", self.name, error, extra=ASIDE)
            passed = []
        if not passed:
            return iter(())
        places = spark.sparkContext.parallelize(passed, len(passed))
        frame = spark.createDataFrame(places, "topic string, partition int")
        return _reports_in(frame.mapInArrow(partial(pass_markers, plan), REPORT).collect())

    def goes_on(self, spark: SparkSession) -> bool:
        """Return whether the query is active. If a known Spark defect (`_failed_in_report`) has stopped the query,
        restart it once.
        """
        if self.query is None or self.query.isActive:
            return self.query is not None
        if self.failure is not None or self.restarted or not _failed_in_report(self.query):
            return False
        log.warning("%s: Spark failed to report a micro-batch that it had committed; the query starts again", self.name)
        self.restarted = True
        self.start(spark)
        return True

    def stop(self, until_s: float, at_once: threading.Event) -> None:
        """Stop the query after its current micro-batch, but no later than the monotonic time ``until_s``, or as soon as
        ``at_once`` is set.
        """
        if self.query is None:
            return
        while self.query.isActive and time.monotonic() < until_s and not at_once.is_set():
            if self.idle.wait(_QUERY_LOOK_S):
                break
        self.stopping = self.query.isActive
        try:
            self.query.stop()
        except (PySparkException, Py4JJavaError) as error:
            if "TimeoutException" not in str(error):
                raise
            log.warning("%s still waits for a broker and ends with this process", self.name)

    def raise_failure(self) -> None:
        """Raise the query's error if the query has failed."""
        if self.failure is not None:
            raise self.failure
        error = None if self.query is None else self.query.exception()
        if error is None:
            return
        if self.stopping:
            log.warning("%s was interrupted (%s); the next run continues", self.name, str(error).partition("\n")[0])
            return
        ours = raised_by_dedup(str(error))
        if ours is not None:
            raise ours from error
        text = "\n".join(str(error).splitlines()[:_ERROR_LINES])
        raise DedupError(
            f"the query {self.name} failed: {text}\nNothing is lost: fix the cause and start it again with the same "
            f"checkpoint."
        )


def _reports_in(found: Iterable[Row]) -> Iterator[PartitionReport]:
    """Yield the reports of task attempts. If an attempt reports an error, raise that error."""
    for row in found:
        # The value is safe to unpickle, because an executor of this stream sent it over a connection that also carries
        # passwords.
        report = pickle.loads(row["report"])  # noqa: S301
        if isinstance(report, DedupError):
            raise report
        yield report


def _failed_in_report(query: StreamingQuery) -> bool:
    """Return whether only the progress report of a micro-batch failed, after Spark had committed the micro-batch.

    If a driver was killed during a micro-batch, the next driver repeats the micro-batch without asking Kafka for the
    latest offsets. `KafkaMicroBatchStream.metrics` in Spark 4.1 then fails, because this method expects the latest
    offsets.
    """
    failure: Any = query._jsq.exception()  # noqa: SLF001 - PySpark keeps only the text
    cause = failure.get().getCause() if failure.isDefined() else None
    frames = [] if cause is None else list(cause.getStackTrace())[:_REPORT_FRAMES]
    return any((frame.getClassName(), frame.getMethodName()) in _REPORTING for frame in frames)


def _failed_tasks(spark: SparkSession) -> int:
    """Return how many task attempts of the running stages have failed."""
    tracker = spark.sparkContext.statusTracker()
    stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
    return sum(stage.numFailedTasks for stage in stages if stage is not None)


@dataclass(slots=True)
class Running:
    """A running stream, whose method `wait` returns when the stream has ended."""

    _spark: SparkSession
    _queries: Sequence[_Query]
    _monitor: StreamMonitor
    _in_turn: bool
    """Whether each query starts only after the previous one has read all of its input."""
    _idle_marks: _IdleMarks | None
    _stopping: threading.Event = field(default_factory=threading.Event)
    _at_once: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str | None:
        """Return the address of the stream's web pages, or None if the stream serves no pages."""
        return self._monitor.url

    def start(self) -> None:
        """Start all queries, or only the first query if the queries run one after another."""
        self._monitor.start()
        try:
            for query in self._queries[:1] if self._in_turn else self._queries:
                query.start(self._spark)
        except BaseException:
            self._monitor.stop()
            raise
        if self._idle_marks is not None:
            self._idle_marks.start()

    def wait(self) -> None:
        """Wait until every query has either stopped or read all its input. If a query has failed, raise the query's
        error.
        """
        try:
            self._watch(self._queries[:1] if self._in_turn else self._queries)
            for query in self._queries[1:] if self._in_turn else ():
                if not self._stopping.is_set():
                    query.start(self._spark)
                    self._watch([query])
        finally:
            self._end()
        for query in self._queries:
            query.raise_failure()

    def _end(self) -> None:
        """Stop everything, in this order: the idle markers, the queries, and the monitor."""
        with ExitStack() as stack:
            stack.callback(self._log_errors_again)
            stack.callback(self._monitor.stop)
            until_s = time.monotonic() + _BATCHES_END_WITHIN_S
            for query in reversed(self._queries):
                stack.callback(query.stop, until_s, self._at_once)
            if self._idle_marks is not None:
                stack.callback(self._idle_marks.stop)

    def _log_errors_again(self) -> None:
        """Let later queries of this session log errors again, if this stream has turned off the logging of errors."""
        if any(query.failure is not None for query in self._queries):
            log_query_errors(self._spark, on=True)

    def stop(self, *, at_once: bool = False) -> None:
        """Make `wait` return when the current micro-batches have ended, or after 10 s. ``at_once`` interrupts them.

        The next run judges the uncommitted records.
        """
        if at_once:
            self._at_once.set()
        self._stopping.set()

    def _watch(self, queries: Sequence[_Query]) -> None:
        """Wait until one of the queries has ended or `stop` has been called. Log that tasks have failed."""
        failing, looked_s = False, time.monotonic()
        while all(query.goes_on(self._spark) for query in queries):
            if self._stopping.wait(_QUERY_LOOK_S):
                return
            for beside in (self._monitor, self._idle_marks):
                if beside is not None and beside.failure is not None:
                    raise beside.failure
            if time.monotonic() - looked_s >= _TASKS_LOOK_S:
                failed, looked_s = _failed_tasks(self._spark), time.monotonic()
                if failed and not failing:
                    log.warning("Spark tasks have failed (%d so far); Spark starts them again", failed)
                failing = failed > 0
        for query in queries:
            query.raise_failure()


def start_stream(spark: SparkSession, topology: Topology, settings: Settings, options: StreamOptions) -> Running:
    """Create missing topics, and start the stream of a topology.

    Raises StateIncompatible before a query starts, for example if the checkpoint belongs to another topology or
    retention deleted records that were not judged. Raises SettingsError, before a topic is created, if the checkpoint
    cannot be written. Raises BrokerUnavailable if no broker responds.
    """
    checkpoint = HadoopDirectory(spark, options.checkpoint)
    begun, onto = has_begun(checkpoint), options.onto_existing_output
    if not begun:
        refuse_unusable(checkpoint)
    topology = asking(topology, settings)
    ready = run_in_new_loop(prepared(topology, settings, onto_existing_output=onto, begun=begun))
    claim(checkpoint, ready.identity())
    run_in_new_loop(ready.pin_start())
    kinds: tuple[SubTopology, ...] = ("dedup",) if topology.direct else ("repartition", "dedup")
    for kind in kinds:
        own = ready.feeding(kind)
        leave_behind(checkpoint, kind, {place: ready.kept[place] for place in own}, ready.committed)
        run_in_new_loop(_refuse_ahead(ready, kind, continues_at(checkpoint, kind)))
    upkeep = StreamUpkeep(ready.topology, settings, ready.cluster, partial(continues_at, checkpoint, "dedup"))
    monitor = StreamMonitor(topology, settings, {kind: ready.feeding(kind) for kind in kinds}, upkeep)
    idle_marks = None if topology.direct or options.exit_when_done else _IdleMarks(ready)
    # Only the query `repartition` needs the lock, because it writes to the same topic as `_IdleMarks`.
    busy = {"repartition": nullcontext() if idle_marks is None else idle_marks.busy}
    registry = SchemaRegistry.of(settings.schema_registry) if topology.source.needs_registry else None
    queries = [_Query(kind, ready, options, monitor, busy.get(kind, nullcontext()), registry) for kind in kinds]
    running = Running(spark, queries, monitor, options.exit_when_done, idle_marks)
    running.start()
    return running
