"""Tables with one row per tracking ID, in Delta, PostgreSQL and SQLite: newest wins, runs may be repeated."""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal

import fastavro
import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from dedup.core.tracking_id import KeyRule, TrackingId
from dedup.errors import SettingsError, StateIncompatible
from dedup.spark.columns import RECORDS
from dedup.spark.tables import ORDER, Jdbc, _connected, _newest, table_rows, upsert_delta, upsert_jdbc
from dedup.topology.parse import parse
from tests.spark.postgres import USER, RunningPostgres, running_postgres

pytestmark = pytest.mark.timeout(400)
SCHEMA = "id STRING, delay DOUBLE, note STRING, day DATE, seats INT, on_time BOOLEAN, price DECIMAL(9,2)"
TOPOLOGY = parse(
    json.dumps(
        {
            "dedup": 1,
            "name": "shop",
            "source": {"topics": ["orders"], "partitioned_by": "tracking_id"},
            "tracking_id": {"field": "id"},
            "guard_period": "1h",
            "output": {"topic": "orders.unique"},
        }
    ),
    name="shop.yaml",
)


@pytest.fixture(scope="module")
def postgres() -> Iterator[RunningPostgres]:
    """Return the module's PostgreSQL server."""
    with running_postgres() as running:
        yield running


@dataclass(frozen=True)
class Table:
    """A table of one kind, to be written and read."""

    upsert: Callable[[DataFrame], None]
    read: Callable[[], DataFrame]
    others: Callable[[], set[str]]
    """Tables beside it: none may be left behind."""


def jdbc_table(spark: SparkSession, to: Jdbc, tables: str) -> Table:
    properties = to.properties()
    listed = f"(SELECT name AS n FROM ({tables}) x WHERE name LIKE '%\\_dedup\\_%' ESCAPE '\\') y"
    return Table(
        lambda rows: upsert_jdbc(rows, to),
        lambda: spark.read.jdbc(to.url, to.table, properties=properties),
        lambda: {row.n for row in spark.read.jdbc(to.url, listed, properties=properties).collect()},
    )


def delta_table(spark: SparkSession, path: str) -> Table:
    # Its own tables' logs are read with 50 tasks otherwise, for a handful of rows.
    spark.conf.set("spark.databricks.delta.snapshotPartitions", "1")
    return Table(lambda rows: upsert_delta(rows, path), lambda: spark.read.format("delta").load(path), set)


@pytest.fixture(params=["delta", "sqlite", "postgresql"])
def table(request, spark, tmp_path) -> Table:
    """Return an empty place for a table."""
    match request.param:
        case "delta":
            # Relative to where the session's Java was started.
            return delta_table(spark, os.path.relpath(tmp_path / "delta", spark._jvm.System.getProperty("user.dir")))
        case "sqlite":
            to = Jdbc(f"jdbc:sqlite:{tmp_path / 'shop.db'}", "orders")
            return jdbc_table(spark, to, "SELECT name FROM sqlite_master")
        case _:
            server = request.getfixturevalue("postgres")
            to = Jdbc(server.url, f"orders_{tmp_path.name}", USER, server.password)
            return jdbc_table(spark, to, "SELECT table_name AS name FROM information_schema.tables")


def event(number: int, time_ms: int, offset: int, **members: object):
    value = None if members.get("gone") else json.dumps({"id": f"o{number}", **members}).encode()
    return (b"k", value, None, time_ms, "orders.unique", 0, offset)


def records(spark: SparkSession, *events: tuple[object, ...]) -> DataFrame:
    return spark.createDataFrame(list(events), RECORDS)


def rows_of(spark: SparkSession, *events: tuple[object, ...], order: str = "event_time") -> DataFrame:
    return table_rows(records(spark, *events), TOPOLOGY, schema=SCHEMA, order=order).rows


def notes(table: Table) -> dict[str, str]:
    return {row.id: row.note for row in table.read().collect()}


def test_the_newest_of_an_id_stays_whatever_is_run_again_and_in_which_order(spark, table):
    first = rows_of(
        spark,
        event(1, 10, 0, note="old", delay=1.5, day="2026-11-21", seats=3, on_time=True, price=12.25),
        event(1, 30, 1, note="newest"),
        event(2, 10, 2, note="two"),
    )
    second = rows_of(spark, event(1, 20, 3, note="between"), event(2, 11, 4, note="two, newer"), event(3, 1, 5))
    wanted = {"o1": "newest", "o2": "two, newer", "o3": None}
    for rows in (first, second, first, second):
        table.upsert(rows)
    assert notes(table) == wanted
    assert table.others() == set()
    assert {len(row.tracking_id) for row in table.read().collect()} == {3}


