"""What a correct topology file becomes."""

from __future__ import annotations

import dataclasses

import pytest

from dedup.core.event_time import ArrivalTime, FieldTime, RecordTime
from dedup.core.fold import OnConflict, OnFuture, OnMissing, OnTombstone
from dedup.core.tracking_id import (
    CodeRule,
    ContentRule,
    FieldRule,
    FieldsRule,
    FirstOfRule,
    HeaderRule,
    KeyRule,
    Part,
    PartsRule,
    RawContentRule,
    TrackingId,
)
from dedup.core.window import Window
from dedup.errors import InvariantBroken
from dedup.topology.model import LateDrop, LateForward, LateTo, Topology, auto_group_size
from dedup.topology.parse import parse
from dedup.topology.schema import Output

HOUR_MS = 3_600_000


def topology(rule: str = "field: id", more: str = "", source: str = "topics: [clicks]", guard: str = "1h") -> Topology:
    text = f"dedup: 1\nname: t\nsource: {{{source}}}\ntracking_id: {{{rule}}}\nguard_period: {guard}\n{more}\n"
    return parse(text, name="t.yaml")


def test_the_defaults():
    made = topology()
    assert made.source.topics == ("clicks",)
    assert (made.source.format, made.source.start) == ("json", "earliest")
    assert made.window == Window(HOUR_MS, HOUR_MS)
    assert made.output is None
    assert made.late == LateTo("t.late")
    assert made.dead_letter == "t.dead-letter"
    assert made.event_time == RecordTime()
    assert (made.missing, made.tombstones) == (OnMissing.DEAD_LETTER, OnTombstone.FORWARD)
    assert (made.future, made.max_clock_skew_ms, made.idle_after_ms) == (OnFuture.DEAD_LETTER, HOUR_MS, 60_000)
    assert (made.duplicates, made.conflicts, made.on_conflict) == (None, None, OnConflict.DUPLICATE)
    assert (made.state.standby_replicas, made.state.max_bytes_per_partition) == (1, None)
    assert not made.fingerprints_wanted


def _no_code():
    raise AssertionError("a topology file was read, and code was imported")


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("key: true", KeyRule()),
        ("header: X-Id", HeaderRule("X-Id")),
        ("field: 'a.b[0].c'", FieldRule(("a", "b", 0, "c"))),
        ("""field: 'a["b.c"]'""", FieldRule(("a", "b.c"))),
        ("fields: [tenant, order.id]", FieldsRule((("tenant",), ("order", "id")))),
        (
            "parts: [{key: true}, {header: tenant, absent: as_value}, {field: order.id}]",
            PartsRule((Part(KeyRule()), Part(HeaderRule("tenant"), True), Part(FieldRule(("order", "id"))))),
        ),
        ("content: {exclude: [sent_at]}", ContentRule((("sent_at",),))),
        ("content: {exclude: []}", ContentRule()),
        ("content: true", RawContentRule()),
        (
            "first_of: [{header: X-Id}, {parts: [{key: true}]}, {content: {exclude: [sent_at]}}]",
            FirstOfRule((HeaderRule("X-Id"), PartsRule((Part(KeyRule()),)), ContentRule((("sent_at",),)))),
        ),
        ("python: ids:order_id", CodeRule("ids:order_id", 1, _no_code)),
        ("python: {function: shop.ids:order_id, version: 3}", CodeRule("shop.ids:order_id", 3, _no_code)),
        (
            "first_of: [{header: X-Id}, {python: ids:order_id}]",
            FirstOfRule((HeaderRule("X-Id"), CodeRule("ids:order_id", 1, _no_code))),
        ),
    ],
)
def test_the_tracking_id_rules(written, rule):
    assert topology(written).tracking_id == TrackingId(rule)


@pytest.mark.parametrize(
    ("written", "direct"),
    [
        ("parts: [{key: true}, {field: id}]", True),
        ("parts: [{key: true, absent: as_value}, {field: id}]", False),
        ("parts: [{header: h}, {field: id}]", False),
        ("parts: [{key: true}, {field: id}], normalize: [trim]", False),
        ("first_of: [{parts: [{key: true}, {field: id}]}, {key: true}]", True),
        ("first_of: [{key: true}, {field: id}]", False),
    ],
)
def test_equal_keys_are_in_one_partition(written, direct):
    """So parts with the key need no repartition topic, unless different keys may give equal IDs."""
    assert topology(written).direct is direct


