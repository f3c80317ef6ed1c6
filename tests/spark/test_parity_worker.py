"""The batch job over a range of Kafka, the real worker on the same topic and the exact model: equal row by row.

In the long run the Spark stream judges the same topic, too: one stream of events, four who judge it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time

import pytest

from dedup.settings import Settings
from dedup.spark.batch_verdicts import judged
from dedup.spark.kafka_source import read_kafka
from dedup.topology.parse import parse
from dedup.yaml_document import beside
from tests.integration.preloaded import Preloaded, WatchdogHandle, clean_environ
from tests.spark.parity import (
    ALL,
    POLICIES,
    RULES,
    SCHEMAS,
    by_model,
    document,
    format_of,
    in_format,
    stream,
    the_schema,
    unclocked,
)
from tests.spark.parity_topics import ANY_TIME, rows_in_topics, sent
from tests.spark.test_parity_model import rows_of
from tests.spark.test_parity_stream import start_judging

pytestmark = pytest.mark.broker

MANY = int(os.environ.get("DEDUP_TEST_PARITY_EVENTS", "100000"))
FEW = 2_000
SEEN_IN_TOPICS = [name for name, options in {**RULES, **POLICIES}.items() if options.get("late") != "drop"]


def start_worker(directory, topology_file, kafka, name) -> WatchdogHandle:
    config = {"brokers": [kafka.bootstrap], "state_dir": str(directory / f"{name}-state"), "web": {"enabled": False}}
    (directory / f"{name}-config.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = ["--", "run", str(topology_file), "--quiet", "--exit-when-done"]
    command += ["--config", str(directory / f"{name}-config.yaml")]
    with (directory / f"{name}.log").open("wb") as log:
        return Preloaded.of_this_process().start(command, clean_environ(), None, log)


def until_ended(workers, directory, within_s: float) -> None:
    """Every worker has ended without a fault; none runs on, whatever happens here."""
    deadline = time.monotonic() + within_s
    with contextlib.ExitStack() as stack:
        for worker in workers.values():
            stack.enter_context(worker.stdout)
            stack.enter_context(worker.stdin)  # whose end ends the worker
        for name, worker in workers.items():
            code = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = worker.wait(max(0, deadline - time.monotonic()))
            assert code == 0, (directory / f"{name}.log").read_text(encoding="utf-8")


@pytest.fixture
def compared(spark, kafka, admin, topic_names, tmp_path):
    """Return a function that lets worker, batch job and model judge a stream by these topologies, and compares.

    It returns the topic, where each event is in it, and by topology what the model says.
    """

    def compare(names, count, seed, within_s):
        topic = topic_names("parity-in")
        (fmt,) = {format_of(ALL[name]) for name in names}
        events = in_format(fmt, 7, stream(seed, count))
        places = sent(admin, topic, events)
        settings = Settings(brokers=(kafka.bootstrap,), state_dir=tmp_path / "state")
        topologies, workers = {}, {}
        for name in names:
            made = document(topic_names(name), ALL[name], topic)
            file = tmp_path / f"{name}.yaml"
            file.write_text(json.dumps(made), encoding="utf-8")
            for schema, text in SCHEMAS.items():
                (tmp_path / schema).write_text(text, encoding="utf-8")
            topologies[name] = parse(file.read_text(encoding="utf-8"), name=name, read_file=beside(file))
            admin.create_topic(topologies[name].output.topic, 2, ANY_TIME)
            workers[name] = start_worker(tmp_path, file, kafka, name)
        until_ended(workers, tmp_path, within_s)
        now_ms = int(time.time() * 1000)
        models = {}
        for name, topology in topologies.items():
            model = models[name] = {
                place: unclocked(row) for place, (row, _) in by_model(events, topology, now_ms).items()
            }
            assert {"unique", "duplicate", "late", "dead_letter"} <= {row.verdict for row in model.values()}
            history = read_kafka(spark, topology, settings)
            batch = rows_of(judged(history.records, topology, now_ms=now_ms, order="offsets", contiguous=True))
            assert {place: unclocked(row) for place, (row, _) in batch.items()} == model
            worker_said = rows_in_topics(kafka.bootstrap, topology, places)
            assert {place: unclocked(row) for place, row in worker_said.items()} == model
        return topic, places, models

    return compare


@pytest.mark.timeout(900)
def test_every_rule_and_policy(compared):
    compared(SEEN_IN_TOPICS, FEW, seed=5, within_s=240)


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


IN_CI = "fields"
BY_RULE = [name if name == IN_CI else pytest.param(name, marks=pytest.mark.long) for name in RULES]


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", BY_RULE)
def test_one_long_stream_is_judged_alike_by_all_four(compared_at_length, name):
    compared_at_length(name)
