"""Reads feeding partitions as columns, and checks that their topics have not changed in the meantime.

One fetch per broker is in flight while the records of the previous one are judged. aiokafka's consumer maintains the
group membership. Its fetcher is not used, because it creates an object with twelve fields for every record, which took
a quarter of the event loop's time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from aiokafka.errors import for_code

from dedup.errors import BrokerUnavailable, CommitUnknown, StateIncompatible
from dedup.kafka.record_batch import NO_EPOCH, Columns, columns_of, leader_epochs
from dedup.kafka.requests import OTHER_TOPIC, UNKNOWN_TOPIC, FetchedPartition, FetchFrom
from dedup.kafka.wire import NoAnswer, TopicNow, TopicPartition

if TYPE_CHECKING:
    from dedup.kafka.client import KafkaWire
    from dedup.kafka.wire import Wire

UNAUTHORIZED: Final = 29
_LEAST_GAP_S: Final = 0.01
"""The pause between a response and the next request; tasks that commit in the meantime share that request."""
PAUSE_MS: Final = 100
MOST_PAUSES: Final = 200
"""After about 20 s without a response, the transaction is abandoned."""
_MOST_ABSENT: Final = 20
"""A broker that has just started may briefly know no topics; nothing is committed in the meantime."""
_PARTITION_BYTES: Final = 1 << 20
_REQUEST_BYTES: Final = 16 << 20
_OUT_OF_RANGE: Final = 1
_AGAIN_PAUSE_MS: Final = 100
MOST_DOUBTS: Final = 3
"""Number of consecutive responses that must say that the log does not hold a position before they are believed."""
_FEED_LANE: Final = "feed"
_FLOW_BYTES: Final = 512 << 10
"""While records arrive, a broker waits briefly for this many bytes, because a batch of a few rows costs nearly as much
as one of hundreds.
"""


class TopicCheck:
    """Checks that topics were not deleted, recreated, or given more partitions since the process started.

    A worker reads by topic id, so it never reads records of a recreated topic. But it must also not commit what it
    judged if partitions were added, because a producer that knows of the new partitions may send an ID to a different
    partition, old or new. So every transaction checks, after its last fetch and before its end, that the topics are
    unchanged. Tasks that commit at the same time share one request.

    The request is sent to one broker, which learns of changes from the controller's log. If a producer has placed a
    record by a partition count that this broker does not know yet, the check does not notice it; Kafka has no request
    that would reveal it.
    """

    def __init__(self, wire: Wire, expected: Mapping[str, TopicNow]) -> None:
        self._wire: Final = wire
        self._expected: Final = dict(expected)
        self._names: Final = tuple(sorted(expected))
        """Always requested in the same order, so that equal responses are equal bytes."""
        self._asking: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        """A request that is not sent yet, so its response will be newer than any call made now."""

    @classmethod
    async def of(cls, wire: Wire, *names: str) -> Self:
        """Return a check that topics stay as they are now; raises BrokerUnavailable if one cannot be described."""
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
        """Maps each topic name to the id that it must have."""
        return {name: topic.topic_id for name, topic in self._expected.items()}

    async def look(self) -> None:
        """Raise StateIncompatible if a topic has changed; return if none has changed or no broker responds."""
        await self._ask(most_silent=1)

    async def confirm(self) -> None:
        """Confirm with a request sent after the call that every topic still has its id and its number of partitions.

        Raises StateIncompatible if one has changed, BrokerUnavailable if the worker is not authorized to ask, and
        CommitUnknown if no broker responds for about 20 s.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._ask_after(self._asking), name="topic check")
            self._next.add_done_callback(_looked_at)
        # Shielded: a caller that gives up waiting must not cancel the question for the others.
        await asyncio.shield(self._next)

    async def _ask_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait({before})
            await asyncio.sleep(_LEAST_GAP_S)
        self._asking, self._next = self._next, None
        if not await self._ask(most_silent=MOST_PAUSES):
            raise CommitUnknown(f"no broker has described the topics for {MOST_PAUSES * PAUSE_MS // 1000} s.")

    async def _ask(self, *, most_silent: int) -> bool:
        """Return True when a broker reports no change, False after ``most_silent`` attempts without such a response."""
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
                    raise _deleted(gone[0])
            await self._wire.pause(PAUSE_MS)
        return False

    def _settled(self, name: str, found: TopicNow | int) -> bool:
        """Return True if the topic is unchanged, False if the request must be repeated."""
        expected = self._expected[name]
        match found:
            case TopicNow(topic_id, _) if topic_id != expected.topic_id:
                raise _another(name, expected.topic_id, topic_id)
            case TopicNow(_, partitions) if partitions > expected.partitions:
                raise _grown(name, expected.partitions, partitions)
            case TopicNow():
                return True
            case code if code == UNAUTHORIZED:
                raise BrokerUnavailable(
                    f"the worker may no longer describe topic {name!r} (code {code}). Nothing more was committed. "
                    f"Grant its principal what `dedup check --broker` lists, and restart it."
                )
            case _:
                return False


