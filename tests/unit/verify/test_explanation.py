"""`dedup explain` where retention has taken something, or not all was judged: it contradicts nothing it can not know."""

from __future__ import annotations

from typing import Protocol

import pytest

from dedup.settings import Settings
from dedup.topology.model import Topology
from dedup.verify import explanation as explain
from dedup.verify.explanation import Explanation, explain_id
from dedup.worker.introspection import state_keys
from tests.unit.memory_cluster import MemoryCluster, at, cluster_of, origin, run_of, topology_of, value_of

ROWS = [("a", 0.0), ("b", 1.0), ("a", 2.0), ("c", 3.0)]


class Told(Protocol):
    def __call__(self, cluster: MemoryCluster, topology: Topology, name: str = "b") -> Explanation: ...


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    def tell(cluster: MemoryCluster, topology: Topology, name: str = "b") -> Explanation:
        monkeypatch.setattr(explain, "KafkaReader", lambda _settings: cluster)
        settings = Settings(brokers=("127.0.0.1:1",))
        keys = frozenset(state_keys(topology, name))
        return explain_id(topology, settings, name, keys, progress=lambda *_: None)

    return tell


def test_a_correct_run_contradicts_nothing_and_a_stray_does(told: Told) -> None:
    topology = topology_of()
    cluster = run_of(topology, ROWS, "UUDU")
    assert told(cluster, topology).contradictions == 0
    cluster.put("x-out", value_of("b"), at(1))
    assert told(cluster, topology).contradictions == 1


def test_records_with_one_event_time_are_listed_as_judged(told: Told) -> None:
    topology = topology_of()
    rows = [(f"other {n}", 0.0) for n in range(9)] + [("b", 1.0), ("b", 1.0)]
    cluster = run_of(topology, rows, "U" * 10 + "D")
    assert [each.verdict for each in told(cluster, topology).records] == ["unique", "duplicate"]


@pytest.mark.parametrize("reached", [0, 1])
@pytest.mark.parametrize("topic", ["x-in", "x-out", "x.repartition", "x.changelog"])
@pytest.mark.parametrize("direct", [True, False])
def test_what_is_deleted_before_it_is_read_is_left_out(told: Told, direct: bool, topic: str, reached: int) -> None:
    """Was: exit code 5, at each attempt, because workers delete from the repartition topic all the time."""
    topology = topology_of(direct=direct)
    clusters = []
    for _ in range(2):
        cluster = run_of(topology, ROWS, "UUDU")
        for offset, (name, second) in enumerate(ROWS):
            cluster.put("x.changelog", None, at(0))
            if not direct:
                cluster.put("x.repartition", value_of(name), at(0), origin(offset, at(second)))
        cluster.topics["x.changelog"] = 1
        if not direct:
            cluster.commit("x.repartition")
        clusters.append(cluster)
    before, meanwhile = clusters
    if not before.logs.get((topic, 0)):
        return
    before.low[topic, 0] = reached + 1
    meanwhile.deletes[topic, 0] = (reached, reached + 1)
    for name in "bc":
        meanwhile.deletes[topic, 0] = (reached, reached + 1)
        meanwhile.low.clear()
        expected, found = told(before, topology, name), told(meanwhile, topology, name)
        assert not meanwhile.deletes
        assert (found.contradictions, found.whole) == (0, expected.whole)
        if topic != "x-out" or reached == 0:
            assert found == expected


def test_a_record_that_is_not_forwarded_contradicts(told: Told) -> None:
    topology = topology_of()
    cluster = run_of(topology, ROWS, "UUDU")
    del cluster.logs["x-out", 0][1]
    assert told(cluster, topology).contradictions == 1


@pytest.mark.parametrize("topic", ["x-in", "x-out"])
def test_what_retention_took_contradicts_nothing(told: Told, topic: str) -> None:
    topology = topology_of()
    cluster = run_of(topology, ROWS, "UUDU")
    cluster.low[topic, 0] = 2
    assert told(cluster, topology).contradictions == 0


@pytest.mark.parametrize("start", [at(2), "latest"])
def test_what_precedes_the_start_was_never_judged(told: Told, start: str | int) -> None:
    topology = topology_of(start=start)
    cluster = run_of(topology, ROWS, "--UU")
    assert told(cluster, topology).contradictions == 0
    assert [record.verdict for record in told(cluster, topology, "a").records] == ["unique"]


def test_what_was_replayed_past_the_guarantee_is_no_stray(told: Told) -> None:
    topology = topology_of()
    cluster = run_of(topology, ROWS, "UUDU")
    cluster.put("x-out", value_of("b"), at(1), [("dedup-verdict", b"late"), ("dedup-replayed", b"x-in/0/1")])
    assert told(cluster, topology).contradictions == 0


def test_a_compacted_source_contradicts_nothing(told: Told) -> None:
    topology = topology_of()
    cluster = run_of(topology, ROWS, "UUDU")
    # The first "a" had another payload; it was forwarded, and made the second one a duplicate.
    cluster.logs["x-out", 0][0] = (0, None, b'{"id": "a", "n": 1}', [], at(0))
    del cluster.logs["x-in", 0][0]
    cluster.compact.add("x-in")
    assert told(cluster, topology, "a").contradictions == 0


def test_what_is_purged_from_the_repartition_topic_contradicts_nothing(told: Told) -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    log = topology.repartition_topic
    for name, second in (("a", 0), ("b", 1)):
        offset = cluster.put("x-in", value_of(name), at(second))
        cluster.put(log, value_of(name), at(0), origin(offset, at(second)))
        cluster.put("x-out", value_of(name), at(second))
    cluster.commit("x-in", log)
    assert told(cluster, topology).contradictions == 0
    cluster.low[log, 0] = 2
    found = told(cluster, topology)
    assert (found.contradictions, len(found.strays)) == (0, 1)
