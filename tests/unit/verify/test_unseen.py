"""States of the topics in which the verifier once saw no fault, and correct ones in which it saw one."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from dedup.core.event_time import FieldTime
from dedup.core.flow import Flow
from dedup.core.fold import OnFuture
from dedup.core.tracking_id import parse_path
from dedup.topology.model import SourceSpec
from dedup.verify.direct import WHY_COMPACTED
from dedup.verify.evidence import SideTopic
from dedup.verify.flow_outputs import FlowOutputs
from dedup.verify.replay import WHY_SIDE_GONE
from tests.unit.memory_cluster import (
    Headers,
    MemoryCluster,
    at,
    cluster_of,
    dead_letter,
    origin,
    run_of,
    topology_of,
    value_of,
    verified,
    wrong,
)

LOG = "x.repartition"
NANOSECONDS = at(0) * 1_000_000


def carried(
    cluster: MemoryCluster, name: str, second: int, partition: int = 0, feed: int = 0, *, forwarded: bool = True
) -> int:
    offset = cluster.put("x-in", value_of(name), at(second), partition=feed)
    headers = [("dedup-source", f"x-in/{feed}/{offset}".encode()), ("dedup-timestamp", str(at(second)).encode())]
    cluster.put(LOG, value_of(name), at(0), headers, partition)
    if forwarded:
        cluster.put("x-out", value_of(name), at(second))
    return offset


def test_a_loss_before_the_last_batch_of_a_log_that_began_at_latest_is_told() -> None:
    topology = topology_of(direct=False, start="latest")
    cluster = cluster_of(topology)
    for second, name in enumerate("abcd"):
        carried(cluster, name, second, partition=second % 2)
    cluster.commit("x-in", LOG)
    assert wrong(verified(cluster, topology)) == {}
    cluster.logs[LOG, 1].pop(0)
    cluster.logs["x-out", 0].pop(1)
    assert wrong(verified(cluster, topology)) == {"lost": 1}


def test_everything_is_lost_if_the_output_of_a_repartitioned_topology_is_gone() -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    for second, name in enumerate("ab"):
        carried(cluster, name, second)
    cluster.commit("x-in", LOG)
    del cluster.topics["x-out"]
    assert wrong(verified(cluster, topology)) == {"lost": 2}
    cluster.low[LOG, 0] = 2
    assert wrong(verified(cluster, topology)) == {"lost": 2}


def test_a_copy_in_a_partition_to_which_no_task_writes_is_told() -> None:
    topology = topology_of(duplicates="x-dup")
    cluster = run_of(topology, [("a", 0), ("a", 1)], "UD")
    cluster.topics["x-dup"] = 2
    assert wrong(verified(cluster, topology)) == {}
    cluster.put("x-dup", value_of("a"), at(1), partition=1)
    assert wrong(verified(cluster, topology)) == {"wrong_duplicate": 1}


@pytest.mark.parametrize("direct", [True, False])
def test_copies_in_a_topic_that_is_gone_are_not_provable(direct: bool) -> None:
    topology = topology_of(direct=direct, duplicates="x-dup")
    if direct:
        cluster = run_of(topology, [("a", 0), ("a", 1)], "UD")
    else:
        cluster = cluster_of(topology)
        carried(cluster, "a", 0)
        carried(cluster, "a", 1, forwarded=False)
        cluster.commit("x-in", LOG)
    del cluster.topics["x-dup"]
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({}, {"x-dup does not exist": 1})


def test_a_dead_letter_of_a_repartitioned_record_that_is_there_twice_is_told() -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    cluster.put("x-in", b"no json", at(0))
    cluster.put(LOG, b"no json", at(0), origin(0, at(0)))
    dead_letter(cluster, b"no json", 0, 0, "not_json", 1)
    cluster.commit("x-in", LOG)
    assert wrong(verified(cluster, topology)) == {}
    dead_letter(cluster, b"no json", 0, 0, "not_json", 1)
    assert wrong(verified(cluster, topology)) == {"duplicated": 1}


@pytest.mark.parametrize("direct", [True, False])
def test_a_clamped_field_leaves_the_timestamp_as_it_is(direct: bool) -> None:
    by_field = FieldTime(parse_path("id"), "ms")
    topology = topology_of(direct=direct, event_time=by_field, future=OnFuture.CLAMP)
    cluster = cluster_of(topology)
    value = b'{"id": %d}' % at(0)
    cluster.put("x-in", value, at(0))
    if not direct:
        cluster.put(LOG, value, at(0), origin(0, at(0)))
    cluster.put("x-out", value, at(0))
    cluster.commit("x-in", *(() if direct else (LOG,)))
    assert wrong(verified(cluster, topology)) == {}
    cluster.logs["x-out", 0][0] = (*cluster.logs["x-out", 0][0][:4], at(1))
    assert wrong(verified(cluster, topology)) == {"changed": 1}


def test_a_partition_that_was_added_holds_stream_time_back_for_every_id() -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    cluster.topics |= {"x-in": 2, topology.layout_topic: 1}
    cluster.put(topology.layout_topic, b'{"counts": {"x-in": 1}}', at(0))
    # The added partition is awake at second 95, so stream time stays at 100, where it was.
    carried(cluster, "a", 100)
    carried(cluster, "b", 95, feed=1)
    for second in (200, 220, 100):
        carried(cluster, "c", second)
    cluster.commit("x-in", LOG)
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples


def test_a_dead_letter_wakes_its_feed() -> None:
    topology = topology_of(direct=False, source=SourceSpec(("x-in", "x-in2")))
    cluster = cluster_of(topology)
    carried(cluster, "a", 100)
    cluster.put(LOG, None, at(0), [("dedup-idle", b"x-in2/0"), ("dedup-timestamp", b"0")])
    far = 900_000_000
    cluster.put("x-in2", value_of("far"), at(far))
    headers = origin(0, at(far), "x-in2")
    cluster.put(LOG, value_of("far"), at(0), headers)
    why = [("dedup-reason", b"future_time"), ("dedup-detail", b"a sentence")]
    cluster.put("x-dead", value_of("far"), at(200), [*why, *headers])
    # The second source is awake and has no event time, so stream time stays at 100.
    carried(cluster, "b", 200)
    carried(cluster, "c", 110)
    cluster.commit("x-in", "x-in2", LOG)
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples


def test_what_compaction_took_from_the_output_of_a_repartitioned_topology_is_not_lost() -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    for second, name in enumerate("ab"):
        carried(cluster, name, second)
    cluster.commit("x-in", LOG)
    cluster.compact.add("x-out")
    cluster.logs["x-out", 0].pop(0)
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples
    assert sum(report.not_provable.values()) == 1


@pytest.mark.parametrize("direct", [True, False])
def test_a_timestamp_in_nanoseconds_is_compared(direct: bool) -> None:
    topology = topology_of(direct=direct)
    cluster = cluster_of(topology)
    headers = [("dedup-source", b"x-in/0/0"), ("dedup-timestamp", str(NANOSECONDS).encode())]
    cluster.put("x-in", value_of("a"), NANOSECONDS)
    if not direct:
        cluster.put(LOG, value_of("a"), at(0), headers)
    why = [("dedup-reason", b"future_time"), ("dedup-detail", b"a sentence")]
    cluster.put("x-dead", value_of("a"), at(0), [*why, *headers])
    cluster.commit("x-in", *(() if direct else (LOG,)))
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples


@pytest.mark.parametrize("topic", ["x-late", "x-dead"])
@pytest.mark.parametrize("direct", [True, False])
def test_an_entry_that_names_a_partition_that_does_not_exist_is_told(direct: bool, topic: str) -> None:
    topology = topology_of(direct=direct)
    cluster = cluster_of(topology)
    cluster.commit("x-in", *(() if direct else (LOG,)))
    headers: Headers = [("dedup-source", b"x-in/7/0"), ("dedup-timestamp", b"0")]
    cluster.put(topic, value_of("a"), at(0), headers)
    assert wrong(verified(cluster, topology)) == {"phantom": 1}


@pytest.mark.parametrize("topic", ["x-in", "x-out"])
def test_a_missing_dead_letter_is_told_though_a_topic_is_compacted(topic: str) -> None:
    topology = topology_of()
    cluster = cluster_of(topology)
    cluster.put("x-in", b"no json", at(0))
    cluster.commit("x-in")
    cluster.compact.add(topic)
    dead_letter(cluster, b"no json", 0, 0, "not_json", 1)
    report = verified(cluster, topology)
    assert (wrong(report), list(report.not_provable)) == ({}, [WHY_COMPACTED])
    cluster.logs["x-dead", 0].clear()
    assert wrong(verified(cluster, topology)) == {"lost": 1}


def test_an_open_transaction_in_the_layout_topic_is_no_crash() -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    carried(cluster, "a", 0)
    cluster.commit("x-in", LOG)
    cluster.topics[topology.layout_topic] = 1
    cluster.put(topology.layout_topic, b'{"counts": {"x-in": 1}}', at(0))
    cluster.put(topology.layout_topic, b"{}", at(0))
    cluster.open_from[topology.layout_topic, 0] = 1
    assert wrong(verified(cluster, topology)) == {}


def test_an_open_transaction_in_a_source_that_began_at_latest_is_no_crash() -> None:
    topology = topology_of(start="latest")
    cluster = run_of(topology, [("a", 0), ("b", 1)], "UU")
    cluster.logs["x-out", 0].pop(0)
    cluster.put("x-in", value_of("c"), at(2))
    cluster.put("x-in", value_of("d"), at(3))
    cluster.open_from["x-in", 0] = 3
    cluster.logs["x-out", 0][0] = (0, b"k", value_of("b"), [], at(1))
    assert wrong(verified(cluster, topology)) != {}


def test_a_topology_that_only_observes_from_latest_on_has_late_records_and_duplicates() -> None:
    topology = topology_of(start="latest", output=None, duplicates="x-dup")
    cluster = run_of(topology, [("old", 0), ("a", 100), ("late", 50), ("b", 101)], "--L-")
    added = [("dedup-first-time", str(at(100)).encode()), ("dedup-first-source", b"x-in/0/1")]
    cluster.put("x-in", value_of("a"), at(102))
    cluster.put("x-dup", value_of("a"), at(102), added)
    cluster.commit("x-in")
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples


@pytest.mark.parametrize("kept", [0, 1])
def test_records_before_a_start_time_that_came_after_the_start_are_judged(kept: int) -> None:
    topology = topology_of(start=at(10))
    # Out of order: the record at second 9 came after one at second 11, which retention may have deleted since.
    cluster = run_of(topology, [("a", 11), ("b", 9), ("c", 12)], "UUU")
    cluster.low["x-in", 0] = kept
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples


def test_a_dead_letter_of_a_deleted_record_does_not_make_a_start_time_certain() -> None:
    """Was: the records in the output that came before what is left of the source were told as phantoms."""
    topology = topology_of(start=at(0))
    cluster = run_of(topology, [("a", 0), ("bad", 1), ("b", 2), ("a", 3), ("c", 4)], "UXUDU")
    cluster.logs["x-in", 0][1] = (1, None, b"no json", [], at(1))
    dead_letter(cluster, b"no json", 1, 1, "not_json", 2)
    assert wrong(verified(cluster, topology)) == {}
    cluster.low["x-in", 0] = 3
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples


def test_a_start_time_after_all_records_is_the_end_at_that_time() -> None:
    topology = topology_of(start=at(10))
    # The worker was started behind the record at second 0, and the record at second 9 came too late.
    cluster = run_of(topology, [("a", 0), ("b", 9), ("c", 12)], "-UU")
    assert wrong(verified(cluster, topology)) == {}
    cluster.logs["x-out", 0].pop()
    assert wrong(verified(cluster, topology)) == {"lost": 1, "unbalanced": 1}


@pytest.mark.parametrize("direct", [True, False])
def test_a_source_that_ends_before_the_committed_offset_is_named(direct: bool) -> None:
    topology = topology_of(direct=direct)
    cluster = cluster_of(topology)
    if direct:
        cluster = run_of(topology, [("a", 0)], "U")
    else:
        carried(cluster, "a", 0)
        cluster.commit("x-in", LOG)
    cluster.offsets["x-in", 0] = 5
    report = verified(cluster, topology)
    assert wrong(report) == {}
    assert [why.partition(":")[0] for why in report.not_provable] == ["x-in ends before the committed offset"]


def test_the_timestamp_type_of_the_output_may_be_changed_on_the_way() -> None:
    for direct in (True, False):
        topology = topology_of(direct=direct)
        cluster = cluster_of(topology)
        if direct:
            cluster = run_of(topology, [("a", 0), ("b", 1)], "UU")
        else:
            carried(cluster, "a", 0)
            carried(cluster, "b", 1)
            cluster.commit("x-in", LOG)
        cluster.logs["x-out", 0][1] = (*cluster.logs["x-out", 0][1][:4], at(5000))
        cluster.broker_time_from["x-out", 0] = 1
        report = verified(cluster, topology)
        assert wrong(report) == {}, report.samples


def test_a_flow_may_share_a_name_with_the_dead_letter_topic(tmp_path: Path) -> None:
    side = SideTopic("flow", str(tmp_path))
    FlowOutputs(Flow(), ("x-out",), str(tmp_path)).close()
    side.close()


def test_a_dead_letter_of_a_deleted_record_does_not_begin_a_source_that_began_at_latest() -> None:
    topology = topology_of(start="latest")
    cluster = run_of(topology, [("bad", 0), ("a", 1), ("b", 2)], "XUU")
    cluster.logs["x-in", 0][0] = (0, None, b"no json", [], at(0))
    dead_letter(cluster, b"no json", 0, 0, "not_json", 1)
    cluster.low["x-in", 0] = 2
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples


def test_a_log_that_is_kept_longer_than_the_source_began_at_latest_with_deleted_records() -> None:
    topology = topology_of(direct=False, start="latest")
    cluster = cluster_of(topology)
    for second, name in enumerate("ab"):
        carried(cluster, name, second)
    cluster.commit("x-in", LOG)
    cluster.low["x-in", 0] = 1
    assert wrong(verified(cluster, topology)) == {}


def test_what_compaction_took_from_a_side_topic_is_not_lost() -> None:
    topology = topology_of(duplicates="x-dup")
    cluster = run_of(topology, [("a", 100), ("late", 0), ("a", 101), ("bad", 102)], "ULDX")
    cluster.logs["x-in", 0][3] = (3, None, b"no json", [], at(102))
    dead_letter(cluster, b"no json", 3, 102, "not_json", 103)
    assert wrong(verified(cluster, topology)) == {}
    for topic in ("x-late", "x-dead", "x-dup"):
        cluster.logs[topic, 0].clear()
    assert wrong(verified(cluster, topology)) == {"lost": 2, "unbalanced": 1, "wrong_duplicate": 1}
    cluster.compact |= {"x-late", "x-dead", "x-dup"}
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples
    assert report.not_provable == {WHY_SIDE_GONE: 2, "x-dup is compacted": 1}


def test_an_output_may_have_more_partitions_than_the_process_may_open_files() -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    cluster.topics["x-out"] = 300
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, most))
    try:
        assert wrong(verified(cluster, topology)) == {}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