def test_normalizing_keeps_its_order():
    assert topology("field: id, normalize: [nfc, lower, trim]").tracking_id.normalize == ("nfc", "lower", "trim")


@pytest.mark.parametrize(
    ("written", "ms"),
    [
        ("1ms", 1),
        ("2s", 2_000),
        ("15m", 900_000),
        ("24h", 86_400_000),
        ("7d", 604_800_000),
        ("36500d", 3_153_600_000_000),
    ],
)
def test_durations(written, ms):
    assert topology(guard=written).window.guard_ms == ms


def test_grace_may_be_nothing():
    assert topology(more="grace: 0s").window.grace_ms == 0


def test_extending_is_capped_at_seven_guard_periods_unless_said_otherwise():
    assert topology(more="extend: true").window.extend_at_most_ms == 7 * HOUR_MS
    assert topology(more="extend: true\nextend_at_most: 2h").window.extend_at_most_ms == 2 * HOUR_MS
    assert topology(more="extend_at_most: 2h").window == Window(HOUR_MS, HOUR_MS)


@pytest.mark.parametrize(
    ("written", "late"), [("forward", LateForward()), ("drop", LateDrop()), ("too.late", LateTo("too.late"))]
)
def test_late(written, late):
    assert topology(more=f"late: {written}").late == late


def test_side_topics_are_named_after_the_output():
    made = topology(more="output: {topic: out, headers: true}")
    assert made.output == Output(topic="out", headers=True)
    assert (made.late, made.dead_letter) == (LateTo("out.late"), "out.dead-letter")


def test_event_time():
    made = topology(more="event_time: {field: a.ts, unit: us}")
    assert made.event_time == FieldTime(("a", "ts"), "us")
    assert not made.by_arrival


def test_the_event_time_may_be_the_append_time():
    made = topology(more="event_time: arrival")
    assert made.event_time == ArrivalTime() != RecordTime()
    assert made.by_arrival
    assert '"event_time":"arrival"' in made.state_identity({})
    assert not topology("key: true", more="event_time: arrival").needs_value


def test_start_may_be_a_time():
    assert topology(source="topics: [c], start: '2024-01-31T00:00:00Z'").source.start == 1_706_659_200_000
    assert topology(source="topics: [c], start: latest").source.start == "latest"


def test_conflicts_by_topic_or_with_excluded_members():
    assert topology(more="conflicts: c").conflicts == "c"
    made = topology(more="conflicts: {topic: c, exclude: [sent_at, a.b]}")
    assert (made.conflicts, made.compared) == ("c", ContentRule((("sent_at",), ("a", "b"))))
    assert made.fingerprints_wanted
    assert topology(more="on_conflict: fail").fingerprints_wanted


@pytest.mark.parametrize(
    ("written", "compared"),
    [("{}", None), ("{exclude: []}", ContentRule()), ("{exclude: [sent_at]}", ContentRule((("sent_at",),)))],
)
def test_conflicts_without_a_topic_are_counted(written, compared):
    made = topology(more=f"conflicts: {written}")
    assert (made.conflicts, made.compared) == (None, compared)
    assert made.fingerprints_wanted
    assert made.rules.fingerprints
    assert made.conflicts_go_to is None
    assert topology(more=f"duplicates: d\nconflicts: {written}").conflicts_go_to == "d"
    assert topology(more="duplicates: d\nconflicts: c").conflicts_go_to == "c"


def test_state():
    made = topology(more="state: {standby_replicas: 0, max_bytes_per_partition: 20GiB}")
    assert (made.state.standby_replicas, made.state.max_bytes_per_partition) == (0, 20 << 30)


@pytest.mark.parametrize(
    ("rule", "source", "direct"),
    [
        ("field: id", "topics: [c]", False),
        ("field: id", "topics: [c], partitioned_by: tracking_id", True),
        ("key: true", "topics: [c]", True),
        ("key: true", "topics: [c, d]", False),
        ("field: id", "topics: [c, d], partitioned_by: tracking_id", False),
        # "A" and "a" may be in two partitions, though the topology calls them equal.
        ("key: true, normalize: [lower]", "topics: [c]", False),
        ("key: true, normalize: [lower]", "topics: [c], partitioned_by: tracking_id", True),
    ],
)
def test_where_ids_meet(rule, source, direct):
    made = topology(rule, source=source)
    assert made.direct is direct
    assert made.feeding_topics == (("c",) if direct else ("t.repartition",))
    assert ("t.repartition" in made.written_topics) is not direct


