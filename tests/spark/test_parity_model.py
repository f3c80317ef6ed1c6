"""Rows that Spark reads in an order of nobody's are judged as the exact model judges the log.

Every rule and policy: test_parity_worker.py, and without Spark test_batch_halves.py.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pyspark.sql import DataFrame, SparkSession

from dedup.core.framing import SchemaBook
from dedup.core.window import BEFORE_ALL_TIME
from dedup.spark.batch_verdicts import judged
from dedup.spark.columns import RECORDS
from dedup.topology.parse import parse
from tests.integration.workload import Event
from tests.spark.parity import AVSC, NOW_MS, POLICIES, RULES, Row, by_model, document, in_avro, stream

COUNT = 6_000
TOPIC = "parity-in"


def frame(spark: SparkSession, events: list[Event], directory) -> DataFrame:
    """Return the events as rows with coordinates, in an order of nobody's."""
    import pyarrow as pa  # noqa: PLC0415 - with PySpark
    import pyarrow.parquet as pq  # noqa: PLC0415

    ends: dict[int, int] = {}
    rows = []
    for event in events:
        offset = ends[event.partition] = ends.get(event.partition, -1) + 1
        headers = [{"key": name, "value": value} for name, value in event.headers]
        rows.append((event.key, event.value, headers, event.timestamp_ms, TOPIC, event.partition, offset))
    rows.sort(key=lambda row: hash((row[6] // 50, row[5])))
    columns = list(zip(*rows, strict=True))
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    kinds = [pa.binary(), pa.binary(), headers, pa.int64(), pa.string(), pa.int32(), pa.int64()]
    table = pa.table([pa.array(c, k) for c, k in zip(columns, kinds, strict=True)], names=RECORDS.names)
    for part in range(3):
        size = len(rows) // 3 + 1
        pq.write_table(table.slice(part * size, size), directory / f"{part}.parquet")
    return spark.read.parquet(str(directory)).select(*RECORDS.names)


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return stream(1, COUNT)


@pytest.fixture(scope="module")
def shuffled(spark, events, tmp_path_factory) -> DataFrame:
    return frame(spark, events, tmp_path_factory.mktemp("parity")).cache()


PLACE, FIRST = ("partition", "offset"), ("first_partition", "first_offset")


def rows_of(df: DataFrame) -> dict[tuple[int, int], tuple[Row, int]]:
    found: dict[tuple[int, int], tuple[Row, int]] = {}
    columns = df.select(*PLACE, *FIRST, "verdict", "reason", "first_time_ms", "stream_time_ms").toArrow().columns
    for *at, verdict, reason, time_ms, stream_time_ms in zip(*(each.to_pylist() for each in columns), strict=True):
        place, first = tuple(at[:2]), tuple(at[2:])
        assert place not in found
        row = Row(verdict, reason, time_ms, None if first[0] is None else first)
        found[place] = row, BEFORE_ALL_TIME if stream_time_ms is None else stream_time_ms
    return found


@pytest.mark.parametrize("name", ["fields", "identity"])
def test_rows_in_no_order_are_brought_into_the_log_s(spark, events, shuffled, name):
    options = {**RULES, **POLICIES}[name]
    topology = parse(json.dumps(document(name, options, TOPIC)), name=name)
    expected = by_model(events, topology)
    kinds = {row.verdict for row, _ in expected.values()}
    assert {"unique", "duplicate", "late", "dead_letter"} <= kinds
    found = rows_of(judged(shuffled, topology, now_ms=NOW_MS, order="offsets"))
    assert found == expected


def test_members_of_keys_of_two_schema_versions(spark, events, tmp_path):
    """The second version has one more field; every eighth schema ID is in the header, and some keys are damaged."""
    second = json.loads(AVSC)
    second["fields"].append({"name": "w", "type": "int"})
    versions, made = [b"\0\0\0\0\1", b"\0\0\0\0\2"], []
    for row, (event, in_key) in enumerate(zip(events, in_avro(7, events), strict=True)):
        version = row % 3 == 0
        payload = None if in_key.value is None else in_key.value + b"\2" * version
        headers = event.headers
        if payload is not None and row % 8:
            payload = versions[version] + payload
        elif payload is not None:
            headers = (*headers, ("__key_schema_id", versions[version]))
        made.append(replace(event, key=payload, headers=headers))
    rule = {"parts": [{"key": "order.id"}, {"key": "tenant", "absent": "as_value"}, {"header": "id"}]}
    options = {"source": {"key_format": "avro"}, "tracking_id": rule}
    schemas = dict(zip(versions, [AVSC, json.dumps(second)], strict=True))
    topology = parse(json.dumps(document("keys", options, TOPIC)), name="keys").knowing(SchemaBook(schemas.get))
    expected = by_model(made, topology)
    reasons = {row.reason for row, _ in expected.values()}
    assert {"unique", "duplicate", "late", "dead_letter"} <= {row.verdict for row, _ in expected.values()}
    assert {"not_avro", "id_null", "id_missing"} <= reasons
    found = rows_of(judged(frame(spark, made, tmp_path), topology, now_ms=NOW_MS, order="offsets"))
    assert found == expected
