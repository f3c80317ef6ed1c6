"""A worker without faults: every kind of topology, every place a record can end."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Message

from dedup.verify.verifier import verify
from tests.integration.conftest import MakeJob
from tests.integration.fleet import Job, until
from tests.integration.workload import BASE_MS, SECONDS, Event, Expected, assert_order_kept, id_of, workload

pytestmark = pytest.mark.broker


def test_direct(job: Job) -> None:
    job.send(workload(1, 6_000))
    job.finish()
    report = job.judge()
    assert report.counts["lost"] == report.counts["duplicated"] == 0


def test_two_sources_are_repartitioned(make_job: MakeJob) -> None:
    job = make_job(document={"source": {"topics": ["two-a", "two-b"]}})
    job.send(workload(2, 4_000, topics=2, scattered=True))
    job.finish()
    job.judge()
    for topic in ("two-a", "two-b"):
        job.admin.delete_topic(topic)


def test_observe_only(make_job: MakeJob) -> None:
    job = make_job(
        document={"output": None, "late": "drop", "dead_letter": "observed-dead", "duplicates": "observed-dup"}
    )
    job.send(workload(3, 1_000))
    job.finish()
    expected = Expected.of(job.sent)
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert sum(books.unique for books in report.books) == len(expected.ids)
    assert len(job.read("observed-dead")) == expected.bad
    assert len(job.read("observed-dup")) == expected.total - expected.bad - len(expected.ids)


def test_the_key_is_the_id_of_bytes(make_job: MakeJob) -> None:
    source = {"topics": ["keyed-in"], "format": "bytes"}
    job = make_job(document={"source": source, "tracking_id": {"key": True}})
    # Equal keys are in equal partitions, whichever those are.
    keys = [b"a", b"b", b"c", b"\x00\xff", None, b"", b"a", b"\x00\xff", b"d", b"c"]
    values = [b"%d" % number for number in range(len(keys))]
    rows = zip(keys, values, strict=True)
    job.send([Event(len(key or b"") % 2, value, BASE_MS, key) for key, value in rows])
    job.finish()
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert sorted(message.value() or b"" for message in job.read(job.output)) == [b"0", b"1", b"2", b"3", b"8"]
    assert sorted(message.value() or b"" for message in job.read(job.topology.dead_letter)) == [b"4", b"5"]


def test_start_latest_leaves_out_what_was_there(make_job: MakeJob) -> None:
    job = make_job(document={"source": {"topics": ["latest-in"], "partitioned_by": "tracking_id", "start": "latest"}})
    before = workload(4, 500)
    job.send(before)
    worker = job.start()
    worker.until_logged("running from offset", times=2)
    job.send([Event(number % 2, b'{"id":"new-%d","n":%d}' % (number, number), BASE_MS) for number in range(100)])
    job.until_done()
    assert worker.stop() == 0
    found = [id_of(message.value()) for message in job.read(job.output)]
    assert sorted(map(str, found)) == sorted(f"new-{number}" for number in range(100))
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert sum(books.skipped for books in report.books) == len(before)


EVERY_PLACE = [
    ({"id": "a", "n": 0}, 100, "output"),
    ({"id": "b", "n": 1}, 101, "output"),
    ({"id": "a", "n": 0}, 105, "duplicates"),
    ({"id": "a", "n": 3}, 106, "conflicts"),
    ({"id": "c", "n": 4}, 115, "output"),
    (b"no json", 116, "dead"),
    ({"id": "d", "n": 6}, 104, "late"),
    ({"n": 7}, 117, "dead"),
    (None, 118, "output"),
    ({"id": "a", "n": 9}, 116, "output"),
]


def test_conflicts_without_a_topic_are_duplicates_that_are_counted_apart(make_job: MakeJob) -> None:
    job = make_job(
        partitions=1,
        document={
            "source": {"topics": ["counted-in"], "partitioned_by": "tracking_id"},
            "output": {"topic": "counted-out"},
            "duplicates": "counted-twice",
            "conflicts": {"exclude": ["at"]},
        },
    )
    values = [b'{"id":1,"n":1,"at":1}', b'{"id":1,"n":1,"at":2}', b'{"id":1,"n":2,"at":3}']
    job.send([Event(0, value, BASE_MS + number) for number, value in enumerate(values)])
    job.finish()
    assert [message.value() for message in job.read("counted-twice")] == values[1:]
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert [(books.duplicates, books.conflicts) for books in report.books] == [(2, 1)]


def test_every_record_goes_to_its_place_with_its_headers(make_job: MakeJob) -> None:
    job = make_job(
        partitions=1,
        document={
            "source": {"topics": ["places-in"], "partitioned_by": "tracking_id"},
            "guard_period": "10s",
            "output": {"topic": "places-out", "headers": True},
            "duplicates": "places-duplicates",
            "conflicts": "places-conflicts",
            "late": "places-late",
            "dead_letter": "places-dead",
        },
    )
    for number, (value, second, _) in enumerate(EVERY_PLACE):
        text = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
        own = (("trace", b"%d" % number), ("empty", b""), ("none", None))
        job.send([Event(0, text, BASE_MS + second * SECONDS, b"k%d" % number, own)])
    job.finish()
    found = {place: job.read(f"places-{place}") for place in ("duplicates", "conflicts", "late", "dead")}
    found["output"] = job.read("places-out")
    for place, messages in found.items():
        rows = [row for row, (_, _, belongs) in enumerate(EVERY_PLACE) if belongs == place]
        assert [message.key() for message in messages] == [b"k%d" % row for row in rows], place
        for row, message in zip(rows, messages, strict=True):
            assert headers_of(message)[:3] == [("trace", b"%d" % row), ("empty", b""), ("none", None)]
    added = {place: [ours(message) for message in messages] for place, messages in found.items()}
    source = [("dedup-source", b"places-in/0/%d" % row) for row in range(len(EVERY_PLACE))]
    stamp = [("dedup-timestamp", b"%d" % (BASE_MS + second * SECONDS)) for _, second, _ in EVERY_PLACE]
    first = [("dedup-first-time", b"%d" % (BASE_MS + 100 * SECONDS)), ("dedup-first-source", b"places-in/0/0")]
    assert added["output"] == [
        [source[0]],
        [source[1]],
        [source[4]],
        [("dedup-verdict", b"tombstone"), source[8]],
        [source[9]],
    ]
    assert added["duplicates"] == [first]
    assert added["conflicts"] == [first]
    assert added["late"] == [[source[6], stamp[6]]]
    for row, headers in zip((5, 7), added["dead"], strict=True):
        reason, detail, *rest = headers
        assert rest == [source[row], stamp[row]]
        assert (reason[0], detail[0]) == ("dedup-reason", "dedup-detail")
        assert len(detail[1] or b"") > 10
    assert [headers[0][1] for headers in added["dead"]] == [b"not_json", b"id_missing"]
    assert [message.timestamp()[1] - BASE_MS for message in found["output"]] == [
        100_000,
        101_000,
        115_000,
        118_000,
        116_000,
    ]
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples


def headers_of(message: Message) -> list[tuple[str, bytes | None]]:
    return list(message.headers() or [])  # type: ignore[arg-type]  # pairs, whatever the stubs say


def ours(message: Message) -> list[tuple[str, bytes | None]]:
    """Return the headers after the record's own three."""
    return headers_of(message)[3:]


