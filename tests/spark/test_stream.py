"""The exact stream in the run's session: verdicts, restarts, hand-over, what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import pickle
import shutil
import threading
import urllib.request
from collections import Counter
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.errors import BrokerUnavailable, RecordFailed, SettingsError, StateIncompatible, TaskCorrupted, TaskMigrated
from dedup.kafka.wire import NoAnswer
from dedup.kafka.wire import TopicPartition as Place
from dedup.metrics import METRICS, TaskNumbers
from dedup.settings import Settings, Web
from dedup.spark.session import HadoopDirectory, PicklableSettings, connected
from dedup.spark.stream import StreamOptions, _IdleMarks, prepared, start_stream
from dedup.spark.stream_checkpoint import continues_at, leave_behind
from dedup.spark.stream_monitor import Lag, StreamMonitor, StreamUpkeep
from dedup.spark.task_attempt import AttemptPlan, BatchReport, PartitionReport, _own_directory, judge_partition
from dedup.store.rocks import RocksStore
from dedup.topology.parse import parse
from dedup.verify.verifier import verify
from dedup.worker.dedup_task import DedupTask
from dedup.worker.task_factory import TaskFactory
from tests.integration.fleet import until
from tests.integration.store_accidents import overwrite_stored
from tests.integration.test_truncate import seconds, sizes
from tests.integration.workload import BASE_MS, Event, workload
from tests.spark.streaming import arrow_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def run(spark):
    """A stream over what is there; returns its micro-batches' reports."""

    def run(job, *, checkpoint="checkpoint", topology=None, **options):
        reports = []
        directory = str(job.directory / checkpoint)
        chosen = StreamOptions(directory, exit_when_done=True, on_batch=reports.append, **options)
        start_stream(spark, topology or job.topology, job.settings, chosen).wait()
        return reports

    return run


def total(reports, name):
    if name == "replayed":
        return sum(each.numbers.replayed for report in reports for each in report.partitions)
    return sum(report.verdicts.total() if name == "judged" else report.verdicts[name] for report in reports)


def test_verdicts_are_the_models_and_a_restart_goes_on(make_job, run):
    job = make_job(document={"guard_period": "20s", "grace": "5s"})
    job.topology = dataclasses.replace(job.topology, duplicates=f"{job.name}-again")
    events = workload(1, 6_000)
    job.send(events[:4_000])
    first = run(job, most_offsets=1_500, commit_rows=400)
    assert len(first) >= 3
    assert total(first, "late") > 0
    job.send(events[4_000:])
    second = run(job)
    assert total(second, "judged") == 2_000
    assert total(second, "replayed") == 0
    assert run(job) == []
    judge(job)


def judge(job):
    """Every verdict is the model's; `Job.judge` also counts distinct IDs, for guards that cover the whole stream."""
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples[:10]
    assert sum(report.not_provable.values()) == 0
    assert report.read == len(job.sent)
    return report


def test_an_empty_checkpoint_begins_where_the_state_ends(make_job, run):
    job = make_job()
    events = workload(2, 3_000)
    job.send(events[:2_000])
    run(job)
    job.send(events[2_000:])
    again = run(job, checkpoint="another")
    assert (total(again, "judged"), total(again, "replayed")) == (1_000, 0)
    job.judge()


def test_behind_a_repartition_topic(make_job, run, topic_names):
    job = make_job(document={"source": {"topics": [topic_names("one"), topic_names("two")]}})
    job.send(workload(3, 4_000, topics=2, scattered=True))
    reports = run(job, most_offsets=1_500)
    assert total(reports, "repartitioned") == 4_000
    job.judge()


