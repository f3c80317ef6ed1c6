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
from dedup.spark.tables import ORDER, Jdbc, TableRows, _connected, _newest, table_rows, upsert_delta, upsert_jdbc
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

    upsert: Callable[[TableRows], None]
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


def rows_of(
    spark: SparkSession, *events: tuple[object, ...], order: str = "event_time", schema: str = SCHEMA
) -> TableRows:
    return table_rows(records(spark, *events), TOPOLOGY, schema=schema, order=order)


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
    kept = table_rows(events, TOPOLOGY, schema=schema.format(15), order="event_time")
    upsert_jdbc(kept, to)
    (row,) = spark.read.jdbc(to.url, to.table, properties=to.properties()).collect()
    assert float(row.price) == 1234567890123.45
    wide = table_rows(events, TOPOLOGY, schema=schema.format(16), order="event_time")
    with pytest.raises(SettingsError, match=r"decimal\(16,2\): this database keeps 15 digits; declare it STRING"):
        upsert_jdbc(wide, to)


def test_rows_that_differ_only_in_where_a_null_is_have_one_newest_row_in_any_order(spark):
    both = event(1, 1, 1, id="o1", note="x"), event(1, 1, 1, id="o1", label="x")
    found = set()
    for events in (both, both[::-1]):
        rows = rows_of(spark, *events, schema="id STRING, note STRING, label STRING").rows
        found.add(_newest(rows.coalesce(1)).select("note", "label").collect()[0])
    assert len(found) == 1


def test_the_stated_order_decides(spark):
    pair = (event(1, 30, 1, note="later", seats=1), event(1, 10, 2, note="behind it", seats=9))
    for order, wanted in [("event_time", "later"), ("offset", "behind it"), ("seats", "behind it")]:
        (row,) = _newest(rows_of(spark, *pair, order=order).rows).collect()
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


def test_a_time_that_spark_would_guess_is_rejected(spark):
    """Was: a number became a time in seconds, `08:00` a time of the day of the run, and a time without a zone UTC."""
    good = ['{"id":"a","at":"2026-01-31T08:00:00+01:00","all":["2026-01-31T08:00:00.5Z",null]}', '{"id":"a"}']
    values = ["1700000000000", '"08:00"', '"2026"', '"2026-01-31 08:00:00"', '"2026-01-31T08:00:00"', "true"]
    bad = [f'{{"id":"a","at":{each}}}' for each in values] + [f'{{"id":"a","all":[{each}]}}' for each in values]
    bad += ['{"id":"a","in":{"at":1}}', '{"id":"a","d":"NaN"}', '{"id":"a","d":"Infinity"}']
    rows = [(b"k", each.encode(), None, 5, "orders.unique", 0, at) for at, each in enumerate([*good, *bad])]
    schema = "at TIMESTAMP, all ARRAY<TIMESTAMP>, in STRUCT<at: TIMESTAMP>, d DOUBLE"
    found = table_rows(records(spark, *rows), TOPOLOGY, schema=schema, order="offset")
    assert {row.offset: row.reason for row in found.rejected.collect()} == dict.fromkeys(
        range(2, len(rows)), "schema_mismatch"
    )
    kept = found.rows.select(fn.unix_millis("at").alias("at"), fn.unix_millis(fn.col("all")[0]).alias("first"))
    assert {(row.at, row.first) for row in kept.collect()} == {(1_769_842_800_000, 1_769_846_400_500), (None, None)}


