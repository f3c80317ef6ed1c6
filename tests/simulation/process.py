"""A simulated worker process: production `TaskManager`, `Task`, `Judge` and `Session` on a simulated wire and disk.

Everything the process wants from outside is *parked*: a request, a timer, the next records of its feeding partition.
The scheduler decides which parked call goes on, how it ends, and whether the process is killed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from dedup.errors import StateIncompatible, TaskCorrupted
from dedup.kafka.record_batch import FeedBatch, Limit
from dedup.kafka.wire import (
    CommittedOffset,
    Fetched,
    LogBounds,
    NoAnswer,
    Position,
    Produced,
    ProducerIdentity,
    TopicNow,
    TopicPartition,
)
from dedup.store.base import MemoryStore
from dedup.store.changelog import TaskRecord, Writes
from dedup.store.directory import StorePool
from dedup.worker.task_manager import Factory, TaskManager
from tests.simulation.cluster import CONCURRENT, Cluster, Record
from tests.simulation.loop import SimLoop

if TYPE_CHECKING:
    from dedup.store.base import Store

LOADING = 14
COMMIT_INTERVAL_MS = 1_000
ALWAYS: Callable[[], bool] = lambda: True  # noqa: E731  # a default of a dataclass


class Killed(BaseException):
    """The process was killed where it stood."""


@dataclass(slots=True, eq=False)
class Parked:
    """Something a process waits for."""

    name: str
    lane: str
    """Requests of one lane keep their order: they share a connection."""
    effect: Callable[[], Any]
    future: asyncio.Future[Any]
    writes: bool = False
    put_off: Callable[[], Any] | None = None
    """The answer "try again", where the request can have it."""
    enabled: Callable[[], bool] = ALWAYS


def batch_of(feeding: TopicPartition, records: Sequence[Record], follows: int, life: int = 0) -> FeedBatch:
    """Return records as the transport hands them to a task."""
    return FeedBatch(
        feeding,
        [row.offset for row in records],
        [row.timestamp for row in records],
        [row.key for row in records],
        [row.value for row in records],
        [row.headers for row in records],
        follows,
        life=life,
    )


class Disk(Protocol):
    """What of a process survives it."""

    def open(self, process: Process) -> Store:
        """Return the store as it was left."""

    def killed(self) -> None:
        """The process that used the disk is gone."""

    def wipe(self) -> None:
        """All of it is deleted."""


class MemoryDisk:
    """The content of a store, which every write reaches whole or not at all."""

    def __init__(self) -> None:
        self.kept = MemoryStore()

    def open(self, process: Process) -> Store:
        process.disk_read("open")
        return DiskStore(self.kept, process)

    def killed(self) -> None:
        """Nothing is lost: a write is atomic."""

    def wipe(self) -> None:
        self.kept = MemoryStore()

    def copy(self) -> MemoryDisk:
        other = MemoryDisk()
        for segment, state_key, value in self.kept.sightings():
            other.kept.apply({segment: {state_key: value}}, None, 0)
        other.kept.apply({}, self.kept.task_record, self.kept.position)
        return other


class DiskStore(MemoryStore):
    """A process' view of a memory disk; between two writes it may be killed."""

    def __init__(self, kept: MemoryStore, process: Process) -> None:
        super().__init__()
        self.kept = kept
        self.process = process
        self._segments = kept._segments
        self.task_record = kept.task_record
        self.position = kept.position

    def get_each(self, segments: Sequence[int], ids: Sequence[bytes]) -> dict[int, dict[bytes, bytes]]:
        self.process.disk_read("lookup")
        return super().get_each(segments, ids)

    def apply(self, writes: Writes, record: TaskRecord | None, position: int) -> None:
        self.process.disk_write("apply", lambda: self._torn(writes))
        super().apply(writes, record, position)
        self.kept.task_record = self.task_record
        self.kept.position = self.position

    def _torn(self, writes: Writes) -> None:
        """Half of the keys reach the disk, and neither task record nor position."""
        half = {start: dict(islice(values.items(), (len(values) + 1) // 2)) for start, values in writes.items()}
        super().apply(half, None, self.position)

    def drop_below(self, oldest_live_ms: int, segment_ms: int) -> tuple[int, ...]:
        if any(start + segment_ms <= oldest_live_ms for start in self._segments):
            self.process.disk_write("drop")
        return super().drop_below(oldest_live_ms, segment_ms)

    def wipe(self) -> None:
        raise AssertionError("no simulated disk is ever damaged, so nothing has a reason to wipe one")


class SimWire:
    """`Wire` of one process: every request is parked."""

    def __init__(self, process: Process, cluster: Cluster) -> None:
        self._process = process
        self._cluster = cluster
        self._pinned: dict[str, str] = {}

    def pin(self, topic_ids: Mapping[str, str]) -> None:
        self._pinned = dict(topic_ids)

    async def refresh(self) -> None:
        pass

    async def pause(self, delay_ms: int) -> None:
        await self._process.park("pause", "pause", lambda: None)

    async def init_producer_id(self, transactional_id: str, timeout_ms: int) -> tuple[int, ProducerIdentity]:
        answer: tuple[int, ProducerIdentity] = await self._process.park(
            "InitProducerId",
            "transactions",
            lambda: self._cluster.init_producer_id(transactional_id),
            writes=True,
            put_off=lambda: (CONCURRENT, ProducerIdentity(-1, -1)),
        )
        return answer

    async def add_partitions(
        self, transactional_id: str, identity: ProducerIdentity, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        wanted = list(partitions)
        answer: dict[TopicPartition, int] = await self._process.park(
            "AddPartitions",
            "transactions",
            lambda: self._cluster.add_partitions(transactional_id, identity, wanted),
            writes=True,
            put_off=lambda: dict.fromkeys(wanted, CONCURRENT),
        )
        return answer

    async def produce(
        self, transactional_id: str, identity: ProducerIdentity, batches: Sequence[tuple[TopicPartition, bytes]]
    ) -> Awaitable[dict[TopicPartition, Produced]]:
        sent = list(batches)
        later = partial(self._cluster.produce, transactional_id, identity, sent, put_off=True)
        return self._process.park(
            "Produce",
            "leader",
            lambda: self._cluster.produce(transactional_id, identity, sent),
            writes=True,
            put_off=later if identity.implicit else None,
        )

    async def add_offsets(self, transactional_id: str, identity: ProducerIdentity, group: str) -> int:
        answer: int = await self._process.park(
            "AddOffsets",
            "transactions",
            lambda: self._cluster.add_offsets(transactional_id, identity, group),
            writes=True,
            put_off=lambda: CONCURRENT,
        )
        return answer

    async def commit_offsets(
        self, transactional_id: str, identity: ProducerIdentity, group: str, offsets: Mapping[TopicPartition, Position]
    ) -> int:
        wanted = dict(offsets)
        answer: int = await self._process.park(
            "TxnOffsetCommit",
            "group",
            lambda: self._cluster.commit_offsets(transactional_id, identity, group, wanted),
            writes=True,
            put_off=lambda: LOADING,
        )
        return answer

    async def end_transaction(
        self, transactional_id: str, identity: ProducerIdentity, *, commit: bool
    ) -> tuple[int, ProducerIdentity]:
        answer: tuple[int, ProducerIdentity] = await self._process.park(
            "EndTxn",
            "transactions",
            lambda: self._cluster.end_transaction(transactional_id, identity, commit=commit),
            writes=True,
            put_off=lambda: (CONCURRENT, identity),
        )
        return answer

    async def committed_offset(self, group: str, source: TopicPartition, *, stable: bool) -> CommittedOffset:
        answer: CommittedOffset = await self._process.park(
            "OffsetFetch",
            "group",
            lambda: self._cluster.committed_offset(group, source, stable=stable),
            put_off=lambda: CommittedOffset(LOADING, None),
        )
        return answer

    async def limit(self, target: TopicPartition) -> Limit | None:
        return None  # it refuses by content: only the broker knows

    async def bounds(self, source: TopicPartition) -> LogBounds:
        answer: LogBounds = await self._process.park("ListOffsets", "leader", lambda: self._cluster.bounds(source))
        return answer

    async def topics(self, names: tuple[str, ...]) -> Mapping[str, TopicNow | int]:
        answer: dict[str, TopicNow | int] = await self._process.park(
            "Metadata", "metadata", lambda: self._cluster.topics(names)
        )
        return answer

    async def offset_at(self, source: TopicPartition, time_ms: int) -> int | None:
        return self._cluster.offset_at(source, time_ms)

    async def fetch(self, source: TopicPartition, offset: int, *, max_bytes: int, wait_ms: int) -> Fetched:
        log = self._cluster.partition(source)

        def more() -> bool:
            another = self._is_another(source.topic)  # of which a broker says so at once
            return another or log.stable_end > offset or log.end == offset or wait_ms == 0

        answer: Fetched | None = await self._process.park(
            "Fetch",
            "fetch",
            lambda: None if self._is_another(source.topic) else self._cluster.fetch(source, offset),
            enabled=more,
        )
        if answer is None:
            raise StateIncompatible(f"{source}: the broker knows no topic of this id")
        return answer

    def _is_another(self, topic: str) -> bool:
        now = self._cluster.topics([topic])[topic]
        return isinstance(now, TopicNow) and self._pinned.get(topic, now.topic_id) != now.topic_id


class Process:
    """One incarnation of a worker."""

    def __init__(self, worker: int, incarnation: int, cluster: Cluster, disks: Mapping[TopicPartition, Disk]) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.cluster = cluster
        self.disks = disks
        self.parked: list[Parked] = []
        self.loop = SimLoop(self._park_timer)  # type: ignore[abstract]  # what asyncio asks of it is there
        self.wire = SimWire(self, cluster)
        self.owner = True
        self.rebalancing = False
        self.dies_at_write: Callable[[str], str] = lambda _name: ""
        """What the schedule does to a write: nothing, or the process dies before it, or in it."""
        self.finds_damage: Callable[[str], bool] = lambda _name: False
        self.now_ms = 0
        """Wall time at the start; the worker's clock does not follow a clock that is set while it runs."""
        self.fingerprint = b""
        self.tasks: TaskManager
        self._feeding: tuple[TopicPartition, ...] = ()
        self._most_records = 1
        self._feeders: dict[TopicPartition, asyncio.Task[None]] = {}
        self._lives = 0
        self.grouped = False
        """Whether all its partitions are one group."""
        self.polls = 0
        """How often records were read."""
        self.store_pool = StorePool()
        self.started_at: dict[TopicPartition, int] = {}
        """Feeding partition -> where its present task began to read."""

    @property
    def dead(self) -> bool:
        return self.loop.dead

    def assign(self, feeding: Sequence[TopicPartition], factory: Factory, most_records: int) -> None:
        """Start the tasks of an assignment."""
        self._feeding, self._most_records = tuple(feeding), most_records
        self.loop.within(lambda: self._begin(factory))

    def _begin(self, factory: Factory) -> None:
        self.tasks = TaskManager(factory, lambda: self, commit_interval_ms=COMMIT_INTERVAL_MS)
        self._spawn(self.tasks.assign(self._feeding))

    def _spawn(self, coroutine: Any) -> None:
        self.loop.create_task(coroutine)

    def begin(self, feeding: TopicPartition, position: Position) -> int:
        self.halt(feeding)
        self.started_at[feeding] = position.offset
        self._lives += 1
        self._feeders[feeding] = self.loop.create_task(self._feed(feeding, position.offset, self._lives))
        return self._lives

    def halt(self, feeding: TopicPartition) -> None:
        feeder = self._feeders.pop(feeding, None)
        if feeder is not None:
            feeder.cancel()

    def rejoin(self) -> None:
        self._spawn(self._rejoin())

    async def is_member(self) -> bool | None:
        try:
            counted_in: bool = await self.park("Heartbeat", "group", lambda: self.owner)
        except NoAnswer:
            return None
        return counted_in

    def wipe(self, feeding: TopicPartition) -> None:
        waiting = self.store_pool.take(feeding.partition)
        if waiting is not None:
            waiting.close()
        self.disks[feeding].wipe()

    async def _rejoin(self) -> None:
        """What the transport does on a rebalance: tasks of lost partitions end, with what they can still commit."""
        if not self.owner:
            await self._stop()
        await self.tasks.assign(self._feeding if self.owner else ())

    async def _stop(self) -> None:
        feeders, self._feeders = list(self._feeders.values()), {}
        for feeder in feeders:
            feeder.cancel()
        await asyncio.gather(*feeders, return_exceptions=True)
        await self.tasks.close_all(drain=True)

    def revoke(self) -> None:
        """The group takes the partitions away, in peace."""
        self.owner = False
        self.loop.within(lambda: self._spawn(self._stop()))

    async def _feed(self, feeding: TopicPartition, offset: int, life: int) -> None:
        """Read committed records of a feeding partition and give them to its task, batch by batch.

        By the topic's id, as the fetcher does: what stands under its name meanwhile is another log.
        """
        log = self.cluster.partition(feeding)
        follows = offset
        while True:

            def more(at: int = offset) -> bool:
                return at < log.stable_end or self.cluster.partition(feeding) is not log

            end: int = await self.park("Poll", f"feed {feeding}", lambda: log.stable_end, enabled=more)
            if self.cluster.partition(feeding) is not log:
                raise StateIncompatible(f"{feeding}: the broker knows no topic of this id")
            records: list[Record] = []
            while offset < end and len(records) < self._most_records:
                records += log.committed(offset, offset + 1)
                offset += 1
            if not records:
                continue
            batch = batch_of(feeding, records, follows, life)
            follows = batch.next_offset
            await self.tasks.process(batch)

    def park(
        self,
        name: str,
        lane: str,
        effect: Callable[[], Any],
        *,
        writes: bool = False,
        put_off: Callable[[], Any] | None = None,
        enabled: Callable[[], bool] = ALWAYS,
    ) -> asyncio.Future[Any]:
        future = self.loop.create_future()
        if not self.dead:
            self.parked.append(Parked(name, lane, effect, future, writes, put_off, enabled))
        return future

    def _park_timer(self, handle: asyncio.TimerHandle) -> None:
        future = self.loop.create_future()
        # A timer is cancelled through its handle; its place in the list goes with it.
        enabled: Callable[[], bool] = lambda: not handle.cancelled()  # noqa: E731
        if not self.dead:
            self.parked.append(Parked("Timer", "timer", lambda: self.loop.due(handle), future, enabled=enabled))

    def disk_write(self, name: str, torn: Callable[[], None] = lambda: None) -> None:
        """Die here if the schedule says so; the write is then not done, or ``torn`` is done in its place."""
        fate = "" if self.dead else self.dies_at_write(name)
        if self.dead or fate:
            if fate == "torn":
                torn()
            self.loop.dead = True
            raise Killed

    def disk_read(self, name: str) -> None:
        """Find damage here if the schedule says so."""
        if not self.dead and self.finds_damage(name):
            raise TaskCorrupted(f"a checksum does not fit at {name}")

    def answer(self, call: Parked, value: Any) -> None:
        if not call.future.done():
            call.future.set_result(value)

    def no_answer(self, call: Parked) -> None:
        if not call.future.done():
            call.future.set_exception(NoAnswer(f"{call.name}: the answer was lost"))

    def bury(self) -> None:
        """Forget a killed process."""
        self.loop.dead = True
        self.parked.clear()
        for disk in self.disks.values():
            disk.killed()
        self.loop.kill()

    @property
    def failure(self) -> BaseException | None:
        """Why the worker stops by itself."""
        failure = self.tasks.failure
        if failure.done():
            return failure.result()
        ended = [feeder for feeder in self._feeders.values() if feeder.done() and not feeder.cancelled()]
        return ended[0].exception() if ended else None
