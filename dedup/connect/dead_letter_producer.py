"""Sends a sink's dead letters exactly once, even though the sink writes its rows to a database, not to Kafka.

The sink sends dead letters before it commits the database transaction, which holds the partition's lock. If the sink
crashes between the commit to Kafka and the commit to the database, it reads the same records again. At startup, the
sink therefore reads the dead-letter topic to find the records that already have a dead letter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dedup.connect.fenced_consumer import FROM_START, TopicReader
from dedup.connect.open_database import START_WITHIN_S
from dedup.connect.transactional_outbox import PAUSE_S
from dedup.errors import BrokerUnavailable, CommitUnknown, ProducerForgotten
from dedup.kafka.client import KafkaWire
from dedup.kafka.consumer import TopicCheck
from dedup.kafka.outage_lines import AWAY
from dedup.kafka.record_batch import Columns, Header, Line, fill
from dedup.kafka.topic_admin import Topic
from dedup.kafka.transactional_producer import Session
from dedup.kafka.wire import NoAnswer, Position, TopicPartition, patience
from dedup.worker.offsets import committed_offset
from dedup.worker.record_collector import DETAIL, REASON, SOURCE, TIMESTAMP
from dedup.worker.task_manager import ended

if TYPE_CHECKING:
    from dedup.settings import Settings

T = TypeVar("T")
_LOOK_S: Final = 0.2
_STOP_WITHIN_S: Final = 1.0
"""How long a stop waits for brokers that may be about to answer."""
log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class DeadLetterLog:
    """Logs the first dead letter for each reason."""

    name: str
    topic: str
    """The dead-letter topic."""
    _logged: set[str] = field(init=False, default_factory=set)

    def note(self, place: str, code: str, detail: str) -> None:
        """Log the dead letter of the record at ``place`` unless one with the same reason code has been logged."""
        if code not in self._logged:
            self._logged.add(code)
            log.warning(
                "%s: %s becomes a dead letter in %s: %s (%s). Later dead letters with this reason are not logged; the "
                "topic holds all of them.",
                self.name,
                place,
                self.topic,
                detail,
                code,
            )


@dataclass(frozen=True, slots=True)
class RejectedRecord:
    """A source record that cannot become a row, and the reason."""

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
    source: TopicPartition
    target: TopicPartition
    session: Session
    sent_to: int = 0
    """The group's committed offset: the offset after the last source record for which any owner sent a dead letter."""
    sent: set[int] = field(default_factory=set)
    """The source offsets of dead letters in the topic, beginning with the database's position at startup."""


