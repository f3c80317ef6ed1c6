"""How much of the changelog an owner deletes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dedup.errors import StateIncompatible
from dedup.kafka.wire import LogBounds, NoAnswer
from dedup.store.base import MemoryStore
from dedup.store.changelog import NOT_SAID, TaskRecord
from dedup.worker import upkeep, worker
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


async def confirmed():
    """The topics are as they were."""


def maintenance_of(monkeypatch, *, partitions=1, offline=None, confirm=confirmed):
    """Return what deletes records of a worker that owns so many partitions, and a map of what it has deleted so far."""
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

    async def bounds(place):
        if place == offline:
            raise NoAnswer(f"no leader is known for {place}")
        return LogBounds(0, 5_000)

    monkeypatch.setattr(upkeep, "Admin", Deleting)
    running = {}
    for number in range(partitions):
        store = MemoryStore()
        store.apply({}, record(0), 3)
        store.apply({0: {b"a": b"1"}}, record(3), 4)
        owner = task(DirectWire(Cluster())).task
        owner.work.plan = replace(owner.work.plan, changelog=CHANGELOG._replace(partition=number))
        owner.state, owner.work.store = TaskState.RUNNING, store
        running[IN._replace(partition=number)] = owner
    app = SimpleNamespace(
        tasks=SimpleNamespace(running=running),
        wire=SimpleNamespace(bounds=bounds, connection=None),
        factory=SimpleNamespace(check=SimpleNamespace(confirm=confirm)),
    )
    topology = SimpleNamespace(direct=True, state=SimpleNamespace(max_bytes_per_partition=None))
    return worker.Maintenance(app, topology, StoppedClock()), deleted


@pytest.mark.parametrize("recreated", [False, True])
async def test_nothing_is_deleted_in_a_topic_that_was_recreated_while_the_worker_was_frozen(monkeypatch, recreated):
    """Kafka deletes records by topic name."""

    async def confirm():
        if recreated:
            raise StateIncompatible("t.changelog was deleted and recreated")

    maintenance, deleted = maintenance_of(monkeypatch, confirm=confirm)
    if recreated:
        with pytest.raises(StateIncompatible):
            await maintenance.delete()
    else:
        await maintenance.delete()
    assert deleted == ({} if recreated else {CHANGELOG: 3})


async def test_a_partition_without_a_leader_does_not_keep_the_records_of_the_others(monkeypatch, caplog):
    """Was: no record of any partition was deleted as long as one partition was offline."""
    offline = CHANGELOG._replace(partition=1)
    maintenance, deleted = maintenance_of(monkeypatch, partitions=3, offline=offline)
    await maintenance.delete()
    assert deleted == {CHANGELOG: 3, CHANGELOG._replace(partition=2): 3}
    assert maintenance.old.deleted == deleted
    assert "old records were not deleted: no leader is known for t.changelog/1" in caplog.text
