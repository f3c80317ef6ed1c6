"""The changelog's bytes: frozen vectors, limits, and the fast column encoder against the plain one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.core.window import BEFORE_ALL_TIME, Sighting, Source
from dedup.errors import InvariantBroken, StateIncompatible, TaskCorrupted
from dedup.store.changelog import (
    NOT_SAID,
    TASK_RECORD_KEY,
    FeedTime,
    SightingKey,
    TaskRecord,
    all_within,
    collect,
    decode_sightings,
    decode_task_record,
    encode_sighting,
    encode_single_column,
    encode_task_record,
    parse_key,
    rebucket,
    sighting_key,
)

TIME_MS = 1_700_000_000_000
PLAIN = Sighting(TIME_MS, TIME_MS, Source(1, 2, 3))
VECTORS = [
    (PLAIN, "10 00018bcfe56800 01 0002 00000003"),
    (PLAIN._replace(last_ms=TIME_MS + 1), "12 00018bcfe56800 01 0002 00000003 0000018bcfe56801"),
    (PLAIN._replace(fingerprint=b"12345678"), "14 00018bcfe56800 01 0002 00000003 3132333435363738"),
    (PLAIN._replace(source=Source(256, 2, 3)), "11 00018bcfe56800 0100 00000002 0000000000000003"),
    (PLAIN._replace(source=Source(0, 65536, 3)), "11 00018bcfe56800 0000 00010000 0000000000000003"),
    (PLAIN._replace(source=Source(255, 65535, 1 << 32)), "11 00018bcfe56800 00ff 0000ffff 0000000100000000"),
    (
        Sighting(0, (1 << 48) - 1, Source(65535, (1 << 32) - 1, (1 << 64) - 1), b"abcdefgh"),
        "17 00000000000000 ffff ffffffff ffffffffffffffff 0000ffffffffffff 6162636465666768",
    ),
]

times = st.integers(0, (1 << 48) - 1)
sources = st.builds(
    Source,
    st.integers(0, 3) | st.integers(0, 65535),
    st.integers(0, 3) | st.integers(0, (1 << 31) - 1),
    st.integers(0, 3) | st.integers(0, (1 << 63) - 1),
)
fingerprints = st.just(b"") | st.binary(min_size=8, max_size=8)
sightings = st.builds(
    lambda first, last, source, fingerprint: Sighting(min(first, last), max(first, last), source, fingerprint),
    times,
    times,
    sources,
    fingerprints,
) | st.builds(lambda at, source, fingerprint: Sighting(at, at, source, fingerprint), times, sources, fingerprints)


@pytest.mark.parametrize(("sighting", "value"), VECTORS)
def test_the_bytes_of_a_sighting_are_frozen(sighting, value):
    assert encode_sighting(sighting) == bytes.fromhex(value)
    assert decode_sightings(bytes.fromhex(value)) == (sighting,)


def test_the_bytes_of_keys_are_frozen():
    assert sighting_key(256, b"ab").hex() == "53" + "0000000000000100" + "6162"
    assert TASK_RECORD_KEY == b"T"


def test_the_bytes_of_a_task_record_are_frozen():
    record = TaskRecord(b"\xff" * 2, 5, (FeedTime(1, 2, 3, idle=True),), 6, 7, 8)
    value = (
        "02 02 0000000000000005 0000000000000006 0000000000000007 0000000000000008 0001 ffff"
        "0001 00000002 0000000000000003 01 da540f07"
    )
    assert encode_task_record(record) == bytes.fromhex(value)
    assert decode_task_record(bytes.fromhex(value)) == record


def test_the_bytes_of_a_task_record_with_a_topic_id_are_frozen():
    topic_id = "00112233445566778899aabbccddeeff"
    record = TaskRecord(b"\xff" * 2, 5, (FeedTime(1, 2, 3, idle=True),), 6, 7, 8, topic_id)
    value = (
        "03 02 0000000000000005 0000000000000006 0000000000000007 0000000000000008 0001 ffff"
        f"0001 00000002 0000000000000003 01 {topic_id} 556b02c9"
    )
    assert encode_task_record(record) == bytes.fromhex(value)
    assert decode_task_record(bytes.fromhex(value)) == record


@given(st.lists(sightings, min_size=1, max_size=5))
def test_what_is_written_is_read(several):
    value = encode_sighting(several)
    assert decode_sightings(value) == tuple(several)
    assert value == b"".join(map(encode_sighting, several))
    for sighting in decode_sightings(value):
        assert type(sighting) is Sighting
        assert type(sighting.source) is Source


@given(st.lists(sightings, min_size=1, max_size=3), st.data())
def test_a_cut_value_is_no_value(several, data):
    value = encode_sighting(several)
    borders = {len(encode_sighting(several[:count])) for count in range(1, len(several))}
    cut = data.draw(st.integers(0, len(value) - 1).filter(lambda at: at not in borders))
    with pytest.raises(TaskCorrupted):
        decode_sightings(value[:cut])


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(value):
    try:
        several = decode_sightings(value)
    except (TaskCorrupted, StateIncompatible):
        return
    for sighting in several:
        assert 0 <= sighting.first_ms <= sighting.last_ms < 1 << 48


@pytest.mark.parametrize("version", [0, 2, 15])
def test_another_version_is_refused(version):
    with pytest.raises(StateIncompatible, match=f"version {version}"):
        decode_sightings(bytes([version << 4]) + encode_sighting(PLAIN)[1:])


@pytest.mark.parametrize(
    "bad",
    [
        PLAIN._replace(first_ms=-1, last_ms=-1),
        PLAIN._replace(last_ms=TIME_MS - 1),
        PLAIN._replace(first_ms=1 << 48, last_ms=1 << 48),
        PLAIN._replace(source=Source(-1, 0, 0)),
        PLAIN._replace(source=Source(65536, 0, 0)),
        PLAIN._replace(source=Source(0, -1, 0)),
        PLAIN._replace(source=Source(0, 1 << 32, 0)),
        PLAIN._replace(source=Source(0, 0, -1)),
        PLAIN._replace(fingerprint=b"1234567"),
    ],
)
def test_what_can_not_be_stored_is_refused_alone_and_in_a_column(bad):
    with pytest.raises(InvariantBroken):
        encode_sighting(bad)
    if bad.first_ms == bad.last_ms:
        source = bad.source
        prints = [bad.fingerprint] * 2 if bad.fingerprint else None
        with pytest.raises(InvariantBroken):
            encode_single_column([5, bad.first_ms], source.topic, source.partition, [5, source.offset], prints)


def test_a_value_of_no_sighting_is_refused():
    with pytest.raises(InvariantBroken):
        encode_sighting(())
    with pytest.raises(TaskCorrupted):
        decode_sightings(b"")


@given(st.lists(st.tuples(times, sources), max_size=8), st.booleans(), st.booleans())
def test_the_column_encoder_equals_the_plain_one(rows, printed, arrays):
    prints = [bytes([row]) * 8 for row in range(len(rows))] if printed else None
    plain = [Sighting(at, at, source, prints[row] if prints else b"") for row, (at, source) in enumerate(rows)]
    convert = (lambda column: np.array(column, np.int64)) if arrays else list
    columns = [convert([source[field] for _, source in rows]) for field in range(3)]
    assert encode_single_column(convert([at for at, _ in rows]), *columns, prints) == list(map(encode_sighting, plain))


@given(st.lists(st.tuples(times, st.integers(0, 1 << 40)), max_size=8), sources, st.sampled_from([1, 9]))
def test_the_column_encoder_takes_one_topic_and_partition_for_all(rows, source, times_as_many):
    rows *= times_as_many  # few rows are encoded one by one
    plain = [Sighting(at, at, source._replace(offset=offset)) for at, offset in rows]
    found = encode_single_column([at for at, _ in rows], source.topic, source.partition, [offset for _, offset in rows])
    assert found == list(map(encode_sighting, plain))


@given(st.integers(0, (1 << 48) - 1), st.binary(min_size=1, max_size=33))
def test_keys_are_read_as_written(segment, state_key):
    assert parse_key(sighting_key(segment, state_key)) == SightingKey(segment, state_key)
    assert parse_key(TASK_RECORD_KEY) is None


@pytest.mark.parametrize("key", [b"", b"S", b"S" + bytes(8), b"T1", b"X" + bytes(20)])
def test_an_unknown_key_is_refused(key):
    with pytest.raises(StateIncompatible):
        parse_key(key)


def test_a_segment_before_time_zero_is_refused():
    with pytest.raises(InvariantBroken):
        sighting_key(-100, b"a")


records = st.builds(
    TaskRecord,
    st.binary(max_size=32),
    st.just(BEFORE_ALL_TIME) | times,
    st.lists(
        st.builds(FeedTime, st.integers(0, 9), st.integers(0, 9), st.just(BEFORE_ALL_TIME) | times, st.booleans()),
        max_size=4,
    ).map(tuple),
    times,
    times,
    st.just(NOT_SAID) | times,
    st.just("") | st.binary(min_size=16, max_size=16).map(bytes.hex),
)


@given(records, st.data())
def test_a_task_record_is_read_as_written_or_refused(record, data):
    value = encode_task_record(record)
    assert decode_task_record(value) == record
    damaged = bytearray(value)
    at = data.draw(st.integers(0, len(value) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TaskCorrupted if damaged[0] in {2, 3} else StateIncompatible):
        decode_task_record(bytes(damaged))
    with pytest.raises(TaskCorrupted):
        decode_task_record(value[: data.draw(st.integers(0, len(value) - 1))])


def test_a_task_record_out_of_range_is_refused():
    with pytest.raises(InvariantBroken):
        encode_task_record(TaskRecord(b"", 1 << 63, (), 0, 0))
    with pytest.raises(InvariantBroken, match="is not a topic id"):
        encode_task_record(TaskRecord(b"", 0, (), 0, 0, feeding_topic_id="0011"))


def test_collect_keeps_the_last_of_each_key():
    first, last = (TaskRecord(b"", 0, (), offset, 10) for offset in (1, 2))
    keys = [sighting_key(0, b"a"), TASK_RECORD_KEY, sighting_key(10, b"a"), sighting_key(0, b"a"), TASK_RECORD_KEY]
    found = collect(keys, [b"1", encode_task_record(first), b"2", b"3", encode_task_record(last)])
    assert found.writes == {0: {b"a": b"3"}, 10: {b"a": b"2"}}
    assert found.task_record == last
    assert collect([], []).task_record is None


@pytest.mark.parametrize(("key", "value"), [(None, b""), (sighting_key(0, b"a"), None), (b"S123", b"1")])
def test_collect_refuses_what_dedup_does_not_write(key, value):
    with pytest.raises(StateIncompatible):
        collect([key], [value])


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.lists(sightings, min_size=1, max_size=3)), max_size=6))
def test_rebucket_puts_each_sighting_where_the_new_grid_has_it(entries):
    width_ms = 1 << 44
    writes = rebucket([(state_key, encode_sighting(several)) for state_key, several in entries], width_ms)
    found = {
        (state_key, sighting)
        for start, values in writes.items()
        for state_key, value in values.items()
        for sighting in decode_sightings(value)
        if start <= sighting.last_ms < start + width_ms
    }
    longest = {}
    for state_key, several in entries:
        for seen in several:
            name = (state_key, seen.first_ms, seen.source, seen.fingerprint)
            longest[name] = max(longest.get(name, 0), seen.last_ms)
    assert found == {
        (state_key, Sighting(first_ms, last_ms, source, fingerprint))
        for (state_key, first_ms, source, fingerprint), last_ms in longest.items()
    }


def test_rebucket_unites_an_extended_sighting_and_keeps_what_the_new_grid_holds():
    old, extended = PLAIN._replace(first_ms=10, last_ms=10), PLAIN._replace(first_ms=10, last_ms=25)
    other = PLAIN._replace(first_ms=28, last_ms=28)
    entries = [(b"a", encode_sighting(each)) for each in (old, extended, other)]
    writes = rebucket(entries, 20)
    assert writes == {20: {b"a": encode_sighting((extended, other))}}


changelog_keys = st.one_of(
    st.just(TASK_RECORD_KEY),
    st.builds(sighting_key, st.sampled_from([0, 100, 100, 100]), st.binary(min_size=1, max_size=3)),
)


@given(st.lists(st.tuples(changelog_keys, st.integers(0, 9)), max_size=30))
def test_of_several_records_with_one_key_the_last_counts(rows):
    """However the stretch is made: one segment with task records between is taken in columns, others row by row."""
    rows = [
        (
            key,
            encode_task_record(TaskRecord(b"f" * 16, 0, (), number, 100)) if key == TASK_RECORD_KEY else b"%d" % number,
        )
        for key, number in rows
    ]
    last = dict(rows)
    record = last.pop(TASK_RECORD_KEY, None)
    found = collect([key for key, _ in rows], [value for _, value in rows])
    assert found.task_record == (None if record is None else decode_task_record(record))
    assert {sighting_key(start, own): v for start, part in found.writes.items() for own, v in part.items()} == last
    assert all(found.writes.values())


spans = st.integers(0, 300).flatmap(lambda first: st.tuples(st.just(first), st.integers(first, 300)))


@given(
    st.lists(st.lists(spans, min_size=1, max_size=2), max_size=6),
    st.integers(0, 300),
    st.integers(0, 300),
    st.booleans(),
)
def test_all_within_is_what_each_sighting_says(ids, begin, end, plain):
    ids = [[(first, first) for first, _ in spans[:1]] for spans in ids] if plain else ids
    sightings = [[Sighting(first, last, Source(0, 0, 1)) for first, last in spans] for spans in ids]
    inside = all(begin <= seen.last_ms < end for several in sightings for seen in several)
    assert all_within([encode_sighting(several) for several in sightings], begin, end) is inside


def test_all_within_refuses_what_it_can_not_read():
    with pytest.raises(StateIncompatible, match="version 2"):
        all_within([b"\x20" + bytes(14)], 0, 100)
