"""Faust's transport, fed by batches: chosen by the broker URL scheme ``dedup://``.

One Faust message is one `FeedBatch`, so Faust's cost per message is paid once a batch. The group membership is
aiokafka's, in the loop of the app (Faust's stock driver runs it in a thread of its own). Offsets, transactions and
sends are not Faust's: they belong to the tasks, and everything here that would send or commit refuses or does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import aiokafka
import aiokafka.abc
from aiokafka.errors import KafkaError
from aiokafka.protocol.group import LeaveGroupRequest
from faust.transport import base
from faust.transport.consumer import Consumer as FaustConsumer
from faust.transport.consumer import TransactionManager as FaustTransactionManager
from faust.transport.producer import Producer as FaustProducer
from faust.types import TP, ConsumerMessage

from dedup.errors import BrokerUnavailable, DedupError, InvariantBroken
from dedup.session.fetch import Columns, FeedFetcher
from dedup.session.wire import TopicPartition
from dedup.worker.batch import FeedBatch

if TYPE_CHECKING:
    from dedup.worker.app import DedupApp

log: Final = logging.getLogger(__name__)
BATCH_RECORDS: Final = 4000
POLL_MS: Final = 200
GATHER_SHARE: Final = 4
"""While records flow, this part of the commit interval may be spent on gathering a larger batch."""
MOST_GATHER_MS: Final = 25
HEARTBEATS: Final = 5
"""At least so many within a session time-out."""
MOST_HEARTBEAT_MS: Final = 500
"""A member learns from a heartbeat's answer that the group rebalances; until it has joined, partitions wait for it."""


