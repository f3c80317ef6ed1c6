"""The commands that look after a topology: apply, status, reset, replay, lookup."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import NewPartitions

from dedup.crashpoints import VARIABLE
from dedup.embedded.kafka_node import EmbeddedKafka
from dedup.errors import BrokerUnavailable
from dedup.kafka.client import KafkaWire
from dedup.kafka.topic_admin import Admin as TopicAdmin
from dedup.kafka.topic_admin import Topic, on_cluster
from dedup.metrics import METRICS
from dedup.verify.cut import WHY_RESET
from dedup.verify.verifier import verify
from dedup.worker.reset import Reset
from tests.brokers import SINCE_3_6, RunningKafka, admin_of
from tests.integration.conftest import MakeJob
from tests.integration.fleet import WITHIN_S, Job, Worker, until
from tests.integration.preloaded import Preloaded, clean_environ
from tests.integration.workload import BASE_MS, Event, id_of

pytestmark = pytest.mark.broker
DEDUP = (sys.executable, "-c", "from dedup.cli.main import main; main()")


def dedup(
    job: Job, command: str, *arguments: str, code: int = 0, stdin: str = "", state_of: str = "a", **environ: str
) -> str:
    """Run a command; return what it printed."""
    environ = clean_environ() | environ
    line = [*command.split(), str(job.topology_file), *arguments, "--config", str(job.config_file)]
    line += ["--set", f"state_dir={job.state_dir(state_of)}"]
    if stdin:
        done = subprocess.run(
            [*DEDUP, *line], input=stdin, capture_output=True, text=True, timeout=WITHIN_S, env=environ, check=False
        )
        ended, output = done.returncode, done.stdout + done.stderr
    else:
        ended, output = Preloaded.of_this_process().run(["--", *line], environ, within_s=WITHIN_S)
    assert ended == code, output
    return output


def distinct(begin: int, end: int, *, topic: int = 0) -> list[Event]:
    return [
        Event(number % 2, b'{"id":"x-%d","n":%d}' % (number, number), BASE_MS + number, topic=topic)
        for number in range(begin, end)
    ]


def output_ids(job: Job) -> Counter[str | None]:
    return Counter(id_of(message.value()) for message in job.read(job.output))


def pages(worker: Worker) -> str:
    worker.until_logged("web: http")
    found = re.search(r"web: (http://\S+)", worker.log)
    assert found is not None
    return found[1]


def test_apply_prints_a_plan_makes_it_and_says_what_differs(make_job: MakeJob) -> None:
    job = make_job()
    late, dead = f"{job.output}.late", f"{job.output}.dead-letter"
    dry = dedup(job, "apply", "--dry-run")
    for name in (job.topology.changelog_topic, late, dead):
        assert f"would create {name}: 2 partitions" in dry
    assert "cleanup.policy=compact,delete" in dry
    job.admin.create_topic(late, 3, {"cleanup.policy": "compact"})
    made = dedup(job, "apply")
    assert f"create {job.topology.changelog_topic}: 2 partitions" in made
    assert f"differs {late}: partitions is 3; apply would create it with 2" in made
    assert f"differs {late}: message.timestamp.type is CreateTime; apply would create it with LogAppendTime" in made
    assert "2 topics created" in made
    again = json.loads(dedup(job, "apply", "--json"))
    assert again["make"] == []
    assert job.topology.changelog_topic in again["as_wanted"]
    assert {each["topic"] for each in again["differences"]} >= {late}


def test_apply_makes_no_changelog_for_a_group_that_has_judged(make_job: MakeJob) -> None:
    job = make_job()
    job.send(distinct(0, 10))
    job.finish()
    job.admin.delete_topic(job.topology.changelog_topic)
    for arguments in (("--dry-run",), ()):
        told = dedup(job, "apply", *arguments, code=3)
        assert "it was deleted. Nothing was created" in told
        assert "create " not in told


def test_apply_creates_nothing_beside_a_topic_of_the_wrong_size(make_job: MakeJob) -> None:
    job = make_job()
    job.admin.create_topic(job.topology.changelog_topic, 3)
    for arguments in (("--dry-run",), ()):
        told = dedup(job, "apply", *arguments, code=3)
        assert f"the changelog {job.topology.changelog_topic!r} has 3 partitions" in told
        assert "Nothing was changed" in told
    assert f"would create {job.output}" not in told
    late = f"{job.output}.late"
    assert late not in job.admin.client.list_topics(timeout=30).topics


def test_status_lookup_and_pages_of_a_running_worker(make_job: MakeJob) -> None:
    job = make_job(config={"web": {"enabled": True, "port": 0}})
    job.send([*distinct(0, 100), *distinct(0, 50)])
    worker = job.start()
    job.until_done()
    url = pages(worker)
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert all(f"# TYPE {metric.name} {metric.kind}\n" in text for metric in METRICS)
    assert f'dedup_task_state{{partition="0",state="running",sub_topology="dedup",topic="{job.name}-in"}} 1.0' in text
    seen: dict[str, Any] = {}

    def done() -> bool:
        seen.update(json.loads(dedup(job, "status", "--json", "--url", url)))
        return sum((task["verdicts"] or {}).get("unique", 0) for task in seen["tasks"]) == 100

    until(done, f"the worker tells what it judged: {seen}")
    assert seen["lag"] == 0
    assert [(task["owner"], task["state"]) for task in seen["tasks"]] == [("a", "running")] * 2
    assert sum(task["state_ids"] for task in seen["tasks"]) == 100
    assert all(task["committed"] == 75 and task["changelog_end"] > 50 for task in seen["tasks"])
    assert "lag 0" in dedup(job, "status")

    told = dedup(job, "lookup", "x-7", "--url", url)
    assert f"seen 2023-11-14T22:13:20.007Z in {job.topology.source.topics[0]}/1/3; guarded until" in told
    assert "not known: never seen" in dedup(job, "lookup", "x-1000", "--url", url)
    assert "has members: a at" in dedup(job, "reset", "--yes", code=1)
    assert worker.stop() == 0
    assert "no worker answers" in dedup(job, "lookup", "x-7", "--url", url, code=1)
    gone = json.loads(dedup(job, "status", "--json"))
    assert {task["owner"] for task in gone["tasks"]} == {None}


def test_reset_forgets_everything_and_starts_anew(make_job: MakeJob) -> None:
    job = make_job()
    job.send(distinct(0, 100))
    job.finish("b")
    job.finish()
    asked = dedup(job, "reset", stdin="n\n", code=1)
    assert "nothing was changed" in asked
    assert f"  topic {job.topology.changelog_topic}, which is created again" in asked.partition("Delete it?")[0]
    assert "deleted: " not in asked
    told = dedup(job, "reset", "--yes")
    assert f"deleted: topic {job.topology.changelog_topic}, which is created again, empty" in told
    assert "would be" not in told
    assert not (job.state_dir("a") / job.name).exists()
    assert "run `dedup reset --local` there" in told
    assert set(job.committed().values()) == {0}
    # The state of a worker elsewhere belongs to a changelog that is gone: it is refused, until it is deleted there.
    assert job.start("b").wait() == 3
    asked = dedup(job, "reset", "--local", stdin="n\n", state_of="b", code=1)
    assert asked.partition("Delete it?")[0].count(f"  local state {job.state_dir('b') / job.name}") == 2
    assert "nothing was changed" in asked
    assert job.start("b").wait() == 3
    assert "local state of 2 partitions deleted" in dedup(job, "reset", "--local", "--yes", state_of="b")
    assert "has no state of" in dedup(job, "reset", "--local", state_of="b")
    job.finish("b")
    assert set(output_ids(job).values()) == {2}
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert list(report.not_provable) == [WHY_RESET], "what the forgotten state has written"
    assert sum(books.unique for books in report.books) == 100
    assert all(books.balanced for books in report.books)


def test_reset_changes_nothing_if_it_could_not_be_completed(make_job: MakeJob) -> None:
    """Was: the changelog was gone, and workers still refused the output, or the reset found the state in use."""
    job = make_job()
    changelog = job.topology.changelog_topic
    job.send(distinct(0, 10))
    job.finish()
    kept = job.admin.end_offsets(changelog)
    job.grow(3)
    assert "Nothing was changed. Add partitions to the topic that has fewer" in dedup(job, "reset", "--yes", code=3)
    job.admin.add_partitions(job.output, 3)
    with (job.state_dir("a") / job.name / "1" / "LOCK").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        assert "in use by another process" in dedup(job, "reset", "--yes", code=3)
    assert job.admin.end_offsets(changelog) == kept
    dedup(job, "reset", "--yes")
    job.send([Event(2, b'{"id":"of the new partition"}', BASE_MS)])
    job.finish()
    assert output_ids(job) == Counter({f"x-{number}": 2 for number in range(10)} | {"of the new partition": 1})


def test_a_reset_that_fails_half_way_says_that_it_must_be_run_again(make_job: MakeJob) -> None:
    class NoRight(Reset):
        async def _leave_mark(self, left: Mapping[str, Topic], offsets: Mapping[Any, int]) -> None:
            raise BrokerUnavailable("the group may not be written.")

    async def work(wire: KafkaWire, admin: TopicAdmin) -> None:
        reset = NoRight(job.topology, job.settings.model_copy(update={"state_dir": job.state_dir("a")}), wire, admin)
        await reset.run(await reset.look(), None)

    job = make_job()
    job.send(distinct(0, 10))
    job.finish()
    with pytest.raises(
        BrokerUnavailable, match=r"not be written\. The reset has begun: run the same `dedup reset` again"
    ):
        on_cluster(job.settings, "test", work)
    assert job.start().wait() == 3
    dedup(job, "reset", "--yes")
    job.finish()
    assert set(output_ids(job).values()) == {2}


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "repartitioned"])
def test_reset_to_latest_reads_on_from_there(make_job: MakeJob, direct: bool) -> None:
    source: dict[str, Any] = {"topics": [f"reset-{direct}".lower()]}
    job = make_job(document={"source": source | ({"partitioned_by": "tracking_id"} if direct else {})})
    job.send(distinct(0, 100))
    job.finish()
    job.send(distinct(100, 200))
    told = dedup(job, "reset", "--yes", "--to", "latest")
    assert f"{source['topics'][0]}/0 is read from offset 100" in told
    job.send(distinct(0, 20))
    job.finish()
    found = output_ids(job)
    assert {key for key, times in found.items() if times == 2} == {f"x-{number}" for number in range(20)}
    assert len(found) == 100
    job.finish()
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert list(report.not_provable) == [WHY_RESET]
    judged = [books for books in report.books if books.read]
    assert [sum(books.unique for books in judged), sum(books.read for books in judged)] == [20, 20]


@pytest.mark.parametrize(
    "crash_at", ["after_end:1", "after_changelog:2", "before_end:2", "after_end:2", "before_end:4"]
)
def test_replay_sends_each_dead_letter_once_over_a_kill(make_job: MakeJob, crash_at: str) -> None:
    job = make_job()
    bad = [
        Event(number % 2, b"no json %d" % number, BASE_MS + number, b"k%d" % number, (("trace", b"t"),))
        for number in range(20)
    ]
    job.send([*bad, *distinct(0, 10)])
    job.finish()
    before = len(job.read(job.topology.dead_letter))
    assert before == 20
    dedup(job, "replay", code=137, **{VARIABLE: crash_at})
    told = dedup(job, "replay")
    assert re.search(r"\d+ records? of \S+ sent to their source partitions", told)
    sent = [
        message
        for message in job.read(job.topology.source.topics[0])
        if "dedup-replayed" in dict(message.headers() or [])
    ]
    assert sorted(message.value() or b"" for message in sent) == sorted(event.value or b"" for event in bad)
    for message in sent:
        number = int((message.value() or b"").split()[-1])
        headers = message.headers() or []
        assert headers[0] == ("trace", b"t")
        assert headers[1] == ("dedup-replayed", f"{job.topology.source.topics[0]}/{number % 2}/{number // 2}".encode())
        assert len(headers) == 2
        assert (message.key(), message.timestamp()[1], message.partition()) == (
            b"k%d" % number,
            BASE_MS + number,
            number % 2,
        )
    assert "0 records" in dedup(job, "replay")


def test_replayed_records_are_judged_again_and_keep_their_first_place(make_job: MakeJob) -> None:
    job = make_job()
    job.send([Event(0, b"no json", BASE_MS), *distinct(0, 4)])
    job.finish()
    assert "1 record of" in dedup(job, "replay", "--limit", "5")
    job.finish()
    assert "1 record of" in dedup(job, "replay")
    job.finish()
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert [(books.read, books.dead_letters, books.replayed) for books in report.books] == [(5, 3, 2), (2, 0, 0)]
    places = [dict(message.headers() or []).get("dedup-replayed") for message in job.read(job.topology.dead_letter)]
    assert places == [None, *[f"{job.topology.source.topics[0]}/0/0".encode()] * 2]


def refuse_the_future(job: Job) -> None:
    """The source topic takes timestamps up to an hour ahead, as is the brokers' default."""
    job.admin.configure(job.topology.source.topics[0], message_timestamp_after_max_ms="3600000")


