"""One transactional session: everything a task writes, its offsets and its changelog, visible at once or never.

Theory of operation. A session has one transactional id for as long as its task's partition exists. `open` sends
InitProducerId: older epochs of the id are fenced, what they left open is ended and its markers are written (KIP-98).
In an epoch:

    add(batches)       AddPartitions for partitions not announced yet, Produce, then AddOffsets once a transaction;
                       in order, in the background
    commit(offsets)    TxnOffsetCommit, and every produce answered without error -> EndTxn

AddPartitions, AddOffsets, TxnOffsetCommit and EndTxn are sent once per epoch and purpose. An *answer* that says "try
again" is obeyed, because the broker has said that nothing was done. *No answer* means that the effect is unknown: a
late EndTxn could commit half of the next transaction. Then the epoch is over, `CommitUnknown` is raised, and only a new
InitProducerId finds out what happened. A produce is never repeated either, although sequence numbers would allow it:
one rule is easier to trust than two.

Abort is a new epoch: InitProducerId ends what was open, so there is no second way out of a transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiokafka.errors import for_code

from dedup import crashpoints
from dedup.errors import BrokerUnavailable, CommitUnknown, InvariantBroken, RecordRefused, TaskMigrated
from dedup.session.wire import (
    COORDINATOR_MOVED,
    NoAnswer,
    Produced,
    ProducerIdentity,
    RecordBatch,
    TopicPartition,
    Wire,
)

OK: Final = 0
# The broker says: nothing was done, ask again (coordinator loading, moved, or finishing the previous transaction).
AGAIN: Final = COORDINATOR_MOVED | {51}
# The partition is not known yet at the coordinator's broker; only AddPartitions answers it.
AGAIN_ANNOUNCING: Final = AGAIN | {3}
# Invalid epoch, fenced, id mapping gone, wrong transaction state, sequence out of order, unknown producer.
FENCED: Final = frozenset({45, 47, 48, 49, 59, 90})
# Message too large, batch too large, timestamp, invalid record.
REFUSED: Final = frozenset({10, 18, 32, 87})
UNAUTHORIZED: Final = frozenset({29, 30, 31, 53, 58})
# Leader moved or unavailable, too few replicas, request timed out at the broker: the epoch is over, a new one may do.
EPOCH_OVER: Final = frozenset({2, 3, 5, 6, 7, 8, 9, 13, 19, 20, 56, 74, 75, 76})
NOT_ATTEMPTED: Final = 55
SEQUENCES: Final = 1 << 31
MOST_UNANSWERED: Final = 4
PAUSE_MS: Final = 2
LONGEST_PAUSE_MS: Final = 100


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A produce request on its way."""

    batches: tuple[RecordBatch, ...]
    answer: asyncio.Future[dict[TopicPartition, Produced]]


def _weight(code: int) -> int:
    if code == OK:
        return 0
    return 1 if code in AGAIN_ANNOUNCING else 2


