"""The verifier judges most records at a glance; the exact model, record by record, comes to the same."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.core.reference_model import ModelRules
from dedup.core.window import Source
from dedup.topology.model import extractor_of
from dedup.topology.parse import parse
from dedup.verify.evidence import Filed, SideTopic
from dedup.verify.replay import Plan, Row, TaskReplay
from dedup.verify.report import Books, Report

TEXT = """
dedup: 1
name: t
source: {topics: [in], partitioned_by: tracking_id}
tracking_id: {field: id}
guard_period: 10s
output: {topic: out}
"""


class Glanceless(TaskReplay):
    """Every record is judged by the model."""

    def _judged_at_a_glance(self, _: Row) -> bool:
        return False


def plan_of(guard_ms: int, grace_ms: int, directory: str) -> Plan:
    topology = parse(TEXT, name="t.yaml")
    sides = [SideTopic(name, directory) for name in ("late", "dead")]
    return Plan(topology, ModelRules(guard_ms, grace_ms), extractor_of(topology), sides[0], sides[1])


@st.composite
def logs(draw: st.DrawFn) -> list[Row]:
    stream_ms, rows = -(1 << 62), []
    filed = Filed(b"d", b"", "", 0, 0)
    for position in range(draw(st.integers(1, 25))):
        time_ms = position + draw(st.integers(-12, 6))
        before_ms, stream_ms = stream_ms, max(stream_ms, time_ms)
        kind = draw(st.sampled_from([*["plain"] * 8, "fault", "pending", "late", "doubt", "replayed"]))
        rows.append(
            Row(
                position,
                Source(0, 0, position),
                b"k",
                b"=v%d" % position,
                (),
                time_ms,
                None if kind == "fault" else draw(st.sampled_from([b"a", b"b", b"c"])),
                time_ms,
                draw(st.sampled_from([b"x", b"x", b"x", b"y"])),
                "unreadable" if kind == "fault" else None,
                "not_json" if kind == "fault" else "",
                kind == "pending",
                kind == "replayed",
                before_ms,
                stream_ms,
                time_ms if kind == "doubt" else None,
                False,
                filed if kind == "late" else None,
                None,
            )
        )
    return rows


def replayed(kind: type[TaskReplay], rows: list[Row], plan: Plan) -> dict[str, Any]:
    books, report = Books("in", 0), Report("t", "", "", 0)
    task = kind(plan, books, report, ((0, 0),))
    task.take(rows[: len(rows) // 2])
    task.take(rows[len(rows) // 2 :])
    return {
        "forwarded": task.forwarded,
        "copies": task.copies,
        "uncertain": task.uncertain,
        "books": asdict(books),
        "report": asdict(report),
    }


@settings(max_examples=500, deadline=None)
@given(logs(), st.integers(1, 12), st.integers(0, 12))
def test_a_glance_comes_to_what_the_model_says(rows: list[Row], guard_ms: int, grace_ms: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        plan = plan_of(guard_ms, grace_ms, directory)
        found = replayed(TaskReplay, rows, plan)
        assert found == replayed(Glanceless, rows, plan)
        for side in plan.sides:
            side.close()
