"""Defines the DataFrame schema of a Kafka record, which all Spark jobs share.

Topic, partition, and offset are null for rows that were never in Kafka or whose coordinates were not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField

from dedup.errors import Problem, TopologyError

ARROW_RECORDS: Final = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        "timestamp_ms": pa.int64(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
    }
)
"""Headers are an empty array if there are none, and the timestamp is in ms since 1970-01-01 UTC."""
RECORDS: Final = from_arrow_schema(ARROW_RECORDS)
HEADERS: Final = RECORDS["headers"].dataType
COORDINATES: Final = ("topic", "partition", "offset")

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


def as_records(df: DataFrame, *, place: str = "the input", others: Sequence[str] = ()) -> DataFrame:
    """Convert a DataFrame, for example from Spark's Kafka source, to the schema `RECORDS`, and keep the columns
    ``others``.

    The column `value` (text or bytes) is required. The columns `key`, `headers`, and either `timestamp_ms` (integer) or
    `timestamp` are optional. The columns `topic`, `partition`, and `offset` must be either all present or all absent.
    Raises TopologyError with a list of all columns that are missing or have an unsupported type; ``place`` is the
    DataFrame's name in the error.
    """
    problems = [text for text in (_problem(df, name) for name in _TYPES) if text]
    given = [name for name in COORDINATES if name in df.columns]
    if given and len(given) < len(COORDINATES):
        missing = ", ".join(name for name in COORDINATES if name not in given)
        problems.append(
            f"has {', '.join(given)} but not {missing}: give all three of {', '.join(COORDINATES)}, or none"
        )
    if problems:
        raise TopologyError([Problem(place, text) for text in problems])
    return df.select(*(_as_record(df, field).alias(field.name) for field in RECORDS.fields), *others)


def headers_of(df: DataFrame) -> Column:
    """Return the column `headers` with empty arrays instead of nulls, or only empty arrays if ``df`` has no such
    column.

    Spark 4.0 needs 16 µs to pass a null array to Python, but only 1 µs to pass an empty array (bench/README.md).
    """
    none = F.array().cast(HEADERS)
    return F.coalesce(F.col("headers").cast(HEADERS), none) if "headers" in df.columns else none


def _problem(df: DataFrame, name: str) -> str | None:
    if name not in df.columns:
        return "has no column `value`: rename the column that holds the events" if name == "value" else None
    found = df.schema[name].dataType.simpleString()
    if found in _TYPES[name]:
        return None
    return f"column `{name}` is {found}; write it as {' or '.join(_TYPES[name])}"


def _as_record(df: DataFrame, field: StructField) -> Column:
    if field.name == "headers":
        return headers_of(df)
    if field.name in df.columns:
        return F.col(field.name).cast(field.dataType)
    if field.name == "timestamp_ms" and "timestamp" in df.columns:
        return F.unix_millis("timestamp")
    return F.lit(None).cast(field.dataType)
