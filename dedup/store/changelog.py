"""The bytes of the changelog, which are also the bytes of the store: keys, sightings, task records.

A sighting value is one or more entries, each (all integers big-endian)::

    1 byte   version in the high nibble (1); flags: 1 fingerprint, 2 extended, 4 wide source
    6 bytes  first_ms
    2 bytes  topic (4 bits) and partition (12 bits); wide: 2 bytes topic and 4 bytes partition
    6 bytes  offset
    6 bytes  last_ms, only if extended: otherwise last_ms is first_ms
    8 bytes  fingerprint, only with its flag

so the usual case takes 15 bytes. Times and offsets are in [0, 2**48): an event time below zero is a dead letter and
one beyond the year 10889 is too far in the future, so both are refused here as defects of ours. A value lists *all*
sightings of its ID that end in its segment; a later record of one key replaces an earlier one.

Keys: ``S``, segment start (8 bytes), state key; and ``T`` alone for the task record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dedup.core.window import Sighting, Source
from dedup.errors import InvariantBroken, StateIncompatible, TaskCorrupted
from dedup.store.base import FeedTime, TaskRecord

Integers = Sequence[int] | npt.NDArray[np.int64]

_VERSION: Final = 0x10
_FINGERPRINT: Final = 1
_EXTENDED: Final = 2
_WIDE: Final = 4
_FLAGS: Final = _FINGERPRINT | _EXTENDED | _WIDE
_FINGERPRINT_BYTES: Final = 8
_LIMIT: Final = 1 << 48
_TOPIC_LIMIT: Final = 1 << 4
_PARTITION_LIMIT: Final = 1 << 12

# Six-byte integers: the first shares eight bytes with topic and partition, the offset is 4 + 2 bytes.
_PLAIN: Final = struct.Struct(">BQIH")
_PRINTED: Final = struct.Struct(">BQIH8s")
_PLAIN_BYTES: Final = _PLAIN.size
_PRINTED_BYTES: Final = _PRINTED.size

_unpack_plain = _PLAIN.unpack
_unpack_printed = _PRINTED.unpack
# A named tuple's own constructor parses arguments and takes three times as long.
_new = tuple.__new__


def encode_sighting(sightings: Sighting | Iterable[Sighting]) -> bytes:
    """Return the value of one sighting, or of all sightings of an ID in one segment."""
    if isinstance(sightings, Sighting):
        return _encode_entry(sightings)
    value = b"".join(map(_encode_entry, sightings))
    if not value:
        raise InvariantBroken("a state value without a sighting was to be written: it would stand for nothing.")
    return value


def _encode_entry(sighting: Sighting) -> bytes:
    first_ms, last_ms, (topic, partition, offset), fingerprint = sighting
    if not 0 <= first_ms <= last_ms < _LIMIT or not 0 <= offset < _LIMIT:
        raise InvariantBroken(
            f"a sighting from {first_ms} to {last_ms} ms at offset {offset} can not be stored: times and offsets are "
            f"in [0, {_LIMIT}) and the first is not after the last. Such a record should have become a dead letter."
        )
    if not 0 <= topic < 1 << 16 or not 0 <= partition < 1 << 32:
        raise InvariantBroken(f"a source of topic {topic}, partition {partition} can not be stored.")
    header = _VERSION
    if topic < _TOPIC_LIMIT and partition < _PARTITION_LIMIT:
        where = (topic << 12 | partition).to_bytes(2)
    else:
        header |= _WIDE
        where = topic.to_bytes(2) + partition.to_bytes(4)
    tail = b""
    if last_ms != first_ms:
        header |= _EXTENDED
        tail = last_ms.to_bytes(6)
    if fingerprint:
        if len(fingerprint) != _FINGERPRINT_BYTES:
            raise InvariantBroken(f"a fingerprint of {len(fingerprint)} bytes can not be stored; it has 8.")
        header |= _FINGERPRINT
        tail += fingerprint
    return b"".join((header.to_bytes(1), first_ms.to_bytes(6), where, offset.to_bytes(6), tail))


def decode_sightings(value: bytes) -> tuple[Sighting, ...]:
    """Return the sightings of a value, in the order they were written.

    Raises StateIncompatible for another version, TaskCorrupted for bytes that are no value.
    """
    if len(value) == _PLAIN_BYTES and value[0] == _VERSION:
        _, when, high, low = _unpack_plain(value)
        first_ms = when >> 16
        source = _new(Source, (when >> 12 & 15, when & 4095, high << 16 | low))
        return (_new(Sighting, (first_ms, first_ms, source, b"")),)
    if len(value) == _PRINTED_BYTES and value[0] == _VERSION | _FINGERPRINT:
        _, when, high, low, fingerprint = _unpack_printed(value)
        first_ms = when >> 16
        source = _new(Source, (when >> 12 & 15, when & 4095, high << 16 | low))
        return (_new(Sighting, (first_ms, first_ms, source, fingerprint)),)
    return _decode_entries(value)


def _decode_entries(value: bytes) -> tuple[Sighting, ...]:
    sightings = []
    at = 0
    while True:
        header = _header(value, at)
        wide = bool(header & _WIDE)
        extended = bool(header & _EXTENDED)
        where_at = at + 7
        offset_at = where_at + (6 if wide else 2)
        last_at = offset_at + 6
        print_at = last_at + (6 if extended else 0)
        end = print_at + (_FINGERPRINT_BYTES if header & _FINGERPRINT else 0)
        if end > len(value):
            raise TaskCorrupted(f"a state value of {len(value)} bytes is cut: {value.hex()}. {_RESTORE}")
        first_ms = int.from_bytes(value[at + 1 : where_at])
        where = int.from_bytes(value[where_at:offset_at])
        bits = 32 if wide else 12
        last_ms = int.from_bytes(value[last_at:print_at]) if extended else first_ms
        source = Source(where >> bits, where & (1 << bits) - 1, int.from_bytes(value[offset_at:last_at]))
        sightings.append(Sighting(first_ms, last_ms, source, value[print_at:end]))
        at = end
        if at == len(value):
            return tuple(sightings)


_RESTORE: Final = "The store of this partition will be deleted and restored from the changelog."


def _header(value: bytes, at: int) -> int:
    if at >= len(value):
        raise TaskCorrupted(f"an empty state value was read. {_RESTORE}")
    header = value[at]
    if header & 0xF0 != _VERSION:
        raise StateIncompatible(
            f"a state value has version {header >> 4}; this dedup reads version {_VERSION >> 4}. "
            "The state was written by another release: run that one, or `dedup reset` the topology."
        )
    if header & 0x0F & ~_FLAGS:
        raise TaskCorrupted(f"a state value has unknown flags: {value.hex()}. {_RESTORE}")
    return header


def encode_single_column(
    times_ms: Integers,
    topic: int | Integers,
    partition: int | Integers,
    offsets: Integers,
    fingerprints: Sequence[bytes] | None = None,
) -> list[bytes]:
    """Return ``encode_sighting`` of one unextended sighting per row.

    Topic and partition are one for all rows, or a column. Raises InvariantBroken as ``encode_sighting`` does.
    """
    rows = len(times_ms)
    if not rows:
        return []
    times, seen_at = np.asarray(times_ms, np.int64), np.asarray(offsets, np.int64)
    topics, partitions = np.asarray(topic, np.int64), np.asarray(partition, np.int64)
    narrow = _all_below(topics, _TOPIC_LIMIT) and _all_below(partitions, _PARTITION_LIMIT)
    if not narrow or not _all_below(times, _LIMIT) or not _all_below(seen_at, _LIMIT):
        return _encode_rows(times, topics, partitions, seen_at, fingerprints)
    width = _PLAIN_BYTES if fingerprints is None else _PRINTED_BYTES
    table = np.empty((rows, width), np.uint8)
    table[:, 0] = _VERSION if fingerprints is None else _VERSION | _FINGERPRINT
    table[:, 1:9] = _big_endian(times << 16 | topics << 12 | partitions)
    table[:, 9:15] = _big_endian(seen_at)[:, 2:]
    if fingerprints is not None:
        joined = b"".join(fingerprints)
        if len(fingerprints) != rows or set(map(len, fingerprints)) != {_FINGERPRINT_BYTES}:
            raise InvariantBroken("every sighting of a batch has a fingerprint of 8 bytes, or none has one.")
        table[:, 15:] = np.frombuffer(joined, np.uint8).reshape(rows, _FINGERPRINT_BYTES)
    values: list[bytes] = table.view(f"V{width}").ravel().tolist()
    return values


def _all_below(column: npt.NDArray[np.int64], limit: int) -> bool:
    # As unsigned, a negative number is above every limit: one pass instead of two.
    return bool(column.view(np.uint64).max() < limit)


def _big_endian(column: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    return column.astype(">i8").view(np.uint8).reshape(len(column), 8)


def _encode_rows(
    times: npt.NDArray[np.int64],
    topics: npt.NDArray[np.int64],
    partitions: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    fingerprints: Sequence[bytes] | None,
) -> list[bytes]:
    """Return the column the slow way: wide sources, or a row that will be refused with its reason."""
    rows = len(times)
    prints = [b""] * rows if fingerprints is None else fingerprints
    columns = (times, np.broadcast_to(topics, rows), np.broadcast_to(partitions, rows), offsets)
    return [
        _encode_entry(Sighting(time_ms, time_ms, Source(topic, partition, offset), fingerprint))
        for time_ms, topic, partition, offset, fingerprint in zip(
            *(column.tolist() for column in columns), prints, strict=True
        )
    ]


_SIGHTING_TAG: Final = b"S"
_TASK_RECORD_KEY: Final = b"T"
_STATE_KEY_AT: Final = 9


class SightingKey(NamedTuple):
    """Key of a changelog record that holds the sightings of one ID in one segment."""

    segment: int
    """Start in ms of event time."""
    state_key: bytes


@dataclass(frozen=True, slots=True)
class TaskRecordKey:
    """Key of the changelog record that holds the task record."""


def sighting_key(segment: int, state_key: bytes) -> bytes:
    """Return the changelog key of an ID in a segment."""
    return _segment_prefix(segment) + state_key


def sighting_keys_column(segment: int, ids: Iterable[bytes]) -> list[bytes]:
    """Return ``sighting_key`` for every ID of one segment."""
    prefix = _segment_prefix(segment)
    return [prefix + state_key for state_key in ids]


def task_record_key() -> bytes:
    """Return the changelog key of the task record."""
    return _TASK_RECORD_KEY


def _segment_prefix(segment: int) -> bytes:
    if not 0 <= segment < _LIMIT:
        raise InvariantBroken(f"a segment that starts at {segment} ms can not be stored: event times are >= 0.")
    return _SIGHTING_TAG + segment.to_bytes(8)


def parse_key(key: bytes) -> SightingKey | TaskRecordKey:
    """Return what a changelog key names; raises StateIncompatible for a key this release never writes."""
    if key == _TASK_RECORD_KEY:
        return TaskRecordKey()
    if key[:1] == _SIGHTING_TAG and len(key) > _STATE_KEY_AT:
        return SightingKey(int.from_bytes(key[1:_STATE_KEY_AT]), key[_STATE_KEY_AT:])
    raise StateIncompatible(
        f"the changelog has a record with the key {key[:64].hex()!r}, which this dedup does not write: "
        "another program or another release writes this topic. Nothing was changed."
    )


@dataclass(frozen=True, slots=True)
class Collected:
    """What a stretch of the changelog says, ready for ``Store.apply``."""

    writes: dict[int, dict[bytes, bytes]]
    task_record: TaskRecord | None
    """The last one in the stretch."""


def collect(keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> Collected:
    """Return the writes of consecutive changelog records; of several with one key the last counts.

    Raises StateIncompatible for a record that dedup does not write: no key, no value, unknown key or version.
    """
    by_prefix: dict[bytes, dict[bytes, bytes]] = {}
    record: bytes | None = None
    for key, value in zip(keys, values, strict=True):
        if key is None or value is None:
            raise StateIncompatible(
                "the changelog has a record without a key or a value, which dedup does not write: another program "
                "writes this topic. Nothing was changed."
            )
        prefix = key[:_STATE_KEY_AT]
        values_there = by_prefix.get(prefix)
        if values_there is None:
            if isinstance(parse_key(key), TaskRecordKey):
                record = value
                continue
            values_there = by_prefix[prefix] = {}
        values_there[key[_STATE_KEY_AT:]] = value
    writes = {int.from_bytes(prefix[1:]): found for prefix, found in by_prefix.items()}
    return Collected(writes, None if record is None else decode_task_record(record))


_RECORD_VERSION: Final = 1
_RECORD_HEAD: Final = struct.Struct(">BBqqqH")
_RECORD_FEED: Final = struct.Struct(">HIqB")
_CHECKSUM_BYTES: Final = 4


def encode_task_record(record: TaskRecord) -> bytes:
    """Return the task record's bytes: version, fields, CRC-32."""
    try:
        parts = [
            _RECORD_HEAD.pack(
                _RECORD_VERSION,
                len(record.fingerprint),
                record.stream_time_ms,
                record.next_offset,
                record.segment_ms,
                len(record.feeds),
            ),
            record.fingerprint,
            *(_RECORD_FEED.pack(feed.topic, feed.partition, feed.max_ms, feed.idle) for feed in record.feeds),
        ]
    except struct.error as error:
        raise InvariantBroken(f"a task record can not be written: {error} in {record}.") from error
    body = b"".join(parts)
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES)


