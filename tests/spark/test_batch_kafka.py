"""Backfill over ranges of Kafka: committed records only, whole or refused, the same on the command line."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Producer, TopicPartition
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from typer.testing import CliRunner

from dedup.core.window import Feed
from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.settings import Settings
from dedup.spark import kafka_source
from dedup.spark.backfill import backfill
from dedup.spark.batch_verdicts import judged
from dedup.spark.kafka_source import read_kafka
from dedup.spark.seed import seed
from dedup.topology.parse import parse
from tests.integration.fleet import KEPT

pytestmark = pytest.mark.broker

BASE_MS = 1_700_000_000_000
LATER_MS = 4_000_000_000_000
"""A time after the markers of transactions, whose time is that of the broker's clock."""


@pytest.fixture
def shop(kafka, admin, topic_names, tmp_path):
    """Return a topology on a new topic of two partitions, its settings, and a function that sends (partition, id, s)."""
    name = topic_names("range")
    admin.create_topic(f"{name}-in", 2, KEPT)
    made = {
        "dedup": 1,
        "name": name,
        "source": {"topics": [f"{name}-in"], "partitioned_by": "tracking_id"},
        "tracking_id": {"field": "id"},
        "guard_period": "10s",
        "output": {"topic": f"{name}-out"},
    }

    def send(rows, *, commit=True, leave_open=False):
        name_of_sender = {"transactional.id": topic_names("sender"), "transaction.timeout.ms": 900_000}
        producer = Producer({"bootstrap.servers": kafka.bootstrap, **name_of_sender})
        producer.init_transactions(30)
        producer.begin_transaction()
        for partition, number, second in rows:
            value = json.dumps({"id": number}).encode()
            producer.produce(f"{name}-in", value, b"k", partition=partition, timestamp=BASE_MS + second * 1000)
        producer.flush(30)
        if leave_open:
            return producer
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
        return producer

    return parse(json.dumps(made), name="shop"), Settings(brokers=(kafka.bootstrap,), state_dir=tmp_path), send


def test_only_committed_records_are_judged_and_pieces_of_a_partition_are_one_log(spark, shop, tmp_path):
    topology, settings, send = shop
    send([(0, number % 40, number) for number in range(200)])
    send([(0, 1_000, 500), (1, 1_000, 0)], commit=False)
    send([(0, 1_000, 100), (1, 1_000, 0)])
    history = read_kafka(spark, topology, settings)
    assert history.records.rdd.getNumPartitions() > 2
    report = backfill(history, topology, str(tmp_path / "out"))
    assert report.verdicts == {"late": 1, "unique": 201}
    found = spark.read.parquet(report.path)
    assert found.where("topic is null or partition is null or offset is null").count() == 0
    late = found.where("verdict = 'late'").first()
    assert late["stream_time_ms"] == BASE_MS + 199_000


def test_a_topic_whose_start_retention_ate_is_refused_with_the_offsets(spark, shop, admin):
    topology, settings, send = shop
    topic = topology.source.topics[0]
    send([(0, number, number) for number in range(50)])
    place = TopicPartition(topic, 0, 30)
    admin.client.delete_records([place])[place].result(timeout=30)
    with pytest.raises(StateIncompatible, match=rf"{topic}/0 begins at offset 30 \(0 to 29 are deleted\)"):
        read_kafka(spark, topology, settings)
    left = read_kafka(spark, topology, settings, start="earliest")
    assert left.records.agg(F.min("offset")).first()[0] == 30


def test_a_start_that_retention_eats_while_it_is_read_is_refused_with_the_offsets(spark, shop, admin, tmp_path):
    topology, settings, send = shop
    topic = topology.source.topics[0]
    send([(0, number, number) for number in range(50)])
    history = read_kafka(spark, topology, settings)
    place = TopicPartition(topic, 0, 30)
    admin.client.delete_records([place])[place].result(timeout=30)
    with pytest.raises(StateIncompatible, match=rf"deleted records .*not all of {topic}/0 offsets \d+ to \d+ are left"):
        backfill(history, topology, str(tmp_path / "out"))
    assert list((tmp_path / "out").glob("run=*")) == []


def test_a_range_between_two_times(spark, shop):
    topology, settings, send = shop
    send([(0, number, number) for number in range(50)])
    part = read_kafka(spark, topology, settings, start=BASE_MS + 10_000, until=BASE_MS + 20_000)
    assert sorted(row["offset"] for row in part.records.collect()) == list(range(10, 20))


