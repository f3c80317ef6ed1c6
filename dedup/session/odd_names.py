"""Records with a header name that is not UTF-8: brokers take them, aiokafka's decoder gives the whole batch up.

Only then is a batch read once more, by the code below: message format v2, from Kafka's protocol guide.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.util import decode_varint

from dedup.session.record_batch import Header

_HEAD: Final = struct.Struct(">qi")
"""Base offset, and how many bytes follow these two fields."""
_TOO_SHORT: Final = "a batch ends inside a record"


class LenientRecord(NamedTuple):
    """A record whose header names may not be UTF-8."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    """A byte that is not UTF-8 stands as ``\\xff`` in a name, in four characters: such a name can be sent on."""
    odd: bool
    """One of its names is written so."""


def records_of(raw: bytes, base_offset: int) -> list[LenientRecord]:
    """Return the records of the batch that begins at an offset; ``raw`` is the whole of a partition's answer.

    Raises CorruptRecordException where the batch is not there or ends too soon.
    """
    at = 0
    while at + _HEAD.size <= len(raw):
        found, length = _HEAD.unpack_from(raw, at)
        end = at + _HEAD.size + length
        if found == base_offset:
            batch = _DefaultRecordBatchPy(raw[at:end])
            iter(batch)  # decompresses
            return _records(batch)
        at = end
    raise CorruptRecordException(f"no batch begins at offset {base_offset}")


def _records(batch: Any) -> list[LenientRecord]:  # noqa: ANN401  # aiokafka's class, sealed but for its fields
    reader = _Reader(bytes(batch._buffer), batch._pos)  # noqa: SLF001  # its own reader decodes names strictly
    by_broker = batch.timestamp_type == batch.LOG_APPEND_TIME
    records: list[LenientRecord] = []
    for _ in range(batch._num_records):  # noqa: SLF001
        reader.number()  # length
        reader.number()  # attributes: none are in use
        delta_ms, offset = reader.number(), batch.base_offset + reader.number()
        key, value = reader.content(), reader.content()
        names = [(reader.content() or b"", reader.content()) for _ in range(reader.number())]
        headers = [(name.decode("utf-8", "backslashreplace"), content) for name, content in names]
        odd = any(_odd(name) for name, _ in names)
        time_ms = batch.max_timestamp if by_broker else batch.first_timestamp + delta_ms
        records.append(LenientRecord(offset, time_ms, key, value, headers, odd))
    return records


def _odd(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return True
    return False


class _Reader:
    """Fields of records, one after the other."""

    def __init__(self, buffer: bytes, at: int) -> None:
        self._buffer = buffer
        self._at = at

    def number(self) -> int:
        # The compiled reader of numbers does not look for the end of the buffer.
        if self._at >= len(self._buffer):
            raise CorruptRecordException(_TOO_SHORT)
        found, self._at = decode_varint(self._buffer, self._at)
        return int(found)

    def content(self) -> bytes | None:
        length = self.number()
        if length < 0:
            return None
        begin, self._at = self._at, self._at + length
        if self._at > len(self._buffer):
            raise CorruptRecordException(_TOO_SHORT)
        return self._buffer[begin : self._at]


def odd_offsets(records: Sequence[LenientRecord]) -> frozenset[int]:
    """Return the offsets of the records with such a name."""
    return frozenset(record.offset for record in records if record.odd)
