"""One transactional writer: records and source positions visible together, once, whatever answer is lost.

`Session` sends nothing twice: where an answer is missing it raises CommitUnknown, and the epoch is over. Here a new
epoch is begun, and the transaction's number in the positions topic tells whether the commit happened. If not, the same
records are sent again. So the caller sees one of two: it is committed, or TaskMigrated, as another process has taken
the source over.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from dedup.edges.positions import OWNER_KEY, POSITION, Owner, Positions, read_positions
from dedup.errors import BrokerUnavailable, CommitUnknown, RecordRefused, TaskMigrated
from dedup.session.record_batch import Line, fill
from dedup.session.transaction import Session
from dedup.session.wire import TopicPartition, Wire

DEADLINE_MS: Final = 20_000
PAUSE_S: Final = 0.5
log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutboxOptions:
    """How transactions are made."""

    transaction_timeout_ms: int = 30_000
    compression: str = "snappy"


class Outbox:
    """The transactions of one source."""

    def __init__(
        self,
        wire: Wire,
        transactional_id: str,
        offsets_topic: str,
        options: OutboxOptions,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.positions = Positions()
        """As of the last commit."""
        self._stopped: Final = stopped
        self._wire: Final = wire
        self._topic: Final = offsets_topic
        self._compression: Final = options.compression
        self._run: Final = uuid.uuid4().hex
        self._number = 0
        self._unsure = False
        """A commit was broken off from outside, or failed: what became of it only a new epoch can tell."""
        self._one_at_a_time: Final = asyncio.Lock()
        self._session: Final = Session(
            wire, transactional_id, None, timeout_ms=options.transaction_timeout_ms, deadline_ms=DEADLINE_MS
        )

    async def open(self) -> None:
        """Every older owner is fenced, what it left open is aborted, and the positions are known.

        Raises CommitUnknown where no broker answers in time.
        """
        await self._session.open()
        self.positions = await read_positions(self._wire, self._topic)
        # Whoever asks after us who the owner is must read our name, also if we never send a record.
        await self.commit({}, {})

    async def commit(
        self,
        lines: Mapping[TopicPartition, Sequence[Line]],
        positions: Mapping[str, bytes | None],
        *,
        most_rows: int | None = None,
    ) -> None:
        """The records and positions are visible, once; a position of None is forgotten.

        ``most_rows`` of a batch: where it is 1, a refusal names the record. Raises TaskMigrated when another process
        has taken the source over, RecordRefused with nothing done. One that is cancelled is done or not, whole; callers
        side by side wait for each other.
        """
        async with self._one_at_a_time:
            if self._unsure:
                name = self._session.transactional_id
                await self._happened(CommitUnknown(f"{name}: the transaction before was broken off; it is settled now"))
            self._unsure = True
            await self._commit(lines, positions, most_rows)
            self._unsure = False

    async def _commit(
        self,
        lines: Mapping[TopicPartition, Sequence[Line]],
        positions: Mapping[str, bytes | None],
        most_rows: int | None,
    ) -> None:
        self._number += 1
        while True:
            try:
                await self._send(lines, positions, most_rows)
            except CommitUnknown as unknown:
                if not await self._happened(unknown):
                    continue
            except RecordRefused:
                self._number -= 1
                await self._begin_anew()
                self._unsure = False
                raise
            break
        for name, value in positions.items():
            if value is None:
                self.positions.values.pop(name, None)
            else:
                self.positions.values[name] = value

    async def _send(
        self,
        lines: Mapping[TopicPartition, Sequence[Line]],
        positions: Mapping[str, bytes | None],
        most_rows: int | None,
    ) -> None:
        notes: list[Line] = [(-1, 0, POSITION + name.encode(), value, []) for name, value in sorted(positions.items())]
        owner = msgspec.json.encode(Owner(self._run, self._number))
        notes.append((-1, 0, OWNER_KEY, owner, []))
        for target, part in lines.items():
            self._session.add(fill(target, part, compression=self._compression, most_rows=most_rows))
        self._session.add(fill(TopicPartition(self._topic, 0), notes, compression=self._compression))
        await self._session.commit({})

    async def _happened(self, unknown: CommitUnknown) -> bool:
        """Tell whether the commit without an answer happened, in a new epoch; insists until a broker answers."""
        log.warning("%s", unknown)
        while True:
            try:
                # A fenced writer must stop, not fence its successor in turn: so look before a new epoch, and after.
                await self._refuse_if_overtaken(stable=True)
                await self._session.open()
                return (await self._refuse_if_overtaken()).transaction == self._number
            except CommitUnknown as again:
                await self._wait(again)

    async def _begin_anew(self) -> None:
        while True:
            try:
                await self._session.open()
                await self._refuse_if_overtaken()
            except CommitUnknown as again:
                await self._wait(again)
            else:
                return

    async def _wait(self, unknown: CommitUnknown) -> None:
        log.warning("waiting for the broker: %s", unknown)
        if self._stopped():
            raise BrokerUnavailable(
                f"stopped while no broker answered: {unknown} The next start finds out whether the last transaction "
                f"happened, and goes on after it."
            ) from unknown
        await asyncio.sleep(PAUSE_S)

    async def _refuse_if_overtaken(self, *, stable: bool = False) -> Owner:
        self.positions = await read_positions(self._wire, self._topic, self.positions, stable=stable)
        owner = self.positions.owner
        if self._number <= 1 and (owner is None or owner.run != self._run):
            return Owner(self._run, 0)  # our first transaction: nobody can have read our name yet
        if owner is None or owner.run != self._run:
            raise TaskMigrated(
                f"{self._session.transactional_id}: another process has taken this source over; this one stops. "
                f"Nothing was sent twice. Run one process per source."
            )
        return owner

    async def close(self) -> None:
        """What was not committed is given up."""
        await self._session.drop()
