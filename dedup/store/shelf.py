"""Stores that stay open between two owners in one process: a task, a standby, the task of the next assignment.

A rebalance takes every task and standby away and gives most of them back. To close a store and open it again costs a
flush and reading its keys into filters, on the loop that everything waits for. Kafka Streams recycles its tasks for the
same reason (KAFKA-10199). A store holds committed sightings only, so whoever takes it goes on from its position as from
one just opened.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final

from dedup.errors import InvariantBroken
from dedup.store.base import Store


@dataclass(frozen=True, slots=True)
class Keeping:
    """How a task comes by its partition's store, and what becomes of it afterwards."""

    open: Callable[[], Store]
    prepare: Callable[[], Awaitable[None]] | None = None
    """Awaited before the store is opened: brings local state where there is none."""
    release: Callable[[Store], None] = lambda store: store.close()


class Shelf:
    """Open stores that nobody uses at the moment, by partition."""

    def __init__(self) -> None:
        self._stores: Final[dict[int, Store]] = {}

    def put(self, partition: int, store: Store) -> None:
        """The store waits for its next owner; who put it here must not use it any more.

        Raises InvariantBroken where one waits already: a partition has one store in a process.
        """
        if partition in self._stores:
            raise InvariantBroken(f"two stores of partition {partition} are open in this process. Restart the worker.")
        self._stores[partition] = store

    def take(self, partition: int) -> Store | None:
        """Return the partition's store, which is the caller's from now on; None where it is not open."""
        return self._stores.pop(partition, None)

    def keep_only(self, partitions: Collection[int]) -> None:
        """The stores of other partitions are closed."""
        for partition in sorted(self._stores.keys() - set(partitions)):
            self._stores.pop(partition).close()
