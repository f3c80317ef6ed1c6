"""A Kafka cluster in memory, as far as the protocol goes: one method a request, each done at once.

Transactions follow the coordinator's states of KIP-98: an EndTxn is decided first (prepare) and its markers are
written partition by partition afterwards; whoever asks in between is told CONCURRENT_TRANSACTIONS. A marker takes an
offset. Produce is checked as of KIP-890 part 1: epoch, sequence, and that the partition is part of the transaction.
With transactions of version 2 (KIP-890 part 2), Produce and TxnOffsetCommit join the transaction by themselves, and
EndTxn begins the next epoch.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from aiokafka.record.memory_records import MemoryRecords

from dedup.kafka.wire import (
    UNSTABLE_OFFSET,
    CommittedOffset,
    Fetched,
    FetchedRecord,
    Header,
    LogBounds,
    Position,
    Produced,
    ProducerIdentity,
    TopicNow,
    TopicPartition,
)

OK = 0
TOO_LARGE = 10
OUT_OF_ORDER = 45
OLD_EPOCH = 47
INVALID_STATE = 48
UNKNOWN_ID = 49
CONCURRENT = 51
FENCED = 90

SpanState = Literal["open", "committed", "aborted"]


class Record(NamedTuple):
    """A committed record, in the shape that `FeedBatch.of` takes."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]


def fetched(records: Sequence[FetchedRecord], next_offset: int, high_watermark: int, stable: int) -> Fetched:
    """Return a fetch response with these records."""
    columns = [list(column) for column in zip(*records, strict=True)] or [[], [], [], []]
    return Fetched(*columns, next_offset, high_watermark, stable)


@dataclass(slots=True)
class Span:
    """What one transaction wrote to one partition."""

    first_offset: int
    state: SpanState = "open"


@dataclass(slots=True)
class Entry:
    """An offset of a partition: a record, or a transaction's marker."""

    record: Record | None
    span: Span | None


@dataclass(slots=True)
class Partition:
    """One log."""

    entries: list[Entry] = field(default_factory=list)
    open_spans: dict[int, Span] = field(default_factory=dict)
    """Producer id -> its open transaction's records here."""
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Producer id -> epoch and next sequence number."""

    @property
    def end(self) -> int:
        return len(self.entries)

    @property
    def stable_end(self) -> int:
        if not self.open_spans:
            return len(self.entries)
        return min(span.first_offset for span in self.open_spans.values())

    def append(self, record: Record, producer_id: int | None) -> None:
        span = None
        if producer_id is not None:
            span = self.open_spans.get(producer_id)
            if span is None:
                span = self.open_spans[producer_id] = Span(self.end)
        self.entries.append(Entry(record._replace(offset=self.end), span))

    def mark(self, producer_id: int, epoch: int, *, commit: bool) -> None:
        """Write a transaction's marker, which fences older epochs."""
        if epoch > self.sequences.get(producer_id, (-1, 0))[0]:
            self.sequences[producer_id] = (epoch, 0)
        span = self.open_spans.pop(producer_id, None)
        if span is not None:
            span.state = "committed" if commit else "aborted"
        self.entries.append(Entry(None, None))

    def committed(self, begin: int, end: int) -> list[Record]:
        """Return the committed records of a range below the last stable offset."""
        return [
            entry.record
            for entry in self.entries[begin:end]
            if entry.record is not None and (entry.span is None or entry.span.state == "committed")
        ]


class TxState(enum.Enum):
    """The coordinator's state of a transactional id."""

    EMPTY = "empty"
    ONGOING = "ongoing"
    COMMITTING = "prepare commit"
    ABORTING = "prepare abort"
    COMMITTED = "complete commit"
    ABORTED = "complete abort"


ENDING = (TxState.COMMITTING, TxState.ABORTING)


@dataclass(slots=True)
class Coordinated:
    """A transactional id at its coordinator."""

    producer_id: int
    epoch: int = 0
    state: TxState = TxState.EMPTY
    partitions: list[TopicPartition] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    offsets: dict[tuple[str, TopicPartition], Position] = field(default_factory=dict)
    """Committed to the group by the open transaction."""
    unmarked: list[TopicPartition] = field(default_factory=list)
    """Partitions whose marker is still to be written; the group's is written last."""
    ended: int = -2
    """The epoch in which EndTxn ended the last transaction, if that began another one."""