def test_a_silent_partition_is_marked_idle(make_job, spark, topic_names):
    source = {"topics": [topic_names("one"), topic_names("two")]}
    job = make_job(document={"source": source, "idle_after": "1s", "guard_period": "10s", "grace": "1s"})
    events = [dataclasses.replace(event, topic=0) for event in workload(14, 2_000, scattered=True)]
    job.send(events)
    for number in range(3):
        # Behind several batches of aborted records, there is no record either.
        never = [Event(partition, b"never", BASE_MS, topic=1) for partition in range(2)]
        job.send(never, transactional_id=f"{job.name}-{number}", commit=False)
    stream = start_stream(spark, job.topology, job.settings, StreamOptions(str(job.directory / "checkpoint")))
    try:
        waited_for = {f"{source['topics'][1]}/0", f"{source['topics'][1]}/1"}
        until(lambda: waited_for <= idle_marks(job), "the silent partitions say so", within_s=100)
        job.send([Event(n % 2, b'{"id":"new-%d"}' % n, BASE_MS + 100_000 + n) for n in range(200)])
        job.send([Event(n % 2, b'{"id":"old-%d"}' % n, BASE_MS + n) for n in range(100)])
        until(lambda: job.admin.end_offsets(f"{job.name}-out.late") != {0: 0, 1: 0}, "something is late", within_s=100)
    finally:
        stream.stop()
        stream.wait()


def test_a_stream_ends_with_the_error_that_ends_its_idle_markers(make_job, spark, topic_names, monkeypatch):
    """Was: the stream went on without markers until its next start, and a silent partition held stream time back."""
    job = make_job(document={"source": {"topics": [topic_names("one"), topic_names("two")]}, "idle_after": "1s"})

    async def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_IdleMarks, "_mark", full)
    stream = start_stream(spark, job.topology, job.settings, StreamOptions(str(job.directory / "checkpoint")))
    with pytest.raises(OSError, match="No space left on device"):
        stream.wait()


def idle_marks(job):
    found = (dict(message.headers() or ()).get("dedup-idle") for message in job.read(job.topology.repartition_topic))
    return {mark.decode() for mark in found if mark is not None}


