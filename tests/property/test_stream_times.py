"""The verifier calculates stream time for many records at once; the exact model, record by record, says the same."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.core.reference_model import Feed, ModelRecord, ModelRules, ReferenceModel
from dedup.core.window import Source
from dedup.verify.log_scan import stream_times

FEEDS: tuple[Feed, ...] = ((0, 0), (0, 1), (1, 0), (1, 7))
Line = tuple[Feed, int, str]
"""Feed, event time, and what the record is."""
LINES = st.tuples(
    st.sampled_from(FEEDS),
    st.integers(-3, 60),
    st.sampled_from(["judged", "judged", "judged", "judged", "marker", "unjudged", "letter"]),
)


def by_model(model: ReferenceModel, lines: list[Line]) -> list[int]:
    found = []
    for feed, time_ms, kind in lines:
        source = Source(*feed, 0)
        if kind == "marker":
            model.judge(ModelRecord(None, 0, source, idle=True))
        elif kind == "unjudged":
            model.judge(ModelRecord(None, time_ms, source, fault="unreadable"))
        else:
            ceiling_ms = -1 if kind == "letter" else None  # so that the event time is in the future
            model.judge(ModelRecord(b"any", time_ms, source, ceiling_ms=ceiling_ms))
        found.append(model.stream_time_ms)
    return found


def at_once(model: ReferenceModel, lines: list[Line]) -> npt.NDArray[np.int64]:
    rows: dict[str, list[int]] = {kind: [] for kind in ("judged", "marker", "unjudged", "letter")}
    for row, (_, _, kind) in enumerate(lines):
        rows[kind].append(row)
    times_ms = np.array([0 if kind == "marker" else time_ms for _, time_ms, kind in lines], np.int64)
    feeds = [feed for feed, _, _ in lines]
    return stream_times(
        model, feeds, times_ms, idle_rows=rows["marker"], unjudged=rows["unjudged"], letters=rows["letter"]
    )


@settings(max_examples=500, deadline=None)
@given(st.lists(st.lists(LINES, max_size=12), max_size=5), st.integers(1, len(FEEDS)))
def test_stream_times_are_the_models(batches: list[list[Line]], declared: int) -> None:
    one, other = (ReferenceModel(ModelRules(5, 5), FEEDS[:declared]) for _ in range(2))
    for lines in batches:
        assert at_once(other, lines).tolist() == by_model(one, lines)
        assert other.stream_time_ms == one.stream_time_ms
        assert {feed: (other.greatest[feed], other.idle[feed]) for feed in other.greatest} == {
            feed: (one.greatest.get(feed, -(1 << 62)), one.idle.get(feed, True)) for feed in other.greatest
        }
