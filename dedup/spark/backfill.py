"""A backfill: history judged whole, and its verdicts published once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from dedup.errors import InvariantBroken, Problem, SettingsError
from dedup.spark.batch import judging, mode_of, order_text, refuse_other_shape
from dedup.spark.failures import told
from dedup.spark.files import History
from dedup.spark.published import OutputFormat, RunDirectory, RunReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dedup.topology.model import Topology

_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def backfill(
    history: History | DataFrame,
    topology: Topology,
    path: str,
    *,
    run: str = "backfill",
    now_ms: int | None = None,
    fmt: OutputFormat = "parquet",
    say: Callable[[str], None] = print,
) -> RunReport:
    """Every record of the history has its verdict under `path`, partitioned by it, exactly once; return the counts.

    ``history`` is what `files.read_files` or `kafka_range.read_kafka` returned, or a DataFrame of `rows.RECORDS` with
    coordinates in every row or in none. Columns are those of `batch.judged`. Published all at once, under
    ``run=<run>``; a run that is there already is not made again. ``now_ms``: the clock by which future times are judged
    (now, if None). Raises

    * StateIncompatible: another input or topology under the name of an earlier run; rows that are there twice, or are
      of other topics; retention took records while they were read,
    * RecordFailed: a record met a policy `fail`,
    * SettingsError, TopologyError: damaged files, a table of another shape, a run name that no directory can have.

    Nothing is published then.
    """
    if not _RUN.fullmatch(run):
        raise SettingsError([Problem(f"--run {run}", "is no name for a directory; take letters, digits, - and _")])
    source = history if isinstance(history, History) else _history_of(history)
    mode = mode_of(topology, "offsets" if source.placed else "event_time", source.feeds)
    identity = identity_of(topology, source, mode)
    directory = RunDirectory(source.records.sparkSession, path, run, fmt)
    with told():
        begun = directory.begin(identity, int(time.time() * 1000) if now_ms is None else now_ms)
        if isinstance(begun, RunReport):
            say(f"{topology.name}: run {run} was published before at {begun.path}; nothing was written")
            return begun
        say(f"{topology.name}: {source.place}: {order_text(mode)}")
        verdicts = judging(
            source.records,
            topology,
            now_ms=begun,
            order="offsets" if source.placed else "event_time",
            contiguous=source.contiguous,
            feeds=source.feeds,
            pieces=source.pieces,
        )

        def report(counts: Mapping[str, int]) -> RunReport:
            _refuse_unbalanced(source, counts)
            return RunReport(run, identity, begun, mode, counts, directory.path)

        return directory.publish(verdicts, report)


def identity_of(topology: Topology, source: History, mode: str) -> str:
    """Return the text that is the same where a run would give the same verdicts."""
    rules = topology.rules
    # Verdicts depend on more than state does: on the policies, too.
    return f"{topology.state_identity({})} {rules} skew={topology.max_clock_skew_ms} {mode} {source.identity}"


def _history_of(df: DataFrame) -> History:
    from pyspark.sql import functions as fn  # noqa: PLC0415 - only for frames that say nothing of themselves

    from dedup.spark.rows import RECORDS  # noqa: PLC0415 - it needs PySpark

    refuse_other_shape(df)
    names = RECORDS.fieldNames()
    # xxhash64 passes over nulls. A sum has no order, and 64 bits would overflow.
    hashed = fn.xxhash64(*names, *(fn.col(name).isNull() for name in names)).cast("decimal(20,0)")
    counts = df.agg(fn.count("offset").alias("placed"), fn.count(fn.lit(1)).alias("rows"), fn.sum(hashed).alias("sum"))
    row = counts.first()
    placed, rows, digest = (0, 0, None) if row is None else (row["placed"], row["rows"], row["sum"])
    if 0 < placed < rows:
        text = f"only {placed:,} of {rows:,} rows have topic, partition and offset; judge the others by themselves"
        raise SettingsError([Problem("the DataFrame", text)])
    identity = f"a DataFrame of {rows} rows, digest {digest or 0}"
    return History(df, placed > 0, contiguous=False, identity=identity, place=f"{rows:,} rows")


def _refuse_unbalanced(source: History, counts: Mapping[str, int]) -> None:
    """As many verdicts as records, counted by another job, where counting does not cost another reading of Kafka."""
    if source.countable:
        rows = source.records.count()
        if rows != sum(counts.values()):
            raise InvariantBroken(
                f"{source.place} has {rows:,} records, and {sum(counts.values()):,} verdicts were written. Nothing was "
                f"published. If nothing changed the input meanwhile, this is a defect: please report it."
            )
