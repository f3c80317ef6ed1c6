"""`IdempotentWriter`: an application's own records, each in its topic once, whatever retry or restart comes between."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self

from dedup.core.murmur2 import partitions
from dedup.edges.ingest import opened_outbox
from dedup.edges.outbox import Outbox
from dedup.edges.positions import TOPIC_CONFIGS
from dedup.edges.topics import provide, wanted
from dedup.errors import InvariantBroken, StateIncompatible
from dedup.session.admin import Admin
from dedup.session.client import KafkaWire
from dedup.session.connection import Connection
from dedup.session.record_batch import Header, Line
from dedup.session.wire import TopicPartition
from dedup.settings import Settings
from dedup.worker.publish import ID


class Transaction:
    """Records and positions that become visible together, at the end of ``async with writer.transaction()``."""

    def __init__(self, number_of: dict[str, int]) -> None:
        self.lines: Final[defaultdict[TopicPartition, list[Line]]] = defaultdict(list)
        self.positions: Final[dict[str, bytes | None]] = {}
        self._counts: Final = number_of

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        tracking_id: str | None = None,
        headers: Iterable[Header] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        """The record is part of the transaction; ``tracking_id`` becomes its header `dedup-id`.

        Its partition is that of Kafka's default partitioner by the key, else by the tracking ID, else the first.
        """
        if topic not in self._counts:
            raise InvariantBroken(f"topic {topic!r} was not named when the writer was made: add it to `topics`.")
        stamped = [*headers, *([(ID, tracking_id.encode())] if tracking_id is not None else [])]
        placed = key if key is not None else (tracking_id or "").encode()
        target = TopicPartition(topic, partitions([placed], self._counts[topic])[0])
        now_ms = time.time_ns() // 1_000_000
        self.lines[target].append((-1, now_ms if timestamp_ms is None else timestamp_ms, key, value, stamped))

    def keep(self, name: str, position: str) -> None:
        """A position of the application's own input is part of the transaction; see `IdempotentWriter.kept`."""
        self.positions[name] = position.encode()


class IdempotentWriter:
    """A transactional producer under a name that no restart changes. Use it with ``async with``.

    Another process under the same name takes over, and this one's next transaction raises TaskMigrated. A lost answer
    is not the caller's business: the writer finds out whether the transaction happened, and repeats it if it did not.
    """

    def __init__(self, name: str, *, topics: Sequence[str], settings: Settings) -> None:
        self._name: Final = name
        self._topics: Final = tuple(topics)
        self._settings: Final = settings
        self._wire: Final = KafkaWire(Connection.of(settings, client_id=f"dedup-writer-{name}"))
        self._outbox: Outbox | None = None
        self._counts: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        """Older processes of this name are fenced, and what they left open is undone."""
        await self._wire.start()
        try:
            await self._open()
        except BaseException:
            await self._wire.stop()
            raise
        return self

    async def _open(self) -> None:
        offsets = f"{self._name}-source-offsets"
        async with Admin(self._wire.connection) as admin:
            await provide(admin, [wanted(offsets, 1, self._settings, TOPIC_CONFIGS)], self._settings)
            have = await admin.topics(self._topics)
        missing = [topic for topic in self._topics if topic not in have]
        if missing:
            raise StateIncompatible(f"topic {missing[0]!r} does not exist; make it first.")
        self._counts = {name: topic.partitions for name, topic in have.items()}
        self._outbox = await opened_outbox(self._wire, f"{self._name}.writer.0", offsets, self._settings)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """What was not committed is given up."""
        if self._outbox is not None:
            await self._outbox.close()
        await self._wire.stop()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """All that was sent in the block is visible after it, once; after an exception in it, nothing is."""
        found = Transaction(self._counts)
        yield found
        if found.lines or found.positions:
            await self._opened().commit(found.lines, found.positions)

    def kept(self, name: str) -> str | None:
        """Return a position as of the last transaction that happened, of whichever process; None before the first."""
        found = self._opened().positions.values.get(name)
        return None if found is None else found.decode()

    def _opened(self) -> Outbox:
        if self._outbox is None:
            raise InvariantBroken("this writer was not started; use it in an `async with` statement")
        return self._outbox