def test_values_arrive_as_they_were(spark, table):
    table.upsert(
        rows_of(
            spark, event(1, 10, 7, note="é'\"; --", delay=1.5, day="2026-11-21", seats=3, on_time=True, price=12.25)
        )
    )
    # SQLite has neither dates nor booleans of its own: JDBC gives numbers back for them.
    (row,) = table.read().selectExpr("*", "CAST(on_time AS INT) = 1 AS yes").collect()
    assert (row.note, row.delay, row.seats, row.yes, float(row.price)) == ("é'\"; --", 1.5, 3, True, 12.25)
    assert (row.event_time_ms, row.order_value, row.order_partition, row.order_offset) == (10, 10, 0, 7)


@pytest.mark.parametrize("table", ["sqlite", "postgresql"], indirect=True)
def test_an_order_of_text_is_by_bytes_in_the_table_too(spark, table):
    # Most locales have "a" before "B".
    for note in ("B", "a", "B"):
        table.upsert(rows_of(spark, event(1, 10, 0, note=note), order="note"))
    assert notes(table) == {"o1": "a"}


def test_a_table_that_was_made_with_another_collation_is_compared_by_bytes(spark, postgres, tmp_path):
    import sqlite3  # noqa: PLC0415

    first, second = (rows_of(spark, event(1, 10, 0, note=note), order="note") for note in ("a", "B"))
    in_sqlite = Jdbc(f"jdbc:sqlite:{tmp_path / 'shop.db'}", "orders")
    in_postgres = Jdbc(postgres.url, f"c_{tmp_path.name}", USER, postgres.password)
    tables = [jdbc_table(spark, to, "SELECT '' AS name") for to in (in_sqlite, in_postgres)]
    for table in tables:
        table.upsert(first)
    with sqlite3.connect(tmp_path / "shop.db") as database:
        ((made,),) = database.execute("SELECT sql FROM sqlite_master WHERE name = 'orders'")
        database.execute("ALTER TABLE orders RENAME TO old")
        database.execute(made.replace("COLLATE BINARY", "COLLATE NOCASE"))
        database.execute("INSERT INTO orders SELECT * FROM old")
    with _connected(spark, in_postgres) as connection:
        change = f'ALTER TABLE {in_postgres.table} ALTER "order_value" TYPE TEXT COLLATE "und-x-icu"'
        connection.createStatement().execute(change)
    for table in tables:
        table.upsert(second)
        assert notes(table) == {"o1": "a"}


def test_a_decimal_that_sqlite_would_round_is_refused(spark, tmp_path):
    to = Jdbc(f"jdbc:sqlite:{tmp_path / 'shop.db'}", "orders")
    schema = "id STRING, price DECIMAL({},2)"
    events = records(spark, event(1, 1, 1, price=1234567890123.45))
    kept = table_rows(events, TOPOLOGY, schema=schema.format(15), order="event_time").rows
    upsert_jdbc(kept, to)
    (row,) = spark.read.jdbc(to.url, to.table, properties=to.properties()).collect()
    assert float(row.price) == 1234567890123.45
    wide = table_rows(events, TOPOLOGY, schema=schema.format(16), order="event_time").rows
    with pytest.raises(SettingsError, match=r"decimal\(16,2\): this database keeps 15 digits; declare it STRING"):
        upsert_jdbc(wide, to)


def test_the_stated_order_decides(spark):
    pair = (event(1, 30, 1, note="later", seats=1), event(1, 10, 2, note="behind it", seats=9))
    for order, wanted in [("event_time", "later"), ("offset", "behind it"), ("seats", "behind it")]:
        (row,) = _newest(rows_of(spark, *pair, order=order)).collect()
        assert row.note == wanted


def test_what_is_no_row_is_rejected_with_its_reason_and_its_neighbours_are_not(spark):
    found = table_rows(
        records(
            spark,
            event(1, 10, 0, note="fine"),
            event(2, 10, 1, seats="three"),
            (b"k", b"no json", None, 5, "orders.unique", 0, 2),
            (b"k", b'{"n": 1}', None, 5, "orders.unique", 0, 3),
            event(3, 10, 4, gone=True),
            event(4, 10, 5, note="without seats"),
        ),
        TOPOLOGY,
        schema=SCHEMA,
        order="seats",
    )
    reasons = {row.offset: row.reason for row in found.rejected.collect()}
    assert reasons.keys() == {0, 1, 2, 3, 4, 5}
    assert (reasons[1], reasons[3], reasons[5]) == ("schema_mismatch", "id_missing", "no_order")
    assert found.rows.isEmpty()