def test_a_day_that_spark_would_guess_is_rejected(spark):
    """Was: `20240131` became a day of the year 57385, `2024` the first of January, and a time the day in its zone."""
    good = ['{"id":"a","day":"2024-01-31","all":["0001-01-01",null]}', '{"id":"a","day":null}', '{"id":"a"}']
    values = ["20240131", '"20240131"', '"19000"', '"2024"', '"2024-01"', '"2024-1-31"', '"2024-01-31T23:00:00-05:00"']
    bad = [f'{{"id":"a","day":{each}}}' for each in values] + [f'{{"id":"a","all":[{each}]}}' for each in values]
    bad += [f'{{"id":"a","in":{{"day":{values[1]}}}}}', '{"id":"a","day":"2024-02-31"}']
    rows = [(b"k", each.encode(), None, 5, "orders.unique", 0, at) for at, each in enumerate([*good, *bad])]
    schema = "day DATE, all ARRAY<DATE>, in STRUCT<day: DATE>"
    found = table_rows(records(spark, *rows), TOPOLOGY, schema=schema, order="offset")
    assert {row.offset: row.reason for row in found.rejected.collect()} == dict.fromkeys(
        range(len(good), len(rows)), "schema_mismatch"
    )
    assert {(row.day, row.all and row.all[0]) for row in found.rows.collect()} == {
        (dt.date(2024, 1, 31), dt.date(1, 1, 1)),
        (None, None),
    }


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
        "Order_Value INT",
        "a INT, A INT",
        "s STRUCT<a: INT, A: INT>",
        '`a"b` INT',
    ],
)
def test_a_schema_that_can_not_be_is_refused(spark, schema):
    with pytest.raises(SettingsError, match="--schema"):
        table_rows(records(spark, event(1, 1, 1)), TOPOLOGY, schema=schema, order="event_time")


def test_a_number_that_its_column_would_round_is_rejected(spark):
    """Was: 1.005 became 1.01 in DECIMAL(10,2), and a long number became another one in STRING."""
    schema = (
        "price DECIMAL(10,2), note STRING, delay DOUBLE, level FLOAT, to STRUCT<fee: DECIMAL(5,1)>, "
        "fees ARRAY<DECIMAL(5,0)>"
    )
    fine = [
        '"price": 1.50, "note": "1.005 12345678901234567.89"',
        '"price": "1,234.500", "note": 12345678901234567890',
        '"price": 1.2e1, "delay": 0.1234567890123456789, "to": {"fee": 3.10}, "fees": [7, 8.0]',
        '"price": "\\u0031.5", "note": [1.5, {"a": null}], "other": 1.23456',
    ]
    bad = {
        '"price": 1.005': "price",
        '"price": "1.0,0,5"': "price",
        '"price": "1\\u002e005"': "price",
        '"price": 1e-3': "price",
        '"price": 1, "note": 12345678901234567.89': "note",
        '"price": 1, "note": {"a": [12345678901234567.89]}': "note",
        '"price": 1, "delay": 1e400': "delay",
        '"price": 1, "level": 1e39': "level",
        '"price": 1, "to": {"fee": 3.11}': "to",
        '"price": 1, "fees": [1, 2.5]': "fees",
        '"price": 123456789.5': None,
        '"price": "one.5e"': None,
    }
    values = [f'{{"id": "o1", {text}}}'.encode() for text in (*fine, *bad)]
    rows = [(b"k", value, None, 5, "orders.unique", 0, at) for at, value in enumerate(values)]
    found = table_rows(records(spark, *rows), TOPOLOGY, schema=schema, order="event_time")
    assert {row.order_offset: row.price for row in found.rows.collect()} == {
        0: Decimal("1.50"),
        1: Decimal("1234.50"),
        2: Decimal("12.00"),
        3: Decimal("1.50"),
    }
    said = {row.offset: (row.reason, row.detail) for row in found.rejected.collect()}
    for at, column in enumerate(bad.values(), start=len(fine)):
        reason, detail = said.pop(at)
        assert reason == "schema_mismatch"
        assert f" more digits than its column can keep: {column} " in detail or column is None, (at, detail)
    assert not said


def test_a_decimal_of_another_format_is_not_rounded_either(spark):
    topology = of_format("csv", "columns: [id, price]")
    rows = [(b"k", each, None, 5, "orders.unique", 0, at) for at, each in enumerate([b"o1,1.5\n", b"o2,1.005\n"])]
    found = table_rows(records(spark, *rows), topology, schema="price DECIMAL(9,2)", order="offset")
    assert [row.price for row in found.rows.collect()] == [Decimal("1.50")]
    assert [(each.offset, each.reason) for each in found.rejected.collect()] == [(1, "schema_mismatch")]


