"""An exactly-once Kafka writer for any DataFrame: `foreachBatch(KafkaSink.open(...).write)`.

Theory of operation. Spark's own sink writes again what a failed attempt or a killed driver has written (measured: 12.9
% of the rows twice). Here each partition of a micro-batch is one transaction of the id ``<name>-<generation>-<p>``:

    InitProducerId              older attempts are fenced, what they left open is ended for good
    read the marker             after that, up to the high watermark: has this epoch been written?
    yes -> count and digest must agree, nothing is written; else the query stops
    no  -> the rows, then the marker; the row count is compared with what is expected; commit

The count is known before the first row is written: the micro-batch is persisted and counted by partition. A task that
fails upstream looks to Python like a normal end of its input; without the count its rows would be marked as all.

For rows that `dedup spark run` judges this writer is not needed: their position travels with the state (`attempt.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa

from dedup.core.murmur2 import partitions as partitions_of
from dedup.errors import DedupError, InvariantBroken, StateIncompatible
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.session.record_batch import OWN_ROW, Line, fill
from dedup.session.transaction import Session
from dedup.session.wire import TopicPartition
from dedup.spark.feed_columns import binary_column, headers_column
from dedup.spark.marker import PARTITION, Generation, Marker, marker_key, read_markers
from dedup.spark.shipped import ShippedSettings
from dedup.spark.sink_start import started
from dedup.worker.workshop import DEADLINE_MS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dedup.settings import Settings

_DIGESTS: Final = 1 << 64
_SEND_ROWS: Final = 4_000

REPORT_DDL: Final = "partition int, rows long, skipped boolean, took_ms long, failure string"
REPORT: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("rows", pa.int64()),
        ("skipped", pa.bool_()),
        ("took_ms", pa.int64()),
        ("failure", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What every writer of a query needs to know."""

    name: str
    marker_topic: str
    generation: Generation
    topics: Mapping[str, int]
    """Partition counts of the topics written."""
    settings: ShippedSettings


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """One micro-batch to be written."""

    write: WritePlan
    epoch: int
    expected: Mapping[int, int]
    """Rows of each partition; none where it is absent."""


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What became of a micro-batch."""

    epoch: int
    rows: int
    skipped: int
    """Partitions that had been written before."""


class KafkaSink:
    """Writes the micro-batches of one query, each row once for a committed reader."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan: Final = plan

    @classmethod
    def open(cls, settings: Settings, name: str, *, topics: Iterable[str], partitions: int, checkpoint: str) -> Self:
        """Return the sink of a query; its marker topic ``<name>.markers`` exists.

        ``partitions`` is how many every micro-batch has; ``checkpoint`` names where the query keeps its offsets. Raises
        StateIncompatible where a topic is missing, or where the last epoch was only half written by other partitions.
        """
        start = asyncio.run(started(settings, name, tuple(topics), partitions, checkpoint))
        shipped = ShippedSettings.of(settings)
        return cls(WritePlan(name, start.marker_topic, start.generation, start.topics, shipped))

    def write(self, rows: DataFrame, epoch: int) -> EpochReport:
        """The rows are in Kafka, exactly once; for `foreachBatch`.

        Columns: `topic` (needed), `value` and `key` (text or bytes), `headers` (as Spark's Kafka source has them),
        `timestamp_ms`, `partition` (else murmur2 of the key). Raises StateIncompatible where this epoch was written
        with other rows, and for a topic that `open` was not told of.
        """
        plan = self._plan
        if epoch < plan.generation.first_epoch:
            return EpochReport(epoch, 0, plan.generation.partitions)
        texts = [name for name, kind in rows.dtypes if name in {"key", "value"} and kind == "string"]
        kept = rows.withColumns({name: rows[name].cast("binary") for name in texts}).persist()
        try:
            expected = _counted(kept, plan)
            writing = partial(write_partition, EpochPlan(plan, epoch, expected))
            reports = kept.mapInArrow(writing, REPORT_DDL).collect()
        finally:
            kept.unpersist()
        for report in reports:
            if report["failure"] is not None:
                raise StateIncompatible(report["failure"])
        if {report["partition"] for report in reports} != set(range(plan.generation.partitions)):
            raise InvariantBroken(f"{plan.name}: epoch {epoch} was not written by all its partitions; see Spark's log.")
        written = sum(report["rows"] for report in reports)
        return EpochReport(epoch, written, sum(report["skipped"] for report in reports))


