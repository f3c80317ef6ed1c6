"""Tracking ID, event time and fingerprint on Spark are those of the worker."""

from __future__ import annotations

from pyspark.sql import SparkSession

from dedup.spark.columns import RECORDS, identified
from dedup.topology.parse import parse

TOPOLOGY = """
dedup: 1
name: shop
source: {topics: [orders], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 1h
output: {topic: orders.unique}
"""


def test_ids_times_and_faults_stand_beside_the_record(spark: SparkSession):
    topology = parse(TOPOLOGY, name="shop.yaml")
    rows = [
        (b"k", b'{"id": 7}', [("h", b"x")], 5, "orders", 0, 0),
        (None, b'{"id": ""}', None, 6, "orders", 0, 1),
        (None, None, None, 7, "orders", 0, 2),
    ]
    found = identified(spark.createDataFrame(rows, RECORDS), topology).orderBy("offset").collect()
    assert [row.dedup_id for row in found] == [b"\x04\x07", None, None]
    assert [row.dedup_fault for row in found] == [None, "id_empty", "tombstone"]
    assert [row.dedup_kind for row in found] == [None, "missing_id", "tombstone"]
    assert found[0].headers == [("h", b"x")]
