"""Topics that change under a running worker: made again, given partitions, their changelog made anew, reset.

Each change comes while a worker runs or is frozen. It must stop within a commit round, loud, with nothing of what came
after the change in any topic.
"""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

import pytest

from tests.brokers import members_of, read_all
from tests.integration.conftest import MakeJob
from tests.integration.fleet import KEPT, Job, Worker, until
from tests.integration.test_admin import dedup, distinct, output_ids
from tests.integration.workload import BASE_MS, Event, id_of

pytestmark = pytest.mark.broker
INCOMPATIBLE = 3


def frozen(worker: Worker) -> None:
    worker.signal(signal.SIGSTOP)
    until(lambda: worker.frozen, "the worker is frozen")


def made_again(job: Job, topic: str, config: dict[str, str] | None = None) -> None:
    job.admin.delete_topic(topic)
    job.admin.create_topic(topic, job.partitions, config or KEPT)


def refusing(worker: Worker, says: str) -> None:
    assert worker.wait() == INCOMPATIBLE, worker.log
    assert says in worker.log, worker.log
    assert "Traceback" not in worker.log


def readable(job: Job) -> dict[str, int]:
    """Return how many records committed readers find in each topic that tasks write."""
    return {topic: len(job.read(topic)) for topic in job.topology.written_topics}


def refused_again(job: Job, worker_id: str, says: str) -> None:
    """A new worker is refused, and committed readers see nothing of it; markers of what it has ended may be there."""
    before = output_ids(job)
    refusing(job.start(worker_id), says)
    assert says in dedup(job, "doctor", code=INCOMPATIBLE)
    assert output_ids(job) == before


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "running"])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "repartitioned"])
def test_f71_source_topic_made_again(make_job: MakeJob, direct: bool, freeze: bool) -> None:
    """Was: 90 of 100 records forwarded and exit 0; fetches went by the topic's name."""
    job = make_job(partitions=1)
    if not direct:
        job = make_job(partitions=1, document={"source": {"topics": [f"{job.name}-again"]}})
    job.send(distinct(0, 20)[::2])
    worker = job.start()
    job.until_done()
    before = readable(job)
    if freeze:
        frozen(worker)
    made_again(job, job.topology.source.topics[0])
    job.send(distinct(100, 300)[::2])
    worker.signal(signal.SIGCONT)
    refusing(worker, "recreated" if freeze else "deleted")
    assert output_ids(job) == Counter(f"x-{number}" for number in range(0, 20, 2))
    assert readable(job) == before
    # Nor is it taken for the old one later; behind a repartition topic the offsets that Kafka deleted tell it.
    refused_again(job, "a", "recreated" if direct else "offsets were deleted")


def test_f71_source_topic_deleted_under_a_worker_that_has_nothing_to_do(job: Job) -> None:
    job.send(distinct(0, 10))
    worker = job.start()
    job.until_done()
    job.admin.delete_topic(job.topology.source.topics[0])
    refusing(worker, "was deleted while it was in use")


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "running"])
def test_f72_partitions_added_to_the_source(job: Job, freeze: bool) -> None:
    """Was: 697 of 2,000 repeated IDs forwarded before the client's metadata grew old."""
    events = distinct(0, 2_000)
    job.send(events)
    worker = job.start()
    job.until_done()
    if freeze:
        frozen(worker)
    job.admin.add_partitions(job.topology.source.topics[0], 3)
    # A producer that knows of the third partition sends most IDs elsewhere, also among the first two.
    job.send([Event(1 - event.partition, event.value, event.timestamp_ms) for event in events])
    worker.signal(signal.SIGCONT)
    refusing(worker, "has 3 partitions now, and had 2")
    assert output_ids(job) == Counter(f"x-{number}" for number in range(2_000))
    refused_again(job, "a", "has 3")


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "running"])
def test_f73_changelog_made_again(job: Job, freeze: bool) -> None:
    job.send(distinct(0, 500))
    worker = job.start()
    job.until_done()
    if freeze:
        frozen(worker)
    made_again(job, job.topology.changelog_topic, {"cleanup.policy": "compact,delete"} | KEPT)
    job.send(distinct(0, 500))
    worker.signal(signal.SIGCONT)
    refusing(worker, f"topic '{job.topology.changelog_topic}' was deleted")
    assert output_ids(job) == Counter(f"x-{number}" for number in range(500))
    # Whoever comes next, with the old disk or without one.
    refused_again(job, "a", "changelog")
    refused_again(job, "elsewhere", "its changelog had id")


