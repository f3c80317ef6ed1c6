"""The schema of a Kafka record as a DataFrame row, which all Spark jobs share.

Coordinates (topic, partition, offset) are null for rows that were never in Kafka or whose coordinates were not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from dedup.errors import Problem, TopologyError

HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))

RECORDS: Final = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS),
        StructField("timestamp_ms", LongType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
    ]
)
"""Key and value are bytes or null, headers are an empty array if there are none, and the timestamp is in ms since 1970
UTC.
"""

COORDINATES: Final = ("topic", "partition", "offset")

_OPTIONAL: Final = ("key", "headers", "timestamp_ms", "timestamp", *COORDINATES)
_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "value": ("string", "binary"),
    "key": ("string", "binary"),
    "headers": ("array<struct<key:string,value:binary>>", "array<struct<key:string,value:string>>"),
    "timestamp_ms": ("bigint", "int"),
    "timestamp": ("timestamp",),
    "topic": ("string",),
    "partition": ("bigint", "int", "smallint", "tinyint"),
    "offset": ("bigint", "int"),
}


def records_of_kafka(df: DataFrame) -> DataFrame:
    """Return rows of Spark's Kafka source as `RECORDS`; headers need the source's option `includeHeaders`."""
    return df.select(
        F.col("key").cast(BinaryType()),
        F.col("value").cast(BinaryType()),
        headers_of(df).alias("headers"),
        F.unix_millis("timestamp").alias("timestamp_ms"),
        F.col("topic").cast(StringType()),
        F.col("partition").cast(IntegerType()),
        F.col("offset").cast(LongType()),
    )


def records_of_files(df: DataFrame, *, place: str = "the input", others: Sequence[str] = ()) -> DataFrame:
    """Return a table of records with the schema `RECORDS`, followed by the columns ``others`` of the table.

    Columns are found by name. The column `value` (text or bytes) is required. The columns `key`, `headers`, and
    `timestamp_ms` (integer) or `timestamp` are optional, and so are `topic`, `partition`, and `offset`, of which either
    all three or none must be present. Raises TopologyError, which lists every column that is missing or has an
    unsupported type, and names the table ``place``.
    """
    problems = [text for text in (_problem(df, name) for name in ("value", *_OPTIONAL)) if text]
    given = [name for name in COORDINATES if name in df.columns]
    if given and len(given) < len(COORDINATES):
        missing = ", ".join(name for name in COORDINATES if name not in given)
        problems.append(
            f"has {', '.join(given)} but not {missing}: give all three of topic, partition, offset, or none"
        )
    if problems:
        raise TopologyError([Problem(place, text) for text in problems])
    return df.select(*(_as_record(df, field).alias(field.name) for field in RECORDS.fields), *others)


def headers_of(df: DataFrame) -> Column:
    """Return the column `headers`, with an empty array in place of null or of a missing column.

    Spark 4.0 needs 16 µs to pass a null array to Python, but only 1 µs to pass an empty array (bench/README.md).
    """
    none = F.array().cast(HEADERS)
    return F.coalesce(F.col("headers").cast(HEADERS), none) if "headers" in df.columns else none


def _problem(df: DataFrame, name: str) -> str | None:
    if name not in df.columns:
        return "has no column `value`: name the column that holds the events" if name == "value" else None
    found = df.schema[name].dataType.simpleString()
    if found in _TYPES[name]:
        return None
    return f"column `{name}` is {found}; write it as {' or '.join(_TYPES[name])}"


def _as_record(df: DataFrame, field: StructField) -> Column:
    name, kind = field.name, field.dataType
    if name == "headers":
        return headers_of(df)
    if name == "timestamp_ms" and name not in df.columns and "timestamp" in df.columns:
        return F.unix_millis("timestamp")
    if name not in df.columns:
        return F.lit(None).cast(kind)
    return F.col(name).cast(kind)
