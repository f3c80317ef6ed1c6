"""The batch job over a range of Kafka, the real worker on the same topic and the exact model: equal row by row."""

from __future__ import annotations

import contextlib
import json
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
    unclocked,
)
from tests.spark.parity_topics import ANY_TIME, rows_in_topics, sent
from tests.spark.test_parity_model import rows_of

pytestmark = pytest.mark.broker

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
        for schema, text in SCHEMAS.items():  # before the first worker, which reads them while it starts
            (tmp_path / schema).write_text(text, encoding="utf-8")
        for name in names:
            made = document(topic_names(name), ALL[name], topic)
            file = tmp_path / f"{name}.yaml"
            file.write_text(json.dumps(made), encoding="utf-8")
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
