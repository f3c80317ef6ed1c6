"""Records as an audit compares them: digests of all of a record, and the headers that dedup appends, taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as fn

from dedup.proof.evidence import (
    DIGEST_HEADER,
    REASON_HEADER,
    REPLAYED_HEADER,
    SOURCE_HEADER,
    TIMESTAMP_HEADER,
    VERDICT_HEADER,
)
from dedup.spark.rows import HEADERS

if TYPE_CHECKING:
    from pyspark.sql import Column

_POSITION = r"^(.*)/(\d+)/(\d+)$"
_DIGITS = 32
"""Of SHA-256, in hexadecimal: 128 bits, as the verifier's."""


def as_leaf(rows: DataFrame) -> DataFrame:
    """Return the rows, persisted, with a plan that begins with them.

    An audit asks a dozen questions of the same rows. With all that is before in each of their plans, planning takes
    longer than the answers. The RDD below keeps its lineage: what a lost executor held is computed again.
    """
    session, plan = rows.sparkSession, rows._jdf  # noqa: SLF001  only the JVM makes a DataFrame of an RDD of its rows
    made = session._jsparkSession.internalCreateDataFrame(  # noqa: SLF001
        plan.queryExecution().toRdd(),
        plan.schema(),
        False,  # noqa: FBT003 - no stream
    )
    return DataFrame(made, session).persist()


def headers_or_none(column: str = "headers") -> Column:
    """Return a record's headers; none where Spark has null."""
    return fn.coalesce(fn.col(column), fn.array().cast(HEADERS))


def with_header(headers: Column, name: str, value: Column) -> Column:
    """Return headers with one more at the end."""
    added = fn.array(fn.struct(fn.lit(name).alias("key"), value.cast("binary").alias("value"))).cast(HEADERS)
    return fn.concat(headers, added)


def digest(headers: Column, timestamp_ms: Column) -> Column:
    """Return a digest of key, value, headers and timestamp; every part carries its length, null is no length.

    SHA-256, not a fast checksum: a chosen collision would hide a change.
    """
    parts = [
        timestamp_ms.cast("string").cast("binary"),
        *(fn.concat(fn.lit(" "), _length(name)).cast("binary") for name in ("key", "value")),
        fn.lit(" ").cast("binary"),
        *(fn.coalesce(fn.col(name), fn.lit(b"")) for name in ("key", "value")),
        fn.to_json(headers).cast("binary"),
    ]
    return fn.unhex(fn.substring(fn.sha2(fn.concat(*parts), 256), 1, _DIGITS))


def _length(name: str) -> Column:
    return fn.coalesce(fn.length(fn.col(name)), fn.lit(-1)).cast("string")


def last_header(name: str, headers: Column | None = None) -> Column:
    """Return the value of the last header of a name as text; null where there is none."""
    own = headers_or_none() if headers is None else headers
    named = fn.filter(own, lambda each: each["key"] == name)
    return fn.try_element_at(named, fn.lit(-1))["value"].cast("string")


def source_columns(text: Column) -> list[Column]:
    """Return topic, partition and offset of a text such as ``orders/0/12``; null where it is none."""
    kinds = [("string", "source_topic"), ("int", "source_partition"), ("long", "source_offset")]
    return [
        fn.nullif(fn.regexp_extract(text, _POSITION, group + 1), fn.lit("")).cast(kind).alias(name)
        for group, (kind, name) in enumerate(kinds)
    ]


def filed(records: DataFrame, topics: Sequence[str], tail: Sequence[str]) -> DataFrame:
    """Return the records of a side topic: the source position they name, their reason, and a digest of what they were.

    ``strange`` where they name no record of the source topics; ``stand_in`` where a digest stands for the value.
    """
    headers = headers_or_none()
    replaced = last_header(DIGEST_HEADER)
    kept = fn.when(replaced.isNotNull(), fn.slice(headers, 1, fn.size(headers) - 1)).otherwise(headers)
    original = fn.when(fn.size(kept) > len(tail), fn.slice(kept, 1, fn.size(kept) - len(tail))).otherwise(
        fn.array().cast(HEADERS)
    )
    timestamp = fn.coalesce(last_header(TIMESTAMP_HEADER).cast("long"), fn.lit(-(1 << 62)))
    found = records.select(
        *source_columns(last_header(SOURCE_HEADER)),
        fn.coalesce(last_header(REASON_HEADER), fn.lit("")).alias("filed_reason"),
        digest(original, timestamp).alias("filed_digest"),
        replaced.alias("stand_in"),
        fn.concat_ws("/", "topic", "partition").alias("filed_in"),
        fn.col("offset").alias("filed_at"),
    )
    known = fn.coalesce(fn.col("source_topic").isin(*topics), fn.expr("false"))
    return found.withColumn("strange", ~known)


def forwarded_by_replay(topics: Sequence[str]) -> Column:
    """Tell whether `dedup replay --late --forward` put a record into the output: its two headers stand last."""
    headers = headers_or_none()
    last, before = fn.try_element_at(headers, fn.lit(-1)), fn.try_element_at(headers, fn.lit(-2))
    place = fn.regexp_extract(last["value"].cast("string"), _POSITION, 1).isin(*topics)
    marked = (before["key"] == VERDICT_HEADER) & (before["value"].cast("string") == "late")
    return fn.coalesce(marked & (last["key"] == REPLAYED_HEADER) & place, fn.expr("false"))
