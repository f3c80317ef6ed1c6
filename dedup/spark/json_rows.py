"""Lines of JSON as rows of records, and rows of any table as events of JSON: neither leaves anything out."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StructType, TimestampNTZType, TimestampType

from dedup.spark.rows import RECORDS

_SHOWN: Final = 200
"""Characters of a refused line."""
_TO_MS: Final = len("2024-01-01T00:00:00.000")
_ROWS: Final = (
    "key string, value string, headers array<struct<key:string,value:string>>, timestamp_ms bigint, topic string, "
    "`partition` int, `offset` bigint"
)


def json_rows(lines: DataFrame) -> DataFrame:
    """Return lines (`value`) as rows of `rows.RECORDS` as text; the job fails at a line that is none.

    A line without the member `value` would be a tombstone, and a member of another name would be left out, such as a
    timestamp under another name: both are refused, with the line.
    """
    members = F.json_object_keys("value")
    strange = F.array_except(members, F.array(*map(F.lit, RECORDS.fieldNames())))
    others = ", ".join(name for name in RECORDS.fieldNames() if name != "value")
    rule = f"each line of json-records is an object with `value`, which may be null, and of others only {others}; not: "
    text = F.concat(F.lit(rule), F.substring("value", 1, _SHOWN))
    whole = F.array_contains(members, "value") & (F.size(strange) == 0)
    row = F.from_json("value", _ROWS, {"mode": "FAILFAST"})
    checked = F.when(F.coalesce(whole, F.lit(False)), row).otherwise(F.raise_error(text))  # noqa: FBT003 - a column
    return lines.select(checked.alias("row")).select("row.*")


def as_events(table: DataFrame) -> Column:
    """Return each row as JSON without its null columns, as bytes.

    A time finer than milliseconds keeps its digits, which Spark would cut off: two events would become one.
    """
    columns = [_exact(F.col(f"`{field.name}`"), field.dataType).alias(field.name) for field in table.schema.fields]
    return F.to_json(F.struct(*columns)).cast(BinaryType())


def _exact(column: Column, kind: DataType) -> Column:
    """Return a column whose times are text in Spark's own format, longer where milliseconds do not hold them."""
    match kind:
        case TimestampType():
            return F.concat(_time(column), F.date_format(column, "XXX"))
        case TimestampNTZType():
            return _time(column)
        case StructType():
            members = [_exact(column[field.name], field.dataType).alias(field.name) for field in kind.fields]
            return F.when(column.isNotNull(), F.struct(*members))
        case ArrayType():
            return F.transform(column, lambda each: _exact(each, kind.elementType))
        case MapType():
            return F.transform_values(column, lambda _, each: _exact(each, kind.valueType))
        case _:
            return column


def _time(column: Column) -> Column:
    text = F.translate(column.cast("string"), " ", "T")
    dotted = F.when(F.instr(text, ".") > 0, text).otherwise(F.concat(text, F.lit(".")))
    return F.when(F.length(dotted) < _TO_MS, F.rpad(dotted, _TO_MS, "0")).otherwise(dotted)
