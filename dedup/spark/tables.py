"""Implements `dedup spark upsert`, which keeps one row per tracking ID in a Delta table (MERGE) or a database (JDBC).

If several records have the same ID, the table keeps the newest record. The table stores the columns that define which
record is newer (`ORDER`), and only a newer record replaces a row. Therefore, repeating, killing, or reordering runs
does not change the result. A run is refused if the table was filled in another order, or if the table's columns have
other types.

Spark's JDBC writer cannot upsert. Each run therefore writes its rows to its own staging table, and a single SQL
statement moves the rows to the target table. If a run is killed before moving the rows, the target table is unchanged,
but the staging table remains.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql import types as t

from dedup.connect.upsert import RowMaker
from dedup.core.formats import Format
from dedup.core.framing import HEADER, PREFIX_BYTES, SchemaIdPlace
from dedup.core.tracking_id import Path, format_path
from dedup.errors import InvariantBroken, Problem, SettingsError, StateIncompatible
from dedup.settings import Settings
from dedup.spark.columns import identified, payload_columns
from dedup.spark.json_digits import inexact, unclear_times
from dedup.spark.kafka_source import history_of_range, settled_ends
from dedup.spark.row_events import quoted
from dedup.spark.session import described
from dedup.spark.table_log import DeltaLog, explained_by_delta
from dedup.topology.model import SinkColumn, Topology
from dedup.topology.schema import ColumnType
from dedup.verify.kafka_reader import KafkaReader

ID: Final = "tracking_id"
ORDER: Final = ("order_value", "order_partition", "order_offset")
"""Columns that define which row of an ID is newer. Partition and offset are -1 for records without coordinates."""
_EVENT_TIME, _OFFSET = "event_time", "offset"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")
_BAD_JSON: Final = "_dedup_bad_json"
_MEMBERS: Final = "_dedup_members"
_INEXACT: Final = "_dedup_inexact"
_TIE: Final = "_dedup_tie"
_MEMBER_TYPES: Final[Mapping[type[t.DataType], ColumnType]] = {
    **dict.fromkeys((t.StringType, t.DateType), "text"),
    **dict.fromkeys((t.LongType, t.IntegerType, t.ShortType, t.ByteType), "integer"),
    **dict.fromkeys((t.DoubleType, t.FloatType), "number"),
    t.BooleanType: "boolean",
    t.TimestampType: "time",
}
"""Maps each Spark type of a member to the type of a sink's column."""
_MOST_BYTES: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Jdbc:
    """A table in a database that Spark accesses through JDBC."""

    url: str
    """`jdbc:postgresql://…` or `jdbc:sqlite:FILE`."""
    table: str
    user: str | None = None
    password: str | None = None

    @property
    def dialect(self) -> Dialect:
        """Return the SQL dialect of the database. Raises SettingsError for an unsupported database."""
        dialect = next((each for each in (_POSTGRESQL, _SQLITE) if self.url.startswith(each.prefix)), None)
        if dialect is None:
            raise SettingsError([Problem("--jdbc", f"{self.url!r} is neither jdbc:postgresql: nor jdbc:sqlite:")])
        return dialect

    def properties(self) -> dict[str, str]:
        """Return the properties for a JDBC connection."""
        given = {"driver": self.dialect.driver, "user": self.user, "password": self.password}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def own_columns(self) -> str:
        """Return a query for the names of the table's columns that have a default or are generated.

        dedup creates no such columns, so they belong to the user.
        """
        schema, _, name = self.table.rpartition(".")
        return self.dialect.own_columns.format(table=self.table, name=name, schema=schema or "main")

    def collated(self, field: t.StructField) -> str:
        """Return the COLLATE clause for an order column, or an empty string if the column is not a string."""
        return f" COLLATE {self.dialect.binary_collation}" if isinstance(field.dataType, t.StringType) else ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The SQL features that differ between the supported databases."""

    prefix: str
    driver: str
    binary: str
    double: str
    timestamp: str
    """A type for instants. Local times repeat when clocks are set back, so they do not define an order."""
    binary_collation: str
    """The collation that compares strings by their bytes, as Spark does."""
    digits: int
    """Maximum number of decimal digits that the database stores exactly."""
    own_columns: str
    """The query of `Jdbc.own_columns`, for a table with a ``name`` in a ``schema``."""
    one_writer: bool
    """Whether only one task may write at a time."""

    def column(self, kind: t.DataType) -> str:
        """Return the SQL type for a Spark type. Raises SettingsError if the database has no suitable type."""
        name, digits = kind.simpleString(), self.digits
        known: dict[type[t.DataType], str] = dict(_SQL_TYPES)
        known |= {t.BinaryType: self.binary, t.DoubleType: self.double, t.FloatType: self.double}
        known[t.TimestampType] = self.timestamp
        match kind:
            case _ if type(kind) in known:
                return known[type(kind)]
            case t.DecimalType() if kind.precision <= digits:
                return f"NUMERIC({kind.precision},{kind.scale})"
            case t.DecimalType():
                text = f"a column of type {name}: this database keeps {digits} digits; declare it STRING"
            case _:
                text = f"{name} cannot be a column of a database; declare its members as columns, or declare it STRING"
        raise SettingsError([Problem("--schema", text)])


_SQL_TYPES: Final[Mapping[type[t.DataType], str]] = {
    t.StringType: "TEXT",
    t.LongType: "BIGINT",
    **dict.fromkeys((t.IntegerType, t.ShortType, t.ByteType), "INTEGER"),
    t.BooleanType: "BOOLEAN",
    t.DateType: "DATE",
}
_POSTGRESQL: Final = Dialect(
    "jdbc:postgresql:",
    "org.postgresql.Driver",
    "BYTEA",
    "DOUBLE PRECISION",
    "TIMESTAMPTZ",
    '"C"',
    digits=1000,
    own_columns="SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass "
    "AND (atthasdef OR attidentity <> '')",
    one_writer=False,
)
_SQLITE: Final = Dialect(
    "jdbc:sqlite:",
    "org.sqlite.JDBC",
    "BLOB",
    "DOUBLE",
    "TIMESTAMP",
    "BINARY",
    digits=15,
    own_columns="SELECT name FROM pragma_table_xinfo('{name}', '{schema}') WHERE dflt_value IS NOT NULL OR hidden <> 0",
    one_writer=True,
)
_BY_TASK: Final = re.compile(r"\bP?SQL\w*Exception: ([^\n]*)")
"""Matches the database's error message in the error of a Spark task."""
_NUMERIC: Final = 2
_JDBC_TYPES: Final = {12: "VARCHAR", -5: "BIGINT", 4: "INTEGER", 8: "DOUBLE", 91: "DATE"}
"""Maps the codes of the types of text, numbers, and dates to their names in `java.sql.Types`."""


