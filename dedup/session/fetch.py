"""Feeding partitions read side by side, each from its own position, as columns.

One fetch a broker is on its way while the records of the last one are judged. aiokafka's consumer keeps the group
membership, but its fetcher makes an object of twelve fields of every record, which cost a quarter of the whole loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiokafka.consumer.fetcher import READ_COMMITTED, PartitionRecords
from aiokafka.errors import CorruptRecordException, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.memory_records import MemoryRecords

from dedup.errors import BrokerUnavailable, StateIncompatible
from dedup.session.odd_names import odd_offsets, records_of
from dedup.session.wire import Header, NoAnswer, TopicPartition

if TYPE_CHECKING:
    from dedup.session.client import KafkaWire

PARTITION_BYTES: Final = 1 << 20
REQUEST_BYTES: Final = 16 << 20
OUT_OF_RANGE: Final = 1
FEED_LANE: Final = "feed"
FLOW_BYTES: Final = 512 << 10
"""While records flow, an answer waits a moment for this much: a batch of a few rows costs nearly what hundreds do."""
_OFFSET, _TIMESTAMP, _KEY, _VALUE, _HEADERS = map(attrgetter, ("offset", "timestamp", "key", "value", "headers"))


@dataclass(slots=True)
class Columns:
    """Committed records of one partition in log order, column by column."""

    offsets: list[int] = field(default_factory=list)
    timestamps_ms: list[int] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    headers: list[list[Header]] = field(default_factory=list)
    odd_names: frozenset[int] = frozenset()
    """Offsets of records with a header name that is not UTF-8; see `odd_names`."""

    def cut(self, begin: int, end: int) -> Columns:
        """Return the rows from ``begin`` up to, not including, ``end``."""
        if begin == 0 and end >= len(self.offsets):
            return self
        return Columns(
            self.offsets[begin:end],
            self.timestamps_ms[begin:end],
            self.keys[begin:end],
            self.values[begin:end],
            self.headers[begin:end],
            self.odd_names,
        )


class FeedEnd(NamedTuple):
    """Where a partition ends: for everybody, and for readers of committed records."""

    high_watermark: int
    last_stable_offset: int
    seen_s: float
    """When the leader said so, by the event loop's clock."""


class Answer(NamedTuple):
    """What a fetch brought of one partition."""

    source: TopicPartition
    columns: Columns
    """Empty where the answer held only markers and aborted records."""
    begun: int
    """The offset that was asked for: where the answer before it ended."""
    next_offset: int
    """Past the records, and past markers and aborted records after them."""


class CommittedBatches(PartitionRecords):  # type: ignore[misc]  # untyped base
    """The batches of an answer that a committed reader sees; aiokafka's rules for aborted transactions."""

    def batches(self) -> Iterator[Any]:
        """Yield batches with data of committed transactions; `next_fetch_offset` moves past all others too."""
        while self._records.has_next():
            batch = self._records.next_batch()
            if not batch.validate_crc():
                raise CorruptRecordException(f"a batch of {self._tp} at {batch.base_offset} has a wrong checksum")
            if batch.producer_id is not None:
                self._consume_aborted_up_to(batch.base_offset)
                if batch.is_control_batch and self._contains_abort_marker(batch):
                    self._aborted_producers.discard(batch.producer_id)
            aborted = batch.is_transactional and batch.producer_id in self._aborted_producers
            if not batch.is_control_batch and not aborted:
                yield batch
            self.next_fetch_offset = batch.next_offset


def data_of(rest: Sequence[Any]) -> tuple[Any, Any]:
    """Return aborted transactions and records from the end of a partition's answer, whose middle differs by version."""
    with_replica = 4  # v11: log start, aborted, preferred replica, records
    return rest[-3] if len(rest) == with_replica else rest[-2], rest[-1]


def columns_of(source: TopicPartition, raw: bytes, aborted: Any, position: int) -> tuple[Columns, int]:  # noqa: ANN401  # untyped protocol structures
    """Return the committed records at or after a position, and the position after them."""
    found = Columns()
    batches = CommittedBatches(
        source, MemoryRecords(raw), aborted, position, None, None, check_crcs=True, isolation_level=READ_COMMITTED
    )
    for batch in batches.batches():
        try:
            records = list(batch)
        except UnicodeDecodeError:
            records = records_of(raw, batch.base_offset)
            found.odd_names |= odd_offsets(records)
        if records and records[0].offset < position:
            records = [record for record in records if record.offset >= position]
        found.offsets.extend(map(_OFFSET, records))
        found.timestamps_ms.extend(map(_TIMESTAMP, records))
        found.keys.extend(map(_KEY, records))
        found.values.extend(map(_VALUE, records))
        found.headers.extend(map(_HEADERS, records))
    return found, max(position, batches.next_fetch_offset)


