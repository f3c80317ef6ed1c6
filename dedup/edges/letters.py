"""Dead letters of a sink: sent once, although the rows around them go into another system.

They are sent while the database's transaction is open, hence while its fence is ours. In the same Kafka transaction the
sink's consumer group commits the offset after the last letter. If the database is behind that offset when a sink starts
(the process died before the database committed, or it is another database), records are read again that may have a
letter already: then the letters themselves, in their topic, say which.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dedup.edges.outbox import DEADLINE_MS, PAUSE_S, OutboxOptions
from dedup.errors import CommitUnknown
from dedup.session.client import KafkaWire
from dedup.session.fetch import FeedFetcher
from dedup.session.record_batch import Header, Line, fill
from dedup.session.transaction import Session
from dedup.session.wire import TopicPartition
from dedup.worker.publish import DETAIL, REASON, SOURCE, TIMESTAMP
from dedup.worker.starting import bounds_of, committed_offset

WAIT_MS: Final = 100
log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Letter:
    """A record that can be no row, as it was."""

    source: TopicPartition
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    code: str
    detail: str


@dataclass(slots=True)
class _Desk:
    session: Session
    sent_to: int
    """The group's offset: after the last letter, of whichever owner."""
    there: set[int]
    """Offsets of the source, from where the database was at the start, whose letters are in the topic."""


class Letters:
    """The dead letters of one sink."""

    def __init__(self, wire: KafkaWire, name: str, topic: str, partitions: int, options: OutboxOptions) -> None:
        self._wire: Final = wire
        self._group: Final = f"{name}.sink"
        self._topic: Final = topic
        self._count: Final = partitions
        self._options: Final = options
        self._desks: Final[dict[TopicPartition, _Desk]] = {}

    async def open(self, positions: Mapping[TopicPartition, int]) -> None:
        """Earlier owners can send no more letters, and it is known which are there of records not yet in the database.

        ``positions``: where the database is. Raises CommitUnknown.
        """
        for source, position in positions.items():
            session = Session(
                self._wire,
                f"{self._group}.{source.partition}",
                self._group,
                timeout_ms=self._options.transaction_timeout_ms,
                deadline_ms=DEADLINE_MS,
            )
            await session.open()
            sent_to = await committed_offset(self._wire, self._group, source) or 0
            there = await self._in_topic(source, position, sent_to) if position < sent_to else set()
            self._desks[source] = _Desk(session, sent_to, there)

    async def _in_topic(self, source: TopicPartition, begin: int, end: int) -> set[int]:
        """Return which records of a range have a letter."""
        target, own = self._target(source), f"{source.topic}/{source.partition}/".encode()
        bounds = await bounds_of(self._wire, target)
        fetcher = FeedFetcher(self._wire, wait_ms=WAIT_MS)
        fetcher.begin(target, bounds.start)
        found: set[int] = set()
        while (fetcher.position(target) or 0) < bounds.end:
            for answer in await fetcher.poll([target]):
                places = [value for headers in answer.columns.headers for name, value in headers if name == SOURCE]
                offsets = {
                    int(place.removeprefix(own)) for place in places if place is not None and place.startswith(own)
                }
                found |= {offset for offset in offsets if begin <= offset < end}
        fetcher.forget()
        return found

    def _target(self, source: TopicPartition) -> TopicPartition:
        return TopicPartition(self._topic, source.partition % self._count)

    async def send(self, letters: Sequence[Letter]) -> int:
        """All letters are in the topic, once; return how many were not there yet. Raises TaskMigrated."""
        by_source: defaultdict[TopicPartition, list[Letter]] = defaultdict(list)
        for letter in letters:
            if letter.offset not in self._desks[letter.source].there:
                by_source[letter.source].append(letter)
        for source, part in by_source.items():
            await self._send(source, sorted(part, key=lambda letter: letter.offset))
        return sum(map(len, by_source.values()))

    def settled(self, positions: Mapping[TopicPartition, int]) -> None:
        """The database has everything below these offsets: nobody asks for letters of it again."""
        for source, position in positions.items():
            desk = self._desks[source]
            desk.there = {offset for offset in desk.there if offset >= position}

    async def _send(self, source: TopicPartition, letters: Sequence[Letter]) -> None:
        desk = self._desks[source]
        offsets = {letter.offset for letter in letters}
        # Never back: an earlier owner's letters may be above.
        end = max(desk.sent_to, *(offset + 1 for offset in offsets))
        while not offsets <= desk.there:
            try:
                desk.session.add(fill(self._target(source), map(_line, letters), compression=self._options.compression))
                await desk.session.commit({source: end})
            except CommitUnknown as unknown:
                log.warning("%s", unknown)
                desk.there |= await self._look_again(source, desk, offsets)
            else:
                desk.there |= offsets
        desk.sent_to = end

    async def _look_again(self, source: TopicPartition, desk: _Desk, offsets: set[int]) -> set[int]:
        """Return which of these records have their letter now, in a new epoch of ours."""
        while True:
            try:
                # An owner of later would have fenced the database first, and that row is locked by us.
                await desk.session.open()
                return offsets & await self._in_topic(source, min(offsets), max(offsets) + 1)
            except CommitUnknown as again:
                log.warning("waiting for the broker: %s", again)
                await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        """What was not committed is given up."""
        for desk in self._desks.values():
            await desk.session.drop()


def _line(letter: Letter) -> Line:
    place = f"{letter.source.topic}/{letter.source.partition}/{letter.offset}"
    added: list[Header] = [
        (REASON, letter.code.encode()),
        (DETAIL, letter.detail.encode()),
        (SOURCE, place.encode()),
        (TIMESTAMP, str(letter.timestamp_ms).encode()),
    ]
    return letter.offset, max(0, letter.timestamp_ms), letter.key, letter.value, [*letter.headers, *added]
