"""The unit that agents process: the records of one feeding partition that one fetch returned, as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from dedup.kafka.record_batch import Columns
from dedup.kafka.wire import Header, TopicPartition


@dataclass(frozen=True, slots=True)
class FeedBatch:
    """Records of one partition in log order, column by column; every column has one entry per record."""

    feeding: TopicPartition
    offsets: list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: Sequence[Sequence[Header]]
    follows: int
    """The offset at which the previous batch ended; a gap reveals a lost batch."""
    odd_names: frozenset[int] = frozenset()
    """Offsets of records with a header name that is not UTF-8, which become dead letters."""
    leader_epoch: int = -1
    """Leader epoch of the last record (KIP-320); -1 if unknown."""
    life: int = 0
    """Identifies the reading that fetched the batch, because a partition may be read again from an earlier offset."""

    next_offset: int = field(init=False)
    """The offset after the last record, which is the offset to commit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "next_offset", self.offsets[-1] + 1 if self.offsets else self.follows)

    @classmethod
    def of(
        cls, feeding: TopicPartition, columns: Columns, *, follows: int, leader_epoch: int = -1, life: int = 0
    ) -> FeedBatch:
        """Return a batch of fetched columns, which hold consecutive records of one partition."""
        return cls(
            feeding,
            columns.offsets,
            columns.timestamps_ms,
            columns.keys,
            columns.values,
            columns.headers,
            follows,
            columns.odd_names,
            leader_epoch,
            life,
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def from_offset(self, offset: int) -> FeedBatch:
        """Return the records at or after an offset."""
        if self.offsets[0] >= offset:
            return self
        return self._rows(slice(sum(1 for own in self.offsets if own < offset), None))

    def pieces(self, most: int) -> Iterator[FeedBatch]:
        """Yield the records in order, at most the given number at a time."""
        for at in range(0, len(self), most):
            yield self._rows(slice(at, at + most))

    def _rows(self, rows: slice) -> FeedBatch:
        return FeedBatch(
            self.feeding,
            self.offsets[rows],
            self.timestamps_ms[rows],
            self.keys[rows],
            self.values[rows],
            self.headers[rows],
            self.follows,
            self.odd_names,
            self.leader_epoch,
            self.life,
        )


def gather(rows: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that selects these rows (at least one) from a column; it runs in C."""
    if len(rows) == 1:
        (row,) = rows
        return lambda column: (column[row],)  # itemgetter would return the bare entry
    return itemgetter(*rows)
