"""A flow in `TopologyTestDriver`: headers, partitions, failures that change later verdicts, and what is counted."""

import itertools
import json
import sys
import textwrap
from types import SimpleNamespace

import pytest

from dedup import TopologyTestDriver
from dedup.core.partitioner import partitions
from dedup.errors import RecordFailed, RecordRefused, TopologyError
from dedup.topology.parse import parse
from dedup.worker.record_collector import Refusals, SideTopics

NOW = "2024-01-01T12:00:00Z"
NOW_MS = 1_704_110_400_000


@pytest.fixture
def topology(tmp_path, request):
    """Return a function that makes a topology with a flow of this body, which yields for `record` and `value`."""
    made = []

    def make(body, **changes):
        name = f"flow_{abs(hash((request.node.nodeid, len(made))))}"
        made.append(name)
        code = "import random\nfrom dedup import Flow\nflow = Flow()\n@flow.on_unique\ndef route(record):\n    value = record.json\n"
        (tmp_path / f"{name}.py").write_text(code + textwrap.indent(textwrap.dedent(body), "    "))
        document = {
            "dedup": 1,
            "name": "t",
            "source": {"topics": ["in"], "partitioned_by": "tracking_id"},
            "tracking_id": {"field": "id"},
            "guard_period": "10s",
            "output": {"topic": "out"},
            "then": f"{name}:flow",
            "routes": ["eu"],
        }
        return parse(json.dumps(document | changes), name=str(tmp_path / "t.yaml"))

    return make


def test_every_yielded_record_says_where_it_comes_from(topology):
    body = """
    if value["id"] == "none":
        return
    yield record.to("eu", headers={"more": b"1"})
    if value["id"] == "two":
        yield record
    """
    with TopologyTestDriver(topology(body), now=NOW) as driver:
        for name in ("one", "none", "two", "none"):
            driver.feed({"id": name}, key="k", headers={"own": "h"})
        (out,), eu = driver.read_output(), driver.read("eu")
        assert driver.verdicts == {"unique": 3, "duplicate": 1}
    assert out.headers == (("own", b"h"), ("dedup-source", b"in/0/2"), ("dedup-part", b"2/2"))
    assert [each.headers for each in eu] == [
        (("own", b"h"), ("more", b"1"), ("dedup-source", b"in/0/0")),
        (("own", b"h"), ("more", b"1"), ("dedup-source", b"in/0/2"), ("dedup-part", b"1/2")),
    ]
    assert {each.timestamp_ms for each in (out, *eu)} == {NOW_MS}


def test_only_an_unchanged_key_in_the_output_keeps_its_partition(topology):
    body = """
    yield record
    yield record.to(key="other")
    yield record.to("eu")
    yield record.to("eu", key=None)
    """
    with TopologyTestDriver(topology(body), now=NOW, partitions=5) as driver:
        driver.feed({"id": "a"}, key="k", partition=3)
        found = {(each.topic, each.key): each.partition for topic in ("out", "eu") for each in driver.read(topic)}
    keys = {("out", b"other"): b"other", ("eu", b"k"): b"k", ("eu", None): b"\x01a"}
    assert found == {("out", b"k"): 3} | {place: partitions([key], 5)[0] for place, key in keys.items()}


def test_a_dead_letter_of_the_flow_is_no_sighting(topology):
    body = """
    if value["bad"]:
        raise ValueError("no country")
    yield record
    """
    with TopologyTestDriver(topology(body), now=NOW) as driver:
        driver.feed({"id": "a", "bad": 1}, {"id": "a", "bad": 1}, {"id": "a", "bad": 0}, {"id": "a", "bad": 1})
        many = [{"id": number, "bad": number % 2} for number in range(300)]
        driver.feed(*many)
        out, dead = driver.read_output(), driver.read_dead_letters()
        assert driver.verdicts == {"unique": 151, "duplicate": 1, "dead_letter": 152}
    assert [each.json["id"] for each in out] == ["a", *range(0, 300, 2)]
    assert [each.json["id"] for each in dead] == ["a", "a", *range(1, 300, 2)]
    assert {(each.header("dedup-reason"), each.header("dedup-detail")) for each in dead} == {
        (b"flow_failed", b"ValueError: no country")
    }


def test_a_forwarded_record_without_a_verdict_passes_with_its_reason(topology):
    changes = {"late": "forward", "on_conflict": "forward", "tracking_id": {"field": "id", "missing": "forward"}}
    body = """
    if value == "stop":
        raise KeyError(record.verdict)
    yield record.to("eu", headers={"saw": record.verdict})
    """
    with TopologyTestDriver(topology(body, **changes), now=NOW) as driver:
        driver.feed({"id": "a", "n": 1}, timestamp=NOW_MS)
        driver.feed({"id": "a", "n": 2}, {"n": 1}, None, "[]", timestamp=NOW_MS)
        driver.feed({"id": "late"}, timestamp=NOW_MS - 20_000)
        driver.feed('"stop"', timestamp=NOW_MS)
        found = [(each.header("saw"), each.header("dedup-verdict")) for each in driver.read("eu")]
        (dead,) = driver.read_dead_letters()
    assert found == [
        (b"unique", None),
        (b"conflict", b"conflict"),
        (b"missing_id", b"missing_id"),
        (b"tombstone", b"tombstone"),
        (b"missing_id", b"missing_id"),
        (b"late", b"late"),
    ]
    assert dead.header("dedup-detail") == b"KeyError: 'missing_id'"


