"""Encodes and decodes the keys and values of the changelog and the store: sightings, task records, and seed marks.

The key of a sighting value consists of ``S``, the segment start (8 bytes), and the state key. A sighting value lists
*all* sightings of its ID that end in its segment, as entries with these fields (unsigned, big-endian)::

    1 byte   version in the high nibble (1); flags: 1 wide source, 2 extended, 4 fingerprint
    7 bytes  first_ms
    1 byte   topic           wide: 2 bytes
    2 bytes  partition       wide: 4 bytes
    4 bytes  offset          wide: 8 bytes
    8 bytes  last_ms, only with flag 2; otherwise, last_ms equals first_ms
    8 bytes  fingerprint, only with flag 4

Times are in the range [0, 2**48) ms, which ends in the year 10889.

The key of the task record is ``T``, and the key of the seed mark is ``H``. Task records and seed marks start with a
version byte and end with a CRC-32. The body of a seed mark is a JSON object, and the body of a task record has these
fields::

    1 byte   length of the fingerprint
    4 x 8    stream_time_ms, next_offset, segment_ms, kept_from (signed)
    2 bytes  number of feeds
    n bytes  fingerprint
    each feed: 2 bytes topic, 4 bytes partition, 8 bytes max_ms (signed), 1 byte idle
    16 bytes topic ID of the feeding topic, from version 3

`dedup spark seed` writes the initial state of a fleet (the seed) in many transactions. In each changelog partition, the
first record of the seed is a `seeding` mark, and the last transaction contains the task record and a `seeded` mark. No
task may use a partition that has a `seeding` mark but no task record, because part of the seed is missing.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Final, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from dedup.core.window import Sighting, Source
from dedup.errors import InvariantBroken, StateIncompatible, TaskCorrupted

Integers = Sequence[int] | npt.NDArray[np.int64]
Writes = Mapping[int, Mapping[bytes, bytes]]
"""Maps the start of each segment (in ms) to a mapping from state keys to encoded values. A value contains *all*
sightings of its ID that end in the segment.
"""

NOT_SAID: Final = -1
"""The value of `kept_from` in a task record that does not say which changelog records are still needed."""

_CHANGELOG_VERSION: Final = 0x10
_WIDE: Final = 1
_EXTENDED: Final = 2
_FINGERPRINT: Final = 4
_FINGERPRINT_BYTES: Final = 8
_TIME_LIMIT: Final = 1 << 48

_ENTRIES: Final = {
    _CHANGELOG_VERSION | wide | extended | printed: struct.Struct(
        (">QHIQ" if wide else ">QBHI") + ("Q" if extended else "") + ("8s" if printed else "")
    )
    for wide in (0, _WIDE)
    for extended in (0, _EXTENDED)
    for printed in (0, _FINGERPRINT)
}
"""Maps each header, which is the top byte of an entry's first field, to the layout of the entry."""
_FEW_ROWS: Final = 32
"""For up to this number of rows, encoding rows one by one is faster than setting up NumPy columns."""

_NARROW_COLUMNS: Final = [("head", ">u8"), ("topic", "u1"), ("partition", ">u2"), ("offset", ">u4")]
_WIDE_COLUMNS: Final = [("head", ">u8"), ("topic", ">u2"), ("partition", ">u4"), ("offset", ">u8")]
_FINGERPRINT_COLUMN: Final = [("fingerprint", f"V{_FINGERPRINT_BYTES}")]

_PLAIN_BYTES: Final = _ENTRIES[_CHANGELOG_VERSION].size
_PLAIN_BASE: Final = _CHANGELOG_VERSION << 56
_unpack_plain = _ENTRIES[_CHANGELOG_VERSION].unpack
# A named tuple's own constructor takes twice as long as `tuple.__new__`, because it parses its arguments.
_new = tuple.__new__

_RESTORE: Final = "The store of this partition will be deleted and restored from the changelog."

_SIGHTING_TAG: Final = b"S"
TASK_RECORD_KEY: Final = b"T"
SEED_MARK_KEY: Final = b"H"
_STATE_KEY_AT: Final = 9
_ALONE: Final = frozenset({TASK_RECORD_KEY, SEED_MARK_KEY})
_prefix_of: Final = itemgetter(slice(_STATE_KEY_AT))
_state_key_of: Final = itemgetter(slice(_STATE_KEY_AT, None))

