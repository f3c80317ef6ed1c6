"""One partition of the output without a leader: its task waits, with a pause between tries, and the others go on."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient

from dedup.embedded.child_process import ChildProcess
from dedup.embedded.kafka_node import EmbeddedKafka
from tests.brokers import Admin, RunningKafka
from tests.chaos.three_nodes import cluster, kafka
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.watch import Watch
from tests.integration.workload import endless
from tests.kafka_cluster import KafkaCluster

__all__ = ["cluster", "kafka"]
pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]
LONE = 3
"""The node that alone holds partition 1 of the output."""


class OneReplicaOfTheOutput(Admin):
    """Makes topics with three replicas, but partitions of the output on one node each."""

    def replicas(self, name: str, partitions: int) -> list[list[int]]:
        return [[1], [LONE]] if name.endswith("-out") else [[1, 2, 3]] * partitions

    def create_topic(self, name: str, partitions: int = 1, config: dict[str, str] | None = None) -> str:
        alone = {"min.insync.replicas": "1"} if name.endswith("-out") else {}
        return super().create_topic(name, partitions, {**(config or {}), **alone})


@pytest.fixture(scope="module")
def admin(kafka: RunningKafka) -> Admin:
    return OneReplicaOfTheOutput(kafka.bootstrap, AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0}))


@pytest.mark.parametrize(("accident", "per_s"), [("killed", 600), ("frozen", 8_000)])
def test_f83_one_offline_output_partition_holds_up_its_own_task_alone(
    make_job: MakeJob, cluster: KafkaCluster, accident: str, per_s: int
) -> None:
    """Was: all tasks of the worker were built anew every two seconds, or waited for the one that held enough records."""
    job: Job = make_job(config={"brokers": cluster.bootstrap.split(",")})
    lone = cluster.nodes[LONE]
    with Watch(job):
        with job.stream(endless(190), per_s=per_s):
            worker = job.start()
            job.until_progress(1_000)
            lone.kill() if accident == "killed" else _process(lone).pause()
            # Others may wait, too, until their coordinators have moved.
            until(lambda: _said(worker.log, f"{job.name}-in/1") > 0, lambda: f"partition 1 waits; logs:\n{job.logs()}")
            until(lambda: _goes_on(job), lambda: f"partition 0 goes on; logs:\n{job.logs()}")
            before = job.committed()
            starts, said = worker.log.count("running from offset"), _said(worker.log, f"{job.name}-in/1")
            until(
                lambda: job.committed()[0] > before[0] + 3 * per_s, lambda: f"partition 0 goes on; logs:\n{job.logs()}"
            )
            assert job.committed()[1] == before[1]
            assert worker.log.count("running from offset") == starts
            # Each assignment says it once; none was made meanwhile.
            assert _said(worker.log, f"{job.name}-in/1") == said, worker.log
            lone.restart() if accident == "killed" else _process(lone).resume()
            worker.until_logged(f"{job.name}-in/1: commits succeed again")
        job.until_done()
        assert worker.stop() == 0, worker.log
        job.judge()


def _process(node: EmbeddedKafka) -> ChildProcess:
    assert node.process is not None
    return node.process


def _said(log: str, partition: str) -> int:
    """Return how often the log says that the partition waits, alone or with others."""
    waits = ("Only this partition waits", "Only these partitions wait")
    return sum(partition in line for line in log.splitlines() if any(text in line for text in waits))


def _goes_on(job: Job) -> bool:
    """Tell whether partition 0 was committed again and again while a hundred records came in."""
    before = job.committed()[0]
    job.until_sent(len(job.sent) + 300)
    return job.committed()[0] > before
