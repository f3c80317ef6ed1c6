"""Header names that are not UTF-8: one such record must not take its batch, or the worker, with it."""

import gc
import weakref

import pytest
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.util import calc_crc32c
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.event_time import RecordTime
from dedup.core.extract import compile_extractor
from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.core.tracking_id import FieldRule, TrackingId, parse_path
from dedup.errors import DedupError
from dedup.kafka import record_batch
from dedup.kafka.record_batch import FeedBatch, TopicPartition, columns_of, records_of
from dedup.metrics import TaskNumbers
from dedup.worker.record_collector import Limits, RecordCollector, Refusals, Route, Routes
from dedup.worker.repartition_task import RepartitionPlan, RepartitionTask
from dedup.worker.task import SteadyClock
from tests.odd_names import ODD, WRITTEN, batch

FEED = TopicPartition("in", 0)
some_bytes = st.none() | st.binary(max_size=40)
row = st.tuples(
    st.integers(0, 1 << 42),
    some_bytes,
    some_bytes,
    st.lists(st.tuples(st.text(max_size=5).filter(lambda name: ODD not in name), some_bytes), max_size=3),
)


@given(st.lists(row, min_size=1, max_size=8), st.integers(0, 1 << 40), st.sampled_from([0, 1, 2, 3, 4]))
def test_without_odd_names_it_reads_what_aiokafka_reads(rows, base_offset, compression):
    raw = batch(rows, base_offset=base_offset, compression=compression)
    strict = [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in DefaultRecordBatch(raw)]
    records, odd = records_of(raw, base_offset)
    assert [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in records] == strict
    assert not odd


ROWS = [
    (1_000, b"k0", b'{"id":"a"}', [("plain", b"1")]),
    (1_001, b"k1", b'{"id":"b"}', [("plain", b"1"), (ODD, b"\xff2"), (ODD, None)]),
    (1_002, b"k2", b'{"id":"c"}', []),
]


@pytest.fixture
def columns():
    """Return two batches of an answer, the second with an odd record in its middle, and where it ends."""
    raw = batch(ROWS[:1]) + batch(ROWS, base_offset=1)
    found, position = columns_of(FEED, raw, [], 0)
    assert position == 4
    return found


def test_the_record_is_read_and_named_and_so_are_its_neighbours(columns):
    assert columns.offsets == [0, 1, 2, 3]
    assert columns.keys == [b"k0", b"k0", b"k1", b"k2"]
    assert columns.values == [b'{"id":"a"}', b'{"id":"a"}', b'{"id":"b"}', b'{"id":"c"}']
    assert columns.timestamps_ms == [1_000, 1_000, 1_001, 1_002]
    assert columns.headers[2] == [("plain", b"1"), (WRITTEN, b"\xff2"), (WRITTEN, None)]
    assert columns.odd_names == {2}
    assert columns.cut(1, 3).odd_names == {2}


def test_reading_begins_behind_it():
    found, _ = columns_of(FEED, batch(ROWS, base_offset=1), [], 3)
    assert found.offsets == [3]


@pytest.mark.parametrize("cut_bytes", [1, 10, 60])
def test_a_batch_that_ends_inside_a_record_is_refused(cut_bytes):
    raw = batch(ROWS)
    with pytest.raises(CorruptRecordException):
        records_of(raw[:-cut_bytes], 0)


def test_a_damaged_batch_is_named_with_what_to_do():
    """Was: the worker ended with a traceback."""
    raw = bytearray(batch(ROWS[:1]) + batch(ROWS, base_offset=1))
    raw[-1] ^= 1
    with pytest.raises(DedupError, match=r"^in/0: the batch at offset 1 has a wrong checksum.* intact"):
        columns_of(FEED, bytes(raw), [], 0)


@pytest.mark.parametrize("quick", [True, False], ids=["google-crc32c", "aiokafka"])
@pytest.mark.parametrize("damaged", [0, 1], ids=["first", "second"])
def test_damage_to_any_byte_that_the_checksum_covers_is_noticed(quick, damaged, monkeypatch):
    monkeypatch.setattr(record_batch, "_QUICK_CRC", quick)
    intact = [batch(ROWS[:1]), batch(ROWS, base_offset=1)]
    assert columns_of(FEED, b"".join(intact), [], 0)[1] == 4
    for at in range(17, len(intact[damaged])):
        raw = [bytearray(each) for each in intact]
        raw[damaged][at] ^= 1
        with pytest.raises(DedupError, match=rf"^in/0: the batch at offset {damaged} has a wrong checksum"):
            columns_of(FEED, b"".join(raw), [], 0)


def test_google_crc32c_has_its_c_code_here():
    assert record_batch._QUICK_CRC


def test_another_batch_is_not_taken_for_it():
    with pytest.raises(CorruptRecordException, match="no batch begins at offset 7"):
        records_of(batch(ROWS), 7)


def test_a_repartition_task_makes_it_a_dead_letter(columns):
    extractor = compile_extractor(TrackingId(FieldRule(parse_path("id"))), RecordTime(), fmt="json", fingerprint=False)
    plan = RepartitionPlan(FEED, "re", 1, extractor, 0, "earliest")
    publisher = RecordCollector(
        Routes(("in",), None, Route("dead", 1), None), 0, Limits({}, SteadyClock().now_ms, None)
    )
    numbers = TaskNumbers()
    work = RepartitionTask(plan, None, publisher, SteadyClock(), numbers, None)
    judged = work.judge(FeedBatch.of(FEED, columns, follows=0), Refusals())
    assert {made.target.topic: made.rows for made in judged} == {"re": [0, 1, 3], "dead": [2]}
    work.freeze(4).apply({})
    assert numbers.verdicts == {"repartitioned": 3, "dead_letter": 1}
    assert numbers.dead_reasons == {ODD_HEADER_NAME.code: 1}


def test_a_response_is_freed_without_a_garbage_collection(monkeypatch):
    """A worker collects garbage rarely, so what a cycle keeps is kept for gigabytes of responses."""
    made = []

    class Watched(record_batch.CommittedBatches):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr(record_batch, "CommittedBatches", Watched)
    gc.disable()
    try:
        columns_of(FEED, batch(ROWS), [], 0)
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


def test_records_with_the_producers_time_are_found_in_what_is_left_of_a_batch(columns):
    assert columns.created == [(0, 0), (1, 3)]
    columns.created = [(1, 2)]
    whole = FeedBatch.of(FEED, columns, follows=0)
    assert whole.first_created() == 1
    assert whole.below_offset(1).offsets == [0]
    assert whole.below_offset(1).next_offset == 1
    assert whole.from_offset(2).first_created() == 2
    assert whole.from_offset(3).first_created() is None
    assert FeedBatch.of(FEED, columns.cut(0, 1), follows=0).first_created() is None


def test_the_type_of_the_timestamps_is_the_batchs():
    stamped = bytearray(batch(ROWS[:1]))
    stamped[22] |= 8  # the low byte of the attributes
    stamped[17:21] = calc_crc32c(bytes(stamped[21:])).to_bytes(4, "big")
    found, _ = columns_of(FEED, bytes(stamped) + batch(ROWS[:1], base_offset=1), [], 0)
    assert found.created == [(1, 1)]
