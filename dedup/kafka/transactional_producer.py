"""Implements transactional sessions. A session makes a transaction's records and offsets visible together or not at
all.

`open` sends InitProducerId, which makes the broker fence older epochs of the transactional ID and end any transaction
that an older epoch left open (KIP-98). Then the session sends these requests:

    add(batches)        Produce, in the background
    prepare(offsets)    TxnOffsetCommit, and wait until every produce request has succeeded
    end()               EndTxn; `commit` is `prepare` and `end`

With transactions of version 2 (KIP-890), Produce and TxnOffsetCommit also add the partitions and the group to the
transaction, and EndTxn begins a new epoch. With transactions of version 1, AddPartitions is sent before a partition's
first batch, and AddOffsets is sent once per transaction.

Within an epoch, the session repeats a request only after a *response* with certain errors. Errors 14, 15, and 16 mean
that the coordinator is loading, is not available, or has moved. Error 51 means that the previous transaction is still
ending. Produce is repeated only after error 51, which means that the batch was not appended. AddPartitions is also
repeated after error 3, which means that the coordinator does not know the partition yet. Repeating a request after its
response is safe, because the first copy is no longer in flight and both copies have the same effect.

After a *missing response*, repeating a request is not safe, because a late EndTxn of version 1 could commit half of the
next transaction. If a response is missing, the session raises `CommitUnknown`, and only a new InitProducerId reveals
the outcome of the transaction. After error 49, the session raises `ProducerForgotten`, because the coordinator does not
say whether the ID has expired or has another owner.

To abort a transaction, the session starts a new epoch, because InitProducerId ends the open transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dedup import crashpoints
from dedup.errors import (
    BrokerUnavailable,
    CommitUnknown,
    InvariantBroken,
    ProducerForgotten,
    RecordRefused,
    TaskMigrated,
)
from dedup.kafka.record_batch import seal
from dedup.kafka.wire import (
    COORDINATOR_MOVED,
    NoAnswer,
    Position,
    Produced,
    ProducerIdentity,
    RecordBatch,
    TopicPartition,
    Wire,
    error_name,
)

OK: Final = 0
# Retry: the coordinator is loading, is not available, has moved, or is still ending the previous transaction.
STILL_ENDING: Final = 51
AGAIN: Final = COORDINATOR_MOVED | {STILL_ENDING}
# Error 3, which means that the coordinator does not know the partition yet, is retried only for AddPartitions.
AGAIN_ANNOUNCING: Final = AGAIN | {3}
# Invalid epoch, fenced, ID mapping lost, wrong transaction state, sequence out of order, unknown producer.
FENCED: Final = frozenset({45, 47, 48, 49, 59, 90})
# The coordinator forgets an ID that has had no transaction for `transactional.id.expiration.ms`. It also returns this
# error to an owner whose successor got another producer ID.
ID_MAPPING_LOST: Final = 49
# Message too large, batch too large, invalid timestamp, invalid record.
REFUSED: Final = frozenset({10, 18, 32, 87})
TOO_LARGE: Final = frozenset({10, 18})
INVALID_TIMESTAMP: Final = 32
# Sequence out of order, unknown producer: the broker also returns these errors for batches after a refused batch.
OUT_OF_SEQUENCE: Final = frozenset({45, 59})
UNAUTHORIZED: Final = frozenset({29, 30, 31, 53, 58})
# Leader moved or unavailable, too few replicas, request timed out at the broker, abortable (KIP-890): a new epoch may
# succeed.
EPOCH_OVER: Final = frozenset({2, 3, 5, 6, 7, 8, 9, 13, 19, 20, 56, 74, 75, 120})
COMPRESSION: Final = 76
NOT_ATTEMPTED: Final = 55
MOST_UNANSWERED: Final = 4
DEADLINE_MS: Final = 20_000
"""The time for which a session repeats a request before the session gives up."""
PAUSE_MS: Final = 2
LONGEST_PAUSE_MS: Final = 100


@dataclass(frozen=True, slots=True)
class Queued:
    """A batch of the open transaction and, if a task sends the batch, the feeding partition of its records."""

    batch: RecordBatch
    feeding: TopicPartition | None


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A produce request that is still in flight."""

    batches: tuple[Queued, ...]
    sealed: Mapping[TopicPartition, bytes]
    answer: asyncio.Future[dict[TopicPartition, Produced]]


def _weight(code: int) -> int:
    if code == OK:
        return 0
    return 1 if code in AGAIN_ANNOUNCING else 2