def _counted(kept: DataFrame, plan: WritePlan) -> dict[int, int]:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415  only where Spark is there

    partitions = kept.rdd.getNumPartitions()
    if partitions != plan.generation.partitions:
        raise StateIncompatible(
            f"{plan.name}: a micro-batch has {partitions} partitions, but the sink was opened for "
            f"{plan.generation.partitions}: what each has written could not be told. Nothing was written. Put "
            f"`.repartition({plan.generation.partitions}, ...)` before the sink, or open it for {partitions}."
        )
    counts = kept.groupBy(F.spark_partition_id().alias("p")).count().collect()
    return {row["p"]: row["count"] for row in counts}


def write_partition(plan: EpochPlan, arrow: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of one partition; yield one row as `REPORT`.

    What no other attempt can cure becomes part of the report; anything else is raised, so that Spark tries again.
    """
    from pyspark import TaskContext  # noqa: PLC0415  only on executors

    context = TaskContext.get()
    if context is None:
        raise InvariantBroken("write_partition runs inside a Spark task only.")
    number, began = context.partitionId(), time.monotonic()
    report: dict[str, Any] = {"partition": number, "rows": 0, "skipped": False, "failure": None}
    try:
        report["rows"], report["skipped"] = asyncio.run(_write(plan, number, arrow))
    except StateIncompatible as error:
        report["failure"] = str(error)
    report["took_ms"] = int((time.monotonic() - began) * 1000)
    yield pa.RecordBatch.from_pylist([report], schema=REPORT)


async def _write(plan: EpochPlan, number: int, arrow: Iterable[pa.RecordBatch]) -> tuple[int, bool]:
    """Return the row count, and whether an attempt before this one has written them."""
    write = plan.write
    settings = write.settings.reveal()
    wire = KafkaWire(Connection.of(settings, client_id=f"{write.name}-{number}"))
    await wire.start()
    try:
        own_id = f"{write.name}-{write.generation.number}-{number}"
        session = Session(wire, own_id, write.name, timeout_ms=settings.transaction_timeout_ms, deadline_ms=DEADLINE_MS)
        await session.open()
        markers = await read_markers(wire, write.marker_topic)
        if markers.generation != write.generation:
            raise StateIncompatible(
                f"{write.name}: another start of the query has taken over, as generation {markers.generation}; this "
                f"task is of {write.generation} and writes nothing. Only one may run; end this one."
            )
        before = markers.markers.get((write.generation.number, number))
        tally = Tally(plan.expected.get(number, 0))
        if before is not None and before.epoch >= plan.epoch:
            for batch in arrow:
                tally.add(batch)
            _refuse_difference(plan, number, before, tally)
            return tally.rows, True
        try:
            await _send(session, plan, number, arrow, tally)
        finally:
            await session.drop()
        return tally.rows, False
    finally:
        await wire.stop()


async def _send(session: Session, plan: EpochPlan, number: int, arrow: Iterable[pa.RecordBatch], tally: Tally) -> None:
    write, compression = plan.write, plan.write.settings.plain.topics.compression
    batches = iter(arrow)
    while (batch := await asyncio.to_thread(next, batches, None)) is not None:
        tally.add(batch)
        for target, lines in lines_by_target(batch, write.topics).items():
            session.add(fill(target, lines, compression=compression))
    tally.refuse_truncated(plan, number)
    marker = Marker(plan.epoch, tally.rows, tally.digest)
    key = marker_key(write.generation.number, number)
    line: Line = (OWN_ROW, int(time.time() * 1000), key, marker.encode(), [])
    session.add(fill(TopicPartition(write.marker_topic, PARTITION), [line], compression="none"))
    await session.commit({})


class Tally:
    """Rows counted and digested as they pass."""

    def __init__(self, expected: int) -> None:
        self._expected: Final = expected
        self.rows = 0
        self.digest = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Count a batch."""
        self.rows += batch.num_rows
        digests = [blake2b(row, digest_size=8).digest() for row in _row_bytes(batch)]
        self.digest = (self.digest + int(np.frombuffer(b"".join(digests), np.uint64).sum(dtype=np.uint64))) % _DIGESTS

    def refuse_truncated(self, plan: EpochPlan, number: int) -> None:
        """Raise InputTruncated where there were other than the expected rows."""
        if self.rows != self._expected:
            raise InputTruncated(
                f"{plan.write.name}, epoch {plan.epoch}, partition {number}: {self.rows} rows came of "
                f"{self._expected} that were counted before: the task failed upstream, and its input only seemed to "
                f"end. Nothing was committed; Spark tries again."
            )


def _row_bytes(batch: pa.RecordBatch) -> Iterable[bytes]:
    """Yield bytes that differ where rows do: of the same columns, so a separator that can not be mistaken is enough."""
    return (b"%r" % (row,) for row in zip(*map(_values, batch.columns), strict=True))


def _values(column: pa.Array) -> list[Any]:
    """Return values that look the same whatever rows lie beside them: by numpy a null makes floats of all integers."""
    kind = column.type
    alike = pa.types.is_integer(kind) and not column.null_count
    if alike or pa.types.is_binary(kind) or pa.types.is_string(kind):
        found: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return found
    return list(column.to_pylist())


class InputTruncated(DedupError):
    """An attempt's input ended before the rows that were counted; another attempt will see them all."""


def _refuse_difference(plan: EpochPlan, number: int, before: Marker, tally: Tally) -> None:
    tally.refuse_truncated(plan, number)
    if before == Marker(plan.epoch, tally.rows, tally.digest):
        return
    raise StateIncompatible(
        f"{plan.write.name}: partition {number} has written epoch {before.epoch} with {before.rows} rows (digest "
        f"{before.digest:016x}); epoch {plan.epoch} now has {tally.rows} (digest {tally.digest:016x}). The checkpoint "
        f"is older than the output, or the query is not deterministic. Nothing was written. Bring the checkpoint back, "
        f"or take a new one: it gets writers of its own."
    )


def lines_by_target(batch: pa.RecordBatch, topics: Mapping[str, int]) -> dict[TopicPartition, list[Line]]:
    """Return the records of a batch by the partition they go to, in order."""
    names = set(batch.schema.names)
    count = batch.num_rows
    nothing: list[None] = [None] * count

    unknown = {*batch.column("topic").to_pylist()} - {*topics}
    if unknown:
        raise StateIncompatible(
            f"a row goes to topic {', '.join(map(repr, unknown))}, which `KafkaSink.open` was not told of. Nothing of "
            f"this partition was written; name it in `topics`."
        )

    def column(name: str) -> list[Any]:
        return batch.column(name).to_pylist() if name in names else nothing

    keys = binary_column(batch.column("key")) if "key" in names else nothing
    values = binary_column(batch.column("value")) if "value" in names else nothing
    headers = headers_column(batch.column("headers")) if "headers" in names else [[] for _ in range(count)]
    now_ms = int(time.time() * 1000)
    hashed: dict[int, list[int]] = {}
    lines: dict[TopicPartition, list[Line]] = {}
    rows = zip(column("topic"), column("partition"), column("timestamp_ms"), keys, values, headers, strict=True)
    for row, (topic, partition, timestamp_ms, key, value, own) in enumerate(rows):
        if partition is None:
            partitions = topics[topic]
            if partitions not in hashed:
                hashed[partitions] = partitions_of([each or b"" for each in keys], partitions)
            partition = hashed[partitions][row]  # noqa: PLW2901  chosen where the row does not say
        time_ms = now_ms if timestamp_ms is None else timestamp_ms
        lines.setdefault(TopicPartition(topic, partition), []).append((OWN_ROW, time_ms, key, value, own))
    return lines
