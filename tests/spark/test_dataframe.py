"""`dedup` and `unique` on a DataFrame, as a notebook has it: any columns, nothing done before the result is used."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import IntegerType, StringType, TimestampType

from dedup.errors import SettingsError, TopologyError
from dedup.spark import dedup, unique
from dedup.spark.batch_verdicts import _spark_hash, _targets, judged
from dedup.spark.columns import as_records
from dedup.spark.dataframe import Shape
from dedup.spark.row_events import as_events
from dedup.topology.model import Topology
from dedup.topology.parse import parse

FILE = """
dedup: 1
name: shop
source: {topics: [orders], partitioned_by: tracking_id}
tracking_id: {field: order.id}
event_time: {field: at, unit: rfc3339}
guard_period: 1h
output: {topic: orders.unique}
"""
SHOP = parse(FILE, name="shop.yaml")
SCHEMA = (
    "order struct<id: bigint, lines: array<string>>, at timestamp, `price in EUR` decimal(20,4), day date, "
    "tags map<string, int>, raw binary, note string"
)
NOON = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
NOW_MS = int(dt.datetime(2024, 2, 1, tzinfo=dt.UTC).timestamp() * 1000)


def row(number: int | None, minutes: int, note: str | None = None) -> tuple:
    at = NOON + dt.timedelta(minutes=minutes, microseconds=1)
    price = Decimal("1234567890123456.7891")
    return ((number, ["a", "b"]), at, price, dt.date(2024, 1, 1), {"x": 1}, b"\x00\xff", note)


@pytest.fixture
def orders(spark: SparkSession) -> DataFrame:
    rows = [row(1, 0), row(2, 0, "second"), row(1, 30, "repeat"), row(1, 61, "new again"), row(None, 5)]
    return spark.createDataFrame(rows, SCHEMA)


def plain(found: DataFrame) -> Counter:
    return Counter(map(str, found.collect()))


def test_columns_stay_as_they_are_and_verdicts_stand_beside_them(orders: DataFrame):
    found = dedup(orders, SHOP, now_ms=NOW_MS)
    assert found.select(orders.columns).schema == orders.schema
    assert plain(found.select(*(F.col(f"`{name}`") for name in orders.columns))) == plain(orders)
    notes = {each.note or each.order.id: each for each in found.collect()}
    assert {note: each.dedup_verdict for note, each in notes.items()} == {
        1: "unique",
        "second": "unique",
        "repeat": "duplicate",
        "new again": "unique",
        None: "dead_letter",
    }
    repeat = notes["repeat"]
    assert repeat.dedup_id == b"\x04\x01"
    assert repeat.dedup_time - repeat.dedup_first_seen == dt.timedelta(minutes=30)
    assert (repeat.dedup_first_topic, repeat.dedup_first_partition, repeat.dedup_first_offset) == (None, None, None)
    assert (notes[None].dedup_reason, notes[None].dedup_time) == ("id_missing", None)
    kinds = {field.name: field.dataType for field in found.schema.fields}
    assert kinds["dedup_time"] == kinds["dedup_first_seen"] == kinds["dedup_stream_time"] == TimestampType()
    assert kinds["dedup_verdict"] == StringType()
    assert kinds["dedup_first_partition"] == IntegerType()


def test_unique_has_the_columns_of_the_input_and_what_the_output_topic_would_hold(orders: DataFrame):
    found = unique(orders, SHOP, now_ms=NOW_MS)
    assert found.schema == orders.schema
    assert Counter(each.note for each in found.collect()) == {None: 1, "second": 1, "new again": 1}


def test_what_a_policy_forwards_is_among_the_unique(orders: DataFrame):
    forwarding = parse(FILE.replace("order.id}", "order.id, missing: forward}"), name="shop.yaml")
    assert unique(orders, forwarding, now_ms=NOW_MS).count() == 4


def test_verdicts_are_those_of_the_same_rows_as_events(spark: SparkSession):
    rows = spark.range(3_000).select(
        F.struct((F.col("id") * 7919 % 900).alias("id")).alias("order"),
        F.timestamp_millis(F.lit(1_704_110_400_000) + F.col("id") * 104_729 % 9_000_000).alias("at"),
    )
    events = as_records(rows.select(as_events(rows).alias("value")))
    names = ["dedup_id", "verdict", "dedup_time_ms", "first_time_ms"]
    expected = judged(events, SHOP, now_ms=NOW_MS, order="event_time").select(names)
    ours = dedup(rows, SHOP, now_ms=NOW_MS)
    times = (F.unix_millis(name) for name in ("dedup_time", "dedup_first_seen"))
    assert plain(ours.select("dedup_id", "dedup_verdict", *times).toDF(*names)) == plain(expected)


def test_records_of_kafka_are_judged_by_their_offsets(spark: SparkSession):
    values = [(0, 0, "x"), (0, 2, "y"), (0, 1, "x"), (1, 0, "x")]
    rows = [
        Row(partition=partition, offset=offset, topic="orders", value=b'{"order":{"id":"%s"}}' % name.encode(), extra=1)
        for partition, offset, name in values
    ]
    timeless = parse(FILE.replace("event_time: {field: at, unit: rfc3339}", "event_time: record"), name="shop.yaml")
    df = spark.createDataFrame(rows).withColumn("timestamp", F.timestamp_millis(F.lit(1_704_110_400_000)))
    found = dedup(df, timeless, shape="kafka", now_ms=NOW_MS).orderBy("partition", "offset").collect()
    assert [each.dedup_verdict for each in found] == ["unique", "duplicate", "unique", "unique"]
    assert (found[1].dedup_first_topic, found[1].dedup_first_partition, found[1].dedup_first_offset) == ("orders", 0, 0)
    assert {each.extra for each in found} == {1}


def test_nothing_runs_before_the_result_is_used(spark: SparkSession, orders: DataFrame, tmp_path: Path):
    file = tmp_path / "shop.yaml"
    file.write_text(FILE, encoding="utf-8")
    tracker = spark.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup(None))
    found = dedup(orders, file)
    unique(orders, str(file))
    assert set(tracker.getJobIdsForGroup(None)) == before
    assert found.count() == 5
    assert set(tracker.getJobIdsForGroup(None)) > before
    assert [path.name for path in tmp_path.iterdir()] == ["shop.yaml"]


@pytest.mark.parametrize("shape", ["columns", "kafka"])
def test_of_few_rows_adaptive_execution_makes_few_tasks_and_no_other_verdicts(
    spark: SparkSession, orders: DataFrame, shape: Shape
):
    if shape == "kafka":
        value = as_events(orders).alias("value")
        place = [F.lit("orders").alias("topic"), F.lit(0).alias("partition")]
        rows = orders.select("at", value).orderBy("at").coalesce(1)
        orders = rows.select("value", *place, F.monotonically_increasing_id().alias("offset"))
    before = dedup(orders, SHOP, shape=shape, now_ms=NOW_MS).collect()
    settings = {"spark.sql.adaptive.enabled": "true", "spark.sql.shuffle.partitions": "40"}
    found = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        after = dedup(orders, SHOP, shape=shape, now_ms=NOW_MS)
        assert plain(after) == Counter(map(str, before))
        assert after.rdd.getNumPartitions() < 10
    finally:
        for name, value in found.items():
            spark.conf.set(name, value)


def test_a_stream_is_refused(spark: SparkSession):
    stream = spark.readStream.format("rate").load()
    with pytest.raises(SettingsError, match="each micro-batch would be deduplicated separately"):
        dedup(stream, SHOP)


@pytest.mark.parametrize("name", ["dedup_verdict", "dedup_first_seen", "dedup_row", "Dedup_Id"])
def test_a_name_that_the_result_needs_is_refused(orders: DataFrame, name: str):
    with pytest.raises(SettingsError, match=f"column {name}: is a column that dedup adds"):
        dedup(orders.withColumn(name, F.lit(1)), SHOP)


def test_a_name_that_stands_twice_is_refused(orders: DataFrame):
    for name in ("note", "Note"):
        with pytest.raises(SettingsError, match="column note: occurs more than once"):
            dedup(orders.select("*", F.lit("x").alias(name)), SHOP)


def test_any_other_name_can_be_a_column(spark: SparkSession):
    rows = spark.createDataFrame([(1, AT, 5, 7)], ["id", "at", "we`ird", "a.b"])
    found = unique(rows, flat(), now_ms=NOW_MS)
    assert found.columns == rows.columns
    assert found.collect() == rows.collect()


@pytest.mark.parametrize("interval", ["interval '1-2' year to month", "make_interval(1, 2, 3)"])
def test_a_type_that_python_cannot_hold_is_refused(orders: DataFrame, interval: str):
    with pytest.raises(SettingsError, match=r"column x: is interval.*, which Spark cannot pass to Python; cast it"):
        dedup(orders.withColumn("x", F.expr(interval)), SHOP)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("{field: order.id}", "{key: true}"), "tracking_id: is taken from the record's key or a header"),
        (("{field: order.id}", "{header: id}"), "tracking_id: is taken from the record's key or a header"),
        (
            ("{field: order.id}", "{parts: [{field: order.id}, {header: id}]}"),
            "tracking_id: is taken from the record's",
        ),
        (("{field: at, unit: rfc3339}", "record"), "event_time: is the record's timestamp"),
    ],
)
def test_what_a_row_of_columns_does_not_have_is_said_before_anything_runs(
    orders: DataFrame, change: tuple[str, str], says: str
):
    with pytest.raises(SettingsError, match=says):
        dedup(orders, parse(FILE.replace(*change), name="shop.yaml"))


def test_a_row_of_columns_has_no_member_of_a_key(orders: DataFrame):
    text = FILE.replace("{field: order.id}", "{key: id}").replace("source: {", "source: {key_format: json, ")
    with pytest.raises(SettingsError, match="tracking_id: is taken from the record's key or a header"):
        dedup(orders, parse(text, name="shop.yaml"))


ORDER = "order is struct<id:bigint,lines:array<string>>, but an ID is a single value; name one of its members"


@pytest.mark.parametrize(
    ("column", "type_of", "says"),
    [
        ("Order.ID", None, r'Order.ID is not there: the rows have no column `Order`; did you mean "order"\? Upper and'),
        ("order.ID", None, r'order.ID order has no member `ID`; did you mean "id"\?'),
        (
            "customer",
            None,
            r"customer is not there: the rows have no column `customer`, only at, day, note, order, pric",
        ),
        ("note.id", None, "note.id is not there: note is string, which has no member `id`"),
        ("order", None, ORDER),
        ("void", "void", "void is void, which is always null; cast the column"),
    ],
)
def test_an_id_that_no_row_can_have_is_refused(orders: DataFrame, column: str, type_of: str | None, says: str):
    given = orders if type_of is None else orders.withColumn(column, F.lit(None).cast(type_of))
    for rule in ("{field: %s}", "{first_of: [{field: order.id}, {field: %s}]}", "{fields: [order.id, %s]}"):
        with pytest.raises(SettingsError, match=f"tracking_id: {says}"):
            unique(given, parse(FILE.replace("{field: order.id}", rule % column), name="shop.yaml"))


@pytest.mark.parametrize(
    ("value", "kind"),
    [("array()", "array<void>"), ("map()", "map<void,void>"), ("named_struct('a', array())", "struct<a:array<void>>")],
)
def test_a_column_whose_values_have_no_type_is_refused(orders: DataFrame, value: str, kind: str):
    """Was: a traceback of pyarrow."""
    with pytest.raises(SettingsError, match=f"column empty: is {kind}, which Spark cannot pass to Python; cast it"):
        unique(orders.withColumn("empty", F.expr(value)), parse(FILE, name="shop.yaml"))


@pytest.mark.parametrize("value", ["{}", "array({})", "map('k', {})", "named_struct('inner', {})"])
def test_members_of_a_struct_that_differ_only_in_case(orders: DataFrame, value: str):
    """Was: a traceback of Spark."""
    given = orders.withColumn("twice", F.expr(value.format("named_struct('a', 1, 'A', 2)")))
    rules = parse(FILE, name="shop.yaml")
    says = "column twice: has a struct with more than one member `a`; rename one of them, or set `spark.sql.caseSens"
    with pytest.raises(SettingsError, match=says):
        unique(given, rules)
    conf = orders.sparkSession.conf
    conf.set("spark.sql.caseSensitive", "TRUE")
    try:
        assert unique(given, rules).count() == unique(orders, rules).count()
    finally:
        conf.unset("spark.sql.caseSensitive")


@pytest.mark.parametrize(
    ("kind", "unit", "says"),
    [
        (
            "timestamp_ntz",
            "rfc3339",
            r"at is timestamp_ntz, a time without a time zone; convert the column to timestamp",
        ),
        ("date", "rfc3339", "at is date, which unit rfc3339 cannot read; convert the column to timestamp"),
        ("bigint", "rfc3339", "at is bigint, which unit rfc3339 cannot read; write unit: s, ms, or us"),
        ("timestamp", "ms", "at is timestamp, which unit ms cannot read; write unit: rfc3339"),
        ("string", "us", "at is string, which unit us cannot read; write unit: rfc3339"),
    ],
)
def test_an_event_time_that_no_row_can_have_is_refused(orders: DataFrame, kind: str, unit: str, says: str):
    given = orders.withColumn("at", F.lit(None).cast(kind))
    with pytest.raises(SettingsError, match=f"event_time: {says}"):
        unique(given, parse(FILE.replace("rfc3339", unit), name="shop.yaml"))


@pytest.mark.parametrize(
    "rule",
    [
        "{parts: [{field: order}, {field: tags.x, absent: as_value}]}",
        '{fields: ["order.lines[0]", note]}',
        "{first_of: [{header: id}, {field: v.x}]}",
    ],
)
def test_what_some_row_can_have_is_not_refused(orders: DataFrame, rule: str):
    given = orders.withColumn("v", F.parse_json(F.lit("{}")))
    dedup(given, parse(FILE.replace("{field: order.id}", rule), name="shop.yaml"))


def test_records_of_kafka_without_headers_or_times_are_refused(spark: SparkSession):
    rows = spark.createDataFrame([("{}",)], "value string")
    text = FILE.replace("{field: order.id}", "{header: id}").replace("{field: at, unit: rfc3339}", "record")
    with pytest.raises(
        SettingsError, match=r"tracking_id: is taken from .* a header, which the DataFrame does not"
    ) as e:
        dedup(rows, parse(text, name="shop.yaml"), shape="kafka")
    assert "event_time: is the record's timestamp, which the DataFrame does not have" in str(e.value)
    dedup(
        rows.selectExpr(
            "*", "CAST(NULL AS array<struct<key:string,value:binary>>) AS headers", "timestamp'2024-01-01' AS timestamp"
        ),
        SHOP,
        shape="kafka",
    )


AT = "2024-01-01T00:00:00Z"


def flat(id_rule: str = "{field: id}", time: str = "{field: at, unit: rfc3339}") -> Topology:
    text = FILE.replace("{field: order.id}", id_rule).replace("{field: at, unit: rfc3339}", time)
    return parse(text, name="shop.yaml")


def test_a_number_that_pandas_lacks_is_no_id(spark: SparkSession):
    rows = spark.createDataFrame(pd.DataFrame({"id": [1.0, np.nan, np.nan], "at": [AT] * 3}))
    nested = rows.select(F.array("id").alias("ids"), F.struct("id").alias("s"), "at")
    for table, rule in ((rows, "id"), (nested, '"ids[0]"'), (nested, "s.id")):
        found = dedup(table, flat(f"{{field: {rule}}}"), now_ms=NOW_MS).groupBy("dedup_verdict").count().collect()
        assert {each[0]: each[1] for each in found} == {"unique": 1, "dead_letter": 2}


def test_what_json_cannot_express_is_a_dead_letter_and_equals_nothing_else(spark: SparkSession):
    texts = ", ".join(f"({number}, x'{text}', {ratio})" for number, text, ratio in ODD)
    rows = spark.sql(
        f"SELECT n, CAST(text AS string) AS id, '{AT}' AS at, ratio FROM VALUES {texts} AS t(n, text, ratio)"
    )
    found = dedup(rows, flat(), now_ms=NOW_MS).orderBy("n").select("dedup_verdict", "dedup_reason").collect()
    assert list(map(tuple, found)) == [
        ("dead_letter", "not_utf8"),
        ("dead_letter", "not_utf8"),
        ("unique", None),
        ("dead_letter", "not_json"),
        ("dead_letter", "not_json"),
        ("unique", None),
    ]
    named = rows.select(F.array("id").alias("é"), F.create_map("id", "n").alias("by_name"), "ratio", "n")
    values = named.select(as_events(named.drop("n")).alias("v"), "n")
    assert [bytes(each.v) for each in values.orderBy("n").limit(4).collect()] == [
        b'{"\xc3\xa9":["caf\xe9"],"by_name":{"caf\xe9":1},"ratio":0.5}',
        b'{"\xc3\xa9":["caf\xe8"],"by_name":{"caf\xe8":2},"ratio":0.5}',
        b'{"\xc3\xa9":["caf\xef\xbf\xbd"],"by_name":{"caf\xef\xbf\xbd":3},"ratio":0.5}',
        b'{"\xc3\xa9":["a"],"by_name":{"a":4},"ratio":Infinity}',
    ]


HALF = "double('0.5')"
ODD = (
    (1, "636166e9", HALF),
    (2, "636166e8", HALF),
    (3, "636166efbfbd", HALF),
    (4, "61", "double('Infinity')"),
    (5, "61", "double('-Infinity')"),
    (6, b"Infinity".hex(), HALF),
)
"""Text in Latin-1, text with U+FFFD, infinite numbers, and the word Infinity."""


def test_an_absurd_time_is_shown_as_none(spark: SparkSession):
    usual = 1_704_067_200_000
    rows = spark.createDataFrame([(1, usual), (2, usual * 1000), (3, usual * 10**6), (4, -1)], "id int, at bigint")
    found = dedup(rows, flat(time="{field: at, unit: ms}"), now_ms=NOW_MS).orderBy("id").collect()
    assert [each.dedup_reason for each in found] == [None, "future_time", "future_time", "negative_time"]
    assert [each.dedup_time is None for each in found] == [False, True, True, True]


def test_an_order_by_offsets_needs_them(orders: DataFrame):
    with pytest.raises(SettingsError, match="needs shape"):
        dedup(orders, SHOP, order="offsets")


def test_records_without_a_value_are_refused(orders: DataFrame):
    with pytest.raises(TopologyError, match="has no column `value`"):
        dedup(orders, SHOP, shape="kafka")


def test_a_file_that_is_not_there_is_named(orders: DataFrame, tmp_path: Path):
    with pytest.raises(TopologyError, match=r"shop\.yaml: cannot be read: No such file"):
        dedup(orders, tmp_path / "shop.yaml")
    (tmp_path / "shop.yaml").write_bytes(b"name: \xff")
    with pytest.raises(TopologyError, match=r"shop\.yaml: is not UTF-8 at byte 6"):
        dedup(orders, tmp_path / "shop.yaml")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"shape": "column"}, 'shape: "column" is unknown; write columns or kafka'),
        ({"order": "offset"}, 'order: "offset" is unknown; write offsets or event_time'),
    ],
)
def test_a_misspelled_option_is_told_the_choices(orders: DataFrame, option: dict[str, str], says: str):
    with pytest.raises(SettingsError, match=says):
        dedup(orders, SHOP, **option)


def test_the_hash_is_sparks_own(spark: SparkSession):
    numbers = [0, 1, 41, 2**16, 2**31 - 1]
    rows = spark.createDataFrame([(number,) for number in numbers], "number int")
    expected = [each.hash for each in rows.select(F.hash("number").alias("hash")).collect()]
    assert _spark_hash(np.array(numbers, np.uint32)).tolist() == expected
    assert all(len(set(_targets(count))) == count for count in (1, 7, 200, 4_099))


def test_a_column_named_timestamp_type_is_the_users_own_unless_times_are_arrivals(spark):
    rows = spark.createDataFrame([("{}", "mine")], "value string, timestampType string")
    assert "timestampType" not in as_records(rows).columns
    with pytest.raises(TopologyError, match="timestampType"):
        as_records(rows, by_arrival=True)
