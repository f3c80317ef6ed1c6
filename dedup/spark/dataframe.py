"""Provides `dedup` and `unique`, which deduplicate a DataFrame lazily: Spark runs a job only when the result is used.

Neither function uses JVM objects, so both work over Spark Connect if dedup is installed on the executors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, get_args

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses

from dedup.errors import Problem, SettingsError
from dedup.kafka.schema_registry import TASK_PATIENCE_S, asking
from dedup.settings import Settings
from dedup.spark.batch_verdicts import Order, judged
from dedup.spark.columns import COORDINATES, absent_from, as_records
from dedup.spark.row_events import as_events, is_case_sensitive, lacking, not_for_python, quoted, unfit_columns
from dedup.topology.model import LateForward, Topology, extractor_of
from dedup.topology.parse import parse
from dedup.yaml_document import beside, text_of

Shape = Literal["columns", "kafka"]
"""With ``columns``, each row is an event, and its columns are the event's members. With ``kafka``, the column `value`
contains the event, and the other columns, which are optional, have the names that Spark's Kafka source gives them.
"""

_ROW: Final = "dedup_row"
"""The column that carries the input's original columns through the shuffle."""
_ADDED: Final = {
    "dedup_verdict": "verdict",
    "dedup_reason": "reason",
    "dedup_detail": "detail",
    "dedup_id": "dedup_id",
    "dedup_time": "dedup_time_ms",
    "dedup_first_seen": "first_time_ms",
    "dedup_first_topic": "first_topic",
    "dedup_first_partition": "first_partition",
    "dedup_first_offset": "first_offset",
    "dedup_stream_time": "stream_time_ms",
}
"""Maps each added column to the column of `batch_verdicts.judged` with its values; times in ms become timestamps."""
_END_OF_TIME_MS: Final = 253_402_214_400_000
"""9999-12-31 00:00 UTC. In every time zone, each earlier time is in the year 9999 or before."""


def dedup(
    df: DataFrame,
    topology: Topology | str | Path,
    *,
    shape: Shape = "columns",
    order: Order | None = None,
    now_ms: int | None = None,
    settings: Settings | None = None,
) -> DataFrame:
    """Return the rows of ``df`` with their verdicts. The columns of ``df`` keep their names, types, and values.

    ``topology`` is a topology or the path of a topology file. The added columns are `dedup_verdict` (unique, duplicate,
    conflict, late, dead_letter, or exempt), `dedup_reason`, `dedup_detail`, `dedup_id` (bytes), `dedup_time` (the event
    time), and `dedup_stream_time`. For a row that repeats a sighting, the columns `dedup_first_seen`,
    `dedup_first_topic`, `dedup_first_partition`, and `dedup_first_offset` contain the time and position of that
    sighting. The default ``order`` is "offsets" if ``shape`` is "kafka" and ``df`` has topic, partition, and offset;
    otherwise, it is "event_time". ``now_ms`` is the clock time in ms that the job uses to detect future event times
    (default: the time of the call). ``settings`` contains the address of the schema registry, and is needed only if
    values name their schemas.

    Raises SettingsError for a streaming DataFrame, an unknown ``shape`` or ``order``, a duplicate column name, or a
    column with the name of an added column, regardless of case. Also raises SettingsError if the topology or the order
    needs columns that ``df`` lacks or that have an unsuitable type, or if Spark cannot pass a column to Python. Raises
    TopologyError for an invalid topology file or, if ``shape`` is "kafka", an unsupported type of a record's column.
    When the result is computed, the job raises the errors that `backfill.backfill` lists.
    """
    rules = _rules(topology, settings)
    placed = shape == "kafka" and all(name in df.columns for name in COORDINATES)
    _refuse_unfit(df, rules, shape, order, placed=placed)
    clock_ms = int(time.time() * 1000) if now_ms is None else now_ms
    if order is None:
        order = "offsets" if placed else "event_time"
    decided = judged(_records(df, rules, shape), rules, now_ms=clock_ms, order=order)
    return decided.select(f"{_ROW}.*", *(_added(source).alias(name) for name, source in _ADDED.items()))