@dataclass(frozen=True, slots=True)
class TableRows:
    """Records converted to table rows, and the records that cannot be converted."""

    rows: DataFrame
    """The columns are `tracking_id`, the payload's columns, `event_time_ms`, and the three order columns."""
    rejected: DataFrame
    """The unchanged records, with the additional columns `reason` and `detail`."""
    order: str
    """The property that determines which record is newer: `event_time`, `offset`, or a column of the payload."""


def table_rows(records: DataFrame, topology: Topology, *, schema: str | None = None, order: str) -> TableRows:
    """Convert records (`columns.RECORDS`) to table rows.

    ``schema`` is Spark DDL that lists the members to turn into columns. A record is rejected if one of these members
    has another type, or a number that the column cannot keep exactly. Without ``schema``, the columns are `key` and
    `value` as bytes. A record with a null value becomes a row whose payload columns are null. ``order`` determines
    which record is newer: `event_time`, a column of ``schema``, or `offset`. The order `offset` is correct only if all
    records with the same ID are in the same Kafka partition. Raises SettingsError for an invalid schema or order.
    """
    payload = _schema(schema)
    if order not in {_EVENT_TIME, _OFFSET, *([] if payload is None else payload.names)}:
        text = f"{order!r} is not event_time, offset or a column that --schema names"
        raise SettingsError([Problem("--order", text)])
    known = identified(records, topology)
    reason, detail = fn.col("dedup_fault"), fn.col("dedup_detail")
    columns = [fn.col("key"), fn.col("value")]
    if payload is not None:
        # Spark puts a value that it cannot parse into this column. Without the column, a value of another type would
        # silently become null.
        asked = t.StructType([*payload.fields, t.StructField(_BAD_JSON, t.StringType())])
        # Without the last option, the texts "NaN" and "Infinity" would be numbers.
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BAD_JSON, "allowNonNumericNumbers": "false"}
        if topology.source.is_memberwise:
            known, value = _with_members(known, topology, payload), fn.col(_MEMBERS)
        else:
            value = _json_of(topology.source.framing).cast("string")
        known = known.withColumns({"_payload": fn.from_json(value, asked, options), _INEXACT: inexact(value, payload)})
        # Spark parses an empty or blank value as null and does not report it.
        unread = fn.col("value").isNotNull() & fn.col("_payload").isNull()
        unfit = fn.col(f"_payload.{_BAD_JSON}").isNotNull() | unread
        misfit = fn.when(unfit, fn.lit("the value does not match --schema"))
        bad = fn.coalesce(misfit, fn.col(_INEXACT), unclear_times(value, payload))
        reason = fn.coalesce(reason, fn.when(bad.isNotNull(), fn.lit("schema_mismatch")))
        detail = fn.coalesce(detail, bad)
        columns = [fn.col("_payload").getField(name).alias(name) for name in payload.names]
    given = {_EVENT_TIME: "dedup_time_ms", _OFFSET: "offset"}.get(order)
    by = fn.col("_payload").getField(order) if given is None else fn.col(given)
    reason = fn.coalesce(reason, fn.when(by.isNull(), fn.lit("no_order")))
    detail = fn.coalesce(detail, fn.when(by.isNull(), fn.lit(f"it has no {order}, which decides what is newest")))
    marked = known.withColumns({"reason": reason, "detail": detail, "order_value": by})
    rows = marked.where("reason IS NULL").select(
        fn.col("dedup_id").alias(ID),
        *columns,
        fn.col("dedup_time_ms").alias("event_time_ms"),
        "order_value",
        fn.coalesce("partition", fn.lit(-1)).cast("int").alias("order_partition"),
        fn.coalesce("offset", fn.lit(-1)).cast("long").alias("order_offset"),
    )
    return TableRows(rows, marked.where("reason IS NOT NULL").select(*records.columns, "reason", "detail"), order)


