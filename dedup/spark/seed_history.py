"""Turns a history into the state of a fleet: the unexpired sightings, and each task's stream time and feeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql import types as t

from dedup.core.fold import OnConflict
from dedup.core.partitioner import partitions
from dedup.core.window import BEFORE_ALL_TIME, Sighting, Source, Window
from dedup.errors import StateIncompatible
from dedup.settings import Settings
from dedup.spark.batch_verdicts import Counts, Order, counts_of, judging
from dedup.spark.files import History
from dedup.spark.kafka_source import kafka_options
from dedup.store import changelog
from dedup.store.changelog import FeedTime
from dedup.topology.model import Topology

OUTSIDE_KAFKA: Final = (1 << 63) - 1
"""The source offset of a sighting whose record came from files without Kafka coordinates."""
_SEEN: Final = ("first_ms", "last_ms", "source_topic", "source_partition", "source_offset", "fingerprint")
"""The columns of a sighting, besides `dedup_partition` (its task) and `dedup_id`: the first and last event times in ms,
the coordinates of its record (the topic as its index in `source.topics`), and the fingerprint, which may be empty.
"""
_CHANGELOG_ROWS: Final = ("dedup_partition", "key", "value")


@dataclass(frozen=True, slots=True)
class SeedProgress:
    """The stream time and the feeds of one task after the task has judged the history."""

    stream_time_ms: int
    feeds: tuple[FeedTime, ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """The state of a fleet that has judged a history, and the verdict counts."""

    sightings: DataFrame
    """The sightings that have not expired."""
    progress: Mapping[int, SeedProgress]
    """Progress by task."""
    counts: Counts


def fold_history(
    history: History, topology: Topology, *, tasks: int, source_partitions: Mapping[str, int], now_ms: int
) -> Folded:
    """Judge a history, and return the resulting state of a fleet with ``tasks`` tasks.

    A history with Kafka coordinates is judged in log order, and any other history in event-time order. Raises
    StateIncompatible if a row does not belong to a source partition, or lacks the key that determines its partition.
    """
    order: Order = "offsets" if history.placed else "event_time"
    _refuse_unplaceable(history, topology, source_partitions)
    every = judging(history, topology, now_ms=now_ms).frame()
    verdicts = placed(every, topology, tasks=tasks, order=order).persist()
    try:
        counts = counts_of(verdicts)
        progress = _progress(verdicts, topology, tasks, source_partitions, order)
        limits = ((task, topology.window.oldest_live_ms(each.stream_time_ms)) for task, each in progress.items())
        oldest_ms = fn.create_map(*(fn.lit(each) for limit in limits for each in limit))[fn.col("dedup_partition")]
        sightings = _sightings(verdicts, topology, order).where(fn.col("last_ms") >= oldest_ms).persist()
        sightings.count()
    finally:
        verdicts.unpersist()
    return Folded(sightings, progress, counts)


def _refuse_unplaceable(history: History, topology: Topology, source_partitions: Mapping[str, int]) -> None:
    records = history.records
    if not history.placed:
        if topology.direct and not records.where("key IS NULL").isEmpty():
            raise StateIncompatible(
                "the history has records without a key and without partitions, but the topology reads its source "
                "directly, so only a record's key shows to which partition its ID belongs. Nothing was written. Add a "
                "column `key` with the keys that the producers set, or add topic, partition and offset."
            )
        return
    for topic, last in records.groupBy("topic").agg(fn.max("partition")).collect():
        if last >= source_partitions.get(topic, 0):
            raise StateIncompatible(
                f"the history has records of {topic}/{last}, but the source topics are "
                f"{', '.join(f'{name} with {number} partitions' for name, number in source_partitions.items())}. "
                f"Nothing was written. Leave out the columns topic, partition and offset if they come from another "
                f"cluster."
            )


def placed(verdicts: DataFrame, topology: Topology, *, tasks: int, order: Order) -> DataFrame:
    """Return the verdicts with the column `dedup_partition`, the number of the task that judges the record's ID.

    In a direct topology, a task's number is its source partition. For rows without coordinates, Kafka's default
    partitioner determines this partition from the key. With a repartition topic, Kafka's default partitioner determines
    the task's number from the ID.
    """
    if topology.direct and order == "offsets":
        return verdicts.withColumn("dedup_partition", fn.col("partition"))
    column, name = "key" if topology.direct else "dedup_id", "_placed"

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            hashed = [each or b"" for each in batch.column(column).to_pylist()]
            chosen = pa.array(partitions(hashed, tasks), pa.int32())
            yield pa.RecordBatch.from_arrays([*batch.columns, chosen], [*batch.schema.names, name])

    schema = t.StructType([*verdicts.schema.fields, t.StructField(name, t.IntegerType())])
    return verdicts.mapInArrow(run, schema).withColumn("dedup_partition", fn.col(name)).drop(name)


def _coordinates(topology: Topology, order: Order, of: str = "") -> list[str]:
    """Return SQL for a record's coordinates or, if ``of`` is "first_", for the coordinates of the sighting that the
    record repeats.
    """
    if order == "event_time":
        return ["0 AS source_topic", "dedup_partition AS source_partition", f"{OUTSIDE_KAFKA} AS source_offset"]
    topics = ", ".join(f"'{name}'" for name in topology.source.topics)
    position = f"int(array_position(array({topics}), {of}topic) - 1) AS source_topic"
    return [position, f"{of}partition AS source_partition", f"{of}offset AS source_offset"]


def _sightings(verdicts: DataFrame, topology: Topology, order: Order) -> DataFrame:
    """Return the sightings that result from the verdicts, with extensions if the topology sets `extend: true`."""
    key, payload = ("dedup_partition", "dedup_id"), "dedup_fingerprint" if topology.fingerprints_wanted else "NULL"
    fingerprint = f"coalesce({payload}, cast('' AS binary)) AS fingerprint"
    times = ("dedup_time_ms AS first_ms", "dedup_time_ms AS last_ms")
    unique = verdicts.where("verdict = 'unique'")
    first = unique.selectExpr(*key, *times, *_coordinates(topology, order), fingerprint)
    window = topology.window
    if not window.extend:
        return first
    # With `on_conflict: forward`, ID and payload together identify an event, so only a record with the same payload
    # repeats a sighting.
    same = [fingerprint] if topology.on_conflict is OnConflict.FORWARD else []
    same += _coordinates(topology, order, "first_")
    repeats = verdicts.where("verdict IN ('duplicate', 'conflict')")
    repeats = repeats.selectExpr(*key, "first_time_ms AS first_ms", *same, "dedup_time_ms")
    by = [name for name in repeats.columns if name != "dedup_time_ms"]
    latest = repeats.groupBy(*by).agg(fn.max("dedup_time_ms").alias("latest_ms"))
    capped = f"least(coalesce(latest_ms, first_ms), first_ms + {window.extend_at_most_ms})"
    extended = fn.expr(f"greatest(first_ms, {capped})")
    return first.join(latest, by, "left").withColumn("last_ms", extended).drop("latest_ms")


def _progress(
    verdicts: DataFrame, topology: Topology, tasks: int, source_partitions: Mapping[str, int], order: Order
) -> dict[int, SeedProgress]:
    """Return each task's stream time, and the greatest event time of each of its feeds."""
    moved = verdicts.where("verdict IN ('unique', 'duplicate', 'conflict', 'late')")
    grouped = moved.groupBy("dedup_partition", "topic", "partition").agg(fn.max("dedup_time_ms"))
    found: defaultdict[int, dict[tuple[str | None, int | None], int]] = defaultdict(dict)
    for task, topic, partition, max_ms in grouped.collect():
        found[task][topic, partition] = max_ms
    progress = {}
    for task in range(tasks):
        maxima = found[task]
        greatest = max(maxima.values(), default=BEFORE_ALL_TIME)
        feeds = [FeedTime(0, task, greatest, idle=False)] if topology.direct else []
        for position, name in enumerate(() if topology.direct else topology.source.topics):
            for partition in range(source_partitions[name]):
                # Rows without coordinates do not show their feed, so all feeds of a task get the task's greatest event
                # time.
                max_ms = greatest if order == "event_time" else maxima.get((name, partition), BEFORE_ALL_TIME)
                # A feed without history is idle, so that it does not hold stream time back.
                feeds.append(FeedTime(position, partition, max_ms, idle=max_ms == BEFORE_ALL_TIME))
        stream_time_ms = min((feed.max_ms for feed in feeds if not feed.idle), default=BEFORE_ALL_TIME)
        progress[task] = SeedProgress(stream_time_ms, tuple(feeds) if maxima else ())
    return progress