def test_a_stream_is_seen_as_a_worker_is(make_job, spark, caplog):
    job = make_job(config={"web": {"port": 0}})
    job.send(workload(17, 2_000))
    caplog.set_level(logging.INFO, logger="dedup.spark.stream_monitor")
    stream = start_stream(spark, job.topology, job.settings, StreamOptions(str(job.directory / "checkpoint")))
    try:
        until(lambda: logged(caplog), "the first micro-batch is logged", within_s=100)
        found = json.loads(dedup_of(job, "status", "--json", "--url", stream.url).stdout)
        lookup = dedup_of(job, "lookup", "i-1", "--url", stream.url)
        with urllib.request.urlopen(f"{stream.url}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    finally:
        stream.stop()
        stream.wait()
    (line,) = logged(caplog)
    assert f"{job.name}-dedup: micro-batch 0: 2,000 records in " in line
    assert line.endswith("; lag 0")
    (name,) = found["workers_that_answered"]
    assert {(task["owner"], task["state"], task["lag"]) for task in found["tasks"]} == {(name, "running", 0)}
    assert sum(sum(task["verdicts"].values()) for task in found["tasks"]) == 2_000
    assert found["dead_letters"]
    assert "`dedup explain` finds" in str(lookup.exception)
    # What the panels of the Grafana dashboard read; the others are of restores, standbys and stores that broke.
    values = samples(metrics)
    assert {metric.name for metric in METRICS} == set(values)
    unused = {"dedup_other_formats_total", "dedup_state_max_bytes", "dedup_standby_lag_records"}
    assert {name for name, found in values.items() if not found} <= unused
    assert sum(values["dedup_records_total"]) == 2_000
    assert sum(values["dedup_state_ids"]) > 1_000
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    texts = [jobs.apply(at).description() for at in range(jobs.size())]
    described = [text.get() for text in texts if text.isDefined()]
    assert f"{job.name}-dedup: judge and commit micro-batch 0" in described


@pytest.fixture
def monitor_of(monkeypatch):
    """Return a function that makes the monitor of a stream whose brokers do not answer."""
    monkeypatch.setattr("dedup.spark.stream_monitor._ANSWER_WITHIN_S", 0.2)
    topology = parse(
        "{dedup: 1, name: shop, source: {topics: [in], partitioned_by: tracking_id}, tracking_id: {field: id}, "
        "guard_period: 1d, output: {topic: out}}",
        name="shop.yaml",
    )
    nowhere = Settings(brokers=("127.0.0.1:1",), web=Web(enabled=False))
    places = {Place("in", 0): 0, Place("in", 1): 0}
    return lambda: StreamMonitor(topology, nowhere, {"dedup": places})


def test_while_no_broker_answers_a_line_says_that_the_lag_is_unknown(caplog, monitor_of):
    monitor = monitor_of()
    caplog.set_level(logging.INFO, logger="dedup.spark.stream_monitor")
    numbers = TaskNumbers(verdicts=Counter(unique=4_000, duplicate=1), stream_time_ms=BASE_MS)
    report = PartitionReport(Place("in", 0), numbers, next_offset=4_001, state_ids=7, state_bytes=9)
    monitor.start()
    monitor.add(BatchReport("dedup", 3, [report], 0.25))
    monitor.stop()
    line = "shop-dedup: micro-batch 3: 4,001 records in 0.2 s: duplicate 1, unique 4,000; lag unknown"
    assert logged(caplog) == [line]
    task, _ = monitor.seen().tasks
    assert (task.numbers.committed_offset, task.numbers.stream_time_ms) == (4_001, BASE_MS)
    assert (task.state_ids, task.state_bytes, task.lag_records) == (7, 9, None)


def test_a_stream_whose_tasks_commit_or_still_restore_is_not_stuck(monitor_of, monkeypatch):
    """Was: the time since the last commit fell only at the end of a micro-batch, however often its tasks committed."""
    offsets: dict[Place, int | None] = {Place("in", 0): None, Place("in", 1): 5}

    committed = AsyncMock(side_effect=lambda _wire, _group, place, **_: offsets[place])
    lag = AsyncMock(side_effect=lambda _wire, _place, position: Lag(position, 3))
    monkeypatch.setattr("dedup.spark.stream_monitor.committed_offset", committed)
    monkeypatch.setattr("dedup.spark.stream_monitor.lag_after", lag)
    monitor = monitor_of()

    def without_commit():
        asyncio.run(monitor._look_at_all(None))
        return [task.waited_s > 90 and task.seconds_since_commit > 90 for task in monitor.seen().tasks]

    assert without_commit() == [False, False]
    for task in monitor.seen().tasks:
        assert task.seconds_since_commit == 0
        task.numbers.last_commit_s -= 700
    assert without_commit() == [True, True]
    offsets[Place("in", 0)] = 4
    assert without_commit() == [False, False]


def test_a_warning_of_each_attempt_is_logged_once(caplog, monitor_of):
    """Was: by each attempt, so by each micro-batch and partition."""
    monitor = monitor_of()
    monitor.start()
    for batch_id in range(3):
        reports = [
            PartitionReport(
                Place("in", partition),
                TaskNumbers(),
                batch_id,
                0,
                0,
                {("%s: %d odd", f"in/{partition}"): f"{batch_id} odd"},
            )
            for partition in range(2)
        ]
        monitor.add(BatchReport("dedup", batch_id, reports, 0.25))
    monitor.stop()
    assert [record.getMessage() for record in caplog.records if "odd" in record.getMessage()] == ["0 odd", "0 odd"]


def logged(caplog):
    return [record.getMessage() for record in caplog.records if "micro-batch" in record.getMessage()]


def dedup_of(job, command, *arguments):
    given = [command, str(job.topology_file), *arguments, "--config", str(job.config_file)]
    return CliRunner().invoke(create_app(), given)


def samples(exposition):
    """The values of each metric; a histogram's are its counts."""
    found = {}
    for family in text_string_to_metric_families(exposition):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = [s.value for s in family.samples if not s.name.endswith(("_bucket", "_sum", "_created"))]
    return found


def test_a_fleet_and_a_stream_take_over_from_each_other(make_job, run, spark):
    job = make_job()
    events = workload(5, 6_000)
    job.send(events[:2_000])
    job.finish("a")
    job.send(events[2_000:4_000])
    assert total(run(job), "judged") == 2_000
    job.send(events[4_000:])
    worker = job.finish("a")
    assert "judged 2,000" in worker.log
    assert total(run(job), "judged") == 0
    job.judge()
    # Meanwhile, what the fleet has judged is deleted: Spark's checkpoint is behind it. Was: "Kafka deleted records of
    # the range while they were read", although all of them were judged.
    job.send(workload(55, 1_000))
    job.finish("a")
    (source,) = job.topology.source.topics
    job.admin.delete_below(source, job.committed())
    job.send(workload(56, 1_000))
    assert total(run(job), "judged") == 1_000
    # Of records that were read by nobody, nothing says that they were judged.
    checkpoint = HadoopDirectory(spark, str(job.directory / "checkpoint"))
    ends = {Place(source, partition): offset for partition, offset in job.admin.end_offsets(source).items()}
    later = {place: offset + 10 for place, offset in ends.items()}
    with pytest.raises(StateIncompatible, match=r"continues at offset \d+ of .*, and the group has no offset"):
        leave_behind(checkpoint, "dedup", later, {})
    assert continues_at(checkpoint, "dedup") == ends


def test_the_changelog_holds_no_more_than_live_state_and_an_empty_disk_restores_it(make_job, run):
    """Was: a stream never deleted a record of the changelog, which nothing else deletes either."""
    job = make_job(document={"guard_period": "20s"})
    job.send(seconds(0, 300))
    assert len(run(job, most_offsets=1_000)) > 5
    begins = sizes(job, job.topology.changelog_topic)
    assert all(0 < begin < end < 2 * begin for begin, end in begins.values()), begins
    shutil.rmtree(job.settings.state_dir)
    job.send(seconds(259, 310))  # the first ones are as old as a sighting can be that still counts
    assert total(run(job), "duplicate") > 41 * 40
    judge(job)


def test_the_repartition_topic_is_purged_below_what_spark_has_committed(make_job, run, spark, topic_names, monkeypatch):
    monkeypatch.setattr("dedup.worker.upkeep.KEEP_MS", 0)
    source = {"topics": [topic_names("one"), topic_names("two")]}
    job = make_job(document={"source": source})
    job.send(workload(21, 4_000, topics=2, scattered=True))
    run(job, most_offsets=1_500)
    topic = job.topology.repartition_topic
    checkpoint = HadoopDirectory(spark, str(job.directory / "checkpoint"))
    committed = continues_at(checkpoint, "dedup")
    assert {place.partition: offset for place, offset in committed.items()} == job.admin.end_offsets(topic)
    assert all(begin == end for begin, end in sizes(job, topic).values())
    # The next run goes on there, and forgets nothing.
    job.send(workload(21, 4_000, topics=2, scattered=True))
    again = run(job)
    assert total(again, "repartitioned") == 4_000
    assert total(again, "unique") == 0
    # A micro-batch that Spark has not committed is repeated.
    commits = job.directory / "checkpoint" / "dedup" / "commits"
    (commits / str(max(int(path.name) for path in commits.iterdir() if path.name.isdecimal()))).unlink()
    assert continues_at(checkpoint, "dedup") == committed


def test_a_monitor_tries_again_to_delete_old_records_unless_a_topic_was_recreated(monitor_of, monkeypatch, caplog):
    monkeypatch.setattr("dedup.spark.stream_monitor.MAINTENANCE_EVERY_S", 0.01)
    monitor = monitor_of()
    upkeep = monitor._upkeep = StreamUpkeep(monitor._topology, monitor._settings, None, dict)
    outcomes = [BrokerUnavailable("no broker"), NoAnswer("no leader"), StateIncompatible("was deleted and recreated")]

    @asynccontextmanager
    async def connected_once(*_):
        raise outcomes.pop(0)
        yield

    monkeypatch.setattr("dedup.spark.stream_monitor.connected", connected_once)
    report = PartitionReport(Place("in", 0), TaskNumbers(), next_offset=1, state_ids=0, state_bytes=0)
    monitor._take(BatchReport("dedup", 0, [report], 0.25))
    asyncio.run(monitor._keep_up())
    assert str(monitor.failure) == "was deleted and recreated"
    assert upkeep.old.warned
    assert "old records were not deleted: no broker" in caplog.text


def test_transactions_in_the_source_leave_gaps_that_lose_nothing(make_job, run):
    job = make_job()
    events = workload(6, 3_000)
    job.send(events[:1_000], transactional_id=f"{job.name}-a")
    job.send(workload(7, 500), transactional_id=f"{job.name}-b", commit=False)
    run(job)
    job.send(events[1_000:], transactional_id=f"{job.name}-c")
    run(job)
    job.judge()


@pytest.mark.parametrize("topics", [1, 2])
@pytest.mark.parametrize(("commit", "apart"), [(True, False), (False, False), (False, True)])
def test_the_end_of_a_transaction_may_be_deleted_once_all_is_judged(make_job, run, topic_names, commit, apart, topics):
    """Was: the offset before the markers was committed, so a quiet partition that retention had emptied was refused."""
    names = [topic_names(str(at)) for at in range(topics)]
    job = make_job(document={"source": {"topics": names, **({"partitioned_by": "tracking_id"} if topics == 1 else {})}})

    def send(seed, commit):
        job.send(workload(seed, 200, topics=topics), transactional_id=f"{job.name}-x", commit=commit)
        for name in names:
            job.admin.until_visible(name)

    send(41, commit=True)
    if apart:
        run(job)  # so that Spark reads no row at all of what follows
    send(42, commit=commit)
    run(job)
    for name in names:
        assert job.committed(name) == job.admin.end_offsets(name)
        job.admin.delete_below(name, job.admin.end_offsets(name))
    assert total(run(job, checkpoint="another"), "judged") == 0
    job.send(workload(43, 200, topics=topics))
    run(job)
    if topics == 1:
        assert verify(job.topology, job.settings).passed


def test_aborted_records_do_not_end_the_silence_of_a_source_partition(make_job, run, topic_names):
    """A stream also commits the offset after them, and the partition must be marked idle nevertheless."""
    job = make_job(document={"source": {"topics": [topic_names("one"), topic_names("two")]}})
    job.send(workload(44, 100, topics=2))
    run(job)
    feeding = Place(job.topology.source.topics[0], 0)

    async def look(marks):
        async with connected(job.settings, "look") as wire:
            await marks._look(wire, feeding)
        return marks._quiet[feeding]

    marks = _IdleMarks(asyncio.run(prepared(job.topology, job.settings)))
    _, since_s = asyncio.run(look(marks))
    job.send([Event(0, b"never", BASE_MS)], transactional_id=f"{job.name}-x", commit=False)
    job.admin.until_visible(feeding.topic)
    before = job.committed(feeding.topic)
    run(job)
    assert job.committed(feeding.topic) != before
    assert asyncio.run(look(marks))[1] == since_s
    job.send([Event(0, b'{"id":"new"}', BASE_MS)])
    run(job)
    assert asyncio.run(look(marks))[1] > since_s


def test_a_policy_that_stops_is_raised_as_what_it_is(make_job, run):
    job = make_job(document={"tracking_id": {"field": "id", "missing": "fail"}})
    job.send([Event(0, b'{"id":"a"}', BASE_MS), Event(0, b"{}", BASE_MS)])
    with pytest.raises(RecordFailed, match="in/0/1: "):
        run(job)


def test_state_beyond_its_bound_stops_the_stream_with_a_sentence(make_job, run):
    """Was: the limit was only shown."""
    job = make_job(document={"state": {"max_bytes_per_partition": "4KiB"}})
    job.send(seconds(0, 1, per_second=2_000))
    with pytest.raises(StateIncompatible, match=r"more than state.max_bytes_per_partition \(4KiB\).* Nothing is lost"):
        run(job)
    assert sum(job.committed().values()) == len(job.sent)
    bounded = job.topology.state.model_copy(update={"max_bytes_per_partition": 1 << 30})
    assert total(run(job, topology=dataclasses.replace(job.topology, state=bounded)), "judged") == 0
    job.judge()


# Refusals: nothing is touched.


def test_a_checkpoint_of_another_topology(make_job, run):
    job = make_job()
    job.send(workload(8, 100))
    run(job)
    other = make_job(document={"tracking_id": {"field": "n"}})
    other.send(workload(8, 100))
    with pytest.raises(StateIncompatible, match="is the checkpoint of another topology"):
        run(other, checkpoint=job.directory / "checkpoint")
    assert set(other.written()[other.output].values()) == {0}


def test_a_renamed_topology_on_its_old_output_unless_it_is_meant(make_job, run):
    job = make_job()
    job.send(workload(8, 300))
    run(job)
    before = job.written()
    renamed = dataclasses.replace(job.topology, name=f"{job.name}-new")
    with pytest.raises(StateIncompatible, match="has judged nothing yet, but its output"):
        run(job, checkpoint="other", topology=renamed)
    assert job.written() == before
    assert not (job.directory / "other").exists()
    assert total(run(job, checkpoint="other", topology=renamed, onto_existing_output=True), "judged") == 300
    # From its first commit on it is a group like any other.
    assert total(run(job, checkpoint="other", topology=renamed), "judged") == 0


def test_a_directory_that_is_no_checkpoint(make_job, run):
    job = make_job()
    (job.directory / "checkpoint").mkdir()
    (job.directory / "checkpoint" / "photo.jpg").touch()
    with pytest.raises(StateIncompatible, match="not a checkpoint of `dedup spark run`"):
        run(job)


def test_a_checkpoint_that_cannot_be_written_is_told_before_a_topic_is_created(make_job, run):
    job = make_job()
    (job.directory / "file").touch()
    with pytest.raises(
        SettingsError, match=r"^--checkpoint: no file can be written to .*file/checkpoint: .*; name a dir"
    ):
        run(job, checkpoint="file/checkpoint")
    assert job.topology.changelog_topic not in job.admin.client.list_topics(timeout=30).topics


def test_an_output_topic_with_another_partition_count(make_job, run, admin):
    job = make_job()
    admin.delete_topic(job.output)
    name = f"{job.name}-wide"
    admin.create_topic(name, 3)
    wide = dataclasses.replace(job.topology, output=job.topology.output.model_copy(update={"topic": name}))
    job.send(workload(9, 100))
    with pytest.raises(StateIncompatible, match=r"has 3 partitions, but '.*-in' has 2"):
        run(job, topology=wide)


def test_retention_ate_what_was_not_judged_yet(make_job, run, admin):
    job = make_job()
    job.send([Event(0, b'{"id":"%d"}' % n, BASE_MS + n) for n in range(100)])
    run(job)
    job.send([Event(0, b'{"id":"%d"}' % n, BASE_MS + n) for n in range(100, 200)])
    (source,) = job.topology.source.topics
    admin.client.delete_records([TopicPartition(source, 0, 150)])[TopicPartition(source, 0, 150)].result(timeout=30)
    with pytest.raises(StateIncompatible, match=r"no longer holds offset 100, .* begins at 150 now; .* 50 offsets"):
        run(job)
    with pytest.raises(StateIncompatible, match="no longer holds offset 100"):
        run(job, checkpoint="another")


# Attempts, as Spark makes them.


@pytest.fixture
def plan_of():
    def plan(job, state="state-a", **options):
        ready = asyncio.run(prepared(job.topology, job.settings))
        settings = job.settings.model_copy(update={"state_dir": job.directory / state})
        return AttemptPlan(
            ready.topology, PicklableSettings.of(settings), ready.cluster, options.get("commit_rows", 200)
        )

    return plan


def report_of(plan, batches):
    """Return the report, or the error, that an attempt sends to the driver."""
    (row,) = next(judge_partition(plan, batches)).to_pylist()
    return pickle.loads(row["report"])


def one_partition(events):
    return [dataclasses.replace(event, partition=0) for event in events]


def test_an_input_that_ends_too_soon_is_a_prefix(make_job, plan_of):
    job = make_job(partitions=1)
    job.send(one_partition(workload(10, 1_000)))
    batches = arrow_of(job, 100)
    assert report_of(plan_of(job), batches[:3]).next_offset == 300
    whole = report_of(plan_of(job, "elsewhere"), batches)
    assert (whole.numbers.replayed, whole.numbers.verdicts.total(), whole.next_offset) == (300, 700, 1_000)
    job.judge()


@pytest.mark.parametrize(
    ("direct", "says", "never"),
    [(True, "`dedup reset` and an empty", "Only `dedup run`"), (False, "Only `dedup run` reads", "`dedup reset`")],
)
def test_a_partition_that_was_added_is_refused(make_job, plan_of, topic_names, direct, says, never):
    """Behind a repartition topic, no ID moves, so a reset would be of no use; a fleet continues."""
    source = {"source": {"topics": [topic_names("in")], **({"partitioned_by": "tracking_id"} if direct else {})}}
    job = make_job(partitions=2, document=source)
    job.send(one_partition(workload(15, 100)))
    plan = plan_of(job)
    topics = {name: dataclasses.replace(topic, partitions=1) for name, topic in plan.cluster.topics.items()}
    before = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, topics=topics))
    (first,) = arrow_of(job, 100)
    moved = first.set_column(1, "partition", pa.array([1] * 100, pa.int32()))
    error = str(report_of(before, [moved]))
    assert "had 1 partitions when the stream started, but now has partition 1" in error
    assert says in error
    assert never not in error