def _json_of(framing: SchemaIdPlace | None) -> Column:
    """Return the column `value` without its framing. For rows with damaged framing, `dedup_fault` contains a fault."""
    value = fn.col("value")
    if framing in {None, "header"}:
        return value
    behind = value.substr(PREFIX_BYTES + 1, _MOST_BYTES)
    if framing == "prefix":
        return behind
    return fn.when(fn.exists("headers", lambda header: header["key"] == HEADER), value).otherwise(behind)


def _with_members(known: DataFrame, topology: Topology, payload: t.StructType) -> DataFrame:
    """Append the members that ``payload`` names as JSON, which is null if a member has another type.

    Raises SettingsError if ``payload`` has a type that no member of the topology's format can have.
    """
    members = list(_members(payload, topology.source.format))
    schema = t.StructType([*known.schema.fields, t.StructField(_MEMBERS, t.StringType())])

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        maker = RowMaker(topology, members)
        for batch in batches:
            rows = maker.payloads(payload_columns(batch))
            texts = [None if isinstance(row, str) else _json_text(payload, iter(row)) for row in rows]
            yield pa.RecordBatch.from_arrays(
                [*batch.columns, pa.array(texts, pa.string())], [*batch.schema.names, _MEMBERS]
            )

    return known.mapInArrow(run, schema)


def _members(kind: t.DataType, fmt: Format, at: Path = ()) -> Iterator[SinkColumn]:
    """Yield the members of a type, in the order in which `_json_text` takes their values."""
    match kind:
        case t.StructType():
            for field in kind.fields:
                yield from _members(field.dataType, fmt, (*at, field.name))
        case t.DecimalType():
            yield SinkColumn(format_path(at), at, "json")  # the type json keeps every digit
        case _ if type(kind) in _MEMBER_TYPES:
            yield SinkColumn(format_path(at), at, _MEMBER_TYPES[type(kind)])
        case _:
            text = f"{format_path(at)} {kind.simpleString()}: a value of format {fmt} has no member of this type"
            raise SettingsError([Problem("--schema", f"{text}; name single members")])


