"""Each finding of the lint, and the files that have none of it."""

from __future__ import annotations

import pytest

from dedup.topology.describe import describe
from dedup.topology.lint import LARGEST_CHANGELOG_RECORD_BYTES, lint, worst_record_bytes
from dedup.topology.model import Topology
from dedup.topology.parse import parse

QUIET_RULE = "field: id, tombstones: dead_letter"
DIRECT = "topics: [c], partitioned_by: tracking_id"


def topology(rule: str = QUIET_RULE, more: str = "", source: str = DIRECT, guard: str = "1h") -> Topology:
    text = f"dedup: 1\nname: t\nsource: {{{source}}}\ntracking_id: {{{rule}}}\nguard_period: {guard}\n{more}\n"
    return parse(text, name="t.yaml")


def codes(made: Topology) -> list[str]:
    return [finding.code for finding in lint(made)]


def test_a_quiet_topology_has_no_findings():
    assert codes(topology(more="output: {topic: o}")) == []


def test_a_long_default_grace_is_a_warning_with_the_figures_of_size():
    (found,) = lint(topology(guard="7d", more="output: {topic: o}"))
    assert "takes up to 75.28 GiB of disk, and 37.86 GiB with grace: 1h" in found.text
    assert codes(topology(guard="7d", more="output: {topic: o}\ngrace: 1h")) == []
    assert codes(topology(guard="47h", more="output: {topic: o}")) == []


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (topology(more="late: forward"), "late_forwarded"),
        (topology(more="late: drop"), "late_dropped"),
        (topology("field: id, tombstones: dead_letter, missing: forward"), "missing_forwarded"),
        (topology("field: id"), "tombstones_forwarded"),
        (topology("fields: [a, b]"), "tombstones_forwarded"),
        (topology(more="on_conflict: forward"), "conflicts_forwarded"),
        (topology(more="on_conflict: forward\nconflicts: x"), "conflicts_unused"),
        (topology(more="on_conflict: fail\nconflicts: x"), "conflicts_unused"),
        (topology(more="grace: 0s"), "no_grace"),
        (topology(guard="2d"), "grace_doubles_state"),
        (topology(more="extend: true\nextend_at_most: 5m"), "cap_below_guard"),
        (topology(more="future: clamp"), "times_clamped"),
        (topology(more="max_clock_skew: 0s"), "no_clock_skew"),
        (topology(source=f"{DIRECT}, start: latest"), "start_latest"),
        (topology(source="topics: [c]"), "order_per_tracking_id"),
        (topology(source="topics: [c, d]"), "order_per_tracking_id"),
        (topology(source="topics: [c, d], partitioned_by: tracking_id"), "partitioned_by_unused"),
        (topology(f"{QUIET_RULE}, normalize: [lower]"), "normalized_after_partitioning"),
        (topology("key: true, normalize: [lower]", source="topics: [c]"), "normalized_keys_repartitioned"),
        (topology("content: {exclude: [a]}, tombstones: dead_letter, normalize: [lower]"), "normalize_unused"),
        (topology("content: true", "conflicts: x"), "no_conflicts_possible"),
        (topology("content: true"), "bytes_compared"),
        (topology("field: id, tombstones: dead_letter, missing: fail"), "missing_stops"),
        (topology(more="on_conflict: fail"), "conflict_stops"),
        (topology("key: true, tombstones: dead_letter"), "tombstones_unused"),
        (topology("python: shop_ids:of_order, tombstones: dead_letter"), "tombstones_unused"),
    ],
)
def test_a_warning(made, code):
    found = {finding.code: finding for finding in lint(made)}
    assert found[code].level == "warning"
    assert found[code].text.endswith(".")


@pytest.mark.parametrize(
    "written",
    [
        "late: dead_letter", "late: discard", "late: Forward", "late: DROP", "duplicates: drop", 'duplicates: "true"',
        "conflicts: Drop", "conflicts: {topic: ignore}", "dead_letter: dead-letter",
    ],
)  # fmt: skip
def test_a_word_where_a_topic_is_named_is_told(written):
    """Was: ok, and the records went to a topic of this name."""
    (found,) = [each for each in lint(topology(more=written)) if each.code == "word_as_topic"]
    assert (found.level, found.at) == ("warning", (written.partition(":")[0],))
    assert ("write forward or drop" in found.text) == written.startswith("late")


def test_the_words_of_late_and_topics_with_other_names_are_not_told():
    for written in ("late: forward", "late: drop", "late: dropped", "dead_letter: t.drop", "conflicts: {}"):
        assert "word_as_topic" not in codes(topology(more=written))


