"""`TopologyTestDriver`: every place a record can end, the clock, idle partitions, refusals, and what it refuses."""

import asyncio
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dedup import FlowRecord, TopologyTestDriver, load_topology
from dedup.errors import RecordFailed, StateIncompatible
from dedup.kafka.record_batch import OWN_ROW, TopicPartition
from dedup.topology.parse import parse
from dedup.worker.topology_test_driver import OutputRecord

ROOT = Path(__file__).parents[3]
NOW = "2024-01-01T12:00:00Z"
NOW_MS = 1_704_110_400_000
SECOND_MS = 1_000


def topology(**changes):
    document = {
        "dedup": 1,
        "name": "t",
        "source": {"topics": ["in"], "partitioned_by": "tracking_id"},
        "tracking_id": {"field": "id"},
        "guard_period": "10s",
        "output": {"topic": "out"},
    }
    text = json.dumps({key: value for key, value in (document | changes).items() if value is not None})
    return parse(text, name="t.yaml")


def driver(topology, **options):
    return TopologyTestDriver(topology, now=NOW, **options)


def test_with_arrival_the_clock_says_when_a_record_came():
    with driver(topology(event_time="arrival")) as made:
        made.feed({"id": "a"})
        made.advance_clock("9s")
        made.feed({"id": "a"})
        made.advance_clock("1s")
        made.feed({"id": "a"})
        assert [record.timestamp_ms for record in made.read_output()] == [NOW_MS, NOW_MS + 10 * SECOND_MS]
        with pytest.raises(ValueError, match="advance_clock"):
            made.feed({"id": "b"}, timestamp=NOW_MS)


@pytest.mark.parametrize("source", [{"topics": ["in"], "partitioned_by": "tracking_id"}, {"topics": ["in"]}])
def test_with_arrival_a_producers_time_stops_the_task_after_what_came_before(source):
    with driver(topology(event_time="arrival", source=source)) as made:
        configs = made._wire._topics["in"].configs
        made._wire.append(TopicPartition("in", 0), [(OWN_ROW, 5, None, b'{"id":"a"}', [])])
        configs.pop("message.timestamp.type")
        with pytest.raises(StateIncompatible, match="in/0 offset 1 has the time that its producer wrote"):
            made.feed({"id": "b"})
        columns = made._wire.read(TopicPartition(made.topology.feeding_topics[0], 0), 0)
        assert b'{"id":"a"}' in columns.values
        assert made._groups[TopicPartition("in", 0)].tasks[TopicPartition("in", 0)].numbers.committed_offset == 1
        # The hop behind the repartition topic has not run.
        assert ids(made.read_output()) == (["a"] if made.topology.direct else [])
        assert made.read_dead_letters() == []


def ids(records):
    return [record.json["id"] for record in records]


def test_every_record_goes_to_its_place_with_its_headers():
    places = {"duplicates": "twice", "conflicts": "other", "output": {"topic": "out", "headers": True}}
    with driver(topology(**places)) as made:
        made.feed({"id": "a", "n": 1}, key="k", headers={"trace": "1", "none": None})
        made.feed('{"id": "a", "n": 1}', {"id": "a", "n": 2}, b"no json", None, timestamp=NOW_MS + SECOND_MS)
        made.feed({"id": "b"}, timestamp="2024-01-01T12:00:30Z")
        made.feed({"id": "c"}, timestamp=datetime(2024, 1, 1, 12, 0, 19, 999_000, tzinfo=UTC))
        out, twice, other = made.read_output(), made.read_duplicates(), made.read_conflicts()
        late, dead = made.read_late(), made.read_dead_letters()
        assert made.read("out") == []
        assert made.verdicts == {"unique": 2, "duplicate": 2, "late": 1, "dead_letter": 1, "exempt": 1}
    first = out[0]
    assert (first.topic, first.partition, first.offset, first.timestamp_ms, first.key) == ("out", 0, 0, NOW_MS, b"k")
    assert first.headers == (("trace", b"1"), ("none", None), ("dedup-source", b"in/0/0"))
    assert (first.header("trace"), first.header("absent")) == (b"1", None)
    assert [(record.value and record.json["id"], record.header("dedup-verdict")) for record in out] == [
        ("a", None),
        (None, b"tombstone"),
        ("b", None),
    ]
    assert [record.header("dedup-first-source") for record in (*twice, *other)] == [b"in/0/0", b"in/0/0"]
    assert [record.json["n"] for record in (*twice, *other)] == [1, 2]
    assert (ids(late), late[0].header("dedup-source")) == (["c"], b"in/0/6")
    # Their topics stamp records when they are appended.
    assert {record.timestamp_ms for record in (*late, *dead)} == {NOW_MS}
    assert [(record.value, record.header("dedup-reason")) for record in dead] == [(b"no json", b"not_json")]


