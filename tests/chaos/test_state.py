"""Disks, clocks, time stamps and changed topologies: what a worker's state meets between runs and in them."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dedup.topology.parse import parse
from dedup.verify.verifier import verify
from tests.integration.conftest import MakeJob
from tests.integration.fleet import KEPT, Job, until
from tests.integration.stores import tree
from tests.integration.watch import Watch
from tests.integration.workload import BASE_MS, SECONDS, Event, endless, workload

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

INCOMPATIBLE = 3
NOBODY = 65_534
DAY_S = 86_400


def edit(job: Job, **changes: object) -> None:
    """The topology file says something else from now on; workers that run know the old one."""
    document = json.loads(job.topology_file.read_text(encoding="utf-8")) | changes
    text = json.dumps(document)
    job.topology_file.write_text(text, encoding="utf-8")
    job.topology = parse(text, name=str(job.topology_file))


def at(tracking_id: str, second: int, *, partition: int = 0) -> Event:
    return Event(partition, b'{"id":"%s","n":%d}' % (tracking_id.encode(), second), BASE_MS + second * SECONDS)


# F32, F33, F40: the disk.


def test_f32_disk_full(make_job: MakeJob) -> None:
    """The worker ends and says so; with room again the next one has everything."""
    job = make_job(partitions=1)
    events = workload(130, 20_000, partitions=1)
    with Watch(job):
        full = job.start("a", "no_file_beyond=300000")
        with job.stream(events, per_s=8_000):
            assert full.wait() == 1, full.log
        assert "make room" in full.log, full.log
        job.finish()
    job.judge()


def hand_over(directory: Path, user: int) -> None:
    for path in (directory, *directory.rglob("*")):
        os.chown(path, user, user)


@pytest.mark.parametrize("trap", ["read-only", "of another user", "a link", "a partition is a link"])
def test_f33_state_directory_not_ours_to_write(make_job: MakeJob, trap: str) -> None:
    """Refused before anything is judged, and nothing is written, neither there nor behind a link."""
    if os.geteuid() != 0 and trap == "of another user":
        pytest.skip("only root can give a directory to another user")
    # One partition: a second one that is in order may be judged until the worker has stopped.
    job = make_job(partitions=1)
    job.send(workload(131, 300, partitions=1))
    job.finish()
    state, elsewhere = job.state_dir("a"), job.directory / "elsewhere"
    accidents: list[str] = []
    match trap:
        case "read-only":
            for path in (state, *(each for each in state.rglob("*") if each.is_dir())):
                path.chmod(0o500)
            accidents = ["bound_by_permissions=1"]
        case "of another user":
            hand_over(state / job.name, NOBODY)
        case "a link":
            (state / job.name).rename(elsewhere)
            (state / job.name).symlink_to(elsewhere)
        case _:
            (state / job.name / "0").rename(elsewhere)
            (state / job.name / "0").symlink_to(elsewhere)
    behind = elsewhere if elsewhere.exists() else state
    before, written = tree(behind), job.written()
    job.send(workload(132, 50, partitions=1))
    worker = job.start("a", *accidents)
    code = worker.wait()
    for path in (state, *state.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700)
    assert code == INCOMPATIBLE, worker.log
    assert str(state) in worker.log
    assert "Traceback" not in worker.log
    assert tree(behind) == before
    assert job.written() == written
    job.finish("b")
    job.judge()


@pytest.mark.parametrize("name", ["..", "../up", "a/b", "/tmp/x"])
def test_f33_a_name_is_no_path(job: Job, name: str) -> None:
    document = json.loads(job.topology_file.read_text(encoding="utf-8")) | {"name": name}
    job.topology_file.write_text(json.dumps(document), encoding="utf-8")
    before = tree(job.directory.parent)
    worker = job.start()
    assert worker.wait() == 2, worker.log
    worker.log_file.unlink()
    assert tree(job.directory.parent) == before


def test_f40_one_segment_flushed_and_the_other_not(make_job: MakeJob) -> None:
    """SIGKILL with the older segment in a file and the newer one only in RocksDB's log."""
    # A segment is as wide as the guard period; the stream is shorter than that, and begins before a border.
    guard_ms = 20 * SECONDS
    border_ms = BASE_MS - BASE_MS % guard_ms + guard_ms
    events = workload(133, 1_500, jitter_ms=1_000)
    events = [replace(each, timestamp_ms=each.timestamp_ms - BASE_MS + border_ms - 8 * SECONDS) for each in events]
    job = make_job(document={"guard_period": "20s"})
    with Watch(job):
        dying = job.start("a", "small_batches=100", "one_segment_flushed=1")
        job.send(events)
        assert dying.wait() == 137, dying.log
        job.finish()
    job.judge()


