"""Converts the rows of a table to events in JSON, and finds columns that a topology can never judge.

The bytes of an event depend only on its row, never on the settings of the Spark session. Otherwise, an ID that one
session stored would not be found in another session.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from inspect import signature
from typing import Any, Final, assert_never

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    CharType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    UserDefinedType,
    VarcharType,
    VariantType,
)

from dedup.core.event_time import FieldTime, RecordTime, TimeUnit
from dedup.core.tracking_id import (
    CodeRule,
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyFieldRule,
    KeyRule,
    PartsRule,
    Path,
    RawContentRule,
    Rule,
    alternatives_of,
    format_path,
    member_paths,
)
from dedup.errors import Problem, SettingsError
from dedup.topology.model import Topology

_JSON: Final = {"ignoreNullFields": "true", "timeZone": "UTC", "pretty": "false"}
"""Options of `to_json` that would otherwise come from the session."""
_MS_LENGTH: Final = len("2024-01-01T00:00:00.000")
_REPLACEMENT: Final = "\ufffd"
_BYTES: Final = "ISO-8859-1"
"""The encoding in which each byte is one character, so that text in this encoding can hold any bytes."""
_BARE: Final = "\u0100"
"""The character that encloses unquoted text in the JSON. No text in the encoding `_BYTES` contains this character."""
_MOST_NAMES: Final = 20
_MOST_DAYS: Final = 2**63 // 86_400_000_000
"""The last day, in days since 1970, that fits into 64 bits as microseconds."""
_INTEGERS: Final = frozenset({"tinyint", "smallint", "int", "bigint"})


def quoted(name: str) -> str:
    """Return the name of a column as Spark's parser expects it."""
    return "`{}`".format(name.replace("`", "``"))


def as_events(table: DataFrame) -> Column:
    """Return a column with each row as JSON bytes, without null members.

    Times are in UTC. Times that are more precise than milliseconds keep all digits, because truncation could make
    different events equal. NaN counts as null, because pandas writes NaN for a missing number. JSON cannot express a
    string that is not UTF-8 or an infinite number. The result then contains the string's bytes or the word Infinity,
    and is not JSON, so the event becomes a dead letter. Raises SettingsError if Spark cannot tell the members of a
    struct apart, or if the keys of a map have no text that is the same for equal keys.
    """
    _refuse_unclear_members(table)
    columns = [(F.col(quoted(field.name)), field) for field in table.schema.fields]
    json = F.to_json(_members(columns, raw=False), _JSON)
    raw = F.to_json(_members(columns, raw=True), _JSON)
    bare = F.replace(F.replace(raw, F.lit(f'"{_BARE}'), F.lit("")), F.lit(f'{_BARE}"'), F.lit(""))
    # Values that Spark itself writes, such as variants, can contain other characters, which `encode` would reject.
    raw_bytes = F.encode(F.regexp_replace(bare, r"[^\x00-\xff]", "?"), _BYTES)
    # Searching every string of every row for bytes that are not UTF-8 would take too long. Java replaces such bytes
    # with U+FFFD, which can be found quickly in the JSON text.
    suspicious = F.contains(json, F.lit(_REPLACEMENT)) | F.contains(json, F.lit('Infinity"'))
    return F.when(suspicious & _any_is_odd(columns), raw_bytes).otherwise(json.cast(BinaryType()))


def _refuse_unclear_members(table: DataFrame) -> None:
    keys = ((field.name, kind) for field in table.schema.fields for kind in _keys_without_text(field.dataType))
    text = "has a map whose keys are {}, which Spark writes into JSON as different texts for equal keys; cast the keys"
    unstable = [Problem(f"column {name}", f"{text.format(kind)} to string or drop the column") for name, kind in keys]
    if unstable:
        raise SettingsError(unstable)
    if not any(_unclear_members(table.schema, str.lower)):
        return
    by_case = is_case_sensitive(table.sparkSession)
    remedy = "rename one of them" + ("" if by_case else ", or set `spark.sql.caseSensitive` if only their case differs")
    problems = [
        Problem(f"column {field.name}", f"has a struct with more than one member `{name}`; {remedy}")
        for field in table.schema.fields
        for name in sorted(set(_unclear_members(field.dataType, str if by_case else str.lower)))
    ]
    if problems:
        raise SettingsError(problems)


