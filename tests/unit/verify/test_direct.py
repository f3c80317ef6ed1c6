"""The verifier of a topology that reads its source directly, where not all is there, or not as it should be."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from dedup.core.event_time import ArrivalTime
from dedup.core.fold import OnConflict
from dedup.core.reference_model import ReferenceModel
from dedup.core.window import Window
from dedup.errors import StateIncompatible
from dedup.topology.model import LateForward, Topology
from dedup.verify.cut import WHY_MEANWHILE, WHY_OPEN
from dedup.verify.direct import WHY_BEFORE, WHY_COMPACTED, WHY_NO_OFFSET
from dedup.verify.replay import WHY_CLOCK, WHY_FRONT, WHY_REFUSED
from tests.unit.memory_cluster import (
    MemoryCluster,
    at,
    cluster_of,
    dead_letter,
    run_of,
    topology_of,
    value_of,
    verified,
    wrong,
)

HOUR_S = 3600


def test_a_correct_run_passes() -> None:
    topology = topology_of()
    report = verified(run_of(topology, [("a", 0), ("b", 1), ("a", 2), ("c", 3)], "UUDU"), topology)
    assert (wrong(report), report.not_provable, report.read) == ({}, {}, 4)


def test_a_time_that_was_ahead_when_its_dead_letter_was_appended_is_proved() -> None:
    topology = topology_of()
    cluster = run_of(topology, [("a", 0), ("b", 4 * HOUR_S), ("c", 1)], "UXU")
    dead_letter(cluster, value_of("b"), 1, 4 * HOUR_S, "future_time", 60)
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({}, {})


def test_a_time_that_the_brokers_clock_had_passed_is_not_proved_to_be_ahead() -> None:
    topology = topology_of()
    cluster = run_of(topology, [("a", 0), ("b", 4 * HOUR_S), ("c", 1)], "UXU")
    dead_letter(cluster, value_of("b"), 1, 4 * HOUR_S, "future_time", 10 * HOUR_S)
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({}, {WHY_CLOCK: 1})


def test_a_dead_letter_that_the_broker_made_necessary_is_compared() -> None:
    topology = topology_of()
    cluster = run_of(topology, [("a", 0), ("b", 1)], "UX")
    dead_letter(cluster, value_of("other"), 1, 1, "refused_by_broker", 2)
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({"changed": 1}, {WHY_REFUSED: 1})


def test_a_compacted_source_is_not_lost_where_nothing_is_forwarded() -> None:
    topology = topology_of(output=None)
    cluster = run_of(topology, [("a", 0), ("b", 1)], "--")
    cluster.compact.add("x-in")
    assert wrong(verified(cluster, topology)) == {}


def test_a_compacted_source_is_judged_from_its_start() -> None:
    rows, belongs = [("a", 0), ("b", 1), ("c", 2)], "--U"
    for start in (at(2), "latest"):
        topology = topology_of(start=start)
        cluster = run_of(topology, rows, belongs)
        cluster.compact.add("x-in")
        report = verified(cluster, topology)
        assert wrong(report) == {}
        assert report.not_provable == {WHY_COMPACTED: 1} | ({WHY_BEFORE: 2} if start == "latest" else {})


def test_a_copy_of_a_record_whose_verdict_is_in_doubt_is_not_provable() -> None:
    topology = topology_of(duplicates="x-dup")
    rows = [("c", 0), ("b", 1), ("b", 2), ("c", 3), ("d", 4), ("c", 5)]
    cluster = run_of(topology, rows, "UUDDUD")
    assert wrong(verified(cluster, topology)) == {}
    cluster.low["x-in", 0] = 1
    report = verified(cluster, topology)
    assert (wrong(report), report.passed) == ({}, True)
    assert sum(report.not_provable.values()) > 0


def test_a_copy_that_belongs_nowhere_is_wrong_once_the_doubt_is_over() -> None:
    topology = topology_of(duplicates="x-dup")
    rows = [("a", 0), *((f"i{number}", 10 * number) for number in range(1, 20)), ("i19", 191)]
    cluster = run_of(topology, rows, "U" * 20 + "D")
    cluster.low["x-in", 0] = 1
    assert wrong(verified(cluster, topology)) == {}
    first = [("dedup-first-time", b"1"), ("dedup-first-source", b"x-in/0/1")]
    cluster.put("x-dup", value_of("i19"), at(190), first)
    assert wrong(verified(cluster, topology)) == {"wrong_duplicate": 1}


def test_books_are_not_held_against_a_source_that_is_gone() -> None:
    topology = topology_of()
    cluster = run_of(topology, [("a", 0), ("b", 1)], "UU")
    cluster.low["x-in", 0] = 2
    assert wrong(verified(cluster, topology)) == {}


def test_a_record_in_doubt_may_have_been_forwarded_as_late() -> None:
    topology = topology_of(late=LateForward())
    cluster = run_of(topology, [("h", 100), ("w", 95), ("a", 89), ("c", 102)], "UUFU")
    assert wrong(verified(cluster, topology)) == {}
    cluster.low["x-in", 0] = 1
    assert wrong(verified(cluster, topology)) == {}


def test_a_record_forwarded_as_late_that_is_left_first_says_little_of_the_stream_time_before_it() -> None:
    topology = topology_of(late=LateForward())
    # Late by the first one, which is gone, are those at second 0, 30 and 80.
    rows = [("h", 100), ("a", 0), ("b", 30), ("e", 80), ("c", 95), ("d", 101)]
    cluster = run_of(topology, rows, "UFFFUU")
    cluster.low["x-in", 0] = 1
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable[WHY_FRONT]) == ({}, 5)


def test_a_retry_left_first_is_not_taken_for_its_original_that_is_gone() -> None:
    topology = topology_of()
    # The third record equals the first, which was forwarded and is gone.
    cluster = run_of(topology, [("x", 5), ("y", 6), ("x", 5), ("z", 7)], "UUDU")
    cluster.low["x-in", 0] = 1
    assert wrong(verified(cluster, topology)) == {}


def test_a_record_that_passed_another_is_told_once_the_doubt_is_over() -> None:
    topology = topology_of()
    cluster = run_of(topology, [(f"i{number}", 10.0 * number) for number in range(30)], "U" * 30)
    cluster.low["x-in", 0] = 1
    output = cluster.logs["x-out", 0]
    (first, *one), (second, *other) = output[20], output[21]
    output[20:22] = [(first, *other), (second, *one)]  # type: ignore[list-item]  # offsets stay where they are
    assert wrong(verified(cluster, topology)) == {"reordered": 1}


def test_a_loss_is_told_where_late_records_are_forwarded_once_the_doubt_is_over() -> None:
    topology = topology_of(late=LateForward())
    rows = [(f"i{number}", 10.0 * number) for number in range(30)]
    cluster = run_of(topology, rows, "U" * 30)
    cluster.low["x-in", 0] = 1
    del cluster.logs["x-out", 0][25]
    assert wrong(verified(cluster, topology)) == {"lost": 1}


def test_what_was_forwarded_as_late_is_not_known_of_an_output_that_has_lost_its_beginning() -> None:
    topology = topology_of(late=LateForward())
    rows = [("h", 100), ("a", 0), ("b", 30), ("c", 95), ("d", 101)]
    cluster = run_of(topology, rows, "UFFUU")
    cluster.low["x-in", 0], cluster.low["x-out", 0] = 1, 2
    assert wrong(verified(cluster, topology)) == {}


def test_a_record_in_doubt_may_have_been_forwarded_as_a_conflict() -> None:
    topology = topology_of(on_conflict=OnConflict.FORWARD)
    cluster = cluster_of(topology)
    for second, value in enumerate((b'{"id": "a", "n": 1}', value_of("b"), b'{"id": "a", "n": 2}')):
        cluster.put("x-in", value, at(second))
        cluster.put("x-out", value, at(second), [("dedup-verdict", b"conflict")] if second == 2 else [])
    cluster.commit("x-in")
    assert wrong(verified(cluster, topology)) == {}
    cluster.low["x-in", 0] = 1
    assert wrong(verified(cluster, topology)) == {}


def test_an_old_duplicate_left_first_says_little_of_the_stream_time_before_it() -> None:
    topology = topology_of()
    rows = [("x", 110), ("w", 126), ("z", 130), ("x", 101), ("w", 131.5), ("e", 132)]
    cluster = run_of(topology, rows, "UUUDDU")
    assert wrong(verified(cluster, topology)) == {}
    cluster.low["x-in", 0] = 3
    assert wrong(verified(cluster, topology)) == {}


@pytest.mark.parametrize("name", ["i90", "i89"], ids=["unique", "a duplicate"])
def test_a_wrong_late_is_told_once_the_doubt_is_over(name: str) -> None:
    topology = topology_of()
    rows = [(f"i{number}", 10.0 * number) for number in range(100)]
    rows[90] = (name, 891)
    cluster = run_of(topology, rows, "U" * 90 + "L" + "U" * 9)
    cluster.low["x-in", 0] = 1
    assert wrong(verified(cluster, topology)) == {"wrong_late": 1}


SIX = [("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("d", 5)]


@pytest.mark.parametrize("deleted", [1, 2])
def test_an_output_without_its_beginning_does_not_tell_where_latest_was(deleted: int) -> None:
    topology = topology_of(start="latest")
    cluster = run_of(topology, SIX, "UUUDDU")
    assert wrong(verified(cluster, topology)) == {}
    cluster.low["x-out", 0] = deleted
    report = verified(cluster, topology)
    assert wrong(report) == {}
    assert sum(report.not_provable.values()) > 0


def test_a_late_record_from_before_what_the_output_still_tells_is_no_phantom() -> None:
    topology = topology_of(start="latest")
    cluster = run_of(topology, [("a", 100), ("z", 0), ("b", 101), ("c", 102)], "ULUU")
    cluster.low["x-out", 0] = 1
    report = verified(cluster, topology)
    assert wrong(report) == {}
    assert report.not_provable[WHY_BEFORE] == 1


def test_latest_may_begin_with_a_null_value() -> None:
    topology = topology_of(start="latest")
    report = verified(run_of(topology, [("", 0), ("b", 1), ("c", 2)], "TUU"), topology)
    assert (wrong(report), report.read) == ({}, 3)


def equal_records(topology: Topology) -> MemoryCluster:
    """Three IDs again and again, each time unique, in an output that keeps the broker's time: so all are equal."""
    cluster = run_of(topology, [("abc"[number % 3], 20.0 * number) for number in range(30)], "U" * 30)
    cluster.broker_time.add("x-out")
    return cluster


