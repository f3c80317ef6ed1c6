"""Stores as tasks get them."""

import pytest

from dedup.kafka.topic_admin import Topic
from dedup.settings import Settings
from dedup.store.changelog import TaskRecord
from dedup.store.rocks import RocksMemory
from dedup.topology.parse import parse
from dedup.worker.task import SteadyClock
from dedup.worker.task_factory import TaskFactory
from dedup.worker.topics import Cluster

TEXT = """
dedup: 1
name: t
source: {{topics: [in], partitioned_by: tracking_id}}
tracking_id: {{field: id}}
guard_period: {guard}
output: {{topic: out}}
"""


def opened(state_dir, guard):
    topology = parse(TEXT.format(guard=guard), name="t.yaml")
    cluster = Cluster({name: Topic(name, "id", 1) for name in ("t.changelog", "in")})
    settings = Settings(brokers=("127.0.0.1:1",), state_dir=state_dir)
    workshop = TaskFactory(topology, settings, cluster, None, SteadyClock(), RocksMemory())
    return topology.window, topology.state_fingerprint({"in": 1}), workshop.open_store(0)


@pytest.mark.parametrize("guard", ["1h", "5m"])
def test_a_store_is_opened_as_it_was_left_whatever_the_guard_period(tmp_path, guard):
    """What is of another grid is cleared by a restore, which knows whether the changelog holds it all."""
    window, fingerprint, store = opened(tmp_path, "1h")
    record = TaskRecord(fingerprint, 1_000, (), 7, window.segment_ms)
    store.apply({0: {b"key": b"value"}}, record, 9)
    store.close()

    _, _, store = opened(tmp_path, guard)
    assert (store.position, tuple(store.segments()), store.task_record) == (9, (0,), record)
    store.close()