class DeadLetterProducer:
    """Sends one sink's dead letters to ``topic``. The sink reads ``source_topic``.

    Once ``stopped`` returns True, the methods stop waiting for unresponsive brokers.
    """

    def __init__(
        self,
        wire: KafkaWire,
        name: str,
        source_topic: str,
        topic: Topic,
        settings: Settings,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._wire: Final = wire
        self._stopped: Final = stopped
        self._group: Final = f"{name}.sink"
        self._source_topic: Final = source_topic
        self._topic: Final = topic
        self._settings: Final = settings
        self._partitions: Final[dict[int, _Partition]] = {}
        self._log: Final = DeadLetterLog(self._group, topic.name)

    async def open(self, positions: Mapping[int, int]) -> None:
        """Fence earlier owners, and find the dead letters of records that are not yet committed in the database.

        ``positions`` maps each source partition to the position stored in the database. Raises CommitUnknown if no
        broker responds in time, and BrokerUnavailable if a partition has no leader or the sink is stopped meanwhile.
        """
        for number, position in positions.items():
            self._partitions[number] = await self._unless_stopped(self._opened(number, position))

    async def _opened(self, number: int, position: int) -> _Partition:
        timeout_ms = self._settings.transaction_timeout_ms
        session = Session(self._wire, f"{self._group}.{number}", self._group, timeout_ms=timeout_ms)
        await session.open()
        target = TopicPartition(self._topic.name, number % self._topic.partitions)
        state = _Partition(TopicPartition(self._source_topic, number), target, session)
        state.sent_to = await committed_offset(self._wire, self._group, state.source) or 0
        state.sent = await self._in_topic(state, range(max(0, position), state.sent_to))
        return state

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``. Raises BrokerUnavailable if the sink is stopped and ``work`` does not end."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and not self._stopped():
                await asyncio.wait({task}, timeout=_LOOK_S)
            await asyncio.wait({task}, timeout=_STOP_WITHIN_S)
            if not task.done():
                raise _interrupted("no broker has said yet which were sent before.")
            return task.result()
        finally:
            await ended([task])

    async def _in_topic(self, state: _Partition, offsets: range) -> set[int]:
        """Return the source offsets in the range ``offsets`` for which the topic already contains dead letters."""
        found: set[int] = set()
        if not offsets:
            return found
        own = f"{state.source.topic}/{state.source.partition}/".encode()
        check = await TopicCheck.of(self._wire, state.target.topic)
        reader = TopicReader(self._wire, check, after_loss="a restart reads the records that are left.")
        try:
            await reader.begin(state.target, FROM_START)
            while not reader.at_end:
                for answer in await reader.poll():
                    places = [value for headers in answer.columns.headers for name, value in headers if name == SOURCE]
                    of_partition = (int(place.removeprefix(own)) for place in places if place and place.startswith(own))
                    found.update(offset for offset in of_partition if offset in offsets)
        finally:
            reader.close()
        return found

    async def send(self, rejected: Sequence[RejectedRecord]) -> int:
        """Send the dead letters that are not yet in the topic, and return how many were sent.

        Raises TaskMigrated if another process has taken over a partition, and BrokerUnavailable if the sink is stopped
        while no broker responds.
        """
        unsent: defaultdict[int, list[RejectedRecord]] = defaultdict(list)
        for record in rejected:
            if record.offset not in self._partitions[record.source.partition].sent:
                unsent[record.source.partition].append(record)
                self._log.note(f"{record.source} offset {record.offset}", record.code, record.detail)
        for number, records in unsent.items():
            await self._send(self._partitions[number], sorted(records, key=lambda record: record.offset))
        return sum(map(len, unsent.values()))

    def settled(self, positions: Mapping[int, int]) -> None:
        """Forget the dead letters of records before ``positions``, because the database has committed these records."""
        for number, position in positions.items():
            state = self._partitions[number]
            state.sent = {offset for offset in state.sent if offset >= position}

    async def _send(self, state: _Partition, records: Sequence[RejectedRecord]) -> None:
        offsets = {record.offset for record in records}
        # Never move the offset back, because an earlier owner may have sent dead letters of later records.
        end = max(state.sent_to, max(offsets) + 1)
        pause_s = 0.0
        while not offsets <= state.sent:
            try:
                compression, most_bytes = self._settings.topics.compression, self._topic.fitting_bytes
                lines = map(_line, records)
                state.session.add(fill(state.target, lines, compression=compression, most_bytes=most_bytes))
                await state.session.commit({state.source: Position(end)})
            except (CommitUnknown, ProducerForgotten) as unknown:
                log.warning("%s", unknown, extra=AWAY if isinstance(unknown, CommitUnknown) else None)
                told = self._sent_before(state, range(min(offsets), max(offsets) + 1))
                state.sent |= await self._unless_stopped(told)
                if not offsets <= state.sent:
                    if pause_s:
                        self._refuse_if_stopped(unknown)
                    # While a partition has no leader, each attempt fails at once.
                    await asyncio.sleep(pause_s)
                    pause_s = PAUSE_S
            else:
                state.sent |= offsets
        state.sent_to = end

    async def _sent_before(self, state: _Partition, offsets: range) -> set[int]:
        while True:
            try:
                # Opening the session cannot fence a successor, because a successor must first update the database row,
                # which this process has locked.
                await state.session.open()
                with patience(START_WITHIN_S):  # only so that the log says that the sink is waiting
                    return await self._in_topic(state, offsets)
            except (BrokerUnavailable, CommitUnknown) as again:
                # If the patience is over, its cause says why, and not that the user should run the command again.
                why = again.__cause__ if isinstance(again.__cause__, NoAnswer) else again
                log.warning("waiting for the broker: %s", why, extra=AWAY)
                self._refuse_if_stopped(again)
                await asyncio.sleep(PAUSE_S)

    def _refuse_if_stopped(self, why: Exception) -> None:
        if self._stopped():
            raise _interrupted(str(why)) from why

    async def close(self) -> None:
        """Abort the transactions that are still open."""
        for state in self._partitions.values():
            await state.session.drop()


def _interrupted(why: str) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"stopped while no dead letter could be sent: {why} No row of the transaction was written. The next start "
        "finds out which dead letters were sent, and continues accordingly."
    )


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