@pytest.mark.parametrize("topic", ["x-in", "x-out"])
def test_equal_records_that_are_left_are_the_last_ones(topic: str) -> None:
    topology = topology_of()
    cluster = equal_records(topology)
    assert wrong(verified(cluster, topology)) == {}
    cluster.low[topic, 0] = 9
    assert wrong(verified(cluster, topology)) == {}


@pytest.mark.parametrize("topic", ["x-out", "x-dup"])
def test_what_is_behind_an_open_transaction_is_not_provable(topic: str) -> None:
    topology = topology_of(duplicates="x-dup")
    cluster = run_of(topology, [("a", 0), ("b", 1), ("a", 2), ("b", 3), ("c", 4)], "UUDDU")
    cluster.open_from[topic, 0] = 1
    report = verified(cluster, topology)
    assert wrong(report) == {}
    assert report.not_provable[WHY_OPEN] == {"x-out": 2, "x-dup": 1}[topic]


def test_an_id_that_is_met_all_the_time_keeps_few_sightings(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    in_range = ReferenceModel._in_range
    monkeypatch.setattr(
        ReferenceModel,
        "_in_range",
        lambda model, known, time_ms: looked_at.append(len(known)) or in_range(model, known, time_ms),
    )
    topology = topology_of(window=Window(guard_ms=500, grace_ms=500))
    cluster = run_of(topology, [("a", float(second)) for second in range(600)], "U" * 600)
    assert wrong(verified(cluster, topology)) == {}
    assert max(looked_at) <= 64


def test_an_output_that_does_not_exist_holds_nothing() -> None:
    topology = topology_of()
    cluster = run_of(topology, [("a", 0), ("b", 1)], "UU")
    del cluster.topics["x-out"]
    cluster.logs["x-out", 0].clear()
    assert wrong(verified(cluster, topology)) == {"lost": 2, "unbalanced": 1}


@pytest.mark.parametrize("compact", [True, False])
def test_without_offsets_nothing_is_proved(compact: bool) -> None:
    topology = topology_of() if compact else topology_of(output=None)
    cluster = run_of(topology, [("a", 0), ("b", 1)], "--")
    cluster.compact = {"x-in"} if compact else set()
    cluster.offsets.clear()
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({}, {WHY_NO_OFFSET: 2})


def test_by_arrival_only_source_records_with_the_brokers_time_can_be_verified() -> None:
    topology = topology_of(event_time=ArrivalTime())
    cluster = run_of(topology, [("a", 0), ("b", 1), ("a", 2)], "UUD")
    with pytest.raises(StateIncompatible, match="x-in/0 offset 0 has the time that its producer wrote"):
        verified(cluster, topology)
    cluster.broker_time.add("x-in")
    assert wrong(verified(cluster, topology)) == {}


def test_a_record_without_an_id_that_the_broker_refused_is_not_lost() -> None:
    topology = topology_of()
    cluster = cluster_of(topology)
    cluster.put("x-in", None, at(0))  # a tombstone, which is forwarded
    dead_letter(cluster, None, 0, 0, "refused_by_broker", 1)
    cluster.commit("x-in")
    report = verified(cluster, topology)
    assert (wrong(report), report.not_provable) == ({}, {WHY_REFUSED: 1})


def busy_run(topology: Topology) -> MemoryCluster:
    """Return a run with several records in every topic."""
    rows = [
        ("a", 100),
        ("l", 0),
        ("x", 0),
        ("b", 101),
        ("a", 102),
        ("l", 1),
        ("x", 0),
        ("b", 103),
        ("c", 200),
        ("c", 201),
    ]
    cluster = run_of(topology, [*rows, ("l", 2), ("x", 0), ("d", 202), ("e", 300)], "ULXUDLXDUDLXUU")
    for offset in (2, 6, 11):
        cluster.logs["x-in", 0][offset] = (offset, None, b"no json", [], at(0))
        dead_letter(cluster, b"no json", offset, 0, "not_json", 400)
    return cluster


@pytest.mark.parametrize("start", ["earliest", "latest", at(100)])
@pytest.mark.parametrize("reached", [0, 2])
@pytest.mark.parametrize("topic", ["x-in", "x-out", "x-late", "x-dead", "x-dup"])
@pytest.mark.parametrize("lost", [None, ("x-out", 4), ("x-dead", 2), ("x-late", 2)])
def test_what_is_deleted_before_it_is_read_counts_as_deleted_before_the_verification(
    topic: str, reached: int, start: str | int, lost: tuple[str, int] | None
) -> None:
    """Was: the verification ended with exit code 5, and the next one again."""
    topology = topology_of(duplicates="x-dup", start=start)
    before, meanwhile = busy_run(topology), busy_run(topology)
    if lost is not None:
        for cluster in (before, meanwhile):
            del cluster.logs[lost[0], 0][lost[1]]
    if reached >= len(before.logs[topic, 0]):
        return
    left = 7 if topic == "x-in" else reached + 1
    before.low[topic, 0] = left
    meanwhile.deletes[topic, 0] = (reached, left)
    expected, report = verified(before, topology), verified(meanwhile, topology)
    assert not meanwhile.deletes
    assert report.not_provable.pop(f"{WHY_MEANWHILE} {topic}") == left
    assert wrong(report) == wrong(expected), report.samples
    assert report.samples == expected.samples
    if reached and topic in {"x-late", "x-dead"}:  # What was read of a side topic before stays valid.
        assert sum(report.not_provable.values()) <= sum(expected.not_provable.values())
    else:
        assert (report.not_provable, report.books) == (expected.not_provable, expected.books)
    if lost is None:
        assert wrong(report) == {}


def test_a_compacted_source_may_lose_its_beginning_meanwhile() -> None:
    topology = topology_of()
    cluster = busy_run(topology)
    cluster.compact.add("x-in")
    cluster.deletes["x-in", 0] = (3, 7)
    report = verified(cluster, topology)
    assert wrong(report) == {}
    assert report.not_provable[f"{WHY_MEANWHILE} x-in"] == 7


def test_a_start_time_does_not_move_with_the_beginning_of_the_source() -> None:
    topology = topology_of(start=at(0))
    cluster = run_of(topology, [(f"i{number}", 10.0 * number) for number in range(9)], "U" * 9)
    cluster.broker_time.add("x-out")
    found = cluster.offset_for_time

    def after_retention(topic: str, partition: int, time_ms: int) -> int | None:
        cluster.low["x-in", 0] = 3
        return found(topic, partition, time_ms)

    with patch.object(cluster, "offset_for_time", after_retention):
        report = verified(cluster, topology)
    assert (wrong(report), report.not_provable[f"{WHY_MEANWHILE} x-in"]) == ({}, 3), report.samples
