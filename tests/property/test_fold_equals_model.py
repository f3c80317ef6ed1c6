"""The fast fold, batch by batch over dropped segments, gives the verdicts of the exact model, record by record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.core.extract import Extracted, Fault, FaultKind
from dedup.core.fold import OnConflict, OnFuture, OnMissing, OnTombstone, Outcome, Rows, Rules, fold
from dedup.core.reference_model import ModelRecord, ModelRules, ModelVerdict, model
from dedup.core.window import Feed, Sighting, Source, StreamTime, Window
from dedup.errors import RecordFailed

FAULTS = {
    "missing_id": FaultKind.MISSING_ID,
    "unreadable": FaultKind.UNREADABLE,
    "tombstone": FaultKind.TOMBSTONE,
    "bad_time": FaultKind.BAD_TIME,
}
Line = tuple[str, str, int, int, int, bytes | None]
"""Verdict, reason, event time as judged, stream time after it, first time and source of what it repeats."""


@dataclass
class State:
    """Segments as a store keeps them: a write replaces all of an ID's sightings in a segment; segments go whole."""

    window: Window
    longest_only: bool
    segments: dict[int, dict[bytes, tuple[Sighting, ...]]] = field(default_factory=dict)

    def lookup(self, ids: Sequence[bytes], least_ms: int) -> Mapping[bytes, tuple[Sighting, ...]]:
        """As the worker asks: only segments that the guard period can reach from the batch's times."""
        window = self.window
        reachable = [
            values
            for start, values in sorted(self.segments.items())
            if start + window.segment_ms > least_ms - window.guard_ms
        ]
        found: dict[bytes, tuple[Sighting, ...]] = {}
        for key in ids:
            known = [seen for values in reachable for seen in values.get(key, ())]
            if self.longest_only:
                longest: dict[object, Sighting] = {}
                for seen in known:
                    name = (seen.first_ms, seen.source, seen.fingerprint)
                    longest[name] = max(seen, longest.get(name, seen), key=lambda each: each.last_ms)
                known = list(longest.values())
            if known:
                found[key] = tuple(known)
        return found

    def apply(self, rows: Rows, outcome: Outcome) -> None:
        """Write what a batch leaves, then drop what is wholly below the applied stream time."""
        for row in outcome.singles:
            time_ms = outcome.judged_times_ms[row]
            fingerprints = rows.extracted.fingerprints
            seen = Sighting(time_ms, time_ms, rows.source(row), b"" if fingerprints is None else fingerprints[row])
            key = rows.extracted.ids[row]
            assert key is not None
            self.segments.setdefault(self.window.segment_of(time_ms), {})[key] = (seen,)
        for (segment, key), sightings in outcome.rewritten.items():
            self.segments.setdefault(segment, {})[key] = sightings

    def drop(self, stream_time_ms: int) -> None:
        """Drop segments as a store does."""
        for start in list(self.segments):
            if start + self.window.segment_ms <= self.window.oldest_live_ms(stream_time_ms):
                del self.segments[start]