def test_an_empty_value_is_rejected_and_a_null_one_is_a_row(spark):
    """Where the ID is not in the value: Spark reads nothing at all as null, without calling it bad."""
    source = dataclasses.replace(TOPOLOGY.source, format="bytes")
    by_key = dataclasses.replace(TOPOLOGY, source=source, tracking_id=TrackingId(KeyRule()))
    values = [b"", b" \n", b"null", b"{}", None]
    rows = [(b"k%d" % at, value, None, 5, "orders.unique", 0, at) for at, value in enumerate(values)]
    found = table_rows(records(spark, *rows), by_key, schema="note STRING", order="event_time")
    assert {row.offset: row.reason for row in found.rejected.collect()} == dict.fromkeys(range(3), "schema_mismatch")
    assert {(row.order_offset, row.note) for row in found.rows.collect()} == {(3, None), (4, None)}


@pytest.mark.parametrize("schema_id", ["auto", "header", "prefix"])
def test_framed_values_become_rows(spark, schema_id):
    source = dataclasses.replace(TOPOLOGY.source, format="json_schema", schema_id=schema_id)
    value, own, prefix = b'{"id":"o1","note":"x"}', [("__value_schema_id", b"\0\0\0\0\7")], b"\0\0\0\0\7"
    values = [(prefix + value, None), (value, own), (b"\0\0" + value, None), (None, None)]
    rows = [(b"k", each, headers, 5, "orders.unique", 0, at) for at, (each, headers) in enumerate(values)]
    found = table_rows(
        records(spark, *rows), dataclasses.replace(TOPOLOGY, source=source), schema="note STRING", order="offset"
    )
    read = {"auto": {0, 1}, "header": {1}, "prefix": {0}}[schema_id]
    assert {(row.order_offset, row.note) for row in found.rows.collect()} == {(at, "x") for at in read}
    assert {row.offset for row in found.rejected.collect()} == {0, 1, 2, 3} - read


AVRO = """{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"},
  {"name": "n", "type": "long"}, {"name": "delay", "type": ["null", "double"]}, {"name": "day", "type": {"type": "int",
  "logicalType": "date"}}, {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9,
  "scale": 2}}, {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
  {"name": "to", "type": {"type": "record", "name": "To", "fields": [{"name": "city", "type": "string"}]}}]}"""
AT = dt.datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=dt.UTC)


def of_format(fmt: str, source: str):
    text = (
        f"dedup: 1\nname: shop\nsource: {{topics: [orders], partitioned_by: tracking_id, format: {fmt}, {source}}}\n"
        f"tracking_id: {{field: id}}\nguard_period: 1h\noutput: {{topic: orders.unique}}\n"
    )
    return parse(text, name="shop.yaml", read_file=lambda _: AVRO)


def test_members_of_avro_values_become_columns(spark):
    """Was: refused; only JSON values had columns."""
    order = {
        "id": "o1",
        "n": 7,
        "delay": 1.5,
        "day": AT.date(),
        "price": Decimal("12.30"),
        "at": AT,
        "to": {"city": "Ulm"},
    }
    target = io.BytesIO()
    fastavro.schemaless_writer(target, fastavro.parse_schema(json.loads(AVRO)), order)
    rows = [(b"k", each, None, 5, "orders.unique", 0, at) for at, each in enumerate([target.getvalue(), b"\xff"])]
    schema = "id STRING, n LONG, delay DOUBLE, day DATE, price DECIMAL(9,2), at TIMESTAMP, to STRUCT<city: STRING>"
    topology = of_format("avro", "schema_id: none, schema: o.avsc")
    found = table_rows(records(spark, *rows), topology, schema=schema, order="n")
    (row,) = found.rows.withColumn("at", fn.unix_micros("at")).collect()
    assert (row.id, row.n, row.delay, row.day, row.price) == ("o1", 7, 1.5, AT.date(), Decimal("12.30"))
    assert (row.at, row.to.city, row.order_value) == (int(AT.timestamp() * 1_000_000), "Ulm", 7)
    assert [each.reason for each in found.rejected.collect()] == ["not_avro"]
    # A member of another type rejects its record, as it does with JSON.
    found = table_rows(records(spark, *rows[:1]), topology, schema="id LONG", order="event_time")
    assert [each.reason for each in found.rejected.collect()] == ["schema_mismatch"]
    with pytest.raises(SettingsError, match=r"--schema: to\.lines array<int>: a value of format avro has no member"):
        table_rows(records(spark, *rows), topology, schema="to STRUCT<lines: ARRAY<INT>>", order="event_time")


