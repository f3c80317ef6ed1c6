"""Where a worker must not start, or not go on: loud, with the right exit code, and with nothing touched."""

from __future__ import annotations

import json
import shutil

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from tests.integration.conftest import MakeJob
from tests.integration.fleet import KEPT, Job
from tests.integration.stores import state_of, topic_id, tree
from tests.integration.watch import Watch
from tests.integration.workload import BASE_MS, Event, endless, workload

pytestmark = pytest.mark.broker
INCOMPATIBLE = 3


@pytest.fixture
def done(job: Job) -> Job:
    """Return a job that has judged a thousand records and stopped."""
    job.send(workload(31, 1_000))
    job.finish()
    return job


def test_f39_changelog_deleted_under_intact_state(done: Job) -> None:
    before = tree(done.state_dir("a"))
    done.admin.delete_topic(done.topology.changelog_topic)
    done.refused(code=INCOMPATIBLE, says="Nothing was changed")
    assert tree(done.state_dir("a")) == before


@pytest.mark.parametrize("gone", [("repartition",), ("repartition", "changelog", "disk")], ids="-".join)
def test_f39_repartition_topic_deleted(make_job: MakeJob, gone: tuple[str, ...]) -> None:
    """It holds what was read and not judged yet; the source's offsets alone tell that it ever was."""
    job = make_job(document={"source": {"topics": [f"deleted-in-{len(gone)}"]}, "idle_after": "1s"})
    job.send(workload(33, 300, scattered=True))
    job.finish()
    if "disk" in gone:
        shutil.rmtree(job.state_dir("a"))
    topics = {"repartition": job.topology.repartition_topic, "changelog": job.topology.changelog_topic}
    for name in gone:
        if name in topics:
            job.admin.delete_topic(topics[name])
    job.refused(code=INCOMPATIBLE, says=f"the {gone[-2] if 'disk' in gone else gone[0]} topic")


@pytest.mark.parametrize("state", ["kept", "gone"])
def test_f35_changelog_made_again_empty(done: Job, state: str) -> None:
    """With local state the other topic id tells it, without it the missing task record does."""
    old_id = topic_id(done, done.topology.changelog_topic)
    before = state_of(done, "a", old_id)
    if state == "gone":
        shutil.rmtree(done.state_dir("a"))
    done.admin.delete_topic(done.topology.changelog_topic)
    done.admin.create_topic(done.topology.changelog_topic, done.partitions, {"cleanup.policy": "compact,delete"})
    done.refused(code=INCOMPATIBLE, says="changelog")
    if state == "kept":
        # Opening a store moves its bookkeeping about; what it holds is as it was.
        assert state_of(done, "a", old_id) == before


def test_f35_changelog_emptied_and_no_local_state(done: Job) -> None:
    shutil.rmtree(done.state_dir("a"))
    changelog = done.topology.changelog_topic
    done.admin.delete_below(changelog, done.admin.end_offsets(changelog))
    done.refused(code=INCOMPATIBLE, says="holds no task record")


def test_f35_changelog_with_another_partition_count(done: Job) -> None:
    before = tree(done.state_dir("a"))
    done.admin.add_partitions(done.topology.changelog_topic, 3)
    done.refused(code=INCOMPATIBLE, says="has 3 partitions")
    assert tree(done.state_dir("a")) == before


def test_f19_offsets_deleted_the_task_record_decides(done: Job) -> None:
    for future in done.admin.client.delete_consumer_groups([done.name]).values():
        future.result(timeout=30)
    with Watch(done):
        done.send(workload(32, 100))
        done.finish()
    done.judge()


def test_f19_offsets_of_a_repartitioned_source_deleted(make_job: MakeJob) -> None:
    """The group knew nothing of two partitions: one was read, one never held a record. Only the first is missed."""
    job = make_job(document={"source": {"topics": ["lost-in"]}})
    job.send([Event(0, b'{"id":"%d","n":%d}' % (number % 70, number), BASE_MS + number) for number in range(200)])
    job.finish()
    job.finish()  # a start with an offset that was never there is none that was lost
    for future in job.admin.client.delete_consumer_groups([job.name]).values():
        future.result(timeout=30)
    worker = job.refused(code=INCOMPATIBLE, says="has no offset of lost-in/0, but")
    assert "Nothing was changed" in worker.log
    job.refused("elsewhere", code=INCOMPATIBLE, says="has no offset of lost-in/0, but")
    # What the message proposes.
    places = [TopicPartition("lost-in", 0, 200)]
    asked = job.admin.client.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(job.name, places)])
    asked[job.name].result(timeout=30)
    job.send([Event(1, b'{"id":"new-%d","n":1000}' % number, BASE_MS) for number in range(20)])
    job.finish()
    job.judge()


