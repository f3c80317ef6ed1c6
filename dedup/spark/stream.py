"""Kafka -> verdicts -> Kafka by Structured Streaming, with the fleet's own verdicts, state and exactly-once protocol.

Theory of operation. Spark reads the topics, places the work, tries again and keeps the offsets of a micro-batch; a
Spark task judges its Kafka partition as a worker does (`attempt.py`) and commits records, sightings, task record and
group offset in one transaction of the fleet's transactional id. So a fleet can take over where the stream stops, and
the other way round: never both at once, they would fence each other. `dedup status`, `verify` and `explain` work.

A topology that is not direct runs two queries, as a fleet runs two kinds of task: `repartition` puts records into the
topic in which equal IDs meet, `dedup` judges in that topic's order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dedup.core.fold import RecordFailed
from dedup.errors import BrokerUnavailable, DedupError, InvariantBroken, StateIncompatible
from dedup.spark.attempt import REPORT_DDL, AttemptPlan, judge_partition
from dedup.spark.checkpoint import claim
from dedup.spark.feed_columns import feeding_columns
from dedup.spark.kafka_options import kafka_options
from dedup.spark.prepared import Prepared, prepared
from dedup.spark.shipped import ShippedSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from dedup.settings import Settings
    from dedup.topology.model import SubTopology, Topology

MOST_OFFSETS: Final = 1_000_000
COMMIT_ROWS: Final = 100_000
_LOOK_S: Final = 0.2
_TOLD_LINES: Final = 12
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


class Stream:
    """A running stream; `wait` returns when it is over."""

    def __init__(self, spark: SparkSession, topology: Topology, ready: Prepared, options: StreamOptions) -> None:
        self._spark: Final = spark
        self._topology: Final = topology
        self._ready: Final = ready
        self._options: Final = options
        self._queries: list[StreamingQuery] = []
        self._stopping: Final = threading.Event()
        self.failure: DedupError | None = None
        """What an executor or a check found that no retry can cure."""

    def start(self) -> None:
        """The queries run; with `exit_when_done` one after the other, started by `wait`."""
        if not self._options.exit_when_done:
            for sub_topology in self._sub_topologies():
                self._queries.append(self._started(sub_topology))

    def wait(self) -> None:
        """Return when every query has ended by `stop` or by being done. Raises what made one fail."""
        if self._options.exit_when_done:
            for sub_topology in self._sub_topologies():
                # The second begins where the first has brought its topic by now.
                if not self._stopping.is_set():
                    self._queries.append(self._started(sub_topology))
                    self._watch()
        self._watch()
        self._end()

    def stop(self) -> None:
        """`wait` returns soon; what was committed stays, the next run judges the rest. Signal handlers may call it."""
        self._stopping.set()

    def _watch(self) -> None:
        """Return when a query has ended, or all were asked to."""
        while all(query.isActive for query in self._still()):
            if self._stopping.wait(_LOOK_S):
                return
        self._raise_failure()

    def _still(self) -> list[StreamingQuery]:
        """Return the queries that should be running: with `exit_when_done`, the last."""
        return self._queries[-1:] if self._options.exit_when_done else self._queries

    def _end(self) -> None:
        for query in self._queries:
            query.stop()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
        for query in self._queries:
            error = query.exception()
            if error is not None:
                raise DedupError(
                    f"the query {query.name} failed: {_first_lines(str(error))}\nNothing is lost: start it again with "
                    f"the same checkpoint once the cause is mended."
                )

    def _sub_topologies(self) -> tuple[SubTopology, ...]:
        return ("dedup",) if self._topology.direct else ("repartition", "dedup")

    def _started(self, sub_topology: SubTopology) -> StreamingQuery:
        topology, options, ready = self._topology, self._options, self._ready
        topics = topology.source.topics if sub_topology == "repartition" else topology.feeding_topics
        rows = (
            self._spark.readStream.format("kafka")
            .options(**kafka_options(ready.settings))
            .option("subscribe", ",".join(topics))
            .option("startingOffsets", json.dumps(ready.starting_offsets(topics)))
            .option("maxOffsetsPerTrigger", options.most_offsets)
            .load()
        )
        plan = AttemptPlan(topology, ShippedSettings.of(ready.settings), ready.cluster, options.commit_rows)
        writer = (
            rows.writeStream.queryName(f"{topology.name}-{sub_topology}")
            .option("checkpointLocation", f"{options.checkpoint}/{sub_topology}")
            .foreachBatch(partial(self._run_batch, sub_topology, plan))
        )
        if options.exit_when_done:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{options.trigger_ms} milliseconds").start()

    def _run_batch(self, sub_topology: SubTopology, plan: AttemptPlan, rows: DataFrame, batch_id: int) -> None:
        try:
            reports = run_batch(rows, plan)
        except DedupError as error:
            self.failure = error
            raise
        if self._options.on_batch is not None:
            self._options.on_batch(BatchReport(sub_topology, batch_id, reports))


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


def start_stream(spark: SparkSession, topology: Topology, settings: Settings, options: StreamOptions) -> Stream:
    """Start the exact stream of a topology; topics that are missing are made.

    Raises StateIncompatible, with nothing touched, where the checkpoint is another's, topics do not fit each other, or
    retention deleted what was not judged yet; BrokerUnavailable where no broker answers.
    """
    ready = prepared(topology, settings)
    claim(spark, options.checkpoint, ready.identity("exact"))
    ready.pin_start()
    stream = Stream(spark, topology, ready, options)
    stream.start()
    return stream


def _first_lines(text: str) -> str:
    return "\n".join(text.splitlines()[:_TOLD_LINES])
