"""Encodes record batches in the broker's format (message format v2, KIP-98), and decodes record batches into columns.

`records_of` decodes batches with header names that are not UTF-8, which brokers accept but aiokafka's decoder rejects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, repeat, takewhile
from operator import attrgetter, itemgetter, length_hint
from struct import Struct
from typing import Any, Final, NamedTuple, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt
from aiokafka.consumer.fetcher import READ_COMMITTED, PartitionRecords
from aiokafka.errors import CorruptRecordException, UnsupportedCodecError
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.default_records import (
    DefaultRecordBatchBuilder,
    _DefaultRecordBatchBuilderPy,
    _DefaultRecordBatchPy,
)
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import decode_varint_py, encode_varint

from dedup.errors import DedupError

BATCH_BYTES: Final = 500_000
"""Maximum uncompressed size of a batch, which is below the broker's default `message.max.bytes` of 1 MB."""
COMPRESSION: Final[Mapping[str, int]] = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
MAGIC: Final = 2
SEQUENCES: Final = 1 << 31
"""The number of sequence numbers per partition. After the last sequence number, a producer starts from 0 again."""
NO_EPOCH: Final = -1
"""The value that stands for an unknown leader epoch (KIP-320)."""
NO_TIMESTAMP: Final = -1
"""The timestamp of a record that has none."""
GC_THRESHOLD: Final = 100_000
"""The number of allocations between collections of the youngest generation (`gc.set_threshold`). A process that reads
many batches sets this high threshold, because batches create many objects but no reference cycles.
"""
OWN_ROW: Final = -1
"""The value that replaces the feeding offset of a record that dedup creates without an input record."""
_BITS: Final = 7
"""The number of payload bits in each byte of a varint."""
_WIDER_FROM: Final = (0, 1 << 6, 1 << 13, 1 << 20)
"""The smallest numbers that need one, two, three, and four bytes as a varint. A varint uses one bit for the sign."""
_MOST: Final = _WIDER_FROM[-1]

Header = tuple[str, bytes | None]
Line = tuple[int, int, bytes | None, bytes | None, list[Header]]
"""A record to send: its feeding offset or `OWN_ROW`, timestamp in ms, key, value, and headers."""


_LINE_COLUMNS: Final = tuple(map(itemgetter, range(5)))
B = TypeVar("B", "Columns", "FeedBatch")