@SINCE_3_6
def test_a_dead_letter_that_the_source_refuses_is_named_and_passed_over(make_job: MakeJob) -> None:
    job = make_job(partitions=1, source_config={"message.timestamp.after.max.ms": "9223372036854775807"})
    job.send(
        [Event(0, b"no json 1", BASE_MS), Event(0, b"no json 2", 253_402_300_799_000), Event(0, b"no json 3", BASE_MS)]
    )
    job.finish()
    refuse_the_future(job)
    told = dedup(job, "replay")
    assert "2 records" in told
    # At which offset it lies depends on how many transactions it took, and whether one was aborted.
    (refused,) = [each for each in job.read(job.topology.dead_letter) if each.value() == b"no json 2"]
    left = f"left {job.topology.dead_letter}/0/{refused.offset()}: its target topic refuses it"
    assert left in told


@SINCE_3_6
@pytest.mark.parametrize("crash_at", [None, "before_end:2", "after_end:2"])
def test_a_letter_that_was_left_is_sent_once_by_the_replay_after_its_cause_is_gone(
    make_job: MakeJob, crash_at: str | None
) -> None:
    job = make_job(partitions=1, source_config={"message.timestamp.after.max.ms": "9223372036854775807"})
    source, letters = job.topology.source.topics[0], job.topology.dead_letter
    future = 253_402_300_799_000
    times = (BASE_MS, future, BASE_MS, future, future, BASE_MS)
    job.send([Event(0, b"no json %d" % number, time_ms) for number, time_ms in enumerate(times)])
    job.finish()
    refuse_the_future(job)
    told = dedup(job, "replay")
    assert "3 records of" in told
    places = {message.value(): f"{letters}/0/{message.offset()}" for message in job.read(letters)}
    left = [f"left {places[b'no json %d' % number]}: its target topic refuses it" for number in (1, 3, 4)]
    assert told.count("the next replay tries it again") == 3
    assert all(each in told for each in left)
    again = dedup(job, "replay")
    assert "0 records of" in again
    assert all(each in again for each in left)
    job.admin.configure(source, message_timestamp_after_max_ms="9223372036854775807")
    if crash_at is not None:
        dedup(job, "replay", code=137, **{VARIABLE: crash_at})
    else:
        # The replay mark names the left letters, too.
        forget_replay(job)
        assert "3 records of" in dedup(job, "replay", "--from", "last")
    assert "left" not in dedup(job, "replay")
    sent = Counter(message.value() for message in job.read(source) if "dedup-replayed" in dict(message.headers() or []))
    assert sent == {b"no json %d" % number: 1 for number in range(6)}


