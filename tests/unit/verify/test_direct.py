"""The verifier of a topology that reads its source directly, where not all is there, or not as it should be."""

from __future__ import annotations

import io
import json
from random import Random

import fastavro
import pytest

from dedup.core.event_time import ArrivalTime, FieldTime, RecordTime
from dedup.core.fold import OnConflict
from dedup.core.framing import SchemaBook
from dedup.core.reference_model import ModelRecord, ModelRules, ReferenceModel, model
from dedup.core.tracking_id import parse_path
from dedup.core.window import Source, Window
from dedup.errors import StateIncompatible
from dedup.topology.model import Late, LateDrop, LateForward, LateTo, SourceSpec, Topology
from dedup.verify.cut import WHY_OPEN
from dedup.verify.direct import WHY_BEFORE, WHY_COMPACTED, WHY_NO_OFFSET
from dedup.verify.replay import WHY_CLOCK, WHY_FRONT, WHY_REFUSED, WHY_SCHEMA_GONE
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


def belongs_to(topology: Topology, rows: list[tuple[str, float]]) -> str:
    """Return where each record goes, as `run_of` takes it."""
    window = topology.window
    rules = ModelRules(window.guard_ms, window.grace_ms)
    records = (ModelRecord(name.encode(), at(second)) for name, second in rows)
    late = "F" if isinstance(topology.late, LateForward) else "-" if isinstance(topology.late, LateDrop) else "L"
    return "".join({"unique": "U", "duplicate": "D", "late": late}[each.kind] for each in model(records, rules))


@pytest.mark.parametrize("late", [LateDrop(), LateForward(), LateTo("x-late")], ids=["drop", "forward", "topic"])
def test_a_source_that_has_lost_its_beginning_is_never_told_lost(late: Late) -> None:
    topology = topology_of(late=late)
    proved = 0
    for seed in range(12):
        chance = Random(seed)
        # Some records are minutes behind the others: late, if their IDs are not known.
        rows = [
            (f"i{chance.randrange(12)}", 4.0 * number - chance.choice([0, 0, 1, 8, 30, 200])) for number in range(60)
        ]
        cluster = run_of(topology, rows, belongs_to(topology, rows))
        for low in (0, 1, 2, 5, 9, 20):
            cluster.low["x-in", 0] = low
            report = verified(cluster, topology)
            assert wrong(report) == {}, (seed, low, report.samples)
            if low and report.read > report.not_provable.get(WHY_FRONT, 0):
                proved += 1
    # Where late records leave no trace, nothing tells stream time before what is left.
    assert (proved > 0) == (not isinstance(late, LateDrop))


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


ORDER = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "string"},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        ],
    }
)
OLD, NEW = b"\0\0\0\0\7", b"\0\0\0\0\x08"


def knowing(topology: Topology, *schemas: bytes) -> Topology:
    """Return the topology with a registry that knows these schemas only."""
    book = SchemaBook(lambda _: None)
    book.update(dict.fromkeys(schemas, ORDER))
    return topology.knowing(book)


def framed(schema: bytes, name: str, time_ms: int) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, json.loads(ORDER), {"id": name, "at": time_ms})
    return schema + stream.getvalue()


def avro_topology(*, direct: bool, in_value: bool, **other: object) -> Topology:
    source = SourceSpec(("x-in",), format="avro", partitioned_by_tracking_id=direct)
    event_time = FieldTime(parse_path("at"), "ms") if in_value else RecordTime()
    return topology_of(direct=direct, source=source, event_time=event_time, duplicates="x-dup", **other)


def avro_run(topology: Topology, chance: Random, old: float) -> MemoryCluster:
    """Return a correct run of 79 records from two partitions, of which about this share has the old schema."""
    cluster, feeds = cluster_of(topology), 1 if topology.direct else 2
    cluster.topics["x-in"] = feeds
    window = topology.window
    rules = ModelRules(window.guard_ms, window.grace_ms, window.extend, window.extend_at_most_ms)
    tasks = [ReferenceModel(rules, [(0, feed) for feed in range(feeds)]) for _ in range(feeds)]
    for number in range(1, 80):
        if number % 10:  # otherwise, a producer has sent the record before once more
            name, feed = f"i{chance.randrange(12)}", chance.randrange(feeds)
            time_ms = at(3.0 * number - chance.choice([0, 0, 1, 8, 30, 200]))
            value = framed(OLD if chance.random() < old else NEW, name, time_ms)
            timestamp_ms = time_ms if isinstance(topology.event_time, RecordTime) else at(number)
        offset = cluster.put("x-in", value, timestamp_ms, partition=feed)
        task = int(name[1:]) % feeds
        verdict = tasks[task].judge(ModelRecord(name.encode(), time_ms, Source(0, feed, offset)))
        place = [("dedup-source", b"x-in/%d/%d" % (feed, offset)), ("dedup-timestamp", b"%d" % timestamp_ms)]
        if not topology.direct:
            cluster.put(topology.repartition_topic, value, at(number), place, task)
        late = isinstance(topology.late, LateForward)
        if verdict.kind == "unique" or (verdict.kind == "late" and late):
            headers = [("dedup-verdict", b"late")] if verdict.kind == "late" else []
            cluster.put("x-out", value, timestamp_ms, headers)
        elif verdict.kind == "late" and isinstance(topology.late, LateTo):
            cluster.put("x-late", value, at(1000), place)
        elif verdict.of is not None:
            _, partition, first = verdict.of.source
            first_at = ("dedup-first-source", b"x-in/%d/%d" % (partition, first))
            cluster.put("x-dup", value, timestamp_ms, [("dedup-first-time", b"%d" % verdict.of.first_ms), first_at])
    cluster.commit("x-in", *(() if topology.direct else (topology.repartition_topic,)))
    return cluster


@pytest.mark.parametrize("late", [LateDrop(), LateForward(), LateTo("x-late")], ids=["drop", "forward", "topic"])
@pytest.mark.parametrize("extend", [False, True], ids=["", "extend"])
@pytest.mark.parametrize("in_value", [False, True], ids=["time of the record", "time in the value"])
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "repartitioned"])
def test_nothing_that_may_depend_on_a_deleted_schema_is_told_wrong(
    *, direct: bool, in_value: bool, extend: bool, late: Late
) -> None:
    window = Window(guard_ms=10_000, grace_ms=10_000, extend=extend, extend_at_most_ms=15_000 if extend else 0)
    topology = avro_topology(direct=direct, in_value=in_value, late=late, window=window)
    proved = 0
    for seed in range(6):
        cluster = avro_run(topology, Random(seed), 0.03 + seed % 2 * 0.12)
        whole = verified(cluster, knowing(topology, OLD, NEW))
        assert (wrong(whole), whole.not_provable, whole.schemas_gone) == ({}, {}, {})
        report = verified(cluster, knowing(topology, NEW))
        assert wrong(report) == {}, (seed, report.samples)
        old = sum(
            (row[2] or b"").startswith(OLD) for place, log in cluster.logs.items() if place[0] == "x-in" for row in log
        )
        assert report.not_provable.get(WHY_SCHEMA_GONE, 0) == old
        assert [each.records for each in report.schemas_gone.values()] == [old] * (old > 0)
        assert all(books.balanced for books in report.books)
        proved += old > 0 and sum(books.read - books.not_provable for books in report.books) > 30
    # With the record's own time, or where a record that is not late follows, the doubt ends.
    assert proved > 0 or (in_value and (isinstance(late, LateDrop) or not direct))
