"""The settings whose schedules are enumerated, each with the faults it is about.

The bounds are small enough for every change; `WIDE` has those of the long runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from dedup.core.window import Window
from tests.simulation.scenario import Bounds, Fault, Scenario

PLAIN = (("a", 0), ("b", 1), ("a", 2), ("c", 3), ("b", 4))
PROBES = (("a", 3), ("b", 5), ("c", 6), ("d", 7))
ALL_FAULTS: tuple[Fault, ...] = tuple(
    kind for kind in get_args(Fault) if kind not in {"rebalance", "change", "regroup"}
)

CRASHES = Scenario("killed", PLAIN, Bounds(1, ("crash",)), probes=PROBES)
DAMAGED = Scenario("a damaged disk", PLAIN, Bounds(2, ("torn", "damage", "stale")), probes=PROBES)
CLOCKS = Scenario("the clock a day off", PLAIN, Bounds(2, ("clock", "crash")), probes=PROBES, lazy_feed=True)
GROWTH = Scenario("the source grows", PLAIN, Bounds(2, ("grow", "crash")), probes=PROBES, lazy_feed=True)
CRASHES_TWICE = Scenario("killed twice", PLAIN[:3], Bounds(2, ("crash",)), probes=PROBES)
ANSWERS = Scenario("any fault", PLAIN, Bounds(1, ALL_FAULTS, deliveries=1), probes=PROBES)
REORDERED = Scenario("answers out of order", PLAIN, Bounds(0, (), reorders=1), probes=PROBES, most_records=1)
# The second record of `c` makes stream time leap over the retention of `a` and `b`, in a batch of its own.
EXPIRY = Scenario(
    "expiry",
    (("a", 0), ("b", 1), ("a", 9), ("c", 100), ("a", 101), ("b", 85)),
    Bounds(1, ("crash", "lost")),
    probes=(("b", 84), ("c", 109), ("b", 101), ("a", 86)),
    lazy_feed=True,
)
STREAM_TIME = Scenario(
    "stream time without a sighting",
    (("a", 0), ("a", 9)),
    Bounds(1, ("crash", "wipe")),
    window=Window(guard_ms=10, grace_ms=3),
    probes=(("b", 5), ("c", 6)),
    most_records=1,
)
EXTENDED = Scenario(
    "extended sightings",
    (("a", 100), ("a", 109), ("a", 99), ("a", 117), ("b", 131), ("a", 126)),
    Bounds(1, ("crash", "wipe")),
    window=Window(guard_ms=10, grace_ms=10, extend=True, extend_at_most_ms=25),
    probes=(("a", 134), ("a", 135), ("b", 140)),
)
REFUSED = Scenario(
    "refused records",
    (("a", 0), ("B", 1), ("c", 2), ("D", 3), ("b", 4), ("A", 5)),
    Bounds(1, ("crash", "lost")),
    probes=(("e", 6), ("F", 6), ("d", 7), ("f", 7), ("g", 7)),
    most_records=3,
)
ZOMBIE = Scenario("two workers", PLAIN[:4], Bounds(0, (), switches=2), probes=PROBES, new_disk_at_end=True)
ZOMBIE_LIVES = replace(ZOMBIE, name="two workers to the end", last_incarnation=False)
ZOMBIE_KILLED = replace(ZOMBIE, name="two workers, one killed", bounds=Bounds(1, ("crash",), switches=1))
ZOMBIE_REFUSED = replace(
    ZOMBIE, name="two workers, a refused record", input=(("a", 0), ("B", 1), ("c", 2)), bounds=Bounds(0, (), switches=1)
)
STALE_OFFSETS = replace(CRASHES, name="group offsets stale", offsets="stale")
NO_OFFSETS = replace(CRASHES, name="group offsets gone", offsets="forgotten")
SEEDER = replace(CRASHES, name="another transaction on the changelog", bounds=Bounds(1, ("crash", "wipe")), seeder=True)
DELAYED = Scenario(
    "delayed requests", PLAIN, Bounds(1, ("late", "expire"), deliveries=1), probes=PROBES, most_records=1
)
CHANGED = Scenario("the topics change", PLAIN, Bounds(1, ("change",)), most_records=1)
CHANGED_TWO_HOPS = Scenario("the topics change, two hops", PLAIN[:3], Bounds(1, ("change",)), feeds=2)
DAMAGED_IN_COMMIT = Scenario(
    "damage is found while a commit is in flight",
    PLAIN,
    Bounds(1, ("damage",), reorders=1),
    probes=PROBES,
    most_records=1,
)
TWO_HOPS_REFUSED = Scenario(
    "two hops and workers, a record refused on the first",
    (("a", 0), ("b", 1), ("a!", 2), ("c", 3)),
    Bounds(0, (), switches=1),
    feeds=2,
    last_incarnation=False,
)
# Partition 1 was added later. Its first record is late, and then it is the slowest.
ADDED = Scenario(
    "a source partition that was added",
    (("a", 20), ("b", 2), ("a", 40), ("c", 35), ("d", 50), ("c", 36)),
    Bounds(1, ("crash", "wipe", "rebalance")),
    window=Window(guard_ms=10, grace_ms=5),
    probes=(("e", 60), ("f", 37), ("e", 28)),
    feeds=2,
    begun_with=1,
    lazy_feed=True,
)
TWO_HOPS = Scenario("two hops", PLAIN[:3], Bounds(1, ("crash", "late", "rebalance")), probes=PROBES[:2], feeds=2)

# Partition 0 reads the rows with even numbers, and partition 1 the others.
GROUP_ROWS = (("a", 0), ("a", 1), ("b", 2), ("c", 3), ("a", 4), ("c", 5), ("b", 6), ("a", 7))
GROUP_PROBES = (("a", 8), ("a", 8), ("b", 9), ("c", 9), ("d", 9), ("d", 9))
IN_GROUP = Scenario(
    "two partitions in a group",
    GROUP_ROWS,
    Bounds(1, ALL_FAULTS, deliveries=1),
    probes=GROUP_PROBES,
    feeds=2,
    group=True,
)
GROUP_REORDERED = replace(IN_GROUP, name="a group's answers out of order", bounds=Bounds(1, ("crash",), reorders=2))
GROUP_DAMAGED = replace(IN_GROUP, name="damage in a group", bounds=Bounds(1, ("damage",), reorders=1))
GROUP_ZOMBIE = replace(
    IN_GROUP, name="a group with two workers", bounds=Bounds(0, (), switches=2), new_disk_at_end=True
)
GROUP_REFUSED = replace(
    IN_GROUP,
    name="a group's refused records",
    input=(("a", 0), ("B", 1), ("C", 2), ("c", 3), ("b", 4), ("D", 5), ("a", 6), ("b", 7)),
    bounds=Bounds(1, ("crash", "lost")),
)
GROUP_ZOMBIE_REFUSED = replace(
    IN_GROUP,
    name="a group with two workers, a refused record",
    input=(("a", 0), ("B", 1), ("c", 2), ("d", 3)),
    bounds=Bounds(0, (), switches=1, reorders=1),
)
GROUP_SPLIT = replace(IN_GROUP, name="a group is split", bounds=Bounds(1, ("regroup",), switches=2))
GROUP_SPLIT_REFUSED = replace(
    GROUP_SPLIT, name="a group is split, a refused record", input=(("a", 0), ("B", 1), ("a", 2)), most_records=1
)
# With transactions of version 1, partitions and groups are announced, and an epoch has many transactions.
ANSWERS_ANNOUNCED = replace(ANSWERS, name="any fault, version 1", implicit=False)
DELAYED_ANNOUNCED = replace(DELAYED, name="delayed requests, version 1", implicit=False)
ZOMBIE_ANNOUNCED = replace(ZOMBIE, name="two workers, version 1", implicit=False)
IN_GROUP_ANNOUNCED = replace(IN_GROUP, name="two partitions in a group, version 1", implicit=False)
# Before Kafka 3.6, only an epoch that is newer in the log rejects a batch of a transaction that has ended.
ANSWERS_UNVERIFIED = replace(ANSWERS_ANNOUNCED, name="any fault, before Kafka 3.6", verifies=False)
DELAYED_UNVERIFIED = replace(DELAYED_ANNOUNCED, name="delayed requests, before Kafka 3.6", verifies=False)
ZOMBIE_UNVERIFIED = replace(ZOMBIE_ANNOUNCED, name="two workers, before Kafka 3.6", verifies=False)
# Small batches wait for the commit, as in a worker.
ANSWERS_HELD = replace(ANSWERS, name="any fault, batches sent with the commit", batch_bytes=1 << 16)
GROUP_REFUSED_HELD = replace(
    GROUP_REFUSED, name="a group's refused records, batches sent with the commit", batch_bytes=1 << 16
)
PUT_OFF = Scenario("the previous transaction ends late", PLAIN, Bounds(2, ("markers", "again")), most_records=1)
# Every schedule with at most two faults or preemptions is run (CHESS, Musuvathi and Qadeer 2007).
SMALL = Scenario(
    "all of a small group",
    (("a", 0), ("B", 1), ("a", 2)),
    Bounds(2, ("crash", "lost", "late", "damage", "regroup"), switches=2, reorders=2, together=2, deliveries=2),
    probes=(("a", 3), ("c", 3)),
    feeds=2,
    group=True,
    most_records=1,
)

ENUMERATED = (
    CRASHES,
    DAMAGED,
    CLOCKS,
    GROWTH,
    CRASHES_TWICE,
    ANSWERS,
    REORDERED,
    EXPIRY,
    STREAM_TIME,
    EXTENDED,
    REFUSED,
    ZOMBIE,
    ZOMBIE_LIVES,
    ZOMBIE_KILLED,
    ZOMBIE_REFUSED,
    STALE_OFFSETS,
    NO_OFFSETS,
    SEEDER,
    DELAYED,
    TWO_HOPS,
    ADDED,
    CHANGED,
    CHANGED_TWO_HOPS,
    DAMAGED_IN_COMMIT,
    TWO_HOPS_REFUSED,
    IN_GROUP,
    GROUP_REORDERED,
    GROUP_DAMAGED,
    GROUP_ZOMBIE,
    GROUP_REFUSED,
    GROUP_ZOMBIE_REFUSED,
    GROUP_SPLIT,
    GROUP_SPLIT_REFUSED,
    ANSWERS_ANNOUNCED,
    DELAYED_ANNOUNCED,
    ZOMBIE_ANNOUNCED,
    IN_GROUP_ANNOUNCED,
    ANSWERS_UNVERIFIED,
    DELAYED_UNVERIFIED,
    ZOMBIE_UNVERIFIED,
    ANSWERS_HELD,
    GROUP_REFUSED_HELD,
    PUT_OFF,
)

_WIDER: Mapping[Scenario, Bounds] = {
    CRASHES: Bounds(2, ("crash",)),
    DAMAGED: Bounds(3, ("crash", "torn", "damage", "stale")),
    CLOCKS: Bounds(2, ("clock", "crash", "lost")),
    ANSWERS: Bounds(1, ALL_FAULTS, reorders=1, deliveries=1),
    EXPIRY: Bounds(2, ("crash",)),
    REFUSED: Bounds(1, ("crash", "lost", "late"), reorders=1, deliveries=1),
    ZOMBIE: Bounds(0, (), switches=3),
    ZOMBIE_KILLED: Bounds(1, ("crash", "lost"), switches=2),
    ZOMBIE_REFUSED: Bounds(0, (), switches=2),
    SEEDER: Bounds(2, ("crash", "wipe")),
    DELAYED: Bounds(2, ("late",), deliveries=2),
    TWO_HOPS: Bounds(1, (*ALL_FAULTS, "rebalance"), reorders=1, deliveries=1),
}
WIDE = tuple(replace(scenario, bounds=_WIDER.get(scenario, scenario.bounds)) for scenario in ENUMERATED)