class Cluster:
    """Partitions, transactional IDs and the offsets of groups."""

    def __init__(
        self,
        *,
        fetch_entries: int = 1 << 30,
        refuses: Callable[[str, Record], bool] = lambda _t, _r: False,
        implicit: bool = True,
        verifies: bool = True,
    ) -> None:
        self.version = 0
        """Counts what may have become visible to readers."""
        self.offsets: dict[tuple[str, TopicPartition], Position] = {}
        self.made_again: Counter[str] = Counter()
        """Topic -> how often it was deleted and recreated."""
        self.added: Counter[str] = Counter()
        """Topic -> partitions added to it; nothing is ever written to them."""
        self.late_markers = False
        """The next transaction to end writes its markers bit by bit."""
        self._fetch_entries = fetch_entries
        self._refuses = refuses
        self._implicit = implicit
        """Transactions are of version 2."""
        self._verifies = verifies
        """A partition's leader asks the coordinator whether a batch belongs to an open transaction (KIP-890 part 1)."""
        self._partitions: dict[TopicPartition, Partition] = {}
        self._ids: dict[str, Coordinated] = {}

    def partition(self, target: TopicPartition) -> Partition:
        """Return a log; topics exist when they are first asked for."""
        found = self._partitions.get(target)
        if found is None:
            found = self._partitions[target] = Partition()
        return found

    def append_plain(self, target: TopicPartition, records: Sequence[Record]) -> None:
        """Write records as a producer without transactions does."""
        for record in records:
            self.partition(target).append(record, None)

    def init_producer_id(self, transactional_id: str) -> tuple[int, ProducerIdentity]:
        known = self._ids.get(transactional_id)
        if known is None:
            known = self._ids[transactional_id] = Coordinated(1_000 + len(self._ids))
            return OK, self._identity(known)
        if known.state is TxState.ONGOING:
            known.epoch += 1  # fences the old owner at once; the new epoch is handed out when the markers are written
            self._end(known, commit=False)
            return CONCURRENT, ProducerIdentity(-1, -1)
        if known.state in ENDING:
            self._mark_next(known)
            return CONCURRENT, ProducerIdentity(-1, -1)
        known.epoch += 1
        known.state = TxState.EMPTY
        return OK, self._identity(known)

    def _identity(self, known: Coordinated) -> ProducerIdentity:
        return ProducerIdentity(known.producer_id, known.epoch, self._implicit)

    def _checked(self, transactional_id: str, identity: ProducerIdentity) -> tuple[int, Coordinated | None]:
        known = self._ids.get(transactional_id)
        if known is None or known.producer_id != identity.producer_id:
            return UNKNOWN_ID, None
        if identity.epoch != known.epoch:
            return FENCED, None
        return OK, known

    def add_partitions(
        self, transactional_id: str, identity: ProducerIdentity, partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        code, known = self._checked(transactional_id, identity)
        if known is not None:
            code = self._join(known)
            if code == OK:
                known.partitions += [target for target in partitions if target not in known.partitions]
        return dict.fromkeys(partitions, code)

    def _join(self, known: Coordinated) -> int:
        """Begin a transaction, or go on with it."""
        if known.state in ENDING:
            self._mark_next(known)
            return CONCURRENT
        known.state = TxState.ONGOING
        return OK

    def produce(
        self,
        transactional_id: str,
        identity: ProducerIdentity,
        batches: Sequence[tuple[TopicPartition, bytes]],
        *,
        put_off: bool = False,
    ) -> dict[TopicPartition, Produced]:
        """Append batches; with ``put_off``, partitions can not join the transaction yet."""
        return {
            target: self._produce_one(transactional_id, target, payload, joins=identity.implicit, put_off=put_off)
            for target, payload in batches
        }

    def _produce_one(
        self, transactional_id: str, target: TopicPartition, payload: bytes, *, joins: bool, put_off: bool
    ) -> Produced:
        batch = MemoryRecords(payload).next_batch()
        assert batch is not None
        assert batch.validate_crc()
        assert batch.is_transactional
        if self._verifies:
            code = self._verified(transactional_id, target, batch, joins=joins, put_off=put_off)
            if code != OK:
                return Produced(code, -1)
        return self._appended(target, batch)

    def _verified(
        self, transactional_id: str, target: TopicPartition, batch: Any, *, joins: bool, put_off: bool
    ) -> int:
        code, known = self._checked(transactional_id, ProducerIdentity(batch.producer_id, batch.producer_epoch))
        if known is None:
            return OLD_EPOCH if code == FENCED else code
        if known.state is not TxState.ONGOING or target not in known.partitions:
            code = INVALID_STATE if not joins else CONCURRENT if put_off else self._join(known)
            if code == OK:
                known.partitions.append(target)
        return code

    def _appended(self, target: TopicPartition, batch: Any) -> Produced:
        records = [Record(0, row.timestamp, row.key, row.value, row.headers) for row in batch]
        # As in a broker, before the epoch and the sequence number are looked at.
        if any(self._refuses(target.topic, record) for record in records):
            return Produced(TOO_LARGE, -1)
        log = self.partition(target)
        epoch, expected = log.sequences.get(batch.producer_id, (-1, 0))
        if batch.producer_epoch < epoch:
            return Produced(OLD_EPOCH, -1)
        if batch.base_sequence != (expected if batch.producer_epoch == epoch else 0):
            return Produced(OUT_OF_ORDER, -1)
        log.sequences[batch.producer_id] = (batch.producer_epoch, batch.base_sequence + len(records))
        base_offset = log.end
        for record in records:
            log.append(record, batch.producer_id)
        return Produced(OK, base_offset)

    def add_offsets(self, transactional_id: str, identity: ProducerIdentity, group: str) -> int:
        code, known = self._checked(transactional_id, identity)
        if known is None:
            return code
        code = self._join(known)
        if code == OK:
            known.groups.add(group)
        return code

    def commit_offsets(
        self, transactional_id: str, identity: ProducerIdentity, group: str, offsets: Mapping[TopicPartition, Position]
    ) -> int:
        code, known = self._checked(transactional_id, identity)
        if known is None:
            return code
        if identity.implicit:
            code = self._join(known)
            if code != OK:
                return code
            known.groups.add(group)
        elif known.state is not TxState.ONGOING or group not in known.groups:
            return INVALID_STATE
        known.offsets.update({(group, source): offset for source, offset in offsets.items()})
        return OK

    def end_transaction(
        self, transactional_id: str, identity: ProducerIdentity, *, commit: bool
    ) -> tuple[int, ProducerIdentity]:
        known = self._ids.get(transactional_id)
        done = (TxState.COMMITTED, TxState.COMMITTING) if commit else (TxState.ABORTED, TxState.ABORTING)
        if known is not None and identity.implicit and self._ended_as(known) == (identity.producer_id, identity.epoch):
            return (OK, self._identity(known)) if known.state in done else (INVALID_STATE, identity)
        code, known = self._checked(transactional_id, identity)
        if known is None:
            return code, identity
        if known.state is TxState.ONGOING:
            known.epoch += identity.implicit
            known.ended = identity.epoch
            self._end(known, commit=commit)
            return OK, self._identity(known)
        if known.state in done and not identity.implicit:
            # The same request again: the broker can not tell it from a repetition.
            return (CONCURRENT if known.state in ENDING else OK), identity
        return INVALID_STATE, identity

    @staticmethod
    def _ended_as(known: Coordinated) -> tuple[int, int] | None:
        """Return the identity that ended the last transaction, if nothing came after that."""
        later = known.state in {TxState.EMPTY, TxState.ONGOING}
        return None if later or known.epoch != known.ended + 1 else (known.producer_id, known.ended)

    def expire(self, transactional_id: str) -> None:
        """The coordinator aborts a transaction that took too long, and bumps the epoch."""
        known = self._ids.get(transactional_id)
        if known is not None and known.state is TxState.ONGOING:
            known.epoch += 1
            self._end(known, commit=False)

    def _end(self, known: Coordinated, *, commit: bool) -> None:
        known.state = TxState.COMMITTING if commit else TxState.ABORTING
        known.unmarked = known.partitions
        known.partitions = []
        if not self.late_markers:
            while known.state in ENDING:
                self._mark_next(known)
        self.late_markers = False

    def _mark_next(self, known: Coordinated) -> None:
        commit = known.state is TxState.COMMITTING
        if known.unmarked:
            self.partition(known.unmarked.pop(0)).mark(known.producer_id, known.epoch, commit=commit)
        if not known.unmarked:
            if commit:
                self.offsets.update(known.offsets)
            known.offsets = {}
            known.groups = set()
            known.state = TxState.COMMITTED if commit else TxState.ABORTED
        self.version += 1

    def write_markers(self) -> None:
        """Write all markers that are still to be written."""
        for known in self._ids.values():
            while known.state in ENDING:
                self._mark_next(known)

    def committed_offset(self, group: str, source: TopicPartition, *, stable: bool) -> CommittedOffset:
        if stable and any((group, source) in known.offsets for known in self._ids.values()):
            return CommittedOffset(UNSTABLE_OFFSET, None)
        return CommittedOffset(OK, self.offsets.get((group, source)))

    def bounds(self, source: TopicPartition) -> LogBounds:
        return LogBounds(0, self.partition(source).end)

    def topics(self, names: Sequence[str]) -> dict[str, TopicNow | int]:
        """Return the topics as they are now; each has as many partitions as were asked for, one at the least."""
        counts = Counter(partition.topic for partition in self._partitions)
        return {
            name: TopicNow(
                f"{name.encode().hex():0>24.24}{self.made_again[name]:08x}", max(counts[name], 1) + self.added[name]
            )
            for name in names
        }

    def make_again(self, topic: str) -> None:
        """Delete a topic, and the offsets that groups have committed of it, and make it anew, empty."""
        self.made_again[topic] += 1
        for target in [target for target in self._partitions if target.topic == topic]:
            self._partitions[target] = Partition()
        self.offsets = {place: at for place, at in self.offsets.items() if place[1].topic != topic}

    def offset_at(self, source: TopicPartition, time_ms: int) -> int | None:
        rows = enumerate(self.partition(source).entries)
        return next((at for at, row in rows if row.record is not None and row.record.timestamp >= time_ms), None)

    def fetch(self, source: TopicPartition, offset: int) -> Fetched:
        """Return committed records up to the last stable offset."""
        log = self.partition(source)
        stable = log.stable_end
        end = max(offset, min(stable, offset + self._fetch_entries))
        records = [FetchedRecord(row.offset, row.timestamp, row.key, row.value) for row in log.committed(offset, end)]
        return fetched(records, end, log.end, stable)

    def time_passes(self) -> bool:
        """End every open transaction by its timeout; False if there was none."""
        late = [name for name, known in self._ids.items() if known.state is TxState.ONGOING or known.state in ENDING]
        for name in late:
            self.expire(name)
        self.write_markers()
        return bool(late)