def test_transactional_ids():
    made = topology(more="transactions: {partitions: 1}")
    assert made.transactional_id("dedup", 3) == "t.dedup.3"
    assert made.transactional_id("repartition", 3, "clicks") == "t.repartition.clicks.3"
    assert made.transactional_id("dedup", 7, size=4) == "t.dedup.g1"


def test_partitions_that_share_a_transaction_share_its_id():
    made = topology(more="transactions: {partitions: 4}")
    assert [made.transactional_id("dedup", number) for number in (0, 3, 4)] == [
        "t.dedup.g0",
        "t.dedup.g0",
        "t.dedup.g1",
    ]
    assert made.transactional_id("repartition", 9, "clicks") == "t.repartition.clicks.g2"
    assert "t.layout" in made.written_topics


def test_auto_is_no_number_before_the_cluster_was_asked():
    made = topology()
    assert made.transactions.partitions == "auto"
    with pytest.raises(InvariantBroken, match="was not read"):
        made.transactional_id("dedup", 0)
    assert made.grouped_by(2).group_size == 2


@pytest.mark.parametrize(("partitions", "size"), [(1, 1), (16, 1), (17, 3), (64, 8), (256, 32), (512, 64), (1_024, 64)])
def test_what_auto_chooses_for_a_new_topology(partitions, size):
    assert auto_group_size(partitions) == size


def test_the_rules_of_the_fold():
    made = topology("field: id, missing: forward, tombstones: dead_letter", "future: clamp\non_conflict: forward")
    rules = made.rules
    assert (rules.window, rules.missing, rules.tombstones) == (made.window, OnMissing.FORWARD, OnTombstone.DEAD_LETTER)
    assert (rules.future, rules.on_conflict, rules.fingerprints) == (OnFuture.CLAMP, OnConflict.FORWARD, True)


PARTITIONS = {"clicks": 4, "t.repartition": 4}


class TestStateFingerprint:
    base = topology()

    def test_it_has_16_bytes_and_is_frozen(self):
        # State in the world carries this value: with another one every worker would refuse its own state.
        assert self.base.state_fingerprint(PARTITIONS).hex() == "4b945373976d36dc55c27c0c188f4187"

    @pytest.mark.parametrize(
        ("more", "value"),
        [
            ("conflicts: c", "5c2f8359a24e642c1ab780b883a9fd38"),
            ("conflicts: {topic: c, exclude: [sent_at]}", "ad9408e536a6dc5fe741f126648d29e4"),
            ("on_conflict: forward", "5c2f8359a24e642c1ab780b883a9fd38"),
            ("on_conflict: fail\nconflicts: {exclude: [a]}", "4ca2769a1ffdf2a2f8b296afe90d9cab"),
            # Counted only, they need the same state as with a topic.
            ("conflicts: {}", "5c2f8359a24e642c1ab780b883a9fd38"),
        ],
    )
    def test_it_is_frozen_with_payloads_too(self, more, value):
        assert topology(more=more).state_fingerprint(PARTITIONS).hex() == value

    @pytest.mark.parametrize(
        "other",
        [
            topology("field: other"),
            topology("field: id, normalize: [trim]"),
            topology(source="topics: [clacks]"),
            topology(source="topics: [clicks, clacks]"),
            topology(source="topics: [clicks], partitioned_by: tracking_id"),
            topology(more="event_time: {field: ts, unit: ms}"),
            topology(more="event_time: arrival"),
            topology(more="conflicts: c"),
        ],
    )
    def test_what_makes_state_useless_changes_it(self, other):
        assert other.state_fingerprint(PARTITIONS) != self.base.state_fingerprint(PARTITIONS)

    def test_partition_counts_change_it(self):
        assert self.base.state_fingerprint({"clicks": 8, "t.repartition": 4}) != self.base.state_fingerprint(PARTITIONS)

    @pytest.mark.parametrize(
        "other",
        [
            topology(guard="2h"),
            topology(more="grace: 5m\nextend: true"),
            topology("field: id, missing: fail"),
            # IDs and fingerprints of payloads are those of the JSON behind the framing.
            topology(source="topics: [clicks], format: json_schema, schema_id: header"),
            topology(more="output: {topic: o}\nlate: drop\nduplicates: d"),
        ],
    )
    def test_what_state_survives_does_not(self, other):
        assert other.state_fingerprint(PARTITIONS) == self.base.state_fingerprint(PARTITIONS)


def test_a_topology_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology().name = "other"
    assert topology() == topology()