def decode_task_record(value: bytes) -> TaskRecord:
    """Return the task record; raises StateIncompatible for another version, TaskCorrupted for damaged bytes."""
    if value and value[0] != _RECORD_VERSION:
        raise StateIncompatible(
            f"a task record has version {value[0]}; this dedup reads version {_RECORD_VERSION}. "
            "The state was written by another release: run that one, or `dedup reset` the topology."
        )
    body, checksum = value[:-_CHECKSUM_BYTES], value[-_CHECKSUM_BYTES:]
    if len(body) < _RECORD_HEAD.size or zlib.crc32(body) != int.from_bytes(checksum):
        raise TaskCorrupted(f"a task record of {len(value)} bytes is damaged: its checksum differs. {_RESTORE}")
    _, print_bytes, stream_time_ms, next_offset, segment_ms, feeds = _RECORD_HEAD.unpack_from(body)
    feeds_at = _RECORD_HEAD.size + print_bytes
    if len(body) != feeds_at + feeds * _RECORD_FEED.size:
        raise TaskCorrupted(f"a task record of {len(value)} bytes is damaged: its length is wrong. {_RESTORE}")
    return TaskRecord(
        fingerprint=body[_RECORD_HEAD.size : feeds_at],
        stream_time_ms=stream_time_ms,
        feeds=tuple(
            FeedTime(topic, partition, max_ms, bool(idle))
            for topic, partition, max_ms, idle in _RECORD_FEED.iter_unpack(body[feeds_at:])
        ),
        next_offset=next_offset,
        segment_ms=segment_ms,
    )


