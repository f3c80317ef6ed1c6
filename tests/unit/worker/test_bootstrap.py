"""Beginning with a checkpoint: the tail only is read; what can not be used costs time only; what is another's stops."""

import asyncio
import logging
import shutil
import threading

import pytest

from dedup.errors import SettingsError, StateIncompatible, TaskCorrupted
from dedup.kafka.topic_admin import Topic
from dedup.kafka.wire import FetchedRecord, LogBounds, TopicPartition
from dedup.settings import Settings, StateSection
from dedup.store.changelog import TASK_RECORD_KEY, TaskRecord, encode_single_column, encode_task_record, sighting_key
from dedup.store.checkpoint_storage import CheckpointStorage
from dedup.store.rocks import RocksMemory, RocksStore
from dedup.topology.parse import parse
from dedup.worker.bootstrap import SCRATCH, Bootstrap
from dedup.worker.checkpointing import make_checkpoint
from dedup.worker.restore import Standbys, restore
from dedup.worker.task import SteadyClock
from dedup.worker.task_factory import TaskFactory
from dedup.worker.topics import Cluster
from tests.simulation.cluster import fetched

TEXT = """
dedup: 1
name: t
source: {{topics: [in], partitioned_by: tracking_id}}
tracking_id: {{field: {field}}}
guard_period: {guard}
output: {{topic: out}}
"""
CHANGELOG = TopicPartition("t.changelog", 0)


class Log:
    """A changelog in memory; ``read`` counts the records that were fetched."""

    def __init__(self):
        self.lines = []
        self.start = 0
        self.read = 0
        self.deposed_end = None
        """The end of the log at a broker that still believes to lead it, until a client looks for the leader again."""

    def grow(self, workshop, ids):
        """So many new IDs are in it, in one transaction, with the task record."""
        base = len(self.lines)
        for number in range(base, base + ids):
            (value,) = encode_single_column([5], 0, 0, [number])
            self.lines.append((sighting_key(0, b"id-%d" % number), value))
        segment_ms = workshop.topology.window.segment_ms
        record = TaskRecord(workshop.fingerprint(), 5, (), base + ids, segment_ms, 0)
        self.lines.append((TASK_RECORD_KEY, encode_task_record(record)))

    async def bounds(self, _partition):
        return LogBounds(self.start, len(self.lines) if self.deposed_end is None else self.deposed_end)

    async def refresh(self):
        self.deposed_end = None

    async def fetch(self, partition, offset, *, max_bytes, wait_ms):
        if offset < self.start:
            raise StateIncompatible("out of range")
        records = [FetchedRecord(at, 0, *self.lines[at]) for at in range(offset, min(offset + 64, len(self.lines)))]
        self.read += len(records)
        return fetched(records, offset + len(records), len(self.lines), len(self.lines))

    async def pause(self, delay_ms):
        await asyncio.sleep(delay_ms / 10_000)


def workshop(log, state_dir, *, checkpoint=None, topic_id="id", guard="1h", field="id"):
    topology = parse(TEXT.format(guard=guard, field=field), name="t.yaml")
    cluster = Cluster({name: Topic(name, topic_id, 1) for name in ("t.changelog", "in")})
    settings = Settings(brokers=("127.0.0.1:1",), state_dir=state_dir, state=StateSection(checkpoint=checkpoint))
    return TaskFactory(topology, settings, cluster, log, SteadyClock(), RocksMemory())


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "kept")


def nobody(_done, _total):
    """Nobody looks."""


async def made(log, tmp_path, place, **others):
    shop = workshop(log, tmp_path / "own", **others)
    return await make_checkpoint(shop, CheckpointStorage(place), 0, restoring=nobody, packing=nobody)


async def restored(shop):
    """Start as a task does; return the store, still open, and how many records were read."""
    await shop.keeping(0).prepare()
    store = shop.open_store(0)
    before = shop.wire.read
    await restore(shop.wire, CHANGELOG, store, shop.topology.window, lambda _done, _total: None)
    return store, shop.wire.read - before


def ids_of(store):
    return {key for _, key, _ in store.sightings()}


def written(log):
    return {b"id-%d" % at for at, (key, _) in enumerate(log.lines) if key != TASK_RECORD_KEY}


async def test_only_what_came_after_is_read(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 1_000)
    first = await made(log, tmp_path, place)
    assert (first.written, first.records, first.checkpoint.position, first.checkpoint.ids) == (
        True,
        1_001,
        1_001,
        1_000,
    )
    log.grow(workshop(log, tmp_path), 10)
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    store, read = await restored(shop)
    assert read == 11
    assert ids_of(store) == written(log)
    assert shop.bootstrap.unusable == 0
    store.close()
    # With state on the disk the checkpoint is not looked at.
    shutil.rmtree(place)
    store, read = await restored(workshop(log, tmp_path / "worker", checkpoint=place))
    assert (read, len(ids_of(store))) == (0, 1_010)
    store.close()


