"""Reads a topic for `dedup sink` and `IdempotentReader`, which store their offsets in a database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from dedup.connect.database import OFFSETS, OFFSETS_STATEMENT, DatabaseConnection, FencedOffsets, make, transaction
from dedup.connect.open_database import START_WITHIN_S, RetryingDatabase
from dedup.errors import CommitUnknown
from dedup.kafka.client import KafkaWire
from dedup.kafka.consumer import Answer, FeedFetcher, TopicCheck
from dedup.kafka.outage_lines import AWAY
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import TopicNow, TopicPartition, patience
from dedup.worker.offsets import bounds_of

FROM_START: Final = -1
WAIT_MS: Final = 200
_CHECK_EVERY_S: Final = 10.0
"""While no record arrives, the time between checks of whether the topic has changed."""
T = TypeVar("T")
log: Final = logging.getLogger(__name__)


class TopicReader:
    """Reads partitions of a topic, starting at given offsets."""

    def __init__(self, wire: KafkaWire, check: TopicCheck, *, after_loss: str, gather_ms: int = 0) -> None:
        """Error messages about records that retention or a truncation has removed end with ``after_loss``."""
        self._wire: Final = wire
        self._fetcher: Final = FeedFetcher(
            wire, check, wait_ms=WAIT_MS, gather_ms=gather_ms, after_truncation=after_loss, after_deletion=after_loss
        )
        self._next: Final[dict[TopicPartition, int]] = {}
        """Maps each partition to the offset after the last record that `poll` returned. The fetcher may read ahead."""
        self._ends: Final[dict[TopicPartition, int]] = {}

    async def begin(self, source: TopicPartition, position: int) -> int:
        """Begin reading a partition at an offset, or at the partition's start if the offset is negative.

        Returns the offset at which the reading begins.
        """
        bounds = await bounds_of(self._wire, source)
        self._next[source] = bounds.start if position < 0 else position
        self._ends[source] = bounds.end
        self._fetcher.begin(source, self._next[source])
        return self._next[source]

    @property
    def at_end(self) -> bool:
        """True if `poll` has returned all records that the partitions contained when `begin` was called."""
        return all(self._next[source] >= end for source, end in self._ends.items())

    async def poll(self) -> list[Answer]:
        """Return the next fetch responses that contain records, or an empty list if no records arrive in time.

        Raises StateIncompatible if the topic was deleted, was recreated, or no longer contains the next offset.
        """
        answers = await self._fetcher.poll(self._next)
        self._next.update((answer.source, answer.next_offset) for answer in answers)
        return [answer for answer in answers if answer.columns.offsets]

    def close(self) -> None:
        """Stop reading."""
        self._fetcher.forget()


def _after_loss(reader: str, topic: str) -> str:
    # A restart compares no leader epochs, so after a truncation it would skip the records before its position.
    return (
        f"to go on at the oldest record that is left, first delete the row of reader {reader!r}, topic {topic!r}, and "
        f"this partition (column `part`) from the table {OFFSETS}, and then start again. Records that were read before "
        f"and are read again change nothing."
    )


class FencedConsumer:
    """Consumes partitions of a topic, and stores their offsets in a database.

    The consumer calls ``prepare`` with each new database connection and the reader's offsets. Once ``stopped`` returns
    True, the methods stop waiting for an unresponsive database or broker.
    """

    def __init__(
        self,
        wire: KafkaWire,
        offsets: FencedOffsets,
        topic: Topic,
        url: str,
        prepare: Callable[[DatabaseConnection, FencedOffsets], None],
        stopped: Callable[[], bool] = lambda: False,
        *,
        gather_ms: int,
    ) -> None:
        self.offsets: Final = offsets
        self._prepare: Final = prepare
        self._closing = False
        self._stopped: Final[Callable[[], bool]] = lambda: self._closing or stopped()
        self._check: Final = TopicCheck(
            wire,
            {topic.name: TopicNow(topic.topic_id, topic.partitions)},
            after_growth=f"A restart reads the new partitions, too, except where `dedup sink --partitions` names the "
            f"partitions: add those from {topic.partitions} on to the option of one process, or start another process "
            f"for them, or else nobody reads them.",
            remedy="A restart says how to continue.",
        )
        self.records: Final = TopicReader(
            wire, self._check, after_loss=_after_loss(offsets.reader, topic.name), gather_ms=gather_ms
        )
        self._checked_s = time.monotonic()
        """The monotonic time of the last check of the topic, or of the last records, whose transaction checks it."""
        self._database: Final = RetryingDatabase(url, self._stopped, prepare=self._make)
        self._thread: Final = ThreadPoolExecutor(1, "database")

    def _make(self, connection: DatabaseConnection) -> None:
        make(connection, OFFSETS, OFFSETS_STATEMENT)
        self._prepare(connection, self.offsets)

    async def open(self, partitions: Collection[int]) -> None:
        """Fence earlier owners of the partitions, and begin reading at the offsets stored in the database.

        A partition without a stored offset is read from its start, and this offset is stored. Raises
        DatabaseUnavailable if the database does not respond, BrokerUnavailable if a partition has no leader, and
        StateIncompatible if the topic was recreated, or if the records before a stored offset are in another table.
        """
        await self.in_thread(lambda: self._database.first(lambda connection: self.offsets.take(connection, partitions)))
        starts: dict[int, int] = {}
        with patience(START_WITHIN_S):
            for partition, position in self.offsets.positions.items():
                begun = await self.records.begin(TopicPartition(self.offsets.topic, partition), position)
                if position < 0:
                    starts[partition] = begun
        if starts:
            # Without a stored offset, the next start would begin behind the records that retention deletes until then.
            await self.once(lambda _: None, starts)

    async def poll(self) -> list[Answer]:
        """Return what `TopicReader.poll` returns, and raise the same errors.

        Also raises StateIncompatible if the topic got partitions, which may have all new records, while none arrived.
        """
        found = await self.records.poll()
        is_due = time.monotonic() - self._checked_s >= _CHECK_EVERY_S
        if is_due and not found:
            await self._check.look()
        if is_due or found:
            self._checked_s = time.monotonic()
        return found

    async def once(self, work: Callable[[DatabaseConnection], T], ends: Mapping[int, int]) -> T | None:
        """Run ``work`` exactly once, in a database transaction that also updates the offsets, and return its result.

        ``ends`` maps each partition to the offset after its last record in the transaction. If the consumer is stopped
        while no broker responds, the method writes nothing and returns None. Raises TaskMigrated if another process has
        taken over a partition, and StateIncompatible if the topic was recreated or has new partitions that no process
        reads.
        """
        while True:
            try:
                await self._check.confirm()
                break
            except CommitUnknown as silent:
                log.warning("%s: %s", self.offsets.reader, silent, extra=AWAY)
                if self._stopped():
                    return None
        unanswered: list[T] = []
        """The results of the attempts so far, whose commits may have received no response."""

        def attempt(connection: DatabaseConnection) -> T:
            if unanswered and self.offsets.happened(connection, ends):
                return unanswered[-1]
            with transaction(connection):
                self.offsets.advance(connection, ends)
                unanswered.append(work(connection))
            return unanswered[-1]

        def insist() -> T:
            found = self._database.insist(attempt)
            self.offsets.positions.update(ends)
            return found

        return await self.in_thread(insist)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the database thread, and return its result. Calls run one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Stop reading, and roll back the open transaction."""
        self._closing = True
        self.records.close()
        await self.in_thread(self._database.close)
        self._thread.shutdown()