def is_case_sensitive(session: SparkSession) -> bool:
    """Return whether the session distinguishes upper and lower case in names."""
    # Spark keeps the value as it was written, such as TRUE.
    return str(session.conf.get("spark.sql.caseSensitive")).strip().lower() == "true"


def _unclear_members(kind: DataType, alike: Callable[[str], str]) -> Iterator[str]:
    match kind:
        case StructType():
            yield from (name for name, times in Counter(map(alike, kind.names)).items() if times > 1)
            for field in kind.fields:
                yield from _unclear_members(field.dataType, alike)
        case ArrayType():
            yield from _unclear_members(kind.elementType, alike)
        case MapType():
            yield from _unclear_members(kind.keyType, alike)
            yield from _unclear_members(kind.valueType, alike)
        case _:
            pass


def _keys_without_text(kind: DataType) -> Iterator[str]:
    """Yield the type of the keys of each map whose keys `to_json` writes as Java writes objects: ``[B@4b4def89``."""
    match _stored(kind):
        case StructType(fields=fields):
            for field in fields:
                yield from _keys_without_text(field.dataType)
        case ArrayType(elementType=element):
            yield from _keys_without_text(element)
        case MapType(keyType=key, valueType=value):
            if isinstance(_stored(key), BinaryType | ArrayType | StructType):
                yield key.simpleString()
            yield from _keys_without_text(value)
        case _:
            pass


def _members(columns: Sequence[tuple[Column, StructField]], *, raw: bool) -> Column:
    return F.struct(*(_member(column, field, raw=raw) for column, field in columns))


def _member(column: Column, field: StructField, *, raw: bool) -> Column:
    name = field.name.encode().decode(_BYTES) if raw else field.name
    written = _exact(column, field.dataType, raw=raw)
    if isinstance(field.dataType, FloatType | DoubleType | DateType):
        # The metadata tells Spark whether the column has a DEFAULT; if so, Spark also writes nulls.
        return written.alias(name, metadata=field.metadata)
    return written.alias(name)


def _exact(column: Column, kind: DataType, *, raw: bool) -> Column:
    """Return the column in a form that `to_json` writes without loss.

    With ``raw``, the characters of strings are the bytes of the original strings, and numbers are between `_BARE`.
    """

    def inner(of: DataType) -> Callable[[Column], Column]:
        return lambda each: _exact(each, of, raw=raw)

    match kind:
        case StructType():
            members = [(column[field.name], field) for field in kind.fields]
            return F.when(column.isNotNull(), _members(members, raw=raw))
        case ArrayType():
            return F.transform(column, inner(kind.elementType))
        case MapType():
            exact = inner(kind.valueType)
            written = F.transform_values(column, lambda _, each: exact(each))
            if not (raw and isinstance(kind.keyType, StringType)):
                return written
            return F.transform_keys(written, lambda key, _: _exact(key, StringType(), raw=True))
        case _:
            return _scalar(column, kind, raw=raw)


def _scalar(column: Column, kind: DataType, *, raw: bool) -> Column:
    match kind:
        case TimestampType():
            # A cast to text would use the session's time zone.
            epoch = F.lit("1970-01-01 00:00:00").cast(TimestampNTZType())
            in_utc = F.timestamp_add("MICROSECOND", F.unix_micros(column), epoch)
            return F.concat(_time(in_utc), F.lit("Z"))
        case TimestampNTZType():
            return _time(column)
        case DateType():
            # A cast of the date itself would follow `spark.sql.legacy.timeParserPolicy`. A cast to a timestamp fails
            # after the year 294247, so that a later date is shown by its number of days since 1970.
            days = F.unix_date(column)
            text = F.substring_index(
                F.when(days.between(-_MOST_DAYS, _MOST_DAYS), column).cast(TimestampNTZType()).cast("string"), " ", 1
            )
            return F.coalesce(text, days.cast("string"))
        case FloatType() | DoubleType():
            number = F.when(~F.isnan(column), column)
            return F.concat(F.lit(_BARE), number.cast(StringType()), F.lit(_BARE)) if raw else number
        case StringType() | CharType() | VarcharType() if raw:
            return F.decode(column.cast(BinaryType()), _BYTES)
        case _:
            return column


