"""State and changelog stay as small as one retention of event time, over many of them, also after a restart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from dedup.verify.verifier import verify
from tests.integration import fleet
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.broker
SECONDS = 1_000
GUARD = 20
RETENTION = 2 * GUARD
PARTITIONS = 2


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "CHILD", Path(__file__).with_name("hurried.py"))


def seconds(begin: int, end: int, *, per_second: int = 20) -> list[Event]:
    """Return distinct events, so many for each second of event time and partition, and a duplicate for every tenth."""
    made = []
    for second in range(begin, end):
        for number in range(per_second * PARTITIONS):
            chosen = second * per_second * PARTITIONS + number
            event = Event(chosen % PARTITIONS, b'{"id":"s-%d","n":%d}' % (chosen, chosen), BASE_MS + second * SECONDS)
            made += [event, event] if chosen % 10 == 0 else [event]
    return made


def sizes(job: Job, topic: str) -> dict[int, tuple[int, int]]:
    """Return where each partition of a topic begins and ends."""
    consumer = Consumer({"bootstrap.servers": job.kafka.bootstrap, "group.id": "sizes"})
    try:
        return {p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=30) for p in range(PARTITIONS)}
    finally:
        consumer.close()


def truncated(job: Job, *, within_records: int) -> bool:
    return all(end - begin <= within_records for begin, end in sizes(job, job.topology.changelog_topic).values())


def truncate(job: Job, *, keep: int = 3) -> None:
    """Do what no owner does: delete nearly all of the changelog."""
    ends = job.admin.end_offsets(job.topology.changelog_topic)
    job.admin.delete_below(job.topology.changelog_topic, {partition: end - keep for partition, end in ends.items()})


def state_bytes(job: Job) -> int:
    files = (job.state_dir("a") / job.name).rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file() and not path.name.startswith("LOG"))


def test_the_changelog_is_truncated_and_state_stays_flat(make_job: MakeJob) -> None:
    job = make_job(document={"guard_period": f"{GUARD}s"})
    # A portion is a segment long: 400 IDs a partition. Four segments are live at most, and a transaction in which one
    # begins may hold the end of the portion before; the rest is room for task records and markers.
    portion = RETENTION // 2
    most_records = 6 * portion * 20 + 200
    disk: list[int] = []
    end = 0
    for round_ in range(4):
        worker = job.start()
        for _ in range(7):
            begin, end = end, end + portion
            job.send(seconds(begin, end))
            job.until_done()
        until(
            lambda: truncated(job, within_records=most_records),
            f"round {round_}: {sizes(job, job.topology.changelog_topic)}; {job.logs()}",
        )
        # Two more looks, the second begun after the last commit: all that may be deleted is.
        worker.until_logged("upkeep is done", times=worker.log.count("upkeep is done") + 2)
        if round_ % 2:
            worker.kill()
        else:
            assert worker.stop() == 0
        disk.append(state_bytes(job))
    assert max(begin for begin, _ in sizes(job, job.topology.changelog_topic).values()) > 2 * most_records
    assert max(disk[1:]) < 2 * disk[0] + 4_000_000, disk

    # What is left of the changelog is enough: an empty disk, and every verdict is the model's.
    shutil.rmtree(job.state_dir("a"))
    # The first of these are as old as a sighting can be that still counts: the oldest live segment must be whole.
    job.send(seconds(end - RETENTION - 1, end + GUARD))
    job.finish()
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    found = [json.loads(message.value() or b"{}")["id"] for message in job.read(job.output)]
    assert len(found) == len(set(found))

    # Somebody truncates it further: no harm where the disk has what is gone, but an empty disk is no place to start.
    truncate(job)
    job.finish()
    job.refused("elsewhere", code=3, says="somebody has truncated the changelog")


def test_a_changelog_that_somebody_truncates_is_told_of_and_counts_for_no_empty_disk(make_job: MakeJob) -> None:
    job = make_job(document={"guard_period": f"{GUARD}s"})
    worker = job.start()
    job.send(seconds(0, 5))
    job.until_done()
    truncate(job)
    # It goes on, as its disk has what is gone, and says what became of the changelog.
    worker.until_logged("somebody has truncated it", times=PARTITIONS)
    job.send(seconds(5, 6))
    job.until_done()
    assert worker.stop() == 0
    # A start on the same disk, and commits after it, make nothing whole either.
    job.send(seconds(6, 7))
    job.finish()
    job.refused("elsewhere", code=3, says="somebody has truncated the changelog")
    # The disk that holds it all serves on: what came first is still a duplicate.
    job.send(seconds(0, 7))
    job.finish()
    job.judge()


def test_an_emptied_changelog_is_no_whole_one_for_a_disk_that_is_not_the_newest(make_job: MakeJob) -> None:
    job = make_job(document={"guard_period": f"{GUARD}s", "state": {"standby_replicas": 0}})
    job.send(seconds(0, 5))
    job.finish()
    job.send(seconds(5, 6))
    job.finish("newer")
    shutil.rmtree(job.state_dir("newer"))
    truncate(job, keep=0)
    before = job.committed()
    job.refused("a", code=3, says="somebody has emptied the changelog")
    assert job.committed() == before


def test_another_guard_period_does_not_cost_the_only_disk_that_has_it_all(make_job: MakeJob) -> None:
    job = make_job(document={"guard_period": f"{GUARD}s"})
    job.send(seconds(0, 5))
    job.finish()
    truncate(job)
    text = job.topology_file.read_text(encoding="utf-8")
    other = text.replace(f'"{GUARD}s"', f'"{GUARD + 5}s"')
    assert other != text
    job.topology_file.write_text(other, encoding="utf-8")
    job.refused("a", code=3, says="with the previous guard period")
    job.topology_file.write_text(text, encoding="utf-8")
    job.send(seconds(0, 6))
    job.finish()
    job.judge()


def test_the_repartition_topic_is_purged_below_what_is_committed(make_job: MakeJob) -> None:
    job = make_job(document={"source": {"topics": ["purged-in"]}, "guard_period": f"{GUARD}s", "idle_after": "1s"})
    job.send(seconds(0, 30))
    worker = job.start()
    job.until_done()

    def purged() -> bool:
        committed = job.committed(job.topology.repartition_topic)
        found = sizes(job, job.topology.repartition_topic)
        return all(begin > 0 and begin <= committed[p] and end - begin < 10 for p, (begin, end) in found.items())

    until(purged, f"{sizes(job, job.topology.repartition_topic)}; {job.logs()}")
    worker.kill()
    job.send(seconds(30, 40))
    job.finish()
    found = [json.loads(message.value() or b"{}")["id"] for message in job.read(job.output)]
    assert sorted(found) == sorted({json.loads(event.value or b"")["id"] for event in job.sent})


def test_state_beyond_its_bound_stops_the_worker_with_a_sentence(make_job: MakeJob) -> None:
    job = make_job(document={"state": {"max_bytes_per_partition": "1MiB", "standby_replicas": 0}})
    job.send(seconds(0, 1, per_second=20_000))
    worker = job.start()
    assert worker.wait() == 3
    assert "more than state.max_bytes_per_partition (1MiB)" in worker.log
    assert "Nothing is lost" in worker.log
    # Nothing was dropped, either: with more room it goes on where it stopped, and everything is judged exactly once.
    stopped_at = sum(job.committed().values())
    assert 0 < stopped_at <= len(job.sent)
    job.topology_file.write_text(job.topology_file.read_text(encoding="utf-8").replace('"1MiB"', '"1GiB"'))
    job.finish()
    job.judge()