async def test_the_next_checkpoint_reads_only_what_is_new_and_none_is_made_of_nothing(log, tmp_path, place):
    assert (await made(log, tmp_path, place)).checkpoint is None
    log.grow(workshop(log, tmp_path), 500)
    await made(log, tmp_path, place)
    log.grow(workshop(log, tmp_path), 20)
    second = await made(log, tmp_path, place)
    assert (second.written, second.records, second.checkpoint.ids) == (True, 21, 520)
    third = await made(log, tmp_path, place)
    assert (third.written, third.records, third.checkpoint) == (False, 0, second.checkpoint)
    # Somebody has deleted a file: the same state is put there again.
    largest(tmp_path / "kept" / "t" / "0").unlink()
    assert (await made(log, tmp_path, place)).written


async def test_damage_of_what_is_kept_costs_time_only(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 500)
    await made(log, tmp_path, place)
    next((tmp_path / "own" / "t" / "0").glob("MANIFEST-*")).write_bytes(b"")
    log.grow(workshop(log, tmp_path), 20)
    second = await made(log, tmp_path, place)
    assert (second.records, second.checkpoint.ids) == (522, 520)


async def test_without_a_checkpoint_the_changelog_is_read(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 100)
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    store, read = await restored(shop)
    assert (read, len(ids_of(store)), shop.bootstrap.unusable) == (101, 100, 0)
    store.close()


def largest(directory):
    return max(
        (path for path in directory.iterdir() if path.name != "manifest.json"), key=lambda path: path.stat().st_size
    )


def flipped(directory):
    data = bytearray(largest(directory).read_bytes())
    data[len(data) // 2] ^= 1
    largest(directory).write_bytes(data)


def cut(directory):
    largest(directory).write_bytes(largest(directory).read_bytes()[:-2_000])


def gone(directory):
    largest(directory).unlink()


def garbled(directory):
    (directory / "manifest.json").write_text("{")


def of_a_later_format(directory):
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))


def unreadable(directory):
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").mkdir()


@pytest.mark.parametrize("accident", [flipped, cut, gone, garbled, of_a_later_format, unreadable])
async def test_what_can_not_be_used_is_told_and_the_changelog_is_read(log, tmp_path, place, caplog, accident):
    log.grow(workshop(log, tmp_path), 300)
    await made(log, tmp_path, place)
    accident(tmp_path / "kept" / "t" / "0")
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    with caplog.at_level(logging.WARNING):
        store, read = await restored(shop)
    assert (read, ids_of(store), shop.bootstrap.unusable) == (301, written(log), 1)
    assert "restored from the changelog instead, which contains everything" in caplog.text
    store.close()
    assert list((tmp_path / "worker" / SCRATCH).rglob("0-*")) == []


async def test_a_checkpoint_that_opens_as_another_state_is_thrown_away(log, tmp_path, place):
    """Its bytes are those that were put there; they were wrong before."""
    log.grow(workshop(log, tmp_path), 300)
    found = (await made(log, tmp_path, place)).checkpoint
    shutil.rmtree(tmp_path / "own" / "t" / "0")
    identity = workshop(log, tmp_path).wanted(0).identity
    RocksStore.open(tmp_path / "own" / "t" / "0", identity=identity).close()
    record = TaskRecord(found.fingerprint, 5, (), 1, found.segment_ms)
    CheckpointStorage(place).write(tmp_path / "own" / "t" / "0", identity, record, position=found.position, ids=300)
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    store, read = await restored(shop)
    assert (read, ids_of(store), shop.bootstrap.unusable) == (301, written(log), 1)
    store.close()


async def test_a_store_that_was_damaged_is_not_taken_from_the_same_checkpoint_again(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 300)
    await made(log, tmp_path, place)
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    store, read = await restored(shop)
    assert read == 0
    store.close()
    shop.wipe(TopicPartition("in", 0))
    store, read = await restored(shop)
    assert (read, ids_of(store)) == (301, written(log))
    store.close()


async def test_under_another_guard_period_the_changelog_is_read(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 300)
    await made(log, tmp_path, place)
    shop = workshop(log, tmp_path / "worker", checkpoint=place, guard="5m")
    store, read = await restored(shop)
    assert (read, ids_of(store), shop.bootstrap.unusable) == (301, written(log), 0)
    store.close()


async def test_older_than_the_changelog_begins_is_of_no_use(log, tmp_path, place, caplog):
    """The owner has deleted what no live segment holds: what is left is all that counts."""
    log.grow(workshop(log, tmp_path), 300)
    await made(log, tmp_path, place)
    log.grow(workshop(log, tmp_path), 400)
    log.start = 302
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    with caplog.at_level(logging.WARNING):
        await shop.keeping(0).prepare()
    assert "ends at changelog position 301, and the changelog begins at 302" in caplog.text
    assert not (tmp_path / "worker" / "t").exists()