# F36, F38, F51: times.


def test_f36_old_event_times_keep_the_changelog(make_job: MakeJob) -> None:
    """Events of 2023: where a default topic has lost them at once, the changelog has all, and a restore finds it."""
    job = make_job(config={"topics": {"retention": "1h"}})
    events = workload(134, 2_000)
    job.send(events[:1_000])
    job.finish()
    # What shows that the broker has looked for old records since: a topic with a retention of an hour.
    control = job.admin.create_topic(f"{job.name}-control", 1, {"retention.ms": "3600000"})
    job.producer.produce(control, b"old", timestamp=BASE_MS)
    assert job.producer.flush(30) == 0
    until(lambda: job.read(control) == [], "the broker deleted an old record")
    shutil.rmtree(job.state_dir("a"))
    with Watch(job):
        job.send(events[1_000:])
        job.finish()
    job.judge()


def recent(seed: int, events: int) -> list[Event]:
    """Return a workload of the last minute."""
    shift_ms = time.time_ns() // 1_000_000 - 60 * SECONDS - BASE_MS
    return [replace(each, timestamp_ms=each.timestamp_ms + shift_ms) for each in workload(seed, events)]


def test_f38_wrong_clocks(job: Job) -> None:
    """A day behind and ahead, between runs and while running: no record is late or from the future for that."""
    events = recent(135, 3_000)
    with Watch(job):
        job.send(events[:600])
        job.finish()
        for number, accident in enumerate((f"clock_ahead={-DAY_S}", f"clock_ahead={DAY_S}", f"clock_jumps={DAY_S}"), 1):
            job.send(events[600 * number : 600 * (number + 1)])
            job.finish("a", accident, "small_batches=50")
    job.judge()
    assert job.topology.late is not None
    assert sum(job.admin.end_offsets(f"{job.output}.late").values()) == 0


def test_f51_log_append_time_and_create_time_mixed(make_job: MakeJob) -> None:
    """Two source topics, one with the broker's time: verdicts go by the time that the log has."""
    job = make_job(document={"source": {"topics": ["append-in", "create-in"]}})
    job.admin.configure("append-in", message_timestamp_type="LogAppendTime")
    events = recent(136, 1_200)
    with Watch(job):
        job.send([replace(each, topic=number % 2) for number, each in enumerate(events)])
        job.finish()
    times = {message.timestamp()[0] for message in job.read("append-in") + job.read("create-in")}
    assert len(times) == 2, "one topic has the broker's time, one the producer's"
    job.judge()


# F61-F64: another topology than the one that wrote the state.


def verdicts(job: Job) -> tuple[int, int, int]:
    """Return unique, duplicates, late, once the verifier has replayed the topology as it is now and found no fault."""
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    books = report.books
    return (
        sum(each.unique for each in books),
        sum(each.duplicates for each in books),
        sum(each.late for each in books),
    )


def test_f61_longer_guard_period(make_job: MakeJob) -> None:
    """Sightings kept under the shorter one count for the longer one."""
    job = make_job(partitions=1, document={"guard_period": "10s"})
    job.send([at("a", 0), at("b", 3), at("a", 5)])
    job.finish()
    edit(job, guard_period="60s", grace="60s")
    job.send([at("b", 18), at("a", 19), at("c", 20), at("c", 70), at("c", 80)])
    worker = job.finish()
    assert verdicts(job) == (4, 4, 0)
    assert "local state was written with guard_period + grace = 20s, but the topology now has 2m" in worker.log, (
        worker.log
    )
    assert "guard_period + grace is 2m now (1m + 1m), and was 20s when" in worker.log
    # Five seconds were judged when it changed, and a hundred more make the difference.
    assert "by the difference, 100s (to 2023-11-14T22:15:05Z)" in worker.log
    assert "guard_period + grace" not in job.finish().log, "it is told of when it has changed, not ever after"


