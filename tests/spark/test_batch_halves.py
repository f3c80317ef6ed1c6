"""Map side and reduce side without Spark between them: cut and mixed in every way, they judge as the model does."""

from __future__ import annotations

import json
import mmap
import random
from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dedup.core.window import Feed
from dedup.errors import StateIncompatible
from dedup.spark.columns import RECORDS, SLICE_BYTES, content_digests, divided
from dedup.spark.files import read_splits
from dedup.spark.map_side import BATCH_BYTES, TARGET, MapPlan, Mode, ReceivedRows, map_rows
from dedup.spark.reduce_side import ReducePlan, reduce_rows
from dedup.topology.model import Topology
from dedup.topology.parse import parse
from dedup.worker.record_collector import IDLE, TIMESTAMP
from tests.integration.workload import Event
from tests.spark.parity import ALL, NOW_MS, Row, by_model, document, format_of, in_format, stream, the_schema

TOPIC = "parity-in"
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
KINDS = [pa.binary(), pa.binary(), HEADERS, pa.int64(), pa.string(), pa.int32(), pa.int64()]
READERS = (5, 9)
FROZEN_DIGESTS = [
    "01d1612bca31f639437f1c4fa7d0c34f",
    "cba0d656aa3dd48137f07d6d268e42de",
    "31a18518a73e35a70cc389846c2ee48f",
    "f79aaad740b133826a1f07bc93b4cbaa",
    "e4b9b4c79673201c79158827ddfa1991",
]
"""BLAKE2b of time, lengths and bytes, computed apart: 5;1,1,1,1;kvhx is the first."""


def batches(events: list[Event], topic: str = TOPIC) -> pa.Table:
    ends: dict[int, int] = {}
    rows = []
    for event in events:
        offset = ends[event.partition] = ends.get(event.partition, -1) + 1
        headers = [{"key": name, "value": value} for name, value in event.headers]
        rows.append((event.key, event.value, headers, event.timestamp_ms, topic, event.partition, offset))
    columns = list(zip(*rows, strict=True)) or [()] * 7
    return pa.table([pa.array(c, k) for c, k in zip(columns, KINDS, strict=True)], names=RECORDS.names)


def by_halves(
    table: pa.Table, topology: Topology, cuts: list[int], *, rows: int, seed: int = 0, mode: Mode = "direct"
) -> pa.Table:
    """Map the table in the splits between cuts; shuffle the packed rows in any order; reduce them."""
    ceiling_ms = NOW_MS + topology.max_clock_skew_ms
    plan = MapPlan(topology, mode, ceiling_ms, READERS)
    borders = [0, *sorted(cuts), table.num_rows]
    packed: list[pa.RecordBatch] = []
    for task, (begin, end) in enumerate(pairwise(borders)):
        split = table.slice(begin, end - begin).combine_chunks().to_batches(max_chunksize=rows)
        with patch("dedup.spark.map_side.TaskContext") as context, patch("dedup.spark.map_side._MOST_ROWS", 3 * rows):
            context.get.return_value.partitionId.return_value = task
            packed += map_rows(plan, split)
    random.Random(seed).shuffle(packed)
    found = []
    for target in READERS:
        mine = [each.filter(pc.equal(each.column(TARGET), target)) for each in packed]
        found += list(reduce_rows(ReducePlan(topology, mode, table.schema.names), iter(mine)))
    return pa.Table.from_batches(found)


def rows_of(table: pa.Table) -> dict[tuple[int, int], Row]:
    found = {}
    for row in table.to_pylist():
        first = None if row["first_partition"] is None else (row["first_partition"], row["first_offset"])
        found[row["partition"], row["offset"]] = Row(row["verdict"], row["reason"], row["first_time_ms"], first)
    return found


def topology_of(options) -> Topology:
    return parse(json.dumps(document("parity", options, TOPIC)), name="parity", read_file=the_schema)


@pytest.mark.parametrize("name", ALL)
def test_every_rule_and_policy(name):
    topology = topology_of(ALL[name])
    events = in_format(format_of(ALL[name]), 9, stream(3, 3_000))
    expected = {place: row for place, (row, _) in by_model(events, topology).items()}
    assert {"unique", "duplicate", "late", "dead_letter"} <= {row.verdict for row in expected.values()}
    # Each partition's log by itself, as Kafka's source reads it.
    table = pa.concat_tables([batches([e for e in events if e.partition == p]) for p in (0, 1)])
    found = by_halves(table, topology, [400, 401, 1700, 2900], rows=97)
    assert rows_of(found) == expected


