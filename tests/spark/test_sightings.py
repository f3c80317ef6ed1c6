"""A log that several jobs judge, each with the sightings that the ones before it left, without Spark between them."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dedup.core.reference_model import ReferenceModel
from dedup.core.window import BEFORE_ALL_TIME, Source
from dedup.errors import StateIncompatible
from dedup.spark.columns import RECORDS, content_digests
from dedup.spark.map_side import KNOWN, TARGET, LogEnd, LogEnds, MapPlan, Mode, map_rows
from dedup.spark.reduce_side import ReducePlan, layer_rows, reduce_rows
from dedup.topology.model import Topology
from tests.integration.workload import Event
from tests.spark.parity import NOW_MS, POLICIES, RULES, Row, by_model, model_record, recipe_of, row_of, rules_of, stream
from tests.spark.test_batch_halves import batches, rows_of, topology_of

TARGETS = (5, 9, 12)


class Jobs:
    """Jobs one after the other; what they leave is passed on as Spark would."""

    def __init__(self, topology: Topology, mode: Mode, *, whole_every: int = 3) -> None:
        self.topology, self.mode, self.whole_every = topology, mode, whole_every
        self.ends: LogEnds = {}
        self.layers: list[tuple[int, pa.Table]] = []
        self.done = 0

    def judge(self, table: pa.Table, *, rows: int = 97, seed: int = 0) -> pa.Table:
        plan = MapPlan(self.topology, self.mode, NOW_MS + self.topology.max_clock_skew_ms, TARGETS)
        with patch("dedup.spark.map_side.TaskContext") as context:
            context.get.return_value.partitionId.return_value = 0
            packed = list(map_rows(plan, table.combine_chunks().to_batches(max_chunksize=rows)))
        random.Random(seed).shuffle(packed)
        reduce_plan = ReducePlan(self.topology, self.mode, RECORDS.names, self.ends)
        found = []
        left = []
        ends: dict[tuple[int, int], LogEnd] = dict(self.ends)
        counts: dict[str, int] = {}
        self.done += 1
        # From one to a multiple of the reduce tasks, so that buckets and tasks do not match.
        buckets, whole = len(TARGETS) * (1 + self.done % 3), self.done % self.whole_every == 0
        for reducer, target in enumerate(TARGETS):
            mine = [each.filter(pc.equal(each.column(TARGET), target)) for each in packed]
            mine = [each.append_column(KNOWN, pa.nulls(each.num_rows, pa.binary())) for each in mine]
            mine += self._known(reducer)
            found += list(reduce_rows(reduce_plan, iter(mine)))
            with patch("dedup.spark.reduce_side.TaskContext") as context:
                context.get.return_value.partitionId.return_value = reducer
                for each in layer_rows(reduce_plan, iter(mine), reducers=len(TARGETS), buckets=buckets, whole=whole):
                    left.append(each)
                    if each.column("report")[0].is_valid:
                        report = json.loads(each.column("report")[0].as_py())
                        for verdict, count in report["verdicts"].items():
                            counts[verdict] = counts.get(verdict, 0) + count
                        for topic, partition, *end in report["ends"]:
                            before = ends.get((topic, partition), LogEnd(0, BEFORE_ALL_TIME))
                            ends[topic, partition] = LogEnd(*map(max, before, end))
        self.layers = [*([] if whole else self.layers), (buckets, pa.Table.from_batches(left))]
        self.ends = ends
        judged = pa.Table.from_batches(found)
        assert counts == {row["values"]: row["counts"] for row in judged.column("verdict").value_counts().to_pylist()}
        return judged

    def _known(self, reducer: int) -> list[pa.RecordBatch]:
        """Every third bucket of a layer goes to every third reduce task: the numbers have that in common."""
        found = []
        for buckets, layer in self.layers:
            assert buckets % len(TARGETS) == 0
            rows = layer.filter(pc.is_valid(layer.column(KNOWN)))
            for bucket, known in zip(rows.column("bucket").to_pylist(), rows.column(KNOWN), strict=True):
                if bucket % len(TARGETS) == reducer:
                    columns = {
                        TARGET: pa.nulls(1, pa.int32()),
                        "packed": pa.nulls(1, pa.binary()),
                        "notice": pa.nulls(1, pa.binary()),
                        KNOWN: pa.array([known.as_py()], pa.binary()),
                    }
                    found.append(pa.RecordBatch.from_pydict(columns))
        return found


@pytest.mark.parametrize("name", [*RULES, *POLICIES])
def test_a_log_cut_into_jobs_is_judged_as_a_whole(name):
    topology = topology_of({**RULES, **POLICIES}[name])
    events = stream(3, 3_000)
    expected = {place: row for place, (row, _) in by_model(events, topology).items()}
    table = batches(events)
    jobs = Jobs(topology, "direct")
    parts = [jobs.judge(table.slice(a, b - a)) for a, b in pairwise([0, 400, 401, 1_500, 1_700, 2_200, 2_900, 3_000])]
    assert rows_of(pa.concat_tables(parts)) == expected


SMALL = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 40), st.integers(0, 1)), min_size=1, max_size=40
)
OPTIONS = {
    "grace_ms": st.integers(0, 20),
    "extend": st.booleans(),
    "on_conflict": st.sampled_from(["duplicate", "forward"]),
    "cuts": st.lists(st.integers(0, 40), max_size=5),
}


def small(made, grace_ms, on_conflict, *, extend) -> tuple[Topology, list[Event], list[int]]:
    options = {
        "guard_period": "10ms",
        "grace": f"{grace_ms}ms",
        "extend": extend,
        "on_conflict": on_conflict,
        "conflicts": "c",
    }
    events = [
        Event(partition, b'{"id":%d,"v":%d}' % (name, payload), time_ms) for partition, name, time_ms, payload in made
    ]
    return topology_of(options), events


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SMALL, *OPTIONS.values())
def test_any_small_log_cut_anywhere(made, grace_ms, extend, on_conflict, cuts):
    topology, events = small(made, grace_ms, on_conflict, extend=extend)
    expected = {place: row for place, (row, _) in by_model(events, topology).items()}
    table = batches(events)
    borders = [0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]
    jobs = Jobs(topology, "direct")
    parts = [jobs.judge(table.slice(a, b - a), rows=7) for a, b in pairwise(borders) if a < b]
    assert rows_of(pa.concat_tables(parts)) == expected


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SMALL, *OPTIONS.values())
def test_rows_without_coordinates_are_judged_as_the_model_fed_job_by_job(made, grace_ms, extend, on_conflict, cuts):
    topology, events = small(made, grace_ms, on_conflict, extend=extend)
    borders = [0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]
    jobs = Jobs(topology, "event_time")
    model = ReferenceModel(rules_of(topology), [(0, -1)])
    for a, b in pairwise(borders):
        if a < b:
            assert sorted(map(repr, unplaced(jobs, events[a:b]))) == sorted(
                map(repr, by_job(model, topology, events[a:b]))
            )


def unplaced(jobs: Jobs, events: list[Event]) -> list[tuple[bytes, int, Row]]:
    found = jobs.judge(without_places(events), rows=7).to_pylist()
    return [
        (r["value"], r["timestamp_ms"], Row(r["verdict"], r["reason"], r["first_time_ms"], r["first_partition"]))
        for r in found
    ]


def without_places(events: list[Event]) -> pa.Table:
    table = batches(events)
    for name in ("topic", "partition", "offset"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, pa.nulls(table.num_rows, table.schema.field(name).type))
    return table


def by_job(model: ReferenceModel, topology: Topology, events: list[Event]) -> list[tuple[bytes, int, Row]]:
    """Feed the model one job's records in the order of (event time, digest of the content)."""
    (rows,) = batches(events).combine_chunks().to_batches()
    digests = content_digests(rows).tolist()
    found = []
    for at in sorted(range(len(events)), key=lambda row: (events[row].timestamp_ms, *digests[row])):
        event = events[at]
        record, code = model_record(recipe_of(topology), event, Source(0, -1, -1), NOW_MS)
        row = row_of(model.judge(record), code)
        found.append((event.value, event.timestamp_ms, row._replace(first_source=None)))
    return found


def test_records_below_the_position_are_refused():
    table = batches([Event(0, b'{"id":%d}' % number, number) for number in range(10)])
    jobs = Jobs(topology_of({}), "direct")
    jobs.judge(table.slice(0, 5))
    with pytest.raises(StateIncompatible, match=r"parity-in/0: the input begins at offset 3, .* up to offset 4"):
        jobs.judge(table.slice(3, 3))
