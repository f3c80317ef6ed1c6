"""Brokers create topics by default when a client asks for them: dedup's own requests never make them do so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from dedup.embedded.kafka_node import EmbeddedKafka
from tests import brokers
from tests.brokers import RELEASE, Admin, RunningKafka
from tests.connect.conftest import stage
from tests.connect.stage import Stage, lines, made, sqlite_rows
from tests.integration.conftest import MakeJob
from tests.integration.fleet import KEPT, Job, until
from tests.integration.test_admin import distinct, output_ids
from tests.integration.workload import BASE_MS, Event

__all__ = ["stage"]
pytestmark = pytest.mark.broker
INCOMPATIBLE = 3


@pytest.fixture(scope="module")
def kafka() -> Iterator[RunningKafka]:
    """Return a broker that creates topics, as brokers do by default."""
    with EmbeddedKafka(properties={"auto.create.topics.enable": "true"}) as node:
        yield RunningKafka(node.bootstrap, node)
        node.kill()


@pytest.fixture(scope="module")
def admin(kafka: RunningKafka) -> Admin:
    return brokers.admin_of(kafka.bootstrap)


def exists(job: Job, topic: str) -> bool:
    return topic in job.admin.client.list_topics(timeout=30).topics


def test_the_broker_creates_what_a_client_asks_for(kafka: RunningKafka, job: Job) -> None:
    """Or the tests below would prove nothing."""
    topic = f"{job.name}-asked-for"
    job.admin.until_led(topic, 1)
    assert exists(job, topic)


def test_a_source_with_a_typing_error_is_said_and_not_created(make_job: MakeJob) -> None:
    job = make_job()
    (topic,) = job.topology.source.topics
    job.admin.delete_topic(topic)
    job.refused(code=INCOMPATIBLE, says=f"source topic '{topic}' does not exist")
    assert not exists(job, topic)


@pytest.mark.parametrize("which", ["source", "changelog"])
def test_a_topic_that_is_deleted_under_its_reader_is_not_created(job: Job, which: str) -> None:
    """Was: the worker itself created it again, with the broker's default number of partitions and retention."""
    job.send(distinct(0, 200))
    worker = job.start()
    job.until_done()
    topic = job.topology.source.topics[0] if which == "source" else job.topology.changelog_topic
    job.admin.delete_topic(topic)
    if which == "changelog":
        job.send(distinct(200, 400))
    assert worker.wait() == INCOMPATIBLE, worker.log
    assert f"topic {topic!r} was deleted while it was in use" in worker.log
    assert "Traceback" not in worker.log
    assert not exists(job, topic)
    assert output_ids(job) == Counter(f"x-{number}" for number in range(200))


@pytest.mark.parametrize("which", ["output", "dead letters"])
def test_a_topic_that_is_deleted_under_its_writer_is_waited_for(job: Job, which: str) -> None:
    """Was: the worker went on in a topic with the broker's default number of partitions and retention."""
    job.send(distinct(0, 200))
    worker = job.start()
    job.until_done()
    topic = job.output if which == "output" else job.topology.dead_letter
    job.admin.delete_topic(topic)
    job.send([*distinct(200, 400), Event(0, b"no json", BASE_MS)])
    if RELEASE >= (4, 0):
        # Each line is a request in which the client asked about the topic.
        worker.until_logged(f"Topic {topic} not found in cluster metadata", times=8)
    # With transactions of version 1, the coordinator refuses the partition before anyone has asked.
    worker.until_logged("retried until a commit succeeds")
    assert not exists(job, topic)
    job.admin.create_topic(topic, job.partitions, KEPT)
    job.until_done()
    assert worker.stop() == 0, worker.log
    assert output_ids(job) == Counter(f"x-{number}" for number in range(200 if which == "output" else 0, 400))
    assert len(job.read(job.topology.dead_letter)) == 1


def test_ingest_and_sink_create_no_topic_that_was_deleted(stage: Stage, admin: Admin) -> None:
    (stage.incoming / "a.jsonl").write_bytes(lines(0, 10))
    path = stage.directory / "rows.db"
    file = stage.directory / "sink.yaml"
    file.write_text(stage.topology_text(f"sqlite:///{path}", "  columns: {id: id}"), encoding="utf-8")
    sink = stage.start("sink", str(file), log="sink")
    assert sink.wait() == INCOMPATIBLE, sink.log
    assert f"topic {stage.topic!r} does not exist" in sink.log
    ingest = stage.start("ingest", str(stage.ingest_file(stage.files())), log="ingest")
    until(lambda: ingest.running and len(stage.read()) == 10, lambda: f"ten lines are sent:\n{ingest.log}")
    sink = stage.start("sink", str(file), log="sink")
    until(lambda: path.exists() and made(partial(sqlite_rows, path)) and len(sqlite_rows(path)) == 10, "ten rows")
    admin.delete_topic(stage.topic)
    (stage.incoming / "b.jsonl").write_bytes(lines(10, 10))
    for process in (sink, ingest):
        assert process.wait() == INCOMPATIBLE, process.log
        assert f"topic {stage.topic!r} was deleted" in process.log
    assert stage.topic not in admin.client.list_topics(timeout=30).topics
    assert len(sqlite_rows(path)) == 10