def _json_text(kind: t.DataType, values: Iterator[Any]) -> str:
    """Return a value of the type as JSON text. ``values`` contains the value's members, in the order of the type."""
    if isinstance(kind, t.StructType):
        inner = [f"{json.dumps(field.name)}:{_json_text(field.dataType, values)}" for field in kind.fields]
        return f"{{{','.join(inner)}}}"
    value = next(values)
    return str(value) if isinstance(kind, t.DecimalType) and value is not None else json.dumps(value)


def output_records(spark: SparkSession, topology: Topology, settings: Settings) -> DataFrame:
    """Return the output topic's committed records. If a transaction in a partition stays open, the result contains only
    the records before the transaction, and a warning says so. Raises StateIncompatible if the output topic does not
    exist.
    """
    ranges = {}
    if topology.output is not None:
        topic = topology.output.topic
        with KafkaReader(settings) as reader:
            bounds = reader.bounds(topic)
            ends = settled_ends(reader, {topic: {at: each.high for at, each in bounds.items()}})[topic]
        ranges = {topic: {at: (each.low, max(each.low, ends[at])) for at, each in bounds.items()}}
    if not any(ranges.values()):
        raise StateIncompatible(f"{topology.name} has no output topic in this cluster; give --input.")
    return history_of_range(spark, settings, ranges).records


def _schema(ddl: str | None) -> t.StructType | None:
    if ddl is None:
        return None
    try:
        parsed = cast("t.StructType", t.StructType.fromDDL(ddl))
    except PySparkException as error:
        text = f"is not Spark DDL, such as 'flight STRING, delay DOUBLE': {str(error).splitlines()[0]}"
        raise SettingsError([Problem("--schema", text)]) from error
    _refuse_names(parsed)
    unfit = [field for field in parsed.fields if _is_unfit(field.dataType)]
    if unfit:
        text = "{}: a table cannot hold {}; declare it STRING, which keeps its JSON, or its members as STRUCT"
        texts = [text.format(field.name, field.dataType.simpleString()) for field in unfit]
        raise SettingsError([Problem("--schema", each) for each in texts])
    return parsed


def _refuse_names(payload: t.StructType) -> None:
    # Spark and the databases ignore case in names.
    own = {ID, "event_time_ms", *ORDER, _BAD_JSON}
    problems = [f"{name}: dedup writes a column of this name" for name in payload.names if name.lower() in own]
    texts = "{}: a column cannot have a quote in its name; declare the object that has the member STRING"
    problems += [texts.format(name) for name in payload.names if '"' in name]
    problems += [f"{name} is declared twice; names that differ only in case are equal" for name in _repeated(payload)]
    if problems:
        raise SettingsError([Problem("--schema", each) for each in problems])


def _repeated(kind: t.DataType) -> Iterator[str]:
    """Yield the names that occur more than once in a STRUCT of the type."""
    match kind:
        case t.ArrayType():
            yield from _repeated(kind.elementType)
        case t.StructType():
            counts = Counter(name.lower() for name in kind.names)
            yield from (name for name, count in counts.items() if count > 1)
            for field in kind.fields:
                yield from _repeated(field.dataType)
        case _:
            pass


def _is_unfit(kind: t.DataType) -> bool:
    """Return true if Spark cannot read the type from JSON or cannot hash it as `_newest` requires."""
    match kind:
        case t.MapType() | t.VariantType() | t.CharType() | t.VarcharType():
            return True
        case t.ArrayType():
            return _is_unfit(kind.elementType)
        case t.StructType():
            return any(_is_unfit(field.dataType) for field in kind.fields)
        case _:
            return False


