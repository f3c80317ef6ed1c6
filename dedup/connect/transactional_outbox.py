"""Implements the transactional outbox, which commits records and source positions together exactly once.

As in Kafka Connect's exactly-once sources (KIP-618), each transaction writes the records and, to a compacted topic, the
position in the source. Unlike in Kafka Connect, each transaction also writes its own sequence number. If a commit gets
no response, the outbox begins a new epoch, and reads the number of the last committed transaction. If this number shows
that the commit did not take effect, the outbox sends the records again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from dedup.errors import (
    BrokerUnavailable,
    CommitUnknown,
    DedupError,
    InvariantBroken,
    ProducerForgotten,
    RecordRefused,
    StateIncompatible,
    TaskMigrated,
)
from dedup.kafka.consumer import TopicCheck
from dedup.kafka.outage_lines import AWAY
from dedup.kafka.record_batch import Line, fill
from dedup.kafka.topic_admin import BROKER_DEFAULT, Admin, Topic, WantedTopic
from dedup.kafka.transactional_producer import DEADLINE_MS, Session
from dedup.kafka.wire import TopicNow, TopicPartition, Wire
from dedup.worker.offsets import answered

if TYPE_CHECKING:
    from dedup.settings import Settings

OWNER_KEY: Final = b"owner"
POSITION: Final = b"at:"
FETCH_BYTES: Final = 4 << 20
WAIT_MS: Final = 100
PAUSE_S: Final = 0.5
FOR_EVER: Final = "-1"
TOPIC_CONFIGS: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    # Segments are small, because Kafka compacts only closed segments, and every start reads the whole topic.
    "segment.bytes": "10485760",
    "retention.ms": FOR_EVER,
}
T = TypeVar("T")
log: Final = logging.getLogger(__name__)


def wanted_topic(settings: Settings, name: str, partitions: int | None, configs: Mapping[str, str]) -> WantedTopic:
    """Return a topic with the replication from the settings. ``partitions`` is None for the brokers' default."""
    least, factor = settings.topics.min_insync_replicas, settings.topics.replication_factor or BROKER_DEFAULT
    base = {} if least is None else {"min.insync.replicas": str(least)}
    return WantedTopic(name, partitions or BROKER_DEFAULT, factor, {**base, **configs})


async def provide(admin: Admin, topics: Sequence[WantedTopic], *, create: bool, remedy: str) -> dict[str, Topic]:
    """Create missing topics, and return all topics.

    Raises StateIncompatible, with a text that ends with ``remedy``, if a topic is missing and ``create`` is false.
    """
    names = [topic.name for topic in topics]
    have = await admin.topics(names)
    missing = [topic for topic in topics if topic.name not in have]
    if missing and not create:
        listed = ", ".join(repr(topic.name) for topic in missing)
        raise StateIncompatible(f"missing topics {listed}, and `topics.create` is false. {remedy}")
    if missing:
        await admin.create(missing)
    return await admin.settled(names)


def refuse_expiry(topic: Topic) -> None:
    """Raise StateIncompatible if brokers delete positions by age or size, because the source would be sent again."""
    configs = topic.configs  # empty if the principal may not read them
    kept = configs.get("retention.ms", FOR_EVER) == configs.get("retention.bytes", FOR_EVER) == FOR_EVER
    if "delete" in configs.get("cleanup.policy", "") and not kept:
        raise StateIncompatible(
            f"brokers delete old records of topic {topic.name!r} (cleanup.policy {configs['cleanup.policy']}, "
            f"retention.ms {configs.get('retention.ms')}), but it holds the positions in the source: without them, "
            f"everything would be sent again. Nothing was sent. Run `kafka-configs.sh --bootstrap-server BROKER "
            f"--alter --entity-type topics --entity-name {topic.name} --add-config cleanup.policy=compact`."
        )


class _Owner(msgspec.Struct, frozen=True):
    """The process that wrote a transaction, and the transaction's number within that process."""

    run: str
    """An ID that is unique to one process."""
    transaction: int
    topic: str = ""
    """The name of the topic to which a source's records are sent, or an empty string if several topics get records."""
    topic_id: str = ""