def test_a_transaction_that_stays_open_ends_what_is_there_now_and_refuses_a_later_end(
    spark, shop, tmp_path, monkeypatch, caplog
):
    topology, settings, send = shop
    topic = topology.source.topics[0]
    send([(0, number, number) for number in range(50)])
    left_open = send([(0, 100, 100)], leave_open=True)
    send([(0, 101, 101)])
    monkeypatch.setattr(kafka_source, "_SETTLED_WITHIN_S", 0.0)
    monkeypatch.setitem(kafka_source._CONSUMER, "kafkaConsumer.pollTimeoutMs", "3000")
    report = backfill(read_kafka(spark, topology, settings), topology, str(tmp_path / "now"))
    assert report.verdicts == {"unique": 50}
    begin = 51  # behind the marker of the first transaction
    assert f"{topic}/0 is read only up to offset {begin}: a transaction that began there was still open" in caplog.text
    open_still = (
        rf"{topic}/0 can be read only up to offset {begin} of \d+: a transaction that began there was still open"
    )
    with pytest.raises(BrokerUnavailable, match=open_still):
        read_kafka(spark, topology, settings, until=LATER_MS)
    with pytest.raises(BrokerUnavailable, match=open_still):
        seed(spark, topology, settings, "latest")
    monkeypatch.setattr(kafka_source, "_SETTLED_WITHIN_S", 60.0)
    left_open.abort_transaction(30)
    until_time = read_kafka(spark, topology, settings, until=LATER_MS)
    assert until_time.records.count() == 51
    assert seed(spark, topology, settings, "latest").counts.verdicts == {"unique": 51}


def test_a_topic_that_is_missing_is_named(spark, shop):
    topology, settings, _ = shop
    with pytest.raises(BrokerUnavailable, match=f"{topology.repartition_topic} does not exist"):
        read_kafka(spark, topology, settings, repartitioned=True)


def test_source_topics_of_a_repartitioned_topology_are_judged_in_step(spark, shop):
    topology, settings, send = shop
    scattered = parse(
        json.dumps(
            {
                "dedup": 1,
                "name": topology.name,
                "source": {"topics": list(topology.source.topics)},
                "tracking_id": {"field": "id"},
                "guard_period": "10s",
                "output": {"topic": topology.output.topic},
            }
        ),
        name="shop",
    )
    # The same ID in both partitions; partition 1 is read long before partition 0 is through.
    send([(1, 7, 5), (1, 8, 1_000)])
    send([(0, number, number) for number in range(20)])
    history = read_kafka(spark, scattered, settings)
    found = judged(history.records, scattered, now_ms=BASE_MS * 2, order="offsets", contiguous=True).collect()
    verdicts = {(row["partition"], row["offset"]): row["verdict"] for row in found}
    assert verdicts[1, 0] == "unique"
    assert verdicts[0, 7] == "duplicate"
    assert sorted(verdicts.values()).count("late") == 0
    assert sorted(verdicts.values()).count("unique") == 21
    feeds = (Feed(0, 0), Feed(0, 1))
    with pytest.raises(Exception, match="was not written by a repartition task"):
        judged(history.records, scattered, now_ms=BASE_MS * 2, order="offsets", feeds=feeds).collect()


def test_the_command_prints_what_it_judged(spark, shop, tmp_path, monkeypatch):
    from dedup.cli.main import create_app  # noqa: PLC0415 - as the program does

    topology, settings, send = shop
    send([(0, 1, 0), (0, 1, 1), (1, 2, 0)])
    file, config = tmp_path / "shop.yaml", tmp_path / "config.yaml"
    file.write_text(
        f"dedup: 1\nname: {topology.name}\nguard_period: 10s\ntracking_id: {{field: id}}\n"
        f"source: {{topics: [{topology.name}-in], partitioned_by: tracking_id}}\noutput: {{topic: {topology.name}-out}}\n",
        encoding="utf-8",
    )
    config.write_text(f"brokers: ['{settings.brokers[0]}']\n", encoding="utf-8")
    # The run's session goes on; a driver of its own would stop it.
    monkeypatch.setattr(type(spark), "stop", lambda _self: None)
    arguments = ["spark", "backfill", str(file), "--config", str(config), "--out", str(tmp_path / "out"), "--quiet"]
    ran = CliRunner().invoke(create_app(), arguments)
    assert ran.exit_code == 0, ran.output
    assert "judged 3: duplicate 1  unique 2" in ran.output
    again = CliRunner().invoke(create_app(), arguments)
    assert "was already published" in again.output
