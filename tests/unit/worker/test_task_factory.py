"""Stores as tasks get them."""

import pytest

from dedup.core.event_time import RecordTime
from dedup.core.extract import compile_extractor
from dedup.core.tracking_id import CodeRule, KeyRule, TrackingId
from dedup.errors import TopologyError
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import TopicPartition
from dedup.settings import Settings
from dedup.store.changelog import TaskRecord
from dedup.store.rocks import RocksMemory
from dedup.topology.parse import parse
from dedup.worker.task import SteadyClock
from dedup.worker.task_factory import IdFunctions, TaskFactory
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


BATCH = [b"k"], [b"v"], [[]], [0]
PLACES = [TopicPartition("in", partition) for partition in range(2)]


def limited(rule, most_s):
    extractor = compile_extractor(TrackingId(rule), RecordTime(), fmt="bytes", fingerprint=False)
    functions = IdFunctions(rule, most_s)
    return extractor, functions, [functions.limited(extractor, place) for place in PLACES]


def test_an_id_function_that_is_too_slow_twice_stops_the_worker():
    """Was: the group expelled the worker again and again, and no line of the log named the function."""
    extractor, functions, (first, second) = limited(CodeRule("shop:order_id", 1, lambda: lambda *_: "a"), -1.0)
    found = extractor(*BATCH).ids
    # The process may have been frozen during the first batch. Another partition's batch is no second one.
    assert first(*BATCH).ids == second(*BATCH).ids == found
    with pytest.raises(TopologyError, match=r"the function shop:order_id took .* 75% of `session_timeout`"):
        first(*BATCH)
    functions.most_s = 60.0
    assert second(*BATCH).ids == found
    functions.most_s = -1.0
    assert second(*BATCH).ids == found


def test_a_rule_without_a_function_has_no_limit():
    extractor, _, (first, _) = limited(KeyRule(), -1.0)
    assert first is extractor
