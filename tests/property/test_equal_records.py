"""Records laid out in columns are what aiokafka's compiled builder makes of them one by one."""

from __future__ import annotations

import random

import pytest
from aiokafka.record.memory_records import MemoryRecords
from hypothesis import given
from hypothesis import strategies as st

from dedup.kafka.record_batch import (
    BATCH_BYTES,
    COMPRESSION,
    OWN_ROW,
    ProducerIdentity,
    RecordBatch,
    TopicPartition,
    equal_records,
    fill,
)
from dedup.worker.dedup_task import sighting_batches

CHANGELOG = TopicPartition("changelog", 3)
IDENTITY = ProducerIdentity(7, 2)


def one_by_one(prefix: bytes, keys: list[bytes], values: list[bytes], compression: str) -> list[RecordBatch]:
    lines = ((OWN_ROW, 1_700_000_000_000, prefix + key, value, []) for key, value in zip(keys, values, strict=True))
    return fill(CHANGELOG, lines, compression=compression)


def in_columns(prefix: bytes, keys: list[bytes], values: list[bytes], compression: str) -> RecordBatch | None:
    return equal_records(CHANGELOG, prefix, keys, values, timestamp_ms=1_700_000_000_000, compression=compression)


def assert_same(prefix: bytes, keys: list[bytes], values: list[bytes], compression: str) -> None:
    (expected,) = one_by_one(prefix, keys, values, compression)
    found = in_columns(prefix, keys, values, compression)
    assert found is not None
    assert (found.target, found.rows, found.count) == (expected.target, expected.rows, expected.count)
    mine, theirs = found.sealed(IDENTITY, 41), expected.sealed(IDENTITY, 41)
    if compression == "none":
        assert mine == theirs
    else:
        # Both builders send what does not shrink as it is, but one of them counts the header: the length, the checksum
        # and the codec in the header may differ then.
        assert mine[23:61] == theirs[23:61]
        assert read(mine) == read(theirs)


def read(sealed: bytes) -> list[tuple[int, int, bytes, bytes]]:
    """Return the records of a batch; its checksum is right."""
    batch = MemoryRecords(sealed).next_batch()
    assert batch.validate_crc()
    assert batch.is_transactional
    return [(record.offset, record.timestamp, record.key, record.value) for record in batch]


@given(
    prefix=st.binary(max_size=12),
    key_bytes=st.integers(1, 80),
    value_bytes=st.integers(1, 80),
    count=st.integers(1, 200),
    compression=st.sampled_from(sorted(COMPRESSION)),
    seed=st.integers(0, 1 << 30),
)
def test_the_bytes_are_the_same(prefix, key_bytes, value_bytes, count, compression, seed):
    dice = random.Random(seed)
    keys = [dice.randbytes(key_bytes) for _ in range(count)]
    assert_same(prefix, keys, [dice.randbytes(value_bytes) for _ in range(count)], compression)


@pytest.mark.parametrize("count", [63, 64, 65, 8191, 8192, 8193])
def test_the_bytes_are_the_same_where_a_number_takes_a_byte_more(count):
    assert_same(b"S", [b"%05d" % row for row in range(count)], [b"v"] * count, "snappy")


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ([], []),
        ([b"a", b"bc"], [b"1", b"2"]),
        ([b"a", b"b"], [b"1", b"23"]),
        ([b"a"] * 6, [bytes(BATCH_BYTES // 6)] * 6),
    ],
    ids=["none", "key lengths", "value lengths", "too large"],
)
def test_what_has_no_such_table_is_left_to_the_builder(keys, values):
    assert in_columns(b"S", keys, values, "none") is None


def test_sightings_of_one_segment_and_of_two_say_the_same():
    ids = [b"\x03" + bytes([row]) * 16 for row in range(100)]
    whole = sighting_batches(CHANGELOG, {0: dict.fromkeys(ids, b"v" * 15)}, now_ms=5, compression="none")
    mixed = sighting_batches(
        CHANGELOG, {0: dict.fromkeys(ids, b"v" * 15), 9: {b"x": b"w"}}, now_ms=5, compression="none"
    )
    assert [batch.count for batch in whole + mixed] == [100, 101]
    assert whole[0].sealed(IDENTITY, 0)[61:] == mixed[0].sealed(IDENTITY, 0)[61 : len(whole[0].sealed(IDENTITY, 0))]