def test_f62_shorter_guard_period(make_job: MakeJob) -> None:
    """What was a duplicate is a new event from the moment the shorter one is in force."""
    job = make_job(partitions=1, document={"guard_period": "60s"})
    job.send([at("a", 0), at("a", 5), at("b", 3)])
    job.finish()
    edit(job, guard_period="10s", grace="60s")
    job.send([at("a", 30), at("a", 35), at("b", 12), at("b", 13)])
    worker = job.finish()
    assert verdicts(job) == (4, 3, 0)
    assert "local state was written with guard_period + grace = 2m, but the topology now has 70s" in worker.log, (
        worker.log
    )
    assert "The sum is shorter and takes effect at once." in worker.log


@pytest.mark.parametrize("disk", ["kept", "empty"])
def test_f61_what_a_changed_guard_period_means_is_said_once_and_why_state_is_restored_of_each_partition(
    make_job: MakeJob, disk: str
) -> None:
    job = make_job(partitions=4, document={"guard_period": "1h"})
    job.send(workload(140, 400, partitions=4))
    job.finish()
    if disk == "empty":
        shutil.rmtree(job.state_dir("a"))
    edit(job, guard_period="2h")
    job.send(workload(141, 400, partitions=4))
    worker = job.finish()
    assert worker.log.count("WARNING guard_period + grace is 4h now (2h + 2h), and was 2h when") == 1, worker.log
    assert worker.log.count("by the difference, 2h") == 1
    reasons = [
        line for line in worker.log.splitlines() if "local state was written with guard_period + grace = 2h" in line
    ]
    assert len(reasons) == (4 if disk == "kept" else 0), worker.log
    assert {line.partition("changelog/")[2][0] for line in reasons} == (set("0123") if disk == "kept" else set())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"tracking_id": {"field": "n"}}, id="field", marks=pytest.mark.long),
        pytest.param({"tracking_id": {"field": "id", "normalize": ["lower"]}}, id="normalize"),
        pytest.param({"event_time": {"field": "n", "unit": "ms"}}, id="event_time", marks=pytest.mark.long),
        pytest.param({"source": {"topics": ["other-in"], "partitioned_by": "tracking_id"}}, id="source"),
        pytest.param({"conflicts": "other-conflicts"}, id="payloads compared", marks=pytest.mark.long),
    ],
)
def test_f63_rule_changed(make_job: MakeJob, change: dict[str, object]) -> None:
    """Old sightings would give wrong verdicts: refused with nothing touched, and the old rule goes on."""
    job = make_job()
    if "source" in change:
        job.admin.create_topic("other-in", job.partitions, KEPT)
    job.send(workload(137, 300))
    job.finish()
    before = job.topology_file.read_text(encoding="utf-8"), job.topology
    edit(job, **change)
    worker = job.start()
    assert worker.wait() == INCOMPATIBLE, worker.log
    assert "Traceback" not in worker.log
    job.topology_file.write_text(before[0], encoding="utf-8")
    job.topology = before[1]
    job.send(workload(138, 300))
    job.finish()
    job.judge()


def test_f64_rolling_upgrade(make_job: MakeJob) -> None:
    """Workers of an old and a new topology in one group: partitions and their state go to and fro between them."""
    job = make_job(partitions=4)
    with Watch(job):
        with job.stream(endless(139, partitions=4), per_s=800):
            old = job.start("one")
            job.until_progress(200)
            edit(job, guard_period="2d", late=f"{job.name}-late")
            new = job.start("two")
            new.until_logged("running from offset")
            job.until_progress(200)
            assert old.stop() == 0, old.log
            job.until_progress(200)
            upgraded = job.start("one")
            upgraded.until_logged("running from offset")
            job.until_progress(200)
        job.until_done()
        assert [new.stop(), upgraded.stop()] == [0, 0]
    job.judge()