class Session:
    """The transactions of one transactional id, one epoch at a time."""

    def __init__(
        self, wire: Wire, transactional_id: str, group: str | None, *, timeout_ms: int, deadline_ms: int
    ) -> None:
        self.transactional_id: Final = transactional_id
        self._wire: Final = wire
        self._group: Final = group
        """Whose offsets are part of the transactions; None for a writer that reads no topic."""
        self._timeout_ms: Final = timeout_ms
        self._deadline_ms: Final = deadline_ms
        self._identity = ProducerIdentity(-1, -1)
        self._sequences: dict[TopicPartition, int] = {}
        self._forget_transaction()

    def _forget_transaction(self) -> None:
        self._announced: set[TopicPartition] = set()
        self._group_announced = False
        self._queue: list[RecordBatch] = []
        self._unanswered: list[Unanswered] = []
        self._sender: asyncio.Task[None] | None = None
        self._ends: dict[TopicPartition, int] = {}

    @property
    def epoch(self) -> int:
        """The producer epoch in force; -1 before `open`."""
        return self._identity.epoch

    async def open(self) -> None:
        """Start a new epoch: older owners are fenced and whatever they, or we, left open is aborted for good."""
        await self.drop()
        self._identity = await self._init_producer_id()
        self._sequences = {}
        crashpoints.reached("after_init")

    async def _init_producer_id(self) -> ProducerIdentity:
        # Repeating it is safe whatever became of the last one: each only starts a newer epoch.
        waited_ms, pause_ms = 0, PAUSE_MS
        while True:
            try:
                code, identity = await self._wire.init_producer_id(self.transactional_id, self._timeout_ms)
            except NoAnswer as error:
                code, identity, why = -1, self._identity, str(error)
            else:
                why = "" if code == OK else for_code(code).__name__
            if code == OK:
                return identity
            if code != -1 and code not in AGAIN:
                raise self._failed("InitProducerId", code)
            if waited_ms >= self._deadline_ms:
                text = f"{self.transactional_id}: InitProducerId got no usable answer in {waited_ms} ms ({why})."
                raise CommitUnknown(text)
            await self._wire.pause(pause_ms)
            waited_ms, pause_ms = waited_ms + pause_ms, min(2 * pause_ms, LONGEST_PAUSE_MS)

    def add(self, batches: Sequence[RecordBatch]) -> None:
        """Put batches into the open transaction, opening it with the first; errors show at `settle` and `commit`."""
        if self._identity.epoch < 0:
            raise InvariantBroken(f"{self.transactional_id}: batches were added before the session was opened.")
        self._queue.extend(batches)
        if self._sender is None or self._sender.done():
            if self._sender is not None and not self._sender.cancelled() and self._sender.exception() is not None:
                return  # the failure is kept for `settle`
            self._sender = asyncio.create_task(self._send_queue())

    async def _send_queue(self) -> None:
        while self._queue:
            wave = self._next_wave()
            new = [batch.target for batch in wave if batch.target not in self._announced]
            if new:
                await self._announce(new)
            if len(self._unanswered) >= MOST_UNANSWERED:
                await self._take_answer()
            sealed = [(batch.target, self._seal(batch)) for batch in wave]
            try:
                answer = await self._wire.produce(self.transactional_id, sealed)
            except NoAnswer as error:
                raise self._unanswered_by("Produce", error) from error
            self._unanswered.append(Unanswered(tuple(wave), asyncio.ensure_future(answer)))
            crashpoints.reached("after_output")
            if not self._group_announced:
                await self._announce_group()

    def _next_wave(self) -> list[RecordBatch]:
        """Take, in order, at most one batch a partition: a produce request can hold no more."""
        wave: dict[TopicPartition, RecordBatch] = {}
        rest: list[RecordBatch] = []
        for batch in self._queue:
            if batch.target in wave:
                rest.append(batch)
            else:
                wave[batch.target] = batch
        self._queue = rest
        return list(wave.values())

    def _seal(self, batch: RecordBatch) -> bytes:
        sequence = self._sequences.get(batch.target, 0)
        self._sequences[batch.target] = (sequence + batch.count) % SEQUENCES
        return batch.sealed(self._identity, sequence)

    async def _announce(self, targets: list[TopicPartition]) -> None:
        async def ask() -> int:
            codes = await self._wire.add_partitions(self.transactional_id, self._identity, targets)
            # An error outweighs "try again", which outweighs success: only all together are announced.
            # OperationNotAttempted says only that another partition of the request failed.
            return max((code for code in codes.values() if code != NOT_ATTEMPTED), key=_weight)

        await self._once("AddPartitionsToTxn", ask, again=AGAIN_ANNOUNCING)
        self._announced.update(targets)
        crashpoints.reached("after_begin")

    async def _announce_group(self) -> None:
        group = self._group
        if group is None:
            self._group_announced = True
            return
        await self._once(
            "AddOffsetsToTxn", lambda: self._wire.add_offsets(self.transactional_id, self._identity, group)
        )
        self._group_announced = True
        crashpoints.reached("after_group")

    async def _take_answer(self) -> None:
        flight = self._unanswered.pop(0)
        try:
            answers = await flight.answer
        except NoAnswer as error:
            raise self._unanswered_by("Produce", error) from error
        for batch in flight.batches:
            produced = answers.get(batch.target, Produced(-1, -1))
            if produced.error_code == OK:
                self._ends[batch.target] = produced.base_offset + batch.count
            elif produced.error_code in REFUSED:
                raise self._refused(batch, produced.error_code)
            else:
                raise self._failed(f"Produce to {batch.target.topic}/{batch.target.partition}", produced.error_code)

    async def settle(self) -> Mapping[TopicPartition, int]:
        """Wait until every batch is acknowledged; return the offset after the last record for each partition.

        Raises RecordRefused, TaskMigrated, CommitUnknown or BrokerUnavailable; then nothing of the transaction counts.
        """
        if self._sender is not None:
            await self._sender
        while self._unanswered:
            await self._take_answer()
        return self._ends

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """Make everything added since the last commit visible, with the offsets; return what `settle` does.

        Raises TaskMigrated when another owner has fenced us, CommitUnknown when an answer is missing.
        """
        if self._sender is not None:
            await self._sender
        if not self._group_announced:
            await self._announce_group()  # nothing but the offset is to be committed
        await self._appended_everywhere()
        # The offsets need not wait for the other answers to what was produced: EndTxn waits for both.
        sent = asyncio.ensure_future(self._commit_offsets(offsets))
        try:
            ends = await self.settle()
            crashpoints.reached("after_changelog")
            await sent
        except BaseException:
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)
            raise
        crashpoints.reached("after_offsets")
        crashpoints.reached("before_end")
        await self._once(
            "EndTxn", lambda: self._wire.end_transaction(self.transactional_id, self._identity, commit=True)
        )
        crashpoints.reached("after_end")
        self._forget_transaction()
        return ends

    async def _appended_everywhere(self) -> None:
        """Every partition of the transaction has taken a batch.

        With the first one a broker asks the coordinator whether the partition was announced. If the offsets come to
        the same broker meanwhile, they ask the same, and the broker gives the question before up: it answers
        NotEnoughReplicas, as if replicas were missing (KIP-890, `AddPartitionsToTxnManager` of Kafka 4.1).
        """
        while any(batch.target not in self._ends for flight in self._unanswered for batch in flight.batches):
            await self._take_answer()

    async def _commit_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        group = self._group
        if group is None:
            if offsets:
                raise InvariantBroken(f"{self.transactional_id}: offsets were to be committed, but to no group.")
            return
        await self._once(
            "TxnOffsetCommit",
            lambda: self._wire.commit_offsets(self.transactional_id, self._identity, group, offsets),
        )

    async def drop(self) -> None:
        """Forget the transaction on this side; the broker aborts it at the next `open` of any owner, or on time-out."""
        work: list[asyncio.Future[Any]] = [flight.answer for flight in self._unanswered]
        if self._sender is not None:
            work.append(self._sender)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        self._forget_transaction()

    async def _once(self, name: str, ask: Callable[[], Awaitable[int]], *, again: frozenset[int] = AGAIN) -> None:
        """Send one transactional request; repeat it only when an answer says that nothing was done."""
        waited_ms, pause_ms = 0, PAUSE_MS
        while True:
            try:
                code = await ask()
            except NoAnswer as error:
                raise self._unanswered_by(name, error) from error
            if code == OK:
                return
            if code not in again:
                raise self._failed(name, code)
            if waited_ms >= self._deadline_ms:
                text = f"{self.transactional_id}: {name} was put off for {waited_ms} ms ({for_code(code).__name__})."
                raise CommitUnknown(text)
            await self._wire.pause(pause_ms)
            waited_ms, pause_ms = waited_ms + pause_ms, min(2 * pause_ms, LONGEST_PAUSE_MS)

    def _refused(self, batch: RecordBatch, code: int) -> RecordRefused:
        target = batch.target
        text = f"{self.transactional_id}: {target.topic}/{target.partition} refused {batch.count} records: "
        return RecordRefused(
            text + for_code(code).__name__, topic=target.topic, partition=target.partition, rows=tuple(batch.rows)
        )

    def _unanswered_by(self, name: str, error: NoAnswer) -> CommitUnknown:
        return CommitUnknown(
            f"{self.transactional_id}: {name} got no answer ({error}); a new epoch will tell what happened."
        )

    def _failed(self, name: str, code: int) -> Exception:
        answer = for_code(code).__name__
        if code in FENCED:
            return TaskMigrated(
                f"{self.transactional_id}: {name} answered {answer}. Another owner has the partition; "
                f"this task is discarded and the worker rejoins the group."
            )
        if code in UNAUTHORIZED:
            return BrokerUnavailable(
                f"{self.transactional_id}: {name} answered {answer}. "
                f"Grant the worker's principal what `dedup check --broker` lists."
            )
        if code in EPOCH_OVER or code == -1:
            return CommitUnknown(f"{self.transactional_id}: {name} answered {answer}; the epoch is over.")
        return BrokerUnavailable(
            f"{self.transactional_id}: {name} answered {answer} (code {code}), which no retry can cure. "
            f"The transaction was not committed; see the broker's log."
        )
