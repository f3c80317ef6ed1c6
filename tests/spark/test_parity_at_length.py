"""A long stream of events is judged alike by the worker, the batch job, the Spark stream, and the exact model."""

from __future__ import annotations

import json
import os

import pytest

from dedup.topology.parse import parse
from tests.spark.parity import ALL, FORMATS, RULES, document, the_schema, unclocked
from tests.spark.parity_topics import ANY_TIME, rows_in_topics
from tests.spark.test_parity_stream import start_judging
from tests.spark.test_parity_worker import compared

__all__ = ["compared"]  # a fixture

pytestmark = pytest.mark.broker

MANY = int(os.environ.get("DEDUP_TEST_PARITY_EVENTS", "100000"))


@pytest.fixture
def compared_at_length(compared, spark, kafka, admin, topic_names, tmp_path):
    """Return a function that lets the Spark stream judge a long stream, too, by one topology."""

    def compare(name):
        topic, places, models = compared([name], MANY, seed=6, within_s=1_800)
        made = document(topic_names("streamed"), ALL[name], topic)
        topology = parse(json.dumps(made), name="streamed", read_file=the_schema)
        # As the worker's: a broker refuses what is dated 2099 where it may.
        admin.create_topic(topology.output.topic, 2, ANY_TIME)
        options = {"most_offsets": MANY // 4, "commit_rows": MANY // 20}
        start_judging(spark, kafka, tmp_path, topology, **options).wait()
        streamed = rows_in_topics(kafka.bootstrap, topology, places)
        assert {place: unclocked(row) for place, row in streamed.items()} == models[name]

    return compare


# Each format once, and each rule for IDs that the formats came with.
IN_CI = {"framed-fields", "avro-first-of", "protobuf-parts", "msgpack-python", "cbor-content", "csv-instant"}
TOPOLOGIES = [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in [*RULES, *FORMATS]]


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_one_long_stream_is_judged_alike_by_all_four(compared_at_length, name):
    compared_at_length(name)