def test_a_decimal_keeps_its_digits_and_a_cell_cannot_become_another_member(spark):
    """Was: integers of MessagePack went through floats, and text was put into JSON without quotes."""
    packed = msgspec.msgpack.encode({"id": "o1", "n": 9007199254740993})
    rows = records(spark, (b"k", packed, None, 5, "orders.unique", 0, 0))
    found = table_rows(rows, of_format("msgpack", ""), schema="n DECIMAL(38,0)", order="offset")
    assert [int(row.n) for row in found.rows.collect()] == [9007199254740993]
    evil = b'o1,"1,""who"":""mallory""",bob\n'
    rows = records(spark, (b"k", evil, None, 5, "orders.unique", 0, 0))
    topology = of_format("csv", "columns: [id, amount, who]")
    found = table_rows(rows, topology, schema="who STRING, amount DECIMAL(10,2)", order="offset")
    assert [(row.who, row.amount) for row in found.rows.collect()] in ([], [("bob", None)])
    assert all(each.reason == "schema_mismatch" for each in found.rejected.collect())


def test_csv_cells_become_columns(spark):
    topology = of_format("csv", "columns: [id, n, price]")
    rows = [(b"k", each, None, 5, "orders.unique", 0, at) for at, each in enumerate([b"o1,7,12.30\n", b"o2,x,\n"])]
    found = table_rows(records(spark, *rows), topology, schema="id STRING, n INT, price DECIMAL(9,2)", order="offset")
    assert [(row.id, row.n, row.price) for row in found.rows.collect()] == [("o1", 7, Decimal("12.30"))]
    assert [each.reason for each in found.rejected.collect()] == ["schema_mismatch"]


@pytest.mark.parametrize(
    "schema",
    [
        "id STRING,",
        "tracking_id STRING",
        "a b c",
        "m MAP<STRING, INT>",
        "a ARRAY<STRUCT<m: MAP<STRING, INT>>>",
        "v VARIANT",
        "c CHAR(3)",
    ],
)
def test_a_schema_that_can_not_be_is_refused(spark, schema):
    with pytest.raises(SettingsError, match="--schema"):
        table_rows(records(spark, event(1, 1, 1)), TOPOLOGY, schema=schema, order="event_time")


def test_an_order_that_is_not_there_is_refused(spark):
    with pytest.raises(SettingsError, match="--order"):
        table_rows(records(spark, event(1, 1, 1)), TOPOLOGY, order="seats")


def test_a_table_with_other_columns_is_left_alone(spark, table):
    other = table_rows(records(spark, event(1, 1, 1)), TOPOLOGY, schema="id STRING, note STRING", order="event_time")
    table.upsert(other.rows)
    with pytest.raises(StateIncompatible, match=r"has no column.*delay"):
        table.upsert(rows_of(spark, event(1, 2, 2, note="x")))
    assert notes(table) == {"o1": None}
    assert table.others() == set()


def test_a_run_that_fails_half_way_leaves_the_table_as_it_was(spark, table):
    table.upsert(rows_of(spark, event(1, 1, 1, note="before")))

    @fn.udf("string")
    def fails(note: str) -> str:
        if note == "bad":
            raise ValueError("planted")
        return note

    rows = rows_of(spark, event(1, 2, 2, note="after"), event(2, 2, 3, note="bad")).withColumn("note", fails("note"))
    with pytest.raises(Exception, match="planted"):
        table.upsert(rows)
    assert notes(table) == {"o1": "before"}
    assert table.others() == set()


def test_the_database_says_why_in_a_sentence(spark, tmp_path):
    to = Jdbc(f"jdbc:sqlite:{tmp_path / 'shop.db'}", "orders")
    rows = rows_of(spark, event(1, 1, 1))
    columns = ", ".join(f'"{name}"' for name in rows.columns)
    import sqlite3  # noqa: PLC0415

    with sqlite3.connect(tmp_path / "shop.db") as database:
        database.execute(f"CREATE TABLE orders ({columns})")  # no key
    with pytest.raises(StateIncompatible, match="ON CONFLICT"):
        upsert_jdbc(rows, to)
    with pytest.raises(StateIncompatible, match=r"the database says"):
        upsert_jdbc(rows, Jdbc(f"jdbc:sqlite:{tmp_path / 'no' / 'such' / 'place.db'}", "orders"))
    with pytest.raises(SettingsError, match="is not a valid name"):
        upsert_jdbc(rows, Jdbc(to.url, "orders; DROP TABLE x"))
    with pytest.raises(SettingsError, match="neither"):
        upsert_jdbc(rows, Jdbc("jdbc:mysql://h/d", "orders"))


def test_the_order_columns_are_those_that_are_documented():
    assert ORDER == ("order_value", "order_partition", "order_offset")
