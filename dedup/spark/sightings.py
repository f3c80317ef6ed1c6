"""Packs the sightings that a batch job saves for the next job into the rows of a table.

A *layer* is the set of sightings that one job saves. An incremental layer contains the sightings that the job created
or extended. A full layer also contains all earlier sightings that have not expired. Sightings are packed into buckets
by a hash of their ID, so that the next job shuffles only a few large values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType

from dedup.core.fold import OnConflict
from dedup.core.window import Sighting, Source
from dedup.spark.map_side import BATCH_BYTES, KNOWN, PACKED_ROWS, TARGET, LogEnds, buckets_of, packed_stream
from dedup.topology.model import Topology

SIGHTINGS: Final = pa.schema(
    [
        ("id", pa.binary()),
        ("first_ms", pa.int64()),
        ("last_ms", pa.int64()),
        ("topic", pa.int64()),
        ("partition", pa.int64()),
        ("offset", pa.int64()),
        ("fingerprint", pa.binary()),
    ]
)
"""`topic`, `partition`, and `offset` are the fields of `dedup.core.window.Source`; partition and offset are -1 for rows
without Kafka coordinates. `fingerprint` is empty unless the topology compares payloads.
"""
_LAYER_SCHEMA: Final = pa.schema(
    [
        ("bucket", pa.int32()),
        ("rows", pa.int64()),
        ("newest_ms", pa.int64()),
        (KNOWN, pa.binary()),
        ("report", pa.string()),
    ]
)
LAYER: Final = from_arrow_schema(_LAYER_SCHEMA)
"""A row contains either the packed sightings of a bucket, with their number and greatest `last_ms`, or only the report
of a task, with null in all other columns.
"""
PACKED_AT_ONCE: Final = 131_072
"""Maximum number of sightings in one packed value, which then has an uncompressed size of about 8 MB."""
_HELD: Final = 1 << 20
"""Number of sightings that `LayerWriter` collects before packing them."""


def sightings_of(table: pa.Table) -> Iterator[Sighting]:
    """Convert each row of a table with the schema `SIGHTINGS` to a `Sighting`."""
    ids_aside = (table.column(name).to_pylist() for name in SIGHTINGS.names[1:])
    for first_ms, last_ms, topic, partition, offset, fingerprint in zip(*ids_aside, strict=True):
        yield Sighting(first_ms, last_ms, Source(topic, partition, offset), fingerprint)


def current(found: Sequence[pa.RecordBatch], topology: Topology, ends: LogEnds) -> pa.Table:
    """Return the unexpired sightings (see `live`), each with its latest `last_ms`."""
    table = pa.Table.from_batches([live(batch, topology, ends) for batch in found], SIGHTINGS)
    if not topology.window.extend:
        return table
    key = [name for name in SIGHTINGS.names if name != "last_ms"]
    latest = table.group_by(key).aggregate([("last_ms", "max")])
    return latest.rename_columns([*key, "last_ms"]).select(SIGHTINGS.names)


def live(batch: pa.RecordBatch, topology: Topology, ends: LogEnds) -> pa.RecordBatch:
    """Return the sightings in ``batch`` that have not expired at the greatest event time of their log in ``ends``."""
    partitions = batch.column("partition").to_numpy()
    oldest_ms = np.zeros(batch.num_rows, np.int64)
    for (_, partition), end in ends.items():
        oldest_ms[partitions == partition] = topology.window.oldest_live_ms(end.greatest_ms)
    lives = batch.column("last_ms").to_numpy() >= oldest_ms
    return batch if lives.all() else batch.filter(pa.array(lives))


def merged(new: pa.Table, repeated: pa.Table, known: pa.Table, topology: Topology) -> pa.Table:
    """Return the new sightings, and the existing sightings that duplicates have extended.

    ``known`` contains the sightings of earlier jobs. For each duplicate, ``repeated`` has a row with the sighting that
    the duplicate repeats; this row's `last_ms` accounts only for that duplicate.
    """
    if not topology.window.extend:
        return new
    key = ["id", "first_ms", "topic", "partition", "offset"]
    if topology.on_conflict is OnConflict.FORWARD:
        # With `on_conflict: forward`, ID and fingerprint together identify an event. Otherwise, a duplicate may have a
        # different fingerprint.
        key.append("fingerprint")
    else:
        nothing = pa.nulls(repeated.num_rows, pa.binary())
        repeated = repeated.set_column(repeated.schema.names.index("fingerprint"), "fingerprint", nothing)
    before = pa.concat_tables([new, known])
    both = pa.concat_tables([before, repeated]).append_column(
        "touched", pa.array(np.repeat([1, 0, 1], [new.num_rows, known.num_rows, repeated.num_rows]))
    )
    wanted = [("last_ms", "max"), ("touched", "max")]
    if "fingerprint" not in key:
        wanted.append(("fingerprint", "max"))
    made = both.group_by(key).aggregate(wanted)
    made = made.rename_columns([name.removesuffix("_max") for name in made.schema.names])
    return made.filter(pc.equal(made.column("touched"), 1)).select(SIGHTINGS.names)


class LayerWriter:
    """Groups the sightings of one reduce task by bucket, and packs them into rows of `LAYER`."""

    def __init__(self, buckets: int) -> None:
        self._buckets: Final = buckets
        self._held: Final[list[pa.RecordBatch]] = []
        self._rows = 0

    def add(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Add sightings, and yield rows of `LAYER` once enough sightings have been collected."""
        for batch in rows:
            self._held.append(batch)
            self._rows += batch.num_rows
            if self._rows >= _HELD:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Pack and yield the sightings that `add` has not yielded yet."""
        if not self._rows:
            return
        rows = pa.concat_batches(self._held)
        self._held.clear()
        self._rows = 0
        buckets = buckets_of(rows.column("id"), self._buckets)
        order = np.argsort(buckets, kind="stable")
        rows, buckets = rows.take(pa.array(order)), buckets[order]
        met, starts = np.unique(buckets, return_index=True)
        for bucket, begin, end in zip(met.tolist(), starts.tolist(), [*starts.tolist()[1:], len(order)], strict=True):
            for start in range(begin, end, PACKED_AT_ONCE):
                part = rows.slice(start, min(PACKED_AT_ONCE, end - start))
                newest_ms = int(part.column("last_ms").to_numpy().max())
                yield _layer_row(bucket, part.num_rows, newest_ms, packed_stream(part).to_pybytes(), None)


def report_row(report: Mapping[str, Any]) -> pa.RecordBatch:
    """Return a task's report as a row of `LAYER`."""
    return _layer_row(None, None, None, None, json.dumps(report))


