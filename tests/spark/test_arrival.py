"""`event_time: arrival` on Spark: a stream and a batch job give a worker's and the model's verdicts, and refuse as it does."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME

from dedup.errors import StateIncompatible
from dedup.spark.backfill import backfill
from dedup.spark.kafka_source import read_kafka
from dedup.spark.stream import StreamOptions, start_stream
from dedup.verify.verifier import verify
from tests.integration.fleet import Job, until
from tests.integration.test_admin import distinct, output_ids

pytestmark = pytest.mark.broker


@pytest.fixture(params=["direct", "repartitioned"])
def jobs(request, kafka, admin, tmp_path, topic_names):
    """Return two jobs, one for a worker and one for a stream, that read the same topic."""
    source = {"topics": [topic_names("arrival")]}
    if request.param == "direct":
        source["partitioned_by"] = "tracking_id"
    made = []
    for config in ({"message.timestamp.type": "LogAppendTime"}, None):
        name = topic_names("job")
        document = {"source": source, "event_time": "arrival", "guard_period": "1s", "grace": "1m"}
        made.append(Job(kafka, Shared(admin, config), tmp_path / name, name, partitions=1, document=document))
    yield made
    for job in made:
        job.end()


class Shared:
    """The admin client; without a config, a source topic exists already."""

    def __init__(self, admin, config):
        self.admin, self.config = admin, config

    def create_topic(self, topic, partitions, config):
        if self.config is not None or not topic.startswith("arrival"):
            self.admin.create_topic(
                topic, partitions, {**config, **(self.config or {})} if "arrival" in topic else config
            )

    def __getattr__(self, name):
        return getattr(self.admin, name)


def events(begin, end):
    return [replace(event, partition=0) for event in distinct(begin, end)]


def test_stream_batch_worker_and_model_agree_and_refuse_alike(spark, jobs, tmp_path):
    ours, theirs = jobs
    topic = ours.topology.source.topics[0]
    ours.send(events(0, 30))
    ours.send(events(20, 40))
    sent_s = time.monotonic()
    until(lambda: time.monotonic() > sent_s + 1.1, "the guard period has passed by the clock of the broker")
    ours.send(events(0, 10))
    theirs.sent = list(ours.sent)
    ours.finish("a")
    options = StreamOptions(str(theirs.directory / "checkpoint"), exit_when_done=True)
    start_stream(spark, theirs.topology, theirs.settings, options).wait()
    expected = output_ids(ours)
    assert expected["x-5"] == 2
    assert output_ids(theirs) == expected
    for job in jobs:
        report = verify(job.topology, job.settings)
        assert report.passed, report.samples
        assert sum(report.not_provable.values()) == 0
    history = read_kafka(spark, theirs.topology, theirs.settings, repartitioned=not theirs.topology.direct)
    assert backfill(history, theirs.topology, str(tmp_path / "out")).verdicts["unique"] == expected.total()
    ours.admin.configure(topic, message_timestamp_type="CreateTime")
    first = 60 + ours.send_until_stamped(TIMESTAMP_CREATE_TIME, events(50, 90))
    ours.admin.configure(topic, message_timestamp_type="LogAppendTime")
    with pytest.raises(StateIncompatible, match=rf"{topic}/0 offset {first} has the time that its producer wrote"):
        start_stream(spark, theirs.topology, theirs.settings, options).wait()
    with pytest.raises(StateIncompatible, match=rf"{topic}/0 offset {first} has the time that its producer wrote"):
        backfill(read_kafka(spark, theirs.topology, theirs.settings), theirs.topology, str(tmp_path / "out-2"))
    # What the broker stamped before it changed is judged and committed; behind a repartition topic, some may wait there.
    stamped = Counter(f"x-{number}" for number in range(50, first - 10))
    found = output_ids(theirs)
    if theirs.topology.direct:
        assert found == expected + stamped
    else:
        assert expected <= found <= expected + stamped