def test_names_with_dots_and_dashes_are_columns(spark, table):
    """Was: a traceback of Spark."""
    schema = "`a.b` INT, `a-b` STRING"
    members = {"a.b": 7, "a-b": "x"}
    for number in (1, 2, 1):
        found = rows_of(spark, event(number, 10, 0, **members), schema=schema, order="a.b")
        table.upsert(found)
    assert {(row["a.b"], row["a-b"]) for row in table.read().collect()} == {(7, "x")}


def test_members_of_a_struct_keep_their_names_in_delta(spark, tmp_path):
    table = delta_table(spark, str(tmp_path / "delta"))
    schema = "s STRUCT<`a-b`: INT, `c.d`: ARRAY<STRUCT<`e f`: INT>>>"
    with pytest.raises(StateIncompatible, match=r"Delta says: .*INVALID_CHARACTERS.*Nothing was written"):
        table.upsert(rows_of(spark, event(1, 10, 0), schema=schema))
    schema = schema.replace("e f", "e-f")
    table.upsert(rows_of(spark, event(1, 10, 0, s={"a-b": 1, "c.d": [{"e-f": 2}]}), schema=schema))
    (row,) = table.read().collect()
    assert row.s.asDict(recursive=True) == {"a-b": 1, "c.d": [{"e-f": 2}]}


def test_another_order_than_before_is_refused(spark, table):
    """Was: no row was ever newer, so the updates were dropped without a word."""
    table.upsert(rows_of(spark, event(1, 1_000, 5, note="old", seats=3)))
    for order, said in [("offset", "order_offset"), ("seats", r"\w+, not \w+"), ("note", r"\w+, not \w+")]:
        newer = rows_of(spark, event(1, 2_000, 900, note="new", seats=4), order=order)
        with pytest.raises(StateIncompatible, match=f"filled with another --order: .*{said}.*Give the --order"):
            table.upsert(newer)
    assert notes(table) == {"o1": "old"}
    table.upsert(rows_of(spark, event(1, 2_000, 900, note="new")))
    assert notes(table) == {"o1": "new"}
    assert table.others() == set()


def test_columns_of_other_types_and_more_columns_are_refused(spark, table):
    """Was: 1.7 became 1 in a column of integers; one more column in a Delta table was a traceback of Spark."""
    table.upsert(rows_of(spark, event(1, 1, 1, note="a", n=1), schema="id STRING, note STRING, n INT"))
    later = event(1, 2, 2, note="b", n=1.7)
    with pytest.raises(
        StateIncompatible, match=r"other types \(n is (int|INTEGER), not (double|DOUBLE)\).*make the types equal"
    ):
        table.upsert(rows_of(spark, later, schema="id STRING, note STRING, n DOUBLE"))
    with pytest.raises(StateIncompatible, match=r"more columns than --schema \(n\), .* an older record"):
        table.upsert(rows_of(spark, later, schema="id STRING, note STRING"))
    assert notes(table) == {"o1": "a"}
    assert table.others() == set()


def test_a_time_is_an_order_when_clocks_are_set_back(spark, postgres, tmp_path):
    """Was: PostgreSQL compared the local times of Spark's machine, so 01:15 UTC was older than 00:45 UTC."""
    table = jdbc_table(spark, Jdbc(postgres.url, f"t_{tmp_path.name}", USER, postgres.password), "SELECT '' AS name")
    zones = spark._jvm.java.util.TimeZone
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone("Europe/Berlin"))
    try:
        for at in ("2026-10-25T00:45:00Z", "2026-10-25T01:15:00Z"):
            found = rows_of(
                spark, event(1, 1, 1, note=at, at=at), schema="id STRING, note STRING, at TIMESTAMP", order="at"
            )
            table.upsert(found)
        assert notes(table) == {"o1": "2026-10-25T01:15:00Z"}
    finally:
        zones.setDefault(before)


