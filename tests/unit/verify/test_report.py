"""The report's chart over event time: what has no event time is told in words, and moves no axis."""

from __future__ import annotations

import json
import re
from html import escape

import pytest

from dedup.core.fold import OnMissing
from dedup.core.window import Window
from dedup.verify.render import to_html
from dedup.verify.report import BY_THE_TOPOLOGY_NOW, Books, Report
from tests.unit.memory_cluster import (
    MemoryCluster,
    at,
    cluster_of,
    dead_letter,
    origin,
    run_of,
    topology_of,
    value_of,
    verified,
    wrong,
)

WORDS = "Records without a usable event time, which are not in the chart:"


def test_tombstones_and_dead_letters_without_a_time_put_no_1970_on_the_axis() -> None:
    topology = topology_of()
    cluster = cluster_of(topology)
    cluster.put("x-in", value_of("a"), at(0))
    cluster.put("x-out", value_of("a"), at(0))
    cluster.put("x-in", None, at(1))
    cluster.put("x-out", None, at(1), [("dedup-verdict", b"tombstone")])
    # Without JSON, without an ID, before 1970, and long after today.
    faults = (
        (b"no json", 2, "not_json"),
        (b"{}", 3, "id_missing"),
        (value_of("b"), -at(0) / 1000 - 5, "negative_time"),
        (value_of("c"), 8_000_000_000, "future_time"),
    )
    for offset, (value, second, reason) in enumerate(faults, start=2):
        time_ms = at(second)
        cluster.put("x-in", value, time_ms)
        dead_letter(cluster, value, offset, second, reason, 10)
    cluster.commit("x-in")
    report = verified(cluster, topology)
    assert wrong(report) == {}, report.samples
    assert report.timeline.counts == {at(0): [1, 0, 0, 0]}
    assert report.timeline.undated == {"exempt": 1, "dead_letters": 4}
    page = to_html(report)
    assert f"{WORDS} exempt 1, dead letters 4." in page
    years = set(re.findall(r">(\d{4})-\d\d-\d\d ", page))
    assert "1970" not in years
    assert json.loads(report.to_json())["timeline"]["undated"] == {"exempt": 1, "dead_letters": 4}


def test_a_dead_letter_with_a_time_is_in_the_picture() -> None:
    topology = topology_of()
    cluster = cluster_of(topology)
    cluster.put("x-in", value_of("a"), at(0))
    dead_letter(cluster, value_of("a"), 0, 0, "refused_by_broker", 1)
    cluster.commit("x-in")
    report = verified(cluster, topology)
    assert (report.timeline.counts, report.timeline.undated) == ({at(0): [0, 0, 0, 1]}, {})
    assert WORDS not in to_html(report)


def test_where_nothing_has_a_time_the_page_says_so_in_place_of_a_picture() -> None:
    report = Report("x", "memory", "replay", 0, books=[Books("x-in", 0, read=1, dead_letters=1)])
    report.timeline.add("dead_letters", None)
    page = to_html(report)
    assert f"{WORDS} dead letters 1." in page
    assert "aria-label='Verdicts over event time'" not in page


def test_exempt_records_are_no_unique_ones_and_books_balance_with_them() -> None:
    topology = topology_of(missing=OnMissing.FORWARD)
    cluster = cluster_of(topology)
    for second, (value, why) in enumerate(((value_of("a"), ""), (b"{}", "missing_id"), (None, "tombstone"))):
        cluster.put("x-in", value, at(second))
        cluster.put("x-out", value, at(second), [("dedup-verdict", why.encode())] if why else [])
    cluster.commit("x-in")
    report = verified(cluster, topology)
    (books,) = report.books
    assert (wrong(report), books.unique, books.exempt, books.balanced) == ({}, 1, 2, True)
    assert "<th>exempt</th>" in to_html(report)


@pytest.mark.parametrize(
    ("before", "now", "rows", "belongs", "found"),
    [
        ((10, 10), (20, 10), [("a", 0), ("a", 15)], "UU", {"duplicated", "unbalanced"}),
        ((10, 10), (5, 10), [("a", 0), ("a", 7)], "UD", {"lost", "unbalanced"}),
        ((10, 10), (10, 30), [("a", 40), ("b", 20)], "UL", {"wrong_late"}),
        ((10, 10), (10, 5), [("a", 40), ("b", 32)], "UU", {"lost", "phantom"}),
    ],
)
def test_a_window_changed_in_place_is_judged_by_the_file_that_is_given_and_the_page_says_so(
    before: tuple[int, int], now: tuple[int, int], rows: list[tuple[str, float]], belongs: str, found: set[str]
) -> None:
    then, later = (topology_of(window=Window(guard_s * 1000, grace_s * 1000)) for guard_s, grace_s in (before, now))
    cluster = run_of(then, rows, belongs)
    report = verified(cluster, then)
    assert (wrong(report), BY_THE_TOPOLOGY_NOW in to_html(report)) == ({}, False)
    report = verified(cluster, later)
    assert wrong(report).keys() == found
    assert escape(BY_THE_TOPOLOGY_NOW) in to_html(report)


@pytest.mark.parametrize("direct", [True, False])
def test_pending_is_the_lag_of_every_feeding_partition(direct: bool) -> None:
    topology = topology_of(direct=direct)
    cluster = _judged(direct=direct)
    feeding = ["x-in"] if direct else ["x-in", "x.repartition"]
    # Markers alone are nothing to wait for.
    for topic in feeding:
        cluster.markers[topic, 0] = 2
    assert sum(books.pending for books in verified(cluster, topology).books) == 0
    # Records are, and so is what an open transaction holds; markers between them count as offsets do.
    cluster.markers.clear()
    for number, topic in enumerate(feeding):
        for _ in range(3 + number):
            cluster.put(topic, value_of("late to come"), at(9), origin(1, at(9)) if number else [])
        cluster.markers[topic, 0] = 1
    pending = {(books.topic, books.partition): books.pending for books in verified(cluster, topology).books}
    wanted = {("x-in", 0): 4} if direct else {("x-in", 0): 4, ("x.repartition", 0): 5, ("x.repartition", 1): 0}
    assert pending == wanted


def _judged(*, direct: bool) -> MemoryCluster:
    cluster = cluster_of(topology_of(direct=direct))
    cluster.put("x-in", value_of("a"), at(0))
    cluster.put("x-out", value_of("a"), at(0))
    if not direct:
        cluster.put("x.repartition", value_of("a"), at(0), origin(0, at(0)))
    cluster.commit("x-in", *([] if direct else ["x.repartition"]))
    return cluster
