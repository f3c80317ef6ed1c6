"""Stores between two owners of one process."""

from __future__ import annotations

import pytest

from dedup.errors import InvariantBroken
from dedup.store.base import MemoryStore
from dedup.store.directory import StorePool


class Noted(MemoryStore):
    """A memory store that knows whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


def test_a_store_is_taken_as_it_was_put_and_once():
    shelf, store = StorePool(), Noted()
    shelf.put(3, store)
    assert shelf.take(3) is store
    assert shelf.take(3) is None
    assert not store.closed


def test_two_stores_of_one_partition_stop_the_worker():
    shelf = StorePool()
    shelf.put(3, Noted())
    with pytest.raises(InvariantBroken, match="two stores of partition 3"):
        shelf.put(3, Noted())


def test_what_is_not_kept_is_closed():
    shelf, stores = StorePool(), [Noted() for _ in range(4)]
    for partition, store in enumerate(stores):
        shelf.put(partition, store)
    shelf.keep_only({1, 3, 7})
    assert [store.closed for store in stores] == [True, False, True, False]
    assert shelf.take(1) is stores[1]
    shelf.keep_only(())
    assert [store.closed for store in stores] == [True, False, True, True]
