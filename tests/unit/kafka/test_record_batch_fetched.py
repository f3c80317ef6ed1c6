"""Header names that are not UTF-8: one such record must not take its batch, or the worker, with it."""

import gc
import struct
import weakref
import zlib

import pytest
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from dedup.core.event_time import RecordTime
from dedup.core.extract import compile_extractor
from dedup.core.extract_one import ODD_HEADER_NAME
from dedup.core.tracking_id import FieldRule, TrackingId, parse_path
from dedup.errors import DedupError
from dedup.kafka import record_batch
from dedup.kafka.record_batch import FeedBatch, ProducerIdentity, TopicPartition, columns_of, fill, records_of
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


@pytest.mark.parametrize(("magic", "compression"), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 3)])
def test_records_in_the_formats_before_kafka_0_11_are_read(magic, compression):
    """Was: a worker ended with AttributeError, at each start again."""
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=compression, batch_size=1 << 16)
    for offset in range(3):
        builder.append(offset, timestamp=1_000 + offset if magic else None, key=b"k", value=b"%d" % offset)
    raw = bytearray(builder.build())
    if compression:
        struct.pack_into(">q", raw, 0, 2)  # as a broker does: a message with others inside has the offset of the last
    found, position = columns_of(FEED, bytes(raw), [], 1)
    assert (found.offsets, found.keys, found.values, position) == ([1, 2], [b"k", b"k"], [b"1", b"2"], 3)
    assert found.timestamps_ms == ([1_001, 1_002] if magic else [-1, -1])
    assert list(map(list, found.headers)) == [[], []]
    assert {offset for first, last in found.created for offset in range(first, last + 1)} == {1, 2}


def test_lz4_as_it_was_before_kafka_0_10_is_refused():
    builder = LegacyRecordBatchBuilder(magic=1, compression_type=3, batch_size=1 << 16)
    builder.append(0, timestamp=1, key=b"k", value=b"value")
    raw = builder.build()
    raw[16:26] = bytes([0, 3])  # format v0 has no timestamp
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    struct.pack_into(">I", raw, 12, zlib.crc32(raw[16:]))
    with pytest.raises(DedupError, match=r"in/0: a batch is compressed in a way that dedup cannot read: .* Start at a"):
        columns_of(FEED, bytes(raw), [], 0)


def test_a_damaged_record_of_an_early_format_is_told():
    builder = LegacyRecordBatchBuilder(magic=1, compression_type=0, batch_size=1 << 16)
    builder.append(0, timestamp=1, key=b"k", value=b"value")
    with pytest.raises(DedupError, match="the batch at offset 0 has a wrong checksum"):
        columns_of(FEED, bytes(builder.build())[:-1] + b"X", [], 0)


@pytest.mark.parametrize("attributes", [0x10, 0x30], ids=["data", "marker"])
def test_a_batch_that_the_log_cleaner_has_emptied_is_passed_over(attributes):
    """Was: an emptied marker ended a worker with a KafkaError, at each start again."""
    body = struct.pack(">hiqqqhii", attributes, 0, 1_000, 1_000, 5, 1, -1, 0)
    emptied = struct.pack(">qiibI", 7, 49, 0, 2, calc_crc32c(body)) + body
    found, position = columns_of(FEED, emptied + batch(ROWS[:1], base_offset=8), [(5, 3)], 7)
    assert (found.offsets, position) == ([8], 9)


@given(st.lists(st.sampled_from([-1, 0, 1_000, 5_000]), min_size=1, max_size=8), st.sampled_from([None, 1, 3]))
@example([-1, 1_000], None)
def test_a_record_without_a_timestamp_does_not_get_that_of_the_next_one(times_ms, most_rows):
    lines = [(offset, time_ms, None, b"v", []) for offset, time_ms in enumerate(times_ms)]
    made = fill(FEED, lines, compression="none", most_rows=most_rows)
    assert [row for each in made for row in each.rows] == list(range(len(times_ms)))
    found = [columns_of(FEED, each.sealed(ProducerIdentity(1, 1), 0), [], 0)[0] for each in made]
    assert [time_ms for each in found for time_ms in each.timestamps_ms] == times_ms
