"""How much of the changelog an owner deletes."""

from types import SimpleNamespace

import pytest

from dedup.errors import StateIncompatible
from dedup.kafka.wire import LogBounds
from dedup.store.base import MemoryStore
from dedup.store.changelog import NOT_SAID, TaskRecord
from dedup.worker import worker
from dedup.worker.task import TaskState
from tests.simulation.cluster import Cluster
from tests.simulation.direct import IN, DirectWire, task
from tests.simulation.scenario import CHANGELOG, StoppedClock


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


@pytest.mark.parametrize("recreated", [False, True])
async def test_nothing_is_deleted_in_a_topic_that_was_recreated_while_the_worker_was_frozen(monkeypatch, recreated):
    """Kafka deletes records by topic name."""
    deleted = {}

    class Deleting:
        def __init__(self, _connection):
            pass

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

        async def delete_records(self, below):
            deleted.update(below)

    async def confirm():
        if recreated:
            raise StateIncompatible("t.changelog was deleted and recreated")

    async def bounds(_place):
        return LogBounds(0, 5_000)

    monkeypatch.setattr(worker, "Admin", Deleting)
    store = MemoryStore()
    store.apply({}, record(0), 3)
    store.apply({0: {b"a": b"1"}}, record(3), 4)
    owner = task(DirectWire(Cluster())).task
    owner.state, owner.work.store = TaskState.RUNNING, store
    app = SimpleNamespace(
        tasks=SimpleNamespace(running={IN: owner}),
        wire=SimpleNamespace(bounds=bounds, connection=None),
        factory=SimpleNamespace(check=SimpleNamespace(confirm=confirm)),
    )
    topology = SimpleNamespace(direct=True, state=SimpleNamespace(max_bytes_per_partition=None))
    maintenance = worker.Maintenance(app, topology, StoppedClock())
    if recreated:
        with pytest.raises(StateIncompatible):
            await maintenance.delete()
    else:
        await maintenance.delete()
    assert deleted == ({} if recreated else {CHANGELOG: 3})
