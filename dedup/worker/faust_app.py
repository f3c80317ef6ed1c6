"""Adapts Faust: defines an app whose messages are whole batches, a table of sightings, and an assignor of task groups.

Each Faust message is a whole batch of records, so Faust adds its overhead once per batch, not once per record. Tasks,
not Faust, handle offsets, transactions, sends, and restores, so Faust's methods for these operations raise an error
(see `refused`). The table is read-only, because a task must store a sighting in the same transaction as the verdict on
its record. Each task restores its own state, so Faust's recovery service never starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn, cast

import aiokafka
import aiokafka.abc
import faust
from aiokafka.errors import InvalidSessionTimeoutError, KafkaError
from aiokafka.protocol.group import HeartbeatRequest, LeaveGroupRequest
from faust.assignor.client_assignment import ClientAssignment, ClientMetadata
from faust.assignor.partition_assignor import PartitionAssignor
from faust.stores import STORES
from faust.stores.base import Store as FaustStore
from faust.tables import TableManager as FaustTableManager
from faust.transport import base
from faust.transport.consumer import Consumer as FaustConsumer
from faust.transport.consumer import TransactionManager as FaustTransactionManager
from faust.transport.drivers import TRANSPORTS
from faust.transport.producer import Producer as FaustProducer
from faust.types import TP, AppT, ConsumerMessage
from yarl import URL

from dedup.core.window import Sighting
from dedup.errors import BrokerUnavailable, DedupError, InvariantBroken
from dedup.kafka.client import KafkaWire, back_off, outlast_blocks, sendable
from dedup.kafka.connection import connect, never_create_topics
from dedup.kafka.consumer import Answer, FeedFetcher
from dedup.kafka.record_batch import Columns, FeedBatch
from dedup.kafka.requests import HeartbeatRequest_v3
from dedup.kafka.schema_registry import SchemaResolver
from dedup.kafka.wire import COORDINATOR_MOVED, NoAnswer, Position, TopicPartition
from dedup.metrics import DeadLetterAlert
from dedup.settings import Settings
from dedup.store.directory import StorePool
from dedup.worker.dedup_task import DedupTask
from dedup.worker.restore import Standbys
from dedup.worker.task_factory import TaskFactory
from dedup.worker.task_manager import TaskManager

log: Final = logging.getLogger(__name__)
BATCH_RECORDS: Final = 4000
_POLL_MS: Final = 200
_GATHER_SHARE: Final = 4
"""To collect larger batches, the fetcher pauses for up to 1/`_GATHER_SHARE` of the commit interval."""
_MOST_GATHER_MS: Final = 25
_CLIENT_LOOK_S: Final = 60.0
"""The interval, in seconds, at which aiokafka's client looks for partitions to fetch. All partitions are paused, so the
client never finds one.
"""
_HEARTBEATS: Final = 5
"""The minimum number of heartbeats within a session timeout."""
_MOST_HEARTBEAT_MS: Final = 200
_REBALANCE_IN_PROGRESS: Final = 27
"""The error code of a heartbeat during a rebalance; the member still owns its partitions until it rejoins."""
_FENCED_INSTANCE: Final = 82
"""The error code for a static member that another process has replaced."""
_NOT_READ: Final = -1
"""The value that `begin` returns if the partition is not assigned to this worker, so that nothing is read."""

NOWHERE: Final = "no-pages.invalid"
"""The host name that a worker without web pages announces; a host with this name can never exist (RFC 2606)."""


def identity(worker_id: str | None, url: str | None) -> str:
    """Return a worker's unique name in the group: the URL of its web pages with the worker ID as the fragment."""
    return str(URL(url or f"http://{NOWHERE}").with_fragment(worker_id))


