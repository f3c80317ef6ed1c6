"""Records that the broker will never take, on a running worker: their own headers, their number, a limit that moves."""

from __future__ import annotations

import base64
import os
import random
import re
import time
import urllib.request

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Message, Producer

from dedup.verify.verifier import verify
from tests.brokers import SINCE_3_6
from tests.integration.conftest import MakeJob
from tests.integration.fleet import WITHIN_S, Job, Worker
from tests.integration.test_admin import dedup, pages
from tests.integration.watch import Watch
from tests.integration.workload import BASE_MS, Event, assert_order_kept, id_of

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]

DAY_MS = 86_400_000
MEGABYTE = 1_000_000
LARGE = 40_000
LIMIT = 30_000
EVENTS = 10_000
MOST_ABORTS = 3
"""Of one partition, however many of its records are refused."""
WEB = {"web": {"enabled": True, "port": 0}}


def event(number: int, tracking_id: str, pad: bytes = b"", *, partitions: int = 2, timestamp_ms: int = 0) -> Event:
    value = b'{"id":"%s","n":%d,"pad":"%s"}' % (tracking_id.encode(), number, pad)
    return Event(number % partitions, value, timestamp_ms or BASE_MS + number)


def noise(dice: random.Random, count: int) -> bytes:
    """Return text that no compression makes much smaller."""
    return base64.b64encode(dice.randbytes(count * 3 // 4))


def mixed(refused: int, *, begin: int = 0, count: int = EVENTS, pad: bytes | None = None) -> list[Event]:
    """Return events with an ID each, as many of them large as asked for, at even distances."""
    dice, every = random.Random(18), count // refused
    return [
        event(number, f"large-{number}", noise(dice, LARGE) if pad is None else pad)
        if number % every == every // 2
        else event(number, f"x-{number}")
        for number in range(begin, begin + count)
    ]


def large_of(events: list[Event]) -> frozenset[str]:
    return frozenset(name for each in events if (name := id_of(each.value) or "").startswith("large-"))


def aborts(worker: Worker) -> dict[str, int]:
    """Return how many transactions of each partition were aborted so far."""
    with urllib.request.urlopen(f"{pages(worker)}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'dedup_transactions_total\{([^}]*result="aborted"[^}]*)\} (\d+)', text)
    assert found, text
    counted = {labels: int(number) for labels, number in found}
    print(f"aborted: {counted}")  # noqa: T201  # a figure for whoever measures
    return counted


def headers_of(message: Message) -> dict[str, bytes | None]:
    return dict(message.headers() or [])  # type: ignore[arg-type]  # pairs, whatever the stubs say


def judged_while_running(job: Job, events: list[Event], *, within_s: float = WITHIN_S) -> Worker:
    """A running worker judges the events; returns it."""
    worker = job.start()
    worker.until_logged("running from offset", times=job.partitions)
    began = time.monotonic()
    job.send(events)
    job.until_done(within_s=within_s)
    print(f"{len(events)} events in {time.monotonic() - began:.1f} s")  # noqa: T201  # a figure for whoever measures
    return worker


def test_a_large_header_of_the_source_that_is_named_like_ours_stops_nothing(make_job: MakeJob) -> None:
    """Only the headers added here outlive a refusal: one `dedup-note` of 200 kB is the source's."""
    job = make_job(document={"dead_letter": "small-dead"}, output_config={"max.message.bytes": str(LIMIT)})
    job.admin.create_topic("small-dead", 2, {"max.message.bytes": "100000", "retention.ms": "-1"})
    events = [event(number, f"x-{number}") for number in range(100)]
    large = b'{"id":"large","n":50,"pad":""}'
    events.insert(50, Event(0, large, BASE_MS, b"k", (("plain", b"1"), ("dedup-note", os.urandom(200_000)))))
    with Watch(job):
        worker = judged_while_running(job, events)
        job.send([event(number, f"x-{number}") for number in range(200, 220)])
        job.until_done()
        assert worker.stop() == 0, worker.log
        job.finish()
    job.judge(refused_ids=frozenset({"large"}))
    assert len(job.read(job.output)) == 120
    (dead,) = job.read("small-dead")
    assert (dead.key(), dead.value()) == (None, None)
    found = headers_of(dead)
    assert list(found) == ["dedup-reason", "dedup-detail", "dedup-source", "dedup-timestamp", "dedup-digest"]
    assert (found["dedup-digest"] or b"").endswith(b" of %d bytes" % len(large))


def test_what_fits_compressed_is_kept_whole_beside_the_output_and_replay_brings_it_back(make_job: MakeJob) -> None:
    """A late record and a dead letter of 3 MB of zeros each: topics that take 1 MB take them, compressed."""
    job = make_job(partitions=1, document={"guard_period": "10s"})
    zeros = b"0" * 3 * MEGABYTE
    late = Event(0, b'{"id":"late","n":1,"pad":"%s"}' % zeros, BASE_MS, b"k", (("trace", b"t"),))
    dead = Event(0, b"no json %s" % zeros, BASE_MS + 100_000, b"d")
    job.producer = Producer(
        {"bootstrap.servers": job.kafka.bootstrap, "message.max.bytes": 8 * MEGABYTE, "compression.type": "gzip"}
    )
    ahead = Event(0, b'{"id":"new","n":0,"pad":""}', BASE_MS + 100_000)
    worker = judged_while_running(job, [ahead, late, dead])
    assert worker.stop() == 0, worker.log
    for event_sent, topic in ((late, f"{job.output}.late"), (dead, job.topology.dead_letter)):
        (letter,) = job.read(topic)
        assert (letter.key(), letter.value()) == (event_sent.key, event_sent.value), topic
        assert "dedup-digest" not in headers_of(letter)
    assert "1 record of" in dedup(job, "replay", "--late", "--forward")
    (forwarded,) = [message for message in job.read(job.output) if id_of(message.value()) == "late"]
    assert (forwarded.key(), forwarded.value(), forwarded.timestamp()[1]) == (late.key, late.value, BASE_MS)
    assert "1 record of" in dedup(job, "replay")
    again = [message for message in job.read(job.topology.source.topics[0]) if message.key() == b"d"]
    assert [message.value() for message in again] == [dead.value] * 2
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples


@pytest.mark.parametrize("way", ["direct", "repartitioned"])
def test_a_thousand_records_too_large_cost_no_transaction_each(make_job: MakeJob, way: str) -> None:
    source = {"partitioned_by": "tracking_id"} if way == "direct" else {}
    name = f"large-{way}"
    job = make_job(
        name=name,
        document={"source": {"topics": [f"{name}-in"]} | source},
        output_config={"max.message.bytes": str(LIMIT)},
        config=WEB,
    )
    events = mixed(1_000)
    with Watch(job):
        worker = judged_while_running(job, events)
        # Nothing is sent that is not taken: not one transaction is lost to a size that could be known.
        assert set(aborts(worker).values()) == {0}
        assert worker.stop() == 0, worker.log
    job.judge(refused_ids=large_of(events))
    dead = job.read(job.topology.dead_letter)
    assert {headers_of(message)["dedup-reason"] for message in dead} == {b"refused_by_broker"}
    sent = {id_of(each.value): each.value for each in events}
    # Not compared as sets: what pytest would say of a difference is 40 MB.
    assert all(message.value() == sent[id_of(message.value())] for message in dead)


@SINCE_3_6
def test_a_thousand_timestamps_that_the_broker_refuses_cost_no_transaction_each(make_job: MakeJob) -> None:
    """The broker names all bad records of a batch (KIP-467), so a transaction is judged once more, not once each."""
    oldest_ms = int(time.time() * 1000) - BASE_MS + DAY_MS
    job = make_job(
        document={"guard_period": "200d"},
        output_config={"message.timestamp.before.max.ms": str(oldest_ms)},
        config=WEB | {"commit_interval": "500ms"},
    )
    events = [
        event(number, f"large-{number}", timestamp_ms=BASE_MS - 100 * DAY_MS)
        if number % 20 in {4, 15}
        else event(number, f"x-{number}")
        for number in range(EVENTS)
    ]
    with Watch(job):
        job.send(events)
        worker = judged_while_running(job, [])
        assert max(aborts(worker).values()) <= MOST_ABORTS
        assert worker.stop() == 0, worker.log
    job.judge(refused_ids=large_of(events))
    details = {headers_of(message)["dedup-detail"] or b"" for message in job.read(job.topology.dead_letter)}
    assert all(b"out of range" in detail for detail in details), details


@SINCE_3_6
def test_a_worker_ends_while_no_coordinator_answers_and_it_judges_again(make_job: MakeJob) -> None:
    """Was: after SIGTERM, it waited for the group's coordinator for as long as that was away."""
    oldest_ms = int(time.time() * 1000) - BASE_MS + DAY_MS
    job = make_job(document={"guard_period": "200d"}, output_config={"message.timestamp.before.max.ms": str(oldest_ms)})
    events = [event(number, f"x-{number}") for number in range(100)]
    events[50] = event(50, "large-old", timestamp_ms=BASE_MS - 100 * DAY_MS)
    worker = job.start("a", "no_group_coordinator_once_refused=500")
    worker.until_logged("running from offset", times=job.partitions)
    job.send(events)
    worker.until_logged("are judged again")
    assert worker.stop() == 0, worker.log
    job.finish("b")
    job.judge(refused_ids=large_of(events))


@SINCE_3_6
def test_the_same_refused_event_again_and_again(make_job: MakeJob) -> None:
    """A dead letter is no sighting, so each copy is judged anew: by size and by timestamp, at a bounded price.

    Was: where nothing limits the future, as by default before Kafka 4.0, the broker states a range whose end has
    overflowed, and all records of a transaction with one refusal became dead letters.
    """
    limits = {"max.message.bytes": str(LIMIT), "message.timestamp.after.max.ms": str(2**63 - 1)}
    oldest_ms = int(time.time() * 1000) - BASE_MS + DAY_MS
    job = make_job(
        document={"guard_period": "200d"},
        output_config=limits | {"message.timestamp.before.max.ms": str(oldest_ms)},
        config=WEB | {"commit_interval": "500ms"},
        partitions=1,
    )
    pad = noise(random.Random(1), LARGE)
    copies = [event(number, "large-same", pad, partitions=1) for number in range(300)]
    old = [
        event(number, "large-old", partitions=1, timestamp_ms=BASE_MS - 100 * DAY_MS + number) for number in range(300)
    ]
    events = [each for row in zip(copies, old, strict=True) for each in row]
    job.send([*events, event(1_000, "x", partitions=1)])
    with Watch(job):
        worker = judged_while_running(job, [])
        assert max(aborts(worker).values()) <= MOST_ABORTS
        assert worker.stop() == 0, worker.log
    assert [id_of(message.value()) for message in job.read(job.output)] == ["x"]
    assert len(job.read(job.topology.dead_letter)) == len(events)
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples


def forwarded_and_dead(job: Job) -> tuple[set[str | None], set[str | None]]:
    output, letters = job.read(job.output), job.read(job.topology.dead_letter)
    return {id_of(message.value()) for message in output}, {id_of(message.value()) for message in letters}


def test_f76_the_limit_of_the_output_is_lowered_under_a_running_worker(make_job: MakeJob) -> None:
    """What was too large once is known from then on: the later ones cost no transaction."""
    job = make_job(config=WEB)
    before, after, later = (mixed(20, begin=begin, count=2_000) for begin in (0, 2_000, 4_000))
    with Watch(job):
        worker = judged_while_running(job, before)
        job.admin.configure(job.output, max_message_bytes=str(LIMIT))
        job.send(after)
        job.until_done()
        counted = aborts(worker)
        assert 0 < sum(counted.values()) <= job.partitions * MOST_ABORTS
        job.send(later)
        job.until_done()
        assert aborts(worker) == counted
        assert worker.stop() == 0, worker.log
    refused = large_of(after) | large_of(later)
    job.judge(refused_ids=refused)
    assert large_of(before) <= forwarded_and_dead(job)[0]
    assert refused == forwarded_and_dead(job)[1]


def test_f76_the_compression_of_the_output_is_changed_under_a_running_worker(make_job: MakeJob) -> None:
    """The broker stores batches as the topic says, and compares that size, too: what fitted before fits no more."""
    job = make_job(output_config={"max.message.bytes": str(LIMIT)}, config=WEB)
    pad = b"0" * LARGE
    before, after, back = (mixed(20, begin=begin, count=1_000, pad=pad) for begin in (0, 1_000, 2_000))
    with Watch(job):
        worker = judged_while_running(job, before)
        assert set(aborts(worker).values()) == {0}
        job.admin.configure(job.output, compression_type="uncompressed")
        job.send(after)
        job.until_done()
        assert sum(aborts(worker).values()) <= job.partitions * MOST_ABORTS
        assert worker.stop() == 0, worker.log
        job.admin.configure(job.output, compression_type="zstd")
        worker = judged_while_running(job, back)
        assert set(aborts(worker).values()) == {0}
        assert worker.stop() == 0, worker.log
    job.judge(refused_ids=large_of(after))
    assert large_of(before) | large_of(back) <= forwarded_and_dead(job)[0]


def test_f76_the_timestamp_type_of_the_output_is_changed_under_a_running_worker(make_job: MakeJob) -> None:
    """Counted, not verified: `dedup verify` takes an output to have times of one kind."""
    job = make_job()
    events = [event(number, f"x-{number % 900}") for number in range(1_000)]
    with Watch(job):
        worker = judged_while_running(job, events[:500])
        job.admin.configure(job.output, message_timestamp_type="LogAppendTime")
        job.send(events[500:])
        job.until_done()
        assert worker.stop() == 0, worker.log
    output = job.read(job.output)
    assert sorted(id_of(message.value()) or "" for message in output) == sorted(f"x-{number}" for number in range(900))
    assert_order_kept(output)
    # The broker's own time from some record on, the source's before.
    assert {message.timestamp()[0] for message in output} == {TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME}
    assert job.read(job.topology.dead_letter) == []
