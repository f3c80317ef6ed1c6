"""Backfill: exact verdicts over a finished table of records.  (The body follows; the signatures stand.)"""

from __future__ import annotations

from typing import Literal

from pyspark.sql import DataFrame
from pyspark.sql.types import IntegerType, LongType, StringType, StructField

from dedup.topology.model import Topology

Order = Literal["offsets", "event_time"]
"""``offsets``: rows with Kafka coordinates, in the log's order. ``event_time``: without; nothing is late."""

VERDICTS = ("unique", "duplicate", "conflict", "late", "dead_letter", "exempt", "fail")
"""``exempt``: forwarded unjudged by policy (reason missing_id or tombstone). A forwarded conflict is ``unique`` with
reason ``conflict``. ``fail``: a policy says that the worker stops here; `backfill` then publishes nothing."""

JUDGED = (
    StructField("verdict", StringType()),
    StructField("reason", StringType()),  # code of a dead letter, exemption, forwarded conflict or failure
    StructField("detail", StringType()),  # sentence of a dead letter
    StructField("dedup_partition", IntegerType()),  # the task: source partition where the topology is direct
    StructField("stream_time_ms", LongType()),  # the task's stream time, this record included; null if not judged
    StructField("first_time_ms", LongType()),  # the sighting a duplicate repeats (or a forwarded conflict contradicts)
    StructField("first_topic", StringType()),
    StructField("first_partition", IntegerType()),
    StructField("first_offset", LongType()),
)
"""`dedup_time_ms` is the time as judged (the ceiling where a future time was clamped)."""


def judged(df: DataFrame, topology: Topology, *, now_ms: int, order: Order) -> DataFrame:
    """Return the records with `columns.IDENTIFIED` and `JUDGED` after them; one row per record, in no order."""
    raise NotImplementedError
