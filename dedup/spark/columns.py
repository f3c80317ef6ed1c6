"""Defines the columns of a Kafka record in Spark, and converts them to the data structures that workers use.

Topic, partition, and offset are null for rows that were never in Kafka or whose coordinates were not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark page uses
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from dedup.core.event_time import create_time_fault
from dedup.core.extract import Extracted, Extractor
from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.errors import InvariantBroken, Problem, StateIncompatible, TopologyError
from dedup.kafka.record_batch import Columns, FeedBatch
from dedup.kafka.wire import Header, TopicPartition
from dedup.topology.model import Topology, extractor_of

SLICE_ROWS: Final = 8_192
SLICE_BYTES: Final = 16 << 20
"""Limits of the rows and bytes that a task processes at a time. This many rows fit into the processor's caches."""
Batches = Iterator[pa.RecordBatch]
BatchFunction = Callable[[Iterable[pa.RecordBatch]], Batches]
"""The type of a function for `mapInArrow`."""

ARROW_RECORDS: Final = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        "timestamp_ms": pa.int64(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
    }
)
"""A record without headers has an empty array, and timestamps are in ms since 1970-01-01 UTC."""
RECORDS: Final = from_arrow_schema(ARROW_RECORDS)
HEADERS: Final = RECORDS["headers"].dataType
COORDINATES: Final = ("topic", "partition", "offset")

_KIND: Final = "timestampType"
"""The column of Spark's Kafka source: 1 if the broker set the timestamp (LogAppendTime), 0 otherwise (CreateTime)."""
_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "value": ("string", "binary"),
    "key": ("string", "binary"),
    "headers": ("array<struct<key:string,value:binary>>", "array<struct<key:string,value:string>>"),
    "timestamp_ms": ("bigint", "int"),
    "timestamp": ("timestamp",),
    "topic": ("string",),
    "partition": ("bigint", "int", "smallint", "tinyint"),
    "offset": ("bigint", "int"),
    _KIND: ("bigint", "int"),
}

IDENTIFIED: Final = (
    StructField("dedup_id", BinaryType()),
    StructField("dedup_time_ms", LongType()),
    StructField("dedup_fingerprint", BinaryType()),
    StructField("dedup_fault", StringType()),
    StructField("dedup_kind", StringType()),
    StructField("dedup_detail", StringType()),
)
"""The state key (null for a fault), the event time in ms, eight bytes of the payload's digest (null unless the topology
compares payloads), and the code, kind (`dedup.core.extract.FaultKind`), and explanation of a fault.
"""

NO_ARRIVAL: Final = "a record of the input"
"""The first words of the error that a job raises if a producer, not the broker, set a record's timestamp."""
_REPLACEMENT: Final = "\ufffd"
_US_PER_MS: Final = 1_000
_BATCH_ROWS: Final = 4_000
"""Maximum number of rows in a batch, as in a worker; this many rows fit into the processor's caches."""


def as_records(
    df: DataFrame, *, place: str = "the input", others: Sequence[str] = (), by_arrival: bool = False
) -> DataFrame:
    """Convert a DataFrame, such as one from Spark's Kafka source, to the schema `RECORDS`, and keep the columns
    ``others``.

    The column `value` (text or bytes) is required. The columns `key` and `headers` are optional, and so is the
    timestamp, whose column is either `timestamp_ms` (integer) or `timestamp`. The columns `topic`, `partition`, and
    `offset` must be either all present or all absent. If ``by_arrival`` is true, the column `timestampType` is also
    required, and the job fails at any row in which `timestampType` is not 1. Raises TopologyError with a list of the
    columns that are missing or have an unsupported type; ``place`` is the DataFrame's name in the error.
    """
    known = {name.lower(): name for name in _TYPES if name != _KIND or by_arrival}
    # Spark ignores case in names, so users may expect dedup to read a column whose name differs only in case.
    problems = [
        f"has the column `{name}`, which is not read, because upper and lower case differ: rename it to "
        f"`{known[name.lower()]}`, or drop it"
        for name in df.columns
        if name not in {*known.values(), *others} and known.get(name.lower(), name) not in df.columns
    ]
    problems += [text for text in (_problem(df, name) for name in known.values()) if text]
    if by_arrival and _KIND not in df.columns:
        problems.append(
            f"has no column `{_KIND}`, which shows that the times are the broker's: with `event_time: arrival`, keep "
            "that column of Spark's Kafka source (1 means LogAppendTime), or use another event_time"
        )
    given = [name for name in COORDINATES if name in df.columns]
    if given and len(given) < len(COORDINATES):
        missing = ", ".join(name for name in COORDINATES if name not in given)
        problems.append(
            f"has {', '.join(given)} but not {missing}: give all three of {', '.join(COORDINATES)}, or none"
        )
    if problems:
        raise TopologyError([Problem(place, text) for text in problems])
    columns = {field.name: _as_record(df, field) for field in RECORDS.fields}
    if by_arrival:
        fault = F.format_string(
            create_time_fault("TOPIC", f"{NO_ARRIVAL} at %s/%s offset %s"), *(columns[name] for name in COORDINATES)
        )
        columns["timestamp_ms"] = F.when(F.col(_KIND) == 1, columns["timestamp_ms"]).otherwise(
            F.raise_error(fault).cast(LongType())
        )
    return df.select(*(column.alias(name) for name, column in columns.items()), *others)


