"""A guard period or grace that is not what the state was written under: what is said, and that no sighting is lost."""

import pytest
from aiokafka.record.memory_records import MemoryRecords

from dedup.core.fold import Rules
from dedup.core.window import BEFORE_ALL_TIME, Window
from dedup.kafka.record_batch import ProducerIdentity
from dedup.kafka.wire import TopicPartition
from dedup.metrics import TaskNumbers
from dedup.store.base import MemoryStore
from dedup.store.changelog import TASK_RECORD_KEY, FeedTime, TaskRecord, collect, decode_sightings, encode_task_record
from dedup.store.directory import Keeping
from dedup.worker.dedup_task import DedupTask
from dedup.worker.record_collector import Limits, RecordCollector, Refusals, Route, Routes
from dedup.worker.restore import apply_changelog, changed, what_it_means, why_restored
from tests.simulation.cluster import Cluster, Record
from tests.simulation.direct import DirectWire, batch, plan_of
from tests.simulation.scenario import CHANGELOG as PARTITION
from tests.simulation.scenario import EXTRACTOR, StoppedClock

CHANGELOG = TopicPartition("t.changelog", 3)
HOUR_MS = 3_600_000


def record(before: Window, stream_time_ms=10 * HOUR_MS):
    return TaskRecord(b"", stream_time_ms, (), 0, before.segment_ms)


def window(guard, grace):
    return Window(guard * HOUR_MS, grace * HOUR_MS)


VERIFY_TOO = (
    "`dedup verify` judges the whole log by the new values, so it may report records that were judged before the "
    'change; see "Verify after a change" in docs/operations.md.'
)


def test_the_same_sum_is_no_change_and_no_state_is_none():
    assert not changed(record(window(1, 3)), window(2, 2))
    assert not changed(None, window(2, 2))
    assert changed(record(window(1, 3)), window(2, 3))


def test_longer_is_in_force_when_the_difference_has_passed():
    text = what_it_means(CHANGELOG, record(window(1, 1)), window(2, 3))
    assert text.startswith("guard_period + grace is 5h now (2h + 3h), and was 2h when t.changelog/3 was last written")
    assert "until stream time has advanced by the difference, 3h (to 1970-01-01T13:00:00Z), a record " in text
    # Sightings up to 08:00 may be gone.
    assert "a record with an event time before 1970-01-01T10:00:00Z may be forwarded although" in text
    assert "Shorter" not in text
    assert text.endswith(VERIFY_TOO)


def test_a_task_that_has_judged_nothing_has_no_time_to_name():
    text = what_it_means(CHANGELOG, record(window(1, 1), BEFORE_ALL_TIME), window(2, 3))
    assert "the difference, 3h, a record may be forwarded although" in text


def test_a_time_beyond_calendars_is_a_number():
    assert f"(to {(1 << 60) + HOUR_MS} ms)" in what_it_means(CHANGELOG, record(window(1, 1), 1 << 60), window(1, 2))


def test_shorter_is_in_force_at_once():
    text = what_it_means(CHANGELOG, record(window(2, 3)), window(1, 1))
    assert "is 2h now (1h + 1h), and was 5h when" in text
    assert "The sum is shorter and takes effect at once." in text
    assert text.endswith(VERIFY_TOO)
    assert "Longer" not in text


@pytest.mark.parametrize("before", [window(1, 1), window(3, 3)])
def test_why_state_is_restored(before):
    assert f"guard_period + grace = {before.retention_ms // HOUR_MS}h, but the topology now has 4h." in why_restored(
        CHANGELOG, record(before), window(2, 2)
    )


WIDE, NARROW = Window(20, 180), Window(20, 80)
ROUTES = Routes(("in",), Route("out", 1), Route("dead", 1), Route("late", 1), compression="none")


async def judged_under(window: Window, cluster: Cluster, time_ms: int, offset: int) -> list[tuple[str, bytes, bytes]]:
    """Restore from the changelog, judge a record of the ID `x`, and add what is written to the changelog.

    Returns the topic, key, and value of each record that was sent.
    """
    return await all_judged_under(window, cluster, [(b"x", time_ms)], offset)


async def all_judged_under(
    window: Window, cluster: Cluster, rows: list[tuple[bytes, int]], offset: int
) -> list[tuple[str, bytes, bytes]]:
    """Do the same with several records, which arrive in one batch."""
    wire = DirectWire(cluster)
    collector = RecordCollector(ROUTES, 0, Limits({}, StoppedClock().now_ms, wire))
    plan = plan_of(EXTRACTOR, Rules(window))
    task = DedupTask(plan, wire, Keeping(MemoryStore), collector, StoppedClock(), TaskNumbers())
    await task.restore(None, own=False)
    sent = []
    for made in task.judge(batch(rows, offset), Refusals()):
        whole = MemoryRecords(made.sealed(ProducerIdentity(1, 1), 0)).next_batch()
        sent += [(made.target.topic, record.key, record.value) for record in whole]
    record = TaskRecord(b"f" * 16, 85, (FeedTime(0, 0, 85, idle=False),), offset + 1, window.segment_ms, 0)
    lines = [(key, value) for topic, key, value in sent if topic == PARTITION.topic]
    lines.append((TASK_RECORD_KEY, encode_task_record(record)))
    cluster.append_plain(PARTITION, [Record(0, 0, key, value, ()) for key, value in lines])
    return sent


@pytest.mark.parametrize(
    ("windows", "times_ms"),
    [([WIDE, NARROW], [84, 25]), ([NARROW, WIDE, NARROW], [84, 50, 25])],
    ids=["shorter", "longer, then back on an old worker"],
)
async def test_a_record_written_under_another_width_replaces_no_sighting_in_the_changelog(windows, times_ms):
    """Was: after compaction, no record contained one of the ID's sightings, and its event was forwarded again."""
    cluster = Cluster()
    for offset, (window, time_ms) in enumerate(zip(windows, times_ms, strict=True)):
        sent = await judged_under(window, cluster, time_ms, offset)
        assert sent[0][0] == "out", "it is unique, because the next sighting is a guard period away"
    partition = cluster.partition(PARTITION)
    rows = partition.committed(0, partition.stable_end)
    compacted = {row.key: row.value for row in rows}
    store = MemoryStore()
    apply_changelog(store, windows[-1], collect(list(compacted), list(compacted.values())), partition.stable_end)
    found = {seen.last_ms for _, _, value in store.sightings() for seen in decode_sightings(value)}
    assert found == set(times_ms)


async def test_a_wider_reader_loses_no_sighting_of_a_batch_wherever_its_fetches_are_cut():
    """Was: a batch wrote a later segment before an earlier one, whose record then replaced the merged sightings."""
    rows = [(b"y", 55), (b"x", 49), (b"x", 70)]
    sent = await all_judged_under(NARROW, Cluster(), rows, 0)
    store = MemoryStore()
    written = [(key, value) for topic, key, value in sent if topic == PARTITION.topic]
    for offset, (key, value) in enumerate(written):
        apply_changelog(store, WIDE, collect([key], [value]), offset + 1)
    found = {(key[1:], seen.last_ms) for _, key, value in store.sightings() for seen in decode_sightings(value)}
    assert len(written) == 3
    assert found == set(rows)