def test_the_clock_limits_event_times_and_moves_no_stream_time():
    with driver(topology(max_clock_skew="1m")) as made:
        ahead = NOW_MS + 61 * SECOND_MS
        made.feed({"id": "a"}, timestamp=ahead)
        assert made.read_dead_letters()[0].header("dedup-reason") == b"future_time"
        made.advance_clock("1s")
        made.feed({"id": "a"}, timestamp=ahead)
        made.advance_clock(timedelta(days=1))
        assert made.now_ms == NOW_MS + 86_401 * SECOND_MS
        # Only a record moves stream time, so nothing was forgotten and nothing is late.
        made.feed({"id": "a"}, {"id": "b"}, timestamp=ahead)
        assert ids(made.read_output()) == ["a", "b"]
        # The clock is the timestamp of a record that has none.
        made.feed({"id": "a"})
        assert made.read_output()[0].timestamp_ms == made.now_ms
        with pytest.raises(ValueError, match="never goes back"):
            made.advance_clock(timedelta(seconds=-1))
        with pytest.raises(ValueError, match='"5" has no unit'):
            made.advance_clock("5")


def test_the_slowest_source_partition_holds_stream_time_back_until_it_is_idle():
    with driver(topology(source={"topics": ["in", "more"]}), partitions={"in": 1, "more": 2}) as made:
        made.feed({"id": "a"}, topic="in", timestamp=NOW_MS + 100 * SECOND_MS)
        made.feed({"id": "b"}, topic="more", partition=1, timestamp=NOW_MS)
        made.feed({"id": "c"}, topic="in", timestamp=NOW_MS + 50 * SECOND_MS)
        assert made.read_late() == []
        made.idle(0, topic="more")
        made.idle(1, topic="more")
        made.feed({"id": "d"}, topic="in", timestamp=NOW_MS + 50 * SECOND_MS)
        assert ids(made.read_late()) == ["d"]
        assert sorted(ids(made.read_output())) == ["a", "b", "c"]
        # An ID is found again whichever partition it comes from.
        made.feed({"id": "a"}, topic="more", partition=1, timestamp=NOW_MS + 99 * SECOND_MS)
        assert (made.read_output(), made.verdicts["duplicate"]) == ([], 1)
        assert {record.topic for record in made.read("t.repartition")} == {"t.repartition"}


@pytest.mark.parametrize("source", [{"topics": ["in"], "partitioned_by": "tracking_id"}, {"topics": ["in"]}])
def test_a_failing_record_stops_the_driver_like_a_worker(source):
    policy = {"field": "id", "missing": "fail"}
    with driver(topology(source=source, tracking_id=policy)) as made:
        made.feed({"id": "a"})
        with pytest.raises(RecordFailed, match=r"^in/0/2: .*`missing: fail`"):
            made.feed({"id": "b"}, {"n": 1})
        with pytest.raises(RecordFailed):
            made.feed({"id": "c"})
        assert ids(made.read_output()) == ["a"]


def test_a_record_too_large_for_a_topic_is_a_dead_letter_also_when_only_the_broker_knows():
    with driver(topology()) as made:
        digits = "".join(f"{number:x}" for number in range(300_000))
        made.feed({"id": "a", "pad": digits})
        # The limits of topics are trusted for a minute; then the broker decides, in an aborted transaction.
        made._wire._topics["out"].configs["max.message.bytes"] = "1000"
        made.advance_clock("2m")
        made.feed({"id": "b", "pad": digits[:10_000]}, {"id": "c"}, {"id": "c"})
        assert ids(made.read_output()) == ["c"]
        dead = made.read_dead_letters()
        assert [record.header("dedup-reason") for record in dead] == [b"refused_by_broker"] * 2
        assert [record.value is None for record in dead] == [True, False]
        assert dead[0].header("dedup-digest").endswith(b" of %d bytes" % len(json.dumps({"id": "a", "pad": digits})))
        assert made._factory.transactions == {"committed": 2, "aborted": 1}


