"""Fetches the records of the partitions that feed a worker's tasks, and detects changes to their topics.

One fetch per broker is in flight while the worker judges the records of the previous fetch. This module replaces
aiokafka's fetcher, which takes a quarter of the event loop's time because it creates an object for every record.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from aiokafka.errors import for_code

from dedup.errors import BrokerUnavailable, CommitUnknown, StateIncompatible
from dedup.kafka.record_batch import NO_EPOCH, Columns, columns_of, leader_epochs
from dedup.kafka.requests import OTHER_TOPIC, UNKNOWN_TOPIC, FetchedPartition, FetchFrom
from dedup.kafka.wire import (
    LEADER_MOVED,
    PATIENCE_S,
    TRANSIENT,
    UNAUTHORIZED,
    NoAnswer,
    TopicNow,
    TopicPartition,
    error_name,
    out_of_patience,
)

if TYPE_CHECKING:
    from dedup.kafka.client import KafkaWire
    from dedup.kafka.wire import Wire

_LEAST_GAP_S: Final = 0.01
"""The minimum pause between two requests for metadata, and before an assignment's first fetch. Tasks that commit or
begin during the pause share the next request.
"""
PAUSE_MS: Final = 100
MOST_PAUSES: Final = 200
"""A check fails after this many attempts without a response (about 20 s), and the worker then abandons the transaction.
"""
_MOST_ABSENT: Final = 20
"""A topic counts as deleted once this many responses lack the topic. A starting broker may not know the topic yet."""
_PARTITION_BYTES: Final = 1 << 20
_REQUEST_BYTES: Final = 16 << 20
_OUT_OF_RANGE: Final = 1
_AGAIN_PAUSE_MS: Final = 100
MOST_DOUBTS: Final = 3
"""A position counts as missing from the log after this many consecutive responses report that it is missing."""
_FEED_LANE: Final = "feed"
_FLOW_BYTES: Final = 512 << 10
"""After a response with fewer bytes of records, the fetcher pauses, because small batches are inefficient."""


_GROWN: Final = (
    "From now on, producers may send an ID to a partition where it is unknown: `dedup reset` starts over with the new "
    "number of partitions, and says if the output needs more partitions first."
)
_RESET: Final = "Start over with `dedup reset`."
_AFTER_TRUNCATION: Final = "start over with `dedup reset --to` a time before the truncation."
_AFTER_DELETION: Final = "`dedup reset --to earliest` accepts the loss."


class TopicCheck:
    """Checks that topics have not been deleted, recreated, or given more partitions since the process started.

    A worker fetches by topic ID, so it never reads records of a recreated topic. After partitions are added to a topic,
    producers may write an ID's further records to another partition, whose task has not seen the ID. After the last
    fetch of a transaction and before the commit, every task confirms that the topics are unchanged. Tasks that commit
    at the same time share one metadata request. The check asks only one broker, so it may miss partitions that have
    just been added.
    """

    def __init__(
        self,
        wire: Wire,
        expected: Mapping[str, TopicNow],
        may_grow: Collection[str] = (),
        after_growth: str = _GROWN,
        *,
        remedy: str = _RESET,
    ) -> None:
        """Only topics in ``may_grow`` may gain partitions.

        Error messages about new partitions in other topics end with ``after_growth``. Error messages about deleted or
        recreated topics end with ``remedy``.
        """
        self._wire: Final = wire
        self._expected: Final = dict(expected)
        self.partitions: Final = {name: topic.partitions for name, topic in expected.items()}
        """The partition count of each topic, updated by every response if the topic may gain partitions."""
        self._may_grow: Final = frozenset(may_grow)
        self._after_growth: Final = after_growth
        self._remedy: Final = remedy
        self._names: Final = tuple(sorted(expected))
        """The topic names in the order in which they are always requested, so that equal responses have equal bytes."""
        self._asking: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        """A check that has not been sent yet. Its response will be newer than every call that waits for the check."""

    @classmethod
    async def of(cls, wire: Wire, *names: str) -> Self:
        """Create a check that compares the named topics with their state at the time of this call.

        Raises BrokerUnavailable if no broker can describe one of the topics for about 20 s.
        """
        expected: dict[str, TopicNow] = {}
        for name in names:
            for _ in range(MOST_PAUSES):
                try:
                    found = (await wire.topics((name,)))[name]
                except NoAnswer:
                    found = -1
                if isinstance(found, TopicNow):
                    expected[name] = found
                    break
                await wire.pause(PAUSE_MS)
            else:
                raise BrokerUnavailable(f"no broker describes topic {name!r}. Does it exist?")
        return cls(wire, expected)

    @property
    def topic_ids(self) -> dict[str, str]:
        """Maps the name of each topic to the ID that the topic must have."""
        return {name: topic.topic_id for name, topic in self._expected.items()}

    async def look(self) -> None:
        """Raise StateIncompatible if a topic has changed, but do nothing if no broker responds."""
        await self._ask(most_silent=1)

    async def confirm(self) -> None:
        """Confirm with a new request that every topic still has the same ID and the same number of partitions.

        Raises StateIncompatible if a topic has changed, BrokerUnavailable if the worker is not authorized to describe
        the topics, and CommitUnknown if no broker responds for about 20 s.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._ask_after(self._asking), name="topic check")
            # If no caller is waiting for the exception, it is not reported, because the next request raises it again.
            self._next.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        # The request is shielded, because a caller that stops waiting must not cancel the request of the other callers.
        await asyncio.shield(self._next)

    async def _ask_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait({before})
            await asyncio.sleep(_LEAST_GAP_S)
        self._asking, self._next = self._next, None
        if not await self._ask(most_silent=MOST_PAUSES):
            raise CommitUnknown(f"no broker has described the topics for {MOST_PAUSES * PAUSE_MS // 1000} s.")

    async def _ask(self, *, most_silent: int) -> bool:
        """Return True when a broker reports no change, and False after ``most_silent`` attempts without a response."""
        silent = absent = 0
        loop = asyncio.get_running_loop()
        until_s = loop.time() + MOST_PAUSES * PAUSE_MS / 1000
        while silent < most_silent and loop.time() < until_s:
            try:
                answer = await self._wire.topics(self._names)
            except NoAnswer:
                silent += 1
            else:
                again = [name for name in self._names if not self._settled(name, answer.get(name, UNKNOWN_TOPIC))]
                if not again:
                    return True
                gone = [name for name in again if answer.get(name, UNKNOWN_TOPIC) == UNKNOWN_TOPIC]
                absent += bool(gone)
                silent += not gone
                if absent >= _MOST_ABSENT:
                    raise StateIncompatible(
                        f"topic {gone[0]!r} was deleted while it was in use. Earlier commits are kept; nothing more "
                        f"was committed. If it is recreated, it is a different topic. {self._remedy}"
                    )
            await self._wire.pause(PAUSE_MS)
        return False

    def _settled(self, name: str, found: TopicNow | int) -> bool:
        """Return True if the topic is unchanged, or False if the request must be repeated."""
        expected = self._expected[name]
        match found:
            case TopicNow(topic_id, _) if topic_id != expected.topic_id:
                raise StateIncompatible(
                    f"topic {name!r} was deleted and recreated while it was in use: it had id {expected.topic_id} and "
                    f"has id {topic_id} now. Earlier commits are kept; no record of the new topic was read, and none "
                    f"was committed to it. {self._remedy}"
                )
            case TopicNow(_, partitions) if partitions > expected.partitions and name not in self._may_grow:
                raise StateIncompatible(
                    f"topic {name!r} has {partitions} partitions now, and had {expected.partitions} at the start. "
                    f"Nothing read since the change was committed. {self._after_growth}"
                )
            case TopicNow(_, partitions):
                # A broker that lags behind may still answer with an earlier count.
                self.partitions[name] = max(partitions, self.partitions[name])
                return True
            case code if code == UNAUTHORIZED:
                raise BrokerUnavailable(
                    f"the worker may no longer describe topic {name!r} (code {code}). Nothing more was committed. "
                    f"Grant its principal what `dedup check --broker` lists, and restart it."
                )
            case _:
                return False


