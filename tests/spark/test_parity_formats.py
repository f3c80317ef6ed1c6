"""What test_parity_worker.py shows of JSON, of every other format, and behind a repartition topic."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from dedup.core.reference_model import ModelRecord, ReferenceModel
from dedup.core.window import Source
from dedup.settings import Settings
from dedup.spark.batch_verdicts import judged
from dedup.spark.kafka_source import read_kafka
from dedup.topology.parse import parse
from tests.brokers import read_all
from tests.integration.workload import Event
from tests.spark.parity import ALL, document, model_record, of_format, recipe_of, row_of, rules_of, stream
from tests.spark.parity_topics import ANY_TIME, rows_in_topics, sent
from tests.spark.test_parity_at_length import IN_CI
from tests.spark.test_parity_model import rows_of
from tests.spark.test_parity_worker import FEW, compared, start_worker, until_ended

__all__ = ["compared"]  # a fixture

pytestmark = pytest.mark.broker

BEHIND_A_REPARTITION = int(os.environ.get("DEDUP_TEST_PARITY_EVENTS", FEW))


def by_model_of_log(kafka, topology, partitions, now_ms):
    """Return the model's verdicts in the order of the repartition topic, by source partition and offset."""
    rules, recipe = rules_of(topology), recipe_of(topology)
    feeds = [(0, partition) for partition in range(partitions)]
    tasks: dict[int, ReferenceModel] = {}
    found = {}
    for message in sorted(
        read_all(kafka.bootstrap, topology.repartition_topic), key=lambda m: (m.partition(), m.offset())
    ):
        task = tasks.setdefault(message.partition(), ReferenceModel(rules, feeds))
        *own, last, stamp = message.headers()
        if last[0] == "dedup-idle" or stamp[0] == "dedup-idle":
            marker = dict([last, stamp])["dedup-idle"].decode().rsplit("/", 1)
            task.judge(ModelRecord(None, 0, Source(0, int(marker[1]), -1), idle=True))
            continue
        partition, offset = map(int, last[1].decode().rsplit("/", 2)[1:])
        event = Event(partition, message.value(), int(stamp[1]), message.key(), tuple(own))
        record, code = model_record(recipe, event, Source(0, partition, offset), now_ms + 3_600_000)
        found[partition, offset] = row_of(task.judge(record), code)
    return found


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", ["field", "identity", "python"])
def test_behind_a_repartition_topic_in_its_order(spark, kafka, admin, topic_names, tmp_path, name):
    topic = topic_names("parity-in")
    events = stream(8, BEHIND_A_REPARTITION)
    # Equal IDs in any partition, and one partition far ahead of the other.
    events = [replace(event, partition=number * 7919 % 2) for number, event in enumerate(events)]
    places = sent(admin, topic, events)
    made = document(topic_names(name), ALL[name], topic)
    made["source"] = {"topics": [topic]}
    made["idle_after"] = "1s"
    file = tmp_path / f"{name}.yaml"
    file.write_text(json.dumps(made), encoding="utf-8")
    topology = parse(file.read_text(encoding="utf-8"), name=name)
    admin.create_topic(topology.output.topic, 2, ANY_TIME)
    until_ended({name: start_worker(tmp_path, file, kafka, name)}, tmp_path, 1_800)
    now_ms = int(time.time() * 1000)
    model = by_model_of_log(kafka, topology, 2, now_ms)
    assert len(model) == len(events)
    assert {"unique", "duplicate", "dead_letter"} <= {row.verdict for row in model.values()}
    settings = Settings(brokers=(kafka.bootstrap,), state_dir=tmp_path / "state")
    history = read_kafka(spark, topology, settings, repartitioned=True)
    batch = rows_of(judged(history.records, topology, now_ms=now_ms, order="offsets", feeds=history.feeds))
    assert {place: row for place, (row, _) in batch.items()} == model
    assert rows_in_topics(kafka.bootstrap, topology, places) == model


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fmt", ["json_schema", "avro", "protobuf", "msgpack", "cbor", "csv"])
def test_values_of_a_format(compared, fmt):
    compared([name for name in of_format(fmt) if name not in IN_CI], FEW, seed=5, within_s=240)