def test_a_letter_whose_source_partition_is_gone_is_left_and_the_others_are_sent(make_job: MakeJob) -> None:
    job = make_job(partitions=3)
    source, letters = job.topology.source.topics[0], job.topology.dead_letter
    job.send([Event(number % 3, b"no json %d" % number, BASE_MS + number) for number in range(6)])
    job.finish()
    job.admin.delete_topic(source)
    job.admin.create_topic(source, 2)
    told = dedup(job, "replay")
    assert "4 records of" in told
    why = f"{source}/2 does not exist, because {source} has only 2 partitions; the next replay tries it again"
    assert len(re.findall(rf"left {letters}/\d+/\d+: {why}", told)) == 2
    job.admin.client.create_partitions([NewPartitions(source, 3)])[source].result(timeout=30)
    job.admin.until_led(source, 3)
    assert "2 records of" in dedup(job, "replay")
    assert "0 records of" in dedup(job, "replay")
    assert replayed(job, source) == 6


def test_a_replay_goes_on_behind_what_retention_has_deleted(make_job: MakeJob) -> None:
    job = make_job(partitions=1)
    job.send([Event(0, b"no json 1", BASE_MS)])
    job.finish()
    assert "1 record of" in dedup(job, "replay")
    job.send([Event(0, b"no json 2", BASE_MS), Event(0, b'{"id":"good"}', BASE_MS)])
    job.finish()
    letters = job.topology.dead_letter
    ends = job.admin.end_offsets(letters)
    job.admin.delete_below(letters, ends)
    told = dedup(job, "replay")
    assert "0 records" in told
    assert re.search(rf"left {letters}/0/\d+ to {ends[0] - 1}: deleted by retention", told)
    # Nothing is left to be told of again.
    assert "left" not in dedup(job, "replay")