def _looked_at(asked: asyncio.Task[None]) -> None:
    """Mark an exception as retrieved; if nobody waits for it any more, the next request will raise it again."""
    if not asked.cancelled():
        asked.exception()


def _deleted(name: str) -> StateIncompatible:
    return StateIncompatible(
        f"topic {name!r} was deleted while this worker used it. Earlier commits are kept; nothing more was committed. "
        "If it is recreated, it is a different topic: start over with `dedup reset`."
    )


def _another(name: str, had: str, has: str) -> StateIncompatible:
    return StateIncompatible(
        f"topic {name!r} was deleted and recreated while this worker used it: it had id {had} and has id {has} now. "
        f"Earlier commits are kept; no record of the new topic was judged. Start over with `dedup reset`."
    )


def _grown(name: str, had: int, has: int) -> StateIncompatible:
    return StateIncompatible(
        f"topic {name!r} has {has} partitions now, and had {had} when the worker started: from now on an ID may go to "
        f"another partition than the one that saw it. Nothing read since the change was committed. `dedup reset` "
        f"starts over with {has}."
    )


class FeedEnd(NamedTuple):
    """The end offsets of a partition, for all readers and for `read_committed` readers."""

    high_watermark: int
    last_stable_offset: int
    seen_s: float
    """When the leader responded, by the event loop's clock."""


@dataclass(slots=True, eq=False)
class Reading:
    """The state of reading a partition, from one `begin` to the next."""

    topic_id: str
    position: int
    """The next offset to fetch."""
    leader_epoch: int
    """Leader epoch of the record before the position; -1 if unknown."""
    life: int
    """Unique to this reading."""
    over: bool = False
    """True once the partition is no longer read, or is read anew: what this reading fetched must not be judged."""
    doubts: int = 0
    """Number of consecutive responses that said that the log does not hold the position."""


class Answer(NamedTuple):
    """The records of one partition in a fetch response."""

    source: TopicPartition
    columns: Columns
    """Empty if the response held only markers and aborted records."""
    begun: int
    """The requested offset, which is where the previous response ended."""
    next_offset: int
    """The offset after the records and after any markers and aborted records that follow them."""
    reading: Reading
    """The reading it belongs to."""
    leader_epoch: int
    """Leader epoch of all records in the response; -1 if they differ."""


