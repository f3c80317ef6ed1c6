"""Reads the late and dead-letter topics, and indexes each record by the source record that its header names."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, Self

from dedup.core.extract import Extracted, Extractor
from dedup.core.extract_one import EXTRACTED, ODD_HEADER_NAME
from dedup.core.window import Source
from dedup.verify.compare import Headers, digest
from dedup.verify.kafka_reader import Bounds, OpenTransaction, Read, RecordColumns

SOURCE_HEADER: Final = "dedup-source"
TIMESTAMP_HEADER: Final = "dedup-timestamp"
REASON_HEADER: Final = "dedup-reason"
DETAIL_HEADER: Final = "dedup-detail"
DIGEST_HEADER: Final = "dedup-digest"
VERDICT_HEADER: Final = "dedup-verdict"
IDLE_HEADER: Final = "dedup-idle"
REPLAYED_HEADER: Final = "dedup-replayed"
FIRST_TIME_HEADER: Final = "dedup-first-time"
FIRST_SOURCE_HEADER: Final = "dedup-first-source"
SourceTuple = tuple[int, int, int]
"""A `Source`, or a plain tuple of the same values, which compares equal to the `Source`."""
LATE_TAIL: Final = (SOURCE_HEADER, TIMESTAMP_HEADER)
DEAD_TAIL: Final = (REASON_HEADER, DETAIL_HEADER, SOURCE_HEADER, TIMESTAMP_HEADER)
"""The headers that a worker appends to the source record's own headers, in this order."""

MOST_DIGITS: Final = 18
_MOST_TIME_CHARACTERS: Final = 20
_NO_TIME_MS: Final = -(1 << 62)
_CACHE_KIB: Final = 16_384
_TABLE: Final = """
CREATE TABLE filed (topic INT, feed INT, position INT, digest BLOB, stands_for BLOB, reason TEXT, part INT, at INT,
    at_ms INT, again INT DEFAULT 0, taken INT DEFAULT 0);
CREATE INDEX by_source ON filed (topic, feed, position);
"""
_BETWEEN: Final = """
SELECT position, digest, stands_for, reason, part, at, at_ms FROM filed
WHERE topic=? AND feed=? AND again=0 AND taken=0 AND position BETWEEN ? AND ? ORDER BY rowid
"""
_TAKE: Final = """
UPDATE filed SET taken=1
WHERE rowid = (SELECT min(rowid) FROM filed WHERE topic=? AND feed=? AND position=? AND taken=0)
"""


class Filed(NamedTuple):
    """A record of a late or dead-letter topic."""

    digest: bytes
    """The digest of the record as it was in the source, with its original timestamp."""
    stands_for: bytes
    """The digest that replaces a value that is too large for the topic; empty if the record is complete."""
    reason: str
    partition: int
    offset: int
    at_ms: int | None = None
    """The time at which the broker appended the record, or None if the topic does not use LogAppendTime."""


class SideTopic:
    """A late or dead-letter topic, indexed by source position in an SQLite file."""

    def __init__(self, name: str, directory: str) -> None:
        self.name: Final = name
        self.complete = True
        """False if the topic is compacted, its beginning was deleted, or a transaction stays open. Then a missing
        record proves nothing.
        """
        # The database has no journal, because no other process reads the file, which is deleted with its directory.
        self._db: Final = sqlite3.connect(Path(directory) / name, isolation_level=None)
        self._db.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{_CACHE_KIB};")
        self._db.executescript(_TABLE)
        self._empty = True

    def read(self, read: Read, bounds: Mapping[int, Bounds], topics: Sequence[str], tail: Sequence[str]) -> Self:
        """Index the committed records within the bounds, including records that name no source record.

        If ``read`` finds that records were deleted meanwhile, it must change the bounds.
        """
        for partition, each in list(bounds.items()):
            try:
                for columns in read(self.name, partition, each.low, each.high):
                    rows = []
                    for row, offset in enumerate(columns.offsets):
                        source = parse_source(header(columns.headers[row], SOURCE_HEADER), topics)
                        at_ms = columns.timestamps_ms[row] if columns.created is None else None
                        content = _as_in_source(columns.keys[row], columns.values[row], columns.headers[row], tail)
                        rows.append((*(source or (None, None, None)), *content, partition, offset, at_ms))
                    self._empty = self._empty and not rows
                    self._db.executemany("INSERT INTO filed VALUES (?,?,?,?,?,?,?,?,?,0,0)", rows)
            except OpenTransaction:
                self.complete = False
            self.complete = self.complete and not bounds[partition].start_deleted
        return self

    def place(self, filed: Filed) -> str:
        """Return the topic, partition, and offset of a record as text for reports."""
        return f"{self.name}/{filed.partition} offset {filed.offset}"

    def take(self, sources: Sequence[SourceTuple]) -> dict[SourceTuple, Filed]:
        """Take and return the entries of these source records. The method `left` yields the entries that remain.

        A second call for the same record returns nothing, even if the record has another entry, unless `give_back` was
        called between the calls.
        """
        if self._empty:
            return {}
        wanted: dict[tuple[int, int], list[int]] = {}
        for topic, partition, offset in sources:
            wanted.setdefault((topic, partition), []).append(offset)
        found: dict[SourceTuple, Filed] = {}
        for feed, offsets in wanted.items():
            there = set(offsets)
            # One query for all records is enough, because the records of a batch have nearby offsets.
            for offset, *row in self._db.execute(_BETWEEN, (*feed, min(offsets), max(offsets))):
                if offset in there:
                    found.setdefault((*feed, offset), Filed(*row))
        self._db.executemany(_TAKE, found)
        self._db.executemany("UPDATE filed SET again=1 WHERE topic=? AND feed=? AND position=? AND taken=0", found)
        return found

    def give_back(self, feed: tuple[int, int] | None) -> None:
        """Undo `take` for the records of a source partition, or for all records if ``feed`` is None."""
        where = "taken OR again" if feed is None else "(taken OR again) AND topic=? AND feed=?"
        self._db.execute(f"UPDATE filed SET taken=0, again=0 WHERE {where}", feed or ())  # noqa: S608  # no input

    def holds(self, source: Source) -> bool:
        """Return whether a source record has an entry that `take` has not taken."""
        ask = "SELECT 1 FROM filed WHERE topic=? AND feed=? AND position=? AND taken=0 LIMIT 1"
        return not self._empty and self._db.execute(ask, source).fetchone() is not None

    def first_offset(self, feed: tuple[int, int]) -> int | None:
        """Return the lowest offset that an entry, taken or not, names in a source partition, or None."""
        ask = "SELECT min(position) FROM filed WHERE topic=? AND feed=?"
        found: int | None = self._db.execute(ask, feed).fetchone()[0]
        return found

    def count_below(self, feed: tuple[int, int], offset: int) -> int:
        """Return the number of remaining entries of a source partition that name an offset below ``offset``."""
        ask = "SELECT count(*) FROM filed WHERE topic=? AND feed=? AND position<? AND taken=0"
        return int(self._db.execute(ask, (*feed, offset)).fetchone()[0])

    def left(self) -> Iterator[tuple[Source | None, Filed, bool]]:
        """Yield each remaining entry as (source record, entry, is a repetition).

        The source record is None if the entry does not name one. An entry is a repetition if `take` has taken another
        entry of the same source record.
        """
        for row in self._db.execute("SELECT * FROM filed WHERE taken=0 ORDER BY part, at"):
            yield None if row[0] is None else Source(*row[:3]), Filed(*row[3:9]), bool(row[9])

    def close(self) -> None:
        """Close the SQLite file."""
        self._db.close()


