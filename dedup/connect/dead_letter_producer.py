"""Sends a sink's dead letters exactly once, although the rows around them are written to another system.

The dead letters are sent while the database transaction holds the partition's lock, so no other process can take the
partition over. The same Kafka transaction commits the offset after the last dead letter for the sink's consumer group.
When a sink starts, the database may be behind the committed offset, because the process died before the database
committed or because the database is a different one. If the database is behind, the sink reads records that may already
have dead letters, so it first reads the dead-letter topic to find those dead letters.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dedup.connect.fenced_consumer import FROM_START, TopicReader
from dedup.connect.transactional_outbox import DEADLINE_MS, PAUSE_S
from dedup.errors import BrokerUnavailable, CommitUnknown
from dedup.kafka.client import KafkaWire
from dedup.kafka.consumer import TopicCheck
from dedup.kafka.record_batch import Columns, Header, Line, fill
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import Position, TopicPartition
from dedup.worker.offsets import committed_offset
from dedup.worker.record_collector import DETAIL, REASON, SOURCE, TIMESTAMP

if TYPE_CHECKING:
    from dedup.settings import Settings

WAIT_MS: Final = 100
log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A record of the source topic that cannot become a row, and the reason."""

    source: TopicPartition
    columns: Columns
    at: int
    """The record's index in its batch."""
    code: str
    detail: str

    @property
    def offset(self) -> int:
        """The record's offset in the source topic."""
        return self.columns.offsets[self.at]


@dataclass(slots=True)
class _Partition:
    session: Session
    sent_to: int
    """The group's offset, which is after the last dead letter of any owner."""
    sent: set[int]
    """Source offsets at or after the database's position at startup whose dead letters are in the topic."""


class DeadLetterProducer:
    """Sends the dead letters of one sink."""

    def __init__(self, wire: KafkaWire, name: str, topic: str, partition_count: int, settings: Settings) -> None:
        self._wire: Final = wire
        self._group: Final = f"{name}.sink"
        self._topic: Final = topic
        self._partition_count: Final = partition_count
        self._settings: Final = settings
        self._partitions: Final[dict[TopicPartition, _Partition]] = {}

    async def open(self, positions: Mapping[TopicPartition, int]) -> None:
        """Fence earlier owners, and find the dead letters of records that the database has not committed yet.

        ``positions`` maps each source partition to its position in the database. Raises CommitUnknown if no broker
        responds in time.
        """
        for source, position in positions.items():
            session = Session(
                self._wire,
                f"{self._group}.{source.partition}",
                self._group,
                timeout_ms=self._settings.transaction_timeout_ms,
                deadline_ms=DEADLINE_MS,
            )
            await session.open()
            sent_to = await committed_offset(self._wire, self._group, source) or 0
            sent = await self._in_topic(source, position, sent_to) if position < sent_to else set()
            self._partitions[source] = _Partition(session, sent_to, sent)

    async def _in_topic(self, source: TopicPartition, begin: int, end: int) -> set[int]:
        """Return the source offsets in a range whose dead letters are in the topic."""
        target, own = self._target(source), f"{source.topic}/{source.partition}/".encode()
        reader = TopicReader(self._wire, await TopicCheck.of(self._wire, target.topic), wait_ms=WAIT_MS)
        await reader.begin(target, FROM_START)
        found: set[int] = set()
        while not reader.at_end:
            for answer in await reader.poll():
                places = [value for headers in answer.columns.headers for name, value in headers if name == SOURCE]
                offsets = {
                    int(place.removeprefix(own)) for place in places if place is not None and place.startswith(own)
                }
                found |= {offset for offset in offsets if begin <= offset < end}
        reader.close()
        return found

    def _target(self, source: TopicPartition) -> TopicPartition:
        return TopicPartition(self._topic, source.partition % self._partition_count)

    async def send(self, rejected: Sequence[RejectedRecord]) -> int:
        """Send the dead letters that are not in the topic yet; return their number. Raises TaskMigrated if fenced."""
        by_source: defaultdict[TopicPartition, list[RejectedRecord]] = defaultdict(list)
        for record in rejected:
            if record.offset not in self._partitions[record.source].sent:
                by_source[record.source].append(record)
        for source, records in by_source.items():
            await self._send(source, sorted(records, key=lambda record: record.offset))
        return sum(map(len, by_source.values()))

    def settled(self, positions: Mapping[TopicPartition, int]) -> None:
        """Forget the dead letters below the given offsets, because the database has committed these offsets."""
        for source, position in positions.items():
            state = self._partitions[source]
            state.sent = {offset for offset in state.sent if offset >= position}

    async def _send(self, source: TopicPartition, records: Sequence[RejectedRecord]) -> None:
        state = self._partitions[source]
        offsets = {record.offset for record in records}
        # Never move the offset back: an earlier owner may have sent dead letters of later records.
        end = max(state.sent_to, *(offset + 1 for offset in offsets))
        compression = self._settings.topics.compression
        while not offsets <= state.sent:
            try:
                state.session.add(fill(self._target(source), map(_line, records), compression=compression))
                await state.session.commit({source: Position(end)})
            except CommitUnknown as unknown:
                log.warning("%s", unknown)
                state.sent |= await self._sent_of(source, state, offsets)
            else:
                state.sent |= offsets
        state.sent_to = end

    async def _sent_of(self, source: TopicPartition, state: _Partition, offsets: set[int]) -> set[int]:
        """Begin a new epoch, and return the offsets whose dead letters are in the topic."""
        while True:
            try:
                # This cannot fence a successor, because a successor must first update the row in the database that this
                # process has locked.
                await state.session.open()
                return offsets & await self._in_topic(source, min(offsets), max(offsets) + 1)
            except (BrokerUnavailable, CommitUnknown) as again:
                log.warning("waiting for the broker: %s", again)
                await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        """Abort everything that was not committed."""
        for state in self._partitions.values():
            await state.session.drop()


def _line(record: RejectedRecord) -> Line:
    columns, at = record.columns, record.at
    timestamp_ms = columns.timestamps_ms[at]
    added: list[Header] = [
        (REASON, record.code.encode()),
        (DETAIL, record.detail.encode()),
        (SOURCE, f"{record.source.topic}/{record.source.partition}/{record.offset}".encode()),
        (TIMESTAMP, str(timestamp_ms).encode()),
    ]
    return record.offset, max(0, timestamp_ms), columns.keys[at], columns.values[at], [*columns.headers[at], *added]