def refused(what: str) -> Callable[..., NoReturn]:
    """Return a method that raises InvariantBroken, to replace a Faust method that would bypass the tasks."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise InvariantBroken(
            f"{what} would not be part of the task's transaction, so it was refused. Records that belong to an outcome "
            "go through `Task.process`; a task commits its own offset, and restores its state from the changelog."
        )

    return refuse


class BatchSchema(faust.Schema[Any, Any]):
    """A schema that decodes nothing, because messages are already `FeedBatch` values."""

    def compile(self, app: AppT, **_: Any) -> Callable[..., Any]:
        """Return a decoder that returns the batch unchanged."""
        create_event = app.create_event

        async def decode(message: Any, *, propagate: bool = False) -> Any:  # Faust defines this signature
            return create_event(message.key, message.value, message.headers, message)

        return decode


class RebalanceListener(aiokafka.abc.ConsumerRebalanceListener):  # type: ignore[misc]  # the base class has no types
    """Passes new assignments from aiokafka to Faust, which passes them to the tasks.

    Tasks continue while the consumer group rebalances, because fencing depends on transactional IDs, not on group
    membership. Therefore, the listener does not tell Faust about revoked partitions; otherwise, Faust would empty its
    agents' queues.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer: Final = consumer

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        """Remember that the group is rebalancing; the next assignment shows which partitions are lost."""
        self._consumer.rebalancing = True

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        """Pause new partitions, because each partition may be read only after its task has set the position."""
        consumer = self._consumer
        consumer.client.pause(*assigned)
        for tp in assigned:
            # Without a position, the client would ask the broker for the offsets one partition at a time.
            consumer.client.seek(tp, 0)
        consumer.app.on_rebalance_start()
        await consumer.close_if_expelled()
        # Faust's generation stays the same, because Faust's streams drop messages of an older generation.
        await consumer.on_partitions_assigned({TP(tp.topic, tp.partition) for tp in assigned})
        consumer.app.on_rebalance_end()
        consumer.announce()


class DedupApp(faust.App):
    """A Faust app that also holds a worker's tasks; built by `dedup.worker.worker.create_app`."""

    settings: Settings
    wire: KafkaWire
    factory: TaskFactory
    tasks: TaskManager
    standbys: Standbys
    pool: StorePool
    schemas: SchemaResolver | None = None
    """Looks up the schemas that values name, or None if the topology needs no schema registry."""
    alert: DeadLetterAlert | None = None
    """The alert while nearly all records become dead letters, or None."""
    sub_topologies: dict[str, tuple[str, ...]]
    """Maps the name of each sub-topology to its feeding topics."""
    on_connected: Callable[[], None] = staticmethod(lambda: None)
    """Called once when the group member is connected, before it joins the group."""

    @property
    def member(self) -> Consumer:
        """The app's consumer, typed as `Consumer`."""
        return cast("Consumer", self.consumer)

    @property
    def feeding_topics(self) -> frozenset[str]:
        """All topics whose partitions have tasks."""
        return frozenset(topic for topics in self.sub_topologies.values() for topic in topics)


