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
from tests.simulation import cluster as simulated
from tests.simulation.direct import DirectWire

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


class Wire(DirectWire):
    """The simulated cluster; its topics stay."""

    def pin(self, topic_ids):
        """Look no topic up by name."""


@pytest.mark.parametrize("partitioned_by", [", partitioned_by: tracking_id", ""])
async def test_a_task_that_is_built_again_before_its_first_commit_skips_no_record(tmp_path, partitioned_by):
    """Was: with `start: latest`, records that arrived while the first commit got no response were never judged."""
    text = (
        TEXT.format(guard="1h").replace(", partitioned_by: tracking_id", f"{partitioned_by}, start: latest")
        + "transactions: {partitions: 1}\n"
    )
    feeding, logs = TopicPartition("in", 0), simulated.Cluster()
    topics = ("in", "t.changelog", "t.repartition", "out", "out.late", "out.dead-letter", "t.layout")
    wire = Wire(logs)
    cluster = Cluster({name: Topic(name, now.topic_id, 1) for name, now in (await wire.topics(topics)).items()})
    settings = Settings(brokers=("127.0.0.1:1",), state_dir=tmp_path)
    factory = TaskFactory(parse(text, name="t.yaml"), settings, cluster, wire, SteadyClock(), None)
    offsets = []
    for _ in range(2):
        logs.append_plain(feeding, [simulated.Record(0, 1, b"k", b"v", ())])
        offsets.append(await factory.build((feeding,)).tasks[feeding].start())
    assert offsets == [1, 1]
