"""An input in any order is brought into the order of its logs, in bounded memory; small inputs are read by few tasks."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dedup.errors import StateIncompatible
from dedup.spark import log_order
from dedup.spark.backfill import backfill
from dedup.spark.batch_verdicts import _map_tasks
from dedup.spark.files import read_files
from dedup.spark.log_order import PartitionBounds, in_log_order, ranges_of, spread
from tests.spark.test_batch_files import BASE_MS, NOW_MS, topology

TOPICS = ("a", "b")


def rows_of(places: np.ndarray) -> pa.RecordBatch:
    columns = {
        "value": pa.array([b"%d/%d/%d" % tuple(place) for place in places.tolist()], pa.binary()),
        "topic": pa.array(TOPICS).take(pa.array(places[:, 0])),
        "partition": pa.array(places[:, 1], pa.int32()),
        "offset": pa.array(places[:, 2], pa.int64()),
    }
    return pa.RecordBatch.from_pydict(columns)


def places_of(batches) -> list[tuple[int, int, int]]:
    table = pa.Table.from_batches(batches).to_pydict()
    found = list(zip(map(TOPICS.index, table["topic"]), table["partition"], table["offset"], strict=True))
    assert [b"%d/%d/%d" % place for place in found] == table["value"]
    return found


@pytest.mark.parametrize("part_bytes", [1 << 28, 2_000])
def test_each_task_gets_a_range_and_yields_it_in_order(monkeypatch, part_bytes):
    monkeypatch.setattr(log_order, "_PART_BYTES", part_bytes)
    sizes = {(0, 0): 700, (0, 3): 1, (1, 0): 2_000, (1, 1): 300}
    # Offsets have gaps, and do not begin at 0.
    logs = [(topic, at, 5 + 3 * number) for (topic, at), size in sizes.items() for number in range(size)]
    places = np.random.default_rng(5).permutation(np.array(logs))
    bounds = [PartitionBounds(TOPICS[topic], at, 5, 2 + 3 * size, size) for (topic, at), size in sizes.items()]
    targets = (10, 20, 30)
    send = partial(spread, ranges_of(bounds, TOPICS, len(targets)), TOPICS, targets, 10_000)
    sent = [batch for half in np.array_split(places, 2) for batch in send([rows_of(half)])]
    whole = []
    for target in targets:
        mine = [each.filter(pa.compute.equal(each.column(0), target)) for each in sent]
        parts = list(in_log_order(TOPICS, mine))
        assert (len(parts) > 1) == (part_bytes < 1 << 20)
        found = places_of(parts)
        assert abs(len(found) - len(logs) / len(targets)) <= len(sizes)
        whole += found
    # The ranges are in the order of their tasks, so all of them together are in the order of the logs.
    assert whole == sorted(logs)


def test_a_row_of_another_topic_is_refused_and_no_rows_are_none():
    ranges = ranges_of([PartitionBounds("c", 0, 0, 9, 10)], TOPICS, 2)
    strange = rows_of(np.array([[0, 0, 1]])).set_column(1, "topic", pa.array(["c"]))
    with pytest.raises(StateIncompatible, match="records of topic c"):
        list(spread(ranges, TOPICS, (0, 1), 10_000, [strange]))
    assert list(in_log_order(TOPICS, [])) == []


@pytest.mark.parametrize("shape", ["parquet", "hive"])
def test_shuffled_files_give_the_verdicts_of_their_log(spark, tmp_path, shape):
    """Late depends on the order within a partition, which no file and no task has."""
    dice = np.random.default_rng(6)
    count = 3_000
    partitions, offsets = np.arange(count) % 3, np.arange(count) // 3
    seconds = offsets // 20 - np.where(dice.random(count) < 0.1, 8, 0)
    columns = {
        "value": pa.array([b'{"id":%d}' % each for each in dice.integers(0, 900, count)], pa.binary()),
        "timestamp_ms": pa.array(BASE_MS + 60_000 + seconds * 1000),
        "topic": pa.array(["orders"] * count),
        "partition": pa.array(partitions, pa.int32()),
        "offset": pa.array(offsets, pa.int64()),
    }
    table = pa.table(columns)
    (tmp_path / "log").mkdir()
    pq.write_table(table.take(pa.array(np.lexsort([offsets, partitions]))), tmp_path / "log" / "all.parquet")
    shuffled = table.take(pa.array(dice.permutation(count)))
    for at in range(4):
        # With a column in the paths, Spark reads the files and not Arrow.
        directory = tmp_path / "any" / (f"day={at}" if shape == "hive" else "")
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(shuffled.slice(at * count // 4, count // 4), directory / f"{at}.parquet")
    found = {}
    for name in ("log", "any"):
        history = read_files(spark, [str(tmp_path / name)], "parquet")
        assert history.contiguous == (name == "log")
        report = backfill(history, topology(), str(tmp_path / "out"), run=name, now_ms=NOW_MS, say=lambda _: None)
        rows = spark.read.parquet(report.path).drop("day").collect()
        found[name] = Counter(map(str, rows))
        assert report.verdicts["late"] > 50
    assert found["any"] == found["log"]


def test_a_task_reads_something_for_each_reader(spark, tmp_path):
    cores = spark.sparkContext.defaultParallelism
    assert _map_tasks(spark, 1 << 20, 2_000) == cores
    assert _map_tasks(spark, 1 << 30, 8) == 512
    # 2,100 readers for a terabyte: 2,000 tasks and not 8,000 splits of 128 MiB.
    assert _map_tasks(spark, 1 << 40, 2_100) == pytest.approx((1 << 40) / 2_100 / (1 << 18), rel=0.01)
