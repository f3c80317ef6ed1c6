"""Sightings as DataFrames and as changelog records, and the seed marks of a changelog.

The records are encoded and decoded by `dedup.store.changelog`, the same code that a worker uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as fn
from pyspark.sql import types as t

from dedup.core.window import Sighting, Source, Window
from dedup.spark.kafka_source import kafka_options
from dedup.store.changelog import (
    SEED_MARK_KEY,
    SeedMark,
    decode_seed_mark,
    encode_sighting,
    encode_single_column,
    sighting_key,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dedup.settings import Settings
    from dedup.topology.model import Topology

_LONG, _INT, _BYTES = t.LongType(), t.IntegerType(), t.BinaryType()

SIGHTINGS: Final = t.StructType(
    [
        t.StructField("dedup_partition", _INT),
        t.StructField("dedup_id", _BYTES),
        t.StructField("first_ms", _LONG),
        t.StructField("last_ms", _LONG),
        t.StructField("source_topic", _INT),
        t.StructField("source_partition", _INT),
        t.StructField("source_offset", _LONG),
        t.StructField("fingerprint", _BYTES),
    ]
)
"""A sighting, with the changelog partition (the task), the state key, the interval of event times in ms, the
coordinates of its record (the topic as its position in `source.topics`), and the fingerprint, which may be empty.
"""

OUTSIDE_KAFKA: Final = (1 << 63) - 1
"""The source offset of a sighting whose record was read from files without Kafka coordinates."""

_CHANGELOG_ROWS: Final = t.StructType(
    [t.StructField("dedup_partition", _INT), t.StructField("key", _BYTES), t.StructField("value", _BYTES)]
)


def live_sightings(sightings: DataFrame, window: Window, stream_times_ms: Mapping[int, int]) -> DataFrame:
    """Return the sightings that have not expired, given the stream time of each task."""
    if not stream_times_ms:
        return sightings.limit(0)
    pairs = ((task, window.oldest_live_ms(time_ms)) for task, time_ms in stream_times_ms.items())
    oldest_ms = fn.create_map(*(fn.lit(each) for pair in pairs for each in pair))
    return sightings.where(fn.col("last_ms") >= oldest_ms[fn.col("dedup_partition")])


def seed_marks(spark: SparkSession, topology: Topology, settings: Settings) -> dict[int, SeedMark]:
    """Return the seed marks in a changelog, by partition; the result is empty for a fleet that was not seeded."""
    options = {**kafka_options(settings), "subscribe": topology.changelog_topic, "startingOffsets": "earliest"}
    records = spark.read.format("kafka").options(**options).option("endingOffsets", "latest").load()
    marks = records.where(fn.col("key") == fn.lit(SEED_MARK_KEY)).groupBy("partition")
    newest = marks.agg(fn.max_by("value", "offset").alias("value"))
    return {row["partition"]: decode_seed_mark(bytes(row["value"])) for row in newest.collect()}


def changelog_rows(sightings: DataFrame, window: Window) -> DataFrame:
    """Return sightings (`SIGHTINGS`) as changelog records, one for each ID and segment.

    The columns are `dedup_partition`, `key`, and `value`.
    """
    segment = fn.col("last_ms") - fn.pmod(fn.col("last_ms"), fn.lit(window.segment_ms))
    seen = fn.struct("first_ms", "last_ms", "source_topic", "source_partition", "source_offset", "fingerprint")
    grouped = (
        sightings.withColumn("segment", segment)
        .groupBy("dedup_partition", "segment", "dedup_id")
        .agg(fn.sort_array(fn.collect_list(seen)).alias("seen"))
    )
    return grouped.mapInArrow(_encoded, _CHANGELOG_ROWS)


def _encoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        ids = batch.column("dedup_id").to_pylist()
        keys = [sighting_key(start, key) for start, key in zip(batch.column("segment").to_pylist(), ids, strict=True)]
        values = _encoded_values(batch.column("seen"))
        columns = [batch.column("dedup_partition"), pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, _CHANGELOG_ROWS.fieldNames())


def _encoded_values(lists: pa.ListArray) -> list[bytes]:
    """Return the encoded value of each list of sightings, with a fast path for lists of one unextended sighting."""
    flat = lists.flatten()
    first, last = (flat.field(name).to_numpy(zero_copy_only=False) for name in ("first_ms", "last_ms"))
    places = [flat.field(name).to_numpy() for name in ("source_topic", "source_partition", "source_offset")]
    fingerprints = [each or b"" for each in flat.field("fingerprint").to_pylist()]
    printed = any(fingerprints)
    if len(flat) == len(lists) and np.array_equal(first, last) and (not printed or all(fingerprints)):
        return encode_single_column(first, places[0], places[1], places[2], fingerprints if printed else None)
    seen = [
        Sighting(first_ms, last_ms, Source(*source), fingerprint)
        for first_ms, last_ms, source, fingerprint in zip(
            first.tolist(),
            last.tolist(),
            zip(*(each.tolist() for each in places), strict=True),
            fingerprints,
            strict=True,
        )
    ]
    ends = np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))]).tolist()
    return [encode_sighting(seen[begin:end]) for begin, end in pairwise(ends)]