def test_expiry_drops_whole_segments_and_forgets_no_verdict(make_job: MakeJob) -> None:
    """The stream is a hundred guard periods long; two workers in turn, the second with the first one's state."""
    job = make_job(document={"guard_period": "3s", "grace": "25s"})
    events = workload(5, 30_000)
    for part in (events[:15_000], events[15_000:]):
        job.send(part)
        job.finish()
    report = verify(job.topology, job.settings)
    assert report.passed, report.samples
    assert sum(books.unique for books in report.books) > len(Expected.of(events).ids)
    assert_order_kept(job.read(job.output))


def test_a_worker_is_done_when_all_workers_are(make_job: MakeJob) -> None:
    """Two partitions, three workers: the one that has none must not say that all is done while the others are not."""
    job = make_job()
    waiting = job.send(workload(6, 400), transactional_id=f"{job.name}-open", commit=None)
    others = [job.start(name) for name in ("b", "c")]
    until(lambda: all("running from offset" in worker.log for worker in others), f"both run; {job.logs()}")
    idle = job.start("a", exit_when_done=True)
    idle.until_logged("waits for other workers")
    waiting.commit_transaction(30)
    job.sent.extend(workload(6, 400))
    assert idle.wait() == 0, idle.log
    assert job.all_committed()
    for worker in others:
        assert worker.stop() == 0, worker.log
    job.judge()
