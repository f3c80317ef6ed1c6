"""The unit that flows through an agent: the records of one feeding partition that one fetch returned, as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from dedup.session.fetch import Columns
from dedup.session.wire import Header, TopicPartition


@dataclass(frozen=True, slots=True)
class FeedBatch:
    """Records of one partition in log order, column by column; every column has one entry a record."""

    feeding: TopicPartition
    offsets: list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: Sequence[Sequence[Header]]
    follows: int
    """Where the batch before this one ended, so that a lost batch is noticed."""
    odd_names: frozenset[int] = frozenset()
    """Offsets of records with a header name that is not UTF-8: dead letters."""

    @classmethod
    def of(cls, feeding: TopicPartition, columns: Columns, *, follows: int) -> FeedBatch:
        """Return the columns of consecutive records of one partition."""
        return cls(
            feeding,
            columns.offsets,
            columns.timestamps_ms,
            columns.keys,
            columns.values,
            columns.headers,
            follows,
            columns.odd_names,
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def next_offset(self) -> int:
        """The offset to go on from: Kafka commits the next offset to read, not the last one read."""
        return self.offsets[-1] + 1

    def from_offset(self, offset: int) -> FeedBatch:
        """Return the records at or after an offset."""
        if self.offsets[0] >= offset:
            return self
        skip = sum(1 for own in self.offsets if own < offset)
        return FeedBatch(
            self.feeding,
            self.offsets[skip:],
            self.timestamps_ms[skip:],
            self.keys[skip:],
            self.values[skip:],
            self.headers[skip:],
            self.follows,
            self.odd_names,
        )


def gather(rows: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that takes these rows' entries out of a column, in C; there must be a row."""
    if len(rows) == 1:
        (row,) = rows
        return lambda column: (column[row],)  # itemgetter would return the bare entry
    return itemgetter(*rows)
