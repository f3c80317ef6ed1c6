"""Records of a repartition topic are unwrapped in columns; row by row, with every record on its own, gives the same."""

from types import SimpleNamespace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from dedup.verify import repartitioned
from dedup.verify.evidence import IDLE_HEADER, SOURCE_HEADER, TIMESTAMP_HEADER
from dedup.verify.kafka_reader import RecordColumns
from dedup.verify.report import Report

TOPICS = ("orders", "a.topic.with.a.name.longer.than.any.number")
NUMBERS = st.one_of(st.integers(0, 99).map(str), st.sampled_from(["", "-1", "x", "1" * 30, "\u0663"])).map(str.encode)
FEEDS = st.sampled_from(
    [b"orders/0", b"a.topic.with.a.name.longer.than.any.number/1", b"elsewhere/0", b"orders/x", b"orders"]
)
STAMPS = st.tuples(st.just(TIMESTAMP_HEADER), st.one_of(st.none(), NUMBERS))
RECORDS = st.tuples(st.tuples(st.just(SOURCE_HEADER), st.builds(b"%b/%b".__mod__, st.tuples(FEEDS, NUMBERS))), STAMPS)
PLAIN = st.tuples(
    st.integers(0, 9).map(lambda n: (SOURCE_HEADER, b"orders/0/%d" % n)), st.just((TIMESTAMP_HEADER, b"7"))
)
MARKERS = st.tuples(st.tuples(st.just(IDLE_HEADER), FEEDS), STAMPS)
ODD = st.sampled_from([(), ((SOURCE_HEADER, b"orders/0/1"),), ((SOURCE_HEADER, None), (TIMESTAMP_HEADER, b"1"))])
ROWS = st.lists(
    st.tuples(st.sampled_from([(), (("own", b"1"),)]), st.one_of(PLAIN, PLAIN, RECORDS, MARKERS, ODD)), max_size=8
)


def unwrapped(rows):
    headers = [[*own, *appended] for own, appended in rows]
    columns = RecordColumns(list(range(len(rows))), headers=headers, timestamps_ms=[99] * len(rows))
    report = Report("t", "", "", 0)
    source = SimpleNamespace(topics=TOPICS)
    cut = SimpleNamespace(
        report=report, topology=SimpleNamespace(source=source, repartition_topic="r", passes_ids_on=False)
    )
    sources, idle_rows = repartitioned._unwrap(cut, columns, 0)
    return list(map(tuple, sources)), idle_rows, columns.headers, columns.timestamps_ms, report.counts


@given(ROWS)
def test_columns_and_rows_agree(rows):
    with patch.object(repartitioned, "_positions_at_once", lambda *_: None):
        expected = unwrapped(rows)
    assert unwrapped(rows) == expected


def test_a_marker_does_not_slow_down_the_records_beside_it():
    marker = ((), ((IDLE_HEADER, b"orders/0"), (TIMESTAMP_HEADER, b"1")))
    record = ((), ((SOURCE_HEADER, b"%b/0/1" % TOPICS[1].encode()), (TIMESTAMP_HEADER, b"2")))
    with patch.object(repartitioned, "parse_time_ms", wraps=repartitioned.parse_time_ms) as one_by_one:
        assert unwrapped([record, marker, record])[1] == {1}
    assert one_by_one.call_count == 1
