"""Agents that fail, records that are refused, transactions in the input, commits in flight, ids taken by others."""

from __future__ import annotations

import os
import re

import pytest
from confluent_kafka import Message, Producer

from dedup.kafka.record_batch import TopicPartition
from dedup.verify.direct import WHY_COMPACTED
from dedup.verify.verifier import verify
from tests import odd_names
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.watch import Watch
from tests.integration.workload import BASE_MS, SECONDS, Event, endless, workload

pytestmark = pytest.mark.broker


@pytest.mark.parametrize("accident", ["agent_fails_before=5", "agent_fails_inside=5", "agent_fails_after=5"])
def test_an_agent_that_fails_stops_the_worker_and_loses_nothing(job: Job, accident: str) -> None:
    """An exception inside a batch: the transaction ends, exit 1, and the next worker judges the batch again."""
    with Watch(job):
        job.send(workload(21, 3_000))
        failing = job.start("a", "small_batches=200", accident)
        assert failing.wait() == 1, failing.log
        assert "AgentFailedOnPurpose: batch 5" in failing.log
        job.finish()
    job.judge()


def test_topic_send_of_an_agent_is_refused(job: Job) -> None:
    """What an agent sends by itself would escape the transaction: the worker stops, nothing was sent."""
    escape = job.admin.create_topic(f"{job.name}-escape")
    job.send(workload(22, 500))
    worker = job.start("a", "agent_sends=1", environ={"DEDUP_TEST_ESCAPE": escape})
    assert worker.wait() == 1, worker.log
    assert f"topic.send() to '{escape}'" in worker.log
    assert job.admin.end_offsets(escape) == {0: 0}
    job.finish()
    job.judge()


def test_f31_damage_found_while_running_is_restored_and_nothing_is_judged_twice(job: Job) -> None:
    events = workload(30, 3_000)
    with Watch(job):
        worker = job.start("a", "small_batches=100", "store_damaged=12")
        job.send(events[:600])
        job.until_done()
        job.send(events[600:])
        job.until_done()
        _, _, after = worker.log.partition("block checksum mismatch")
        assert re.search(r"running from offset [1-9]\d*, epoch \d+, after [1-9]\d* changelog records", after), (
            worker.log
        )
        assert worker.stop() == 0, worker.log
    job.judge()


def test_a_worker_whose_membership_has_died_ends(job: Job) -> None:
    """Nobody would tell it that its partitions are another's: it must not sit there, alive to all who ask."""
    with Watch(job):
        worker = job.start("a", "small_batches=100", "membership_dies=4")
        job.send(workload(37, 2_000))
        assert worker.wait() == 5, worker.log
        assert "no longer a member of the group" in worker.log
        job.finish()
    job.judge()


LARGE = 60_000