def test_keys_choose_partitions_as_the_default_partitioner_does():
    keyed = topology(source={"topics": ["in"], "format": "bytes"}, tracking_id={"key": True})
    with driver(keyed, partitions=4) as made:
        for key in "abcdabcd":
            made.feed(b"\xff", key=key)
        found = made.read_output()
    assert sorted(record.key for record in found) == [b"a", b"b", b"c", b"d"]
    assert len({record.partition for record in found}) > 1


@pytest.mark.parametrize(
    ("source_format", "rule", "value", "headers"),
    [
        ("json", {"field": "id"}, b'{"id": 1}', ()),
        ("json_schema", {"field": "id"}, b'\0\0\0\0\x07{"id": 1}', ()),
        ("json_schema", {"field": "id"}, b'{"id": 1}', {"__value_schema_id": b"\x01" + bytes(16)}),
        ("msgpack", {"field": "id"}, b"\x81\xa2id\x01", ()),
        ("cbor", {"field": "id"}, b"\xa1\x62id\x01", ()),
        ("csv", {"field": "id"}, b'"1"\n', ()),
        ("json", {"content": {"exclude": ["at"]}}, b'{"id": 1}', ()),
        ("bytes", {"content": True}, b"\xff\x00", ()),
        ("bytes", {"header": "id"}, b"\xff\x00", {"id": "1"}),
    ],
)
def test_values_of_every_format_and_ids_of_every_rule(source_format, rule, value, headers):
    columns = {"columns": ["id"]} if source_format == "csv" else {}
    read = topology(source={"topics": ["in"], "format": source_format, **columns}, tracking_id=rule)
    with driver(read) as made:
        made.feed(value, value, headers=headers)
        (found,) = made.read_output()
        assert (found.value, dict(found.headers)) == (
            value,
            {name: made_bytes(each) for name, each in dict(headers).items()},
        )
        assert made.verdicts == {"unique": 1, "duplicate": 1}


def made_bytes(text):
    return text.encode() if isinstance(text, str) else text


def test_start_latest_reads_what_is_fed():
    with driver(topology(source={"topics": ["in"], "start": "latest"})) as made:
        made.feed({"id": "a"})
        assert ids(made.read_output()) == ["a"]


async def test_it_runs_inside_an_event_loop():
    with driver(topology()) as made:
        made.feed({"id": "a"})
        await asyncio.sleep(0)
        assert ids(made.read_output()) == ["a"]


def test_what_is_asked_wrongly_is_said():
    with driver(topology(output=None, late="drop", dead_letter="dead"), partitions=2) as made:
        for role in ("output", "late", "duplicates", "conflicts"):
            with pytest.raises(ValueError, match=f"names no topic for '{role}'"):
                getattr(made, f"read_{role}")()
        with pytest.raises(ValueError, match="does not write to 'in', but to dead, "):
            made.read("in")
        with pytest.raises(ValueError, match="name one of the source topics: in"):
            made.feed({}, topic="dead")
        with pytest.raises(ValueError, match="in has the partitions 0 to 1"):
            made.feed({}, partition=2)
        with pytest.raises(ValueError, match="no repartition topic"):
            made.idle()
        with pytest.raises(ValueError, match="has no time zone"):
            made.feed({}, timestamp=datetime(2024, 1, 1))  # noqa: DTZ001  # that is the mistake
        with pytest.raises(ValueError, match="is not a time"):
            made.feed({}, timestamp="yesterday")
    for wrong in ({"in": 0}, {"other": 1}, 0):
        with pytest.raises(ValueError, match="for each source topic: in"):
            driver(topology(), partitions=wrong)
    made.close()
    for call in (made.feed, lambda: made.read("dead"), lambda: made.advance_clock("1s")):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize(
    "name", ["chain", "content-hash", "flights", "observe-only", "orders", "payments-key", "simplest", "two-sources"]
)
def test_every_example_runs(name):
    with TopologyTestDriver(load_topology(f"topologies/{name}.yaml"), partitions=3) as made:
        for topic in made.topology.source.topics:
            made.feed({}, topic=topic)
        assert made.verdicts.total() == len(made.topology.source.topics)


