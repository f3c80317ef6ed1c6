"""How much of the changelog an owner deletes."""

import pytest

from dedup.store.base import MemoryStore
from dedup.store.changelog import NOT_SAID, TaskRecord
from tests.simulation.cluster import Cluster
from tests.simulation.direct import DirectWire, task


def record(kept_from):
    return TaskRecord(b"f" * 16, 5, (), 1, 10, kept_from)


@pytest.mark.parametrize(("kept_from", "below"), [(NOT_SAID, None), (2, 2), (3, 3), (9, 3)])
def test_no_more_than_the_last_task_record_allows(kept_from, below):
    """A standby's births are above those of the owner before it: an empty disk would take the difference for a loss."""
    store = MemoryStore()
    store.apply({}, record(0), 3)
    store.apply({0: {b"a": b"1"}}, record(kept_from), 4)
    judge = task(DirectWire(Cluster())).task.work
    judge.store = store
    assert judge.truncate_below == below


def test_nothing_where_nothing_is_held():
    store = MemoryStore()
    store.apply({}, record(3), 4)
    judge = task(DirectWire(Cluster())).task.work
    judge.store = store
    assert judge.truncate_below is None