class FeedFetcher:
    """Reads the feeding partitions of one worker, by topic id."""

    def __init__(self, wire: KafkaWire, check: TopicCheck, *, wait_ms: int, gather_ms: int = 0) -> None:
        self._wire: Final = wire
        self._check: Final = check
        """Finds out what happened to a topic that a broker does not know."""
        self._topic_ids: Final = check.topic_ids
        self._wait_ms: Final = wait_ms
        """Maximum time that a broker may wait for the first record."""
        self._gather_ms: Final = gather_ms
        """Maximum time that a broker may wait for more data while records arrive."""
        self._flowing: Final[set[int]] = set()
        """Brokers whose last response contained records."""
        self._readings: dict[TopicPartition, Reading] = {}
        self._ends: dict[TopicPartition, FeedEnd] = {}
        self._flights: dict[int, asyncio.Task[list[Answer]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self.life = 0
        """Changes with every `forget`, so that responses to earlier requests are discarded."""
        self._lives = 0
        self._turn = 0

    def begin(self, source: TopicPartition, offset: int, *, leader_epoch: int = NO_EPOCH) -> int:
        """Start to read a partition at an offset, and return the number that identifies this reading.

        ``leader_epoch`` is the epoch of the record before the offset, as committed with the offset. Responses that
        belong to an older reading of the partition are discarded.
        """
        self.halt(source)
        self._lives += 1
        self._readings[source] = Reading(self._topic_ids[source.topic], offset, leader_epoch, self._lives)
        return self._lives

    def halt(self, source: TopicPartition) -> None:
        """Stop reading a partition; responses still in flight are discarded."""
        reading = self._readings.pop(source, None)
        if reading is not None:
            reading.over = True

    def forget(self) -> None:
        """Stop reading all partitions; responses still in flight are discarded."""
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
        """Return the partition's end in its leader's last response; None before the first response."""
        return self._ends.get(source)

    def position(self, source: TopicPartition) -> int | None:
        """Return the next offset to fetch; records below it may not have been returned by `poll` yet."""
        reading = self._readings.get(source)
        return None if reading is None else reading.position

    async def poll(self, wanted: Collection[TopicPartition]) -> list[Answer]:
        """Return the records of the wanted partitions in the first response; empty if none arrives in time.

        Raises StateIncompatible if the log no longer holds a position, if it holds other records there, or if the topic
        was deleted or recreated.
        """
        await self._launch(wanted)
        if not self._flights:
            await asyncio.sleep(self._wait_ms / 1000)
            return []
        done, _ = await asyncio.wait(self._flights.values(), return_when=asyncio.FIRST_COMPLETED)
        # All at once: during the refresh below the assignment may end, and the flights with it.
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
                    leaderless = True  # perhaps only for a moment, and the next poll asks again; or the topic is gone
        if leaderless:
            self._look_beside()
        if life != self.life:
            return  # the assignment ended while leaders were looked up
        self._turn += 1
        for node, led in by_leader.items():
            # A broker fills an answer in the order of the request: the partitions take turns at being first.
            first = self._turn % len(led)
            sources = [source for source in led[first:] + led[:first] if source in self._readings]
            if node not in self._flights and sources:
                self._flights[node] = asyncio.create_task(self._fetch(node, sources), name=f"fetch from {node}")

    def _look_beside(self) -> None:
        """Check the topics in the background while partitions that have a leader are still read.

        Raises StateIncompatible if an earlier check found a change.
        """
        looking = self._looking
        if looking is None:
            self._looking = asyncio.create_task(self._check.look(), name="look for changed topics")
        elif looking.done():
            self._looking = None
            looking.result()

    async def _fetch(self, node: int, sources: list[TopicPartition]) -> list[Answer]:
        asked = {
            (reading.topic_id, source.partition): (source, reading, reading.position)
            for source in sources
            if (reading := self._readings.get(source)) is not None
        }
        wait_ms, least_bytes = (self._gather_ms, _FLOW_BYTES) if node in self._flowing else (self._wait_ms, 1)
        wanted = [
            FetchFrom(reading.topic_id, source.partition, position, reading.leader_epoch, _PARTITION_BYTES)
            for source, reading, position in asked.values()
        ]
        code, parts = await self._wire.fetch_partitions(
            node, wanted, wait_ms=wait_ms, least_bytes=least_bytes, most_bytes=_REQUEST_BYTES, lane=_FEED_LANE
        )
        self._flowing.discard(node)
        if code:
            await self._wire.pause(_AGAIN_PAUSE_MS)
            raise NoAnswer(f"broker {node} answered a fetch with code {code}")
        found: list[Answer] = []
        failed: list[tuple[TopicPartition, Reading, FetchedPartition]] = []
        for part in parts:
            source, reading, begun = asked[part.topic_id, part.partition]
            if reading.over or reading.position != begun:
                continue  # a new reading began meanwhile, or a new leader has answered
            if part.error_code or (part.parts_at is not None and part.parts_at < begun):
                failed.append((source, reading, part))
                continue
            if part.parts_at is not None:
                # Our epoch is gone from the log, as after compaction, but the log goes on past our position.
                reading.leader_epoch = NO_EPOCH
            reading.doubts = 0
            self._ends[source] = FeedEnd(
                part.high_watermark, part.last_stable_offset, asyncio.get_running_loop().time()
            )
            if part.records:
                self._flowing.add(node)
                found.append(_taken(source, reading, begun, part))
        for source, reading, part in failed:
            await self._failed(source, reading, part)
        return found

    async def _failed(self, source: TopicPartition, reading: Reading, part: FetchedPartition) -> None:
        place, code = f"{source.topic}/{source.partition}", part.error_code
        if part.parts_at is not None or code == _OUT_OF_RANGE:
            reading.doubts += 1
            if reading.doubts < MOST_DOUBTS and not self._wire.one_broker:
                # A broker that was frozen may still take itself for the leader: ask its successor, too.
                await self._wire.refresh()
                await self._wire.pause(_AGAIN_PAUSE_MS)
                return
        if part.parts_at is not None:
            raise StateIncompatible(
                f"{place} was read up to offset {reading.position}, but its leader holds other records from offset "
                f"{part.parts_at} on: the log was truncated there and filled again, as an unclean leader election or a "
                f"broker that lost its disk does. Nothing was skipped, and nothing after the truncation was judged. "
                f"`dedup reset --to` a time before it starts over."
            )
        if code == _OUT_OF_RANGE:
            raise StateIncompatible(
                f"{place} no longer holds offset {reading.position}, which is to be read next: retention "
                f"deleted records before they were judged. Nothing was skipped. Lengthen `retention.ms` of the topic; "
                f"`dedup reset --to earliest` accepts the loss."
            )
        if code in OTHER_TOPIC:
            await self._check.look()
            await self._wire.pause(_AGAIN_PAUSE_MS)
            return  # the topic is unchanged: this broker has only just become its leader
        if for_code(code).retriable or code in self._wire.leader_moved:
            await self._wire.refresh()
            return
        raise BrokerUnavailable(
            f"{place} cannot be read: {for_code(code).__name__}. Check the principal's permissions."
        )


def _taken(source: TopicPartition, reading: Reading, begun: int, part: FetchedPartition) -> Answer:
    """Return the records of a response, and advance the reading past them."""
    columns, position = columns_of(source, part.records, part.aborted, begun)
    first, last = leader_epochs(part.records)
    if position > begun:
        reading.position, reading.leader_epoch = position, last
    return Answer(source, columns, begun, position, reading, last if first == last else NO_EPOCH)