@pytest.mark.parametrize("feeding", ["source", "repartition"])
def test_f19_feeding_topic_made_again(make_job: MakeJob, feeding: str) -> None:
    """The broker deletes a topic's offsets with it; what its namesake holds below the old position was never read."""
    document = {} if feeding == "source" else {"source": {"topics": ["made-again-in"]}}
    job = make_job(document=document)
    job.send(workload(34, 300))
    job.finish()
    name = job.topology.feeding_topics[0]
    old_id = topic_id(job, name)
    before = state_of(job, "a", topic_id(job, job.topology.changelog_topic))
    job.admin.delete_topic(name)
    job.admin.create_topic(name, job.partitions, KEPT)
    job.send(workload(35, 600))
    worker = job.refused(code=INCOMPATIBLE, says=f"{name} was deleted and recreated")
    assert f"the topic with id {old_id}" in worker.log
    assert "Nothing was changed" in worker.log
    assert state_of(job, "a", topic_id(job, job.topology.changelog_topic)) == before
    shutil.rmtree(job.state_dir("a"))
    job.refused(code=INCOMPATIBLE, says=f"{name} was deleted and recreated")


def test_f19_offsets_set_back_to_the_start(done: Job) -> None:
    places = [TopicPartition(done.topology.source.topics[0], partition, 0) for partition in range(done.partitions)]
    asked = done.admin.client.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(done.name, places)])
    asked[done.name].result(timeout=30)
    with Watch(done):
        done.send(workload(33, 100))
        done.finish()
    done.judge()


def test_f19_source_records_gone_before_they_were_read(done: Job) -> None:
    """Retention took what the committed offset points at: never "latest", never go on."""
    done.send(workload(34, 500))
    topic = done.topology.source.topics[0]
    ends = done.admin.end_offsets(topic)
    done.admin.delete_below(topic, {partition: end - 10 for partition, end in ends.items()})
    done.refused(code=INCOMPATIBLE, says="no longer holds")


def test_f18_partitions_added_to_the_source(job: Job) -> None:
    """IDs would move to other partitions: the worker stops."""
    job.send(workload(35, 500))
    worker = job.start("a", "metadata_every=300")
    job.until_done()
    job.admin.add_partitions(job.topology.source.topics[0], 3)
    assert worker.wait() == INCOMPATIBLE, worker.log
    assert "partitions" in worker.log
    job.refused(code=INCOMPATIBLE, says="has 3")


def test_f13_two_topologies_of_one_name(done: Job) -> None:
    changelog_id = topic_id(done, done.topology.changelog_topic)
    before = state_of(done, "a", changelog_id)
    document = json.loads(done.topology_file.read_text(encoding="utf-8"))
    document["tracking_id"] = {"field": "n"}
    done.topology_file.write_text(json.dumps(document), encoding="utf-8")
    done.refused(code=INCOMPATIBLE, says="fingerprint")
    assert state_of(done, "a", changelog_id) == before


@pytest.mark.parametrize("same_id", [True, False])
def test_f12_two_workers_with_one_state_directory(job: Job, same_id: bool) -> None:
    """The second is refused; the first goes on."""
    with Watch(job), job.stream(endless(36), per_s=1_000):
        first = job.start("a")
        first.until_logged("running from offset", times=job.partitions)
        second = job.start("a" if same_id else "b", state_of="a")
        assert second.wait() == INCOMPATIBLE, second.log
        assert "in use by another process" in second.log
        job.until_progress(500)
        assert first.running
    job.until_done()
    assert first.stop() == 0, first.log
    job.judge()


def test_no_broker_is_exit_5_and_one_sentence(job: Job) -> None:
    job.config_file.write_text(json.dumps({"brokers": ["127.0.0.1:9"]}), encoding="utf-8")
    worker = job.start("a", "patience=300")
    assert worker.wait() == 5, worker.log
    assert "no broker answers at 127.0.0.1:9" in worker.log
    assert "Traceback" not in worker.log


def test_a_group_without_a_coordinator_is_exit_5(job: Job) -> None:
    """The brokers answer, but not what a start has to know: it waits so long and no longer."""
    worker = job.start("a", "no_group_coordinator=1", "patience=500")
    assert worker.wait() == 5, worker.log
    assert "did not say within 0.5 s" in worker.log
    assert "Traceback" not in worker.log


def test_missing_source_topic_is_said(make_job: MakeJob) -> None:
    job = make_job()
    job.admin.delete_topic(job.topology.source.topics[0])
    worker = job.start()
    assert worker.wait() == INCOMPATIBLE, worker.log
    assert "does not exist" in worker.log
    assert "Traceback" not in worker.log


def test_a_bad_topology_is_exit_2_with_every_problem_and_its_place(job: Job) -> None:
    job.topology_file.write_text("dedup: 1\nname: Bad.Name\nguard_perod: 1d\n", encoding="utf-8")
    worker = job.start()
    assert worker.wait() == 2, worker.log
    assert f"{job.topology_file}:2:" in worker.log
    assert "guard_period" in worker.log
    assert "source" in worker.log
    assert "Traceback" not in worker.log


def test_a_bad_config_is_exit_2(job: Job) -> None:
    job.send([Event(0, b"{}", BASE_MS)])
    worker = job.start(settings=["commit_intervall=1s"])
    assert worker.wait() == 2, worker.log
    assert "commit_interval" in worker.log
    assert "Traceback" not in worker.log