def _time(column: Column) -> Column:
    """Return times as text in Spark's JSON format, with extra digits for times that are more precise than ms."""
    text = F.translate(column.cast(StringType()), " ", "T")
    dotted = F.when(F.instr(text, ".") > 0, text).otherwise(F.concat(text, F.lit(".")))
    return F.when(F.length(dotted) < _MS_LENGTH, F.rpad(dotted, _MS_LENGTH, "0")).otherwise(dotted)


def _any_is_odd(columns: Sequence[tuple[Column, StructField]]) -> Column:
    # A chain of `|` over a thousand columns would be too deep for Spark's optimizer.
    found = (_is_odd(column, field.dataType) for column, field in columns)
    return F.exists(F.array(F.lit(False), *found), lambda is_odd: is_odd)  # noqa: FBT003 - a column


def _is_odd(column: Column, kind: DataType) -> Column:
    """Return whether the column contains a string that is not UTF-8 or an infinite number."""
    match kind:
        case StringType() | CharType() | VarcharType():
            return ~F.is_valid_utf8(column)
        case FloatType() | DoubleType():
            return F.abs(column) == F.lit(float("inf"))
        case StructType():
            return _any_is_odd([(column[field.name], field) for field in kind.fields])
        case ArrayType():
            return F.exists(column, lambda each: _is_odd(each, kind.elementType))
        case MapType():
            keys = F.exists(F.map_keys(column), lambda each: _is_odd(each, kind.keyType))
            return keys | F.exists(F.map_values(column), lambda each: _is_odd(each, kind.valueType))
        case _:
            return F.lit(False)  # noqa: FBT003 - a column


def same_ids(before: str, now: str) -> bool:
    """Return whether equal values of two column types make equal tracking IDs."""
    return before == now or {before, now} <= _INTEGERS


# PySpark 4.2 requires a time zone for timestamps; earlier versions do not have the parameter.
_ZONED: Final[dict[str, Any]] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}


def not_for_python(schema: StructType) -> Iterator[Problem]:
    """Yield a problem for each column that Spark cannot pass to a Python task and back."""
    for field in schema.fields:
        try:
            to_arrow_schema(StructType([field]), **_ZONED)
        except (PySparkException, ValueError):  # pyarrow's ValueError: the elements of `array()` have no type
            text = (
                f"is {field.dataType.simpleString()}, which Spark cannot pass to Python; cast it to string or drop it"
            )
            yield Problem(f"column {field.name}", text)


def lacking(topology: Topology, absent: Collection[str], remedy: str) -> Iterator[Problem]:
    """Yield a problem for the tracking ID or the event time if no record can have one, because the input lacks the
    columns ``absent`` of `columns.RECORDS`.
    """
    if not any(_can_have(rule, absent) for rule in alternatives_of(topology.tracking_id.rule)):
        yield Problem("tracking_id", f"is taken from the record's key or a header, {remedy}")
    if isinstance(topology.event_time, RecordTime) and "timestamp_ms" in absent:
        yield Problem("event_time", f"is the record's timestamp, {remedy}")


def _can_have(rule: Rule, absent: Collection[str]) -> bool:
    match rule:
        case KeyRule() | KeyFieldRule():
            return "key" not in absent
        case HeaderRule():
            return "headers" not in absent
        case PartsRule(parts):
            found = [_can_have(part.rule, absent) for part in parts]
            return any(found) and all(part.absent_is_value or there for part, there in zip(parts, found, strict=True))
        case FieldRule() | FieldsRule() | ContentRule() | RawContentRule() | CodeRule() | FirstOfRule():
            return True
        case never:
            assert_never(never)