class RebalanceListener(aiokafka.abc.ConsumerRebalanceListener):  # type: ignore[misc]  # untyped base
    """Hands aiokafka's rebalance to Faust, which hands it to the tasks."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer: Final = consumer

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        """Close every task: assignments are whole, a task lives for one of them."""
        app = self._consumer.app
        app.on_rebalance_start()
        await self._consumer.on_partitions_revoked({TP(tp.topic, tp.partition) for tp in revoked})

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        """Pause everything first: nothing is read before its task says from where."""
        consumer = self._consumer
        consumer.client.pause(*assigned)
        consumer.app.consumer_generation_id = consumer.client._coordinator.generation  # noqa: SLF001  # Faust's own driver reads it there
        await consumer.on_partitions_assigned(
            {TP(tp.topic, tp.partition) for tp in assigned}, consumer.app.consumer_generation_id
        )
        consumer.app.on_rebalance_end()


class Consumer(FaustConsumer):
    """A group member whose messages are batches."""

    app: DedupApp
    client: aiokafka.AIOKafkaConsumer
    """The group membership; it fetches nothing."""
    fetcher: FeedFetcher

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._delivered: dict[TP, int] = {}
        """Partition -> the offset its next batch must follow."""
        self._passed: dict[TP, int] = {}
        """Partition -> the offset below which everything was delivered, markers and aborted records left out."""

    async def on_start(self) -> None:
        """Join nothing yet; Faust subscribes when its agents are up."""
        app = self.app
        self.client = aiokafka.AIOKafkaConsumer(
            **app.connection.client_options(),
            group_id=app.conf.id,
            group_instance_id=app.settings.worker_id,
            partition_assignment_strategy=[app.assignor],
            enable_auto_commit=False,
            # It positions partitions that are paused for good; what is read is the fetcher's, which never resets.
            auto_offset_reset="earliest",
            max_poll_interval_ms=3_600_000,
            fetch_max_wait_ms=POLL_MS,
            session_timeout_ms=app.settings.session_timeout_ms,
            heartbeat_interval_ms=min(app.settings.session_timeout_ms // HEARTBEATS, MOST_HEARTBEAT_MS),
            rebalance_timeout_ms=60_000,
        )
        await self.client.start()
        gather_ms = min(app.settings.commit_interval_ms // GATHER_SHARE, MOST_GATHER_MS)
        self.fetcher = FeedFetcher(app.wire, wait_ms=POLL_MS, gather_ms=gather_ms)

    async def on_stop(self) -> None:
        """Leave the group; the tasks are closed by then."""
        await super().on_stop()
        await self._leave()
        await self.client.stop()

    async def _leave(self) -> None:
        """Leave the group on a clean stop: aiokafka lets a static member's partitions wait for the session time-out."""
        coordinator = self.client._coordinator  # noqa: SLF001  # aiokafka has no public way to say so
        if coordinator.generation > 0 and coordinator.coordinator_id is not None:
            try:
                await coordinator._send_req(LeaveGroupRequest(coordinator.group_id, coordinator.member_id))  # noqa: SLF001
            except KafkaError as error:
                log.info("the group was not told that this worker stops: %r", error)

    async def subscribe(self, topics: Iterable[str]) -> None:
        """Subscribe, which starts the first rebalance."""
        self.client.subscribe(topics=sorted(set(topics)), listener=RebalanceListener(self))

    def begin(self, feeding: TopicPartition, offset: int) -> None:
        """Let a partition be read from an offset; its task is running."""
        tp = TP(*feeding)
        if tp not in self.assignment():
            return
        self.fetcher.begin(feeding, offset)
        self._read_offset[tp] = None
        self._delivered[tp] = self._passed[tp] = offset
        self.resume_partitions({tp})

    def passed(self, feeding: TopicPartition, end: int, judged: int) -> bool:
        """Tell whether everything below ``end`` was delivered, and all of that judged; markers are not delivered."""
        tp = TP(*feeding)
        return self._passed.get(tp, -1) >= end and self._delivered.get(tp) == judged

    def lost_membership(self) -> DedupError | None:
        """Return why the group membership is gone for good; None while it lives."""
        coordinator = self.client._coordinator  # noqa: SLF001  # aiokafka shows it only to a caller of getmany
        routine = getattr(coordinator, "_coordination_task", None)
        pending = getattr(coordinator, "_pending_exception", None)
        if pending is None and (routine is None or not routine.done() or self.client._closed):  # noqa: SLF001
            return None
        return BrokerUnavailable(
            f"this worker is no longer a member of the group {self.app.conf.id!r}: {pending!r}. Restart it; if it "
            f"comes again, look at the broker's log and at workers of other versions in the group."
        )

    def rejoin(self) -> None:
        """Ask for a new assignment: a task was fenced or is unsure."""
        self.client._coordinator.request_rejoin()  # noqa: SLF001  # aiokafka has no public way to say so

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, ConsumerMessage]]:
        """Yield batches of the partitions whose tasks are running."""
        if not self.flow_active:
            await self.can_resume_flow.wait()
        generation, life = self.app.consumer_generation_id, self.fetcher.life
        # aiokafka counts a member as alive as long as it polls; every partition of its own is paused.
        await self.client.getmany(timeout_ms=0)
        try:
            found = await self.fetcher.poll([TopicPartition(*tp) for tp in self._get_active_partitions()])
        except DedupError as error:
            self.app.tasks.fail(error)
            raise
        for feeding, columns, begun, next_offset in found:
            if life == self.fetcher.life and begun != self._passed[TP(*feeding)]:
                raise InvariantBroken(
                    f"an answer from offset {begun} of {feeding.topic}/{feeding.partition} came, but the one before it "
                    f"ended at {self._passed[TP(*feeding)]}. The worker stops; nothing was committed past that."
                )
            count = len(columns.offsets)
            parts = -(-count // BATCH_RECORDS)
            for part in range(parts):
                # The same generation may follow a rejoin: the fetcher's own count tells assignments apart.
                if not self.flow_active or life != self.fetcher.life:
                    return  # every task is rebuilt after a rebalance and says where to read
                yield (
                    TP(*feeding),
                    self._message(feeding, columns.cut(part * count // parts, (part + 1) * count // parts), generation),
                )
            # Not before the last batch was taken: the fetcher's own position is ahead of what an agent has seen.
            if life == self.fetcher.life:
                self._passed[TP(*feeding)] = next_offset

    def _message(self, feeding: TopicPartition, columns: Columns, generation: int) -> ConsumerMessage:
        tp = TP(*feeding)
        batch = FeedBatch.of(feeding, columns, follows=self._delivered[tp])
        self._delivered[tp] = batch.next_offset
        return ConsumerMessage(
            tp.topic,
            tp.partition,
            batch.offsets[-1],
            batch.timestamps_ms[-1] / 1000,
            0,
            None,
            None,
            batch,  # type: ignore[arg-type]  # the one message value Faust carries is ours
            None,
            0,
            0,
            tp,
            generation_id=generation,
        )

    async def wait_empty(self) -> None:
        """Commit and close every task; Faust calls it on revocation and on stop."""
        self.fetcher.forget()
        await self.app.tasks.close_all(drain=True)

    async def commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:  # Faust's signature
        """Do nothing: a task commits its offset in its own transaction."""
        return False

    async def perform_seek(self) -> None:
        """Do nothing: tasks say where to read."""

    async def verify_all_partitions_active(self) -> None:
        """Do nothing: lag and age of the last commit are metrics of the tasks."""

    async def seek_to_committed(self) -> Mapping[TP, int]:
        """Do nothing: tasks say where to read."""
        return {}

    def assignment(self) -> set[TP]:
        """Return the partitions this member has."""
        return {TP(tp.topic, tp.partition) for tp in self.client.assignment()}

    async def position(self, tp: TP) -> int | None:
        """Return the offset to be fetched next."""
        return self.fetcher.position(TopicPartition(*tp))

    def highwater(self, tp: TP) -> int:
        """Return 0: lag is a metric of the tasks."""
        return 0

    async def earliest_offsets(self, *partitions: TP) -> Mapping[TP, int]:
        """Return the start of each log."""
        found = await self.client.beginning_offsets([_aiokafka(tp) for tp in partitions])
        return {TP(tp.topic, tp.partition): offset for tp, offset in found.items()}

    async def highwaters(self, *partitions: TP) -> Mapping[TP, int]:
        """Return the end of each log as a committed reader sees it."""
        found = await self.client.end_offsets([_aiokafka(tp) for tp in partitions])
        return {TP(tp.topic, tp.partition): offset for tp, offset in found.items()}

    def topic_partitions(self, topic: str) -> int | None:
        """Return the partition count of a topic, if known."""
        known = self.client.partitions_for_topic(topic)
        return None if known is None else len(known)

    async def seek_wait(self, partitions: Mapping[TP, int]) -> None:
        """Raise InvariantBroken: a task says where its partition is read from."""
        raise _escapes("a seek of Faust's")

    async def _seek(self, partition: TP, offset: int) -> None:
        raise _escapes("a seek of Faust's")

    async def _commit(self, offsets: Mapping[TP, int]) -> bool:
        raise _escapes("the consumer's own offset commit")

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> NoReturn:  # Faust's signature
        raise InvariantBroken("records are fetched by getmany only.")

    def _to_message(self, tp: TP, record: Any) -> NoReturn:  # Faust's signature
        raise InvariantBroken("messages are made from batches only.")

    def _new_topicpartition(self, topic: str, partition: int) -> TP:
        return TP(topic, partition)

    async def create_topic(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: topics are made by `session.admin`, which reads the answer's codes."""

    def key_partition(self, topic: str, key: bytes | None, partition: int | None = None) -> int | None:
        """Return the given partition: our records are placed by the tasks."""
        return partition

    def close(self) -> None:
        """Nothing is left to close when Faust asks during a stop."""


class Producer(FaustProducer):
    """Refuses every send: what an agent sends outside its task's transaction would escape it."""

    async def on_start(self) -> None:
        """Start the buffer that Faust's conductor looks at; no connection is opened."""
        await super().on_start()

    async def send(self, topic: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise InvariantBroken."""
        raise _escapes(f"a send to {topic!r}")

    send_and_wait = send

    def send_soon(self, fut: Any) -> NoReturn:  # Faust's signature
        """Raise InvariantBroken."""
        raise _escapes("send_soon()")

    async def flush(self) -> None:
        """Do nothing: there is nothing to flush."""

    async def create_topic(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: topics are made by `session.admin`."""

    def supports_headers(self) -> bool:
        """Return True."""
        return True


class TransactionManager(FaustTransactionManager):
    """Faust's hook for a new assignment; the transactions themselves are the tasks' sessions."""

    async def on_rebalance(self, assigned: set[TP], revoked: set[TP], newly_assigned: set[TP]) -> None:
        """Open a task for each feeding partition; Faust has paused them all."""
        app = cast("DedupApp", self.app)
        app.tasks.open({TopicPartition(*tp) for tp in assigned if tp.topic in app.feeding_topics})

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Do nothing: the tasks were closed when Faust waited for them to be empty."""

    async def flush(self) -> None:
        """Do nothing: a task settles its own sends."""

    async def send(self, topic: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise InvariantBroken."""
        raise _escapes(f"topic.send() to {topic!r}")

    send_and_wait = send

    def send_soon(self, fut: Any) -> NoReturn:  # Faust's signature
        """Raise InvariantBroken."""
        raise _escapes("send_soon()")

    async def commit(self, offsets: Mapping[TP, int], start_new_transaction: bool = True) -> bool:  # Faust's signature
        """Raise InvariantBroken: a task commits its own offset."""
        raise _escapes("a commit of Faust's")


class Transport(base.Transport):
    """What ``dedup://host:port`` as broker URL stands for."""

    Consumer = Consumer
    Producer = Producer
    TransactionManager = TransactionManager
    default_port = 9092
    driver_version = f"aiokafka={aiokafka.__version__}"


def _aiokafka(tp: TP) -> aiokafka.TopicPartition:
    return aiokafka.TopicPartition(tp.topic, tp.partition)


def _escapes(what: str) -> InvariantBroken:
    return InvariantBroken(
        f"{what} would not be part of the task's transaction, so it was refused. "
        f"Records that belong to an outcome go through `Task.process`."
    )