def _newest(rows: DataFrame) -> DataFrame:
    """Return the newest row of each tracking ID according to `ORDER`. A hash breaks ties."""
    others = [name for name in rows.columns if name != ID]
    columns = [quoted(name) for name in others]
    # The hash ignores nulls, so rows that differ only in the position of a null have the same hash.
    rest = [quoted(name) for name in others if name not in ORDER]
    best = rows.groupBy(ID).agg(fn.max(fn.struct(*ORDER, fn.xxhash64(*columns).alias(_TIE), *rest)).alias("best"))
    return best.select(ID, *(fn.col("best").getField(name).alias(name) for name in others))


def _ddl(kind: t.DataType) -> str:
    """Return a type in the syntax of Spark SQL; unlike `simpleString`, quote the names of members."""
    match kind:
        case t.StructType():
            return f"STRUCT<{', '.join(f'{quoted(each.name)}: {_ddl(each.dataType)}' for each in kind.fields)}>"
        case t.ArrayType():
            return f"ARRAY<{_ddl(kind.elementType)}>"
        case _:
            return kind.simpleString()


def upsert_delta(found: TableRows, path: str) -> int:
    """Merge the newest row of each ID into the Delta table at ``path``, and create the table if necessary.

    Return the number of inserted or replaced rows. Raises StateIncompatible if the table has other columns, or if it
    was filled in another order. Raises BrokerUnavailable if another job changed the table at the same time, and
    SettingsError if no file can be written to ``path``.
    """
    spark = found.rows.sparkSession
    source = _newest(found.rows)
    log = DeltaLog(spark, path)
    log.directory.refuse_unwritable("--delta")
    table = log.table
    columns = ", ".join(f"{quoted(field.name)} {_ddl(field.dataType)}" for field in source.schema.fields)
    newer = f"struct({_listed(ORDER, 's.')}) > struct({_listed(ORDER, 't.')})"
    merge = (
        f"MERGE INTO {table} t USING {{source}} s ON t.{ID} = s.{ID} "
        f"WHEN MATCHED AND {newer} THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )
    with explained_by_delta(path), described(spark, f"{path}: merge the newest row of each tracking ID"):
        spark.sql(f"CREATE TABLE IF NOT EXISTS {table} ({columns}) USING delta")
        there = spark.read.format("delta").load(path)
        _refuse_other_columns(path, _types(source.schema), _types(there.schema))
        by = _column_of(found.order)
        if not there.where(~fn.col("order_value").eqNullSafe(fn.col(quoted(by)))).isEmpty():
            raise _other_order(path, by)
        row = spark.sql(merge, source=source).first()
    if row is None:
        raise InvariantBroken("Delta's MERGE reported no counts of rows.")
    return int(row["num_affected_rows"])


def _types(schema: t.StructType) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def _listed(names: Sequence[str], prefix: str = "") -> str:
    return ", ".join(prefix + name for name in names)


def _column_of(order: str) -> str:
    """Return the column whose value `order_value` repeats in each row."""
    return {_EVENT_TIME: "event_time_ms", _OFFSET: "order_offset"}.get(order, order)


def _other_order(table: str, by: str) -> StateIncompatible:
    return StateIncompatible(
        f"the table {table} was filled with another --order: it has a row whose order_value is not its {by}. Rows of "
        f"two orders cannot be compared, so newer records would be dropped. Nothing was written. Give the --order with "
        f"which the table was filled, or write to another table."
    )


def _refuse_other_columns(
    table: str, wanted: Mapping[str, str], found: Mapping[str, str], own: Collection[str] = ()
) -> None:
    """Raise StateIncompatible if a table lacks a column, or has a column of another type or an unwanted column.

    A replaced row would keep its old value in a column that is not ``wanted``, and would therefore mix two records. The
    columns ``own`` belong to the user, so they may keep their values.
    """
    end = "it was created with another --schema, or not by dedup. Nothing was written. Write to another table, or"
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        text = f"the table {table} has no column {', '.join(missing)}: {end} add the columns."
        raise StateIncompatible(text)
    # Another type would silently round or truncate values. A NUMERIC without a number of digits keeps all digits.
    other = [
        f"{name} is {found[name]}, not {kind}"
        for name, kind in wanted.items()
        if found[name] != kind and not kind.startswith(f"{found[name]}(")
    ]
    # If the payload column that determines the order also has another type, this column comes first in `other`, and the
    # cause is not another --order.
    if other and other[0].startswith("order_value "):
        raise StateIncompatible(
            f"the table {table} was filled with another --order: its column {other[0]}. Nothing was written. Give "
            f"the --order with which the table was filled, or write to another table."
        )
    if other:
        text = f"the table {table} has columns of other types ({'; '.join(other)}): {end} make the types equal."
        raise StateIncompatible(text)
    more = sorted(found.keys() - wanted.keys() - set(own))
    if more:
        raise StateIncompatible(
            f"the table {table} has more columns than --schema ({', '.join(more)}), and a replaced row would keep "
            f"their values of an older record. Nothing was written. Name them in --schema, remove them from the "
            f"table, or write to another table."
        )


def upsert_jdbc(found: TableRows, to: Jdbc) -> int:
    """Upsert the newest row of each ID into a database table, and create the table if necessary.

    Return the number of inserted or replaced rows. Each call changes the table's rows with a single SQL statement.
    Raises StateIncompatible if the table has other columns, was filled in another order, or has no unique constraint
    on `tracking_id`.
    """
    if not _NAME.fullmatch(to.table):
        text = f"{to.table!r} is not a valid name; write letters, digits and _, such as orders or shop.orders"
        raise SettingsError([Problem("--table", text)])
    source = _newest(found.rows)
    staging = f"{to.table}_dedup_{uuid.uuid4().hex[:8]}"
    # Strings in order columns are compared by their bytes, as in `_newest`.
    columns = [
        f'"{field.name}" {to.dialect.column(field.dataType)}{to.collated(field) if field.name in ORDER else ""}'
        for field in source.schema.fields
    ]
    move = _moving(staging, to, source.schema)
    source.persist()
    try:
        expected = source.count()
        spark = source.sparkSession
        with described(spark, f"{to.table}: stage the newest rows"), _connected(spark, to) as connection:
            key = f'PRIMARY KEY ("{ID}")'
            _execute(connection, f"CREATE TABLE IF NOT EXISTS {to.table} ({', '.join([*columns, key])})")
            _execute(connection, f"CREATE TABLE {staging} ({', '.join(columns)})")
            try:
                _refuse_other_table(connection, to, staging, source.schema, _column_of(found.order))
                part = source.coalesce(1) if to.dialect.one_writer else source
                with _explained(to.table, _BY_TASK):
                    part.write.jdbc(to.url, staging, mode="append", properties=to.properties())
                return _move(connection, staging, to.table, move, expected)
            finally:
                _execute(connection, f"DROP TABLE {staging}")
    finally:
        source.unpersist()


def _moving(staging: str, to: Jdbc, schema: t.StructType) -> str:
    table, names = to.table, schema.names
    listed = ", ".join(f'"{name}"' for name in names)
    changed = ", ".join(f'"{name}" = excluded."{name}"' for name in names if name != ID)
    # The table may have been created with another collation, so this statement also names the collation.
    order = [f'"{name}"{to.collated(schema[name])}' for name in ORDER]
    newer = f"({_listed(order, 'excluded.')}) > ({_listed(order, f'{table}.')})"
    # DISTINCT is necessary because Spark retries a task whose commit was not acknowledged, which may stage rows twice.
    return (
        f"INSERT INTO {table} ({listed}) SELECT DISTINCT {listed} FROM {staging} WHERE true "  # noqa: S608  # checked names
        f'ON CONFLICT ("{ID}") DO UPDATE SET {changed} WHERE {newer}'
    )


def _move(connection: Any, staging: str, table: str, move: str, expected: int) -> int:  # noqa: ANN401  # Java's
    """Move the staged rows to the target table in one transaction. Return the number of inserted or replaced rows.

    Raises StateIncompatible if the number of tracking IDs in the staging table is not ``expected``.
    """
    count = f'SELECT count(DISTINCT "{ID}") FROM {staging}'  # noqa: S608  # checked names
    with contextlib.closing(connection.createStatement()) as statement, _explained(count):
        row = statement.executeQuery(count)
        row.next()
        found = int(row.getLong(1))
    if found != expected:
        raise StateIncompatible(
            f"{found} tracking IDs arrived in {staging}, but {expected} were sent. The table {table} was not touched. "
            f"Run the command again."
        )
    return _execute(connection, move)


@contextlib.contextmanager
def _connected(spark: SparkSession, to: Jdbc) -> Iterator[Any]:
    """Yield a JDBC connection in the driver's JVM. The connection runs each statement in its own transaction."""
    java: Any = spark._jvm  # noqa: SLF001  # PySpark's only way to its JVM
    # DriverManager finds drivers only on the system class path, which does not contain Spark's jars.
    java.org.apache.spark.sql.execution.datasources.jdbc.DriverRegistry.register(to.dialect.driver)
    properties = java.java.util.Properties()
    for name, value in to.properties().items():
        properties.setProperty(name, value)
    with _explained(to.url):
        connection = java.java.sql.DriverManager.getConnection(to.url, properties)
    with contextlib.closing(connection):
        yield connection


@contextlib.contextmanager
def _explained(what: str, among: re.Pattern[str] | None = None) -> Iterator[None]:
    """Inside the ``with`` block, turn database errors into StateIncompatible.

    If ``among`` is given, only errors whose text contains it are database errors.
    """
    try:
        yield
    except Py4JJavaError as error:
        said = str(error.java_exception.getMessage()).splitlines()[0]
        if among is not None:
            found = among.search(str(error))
            if found is None:
                raise
            said = found[1]
        raise StateIncompatible(
            f"{what}: the database says: {said}. The table was not touched. Fix the cause and run the command again."
        ) from error


def _execute(connection: Any, sql: str) -> int:  # noqa: ANN401  # Java's
    """Execute a statement, and return the number of changed rows (0 for a statement such as CREATE TABLE)."""
    with contextlib.closing(connection.createStatement()) as statement, _explained(sql.partition(" (")[0]):
        return int(statement.executeUpdate(sql))


def _refuse_other_table(connection: Any, to: Jdbc, staging: str, schema: t.StructType, by: str) -> None:  # noqa: ANN401
    """Raise StateIncompatible if a table has other columns than its staging table, or was filled in another order.

    Raises SettingsError if the database shortened the name of a column.
    """
    own = {row.getString(1) for row in _rows(connection, to.own_columns)}
    wanted = _columns_of(connection, staging)
    cut = [
        Problem("--schema", f"{name}: the database shortens this name") for name in schema.names if name not in wanted
    ]
    if cut:
        raise SettingsError(cut)
    _refuse_other_columns(to.table, wanted, _columns_of(connection, to.table), own)
    value = f'"order_value"{to.collated(schema["order_value"])}'
    other = f'SELECT 1 FROM {to.table} WHERE {value} IS DISTINCT FROM "{by}" LIMIT 1'  # noqa: S608  # checked names
    if any(True for _ in _rows(connection, other)):
        raise _other_order(to.table, by)


def _rows(connection: Any, query: str) -> Iterator[Any]:  # noqa: ANN401  # Java's
    """Yield the result set of a query at each of its rows."""
    with contextlib.closing(connection.createStatement()) as statement, _explained(query):
        rows = statement.executeQuery(query)
        while rows.next():
            yield rows


def _columns_of(connection: Any, table: str) -> dict[str, str]:  # noqa: ANN401  # Java's
    """Return the columns of a table with the names that JDBC gives their types, such as BIGINT or NUMERIC(9,2)."""
    with contextlib.closing(connection.createStatement()) as statement:
        shape = statement.executeQuery(f"SELECT * FROM {table} WHERE 1 = 0").getMetaData()  # noqa: S608  # a checked name
        return {shape.getColumnName(at + 1): _type_of(shape, at + 1) for at in range(shape.getColumnCount())}


def _type_of(shape: Any, at: int) -> str:  # noqa: ANN401  # Java's
    # The database's own names would distinguish TEXT from VARCHAR(20). The difference does not matter, because the
    # database reports a text that is too long.
    code = shape.getColumnType(at)
    if code != _NUMERIC:
        return str(_JDBC_TYPES.get(code, shape.getColumnTypeName(at)))
    precision = shape.getPrecision(at)
    return f"NUMERIC({precision},{shape.getScale(at)})" if precision else "NUMERIC"