def unfit_columns(schema: StructType, topology: Topology) -> Iterator[Problem]:
    """Yield a problem for each path of the topology that no event from a row with this schema has, or whose type
    cannot be an ID or an event time.
    """
    rule = topology.tracking_id.rule
    parts = (part.rule for each in alternatives_of(rule) if isinstance(each, PartsRule) for part in each.parts)
    of_parts = {part.path for part in parts if isinstance(part, FieldRule)}
    for path in member_paths(rule):
        found = type_at(schema, path)
        text = found if isinstance(found, str) else _unfit_id(found, whole=path in of_parts)
        if text is not None:
            yield Problem("tracking_id", f"{format_path(path)} {text}")
    if isinstance(topology.event_time, FieldTime):
        path, unit = topology.event_time.path, topology.event_time.unit
        found = type_at(schema, path)
        text = found if isinstance(found, str) else _unfit_time(found, unit)
        if text is not None:
            yield Problem("event_time", f"{format_path(path)} {text}")


def type_at(schema: StructType, path: Path) -> DataType | str:
    """Return the type at a path (`VariantType` if only the rows show the type), or the reason why no row has the path.

    For a user-defined type, the function returns the type in which Spark stores the values.
    """
    kind: DataType = schema
    for at, step in enumerate(path):
        match kind:
            case StructType() if step in kind.names:
                kind = _stored(kind[str(step)].dataType)
            case ArrayType() if isinstance(step, int):
                kind = _stored(kind.elementType)
            case MapType() if isinstance(step, str):
                kind = _stored(kind.valueType)
            case VariantType():
                return kind
            case StructType():
                owner = f"{format_path(path[:at])} has no member" if at else "is not there: the rows have no column"
                return f"{owner} `{step}`{_similar(str(step), kind.names)}"
            case _:
                wanted = f"position {step}" if isinstance(step, int) else f"member `{step}`"
                return f"is not there: {format_path(path[:at])} is {kind.simpleString()}, which has no {wanted}"
    return kind


def _stored(kind: DataType) -> DataType:
    return kind.sqlType() if isinstance(kind, UserDefinedType) else kind


def _similar(name: str, known: Sequence[str]) -> str:
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if near:
        return f'; did you mean "{by_lower[near[0]]}"? Upper and lower case differ'
    shown = ", ".join(sorted(known)[:_MOST_NAMES])
    return f", only {shown}{', …' if len(known) > _MOST_NAMES else ''}"


def _unfit_id(kind: DataType, *, whole: bool) -> str | None:
    """Return why values of a type cannot be IDs; with ``whole``, an object or an array can be part of an ID."""
    match kind:
        case NullType():
            return "is void, which is always null; cast the column to the type of its values"
        case StructType() | ArrayType() | MapType() if not whole:
            return f"is {kind.simpleString()}, but an ID is a single value; name one of its members"
        case _:
            return None


def _unfit_time(kind: DataType, unit: TimeUnit) -> str | None:
    """Return why values of a type cannot be event times in the given unit."""
    match kind:
        case VariantType():
            return None
        case NullType():
            return "is void, which is always null; cast the column to the type of its values"
        case TimestampNTZType():
            return (
                "is timestamp_ntz, a time without a time zone; convert the column to timestamp (in pandas: tz_localize)"
            )
        case TimestampType() | StringType() | CharType() | VarcharType():
            remedy = "write unit: rfc3339" if unit != "rfc3339" else ""
        case NumericType():
            remedy = "write unit: s, ms, or us" if unit == "rfc3339" else ""
        case _:
            remedy = "convert the column to timestamp, and write unit: rfc3339"
    return f"is {kind.simpleString()}, which unit {unit} cannot read; {remedy}" if remedy else None
