"""Reads the records of the late and dead-letter topics, and indexes them by their source records."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from dedup.core.extract import Extracted, Extractor
from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.core.window import Source
from dedup.verify.compare import Headers, digest
from dedup.verify.kafka_reader import Bounds, KafkaReader, OpenTransaction, RecordColumns
from dedup.verify.spill import condensed

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
LATE_TAIL: Final = (SOURCE_HEADER, TIMESTAMP_HEADER)
DEAD_TAIL: Final = (REASON_HEADER, DETAIL_HEADER, SOURCE_HEADER, TIMESTAMP_HEADER)
"""The headers that a worker appends, in this order, to the source record's own headers."""

_MOST_DIGITS: Final = 18
_NO_TIME_MS: Final = -(1 << 62)
_CACHE_KIB: Final = 16_384
_TABLE: Final = """
CREATE TABLE filed (topic INT, feed INT, position INT, digest BLOB, stands_for BLOB, reason TEXT, part INT, at INT,
    at_ms INT, again INT DEFAULT 0);
CREATE INDEX by_source ON filed (topic, feed, position);
CREATE TABLE strangers (part INT, at INT);
"""


class Filed(NamedTuple):
    """One record of a side topic."""

    digest: bytes
    """Digest of the record as it was in the source, with its original timestamp."""
    stands_for: bytes
    """The digest that replaces a value that is too large for the topic; empty if the record is complete."""
    reason: str
    partition: int
    offset: int
    at_ms: int | None = None
    """The time at which the broker appended the record; None if the topic does not use LogAppendTime."""


class SideTopic:
    """A late or dead-letter topic, indexed by source position in an SQLite file."""

    def __init__(self, name: str, path: str, *, complete: bool) -> None:
        self.name: Final = name
        self.complete = complete
        """False if retention deleted the beginning of the topic, so that a missing record proves nothing."""
        # There is no journal, because no other process reads the file and the file is deleted with its directory.
        self._db: Final = sqlite3.connect(path, isolation_level=None)
        self._db.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{_CACHE_KIB};")
        self._db.executescript(_TABLE)
        self._empty = True

    def place(self, filed: Filed) -> str:
        """Return the position of a record as shown in reports."""
        return f"{self.name}/{filed.partition} offset {filed.offset}"

    def file(self, rows: Sequence[tuple[Source, Filed]], strangers: Sequence[tuple[int, int]]) -> None:
        """Store records by source position; ``strangers`` are the positions of records that name no source record."""
        self._empty = self._empty and not rows
        self._db.executemany(
            "INSERT INTO filed VALUES (?,?,?,?,?,?,?,?,?,0)", [(*source, *filed) for source, filed in rows]
        )
        self._db.executemany("INSERT INTO strangers VALUES (?,?)", strangers)

    def take(self, sources: Sequence[Source]) -> dict[Source, Filed]:
        """Remove and return the entries of these records. Entries that remain at the end belong to no source record."""
        if self._empty:
            return {}
        wanted: dict[tuple[int, int], list[int]] = {}
        for source in sources:
            wanted.setdefault((source.topic, source.partition), []).append(source.offset)
        found: dict[Source, Filed] = {}
        for feed, offsets in wanted.items():
            there = set(offsets)
            # One query is enough for all records, because the records of a batch have nearby offsets.
            for offset, *row in self._between(feed, min(offsets), max(offsets)):
                if offset in there:
                    found.setdefault(Source(*feed, offset), Filed(*row))
        once = "DELETE FROM filed WHERE rowid = (SELECT min(rowid) FROM filed WHERE topic=? AND feed=? AND position=?)"
        self._db.executemany(once, found)
        self._db.executemany("UPDATE filed SET again=1 WHERE topic=? AND feed=? AND position=?", found)
        return found

    def _between(self, feed: tuple[int, int], first: int, last: int) -> sqlite3.Cursor:
        columns = "position, digest, stands_for, reason, part, at, at_ms"
        where = "topic=? AND feed=? AND position BETWEEN ? AND ?"
        return self._db.execute(f"SELECT {columns} FROM filed WHERE {where} ORDER BY rowid", (*feed, first, last))  # noqa: S608

    def holds(self, source: Source) -> bool:
        """Return whether a record has an entry that is not taken yet."""
        ask = "SELECT 1 FROM filed WHERE topic=? AND feed=? AND position=? LIMIT 1"
        return not self._empty and self._db.execute(ask, source).fetchone() is not None

    def first_offset(self, partition: int) -> int | None:
        """Return the lowest source offset of the entries for a partition of the first source topic; None if empty."""
        ask = "SELECT min(position) FROM filed WHERE topic=0 AND feed=?"
        found: int | None = self._db.execute(ask, (partition,)).fetchone()[0]
        return found

    def count_below(self, feed: tuple[int, int], offset: int) -> int:
        """Return the number of entries that are not taken yet for a source partition below an offset."""
        ask = "SELECT count(*) FROM filed WHERE topic=? AND feed=? AND position<?"
        return int(self._db.execute(ask, (*feed, offset)).fetchone()[0])

    def left(self) -> Iterator[tuple[Source, Filed, bool]]:
        """Yield each entry that was not taken, and whether another copy of the same record was taken."""
        for row in self._db.execute("SELECT * FROM filed ORDER BY part, at"):
            yield Source(*row[:3]), Filed(*row[3:9]), bool(row[9])

    def strangers(self) -> Iterator[tuple[int, int]]:
        """Yield the position of each record that names no source record, as (partition, offset)."""
        yield from self._db.execute("SELECT part, at FROM strangers ORDER BY part, at")

    def close(self) -> None:
        """Close the SQLite file."""
        self._db.close()


