"""F80: somebody deletes the group, or offsets of it, while a worker runs or is frozen."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterable

import pytest
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int16, Int32, Schema, String
from confluent_kafka import KafkaError, KafkaException

from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.planting import commit
from tests.integration.watch import Watch
from tests.integration.workload import endless, workload

pytestmark = pytest.mark.broker

INCOMPATIBLE = 3
SUBSCRIBED = 86
"""GROUP_SUBSCRIBED_TO_TOPIC."""


class OffsetDeleteResponse_v0(Response):  # type: ignore[misc]  # noqa: N801  # untyped base; aiokafka's naming of versions
    """A code for each partition."""

    API_KEY = 47
    API_VERSION = 0
    SCHEMA = Schema(
        ("error_code", Int16),
        ("throttle_time_ms", Int32),
        (
            "topics",
            Array(("name", String("utf-8")), ("partitions", Array(("partition", Int32), ("error_code", Int16)))),
        ),
    )


class OffsetDeleteRequest_v0(RequestStruct):  # type: ignore[misc]  # noqa: N801  # untyped base; aiokafka's naming of versions
    """Offsets of a group to be deleted (KIP-496); neither of this project's clients can ask for it."""

    API_KEY = 47
    API_VERSION = 0
    RESPONSE_TYPE = OffsetDeleteResponse_v0
    SCHEMA = Schema(
        ("group", String("utf-8")), ("topics", Array(("name", String("utf-8")), ("partitions", Array(Int32))))
    )


class OffsetDelete(Request[OffsetDeleteRequest_v0]):  # type: ignore[misc]  # untyped base
    """Ask for offsets to be deleted."""

    API_KEY = 47

    def __init__(self, group: str, topic: str, partitions: Iterable[int]) -> None:
        self._fields = (group, [(topic, list(partitions))])

    def build(self, request_struct_class: type[OffsetDeleteRequest_v0]) -> OffsetDeleteRequest_v0:
        return request_struct_class(*self._fields)


def delete_offsets(job: Job, topic: str) -> set[int]:
    """Ask the broker to delete the group's offsets of a topic; return the codes it answers for its partitions."""

    async def ask() -> set[int]:
        client = AIOKafkaClient(bootstrap_servers=job.kafka.bootstrap)
        await client.bootstrap()
        try:
            node = await client.coordinator_lookup(CoordinationType.GROUP, job.name)
            await client.ready(node)
            answer = await client.send(node, OffsetDelete(job.name, topic, range(job.partitions)))
            assert answer.error_code == 0
            return {code for _, parts in answer.topics for _, code in parts}
        finally:
            await client.close()

    return asyncio.run(ask())


def delete_group(job: Job) -> int:
    """Ask the broker to delete the group; return its code, 0 for deleted."""
    (future,) = job.admin.client.delete_consumer_groups([job.name]).values()
    try:
        future.result(timeout=30)
    except KafkaException as error:
        return int(error.args[0].code())
    return 0


@pytest.fixture(params=["direct", "repartitioned"])
def hops_job(request: pytest.FixtureRequest, make_job: MakeJob, topic_names) -> Job:
    document = {} if request.param == "direct" else {"source": {"topics": [topic_names("grouped-in")]}}
    # However long a busy machine stretches a pause: no task begins anew because a session has ended.
    return make_job(document=document, config={"session_timeout": "60s"})


def test_f80_the_group_of_a_running_worker(hops_job: Job) -> None:
    """The broker refuses to delete it, or offsets it reads; offsets it does not read are nobody's."""
    job = hops_job
    elsewhere = job.admin.create_topic(f"{job.name}-elsewhere", job.partitions)
    commit(job.kafka, job.name, elsewhere, {0: 0, 1: 0})
    with Watch(job):
        with job.stream(endless(180), per_s=1_000):
            worker = job.start()
            job.until_progress(300)
            assert delete_group(job) == KafkaError.NON_EMPTY_GROUP
            for topic in job.topology.feeding_topics:
                assert delete_offsets(job, topic) == {SUBSCRIBED}
            assert delete_offsets(job, elsewhere) == {0}
            job.until_progress(300)
        job.until_done()
        begun = re.findall(r"(\S+/\d+): running from offset", worker.log)
        assert sorted(begun) == sorted(set(begun)), "no task began anew"
        assert worker.stop() == 0, worker.log
    job.judge()


def test_f80_the_group_deleted_under_a_frozen_worker(job: Job) -> None:
    """Beyond its session it is no member any more; thawed, its task records say how far it had come."""
    events = workload(181, 3_000)
    with Watch(job):
        worker = job.start()
        job.send(events[:1_000])
        job.until_done()
        worker.signal(signal.SIGSTOP)
        until(lambda: delete_group(job) == 0, "the group has no member and is deleted")
        job.send(events[1_000:2_000])
        assert set(job.committed().values()) == {0}
        worker.signal(signal.SIGCONT)
        job.until_done()
        job.send(events[2_000:])
        job.until_done()
        assert worker.stop() == 0, worker.log
    job.judge()


def test_f80_the_group_of_a_repartitioned_source_deleted_under_a_frozen_worker(make_job: MakeJob) -> None:
    """Nothing says any more how far the source was read: to read it from the start would judge everything twice."""
    job = make_job(document={"source": {"topics": ["frozen-group-in"]}})
    events = workload(182, 2_000)
    with Watch(job):
        worker = job.start()
        job.send(events[:1_000])
        job.until_done()
        before = job.admin.end_offsets(job.topology.repartition_topic)
        worker.signal(signal.SIGSTOP)
        until(lambda: delete_group(job) == 0, "the group has no member and is deleted")
        worker.signal(signal.SIGCONT)
        assert worker.wait() == INCOMPATIBLE, worker.log
        assert "has no offset of frozen-group-in/" in worker.log, worker.log
        assert job.admin.end_offsets(job.topology.repartition_topic) == before
    job.refused(code=INCOMPATIBLE, says="has no offset of frozen-group-in/")
