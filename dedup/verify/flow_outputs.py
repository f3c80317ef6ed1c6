"""Computes the records that a flow had to send for each source record, and reads the records that the flow sent."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from dedup.core.extract_one import Fault
from dedup.core.flow import Flow, FlowRecord, yielded
from dedup.core.partitioner import partitions as partitions_of
from dedup.core.window import Source
from dedup.verify.compare import digest
from dedup.verify.evidence import SOURCE_HEADER, VERDICT_HEADER, SourceTuple, forwarded_by_replay, header, parse_source
from dedup.verify.kafka_reader import Bounds, OpenTransaction, Read

PART_HEADER: Final = "dedup-part"
WHY_UNORDERED: Final = "the log has lost records between them, so what the flow made of them cannot be checked"
MOST_PARTS: Final = 1024
"""A number that exceeds the maximum number of records that a flow may yield for one record."""
_TABLE: Final = """
CREATE TABLE sent (topic INT, feed INT, position INT, target INT, part INT, at INT, time_ms INT, content BLOB,
    taken INT DEFAULT 0);
CREATE INDEX by_source ON sent (topic, feed, position);
CREATE TABLE matched (task INT, target INT, part INT, at INT, position INT);
"""
_BETWEEN: Final = """
SELECT position, target, part, at, time_ms, content FROM sent
WHERE topic=? AND feed=? AND taken=0 AND position BETWEEN ? AND ? ORDER BY target, part, at
"""
_DISPLACED: Final = """
SELECT target, part, at FROM (
    SELECT *, lag(position) OVER (PARTITION BY task, target, part ORDER BY at) AS before FROM matched
) WHERE position <= before ORDER BY target, part, at
"""
_CACHE_KIB: Final = 16_384
_FILE: Final = "flow outputs"
"""A name that no topic can have, so that the file of this `SideTopic` differs from the file of every real topic."""


class FlowOutput(NamedTuple):
    """A record that a flow yielded, as it appears in a topic."""

    target: int
    """The index of the record's topic in `Topology.forwards_to`."""
    partition: int
    offset: int
    time_ms: int
    content: bytes
    """The digest of the record's key, value, and headers."""