SMALL = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 40), st.integers(0, 1)), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    SMALL,
    st.integers(0, 20),
    st.booleans(),
    st.sampled_from(["duplicate", "forward"]),
    st.lists(st.integers(0, 40), max_size=3),
    st.integers(1, 9),
)
def test_any_small_log_cut_anywhere(made, grace_ms, extend, on_conflict, cuts, rows):
    options = {
        "guard_period": "10ms",
        "grace": f"{grace_ms}ms",
        "extend": extend,
        "on_conflict": on_conflict,
        "conflicts": "c",
    }
    topology = topology_of(options)
    events = [
        Event(partition, b'{"id":%d,"v":%d}' % (name, payload), time_ms) for partition, name, time_ms, payload in made
    ]
    expected = {place: row for place, (row, _) in by_model(events, topology).items()}
    found = by_halves(batches(events), topology, [min(c, len(events)) for c in cuts], rows=rows, seed=len(events))
    assert rows_of(found) == expected


def test_one_id_that_comes_again_and_again_is_judged_in_parts():
    topology = topology_of({"guard_period": "10ms", "grace": "0s"})
    events = [Event(0, b'{"id":1}', number * 6) for number in range(3_000)]
    expected = {place: row for place, (row, _) in by_model(events, topology).items()}
    assert rows_of(by_halves(batches(events), topology, [], rows=1_000)) == expected


@pytest.mark.parametrize(("at_a_time", "in_memory_bytes"), [(1, 2_000), (128, 2_000), (3, 30_000)])
def test_rows_beyond_what_memory_may_hold_are_read_again_from_a_file(tmp_path, monkeypatch, at_a_time, in_memory_bytes):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    topology = topology_of({})
    events = [each for each in stream(4, 2_000) if each.partition == 0]
    in_memory = by_halves(batches(events), topology, [700], rows=50)
    monkeypatch.setattr("dedup.spark.map_side._UNPACKED_REDUCERS", at_a_time)
    with patch("dedup.spark.map_side._IN_MEMORY_BYTES", in_memory_bytes), patch("mmap.mmap", wraps=mmap.mmap) as mapped:
        in_file = by_halves(batches(events), topology, [700], rows=50)
    assert mapped.call_count == 2 + len(READERS), (
        "two map tasks, whose rows wait for larger packed values, and the others"
    )
    assert list(tmp_path.iterdir()) == []
    assert in_file.equals(in_memory)


@pytest.mark.parametrize("batch_rows", [1, 10_000])
def test_a_batch_of_parcels_as_spark_makes_it_stays_small(batch_rows):
    rows = batches(
        [
            Event(0, b'{"id":%d,"pad":"%s"}' % (number, random.randbytes(450).hex().encode()), number)
            for number in range(30_000)
        ]
    )
    plan = MapPlan(topology_of({}), "direct", NOW_MS, READERS, batch_rows)
    with patch("dedup.spark.map_side.TaskContext") as context:
        context.get.return_value.partitionId.return_value = 0
        packed = [each.column("packed") for each in map_rows(plan, rows.to_batches())]
    flat = [size for each in packed for size in pc.binary_length(each).fill_null(0).to_pylist()]
    assert sum(flat) > 30_000 * 450
    handed_over = [sum(flat[begin : begin + batch_rows]) for begin in range(0, len(flat), batch_rows)]
    assert max(handed_over) < 2 * BATCH_BYTES


def test_large_values_are_read_and_packed_a_few_at_a_time(tmp_path):
    # 150 MB of values that compress to little: a batch of 8,192 such rows would be 8 GB.
    events = [Event(0, b'{"id":%d,"pad":"%s"}' % (number % 100, b"x" * 1_000_000), number) for number in range(150)]
    table, file = batches(events).combine_chunks(), tmp_path / "large.parquet"
    pq.write_table(table, file, write_batch_size=8)
    splits = [{"file": file.as_uri(), "row_group": 0}]
    topology = topology_of({"guard_period": "1s", "grace": "0s"})
    plan = MapPlan(topology, "direct", NOW_MS, (5,))
    most_bytes = SLICE_BYTES + 1_001_000
    read = list(read_splits(table.schema.names, splits))
    assert pa.Table.from_batches(read).equals(table)
    assert max(each.nbytes for each in read) < 2 * SLICE_BYTES
    (whole,) = table.to_batches()
    assert max(each.nbytes for each in divided([whole])) < most_bytes
    packed = list(map_rows(plan, [whole]))
    with ReceivedRows(packed) as received:
        sizes = [each.nbytes for each in received.rows()]
    assert max(sizes) < (64 << 20) + 2 * most_bytes
    judged = pa.Table.from_batches(reduce_rows(ReducePlan(topology, "direct", table.schema.names), iter(packed)))
    assert judged.column("verdict").to_pylist() == ["unique"] * 100 + ["duplicate"] * 50