_RECORD_VERSION: Final = 3
_RECORD_WITHOUT_ID: Final = 2
_TOPIC_ID_BYTES: Final = 16
_RECORD_HEAD: Final = struct.Struct(">BBqqqqH")
_RECORD_FEED: Final = struct.Struct(">HIqB")
_MARK_VERSION: Final = 1
_CHECKSUM_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class FeedTime:
    """The greatest event time of one feed (a partition of a source topic)."""

    topic: int
    """The index of the topic in ``source.topics``."""
    partition: int
    max_ms: int
    idle: bool


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """The changelog record that tells a new task where the previous task stopped."""

    fingerprint: bytes
    """The value of `Topology.state_fingerprint`. A task refuses to load state with a different fingerprint."""
    stream_time_ms: int
    feeds: tuple[FeedTime, ...]
    next_offset: int
    """The next offset of the feeding partition to be judged. All records below this offset have been judged."""
    segment_ms: int
    """The width of the segments in which new sightings are stored."""
    kept_from: int = NOT_SAID
    """The lowest changelog offset that live segments may need, or `NOT_SAID` if it was not recorded."""
    feeding_topic_id: str = ""
    """Kafka's ID of the feeding topic as 32 hex digits, or an empty string in task records of earlier releases."""

    def counts_on_more(self, begin: int) -> bool:
        """Return whether live segments need changelog records below ``begin``, the first offset that still exists."""
        return NOT_SAID < self.kept_from < begin


def refuse_unstorable(stored: int, writes: Writes, position: int) -> None:
    """Raise InvariantBroken if ``position`` is less than the stored position or a state key is empty."""
    if any(b"" in values for values in writes.values()):
        raise InvariantBroken("an empty state key cannot be stored, because no tracking ID has an empty encoding.")
    if position < stored:
        raise InvariantBroken(
            f"a store at changelog position {stored} cannot be moved back to {position}: two owners write to one "
            "store, or a batch was applied twice. Restart the worker; it restores the state from the changelog."
        )


@dataclass(frozen=True, slots=True)
class SeedMark:
    """Identifies the seed (the initial state) in a changelog partition, and says whether the seed is complete."""

    phase: Literal["seeding", "seeded"]
    seed: str
    """Identifies the seed's history and the offsets at which the fleet starts."""
    next_offset: int
    """The offset of the feeding partition at which the fleet starts."""
    stream_time_ms: int
    sightings: int
    """The number of changelog records in this partition that contain sightings."""
    digest: str
    """A digest of the changelog records that contain sightings; it does not depend on their order."""
    judged_at_ms: int
    """The wall-clock time, in ms, that `dedup spark seed` used to find event times in the future."""
    begins: dict[str, list[int]]
    """Maps each source topic to the offsets at which the fleet starts, one per partition."""
    history: Literal["topics", "files"]
    """The kind of the seed's history: the source topics up to `begins`, or files."""


def encode_seed_mark(mark: SeedMark) -> bytes:
    """Encode a seed mark as a changelog value."""
    body = bytes([_MARK_VERSION]) + json.dumps(asdict(mark), sort_keys=True, separators=(",", ":")).encode()
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES)


def decode_seed_mark(value: bytes) -> SeedMark:
    """Decode a seed mark. Raises StateIncompatible for an unknown version, or TaskCorrupted for damaged bytes."""
    if value and value[0] != _MARK_VERSION:
        raise StateIncompatible(
            f"a seed mark has version {value[0]}; this release reads version {_MARK_VERSION}. Another release seeded "
            "the changelog: run that one, or `dedup reset` the topology and seed it again."
        )
    body, checksum = value[:-_CHECKSUM_BYTES], value[-_CHECKSUM_BYTES:]
    if not body or zlib.crc32(body) != int.from_bytes(checksum):
        raise TaskCorrupted(
            f"a seed mark of {len(value)} bytes is damaged: its checksum differs. Run `dedup reset`, then seed again."
        )
    try:
        return SeedMark(**json.loads(body[1:]))
    except (TypeError, ValueError) as error:
        # The checksum is correct, so dedup itself wrote these bytes, even though they are not a valid seed mark.
        raise InvariantBroken(
            f"a seed mark lacks members of version {_MARK_VERSION}, or has others: {error}."
        ) from error


