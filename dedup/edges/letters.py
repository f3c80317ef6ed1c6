"""Dead letters of a sink: sent once, although the rows around them go into another system.

They are sent while the database's transaction is open, hence while its fence is ours. In the same Kafka transaction the
sink's consumer group commits the offset after the last letter; if the process dies before the database commits, the
same records are read again, and letters below that offset are known to be there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dedup.edges.outbox import DEADLINE_MS, PAUSE_S, OutboxOptions
from dedup.errors import CommitUnknown
from dedup.session.record_batch import Header, Line, fill
from dedup.session.transaction import Session
from dedup.session.wire import TopicPartition, Wire
from dedup.worker.publish import DETAIL, REASON, SOURCE, TIMESTAMP
from dedup.worker.starting import committed_offset

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
    """Letters below this offset of the source are in the topic."""


class Letters:
    """The dead letters of one sink."""

    def __init__(self, wire: Wire, name: str, topic: str, partitions: int, options: OutboxOptions) -> None:
        self._wire: Final = wire
        self._group: Final = f"{name}.sink"
        self._topic: Final = topic
        self._count: Final = partitions
        self._options: Final = options
        self._desks: Final[dict[TopicPartition, _Desk]] = {}

    async def open(self, sources: Sequence[TopicPartition]) -> None:
        """Earlier owners can send no more letters, and it is known which are there. Raises CommitUnknown."""
        for source in sources:
            session = Session(
                self._wire,
                f"{self._group}.{source.partition}",
                self._group,
                timeout_ms=self._options.transaction_timeout_ms,
                deadline_ms=DEADLINE_MS,
            )
            await session.open()
            self._desks[source] = _Desk(session, await committed_offset(self._wire, self._group, source) or 0)

    async def send(self, letters: Sequence[Letter]) -> int:
        """All letters are in the topic, once; return how many were not there yet. Raises TaskMigrated."""
        by_source: defaultdict[TopicPartition, list[Letter]] = defaultdict(list)
        for letter in letters:
            if letter.offset >= self._desks[letter.source].sent_to:
                by_source[letter.source].append(letter)
        for source, part in by_source.items():
            await self._send(source, sorted(part, key=lambda letter: letter.offset))
        return sum(map(len, by_source.values()))

    async def _send(self, source: TopicPartition, letters: Sequence[Letter]) -> None:
        desk = self._desks[source]
        end = letters[-1].offset + 1
        target = TopicPartition(self._topic, source.partition % self._count)
        while desk.sent_to < end:
            try:
                desk.session.add(fill(target, map(_line, letters), compression=self._options.compression))
                await desk.session.commit({source: end})
            except CommitUnknown as unknown:
                log.warning("%s", unknown)
                await self._look_again(source, desk)
            else:
                desk.sent_to = end

    async def _look_again(self, source: TopicPartition, desk: _Desk) -> None:
        while True:
            try:
                await desk.session.open()
                # An owner of later would have fenced the database first, and that row is locked by us.
                desk.sent_to = await committed_offset(self._wire, self._group, source) or 0
            except CommitUnknown as again:
                log.warning("waiting for the broker: %s", again)
                await asyncio.sleep(PAUSE_S)
            else:
                return

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