def test_without_coordinates_equal_times_are_ordered_by_content_whatever_came_first():
    made = [
        (b"b", b'{"id":1,"v":1}', []),
        (b"a", b'{"id":1,"v":2}', [("h", None)]),
        (b"a", b'{"id":1,"v":2}', []),
        (None, b'{"id":1,"v":3}', []),
        (b"a", b'{"id":1,"v":1}', [("h", b"x")]),
    ]
    firsts = set()
    for seed in range(6):
        order = random.Random(seed).sample(range(5), 5)
        table = pa.table(
            [
                pa.array([made[at][0] for at in order], pa.binary()),
                pa.array([made[at][1] for at in order], pa.binary()),
                pa.array([[{"key": name, "value": value} for name, value in made[at][2]] for at in order], HEADERS),
                pa.array([5] * 5, pa.int64()),
                *(pa.nulls(5, kind) for kind in KINDS[4:]),
            ],
            names=RECORDS.names,
        )
        topology = topology_of({"on_conflict": "forward", "conflicts": "c"})
        found = by_halves(table, topology, [2], rows=3, seed=seed, mode="event_time").to_pylist()
        by_row = {(row["key"], row["value"], repr(row["headers"])): row for row in found}
        assert len(by_row) == len(made)
        # Identity is ID and payload: of each payload one record is the first, and always the same one.
        unique = [row for row in found if row["verdict"] == "unique"]
        assert sorted(row["value"] for row in unique) == sorted({value for _, value, _ in made})
        firsts.add(repr(sorted(map(repr, unique))))
    assert len(firsts) == 1


def test_without_coordinates_equal_records_are_ordered_by_the_columns_of_their_paths():
    """A record that was archived around midnight is in the directories of two days."""
    firsts = set()
    for seed in range(6):
        days = random.Random(seed).sample(["2026-01-31", "2026-02-01", None], 3)
        record = (b"k", b'{"id":1}', [], 5, None, None, None)
        columns = [pa.array([each] * 3, kind) for each, kind in zip(record, KINDS, strict=True)]
        table = pa.table([*columns, pa.array(days)], names=[*RECORDS.names, "day"])
        found = by_halves(table, topology_of({}), [2], rows=3, seed=seed, mode="event_time").to_pylist()
        assert sorted(row["verdict"] for row in found) == ["duplicate", "duplicate", "unique"]
        firsts |= {row["day"] for row in found if row["verdict"] == "unique"}
    assert len(firsts) == 1


def test_content_digests_are_frozen_and_no_byte_moves_between_the_parts():
    """They decide verdicts where times are equal: a change makes another rule."""
    made = [
        (b"k", b"v", [{"key": "h", "value": b"x"}], 5),
        (b"kv", b"", [{"key": "h", "value": b"x"}], 5),
        (None, b"kv", [{"key": "hx", "value": b""}], 5),
        (b"", b"kv", [{"key": "hx", "value": None}], 5),
        (None, None, [], None),
    ]
    names = ("key", "value", "headers", "timestamp_ms")
    kinds = (pa.binary(), pa.binary(), HEADERS, pa.int64())
    columns = [pa.array(column, kind) for column, kind in zip(zip(*made, strict=True), kinds, strict=True)]
    found = content_digests(pa.RecordBatch.from_arrays(columns, names))
    assert len(set(map(tuple, found.tolist()))) == len(made)
    assert [f"{high:016x}{low:016x}" for high, low in found.tolist()] == FROZEN_DIGESTS


def test_a_record_that_is_there_twice_is_refused():
    table = batches([Event(0, b'{"id":%d}' % number, number) for number in range(10)])
    twice = pa.concat_tables([table, table.slice(4, 2)])
    with pytest.raises(StateIncompatible, match=r"parity-in/0: the offsets 4 to 9 occur twice"):
        by_halves(twice, topology_of({}), [], rows=100)


def test_rows_in_no_order_are_refused_instead_of_guessed():
    table = batches([Event(0, b'{"id":%d}' % number, number) for number in range(12_000)])
    mixed = table.take(pa.array([(number * 7919) % 12_000 for number in range(12_000)]))
    with pytest.raises(StateIncompatible, match="or sort its rows by partition and offset"):
        by_halves(mixed, topology_of({}), [], rows=5_000)


def test_a_topic_that_the_topology_does_not_read_is_refused():
    def screened() -> Iterator[pa.RecordBatch]:
        plan = MapPlan(topology_of({}), "direct", NOW_MS, READERS)
        return map_rows(plan, batches([Event(0, b'{"id":1}', 1)], "elsewhere").to_batches())

    with pytest.raises(StateIncompatible, match=r"topic elsewhere; the topology reads parity-in"):
        list(screened())


def test_a_map_task_that_reads_only_idle_markers_packs_nothing():
    """It divided by the number of rows."""
    made = document("idle", {}, TOPIC)
    del made["source"]["partitioned_by"]
    topology = parse(json.dumps(made), name="idle")
    headers = [{"key": IDLE, "value": f"{TOPIC}/0".encode()}, {"key": TIMESTAMP, "value": b"1"}]
    rows = [(None, None, headers, 1, topology.repartition_topic, 0, offset) for offset in range(3)]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), KINDS, strict=True)]
    plan = MapPlan(topology, "log", NOW_MS, READERS, feeds=(Feed(0, 0), Feed(0, 1)))
    assert list(map_rows(plan, [pa.RecordBatch.from_arrays(columns, RECORDS.names)])) == []