def encode_sighting(sightings: Sighting | Iterable[Sighting]) -> bytes:
    """Encode one sighting, or all sightings of an ID in one segment, as one changelog value."""
    if isinstance(sightings, Sighting):
        return _encode_entry(sightings)
    value = b"".join(map(_encode_entry, sightings))
    if not value:
        raise InvariantBroken("a state value without a sighting cannot be written, because it would mean nothing.")
    return value


def _encode_entry(sighting: Sighting) -> bytes:
    first_ms, last_ms, (topic, partition, offset), fingerprint = sighting
    if not 0 <= first_ms <= last_ms < _TIME_LIMIT:
        raise InvariantBroken(
            f"a sighting from {first_ms} to {last_ms} ms cannot be stored: times are in [0, {_TIME_LIMIT}) and the "
            "first is not after the last. The record should have become a dead letter."
        )
    header = (
        _CHANGELOG_VERSION
        if topic < 1 << 8 and partition < 1 << 16 and offset < 1 << 32
        else _CHANGELOG_VERSION | _WIDE
    )
    fields: list[int | bytes] = [topic, partition, offset]
    if last_ms != first_ms:
        header |= _EXTENDED
        fields.append(last_ms)
    if fingerprint:
        if len(fingerprint) != _FINGERPRINT_BYTES:
            raise InvariantBroken(f"a fingerprint of {len(fingerprint)} bytes cannot be stored; it has 8.")
        header |= _FINGERPRINT
        fields.append(fingerprint)
    try:
        return _ENTRIES[header].pack(header << 56 | first_ms, *fields)
    except struct.error as error:
        raise InvariantBroken(
            f"a sighting from topic {topic}, partition {partition}, offset {offset} cannot be stored: {error}."
        ) from error


def decode_sightings(value: bytes) -> tuple[Sighting, ...]:
    """Decode a sighting value. Raises StateIncompatible for an unknown version, or TaskCorrupted for damaged bytes."""
    if len(value) == _PLAIN_BYTES:
        head, topic, partition, offset = _unpack_plain(value)
        first_ms = head - _PLAIN_BASE
        if 0 <= first_ms < _TIME_LIMIT:
            return (_new(Sighting, (first_ms, first_ms, _new(Source, (topic, partition, offset)), b"")),)
    sightings = []
    at = 0
    while at < len(value) or not at:
        sighting, at = _decode_entry(value, at)
        sightings.append(sighting)
    return tuple(sightings)


def _decode_entry(value: bytes, at: int) -> tuple[Sighting, int]:
    header = value[at] if value else _CHANGELOG_VERSION
    if header & 0xF0 != _CHANGELOG_VERSION:
        raise StateIncompatible(
            f"a state value has version {header >> 4}; this release reads version {_CHANGELOG_VERSION >> 4}. "
            "The state was written by another release: run that one, or `dedup reset` the topology."
        )
    entry = _ENTRIES.get(header)
    if entry is None or at + entry.size > len(value):
        raise TaskCorrupted(f"a state value is damaged: {value.hex()!r} is truncated or has unknown flags. {_RESTORE}")
    head, topic, partition, offset, *rest = entry.unpack_from(value, at)
    first_ms = head & (1 << 56) - 1
    last_ms = rest[0] if header & _EXTENDED else first_ms
    if not first_ms <= last_ms < _TIME_LIMIT:
        raise TaskCorrupted(f"a state value is damaged: {value.hex()!r} has impossible times. {_RESTORE}")
    fingerprint = rest[-1] if header & _FINGERPRINT else b""
    return Sighting(first_ms, last_ms, Source(topic, partition, offset), fingerprint), at + entry.size


def all_within(values: Collection[bytes], begin_ms: int, end_ms: int) -> bool:
    """Return whether all sightings end in [``begin_ms``, ``end_ms``). Raises the same errors as `decode_sightings`."""
    lengths = set(map(len, values))
    for length in lengths:
        same = values if len(lengths) == 1 else [value for value in values if len(value) == length]
        if not _ends_within(same, length, begin_ms, end_ms) and not all(
            begin_ms <= seen.last_ms < end_ms for value in same for seen in decode_sightings(value)
        ):
            return False
    return True