def forget_replay(job: Job) -> None:
    """The broker knows no offset of the replay's group, as when they have expired."""
    group = job.topology.replay_group
    job.admin.client.delete_consumer_groups([group])[group].result(timeout=30)


def replayed(job: Job, topic: str) -> int:
    headers = [dict(message.headers() or []) for message in job.read(topic)]
    return sum("dedup-replayed" in each for each in headers)


@pytest.mark.parametrize("crash_at", [None, "after_end:2"], ids=["ended", "killed"])
def test_a_replay_whose_position_is_forgotten_sends_nothing_until_it_is_told_where_to_begin(
    make_job: MakeJob, crash_at: str | None
) -> None:
    job = make_job()
    source, letters = job.topology.source.topics[0], job.topology.dead_letter
    job.send([*(Event(number % 2, b"no json %d" % number, BASE_MS + number) for number in range(6)), *distinct(0, 4)])
    job.finish()
    assert "'end' is not one of" in dedup(job, "replay", "--from", "end", code=2)
    assert "--from: no position in" in dedup(job, "replay", "--from", "start", code=2)
    if crash_at is None:
        assert "6 records" in dedup(job, "replay")
    else:
        dedup(job, "replay", code=137, **{VARIABLE: crash_at})
    sent = replayed(job, source)
    assert sent == (3 if crash_at else 6)
    forget_replay(job)
    for arguments in ((), ("--limit", "1")):
        told = dedup(job, "replay", *arguments, code=3)
        assert f"records of {letters} were replayed before, but the replay position is forgotten" in told
        assert "Nothing was sent" in told
        assert "`--from last`" in told
        assert "`--from start`" in told
    assert replayed(job, source) == sent
    # Of one that was killed only its beginning is known.
    assert f"{6 if crash_at else 0} records" in dedup(job, "replay", "--from", "last")
    assert "0 records" in dedup(job, "replay")
    forget_replay(job)
    assert "6 records" in dedup(job, "replay", "--from", "start")
    assert "no position in" in dedup(job, "replay", "--from", "start", code=2)
    assert "0 records" in dedup(job, "replay")


