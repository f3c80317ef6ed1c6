"""Verdicts as the records a worker would have written: which topic each goes to, and with which headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from dedup.core.event_time import RecordTime
from dedup.spark.rows import HEADERS
from dedup.topology.model import LateForward, LateTo
from dedup.worker.publish import DETAIL, FIRST_SOURCE, FIRST_TIME, REASON, SOURCE, TIMESTAMP, VERDICT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dedup.topology.model import Topology


def outputs(verdicts: DataFrame, topology: Topology) -> dict[str, DataFrame]:
    """Return, by topic, what a worker writes there: key, value, headers, timestamp_ms, in no order.

    Rows without coordinates lack the header `dedup-source`. What the topology drops or only counts is in none.
    """
    place = _place("topic", "partition", "offset")
    verdict = F.col("verdict")
    provenance = [_header(SOURCE, place), _header(TIMESTAMP, F.col("timestamp_ms").cast("string"))]
    first = [
        _header(FIRST_TIME, F.col("first_time_ms").cast("string")),
        _header(FIRST_SOURCE, _place("first_topic", "first_partition", "first_offset")),
    ]
    found: dict[str, DataFrame] = {}
    if topology.output is not None:
        found[topology.output.topic] = _forwarded(verdicts, topology, place, headers=topology.output.headers)
    repeats = ["duplicate"] if topology.conflicts is not None else ["duplicate", "conflict"]
    if topology.duplicates is not None:
        found[topology.duplicates] = _lines(verdicts.where(verdict.isin(repeats)), first)
    if topology.conflicts is not None:
        found[topology.conflicts] = _lines(verdicts.where(verdict == "conflict"), first)
    if isinstance(topology.late, LateTo):
        found[topology.late.topic] = _lines(verdicts.where(verdict == "late"), provenance)
    reasoned = [_header(REASON, F.col("reason")), _header(DETAIL, F.col("detail")), *provenance]
    found[topology.dead_letter] = _lines(verdicts.where(verdict == "dead_letter"), reasoned)
    return found


def _forwarded(verdicts: DataFrame, topology: Topology, place: Column, *, headers: bool) -> DataFrame:
    verdict = F.col("verdict")
    kinds = ["unique", "exempt"]
    mark = F.when(verdict.isin("unique", "exempt"), F.col("reason"))
    if isinstance(topology.late, LateForward):
        kinds.append("late")
        mark = F.when(verdict == "late", "late").otherwise(mark)
    added = [_header(VERDICT, mark)]
    if headers:
        added.append(_header(SOURCE, place))
    time_ms = F.col("timestamp_ms")
    if isinstance(topology.event_time, RecordTime):
        # A clamped time is emitted as it was judged.
        time_ms = F.when(verdict == "exempt", time_ms).otherwise(F.col("dedup_time_ms"))
    return _lines(verdicts.where(verdict.isin(kinds)), added, time_ms)


def _lines(rows: DataFrame, added: list[Column], time_ms: Column | None = None) -> DataFrame:
    own = F.coalesce(F.col("headers"), F.array().cast(HEADERS))
    ours = F.filter(F.array(*added), lambda each: each["value"].isNotNull())
    return rows.select(
        "key",
        "value",
        F.concat(own, ours).cast(HEADERS).alias("headers"),
        (F.col("timestamp_ms") if time_ms is None else time_ms).alias("timestamp_ms"),
    )


def _header(name: str, text: Column) -> Column:
    return F.struct(F.lit(name).alias("key"), F.encode(text, "UTF-8").alias("value"))


def _place(topic: str, partition: str, offset: str) -> Column:
    """Null where there are no coordinates."""
    return F.concat(F.col(topic), F.lit("/"), F.col(partition).cast("string"), F.lit("/"), F.col(offset).cast("string"))