def test_the_examples_of_the_docs_pass_as_they_are_written(tmp_path):
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    examples = [
        text for text in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "feed" in text
    ]
    assert len(examples) == 5
    assert len(examples[0].splitlines()) <= 15
    for number, text in enumerate(examples):
        (tmp_path / f"test_example_{number}.py").write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    # The options of the outer run, such as a file for its results, are not for this one.
    environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "5 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_values_that_name_their_schemas():
    source = {"topics": ["in"], "format": "avro", "partitioned_by": "tracking_id"}
    made = topology(source=source)
    with pytest.raises(ValueError, match="leave out `schemas`"):
        TopologyTestDriver(topology(), schemas={})
    with pytest.raises(ValueError, match=r"such as `schemas=\{1: text\}`"):
        TopologyTestDriver(made)
    guid = "00010203-0405-0607-0809-0a0b0c0d0e0f"
    schema = json.dumps({"type": "record", "name": "R", "fields": [{"name": "id", "type": "string"}]})
    with TopologyTestDriver(made, schemas={7: schema, guid.upper(): schema}) as known:
        known.feed(b"\0\0\0\0\7\2a", b"\0\0\0\0\7\2b", b"\0\0\0\0\x08\2c")
        known.feed(b"\2b", headers={"__value_schema_id": b"\1" + bytes(range(16))})
        assert known.verdicts == {"unique": 2, "duplicate": 1, "dead_letter": 1}


def test_keys_that_name_their_schemas():
    schema = json.dumps({"type": "record", "name": "K", "fields": [{"name": "id", "type": "string"}]})
    wider = json.dumps(
        {"type": "record", "name": "K", "fields": [{"name": "n", "type": "int"}, {"name": "id", "type": "string"}]}
    )
    made = topology(source={"topics": ["in"], "key_format": "avro"}, tracking_id={"key": "id"})
    with pytest.raises(ValueError, match="values or keys name their schemas"):
        TopologyTestDriver(made)
    with TopologyTestDriver(made, schemas={1: schema, 2: wider}) as known:
        known.feed(b"1", key=b"\0\0\0\0\1\2a")
        known.feed(b"2", key=b"\0\0\0\0\2\x0e\2a")
        known.feed(b"3", key=b"\0\0\0\0\3\2a")
        known.feed(b"4", key=b"\2a", headers={"__key_schema_id": b"\0\0\0\0\1"})
        assert known.verdicts == {"unique": 1, "duplicate": 2, "dead_letter": 1}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"key": 5}, "key: 5 is neither bytes nor a string"),
        ({"headers": {"a": 1}}, "headers: a: 1 is neither bytes nor a string"),
        ({"timestamp": 1.5}, "timestamp: 1.5 is no time; write milliseconds as an int"),
    ],
)
def test_an_argument_of_another_type_is_named(wrong, says):
    with driver(topology()) as made, pytest.raises(TypeError, match=says):
        made.feed({"id": "a"}, **wrong)


def test_a_duration_and_a_schema_of_another_type_are_named():
    with driver(topology()) as made, pytest.raises(TypeError, match="5 is no duration"):
        made.advance_clock(5)
    framed = topology(source={"topics": ["in"], "partitioned_by": "tracking_id", "format": "avro"})
    with pytest.raises(TypeError, match="schemas: the schema 7 is a dict; pass its text"):
        TopologyTestDriver(framed, schemas={7: {}})


def test_json_of_a_framed_value_leaves_the_framing_out():
    """Was: a UnicodeDecodeError."""
    framed = b"\0\0\0\0\7" + b'{"id": "a"}'
    assert FlowRecord("out", None, framed, (), 0).json == {"id": "a"}
    assert OutputRecord("out", 0, 0, 0, None, framed, ()).json == {"id": "a"}