def extracted_of(extract: Extractor, columns: RecordColumns) -> Extracted:
    """Return IDs, times, and faults of records as a worker extracts them, including faults in header names."""
    extracted = extract(columns.keys, columns.values, columns.headers, columns.timestamps_ms)
    if not columns.odd_names:
        return extracted
    odd = {row: ODD_HEADER_NAME for row, offset in enumerate(columns.offsets) if offset in columns.odd_names}
    return replace(extracted, faults=extracted.faults | odd)


def header(headers: Headers, name: str) -> bytes | None:
    """Return the value of the last header with a name, because a worker appends its headers to the producer's."""
    for each, content in reversed(headers):
        if each == name:
            return content
    return None


def parse_source(content: bytes | None, topics: Sequence[str]) -> Source | None:
    """Parse a source position in the form ``topic/partition/offset``; return None unless it is in one of ``topics``."""
    if content is None:
        return None
    topic, _, position = content.decode("utf-8", "replace").partition("/")
    partition, _, offset = position.partition("/")
    if topic not in topics or not partition.isdecimal() or not offset.isdecimal():
        return None
    if len(partition) + len(offset) > _MOST_DIGITS:
        return None
    return Source(topics.index(topic), int(partition), int(offset))


def forwarded_by_replay(headers: Headers, topics: Sequence[str]) -> bool:
    """Return whether `dedup replay` wrote this late record to the output, according to its last two headers."""
    if len(headers) < 2 or tuple(headers[-2]) != (VERDICT_HEADER, b"late"):  # noqa: PLR2004  # verdict and position
        return False
    name, place = headers[-1]
    return name == REPLAYED_HEADER and parse_source(place, topics) is not None


def parse_time_ms(content: bytes | None) -> int | None:
    """Parse a time in ms that is written in ASCII decimal digits; return None for any other content."""
    if content is None or not content.removeprefix(b"-").isdigit():
        return None
    return int(content)


def read_side_topic(
    reader: KafkaReader, side: SideTopic, bounds: Mapping[int, Bounds], topics: Sequence[str], tail: Sequence[str]
) -> None:
    """Read the committed records of a side topic within the bounds, and store them in ``side``."""
    for partition, each in bounds.items():
        try:
            for columns in reader.read(side.name, partition, each.low, each.high):
                filed: list[tuple[Source, Filed]] = []
                strangers: list[tuple[int, int]] = []
                for row, offset in enumerate(columns.offsets):
                    record = (columns.keys[row], columns.values[row], columns.headers[row])
                    at_ms = columns.timestamps_ms[row] if columns.broker_time else None
                    source, found = _filed(record, (partition, offset, at_ms), topics, tail)
                    if source is None:
                        strangers.append((partition, offset))
                    else:
                        filed.append((source, found))
                side.file(filed, strangers)
        except OpenTransaction:
            side.complete = False


def _filed(
    record: tuple[bytes | None, bytes | None, Headers],
    place: tuple[int, int, int | None],
    topics: Sequence[str],
    tail: Sequence[str],
) -> tuple[Source | None, Filed]:
    key, value, headers = record
    source = parse_source(header(headers, SOURCE_HEADER), topics)
    stands_for = b""
    if headers and headers[-1][0] == DIGEST_HEADER:
        stands_for = headers[-1][1] or b""
        headers = headers[:-1]
    timestamp_ms = parse_time_ms(header(headers, TIMESTAMP_HEADER))
    whole = tuple(name for name, _ in headers[-len(tail) :]) == tuple(tail)
    original = headers[: -len(tail)] if whole else headers
    reason = (header(headers, REASON_HEADER) or b"").decode("utf-8", "replace")
    if reason == ODD_HEADER_NAME.code:
        original = ()  # the source's headers are unreadable, so they are not compared
    time_ms = _NO_TIME_MS if timestamp_ms is None else timestamp_ms
    return source, Filed(digest(key, condensed(value), original, time_ms), stands_for, reason, *place)
