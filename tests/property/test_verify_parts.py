"""Whatever part of a correct history is gone, the verifier reports nothing of it as wrong."""

from __future__ import annotations

import io
import json
from random import Random

import fastavro
import pytest

from dedup.core.event_time import FieldTime, RecordTime
from dedup.core.framing import SchemaBook
from dedup.core.reference_model import ModelRecord, ModelRules, ReferenceModel, model
from dedup.core.tracking_id import parse_path
from dedup.core.window import Source, Window
from dedup.topology.model import Late, LateDrop, LateForward, LateTo, SourceSpec, Topology
from dedup.verify.replay import WHY_FRONT, WHY_SCHEMA_GONE
from tests.unit.memory_cluster import MemoryCluster, at, cluster_of, run_of, topology_of, verified, wrong


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