@pytest.mark.parametrize(
    ("rule", "more", "at", "meant"),
    [
        ("field: $.order.id", "", ("tracking_id", "field"), "order.id"),
        ("field: /order/id", "", ("tracking_id", "field"), "order.id"),
        ("fields: [a, '/b/0/c-d']", "", ("tracking_id", "fields", 1), "b[0].c-d"),
        ("first_of: [{header: h}, {field: '$[0].id'}]", "", ("tracking_id", "first_of", 1, "field"), "[0].id"),
        ("parts: [{key: true}, {field: $.id}]", "", ("tracking_id", "parts", 1, "field"), "id"),
        ("key: $.id", "", ("tracking_id", "key"), "id"),
        ("content: {exclude: [a, $.sent]}", "", ("tracking_id", "content", "exclude", 1), "sent"),
        ("field: id", "event_time: {field: $.at, unit: ms}", ("event_time", "field"), "at"),
        ("field: id", "conflicts: {exclude: [/sent]}", ("conflicts", "exclude", 0), "sent"),
        (
            "field: id",
            "output: {topic: o}\nsink: {url: 'sqlite:///f', table: t, columns: {a: $.id}}",
            ("sink", "columns", "a"),
            "id",
        ),
    ],
)
def test_a_json_path_or_a_json_pointer_is_told(rule, more, at, meant):
    """Was: ok, and every record became a dead letter."""
    source = f"{DIRECT}, key_format: json" if rule.startswith("key:") else DIRECT
    (found,) = [each for each in lint(topology(rule, more, source)) if each.at == at]
    assert (found.level, found.code) == ("warning", "path_notation")
    assert found.text.endswith(f"Unless the records have such a member, write {meant}.")


@pytest.mark.parametrize("rule", ["field: id", "field: $", "field: $id", "field: a.$.b", "field: a/b", "field: /"])
def test_other_paths_are_not_told(rule):
    assert "path_notation" not in codes(topology(rule))
    assert "path_notation" not in codes(topology("field: /id", source=f"{DIRECT}, format: csv, columns: [/id]"))


def test_a_sink_that_has_no_topic_to_read_is_an_error():
    """Was: ok, and `dedup sink` always failed."""
    written = "sink: {{url: 'sqlite:///x', table: t, columns: {{a: id}}{more}}}"
    (found,) = [each for each in lint(topology(more=written.format(more=""))) if each.level == "error"]
    assert (found.code, found.at) == ("sink_without_topic", ("sink",))
    assert "sink_without_topic" not in codes(topology(more=written.format(more=", topic: c")))
    assert "sink_without_topic" not in codes(topology(more=written.format(more="") + "\noutput: {topic: o}"))


@pytest.mark.parametrize("rule", ["key: true", "header: h"])
def test_tombstones_concern_ids_and_times_in_the_value_only(rule):
    assert "tombstones_forwarded" not in codes(topology(rule))
    assert "null value" not in describe(topology(rule))
    timed = topology(rule, "event_time: {field: t, unit: ms}")
    assert "tombstones_forwarded" in codes(timed)
    assert "null value" in describe(timed)


@pytest.mark.parametrize("more", ["", ", format: bytes"])
def test_the_bytes_of_a_null_value_are_no_id(more):
    made = topology("content: true", source=DIRECT + more)
    assert "tombstones_forwarded" in codes(made)
    assert "null value     forwarded, marked; outside the guarantee" in describe(made)
    assert "tombstones_forwarded" not in codes(topology("content: true, tombstones: dead_letter"))


@pytest.mark.parametrize(
    ("more", "said"), [("", "or member order makes"), (", format: json_schema", "or schema id makes")]
)
def test_raw_content_warns_of_what_makes_a_new_event(more, said):
    (found,) = [each for each in lint(topology("content: true", source=DIRECT + more)) if each.code == "bytes_compared"]
    assert said in found.text


@pytest.mark.parametrize(
    ("schema_id", "said"), [("auto", "header or prefix"), ("header", "header"), ("prefix", "prefix")]
)
def test_a_description_says_where_the_schema_id_is(schema_id, said):
    made = topology(source=f"{DIRECT}, format: json_schema, schema_id: {schema_id}")
    assert f"read, json_schema with the schema id in the {said}, from earliest" in describe(made)


def test_an_excluded_member_makes_conflicts_possible():
    assert "no_conflicts_possible" not in codes(topology("content: {exclude: [a]}", "conflicts: x"))


def test_what_forwards_outside_the_guarantee_names_the_header():
    made = topology("field: id, missing: forward", "late: forward\non_conflict: forward")
    outside = [finding for finding in lint(made) if finding.code.endswith("_forwarded")]
    assert len(outside) == 4
    assert all("dedup-verdict" in finding.text for finding in outside)


def test_a_grace_far_longer_than_the_guard_period_is_an_error():
    found = lint(topology(guard="1s", more="grace: 24h\nlate: drop"))
    assert [(finding.level, finding.code) for finding in found] == [
        ("error", "changelog_record_too_large"),
        ("warning", "late_dropped"),
    ]
    assert "grace 1d is too long for guard_period 1s" in found[0].text
    assert "1,036,848 bytes" in found[0].text


def test_the_bound_is_exact():
    # A segment is half the retention; each guard period in it may leave a sighting of 24 bytes, and two at the ends.
    most = LARGEST_CHANGELOG_RECORD_BYTES // 24 - 2
    fits = topology(guard="1ms", more=f"grace: {2 * most - 1}ms")
    assert worst_record_bytes(fits) == LARGEST_CHANGELOG_RECORD_BYTES
    assert codes(fits) == []
    over = topology(guard="1ms", more=f"grace: {2 * most + 1}ms")
    assert codes(over) == ["changelog_record_too_large"]


def test_payload_fingerprints_count():
    assert worst_record_bytes(topology(more="conflicts: x")) == 3 * 32
    assert worst_record_bytes(topology()) == 3 * 24
