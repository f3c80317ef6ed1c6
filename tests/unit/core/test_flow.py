"""`Flow` and `FlowRecord`: what a flow may yield, and which failures make a record a dead letter."""

import asyncio
import sys
from enum import StrEnum
from types import MappingProxyType

import pytest

from dedup import Flow, FlowRecord
from dedup.core.extract import Fault
from dedup.core.flow import FLOW_FAILED, MOST_YIELDED, differ, yielded

RECORD = FlowRecord("out", b"k", b'{"n": 1}', (("h", b"1"), ("h", None)), 7)
TOPICS = ("out", "eu")


def flow_of(function):
    flow = Flow()
    flow.on_unique(function)
    return flow


def test_to_changes_what_is_named_and_keeps_the_rest():
    assert RECORD.to() == RECORD
    assert RECORD.to("eu", key="x", value={"a": 1}, headers={"more": "2"}) == FlowRecord(
        "eu", b"x", b'{"a": 1}', (("h", b"1"), ("h", None), ("more", b"2")), 7
    )
    assert RECORD.to(key=None, value=None)[1:3] == (None, None)
    nested = MappingProxyType({"a": MappingProxyType({"b": 1})})
    assert RECORD.to(value=nested).value == b'{"a": {"b": 1}}', "was: not JSON serializable"
    assert (RECORD.json, RECORD.header("h"), RECORD.header("none")) == ({"n": 1}, None, None)


def test_several_records_keep_their_order():
    made = yielded(flow_of(lambda record: [record.to("eu"), record, record.to(key=b"2")]), RECORD, TOPICS)
    assert [(each.topic, each.key) for each in made] == [("eu", b"k"), ("out", b"k"), ("out", b"2")]


class Name(StrEnum):
    OWN = "out"


def raised(error):
    raise error


def noted():
    error = ValueError("real")
    error.add_note("a note")
    return error


def test_headers_are_taken_once_and_later_changes_do_not_reach_them():
    names = [("a", b"1")]

    def changing(record):
        yield record._replace(headers=names)
        names.append(("b", 5))
        yield record._replace(headers=(each for each in [("c", b"2")]))

    made = yielded(flow_of(changing), RECORD, TOPICS)
    assert [each.headers for each in made] == [(("a", b"1"),), (("c", b"2"),)]


def test_two_failures_do_not_differ_whatever_their_texts_say():
    first, second = (yielded(flow_of(lambda record: raised(ValueError(object()))), RECORD, TOPICS) for _ in range(2))
    assert not differ(first, second)
    assert differ(first, [])
    assert differ([RECORD], [RECORD, RECORD])


def failing(record):
    yield record
    raise ValueError("bad \ud800 " + "x" * 1_000)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (failing, "ValueError: bad \\ud800 x"),
        (lambda record: None, "TypeError"),
        (lambda record: record, "yields a str"),
        (lambda record: [record.to("elsewhere")], "neither the output nor in `routes`"),
        (lambda record: [record._replace(timestamp_ms=8)], "timestamp_ms"),
        (lambda record: [record._replace(value="text")], "cannot be sent"),
        (lambda record: [record._replace(headers=((1, b""),))], "cannot be sent"),
        (lambda record: [record.to(headers={b"x": b"1"})], "its name is bytes, not str"),
        (lambda record: [record.to(headers={"\ud800": b"1"})], "cannot be sent"),
        (lambda record: [record.to(value=1)], "TypeError"),
        (lambda record: sys.exit(0), "SystemExit: 0"),
        (lambda record: raised(asyncio.CancelledError()), "CancelledError"),
        (lambda record: raised(noted()), "ValueError: real"),
        (lambda record: [record._replace(headers=((Name.OWN, b""),))], "cannot be sent"),
        (lambda record: [record._replace(topic=Name.OWN)], "neither the output"),
        (lambda record: [record._replace(headers=5)], "cannot be sent"),
        (lambda record: [record] * (MOST_YIELDED + 1), "more than"),
    ],
)
def test_a_failure_is_a_fault_that_says_why(function, says):
    fault = yielded(flow_of(function), RECORD, TOPICS)
    assert isinstance(fault, Fault)
    assert fault.code == FLOW_FAILED
    assert says in fault.detail
    assert len(fault.detail) <= 500
    fault.detail.encode()


def test_a_flow_has_one_function_which_is_not_async():
    async def waits(record):
        return [record]

    async def generates(record):
        yield record

    for function in (waits, generates):
        with pytest.raises(TypeError, match="async"):
            flow_of(function)
    flow = flow_of(lambda record: [record])
    with pytest.raises(ValueError, match="already"):
        flow.on_unique(lambda record: [])