def _ends_within(values: Collection[bytes], length: int, begin_ms: int, end_ms: int) -> bool:
    """Return True if every value is a single, never extended sighting with an end in [``begin_ms``, ``end_ms``)."""
    rows = np.frombuffer(b"".join(values), np.uint8).reshape(len(values), length)
    headers = {header for header, entry in _ENTRIES.items() if entry.size == length and not header & _EXTENDED}
    if not headers or not headers.issuperset(np.unique(rows[:, :1]).tolist()):
        return False
    firsts = np.ascontiguousarray(rows[:, :8]).view(">u8") & np.uint64((1 << 56) - 1)
    return bool(begin_ms <= firsts.min() and firsts.max() < end_ms)


def encode_single_column(
    times_ms: Integers,
    topic: int | Integers,
    partition: int | Integers,
    offsets: Integers,
    fingerprints: Sequence[bytes] | None = None,
) -> list[bytes]:
    """Encode one sighting per row, as `encode_sighting` does. Each sighting's first and last times are equal.

    ``topic`` and ``partition`` are each either a column or a single value for all rows. Raises InvariantBroken in the
    same cases as `encode_sighting`.
    """
    rows = len(times_ms)
    if rows <= _FEW_ROWS and fingerprints is None and isinstance(topic, int) and isinstance(partition, int):
        few = _encode_few(times_ms, topic, partition, offsets)
        if few is not None:
            return few
    times, seen_at = np.asarray(times_ms, np.int64), np.asarray(offsets, np.int64)
    topics, partitions = np.asarray(topic, np.int64), np.asarray(partition, np.int64)
    narrow = _below(seen_at, 1 << 32) & _below(topics, 1 << 8) & _below(partitions, 1 << 16)
    wide = bool(rows) and not narrow.any()
    storable = _below(times, _TIME_LIMIT) & _below(seen_at, 1 << 63) & _below(partitions, 1 << 32)
    if not (wide or narrow.all()) or not (storable & _below(topics, 1 << 16)).all():
        return _encode_rows(times, topics, partitions, seen_at, fingerprints)
    header = _CHANGELOG_VERSION | (_WIDE if wide else 0) | (0 if fingerprints is None else _FINGERPRINT)
    columns = (_WIDE_COLUMNS if wide else _NARROW_COLUMNS) + ([] if fingerprints is None else _FINGERPRINT_COLUMN)
    table = np.empty(rows, columns)
    table["head"] = times | header << 56
    table["topic"] = topics
    table["partition"] = partitions
    table["offset"] = seen_at
    if fingerprints is not None:
        if len(fingerprints) != rows or not set(map(len, fingerprints)) <= {_FINGERPRINT_BYTES}:
            raise InvariantBroken("either every sighting of a batch has a fingerprint of 8 bytes, or none has one.")
        table["fingerprint"] = np.frombuffer(b"".join(fingerprints), f"V{_FINGERPRINT_BYTES}")
    values: list[bytes] = table.view(f"V{table.itemsize}").tolist()
    return values


def _encode_few(times_ms: Integers, topic: int, partition: int, offsets: Integers) -> list[bytes] | None:
    """Encode a few rows without NumPy, or return None if a row needs the wide layout or cannot be stored."""
    if len(times_ms) and not 0 <= min(times_ms) <= max(times_ms) < _TIME_LIMIT:
        return None
    pack, head = _ENTRIES[_CHANGELOG_VERSION].pack, _CHANGELOG_VERSION << 56
    try:
        return [pack(head | time_ms, topic, partition, at) for time_ms, at in zip(times_ms, offsets, strict=True)]
    except struct.error:
        return None


def _below(column: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.bool_]:
    # If a negative number is read as an unsigned number, it exceeds every limit, so one comparison is enough.
    return column.view(np.uint64) < np.uint64(limit)


