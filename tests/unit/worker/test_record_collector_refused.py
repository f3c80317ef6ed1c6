"""What is known of refused records: sizes as a broker counts them, what is sent in their place, and for how long."""

from __future__ import annotations

import os

import pytest

from dedup.errors import RecordRefused
from dedup.kafka.record_batch import Limit, Line, ProducerIdentity, TopicPartition, fill, oversize
from dedup.worker.record_collector import TRUSTED_MS, Limits, Refusals, SideTopics

OUT = TopicPartition("out", 1)
DEAD = TopicPartition("dead", 0)
LATE = TopicPartition("late", 0)
SIDE_TOPICS = SideTopics("dead", "late")


def line(row: int, value: bytes) -> Line:
    return row, 1_000 + row, b"k", value, [("h", b"1")]


def refused(target: TopicPartition, *rows: int, too_large: bool = True, reasons: dict[int, str] | None = None):
    return RecordRefused(
        "no", topic=target.topic, partition=target.partition, rows=rows, too_large=too_large, reasons=reasons or {}
    )


class Clock:
    def __init__(self) -> None:
        self.ms = 5

    def now_ms(self) -> int:
        return self.ms


class Wire:
    """The cluster's word on a topic's limit."""

    def __init__(self, limit: Limit | None) -> None:
        self.is_now = limit

    async def limit(self, _target: TopicPartition) -> Limit | None:
        return self.is_now