@SINCE_3_6
def test_what_cannot_be_sent_is_named_again_after_its_position_is_forgotten(make_job: MakeJob) -> None:
    job = make_job(partitions=1, source_config={"message.timestamp.after.max.ms": "9223372036854775807"})
    job.send([Event(0, b"no json 1", BASE_MS)])
    job.finish()
    assert "1 record of" in dedup(job, "replay")
    job.send([Event(0, b"no json 2", 253_402_300_799_000)])
    # The replayed one becomes a dead letter once more, before the one that is sent after it.
    job.finish()
    refuse_the_future(job)
    assert "1 record of" in dedup(job, "replay", "--limit", "1")
    left = "its target topic refuses it"
    assert left in dedup(job, "replay")
    forget_replay(job)
    assert left in dedup(job, "replay", "--from", "last")


def test_late_records_whose_replay_is_forgotten_are_not_forwarded_again(make_job: MakeJob) -> None:
    job = make_job(partitions=1, document={"guard_period": "10s"})
    job.send([Event(0, b'{"id":"new"}', BASE_MS + 100_000), Event(0, b'{"id":"late-id"}', BASE_MS)])
    job.finish()
    assert "1 record of" in dedup(job, "replay", "--late", "--forward")
    forget_replay(job)
    assert "Nothing was sent" in dedup(job, "replay", "--late", "--forward", code=3)
    assert "0 records" in dedup(job, "replay", "--late", "--forward", "--from", "last")
    assert output_ids(job) == {"new": 1, "late-id": 1}
    # Of dead letters nothing was replayed.
    assert "0 records" in dedup(job, "replay")