async def refuses(shop, says):
    with pytest.raises(StateIncompatible, match=says):
        await shop.keeping(0).prepare()
    assert not (shop.settings.state_dir / "t").exists()


async def test_another_changelog_topology_or_a_shorter_changelog_is_refused(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 300)
    await made(log, tmp_path, place)
    before = sorted(path.read_bytes() for path in (tmp_path / "kept" / "t" / "0").iterdir())
    others = {"another changelog topic": {"topic_id": "another"}, "another ID rule": {"field": "other"}}
    for says, other in others.items():
        await refuses(workshop(log, tmp_path / "worker", checkpoint=place, **other), says)
        with pytest.raises(StateIncompatible, match=says):
            await made(log, tmp_path, place, **other)
    del log.lines[250:]
    await refuses(workshop(log, tmp_path / "worker", checkpoint=place), "ends at offset 250, but the checkpoint at")
    shutil.rmtree(tmp_path / "own")
    log.grow(workshop(log, tmp_path), 0)
    with pytest.raises(StateIncompatible, match="but the checkpoint at"):
        await made(log, tmp_path, place)
    assert sorted(path.read_bytes() for path in (tmp_path / "kept" / "t" / "0").iterdir()) == before


async def test_a_deposed_leader_of_the_changelog_is_no_reason_to_refuse_a_checkpoint(log, tmp_path, place):
    """Was: the worker stopped with exit code 3, although the checkpoint belonged to its changelog."""
    log.grow(workshop(log, tmp_path), 100)
    await made(log, tmp_path, place)
    log.deposed_end = 10
    store, read = await restored(workshop(log, tmp_path / "new", checkpoint=place))
    assert (ids_of(store), read) == (written(log), 0)
    store.close()


async def test_a_checkpoint_moved_to_another_partition_is_refused(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 300)
    await made(log, tmp_path, place)
    (tmp_path / "kept" / "t" / "0").rename(tmp_path / "kept" / "t" / "1")
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    with pytest.raises(StateIncompatible, match="is the checkpoint of t partition 0"):
        await shop.keeping(1).prepare()


async def test_a_standby_begins_with_it_too(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 1_000)
    await made(log, tmp_path, place)
    log.grow(workshop(log, tmp_path), 10)
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    standbys = Standbys(log, "t.changelog", shop.topology.window, shop.fingerprint(), shop.keeping)
    before = log.read
    standbys.assign([0])
    async with asyncio.timeout(30):
        while standbys.lag.get(0) != 0:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.01)
    standbys.assign(())
    assert log.read - before == 11


async def test_several_partitions_at_once(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 300)
    for partition in range(6):
        shop = workshop(log, tmp_path / "own")
        await make_checkpoint(shop, CheckpointStorage(place), partition, restoring=nobody, packing=nobody)
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    await asyncio.gather(*(shop.keeping(partition).prepare() for partition in range(6)))
    assert shop.bootstrap.unusable == 0
    for partition in range(6):
        store = shop.open_store(partition)
        assert (store.position, ids_of(store)) == (301, written(log))
        store.close()


async def test_what_an_earlier_process_left_half_unpacked_is_swept(log, tmp_path, place):
    log.grow(workshop(log, tmp_path), 300)
    await made(log, tmp_path, place)
    left = tmp_path / "worker" / SCRATCH / "t" / "0-00000000"
    left.mkdir(parents=True)
    (left / "1.sst").write_bytes(b"half")
    store, read = await restored(workshop(log, tmp_path / "worker", checkpoint=place))
    assert (read, left.exists()) == (0, False)
    store.close()


async def test_a_start_that_is_given_up_leaves_nothing_behind(log, tmp_path, place, monkeypatch):
    """The partition was revoked in the middle: what the thread still does must not be seen by the next owner."""
    log.grow(workshop(log, tmp_path), 300)
    await made(log, tmp_path, place)
    reached, go_on = threading.Event(), threading.Event()
    read = CheckpointStorage.read

    def held(self, *arguments):
        reached.set()
        go_on.wait(30)
        return read(self, *arguments)

    monkeypatch.setattr(CheckpointStorage, "read", held)
    shop = workshop(log, tmp_path / "worker", checkpoint=place)
    starting = asyncio.create_task(shop.keeping(0).prepare())
    await asyncio.to_thread(reached.wait, 30)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            await asyncio.to_thread(thread.join, 30)
    assert not (tmp_path / "worker" / "t").exists()
    assert list((tmp_path / "worker" / SCRATCH).rglob("0-*")) == []


def test_a_place_that_nothing_here_can_read_is_told_at_the_start(log, tmp_path):
    with pytest.raises(SettingsError, match="gcsfs"):
        workshop(log, tmp_path, checkpoint="gs://bucket")


def test_what_was_not_just_taken_is_opened_as_ever(tmp_path):
    def damaged():
        raise TaskCorrupted("a block")

    with pytest.raises(TaskCorrupted, match="a block"):
        Bootstrap(str(tmp_path)).opened(tmp_path, damaged)
