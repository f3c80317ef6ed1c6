"""Spark's own operator behind the same topology file: what it does, what it can not, and that nothing is twice."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter

import pytest

from dedup.errors import StateIncompatible, TopologyError
from dedup.spark.stream import StreamOptions
from dedup.spark.watermark import differences, start_watermark
from tests.integration.fleet import Job
from tests.integration.workload import BASE_MS, Event

pytestmark = pytest.mark.timeout(600)

ANY_TIME = {"message.timestamp.after.max.ms": str(2**63 - 1)}


@pytest.fixture
def job(kafka, admin, tmp_path, topic_names):
    made = Job(
        kafka, admin, tmp_path / "job", topic_names("job"), document={"guard_period": "1h"}, source_config=ANY_TIME
    )
    yield made
    made.end()


@pytest.fixture
def run(spark, job):
    def run(topology=None):
        options = StreamOptions(str(job.directory / "checkpoint"), exit_when_done=True, most_offsets=200)
        running = start_watermark(spark, topology or job.topology, job.settings, options)
        running.wait()
        return running

    return run


def event(number, *, at_s=0, value=None):
    time_ms = BASE_MS + at_s * 1000
    return Event(number % 2, value or json.dumps({"id": f"id-{number}"}).encode(), time_ms, b"k%d" % number)


def ids(job):
    return Counter(json.loads(message.value())["id"] for message in job.read(job.output))


def test_each_id_is_forwarded_once_also_over_restarts(job, run):
    job.send([event(n, at_s=n) for n in range(300)] + [event(n, at_s=n) for n in range(0, 300, 3)])
    (query,) = run().queries
    # The operator moves its watermark in a batch without input, too, which has as many partitions as any other.
    assert any(each["numInputRows"] == 0 and "addBatch" in each["durationMs"] for each in query.recentProgress)
    job.send([event(n, at_s=300) for n in range(0, 600, 2)])
    run()
    run()
    assert ids(job) == Counter({f"id-{n}": 1 for n in {*range(300), *range(0, 600, 2)}})
    found = job.read(job.output)
    assert {message.partition() for message in found} == {0, 1}
    first = next(message for message in found if json.loads(message.value())["id"] == "id-7")
    assert first.headers() == [("dedup-event-time", str(BASE_MS + 7_000).encode())]
    assert (first.key(), first.timestamp()[1], first.partition()) == (b"k7", BASE_MS + 7_000, 1)


def test_dead_letters_go_around_the_operator(job, run):
    far = Event(0, b'{"id":"future"}', 4_102_444_800_000, b"k")
    job.send([event(1), event(2, value=b"no json"), event(3, value=b"{}"), far, event(4)])
    run()
    job.send([event(5)])
    run()
    assert ids(job) == Counter(["id-1", "id-4", "id-5"])
    dead = {dict(message.headers())["dedup-reason"] for message in job.read(job.topology.dead_letter)}
    assert dead == {b"not_json", b"id_missing", b"future_time"}


def test_a_record_that_stops_being_of_the_future_meanwhile_goes_one_way(job, run):
    now_ms = int(time.time() * 1000)
    limit_ms = now_ms + job.topology.max_clock_skew_ms
    numbers = range(600)
    # One becomes due each half second of the next five minutes, while micro-batches come and go.
    job.send([Event(n % 2, b'{"id":"id-%d"}' % n, limit_ms + n * 500, b"k%d" % n) for n in numbers])
    running = run()
    dead = Counter(json.loads(message.value())["id"] for message in job.read(job.topology.dead_letter))
    assert ids(job) + dead == Counter({f"id-{n}": 1 for n in numbers})
    assert dead
    (query,) = running.queries
    assert {len(progress["sources"]) for progress in query.recentProgress} == {1}


def test_a_batch_that_spark_does_not_know_to_be_written_is_not_written_again(job, run, spark, request):
    """The sink compares each partition's rows: they must be the same ones, in the operator's half and in the other."""
    only_with_data = "spark.sql.streaming.noDataMicroBatches.enabled"
    request.addfinalizer(lambda: spark.conf.unset(only_with_data))
    spark.conf.set(only_with_data, "false")
    job.send([event(n, value=b"bad %d" % n if n % 3 == 0 else None) for n in range(90)])
    run()
    commits = job.directory / "checkpoint" / "watermark" / "commits"
    for name in ("0", ".0.crc"):
        (commits / name).unlink()
    (query,) = run().queries
    assert [progress["batchId"] for progress in query.recentProgress if progress["numInputRows"]] == [0]
    assert ids(job) == Counter({f"id-{n}": 1 for n in range(90) if n % 3})
    assert len(job.read(job.topology.dead_letter)) == 30


def test_what_the_operator_can_not_do_is_refused(job, run):
    output = dataclasses.replace(job.topology.output, headers=True)
    able = dataclasses.replace(
        job.topology, duplicates="d", output=output, window=dataclasses.replace(job.topology.window, extend=True)
    )
    with pytest.raises(TopologyError) as refused:
        run(able)
    assert {problem.text.split(":")[0] for problem in refused.value.problems} == {
        "duplicates",
        "extend",
        "output.headers",
    }


def test_the_checkpoint_of_the_exact_stream_is_refused(job, run, spark):
    job.send([event(1)])
    run()
    from dedup.spark.stream import start_stream  # noqa: PLC0415

    options = StreamOptions(str(job.directory / "checkpoint"), exit_when_done=True)
    with pytest.raises(StateIncompatible, match="semantics: 'watermark', now 'exact'"):
        start_stream(spark, job.topology, job.settings, options)


def test_a_checkpoint_of_two_queries_is_refused(job, run):
    job.send([event(1)])
    run()
    claimed = job.directory / "checkpoint" / "dedup.json"
    document = json.loads(claimed.read_text(encoding="utf-8"))
    assert document["state"].endswith(", one query")
    # As it was written before there was one query.
    document["state"] = document["state"].removesuffix(", one query")
    claimed.write_text(json.dumps(document), encoding="utf-8")
    claimed.with_name(".dedup.json.crc").unlink()
    with pytest.raises(StateIncompatible, match=r"is the checkpoint of another topology .* is forwarded again"):
        run()


def test_the_differences_name_the_topologys_numbers(job):
    text = differences(job.topology)
    assert "the guard period (3,600 s)" in text
    assert "dropped silently" in text