def extracted_of(extract: Extractor, columns: RecordColumns) -> Extracted:
    """Extract IDs, event times, and faults from records as a worker does. An unreadable header name is also a fault."""
    if columns.extracted is None:
        extracted = extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
    else:
        headers = [[*own, (EXTRACTED, passed)] for own, passed in zip(columns.headers, columns.extracted, strict=True)]
        extracted = extract.again(columns.keys, columns.values, headers, columns.timestamps_ms)
    if not columns.odd_names:
        return extracted
    odd = {row: ODD_HEADER_NAME for row, offset in enumerate(columns.offsets) if offset in columns.odd_names}
    ids = [None if row in odd else own for row, own in enumerate(extracted.ids)]
    return replace(extracted, ids=ids, faults=extracted.faults | odd)


def header(headers: Headers, name: str) -> bytes | None:
    """Return the value of the last header with this name, because a worker's headers follow the producer's headers."""
    for each, content in reversed(headers):
        if each == name:
            return content
    return None


def parse_source(content: bytes | None, topics: Sequence[str]) -> Source | None:
    """Parse ``topic/partition/offset``. Return None for any other content or for a topic that is not in ``topics``."""
    if content is None:
        return None
    feed, _, offset = content.rpartition(b"/")
    found = _feed_of(feed, tuple(topics))
    if found is None or not offset.isdigit():
        return None
    if len(content) - content.index(b"/") - len("//") > MOST_DIGITS:
        return None
    return Source(*found, int(offset))


@lru_cache(maxsize=100_000)
def _feed_of(content: bytes, topics: tuple[str, ...]) -> tuple[int, int] | None:
    """Parse ``topic/partition``, and return the topic's index and the partition, or None for other content."""
    topic, _, partition = content.decode("utf-8", "replace").partition("/")
    if topic not in topics or not (partition.isascii() and partition.isdecimal()):
        return None
    return topics.index(topic), int(partition)


def forwarded_by_replay(headers: Headers, topics: Sequence[str]) -> bool:
    """Return whether `dedup replay` forwarded a record as late, according to the record's last two headers."""
    if len(headers) < 2 or tuple(headers[-2]) != (VERDICT_HEADER, b"late"):  # noqa: PLR2004  # the verdict and the position
        return False
    name, place = headers[-1]
    return name == REPLAYED_HEADER and parse_source(place, topics) is not None


def parse_time_ms(content: bytes | None) -> int | None:
    """Parse a time in ms from ASCII decimal digits. Return None for other content, or if the time does not fit into 64
    bits.
    """
    if content is None or not content.removeprefix(b"-").isdigit() or len(content) > _MOST_TIME_CHARACTERS:
        return None
    time_ms = int(content)
    return time_ms if -(1 << 63) <= time_ms < 1 << 63 else None


def _as_in_source(
    key: bytes | None, value: bytes | None, headers: Headers, tail: Sequence[str]
) -> tuple[bytes, bytes, str]:
    """Return the first three fields of `Filed` for a record to which a worker added the headers ``tail``."""
    stands_for = b""
    if headers and headers[-1][0] == DIGEST_HEADER:
        stands_for = headers[-1][1] or b""
        headers = headers[:-1]
    timestamp_ms = parse_time_ms(header(headers, TIMESTAMP_HEADER))
    whole = tuple(name for name, _ in headers[-len(tail) :]) == tuple(tail)
    original = headers[: -len(tail)] if whole else headers
    reason = (header(headers, REASON_HEADER) or b"").decode("utf-8", "replace")
    if reason == ODD_HEADER_NAME.code:
        original = ()  # The source record's headers are unreadable, so they are not compared.
    time_ms = _NO_TIME_MS if timestamp_ms is None else timestamp_ms
    return digest(key, value, original, time_ms), stands_for, reason
