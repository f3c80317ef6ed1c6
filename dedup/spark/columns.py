"""Tracking ID, event time and fingerprint as columns: the worker's own extractor, a batch of Arrow rows at a time.

It is the code of `dedup.core.extract` that runs, so the golden vectors of tests/vectors/ hold here as they do there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from dedup.core.extract import Extracted, Extractor
from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.session.wire import Header
from dedup.spark.feed_columns import binary_column, headers_column, odd_rows
from dedup.spark.rows import headers_of
from dedup.topology.extractor import extractor_of
from dedup.topology.model import Topology

IDENTIFIED: Final = (
    StructField("dedup_id", BinaryType()),
    StructField("dedup_time_ms", LongType()),
    StructField("dedup_fingerprint", BinaryType()),
    StructField("dedup_fault", StringType()),
    StructField("dedup_kind", StringType()),
    StructField("dedup_detail", StringType()),
)
"""State key (null where there is a fault), event time (ms), eight bytes of the payload's digest (null unless the
topology compares payloads), and of a fault its code, its kind (`dedup.core.extract.FaultKind`) and a sentence."""

Batches = Iterator[pa.RecordBatch]


def identified(df: DataFrame, topology: Topology) -> DataFrame:
    """Return the records (`rows.RECORDS`, more columns are kept) with the columns `IDENTIFIED` after them."""
    schema = StructType([*df.schema.fields, *IDENTIFIED])
    return df.withColumn("headers", headers_of(df)).mapInArrow(_identifying(topology), schema)


def _identifying(topology: Topology) -> Callable[[Iterable[pa.RecordBatch]], Batches]:
    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        extractor = extractor_of(topology)
        for batch in batches:
            extracted = extract_batch(extractor, batch)
            names = [*batch.schema.names, *(field.name for field in IDENTIFIED)]
            yield pa.RecordBatch.from_arrays([*batch.columns, *identified_arrays(extracted)], names)

    return run


def extract_batch(extractor: Extractor, batch: pa.RecordBatch) -> Extracted:
    """Return what the extractor finds in Arrow columns `key`, `value`, `headers`, `timestamp_ms`.

    A row without a timestamp has the time -1, which is a dead letter where the topology takes the record's time.
    """
    count = batch.num_rows
    timestamps = batch.column("timestamp_ms")
    if timestamps.null_count:
        timestamps = timestamps.fill_null(-1)
    column = batch.column("headers")
    none = column.null_count == count or len(column.flatten()) == 0
    headers: list[list[Header]] = [[]] * count if none else headers_column(column)
    extracted = extractor(
        binary_column(batch.column("key")),
        binary_column(batch.column("value")),
        headers,
        timestamps.to_numpy(zero_copy_only=False).tolist(),
    )
    return extracted if none else _without_odd_names(extracted, odd_rows(column))


def _without_odd_names(extracted: Extracted, odd: list[int]) -> Extracted:
    """Rows with a header name that is not UTF-8 are faults, as a worker has them."""
    for row in odd:
        extracted.ids[row] = None
        extracted.times_ms[row] = 0
        if extracted.fingerprints is not None:
            extracted.fingerprints[row] = b""
    faults = extracted.faults | dict.fromkeys(odd, ODD_HEADER_NAME)
    return replace(extracted, faults=faults) if odd else extracted


def identified_arrays(extracted: Extracted) -> list[pa.Array]:
    """Return the columns `IDENTIFIED` of a batch."""
    count = len(extracted.ids)
    faults = extracted.faults
    fingerprints = extracted.fingerprints
    if faults:
        found = [faults.get(row) for row in range(count)]
        codes = [None if fault is None else fault.code for fault in found]
        kinds = [None if fault is None else fault.kind.value for fault in found]
        details = [None if fault is None else fault.detail for fault in found]
    else:
        codes = kinds = details = [None] * count
    return [
        pa.array(extracted.ids, pa.binary()),
        pa.array(extracted.times_ms, pa.int64()),
        pa.nulls(count, pa.binary()) if fingerprints is None else pa.array(fingerprints, pa.binary()),
        pa.array(codes, pa.string()),
        pa.array(kinds, pa.string()),
        pa.array(details, pa.string()),
    ]