def _encode_rows(
    times: npt.NDArray[np.int64],
    topics: npt.NDArray[np.int64],
    partitions: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    fingerprints: Sequence[bytes] | None,
) -> list[bytes]:
    """Encode rows one by one, if their layouts differ or if an error must name the bad row."""
    rows = len(times)
    prints = [b""] * rows if fingerprints is None else fingerprints
    columns = (times, np.broadcast_to(topics, rows), np.broadcast_to(partitions, rows), offsets)
    return [
        _encode_entry(Sighting(time_ms, time_ms, Source(topic, partition, offset), fingerprint))
        for time_ms, topic, partition, offset, fingerprint in zip(
            *(column.tolist() for column in columns), prints, strict=True
        )
    ]


class SightingKey(NamedTuple):
    """The parsed key of a changelog record that contains one ID's sightings in one segment."""

    segment: int
    """The start of the segment in ms of event time."""
    state_key: bytes


def sighting_key(segment: int, state_key: bytes) -> bytes:
    """Return the key of the changelog record that contains the sightings of an ID in a segment."""
    return segment_prefix(segment) + state_key


def segment_prefix(segment: int) -> bytes:
    """Return the prefix of the changelog keys of all sightings in a segment."""
    if not 0 <= segment < _TIME_LIMIT:
        raise InvariantBroken(f"a segment that starts at {segment} ms cannot be stored: event times are >= 0.")
    return _SIGHTING_TAG + segment.to_bytes(8)


def parse_key(key: bytes) -> SightingKey | None:
    """Parse a changelog key, or return None for the key of the task record or the seed mark.

    Raises StateIncompatible for a changelog key that this release never writes.
    """
    if key in _ALONE:
        return None
    if key[:1] == _SIGHTING_TAG and len(key) > _STATE_KEY_AT:
        return SightingKey(int.from_bytes(key[1:_STATE_KEY_AT]), key[_STATE_KEY_AT:])
    raise StateIncompatible(
        f"the changelog has a record with the key {key[:64].hex()!r}, which this release does not write: "
        "another program or another release writes this topic. Nothing was changed."
    )


def sighting_rows(keys: Sequence[bytes | None], state_keys: Collection[bytes]) -> list[int]:
    """Return the rows whose key ends with one of ``state_keys`` or is not a sighting key, without parsing the keys."""
    ends = tuple(state_keys)
    return [
        row for row, key in enumerate(keys) if key is None or key.endswith(ends) or not key.startswith(_SIGHTING_TAG)
    ]


@dataclass(frozen=True, slots=True)
class Collected:
    """The sightings, last task record, and last seed mark in a run of consecutive changelog records."""

    writes: dict[int, dict[bytes, bytes]]
    task_record: TaskRecord | None
    """The last task record among the changelog records, or None."""
    seed_mark: SeedMark | None = None
    """The last seed mark among the changelog records, or None."""