def test_f26_a_refused_record_becomes_a_dead_letter(make_job: MakeJob) -> None:
    """Two records the output topic does not take, among others: those go through."""
    job = make_job(output_config={"max.message.bytes": "30000"})
    events = workload(23, 2_000)
    for number, at in enumerate((0, 700)):
        value = b'{"id":"large-%d","n":0,"pad":"%s"}' % (number, os.urandom(LARGE // 2).hex().encode())
        events.insert(at, Event(number, value, BASE_MS))
    with Watch(job):
        job.send(events)
        job.finish()
    job.judge(refused_ids=frozenset({"large-0", "large-1"}))
    dead = [message for message in job.read(job.topology.dead_letter) if len(message.value() or b"") > LARGE]
    assert [dict(message.headers() or [])["dedup-reason"] for message in dead] == [b"refused_by_broker"] * 2


def test_f53_a_refused_dead_letter_stops_the_worker(make_job: MakeJob) -> None:
    """The dead-letter topic takes nothing: the worker ends loudly, before any offset that would lose the record."""
    job = make_job(document={"dead_letter": "refusing-dead"})
    job.admin.create_topic("refusing-dead", 2, {"max.message.bytes": "100"})
    job.send([Event(0, b"no json", BASE_MS)])
    worker = job.start()
    assert worker.wait() not in {0, 137}, worker.log
    assert "refusing-dead" in worker.log
    assert job.committed() == {0: 0, 1: 0}
    assert job.read(job.output) == []


def test_f52_transactions_in_the_input(job: Job) -> None:
    """Aborted records are no records; those of an open transaction wait, and hold up nothing in other partitions."""
    events = workload(24, 1_200)
    job.send(events[:300])
    job.send(events[300:500], transactional_id=f"{job.name}-x", commit=False)
    job.send(events[500:700], transactional_id=f"{job.name}-x", commit=True)
    job.send(events[700:800])
    open_one = job.send(
        [event for event in events[800:1000] if event.partition == 0], transactional_id=f"{job.name}-y", commit=None
    )
    job.send([event for event in events[1000:] if event.partition == 1])
    with Watch(job):
        worker = job.start()
        end = job.admin.end_offsets(f"{job.name}-in")[1]
        until(lambda: job.committed()[1] == end, "partition 1 goes on")
        waiting = job.committed()[0]
        open_one.commit_transaction(30)
        job.sent.extend(event for event in events[800:1000] if event.partition == 0)
        until(lambda: job.committed()[0] > waiting, "partition 0 goes on")
        assert worker.stop() == 0, worker.log
        job.finish()
    job.judge()


def test_f52_an_input_that_ends_with_an_aborted_transaction_is_done(job: Job) -> None:
    job.send(workload(25, 200))
    job.send(workload(26, 200), transactional_id=f"{job.name}-x", commit=False)
    job.finish()
    job.judge()


@pytest.mark.parametrize("commit", [True, False], ids=["committed", "aborted"])
def test_the_end_of_a_transaction_may_be_deleted_once_all_is_judged(job: Job, *, commit: bool) -> None:
    """Was: the offset before the markers was committed, so a quiet partition whose log retention had emptied was refused."""
    topic = job.topology.source.topics[0]
    job.send(workload(41, 200), transactional_id=f"{job.name}-x")
    job.send(workload(42, 200), transactional_id=f"{job.name}-x", commit=commit)
    job.admin.until_visible(topic)
    worker, end = job.start(), job.admin.end_offsets(topic)
    until(lambda: job.committed() == end, lambda: f"all up to {end} is committed: {job.committed()}\n{worker.log}")
    assert worker.stop() == 0, worker.log
    job.admin.delete_below(topic, end)
    job.send(workload(43, 200))
    job.finish()
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples


def test_a_batch_without_a_new_sighting_then_a_crash(make_job: MakeJob) -> None:
    """The duplicate moves stream time: after the crash an older record must still be late, not unique."""
    job = make_job(partitions=1, document={"guard_period": "10s"}, config={"commit_interval": "10ms"})

    def at(tracking_id: str, second: int) -> Event:
        return Event(0, b'{"id":"%s","n":%d}' % (tracking_id.encode(), second), BASE_MS + second * SECONDS)

    job.send([at("a", 100)])
    worker = job.start(crash_at="after_end:2")
    until(lambda: job.committed()[0] == 1, "the first is committed")
    job.send([at("a", 109)])
    assert worker.wait() == 137
    job.send([at("b", 98)])
    job.finish()
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert [(books.unique, books.duplicates, books.late) for books in report.books] == [(1, 1, 1)]


def test_a_fold_during_a_commit_in_flight(job: Job) -> None:
    """Batches are judged while EndTxn is on its way, and see what it commits; then with a SIGKILL among them."""
    with Watch(job):
        worker = job.start("a", "slow_commit=150", "small_batches=20", "die_judging_in_commit=12")
        worker.until_logged("running from offset", times=job.partitions)
        with job.stream(endless(27), per_s=1_000):
            assert worker.wait() == 137, worker.log
            back = job.start("a", "slow_commit=150", "small_batches=20")
            job.until_progress(1_000)
        job.until_done()
        assert back.stop() == 0, back.log
    job.judge()


def test_f14_another_process_takes_our_transactional_id(job: Job) -> None:
    """The owner is fenced, discards the task, and takes the partition over anew."""
    with Watch(job), job.stream(endless(28), per_s=1_000):
        worker = job.start()
        job.until_progress(200)
        taker = Producer({"bootstrap.servers": job.kafka.bootstrap, "transactional.id": f"{job.name}.dedup.0"})
        taker.init_transactions(30)
        worker.until_logged("Another owner has the partition")
        job.until_progress(500)
    job.until_done()
    assert worker.stop() == 0, worker.log
    job.judge()


def test_f52_compacted_gaps(make_job: MakeJob) -> None:
    """Offsets that compaction took away between two records are no loss."""
    job = make_job(
        partitions=1,
        source_config={"cleanup.policy": "compact", "segment.ms": "50", "min.cleanable.dirty.ratio": "0.001"},
    )
    keys = [b"only %d" % number if number % 10 == 0 else b"k%d" % (number % 3) for number in range(40)]
    # A segment ends with each record, as event times are more than segment.ms apart; the last one is not compacted.
    for number, key in enumerate(keys):
        value = b'{"id":"order-%d","n":%d}' % (number, number)
        job.send([Event(0, value, BASE_MS + number * SECONDS, key)])
    newest = {key: number for number, key in enumerate(keys[:-1])}
    topic = job.topology.source.topics[0]
    until(
        lambda: [message.offset() for message in job.read(topic)] == [*sorted(newest.values()), len(keys) - 1],
        "compaction is done",
    )
    left = job.read(topic)
    job.finish()
    values = [message.value() for message in job.read(job.output)]
    assert values == [message.value() for message in left]
    assert job.committed()[0] == 40
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert report.not_provable == {WHY_COMPACTED: len(left)}


def test_records_compacted_after_they_were_judged_are_no_phantoms(make_job: MakeJob) -> None:
    """What came out stays; what it came from is gone, so the verifier claims little of it."""
    # A segment ends with each record, as event times are more than segment.ms apart; the last one is not compacted.
    job = make_job(partitions=1, source_config={"segment.ms": "50", "min.cleanable.dirty.ratio": "0.001"})
    events = [
        Event(0, b'{"id":"order-%d","n":%d}' % (number, number), BASE_MS + number * SECONDS, b"k%d" % (number % 3))
        for number in range(20)
    ]
    events.insert(3, Event(0, b"no json", BASE_MS, b"k0"))
    for event in events:
        job.send([event])
    job.finish()
    topic = job.topology.source.topics[0]
    job.admin.configure(topic, cleanup_policy="compact")
    until(lambda: len(job.read(topic)) < 15, "compaction took records")
    assert len(job.read(job.output)) == 20
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert list(report.not_provable) == [WHY_COMPACTED]


@pytest.mark.parametrize("way", ["direct", "repartitioned"])
async def test_a_header_name_that_is_not_utf8_is_a_dead_letter(make_job: MakeJob, way: str) -> None:
    """The broker takes it, no usual client reads it: its neighbours of the same batch are judged all the same."""
    name = f"odd-{way}"
    source = {"topics": [f"{name}-in"]} | ({"partitioned_by": "tracking_id"} if way == "direct" else {})
    job = make_job(name=name, document={"source": source})
    rows: list[odd_names.Row] = [
        (BASE_MS + number, b"k%d" % number, b'{"id":"%d","n":%d}' % (number % 4, number), [("plain", b"1")])
        for number in range(8)
    ]
    rows[2] = (*rows[2][:3], [("plain", b"1"), (odd_names.ODD, b"\xff"), ("none", None)])
    await odd_names.send(job.kafka.bootstrap, TopicPartition(f"{name}-in", 1), rows)
    job.send(workload(29, 200))
    job.finish()
    (dead,) = [message for message in job.read(job.topology.dead_letter) if message.key() == b"k2"]
    headers = list(message_headers(dead))
    assert (dead.key(), dead.value()) == (rows[2][1], rows[2][2])
    assert headers[:3] == [("plain", b"1"), (odd_names.WRITTEN, b"\xff"), ("none", None)]
    added = dict(headers[3:])
    assert added["dedup-reason"] == b"header_not_utf8"
    assert added["dedup-source"] == f"{name}-in/1/2".encode()
    assert added["dedup-timestamp"] == b"%d" % (BASE_MS + 2)
    forwarded = {message.value() for message in job.read(job.output)}
    # Number 6 has the ID of number 2, of which no sighting was kept.
    assert {rows[at][2] for at in (0, 1, 3, 6)} <= forwarded
    assert not {rows[at][2] for at in (2, 4, 5, 7)} & forwarded
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert report.not_provable == {}
    assert all(books.balanced for books in report.books)
    assert report.read >= len(rows) + 200


def message_headers(message: Message) -> list[tuple[str, bytes | None]]:
    return list(message.headers() or [])  # type: ignore[arg-type]  # pairs, whatever the stubs say