class Session:
    """Runs the transactions of one transactional ID, one epoch at a time."""

    def __init__(
        self,
        wire: Wire,
        transactional_id: str,
        group: str | None,
        *,
        timeout_ms: int,
        deadline_ms: int = DEADLINE_MS,
        batch_bytes: int = 0,
    ) -> None:
        """Queued batches are sent once their size reaches ``batch_bytes``, or when `settle` or `prepare` is called."""
        self.transactional_id: Final = transactional_id
        self._wire: Final = wire
        self._group: Final = group
        """The consumer group whose offsets are part of the transactions, or None for a writer that reads no topic."""
        self._timeout_ms: Final = timeout_ms
        self._deadline_ms: Final = deadline_ms
        self._batch_bytes: Final = batch_bytes
        self._identity = ProducerIdentity(-1, -1)
        self._sequences: dict[TopicPartition, int] = {}
        self._forget_transaction()

    def _forget_transaction(self) -> None:
        self._announced: set[TopicPartition] = set()
        self._group_announced = False
        self._queue: list[Queued] = []
        self._queued_bytes = 0
        self._unanswered: list[Unanswered] = []
        self._sender: asyncio.Task[None] | None = None
        self._ends: dict[TopicPartition, int] = {}
        self._refused: RecordRefused | None = None
        self._refused_by: set[TopicPartition] = set()
        self.append_time_ms = -1
        """The latest append time of a batch of the open transaction, or -1 if no broker reported an append time."""

    @property
    def epoch(self) -> int:
        """The current producer epoch, or -1 before `open`."""
        return self._identity.epoch

    async def open(self) -> None:
        """Start a new epoch, which fences older owners of the ID and aborts any transaction that an owner left open."""
        await self.drop()
        await self._insist("InitProducerId", self._init_producer_id, again=AGAIN | {-1}, repeatable=True)
        self._sequences = {}
        crashpoints.reached("after_init")

    async def _init_producer_id(self) -> int:
        code, identity = await self._wire.init_producer_id(self.transactional_id, self._timeout_ms)
        if code == OK:
            self._identity = identity
        return code

    def add(self, batches: Sequence[RecordBatch], feeding: TopicPartition | None = None) -> None:
        """Add batches to the current transaction. If the batches cannot be sent, `settle` and `prepare` raise the
        error.

        If the broker refuses a batch, the error names ``feeding``, the partition to which the batch's row numbers
        refer.
        """
        if self._identity.epoch < 0:
            raise InvariantBroken(f"{self.transactional_id}: batches were added before the session was opened.")
        self._queue.extend(Queued(batch, feeding) for batch in batches)
        self._queued_bytes += sum(batch.builder.size() for batch in batches)
        if self._queued_bytes >= self._batch_bytes:
            self._send()

    def _send(self) -> None:
        if self._sender is None or self._sender.done():
            if self._sender is not None and not self._sender.cancelled() and self._sender.exception() is not None:
                return  # `settle` raises the failure
            self._sender = asyncio.create_task(self._send_queue())

    async def _send_queue(self) -> None:
        while self._queue:
            wave = self._next_wave()
            new = [each.batch.target for each in wave if each.batch.target not in self._announced]
            if new:
                await self._announce(new)
            if new or self._identity.implicit:
                await self._appended_everywhere()
            if len(self._unanswered) >= MOST_UNANSWERED:
                await self._take_answer()
            sealed = seal([each.batch for each in wave], self._identity, self._sequences)
            self._unanswered.append(Unanswered(tuple(wave), sealed, await self._produce(sealed)))
            crashpoints.reached("after_output")
            if not self._group_announced:
                await self._announce_group()
        self._queued_bytes = 0

    async def _produce(self, sealed: Mapping[TopicPartition, bytes]) -> asyncio.Future[dict[TopicPartition, Produced]]:
        try:
            answer = await self._wire.produce(self.transactional_id, self._identity, list(sealed.items()))
        except NoAnswer as error:
            raise self._unanswered_by("Produce", error) from error
        return asyncio.ensure_future(answer)

    def _next_wave(self) -> list[Queued]:
        """Take the next batches in order, at most one per partition, because a produce request cannot hold more."""
        wave: dict[TopicPartition, Queued] = {}
        rest: list[Queued] = []
        for each in self._queue:
            if each.batch.target in wave:
                rest.append(each)
            else:
                wave[each.batch.target] = each
        self._queue = rest
        return list(wave.values())

    async def _announce(self, targets: list[TopicPartition]) -> None:
        if self._identity.implicit:
            self._announced.update(targets)
            return

        async def ask() -> int:
            codes = await self._wire.add_partitions(self.transactional_id, self._identity, targets)
            # The coordinator adds all partitions or none, so a permanent error takes precedence over a retriable error,
            # and a retriable error over success. OperationNotAttempted only means that another partition in the request
            # failed.
            return max((code for code in codes.values() if code != NOT_ATTEMPTED), key=_weight)

        await self._insist("AddPartitionsToTxn", ask, again=AGAIN_ANNOUNCING)
        self._announced.update(targets)
        crashpoints.reached("after_begin")

    async def _announce_group(self) -> None:
        group = self._group
        if group is None or self._identity.implicit:
            self._group_announced = True
            return
        await self._insist(
            "AddOffsetsToTxn", lambda: self._wire.add_offsets(self.transactional_id, self._identity, group)
        )
        self._group_announced = True
        crashpoints.reached("after_group")

    async def _take_answer(self) -> None:
        flight = self._unanswered.pop(0)
        answers = await self._answers(flight)
        for each in flight.batches:
            batch = each.batch
            produced = answers.get(batch.target, Produced(-1, -1))
            if produced.error_code == OK:
                self._ends[batch.target] = produced.base_offset + len(batch.rows)
                self.append_time_ms = max(self.append_time_ms, produced.append_time_ms)
            elif produced.error_code in REFUSED:
                self._note_refused(_refused(self.transactional_id, each, produced), batch.target)
            elif produced.error_code in OUT_OF_SEQUENCE and batch.target in self._refused_by:
                pass  # an earlier batch failed, so the transaction cannot be committed anyway
            else:
                raise self._failed(f"Produce to {batch.target.topic}/{batch.target.partition}", produced.error_code)

    async def _answers(self, flight: Unanswered) -> Mapping[TopicPartition, Produced]:
        """Return the responses to a produce request.

        Batches are sent again if the previous transaction is still ending.

        Only a transaction's first batch for a partition can arrive before the previous transaction has ended, and
        `_send_queue` sends no other batch until the broker has accepted this first batch.
        """
        answers: dict[TopicPartition, Produced] = {}
        answer, waited_ms, pause_ms = flight.answer, 0, PAUSE_MS
        while True:
            try:
                answers |= await answer
            except NoAnswer as error:
                raise self._unanswered_by("Produce", error) from error
            early = {target: flight.sealed[target] for target, one in answers.items() if one.error_code == STILL_ENDING}
            if not early:
                return answers
            if waited_ms >= self._deadline_ms:
                raise CommitUnknown(f"{self.transactional_id}: the previous transaction did not end in {waited_ms} ms.")
            await self._wire.pause(pause_ms)
            waited_ms, pause_ms = waited_ms + pause_ms, min(2 * pause_ms, LONGEST_PAUSE_MS)
            answer = await self._produce(early)

    def _note_refused(self, refused: RecordRefused, target: TopicPartition) -> None:
        """Store the refusal for `settle`, which raises all refusals together after all responses have arrived."""
        self._refused_by.add(target)
        if self._refused is None:
            self._refused = refused
        else:
            self._refused.also.append(refused)

    async def settle(self) -> Mapping[TopicPartition, int]:
        """Wait until all batches are acknowledged, and return the offset after the last written record of each
        partition.

        If `settle` raises RecordRefused, TaskMigrated, CommitUnknown, or BrokerUnavailable, the transaction cannot be
        committed.
        """
        await self._sent()
        while self._unanswered:
            await self._take_answer()
        if self._refused is not None:
            raise self._refused
        return self._ends

    async def _sent(self) -> None:
        """Wait until all added batches are sent, or until another caller calls `drop`."""
        if self._queue:
            self._send()
        sender = self._sender
        if sender is not None:
            if not sender.done():  # `wait` would yield to the event loop, which may judge a batch in the meantime
                await asyncio.wait({sender})
            if not sender.cancelled():
                sender.result()

    async def commit(self, offsets: Mapping[TopicPartition, Position]) -> Mapping[TopicPartition, int]:
        """Commit the offsets and all batches added since the last commit, and return the end offsets as `settle` does.

        Raises the same errors as `prepare` and `end`.
        """
        ends = await self.prepare(offsets)
        await self.end()
        return ends

    async def prepare(self, offsets: Mapping[TopicPartition, Position]) -> Mapping[TopicPartition, int]:
        """Write the offsets and all added batches without committing them, and return the end offsets as `settle` does.

        Raises the same errors as `settle`, such as TaskMigrated if another owner has fenced this session, and
        CommitUnknown if a response is missing.
        """
        await self._sent()
        if not self._group_announced:
            await self._announce_group()  # the transaction contains only the offset
        await self._appended_everywhere()
        if self._refused is not None:
            await self.settle()  # raises the refusal, so no offset is sent
        # The offsets need not wait for the other produce responses, because EndTxn waits for all of them.
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
        return ends

    async def end(self) -> None:
        """Commit the transaction that `prepare` wrote. Raises TaskMigrated, CommitUnknown, or BrokerUnavailable."""
        crashpoints.reached("before_end")
        before = self._identity

        async def ask() -> int:
            code, self._identity = await self._wire.end_transaction(self.transactional_id, before, commit=True)
            return code

        await self._insist("EndTxn", ask)
        if self._identity != before:
            self._sequences = {}
        crashpoints.reached("after_end")
        self._forget_transaction()

    async def _appended_everywhere(self) -> None:
        """Wait until every partition to which batches were sent has accepted at least one batch.

        Before a broker appends a transaction's first batch to a partition, the broker verifies with the transaction
        coordinator that the partition belongs to the transaction (KIP-890). A broker queues at most one verification
        per transactional ID. The first batches of other partitions and TxnOffsetCommit also need a verification. If a
        new verification replaces a batch's queued verification, the broker rejects that batch with NotEnoughReplicas
        (`AddPartitionsToTxnManager` of Kafka 4.1).
        """
        while any(each.batch.target not in self._ends for flight in self._unanswered for each in flight.batches):
            await self._take_answer()

    async def _commit_offsets(self, offsets: Mapping[TopicPartition, Position]) -> None:
        group = self._group
        if group is None:
            if offsets:
                raise InvariantBroken(f"{self.transactional_id}: offsets cannot be committed without a group.")
            return
        await self._insist(
            "TxnOffsetCommit", lambda: self._wire.commit_offsets(self.transactional_id, self._identity, group, offsets)
        )

    async def drop(self) -> None:
        """Forget the open transaction.

        The broker aborts the transaction after its timeout or when the next owner calls `open`.
        """
        work: list[asyncio.Future[Any]] = [flight.answer for flight in self._unanswered]
        if self._sender is not None:
            work.append(self._sender)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        self._forget_transaction()

    async def _insist(
        self, name: str, ask: Callable[[], Awaitable[int]], *, again: frozenset[int] = AGAIN, repeatable: bool = False
    ) -> None:
        """Send a transactional request, and repeat it after a response whose error code is in ``again``.

        Without a response, only InitProducerId is repeated (``repeatable``), because each copy starts a newer epoch.
        """
        waited_ms, pause_ms, begun_s = 0, PAUSE_MS, time.monotonic()
        while True:
            try:
                code = await ask()
            except NoAnswer as error:
                if not repeatable:
                    raise self._unanswered_by(name, error) from error
                why = str(error)
            else:
                if code == OK:
                    return
                if code not in again:
                    raise self._failed(name, code)
                why = error_name(code)
            # A request to a frozen broker takes much longer than the pause after the request.
            waited_ms = max(waited_ms, int(1000 * (time.monotonic() - begun_s)))
            if waited_ms >= self._deadline_ms:
                raise CommitUnknown(f"{self.transactional_id}: {name} got no usable answer in {waited_ms} ms ({why}).")
            await self._wire.pause(pause_ms)
            waited_ms, pause_ms = waited_ms + pause_ms, min(2 * pause_ms, LONGEST_PAUSE_MS)

    def _unanswered_by(self, name: str, error: NoAnswer) -> CommitUnknown:
        return CommitUnknown(
            f"{self.transactional_id}: {name} got no answer ({error}); a new epoch will reveal the outcome."
        )

    def _failed(self, name: str, code: int) -> Exception:
        answer = f"{self.transactional_id}: {name} answered {error_name(code)}"
        if code == ID_MAPPING_LOST:
            return ProducerForgotten(
                f"{answer}. The cluster does not know this producer any more: it committed nothing for "
                "`transactional.id.expiration.ms` (7 days by default), or another owner has the partition."
            )
        if code in FENCED:
            return TaskMigrated(
                f"{answer}. Another owner has the partition: another worker, or the same command run a second time. "
                "If there is neither, this process stood still for longer than `transaction_timeout`. The open "
                "transaction of this process is aborted."
            )
        if code in EPOCH_OVER or code == -1:
            return CommitUnknown(f"{answer}; the epoch is over.")
        if code in UNAUTHORIZED:
            return BrokerUnavailable(f"{answer}. Grant the worker's principal what `dedup check --broker` lists.")
        if code == COMPRESSION:
            return BrokerUnavailable(
                f"{answer}: the broker does not accept this compression. Nothing was committed. "
                f"Set `topics.compression` to another one (lz4, snappy, gzip or none)."
            )
        return BrokerUnavailable(
            f"{answer} (code {code}), which a retry cannot fix. The transaction was not committed; "
            "see the broker's log."
        )


def _refused(transactional_id: str, queued: Queued, produced: Produced) -> RecordRefused:
    batch = queued.batch
    target, rows, why = batch.target, batch.rows, error_name(produced.error_code)
    reasons = {rows[place]: f"{target}: {why}: {text}" for place, text in produced.refused if place < len(rows)}
    return RecordRefused(
        f"{transactional_id}: {target} refused {len(reasons) or len(rows)} records: {why}",
        topic=target.topic,
        partition=target.partition,
        rows=tuple(reasons or rows),
        feeding=queued.feeding,
        reasons=reasons,
        too_large=produced.error_code in TOO_LARGE,
        bad_time=produced.error_code == INVALID_TIMESTAMP,
    )
