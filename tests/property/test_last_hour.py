"""Several workers tell the last hour of a group as one worker with all tasks; each partition has at most one owner."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dedup.web.dashboard import Growth
from dedup.web.last_hour import COUNTED, SLOT_MS, Memory, merged
from tests.unit.web.test_last_hour import BUCKETS, START, peers, pulses, told


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.lists(st.tuples(st.integers(0, 2), st.sampled_from(COUNTED), st.integers(0, 500), st.integers(0, 12))),
        ),
        max_size=12,
    )
)
def test_merged_workers_are_as_one_that_has_all_tasks(moments):
    """Each moment is a slot with records of several workers."""
    workers, alone = [Memory(START) for _ in range(3)], Memory(START)
    for number, records in sorted(moments):
        for worker, memory in [*enumerate(workers), (None, alone)]:
            mine = [each for each in records if worker in {None, each[0]}]
            counts, latencies = Counter(), [0] * BUCKETS
            for _, name, count, bucket in mine:
                counts[name] += count
                latencies[bucket] += count
            lag = sum(count for _, _, count, _ in mine)
            memory.add(Growth(1_000, counts, latencies, lag), START + number * SLOT_MS, 1 if worker is not None else 3)
    now_ms = START + 30 * SLOT_MS
    of_three = merged([told(each, name, now_ms) for name, each in zip("abc", workers, strict=True)], now_ms)
    of_one = merged([told(alone, "a", now_ms)], now_ms)
    assert of_three["ranges"] == of_one["ranges"]
    total = Counter({name: of_three["ranges"]["3600"][name] for name in COUNTED})
    assert total == sum((Counter({name: count}) for _, rows in moments for _, name, count, _ in rows), Counter())
    for name, values in of_one["plots"].items():
        assert of_three["plots"][name] == pytest.approx(values, abs=0.02), name


@given(st.lists(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=3, max_size=3), min_size=1, max_size=8))
def test_no_partition_has_two_owners_and_the_last_one_is_right(assignments):
    """Each assignment gives three partitions to workers, or to nobody."""
    memories = {name: Memory(START) for name in "abc"}
    for moment, owners in enumerate(assignments):
        group = {name: [number for number, owner in enumerate(owners) if owner == name] for name in "abc"}
        for name, memory in memories.items():
            memory.look(pulses(group[name]), peers(name, **group), START + moment * 1_000)
    now_ms = START + len(assignments) * 1_000
    found = merged([told(memory, name, now_ms) for name, memory in memories.items()], now_ms)
    rows = {row["label"]: row["spans"] for row in found["rows"]}
    for number, owner in enumerate(assignments[-1]):
        spans = rows.get(f"orders/{number}", [])
        assert all(one["to_ms"] <= two["from_ms"] for one, two in pairwise(spans))
        assert [span["worker"] for span in spans if span["to_ms"] == now_ms] == ([] if owner is None else [owner])
