"""Implements `Wire` for `TopologyTestDriver` as an in-memory cluster with transactions of version 2 (KIP-890).

Every request gets its response immediately, so no client ever sees a transaction that is still ending. As on a broker,
logs contain record batches as bytes, each transaction marker takes up an offset, and a topic may replace the producer's
timestamps with the append time. `tests/contract/test_wire.py` compares the responses with those of a real broker.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple

from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

from dedup.errors import StateIncompatible
from dedup.kafka.record_batch import Columns, Limit, Line, columns_of, fill
from dedup.kafka.requests import UNKNOWN_TOPIC
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import (
    UNSTABLE_OFFSET,
    CommittedOffset,
    Fetched,
    LogBounds,
    Position,
    Produced,
    ProducerIdentity,
    TopicNow,
    TopicPartition,
)

_OK: Final = 0
_TOO_LARGE: Final = 10
_OUT_OF_ORDER: Final = 45
_OLD_EPOCH: Final = 47
_INVALID_STATE: Final = 48
_UNKNOWN_ID: Final = 49
_FENCED: Final = 90
_FIRST_PRODUCER_ID: Final = 1_000
_BASE_OFFSET: Final = Struct(">q")
_CRC: Final = Struct(">I")
_CRC_AT: Final = 17
_ATTRIBUTES: Final = Struct(">h")
_ATTRIBUTES_AT: Final = 21
_LOG_APPEND_TIME: Final = 1 << 3
_MAX_TIMESTAMP: Final = Struct(">q")
_MAX_TIMESTAMP_AT: Final = 35


class _Stored(NamedTuple):
    """A record batch in a log."""

    raw: bytes
    base_offset: int
    next_offset: int
    order: int
    """The total number of batches that all logs received before this batch."""


@dataclass(slots=True)
class _Log:
    batches: list[_Stored] = field(default_factory=list)
    end: int = 0
    open: dict[int, list[_Stored]] = field(default_factory=dict)
    """Maps each producer ID with an open transaction to its batches, which are also in ``batches``."""
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Maps each producer ID to its epoch and next sequence number."""

    @property
    def stable_end(self) -> int:
        return min((batches[0].base_offset for batches in self.open.values()), default=self.end)

    def committed(self, begin: int, key: Callable[[_Stored], int]) -> Iterator[_Stored]:
        """Yield each batch below the last stable offset for which ``key`` returns a value greater than ``begin``."""
        stable = self.stable_end
        newer = islice(self.batches, bisect_right(self.batches, begin, key=key), None)
        return takewhile(lambda each: each.base_offset < stable, newer)

    def finish(self, producer_id: int, *, commit: bool) -> None:
        mine = self.open.pop(producer_id)
        if not commit:
            self.batches = [each for each in self.batches if each not in mine]
        self.end += 1  # the marker


@dataclass(slots=True)
class _Coordinated:
    """The state of one transactional ID at the transaction coordinator."""

    producer_id: int
    epoch: int = 0
    open: bool = False
    places: set[TopicPartition] = field(default_factory=set)
    offsets: dict[tuple[str, TopicPartition], Position] = field(default_factory=dict)
    ended: tuple[int, bool] | None = None
    """The last transaction's epoch, and whether the transaction was committed; None once a new transaction or epoch
    begins.
    """

    @property
    def identity(self) -> ProducerIdentity:
        return ProducerIdentity(self.producer_id, self.epoch, implicit=True)


