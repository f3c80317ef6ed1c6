"""The verifier judges most records at a glance; the exact model, record by record, comes to the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.core.reference_model import ModelRules
from dedup.core.window import Source
from dedup.topology.model import extractor_of
from dedup.topology.parse import parse
from dedup.verify.evidence import Filed, SideTopic
from dedup.verify.log_scan import Log, Odd, Plan, Row
from dedup.verify.replay import TaskReplay
from dedup.verify.report import Books, Report

TEXT = """
dedup: 1
name: t
source: {topics: [in], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 10s
output: {topic: out}
duplicates: out.duplicates
"""
IDS = [b"%d" % number for number in range(12)]
WITH_CONFLICTS = f"{TEXT}conflicts: out.conflicts\n"
WITH_HEADERS = TEXT.replace("{topic: out}", "{topic: out, headers: true}")
WITHOUT_COPIES = TEXT.replace("duplicates: out.duplicates\n", "")
TEXTS = (TEXT, WITH_CONFLICTS, WITH_HEADERS, WITHOUT_COPIES)
RULES = st.builds(
    ModelRules,
    st.integers(1, 12),
    st.integers(0, 12),
    extend=st.booleans(),
    extend_at_most_ms=st.integers(0, 30),
    on_conflict=st.sampled_from(["duplicate", "forward", "fail"]),
)


class Glanceless(TaskReplay):
    """Every record is judged by the model."""

    def _at_a_glance(self, log: Log) -> npt.NDArray[np.bool_]:
        return np.zeros(len(log.ids), bool)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Plan]]:
    """Yield the plan of each topology. The side topics are empty: each record's `Odd` says what is in them."""
    sides = [SideTopic(name, str(tmp_path_factory.mktemp(name))) for name in ("late", "dead")]
    topologies = {text: parse(text, name="t.yaml") for text in TEXTS}
    yield {text: Plan(each, ModelRules(1, 1), extractor_of(each), *sides) for text, each in topologies.items()}
    for side in sides:
        side.close()


@st.composite
def logs(draw: st.DrawFn) -> list[Row]:
    stream_ms, rows = -(1 << 62), []
    filed = Filed(b"d", b"", "", 0, 0)
    for position in range(draw(st.integers(1, 25))):
        time_ms = position + draw(st.integers(-12, 6))
        before_ms, stream_ms = stream_ms, max(stream_ms, time_ms)
        kind = draw(st.sampled_from([*["plain"] * 8, "fault", "pending", "late", "doubt", "replayed"]))
        odd = Odd(
            "unreadable" if kind == "fault" else None,
            "not_json" if kind == "fault" else "",
            kind == "pending",
            kind == "replayed",
            before_ms,
            time_ms if kind == "doubt" else None,
            late=filed if kind == "late" else None,
        )
        rows.append(
            Row(
                position,
                Source(0, 0, position),
                b"v%d" % position,
                draw(st.sampled_from([(), (), (), (("trace", b"t"),)])),
                time_ms,
                None if kind == "fault" else draw(st.sampled_from(IDS)),
                time_ms,
                draw(st.sampled_from([b"x", b"x", b"x", b"y"])),
                stream_ms,
                odd,
            )
        )
    return rows


def columns_of(rows: list[Row]) -> Log:
    """Return the rows as a spill gives them back; a record that is not odd in any way has no `Odd`."""
    log = Log.of(*rows)
    plain = Odd()
    odd = [None if each is None or each._replace(before_ms=plain.before_ms) == plain else each for each in log.odd]
    spill = Log.spill(tempfile.gettempdir(), 1)
    spill.add(np.zeros(len(rows), np.int64), log._replace(odd=odd))
    try:
        return Log(*spill.bucket(0))
    finally:
        spill.close()


def replayed(kind: type[TaskReplay], rows: list[Row], plan: Plan) -> dict[str, Any]:
    books, report = Books("in", 0), Report("t", "", "", 0)
    task = kind(plan, books, report, ((0, 0),))
    task.take(columns_of(rows))
    return {
        "forwarded": task.forwarded.one_by_one(),
        "copies": {topic: expected.one_by_one() for topic, expected in task.copies.items()},
        "uncertain": task.uncertain,
        "books": asdict(books),
        "report": asdict(report),
    }


@settings(max_examples=500, deadline=None)
@given(logs(), RULES, st.sampled_from(TEXTS))
def test_a_glance_comes_to_what_the_model_says(
    plans: dict[str, Plan], rows: list[Row], rules: ModelRules, text: str
) -> None:
    plan = replace(plans[text], rules=rules)
    assert replayed(TaskReplay, rows, plan) == replayed(Glanceless, rows, plan)