class TopicPartition(NamedTuple):
    """A topic and one of its partitions."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@dataclass(frozen=True)
class Limit:
    """A topic's batch size limit and compression, taken from the topic's configs."""

    batch_bytes: int
    """The maximum size of a record batch, both as sent and as stored (`max.message.bytes`)."""
    stored: str = "producer"
    """The compression of stored batches (`compression.type`). The value `producer` means that batches are stored as
    sent.
    """

    @classmethod
    def of(cls, configs: Mapping[str, str]) -> Limit | None:
        """Return the batch limits in a topic's configs, or None if `max.message.bytes` is missing."""
        most = configs.get("max.message.bytes")
        return None if most is None else cls(int(most), configs.get("compression.type", "producer"))

    @cached_property
    def surely_fits_bytes(self) -> int:
        """The largest uncompressed batch size that fits the limit even if compression makes the batch larger."""
        return max(0, self.batch_bytes - self.batch_bytes // 128 - 128)


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """The result of `InitProducerId`. A newer epoch of the same producer ID fences older epochs (KIP-98)."""

    producer_id: int
    epoch: int
    implicit: bool = False
    """True if requests implicitly add partitions and groups to a transaction, and EndTxn starts an epoch (KIP-890)."""


@dataclass(slots=True)
class RecordBatch:
    """A batch of records for one partition, complete except for the producer ID, the epoch, and the sequence number."""

    target: TopicPartition
    builder: Any
    """The aiokafka builder that holds the records."""
    rows: list[int] = field(default_factory=list)
    """The feeding offset from which each record was created, or `OWN_ROW`."""
    first: Line | None = None
    """The line from which the first record was created. Only `fill` sets it."""

    @property
    def count(self) -> int:
        """The number of records in the batch."""
        return len(self.rows)

    def sealed(self, identity: ProducerIdentity, base_sequence: int) -> bytes:
        """Return the batch as compressed bytes to send. The `RecordBatch` must not be used after this call."""
        self.builder.set_producer_state(identity.producer_id, identity.epoch, base_sequence)
        return bytes(self.builder.build())


def seal(
    batches: Iterable[RecordBatch], identity: ProducerIdentity, sequences: dict[TopicPartition, int]
) -> dict[TopicPartition, bytes]:
    """Return the bytes to send for batches of different partitions, and advance each partition's next sequence number.

    ``sequences`` contains each partition's next sequence number. A partition to which no batch of the producer epoch
    has been sent has no entry.
    """
    sealed: dict[TopicPartition, bytes] = {}
    for batch in batches:
        sequence = sequences.get(batch.target, 0)
        sequences[batch.target] = (sequence + batch.count) % SEQUENCES
        sealed[batch.target] = batch.sealed(identity, sequence)
    return sealed


def builder_options(compression: str, most_bytes: int = BATCH_BYTES) -> dict[str, int]:
    """Return the options of aiokafka's builders for a transactional batch."""
    return {
        "magic": MAGIC,
        "compression_type": COMPRESSION[compression],
        "is_transactional": 1,
        "producer_id": -1,
        "producer_epoch": -1,
        "base_sequence": -1,
        "batch_size": min(BATCH_BYTES, most_bytes),
    }


@dataclass(frozen=True, slots=True)
class LineColumns:
    """Lines (records to send) as columns of equal length."""

    rows: Sequence[int]
    timestamps_ms: Sequence[int]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[list[Header]]

    def __iter__(self) -> Iterator[Line]:
        return zip(self.rows, self.timestamps_ms, self.keys, self.values, self.headers, strict=True)


def fill(
    target: TopicPartition,
    lines: Iterable[Line],
    *,
    compression: str,
    most_rows: int | None = None,
    most_bytes: int = BATCH_BYTES,
) -> list[RecordBatch]:
    """Pack lines (records to send) into record batches, in order. Each batch has at most ``most_rows`` records.

    If a batch has several records, its uncompressed size is at most ``most_bytes`` and at most `BATCH_BYTES`.
    `LineColumns` are packed faster than other lines.
    """
    options = builder_options(compression, most_bytes)
    if not isinstance(lines, LineColumns):
        given = list(lines)
        lines = LineColumns(*(list(map(column, given)) for column in _LINE_COLUMNS))
    batches: list[RecordBatch] = []
    at, count = 0, len(lines.rows)
    while at < count:
        most = count if most_rows is None else at + most_rows
        if lines.timestamps_ms[at] == NO_TIMESTAMP:
            # aiokafka's builder would take the next record's timestamp for the first record, too.
            untimed = takewhile(NO_TIMESTAMP.__eq__, islice(lines.timestamps_ms, at, most))
            most = at + sum(1 for _ in untimed)
        part = slice(at, most)
        times_ms, keys, values, headers = (
            lines.timestamps_ms[part],
            lines.keys[part],
            lines.values[part],
            lines.headers[part],
        )
        builder = DefaultRecordBatchBuilder(**options)
        # `all` makes the calls in C. `append` returns None if the batch has no room for a record. `append` always adds
        # the first record, regardless of its size.
        numbers = iter(range(len(keys) + 1))
        all(map(builder.append, numbers, times_ms, keys, values, headers))
        end = at + len(keys) - length_hint(numbers)
        first = lines.rows[at], times_ms[0], keys[0], values[0], headers[0]
        batches.append(RecordBatch(target, builder, list(lines.rows[at:end]), first))
        at = end
    return batches


class _Laid(_DefaultRecordBatchBuilderPy):  # type: ignore[misc]  # untyped base
    """Builds a batch from encoded records, using aiokafka's code for compression, batch header, and checksum."""

    def take(self, records: bytes, count: int, timestamp_ms: int) -> None:
        self._buffer += records
        self._num_records, self._last_offset = count, count - 1
        self._first_timestamp = self._max_timestamp = timestamp_ms


def equal_records(
    target: TopicPartition,
    prefix: bytes,
    keys: Collection[bytes],
    values: Collection[bytes],
    *,
    timestamp_ms: int,
    compression: str,
    most_bytes: int = BATCH_BYTES,
) -> RecordBatch | None:
    """Return a batch of records with the given keys, each preceded by ``prefix``, and the given values.

    This function builds the same records as `fill`, but faster, because each record is a row of a byte table in which
    only a few columns differ. The result is None unless all keys have the same length, all values have the same length,
    and one batch can hold all records.
    """
    key_sizes, value_sizes = set(map(len, keys)), set(map(len, values))
    if len(key_sizes) != 1 or len(value_sizes) != 1:
        return None
    builder = _Laid(**builder_options(compression))
    records = _laid_out(prefix, keys, values, key_sizes.pop(), value_sizes.pop())
    if len(keys) > _MOST or builder.size() + len(records) > min(BATCH_BYTES, most_bytes):
        return None
    builder.take(records, len(keys), timestamp_ms)
    return RecordBatch(target, builder, [OWN_ROW] * len(keys))


def _laid_out(
    prefix: bytes, keys: Collection[bytes], values: Collection[bytes], key_bytes: int, value_bytes: int
) -> bytes:
    count = len(keys)
    key_table = np.frombuffer(b"".join(keys), np.uint8).reshape(count, key_bytes)
    value_table = np.frombuffer(b"".join(values), np.uint8).reshape(count, value_bytes)
    before = b"\0\0"  # attributes and timestamp delta
    behind = _varint(len(prefix) + key_bytes) + prefix
    between = _varint(value_bytes)
    blocks: list[bytes] = []
    # The index of a record in the batch takes one, two, or three bytes, depending on its value.
    for width, (begin, wider_from) in enumerate(pairwise(_WIDER_FROM), start=1):
        end = min(wider_from, count)
        if begin >= end:
            break
        row = before + bytes(width) + behind + bytes(key_bytes) + between + bytes(value_bytes) + b"\0"  # no headers
        head = _varint(len(row))
        table = np.empty((end - begin, len(head) + len(row)), np.uint8)
        table[:] = np.frombuffer(head + row, np.uint8)
        place_at = len(head) + len(before)
        table[:, place_at : place_at + width] = _places(begin, end, width)
        key_at = place_at + width + len(behind)
        table[:, key_at : key_at + key_bytes] = key_table[begin:end]
        value_at = key_at + key_bytes + len(between)
        table[:, value_at : value_at + value_bytes] = value_table[begin:end]
        blocks.append(table.tobytes())
    return b"".join(blocks)


def _places(begin: int, end: int, width: int) -> npt.NDArray[np.uint8]:
    """Return the numbers from ``begin`` up to but not including ``end``, as varints of ``width`` bytes."""
    zigzag = np.arange(begin, end, dtype=np.int64)[:, None] << 1
    shifts = np.arange(width, dtype=np.int64) * _BITS
    digits = zigzag >> shifts & (1 << _BITS) - 1
    digits[:, :-1] |= 1 << _BITS
    return digits.astype(np.uint8)


def _varint(number: int) -> bytes:
    found = bytearray()
    encode_varint(number, found.append)
    return bytes(found)


def oversize(batch: RecordBatch, limit: Limit, compression: str) -> int | None:
    """Return the size of a one-record batch if the topic would reject the batch as too large, or None otherwise.

    Like the broker, `oversize` measures the batch as sent and, if the topic recompresses batches, also as stored. The
    result is None for a batch of several records, because `fill` keeps such batches within the limit.
    """
    first = batch.first
    if first is None or batch.count > 1 or batch.builder.size() <= limit.surely_fits_bytes:
        return None
    sizes = [_built_bytes(first, compression)]
    stored = "none" if limit.stored == "uncompressed" else limit.stored
    if stored in COMPRESSION and stored != compression:
        sizes.append(_built_bytes(first, stored))
    return max(sizes) if max(sizes) > limit.batch_bytes else None


def _built_bytes(line: Line, compression: str) -> int:
    builder = DefaultRecordBatchBuilder(**builder_options(compression))
    builder.append(0, *line[1:])
    return len(builder.build())


_BATCH_START: Final = Struct(">qi")
"""The first two fields of a batch: the base offset, and the number of bytes that follow."""
_BATCH_HEAD: Final = Struct(">8xiib")
"""The length, leader epoch, and format version of a batch, which follow its base offset."""
_CRC: Final = Struct(">I")
_CRC_AT: Final = 17
"""The position in a batch of the CRC-32C of all bytes that follow it."""
_QUICK_CRC: Final = google_crc32c.implementation == "c"
"""True if google-crc32c computes a CRC in C, which takes a tenth of the time that aiokafka needs. On a machine without
a wheel of google-crc32c, its Python code is much slower than aiokafka.
"""
NO_HEADERS: Final[list[Header]] = []
"""The headers of every record without headers; never changed."""
_OFFSET, _TIMESTAMP, _KEY, _VALUE, _HEADERS = map(attrgetter, ("offset", "timestamp", "key", "value", "headers"))


class _AnyText(bytearray):
    """A buffer that decodes any header name, even if the name is not UTF-8."""

    def __getitem__(self, at: Any) -> Any:  # noqa: ANN401  # an index or a slice
        found = super().__getitem__(at)
        return _AnyText(found) if isinstance(at, slice) else found

    def decode(self, *_: str) -> str:
        return super().decode("utf-8", "surrogateescape")


def records_of(raw: bytes, base_offset: int) -> tuple[list[Any], set[int]]:
    r"""Return the records of the batch that begins at ``base_offset``, as aiokafka's objects.

    ``raw`` contains all batches of a response. In a header name that is not UTF-8, each invalid byte becomes four
    characters such as ``\xff``. Also returns the offsets of all records with header names that are not UTF-8. Raises
    CorruptRecordException if the batch is absent or incomplete.
    """
    at = 0
    while at + _BATCH_START.size <= len(raw):
        found, length = _BATCH_START.unpack_from(raw, at)
        end = at + _BATCH_START.size + length
        if found == base_offset:
            batch: Any = _DefaultRecordBatchPy(raw[at:end])
            iter(batch)  # decompresses
            batch._buffer = _AnyText(batch._buffer)  # noqa: SLF001  # aiokafka's own buffer rejects these names
            try:
                # The compiled `decode_varint` does not check for the end of the buffer.
                records = [batch._read_msg(decode_varint_py) for _ in range(batch._num_records)]  # noqa: SLF001
            except IndexError:
                batch._pos = -1  # noqa: SLF001
            if batch._pos != len(batch._buffer):  # noqa: SLF001
                raise CorruptRecordException("a batch ends inside a record")
            sent = [replace(record, headers=list(map(_as_text, record.headers))) for record in records]
            return sent, {new.offset for new, old in zip(sent, records, strict=True) if new.headers != old.headers}
        at = end
    raise CorruptRecordException(f"no batch begins at offset {base_offset}")


def _as_text(header: Header) -> Header:
    return header[0].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"), header[1]


@dataclass(slots=True)
class Columns:
    """Committed records of one partition in log order, as columns."""

    offsets: list[int] = field(default_factory=list)
    timestamps_ms: list[int] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    headers: list[list[Header]] = field(default_factory=list)
    odd_names: frozenset[int] = frozenset()
    """Offsets of records with a header name that is not UTF-8."""
    created: list[tuple[int, int]] = field(default_factory=list)
    """The first and the last offset of each batch whose timestamps the producer wrote (CreateTime)."""

    def cut(self, begin: int, end: int) -> Columns:
        """Return the rows from ``begin`` up to but not including ``end``."""
        return self if begin == 0 and end >= len(self.offsets) else _rows_of(self, slice(begin, end))


@dataclass(frozen=True, slots=True)
class FeedBatch:
    """A batch that a Faust agent processes: records of one partition in log order, as columns of equal length."""

    feeding: TopicPartition
    offsets: list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: Sequence[list[Header]]
    follows: int
    """The offset at which the previous batch ended. A gap between two batches means that a batch was lost."""
    odd_names: frozenset[int] = frozenset()
    """Offsets of records that become dead letters because they have a header name that is not UTF-8."""
    created: Sequence[tuple[int, int]] = ()
    """The first and the last offset of each fetched batch whose timestamps the producer wrote (CreateTime)."""
    leader_epoch: int = -1
    """Leader epoch of the last record (KIP-320), or -1 if it is unknown."""
    life: int = 0
    """The number of the reading that fetched the batch. A later reading may start at an earlier offset."""
    readable_after_ms: int = 0
    """A time before which no reader could have read any of the records, or 0 if no such time is known."""
    ends_at: int = 0
    """The offset after the markers and aborted records that follow the last record, or 0 if it is unknown."""

    next_offset: int = field(init=False)
    """The offset to commit, which is after the last record and any markers and aborted records that follow it."""

    def __post_init__(self) -> None:
        after = self.offsets[-1] + 1 if self.offsets else self.follows
        object.__setattr__(self, "next_offset", max(after, self.ends_at))

    @classmethod
    def of(
        cls,
        feeding: TopicPartition,
        columns: Columns,
        *,
        follows: int,
        leader_epoch: int = -1,
        life: int = 0,
        readable_after_ms: int = 0,
        ends_at: int = 0,
    ) -> FeedBatch:
        """Return a batch that consists of fetched columns, which must contain consecutive records of one partition."""
        given = {name: getattr(columns, name) for name in (*_COLUMNS, "odd_names", "created")}
        given |= {"leader_epoch": leader_epoch, "life": life, "readable_after_ms": readable_after_ms}
        return cls(feeding, follows=follows, ends_at=ends_at, **given)

    def __len__(self) -> int:
        return len(self.offsets)

    def size_bytes(self) -> int:
        """Return the total length of all keys and values, in bytes."""
        return sum(sum(map(len, filter(None, column))) for column in (self.keys, self.values))

    def first_created(self) -> int | None:
        """Return the offset of the first record whose timestamp the producer wrote (CreateTime), or None."""
        if not self.offsets:
            return None
        begin, end = self.offsets[0], self.offsets[-1]
        return next((max(first, begin) for first, last in self.created if first <= end and last >= begin), None)

    def below_offset(self, offset: int) -> FeedBatch:
        """Return a batch with only the records before an offset."""
        rows = slice(sum(1 for own in self.offsets if own < offset))
        return replace(_rows_of(self, rows), leader_epoch=NO_EPOCH, ends_at=0)

    def from_offset(self, offset: int) -> FeedBatch:
        """Return a batch with only the records at or after an offset."""
        if not self.offsets or self.offsets[0] >= offset:
            return self
        return _rows_of(self, slice(sum(1 for own in self.offsets if own < offset), None))

    def pieces(self, most: int) -> Iterator[FeedBatch]:
        """Yield the records in order, in batches of at most ``most`` records."""
        for at in range(0, len(self), most):
            yield _rows_of(self, slice(at, at + most))


_COLUMNS: Final = ("offsets", "timestamps_ms", "keys", "values", "headers")


def _rows_of(batch: B, rows: slice) -> B:
    return replace(batch, **{name: getattr(batch, name)[rows] for name in _COLUMNS})


def gather(rows: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that selects the given rows from a column. ``rows`` must not be empty."""
    if len(rows) == 1:
        (row,) = rows
        return lambda column: (column[row],)  # itemgetter would not return a sequence
    return itemgetter(*rows)


class CommittedBatches(PartitionRecords):  # type: ignore[misc]  # untyped base
    """The committed batches of a fetch response. The base class from aiokafka recognizes aborted batches."""

    def __init__(self, source: TopicPartition, raw: bytes, aborted: Sequence[tuple[int, int]], position: int) -> None:
        crcs, isolation = True, READ_COMMITTED
        super().__init__(source, MemoryRecords(raw), aborted, position, None, None, crcs, isolation)
        # The unused iterator refers to this object. This cycle would keep the response in memory until a garbage
        # collection.
        self._records_iterator = None
        self._raw: Final = raw

    def batches(self) -> Iterator[Any]:
        """Yield the committed batches. `next_fetch_offset` also advances past control and aborted batches."""
        end = 0
        while self._records.has_next():
            begin, batch = end, self._records.next_batch()
            length, _, magic = _BATCH_HEAD.unpack_from(self._raw, begin)
            end = begin + _BATCH_START.size + length
            quick = magic == MAGIC and _QUICK_CRC
            if not (_is_intact(self._raw, begin, end) if quick else batch.validate_crc()):
                offset, _ = _BATCH_START.unpack_from(self._raw, begin)
                raise CorruptRecordException(f"the batch at offset {offset} has a wrong checksum")
            if batch.producer_id is not None:
                self._consume_aborted_up_to(batch.base_offset)
                if batch.is_control_batch and self._contains_abort_marker(batch):
                    self._aborted_producers.discard(batch.producer_id)
            aborted = batch.is_transactional and batch.producer_id in self._aborted_producers
            if not batch.is_control_batch and not aborted:
                yield batch
            self.next_fetch_offset = batch.next_offset

    def _contains_abort_marker(self, next_batch: Any) -> bool:  # noqa: ANN401  # untyped base
        # The log cleaner keeps the last batch of an active producer without its records, also if that is a marker.
        marker = next(next_batch, None)
        return marker is not None and ControlRecord.parse(marker.key) == ABORT_MARKER


def _is_intact(raw: bytes, begin: int, end: int) -> bool:
    """Return whether the batch between two positions has the right CRC-32C."""
    (stated,) = _CRC.unpack_from(raw, begin + _CRC_AT)
    return bool(google_crc32c.value(raw[begin + _CRC_AT + _CRC.size : end]) == stated)


def columns_of(
    source: TopicPartition, raw: bytes, aborted: Sequence[tuple[int, int]], position: int
) -> tuple[Columns, int]:
    """Return the committed records at or after an offset, and the next offset to read.

    Raises DedupError if a batch is damaged or has an unknown compression.
    """
    try:
        return _columns_of(source, raw, aborted, position)
    except CorruptRecordException as error:
        raise DedupError(
            f"{source}: {error.args[0]}. The broker's copy of it is damaged, or it was damaged on the way. Nothing of "
            f"the batch was read. Start again; if the error remains, let a broker whose replica is intact lead the "
            f"partition. If none is intact, the batch is lost; `dedup reset --to` a time after the batch starts over."
        ) from error
    except UnsupportedCodecError as error:
        raise DedupError(
            f"{source}: a batch is compressed in a way that dedup cannot read: {error}. Nothing of the batch was read. "
            f"Start at a time after the batch with `dedup reset --to`, or copy the topic with other compression."
        ) from error


def _columns_of(
    source: TopicPartition, raw: bytes, aborted: Sequence[tuple[int, int]], position: int
) -> tuple[Columns, int]:
    found = Columns()
    batches = CommittedBatches(source, raw, aborted, position)
    for batch in batches.batches():
        try:
            records = list(batch)
        except UnicodeDecodeError:
            records, odd = records_of(raw, batch.base_offset)
            found.odd_names |= odd
        if records and records[0].offset < position:
            records = [record for record in records if record.offset >= position]
        if records and not records[0].timestamp_type:
            found.created.append((records[0].offset, records[-1].offset))
        found.offsets.extend(_offsets(records))
        if records and records[0].timestamp is None:  # message format v0, before Kafka 0.10
            found.timestamps_ms.extend(repeat(NO_TIMESTAMP, len(records)))
        else:
            found.timestamps_ms.extend(map(_TIMESTAMP, records))
        found.keys.extend(map(_KEY, records))
        found.values.extend(map(_VALUE, records))
        # Usually, no record has headers. aiokafka creates an empty list for each record, and all these lists would stay
        # in memory as long as the batch.
        headers = list(map(_HEADERS, records))
        found.headers.extend(headers if any(headers) else repeat(NO_HEADERS, len(headers)))
    return found, max(position, batches.next_fetch_offset)


def _offsets(records: Sequence[Any]) -> Iterable[int]:
    if not records:
        return ()
    first, last = records[0].offset, records[-1].offset
    return range(first, last + 1) if last - first == len(records) - 1 else map(_OFFSET, records)


def leader_epochs(raw: bytes) -> tuple[int, int]:
    """Return the leader epochs of the first and last complete batches, or -1 for formats without leader epochs."""
    first = last = NO_EPOCH
    at = 0
    while at + _BATCH_HEAD.size <= len(raw):
        length, epoch, magic = _BATCH_HEAD.unpack_from(raw, at)
        if at + _BATCH_START.size + length > len(raw):
            break
        last = epoch if magic >= MAGIC else NO_EPOCH
        if at == 0:
            first = last
        at += _BATCH_START.size + length
    return first, last