class FeedEnd(NamedTuple):
    """The high watermark and the last stable offset of a partition, as last reported by its leader."""

    high_watermark: int
    last_stable_offset: int
    seen_s: float
    """The time of the leader's response, according to the event loop's clock."""


@dataclass(slots=True, eq=False)
class Reading:
    """Tracks how far a partition has been read since the `FeedFetcher.begin` call that created this object."""

    position: int
    """The next offset to fetch."""
    leader_epoch: int
    """Leader epoch of the record before the position, or -1 if it is unknown."""
    life: int
    """The number that identifies this reading of the partition."""
    over: bool = False
    """True if this reading has ended. Records from an ended reading must not be judged."""
    doubts: int = 0
    """The number of consecutive responses that report the position as missing from the log."""
    caught_up_ms: int = 0
    """The last time at which no record after the position was readable, or 0 if no such time is known."""
    silent_s: float = 0.0
    """How long `FeedFetcher.poll` has waited, within `PATIENCE_S`, since the leader's last usable response."""


class Answer(NamedTuple):
    """The records that a fetch response contains for one partition."""

    source: TopicPartition
    columns: Columns
    """The committed records, or no records if the response contained only markers and aborted records."""
    begun: int
    """The requested offset, at which the previous response ended."""
    next_offset: int
    """The offset after the records and after any markers and aborted records that follow them."""
    reading: Reading
    """The reading that requested these records."""
    leader_epoch: int
    """Leader epoch of all records in the response, or -1 if their leader epochs differ."""
    readable_after_ms: int
    """A time before which no reader could have read any of the records, or 0 if no such time is known."""