def _layer_row(*values: object) -> pa.RecordBatch:
    columns = [pa.array([value], field.type) for value, field in zip(values, _LAYER_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=_LAYER_SCHEMA)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that a job has saved: the layer's path, its number of sightings, and their greatest `last_ms`."""

    path: str
    buckets: int
    rows: int
    newest_ms: int
    """The greatest `last_ms` in the layer. When the sighting with this time expires, the whole layer has expired."""


def routed(frame: DataFrame, buckets: int, targets: Sequence[int], batch_rows: int) -> DataFrame:
    """Convert rows of `LAYER` to packed rows with the column `KNOWN`, and copy each row to every reduce task that might
    judge the row's IDs.

    ``batch_rows`` is the maximum number of rows in a batch that Spark passes to Python. The function adds enough empty
    rows after each packed value to keep every batch within `BATCH_BYTES`.
    """
    common = gcd(buckets, len(targets))
    wanted = [[target for at, target in enumerate(targets) if at % common == rest] for rest in range(common)]
    of_bucket = F.element_at(F.array(*(F.array(*map(F.lit, each)) for each in wanted)), F.col("bucket") % common + 1)
    placed = frame.where(F.col(KNOWN).isNotNull()).withColumn(TARGET, F.explode(of_bucket))
    empty = (F.length(KNOWN).cast("long") * F.lit(batch_rows) / F.lit(BATCH_BYTES)).cast("int")
    padded = placed.select(TARGET, KNOWN, F.explode(F.sequence(F.lit(0), empty)).alias("at"))
    columns: list[Column] = [F.lit(None).cast(BinaryType()).alias(name) for name in PACKED_ROWS.names[1:]]
    return padded.select(TARGET, *columns, F.when(F.col("at") == 0, F.col(KNOWN)).alias(KNOWN))