@dataclass(frozen=True)
class Case:
    """A random stream with its rules, cut into batches."""

    rules: ModelRules
    fingerprints: bool
    feeds: tuple[Feed, ...]
    """The feeds of the beginning; records of others come, too, as if partitions had been added."""
    batches: tuple[tuple[ModelRecord, ...], ...]
    ceilings_ms: tuple[int, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    guard_ms = draw(st.integers(1, 12))
    extend = draw(st.booleans())
    rules = ModelRules(
        guard_ms,
        draw(st.integers(0, 12)),
        extend,
        draw(st.integers(guard_ms, 4 * guard_ms)) if extend else 0,
        draw(st.sampled_from(["dead_letter", "forward", "fail"])),
        draw(st.sampled_from(["forward", "dead_letter"])),
        draw(st.sampled_from(["duplicate", "forward", "fail"])),
        draw(st.sampled_from(["dead_letter", "clamp"])),
    )
    fingerprints = rules.on_conflict != "duplicate" or draw(st.booleans())
    feeds = draw(st.sampled_from([(Feed(0, 0),), (Feed(0, 0), Feed(0, 1)), (Feed(0, 0), Feed(1, 0), Feed(1, 3))]))
    added = draw(st.sampled_from([(), (), (Feed(0, 5),), (Feed(0, 5), Feed(1, 6))]))
    batches, ceilings_ms = [], []
    offset = 0
    base_ms = 0
    for _ in range(draw(st.integers(1, 6))):
        ceiling_ms = base_ms + draw(st.integers(15, 60))
        batch = []
        for _ in range(draw(st.integers(1, 12))):
            feed = draw(st.sampled_from(feeds + added))
            batch.append(
                draw(records(feed, offset, base_ms, fingerprints=fingerprints))._replace(ceiling_ms=ceiling_ms)
            )
            offset += 1
        batches.append(tuple(batch))
        ceilings_ms.append(ceiling_ms)
        base_ms += draw(st.integers(0, 15))
    return Case(rules, fingerprints, feeds, tuple(batches), tuple(ceilings_ms))


@st.composite
def records(draw: st.DrawFn, feed: Feed, offset: int, base_ms: int, *, fingerprints: bool) -> ModelRecord:
    source = Source(feed.topic, feed.partition, offset)
    shape = draw(st.integers(0, 19))
    if shape == 0:
        return ModelRecord(None, 0, source, fault=draw(st.sampled_from(sorted(FAULTS))))
    if shape == 1:
        return ModelRecord(None, 0, source, idle=True)
    time_ms = base_ms + draw(st.integers(-20, 40))
    fingerprint = draw(st.sampled_from([b"x" * 8, b"y" * 8])) if fingerprints else b""
    return ModelRecord(draw(st.sampled_from([b"a", b"b", b"c"])), time_ms, source, fingerprint)


def by_model(case: Case) -> list[Line]:
    verdicts = model([record for batch in case.batches for record in batch], case.rules, case.feeds)
    return [line_of(verdict) for verdict in verdicts]


def line_of(verdict: ModelVerdict) -> Line:
    of = verdict.of if verdict.kind == "duplicate" else None
    conflict = b"conflict" if verdict.conflict else None
    reason = verdict.reason if verdict.kind != "fail" else ""
    time_ms = verdict.time_ms if verdict.kind in {"unique", "duplicate", "late"} else 0
    behind_ms = verdict.stream_time_ms - verdict.time_ms if verdict.kind == "late" else 0
    return (verdict.kind, reason, time_ms, behind_ms, of.source.offset if of else -1, conflict)


def by_fold(case: Case) -> list[Line]:
    window = Window(case.rules.guard_ms, case.rules.grace_ms, case.rules.extend, case.rules.extend_at_most_ms)
    rules = Rules(
        window,
        OnMissing(case.rules.missing),
        OnTombstone(case.rules.tombstones),
        OnFuture(case.rules.future),
        OnConflict(case.rules.on_conflict),
        case.fingerprints,
        ("t0", "t1", "t2"),
    )
    state = State(window, longest_only=window.extend)
    stream_time = StreamTime.before(case.feeds)
    lines: list[Line] = []
    for batch, ceiling_ms in zip(case.batches, case.ceilings_ms, strict=True):
        rows = columns_of(batch, case)
        try:
            outcome = fold(rows, rules, stream_time, state.lookup, ceiling_ms=ceiling_ms)
        except RecordFailed:
            return [*lines, ("fail", "", 0, 0, -1, None)]
        stream_time = outcome.stream_time
        state.apply(rows, outcome)
        state.drop(stream_time.value_ms)
        lines += lines_of(outcome, rows)
    return lines


def columns_of(batch: Sequence[ModelRecord], case: Case) -> Rows:
    faults = {row: Fault(FAULTS[record.fault], record.fault, "") for row, record in enumerate(batch) if record.fault}
    extracted = Extracted(
        [record.id for record in batch],
        [record.time_ms for record in batch],
        [record.fingerprint for record in batch] if case.fingerprints else None,
        faults,
    )
    idle_rows = frozenset(row for row, record in enumerate(batch) if record.idle)
    feeds = [Feed(record.source.topic, record.source.partition) for record in batch]
    if len(set(feeds)) == 1 and not idle_rows:
        feeds = feeds[:1]
    return Rows(extracted, [record.source.offset for record in batch], feeds, idle_rows)


def lines_of(outcome: Outcome, rows: Rows) -> list[Line]:
    """One line a row; a row with two verdicts, or none, is a defect."""
    times_ms = outcome.judged_times_ms
    lines: dict[int, Line] = dict.fromkeys(rows.idle_rows, ("marker", "", 0, 0, -1, None))
    found: list[tuple[int, Line]] = []
    for row in outcome.unique:
        conflict = b"conflict" if row in outcome.exempt else None
        found.append((row, ("unique", "", times_ms[row], 0, -1, conflict)))
    for row, exempt in outcome.exempt.items():
        if row not in outcome.unique:
            found.append((row, ("exempt", exempt, 0, 0, -1, None)))
    for row, of in outcome.all_duplicates(rows):
        found.append((row, ("duplicate", "", times_ms[row], 0, of.source.offset, None)))
    for row, of in outcome.conflicts:
        found.append((row, ("duplicate", "", times_ms[row], 0, of.source.offset, b"conflict")))
    found += [(row, ("late", "", times_ms[row], late.behind_ms, -1, None)) for row, late in outcome.late]
    found += [(row, ("dead_letter", dead.code, 0, 0, -1, None)) for row, dead in outcome.dead]
    for row, line in found:
        assert row not in lines, f"row {row} has two verdicts: {lines[row]} and {line}"
        lines[row] = line
    assert sorted(lines) == list(range(len(rows.sources)))
    return [line for _, line in sorted(lines.items())]


@settings(max_examples=600, deadline=None)
@given(cases())
def test_fold_equals_the_model(case: Case) -> None:
    expected = by_model(case)
    actual = by_fold(case)
    if expected[-1][0] == "fail":
        # The fold fails a whole batch; the model says which record.
        assert actual[-1][0] == "fail"
        assert actual[:-1] == expected[: len(actual) - 1]
        assert len(actual) <= len(expected)
    else:
        assert actual == expected


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_verdicts_do_not_depend_on_where_batches_are_cut(case: Case, data: st.DataObject) -> None:
    if case.rules.missing == "fail" or case.rules.on_conflict == "fail":
        return
    stream = [record._replace(ceiling_ms=case.ceilings_ms[0]) for batch in case.batches for record in batch]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream)), max_size=6)) | {len(stream)})
    batches = tuple(tuple(stream[start:end]) for start, end in zip([0, *cuts[:-1]], cuts, strict=True))
    other = Case(case.rules, case.fingerprints, case.feeds, batches, case.ceilings_ms[:1] * len(batches))
    assert by_fold(other) == by_model(other)


def test_a_policy_fail_says_where_and_why():
    feed = Feed(0, 2)
    fault = Fault(FaultKind.MISSING_ID, "id_null", "id is null")
    rows = Rows(Extracted([None], [0], None, {0: fault}), [7], (feed,))
    rules = Rules(Window(10, 10), missing=OnMissing.FAIL, source_topics=("in",))
    with pytest.raises(RecordFailed, match=r"in/2/7: id is null\. The topology says `missing: fail`\. "):
        fold(rows, rules, StreamTime.before([feed]), lambda _ids, _least_ms: {}, ceiling_ms=100)
