"""Turns a history into a fleet's state: the sightings that have not expired, and the progress of each task's feeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as fn
from pyspark.sql import types as t

from dedup.core.fold import OnConflict
from dedup.core.partitioner import partitions
from dedup.core.window import BEFORE_ALL_TIME
from dedup.errors import StateIncompatible
from dedup.spark.batch_verdicts import Counts, Order, counts_of, judging
from dedup.spark.changelog_frames import OUTSIDE_KAFKA, SIGHTINGS, live_sightings
from dedup.spark.files import History
from dedup.store.base import FeedTime

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dedup.topology.model import Topology

_PLACED: Final = t.StructField("_placed", t.IntegerType())


@dataclass(frozen=True, slots=True)
class SeedProgress:
    """The state of one partition's task after the history, except for its sightings."""

    stream_time_ms: int
    feeds: tuple[FeedTime, ...]


NOTHING_YET: Final = SeedProgress(BEFORE_ALL_TIME, ())


@dataclass(frozen=True, slots=True)
class Folded:
    """The state of a fleet after a history, and the counts of verdicts."""

    sightings: DataFrame
    """The sightings that have not expired, as `changelog_frames.SIGHTINGS`."""
    progress: Mapping[int, SeedProgress]
    """Progress by task, without tasks that had no records."""
    counts: Counts


def fold_history(
    history: History, topology: Topology, *, tasks: int, source_partitions: Mapping[str, int], now_ms: int
) -> Folded:
    """Return the state of each of ``tasks`` tasks after judging a history (`rows.RECORDS`).

    Rows with Kafka coordinates are judged in log order, others by event time. Raises StateIncompatible if the task of a
    row cannot be determined, because the row belongs to no source topic or lacks the key that decides the partition.
    """
    order: Order = "offsets" if history.placed else "event_time"
    _refuse_unplaceable(history.records, topology, source_partitions, order)
    every = judging(history, topology, now_ms=now_ms).frame()
    verdicts = placed(every, topology, tasks=tasks, order=order).persist()
    try:
        counts = counts_of(verdicts)
        progress = _progress(verdicts, topology, source_partitions, order)
        stream_times_ms = {task: each.stream_time_ms for task, each in progress.items()}
        left = _sightings(verdicts, topology, order)
        sightings = live_sightings(left, topology.window, stream_times_ms).persist()
        sightings.count()
    finally:
        verdicts.unpersist()
    return Folded(sightings, progress, counts)


def _refuse_unplaceable(
    history: DataFrame, topology: Topology, source_partitions: Mapping[str, int], order: Order
) -> None:
    if order == "event_time":
        if topology.direct and not history.where("key IS NULL").isEmpty():
            raise StateIncompatible(
                "the history has records without a key and without partitions, and the topology reads its source "
                "directly: which partition such an ID belongs to, only its key can say. Nothing was written. Give the "
                "files a column `key`, as the producers set it, or topic, partition and offset."
            )
        return
    for row in history.groupBy("topic").agg(fn.max("partition").alias("last")).collect():
        count = source_partitions.get(row["topic"])
        if count is None or row["last"] >= count:
            raise StateIncompatible(
                f"the history has records of {row['topic']}/{row['last']}, but the source topics are "
                f"{', '.join(f'{name} with {number} partitions' for name, number in source_partitions.items())}. "
                f"Nothing was written. Leave out the columns topic, partition and offset if they are of another "
                f"cluster."
            )


def placed(verdicts: DataFrame, topology: Topology, *, tasks: int, order: Order) -> DataFrame:
    """Return the verdicts with the column `dedup_partition`, the number of the task that judges the record's ID.

    In a direct topology, the number is the source partition or, for rows without coordinates, the partition of the key.
    With a repartition topic, the number is the partition of the ID.
    """
    if topology.direct and order == "offsets":
        return verdicts.withColumn("dedup_partition", fn.col("partition"))
    column = "key" if topology.direct else "dedup_id"

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            hashed = [each or b"" for each in batch.column(column).to_pylist()]
            chosen = pa.array(partitions(hashed, tasks), pa.int32())
            yield pa.RecordBatch.from_arrays([*batch.columns, chosen], [*batch.schema.names, _PLACED.name])

    schema = t.StructType([*verdicts.schema.fields, _PLACED])
    return verdicts.mapInArrow(run, schema).withColumn("dedup_partition", fn.col("_placed")).drop("_placed")


