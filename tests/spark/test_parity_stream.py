"""The Spark stream judges every record as the exact model does, by every rule and every policy.

One long stream: test_parity_at_length.py.
"""

from __future__ import annotations

import json
import time

import pytest

from dedup.settings import Settings
from dedup.spark.stream import StreamOptions, start_stream
from dedup.topology.model import LateDrop
from dedup.topology.parse import parse
from tests.spark.parity import by_model, document, in_format, of_format, stream, the_schema, unclocked
from tests.spark.parity_topics import ANY_TIME, rows_in_topics, sent

FEW = 2_000


def start_judging(spark, kafka, directory, topology, **options):
    settings = Settings(brokers=(kafka.bootstrap,), state_dir=directory / "state")
    chosen = StreamOptions(str(directory / topology.name), exit_when_done=True, **options)
    return start_stream(spark, topology, settings, chosen)


def assert_equal(kafka, topology, events, places):
    expected = {place: row for place, (row, _) in by_model(events, topology, int(time.time() * 1000)).items()}
    kinds = {row.verdict for row in expected.values()}
    assert {"unique", "duplicate", "late", "dead_letter"} <= kinds
    if isinstance(topology.late, LateDrop):
        expected = {place: row for place, row in expected.items() if row.verdict != "late"}
    found = {place: unclocked(row) for place, row in rows_in_topics(kafka.bootstrap, topology, places).items()}
    expected = {place: unclocked(row) for place, row in expected.items()}
    wrong = [(place, found.get(place), row) for place, row in expected.items() if found.get(place) != row]
    assert wrong == []
    assert len(found) == len(expected)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fmt", ["json", "json_schema", "avro", "protobuf", "msgpack", "cbor", "csv"])
def test_every_rule_and_policy(spark, kafka, admin, topic_names, tmp_path, fmt):
    topic = topic_names("parity-in")
    places = sent(admin, topic, events := in_format(fmt, 7, stream(3, FEW)))
    topologies = [
        parse(json.dumps(document(topic_names(name), options, topic)), name=name, read_file=the_schema)
        for name, options in of_format(fmt).items()
    ]
    for topology in topologies:
        admin.create_topic(topology.output.topic, 2, ANY_TIME)
    # Side by side: what takes time is starting micro-batches.
    running = [start_judging(spark, kafka, tmp_path, topology) for topology in topologies]
    for each in running:
        each.wait()
    for topology in topologies:
        assert_equal(kafka, topology, events, places)