def test_a_record_too_large_for_a_route_takes_its_other_outputs_with_it(topology):
    body = """
    yield record
    if value["id"] == "big":
        yield record.to("eu", value=random.Random(1).randbytes(2_000_000))
    """
    with TopologyTestDriver(topology(body), now=NOW) as driver:
        driver.feed({"id": "a"}, {"id": "big"}, {"id": "b"}, key="k")
        assert [each.json["id"] for each in driver.read_output()] == ["a", "b"]
        assert driver.read("eu") == []
        (dead,) = driver.read_dead_letters()
    assert (dead.json["id"], dead.header("dedup-reason")) == ("big", b"refused_by_broker")


def test_records_for_several_partitions_that_are_refused_at_once_condemn_their_source_once(topology):
    body = """
    noise = random.Random(1).randbytes(2_000_000)
    yield from [record.to("eu", key=key, value=noise) for key in "abcd"] if value["id"] == "big" else [record]
    """
    with TopologyTestDriver(topology(body), now=NOW, partitions=4) as driver:
        driver.advance_clock("2m")  # the limits are no longer trusted, so the broker decides
        driver.feed({"id": "big"}, {"id": "b"}, key="k")
        assert [each.json["id"] for each in driver.read_output()] == ["b"]
        (dead,) = driver.read_dead_letters()
    assert (dead.json["id"], dead.header("dedup-reason")) == ("big", b"refused_by_broker")


def test_a_batch_that_is_folded_again_runs_the_flow_once_for_each_record(topology):
    body = """
    global calls
    calls = globals().get("calls", 0) + 1
    yield record.to("eu", value=random.Random(1).randbytes(2_000_000)) if value["id"] % 2 else record
    """
    made = topology(body)
    with TopologyTestDriver(made, now=NOW) as driver:
        driver.feed(*({"id": number} for number in range(40)), key="k")
        assert (len(driver.read_output()), len(driver.read_dead_letters())) == (20, 20)
    # At first the whole batch, and then its parts; each time without another one of the records that are too large.
    assert sys.modules[made.then.name.partition(":")[0]].calls <= 80


def test_on_error_stop_stops_at_the_record(topology):
    made = topology("raise ValueError('no')\nyield record")
    stopping = {"flow": made.then.name, "on_error": "stop"}
    made = topology("yield record", then=stopping)
    stops = pytest.raises(RecordFailed, match=r"in/0/0: the flow failed: ValueError: no\. .*on_error: stop")
    with TopologyTestDriver(made, now=NOW) as driver, stops:
        driver.feed({"id": "a"})


def test_the_order_of_what_is_yielded_is_the_order_in_its_partition(topology):
    with TopologyTestDriver(
        topology("yield record.to(key='x')\nyield record\nyield record.to(key='y')"), now=NOW
    ) as driver:
        driver.feed({"id": "a"}, {"id": "b"}, key="k")
        found = [(each.json["id"], each.key, each.header("dedup-part")) for each in driver.read_output()]
    keys = (b"x", b"k", b"y")
    assert found == [(name, key, b"%d/3" % part) for name in "ab" for part, key in enumerate(keys, start=1)]


def test_a_refused_batch_of_one_record_s_outputs_is_tried_again_and_condemns_it_instead_of_being_cut():
    refusals = Refusals()
    refused = RecordRefused("too large", topic="eu", partition=0, rows=(5, 5, 5), too_large=True)
    assert refusals.learn(refused, SideTopics("dead", None)) is None
    assert (refusals.rows, refusals.cuts) == ({}, {})
    assert refusals.learn(refused, SideTopics("dead", None)) is None
    assert (refusals.rows, refusals.cuts) == ({("eu", 5): "too large"}, {})


def test_a_batch_that_is_judged_in_pieces_calls_the_flow_once_for_each_record(topology):
    """Was: with four failures in a batch the flow ran nearly twice, and its time was counted anew for each piece."""
    body = """
    globals().setdefault("CALLS_OF_FLOW", []).append(value["id"])
    if value["id"] < 4:
        raise ValueError
    yield record
    """
    with TopologyTestDriver(topology(body), now=NOW) as driver:
        driver.feed(*({"id": number} for number in range(300)))
        assert driver.verdicts == {"unique": 296, "dead_letter": 4}
        assert len(driver.read_output()) == 296
    (calls,) = [each.CALLS_OF_FLOW for each in list(sys.modules.values()) if getattr(each, "CALLS_OF_FLOW", None)]
    assert sorted(calls) == list(range(300))


def test_the_time_that_the_yielded_records_take_counts_toward_the_limit(topology, monkeypatch):
    """Was: only the calls counted. A flow that yielded hundreds of records each kept heartbeats away unnoticed."""
    ticks = itertools.count(0, 600)
    monkeypatch.setattr("dedup.worker.flow_collector.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    slow = pytest.raises(TopologyError, match=r"in/0/0: the flow's function route took 1875\.0 s for 2 records")
    with TopologyTestDriver(topology("yield record"), now=NOW) as driver, slow:
        driver.feed({"id": "a"}, {"id": "b"})