def _topic_position(topology: Topology, column: str) -> Column:
    position = fn.lit(0)
    for at, name in enumerate(topology.source.topics[1:], start=1):
        position = fn.when(fn.col(column) == name, fn.lit(at)).otherwise(position)
    return position.cast("int")


def _sightings(verdicts: DataFrame, topology: Topology, order: Order) -> DataFrame:
    """Return the sightings that result from the verdicts, with extensions if the topology extends sightings."""
    outside = order == "event_time"
    fingerprint = fn.coalesce("dedup_fingerprint", fn.lit(b"")) if topology.fingerprints_wanted else fn.lit(b"")
    first = verdicts.where("verdict = 'unique'").select(
        "dedup_partition",
        "dedup_id",
        fn.col("dedup_time_ms").alias("first_ms"),
        fn.col("dedup_time_ms").alias("last_ms"),
        (fn.lit(0) if outside else _topic_position(topology, "topic")).alias("source_topic"),
        (fn.col("dedup_partition") if outside else fn.col("partition")).alias("source_partition"),
        (fn.lit(OUTSIDE_KAFKA) if outside else fn.col("offset")).alias("source_offset"),
        fingerprint.alias("fingerprint"),
    )
    window = topology.window
    if not window.extend:
        return first
    source = [
        fn.col("first_partition").alias("source_partition"),
        fn.col("first_offset").alias("source_offset"),
        _topic_position(topology, "first_topic").alias("source_topic"),
    ]
    repeats = verdicts.where("verdict IN ('duplicate', 'conflict')").select(
        "dedup_partition",
        "dedup_id",
        fn.col("first_time_ms").alias("first_ms"),
        *([] if outside else source),
        # With `on_conflict: forward`, ID and payload identify an event, so only a record with the same payload repeats
        # a sighting.
        *([fingerprint.alias("fingerprint")] if topology.on_conflict is OnConflict.FORWARD else []),
        "dedup_time_ms",
    )
    by = [name for name in repeats.columns if name != "dedup_time_ms"]
    latest = repeats.groupBy(*by).agg(fn.max("dedup_time_ms").alias("latest_ms"))
    capped = fn.least(fn.coalesce("latest_ms", "first_ms"), fn.col("first_ms") + fn.lit(window.extend_at_most_ms))
    joined = first.join(latest, by, "left")
    return joined.withColumn("last_ms", fn.greatest("first_ms", capped)).select(*SIGHTINGS.fieldNames())


def _progress(
    verdicts: DataFrame, topology: Topology, source_partitions: Mapping[str, int], order: Order
) -> dict[int, SeedProgress]:
    """Return each task's stream time and the greatest event time of each of its feeds."""
    moved = verdicts.where("verdict IN ('unique', 'duplicate', 'conflict', 'late')")
    grouped = moved.groupBy("dedup_partition", "topic", "partition").agg(fn.max("dedup_time_ms").alias("max_ms"))
    found: dict[int, dict[tuple[str | None, int | None], int]] = {}
    for row in grouped.collect():
        found.setdefault(row["dedup_partition"], {})[row["topic"], row["partition"]] = row["max_ms"]
    return {
        task: _task_progress(task, maxima, topology, source_partitions, order) for task, maxima in sorted(found.items())
    }


def _task_progress(
    task: int,
    maxima: Mapping[Any, int],
    topology: Topology,
    source_partitions: Mapping[str, int],
    order: Order,
) -> SeedProgress:
    greatest = max(maxima.values())
    if topology.direct:
        return SeedProgress(greatest, (FeedTime(0, task, greatest, idle=False),))
    feeds = []
    for position, topic in enumerate(topology.source.topics):
        for partition in range(source_partitions[topic]):
            # Files do not say which feed a record is from, so all feeds get the greatest event time of the history.
            max_ms = greatest if order == "event_time" else maxima.get((topic, partition), BEFORE_ALL_TIME)
            # A feed without history is idle, so that it does not hold stream time back.
            feeds.append(FeedTime(position, partition, max_ms, idle=max_ms == BEFORE_ALL_TIME))
    return SeedProgress(min(feed.max_ms for feed in feeds if not feed.idle), tuple(feeds))
