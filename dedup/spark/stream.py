"""Kafka -> verdicts -> Kafka by Structured Streaming, with the fleet's own verdicts, state and exactly-once protocol.

Theory of operation. Spark reads the topics, places the work, tries again and keeps the offsets of a micro-batch; a
Spark task judges its Kafka partition as a worker does (`attempt.py`) and commits records, sightings, task record and
group offset in one transaction of the fleet's transactional id. So a fleet can take over where the stream stops, and
the other way round: never both at once, they would fence each other. `dedup status` and `verify` work.

A topology that is not direct runs two queries, as a fleet runs two kinds of task: `repartition` puts records into the
topic in which equal IDs meet, `dedup` judges in that topic's order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dedup.core.fold import RecordFailed
from dedup.errors import BrokerUnavailable, DedupError, InvariantBroken, StateIncompatible
from dedup.spark.attempt import REPORT_DDL, AttemptPlan, judge_partition
from dedup.spark.checkpoint import claim
from dedup.spark.feed_columns import feeding_columns
from dedup.spark.idle import IdleMarks
from dedup.spark.kafka_options import kafka_options
from dedup.spark.prepared import Prepared, prepared
from dedup.spark.running import Running
from dedup.spark.shipped import ShippedSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dedup.settings import Settings
    from dedup.topology.model import SubTopology, Topology

MOST_OFFSETS: Final = 1_000_000
COMMIT_ROWS: Final = 100_000
_FAILURES: Final[Mapping[str, type[DedupError]]] = {
    kind.__name__: kind for kind in (StateIncompatible, RecordFailed, InvariantBroken, BrokerUnavailable)
}


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What one micro-batch did."""

    sub_topology: SubTopology
    batch_id: int
    partitions: tuple[Mapping[str, Any], ...]
    """A row of `attempt.REPORT` for each Kafka partition that had records."""

    def total(self, name: str) -> int:
        """Return the sum of one of the report's counts."""
        return sum(row[name] for row in self.partitions)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How to run a stream."""

    checkpoint: str
    """A directory on any file system Hadoop knows; the topology's own."""
    exit_when_done: bool = False
    """Stop at the offsets there are at the start."""
    most_offsets: int = MOST_OFFSETS
    """In a micro-batch."""
    commit_rows: int = COMMIT_ROWS
    """In a transaction, which may be open no longer than `transaction_timeout`."""
    trigger_ms: int = 0
    on_batch: Callable[[BatchReport], None] | None = None


class _Batches:
    """Runs the micro-batches of one query."""

    def __init__(self, sub_topology: SubTopology, plan: AttemptPlan, options: StreamOptions) -> None:
        self._sub_topology: Final[SubTopology] = sub_topology
        self._plan: Final = plan
        self._options: Final = options
        self.running: Running | None = None
        self.busy: AbstractContextManager[object] = nullcontext()

    def run(self, rows: DataFrame, batch_id: int) -> None:
        """Judge and send a micro-batch; what no retry can cure is kept for the driver, as Spark hands on only text."""
        try:
            with self.busy:
                reports = run_batch(rows, self._plan)
        except DedupError as error:
            if self.running is not None:
                self.running.failure = error
            raise
        if self._options.on_batch is not None:
            self._options.on_batch(BatchReport(self._sub_topology, batch_id, reports))


def run_batch(rows: DataFrame, plan: AttemptPlan) -> tuple[dict[str, Any], ...]:
    """Judge and send a micro-batch of a Kafka source; return the reports of its partitions.

    Raises what an attempt reported that no other attempt can cure.
    """
    judged = feeding_columns(rows).mapInArrow(partial(judge_partition, plan), REPORT_DDL)
    reports = tuple(row.asDict() for row in judged.collect())
    for report in reports:
        if report["failure"] is not None:
            raise _FAILURES.get(report["failure"], DedupError)(report["failure_text"])
    return reports


def start_stream(spark: SparkSession, topology: Topology, settings: Settings, options: StreamOptions) -> Running:
    """Start the exact stream of a topology; topics that are missing are made.

    With `exit_when_done` a second query begins where the first has brought its topic. Raises StateIncompatible, with
    nothing touched, where the checkpoint is another's, topics do not fit each other, or retention deleted what was not
    judged yet; BrokerUnavailable where no broker answers.
    """
    ready = prepared(topology, settings)
    claim(spark, options.checkpoint, ready.identity("exact"))
    ready.pin_start()
    plan = AttemptPlan(topology, ShippedSettings.of(settings), ready.cluster, options.commit_rows)
    sub_topologies: tuple[SubTopology, ...] = ("dedup",) if topology.direct else ("repartition", "dedup")
    batches = [_Batches(sub_topology, plan, options) for sub_topology in sub_topologies]
    starters = [
        partial(_started, spark, ready, options, sub_topology, each.run)
        for sub_topology, each in zip(sub_topologies, batches, strict=True)
    ]
    beside = []
    if not (topology.direct or options.exit_when_done):
        marks = IdleMarks(ready)
        batches[0].busy = marks.busy
        beside.append(marks)
    running = Running(starters, in_turn=options.exit_when_done, beside=beside)
    for each in batches:
        each.running = running
    running.start()
    return running


def _started(
    spark: SparkSession,
    ready: Prepared,
    options: StreamOptions,
    sub_topology: SubTopology,
    run: Callable[[DataFrame, int], None],
) -> StreamingQuery:
    topology = ready.topology
    topics = topology.source.topics if sub_topology == "repartition" else topology.feeding_topics
    rows = (
        spark.readStream.format("kafka")
        .options(**kafka_options(ready.settings))
        .option("subscribe", ",".join(topics))
        .option("startingOffsets", json.dumps(ready.starting_offsets(topics)))
        .option("maxOffsetsPerTrigger", options.most_offsets)
        .load()
    )
    writer = (
        rows.writeStream.queryName(f"{topology.name}-{sub_topology}")
        .option("checkpointLocation", f"{options.checkpoint}/{sub_topology}")
        .foreachBatch(run)
    )
    return triggered(writer, options).start()


def triggered(writer: DataStreamWriter, options: StreamOptions) -> DataStreamWriter:
    """Return the writer with the trigger that the options ask for."""
    if options.exit_when_done:
        return writer.trigger(availableNow=True)
    return writer.trigger(processingTime=f"{options.trigger_ms} milliseconds")