def collect(keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> Collected:
    """Collect consecutive changelog records. If several records have the same key, the last one counts.

    Raises StateIncompatible for a record whose key or value is missing, or whose key or version is unknown to this
    release.
    """
    if None in keys or None in values:
        raise StateIncompatible(
            "the changelog has a record without a key or a value, which dedup does not write: another program "
            "writes this topic. Nothing was changed."
        )
    keys, values = cast("Sequence[bytes]", keys), cast("Sequence[bytes]", values)
    prefixes = set(map(_prefix_of, keys))
    segments = prefixes - _ALONE
    whole = min((size for size in set(map(len, keys)) if size > 1), default=0) > _STATE_KEY_AT
    if len(segments) == 1 and whole:
        # Usually, all sightings belong to one segment. Then C code separates them from the other records.
        (prefix,) = segments
        parse_key(prefix + b"0")
        found = dict(zip(map(_state_key_of, keys), values, strict=True))
        found.pop(b"", None)
        by_prefix = {prefix: found}
    else:
        by_prefix = _by_prefix(keys, values)
    record, mark = (_last(keys, values, key) if key in prefixes else None for key in (TASK_RECORD_KEY, SEED_MARK_KEY))
    return Collected(
        {int.from_bytes(prefix[1:]): found for prefix, found in by_prefix.items()},
        None if record is None else decode_task_record(record),
        None if mark is None else decode_seed_mark(mark),
    )


def _by_prefix(keys: Sequence[bytes], values: Sequence[bytes]) -> dict[bytes, dict[bytes, bytes]]:
    by_prefix: dict[bytes, dict[bytes, bytes]] = {}
    for key, value in zip(keys, values, strict=True):
        prefix = key[:_STATE_KEY_AT]
        there = by_prefix.get(prefix)
        if there is None:
            if parse_key(key) is None:
                continue
            there = by_prefix[prefix] = {}
        there[key[_STATE_KEY_AT:]] = value
    return by_prefix


def _last(keys: Sequence[bytes], values: Sequence[bytes], key: bytes) -> bytes:
    return values[len(keys) - 1 - keys[::-1].index(key)]


def encode_task_record(record: TaskRecord) -> bytes:
    """Encode a task record as a changelog value."""
    topic_id = bytes.fromhex(record.feeding_topic_id)
    if len(topic_id) not in {0, _TOPIC_ID_BYTES}:
        raise InvariantBroken(f"a task record cannot be written: {record.feeding_topic_id!r} is not a topic id.")
    try:
        parts = [
            _RECORD_HEAD.pack(
                _RECORD_VERSION if topic_id else _RECORD_WITHOUT_ID,
                len(record.fingerprint),
                record.stream_time_ms,
                record.next_offset,
                record.segment_ms,
                record.kept_from,
                len(record.feeds),
            ),
            record.fingerprint,
            *(_RECORD_FEED.pack(feed.topic, feed.partition, feed.max_ms, feed.idle) for feed in record.feeds),
            topic_id,
        ]
    except struct.error as error:
        raise InvariantBroken(f"a task record cannot be written: {error} in {record}.") from error
    body = b"".join(parts)
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES)


def decode_task_record(value: bytes) -> TaskRecord:
    """Decode a task record. Raises StateIncompatible for an unknown version, or TaskCorrupted for damaged bytes."""
    if value and value[0] not in {_RECORD_WITHOUT_ID, _RECORD_VERSION}:
        raise StateIncompatible(
            f"a task record has version {value[0]}; this release reads versions {_RECORD_WITHOUT_ID} and "
            f"{_RECORD_VERSION}. The state was written by another release: run that one, or `dedup reset` the topology."
        )
    body, checksum = value[:-_CHECKSUM_BYTES], value[-_CHECKSUM_BYTES:]
    if len(body) < _RECORD_HEAD.size or zlib.crc32(body) != int.from_bytes(checksum):
        raise TaskCorrupted(f"a task record of {len(value)} bytes is damaged: its checksum differs. {_RESTORE}")
    _, print_bytes, stream_time_ms, next_offset, segment_ms, kept_from, feeds = _RECORD_HEAD.unpack_from(body)
    feeds_at = _RECORD_HEAD.size + print_bytes
    id_at = feeds_at + feeds * _RECORD_FEED.size
    if len(body) != id_at + (_TOPIC_ID_BYTES if value[0] == _RECORD_VERSION else 0):
        raise TaskCorrupted(f"a task record of {len(value)} bytes is damaged: its length is wrong. {_RESTORE}")
    return TaskRecord(
        fingerprint=body[_RECORD_HEAD.size : feeds_at],
        stream_time_ms=stream_time_ms,
        feeds=tuple(
            FeedTime(topic, partition, max_ms, bool(idle))
            for topic, partition, max_ms, idle in _RECORD_FEED.iter_unpack(body[feeds_at:id_at])
        ),
        next_offset=next_offset,
        segment_ms=segment_ms,
        kept_from=kept_from,
        feeding_topic_id=body[id_at:].hex(),
    )


def rebucket(entries: Iterable[tuple[bytes, bytes]], segment_ms: int) -> dict[int, dict[bytes, bytes]]:
    """Return the writes that move pairs of state keys and encoded sightings into segments that are ``segment_ms`` wide.

    The segment width depends on the topology's guard period and grace. A write replaces all of an ID's sightings in a
    segment. Therefore, ``entries`` must also include every value that the new segments already contain for these IDs.
    Sightings of one ID that differ only in their last time are merged into one sighting with the latest of these times.
    """
    intervals: dict[bytes, dict[tuple[int, Source, bytes], int]] = {}
    for state_key, value in entries:
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
