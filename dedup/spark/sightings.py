"""Sightings that a batch job leaves for the next one: as Arrow columns, and packed into rows of a table.

A *layer* is what one job leaves: the sightings that its records made or extended, or, if it is whole, all that still
count. They are packed by bucket of the ID's hash, so that the next job moves a few large values through its shuffle and
a reduce task gets the sightings of its IDs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType

from dedup.core.fold import OnConflict
from dedup.core.window import Sighting, Source
from dedup.spark.columns import binary_column
from dedup.spark.map_side import BATCH_BYTES, KNOWN, PACKED_ROWS, TARGET, LogEnds, packed_stream

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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
"""Source as in `dedup.core.window.Source`; -1 and -1 without coordinates. The fingerprint is empty unless compared."""
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
"""Packed sightings of a bucket with their number and greatest `last_ms`; or the report of a task, and all else null."""
PACKED_AT_ONCE: Final = 131_072
"""Maximum number of sightings in one value: some 8 MB before compression."""
_HELD: Final = 1 << 20
"""Number of sightings that wait for others of their bucket."""


def sightings_of(table: pa.Table) -> Iterator[Sighting]:
    """Yield the rows of a table as `SIGHTINGS`."""
    ids_aside = (table.column(name).to_pylist() for name in SIGHTINGS.names[1:])
    for first_ms, last_ms, topic, partition, offset, fingerprint in zip(*ids_aside, strict=True):
        yield Sighting(first_ms, last_ms, Source(topic, partition, offset), fingerprint)


def current(found: Sequence[pa.RecordBatch], topology: Topology, ends: LogEnds) -> pa.Table:
    """Return the sightings that still count where earlier jobs ended, each as it was extended last."""
    table = pa.Table.from_batches([live(batch, topology, ends) for batch in found], SIGHTINGS)
    if not topology.window.extend:
        return table
    key = [name for name in SIGHTINGS.names if name != "last_ms"]
    latest = table.group_by(key).aggregate([("last_ms", "max")])
    return latest.rename_columns([*key, "last_ms"]).select(SIGHTINGS.names)


def live(batch: pa.RecordBatch, topology: Topology, ends: LogEnds) -> pa.RecordBatch:
    """Return the rows of `SIGHTINGS` that still count where earlier jobs ended."""
    partitions = batch.column("partition").to_numpy()
    oldest_ms = np.zeros(batch.num_rows, np.int64)
    for (_, partition), end in ends.items():
        oldest_ms[partitions == partition] = topology.window.oldest_live_ms(end.greatest_ms)
    return batch.filter(pa.array(batch.column("last_ms").to_numpy() >= oldest_ms))


def merged(new: pa.Table, repeated: pa.Table, known: pa.Table, topology: Topology) -> pa.Table:
    """Return the sightings that are new or extended, given the new ones, what repeats which, and the earlier ones.

    ``repeated`` has a row per repetition: the sighting, with the time to which the repetition extends it as `last_ms`.
    """
    if not topology.window.extend:
        return new
    key = ["id", "first_ms", "topic", "partition", "offset"]
    if topology.on_conflict is OnConflict.FORWARD:
        # The identity is then ID and fingerprint; otherwise a repetition may have another fingerprint.
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
    """Packs the sightings of one reduce task into rows of `LAYER`, by bucket."""

    def __init__(self, buckets: int) -> None:
        self._buckets: Final = buckets
        self._held: Final[list[pa.RecordBatch]] = []
        self._rows = 0

    def add(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Add sightings; yield rows of `LAYER` when there are enough."""
        for batch in rows:
            self._held.append(batch)
            self._rows += batch.num_rows
            if self._rows >= _HELD:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield all remaining sightings, packed."""
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
    """Return the report of a task as a row of `LAYER`."""
    return _layer_row(None, None, None, None, json.dumps(report))


def _layer_row(*values: object) -> pa.RecordBatch:
    columns = [pa.array([value], field.type) for value, field in zip(values, _LAYER_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=_LAYER_SCHEMA)


def buckets_of(ids: pa.Array, buckets: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the bucket of each ID, by the hash that also chooses its reduce task."""
    hashed = np.fromiter(map(crc32, binary_column(ids)), np.int64, len(ids))  # type: ignore[arg-type]  # none is null
    return hashed % buckets


@dataclass(frozen=True, slots=True)
class Layer:
    """Where a job left its sightings."""

    path: str
    buckets: int
    rows: int
    newest_ms: int
    """The greatest `last_ms`: once that does not count any more, nothing in the layer does."""


def routed(frame: DataFrame, buckets: int, targets: Sequence[int], batch_rows: int) -> DataFrame:
    """Return rows of `LAYER` as packed rows with `KNOWN`, for each reduce task that may have their IDs.

    ``batch_rows`` is the number of rows that Spark passes to Python at once. Empty rows follow a value, as many as keep
    a full batch at `BATCH_BYTES`.
    """
    common = gcd(buckets, len(targets))
    wanted = [[target for at, target in enumerate(targets) if at % common == rest] for rest in range(common)]
    of_bucket = F.element_at(F.array(*(F.array(*map(F.lit, each)) for each in wanted)), F.col("bucket") % common + 1)
    placed = frame.where(F.col(KNOWN).isNotNull()).withColumn(TARGET, F.explode(of_bucket))
    empty = (F.length(KNOWN).cast("long") * F.lit(batch_rows) / F.lit(BATCH_BYTES)).cast("int")
    padded = placed.select(TARGET, KNOWN, F.explode(F.sequence(F.lit(0), empty)).alias("at"))
    columns: list[Column] = [F.lit(None).cast(BinaryType()).alias(name) for name in PACKED_ROWS.names[1:]]
    return padded.select(TARGET, *columns, F.when(F.col("at") == 0, F.col(KNOWN)).alias(KNOWN))