class Consumer(FaustConsumer):
    """A Faust consumer and group member whose messages are batches."""

    app: DedupApp
    client: aiokafka.AIOKafkaConsumer
    """The client that maintains the group membership; it fetches nothing."""
    fetcher: FeedFetcher

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._delivered: dict[TP, int] = {}
        """Maps each partition to the offset that its next batch must follow."""
        self.rebalancing = False
        """True from the start of a rebalance until its assignment has reached the tasks."""
        self._joined_as = ""
        """The member ID that the group gave to this worker; it changes if the worker is expelled and joins again."""
        self._held: dict[TP, deque[Answer]] = {}
        """Maps each partition whose records wait for a schema to the fetch responses that are held back."""
        self._passed: dict[TP, int] = {}
        """Maps each partition to the offset below which every committed record has been delivered."""
        self._replaced = False
        """True if another process has joined the group with this worker's ID."""
        self._announced = False
        """True if this worker has asked for an assignment that names its address. A worker asks only once."""

    async def on_start(self) -> None:
        """Start the client without joining the group. The worker joins when Faust subscribes, after Faust's agents have
        started. Raises BrokerUnavailable if no broker responds; see `connect`.
        """
        app = self.app
        self.client = aiokafka.AIOKafkaConsumer(
            **app.wire.connection.client_options(),
            group_id=app.conf.id,
            group_instance_id=app.settings.worker_id,
            partition_assignment_strategy=[app.assignor],
            enable_auto_commit=False,
            max_poll_interval_ms=3_600_000,
            fetch_max_wait_ms=_POLL_MS,
            session_timeout_ms=app.settings.session_timeout_ms,
            heartbeat_interval_ms=min(app.settings.session_timeout_ms // _HEARTBEATS, _MOST_HEARTBEAT_MS),
            rebalance_timeout_ms=60_000,
        )
        inner = self.client._client  # noqa: SLF001  # aiokafka's consumer creates its own client
        back_off(inner)
        outlast_blocks(inner)
        never_create_topics(inner)
        try:
            await connect(app.wire.connection, inner, self.client.start)
        except BaseException:
            await self.client.stop()
            raise
        app.on_connected()
        self._name_heartbeats()
        # By default, the client loops over all partitions five times a second.
        self.client._fetcher._fetcher_timeout = _CLIENT_LOOK_S  # noqa: SLF001  # aiokafka has no public setting for this
        gather_ms = min(app.settings.commit_interval_ms // _GATHER_SHARE, _MOST_GATHER_MS)
        self.fetcher = FeedFetcher(app.wire, app.factory.check, wait_ms=_POLL_MS, gather_ms=gather_ms)

    def _name_heartbeats(self) -> None:
        """Send the worker's ID in each heartbeat, so that the response shows whether another process has replaced the
        worker.

        aiokafka's own heartbeats do not contain the ID. Without the ID, the broker would report an unknown member, and
        the client would join again. Two processes with the same ID would replace each other repeatedly without making
        progress.
        """
        coordinator = self.client._coordinator  # noqa: SLF001  # aiokafka has no public API for this
        send = coordinator._send_req  # noqa: SLF001

        async def named(request: Any) -> Any:
            if isinstance(request, HeartbeatRequest):
                member = coordinator.group_id, coordinator.generation, coordinator.member_id
                request = sendable(HeartbeatRequest_v3(*member, self.app.settings.worker_id))
            answer = await send(request)
            self._replaced = self._replaced or getattr(answer, "error_code", 0) == _FENCED_INSTANCE
            return answer

        coordinator._send_req = named  # noqa: SLF001

    async def on_stop(self) -> None:
        """Leave the consumer group after all tasks have been closed."""
        if self.app.schemas is not None:
            self.app.schemas.close()
        await super().on_stop()
        await self._leave()
        await self.client.stop()

    async def _leave(self) -> None:
        """Leave the group on a clean stop; otherwise, a static member's partitions wait for the session timeout."""
        coordinator = self.client._coordinator  # noqa: SLF001  # aiokafka has no public API for this
        if coordinator.generation > 0 and coordinator.coordinator_id is not None:
            try:
                await coordinator._send_req(LeaveGroupRequest(coordinator.group_id, coordinator.member_id))  # noqa: SLF001
            except KafkaError as error:
                log.info("could not leave the group: %r", error)

    async def subscribe(self, topics: Iterable[str]) -> None:
        """Subscribe to the topics, which starts the first rebalance."""
        self.client.subscribe(topics=sorted(set(topics)), listener=RebalanceListener(self))

    def begin(self, feeding: TopicPartition, position: Position) -> int:
        """Start reading a partition at a position, and return a number that identifies the batches read from there."""
        tp = TP(*feeding)
        if tp not in self.assignment():
            return _NOT_READ
        life = self.fetcher.begin(feeding, position.offset, leader_epoch=position.leader_epoch)
        self._read_offset[tp] = None
        self._delivered[tp] = self._passed[tp] = position.offset
        self.resume_partitions({tp})
        return life

    def halt(self, feeding: TopicPartition) -> None:
        """Stop reading a partition until `begin` is called, because its task is being rebuilt."""
        self.fetcher.halt(feeding)

    def pause_partitions(self, tps: Iterable[TP]) -> None:
        """Pause partitions, except those whose tasks continue; Faust calls this method with all assigned partitions."""
        super().pause_partitions([tp for tp in tps if self.fetcher.position(TopicPartition(*tp)) is None])

    async def is_member(self) -> bool | None:
        """Return whether this worker is still a member of the group, or None if the coordinator does not respond.

        Only the coordinator knows whether the group has removed a worker that was frozen.
        """
        coordinator = self.client._coordinator  # noqa: SLF001  # aiokafka has no public API for this
        if coordinator.generation <= 0:
            return False
        request = HeartbeatRequest(coordinator.group_id, coordinator.generation, coordinator.member_id)
        try:
            code, _ = await self.app.wire.ask_group(coordinator.group_id, request)
        except NoAnswer:
            return None
        return None if code in COORDINATOR_MOVED else code in {0, _REBALANCE_IN_PROGRESS}

    def passed(self, feeding: TopicPartition, end: int, judged: int) -> bool:
        """Return whether all committed records below ``end`` have been delivered and judged."""
        tp = TP(*feeding)
        return self._passed.get(tp, -1) >= end and self._delivered.get(tp) == judged

    async def close_if_expelled(self) -> None:
        """Close every task if the group has expelled this worker and admitted it again.

        While the worker was not a member, its partitions may have had other owners. A busy task would be fenced at its
        next commit, but an idle task commits nothing and would not notice.
        """
        member_id = self.client._coordinator.member_id  # noqa: SLF001  # aiokafka has no public API for this
        if member_id != self._joined_as:
            self.fetcher.forget()
            await self.app.tasks.close_all(drain=False)
        self._joined_as = member_id

    def lost_membership(self) -> DedupError | None:
        """Return an error if this worker has permanently lost its group membership, or None."""
        if self._replaced:
            return BrokerUnavailable(
                f"another process has joined the group {self.app.conf.id!r} with this worker's ID "
                f"({self.app.settings.worker_id}) and has taken its place. Give each worker its own `worker_id` and "
                "`state_dir`."
            )
        coordinator = self.client._coordinator  # noqa: SLF001  # aiokafka reports a lost membership only in getmany
        routine = getattr(coordinator, "_coordination_task", None)
        pending = getattr(coordinator, "_pending_exception", None)
        if pending is None and (routine is None or not routine.done() or self.client._closed):  # noqa: SLF001
            return None
        return _not_a_member(self.app, pending)

    async def _stay_member(self) -> None:
        """Poll, because aiokafka considers a member alive only while the member polls.

        Raises DedupError if this worker is no longer a member.
        """
        if (lost := self.lost_membership()) is not None:
            raise lost
        try:
            # This poll returns no records, because all partitions are paused.
            await self.client.getmany(timeout_ms=0)
        except KafkaError as error:  # The membership was lost during the poll.
            raise self.lost_membership() or _not_a_member(self.app, error) from error

    def rejoin(self) -> None:
        """Ask the consumer group for a new assignment, unless a rebalance is in progress."""
        if not self.rebalancing:
            self.client._coordinator.request_rejoin()  # noqa: SLF001  # aiokafka has no public API for this

    def announce(self) -> None:
        """Ask once for a new assignment if the current assignment names a former address of this worker.

        Otherwise, the other workers would use that address until the next rebalance.
        """
        if cast("GroupAssignor", self.app.assignor).readdressed and not self._announced:
            self._announced = True
            log.info("the group knows a former address of this worker; the worker rejoins to announce the new one")
            self.rejoin()

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, ConsumerMessage]]:
        """Yield batches of the partitions whose tasks are running."""
        if not self.flow_active:
            await self.can_resume_flow.wait()
        generation = self.app.consumer_generation_id
        try:
            await self._stay_member()
            active = [TopicPartition(*tp) for tp in self._get_active_partitions() if tp not in self._held]
            found = await self.fetcher.poll([feeding for feeding in active if not self.app.tasks.is_full(feeding)])
        except DedupError as error:
            # The error is not raised, because Faust would log a traceback. The worker stops with the error's message.
            self.app.tasks.fail(error)
            await asyncio.sleep(_POLL_MS / 1000)
            return
        for answer in found if self.app.schemas is None else self._resolved(found, self.app.schemas):
            feeding = answer.source
            if answer.begun != self._passed[TP(*feeding)] and not answer.reading.over:
                raise InvariantBroken(
                    f"a response that begins at offset {answer.begun} of {feeding} arrived, but the previous one ended "
                    f"at {self._passed[TP(*feeding)]}. The worker stops; nothing was committed past that offset."
                )
            count = len(answer.columns.offsets)
            # A response with only markers and aborted records also moves the position, so it makes an empty batch.
            parts = -(-count // BATCH_RECORDS) or int(answer.next_offset > answer.begun)
            for part in range(parts):
                if not self.flow_active:
                    return  # the worker is stopping
                if answer.reading.over:
                    break  # the task was rebuilt and reads from another position, or a rebalance ended this reading
                columns = answer.columns.cut(part * count // parts, (part + 1) * count // parts)
                # Faust drops messages below the last offset that it passed on, and that offset may come from an earlier
                # reading of the partition.
                self._read_offset[TP(*feeding)] = None
                yield TP(*feeding), self._message(answer, columns, generation, last=part + 1 == parts)
            # `_passed` is set only after Faust has taken the last batch, because the fetcher's position is ahead of the
            # agents.
            if not answer.reading.over:
                self._passed[TP(*feeding)] = answer.next_offset

    def _resolved(self, found: Iterable[Answer], schemas: SchemaResolver) -> Iterator[Answer]:
        """Yield the fetch responses whose schemas are known, in order per partition, and hold back the others."""
        for answer in found:
            self._held.setdefault(TP(*answer.source), deque()).append(answer)
        source = self.app.factory.topology.source
        for tp, answers in list(self._held.items()):
            while answers:
                columns = answers[0].columns
                refs = source.schema_refs(columns.keys, columns.values, columns.headers)
                if not answers[0].reading.over and schemas.missing(refs):
                    break
                yield answers.popleft()
            if not answers:
                del self._held[tp]

    def _message(self, answer: Answer, columns: Columns, generation: int, *, last: bool) -> ConsumerMessage:
        feeding = answer.source
        tp = TP(*feeding)
        batch = FeedBatch.of(
            feeding,
            columns,
            follows=self._delivered[tp],
            leader_epoch=answer.leader_epoch,
            life=answer.reading.life,
            readable_after_ms=answer.readable_after_ms,
            ends_at=answer.next_offset if last else 0,
        )
        self._delivered[tp] = batch.next_offset
        last_s = batch.timestamps_ms[-1] / 1000 if batch else 0.0
        value: Any = batch  # Faust passes the value through unchanged
        fields = (*tp, batch.next_offset - 1, last_s, 0, None, None, value, None, 0, 0, tp)
        return ConsumerMessage(*fields, generation_id=generation)

    async def wait_empty(self) -> None:
        """Commit every task's results, and close the tasks. Faust calls this method when the worker stops."""
        self.fetcher.forget()
        await self.app.tasks.close_all(drain=True)

    async def commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:  # Faust's signature
        """Do nothing, because a task commits its offset in its own transaction."""
        return False

    def assignment(self) -> set[TP]:
        """Return the partitions that are assigned to this member."""
        return {TP(tp.topic, tp.partition) for tp in self.client.assignment()}

    def topic_partitions(self, topic: str) -> int | None:
        """Return the partition count of a topic, or None if the count is unknown."""
        known = self.client.partitions_for_topic(topic)
        return None if known is None else len(known)

    seek_wait = seek_to_committed = _seek = position = refused("a seek by Faust")
    earliest_offsets = highwaters = highwater = refused("Faust's own recovery")
    _getmany = _to_message = _new_topicpartition = refused("a fetch by Faust's own loop")
    _commit = refused("the consumer's own offset commit")
    create_topic = refused("a topic that Faust creates")
    key_partition = refused("a partition that Faust chooses")


class Producer(FaustProducer):
    """Refuses every send, because a send by Faust would not be part of the task's transaction."""

    send = send_and_wait = send_soon = refused("a send by Faust, such as topic.send() or a write to the table,")


class TransactionManager(FaustTransactionManager):
    """Passes new assignments to the `TaskManager`. The tasks' sessions, not Faust, handle all transactions."""

    app: DedupApp

    async def on_rebalance(self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP]) -> None:
        """Close the tasks of lost partitions, and open tasks for new partitions, which are paused."""
        app = self.app
        feeding = {TopicPartition(*tp) for tp in assigned if tp.topic in app.feeding_topics}
        for lost in app.tasks.running.keys() - feeding:
            app.member.halt(lost)
        # A task of this worker may need a store that a standby holds.
        app.standbys.release(tp.partition for tp in feeding if tp.topic in app.sub_topologies["dedup"])
        await app.tasks.assign(feeding)
        app.member.rebalancing = False
        size = app.factory.topology.group_size
        if not feeding and size > 1:
            log.warning(
                "there is no task group for this worker, because each one has %d partitions. To let more workers work, "
                "set transactions.partitions to a smaller number, stop all workers, and run `dedup layout --apply`.",
                size,
            )

    async def send(self, topic: str, *_: Any, **__: Any) -> NoReturn:
        """Raise InvariantBroken, because a send by Faust would not be part of the task's transaction."""
        refused(f"topic.send() to {topic!r}")()

    send_and_wait = send
    send_soon = Producer.send_soon
    commit = refused("a commit by Faust")


class Transport(base.Transport):
    """The transport for broker URLs such as ``dedup://host:port``."""

    Consumer = Consumer
    Producer = Producer
    TransactionManager = TransactionManager
    default_port = 9092
    driver_version = f"aiokafka={aiokafka.__version__}"


class SightingsStore(FaustStore[Any, Any]):
    """A read-only Faust store (URL ``dedup://``) that provides the sightings of this worker's tasks."""

    app: DedupApp

    def __getitem__(self, state_key: bytes) -> tuple[Sighting, ...]:
        found = [seen for task in self._dedup_tasks() for seen in task.sightings_of(state_key)]
        if not found:
            raise KeyError(state_key)
        return tuple(found)

    def __iter__(self) -> Iterator[bytes]:
        stores = [task.store for task in self._dedup_tasks() if task.store is not None]
        return (key for store in stores for _, key, _ in store.sightings())

    def __len__(self) -> int:
        return sum(task.store.count_ids() for task in self._dedup_tasks() if task.store is not None)

    def _dedup_tasks(self) -> Iterator[DedupTask]:
        return (task.work for task in self.app.tasks.running.values() if isinstance(task.work, DedupTask))

    __setitem__ = __delitem__ = refused("a write to the table of sightings")
    reset_state = backup_partition = restore_backup = refused("a reset or backup by Faust")
    apply_changelog_batch = refused("Faust's own recovery")


class TableManager(FaustTableManager):
    """Faust's table manager without recovery, because each task restores its own partition."""

    app: DedupApp

    async def on_start(self) -> None:
        """Register the changelog, whose partitions Faust then assigns together with the feeding partitions."""
        await self._update_channels()

    async def on_rebalance(
        self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP], generation_id: int = 0
    ) -> None:
        """Assign the standbys, and resume Faust's message flow at once instead of waiting for a recovery."""
        app = self.app
        self._recovery_started.set()
        await self._update_channels()
        # Faust may assign this worker a standby of a partition whose task also runs on this worker.
        ours = {tp.partition for tp in assigned if tp.topic in app.sub_topologies["dedup"]}
        standbys = {tp.partition for tp in app.assignor.assigned_standbys() if tp.topic in self.changelog_topics}
        app.standbys.assign(standbys - ours)
        app.pool.keep_only(standbys | ours)
        if not app.flow_control.is_active():
            app.flow_control.resume()  # `resume` empties the agents' queues, so it must not run twice
        app.consumer.resume_flow()
        await app._fetcher.maybe_start()  # noqa: SLF001  # Faust's own recovery ends with this call, too
        self.on_actives_ready()
        self.on_standbys_ready()

    def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Stop the standbys. Faust calls this method when the worker stops."""
        self.app.standbys.assign(())

    async def on_stop(self) -> None:
        """Stop Faust's fetcher and its tables."""
        await self.app._fetcher.stop()  # noqa: SLF001  # Faust's own manager does this, too
        for table in self.values():
            await table.stop()

    async def wait_until_recovery_completed(self) -> bool:
        """Return False immediately, because there is no app-wide recovery."""
        return False


