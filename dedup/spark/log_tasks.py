"""Judges whole Kafka partitions without a shuffle. Each Spark task reads its logs one by one, in offset order.

In a direct topology, a worker judges each source partition separately. A Spark task can also judge each partition
separately if each row group in the history's Parquet files contains records of a single Kafka partition. The task
judges one part of a log at a time, and keeps only the unexpired sightings of earlier parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from dedup.errors import StateIncompatible
from dedup.spark.columns import Batches
from dedup.spark.files import LogSplits, read_splits
from dedup.spark.map_side import (
    NOTHING_JUDGED,
    LogEnds,
    MapPlan,
    OffsetRun,
    OffsetRuns,
    Screener,
    ends_after,
    ends_of,
    write_notice,
)
from dedup.spark.reduce_side import ReducePlan, Reducer, sightings_after
from dedup.spark.sightings import SIGHTINGS, current, live

_MOST_LOG_ROWS: Final = 1 << 22
"""Maximum number of records in a log. Their sightings take less than 500 MB if IDs are no longer than UUIDs."""
_SHUFFLE_FACTOR: Final = 2
"""A job with a shuffle needs about this many times the CPU time of a job without a shuffle."""
_PART_ROWS: Final = 65_536
_PART_BYTES: Final = 32 << 20
"""A task judges at most about `_PART_ROWS` records or `_PART_BYTES` bytes at a time."""
_SCHEMA: Final = (
    "logs array<struct<topic: string, partition: int, groups: array<struct<file: string, row_group: int>>>>"
)


def assigned(logs: Sequence[LogSplits], *, tasks: int, cores: int, extend: bool = False) -> list[list[LogSplits]]:
    """Divide the logs among at most ``tasks`` tasks, so that the tasks have similar numbers of records.

    Set ``extend`` to true if duplicates extend sightings; merging extended sightings takes twice the memory.

    Return an empty list if a job with a shuffle is better: if a log has too many records for a task's memory, or if one
    task would need more time for the largest log than a job with a shuffle on ``cores`` cores would need for all logs.
    """
    rows = [log.rows for log in logs]
    most_rows = _MOST_LOG_ROWS // (2 if extend else 1)
    if not logs or max(rows) > most_rows or max(rows) * cores > _SHUFFLE_FACTOR * sum(rows):
        return []
    bins: list[list[LogSplits]] = [[] for _ in range(min(tasks, len(logs)))]
    sizes = [0] * len(bins)
    for log in sorted(logs, key=lambda log: log.rows, reverse=True):
        at = sizes.index(min(sizes))
        bins[at].append(log)
        sizes[at] += log.rows
    return bins


def frame_of(spark: SparkSession, bins: Sequence[Sequence[LogSplits]]) -> DataFrame:
    """Return a DataFrame in which each Spark partition contains the logs of one task."""
    rows = [([(log.topic, log.partition, log.groups) for log in logs],) for logs in bins]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, len(rows)), _SCHEMA)


def judge_logs(
    plan: MapPlan,
    reduce: ReducePlan,
    columns: Sequence[str],
    batches: Iterable[pa.RecordBatch],
    *,
    part_rows: int = _PART_ROWS,
) -> Batches:
    """Read the logs listed in the rows of `frame_of`, and yield the records with the columns `reduce_side.JUDGED`
    added.

    ``columns`` lists the columns that the files have. Raises the errors that `backfill.backfill` lists.
    """
    for log in (log for batch in batches for row in batch.column("logs").to_pylist() for log in row):
        judge = _LogJudge(plan, reduce, log)
        held: list[pa.RecordBatch] = []
        for batch in read_splits(columns, log["groups"]):
            held.append(batch)
            if sum(each.num_rows for each in held) >= part_rows or sum(each.nbytes for each in held) >= _PART_BYTES:
                yield from judge.judged(held)
                held = []
        if held:
            yield from judge.judged(held)


class _Part(NamedTuple):
    """The records of one part of a log, with the interface that `reduce_side.Reducer` needs."""

    screened: Sequence[pa.RecordBatch]
    notices: list[bytes]
    sightings: pa.Table

    def rows(self, without: Collection[str] = ()) -> Batches:
        yield from (
            rows.drop_columns([name for name in rows.schema.names if name in without]) for rows in self.screened
        )

    def known_of(self, ids: pa.Array) -> Batches:
        yield from self.sightings.filter(pc.is_in(self.sightings.column("id"), value_set=ids)).to_batches()


class _LogJudge:
    """Judges one log, part by part."""

    def __init__(self, plan: MapPlan, reduce: ReducePlan, log: Mapping[str, Any]) -> None:
        self._reduce: Final = reduce
        self._log: Final = log
        self._screener: Final = Screener(plan)
        self._ends: LogEnds = {}
        self._known: pa.Table = SIGHTINGS.empty_table()

    def judged(self, records: Iterable[pa.RecordBatch]) -> Batches:
        """Judge the next records of the log, and yield them with their verdicts.

        Raises StateIncompatible if a record belongs to another log, or if the offsets do not ascend.
        """
        self._screener.runs = runs = OffsetRuns()
        screened = [self._screener.screened(batch) for batch in records]
        for run in runs.all:
            self._refuse_misplaced(run)
        reduce = replace(self._reduce, ends=self._ends)
        reducer = Reducer(reduce, _Part(screened, [write_notice(runs.all)], self._known))
        folded = reducer.folded()
        if folded is None:
            return
        yield from reducer.judged(folded)
        self._ends = ends_after(self._ends, ends_of(runs.all))
        left = sightings_after(folded, reduce.topology)
        self._known = self._kept(left)

    def _kept(self, left: pa.Table) -> pa.Table:
        """Merge the sightings of a part (``left``) with those of earlier parts, and return the unexpired sightings."""
        topology, outdated = self._reduce.topology, self._known.slice(0, 0)
        known = self._known
        if topology.window.extend:
            # Only sightings of the part's IDs may be outdated; merging all sightings would cost more with each part.
            moved = pc.is_in(known.column("id"), value_set=left.column("id").combine_chunks())
            known, outdated = known.filter(pc.invert(moved)), known.filter(moved)
        kept = [live(batch, topology, self._ends) for batch in known.to_batches()]
        latest = current([*outdated.to_batches(), *left.to_batches()], topology, self._ends)
        return pa.concat_tables([pa.Table.from_batches(kept, SIGHTINGS), latest])

    def _refuse_misplaced(self, run: OffsetRun) -> None:
        topic, partition = self._reduce.topology.source.topics[run.topic], run.partition
        end = next(iter(self._ends.values()), NOTHING_JUDGED)
        if (topic, partition) == (self._log["topic"], self._log["partition"]) and run.first_offset >= end.next_offset:
            return
        raise StateIncompatible(
            f"{topic}/{partition} offset {run.first_offset} was found in the log of {self._log['topic']}/"
            f"{self._log['partition']} after offset {end.next_offset - 1}: the statistics in a Parquet file do not "
            f"match its records. Nothing was published. Write the files again with another Parquet library, or without "
            f"statistics."
        )