def test_columns_of_the_user_in_a_database_keep_their_values(spark, postgres, tmp_path):
    schema = "id STRING, note STRING, price DECIMAL(9,2)"
    in_sqlite = Jdbc(f"jdbc:sqlite:{tmp_path / 'shop.db'}", "orders")
    in_postgres = Jdbc(postgres.url, f"public.u_{tmp_path.name}", USER, postgres.password)
    for to in (in_sqlite, in_postgres):
        table = jdbc_table(spark, to, "SELECT '' AS name")
        table.upsert(rows_of(spark, event(1, 1, 1, note="a", price=1.25), schema=schema))
        with _connected(spark, to) as connection:
            statement = connection.createStatement()
            statement.execute(f"ALTER TABLE {to.table} ADD seen TEXT DEFAULT 'no'")
            statement.execute(f"UPDATE {to.table} SET seen = 'yes'")
            if to is in_postgres:
                # Types that hold every value of the original ones.
                statement.execute(f"ALTER TABLE {to.table} ALTER price TYPE NUMERIC, ALTER note TYPE VARCHAR(20)")
            statement.close()
        events = event(1, 2, 2, note="b", price=2.25), event(2, 2, 2, note="c")
        table.upsert(rows_of(spark, *events, schema=schema))
        assert {(row.id, row.note, row.seen) for row in table.read().collect()} == {
            ("o1", "b", "yes"),
            ("o2", "c", "no"),
        }
    long = Jdbc(postgres.url, f"l_{tmp_path.name}", USER, postgres.password)
    with pytest.raises(SettingsError, match=r"--schema: a{64}: the database shortens this name"):
        upsert_jdbc(rows_of(spark, event(1, 1, 1), schema=f"{'a' * 64} INT"), long)


def test_an_order_that_is_not_there_is_refused(spark):
    with pytest.raises(SettingsError, match="--order"):
        table_rows(records(spark, event(1, 1, 1)), TOPOLOGY, order="seats")


def test_a_table_with_other_columns_is_left_alone(spark, table):
    other = table_rows(records(spark, event(1, 1, 1)), TOPOLOGY, schema="id STRING, note STRING", order="event_time")
    table.upsert(other)
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

    found = rows_of(spark, event(1, 2, 2, note="after"), event(2, 2, 3, note="bad"))
    with pytest.raises(Exception, match="planted"):
        table.upsert(dataclasses.replace(found, rows=found.rows.withColumn("note", fails("note"))))
    assert notes(table) == {"o1": "before"}
    assert table.others() == set()


def test_the_database_says_why_in_a_sentence(spark, tmp_path):
    to = Jdbc(f"jdbc:sqlite:{tmp_path / 'shop.db'}", "orders")
    rows = rows_of(spark, event(1, 1, 1))
    columns = ", ".join(f'"{field.name}" {to.dialect.column(field.dataType)}' for field in rows.rows.schema.fields)
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


def test_a_row_that_the_table_does_not_take_is_told_in_a_sentence(spark, tmp_path, postgres):
    to = Jdbc(postgres.url, "nul", USER, postgres.password)
    with pytest.raises(StateIncompatible, match=r"nul: the database says: ERROR: invalid byte sequence .*not touched"):
        upsert_jdbc(rows_of(spark, event(1, 1, 1, note="a\x00b")), to)
    path = str(tmp_path / "delta")
    upsert_delta(rows_of(spark, event(1, 1, 1, note="a")), path)
    spark.sql(f"ALTER TABLE delta.`{path}` ADD CONSTRAINT noted CHECK (note IS NOT NULL)")
    with pytest.raises(StateIncompatible, match=r"Delta says: .*CHECK constraint noted .*Nothing was written"):
        upsert_delta(rows_of(spark, event(2, 1, 2)), path)


def test_the_order_columns_are_those_that_are_documented():
    assert ORDER == ("order_value", "order_partition", "order_offset")