class GroupAssignor(PartitionAssignor):
    """A variant of Faust's sticky assignor that assigns whole task groups instead of single partitions.

    Faust treats each task group as one partition, and this class converts partitions to group numbers and back. Workers
    with different group sizes cannot join the same consumer group, because the names of their assignors differ.
    """

    app: DedupApp
    _counts: Mapping[str, int]
    """Maps each topic in the cluster to its partition count."""
    readdressed = False
    """True if the last assignment contained a former address of this worker."""

    @property
    def name(self) -> str:
        """The assignor's name, which Kafka requires to be the same for all members of a consumer group."""
        return "faust" if self._size == 1 else f"faust-groups-of-{self._size}"

    @property
    def _size(self) -> int:
        return self.app.factory.topology.group_size

    def on_assignment(self, assignment: Any) -> None:  # Faust defines this signature
        """Accept an assignment that contains a former address of this worker.

        A static member that restarts within the session timeout gets its old assignment back (KIP-345).
        """
        found = cast("ClientMetadata", ClientMetadata.loads(self._decompress(assignment.user_data)))
        old, own = found.url, str(self._url)
        self.readdressed = old != own
        if self.readdressed:
            for spread in (found.changelog_distribution, found.external_topic_distribution):
                if old in spread:
                    spread[own] = spread.pop(old)
            found.url = own
            user_data = self._compress(found.dumps())
            assignment = type(assignment)(assignment.version, assignment.assignment, user_data)
        super().on_assignment(assignment)

    def _perform_assignment(self, cluster: Any, member_metadata: Any) -> Any:  # Faust defines this signature
        topics = {topic for metadata in member_metadata.values() for topic in metadata.subscription}
        self._counts = {topic: len(cluster.partitions_for_topic(topic) or ()) for topic in topics}
        return super()._perform_assignment(cluster, member_metadata)

    def _get_client_metadata(self, metadata: Any) -> ClientMetadata:  # type: ignore[override]  # Faust calls this method on the instance
        """Return a member's previous assignment, converted from partitions to task groups."""
        found = super()._get_client_metadata(metadata)
        before = found.assignment
        found.assignment = ClientAssignment(
            actives={topic: self._groups(partitions) for topic, partitions in before.actives.items()},
            standbys={topic: self._groups(partitions) for topic, partitions in before.standbys.items()},
        )
        return found

    def _get_copartitioned_groups(self, topics: Any, cluster: Any, subscriptions: Any) -> Any:  # type: ignore[override]  # Faust calls this method on the instance
        """Map each task-group count to sets of topics that have this count and are assigned together."""
        found: defaultdict[int, list[set[str]]] = defaultdict(list)
        for partitions, alike in super()._get_copartitioned_groups(topics, cluster, subscriptions).items():
            found[-(-partitions // self._size)] += alike
        return found

    def _global_table_standby_assignments(self, assignments: Any, partitions_by_topic: Any) -> Any:  # Faust's signature
        """Convert a finished assignment from task groups to partitions. No global tables exist."""
        return {
            member: ClientAssignment(
                actives={topic: self._partitions(topic, groups) for topic, groups in made.actives.items()},
                standbys={topic: self._partitions(topic, groups) for topic, groups in made.standbys.items()},
            )
            for member, made in assignments.items()
        }

    def _groups(self, partitions: Iterable[int]) -> list[int]:
        return sorted({partition // self._size for partition in partitions})

    def _partitions(self, topic: str, groups: Iterable[int]) -> list[int]:
        size, count = self._size, self._counts[topic]
        return [number for group in groups for number in range(group * size, min((group + 1) * size, count))]


def _not_a_member(app: DedupApp, cause: BaseException | None) -> BrokerUnavailable:
    if isinstance(cause, InvalidSessionTimeoutError):
        return BrokerUnavailable(
            f"the brokers do not let this worker into the group {app.conf.id!r}, because they do not allow its "
            f"session_timeout ({app.settings.session_timeout}). Set it to at least the brokers' "
            "group.min.session.timeout.ms (6 s by default) and at most their group.max.session.timeout.ms (30 min by "
            "default)."
        )
    return BrokerUnavailable(
        f"this worker is no longer a member of the group {app.conf.id!r}: {cause!r}. Restart it; if this recurs, check "
        "the broker's log and whether workers of other versions are in the group."
    )


TRANSPORTS.aliases["dedup"] = "dedup.worker.faust_app:Transport"
STORES.aliases["dedup"] = "dedup.worker.faust_app:SightingsStore"