class FlowOutputs:
    """The flow of a topology, and the records in the flow's target topics, indexed by source position."""

    def __init__(self, flow: Flow, topics: Sequence[str], directory: str) -> None:
        self.flow: Final = flow
        self.topics: Final = tuple(topics)
        self.counts: Final[dict[str, int]] = {}
        """The partition count of each topic."""
        self.untimed: Final[set[int]] = set()
        """The topics whose timestamps come from a broker."""
        self.incomplete: Final[set[tuple[int, int]]] = set()
        """The topics and partitions that may have lost records or that have a transaction that stays open."""
        self.replayed = 0
        """The number of records that `dedup replay` forwarded as late before the topology had a flow."""
        self._db: Final = sqlite3.connect(Path(directory) / _FILE, isolation_level=None)
        self._db.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{_CACHE_KIB};")
        self._db.executescript(_TABLE)

    def read(
        self, read: Read, bounds: Mapping[str, Mapping[int, Bounds]], sources: Sequence[str], compacted: Collection[str]
    ) -> None:
        """Index the committed records of all topics within the bounds.

        If ``read`` finds that records were deleted meanwhile, it must change the bounds.
        """
        for target, topic in enumerate(self.topics):
            self.counts[topic] = len(bounds[topic])
            for partition, each in list(bounds[topic].items()):
                try:
                    for columns in read(topic, partition, each.low, each.high):
                        if columns.broker_time:
                            self.untimed.add(target)
                        rows = []
                        for row, headers in enumerate(columns.headers):
                            if headers and forwarded_by_replay(headers, sources):
                                self.replayed += 1
                                continue
                            source = parse_source(header(headers, SOURCE_HEADER), sources) or (None, None, None)
                            content = digest(columns.keys[row], columns.values[row], headers, 0)
                            place = (target, partition, columns.offsets[row], columns.timestamps_ms[row])
                            rows.append((*source, *place, content))
                        self._db.executemany("INSERT INTO sent VALUES (?,?,?,?,?,?,?,?,0)", rows)
                except OpenTransaction:
                    self.incomplete.add((target, partition))
                if bounds[topic][partition].start_deleted or topic in compacted:
                    self.incomplete.add((target, partition))

    def take(self, sources: Sequence[SourceTuple]) -> dict[SourceTuple, list[FlowOutput]]:
        """Take and return the records that the flow made from these source records."""
        wanted: dict[tuple[int, int], list[int]] = {}
        for topic, partition, offset in sources:
            wanted.setdefault((topic, partition), []).append(offset)
        found: dict[SourceTuple, list[FlowOutput]] = {}
        for feed, offsets in wanted.items():
            there = set(offsets)
            for offset, *row in self._db.execute(_BETWEEN, (*feed, min(offsets), max(offsets))):
                if offset in there:
                    found.setdefault((*feed, offset), []).append(FlowOutput(*row))
        self._db.executemany("UPDATE sent SET taken=1 WHERE topic=? AND feed=? AND position=?", found)
        return found

    def give_back(self, feed: tuple[int, int] | None) -> None:
        """Undo `take` for the records of a source partition, or for all records if ``feed`` is None."""
        where = "taken" if feed is None else "taken AND topic=? AND feed=?"
        self._db.execute(f"UPDATE sent SET taken=0 WHERE {where}", feed or ())  # noqa: S608  # no input

    def left(self) -> Iterator[tuple[Source | None, str]]:
        """Yield the source record, if known, and the place of each record that `take` has not taken."""
        ask = "SELECT topic, feed, position, target, part, at FROM sent WHERE taken=0 ORDER BY target, part, at"
        for *source, target, partition, offset in self._db.execute(ask):
            yield None if source[0] is None else Source(*source), self.place(target, partition, offset)

    def first_offset(self, partition: int) -> int | None:
        """Return the lowest offset that a record names in a partition of the first source topic, or None."""
        ask = "SELECT min(position) FROM sent WHERE topic=0 AND feed=?"
        found: int | None = self._db.execute(ask, (partition,)).fetchone()[0]
        return found

    def place(self, target: int, partition: int, offset: int) -> str:
        """Return the topic, partition, and offset of a record as text for reports."""
        return f"{self.topics[target]}/{partition} offset {offset}"

    def expected(
        self, record: FlowRecord, own: bytes | None, kept: int | None, position: bytes
    ) -> list[FlowOutput] | Fault:
        """Return the records that the flow must have sent for a record, or the fault if the flow fails.

        ``own`` is the record's ID, and ``position`` is its position in the source topics. If ``kept`` is given, each
        result with an unchanged key that goes to the first topic is written to the partition ``kept``. The key
        determines the partition of every other result. The offset field of each result contains its number among the
        flow's results, counted from 1.
        """
        made = yielded(self.flow, record, self.topics)
        if isinstance(made, Fault):
            return made
        found = []
        for part, each in enumerate(made, start=1):
            headers = list(each.headers)
            if record.verdict != "unique":
                headers.append((VERDICT_HEADER, record.verdict.encode()))
            headers.append((SOURCE_HEADER, position))
            if len(made) > 1:
                headers.append((PART_HEADER, f"{part}/{len(made)}".encode()))
            target = self.topics.index(each.topic)
            in_place = target == 0 and each.key == record.key and kept is not None
            key = each.key if each.key is not None else own or b""
            partition = kept if in_place else partitions_of([key], self.counts[each.topic] or 1)[0]
            content = digest(each.key, each.value, headers, 0)
            found.append(FlowOutput(target, partition or 0, part, record.timestamp_ms, content))
        return sorted(found)

    def equal(self, wanted: Sequence[FlowOutput], sent: Sequence[FlowOutput], *, stamped: bool) -> bool:
        """Return whether the records in the topics are those that the flow must have sent, in the same order."""
        return len(wanted) == len(sent) and all(
            (ours.target, ours.partition, ours.content) == (theirs.target, theirs.partition, theirs.content)
            and (not stamped or ours.target in self.untimed or ours.time_ms == theirs.time_ms)
            for ours, theirs in zip(wanted, sent, strict=True)
        )

    def may_lack(self, wanted: Sequence[FlowOutput], sent: Sequence[FlowOutput]) -> bool:
        """Return whether the topics contain only expected records, and lack records only in incomplete partitions."""
        there = [(each.target, each.partition, each.content) for each in sent]
        for each in wanted:
            key = (each.target, each.partition, each.content)
            if key in there:
                there.remove(key)
            elif key[:2] not in self.incomplete:
                return False
        return not there

    def match(self, task: int, position: int, sent: Sequence[FlowOutput]) -> None:
        """Store, for `displaced`, the records that a task made from the record at a position in the task's log."""
        rows = [
            (task, each.target, each.partition, each.offset, position * MOST_PARTS + part)
            for part, each in enumerate(sent)
        ]
        self._db.executemany("INSERT INTO matched VALUES (?,?,?,?,?)", rows)

    def displaced(self) -> Iterator[str]:
        """Yield the place of each record whose log position is not greater than the previously written record's."""
        for place in self._db.execute(_DISPLACED):
            yield self.place(*place)

    def close(self) -> None:
        """Close the SQLite file."""
        self._db.close()