def test_an_input_that_stalls_keeps_no_transaction_open(make_job, plan_of):
    job = make_job(partitions=1, config={"transaction_timeout": "2s"})
    job.send(one_partition(workload(16, 400)))
    batches = arrow_of(job, 100)

    def stalling():
        yield from batches[:2]
        until(lambda: job.committed()[0] == 200, "the first half is committed while the input stalls")
        yield from batches[2:]

    assert report_of(plan_of(job, commit_rows=10_000), stalling()).numbers.verdicts.total() == 400
    job.judge()


def test_a_header_name_that_is_not_utf8_is_a_dead_letter(make_job, plan_of):
    job = make_job(partitions=1)
    events = [Event(0, b'{"id":"%d"}' % n, BASE_MS, headers=(("h", b"1"),)) for n in range(3)]
    events[1] = dataclasses.replace(events[1], headers=(("h", b"1"), ("\ufffdx", b"2")))
    job.send(events)
    report = report_of(plan_of(job), arrow_of(job, 100))
    assert (report.numbers.verdicts["unique"], report.numbers.verdicts["dead_letter"]) == (2, 1)
    (dead,) = job.read(job.topology.dead_letter)
    assert dict(dead.headers())["dedup-reason"] == b"header_not_utf8"


def test_an_attempts_warnings_are_in_its_report_and_not_on_its_standard_error(make_job, plan_of, capsys):
    job = make_job(partitions=2)
    job.send([*one_partition(workload(18, 400)), Event(0, b"\xff\xfe{", BASE_MS)])
    report = report_of(plan_of(job), arrow_of(job, 100))
    (topic,) = job.topology.source.topics
    found = {template[:20]: (about, text.split(": ")[0]) for (template, about), text in report.warnings.items()}
    assert found["%s: according to Kafka"[:20]] == (topic, f"{topic}/0")
    # Of a record: the next micro-batch has other offsets.
    about, place = found["%s is a dead letter: %s"[:20]]
    assert about == topic
    assert place.startswith(f"{topic}/0/")
    assert len(found) == 2
    assert capsys.readouterr().err == ""


