"""F23: three nodes, three replicas of everything, two of which must be in sync; any one of them may go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from aiokafka.client import AIOKafkaClient, CoordinationType
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.brokers import Admin, RunningKafka
from tests.chaos.three_nodes import cluster, kafka
from tests.integration.conftest import MakeJob
from tests.integration.fleet import KEPT, Job, Worker, until
from tests.integration.transactions import assert_none_open
from tests.integration.watch import Watch
from tests.integration.workload import endless
from tests.kafka_cluster import KafkaCluster

__all__ = ["cluster", "kafka"]
pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]

IN, OUT, CHANGELOG = "input", "output", "changelog"
TRANSACTIONS, GROUP = "transaction coordinator", "group coordinator"
TARGETS = (IN, OUT, CHANGELOG, TRANSACTIONS, GROUP)
LONG = pytest.mark.long


class ClusterAdmin(Admin):
    """Makes topics with three replicas; each topic is led by another node than the one made before it."""

    def replicas(self, name: str, partitions: int) -> list[list[int]]:
        first = {"in": 0, "out": 1, "changelog": 2}.get(name.rpartition("-")[2].rpartition(".")[2], 0)
        return [[1 + (first + step) % 3 for step in range(3)]] * partitions


@pytest.fixture(scope="module")
def admin(kafka: RunningKafka) -> Admin:
    return ClusterAdmin(kafka.bootstrap, AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0}))


@pytest.fixture
def job(make_job: MakeJob, kafka: RunningKafka) -> Job:
    """Return a job whose input, output and changelog are led by three different nodes at first."""
    made = make_job(config={"brokers": kafka.bootstrap.split(",")})
    config = KEPT | {"cleanup.policy": "compact,delete"}
    made.admin.create_topic(made.topology.changelog_topic, made.partitions, config)
    return made


def leader(job: Job, topic: str) -> int:
    return int(job.admin.client.list_topics(topic, timeout=30).topics[topic].partitions[0].leader)


def coordinator(job: Job, kind: int, key: str) -> int:
    async def ask() -> int:
        client = AIOKafkaClient(bootstrap_servers=job.kafka.bootstrap)
        await client.bootstrap()
        try:
            return int(await client.coordinator_lookup(kind, key))
        finally:
            await client.close()

    return asyncio.run(ask())


def node_of(job: Job, target: str) -> int:
    match target:
        case "input":
            return leader(job, job.topology.source.topics[0])
        case "output":
            return leader(job, job.output)
        case "changelog":
            return leader(job, job.topology.changelog_topic)
        case "transaction coordinator":
            return coordinator(job, CoordinationType.TRANSACTION, f"{job.name}.dedup.0")
        case _:
            return coordinator(job, CoordinationType.GROUP, job.name)


def in_sync(job: Job) -> bool:
    """Every partition of the job has all its replicas: another node may go."""
    known = job.admin.client.list_topics(timeout=30).topics
    return all(
        len(part.isrs) == 3
        for name, topic in known.items()
        if name.startswith((job.name, "__"))
        for part in topic.partitions.values()
    )


def in_sync_again(job: Job) -> bool:
    # The node that is asked may only just be coming back: another look tells.
    with contextlib.suppress(KafkaException):
        return in_sync(job)
    return False


def ends_well(job: Job, worker: Worker) -> None:
    job.until_done()
    assert worker.stop() == 0, worker.log
    job.judge()
    assert_none_open(job)
    until(lambda: in_sync_again(job), "all replicas are in sync again")


@pytest.mark.parametrize(
    ("target", "way"),
    [(target, "kill") for target in TARGETS]
    + [pytest.param(target, "pause", marks=() if target == TRANSACTIONS else LONG) for target in TARGETS],
)
def test_f23_a_leader_goes(job: Job, cluster: KafkaCluster, target: str, way: str) -> None:
    """While it is away the work goes on with the others; it comes back, and nothing was lost or doubled."""
    with Watch(job):
        with job.stream(endless(140), per_s=800):
            worker = job.start()
            job.until_progress(300)
            node = cluster.nodes[node_of(job, target)]
            (node.kill if way == "kill" else node.process.pause)()
            try:
                job.until_progress(500)
            finally:
                (node.restart if way == "kill" else node.process.resume)()
            job.until_progress(300)
        ends_well(job, worker)


def test_f23_below_min_isr(job: Job, cluster: KafkaCluster) -> None:
    """The output takes nothing with a replica missing: the worker stands still, commits nothing, and resumes."""
    job.admin.configure(job.output, min_insync_replicas="3")
    with Watch(job):
        with job.stream(endless(141), per_s=500):
            worker = job.start()
            job.until_progress(300)
            node = cluster.nodes[leader(job, job.topology.source.topics[0])]
            node.kill()
            try:
                until(lambda: not in_sync(job), "a replica is missed")
                # What had been written with all replicas may still be committed; then nothing.
                until(lambda: stands_still(job), "nothing is committed while records come in")
                assert stands_still(job)
            finally:
                node.restart()
            job.until_progress(500)
        ends_well(job, worker)


@pytest.mark.parametrize("hops", ["direct", pytest.param("repartitioned", marks=LONG)])
def test_f79_each_node_restarted_in_good_order(
    make_job: MakeJob, kafka: RunningKafka, cluster: KafkaCluster, topic_names: Callable[[str], str], hops: str
) -> None:
    """A rolling upgrade of the brokers, under load: no worker ends, nothing is lost or doubled."""
    document = {} if hops == "direct" else {"source": {"topics": [topic_names("rolled-in")]}}
    job = make_job(config={"brokers": kafka.bootstrap.split(",")}, document=document)
    with Watch(job):
        with job.stream(endless(143), per_s=800):
            workers = [job.start(name) for name in "ab"]
            for worker in workers:
                worker.until_logged("running from offset")
            for node in cluster.nodes.values():
                job.until_progress(300)
                node.restart()
                job.until_progress(300)
                # As an operator does: the next one only when nothing is missing any more.
                until(lambda: in_sync_again(job), "all replicas are in sync again")
        job.until_done()
        assert [worker.running for worker in workers] == [True, True], job.logs()
        assert [worker.stop() for worker in workers] == [0, 0], job.logs()
    report = job.judge()
    assert sum(report.not_provable.values()) == 0
    assert_none_open(job)


def stands_still(job: Job) -> bool:
    """Tell whether nothing was committed in the time in which a thousand records came in."""
    before = job.committed()
    job.until_sent(len(job.sent) + 1_000)
    return job.committed() == before


@pytest.mark.long
def test_f23_two_of_three_away(job: Job, cluster: KafkaCluster) -> None:
    """No quorum and nobody to write to: the worker waits, and goes on when they are back."""
    with Watch(job):
        with job.stream(endless(142), per_s=500):
            worker = job.start()
            job.until_progress(300)
            for number in (2, 3):
                cluster.nodes[number].process.pause()
            try:
                worker.until_logged("got no answer")
            finally:
                for number in (2, 3):
                    cluster.nodes[number].process.resume()
            job.until_progress(500)
        ends_well(job, worker)