def test_late_records_go_to_the_output_marked(make_job: MakeJob) -> None:
    job = make_job(partitions=1, document={"guard_period": "10s"})
    job.send([Event(0, b'{"id":"new","n":1}', BASE_MS + 100_000), Event(0, b'{"id":"late-id","n":0}', BASE_MS, b"k")])
    job.finish()
    assert "add --forward" in dedup(job, "replay", "--late", code=2)
    assert f"1 record of {job.output}.late sent to {job.output}" in dedup(job, "replay", "--late", "--forward")
    (forwarded,) = [message for message in job.read(job.output) if id_of(message.value()) == "late-id"]
    place = f"{job.topology.source.topics[0]}/0/1".encode()
    assert forwarded.headers() == [("dedup-verdict", b"late"), ("dedup-replayed", place)]
    assert (forwarded.key(), forwarded.timestamp()[1]) == (b"k", BASE_MS)
    assert "0 records" in dedup(job, "replay", "--late", "--forward")
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert sum(report.not_provable.values()) == 1


@pytest.mark.long
def test_what_says_that_there_was_a_reset_or_a_replay_outlasts_the_retention_of_offsets(
    make_job: MakeJob, tmp_path: Path
) -> None:
    # A minute is the least that a broker takes.
    shortest = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "500"}
    with EmbeddedKafka(data_dir=tmp_path / "kafka", properties=shortest) as kafka:
        running = RunningKafka(kafka.bootstrap)
        job = make_job(kafka=running, admin=admin_of(kafka.bootstrap), partitions=1)
        job.send([Event(0, b"no json", BASE_MS), Event(0, b'{"id":"a"}', BASE_MS)])
        job.finish()
        dedup(job, "reset", "--yes")
        job.finish()
        assert "2 records" in dedup(job, "replay")
        letters = TopicPartition(job.topology.dead_letter, 0)

        def kept(group: str, place: TopicPartition) -> int:
            asker = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "log_level": 0})
            (found,) = asker.committed([place], timeout=30)
            asker.close()
            return found.offset

        assert kept(job.topology.replay_group, letters) > 0
        until(lambda: kept(job.topology.replay_group, letters) < 0, "the replay's offset expires", within_s=180)
        assert kept(job.topology.replay_mark_group, letters) > 0
        assert "Nothing was sent" in dedup(job, "replay", code=3)
        assert kept(job.topology.reset_group, TopicPartition(job.output, 0)) > 0
        # The group's own offsets have expired, too; a worker that is started writes them anew.
        job.finish()
        report = verify(job.topology, job.settings)
        assert report.passed, report.samples
        assert WHY_RESET in report.not_provable


@pytest.mark.long
def test_where_a_reset_begins_outlasts_the_retention_of_offsets(make_job: MakeJob, tmp_path: Path) -> None:
    """Was: the repartition tasks began at the start of the source, and everything went out again."""
    shortest = {"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "500"}
    with EmbeddedKafka(data_dir=tmp_path / "kafka", properties=shortest) as kafka:
        running = RunningKafka(kafka.bootstrap)
        job = make_job(kafka=running, admin=admin_of(kafka.bootstrap), document={"source": {"topics": ["begins"]}})
        job.send(distinct(0, 10))
        job.finish()
        dedup(job, "reset", "--yes", "--to", "latest")
        other = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "other", "log_level": 0})
        other.commit(offsets=[TopicPartition("begins", 0, 1)], asynchronous=False)
        until(
            lambda: other.committed([TopicPartition("begins", 0)], timeout=30)[0].offset < 0, "it expires", within_s=180
        )
        other.close()
        job.send(distinct(10, 20))
        job.finish()
        assert output_ids(job) == Counter(f"x-{number}" for number in range(20))