def test_rows_that_begin_behind_the_state_are_refused(make_job, plan_of):
    job = make_job(partitions=1)
    job.send(one_partition(workload(11, 1_000)))
    before = job.written()[job.output]
    error = report_of(plan_of(job), arrow_of(job, 100)[5:])
    assert isinstance(error, StateIncompatible)
    assert "continues at offset 500" in str(error)
    assert "0 is the first that would be lost" in str(error)
    assert job.written()[job.output] == before


def test_a_state_directory_holds_the_longest_names_and_is_named_if_it_cannot_be_used(tmp_path):
    """Was: OSError: File name too long; a plain NotADirectoryError or PermissionError."""
    place = Place("t" * 249, 0)
    with _own_directory(tmp_path / "state", "n" * 200, place) as own:
        assert own == tmp_path / "state" / ".spark"
        with _own_directory(tmp_path / "state", "n" * 200, Place("u" * 249, 0)) as other:
            assert other == own
    (tmp_path / "file").touch()
    refused = pytest.raises(StateIncompatible, match=r"/file/state/.spark: cannot be used: Not a directory. Make sta")
    with refused, _own_directory(tmp_path / "file" / "state", "n", place):
        pass


@pytest.mark.parametrize("found", ["judge", "apply"])
def test_f31_damage_found_while_running_is_restored_and_nothing_is_judged_twice(make_job, plan_of, monkeypatch, found):
    """Was: the stream ended, and the damaged directory stayed, although the message said that it would be deleted."""
    job = make_job(partitions=1)
    job.send(one_partition(workload(19, 1_000)))
    calls, (at, text) = [], {"judge": (6, "block checksum mismatch"), "apply": (3, "a wrong checksum")}[found]
    where = {"judge": DedupTask, "apply": RocksStore}[found]
    method, wipe = getattr(where, found), TaskFactory.wipe

    def damaged(self, *arguments):
        calls.append("judge")
        if calls.count("judge") >= at and "wipe" not in calls:
            if found == "apply":
                raise TaskCorrupted(text)
            overwrite_stored(self.store)
        return method(self, *arguments)

    def wiped(self, feeding):
        calls.append("wipe")
        wipe(self, feeding)

    monkeypatch.setattr(where, found, damaged)
    monkeypatch.setattr(TaskFactory, "wipe", wiped)
    report = report_of(plan_of(job), arrow_of(job, 100))
    assert (report.next_offset, report.healed, calls.count("wipe")) == (1_000, True, 1)
    assert [text in warning for warning in report.warnings.values()].count(True) == 1
    job.judge()
    # Damage that is found again in another micro-batch ends the stream. Known IDs are read, and new ones are written.
    calls, (at, seed) = [], {"judge": (1, 19), "apply": (3, 20)}[found]
    job.send(one_partition(workload(seed, 1_000)))
    again = dataclasses.replace(plan_of(job), healed=frozenset({report.feeding}))
    error = report_of(again, arrow_of(job, 100))
    assert text in str(error)
    assert calls[-1] == "wipe"


def test_a_speculative_copy_fences_the_first_attempt(make_job, plan_of):
    job = make_job(partitions=1)
    job.send(one_partition(workload(12, 1_000)))
    batches = arrow_of(job, 100)
    half_way, overtaken = threading.Event(), threading.Event()
    failures = []

    def slow():
        yield from batches[:5]
        half_way.set()
        assert overtaken.wait(60)
        yield from batches[5:]

    def first_attempt():
        try:
            list(judge_partition(plan_of(job, "first"), slow()))
        except TaskMigrated as error:
            failures.append(error)
        finally:
            half_way.set()

    thread = threading.Thread(target=first_attempt)
    thread.start()
    assert half_way.wait(60)
    report = report_of(plan_of(job, "second"), batches)
    overtaken.set()
    thread.join(60)
    assert report.numbers.verdicts.total() + report.numbers.replayed == 1_000
    assert 0 < report.numbers.replayed < 1_000
    assert len(failures) == 1
    job.judge()