def rebucket(
    entries: Iterable[tuple[bytes, bytes]],
    segment_ms: int,
    known: Mapping[int, Mapping[bytes, bytes]] | None = None,
) -> dict[int, dict[bytes, bytes]]:
    """Return writes that put (state key, encoded value) pairs of an old grid into segments of ``segment_ms``.

    ``known`` is what the new grid holds already for these IDs; the writes include it. Sightings of one ID with the
    same first time, source and fingerprint are one sighting, extended to the latest of their ends.
    """
    intervals: dict[bytes, dict[tuple[int, Source, bytes], int]] = {}
    for state_key, value in _with_known(entries, known):
        ends = intervals.setdefault(state_key, {})
        for first_ms, last_ms, source, fingerprint in decode_sightings(value):
            name = (first_ms, source, fingerprint)
            ends[name] = max(ends.get(name, last_ms), last_ms)
    regrouped: dict[int, dict[bytes, list[Sighting]]] = {}
    for state_key, ends in intervals.items():
        for (first_ms, source, fingerprint), last_ms in sorted(ends.items()):
            there = regrouped.setdefault(last_ms - last_ms % segment_ms, {})
            there.setdefault(state_key, []).append(Sighting(first_ms, last_ms, source, fingerprint))
    return {
        start: {state_key: encode_sighting(sightings) for state_key, sightings in of.items()}
        for start, of in regrouped.items()
    }


def _with_known(
    entries: Iterable[tuple[bytes, bytes]], known: Mapping[int, Mapping[bytes, bytes]] | None
) -> Iterable[tuple[bytes, bytes]]:
    wanted: set[bytes] = set()
    for state_key, value in entries:
        wanted.add(state_key)
        yield state_key, value
    for held in (known or {}).values():
        for state_key, value in held.items():
            if state_key in wanted:
                yield state_key, value
