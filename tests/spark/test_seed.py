"""A fleet started from a seed judges as if it had judged the history itself."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from dedup.cli.main import create_app
from dedup.core.partitioner import partitions
from dedup.core.reference_model import ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import Sighting, Source
from dedup.embedded.child_process import ChildProcess
from dedup.errors import SettingsError, StateIncompatible
from dedup.kafka.wire import TopicPartition
from dedup.spark.audit import audit
from dedup.spark.columns import RECORDS
from dedup.spark.files import read_files
from dedup.spark.seed import seed
from dedup.spark.stream import StreamOptions, start_stream
from dedup.store.changelog import TASK_RECORD_KEY, SightingKey, decode_sightings, decode_task_record, parse_key
from dedup.verify.verifier import verify
from tests.integration.fleet import Job, until
from tests.integration.workload import BASE_MS, Event
from tests.spark.streaming import INTERPRETED, QUIET

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]
GUARD_MS, GRACE_MS = 20_000, 5_000
FAR_AHEAD_MS = 4_070_908_800_000
SHORT = {"guard_period": "20s", "grace": "5s"}
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(kafka, admin, tmp_path: Path, topic_names) -> Iterator[MakeJob]:
    jobs: list[Job] = []

    def make(**options):
        name = topic_names("seed")
        jobs.append(Job(kafka, admin, tmp_path / name, name, **{"document": SHORT, **options}))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def events(seed_: int, count: int, *, first: int = 0) -> list[Event]:
    """Return events, one each 10 ms: half repeat one of the last 3,000 IDs, beyond the guard period too; 1 % is bad."""
    dice = random.Random(seed_)
    made = []
    for number in range(first, first + count):
        time_ms = BASE_MS + number * 10 - dice.randint(0, 8_000)
        chosen = b"id-%d" % (number if dice.random() < 0.5 else max(0, number - dice.randint(1, 3_000)))
        value = b"bad" if dice.random() < 0.01 else b'{"id":"%s","n":%d}' % (chosen, number)
        made.append(Event(partitions([chosen], 2)[0], value, time_ms, chosen))
    return made


def expected(
    parts: Sequence[Sequence[Event]], live_from: int, *, guard_ms: int = GUARD_MS, grace_ms: int = GRACE_MS
) -> list[bytes]:
    """Return the values that the events of one partition from ``live_from`` on forward, by the exact model."""
    model = ReferenceModel(ModelRules(guard_ms, grace_ms), [(0, 0)])
    found = []
    for number, event in enumerate(event for part in parts for event in part):
        known = None if event.value == b"bad" else json.loads(event.value)["id"].encode()
        fault = "unreadable" if known is None else None
        verdict = model.judge(ModelRecord(known, event.timestamp_ms, Source(0, 0, number), fault=fault))
        if number >= live_from and verdict.kind == "unique":
            found.append(event.value)
    return found


def of_partition(made: Sequence[Event], partition: int) -> list[Event]:
    return [event for event in made if event.partition == partition]


def forwarded(job: Job, partition: int) -> list[bytes]:
    return [message.value() or b"" for message in job.read(job.output) if message.partition() == partition]


def sightings_of(job: Job) -> list[tuple[int, bytes, Sighting]]:
    """Return the sightings in a changelog that still count, with partition and state key, sorted."""
    newest = {
        (message.partition(), message.key()): message.value() for message in job.read(job.topology.changelog_topic)
    }
    stream_times_ms: dict[int, int] = {}
    longest: dict[tuple[object, ...], tuple[int, bytes, Sighting]] = {}
    for (partition, key), value in newest.items():
        match parse_key(key):
            case None if key == TASK_RECORD_KEY:
                stream_times_ms[partition] = decode_task_record(value).stream_time_ms
            case SightingKey(_, state_key):
                for seen in decode_sightings(value):
                    # The segments that a sighting was in before it was extended hold it too, shorter.
                    same = (partition, state_key, seen.first_ms, seen.source, seen.fingerprint)
                    before = longest.get(same)
                    if before is None or before[2].last_ms < seen.last_ms:
                        longest[same] = (partition, state_key, seen)
    oldest_ms = {at: job.topology.window.oldest_live_ms(time_ms) for at, time_ms in stream_times_ms.items()}
    return sorted(each for each in longest.values() if each[2].last_ms >= oldest_ms[each[0]])


def as_files(spark: SparkSession, made: Sequence[Event]) -> DataFrame:
    rows = [(event.key, event.value, None, event.timestamp_ms, None, None, None) for event in made]
    return spark.createDataFrame(rows, RECORDS)


@pytest.mark.parametrize(
    ("before", "after", "commit_rows"),
    [
        pytest.param(6_000, 3_000, 500, id="6,000"),
        pytest.param(2_000_000, 200_000, 100_000, id="2,000,000", marks=[pytest.mark.long, pytest.mark.timeout(3_000)]),
    ],
)
def test_history_and_live_of_one_topic_meet_without_gap_or_double(spark, make_job, before, after, commit_rows):
    job = make_job()
    history, live = events(1, before), events(2, after, first=before)
    job.send(history)
    done = seed(spark, job.topology, job.settings, "latest", commit_rows=commit_rows)
    assert sum(each.sightings for each in done.partitions) > 500
    assert set(done.counts.verdicts) == {"unique", "duplicate", "late", "dead_letter"}
    job.send(live)
    job.finish()
    for partition in range(2):
        parts = [of_partition(history, partition), of_partition(live, partition)]
        assert forwarded(job, partition) == expected(parts, len(parts[0]))
    assert {seen.source.topic for _, _, seen in sightings_of(job)} == {0}
    with pytest.raises(StateIncompatible, match=r"cannot be seeded|this history makes"):
        seed(spark, job.topology, job.settings, "latest", history=as_files(spark, history[:100]))


def test_files_without_coordinates_and_a_topic_that_overlaps_them(spark, make_job):
    job = make_job()
    everything = events(3, 6_000)
    history, live = everything[:4_000], everything[3_500:]
    job.send(live)
    begins = {TopicPartition(job.topology.source.topics[0], partition): 0 for partition in range(2)}
    files = as_files(spark, random.Random(4).sample(history, len(history)))
    first = seed(spark, job.topology, job.settings, begins, history=files)
    second = seed(spark, job.topology, job.settings, begins, history=files)
    assert second.name == first.name
    assert all(each.was_there for each in second.partitions)
    with pytest.raises(StateIncompatible, match=r"begins at .*/0=0,.*/1=0, and --until says .*/0=1,.*/1=0\."):
        seed(spark, job.topology, job.settings, {**begins, min(begins): 1}, history=files)
    job.finish()
    for partition in range(2):
        # A history without coordinates is judged by event time; of equal times it does not matter which is first.
        before = sorted(of_partition(history, partition), key=lambda event: event.timestamp_ms)
        assert forwarded(job, partition) == expected([before, of_partition(live, partition)], len(before))


def test_an_audit_leaves_out_what_the_seed_refused_for_its_time(spark, make_job):
    """No topic holds it; judged without a clock it would make all that is live late."""
    job = make_job()
    everything = events(5, 2_000)
    history, live = everything[:1_000], everything[1_000:]
    ahead = [Event(partition, b'{"id":"ahead"}', FAR_AHEAD_MS, b"ahead") for partition in range(2)]
    job.send(live)
    files = as_files(spark, [*history, *ahead])
    done = seed(spark, job.topology, job.settings, "earliest", history=files)
    assert done.counts.verdicts["dead_letter"] == sum(1 for event in history if event.value == b"bad") + len(ahead)
    job.finish()
    found = audit(spark, job.topology, job.settings, history=files)
    assert found.passed, found.to_json()
    assert sum(books.unique for books in found.books) > 100


def test_an_audit_orders_equal_times_of_a_history_as_the_seed_did(spark, make_job, topic_names):
    """Was: by the bytes of the values, so it expected other unique and other conflicting records: exit code 4."""
    job = make_job(document={"conflicts": topic_names("conflicts"), "guard_period": "1d"})
    ids = [b"id-%d" % number for number in range(40)]
    made = [
        Event(partitions([each], 2)[0], b'{"id":"%s","n":%d}' % (each, n), BASE_MS, each)
        for each in ids
        for n in (1, 2)
    ]
    job.send(made)
    files = as_files(spark, made)
    seed(spark, job.topology, job.settings, "earliest", history=files)
    job.finish()
    found = audit(spark, job.topology, job.settings, history=files)
    assert found.passed, found.to_json()
    # One event of each ID is the one that the seed forwarded, and the other is not.
    assert sum(books.conflicts for books in found.books) == len(ids)


def test_a_seed_and_an_audit_read_several_files_whose_sizes_are_in_another_order_than_their_offsets(
    spark, make_job, tmp_path
):
    """Spark reads the largest files first: here the first and the last one in one task, and the middle in another."""
    job = make_job()
    history, live = events(9, 3_000), events(10, 1_000, first=3_000)
    job.send(history)
    topic, limits = job.topology.source.topics[0], (0, 800, 900, 3_000)
    parts = [list(enumerate(of_partition(history, partition))) for partition in range(2)]
    for name, first, last in zip("abc", limits, limits[1:], strict=False):
        rows = [(topic, at, offset, event) for at, part in enumerate(parts) for offset, event in part[first:last]]
        columns = {
            "key": [event.key for *_, event in rows],
            "value": [event.value for *_, event in rows],
            "timestamp_ms": [event.timestamp_ms for *_, event in rows],
            "topic": [row[0] for row in rows],
            "partition": pa.array([row[1] for row in rows], pa.int32()),
            "offset": [row[2] for row in rows],
        }
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("*.parquet"))]
    assert sizes[1] < min(sizes[0], sizes[2])
    files = read_files(spark, [str(tmp_path / f"{name}.parquet") for name in "abc"], "parquet")
    assert files.contiguous
    done = seed(spark, job.topology, job.settings, "latest", history=files)
    assert sum(done.counts.verdicts.values()) == len(history)
    job.send(live)
    job.finish()
    for partition in range(2):
        both = [of_partition(history, partition), of_partition(live, partition)]
        assert forwarded(job, partition) == expected(both, len(both[0]))
    found = audit(spark, job.topology, job.settings, history=files)
    assert found.passed, found.to_json()
    assert found.read == len(live)


def test_a_seed_and_a_stream_start_in_a_cell_of_a_notebook(spark, make_job):
    """Its kernel runs an event loop in the thread of the cell."""
    job = make_job()
    job.send(events(11, 300))

    async def cell() -> None:
        seed(spark, job.topology, job.settings, "latest")
        job.send([Event(0, b'{"id":"new"}', BASE_MS + 3_000, b"new")])
        start_stream(
            spark, job.topology, job.settings, StreamOptions(str(job.directory / "checkpoint"), exit_when_done=True)
        ).wait()

    asyncio.run(cell())
    assert [message.value() for message in job.read(job.output)] == [b'{"id":"new"}']


def test_a_topology_that_repartitions_two_topics(spark, make_job, topic_names, monkeypatch):
    name = topic_names("two")
    job = make_job(document={"source": {"topics": [f"{name}-a", f"{name}-b"]}, "guard_period": "1d"})
    made = [
        Event(number % 2, b'{"id":"%d"}' % (number * 7 % 1_500), BASE_MS + number, b"k", topic=number // 2 % 2)
        for number in range(4_000)
    ]
    job.send(made[:3_000])
    monkeypatch.setattr(type(spark), "stop", lambda _self: None)
    given = ["spark", "seed", str(job.topology_file), "--config", str(job.config_file), "--until", "latest", "--json"]
    ran = CliRunner().invoke(create_app(), [*given, "--quiet"])
    done = json.loads(ran.stdout)
    assert (done["verdicts"], done["causes"]) == ({"duplicate": 1_500, "unique": 1_500}, {})
    assert sum(each["sightings"] for each in done["partitions"]) == 1_500
    assert done["begins"] == {f"{name}-{topic}/{partition}": 750 for topic in "ab" for partition in range(2)}
    job.send([*made[3_000:], Event(0, b'{"id":"new"}', BASE_MS + 5_000, b"k")])
    job.finish()
    assert [message.value() for message in job.read(job.output)] == [b'{"id":"new"}']


def test_a_seed_of_what_extends_and_conflicts_is_the_state_that_a_fleet_has(spark, make_job):
    rules = {**SHORT, "extend": True, "extend_at_most": "40s", "conflicts": {"exclude": ["n"]}}
    one, other = make_job(document=rules), make_job(document=rules)
    history = events(5, 3_000)
    one.send(history)
    one.finish()
    other.send(history)
    seed(spark, other.topology, other.settings, "latest")
    by_fleet, by_seed = (sightings_of(job) for job in (one, other))
    assert len(by_seed) > 500
    assert any(seen.last_ms > seen.first_ms for _, _, seen in by_seed)
    assert by_seed == by_fleet


def test_what_can_not_be_seeded_is_refused_with_nothing_written(spark, make_job):
    job = make_job()
    source = job.topology.source.topics[0]
    job.send(events(6, 300))
    half = {TopicPartition(source, 0): 10}
    with pytest.raises(SettingsError, match=f"{source}/1 is missing"):
        seed(spark, job.topology, job.settings, half)
    with pytest.raises(SettingsError, match="holds offsets 0 to"):
        seed(spark, job.topology, job.settings, {TopicPartition(source, at): 9_999 for at in (0, 1)})
    keyless = spark.createDataFrame([(None, b'{"id":"a"}', None, BASE_MS, None, None, None)], RECORDS)
    with pytest.raises(StateIncompatible, match="only a record's key shows to which partition its ID belongs"):
        seed(spark, job.topology, job.settings, "latest", history=keyless)
    mixed = keyless.union(spark.createDataFrame([(b"a", b'{"id":"a"}', None, BASE_MS, source, 0, 0)], RECORDS))
    with pytest.raises(SettingsError, match="only 1 of 2 rows have topic, partition and offset"):
        seed(spark, job.topology, job.settings, "latest", history=mixed)
    elsewhere = spark.createDataFrame([(b"a", b'{"id":"a"}', None, BASE_MS, source, 7, 0)], RECORDS)
    with pytest.raises(StateIncompatible, match=f"{source}/7"):
        seed(spark, job.topology, job.settings, "latest", history=elsewhere)
    unread = spark.createDataFrame([(b"a", b"no JSON", None, BASE_MS, source, 0, 0)], RECORDS)
    with pytest.raises(StateIncompatible, match=r"nothing was seeded: all 1 records of .* \(1 not_json\)"):
        seed(spark, job.topology, job.settings, "latest", history=unread)
    job.finish()
    with pytest.raises(StateIncompatible, match="cannot be seeded"):
        seed(spark, job.topology, job.settings, "latest")
    report = verify(job.topology, job.settings)
    assert report.passed, report.closing_line()
    assert report.read == len(job.sent)


def test_a_seed_that_is_killed_half_way_is_refused_by_the_fleet_and_healed_by_a_second_run(spark, make_job):
    job = make_job(document={"guard_period": "1d"})
    history = events(7, 6_000)
    job.send(history)
    begins = job.admin.end_offsets(job.topology.source.topics[0])
    until_ = ",".join(f"{job.topology.source.topics[0]}/{at}={end}" for at, end in begins.items())
    command = [sys.executable, "-m", "dedup.cli.main", "spark", "seed", str(job.topology_file), "--until", until_]
    command += ["--config", str(job.config_file), "--master", "local[1]", "--commit-rows", "5"]
    command += [*QUIET, *INTERPRETED]
    killed = ChildProcess(command, job.directory / "seed.log")
    changelog = job.topology.changelog_topic
    job.admin.create_topic(changelog, 2, {"cleanup.policy": "compact,delete", "retention.ms": "-1"})
    until(
        lambda: max(job.admin.end_offsets(changelog).values()) > 100 or not killed.running, "half a seed", within_s=300
    )
    assert killed.running, (job.directory / "seed.log").read_text(encoding="utf-8")[-3_000:]
    os.killpg(killed.watchdog_pid, signal.SIGKILL)
    killed.kill()
    for _ in range(2):
        # The second time the worker has what there is on its disk already. Taking over ends what the seed left open, so
        # an abort marker is all that it may write.
        worker = job.start()
        assert worker.wait(within_s=300) == StateIncompatible.exit_code, worker.log
        assert "half a seed" in worker.log
        assert job.read(job.output) == []
    with pytest.raises(StateIncompatible, match="this history makes seed"):
        seed(spark, job.topology, job.settings, "latest", history=as_files(spark, history[:100]))
    healed = seed(spark, job.topology, job.settings, "latest")
    assert not all(each.was_there for each in healed.partitions)
    live = events(8, 1_500, first=6_000)
    job.send(live)
    job.finish()
    for partition in range(2):
        parts = [of_partition(history, partition), of_partition(live, partition)]
        assert forwarded(job, partition) == expected(parts, len(parts[0]), guard_ms=86_400_000, grace_ms=86_400_000)