def gathered(batches: Iterable[pa.RecordBatch], most_rows: int = SLICE_ROWS, most_bytes: int = SLICE_BYTES) -> Batches:
    """Concatenate consecutive batches until they have ``most_rows`` rows or ``most_bytes`` bytes."""
    held: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for batch in batches:
        held.append(batch)
        rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
        if rows >= most_rows or size_bytes >= most_bytes:
            yield together(held)
            held, rows, size_bytes = [], 0, 0
    if held:
        yield together(held)


def together(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return one batch with the rows of all batches."""
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def divided(batches: Iterable[pa.RecordBatch]) -> Batches:
    """Divide each batch into slices of at most `SLICE_ROWS` rows and, unless a slice has only one row, at most
    `SLICE_BYTES` bytes.
    """
    for batch in batches:
        for begin in range(0, batch.num_rows, SLICE_ROWS):
            yield from _halved(batch.slice(begin, SLICE_ROWS))


def _halved(batch: pa.RecordBatch) -> Batches:
    half = batch.num_rows // 2
    if not half or batch.nbytes <= SLICE_BYTES:
        yield batch
    else:
        yield from _halved(batch.slice(0, half))
        yield from _halved(batch.slice(half))


def headers_of(df: DataFrame) -> Column:
    """Return the column `headers` with each null replaced by an empty array. If ``df`` has no such column, every row
    gets an empty array.

    Spark 4.0 needs 16 µs to pass a null array to Python, but only 1 µs to pass an empty array (bench/README.md).
    """
    none = F.array().cast(HEADERS)
    return F.coalesce(F.col("headers").cast(HEADERS), none) if "headers" in df.columns else none


def absent_from(df: DataFrame) -> frozenset[str]:
    """Return the columns of `RECORDS` that can contain an ID or an event time and that ``df`` lacks."""
    there = {*df.columns, *(("timestamp_ms",) if "timestamp" in df.columns else ())}
    return frozenset({"key", "headers", "timestamp_ms"} - there)


def _problem(df: DataFrame, name: str) -> str | None:
    if name not in df.columns:
        return "has no column `value`: rename the column that holds the events" if name == "value" else None
    found = df.schema[name].dataType.simpleString()
    if found in _TYPES[name]:
        return None
    return f"column `{name}` is {found}; write it as {' or '.join(_TYPES[name])}"


def _as_record(df: DataFrame, field: StructField) -> Column:
    if field.name == "headers":
        return headers_of(df)
    if field.name in df.columns:
        return F.col(field.name).cast(field.dataType)
    if field.name == "timestamp_ms" and "timestamp" in df.columns:
        return F.unix_millis("timestamp")
    return F.lit(None).cast(field.dataType)


def feeding_columns(rows: DataFrame) -> DataFrame:
    """Return the columns that `feed_batches` needs from Spark's Kafka source with the option `includeHeaders`."""
    return rows.select("topic", "partition", "offset", "timestamp", _KIND, "key", "value", "headers")


def feed_batches(arrow: Iterable[pa.RecordBatch]) -> Iterator[FeedBatch]:
    """Yield the records of one Kafka partition in log order; the caller must set the field `follows` of each batch.

    Raises InvariantBroken if a Spark partition contains more than one Kafka partition or its offsets are out of order.
    """
    feeding: TopicPartition | None = None
    reached = -1
    for batch in arrow:
        for begin in range(0, batch.num_rows, _BATCH_ROWS):
            found = _feed_batch(batch.slice(begin, _BATCH_ROWS))
            if feeding not in {None, found.feeding} or found.offsets[0] <= reached:
                raise InvariantBroken(
                    f"a Spark partition goes from {feeding} offset {reached} to {found.feeding} offset "
                    f"{found.offsets[0]}: one task judges one Kafka partition in log order. Do not repartition, "
                    f"coalesce or sort the stream, and leave `minPartitions` unset."
                )
            feeding, reached = found.feeding, found.offsets[-1]
            yield found


def _feed_batch(batch: pa.RecordBatch) -> FeedBatch:
    topics, partitions = batch.column("topic"), batch.column("partition")
    first = TopicPartition(topics[0].as_py(), partitions[0].as_py())
    if len(topics.unique()) != 1 or len(partitions.unique()) != 1:
        raise InvariantBroken(f"a Spark partition that begins with {first} also contains another Kafka partition.")
    times_us = batch.column("timestamp").cast(pa.int64()).to_numpy(zero_copy_only=False)
    offsets = integers_of(batch, "offset").tolist()
    headers, odd = _headers_column(batch.column("headers"))
    keys, values = binary_column(batch.column("key")), binary_column(batch.column("value"))
    times_ms = (times_us // _US_PER_MS).tolist()
    names = frozenset(offsets[row] for row in odd)
    created = [(offsets[row], offsets[row]) for row in np.flatnonzero(integers_of(batch, _KIND) != 1)[:1]]
    return FeedBatch(first, offsets, times_ms, keys, values, headers, -1, names, created)


def _is_odd(name: bytes) -> bool:
    return _REPLACEMENT in name.decode(errors="replace")


def binary_column(column: pa.Array) -> list[bytes | None]:
    """Return the entries of a column as bytes, with None for null; NumPy is five times as fast as `to_pylist`."""
    found: list[bytes | None] = column.to_numpy(zero_copy_only=False).tolist()
    return found


def _headers_column(column: Any) -> tuple[list[list[Header]], list[int]]:  # noqa: ANN401  # pyarrow's has no useful type
    """Return each record's headers (an empty list for null), and the indexes of rows that have a non-UTF-8 header
    name.
    """
    flat = column.flatten()
    if len(flat) == 0:
        return [[]] * len(column), []
    names = [each or b"" for each in binary_column(flat.field("key").cast(pa.binary()))]
    values = binary_column(flat.field("value"))
    pairs = [(name.decode(errors="backslashreplace"), value) for name, value in zip(names, values, strict=True)]
    sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(sizes).tolist()
    rows: list[list[Header]] = [pairs[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]
    # Java has replaced invalid bytes in header names with U+FFFD. As in a worker, records with such names become dead
    # letters. Because such names are rare, it is fastest to search all names at once first.
    if not _is_odd(b"\n".join(names)):
        return rows, []
    odd = np.array([_is_odd(name) for name in names])
    return rows, np.unique(np.repeat(np.arange(len(column)), sizes)[odd]).tolist()


def payload_columns(batch: pa.RecordBatch) -> Columns:
    """Return the keys, values, and headers of a batch as Kafka's columns, without offsets and timestamps."""
    keys, values = binary_column(batch.column("key")), binary_column(batch.column("value"))
    return Columns(keys=keys, values=values, headers=_headers_column(batch.column("headers"))[0])


def content_digests(records: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    """Return a 128-bit BLAKE2b digest of each record's key, value, headers, and timestamp, as two 64-bit numbers.

    Records that have no offsets and share an ID and event time are judged in the order of their digests.
    """
    columns = zip(
        binary_column(records.column("key")),
        binary_column(records.column("value")),
        _headers_column(records.column("headers"))[0],
        records.column("timestamp_ms").to_pylist(),
        strict=True,
    )
    return np.frombuffer(b"".join(_digest(*each) for each in columns), ">u8").reshape(-1, 2).astype(np.uint64)


def _digest(key: bytes | None, value: bytes | None, headers: list[Header], time_ms: int | None) -> bytes:
    parts = [key, value, *(part for name, content in headers for part in (name.encode(), content))]
    # The digest includes the lengths, because moving bytes from one part to the next must change the digest.
    lengths = ",".join("-" if part is None else str(len(part)) for part in parts)
    return blake2b(b"".join([f"{time_ms};{lengths};".encode(), *filter(None, parts)]), digest_size=16).digest()


def digested(df: DataFrame, name: str) -> DataFrame:
    """Append the content digest of each record, as 16 bytes that Spark sorts like the numbers of `content_digests`."""

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        for batch in batches:
            digests = pa.array([each.tobytes() for each in content_digests(batch).astype(">u8")], pa.binary())
            yield pa.RecordBatch.from_arrays([*batch.columns, digests], [*batch.schema.names, name])

    schema = StructType([*df.schema.fields, StructField(name, BinaryType())])
    return df.withColumn("headers", headers_of(df)).mapInArrow(run, schema)


def identified(df: DataFrame, topology: Topology) -> DataFrame:
    """Append the columns `IDENTIFIED` to ``df``, which must have the columns of `columns.RECORDS` and can have other
    columns.
    """
    schema = StructType([*df.schema.fields, *IDENTIFIED])

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        extractor = extractor_of(topology)
        for batch in batches:
            found = extract_batch(extractor, batch)
            nothing: list[None] = [None] * batch.num_rows
            faults: list[list[str | None]] = [list(nothing) for _ in range(3)]
            for row, fault in found.faults.items():
                for column, text in zip(faults, (fault.code, fault.kind.value, fault.detail), strict=True):
                    column[row] = text
            added = [found.ids, found.times_ms, nothing if found.fingerprints is None else found.fingerprints, *faults]
            columns = map(pa.array, added, to_arrow_schema(StructType([*IDENTIFIED])).types)
            names = [*batch.schema.names, *(field.name for field in IDENTIFIED)]
            yield pa.RecordBatch.from_arrays([*batch.columns, *columns], names)

    return df.withColumn("headers", headers_of(df)).mapInArrow(run, schema)


def extract_batch(extractor: Extractor, batch: pa.RecordBatch) -> Extracted:
    """Run the extractor on the Arrow columns `key`, `value`, `headers`, and `timestamp_ms`, and return its result.

    A row without a timestamp gets the timestamp -1, so it becomes a dead letter if the topology takes event time from
    the record's timestamp.
    """
    headers, odd = _headers_column(batch.column("headers"))
    keys, values = binary_column(batch.column("key")), binary_column(batch.column("value"))
    extracted = extractor(keys, values, headers, integers_of(batch, "timestamp_ms").tolist())
    for row in odd:
        extracted.ids[row] = None
        extracted.times_ms[row] = 0
        if extracted.fingerprints is not None:
            extracted.fingerprints[row] = b""
    return replace(extracted, faults=extracted.faults | dict.fromkeys(odd, ODD_HEADER_NAME)) if odd else extracted


def integers_of(rows: pa.RecordBatch | pa.Table, name: str, missing: int = -1) -> npt.NDArray[np.int64]:
    """Return a column as integers, with nulls replaced by ``missing``."""
    column = rows.column(name)
    return np.asarray(column.fill_null(missing) if column.null_count else column, np.int64)


def topics_of(rows: pa.RecordBatch | pa.Table, topics: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Return, for each row, the index of its topic in ``topics``.

    Raises StateIncompatible if a row has a topic that the topology does not read, or has no partition or offset.
    """
    column = rows.column("topic")
    found = pc.index_in(column, value_set=pa.array(topics, pa.string()))
    if found.null_count or rows.column("partition").null_count or rows.column("offset").null_count:
        others = sorted({str(each) for each in column.filter(pc.is_null(found)).to_pylist()})
        what = f"of topic {', '.join(others)}" if others else "without partition or offset"
        raise StateIncompatible(
            f"the input holds records {what}; the topology reads {', '.join(topics)}, and its records are judged in "
            f"the order of their offsets. Filter the input, or drop its columns topic, partition and offset to judge "
            f"it in the order of event times."
        )
    return np.asarray(found, np.int64)