def test_the_state_of_another_id_rule_is_refused(job: Job) -> None:
    """Was: `dedup doctor` said that the topics are ok, and every worker stopped."""
    job.send(distinct(0, 20))
    job.finish()
    assert "topics: wrong" not in dedup(job, "doctor")
    text = job.topology_file.read_text(encoding="utf-8")
    assert '"field": "id"' in text
    job.topology_file.write_text(text.replace('"field": "id"', '"field": "n"'), encoding="utf-8")
    refused_again(job, "b", "another ID rule")


def test_a_worker_with_another_id_rule_repartitions_nothing(make_job: MakeJob) -> None:
    """Was: only dedup tasks refused. A worker that had only repartition tasks sent records to the partitions of the
    other rule's IDs, where the old rule forwarded them again.
    """
    few: dict[str, Any] = {"partitions": 4, "config": {"topics": {"partitions": 1}}}
    job = make_job(**few)
    job = make_job(**few, document={"source": {"topics": [f"{job.name}-again"]}})
    events = distinct(0, 1_000)
    job.send(events)
    worker = job.start()
    job.until_done()
    text = job.topology_file.read_text(encoding="utf-8")
    job.topology_file.write_text(text.replace('"field": "id"', '"field": "n"'), encoding="utf-8")
    refusing(job.start("b"), "another ID rule")
    job.send(events)
    job.until_done()
    assert worker.stop() == 0, worker.log
    job.topology_file.write_text(text, encoding="utf-8")
    job.finish()
    job.judge()


def test_f74_a_worker_frozen_through_a_reset(job: Job) -> None:
    """Was: it went on with its old state and the new changelog, and 999 of 3,000 repeats were forwarded."""
    job.send(distinct(0, 3_000))
    worker = job.start()
    job.until_done()
    frozen(worker)
    until(lambda: members(job) == 0, "the group has no members")
    dedup(job, "reset", "--to", "latest", "--yes", state_of="elsewhere")
    worker.signal(signal.SIGCONT)
    refusing(worker, f"topic '{job.topology.changelog_topic}' was deleted and recreated")
    # Its disk is another changelog's for good, and says so; an empty one begins anew.
    job.refused(code=INCOMPATIBLE, says="changelog")
    repeats = distinct(0, 3_000)
    job.send(repeats)
    job.finish("b")
    assert output_ids(job) == Counter({f"x-{number}": 2 for number in range(3_000)})


def members(job: Job) -> int:
    return len(members_of(job.kafka.bootstrap, job.name))


def test_f74_an_interrupted_reset_is_refused_and_finished_by_the_next(make_job: MakeJob) -> None:
    """Was: a worker that was started meanwhile began as if nothing had ever been."""
    job = make_job()
    job.send(distinct(0, 300))
    job.finish()
    killed = job.start("a", "reset_dies=1", command=("reset", "--to", "latest", "--yes"))
    assert killed.wait() == 137, killed.log
    assert job.topology.changelog_topic not in job.admin.client.list_topics(timeout=30).topics
    before = job.written()
    worker = job.start("b")
    assert worker.wait() == INCOMPATIBLE, worker.log
    assert "`dedup reset` was interrupted" in worker.log
    assert job.written() == before
    dedup(job, "reset", "--to", "latest", "--yes")
    job.send(distinct(0, 300))
    job.finish("b")
    assert output_ids(job) == Counter({f"x-{number}": 2 for number in range(300)})


@pytest.mark.parametrize("future", ["dead_letter", "clamp"])
def test_f78_a_clock_that_was_behind_at_the_start(make_job: MakeJob, future: str) -> None:
    """Was: 2,000 of 2,000 records became dead letters until a restart. The broker's clock tells the right time."""
    job = make_job(document={"future": future}, source_config={"message.timestamp.type": "LogAppendTime"})
    worker = job.start("a", "clock_behind_until=2")
    worker.until_logged("running from offset", times=2)
    events = distinct(0, 2_000)
    for at in range(0, len(events), 500):
        job.send(events[at : at + 500])
        until(lambda: sum(job.committed().values()) == len(job.sent), lambda: f"judged; {job.logs()}")
    assert worker.stop() == 0, worker.log
    assert output_ids(job) == Counter(f"x-{number}" for number in range(2_000))
    assert read_all(job.kafka.bootstrap, job.topology.dead_letter) == []
    assert "behind the broker's" in worker.log
    now = {message.partition(): message.timestamp()[1] for message in job.read(job.output)}
    assert all(abs(time_ms - BASE_MS) > 86_400_000 for time_ms in now.values()), "times were put back"
    assert all(id_of(message.value()) for message in job.read(job.output))