def test_several_records_are_in_a_batch_only_as_far_as_the_topic_takes_it_uncompressed() -> None:
    lines = [line(row, os.urandom(row * 37 % 900)) for row in range(200)]
    batches = fill(OUT, lines, compression="snappy", most_bytes=1_000)
    assert [row for made in batches for row in made.rows] == list(range(200))
    assert all(made.builder.size() <= 1_000 or made.count == 1 for made in batches)
    assert any(made.count > 1 for made in batches)


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_record_is_measured_as_it_is_sent(compression: str) -> None:
    for value in (b"0" * 50_000, os.urandom(50_000)):
        (batch,) = fill(OUT, [line(7, value)], compression=compression, most_bytes=100)
        sent = len(fill(OUT, [line(7, value)], compression=compression)[0].sealed(ProducerIdentity(1, 0), 0))
        assert oversize(batch, Limit(sent), compression) is None
        assert oversize(batch, Limit(sent - 1), compression) == sent


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_several_records_fit_even_where_compression_makes_them_longer(compression: str) -> None:
    for most in (500, 5_000, 400_000):
        limit = Limit(most)
        lines = [line(row, os.urandom(most // 9)) for row in range(20)]
        for batch in fill(OUT, lines, compression=compression, most_bytes=limit.surely_fits_bytes):
            assert batch.count > 1
            assert len(batch.sealed(ProducerIdentity(1, 0), 0)) <= most


def test_a_record_is_measured_as_it_is_stored_too() -> None:
    (batch,) = fill(OUT, [line(7, b"0" * 50_000)], compression="zstd", most_bytes=100)
    assert oversize(batch, Limit(10_000), "zstd") is None
    assert oversize(batch, Limit(10_000, "gzip"), "zstd") is None
    found = oversize(batch, Limit(10_000, "uncompressed"), "zstd")
    assert found is not None
    assert 50_000 < found < 50_200


async def test_a_limit_is_trusted_for_a_while_and_then_the_broker_decides() -> None:
    clock, wire = Clock(), Wire(Limit(20_000))
    limits = Limits({"out": Limit(10_000)}, clock.now_ms, wire)  # type: ignore[arg-type]  # all it asks
    (batch,) = fill(OUT, [line(7, os.urandom(15_000))], compression="none", most_bytes=limits.most_bytes("out"))
    why = limits.refuses(batch, "none")
    assert why is not None
    assert why.startswith("out takes batches of at most 10000 bytes (max.message.bytes); this record needs 150")
    clock.ms += TRUSTED_MS - 1
    assert limits.refuses(batch, "none") == why
    clock.ms += 1
    assert limits.refuses(batch, "none") is None
    await limits.look_again(OUT)
    assert 19_000 < limits.most_bytes("out") < 20_000
    (larger,) = fill(OUT, [line(7, os.urandom(25_000))], compression="none")
    assert limits.refuses(batch, "none") is None
    assert limits.refuses(larger, "none") is not None


async def test_a_limit_that_may_not_be_read_is_the_brokers_business() -> None:
    limits = Limits({}, Clock().now_ms, Wire(None))  # type: ignore[arg-type]  # all it asks
    (batch,) = fill(OUT, [line(7, os.urandom(5_000_000))], compression="none")
    assert limits.refuses(batch, "none") is None
    await limits.look_again(OUT)
    assert limits.refuses(batch, "none") is None


def test_a_refused_record_goes_from_topic_to_topic_until_none_is_left() -> None:
    refusals = Refusals()
    assert refusals.learn(refused(LATE, 7), SIDE_TOPICS) is None
    assert (refusals.digests, refusals.rows) == ({("late", 7)}, {})
    assert refusals.learn(refused(LATE, 7), SIDE_TOPICS) is None
    assert refusals.rows == {("late", 7): "no"}
    assert refusals.learn(refused(DEAD, 7), SIDE_TOPICS) is None
    assert ("dead", 7) in refusals.digests
    assert refusals.learn(refused(DEAD, 7), SIDE_TOPICS) == 7


def test_a_digest_cures_sizes_only() -> None:
    refusals = Refusals()
    assert refusals.learn(refused(LATE, 7, too_large=False), SIDE_TOPICS) is None
    assert (refusals.digests, refusals.rows) == (set(), {("late", 7): "no"})
    assert refusals.learn(refused(DEAD, 7, too_large=False), SIDE_TOPICS) == 7


def test_named_records_are_taken_at_once_and_others_are_cut_in_two() -> None:
    refusals = Refusals()
    assert refusals.learn(refused(OUT, 3, 5, too_large=False, reasons={3: "old", 5: "older"}), SIDE_TOPICS) is None
    assert refusals.rows == {("out", 3): "old", ("out", 5): "older"}
    assert refusals.learn(refused(OUT, 10, 11, 14, 15), SIDE_TOPICS) is None
    assert refusals.cuts == {OUT: {10, 14, 16}}


def test_records_of_a_flow_that_were_too_large_together_are_sent_apart_once_the_limit_is_known() -> None:
    """Was: the record that they were made from became a dead letter."""
    refusals = Refusals()
    assert refusals.learn(refused(OUT, 7, 7), SIDE_TOPICS) is None
    assert refusals.rows == {}
    assert refusals.learn(refused(OUT, 7), SIDE_TOPICS) is None
    assert refusals.rows == {("out", 7): "no"}


def test_timestamps_a_broker_has_told_the_range_of_are_known() -> None:
    refusals = Refusals()
    told = "Timestamp 5 of message with offset 0 is out of range. The timestamp should be within [100, 200]"
    assert refusals.learn(refused(OUT, 3, too_large=False, reasons={3: told}), SIDE_TOPICS) is None
    assert [refusals.untimely("out", each) is None for each in (99, 100, 200, 201)] == [False, True, True, False]
    assert refusals.untimely("other", 5) is None


def test_a_range_without_an_end_is_told_with_one_that_has_overflowed() -> None:
    """Was: no timestamp was in the range, so no record of the transaction was sent to the topic."""
    refusals = Refusals()
    told = "The timestamp should be within [1699913601748, -9223370240691073406]"  # Kafka 3.9.1
    assert refusals.learn(refused(OUT, 3, too_large=False, reasons={3: told}), SIDE_TOPICS) is None
    assert refusals.untimely("out", 1699913601747) is not None
    assert refusals.untimely("out", 1699913601748) is None
    assert refusals.untimely("out", 4_070_908_800_000) is None


def test_what_is_ours_is_tried_once_more_and_then_stops_the_worker() -> None:
    refusals, changelog = Refusals(), TopicPartition("changelog", 0)
    assert refusals.learn(refused(changelog, -1, -1), SIDE_TOPICS) is None
    with pytest.raises(RecordRefused):
        refusals.learn(refused(changelog, -1, -1), SIDE_TOPICS)
    with pytest.raises(RecordRefused):
        Refusals().learn(refused(changelog, -1, too_large=False), SIDE_TOPICS)
