"""The verifier behind a repartition topic, where not all is there: what it did not look at it never calls clean."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from dedup.core.event_time import ArrivalTime
from dedup.core.tracking_id import ContentRule, TrackingId, parse_path
from dedup.errors import StateIncompatible
from dedup.topology.model import SourceSpec, Topology
from dedup.verify.cut import WHY_MEANWHILE, WHY_OPEN
from dedup.verify.direct import WHY_BEFORE, WHY_NO_OFFSET, WHY_OUTPUT_GONE
from dedup.verify.findings import WHY_PURGED_COPIES
from dedup.verify.repartitioned import WHY_PURGED
from tests.unit.memory_cluster import (
    MemoryCluster,
    at,
    cluster_of,
    dead_letter,
    origin,
    topology_of,
    value_of,
    verified,
    wrong,
)

LOG = "x.repartition"
ROWS = [("a", 0), ("b", 1), ("a", 2), ("c", 3)]
UNIQUE = [("a", 0), ("b", 1), ("c", 3)]


def carried(cluster: MemoryCluster, name: str, second: int, partition: int = 0) -> None:
    """A record is in the source and in the repartition topic."""
    offset = cluster.put("x-in", value_of(name), at(second))
    cluster.put(LOG, value_of(name), at(0), origin(offset, at(second)), partition)


def run_of(topology: Topology) -> MemoryCluster:
    """Return a correct run; all is in partition 0 of the repartition topic."""
    cluster = cluster_of(topology)
    for name, second in ROWS:
        carried(cluster, name, second)
    if topology.output is not None:
        for name, second in UNIQUE:
            cluster.put("x-out", value_of(name), at(second))
    cluster.commit("x-in", LOG)
    return cluster


def test_a_correct_run_passes() -> None:
    topology = topology_of(direct=False)
    report = verified(run_of(topology), topology)
    assert (wrong(report), report.not_provable, report.read) == ({}, {}, 4)


def test_what_precedes_the_first_record_left_is_not_provable_where_latest_was_is_unknown() -> None:
    topology = topology_of(direct=False, start="latest")
    cluster = run_of(topology)
    cluster.logs["x-out", 0].clear()
    cluster.low[LOG, 0] = 4
    report = verified(cluster, topology)
    assert report.not_provable == {WHY_BEFORE: 4}


def test_a_time_to_start_at_is_known_whatever_is_purged() -> None:
    topology = topology_of(direct=False, start=at(0))
    cluster = run_of(topology)
    cluster.low[LOG, 0] = 4
    report = verified(cluster, topology)
    assert WHY_BEFORE not in report.not_provable
    assert wrong(report) == {}


def test_an_id_in_two_partitions_of_the_repartition_topic_is_told() -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    for second in (0, 1):
        carried(cluster, "a", second, partition=second)
        cluster.put("x-out", value_of("a"), at(second))
    cluster.commit("x-in", LOG)
    assert wrong(verified(cluster, topology)) == {"duplicated": 1}


def test_what_was_carried_but_is_not_in_the_source_is_a_phantom() -> None:
    topology = topology_of(direct=False)
    cluster = run_of(topology)
    del cluster.logs["x-in", 0][1]
    report = verified(cluster, topology)
    assert wrong(report) == {"phantom": 1}
    assert report.samples[0].place == "x-in/0 offset 1"


def test_what_retention_took_from_the_source_is_no_phantom() -> None:
    topology = topology_of(direct=False)
    cluster = run_of(topology)
    cluster.low["x-in", 0] = 2
    assert wrong(verified(cluster, topology)) == {}


def test_without_offsets_nothing_is_proved() -> None:
    topology = topology_of(direct=False)
    cluster = run_of(topology)
    cluster.logs["x-out", 0].clear()
    cluster.offsets.clear()
    assert verified(cluster, topology).not_provable == {WHY_NO_OFFSET: 8}


def test_an_idle_marker_does_not_take_the_dead_letter_of_its_feeds_first_record() -> None:
    topology = topology_of(direct=False, source=SourceSpec(("x-in", "x-in2")))
    cluster = cluster_of(topology)
    marker = [("dedup-idle", b"x-in2/0"), ("dedup-timestamp", b"0")]
    for name in ("a", "b"):
        carried(cluster, name, 100)
        cluster.put("x-out", value_of(name), at(100))
        cluster.put(LOG, None, at(0), marker)
    cluster.put("x-in2", b"no json", at(1))
    why = [("dedup-reason", b"not_json"), ("dedup-detail", b"a sentence")]
    cluster.put("x-dead", b"no json", at(200), [*why, *origin(0, at(1), "x-in2")])
    cluster.commit("x-in", "x-in2", LOG)
    report = verified(cluster, topology)
    assert (wrong(report), report.read) == ({}, 3), json.dumps([sample.text for sample in report.samples])


def test_a_dead_letter_in_the_repartition_topic_is_compared() -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    carried(cluster, "a", 0)
    dead_letter(cluster, value_of("b"), 0, 0, "refused_by_broker", 1)
    cluster.commit("x-in", LOG)
    assert wrong(verified(cluster, topology)) == {"changed": 1}


def test_what_is_purged_and_forwarded_nowhere_is_not_lost() -> None:
    topology = topology_of(direct=False, output=None)
    cluster = run_of(topology)
    cluster.low[LOG, 0] = 4
    report = verified(cluster, topology)
    assert wrong(report) == {}
    assert report.not_provable == {WHY_PURGED: 4}


def test_the_brokers_time_in_the_output_says_nothing_of_what_is_purged() -> None:
    topology = topology_of(direct=False)
    cluster = run_of(topology)
    cluster.broker_time.add("x-out")
    # An hour of backlog: the broker's times are that far from the events'.
    cluster.logs["x-out", 0] = [(*row[:4], at(3600)) for row in cluster.logs["x-out", 0]]
    cluster.low[LOG, 0] = 4
    assert wrong(verified(cluster, topology)) == {}


def test_what_is_purged_may_have_been_a_dead_letter_that_is_deleted() -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    carried(cluster, "a", 0)
    carried(cluster, "far ahead", 900_000_000)
    cluster.put("x-out", value_of("a"), at(0))
    cluster.commit("x-in", LOG)
    cluster.low[LOG, 0] = 2
    assert wrong(verified(cluster, topology)) == {"lost": 1}
    cluster.low["x-dead", 0] = 1
    assert wrong(verified(cluster, topology)) == {}


def test_what_an_output_without_its_beginning_may_have_had_is_not_lost() -> None:
    topology = topology_of(direct=False)
    cluster = run_of(topology)
    cluster.low["x-out", 0] = 2
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({}, {WHY_OUTPUT_GONE: 2})


def test_what_is_missing_after_the_beginning_of_the_output_is_lost() -> None:
    topology = topology_of(direct=False)
    cluster = run_of(topology)
    cluster.logs["x-out", 0].pop(1)
    cluster.low["x-out", 0] = 0
    carried(cluster, "d", 4)
    cluster.put("x-out", value_of("d"), at(4))
    cluster.commit("x-in", LOG)
    assert wrong(verified(cluster, topology)) == {"lost": 1}
    # Kept: a, c, d. Without a, the lost b may have stood there; c stands after it.
    cluster.low["x-out", 0] = 1
    assert wrong(verified(cluster, topology)) == {}
    cluster.logs["x-out", 0] = [row for row in cluster.logs["x-out", 0] if row[2] != value_of("c")]
    cluster.put("x-out", value_of("e"), at(5))
    cluster.low["x-out", 0] = 0
    assert wrong(verified(cluster, topology)) == {"lost": 2, "phantom": 1}


def test_what_is_behind_an_open_transaction_is_not_lost() -> None:
    topology = topology_of(direct=False)
    cluster = run_of(topology)
    cluster.open_from["x-out", 0] = 1
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable[WHY_OPEN]) == ({}, 2)


def test_records_without_an_id_of_several_partitions_may_come_in_any_order() -> None:
    topology = topology_of(direct=False, source=SourceSpec(("x-in", "x-in2")))
    cluster = cluster_of(topology)
    verdict = [("dedup-verdict", b"tombstone")]
    for topic, count in (("x-in", 2), ("x-in2", 1)):
        for number in range(count):
            cluster.put(topic, None, at(number))
    for second in (0, 1, 0):
        cluster.put("x-out", None, at(second), verdict)
    cluster.commit("x-in", "x-in2", LOG)
    assert wrong(verified(cluster, topology)) == {}
    cluster.logs["x-in2", 0][0] = (0, b"k", None, [], at(0))
    cluster.logs["x-out", 0][2] = (2, b"k", None, verdict, at(0))
    assert wrong(verified(cluster, topology)) == {}


def reading(number: int, sent_at: int) -> bytes:
    return json.dumps({"reading": number, "sent_at": sent_at}).encode()


def with_copies(**other: object) -> Topology:
    """Return a topology whose ID is the content, but for the time of sending, with a topic for duplicates."""
    by_content = TrackingId(ContentRule((parse_path("sent_at"),)), ())
    return replace(topology_of(direct=False, duplicates="x-dup", **other), tracking_id=by_content)


def content_run(topology: Topology) -> MemoryCluster:
    """Return a correct run: each of two readings twice, in a partition of its own, and a third one once."""
    cluster = cluster_of(topology)
    cluster.topics["x-dup"] = 2
    for second, (number, sent_at) in enumerate([(1, 0), (2, 0), (1, 1), (3, 0), (2, 1)]):
        offset = cluster.put("x-in", reading(number, sent_at), at(second))
        cluster.put(LOG, reading(number, sent_at), at(0), origin(offset, at(second)), number % 2)
        if sent_at == 0:
            cluster.put("x-out", reading(number, sent_at), at(second))
        else:
            copy_of(cluster, number, sent_at, second)
    cluster.commit("x-in", LOG)
    return cluster


def copy_of(cluster: MemoryCluster, number: int, sent_at: int, second: int, *, partition: int | None = None) -> None:
    """The duplicates topic has a copy; reading n came first at second n - 1."""
    first = number - 1
    added = [("dedup-first-time", str(at(first)).encode()), ("dedup-first-source", b"x-in/0/%d" % first)]
    to = number % 2 if partition is None else partition
    cluster.put("x-dup", reading(number, sent_at), at(second), added, to)


def test_duplicates_of_a_content_id_are_compared() -> None:
    topology = with_copies()
    report = verified(content_run(topology), topology)
    assert (wrong(report), report.not_provable) == ({}, {})
    assert [(books.unique, books.duplicates) for books in report.books] == [(1, 1), (2, 1)]


def test_tasks_that_share_a_partition_of_the_duplicates_topic_are_told_apart() -> None:
    topology = with_copies()
    cluster = content_run(topology)
    cluster.topics["x-dup"] = 1
    cluster.logs["x-dup", 0].clear()
    del cluster.logs["x-dup", 1]
    for number, second in ((2, 4), (1, 2)):
        copy_of(cluster, number, 1, second, partition=0)
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({}, {})


def grown_run() -> MemoryCluster:
    """Return a run in which a partition was added to the duplicates topic before the last duplicate of task 1."""
    cluster = content_run(with_copies())
    for partition in range(2):
        cluster.logs["x-dup", partition].clear()
    for number, second in ((2, 4), (1, 2)):
        copy_of(cluster, number, 1, second, partition=0)
    offset = cluster.put("x-in", reading(1, 2), at(5))
    cluster.put(LOG, reading(1, 2), at(0), origin(offset, at(5)), 1)
    copy_of(cluster, 1, 2, 5)
    cluster.commit("x-in", LOG)
    return cluster


def test_partitions_may_have_been_added_to_the_duplicates_topic() -> None:
    """Was: a copy from before the addition was a wrong duplicate, and missing in the partition of now."""
    cluster = grown_run()
    report = verified(cluster, with_copies())
    assert (wrong(report), report.not_provable) == ({}, {})
    copy_of(cluster, 1, 3, 6)
    report = verified(cluster, with_copies())
    assert [each.place for each in report.samples] == ["x-dup/1 offset 1"]
    cluster = grown_run()
    del cluster.logs["x-dup", 0][1]
    report = verified(cluster, with_copies())
    assert [each.place for each in report.samples] == [f"{LOG}/1 offset 1"]


def test_what_retention_took_from_the_duplicates_topic_before_a_partition_was_added_is_not_provable() -> None:
    cluster = grown_run()
    cluster.low["x-dup", 0] = 2
    cluster.logs["x-dup", 0].clear()
    report = verified(cluster, with_copies())
    assert (wrong(report), report.not_provable) == ({}, {"x-dup has lost its beginning": 2})


def swap(cluster: MemoryCluster) -> None:
    """A third and a fourth copy, in the wrong order."""
    for second, sent_at in ((5, 2), (6, 3)):
        offset = cluster.put("x-in", reading(1, sent_at), at(second))
        cluster.put(LOG, reading(1, sent_at), at(0), origin(offset, at(second)), 1)
    for second, sent_at in ((6, 3), (5, 2)):
        copy_of(cluster, 1, sent_at, second)
    cluster.commit("x-in", LOG)


@pytest.mark.parametrize(
    ("plant", "number"),
    [
        pytest.param(lambda cluster: cluster.logs["x-dup", 1].pop(), 1, id="lost"),
        pytest.param(lambda cluster: copy_of(cluster, 1, 1, 2), 1, id="twice"),
        pytest.param(lambda cluster: copy_of(cluster, 3, 0, 3), 1, id="not a duplicate"),
        pytest.param(lambda cluster: copy_of(cluster, 2, 1, 4, partition=1), 1, id="in another task's partition, too"),
        pytest.param(swap, 1, id="out of order"),
    ],
)
def test_a_wrong_copy_behind_a_repartition_topic_is_told(plant: Callable[[MemoryCluster], object], number: int) -> None:
    topology = with_copies()
    cluster = content_run(topology)
    plant(cluster)
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({"wrong_duplicate": number}, {}), report.samples


def test_a_copy_that_names_another_first_sighting_is_told() -> None:
    topology = with_copies()
    cluster = content_run(topology)
    offset, key, value, headers, time_ms = cluster.logs["x-dup", 1][0]
    cluster.logs["x-dup", 1][0] = (offset, key, value, [headers[0], ("dedup-first-source", b"x-in/0/3")], time_ms)
    # The right one is missing, and this one is not expected.
    assert wrong(verified(cluster, topology)) == {"wrong_duplicate": 2}


def test_what_retention_took_from_the_duplicates_topic_is_not_provable() -> None:
    topology = with_copies()
    cluster = content_run(topology)
    cluster.low["x-dup", 1] = 1
    cluster.logs["x-dup", 1].clear()
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({}, {"x-dup has lost its beginning": 1})


def test_copies_of_what_is_purged_are_not_provable_and_those_of_the_other_task_are_compared() -> None:
    topology = with_copies()
    cluster = content_run(topology)
    cluster.low[LOG, 1] = 3
    report = verified(cluster, topology)
    assert wrong(report) == {}
    assert report.not_provable[WHY_PURGED_COPIES] == 1
    cluster.logs["x-dup", 0].clear()
    assert wrong(verified(cluster, topology)) == {"wrong_duplicate": 1}


def test_copies_behind_an_open_transaction_are_not_provable() -> None:
    topology = with_copies()
    cluster = content_run(topology)
    cluster.open_from["x-dup", 1] = 0
    report = verified(cluster, topology)
    assert wrong(report) == {}
    assert report.not_provable[WHY_OPEN] == 1


def test_conflicts_have_a_topic_of_their_own() -> None:
    topology = topology_of(direct=False, duplicates="x-dup", conflicts="x-con")
    cluster = cluster_of(topology)
    for second, text in enumerate((b'{"id":"a","n":1}', b'{"id":"a","n":2}', b'{"id":"a","n":1}')):
        offset = cluster.put("x-in", text, at(second))
        cluster.put(LOG, text, at(0), origin(offset, at(second)))
        added = [("dedup-first-time", str(at(0)).encode()), ("dedup-first-source", b"x-in/0/0")]
        cluster.put(("x-out", "x-con", "x-dup")[second], text, at(second), added if second else [])
    cluster.commit("x-in", LOG)
    report = verified(cluster, replace(topology, conflicts_counted=True))
    assert (wrong(report), report.not_provable) == ({}, {})
    del cluster.logs["x-con", 0]
    assert wrong(verified(cluster, replace(topology, conflicts_counted=True))) == {"wrong_duplicate": 1}


@pytest.mark.parametrize("own", [("dedup-source", b"up/0/7"), ("dedup-idle", b"x-in/0"), ("dedup-timestamp", b"1")])
def test_a_records_own_headers_may_carry_the_names_of_ours(own: tuple[str, bytes]) -> None:
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    cluster.put("x-in", value_of("a"), at(0), [own])
    cluster.put(LOG, value_of("a"), at(0), [own, *origin(0, at(0))])
    cluster.put("x-out", value_of("a"), at(0), [own])
    cluster.commit("x-in", LOG)
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable, report.read) == ({}, {}, 1)


def test_by_arrival_only_source_records_with_the_brokers_time_can_be_verified() -> None:
    topology = topology_of(direct=False, event_time=ArrivalTime())
    cluster = run_of(topology)
    with pytest.raises(StateIncompatible, match="x-in/0 offset 0 has the time that its producer wrote"):
        verified(cluster, topology)
    cluster.broker_time.add("x-in")
    assert wrong(verified(cluster, topology)) == {}


def busy_run(topology: Topology) -> MemoryCluster:
    """Return a run with several records in every topic; the repartition topic has two partitions."""
    cluster = cluster_of(topology)
    rows = [("a", 100), ("l", 0), ("b", 101), ("a", 102), ("l", 1), ("b", 103), ("c", 200), ("c", 201), ("d", 202)]
    for (name, second), where in zip(rows, "ULUDLDUDU", strict=True):
        offset, first = len(cluster.logs.get(("x-in", 0), [])), {"a": (100, 0), "b": (101, 3), "c": (200, 8)}
        carried(cluster, name, second, partition=name == "b")
        if where == "U":
            cluster.put("x-out", value_of(name), at(second))
        elif where == "L":
            cluster.put("x-late", value_of(name), at(1000), origin(offset, at(second)))
        else:
            then, source = first[name]
            own = [("dedup-first-time", str(at(then)).encode()), ("dedup-first-source", b"x-in/0/%d" % source)]
            cluster.put("x-dup", value_of(name), at(second), own)
        if name in "lc":
            offset = cluster.put("x-in", b"no json", at(0))
            dead_letter(cluster, b"no json", offset, 0, "not_json", 400)
            cluster.put(LOG, b"no json", at(0), origin(offset, at(0)))
    cluster.commit("x-in", LOG)
    return cluster


PLACES = [("x-in", 0), ("x-out", 0), ("x-late", 0), ("x-dead", 0), ("x-dup", 0), (LOG, 0), (LOG, 1)]


@pytest.mark.parametrize("start", ["earliest", "latest", at(100)])
@pytest.mark.parametrize("reached", [0, 1, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("lost", [None, ("x-out", 3), ("x-dead", 3), ("x-late", 1)])
def test_what_is_deleted_before_it_is_read_counts_as_deleted_before_the_verification(
    place: tuple[str, int], reached: int, start: str | int, lost: tuple[str, int] | None
) -> None:
    """Was: the verification ended with exit code 5, and the next one again."""
    topology = topology_of(direct=False, duplicates="x-dup", start=start)
    before, meanwhile = busy_run(topology), busy_run(topology)
    if lost is not None:
        for cluster in (before, meanwhile):
            del cluster.logs[lost[0], 0][lost[1]]
    if reached >= len(before.logs[place]):
        return
    left = reached + (3 if place == ("x-in", 0) else 1)
    before.low[place] = left
    meanwhile.deletes[place] = (reached, left)
    expected, report = verified(before, topology), verified(meanwhile, topology)
    assert not meanwhile.deletes
    assert report.not_provable.pop(f"{WHY_MEANWHILE} {place[0]}") == left
    assert wrong(report) == wrong(expected), report.samples
    assert (report.samples, report.method) == (expected.samples, expected.method)
    if reached and place[0] in {"x-late", "x-dead"}:  # What was read of a side topic before stays valid.
        assert sum(report.not_provable.values()) <= sum(expected.not_provable.values())
    else:
        assert (report.not_provable, report.books) == (expected.not_provable, expected.books)
    if lost is None:
        assert wrong(report) == {}


def test_partitions_of_the_repartition_topic_may_be_purged_one_after_the_other() -> None:
    topology = topology_of(direct=False, duplicates="x-dup")
    cluster = busy_run(topology)
    cluster.deletes = {(LOG, 0): (2, 3), (LOG, 1): (1, 2)}
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable[f"{WHY_MEANWHILE} {LOG}"]) == ({}, 5), report.samples


def refused(cluster: MemoryCluster, name: str, second: int) -> None:
    """A record is in the source; the broker refused it, so the repartition step has made it a dead letter."""
    offset = cluster.put("x-in", value_of(name), at(second))
    dead_letter(cluster, value_of(name), offset, second, "refused_by_broker", 400)


def test_a_dead_letter_of_the_repartition_step_is_no_phantom_in_a_sample() -> None:
    """Was: "phantom" for each one that was not in the sample."""
    topology = topology_of(direct=False)
    cluster = cluster_of(topology)
    for number in range(20):
        refused(cluster, f"refused {number}", number)
        carried(cluster, f"i{number}", number)
        cluster.put("x-out", value_of(f"i{number}"), at(number))
    cluster.commit("x-in", LOG)
    report = verified(cluster, topology, sample=3)
    assert wrong(report) == {}, report.samples
    assert 0 < report.not_provable["dead letters of the repartition step"] < 20


@pytest.mark.parametrize("rows", [[5, 6, 20], [12, 5, 6, 20]], ids=["all came before the time", "the first is deleted"])
@pytest.mark.parametrize("start", ["latest", at(10)])
def test_a_dead_letter_before_all_records_that_were_carried_is_no_phantom(start: str | int, rows: list[int]) -> None:
    """Was: "phantom", because the start was taken for a later record."""
    topology = topology_of(direct=False, start=start)
    cluster = cluster_of(topology)
    for second in rows:
        if second == 5:
            refused(cluster, "refused", second)
            continue
        carried(cluster, f"i{second}", second)
        cluster.put("x-out", value_of(f"i{second}"), at(second))
    cluster.commit("x-in", LOG)
    cluster.low["x-in", 0] = len(rows) - 3
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples
    assert report.not_provable == {"dead letters of the repartition step": 1}
    # What came after the dead letter was read, too.
    cluster.logs[LOG, 0].pop(-2)
    cluster.logs["x-out", 0].pop(-2)
    assert wrong(verified(cluster, topology)) == {"lost": 1}