class MemoryWire:
    """An in-memory cluster that implements `Wire` for a single client.

    ``now_ms`` returns the brokers' current time.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms: Final = now_ms
        self._topics: Final[dict[str, Topic]] = {}
        self._logs: Final[dict[TopicPartition, _Log]] = {}
        self._ids: Final[dict[str, _Coordinated]] = {}
        self._offsets: Final[dict[tuple[str, TopicPartition], Position]] = {}
        self._pinned: dict[str, str] = {}
        self._appended = 0

    def create(self, topic: Topic) -> None:
        """Create an empty topic, which replaces any existing topic of the same name."""
        self._topics[topic.name] = topic
        self._logs.update({place: _Log() for place in topic.places})

    def append(self, target: TopicPartition, lines: Iterable[Line]) -> None:
        """Write records without a transaction, as an ordinary producer does."""
        for batch in fill(target, lines, compression="none"):
            self._store(target, batch.sealed(ProducerIdentity(-1, -1), -1), batch.count, None)

    def read(self, source: TopicPartition, offset: int) -> Columns:
        """Return the committed records at or after an offset."""
        found = self._logs[source].committed(offset, attrgetter("next_offset"))
        return columns_of(source, b"".join(each.raw for each in found), (), offset)[0]

    def read_in_order(self, topic: str, since: int) -> tuple[list[tuple[TopicPartition, Columns]], int]:
        """Return a topic's committed batches in the order in which they were written, and ``since`` for the next call.

        In the first call, ``since`` must be 0. No transaction may be open during a call.
        """
        found = {
            each.order: (place, each.raw)
            for place in self._topics[topic].places
            for each in self._logs[place].committed(since - 1, attrgetter("order"))
        }
        return [(place, columns_of(place, raw, (), 0)[0]) for _, (place, raw) in sorted(found.items())], self._appended

    def _store(self, target: TopicPartition, raw: bytes, count: int, producer_id: int | None) -> Produced:
        log, now_ms = self._logs[target], -1
        placed = bytearray(raw)
        _BASE_OFFSET.pack_into(placed, 0, log.end)
        if self._topics[target.topic].configs.get("message.timestamp.type") == "LogAppendTime":
            now_ms = self._now_ms()
            (attributes,) = _ATTRIBUTES.unpack_from(placed, _ATTRIBUTES_AT)
            _ATTRIBUTES.pack_into(placed, _ATTRIBUTES_AT, attributes | _LOG_APPEND_TIME)
            _MAX_TIMESTAMP.pack_into(placed, _MAX_TIMESTAMP_AT, now_ms)
            _CRC.pack_into(placed, _CRC_AT, calc_crc32c(bytes(placed[_ATTRIBUTES_AT:])))
        stored = _Stored(bytes(placed), log.end, log.end + count, self._appended)
        log.batches.append(stored)
        if producer_id is not None:
            log.open.setdefault(producer_id, []).append(stored)
        self._appended += 1
        answer = Produced(_OK, log.end, append_time_ms=now_ms)
        log.end += count
        return answer

    async def init_producer_id(self, transactional_id: str, timeout_ms: int) -> tuple[int, ProducerIdentity]:  # noqa: ARG002
        """See `Wire`."""
        known = self._ids.get(transactional_id)
        if known is None:
            known = self._ids[transactional_id] = _Coordinated(_FIRST_PRODUCER_ID + len(self._ids))
            return _OK, known.identity
        if known.open:
            self._end(known, commit=False)
        known.epoch += 1
        known.ended = None
        return _OK, known.identity

    async def add_partitions(
        self, transactional_id: str, identity: ProducerIdentity, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """See `Wire`."""
        code, _ = self._checked(transactional_id, identity)
        return dict.fromkeys(partitions, code)

    async def produce(
        self, transactional_id: str, identity: ProducerIdentity, batches: Sequence[tuple[TopicPartition, bytes]]
    ) -> Awaitable[dict[TopicPartition, Produced]]:
        """See `Wire`."""
        answer = asyncio.get_running_loop().create_future()
        answer.set_result({target: self._produced(transactional_id, identity, target, raw) for target, raw in batches})
        return answer

    def _produced(
        self, transactional_id: str, identity: ProducerIdentity, target: TopicPartition, raw: bytes
    ) -> Produced:
        code, known = self._checked(transactional_id, identity)
        if known is None:
            return Produced(_OLD_EPOCH if code == _FENCED else code, -1)
        limit, batch = self._topics[target.topic].limit, MemoryRecords(raw).next_batch()
        if limit is not None and len(raw) > limit.batch_bytes:
            return Produced(_TOO_LARGE, -1)
        log, count = self._logs[target], batch.last_offset_delta + 1
        epoch, expected = log.sequences.get(known.producer_id, (-1, 0))
        if batch.base_sequence != (expected if epoch == known.epoch else 0):
            return Produced(_OUT_OF_ORDER, -1)
        log.sequences[known.producer_id] = known.epoch, batch.base_sequence + count
        self._join(known)
        known.places.add(target)
        return self._store(target, raw, count, known.producer_id)

    async def add_offsets(self, transactional_id: str, identity: ProducerIdentity, group: str) -> int:  # noqa: ARG002
        """See `Wire`."""
        return self._checked(transactional_id, identity)[0]

    async def commit_offsets(
        self, transactional_id: str, identity: ProducerIdentity, group: str, offsets: Mapping[TopicPartition, Position]
    ) -> int:
        """See `Wire`."""
        code, known = self._checked(transactional_id, identity)
        if known is not None:
            self._join(known)
            known.offsets.update({(group, source): position for source, position in offsets.items()})
        return code

    async def end_transaction(
        self, transactional_id: str, identity: ProducerIdentity, *, commit: bool
    ) -> tuple[int, ProducerIdentity]:
        """See `Wire`."""
        known = self._ids.get(transactional_id)
        if known is not None and known.ended is not None and known.ended[0] == identity.epoch:
            return (_OK, known.identity) if known.ended[1] == commit else (_INVALID_STATE, identity)
        code, known = self._checked(transactional_id, identity)
        if known is None or not known.open:
            return code or _INVALID_STATE, identity
        self._end(known, commit=commit)
        known.epoch += 1
        known.ended = identity.epoch, commit
        return _OK, known.identity

    def _checked(self, transactional_id: str, identity: ProducerIdentity) -> tuple[int, _Coordinated | None]:
        known = self._ids.get(transactional_id)
        if known is None or known.producer_id != identity.producer_id:
            return _UNKNOWN_ID, None
        return (_FENCED, None) if identity.epoch != known.epoch else (_OK, known)

    @staticmethod
    def _join(known: _Coordinated) -> None:
        known.open, known.ended = True, None

    def _end(self, known: _Coordinated, *, commit: bool) -> None:
        for target in known.places:
            self._logs[target].finish(known.producer_id, commit=commit)
        if commit:
            self._offsets.update(known.offsets)
        known.open = False
        known.places.clear()
        known.offsets.clear()

    async def committed_offset(self, group: str, source: TopicPartition, *, stable: bool) -> CommittedOffset:
        """See `Wire`."""
        if stable and any((group, source) in known.offsets for known in self._ids.values()):
            return CommittedOffset(UNSTABLE_OFFSET, None)
        return CommittedOffset(_OK, self._offsets.get((group, source)))

    async def limit(self, target: TopicPartition) -> Limit | None:
        """See `Wire`."""
        return self._topics[target.topic].limit

    async def bounds(self, source: TopicPartition) -> LogBounds:
        """See `Wire`."""
        return LogBounds(0, self._logs[source].end)

    async def offset_at(self, source: TopicPartition, time_ms: int) -> int | None:
        """See `Wire`."""
        found = self.read(source, 0)
        rows = zip(found.offsets, found.timestamps_ms, strict=True)
        return next((offset for offset, own_ms in rows if own_ms >= time_ms), None)

    async def topics(self, names: tuple[str, ...]) -> Mapping[str, TopicNow | int]:
        """See `Wire`."""
        known = self._topics
        return {
            name: TopicNow(known[name].topic_id, known[name].partitions) if name in known else UNKNOWN_TOPIC
            for name in names
        }

    async def fetch(self, source: TopicPartition, offset: int, *, max_bytes: int, wait_ms: int) -> Fetched:  # noqa: ARG002
        """See `Wire`."""
        pinned = self._pinned.get(source.topic)
        if pinned is not None and pinned != self._topics[source.topic].topic_id:
            raise StateIncompatible(f"topic {source.topic!r} was deleted and recreated.")
        log, found = self._logs[source], self.read(source, offset)
        after = max(offset, log.stable_end)
        return Fetched(found.offsets, found.timestamps_ms, found.keys, found.values, after, log.end, log.stable_end)

    def pin(self, topic_ids: Mapping[str, str]) -> None:
        """See `Wire`."""
        self._pinned = dict(topic_ids)

    async def refresh(self) -> None:
        """See `Wire`. The leaders never change."""

    async def pause(self, delay_ms: int) -> None:  # noqa: ARG002
        """Return without waiting, because the cluster's state does not change over time."""
        await asyncio.sleep(0)
