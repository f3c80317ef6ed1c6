"""Finds JSON values that Spark's parser would change without an error: numbers that a column cannot keep exactly, and
times and dates that are not RFC 3339 strings.

Spark's JSON parser reports a value of the wrong type, but not a number that it rounds: `1.005` becomes 1.01 in a column
of type DECIMAL(10,2), `12345678901234567.89` becomes `1.2345678901234568E16` in a column of type STRING, and `1e400`
becomes infinity in a column of type DOUBLE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from functools import reduce
from operator import or_
from typing import Final, cast

from pyspark.sql import Column
from pyspark.sql import functions as fn
from pyspark.sql import types as t

from dedup.core.exact_json import JsonValue, Number, Unreadable, decode

_GREATEST: Final = {t.FloatType: 3.4028234663852886e38, t.DoubleType: 1.7976931348623157e308}
_INEXACT: Final = r"[0-9.]{17}|[0-9][eE][-+]?[0-9]"
"""Matches every number that a double cannot hold exactly, and also other texts. A double holds any 15 digits."""
_FRACTION: Final = r"|[.][\p{Nd},]{%d}|[\p{Nd}.,][eE]|\\u"
"""Matches every number with at least this many digits after the point, and also other texts.

A JSON string can also contain a number. Java's decimals accept the digits of any script, Spark ignores commas in such
strings, and any character of a string may be escaped.
"""
# Spark cannot read the lower-case letters that `core.event_time` accepts.
_RFC3339: Final = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$"
_DAY: Final = r"^\d{4}-\d\d-\d\d$"


def inexact(value: Column, payload: t.StructType) -> Column:
    """Return a column with a message about a number in the JSON text ``value`` that a column of ``payload`` cannot
    keep, or null.

    The column also contains a message if ``value`` is not strict JSON (RFC 8259) and might contain such a number.
    """
    kinds = list(_leaves(payload))
    scales = [kind.scale for kind in kinds if isinstance(kind, t.DecimalType)]
    if not scales and not any(isinstance(kind, (t.StringType, *_GREATEST)) for kind in kinds):
        return fn.lit(None).cast("string")
    # Few values need the slow check, because few have a number with so many digits or with an exponent.
    suspect = value.cast("string").rlike(_INEXACT + (_FRACTION % (min(scales) + 1) if scales else ""))
    look = fn.udf(_finder(payload), "string", useArrow=False)
    return look(fn.when(suspect, value.cast("binary")))


def unclear_times(value: Column, payload: t.StructType) -> Column:
    """Return a column with a message if a TIMESTAMP or DATE in the JSON text ``value`` is not a time or a day of RFC
    3339, or null.

    Spark's JSON parser reads a number as seconds. It adds today's date to `08:00`, and the session's time zone to a
    time without an offset from UTC. It reads the day `20240131` as one of the year 57385, and `2024` as January 1.
    """
    if not _has_times(payload):
        return fn.lit(None).cast("string")
    texts = fn.from_json(value.cast("string"), cast("t.StructType", _with_texts(payload)))
    text = "a TIMESTAMP is not a time such as 2024-01-31T00:00:00Z, or a DATE is not a day such as 2024-01-31"
    return fn.when(_unclear(texts, payload), fn.lit(text))


def _has_times(kind: t.DataType) -> bool:
    match kind:
        case t.StructType():
            return any(_has_times(each.dataType) for each in kind.fields)
        case t.ArrayType():
            return _has_times(kind.elementType)
        case t.MapType():
            return _has_times(kind.valueType)
        case _:
            return isinstance(kind, t.TimestampType | t.DateType)


def _with_texts(kind: t.DataType) -> t.DataType:
    """Return a type with STRING instead of TIMESTAMP and DATE, which keeps the text of any JSON value."""
    match kind:
        case t.StructType():
            return t.StructType([t.StructField(each.name, _with_texts(each.dataType)) for each in kind.fields])
        case t.ArrayType():
            return t.ArrayType(_with_texts(kind.elementType))
        case t.MapType():
            return t.MapType(kind.keyType, _with_texts(kind.valueType))
        case t.TimestampType() | t.DateType():
            return t.StringType()
        case _:
            return kind


def _unclear(column: Column, kind: t.DataType) -> Column:
    """Return a condition that is true if a column of type `_with_texts` has an unclear time or day."""
    match kind:
        case t.StructType():
            parts = [each for each in kind.fields if _has_times(each.dataType)]
            return reduce(or_, (_unclear(column.getField(each.name), each.dataType) for each in parts))
        case t.ArrayType():
            return fn.exists(column, lambda item: _unclear(item, kind.elementType))
        case t.MapType():
            return _unclear(fn.map_values(column), t.ArrayType(kind.valueType))
        case _:
            return column.isNotNull() & ~column.rlike(_DAY if isinstance(kind, t.DateType) else _RFC3339)


def _leaves(kind: t.DataType) -> Iterator[t.DataType]:
    match kind:
        case t.StructType():
            for field in kind.fields:
                yield from _leaves(field.dataType)
        case t.ArrayType():
            yield from _leaves(kind.elementType)
        case _:
            yield kind


def _finder(payload: t.StructType) -> Callable[[bytes | None], str | None]:
    def find(value: bytes | None) -> str | None:
        if value is None:
            return None
        try:
            record = decode(bytes(value))
        except Unreadable as error:
            return str(error)
        if not isinstance(record, dict):
            return None
        lost = [field for field in payload.fields if _is_lost(field.dataType, record.get(field.name))]
        names = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in lost)
        return f"the value has a number with more digits than its column can keep: {names}" if lost else None

    return find


def _is_lost(kind: t.DataType, value: JsonValue) -> bool:
    """Return whether ``value`` has a number that a column of this type would round without an error from Spark."""
    match kind, value:
        case t.StructType(), dict():
            return any(_is_lost(field.dataType, value.get(field.name)) for field in kind.fields)
        case t.ArrayType(), list():
            return any(_is_lost(kind.elementType, each) for each in value)
        case t.DecimalType(), Number():
            return not _fits(value.text, kind.scale)
        case t.DecimalType(), str():
            return not _fits(value.replace(",", ""), kind.scale)
        case t.FloatType() | t.DoubleType(), Number():
            return abs(float(value.text)) > _GREATEST[type(kind)]
        case t.StringType(), Number() | list() | dict():
            return _is_rounded(value)
        case _:
            return False


def _fits(text: str, scale: int) -> bool:
    """Return whether a number has at most ``scale`` digits after the point; trailing zeros do not count.

    Also return true for a text that is not a number, and for a number with too many digits before the point, because
    Spark reports both.
    """
    try:
        _, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation:
        return True
    if not isinstance(exponent, int) or not any(digits):
        return True
    shown = "".join(map(str, digits))
    return len(shown) - len(shown.rstrip("0")) >= -exponent - scale


def _is_rounded(value: JsonValue) -> bool:
    """Return whether Spark changes a number when it writes this JSON value into a column of strings."""
    match value:
        case Number() if value.is_integer:
            return False
        case Number():
            try:
                return Decimal(repr(float(value.text))) != Decimal(value.text)
            except InvalidOperation:  # an exponent of 19 digits
                return True
        case list():
            return any(map(_is_rounded, value))
        case dict():
            return any(map(_is_rounded, value.values()))
        case _:
            return False
