"""Tasks that judge whole logs without a shuffle, part by part, judge as the exact model does, or are not used."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.errors import StateIncompatible
from dedup.spark import log_tasks
from dedup.spark.backfill import backfill
from dedup.spark.batch_verdicts import judging
from dedup.spark.columns import RECORDS
from dedup.spark.files import LogSplits, read_files
from dedup.spark.log_tasks import assigned, frame_of, judge_logs
from dedup.spark.map_side import MapPlan
from dedup.spark.reduce_side import ReducePlan
from tests.integration.workload import BASE_MS, Event
from tests.spark.parity import NOW_MS, POLICIES, RULES, by_model, stream
from tests.spark.test_batch_halves import TOPIC, batches, rows_of, topology_of

MANY = int(os.environ.get("DEDUP_TEST_PARITY_EVENTS", "4000"))
GROUP_ROWS = 23 if MANY < 100_000 else 20_011
"""Rows of a row group, which is also a part of a log here."""
FILE_ROWS = MANY // 4


@pytest.fixture(scope="module")
def events():
    return stream(11, MANY)


@pytest.fixture(scope="module")
def archive(events, tmp_path_factory):
    """The logs in files of small row groups, whose names are in the reverse order of the offsets."""
    directory = tmp_path_factory.mktemp("archive")
    for partition in (0, 1):
        rows = batches([event for event in events if event.partition == partition])
        for begin in range(0, rows.num_rows, FILE_ROWS):
            path = directory / f"{9 - begin // FILE_ROWS}-{partition}.parquet"
            pq.write_table(rows.slice(begin, FILE_ROWS), path, row_group_size=GROUP_ROWS)
    return directory


@pytest.fixture(scope="module")
def history(spark, archive):
    return read_files(spark, [str(archive)], "parquet")


def judged(spark, history, topology) -> pa.Table:
    """Judge both logs in this process, one task each, part by part."""
    pieces = history.pieces
    plan = MapPlan(topology, "direct", NOW_MS + topology.max_clock_skew_ms)
    reduce = ReducePlan(topology, "direct", history.records.schema.names)
    judge = partial(judge_logs, plan, reduce, pieces.columns, part_rows=GROUP_ROWS)
    tasks = assigned(pieces.logs, tasks=2, cores=2)
    return pa.Table.from_batches(judge(frame_of(spark, tasks).toArrow().to_batches()))


@pytest.mark.parametrize("name", [*RULES, *POLICIES])
def test_every_rule_and_policy_in_small_parts(spark, events, history, name):
    topology = topology_of({**RULES, **POLICIES}[name])
    expected = {place: row for place, (row, _) in by_model(events, topology).items()}
    assert {"unique", "duplicate", "late", "dead_letter"} <= {row.verdict for row in expected.values()}
    found = judged(spark, history, topology)
    assert found.num_rows == len(events)
    assert rows_of(found) == expected


def test_a_backfill_of_logs_has_no_shuffle_and_the_same_verdicts_as_one_with(spark, events, history, tmp_path):
    topology = topology_of(POLICIES["identity"])
    found = {}
    for name, each in (("logs", history), ("shuffle", replace(history, contiguous=False))):
        plan = judging(each, topology, now_ms=NOW_MS).rows._jdf.queryExecution().toString()
        assert ("Exchange" in plan) == (name == "shuffle")
        report = backfill(each, topology, str(tmp_path / name), now_ms=NOW_MS)
        assert sum(report.verdicts.values()) == len(events)
        found[name] = spark.read.parquet(report.path).toArrow()
    order = [("partition", "ascending"), ("offset", "ascending")]
    columns = sorted(found["logs"].schema.names)
    assert found["logs"].select(columns).sort_by(order) == found["shuffle"].select(columns).sort_by(order)


SMALL = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(SMALL, st.integers(0, 30), st.booleans(), st.lists(st.integers(1, 60), max_size=6))
def test_any_small_log_in_any_parts(made, grace_ms, extend, cuts):
    """IDs with one known sighting, expired, too old or just right, are judged as columns, and as the model judges."""
    topology = topology_of({"guard_period": "10ms", "grace": f"{grace_ms}ms", "extend": extend})
    events = [Event(0, b'{"id":%d}' % number, BASE_MS + time_ms, b"%d" % number, ()) for number, time_ms in made]
    log = {"topic": TOPIC, "partition": 0, "groups": [{"file": "f", "row_group": 0}]}
    plan = MapPlan(topology, "direct", NOW_MS + topology.max_clock_skew_ms)
    judge = log_tasks._LogJudge(plan, ReducePlan(topology, "direct", RECORDS.names), log)
    rows = batches(events).combine_chunks()
    borders = sorted({0, len(events), *(cut for cut in cuts if cut < len(events))})
    found = [
        batch for begin, end in pairwise(borders) for batch in judge.judged(rows.slice(begin, end - begin).to_batches())
    ]
    assert rows_of(pa.Table.from_batches(found)) == {
        place: row for place, (row, _) in by_model(events, topology).items()
    }


def test_a_row_group_in_which_the_log_begins_again_is_left_to_the_shuffle(spark, events, tmp_path):
    """A compaction may put later offsets first: the statistics are right, and the offsets do not ascend."""
    topology = topology_of({})
    mine = [event for event in events if event.partition == 0]
    rows = batches(mine)
    half = rows.num_rows // 2
    pq.write_table(pa.concat_tables([rows.slice(half), rows.slice(0, half)]), tmp_path / "a.parquet")
    history = read_files(spark, [str(tmp_path)], "parquet")
    assert history.contiguous
    assert history.pieces.logs == ()
    found = rows_of(judging(history, topology, now_ms=NOW_MS).frame().toArrow())
    assert found == {place: row for place, (row, _) in by_model(mine, topology).items()}


def test_an_empty_row_group_is_left_out(spark, events, archive, tmp_path):
    for file in archive.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    pq.write_table(batches(events).slice(0, 0), tmp_path / "empty.parquet")
    history = read_files(spark, [str(tmp_path)], "parquet")
    assert sum(log.rows for log in history.pieces.logs) == len(events)


def test_a_row_group_with_several_partitions_is_left_to_the_shuffle(spark, events, tmp_path):
    topology = topology_of({})
    pq.write_table(batches(events), tmp_path / "mixed.parquet", row_group_size=100)
    history = read_files(spark, [str(tmp_path)], "parquet")
    assert history.contiguous
    assert history.pieces.logs == ()
    expected = {place: row for place, (row, _) in by_model(events, topology).items()}
    assert rows_of(judging(history, topology, now_ms=NOW_MS).frame().toArrow()) == expected


@pytest.mark.parametrize("statistics", [False, ["topic", "partition"]])
def test_files_without_statistics_are_left_to_the_shuffle(spark, events, tmp_path, statistics):
    rows = batches([event for event in events if event.partition == 0])
    pq.write_table(rows, tmp_path / "a.parquet", write_statistics=statistics)
    assert read_files(spark, [str(tmp_path)], "parquet").pieces.logs == ()


def test_a_record_of_another_log_than_the_statistics_say_is_refused(spark, history):
    first, second = history.pieces.logs
    wrong = replace(history.pieces, logs=(replace_groups(first, [*first.groups, second.groups[0]]), second))
    with pytest.raises(
        StateIncompatible, match=r"^parity-in/1 offset 0 was found in the log of parity-in/0 after offset [1-9]\d+:"
    ):
        judged(spark, replace(history, pieces=wrong), topology_of({}))


def test_row_groups_in_another_order_than_that_of_the_log_are_refused(spark, history):
    first, second = history.pieces.logs
    wrong = replace(history.pieces, logs=(replace_groups(first, first.groups[::-1]), second))
    with pytest.raises(
        StateIncompatible,
        match=r"^parity-in/0 offset \d+ was found in the log of parity-in/0 after offset \d+: the statistics",
    ):
        judged(spark, replace(history, pieces=wrong), topology_of({}))


def replace_groups(log: LogSplits, groups: list[tuple[str, int]]) -> LogSplits:
    return log._replace(groups=groups)


def logs(*rows: int) -> list[LogSplits]:
    return [LogSplits("events", partition, [], count, []) for partition, count in enumerate(rows)]


@pytest.mark.parametrize(
    ("sizes", "cores", "tasks"),
    [
        ((), 2, 0),
        ((1_000,), 2, 1),
        # One log of all the rows would keep one of four cores busy, for longer than a shuffle needs on all four.
        ((1_000,), 4, 0),
        ((1_000, 1_000), 4, 2),
        ((5_000, 10, 10), 4, 0),
        ((10,) * 256, 2, 8),
        ((log_tasks._MOST_LOG_ROWS, 4_000_000), 2, 2),
        ((log_tasks._MOST_LOG_ROWS + 1, 4_000_000), 2, 0),
    ],
)
def test_logs_are_divided_among_tasks_unless_a_shuffle_is_better(sizes, cores, tasks):
    bins = assigned(logs(*sizes), tasks=8, cores=cores)
    half = assigned(logs(*sizes), tasks=8, cores=cores, extend=True)
    assert half == ([] if max(sizes, default=0) > log_tasks._MOST_LOG_ROWS // 2 else bins)
    assert len(bins) == tasks
    met = defaultdict(int)
    for log in (log for each in bins for log in each):
        met[log.partition] += 1
    assert dict(met) == (dict.fromkeys(range(len(sizes)), 1) if tasks else {})
    if bins:
        loads = [sum(log.rows for log in each) for each in bins]
        assert max(loads) - min(loads) <= max(sizes)