class FeedFetcher:
    """Fetches the partitions that feed a worker's tasks, and identifies their topics by topic ID."""

    def __init__(
        self,
        wire: KafkaWire,
        check: TopicCheck,
        *,
        wait_ms: int,
        gather_ms: int = 0,
        after_truncation: str = _AFTER_TRUNCATION,
        after_deletion: str = _AFTER_DELETION,
    ) -> None:
        """Error messages about a truncated log end with ``after_truncation``. Error messages about a position that
        retention has deleted end with ``after_deletion``.
        """
        self._wire: Final = wire
        self._after_truncation: Final = after_truncation
        self._after_deletion: Final = after_deletion
        self._check: Final = check
        """Finds out whether a topic that a broker does not know was deleted or recreated."""
        self._topic_ids: Final = check.topic_ids
        self._wait_ms: Final = wait_ms
        """The maximum time that a broker may wait for the first record before the broker responds."""
        self._gather_ms: Final = gather_ms
        """The pause between a small response with records and the next request, so that more records can arrive."""
        self._flowing: Final[set[int]] = set()
        """The node IDs of the brokers whose last response contained records, but fewer bytes than `_FLOW_BYTES`."""
        self._readings: dict[TopicPartition, Reading] = {}
        self._ends: dict[TopicPartition, FeedEnd] = {}
        self._flights: dict[int, asyncio.Task[list[Answer]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._begun: Final = asyncio.Event()
        """Ends the wait of a `poll` call that had nothing to fetch when the reading of a partition begins."""
        self.life = 0
        """A number that every `forget` changes, so that responses to earlier requests are discarded."""
        self._lives = 0
        self._turns: Final[Counter[int]] = Counter()
        """The number of fetch requests sent to each broker, by node ID."""

    def begin(self, source: TopicPartition, offset: int, *, leader_epoch: int = NO_EPOCH) -> int:
        """Start reading a partition at an offset, and return a number that no other call returns.

        ``leader_epoch`` is the leader epoch of the record before the offset (KIP-320). Responses to earlier fetches of
        the partition are discarded.
        """
        self.halt(source)
        self._lives += 1
        self._readings[source] = Reading(offset, leader_epoch, self._lives)
        self._begun.set()
        return self._lives

    def halt(self, source: TopicPartition) -> None:
        """Stop reading a partition. Responses to fetches that are still in flight are discarded."""
        reading = self._readings.pop(source, None)
        if reading is not None:
            reading.over = True

    def forget(self) -> None:
        """Stop reading all partitions. Responses to fetches that are still in flight are discarded."""
        for flight in self._flights.values():
            flight.cancel()
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        for source in list(self._readings):
            self.halt(source)
        self._flights, self._ends = {}, {}
        self.life += 1

    def end(self, source: TopicPartition) -> FeedEnd | None:
        """Return the partition's end offsets as of its leader's last response, or None before the first response."""
        return self._ends.get(source)

    def position(self, source: TopicPartition) -> int | None:
        """Return the next offset to fetch, which may be ahead of the records that `poll` has returned."""
        reading = self._readings.get(source)
        return None if reading is None else reading.position

    async def poll(self, wanted: Collection[TopicPartition]) -> list[Answer]:
        """Fetch the wanted partitions, and return any records that have arrived.

        Raises StateIncompatible if a log no longer contains the next offset to read, if a log was truncated and filled
        with other records, or if a topic was deleted or recreated. Raises BrokerUnavailable if the leader of a wanted
        partition sends no usable response within `PATIENCE_S`.
        """
        patience_s = PATIENCE_S.get()
        if patience_s == math.inf:
            return await self._poll(wanted)
        clock_s = asyncio.get_running_loop().time
        begun_s, before = clock_s(), dict(self._ends)
        answers = await self._poll(wanted)
        for source in wanted:
            reading = self._readings.get(source)
            if reading is None or self._ends.get(source) is not before.get(source):
                continue
            # The time that the caller spends between two polls is not the leader's silence.
            reading.silent_s += clock_s() - begun_s
            if reading.silent_s > patience_s:
                silent = NoAnswer(f"no leader of {source.topic}/{source.partition} answers")
                raise out_of_patience(silent) from silent
        return answers

    async def _poll(self, wanted: Collection[TopicPartition]) -> list[Answer]:
        self._begun.clear()  # before the first await, because `wanted` may lack partitions that begin afterwards
        await self._launch(wanted)
        if not self._flights:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._begun.wait(), self._wait_ms / 1000)
                await asyncio.sleep(_LEAST_GAP_S)  # partitions of one assignment share the first request
            return []
        done, _ = await asyncio.wait(self._flights.values(), return_when=asyncio.FIRST_COMPLETED)
        # Collect all responses before the refresh below, because the assignment may end during the refresh.
        landed = [self._flights.pop(node) for node, flight in list(self._flights.items()) if flight in done]
        found: list[Answer] = []
        for flight in landed:
            try:
                found += flight.result()
            except NoAnswer:
                await self._wire.refresh()
        await self._launch(wanted)
        return [answer for answer in found if not answer.reading.over]

    async def _launch(self, wanted: Collection[TopicPartition]) -> None:
        life = self.life
        by_leader: defaultdict[int, list[TopicPartition]] = defaultdict(list)
        leaderless = False
        for source in wanted:
            if source in self._readings:
                try:
                    by_leader[await self._wire.leader(source)].append(source)
                except NoAnswer:
                    leaderless = True  # the leader is moving, or the topic was deleted
        if leaderless:
            self._look_beside()
        if life != self.life:
            return  # the assignment ended while leaders were looked up
        for node, led in by_leader.items():
            sources = [source for source in led if source in self._readings]
            if node not in self._flights and sources:
                # A broker fills a response in the order of the request, and sends a batch that is larger than
                # `_PARTITION_BYTES` only as the first batch of a response. Therefore, the partitions take turns at the
                # beginning of the request.
                first = self._turns[node] % len(sources)
                self._turns[node] += 1
                sources = sources[first:] + sources[:first]
                self._flights[node] = asyncio.create_task(self._fetch(node, sources), name=f"fetch from {node}")

    def _look_beside(self) -> None:
        """Check the topics in the background. Raises StateIncompatible if the previous check found a change."""
        looking = self._looking
        if looking is None:
            self._looking = asyncio.create_task(self._check.look(), name="look for changed topics")
        elif looking.done():
            self._looking = None
            looking.result()

    async def _fetch(self, node: int, sources: list[TopicPartition]) -> list[Answer]:
        if node in self._flowing:
            # If the broker waited for more records instead, each new record would make it check every partition of the
            # request.
            await self._wire.pause(self._gather_ms)
            self._flowing.discard(node)
        asked = {
            (self._topic_ids[source.topic], source.partition): (source, reading, reading.position)
            for source in sources
            if (reading := self._readings.get(source)) is not None
        }
        wanted = [
            FetchFrom(*place, position, reading.leader_epoch, _PARTITION_BYTES)
            for place, (_, reading, position) in asked.items()
        ]
        asked_ms = time.time_ns() // 1_000_000
        parts = await self._ask(node, wanted)
        found: list[Answer] = []
        failed: list[tuple[TopicPartition, Reading, FetchedPartition]] = []
        for part in parts:
            source, reading, begun = asked[part.topic_id, part.partition]
            if reading.over or reading.position != begun:
                continue  # in the meantime, a new reading has begun or a new leader has responded
            if part.error_code or (part.parts_at is not None and part.parts_at < begun):
                failed.append((source, reading, part))
                continue
            if part.parts_at is not None:
                # The log no longer contains the epoch, for example after compaction, but continues past the position.
                reading.leader_epoch = NO_EPOCH
            reading.doubts, reading.silent_s = 0, 0.0
            self._ends[source] = FeedEnd(
                part.high_watermark, part.last_stable_offset, asyncio.get_running_loop().time()
            )
            if part.records:
                found.append(_taken(source, reading, begun, part))
            if part.high_watermark == reading.position:
                reading.caught_up_ms = asked_ms  # later records became readable after the request
        for source, reading, part in failed:
            await self._failed(source, reading, part)
        return found

    async def _ask(self, node: int, wanted: Sequence[FetchFrom]) -> list[FetchedPartition]:
        try:
            code, parts = await self._wire.fetch_partitions(
                node, wanted, wait_ms=self._wait_ms, most_bytes=_REQUEST_BYTES, lane=_FEED_LANE
            )
        except NoAnswer:
            await self._wire.pause(_AGAIN_PAUSE_MS)  # without a pause, thousands of refused connections per second
            raise
        if code:
            await self._wire.pause(_AGAIN_PAUSE_MS)
            raise NoAnswer(f"broker {node} answered a fetch with code {code}")
        if 0 < sum(len(part.records) for part in parts) < _FLOW_BYTES:
            self._flowing.add(node)
        return parts

    async def _failed(self, source: TopicPartition, reading: Reading, part: FetchedPartition) -> None:
        place, code = f"{source.topic}/{source.partition}", part.error_code
        if part.parts_at is not None or code == _OUT_OF_RANGE:
            reading.doubts += 1
            if reading.doubts < MOST_DOUBTS and not self._wire.one_broker:
                # After a freeze, a broker may still assume that it is the leader, so the next request goes to its
                # successor, if any.
                await self._wire.refresh()
                await self._wire.pause(_AGAIN_PAUSE_MS)
                return
        if part.parts_at is not None:
            raise StateIncompatible(
                f"{place} was read up to offset {reading.position}, but its leader holds other records from offset "
                f"{part.parts_at} on: the log was truncated there and filled again, as happens after an unclean leader "
                f"election or when a broker loses its disk. Nothing was skipped, and nothing after the truncation was "
                f"read: {self._after_truncation}"
            )
        if code == _OUT_OF_RANGE:
            raise StateIncompatible(
                f"{place} no longer holds offset {reading.position}, which is to be read next: retention "
                f"deleted records before they were read. Nothing was skipped. Lengthen `retention.ms` of the topic; "
                f"{self._after_deletion}"
            )
        if code in OTHER_TOPIC:
            await self._check.look()
            await self._wire.pause(_AGAIN_PAUSE_MS)
            return  # the topic is unchanged, and this broker has just become its leader
        if for_code(code).retriable or code in LEADER_MOVED | TRANSIENT:
            await self._wire.refresh()
            return
        raise BrokerUnavailable(f"{place} cannot be read: {error_name(code)}. Check the principal's permissions.")


def _taken(source: TopicPartition, reading: Reading, begun: int, part: FetchedPartition) -> Answer:
    """Return the records that a response contains for one partition, and advance the position past them."""
    columns, position = columns_of(source, part.records, part.aborted, begun)
    first, last = leader_epochs(part.records)
    if position > begun:
        reading.position, reading.leader_epoch = position, last
    epoch = last if first == last else NO_EPOCH
    return Answer(source, columns, begun, position, reading, epoch, reading.caught_up_ms)