def unique(
    df: DataFrame,
    topology: Topology | str | Path,
    *,
    shape: Shape = "columns",
    order: Order | None = None,
    now_ms: int | None = None,
    settings: Settings | None = None,
) -> DataFrame:
    """Return the rows of ``df`` that a worker would forward to the output topic, with the columns of ``df``.

    The result contains the unique rows, the exempt rows, and, with `late: forward`, the late rows. `unique` has the
    same parameters and raises the same errors as `dedup`.
    """
    rules = _rules(topology, settings)
    forwarded = ["unique", "exempt", *(["late"] if isinstance(rules.late, LateForward) else [])]
    decided = dedup(df, rules, shape=shape, order=order, now_ms=now_ms)
    return decided.where(F.col("dedup_verdict").isin(forwarded)).drop(*_ADDED)


def _rules(topology: Topology | str | Path, settings: Settings | None) -> Topology:
    if not isinstance(topology, Topology):
        topology = parse(text_of(Path(topology)), name=str(topology), read_file=beside(Path(topology)))
    return topology if settings is None else asking(topology, settings, patience_s=TASK_PATIENCE_S)


def _refuse_unfit(df: DataFrame, topology: Topology, shape: Shape, order: Order | None, *, placed: bool) -> None:
    extractor_of(topology)  # Raises SettingsError if values name their schemas.
    problems = [
        Problem(name, f'"{given}" is unknown; write {" or ".join(get_args(kind))}')
        for name, given, kind in (("shape", shape, Shape), ("order", "offsets" if order is None else order, Order))
        if given not in get_args(kind)
    ]
    if topology.then is not None:
        problems.append(Problem("then", "no Spark job runs a flow; take `then` and `routes` out of the topology"))
    if df.isStreaming:
        text = "is a stream: each micro-batch would be deduplicated separately. Run `dedup spark run`, or read a table"
        problems.append(Problem("the DataFrame", text))
    problems += [*_unfit_names(df), *not_for_python(df.schema)]
    if order == "offsets" and not placed:
        problems.append(Problem("order", '"offsets" needs shape "kafka" with the columns topic, partition and offset'))
    if shape == "columns":
        problems += [*_without_columns(topology), *unfit_columns(df.schema, topology)]
    else:
        remedy = "which the DataFrame does not have: add the column `key`, `headers`, or `timestamp`"
        problems += lacking(topology, absent_from(df), remedy)
    if problems:
        raise SettingsError(problems)


def _unfit_names(df: DataFrame) -> Iterator[Problem]:
    """Yield a problem for each column that has the name of another column, or of a column that dedup adds.

    Upper and lower case do not matter, unless the session makes Spark distinguish them.
    """
    alike = str if is_case_sensitive(df.sparkSession) else str.lower
    counts = Counter(map(alike, df.columns))
    for name in sorted(set(df.columns)):
        if name.lower() in {_ROW, *_ADDED}:
            yield Problem(f"column {name}", "is a column that dedup adds; rename or drop it")
        if counts[alike(name)] > 1:
            yield Problem(f"column {name}", "occurs more than once; rename one of them")


def _without_columns(topology: Topology) -> Iterator[Problem]:
    """Yield a problem for each topology setting that rows of plain columns cannot satisfy."""
    lacks = 'which a row of plain columns does not have; pass shape="kafka"'
    yield from lacking(topology, {"key", "headers", "timestamp_ms"}, lacks)
    found = {
        "bytes": "an opaque value",
        "json_schema": "a schema registry's framing",
        "avro": "Avro",
        "protobuf": "Protobuf",
        "msgpack": "MessagePack",
        "cbor": "CBOR",
        "csv": "rows of CSV",
    }
    reads = found.get(topology.source.format)
    if reads is not None:
        yield Problem("source.format", f"{topology.source.format} reads {reads}, {lacks}")


def _records(df: DataFrame, topology: Topology, shape: Shape) -> DataFrame:
    """Return ``df`` as `columns.RECORDS`, with the original columns in the struct `_ROW`."""
    row = F.struct(*(F.col(quoted(name)) for name in df.columns)).alias(_ROW)
    table = df.select("*", row) if shape == "kafka" else df.select(as_events(df).alias("value"), row)
    return as_records(table, place="the DataFrame", others=(_ROW,), by_arrival=topology.by_arrival)


def _added(source: str) -> Column:
    column = F.col(source)
    if not source.endswith("_ms"):
        return column
    # 0 stands for a time that could not be read. Spark cannot convert some of the other times, and Python's datetime
    # can convert even fewer.
    shown = (column >= 0) & (column < _END_OF_TIME_MS)
    if source == "dedup_time_ms":
        shown &= (column != 0) | F.col("dedup_id").isNotNull()
    return F.timestamp_millis(F.when(shown, column))