class FeedFetcher:
    """Reads the feeding partitions of one worker."""

    def __init__(self, wire: KafkaWire, *, wait_ms: int, gather_ms: int = 0) -> None:
        self._wire: Final = wire
        self._wait_ms: Final = wait_ms
        """How long a broker may wait for a first record."""
        self._gather_ms: Final = gather_ms
        """How long it may wait for more while records flow."""
        self._flowing: Final[set[int]] = set()
        """Brokers whose last answer held records."""
        self._positions: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, FeedEnd] = {}
        self._flights: dict[int, asyncio.Task[list[Answer]]] = {}
        self._life = 0
        """Counts assignments: an answer asked for in an older one is nobody's."""
        self._turn = 0

    def begin(self, source: TopicPartition, offset: int) -> None:
        """Read a partition from an offset on."""
        self._positions[source] = offset

    def forget(self) -> None:
        """Stop reading everything; what is on its way is thrown away."""
        for flight in self._flights.values():
            flight.cancel()
        self._flights, self._positions, self._ends = {}, {}, {}
        self._life += 1

    @property
    def life(self) -> int:
        """Another number after every `forget`."""
        return self._life

    def end(self, source: TopicPartition) -> FeedEnd | None:
        """Return where a partition ended at its leader's last answer; None before the first."""
        return self._ends.get(source)

    def position(self, source: TopicPartition) -> int | None:
        """Return the offset to be fetched next; what is below may not have been handed over yet."""
        return self._positions.get(source)

    async def poll(self, wanted: Collection[TopicPartition]) -> list[Answer]:
        """Return what the first answer brings of the wanted partitions; nothing if none comes in time.

        Raises StateIncompatible where the log no longer holds a position: records were deleted before they were read.
        """
        life = self._life
        await self._launch(wanted)
        if not self._flights:
            await asyncio.sleep(self._wait_ms / 1000)
            return []
        done, _ = await asyncio.wait(self._flights.values(), return_when=asyncio.FIRST_COMPLETED)
        # All at once: while leaders are looked up again the assignment may end, and the flights with it.
        landed = [self._flights.pop(node) for node, flight in list(self._flights.items()) if flight in done]
        found: list[Answer] = []
        for flight in landed:
            try:
                found += flight.result()
            except NoAnswer:
                await self._wire.refresh()
        await self._launch(wanted)
        return found if life == self._life else []

    async def _launch(self, wanted: Collection[TopicPartition]) -> None:
        life = self._life
        by_leader: defaultdict[int, list[TopicPartition]] = defaultdict(list)
        for source in wanted:
            if source in self._positions:
                try:
                    by_leader[await self._wire.leader(source)].append(source)
                except NoAnswer:
                    continue  # no leader for now; the next poll asks again
        if life != self._life:
            return  # the assignment ended while leaders were looked up
        self._turn += 1
        for node, led in by_leader.items():
            # A broker fills an answer in the order of the request: each partition is first in its turn.
            first = self._turn % len(led)
            sources = led[first:] + led[:first]
            if node not in self._flights:
                self._flights[node] = asyncio.create_task(self._fetch(node, sources))

    async def _fetch(self, node: int, sources: list[TopicPartition]) -> list[Answer]:
        by_topic: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for source in sources:
            by_topic[source.topic].append((source.partition, self._positions[source], PARTITION_BYTES))
        wait_ms, least_bytes = (self._gather_ms, FLOW_BYTES) if node in self._flowing else (self._wait_ms, 1)
        request = FetchRequest(wait_ms, least_bytes, REQUEST_BYTES, READ_COMMITTED, list(by_topic.items()))
        answer = await self._wire.send(node, request, FEED_LANE)
        self._flowing.discard(node)
        found: list[Answer] = []
        for topic, parts in answer.topics:
            for partition, code, high_watermark, stable, *rest in parts:
                source = TopicPartition(topic, partition)
                if code:
                    await self._failed(source, code)
                    continue
                self._ends[source] = FeedEnd(high_watermark, stable, asyncio.get_running_loop().time())
                aborted, raw = data_of(rest)
                if raw:
                    self._flowing.add(node)
                    begun = self._positions[source]
                    columns, position = columns_of(source, raw, aborted, begun)
                    self._positions[source] = position
                    found.append(Answer(source, columns, begun, position))
        return found

    async def _failed(self, source: TopicPartition, code: int) -> None:
        place = f"{source.topic}/{source.partition}"
        if code == OUT_OF_RANGE:
            raise StateIncompatible(
                f"{place} no longer holds offset {self._positions[source]}, which is to be read next: retention "
                f"deleted records before they were judged. Nothing was skipped. Lengthen `retention.ms` of the topic; "
                f"`dedup reset --to earliest` accepts the loss."
            )
        if for_code(code).retriable or code in self._wire.leader_moved:
            await self._wire.refresh()
            return
        raise BrokerUnavailable(
            f"{place} can not be read: {for_code(code).__name__}. Check the principal's permissions."
        )