class TransactionalOutbox:
    """Commits the records and positions of one source. Call `open` first."""

    def __init__(
        self,
        wire: Wire,
        transactional_id: str,
        offsets_topic: str,
        settings: Settings,
        topics: Mapping[str, Topic],
        stopped: Callable[[], bool] = lambda: False,
        *,
        output: str = "",
    ) -> None:
        """Create an outbox that writes to ``topics``, which include ``offsets_topic``.

        If ``output`` names the only topic for records, `open` refuses a topic that was created again.
        """
        self._output: Final = output
        self.positions: Final[dict[str, bytes]] = {}
        """Maps the name of each part of the source to its position after the last commit."""
        self._place: Final = TopicPartition(offsets_topic, 0)
        self._owner: _Owner | None = None
        self._before: _Owner | None = None
        """The owner before this process."""
        self._read_to = 0
        self._stopped: Final = stopped
        self._wire: Final = wire
        self._compression: Final = settings.topics.compression
        self._topics: Final = topics
        self._check: Final = TopicCheck(
            wire,
            {name: TopicNow(topic.topic_id, topic.partitions) for name, topic in topics.items()},
            may_grow=topics,
            remedy=f"A restart says how to continue. If it is {offsets_topic!r}, restore it first: without the "
            "positions in it, a restart sends everything again.",
        )
        self._run: Final = uuid.uuid4().hex
        self._number = 0
        self._over: DedupError | None = None
        """The error that every later call raises, because a failed or canceled commit may have taken effect."""
        self._one_at_a_time: Final = asyncio.Lock()
        self._session: Final = Session(wire, transactional_id, None, timeout_ms=settings.transaction_timeout_ms)

    @property
    def partitions(self) -> Mapping[str, int]:
        """The current partition count of each topic. Each commit asks for the counts, because topics may grow."""
        return self._check.partitions

    async def open(self) -> None:
        """Fence earlier owners, abort their transactions, and read the positions.

        Raises BrokerUnavailable if no broker responds in time, and StateIncompatible if the output was created again.
        """
        try:
            await self._session.open()
            await self._read()
            self._before = self._owner
            self._refuse_other_output()
            await self._warn_if_sent_before()
            # Write the ID of this run now, so that other processes see the new owner even if the owner never sends a
            # record.
            await self.commit({}, {})
        except CommitUnknown as error:
            raise BrokerUnavailable(f"the cluster did not begin a transaction in time: {error}") from error

    async def commit(
        self,
        lines: Mapping[TopicPartition, Sequence[Line]],
        positions: Mapping[str, bytes],
        *,
        most_rows: int | None = None,
    ) -> None:
        """Commit the records and positions exactly once.

        ``most_rows`` limits the number of records per record batch. With one record per batch, the broker's response
        identifies a refused record. Raises TaskMigrated if another process has taken over the source, and RecordRefused
        if the broker refuses a record, in which case nothing is committed. Raises StateIncompatible if a topic was
        deleted or created again. A canceled commit takes effect completely or not at all. After a canceled commit or
        any error except RecordRefused, every call raises the error of `refuse_if_over`. Concurrent calls run one after
        another.
        """
        async with self._one_at_a_time:
            self.refuse_if_over()
            try:
                await self._insist(lines, positions, most_rows)
            except RecordRefused:
                raise
            except BaseException as error:
                self._over = error if isinstance(error, TaskMigrated) else self._interrupted()
                raise
            self.positions.update(positions)

    def refuse_if_over(self) -> None:
        """Raise TaskMigrated if another process has taken over the source. Raise InvariantBroken if a commit was
        interrupted, because its records may have been committed, and `positions` may lack its positions.
        """
        if self._over is not None:
            raise self._over

    def _interrupted(self) -> InvariantBroken:
        return InvariantBroken(
            f"{self._session.transactional_id}: an earlier transaction was interrupted, so it is unknown whether its "
            f"records were committed, and whoever sends them again may send them twice. Leave the `async with` block "
            f"of this writer and open a new one: its `kept` returns what was committed. A transaction that got only "
            f"this error committed nothing."
        )

    async def _insist(
        self, lines: Mapping[TopicPartition, Sequence[Line]], positions: Mapping[str, bytes], most_rows: int | None
    ) -> None:
        self._number += 1
        own: list[Line] = [(-1, 0, POSITION + name.encode(), value, []) for name, value in sorted(positions.items())]
        output_id = self._topics[self._output].topic_id if self._output else ""
        owner = _Owner(self._run, self._number, self._output, output_id)
        own.append((-1, 0, OWNER_KEY, msgspec.json.encode(owner), []))
        pause_s = 0.0
        while True:
            try:
                for target, part in lines.items():
                    most_bytes = self._topics[target.topic].fitting_bytes
                    fitting = partial(fill, compression=self._compression, most_rows=most_rows, most_bytes=most_bytes)
                    self._session.add(fitting(target, part))
                self._session.add(fill(self._place, own, compression=self._compression))
                await self._session.prepare({})
                # Producers address topics by name. A topic that was created again lacks all earlier records and
                # positions.
                await self._check.confirm()
                await self._session.end()
            except (CommitUnknown, ProducerForgotten) as unknown:
                if await self._happened(unknown):
                    return
                if pause_s and self._stopped():
                    raise BrokerUnavailable(
                        f"stopped while no transaction could be committed: {unknown} Nothing of the last transaction "
                        f"was committed; the next start sends it."
                    ) from unknown
                # While a partition has no leader, each attempt fails at once.
                await asyncio.sleep(pause_s)
                pause_s = PAUSE_S
            except RecordRefused:
                self._number -= 1
                await self._begin_epoch()
                raise
            else:
                return

    async def _happened(self, unknown: CommitUnknown | ProducerForgotten) -> bool:
        """Return whether a commit without a response took effect. Retries until a broker responds.

        If another process has taken over the source, raises TaskMigrated, and begins no new epoch.
        """
        log.warning("%s", unknown, extra=AWAY if isinstance(unknown, CommitUnknown) else None)
        return (await self._begin_epoch()).transaction == self._number

    async def _begin_epoch(self) -> _Owner:
        while True:
            try:
                await self._check.confirm()
                # A fenced writer must stop without fencing its successor, so also read the owner before the new epoch.
                await self._refuse_if_overtaken(stable=True)
                await self._session.open()
                return await self._refuse_if_overtaken()
            except CommitUnknown as unknown:
                log.warning("waiting for the broker: %s", unknown, extra=AWAY)
                if self._stopped():
                    raise BrokerUnavailable(
                        f"stopped while no broker answered: {unknown} The next start finds out whether the last "
                        f"transaction was committed, and continues accordingly."
                    ) from unknown
                await asyncio.sleep(PAUSE_S)

    def _refuse_other_output(self) -> None:
        before = self._owner
        if before is None or not self.positions or before.topic != self._output or not before.topic_id:
            return
        if before.topic_id != self._topics[self._output].topic_id:
            raise StateIncompatible(
                f"topic {self._output!r} was deleted and created again, so it lacks the records up to the positions in "
                f"{self._place.topic!r}. Nothing was sent. To send the source again from its start, delete "
                f"{self._place.topic!r}; to send only what is new, give the output another name."
            )

    async def _warn_if_sent_before(self) -> None:
        """Log a warning if no positions exist but the output has records, which may come from this source."""
        if self._owner is not None or not self._output:
            return
        for number in range(self._topics[self._output].partitions):
            bounds = await self._answered(partial(self._wire.bounds, TopicPartition(self._output, number)))
            if bounds.end:
                log.warning(
                    "%s: topic %r holds no position, so the source is sent from its start, but topic %r already has "
                    "records. Those that this source has sent before are sent again.",
                    self._session.transactional_id,
                    self._place.topic,
                    self._output,
                )
                return

    async def _refuse_if_overtaken(self, *, stable: bool = False) -> _Owner:
        await self._read(stable=stable)
        if self._owner is not None and self._owner.run == self._run:
            return self._owner
        if self._number <= 1 and self._owner == self._before:
            return _Owner(self._run, 0)  # Before the first commit, the topic does not name this run.
        raise TaskMigrated(
            f"{self._session.transactional_id}: another process has taken over this source; this one stops. "
            f"Nothing was sent twice. Run one process per source."
        )

    async def _read(self, *, stable: bool = False) -> None:
        """Read the owner and the positions that were committed since the last call.

        Waits for open transactions to end, because they may hide committed records. If ``stable`` is True, the
        method does not wait, because an open transaction may be the caller's own.
        """
        bounds = await self._answered(partial(self._wire.bounds, self._place))
        if self._read_to > bounds.end:
            raise StateIncompatible(
                f"topic {self._place.topic!r} ends at offset {bounds.end}, but it was read up to {self._read_to} "
                f"before: it was deleted and created again. Nothing was sent. Restore it; without it the source would "
                f"be sent again."
            )
        read_to = max(self._read_to, bounds.start)
        fetch = partial(self._wire.fetch, self._place, max_bytes=FETCH_BYTES, wait_ms=WAIT_MS)
        owner, positions = self._owner, dict(self.positions)
        while read_to < bounds.end:
            fetched = await self._answered(partial(fetch, read_to))
            for key, value in zip(fetched.keys, fetched.values, strict=True):
                owner = self._take(key or b"", value, positions) or owner
            read_to = fetched.next_offset
            if stable and read_to >= fetched.last_stable_offset:
                break
        # Replace all positions at once, so that a reader of `positions` never sees older positions.
        self._owner, self._read_to = owner, read_to
        self.positions.clear()
        self.positions.update(positions)

    async def _answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request until a broker responds. Raises CommitUnknown if no broker responds in time."""
        try:
            async with asyncio.timeout(DEADLINE_MS / 1000):
                return await answered(self._wire, ask)
        except TimeoutError:
            name, waited_s = self._place.topic, DEADLINE_MS // 1000
            raise CommitUnknown(f"topic {name!r} cannot be read: no broker answered for {waited_s} s.") from None

    def _take(self, key: bytes, value: bytes | None, positions: dict[str, bytes]) -> _Owner | None:
        """Apply a record of the positions topic to ``positions``, or return the owner that the record names."""
        if key == OWNER_KEY and value is not None:
            return msgspec.json.decode(value, type=_Owner)
        if key.startswith(POSITION) and value is not None:
            positions[key.removeprefix(POSITION).decode()] = value
        elif key.startswith(POSITION):
            positions.pop(key.removeprefix(POSITION).decode(), None)
        else:
            raise StateIncompatible(
                f"topic {self._place.topic!r} holds a record with the key {key[:40]!r}, which this program did not "
                f"write. Nothing was sent. Give the source another name, or delete that topic if nobody needs it."
            )
        return None

    async def close(self) -> None:
        """Abort the transaction that is still open."""
        await self._session.drop()