def seed_marks(spark: SparkSession, topology: Topology, settings: Settings) -> dict[int, changelog.SeedMark]:
    """Return the newest seed mark in each changelog partition. The result is empty if the fleet was not seeded."""
    options = {**kafka_options(settings), "subscribe": topology.changelog_topic, "startingOffsets": "earliest"}
    records = spark.read.format("kafka").options(**options).option("endingOffsets", "latest").load()
    marks = records.where(fn.col("key") == fn.lit(changelog.SEED_MARK_KEY)).groupBy("partition")
    newest = marks.agg(fn.max_by("value", "offset").alias("value"))
    return {row["partition"]: changelog.decode_seed_mark(bytes(row["value"])) for row in newest.collect()}


def changelog_rows(sightings: DataFrame, window: Window) -> DataFrame:
    """Encode sightings as changelog records (`dedup_partition`, `key`, `value`), one for each ID and segment."""
    segment = fn.col("last_ms") - fn.pmod(fn.col("last_ms"), fn.lit(window.segment_ms))
    grouped = sightings.withColumn("segment", segment).groupBy("dedup_partition", "segment", "dedup_id")
    seen = fn.sort_array(fn.collect_list(fn.struct(*_SEEN))).alias("seen")
    return grouped.agg(seen).mapInArrow(_encoded, "{} int, {} binary, {} binary".format(*_CHANGELOG_ROWS))


def _encoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        segments, ids = (batch.column(name).to_pylist() for name in ("segment", "dedup_id"))
        keys = [changelog.sighting_key(start, key) for start, key in zip(segments, ids, strict=True)]
        values = _encoded_values(batch.column("seen"))
        columns = [batch.column("dedup_partition"), pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, _CHANGELOG_ROWS)


def _encoded_values(lists: pa.ListArray) -> list[bytes]:
    """Encode each list of sightings. A fast path applies if every list has one sighting and no duplicate extended a
    sighting.
    """
    flat = lists.flatten()
    first, last, *place = (flat.field(name).to_numpy(zero_copy_only=False) for name in _SEEN[:-1])
    fingerprints = [each or b"" for each in flat.field("fingerprint").to_pylist()]
    printed = any(fingerprints)
    if len(flat) == len(lists) and np.array_equal(first, last) and (not printed or all(fingerprints)):
        return changelog.encode_single_column(first, place[0], place[1], place[2], fingerprints if printed else None)
    sources = map(Source, *(each.tolist() for each in place))
    seen = list(map(Sighting, first.tolist(), last.tolist(), sources, fingerprints))
    ends = np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))]).tolist()
    return [changelog.encode_sighting(seen[begin:end]) for begin, end in pairwise(ends)]
